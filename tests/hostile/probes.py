"""Functions that the attacks call besides commands, each in its own process. They return exit
codes, as commands do."""

import pathlib
import sys

import numpy as np

from loaders.audio import shards as shards_lib
from loaders.audio import spectrogram
from loaders.base import DataError, Rows
from loaders.chat import codec
from loaders.io import checks
from loaders.sudoku import sudoku
from loaders.text import tokens


def _refused(action) -> int:
    try:
        action()
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def class_lists(folder: str, label: str = "labels") -> int:
    """Reads the whole column of labels of a folder of shards, as data.multilabel does."""
    return _refused(
        lambda: shards_lib.read_class_lists(shards_lib.find_shards(folder, "train"), label).hot(
            np.arange(3)
        )
    )


def recordings(folder: str) -> int:
    """A pass over a folder of recordings, as training reads it."""
    config = spectrogram.Config(
        train=folder,
        label="label",
        clip_seconds=0.2,
        n_frames=20,
        test_share=0.0,
        bad_budget=1.0,
        threads=1,
    )

    def read() -> None:
        loader = spectrogram.make_loader(
            config, split="train", rows=Rows(2, ((0, 2),)), seed=0, in_order=True
        )
        for _ in zip(range(4), loader, strict=False):
            pass
        for _, reason in loader.diagnostics().get("bad_list", ()):
            print(reason)

    return _refused(read)


def index(folder: str) -> int:
    """A pass over an index of recordings."""
    return recordings(folder)


def documents(folder: str) -> int:
    """A batch of a folder of token files."""
    config = tokens.Config(sources=(tokens.Source(folder),), context=8, threads=1)
    return _refused(
        lambda: next(tokens.make_loader(config, split="train", rows=Rows(2, ((0, 2),)), seed=0))
    )


def puzzles(folder: str) -> int:
    """A batch of a folder of boards in numpy's files."""
    config = sudoku.Config(sources=(sudoku.Source(path=folder),))
    return _refused(
        lambda: next(sudoku.make_loader(config, split="train", rows=Rows(2, ((0, 2),)), seed=0))
    )


def codes(folder: str) -> int:
    """The tables of codes in a folder."""
    return max(
        _refused(lambda p=path: codec.read_many(p))
        for path in sorted(pathlib.Path(folder).iterdir())
    )


def problems(folder: str) -> int:
    """The errors of a data section that names a folder of recordings."""
    config = spectrogram.Config(train=folder, label="label")
    found = [f"{field} {text}" for field, text in checks.under("data", config.validate())]
    print("\n".join(found))
    return 2 if found else 0
