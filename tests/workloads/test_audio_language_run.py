"""The audio language model as a user runs it: frozen weights from safetensors, several shapes,
stopped, resumed, exported."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from jaxtrain import cli, specs
from jaxtrain import config as config_lib
from jaxtrain.arrays import warm_start
from jaxtrain.commands import export, lora_to_peft
from jaxtrain.nn.hugging_face import HuggingFaceError
from jaxtrain.run import loop
from jaxtrain.workloads.audio_language import generate_audio as inference
from jaxtrain.workloads.audio_language import hugging_face as higgs
from jaxtrain.workloads.audio_language import model as audio_language
from jaxtrain.workloads.audio_language.commands import generate_audio
from tests.support import processes, small_runs


@pytest.fixture
def folder(tmp_path):
    return small_runs.higgs(tmp_path)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder after a first run of one step, whose workdir is base."""
    folder = small_runs.higgs(tmp_path_factory.mktemp("begun"))
    short = (
        "--config.train.steps=1",
        "--config.train.eval_every=0",
        "--config.checkpoint.final=weights",
    )
    processes.run(folder, "higgs.py", "--config.workdir=base", *short)
    return folder


@pytest.fixture
def after_first_run(begun, tmp_path, monkeypatch):
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def base_of(folder):
    """A base in the original's format: the export of the first run, and its config.json."""
    assert (
        export.main([str(folder / "base"), "--dtype", "bf16", "--out", str(folder / "weights")])
        == 0
    )
    text = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=32,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        vocab_size=272,
    )
    config = dict(text_config=text, audio_num_codebooks=2, audio_codebook_size=16)
    (folder / "weights" / "config.json").write_text(json.dumps(config))
    (folder / "weights" / "jaxtrain.json").unlink()  # as from elsewhere
    return safetensors.numpy.load_file(folder / "weights" / "model.safetensors")


def test_adapters_on_a_frozen_base_that_are_stopped_and_resumed_have_the_same_bytes(
    after_first_run,
):
    folder = after_first_run
    base_of(folder)
    whole = processes.run(folder, "higgs.py:weights", "--config.workdir=whole")
    assert (
        "parameters loaded: blocks/audio/scale_attention, " in whole
        and "0 freshly initialised" in whole
    )
    assert "2 programs" in whole and "bucket 2 of 2" in whole
    processes.run(folder, "higgs.py:weights", "--config.workdir=parts", "--config.train.steps=4")
    assert "resuming from step 4" in processes.run(
        folder, "higgs.py:weights", "--config.workdir=parts"
    )
    saved = processes.hashes(folder / "parts", 8)
    assert saved == processes.hashes(folder / "whole", 8)
    assert {
        path.rpartition("[")[2] for path in saved if "params" in path and "opt" not in path
    } == {"'w_a']", "'w_b']"}
    assert not processes.unexplained(folder / "whole")
    found = processes.records(folder / "whole", "test")
    assert (
        found[8]["loss"] == pytest.approx(found[8]["text"] + found[8]["audio"])
        and found[8]["loss"] < found[4]["loss"] + 0.5
    )
    assert found[8]["audio"] == pytest.approx((found[8]["audio_0"] + found[8]["audio_1"]) / 2)


@pytest.mark.slow
def test_adapters_are_exported_merged_trained_on_and_played(after_first_run, capsys):
    """Exports have the original's names, as adapters and merged."""
    folder = after_first_run
    base = base_of(folder)
    bytes_before = (folder / "weights" / "model.safetensors").read_bytes()
    processes.run(folder, "higgs.py:weights", "--config.workdir=whole")
    assert export.main([str(folder / "whole"), "--out", str(folder / "merged")]) == 0
    assert lora_to_peft.main([str(folder / "whole"), "--out", str(folder / "adapter")]) == 0
    assert (folder / "weights" / "model.safetensors").read_bytes() == bytes_before
    merged = safetensors.numpy.load_file(folder / "merged" / "model.safetensors")
    adapter = safetensors.numpy.load_file(folder / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys() and "layers.1.audio_mlp.down_proj.weight" in base
    matrices = [
        name
        for name in base
        if f"base_model.model.{name.removesuffix('.weight')}.lora_A.weight" in adapter
    ]
    assert len(adapter) == 2 * len(matrices) == 2 * 2 * 10
    for name, w in base.items():
        w = w.astype("f4")
        assert merged[name].shape == w.shape
        if name in matrices:
            key = f"base_model.model.{name.removesuffix('.weight')}"
            w = w + 2.0 * (adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"])
            np.testing.assert_allclose(
                merged[name].astype("f4"), w, rtol=2**-8, atol=1e-6, err_msg=name
            )
            assert np.abs(adapter[f"{key}.lora_B.weight"]).max() > 0
        else:
            np.testing.assert_array_equal(merged[name], base[name], err_msg=name)

    # The export can be the start of a run: as a folder of weights, without further options.
    model, start = higgs.from_hugging_face(folder / "merged")
    table = audio_language.make_specs(config_lib.section(audio_language.Config, model))
    shapes = dict(
        zip(
            specs.paths(table),
            ((s.shape, s.dtype) for s in jax.tree.leaves(table, is_leaf=specs.is_spec)),
            strict=True,
        )
    )
    rules = config_lib.WarmStart(**start)
    loaded = warm_start.match(shapes, warm_start.open_source(rules), rules).loaded
    assert loaded.keys() == shapes.keys() and start == {"source": str(folder / "merged")}
    np.testing.assert_array_equal(loaded["embed"].stored.read(()), merged["embed_tokens.weight"])

    # A run that continues from it with a learning rate of nearly zero exports the same bits again.
    changes = {
        "workdir": "more",
        "train.steps": "1",
        "train.eval_every": "0",
        "checkpoint.every": "1",
        "optim.lr": "1e-30",
    }
    loop.run(config_lib.load(f"{folder / 'higgs.py'}:merged", list(changes.items())))
    assert export.main(["more", "--out", "again"]) == 0
    again = safetensors.numpy.load_file(folder / "again" / "model.safetensors")
    assert again.keys() == merged.keys()
    for name, w in merged.items():
        np.testing.assert_array_equal(again[name], w, err_msg=name)
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    with pytest.raises(
        HuggingFaceError,
        match="no text_config or text, no audio_num_codebooks, no audio_codebook_size; name",
    ):
        higgs.from_hugging_face(folder / "bare")

    adapters = [str(folder / "whole"), "play", "--out", str(folder / "none")]
    assert (
        generate_audio.main(adapters) == 2
        and "merge them with `jaxtrain export`" in capsys.readouterr().err
    )
    of_run, of_step = (
        inference.load(str(folder / path)) for path in ("base", "base/checkpoints/1")
    )
    assert of_run.model == of_step.model and of_run.codec is not None
    jax.tree.map(np.testing.assert_array_equal, of_run.params, of_step.params)
    args = [
        str(folder / "merged"),
        "play",
        "--out",
        str(folder / "played"),
        "--each=2",
        "--seconds=0.4",
        "--top-k",
        "8",
        "4",
    ]
    assert generate_audio.main(args) == 0
    answers = [
        json.loads(line) for line in (folder / "played" / "answers.jsonl").read_text().splitlines()
    ]
    assert [a["file"] for a in answers] == ["000-0.npy", "000-1.npy"] and all(
        a["seconds"] <= 0.4 for a in answers
    )
    heard = [np.load(folder / "played" / a["file"]) for a in answers]
    assert all(
        x.shape == (2, round(25 * a["seconds"])) and x.max(initial=0) < 16
        for x, a in zip(heard, answers, strict=True)
    )
    for a in (a for a in answers if a["seconds"]):
        assert all(
            (folder / "played" / a["file"].replace("npy", suffix)).stat().st_size > 50
            for suffix in ("wav", "png")
        )


def lines(folder, i):
    return [json.loads(line) for line in (folder / f"ids{i}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
def test_several_processes_share_the_samples_and_one_writes(folder, number, monkeypatch):
    """Training and evaluation cover each example once over all devices, wait for the slow one, and
    write one file of each kind."""
    monkeypatch.setenv("PROXIED", "loaders.chat.chat_audio")
    overrides = (
        "--config.train.eval_every=0",
        "--config.train.accumulate=2",
        "--config.loader=tests.support.proxy_loader",
    )
    slow = {"only1": {"PAUSE": "0.3"}}
    mesh = ["--config.mesh.fsdp=2"] if number == 4 else []
    both = processes.cluster(folder, "higgs.py", *overrides, *mesh, processes=number, **slow)
    outputs = [p.communicate(timeout=300)[0] for p in both]
    assert [p.returncode for p in both] == [0] * number, outputs
    alone = processes.run(
        folder,
        "higgs.py",
        *overrides,
        "--config.workdir=alone",
        "--config.mesh.data=1",
        IDS=str(folder / "ids.jsonl"),
    )
    assert "encoding 3 recordings" in "".join([*outputs, alone]), "by one process, once"
    assert sum("encoding 3 recordings" in text for text in [*outputs, alone]) == 1

    workdir = folder / "runs" / "higgs"
    tested, trained = [], {}
    for i in range(number):
        for split, position, _, index, weight, epoch in lines(folder, i):
            if split == "test":
                tested += [k for k, w in zip(index, weight, strict=True) if w]
            else:
                trained.setdefault(position, []).extend(zip(index, epoch, strict=True))
    assert len(tested) == len(set(tested)) >= 5
    each = [pair for position in range(1, 9) for pair in trained[position]]
    assert all(len(trained[position]) == 8 for position in range(1, 9)), (
        "disjoint rows of one global batch"
    )
    assert len(each) == len(set(each)), "each sample once in a pass"
    assert not set(tested) & {i for i, _ in each} and set(tested) | {i for i, e in each} <= set(
        range(40)
    )

    single = [json.loads(line) for line in (folder / "ids.jsonl").read_text().splitlines()]
    for split, position, _, index, _, epoch in single:
        if split == "train" and position <= 8:
            assert sorted(zip(index, epoch, strict=True)) == sorted(trained[position]), (
                "whatever the number of number"
            )
    # There is one writer: no line appears twice, and each step has one folder.
    ours, theirs = (processes.records(w, "train") for w in (workdir, folder / "alone"))
    assert sorted(ours) == list(range(1, 9))

    def numbers(record):
        return {name: x for name, x in record.items() if name != "split"}

    for step, record in theirs.items():
        assert numbers(ours[step]) == pytest.approx(numbers(record), rel=2e-3, abs=2e-3), step
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["4", "8"]
    ends = [processes.records(w, "test")[8] for w in (workdir, folder / "alone")]
    assert numbers(ends[0]) == pytest.approx(numbers(ends[1]), rel=2e-3, abs=2e-3)


@pytest.mark.usefixtures("after_first_run")
def test_another_codec_or_tokenizer_than_the_runs_own_is_named_or_refused(capsys):
    with np.load("codec.npz") as file:
        arrays = dict(file)
    np.savez("other.npz", **{**arrays, "books": arrays["books"][:, ::-1]})
    np.savez("third.npz", **{**arrays, "books": arrays["books"][:1]})
    shutil.copy("codec.npz", "copy.npz")
    words = json.loads(pathlib.Path("tokenizer.json").read_text())
    pathlib.Path("other.json").write_text(json.dumps(words, indent=4))
    command = ["generate-audio", "base", "a", "--out", "out", "--seconds=0.1"]
    assert cli.main([*command, "--codec=copy.npz"]) == 0
    assert "warning" not in capsys.readouterr().err, "the same codec at another place"
    assert cli.main([*command, "--codec=other.npz", "--tokenizer=other.json"]) == 0
    said = capsys.readouterr().err
    assert "warning: --codec other.npz is not codec.npz, which " in said
    assert "warning: --tokenizer other.json is not tokenizer.json, which " in said
    assert cli.main([*command, "--codec=third.npz"]) == 2
    assert "the codec has codebooks = 1, and the model of " in capsys.readouterr().err
