"""The cost of an index.

python -m tools.bench index [--rows=10000000] [--recordings=100000] [--files=2000]

First `jaxtrain index` over a folder of short WAVs: recordings a second whose headers are read, and
those of a second run. Then an index of many rows, written as `jaxtrain index` writes them: opened
without a cache, by the run that writes it, and from it, each in a process of its own. Times are of
the CPU (user and system), memory is the growth of a process.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from loaders.audio.recordings import columns, indexing, rows, store
from loaders.audio.recordings.annotations import Errors

OPEN = """
import resource, sys, time
from loaders import _rust
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, begin, wall = resident(), time.process_time(), time.perf_counter()
index = _rust.Index(sys.argv[2:], label="label", cache=sys.argv[1] or None)
took, walled = time.process_time() - begin, time.perf_counter() - wall
bytes_a_row = (resident() - before) / index.n_rows
print(f"{index.n_rows} rows, {took:.2f} s of CPU, {walled:.2f} s, {bytes_a_row:.1f} bytes a row")
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--recordings", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=2000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        headers(folder, args.files)
        opening(folder, args.rows, args.recordings)


def headers(folder: pathlib.Path, n: int) -> None:
    """Print how fast recordings become an index."""
    rng = np.random.default_rng(0)
    for k in range(n):
        path = folder / "recordings" / f"class{k % 10}" / f"{k}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, rng.standard_normal(1600 + k % 800).astype(np.float32) * 0.1, 32_000)
    for what in ("first", "again"):
        begin = time.process_time()
        given, options = [str(folder / "recordings")], rows.Options()
        about = indexing.make(
            given, folder / "index", reading=columns.Options(), options=options, errors=Errors()
        )
        seconds = time.process_time() - begin
        print(
            f"jaxtrain index, {what}: {n / seconds:.0f} recordings a second of CPU,"
            f" {about['n_read']} headers read"
        )


def opening(folder: pathlib.Path, n: int, n_recordings: int) -> None:
    """Print the cost of opening an index of ``n`` rows."""
    kind = store.schema([f"class {k}" for k in range(100)])
    paths: list[pathlib.Path] = []
    for first in range(0, n, store.SHARD_ROWS):
        k = np.arange(first, min(first + store.SHARD_ROWS, n))
        names = pa.array([f"site{r % 97:02d}/{r:08d}.flac" for r in range(n_recordings)])
        path = pa.DictionaryArray.from_arrays(
            pa.array((k * n_recordings // n).astype(np.int32)), names
        ).cast(pa.string())
        start = (k % 1000) * 5.0
        columns = {
            "audio": pa.StructArray.from_arrays(
                [pa.nulls(len(k), pa.binary()), path], ["bytes", "path"]
            ),
            "start": pa.array(start),
            "end": pa.array(start + 5.0),
            "channel": pa.array(np.full(len(k), -1, np.int32)),
            "label": pa.array(k % 100),
        }
        arrays = [columns.get(field.name, pa.nulls(len(k), field.type)) for field in kind]
        paths.append(folder / f"train-{len(paths):05d}.parquet")
        dictionary = ["audio.path", *store.TEXTS]
        pq.write_table(
            pa.Table.from_arrays(arrays, schema=kind),
            paths[-1],
            use_dictionary=dictionary,
            compression="zstd",
        )
    size = sum(os.path.getsize(path) for path in paths)
    print(
        f"{n} rows of {n_recordings} recordings in {len(paths)} shards of {size / n:.1f} bytes"
        " a row"
    )
    for what, cache in (
        ("no cache", ""),
        ("writing the cache", folder / "cache"),
        ("from the cache", folder / "cache"),
    ):
        command = [sys.executable, "-c", OPEN, str(cache), *map(str, paths)]
        print(
            f"{what}:"
            f" {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}"
        )


if __name__ == "__main__":
    main()
