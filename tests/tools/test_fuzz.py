"""The targets of `make fuzz`: their seeds are what they say, and in the long form they are built and find nothing."""

import pathlib
import shutil
import tomllib

import pytest

from loaders import _rust
from tools import fuzz

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_binary_has_targets_and_every_target_seeds_of_its_format():
    manifest = tomllib.loads((fuzz.FUZZ / "Cargo.toml").read_text())
    assert {each["name"] for each in manifest["bin"]} == {target.binary for target in fuzz.TARGETS.values()}
    assert all((fuzz.FUZZ / each["path"]).is_file() for each in manifest["bin"])
    for name, target in fuzz.TARGETS.items():
        seeds = list(fuzz.seeds(name))
        assert seeds and all(len(seed) <= fuzz.LARGEST for seed in seeds)
        if target.binary == "decode":
            for seed in seeds:
                wave, rate, frames = _rust.decode(seed)
                assert len(wave) == frames > 0 and rate in (16_000, 48_000) and abs(wave).max() > 0.2, name


@pytest.mark.slow
def test_the_targets_are_built_and_find_nothing_in_seconds(tmp_path):
    if not shutil.which("cargo") or not shutil.which("g++"):
        pytest.skip("cargo and a C++ compiler build libFuzzer")
    binaries = fuzz.build(fuzz.machine.cache_folder("fuzz", "target"))
    for name, target in fuzz.TARGETS.items():
        result = fuzz.fuzz(name, binaries / target.binary, tmp_path / name, tmp_path / "found", seconds=10)
        assert not result.found and result.runs > 100 and result.coverage > 20 and 0.5 < result.seconds < 60, (name, result)
