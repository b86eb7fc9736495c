"""The Giblet autoencoder, 8.36 billion parameters: a film in, fMRI and the film again out.

    jaxtrain train --config=giblet:/path/to/folder
        (or JAXTRAIN_GIBLET=/path/to/folder)

The path is a folder that `jaxtrain prepare-giblet` made of the film, its codes and embeddings, and
the viewers' NIfTI files; "blank" has the published shapes and holds nothing, to plan with. Without
one, `demo` is trained, a hundredth of the size.

Parameters, gradients and the optimizer's state; a step on eight TPU v4 needs 0.1 GB on each
besides, by the compiler (``pytest tests/workloads/test_giblet_size.py``; ``--plan`` has the figures
of other devices and settings):

    float32                             133.8 GB    16.7 GB on each of eight, of 48 GB for example
    model.param_dtype=bfloat16          100.3 GB    with optim.masters=true float32 ones too: as
                                                    many bytes as float32 alone
    … and optim.moments=bfloat16         66.9 GB    8.4 GB on each of eight
    … or optim.moments=int8              50.2 GB
    … or optim.name=adafactor            33.4 GB

`optim.offload` keeps the optimizer's state in host memory between steps; during the update all of
it is on the devices.
"""

import os
from typing import Any

from ml_collections import config_dict

# A mean square over a standard deviation has the target's unit: codes up to 1023 make it hundreds,
# where all else is about 1.
AUDIO = 0.003


def get_config(argument: str = "") -> config_dict.ConfigDict:
    path = argument or os.environ.get("JAXTRAIN_GIBLET", "")
    if path in ("", "demo"):
        return config_dict.create(**demo())
    return config_dict.create(
        workload="jaxtrain.workloads.giblet",
        loader="loaders.film.multimodal",
        model=dict(normalised=True, weight_audio=AUDIO),
        data=dict(path=path, hrf=("text",)),
        train=dict(steps=20_000, batch=64, eval_every=200, patience=10, min_delta=1e-4),
        optim=dict(
            lr=1e-4,
            schedule="cosine",
            warmup=0.025,
            lr_init=0.1,
            lr_floor=0.01,
            weight_decay=1e-5,
            clip=1.0,
        ),
        mesh=dict(data=1, fsdp=-1),
        checkpoint=dict(every=200, best="-total_loss", keep=2),
    )


def demo() -> dict[str, Any]:
    """Return a hundredth of the size, on a generated film with a known map to 2,000 voxels.

    85 million parameters. ``make giblet-demo`` trains it to a held-out r of 0.36 (shuffled pairs
    0.01), and 0.42 over time in a voxel (0.02), in 7.5 minutes of CPU time.
    """
    return dict(
        workload="jaxtrain.workloads.giblet",
        loader="loaders.film.multimodal",
        workdir="runs/giblet-demo",
        model=dict(
            video_widths=(704, 512, 256),
            audio_widths=(128, 64),
            text_widths=(128, 64),
            trunk_widths=(1024, 2000),
            bottleneck=512,
            head_width=4096,
            decoder_widths=(2000, 1024, 512, 384),
            decode_video_widths=(512, 1024),
            decode_audio_widths=(512, 512),
            decode_text_widths=(256, 256),
            normalised=True,
            weight_audio=AUDIO,
            dtype="float32",
        ),
        data=dict(path="demo", hrf=("video", "text")),
        train=dict(steps=40, batch=32, eval_every=20),
        optim=dict(lr=1e-3, schedule="cosine", warmup=0.1, weight_decay=1e-5),
        mesh=dict(data=1, fsdp=-1),
        checkpoint=dict(every=20, best="fmri_r", keep=1),
        metrics=dict(every=1),
    )
