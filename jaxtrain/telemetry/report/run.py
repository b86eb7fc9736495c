"""A run as its workdir shows it: its config, its progress, its state, the reason of its end."""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.parallel import lease
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry import glossary, goodput, jsonl
from loaders.io import files
from loaders.io.checks import UserError, flatten

# Folders of a run's workdir, in which no run is looked for. Other workdirs may lie next to them.
PARTS = {"checkpoints", "goodput", "logs", "pictures", "tensorboard", "traces", "slurm", "wandb"}
MARKS = ("config.json", "metrics.jsonl")  # by which a folder is a run's
EXPORTED = "jaxtrain.json"  # of an export, which has a config.json, too
LAUNCHED = "slurm"  # a folder of `jaxtrain launch`
MAX_DEPTH = 6  # of folders below the one that is searched
TAIL = 1 << 16  # [bytes] in which the newest record is looked for
# The score, if the config names none: the first that exists.
BEST = ("accuracy", "exact_accuracy", "probe_accuracy", "-loss")


class RunError(UserError, ValueError):
    """A folder that is no run's, or whose files cannot be read. The message names it."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A workdir. Each of its files is read once, at the first use."""

    path: pathlib.Path
    name: str

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The run's config, or {} if none can be read."""
        try:
            return files.read_json(self.file("config.json"))
        except (files.FileError, OSError):
            return {}

    def file(self, name: str) -> pathlib.Path:
        """Return the path of a file of the run. Raises FileError if it leads out of the workdir."""
        return files.inside(self.path, name)

    def setting(self, path: str, default: Any = None) -> Any:
        """Return the value of ``section.field`` in the config."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return default if value is None else value

    def checkpoints(self) -> dict[int, pathlib.Path]:
        """Return step -> folder of the run's checkpoints. Raises RunError if they are elsewhere."""
        folder = self.setting("checkpoint.folder", "")
        if "://" in folder:
            raise RunError(
                f"{self.path}: its checkpoints are in {folder}; copy those that are needed into a"
                " folder of this machine, and name it as checkpoint.folder in the run's"
                " config.json"
            )
        saved = files.expanded(folder) if folder else self.path / "checkpoints"
        if not saved.is_dir():
            return {}
        return {int(path.name): path for path in saved.glob("*") if path.name.isdecimal()}

    @property
    def traces(self) -> list[pathlib.Path]:
        """The folders of its traces that are whole, by name."""
        folders = (self.path / "traces").glob("steps-*")
        return sorted(path for path in folders if path.is_dir() and not path.is_symlink())

    @property
    def steps(self) -> int:
        """The planned number of steps, or 0 if it is unknown."""
        steps = self.setting("train.steps", 0)
        return steps if type(steps) is int and steps > 0 else 0

    @functools.cached_property
    def processes(self) -> dict[int, list[goodput.Start]]:
        """The wall time of each process by phase, or {} if it cannot be read."""
        try:
            return goodput.read(self.path)
        except (WorkdirError, OSError):
            return {}

    @property
    def starts(self) -> list[goodput.Start]:
        """The starts of process 0, or of the first that is known."""
        return next(iter(self.processes.values()), [])

    def start_of(self, step: int) -> goodput.Start | None:
        """Return the start that made ``step``, by its records, else the first. None: there is none.

        A start that was refused made no step, and has another config or other data.
        """
        making = [start for start in self.starts if start.first < step <= start.step]
        return making[-1] if making else next(iter(self.starts), None)

    @functools.cached_property
    def command(self) -> tuple[str, set[str]]:
        """The newest start's config and the fields of its command line. "": it is not known."""
        facts = self.starts[-1].facts if self.starts else {}
        source = facts.get("source")
        overrides = facts.get("overrides")
        if not isinstance(source, str):
            source = ""
        return source, set(overrides) if isinstance(overrides, dict) else set()

    @functools.cached_property
    def latest(self) -> dict[str, Any]:
        """The newest record of a step, or {} before the first."""
        for line in reversed(self.tail("metrics.jsonl", TAIL).split(b"\n")):
            record = parse(line)
            if record and record["split"] == "train":
                return record
        return {}

    def tail(self, name: str, most: int) -> bytes:
        """At most ``most`` bytes of a file's end, from a line's begin, or nothing."""
        try:
            with files.regular(self.file(name)) as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - most, 0))
                text = file.read(most)
        except (files.FileError, OSError):
            return b""
        return text if size <= most else text.partition(b"\n")[2]

    @functools.cached_property
    def step(self) -> int:
        """The last step that is known."""
        recorded = int(self.latest.get("step", 0))
        return max(recorded, self.starts[-1].step) if self.starts else recorded

    @property
    def saved_step(self) -> int | None:
        """The step of the newest checkpoint, or None if it has none here."""
        with contextlib.suppress(RunError, OSError):
            return max(self.checkpoints(), default=None)
        return None

    @functools.cached_property
    def tests(self) -> list[dict[str, Any]]:
        """The records of its evaluations, by step."""
        try:
            text = files.read(self.file("metrics.jsonl"), most=1 << 31)
        except (files.FileError, OSError):
            return []
        records = map(parse, _lines_with(text, b'"split": "test"'))
        return [record for record in records if record and record["split"] == "test"]

    def score(self, metric: str = "", tests: Mapping[str, Any] | None = None) -> "Score | None":
        """Return the score of the last evaluation and the best one, or None.

        ``tests``: "step", and metrics, -> values of the evaluations, if they have been read. Raises
        RunError for a ``metric`` that would be ranked by its worst value.
        """
        problem = glossary.wrong_sign(metric, workload=str(self.setting("workload", "")))
        if problem:
            raise RunError(f"--metric {problem}")
        chosen = metric or str(self.setting("checkpoint.best", "") or "")
        for name in (chosen,) if chosen else BEST:
            plain = name.removeprefix("-")
            sign = -1 if name.startswith("-") else 1
            if tests is None:
                pairs = [(record["step"], number(record.get(plain))) for record in self.tests]
            else:
                columns = zip(tests.get("step", ()), tests.get(plain, ()), strict=False)
                pairs = [(int(step), float(value)) for step, value in columns]
            evaluations = [(step, value) for step, value in pairs if math.isfinite(value)]
            if evaluations:
                _, last = evaluations[-1]
                step, best = max(evaluations, key=lambda pair: sign * pair[1])
                return Score(plain, sign, last, best, step)
        return None

    @functools.cached_property
    def is_alive(self) -> bool:
        """Tell whether a process of it runs now."""
        try:
            path = self.file(lease.NAME)
            renewed = path.stat(follow_symlinks=False).st_mtime
            holder = lease.parse(files.read(path, most=1 << 16))
        except (files.FileError, OSError):
            return False
        has_ended = holder.has_ended(_me())
        if has_ended is None:
            return time.time() - renewed < lease.LEASE_TIMEOUT
        return not has_ended

    @property
    def state(self) -> str:
        """training, starting, ended, saved (to be resumed), failed, killed, stopped, or new."""
        if self.is_alive:
            return "training" if self.latest else "starting"
        end = self.starts[-1].end if self.starts else ""
        if end.startswith("ended by "):
            return "saved"
        if self.steps and self.step >= self.steps:
            return "ended"
        if not self.starts:
            return "stopped" if self.latest else "new"
        if end in ("", "ended"):
            return end or "killed"
        return "failed"

    @property
    def eta(self) -> float:
        """Seconds to its end, or nan if it does not train."""
        return number(self.latest.get("eta_seconds")) if self.state == "training" else math.nan

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Phase -> seconds, over all processes."""
        return goodput.of_run(self.processes)

    @functools.cached_property
    def disk(self) -> int:
        """Bytes of its files."""
        return _size(str(self.path))


@dataclasses.dataclass(frozen=True)
class Score:
    """A number by which runs are compared."""

    name: str
    sign: int  # 1: more is better
    last: float
    best: float
    step: int  # of the best


def open_run(path: str | os.PathLike[str], name: str = "") -> Run:
    """Return the run in a folder. Raises RunError without one."""
    if "://" in os.fspath(path):
        raise RunError(
            f"{path} is an address; copy the run's workdir into a folder of this machine, and name"
            " that folder"
        )
    path = pathlib.Path(path)
    if not path.is_dir():
        raise RunError(f"{path} {_missing(path)}; expected a run's workdir")
    if not any((path / mark).is_file() for mark in MARKS):
        raise RunError(
            f"{path} holds neither {' nor '.join(MARKS)}; expected a run's workdir, as"
            " config.workdir names it"
        )
    return Run(path, name or path.resolve().name)


def open_runs(paths: Sequence[str]) -> list[Run]:
    """Return the runs in folders, named by as much of each path's end as tells them apart."""
    parts = [pathlib.Path(path).resolve().parts for path in paths]
    n_distinct = len(set(parts))
    length = 1
    while length < 20 and len({of_path[-length:] for of_path in parts}) < n_distinct:
        length += 1
    names = ["/".join(of_path[-length:]).removeprefix("//") for of_path in parts]
    return [open_run(path, name) for path, name in zip(paths, names, strict=True)]


def find(folder: str | os.PathLike[str]) -> tuple[list[Run], list[pathlib.Path]]:
    """Return all runs in a folder and below it, by path, and the folders that launched some.

    Links are not followed. Raises RunError without a folder.
    """
    top = pathlib.Path(folder)
    if not top.is_dir():
        raise RunError(f"{top} {_missing(top)}; expected a folder with runs in it")
    runs = []
    launched = []
    for path, mark in sorted(_below(top, 0)):
        if mark == LAUNCHED:
            launched.append(path)
        else:
            runs.append(named(path, top))
    return runs, launched


def _missing(path: pathlib.Path) -> str:
    return "is no folder" if path.exists() else "does not exist"


def named(path: pathlib.Path, top: pathlib.Path) -> Run:
    """Return the run in ``path``, called as it stands below ``top``."""
    return Run(path, os.path.relpath(path, top) if path != top else path.resolve().name)


def _below(folder: pathlib.Path, depth: int) -> Iterator[tuple[pathlib.Path, str]]:
    """(Folder, its marks): the first of `MARKS` that it has, and `LAUNCHED`."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # of somebody else, or gone meanwhile
    files_here = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    marks = [name for name in files_here if name in MARKS]
    is_export = any(entry.name == EXPORTED for entry in entries)
    if marks and not is_export:
        yield folder, marks[0]
    for entry in entries:
        if depth < MAX_DEPTH and entry.is_dir(follow_symlinks=False):
            if entry.name == LAUNCHED:
                yield folder, LAUNCHED
            elif entry.name not in PARTS and not entry.name.startswith("."):
                yield from _below(folder / entry.name, depth + 1)


def _size(folder: str) -> int:
    total = 0
    with contextlib.suppress(OSError):  # removed while we look: a run that trains
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                total += _size(entry.path)
            else:
                total += entry.stat(follow_symlinks=False).st_size
    return total


@functools.cache
def _me() -> lease.Process:
    return lease.this_process()


def _lines_with(text: bytes, part: bytes) -> Iterator[bytes]:
    at = text.find(part)
    while at >= 0:
        begin = text.rfind(b"\n", 0, at) + 1
        end = text.find(b"\n", at)
        if end < 0:
            end = len(text)
        yield text[begin:end]
        at = text.find(part, end)


def objects(path: pathlib.Path) -> list[dict[str, Any]]:
    """List a file's lines that are JSON objects with a step. Others are left out, and odd files."""
    records = []
    with contextlib.suppress(files.FileError, OSError):
        content = files.read(files.inside(path.parent, path.name), most=64 << 20)
        for line in content.split(b"\n"):
            with contextlib.suppress(ValueError):
                record = files.parse(line.decode(), path.name)
                if type(record.get("step")) is int and 0 <= record["step"] < 1 << 53:
                    records.append(record)
    return records


def parse(line: bytes) -> dict[str, Any] | None:
    """Return a record of metrics.jsonl, or None for another line."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or jsonl.record_problem(record) or record["step"] >= 1 << 53:
        return None
    return record


def number(value: Any) -> float:
    """Return a value of a record as a float, or nan for another value."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


def differences(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Field -> name of a config -> value, of fields in which configs differ, but ``workdir``."""
    flat = {name: flatten(config) for name, config in configs.items()}
    fields = {field for settings in flat.values() for field in settings}
    differing = {}
    for field in sorted(fields - {"workdir"}):
        values = {name: settings.get(field) for name, settings in flat.items()}
        if len({json.dumps(value) for value in values.values()}) > 1:
            differing[field] = values
    return differing
