"""Factories that a config names as ``module:function``: of an optimizer, or of a schedule.

A factory is called with the config's arguments for it, and with each value of the run that it has a
parameter for. Its signature and a call under `jax.eval_shape` find errors before a device is used.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from loaders.io import checks
from loaders.io.checks import Problems


class FactoryError(ValueError):
    """A name of no function. The message continues the path of the field: "is 'optax:x', and …"."""


def is_factory(name: str) -> bool:
    """Whether a name is that of a factory, and not of a built-in rule or schedule."""
    return ":" in name


def find(name: str) -> Callable[..., Any]:
    """Import the function of ``module:function``. Raises FactoryError."""
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the module may raise anything while it is executed
        raise FactoryError(f"is {name!r}, and importing {module_name!r} failed: {first_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))]
        near = checks.nearest(function_name, names)
        raise FactoryError(f"is {name!r}, and {module_name} has no function {function_name!r}{near}")
    return function


def takes(name: str, parameter: str) -> bool:
    """Whether the factory ``name`` has a parameter of this name. Raises FactoryError."""
    return parameter in inspect.signature(find(name)).parameters


def call(name: str, arguments: Mapping[str, Any], **given: Any) -> Any:
    """Call the factory with ``arguments`` and the values of ``given`` that it takes."""
    taken = {parameter: value for parameter, value in given.items() if takes(name, parameter)}
    return find(name)(**taken, **{key: _frozen(value) for key, value in arguments.items()})


def problems(name: str, arguments: Mapping[str, Any], *, field: str, check: Callable[[Any], str], **given: Any) -> Problems:
    """Yield the errors of the factory that ``field`` names, and of its arguments.

    ``check`` returns the problem of the result, or "". ``given``: as in `call`.
    """
    where = "arguments" if field == "name" else f"{field}_arguments"
    try:
        parameters = inspect.signature(find(name)).parameters
    except ValueError as error:  # FactoryError, or a function of C without a signature
        yield field, str(error) if isinstance(error, FactoryError) else f"is {name!r}, whose parameters are not known"
        return
    allowed = [p for p, kind in parameters.items() if kind.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)]
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())
    wrong = False
    for key, value in arguments.items():
        default = parameters[key].default if key in allowed else None
        kind = type(value).__name__
        if key in given:
            text = f"is {value!r}, which the other fields of optim decide; leave it out"
        elif key not in allowed and not takes_any:
            text = f"is no parameter of {name}; {checks.expected(key, [p for p in allowed if p not in given])}"
        elif not _is_plain(value):
            text = f"is {value!r} ({kind}); expected numbers, strings, None, and tuples or dictionaries of them"
        elif isinstance(default, bool) and not isinstance(value, bool):
            text = f"is {value!r} ({kind}); {name} expects True or False"
        elif type(default) in (int, float) and value is not None and type(value) not in (int, float):
            text = f"is {value!r} ({kind}); {name} expects a number"
        else:
            continue
        wrong = True
        yield f"{where}.{key}", text
    needs = [p for p in allowed if parameters[p].default is inspect.Parameter.empty and p not in (*arguments, *given)]
    if needs:
        yield where, f"lacks {', '.join(map(repr, needs))}, which {name} needs"
    if wrong or needs:
        return
    import jax  # here: most configs name no factory

    found: list[str] = []
    try:
        jax.eval_shape(lambda: found.append(check(call(name, arguments, **given))))
    except Exception as error:
        yield where, f"is {dict(arguments)!r}, and {name} failed: {first_line(error)}"
    else:
        if found[0]:
            yield field, f"is {name!r}, which {found[0]}"


def of_optimizer(found: Any) -> str:
    """Describe the problem with an optimizer factory's result, as the ``check`` of `problems`."""
    if all(callable(getattr(found, name, None)) for name in ("init", "update")):
        return ""
    return f"returned a {type(found).__name__}; expected an optax.GradientTransformation"


def of_schedule(found: Any) -> str:
    """Describe the problem with a schedule factory's result, as the ``check`` of `problems`."""
    import jax  # here: most configs name no factory

    if not callable(found):
        return f"returned a {type(found).__name__}; expected a function from the step to the learning rate"
    rate = jax.eval_shape(found, jax.ShapeDtypeStruct((), "int32"))
    shape = getattr(rate, "shape", None)
    return "" if shape == () else f"gives {rate} at a step; expected a number, the learning rate"


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(x) for key, x in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def _frozen(value: Any) -> Any:
    """Make tuples of lists, which config.json has for both."""
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
