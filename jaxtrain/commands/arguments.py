"""The shared parts of all commands: the parser, RUN, the config's arguments, reports of errors.

A command is a module with a docstring, which its --help prints, and ``main(argv) -> exit code``. It
imports slow modules (jax, and all that imports it) after its arguments are parsed.

Exit codes:

    0     done
    1     done, and it found a problem: a plan that does not fit, a damaged checkpoint
    2     an error to fix, reported in a line on stderr
    70    ended by its watchdog (config.distributed.step_timeout); rerun the same command
    75    saved after a signal; rerun the same command to resume      (config.preemption.exit_code)
    130   interrupted; a run is saved, and the same command resumes it
    128+N a second signal, number N, ended it before it saved; rerun the same command to resume
"""

import argparse
import contextlib
import contextvars
import errno
import functools
import math
import os
import pathlib
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, ParamSpec

from loaders.io import checks, machine

# A path that a user named is in the way, or is missing.
PATHS = (FileExistsError, FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
# of those for which Python has no class
NUMBERS = (errno.EBUSY, errno.EFBIG, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS)
INTERRUPTED = 130
HELP = {"-h", "--help"}
USER_ERROR = 2
# Endings of files that commands write, and an earlier one of which a later one may replace.
WRITTEN = {".csv", ".html", ".npz", ".parquet", ".txt", ".nii", ".gz"}
# Files of folders that commands read, with such an ending.
RECORDS = {"detections.csv", "errors.csv", "rows.parquet", "training_sources.csv"}
ERRORS_HEAD = "# errors of jaxtrain: "  # begins a file of --errors, which a later call may replace
P = ParamSpec("P")
# The errors that the running command has noted; None: nobody asked for them.
_errors: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("errors", default=None)
CONFIG_USAGE = "jaxtrain {} --config=FILE[:ARGUMENT] [--config.section.field=value …]"


class Parser(argparse.ArgumentParser):
    """A parser whose --help prints a docstring. An error has the nearest spelling."""

    def __init__(self, prog: str, description: str | None = None, **options: Any):
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **options,
        )

    # typeshed's also returns a namespace of the caller's own type
    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        args = sys.argv[1:] if args is None else args
        # of its actions (`jaxtrain checkpoint verify`)
        subparsers: dict[str, argparse.ArgumentParser] = {}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                subparsers |= action.choices
        parser = next((subparsers[name] for name in subparsers if name in args), self)
        if asks_for_help(args):
            parser.print_help()
            self.exit()
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            remedy = "omit it"
            if flag.startswith("-"):
                options: list[str] = []
                for action in parser._actions:
                    options += action.option_strings
                remedy = checks.expected(flag, (name for name in options if name.startswith("--")))
            parser.error(f"argument {unknown[0]!r} is unknown; {remedy}")
        for message in _replaced_inputs(parser, parsed):
            parser.error(message)
        return parsed

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """argparse's, whose sentence names no nearest spelling."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(
                action, f"{value!r} is unknown; {checks.expected(value, action.choices)}"
            )

    def error(self, message: str) -> NoReturn:
        report(f"{message}; see {self.prog} --help")
        sys.exit(USER_ERROR)


def add_run(
    parser: argparse.ArgumentParser,
    *,
    ema: bool = False,
    nargs: int | str | None = None,
    default: str = "the best by checkpoint.best if the run has it, else the newest",
) -> None:
    """Add RUN and --step (and --ema), which `jaxtrain.arrays.source.find_best` takes.

    ``default``: the step without --step, in words.
    """
    text = "a run's workdir, a step directory of it, or a folder of `jaxtrain export`"
    parser.add_argument("run", metavar="RUN", nargs=nargs, help=text)
    parser.add_argument("--step", type=int, help=f"step of a workdir; default: {default}")
    if ema:
        parser.add_argument(
            "--ema",
            action="store_true",
            help="the average of the parameters, which evaluation uses",
        )


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Add --workload, which `jaxtrain.arrays.run_workload` takes."""
    text = "import the run's own workload, if you trust its code; default: jaxtrain's"
    parser.add_argument("--workload", default="", metavar="MODULE", help=text)


def add_base(parser: argparse.ArgumentParser) -> None:
    """Add --base, which `jaxtrain.arrays.run_workload.with_base` takes."""
    text = "the weights that a run with adapters froze; default: where it has them from"
    parser.add_argument("--base", default="", metavar="SOURCE", help=text)


def out_file(text: str, *, folder: bool = False) -> Any:
    """Parse the name of a file to write, which is refused before any work for it is done."""
    from loaders.io import atomic_write, files

    if "://" in text:
        return text
    try:
        atomic_write.refuse_unwritable(text, folder=folder)
    except files.FileError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    except (OSError, ValueError) as error:
        path = getattr(error, "filename", text)
        reason = getattr(error, "strerror", error)
        raise argparse.ArgumentTypeError(
            f"{path}: {reason}; name another path, or change its permissions"
        ) from error
    return pathlib.Path(text)


def errors_file(text: str) -> Any:
    """Parse FILE of --errors, where nothing but the list of an earlier call is replaced."""
    path = out_file(text)
    try:
        with open(path, "rb") as file:
            begin = file.read(len(ERRORS_HEAD))
    except FileNotFoundError:
        return path
    if begin and begin != ERRORS_HEAD.encode():
        raise argparse.ArgumentTypeError(
            f"{text} is there already, and no list of errors; name another file"
        )
    return path


def _replaced_inputs(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> Iterator[str]:
    """Yield an error for each file that would be written in the place of another argument's."""
    values = vars(parsed)
    for action in parser._actions:
        out = values.get(action.dest)
        if action.type is not out_file or not isinstance(out, pathlib.Path) or not out.exists():
            continue
        for name, value in values.items():
            others = value if isinstance(value, list | tuple) else [value]
            if name != action.dest and any(_is_input(out, other) for other in others):
                yield f"{_option(action)} is {out}, which the command reads; name another file"


def _option(action: argparse.Action) -> str:
    return action.option_strings[0] if action.option_strings else str(action.metavar or action.dest)


def _is_input(out: pathlib.Path, other: object) -> bool:
    """Whether a file is another argument, or in a folder that is one, and no earlier output."""
    if not isinstance(other, str | pathlib.Path) or not str(other):
        return False
    try:
        if out.samefile(other):
            return True
        folder = pathlib.Path(other).resolve(strict=True)
    except (OSError, ValueError):  # no file, as most texts
        return False
    may_be_replaced = out.suffix.lower() in WRITTEN and out.name not in RECORDS
    return folder in out.resolve().parents and not may_be_replaced


def out_folder(text: str) -> Any:
    """Parse the name of a folder to make, as `out_file`. It is no run's, nor in its checkpoints."""
    path = out_file(text, folder=True)
    if not isinstance(path, pathlib.Path):
        return path
    place = path.resolve()
    for above in (place, *place.parents):
        is_workdir = (above / "config.json").exists() and (above / "metrics.jsonl").exists()
        if is_workdir and (above == place or above / "checkpoints" in (place, *place.parents)):
            raise argparse.ArgumentTypeError(
                f"{text} is in the workdir of a run, {above}; name another folder"
            )
    return path


def split_config(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split ``argv`` into --config… with their values (`config.parse_args`), and the rest."""
    config_arguments, others = [], []
    remaining = iter(argv)
    for argument in remaining:
        flag, equals, _ = argument.partition("=")
        if flag != "--config" and not flag.startswith("--config."):
            others.append(argument)
            continue
        config_arguments.append(argument)
        if equals:
            continue
        value = next(remaining, None)
        if value in HELP:
            others.append(value)
        elif value is not None:
            config_arguments.append(value)
    return config_arguments, others


def missing(package: str, remedy: str) -> str:
    """Return the error for a missing package, with ``remedy``, or "". Nothing is imported."""
    if machine.has_package(package):
        return ""
    return f"the package {package} is missing; {remedy}"


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether -h or --help is anywhere on a command line, also after an error."""
    return bool(HELP & set(argv))


def integer(text: str, low: int, high: float, expected: str) -> int:
    """Parse an integer from ``low`` to ``high``. ``expected``: the bounds in words, for errors."""
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r}; it must be an integer {expected}")
    return value


# Types of arguments: a number that counts something, and a seed, which has 32 bits.
positive = functools.partial(integer, low=1, high=math.inf, expected="of at least 1")
seed = functools.partial(integer, low=0, high=(1 << 32) - 1, expected=f"from 0 to {(1 << 32) - 1}")


@contextlib.contextmanager
def exiting(names: Sequence[str], code: int) -> Iterator[None]:
    """End the process with ``code`` if one of these signals comes: it has nothing to save yet."""
    if threading.current_thread() is not threading.main_thread():  # which alone can handle signals
        yield
        return
    previous = {}
    for number in machine.signal_numbers(names):
        previous[number] = signal.signal(number, lambda *_: os._exit(code))
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None = a handler that was not set from Python
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def report(text: object) -> None:
    """Print an error on stderr, and note the errors that it stands for."""
    print(f"error: {text}", file=sys.stderr)
    if isinstance(text, checks.UserError):
        noted = _errors.get()
        list_errors(text.listed if text.listed or noted else [str(text)])


def list_errors(lines: Iterable[str]) -> None:
    """Note errors of the data for --errors FILE."""
    noted = _errors.get()
    if noted is not None:
        noted.extend(lines)


@contextlib.contextmanager
def noting_errors() -> Iterator[list[str]]:
    """Yield the list of the errors that a command notes in this context."""
    lines: list[str] = []
    token = _errors.set(lines)
    try:
        yield lines
    finally:
        _errors.reset(token)


@contextlib.contextmanager
def errors_of_process() -> Iterator[list[str]]:
    """Yield arguments of a process whose errors are noted here, once it has ended."""
    noted = _errors.get()
    if noted is None:
        yield []
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "errors")
        yield [f"--errors={path}"]
        with contextlib.suppress(FileNotFoundError):  # it was killed
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            noted.extend(text.rstrip("\n").split("\n")[1:])


def write_errors(path: str, lines: Sequence[str]) -> int:
    """Write noted errors into a file, after a head, or to stdout for "-", a line each. Return 0."""
    from loaders.io import atomic_write

    text = "".join(line.replace("\n", "\\n") + "\n" for line in lines)
    if path == "-":
        print(text, end="")
    else:
        try:
            place = pathlib.Path(errors_file(path))  # a file that the command itself has written
        except argparse.ArgumentTypeError as error:
            report(f"--errors: {error}")
            return USER_ERROR
        place.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write.file(place) as file:
            head = f"{ERRORS_HEAD}{len(lines)}\n"
            file.write((head + text).encode(errors="backslashreplace"))
    return 0


def run(action: Callable[[], int], *, errors: tuple[type[Exception], ...] = ()) -> int:
    """Call ``action`` and return its exit code.

    Report a UserError, one of ``errors``, an error of a file, and an interruption in one line.
    """
    try:
        return action()
    except BrokenPipeError:
        # The reader of our output is gone. Python flushes stdout at its end, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        report("interrupted")
        return INTERRUPTED
    except MemoryError as error:  # before anything is imported
        text = f": {error}" if str(error) else ""
        report(f"there is not enough memory{text}; give this process more, or it less to do")
        return USER_ERROR
    except Exception as error:
        from loaders.io import atomic_write

        is_expected = isinstance(error, (checks.UserError, *errors))
        path = getattr(error, "filename", None)
        if atomic_write.is_full(error) and (isinstance(error, OSError) or not is_expected):
            why = os.strerror(errno.ENOSPC)
            report(
                f"{path or 'a file'} could not be written: {why}; free some space, then rerun the"
                " command"
            )
        elif is_expected:
            report(error)
        elif (
            isinstance(error, OSError)
            and path is not None
            and (isinstance(error, PATHS) or error.errno in NUMBERS)
        ):
            report(f"{path}: {error.strerror}; name another path, or change its permissions")
        else:
            raise
        return USER_ERROR


def reported(command: Callable[P, int]) -> Callable[P, int]:
    """Decorate a function that returns an exit code, to report errors as `run` does."""

    @functools.wraps(command)
    def reporting(*args: P.args, **kwargs: P.kwargs) -> int:
        return run(functools.partial(command, *args, **kwargs))

    return reporting
