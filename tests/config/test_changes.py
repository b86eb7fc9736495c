"""The kinds of all fields, and the changes that a resumed run reports."""

import dataclasses
import functools
import importlib
import inspect
import json

import pytest

from jaxtrain import config as config_lib
from jaxtrain import workload
from jaxtrain.config import changes
from jaxtrain.config.schema import Config, Group, Lora, Optim, Train, WarmStart
from jaxtrain.nn.transformer import Decoder
from loaders.io.checks import FREE, FUNCTION, STATE, OnResume, Section
from loaders.text import tokens

LOADERS = {
    "bird": "loaders.audio.spectrogram",
    "language": "loaders.text.tokens",
    "trm": "loaders.sudoku.sudoku",
    "giblet": "loaders.film.multimodal",
    "audio_language": "loaders.chat.chat_audio",
}


def config_of(model, data, **sections):
    return Config(model=model(), data=data(), optim=Optim(groups=(Group(),)), **sections)


# a run of layers that workloads share
decoder = functools.partial(config_of, Decoder, tokens.Config)


def compare(before, now, digests=None):
    saved = json.loads(config_lib.to_json(before))
    return [(c.path, c.kind, c.old, c.new) for c in config_lib.compare(saved, now, digests or {})]


@pytest.mark.parametrize("name", workload.shipped())
def test_every_field_of_every_section_has_a_kind(name):
    data = importlib.import_module(LOADERS[name.rpartition(".")[2]]).Config
    kinds = dict(changes.kinds(config_of(workload.of(name).config_class(), data)))
    assert [path for path, kind in kinds.items() if kind not in (FREE, FUNCTION, STATE)] == []
    assert {
        kinds["train.steps"],
        kinds["optim.lr"],
        kinds["metrics.every"],
        kinds["mesh.data"],
    } == {FREE}
    assert {kinds["lora.alpha"], kinds["seed"], kinds["model.dtype"]} == {FUNCTION}
    assert {
        kinds["optim.name"],
        kinds["train.ema"],
        kinds["lora.rank"],
        kinds["optim.groups[0].freeze"],
    } == {STATE}


def test_declarations_name_fields_of_their_own_class():
    seen, wrong = [Section], []
    for cls in seen:
        seen += [each for each in cls.__subclasses__() if each not in seen]
        declared = vars(cls).get("on_resume")
        for names in (
            declared[1:]
            if declared and cls.__module__.startswith(("jaxtrain.", "loaders."))
            else ()
        ):
            wrong += [
                f"{cls.__module__}.{cls.__name__}.{n}"
                for n in names
                if n not in inspect.get_annotations(cls)
            ]
    assert len(seen) > 25 and wrong == []


def test_a_change_names_the_field_and_both_values():
    before = decoder(lora=Lora(rank=2), train=Train(steps=10))
    now = dataclasses.replace(
        before,
        lora=Lora(rank=2, alpha=64.0),
        train=Train(steps=20),
        model=dataclasses.replace(
            before.model, window=2, rope=dataclasses.replace(before.model.rope, theta=5e5)
        ),
        optim=Optim(groups=(Group(lr=0.5),)),
    )
    assert compare(before, now) == [
        ("model.rope.theta", FUNCTION, 1e4, 5e5),
        ("model.window", FUNCTION, 0, 2),
        ("train.steps", FREE, 10, 20),
        ("optim.groups[0].lr", FREE, None, 0.5),
        ("lora.alpha", FUNCTION, 16.0, 64.0),
    ]
    assert compare(before, before) == []
    change = config_lib.Change("model.rope.theta", FUNCTION, 1e4, 5e5)
    assert (
        change.is_allowed(["model.rope"])
        and change.is_allowed(["model.rope.theta"])
        and not change.is_allowed(["model.ro"])
    )


def test_sections_that_nothing_reads_are_not_compared():
    """Without adapters nothing is frozen, and a resumed run reads no source."""
    before = decoder(warm_start=WarmStart(source="a", skip=("x",)), lora=Lora(alpha=1.0))
    assert compare(before, decoder()) == []


def test_an_older_config_had_the_defaults_of_fields_that_it_lacks():
    saved = json.loads(config_lib.to_json(decoder()))
    del saved["model"]["window"], saved["lora"], saved["resume"]["allow"]
    assert config_lib.compare(saved, decoder(), {}) == []
    now = decoder()
    now = dataclasses.replace(now, model=dataclasses.replace(now.model, window=3))
    assert [str(c) for c in config_lib.compare(saved, now, {})] == [
        "config.model.window: 0 saved, 3 now"
    ]


def test_a_users_section_without_declarations_is_compared():
    @dataclasses.dataclass(frozen=True)
    class Own(Decoder):
        mine: int = 1

    @dataclasses.dataclass(frozen=True)
    class Data(tokens.Config):
        on_resume = OnResume(FREE)
        also_mine: int = 1

    before, now = (
        Config(model=Own(), data=Data()),
        Config(model=Own(mine=2, remat="full"), data=Data(also_mine=2)),
    )
    assert compare(before, now) == [
        ("model.remat", FREE, "none", "full"),
        ("model.mine", FUNCTION, 1, 2),
        ("data.also_mine", FREE, 1, 2),
    ]


def test_an_allowed_name_must_be_a_field(tmp_path):
    tree = {
        "workload": "tests.support.toy",
        "loader": "tests.support.toy_rows",
        "workdir": str(tmp_path),
    }
    for name in ("lora.alfa", "model.nothing"):
        with pytest.raises(
            config_lib.ConfigError, match=f"resume.allow names '{name}', which is no field"
        ):
            config_lib.from_dict(tree | {"resume": {"allow": (name,)}})
    config_lib.from_dict(
        tree | {"resume": {"allow": ("lora.alpha", "model", "data.exclude", "warm_start.source")}}
    )
