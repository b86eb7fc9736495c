"""Estimates against the compilers: on CPU devices, and on TPU slices that are nowhere near."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from jaxtrain import plan
from jaxtrain.plan import compile as compile_lib
from tests.plan.cases import DTYPE, LARGE, load, on


def bytes_agree(config, mesh, target, slack=plan.SLACK, versions=""):
    """The plan's with the compiler's: exactly what is passed to a step, and within 15 % or less what it needs in all.

    With the ``versions`` of a compiler of chips what it says is kept: it takes minutes, and a changed estimate none.
    """
    assembly = plan.assemble(config, mesh)
    stage = assembly.task.stage(config.train.steps - 1)
    options = {} if target.tiled else {"xla_backend_optimization_level": 0}  # of the machine code alone
    traced = assembly.trace(stage)
    found = plan.compiled(assembly, traced, options=options, versions=versions)
    planned = plan.estimate(assembly, traced, target)
    assert planned.arguments == found.arguments
    assert found.temporaries > 3 * found.arguments or "giblet" in config.workload, "the activations are most of it"
    assert planned.peak == pytest.approx(found.peak, rel=slack)
    return assembly, found


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)])
@pytest.mark.parametrize("workload", ["bird", "trm", "language", pytest.param("giblet", marks=pytest.mark.slow)])
def test_bytes_on_a_host_device_are_the_compilers(workload, mesh, tmp_path, monkeypatch):
    """Within 6 %: on 2 × 2 × 2 the language model's was 13 to 18 % too much with equal rows of a loop counted several times."""
    config = load(workload, tmp_path, monkeypatch, ("model.dtype", "float32"))
    bytes_agree(config, on(mesh, jax.devices()), plan.parse_target(""), plan.SLACK if workload == "giblet" else 0.06)


FULL = ("model.remat", "full")
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("workload", "mesh", "changes"),
    [
        pytest.param("trm", (1, 1, 1), [DTYPE], marks=slow),
        pytest.param("language", (1, 1, 1), [DTYPE], marks=slow),
        pytest.param("bird", (1, 1, 1), [DTYPE], marks=slow),
        pytest.param("language", (2, 2, 2), [FULL], marks=slow),
        pytest.param("trm", (1, 1, 1), [FULL], marks=slow),
        ("language", (1, 1, 1), [FULL, ("model.depth", "5"), ("model.unroll", "2")]),
        pytest.param("language", (1, 1, 1), [FULL, ("model.unroll", "2")], marks=slow),
    ],
)
def test_bytes_of_halves_and_of_recomputed_layers_on_a_host_device(workload, mesh, changes, tmp_path, monkeypatch):
    """Five layers, of which two are written out, were 39 % too little on jax 0.10.2 and 17 % too much on 0.12.

    What the left-over layer computes again comes before the loop backward there, and after it here, where barriers hold. It is
    14 % too little now, and 16 % where products are YNNPACK's (`jaxtrain.compile.xla_options`), which take one array more.
    """
    config = load(workload, tmp_path, monkeypatch, ("model.dtype", "float32"), *changes)
    bytes_agree(
        config, on(mesh, jax.devices()), plan.parse_target(""), 0.17 if ("model.unroll", "2") in changes else plan.SLACK
    )


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
    ("workload", "topology", "mesh"),
    [
        pytest.param("bird", "v4:2x2x1", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("bird", "v5e:2x2", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("bird", "v6e:2x2", (1, 4, 1), marks=pytest.mark.slow),
        pytest.param("trm", "v4:2x2x1", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("trm", "v5e:2x2", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("trm", "v6e:2x2", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("bird", "v4:2x2x1*2", (2, 4, 1), marks=pytest.mark.slow),
        pytest.param("language", "v4:2x2x1", (1, 1, 1), marks=pytest.mark.slow),
        pytest.param("language", "v5e:2x2", (1, 4, 1), marks=pytest.mark.slow),
        pytest.param("language, recomputed", "v6e:2x2", (1, 4, 1), marks=pytest.mark.slow),
        pytest.param("trm, recomputed", "v4:2x2x1", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("trm, recomputed", "v5e:2x2", (2, 2, 1), marks=pytest.mark.slow),
        pytest.param("trm, recomputed", "v6e:2x2", (1, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_bytes_on_a_tpu_are_its_compilers(workload, topology, mesh, tpu_compiler, tmp_path, monkeypatch):
    # Large: beside its memory a chip has some 0.1 GB near its cores, where the compiler puts what it can of a small step. With
    # 192 rows of the recursive model, recomputed, it had arrays of 50 MB there, and the step took 231 MB of the chip's memory.
    rows = 16 if "language" in workload else 768 if workload == "trm, recomputed" else 192
    config = load(workload, tmp_path, monkeypatch, *LARGE[workload], ("train.batch", str(rows * math.prod(mesh))))
    target = plan.parse_target(f"tpu:{topology}")
    versions = plan.environment.versions(tpu_compiler)
    assembly, found = bytes_agree(config, on(mesh, plan.tpu_devices(target)), target, versions=versions)
    if found.collectives is not None:  # which jaxlib can read depends on libtpu's version
        spanned = {axis for _, axes in found.collectives for axis in axes}
        wanted = {name for name, size in assembly.layout.mesh.shape.items() if size > 1}
        # Slices send to each other, which is no collective.
        assert spanned == wanted - ({"data"} if target.slices > 1 else set()), "no device works alone"
        if workload == "bird" and "fsdp" in wanted:
            planned = plan.estimate(assembly, assembly.trace(None), target).temporaries.moved
            # Weights are gathered and their gradients scattered. Where the dimension that is split lies in lanes, libtpu sums
            # the whole gradient, at twice the bytes; of heads of 32 values that is now one dimension and now another.
            kinds, slack = [{"all-gather": 1.0}, {"reduce-scatter": 1.0, "all-reduce": 0.5}], plan.SLACK
            if ("collective-permute", ("fsdp",)) in found.collectives:  # both in rings, piece by piece beside products
                kinds, slack = [{**kinds[0], **kinds[1], "collective-permute": 1.0}], 0.35
            else:
                scattered = [moved["reduce-scatter", ("fsdp",)][1] for moved in (planned, found.collectives)]
                assert scattered[1] > 0.7 * scattered[0], "most of the gradients' bytes"
            for share in kinds:
                sent = [
                    sum(share.get(kind, 0) * x for (kind, axes), (_, x) in moved.items() if axes == ("fsdp",))
                    for moved in (planned, found.collectives)
                ]
                assert sent[0] == pytest.approx(sent[1], rel=slack)


@pytest.mark.usefixtures("libtpu")
def test_what_a_tpus_compiler_lets_fit_is_told_to_fit():
    """Four layers that are computed again, 4 M rows of 128: libtpu calls 16.4 GB temporaries, which with x are 18 of 17 GB."""

    def loss(w, x):
        x, _ = jax.lax.scan(jax.checkpoint(lambda x, w: (x + jnp.tanh(jnp.tanh(x @ w) @ w.T), None)), x, w)
        return (x * x).sum()

    target = plan.parse_target("tpu:v5e:2x2")
    device = compile_lib.tpu_devices(target)[0]
    rows, kept = 4_000_000, 4 * 4_000_000  # the layers' inputs
    for more, fits in ((1, True), (2, False)):
        w, x = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=SingleDeviceSharding(device))
            for shape in ((4, 128, 128), (more * rows, 128))
        )
        said, _ = compile_lib.ask(jax.jit(jax.grad(loss)).trace(w, x).lower(), [device], {})
        assert (not said.refusal) == fits, said.refusal
        if fits:
            assert 4 * 128 * (rows + kept) < said.peak < target.memory


def rounds_gradients(w, moment, x):
    """Halves multiplied into float32, gradients rounded to halves, weighted, and measured before they are applied."""

    def loss(w):
        y = x
        for matrix in w:
            y = jax.lax.dot(jnp.tanh(y).astype(DTYPE[1]), matrix.astype(DTYPE[1]), preferred_element_type=jnp.float32)
        return (y * y).sum()

    grads = [g / x[0, 0] for g in jax.grad(loss)(w)]
    good = sum((g * g).sum() for g in grads) < 1
    new = [jnp.where(good, p - g / jnp.sqrt(m + g * g), p) for p, m, g in zip(w, moment, grads, strict=True)]
    return new, [jnp.where(good, m + g * g, m) for m, g in zip(moment, grads, strict=True)]


def rounds_rows(w, x):
    """Matrices that a loop only rounds."""

    def loss(x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(x.dtype)), None), x, w)
        return (x.astype(jnp.float32) ** 2).sum()

    return jax.grad(loss)(x)


WIDE = ((65536, 1024), (1024, 65536))


@pytest.mark.usefixtures("libtpu")
@pytest.mark.parametrize(
    ("step", "topology", "shapes", "donated", "wanted"),
    [
        (rounds_gradients, "v5e:2x2", (WIDE, WIDE, (64, 65536)), 4, 2 * 2 * 2**26),
        pytest.param(rounds_gradients, "v4:2x2x1", (WIDE, WIDE, (64, 65536)), 4, 2 * 4 * 2**26, marks=pytest.mark.slow),
        (rounds_rows, "v5e:2x2", ((32, 2048, 2048), (16, 2048)), 0, 2 * 2**28),
    ],
)
def test_what_a_tpu_keeps_rounded(step, topology, shapes, donated, wanted, tpu_compiler):
    """Where giblet's gradients were thought to be in float32 on a v5e its step was 19 % too much; a v4 keeps the quotients.

    Adapters that were thought to be rounded row by row were a part of the 17 % that Higgs's step was too little.
    """
    target = plan.parse_target(f"tpu:{topology}")
    device = compile_lib.tpu_devices(target)[0]

    def array(shape):
        dtype = DTYPE[1] if step is rounds_rows and shape == shapes[-1] else jnp.float32
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    arguments = [[array(s) for s in shape] if isinstance(shape[0], tuple) else array(shape) for shape in shapes]
    traced = jax.jit(step, donate_argnums=tuple(range(donated // 2))).trace(*arguments)
    said, _ = compile_lib.ask(traced.lower(), [device], {}, versions=plan.environment.versions(tpu_compiler))
    leaves = jax.tree.leaves(arguments)
    whole = [((),) * len(x.shape) for x in leaves]
    planned = plan.peak(traced.jaxpr, whole, {}, [i < donated for i in range(len(leaves))], target.compiler())
    assert planned.bytes == pytest.approx(wanted, rel=0.05)
    assert planned.bytes == pytest.approx(said.peak - said.arguments, rel=0.05)
