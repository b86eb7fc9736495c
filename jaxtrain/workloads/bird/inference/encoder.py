"""An encoder out of a run or an export, and its way over a split, as the loader decodes."""

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.arrays import run_workload
from jaxtrain.arrays import source as source_lib
from jaxtrain.data import feed
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.types import PyTree
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.export import saved
from jaxtrain.workloads.bird.inference import InferenceError
from loaders.audio import front_end, shards, spectrogram
from loaders.audio.front_end import FrontEnd
from loaders.audio.recordings import windows
from loaders.audio.recordings.annotations import Errors
from loaders.base import DataError, Rows
from loaders.io import checks, files

AHEAD = 3  # [batches] that the loader may have on the device before it computes them
# Fields of a run's data section that decide how a recording reaches the encoder.
CLIPS = ("clip_seconds", "n_frames", "short", "short_fill", "time_expansion")


class Model(NamedTuple):
    """An encoder with its weights on the host."""

    config: bird.Config
    params: PyTree  # encoder
    head: PyTree | None  # of the supervised objective: w, b
    run: dict[str, Any]  # the run's whole config
    name: str
    probe: PyTree | None = None  # of the online probe: scale, bias, w, b
    path: str = ""  # step directory, or folder of an export; "" = initialised

    @property
    def front_end(self) -> FrontEnd:
        """The front end of its spectrograms. Raises InferenceError: none, or two are named."""
        try:
            return front_end.of_run(self.run)
        except ValueError as error:
            raise InferenceError(f"{self.name}: its config's {error}") from error

    @property
    def digest(self) -> str:
        """The encoder's identity: its weights, and its settings besides shapes."""
        c = self.config
        digest = hashlib.sha256()
        if c.mlp == "gelu_exact" or c.eps != vit.EPS or c.norm != "tokens":
            digest.update(repr((c.mlp, c.eps, c.norm)).encode())
        for path, x in zip(specs.paths(self.params), jax.tree.leaves(self.params), strict=True):
            digest.update(path.encode())
            digest.update(np.ascontiguousarray(x).tobytes())
        return digest.hexdigest()[:16]


def load(
    run: str, *, step: int | None = None, ema: bool = False, random: int | None = None
) -> Model:
    """Read the encoder of a run, a step or an export. Raises StoredError and InferenceError.

    ``step``: of a run; None is the best one if the run has config.checkpoint.best, else the newest.
    ``random``: a seed, by which the run's encoder is initialised instead of read.
    """
    source = source_lib.find_best(run, step)
    config = source.config(bird.__package__)
    arrays = source.parameters(ema=ema)
    c = config_lib.section(bird.Config, run_workload.model_of(config))
    if problems := list(checks.under("model", c.validate())):
        raise config_lib.ConfigError(problems)
    # A config may name any size: initialised or read, the encoder is no larger than the arrays.
    if misfits := saved.misfits(c, arrays):
        raise InferenceError(f"{run} is not as its config.model says: {misfits[0]}")
    if random is not None:
        table = {"encoder": vit.make_specs(c)}
        variables = specs.materialise(table, jax.random.key(random))
        params = jax.tree.map(np.asarray, variables["encoder"])
        return Model(c, params, None, config, f"{run}, initialised with seed {random}")
    heads = saved.heads(c, arrays)
    suffix = " (ema)" if ema else ""
    return Model(
        config=c,
        params=saved.encoder(c, arrays),
        head=heads.get("linear"),
        run=config,
        name=f"{source.path}{suffix}",
        probe=heads.get("probe"),
        path=str(source.path),
    )


def pool_of(model: Model) -> str:
    """Return the features that a run's own head reads: "cls" or "mean"."""
    return "cls" if model.config.pool == "cls" else "mean"


def refuse_missing(model: Model, kinds: Collection[str]) -> None:
    """Raise InferenceError if features of a class token are named, and the encoder has none."""
    if "cls" in kinds and not model.config.n_cls:
        raise InferenceError(
            f"{model.name} has no class token (its model.n_cls is 0), and so no features 'cls';"
            " use 'mean'"
        )


def data_config(model: Model, **changes: Any) -> spectrogram.Config:
    """Return the run's own data section with ``changes``. Nothing is held out or mixed in.

    The run may be anyone's: ``changes`` alone says which files are recordings, whether links are
    followed, and which addresses are read. Raises StoredError for an address of the run's own,
    InferenceError if the encoder was trained on other spectrograms.
    """
    run_data = {}
    for name, value in (model.run.get("data") or {}).items():
        if name in spectrogram.Config.__dataclass_fields__:
            run_data[name] = value
    for name in ("train", "test"):
        if name not in changes:
            source_lib.refuse_address(run_data.get(name), f"data.{name}", "--data")
            # it would be looked for on the whole disk, through links in circles
            if "**" in str(run_data.get(name)):
                raise InferenceError(
                    f"the run's config.data.{name} is {str(run_data[name])[:200]!r}; name the data"
                    " with --data"
                )
    fixed = dict(
        audio_root="",
        follow_links=False,
        test_share=0.0,
        exclude=(),
        exclude_paths=(),
        background="",
        bad_budget=1.0,
        form="spectrogram",
    )
    data: spectrogram.Config = config_lib.section(
        spectrogram.Config, {**run_data, **fixed, **changes}
    )
    if differences := model.front_end.differences(data.front_end):
        raise InferenceError(
            f"{model.name} was trained on other spectrograms than are asked for: {differences};"
            " omit those settings"
        )
    return data


def clips(data: spectrogram.Config) -> dict[str, Any]:
    """Return the settings besides the front end that decide how a recording reaches the encoder."""
    return {name: getattr(data, name) for name in CLIPS}


def of_split(data: spectrogram.Config, split: str) -> spectrogram.Config:
    """Return a data section that trains on ``split``, any of the data, and reads no other."""
    name = {"train": data.train_split, "test": data.test_split}.get(split, split)
    is_test = split in ("test", data.test_split)
    path = data.test if data.test and is_test else data.train
    # Shards that lie side by side are no splits by name: their test split is a share of them.
    folder = files.expanded(path)
    is_side_by_side = folder.is_dir() and not shards.has_split(folder, name)
    return dataclasses.replace(
        data,
        train=path,
        test="",
        train_split=name,
        test_split="test" if is_side_by_side else name,
    )


Arrays = Mapping[str, jax.Array]
Outputs = dict[str, jax.Array]


def cut_windows(
    recordings: Sequence[str], data: spectrogram.Config, *, overlap: float, **options: Any
) -> tuple[windows.Windows, Errors]:
    """Cut recordings into windows as long as a clip, of which ``overlap`` s are shared.

    Times are those of the files, also if these are slower than life. ``options``: those of
    `loaders.audio.recordings.windows.cut`. Returns the windows, and the recordings that cannot be
    read. Raises InferenceError, DataError.
    """
    if not 0 < data.time_expansion < float("inf"):
        raise InferenceError(
            f"--time-expansion is {data.time_expansion:g}; expected a number above 0"
        )
    seconds = round(data.clip_seconds * data.time_expansion, 6)
    if not 0 <= overlap < seconds:
        raise InferenceError(
            f"--overlap is {overlap}; windows have {seconds} s: use 0 or more, and less"
        )
    errors = windows.lenient()
    hop = round(seconds - overlap, 6)
    cut = windows.cut(
        recordings,
        seconds=seconds,
        hop=hop,
        time_expansion=data.time_expansion,
        errors=errors,
        **options,
    )
    return cut, errors


class Setup(NamedTuple):
    """The compiled encoder, its weights and the loader of a split."""

    run: Callable[[PyTree, Arrays], Outputs]  # compiled: weights, a batch -> outputs
    weights: PyTree
    shapes: Mapping[str, jax.ShapeDtypeStruct]  # of the outputs
    abstract: Mapping[str, jax.ShapeDtypeStruct]  # a batch
    rows: Rows
    loader: spectrogram.Spectrograms
    batch: int  # recordings
    n: int  # recordings of the split
    info: Mapping[str, Any]

    def stream(self) -> feed.Feed:
        return feed.Feed(self.loader, self.abstract, self.rows, depth=AHEAD)

    def outputs(
        self, stream: feed.Feed, last: int | None = None
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield number and outputs of batches up to ``last``, a batch ahead on the device."""
        pending: tuple[int, Any] | None = None
        for position, arrays in stream:
            started = (position, self.run(self.weights, arrays))
            if pending:
                yield pending[0], jax.device_get(pending[1])
            pending = started
            if position == last:
                break
        if pending:
            yield pending[0], jax.device_get(pending[1])


# Weights of its own, features "mean" and "cls" [B × views, D], patches [B × views, N, D], a batch
# -> outputs.
Compute = Callable[[PyTree, Arrays, jax.Array, Arrays], Outputs]


def set_up(
    model: Model,
    data: spectrogram.Config,
    compute: Compute,
    weights: PyTree,
    *,
    split: str = "train",
    batch: int = 64,
) -> Setup:
    """Open a split, and compile encoder and ``compute`` of ``weights`` for it. Raises DataError."""
    data = of_split(data, split)
    layout = make_layout(make_mesh(-1, 1, 1), {})
    n_devices = len(jax.devices())
    batch = -(-batch // n_devices) * n_devices
    abstract = {}
    for name, field in spectrogram.element_spec(data).items():
        shape = (batch, *field.shape)
        axes = ("batch", *(None,) * len(field.shape))
        sharding = layout.sharding(axes, shape)
        abstract[name] = jax.ShapeDtypeStruct(shape, field.dtype, sharding=sharding)
    rows = feed.rows_for(abstract)
    for path, problem in data.validate():
        raise DataError(f"data.{path} {problem}")
    loader = spectrogram.make_loader(data, split="train", rows=rows, seed=0, in_order=True)
    info = spectrogram.dataset_info(data)
    weights = jax.device_put((model.params, weights), layout.replicated())
    c = model.config

    @jax.jit
    def run(weights: tuple[Any, ...], batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        params, compute_weights = weights
        x = batch["spectrogram"].astype(jnp.float32)
        x = x.reshape(-1, c.n_frames, c.n_mels)
        cls, patches = vit.encode(c, params, x, layout.shard)
        pooled = {"mean": vit.pooled(c, params, patches)}
        if c.n_cls:
            pooled["cls"] = vit.pooled(c, params, cls)
        return compute(compute_weights, pooled, patches, batch)

    lowered = run.lower(weights, abstract)
    return Setup(
        run=lowered.compile(),
        weights=weights,
        shapes=lowered.out_info,
        abstract=abstract,
        rows=rows,
        loader=loader,
        batch=batch,
        n=info["n_train"],
        info=info,
    )
