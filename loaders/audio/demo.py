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

``python -m loaders.audio.demo`` makes the corpus if it is not there, and prints its contents.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import soundfile

from loaders import base
from loaders.audio import demo_birds
from loaders.audio.demo_birds import SPECIES, Recording
from loaders.io import machine

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
    cache_dir = corpus.parent
    if corpus.is_dir():
        return corpus
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _only_one(cache_dir / "birds.lock") as locked:
            if not corpus.is_dir():
                if locked:  # then the processes that left these are dead
                    for left in cache_dir.glob("birds-*.tmp-*"):
                        shutil.rmtree(left)
                _make(corpus, n_train, n_test)
    except OSError as error:
        remedy = "set JAXTRAIN_CACHE to a writable folder with 100 MB free"
        raise base.DataError(f"cannot make the demo corpus in {cache_dir}: {error}; {remedy}") from error
    return corpus


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


def _make(corpus: Path, n_train: int, n_test: int) -> None:
    splits = {"train": range(n_train), "test": range(n_train, n_train + n_test)}
    recs = [demo_birds.recording(number) for number in range(n_train + n_test)]
    mb = sum(rec.seconds * rec.codec.kb_per_s for rec in recs) / 1000
    logger.info(
        "making the demo corpus, once: %d recordings of %d species, %.0f min of sound, about %.0f MB, in %s",
        *(len(recs), len(SPECIES), sum(rec.seconds for rec in recs) / 60, mb, corpus),
    )
    folder = Path(tempfile.mkdtemp(prefix=f"{corpus.name}.tmp-", dir=corpus.parent))
    # Threads are enough: numpy and the encoders do their work without the GIL.
    pool = concurrent.futures.ThreadPoolExecutor(machine.cores())
    try:
        files = pool.map(lambda rec: demo_birds.encode(rec, demo_birds.waveform(rec)), recs)
        for split, numbers in splits.items():
            _write_split(folder / split, [recs[i] for i in numbers], files)
        _write_json(folder / "dataset_dict.json", {"splits": list(splits)})
        folder.chmod(0o755)  # mkdtemp's is private, and a cache may be shared
        try:
            folder.rename(corpus)
        except OSError:
            if not corpus.is_dir():  # without locks another process may have been faster, with the same bytes
                raise
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(folder, ignore_errors=True)


def _write_split(folder: Path, recs: list[Recording], files: Iterator[bytes]) -> None:
    folder.mkdir()
    n_shards = min(max(-(-len(recs) // ROWS_PER_SHARD), 2), len(recs))  # at least two, so that every reader handles several
    names = [f"data-{k:05d}-of-{n_shards:05d}.arrow" for k in range(n_shards)]
    digest = hashlib.sha256()
    for k, name in enumerate(names):
        rows = recs[k * len(recs) // n_shards : (k + 1) * len(recs) // n_shards]
        with _synced(folder / name) as file, pa.ipc.new_stream(file, schema()) as sink:
            for start in range(0, len(rows), ROWS_PER_BATCH):
                batch = rows[start : start + ROWS_PER_BATCH]
                encoded = [next(files) for _ in batch]
                for rec, content in zip(batch, encoded, strict=True):
                    digest.update(rec.path.encode() + content)
                audio = [{"bytes": content, "path": rec.path} for rec, content in zip(batch, encoded, strict=True)]
                columns = {"audio": audio, "ebird_code": [rec.label for rec in batch]}
                sink.write_batch(pa.RecordBatch.from_pydict(columns, schema()))
    info = {"citation": "", "description": "", "features": features(), "homepage": "", "license": ""}
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


def _write_json(path: Path, value: Any) -> None:
    with _synced(path) as file:
        file.write(json.dumps(value, indent=2).encode())


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    with open(path, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())  # before the rename: a power cut must not leave a whole name with half a file


@contextlib.contextmanager
def _only_one(lock: Path) -> Iterator[bool]:
    """Hold a lock, which the kernel releases when its holder dies.

    Yields False on a file system without locks.
    """
    with open(lock, "w") as file:  # never removed: another process may be waiting for this very file
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.info("waiting for another process that is making a demo corpus in %s", lock.parent)
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
        else:
            yield True


@functools.cache
def _recipe_hash() -> str:
    return hashlib.sha256(Path(demo_birds.__file__).read_bytes() + Path(__file__).read_bytes()).hexdigest()[:12]


def describe(corpus: Path) -> str:
    """Return a table of each split, read from the shards: recordings, codecs, minutes."""
    suffixes = ("ogg", "mp3", "flac", "wav")
    lines = []
    for split in ("train", "test"):
        total: collections.Counter[str] = collections.Counter()
        per_species: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for shard in sorted((corpus / split).glob("*.arrow")):
            for row in pa.ipc.open_stream(shard.read_bytes()).read_all().to_pylist():
                file, suffix = row["audio"]["bytes"], row["audio"]["path"].rpartition(".")[2]
                with tempfile.NamedTemporaryFile() as copy:  # of MP3 in memory libsndfile 1.2.2 sometimes reads nothing
                    copy.write(file)
                    copy.flush()
                    facts = {"n": 1, suffix: 1, "seconds": soundfile.info(copy.name).duration, "bytes": len(file)}
                per_species[SPECIES[row["ebird_code"]].name].update(facts)
                total.update(facts)
        lines.append(f"{split:18} recordings" + "".join(f"{suffix:>6}" for suffix in suffixes) + "   minutes      MB")
        for name, c in [*sorted(per_species.items()), ("all", total)]:
            codecs = "".join(f"{c[suffix]:6}" for suffix in suffixes)
            lines.append(f"{name:18} {c['n']:10}{codecs}{c['seconds'] / 60:10.1f}{c['bytes'] / 1e6:8.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loaders.audio.demo", description="Make the demo corpus and describe it.")
    parser.add_argument("cache_dir", nargs="?", type=Path, help=f"where to keep it (default: {machine.cache_folder()})")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    corpus = ensure(parser.parse_args().cache_dir)
    print(f"{corpus}\n{describe(corpus)}")


if __name__ == "__main__":
    main()
