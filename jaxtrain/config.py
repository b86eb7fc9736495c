"""Configuration: a `ConfigDict` from configs/*.py, overrides from the command line, one frozen `Config` out of them.

Defaults live on the dataclasses here, on the workload's ``Config`` (section ``model``) and on the loader's ``Config``
(section ``data``), and nowhere else; a config file states what differs. Every field ends in a gloss, ``# [unit]
meaning``, which `explain` prints. All mistakes are collected and raised together, before a device is touched.
"""

import ast
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import io
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OPTIMIZERS = ("adamw", "adam_atan2", "adafactor", "lion", "muon", "sign_sgd")
CORRECTIONS = ("outside", "inside")
SCHEDULES = ("constant", "cosine", "wsd", "three_phase")
MOMENTS = ("float32", "bfloat16", "int8")
MUON_SCALES = ("rms", "in_out", "out_in")
DECAY_SHAPES = ("linear", "cosine", "sqrt")
RESHAPE = re.compile(r"crop|pad|fold|grid (\d+)x(\d+) to (\d+)x(\d+)")  # what jaxtrain.warm_start knows


@dataclass(frozen=True)
class Train:
    """How long, how much at once, and when to look."""

    steps: int = 10_000  # [steps] optimizer steps of the whole run
    batch: int = 64  # [rows] global batch, whatever the number of devices
    accumulate: int = 1  # [microbatches] parts that a step is computed in; gradients are reduced once
    ema: float = 0.0  # [1] decay of the average of the parameters that evaluation uses; 0 = no average
    eval_every: int = 1_000  # [steps] between evaluations; the last step is always evaluated; 0 = only there
    eval_batches: int = 0  # [batches] of an evaluation during the run; 0 = all; the last one always takes all
    patience: int = 0  # [evaluations] in a row without progress of checkpoint.best after which a run ends; 0 = never
    min_delta: float = 0.0  # [1] by which checkpoint.best must improve to be progress

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in ("steps", "batch", "accumulate"):
            if getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}; it must be at least 1"
        if self.accumulate > 0 and self.batch % self.accumulate:
            yield "batch", f"is {self.batch}, which accumulate={self.accumulate} does not divide"
        if not 0 <= self.ema < 1:
            yield "ema", f"is {self.ema}; a decay lies in [0, 1), for example 0.999"
        if self.eval_batches < 0:
            yield "eval_batches", f"is {self.eval_batches}; use 0 for the whole test split"
        if self.eval_every < 0:
            yield "eval_every", f"is {self.eval_every}; use 0 for an evaluation at the end only"
        for name in ("patience", "min_delta"):
            if getattr(self, name) < 0:
                yield name, f"is {getattr(self, name)}; it must not be negative"
        if self.patience and not self.eval_every:
            yield "patience", f"is {self.patience}, and eval_every=0 looks at the end only; set eval_every"


@dataclass(frozen=True)
class Group:
    """Parameters that are optimised differently: those whose path contains a match of ``match``."""

    match: str = ""  # [regex] searched in the parameter's path, for example "^probe/"; the first group that matches wins
    lr: float | None = None  # [1/step] peak learning rate; None = optim.lr
    weight_decay: float | None = None  # [1] None = optim.weight_decay
    clip: float | None = None  # [norm] largest gradient norm of these, which then count in no other; None = optim.clip
    name: str | None = None  # [name] of the rule; None = optim.name
    freeze: bool = False  # [bool] leave these parameters as they were initialised


@dataclass(frozen=True)
class Optim:
    """A rule (`jaxtrain.optim.update_rules.UPDATE_RULES` has the formulas) behind a clip of the global gradient norm."""

    name: str = "adamw"  # [name] adamw, adam_atan2, adafactor, lion, muon, sign_sgd (of a table: only the rows that are read)
    lr: float = 1e-4  # [1/step] peak learning rate
    schedule: str = "cosine"  # [name] constant, cosine, wsd (warm-up, stable, decay), three_phase (wsd in shares of the run)
    warmup: int = 0  # [steps] linear rise from lr_init to lr
    decay: int = 0  # [steps] length of wsd's decay, the last steps of the run; 0 = none, in three_phase 20 %
    decay_shape: str = "linear"  # [name] of wsd's decay: linear, cosine, sqrt
    lr_init: float = 0.0  # [ratio of lr] learning rate of the first update when there is a warm-up
    lr_floor: float = 0.0  # [ratio of lr] learning rate at the end
    b1: float = 0.9  # [1] decay of the first moment
    b2: float = 0.999  # [1] decay of the second moment
    eps: float = 1e-8  # [1] added to the root of the second moment
    atan2_a: float = 1.0  # [1] adam_atan2: factor of the update; 1.27 makes atan2(1, 1) move by lr
    atan2_b: float = 1.0  # [1] adam_atan2: factor of the root of the second moment
    atan2_correction: str = "outside"  # [name] adam_atan2: where the first moment's bias is corrected, outside or inside atan2
    momentum: float = 0.95  # [1] muon: decay of the sum of gradients
    muon_scale: str = "rms"  # [name] muon: rms (moves as far as AdamW), or by fan-out / fan-in of kernels in_out or out_in
    rest: str = "adamw"  # [name] muon: rule of all but the hidden matrices: tables, heads, vectors
    moments: str = "float32"  # [name] how moments are kept: float32, bfloat16, int8 (8 bits, a scale for each row)
    masters: bool = False  # [bool] optimise float32 copies of the parameters: bfloat16 ones lose what is below a 256th of them
    offload: bool = False  # [bool] keep the optimizer's state in host memory, and bring it over for each update
    layer_decay: float = 1.0  # [1] factor of the learning rate from each layer to the one below
    layer_first: str = r"(^|/)(w_patch|b_patch|embed|pos|cls)[^/]*$"  # [regex] layer_decay: parameters below the first layer
    weight_decay: float = 0.05  # [1] decoupled, times the learning rate
    clip: float = 1.0  # [norm] largest global gradient norm; 0 = no clipping
    decayed: str = r"(^|/)w[^/]*$"  # [regex] parameters that weight decay applies to: the matrices
    undecayed: str = r"(^|/)(b|scale|bias|pos|cls|embed)[^/]*$"  # [regex] and those that it spares; each must match one of both
    groups: tuple[Group, ...] = ()  # [groups] exceptions, tried in order

    def problems(self) -> Iterator[tuple[str, str]]:
        patterns = {f"groups[{i}].match": group.match for i, group in enumerate(self.groups)}
        own = {name: getattr(self, name) for name in ("decayed", "undecayed", "layer_first")}
        for name, pattern in {**own, **patterns}.items():
            try:
                re.compile(pattern)
            except re.error as error:
                yield name, f"is {pattern!r}, which is no regular expression: {error}"
        for i, group in enumerate(self.groups):
            for name in ("lr", "weight_decay", "clip"):
                if (getattr(group, name) or 0) < 0:
                    yield f"groups[{i}].{name}", f"is {getattr(group, name)}; it must not be negative"
            if group.name not in (None, *OPTIMIZERS):
                yield f"groups[{i}].name", f"is {group.name!r}; {_choices(group.name, OPTIMIZERS)}"
        for name, allowed in (
            ("name", OPTIMIZERS),
            ("schedule", SCHEDULES),
            ("decay_shape", DECAY_SHAPES),
            ("atan2_correction", CORRECTIONS),
            ("moments", MOMENTS),
            ("muon_scale", MUON_SCALES),
            ("rest", tuple(name for name in OPTIMIZERS if name != "muon")),
        ):
            if (value := getattr(self, name)) not in allowed:
                yield name, f"is {value!r}; {_choices(value, allowed)}"
        used = {self.name, *(group.name for group in self.groups if group.name), *([self.rest] if self.name == "muon" else [])}
        if self.moments != "float32" and used <= {"adafactor", "sign_sgd"}:
            yield "moments", f"is {self.moments!r}, and {' and '.join(sorted(used))} use no such moments; leave it away"
        for name in ("warmup", "decay", "weight_decay", "clip", "lr_init", "lr_floor"):
            if getattr(self, name) < 0:
                yield name, f"is {getattr(self, name)}; it must not be negative"
        for name in ("atan2_a", "atan2_b"):
            if getattr(self, name) <= 0:
                yield name, f"is {getattr(self, name)}; it must be positive"
        if self.lr <= 0:
            yield "lr", f"is {self.lr}; it must be positive"
        if self.decay and self.schedule not in ("wsd", "three_phase"):
            yield (
                "decay",
                f"is {self.decay}, but only schedule='wsd' has a decay phase, and schedule is {self.schedule!r}",
            )
        if not 0 < self.layer_decay <= 1:
            yield "layer_decay", f"is {self.layer_decay}; it lies in (0, 1], for example 0.75; 1 = none"
        for name in ("b1", "b2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                yield name, f"is {getattr(self, name)}; a decay lies in [0, 1)"


# Which mesh axes an axis of an array is split over, in the words of `jaxtrain.layout`.
RULES: dict[str, str] = {
    "batch": "data,fsdp",
    "embed": "fsdp",
    "heads": "model",
    "kv_heads": "model?",  # often fewer than there are devices
    "mlp": "model",
    "vocab": "model?",  # a number of classes is what the data say: often prime
    "layer": "",
    "seq": "",
    "head_dim": "",
    "patch": "",
    "puzzle": "fsdp?",  # rows of an embedding table: as many as there are puzzles
    "rows": "data",  # of a batch, where the devices of a group work on all of its rows together
    "pixel": "fsdp",  # inputs of a matrix that reads a whole film window
    "voxel": "model?",  # as many as a brain mask has
}


@dataclass(frozen=True)
class Mesh:
    """The devices as a grid. At most one axis may be -1: whatever is left."""

    data: int = -1  # [devices] replicas, each with its share of the batch
    fsdp: int = 1  # [devices] shards of parameters and optimizer state, each with its share of the batch
    model: int = 1  # [devices] shards of the inner dimensions (heads, mlp, vocabulary)
    rules: dict[str, str] = field(default_factory=dict)  # [axis: mesh axes] overrides RULES, "fsdp,model?"

    def problems(self) -> Iterator[tuple[str, str]]:
        sizes = {name: getattr(self, name) for name in ("data", "fsdp", "model")}
        if sum(size == -1 for size in sizes.values()) > 1:
            yield "data", f"only one axis may be -1, and the mesh is {sizes}"
        for name, size in sizes.items():
            if size < 1 and size != -1:
                yield name, f"is {size}; use a positive number of devices, or -1 for the rest"
        for axis, rule in self.rules.items():
            for name in rule.removesuffix("?").split(","):
                if name and name not in sizes:
                    yield f"rules.{axis}", f"is {rule!r}; {_choices(name, sizes)}"


@dataclass(frozen=True)
class WarmStart:
    """Parameters to start from, when there is nothing to go on from; the rules are `jaxtrain.warm_start`'s."""

    source: str = ""  # [path] of a run, of one of its steps, or of a folder of safetensors; empty = initialise all
    step: int | None = None  # [step] of a run; None = its newest
    ema: bool = False  # [bool] take the run's average of the parameters
    renames: tuple[tuple[str, str], ...] = ()  # [(regex, replacement)] applied in order to the source's paths
    skip: tuple[str, ...] = ()  # [regex] parameters that stay as they are initialised
    unused: tuple[str, ...] = ()  # [regex] arrays of the source, renamed, that are not wanted
    reshape: dict[str, str] = field(default_factory=dict)  # [regex: how] crop, pad, fold, or for example "grid 32x8 to 16x8"

    def problems(self) -> Iterator[tuple[str, str]]:
        patterns = [(f"renames[{i}]", pattern) for i, (pattern, _) in enumerate(self.renames)]
        patterns += [(f"{name}[{i}]", p) for name in ("skip", "unused") for i, p in enumerate(getattr(self, name))]
        patterns += [(f"reshape.{pattern}", pattern) for pattern in self.reshape]
        for where, pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                yield where, f"is {pattern!r}, which is no regular expression: {error}"
        for pattern, how in self.reshape.items():
            if not RESHAPE.fullmatch(how):
                yield f"reshape.{pattern}", f"is {how!r}; there are: crop, pad, fold, and for example 'grid 32x8 to 16x8'"
        if not self.source and (patterns or self.ema or self.step is not None):
            yield "source", "is empty, but there are rules for it; name a run or a folder of safetensors"
        if self.source and "://" not in self.source and not pathlib.Path(self.source).expanduser().exists():
            yield "source", f"is {self.source!r}, which does not exist"


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters instead of all parameters (jaxtrain.lora); each parameter must match one of the three patterns."""

    rank: int = 0  # [1] of the adapters; 0 = train the parameters themselves
    alpha: float = 16.0  # [1] times B A over the rank
    adapt: str = r"(^|/)blocks/w_"  # [regex] matrices that get adapters
    train: str = ""  # [regex] parameters that are trained as they are; empty = none
    freeze: str = r"^(embed|pos|scale|bias|w_head)$|/(b|scale|bias)_[^/]*$"  # [regex] parameters that stay as they are
    dtype: str = "float32"  # [name] that adapted and frozen parameters are kept in: float32 or bfloat16

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.rank < 0:
            yield "rank", f"is {self.rank}; use a positive rank, or 0 for no adapters"
        if self.dtype not in ("float32", "bfloat16"):
            yield "dtype", f"is {self.dtype!r}; {_choices(self.dtype, ('float32', 'bfloat16'))}"
        for name in ("adapt", "train", "freeze"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                yield name, f"is {getattr(self, name)!r}, which is no regular expression: {error}"


@dataclass(frozen=True)
class Checkpoint:
    """Asynchronous checkpoints; `jaxtrain.checkpoint` lists the files of one."""

    folder: str = ""  # [path or URL] of the checkpoints, for example gs://bucket/run/checkpoints; empty = workdir/checkpoints

    every: int = 500  # [steps] between saves; the last step is always saved
    keep: int = 3  # [checkpoints] newest ones that stay on disk
    keep_every: int = 0  # [steps] checkpoints at multiples of this stay for good; 0 = none
    verify: bool = True  # [bool] compare every byte of a checkpoint with its checksums before going on from it
    best: str = ""  # [metric] whose best step stays for good: the largest value, or with "-" before it the smallest
    final: str = "resumable"  # [name] content of the last step: resumable, or weights (nothing can go on from those)
    on_error: str = "stop"  # [name] when a save fails: stop the run, or continue without that save

    def problems(self) -> Iterator[tuple[str, str]]:
        for name, low in (("every", 1), ("keep", 1), ("keep_every", 0)):
            if getattr(self, name) < low:
                yield name, f"is {getattr(self, name)}; it must be at least {low}"
        for name, allowed in (("final", ("resumable", "weights")), ("on_error", ("stop", "continue"))):
            if (value := getattr(self, name)) not in allowed:
                yield name, f"is {value!r}; {_choices(value, allowed)}"
        yield from _url_problems("folder", self.folder)


@dataclass(frozen=True)
class Resume:
    """Where a run goes on from. Checkpoints in its own workdir come first."""

    path: str = ""  # [path] workdir of another run whose newest checkpoint, all of it, this run begins with
    data: str = "exact"  # [name] "exact": the data must be those of the checkpoint; "restart": others, from their beginning

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.data not in ("exact", "restart"):
            yield "data", f"is {self.data!r}; {_choices(self.data, ('exact', 'restart'))}"
        if self.path and "://" not in self.path and not (pathlib.Path(self.path).expanduser() / "checkpoints").is_dir():
            yield "path", f"is {self.path!r}, which has no folder checkpoints; name the workdir of a run"
        yield from _url_problems("path", self.path)


@dataclass(frozen=True)
class Metrics:
    """What is written besides workdir/metrics.jsonl, which always is."""

    every: int = 10  # [steps] between records
    tensorboard: bool = False  # [bool] event files in workdir/tensorboard (extra: tensorboard)
    wandb_project: str = ""  # [name] Weights & Biases project; empty = off (extra: wandb)

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.every < 1:
            yield "every", f"is {self.every}; it must be at least 1"
        for wanted, package, extra in (
            (self.tensorboard, "tensorboardX", "tensorboard"),
            (self.wandb_project, "wandb", "wandb"),
        ):
            if wanted and importlib.util.find_spec(package) is None:
                yield (
                    "tensorboard" if extra == "tensorboard" else "wandb_project",
                    (f"needs the package {package}; install it with: pip install 'jaxtrain[{extra}]'"),
                )


@dataclass(frozen=True)
class Guard:
    """Steps that would do harm are skipped: alike on all processes, with the optimizer untouched, counted and logged."""

    spike: float = 0.0  # [ratio] gradient norm over its running average from which a step is skipped; 0 = non-finite ones only
    decay: float = 0.99  # [1] of that average
    settle: int = 100  # [steps] before spikes are judged
    patience: int = 10  # [steps] skipped in a row after which the run stops, or rewinds
    rewinds: int = 0  # [times] that it goes back to its last checkpoint instead; all batches since then count as skipped

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.spike and self.spike <= 1:
            yield "spike", f"is {self.spike}; a ratio above 1 is wanted, for example 10, or 0 for no limit"
        if not 0 <= self.decay < 1:
            yield "decay", f"is {self.decay}; a decay lies in [0, 1)"
        for name, low in (("settle", 0), ("patience", 1), ("rewinds", 0)):
            if getattr(self, name) < low:
                yield name, f"is {getattr(self, name)}; it must be at least {low}"


@dataclass(frozen=True)
class Preemption:
    """Signals at which a run saves and ends, to be started again. A second one ends it at once."""

    signals: tuple[str, ...] = ("SIGTERM", "SIGUSR2")  # [names] of the signals that ask for it
    exit_code: int = 75  # [code] with which the process then ends, for the scheduler to requeue it

    def problems(self) -> Iterator[tuple[str, str]]:
        for name in self.signals:
            if not hasattr(signal, name) or name in ("SIGKILL", "SIGSTOP", "SIGINT"):
                yield "signals", f"holds {name!r}, which cannot be used; for example SIGTERM, SIGUSR1, SIGUSR2"
        if not 0 < self.exit_code < 256:
            yield "exit_code", f"is {self.exit_code}; it lies in 1 … 255"


@dataclass(frozen=True)
class Distributed:
    """Bounds for processes that wait for each other."""

    init_timeout: int = 300  # [s] until all processes must have met
    start_timeout: int = 3600  # [s] for each part of the start (restore, compilation), after which the job is ended; 0 = never
    heartbeat_timeout: int = 120  # [s] after which a silent process is taken for dead
    step_timeout: int = 1800  # [s] without a step, a batch of an evaluation or a save, after which the job is ended; 0 = never

    def problems(self) -> Iterator[tuple[str, str]]:
        for name, low in (("init_timeout", 1), ("heartbeat_timeout", 1), ("start_timeout", 0), ("step_timeout", 0)):
            if getattr(self, name) < low:
                yield name, f"is {getattr(self, name)}; it must be at least {low}"


@dataclass(frozen=True)
class Config:
    """A whole run."""

    workload: str = "jaxtrain.workloads.bird"  # [module] what is trained; its Config is the section `model`
    loader: str = "loaders.spectrogram"  # [module] where rows come from; its Config is the section `data`
    workdir: str = ""  # [path] everything that the run writes; empty = runs/<name of the config file>
    seed: int = 0  # [1] of initialisation, order, crops and augmentation
    model: Any = None  # [section] of the workload
    data: Any = None  # [section] of the loader
    train: Train = field(default_factory=Train)  # [section]
    optim: Optim = field(default_factory=Optim)  # [section]
    mesh: Mesh = field(default_factory=Mesh)  # [section]
    warm_start: WarmStart = field(default_factory=WarmStart)  # [section]
    lora: Lora = field(default_factory=Lora)  # [section]
    checkpoint: Checkpoint = field(default_factory=Checkpoint)  # [section]
    resume: Resume = field(default_factory=Resume)  # [section]
    metrics: Metrics = field(default_factory=Metrics)  # [section]
    guard: Guard = field(default_factory=Guard)  # [section]
    preemption: Preemption = field(default_factory=Preemption)  # [section]
    distributed: Distributed = field(default_factory=Distributed)  # [section]
    compiler: dict[str, Any] = field(default_factory=dict)  # [option: value] of XLA, over those of jaxtrain/compiler.py

    def problems(self) -> Iterator[tuple[str, str]]:
        """Mistakes that only show between sections."""
        for name, value in self.compiler.items():
            if not name.startswith("xla_"):
                near = f"; say {name.lstrip('-')}" if name.startswith("--xla_") else ""
                yield f"compiler.{name}", f"is no option of XLA: their names begin with xla_{near}"
            elif not isinstance(value, bool | int | float | str):
                yield f"compiler.{name}", f"is {value!r} ({type(value).__name__}); true or false, a number or a text is wanted"
        if self.seed < 0 or self.seed >= 2**32:
            yield "seed", f"is {self.seed}; it must lie in [0, 2**32)"
        yield from _axis_problems(self.workload, self.mesh.rules)
        split = self.mesh.rules.get("batch", "data,fsdp").rstrip("?").split(",")
        known = [n for n in (getattr(self.mesh, name, 0) for name in split) if n > 0]
        devices, parts = functools.reduce(int.__mul__, known, 1), max(self.train.accumulate, 1)
        if self.train.batch > 0 and not self.train.batch % parts and self.train.batch % (devices * parts):
            low = self.train.batch // (devices * parts) * devices * parts
            yield (
                "train.batch",
                (
                    f"is {self.train.batch}, which mesh.data × mesh.fsdp × train.accumulate = {devices} × {parts} does not "
                    f"divide; the nearest that do are {low or devices * parts} and {low + devices * parts}"
                ),
            )
        if self.train.patience and not self.checkpoint.best:
            yield "train.patience", f"is {self.train.patience}, and checkpoint.best names no metric, for example '-loss'"
        steps, warmup = self.train.steps, self.optim.warmup
        if warmup > steps:
            yield "optim.warmup", f"is {warmup}, longer than train.steps={steps}"
        elif warmup + self.optim.decay > steps:
            yield "optim.decay", f"is {self.optim.decay}: with optim.warmup={warmup} longer than train.steps={steps}"


def _axis_problems(workload: str, rules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Rules for axes that no array has: neither known to all workloads, nor named, in quotes, in this one's own file."""
    module = sys.modules.get(workload)
    if module is None:  # it could not be imported, and that is told
        return
    own = "" if workload.startswith("jaxtrain.") else inspect.getsource(module)
    for axis in rules:
        if axis not in RULES and not re.search(rf"""["']{re.escape(axis)}["']""", own):
            yield f"mesh.rules.{axis}", f"is a rule for an axis that no array of {workload} has; {_choices(axis, RULES)}"


class ConfigError(ValueError):
    """Every mistake of a config at once, one line each."""

    def __init__(self, problems: Sequence[tuple[str, str]]):
        self.problems = tuple(problems)
        count = "a mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
        lines = (f"  config.{path} {text}" if path else f"  {text}" for path, text in problems)
        super().__init__("\n".join([f"the config has {count}:", *lines]))


class _Text(str):
    """A value from the command line: text, until the field's type says how to read it."""


def load(source: str, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Reads ``path.py`` or ``path.py:argument`` and applies (dotted path, text) overrides; checks everything.

    Raises:
      ConfigError: with all mistakes: unknown keys (and the nearest spelling), wrong types, values that do not fit
        together, data that is not there, a workdir that cannot be written.
    """
    name, tree = _read_file(source)
    problems = []
    for path, text in overrides:
        *parents, last = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                problems.append((path, f"cannot be set: {parent!r} is a value, not a section"))
                break
        else:
            node[last] = _Text(text)
    tree["workdir"] = tree.get("workdir") or f"runs/{name}"
    try:
        config = from_dict(tree)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return config


def from_dict(tree: Mapping[str, Any]) -> Config:
    """A checked `Config` from nested dictionaries. Raises ConfigError with all mistakes."""
    problems: list[tuple[str, str]] = []
    tree = dict(tree)
    sections: dict[str, Any] = {}
    for section, owner in (("model", "workload"), ("data", "loader")):
        module_name = str(tree.get(owner, getattr(Config, owner)))
        try:
            cls = importlib.import_module(module_name).Config
        except ModuleNotFoundError as error:
            problems.append((owner, f"is {module_name!r}, and importing it failed: {error}"))
        except AttributeError:
            problems.append((owner, f"is {module_name!r}, a module without a dataclass named Config"))
        else:
            sections[section] = _build(cls, tree.get(section) or {}, section, problems)
        tree.pop(section, None)
    config = dataclasses.replace(_build(Config, tree, "", problems), **sections)
    for path, section in (("", config), *((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))):
        if hasattr(section, "problems"):
            problems += [(f"{path}.{where}".strip("."), text) for where, text in section.problems()]
    problems += _workdir_problems(config.workdir)
    if len(sections) == 2:
        config = _take_facts(config, problems)
    if problems:
        raise ConfigError(problems)
    return config


def section(cls: type, tree: Mapping[str, Any]) -> Any:
    """One section, as a config.json has it, as its dataclass. Raises ConfigError."""
    problems: list[tuple[str, str]] = []
    found = _build(cls, tree, cls.__name__.lower(), problems)
    if problems:
        raise ConfigError(problems)
    return found


def _take_facts(config: Config, problems: list[tuple[str, str]]) -> Config:
    """Fills the model's None fields with what the data itself says. Skipped while the data section is wrong."""
    if any(path.startswith(("data", "loader")) for path, _ in problems):
        return config
    loader = importlib.import_module(config.loader)
    if problems and not getattr(config.data, "exists", lambda: True)():
        return config  # data that would have to be made first: not for a config that is refused anyway
    try:
        facts = loader.facts(config.data)
    except ValueError as error:
        problems.append(("data", str(error)))
        return config
    names = [f.name for f in dataclasses.fields(config.model) if getattr(config.model, f.name) is None and f.name in facts]
    model = dataclasses.replace(config.model, **{name: facts[name] for name in names})
    if hasattr(model, "data_problems"):
        problems += [(f"model.{where}", text) for where, text in model.data_problems(facts)]
    return dataclasses.replace(config, model=model)


def sweeps(source: str, overrides: Iterable[tuple[str, str]] = ()) -> list[tuple[Config, list[tuple[str, str]]]]:
    """Every point of a config's sweep, checked: (config, its overrides).

    The file's function ``sweeps()`` yields dictionaries, dotted path -> value. A point without a workdir of its own gets
    <workdir>/000 and so on.

    Raises:
      ConfigError: the mistakes of all points; there is no such function, or it yields nothing; a value is both given and
        swept; two points have one workdir.
    """
    overrides = list(overrides)
    _, module, _ = _module(source)
    if not hasattr(module, "sweeps"):
        raise ConfigError([("", f"file {source} defines no function sweeps(), which yields dictionaries of overrides")])
    base = os.path.abspath(load(source, overrides).workdir)
    points, problems = [], []
    for i, point in enumerate(module.sweeps()):
        if not isinstance(point, Mapping):
            problems.append(("", f"sweep {i} is {point!r}; a dictionary is wanted, for example {{'optim.lr': 1e-3}}"))
            continue
        problems += [(path, f"is given, and sweep {i} sets it too") for path, _ in overrides if path in point]
        point = {"workdir": os.path.join(base, f"{i:03}"), **point}
        texts = [*overrides, *((path, value if isinstance(value, str) else repr(value)) for path, value in point.items())]
        try:
            points.append((load(source, texts), texts))
        except ConfigError as error:
            problems += [(path, f"{text} (sweep {i})") for path, text in error.problems]
    workdirs = [os.path.abspath(config.workdir) for config, _ in points]
    problems += [
        ("workdir", f"is {w!r} in more than one sweep") for w in sorted({w for w in workdirs if workdirs.count(w) > 1})
    ]
    if not points and not problems:
        problems.append(("", f"function sweeps of {source} yields nothing"))
    if problems:
        raise ConfigError(problems)
    return points


def _read_file(source: str) -> tuple[str, dict[str, Any]]:
    file, module, argument = _module(source)
    if not hasattr(module, "get_config"):
        raise ConfigError([("", f"file {file} defines no function get_config(argument='')")])
    parameters = inspect.signature(module.get_config).parameters.values()
    if argument and not parameters:
        raise ConfigError([("", f"file {file} takes no argument, and {argument!r} is given")])
    try:
        wanted = argument or any(p.default is inspect.Parameter.empty for p in parameters)
        config = module.get_config(argument) if wanted else module.get_config()
    except ValueError as error:  # how a config tells that it cannot do with the argument
        raise ConfigError([("", f"file {file} says: {error}")]) from error
    return file.stem, config.to_dict() if hasattr(config, "to_dict") else dict(config)


def _module(source: str) -> tuple[pathlib.Path, types.ModuleType, str]:
    """A config's file, the module in it, and what follows the colon."""
    path, _, argument = source.partition(":")
    file = pathlib.Path(path)
    if not file.is_file():
        there = sorted(str(p) for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise ConfigError(
            [("", f"file {path} does not exist; {_choices(path, there) if there else f'{file.parent} holds none'}")]
        )
    spec = importlib.util.spec_from_file_location(f"jaxtrain_config_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return file, module, argument


def _build(cls: type, tree: Any, path: str, problems: list[tuple[str, str]]) -> Any:
    """A dataclass from a dictionary; wrong keys and values are noted, and their defaults stand in."""
    if not isinstance(tree, Mapping):
        problems.append((path, f"is {tree!r}; it is a section with the fields {_names(cls)}"))
        return cls()
    kinds = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        where = f"{path}.{key}".strip(".")
        if key not in kinds:
            problems.append((where, f"does not exist; {_choices(key, _names(cls))}"))
            continue
        try:
            values[key] = _convert(kinds[key], value, where, problems)
        except (TypeError, ValueError) as error:
            problems.append((where, str(error)))
    try:
        return cls(**values)
    except TypeError as error:
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and _has_no_default(f)]
        if not missing:
            raise
        problems += [(f"{path}.{name}".strip("."), "has no default and must be set") for name in missing]
        raise ConfigError(problems) from error


def _convert(kind: Any, value: Any, path: str, problems: list[tuple[str, str]]) -> Any:
    """``value`` as ``kind``, without guessing: 1 is a float, "1" and True are no ints. Text is read as ``kind`` needs."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, _Text) and value.lower() == "none"):
            return None
        return _convert(next(k for k in options if k is not types.NoneType), value, path, problems)
    if dataclasses.is_dataclass(kind):
        return _build(kind, _literal(value), path, problems)
    if kind is Any:
        return _literal(value)
    if kind is str:
        if isinstance(value, str):
            return str(value)
        raise TypeError(f"is {value!r} ({type(value).__name__}); a text is wanted")
    if kind is bool and isinstance(value, _Text) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    text, value = value, _literal(value)
    if origin is tuple:
        if isinstance(text, _Text) and isinstance(value, str) and options[0] is str and not set(value) & set("()[]{}'\""):
            value = tuple(filter(None, (name.strip() for name in value.split(","))))  # names, as a shell takes them
        if not isinstance(value, list | tuple):
            example = ("a", "b") if options[0] is str else (1, 2)
            raise TypeError(f"is {value!r}; a tuple is wanted, for example {example}")
        kinds = [options[0]] * len(value) if options[-1] is Ellipsis else options
        if len(kinds) != len(value):
            raise TypeError(f"is {value!r}; {len(kinds)} values are wanted")
        return tuple(_convert(k, v, f"{path}[{i}]", problems) for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"is {value!r}; a dictionary is wanted")
        return {
            _convert(options[0], k, path, problems): _convert(options[1], v, f"{path}.{k}", problems) for k, v in value.items()
        }
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"is {value!r} ({type(value).__name__}); {_article(kind)} is wanted")
    return value


def _literal(value: Any) -> Any:
    if not isinstance(value, _Text):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return str(value)


def _workdir_problems(workdir: str) -> Iterator[tuple[str, str]]:
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
            f"is {workdir!r}, which cannot be written ({error.strerror}: {existing}); choose another folder",
        )


def _url_problems(name: str, path: str) -> Iterator[tuple[str, str]]:
    """Of a path that may be a URL: whether what it is read and written with is installed."""
    scheme, separator, _ = path.partition("://")
    if separator and scheme != "gs":
        yield name, f"is {path!r}; {_choices(scheme, ('gs',))}, or a path on a file system"
    elif separator and not importlib.util.find_spec("gcsfs"):
        yield name, f"is {path!r}, which needs gcsfs; pip install 'jaxtrain[gcs]'"


def explain(config: Config) -> str:
    """Every field with its value, unit and meaning, one line each."""
    lines = []

    def walk(section: Any, path: str) -> None:
        glosses = gloss(type(section))
        for f in dataclasses.fields(section):
            value, where = getattr(section, f.name), f"{path}{f.name}"
            if dataclasses.is_dataclass(value):
                walk(value, f"{where}.")
            else:
                unit, meaning = glosses[f.name]
                lines.append((f"config.{where}", repr(value), unit, meaning))

    walk(config, "")
    widths = [min(max(len(line[i]) for line in lines), 40) for i in range(3)]
    return "\n".join("  ".join((*(c.ljust(w) for c, w in zip(line, widths, strict=False)), line[3])) for line in lines)


@functools.cache
def gloss(cls: type) -> dict[str, tuple[str, str]]:
    """Field -> (unit, meaning), from the comment that ends the field's line: ``name: type = default  # [unit] meaning``."""
    found = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_gloss(base)
    return found


def _own_gloss(cls: type) -> dict[str, tuple[str, str]]:
    source = inspect.getsource(cls)
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    body = ast.parse(inspect.cleandoc(source)).body[0].body
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign):
            unit, _, meaning = comments.get(node.end_lineno, "[]").removeprefix("[").partition("]")
            found[node.target.id] = (unit, meaning.strip())
    return found


def to_json(config: Config) -> str:
    """The resolved config as JSON, ready for `from_dict` again."""
    return json.dumps(dataclasses.asdict(config), indent=2)


def save(config: Config, folder: str | os.PathLike) -> None:
    """Writes config.json into ``folder``, whole or not at all."""
    path = pathlib.Path(folder) / "config.json"
    temporary = path.with_name(f".config.json.{os.getpid()}")
    temporary.write_text(to_json(config) + "\n")
    temporary.replace(path)


class Arguments(NamedTuple):
    """What the command line asks for."""

    source: str  # FILE[:ARG] of --config
    overrides: list[tuple[str, str]]  # (section.field, text)
    explain: bool
    plan: str | None  # the target, "" for this machine; None = no plan


def parse_args(argv: Sequence[str]) -> Arguments:
    """``--config=FILE[:ARG] --config.section.field=value … --explain --plan[=TARGET]``.

    Raises ConfigError for a missing --config and for every argument that is none of these.
    """
    source, overrides, want_explain, plan, problems = "", [], False, None, []
    rest = iter(argv)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag == "--explain" and not equals:
            want_explain = True
            continue
        if flag == "--plan":
            plan = value
            continue
        if flag != "--config" and not flag.startswith("--config."):
            problems.append(
                (
                    "",
                    f"argument {argument!r} is unknown; "
                    f"{_choices(flag, ('--config', '--explain', '--plan', '--config.section.field'))}",
                )
            )
            continue
        if not equals:
            value = next(rest, None)
            if value is None:
                problems.append((flag.removeprefix("--config").lstrip("."), "is given without a value"))
                continue
        if flag == "--config":
            source = value
        else:
            overrides.append((flag.removeprefix("--config."), value))
    if not source and not problems:
        problems.append(("", "file is missing; say for example --config=configs/xcm.py"))
    if problems and source:  # the config's own mistakes are told along with these
        try:
            load(source, overrides)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return Arguments(source, overrides, want_explain, plan)


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _has_no_default(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, kind.__name__)


def _choices(value: str, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.5)
    listed = f"there are: {', '.join(allowed)}"
    return f"did you mean {near[0]!r}? ({listed})" if near else listed
