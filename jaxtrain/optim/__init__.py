"""The optimizer of a run, made from config.optim and the parameter table.

update_rules   from gradients to updates, for rules that optax lacks
moments        the state of a rule between steps, in few bits
param_groups   which parameters decay, are frozen, or have their own rate or rule
optimizer      all of it, in order, with the learning rate by step
"""

from jaxtrain.optim.optimizer import (
    Optimizer,
    global_norm,
    learning_rates,
    make_optimizer,
    make_schedule,
    root_of_sum,
    square_sums,
)
from jaxtrain.optim.param_groups import OptimError

__all__ = [
    "OptimError",
    "Optimizer",
    "global_norm",
    "learning_rates",
    "make_optimizer",
    "make_schedule",
    "root_of_sum",
    "square_sums",
]
