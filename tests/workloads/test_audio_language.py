"""The audio language model is compared with the original's numbers, on meshes, with adapters, and
in generation."""

import dataclasses
import json
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxtrain import config as config_lib
from jaxtrain import plan
from jaxtrain import specs as specs_lib
from jaxtrain.arrays import warm_start
from jaxtrain.nn import lora
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.plan import hlo
from jaxtrain.types import Variables
from jaxtrain.workloads.audio_language import decoding
from jaxtrain.workloads.audio_language import hugging_face as higgs
from jaxtrain.workloads.audio_language import loss as audio_loss
from jaxtrain.workloads.audio_language import model as audio_language
from loaders.chat import chatml
from tests.support.cases import Run, assert_alike, initial
from tests.support.cases.audio_language import CASE, DATA, GOLDEN, IDS, batch_of

RUNS = ("plain_rope", "llama3_rope", "audio_attention")
K, SIZE = GOLDEN["audio_num_codebooks"], GOLDEN["audio_codebook_size"]
VOCAB = GOLDEN["text"]["vocab_size"]


def alone():
    return make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {}).shard


def open_folder(folder, **changes):
    """Config and parameters of a folder in the original's format, in float32."""
    model, rules = higgs.from_hugging_face(folder)
    c = config_lib.section(
        audio_language.Config, {**model, "dtype": "float32", "context": 0, **changes}
    )
    rules = config_lib.section(config_lib.WarmStart, rules)
    assert not list(c.validate()) and not list(rules.validate())
    abstract = specs_lib.abstract(
        audio_language.make_specs(c), make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {})
    )
    flat = dict(zip(specs_lib.paths(abstract), jax.tree.leaves(abstract), strict=True))
    matches = warm_start.match(
        {p: (x.shape, x.dtype) for p, x in flat.items()}, warm_start.open_source(rules), rules
    )
    loaded = warm_start.load(matches, abstract)
    assert loaded.keys() == flat.keys()
    return c, jax.tree.unflatten(jax.tree.structure(abstract), [loaded[p] for p in flat])


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """The golden weights as a user has them: one folder for each of the three models."""
    weights = safetensors.numpy.load_file(DATA / "weights.safetensors")
    extra = safetensors.numpy.load_file(DATA / "audio_attention_weights.safetensors")
    config = GOLDEN
    found = {}
    for run in RUNS:
        found[run] = folder = tmp_path_factory.mktemp(run)
        scaling = config["llama3_rope_scaling"] if run == "llama3_rope" else None
        text = {**config["text"], "rope_scaling": scaling, "head_dim": config["head_dim"]}
        (folder / "config.json").write_text(json.dumps({**config, "text_config": text}))
        safetensors.numpy.save_file(
            weights | (extra if run == "audio_attention" else {}), folder / "model.safetensors"
        )
    return found


@pytest.fixture(scope="module")
def numbers():
    return np.load(DATA / "forward.npz")


def laid_out(g):
    """The conversations in the layout of this project."""
    found = []
    for i in range(len(g["expanded.tokens"])):
        audios = np.split(
            g[f"sample{i}.codes"], np.cumsum(g[f"sample{i}.code_lengths"])[:-1], axis=1
        )
        found.append(
            chatml.expand(
                g[f"sample{i}.input_ids"],
                g[f"sample{i}.label_ids"],
                audios,
                audio_in=IDS["<|AUDIO|>"],
                audio_out=IDS["<|AUDIO_OUT|>"],
                size=SIZE,
                codebooks=K,
            )
        )
    return found


def of_transformers(folder, changes=None, without=()):
    """The golden weights under transformers' names, and with its config."""
    weights = safetensors.numpy.load_file(DATA / "weights.safetensors")
    renamed = {
        "audio_codebook_embeddings.weight": "model.embed_audio_tokens.embed_audio_tokens.weight",
        "audio_decoder_proj.audio_lm_head.weight": "audio_lm_head.weight",
        "audio_decoder_proj.text_lm_head.weight": "text_lm_head.weight",
    }
    weights = {renamed.get(name, f"model.{name}"): x for name, x in weights.items()}
    folder.mkdir()
    safetensors.numpy.save_file(
        {n: x for n, x in weights.items() if n not in without}, folder / "model.safetensors"
    )
    about = {k: v for k, v in GOLDEN["text"].items() if k not in ("rope_theta", "rope_scaling")}
    about |= {
        "rope_parameters": {
            **GOLDEN["llama3_rope_scaling"],
            "rope_theta": GOLDEN["text"]["rope_theta"],
        }
    }
    about |= {
        "model_type": "higgs_audio_v2",
        "head_dim": GOLDEN["head_dim"],
        "num_codebooks": K,
        "codebook_size": SIZE + 2,
    }
    about |= {"audio_stream_bos_id": SIZE, "audio_stream_eos_id": SIZE + 1, **(changes or {})}
    (folder / "config.json").write_text(json.dumps(about))
    return folder


def test_a_folder_of_transformers_is_the_same_model(folders, tmp_path):
    """The release was published a second time, with other names and fields."""
    c, params = open_folder(of_transformers(tmp_path / "a"))
    expected, theirs = open_folder(folders["llama3_rope"])
    assert c == expected
    jax.tree.map(np.testing.assert_array_equal, params, theirs)
    with pytest.raises(
        higgs.HuggingFaceError, match=f"audio_stream_bos_id is {SIZE + 9}; expected {SIZE}"
    ):
        higgs.from_hugging_face(of_transformers(tmp_path / "b", {"audio_stream_bos_id": SIZE + 9}))
    with pytest.raises(higgs.HuggingFaceError, match="has no text_lm_head.weight"):
        higgs.from_hugging_face(of_transformers(tmp_path / "c", without=("text_lm_head.weight",)))
    config = {"warm_start": {"source": str(tmp_path / "a")}, "data": {}, "model": {"vocab": VOCAB}}
    (tmp_path / "a" / "config.json").write_bytes(
        higgs.export_files(config, "float32")["config.json"]
    )
    again = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (
        again["audio_num_codebooks"],
        again["audio_codebook_size"],
        again["text_config"]["vocab_size"],
    ) == (K, SIZE, VOCAB)


@pytest.mark.slow
def test_transformers_computes_the_same_audio(folders, numbers, tmp_path):
    """This test needs transformers and torch (dependency group "peers"): audio logits of a
    conversation."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    ids = {"audio_token_id": IDS["<|AUDIO_OUT|>"], "audio_delay_token_id": IDS["<|AUDIO|>"]}
    folder = of_transformers(tmp_path / "a", ids)
    theirs = transformers.AutoModelForTextToWaveform.from_pretrained(folder, dtype="float32").eval()
    c, params = open_folder(folder)
    sample = laid_out(numbers)[0]
    is_audio = sample.codes[:, 0] >= 0
    with torch.no_grad():
        h = theirs.model(
            input_ids=torch.from_numpy(sample.tokens[None].astype("i8")),
            audio_input_ids=torch.from_numpy(sample.codes[None, is_audio].astype("i8")),
            audio_input_ids_mask=torch.ones(1, int(is_audio.sum()), dtype=torch.bool),
        ).last_hidden_state[0]
        expected = theirs.audio_lm_head(h[torch.from_numpy(is_audio)]).numpy()
    x_bud = jax.jit(lambda p, b: audio_language.decode(c, p, b, alone()))(
        params, batch_of([sample])
    )
    found = np.asarray(audio_language.audio_logits(params, x_bud))[0, : len(is_audio)][is_audio]
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=0, atol=1e-4)


def total(task, params, batch):
    out = task.loss(Variables(params), batch, None)
    return out.loss.total / out.loss.weight, out.metrics


@pytest.mark.parametrize("run", RUNS)
def test_logits_equal_the_originals(folders, numbers, run):
    c, params = open_folder(folders[run])
    assert c.audio_attention == (run == "audio_attention")
    valid = numbers["expanded.attention_mask"]
    batch = batch_of(laid_out(numbers), spare=valid.shape[1])  # at least as wide as the original's

    def logits(params, batch):
        x_bud = audio_language.decode(c, params, batch, alone())
        return audio_language.text_logits(c, params, x_bud), audio_language.audio_logits(
            params, x_bud
        )

    text, audio = (np.asarray(x)[:, : valid.shape[1]] for x in jax.jit(logits)(params, batch))
    expected = numbers[f"{run}.text_logits"]
    n = len(expected)
    np.testing.assert_allclose(text[:n][valid[:n]], expected[valid[:n]], rtol=0, atol=3e-5)
    np.testing.assert_allclose(
        audio[numbers["expanded.is_audio_out"]], numbers[f"{run}.audio_logits"], rtol=0, atol=3e-5
    )


@pytest.mark.parametrize("run", [*RUNS, "ragged", "first_column_labelled"])
def test_losses_equal_the_originals_corrected(folders, numbers, run):
    """The losses are not those of logits against labels at the places of their own input."""
    c, params = open_folder(folders[run if run in RUNS else "plain_rope"])
    rows = laid_out(numbers)
    if run not in RUNS:
        labels = numbers[f"{run}.audio_labels"]
        rows = [x._replace(audio_labels=labels[i, : len(x.tokens)]) for i, x in enumerate(rows)]
    task = audio_loss.make_task(config_lib.Config(model=c), alone(), len(rows))
    value, metrics = jax.jit(lambda p, b: total(task, p, b))(params, batch_of(rows))
    get = lambda name: numbers[f"losses.{run}.{name}"]  # noqa: E731
    np.testing.assert_allclose(value, get("total_loss"), rtol=1e-5)
    np.testing.assert_allclose(metrics["text"].total, get("text_sum"), rtol=1e-5)
    assert metrics["text"].weight == get("text_count")
    for k in range(K):
        np.testing.assert_allclose(
            metrics[f"audio_{k}"].total, get("audio_sum_per_codebook")[k], rtol=1e-5, err_msg=k
        )
        assert metrics[f"audio_{k}"].weight == get("audio_count_per_codebook")[k]
    record = {
        name: float(m.total) / float(m.weight) if m.weight else np.nan
        for name, m in metrics.items()
    }
    if run in RUNS:
        heard = sum(record[f"audio_{k}"] for k in range(K)) / K
        np.testing.assert_allclose(heard, get("audio_loss"), rtol=1e-5)
        # The differences are larger than ten times the tolerance.
        assert record["text"] != pytest.approx(float(get("unshifted_text_loss")), rel=1e-4)
        assert heard != pytest.approx(float(get("unshifted_audio_loss")), rel=1e-4)
    np.testing.assert_allclose(task.finish(record)["loss"], get("total_loss"), rtol=1e-5)


def test_gradients_equal_the_originals(folders, numbers):
    c, params = open_folder(folders["plain_rope"], remat="full")
    rows = laid_out(numbers)
    task = audio_loss.make_task(config_lib.Config(model=c), alone(), len(rows))
    grads = jax.jit(jax.grad(lambda p, b: total(task, p, b)[0]))(params, batch_of(rows))
    found = exported(c, grads)
    g = np.load(DATA / "grads.npz")
    for name in g.files:
        np.testing.assert_allclose(
            found[name], g[name], rtol=0, atol=1e-4 * np.abs(g[name]).max(), err_msg=name
        )


def exported(c, params):
    """Arrays under their exported names and shapes, by plain numpy."""
    section, found = dataclasses.asdict(c), {}
    for path, x in zip(
        specs_lib.paths(params), map(np.asarray, jax.tree.leaves(params)), strict=True
    ):
        names = higgs.export_names(section, path)
        for name, part in zip(
            *([names], [x]) if isinstance(names, str) else (names, x), strict=True
        ):
            found[name] = part.reshape(higgs.export_shape(section, path, part.shape))
    return found


def test_codebooks_add_up_in_the_wider_type():
    """A frozen table of bfloat16 in a model of float32: compilers keep more bits of a sum of
    bfloat16 or fewer, each as it likes."""
    c = config_lib.section(
        audio_language.Config, {"dtype": "float32", "codebooks": 8, "codebook_size": 30, "vocab": 8}
    )
    table = np.random.default_rng(0).normal(size=(8, c.n_codes, 16)).astype(jnp.bfloat16)
    codes = np.random.default_rng(1).integers(0, c.n_codes, (2, 5, 8))
    x = audio_language.embed_codes(c, {"embed_audio": table}, codes, alone())
    expected = table.astype("f8")[np.arange(8), codes].sum(2)
    np.testing.assert_allclose(x, expected, rtol=0, atol=1e-5)


def test_the_published_size():
    """The sizes: 5.77 billion parameters in total, the text model's size without the audio's part,
    and that of the published adapters."""
    c = config_lib.section(audio_language.Config, {**higgs.PRESETS["v2"], "context": 0})
    assert not list(c.validate()) and not (c.average_codes or c.audio_attention)
    table = audio_language.make_specs(c)
    audio = {
        "embed_audio": table["embed_audio"],
        "w_head_audio": table["w_head_audio"],
        "audio": table["blocks"]["audio"],
    }
    assert specs_lib.count(audio["audio"]) == 2_114_101_248
    assert specs_lib.count(table) - specs_lib.count(audio) == 3_606_752_256
    assert specs_lib.count(table) == 3_606_752_256 + 2_114_101_248 + 50_429_952
    task = audio_loss.make_task(config_lib.Config(model=c), alone(), 1)
    adapted = lora.adapt(task, config_lib.section(config_lib.Lora, higgs.ADAPTERS))
    assert specs_lib.count(adapted.specs.params) == 78_905_344


def test_a_model_that_copies_its_input_does_not_reach_a_low_loss(numbers):
    """Logits that state, with certainty, the token at each place itself: right wherever a label is
    at its own place."""
    rows = laid_out(numbers)
    n = VOCAB
    width = n + K * (SIZE + 2)
    c = audio_language.Config(
        vocab=n,
        codebooks=K,
        codebook_size=SIZE,
        embed=width,
        depth=1,
        heads=2,
        kv_heads=1,
        head_dim=4,
        mlp=8,
        dtype="float32",
    )
    params = jax.tree.map(jnp.zeros_like, initial(audio_language.make_specs(c)))
    # every token and every code has a dimension of its own, and the heads read it off
    own = 30 * jnp.eye(width)
    codes = own[n:].reshape(K, SIZE + 2, width)
    params |= {
        "scale": jnp.ones(width),
        "embed": own[:n],
        "w_head": own[:n],
        "embed_audio": codes,
        "w_head_audio": codes,
    }
    task = audio_loss.make_task(config_lib.Config(model=c), alone(), len(rows))
    batch = batch_of(rows)
    copies = dict(batch)
    for kind, values in (("text", [x.tokens for x in rows]), ("audio", [x.codes for x in rows])):
        at, target = (np.asarray(batch[f"{kind}_{name}"]) for name in ("at", "target"))
        copied = np.stack([x[np.minimum(i, len(x) - 1)] for x, i in zip(values, at, strict=True)])
        copies[f"{kind}_target"] = jnp.asarray(np.where(target < 0, target, copied))
    step = jax.jit(lambda p, b: total(task, p, b)[0])
    high, low = step(params, batch), step(params, copies)
    assert low < 2 and high > 20, (low, high)  # a column has no token to copy, hence not 0


@pytest.mark.parametrize("changes", [{}, {"average_codes": True}, {"audio_attention": True}])
def test_switches_change_what_is_computed(folders, numbers, changes):
    """The release's choices are the defaults. Each other choice gives other logits, and tables
    of its own sizes."""
    c, params = open_folder(
        folders["audio_attention" if "audio_attention" in changes else "plain_rope"]
    )
    c = dataclasses.replace(c, **changes)
    width = numbers["expanded.tokens"].shape[1]
    batch = batch_of(laid_out(numbers)[:1], spare=width)
    x_bud = jax.jit(lambda p: audio_language.decode(c, p, batch, alone()))(params)
    found = audio_language.audio_logits(params, x_bud)[0, :width]
    of = numbers["expanded.is_audio_out"][0]
    same = (
        np.abs(np.asarray(found)[of] - numbers["plain_rope.audio_logits"][: of.sum()]).max() < 1e-3
    )
    # The mean of one codebook's embedding is its sum.
    differs = "audio_attention" in changes or ("average_codes" in changes and K > 1)
    assert same != differs
    assert specs_lib.count(audio_language.make_specs(c)) == specs_lib.count(params)


# Through the real step, on meshes and in parts.


@pytest.mark.parametrize("mesh", [(2, 2, 2), pytest.param((1, 8, 1), marks=pytest.mark.slow)])
def test_a_step_is_the_same_in_parts(mesh):
    """Both means of the loss are the global batch's."""
    assert_alike(Run(CASE, (1, 1, 1)).take(2), Run(CASE, mesh, 2).take(2))


@pytest.mark.slow
def test_adapters_move_and_the_base_keeps_its_bytes():
    """The base is in bfloat16, split over fsdp and model. Adapters are float32, and only their
    gradients are reduced over data, once a step."""
    adapters = config_lib.section(config_lib.Lora, {**higgs.ADAPTERS, "rank": 2})
    run = Run(CASE._replace(adapters=adapters), (2, 2, 2), 2)
    before = run.init().variables
    assert {x.dtype for x in jax.tree.leaves(before.frozen)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(before.params)} == {jnp.dtype("float32")}
    before = jax.tree.map(np.asarray, before)
    after = run.take(2)[0][1][0].variables
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x.view("u2"), y.view("u2")),
        before.frozen,
        after.frozen,
    )
    for path, x, y in zip(
        specs_lib.paths(before.params),
        *map(jax.tree.leaves, (before.params, after.params)),
        strict=True,
    ):
        assert (x != y).any(), path
    split = {
        p: x.sharding.shard_shape(x.shape)
        for p, x in zip(
            specs_lib.paths(run.abstract.state.variables.frozen),
            jax.tree.leaves(run.abstract.state.variables.frozen),
            strict=True,
        )
    }
    assert split["blocks/audio/w_up"] == (2, 24, 16) and split["blocks/w_q"] == (2, 4, 4, 16)
    found = [
        c for c in hlo.collectives(run.step.as_text()) if "data" in c.axes(run.layout.mesh.shape)
    ]
    assert not [c.name for c in found if c.in_loop], "before the last microbatch"
    reduced = sum(math.prod(shape) for c in found if c.kind == "all-reduce" for shape in c.shapes)
    sizes = sum(
        math.prod(x.sharding.shard_shape(x.shape))
        for x in jax.tree.leaves(run.abstract.state.variables.params)
    )
    assert sizes <= reduced <= sizes + 64, "and loss and metrics"


# As it generates.


def prompts(rows, n):
    """The first n places of each row, as a batch of prompts."""
    cut = [chatml.Laid(*(x[:m] for x in row)) for row, m in zip(rows, n, strict=True)]
    batch = batch_of(cut, pad=0)
    fields = {name: batch[name] for name in ("text", "codes", "place", "slot")}
    return decoding.Prompts(fields, jnp.array(n))


def last_of_prompts(rows):
    """The last place of a prompt that every row is long enough for."""
    return 2 * min(len(x.tokens) for x in rows) // 3


@pytest.mark.parametrize("run", ["llama3_rope", "audio_attention"])
def test_place_by_place_gives_the_logits_of_the_whole_row(folders, numbers, run):
    """Generation from a cache, begun within text and behind a recording, with rows of different
    lengths in one batch."""
    c, params = open_folder(folders[run])
    rows = laid_out(numbers)
    first_column = int((rows[0].recording >= 0).argmax())
    last = last_of_prompts(rows)
    starts = (min(first_column // 2, last) + 1, *[last + 1] * (len(rows) - 1))
    whole = jax.jit(lambda p, b: audio_language.decode(c, p, b, alone()))(params, batch_of(rows))
    n_new = min(len(x.tokens) for x in rows) - last - 1
    x_bd, cache = jax.jit(lambda p, b: decoding.prefill(c, p, b, alone(), n_new=n_new))(
        params, prompts(rows, starts)
    )
    step = jax.jit(lambda p, *args: decoding.extend(c, p, *args, alone()))
    for i in range(n_new):
        at = [s + i for s in starts]
        expected = jnp.stack([whole[r, a - 1] for r, a in enumerate(at)])
        np.testing.assert_allclose(x_bd, expected, rtol=0, atol=5e-5, err_msg=i)

        def pick(name):
            pairs = zip(rows, at, strict=True)  # noqa: B023
            return jnp.stack([jnp.asarray(getattr(x, name)[a]) for x, a in pairs])

        x_bd, cache = step(
            params,
            pick("tokens"),
            jnp.maximum(pick("codes"), 0),
            pick("recording") >= 0,
            jnp.array(at),
            cache,
        )


def test_a_generated_answer_can_be_used_as_a_conversation(folders, numbers):
    """Greedy generation: laid out again and run through the training forward, each place matches
    its logits. Ends come delayed."""
    c, params = open_folder(folders["plain_rope"])
    rows = laid_out(numbers)
    last = last_of_prompts(rows)
    starts = (last + 1,) * len(rows)
    # Both prompts end with the token that opens a recording.
    opens, closes, ends = (
        IDS[name] for name in ("<|audio_out_bos|>", "<|audio_eos|>", "<|eot_id|>")
    )
    rows = [
        x._replace(tokens=np.where(np.arange(len(x.tokens)) == last, opens, x.tokens)) for x in rows
    ]
    rows = [
        x._replace(recording=np.where(np.arange(len(x.tokens)) == last, -1, x.recording))
        for x in rows
    ]
    generate = jax.jit(
        lambda p, b, longest: decoding.generate(
            c,
            p,
            b,
            jax.random.key(0),
            alone(),
            decoding.Grammar(opens, closes, ends, longest=longest),
            n_new=K + 12,
            streams=decoding.Streams(0.0, 0, (0.0,)),
        ),
        static_argnums=2,
    )
    found = jax.tree.map(np.asarray, generate(params, prompts(rows, starts), 5))
    for row in range(len(rows)):
        tokens, columns = found.tokens[row], found.columns[row]
        n = int((columns[:, 0] >= 0).argmin())
        assert (tokens[:n] == -1).all() and tokens[n] == closes and (columns[0] == SIZE).all()
        codes = chatml.undelayed(columns[:n])
        assert codes.shape[1] <= 5 and 0 <= codes.min() and codes.max() < SIZE
        np.testing.assert_array_equal(chatml.delayed(codes, SIZE), columns[:n])
        text = np.concatenate([tokens[n:][tokens[n:] >= 0]])
        prompt = [x[: starts[row]] for x in rows[row]]
        more = chatml.expand(
            np.concatenate([[IDS["<|AUDIO_OUT|>"]], text]).astype("i4"),
            np.zeros(1 + len(text), "i4"),
            [codes],
            audio_in=IDS["<|AUDIO|>"],
            audio_out=IDS["<|AUDIO_OUT|>"],
            size=SIZE,
            codebooks=K,
        )
        both = chatml.Laid(*(np.concatenate(pair) for pair in zip(prompt, more, strict=True)))
        x_bud = audio_language.decode(c, params, batch_of([both]), alone())
        heard = np.array(audio_language.audio_logits(params, x_bud))[0]
        heard[..., SIZE] = -np.inf
        for j in range(1, n):
            for k in range(K):
                if 0 < j - k <= codes.shape[1]:
                    allowed = heard[starts[row] + j - 1, k][: SIZE + 2 * (k == 0)]
                    assert allowed.argmax() == columns[j, k], (j, k)
        said = np.asarray(audio_language.text_logits(c, params, x_bud))[0]
        for j in range(1, len(text)):
            if text[j - 1] != opens:
                assert said[starts[row] + n + j - 1].argmax() == text[j]


def test_rows_draw_alone_and_streams_have_their_own_temperature(folders, numbers):
    c, params = open_folder(folders["plain_rope"])
    rows = laid_out(numbers)
    last = last_of_prompts(rows)
    starts = (last + 1,) * len(rows)
    opens, closes, ends = (
        IDS[name] for name in ("<|audio_out_bos|>", "<|audio_eos|>", "<|eot_id|>")
    )
    rows = [
        x._replace(tokens=np.where(np.arange(len(x.tokens)) == last, opens, x.tokens)) for x in rows
    ]
    rows = [
        x._replace(recording=np.where(np.arange(len(x.tokens)) == last, -1, x.recording))
        for x in rows
    ]

    def written(rows, streams, seed=0):
        n = len(rows)
        return np.asarray(
            jax.jit(
                lambda p, b: decoding.generate(
                    c,
                    p,
                    b,
                    jax.random.key(seed),
                    alone(),
                    decoding.Grammar(opens, closes, ends),
                    n_new=K + 8,
                    streams=streams,
                )
            )(params, prompts(rows, starts[:n])).columns
        )

    free = decoding.Streams(1.0, 0, (1.0,), (0,))
    both = written(rows, free)
    np.testing.assert_array_equal(written(rows[:1], free), both[:1])
    assert (written(rows, free, seed=1) != both).any()
    cold = [
        decoding.Streams(1.0, 0, (*[1.0] * (K - 1), t), (*[0] * (K - 1), k))
        for t, k in ((0.0, 0), (1.0, 1))
    ]
    first, second = (written(rows, streams) for streams in cold)
    np.testing.assert_array_equal(first, second)  # the likeliest of a single one is the likeliest
    np.testing.assert_array_equal(first[:, :K, 0], both[:, :K, 0])
    assert (first[..., -1] != both[..., -1]).any()


@pytest.mark.slow
def test_the_plan_of_the_published_size_says_its_tokens_a_second(tmp_path, monkeypatch):
    """The plan assumes 40 % of the peak: eight GPUs generate eight times as many tokens/s as one,
    and each holds an eighth of the weights."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    monkeypatch.chdir(pathlib.Path(__file__).parents[2])
    rates = {}
    for n in (1, 8):
        mesh = [("mesh.data", "1"), ("mesh.fsdp", str(n)), ("train.batch", "64")]
        config = config_lib.load(
            "configs/higgs.py:blank", [*mesh, ("workdir", str(tmp_path / "run"))]
        )
        text, well = plan.report(config, f"gpu:h100x{n}")
        assert well, text
        assert "78,905,344 parameters" in text
        rates[n] = float(re.search(r"([\d,]+) tokens/s at 40%", text)[1].replace(",", ""))
    assert 20_000 < rates[1] < 60_000 and rates[8] == pytest.approx(8 * rates[1], rel=1e-3)
