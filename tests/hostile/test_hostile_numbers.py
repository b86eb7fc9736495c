"""Numbers and values that no machine can serve are refused by name, at the place where they are
given."""

import json

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxtrain import config as config_lib
from jaxtrain.arrays import orbax_steps, run_workload
from jaxtrain.arrays.stored import StoredError
from loaders import _rust, base
from loaders.audio import spectrogram
from loaders.chat import codec
from tests.hostile.inputs import tone


@pytest.mark.parametrize(
    "call",
    [
        lambda: _rust.front_end(np.zeros(3200, np.float32), 32_000, 3200, 2**60),
        lambda: _rust.front_end(np.zeros(3200, np.float32), 32_000, 3200, 2**24),
        lambda: _rust.front_end(np.zeros(3200, np.float32), 1, 3200, 20),
        lambda: _rust.resample(np.zeros(1 << 20, np.float32), 1, 32_000),
        lambda: _rust.resample(np.zeros(3200, np.float32), 4_000_000_000, 32_000),
        lambda: _rust.resample(np.zeros(2 << 20, np.float32), 1_000, 768_000),
        lambda: _rust.sudoku_generate(2**40),
        lambda: _rust.sudoku_generate(4, threads=2**20),
        lambda: _rust.sudoku_generate(4, start=2**64 - 2),
        lambda: _rust.sudoku_solve(np.zeros((1, 81), np.uint8), threads=2**20),
    ],
    ids=[
        "frames",
        "many frames",
        "rate",
        "up",
        "down",
        "long",
        "puzzles",
        "threads",
        "start",
        "solve",
    ],
)
def test_a_size_beyond_all_bounds_is_an_error(call):
    with pytest.raises(ValueError, match="must|expected|at most|more than"):
        call()


@pytest.mark.parametrize("rate", [1, 999, 768_001, 4_000_000_000])
def test_a_recording_that_claims_a_rate_beyond_bounds_is_refused_by_every_reader(rate):
    content = bytearray(tone(0.05))
    content[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(ValueError, match=f"has a sample rate of {rate} Hz; expected one in"):
        _rust.decode(bytes(content))


def test_a_bomb_in_a_codec_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "codec.npz", version=1, mean=np.zeros(300 << 10, np.float32))
    content = bytearray((tmp_path / "codec.npz").read_bytes())
    # the place of the array's size in the archive's directory
    at = content.rindex(b"PK\x01\x02") + 24
    assert int.from_bytes(content[at : at + 4], "little") == (300 << 12) + 128
    content[at : at + 4] = (300 << 22).to_bytes(4, "little")
    (tmp_path / "codec.npz").write_bytes(content)
    with pytest.raises(base.DataError, match="unpacks to .* bytes; at most"):
        codec.open_codec(str(tmp_path / "codec.npz"), codebooks=1, size=1, frame_rate=1)


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        (
            {"train": {"steps": 3_000_000_000}},
            "config.train.steps is 3000000000; it must be at most 2147483647",
        ),
        ({"data": {"threads": 1_000_000}}, "config.data.threads is 1000000; expected 0 to 1024"),
    ],
)
def test_numbers_of_a_config(changes, where, tmp_path):
    with pytest.raises(config_lib.ConfigError, match=where):
        names = {"workload": "jaxtrain.workloads.bird", "loader": "loaders.audio.spectrogram"}
        config_lib.from_dict({**names, "workdir": str(tmp_path), **changes})


@pytest.mark.parametrize(
    "field, value", [("n_frames", 10**30), ("threads", -(2**63) - 1), ("clip_seconds", 10**400)]
)
def test_a_number_that_no_machine_has(field, value):
    with pytest.raises(config_lib.ConfigError, match="expected a number of at most 63 bits"):
        config_lib.section(spectrogram.Config, {field: value})


@pytest.mark.parametrize("returned", ["5", "None", "'x'", "[1]", "{1: 2}"])
def test_a_config_file_that_returns_no_config(returned, tmp_path):
    (tmp_path / "five.py").write_text(f"def get_config():\n    return {returned}\n")
    with pytest.raises(config_lib.ConfigError, match="expected a ConfigDict"):
        config_lib.load(str(tmp_path / "five.py"))


@pytest.mark.parametrize(
    "wrong", [np.zeros((2, 3)), np.zeros((2, 4), np.float32), np.zeros((3, 3), np.float32)]
)
def test_a_loader_that_gives_other_rows_than_it_declares_is_refused(wrong):
    class Wrong(base.Loader):
        order, fingerprint = {}, ""

        def _part(self, position, row):
            return {"x": wrong}

    fields = {"x": base.Field((3,), np.dtype(np.float32))}
    with pytest.raises(
        base.DataError, match=r"field 'x' as float.*element_spec\(\) declares float32 \[2, 3\]"
    ):
        next(Wrong(fields, train=True, rows=base.Rows(2, ((0, 2),)), seed=0, n_batches=1))


def test_a_size_of_a_model_has_31_bits():
    with pytest.raises(
        StoredError, match="config.model.window is 3000000000; expected a number of at most 31 bits"
    ):
        run_workload.model_of({"model": {"depth": 1, "window": 3_000_000_000}})


@pytest.mark.parametrize(
    "lie, reason",
    [
        ({"shape": [2**40], "chunks": [2**40]}, "to read it takes"),
        ({"shape": [2**40], "chunks": [1]}, "chunks; at most"),
        ({"dtype": "|V1000000000"}, "its tree says|cannot be read"),
    ],
)
def test_an_array_of_zeros_is_no_larger_than_the_memory(tmp_path, lie, reason):
    """Such an array takes no space in a file, but tensorstore would ask for all of its memory, or
    look for all of its parts."""
    state = tmp_path / "state"
    ocp.PyTreeCheckpointer(use_ocdbt=False).save(state, {"w": np.zeros((4, 4), np.float32)})
    path = state / "w" / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **lie}))
    with pytest.raises(StoredError, match=reason):
        orbax_steps.open_step(tmp_path)["w"].read(())
