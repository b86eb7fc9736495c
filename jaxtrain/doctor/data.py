"""A config's data, in a subprocess, as a dead server may hang: index, examples, rows a second."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.data import feed
from jaxtrain.doctor.check import Check, Found, fail, ok, raised, warn
from loaders import base
from loaders.base import DataError, Loader, Rows
from loaders.io import machine

GROUP = "data"
MAX_SHARDS = 64  # that are sampled, evenly spread if there are more
SAMPLING, COUNTING = 10.0, 3.0  # [s] for a split, and for the rate
PLACES = 8  # batches of a split with unknown shards, evenly spread


def examine(*, source: str, overrides: Any, process: int, processes: int, wanted: float) -> Found:
    """Check a config's data. ``wanted`` is the rows/s of the whole job's steps, 0 = unknown."""
    config, _ = config_lib.read(source, overrides, make_data=False)
    if missing := config.data.missing():
        return [
            warn(
                GROUP,
                "index",
                missing,
                "train for a step on one host first, and let the others share its cache",
            )
        ], {}
    try:
        return _look(config, process, processes, wanted)
    except (DataError, OSError) as error:
        return [fail(GROUP, "index", str(error), "correct or remove what it names, then rerun")], {}
    except Exception as error:  # noqa: BLE001  any error of a user's loader
        remedy = "look at the data that it names, if any; else report it: a loader raises DataError"
        return [fail(GROUP, "loader", f"{config.loader} failed: {raised(error)}", remedy)], {}


def _look(config: config_lib.Config, process: int, processes: int, wanted: float) -> Found:
    batch, began = config.train.batch, time.perf_counter()
    first, stop = process * batch // processes, (process + 1) * batch // processes
    rows = Rows(batch, ((first, max(stop, first + 1)),))
    train, test = (_loader(config, split, rows) for split in ("train", "test"))
    try:
        text = f"{train.n_batches:,} batches to train on, {test.n_batches:,} to test"
        index = ok(GROUP, "index", f"{text}, read in {time.perf_counter() - began:.1f} s")
        checks = [
            index,
            *_examples(config, "train", train),
            *_examples(config, "test", test),
            _rate(train, wanted / processes),
        ]
        return checks, {"data": {"train": train.state(0), "test": test.fingerprint}}
    finally:
        train.close()
        test.close()


def _loader(config: config_lib.Config, split: str, rows: Rows, **more: Any) -> Loader:
    return base.module(config.loader).make_loader(
        config.data, split=split, rows=rows, seed=config.seed, **more
    )


def _examples(config: config_lib.Config, split: str, loader: Loader) -> Iterator[Check]:
    """Read an example of each shard, or some batches if a loader has no shards."""
    name, until = f"{split} examples", time.monotonic() + SAMPLING
    if not loader.n_batches:  # the index says so
        return
    done, bad, each = 0, list[int](), loader
    if loader.population is None:
        places = _spread(loader.n_batches, PLACES)
        what = f"batches, spread over {loader.n_batches:,}"
    else:
        rows = loader.population.rows
        starts = dict.fromkeys(int(x) for x in rows.searchsorted(loader.population.first_rows))
        shards = [k for k in starts if k < len(rows)]
        places = [shards[i] for i in _spread(len(shards), MAX_SHARDS)]
        what = f"of {len(shards)} shards, an example each"
        # Position k of this loader is the k-th example of the split.
        each = _loader(config, split, Rows(1, ((0, 1),)), in_order=True)
    try:
        for k in places:
            if time.monotonic() > until:
                break
            each.seek(k)
            _, found = next(each)
            done += 1
            if loader.population is not None and not found["weight"][0][0]:
                bad.append(int(loader.population.rows[k]))
        reasons = dict(each.diagnostics().get("bad_list", []))
    except DataError as error:
        yield fail(GROUP, name, str(error), "replace these files from their source")
        return
    finally:
        if each is not loader:
            each.close()
    if bad:
        text = f"{len(bad)} of the first examples of {done} shards cannot be read; row {bad[0]}: "
        text += str(reasons.get(bad[0], "unreadable"))
        yield fail(GROUP, name, text, "replace these files, or index them again")
    elif done:
        yield ok(GROUP, name, f"{done} {what}, were read")
    else:
        remedy = "see whether the data's file system is slow, or copy them nearer"
        yield warn(GROUP, name, f"0 {what}, were read within {SAMPLING:g} s", remedy)


def _spread(n: int, most: int) -> list[int]:
    return [int(x) for x in np.linspace(0, n - 1, min(n, most))]


def _rate(train: Loader, wanted: float) -> Check:
    rate = feed.measure(train, COUNTING)
    text = f"{rate:,.0f} rows/s" if rate >= 10 else f"{rate:.2g} rows/s"
    if not wanted:
        return ok(GROUP, "rate", f"{text}; the need of a step is unknown on these devices")
    text += f"; a step needs {wanted:,.0f} of this process at most"
    if rate >= wanted:
        return ok(GROUP, "rate", text)
    more = machine.cores_missing(wanted, rate, train.diagnostics().get("threads", 1))
    remedy = (
        f"{more:,} more cores (srun --cpus-per-task), data.threads, or data nearer: steps will wait"
    )
    return warn(GROUP, "rate", text, remedy)
