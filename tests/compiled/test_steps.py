"""Every workload's step, compiled for chips that are not here: it compiles on every mesh, and what is in the program.

One process compiles all that a test needs, one step after the other; `python -m tools.compile_table` prints it as a table.
"""

import pytest

from jaxtrain import plan
from jaxtrain.plan import worker
from tools import compile_table

KERNELS = {"bird": "__cudnn$fmha", "higgs": "__cudnn$fmha", "language": "triton"}  # attention, not XLA's with all its weights
WORKLOADS = list(compile_table.WORKLOADS)
# Of a published size what is estimated is close; of a small one the compiler's own odds and ends are most.
CASES = [
    *(("gpu:h100x8", name, "small", mesh) for name in WORKLOADS for mesh in compile_table.MESHES),
    *(("gpu:h100x8", name, "published", "fsdp") for name in WORKLOADS),
    *(("tpu:v5e:2x4", name, "small", "fsdp") for name in WORKLOADS),
]
ALL_PUBLISHED = [("gpu:h100x8", name, "published", mesh) for name in WORKLOADS for mesh in ("data", "mixed")]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("data")
    compile_table.write_data(found)
    return found


@pytest.fixture(scope="session")
def answers(folder):
    """(target, workload, size) -> mesh -> answer, each compiled when it is asked for first, with those of the other meshes."""
    known: dict = {}

    def ask(target, name, size, mesh):
        meshes = [m for t, n, s, m in CASES if (t, n, s) == (target, name, size)]
        meshes = meshes if mesh in meshes else [mesh]
        if (target, name, size, mesh) not in known:
            jobs = compile_table.jobs(target, [name], [size], meshes, folder)
            for (*_, m), answer in zip(jobs, worker.ask(list(jobs.values())), strict=True):
                known[target, name, size, m] = answer
        return known[target, name, size, mesh]

    return ask


def check(answer, target, name, size, mesh):
    found = answer.compiled
    assert found, answer.error
    assert found.peak + found.workspace < plan.parse_target(target).memory
    if found.products:
        wide = sum(flops for types, flops in found.products.items() if "f32" in types)
        assert wide < 0.02 * sum(found.products.values()), f"products in float32: {found.products}"
    if kernel := KERNELS.get(name) if target.startswith("gpu") else None:
        assert any(kernel in call for call in found.library_calls), found.library_calls
    spanned = {axis for _, axes in found.collectives for axis in axes}
    kinds = {kind for kind, _ in found.collectives}
    if mesh == "data":
        assert spanned == {"data"} and kinds == {"all-reduce"}, "replicas exchange sums, and nothing else"
    elif mesh == "fsdp":
        assert spanned == {"fsdp"} and kinds >= {"all-gather"}
        assert kinds & {"reduce-scatter", "all-reduce"}
    else:
        assert spanned == {"data", "fsdp", "model"}, "no device works alone"


@pytest.mark.parametrize(("target", "name", "size", "mesh"), CASES)
def test_a_step_compiles_with_the_kernels_and_collectives_of_its_mesh(target, name, size, mesh, answers, request):
    request.getfixturevalue(f"{target[:3]}_compiler")
    answer = answers(target, name, size, mesh)
    check(answer, target, name, size, mesh)
    if size == "published":
        assert answer.estimate.peak == pytest.approx(answer.compiled.peak, rel=plan.SLACK)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "name", "size", "mesh"), ALL_PUBLISHED)
def test_published_sizes_on_the_other_meshes(target, name, size, mesh, answers, gpu_compiler):
    answer = answers(target, name, size, mesh)
    check(answer, target, name, size, mesh)
    assert answer.estimate.peak == pytest.approx(answer.compiled.peak, rel=plan.SLACK)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gpu:a100x8", "gpu:b200x8", "gpu:l40sx8", "gpu:h100x8*2"])
def test_other_cards_and_several_nodes(target, answers, gpu_compiler):
    assert answers(target, "bird", "small", "fsdp").compiled
