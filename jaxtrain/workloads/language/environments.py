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
        each = [self._scores(row, text) for row, text in zip(self.rows, completions, strict=True)]
        rewards = [
            sum(w * x for w, x in zip(self.rubric.weights, scores, strict=True)) for scores in each
        ]
        means = {
            f.__name__: sum(scores[i] for scores in each) / len(each)
            for i, f in enumerate(self.rubric.funcs)
        }
        return {"reward": sum(rewards) / len(rewards), **means}, rewards

    def _scores(self, row: Mapping[str, Any], completion: str) -> list[float]:
        known = {"answer": "", "info": {}, **row, "completion": completion, "state": dict(row)}
        return [_call(f, known) for f in self.rubric.funcs]


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


def _call(f: Callable[..., Any], known: Mapping[str, Any]) -> float:
    parameters = inspect.signature(f).parameters.values()
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    score = f(
        **(known if everything else {p.name: known[p.name] for p in parameters if p.name in known})
    )
    return float(asyncio.run(score) if inspect.iscoroutine(score) else score)
