"""An export as timm's, whose features timm has computed (tests/data/timm/make.py)."""

import json
import pathlib

import jax
import jax.numpy as jnp

from jaxtrain import config as config_lib
from jaxtrain.arrays import safetensors as export_lib
from jaxtrain.workloads.bird import model as bird
from tests.support import corpus, runs
from tests.support.cases import initial

NAMES = ("blackbird", "chiffchaff", "wren")
MODEL = dict(
    embed=32, depth=2, heads=2, patch=(16, 16), n_frames=64, n_mels=32, dtype="float32", pool="patches", n_registers=2,
    qk_norm=True, layer_scale=0.5, mlp="gelu",
)  # fmt: skip

FRONT_END = dict(sample_rate=16_000, n_mels=32)


def exported(folder: pathlib.Path, **model) -> pathlib.Path:
    """The export of a run whose weights depend on a key."""
    shard = corpus.table([corpus.wav(i, 0.7) for i in range(4)], [i % 3 for i in range(4)], NAMES)
    corpus.write(folder / "shards" / "data-train.arrow", shard)
    data = dict(
        train=str(folder / "shards"), label="label", n_frames=64, clip_seconds=0.65, threads=1, test_share=0.0, **FRONT_END
    )
    config = config_lib.from_dict(
        dict(
            workload="jaxtrain.workloads.bird",
            loader="loaders.audio.spectrogram",
            model={**MODEL, **model},
            data=data,
            workdir=str(folder / "run"),
        )
    )
    params = initial(bird.make_specs(config.model))
    params["encoder"] = jax.tree.map(
        lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params["encoder"]
    )
    state = {"step": jnp.array(1, jnp.int32), "params": params, "model_state": (), "opt_state": ()}
    runs.save(folder / "run", 1, state, run=json.loads(config_lib.to_json(config)))
    export_lib.export(str(folder / "run"), str(folder / "out"), formats=("timm",))
    return folder / "out"
