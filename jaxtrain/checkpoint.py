"""Checkpoints: one Orbax step directory holds the whole run at that step.

    workdir/checkpoints/<step>/
      state/   step, params, carry, optimizer state, average: sharded arrays
      data/    JSON: what the loader needs to go on (position, seed, fingerprints of the data and its order)
      meta/    JSON: the resolved config, the digest of the parameter table, package versions

Frozen base weights are not here: they are reloaded from their source. A save is asynchronous, one at a time; Orbax writes
into a temporary directory and renames it, so that a step directory is whole or is not there.
"""

import importlib.metadata
import json
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import orbax.checkpoint as ocp

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.state import Plan, TrainState
from jaxtrain.types import Task

log = logging.getLogger("jaxtrain")
VERSIONED = ("jaxtrain", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class CheckpointError(RuntimeError):
    """Saved state that cannot be gone on from. Never followed by a silent fresh start."""


class Checkpointer:
    """Saves and restores the runs of one workdir."""

    def __init__(self, workdir: str, config: config_lib.Config, task: Task):
        self._meta = {
            "config": json.loads(config_lib.to_json(config)),
            "parameters": specs.digest(task.specs),
            "versions": {name: importlib.metadata.version(name) for name in VERSIONED},
        }
        self._path = pathlib.Path(workdir).absolute() / "checkpoints"
        self._every = config.checkpoint.every
        options = ocp.CheckpointManagerOptions(max_to_keep=config.checkpoint.keep, create=True, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(self._path, options=options)

    def save(self, step: int, state: TrainState, data: Mapping[str, Any], *, force: bool = False) -> None:
        """Starts to save ``state`` if ``step`` is due (or ``force``), after the save before has ended.

        Raises what the save before raised in the background.
        """
        if not (force or step % self._every == 0) or step in self._manager.all_steps():
            return
        self._manager.wait_until_finished()
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(_saved(state)),
                data=ocp.args.JsonSave(dict(data)),
                meta=ocp.args.JsonSave(self._meta),
            ),
            force=True,
        )

    def restore(self, plan: Plan, data: Mapping[str, Any]) -> tuple[TrainState, int] | None:
        """The newest state that can be read, and its step; None when there is no checkpoint at all.

        Args:
          plan: where every array shall live; the mesh that saved it need not exist any more.
          data: the loader's state now, whose fingerprints must equal the saved ones.

        Raises:
          CheckpointError: the model or the data are not the ones that were saved, or no checkpoint can be read.
        """
        steps = sorted(self._manager.all_steps(), reverse=True)
        for step in steps:
            try:
                found = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(_saved(plan.state)),
                        data=ocp.args.JsonRestore(),
                        meta=ocp.args.JsonRestore(),
                    ),
                )
            except Exception as error:  # noqa: BLE001  whatever a damaged file raises
                self._check_model(step, error)
                log.warning("checkpoint %s cannot be read and is left alone: %s", self._path / str(step), _first_line(error))
                continue
            self._check_model(step)
            self._check_data(step, found["data"], data)
            saved = found["state"]
            variables = plan.state.variables._replace(params=saved["params"], carry=saved["carry"])
            return TrainState(saved["step"], variables, saved["opt_state"], saved["ema"]), step
        if steps:
            raise CheckpointError(
                f"none of the checkpoints {steps} in {self._path} can be read; move that folder away to start afresh, "
                "or choose another config.workdir"
            )
        return None

    def close(self) -> None:
        """Waits for a save in flight. Raises what it raised."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _check_model(self, step: int, cause: Exception | None = None) -> None:
        try:
            meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        except Exception:  # noqa: BLE001  as damaged as the rest
            return
        if meta["parameters"] != self._meta["parameters"]:
            changed = _differences(meta["config"]["model"] or {}, self._meta["config"]["model"] or {})
            raise CheckpointError(
                f"checkpoint {self._path / str(step)} holds another model ({changed or 'its parameter table changed'}); "
                "choose another config.workdir, or set the model back"
            ) from cause

    def _check_data(self, step: int, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = _differences(
            {k: v for k, v in saved.items() if k != "position"}, {k: v for k, v in now.items() if k != "position"}
        )
        if changed:
            raise CheckpointError(
                f"checkpoint {self._path / str(step)} was trained on other data or in another order ({changed}), so that going "
                "on would repeat and miss recordings; set it back, or choose another config.workdir"
            )


def _saved(state: TrainState) -> dict[str, Any]:
    """What of a state goes to disk. The keys are part of the format."""
    return {
        "step": state.step,
        "params": state.variables.params,
        "carry": state.variables.carry,
        "opt_state": state.opt_state,
        "ema": state.ema,
    }


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    plain = lambda x: json.loads(json.dumps(x))  # noqa: E731  tuples are lists once saved
    changed = [k for k in sorted({*old, *new}) if plain(old.get(k)) != plain(new.get(k))]
    return ", ".join(f"{k}: {old.get(k)} saved, {new.get(k)} now" for k in changed)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
