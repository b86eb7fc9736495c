"""One column of a shard in Arrow IPC or Parquet, without the others. Files as Arrow reads them."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from loaders.base import DataError
from loaders.io import files

FILE = b"ARROW1"  # the beginning of an IPC file, which no stream has


def read(path: pathlib.Path, name: str) -> tuple[pa.ChunkedArray, list[str] | None]:
    """Read a column, and its classes' names if Hugging Face's metadata have them.

    Lists of classes have them, too. Raises DataError: there is no such column, or the shard is
    broken.
    """
    with files.reading(path):
        schema, table = _open(path)
        _require(path, schema, name)
        return _valid(table(name)), _class_names(schema, name)


def read_some(path: pathlib.Path, *names: str) -> dict[str, list[Any]]:
    """Return the values of some columns, those that a shard has. Raises DataError."""
    with files.reading(path):
        schema, table = _open(path)
        return {name: _valid(table(name)).to_pylist() for name in names if name in schema.names}


def require(path: pathlib.Path, *names: str) -> None:
    """Raise DataError if ``names`` are no columns of a shard, with those of class labels."""
    with files.reading(path):
        schema, _ = _open(path)
        for name in names:
            _require(path, schema, name)


def _require(path: pathlib.Path, schema: pa.Schema, name: str) -> None:
    if name in schema.names:
        return
    text = f"{path} has no column {name!r}; it has {', '.join(schema.names)}"
    if name == "audio":
        raise DataError(f"{text}; recordings are read from a column of that name")
    labels = [column for column in schema.names if _class_names(schema, column) is not None]
    overrides = []
    for column in labels:
        is_multilabel = is_list(schema.field(column).type)
        suffix = " with data.multilabel=true" if is_multilabel else ""
        overrides.append(f"data.label={column}{suffix}")
    if overrides:
        raise DataError(
            f"{text}; of these {', '.join(labels)} holds class labels: set {' or '.join(overrides)}"
        )
    raise DataError(
        f"{text}; none of these is a ClassLabel: cast one and save the data again, or set"
        " data.label= for no labels"
    )


def timed(path: pathlib.Path) -> tuple[str, str] | None:
    """Return the columns of begin and end if rows are events of recordings, else None.

    They are if a recording has several, and one begins after its start. Raises DataError.
    """
    with files.reading(path):
        schema, table = _open(path)
        for names in (("start_time", "end_time"), ("start", "end")):
            if not all(_is_floating(schema, name) for name in names):
                continue
            starts, ends = (_valid(table(name)) for name in names)
            is_later_event = pc.and_(pc.greater(starts, 0), pc.is_valid(ends))
            if not pc.any(is_later_event).as_py():
                continue
            paths = _recordings(path, schema, table)
            if paths is not None and len(pc.unique(paths)) < len(paths):
                return names
    return None


def _is_floating(schema: pa.Schema, name: str) -> bool:
    return name in schema.names and bool(pa.types.is_floating(schema.field(name).type))


@contextlib.contextmanager
def native(path: pathlib.Path) -> Iterator[pa.NativeFile]:
    """Yield a regular file as Arrow itself reads it. Raises FileError for everything else.

    Of a file that Python has opened, Arrow's threads keep pieces that only the interpreter can
    free. A process that ends meanwhile is aborted (pyarrow 26: of short ones, two in five).
    """
    with files.regular(path), pa.OSFile(str(path)) as file:
        yield file


def _valid(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the same column if its offsets are valid: pyarrow would read beyond the values."""
    column.validate(full=True)
    return column


def _recordings(path: pathlib.Path, schema: pa.Schema, table: Any) -> pa.ChunkedArray | None:
    """Return the name of each row's recording. Its bytes are not read."""
    if "filepath" in schema.names:
        return _valid(table("filepath"))
    if "audio" not in schema.names or not pa.types.is_struct(schema.field("audio").type):
        return None
    if path.suffix == ".parquet":
        paths = pq.ParquetFile(path).read(columns=["audio.path"])
        audio = _valid(paths.column("audio"))
    else:
        audio = _valid(table("audio"))
    has_path = any(field.name == "path" for field in audio.type)
    return pc.struct_field(audio, "path") if has_path else None


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is a list of whole numbers."""
    types = pa.types
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(lists and types.is_integer(kind.value_type))


def _open(path: pathlib.Path) -> tuple[pa.Schema, Any]:
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        return file.schema_arrow, lambda name: file.read(columns=[name]).column(name)
    schema, batches = arrow(path)

    def column(name: str) -> pa.ChunkedArray:
        chunks = [batch.column(name) for batch in batches]
        return pa.chunked_array(chunks, schema.field(name).type)

    return schema, column


def arrow(path: pathlib.Path) -> tuple[pa.Schema, list[pa.RecordBatch]]:
    """Return the batches of an IPC stream or file, mapped: unused columns are never read."""
    source = pa.memory_map(str(path))
    is_file = source.read(len(FILE)) == FILE
    source.seek(0)
    if is_file:
        file = pa.ipc.open_file(source)
        return file.schema, [file.get_batch(i) for i in range(file.num_record_batches)]
    stream = pa.ipc.open_stream(source)
    return stream.schema, list(stream)


def _class_names(schema: pa.Schema, name: str) -> list[str] | None:
    text = (schema.metadata or {}).get(b"huggingface")
    if not text:
        return None
    metadata = files.parse(text.decode(), 'its key "huggingface"')
    feature = metadata.get("info", {}).get("features", {}).get(name)
    # Sequence and List have their element's feature inside. Older versions write a list of one.
    while feature and (isinstance(feature, list) or "names" not in feature):
        feature = feature[0] if isinstance(feature, list) else feature.get("feature")
    names: list[str] | None = feature["names"] if feature else None
    return names
