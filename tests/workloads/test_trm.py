"""The recursive model is compared with the original's numbers. The tests also cover its halting,
and its model state on meshes and in parts."""

import json
import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain import config as config_lib
from jaxtrain import specs as specs_lib
from jaxtrain.assembly import assemble
from jaxtrain.optim import make_optimizer
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.types import Variables
from jaxtrain.workloads.trm import boards as trm_boards
from jaxtrain.workloads.trm import loss as trm_loss
from jaxtrain.workloads.trm import model as trm
from loaders.base import Field
from tests.support.cases import Run, assert_alike, initial
from tests.support.cases.trm import CASE, OPTIM, TINY, WIDE, random_batch

DATA = pathlib.Path(__file__).parents[1] / "data"
VARIANTS = ("mlp_t", "attention")
GOLDEN = json.loads((DATA / "trm" / "config.json").read_text())


def one_device():
    """Everything on one device."""
    return make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {}).shard


def load(name):
    return dict(np.load(DATA / "trm" / f"{name}.npz"))


def golden_config(variant):
    g = GOLDEN[variant]
    return trm.Config(
        n_cells=g["seq_len"],
        vocab=g["vocab_size"],
        n_puzzles=g["num_puzzle_identifiers"],
        n_difficulties=1,
        mixer="mlp" if g["mlp_t"] else "attention",
        positions=g["pos_encodings"],
        embed=g["hidden_size"],
        heads=g["num_heads"],
        depth=g["L_layers"],
        expansion=g["expansion"],
        puzzle_tokens=g["puzzle_emb_len"],
        puzzle_embed=g["puzzle_emb_ndim"],
        rope_theta=g["rope_theta"],
        cycles_high=g["H_cycles"],
        cycles_low=g["L_cycles"],
        halt_steps=g["halt_max_steps"],
        explore=0.0,
        dtype="float32",
    )


def from_original(c, w, prefix=""):
    """Our parameters from arrays under the original's names. Its matrices are (out, in), one per
    layer."""
    d, h, k = c.embed, c.heads, c.embed // c.heads

    def layers(name, f):
        return np.stack([f(w[f"{prefix}L_level.layers.{l}.{name}.weight"]) for l in range(c.depth)])

    def gate_up(x):  # (2 m, in) -> (in, 2, m)
        return x.reshape(2, x.shape[0] // 2, x.shape[1]).transpose(2, 0, 1)

    net = {
        "w_up": layers("mlp.gate_up_proj", gate_up),
        "w_down": layers("mlp.down_proj", np.transpose),
    }
    if c.mixer == "mlp":
        net |= {
            "w_mix_up": layers("mlp_t.gate_up_proj", gate_up),
            "w_mix_down": layers("mlp_t.down_proj", np.transpose),
        }
    else:
        net["w_qkv"] = layers("self_attn.qkv_proj", lambda x: x.T.reshape(d, 3, h, k))
        net["w_out"] = layers("self_attn.o_proj", lambda x: x.T.reshape(h, k, d))
    return {
        "net": net,
        "w_cells": w[f"{prefix}embed_tokens.embedding_weight"],
        "w_symbols": w[f"{prefix}lm_head.weight"].T,
        "w_q": w[f"{prefix}q_head.weight"].T,
        "b_q": w[f"{prefix}q_head.bias"],
    }


class Golden:
    """One variant's task with the golden weights."""

    def __init__(self, variant):
        self.config, self.batch = golden_config(variant), GOLDEN[variant]["batch_size"]
        self.run = config_lib.Config(model=self.config, train=config_lib.Train(batch=self.batch))
        self.task = trm_loss.make_task(self.run, one_device(), self.batch)
        self.weights = load(f"{variant}_weights")
        self.params = from_original(self.config, self.weights)
        self.params["puzzle"] = {"w_rows": self.weights["puzzle_emb.weights"]}
        self.grad = jax.jit(jax.grad(self._total, has_aux=True))
        self.loss = jax.jit(self.task.loss)
        self.refine = jax.jit(self._refine)

    def _total(self, params, model_state, batch):
        out = self.task.loss(Variables(params, model_state=model_state), batch, jax.random.key(0))
        return out.loss.total / self.batch, out

    def _refine(self, params, model_state, batch):
        rows = trm_loss.reset_halted(model_state, batch)
        return trm.refine(self.config, params, rows, self.config.cycles, one_device())[2:]

    def model_state(self, g, prefix):
        current = {f: g[f"{prefix}.current.{o}"] for f, o in FIELDS.items()}
        state = {"z_h": g[f"{prefix}.z_H"], "z_l": g[f"{prefix}.z_L"]}
        fixed = {
            "init_h": self.weights["H_init"],
            "init_l": self.weights["L_init"],
            "step": np.int32(0),
        }
        return {
            **current,
            **state,
            **fixed,
            "steps": g[f"{prefix}.steps"],
            "halted": g[f"{prefix}.halted"],
        }


FIELDS = {"inputs": "inputs", "labels": "labels", "puzzle": "puzzle_identifiers"}


def batch_of(g, i):
    rows = {f: g[f"step{i}.batch.{o}"] for f, o in FIELDS.items()}
    n = len(rows["inputs"])
    return {**rows, "row": np.arange(n, dtype=np.int32), "weight": np.ones(n, "f4")}


@pytest.fixture(scope="module", params=VARIANTS)
def golden(request):
    return request.param, Golden(request.param)


def check_step(model, g, i, model_state, out):
    prefix, out = f"step{i}.carry", jax.device_get(out)
    for ours, theirs in {"z_h": "z_H", "z_l": "z_L"}.items():
        np.testing.assert_allclose(
            out.model_state[ours], g[f"{prefix}.{theirs}"], rtol=0, atol=1e-3
        )
    for ours, theirs in {**FIELDS, "steps": "steps", "halted": "halted"}.items():
        theirs = f"{prefix}.{'current.' if ours in FIELDS else ''}{theirs}"
        np.testing.assert_array_equal(out.model_state[ours], g[theirs], err_msg=theirs)
    np.testing.assert_allclose(out.loss.total, g[f"step{i}.loss"], rtol=1e-5, atol=5e-4)
    for name in ("lm_loss", "q_halt_loss"):
        np.testing.assert_allclose(
            out.metrics[name].total, g[f"step{i}.metrics.{name}"], rtol=1e-5, atol=5e-4
        )
    assert out.metrics["halted"].total == g[f"step{i}.metrics.count"]
    for name in ("exact_accuracy", "q_halt_accuracy", "steps"):
        assert out.metrics[name].total == g[f"step{i}.metrics.{name}"], name
        assert out.metrics[name].weight == g[f"step{i}.metrics.count"]
    np.testing.assert_allclose(
        out.metrics["accuracy"].total, g[f"step{i}.metrics.accuracy"], atol=1e-5
    )
    assert out.loss.weight == model.batch


def check_outputs(model, g, i, params, model_state):
    """logits, guesses and q of the step that starts with this model state."""
    newest = max(j for j in range(1, i + 1) if f"step{j}.batch.inputs" in g)
    logits, q = jax.device_get(model.refine(params, model_state, batch_of(g, newest)))
    np.testing.assert_allclose(logits, g[f"step{i}.out.logits"], rtol=0, atol=1e-3)
    np.testing.assert_array_equal(logits.argmax(-1), g[f"step{i}.out.preds"])
    np.testing.assert_allclose(q[:, 0], g[f"step{i}.out.q_halt_logits"], rtol=0, atol=1e-3)
    np.testing.assert_allclose(q[:, 1], g[f"step{i}.out.q_continue_logits"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["train", "halt"])
def test_training_steps_equal_the_originals(golden, kind):
    variant, model = golden
    g = load(f"{variant}_{kind}")
    params = {**model.params, "b_q": g.get("q_head.bias", model.params["b_q"])}
    model_state, steps = model.model_state(g, "initial"), sum(name.endswith(".loss") for name in g)
    assert steps
    for i in range(1, steps + 1):
        check_outputs(model, g, i, params, model_state)
        out = model.loss(
            Variables(params, model_state=model_state), batch_of(g, i), jax.random.key(0)
        )
        check_step(model, g, i, model_state, out)
        model_state = out.model_state


def test_gradients_and_the_tables_step_equal_the_originals(golden):
    variant, model = golden
    g, first = load(f"{variant}_grads"), load(f"{variant}_train")
    grads, out = jax.device_get(
        model.grad(model.params, model.model_state(first, "initial"), batch_of(first, 1))
    )
    table = grads["puzzle"].pop("w_rows")
    expected = {**from_original(model.config, g, "grad."), "puzzle": {}}
    for path, x, y in zip(
        specs_lib.paths(expected), jax.tree.leaves(expected), jax.tree.leaves(grads), strict=True
    ):
        np.testing.assert_allclose(y, x, rtol=0, atol=1e-4 * np.abs(x).max(), err_msg=path)
    ids, summed = g["puzzle_emb.unique_ids"], g["puzzle_emb.grad_per_unique_id"]
    np.testing.assert_allclose(table[ids], summed, rtol=0, atol=1e-4 * np.abs(summed).max())
    read = out.sparse_rows[trm_loss.TABLE]
    np.testing.assert_array_equal(
        read, np.bincount(g["puzzle_emb.local_ids"], minlength=model.config.n_puzzles)
    )

    optim = config_lib.Optim(
        name="sign_sgd",
        lr=float(g["signsgd.lr"]),
        weight_decay=float(g["signsgd.weight_decay"]),
        schedule="constant",
        clip=0.0,
    )
    params = {"puzzle": {"w_rows": jnp.asarray(model.params["puzzle"]["w_rows"])}}
    tx = make_optimizer(optim, {"puzzle": model.task.specs.params["puzzle"]}, steps=1)

    @jax.jit
    def stepped(params, grads):
        updates, _ = tx.update(grads, tx.init(params), params, sparse_rows=out.sparse_rows)
        return optax.apply_updates(params, updates)

    found = stepped(params, {"puzzle": {"w_rows": table}})["puzzle"]["w_rows"]
    np.testing.assert_allclose(found, g["signsgd.table_after"], rtol=0, atol=1e-6)


def test_an_evaluation_takes_every_step_and_equals_the_original(golden):
    variant, model = golden
    g = load(f"{variant}_eval")
    params = {**model.params, "b_q": g["q_head.bias"]}
    model_state, last = model.model_state(g, "initial"), GOLDEN[variant]["halt_max_steps"]
    for i in range(1, last + 1):
        check_outputs(model, g, i, params, model_state)
        model_state = {
            **model.model_state(g, f"step{i}.carry"),
            "halted": g[f"step{i}.carry.halted"],
        }
    batch = {**batch_of(g, 1), "difficulty": np.zeros(model.batch, "i4")}
    found = jax.device_get(
        jax.jit(model.task.evaluate)(
            Variables(params, model_state=model.model_state(g, "initial")), batch
        )
    )
    count = g[f"step{last}.metrics.count"]
    for name in ("exact_accuracy", "q_halt_accuracy"):
        assert (found[name].total, found[name].weight) == (g[f"step{last}.metrics.{name}"], count)
    np.testing.assert_allclose(
        found["accuracy"].total, g[f"step{last}.metrics.accuracy"], atol=1e-5
    )


@pytest.mark.parametrize(
    ("mixer", "positions", "expected"),
    [("mlp", "none", 5_028_866), ("attention", "rope", 6_828_034)],
)
def test_the_published_sizes(mixer, positions, expected):
    c = trm.Config(n_cells=81, vocab=11, n_puzzles=1, mixer=mixer, positions=positions)
    table = trm.make_specs(c)
    assert specs_lib.count(table) - specs_lib.count(table.pop("puzzle")) == expected


def test_the_q_head_starts_closed():
    c = replace(golden_config("mlp_t"), n_puzzles=1)
    params = initial(trm.make_specs(c))
    assert (params["w_q"] == 0).all() and (params["b_q"] == -5).all()
    assert (params["puzzle"]["w_rows"] == 0).all()


@pytest.mark.parametrize("name", ["trm/stablemax", "ce/ce"])
def test_stablemax_equals_float64_within_1e_6(name):
    g = np.load(DATA / f"{name}.npz")
    logits, expected = (
        g["logits"].astype("f4"),
        g["cross_entropy" if "trm" in name else "stablemax_ce"],
    )
    if "ce/" in name:  # stored in float64: the loss does not cause float32's rounding of the logits
        expected = reference(logits.astype("f8"), g["labels"])
        np.testing.assert_allclose(expected, g["stablemax_ce"], rtol=1e-6, atol=1e-6)
    found = trm_loss.cross_entropy(jnp.asarray(logits), jnp.asarray(g["labels"]), "stablemax")
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def reference(logits, labels):
    """The float64 value, from the definition."""
    s = np.where(logits >= 0, logits + 1, 1 / (1 - np.minimum(logits, 0)))
    p = np.take_along_axis(s, np.maximum(labels, 0)[..., None], -1)[..., 0] / s.sum(-1)
    return np.where(labels == trm.IGNORED, 0, -np.log(p))


def test_stablemax_of_extreme_logits_and_certain_answers():
    g = np.load(DATA / "ce" / "ce.npz")
    logits, labels = g["extreme_logits"].astype("f4"), g["extreme_labels"]
    found = trm_loss.cross_entropy(jnp.asarray(logits), jnp.asarray(labels), "stablemax")
    np.testing.assert_allclose(found, reference(logits.astype("f8"), labels), rtol=1e-6, atol=1e-6)
    # -log p of 1e-12: a difference of logs would lose it
    certain = np.array([[1e6, -1e6, -1e6], [3e5, 0, -7]], "f4")
    found = trm_loss.cross_entropy(jnp.asarray(certain), jnp.zeros(2, jnp.int32), "stablemax")
    s = np.where(certain >= 0, certain + 1.0, 1 / (1 - np.minimum(certain, 0).astype("f8")))
    np.testing.assert_allclose(found, np.log1p(s[:, 1:].sum(-1) / s[:, 0]), rtol=1e-6)


@pytest.mark.parametrize("kind", ["stablemax", "softmax"])
def test_gradients_of_both_losses(kind):
    g = np.load(DATA / "ce" / "ce.npz")
    labels = jnp.asarray(g["labels"])

    def total(logits):
        return trm_loss.cross_entropy(logits, labels, kind).sum() / float(g["n_valid"])

    value, grad = jax.value_and_grad(total)(jnp.asarray(g["logits"], jnp.float32))
    np.testing.assert_allclose(value, g[f"{kind}_mean"], rtol=2e-6)
    expected = g[f"{kind}_mean_grad"]
    np.testing.assert_allclose(grad, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


# Halting, in numbers that can be checked by hand.


def test_halting_takes_a_positive_q_the_last_step_or_neither():
    c = trm.Config(halt_steps=4)
    q = jnp.array([[1.0, 9], [-1, -9], [-1, -9], [0, 0], [2, 0], [2, 0]])
    found = trm_loss.halt(c, jnp.array([1, 1, 4, 2, 2, 4]), q, jnp.array([0, 0, 0, 0, 3, 9]))
    assert found.tolist() == [True, False, True, False, False, True]
    by_comparison = trm_loss.halt(
        replace(c, q_continue=True), jnp.array([1, 1]), q[:2], jnp.zeros(2, jnp.int32)
    )
    assert by_comparison.tolist() == [False, True]


def test_exploration_is_as_likely_as_told_and_uniform():
    c = trm.Config(halt_steps=5)
    found = np.asarray(trm_loss.least_steps(c, 0.3, jax.random.key(0), jnp.arange(20_000)))
    values, counts = np.unique(found, return_counts=True)
    assert values.tolist() == [0, 2, 3, 4, 5]
    np.testing.assert_allclose(counts / 20_000, [0.7, 0.075, 0.075, 0.075, 0.075], atol=0.01)


# On meshes and in parts, through the real step.


@pytest.fixture(scope="module")
def run():
    return Run(CASE, (1, 1, 1))


@pytest.fixture(scope="module")
def alone(run):
    return run.take(5)


def test_steps_are_the_same_in_parts(alone):
    """On a mesh, of microbatches."""
    assert_alike(alone, Run(CASE, (4, 2, 1), 2).take(5), share=2e-4)


def test_slots_take_new_rows_only_when_they_are_done(alone):
    halted, steps = np.ones(WIDE, bool), np.zeros(WIDE, int)
    held = {name: np.zeros((WIDE, 16)) for name in ("inputs", "labels")}
    kinds = set()
    for seed, (state, metrics) in enumerate(alone[0]):
        model_state, batch = state.variables.model_state, random_batch(seed)
        held = {name: np.where(halted[:, None], batch[name], held[name]) for name in held}
        steps = np.where(halted, 0, steps) + 1
        for name in held:
            np.testing.assert_array_equal(model_state[name], held[name])
        np.testing.assert_array_equal(model_state["steps"], steps)
        assert model_state["halted"][steps >= 3].all()
        assert metrics["halted"].total == model_state["halted"].sum()
        halted = model_state["halted"]
        kinds |= set(zip(steps.tolist(), halted.tolist(), strict=True))
        assert model_state["step"] == seed + 1
    assert kinds >= {(1, True), (1, False), (2, True), (2, False), (3, True)}, (
        "all ways of going on were seen"
    )


def test_only_touched_rows_of_the_table_move(run, alone):
    first = np.asarray(run.init().variables.params["puzzle"]["w_rows"])
    last = alone[0][-1][0].variables.params["puzzle"]["w_rows"]
    np.testing.assert_array_equal(first[12:], last[12:])
    assert (first[:12] != last[:12]).any(axis=1).all()


@pytest.mark.slow
def test_cycles_without_gradient_keep_no_activations(run):
    """The bytes that a step needs besides its arguments, as XLA plans them, are the same for 2 and
    for 6 high cycles."""

    def bytes_of(run):
        return run.step.memory_analysis().temp_size_in_bytes

    def cycles(**number):
        return Run(CASE._replace(model=replace(TINY, **number)), (1, 1, 1))

    assert TINY.cycles_high == 2
    two, six = bytes_of(run), bytes_of(cycles(cycles_high=6))
    assert six <= 1.05 * two
    assert bytes_of(cycles(cycles_low=6)) > 1.5 * two, (
        "while each low cycle of the last keeps its own"
    )


@pytest.mark.parametrize(
    ("loss", "q_continue"),
    [pytest.param("softmax", False, marks=pytest.mark.slow), ("stablemax", True)],
)
def test_variants_that_fail_in_the_original_train_here(loss, q_continue):
    """Overfits one batch."""
    model = replace(TINY, loss=loss, q_continue=q_continue)
    found, _ = Run(CASE._replace(model=model, batch=lambda seed: random_batch(0)), (1, 1, 1)).take(
        12
    )
    losses = [float(metrics["lm_loss"].total) for _, metrics in found]
    assert losses[-1] < 0.9 * losses[0]
    assert ("q_continue_loss" in found[0][1]) == q_continue


def test_curriculum_grows_to_the_full_cycles():
    c = replace(TINY, cycles_high=3, cycles_low=6, first_high=1, first_low=2, growth=100)
    found = [trm_loss.curriculum(c, step) for step in range(0, 130)]
    assert (
        found[0] == (1, 2)
        and found[50] == (2, 4)
        and found[99] == (2, 5)
        and set(found[100:]) == {(3, 6)}
    )
    assert len(set(found)) <= 3 + 6 and found == sorted(found)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (8, 1, 1), (2, 4, 1)])
def test_pictures_are_of_the_first_boards_on_every_mesh(mesh):
    """Rows that do not divide over the devices were refused: the first evaluation on eight of them
    ended the run."""
    fields = {name: Field(x.shape[1:], x.dtype) for name, x in random_batch(0).items()}
    config = config_lib.Config(model=TINY, optim=OPTIM, train=config_lib.Train(batch=WIDE))
    devices = jax.devices()[: np.prod(mesh)]
    run = assemble(
        config, make_mesh(*mesh, devices=devices), make_task=trm_loss.make_task, fields=fields
    )
    found = jax.eval_shape(run.task.progress, run.abstract.state.variables, run.abstract.batch)
    assert found["steps"].shape == (4, 36, 5 * 35)


def test_pictures_mark_wrong_cells():
    labels = jnp.asarray(np.arange(16)[None] % 4 + 2)
    inputs = labels.at[0, 0].set(1)
    guess = labels.at[0, 0].set(jnp.where(labels[0, 0] == 2, 3, 2))
    image = np.asarray(trm_boards.draw(inputs, labels, guess[None]))[0, ::-1]
    assert image.shape == (36, 3 * 35)
    tile = [image[0:8, board * 35 : board * 35 + 6] for board in range(3)]
    assert tile[0].min() == 1, "a blank"
    assert tile[1].mean() < 0.5 < tile[2].mean(), "a wrong guess is inverted, the solution is not"
    assert image[0:8, 35 + 7 : 35 + 13].max() == pytest.approx(0.8), "a given cell is grey"
