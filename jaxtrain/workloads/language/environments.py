"""Prompts, and functions that score a model's answers: an evaluation besides the loss.

An environment is a module with ``load_environment(**arguments)``, which returns an object with

    dataset           rows with "prompt" (text) and, if the functions read them, "answer" and "info"
    rubric.funcs      functions of keyword arguments among prompt, completion, answer, info and
                      state (the whole row), which return a number, also as coroutines
    rubric.weights    the weight of each number in the sum

as environments of one turn of plain text have it in the package ``verifiers``, which is not needed:
`Environment` and `Rubric` are of the same shape. configs/sums.py has one.
"""

import asyncio
import importlib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


class BadEnvironment(ValueError):
    """An environment that cannot be used. The message names it."""


class Rubric(NamedTuple):
    funcs: Sequence[Callable[..., Any]]
    weights: Sequence[float]


class Environment(NamedTuple):
    dataset: Iterable[Mapping[str, Any]]
    rubric: Rubric


class Prompts(NamedTuple):
    """The first rows of an environment, and how they are scored."""

    rows: tuple[Mapping[str, Any], ...]
    rubric: Any

    def score(self, completions: Sequence[str]) -> tuple[dict[str, float], list[float]]:
        """Means over the prompts, "reward" and every function's own, and the reward of each."""
        scores_by_row, rewards = [], []
        for row, completion in zip(self.rows, completions, strict=True):
            scores = self._scores(row, completion)
            weighted = zip(self.rubric.weights, scores, strict=True)
            scores_by_row.append(scores)
            rewards.append(sum(weight * score for weight, score in weighted))
        means = {}
        for f, scores_of_f in zip(self.rubric.funcs, zip(*scores_by_row, strict=True), strict=True):
            means[f.__name__] = sum(scores_of_f) / len(scores_of_f)
        return {"reward": sum(rewards) / len(rewards), **means}, rewards

    def _scores(self, row: Mapping[str, Any], completion: str) -> list[float]:
        fields = {"answer": "", "info": {}, **row, "completion": completion, "state": dict(row)}
        return [_call(f, fields) for f in self.rubric.funcs]


def load(module: str, arguments: Mapping[str, Any], limit: int) -> Prompts:
    """Return the first ``limit`` prompts of an environment. Raises BadEnvironment."""
    try:
        environment = importlib.import_module(module).load_environment(**arguments)
    except (ImportError, AttributeError, TypeError) as error:
        raise BadEnvironment(
            f"{module}: load_environment(**{dict(arguments)}) failed: {error}"
        ) from error
    try:
        rows, rubric = tuple(itertools.islice(environment.dataset, limit)), environment.rubric
        n_funcs, n_weights = len(rubric.funcs), len(rubric.weights)
    except (AttributeError, TypeError) as error:
        raise BadEnvironment(
            f"{module}: an environment has a dataset and a rubric of funcs and weights: {error}"
        ) from error
    if not rows or not n_funcs or n_funcs != n_weights:
        raise BadEnvironment(
            f"{module}: {len(rows)} prompts, {n_funcs} functions and {n_weights} weights cannot be"
            " scored"
        )
    for i, row in enumerate(rows):
        if not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise BadEnvironment(
                f"{module}: row {i} has the prompt {row.get('prompt')!r}; expected a text of one"
                " turn"
            )
    return Prompts(rows, rubric)


def _call(f: Callable[..., Any], fields: Mapping[str, Any]) -> float:
    """Call a function with those of the fields that it takes."""
    parameters = inspect.signature(f).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        fields = {name: fields[name] for name in parameters if name in fields}
    score = f(**fields)
    if inspect.iscoroutine(score):
        score = asyncio.run(score)
    return float(score)
