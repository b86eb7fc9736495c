"""A resumed run trains the function in its checkpoint, on the weights that it froze. Otherwise it
reports why it cannot."""

import json
import pathlib
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxtrain import config as config_lib
from jaxtrain.arrays import base_weights
from jaxtrain.checkpoint import CheckpointError
from jaxtrain.commands import checkpoint, export, lora_to_peft
from jaxtrain.run import loop
from tests.support import small_runs

LORA = {"lora__rank": "2", "lora__alpha": "8", "warm_start__source": "A", "seed": "1"}


def train(workdir, **fields):
    overrides = {name.replace("__", "."): value for name, value in fields.items()}
    result = loop.run(config_lib.load("cfg.py", [("workdir", str(workdir)), *overrides.items()]))
    return result.evaluation.get("cross_entropy")


def adapters(workdir, **fields):
    return train(workdir, **{**LORA, **fields})


def make_runs(folder, *, kept):
    """Make a base at steps 2 and 4, adapters B on its step 2, and K and F with copies of their base
    if ``kept``. Return the folder, and the end of B, which was trained before A was resumed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        small_runs.of_bytes(folder)
        train("A")
        adapters("B")
        if kept:
            adapters("K", warm_start__keep="true")
            adapters("F", warm_start__keep="true", checkpoint__folder="apart/F")
        shutil.copytree("B", "before")
        ended = adapters("before", train__steps="4")
        assert export.main(["B", "--out", "exported"]) == 0
        train("A", train__steps="4")
    return folder, ended


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"), kept=False)


@pytest.fixture
def folder(runs, tmp_path, monkeypatch):
    shutil.copytree(runs[0], tmp_path / "all", copy_function=shutil.copy)
    monkeypatch.chdir(tmp_path / "all")
    return tmp_path / "all"


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_a_base_that_trains_on_changes_nothing(runs, folder):
    record = json.loads((folder / "B" / "checkpoints" / "2" / "data" / "metadata").read_text())[
        "base"
    ]
    assert record["source"] == str(runs[0] / "A" / "checkpoints" / "2") and record["named"] == "A"
    assert adapters("B", train__steps="4") == runs[1]
    assert export.main(["B", "--step", "2", "--out", "again"]) == 0
    assert weights(folder / "again") == weights(folder / "exported")


def test_a_base_that_is_gone_or_differs_ends_every_command_that_needs_it(runs, folder, capsys):
    record = folder / "B" / "checkpoints" / "2" / "data" / "metadata"
    record.write_text(record.read_text().replace(str(runs[0]), str(folder)))  # the copy's own A
    (folder / "B" / "checkpoints" / "2" / "manifest.json").unlink()
    (folder / "A" / "checkpoints" / "2").rename(folder / "elsewhere")
    commands = (
        lambda name: export.main(["B", "--out", name]),
        lambda name: lora_to_peft.main(["B", "--out", name]),
        lambda name: checkpoint.main(["export", "B", "--out", name]),
    )
    for i, command in enumerate(commands):
        assert command(f"out{i}") != 0 and not (folder / f"out{i}").exists()
        found = capsys.readouterr().err
        assert f"{folder}/A/checkpoints/2, digest " in found and "gone or differ" in found
    with pytest.raises(
        CheckpointError, match=r"gone or differ.*--config.resume.allow=warm_start.source"
    ):
        adapters("B", train__steps="4")
    assert export.main(["B", "--base", "A", "--out", "wrong"]) != 0
    assert "holds other weights" in capsys.readouterr().err
    assert export.main(["B", "--base", "elsewhere", "--out", "right"]) == 0
    assert weights(folder / "right") == weights(folder / "exported")


@pytest.mark.slow
def test_a_kept_base_is_used_when_its_run_is_gone(tmp_path, monkeypatch):
    """This also holds for a run that resumes from another run's checkpoints, and for an export of
    checkpoints in separate folders."""
    monkeypatch.chdir(tmp_path)
    folder, ended = make_runs(tmp_path, kept=True)
    base = [path for path in (folder / "K" / "base").rglob("*") if path.is_file()]
    assert base and not any(path.stat().st_nlink > 1 for path in base)
    shutil.rmtree(folder / "A")
    for run in ("K", "apart/F"):
        assert export.main([run, "--out", f"{run}-kept"]) == 0
        assert weights(folder / f"{run}-kept") == weights(folder / "exported")
    for workdir, fields in (("other", {"resume__path": "K"}), ("K", {})):
        assert adapters(workdir, train__steps="4", **fields) == ended


@pytest.mark.slow
def test_an_export_has_the_frozen_weights_as_the_run_rounded_them(folder, capsys):
    """For peft, which reads no run, the base is written beside the adapters."""
    adapters("rounded", lora__dtype="bfloat16", warm_start__source="A/checkpoints/2")
    base, merged, trained = (folder / name for name in ("base", "merged", "adapters"))
    assert (
        export.main(["A", "--step", "2", "--out", "base"])
        == export.main(["rounded", "--out", "merged"])
        == 0
    )
    assert lora_to_peft.main(["rounded", "--base", "A/checkpoints/2", "--out", "adapters"]) == 0
    written = folder / "adapters-base"
    assert f"their base is a run, whose weights are written to {written}" in capsys.readouterr().out
    about = json.loads((trained / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(written), "peft may read it anywhere"
    assert weights(written) == weights(base)
    assert (written / "config.json").read_text() == (base / "config.json").read_text()
    assert lora_to_peft.main(["rounded", "--out", "adapters"]) == 2
    assert lora_to_peft.main(["rounded", "--base", "base", "--out", "other"]) == 0
    about = json.loads((folder / "other" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(base) and not (folder / "other-base").exists()
    base, merged = (
        safetensors.numpy.load_file(place / "model.safetensors") for place in (base, merged)
    )
    factors = safetensors.numpy.load_file(trained / "adapter_model.safetensors")
    for name, x in merged.items():
        kept = base[name].astype(ml_dtypes.bfloat16).astype("f8")
        a, b = (
            factors.get(f"base_model.model.{name.removesuffix('weight')}lora_{side}.weight")
            for side in "AB"
        )
        assert (
            name == "model.embed_tokens.weight" or "norm" in name or "head" in name or a is not None
        ), name
        np.testing.assert_allclose(
            x, kept + (0 if a is None else 8 / 2 * b.astype("f8") @ a), atol=1e-7
        )


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"lora__alpha": "64", "model__window": "2"},
            r"model.window: 0 saved, 2 now; .*lora.alpha: 8.0 saved, 64.0 now",
        ),
        (
            {"optim__name": "lion", "train__ema": "0.9"},
            r"other arrays.*ema: 0.0 saved, 0.9 now; .*'adamw' saved, 'lion' now",
        ),
        (
            {"train__batch": "16"},
            r"config.train.batch: 8 saved, 16 now; order: .*resume.data='restart'",
        ),
        (
            {"warm_start__source": ""},
            r"would be random \(config.warm_start.source: 'A' saved, '' now\)",
        ),
        (
            {"warm_start__source": "A/checkpoints/4"},
            r"'A' saved, 'A/checkpoints/4' now; .* holds other weights",
        ),
    ],
    ids=str,
)
def test_a_changed_field_is_named_and_nothing_is_trained(runs, monkeypatch, fields, error):
    monkeypatch.chdir(runs[0])
    with pytest.raises(CheckpointError, match=error):
        adapters("B", **{**fields, "train__steps": "4"})
    assert [step.name for step in (runs[0] / "B" / "checkpoints").iterdir()] == ["2"]


@pytest.mark.slow
def test_a_change_that_is_meant_is_trained_and_then_recorded(folder, caplog):
    with caplog.at_level("INFO", "jaxtrain"):
        adapters(
            "B", train__steps="4", lora__alpha="16", optim__clip="0.5", resume__allow="lora.alpha"
        )
        assert (
            "config.optim.clip: 1.0 saved, 0.5 now; config.lora.alpha: 8.0 saved, 16.0 now"
            in caplog.text
        )
        adapters(
            "B",
            train__steps="6",
            lora__alpha="16",
            warm_start__source="A/checkpoints/4",
            resume__allow="warm_start",
        )
    record = json.loads((folder / "B" / "checkpoints" / "6" / "data" / "metadata").read_text())[
        "base"
    ]
    assert record["source"] == str(folder / "A" / "checkpoints" / "4")


def test_frozen_weights_that_were_initialised_are_named_by_no_source():
    """Not even "." is a name, although an empty path leads to it."""
    base = base_weights.Base("", "", "0123")
    assert base.is_named("") and not base.is_named(".")


def test_a_copy_of_a_base_is_never_taken_for_another_of_the_same_name(tmp_path):
    places = []
    for name in ("one", "other"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "model.safetensors").write_text(name)
        rules = config_lib.WarmStart(source=str(tmp_path / name / "model"))
        place = base_weights.keep(
            rules, str(tmp_path / "run"), {"one": "00000aa", "other": "00000bb"}[name]
        )
        assert (
            base_weights.keep(base_weights.at(rules, place), str(tmp_path / "run"), "00000cc")
            == place
        ), "a copy of its own"
        places.append(place)
        base = base_weights.Base(
            rules.source, rules.source, f"{pathlib.Path(place).name.partition('-')[0]}123"
        )
        assert base_weights.places(base, [tmp_path / "run"]) == [place, rules.source]
        assert (pathlib.Path(place) / "model.safetensors").read_text() == name
    assert places[0] != places[1]


@pytest.mark.slow
def test_an_export_never_has_the_tokenizer_of_other_tokens(folder):
    """A run on bytes or characters, or with its own tokenizer, has none of its base's names for
    tokens."""
    assert export.main(["A", "--step", "2", "--out", "base"]) == 0
    tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[unk]": 0, "owl": 255}, unk_token="[unk]")
    ).save("base/tokenizer.json")
    for name in ("config.json", "generation_config.json"):
        about = (
            json.loads((folder / "base" / name).read_text())
            if (folder / "base" / name).exists()
            else {"top_k": 5}
        )
        (folder / "base" / name).write_text(
            json.dumps(about | {"eos_token_id": 7, "bos_token_id": 8, "pad_token_id": 9})
        )
    tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[unk]": 0, "one": 1}, unk_token="[unk]")
    ).save("own.json")
    (folder / "base" / "own.json").write_bytes((folder / "own.json").read_bytes())
    for name, fields, found in (
        ("bytes", {}, None),
        ("own", {"model__tokenizer": "own.json"}, "own.json"),
        ("beside", {"model__tokenizer": "base/own.json"}, "base/own.json"),
        ("base's", {"model__tokenizer": "base/tokenizer.json"}, "base/tokenizer.json"),
    ):
        # its tokenizer.json has other tokens than these runs, but for the last one
        train(name, warm_start__source="base", warm_start__other_front_end="true", **fields)
        assert export.main([name, "--out", f"{name}-out"]) == 0
        out = folder / f"{name}-out"
        assert (out / "tokenizer.json").exists() == bool(found)
        assert not found or (out / "tokenizer.json").read_bytes() == (folder / found).read_bytes()
        config, generation = (
            json.loads((out / f"{each}.json").read_text())
            for each in ("config", "generation_config")
        )
        ids = [config.get(f"{each}_token_id") for each in ("eos", "bos", "pad")]
        assert (
            ids == ([7, 8, 9] if found == "base/tokenizer.json" else [None] * 3)
            and generation["top_k"] == 5
        )
        assert generation.get("bos_token_id") == ids[1]
