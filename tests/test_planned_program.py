"""The planned program is the program that runs: any machine traces a step for its target
devices."""

import collections
import pathlib

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxtrain import assembly as assembly_lib
from jaxtrain import config as config_lib
from jaxtrain import plan
from jaxtrain.parallel import layout as layout_lib
from tests.support import installed

ROOT = pathlib.Path(__file__).parent.parent
WIDE = (
    ("model.embed", "128"),
    ("model.depth", "2"),
    ("model.heads", "2"),
    ("model.dtype", "bfloat16"),
)
BOARDS = "({'kind': 'sudoku4', 'n_train': 20, 'n_test': 5, 'blanks': (3, 6)},)"
WORKLOADS = {
    "bird": ("configs/xcm.py", (*WIDE, ("train.batch", "64"), ("model.patch", "(16, 16)"))),
    "language": (
        "configs/shakespeare_char.py:{text}",
        (
            *WIDE,
            ("model.mlp", "256"),
            ("data.context", "128"),
            ("train.batch", "64"),
            ("model.generation.prompts", "('one',)"),
        ),
    ),
    "trm": (
        "configs/trm_sudoku.py:4x4",
        (
            ("data.sources", BOARDS),
            ("train.batch", "64"),
            ("model.mixer", "attention"),
            ("model.embed", "128"),
            ("model.heads", "2"),
            ("model.dtype", "bfloat16"),
        ),
    ),
}
SHORT = {"short_attention_forward", "short_attention_backward"}
# The names of the kernels in a step.
KERNELS = {
    ("bird", "gpu"): {"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"},
    ("trm", "gpu"): {"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"},
    # Each row of characters is one document, which cuDNN takes before Hopper, too.
    ("language", "gpu"): {"dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"},
    ("bird", "tpu"): SHORT,
    ("trm", "tpu"): SHORT,
    ("language", "tpu"): {"packed_attention_forward", "packed_attention_backward"},
}


def equations(jaxpr) -> collections.Counter:
    """Count each operation of a program, by the shapes and types of its results and the kernel's
    name."""
    found = collections.Counter()
    for eqn in jaxpr.eqns:
        name = (
            str(eqn.params["name"]) if eqn.primitive.name == "pallas_call" else eqn.primitive.name
        )
        results = tuple(
            f"{v.aval.dtype}{list(v.aval.shape)}" if hasattr(v.aval, "shape") else ""
            for v in eqn.outvars
        )
        found[name, results] += 1
        for inner in jaxprs_in_params(eqn.params):
            found += equations(inner)
    return found


def kernels(found: collections.Counter) -> set[str]:
    names = {name.partition("_segmented")[0] for name, _ in found}
    prefixes = ("dot_product_attention", "splash_", "short_attention", "packed_attention")
    return {name for name in names if name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("target", "mesh"),
    [("gpu:h100x8", (8, 1, 1)), ("gpu:a100x8", (2, 2, 2)), ("tpu:v5e:2x4", (8, 1, 1))],
    ids=str,
)
@pytest.mark.parametrize("workload", [name for name in WORKLOADS if name in installed.NAMES])
def test_a_plan_traces_the_program_of_its_target(workload, target, mesh, tmp_path, monkeypatch):
    """The trace is made on a CPU from an abstract mesh. It is compared with a trace on a mesh of
    devices that pose as the target's."""
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("JAXTRAIN_XCM", raising=False)
    source, own = WORKLOADS[workload]
    (tmp_path / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    sizes = tuple(zip(("mesh.data", "mesh.fsdp", "mesh.model"), map(str, mesh), strict=True))
    config = config_lib.load(
        source.format(text=tmp_path / "text.txt"), [*own, *sizes, ("workdir", str(tmp_path))]
    )
    where = plan.parse_target(target)

    planned = plan.abstractly(config, where)
    told = layout_lib.devices_of(where.chip.kind)
    with monkeypatch.context() as context:
        context.setattr(layout_lib, "devices_like", lambda device: told)
        there = assembly_lib.assemble(
            config, layout_lib.make_mesh(*mesh, devices=jax.devices()[: np.prod(mesh)])
        )
    programs = []
    for assembly in (planned, there):
        assert assembly.layout.devices == told
        programs.append(
            equations(assembly.trace(assembly.task.stage(config.train.steps - 1)).jaxpr.jaxpr)
        )
    assert programs[0] == programs[1]
    assert kernels(programs[0]) == KERNELS[workload, told.platform]
    if workload == "bird":
        kept = [array for name, results in programs[0] if name == "scan" for array in results]
        assert kept and not [array for array in kept if array.endswith("257, 257]")], (
            "no layer keeps T × T weights"
        )
