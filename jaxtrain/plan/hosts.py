"""The needs of a run's hosts: rows, open files, disk, memory, and the processes that join.

A host has one process. Each needs its part of the rows, holds its part of the state, writes its
part of a checkpoint and reads that once for the checksums, and reads its part in a restore. Process
0 also has a connection to each other process. Rates are those of this machine, measured for a
moment.
"""

import contextlib
import functools
import math
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import checkpointer, disk_usage
from jaxtrain.data import feed
from jaxtrain.parallel.cluster import rendezvous
from jaxtrain.plan import forecast
from jaxtrain.plan.memory import device_bytes, host_memory, in_bytes, offloaded
from jaxtrain.plan.target import Target
from jaxtrain.step import state as state_lib
from jaxtrain.telemetry.console import duration
from loaders import base
from loaders.io import files, machine

READING = 0.7  # [s] for which the loader's rows are counted
CHIPS_OF_TPU_HOST = 4
TRIED = 16 << 20  # [bytes] written and read on the disk
JOINING = 4e-3  # [s] of a process on loopback, of the rendezvous and JAX (docs/results/hosts.md)
AT_ONCE = 3  # times the largest array, that a restore holds of it while it reads
Finding = tuple[str, str, bool]  # name, finding, whether it is good


class Share(NamedTuple):
    """The part of one host, of `processes`."""

    processes: int
    devices: int
    checkpoint: int  # [bytes] of all hosts
    written: float  # [bytes] of a checkpoint
    held: int  # [bytes] of the saved state on its devices, replicas counted once
    largest: int  # [bytes] of an array's part on one device


def share(assembly: Assembly, target: Target) -> Share:
    processes, devices = _processes(target)
    abstract = assembly.abstract
    _, whole = checkpoints(assembly.config, abstract.state)
    held = largest = 0
    for x in jax.tree.leaves(_saved(abstract.state)):
        part = device_bytes(x, tiled=False)
        # Replicas on devices of one host are copied and read once.
        held += min(devices * part, x.size * np.dtype(x.dtype).itemsize)
        largest = max(largest, part)
    return Share(processes, devices, whole, whole / processes, held, largest)


def _processes(target: Target) -> tuple[int, int]:
    """Return the processes of a run, and the devices of each."""
    if target.here:
        return jax.process_count(), jax.local_device_count()
    chip, in_slice = target.known_chip, int(target.count) // target.slices
    chips_of_host = CHIPS_OF_TPU_HOST if target.tiled else chip.host
    devices = min(in_slice, chips_of_host * chip.devices)
    return target.slices * math.ceil(in_slice / devices), devices


def _saved(state: state_lib.TrainState) -> state_lib.TrainState:
    saved: state_lib.TrainState = state.replace(variables=state.variables._replace(frozen=()))
    return saved


def checkpoints(config: config_lib.Config, state: state_lib.TrainState) -> tuple[int, int]:
    """Return how many checkpoints a run holds at most, with the one in writing, and their bytes."""
    n_bytes = sum(x.size * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(_saved(state)))
    rules = config.checkpoint
    count = rules.keep + 1  # one more while it is written
    if rules.keep_every:
        count += config.train.steps // rules.keep_every
    if rules.best:
        count += 1
    return count, n_bytes


def free_space(place: str, count: int, n_bytes: int) -> tuple[str, bool]:
    """Tell whether ``count`` checkpoints of ``n_bytes`` fit into a folder, with those there."""
    needs = count * n_bytes
    text = f"{count} checkpoints of {in_bytes(n_bytes)} need {in_bytes(needs)}"
    if "://" in place:
        return f"{text} in {place}, whose free space is not known", True
    folder = _existing(place)
    existing = disk_usage.held(place, count - 1, n_bytes)
    free = shutil.disk_usage(folder).free
    if existing:
        text += f", of which {in_bytes(existing)} are there"
    return f"{text}; {folder} has {in_bytes(free)} free", needs - existing <= free


def _existing(place: str) -> pathlib.Path:
    folder = files.expanded(place).absolute()
    return next(p for p in (folder, *folder.parents) if p.exists())


def checks(assembly: Assembly, target: Target, seconds: float = 0.0) -> Iterator[Finding]:
    """Yield (name, finding, whether it is good) of data, disk, memory and processes of the hosts.

    ``seconds``: of a step by the forecast, 0 = there is none.
    """
    config = assembly.config
    of_host = share(assembly, target)
    yield from _check_data(assembly, target, of_host, seconds)
    count, n_bytes = checkpoints(config, assembly.abstract.state)
    folder = disk_usage.folder_of(config.workdir, config.checkpoint.folder)
    text, fits = free_space(folder, count, n_bytes)
    if target.here:
        yield "disk", text, fits
    else:  # a plan for devices elsewhere is for a disk elsewhere
        yield "disk", f"{text} here", True
    yield from _check_saves(config, of_host, folder, seconds)
    yield "host memory", *_check_host_memory(assembly, target, of_host)
    if of_host.processes > 1:
        yield from _check_processes(config, of_host, target)


def _check_host_memory(assembly: Assembly, target: Target, of_host: Share) -> tuple[str, bool]:
    abstract = assembly.abstract
    # The rows are the feed's, and the loader's.
    batch = sum(device_bytes(x, tiled=False) for x in abstract.batch.values())
    rows = 4 * of_host.devices * batch
    optimizer = of_host.devices * offloaded(abstract)
    restore = min(of_host.held, AT_ONCE * max(of_host.largest, checkpointer.IN_FLIGHT))
    needs = max(of_host.held, restore) + rows + optimizer
    # A save is written from a copy on the host.
    use = f"{in_bytes(of_host.held)} of it for a save"
    if restore:
        use += f" or {in_bytes(restore)} for a restore"
    use += f", {in_bytes(rows)} for batches on their way"
    if target.here and jax.devices()[0].platform == "cpu":
        return f"{in_bytes(needs)}, {use}, on top of what the devices hold", True
    if optimizer:
        use += f", {in_bytes(optimizer)} for the optimizer's state"
    text = f"{in_bytes(needs)}, {use}, on a host of {of_host.devices} devices"
    if of_host.processes > 1:
        text += f": its part of {in_bytes(of_host.checkpoint)}"
    if not target.here:
        return text, True
    available = host_memory()
    return f"{text}; {in_bytes(available)} are available", needs <= available


def _check_saves(
    config: config_lib.Config, of_host: Share, folder: str, seconds_of_step: float
) -> Iterator[Finding]:
    """Compare the time of a save with the steps between two, and tell that of a restore."""
    if "://" in folder:
        return
    try:
        rates = _rates(str(_existing(folder)))
    except OSError as error:
        yield "saves", f"{folder} cannot be written: {error.strerror or error}", False
        return
    # Each host reads as many bytes as it writes for the checksums, and as many to verify a step.
    checksums = of_host.written / rates.reading
    saving = of_host.written / rates.writing + checksums
    where = "a host" if of_host.processes > 1 else "this run"
    text = (
        f"{where} writes {in_bytes(of_host.written)} at {in_bytes(rates.writing)}/s, measured here,"
        f" and reads it for the checksums at {in_bytes(rates.reading)}/s: {duration(saving)}"
    )
    good = saving <= checkpointer.TIMEOUT
    if not good:
        text += (
            f", and a save fails after {duration(checkpointer.TIMEOUT)}. A faster disk for"
            " config.checkpoint.folder, or --config.optim.moments=bfloat16, makes it shorter"
        )
    every = config.checkpoint.every
    if good and seconds_of_step and saving > every * seconds_of_step:
        steps = math.ceil(saving / seconds_of_step)
        text += (
            f", which is longer than the {every} steps between two: each waits for the one before."
            f" --config.checkpoint.every={_rounded(steps)} would do"
        )
    yield "saves", text, good
    together = of_host.processes * of_host.held
    restoring = of_host.held / rates.reading + checksums
    text = (
        f"{where} verifies {in_bytes(of_host.written)}, then reads its part of the state,"
        f" {in_bytes(of_host.held)}: {duration(restoring)}"
    )
    if together > 2 * of_host.checkpoint:
        text += (
            f" if the disk gives all of them this rate, since together they read"
            f" {in_bytes(together)}: more config.mesh.fsdp, and less config.mesh.data, reads less"
        )
    yield "restores", text, True


class Rates(NamedTuple):
    writing: float  # [bytes/s]
    reading: float  # [bytes/s]


@functools.cache
def _rates(folder: str) -> Rates:
    """Measure a folder's disk for a moment. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix=".plan-", dir=folder) as temporary:
        path = os.path.join(temporary, "data")
        writing = disk_usage.write(path, TRIED)
        return Rates(writing, disk_usage.read(path))


def _rounded(n: int) -> int:
    """Round a number up to two digits."""
    unit = 10 ** max(0, len(str(n)) - 2)
    return int(-(-n // unit) * unit)


def _check_processes(
    config: config_lib.Config, of_host: Share, target: Target
) -> Iterator[Finding]:
    """Tell how many files process 0 opens, and how long the processes take to join."""
    n = of_host.processes
    needs, (soft, hard) = rendezvous.files_of_leader(n), machine.open_files()
    text = f"process 0 has a connection to each of {n - 1:,} others, and needs {needs:,}"
    good = True
    if hard != machine.UNLIMITED and hard < needs:
        text += f"; this machine allows {hard:,}: ulimit -n {needs} before the launcher's command"
        good = not target.here
    elif soft < needs:
        text += f"; it raises the limit of {soft:,} here by itself"
    yield "open files", text, good
    joining = JOINING * n
    timeout = config.distributed.init_timeout
    text = f"{n:,} processes take about {joining:.1f} s to join once all are started"
    wait = f"the first waits up to {timeout} s for the last (config.distributed.init_timeout)"
    yield "processes", f"{text}; {wait}", True


def _check_data(
    assembly: Assembly, target: Target, of_host: Share, seconds_of_step: float
) -> Iterator[Finding]:
    """Read one device's rows of a training and of a test batch, and measure the loader's rate."""
    findings = []
    rate = ""
    opened = n_files = 0
    own_files, available = _open_files(), host_memory()
    for split in ("train", "test"):
        began, before, files_before = time.perf_counter(), _resident(), _open_files()
        loader = make_loader(assembly, split)
        try:
            if not loader.n_batches:
                findings.append(f"{split} has no rows")
                continue
            opened += max(0, _resident() - before)
            loader.seek(0)
            next(loader)
            seconds = time.perf_counter() - began
            if split == "train":
                rate = _rate(loader, assembly, target, of_host, seconds_of_step)
            n_files += max(0, _open_files() - files_before)
        except ValueError as error:
            yield "data", f"{split}: {error}", False
            return
        finally:
            loader.close()
        batches = "1 batch,"
        if loader.n_batches > 1:
            batches = f"{loader.n_batches:,} batches, the first of them"
        findings.append(f"{split} has {batches} read in {seconds:.1f} s")
    yield "data", "; ".join(findings), True
    if rate:
        yield "loader", rate, True
        text, fits = _index(opened, n_files, available, own_files)
        yield "index", text, fits or not target.here


def _index(opened: int, n_files: int, available: float, own_files: int) -> tuple[str, bool]:
    """Compare what the loaders of both splits keep with what this process may still take."""
    text = (
        f"each process needs {in_bytes(opened)} of memory to open both splits,"
        f" and {n_files} open files to read them"
    )
    remedies = []
    needs, (limit, _) = own_files + n_files, machine.open_files()
    if limit != machine.UNLIMITED and limit < needs:
        remedies.append(
            f"this process may open {limit:,}: ulimit -n {needs} before the launcher's command"
        )
    if available < opened:
        remedies.append(
            f"{in_bytes(available)} are available here: config.data with fewer rows, or a host"
            " with more memory"
        )
    return "; ".join([text, *remedies]), not remedies


def make_loader(assembly: Assembly, split: str) -> base.Loader:
    """Make the loader of one device's rows."""
    config = assembly.config
    make = base.module(config.loader).make_loader
    rows = feed.rows_of_one(assembly.abstract.batch)
    loader: base.Loader = make(config.data, split=split, rows=rows, seed=config.seed)
    return loader


def _resident() -> int:
    """Return the bytes of memory that this process holds, 0 if the system does not tell."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # not on macOS
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _open_files() -> int:
    with contextlib.suppress(OSError):  # not on macOS
        return len(os.listdir("/proc/self/fd"))
    return 0


def _rate(
    loader: base.Loader,
    assembly: Assembly,
    target: Target,
    of_host: Share,
    seconds_of_step: float,
) -> str:
    """Compare the rows/s that the loader gives here with those that a step asks for."""
    measured = feed.measure(loader, READING)
    threads = loader.diagnostics().get("threads")
    text = f"{measured:,.0f} rows/s, measured here for {READING:g} s"
    if threads:
        text += f" on {_cores(min(threads, machine.cores()))}"
    if not measured:
        return text
    at_most = ""
    if not seconds_of_step and target.chip:
        seconds_of_step = max(forecast.ideal(assembly, target.chip, target.count))
        at_most = "at most "
    if not seconds_of_step:
        return text
    demand = assembly.config.train.batch / seconds_of_step
    text += f"; a step asks for {at_most}{demand:,.0f}"
    if of_host.processes > 1:
        # Processes whose devices are along other axes than the rows read the same rows.
        text += f", {_rows_of_host(assembly, of_host, demand):,.0f} on each host"
    if threads and (missing := machine.cores_missing(demand, measured, threads)):
        return f"{text}: {missing:,} more such core{'s' * (missing > 1)}, on all hosts together"
    if demand > measured:
        text += ": steps will wait for data, if a process gives no more there"
    return text


def _rows_of_host(assembly: Assembly, of_host: Share, demand: float) -> float:
    """Return the rows/s that the first host reads: its devices along other axes share theirs."""
    spec = next(iter(assembly.abstract.batch.values())).sharding.spec
    names = spec[0] if spec and spec[0] else ()
    axes = (names,) if isinstance(names, str) else names
    sizes = assembly.layout.mesh.shape
    places = np.unravel_index(np.arange(of_host.devices), tuple(sizes.values()))
    along = [places[list(sizes).index(axis)] for axis in axes]
    parts = set(zip(*along, strict=True)) if along else {()}
    return demand * len(parts) / float(math.prod(sizes[axis] for axis in axes))


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"
