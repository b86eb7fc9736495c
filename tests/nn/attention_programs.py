"""Compiles layers with attention, trained by the step's own gradients, for H100s or TPUs.

    python attention_programs.py VERSIONS < cases.json

It runs in a separate process with the compiler on the path. `test_attention_compiled` starts it and
reads its answer: one JSON line for each case of a list of dictionaries. `CASE` has their defaults.
VERSIONS are the compiler's, and its answers are cached.
"""

import collections
import json
import os
import re
import sys
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}

import jax
import jax.numpy as jnp

from jaxtrain import plan, specs
from jaxtrain.nn import remat, transformer
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan import compile
from jaxtrain.step import train_step
from jaxtrain.types import LossOut, Mean, Task, Variables

CASE = dict(
    chips="gpu:h100x8",  # as for --plan
    mesh=(8, 1, 1),
    rows=8,  # of a microbatch on each part of the batch
    tokens=320,
    heads=4,
    kv_heads=4,
    head_dim=64,
    dtype="bfloat16",
    causal=True,
    window=0,
    packed=False,
    documents=None,
    remat="none",
    accumulate=1,
    train=True,
)


def devices(chips: str) -> list:
    target = plan.parse_target(chips)
    return plan.compile.tpu_devices(target) if target.kind == "tpu" else compile.gpu_devices(target)


def program(case: dict) -> jax.stages.Lowered:
    """The gradients of two layers' mean square, or its value."""
    c = transformer.Decoder(
        embed=128,
        depth=2,
        heads=case["heads"],
        kv_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        mlp=128,
        window=case["window"],
        documents=case["documents"],
        dtype=case["dtype"],
        remat=case["remat"],
    )
    layout = layout_lib.make_layout(
        layout_lib.make_mesh(*case["mesh"], devices=devices(case["chips"])), {}
    )
    table = {**transformer.attention_specs(c), **transformer.feed_forward_specs(c)}

    def total(variables: Variables, batch: dict) -> Mean:
        segments = batch["segments"] if case["packed"] else None
        mix = transformer.mixer(c, segments, layout.shard, causal=case["causal"])

        def layer(x_btd, w):
            return transformer.layer(c, layout.shard, None, mix, x_btd, w)

        x_btd, _ = remat.scan(
            layer,
            batch["x"].astype(c.dtype),
            variables.params,
            c.remat,
            kernels=transformer.KERNELS,
        )
        return Mean(jnp.square(x_btd.astype(jnp.float32)).sum(), jnp.float32(x_btd.size))

    axes = {"x": ("batch", "seq", None), "segments": ("batch", "seq")}
    task = Task(
        Variables(table),
        lambda variables, batch, key: LossOut(total(variables, batch), {}),
        lambda *_: {},
        axes,
        flops=0,
    )
    b, t = case["rows"] * case["accumulate"] * case["mesh"][0] * case["mesh"][1], case["tokens"]
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes[name], shape))
        for name, shape, dtype in (("x", (b, t, 128), "float32"), ("segments", (b, t), "int32"))
    }
    params = specs.abstract(table, layout)
    if not case["train"]:
        return jax.jit(lambda params, batch: total(Variables(params), batch)).lower(params, batch)
    return jax.jit(
        lambda params, batch: train_step.gradients(
            task, layout, Variables(params), batch, jax.random.key(0), accumulate=case["accumulate"]
        )
    ).lower(params, batch)


def facts(case: dict, versions: str) -> dict:
    """The contents of the compiled program: its kernels, collectives, arrays and bytes."""
    began = time.perf_counter()
    options = compile.UNTUNED if case["chips"].startswith("gpu") else {}
    said, _ = compile.ask(program(case), devices(case["chips"]), options, versions=versions)
    text = said.text
    local = re.findall(r"\b(f32|bf16|pred|s32)\[([\d,]+)\]", text)
    square = sorted(
        {
            f"{dtype}[{shape}]"
            for dtype, shape in local
            if shape.split(",").count(str(case["tokens"])) > 1
        }
    )
    kernels = re.findall(
        r'custom_call_target="(__cudnn\$fmha\w*|__gpu\$xla\S*|tpu_custom_call|mosaic_gpu\w*)"', text
    )
    gathered = re.findall(
        r"= \(?(\w+\[[\d,]*\])[^=]* (?:all-gather|all-gather-start|all-to-all)\(", text
    )
    # weights have no dimension of places
    lengths = {str(case["tokens"]), str(case["tokens"] + case["tokens"] % 2)}
    rows = [
        x
        for x in gathered
        if x.count(",") >= 3 and lengths & set(re.findall(r"\d+", x.partition("[")[2]))
    ]
    return {
        "kernels": dict(collections.Counter(kernels)),
        "square": square,
        "gathered": rows,  # arrays like q, k or v
        "temporaries": said.temporaries,
        "peak": said.peak,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    for given in json.load(sys.stdin):
        case = {**CASE, **given}
        try:
            found = facts(case, sys.argv[1])
        # a case that does not compile is an answer, and the others still run
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({"case": given, **found}), flush=True)


if __name__ == "__main__":
    main()
