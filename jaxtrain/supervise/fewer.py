"""A run on fewer of its processes: their mesh, with the same global batch.

The model axis stays as it is. The shards of parameters (fsdp) become fewer if they have to, and
the rest are replicas. A device gets as many rows at once as before, or fewer: the steps then
accumulate more microbatches.
"""

import math
from typing import NamedTuple

from jaxtrain.config import Config


class Run(NamedTuple):
    """A run and its devices."""

    config: Config
    processes: int  # if none is missing
    devices: int  # of each process

    def split(self, processes: int) -> "Split | None":
        """Return the split of a global batch over so many processes. None: there is none."""
        mesh, train = self.config.mesh, self.config.train
        whole = _sizes((mesh.data, mesh.fsdp, mesh.model), self.processes * self.devices)
        if not whole:
            return None
        data, fsdp, model = whole
        if processes == self.processes:
            return Split(data, fsdp, model, train.accumulate)
        shards, rest = divmod(processes * self.devices, model)
        if rest or not shards or train.batch % shards:
            return None
        rows = train.batch // shards  # of a device
        rows_at_once = max(train.batch // (data * fsdp * max(train.accumulate, 1)), 1)
        n_microbatches = next(
            n for n in range(1, rows + 1) if not rows % n and rows <= n * rows_at_once
        )
        kept = math.gcd(fsdp, shards)
        return Split(shards // kept, kept, model, n_microbatches)

    def objection(self, processes: int) -> str:
        """Return why so many processes cannot go on, with the numbers that can, or ""."""
        if self.split(processes):
            return ""
        numbers = [n for n in range(1, self.processes + 1) if self.split(n)]
        batch = self.config.train.batch
        return (
            f"train.batch={batch} and the mesh cannot be split over {processes} of"
            f" {self.processes} processes with {self.devices} devices each;"
            f" {', '.join(map(str, numbers))} can"
        )


class Split(NamedTuple):
    """A mesh, and the microbatches of a step."""

    data: int
    fsdp: int
    model: int
    accumulate: int

    def __str__(self) -> str:
        return f"mesh {self.data} × {self.fsdp} × {self.model}, accumulate={self.accumulate}"

    def overrides(self, config: Config) -> list[str]:
        """Return the arguments that change ``config`` to it, without fields on auto."""
        fields = {}
        if "mesh" not in config.train.auto:
            fields = {"mesh.data": self.data, "mesh.fsdp": self.fsdp, "mesh.model": self.model}
        if "train.accumulate" not in config.train.auto:
            fields["train.accumulate"] = self.accumulate
        return [f"--config.{name}={value}" for name, value in fields.items()]


def _sizes(sizes: tuple[int, int, int], count: int) -> tuple[int, int, int] | None:
    """Return (data, fsdp, model) of ``count`` devices; one may be -1. None: they do not fit."""
    fixed = math.prod(size for size in sizes if size != -1)
    data, fsdp, model = (count // fixed if size == -1 else size for size in sizes)
    return (data, fsdp, model) if data * fsdp * model == count else None
