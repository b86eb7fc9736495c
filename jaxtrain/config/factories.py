"""Factories that a config names as ``module:function``: of an optimizer, or of a schedule.

A factory is called with the arguments that the config has for it. It also gets each value of the
run that it has a parameter for. Its errors are found before a device is used, by its signature
and by a call under `jax.eval_shape`, which makes no array.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from loaders.io import checks
from loaders.io.checks import Problems


class FactoryError(ValueError):
    """A name of no function. The message continues the path of the field: "is 'optax:x', and …"."""


class _CallError(Exception):
    """An optimizer that could not update parameters which are not the run's own."""


# In Python's TypeError: optax.lbfgs and others need the loss, or a function that computes it.
_NEEDS_LOSS = re.compile(r"required keyword-only argument.*'(value|grad|value_fn)'")


def is_factory(name: str) -> bool:
    """Whether a name is that of a factory, and not of a built-in rule or schedule."""
    return ":" in name


def find(name: str) -> Callable[..., Any]:
    """Import the function of ``module:function``. Raises FactoryError."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module may raise anything while it is executed
        raise FactoryError(
            f"is {name!r}, and importing {module_name!r} failed: {first_line(error)}"
        ) from error
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))]
        near = checks.nearest(function_name, names)
        raise FactoryError(
            f"is {name!r}, and {module_name} has no function {function_name!r}{near}"
        )
    return function


def takes(name: str, parameter: str) -> bool:
    """Whether the factory ``name`` has a parameter of this name. Raises FactoryError."""
    return parameter in inspect.signature(find(name)).parameters


def call(name: str, arguments: Mapping[str, Any], **given: Any) -> Any:
    """Call the factory with ``arguments`` and the values of ``given`` that it takes."""
    taken = {parameter: value for parameter, value in given.items() if takes(name, parameter)}
    return find(name)(**taken, **{key: _frozen(value) for key, value in arguments.items()})


def problems(
    name: str,
    arguments: Mapping[str, Any],
    *,
    field: str,
    check: Callable[[Any], str],
    **given: Any,
) -> Problems:
    """Yield the errors of a factory and of its arguments.

    Args:
      field: that holds ``name``.
      check: result of the call -> its problem, for example "expected …", or "".
      given: as of `call`, each under the name of the parameter.
    """
    where = "arguments" if field == "name" else f"{field}_arguments"
    try:
        parameters = inspect.signature(find(name)).parameters
    except ValueError as error:  # FactoryError, or a function of C without a signature
        yield (
            field,
            (
                str(error)
                if isinstance(error, FactoryError)
                else f"is {name!r}, whose parameters are not known"
            ),
        )
        return
    kinds = {parameter.kind for parameter in parameters.values()}
    allowed = [
        p
        for p, kind in parameters.items()
        if kind.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)
    ]
    wrong = False
    for key, value in arguments.items():
        default = parameters[key].default if key in allowed else None
        any_key = inspect.Parameter.VAR_KEYWORD in kinds
        if text := _argument_problem(
            name, key, value, allowed, given, any_key=any_key
        ) or _type_problem(name, value, default):
            wrong = True
            yield f"{where}.{key}", text
    needs = [p for p in allowed if parameters[p].default is inspect.Parameter.empty]
    needed = [p for p in needs if p not in (*arguments, *given)]
    if needed:
        yield where, f"lacks {', '.join(map(repr, needed))}, which {name} needs"
    if wrong or needed:
        return
    try:
        text = _abstractly(lambda: check(call(name, arguments, **given)))
    except Exception as error:
        faulty = [
            key
            for key in arguments
            if key not in needs and _works(name, arguments, given, check, without=key)
        ]
        path, value = (
            (f"{where}.{faulty[0]}", arguments[faulty[0]])
            if len(faulty) == 1
            else (where, dict(arguments))
        )
        # else the run's own parameters are tried later
        if len(faulty) == 1 or not isinstance(error, _CallError):
            yield path, f"is {value!r}, and {name} failed: {first_line(error.__cause__ or error)}"
    else:
        if text:
            yield field, f"is {name!r}, which {text}"


def _works(
    name: str,
    arguments: Mapping[str, Any],
    given: Mapping[str, Any],
    check: Callable[[Any], str],
    *,
    without: str,
) -> bool:
    """Whether a factory's result passes if one argument is left out."""
    try:
        _abstractly(
            lambda: check(
                call(
                    name,
                    {key: value for key, value in arguments.items() if key != without},
                    **given,
                )
            )
        )
    except Exception:
        return False
    return True


def of_optimizer(found: Any) -> str:
    """Describe the problem with an optimizer factory's result, as the ``check`` of `problems`.

    It updates a matrix and a vector, since most factories only store their arguments.
    """
    if not all(callable(getattr(found, name, None)) for name in ("init", "update")):
        return f"returned a {type(found).__name__}; expected an optax.GradientTransformation"
    import jax.numpy as jnp  # here: most configs name no factory

    params = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    try:
        found.update(params, found.init(params), params)
    except Exception as error:
        if _NEEDS_LOSS.search(str(error)):
            return (
                "needs the loss at each update, which a step does not give; name one that needs"
                " gradients and parameters"
            )
        raise _CallError from error
    return ""


def of_schedule(found: Any) -> str:
    """Describe the problem with a schedule factory's result, as the ``check`` of `problems`."""
    import jax  # here: most configs name no factory

    if not callable(found):
        return (
            f"returned a {type(found).__name__}; expected a function from the step to the learning"
            " rate"
        )
    rate = jax.eval_shape(found, jax.ShapeDtypeStruct((), "int32"))
    shape = getattr(rate, "shape", None)
    return "" if shape == () else f"gives {rate} at a step; expected a number, the learning rate"


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _argument_problem(
    name: str, key: str, value: Any, allowed: list[str], given: Mapping[str, Any], *, any_key: bool
) -> str:
    if key in given:
        return f"is {value!r}, which the other fields of optim decide; leave it out"
    if key not in allowed and not any_key:
        return (
            f"is no parameter of {name};"
            f" {checks.expected(key, [p for p in allowed if p not in given])}"
        )
    if not _is_plain(value):
        return (
            f"is {value!r} ({type(value).__name__}); expected numbers, strings, None, and tuples or"
            " dictionaries of them"
        )
    return ""


def _type_problem(name: str, value: Any, default: Any) -> str:
    """Describe a value of another kind than the parameter's default, if it is a bool or number."""
    if isinstance(default, bool) and not isinstance(value, bool):
        return f"is {value!r} ({type(value).__name__}); {name} expects True or False"
    if type(default) in (int, float) and value is not None and type(value) not in (int, float):
        return f"is {value!r} ({type(value).__name__}); {name} expects a number"
    return ""


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(x) for key, x in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _frozen(value: Any) -> Any:
    """Make tuples of lists, and integers of such keys: config.json has lists, and text for keys."""
    if isinstance(value, dict):
        return {
            int(k) if isinstance(k, str) and k.lstrip("-").isdecimal() else k: _frozen(x)
            for k, x in value.items()
        }
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _abstractly(function: Callable[[], str]) -> str:
    """Call a function whose arrays stay abstract: no device is looked for."""
    import jax  # here: most configs name no factory

    found: list[str] = []
    jax.eval_shape(lambda: found.append(function()))
    return found[0]
