"""The plan of the full recipe for one GPU: what it costs, before it is started."""

import importlib.util
import pathlib

import pytest

from tools import compile_for

CONFIG = f"--config={pathlib.Path(__file__).parents[2] / 'configs' / 'trm_sudoku.py'}"
FEW = "--config.data.sources=({'n_train': 20, 'n_test': 5, 'blanks': (20, 30)},)"


def test_the_full_recipe_on_one_gpu(capsys, tmp_path):
    """35 applications of the net, seven of them forward and backward: 3.3e13 FLOP for 768 rows, by hand."""
    compile_for.main(["--topology=h100", CONFIG, FEW, f"--config.workdir={tmp_path}"])
    output = capsys.readouterr().out
    mix, channels = 3 * 97 * 512 * 512, 3 * 512 * 1536 * 97
    flops = 768 * (2 * 2 * 35 * (mix + channels) + 3 * (2 * 81 * 512 * 11 + 2 * 512 * 2))
    assert f"{flops:.3e} FLOP per step" in output
    assert f"65104 steps in {65104 * flops / (0.4 * 989e12) / 3600:.2f} h" in output
    assert "of which the carry 153.1 MB" in output


def test_an_unknown_device_is_named(tmp_path):
    with pytest.raises(SystemExit, match="k80 is unknown; there are v4"):
        compile_for.main(["--topology=k80", CONFIG, FEW, f"--config.workdir={tmp_path}"])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the extra topology is not installed")
def test_a_step_compiles_for_a_tpu_topology(capsys, tmp_path):
    compile_for.main(["--topology=v4:2x2x4", CONFIG, FEW, f"--config.workdir={tmp_path}"])
    output = capsys.readouterr().out
    assert "mesh {'data': 16, 'fsdp': 1, 'model': 1} of TPU v4" in output
    assert "all-reduce" in output and "GB per device" in output
