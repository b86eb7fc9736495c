"""Count the blocks of attention that a TPU computes for packed documents, by size of the blocks.

    python -m tools.chip.document_blocks FOLDER

The documents are those of the measured language models (`tools.chip.cases`), made in FOLDER. The
last rows of a model are of blocks of 128 without the slabs of keys before the first pair, which
`jaxtrain.nn.pair_blocks` leaves out: steps that leave out none + one + …, and their pairs. The
count needs no device.
"""

import importlib
import pathlib
import sys

import jax.numpy as jnp
import numpy as np

from jaxtrain.nn import pair_blocks, splash
from loaders.base import Rows
from tools.chip import cases

TOKENS = 1 << 17  # of the rows that are counted
SIZES = (128, 256, 512, 1024)
SLABS = (64, 32)  # keys of a block of 128 that are computed or left out


def main() -> None:
    data = cases.Data(pathlib.Path(sys.argv[1]), small=False)
    print(
        "| case | pairs a token | block | computed | with a pair | of a causal mask |"
        " computed ÷ with a pair | pairs computed ÷ needed |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for case in cases.CASES:
        if case.model == "language":
            _print_rows(case, data)


def _print_rows(case: cases.Case, data: cases.Data) -> None:
    segments = _segments(case, data)
    pairs = _pairs(segments)
    tokens = segments.shape[1]
    for size in SIZES:
        n = tokens // size
        blocks = splash.document_blocks(jnp.asarray(segments), causal=True, window=0, size=size)
        computed = int((blocks[..., 1] - blocks[..., 0] + 1).sum())
        needed = _needed(segments, size)
        of_mask = len(segments) * n * (n + 1) // 2
        print(
            f"| {case.name} | {pairs / segments.size:.0f} | {size} | {computed:,} | {needed:,} |"
            f" {of_mask:,} | {computed / needed:.2f} | {computed * size**2 / pairs:.2f} |"
        )
    for size in SLABS:
        steps = _steps_by_slabs(segments, size)
        computed = sum(n * (pair_blocks.BLOCK - i * size) for i, n in enumerate(steps))
        print(
            f"| {case.name} | | 128, slabs of {size} keys | {' + '.join(f'{n:,}' for n in steps)}"
            f" | | | | {computed * pair_blocks.BLOCK / pairs:.2f} |"
        )


def _steps_by_slabs(segments: np.ndarray, size: int) -> list[int]:
    """Count the steps of `nn.pair_blocks` that leave out 0, 1, … slabs before the first pair."""
    sizes = (pair_blocks.BLOCK, size)
    shared = splash.shared_blocks(jnp.asarray(segments), sizes, causal=True, window=0)
    first, last = (np.asarray(slab) for slab in splash.ends(shared))
    of_block = pair_blocks.BLOCK // size
    n_steps = int((last // of_block - first // of_block + 1).sum())
    _, *partial = np.bincount((first % of_block).ravel(), minlength=of_block).tolist()
    return [n_steps - sum(partial), *partial]


def _segments(case: cases.Case, data: cases.Data) -> np.ndarray:
    """Return the documents of rows, int32 [B, T]."""
    context = case.config(data, case.choices[0]).model.context
    rows = TOKENS // context
    config = case.config(data, case.choices[0], {"train.batch": str(rows)})
    loader = importlib.import_module(config.loader).make_loader(
        config.data, split="train", rows=Rows(rows, ((0, rows),)), seed=config.seed
    )
    try:
        _, batch = next(loader)
    finally:
        loader.close()
    return np.asarray(batch["segments"]).reshape(rows, context)


def _pairs(segments: np.ndarray) -> int:
    """Count the pairs of a query and a key that a causal mask and documents allow."""
    pairs = 0
    for row in segments:
        _, lengths = np.unique(row[row > 0], return_counts=True)
        pairs += int((lengths * (lengths + 1) // 2).sum())
    return pairs


def _needed(segments: np.ndarray, size: int) -> int:
    """Count the blocks that have a pair which a causal mask and documents allow, one by one."""
    needed = 0
    for row in segments:
        blocks = set[tuple[int, int]]()
        for document in np.unique(row[row > 0]):
            places = np.flatnonzero(row == document)
            first, last = places[0] // size, places[-1] // size
            blocks |= {(q, k) for q in range(first, last + 1) for k in range(first, q + 1)}
        needed += len(blocks)
    return needed


if __name__ == "__main__":
    main()
