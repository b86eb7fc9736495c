"""A warm start tells what its source computed otherwise, and refuses weights of other tokens."""

import json
import shutil

import pytest
import tokenizers

from jaxtrain import cli

WORDS = ["[unk]", "the", "wren", "owl", "sings"]
CONFIG = """
def get_config(corpus="corpus"):
    return dict(
        workload="jaxtrain.workloads.language", loader="loaders.text.tokens",
        model=dict(embed=8, depth=1, heads=2, mlp=8, dtype="float32"),
        data=dict(sources=(dict(path=corpus),), context=8, packing="concat"),
        train=dict(steps=2, batch=8, eval_every=0), optim=dict(lr=0.1, schedule="constant"),
        checkpoint=dict(every=2), metrics=dict(every=1),
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, its export, and the same texts by a tokenizer of the same words in another order."""
    folder = tmp_path_factory.mktemp("functions")
    (folder / "cfg.py").write_text(CONFIG)
    lines = [json.dumps({"text": "the wren sings the owl sings"}) + "\n" for _ in range(40)]
    (folder / "a.jsonl").write_text("".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, words in (("corpus", WORDS), ("other", [WORDS[0], *WORDS[:0:-1]])):
            vocabulary = {word: i for i, word in enumerate(words)}
            model = tokenizers.models.WordLevel(vocabulary, unk_token="[unk]")
            tokenizer = tokenizers.Tokenizer(model)
            tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
            tokenizer.save(f"{name}.json")
            command = ["tokens", name, "a.jsonl", f"--tokenizer={name}.json"]
            assert cli.main(command) == 0
        assert cli.main(["train", "--config=cfg.py", "--config.workdir=base"]) == 0
        assert cli.main(["export", "base", "--out", "export"]) == 0
        yield folder


def start(workdir, source, *overrides, corpus="corpus"):
    command = ["train", f"--config=cfg.py:{corpus}", f"--config.workdir={workdir}"]
    return cli.main([*command, f"--config.warm_start.source={source}", *overrides])


def test_each_field_of_the_function_is_named_with_both_values(folder, caplog):
    changes = ["--config.model.window=3", "--config.model.eps=0.1", "--config.model.rope.theta=5"]
    assert start("changed", "export", *changes, "--config.optim.lr=0.2") == 0
    (line,) = [r.getMessage() for r in caplog.records if "another function" in r.getMessage()]
    assert "config.model.window: 0 saved, 3 now" in line
    assert "config.model.eps: 1e-05 saved, 0.1 now" in line
    assert "config.model.rope.theta: 10000.0 saved, 5.0 now" in line
    assert line.count(" saved, ") == 3, "nothing that leaves the function as it is"


def test_the_same_function_is_not_mentioned(folder, caplog):
    assert start("same", "base") == 0
    assert "another function" not in caplog.text


def test_weights_of_other_tokens_are_refused_by_both_tokenizers(folder, capsys):
    for source, theirs in (("export", "export/tokenizer.json"), ("base", "corpus/tokenizer.json")):
        assert start("tokens", source, corpus="other") == 2
        said = capsys.readouterr().err
        assert f"its tokens are those of {theirs}, and this run's are those of other/tok" in said
        assert "id 1 is 'the' there and 'sings' here (4 of 5 ids differ)" in said
    meant = "--config.warm_start.other_front_end=true"
    assert start("tokens", "export", meant, corpus="other") == 0


def test_splits_and_prompts_of_other_tokens_are_refused(folder, capsys):
    shutil.copytree("corpus", "mixed/train")
    shutil.copytree("other", "mixed/test")
    assert start("mixed-run", "base", corpus="mixed") == 2
    said = capsys.readouterr().err
    assert "mixed/train/tokenizer.json and mixed/test/tokenizer.json have other tokens" in said
    assert start("prompts", "base", "--config.model.tokenizer=other.json") == 2
    assert "config.model.tokenizer is 'other.json', and the data's" in capsys.readouterr().err


def test_a_tokenizer_that_was_replaced_since_is_not_used_for_prompts(folder, capsys):
    shutil.copytree("corpus", "replaced")
    command = ["train", "--config=cfg.py:replaced", "--config.workdir=run"]
    assert cli.main(command) == 0
    shutil.copy("other.json", "replaced/tokenizer.json")
    assert cli.main(["generate", "run", "the", "--tokens=2"]) == 2
    said = capsys.readouterr().err
    assert "replaced/tokenizer.json, config.model.tokenizer of" in said
    assert "is not the file that the run was trained with" in said
    assert cli.main(["generate", "run", "the", "--tokens=2", "--tokenizer=corpus.json"]) == 0


def test_a_replay_from_step_0_needs_the_weights_that_the_run_began_with(folder, capsys):
    shutil.copytree(folder / "export", folder / "weights")
    digests = "--config.metrics.digest=true"
    assert start("begun", "weights", digests) == 0
    command = ["replay", "begun", "--step", "1", "--until", "2", "--no-page"]
    assert cli.main([*command, "--out", "replayed"]) == 0
    assert "identical to step 2" in capsys.readouterr().out

    shutil.rmtree(folder / "weights")
    other = ["--config.seed=1", "--config.workdir=other-base"]
    assert cli.main(["train", "--config=cfg.py", *other]) == 0
    assert cli.main(["export", "other-base", "--out", "weights"]) == 0
    capsys.readouterr()
    assert cli.main([*command, "--out", "replayed-other"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "began with other weights than those of config.warm_start.source = weights" in said
    assert "put its weights back" in said and not (folder / "replayed-other").exists()
