"""Factories that a config names as ``module:function``: of an optimizer, or of a schedule.

A factory is called with the arguments that the config has for it. It also gets each value of the
run that it has a parameter for. Its errors are found before a device is used, by its signature
and by a call under `jax.eval_shape`, which makes no array.
"""

import importlib
import inspect
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from loaders.io import checks
from loaders.io.checks import Problems

# Kinds of parameters that can be given by name.
KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
    keywords = {parameter: value for parameter, value in given.items() if takes(name, parameter)}
    for key, value in arguments.items():
        keywords[key] = _frozen(value)
    return find(name)(**keywords)


def with_key(name: str, arguments: Mapping[str, Any], seed: int) -> Mapping[str, Any]:
    """Add the argument ``key``, by the run's seed, if a factory takes one and has none.

    It is an integer, of which `jax.random.key` makes a key that no step has. Raises FactoryError.
    """
    if "key" in arguments or "seed" in arguments or not takes(name, "key"):
        return arguments
    key = zlib.crc32(f"the optimizer of a run with the seed {seed}".encode())
    return {**arguments, "key": key >> 1}  # as int32


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
    arguments_field = "arguments" if field == "name" else f"{field}_arguments"
    try:
        parameters = inspect.signature(find(name)).parameters
    except FactoryError as error:
        yield field, str(error)
        return
    except ValueError:  # a function of C without a signature
        yield field, f"is {name!r}, whose parameters are not known"
        return
    keywords = [p.name for p in parameters.values() if p.kind in KEYWORDS]
    any_key = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    is_wrong = False
    for key, value in arguments.items():
        text = _argument_problem(name, key, value, keywords, given, any_key=any_key)
        if not text and key in keywords:
            text = _type_problem(name, value, parameters[key].default)
        if text:
            is_wrong = True
            yield f"{arguments_field}.{key}", text
    required = [p for p in keywords if parameters[p].default is inspect.Parameter.empty]
    missing = [p for p in required if p not in (*arguments, *given)]
    if missing:
        yield arguments_field, f"lacks {', '.join(map(repr, missing))}, which {name} needs"
    if is_wrong or missing:
        return
    try:
        text = _abstractly(lambda: check(call(name, arguments, **given)))
    except Exception as error:
        reason = first_line(error.__cause__ or error)
        optional = [key for key in arguments if key not in required]
        faulty = [key for key in optional if _works(name, arguments, given, check, without=key)]
        if len(faulty) == 1:
            (key,) = faulty
            text = f"is {arguments[key]!r}, and {name} failed: {reason}"
            yield f"{arguments_field}.{key}", text
        elif not isinstance(error, _CallError):  # else the run's own parameters are tried later
            yield arguments_field, f"is {dict(arguments)!r}, and {name} failed: {reason}"
        return
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
    others = {key: value for key, value in arguments.items() if key != without}
    try:
        _abstractly(lambda: check(call(name, others, **given)))
    except Exception:
        return False
    return True


def of_optimizer(result: Any) -> str:
    """Describe the problem with an optimizer factory's result, as the ``check`` of `problems`.

    It updates a matrix and a vector, since most factories only store their arguments.
    """
    if not all(callable(getattr(result, name, None)) for name in ("init", "update")):
        return f"returned a {type(result).__name__}; expected an optax.GradientTransformation"
    import jax.numpy as jnp  # here: most configs name no factory

    params = {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}
    try:
        result.update(params, result.init(params), params)
    except Exception as error:
        if _NEEDS_LOSS.search(str(error)):
            return (
                "needs the loss at each update, which a step does not give; name one that needs"
                " gradients and parameters"
            )
        raise _CallError from error
    return ""


def of_schedule(result: Any) -> str:
    """Describe the problem with a schedule factory's result, as the ``check`` of `problems`."""
    import jax  # here: most configs name no factory

    if not callable(result):
        return (
            f"returned a {type(result).__name__}; expected a function from the step to the learning"
            " rate"
        )
    rate = jax.eval_shape(result, jax.ShapeDtypeStruct((), "int32"))
    if getattr(rate, "shape", None) == ():
        return ""
    return f"gives {rate} at a step; expected a number, the learning rate"


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _argument_problem(
    name: str, key: str, value: Any, keywords: list[str], given: Mapping[str, Any], *, any_key: bool
) -> str:
    if key in given:
        return f"is {value!r}, which the other fields of optim decide; leave it out"
    if key not in keywords and not any_key:
        expected = [p for p in keywords if p not in given]
        return f"is no parameter of {name}; {checks.expected(key, expected)}"
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
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if not isinstance(value, dict):
        return value
    frozen = {}
    for key, item in value.items():
        is_integer = isinstance(key, str) and key.lstrip("-").isdecimal()
        frozen[int(key) if is_integer else key] = _frozen(item)
    return frozen


def _abstractly(function: Callable[[], str]) -> str:
    """Call a function whose arrays stay abstract: no device is looked for."""
    import jax  # here: most configs name no factory

    results: list[str] = []
    jax.eval_shape(lambda: results.append(function()))
    return results[0]
