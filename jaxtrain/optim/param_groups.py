"""The groups of parameters, by path: which decay, are frozen, or have their own rate or rule.

A parameter that no pattern names, or a pattern that names no parameter, is an error.
"""

import re

import jax
import numpy as np

from jaxtrain.config import REST, UPDATE_RULES, Group, Optim
from jaxtrain.optim.update_rules import RuleError, is_hidden_matrix, matrix_axes
from jaxtrain.specs import is_spec, map_specs, paths
from jaxtrain.types import PyTree, Spec
from loaders.io.checks import UserError

# With optim.layer_decay: the parameters below a stack of layers, by their names.
BELOW_LAYERS = r"(^|/)(w_patch|b_patch|embed|pos|cls)[^/]*$"


class OptimError(UserError, ValueError):
    """Patterns that do not cover the parameters. The message lists the gaps, and the remedy."""


def group_of_each(optim: Optim, specs: PyTree) -> PyTree:
    """Return the `Group` of every parameter. Raises OptimError unless the patterns cover the table.

    Only built-in rules decay parameters by optim.decayed and optim.undecayed.
    """
    names, problems = paths(specs), []
    decaying = names if optim.name in UPDATE_RULES else []
    for path in decaying:
        matches = [bool(re.search(pattern, path)) for pattern in (optim.decayed, optim.undecayed)]
        if sum(matches) != 1:
            quantity = "both" if all(matches) else "neither"
            problems.append(
                f"parameter {path!r} matches {quantity} of optim.decayed={optim.decayed!r} and"
                f" optim.undecayed={optim.undecayed!r}; change the patterns so that exactly one of"
                " them matches it"
            )
    for i, group in enumerate(optim.groups):
        if not any(re.search(group.match, path) for path in names):
            problems.append(
                f"optim.groups[{i}].match={group.match!r} matches no parameter; the parameters are"
                f" {', '.join(names)}"
            )
    if problems:
        raise OptimError("\n".join(problems))
    default = Group()

    def group_of(path: str, _: Spec) -> Group:
        return next((group for group in optim.groups if re.search(group.match, path)), default)

    return map_specs(group_of, specs)


def update_rule_of_each(optim: Optim, specs: PyTree, groups: PyTree) -> PyTree:
    """Return the name of every parameter's update rule.

    A rule for matrices leaves all but hidden ones to `REST`. Raises OptimError for a rule that
    a parameter cannot have.
    """
    problems = []

    def name(path: str, spec: Spec, group: Group) -> str:
        rule = group.name or optim.name
        if not UPDATE_RULES[rule].matrices:
            return rule
        if group.name is None:
            # Positions, CLS tokens and biases of heads have two dimensions too, but do not decay.
            return rule if is_hidden_matrix(path, spec) and re.search(optim.decayed, path) else REST
        if not group.freeze:
            try:
                matrix_axes(path, spec)
            except RuleError as error:
                problems.append(str(error))
        return rule

    leaves, tree = jax.tree.flatten(specs, is_leaf=is_spec)
    parameters = zip(paths(specs), leaves, jax.tree.leaves(groups), strict=True)
    names = [name(path, spec, group) for path, spec, group in parameters]
    if problems:
        raise OptimError("\n".join(problems))
    return jax.tree.unflatten(tree, names)


def rate_factors(optim: Optim, specs: PyTree) -> PyTree:
    """Return each parameter's factor of the learning rate (Clark et al. 2020).

    It is layer_decay to the number of layers above. Layer i of a stack of n has n - i, since the
    head counts. A match of `BELOW_LAYERS` has n + 1, and any other parameter none. Raises
    OptimError if no parameter has a layer, or none is below the first.
    """
    if optim.layer_decay == 1:
        return map_specs(lambda path, spec: 1.0, specs)
    return _decayed_by_layer(optim, specs)


def _decayed_by_layer(optim: Optim, specs: PyTree) -> PyTree:
    stacked = [s for s in jax.tree.leaves(specs, is_leaf=is_spec) if "layer" in s.axes]
    stacks = [spec.shape[spec.axes.index("layer")] for spec in stacked]
    if not stacks:
        raise OptimError(
            f"optim.layer_decay={optim.layer_decay}, but no parameter has an axis 'layer'; leave it"
            " at 1"
        )
    if not any(re.search(BELOW_LAYERS, path) for path in paths(specs)):
        raise OptimError(
            f"optim.layer_decay={optim.layer_decay}, but no name of {', '.join(paths(specs))} is"
            " that of a parameter below the layers: w_patch, b_patch, embed…, pos… or cls…; leave"
            " it at 1"
        )

    def factor(path: str, spec: Spec) -> float | np.ndarray:
        if "layer" in spec.axes:
            axis = spec.axes.index("layer")
            above = spec.shape[axis] - np.arange(spec.shape[axis])
            shape = [1] * axis + [-1] + [1] * (len(spec.shape) - axis - 1)
            return (optim.layer_decay**above).astype(np.float32).reshape(shape)
        return optim.layer_decay ** (max(stacks) + 1) if re.search(BELOW_LAYERS, path) else 1.0

    return map_specs(factor, specs)
