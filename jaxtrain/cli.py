"""`jaxtrain COMMAND …`: how a command is found and run. `jaxtrain.commands` has the table.

Nothing of a command is imported before it is named, so that `jaxtrain --help` takes as long as
Python's start.
"""

import argparse
import contextlib
import importlib
import io
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jaxtrain
from jaxtrain import commands
from jaxtrain.commands import arguments
from jaxtrain.workload import Command
from loaders.io import checks, machine

FLAGS = ("--help", "--version", "--workload", "--errors")


def start() -> int:
    """Run the installed command. It finds modules in the current folder too, but last.

    Only commands that import modules by the user's words do so, as folders may be a stranger's.
    """
    flags = {argument.partition("=")[0] for argument in sys.argv[1:]}
    naming_modules = {"--workload"}
    for command in commands.table().values():
        naming_modules.update(command.own_code)
    if flags & naming_modules or any(flag.startswith("--config") for flag in flags):
        sys.path.append(os.getcwd())
    return process(main)


def process(run: Callable[[], int]) -> int:
    """Return the exit code of ``run()``.

    If a program is still being compiled, the process ends here: the interpreter would wait for it,
    for minutes on some chips.
    """
    try:
        code = run()
    except Exception:
        if not _is_compiling():
            raise
        traceback.print_exc()
        code = 1
    _exit_at_once_on_signals(code)
    if _is_compiling():
        distributed = sys.modules["jax"].distributed
        if distributed.is_initialized():
            # as at the interpreter's end: the others would take this for a death
            distributed.shutdown()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def _exit_at_once_on_signals(code: int) -> None:
    """Let Ctrl-C end the interpreter's end at once: all is saved and printed by now."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in machine.signal_numbers(["SIGINT", "SIGTERM"]):
        signal.signal(number, lambda *_: os._exit(code))


def _is_compiling() -> bool:
    programs = sys.modules.get("jaxtrain.run.step_compiler")
    return programs is not None and any(
        thread.name.startswith(programs.THREAD) for thread in threading.enumerate()
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names. Return its exit code."""
    with _plain_output():
        try:
            code = _named(list(sys.argv[1:] if argv is None else argv))
        # also if a parser ends it: the reader of a pipe may be gone by the time of this write
        finally:
            unwritten = arguments.run(_flush)
        return code or unwritten


def _named(argv: list[str]) -> int:
    """Run the named command, and write its errors into the file of --errors."""
    path = _pop(argv, "--errors")
    if path is None:
        return _found(argv)
    try:
        if path != "-":
            arguments.errors_file(path)
    except argparse.ArgumentTypeError as error:
        arguments.report(f"--errors: {error}")
        return arguments.USER_ERROR
    with arguments.noting_errors() as lines:
        code = _found(argv)
    unwritten = arguments.run(lambda: arguments.write_errors(path, lines))
    return code or unwritten


def _found(argv: list[str]) -> int:
    workload = _pop(argv, "--workload")
    if workload == "":
        arguments.report("--workload names no module; expected --workload MODULE")
        return arguments.USER_ERROR
    try:
        table = commands.table(workload) if workload else commands.table()
    except (checks.UserError, ImportError) as error:
        arguments.report(f"--workload {workload}: {error}" if workload else error)
        return arguments.USER_ERROR
    if not argv or argv in (["-h"], ["--help"], ["help"]):
        return arguments.run(lambda: _say(listing(table)))
    if argv[0] == "--version":
        return arguments.run(lambda: _say(f"jaxtrain {jaxtrain.__version__}{_commit()}"))
    # These flags without a command mean `jaxtrain train`.
    flag = argv[0].partition("=")[0]
    if flag in ("--explain", "--plan", "--plan-setup") or flag.startswith("--config"):
        argv.insert(0, "train")
    is_help_command = argv[0] == "help"
    if argv[0] in ("-h", "--help", "help"):
        argv = [argv[1], "--help"]
    command = table.get(argv[0])
    if command:
        if workload and command.takes_workload:
            argv += ["--workload", workload]
        return _run(command, argv, workload or "")
    if arguments.asks_for_help(argv) and not is_help_command:
        return arguments.run(lambda: _say(listing(table)))
    names = [*table, *FLAGS]
    kind = "flag" if argv[0].startswith("-") else "command"
    remedy = checks.nearest(argv[0], names) or f"; {checks.expected(argv[0], names)}"
    hint = "" if workload else "; a command of your own workload needs --workload MODULE"
    arguments.report(f"{kind} {argv[0]!r} is unknown{remedy}; see jaxtrain --help{hint}")
    return arguments.USER_ERROR


def _pop(argv: list[str], flag: str) -> str | None:
    """Take a flag and its value out of ``argv``. Return the value, "" if it is missing, or None."""
    for i, argument in enumerate(argv):
        name, _, value = argument.partition("=")
        if name == flag:
            del argv[i]
            if not value and i < len(argv):
                value = argv.pop(i)
            return value
    return None


def _run(command: Command, argv: Sequence[str], workload: str) -> int:
    try:
        if not arguments.asks_for_help(argv):
            from jaxtrain.commands import installation

            problem = installation.problem(argv, caches=command.caches)
            if problem:
                arguments.report(problem)
                return arguments.USER_ERROR
        problem = "has no function main"
        main: Callable[[Sequence[str]], int] | None = None
        try:
            main = getattr(importlib.import_module(command.module), "main", None)
        except ModuleNotFoundError as error:
            if not f"{command.module}.".startswith(f"{error.name}."):
                raise  # a module that the command imports
            problem = "does not exist"
        if main is None:
            arguments.report(
                f"the command {argv[0]!r} of {workload or 'jaxtrain'} is the module"
                f" {command.module!r}, which {problem}; correct it in WORKLOAD"
            )
            return arguments.USER_ERROR
        return main(argv[1:])
    except KeyboardInterrupt:  # imports may take a second
        arguments.report("interrupted")
        return arguments.INTERRUPTED
    except ValueError as error:
        if not _is_of_jax_options(error):
            raise
        arguments.report(
            f"JAX does not know a value of its environment: {error}; correct that variable, or"
            " unset it"
        )
        return arguments.USER_ERROR


def _is_of_jax_options(error: ValueError) -> bool:
    """Whether JAX raised an error as it was imported, for a variable that it cannot read."""
    last_frame = traceback.extract_tb(error.__traceback__)[-1]
    is_of_jax = pathlib.Path(last_frame.filename).parts[-3:] == ("jax", "_src", "config.py")
    return is_of_jax and getattr(sys.modules.get("jax"), "jit", None) is None


def _commit() -> str:
    """Return the commit of a checkout, as " (commit 1a2b3c4)", or nothing for a package."""
    root = pathlib.Path(jaxtrain.__file__).parents[1]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):  # without git
        return ""
    return f" (commit {commit.strip()})"


def _say(text: str) -> int:
    print(text)
    return 0


def _flush() -> int:
    if sys.stdout:
        sys.stdout.flush()
    return 0


@contextlib.contextmanager
def _plain_output() -> Iterator[None]:
    """Escape control characters in the output: a stranger's text must not steer the terminal."""
    from jaxtrain.telemetry import console

    stdout, stderr = sys.stdout, sys.stderr
    if isinstance(sys.stdout, io.TextIOWrapper):
        # as stderr: a character that it lacks ends no command
        sys.stdout.reconfigure(errors="backslashreplace")
    plain: Any = console.Plain
    # None: it was closed before we began
    sys.stdout = stdout and plain(stdout)
    sys.stderr = stderr and plain(stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr


def listing(table: Mapping[str, Command]) -> str:
    """Return the commands by their groups, with a line each, and the exit codes."""
    lines = [
        "usage: jaxtrain [--workload MODULE] [--errors FILE] COMMAND [ARGUMENT …]",
        "       jaxtrain COMMAND --help",
        "",
        "--errors FILE lists every error of a command, of which it prints the first; - prints all",
    ]
    width = max(map(len, table))
    for group in dict.fromkeys(command.group for command in table.values()):
        lines += ["", f"{group}:"]
        for name, command in table.items():
            if command.group == group:
                lines.append(f"  {name:{width}}  {command.summary}")
    lines += ["", "exit codes:"]
    _, _, codes = (arguments.__doc__ or "").partition("Exit codes:\n\n")
    for line in codes.rstrip().splitlines():
        lines.append(line.removeprefix("  "))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(process(main))
