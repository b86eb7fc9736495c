"""The devices that a run is planned for, which need not be here."""

import dataclasses
import math
import re

import jax

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly, assemble
from jaxtrain.parallel import chips
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan.memory import host_memory
from loaders.io.checks import UserError

GPUS_PER_NODE = 8


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
    slices: int = 1  # of TPUs; nodes of GPUs

    @property
    def kind(self) -> str:
        return "" if not self.chip else "tpu" if self.tiled else "gpu"

    @property
    def known(self) -> chips.Chip:
        assert self.chip is not None, self.name
        return self.chip

    @property
    def tiled(self) -> bool:
        return bool(self.chip and self.chip.kind.startswith("TPU"))

    @property
    def memory(self) -> float:
        """The bytes that a program may use on one device."""
        if (
            self.here
            and (stats := jax.local_devices()[0].memory_stats())
            and "bytes_limit" in stats
        ):
            return float(stats["bytes_limit"])
        return self.chip.memory if self.chip else host_memory() / jax.local_device_count()


def parse_target(text: str) -> Target:
    """Parse a target as in --plan=. Raises PlanError, with the known ones."""
    if not text:
        device = jax.devices()[0]
        return Target(
            f"{jax.device_count()} × {device.device_kind}",
            chips.find(device.device_kind),
            jax.device_count(),
            True,
        )
    platform, _, rest = text.lower().partition(":")
    known = {
        p: [c.name for c in chips.CHIPS if c.kind.startswith(k)]
        for p, k in (("tpu", "TPU"), ("gpu", "NVIDIA"))
    }
    if (
        platform == "gpu"
        and (match := re.fullmatch(r"(\w+?)x(\d+)(?:\*(\d+))?", rest))
        and match[1] in known["gpu"]
    ):
        each, nodes = int(match[2]), int(match[3] or 1)
        if match[3] is None and each > GPUS_PER_NODE and each % GPUS_PER_NODE == 0:
            each, nodes = GPUS_PER_NODE, each // GPUS_PER_NODE
        if each * nodes:
            return Target(
                text, chips.by_name(match[1]), each * nodes, False, f"1x{nodes}x{each}", nodes
            )
    if (
        platform == "tpu"
        and (match := re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?:\*(\d+))?", rest))
        and match[1] in known["tpu"]
    ):
        count, slices = math.prod(int(n) for n in match[2].split("x")), int(match[3] or 1)
        if count * slices:
            return Target(
                text,
                chips.by_name(match[1]),
                count * slices,
                False,
                f"{match[1]}:{match[2]}",
                slices,
            )
    raise PlanError(
        f"--plan={text} is unknown; expected for example --plan=tpu:v4:2x2x4"
        f" ({', '.join(known['tpu'])}) or --plan=gpu:h100x8 ({', '.join(known['gpu'])}), followed"
        " by *2 for two slices or nodes"
    )


def abstractly(config: config_lib.Config, target: Target) -> Assembly:
    """Assemble a run on an abstract mesh of the target's devices. Raises as `assemble` does."""
    m = config.mesh
    mesh = layout_lib.abstract_mesh(m.data, m.fsdp, m.model, count=target.count, what=target.name)
    if target.here:
        return assemble(config, mesh, devices=layout_lib.devices_like(jax.devices()[0]))
    return assemble(config, mesh, devices=layout_lib.devices_of(target.known.kind))
