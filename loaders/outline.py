"""Outlines of the built-in data: shapes, labels and names without content.

A run is checked with them before the data are made. They lie in a temporary folder that ends with
the process, and take milliseconds.
"""

import functools
import tempfile
from pathlib import Path

import pyarrow as pa

from loaders.audio import demo, demo_birds
from loaders.film import demo_film


def birds() -> Path:
    """Shards with the rows of `loaders.audio.demo`, whose recordings are empty."""
    return Path(_birds().name)


def film() -> Path:
    """Return a folder with the shapes of `loaders.film.demo_film`, all zeros."""
    return Path(_film().name)


@functools.cache
def _birds() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="jaxtrain-birds-")
    recordings = [demo_birds.recording(number) for number in range(demo.N_TRAIN + demo.N_TEST)]
    for split, rows in (
        ("train", recordings[: demo.N_TRAIN]),
        ("test", recordings[demo.N_TRAIN :]),
    ):
        columns = {
            "audio": [{"bytes": b"", "path": row.path} for row in rows],
            "ebird_code": [row.label for row in rows],
        }
        (Path(folder.name) / split).mkdir()
        with pa.ipc.new_stream(
            str(Path(folder.name) / split / "data.arrow"), demo.schema()
        ) as sink:
            sink.write_batch(pa.RecordBatch.from_pydict(columns, demo.schema()))
    return folder


@functools.cache
def _film() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="jaxtrain-film-")
    demo_film.make_outline(Path(folder.name))
    return folder
