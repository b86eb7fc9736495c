"""Compiles layers with attention, trained by the step's own gradients, for H100s or TPUs: attention_programs.py < cases.json

A process of its own, where the compiler is on the path; `test_attention_compiled` starts it and reads its answer, one JSON line
for each case. Run by hand it takes the same: a list of dictionaries, of which `CASE` has the defaults.
"""

import collections
import json
import os
import re
import sys
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
os.environ |= {"TPU_ACCELERATOR_TYPE": "v4-8", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxtrain import layout as layout_lib
from jaxtrain import specs, step
from jaxtrain.nn import remat, transformer
from jaxtrain.types import LossOut, Mean, Task, Variables

CASE = dict(
    chips="h100:1x1x8",  # or h100:1x2x8 (two nodes), v4:2x2x1, v5e:2x4, v6e:2x4
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
    remat="none",
    accumulate=1,
    train=True,
)
# Of openxla/xla's xla/backends/gpu/target_config/specs/h100_sxm.txtpb.
H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3\""""


def devices(chips: str) -> list:
    name, _, topology = chips.partition(":")
    if name == "h100":
        return list(topologies.get_topology_desc("x", "cuda", target_config=H100, topology=topology).devices)
    options = {"chip_config_name": "megacore"} if name == "v4" else {}
    return list(topologies.get_topology_desc(chips, platform="tpu", **options).devices)


def program(case: dict) -> jax.stages.Lowered:
    """The gradients of two layers' mean square, or its value."""
    c = transformer.Decoder(
        embed=128, depth=2, heads=case["heads"], kv_heads=case["kv_heads"], head_dim=case["head_dim"], mlp=128,
        window=case["window"], dtype=case["dtype"], remat=case["remat"],
    )  # fmt: skip
    layout = layout_lib.make_layout(layout_lib.make_mesh(*case["mesh"], devices=devices(case["chips"])), {})
    table = {**transformer.attention_specs(c), **transformer.feed_forward_specs(c)}

    def total(variables: Variables, batch: dict) -> Mean:
        segments = batch["segments"] if case["packed"] else None
        mix = transformer.mixer(c, segments, layout.shard, causal=case["causal"])

        def layer(x_btd, w):
            return transformer.layer(c, layout.shard, None, mix, x_btd, w)

        x_btd, _ = remat.scan(layer, batch["x"].astype(c.dtype), variables.params, c.remat, kernels=transformer.KERNELS)
        return Mean(jnp.square(x_btd.astype(jnp.float32)).sum(), jnp.float32(x_btd.size))

    axes = {"x": ("batch", "seq", None), "segments": ("batch", "seq")}
    task = Task(
        Variables(table), lambda variables, batch, key: LossOut(total(variables, batch), {}), lambda *_: {}, axes, flops=0
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
        lambda params, batch: step.gradients(
            task, layout, Variables(params), batch, jax.random.key(0), accumulate=case["accumulate"]
        )
    ).lower(params, batch)


def facts(case: dict) -> dict:
    """What the compiled program has: its kernels, collectives, arrays and bytes."""
    began = time.perf_counter()
    gpu = case["chips"].startswith("h100")
    # Triton's own products find no tiles for some shapes where nothing can be measured.
    compiled = program(case).compile(compiler_options={"xla_gpu_enable_triton_gemm": False} if gpu else {})
    text, memory = compiled.as_text(), compiled.memory_analysis()
    local = re.findall(r"\b(f32|bf16|pred|s32)\[([\d,]+)\]", text)
    square = sorted({f"{dtype}[{shape}]" for dtype, shape in local if shape.split(",").count(str(case["tokens"])) > 1})
    kernels = re.findall(r'custom_call_target="(__cudnn\$fmha\w*|__gpu\$xla.gpu.triton|tpu_custom_call)"', text)
    gathered = re.findall(r"= \(?(\w+\[[\d,]*\])[^=]* (?:all-gather|all-gather-start|all-to-all)\(", text)
    lengths = {str(case["tokens"]), str(case["tokens"] + case["tokens"] % 2)}  # weights have no dimension of places
    rows = [x for x in gathered if x.count(",") >= 3 and lengths & set(re.findall(r"\d+", x.partition("[")[2]))]
    return {
        "kernels": dict(collections.Counter(kernels)),
        "square": square,
        "gathered": rows,  # arrays like q, k or v
        "temporaries": memory.temp_size_in_bytes,
        "peak": memory.peak_memory_in_bytes,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    for given in json.load(sys.stdin):
        case = {**CASE, **given}
        try:
            found = facts(case)
        except Exception as error:  # one that does not compile is an answer, and the others are asked for too
            found = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps({"case": given, **found}), flush=True)


if __name__ == "__main__":
    main()
