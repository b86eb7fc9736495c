"""Augmentation: the effect of each transform, its axis, and the values that it depends on."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.workloads.bird import augment as lib

ROWS = 6
ALL = lib.Augment(
    crop=0.3,
    shift=20,
    background=0.5,
    mixup=0.4,
    gain=0.2,
    noise=0.05,
    time_masks=2,
    time_mask=20,
    mel_masks=1,
    mel_mask=8,
)
# Machine code that compiles quickly rather than runs fast.
augment = jax.jit(
    lib.augment, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    return {
        "spectrogram": jnp.asarray(rng.normal(size=(ROWS, 2, 64, 32)), jnp.float32),
        "background": jnp.asarray(rng.normal(size=(ROWS, 2, 64, 32)), jnp.float32),
        "index": jnp.arange(10, 10 + ROWS, dtype=jnp.int32),
        "epoch": jnp.zeros(ROWS, jnp.int32),
    }


def many(batch, n, c, name="spectrogram"):
    """``n`` draws of one view of one spectrogram: before [F, W], after [n, F, W]."""
    rows = {k: jnp.repeat(x[:1, 0] if x.ndim == 4 else x[:1], n, axis=0) for k, x in batch.items()}
    rows["index"] = jnp.arange(n)
    return np.asarray(rows[name][0]), np.asarray(augment(c, 0, rows).x)


def test_depends_on_seed_epoch_recording_and_view_alone(batch):
    """Pairs change their place as a whole: a partner is the neighbour."""
    full = augment(ALL, 0, batch)
    order = np.array([2, 3, 4, 5, 0, 1])
    moved = augment(ALL, 0, {k: x[order] for k, x in batch.items()})
    np.testing.assert_array_equal(moved.x, full.x[order])
    np.testing.assert_array_equal(moved.own_share, full.own_share[order])
    part = augment(ALL, 0, {k: x[2:4] for k, x in batch.items()})
    # means are summed in another order
    np.testing.assert_allclose(part.x, full.x[2:4], rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"index": 100}])
def test_changes_with_each_of_them(batch, change):
    other = dict(
        batch,
        epoch=batch["epoch"] + change.get("epoch", 0),
        index=batch["index"] + change.get("index", 0),
    )
    before, after = augment(ALL, 0, batch).x, augment(ALL, change.get("seed", 0), other).x
    assert all((x != y).any() for x, y in zip(before, after, strict=True))


def test_views_of_a_row_are_augmented_each_for_itself(batch):
    same = {**batch, "spectrogram": batch["spectrogram"].at[:, 1].set(batch["spectrogram"][:, 0])}
    found = augment(replace(ALL, background=0.0, mixup=0.0), 0, same)
    assert (
        all((a != b).any() for a, b in zip(found.x[:, 0], found.x[:, 1], strict=True))
        and found.own_share is None
    )


def test_nothing_by_default(batch):
    np.testing.assert_array_equal(augment(lib.Augment(), 0, batch).x, batch["spectrogram"])


@pytest.mark.parametrize(("kind", "axis", "longest"), [("time", 1, 20), ("mel", 2, 8)])
def test_masks_lie_on_their_axis(batch, kind, axis, longest):
    """Time is the first axis of a spectrogram and mel the second. The original swaps them."""
    before, after = many(batch, 400, lib.Augment(**{f"{kind}_masks": 1, f"{kind}_mask": longest}))
    different = before[None] != after
    changed = different.all(axis=3 - axis)  # a whole frame, or a whole band
    np.testing.assert_array_equal(different.sum((1, 2)), changed.sum(1) * after.shape[3 - axis])
    np.testing.assert_allclose(after[different], before.mean(), rtol=1e-5, atol=1e-6)
    assert set(changed.sum(1)) == set(range(longest + 1))
    # one span
    assert (np.abs(np.diff(changed, axis=1, prepend=False, append=False)).sum(1) <= 2).all()
    assert changed.any(0).all()  # anywhere, including the edges


def test_shift_rotates_in_time_gain_is_one_number_and_noise_is_new_everywhere(batch):
    x, shifted = many(batch, 200, lib.Augment(shift=3))
    by = [next(s for s in range(-3, 4) if (np.roll(x, s, 0) == y).all()) for y in shifted]
    assert set(by) == set(range(-3, 4))
    gains = many(batch, 200, lib.Augment(gain=0.5))[1] - x
    assert np.ptp(gains, axis=(1, 2)).max() < 1e-6
    assert -0.5 <= gains.min() < -0.4 and 0.4 < gains.max() <= 0.5
    noise = many(batch, 200, lib.Augment(noise=0.1))[1] - x
    assert (
        noise.std() == pytest.approx(0.1, rel=0.01)
        and abs(np.corrcoef(noise[0].ravel(), noise[1].ravel())[0, 1]) < 0.1
    )


def test_a_crop_is_a_box_stretched_to_the_whole(batch):
    """Crops of a picture of its own coordinates: the corners show the box, and all values between
    lie on a straight line."""
    t, w = np.meshgrid(np.arange(64.0), np.arange(32.0), indexing="ij")
    crops = []
    for plane in (t, w):
        rows = {
            **batch,
            "spectrogram": jnp.broadcast_to(jnp.asarray(plane, jnp.float32), (ROWS, 2, 64, 32)),
        }
        crops.append(many(rows, 300, lib.Augment(crop=0.25))[1])
    # away from the edges, at which values are repeated
    middle = np.stack([crops[0][:, 20:44, 16], crops[0][:, 20:44, 3]])
    steps_t, steps_w = np.diff(middle[0], axis=1), np.diff(crops[1][:, 32, 8:24], axis=1)
    np.testing.assert_allclose(middle[0], middle[1], atol=1e-3)
    assert np.ptp(steps_t, axis=1).max() < 1e-2 and np.ptp(steps_w, axis=1).max() < 1e-2
    extent = np.stack([steps_t.mean(1), steps_w.mean(1)])  # shares of time and of mel
    area = extent.prod(0)
    assert 0.2 < area.min() < 0.35 and 0.8 < area.max() <= 1.001 and extent.max() <= 1.001
    assert (extent[0] / extent[1]).min() < 0.8 and (extent[0] / extent[1]).max() > 1.25
    start = crops[0][:, 32, 16] - 32 * extent[0]
    assert start.min() > -1 and (start + 64 * extent[0]).max() < 65


def test_mixup_adds_energies_by_the_share_that_labels_get(batch):
    found = augment(lib.Augment(mixup=0.4), 0, batch)
    e = np.exp(np.asarray(batch["spectrogram"], np.float64) * 8.86 - 7.2)
    own = np.asarray(found.own_share)[:, :, None, None]
    other = e[[1, 0, 3, 2, 5, 4]]
    np.testing.assert_allclose(
        found.x, (np.log(own * e + (1 - own) * other) + 7.2) / 8.86, rtol=0, atol=1e-4
    )
    assert (
        found.own_share.shape == (ROWS, 2)
        and (found.own_share >= 0.5).all()
        and (found.own_share <= 1).all()
        and np.ptp(found.own_share) > 0.1
    )
    np.testing.assert_array_equal(lib.partner(jnp.arange(6)), [1, 0, 3, 2, 5, 4])
    with pytest.raises(ValueError, match="even multiple"):
        lib.partner(jnp.arange(3))


def test_a_background_is_weaker_by_so_many_decibels(batch):
    c = lib.Augment(background=0.5)
    x, after = many(batch, 300, c)
    y = np.asarray(batch["background"][0, 0])
    energy = lambda z: np.exp(z.astype(np.float64) * 8.86 - 7.2)  # noqa: E731
    mixed = np.abs(after - x[None]).max((1, 2)) > 1e-6
    assert 0.4 < mixed.mean() < 0.6
    added = energy(after[mixed]) - energy(x)[None]
    share = added.sum((1, 2)) / energy(y).sum()
    decibels = 10 * np.log10(energy(x).sum() / (share * energy(y).sum()))
    assert -0.1 < decibels.min() < 2 and 18 < decibels.max() < 20.1
    loud = energy(y) > energy(x)  # elsewhere rounding removed the sum
    np.testing.assert_allclose(
        added[:, loud], (share[:, None, None] * energy(y)[None])[:, loud], rtol=0.05
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shift", -1),
        ("noise", -0.1),
        ("mel_mask", -1),
        ("crop", 0.0),
        ("background", 2.0),
    ],
)
def test_an_invalid_model_names_the_field(field, value):
    problems = dict(replace(ALL, **{field: value}).validate())
    assert str(value) in problems[field] and not list(ALL.validate())
