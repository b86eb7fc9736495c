"""The sections of a config: every field with its unit, meaning and default.

Defaults live on these dataclasses, on the workload's ``Config`` (section ``model``) and on the
loader's ``Config`` (section ``data``), and nowhere else. A config file states the differences.
Every field has a gloss at its end or above it,
``# [unit] meaning``, which `jaxtrain.config.explain` prints.
``validate()`` names the errors that show in a section's own values; `jaxtrain.config.consistency`
has the errors that show between sections or on this machine.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple

from typing_extensions import TypeVar

from jaxtrain.config import factories
from loaders.io import checks
from loaders.io.checks import FREE, FUNCTION, STATE, DataSection, OnResume, Problems, Section

MAX_STEPS = 2**31 - 1  # a step is an int32
SCHEDULES = ("constant", "cosine", "cycle", "wsd", "three_phase")
# Fields in steps that may be given as a share of train.steps in 0 to 1. A Config has steps.
SHARES = (
    "optim.warmup",
    "optim.decay",
    "train.eval_every",
    "checkpoint.every",
    "checkpoint.keep_every",
    "metrics.every",
)
MESH_SIZES = ("data", "fsdp", "model")
# Fields that may be given as auto, and the sizes of the mesh. `jaxtrain.plan.auto` decides them.
AUTO_FIELDS = ("train.accumulate", "model.remat")
AUTO = (*AUTO_FIELDS, "mesh")
COMPILER_LEVELS = ("optimization_level", "memory_fitting_level")  # of `Config.compiler`
LEVELS = ("O0", "O1", "O2", "O3")
MAX_PATTERN = 10_000  # [characters] of a regular expression
MAX_REPLACEMENT = 200  # [characters] of a replacement
# the ways of jaxtrain.arrays.warm_start
RESHAPE = re.compile(r"crop|pad|fold|grid (\d+)x(\d+) to (\d+)x(\d+)")


class ModelSection(Section):
    """The section ``model``: the base class of a workload's ``Config``.

    ``facts``: fields that the data decide. Those that the data section also has are taken from it,
    the others from the dataset info. No config file and no flag sets them. config.json keeps them,
    so that a checkpoint can be used without its data.
    """

    facts: ClassVar[tuple[str, ...]] = ()
    # whether ``unroll`` = 0 leaves the number of layers to the plan (`jaxtrain.plan.choices`)
    unroll_by_plan: ClassVar[bool] = False
    doubted: ClassVar[tuple[str, ...]] = ()  # fields of a batch that `row_doubts` takes

    @property
    def reads_whole_microbatches(self) -> bool:
        """Whether a row's loss depends on the other rows of its microbatch, as in a batch norm."""
        return False

    def validate_data(self, info: Mapping[str, Any]) -> Problems:
        """Yield (field, problem with its remedy) for fields that contradict the dataset info."""
        return iter(())

    def validate_warm_start(
        self, source: Mapping[str, Any], place: str, data: DataSection
    ) -> Iterator[str]:
        """Yield why the weights of another run are no start of this one.

        Args:
          source: the config of that run, {} of weights of another system.
          place: its step directory, or the folder of safetensors.
          data: this run's section of that name.
        """
        return iter(())

    def foreign_model(self, folder: str) -> Mapping[str, Any]:
        """Return the section ``model`` that weights of another system were trained with, or {}."""
        return {}

    def validate_start(self, rules: "WarmStart") -> Problems:
        """Yield (field, text) if the weights of ``rules`` are of another kind of model."""
        return iter(())

    def data_notes(self, info: Mapping[str, Any]) -> Problems:
        """Yield (field, text) for unlikely values, unless the weights come from elsewhere."""
        return iter(())

    def row_doubts(self, rows: Mapping[str, Any]) -> str:
        """Return the reason for which a step of these rows is not finite, "" if it is not known.

        ``rows``: the fields `doubted` of this process's rows, as NumPy arrays.
        """
        return ""


@dataclass(frozen=True)
class Train(Section):
    """How long a run is, how large its steps are, and when it is evaluated."""

    on_resume = OnResume(FREE, state=("ema",))

    steps: int = 10_000  # [steps] optimizer steps of the whole run
    batch: int = 64  # [rows] global batch, for any number of devices
    # [microbatches] number of microbatches of a step, whose gradients are reduced once; auto = the
    # fewest that fit into memory
    accumulate: int = 1
    # [names] fields that are given as auto, of train.accumulate, model.remat and mesh: the plan
    # sets them before the first step, once
    auto: tuple[str, ...] = ()
    # [1] decay of the average of the parameters that evaluation uses; 0 = no average
    ema: float = 0.0
    # [steps] interval between evaluations, or a share of the run: 0.1; 0 = only after the last step
    eval_every: int = 1_000
    # [batches] number of batches in an evaluation during the run; 0 = all, as after the last step
    eval_batches: int = 0
    # [evaluations] number of evaluations in a row without progress of checkpoint.best, after which
    # a run ends; 0 = never
    patience: int = 0
    # [1] improvement of checkpoint.best that must be exceeded to count as progress
    min_delta: float = 0.0
    # [metric] value of checkpoint.best that must be passed before patience counts, as that of
    # guessing; None = it counts from the first evaluation
    patience_from: float | None = None
    # [metric] value of checkpoint.best that ends the run when an evaluation reaches it, as an
    # accuracy of 1 that nothing can improve; None = none does
    target: float | None = None

    def validate(self) -> Problems:
        yield from checks.at_least(self, 1, "steps", "batch", "accumulate")
        if self.steps > MAX_STEPS:
            yield "steps", f"is {self.steps}; it must be at most {MAX_STEPS}"
        if self.accumulate > 0 and self.batch % self.accumulate:
            yield "batch", f"is {self.batch}, which accumulate={self.accumulate} does not divide"
        yield from checks.within(self, "[0, 1)", "ema")
        yield from checks.not_negative(self, "eval_batches", "eval_every", "patience", "min_delta")
        if self.patience and not self.eval_every:
            yield (
                "patience",
                (
                    f"is {self.patience}, and eval_every=0 evaluates the last step only; set"
                    " eval_every"
                ),
            )
        if self.target is not None and not self.eval_every:
            yield (
                "target",
                f"is {self.target:g}, and eval_every=0 evaluates the last step only; set one",
            )


class UpdateRule(NamedTuple):
    """A built-in update rule: all that a config must know of it. `jaxtrain.optim` computes it."""

    moments: tuple[str, ...] = ()  # fields of its state that optim.moments narrows
    matrices: bool = False  # it updates hidden matrices only, and adamw all others
    # it keeps no state, and leaves rows of a table alone if the step has not read them
    sparse: bool = False
    repeatable: bool = True  # computing an update again costs less than keeping it


# adamw       m_hat / (sqrt(v_hat) + eps) (Loshchilov & Hutter 2019)
# adam_atan2  atan2(m_hat, sqrt(v_hat)) (Everett et al. 2024)
# adafactor   g / sqrt(v) with v of rank one: rows + columns numbers instead of rows × columns
#             (Shazeer & Stern 2018)
# lion        sign(b1 m + (1 - b1) g), then m <- b2 m + (1 - b2) g (Chen et al. 2023)
# muon        the orthogonal factor of each hidden matrix of momentum (Jordan et al. 2024);
#             tables, heads and vectors have `REST`
# sign_sgd    sign(g): a table of millions of rows needs no moments
UPDATE_RULES = {
    "adamw": UpdateRule(("mu", "nu")),
    "adam_atan2": UpdateRule(("mu", "nu")),
    "adafactor": UpdateRule(),
    "lion": UpdateRule(("mu",)),
    "muon": UpdateRule(("mu",), matrices=True, repeatable=False),
    "sign_sgd": UpdateRule(sparse=True),
}
# Fields of `Optim` that only built-in rules read.
ONLY_BUILT_IN = ("b1", "b2", "eps", "moments", "layer_decay", "weight_decay")
REST = "adamw"  # rule of all but the hidden matrices, if the rule is one for matrices
CHOICES = {  # values of fields of `Optim`
    "decay_shape": ("linear", "cosine", "sqrt"),
    "moments": ("float32", "bfloat16", "int8"),
}
# Fields that decide the learning rate. A schedule that is named as module:factory takes the place
# of the fourth and later ones.
OF_SCHEDULE = (
    "lr",
    "schedule",
    "schedule_arguments",
    "warmup",
    "cycle",
    "decay",
    "decay_shape",
    "lr_init",
    "lr_floor",
)


@dataclass(frozen=True)
class Group(Section):
    """Options for the parameters whose path contains a match of ``match``."""

    on_resume = OnResume(FREE, state=("match", "name", "freeze"))

    # [regex] searched in the parameter's path, for example "^probe/"; the first group that matches
    # wins
    match: str = ""
    lr: float | None = None  # [1/step] peak learning rate; None = optim.lr
    weight_decay: float | None = None  # [1] None = optim.weight_decay
    # [norm] largest norm of the group's own gradients, left out of the global one; None =
    # optim.clip
    clip: float | None = None
    name: str | None = None  # [name] built-in update rule; None = optim.name
    freeze: bool = False  # [bool] leave these parameters as they were initialised

    def validate(self) -> Problems:
        yield from _regexes({"match": self.match})
        yield from checks.not_negative(
            self, *(n for n in ("lr", "weight_decay", "clip") if getattr(self, n) is not None)
        )
        if self.name is not None:
            yield from checks.choice(self, UPDATE_RULES, "name")


@dataclass(frozen=True)
class Optim(Section):
    """A clip of the global gradient norm, then an update rule, at a scheduled learning rate.

    The rule is a built-in one or any optimizer of optax.

    ``name="module:factory"`` calls that function with ``arguments``, and with ``learning_rate``
    (step -> rate) if it has a parameter of this name. ``clip``, ``masters``, ``offload``, and
    ``freeze`` and ``clip`` of groups apply to it, too. The fields of built-in rules do not, and are
    errors if they are set. ``schedule="module:factory"`` calls a function that returns step ->
    learning rate, with ``schedule_arguments``, and with ``steps`` (train.steps) and
    ``learning_rate`` (``lr``) if it has such parameters.
    """

    on_resume = OnResume(FREE, state=("name", "arguments", "moments", "masters", "groups"))

    # [name] rule: adamw, adam_atan2, adafactor, lion, muon, sign_sgd, or module:factory as
    # optax:adamw
    name: str = "adamw"
    # [parameter: value] arguments of the optimizer's module:factory
    arguments: dict[str, Any] = field(default_factory=dict)
    lr: float = 1e-4  # [1/step] peak learning rate
    # [name] shape: constant, cosine, cycle (cosine again and again), wsd (warm-up, stable, decay),
    # three_phase (in shares) or module:factory
    schedule: str = "cosine"
    # [parameter: value] arguments of the schedule's module:factory
    schedule_arguments: dict[str, Any] = field(default_factory=dict)
    # [steps] linear rise from lr_init to lr; 0.05 = the first 5 % of the run, or of each cycle
    warmup: int = 0
    # [steps] length of one fall of schedule="cycle", after each of which a run may end; 0 = that of
    # the run
    cycle: int = 0
    # [steps] length of wsd's decay, the last of the run; 0 = none, in three_phase 20 %; 0.2 = its
    # last 20 %
    decay: int = 0
    decay_shape: str = "linear"  # [name] shape of wsd's decay: linear, cosine, sqrt
    lr_init: float = 0.0  # [ratio of lr] learning rate of the first update when there is a warm-up
    lr_floor: float = 0.0  # [ratio of lr] learning rate at the end
    clip: float = 1.0  # [norm] largest global gradient norm; 0 = no clipping
    # [1] weight decay of the built-in rules, decoupled, times the learning rate
    weight_decay: float = 0.05
    decayed: str = r"(^|/)w[^/]*$"  # [regex] parameters that weight decay applies to: the matrices
    # [regex] all others: each parameter must match one of the two
    undecayed: str = r"(^|/)(b|scale|bias|pos|cls|embed)[^/]*$"
    b1: float = 0.9  # [1] adamw, adam_atan2, lion: decay of the first moment
    b2: float = 0.999  # [1] decay of the second moment (adamw, adam_atan2) or of the first (lion)
    eps: float = 1e-8  # [1] number that adamw adds to the root of the second moment
    # [name] type of the built-in rules' moments: float32, bfloat16, int8 (8 bits, a scale for each
    # row)
    moments: str = "float32"
    # [bool] optimise float32 copies of the parameters: bfloat16 loses updates below a 256th of a
    # value
    masters: bool = False
    # [bool] keep the optimizer's state in host memory, and copy it to the device for each update
    offload: bool = False
    # [1] factor of the learning rate from each layer to the one below, in built-in rules; 1 = none.
    # Parameters named w_patch, b_patch, embed…, pos… and cls… are below the first layer
    layer_decay: float = 1.0
    groups: tuple[Group, ...] = ()  # [groups] exceptions, tried in order

    def validate(self) -> Problems:
        yield from _regexes({name: getattr(self, name) for name in ("decayed", "undecayed")})
        for i, group in enumerate(self.groups):
            yield from checks.under(f"groups[{i}]", group.validate())
        for name, built_in in (("name", UPDATE_RULES), ("schedule", SCHEDULES)):
            value = getattr(self, name)
            if factories.is_factory(value):
                continue
            choices = (*built_in, "module:factory")
            if "." not in value:
                yield from checks.choice(self, choices, name)
                continue
            module, _, function = value.rpartition(".")
            yield (
                name,
                f"is {value!r}; expected one of: {', '.join(choices)}; did you mean"
                f" {f'{module}:{function}'!r}?",
            )
        for name, values in CHOICES.items():
            yield from checks.choice(self, values, name)
        rules = {name: UPDATE_RULES[name] for name in self.rules() if name in UPDATE_RULES}
        if self.moments != "float32" and rules and not any(rule.moments for rule in rules.values()):
            names = " and ".join(sorted(rules))
            yield (
                "moments",
                f"is {self.moments!r}, and {names} keep no such moments; leave it unset",
            )
        yield from checks.not_negative(
            self, "warmup", "cycle", "decay", "weight_decay", "clip", "lr_init", "lr_floor"
        )
        yield from checks.positive(self, "lr")
        if self.cycle and self.schedule in set(SCHEDULES) - {"cycle"}:
            yield (
                "cycle",
                f"is {self.cycle}, and schedule={self.schedule!r} has no cycles; set"
                " config.optim.cycle=0 too, or choose schedule='cycle'",
            )
        if self.decay and self.schedule in ("constant", "cosine", "cycle"):
            yield (
                "decay",
                f"is {self.decay}, and schedule={self.schedule!r} has no decay phase; set"
                " config.optim.decay=0 too, or choose schedule='wsd'",
            )
        yield from checks.within(self, "(0, 1]", "layer_decay")
        yield from checks.within(self, "[0, 1)", "b1", "b2")

    def rules(self) -> set[str]:
        """Names of the rules, or of the optimizer, that may update a parameter."""
        names = {self.name}
        rule = UPDATE_RULES.get(self.name)
        if rule and rule.matrices:
            names.add(REST)
        for group in self.groups:
            if group.name:
                names.add(group.name)
        return names


# The mesh axes over which each logical axis is split, as `jaxtrain.parallel.layout` has it.
AXIS_RULES: dict[str, str] = {
    "batch": "data,fsdp",
    "embed": "fsdp",
    "heads": "model",
    "kv_heads": "model?",  # often fewer than there are devices
    "mlp": "model",
    "vocab": "model?",  # a number of classes comes from the data: often prime
    "layer": "",
    "seq": "",
    "head_dim": "",
    "patch": "",
    "item": "fsdp?",  # rows of an embedding table of the data's examples: often prime
    "rows": "data",  # of a batch whose rows all devices of a group work on together
    "input": "fsdp",  # inputs of a wide first matrix
    "output": "model?",  # outputs of a wide last matrix: as many as the data say
}


@dataclass(frozen=True)
class Mesh(Section):
    """The devices as a grid. One axis may be -1: all devices that are left.

    With ``mesh=auto`` the plan chooses the sizes before the first step (`jaxtrain plan --search`).
    """

    on_resume = OnResume(FREE)

    data: int = -1  # [devices] replicas, each with its share of the batch
    # [devices] shards of parameters and optimizer state, each with its share of the batch
    fsdp: int = 1
    model: int = 1  # [devices] shards of the inner dimensions (heads, mlp, vocabulary)
    # [axis: mesh axes] overrides AXIS_RULES; "fsdp,model?"
    axis_rules: dict[str, str] = field(default_factory=dict)

    def validate(self) -> Problems:
        sizes = {name: getattr(self, name) for name in MESH_SIZES}
        if sum(size == -1 for size in sizes.values()) > 1:
            yield "data", f"only one axis may be -1, and the mesh is {sizes}"
        for name, size in sizes.items():
            if size < 1 and size != -1:
                yield name, f"is {size}; use a positive number of devices, or -1 for the rest"
        for axis, rule in self.axis_rules.items():
            for name in rule.removesuffix("?").split(","):
                if name and name not in sizes:
                    yield f"axis_rules.{axis}", f"is {rule!r}; {checks.expected(name, sizes)}"


@dataclass(frozen=True)
class WarmStart(Section):
    """Parameters to start from if there is no checkpoint, by `jaxtrain.arrays.warm_start`."""

    # the source by its digest
    on_resume = OnResume(FUNCTION, free=("source", "keep", "other_front_end"))

    # [path] path of a run, of one of its steps, or of a folder of safetensors; empty = initialise
    # all
    source: str = ""
    ema: bool = False  # [bool] take the run's average of the parameters
    # [(regex, replacement)] renames of the source's paths, applied in order
    renames: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()  # [regex] parameters that stay as they are initialised
    # [regex] arrays of the source, by their new paths, that this model has no use for
    unused: tuple[str, ...] = ()
    # [regex: how] changes of shape: crop, pad, fold, or for example "grid 32x8 to 16x8"
    reshape: dict[str, str] = field(default_factory=dict)
    # [bool] copy the source into workdir/base, so that nothing else removes or changes it
    keep: bool = False
    # [bool] the source may have read inputs of another front end: other rates, windows, scales or
    # tokens
    other_front_end: bool = False

    def validate(self) -> Problems:
        patterns = {f"renames[{i}]": pattern for i, (pattern, _) in enumerate(self.renames)}
        patterns |= {
            f"{name}[{i}]": p
            for name in ("skip", "unused")
            for i, p in enumerate(getattr(self, name))
        }
        patterns |= {f"reshape.{pattern}": pattern for pattern in self.reshape}
        wrong = dict(_regexes(patterns))
        yield from wrong.items()
        for i, (pattern, replacement) in enumerate(self.renames):
            try:
                if len(replacement) > MAX_REPLACEMENT:
                    raise IndexError(
                        f"has {len(replacement):,} characters; expected at most {MAX_REPLACEMENT}"
                    )
                if f"renames[{i}]" not in wrong:
                    re.sub(pattern, replacement, "")
            except (re.error, IndexError) as error:
                yield f"renames[{i}]", f"cannot be replaced by {replacement[:200]!r}: {error}"
        for pattern, how in self.reshape.items():
            if not RESHAPE.fullmatch(how):
                yield (
                    f"reshape.{pattern}",
                    (
                        f"is {how!r}; expected one of: crop, pad, fold, or for example 'grid 32x8"
                        " to 16x8'"
                    ),
                )
        if not self.source and (patterns or self.ema or self.keep or self.other_front_end):
            yield (
                "source",
                "is empty, but there are rules for it; name a run or a folder of safetensors",
            )


@dataclass(frozen=True)
class Lora(Section):
    """Low-rank adapters instead of all parameters (jaxtrain.nn.lora).

    Each parameter must match one of the three patterns.
    """

    on_resume = OnResume(STATE, function=("alpha", "dtype"))

    rank: int = 0  # [1] rank of the adapters; 0 = train the parameters themselves
    alpha: float = 16.0  # [1] scale of the adapter: the update is alpha / rank · B A
    adapt: str = r"(^|/)blocks/w_"  # [regex] matrices that get adapters
    train: str = ""  # [regex] parameters that are trained without an adapter; empty = none
    # [regex] parameters that stay as they are
    freeze: str = r"^(embed|pos|scale|bias|w_head)$|/(b|scale|bias)_[^/]*$"
    # [name] type of adapted and frozen parameters: float32 or bfloat16
    dtype: str = "float32"

    def validate(self) -> Problems:
        if self.rank < 0:
            yield "rank", f"is {self.rank}; use a positive rank, or 0 for no adapters"
        yield from checks.choice(self, ("float32", "bfloat16"), "dtype")
        yield from _regexes({name: getattr(self, name) for name in ("adapt", "train", "freeze")})


@dataclass(frozen=True)
class Checkpoint(Section):
    """Asynchronous checkpoints. `jaxtrain.checkpoint.checkpointer` lists the files of one."""

    on_resume = OnResume(FREE)

    # [path or URL] folder of the checkpoints, for example gs://bucket/run/checkpoints; empty =
    # workdir/checkpoints
    folder: str = ""

    # [steps] interval between saves, or a share: 0.05. The last step, and with best each
    # evaluation, is saved too
    every: int = 500
    # [steps] interval between steps that a supervised run also keeps in the shared memory of its
    # hosts, from which a restart resumes; 0 = none
    memory_every: int = 0
    keep: int = 3  # [checkpoints] number of newest checkpoints that stay on disk
    keep_every: int = 0  # [steps] checkpoints at multiples of this stay for good; 0 = none
    # [metric] metric whose best step is kept: the largest value, or with "-" before it the smallest
    best: str = ""
    # [name] content of the last step: resumable, or weights (which nothing can resume from)
    final: str = "resumable"
    # [name] reaction to a save that fails: stop the run, or continue without it, as a supervised
    # run does in any case
    on_error: str = "stop"

    def validate(self) -> Problems:
        yield from checks.at_least(self, 1, "every", "keep")
        yield from checks.not_negative(self, "keep_every", "memory_every")
        yield from checks.choice(self, ("resumable", "weights"), "final")
        yield from checks.choice(self, ("stop", "continue"), "on_error")


@dataclass(frozen=True)
class Resume(Section):
    """The source of a resumed run. Checkpoints in its own workdir come first."""

    on_resume = OnResume(FREE)

    # [path] workdir of another run whose newest checkpoint, all of it, this run begins with
    path: str = ""
    # [name] "exact": the data must be those of the checkpoint; "restart": others, from their
    # beginning
    data: str = "exact"
    # [fields] fields, such as lora.alpha, that may differ from the checkpoint's and change the
    # function; "environment" = the options of JAX
    allow: tuple[str, ...] = ()

    def validate(self) -> Problems:
        yield from checks.choice(self, ("exact", "restart"), "data")


@dataclass(frozen=True)
class Metrics(Section):
    """Writers besides workdir/metrics.jsonl, which is always written."""

    on_resume = OnResume(FREE)

    every: int = 10  # [steps] interval between records
    # [bool] each record has a digest of the whole state, for jaxtrain diff and jaxtrain replay
    digest: bool = False
    tensorboard: bool = False  # [bool] event files in workdir/tensorboard (extra: tensorboard)
    # [steps] first and last step that process 0 traces into workdir/traces; empty = none
    profile: tuple[int, ...] = ()
    # [name] Weights & Biases project; empty = off (extra: wandb). WANDB_ENTITY, WANDB_RUN_GROUP,
    # WANDB_NAME, WANDB_TAGS and its other variables apply
    wandb_project: str = ""
    # [name] MLflow experiment at MLFLOW_TRACKING_URI; empty = off (extra: mlflow)
    mlflow_experiment: str = ""
    trackio_project: str = ""  # [name] Trackio project; empty = off (extra: trackio)

    def validate(self) -> Problems:
        yield from checks.at_least(self, 1, "every")
        if self.profile and (
            len(self.profile) != 2
            or not 1 <= self.profile[0] <= self.profile[1] < self.profile[0] + 1000
        ):
            yield (
                "profile",
                (
                    f"is {self.profile}; expected the first and last step of at most 1000, for"
                    " example (100, 103)"
                ),
            )


@dataclass(frozen=True)
class Guard(Section):
    """Skipping of non-finite steps and spikes on every process. A skipped step updates nothing."""

    on_resume = OnResume(FREE)

    # [ratio] ratio of gradient norm to its running average, above which a step is skipped; 0 =
    # non-finite only
    spike: float = 0.0
    # [1] decay of the running average of the gradient norm. No spike is looked for in the first
    # 1 / (1 - decay) steps
    decay: float = 0.99
    # [steps] number of steps skipped in a row, after which the run rewinds or stops
    patience: int = 10
    # [times] returns to the last checkpoint before the run stops; all batches since count as
    # skipped
    rewinds: int = 0
    # [steps] interval between verified steps, which are computed twice to find a device that
    # computes wrong; 0 = none
    verify_every: int = 0
    # [name] reaction to two different results: stop the run, or continue with the one that a third
    # confirms
    on_mismatch: str = "stop"

    def validate(self) -> Problems:
        if self.spike and self.spike <= 1:
            yield (
                "spike",
                f"is {self.spike}; expected a ratio above 1, for example 10, or 0 for no limit",
            )
        yield from checks.within(self, "[0, 1)", "decay")
        yield from checks.not_negative(self, "rewinds", "verify_every")
        yield from checks.choice(self, ("stop", "continue"), "on_mismatch")
        yield from checks.at_least(self, 1, "patience")


@dataclass(frozen=True)
class Preemption(Section):
    """A signal at which a run saves and ends, to be started again. A second one ends it at once."""

    on_resume = OnResume(FREE)
    # SIGTERM is a preemption's. SIGUSR1 and SIGUSR2 are a scheduler's notice before its time limit,
    # SIGHUP is a closed session's. Ctrl-C ends a run in the same way, with the code 130.
    signals = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")

    # [code] exit code after such a signal, for the scheduler to requeue the job
    exit_code: int = 75

    def validate(self) -> Problems:
        yield from checks.within(self, "[1, 255]", "exit_code")


@dataclass(frozen=True)
class Distributed(Section):
    """How long processes wait for each other."""

    on_resume = OnResume(FREE)

    init_timeout: int = 300  # [s] time within which all processes must have connected
    # [s] time without a heartbeat, after which a process counts as dead
    heartbeat_timeout: int = 120
    # [s] time without a step, a batch of an evaluation or a save, after which the job ends; 0 =
    # never. A part of the start (restore, compilation) may take an hour, or this if it is longer
    step_timeout: int = 1800

    def validate(self) -> Problems:
        yield from checks.at_least(self, 1, "init_timeout", "heartbeat_timeout")
        yield from checks.not_negative(self, "step_timeout")

    @property
    def start_timeout(self) -> int:
        """Seconds for each part of the start, after which the job is ended; 0 = never."""
        return max(3600, self.step_timeout) if self.step_timeout else 0


@dataclass(frozen=True)
class Supervise(Section):
    """When `jaxtrain train --supervise` gives up a run, or trains on without a lost host."""

    on_resume = OnResume(FREE)

    restarts: int = 20  # [times] restarts within an hour, after which the run is given up
    # [attempts] attempts in a row without progress, after which the run is given up
    idle: int = 3
    # [s] time for a lost host to return, after which the others train without it, and take it back
    # once it does; 0 = they do not
    wait: int = 0

    def validate(self) -> Problems:
        yield from checks.at_least(self, 1, "restarts", "idle")
        yield from checks.not_negative(self, "wait")


Model = TypeVar("Model", bound=ModelSection, default=Any)
Data = TypeVar("Data", bound=DataSection, default=Any)


# Overrides for commands that make runs of their own: such a run writes into its workdir alone.
WITHOUT_OUTPUTS = {
    "checkpoint.memory_every": "0",
    "checkpoint.folder": "",
    "metrics.tensorboard": "false",
    "metrics.wandb_project": "",
    "metrics.mlflow_experiment": "",
    "metrics.trackio_project": "",
}


@dataclass(frozen=True)
class Config(Section, Generic[Model, Data]):
    """A whole run: `Config[Model, Data]` by the sections of its workload and of its loader."""

    on_resume = OnResume(FUNCTION, free=("workdir", "compiler"), state=("workload",))

    workload: str = ""  # [module] module of the trained model; its Config is the section `model`
    loader: str = ""  # [module] module of the data; its Config is the section `data`
    # [path] folder of all files of the run; empty = runs/<name of the config file>
    workdir: str = ""
    seed: int = 0  # [1] seed of initialisation, order, crops and augmentation
    model: Model = None  # type: ignore[assignment]  # [section] of the workload
    data: Data = None  # type: ignore[assignment]  # [section] of the loader
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
    supervise: Supervise = field(default_factory=Supervise)  # [section]
    # [option: value] options of XLA, over those of jaxtrain.compile.xla_options; also
    # optimization_level and memory_fitting_level, O0 to O3
    compiler: dict[str, Any] = field(default_factory=dict)

    def validate(self) -> Problems:
        if self.seed < 0 or self.seed >= 2**32:
            yield "seed", f"is {self.seed}; it must lie in [0, 2**32)"
        for name, value in self.compiler.items():
            if name in COMPILER_LEVELS:
                if value not in LEVELS:
                    yield f"compiler.{name}", f"is {value!r}; expected one of: {', '.join(LEVELS)}"
            elif not name.startswith("xla_"):
                near = f"; say {name.lstrip('-')}" if name.startswith("--xla_") else ""
                yield (
                    f"compiler.{name}",
                    "is not an option of XLA: their names begin with xla_, or are"
                    f" {' and '.join(COMPILER_LEVELS)}{near}",
                )
            elif not isinstance(value, bool | int | float | str):
                text = (
                    f"is {value!r} ({type(value).__name__}); expected true or false, a number or a"
                    " string"
                )
                yield f"compiler.{name}", text


def _regexes(patterns: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Those of ``patterns``, field -> text, that are not regular expressions."""
    for name, pattern in patterns.items():
        if len(pattern) > MAX_PATTERN:
            yield name, f"has {len(pattern):,} characters; expected at most {MAX_PATTERN:,}"
            continue
        try:
            re.compile(pattern)
        # a count too large, parentheses too deep
        except (re.error, OverflowError, RecursionError) as error:
            yield name, f"is {pattern[:200]!r}, which is not a regular expression: {error}"
