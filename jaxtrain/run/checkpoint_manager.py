"""The checkpoints of a run as its loop sees them: their content, the way back from bad steps."""

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping

from etils import epath

from jaxtrain import config as config_lib
from jaxtrain.assembly import Assembly
from jaxtrain.checkpoint import Checkpointer, CheckpointError, History, Restored, Saved
from jaxtrain.checkpoint.checkpointer import of_saved_parts, saved_parts
from jaxtrain.parallel import cluster, supervised_attempt
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.run.process_context import ProcessContext
from jaxtrain.run.schedule import Due
from jaxtrain.run.stream import Data
from jaxtrain.step.guard import SkippedSteps
from jaxtrain.step.state import TrainState
from jaxtrain.supervise import steps_in_memory
from jaxtrain.telemetry import goodput

log = logging.getLogger("jaxtrain")


class CheckpointManager:
    """A context: saves are asynchronous, and leaving it waits for the last one.

    Every process calls the same methods.
    """

    def __init__(self, assembly: Assembly, data: Data, process: ProcessContext):
        self._config = assembly.config
        self._abstract = assembly.abstract
        self._data = data
        self._process = process
        self._clock = process.clock
        attempt = supervised_attempt.from_environment()
        self._checkpointer = Checkpointer(
            assembly.config, assembly.task, goes_on=attempt.is_supervised
        )
        self._memory: steps_in_memory.Memory | None = None
        if assembly.config.checkpoint.memory_every:
            if not attempt.memory:
                raise steps_in_memory.SharedMemoryError(
                    "config.checkpoint.memory_every keeps steps for a supervisor, and this run has"
                    " none; add --supervise, or set it to 0"
                )
            parts = saved_parts(assembly.abstract.state)
            self._memory = steps_in_memory.Memory(
                attempt.memory, attempt.run, parts, attempt.attempt
            )

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._clock.switch(goodput.SAVES)
        if self._memory:
            self._memory.close()
        try:
            if kind is None:
                with self._in_own_workdir():
                    self._checkpointer.close()
            else:
                self._close_after_error()
        finally:
            self._clock.switch(goodput.ENDING)

    def _close_after_error(self) -> None:
        """Log a save that fails: the command reports the error that ends the run."""
        try:
            self._checkpointer.close()
        except CheckpointError as error:
            log.error("%s", error)

    def finished(self) -> bool:
        """Whether the run has ended with weights only, from which nothing can be resumed."""
        return self._checkpointer.is_finished()

    def likely(self) -> int:
        """Return the step that the run will probably resume from, 0 without any. Reads none."""
        step = 0
        if cluster.is_main():
            with contextlib.suppress(OSError):  # `newest` reports it later
                step = self._checkpointer.listed(self._config.resume.path)
        return cluster.agree(min(step, self._config.train.steps))

    def newest(self, path: str = "") -> Restored | None:
        """Return the newest readable checkpoint of this workdir, or of workdir ``path``, or None.

        Raises CheckpointError: none can be read, or they are of another model or other data.
        """
        return self._checkpointer.restore(self._abstract, self._data.state(0), path)

    def save(self, step: int, state: TrainState, history: History) -> Saved:
        """Start to save a state, unless its step is saved. First wait for the previous save.

        Raises WorkdirError: another run has the workdir meanwhile, or it was deleted.
        """
        self._process.confirm(saving=True)
        with self._clock.during(goodput.SAVES), self._in_own_workdir():
            data = self._data.state(step - history.offset)
            return self._checkpointer.save(step, state, data, history)

    def in_memory(self) -> Restored | None:
        """Return the newest whole step in memory, unless a sound checkpoint here is newer."""
        if not self._memory:
            return None
        found = self._memory.newest(self._note())
        self._memory.reserve()
        coordinator = cluster.find().coordinator
        if coordinator:
            self._memory.find_partner(coordinator, cluster.secret_of(os.environ, coordinator))
        if not found or self._checkpointer.has_newer(found.step):
            return None
        state = of_saved_parts(self._abstract, found.parts)
        history = History(**found.note["history"])
        return Restored(state, found.step, history, epath.Path(self._memory.folder))

    def remember(self, step: int, state: TrainState, history: History, *, recorded: bool) -> None:
        """Copy a state into the memory of the hosts. It is not saved by that.

        ``recorded``: whether this process has written all records until ``step``. If one has not,
        because its disk is full, no step is copied: a restart would resume behind lost records.
        """
        assert self._memory
        with self._clock.during(goodput.SAVES):
            note = {**self._note(), "history": history._asdict()}
            self._memory.save(step, saved_parts(state), note, recorded=recorded)

    def _note(self) -> dict[str, str]:
        """Return digests of all that a step in memory has to have in common with this attempt.

        The mesh may differ, and so may the choices that the plan makes for it.
        """
        config = json.loads(config_lib.to_json(self._config))
        config["mesh"] = config["train"]["auto"] = config["train"]["accumulate"] = None
        for name in {"remat", "unroll"} & config["model"].keys():
            config["model"][name] = None
        digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
        return {"config": digest, "data": self._data.digest()}

    def poll(self) -> None:
        """Notice a save that failed meanwhile, as `save` does. Free of cost at every step."""
        try:
            with self._in_own_workdir():
                self._checkpointer.poll()
        except WorkdirError as error:
            self._process.lose(error)

    @contextlib.contextmanager
    def _in_own_workdir(self) -> Iterator[None]:
        """Raise WorkdirError for a save that failed because the workdir is gone or another's."""
        try:
            yield
        except CheckpointError:
            self._process.lease.confirm()
            raise

    def score(self, step: int, record: Mapping[str, float]) -> None:
        """Note an evaluation, by which config.checkpoint.best may keep its step."""
        self._process.confirm()
        self._checkpointer.score(step, record)

    def stalled(self, step: int) -> bool:
        """Whether the run ends early: by config.train.target or config.train.patience."""
        return self._checkpointer.stalled(step)

    def report_end(self, step: int) -> None:
        """Log why the run ends after ``step``, if it may have ended early."""
        reason = self._checkpointer.reason_of_end(step)
        if reason:
            log.info("ended at step %d: %s", step, reason)

    def owes(self, due: Due, step: int) -> bool:
        """Whether a checkpoint is due after the evaluation: final weights, or a stall's state."""
        if due.save:
            return not due.resumable
        return due.evaluate and self.stalled(step)

    def rewind(
        self, state: TrainState, step: int, skipped: SkippedSteps, history: History
    ) -> tuple[TrainState, History]:
        """Return the last regular save before the skipped steps, at ``state``'s position.

        Raises FloatingPointError when config.guard.rewinds allows no more, or there is no save.
        """
        guard = self._config.guard
        regular_save = None
        if history.rewinds < guard.rewinds:
            with self._clock.during(goodput.RESTORE):
                regular_save = self._checkpointer.rewind(self._abstract, skipped.last_good)
        if not regular_save:
            raise FloatingPointError(
                f"{guard.patience} steps in a row after {skipped.last_good} were skipped: their"
                " gradients were not finite, or spikes. Lower config.optim.lr, look at those"
                f" examples, or raise config.guard.rewinds (it is {guard.rewinds}, and the run has"
                f" rewound {history.rewinds} times). The last checkpoint in"
                f" {self._config.workdir} is from before"
            )
        restored, restored_step = regular_save
        history = history._replace(rewinds=history.rewinds + 1)
        log.warning(
            "%d steps in a row after %d were skipped: the state is again that of step %d, and"
            " batches %d to %d count as skipped (rewind %d of %d)",
            guard.patience,
            skipped.last_good,
            restored_step,
            restored_step + 1,
            step,
            history.rewinds,
            guard.rewinds,
        )
        skipped.restart(step)
        # No checkpoint holds frozen weights: they are those of the state that is given up.
        variables = restored.variables._replace(frozen=state.variables.frozen)
        return restored.replace(step=state.step, variables=variables), history
