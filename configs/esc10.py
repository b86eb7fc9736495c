"""ESC-10: ten classes of environmental sound, trained from scratch on a CPU.

320 clips of 5 s are for training, and 80 for testing.

    jaxtrain train --config=esc10:/path/to/esc10
        (or JAXTRAIN_ESC10=/path/to/esc10)

The path is a folder that Hugging Face `datasets` wrote, with train/ (folds 1-4) and test/ (fold 5),
the label in `label`.

The same model and augmentation reached 81.2 % over five folds, in 12 minutes of CPU time each
(`supervised_long` of configs/esc10_folds.py; chance 10 %; published for this set: a random forest
on MFCC 72.7 %, people 95.7 %).
"""

import os

from ml_collections import config_dict


def get_config(path: str = "") -> config_dict.ConfigDict:
    path = path or os.environ.get("JAXTRAIN_ESC10", "")
    steps = 800
    return config_dict.create(
        workload="jaxtrain.workloads.bird",
        loader="loaders.audio.spectrogram",
        model=dict(
            embed=192,
            depth=4,
            heads=3,
            patch=(32, 32),
            pool="patches",
            dtype="float32",
            supervised=dict(label_smoothing=0.1),
            augment=dict(
                shift=250,
                time_masks=2,
                time_mask=60,
                mel_masks=2,
                mel_mask=16,
                gain=0.2,
                noise=0.05,
            ),
        ),
        data=dict(train=path, label="label"),
        train=dict(steps=steps, batch=32, eval_every=100, ema=0.995),
        optim=dict(
            lr=1e-3,
            warmup=1 / 8,
            schedule="cosine",
            weight_decay=0.05,
            groups=(dict(match="^probe/", lr=1e-3, weight_decay=1e-7, clip=1.0),),
        ),
        checkpoint=dict(every=500),
    )
