"""Write the scores of a made-up benchmark: python make.py, with torch 2.15.0 (CPU) and torchmetrics
1.9.0.

measures.npz has scores float32 [n, C] with ties, y uint8 [n, C] with rows without a class, and the
results of torchmetrics' formulas as BirdSet calls them. The results are cmAP
(MultilabelAveragePrecision, macro, exact), AUROC (multilabel, macro, exact), and top-1. Top-1 is
the share of rows whose largest score is of one of their classes, among the rows with a class.
"""

import pathlib

import numpy as np
import torch
from torchmetrics.classification import MultilabelAUROC, MultilabelAveragePrecision

HERE = pathlib.Path(__file__).parent


def main() -> None:
    rng = np.random.default_rng(0)
    n, c = 300, 7
    y = (rng.random((n, c)) < np.linspace(0.02, 0.3, c)).astype(np.uint8)
    y[::4] = 0
    scores = np.round(rng.standard_normal((n, c)) + 1.5 * y, 1).astype(np.float32)
    assert y.any(0).all(), (
        "each class is there: of others torchmetrics and BirdSet have different opinions"
    )
    preds, target = torch.from_numpy(scores).sigmoid(), torch.from_numpy(y).int()
    found = {
        "cmAP": MultilabelAveragePrecision(c, average="macro", thresholds=None)(preds, target),
        "AUROC": MultilabelAUROC(c, average="macro", thresholds=None)(preds, target),
    }
    has = target.sum(1) > 0
    found["accuracy"] = target.gather(1, preds.topk(1, dim=1).indices)[has].float().mean()
    np.savez_compressed(
        HERE / "measures.npz", scores=scores, y=y, **{k: np.float64(v) for k, v in found.items()}
    )


if __name__ == "__main__":
    main()
