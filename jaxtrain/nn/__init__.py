"""Pure layer functions that workloads share."""

import jax.numpy as jnp

# a score that no softmax sees; -inf would make nan of an empty row
NEVER = -0.7 * float(jnp.finfo(jnp.float32).max)
