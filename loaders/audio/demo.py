"""The built-in demo: synthetic birds, made once, so that a first run needs no download.

The corpus is 600 recordings of 12 invented species, 480 to train on and 120 to test on;
`loaders.audio.demo_birds` makes them.

On disk it has the form of ``DatasetDict.save_to_disk`` of Hugging Face ``datasets``:

    birds-v1-480+120-0123456789ab/           format version, sizes, hash of the recipe: a changed
                                             one is a new folder
      dataset_dict.json                      {"splits": ["train", "test"]}
      train/ test/
        data-0000k-of-0000n.arrow            Arrow IPC stream with the columns audio: struct<bytes:
                                             binary, path: string> and ebird_code: int64; schema
                                             metadata "huggingface" = {"info": {"features":
                                             {"audio": Audio, "ebird_code": ClassLabel with the
                                             species' names}}}
        dataset_info.json                    the same features
        state.json                           the shards in order, and a fingerprint of their content

Recordings 0 … 479 are train and the rest test, so that no recording is in both. The folder appears
by one rename of a finished one: if it is there, it is complete. The same machine and library
versions give the same bytes again: libsndfile draws a random serial number for an OGG stream, so it
is replaced by the recording's number.

How hard it is (``pytest -m slow tests/loaders/test_demo.py -s``): a linear classifier of each mel
band's mean and deviation over one crop reaches 78 % on the test recordings, the nearest class mean
50 %, chance 8 %.

``python -m loaders.audio.demo`` makes the corpus if it is not there, and prints its folder.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from loaders import base
from loaders.audio import demo_birds
from loaders.audio.demo_birds import SPECIES, Recording
from loaders.io import atomic_write, machine

N_TRAIN, N_TEST = 480, 120
FORMAT_VERSION = 1
ROWS_PER_SHARD, ROWS_PER_BATCH = 80, 20

logger = logging.getLogger("jaxtrain")


def ensure(cache_dir: Path | None = None, *, n_train: int = N_TRAIN, n_test: int = N_TEST) -> Path:
    """Return the folder of the corpus, made if it is not there.

    Any number of processes may call this at once: one makes the corpus, the others wait for it.

    Args:
      cache_dir: the folder of corpora, by default $JAXTRAIN_CACHE, $XDG_CACHE_HOME/jaxtrain or
      ~/.cache/jaxtrain.
      n_train, n_test: recordings in each split.

    Raises:
      base.DataError: the corpus cannot be written there.
    """
    corpus = folder(cache_dir, n_train=n_train, n_test=n_test)
    try:
        return atomic_write.once(corpus, functools.partial(_make, corpus, n_train, n_test))
    except OSError as error:
        remedy = "set JAXTRAIN_CACHE to a writable folder with 100 MB free"
        raise base.DataError(
            f"cannot make the demo corpus in {corpus.parent}: {error}; {remedy}"
        ) from error


def folder(cache_dir: Path | None = None, *, n_train: int = N_TRAIN, n_test: int = N_TEST) -> Path:
    """Return the folder in which `ensure` makes the corpus. It need not exist."""
    cache_dir = machine.cache_folder() if cache_dir is None else Path(cache_dir)
    return cache_dir / f"birds-v{FORMAT_VERSION}-{n_train}+{n_test}-{_recipe_hash()}"


def features() -> dict[str, Any]:
    """Return the columns, as ``datasets`` describes them."""
    names = [species.name for species in SPECIES]
    return {"audio": {"_type": "Audio"}, "ebird_code": {"names": names, "_type": "ClassLabel"}}


def schema() -> pa.Schema:
    """Return the columns, as Arrow describes them, with `features` as metadata."""
    audio = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    metadata = {"huggingface": json.dumps({"info": {"features": features()}})}
    return pa.schema([("audio", audio), ("ebird_code", pa.int64())], metadata=metadata)


def _make(corpus: Path, n_train: int, n_test: int, folder: Path) -> None:
    recs = [demo_birds.recording(number) for number in range(n_train + n_test)]
    minutes = sum(rec.seconds for rec in recs) / 60
    megabytes = sum(rec.seconds * rec.codec.kb_per_s for rec in recs) / 1000
    logger.info(
        "making the demo corpus, once: %d recordings of %d species, %.0f min of sound, about %.0f"
        " MB, in %s",
        len(recs),
        len(SPECIES),
        minutes,
        megabytes,
        corpus,
    )
    # Threads are enough: numpy and the encoders do their work without the GIL.
    pool = concurrent.futures.ThreadPoolExecutor(machine.cores())
    try:
        files = pool.map(_encoded, recs)
        _write_split(folder / "train", recs[:n_train], files)
        _write_split(folder / "test", recs[n_train:], files)
        _write_json(folder / "dataset_dict.json", {"splits": ["train", "test"]})
    finally:
        pool.shutdown(cancel_futures=True)


def _encoded(rec: Recording) -> bytes:
    return demo_birds.encode(rec, demo_birds.waveform(rec))


def _write_split(folder: Path, recs: list[Recording], files: Iterator[bytes]) -> None:
    folder.mkdir()
    n_needed = -(-len(recs) // ROWS_PER_SHARD)
    n_shards = min(
        max(n_needed, 2), len(recs)
    )  # at least two, so that every reader handles several
    names = [f"data-{k:05d}-of-{n_shards:05d}.arrow" for k in range(n_shards)]
    digest = hashlib.sha256()
    for k, name in enumerate(names):
        start = k * len(recs) // n_shards
        stop = (k + 1) * len(recs) // n_shards
        with _synced(folder / name) as file, pa.ipc.new_stream(file, schema()) as sink:
            for first in range(start, stop, ROWS_PER_BATCH):
                batch = recs[first : min(first + ROWS_PER_BATCH, stop)]
                sink.write_batch(_record_batch(batch, files, digest))
    info = {
        "citation": "",
        "description": "",
        "features": features(),
        "homepage": "",
        "license": "",
    }
    _write_json(folder / "dataset_info.json", info)
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": digest.hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    _write_json(folder / "state.json", state)


def _record_batch(recs: list[Recording], files: Iterator[bytes], digest: Any) -> pa.RecordBatch:
    """Return the rows of some recordings, whose files come next. ``digest`` takes them in."""
    audio = []
    for rec in recs:
        content = next(files)
        digest.update(rec.path.encode() + content)
        audio.append({"bytes": content, "path": rec.path})
    columns = {"audio": audio, "ebird_code": [rec.label for rec in recs]}
    return pa.RecordBatch.from_pydict(columns, schema())


def _write_json(path: Path, value: Any) -> None:
    with _synced(path) as file:
        file.write(json.dumps(value, indent=2).encode())


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with open(path, "wb") as file:
        yield file
        file.flush()
        # before the rename: a power cut must not leave a whole name with half a file
        os.fsync(file.fileno())


@functools.cache
def _recipe_hash() -> str:
    sources = Path(demo_birds.__file__).read_bytes() + Path(__file__).read_bytes()
    return hashlib.sha256(sources).hexdigest()[:12]


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    print(ensure())
