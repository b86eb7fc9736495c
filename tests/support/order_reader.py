"""One process of a run that reads batches, as its digests: by a loader alone, without a model."""

import hashlib
import importlib
import itertools
from typing import Any, NamedTuple

import numpy as np

from loaders.base import Rows

SEED = 3


class Task(NamedTuple):
    """The part of a run that one process reads."""

    module: str
    config: Any
    rows: Rows
    start: int  # position of the first batch
    stop: int


def read(task: Task) -> tuple[dict[tuple[int, int], str], Any]:
    """Return (position, row) -> digest of all fields of the row, and the state at the end."""
    module = importlib.import_module(task.module)
    loader = module.make_loader(task.config, split="train", rows=task.rows, seed=SEED)
    loader.seek(task.start)
    digests = {}
    for position in range(task.start, task.stop):
        _, batch = next(loader)
        for part, (start, stop) in enumerate(task.rows.ranges):
            for row in range(start, stop):
                values = [(name, parts[part][row - start]) for name, parts in batch.items()]
                digests[position, row] = digest(values)
    state = loader.state(task.stop)
    loader.close()
    return digests, state


def digest(values: list[tuple[str, np.ndarray]]) -> str:
    hashed = hashlib.sha256()
    for name, value in sorted(values, key=lambda pair: pair[0]):
        array = np.ascontiguousarray(value)
        hashed.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return hashed.hexdigest()


def segments(total: int, cuts: list[int]) -> list[tuple[int, int]]:
    """Split positions 0 to ``total`` at ``cuts``."""
    return list(itertools.pairwise([0, *sorted(cuts), total]))
