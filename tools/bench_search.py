"""The cost of a search: python -m tools.bench_search [--rows=1000000]

Writes embeddings of windows around as many calls as a hundredth of the rows. Then it asks `jaxtrain
search` for the 20 nearest of some rows: by comparing every row, and, if usearch is installed, by
its index, which is made first. Prints wall and CPU time, and the share of the exact answers that
the index finds.
"""

import argparse
import functools
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxtrain.workloads.bird.inference import InferenceError, embeddings, search

CHUNK = 100_000  # rows that are made together
WIDTH, QUERIES = 384, 10


def write(folder: pathlib.Path, rows: int) -> embeddings.Embeddings:
    """Return a folder as `jaxtrain embed` makes it, without places."""
    rng = np.random.default_rng(0)
    calls = rng.standard_normal((max(1, rows // 100), WIDTH), np.float32)
    x = np.lib.format.open_memmap(
        folder / "mean.npy", mode="w+", dtype=np.float32, shape=(rows, WIDTH)
    )
    for first in range(0, rows, CHUNK):
        n = min(CHUNK, rows - first)
        x[first : first + n] = calls[rng.integers(0, len(calls), n)] + 0.6 * rng.standard_normal(
            (n, WIDTH), np.float32
        )
    x.flush()
    np.save(folder / "weight.npy", np.ones(rows, np.float32))
    about = {
        "version": embeddings.VERSION,
        "done": rows,
        "rows": rows,
        "class_names": [],
        "multilabel": False,
        "encoder": "none",
    }
    (folder / embeddings.ABOUT).write_text(json.dumps(about))
    return embeddings.read(folder)


def timed(label: str, action: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = action()
    print(
        f"{label:32} {time.perf_counter() - wall:9.3f} s   {time.process_time() - cpu:9.3f} s"
        " of CPU",
        flush=True,
    )
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["JAXTRAIN_CACHE"] = temporary
        folder = timed(
            f"{args.rows} × {WIDTH} are written", lambda: write(pathlib.Path(temporary), args.rows)
        )
        x = folder.array("mean", 2)
        queries = [
            np.array(x[row : row + 1])
            for row in np.random.default_rng(1).integers(0, args.rows, QUERIES)
        ]
        exact = [
            timed(
                "every row", functools.partial(search.nearest, [folder], query, kind="mean", top=20)
            )
            for query in queries
        ]
        try:
            timed(
                "an index is made",
                lambda: search.nearest_by_index([folder], queries[0], kind="mean", top=20),
            )
        except InferenceError as error:
            raise SystemExit(str(error)) from error
        found = [
            timed(
                "the index",
                functools.partial(search.nearest_by_index, [folder], query, kind="mean", top=20),
            )
            for query in queries
        ]
        shares = [
            len({h.row for h in a} & {h.row for h in b}) / len(a)
            for a, b in zip(exact, found, strict=True)
        ]
        size = sum(path.stat().st_size for path in (pathlib.Path(temporary) / "search").iterdir())
        print(
            f"the index has {size / 1e6:.0f} MB and finds {np.mean(shares):.1%} of the exact"
            " answers"
        )


if __name__ == "__main__":
    main()
