"""The shapes of the five models' functions are checked against the suffixes of their names in a
traced step and evaluation."""

import importlib
import pkgutil

import pytest

from jaxtrain import workload
from jaxtrain.step import train_step as step_lib
from tests.support import shapes
from tests.support.cases import assembled, audio_language, bird, giblet, language, trm

CASES = {
    "audio_language": audio_language,
    "bird": bird,
    "giblet": giblet,
    "language": language,
    "trm": trm,
}
# Functions of generation, of pictures, of other settings, and of a model without a mesh.
OTHERS = {
    "audio_language": {
        "decoding",
        "model._permute_backward",
        "model._permute_forward",
        "model.audio_logits",
        "model.text_logits",
    },
    "bird": {
        "augment._add_background",
        "augment._crop",
        "classes.asymmetric_loss",
        "classes.counts",
        "half_stack",
        "log_mel",
        "views.as_picture",
        "views.unpatchify",
        "vit._normalised",
        "vit.axial_rope",
        "vit.placed",
    },
    "giblet": {
        "model._multiply_narrow",
        "model._multiply_forward",
        "model._multiply_backward",
        "model._multiply_measured",
        "model._measured_forward",
        "model._measured_backward",
        "loss._last_frames",
        "voxels.density",
        "voxels.r_squared",
        "voxels.shuffled",
    },
    "language": {"dropout._mask"},
    "trm": {
        "boards",
        "loss._rollout_metrics",
        "loss._value",
        "model.attend",
        "rollouts",
        "tokamax_glu",
        "tpu_mixer",
    },
}


def modules(name):
    package = importlib.import_module(f"{workload.PACKAGE}.{name}")
    found = [m.name for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return [
        importlib.import_module(each)
        for each in found
        if "commands" not in each and "inference" not in each
    ]


@pytest.mark.parametrize("name", CASES)
def test_arrays_have_the_dimensions_of_their_names(name, monkeypatch):
    checked = shapes.check(modules(name), monkeypatch)
    assembly = assembled(CASES[name].CASE, (1, 1, 1))
    assembly.trace(assembly.task.stage(0))
    step_lib.make_eval_step(assembly.task, assembly.layout).lower(
        assembly.abstract.state.variables, assembly.abstract.batch
    )
    missed = {one.name for one in checked.values() if not one.was_called}
    assert {
        each
        for each in missed
        if each not in OTHERS[name] and each.partition(".")[0] not in OTHERS[name]
    } == set()
    assert any(one.was_called for one in checked.values())
