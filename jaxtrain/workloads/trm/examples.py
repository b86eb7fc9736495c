"""Rows of a step for people: the board of each slot, its last guess, and the solution."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.types import Example
from jaxtrain.workloads.trm import boards
from jaxtrain.workloads.trm.loss import begin


def examples(config: Any, carry: Any, batch: Mapping[str, Any], position: int) -> Sequence[Example]:
    """Draw each slot's puzzle. One that began before has no id: its batch's row is dropped."""
    slots = jax.device_get(begin(carry, batch))
    none = jnp.zeros((0, *slots["inputs"].shape), jnp.int32)
    drawn = np.asarray(boards.draw(slots["inputs"], slots["labels"], none))
    return [
        Example(
            id="" if new else f"row:{k}",
            text=f"supervision step {int(slots['steps'][k]) + 1}",
            pictures={"puzzle and solution": drawn[k]},
        )
        for k, new in enumerate(np.asarray(carry["halted"]))
    ]
