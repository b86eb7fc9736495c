"""The devices that a run is planned for, which need not be here."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np

from jaxtrain.compile import xla_options
from jaxtrain.parallel import chips
from jaxtrain.plan.errors import PlanError
from jaxtrain.plan.graph import Compiler
from jaxtrain.plan.memory import host_memory, padded

GPUS_PER_NODE = 8


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to plan for."""

    name: str  # as the user wrote it
    chip: chips.Chip | None  # None: not in the table, as CPUs are not
    count: int  # devices
    here: bool  # they are this machine's
    topology: str = ""  # for the compiler: of a TPU slice, or of GPUs (partitions x nodes x GPUs of a node)
    slices: int = 1  # of TPUs; nodes of GPUs

    @property
    def kind(self) -> str:
        """The compiler's environment that it needs: "tpu", "gpu", or "" for what is no chip."""
        return "" if not self.chip else "tpu" if self.tiled else "gpu"

    @property
    def known(self) -> chips.Chip:
        """The chip of a target that is not this machine, which is in the table."""
        assert self.chip is not None, self.name
        return self.chip

    @property
    def tiled(self) -> bool:
        return bool(self.chip and self.chip.kind.startswith("TPU"))

    @property
    def memory(self) -> float:
        """Bytes that a program may use on one device."""
        if self.here and (stats := jax.local_devices()[0].memory_stats()) and "bytes_limit" in stats:
            return stats["bytes_limit"]
        return self.chip.memory if self.chip else host_memory() / jax.local_device_count()

    def compiler(self, own: Mapping[str, Any] | None = None) -> Compiler:
        """How XLA compiles for it, with a config's options ``own``."""
        known = self.chip is not None

        def size(shape: Sequence[int], dtype: np.dtype, in_order: bool) -> int:
            return padded(shape, dtype.itemsize, in_order=in_order) if self.tiled else math.prod(shape) * dtype.itemsize

        newer = self.kind == "gpu" or self.chip is not None and self.chip.name in ("v5e", "v6e")
        jaxlib_is = jaxlib.version.__version_info__
        return Compiler(
            size,
            self.tiled,
            recomputes=known,
            recomputes_more=newer,
            halves=known,
            widens_products=not known and xla_options.ynnpack_multiplies(own or {}),
            widens_stacks=not known and jaxlib_is < (0, 11, 2),  # 0.10.2 to 0.11.1 do; 0.11.2 and 0.12.0.1 do not
            merges=not known,
            checkpoints=known or jaxlib_is >= (0, 11, 1),  # on CPUs 0.10.2 and 0.11.0 merge them with the first
            breadth_first=not known,
            copies=not known,
            apart=self.kind == "gpu",
            rings=self.chip is not None and self.chip.name == "v5e",
            rounds_rows=self.tiled,
        )


def refuse_unknown(text: str) -> None:
    """Raises PlanError for a target that is unknown. Asks no device, unlike `parse_target` of this machine's."""
    if text:
        parse_target(text)


def parse_target(text: str) -> Target:
    """Raises PlanError for a target that is unknown, with those that are."""
    if not text:
        device = jax.devices()[0]
        return Target(f"{jax.device_count()} × {device.device_kind}", chips.find(device.device_kind), jax.device_count(), True)
    platform, _, rest = text.lower().partition(":")
    known = {p: [c.name for c in chips.CHIPS if c.kind.startswith(k)] for p, k in (("tpu", "TPU"), ("gpu", "NVIDIA"))}
    if platform == "gpu" and (match := re.fullmatch(r"(\w+?)x(\d+)(?:\*(\d+))?", rest)) and match[1] in known["gpu"]:
        each, nodes = int(match[2]), int(match[3] or 1)
        if match[3] is None and each > GPUS_PER_NODE and each % GPUS_PER_NODE == 0:
            each, nodes = GPUS_PER_NODE, each // GPUS_PER_NODE
        if each * nodes:
            return Target(text, chips.by_name(match[1]), each * nodes, False, f"1x{nodes}x{each}", nodes)
    if platform == "tpu" and (match := re.fullmatch(r"(\w+):(\d+(?:x\d+)+)(?:\*(\d+))?", rest)) and match[1] in known["tpu"]:
        count, slices = math.prod(int(n) for n in match[2].split("x")), int(match[3] or 1)
        if count * slices:
            return Target(text, chips.by_name(match[1]), count * slices, False, f"{match[1]}:{match[2]}", slices)
    raise PlanError(
        f"--plan={text} is unknown; expected for example --plan=tpu:v4:2x2x4 ({', '.join(known['tpu'])}) or --plan=gpu:h100x8 "
        f"({', '.join(known['gpu'])}), followed by *2 for two slices or nodes"
    )
