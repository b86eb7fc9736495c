"""The cost of an index of XCL's size: python -m tools.index_scale [FOLDER] [--rows=N] [--shards=N] [--gigabytes=N]

Writes shards of the real layout, in which the audio is a hole that takes no space on disk. Prints the time and memory
of indexing them without a cache, of the first run that writes it and of the next that reads it, each in its own
process. Here "cold" is after the system has dropped the files from memory. Then it prints the time of a seek and of the
first place of an epoch.
"""

import argparse
import io
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

BATCH = 1000  # [rows] of a record batch, as datasets writes them

MEASURE = """
import sys, time, resource
from loaders import _rust
shards = [line.strip() for line in open(sys.argv[1])]
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, begin = resident(), time.perf_counter()
index = _rust.Index(shards, label="label", cache=sys.argv[2] or None)
seconds = time.perf_counter() - begin
print(f"{index.n_rows} {seconds:.3f} {(resident() - before) / 2**20:.1f}")
"""

SEEK = """
import sys, time
import numpy as np
from loaders import _rust
index = _rust.Index([line.strip() for line in open(sys.argv[1])], label="label", cache=sys.argv[2])
for block in (None, (8, 256)):
    begin = time.perf_counter()
    pipeline = _rust.Pipeline(index, rows=np.arange(index.n_rows), batch=2048, ranges=[(0, 1)], seed=0, train=True, block=block)
    made = time.perf_counter() - begin
    begin = time.perf_counter()
    pipeline.seek(10**6)
    print(f"{made:.4f} {time.perf_counter() - begin:.6f}")
stops = np.append(np.arange(8, index.n_rows, 8), index.n_rows)
begin = time.perf_counter()
_rust.block_order(0, 1, stops, 256, np.arange(1))
print(f"{time.perf_counter() - begin:.4f}")
"""


class Holes(io.RawIOBase):
    """A file that keeps small writes with their offsets, and of large ones only the size."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: list[tuple[int, bytes]] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        n = memoryview(data).nbytes
        if n < 1 << 20:
            self.parts.append((self.size, bytes(data)))
        self.size += n
        return n


def template(rows: int, bytes_per_row: int) -> Holes:
    """One Arrow stream of ``rows`` recordings."""
    out = Holes()
    audio = pa.struct({"bytes": pa.large_binary(), "path": pa.string()})
    schema = pa.schema({"audio": audio, "label": pa.int64()})
    with pa.ipc.new_stream(pa.PythonFile(out, mode="w"), schema) as writer:
        for begin in range(0, rows, BATCH):
            n = min(BATCH, rows - begin)
            offsets = pa.py_buffer(np.arange(n + 1, dtype=np.int64) * bytes_per_row)
            data = pa.py_buffer(np.zeros(n * bytes_per_row, np.uint8))  # never touched: zeros take no memory
            encoded = pa.LargeBinaryArray.from_buffers(pa.large_binary(), n, [None, offsets, data])
            names = pa.array([f"XC{begin + i:06d}.ogg" for i in range(n)])
            column = pa.StructArray.from_arrays([encoded, names], fields=list(audio))
            writer.write_batch(pa.record_batch([column, pa.array(np.arange(n) % 10_000)], schema=schema))
    return out


def make(folder: pathlib.Path, rows: int, shards: int, gigabytes: float) -> list[pathlib.Path]:
    stops = np.arange(shards + 1) * rows // shards
    made: dict[int, Holes] = {}
    paths = []
    for k, n in enumerate(np.diff(stops)):
        n = int(n)
        if n not in made:
            made[n] = template(n, int(gigabytes * 1e9 / rows))
        paths.append(folder / f"xcl-train-{k:05d}-of-{shards:05d}.arrow")
        with open(paths[-1], "wb") as file:
            for at, data in made[n].parts:
                file.seek(at)
                file.write(data)
            file.truncate(made[n].size)
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="of the shards; default: a temporary folder")
    for name, default in (("rows", 528_422), ("shards", 690), ("gigabytes", 484)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        place = pathlib.Path(folder)
        paths = make(place, flags.rows, flags.shards, flags.gigabytes)
        (place / "shards").write_text("\n".join(map(str, paths)))
        size = sum(path.stat().st_size for path in paths)
        print(f"{flags.rows} rows in {len(paths)} shards of {size / 1e9:.0f} GB together\n")
        print("                            seconds   resident MiB")
        cache = place / "cache"
        for name, folder, cold in (
            ("without a cache, cold", "", True),
            ("without a cache", "", False),
            ("writing the cache, cold", cache, True),
            ("reading the cache, cold", cache, True),
            ("reading the cache", cache, False),
        ):
            if cold:
                forget([*paths, *cache.glob("*")])
            n, seconds, resident = run(MEASURE, place / "shards", folder)[0]
            assert int(n) == flags.rows
            print(f"{name:<26} {seconds:>8} {resident:>14}")
        (file,) = (place / "cache").iterdir()
        print(f"size of the cache          {'':>8} {file.stat().st_size / 2**20:>14.1f}\n")
        lines = run(SEEK, place / "shards", place / "cache")
        for name, (made, seek) in zip(("global", "block"), lines, strict=False):
            print(f"{name} order: pipeline made in {made} s, seek in {seek} s")
        print(f"block order: first place of an epoch in {lines[2][0]} s")


def forget(paths: Sequence[pathlib.Path]) -> None:
    """Drop the files from the page cache, as far as the system listens."""
    os.sync()
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(code: str, *arguments: object) -> list[list[str]]:
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
