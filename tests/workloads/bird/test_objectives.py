"""Objectives: their folder, and comparisons with reference values: SIGReg and LeJEPA, masks,
errors, the cross-entropy of recordings."""

import ast
import functools
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.parallel import one_device
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.workloads.bird import masked, objectives, vit
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird.objectives import lejepa
from tests.support.cases import initial

# Machine code that compiles quickly rather than runs fast.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
FOLDER = pathlib.Path(objectives.__file__).parent
DATA = pathlib.Path(__file__).parents[2] / "data"


def golden(name):
    return dict(np.load(DATA / name, allow_pickle=False))


def combined(z, a, weight, lam):
    return (1 - lam) * lejepa.invariance(z, weight) + lam * lejepa.sigreg(z, a, weight)


@pytest.mark.parametrize("name", ["a", "b"])
def test_sigreg_and_lejepa_equal_the_reference(name):
    g = golden(f"sigreg/{name}.npz")
    weight, lam = jnp.ones(g["z"].shape[1]), float(g["lam"])
    value, grad = jit(jax.value_and_grad(lejepa.sigreg))(g["z"], g["A"], weight)
    np.testing.assert_allclose(value, g["sigreg"], rtol=1e-5)
    np.testing.assert_allclose(
        grad, g["grad_sigreg"], rtol=0, atol=1e-5 * np.abs(g["grad_sigreg"]).max()
    )
    np.testing.assert_allclose(lejepa.invariance(g["z"], weight), g["inv"], rtol=1e-5)
    value, grad = jit(jax.value_and_grad(combined))(g["z"], g["A"], weight, lam)
    np.testing.assert_allclose(value, g["total"], rtol=1e-5)
    np.testing.assert_allclose(
        grad, g["grad_total"], rtol=0, atol=1e-5 * np.abs(g["grad_total"]).max()
    )


@pytest.mark.parametrize("name", ["a", "b"])
def test_sigreg_is_of_the_global_batch_where_data_is_split(name):
    """Two groups have half the rows each. The value is that of all rows, not the mean of the
    groups' values. So are the gradients."""
    g = golden(f"sigreg/{name}.npz")
    mesh = make_mesh(2, 1, 1, devices=jax.devices()[:2])

    def local(z, weight):
        total = lambda z: combined(z, g["A"], weight, float(g["lam"])) * weight.sum()  # noqa: E731
        value, grad = jax.value_and_grad(total)(z)
        return jax.lax.psum(value, "data") / z.shape[1] / 2, grad / z.shape[1] / 2

    part = jax.P(None, "data")
    split = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(part, jax.P("data")),
        out_specs=(jax.P(), part),
        axis_names={"data"},
    )
    value, grad = jit(split)(g["z"], jnp.ones(g["z"].shape[1]))
    np.testing.assert_allclose(value, g["total"], rtol=1e-5)
    np.testing.assert_allclose(
        grad, g["grad_total"], rtol=0, atol=1e-5 * np.abs(g["grad_total"]).max()
    )
    halves = [
        float(lejepa.sigreg(g["z"][:, i::2], g["A"], jnp.ones(g["z"].shape[1] // 2)))
        for i in range(2)
    ]
    np.testing.assert_allclose(np.mean(halves), g["sigreg_mean_of_two_half_batches"], rtol=1e-5)
    assert not np.isclose(np.mean(halves), g["sigreg"], rtol=1e-5), (
        "this golden cannot tell the two apart"
    )


def test_rows_without_weight_are_not_in_the_batch():
    g = golden("sigreg/a.npz")
    weight = (jnp.arange(g["z"].shape[1]) % 3 > 0).astype(jnp.float32)
    kept = g["z"][:, np.asarray(weight) > 0]
    for f in (lejepa.invariance, lambda z, w: lejepa.sigreg(z, g["A"], w)):
        np.testing.assert_allclose(f(g["z"], weight), f(kept, jnp.ones(kept.shape[1])), rtol=1e-5)


def test_directions_have_unit_length_and_are_new_for_every_key():
    a, b = (lejepa.directions(jax.random.key(i), 16, 256) for i in range(2))
    np.testing.assert_allclose(np.linalg.norm(a, axis=0), 1, rtol=1e-5)
    assert a.shape == (16, 256) and (a != b).any() and abs(float(a.mean())) < 0.02


def test_masked_error_equals_the_reference():
    g = golden("mae/mae.npz")
    n, (f, w) = len(g["mask"]), g["patch"]
    n_frames, n_mels = g["spectrogram"].shape[1:]
    c = vit.Encoder(n_frames=n_frames, n_mels=n_mels, patch=(int(f), int(w)))
    target = masked.normalised(vit.patchify(c, jnp.asarray(g["spectrogram"])))
    np.testing.assert_allclose(vit.patchify(c, jnp.asarray(g["spectrogram"])), g["patches"])
    np.testing.assert_allclose(target, g["target"], rtol=0, atol=1e-4)

    def loss(pred):
        return masked.masked_error(pred, target, jnp.asarray(g["mask"], jnp.float32)).sum() / n

    value, grad = jax.value_and_grad(loss)(jnp.asarray(g["pred"]))
    np.testing.assert_allclose(value, g["loss"], rtol=1e-5)
    np.testing.assert_allclose(
        grad, g["grad_pred"], rtol=0, atol=2e-5 * np.abs(g["grad_pred"]).max()
    )


@pytest.mark.parametrize(
    ("grid", "n_masked", "block"),
    [((32, 8), 192, 2), ((64, 4), 192, 2), ((128, 2), 192, 4), ((4, 4), 9, 2), ((5, 7), 17, 3)],
)
def test_masks_are_blocks_of_an_exact_number(grid, n_masked, block):
    n, rows = grid[0] * grid[1], 200
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(jnp.arange(rows))
    masks = jit(masked.draw_masks, static_argnums=(1, 2, 3))(keys, grid, n_masked, block)
    hidden, visible = np.asarray(masks.masked), np.asarray(masks.visible)
    assert set(np.unique(hidden)) == {0, 1} and (hidden.sum(1) == n_masked).all()
    for m, v in zip(hidden, visible, strict=True):
        np.testing.assert_array_equal(v.argmax(1), np.flatnonzero(m == 0))
        assert (v.sum(1) == 1).all()
    np.testing.assert_allclose(hidden.mean(0), n_masked / n, atol=0.15)  # at the edges too
    assert len(np.unique(hidden, axis=0)) > 0.8 * rows
    # Neighbours are masked together more often than by chance.
    pairs = hidden.reshape(rows, *grid)
    together = (pairs[:, 1:] == pairs[:, :-1]).mean()
    share = n_masked / n
    assert together > share**2 + (1 - share) ** 2 + 0.02
    singles = jit(masked.draw_masks, static_argnums=(1, 2, 3))(keys, grid, n_masked, 1).masked
    loose = np.asarray(singles).reshape(rows, *grid)
    assert abs((loose[:, 1:] == loose[:, :-1]).mean() - (share**2 + (1 - share) ** 2)) < 0.05


def test_rank_is_the_place_in_order_and_ties_keep_theirs():
    assert masked.rank(jnp.array([0.5, 0.1, 0.5, -1.0, 0.5])).tolist() == [2, 1, 3, 0, 4]


def test_the_decoder_sees_its_masks():
    """A prediction depends on the choice of masked patches and on the visible ones. The content of
    masked patches was never seen."""
    c = vit.Encoder(n_frames=64, n_mels=64, embed=16, depth=1, heads=2, dtype="float32")
    d = masked.Decoder(16, 2, 2)
    params = initial(masked.decoder_specs(c, d, 5))
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    masks = jax.device_get(masked.draw_masks(keys, c.grid, 12, 2))
    rng = np.random.default_rng(0)
    seen = vit.Encoded(*(rng.normal(size=(2, n, 16)).astype("f4") for n in (1, 4)))
    decode = jit(lambda seen, masks: masked.decode(c, d, params, seen, masks, one_device.shard))
    found = decode(seen, masks)
    assert found.shape == (2, 16, 5)
    swapped = decode(seen, jax.tree.map(lambda m: m[::-1], masks))
    other = decode(seen._replace(patches=2 * seen.patches), masks)
    assert (
        np.abs(found - np.asarray(swapped)).max() > 1e-2
        and np.abs(found - np.asarray(other)).max() > 1e-2
    )


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 4)])
def test_smoothed_labels_over_a_part_of_a_table(mesh):
    """Loss and gradients over the first 37 of 40 rows, in chunks and with the table split, match
    the formula in float64."""
    shard = make_layout(make_mesh(*mesh, devices=jax.devices()[: int(np.prod(mesh))]), {}).shard
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(4, 3, 8)), rng.normal(size=(40, 8))
    label, weight = rng.integers(0, 37, (4, 3)), rng.random((4, 3))

    def ours(x, w):
        return cross_entropy(
            x,
            w,
            jnp.asarray(label),
            jnp.asarray(weight),
            shard,
            smoothing=0.3,
            z_loss=0.1,
            chunk=5,
            size=37,
        ).loss

    value, (dx, dw) = jit(jax.value_and_grad(ours, (0, 1)))(
        jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    )
    logits = x @ w[:37].T
    lse = np.log(np.exp(logits).sum(-1))
    target = 0.7 * np.eye(37)[label] + 0.3 / 37
    expected = (weight * (lse - (target * logits).sum(-1) + 0.1 * lse**2)).sum()
    slope = weight[..., None] * (
        np.exp(logits - lse[..., None]) * (1 + 0.2 * lse[..., None]) - target
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(dx, slope @ w[:37], rtol=0, atol=1e-5)
    np.testing.assert_allclose(dw[:37], np.einsum("btv,btd->vd", slope, x), rtol=0, atol=1e-5)
    assert (dw[37:] == 0).all()


def test_every_file_of_the_folder_is_an_objective_and_a_section_of_the_config():
    names = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert set(bird.OBJECTIVES) == names
    for name, objective in bird.OBJECTIVES.items():
        assert type(getattr(bird.Config(), name)) is objective.section and objective.needs in (
            "all",
            "visible",
        )


def test_objectives_know_neither_each_other_nor_the_model():
    known = {"augment", "classes", "masked", "objective", "settings", "views", "vit"}
    for path in set(FOLDER.glob("*.py")) - {FOLDER / "__init__.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("jaxtrain.workloads"):
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                assert all(
                    name.removeprefix("jaxtrain.workloads.bird.").split(".")[0] in known
                    for name in names
                ), path


NEW = """
from jaxtrain.specs import zeros
from jaxtrain.types import Spec
from jaxtrain.workloads.bird.objective import ALL, Objective, Section


class Energy(Section):
    pass


def specs(c, s):
    return {"w": Spec((c.embed,), ("embed",), zeros)}


def loss(s, x):
    return ((x.features.pooled_rd @ x.params["w"] - 1) ** 2 * x.weight_r).sum(), {}


OBJECTIVE = Objective(Energy, ALL, specs, loss, lambda c, s: 6 * c.embed)
"""
USE = """
import jax, jax.numpy as jnp
from jaxtrain import config as config_lib, specs
from jaxtrain.parallel import one_device
from jaxtrain.workloads.bird import model as bird
small = dict(embed=16, depth=1, heads=2, n_frames=32, n_mels=32, dtype="float32")
small["supervised"] = dict(weight=0.0)
c = config_lib.section(bird.Config, dict(small, energy=dict(weight=2.0)))
assert not list(c.validate()) and config_lib.gloss(bird.Config)["energy"] == ("section", "")
task = bird.make_task(config_lib.Config(model=c), one_device.shard, 4)
assert "objective/energy/w" in specs.paths(task.specs.params)
variables = jax.jit(lambda key: specs.materialise(task.specs, key))(jax.random.key(0))
batch = {"spectrogram": jnp.ones((4, 32, 32)), "weight": jnp.ones(4)}
batch |= {n: jnp.arange(4) for n in ("index", "epoch", "row")}
out = jax.jit(task.loss)(variables, batch, jax.random.key(1))
assert float(out.loss.total) == 8 and float(out.metrics["energy_loss"].total) == 4
try:
    config_lib.section(bird.Config, dict(enregy=dict(weight=1.0)))
except config_lib.ConfigError as error:
    print(error)
"""


def run_in(folder, program):
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        timeout=300,
        capture_output=True,
        text=True,
    )


def test_a_new_file_is_a_new_objective(tmp_path):
    """The new file has a section of the config, parameters, a metric and a share of the loss, and
    no other file was edited."""
    root = FOLDER.parents[3]
    for name in ("jaxtrain", "loaders"):
        shutil.copytree(root / name, tmp_path / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    (tmp_path / FOLDER.relative_to(root) / "energy.py").write_text(NEW)
    done = run_in(tmp_path, USE)
    assert done.returncode == 0, done.stderr
    assert "did you mean 'energy'?" in done.stdout
    (tmp_path / FOLDER.relative_to(root) / "energy.py").write_text("X = 1")
    assert (
        "energy has to define OBJECTIVE"
        in run_in(tmp_path, "import jaxtrain.workloads.bird.model").stderr
    )
