"""A folder of `jaxtrain embed`, read with suspicion: it may come from anyone."""

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


class Embeddings(NamedTuple):
    """A finished folder, whose arrays are mapped at their first use."""

    folder: pathlib.Path
    about: Mapping[str, Any]  # embeddings.json
    n: int  # rows
    names: tuple[str, ...]  # of the classes of its labels
    root: str  # the folder of the recordings, or "" if it is not known
    encoder: str  # the digest of the encoder

    @property
    def front_end(self) -> Mapping[str, Any]:
        """How recordings reached the encoder: spectrograms' settings, and how clips were cut."""
        parts = [self.about.get(name, {}) for name in ("front_end", "clips")]
        return {
            name: value for part in parts if isinstance(part, dict) for name, value in part.items()
        }

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.npy").exists()

    def array(self, name: str, *dimensions: int) -> np.ndarray:
        """Return NAME.npy, mapped, of so many dimensions (1 or 2). Raises InferenceError."""
        path = self.folder / f"{name}.npy"
        if not path.exists():
            there = ", ".join(sorted(p.stem for p in self.folder.glob("*.npy")))
            raise InferenceError(f"{self.folder} has no {name}.npy; expected one of: {there}")
        try:
            x = files.array(files.inside(self.folder, path.name))
        except files.FileError as error:
            raise InferenceError(f"{error}; embed again") from error
        if (
            x.ndim not in (dimensions or (1, 2))
            or len(x) != self.n
            or x.dtype.kind not in "fiu"
            or 0 in x.shape[1:]
        ):
            raise InferenceError(
                f"{path} holds {x.dtype} {x.shape}; expected {self.n} rows of numbers; embed again"
            )
        return x

    def features(self, kind: str, rows: np.ndarray) -> np.ndarray:
        """Return the features of some rows, float32 [n, …]. Raises InferenceError."""
        x = np.asarray(self.array(kind, 4 if kind == "patches" else 2)[rows], np.float32)
        if not (np.abs(x) < MAX_FEATURE).all():
            raise InferenceError(
                f"{self.folder} holds features that are no numbers, or too large ones; embed again"
            )
        return x

    def labels(self) -> tuple[np.ndarray, np.ndarray]:
        """Return classes, uint8 [n, C], and which are known, bool [n]. Raises InferenceError."""
        known = np.array(self.array("weight", 1)) > 0
        if self.about["multilabel"]:
            return (np.array(self.array("labels", 2)) > 0).astype(np.uint8), known
        label, n = np.array(self.array("label", 1)), len(self.names)
        if label.dtype.kind not in "iu" or label.max(initial=0) >= (n or MAX_CLASSES):
            raise InferenceError(
                f"{self.folder}/label.npy has class {label.max(initial=0)}, but names for {n};"
                " embed again"
            )
        return (label[:, None] == np.arange(n or label.max() + 1)).astype(np.uint8), known & (
            label >= 0
        )

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
            kinds = {
                "path": pa.string(),
                "start": pa.float64(),
                "end": pa.float64(),
                "clock": pa.string(),
            }
            columns = {name: table.column(name).cast(kind) for name, kind in kinds.items()}
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
        texts = {
            name: [value or "" for value in columns[name].to_pylist()] for name in ("path", "clock")
        }
        start, end = (
            columns[name].to_numpy(zero_copy_only=False).astype(np.float64)
            for name in ("start", "end")
        )
        return Places(texts["path"], start, end, texts["clock"])


def read(folder: str | pathlib.Path) -> Embeddings:
    """Open a folder of `jaxtrain embed`. Raises InferenceError: it is none, or is not finished."""
    folder = files.expanded(folder)
    try:
        about = files.read_json(files.inside(folder, ABOUT))
    except files.FileError as error:
        raise InferenceError(
            f"{folder} holds no embeddings ({error}); make them with `jaxtrain embed`"
        ) from error
    if (version := about.get("version")) != VERSION:
        made = f"{folder / ABOUT} is of version {version!r:.80}"
        raise InferenceError(f"{made}, and this jaxtrain reads {VERSION}; embed again")
    names: Any = about.get("class_names")
    is_text = isinstance(names, list) and all(isinstance(name, str) for name in names)
    counts = all(type(about.get(key)) is int for key in ("done", "rows"))
    if not is_text or not counts or type(about.get("multilabel")) is not bool:
        raise InferenceError(
            f"{folder / ABOUT} does not describe embeddings; make them with `jaxtrain embed`"
        )
    settings = about.get("front_end", DEFAULT.settings)
    if not isinstance(settings, dict) or settings.keys() != DEFAULT.settings.keys():
        raise InferenceError(f"{folder / ABOUT} has front_end {str(settings)[:80]!r}; embed again")
    if about["done"] < about["rows"]:
        raise InferenceError(
            f"{folder} holds {about['done']} of {about['rows']} embeddings; rerun the same"
            " `jaxtrain embed` to resume"
        )

    def text(name: str) -> str:
        found = about.get(name)
        return found if isinstance(found, str) and "\0" not in found else ""

    return Embeddings(
        folder, about, about["rows"], tuple(names), root=text("root"), encoder=text("encoder")
    )
