"""Checkpoints: one Orbax step directory holds the whole run at that step.

    workdir/checkpoints/<step>/        or config.checkpoint.folder/<step>/, which may be in an
                                       object store
      state/   arrays, sharded: step, params, model state, optimizer state, average, guard's norms
      data/    JSON: the state of the loader (position, seed, fingerprints of the data and its
               order, and of the test split), the offset between step and position if the data were
               changed during the run, how often the run was rewound, and the source of its frozen
               weights (`base_weights`)
      meta/    JSON: the number of this format, the resolved config, digests of the files that it
               names and of the parameter table, package versions, the options of JAX and XLA that
               decide numbers
      manifest.json   size and hash of every file (`checksums`), checked before anything is read

Frozen base weights are not here: they are reloaded from their source. A save is asynchronous, one
at a time; Orbax writes into a temporary directory and renames it, so that a step directory is
complete, with its checksums, or does not exist. An object store has no renames: there, Orbax writes
a file commit_success.txt last, and a step without one does not count.

With config.checkpoint.final="weights" the step that ends a run has under state/ only step, params,
model state and the average, and its meta says ``"weights_only": true``: enough to evaluate, export
and warm-start from, and not to resume.
"""

import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.arrays import checksums, orbax_steps, quiet_orbax, stored
from jaxtrain.checkpoint import disk_usage, joint_failure
from jaxtrain.checkpoint.history import CheckpointError, History, SaveError, Scores
from jaxtrain.parallel import cluster, jax_options
from jaxtrain.types import Task
from loaders.io import files
from loaders.io.checks import FREE, first_line

# a state is rebuilt from the abstract one, so that reading a step imports no trainer
if TYPE_CHECKING:
    from jaxtrain.step.state import Abstract, TrainState

# [s] that a save may take: each process writes its part, and reads it for the checksums
TIMEOUT = 3600

# [s] after which a network file system has shown the files of another process: NFS keeps what it
# knows of a folder for up to 60 s (nfs(5), acdirmax)
LATE = 75.0
MAX_DAMAGE = 2000  # letters of the damage that a process describes
IN_FLIGHT = 16 << 20  # [bytes] of arrays that a restore reads at once, or the largest one

log = logging.getLogger("jaxtrain")

# fields that an evaluation depends on
EVALUATED = re.compile(r"^train\.(eval_batches|ema)$|^data\.(\w+\[\d+\]\.)?test")


class Restored(NamedTuple):
    state: "TrainState"
    step: int  # batches read so far
    history: History
    source: epath.Path


class Saved(NamedTuple):
    """How a call of `Checkpointer.save` went."""

    seconds: float  # of the call, for which the next step had to wait
    failures: int  # saves of this process that have failed so far, not counting this one


def is_save_due(config: config_lib.Config, step: int) -> bool:
    """Whether a save follows ``step`` batches: regular, or before a possibly best evaluation."""
    if step % config.checkpoint.every == 0 or step == config.train.steps:
        return True
    every = config.train.eval_every
    return bool(config.checkpoint.best) and bool(every) and step % every == 0


def newest_step(config: config_lib.Config) -> int:
    """Return the newest step in a run's folder of checkpoints, by its name, 0 if none is seen."""
    folder = disk_usage.folder_of(config.workdir, config.checkpoint.folder)
    with contextlib.suppress(OSError):  # the restore reports it
        return _newest_listed(_absolute(folder)) or 0
    return 0


class _Read(NamedTuple):
    """A step that was read."""

    state: "TrainState"
    data: Mapping[str, Any]  # the item of that name
    changes: list[config_lib.Change]  # of the config since


class Checkpointer:
    """Saves and restores the steps of a workdir. All processes call all in the same order.

    Args:
      goes_on: whether a save may fail, also with config.checkpoint.on_error="stop". If the last one
        of a run has, `close` raises the error.
    """

    def __init__(self, config: config_lib.Config, task: Task, *, goes_on: bool = False):
        quiet_orbax.keep_quiet()
        self._config = config
        self._goes_on = goes_on
        self._unsaved = ""  # why the last save failed, if it has
        self._meta = {
            "format": stored.FORMAT,
            "config": json.loads(config_lib.to_json(config)),
            "files": config_lib.digests_of(config),
            "parameters": specs.digest(task.specs),
            "versions": cluster.versions(),
            config_lib.ENVIRONMENT: jax_options.recorded(),
        }
        self._path = _absolute(disk_usage.folder_of(config.workdir, config.checkpoint.folder))
        self._path.mkdir(parents=True, exist_ok=True)
        _check_shared(self._path)
        # next to other runs' folders, a file in the folder above would be theirs, too
        scores_folder = self._path if config.checkpoint.folder else self._path.parent
        self._scores = Scores(
            scores_folder / "best.json", config.checkpoint, config.train.min_delta
        )
        preserved = [policies.LatestN(config.checkpoint.keep), self._scores]
        if config.checkpoint.keep_every:
            preserved.append(policies.EveryNSteps(config.checkpoint.keep_every))
        self._saving: epath.Path | None = None  # the step of the save in flight
        self._failures = 0
        self._given_up: list[str] = []  # steps whose saves failed
        self._barrier: joint_failure.SaveBarrier | None = None
        if jax.process_count() > 1:
            self._barrier = joint_failure.SaveBarrier(self._measure)
        saves = ocp.options.AsyncOptions(
            timeout_secs=TIMEOUT,
            barrier_sync_fn=self._barrier,
            post_finalization_callback=self._seal,
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(preserved),
            create=True,
            async_options=saves,
        )
        self._manager = _manager(self._path, options)

    def save(
        self, step: int, state: "TrainState", data: Mapping[str, Any], history: History
    ) -> Saved:
        """Start to save ``state``, unless ``step`` is saved. First wait for the previous save.

        Raises SaveError when that one failed, or this one fails at once, unless
        config.checkpoint.on_error is "continue".
        """
        began = time.perf_counter()
        self._settle()
        if step not in self._manager.all_steps():
            content = saved_parts(state)
            meta = self._meta
            if step == self._config.train.steps and self._config.checkpoint.final == "weights":
                content = {name: content[name] for name in ("step", "params", "model_state", "ema")}
                meta = {**meta, "weights_only": True}
            items = ocp.args.Composite(
                state=ocp.args.StandardSave(content, save_args=orbax_steps.in_chunks(content)),
                data=ocp.args.JsonSave({**data, **history._asdict()}),
                meta=ocp.args.JsonSave(meta),
            )
            self._start(step, items)
        return Saved(time.perf_counter() - began, self._failures)

    def _start(self, step: int, items: ocp.args.Composite) -> None:
        path = self._path / str(step)
        self._saving = path
        if self._barrier:
            self._barrier.start()
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:  # noqa: BLE001  a disk raises many kinds
            self._fail(error, path)

    def score(self, step: int, record: Mapping[str, float]) -> None:
        self._scores.add(step, record)

    def stalled(self, step: int) -> bool:
        """Whether the run ends after ``step``, by config.train.target or config.train.patience.

        The target is reached, or that many evaluations in a row made no progress.
        """
        train = self._config.train
        last_progress = self._scores.progress
        if self._scores.has_reached(train.target):
            return True
        if not train.patience or last_progress is None:
            return False
        if not self._scores.has_passed(train.patience_from):
            return False
        return (step - last_progress) // train.eval_every >= train.patience

    def reason_of_end(self, step: int) -> str:
        """Return why a run ends after ``step``, "" without config.train.patience and target."""
        train, metric = self._config.train, self._config.checkpoint.best
        best = self._scores.described()
        if self._scores.has_reached(train.target):
            return f"{metric} has reached train.target={train.target:g}; {best}"
        if not train.patience or self._scores.progress is None:
            return ""
        if self.stalled(step):
            return f"no progress of {metric} for {train.patience} evaluations; {best}"
        if not self._scores.has_passed(train.patience_from):
            return (
                f"the last of train.steps, and {metric} never passed"
                f" train.patience_from={train.patience_from:g}: nothing is learned; {best}"
            )
        return f"the last of train.steps, before patience ended it; {best}"

    def listed(self, other: str = "") -> int:
        """Return the newest step in this workdir, else in ``other``, by folders' names, or 0."""
        newest = _newest_listed(self._path)
        if newest is None and other:
            newest = _newest_listed(_absolute(other) / "checkpoints")
        return newest or 0

    def has_newer(self, step: int) -> bool:
        """Whether a sound checkpoint is newer than ``step``. Damaged newer ones are set aside."""
        newer = [other for other in self._manager.all_steps() if other > step]
        for other in cluster.agree_on(sorted(newer, reverse=True)):
            path = self._path / str(other)
            damage = self._damage(path)
            if not damage:
                return True
            log.warning("checkpoint %s is damaged and is skipped: %s", path, damage)
        self._set_aside(newer)
        return False

    def restore(
        self, abstract: "Abstract", data: Mapping[str, Any], workdir: str = ""
    ) -> Restored | None:
        """Read the newest readable checkpoint of this run or of another ``workdir``, or None.

        ``abstract`` is the target of every array: the mesh that saved it need not exist any more.
        ``data`` is the loader's state now, whose fingerprints must equal the saved ones, unless
        config.resume.data is "restart". Raises CheckpointError: the model or the data differ from
        the saved ones, no checkpoint of several can be read, or ``workdir`` has none.
        """
        if not workdir:
            steps = self._manager.all_steps()
            restored = self._newest(steps, self._path, abstract, data)
            if restored:
                self._set_aside([step for step in steps if step > restored.step])
            else:
                self._scores.forget("no checkpoint of the run that wrote it is left")
            return restored
        path = _absolute(workdir) / "checkpoints"
        with _manager(path, ocp.CheckpointManagerOptions(read_only=True)) as manager:
            restored = self._newest(manager.all_steps(), path, abstract, data)
        if not restored:
            raise CheckpointError(f"config.resume.path: {path} holds no checkpoint")
        return restored

    def rewind(self, abstract: "Abstract", before: int) -> "tuple[TrainState, int] | None":
        """Read the newest state of at most ``before`` batches, with its step, or return None.

        Only regular saves are considered: it is the same one after any number of interruptions.
        """
        self._settle()
        steps = []
        for step in sorted(self._manager.all_steps(), reverse=True):
            if step <= before and is_save_due(self._config, step):
                steps.append(step)
        for step in cluster.agree_on(steps):
            path = self._path / str(step)
            damage = self._damage(path)
            if not damage:
                return _read_state(path, orbax_steps.open_step(path), abstract), step
            log.warning("checkpoint %s is damaged and is skipped: %s", path, damage)
        return None

    def is_finished(self) -> bool:
        """Whether the run has ended with a step of weights only, from which nothing can resume."""
        meta: Mapping[str, Any] = {}
        # damage is reported when the step itself is read
        with contextlib.suppress(OSError, stored.StoredError):
            meta = orbax_steps.read_json(self._path / str(self._config.train.steps), "meta") or {}
        return bool(cluster.agree(bool(meta.get("weights_only"))))

    def poll(self) -> None:
        """Notice a save that failed meanwhile, as `save` does. Free of cost at every step."""
        if self._saving and not self._manager.is_saving_in_progress():
            self._settle()

    def close(self) -> None:
        """Wait for a save in flight. Raises SaveError when it failed."""
        try:
            self._settle()
            if self._goes_on and self._unsaved:
                raise SaveError(self._unsaved)
        finally:
            self._manager.close()
            self._remove_parts()

    def _measure(self) -> None:
        """Measure the files of a save that this process wrote, before process 0 seals it."""
        checksums.measure(self._written(), jax.process_index())

    def _seal(self) -> None:
        """Write the checksums of a save, in process 0, once all have written, before the commit."""
        checksums.write(self._written(), jax.process_count())

    def _written(self) -> epath.Path:
        """Return the folder that Orbax writes the save in flight into."""
        step = self._saving
        assert step
        parts = sorted(
            self._path.glob(f"{step.name}.orbax-checkpoint-tmp*"),
            key=lambda part: part.stat().mtime,
        )
        return parts[-1] if parts else step  # an object store has no temporary folder

    def _settle(self) -> None:
        if not self._saving:
            return
        step = self._saving
        try:
            self._manager.wait_until_finished()
            self._saving = None
            self._unsaved = ""
        except Exception as error:  # noqa: BLE001  a disk raises many kinds
            self._fail(error, step)

    def _fail(self, error: Exception, step: epath.Path) -> None:
        self._drain()
        self._saving = None
        self._given_up.append(step.name)
        self._remove_parts()
        self._failures += 1
        self._manager.reload()
        complete = self._manager.all_steps()
        newest = f"the newest complete one is {max(complete)}" if complete else "there is none yet"
        message = f"checkpoint {step} could not be written: {first_line(error)}; {newest}"
        self._unsaved = f"{message}. Make room, or fix the disk, and rerun the same command"
        if self._goes_on:
            log.error("%s; training continues, and the next save tries again", message)
            return
        if self._config.checkpoint.on_error == "stop":
            raise SaveError(
                f"{self._unsaved}; to train on"
                " without this checkpoint, set config.checkpoint.on_error='continue'"
            ) from error
        log.error(
            "%s; training continues (config.checkpoint.on_error), and so do later saves", message
        )

    def _drain(self) -> None:
        """Collect the other errors that Orbax holds for a save that failed.

        Its threads fail one by one, and each error is raised once, in the next call, which would
        count as failed without having begun.
        """
        while True:
            try:
                self._manager.wait_until_finished()
                # no public name; its thread may outlive the manager
                self._manager._checkpointer.wait_until_finished()
                return
            except Exception as error:  # noqa: BLE001  a disk raises many kinds
                log.debug("another error of the same save: %s", error)

    def _remove_parts(self) -> None:
        """Free the space of failed saves, if no other process may still write to them."""
        if jax.process_count() > 1:
            return
        # threads that nobody waits for may still write there: the next call tries again
        with contextlib.suppress(OSError):
            for step in self._given_up:
                for part in self._path.glob(f"{step}.orbax-checkpoint-tmp*"):
                    part.rmtree()

    def _set_aside(self, passed: Sequence[int]) -> None:
        """Rename the newer steps that could not be read, so that a save can take their place.

        They would count as saved, and among config.checkpoint.keep.
        """
        steps = cluster.agree_on(sorted(passed))
        if not steps:
            return
        if cluster.is_main():
            for step in steps:
                _rename_damaged(self._path / str(step))
        cluster.barrier("damaged checkpoints are set aside")
        self._manager.reload()

    def _damage(self, path: epath.Path) -> str:
        """Describe the damage that a step's checksums show to the processes, or return "".

        Each reads its part of the files, and all return the same.
        """
        found = self._other_manifest(path)
        if not any(cluster.gather(int(bool(found)))):
            found = self._damage_of_part(path, jax.process_index(), jax.process_count())
        if not any(cluster.gather(int(bool(found)))):
            return ""
        # more than a line of each would not be read
        texts = cluster.gather_texts(found[:MAX_DAMAGE])
        return "; ".join(dict.fromkeys(text for text in texts if text))

    def _other_manifest(self, path: epath.Path) -> str:
        """Wait until this process sees the manifest that process 0 sees. Say so if it does not."""
        if jax.process_count() == 1:
            return ""
        number, problem = _number_of(path)
        of_main = cluster.agree(number)
        if of_main < 0:
            return problem  # that of process 0, at least
        if _becomes_true(path, lambda: _number_of(path)[0] == of_main):
            return ""
        other = f"process {jax.process_index()} sees another {checksums.NAME} than process 0"
        return problem or other

    def _damage_of_part(self, path: epath.Path, part: int, parts: int) -> str:
        try:
            if part == 0:
                checksums.patiently(lambda: orbax_steps.check_files(path))
            return "; ".join(checksums.verify(path, part, parts))
        except checksums.NoManifest:
            if part == 0:
                log.warning(
                    "checkpoint %s has no checksums, which no run leaves out: it is read"
                    " unverified",
                    path,
                )
            return ""
        except (OSError, ValueError) as error:
            return first_line(error)

    def _newest(
        self, steps: Sequence[int], path: epath.Path, abstract: "Abstract", data: Mapping[str, Any]
    ) -> Restored | None:
        steps = sorted(steps, reverse=True)
        for step in cluster.agree_on(steps):
            step_dir = path / str(step)
            damage = self._damage(step_dir)
            if damage:
                log.warning("checkpoint %s is damaged and is skipped: %s", step_dir, damage)
                continue
            step_read, problem = self._read(step_dir, abstract)
            # If one process cannot read its part, none takes this step.
            failures = cluster.gather(int(step_read is None))
            if any(failures):
                reason = problem or f"process {failures.index(1)} says why in its log"
                log.warning("checkpoint %s cannot be read and is skipped: %s", step_dir, reason)
                continue
            assert step_read is not None
            offset = self._check_data(step_dir, step, step_read, data)
            self._report_changes(step_read.changes)
            saved = step_read.data
            history = History(offset, saved.get("rewinds", 0), saved.get("base"))
            return Restored(step_read.state, step, history, step_dir)
        if steps:
            raise CheckpointError(
                f"none of the checkpoints {steps} in {path} can be read; move that folder away to"
                " start from the beginning, or choose another config.workdir"
            )
        return None

    def _read(self, step_dir: epath.Path, abstract: "Abstract") -> "tuple[_Read | None, str]":
        """Read a step, or say why that fails. Raises CheckpointError: it is of another model."""
        try:
            arrays = orbax_steps.open_step(step_dir)
            changes = self._check_config(step_dir, arrays, abstract)
            data = stored.read_object(step_dir, "data/metadata")
            state = _read_state(step_dir, arrays, abstract)
        except CheckpointError:
            raise
        except Exception as error:  # noqa: BLE001  a damaged file raises many kinds
            return None, first_line(error)
        return _Read(state, data, changes), ""

    def _report_changes(self, changes: Sequence[config_lib.Change]) -> None:
        """Forget the scores of other evaluations, and log the fields that changed besides."""
        of_evaluations = [str(change) for change in changes if EVALUATED.search(change.path)]
        if of_evaluations:
            self._scores.forget(f"its evaluations were others ({'; '.join(of_evaluations)})")
        logged = []
        of_environment = []
        for change in changes:
            if change.is_of_environment:
                of_environment.append(str(change))
            elif not change.path.startswith(("workdir", "resume.", "data.")):
                logged.append(str(change))
        if logged:
            log.info("the config differs from the checkpoint's: %s", "; ".join(logged))
        if of_environment:
            log.warning(
                "steps from here on need not have the bits that they would have had: %s",
                "; ".join(of_environment),
            )

    def _check_config(
        self, path: epath.Path, arrays: Mapping[str, stored.Stored], abstract: "Abstract"
    ) -> list[config_lib.Change]:
        """Return all fields that differ between the config and arrays of a step and this run's."""
        meta = stored.read_object(path, "meta/metadata")
        try:
            stored.check_format(meta, f"checkpoint {path}")
        except stored.StoredError as error:
            raise CheckpointError(f"{error}, or choose another config.workdir") from error
        if meta.get("weights_only"):
            raise CheckpointError(
                f"checkpoint {path} holds weights only, without the optimizer: nothing can resume"
                " from it. Start another run from it with another config.workdir and"
                f" config.warm_start.source={str(path)!r}"
            )
        changes = config_lib.compare(meta["config"], self._config, meta.get("files") or {})
        changes += jax_options.changes(meta.get(config_lib.ENVIRONMENT))
        fixed = [change for change in changes if change.kind != FREE]
        other_arrays = _other_arrays(arrays, abstract)
        if other_arrays or meta["parameters"] != self._meta["parameters"]:
            fields = "; ".join(map(str, fixed))
            difference = fields or other_arrays or "their axes or dtypes changed"
            raise CheckpointError(
                f"checkpoint {path} holds other arrays than this run has: {difference}. Set it"
                " back, or choose another workdir"
            )
        allow = self._config.resume.allow
        forbidden = [change for change in fixed if not change.is_allowed(allow)]
        if forbidden:
            sections = ",".join(
                dict.fromkeys(change.path.partition("[")[0] for change in forbidden)
            )
            raise CheckpointError(
                f"checkpoint {path} was trained with another config:"
                f" {'; '.join(map(str, forbidden))}. Set it back, choose another config.workdir, or"
                f" train on with the change by --config.resume.allow={sections}"
            )
        return changes

    def _check_data(
        self,
        path: epath.Path,
        step: int,
        step_read: "_Read",
        now: Mapping[str, Any],
    ) -> int:
        """Compare the fingerprints. Return the offset that positions are counted from."""
        saved = step_read.data
        if saved.get("test", now.get("test")) != now.get("test"):
            log.warning(
                "the data to test on are others than those of %s: its evaluations are not compared",
                path,
            )
            self._scores.forget("its evaluations were of other data")
        changed = differences_of_data(saved, now)
        if not changed:
            offset: int = saved["offset"]
            return offset
        fields = []
        for change in step_read.changes:
            if change.path.startswith(("data.", "train.batch")):
                fields.append(str(change))
        if fields:
            changed = f"{'; '.join(fields)}; {changed}"
        if self._config.resume.data == "restart":
            log.warning(
                "the data or their order changed (%s): they are read from their beginning", changed
            )
            self._scores.forget("it is of other data")
            return step
        raise CheckpointError(
            f"checkpoint {path} was trained on other data or in another order ({changed}), so that"
            " resuming would repeat and miss examples; set it back, choose another config.workdir,"
            " or read the data from their beginning with config.resume.data='restart'"
        )


def _absolute(path: str) -> epath.Path:
    return epath.Path(path) if "://" in path else epath.Path(files.expanded(path).absolute())


def _number_of(step: epath.Path) -> tuple[int, str]:
    """Return the number of a step's checksums, or -1 and why they cannot be read."""
    try:
        return checksums.number(step), ""
    except (files.FileError, stored.StoredError) as error:
        return -1, first_line(error)


def _rename_damaged(step: epath.Path) -> None:
    """Rename a step, and say where it is. What cannot be renamed, as in a store, stays."""
    number = 1
    while (aside := step.with_name(f"{step.name}.damaged-{number}")).exists():
        number += 1
    try:
        if "://" in str(step):
            raise OSError("an object store renames no folders")
        step.rename(aside)
    except OSError as error:
        log.warning(
            "checkpoint %s stays where it is (%s), and step %s cannot be saved again; delete it",
            step,
            error.strerror or error,
            step.name,
        )
        return
    log.warning(
        "checkpoint %s is now %s, so that step %s can be saved again; delete that folder",
        step,
        aside.name,
        step.name,
    )


def _newest_listed(folder: epath.Path) -> int | None:
    """Return the newest step that a folder lists, or None."""
    if not folder.is_dir():
        return None
    steps = [int(x.name) for x in folder.iterdir() if x.name.isdecimal() and x.is_dir()]
    return max(steps, default=None)


def differences_of_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe how the training data or their order differ between two items ``data``, or ""."""
    return _differences(_fingerprints(saved), _fingerprints(now))


def _fingerprints(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an item ``data`` that stays the same during a run."""
    varying = {"position", "test", *History._fields}
    return {name: value for name, value in data.items() if name not in varying}


def _manager(path: epath.Path, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
    """Open a folder of steps. Raises CheckpointError: Orbax cannot read its own notes."""
    try:
        return ocp.CheckpointManager(path, options=options)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the file _CHECKPOINT_METADATA of a step is damaged ({first_line(error)});"
            " delete it: it holds the time of the save, and the step is read as well without it"
        ) from error


def _becomes_true(folder: epath.Path, is_true: Callable[[], bool]) -> bool:
    """Ask again for `LATE` seconds if a folder's content is not as expected yet."""
    deadline = time.monotonic() + LATE
    while not is_true():
        if time.monotonic() >= deadline:
            return False
        with contextlib.suppress(OSError):  # it may not be there yet
            for shown in (folder.parent, folder):
                list(shown.iterdir())  # makes some network file systems look again
        time.sleep(0.2)
    return True


def _check_shared(folder: epath.Path) -> None:
    """Raise CheckpointError, naming the processes, unless all see the same folder.

    Process 0 leaves a file there, which the others look for.
    """
    if jax.process_count() == 1:
        return
    token = f".shared-{cluster.agree(uuid.uuid4().int % 2**31)}"
    if jax.process_index() == 0:
        (folder / token).write_text("")
    cluster.barrier("the shared file is written")
    is_seen = _becomes_true(folder, lambda: (folder / token).exists())
    blind = [process for process, sees in enumerate(cluster.gather(int(is_seen))) if not sees]
    if jax.process_index() == 0:
        (folder / token).unlink()
    if blind:
        raise CheckpointError(
            f"{folder} is not the same folder for all processes: {', '.join(map(str, blind))} of"
            f" {jax.process_count()} do not see what process 0 writes there. It must be on a file"
            " system that all hosts share, or in an object store: set config.workdir, or"
            " config.checkpoint.folder"
        )


def _read_state(
    step: epath.Path, arrays: Mapping[str, stored.Stored], abstract: "Abstract"
) -> "TrainState":
    """Read the state of a step. An array takes up to three times its size meanwhile."""
    target = saved_parts(abstract.state)
    targets = dict(zip(specs.paths(target), jax.tree.leaves(target), strict=True))
    largest = max(_part_bytes(saved, targets[path]) for path, saved in arrays.items())
    handler = ocp.StandardCheckpointHandler(restore_concurrent_gb=max(largest + 2, IN_FLIGHT) / 1e9)
    try:
        saved = handler.restore(step / "state", args=ocp.args.StandardRestore(target))
    finally:
        handler.close()
    return of_saved_parts(abstract, saved)


def of_saved_parts(abstract: "Abstract", saved: Mapping[str, Any]) -> "TrainState":
    """Return the state of arrays by the names of `saved_parts`, without frozen parameters."""
    variables = abstract.state.variables._replace(
        params=saved["params"], model_state=saved["model_state"]
    )
    norms = abstract.state.norms._replace(**saved["norms"])
    return abstract.state.replace(
        step=saved["step"],
        variables=variables,
        opt_state=saved["opt_state"],
        ema=saved["ema"],
        norms=norms,
    )


def _part_bytes(saved: stored.Stored, target: jax.ShapeDtypeStruct) -> int:
    """Return the most bytes of an array that Orbax reads for one device: whole chunks."""
    part: tuple[int, ...] = saved.shape
    if target.sharding:
        part = target.sharding.shard_shape(saved.shape)
    n_elements = 1
    for size, chunk, size_of_part in zip(saved.shape, saved.chunk, part, strict=True):
        chunks_of_part = -(-size_of_part // chunk) + 1
        n_elements *= chunk * min(-(-size // chunk), chunks_of_part)
    return saved.dtype.itemsize * n_elements


def saved_parts(state: "TrainState") -> dict[str, Any]:
    """Select the parts of a state that are saved. The keys are part of the format."""
    return {
        "step": state.step,
        "params": state.variables.params,
        "model_state": state.variables.model_state,
        "opt_state": state.opt_state,
        "ema": state.ema,
        "norms": state.norms._asdict(),
    }


def _other_arrays(saved: Mapping[str, stored.Stored], abstract: "Abstract") -> str:
    """Return a step's first arrays that are missing, extra, or of another shape, or ""."""
    tree = saved_parts(abstract.state)
    expected = {}
    for path, x in zip(specs.paths(tree), jax.tree.leaves(tree), strict=True):
        expected[path] = tuple(x.shape)
    shapes = {path: tuple(array.shape) for path, array in saved.items()}
    differences = []
    for path in sorted({*expected, *shapes}):
        saved_shape, shape = shapes.get(path, "missing"), expected.get(path, "missing")
        if saved_shape != shape:
            differences.append(f"{path} {saved_shape} saved, {shape} now")
    return "; ".join(differences[:3]) + ("; …" if len(differences) > 3 else "")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    differences = []
    for name in sorted({*old, *new}):
        old_value, new_value = old.get(name), new.get(name)
        # As text, since tuples are lists once saved.
        if json.dumps(old_value, sort_keys=True) != json.dumps(new_value, sort_keys=True):
            differences.append(f"{name}: {old_value} saved, {new_value} now")
    return ", ".join(differences)
