"""The exchange that libtpu makes of a gradient that is added up and split over fsdp.

    python -m tests.proofs.scatters tpu:v5p:8x8x16 --data=2 8192x8192 8192x28672

Of each size, rows × columns, it compiles a product over tokens that all devices share, with its
rows split over fsdp: the gradient of a matrix. A row has the exchanges of the program, the bytes
that a device sends, and those that the program holds meanwhile. A scatter sends half of a sum.
"""

import argparse
import os
import sys

from jaxtrain.plan import environment
from jaxtrain.plan.compile import ask_for_no_chips, tpu_devices
from jaxtrain.plan.target import parse_target
from loaders.io import machine

TOKENS = 16  # of a device


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("sizes", nargs="+")
    parser.add_argument("--data", type=int, default=1)
    arguments = parser.parse_args()
    if not machine.has_package("libtpu"):
        packages = environment.find("tpu")
        if packages is None:
            parser.error("jaxtrain plan --setup tpu fetches libtpu")
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": environment.path(packages)}
        os.execve(sys.executable, [sys.executable, "-m", __spec__.name, *sys.argv[1:]], env)
    ask_for_no_chips()
    target = parse_target(arguments.target)
    fsdp = target.count // arguments.data
    print("| target | data × fsdp | gradient | exchanges | sent | held |")
    print("|---|---|---|---|---:|---:|")
    for size in arguments.sizes:
        rows, columns = map(int, size.split("x"))
        exchanges, sent, held = compiled(target, arguments.data, fsdp, rows, columns)
        mesh = f"{arguments.data} × {fsdp}"
        shape = f"{rows:,} × {columns:,}"
        print(f"| {target.name} | {mesh} | {shape} | {exchanges} | {sent} | {held} |", flush=True)


def compiled(target, data, fsdp, rows, columns):
    import jax
    import jax.numpy as jnp

    from jaxtrain.parallel import layout
    from jaxtrain.plan import hlo
    from jaxtrain.plan.memory import in_bytes

    mesh = layout.make_mesh(data, fsdp, 1, devices=tpu_devices(target))
    split = jax.NamedSharding(mesh, jax.P("fsdp", None))

    def gradient(x, dy):
        product = jnp.einsum("td,tm->dm", x, dy, preferred_element_type=jnp.float32)
        return jax.lax.with_sharding_constraint(product, split)

    shapes = [(TOKENS * fsdp, rows), (TOKENS * fsdp, columns)]
    operands = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split) for shape in shapes]
    program = jax.jit(gradient).lower(*operands).compile()
    found = list(hlo.collectives(hlo.Program(program.as_text())))
    kinds = ", ".join(sorted({each.kind for each in found}))
    held = program.memory_analysis().temp_size_in_bytes
    return kinds, in_bytes(sum(each.sent for each in found)), in_bytes(held)


if __name__ == "__main__":
    main()
