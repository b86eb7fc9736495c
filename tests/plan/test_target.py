"""Names of targets."""

import pytest

from jaxtrain import chips, plan


def test_a_target_that_is_unknown_names_those_that_are():
    for text in (
        "k80",
        "gpu:k80x8",
        "gpu:h100",
        "tpu:v4",
        "tpu:v9:2x2",
        "tpu:h100:2x2",
        "gpu:h100x0",
        "tpu:v4:0x2",
        "tpu:v4:2x2*0",
    ):
        with pytest.raises(
            plan.PlanError, match="is unknown; expected for example --plan=tpu:v4:2x2x4 .*v6e.* --plan=gpu:h100x8 .*h200"
        ):
            plan.parse_target(text)


def test_targets_know_their_devices():
    assert plan.parse_target("tpu:v4:2x2x4").count == 16 and plan.parse_target("tpu:v4:2x2x4*2").count == 32
    assert plan.parse_target("gpu:h100x8").memory == plan.parse_target("gpu:H100x8").memory == 80e9
    assert plan.parse_target("").count == 8
    assert chips.find("TPU v5 lite").name == "v5e" and chips.find("TPU v5").name == "v5p" and chips.find("cpu") is None
