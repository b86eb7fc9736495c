"""Any index of `jaxtrain index`, on two CPU cores: a small supervised model with an online probe.

    jaxtrain index recordings --out index --split recording=0.2
    jaxtrain train --config=folder:index

The argument is the index's folder. How long a clip is (at most 5 s) is taken from it. So is the
loss: a softmax if each row has one class, otherwise the asymmetric loss, which scores each class
alone (rows of several classes, windows of none). The index must have the splits "train" and "test":
of windows of one recording, some would otherwise be trained and others tested on.
"""

import json
import math

from ml_collections import config_dict

from loaders.audio.recordings import find
from loaders.io import files


def get_config(path: str = "") -> config_dict.ConfigDict:
    if not path:  # to read the fields; for a run, data.train is reported as empty
        return recipe("", multilabel=False, seconds=5.0)
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
    return recipe(path, multilabel=multilabel, seconds=seconds)


def recipe(path: str, *, multilabel: bool, seconds: float) -> config_dict.ConfigDict:
    """Return the recipe on an index of clips of ``seconds``, one class in a row or any number."""
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
            embed=128,
            depth=3,
            heads=4,
            patch=(32, 32),
            pool="patches",
            dtype="float32",
            supervised=dict(loss="asymmetric") if multilabel else dict(label_smoothing=0.1),
            augment=dict(time_masks=1, mel_masks=1, time_mask=min(80, frames // 4)),
        ),
        data=dict(
            train=path,
            multilabel=multilabel,
            clip_seconds=seconds,
            n_frames=32 * math.ceil(frames / 32),
        ),
        train=dict(steps=600, batch=32, eval_every=200),
        optim=dict(
            lr=2e-3,
            schedule="cosine",
            warmup=1 / 12,
            weight_decay=0.05,
            groups=(dict(match="^probe/", lr=1e-3, weight_decay=1e-7, clip=1.0),),
        ),
        checkpoint=dict(every=100),
    )
