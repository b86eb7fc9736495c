"""The language model as a user runs it: from weights of Hugging Face, with adapters, stopped and
resumed, and exported."""

import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from jaxtrain import config as config_lib
from jaxtrain.commands import export, lora_to_peft
from jaxtrain.run import loop
from jaxtrain.workloads.language import hugging_face as language_files
from jaxtrain.workloads.language import model as language
from loaders.io.checks import FUNCTION, UserError
from loaders.text import tokens
from tests.support import processes, small_runs

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "lm"


@pytest.fixture
def folder(tmp_path):
    return small_runs.lm(tmp_path)


def test_a_tokenizer_below_a_home_that_does_not_exist_is_refused_by_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(
        UserError,
        match="~no-such-user/x: there is no such home on this machine; write the path out",
    ):
        config_lib.load("lm.py", [("model.tokenizer", "~no-such-user/x")])


def test_adapters_on_weights_from_elsewhere_stopped_and_resumed(folder):
    """The frozen weights, which no checkpoint holds, are read again. The final weights are the same
    bit for bit."""
    whole = processes.run(folder, "lm.py", "--config.workdir=whole")
    assert "parameters loaded" in whole
    processes.run(folder, "lm.py", "--config.workdir=parts", "--config.train.steps=3")
    assert "resuming from step 3" in processes.run(folder, "lm.py", "--config.workdir=parts")
    saved = processes.hashes(folder / "parts", 6)
    assert saved == processes.hashes(folder / "whole", 6)
    assert not [path for path in saved if path.endswith(("['w_q']", "['embed']"))]
    assert any(path.endswith("['w_q']['w_a']") for path in saved)
    records = processes.records(folder / "whole", "train")
    assert records[6]["loss"] < records[1]["loss"] - 1
    last = processes.records(folder / "whole", "test")[6]
    assert (
        last["perplexity"] == pytest.approx(np.exp(last["cross_entropy"]), rel=1e-6)
        and last["bits_per_byte"] > 0
    )
    assert not processes.unexplained(folder / "whole")
    lines = [
        json.loads(line)
        for line in (folder / "whole" / "generations.jsonl").read_text().splitlines()
    ]
    assert [(x["step"], x["prompt"]) for x in lines] == [(3, "one "), (6, "one ")]

    assert export.main([str(folder / "whole"), "--out", str(folder / "merged")]) == 0
    assert lora_to_peft.main([str(folder / "whole"), "--out", str(folder / "adapter")]) == 0
    merged, base = (
        safetensors.numpy.load_file(f / "model.safetensors")
        for f in (folder / "merged", DATA / "qwen2")
    )
    adapter = safetensors.numpy.load_file(folder / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    for name, w in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in adapter:
            w = w + 16.0 / 2 * (adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"])
            assert np.abs(merged[name] - base[name]).max() > 1e-3
        np.testing.assert_allclose(merged[name], w, rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_an_export_is_trained_on_and_exported_again(folder, monkeypatch):
    """`--config=lm:FOLDER,TEXT`, of a folder from elsewhere and of an export.

    The second run has a learning rate of nearly zero: its export equals its start, bit for bit.
    """
    monkeypatch.chdir(folder)
    fields = {
        "model.dtype": "float32",
        "model.remat": "none",
        "model.context": "32",
        "data.context": "32",
        "data.text": "bytes",
        "train.steps": "1",
        "train.batch": "8",
        "train.eval_every": "0",
        "optim.schedule": "constant",
        "optim.warmup": "0",
        "optim.decay": "0",
        "checkpoint.every": "1",
        "metrics.every": "1",
    }
    source, made = DATA / "qwen2", []
    for name, rate in (("first", "1e-2"), ("second", "1e-30")):
        overrides = fields | {"workdir": name, "optim.lr": rate}
        loop.run(config_lib.load(f"lm:{source},text.txt", list(overrides.items())))
        assert export.main([name, "--out", f"{name}-out"]) == 0
        source = folder / f"{name}-out"
        made.append(safetensors.numpy.load_file(source / "model.safetensors"))
    begun = safetensors.numpy.load_file(DATA / "qwen2" / "model.safetensors")
    assert begun.keys() == made[0].keys() == made[1].keys()
    assert all(
        np.abs(made[0][key] - x).max() > 1e-3
        for key, x in begun.items()
        if key.endswith("proj.weight")
    )
    for key, x in made[0].items():
        np.testing.assert_array_equal(made[1][key], x, err_msg=key)
    assert language_files.read_config(folder / "second-out") == language_files.read_config(
        DATA / "qwen2"
    )


def test_a_tokenizer_is_compared_by_its_content(tmp_path):
    def config(name, text):
        (tmp_path / name).write_text(text)
        return config_lib.Config(
            model=language.Config(tokenizer=str(tmp_path / name)), data=tokens.Config()
        )

    def changes(now, digests):
        return config_lib.compare(json.loads(config_lib.to_json(before)), now, digests)

    before = config("a.json", "1")
    digests = config_lib.digests_of(before)
    assert changes(config("b.json", "1"), digests) == [], "it was moved"
    assert [change.path for change in changes(config("b.json", "2"), digests)] == [
        "model.tokenizer"
    ]
    (change,) = changes(config("a.json", "2"), digests)
    assert str(change).endswith("a.json' now with other content") and change.kind == FUNCTION
