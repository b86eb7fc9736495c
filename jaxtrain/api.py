"""jaxtrain in a script or a notebook: `train` a config, `load` a run and call its model.

An error is an exception with the line that the command would print. Nothing ends the process.
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.arrays import run_workload, stored_params
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.stored import StoredError
from jaxtrain.config import Config
from jaxtrain.parallel import cluster
from jaxtrain.run import loop
from jaxtrain.step.state import TrainState
from jaxtrain.telemetry import jsonl
from jaxtrain.types import PyTree, Task, Variables


class Trained(NamedTuple):
    """The result of `train`."""

    # its parameters are state.variables.params; None if the run already ended, with weights only
    state: TrainState | None
    step: int
    evaluation: dict[str, float]  # the last one of all starts
    # of all starts of the run, as metrics.jsonl has them: {"step": 1, "split": "train", …}
    records: list[dict[str, Any]]
    workdir: str


def train(
    config: Config | Mapping[str, Any] | str, overrides: Mapping[str, Any] | None = None
) -> Trained:
    """Train a config to its last step, resuming from its workdir, as the command does.

    Ctrl-C interrupts it.

    Args:
      config: a `Config`, a ConfigDict, a dictionary of sections, or a value of --config:
      "xcm:/path", "my_config.py".
      overrides: dotted fields and their values, {"train.steps": 20}.

    Raises:
      ConfigError: every error of the config, and each other `loaders.io.checks.UserError`.
      Preempted: a signal asked the run to end. The run is saved.
    """
    cluster.start_jax()
    overrides = overrides or {}
    resolved = _resolve(config, overrides)
    command = {
        "source": config if isinstance(config, str) else "a Python program",
        "overrides": {path: str(value) for path, value in overrides.items()},
    }
    result = loop.run(resolved, command)
    path = pathlib.Path(resolved.workdir) / "metrics.jsonl"
    records = [record for record, _ in jsonl.read(path, jsonl.record_problem)[0]]
    # as it was written: a start that finds the run at its end evaluates nothing
    evaluation = _last_evaluation(records) or result.evaluation
    return Trained(result.state, result.step, evaluation, records, resolved.workdir)


def _last_evaluation(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the metrics of the last evaluation that a run recorded, or nothing."""
    for record in reversed(records):
        if record["split"] == "test":
            metrics = {name: x for name, x in record.items() if name not in ("step", "split")}
            return {name: math.nan if x is None else x for name, x in metrics.items()}
    return {}


def _resolve(config: Config | Mapping[str, Any] | str, overrides: Mapping[str, Any]) -> Config:
    if isinstance(config, str):
        return config_lib.load(config, [(path, str(value)) for path, value in overrides.items()])
    if isinstance(config, Config):
        if not overrides:
            return config
        tree = json.loads(config_lib.to_json(config))
    else:
        # a ConfigDict has the method
        tree = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    for path, value in overrides.items():
        _set(tree, path.split("."), value)
    return config_lib.from_dict(tree)


def _set(tree: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    """Set a value in a tree of dictionaries, made as needed."""
    *parents, last = keys
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


@dataclasses.dataclass(frozen=True)
class Model:
    """A trained model on this process's first device.

    Attributes:
      config: the run's, as it was saved.
      task: the workload's functions and its table of parameters.
      variables: its parameters, and the model state that belongs to it.
    """

    config: Mapping[str, Any]
    task: Task
    variables: Variables
    name: str
    _predict: Any = dataclasses.field(repr=False)

    def __call__(self, **arrays: Any) -> Any:
        """Compute the outputs for named arrays, rows first, as the workload's `predict` says."""
        return self._predict(self.variables, {name: jnp.asarray(x) for name, x in arrays.items()})

    @property
    def params(self) -> PyTree:
        """The parameters."""
        return self.variables.params


def load(run: str, *, step: int | None = None, ema: bool = False, workload: str = "") -> Model:
    """Read a run's workdir, one of its steps or an export.

    Args:
      step: of a run; None = its best by checkpoint.best, if it keeps one, else its newest.
      ema: whether to take the run's average of the parameters.
      workload: the dotted name of your own workload, which is imported. Shipped ones are known.

    Raises StoredError: there is no such run or step, it is damaged, or its workload is not known or
    has no `Task.predict`.
    """
    source = source_lib.find_best(run, step)
    run_config = source.config()
    code = run_workload.of_run(run_config, workload)
    if code is None:
        raise StoredError(run_workload.unknown(run_config).replace("--workload", "workload="))
    model = run_workload.section_of(run_config, "model", code.config_class())
    settings = run_workload.section_of(run_config, "train", config_lib.Train)
    layout = stored_params.one_device()
    config = Config(model=model, train=settings)
    task = code.make_task(config, layout.shard, settings.batch)
    if task.predict is None:
        raise StoredError(
            f"{source.path}: {run_config.get('workload')} has no Task.predict, which computes"
            " outputs of arrays"
        )
    params = stored_params.read(source, task.specs.params, layout, ema=ema)
    model_state: PyTree = ()
    pattern = run_workload.export_of(run_config, workload).model_state
    table = _matching(task.specs.model_state, pattern) if pattern else {}
    if table:
        model_state = stored_params.read(source, table, layout, model_state=True)
    return Model(
        run_config,
        task,
        Variables(params, model_state=model_state),
        source.name(ema=ema),
        jax.jit(task.predict),
    )


def _matching(table: PyTree, pattern: str) -> dict[str, Any]:
    """Return the part of a table whose paths a regular expression matches."""
    part: dict[str, Any] = {}
    leaves = jax.tree.leaves(table, is_leaf=specs.is_spec)
    for path, spec in zip(specs.paths(table), leaves, strict=True):
        if re.search(pattern, path):
            _set(part, path.split("/"), spec)
    return part
