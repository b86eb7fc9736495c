"""The language model in a small size, and the golden models of transformers."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs as specs_lib
from jaxtrain.arrays import warm_start
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.workloads.language import hugging_face as language_files
from jaxtrain.workloads.language import loss as language_loss
from jaxtrain.workloads.language import model as language
from loaders.base import Field
from tests.support.cases import Case

DATA = pathlib.Path(__file__).parents[2] / "data" / "lm"
MODELS = ("llama3", "qwen2", "qwen3")


def alone():
    return make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {}).shard


def context_of(name):
    """The length of the golden rows of a model."""
    return np.load(DATA / f"{name}.npz")["input_ids"].shape[1]


def load(folder, context, **changes):
    """Config and parameters of a folder from Hugging Face, in float32."""
    model, rules = language_files.from_hugging_face(folder)
    c = config_lib.section(
        language.Config, {**model, "context": context, "dtype": "float32", **changes}
    )
    rules = config_lib.section(config_lib.WarmStart, rules)
    assert not list(c.validate()) and not list(rules.validate())
    table = language.make_specs(c)
    layout = make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {})
    abstract = specs_lib.abstract(table, layout)
    flat = dict(zip(specs_lib.paths(abstract), jax.tree.leaves(abstract), strict=True))
    matches = warm_start.match(
        {p: (x.shape, x.dtype) for p, x in flat.items()}, warm_start.open_source(rules), rules
    )
    loaded = warm_start.load(matches, abstract)
    assert loaded.keys() == flat.keys()
    return c, jax.tree.unflatten(jax.tree.structure(abstract), [loaded[p] for p in flat])


def batch_of(ids, positions=None, segments=None, labels=None):
    ids = np.asarray(ids)
    positions = (
        np.broadcast_to(np.arange(ids.shape[1], dtype="i4"), ids.shape)
        if positions is None
        else positions
    )
    segments = np.ones_like(ids) if segments is None else segments
    if labels is None:
        labels = np.concatenate([ids[:, 1:], np.full((len(ids), 1), -100, "i4")], axis=1)
    fields = {
        "tokens": ids,
        "positions": positions,
        "segments": segments,
        "targets": labels,
        "mask": (labels >= 0) * np.float32(1),
    }
    return {name: jnp.asarray(x) for name, x in fields.items()} | {"row": jnp.arange(len(ids))}


BATCH, CONTEXT = 16, 16
TINY = language.Config(
    vocab=64,
    context=CONTEXT,
    embed=32,
    depth=3,
    heads=8,
    kv_heads=2,
    head_dim=4,
    mlp=48,
    dtype="float32",
    z_loss=1e-3,
    chunk=24,
    qk_norm=True,
    init_std=0.1,
)
FIELDS = {
    n: Field((CONTEXT,), np.dtype("f4" if n == "mask" else "i4"))
    for n in ("tokens", "targets", "positions", "segments", "mask")
}
OPTIM = config_lib.Optim(
    lr=0.01,
    schedule="constant",
    eps=1e-3,
    decayed="(^|/)w[^/]*$",
    undecayed="(^|/)(b|scale|bias|pos|embed)[^/]*$",
)


def packed_batch(seed, vocab=64):
    """Rows of documents of any length, some with padding. The loss counts unevenly over rows."""
    rng = np.random.default_rng(seed)
    batch = {name: np.zeros((BATCH, CONTEXT), "i4") for name in FIELDS}
    batch["tokens"], batch["targets"] = rng.integers(0, vocab, (2, BATCH, CONTEXT), dtype="i4")
    for row in range(BATCH):
        start, document = 0, 0
        while start < CONTEXT - 3 * (row % 2):
            length = min(int(rng.integers(1, CONTEXT)), CONTEXT - start)
            document += 1
            batch["segments"][row, start : start + length] = document
            batch["positions"][row, start : start + length] = np.arange(length)
            batch["mask"][row, start : start + length - 1] = row % 5 != 2
            start += length
    return batch | {"mask": batch["mask"].astype("f4")}


CASE = Case(language_loss, TINY, OPTIM, packed_batch)
DROPPED = dict(dropout=0.3, attention_dropout=0.2)
MATRIX = {
    "language": CASE,
    "language-dropout": CASE._replace(model=dataclasses.replace(TINY, **DROPPED)),
}
