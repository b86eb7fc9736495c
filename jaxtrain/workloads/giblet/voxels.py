"""How predicted and measured fMRI [B rows, V voxels] agree: by moment, and by voxel."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.types import Array


def pearson(x_bv: Array, y_bv: Array) -> Array:
    """Correlation of each row across voxels, [B], 0 if one of them is constant."""
    x_bv, y_bv = (z - z.mean(1, keepdims=True) for z in (x_bv, y_bv))
    lengths_b = jnp.sqrt(jnp.square(x_bv).sum(1) * jnp.square(y_bv).sum(1))
    return (x_bv * y_bv).sum(1) / jnp.maximum(lengths_b, 1e-12)


def r_squared(y_bv: Array, target_bv: Array) -> Array:
    """1 - SS_residual / SS_total of each row across voxels, [B]."""
    total_b = jnp.square(target_bv - target_bv.mean(1, keepdims=True)).sum(1)
    return 1 - jnp.square(target_bv - y_bv).sum(1) / jnp.maximum(total_b, 1e-12)


def finish(record: Mapping[str, Any]) -> dict[str, float]:
    """Add the scores of the whole split.

    They are r and R² of each voxel across moments, from its means, as averages over voxels whose
    measurement varies, or nan. "voxel_r_best" is the 90 % quantile over the voxels, "voxel_r_null"
    the average with shuffled pairs.
    """
    voxel, null = spread(record, "voxel"), spread(record, "null")
    r, r2 = correlation(voxel), 1 - voxel.residual / voxel.var_t
    return {
        **{name: x for name, x in record.items() if not name.startswith(("voxel/", "null/"))},
        "voxel_r": _mean(r),
        "voxel_r_null": _mean(correlation(null)),
        "voxel_r2": _mean(r2),
        "voxel_r_best": float(np.quantile(r, 0.9)) if r.size else math.nan,
    }


class Spread(NamedTuple):
    """Means of predictions y and measurements t over moments, of voxels whose t varies."""

    covariance: np.ndarray
    var_y: np.ndarray
    var_t: np.ndarray
    residual: np.ndarray  # mean square of t - y


def spread(record: Mapping[str, Any], kind: str) -> Spread:
    y, t, yy, tt, yt = (
        np.asarray(record[f"{kind}/{name}"]) for name in ("y", "t", "yy", "tt", "yt")
    )
    # Of squares that were summed in float32, a difference of this size is rounding.
    var_y, var_t = (np.where(zz - z * z > 1e-5 * zz, zz - z * z, 0) for z, zz in ((y, yy), (t, tt)))
    varies = var_t > 0
    return Spread(*(x[varies] for x in (yt - y * t, var_y, var_t, yy - 2 * yt + tt)))


def correlation(s: Spread) -> np.ndarray:
    """Pearson's r of each voxel, 0 if the prediction is constant."""
    return np.clip(
        np.where(
            s.var_y > 0, s.covariance / np.sqrt(np.where(s.var_y > 0, s.var_y * s.var_t, 1)), 0
        ),
        -1,
        1,
    )


def _mean(x: np.ndarray) -> float:
    return float(x.mean()) if x.size else math.nan


def shuffled(x_bv: Array, weight_b: Array, volume_b: Array) -> tuple[Array, Array]:
    """Return each row's partner for the null, [B, V], half of the valid rows away.

    Also returns whether it has one, [B]. A test split comes in a mixed order, so that partners are
    no neighbours in time. A row is no partner of itself, nor are two viewers of one moment, who saw
    the same.
    """
    n = weight_b.sum().astype(jnp.int32)
    place_b = jnp.cumsum(weight_b).astype(jnp.int32) - 1
    partner_b = (place_b + n // 2) % jnp.maximum(n, 1)
    pick_bb = (partner_b[:, None] == place_b[None]) * weight_b[:, None] * weight_b[None]
    exactly = jax.lax.Precision.HIGHEST
    other_b = (pick_bb * (volume_b[:, None] != volume_b[None])).sum(1)
    return jnp.matmul(pick_bb, x_bv, precision=exactly), other_b


def density(x_bv: Array, y_bv: Array, bins: int = 96, limit: float = 3.0) -> Array:
    """[B, bins (y), bins (x)] in 0..1: the log of each cell's voxels, with the diagonal in grey."""
    edges = jnp.arange(bins)[None, None]

    def place(z: Array) -> Array:
        return (
            jnp.clip((z / limit + 1) * (bins / 2), 0, bins - 1).astype(jnp.int32)[..., None]
            == edges
        )

    count_byx = jnp.einsum(
        "bvy,bvx->byx", place(y_bv).astype(jnp.float32), place(x_bv).astype(jnp.float32)
    )
    grey = jnp.log1p(count_byx) / jnp.log1p(jnp.maximum(count_byx.max((1, 2), keepdims=True), 1))
    return jnp.maximum(grey, 0.3 * jnp.eye(bins)[None])
