"""Language models are read from Hugging Face's files and written back: the same arrays, names,
dtypes and logits."""

import dataclasses
import hashlib
import json
import pathlib
import re

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jaxtrain import config as config_lib
from jaxtrain import specs
from jaxtrain.arrays import stored_params, warm_start
from jaxtrain.commands import export as tool
from jaxtrain.workloads.language import hugging_face as language_files
from jaxtrain.workloads.language import model as language
from tests.support import runs
from tests.support.cases import initial
from tests.support.cases import language as language_case

DATA = language_case.DATA


def numpy_logits(folder: pathlib.Path, ids: np.ndarray) -> np.ndarray:
    """Compute float64 logits [B, T, V] from only config.json and the safetensors, with separate
    code instead of this program's."""
    h = json.loads((folder / "config.json").read_text())
    w = {}
    for file in folder.glob("*.safetensors"):
        w |= {name: x.astype("f8") for name, x in safetensors.numpy.load_file(file).items()}
    n_heads, n_kv, k = h["num_attention_heads"], h["num_key_value_heads"], h["head_dim"]
    b, t = ids.shape
    frequency = h["rope_theta"] ** (-np.arange(0, k, 2) / k)
    if r := h["rope_scaling"]:
        for i, f in enumerate(frequency):
            wavelength, original = 2 * np.pi / f, r["original_max_position_embeddings"]
            if wavelength > original / r["low_freq_factor"]:
                frequency[i] = f / r["factor"]
            elif wavelength > original / r["high_freq_factor"]:
                s = (original / wavelength - r["low_freq_factor"]) / (
                    r["high_freq_factor"] - r["low_freq_factor"]
                )
                frequency[i] = (1 - s) * f / r["factor"] + s * f
    angle = np.arange(t)[:, None] * np.concatenate([frequency, frequency])[None]

    def rms(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + h["rms_norm_eps"]) * w.pop(name)

    def heads(x, name, n):
        y = x @ w.pop(f"{name}_proj.weight").T
        if f"{name}_proj.bias" in w:
            y = y + w.pop(f"{name}_proj.bias")
        y = y.reshape(b, t, n, k).transpose(0, 2, 1, 3)
        return rms(y, f"{name}_norm.weight") if f"{name}_norm.weight" in w else y

    def turn(x):
        return x * np.cos(angle) + np.concatenate(
            [-x[..., k // 2 :], x[..., : k // 2]], -1
        ) * np.sin(angle)

    table = w.pop("model.embed_tokens.weight")
    x = table[ids]
    for i in range(h["num_hidden_layers"]):
        at = f"model.layers.{i}."
        y = rms(x, f"{at}input_layernorm.weight")
        q, key, v = (
            heads(y, f"{at}self_attn.{z}", n) for z, n in (("q", n_heads), ("k", n_kv), ("v", n_kv))
        )
        q, key, v = turn(q), turn(key).repeat(n_heads // n_kv, 1), v.repeat(n_heads // n_kv, 1)
        scores = np.where(np.tri(t, dtype=bool), q @ key.swapaxes(2, 3) / np.sqrt(k), -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        y = (p / p.sum(-1, keepdims=True) @ v).transpose(0, 2, 1, 3).reshape(b, t, n_heads * k)
        x = x + y @ w.pop(f"{at}self_attn.o_proj.weight").T
        y = rms(x, f"{at}post_attention_layernorm.weight")
        gate = y @ w.pop(f"{at}mlp.gate_proj.weight").T
        y = gate / (1 + np.exp(-gate)) * (y @ w.pop(f"{at}mlp.up_proj.weight").T)
        x = x + y @ w.pop(f"{at}mlp.down_proj.weight").T
    logits = (
        rms(x, "model.norm.weight")
        @ (table if h["tie_word_embeddings"] else w.pop("lm_head.weight")).T
    )
    assert not w, f"arrays that no layer reads: {sorted(w)}"
    return logits


COMPANIONS = (
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "USE_POLICY.md",
    "additional_chat_templates/tool_use.jinja",
)


@pytest.fixture(scope="module", params=language_case.MODELS)
def exported(request, tmp_path_factory):
    """The export of a run that began with the golden weights and ended there."""
    source, folder = DATA / request.param, tmp_path_factory.mktemp(request.param)
    c, params = language_case.load(source, language_case.context_of(request.param))
    (folder / "source").mkdir()
    for file in source.iterdir():
        (folder / "source" / file.name).write_bytes(file.read_bytes())
    (folder / "source" / "tokenizer.json").write_text('{"model": {}}')
    (folder / "source" / "additional_chat_templates").mkdir()
    for file in COMPANIONS:
        (folder / "source" / file).write_text(file)
    run = {
        "workload": "jaxtrain.workloads.language",
        "model": dataclasses.asdict(c),
        "train": {"steps": 30},
        "seed": 0,
        "data": {},
        "warm_start": {"source": str(folder / "source")},
    }
    state = runs.state(0, 10) | {"params": params, "opt_state": (), "ema": ()}
    runs.save(folder, 10, state, run=run)
    assert tool.main([str(folder), "--out", str(folder / "out")]) == 0
    return request.param, c, params, folder


def test_an_export_is_what_transformers_wrote(exported):
    """It has every name, dtype and bit, a config.json with the same fields, and the tokenizer."""
    name, c, _, folder = exported
    with safetensors.safe_open(folder / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}, "what transformers' own loader insists on"
    found = safetensors.numpy.load_file(folder / "out" / "model.safetensors")
    expected = safetensors.numpy.load_file(DATA / name / "model.safetensors")
    assert found.keys() == expected.keys()
    for key in expected:
        assert (found[key].dtype, found[key].shape) == (
            expected[key].dtype,
            expected[key].shape,
        ), key
        np.testing.assert_array_equal(found[key], expected[key], err_msg=key)
    assert language_files.read_config(folder / "out") == language_files.read_config(DATA / name)
    theirs = json.loads((DATA / name / "config.classic.json").read_text())
    ours = json.loads((folder / "out" / "config.json").read_text())
    assert {k: ours.get(k) for k in theirs if k != "transformers_version"} == {
        k: v for k, v in theirs.items() if k != "transformers_version"
    }
    assert (folder / "out" / "tokenizer.json").read_text() == '{"model": {}}'
    assert [(folder / "out" / file).read_text() for file in COMPANIONS] == [*COMPANIONS]
    sums = (folder / "out" / "SHA256SUMS").read_text()
    assert all(
        f"{hashlib.sha256(file.encode()).hexdigest()}  {file}\n" in sums for file in COMPANIONS
    )
    about = json.loads((folder / "out" / "tokenizer_config.json").read_text())
    assert about == {"tokenizer_class": "PreTrainedTokenizerFast"}, (
        "transformers takes tokenizer.json as it is"
    )


def test_a_reader_that_knows_nothing_of_this_program_gets_the_same_logits(exported):
    name, _, _, folder = exported
    g = np.load(DATA / f"{name}.npz")
    np.testing.assert_allclose(
        numpy_logits(folder / "out", g["input_ids"]), g["logits"], rtol=0, atol=1e-4
    )


def test_the_card_says_that_transformers_loads_it(exported):
    card = huggingface_hub.ModelCard.load(exported[3] / "out" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    code = card.text.partition("```python\n")[2].partition("```")[0]
    assert (
        "AutoTokenizer" in code
        and "AutoModelForCausalLM.from_pretrained" in code
        and compile(code, "card", "exec")
    )


def test_the_card_asks_for_no_tokenizer_that_is_not_there():
    model = dataclasses.asdict(
        language_case.load(
            DATA / language_case.MODELS[0], language_case.context_of(language_case.MODELS[0])
        )[0]
    )
    for texts, said in (("bytes", 'list(b"One morning")'), (None, "torch.tensor([[0]])")):
        code = language_files.export_hub(
            {"model": {**model, "tokenizer": texts}, "data": {}}, ["config.json"]
        ).example
        assert said in code and "AutoTokenizer" not in code and compile(code, "card", "exec")


@pytest.mark.slow
def test_transformers_itself_gives_the_same_logits(exported):
    """This needs transformers and torch (dependency group "peers")."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    name, _, _, folder = exported
    g = np.load(DATA / f"{name}.npz")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "out", dtype="float32"
    ).eval()
    with torch.no_grad():
        found = model(torch.from_numpy(g["input_ids"].astype("i8"))).logits.numpy()
    np.testing.assert_allclose(found, g["logits"], rtol=0, atol=1e-4)


def test_the_way_back_is_exact(exported):
    name, c, params, folder = exported
    if not (folder / "back").exists():
        assert tool.main(["--reverse", str(folder / "out"), "--out", str(folder / "back")]) == 0
    assert tool.main([str(folder / "back"), "--out", str(folder / "again")]) == 0
    for file in ("model.safetensors", "config.json"):
        assert (folder / "again" / file).read_bytes() == (folder / "out" / file).read_bytes()


def test_bfloat16_arrays_say_so_in_config_json(exported):
    _, _, _, folder = exported
    assert tool.main([str(folder), "--out", str(folder / "short"), "--dtype", "bf16"]) == 0
    assert json.loads((folder / "short" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {
        x.dtype.name
        for x in safetensors.numpy.load_file(folder / "short" / "model.safetensors").values()
    } == {"bfloat16"}


def test_unsupported_models_are_reported(tmp_path):
    h = json.loads((DATA / "llama3" / "config.json").read_text())
    for change, text in (
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"hidden_act": "relu", "attention_bias": True}, "hidden_act is 'relu'.*attention_bias"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_type is 'yarn'; expected one of: default, llama3",
        ),
        (
            {"rope_scaling": {"factor": 4.0}, "rope_parameters": None},
            "has factor, and no rope_type",
        ),
        ({"rope_scaling": "linear"}, "is 'linear'; expected an object"),
        (
            {
                "rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1},
                "rope_parameters": None,
            },
            (
                "high_freq_factor is null.*original_max_position_embeddings is null; expected a"
                " whole number"
            ),
        ),
        (
            {"rope_theta": None, "rope_scaling": None, "rope_parameters": None},
            "rope_theta is null; expected a number above 0",
        ),
        (
            {"hidden_size": "16", "head_dim": 8.5},
            'hidden_size is "16"; expected a whole .*head_dim is 8.5',
        ),
        (
            {"rms_norm_eps": None, "num_hidden_layers": True},
            "num_hidden_layers is true.*rms_norm_eps is null; expected a num",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps(h | change))
        with pytest.raises(language_files.HuggingFaceError, match=text):
            language_files.read_config(tmp_path)
    with pytest.raises(language_files.HuggingFaceError, match="nowhere does not exist"):
        language_files.read_config(tmp_path / "nowhere")


CONFIGS = json.loads((DATA / "configs.json").read_text())  # published fields with smaller sizes


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_read_or_refused_by_a_field(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]["config"]))
    if refused := CONFIGS[name]["refused"]:
        with pytest.raises(language_files.HuggingFaceError, match=re.escape(refused)):
            language_files.read_config(tmp_path)
        return
    h, found = CONFIGS[name]["config"], language_files.read_config(tmp_path)
    heads = h["num_attention_heads"]
    assert (found["kv_heads"], found["head_dim"]) == (
        h.get("num_key_value_heads", heads),
        h.get("head_dim", 64 // heads),
    )
    assert found["window"] == (h["sliding_window"] or 0 if h["model_type"] == "mistral" else 0)
    scaled = h.get("rope_scaling") or h.get("rope_parameters") or {}
    assert found["rope"]["theta"] == h.get("rope_theta", scaled.get("rope_theta", 1e4))
    assert found["rope"].get("factor", 1.0) == scaled.get("factor", 1.0)
    assert (found["eps"], found["tied"]) == (h["rms_norm_eps"], h.get("tie_word_embeddings", False))


def changed(folder: pathlib.Path, name: str, change, **fields) -> pathlib.Path:
    """A copy of a golden folder with other arrays and other fields of config.json."""
    folder.mkdir()
    arrays = safetensors.numpy.load_file(DATA / name / "model.safetensors")
    change(arrays)
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({**json.loads((DATA / name / "config.json").read_text()), **fields})
    )
    return folder


def test_a_tied_head_is_the_embedding_or_an_error(tmp_path):
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    same = changed(
        tmp_path / "same",
        "qwen2",
        lambda x: x.update(
            {head: x[embed], "model.layers.0.self_attn.rotary_emb.inv_freq": x[embed][0]}
        ),
    )
    model, start = language_files.from_hugging_face(same)
    rules = config_lib.WarmStart(**start)
    table = language.make_specs(config_lib.section(language.Config, {**model, "context": 8}))
    shapes = {
        p: (x.shape, x.dtype)
        for p, x in zip(
            specs.paths(table), jax.tree.leaves(table, is_leaf=specs.is_spec), strict=True
        )
    }
    assert "w_head" not in warm_start.match(shapes, warm_start.open_source(rules), rules).loaded
    other = changed(tmp_path / "other", "qwen2", lambda x: x.update({head: x[embed] + 1}))
    with pytest.raises(
        language_files.HuggingFaceError,
        match="tie_word_embeddings is true, and lm_head.weight differs from",
    ):
        language_files.from_hugging_face(other)
    without = changed(tmp_path / "without", "llama3", lambda x: x.pop(head))
    with pytest.raises(
        language_files.HuggingFaceError,
        match="tie_word_embeddings is false, and lm_head.weight is not in",
    ):
        language_files.from_hugging_face(without)


@pytest.mark.slow
def test_an_imported_model_computes_the_same_as_transformers(tmp_path):
    """This needs transformers and torch (dependency group "peers"). It compares the logits of
    random weights, and of the export."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    ids = np.arange(2 * 24).reshape(2, 24) * 37 % 128
    for i, name in enumerate(name for name, one in CONFIGS.items() if not one["refused"]):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]["config"]))
        torch.manual_seed(i)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for x in model.parameters():
                x += 0.1 * torch.randn_like(x)
            expected = model(torch.from_numpy(ids)).logits.numpy()
        model.save_pretrained(folder / "saved")
        for text in (
            (folder / "saved" / "config.json").read_text(),
            (folder / "config.json").read_text(),
        ):
            (folder / "saved" / "config.json").write_text(text)
            fields, start = language_files.from_hugging_face(folder / "saved")
            c = config_lib.section(language.Config, {**fields, "context": 24, "dtype": "float32"})
            rules = config_lib.WarmStart(**start)
            layout = stored_params.one_device()
            abstract = specs.abstract(language.make_specs(c), layout)
            shapes = dict(zip(specs.paths(abstract), jax.tree.leaves(abstract), strict=True))
            matches = warm_start.match(
                {p: (x.shape, x.dtype) for p, x in shapes.items()},
                warm_start.open_source(rules),
                rules,
            )
            loaded = warm_start.load(matches, abstract)
            params = jax.tree.unflatten(jax.tree.structure(abstract), [loaded[p] for p in shapes])
            places = np.broadcast_to(np.arange(24), ids.shape)
            batch = {"tokens": ids, "positions": places, "segments": np.ones_like(ids)}
            found = np.asarray(language.logits(c, params, batch, layout.shard))
            np.testing.assert_allclose(
                found, expected, rtol=0, atol=2e-4, err_msg=f"{name}: {text}"
            )


def test_published_sizes():
    """The models have as many parameters as their cards state."""
    expected = {
        "gpt2": 124_439_808,
        "llama-3.2-1b": 1_235_814_400,
        "llama-3.1-8b": 8_030_261_248,
        "qwen2.5-0.5b": 494_032_768,
        "qwen3-0.6b": 596_049_920,
        "qwen3-8b": 8_190_735_360,
        "qwen2.5-7b": 7_615_616_512,
        "llama-3.1-70b": 70_553_706_496,
        "llama-3.2-3b": 3_212_749_824,
        "qwen2.5-1.5b": 1_543_714_304,
        "qwen3-1.7b": 1_720_574_976,
    }
    for name, preset in language_files.PRESETS.items():
        c = config_lib.section(language.Config, {"context": 1024, **preset})
        assert not list(c.validate())
        assert specs.count(language.make_specs(c)) == expected[name], name


def test_an_export_of_ours_is_a_start_like_one_from_elsewhere(exported):
    """`configs/lm.py:FOLDER` loads every parameter, bit for bit, and nothing needs a new name."""
    name, c, params, folder = exported
    model, start = language_files.from_hugging_face(folder / "out")
    again = config_lib.section(language.Config, model)
    assert language.make_specs(again).keys() == language.make_specs(c).keys()
    rules = config_lib.WarmStart(**start)
    table = dict(zip(specs.paths(params), jax.tree.leaves(params), strict=True))
    matches = warm_start.match(
        {p: (x.shape, x.dtype) for p, x in table.items()}, warm_start.open_source(rules), rules
    )
    assert matches.loaded.keys() == table.keys() and not matches.fresh
    for path, x in table.items():
        np.testing.assert_array_equal(matches.loaded[path].stored.read(()), x, err_msg=path)


def test_an_export_of_characters_is_a_start_with_its_places(tmp_path):
    """The architecture has no name at Hugging Face. It has learned positions, and the tokenizer
    that the data named."""
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "tokenizer.json").write_text('{"model": {}}')
    fields = dict(
        embed=8,
        depth=2,
        heads=2,
        mlp=16,
        vocab=11,
        context=12,
        positions="learned",
        norm="layer",
        activation="gelu",
    )
    c = config_lib.section(
        language.Config, {**fields, "tokenizer": str(tmp_path / "tokens" / "tokenizer.json")}
    )
    params = initial(language.make_specs(c))
    run = {
        "workload": "jaxtrain.workloads.language",
        "model": dataclasses.asdict(c),
        "train": {"steps": 30},
        "seed": 0,
        "data": {"sources": [{"path": str(tmp_path / "tokens")}]},
        "warm_start": {"source": ""},
    }
    runs.save(
        tmp_path / "run",
        10,
        runs.state(0, 10) | {"params": params, "opt_state": (), "ema": ()},
        run=run,
    )
    assert tool.main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"model": {}}'
    model, start = language_files.from_hugging_face(tmp_path / "out")
    assert (model["context"], model["vocab"], model["positions"]) == (12, 11, "learned")
    rules = config_lib.WarmStart(**start)
    source = warm_start.open_source(rules)
    np.testing.assert_array_equal(source["pos"].read(()), params["pos"])
    (tmp_path / "out" / "jaxtrain.json").write_text("{}")
    with pytest.raises(
        language_files.HuggingFaceError, match="cannot be read as an export of jaxtrain"
    ):
        language_files.from_hugging_face(tmp_path / "out")
    (tmp_path / "out" / "jaxtrain.json").write_text(
        '{"config": {"workload": "jaxtrain.workloads.trm", "model": {}}}'
    )
    with pytest.raises(
        language_files.HuggingFaceError,
        match="of a run of jaxtrain.workloads.trm; expected one of jaxtrain.workloads.l",
    ):
        language_files.from_hugging_face(tmp_path / "out")
