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
    n_recordings = demo.N_TRAIN + demo.N_TEST
    recordings = [demo_birds.recording(number) for number in range(n_recordings)]
    _write_outline(Path(folder.name) / "train", recordings[: demo.N_TRAIN])
    _write_outline(Path(folder.name) / "test", recordings[demo.N_TRAIN :])
    return folder


def _write_outline(folder: Path, recordings: list[demo_birds.Recording]) -> None:
    schema = demo.schema()
    columns = {
        "audio": [{"bytes": b"", "path": recording.path} for recording in recordings],
        "ebird_code": [recording.label for recording in recordings],
    }
    folder.mkdir()
    with pa.ipc.new_stream(str(folder / "data.arrow"), schema) as sink:
        sink.write_batch(pa.RecordBatch.from_pydict(columns, schema))


@functools.cache
def _film() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="jaxtrain-film-")
    demo_film.make_outline(Path(folder.name))
    return folder
