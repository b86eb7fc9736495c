"""Errors between the sections of a config, or on this machine: files, packages, the workdir."""

import contextlib
import inspect
import math
import operator
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.config import changes, factories
from jaxtrain.config.schema import (
    AUTO,
    AXIS_RULES,
    OF_SCHEDULE,
    ONLY_BUILT_IN,
    Config,
    Optim,
    Train,
)
from loaders.io import checks, files, machine
from loaders.io.checks import Problems

# Packages of the fields of `Metrics` that name a writer.
TRACKERS = {
    "tensorboard": "tensorboardX",
    "wandb_project": "wandb",
    "mlflow_experiment": "mlflow",
    "trackio_project": "trackio",
}


class ConfigError(checks.UserError, ValueError):
    """Every error of a config at once, a line each: one alone, several below their number."""

    def __init__(self, problems: Sequence[tuple[str, str]]):
        self.problems = tuple(problems)
        lines = []
        listed: list[str] = []
        for path, text in problems:
            line = f"config.{path} {text}" if path else text
            lines.append(line)
            listed += getattr(text, "listed", ()) or [line]
        if len(problems) != 1:
            indented = [f"  {line}" for line in lines]
            message = "\n".join([f"the config has {len(problems)} errors:", *indented])
        elif problems[0][0]:
            message = lines[0]
        else:
            message = f"the config has an error: {lines[0]}"
        super().__init__(message, listed=listed)


class ArgumentError(ConfigError):
    """A config file that refuses its argument, or misses it: there are no fields."""


def without_defaults(problems: Iterable[tuple[str, str]], unread: Sequence[str]) -> Problems:
    """Yield the ``problems`` that do not rest on a field of ``unread``, whose default they judge.

    A text names every field that it rests on: by its whole path, or within its section by its name.
    """
    for path, text in problems:
        if not any(_rests_on(path, text, field) for field in unread if field):
            yield path, text


def _rests_on(path: str, text: str, field: str) -> bool:
    """Whether a problem at ``path`` is inside ``field``, or its text names that field."""
    if path == field or path.startswith((f"{field}.", f"{field}[")):
        return True
    names = {field}
    if field.split(".")[0] == path.split(".")[0]:
        names.add(re.split(r"[.\[]", field)[-1])
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", text) for name in names)


def beyond_the_run(config: Config) -> Iterator[str]:
    """Yield events that never come within the run's steps, with a value that would."""
    train, steps = config.train, config.train.steps
    names = ("train.eval_every", "checkpoint.every", "checkpoint.keep_every", "metrics.every")
    periods = {name: operator.attrgetter(name)(config) for name in names}
    too_long = {name: every for name, every in periods.items() if every > steps > 1}
    if too_long:
        values = ", ".join(f"{name}={every}" for name, every in too_long.items())
        shorter = " ".join(f"--config.{name}={max(1, round(steps / 10))}" for name in too_long)
        yield (
            f"{values}: longer than train.steps={steps}, so that only the last step counts; "
            f"{shorter} would do, or 0.1 of any run"
        )
    rounds = -(-steps // train.eval_every) if train.eval_every else 1
    if train.patience >= rounds > 1:
        yield (
            f"train.patience={train.patience}: the run has {rounds} evaluations, so that it never"
            f" ends early; --config.train.eval_every={max(1, steps // (4 * train.patience))}"
            " would do"
        )


def between_sections(config: Config) -> Problems:
    """Yield the errors that only show between sections."""
    yield from _axis_problems(config.workload, config.mesh.axis_rules)
    train, optim, mesh = config.train, config.optim, config.mesh
    batch_axes = mesh.axis_rules.get("batch", AXIS_RULES["batch"]).rstrip("?").split(",")
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "model": mesh.model}
    devices = math.prod(sizes[name] for name in batch_axes if sizes.get(name, 0) > 0)
    microbatches = max(train.accumulate, 1)
    parts = devices * microbatches
    if train.batch > 0 and not train.batch % microbatches and train.batch % parts:
        below = train.batch // parts * parts
        nearest = f"that do are {below} and {below + parts}" if below else f"that does is {parts}"
        yield (
            "train.batch",
            f"is {train.batch}, which mesh.data × mesh.fsdp × train.accumulate = {devices} ×"
            f" {microbatches} does not divide; the nearest {nearest}",
        )
    yield from _auto_problems(config)
    for name in ("metrics.digest", "guard.verify_every"):
        value = operator.attrgetter(name)(config)
        if optim.offload and value:
            yield (
                name,
                f"is {value}, and optim.offload keeps a part of the state where no digest is"
                " computed; unset one of them",
            )
    if train.patience and not config.checkpoint.best:
        yield (
            "train.patience",
            f"is {train.patience}, and checkpoint.best names no metric, for example '-loss'",
        )
    if train.target is not None and not config.checkpoint.best:
        yield (
            "train.target",
            f"is {train.target:g}, and checkpoint.best names no metric, for example 'accuracy'",
        )
    yield from _allowed_problems(config)
    yield from _schedule_problems(train, optim)
    yield from checks.under("optim", _factory_problems(optim, train.steps, config.seed))
    yield from checks.under("optim", _unread(optim))


def _auto_problems(config: Config) -> Problems:
    for path in config.train.auto:
        section, _, field = path.partition(".")
        is_field = path == "mesh" or path in AUTO and hasattr(getattr(config, section), field)
        if not is_field:
            yield "train.auto", f"names {path!r}; {checks.expected(path, AUTO)}, of this model"
    reads = config.model and config.model.reads_whole_microbatches
    if reads and "train.accumulate" in config.train.auto:
        yield (
            "train.accumulate",
            "is auto, and the loss of this model has statistics of a microbatch's rows, which the"
            " memory of a device would decide; set a number",
        )


def _allowed_problems(config: Config) -> Problems:
    fields = {path for path, _ in changes.kinds(config)}  # a dictionary's key follows its field
    sections = {path[: m.start()] for path in fields for m in re.finditer(r"[.\[]", path)}
    for name in config.resume.allow:
        if name.partition(".")[0] == changes.ENVIRONMENT:
            continue
        is_field = any(name == path or name.startswith(f"{path}.") for path in fields)
        if not is_field and name not in sections:
            nearest = checks.nearest(name, sorted(fields | sections))
            yield "resume.allow", f"names {name!r}, which is no field{nearest}"


def _factory_problems(optim: Optim, steps: int, seed: int) -> Problems:
    if factories.is_factory(optim.schedule):
        yield from factories.problems(
            optim.schedule,
            optim.schedule_arguments,
            field="schedule",
            check=factories.of_schedule,
            steps=steps,
            learning_rate=optim.lr,
        )
    if factories.is_factory(optim.name):
        arguments: Mapping[str, Any] = optim.arguments
        with contextlib.suppress(ValueError):  # `factories.problems` has it
            arguments = factories.with_key(optim.name, optim.arguments, seed)
        yield from factories.problems(
            optim.name,
            arguments,
            field="name",
            check=factories.of_optimizer,
            learning_rate=lambda count: optim.lr,
        )


def _unread(optim: Optim) -> Problems:
    """Yield the fields that are set, and that the named optimizer or schedule does not read."""
    unread: dict[str, str] = {}  # field -> the field that decides that it is not read
    for name, arguments, of_built_in in (
        ("schedule", "schedule_arguments", OF_SCHEDULE[3:]),
        ("name", "arguments", ONLY_BUILT_IN),
    ):
        value = getattr(optim, name)
        if not factories.is_factory(value):
            unread[arguments] = name
            continue
        unread |= dict.fromkeys(of_built_in, name)
        with contextlib.suppress(ValueError):  # `_factory_problems` has it
            if not factories.takes(value, "learning_rate"):
                unread |= dict.fromkeys(OF_SCHEDULE if name == "name" else ("lr",), name)
    for name, reader in unread.items():
        value, default = getattr(optim, name), getattr(Optim(), name)
        if value != default:
            yield (
                name,
                f"is {value!r}, which {reader}={getattr(optim, reader)!r} does not read; leave it"
                f" at {default!r}",
            )
    reader_of_lr = "name" if factories.is_factory(optim.name) else "schedule"
    for i, group in enumerate(optim.groups):
        for name, reader in (("lr", reader_of_lr), ("weight_decay", "name"), ("name", "name")):
            value, factory = getattr(group, name), getattr(optim, reader)
            if value is not None and factories.is_factory(factory):
                yield (
                    f"groups[{i}].{name}",
                    f"is {value!r}, which {reader}={factory!r} does not read; leave it out",
                )


def _schedule_problems(train: Train, optim: Optim) -> Problems:
    steps, warmup, decay = train.steps, optim.warmup, optim.decay
    yield from _cycle_problems(steps, optim)
    if steps < 1 or warmup + decay <= steps:
        return
    for name, value, share in (("warmup", warmup, 0.05), ("decay", decay, 0.2)):
        if value > steps:
            fitting = max(1, round(share * steps))
            yield (
                f"optim.{name}",
                f"is {value}, longer than train.steps={steps}; set config.optim.{name}={fitting},"
                f" or config.optim.{name}={share} of any run",
            )
    if max(warmup, decay) <= steps:
        text = f"is {decay}: together with optim.warmup={warmup} longer than train.steps={steps}"
        if warmup < steps:
            text += f"; at most {steps - warmup} fits"
        yield "optim.decay", text


def _cycle_problems(steps: int, optim: Optim) -> Problems:
    """Yield cycles that do not end with the run, and a warm-up that is as long as its cycle."""
    cycle, warmup = optim.cycle, optim.warmup
    if not 0 < cycle < steps:
        return
    if steps % cycle:
        below = steps // cycle * cycle
        yield (
            "optim.cycle",
            f"is {cycle}, which does not divide train.steps={steps}, so that the run would end in"
            f" the middle of a cycle; set config.train.steps={below} or {below + cycle}, or"
            " config.optim.cycle=0 for one cycle of any length",
        )
    if warmup >= cycle:
        yield (
            "optim.warmup",
            f"is {warmup}, as long as a cycle of config.optim.cycle={cycle} or longer; set"
            f" config.optim.warmup={max(1, cycle // 12)}",
        )


def on_this_machine(config: Config) -> Problems:
    """Yield missing files, packages and permissions of this machine. Nothing is left behind."""
    yield from _workdir_problems(config.workdir)
    folder = config.checkpoint.folder
    path, source = config.resume.path, config.warm_start.source
    if folder and "://" not in folder:
        why = unusable(folder)
        if why:
            yield "checkpoint.folder", f"is {folder!r}, which {why}; choose another folder"
    for name, place in (
        ("checkpoint.folder", folder),
        ("resume.path", path),
        ("warm_start.source", source),
    ):
        if why := unreachable(place):
            yield name, f"is {place!r}, which {why}"
    if path and "://" not in path and not (files.expanded(path) / "checkpoints").is_dir():
        yield (
            "resume.path",
            f"is {path!r}, which has no folder checkpoints; name the workdir of a run",
        )
    if source and "://" not in source:
        places = [files.expanded(source)]
        for workdir in filter(None, (config.workdir, path)):
            places.append(files.expanded(workdir) / "base")  # by warm_start.keep
        if not any(place.exists() for place in places):
            yield "warm_start.source", f"is {source!r}, which does not exist"
    for name, package in TRACKERS.items():
        if getattr(config.metrics, name) and not machine.has_package(package):
            extra = package.removesuffix("X")
            yield (
                f"metrics.{name}",
                f"needs the package {package}; install it with: pip install 'jaxtrain[{extra}]'",
            )


def _axis_problems(workload: str, axis_rules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Rules for axes that no array has: neither workloads nor their files name them, in quotes."""
    module = sys.modules.get(workload)
    if module is None:  # it could not be imported, which is reported already
        return
    source = "" if workload.startswith("jaxtrain.") else inspect.getsource(module)
    for axis in axis_rules:
        if axis not in AXIS_RULES and not re.search(rf"""["']{re.escape(axis)}["']""", source):
            expected = checks.expected(axis, AXIS_RULES)
            yield (
                f"mesh.axis_rules.{axis}",
                f"is a rule for an axis that no array of {workload} has; {expected}",
            )


def _workdir_problems(workdir: str) -> Iterator[tuple[str, str]]:
    why = unusable(workdir)
    if "://" in workdir:
        why = "is an address; only checkpoint.folder may be one"
    if why:
        yield "workdir", f"is {workdir!r}, which {why}; choose another folder"
        return
    path = pathlib.Path(workdir).absolute()
    existing = next(p for p in (path, *path.parents) if p.exists())
    if not existing.is_dir():
        yield "workdir", f"is {workdir!r}, but {existing} is a file; choose a folder"
        return
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield (
            "workdir",
            f"is {workdir!r}, which cannot be written ({error.strerror}: {existing}); choose"
            " another folder",
        )


def unusable(folder: str) -> str:
    """Why Orbax cannot keep checkpoints below a folder, or read them again. Empty if it can."""
    path = os.path.abspath(files.expanded(folder))
    if "\\" in path:
        return "has a backslash in its path, behind which Orbax finds no file again"
    address = re.match(r"/(gs|s3|az|hf)(/|$)", path) or re.search(r"/(gs|s3|az|hf):(/|$)", path)
    if address:
        return f"Orbax takes for an address, for its {address[0]!r}"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "has bytes in its path that are no UTF-8"
    return ""


def unreachable(path: str) -> str:
    """Why checkpoints cannot lie at a URL: its scheme or a missing package; else ""."""
    scheme, separator, _ = path.partition("://")
    if separator and scheme != "gs":
        expected = checks.expected(scheme, ("gs",))
        return f"is in no store of checkpoints; {expected}, or a path on a file system"
    if separator and not machine.has_package("gcsfs"):
        return "needs gcsfs; pip install 'jaxtrain[gcs]'"
    return ""
