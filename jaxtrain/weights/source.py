"""RUN, which commands take: a run's workdir, a step directory of it, or an export (a folder of safetensors).

`find` is the one place that decides which of them a path is, and says what is wrong when it is none.
"""

import hashlib
import json
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jaxtrain.checkpoint import checksums
from jaxtrain.checkpoint import read as stored
from jaxtrain.checkpoint.read import Stored, StoredError

SUMS = "SHA256SUMS"  # of an export: the digest of each of its files


class Source(NamedTuple):
    """A step of a run, or an export of one."""

    path: epath.Path  # step directory; folder or file of an export
    is_export: bool

    @property
    def manifest(self) -> str:
        """The file of its checksums."""
        return SUMS if self.is_export else checksums.NAME

    def arrays(self) -> dict[str, Stored]:
        """Every array by its path in a step: ``params/encoder/w_patch``, ``step``. Raises StoredError: damage."""
        if not self.is_export:
            return stored.open_step(self.path)
        origin, stored_arrays = self._json(stored.EXPORT), stored.open_safetensors(self.path)
        step = np.array(origin.get("step") or 0, np.int32)  # a folder from elsewhere does not count steps
        arrays = {"step": Stored((), step.dtype, lambda index: step, ("step",), ())}
        for path, one in stored_arrays.items():
            is_carry = path.startswith(stored.CARRY) and bool(origin)
            arrays[path if is_carry else f"params/{path}"] = one if is_carry else one._replace(keys=("params", *one.keys))
        return arrays

    def parameters(self, *, ema: bool = False) -> dict[str, Stored]:
        """The parameters, or their average, by their own paths: ``encoder/w_patch``.

        Raises StoredError: a run that kept no average, an export, which holds either; damage.
        """
        if ema and self.is_export:
            raise StoredError(f"--ema is given, and {self.path} is an export, which holds one set of parameters; omit --ema")
        group = "ema/" if ema else "params/"
        found = {path.removeprefix(group): one for path, one in self.arrays().items() if path.startswith(group)}
        if not found:
            why = ": the run kept no average (config.train.ema was 0); omit --ema" if ema else ""
            raise StoredError(f"{self.path} holds no {group[:-1]!r}{why}")
        return found

    def meta(self) -> dict[str, Any]:
        """What was noted of the run: its config, versions and parameter table. Raises StoredError when that is damaged."""
        if not self.is_export:
            return stored.read_json(self.path, "meta") or {}
        origin = self._json(stored.EXPORT)
        return {**origin.get("meta", {}), "config": origin.get("config") or self._json("config.json"), "weights_only": True}

    def data(self) -> dict[str, Any]:
        """Where the run was in its data; empty for an export. Raises StoredError when that is damaged."""
        return {} if self.is_export else stored.read_json(self.path, "data") or {}

    def config(self, workload: str = "") -> dict[str, Any]:
        """The run's config. Raises StoredError unless it is a run of the module ``workload``."""
        config = self.meta().get("config") or {}
        if workload and config.get("workload") != workload:
            kind = f"a run of {config['workload']}" if config.get("workload") else "not a run of this program"
            raise StoredError(f"{self.path} is {kind}; expected a run of {workload}")
        return config

    def damage(self) -> list[str]:
        """What differs from the checksums that were written with it. Raises checksums.NoManifest where there are none."""
        if not self.is_export:
            return checksums.verify(self.path)
        if not (self.path / SUMS).exists():
            raise checksums.NoManifest(f"{self.path} has no {SUMS}")
        bad = []
        for line in (self.path / SUMS).read_text().splitlines():
            digest, _, name = line.partition("  ")
            try:
                with (self.path / name).open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                        bad.append(f"{name} differs")
            except OSError as error:
                bad.append(f"{name} cannot be read ({error.strerror})")
        return bad

    def _json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            return json.loads(path.read_text()) if self.path.is_dir() and path.exists() else {}
        except ValueError as error:
            raise StoredError(f"{path} cannot be read: {error}") from error


def find(run: epath.PathLike, step: int | None = None, *, export: str = "") -> Source:
    """What ``run`` is: its newest step (or ``step``), that very step, or an export.

    Args:
      export: why an export is of no use here; empty where it is.

    Raises StoredError: it is none of them, it has no such step, or it is an export where that is of no use.
    """
    path = epath.Path(run).expanduser()
    if stored.is_safetensors(path) and path.exists():
        if export:
            raise StoredError(f"{path} is an export, and {export}; expected a run's workdir or a step directory of it")
        if step is not None:
            raise StoredError(f"--step is {step}, and {path} is an export, which holds one step; omit --step")
        return Source(path, is_export=True)
    return Source(stored.find_step(run, step), is_export=False)
