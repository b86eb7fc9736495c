"""The outline of the built-in recordings: their rows and labels, without sound.

A run is checked with it before the corpus is made. It lies in a temporary folder that ends with
the process, and takes milliseconds.
"""

import functools
import tempfile
from pathlib import Path

import pyarrow as pa

from loaders.audio import demo, demo_birds


def birds() -> Path:
    """Shards with the rows of `loaders.audio.demo`, whose recordings are empty."""
    return Path(_birds().name)


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
