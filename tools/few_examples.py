"""Heads of `jaxtrain fit` from 1, 5 and 20 examples a class.

python -m tools.few_examples TRAIN_EMB TEST_EMB [--draws 10]

Draws that many rows of each class out of TRAIN_EMB, a folder of `jaxtrain embed`, fits a head by
each method, and scores every row of TEST_EMB. Prints accuracy and the mean over classes of average
precision: the mean over draws, and the interval that holds 95 % of all draws × bootstrap samples of
the test rows. One class has the label of each row.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from jaxtrain.workloads.bird.inference import embeddings, fit, heads, labelled_rows, measures

METHODS = ("linear", "prototypes", "patches")
EXAMPLES = (1, 5, 20)  # of each class
SAMPLES = 200  # bootstrap samples of the test rows, of each draw


def drawn(
    given: labelled_rows.Examples, n: int, rng: np.random.Generator
) -> labelled_rows.Examples:
    label = given.y.argmax(1)
    rows = np.sort(
        np.concatenate(
            [rng.permutation(np.flatnonzero(label == c))[:n] for c in range(given.y.shape[1])]
        )
    )
    return given._replace(
        rows=[given.rows[0][rows]],
        y=given.y[rows],
        known=given.known[rows],
        group=given.group[rows],
    )


def scored(head: heads.Head, folder: embeddings.Embeddings, rows: np.ndarray) -> np.ndarray:
    """Scores, float32 [rows, classes]."""
    kind = "patches" if head.kind == "patches" else head.pool
    x = np.asarray(folder.array(kind, 4 if kind == "patches" else 2)[rows], np.float32)
    return fit.logits(
        head.kind, head.arrays, x.reshape(len(x), -1, x.shape[-1]) if kind == "patches" else x
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", metavar="TRAIN_EMB")
    parser.add_argument("test", metavar="TEST_EMB")
    parser.add_argument("--draws", type=int, default=10)
    args = parser.parse_args(argv)
    train, test = embeddings.read(args.train), embeddings.read(args.test)
    given, held = labelled_rows.own([train]), labelled_rows.own([test])
    if given.names != held.names or not given.exclusive or not held.exclusive:
        raise SystemExit(
            f"{args.train} and {args.test}: expected the same classes in both, one for each row"
        )
    weight = measures.bootstrap(len(held.y), SAMPLES)
    print(
        f"{len(given.names)} classes, {len(given.y)} rows to draw from, {len(held.y)} to score,"
        f" {args.draws} draws\n"
    )
    print(
        "| examples a class | method | accuracy, % | mean average precision, % |\n|---|---|---|---|"
    )
    for n in EXAMPLES:
        for method in METHODS:
            began, found = time.perf_counter(), []
            for draw in range(args.draws):
                some = drawn(given, n, np.random.default_rng([n, draw]))
                head = fit.fit([train], some, method=method, pool="mean", seed=draw).head
                z = scored(head, test, held.rows[0])
                average = [
                    measures.average_precision(z[:, c], held.y[:, c], weight)
                    for c in range(z.shape[1])
                ]
                found.append((measures.accuracy(z, held.y, weight), np.nanmean(average, axis=0)))
            cells = []
            for values in zip(*found, strict=True):
                all_ = 100 * np.stack(values)
                low, high = np.quantile(all_, [0.025, 0.975])
                cells.append(f"{all_[:, 0].mean():.1f} ({low:.1f} to {high:.1f})")
            print(f"| {n} | {method} | {' | '.join(cells)} |", flush=True)
            print(
                f"{n} × {method}: {(time.perf_counter() - began) / args.draws:.1f} s a fit",
                file=sys.stderr,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
