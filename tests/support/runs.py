"""Small runs on disk, in the format of `jaxtrain.checkpoint`, for the tests of the commands.

python tests/support/runs.py WORKDIR PORT PROCESSES PROCESS
    one of several processes that save one step together
"""

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxtrain.arrays import checksums, stored

SHAPES = {
    "encoder": {
        "w_patch": ((64, 128), "float32"),
        "blocks": {"w_qkv": ((3, 128, 64), "float32"), "b_qkv": ((3, 64), "bfloat16")},
        "scale": ((128,), "float32"),
    },
    "head": {"w": ((128, 5), "bfloat16"), "b": ((5,), "float32")},
}
SPECS = {
    "w_patch": ("fsdp", "model"),
    "w_qkv": (None, "fsdp", "model"),
    "b_qkv": (None, "model"),
    "scale": ("fsdp",),
}


def params(seed: int) -> Any:
    """Random parameters on a mesh of all devices, (data, fsdp, model) = (n / 4, 2, 2), split as a
    model would be."""
    mesh = jax.make_mesh((len(jax.devices()) // 4, 2, 2), ("data", "fsdp", "model"))
    leaves = jax.tree.leaves_with_path(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    made = []
    for i, (path, (shape, dtype)) in enumerate(leaves):
        numbers = np.random.default_rng([seed, i]).standard_normal(shape).astype(jnp.dtype(dtype))
        sharding = jax.NamedSharding(mesh, jax.P(*SPECS.get(path[-1].key, ())))
        made.append(
            jax.make_array_from_callback(shape, sharding, lambda index, x=numbers: x[index])
        )
    return jax.tree.unflatten(
        jax.tree.structure(SHAPES, is_leaf=lambda x: isinstance(x, tuple)), made
    )


def state(seed: int, step: int) -> dict[str, Any]:
    p = params(seed)
    whole = jax.NamedSharding(jax.tree.leaves(p)[0].sharding.mesh, jax.P())
    count = jax.make_array_from_callback((), whole, lambda index: np.array(step, np.int32))
    moments = lambda scale: jax.tree.map(lambda x: x * jnp.asarray(scale, x.dtype), p)  # noqa: E731
    return {
        "step": count,
        "params": p,
        "model_state": (),
        "opt_state": ({"count": count, "mu": moments(0.1), "nu": moments(0.01)}, ()),
        "ema": params(seed + 1000),
    }


def config(**model: Any) -> dict[str, Any]:
    return {"workload": "none_such", "model": model, "train": {"steps": 30}, "seed": 0}


def save(
    workdir: pathlib.Path,
    step: int,
    state: Any,
    *,
    run: dict[str, Any] | None = None,
    manifest: bool = True,
) -> pathlib.Path:
    """One step of a run. Called by every process."""
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                data=ocp.args.JsonSave({"position": step, "seed": 7}),
                meta=ocp.args.JsonSave(
                    {
                        "format": stored.FORMAT,
                        "config": run or config(embed=128),
                        "parameters": "abc123",
                        "versions": {"jax": jax.__version__},
                    }
                ),
            ),
        )
    if manifest and jax.process_index() == 0:
        checksums.write(workdir / "checkpoints" / str(step))
        records = [
            {"step": s, "split": split, "loss": s / 10}
            for s in (step - 1, step)
            for split in ("train", "test")
        ]
        (workdir / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return workdir / "checkpoints" / str(step)


def numbers(tree: Any) -> dict[str, np.ndarray]:
    """path -> numpy."""
    return {
        jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x)
        for p, x in jax.tree.leaves_with_path(tree)
    }


if __name__ == "__main__":
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", int(sys.argv[3]), int(sys.argv[4]))
    save(pathlib.Path(sys.argv[1]), 10, state(0, 10))
