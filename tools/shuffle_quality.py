"""How well the orders of loaders.audio.spectrogram mix: python -m tools.shuffle_quality [--rows=N] [--shards=N] [--batch=N]

Prints the following for the global order, for the block order of several sizes, and for shards read one after the other
through a shuffle buffer of 10,000 rows (as many loaders do), over one epoch:

    ACF(1)     lag-1 autocorrelation of the histograms of shards, batch after batch: 0 when a batch says nothing of the next
    shards     different shards in a batch, on average
    chi2/df    of a batch's histogram of shards against even use: 1 for independent draws, less for a spread that is too even
    unique     different rows in 100 batches, and in brackets those of independent draws, N (1 - (1 - 1/N)^(100 batch))
"""

import argparse
import functools
from collections.abc import Callable

import numpy as np

from loaders import _rust, order


def shard_starts(rows: int, shards: int) -> np.ndarray:
    """int64 [shards]: the first row of each of ``shards`` that are nearly equally long."""
    return np.arange(shards) * rows // shards


def autocorrelation(counts: np.ndarray) -> float:
    """Lag-1 autocorrelation of the histograms [batches, shards], each shard about its own mean."""
    centred = counts - counts.mean(0)
    return float((centred[1:] * centred[:-1]).sum() / (centred**2).sum())


def measure(rows: np.ndarray, *, batch: int, starts: np.ndarray) -> tuple[float, float, float, int]:
    """The rows of an epoch in their order -> ACF(1), shards in a batch, chi2 over its degrees of freedom, unique rows."""
    batches = rows[: len(rows) // batch * batch].reshape(-1, batch)
    shard = np.searchsorted(starts, batches, side="right") - 1
    counts = np.stack([np.bincount(row, minlength=len(starts)) for row in shard])
    mean = batch / len(starts)
    chi2 = ((counts - mean) ** 2 / mean).sum(1).mean() / (len(starts) - 1)
    return autocorrelation(counts), (counts > 0).sum(1).mean(), chi2, len(np.unique(batches[:100]))


def block(rows: int, starts: np.ndarray, size: int, window: int, seed: int = 0) -> np.ndarray:
    stops = order.block_stops(np.arange(rows), starts, size)
    return _rust.block_order(seed, 0, stops, window, np.arange(rows))


def shuffle_buffer(rows: int, starts: np.ndarray, size: int = 10_000, seed: int = 0) -> np.ndarray:
    """Shards in a random order, their rows through a buffer from which one at a random place is taken at a time."""
    rng = np.random.default_rng(seed)
    ends = np.append(starts[1:], rows)
    source = np.concatenate([np.arange(starts[k], ends[k]) for k in rng.permutation(len(starts))])
    buffer, out = source[:size].copy(), np.empty(rows, np.int64)
    for i, place in enumerate(rng.integers(size, size=rows - size)):
        out[i], buffer[place] = buffer[place], source[size + i]
    out[rows - size :] = rng.permutation(buffer)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 528_422), ("shards", 690), ("batch", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    flags = parser.parse_args()
    n, batch = flags.rows, flags.batch
    starts = shard_starts(n, flags.shards)
    draws = min(100, n // batch) * batch
    print(f"{n} rows in {flags.shards} shards, batches of {batch}\n")
    print("order                          ACF(1)   shards  chi2/df   unique (independent draws)")
    orders: dict[str, Callable[[], np.ndarray]] = {"global": lambda: _rust.permutation(0, 0, n, np.arange(n))}
    for size, window in ((8, 64), (8, 256), (8, 1024), (32, 64), (32, 256)):
        orders[f"block of {size}, window of {window}"] = functools.partial(block, n, starts, size, window)
    orders["shuffle buffer of 10000"] = lambda: shuffle_buffer(n, starts)
    for name, rows in orders.items():
        acf, shards, chi2, unique = measure(rows(), batch=batch, starts=starts)
        print(f"{name:<28} {acf:8.3f} {shards:8.1f} {chi2:8.2f}   {unique:6d} ({n * (1 - (1 - 1 / n) ** draws):.0f})")


if __name__ == "__main__":
    main()
