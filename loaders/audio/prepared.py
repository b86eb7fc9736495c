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
SHARDS = "data-*-of-?????.arrow"
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
    """A recording of an index, of one channel."""

    path: str  # in the index
    channel: int
    name: str  # of the prepared file
    shards: "_rust.Index"
    row: int


Items = dict[tuple[str, int], _Item]  # by the path and the channel that rows name


class _Source(NamedTuple):
    """The shards of a split, and the index over them."""

    shards: list[pathlib.Path]
    row_index: "_rust.Index"


class _Work(NamedTuple):
    """The part of this process in preparing recordings."""

    sources: dict[str, _Source]  # by split
    settings: Settings
    part: tuple[int, int]
    pool: "_Pool"
    counts: Counts
    note: Callable[[str], None]

    def is_ours(self, number: int) -> bool:
        process, n_processes = self.part
        return number % n_processes == process


def problem(path: str, config: Any) -> str:
    """Return why a prepared folder ``path`` cannot be read with a loader's config, else ""."""
    place = files.expanded(path)
    if (place / NAME).is_file():
        folder = place
    elif (place.parent / NAME).is_file():
        folder = place.parent
    else:
        return ""
    metadata = _read(folder)
    if not metadata["complete"]:
        return (
            f"is {path!r}, of which jaxtrain prepare has not made all; run the same jaxtrain"
            " prepare again to continue"
        )
    shards_of = [(shard.parent, int(shard.stem[-5:])) for shard in folder.rglob(SHARDS)]
    for (parent, n), n_present in collections.Counter(shards_of).items():
        if n_present < n:
            return (
                f"is {path!r}, and {parent} lacks {n - n_present} of its {n} shards; run the same"
                " jaxtrain prepare again to make them"
            )
    for name in SETTINGS:
        prepared = metadata["settings"][name]
        configured = getattr(config, name)
        if prepared != configured:
            flag = "--" + name.replace("_", "-")
            return (
                f"is {path!r}, which was prepared with {name}={prepared}, and data.{name} is"
                f" {configured}; set that back, or prepare the recordings again: jaxtrain prepare …"
                f" {flag}={configured}"
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
    place = files.expanded(shards.resolve(source))
    if (place / NAME).is_file() or (place.parent / NAME).is_file():
        raise DataError(f"{source} is prepared already; name the data that it was made from")
    is_index = (place / "index.json").is_file()
    sources = {}
    for split in _splits(place, is_index):
        paths = shards.find_shards(str(place), split or "train", links=links)
        index = shards.open_index(paths, label="", audio_root=audio_root, links=links)
        sources[split] = _Source(paths, index)
    metadata = {
        "version": VERSION,
        "settings": settings._asdict(),
        "fingerprints": {split: source.row_index.fingerprint for split, source in sources.items()},
        "complete": False,
    }
    is_complete = _begin(out, metadata)
    counts = Counts()
    with _Pool(threads or machine.cores(), settings) as pool:
        work = _Work(sources, settings, part, pool, counts, note)
        if is_index:
            tables = _read_tables(sources)
            items = _items(sources, tables, settings)
            _prepare_index(out, items, work)
        else:
            _prepare_shards(out, work)
        if not counts.missing and not is_complete:
            # then the other process completes the folder
            with contextlib.suppress(atomic_write.BusyError):
                if is_index:
                    _write_index(place, out, tables, items)
                _write_json(out / NAME, {**metadata, "complete": True})
    return counts


def _splits(place: pathlib.Path, is_index: bool) -> list[str]:
    """Return the splits of a source, or the empty name if it is not split."""
    splits: list[str] = []
    if is_index:
        splits = sorted(store.read(place)["splits"])
    elif place.is_dir():
        splits = shards.splits_of(place)
    return splits or [""]


def _begin(out: pathlib.Path, metadata: dict[str, Any]) -> bool:
    """Make the folder, or check its data and settings. Return whether all is prepared."""
    atomic_write.refuse_unwritable(out, folder=True)
    if (out / NAME).is_file():
        earlier = _read(out)
        for name, why in (("settings", "with other settings"), ("fingerprints", "from other data")):
            if earlier[name] != metadata[name]:
                raise DataError(
                    f"--out {out} was prepared {why}: {earlier[name]}, and now {metadata[name]};"
                    " name a new folder, or delete it"
                )
        return bool(earlier["complete"])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(
            f"--out {out} holds other things; name a new folder, or one of jaxtrain prepare"
        )
    with atomic_write.naming(out):
        out.mkdir(parents=True, exist_ok=True)
        _write_json(out / NAME, metadata)
    return False


def _read(folder: pathlib.Path) -> dict[str, Any]:
    try:
        metadata = files.read_json(files.inside(folder, NAME))
        version = metadata.get("version")
        if version != VERSION:
            raise TypeError(f"it is of version {version!r:.80}, and this jaxtrain reads {VERSION}")
        is_stated = isinstance(metadata["complete"], bool)
        if not is_stated or not isinstance(metadata["fingerprints"], dict):
            raise TypeError("it states no fingerprints, or not whether it is complete")
        Settings(**metadata["settings"])
        return metadata
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"has a broken {folder / NAME}: {error}; prepare the recordings again, in a new folder"
        ) from error


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    with _complete(path) as file:
        file.write(f"{text}\n".encode())


def _complete(path: pathlib.Path) -> contextlib.AbstractContextManager[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return atomic_write.file(path)


class _Pool:
    """Threads that prepare recordings, and stop within a chunk of one if the block ends early."""

    def __init__(self, threads: int, settings: Settings):
        self._threads = threads
        self._settings = settings
        self._stop = threading.Event()
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


def _prepare_shards(out: pathlib.Path, work: _Work) -> None:
    number = 0
    for split, source in work.sources.items():
        n_shards = len(source.shards)
        for shard in range(n_shards):
            path = out / split / f"data-{shard:05d}-of-{n_shards:05d}.arrow"
            _prepare_shard(path, source, shard, number, work)
            number += 1


def _prepare_shard(
    path: pathlib.Path, source: _Source, shard: int, number: int, work: _Work
) -> None:
    """Make a shard of a split, unless it is there, or left to another process."""
    counts = work.counts
    if path.is_file():
        counts.found += 1
    elif not work.is_ours(number):
        counts.missing += 1
    else:
        try:
            with _complete(path) as file:
                _write_shard(source, shard, work, file)
            counts.made += 1
            work.note(f"{path}: {path.stat().st_size / 1e6:,.0f} MB")
        except atomic_write.BusyError:
            counts.missing += 1
    if path.is_file():
        counts.bytes += path.stat().st_size


def _write_shard(source: _Source, shard: int, work: _Work, file: IO[bytes]) -> None:
    place = source.shards[shard]
    row = int(source.row_index.first_rows[shard])
    writer = None
    with _reading(place), contextlib.ExitStack() as closing:
        for batch in _batches(place, closing):
            if writer is None:
                writer = closing.enter_context(pa.ipc.new_stream(file, batch.schema))
            for start in range(0, len(batch), GROUP):
                group = batch.slice(start, GROUP)
                for prepared in _prepared_batches(group, source.row_index, row, work):
                    writer.write_batch(prepared)
                row += len(group)


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
    group: pa.RecordBatch, index: "_rust.Index", first: int, work: _Work
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with prepared recordings, in one batch, or one each if they are too large."""
    number = group.schema.get_field_index("audio")
    audio = group.column(number)
    contents = _prepare_rows(audio, index, first, work)
    n_bytes = sum(len(content or b"") for content in contents)
    size = 1 if n_bytes > MAX_BATCH else len(group)
    for start in range(0, len(group), size):
        rows = audio.slice(start, size)
        prepared = _with_contents(rows, contents[start : start + size])
        field = group.schema.field(number)
        yield group.slice(start, size).set_column(number, field, prepared)


def _prepare_rows(
    audio: pa.StructArray, index: "_rust.Index", first: int, work: _Work
) -> list[bytes | None]:
    """Return the recordings of some rows, those that are broken as they are."""

    def prepare_row(row: int) -> tuple[bytes | None, int, str]:
        try:
            content, clipped = work.pool.prepare(index, first + row, work.settings.channel)
            return content, clipped, ""
        except ValueError as error:
            original = audio[row].as_py()["bytes"] if audio[row].is_valid else None
            return original, 0, str(error)

    contents: list[bytes | None] = []
    results = work.pool.map(prepare_row, range(len(audio)))
    for row, (content, clipped, reason) in enumerate(results, first):
        contents.append(content)
        work.counts.clipped += clipped > 0
        if reason:
            name = index.path(row) or "without a name"
            work.counts.kept.append(f"row {row} ({name}): {reason}")
    return contents


def _with_contents(rows: pa.StructArray, contents: list[bytes | None]) -> pa.StructArray:
    """Return the recordings of rows with other bytes."""
    columns = []
    for number, field in enumerate(rows.type):
        is_content = field.name == "bytes"
        columns.append(pa.array(contents, field.type) if is_content else rows.field(number))
    return pa.StructArray.from_arrays(columns, fields=list(rows.type), mask=rows.is_null())


def _read_tables(sources: dict[str, _Source]) -> dict[pathlib.Path, pa.Table]:
    tables = {}
    for source in sources.values():
        for place in source.shards:
            with _reading(place):
                tables[place] = pq.read_table(place)
    return tables


def _prepare_index(out: pathlib.Path, items: Items, work: _Work) -> None:
    """Make the recordings of an index."""
    folder = out / "audio"

    def is_made(item: _Item) -> bool:
        return any((folder / name).is_file() for name in (item.name, item.path))

    missing = [(number, item) for number, item in enumerate(items.values()) if not is_made(item)]
    todo = [item for number, item in missing if work.is_ours(number)]
    counts = work.counts
    counts.found = len(items) - len(missing)
    counts.missing = len(missing) - len(todo)

    def prepare_item(item: _Item) -> tuple[int, str] | None:
        return None if is_made(item) else _prepare_file(folder, item, work.pool)

    for item, result in zip(todo, work.pool.map(prepare_item, todo), strict=True):
        if result is None:  # by another process
            counts.found += is_made(item)
            counts.missing += not is_made(item)
            continue
        clipped, reason = result
        counts.made += 1
        counts.clipped += clipped > 0
        if reason:
            counts.kept.append(f"{item.path}: {reason}")
        if counts.made % 100 == 0:
            work.note(f"{counts.made} of {len(todo)} recordings")
    counts.bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _prepare_file(folder: pathlib.Path, item: _Item, pool: "_Pool") -> tuple[int, str] | None:
    """Make the file of a recording, or copy it as it is.

    Return its clipped samples and why it was copied, or None if another process makes it.
    """
    try:
        with _complete(files.inside(folder, item.name)) as file:
            _, clipped = pool.prepare(item.shards, item.row, item.channel, out=file.name)
        return clipped, ""
    except ValueError as error:
        try:
            encoded = item.shards.encoded(item.row)
        except ValueError as missing:
            raise DataError(str(missing)) from error
        with _complete(files.inside(folder, item.path)) as file:
            file.write(encoded)
        return 0, str(error)
    except atomic_write.BusyError:
        return None


def _items(
    sources: dict[str, _Source], tables: dict[pathlib.Path, pa.Table], settings: Settings
) -> Items:
    rows = []
    for source in sources.values():
        for first, place in zip(source.row_index.first_rows, source.shards, strict=True):
            pairs = _recordings(tables[place])
            rows += [(pair, source.row_index, row) for row, pair in enumerate(pairs, int(first))]
    originals = {path for (path, _), _, _ in rows}
    prepared_names = set[str]()  # in one case, as some file systems have them
    items: Items = {}
    for (path, channel), index, row in rows:
        if (path, channel) in items:
            continue
        name = _free_name(path, channel, prepared_names, originals - {path})
        prepared_names.add(name.casefold())
        item_channel = channel if channel >= 0 else settings.channel
        items[path, channel] = _Item(path, item_channel, name, index, row)
    return items


def _free_name(path: str, channel: int, prepared_names: set[str], originals: set[str]) -> str:
    """Return a name for a prepared recording that no other file has."""
    stem = os.path.splitext(path)[0]
    suffix = f".{channel}.flac" if channel >= 0 else ".flac"
    name = stem + suffix
    number = 1
    while name.casefold() in prepared_names or name in originals:
        number += 1
        name = f"{stem}-{number}{suffix}"
    return name


def _recordings(table: pa.Table) -> list[tuple[str, int]]:
    """Return the recording and the channel of each row, -1 if it names none."""
    paths = table["audio"].combine_chunks().field("path").to_pylist()
    if "channel" not in table.column_names:
        return [(path, -1) for path in paths]
    channels = table["channel"].to_pylist()
    numbers = [-1 if channel is None else channel for channel in channels]
    return list(zip(paths, numbers, strict=True))


def _write_index(
    source: pathlib.Path,
    out: pathlib.Path,
    tables: dict[pathlib.Path, pa.Table],
    items: Items,
) -> None:
    """Write the index of the prepared recordings: the same rows, which name other files."""
    prepared = {}
    for pair, item in items.items():
        if _is_prepared(out / "audio" / item.name):
            prepared[pair] = item.name
    for place, table in tables.items():
        pairs = _recordings(table)
        paths = pa.array([prepared.get(pair, pair[0]) for pair in pairs], pa.string())
        no_bytes = pa.nulls(len(pairs), pa.binary())
        fields = list(table.schema.field("audio").type)
        audio = pa.StructArray.from_arrays([no_bytes, paths], fields=fields)
        table = _with_column(table, "audio", audio)
        if "channel" in table.column_names:
            channels = [-1 if pair in prepared else pair[1] for pair in pairs]
            kind = table.schema.field("channel").type
            table = _with_column(table, "channel", pa.array(channels, kind))
        dictionaries = ["audio.path", *store.TEXTS]
        with _complete(out / "data" / place.name) as file:
            pq.write_table(table, file, use_dictionary=dictionaries, compression="zstd")
    _write_json(out / "index.json", {**store.read(source), "root": "audio"})
    errors = source / "errors.csv"
    if errors.is_file():
        with _complete(out / errors.name) as file:
            file.write(errors.read_bytes())


def _with_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    number = table.schema.get_field_index(name)
    return table.set_column(number, table.schema.field(number), column)


def _is_prepared(path: pathlib.Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)[MARK] == b"jxtr"
    except FileNotFoundError:
        return False
