"""The devices that a run is planned for, which need not be here."""

import dataclasses
import math
import re
from typing import NamedTuple

import jax

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly, assemble
from jaxtrain.parallel import chips
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan import gpu_specs
from jaxtrain.plan import slices as slices_lib
from jaxtrain.plan.memory import host_memory
from loaders.io.checks import UserError

PCIE = 64e9  # [bytes/s] that a card without NVLink exchanges at most
MOST_ON_PCIE = 16  # cards of a host


class TpuType(NamedTuple):
    """The name of Google Cloud's accelerator types, as v4-32, before the number."""

    chip: str  # as in `chips`
    per_chip: int  # what the number counts: cores, or chips
    dimensions: int  # of a slice's topology


TPU_TYPES = {
    "v4": TpuType("v4", 2, 3),
    "v5p": TpuType("v5p", 2, 3),
    "v5litepod": TpuType("v5e", 1, 2),
    "v5e": TpuType("v5e", 1, 2),
    "v6e": TpuType("v6e", 1, 2),
}


class PlanError(UserError, ValueError):
    """An unknown target, or a run that does not fit. The message has the remedy."""


@dataclasses.dataclass(frozen=True)
class Target:
    name: str  # as the user wrote it
    chip: chips.Chip | None  # None = not in the table, as CPUs
    count: int  # devices
    here: bool  # the devices are this machine's
    # for the compiler, of a TPU slice, or GPUs (partitions x nodes x GPUs of a node)
    topology: str = ""
    slices: int = 1  # of TPUs; of GPUs those that NVLink joins

    @property
    def kind(self) -> str:
        if not self.chip:
            return ""
        return "tpu" if self.tiled else "gpu"

    @property
    def platform(self) -> str:
        """The platform of its devices: cpu, gpu or tpu."""
        if self.here:
            return layout_lib.devices_like(jax.devices()[0]).platform
        return self.kind

    @property
    def known_chip(self) -> chips.Chip:
        assert self.chip is not None, self.name
        return self.chip

    @property
    def tiled(self) -> bool:
        return bool(self.chip and self.chip.is_tpu)

    @property
    def links(self) -> float:
        """The bytes/s that the device with the fewest links sends to its neighbours in the slice.

        A TPU has a link in each direction of each dimension. It has both in a dimension that is
        closed to a ring, else one at the end of a row, and none in a dimension of 1. By Google
        Cloud's pages, dimensions of 16 are closed on v5e and v6e, and all multiples of 4 on the
        others if each dimension is one.
        """
        chip = self.known_chip
        sides = self.sides
        if not sides:
            is_pair = self.count // self.slices == 2
            return chip.bridge if is_pair and chip.bridge else chip.links
        n_links = 0
        for n in sides:
            n_links += 2 if self.is_closed(n) else int(n > 1)
        return self.link * max(n_links, 1)

    @property
    def link(self) -> float:
        """The bytes/s of one link of a TPU in one direction, 0 of other devices."""
        if not self.tiled:
            return 0.0
        chip = self.known_chip
        n_dimensions = len(slices_lib.existing(chip.name)[0])
        return chip.links / (2 * n_dimensions)

    def is_closed(self, n: int) -> bool:
        """Tell whether a side of ``n`` chips is a ring of links."""
        return self.is_torus or n == 16

    @property
    def sides(self) -> list[int]:
        """The chips along each side of a TPU slice, [] for other devices."""
        if not (self.tiled and self.topology):
            return []
        return [int(n) for n in self.topology.partition(":")[2].split("x")]

    @property
    def is_torus(self) -> bool:
        """Whether all three dimensions of a TPU slice are closed to rings."""
        return len(self.sides) == 3 and all(n % 4 == 0 for n in self.sides)

    @property
    def memory(self) -> float:
        """The bytes that a program may use on one device."""
        if self.here:
            stats = jax.local_devices()[0].memory_stats() or {}
            if "bytes_limit" in stats:
                return float(stats["bytes_limit"])
        if self.chip:
            spec = gpu_specs.SPECS.get(self.chip.name)
            return chips.GPU_SHARE * spec.memory if spec else self.chip.memory
        return host_memory() / jax.local_device_count()


def parse_target(text: str) -> Target:
    """Parse a target as in --plan=. Raises PlanError, with the known ones."""
    if not text:
        return _this_machine()
    platform, _, devices = text.lower().partition(":")
    target = None
    if platform == "gpu":
        target = _parse_gpus(text, devices)
    elif platform == "tpu":
        target = _parse_tpus(text, devices)
    if target is None and re.search(r"\d\.\.\d+$", text):
        raise PlanError(f"--plan={text} is a range of sizes: jaxtrain plan CONFIG {text} --scale")
    if target is None:
        raise unknown(text)
    return target


def unknown(text: str) -> PlanError:
    """Make the error for a target of unknown chips, which lists the known ones."""
    tpus = ", ".join(_names("TPU"))
    gpus = ", ".join(_names("NVIDIA"))
    return PlanError(
        f"--plan={text} is unknown; expected for example --plan=tpu:v4:2x2x4 ({tpus})"
        f" or --plan=gpu:h100x8 ({gpus}), followed by *2 for two slices or nodes"
    )


def _this_machine() -> Target:
    kind = jax.devices()[0].device_kind
    count = jax.device_count()
    return Target(f"{count} × {kind}", chips.find(kind), count, here=True)


def _names(vendor: str) -> list[str]:
    return [chip.name for chip in chips.CHIPS if chip.kind.startswith(vendor)]


def _parse_gpus(text: str, devices: str) -> Target | None:
    """Parse CARDxCOUNT or CARDxCOUNT*NODES. A node is what NVLink joins: 8 GPUs, or 72 (NVL72)."""
    match = re.fullmatch(r"(\w+?)x(\d+)(?:\*(\d+))?", devices)
    if not match or match[1] not in _names("NVIDIA"):
        return None
    chip = chips.by_name(match[1])
    per_node = int(match[2])
    nodes = int(match[3] or 1)
    if chip is None or not per_node * nodes:
        return None
    most = chip.domain if chip.links > PCIE else MOST_ON_PCIE
    if match[3] and per_node > most:
        count = per_node * nodes
        raise PlanError(
            f"--plan={text}: a node has at most {most} {chip.name}, not {per_node}; write"
            f" gpu:{chip.name}x{chip.domain}*{-(-count // chip.domain)}, or gpu:{chip.name}x{count}"
        )
    if match[3] is None and per_node > chip.domain:
        nodes = next(n for n in range(2, per_node + 1) if _divides(n, per_node, chip.domain))
        per_node //= nodes
    topology = f"1x{nodes}x{per_node}"
    return Target(text, chip, per_node * nodes, False, topology, nodes)


def _divides(nodes: int, count: int, most: int) -> bool:
    """Tell whether so many nodes share GPUs evenly, with no more than ``most`` on each."""
    return count % nodes == 0 and count // nodes <= most


def _parse_tpus(text: str, devices: str) -> Target | None:
    """Parse VERSION:AxB, VERSION:AxBxC or Google Cloud's TYPE-NUMBER, each also with *SLICES."""
    devices = _topology_of_type(devices)
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?:\*(\d+))?", devices)
    if not match:
        _refuse_number(text, devices)
    if not match or match[1] not in _names("TPU"):
        return None
    slices = int(match[3] or 1)
    n_chips = slices * math.prod(int(n) for n in match[2].split("x"))
    chip = chips.by_name(match[1])
    if not (n_chips and chip):
        return None
    _require_slice(text, chip.name, tuple(int(n) for n in match[2].split("x")))
    topology = f"{match[1]}:{match[2]}"
    return Target(text, chip, n_chips * chip.devices, False, topology, slices)


def _refuse_number(text: str, devices: str) -> None:
    """Raise PlanError for a number of chips without sides, and for a type that does not exist."""
    match = re.fullmatch(r"(\w+)([:-])(\d+)(?:\*\d+)?", devices)
    if not match or not int(match[3]):
        return
    name, n_chips = match[1], float(match[3])
    if match[2] == "-" and name in TPU_TYPES:
        of_type = TPU_TYPES[name]
        name, n_chips = of_type.chip, n_chips / of_type.per_chip
    elif match[2] == "-" or name not in _names("TPU"):
        return
    if sides := slices_lib.of_count(name, n_chips):
        example = slices_lib.name(name, sides)
        raise PlanError(f"--plan={text}: a slice is named by its sides, as {example}")
    raise no_slice(f"--plan={text}", name, f"{n_chips:g}", n_chips)


def _require_slice(text: str, chip: str, sides: tuple[int, ...]) -> None:
    """Raise PlanError for a slice that does not exist, with the nearest that do."""
    if sides in slices_lib.existing(chip):
        return
    raise no_slice(f"--plan={text}", chip, " × ".join(map(str, sides)), math.prod(sides))


def no_slice(option: str, chip: str, size: str, n_chips: float) -> PlanError:
    """Make the error for a slice of ``size``, in words, that does not exist."""
    nearest = [
        f"{slices_lib.name(chip, each)} ({_chips(math.prod(each))})"
        for each in slices_lib.nearest(chip, n_chips)
    ]
    return PlanError(
        f"{option}: there is no slice of {size} {chip} chips; the nearest: {' and '.join(nearest)}"
    )


def _chips(count: int) -> str:
    return "1 chip" if count == 1 else f"{count} chips"


def _topology_of_type(devices: str) -> str:
    """Return the slice of an accelerator type, as v4:2x2x4 of v4-32. Any other text is itself.

    It is the one that Google Cloud makes for the type: sides are powers of two, as even as possible
    and the shortest first, but for slices of half a cube or less.
    """
    match = re.fullmatch(r"(\w+)-(\d+)(\*\d+)?", devices)
    if not match or match[1] not in TPU_TYPES:
        return devices
    of_type = TPU_TYPES[match[1]]
    n_chips, rest = divmod(int(match[2]), of_type.per_chip)
    doublings = n_chips.bit_length() - 1
    if rest or not n_chips or n_chips != 1 << doublings:
        return devices
    n = of_type.dimensions
    sides = [1 << (doublings + i) // n for i in range(n)]
    if tuple(sides) not in slices_lib.existing(of_type.chip):
        sides = list(slices_lib.of_count(of_type.chip, n_chips) or sides)
    topology = "x".join(map(str, sides))
    return f"{of_type.chip}:{topology}{match[3] or ''}"


def abstractly(config: config_lib.Config, target: Target) -> Assembly:
    """Assemble a run on an abstract mesh of the target's devices. Raises as `assemble` does."""
    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    mesh = layout_lib.abstract_mesh(*sizes, count=target.count, what=target.name)
    if target.here:
        devices = layout_lib.devices_like(jax.devices()[0])
    else:
        devices = layout_lib.devices_of(target.known_chip.kind)
        made = mesh.shape["data"], mesh.shape["fsdp"], mesh.shape["model"]
        layout_lib.require_slices(made, target.slices, devices.platform)
    return assemble(config, mesh, devices=devices)
