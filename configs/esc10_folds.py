"""ESC-10 without one of its five folds, by one objective, for a few CPU minutes: what tools.esc10_folds trains and compares.

    python -m jaxtrain.main --config=configs/esc10_folds.py:/path/to/esc10,mae,5        (objective and the fold left out)

The path is a folder that Hugging Face `datasets` wrote, whose test/ is fold 5 and whose train/ has a shard for each of the
others. A row is two views of 2.5 s of a recording; the objectives are those of jaxtrain/workloads/bird.py.
"""

from ml_collections import ConfigDict

CLIPS = 80  # in a fold
OBJECTIVES = {
    "supervised": dict(supervised=dict(weight=1.0, label_smoothing=0.1)),
    "mae": dict(mae=dict(weight=1.0, decoder=dict(embed=64, depth=2, heads=2))),
    "lejepa": dict(lejepa=dict(weight=1.0, hidden=512, trade=0.05)),
    "diet": dict(diet=dict(weight=1.0, rank=64, label_smoothing=0.4)),
    "teacher": dict(teacher=dict(weight=1.0, decoder=dict(embed=64, depth=2, heads=2))),
}
FULL = dict(crop=0.4, shift=64, gain=0.2, noise=0.05, time_masks=2, time_mask=40, mel_masks=2, mel_mask=20)
SLIGHT = dict(shift=128, gain=0.1)  # where masks make the task already


def get_config(argument: str) -> ConfigDict:
    path, objective, fold = (*argument.split(","), "", "")[:3]
    if not path or objective not in OBJECTIVES or fold not in "12345":
        raise ValueError(f"{argument!r} is not PATH,OBJECTIVE,FOLD with one of {', '.join(OBJECTIVES)} and a fold from 1 to 5")
    first = int(fold) % 5 * CLIPS  # test/ comes first in the alphabet
    masks = objective in ("mae", "teacher")
    return ConfigDict(
        dict(
            workload="jaxtrain.workloads.bird",
            loader="loaders.spectrogram",
            workdir=f"runs/esc10_folds/{objective}_{fold}",
            model=dict(
                n_frames=256,
                patch=(32, 32),
                embed=128,
                depth=4,
                heads=4,
                pool="patches",
                dtype="float32",
                augment=SLIGHT if masks else FULL,
                **{"supervised": dict(weight=0.0), **OBJECTIVES[objective]},
            ),
            data=dict(
                train=f"{path}/*/*.arrow",
                test_share=0.0,
                label="label",
                exclude=tuple(range(first, first + CLIPS)),
                views=2,
                n_frames=256,
                clip_seconds=2.5,
            ),
            train=dict(steps=250, batch=32, eval_every=0, ema=0.99),
            optim=dict(
                lr=2e-3,
                warmup=25,
                schedule="cosine",
                weight_decay=0.05,
                groups=(dict(match="^probe/", lr=1e-3, weight_decay=1e-7),),
            ),
            checkpoint=dict(every=250, final="weights"),
        )
    )
