"""The measured cases: the five workloads by their own configs, at two sizes.

One is for a large GPU, and a small one for a CPU.

A case is a config file with overrides. At full size the first of its choices is taken that fits by
the plan. The data are made here (`Data`) without a network, and the loaders read them as in any
run: the timed batch comes from the loader.
"""

import functools
import importlib
import itertools
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import plan as plan_lib
from jaxtrain import specs
from jaxtrain.assembly import Assembly, assemble
from jaxtrain.compile import xla_options
from jaxtrain.data import feed
from jaxtrain.parallel import cluster
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.plan.bound import Bound, bound
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import Batch
from loaders.audio import demo
from loaders.text import token_files

ROOT = pathlib.Path(__file__).parents[2]
ROOM = 0.9  # [share] of a device's memory that the plan's lower bound may fill
MAX_HALVINGS = 3  # of the rows of a case that does not fit where the plan says so
Overrides = Mapping[str, str]
Measured = TypeVar("Measured")


class Data:
    """Corpora in a folder, each made at its first use."""

    def __init__(self, folder: pathlib.Path, *, small: bool):
        self.folder, self.small = folder, small

    @functools.cached_property
    def birds(self) -> str:
        """The demo's recordings: Vorbis, MP3, FLAC and WAV, 3 to 60 s."""
        return str(demo.ensure(n_train=24, n_test=8) if self.small else demo.ensure())

    @functools.cached_property
    def tokens(self) -> str:
        """Documents of random tokens, 600 long on average, as `jaxtrain tokens` writes them."""
        vocab, n = (512, 200) if self.small else (128_000, 4_000)
        folder = self.folder / f"tokens-{vocab}"
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        lengths = (
            np.clip(rng.lognormal(6.0, 0.9, n), 16, 8_000).astype(int) // (20 if self.small else 1)
            + 2
        )
        documents = [rng.integers(0, vocab, length) for length in lengths]
        entry = token_files.write_shard(
            folder, "0", documents, (4 * lengths).tolist(), token_files.token_dtype(vocab)
        )
        token_files.write_about(folder, vocab=vocab, eos=None, tokenizer=None, shards=[entry])
        return str(folder)


class Case(NamedTuple):
    name: str
    model: str  # workload, as --models names it
    source: Callable[[Data], str]  # config file and its argument
    common: Callable[[Data], Overrides]
    choices: Sequence[Overrides]  # at full size, the best first
    small: Overrides
    unit: str  # of what is counted a second: rows, or tokens where the task has them

    def config(
        self, data: Data, choice: Overrides, more: Overrides | None = None
    ) -> config_lib.Config:
        """Raise ConfigError."""
        sizes = self.small if data.small else choice
        chosen = {
            **self.common(data),
            **sizes,
            **(more or {}),
            "workdir": str(data.folder / "runs"),
        }
        return config_lib.load(f"{ROOT}/{self.source(data)}", chosen.items())


def _each(name: str, values: Sequence[Any], **rest: str) -> list[Overrides]:
    return [
        {name: str(value), **{k.replace("__", "."): v for k, v in rest.items()}} for value in values
    ]


_TINY = {
    "model.embed": "64",
    "model.depth": "2",
    "model.heads": "4",
    "model.kv_heads": "2",
    "model.head_dim": "16",
    "model.mlp": "128",
    "model.vocab": "512",
    "model.remat": "none",
    "model.dtype": "float32",
}
_TINY_VIT = {
    "model.embed": "64",
    "model.depth": "2",
    "model.heads": "4",
    "model.patch": "(32, 32)",
    "model.dtype": "float32",
    "train.batch": "8",
}
_TINY_GIBLET = {
    **{
        f"model.{name}": "(32, 16)"
        for name in ("audio_widths", "text_widths", "decode_video_widths", "decode_audio_widths")
    },
    "model.decode_text_widths": "(32, 16)",
    "model.video_widths": "(32, 16, 16)",
    "model.trunk_widths": "(64, 64)",
    "model.decoder_widths": "(64, 64, 32, 32)",
    "model.bottleneck": "32",
    "model.head_width": "64",
    "train.batch": "8",
}


def _vit(preset: str) -> Case:
    return Case(
        f"vit-{preset}",
        "bird",
        lambda data: f"configs/xcm.py:{data.birds}",
        lambda data: {"train.accumulate": "1", "model.preset": preset},
        _each("train.batch", (2048, 1536, 1024, 768, 512, 256, 128)),
        _TINY_VIT,
        "spectrograms",
    )


def _language(context: int, batches: Sequence[int]) -> Case:
    return Case(
        f"lm-1b-{context // 1024}k",
        "language",
        lambda data: "configs/lm.py:llama-3.2-1b",
        lambda data: {
            "data.sources": f"({{'path': {data.tokens!r}}},)",
            **{
                f"{section}.context": str(128 if data.small else context)
                for section in ("model", "data")
            },
        },
        [
            *_each("train.batch", batches, model__remat="none"),
            *_each("train.batch", batches, model__remat="full"),
        ],
        {**_TINY, "train.batch": "8"},
        "tokens",
    )


def _trm(name: str, argument: str, **more: str) -> Case:
    return Case(
        name,
        "trm",
        lambda data: (
            "configs/trm_sudoku.py:4x4" if data.small else f"configs/trm_sudoku.py{argument}"
        ),
        lambda data: (
            {} if data.small else {"data.sources": "({'n_train': 1000, 'n_test': 16},)", **more}
        ),
        [*_each("train.accumulate", (1, 2, 4), train__batch="768")],
        {
            "data.sources": "({'kind': 'sudoku4', 'n_train': 64, 'n_test': 16, 'views': 0},)",
            "model.embed": "32",
            "model.puzzle_embed": "32",
            "train.batch": "16",
        },
        "rows",
    )


CASES = (
    _vit("s"),
    _vit("b"),
    _language(2048, (16, 8, 4)),
    _language(8192, (4, 2, 1)),
    _trm("trm", ""),
    # Its steps have one depth, the largest, which is what its FLOPs are counted of.
    _trm(
        "trm-last",
        ":extreme",
        **{f"model.{name}_steps": "0" for name in ("least", "first", "growth")},
    ),
    Case(
        "higgs-lora",
        "higgs",
        lambda data: "configs/higgs.py:blank",
        lambda data: {},
        _each("model.depth", (28, 24, 20, 16, 12, 8, 4)),
        {**_TINY, "train.batch": "2", "train.accumulate": "1"},
        "tokens",
    ),
    Case(
        "giblet",
        "giblet",
        lambda data: "configs/giblet.py:demo" if data.small else "configs/giblet.py:blank",
        lambda data: {},
        [
            {},
            {"model.param_dtype": "bfloat16"},
            {"model.param_dtype": "bfloat16", "optim.moments": "bfloat16"},
            {"model.param_dtype": "bfloat16", "optim.moments": "int8"},
            {"model.param_dtype": "bfloat16", "optim.name": "adafactor"},
            {
                "model.param_dtype": "bfloat16",
                "optim.name": "adafactor",
                "model.video_widths": "(2048, 2048, 1024)",
            },
        ],
        _TINY_GIBLET,
        "rows",
    ),
)
MODELS = tuple(dict.fromkeys(case.model for case in CASES))


class Chosen(NamedTuple):
    """A case, put together on one device."""

    assembly: Assembly
    bound: Bound
    choice: Overrides

    @property
    def stage(self) -> Any:
        """The last one, of which task.flops are."""
        return self.assembly.task.stage(self.assembly.config.train.steps - 1)


def on(device: jax.Device) -> jax.sharding.Mesh:
    return layout_lib.make_mesh(1, 1, 1, devices=[device])


def choose(case: Case, data: Data, device: jax.Device, more: Overrides | None = None) -> Chosen:
    """Return the first choice that fits by the plan, else the last one. Raises ConfigError.

    ``more``: settings of a variant, beyond those of the case.
    """
    memory = plan_lib.parse_target("").memory
    for choice in [{}] if data.small else case.choices:
        assembly = put_together(case.config(data, choice, more), device, choice)
        if assembly.bound.peak <= ROOM * memory:
            break
    return assembly


def put_together(config: config_lib.Config, device: jax.Device, choice: Overrides) -> Chosen:
    """Raise LayoutError, OptimError, and PlanError if nothing that is auto can be compiled."""
    target = plan_lib.parse_target("")
    config, _ = plan_lib.decide(config, target, "")
    assembly = assemble(plan_lib.resolve(config, target), on(device))
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    return Chosen(assembly, bound(assembly, traced, target), choice)


def smaller(chosen: Chosen) -> config_lib.Config | None:
    """Return a case that did not fit as planned with half the rows a microbatch, or None."""
    config = chosen.assembly.config
    rows = config.train.batch // config.train.accumulate
    if rows % 2:
        return None
    return replace(config, train=replace(config.train, batch=config.train.batch // 2))


def with_fewer_rows(
    chosen: Chosen, device: jax.Device, measure: Callable[[Chosen], Measured]
) -> Measured:
    """Return ``measure`` of a case, of half the rows again and again while they do not fit."""
    for _ in range(MAX_HALVINGS):
        try:
            return measure(chosen)
        except jax.errors.JaxRuntimeError as error:
            config = smaller(chosen)
            if "RESOURCE_EXHAUSTED" not in str(error) or config is None:
                raise
        chosen = put_together(config, device, chosen.choice)
    return measure(chosen)


def first_batch(assembly: Assembly) -> Batch:
    """Return a training batch of the loader, on the device, of the largest shape."""
    return batches(assembly, 1)[0]


def batches(assembly: Assembly, n: int) -> list[Batch]:
    """Return the first ones of the largest shape."""
    config, rows = assembly.config, feed.rows_for(assembly.abstract.batch)
    loader = importlib.import_module(config.loader).make_loader(
        config.data, split="train", rows=rows, seed=config.seed
    )
    taken: list[Batch] = []
    positions = itertools.count()
    try:
        while len(taken) < n:
            if loader.bucket_at(position := next(positions)) == len(loader.buckets) - 1:
                loader.seek(position)
                taken.append(feed.put(next(loader)[1], assembly.abstract.batch, rows))
        return taken
    finally:
        loader.close()


def compiled(chosen: Chosen) -> jax.stages.Compiled:
    """Compile the program of most steps with the options of a run."""
    a = chosen.assembly
    lowered = a.trace(chosen.stage, has_norms=a.has_norms(1)).lower()
    return xla_options.compile(lowered, a.compiler_options(), a.config.compiler)


class Steps:
    """A compiled step with a state of its own, on one batch that stays in place."""

    def __init__(self, chosen: Chosen, batch: Batch, program: Callable[..., Any] | None = None):
        self.assembly, self.batch = chosen.assembly, batch
        a = self.assembly
        self.program: Callable[..., tuple[Any, step_lib.Metrics]] = program or compiled(chosen)
        self._go_on = step_lib.put_stop(a.layout, False)
        self.state = state_lib.init_state(a.task, a.tx, a.abstract, jax.random.key(a.config.seed))

    def __call__(self, batch: Batch | None = None) -> step_lib.Metrics:
        """Start a step, and wait for no device."""
        self.state, out = self.program(
            self.state, self.batch if batch is None else batch, self._go_on
        )
        return out

    def seconds(self, at_least: float, *, n: int = 3) -> float:
        """Of a step on average, over ``at_least`` seconds, and ``n``, without the first two."""
        jax.block_until_ready([self() for _ in range(2)])
        begin = time.perf_counter()
        jax.block_until_ready([self() for _ in range(n)])
        each = (time.perf_counter() - begin) / n
        # the same on all processes, as each step waits for all of them
        n = cluster.agree(max(n, round(at_least / each)))
        begin, last = time.perf_counter(), None
        for _ in range(n):
            last = self()
        jax.block_until_ready(last)
        return (time.perf_counter() - begin) / n


def parameters(chosen: Chosen) -> int:
    return specs.count(chosen.assembly.task.specs.params) + specs.count(
        chosen.assembly.task.specs.frozen
    )
