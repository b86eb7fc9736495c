"""The recursive model in a small size: slots that halt, and a table of puzzles."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.workloads.trm import loss as trm_loss
from jaxtrain.workloads.trm import model as trm
from tests.support.cases import Case

TINY = trm.Config(
    n_cells=16,
    vocab=6,
    n_puzzles=24,
    n_difficulties=2,
    embed=16,
    heads=2,
    puzzle_tokens=2,
    puzzle_embed=24,
    inner_multiple=16,
    cycles_high=2,
    cycles_low=2,
    halt_steps=3,
    explore=0.5,
    explore_end=0.1,
    dtype="float32",
)
LAST = replace(TINY, contract="last", explore=0.1, explore_end=None, halt_steps=4, least_steps=2)
GROUPS = (config_lib.Group("^puzzle/", lr=0.01, name="sign_sgd"),)
# With Lion and signs, rounding noise is as large as any gradient. AdamATan2 divides by it, so only
# the table's own rule is by signs.
OPTIM = config_lib.Optim(lr=0.003, schedule="constant", clip=0.0, eps=1e-3, groups=GROUPS)
WIDE = 32


def awake(params):
    """Weights that let some rows halt, and a table that is not zero."""
    rows = jax.random.normal(jax.random.key(1), params["puzzle"]["w_rows"].shape)
    return {**params, "b_q": params["b_q"] + jnp.array([5.5, 5.0]), "puzzle": {"w_rows": rows}}


def calm(params):
    """Weights of a recursion that hardly amplifies rounding errors: those of the last products are
    halved."""
    params = awake(params)
    halves = {name: x / 2 if name.endswith("down") else x for name, x in params["net"].items()}
    return {**params, "net": halves}


def random_batch(seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, 6, (WIDE, 16), dtype="i4")
    return {
        "inputs": np.where(rng.random((WIDE, 16)) < 0.5, 1, labels).astype("i4"),
        "labels": np.where(rng.random((WIDE, 16)) < 0.1, trm.IGNORED, labels).astype("i4"),
        "puzzle": rng.integers(0, 12, WIDE, dtype="i4"),  # of 24: half of the table is never used
        "difficulty": rng.integers(0, 2, WIDE, dtype="i4"),
        "weight": np.ones(WIDE, "f4"),
    }


CASE = Case(trm_loss, TINY, OPTIM, random_batch, ema=0.9, begin=awake, steps=20)
MATRIX = {
    # Slots that halt, also at random; a table with rows that are updated by signs; an average of
    # the parameters.
    "trm": CASE._replace(model=replace(TINY, heads=8)),
    # Rows that take a random number of steps, with a gradient of the last step only.
    "trm_last": CASE._replace(model=replace(LAST, heads=8), begin=calm),
}
