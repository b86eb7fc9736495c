"""The targets of `make fuzz`: their seeds match their descriptions. In the long form the targets
are built and find nothing."""

import pathlib
import shutil
import sys
import tomllib

import pytest

from loaders import _rust
from tests.proofs import fuzz

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_every_binary_has_targets_and_every_target_seeds_of_its_format():
    pytest.importorskip("av")
    manifest = tomllib.loads((fuzz.FUZZ / "Cargo.toml").read_text())
    assert {each["name"] for each in manifest["bin"]} == {
        target.binary for target in fuzz.TARGETS.values()
    }
    assert all((fuzz.FUZZ / each["path"]).is_file() for each in manifest["bin"])
    for name, target in fuzz.TARGETS.items():
        seeds = list(fuzz.seeds(name))
        assert seeds and all(len(seed) <= fuzz.LARGEST for seed in seeds)
        if target.binary == "decode":
            for seed in seeds:
                wave, rate, frames = _rust.decode(seed)
                assert (
                    len(wave) == frames > 0 and rate in (16_000, 48_000) and abs(wave).max() > 0.2
                ), name


@pytest.mark.parametrize("minutes", ["nan", "0.0", "-1.0"])
def test_fuzzing_for_no_time_is_refused_and_does_not_find_nothing(minutes, monkeypatch, capsys):
    monkeypatch.setattr(fuzz, "build", lambda folder: pytest.fail("built"))
    with pytest.raises(SystemExit, match="2"):
        fuzz.main(["wav", f"--minutes={minutes}"])
    assert f"--minutes is {minutes}; expected a number above 0" in capsys.readouterr().err


TARGET = """#!{python}
import pathlib, sys, time
folder = pathlib.Path({folder!r})
[found] = [each.partition("=")[2] for each in sys.argv if each.startswith("-artifact_prefix=")]
[seconds] = [each.partition("=")[2] for each in sys.argv if each.startswith("-max_total_time=")]
with (folder / "asked").open("a") as file:
    file.write(seconds + "\\n")
while time.process_time() < {cpu}:
    pass
print("#10 cov: 7")
if {crashes}:
    pathlib.Path(found + "crash-1").write_bytes(b"the same")
    sys.exit(77)
"""


@pytest.fixture
def target(tmp_path):
    """Makes a program that replaces libFuzzer's: it uses a given CPU time, and crashes or not."""

    def make(cpu, crashes=False):
        path = tmp_path / "target"
        path.write_text(
            TARGET.format(python=sys.executable, folder=str(tmp_path), cpu=cpu, crashes=crashes)
        )
        path.chmod(0o755)
        return path

    return make


def test_a_crash_that_comes_again_is_found_again(tmp_path, target):
    """The crash's input has the same name each time."""
    for _ in range(2):
        result = fuzz.fuzz(
            "wav", target(0.0, crashes=True), tmp_path / "corpus", tmp_path / "found", seconds=1
        )
        assert [path.name for path in result.found] == ["crash-1"] and result.runs == 10


def test_a_target_is_fuzzed_until_its_cpu_time_is_used(tmp_path, target):
    """The CPU time counts, however long that takes by the clock on a busy machine."""
    result = fuzz.fuzz("wav", target(0.4), tmp_path / "corpus", tmp_path / "found", seconds=1.0)
    asked = [int(line) for line in (tmp_path / "asked").read_text().split()]
    assert result.seconds >= 1.0 and 2 <= len(asked) <= 3 and asked == [1] * len(asked)
    assert result.runs == 10 * len(asked) and result.coverage == 7 and not result.found


@pytest.mark.slow
def test_the_targets_are_built_and_find_nothing_in_seconds(tmp_path):
    if not shutil.which("cargo") or not shutil.which("g++"):
        pytest.skip("cargo and a C++ compiler build libFuzzer")
    binaries = fuzz.build(fuzz.machine.cache_folder("fuzz", "target"))
    for name, target in fuzz.TARGETS.items():
        result = fuzz.fuzz(
            name, binaries / target.binary, tmp_path / name, tmp_path / "found", seconds=10
        )
        assert (
            not result.found
            and result.runs > 100
            and result.coverage > 20
            and 0.5 < result.seconds < 60
        ), (name, result)
