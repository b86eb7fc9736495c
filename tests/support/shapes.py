"""Shapes of functions by the suffixes of their arguments' names, checked by jaxtyping: ``x_btd`` is
[b, t, d].

Dimensions of one letter have the same size in all arguments of a call.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Shaped, jaxtyped

# Masks of one row stand for all rows.
SPECIAL = {"mask_bts": "#b t s"}


def dimensions(name: str, parameter: inspect.Parameter) -> str | None:
    """The dimensions in the suffix of an array's name, or None for another argument."""
    if parameter.annotation not in (jax.Array, jax.Array | None) or "_" not in name:
        return None
    return SPECIAL.get(name, " ".join(name.rpartition("_")[2]))


class Checked:
    """Returns a function whose arguments and result are checked in each call."""

    def __init__(self, name: str, function: Callable[..., Any], result: str = ""):
        functools.update_wrapper(self, function)
        self.name, self.result, self._function, self._calls = name, result, function, 0
        self._signature = inspect.signature(function)
        each = {name: dimensions(name, p) for name, p in self._signature.parameters.items()}
        self.hints = {name: Shaped[Array, dims] for name, dims in each.items() if dims}

    @property
    def was_called(self) -> bool:
        return self._calls > 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        bound = self._signature.bind(*args, **kwargs).arguments
        with jaxtyped("context"):
            for name, hint in self.hints.items():
                if (value := bound.get(name)) is not None:
                    assert isinstance(value, hint), f"{self.name}: {name} is {value.shape}"
            found = self._function(*args, **kwargs)
            if self.result:
                assert isinstance(found, Shaped[Array, self.result]), (
                    f"{self.name} returns {found.shape}"
                )
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def check(
    modules: Sequence[types.ModuleType], monkeypatch: Any, results: Mapping[str, str] | None = None
) -> dict[str, Checked]:
    """Replaces every function of some modules with such arguments. ``results`` maps a name to its
    result's shape."""
    found = {}
    for module in modules:
        for name, function in vars(module).items():
            is_own = getattr(function, "__module__", "") == module.__name__
            if is_own and callable(function) and not inspect.isclass(function):
                label = f"{module.__name__.rpartition('.')[2]}.{name}"
                one = Checked(label, function, (results or {}).get(label, ""))
                if one.hints or one.result:
                    found[id(function)] = one
    for module, (name, function) in itertools.chain(
        *([(m, x) for x in vars(m).items()] for m in modules)
    ):
        if id(function) in found:
            monkeypatch.setattr(module, name, found[id(function)])
    return {one.name: one for one in found.values()}
