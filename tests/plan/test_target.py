"""Names of targets."""

import os

import pytest

from jaxtrain import cli, plan
from jaxtrain.parallel import chips, layout
from jaxtrain.plan import gpu_specs
from loaders.io import machine
from tests.support import small_runs


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
        "tpu:v6e-0",
        "tpu:v9-8",
    ):
        with pytest.raises(
            plan.PlanError,
            match=(
                "is unknown; expected for example --plan=tpu:v4:2x2x4 .*v6e.* --plan=gpu:h100x8"
                " .*h200"
            ),
        ):
            plan.parse_target(text)


@pytest.mark.parametrize(
    ("text", "topology", "count"),
    [
        ("v4-8", "v4:2x2x1", 4),
        ("v4-16", "v4:2x2x2", 8),
        ("v4-32", "v4:2x2x4", 16),
        ("v4-64", "v4:2x4x4", 32),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v5p-256", "v5p:4x4x8", 128),
        ("v5litepod-1", "v5e:1x1", 1),
        ("v5litepod-8", "v5e:2x4", 8),
        ("v5p-4", "v5p:2x1x1", 2),
        ("v5p-2", "v5p:1x1x1", 1),
        ("v6e-256", "v6e:16x16", 256),
        ("v6e-8*2", "v6e:2x4", 16),
    ],
)
def test_a_slice_has_the_name_that_google_cloud_gives_it(text, topology, count):
    target = plan.parse_target(f"tpu:{text}")
    assert (target.topology, target.count) == (topology, count)
    assert target.name == f"tpu:{text}"


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("tpu:v4:3x5x7", "tpu:v4:4x4x4 (64 chips) and tpu:v4:4x4x8 (128 chips)"),
        ("tpu:v4:4x2x2*2", "tpu:v4:2x2x4 (16 chips)"),
        ("tpu:v5e:3x3", "tpu:v5e:2x4 (8 chips) and tpu:v5e:4x4 (16 chips)"),
        ("tpu:v5e:32x32", "tpu:v5e:16x16 (256 chips)"),
        ("tpu:v5e:2x2x2", "tpu:v5e:2x4 (8 chips)"),
        ("tpu:v4-24", "tpu:v4:2x2x2 (8 chips) and tpu:v4:2x2x4 (16 chips)"),
        ("tpu:v4-33", "tpu:v4:2x2x4 (16 chips) and tpu:v4:2x4x4 (32 chips)"),
        ("tpu:v5e-3*2", "tpu:v5e:1x1 (1 chip) and tpu:v5e:2x2 (4 chips)"),
        ("tpu:v5p:6", "tpu:v5p:2x2x1 (4 chips) and tpu:v5p:2x2x2 (8 chips)"),
        ("tpu:v5p-99999", "tpu:v5p:16x16x24 (6144 chips)"),  # the most even sides of so many
    ],
)
def test_a_slice_that_does_not_exist_names_the_nearest(text, nearest):
    with pytest.raises(plan.PlanError) as error:
        plan.parse_target(text)
    assert str(error.value).startswith(f"--plan={text}: there is no slice of ")
    assert str(error.value).endswith(f"the nearest: {nearest}")
    assert plan.parse_target("tpu:v4:12x16x16").count == 3072


@pytest.mark.parametrize(
    ("text", "example"), [("tpu:v5p:8", "tpu:v5p:2x2x2"), ("tpu:v5p-384", "tpu:v5p:4x4x12")]
)
def test_a_number_of_chips_without_sides_is_answered_with_a_slice_of_so_many(text, example):
    with pytest.raises(plan.PlanError) as error:
        plan.parse_target(text)
    assert str(error.value) == f"--plan={text}: a slice is named by its sides, as {example}"


@pytest.mark.parametrize(
    ("text", "most", "right"),
    [
        ("gpu:h100x16*2", 8, "gpu:h100x8*4, or gpu:h100x32"),
        ("gpu:h100x1024*1", 8, "gpu:h100x8*128, or gpu:h100x1024"),
        ("gpu:gb200x144*1", 72, "gpu:gb200x72*2, or gpu:gb200x144"),
        ("gpu:l40sx64*1", 16, "gpu:l40sx8*8, or gpu:l40sx64"),
    ],
)
def test_a_node_of_more_cards_than_there_are_is_refused(text, most, right):
    with pytest.raises(plan.PlanError) as error:
        plan.parse_target(text)
    assert f"at most {most} " in str(error.value) and str(error.value).endswith(f"write {right}")


def test_targets_know_their_devices():
    assert (
        plan.parse_target("tpu:v4:2x2x4").count == 16
        and plan.parse_target("tpu:v4:2x2x4*2").count == 32
    )
    memory = plan.parse_target("gpu:h100x8").memory
    assert memory == plan.parse_target("gpu:H100x8").memory == 0.92 * 84_942_979_072
    assert plan.parse_target("").count == 8
    assert (
        chips.find("TPU v5 lite").name == "v5e"
        and chips.find("TPU v5").name == "v5p"
        and chips.find("cpu") is None
    )


@pytest.mark.parametrize(
    ("target", "n_links", "of"),
    [
        ("tpu:v5e:2x2", 2, 4),  # two neighbours, and no ring
        ("tpu:v5e:2x4", 2, 4),  # at a corner
        ("tpu:v6e:8x16", 3, 4),  # the longer dimension is a ring
        ("tpu:v5e:16x16", 4, 4),
        ("tpu:v4:2x2x1", 2, 6),
        ("tpu:v5p:4x4x4", 6, 6),
        ("tpu:v5p:2x4x4", 3, 6),  # no torus
        ("gpu:h100x8", 1, 1),  # all by the switch
        ("gpu:h100nvlx2", 300, 64),  # by the bridge of NVLink
        ("gpu:h100pciex2*4", 300, 64),
        ("gpu:h100pciex8", 1, 1),  # by PCIe
    ],
)
def test_a_device_sends_by_the_links_that_its_slice_has(target, n_links, of):
    found = plan.parse_target(target)
    assert found.links == pytest.approx(found.chip.links * n_links / of)


def test_sides_of_a_slice_that_are_closed_to_rings_are_known():
    rings = {"v5e:4x4": [], "v6e:8x16": [16], "v5p:4x8x8": [4, 8, 8], "v4:2x4x4": []}
    for name, closed in rings.items():
        found = plan.parse_target(f"tpu:{name}")
        assert [n for n in found.sides if found.is_closed(n)] == closed


def test_a_card_that_is_not_here_has_the_capability_of_its_description():
    """A plan chooses kernels by the first, and compiles for the second."""
    for name, spec in gpu_specs.SPECS.items():
        found = layout.devices_of(chips.by_name(name).kind)
        assert found == ("gpu", ".".join(map(str, spec.capability))), name


def test_gpus_are_spread_evenly_over_the_nodes_of_nvlink():
    spread = {
        "gpu:h100x12": (2, 12),
        "gpu:h100x64": (8, 64),
        "gpu:gb200x72": (1, 72),
        "gpu:gb200x128": (2, 128),
        "gpu:gb300x1024": (16, 1024),
    }
    for text, (nodes, count) in spread.items():
        found = plan.parse_target(text)
        assert (found.slices, found.count) == (nodes, count), text


def test_each_core_of_a_tpu7x_is_a_device():
    found = plan.parse_target("tpu:tpu7x:2x2x1")
    assert found.count == 8 and found.kind == "tpu"
    assert found.chip.devices * found.chip.flops == pytest.approx(2307e12)


def test_a_misspelt_target_is_reported_before_any_data_are_made(tmp_path, monkeypatch, capsys):
    small_runs.rows(tmp_path)
    monkeypatch.setattr(
        "tests.support.toy_rows.dataset_info", lambda *a: pytest.fail("data are made")
    )
    assert (
        cli.main(
            ["plan", f"--config={tmp_path}/rows.py", f"--config.workdir={tmp_path}", "gpu:h1000x8"]
        )
        == 2
    )
    assert "--plan=gpu:h1000x8 is unknown" in capsys.readouterr().err


def test_memory_of_the_host_is_known_without_proc(tmp_path, monkeypatch):
    """Linux estimates the available memory. macOS has no /proc, so the machine's whole memory is
    taken."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < plan.memory.host_memory() <= whole
    (tmp_path / "meminfo").write_text("MemTotal:  16000 kB\nMemAvailable:  12345 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    assert plan.memory.host_memory() == 12345 * 1024
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "nothing")
    assert plan.memory.host_memory() == whole
