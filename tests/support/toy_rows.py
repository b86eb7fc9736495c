"""Rows for tests of the trainer: 16 numbers around a centre for each class, computed from seed,
epoch and index."""

from dataclasses import dataclass

import numpy as np

from loaders import base, order
from loaders.io import checks

CLASSES, WIDTH = 12, 16


@dataclass(frozen=True)
class Config(checks.DataSection):
    on_resume = checks.OnResume(checks.FREE)  # the fingerprint and the order have them

    n_train: int = 24  # [rows] to train on
    n_test: int = 13  # [rows] to test on
    exclude: tuple[int, ...] = ()  # [rows] of the training split that are never read
    threads: int = 2  # [threads] as loaders have that decode files; nothing reads it here


def element_spec(config):
    kinds = {
        "x": ((WIDTH,), "f4"),
        "label": ((), "i4"),
        "weight": ((), "f4"),
        "index": ((), "i8"),
        "epoch": ((), "i4"),
    }
    return {name: base.Field(shape, np.dtype(dtype)) for name, (shape, dtype) in kinds.items()}


def dataset_info(config):
    return {"n_classes": CLASSES}


class Toy(base.Loader):
    def __init__(self, config, *, split, rows, seed):
        train = split == "train"
        own = (
            sorted(set(range(config.n_train)) - set(config.exclude))
            if train
            else range(config.n_test)
        )
        self._own = np.array(own)
        self.population = base.Population(self._own, np.zeros(1, np.int64)) if train else None
        super().__init__(
            element_spec(config),
            train=train,
            rows=rows,
            seed=seed,
            n_batches=-(-len(own) // rows.batch),
        )

    @property
    def fingerprint(self):
        return f"{CLASSES} classes of {WIDTH} numbers"

    @property
    def order(self):
        return {"rows": self._own.tolist()}

    def _part(self, position, row):
        number = position * self._rows.batch + row
        if self._train:
            there = np.arange(len(row))
            epoch, place = order.epochs(self._seed, len(self._own), number)
        else:
            there, place = order.once(len(self._own), number)
            epoch = np.zeros_like(place)
        found = self._empty(len(row))
        index, column = self._own[place], np.arange(WIDTH)[None]
        label = index % CLASSES
        hashes = (
            order.hash_of(1, label[:, None], column),
            order.hash_of(2, self._seed, epoch[:, None], index[:, None], column),
        )
        centre, around = (h / 2.0**63 - 1 for h in hashes)
        for name, value in (
            ("x", centre + around / 4),
            ("label", label),
            ("weight", 1),
            ("index", index),
            ("epoch", epoch),
        ):
            found[name][there] = value
        return found


def make_loader(config, *, split, rows, seed):
    return Toy(config, split=split, rows=rows, seed=seed)
