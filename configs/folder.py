"""Any index of `jaxtrain index`, on two CPU cores: a small supervised model with an online probe.

    jaxtrain index recordings --out index --split recording=0.2
    jaxtrain train --config=folder:index

The argument is the index's folder. How long a clip is (at most 5 s) is taken from it. So is the
loss: a softmax if each row has one class, otherwise the asymmetric loss, which scores each class
alone (rows of several classes, windows of none). The index must have the splits "train" and "test":
of windows of one recording, some would otherwise be trained and others tested on.

The learning rate falls in cycles of four passes over the rows, and a run ends after three cycles
without half a point more of accuracy, at the latest after ten, and at once when every test row is
right. It prints the minutes that this may take, and the reason of its end. While it guesses no
better than always the most frequent class, patience does not count. For a length of your own:
--config.train.patience=0 --config.train.target=None --config.optim.cycle=0
--config.train.steps=2000.
"""

import json
import math
from typing import Any

from ml_collections import config_dict

from loaders.audio.recordings import find
from loaders.io import files

BATCH = 32  # [rows]
CYCLES = 10
EPOCHS = 4  # of a cycle
STEPS_OF_CYCLE = (300, 3_000)  # at least and at most


def get_config(path: str = "") -> config_dict.ConfigDict:
    if not path:  # to read the fields; for a run, data.train is reported as empty
        return recipe("", multilabel=False, seconds=5.0, n_rows=0)
    index_file = files.expanded(path) / "index.json"
    try:
        index = json.loads(index_file.read_text())
        splits = index["splits"]
    except (OSError, ValueError, KeyError) as error:
        reason = find.how_to_index(files.expanded(path))
        reason = reason or f"{error}; make one: jaxtrain index RECORDINGS --out {path}"
        raise ValueError(f"{path} is not an index of jaxtrain index: {reason}") from error
    if not {"train", "test"} <= set(splits):
        raise ValueError(
            f"{path} has the splits {', '.join(splits)}; make it with train and test, for example"
            " --split recording=0.2. Of few recordings a hash may choose none for a split: then"
            " try another --seed"
        )
    has_one_class = True
    for split in splits.values():
        if split.get("rows_of_several_classes") or split.get("rows_of_no_class"):
            has_one_class = False
    multilabel = not has_one_class and len(index["classes"]) > 0
    seconds = min(5.0, max(0.1, splits["train"]["median_seconds"]))
    config = recipe(path, multilabel=multilabel, seconds=seconds, n_rows=splits["train"]["rows"])
    if len(index["classes"]) > 1:
        config.checkpoint.best = "accuracy"
        config.train.min_delta = 0.005
        config.train.target = 1.0
        config.train.patience_from = guessing(splits["test"])
    return config


def guessing(split: dict[str, Any]) -> float:
    """Return the accuracy that always the most frequent class has in a split, by luck at most.

    That is two standard errors above its share of the rows that have a class.
    """
    n_rows = max(1, split["rows"] - split.get("rows_of_no_class", 0))
    share = max(split.get("rows_of_each_class", [0])) / n_rows
    return float(round(share + 2 * math.sqrt(share * max(0, 1 - share) / n_rows), 4))


def recipe(path: str, *, multilabel: bool, seconds: float, n_rows: int) -> config_dict.ConfigDict:
    """Return the recipe on clips of ``seconds``, with one class in a row or any number.

    ``n_rows``: to train on.
    """
    low, high = STEPS_OF_CYCLE
    cycle = min(high, max(low, 100 * round(EPOCHS * n_rows / BATCH / 100)))
    n_samples = round(seconds * 32_000)
    frames = 1 + int((n_samples - 800) // 320)
    workdir = "runs/folder"
    if path:
        workdir = f"runs/folder-{files.expanded(path).resolve().name}"
    return config_dict.create(
        workload="jaxtrain.workloads.bird",
        loader="loaders.audio.spectrogram",
        workdir=workdir,
        model=dict(
            embed=96,
            depth=3,
            unroll=3,  # on a CPU a loop over layers writes out what it keeps twice
            heads=4,
            patch=(16, 64),
            pool="patches",
            dtype="float32",
            patch_norm=True,
            supervised=dict(loss="asymmetric") if multilabel else dict(label_smoothing=0.1),
            augment=dict(
                shift=frames // 2, time_masks=1, mel_masks=1, time_mask=min(80, frames // 4)
            ),
        ),
        data=dict(
            train=path,
            multilabel=multilabel,
            clip_seconds=seconds,
            n_frames=32 * math.ceil(frames / 32),
        ),
        train=dict(
            steps=CYCLES * cycle,
            batch=BATCH,
            accumulate=2,  # 16 rows at once fit into a CPU's cache: a fifth faster
            eval_every=cycle,
            patience=3,
        ),
        optim=dict(
            lr=2e-3,
            schedule="cycle",
            cycle=cycle,
            warmup=1 / 12,
            weight_decay=0.05,
            groups=(dict(match="^probe/", lr=1e-3, weight_decay=1e-7, clip=1.0),),
        ),
        checkpoint=dict(every=100, best="-supervised_loss"),
    )
