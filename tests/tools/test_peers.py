"""The twins of PyTorch at the cases' small sizes: equal weights and rows give equal losses."""

import pathlib
import sys
import types

import numpy as np
import pytest

from tools.chip import peers


def test_without_pytorch_the_reason_and_the_remedy_are_its_result(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: None)
    found = peers.measure("trm", tmp_path, small=True)
    assert "PyTorch is not installed" in found["skipped"] and "pip install" in found["skipped"]


def test_a_build_of_pytorch_without_cuda_is_named(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA" in peers.missing(is_gpu=True) and not peers.missing(is_gpu=False)


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.9.1", False), ("2.10.0+cu128", False), ("2.11.0+cu130", True), ("2.12.0", False)],
)
def test_a_pytorch_whose_packed_attention_has_other_arguments_is_named(version, fits, monkeypatch):
    """Else its twin would fail after minutes, for an argument that it does not know."""
    cuda = types.SimpleNamespace(is_available=lambda: True)
    torch = types.SimpleNamespace(__version__=version, cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: "there")
    reason = peers.missing(is_gpu=True)
    assert fits == (not reason)
    assert fits or ("pip install 'torch>=2.11,<2.12'" in reason and version in reason)
    assert not peers.missing(is_gpu=False), "on a CPU, the formula with a mask is its attention"


def test_the_pages_name_the_range_of_pytorch():
    root = pathlib.Path(peers.__file__).parents[2]
    for page in ("docs/accelerator.md", "docs/results/h100.md"):
        assert "torch>=2.11,<2.12" in (root / page).read_text(), page


def test_losses_are_compared_of_equal_rows_alone():
    ours = {"rows": 8, "losses": [2.0, 1.0]}
    assert peers._apart(ours, {"rows": 8, "losses": [2.0, 1.1]}) == pytest.approx(0.1 / 1.1)
    assert peers._apart(ours, {"rows": 4, "losses": [2.0, 1.0]}) is None


def test_documents_begin_with_rows_and_new_segments():
    pytest.importorskip("torch")
    from tools.torch_steps import packed

    segments = np.array([[1, 1, 2, 0], [1, 1, 1, 1]])
    assert packed.document_starts(segments).tolist() == [0, 2, 3, 4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit-s", "lm-1b-2k", "trm", "higgs-lora", "giblet"])
def test_the_twin_has_the_losses_of_the_case(name, tmp_path):
    pytest.importorskip("torch")
    found = peers.measure(name, tmp_path, small=True)
    assert not found["failures"] and found["theirs"].keys() == {"eager"}
    assert found["losses"]["eager"] <= found["bound"] == peers.LOSSES["float32"]
    assert found["gradients"]["eager"] <= found["gradient_bound"] == peers.GRADIENTS["float32"]
    assert found["ours_by_theirs"]["eager"] > 0


@pytest.mark.slow
def test_a_twin_whose_documents_see_each_other_is_found_by_its_gradients(tmp_path, monkeypatch):
    """Its losses of random tokens are within the bounds of both types: they do not see a mask."""
    pytest.importorskip("torch")
    from tools.torch_steps import packed

    name = "lm-1b-2k"
    peers.write(name, tmp_path, "ours", small=True)
    right = peers.write(name, tmp_path, "eager", small=True)
    by_mask = packed.by_mask
    monkeypatch.setattr(packed, "by_mask", lambda segments: by_mask(np.ones_like(segments)))
    wrong = peers.write(name, tmp_path, "eager", small=True)
    ours = peers.write(name, tmp_path, "again", small=True)
    assert peers._apart(ours, wrong) < peers.LOSSES["float32"]
    assert peers._gradients_apart(ours, right) < peers.GRADIENTS["float32"]
    assert peers._gradients_apart(ours, wrong) > peers.GRADIENTS["bfloat16"]
