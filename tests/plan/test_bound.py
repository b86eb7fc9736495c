"""The lower bound of a step's memory, compared with the compilers' figures."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import plan
from jaxtrain.assembly import assemble
from jaxtrain.plan.bound import kept_by_loops
from tests.plan.cases import DTYPE, LARGE, load, on

FLOAT32, FULL = ("model.dtype", "float32"), ("model.remat", "full")
slow = pytest.mark.slow


def compare(config, mesh, target, versions=""):
    """Compiles a step. Asserts that its bound holds, and that the bytes of its arguments are exact.

    Returns the bound's temporaries as a share of the compiler's, and the compiler's figures.
    """
    assembly = assemble(config, mesh)
    traced = assembly.trace(assembly.task.stage(config.train.steps - 1))
    # of the machine code alone
    options = {} if target.tiled else {"xla_backend_optimization_level": 0}
    found = plan.compile.compiled(assembly, traced, options=options, versions=versions)
    least = plan.bound.bound(assembly, traced, target)
    assert least.arguments == found.arguments
    assert least.certain <= least.peak <= found.peak
    return least.temporaries / found.temporaries, found


@pytest.mark.parametrize(
    ("workload", "mesh", "changes", "share"),
    [
        pytest.param("bird", (1, 1, 1), [FLOAT32], 0.6, marks=slow),
        pytest.param("bird", (1, 8, 1), [FLOAT32], 0.6, marks=slow),
        pytest.param("bird", (2, 2, 2), [FLOAT32, ("train.accumulate", "2")], 0.3, marks=slow),
        pytest.param("bird", (1, 1, 1), [DTYPE], 0.2, marks=slow),
        ("language", (1, 1, 1), [FLOAT32, ("train.accumulate", "4")], 0.75),
        ("language", (2, 2, 2), [FLOAT32], 0.6),
        pytest.param("language", (8, 1, 1), [FLOAT32], 0.8, marks=slow),
        pytest.param("language", (2, 2, 2), [FLOAT32, FULL], 0.1, marks=slow),
        ("language", (1, 1, 1), [FULL, ("model.depth", "5"), ("model.unroll", "2")], 0.05),
        pytest.param("language", (1, 1, 1), [DTYPE], 0.3, marks=slow),
        # the loop over its cycles is unrolled
        pytest.param("trm", (2, 2, 2), [FLOAT32], 0.0, marks=slow),
        pytest.param("trm", (1, 1, 1), [DTYPE, FULL], 0.0, marks=slow),
        pytest.param("giblet", (1, 1, 1), [FLOAT32], 0.4, marks=slow),
        pytest.param("giblet", (2, 2, 2), [FLOAT32], 0.3, marks=slow),
    ],
)
def test_a_step_takes_no_less_on_cpus(workload, mesh, changes, share, tmp_path, monkeypatch):
    config = load(workload, tmp_path, monkeypatch, *changes)
    found, _ = compare(config, on(mesh, jax.devices()), plan.parse_target(""))
    assert found > share


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
    ("workload", "topology", "mesh"),
    [
        pytest.param("bird", "v4:2x2x1", (2, 2, 1), marks=slow),
        pytest.param("bird", "v5e:2x2", (1, 1, 1), marks=slow),
        pytest.param("bird", "v6e:2x2", (1, 4, 1), marks=slow),
        pytest.param("bird", "v4:2x2x1*2", (2, 4, 1), marks=slow),
        pytest.param("trm", "v5e:2x2", (2, 2, 1), marks=slow),
        pytest.param("language", "v4:2x2x1", (1, 1, 1), marks=slow),
        pytest.param("language", "v5e:2x2", (1, 4, 1), marks=slow),
        pytest.param("language, recomputed", "v6e:2x2", (1, 4, 1), marks=slow),
        pytest.param("trm, recomputed", "v4:2x2x1", (2, 2, 1), marks=slow),
    ],
)
def test_a_step_takes_no_less_on_tpus(
    workload, topology, mesh, tpu_compiler, tmp_path, monkeypatch
):
    # The batch is large, since a chip has some 0.1 GB near its cores, in which the compiler puts as
    # much as it can of a small step.
    rows = 16 if "language" in workload else 768 if workload == "trm, recomputed" else 192
    batch = ("train.batch", str(rows * math.prod(mesh)))
    config = load(workload, tmp_path, monkeypatch, *LARGE[workload], batch)
    target = plan.parse_target(f"tpu:{topology}")
    versions = plan.environment.versions(tpu_compiler)
    _, found = compare(config, on(mesh, plan.compile.tpu_devices(target)), target, versions)
    if found.collectives is not None:  # whether jaxlib can read it depends on libtpu's version
        spanned = {axis for _, axes in found.collectives for axis in axes}
        wanted = {
            name for name, size in zip(("data", "fsdp", "model"), mesh, strict=True) if size > 1
        }
        # Slices send data to each other directly, which is not a collective.
        assert spanned == wanted - ({"data"} if target.slices > 1 else set()), (
            "no device works alone"
        )


ROWS, WIDTH = 4096, 64
X = 4 * ROWS * WIDTH  # [bytes] of an activation
W = 4 * WIDTH * WIDTH


def layer(x, w):
    return x + jnp.sin(x @ w), None


def stack(x, ws, **options):
    return jax.lax.scan(layer, x, ws, **options)[0]


def squares(x):
    return (x * x).sum()


def of(step, *shapes, devices=1):
    """The arrays that the bound counts in a step, after a check that the step's compiler counts at
    least as many bytes."""
    xs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    traced = jax.jit(step).trace(*xs)
    kept, _ = kept_by_loops(traced.jaxpr.jaxpr, devices)
    if devices == 1:
        compiled = traced.lower().compile({"xla_backend_optimization_level": 0})
        memory = compiled.memory_analysis()
        found = memory.temp_size_in_bytes + memory.output_size_in_bytes
        assert sum(array.bytes for array in kept) <= found
    return sorted((array.bytes for array in kept), reverse=True)


def test_activations_and_gradients_of_layers_count():
    """Each layer keeps its input and a cosine. The carry of the backward loop is counted as
    well."""
    grad = jax.grad(lambda x, ws: squares(stack(x, ws)), (0, 1))
    found = of(grad, (ROWS, WIDTH), (7, WIDTH, WIDTH))
    assert found == [7 * X, 7 * X, X, 7 * W]


def test_an_array_counts_as_its_part_on_one_device():
    grad = jax.grad(lambda x, ws: squares(stack(x, ws)), (0, 1))
    found = of(grad, (ROWS, WIDTH), (7, WIDTH, WIDTH), devices=4)
    assert found == [7 * X / 4, 7 * X / 4, X / 4, 7 * W / 4]


def test_recomputed_activations_are_not_counted():
    def loss(x, ws):
        return squares(jax.lax.scan(jax.checkpoint(layer), x, ws)[0])

    assert of(jax.grad(loss, 1), (ROWS, WIDTH), (7, WIDTH, WIDTH)) == [7 * X, X, 7 * W]


@pytest.mark.parametrize(("unroll", "rows"), [(2, 6), (3, 6), (7, 0)])
def test_rounds_that_are_written_out_do_not_count(unroll, rows):
    """Of seven layers, those left over after the loop are written out, or all of them."""
    grad = jax.grad(lambda x, ws: squares(stack(x, ws, unroll=unroll)), 0)
    assert sum(of(grad, (ROWS, WIDTH), (7, WIDTH, WIDTH))) == rows * X + (X if rows else 0)


def test_loops_that_do_not_depend_on_each_other_need_not_be_there_together():
    def grads(x, ws, y, vs):
        grad = jax.grad(lambda x, ws: squares(stack(x, ws)))
        return grad(x, ws), grad(y, vs)

    shapes = (ROWS, WIDTH), (7, WIDTH, WIDTH), (ROWS, WIDTH), (5, WIDTH, WIDTH)
    # the compiler may finish one before it begins the other
    assert of(grads, *shapes) == [7 * X, X]


def test_equal_rows_and_rows_that_do_not_change_count_once_or_not_at_all():
    def step(x, y, zs):
        def body(x, z):
            x = jnp.sin(x)
            return x, (x * 2, x * 2, y * 3, z)

        return jax.lax.scan(body, x, zs)

    # The carry may take the place of x, which is an argument.
    assert of(step, (ROWS, WIDTH), (ROWS, WIDTH), (5, ROWS, WIDTH)) == [5 * X]


def test_a_loop_inside_a_loop_counts_on_top_of_what_is_there_around_it():
    """Gradients over three microbatches: the bound counts their sums, and in each microbatch the
    arrays that a stack keeps."""

    def step(xs, ws):
        def microbatch(sums, x):
            return sums + jax.grad(lambda ws: squares(stack(x, ws)))(ws), None

        return jax.lax.scan(microbatch, jnp.zeros_like(ws), xs)

    found = of(step, (3, ROWS, WIDTH), (7, WIDTH, WIDTH))
    assert found == [7 * X, 7 * X, 7 * W, 7 * W]  # the sums, and this microbatch's


def test_inside_a_shard_map_arrays_are_parts_already():
    mesh = on((2, 1, 1), jax.devices())
    rows = jax.sharding.PartitionSpec("data")

    def step(x, ws):
        grad = jax.grad(lambda x: squares(stack(x, ws)))
        local = jax.shard_map(grad, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"data"})
        return local(x)

    found = of(step, (ROWS, WIDTH), (7, WIDTH, WIDTH), devices=2)
    assert found == [7 * X / 2, X / 2]
