"""The language model is compared with transformers' numbers, on meshes, and on its way from Hugging
Face and back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from jaxtrain import config as config_lib
from jaxtrain import specs as specs_lib
from jaxtrain.nn import transformer
from jaxtrain.optim import make_optimizer
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.run import metrics_logger
from jaxtrain.run.stream import Item
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import Variables
from jaxtrain.workloads.language import hugging_face as language_files
from jaxtrain.workloads.language import loss as language_loss
from jaxtrain.workloads.language import model as language
from loaders.base import Field
from loaders.text import tokens
from tests.support.cases import Run, assert_alike
from tests.support.cases.language import (
    CASE,
    DATA,
    FIELDS,
    MODELS,
    OPTIM,
    TINY,
    alone,
    batch_of,
    load,
)


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    g = np.load(DATA / f"{request.param}.npz")
    rows, context = g["input_ids"].shape
    c, params = load(DATA / request.param, context)
    task = language_loss.make_task(config_lib.Config(model=c), alone(), rows)
    return request.param, c, params, task, g


def test_logits_equal_transformers(golden):
    _, c, params, _, g = golden
    found = jax.jit(lambda p, b: language.logits(c, p, b, alone()))(
        params, batch_of(g["input_ids"])
    )
    np.testing.assert_allclose(found, g["logits"], rtol=0, atol=1e-4)


def test_loss_and_gradients_equal_transformers(golden):
    name, c, params, task, g = golden

    def loss(params):
        out = task.loss(Variables(params), batch_of(g["input_ids"]), None)
        return out.loss.total / out.loss.weight, out

    (value, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    np.testing.assert_allclose(value, g["loss"], rtol=1e-6)
    rows, context = g["input_ids"].shape
    assert out.loss.weight == rows * (context - 1)
    found = exported(c, grads)
    for key in g["grad_names"]:
        expected = g[f"grad/{key}"]
        np.testing.assert_allclose(
            found[str(key)], expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=key
        )


def exported(c, params):
    """Arrays under their exported names and shapes, by plain numpy."""
    section, found = dataclasses.asdict(c), {}
    for path, x in zip(
        specs_lib.paths(params), map(np.asarray, jax.tree.leaves(params)), strict=True
    ):
        names = language_files.export_names(section, path)
        for name, part in zip(
            *([names], [x]) if isinstance(names, str) else (names, x), strict=True
        ):
            found[name] = part.reshape(language_files.export_shape(section, path, part.shape))
    return found


def test_packed_documents_do_not_see_each_other(golden):
    _, c, params, task, g = golden
    batch = batch_of(
        g["packed_input_ids"], g["packed_positions"], g["packed_segment_ids"], g["packed_labels"]
    )
    found = np.asarray(jax.jit(lambda p, b: language.logits(c, p, b, alone()))(params, batch))
    documents = [name for name in g if name.startswith("packed_logits_doc")]
    assert len(documents) > 1
    expected = np.concatenate([g[f"packed_logits_doc{i}"] for i in range(len(documents))])
    held = found[g["packed_segment_ids"] > 0]
    np.testing.assert_allclose(held, expected, rtol=0, atol=1e-4)
    record = jax.jit(task.evaluate)(Variables(params), batch)["cross_entropy"]
    np.testing.assert_allclose(record.total / record.weight, g["packed_loss"], rtol=1e-5)


def test_both_spellings_of_config_json_say_the_same():
    for name in MODELS:
        assert language_files.read_config(
            DATA / name / "config.json"
        ) == language_files.read_config(DATA / name / "config.classic.json")


# Through the real step, on meshes and in parts.

ON_MODEL = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "") | {"seq": "model"}
SPLIT = {"batch": "data", "seq": "fsdp"}  # long rows: a sequence in parts


@pytest.fixture(scope="module")
def alone_two():
    return Run(CASE, (1, 1, 1)).take(2)


@pytest.mark.parametrize(
    ("mesh", "accumulate", "rules"),
    [
        ((2, 2, 2), 2, {}),
        ((2, 2, 2), 1, SPLIT),
        pytest.param((2, 4, 1), 2, SPLIT, marks=pytest.mark.slow),
        pytest.param((2, 1, 4), 1, ON_MODEL, marks=pytest.mark.slow),
    ],
)
def test_a_step_is_the_same_in_parts(alone_two, mesh, accumulate, rules):
    """The test covers rows in parts, and the sequence on a ring of devices."""
    assert_alike(alone_two, Run(CASE, mesh, accumulate, rules=rules).take(2), share=2e-4)


@pytest.mark.parametrize(
    "changes",
    [{}, dict(norm="layer", activation="gelu", tied=True, kv_heads=0), dict(window=48)],
    ids=str,
)
def test_flops_are_those_that_the_compiler_counts(changes):
    """FLOPs of loss and gradients agree within 5 %, since XLA computes masked places too. Its work
    besides matrix products is the rest."""
    c = dataclasses.replace(
        TINY,
        embed=128,
        depth=2,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp=384,
        vocab=1000,
        context=128,
        qk_norm=False,
        unroll=2,
        chunk=10_000,
    )
    c = dataclasses.replace(c, **changes)
    batch = 8
    task = language_loss.make_task(config_lib.Config(model=c), alone(), batch)
    shapes = {
        n: jax.ShapeDtypeStruct((batch, c.context), jnp.dtype("f4" if n == "mask" else "i4"))
        for n in FIELDS
    }
    shapes["row"] = jax.ShapeDtypeStruct((batch,), jnp.int32)
    params = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype),
        task.specs.params,
        is_leaf=specs_lib.is_spec,
    )
    step = jax.jit(jax.grad(lambda p, b: task.loss(Variables(p), b, None).loss.total))
    found = step.lower(params, shapes).compile().cost_analysis()["flops"]
    assert task.full_flops == pytest.approx(found, rel=0.05)
    seen = sum(min(t + 1, c.window or c.context) for t in range(c.context)) / c.context**2
    attention = 3 * batch * transformer.attention_flops(c, c.context, causal=False)
    assert task.full_flops - task.flops == pytest.approx((1 - seen) * attention)
    assert attention == 3 * batch * c.depth * 4 * c.context**2 * c.heads * c.k


@pytest.mark.parametrize("window", [0, 5])
def test_flops_by_documents_are_of_the_pairs_that_see_each_other(window):
    """A row of one document has those of a causal row, and padding has no pair."""
    c = language.Config(
        embed=8, depth=2, heads=2, mlp=16, vocab=32, context=24, window=window, bytes_per_token=1.0
    )
    whole, packed = np.ones((1, 24), int), np.array([[1] * 10 + [2] * 3 + [0] * 11])
    places = np.arange(24)[None]
    packed_places = np.array([[*range(10), *range(3), *[0] * 11]])
    causal = language.row_flops(c, 24, causal=True, frozen=False)
    assert language.document_flops(c, False, places, whole) == causal
    seen = [
        (i, j)
        for i, j in np.ndindex(24, 24)
        if j <= i and packed[0, i] == packed[0, j] > 0 and (not window or i - j < window)
    ]
    products = language.row_flops(c, 24, causal=True, frozen=False)
    products -= 3 * transformer.attention_flops(c, 24, causal=True)
    expected = products + 3 * 2 * 2 * 2 * 8 * len(seen)
    assert language.document_flops(c, False, packed_places, packed) == expected


def test_flops_are_those_of_the_rows_that_the_loader_makes():
    """A row may be shorter than the model's context, and frozen matrices have no derivative."""
    data = tokens.Config(context=TINY.context // 4)
    of_rows = config_lib.Config(model=TINY, data=data, loader="loaders.text.tokens")
    short = dataclasses.replace(TINY, context=TINY.context // 4)
    expected = language_loss.make_task(config_lib.Config(model=short), alone(), 8)
    task = language_loss.make_task(of_rows, alone(), 8)
    assert (task.flops, task.full_flops) == (expected.flops, expected.full_flops)
    assert task.tokens == 8 * data.context
    adapted = dataclasses.replace(of_rows, lora=config_lib.Lora(rank=2))
    frozen = language_loss.make_task(adapted, alone(), 8)
    products = 8 * data.context * transformer.token_flops(short, language.make_specs(short))
    assert task.flops - frozen.flops == products


@pytest.mark.slow
@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
    ("mesh", "kernels"), [((1, 2, 2), 4), ((1, 4, 1), 4), ((2, 2, 1), 0), ((4, 1, 1), 0)]
)
def test_a_step_for_tpus_compiles_and_has_their_kernel_where_data_is_not_split(mesh, kernels):
    """XLA compiles the real kernel for four chips that are not here: forward, recomputed, and the
    two kernels backward."""
    devices = list(topologies.get_topology_desc("v5e:2x2", platform="tpu").devices)
    sizes = dict(embed=256, heads=4, head_dim=64, mlp=512, vocab=1024, context=256, depth=2)
    c = dataclasses.replace(TINY, **sizes, dtype="bfloat16", remat="full")
    layout = make_layout(make_mesh(*mesh, devices=devices), {})
    task = language_loss.make_task(config_lib.Config(model=c), layout.shard, 8)
    tx = make_optimizer(OPTIM, task.specs.params, steps=10)
    fields = {name: Field((256,), field.dtype) for name, field in FIELDS.items()}
    plan = state_lib.make_abstract(task, tx, layout, fields, batch=8, ema=False)
    config = config_lib.Config(model=c, train=config_lib.Train(accumulate=2))
    step = step_lib.make_train_step(config, layout, task, tx, plan)
    text = step.lower(plan.state, plan.batch, step_lib.abstract_stop(layout)).compile().as_text()
    assert text.count("tpu_custom_call") >= kernels


def test_prompts_bind_the_context_where_there_are_prompts():
    """Lengths of texts that are never written are not an error."""
    info = {"vocab": 256, "context": 64}
    c = language.Config(vocab=256, context=64, generation=language.Generation(tokens=64))
    assert not list(c.validate_data(info))
    c = dataclasses.replace(c, generation=language.Generation(prompts=("a",), tokens=64))
    ((name, text),) = c.validate_data(info)
    assert name == "generation.tokens" and text.startswith(
        "is 64, and the model's context is 64, prompt included; "
    )
    assert (
        "; set config.model.generation.tokens=32, or write nothing:"
        " config.model.generation.prompts=()" in text
    )
    assert not list(
        dataclasses.replace(
            c, generation=language.Generation(prompts=("a",), tokens=32)
        ).validate_data(info)
    )
    ((name, text),) = dataclasses.replace(
        c, context=32, generation=language.Generation()
    ).validate_data(info)
    assert (name, text) == (
        "context",
        (
            "is 32, and the data need 64; set config.model.context=64, or shorter rows:"
            " config.data.context=32"
        ),
    )


def test_a_vocabulary_that_no_data_use_is_worth_a_word():
    """A model shrunk from a preset would consist almost only of rows that are never read."""
    small = dict(
        language_files.PRESETS["qwen3-0.6b"],
        embed=64,
        depth=2,
        heads=4,
        head_dim=16,
        kv_heads=2,
        mlp=128,
        context=64,
    )
    c = config_lib.section(language.Config, small)
    ((name, text),) = c.data_notes({"vocab": 512})
    assert name == "vocab" and text.startswith(
        "is 151,936, and the data have 512 tokens: 99% of the parameters are rows of"
    )
    assert "--config.model.vocab=None" in text
    assert not list(dataclasses.replace(c, vocab=512).data_notes({"vocab": 512}))
    whole = config_lib.section(
        language.Config, dict(language_files.PRESETS["qwen3-0.6b"], context=64)
    )
    assert not list(whole.data_notes({"vocab": 512})), "a quarter of the published model"


def test_a_bound_of_documents_below_one_is_named_once_and_without_a_wrong_remedy():
    c = dataclasses.replace(TINY, documents=0)
    assert dict(c.validate())["documents"] == "is 0; it must be at least 1"
    info = {"vocab": TINY.vocab, "context": TINY.context, "documents": 32}
    assert "documents" not in dict(c.validate_data(info))
    c = dataclasses.replace(TINY, documents=8)
    assert "set config.data.documents=8" in dict(c.validate_data(info))["documents"]


def test_rows_beyond_the_bound_of_documents_are_counted_for_a_skipped_step(caplog):
    """Attention on GPUs makes them NaN."""
    c = dataclasses.replace(TINY, documents=2)
    rows = np.array([[1, 1, 2, 2, 0, 0], [1, 2, 3, 4, 0, 0], [0, 0, 0, 0, 0, 0]], np.int32)
    assert c.row_doubts({"segments": rows[[0, 2]]}) == ""
    assert c.row_doubts({"segments": rows}) == (
        "1 of its 3 rows here have up to 4 documents, more than config.model.documents=2, for"
        " which attention on GPUs is NaN"
    )
    assert dataclasses.replace(TINY, documents=None).row_doubts({"segments": rows}) == ""
    item = Item(5, 4, 0, {"segments": jnp.asarray(rows), "index": jnp.arange(3)})
    record = {"loss": np.nan, "grad_norm": np.nan}
    metrics_logger._warn_of_skipped(5, record, item, c)
    assert "examples [0, 1, 2]; 1 of its 3 rows here have up to 4 documents" in caplog.text
