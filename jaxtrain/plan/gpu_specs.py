"""The properties of cards that XLA's compiler for GPUs needs to compile without a card.

They are those of openxla/xla, xla/backends/gpu/target_config/specs (a100_sxm_80, h100_sxm,
h100_pcie, h200, b200 and a6000). It has no L40S and no H100 NVL. Theirs follow from NVIDIA's
datasheets and the CUDA programming guide's table of compute capabilities (8.9 is as 8.6, 9.0 as
H100 SXM).
"""

from typing import NamedTuple


class Spec(NamedTuple):
    description: str
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of one
    clock: float  # [GHz]
    bandwidth: int  # [bytes/s]
    memory: int  # [bytes] of the card
    l2: int  # [bytes]
    shared: int  # [bytes] of a multiprocessor
    threads: int  # of a multiprocessor

    def text(self) -> str:
        """Write a GpuTargetConfigProto. A block may take all shared memory but 1 KiB."""
        major, minor = self.capability
        features = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {self.threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared} shared_memory_per_block_optin: {self.shared - 1024}
  core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2} device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {features} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{self.description}"
"""


SPECS = {
    "a100": Spec(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        64,
        1.41,
        2_039_040_000_000,
        85_100_068_864,
        41_943_040,
        167_936,
        2048,
    ),
    "h100": Spec(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        132,
        128,
        1.98,
        3_352_320_000_000,
        84_942_979_072,
        52_428_800,
        233_472,
        2048,
    ),
    "h100pcie": Spec(
        "NVIDIA H100 PCIe",
        (9, 0),
        114,
        128,
        1.755,
        2_039_040_000_000,
        84_942_979_072,
        52_428_800,
        233_472,
        2048,
    ),
    "h100nvl": Spec(
        "NVIDIA H100 NVL",
        (9, 0),
        132,
        128,
        1.785,
        3_938_000_000_000,
        100_485_038_080,
        62_914_560,
        233_472,
        2048,
    ),
    "h200": Spec(
        "NVIDIA H200 141GB HBM3e",
        (9, 0),
        132,
        128,
        1.98,
        4_800_000_000_000,
        151_397_597_184,
        52_428_800,
        233_472,
        2048,
    ),
    "b200": Spec(
        "NVIDIA B200",
        (10, 0),
        148,
        128,
        1.965,
        7_672_320_000_000,
        191_514_411_008,
        132_644_864,
        233_472,
        2048,
    ),
    "l40s": Spec(
        "NVIDIA L40S",
        (8, 9),
        142,
        128,
        2.52,
        864_000_000_000,
        48_305_799_168,
        100_663_296,
        102_400,
        1536,
    ),
    "a6000": Spec(
        "NVIDIA RTX A6000",
        (8, 6),
        84,
        128,
        1.8,
        768_096_000_000,
        51_041_271_808,
        6_291_456,
        102_400,
        1536,
    ),
}
