"""Padding and cut documents of packing by best fit, and of concatenation.

    python -m tools.packing_report FOLDER [--context 1024 2048 …]

FOLDER holds token files (`jaxtrain tokens`), or is one text, whose paragraphs (between blank lines)
are then its documents. For each length of context, over one epoch:

    padding    share of positions that hold no token
    cut        share of the documents that are cut although they are no longer than the context
    context    mean number of tokens that a predicted one may attend to, where attention stays
               within documents
    us/doc     microseconds to pack a document

for best fit and for plain concatenation, which pads nothing and cuts wherever a row ends.
"""

import argparse
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from loaders import order
from loaders.text import packing, token_files, tokens


def lengths_of(path: str) -> np.ndarray:
    """int64 [n] tokens of each document."""
    file = pathlib.Path(path)
    if file.is_file():
        return np.array([len(part) for part in file.read_text().split("\n\n") if part], np.int64)
    return token_files.lengths(file)


def best_fit(
    lengths: np.ndarray, context: int, window: int, seed: int = 0
) -> tuple[float, float, float]:
    """Return padding, cut and mean context of an epoch, packed by best fit."""
    shuffled = lengths[order.permutation(seed, 0, len(lengths), np.arange(len(lengths)))]
    rows = cut = 0
    seen = 0.0
    for start in range(0, len(lengths), window):
        mine = shuffled[start : start + window]
        placed = packing.pack(mine, context)
        rows += len(placed.stops)
        pieces = np.bincount(placed.document, minlength=len(mine))
        cut += int(((pieces > 1) & (mine - 1 <= context)).sum())
        seen += float((placed.length * (placed.length - 1) / 2).sum())
    used = np.maximum(lengths - 1, 0).sum()
    return 1 - used / (rows * context), cut / len(lengths), seen / used


def concat(lengths: np.ndarray, context: int) -> tuple[float, float, float]:
    """Return the same for the stream of all documents, cut every ``context`` tokens."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    first, last = starts // context, np.maximum(ends - 1, starts) // context
    fits = lengths <= context
    edges = np.unique(np.concatenate([starts, np.arange(0, ends[-1], context)]))
    pieces = np.diff(np.append(edges, ends[-1]))
    return (
        0.0,
        float((fits & (first != last)).mean()),
        float((pieces * (pieces - 1) / 2).sum() / pieces.sum()),
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path")
    parser.add_argument("--context", type=int, nargs="+", default=(512, 1024, 2048, 4096))
    args = parser.parse_args(argv)
    lengths = lengths_of(args.path)
    print(
        f"{len(lengths):,} documents, {lengths.sum():,} tokens; half of them no longer than"
        f" {int(np.median(lengths)):,}\n"
    )
    print("context  packing     padding      cut  context  us/doc")
    for context in args.context:
        began = time.perf_counter()
        rows = {"best_fit": best_fit(lengths, context, tokens.Config.window)}
        per_document = (time.perf_counter() - began) / len(lengths) * 1e6
        rows["concat"] = concat(lengths, context)
        for name, (padding, cut, seen) in rows.items():
            speed = f"{per_document:7.2f}" if name == "best_fit" else ""
            print(f"{context:7d}  {name:<8} {padding:10.3%} {cut:8.2%} {seen:8.1f} {speed}")


if __name__ == "__main__":
    main()
