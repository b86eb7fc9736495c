"""A folder of `jaxtrain embed`, read with suspicion: it may come from anyone."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxtrain.workloads.bird.inference import InferenceError
from loaders.audio.front_end import DEFAULT
from loaders.io import columnar, files

ABOUT, ROWS = "embeddings.json", "rows.parquet"
VERSION = 1  # of ABOUT
MAX_CLASSES = 100_000  # of labels without names
MAX_FEATURE = 1e18  # larger ones have squares that are no numbers of 32 bits


class Places(NamedTuple):
    """The places of a folder's rows in recordings."""

    paths: list[str]  # relative to the root
    start: np.ndarray  # float64 [n] s, nan if it is not known
    end: np.ndarray
    clock: list[str]  # ISO 8601, or ""
    content: list[str]  # a digest that copies of a recording share, or ""
    # whether the run was trained on the recording, or None if that is not known
    trained: list[bool | None]


_OPTIONAL = {"content": pa.string(), "trained": pa.bool_()}
_COLUMNS = {
    "path": pa.string(),
    "start": pa.float64(),
    "end": pa.float64(),
    "clock": pa.string(),
}


class Embeddings(NamedTuple):
    """A finished folder, whose arrays are mapped at their first use."""

    folder: pathlib.Path
    metadata: Mapping[str, Any]  # embeddings.json
    n: int  # rows
    names: tuple[str, ...]  # of the classes of its labels
    root: str  # the folder of the recordings, or "" if it is not known
    encoder: str  # the digest of the encoder

    @property
    def front_end(self) -> Mapping[str, Any]:
        """How recordings reached the encoder: spectrograms' settings, and how clips were cut."""
        settings: dict[str, Any] = {}
        for name in ("front_end", "clips"):
            part = self.metadata.get(name, {})
            if isinstance(part, dict):
                settings |= part
        return settings

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.npy").exists()

    def array(self, name: str, n_axes: int) -> np.ndarray:
        """Return NAME.npy, mapped, of so many axes. Raises InferenceError."""
        path = self.folder / f"{name}.npy"
        if not path.exists():
            stored = sorted(p.stem for p in self.folder.glob("*.npy"))
            raise InferenceError(
                f"{self.folder} has no {name}.npy; expected one of: {', '.join(stored)}"
            )
        try:
            x = files.array(files.inside(self.folder, path.name))
        except files.FileError as error:
            raise InferenceError(f"{error}; embed again") from error
        has_rows = x.ndim == n_axes and len(x) == self.n and 0 not in x.shape[1:]
        if not has_rows or x.dtype.kind not in "fiu":
            raise InferenceError(
                f"{path} holds {x.dtype} {x.shape}; expected {self.n} rows of numbers; embed again"
            )
        return x

    def all_features(self, kind: str) -> np.ndarray:
        """Return the features of all rows, mapped. Raises InferenceError.

        The shape is [n, D], or of patches [n, V, N, D] with V views.
        """
        return self.array(kind, 4 if kind == "patches" else 2)

    def features(self, kind: str, rows: np.ndarray) -> np.ndarray:
        """Return the features of some rows, float32 [n, …]. Raises InferenceError."""
        x = np.asarray(self.all_features(kind)[rows], np.float32)
        if not (np.abs(x) < MAX_FEATURE).all():
            raise InferenceError(
                f"{self.folder} holds features that are no numbers, or too large ones; embed again"
            )
        return x

    def decoded(self) -> np.ndarray:
        """Return whether each row's recording could be read, bool [n]. Raises InferenceError."""
        weight = np.array(self.array("weight", 1))
        return weight > 0

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return classes, uint8 [n, C], and which are known, bool [n]. Raises InferenceError."""
        is_decoded = self.decoded()
        if self.metadata["multilabel"]:
            y = np.array(self.array("labels", 2)) > 0
            return y.astype(np.uint8), is_decoded
        label = np.array(self.array("label", 1))
        largest = label.max(initial=0)
        n_names = len(self.names)
        if label.dtype.kind not in "iu" or largest >= (n_names or MAX_CLASSES):
            raise InferenceError(
                f"{self.folder}/label.npy has class {largest}, but names for {n_names}; embed again"
            )
        classes = np.arange(n_names or label.max() + 1)
        y = label[:, None] == classes
        return y.astype(np.uint8), is_decoded & (label >= 0)

    def places(self) -> Places:
        """Path, times and clock of every row. Raises InferenceError."""
        if not (self.folder / ROWS).exists():
            raise InferenceError(
                f"{self.folder} does not say where its rows lie (no {ROWS}): an older version made"
                " it; embed again"
            )
        try:
            with columnar.native(files.inside(self.folder, ROWS)) as file:
                table = pq.read_table(file)
            columns = {name: table.column(name).cast(kind) for name, kind in _COLUMNS.items()}
            for name, kind in _OPTIONAL.items():
                if name in table.column_names:
                    columns[name] = table.column(name).cast(kind)
                else:
                    columns[name] = pa.chunked_array([pa.nulls(table.num_rows, kind)])
            for column in columns.values():
                column.validate(full=True)
            if table.num_rows != self.n:
                raise ValueError(f"it has {table.num_rows} rows, and there are {self.n}")
        except files.FileError as error:
            raise InferenceError(f"{error}; embed again") from error
        except (pa.ArrowException, ValueError, KeyError) as error:
            raise InferenceError(
                f"{self.folder / ROWS} cannot be read: {files.reason(error)}; embed again"
            ) from error
        start = columns["start"].to_numpy(zero_copy_only=False)
        end = columns["end"].to_numpy(zero_copy_only=False)
        return Places(
            [path or "" for path in columns["path"].to_pylist()],
            start.astype(np.float64),
            end.astype(np.float64),
            [clock or "" for clock in columns["clock"].to_pylist()],
            [content or "" for content in columns["content"].to_pylist()],
            columns["trained"].to_pylist(),
        )

    def recordings(self) -> list[str]:
        """Return the recording of each row, the same of copies, or its number if it has no name."""
        own_names = [f"{self.folder}:{row}" for row in range(self.n)]
        try:
            places = self.places()
        except InferenceError:
            return own_names
        names = []
        for path, content, own_name in zip(places.paths, places.content, own_names, strict=True):
            name = os.path.normpath(os.path.join(self.root, path)) if path else own_name
            names.append(content or name)
        return names

    def trained(self) -> list[bool | None]:
        """Return whether the run was trained on each row's recording, None: that is not known."""
        try:
            return self.places().trained
        except InferenceError:
            return [None] * self.n

    def times(self) -> tuple[np.ndarray, np.ndarray]:
        """Return start and end of each row in its recording, float64 [n] s, nan if not known."""
        try:
            places = self.places()
        except InferenceError:
            unknown = np.full(self.n, np.nan)
            return unknown, unknown
        return places.start, places.end


def read(folder: str | pathlib.Path) -> Embeddings:
    """Open a folder of `jaxtrain embed`. Raises InferenceError: it is none, or is not finished."""
    folder = files.expanded(folder)
    try:
        metadata = files.read_json(files.inside(folder, ABOUT))
    except files.FileError as error:
        raise InferenceError(
            f"{folder} holds no embeddings ({error}); make them with `jaxtrain embed`"
        ) from error
    version = metadata.get("version")
    if version != VERSION:
        raise InferenceError(
            f"{folder / ABOUT} is of version {version!r:.80}, and this jaxtrain reads {VERSION};"
            " embed again"
        )
    names: Any = metadata.get("class_names")
    has_names = isinstance(names, list) and all(isinstance(name, str) for name in names)
    has_counts = all(type(metadata.get(name)) is int for name in ("done", "rows"))
    if not has_names or not has_counts or type(metadata.get("multilabel")) is not bool:
        raise InferenceError(
            f"{folder / ABOUT} does not describe embeddings; make them with `jaxtrain embed`"
        )
    settings = metadata.get("front_end", DEFAULT.settings)
    if not isinstance(settings, dict) or settings.keys() != DEFAULT.settings.keys():
        raise InferenceError(f"{folder / ABOUT} has front_end {str(settings)[:80]!r}; embed again")
    if metadata["done"] < metadata["rows"]:
        raise InferenceError(
            f"{folder} holds {metadata['done']} of {metadata['rows']} embeddings; rerun the same"
            " `jaxtrain embed` to resume"
        )
    return Embeddings(
        folder,
        metadata,
        metadata["rows"],
        tuple(names),
        root=_text(metadata.get("root")),
        encoder=_text(metadata.get("encoder")),
    )


def _text(value: Any) -> str:
    """Return a text that may name a file, or "" of anything else."""
    return value if isinstance(value, str) and "\0" not in value else ""
