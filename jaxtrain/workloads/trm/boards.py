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
    tiles_vyx = _tiles()
    labels_bs = jnp.where(labels_bs == IGNORED, 0, labels_bs)
    is_solution_bs = inputs_bs == labels_bs
    is_given_bs = is_solution_bs & (inputs_bs > 1)
    boards = [inputs_bs, *guess_kbs, labels_bs]
    views = []
    for i, board_bs in enumerate(boards):
        # [B, S, 9, 7] for each cell
        ink_vyx = jnp.asarray(tiles_vyx)
        symbol_bs = jnp.minimum(board_bs, len(GLYPHS) - 1)
        symbol_ink = ink_vyx[symbol_bs]
        paper_bs = jnp.where(is_given_bs, 0.8, 1.0)
        paper = paper_bs[..., None, None]
        is_guess = 0 < i <= len(guess_kbs)
        differs_bs = board_bs != labels_bs
        is_wrong_bs = differs_bs & is_guess
        is_wrong = is_wrong_bs[..., None, None]
        paper = jnp.broadcast_to(paper, symbol_ink.shape)
        black_on_paper = paper * (1 - symbol_ink)
        tiles = jnp.where(is_wrong, symbol_ink, black_on_paper)
        views.append(_joined(tiles))
    picture = jnp.concatenate(views, axis=2)
    return picture[:, ::-1]


def _tiles() -> np.ndarray:
    """Return each symbol's ink, float32 [V, 9, 7] of 0 and 1, with a margin of two points."""
    n_symbols = len(GLYPHS)
    tiles_vyx = np.zeros((n_symbols, 9, 7), np.float32)
    for symbol, glyph in enumerate(GLYPHS):
        for y, digit in enumerate(glyph):
            points = int(digit, 16)
            for x in range(3):
                point = points >> (2 - x) & 1
                tiles_vyx[symbol, 2 + y, 2 + x] = point
    return tiles_vyx


def _joined(tiles: Array) -> Array:
    """Join the tiles [B, S, 9, 7] of a square of cells to a picture with lines, and a margin."""
    n_boards, n_cells, height, width = tiles.shape
    side = math.isqrt(n_cells)
    tiles = tiles.at[..., -1, :].set(0.5)
    tiles = tiles.at[..., :, -1].set(0.5)  # lines between the cells
    tiles = tiles[:, : side * side]
    rows = tiles.reshape(n_boards, side, side, height, width)
    image = rows.transpose(0, 1, 3, 2, 4)
    image = image.reshape(n_boards, side * height, side * width)
    return jnp.pad(image, ((0, 0), (0, 0), (0, 7)), constant_values=1.0)
