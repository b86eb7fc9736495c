"""A config's data, in a subprocess, as a dead server may hang: index, examples, rows a second."""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jaxtrain import config as config_lib
from jaxtrain.data import feed
from jaxtrain.doctor.check import Check, Findings, fail, ok, raised, warn
from loaders import base
from loaders.base import DataError, Loader, Rows
from loaders.io import machine

GROUP = "data"
MAX_SHARDS = 64  # that are sampled, evenly spread if there are more
SAMPLING, COUNTING = 10.0, 3.0  # [s] for a split, and for the rate
COMPARING = 10.0  # [s] for the content of a split
MAX_BATCHES = 8  # of a split with unknown shards, evenly spread


def examine(
    *, source: str, overrides: Any, process: int, processes: int, wanted: float
) -> Findings:
    """Check a config's data. ``wanted`` is the rows/s of the whole job's steps, 0 = unknown."""
    config, _ = config_lib.read(source, overrides, make_data=False)
    if missing := config.data.missing():
        remedy = "train for a step on one host first, and let the others share its cache"
        return Findings([warn(GROUP, "index", missing, remedy)], {})
    rows = _rows_of(process, processes, batch=config.train.batch)
    from jaxtrain.checkpoint import data_of_run

    try:
        config = dataclasses.replace(config, data=data_of_run.section(config))
        return Findings(list(_checks(config, rows, wanted / processes)), {})
    except (DataError, OSError) as error:
        remedy = "correct or remove what it names, then rerun"
        return Findings([fail(GROUP, "index", str(error), remedy)], {})
    except Exception as error:  # noqa: BLE001  any error of a user's loader
        text = f"{config.loader} failed: {raised(error)}"
        remedy = "look at the data that it names, if any; else report it: a loader raises DataError"
        return Findings([fail(GROUP, "loader", text, remedy)], {})


def _rows_of(process: int, processes: int, *, batch: int) -> Rows:
    first = process * batch // processes
    stop = (process + 1) * batch // processes
    return Rows(batch, ((first, max(stop, first + 1)),))


def _checks(config: config_lib.Config, rows: Rows, rows_per_second: float) -> Iterator[Check]:
    began = time.perf_counter()
    train = _make_loader(config, "train", rows)
    test = _make_loader(config, "test", rows)
    try:
        batches = f"{train.n_batches:,} batches to train on, {test.n_batches:,} to test"
        yield ok(GROUP, "index", f"{batches}, read in {time.perf_counter() - began:.1f} s")
        yield from _check_examples(config, "train", train)
        yield from _check_examples(config, "test", test)
        yield from _check_content(train, test)
        yield from _check_resume(config, train)
        yield _check_rate(train, rows_per_second)
    finally:
        train.close()
        test.close()


def _check_content(*loaders: Loader) -> Iterator[Check]:
    """Compare the data with the digests that their makers recorded."""
    for loader in loaders:
        try:
            line = loader.compare_content(COMPARING)
        except DataError as error:
            yield fail(GROUP, "content", str(error), "put the recorded file back, or prepare again")
            continue
        if line:
            yield ok(GROUP, "content", line)


def _check_resume(config: config_lib.Config, train: Loader) -> Iterator[Check]:
    """Compare the data with those of the newest checkpoint, which a resume would refuse."""
    from jaxtrain.arrays import orbax_steps, stored
    from jaxtrain.checkpoint import checkpointer, disk_usage

    place = disk_usage.folder_of(os.path.abspath(config.workdir), config.checkpoint.folder)
    if "://" in place or config.resume.data == "restart":
        return
    steps = orbax_steps.steps_in(epath.Path(place))
    if not steps:
        return
    step = epath.Path(place) / str(steps[-1])
    try:
        saved = orbax_steps.read_json(step, "data") or {}
    except stored.StoredError as error:
        yield warn(GROUP, "resume", str(error), f"jaxtrain checkpoint verify {step}")
        return
    differences = checkpointer.differences_of_data(saved, train.state(0))
    if not differences:
        yield ok(GROUP, "resume", f"the data are those of checkpoint {step.name}")
        return
    text = f"{step} was trained on other data or in another order ({differences})"
    yield fail(GROUP, "resume", text, "put the data back, or choose another config.workdir")


def _make_loader(
    config: config_lib.Config, split: str, rows: Rows, *, in_order: bool = False
) -> Loader:
    make_loader = base.module(config.loader).make_loader
    options = {"in_order": True} if in_order else {}
    return make_loader(config.data, split=split, rows=rows, seed=config.seed, **options)


class _Sample(NamedTuple):
    """The result of reading some examples of a split."""

    n_read: int
    unreadable_rows: list[int]
    reasons: dict[int, str]  # by row


def _check_examples(config: config_lib.Config, split: str, loader: Loader) -> Iterator[Check]:
    """Read an example of each shard, or some batches if a loader has no shards."""
    if not loader.n_batches:  # the index says so
        return
    name = f"{split} examples"
    reader = loader
    if loader.population is None:
        positions = _spread(loader.n_batches, MAX_BATCHES)
        subject = f"batches, spread over {loader.n_batches:,}"
    else:
        first_of_shards = _first_examples(loader)
        positions = [first_of_shards[i] for i in _spread(len(first_of_shards), MAX_SHARDS)]
        subject = f"of {len(first_of_shards)} shards, an example each"
        # Position k of this loader is the k-th example of the split.
        reader = _make_loader(config, split, Rows(1, ((0, 1),)), in_order=True)
    try:
        sample = _read_at(reader, positions)
    except DataError as error:
        yield fail(GROUP, name, str(error), "replace these files from their source")
        return
    finally:
        if reader is not loader:
            reader.close()
    if sample.unreadable_rows:
        row = sample.unreadable_rows[0]
        counts = f"{len(sample.unreadable_rows)} of the first examples of {sample.n_read} shards"
        reason = sample.reasons.get(row, "unreadable")
        text = f"{counts} cannot be read; row {row}: {reason}"
        yield fail(GROUP, name, text, "replace these files, or index them again")
    elif sample.n_read:
        yield ok(GROUP, name, f"{sample.n_read} {subject}, were read")
    else:
        remedy = "see whether the data's file system is slow, or copy them nearer"
        yield warn(GROUP, name, f"0 {subject}, were read within {SAMPLING:g} s", remedy)


def _first_examples(loader: Loader) -> list[int]:
    """Return the first example of the split in each of its shards."""
    assert loader.population is not None
    rows = loader.population.rows
    positions = rows.searchsorted(loader.population.first_rows)
    distinct = dict.fromkeys(int(position) for position in positions)
    return [position for position in distinct if position < len(rows)]


def _read_at(loader: Loader, positions: Sequence[int]) -> _Sample:
    """Read the batches at these positions until the time for a split is up. Raises DataError."""
    deadline = time.monotonic() + SAMPLING
    n_read = 0
    unreadable = list[int]()
    for position in positions:
        if time.monotonic() > deadline:
            break
        loader.seek(position)
        _, batch = next(loader)
        n_read += 1
        if loader.population is not None and not batch["weight"][0][0]:
            unreadable.append(int(loader.population.rows[position]))
    return _Sample(n_read, unreadable, dict(loader.diagnostics().get("bad_list", [])))


def _spread(n: int, most: int) -> list[int]:
    return [int(x) for x in np.linspace(0, n - 1, min(n, most))]


def _check_rate(train: Loader, wanted: float) -> Check:
    rate = feed.measure(train, COUNTING)
    text = f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.2g} rows/s"
    if not wanted:
        return ok(GROUP, "rate", f"{text}; the need of a step is unknown on these devices")
    text += f"; a step needs {wanted:,.0f} of this process at most"
    if rate >= wanted:
        return ok(GROUP, "rate", text)
    threads = train.diagnostics().get("threads", 1)
    cores = machine.cores_missing(wanted, rate, threads)
    remedy = (
        f"{cores:,} more cores (srun --cpus-per-task), data.threads, or data nearer:"
        " steps will wait"
    )
    return warn(GROUP, "rate", text, remedy)
