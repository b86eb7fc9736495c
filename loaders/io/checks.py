"""Sections of a config that name their own errors, and sentences about wrong values.

These are about numbers out of range and unknown names. Each function yields (field, text) for every
field that is wrong, and nothing when all is well:

    def validate(self):
        yield from checks.at_least(self, 1, "steps", "batch")
        yield from checks.choice(self, SCHEDULES, "schedule")
        for i, source in enumerate(self.sources):
            yield from checks.under(f"sources[{i}]", checks.positive(source, "share"))

The text continues the field's path: "train.steps is 0; it must be at least 1".
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

MAX_THREADS = 1024
Problems = Iterator[tuple[str, str]]
# The kinds of a field, by what it changes in a run that is resumed.
FREE, FUNCTION, STATE = "free", "function", "state"


class UserError(Exception):
    """An error that a user can fix. Its message says how, and a command prints it alone.

    ``listed``: every error, a line each, if the message names the first ones alone. A command
    writes them into the file of --errors.

    Attributes:
      is_of_disk: whether a disk was full, which may pass.
    """

    is_of_disk = False

    def __init__(self, *args: object, listed: Sequence[str] = ()):
        super().__init__(*args)
        self.listed = tuple(listed)


class FatalError(UserError):
    """An error after which no supervisor may start the run again (`jaxtrain.supervise`)."""


class Message(str):
    """The message of an error, with the lines that the error lists."""

    def __new__(cls, error: Exception) -> "Message":
        message = super().__new__(cls, error)
        message.listed = tuple(getattr(error, "listed", ()))
        return message

    listed: tuple[str, ...]


def more(n: int) -> str:
    """Return the end of a message about ``n`` errors of which it names the first, or ""."""
    return f" ({n - 1:,} more: --errors FILE lists them all)" if n > 1 else ""


class OnResume(NamedTuple):
    """The kind of each field that a section's class body defines, for `jaxtrain.config.changes`.

    A field in none of the lists has ``default``, as a nested dataclass without a declaration has
    the kind of its field.
    """

    default: str = FUNCTION
    free: tuple[str, ...] = ()  # may change when a run is resumed. A change is reported
    # the trained function, so that a change must be allowed by config.resume.allow
    function: tuple[str, ...] = ()
    state: tuple[str, ...] = ()  # shapes, or the arrays that are saved
    files: tuple[str, ...] = ()  # function: paths of files that are compared by their content

    def kind(self, name: str) -> str:
        if name in self.free:
            return FREE
        if name in self.function or name in self.files:
            return FUNCTION
        return STATE if name in self.state else self.default


# Here, since the ``Config`` of a loader is a section, and a loader imports nothing of jaxtrain.
class Section:
    """A part of a config: the base class of its frozen dataclasses.

    ``on_resume``: the kinds of the fields. Undeclared ones change the function.
    """

    on_resume: ClassVar[OnResume] = OnResume()

    def validate(self) -> Problems:
        """Yield (field, problem with its remedy) for each error in the values, without data."""
        return iter(())


def declared(cls: type, name: str) -> OnResume | None:
    """Return the declaration of the class whose body defines a field, or None."""
    bases = (base for base in cls.__mro__ if name in inspect.get_annotations(base))
    declaring = next(bases, cls)
    return vars(declaring).get("on_resume")


class DataSection(Section):
    """The section ``data``: the base of a loader's ``Config``, which may have ``threads``."""

    threads = 0  # [threads] that read; 0 = one for each core this process may use

    def exists(self) -> bool:
        """Whether the data are there, so that reading the dataset info does not make them."""
        return True

    def settled(self, order: Mapping[str, Any] | None) -> Self:
        """Return the section with values for the fields that it leaves to the data, if any.

        ``order``: that of the run's newest checkpoint, whose values are kept, or None.
        """
        return self

    def missing(self) -> str:
        """Return why no row can be read before a first run makes or copies the data, or ""."""
        if self.exists():
            return ""
        return "the data are not here yet; the first run makes or copies them"


def at_least(section: Any, low: float, *names: str) -> Problems:
    """Fields of ``section`` whose value is below ``low``, or not a number."""
    yield from _numbers(section, names, lambda value: value >= low, f"it must be at least {low}")


def not_negative(section: Any, *names: str) -> Problems:
    """Fields of ``section`` whose value is below 0, or not a number."""
    yield from _numbers(section, names, lambda value: value >= 0, "it must not be negative")


def positive(section: Any, *names: str) -> Problems:
    """Fields of ``section`` whose value is 0, negative, infinite or not a number."""
    infinity = float("inf")
    rule = "it must be a positive number"
    yield from _numbers(section, names, lambda value: 0 < value < infinity, rule)


def within(section: Any, interval: str, *names: str) -> Problems:
    """Fields of ``section`` outside ``interval``, written as in the message: "[0, 1)"."""
    low, high = (float(bound) for bound in interval[1:-1].split(","))
    has_low = interval[0] == "["
    has_high = interval[-1] == "]"

    def is_inside(value: float) -> bool:
        if value == low:
            return has_low
        if value == high:
            return has_high
        return low < value < high

    yield from _numbers(section, names, is_inside, f"it must lie in {interval}")


def threads(section: Any, *, least: int) -> Problems:
    """Yield ``threads`` of ``section`` if it is below ``least``, or above `MAX_THREADS`."""
    rule = f"expected {least} to {MAX_THREADS}"
    yield from _numbers(section, ["threads"], lambda n: least <= n <= MAX_THREADS, rule)


def choice(section: Any, allowed: Iterable[Any], *names: str) -> Problems:
    """Fields of ``section`` whose value is none of ``allowed``."""
    values = list(allowed)
    for name in names:
        value = getattr(section, name)
        if value not in values:
            yield name, f"is {value!r}; {expected(value, values)}"


def under(path: str, problems: Iterable[tuple[str, str]]) -> Problems:
    """Yield problems with ``path`` before each field: "sources[0].share" of "share"."""
    for name, text in problems:
        yield f"{path}.{name}", text


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested sections as ``section.field``: value."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def first_line(error: BaseException, most: int = 300) -> str:
    """Return the first line of an error's message, ``most`` characters, or its type if empty."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    return line[:most]


def expected(value: Any, allowed: Iterable[Any]) -> str:
    """Return allowed values and the nearest: "expected one of: a, bc; did you mean 'bc'?"."""
    names = [str(name) for name in allowed]
    return f"expected one of: {', '.join(names)}{nearest(value, names)}"


def nearest(value: Any, names: Sequence[str]) -> str:
    """Return a sentence's end with the nearest of ``names``: "; did you mean 'bc'?", or ""."""
    close_names = difflib.get_close_matches(str(value), names, n=1, cutoff=0.5)
    return f"; did you mean {close_names[0]!r}?" if close_names else ""


def _numbers(
    section: Any, names: Iterable[str], is_right: Callable[[Any], bool], rule: str
) -> Problems:
    for name in names:
        value = getattr(section, name)
        if not is_right(value):
            yield name, f"is {value}; {rule}"
