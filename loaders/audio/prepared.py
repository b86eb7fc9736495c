"""Recordings prepared once: mono at the front end's rate, 16 bits, so that a crop is a copy.

    DIR/
      prepared.json                          how they were prepared, of what data, and whether all
                                             are
      SPLIT/data-00000-of-00007.arrow        of shards: every row and column of theirs, with a
                                             prepared recording each
      index.json, data/*.parquet, audio/…    of an index: its rows, and below audio/ one file a
                                             recording and channel

A prepared recording is a FLAC file with a checksum for each 4,096 samples
(rust/decode/src/flac_write.rs), as they are or packed without loss. It names the length and the
rate of the recording that it was made from, and so gives the same crops. A recording that cannot be
decoded from end to end is copied as it is: the loader treats it as before.

Shards and files take their names when they are whole, and depend on the source alone: an
interrupted command continues, and several processes share the work and make the same bytes.
"""

import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from loaders import _rust
from loaders.audio import shards
from loaders.audio.recordings import store
from loaders.base import DataError
from loaders.io import atomic_write, files, machine
from loaders.io.checks import first_line

VERSION = 1  # of prepared.json
NAME = "prepared.json"
GROUP = 32  # rows of a shard that are in memory together
MAX_BATCH = 1 << 30  # [bytes] of a batch of rows: 32-bit offsets count twice as many
# [bytes] of a prepared recording up to the name of its block of metadata
HEAD, MARK = 50, slice(46, 50)
# of `loaders.audio.spectrogram.Config`, which must agree
SETTINGS = ("sample_rate", "time_expansion", "channel")


class Settings(NamedTuple):
    """The form of prepared recordings."""

    sample_rate: int = 32_000  # [Hz]
    time_expansion: float = 1.0  # times slower than life that recordings are
    channel: int = -1  # of recordings whose row names none; -1 = the mean
    packed: bool = False


class Counts:
    """The work of one call."""

    def __init__(self) -> None:
        self.made = 0  # shards, or recordings of an index
        self.found = 0  # that were there
        self.missing = 0  # that are left to other processes
        self.clipped = 0  # recordings with samples beyond full scale
        self.kept: list[str] = []  # recordings that were copied as they are, with the reasons
        self.bytes = 0


class _Item(NamedTuple):
    path: str  # in the index
    channel: int
    name: str  # of the prepared file
    shards: "_rust.Index"
    row: int


def problem(path: str, config: Any) -> str:
    """Return why a prepared folder ``path`` cannot be read with a loader's config, else ""."""
    place = files.expanded(path)
    folder = next((folder for folder in (place, place.parent) if (folder / NAME).is_file()), None)
    if folder is None:
        return ""
    about = _read(folder)
    again = "run the same jaxtrain prepare again"
    if not about["complete"]:
        return f"is {path!r}, of which jaxtrain prepare has not made all; {again} to continue"
    there = collections.Counter(
        (shard.parent, int(shard.stem[-5:])) for shard in folder.rglob("data-*-of-?????.arrow")
    )
    for (parent, n), found in there.items():
        if found < n:
            return (
                f"is {path!r}, and {parent} lacks {n - found} of its {n} shards; {again} to make"
                " them"
            )
    for name in SETTINGS:
        if (prepared := about["settings"][name]) != (asked := getattr(config, name)):
            flag = "--" + name.replace("_", "-")
            return (
                f"is {path!r}, which was prepared with {name}={prepared}, and data.{name} is"
                f" {asked}; set that back, or prepare the recordings again: jaxtrain prepare …"
                f" {flag}={asked}"
            )
    return ""


def prepare(
    source: str,
    out: pathlib.Path,
    settings: Settings,
    *,
    part: tuple[int, int] = (0, 1),
    threads: int = 0,
    audio_root: str = "",
    links: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> Counts:
    """Prepare the recordings of an index or of shards, or those that are missing in ``out``.

    Args:
      part: (k, n): of every n shards or recordings, this process makes number k.

    Raises DataError: a source that is none, or an ``out`` that holds other things. Raises OSError,
    with the name of a file that could not be written.
    """
    found = files.expanded(shards.resolve(source))
    if any((at / NAME).is_file() for at in (found, found.parent)):
        raise DataError(f"{source} is prepared already; name the data that it was made from")
    is_index = (found / "index.json").is_file()
    splits = (
        sorted(store.read(found)["splits"])
        if is_index
        else (shards.splits_of(found) if found.is_dir() else [])
    )
    opened: dict[str, tuple[list[pathlib.Path], _rust.Index]] = {}
    for split in splits or [""]:
        places = shards.find_shards(str(found), split or "train", links=links)
        opened[split] = (
            places,
            shards.open_index(places, label="", audio_root=audio_root, links=links),
        )
    fingerprints = {split: index.fingerprint for split, (_, index) in opened.items()}
    about = {
        "version": VERSION,
        "settings": settings._asdict(),
        "fingerprints": fingerprints,
        "complete": False,
    }
    is_complete = _begin(out, about)
    counts = Counts()
    with _Pool(threads or machine.cores(), settings) as pool:
        make: Callable[..., Any] = _index if is_index else _shards
        rows = make(out, opened, settings, part, pool, counts, note)
        if not counts.missing and not is_complete:
            # then the other process completes the folder
            with contextlib.suppress(atomic_write.BusyError):
                if rows:
                    _rows(found, out, *rows)
                _write_json(out / NAME, {**about, "complete": True})
    return counts


def _begin(out: pathlib.Path, about: dict[str, Any]) -> bool:
    """Make the folder, or check its data and settings. Return whether all is prepared."""
    atomic_write.refuse_unwritable(out, folder=True)
    if (out / NAME).is_file():
        before = _read(out)
        for name, why in (("settings", "with other settings"), ("fingerprints", "from other data")):
            if before[name] != about[name]:
                raise DataError(
                    f"--out {out} was prepared {why}: {before[name]}, and now {about[name]}; name a"
                    " new folder, or delete it"
                )
        return bool(before["complete"])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(
            f"--out {out} holds other things; name a new folder, or one of jaxtrain prepare"
        )
    with atomic_write.naming(out):
        out.mkdir(parents=True, exist_ok=True)
        _write_json(out / NAME, about)
    return False


def _read(folder: pathlib.Path) -> dict[str, Any]:
    try:
        about = files.read_json(files.inside(folder, NAME))
        if about.get("version") != VERSION:
            raise TypeError(
                f"it is of version {about.get('version')!r:.80}, and this jaxtrain reads {VERSION}"
            )
        if not isinstance(about["complete"], bool) or not isinstance(about["fingerprints"], dict):
            raise TypeError("it states no fingerprints, or not whether it is complete")
        Settings(**about["settings"])
        return about
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"has a broken {folder / NAME}: {error}; prepare the recordings again, in a new folder"
        ) from error


def _write_json(path: pathlib.Path, about: dict[str, Any]) -> None:
    with _whole(path) as file:
        file.write((json.dumps(about, indent=2, ensure_ascii=False) + "\n").encode())


def _whole(path: pathlib.Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return atomic_write.file(path)


class _Pool:
    """Threads that prepare recordings, and stop within a chunk of one if the block ends early."""

    def __init__(self, threads: int, settings: Settings):
        self._threads, self._settings, self._stop = threads, settings, threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def map(self, function: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        """Yield the results in order, a few of them ahead."""
        ahead: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
        for item in items:
            ahead.append(self._pool.submit(function, item))
            if len(ahead) > 2 * self._threads:
                yield ahead.popleft().result()
        while ahead:  # a result is freed before the next one is awaited
            yield ahead.popleft().result()

    def prepare(
        self, index: "_rust.Index", row: int, channel: int, **more: Any
    ) -> tuple[bytes, int]:
        """Return a row prepared, and its clipped samples. Raises ValueError for a broken one."""
        settings = self._settings
        return index.prepare(
            row,
            rate=settings.sample_rate,
            time_expansion=settings.time_expansion,
            channel=None if channel < 0 else channel,
            packed=settings.packed,
            stop=self._stop.is_set,
            **more,
        )


def _shards(
    out: pathlib.Path,
    opened: Any,
    settings: Settings,
    part: tuple[int, int],
    pool: _Pool,
    counts: Counts,
    note: Any,
) -> None:
    places = [
        (split, k, place) for split, (of_it, _) in opened.items() for k, place in enumerate(of_it)
    ]
    for number, (split, k, place) in enumerate(places):
        of_it, index = opened[split]
        path = out / split / f"data-{k:05d}-of-{len(of_it):05d}.arrow"
        if path.is_file():
            counts.found += 1
        elif number % part[1] != part[0]:
            counts.missing += 1
        else:
            try:
                with _whole(path) as file:
                    _shard(
                        place, index, int(index.first_rows[k]), settings.channel, pool, counts, file
                    )
                counts.made += 1
                note(f"{path}: {path.stat().st_size / 1e6:,.0f} MB")
            except atomic_write.BusyError:
                counts.missing += 1
        if path.is_file():
            counts.bytes += path.stat().st_size


def _shard(
    place: pathlib.Path,
    index: "_rust.Index",
    first: int,
    channel: int,
    pool: _Pool,
    counts: Counts,
    file: IO[bytes],
) -> None:
    writer = None
    with _reading(place), contextlib.ExitStack() as closing:
        for batch in _batches(place, closing):
            writer = writer or closing.enter_context(pa.ipc.new_stream(file, batch.schema))
            for group in (batch.slice(at, GROUP) for at in range(0, len(batch), GROUP)):
                for some in _prepared_batches(group, index, first, channel, pool, counts):
                    writer.write_batch(some)
                first += len(group)


@contextlib.contextmanager
def _reading(place: pathlib.Path) -> Iterator[None]:
    """Raise DataError for what Arrow cannot read. An OSError of the system has a number."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(f"{place} cannot be read: {first_line(error)}") from error


def _batches(place: pathlib.Path, closing: contextlib.ExitStack) -> Iterator[pa.RecordBatch]:
    with place.open("rb") as opened:
        kind = opened.read(6)
    if kind.startswith(b"PAR1"):
        yield from closing.enter_context(pq.ParquetFile(place)).iter_batches(GROUP)
        return
    mapped = closing.enter_context(pa.memory_map(str(place)))
    if kind == b"ARROW1":
        reader = pa.ipc.open_file(mapped)
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(mapped)


def _prepared_batches(
    group: pa.RecordBatch,
    index: "_rust.Index",
    first: int,
    channel: int,
    pool: _Pool,
    counts: Counts,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with prepared recordings, in one batch, or one each if they are too large."""
    number = group.schema.get_field_index("audio")
    audio = group.column(number)
    fields = {field.name: k for k, field in enumerate(audio.type)}

    def one(k: int) -> tuple[bytes | None, int, str]:
        try:
            return (*pool.prepare(index, first + k, channel), "")
        except ValueError as error:
            return audio[k].as_py()["bytes"] if audio[k].is_valid else None, 0, str(error)

    values: list[bytes | None] = []
    for k, (value, clipped, reason) in enumerate(pool.map(one, range(len(group)))):
        values.append(value)
        counts.clipped += clipped > 0
        if reason:
            counts.kept.append(
                f"row {first + k} ({index.path(first + k) or 'without a name'}): {reason}"
            )
    size = 1 if sum(len(value or b"") for value in values) > MAX_BATCH else len(group)
    for at in range(0, len(group), size):
        some, rows = group.slice(at, size), audio.slice(at, size)
        columns = [rows.field(k) for k in range(len(audio.type))]
        columns[fields["bytes"]] = pa.array(
            values[at : at + size], audio.type[fields["bytes"]].type
        )
        prepared = pa.StructArray.from_arrays(columns, fields=list(audio.type), mask=rows.is_null())
        yield some.set_column(number, group.schema.field(number), prepared)


def _index(
    out: pathlib.Path,
    opened: Any,
    settings: Settings,
    part: tuple[int, int],
    pool: _Pool,
    counts: Counts,
    note: Any,
) -> tuple[dict[pathlib.Path, pa.Table], dict[tuple[str, int], _Item]]:
    """Make the recordings. Return the index's tables and its recordings by path and channel."""
    tables = {}
    for place in (place for places, _ in opened.values() for place in places):
        with _reading(place):
            tables[place] = pq.read_table(place)
    items = _items(opened, tables, settings)
    folder = out / "audio"

    def is_there(item: _Item) -> bool:
        return any((folder / name).is_file() for name in (item.name, item.path))

    absent = [(number, item) for number, item in enumerate(items.values()) if not is_there(item)]
    todo = [item for number, item in absent if number % part[1] == part[0]]
    counts.found, counts.missing = len(items) - len(absent), len(absent) - len(todo)

    def one(item: _Item) -> tuple[int, str] | None:
        if is_there(item):
            return None
        try:
            with _whole(files.inside(folder, item.name)) as file:
                return pool.prepare(item.shards, item.row, item.channel, out=file.name)[1], ""
        except ValueError as error:
            try:
                encoded = item.shards.encoded(item.row)
            except ValueError as missing:
                raise DataError(str(missing)) from error
            with _whole(files.inside(folder, item.path)) as file:
                file.write(encoded)
            return 0, str(error)
        except atomic_write.BusyError:
            return None

    for item, made in zip(todo, pool.map(one, todo), strict=True):
        if made is None:  # by another process
            counts.found += is_there(item)
            counts.missing += not is_there(item)
            continue
        clipped, reason = made
        counts.made += 1
        counts.clipped += clipped > 0
        if reason:
            counts.kept.append(f"{item.path}: {reason}")
        if counts.made % 100 == 0:
            note(f"{counts.made} of {len(todo)} recordings")
    counts.bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return tables, items


def _items(
    opened: Any, tables: dict[pathlib.Path, pa.Table], settings: Settings
) -> dict[tuple[str, int], _Item]:
    items: dict[tuple[str, int], _Item] = {}
    pairs = [
        (pair, index, int(first) + k)
        for places, index in opened.values()
        for first, place in zip(index.first_rows, places, strict=True)
        for k, pair in enumerate(_names(tables[place]))
    ]
    originals, taken = {path for (path, _), _, _ in pairs}, set[str]()
    for (path, channel), index, row in pairs:
        if (path, channel) in items:
            continue
        stem, suffix = os.path.splitext(path)[0], f".{channel}.flac" if channel >= 0 else ".flac"
        name, number = stem + suffix, 1
        while name.casefold() in taken or name in originals - {path}:
            number += 1
            name = f"{stem}-{number}{suffix}"
        taken.add(name.casefold())
        items[path, channel] = _Item(
            path, channel if channel >= 0 else settings.channel, name, index, row
        )
    return items


def _names(table: pa.Table) -> list[tuple[str, int]]:
    """Return the recording and the channel of each row, -1 if it names none."""
    paths = table["audio"].combine_chunks().field("path").to_pylist()
    channels = (
        table["channel"].to_pylist() if "channel" in table.column_names else [None] * len(paths)
    )
    return [
        (path, -1 if channel is None else channel)
        for path, channel in zip(paths, channels, strict=True)
    ]


def _rows(
    source: pathlib.Path, out: pathlib.Path, tables: dict[pathlib.Path, pa.Table], items: Any
) -> None:
    """Write the index of the prepared recordings: the same rows, which name other files."""
    prepared = {
        pair: item.name for pair, item in items.items() if _is_prepared(out / "audio" / item.name)
    }
    for place, table in tables.items():
        pairs = _names(table)
        paths = pa.array([prepared.get(pair, pair[0]) for pair in pairs], pa.string())
        nothing = pa.nulls(len(pairs), pa.binary())
        columns = {
            "audio": pa.StructArray.from_arrays(
                [nothing, paths], fields=list(table.schema.field("audio").type)
            )
        }
        if "channel" in table.column_names:
            channels = [-1 if pair in prepared else pair[1] for pair in pairs]
            columns["channel"] = pa.array(channels, table.schema.field("channel").type)
        for name, column in columns.items():
            number = table.schema.get_field_index(name)
            table = table.set_column(number, table.schema.field(number), column)
        with _whole(out / "data" / place.name) as file:
            pq.write_table(
                table, file, use_dictionary=["audio.path", *store.TEXTS], compression="zstd"
            )
    about = store.read(source)
    _write_json(out / "index.json", {**about, "root": "audio"})
    if (listed := source / "errors.csv").is_file():
        with _whole(out / listed.name) as file:
            file.write(listed.read_bytes())


def _is_prepared(path: pathlib.Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)[MARK] == b"jxtr"
    except FileNotFoundError:
        return False
