"""Small corpora with real encodings, as the Arrow shards that Hugging Face datasets writes."""

import io
import json
import pathlib
import tempfile
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

ESC10 = pathlib.Path(__file__).parents[2] / ".." / "shared" / "data" / "esc10"

AUDIO = pa.struct({"bytes": pa.binary(), "path": pa.string()})


def noise(seed: int, seconds: float, rate: int) -> np.ndarray:
    """float32 [n]: noise under a slow swell, so that all crops differ."""
    n = round(seconds * rate)
    swell = 0.2 + 0.1 * np.sin(np.arange(n) * (2 * np.pi * (0.3 + 0.1 * seed) / rate))
    return (np.random.default_rng(seed).standard_normal(n) * swell * 0.3).astype(np.float32)


def encode(wave: np.ndarray, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=kind, subtype=subtype)
    return file.getvalue()


def decoded(data: bytes, **options) -> tuple[np.ndarray, int]:
    """The samples that libsndfile decodes from a file. From MP3 in memory, libsndfile 1.2.2
    sometimes reads nothing."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return soundfile.read(file.name, **options)


def wav(seed: int, seconds: float = 1.0, rate: int = 32_000) -> bytes:
    return encode(noise(seed, seconds, rate), rate)


def schema(
    names: Sequence[str] | None, label: str = "label", audio: pa.DataType = AUDIO
) -> pa.Schema:
    found = pa.schema({"audio": audio, label: pa.int64()})
    if names is None:
        return found
    features = {"audio": {"_type": "Audio"}, label: {"names": list(names), "_type": "ClassLabel"}}
    return found.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def table(
    encoded: Sequence[bytes | None],
    labels: Sequence[int | None],
    names: Sequence[str] | None = ("a", "b"),
) -> pa.Table:
    audio = [{"bytes": data, "path": f"{i}.wav"} for i, data in enumerate(encoded)]
    kind = schema(names)
    return pa.table([pa.array(audio, AUDIO), pa.array(labels, pa.int64())], schema=kind)


def write(
    path: pathlib.Path, rows: pa.Table, *, file: bool = False, batch: int | None = None, **options
) -> pathlib.Path:
    """One shard: an IPC stream, or an IPC file, of record batches of ``batch`` rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    make = pa.ipc.new_file if file else pa.ipc.new_stream
    with make(str(path), rows.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(rows, max_chunksize=batch)
    return path


def save_to_disk(folder: pathlib.Path, shards: Sequence[pa.Table]) -> pathlib.Path:
    """Writes shards as ``datasets.save_to_disk`` does."""
    files = [f"data-{i:05d}-of-{len(shards):05d}.arrow" for i in range(len(shards))]
    for name, rows in zip(files, shards, strict=True):
        write(folder / name, rows)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in files]})
    )
    return folder


def write_parquet(path: pathlib.Path, rows: pa.Table, **options) -> pathlib.Path:
    """Writes one Parquet shard. ``options`` are those of ``pyarrow.parquet.write_table``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, **options)
    return path


# Five recordings, some of them odd. The bytes of each are its name.
ROWS = [b"first", b"", b"third recording", None, b"fifth"]
LABELS = [0, None, 1, 1, 0]


def rows(names=("a", "b")) -> pa.Table:
    return table(ROWS, LABELS, names)


def check(index) -> None:
    assert index.n_rows == len(index) == 5
    assert index.labels.tolist() == [0, -1, 1, 1, 0]
    assert index.class_names == ["a", "b"]
    assert [index.encoded(i) for i in (0, 1, 2, 4)] == [b"first", b"", b"third recording", b"fifth"]
    assert [index.path(i) for i in range(5)] == [f"{i}.wav" for i in range(5)]
