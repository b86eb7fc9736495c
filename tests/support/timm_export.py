"""An export as timm's, whose features timm has computed (tests/data/timm/make.py)."""

import pathlib

import jax
import jax.numpy as jnp

from jaxtrain.arrays import safetensors as export_lib
from tests.support import birds

MODEL = dict(
    embed=32,
    depth=2,
    heads=2,
    patch=(16, 16),
    n_frames=64,
    n_mels=32,
    dtype="float32",
    pool="patches",
    n_registers=2,
    qk_norm=True,
    layer_scale=0.5,
    mlp="gelu",
)

FRONT_END = dict(sample_rate=16_000, n_mels=32)


def exported(folder: pathlib.Path, **model) -> pathlib.Path:
    """The export of a run whose weights depend on a key."""

    def change(params):
        def waves(x):
            return x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)

        return {**params, "encoder": jax.tree.map(waves, params["encoder"])}

    run = birds.make_run(
        folder,
        seconds=0.7,
        data=dict(clip_seconds=0.65, **FRONT_END),
        change=change,
        **{**MODEL, **model},
    )
    export_lib.export(str(run), str(folder / "out"), export_lib.Options(formats=("timm",)))
    return folder / "out"
