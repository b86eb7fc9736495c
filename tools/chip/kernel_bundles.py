"""Count the instruction bundles of a kernel on a TPU that need not be here.

    python -m tools.chip.kernel_bundles FOLDER --tokens=8192
    python -m tools.chip.kernel_bundles FOLDER --tokens=8192 --kernel=splash --block=256
    python -m tools.chip.kernel_bundles FOLDER --kernel=short --rows=256 --tokens=257 --heads=6,6,64
    python -m tools.chip.kernel_bundles FOLDER --kernel=mixer --rows=192 --tokens=97

The mixer is that of the recursive model. The other kernels are attention. Rows have documents under
a causal mask, and those of the kernel for short rows have neither. Each kernel is printed as its
parts: the bundles between two labels or branches of the final program. A part that begins with LB
is the body of a loop: of the grid, and with a second > of the loop over heads. A branch jumps over
the parts up to its region's end, as for the first and last step of a block of queries. Bundles are
counted, not timed. The compiler is that of `jaxtrain plan --setup tpu`, whose dump is in FOLDER.
"""

import argparse
import os
import pathlib
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from jaxtrain import plan
from jaxtrain.nn import pair_blocks, short, splash
from jaxtrain.parallel import layout
from jaxtrain.plan import environment
from jaxtrain.workloads.trm import model, tpu_mixer

ATTENTION: dict[str, Any] = {
    "pair_blocks": pair_blocks.pair_blocks,
    "splash": splash.splash,
    "short": short.short,
}
BUNDLE = re.compile(r"\s*(0x[0-9a-f]+|0)\s+(.*?):\s+(>*)\s*\{")
BRANCH = re.compile(r"sbr\.rel \((.*?)\) target = (?:bundleno = )?\$?(\w+)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--heads", default="32,8,64", help="of queries, of keys, their values")
    parser.add_argument("--widths", default="512,512", help="of the mixer: embed, inner")
    parser.add_argument("--kernel", choices=[*ATTENTION, "mixer"], default="pair_blocks")
    parser.add_argument("--block", type=int, help="of splash")
    parser.add_argument("--target", default="tpu:v5e:2x2")
    args = parser.parse_args()
    if args.block and args.kernel != "splash":
        parser.error(f"--block is of splash, and the kernel is {args.kernel}")
    args.folder.mkdir(parents=True, exist_ok=True)
    splash.BLOCK = args.block or splash.BLOCK
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={args.folder} --xla_jf_dump_llo_text=true"
    sys.path.insert(0, str(environment.folder("tpu")))
    [device, *_] = plan.compile.tpu_devices(plan.parse_target(args.target))
    compile_kernel = compile_mixer if args.kernel == "mixer" else compile_attention
    compile_kernel(args, device)
    for path in sorted(args.folder.glob("*-final_bundles.txt")):
        is_kernel = any(name in path.name for name in ("attention", "splash", "mixer"))
        if is_kernel and "schedule" not in path.name:
            print(path.name)
            for place, label, bundles in parts(path.read_text()):
                print(f"  {place:6d} {bundles:6d} {label}")


def compile_mixer(args: argparse.Namespace, device: jax.Device) -> None:
    """Compile the mixer forward and back, whose matrices are float32 parameters."""
    d, n = map(int, args.widths.split(","))
    where = SingleDeviceSharding(device)
    w_up, w_down = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
        for shape in ((args.tokens, 2, n), (n, args.tokens))
    )
    x = jax.ShapeDtypeStruct((args.rows, args.tokens, d), jnp.bfloat16, sharding=where)
    shard = layout.make_layout(layout.make_mesh(1, 1, 1, devices=[device]), {}).shard

    def step(
        w_up: jax.Array, w_down: jax.Array, x: jax.Array, dz: jax.Array
    ) -> tuple[jax.Array, ...]:
        def mix(w_up: jax.Array, w_down: jax.Array, x: jax.Array) -> jax.Array:
            return tpu_mixer.mix(w_up, w_down, x, shard, eps=model.EPS)

        z, pull = jax.vjp(mix, w_up, w_down, x)
        return z, *pull(dz)

    jax.jit(step).lower(w_up, w_down, x, x).compile()


def compile_attention(args: argparse.Namespace, device: jax.Device) -> None:
    h, g, k = map(int, args.heads.split(","))
    where = SingleDeviceSharding(device)
    q, key = (
        jax.ShapeDtypeStruct((args.rows, args.tokens, n, k), jnp.bfloat16, sharding=where)
        for n in (h, g)
    )
    segments = jax.ShapeDtypeStruct((args.rows, args.tokens), jnp.int32, sharding=where)
    kernel = ATTENTION[args.kernel]

    def step(
        q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array, segments: jax.Array
    ) -> tuple[jax.Array, ...]:
        how: dict[str, Any] = {"causal": True, "window": 0, "segments_bt": segments}
        if args.kernel == "short":
            how = {"causal": False, "window": 0}

        def attend(*qkv: jax.Array) -> Any:
            return kernel(*qkv, **how)

        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dy)

    jax.jit(step).lower(q, key, key, q, segments).compile()


def parts(text: str) -> list[tuple[int, str, int]]:
    """Return the place, the label and the number of bundles of each part of a program."""
    marks, place = [(0, "begin")], 0
    for line in text.splitlines():
        bundle = BUNDLE.match(line)
        if bundle:
            place = int(bundle[1], 16)
            if bundle[2].strip():
                marks.append((place, bundle[2].strip() + bundle[3]))
            marks += [(place, f"branch {' '.join(found)}") for found in BRANCH.findall(line)]
    ends = [first for first, _ in marks[1:]] + [place + 1]
    return [(first, label, end - first) for (first, label), end in zip(marks, ends, strict=True)]


if __name__ == "__main__":
    main()
