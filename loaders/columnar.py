"""One column of a shard in Arrow IPC (stream or file) or Parquet, without reading the others."""

import json
import pathlib
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from loaders.base import DataError


def read(path: pathlib.Path, name: str) -> tuple[pa.ChunkedArray, list[str] | None]:
    """Reads a column, and the names of its classes if Hugging Face's metadata have them (also for lists of classes).

    Raises DataError: there is no such column, or the shard is broken.
    """
    try:
        schema, table = _open(path)
        if name not in schema.names:
            raise DataError(f"{path} has no column {name!r}; it has {', '.join(schema.names)}")
        return table(name), _class_names(schema, name)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: {error}") from error


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is a list of whole numbers."""
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return lists and pa.types.is_integer(kind.value_type)


def _open(path: pathlib.Path) -> tuple[pa.Schema, Any]:
    if path.suffix == ".parquet":
        file = pq.ParquetFile(path)
        return file.schema_arrow, lambda name: file.read(columns=[name]).column(name)
    # Mapped, so that the pages of other columns are never read.
    source = pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(source)
        batches = list(stream)
    except pa.ArrowInvalid:
        source.seek(0)
        stream = pa.ipc.open_file(source)
        batches = [stream.get_batch(i) for i in range(stream.num_record_batches)]
    kind = lambda name: stream.schema.field(name).type  # noqa: E731
    return stream.schema, lambda name: pa.chunked_array([batch.column(name) for batch in batches], kind(name))


def _class_names(schema: pa.Schema, name: str) -> list[str] | None:
    text = (schema.metadata or {}).get(b"huggingface")
    feature = json.loads(text).get("info", {}).get("features", {}).get(name) if text else None
    while feature:  # Sequence and List have their element's feature inside; older versions write a list of one
        if isinstance(feature, list):
            feature = feature[0]
        elif "names" in feature:
            return feature["names"]
        else:
            feature = feature.get("feature")
    return None
