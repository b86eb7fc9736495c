"""Digests of the steps of all workloads on every kind of mesh, before any compiler has read them.

    python -m tests.proofs.programs cpu gpu:h100x8 > FILE  # in both checkouts, then diff

A change that is for one platform alone leaves the lines of the others as they are. A line has the
target, the workload, the mesh, and the digests of the step's jaxpr and of its StableHLO. Steps are
small (tests/compiled/compiled_configs.py), for eight devices. Each target is traced in a process of
its own: the one for GPUs has the compiler of `jaxtrain plan --setup gpu` on its path.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from dataclasses import replace

DEVICES = 8
MESHES = {"data": (8, 1, 1), "fsdp": (1, 8, 1), "model": (4, 1, 2), "mixed": (2, 2, 2)}


def digest(text):
    """Digest a program's text without the addresses of Python's objects."""
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "0x", text).encode()).hexdigest()[:12]


def print_lines(text, folder):
    import jax

    from jaxtrain import plan
    from jaxtrain.assembly import assemble
    from jaxtrain.parallel import layout
    from jaxtrain.plan.compile import ask_for_no_chips, for_kernels, gpu_devices, tpu_devices
    from tests.compiled.compiled_configs import WORKLOADS

    ask_for_no_chips()
    jax.config.update("jax_traceback_in_locations_limit", 0)
    target = plan.parse_target("" if text == "cpu" else text)
    devices = jax.devices()
    if text != "cpu":
        devices = gpu_devices(target) if target.kind == "gpu" else tpu_devices(target)
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 900)
    for name, workload in WORKLOADS.items():
        for mesh_name, sizes in MESHES.items():
            config = workload.config("small", "data", DEVICES, folder)
            axes = dict(zip(("data", "fsdp", "model"), sizes, strict=True))
            config = plan.resolve(replace(config, mesh=replace(config.mesh, **axes)), target)
            mesh = layout.make_mesh(*sizes, devices=devices)
            assembly = assemble(config, mesh)
            with for_kernels(mesh.devices.flat[0]):
                traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
                digests = digest(str(traced.jaxpr)), digest(traced.lower().as_text())
            print(text, name, mesh_name, *digests, flush=True)


def environment_of(text):
    """Return the variables of a process that traces for a target."""
    from jaxtrain.plan import environment

    values = {**os.environ, "JAX_PLATFORMS": "cpu"}
    if text == "cpu":
        count = f"--xla_force_host_platform_device_count={DEVICES}"
        return values | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}"}
    kind = text.partition(":")[0]
    found = environment.find(kind)
    if found is None:
        raise SystemExit(f"no compiler for {text}; jaxtrain plan --setup {kind} fetches it, once")
    return values | {"PYTHONPATH": environment.path(found)}


def main():
    if sys.argv[1:2] == ["--trace"]:
        with tempfile.TemporaryDirectory() as folder:
            print_lines(sys.argv[2], pathlib.Path(folder))
        return
    for text in sys.argv[1:]:
        command = [sys.executable, "-m", "tests.proofs.programs", "--trace", text]
        subprocess.run(command, env=environment_of(text), check=True)


if __name__ == "__main__":
    main()
