"""The types that every module agrees on."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Optional, Protocol, TypeVar

import jax

PyTree = Any
Array = jax.Array
Key = jax.Array
Axes = tuple[str | None, ...]  # logical axis names, one for each dimension
Batch = Mapping[str, Array]  # field -> [batch, ...]
Initializer = Callable[[Key, tuple[int, ...], Any], Array]  # (key, shape, dtype) -> array

T = TypeVar("T")
# OfData[int] is the type of a model's field that may be None in a config, which takes the data's
# value of that name (`jaxtrain.config.build`): a built config has an int.
if TYPE_CHECKING:
    OfData = Annotated[T, "None in a config file"]
else:
    OfData = Optional
OF_DATA: Any = None  # the default of such a field


class Shard(Protocol):
    """The part of the layout that a workload sees: a `Sharder`, or `one_device.shard`.

    `jaxtrain.parallel.layout` has the former.

    ``axes`` are logical axis names, one for each dimension. `jaxtrain.parallel.kernels` runs
    functions on each device's own part of arrays.
    """

    def __call__(self, x: Array, /, *axes: str | None) -> Array:
        """Pins ``x`` to the layout: ``shard(x, "batch", "seq", "embed")``."""
        ...

    @property
    def mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh | None:
        """The mesh, or None for one device, whose parts are the arrays themselves."""
        ...

    @property
    def devices(self) -> tuple[str, str]:
        """Platform and compute capability that the program is for."""
        ...

    def spec(self, shape: tuple[int, ...], axes: Axes) -> jax.sharding.PartitionSpec:
        """Return the partition of an array."""
        ...

    def names(self, axis: str | None, size: int) -> tuple[str, ...]:
        """Return the mesh axes that a dimension is split over."""
        ...

    def size(self, axis: str | None, size: int) -> int:
        """Into how many parts a dimension is split."""
        ...


class Unmerged:
    """Base of a parameter that is no array yet but multiplies like one (`jaxtrain.nn.lora`)."""

    def project(
        self, equation: str, x: Array, product: Callable[[str, Array, Array], Array]
    ) -> Array:
        """einsum(equation, x, the matrix) in x's dtype, by a ``product`` like `layers.product`."""
        raise NotImplementedError

    def project_each(
        self,
        equation: str,
        x: Array,
        others: Sequence[Any],
        product: Callable[[str, Array, Array], Array],
    ) -> list[Array]:
        """Return `project` with this parameter, and with each of ``others`` of its class."""
        return [w.project(equation, x, product) for w in (self, *others)]


class Spec(NamedTuple):
    """A parameter before it exists: one table of these yields everything else (`specs`)."""

    shape: tuple[int, ...]
    axes: Axes
    init: Initializer
    dtype: Any = "float32"


class Mean(NamedTuple):
    """A weighted mean, not divided yet: sums over microbatches and devices stay exact."""

    total: Array
    weight: Array


# Sums of an evaluation that are counts of C classes and no metrics; workdir/classes.jsonl has them.
# "classes" is [3, C]: rows of each class, rows of it with the right answer, answers. "confusions"
# is [C, C], by class and answer; optional.
COUNTS = ("classes", "confusions")


class Variables(NamedTuple):
    """The arrays that a task computes with."""

    params: PyTree  # differentiated, optimised, saved
    frozen: PyTree = ()  # read-only base weights; reloaded from their source, not saved again
    # task-owned, without gradient: teacher averages, batch statistics, recurrent state
    model_state: PyTree = ()


class LossOut(NamedTuple):
    """The result of `Task.loss`: sums over the rows that it was given."""

    loss: Mean
    metrics: dict[str, Mean]
    # as the loss leaves it; None = as it was, which spares a reduction of it over the data axis
    model_state: PyTree = ()
    # path of a table -> int32 [rows]: how often the loss read each row
    sparse_rows: Mapping[str, Array] = {}
    # path of a parameter -> float32 [], the sum of its gradient's squares. The step fills it in, by
    # `Task.measured`
    square_sums: Mapping[str, Array] = {}


class Example(NamedTuple):
    """A row of a batch, for a person: a workload's ``WORKLOAD.examples``."""

    id: str = ""  # empty = the loader's "index"
    text: str = ""
    pictures: Mapping[str, Any] = {}  # name -> [height, width] in 0..1, low rows at the bottom
    sound: tuple[Any, int] | None = None  # samples [n] in -1..1, and their rate [Hz]


class GenerativeEvaluation(NamedTuple):
    """A measurement that an evaluation makes besides summing over the test split."""

    run: Callable[[Variables], PyTree]  # on the devices of all processes; arrays
    score: Callable[
        [PyTree], tuple[dict[str, float], list[dict[str, Any]]]
    ]  # on one host -> for the record, for generations.jsonl


class Hub(NamedTuple):
    """The part of an export's card that describes the model, in the Hugging Face Hub's terms."""

    library: str = "jaxtrain"  # that loads the folder
    task: str = ""  # the Hub's pipeline_tag; empty = none of its tasks
    # of an evaluation, that say how good the model is, the first one most
    metrics: tuple[str, ...] = ()
    # how it is used, in the folder of the export; a shell command if it begins with "$ ", else
    # Python
    example: str = ""


EXPORT_FILE = "jaxtrain.json"  # of an export: the run's config, and which name is which parameter


class Export(NamedTuple):
    """How a workload's parameters are exported: what ``WORKLOAD.export`` returns, or the defaults.

    The command is `jaxtrain export`.

    ``model`` is the section of the saved config, and ``config`` the whole of it: dictionaries,
    since a checkpoint outlives changes of the dataclasses. ``path`` is a parameter's,
    ``encoder/blocks/w_qkv``.
    """

    # (model, path) -> its name; or a list of names for the entries of its first axis: a stack
    # becomes one array for each layer
    names: Callable[[Mapping[str, Any], str], str | list[str]] = lambda model, path: path.replace(
        "/", "."
    )
    # (model, path, shape) -> the shape of one such array: the same numbers in the same order
    shape: Callable[[Mapping[str, Any], str, tuple[int, ...]], tuple[int, ...]] = (
        lambda model, path, shape: shape
    )
    # (config, dtype of the arrays) -> name -> content of further files; a config.json takes the
    # place of the run's
    files: Callable[[Mapping[str, Any], str], dict[str, bytes]] = lambda config, dtype: {}
    # (config, names of the further files) -> the model's part of the card
    hub: Callable[[Mapping[str, Any], Collection[str]], Hub] = lambda config, files: Hub()
    # [regex] paths in the model state that belong to the model (running statistics), and are
    # exported under ``model_state.…``; "" = none
    model_state: str = ""
    # [regex] paths that ``files`` and ``hub``'s example need, without which it is a part of a model
    needed: str = "."
    # (model) -> name of an array that is not exported, since it equals another -> its name
    tied: Callable[[Mapping[str, Any]], dict[str, str]] = lambda model: {}
    peft_task: str | None = None  # task_type in the adapter_config.json of `jaxtrain lora-to-peft`


class Format(NamedTuple):
    """Another format of a workload's exports, for ``jaxtrain export --format NAME``.

    It is one of ``WORKLOAD.formats``.

    ``arrays`` are stored arrays by path. ``config`` is the saved run's.
    """

    # (arrays, model) -> the arrays under the format's names; None = the export's own. With it,
    # `export` is used
    rename: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    export: Export | None = None
    # (config, all arrays of the model, lines about the run) -> further files
    files: (
        Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, str]], dict[str, bytes]] | None
    ) = None
    example: str = ""  # for the card, as that of `Hub`


class Foreign(NamedTuple):
    """Weights of another system that a workload takes as its own: its ``WORKLOAD.foreign``.

    ``arrays`` are stored arrays by path, and ``folder`` holds them.
    """

    # (arrays, folder, whether jaxtrain wrote them) -> arrays by the paths of the workload's table
    arrays: Callable[[Mapping[str, Any], Any, bool], dict[str, Any]]
    # (folder) -> the config of a run that would have made them
    config: Callable[[Any], dict[str, Any]]


class DocumentFlops(NamedTuple):
    """Counts the model FLOPs of rows by the documents that they really have."""

    fields: tuple[str, ...]  # of a batch
    flops: Callable[..., float]  # rows of these fields, as NumPy arrays -> FLOPs of the rows


class Task(NamedTuple):
    """A workload as a value: a few pure functions over one table of parameters.

    A workload has ``config`` (a frozen dataclass; a field whose value is None takes the data's
    value of that name) and ``make_task(config, shard, batch) -> Task``, where ``config`` is the
    whole run's and ``batch`` the rows of a global step.

    `loss` and `evaluate` see some rows of the global batch, not all: a microbatch, one device
    group's share. They return sums over those rows (law 5). ``batch["row"]`` (int32) is each row's
    place in the global batch; random draws for a row fold it in, so that the same numbers are drawn
    on every mesh.

    A curriculum that changes the computation is a `stage`. If it is not None, `loss` takes it as
    the static argument ``stage``, and one program is compiled for each. Values that change from
    step to step without another program are traced.
    """

    specs: Variables  # trees of Spec
    loss: Callable[..., LossOut]  # (variables, batch, key), and stage= if the task has stages
    evaluate: Callable[[Variables, Batch], dict[str, Mean]]  # `COUNTS` among them are no metrics
    axes: dict[str, Axes]  # batch field -> logical axes, "batch" first
    # model FLOPs of one global step, forward and backward; of the last stage; masked places of
    # attention left out
    flops: int
    # (new params, …) -> model state
    advance: Callable[[PyTree, PyTree, Array], PyTree] = lambda params, state, step: state
    # name -> [n, height, width] in 0..1, as the model sees it
    pictures: Callable[[Batch], dict[str, Array]] = lambda batch: {}
    stage: Callable[[int], Hashable] = lambda step: None  # step -> static variant of the loss
    # like pictures, of a test batch at an evaluation
    progress: Callable[[Variables, Batch], dict[str, Array]] = lambda variables, batch: {}
    # means over a test split, also arrays -> its record
    finish: Callable[[Mapping[str, Any]], dict[str, float]] = dict
    generative: tuple[GenerativeEvaluation, ...] = ()
    # metrics of a training step that add up to its loss, for the console; () = it has one term
    terms: tuple[str, ...] = ()
    # paths of parameters whose gradient's sum of squares the backward pass finds without reading
    # the gradient. `loss` finds zeros in ``batch["square_sums"]``, float32 [] by path, if there
    # are no other microbatches, and their derivatives are the sums
    measured: tuple[str, ...] = ()
    tokens: float = 0  # places of a sequence model's global step, on average; 0 = it has none
    # the same with the places that a causal mask or a window leaves out; 0 = there are none
    full_flops: int = 0
    # of a batch's rows, with the places of other documents left out too; None = there are none
    document_flops: DocumentFlops | None = None
    # named arrays, rows first -> outputs: `jaxtrain.load`
    predict: Callable[[Variables, Batch], Any] | None = None
