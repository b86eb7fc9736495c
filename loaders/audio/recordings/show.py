"""The contents of an index: hours, classes, lengths, rates, pairs of classes, and pictures."""

import dataclasses
import itertools
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from loaders import _rust
from loaders.audio import doubts as class_doubts
from loaders.audio import shards, spectrogram
from loaders.audio.recordings import store
from loaders.base import DataError
from loaders.io import atomic_write, files

LENGTHS = (0.5, 1, 2, 5, 10, 30, 60, 600, 3600)  # [s] between which rows are counted
MAX_CLASSES = 20  # in the report
MAX_PAIRS = 5  # of classes, in the report
MAX_BARS = 60
MAX_PICTURES = 12  # of a split's rows
N_FRAMES = 498  # of a picture of 5 s
COLUMNS = ("start", "end", "labels", "rate")  # that are counted


@dataclasses.dataclass
class Split:
    """The counts of one split."""

    classes: np.ndarray  # int64 [C], rows with each
    lengths: np.ndarray  # int64 [len(LENGTHS) + 1]
    pairs: Counter[tuple[int, int]]  # of two classes in one row
    rates: Counter[str]
    without: int = 0  # rows without a class

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the rows of a batch. Raises ValueError: a class without a name."""
        labels = batch.column("labels")
        labels.validate(full=True)
        self._add_labels(labels)
        starts, ends = batch.column("start"), batch.column("end")
        seconds = pc.subtract(ends, starts).to_numpy(zero_copy_only=False)
        bins = np.searchsorted(LENGTHS, seconds, side="right")
        self.lengths += np.bincount(bins, minlength=len(self.lengths))
        for rate in pc.value_counts(batch.column("rate")).to_pylist():
            self.rates[rate["values"]] += rate["counts"]

    def _add_labels(self, labels: pa.ListArray) -> None:
        n_classes = len(self.classes)
        numbers = pc.fill_null(pc.list_flatten(labels), -1).to_numpy(zero_copy_only=False)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < n_classes:
            raise ValueError(
                f"it has classes {numbers.min()} to {numbers.max()}, and names for {n_classes}"
            )
        self.classes += np.bincount(numbers, minlength=n_classes)
        sizes = pc.fill_null(pc.list_value_length(labels), 0).to_numpy(zero_copy_only=False)
        self.without += int((sizes == 0).sum())
        for row_labels in labels.filter(pa.array(sizes > 1)).to_pylist():
            self.pairs.update(itertools.combinations(sorted(row_labels), 2))


def report(folder: pathlib.Path) -> list[str]:
    """Return the lines that describe an index. Raises DataError."""
    index = store.read(folder)
    names = index["classes"]
    root = shards.index_root(folder / "index.json")
    lines = [f"{folder}: {len(names)} classes; recordings below {root}"]
    for split, totals in index["splits"].items():
        counts = count(shards.find_shards(str(folder), split), len(names))
        lines += ["", _totals_line(split, totals, counts)]
        lines += _class_lines(names, counts.classes)
        lines.append("  length [s]: " + _bins(counts.lengths))
        lines.append("  rate [Hz]: " + _listed(sorted(counts.rates.items())))
        if counts.pairs:
            lines.append("  together: " + _pairs(names, counts.pairs))
    lines += doubts(index)
    if index.get("errors"):
        lines += ["", "errors met: " + _listed(index["errors"].items())]
    return lines


def doubts(index: Mapping[str, Any]) -> list[str]:
    """Name the classes of an index without a row to train on, unless there is none at all."""
    names = index["classes"]
    n_train = np.zeros(len(names), np.int64)
    n_test = np.zeros(len(names), np.int64)
    for split, counts in index["splits"].items():
        of_class = np.array(counts.get("rows_of_each_class", []), np.int64)
        if len(of_class) != len(names):
            continue
        if split == "train":
            n_train += of_class
        else:
            n_test += of_class
    return class_doubts.of_classes(names, n_train, n_test)


def _totals_line(split: str, totals: Mapping[str, Any], counts: Split) -> str:
    return (
        f"{split}: {totals['rows']} rows of {totals['recordings']} recordings,"
        f" {totals['hours']:.2f} h of rows, {totals['hours_of_recordings']:.2f} h of recordings;"
        f" {counts.without} rows without a class"
    )


def _class_lines(names: Sequence[str], counts: np.ndarray) -> list[str]:
    """Return a line for each of the commonest classes, and one for the others."""
    order = np.argsort(-counts, kind="stable")
    commonest = order[:MAX_CLASSES]
    width = max([len(names[c]) for c in commonest], default=0)
    lines = [f"    {names[c]:{width}}  {counts[c]}" for c in commonest]
    if len(order) > MAX_CLASSES:
        rarest = order[-1]
        lines.append(
            f"    and {len(order) - MAX_CLASSES} more classes, the rarest {names[rarest]!r} with"
            f" {counts[rarest]}"
        )
    return lines


def _pairs(names: Sequence[str], pairs: Counter[tuple[int, int]]) -> str:
    """Return the commonest pairs of classes."""
    named_pairs = []
    for (a, b), n_rows in pairs.most_common(MAX_PAIRS):
        named_pairs.append((f"{names[a]} + {names[b]}", n_rows))
    return _listed(named_pairs)


def _listed(counts: Iterable[tuple[object, int]]) -> str:
    return ", ".join(f"{name}: {n}" for name, n in counts)


def count(paths: Sequence[pathlib.Path], n_classes: int) -> Split:
    """Count the rows of the shards of a split, a row group at a time. Raises DataError."""
    counts = Split(
        classes=np.zeros(n_classes, np.int64),
        lengths=np.zeros(len(LENGTHS) + 1, np.int64),
        pairs=Counter(),
        rates=Counter(),
    )
    try:
        for path in paths:
            file = pq.ParquetFile(path)
            missing_columns = sorted(set(COLUMNS) - set(file.schema_arrow.names))
            if missing_columns:
                raise ValueError(f"it has no column {missing_columns[0]!r}")
            for batch in file.iter_batches(columns=list(COLUMNS)):
                counts.add(batch)
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {files.reason(error)}; run jaxtrain index again") from error
    return counts


def pictures(folder: pathlib.Path, out: pathlib.Path) -> list[pathlib.Path]:
    """Write pictures of each split's classes, and spectrograms of its rows. Raises DataError."""
    index = store.read(folder)
    names = index["classes"]
    out.mkdir(parents=True, exist_ok=True)
    picture_paths = []
    for split in index["splits"]:
        shard_paths = shards.find_shards(str(folder), split)
        counts = count(shard_paths, len(names))
        split_pictures = {
            "classes": _bars(names, counts.classes),
            "rows": _spectrograms(shard_paths, names),
        }
        for name, picture in split_pictures.items():
            path = out / f"{split}-{name}.png"
            with atomic_write.file(path) as file:
                picture.save(file, "PNG")
            picture_paths.append(path)
    return picture_paths


def _bins(lengths: np.ndarray) -> str:
    edges = ["0", *(f"{edge:g}" for edge in LENGTHS), "…"]
    filled_bins = []
    for (lower, upper), n_rows in zip(itertools.pairwise(edges), lengths, strict=True):
        if n_rows:
            filled_bins.append((f"{lower}–{upper}", n_rows))
    return _listed(filled_bins)


def _bars(names: Sequence[str], counts: np.ndarray) -> Image.Image:
    """Return a bar for each of the commonest classes."""
    order = np.argsort(-counts, kind="stable")[:MAX_BARS]
    image = Image.new("RGB", (640, 16 * max(1, len(order)) + 8), "white")
    draw = ImageDraw.Draw(image)
    largest = int(counts.max(initial=1))
    for line, c in enumerate(order):
        y = 4 + 16 * line
        width = int(380 * counts[c] / largest)
        draw.rectangle((200, y, 200 + width, y + 12), fill="steelblue")
        draw.text((4, y), _latin(names[c])[:32], fill="black")
        draw.text((590, y), str(counts[c]), fill="black")
    return image


def _spectrograms(paths: Sequence[pathlib.Path], names: Sequence[str]) -> Image.Image:
    """Spectrograms of a few rows, 5 s each as cropped in testing, with their classes."""
    index = shards.open_index(paths, label="", audio_root="")
    lists = shards.read_class_lists(paths, "labels")
    n_pictures = min(MAX_PICTURES, index.n_rows)
    rows = np.unique(np.linspace(0, index.n_rows - 1, n_pictures).astype(int))
    spectrograms = _read_spectrograms(index, rows)
    n_columns = 3
    width, height = N_FRAMES + 6, 128 + 16
    n_lines = -(-len(rows) // n_columns)
    image = Image.new("RGB", (n_columns * width, n_lines * height), "white")
    draw = ImageDraw.Draw(image)
    for n, (row, frames) in enumerate(zip(rows, spectrograms, strict=True)):
        left = n % n_columns * width
        top = n // n_columns * height
        image.paste(_grey(frames), (left, top + 14))
        row_classes = lists.classes[lists.starts[row] : lists.starts[row + 1]]
        class_names = ", ".join(names[c] for c in row_classes) or "(none)"
        draw.text((left + 2, top + 1), _latin(f"{row}: {class_names}")[:80], fill="black")
    return image


def _read_spectrograms(index: _rust.Index, rows: np.ndarray) -> np.ndarray:
    """Return the spectrograms of rows of an index, as the loader makes them for testing."""
    config = spectrogram.Config(threads=1, bad_budget=1.0)
    n_rows = len(rows)
    settings = spectrogram.pipeline_settings(
        config, rows, n_rows, [(0, n_rows)], seed=0, train=False
    )
    pipeline = _rust.Pipeline(index, settings)
    try:
        _, batch = pipeline.next()
    finally:
        pipeline.close()
    return batch["spectrogram"][0]


def _grey(frames: np.ndarray) -> Image.Image:
    """Return a picture of a spectrogram's first frames, with low frequencies below."""
    low, high = np.percentile(frames, (1, 99.8))
    levels = (frames[:N_FRAMES].T[::-1] - low) / max(high - low, 1e-6)
    return Image.fromarray((np.clip(levels, 0, 1) * 255).astype(np.uint8))


def _latin(text: str) -> str:
    """Text that the picture's font has."""
    return text.encode("latin-1", errors="replace").decode("latin-1")
