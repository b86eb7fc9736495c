"""The data of a config: the index is read, a sample of both splits' shards is decoded, and rows are counted for some seconds.

It runs in a process of its own (`jaxtrain.doctor.apart`), since a dead file server may hold it for ever.
"""

import importlib
import time
from collections.abc import Iterator
from typing import Any

from jaxtrain import config as config_lib
from jaxtrain.doctor.check import Check, fail, ok, raised, warn
from loaders.audio import demo
from loaders.base import DataError, Loader, Rows
from loaders.film import demo_film

GROUP = "data"
SHARDS = 64  # that are sampled, evenly spread where there are more
SAMPLING, COUNTING = 10.0, 3.0  # [s] for a split, and for the rate
PLACES = 8  # of a split whose shards are not known: batches, evenly spread


def examine(
    *, source: str, overrides: list[list[str]], process: int, processes: int, wanted: float
) -> tuple[list[Check], dict[str, Any]]:
    """Args: the config; which of how many processes; ``wanted``: rows/s that the whole job will ask for, 0 = unknown."""
    config, _ = config_lib.read(source, [(path, text) for path, text in overrides], make_data=False)
    if missing := _not_there_yet(config):
        return [
            warn(GROUP, "index", missing, "train for a step on one host first, and see to it that the others share its cache")
        ], {}
    try:
        return _look(config, process, processes, wanted)
    except (DataError, OSError) as error:
        return [fail(GROUP, "index", str(error), "correct or remove what it names, then rerun")], {}
    except Exception as error:  # noqa: BLE001  a loader that fails at data as no loader should
        remedy = "look at the data that it names, if any; else report it: a loader names what is wrong as a DataError"
        return [fail(GROUP, "loader", f"{config.loader} failed: {raised(error)}", remedy)], {}


def _not_there_yet(config: config_lib.Config) -> str:
    """Why the data cannot be looked at without making or copying them; "" where they can."""
    if getattr(config.data, "train", "") == "demo" and not demo.folder().is_dir():
        return "the built-in birds are not made yet; the first run makes them"
    if getattr(config.data, "path", "") == "demo" and not demo_film.folder().is_dir():
        return "the built-in film is not made yet; the first run makes it"
    if not config.data.exists():
        return "the data are not here yet; the first run copies or makes them, and only then their shards and rows are known"
    return ""


def _look(config: config_lib.Config, process: int, processes: int, wanted: float) -> tuple[list[Check], dict[str, Any]]:
    module, batch = importlib.import_module(config.loader), config.train.batch
    first, stop = process * batch // processes, (process + 1) * batch // processes
    rows = Rows(batch, ((first, stop if stop > first else first + 1),))
    began = time.perf_counter()
    train, test = (module.make_loader(config.data, split=split, rows=rows, seed=config.seed) for split in ("train", "test"))
    try:
        facts = {"data": {"train": train.state(0), "test": test.fingerprint}}
        sizes = f"{train.n_batches:,} batches to train on, {test.n_batches:,} to test"
        checks = [ok(GROUP, "index", f"{sizes}, read in {time.perf_counter() - began:.1f} s")]
        for split, loader in (("train", train), ("test", test)):
            checks += _samples(config, split, loader)
        checks += [_rate(train, stop - first, wanted / processes)]
        return checks, facts
    finally:
        for loader in (train, test):
            loader.close()


def _samples(config: config_lib.Config, split: str, loader: Loader) -> Iterator[Check]:
    """Decodes a recording of each shard; or a batch here and there, where a loader does not say which shards it has."""
    name, until = f"{split} samples", time.monotonic() + SAMPLING
    remedy = "replace these files from their source, or index the recordings again"
    if not loader.n_batches:  # which the index says
        return
    if loader.population is None:
        places, done = spread(loader.n_batches, PLACES), 0
        while done < len(places) and time.monotonic() < until:
            loader.seek(places[done])
            next(loader)
            done += 1
        yield _sampled(name, done, f"{done} batches, spread over {loader.n_batches:,}, were read")
        return
    rows, first_rows = loader.population.rows, loader.population.first_rows
    # Position k of this loader is the k-th recording of the split.
    module = importlib.import_module(config.loader)
    each = module.make_loader(config.data, split=split, rows=Rows(1, ((0, 1),)), seed=config.seed, in_order=True)
    starts = [int(x) for x in rows.searchsorted(first_rows)]
    starts = list(dict.fromkeys(k for k in starts if k < len(rows)))
    bad, done = [], 0
    try:
        for k in (starts[i] for i in spread(len(starts), SHARDS)):
            if time.monotonic() > until:
                break
            each.seek(k)
            _, found = next(each)
            done += 1
            if not found["weight"][0][0]:
                bad.append(int(rows[k]))
    except DataError as error:
        yield fail(GROUP, name, str(error), remedy)
        return
    finally:
        reasons = dict(each.diagnostics().get("bad_list", []))
        each.close()
    if bad:
        first = f"row {bad[0]}: {reasons.get(bad[0], 'unreadable')}"
        yield fail(GROUP, name, f"{len(bad)} of the first recordings of {done} shards cannot be decoded; {first}", remedy)
    else:
        yield _sampled(name, done, f"a recording of each of {done} of {len(starts)} shards was decoded")


def _sampled(name: str, done: int, text: str) -> Check:
    """What was read is well; nothing was read where the time was up before the first one."""
    if done:
        return ok(GROUP, name, text)
    return warn(
        GROUP, name, f"{text}, within {SAMPLING:g} s", "see whether the data's file system is slow, or copy them nearer"
    )


def spread(n: int, most: int) -> list[int]:
    """At most ``most`` of the numbers below n, evenly spread, the first and the last among them."""
    if n <= most:
        return list(range(n))
    return sorted({round(i * (n - 1) / (most - 1)) for i in range(most)})


def _rate(train: Loader, rows: int, wanted: float) -> Check:
    train.seek(0)
    next(train)  # threads and caches are warm from here on
    began, batches = time.perf_counter(), 0
    for _ in train:
        batches += 1  # one at least, however long it takes
        if time.perf_counter() - began >= COUNTING:
            break
    rate = rows * batches / (time.perf_counter() - began)
    text = f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.2g} rows/s"
    if not wanted:
        return ok(GROUP, "rate", f"{text}; what a step asks for is not known on these devices")
    text += f"; a step asks this process for {wanted:,.0f} at most"
    if rate < wanted:
        remedy = "more cores (srun --cpus-per-task), data.threads, or data nearer: the step will wait for the loader"
        return warn(GROUP, "rate", text, remedy)
    return ok(GROUP, "rate", text)
