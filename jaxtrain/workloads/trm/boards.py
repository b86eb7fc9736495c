"""Pictures of boards and of the guesses after each step.

Shapes: B boards, S cells, K steps, V symbols.
"""

import math

import jax.numpy as jnp
import numpy as np

from jaxtrain.types import Array
from jaxtrain.workloads.trm.model import IGNORED

# Symbols 2 … 10 are the digits 1 … 9, of 3 × 5 points each, a hexadecimal digit for a row of a
# symbol.
GLYPHS = (
    "00000",
    "00000",
    "26227",
    "71747",
    "71717",
    "55711",
    "74717",
    "74757",
    "71122",
    "75757",
    "75717",
)


def draw(inputs_bs: Array, labels_bs: Array, guess_kbs: Array) -> Array:
    """Draw boards, [B, height, width] in 0..1: puzzle, guess after each step, solution.

    A given cell is grey, a wrong one white on black. Rows are counted from the bottom.
    """
    n_symbols = len(GLYPHS)
    points = np.array(
        [[[int(h, 16) >> (2 - x) & 1 for x in range(3)] for h in glyph] for glyph in GLYPHS],
        np.float32,
    )
    tiles_v = np.zeros((n_symbols, 9, 7), np.float32)
    tiles_v[:, 2:7, 2:5] = points
    side = math.isqrt(inputs_bs.shape[1])
    labels_bs = jnp.where(labels_bs == IGNORED, 0, labels_bs)
    given_bs = (inputs_bs == labels_bs) & (inputs_bs > 1)
    boards = [inputs_bs, *guess_kbs, labels_bs]
    views = []
    for i, board_bs in enumerate(boards):
        ink = jnp.asarray(tiles_v)[jnp.minimum(board_bs, n_symbols - 1)]
        paper = jnp.where(given_bs, 0.8, 1.0)[..., None, None]
        wrong = ((board_bs != labels_bs) & (0 < i < len(boards) - 1))[..., None, None]
        tile = jnp.where(wrong, ink, jnp.broadcast_to(paper, ink.shape) * (1 - ink))
        tile = tile.at[..., -1, :].set(0.5).at[..., :, -1].set(0.5)  # lines between the cells
        image = tile[:, : side * side].reshape(-1, side, side, 9, 7).transpose(0, 1, 3, 2, 4)
        views.append(
            jnp.pad(
                image.reshape(-1, side * 9, side * 7), ((0, 0), (0, 0), (0, 7)), constant_values=1.0
            )
        )
    return jnp.concatenate(views, axis=2)[:, ::-1]
