"""How well the data are shuffled: statistics of batches, compared with independent draws.

They are of the recordings in successive batches. They are the split "data" of a run's metrics, from
"index" alone, for the rows of process 0 since it started. Each number comes with its expectation
under "…_expected":

    chi2_NAME         of a batch's histogram over buckets against the population's shares, over its
                      degrees of freedom
    acf_NAME          lag-1 autocorrelation of these histograms over the last batches: near 0 if
                      batches are independent; 0.8 and more with a shuffle buffer that is too small
    unique            different recordings in a batch
    overlap           recordings that this batch and the one before share
    bucket_overlap    the same for 4,096 buckets by hash, whose expectation is not near 0
    window_unique     different recordings in the last batches

NAME is how recordings are put into buckets: mod (neighbours apart), div (neighbours together), hash
(by 2654435761; Knuth's multiplier), shard. Expectations are those of independent draws with
replacement, except for chi2: without replacement, (N - B) / (N - 1). An order that never repeats a
recording within an epoch has overlap 0 and more unique ones.
"""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from loaders.base import DataError, Population

BUCKETS, FINE = 256, 4096
KNUTH = 2_654_435_761
WINDOW = 100  # [batches]


class ShuffleStats:
    def __init__(self, population: Population):
        rows, first_rows = population
        self._rows = rows
        self._first_rows = first_rows
        self._size = int(rows.max()) + 1
        names = ("mod", "div", "hash", "shard")
        self._shares = {name: self._counts(name, rows) / len(rows) for name in (*names, "fine")}
        self._window: collections.deque[np.ndarray] = collections.deque(maxlen=WINDOW)
        self._histograms: dict[str, collections.deque[np.ndarray]] = {
            name: collections.deque(maxlen=WINDOW) for name in names
        }

    def add(self, index: Sequence[int] | np.ndarray) -> None:
        """Take in the next batch. ``index``: int [B], its recordings.

        Raises DataError for an index that no recording has.
        """
        recordings = np.asarray(index, np.int64)
        is_outside = (recordings < 0) | (recordings >= self._size)
        outside = recordings[is_outside]
        if len(outside):
            raise DataError(
                f"the index {outside[0]} of an example in a batch is that of no recording, which"
                f" have 0 to {self._size - 1}: the loader is wrong, or a device changed it, which"
                " `jaxtrain replay` of this step tells apart"
            )
        self._window.append(recordings)
        for name, histograms in self._histograms.items():
            histograms.append(self._counts(name, recordings))

    def record(self) -> dict[str, float]:
        """Return the statistics of the latest 101 batches, or nothing before the first."""
        if not self._window:
            return {}
        batch = self._window[-1]
        record: dict[str, Any] = {}
        for name, histograms in self._histograms.items():
            record |= self._histogram_record(name, histograms, len(batch))
        record["unique"] = len(np.unique(batch))
        record["unique_expected"] = self._expected_unique(len(batch))
        if len(self._window) > 1:
            record |= self._overlap_record(batch, self._window[-2])
        window = np.concatenate(self._window)
        record["window_unique"] = len(np.unique(window))
        record["window_unique_expected"] = self._expected_unique(len(window))
        return {name: float(value) for name, value in record.items()}

    def _histogram_record(
        self, name: str, histograms: Sequence[np.ndarray], batch_size: int
    ) -> dict[str, Any]:
        n = len(self._rows)
        expected = self._shares[name] * batch_size
        is_possible = expected > 0
        n_possible = is_possible.sum()
        if n_possible < 2:
            return {}  # a single shard
        deviations = (histograms[-1] - expected)[is_possible]
        chi2 = (deviations**2 / expected[is_possible]).sum()
        record = {
            f"chi2_{name}": chi2 / (n_possible - 1),
            f"chi2_{name}_expected": (n - batch_size) / max(n - 1, 1),
        }
        if len(histograms) > 2:
            centred = np.stack(histograms) - expected
            covariance = (centred[1:] * centred[:-1]).sum()
            variance = (centred[:-1] ** 2).sum()
            record[f"acf_{name}"] = covariance / max(variance, 1e-12)
            record[f"acf_{name}_expected"] = 0.0
        return record

    def _overlap_record(self, batch: np.ndarray, previous: np.ndarray) -> dict[str, Any]:
        n = len(self._rows)
        buckets = self._bucket("fine", batch)
        previous_buckets = self._bucket("fine", previous)
        misses = 1 - self._shares["fine"]  # of one draw, for each bucket
        hits = 1 - misses ** len(batch)
        previous_hits = 1 - misses ** len(previous)
        return {
            "overlap": len(np.intersect1d(batch, previous)),
            "overlap_expected": (
                self._expected_unique(len(batch)) * (1 - (1 - 1 / n) ** len(previous))
            ),
            "bucket_overlap": len(np.intersect1d(buckets, previous_buckets)),
            "bucket_overlap_expected": (hits * previous_hits).sum(),
        }

    def _expected_unique(self, n_draws: int) -> float:
        n = len(self._rows)
        return n * (1 - (1 - 1 / n) ** n_draws)

    def _bucket(self, name: str, index: np.ndarray) -> np.ndarray:
        if name == "mod":
            return index % BUCKETS
        if name == "div":
            return index * BUCKETS // self._size
        if name == "shard":
            return np.searchsorted(self._first_rows, index, side="right") - 1
        n_buckets = FINE if name == "fine" else BUCKETS
        hashed = (index.astype(np.uint64) * np.uint64(KNUTH)) & np.uint64(0xFFFFFFFF)
        bucket = hashed * np.uint64(n_buckets) >> np.uint64(32)
        return bucket.astype(np.int64)

    def _counts(self, name: str, index: np.ndarray) -> np.ndarray:
        size = {"shard": len(self._first_rows), "fine": FINE}.get(name, BUCKETS)
        return np.bincount(self._bucket(name, index), minlength=size)
