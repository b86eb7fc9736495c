"""Compiles a config's real step for eight H100s, none of which need be here: on_h100s.py CONFIG [--config.x=y …], as JSON.

For a process whose jax has the CUDA plugin (`test_residuals.py` starts it): XLA's compiler for GPUs needs a description of the
card, and ptxas, and no driver. Kernels are not tuned there, so that Triton's products are off: untuned, they find no tiles for
some shapes.
"""

import json
import sys

import jax._src.cudnn.fused_attention_stablehlo as cudnn
from jax.experimental import topologies

from jaxtrain import assembly, compiler, hlo, layout
from jaxtrain import config as config_lib

# XLA's description of an H100 SXM (xla/backends/gpu/target_config/specs/h100_sxm.txtpb), abridged.
H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES } registers_per_core_limit: 65536
registers_per_block_limit: 65536 } platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 8 } device_description_str: "NVIDIA H100 80GB HBM3\""""


def main() -> None:
    cudnn.check_cudnn_version = lambda: 91000  # it is asked of a library that compiling does not need
    arguments = config_lib.parse_args(["--config=" + sys.argv[1], *sys.argv[2:]])
    config = config_lib.load(arguments.source, arguments.overrides)
    devices = topologies.get_topology_desc("", "cuda", target_config=H100, topology="1x1x8").devices
    mesh = layout.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.model, devices=list(devices))
    run = assembly.assemble(config, mesh)
    traced = run.trace(run.task.stage(config.train.steps - 1))
    options = compiler.options(config.compiler, "NVIDIA H100 80GB HBM3", count=8, device=None)
    program = traced.lower().compile({**options, "xla_gpu_enable_triton_gemm": False})
    text = program.as_text()
    found = {
        "peak": program.memory_analysis().peak_memory_in_bytes,
        "sent": sum(c.sent for c in hlo.collectives(text)),
        "text": text,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
