"""RUN, which commands take: a workdir, a step directory of it, or an export (safetensors).

`find` is the one place that decides which of them a path is. Its errors say why a path is none.
It compares the files with their checksums, so that no command reads damaged weights.
"""

import concurrent.futures
import hashlib
import sys
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jaxtrain import workload
from jaxtrain.arrays import checksums, orbax_steps, safetensors_reader, stored
from jaxtrain.arrays.stored import Stored, StoredError
from loaders.io import files

SUMS = "SHA256SUMS"  # of an export: the digest of each of its files
# ends of their names that a model is computed with. People edit the card and config.json
COMPUTED_WITH = (".safetensors", stored.EXPORT, "tokenizer.json")


class Source(NamedTuple):
    """A step of a run, or an export of one."""

    path: epath.Path  # step directory; folder or file of an export
    is_export: bool

    @property
    def manifest(self) -> str:
        return SUMS if self.is_export else checksums.NAME

    def name(self, *, ema: bool = False) -> str:
        """Its path and the digest of its checksums: its content. Raises StoredError."""
        digest = ""
        if self.path.is_dir() and (self.path / self.manifest).exists():
            try:
                content = files.read(stored.inside(self.path, self.manifest), most=files.MAX_JSON)
            except files.FileError as error:
                raise StoredError(str(error)) from error
            digest = hashlib.sha256(content).hexdigest()[:16]
        return f"{self.path} {'ema ' if ema else ''}{digest}"

    def arrays(self) -> dict[str, Stored]:
        """Every array by its path: ``params/encoder/w_patch``, ``step``. Raises StoredError."""
        if not self.is_export:
            return orbax_steps.open_step(self.path)
        origin = self._json(stored.EXPORT)
        files_arrays = safetensors_reader.open_safetensors(self.path)
        foreign = workload.foreign_to(files_arrays)
        if foreign:
            files_arrays = foreign.arrays(files_arrays, self.path, bool(origin))
        number = _step_number(origin.get("step") or 0, self.path / stored.EXPORT)
        step = np.array(number, np.int32)  # a folder from elsewhere does not count steps
        arrays = {"step": Stored((), step.dtype, lambda index: step, ("step",), ())}
        for path, array in files_arrays.items():
            if origin and path.startswith(stored.MODEL_STATE):
                arrays[path] = array
            else:
                arrays[f"params/{path}"] = array._replace(keys=("params", *array.keys))
        return arrays

    def parameters(self, *, ema: bool = False) -> dict[str, Stored]:
        """Return parameters or their average: ``encoder/w_patch``. Raises StoredError without."""
        if ema and self.is_export:
            raise StoredError(
                f"--ema is given, and {self.path} is an export, which holds one set of parameters;"
                " omit --ema"
            )
        if not ema and not self.is_export:
            self._warn_of_average()
        group = "ema/" if ema else "params/"
        parameters = {}
        for path, array in self.arrays().items():
            if path.startswith(group):
                parameters[path.removeprefix(group)] = array
        if not parameters:
            reason = ": the run kept no average (config.train.ema was 0); omit --ema" if ema else ""
            raise StoredError(f"{self.path} holds no {group[:-1]!r}{reason}")
        return parameters

    def _warn_of_average(self) -> None:
        """Print a warning if the run has an average, which is not what is read."""
        train = self.meta().get("config", {}).get("train")
        if isinstance(train, dict) and train.get("ema"):
            print(
                f"warning: {self.path}: the run's evaluations are of the average of the"
                " parameters, which --ema reads",
                file=sys.stderr,
            )

    def meta(self) -> dict[str, Any]:
        """Return the config, versions and parameter table. Raises StoredError: damage."""
        if self.is_export:
            meta = self._meta_of_export()
        else:
            meta = orbax_steps.read_json(self.path, "meta") or {}
            stored.check_format(meta, self.path)
        if not isinstance(meta, dict):
            raise StoredError(
                f"{self.path}: its metadata have config {str(meta)[:80]!r}; expected an object"
            )
        for name in ("config", "versions"):
            if not isinstance(meta.get(name) or {}, dict):
                raise StoredError(
                    f"{self.path}: its metadata have {name} {str(meta[name])[:80]!r}; expected an"
                    " object"
                )
        return {**meta, "weights_only": True} if self.is_export else meta

    def _meta_of_export(self) -> Any:
        """Return the metadata that an export has of its run, or a folder from elsewhere."""
        origin = self._json(stored.EXPORT)
        meta = origin.get("meta", {})
        config = origin.get("config")
        if not config:
            config = self._foreign_config() if not origin else self._json("config.json")
        if isinstance(meta, dict):
            meta = {**meta, "config": config}
        if origin:
            stored.check_format(origin, self.path)
        return meta

    def _foreign_config(self) -> Any:
        """Return the config of weights of another system, if a workload knows them."""
        foreign = workload.foreign_to(safetensors_reader.open_safetensors(self.path))
        return foreign.config(self.path) if foreign else self._json("config.json")

    def step(self, arrays: dict[str, Stored]) -> int | None:
        if "step" not in arrays:
            return None
        array = arrays["step"]
        if array.shape == ():
            number = array.read(())
            if number.dtype.kind in "iu":
                return _step_number(int(number), self.path)
        raise StoredError(
            f"{self.path}: its array 'step' is {list(array.shape)}; expected one whole number"
        )

    def data(self) -> dict[str, Any]:
        """Return the run's position in its data, empty for an export. Raises StoredError."""
        if self.is_export:
            return {}
        return orbax_steps.read_json(self.path, "data") or {}

    def config(self, expected: str = "") -> dict[str, Any]:
        """Return the run's config. Raises StoredError unless it is a run of ``expected``."""
        config = self.meta().get("config") or {}
        for name in ("model", "data", "warm_start", "lora"):
            if not isinstance(config.get(name) or {}, dict):
                raise StoredError(
                    f"{self.path}: its config.{name} is {str(config[name])[:80]!r}; expected a"
                    " section"
                )
        if not isinstance(config.get("workload") or "", str):
            raise StoredError(
                f"{self.path}: its config.workload is {str(config['workload'])[:80]!r}; expected"
                " the name of a module"
            )
        if expected:
            self._check_workload(config.get("workload"), expected)
        return config

    def _check_workload(self, name: str | None, expected: str) -> None:
        if workload.is_kind(name, expected):
            return
        kind = f"a run of {name}" if name else "not a run of this program"
        hint = ""
        if name and name not in workload.shipped():
            hint = f" (if {name} extends it, add --workload {name})"
        raise StoredError(f"{self.path} is {kind}; expected a run of {expected}{hint}")

    def damage(self, *, weights_alone: bool = False) -> list[str]:
        """List the differences to its checksums. Raises checksums.NoManifest if it has none.

        ``weights_alone``: of an export, only the files that a model is computed with.
        """
        if not self.is_export:
            return checksums.verify(self.path)
        if not self.path.is_dir() or not (self.path / SUMS).exists():
            raise checksums.NoManifest(f"{self.path} has no {SUMS}")
        try:
            text = files.read_text(stored.inside(self.path, SUMS), most=files.MAX_JSON)
        except (files.FileError, StoredError) as error:
            return [str(error)]
        lines = files.lines(text)
        if weights_alone:
            lines = [line for line in lines if self._is_computed_with(line)]
        with concurrent.futures.ThreadPoolExecutor(checksums.THREADS) as pool:
            problems = pool.map(self._problem_of_file, lines)
            return [problem for problem in problems if problem]

    def _is_computed_with(self, line: str) -> bool:
        """Whether a line of `SUMS` is of a file that is there, and that a model is computed with.

        A shard of weights that is missing is an error when the weights are opened.
        """
        _, _, name = line.partition("  ")
        return name.endswith(COMPUTED_WITH) and (self.path / name).exists()

    def _problem_of_file(self, line: str) -> str:
        """Return how a file of an export differs from its line of `SUMS`, or ""."""
        digest, _, name = line.partition("  ")
        try:
            if checksums.digest_of(stored.inside(self.path, name)) != digest:
                return f"{name} differs"
        except (files.FileError, StoredError) as error:
            return f"{name[:200]!r} cannot be read: {error}"
        return ""

    def damage_of_weights(self) -> list[str]:
        """List the damage of the files that a model is computed with.

        Raises checksums.NoManifest if a step or an export of ours has no checksums. The folders of
        other programs have none.
        """
        try:
            return self.damage(weights_alone=True)
        except checksums.NoManifest:
            if not self.is_export or self._json(stored.EXPORT):
                raise
            return []

    def refuse_damage(self) -> None:
        """Raise StoredError if a file that is read differs from its checksum, or warn of none."""
        try:
            problems = self.damage_of_weights()
        except checksums.NoManifest as error:
            print(f"warning: {error}: it is read as it is, unverified", file=sys.stderr)
            return
        if problems:
            raise StoredError(
                f"{self.path} is damaged: {'; '.join(problems)}; {self._intact_instead()}"
            )

    def _intact_instead(self) -> str:
        """Return the remedy for damage: the other steps of the run, or another export."""
        if self.is_export:
            return "export it again"
        steps = orbax_steps.steps_in(self.path.parent)
        others = [str(step) for step in steps if str(step) != self.path.name]
        if not others:
            return "the run has no other step: train it again, or take a copy of this one"
        return f"choose another step of the run: {', '.join(others)}"

    def _json(self, name: str) -> dict[str, Any]:
        if not self.path.is_dir() or not (self.path / name).exists():
            return {}
        return stored.read_object(self.path, name)


def refuse_address(path: Any, field: str, flag: str) -> None:
    """Raise StoredError if a run's config names an address, which only ``flag`` may name."""
    if isinstance(path, str) and stored.is_address(path):
        raise StoredError(
            f"the run's config.{field} is the address {path[:200]!r}, which is connected to only if"
            f" you trust it and name it with {flag}"
        )


def _step_number(value: Any, source: epath.Path) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise StoredError(
            f"{source}: its step is {str(value)[:80]!r}; expected a whole number from 0 to 2^31 - 1"
        )
    return value


def find(
    run: epath.PathLike, step: int | None = None, *, export: str = "", verified: bool = True
) -> Source:
    """Find the newest step of ``run`` (or ``step``), that very step, or an export.

    Args:
      export: why an export is of no use here; empty if it is.
      verified: whether all its files are read once, and compared with their checksums.

    Raises StoredError: it is none of them, it has no such step, ``export`` refuses it, or it is
    damaged.
    """
    source = _find(run, step, export)
    if verified:
        source.refuse_damage()
    return source


def find_best(run: epath.PathLike, step: int | None = None, *, export: str = "") -> Source:
    """Find the step of ``run`` whose weights are used: ``step``, else the best, else the newest.

    The best is by the run's config.checkpoint.best, and is named on the console. Raises StoredError
    as `find`.
    """
    if step is None:
        step = orbax_steps.best_step(run)
        if step is not None:
            print(f"step {step:,}, the best of {run} by checkpoint.best", file=sys.stderr)
    return find(run, step, export=export)


def _find(run: epath.PathLike, step: int | None, export: str) -> Source:
    path = stored.place_of(run)
    if safetensors_reader.is_safetensors(path) and path.exists():
        if export:
            raise StoredError(
                f"{path} is an export, and {export}; expected a run's workdir or a step directory"
                " of it"
            )
        if step is not None:
            raise StoredError(
                f"--step is {step}, and {path} is an export, which holds one step; omit --step"
            )
        return Source(path, is_export=True)
    return Source(orbax_steps.find_step(run, step), is_export=False)
