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
    x_mean_b1 = x_bv.mean(1, keepdims=True)
    x_bv = x_bv - x_mean_b1
    y_mean_b1 = y_bv.mean(1, keepdims=True)
    y_bv = y_bv - y_mean_b1
    return cosine(x_bv, y_bv, eps=1e-12)


def cosine(x_bd: Array, y_bd: Array, *, eps: float) -> Array:
    """Cosine similarity of each row, [B]. ``eps``: the least product of lengths to divide by."""
    x_squares_b = jnp.square(x_bd).sum(1)
    y_squares_b = jnp.square(y_bd).sum(1)
    lengths_b = jnp.sqrt(x_squares_b * y_squares_b)
    product_bd = x_bd * y_bd
    return product_bd.sum(1) / jnp.maximum(lengths_b, eps)


def r_squared(y_bv: Array, target_bv: Array) -> Array:
    """1 - SS_residual / SS_total of each row across voxels, [B]."""
    mean_b1 = target_bv.mean(1, keepdims=True)
    deviation_bv = target_bv - mean_b1
    total_b = jnp.square(deviation_bv).sum(1)
    residual_bv = target_bv - y_bv
    residual_b = jnp.square(residual_bv).sum(1)
    return 1 - residual_b / jnp.maximum(total_b, 1e-12)


def finish(record: Mapping[str, Any]) -> dict[str, float]:
    """Add the scores of the whole split.

    They are r and R² of each voxel across moments, from its means, as averages over voxels whose
    measurement varies, or nan. "voxel_r_best" is the 90 % quantile over the voxels, "voxel_r_null"
    the average with shuffled pairs.
    """
    voxel = spread(record, "voxel")
    null = spread(record, "null")
    r = correlation(voxel)
    r2 = 1 - voxel.residual / voxel.var_t
    scores = {}
    for name, value in record.items():
        if not name.startswith(("voxel/", "null/")):
            scores[name] = value
    scores["voxel_r"] = _mean(r)
    r_null = correlation(null)
    scores["voxel_r_null"] = _mean(r_null)
    scores["voxel_r2"] = _mean(r2)
    scores["voxel_r_best"] = math.nan
    if r.size:
        scores["voxel_r_best"] = float(np.quantile(r, 0.9))
    return scores


class Spread(NamedTuple):
    """Means of predictions y and measurements t over moments, of voxels whose t varies."""

    covariance: np.ndarray
    var_y: np.ndarray
    var_t: np.ndarray
    residual: np.ndarray  # mean square of t - y


def spread(record: Mapping[str, Any], kind: str) -> Spread:
    def mean_of(product: str) -> np.ndarray:
        return np.asarray(record[f"{kind}/{product}"])

    y, t = mean_of("y"), mean_of("t")
    yy, tt = mean_of("yy"), mean_of("tt")
    yt = mean_of("yt")
    covariance = yt - y * t
    var_y = _variance(y, yy)
    var_t = _variance(t, tt)
    residual = yy - 2 * yt + tt
    varies = var_t > 0
    return Spread(covariance[varies], var_y[varies], var_t[varies], residual[varies])


def _variance(mean: np.ndarray, mean_square: np.ndarray) -> np.ndarray:
    """Return variances, 0 if they are the rounding of squares that were summed in float32."""
    variance = mean_square - mean * mean
    varies = variance > 1e-5 * mean_square
    return np.where(varies, variance, 0)


def correlation(s: Spread) -> np.ndarray:
    """Pearson's r of each voxel, 0 if the prediction is constant."""
    varies = s.var_y > 0
    product = np.where(varies, s.var_y * s.var_t, 1)
    r = s.covariance / np.sqrt(product)
    r = np.where(varies, r, 0)
    return np.clip(r, -1, 1)


def _mean(x: np.ndarray) -> float:
    if not x.size:
        return math.nan
    return float(x.mean())


def shuffled(x_bv: Array, weight_b: Array, volume_b: Array) -> tuple[Array, Array]:
    """Return each row's partner for the null, [B, V], half of the valid rows away.

    Also returns whether it has one, [B]. A test split comes in a mixed order, so that partners are
    no neighbours in time. A row is no partner of itself, nor are two viewers of one moment, who saw
    the same.
    """
    n = weight_b.sum().astype(jnp.int32)
    count_b = jnp.cumsum(weight_b).astype(jnp.int32)
    place_b = count_b - 1  # among the valid rows
    partner_place_b = (place_b + n // 2) % jnp.maximum(n, 1)
    partner_place_b1 = partner_place_b[:, None]
    is_partner_bb = partner_place_b1 == place_b[None]
    pick_bb = is_partner_bb * weight_b[:, None]
    pick_bb = pick_bb * weight_b[None]
    differs_bb = volume_b[:, None] != volume_b[None]
    valid_bb = pick_bb * differs_bb
    has_partner_b = valid_bb.sum(1)
    exactly = jax.lax.Precision.HIGHEST
    partner_bv = jnp.matmul(pick_bb, x_bv, precision=exactly)
    return partner_bv, has_partner_b


def density(x_bv: Array, y_bv: Array, bins: int = 96, limit: float = 3.0) -> Array:
    """[B, bins (y), bins (x)] in 0..1: the log of each cell's voxels, with the diagonal in grey."""
    bin_k = jnp.arange(bins)
    bin_11k = bin_k[None, None]

    def one_hot(z_bv: Array) -> Array:
        place_bv = (z_bv / limit + 1) * (bins / 2)
        place_bv = jnp.clip(place_bv, 0, bins - 1)
        place_bv = place_bv.astype(jnp.int32)
        place_bv1 = place_bv[..., None]
        is_bin_bvk = place_bv1 == bin_11k
        return is_bin_bvk.astype(jnp.float32)

    y_bvk = one_hot(y_bv)
    x_bvk = one_hot(x_bv)
    count_byx = jnp.einsum("bvy,bvx->byx", y_bvk, x_bvk)
    log_byx = jnp.log1p(count_byx)
    largest_b11 = count_byx.max((1, 2), keepdims=True)
    largest_b11 = jnp.maximum(largest_b11, 1)
    largest_log_b11 = jnp.log1p(largest_b11)
    grey_byx = log_byx / largest_log_b11
    diagonal_yx = jnp.eye(bins)
    diagonal_1yx = 0.3 * diagonal_yx[None]
    return jnp.maximum(grey_byx, diagonal_1yx)
