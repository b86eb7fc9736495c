"""Adapters agree with peft's numbers, fit any workload's table, and survive the step and the
export."""

import dataclasses
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxtrain import config as config_lib
from jaxtrain import specs as specs_lib
from jaxtrain.arrays import peft
from jaxtrain.assembly import assemble
from jaxtrain.commands import export, lora_to_peft
from jaxtrain.config import Lora
from jaxtrain.nn import layers, lora
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.parallel import one_device
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import Variables
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.language import hugging_face as language_files
from jaxtrain.workloads.language import loss as language_loss
from jaxtrain.workloads.language import model as language
from jaxtrain.workloads.trm import loss as trm_loss
from jaxtrain.workloads.trm import model as trm
from tests.support import runs
from tests.support.cases import initial
from tests.support.cases import language as language_case

DATA = pathlib.Path(__file__).parents[1] / "data"
RANK4 = Lora(rank=4, alpha=8.0)


class Golden:
    """The golden adapter on its base model."""

    def __init__(self):
        self.g = np.load(DATA / "lora" / "lora.npz")
        rows, context = self.g["input_ids"].shape
        self.config, self.base = language_case.load(DATA / "lm" / "llama3", context)
        self.adapter = safetensors.numpy.load_file(
            DATA / "lora" / "adapter" / "adapter_model.safetensors"
        )
        self.plain = language_loss.make_task(
            config_lib.Config(model=self.config), language_case.alone(), rows
        )
        self.task = lora.adapt(self.plain, RANK4)
        params = specs_lib.map_specs(self._read, self.task.specs.params)
        frozen = {
            path: x
            for path, x in zip(specs_lib.paths(self.base), jax.tree.leaves(self.base), strict=True)
        }
        frozen = specs_lib.map_specs(lambda path, spec: frozen[path], self.task.specs.frozen)
        self.variables = Variables(params, frozen)
        self.batch = language_case.batch_of(self.g["input_ids"])

    def _names(self, path):
        matrix, _, side = path.rpartition("/")
        names = language_files.export_names(dataclasses.asdict(self.config), matrix)
        return [
            f"base_model.model.{n.removesuffix('.weight')}.{peft.SIDES[side]}.weight" for n in names
        ]

    def _read(self, path, spec):
        return jnp.asarray(
            np.stack([self.adapter[name] for name in self._names(path)]).reshape(spec.shape)
        )

    def exported(self, params):
        found = {}
        for path, x in zip(specs_lib.paths(params), jax.tree.leaves(params), strict=True):
            for name, part in zip(self._names(path), np.asarray(x), strict=True):
                found[name] = part.reshape(self.adapter[name].shape)
        return found


@pytest.fixture(scope="module")
def golden():
    return Golden()


def test_logits_equal_peft_with_and_without_the_adapter(golden):
    def logits(variables):
        params = lora.combine(RANK4, golden.plain.specs.params, variables).params
        return language.logits(golden.config, params, golden.batch, language_case.alone())

    found = jax.jit(logits)(golden.variables)
    for name in ("logits_adapter", "logits_merged"):
        np.testing.assert_allclose(found, golden.g[name], rtol=0, atol=1e-4)
    zero = jax.tree.map(jnp.zeros_like, golden.variables.params)
    np.testing.assert_allclose(
        jax.jit(logits)(golden.variables._replace(params=zero)),
        golden.g["logits_base"],
        rtol=0,
        atol=1e-4,
    )


def test_loss_and_gradients_equal_peft(golden):
    def loss(params):
        out = golden.task.loss(golden.variables._replace(params=params), golden.batch, None)
        return out.loss.total / out.loss.weight

    value, grads = jax.jit(jax.value_and_grad(loss))(golden.variables.params)
    np.testing.assert_allclose(value, golden.g["loss_adapter"], rtol=1e-6)
    found = golden.exported(grads)
    assert found.keys() == golden.adapter.keys()
    for name in golden.g["grad_names"]:
        expected = golden.g[f"grad/{name}"]
        np.testing.assert_allclose(
            found[str(name)], expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name
        )


def test_exports_are_pefts_adapter_and_merged_weights(golden, tmp_path):
    run = {
        "workload": "jaxtrain.workloads.language",
        "model": dataclasses.asdict(golden.config),
        "data": {},
        "train": {"steps": 9},
        "lora": dataclasses.asdict(RANK4),
        "warm_start": dataclasses.asdict(
            config_lib.section(
                config_lib.WarmStart, language_files.from_hugging_face(DATA / "lm" / "llama3")[1]
            )
        ),
    }
    runs.save(
        tmp_path,
        10,
        runs.state(0, 10) | {"params": golden.variables.params, "opt_state": (), "ema": ()},
        run=run,
    )
    assert lora_to_peft.main([str(tmp_path), "--out", str(tmp_path / "adapter")]) == 0
    found = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert found.keys() == golden.adapter.keys()
    for name, x in golden.adapter.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
        assert found[name].dtype == x.dtype
    ours, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "adapter", DATA / "lora" / "adapter")
    )
    ours["base_model_name_or_path"] = theirs["base_model_name_or_path"]
    assert ours == {name: theirs[name] for name in ours}

    assert export.main([str(tmp_path), "--out", str(tmp_path / "merged")]) == 0
    merged = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    base = safetensors.numpy.load_file(DATA / "lm" / "llama3" / "model.safetensors")
    assert {name: (x.shape, x.dtype) for name, x in merged.items()} == {
        name: (x.shape, x.dtype) for name, x in base.items()
    }
    for name in golden.g["merged_names"]:
        np.testing.assert_allclose(merged[str(name)], golden.g[f"merged/{name}"], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(
        merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"]
    )


def partly(folder, name, **patterns):
    """A run on a golden base model that adapts some matrices and trains other parameters
    directly."""
    model, start = language_files.from_hugging_face(DATA / "lm" / name)
    c = config_lib.section(language.Config, {**model, "context": 16, "dtype": "float32"})
    chosen = Lora(rank=2, alpha=8.0, freeze="", **patterns)
    table = language.make_specs(c)
    taken = [
        path
        for path in specs_lib.paths(table)
        if any(re.search(p, path) for p in (chosen.adapt, chosen.train) if p)
    ]
    rest = "|".join(f"^{path}$" for path in specs_lib.paths(table) if path not in taken)
    chosen = dataclasses.replace(chosen, freeze=rest)
    task = lora.adapt(
        language_loss.make_task(config_lib.Config(model=c), language_case.alone(), 2), chosen
    )
    params = initial(task.specs, 3).params
    params = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params
    )
    run = {
        "workload": "jaxtrain.workloads.language",
        "model": dataclasses.asdict(c),
        "data": {},
        "train": {"steps": 9},
        "lora": dataclasses.asdict(chosen),
        "warm_start": dataclasses.asdict(config_lib.section(config_lib.WarmStart, start)),
    }
    runs.save(
        folder, 10, runs.state(0, 10) | {"params": params, "opt_state": (), "ema": ()}, run=run
    )
    return folder


@pytest.mark.parametrize(
    ("name", "train", "saved"),
    [
        (
            "llama3",
            "^(embed|w_head|scale)$|scale_mlp$",
            ["embed_tokens", "lm_head", "model.norm", "post_attention_layernorm"],
        ),
        ("qwen3", "w_down|scale_q", ["down_proj", "q_norm"]),
        ("qwen2", "^embed$", ["embed_tokens", "lm_head"]),  # tied
    ],
)
def test_parameters_that_were_trained_themselves_are_in_the_adapter(tmp_path, name, train, saved):
    run = partly(tmp_path / "run", name, adapt=r"w_[qv]$|w_up", train=train)
    assert lora_to_peft.main([str(run), "--out", str(tmp_path / "adapter")]) == 0
    assert export.main([str(run), "--out", str(tmp_path / "merged")]) == 0
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    tied = json.loads((DATA / "lm" / name / "config.json").read_text())["tie_word_embeddings"]
    assert about["target_modules"] == ["q_proj", "up_proj", "v_proj"]
    assert about["modules_to_save"] == [
        x for x in saved if x != "lm_head" or tied or "w_head" in train
    ]
    found = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    merged = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    whole = {
        key.removeprefix("base_model.model."): x for key, x in found.items() if ".lora_" not in key
    }
    copies = {"lm_head.weight"} if tied else set()
    for key, x in whole.items():
        np.testing.assert_array_equal(
            x, merged["model.embed_tokens.weight" if key in copies else key], err_msg=key
        )
    base = safetensors.numpy.load_file(DATA / "lm" / name / "model.safetensors")
    changed = {key for key, x in merged.items() if not np.array_equal(x, base[key])}
    adapted = {
        key.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        for key in found
        if ".lora_A" in key
    }
    assert changed == set(whole) - (copies - set(base)) | adapted, (
        "all that was trained, and nothing else"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train"),
    [
        ("llama3", "^(embed|w_head|scale)$|scale_mlp$"),
        ("qwen3", "w_down|scale_q"),
        ("qwen2", "^embed$"),
    ],
)
def test_peft_on_the_base_model_is_the_merged_export(tmp_path, name, train):
    """This needs peft, transformers and torch (dependency group "peers")."""
    peft_lib, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    run = partly(tmp_path / "run", name, adapt=r"w_[qv]$|w_up", train=train)
    assert lora_to_peft.main([str(run), "--out", str(tmp_path / "adapter")]) == 0
    assert export.main([str(run), "--out", str(tmp_path / "merged")]) == 0
    ids = torch.arange(24).reshape(2, 12) % 16
    merged, base = (
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        for folder in (tmp_path / "merged", DATA / "lm" / name)
    )
    with torch.no_grad():
        before = base(ids).logits.numpy()
        after = (
            peft_lib.PeftModel.from_pretrained(base, tmp_path / "adapter")
            .eval()(ids)
            .logits.numpy()
        )
        expected = merged(ids).logits.numpy()
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-5 * max(1, np.abs(expected).max()))
    assert np.abs(before - expected).max() > 0.1


def test_a_bias_that_was_trained_with_an_adapter_is_refused(tmp_path, capsys):
    run = partly(tmp_path / "run", "qwen2", adapt="w_q$", train="b_q")
    assert lora_to_peft.main([str(run), "--out", str(tmp_path / "adapter")]) == 2
    said = capsys.readouterr().err
    assert (
        "model.layers.0.self_attn.q_proj.bias" in said
        and "`jaxtrain export` writes the merged weights" in said
    )
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("workload", ["bird", "trm"])
def test_adapters_of_zero_leave_any_workload_as_it_is(workload):
    """Then the gradient by A is zero, and the one by B is not. One workload scans its stack, the
    other one indexes it."""
    if workload == "bird":
        c = bird.Config(
            n_classes=3, n_frames=32, n_mels=32, embed=16, depth=2, heads=2, dtype="float32"
        )
        module, spared = (
            bird,
            r"^(objective|probe)/|encoder/(w_patch|b_|pos|cls|scale|bias|blocks/(b_|scale|bias))",
        )
        batch = {
            "spectrogram": jax.random.normal(jax.random.key(0), (4, 32, 32)),
            "label": jnp.array([0, 1, 2, 0]),
        }
        batch |= {"index": jnp.arange(4), "epoch": jnp.zeros(4, jnp.int32), "weight": jnp.ones(4)}
    else:
        c = trm.Config(
            n_cells=4,
            vocab=4,
            n_puzzles=2,
            n_difficulties=1,
            embed=16,
            heads=2,
            inner_multiple=8,
            puzzle_embed=0,
            puzzle_tokens=1,
            cycles_high=1,
            cycles_low=1,
            dtype="float32",
        )
        module, spared = trm_loss, r"^(w_cells|w_symbols|w_q|b_q)$"
        batch = {
            "inputs": jnp.ones((4, 4), jnp.int32),
            "labels": jnp.full((4, 4), 2),
            "puzzle": jnp.zeros(4, jnp.int32),
        }
        batch |= {
            "difficulty": jnp.zeros(4, jnp.int32),
            "weight": jnp.ones(4),
            "row": jnp.arange(4),
        }
    plain = module.make_task(config_lib.Config(model=c), one_device.shard, 4)
    task = lora.adapt(plain, Lora(rank=2, adapt=r"^net/w_|blocks/w_", freeze=spared))
    variables = initial(task.specs)
    params = initial(plain.specs, 1).params
    paths = specs_lib.paths(params)
    assert set(specs_lib.paths(variables.frozen)) == set(paths)
    values = dict(zip(paths, jax.tree.leaves(params), strict=True))
    variables = variables._replace(
        frozen=specs_lib.map_specs(lambda path, spec: values[path], task.specs.frozen)
    )

    def loss(task, params, variables):
        return task.loss(variables._replace(params=params), batch, jax.random.key(0)).loss.total

    expected = jax.jit(lambda p: loss(plain, p, Variables(p, (), variables.model_state)))(params)
    value, grads = jax.jit(jax.value_and_grad(lambda p: loss(task, p, variables)))(variables.params)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for path, g in zip(specs_lib.paths(grads), jax.tree.leaves(grads), strict=True):
        assert bool((g != 0).any()) == path.endswith("/w_b"), path


@pytest.mark.parametrize("mesh", [(2, 2, 2)])
def test_a_step_moves_the_adapters_alone_and_alike_on_every_mesh(mesh):
    """Frozen weights are neither optimised nor saved."""

    def run(mesh):
        config = config_lib.Config(
            model=language_case.TINY,
            train=config_lib.Train(steps=2, batch=language_case.BATCH, accumulate=2),
            optim=config_lib.Optim(lr=0.01, schedule="constant", eps=1e-3),
            lora=RANK4,
        )
        devices = layout_lib.make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))])
        run = assemble(
            config, devices, make_task=language_loss.make_task, fields=language_case.FIELDS
        )
        layout, plan = run.layout, run.abstract
        step = run.trace(None).lower().compile({"xla_backend_optimization_level": 0})
        state = state_lib.init_state(run.task, run.tx, plan, jax.random.key(0))
        before = jax.tree.map(np.asarray, state.variables)
        batch = language_case.packed_batch(0)
        rows = {name: jax.device_put(batch[name], x.sharding) for name, x in plan.batch.items()}
        for _ in range(2):
            state, out = step(state, rows, step_lib.put_stop(layout, False))
        return before, jax.tree.map(np.asarray, (state.variables, out))

    before, (alone, out) = run((1, 1, 1))
    jax.tree.map(np.testing.assert_array_equal, before.frozen, alone.frozen)
    moved = [
        (a != b).any()
        for a, b in zip(jax.tree.leaves(before.params), jax.tree.leaves(alone.params), strict=True)
    ]
    assert all(moved) and specs_lib.count(alone.params) < specs_lib.count(alone.frozen)
    _, (spread, spread_out) = run(mesh)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-3, atol=2e-4),
        (alone, out),
        (spread, spread_out),
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_adapters_of_several_matrices_read_their_input_once_on_gpus(transposed):
    """Numbers and gradients are those of one matrix after the other. A matrix without an adapter
    among them, and CPUs, keep one product each."""
    sizes, embed, rank = (6, 2, 2), 5, 3
    draw = jax.random.split(jax.random.key(0), 10)
    normal = jax.random.normal
    ws = [
        lora.Adapted(
            normal(draw[3 * i], (n, 4, embed)),
            normal(draw[3 * i + 1], (rank, embed)),
            normal(draw[3 * i + 2], (n, 4, rank)),
            0.5 + i,
            2,
        )
        for i, n in enumerate(sizes)
    ]
    equation, x = "btd,hkd->bthk", normal(draw[9], (2, 7, embed))
    if transposed:  # x meets B first
        ws = [ws[1], ws[2]]
        equation, x = "bthk,hkd->btd", normal(draw[9], (2, 7, 2, 4))
    mesh = layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    layout = layout_lib.make_layout(mesh, {})
    gpu = layout._replace(devices=layout_lib.devices_of("NVIDIA H100")).shard

    def results(shard, project_each):
        def sums(ws, x):
            ys = project_each(equation, x, ws, shard)
            return sum(jnp.sin(y).sum() for y in ys), ys

        grads, ys = jax.grad(sums, argnums=(0, 1), has_aux=True)(ws, x)
        return ys, grads

    def one_by_one(equation, x, ws, shard):
        return [layers.project(equation, x, w, shard) for w in ws]

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-5),
        results(gpu, layers.project_each),
        results(gpu, one_by_one),
    )

    def products(shard, ws):
        jaxpr = jax.make_jaxpr(lambda x: layers.project_each(equation, x, ws, shard))(x)
        return str(jaxpr).count("dot_general[")

    n = len(ws)
    assert products(gpu, ws) == 1 + 2 * n
    assert products(gpu, [*ws[:-1], ws[-1].w]) == 3 * (n - 1) + 1
    assert products(layout.shard, ws) == 3 * n
