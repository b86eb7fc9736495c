"""The properties of cards that XLA's compiler for GPUs needs to compile without a card.

They are those of openxla/xla, xla/backends/gpu/target_config/specs (a100_sxm_80, h100_sxm,
h100_pcie, h200, b200, b300, gb200, gb300 and a6000). It has no L40S and no H100 NVL. Theirs follow
from NVIDIA's datasheets and the CUDA programming guide's table of compute capabilities (8.9 is as
8.6, 9.0 as H100 SXM).
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
        lines = [
            "gpu_device_info {",
            "  threads_per_block_limit: 1024 threads_per_warp: 32"
            f" threads_per_core_limit: {self.threads}",
            f"  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}"
            f" shared_memory_per_block_optin: {self.shared - 1024}",
            f"  core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock}",
            "  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535",
            f"  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2}"
            f" device_memory_size: {self.memory}",
            f"  cuda_compute_capability {{ major: {major} minor: {minor}"
            f" feature_extension: {features} }}",
            "  registers_per_core_limit: 65536 registers_per_block_limit: 65536",
            "}",
            'platform_name: "CUDA" dnn_version_info { major: 9 minor: 11 }'
            " runtime_version { major: 12 minor: 8 }",
            f'device_description_str: "{self.description}"',
        ]
        return "\n".join(lines) + "\n"


SPECS = {
    "a100": Spec(
        description="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        cores=108,
        lanes=64,
        clock=1.41,
        bandwidth=2_039_040_000_000,
        memory=85_100_068_864,
        l2=41_943_040,
        shared=167_936,
        threads=2048,
    ),
    "h100": Spec(
        description="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        cores=132,
        lanes=128,
        clock=1.98,
        bandwidth=3_352_320_000_000,
        memory=84_942_979_072,
        l2=52_428_800,
        shared=233_472,
        threads=2048,
    ),
    "h100pcie": Spec(
        description="NVIDIA H100 PCIe",
        capability=(9, 0),
        cores=114,
        lanes=128,
        clock=1.755,
        bandwidth=2_039_040_000_000,
        memory=84_942_979_072,
        l2=52_428_800,
        shared=233_472,
        threads=2048,
    ),
    "h100nvl": Spec(
        description="NVIDIA H100 NVL",
        capability=(9, 0),
        cores=132,
        lanes=128,
        clock=1.785,
        bandwidth=3_938_000_000_000,
        memory=100_485_038_080,
        l2=62_914_560,
        shared=233_472,
        threads=2048,
    ),
    "h200": Spec(
        description="NVIDIA H200 141GB HBM3e",
        capability=(9, 0),
        cores=132,
        lanes=128,
        clock=1.98,
        bandwidth=4_800_000_000_000,
        memory=151_397_597_184,
        l2=52_428_800,
        shared=233_472,
        threads=2048,
    ),
    "b200": Spec(
        description="NVIDIA B200",
        capability=(10, 0),
        cores=148,
        lanes=128,
        clock=1.965,
        bandwidth=7_672_320_000_000,
        memory=191_514_411_008,
        l2=132_644_864,
        shared=233_472,
        threads=2048,
    ),
    "b300": Spec(
        description="NVIDIA B300",
        capability=(10, 3),
        cores=158,
        lanes=128,
        clock=1.965,
        bandwidth=7_936_000_000_000,
        memory=297_021_865_984,
        l2=135_528_448,
        shared=233_472,
        threads=2048,
    ),
    "gb200": Spec(
        description="NVIDIA GB200",
        capability=(10, 0),
        cores=152,
        lanes=128,
        clock=2.062,
        bandwidth=7_928_064_000_000,
        memory=197_897_748_480,
        l2=135_528_448,
        shared=233_472,
        threads=2048,
    ),
    "gb300": Spec(
        description="NVIDIA GB300",
        capability=(10, 3),
        cores=152,
        lanes=128,
        clock=2.07,
        bandwidth=7_928_064_000_000,
        memory=297_021_079_552,
        l2=135_528_448,
        shared=233_472,
        threads=2048,
    ),
    "l40s": Spec(
        description="NVIDIA L40S",
        capability=(8, 9),
        cores=142,
        lanes=128,
        clock=2.52,
        bandwidth=864_000_000_000,
        memory=48_305_799_168,
        l2=100_663_296,
        shared=102_400,
        threads=1536,
    ),
    "a6000": Spec(
        description="NVIDIA RTX A6000",
        capability=(8, 6),
        cores=84,
        lanes=128,
        clock=1.8,
        bandwidth=768_096_000_000,
        memory=51_041_271_808,
        l2=6_291_456,
        shared=102_400,
        threads=1536,
    ),
}
