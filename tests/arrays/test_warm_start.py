"""A start from other weights follows its declaration, refuses all else, and reads nothing twice."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from jaxtrain import config, specs
from jaxtrain.arrays import checksums, stored, warm_start
from jaxtrain.arrays.stored import Stored
from jaxtrain.config import WarmStart
from jaxtrain.config.consistency import on_this_machine
from jaxtrain.parallel import layout
from jaxtrain.specs import ones, truncated_normal
from jaxtrain.types import Spec

normal = truncated_normal(1.0)
TABLE = {
    "encoder": {
        "blocks": {
            "w": Spec((2, 8, 16), ("layer", "embed", "mlp"), normal),
            "b": Spec((2, 16), ("layer", "mlp"), normal, "bfloat16"),
        },
        "pos": Spec((8, 8), ("seq", "embed"), normal),
    },
    "head": {"w": Spec((8, 4), ("embed", "vocab"), normal), "b": Spec((4,), ("vocab",), ones)},
}


def table(specs_tree=TABLE) -> dict[str, tuple]:
    leaves = jax.tree.leaves(specs_tree, is_leaf=specs.is_spec)
    return {p: (s.shape, s.dtype) for p, s in zip(specs.paths(specs_tree), leaves, strict=True)}


def numbers(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        p: rng.standard_normal(shape).astype(jnp.dtype(dtype))
        for p, (shape, dtype) in table().items()
    }


def stored_of(arrays: dict[str, np.ndarray]) -> dict[str, Stored]:
    return {
        p: Stored(x.shape, x.dtype, lambda index, x=x: x[index], tuple(p.split("/")), x.shape)
        for p, x in arrays.items()
    }


def nested(arrays: dict[str, np.ndarray]) -> dict:
    tree: dict = {}
    for path, x in arrays.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = x
    return tree


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """A run with an average, saved from a mesh of eight devices in one row."""
    folder = tmp_path_factory.mktemp("run")
    mesh = jax.make_mesh((8,), ("x",))

    def put(x: np.ndarray) -> jax.Array:
        axes = [("x" if n % 8 == 0 else None) for n in x.shape]
        axes = [a if a and "x" not in axes[:i] else None for i, a in enumerate(axes)]
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))

    state = {
        "step": jnp.int32(5),
        "params": jax.tree.map(put, nested(numbers(0))),
        "ema": jax.tree.map(put, nested(numbers(1))),
        "opt_state": {"mu": jax.tree.map(put, nested(numbers(2)))},
    }
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        manager.save(
            5,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave({})),
        )
    checksums.write(folder / "checkpoints" / "5")
    return folder


def plan(mesh_sizes: tuple[int, int, int], table=TABLE):
    return specs.abstract(table, layout.make_layout(layout.make_mesh(*mesh_sizes), {}))


def start(matches: warm_start.Matches, abstract, table=TABLE) -> dict[str, np.ndarray]:
    """Load the arrays into their shardings, and lay them over the initialisation under jit, as a
    run does."""
    loaded = warm_start.load(matches, abstract)

    def make(key, loaded):
        return warm_start.overlay(matches, specs.materialise(table, key), loaded)

    made = jax.jit(
        make, out_shardings=jax.tree.map(lambda x: x.sharding, abstract), donate_argnums=1
    )(jax.random.key(3), loaded)
    assert jax.tree.leaves(
        jax.tree.map(lambda x, a: x.sharding == a.sharding and x.dtype == a.dtype, made, abstract)
    )
    return dict(zip(specs.paths(made), map(np.asarray, jax.tree.leaves(made)), strict=True))


def fresh() -> dict[str, np.ndarray]:
    made = specs.materialise(TABLE, jax.random.key(3))
    return dict(zip(specs.paths(made), map(np.asarray, jax.tree.leaves(made)), strict=True))


def problems(arrays: dict[str, np.ndarray], rules: WarmStart) -> tuple[str, ...]:
    with pytest.raises(warm_start.WarmStartError) as caught:
        warm_start.match(table(), stored_of(arrays), rules)
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize("mesh", [(8, 1, 1), (2, 2, 2), (1, 8, 1)], ids=str)
@pytest.mark.parametrize("ema", [False, True], ids=["params", "ema"])
def test_a_run_of_another_mesh_bit_for_bit(run, mesh, ema):
    rules = WarmStart(source=str(run), ema=ema)
    matches = warm_start.match(table(), warm_start.open_source(rules), rules)
    made = start(matches, plan(mesh))
    assert {p: x.tobytes() for p, x in made.items()} == {
        p: x.tobytes() for p, x in numbers(int(ema)).items()
    }
    assert matches.skipped == matches.fresh == matches.unused == matches.notes == ()


def test_every_part_is_read_once_and_only_parts(run):
    """On 2×2×2, a matrix that is split in four is read in four parts, although eight devices hold
    it."""
    rules = WarmStart(source=str(run))
    source, reads = warm_start.open_source(rules), []

    def spy(path, read, index):
        reads.append((path, tuple((s.start, s.stop) for s in index)))
        return read(index)

    source = {p: s._replace(read=functools.partial(spy, p, s.read)) for p, s in source.items()}
    warm_start.load(warm_start.match(table(), source, rules), plan((2, 2, 2)))
    parts = [index for path, index in reads if path == "encoder/blocks/w"]
    assert sorted(parts) == sorted(
        ((0, 2), e, m) for e in ((0, 4), (4, 8)) for m in ((0, 8), (8, 16))
    )


def test_all_missing_extra_and_different_arrays_are_reported_together_with_a_remedy():
    arrays = numbers(0)
    arrays["encoder/positions"] = arrays.pop("encoder/pos")
    arrays["head/w"] = np.zeros((8, 7), np.float32)
    arrays["head/b"] = np.zeros(4, np.int32)
    found = problems(arrays, WarmStart(source="there", skip=("^nothing/",)))
    assert len(found) == 5
    dtype, missing, shape, unwanted, idle = found
    assert (
        missing.startswith("1 parameter not in the source: rename them")
        and "config.warm_start.skip" in missing
    )
    assert "\n    encoder/pos [8, 8] (is it 'encoder/positions'?)" in missing
    assert (
        "\n    head/w: [8, 7] in the source, [8, 4] here" in shape
        and "crop would do in config.warm_start.reshape" in shape
    )
    assert "head/b: is int32 in the source and float32 here" in dtype
    assert (
        unwanted.endswith("\n    encoder/positions [8, 8]")
        and "not in this model" in unwanted
        and "unused" in unwanted
    )
    assert "'^nothing/' matches nothing" in idle


def test_a_remedy_for_several_arrays_is_printed_once():
    """The model has another depth and another width. Each pair of shapes has a line, below one
    remedy with the choices for these shapes."""
    stack = {f"blocks/{name}": np.zeros((4, 3), np.float32) for name in "abcdef"}
    source = {
        **stack,
        **{f"wide/{name}": np.zeros((2, 4), np.float32) for name in "abc"},
        "pos": np.zeros((6, 4), np.float32),
        "table": np.zeros((6, 4), np.float32),
        "w": np.zeros((4, 2, 3), np.float32),
        "x/y": np.zeros(2, np.float32),
    }
    here = {f"blocks/{name}": ((2, 3), "float32") for name in "abcdef"}
    here |= {f"wide/{name}": ((3, 8), "float32") for name in "abc"} | {"table": ((8, 5), "float32")}
    here |= {
        "pos": ((8, 4), "float32"),
        "w": ((8, 3), "float32"),
        "new/a": ((2,), "float32"),
        "new/b": ((2,), "float32"),
    }
    with pytest.raises(warm_start.WarmStartError) as caught:
        warm_start.match(here, stored_of(source), WarmStart(source="there"))
    missing, crop, pad, grid, fold, surplus = caught.value.problems
    assert (
        missing.splitlines()[0].startswith("2 parameters not in the source: ")
        and len(missing.splitlines()) == 3
    )
    assert crop.splitlines()[1:] == [f"    {', '.join(stack)}: [4, 3] in the source, [2, 3] here"]
    assert crop.startswith(
        "6 parameters of another shape: crop would do in config.warm_start.reshape (takes the first"
        " entries), "
    )
    assert (
        "\"--config.warm_start.reshape={'REGEX': 'crop'}\"" in crop
        and "config.warm_start.skip" in crop
    )
    assert (
        pad.startswith("4 parameters of another shape: pad would do") and len(pad.splitlines()) == 3
    )
    assert "\n    wide/a, wide/b, wide/c: [2, 4] in the source, [3, 8] here" in pad
    assert (
        "pad or grid would do" in grid
        and "grid resamples patches, as in 'grid 32x8 to 16x8'" in grid
    )
    assert grid.splitlines()[1:] == ["    pos: [6, 4] in the source, [8, 4] here"]
    assert "fold would do" in fold and "w: [4, 2, 3] in the source, [8, 3] here" in fold
    assert surplus.splitlines()[1:] == ["    x/y [2]"]
    with pytest.raises(warm_start.WarmStartError) as caught:
        warm_start.match(
            {"w": ((4, 3), "float32")},
            stored_of({"w": np.zeros((2, 5), np.float32)}),
            WarmStart(source="there"),
        )
    assert (
        "crop, pad, fold and grid do not give it; declare them in config.warm_start.skip"
        in caught.value.problems[0]
    )


def test_renames_in_order_skips_and_unused_are_reported():
    arrays = {
        f"model/{p.replace('head', 'classifier')}": x
        for p, x in numbers(0).items()
        if p != "encoder/pos"
    }
    arrays["model/extra"] = np.zeros(3)
    rules = WarmStart(
        source="there",
        renames=(("^model/", ""), ("^classifier/(.)$", r"head/\1")),
        skip=("^encoder/pos$", "^head/b$"),
        unused=("^extra$",),
    )
    matches = warm_start.match(table(), stored_of(arrays), rules)
    assert matches.loaded.keys() == {"encoder/blocks/w", "encoder/blocks/b", "head/w"}
    assert (matches.skipped, matches.fresh, matches.unused) == (
        ("head/b",),
        ("encoder/pos",),
        ("extra",),
    )
    report = matches.report()
    for part in (
        "3 parameters loaded: encoder/blocks/b",
        "1 skipped, although in the source: head/b",
    ):
        assert part in report
    assert (
        "1 freshly initialised: encoder/pos" in report and "1 of the source unused: extra" in report
    )
    made = start(matches, plan((2, 2, 2)))
    assert made["encoder/pos"].tobytes() == fresh()["encoder/pos"].tobytes(), (
        "as it would have been without a warm start"
    )
    assert made["head/b"].tolist() == [1, 1, 1, 1]
    assert made["head/w"].tobytes() == numbers(0)["head/w"].tobytes()


def test_two_sources_of_one_parameter_are_refused():
    arrays = numbers(0) | {"old/b": np.zeros(4, np.float32)}
    (problem,) = problems(arrays, WarmStart(source="there", renames=(("^old/", "head/"),)))
    assert "head/b and old/b of the source are both renamed to head/b" in problem


def test_layers_that_others_keep_apart_are_stacked(tmp_path):
    arrays = numbers(0)
    blocks = {p: arrays.pop(p) for p in ("encoder/blocks/w", "encoder/blocks/b")}
    flat = {p.replace("/", "."): x for p, x in arrays.items()}
    flat |= {
        f"layers.{i}.{p[-1]}": np.ascontiguousarray(x[i])
        for p, x in blocks.items()
        for i in range(2)
    }
    safetensors.numpy.save_file(flat, tmp_path / "model.safetensors")
    rules = WarmStart(
        source=str(tmp_path), renames=((r"^layers/(\d+)/(\w)$", r"encoder/blocks/\2[\1]"),)
    )
    made = start(warm_start.match(table(), warm_start.open_source(rules), rules), plan((2, 2, 2)))
    assert {p: x.tobytes() for p, x in made.items()} == {
        p: x.tobytes() for p, x in numbers(0).items()
    }
    gap = WarmStart(source=str(tmp_path), renames=((r"^layers/1/(\w)$", r"encoder/blocks/\1[1]"),))
    with pytest.raises(
        warm_start.WarmStartError, match=r"encoder/blocks/w\[…\] cannot be stacked: entries \[1\]"
    ):
        warm_start.match(table(), warm_start.open_source(gap), gap)


@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 4, 2)], ids=str)
def test_crop_takes_the_first_and_pad_leaves_the_rest_as_initialised(mesh):
    arrays = numbers(0)
    long, short = (
        np.random.default_rng(5).standard_normal((2, 12, 20)).astype(np.float32)[:, :, :],
        np.float32([[7, 8, 9]] * 5),
    )
    arrays["encoder/blocks/w"], arrays["head/w"] = np.concatenate([long, long], axis=0), short
    rules = WarmStart(source="there", reshape={"blocks/w$": "crop", "^head/w$": "pad"})
    matches = warm_start.match(table(), stored_of(arrays), rules)
    assert any("encoder/blocks/w [4, 12, 20] → [2, 8, 16]: crop" in note for note in matches.notes)
    made = start(matches, plan(mesh))
    assert (
        made["encoder/blocks/w"].tobytes()
        == np.ascontiguousarray(arrays["encoder/blocks/w"][:2, :8, :16]).tobytes()
    )
    expected = fresh()["head/w"].copy()
    expected[:5, :3] = short
    assert made["head/w"].tobytes() == expected.tobytes()
    wrong = dataclasses.replace(rules, reshape={"blocks/w$": "pad", "^head/w$": "crop"})
    assert [
        "which 'pad' does not fit" in p or "which 'crop' does not fit" in p
        for p in problems(arrays, wrong)
    ] == [
        1,
        1,
    ]


def test_a_grid_of_positions_is_resampled_along_both_of_its_axes():
    """A plane stays a plane away from the edges, and time and frequency do not mix."""
    arrays = numbers(0)
    t, f = np.meshgrid(np.arange(2), np.arange(2), indexing="ij")
    arrays["encoder/pos"] = np.stack([t.ravel(), f.ravel(), *[np.ones(4)] * 6], axis=1).astype(
        np.float32
    )
    rules = WarmStart(source="there", reshape={"pos$": "grid 2x2 to 4x2"})
    pos = start(warm_start.match(table(), stored_of(arrays), rules), plan((2, 2, 2)))[
        "encoder/pos"
    ].reshape(4, 2, 8)
    np.testing.assert_allclose(pos[:, 0, 0], [0, 0.25, 0.75, 1], atol=1e-6)
    np.testing.assert_allclose(pos[..., 1], [[0, 1]] * 4, atol=1e-6)
    np.testing.assert_allclose(pos[..., 2:], 1, atol=1e-6)
    assert (
        "does not fit"
        in problems(arrays, dataclasses.replace(rules, reshape={"pos$": "grid 2x2 to 4x3"}))[0]
    )


def test_rounding_of_floats_to_the_tables_dtype_is_reported():
    arrays = numbers(0)
    arrays["head/b"], arrays["encoder/blocks/b"] = (
        arrays["head/b"].astype(np.float16),
        arrays["encoder/blocks/b"].astype(np.float64),
    )
    rules = WarmStart(source="there")
    matches = warm_start.match(table(), stored_of(arrays), rules)
    assert (
        "encoder/blocks/b: float64 → bfloat16" in matches.notes
        and "head/b: float16 → float32" in matches.notes
    )
    made = start(matches, plan((2, 2, 2)))
    assert made["head/b"].tolist() == arrays["head/b"].astype(np.float32).tolist()
    assert made["encoder/blocks/b"].dtype == jnp.bfloat16


def test_a_source_that_is_damaged_or_not_there_is_reported(run, tmp_path):
    import shutil

    rules = WarmStart(source=str(run))
    assert warm_start.damage(rules) == []
    copy = pathlib.Path(shutil.copytree(run, tmp_path / "copy"))
    data = max(copy.rglob("d/*"), key=lambda p: p.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert data.name in warm_start.damage(WarmStart(source=str(copy)))[0]
    with pytest.raises(warm_start.WarmStartError, match="no step"):
        warm_start.open_source(WarmStart(source=str(tmp_path)))


def test_an_export_of_another_format_is_refused_by_name(tmp_path):
    safetensors.numpy.save_file({"w": np.zeros((2, 3), np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / stored.EXPORT).write_text(json.dumps({"format": 1, "config": {"train": {}}}))
    with pytest.raises(
        warm_start.WarmStartError, match="is of format 1, and this version reads format 2"
    ):
        warm_start.open_source(WarmStart(source=str(tmp_path), other_front_end=True))


def test_errors_of_the_section_are_reported_with_the_configs_others(tmp_path):
    tell = lambda rules: dict(rules.validate())  # noqa: E731
    assert tell(WarmStart()) == {}
    assert tell(WarmStart(source=str(tmp_path), reshape={"x": "grid 1x2 to 2x2", "y": "pad"})) == {}
    run = config.Config(workdir=str(tmp_path), warm_start=WarmStart(source="/no/such/run"))
    assert "does not exist" in dict(on_this_machine(run))["warm_start.source"]
    assert "is empty" in tell(WarmStart(skip=("x",)))["source"]
    found = tell(
        WarmStart(
            source=str(tmp_path), renames=(("(", ""),), unused=("[",), reshape={"x": "stretch"}
        )
    )
    assert (
        found.keys() == {"renames[0]", "unused[0]", "reshape.x"}
        and "crop, pad" in found["reshape.x"]
    )
    assert config.gloss(WarmStart)["renames"][0] == "(regex, replacement)"


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((3, 8, 5), (3, 2, 4, 5)),
        ((3, 5, 8), (3, 5, 2, 4)),
        ((3, 2, 4, 5), (3, 8, 5)),
        ((3, 8), (3, 4, 2)),
        ((6,), (6,)),
        ((), (1,)),
    ],
)
def test_a_folded_array_reads_like_numpys_reshape(source, target):
    """The results agree for any part of the array."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=source)
    one = stored.Stored(
        source, x.dtype, lambda index: x[index], ("x",), (1, *source[1:]) if source else ()
    )
    folded = stored.fold(one, target)
    np.testing.assert_array_equal(folded.read(()), x.reshape(target))
    for _ in range(50):
        starts = [int(rng.integers(0, n)) for n in target]
        index = tuple(
            slice(a, int(rng.integers(a + 1, n + 1))) for a, n in zip(starts, target, strict=True)
        )
        np.testing.assert_array_equal(folded.read(index), x.reshape(target)[index])
    with pytest.raises(stored.StoredError, match="equally many"):
        stored.fold(one, (*target, 2))
