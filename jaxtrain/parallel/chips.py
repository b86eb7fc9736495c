"""The speed and memory of chips by the vendors' datasheets, for plans, MFU and refusals.

The sources are of 2026. NVIDIA's datasheets are those of A100 80GB SXM, H100 (SXM and NVL), H100
PCIe, H200 SXM, HGX B200, HGX B300, GB200 NVL72, GB300 NVL72, L40S and RTX A6000. Google Cloud's
pages are "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x". FLOP/s are dense, half of a
datasheet's figure with sparsity. Links are of one direction. NVIDIA quotes both directions of
NVLink and PCIe together, as Google does for TPU7x. NVLink joins two cards of H100 PCIe or NVL by a
bridge, with 600 GB/s in both directions, and more of them exchange over PCIe. The memory of a TPU
is the part that the compiler grants a program, by its own messages. Of a TPU7x, each of its two
cores is a device, with half of the chip's figures.

Between nodes a GPU has an adapter of its own, of which rings of NCCL reach nine tenths. It has
400 Gb/s with H100, H200 and B200 by NVIDIA's "DGX BasePOD", and with GB200 by the "DGX GB200 User
Guide", which counts four in a tray of four. It has 800 with B300 by the "DGX B300 User Guide", and
with GB300 by the reference architecture "NVL72 AI factory", four ConnectX-8 in a tray of four.
Between slices, rates are "Data center network bandwidth" of the pages of v5e (6.4 Tb/s of 256
chips), v5p (50 Gb/s a chip), v6e (25.6 Tb/s of 256) and TPU7x (100 Gb/s a chip). No page that was
read states the others, which have ``network_is_assumed``: a plan that counts on one says so.
"""

from typing import NamedTuple

MIB, GIB = 2**20, 2**30

GPU_SHARE = 0.92  # of a GPU's memory that a process takes. The rest is for CUDA, cuDNN and NCCL


class Chip(NamedTuple):
    name: str  # as in --plan=gpu:h100x8 or --plan=tpu:v4:2x2x4
    kind: str  # the beginning of JAX's device_kind
    flops: float  # [FLOP/s] bfloat16 matrix products
    memory: float  # [bytes] that a program may use
    bandwidth: float  # [bytes/s] of the memory
    # [bytes/s] sent to other chips of the node or slice, all links together, one direction
    links: float
    # [bytes/s] of a large copy and [FLOP/s] of a large bfloat16 product, as measured; 0 = never
    measured_bandwidth: float = 0
    measured_flops: float = 0
    devices: int = 1  # of JAX on one chip
    clock: float = 0  # [1/s] of a TPU, by its FLOP/s and the size of its matrix units
    network: float = 45e9  # [bytes/s] sent by a device to other nodes or slices
    network_is_assumed: bool = False  # no page of the vendor that was read states it
    bridge: float = 0  # [bytes/s] of NVLink between the two cards of a node of two
    domain: int = 8  # GPUs of a node: those that NVLink or PCIe joins
    host: int = 8  # chips of a host. A GB200's and GB300's domain has 18 hosts (NVL72)
    vmem: int = 0  # [bytes] of a TPU core's own memory, by Pallas (`tpu_info` of JAX); 0 = unknown

    @property
    def is_tpu(self) -> bool:
        return self.kind.startswith("TPU")


CHIPS = (
    Chip(
        "a100", "NVIDIA A100", 312e12, 80e9, 2039e9, 300e9, network=22.5e9, network_is_assumed=True
    ),
    # "NVIDIA H100 80GB HBM3": SXM. Measured: docs/results/h100.md
    Chip("h100", "NVIDIA H100", 989e12, 80e9, 3350e9, 450e9, 3020e9, 732e12),
    Chip(
        "h100pcie",
        "NVIDIA H100 PCIe",
        756e12,
        80e9,
        2000e9,
        64e9,
        network_is_assumed=True,
        bridge=300e9,
    ),
    Chip(
        "h100nvl",
        "NVIDIA H100 NVL",
        835e12,
        94e9,
        3900e9,
        64e9,
        network_is_assumed=True,
        bridge=300e9,
    ),
    Chip("h200", "NVIDIA H200", 989e12, 141e9, 4800e9, 450e9),
    Chip("b200", "NVIDIA B200", 2250e12, 180e9, 7700e9, 900e9),
    Chip("b300", "NVIDIA B300", 2250e12, 270e9, 8000e9, 900e9, network=90e9),
    Chip("gb200", "NVIDIA GB200", 2500e12, 186e9, 8000e9, 900e9, domain=72, host=4),
    Chip("gb300", "NVIDIA GB300", 2500e12, 279e9, 8000e9, 900e9, network=90e9, domain=72, host=4),
    Chip("l40s", "NVIDIA L40S", 362e12, 48e9, 864e9, 32e9, network_is_assumed=True),
    Chip("a6000", "NVIDIA RTX A6000", 154.8e12, 48e9, 768e9, 32e9, network_is_assumed=True),
    Chip(
        "v4",
        "TPU v4",
        275e12,
        30.75 * GIB,
        1228e9,
        300e9,
        clock=1.05e9,
        network=6.25e9,
        network_is_assumed=True,
        vmem=16 * MIB,
    ),
    Chip(
        "v5e",
        "TPU v5 lite",
        197e12,
        15.75 * GIB,
        819e9,
        200e9,
        clock=1.5e9,
        network=3.125e9,
        vmem=128 * MIB,
    ),
    Chip(
        "v5p",
        "TPU v5",
        459e12,
        95.74 * GIB,
        2765e9,
        600e9,
        clock=1.75e9,
        network=6.25e9,
        vmem=64 * MIB,
    ),
    Chip(
        "v6e",
        "TPU v6 lite",
        918e12,
        31.25 * GIB,
        1640e9,
        448e9,
        clock=1.75e9,
        network=12.5e9,
        vmem=128 * MIB,
    ),
    Chip(
        "tpu7x",
        "TPU7x",
        1153.5e12,
        94.75 * GIB,
        3690e9,
        300e9,
        devices=2,
        clock=2.2e9,
        network=6.25e9,
        vmem=64 * MIB,
    ),
)


def find(kind: str) -> Chip | None:
    """Return the chip whose name begins a ``device_kind``, the longest such name, or None."""
    chips = [chip for chip in CHIPS if kind.startswith(chip.kind)]
    return max(chips, key=lambda chip: len(chip.kind), default=None)


def by_name(name: str) -> Chip | None:
    return next((chip for chip in CHIPS if chip.name == name.lower()), None)


def vmem(name: str, most: int) -> int:
    """Return how many of ``most`` bytes a kernel may take of a TPU core's own memory."""
    chip = by_name(name)
    return min(most, chip.vmem) if chip and chip.vmem else most
