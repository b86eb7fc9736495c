"""The autoencoder at its full size, without creating it: the memory of each device, and that its
step compiles."""

import pathlib

import jax
import pytest

from jaxtrain import config as config_lib
from jaxtrain import main, specs
from jaxtrain import plan as plan_lib
from jaxtrain.assembly import assemble
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.step import state

ROOT = pathlib.Path(__file__).parents[2]
FIRST = 1_641_600 * 4096  # values of the first matrix
NARROW, NARROW_MOMENTS = ("model.param_dtype", "bfloat16"), ("optim.moments", "bfloat16")
BFLOAT16 = (NARROW, NARROW_MOMENTS)


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))

    def load(*overrides):
        return config_lib.load(
            "configs/giblet.py:blank",
            [("workdir", str(tmp_path / "run")), ("train.batch", "16"), *overrides],
        )

    return load


def per_device(config, target):
    """The bytes of one device for parameters, gradients and moments. The rest is small at a batch
    of 16."""
    assembly = plan_lib.abstractly(config, target)
    parts = plan_lib.memory.held(assembly.abstract, assembly.layout, tiled=False)
    assert sum(parts.values()) - parts["parameters"] - parts["optimizer"] < 0.2e9
    return 2 * parts["parameters"] + parts["optimizer"]


def test_bytes_are_the_known_ones(load):
    """16 bytes a parameter with float32 and AdamW, gradients included."""
    one, eight = (plan_lib.parse_target(f"gpu:a6000x{n}") for n in (1, 8))
    config = load()
    assert specs.count(plan_lib.abstractly(config, one).task.specs.params) == 8_359_824_355
    assert per_device(config, one) == pytest.approx(133.76e9, rel=1e-4)
    assert per_device(config, eight) == pytest.approx(16.72e9, rel=2e-3)
    for overrides, expected in (
        (BFLOAT16, 66.88e9),
        ((NARROW,), 100.32e9),  # float32 moments
        ((NARROW, ("optim.masters", "true")), 133.76e9),  # and float32 masters as well
        ((NARROW, ("optim.moments", "int8")), 50.17e9),
        ((("optim.name", "adafactor"),), 66.88e9),
        ((NARROW, ("optim.name", "adafactor")), 33.44e9),
    ):
        assert per_device(load(*overrides), one) == pytest.approx(expected, rel=1e-3), overrides


@pytest.mark.parametrize(
    ("target", "overrides", "fits"),
    [
        ("gpu:h100x1", (), False),
        ("gpu:h200x1", (), True),
        ("gpu:a6000x1", BFLOAT16, False),
        ("gpu:a6000x8", (), True),
        ("gpu:a6000x2", (), False),
        ("gpu:a6000x2", BFLOAT16, True),
        ("gpu:h100x1", (NARROW, ("optim.moments", "int8")), True),
        ("gpu:h100x1", (NARROW,), False),
        ("gpu:h100x1", (("optim.name", "adafactor"),), True),
        ("gpu:a6000x1", (NARROW, ("optim.name", "adafactor")), True),
    ],
)
def test_state_and_gradients_fit_where(load, target, overrides, fits):
    """A necessary condition, with which the plan's report begins. The update needs more memory, and
    gradients count if they must exist at once."""
    where = plan_lib.parse_target(target)
    assembly = plan_lib.abstractly(load(*overrides), where)
    assert (plan_lib.memory.least(assembly, tiled=False) <= where.memory) == fits


@pytest.mark.parametrize(
    ("target", "overrides", "peak"),
    [
        ("gpu:h100x1", BFLOAT16, 50.2e9),
        ("gpu:a6000x8", (), 12.5e9),
        ("tpu:v4:2x2x2", (), 12.5e9),
    ],
)
def test_the_lower_bound_of_a_step_is_the_known_arithmetic(load, target, overrides, peak):
    """The bound counts the state alone: nearly all norms are known without the gradients."""
    where = plan_lib.parse_target(target)
    assembly = plan_lib.abstractly(load(*overrides), where)
    needed = plan_lib.bound.bound(assembly, assembly.trace(None), where)
    assert needed.peak == pytest.approx(peak, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "overrides", "verdict"),
    [
        # state and gradients fit; a compiler reports the rest of a step's memory
        ("gpu:h100x1", BFLOAT16, ""),
        ("gpu:h200x1", (), ""),
        ("gpu:a6000x8", (), ""),
        ("gpu:h100x1", (NARROW,), "optim.moments=bfloat16 would make it at least 50.19 GB"),
        ("gpu:h100x1", (), "optim.moments=bfloat16 would make it at least 66.91 GB"),
        ("gpu:a6000x1", (), "No single change would make it fit"),
    ],
)
def test_without_a_compiler_the_command_says_what_certainly_does_not_fit(
    load, tmp_path, capsys, monkeypatch, target, overrides, verdict
):
    load()
    monkeypatch.setattr(plan_lib.environment, "find", lambda kind: None)
    settings = [
        f"--config.{name}={value}"
        for name, value in (("workdir", tmp_path / "run"), ("train.batch", 16), *overrides)
    ]
    main.main(["--config=configs/giblet.py:blank", f"--plan={target}", *settings])
    text = capsys.readouterr().out
    problems = [line for line in text.splitlines() if line.startswith("problem: it ")]
    assert bool(problems) == bool(verdict) and (not verdict or verdict in problems[0]), text


@pytest.mark.usefixtures("libtpu")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "beside"),
    [
        ((), 1.05),
        (BFLOAT16, 1.05),
        ((NARROW, ("optim.masters", "true")), 2.0),
        ((NARROW, ("optim.moments", "int8")), 1.05),
        ((NARROW, ("optim.name", "adafactor")), 1.05),
        ((("model.remat", "full"),), 1.05),
    ],
    ids=["float32", "bfloat16", "masters", "int8", "adafactor", "remat"],
)
def test_the_real_step_compiles_for_eight_tpus_without_a_second_copy_of_anything(
    load, overrides, beside
):
    """On 31 GiB chips, the state is donated, no matrix is gathered, and the rest is little more
    than the gradients.

    ``beside``: the compiler's temporaries in units of the parameters. Gradients have their type.
    """
    target = plan_lib.parse_target("tpu:v4:2x2x2")
    mesh = layout_lib.make_mesh(1, 8, 1, devices=plan_lib.compile.tpu_devices(target))
    assembly = assemble(load(*overrides), mesh)
    found = plan_lib.compile.compiled(assembly, assembly.trace(None))
    held = plan_lib.memory.held(assembly.abstract, assembly.layout, tiled=True)
    print(
        f"{found.arguments / 1e9:.2f} GB of arguments, {found.temporaries / 1e9:.2f} GB while it"
        " runs"
    )
    assert found.peak < target.memory
    assert found.peak - found.arguments - found.temporaries < 1e6, "the whole state is donated"
    assert found.temporaries < beside * held["parameters"]
    if found.collectives is not None:
        assert sum(exchanged.sent for exchanged in found.collectives.values()) < 0.1e9, (
            "activations travel"
        )


@pytest.mark.usefixtures("libtpu")
@pytest.mark.slow
def test_the_start_makes_every_part_where_it_stays(load):
    target = plan_lib.parse_target("tpu:v4:2x2x2")
    mesh = layout_lib.make_mesh(1, 8, 1, devices=plan_lib.compile.tpu_devices(target))
    assembly = assemble(load(), mesh)
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=assembly.layout.replicated())
    init = state.make_init(
        assembly.task, assembly.tx, assembly.abstract, start=lambda params, given: params
    )
    memory = init.lower(key, ()).compile().memory_analysis()
    print(
        f"{memory.output_size_in_bytes / 1e9:.2f} GB made, {memory.temp_size_in_bytes / 1e9:.2f} GB"
        " while they are"
    )
    assert memory.temp_size_in_bytes < FIRST * 4 / 4


def test_the_first_matrix_is_split_wherever_it_lives(load):
    """The parameter, moments and batch on 8 devices: each has an eighth of the rows, and of every
    array as large."""
    assembly = plan_lib.abstractly(load(), plan_lib.parse_target("gpu:h100x8"))
    large = [x for x in jax.tree.leaves(assembly.abstract.state) if x.size >= FIRST]
    assert len(large) == 3
    for x in large:
        assert x.sharding.shard_shape(x.shape) == (1_641_600 // 8, 4096)
