"""The contents of an index: hours, classes, lengths, rates, pairs of classes, and pictures."""

import itertools
import pathlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

from loaders import _rust
from loaders.audio import shards, spectrogram
from loaders.audio.recordings import store
from loaders.base import DataError
from loaders.io import atomic_write, files

LENGTHS = (0.5, 1, 2, 5, 10, 30, 60, 600, 3600)  # [s] between which rows are counted
SHOWN = 20  # classes, and pairs of them
FRAMES, PICTURES = 498, 12  # frames of a picture of 5 s, pictures of a split


class Split(NamedTuple):
    """The counts of one split."""

    rows: int
    classes: np.ndarray  # int64 [C], rows with each
    pairs: Counter[tuple[int, int]]  # of two classes in one row
    lengths: np.ndarray  # int64 [len(LENGTHS) + 1]
    rates: Counter[str]
    without: int  # rows without a class


def report(folder: pathlib.Path) -> list[str]:
    """Return the lines that describe an index. Raises DataError."""
    about = store.read(folder)
    names = about["classes"]
    lines = [
        f"{folder}: {len(names)} classes; recordings below"
        f" {shards.index_root(folder / 'index.json')}"
    ]
    for split, counts in about["splits"].items():
        found = count(shards.find_shards(str(folder), split), len(names))
        lines += [
            "",
            (
                f"{split}: {counts['rows']} rows of {counts['recordings']} recordings,"
                f" {counts['hours']:.2f} h of rows, "
            ),
        ]
        lines[-1] += (
            f"{counts['hours_of_recordings']:.2f} h of recordings; {found.without} rows without a"
            " class"
        )
        order = np.argsort(-found.classes, kind="stable")
        width = max([len(names[i]) for i in order[:SHOWN]], default=0)
        lines += [f"    {names[i]:{width}}  {found.classes[i]}" for i in order[:SHOWN]]
        if len(order) > SHOWN:
            lines.append(
                f"    and {len(order) - SHOWN} more classes, the rarest {names[order[-1]]!r} with"
                f" {found.classes[order[-1]]}"
            )
        lines.append("  length [s]: " + _bins(found.lengths))
        lines.append(
            "  rate [Hz]: " + ", ".join(f"{rate}: {n}" for rate, n in sorted(found.rates.items()))
        )
        if found.pairs:
            most = found.pairs.most_common(SHOWN // 4)
            lines.append(
                "  together: " + ", ".join(f"{names[a]} + {names[b]}: {n}" for (a, b), n in most)
            )
    if about.get("errors"):
        lines += [
            "",
            "errors met: " + ", ".join(f"{kind}: {n}" for kind, n in about["errors"].items()),
        ]
    return lines


def count(paths: Sequence[pathlib.Path], n_classes: int) -> Split:
    """Count the rows of the shards of a split, a row group at a time. Raises DataError."""
    rows = without = 0
    classes, lengths = np.zeros(n_classes, np.int64), np.zeros(len(LENGTHS) + 1, np.int64)
    pairs: Counter[tuple[int, int]] = Counter()
    rates: Counter[str] = Counter()
    try:
        for path in paths:
            file = pq.ParquetFile(path)
            if missing := sorted({"start", "end", "labels", "rate"} - set(file.schema_arrow.names)):
                raise ValueError(f"it has no column {missing[0]!r}")
            for batch in file.iter_batches(columns=["start", "end", "labels", "rate"]):
                rows += len(batch)
                labels = batch.column("labels")
                labels.validate(full=True)
                numbers = pc.fill_null(pc.list_flatten(labels), -1).to_numpy(zero_copy_only=False)
                if len(numbers) and not 0 <= numbers.min() <= numbers.max() < n_classes:
                    raise ValueError(
                        f"it has classes {numbers.min()} to {numbers.max()}, and names for"
                        f" {n_classes}"
                    )
                classes += np.bincount(numbers, minlength=n_classes)
                sizes = pc.fill_null(pc.list_value_length(labels), 0).to_numpy(zero_copy_only=False)
                without += int((sizes == 0).sum())
                for several in labels.filter(pa.array(sizes > 1)).to_pylist():
                    pairs.update(itertools.combinations(sorted(several), 2))
                seconds = pc.subtract(batch.column("end"), batch.column("start")).to_numpy(
                    zero_copy_only=False
                )
                lengths += np.bincount(
                    np.searchsorted(LENGTHS, seconds, side="right"), minlength=len(lengths)
                )
                for each in pc.value_counts(batch.column("rate")).to_pylist():
                    rates[each["values"]] += each["counts"]
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {files.reason(error)}; run jaxtrain index again") from error
    return Split(rows, classes, pairs, lengths, rates, without)


def pictures(folder: pathlib.Path, out: pathlib.Path) -> list[pathlib.Path]:
    """Write pictures of each split's classes, and spectrograms of its rows. Raises DataError."""
    about = store.read(folder)
    out.mkdir(parents=True, exist_ok=True)
    made = []
    for split in about["splits"]:
        paths = shards.find_shards(str(folder), split)
        found = count(paths, len(about["classes"]))
        for name, picture in (
            ("classes", _bars(about["classes"], found.classes)),
            ("rows", _spectrograms(paths, about["classes"])),
        ):
            made.append(out / f"{split}-{name}.png")
            with atomic_write.file(made[-1]) as file:
                picture.save(file, "PNG")
    return made


def _bins(lengths: np.ndarray) -> str:
    edges = ["0", *(f"{edge:g}" for edge in LENGTHS), "…"]
    return ", ".join(f"{edges[i]}–{edges[i + 1]}: {n}" for i, n in enumerate(lengths) if n)


def _bars(names: Sequence[str], counts: np.ndarray) -> Image.Image:
    """Return a bar for each of the commonest classes."""
    order = np.argsort(-counts, kind="stable")[:60]
    image = Image.new("RGB", (640, 16 * max(1, len(order)) + 8), "white")
    draw = ImageDraw.Draw(image)
    most = max([int(counts[i]) for i in order], default=1) or 1
    for line, i in enumerate(order):
        y = 4 + 16 * line
        draw.rectangle((200, y, 200 + int(380 * counts[i] / most), y + 12), fill="steelblue")
        draw.text((4, y), _latin(names[i])[:32], fill="black")
        draw.text((590, y), str(counts[i]), fill="black")
    return image


def _spectrograms(paths: Sequence[pathlib.Path], names: Sequence[str]) -> Image.Image:
    """Spectrograms of a few rows, 5 s each as cropped in testing, with their classes."""
    index = shards.open_index(paths, label="", audio_root="")
    lists = shards.read_class_lists(paths, "labels")
    chosen = np.unique(np.linspace(0, index.n_rows - 1, min(PICTURES, index.n_rows)).astype(int))
    config = spectrogram.Config(threads=1, bad_budget=1.0)
    n_rows = len(chosen)
    settings = spectrogram.pipeline_settings(
        config, chosen, n_rows, [(0, n_rows)], seed=0, train=False
    )
    pipeline = _rust.Pipeline(index, settings)
    try:
        _, batch = pipeline.next()
    finally:
        pipeline.close()
    columns = 3
    height = 128 + 16
    image = Image.new("RGB", (columns * (FRAMES + 6), -(-len(chosen) // columns) * height), "white")
    draw = ImageDraw.Draw(image)
    for n, (row, x) in enumerate(zip(chosen, batch["spectrogram"][0], strict=True)):
        left, top = n % columns * (FRAMES + 6), n // columns * height
        low, high = np.percentile(x, (1, 99.8))
        grey = np.clip((x[:FRAMES].T[::-1] - low) / max(high - low, 1e-6), 0, 1)
        image.paste(Image.fromarray((grey * 255).astype(np.uint8)), (left, top + 14))
        classes = (
            ", ".join(names[k] for k in lists.classes[lists.starts[row] : lists.starts[row + 1]])
            or "(none)"
        )
        draw.text((left + 2, top + 1), _latin(f"{row}: {classes}")[:80], fill="black")
    return image


def _latin(text: str) -> str:
    """Text that the picture's font has."""
    return text.encode("latin-1", errors="replace").decode("latin-1")
