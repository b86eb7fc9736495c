"""`jaxtrain COMMAND …`: the table of commands, and how one of them is found.

Nothing of a command is imported before it is named, so that `jaxtrain --help` takes as long as Python's start.
"""

import contextlib
import importlib
import io
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jaxtrain
from jaxtrain.commands import arguments
from loaders import checks


class Command(NamedTuple):
    """A line of the table. ``main`` of jaxtrain.commands.<name, with underscores> runs it."""

    name: str
    group: str
    summary: str
    caches: bool = False  # whether it keeps compiled programs, or what it makes, in the cache folder

    @property
    def module(self) -> str:
        return f"jaxtrain.commands.{self.name.replace('-', '_')}"


COMMANDS = (
    Command("train", "train", "train a config, or resume its run", caches=True),
    Command("runs", "look on", "list all runs under a folder: state, step, scores, goodput, disk"),
    Command("report", "look on", "one HTML file of a run or of several: curves, time, pictures, samples, configs"),
    Command("watch", "look on", "the same page in a browser, kept current while runs train"),
    Command("profile", "look on", "trace the next steps of a run that trains: where their time goes"),
    Command("metrics", "look on", "the records of runs as one Parquet table"),
    Command("plan", "look ahead", "memory, time and problems of a run on any devices, before it starts", caches=True),
    Command("explain", "look ahead", "every field of a config: value, unit, meaning"),
    Command("index", "data", "index recordings: folders, tables of annotations, hours-long files"),
    Command("tokens", "data", "make token files of text, JSONL, Parquet or Arrow"),
    Command("sudoku", "data", "generate puzzles with one solution"),
    Command("prepare-giblet", "data", "make a dataset of a film and the brains of its viewers"),
    Command("train-codec", "data", "learn an audio codec from recordings"),
    Command("encode-audio", "data", "encode a manifest's recordings ahead of training"),
    Command("export", "weights", "convert a checkpoint to safetensors for Hugging Face, and back"),
    Command("lora-to-peft", "weights", "write the adapters of a run in peft's format"),
    Command("checkpoint", "weights", "inspect, verify, compare and strip checkpoints"),
    Command("detect", "answers", "what is heard when: tables and scores of recordings of any length", caches=True),
    Command("fit", "answers", "a head for new classes, from few examples on embeddings", caches=True),
    Command("search", "answers", "windows of embeddings that sound like a clip, or that a head gives most", caches=True),
    Command("review", "answers", "judge what detect or search found, on a page of this machine"),
    Command("solve", "answers", "solve puzzles with a recursive model: boards, confidence, steps", caches=True),
    Command("predict", "answers", "predict the fMRI of a film, as NIfTI", caches=True),
    Command("generate", "answers", "continue prompts with a language model", caches=True),
    Command("generate-audio", "answers", "answer prompts with sound, by an audio language model", caches=True),
    Command("embed", "look back", "embed any dataset with a trained encoder", caches=True),
    Command("probe", "look back", "measure how good embeddings are: linear probe, k-NN, few shot", caches=True),
    Command("benchmark", "look back", "score a run as BirdSet, ESC-10 or ESC-50 does, from their files", caches=True),
    Command("doctor", "clusters", "look at host, devices, disk, network, software and data before a run"),
    Command("launch", "clusters", "submit a run or a sweep to SLURM, and watch it"),
    Command("completion", "shell", "print a script that completes commands, flags and configs in bash, zsh or fish"),
)


FLAGS = ("--help", "--version")
OWN_CODE = {"--workload", "--codec"}  # arguments that name a module


def start() -> int:
    """The installed command: like `python -m`, it finds modules where the user stands, but after all that is installed.

    That is for commands that import what the user names. The others may be run in a folder of someone else's.
    """
    flags = {argument.partition("=")[0] for argument in sys.argv[1:]}
    if flags & OWN_CODE or any(flag.startswith("--config") for flag in flags):
        sys.path.append(os.getcwd())
    return process(main)


def process(run: Callable[[], int]) -> int:
    """``run()``, whose code the interpreter shall end with.

    Where a program is still being compiled, the process ends here: the interpreter would wait for that, for minutes
    on some chips.
    """
    try:
        code = run()
    except Exception:
        if not _is_compiling():
            raise
        traceback.print_exc()
        code = 1
    if _is_compiling():
        distributed = sys.modules["jax"].distributed
        if distributed.is_initialized():
            distributed.shutdown()  # as at the interpreter's end: the others would take this for a death
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    return code


def _is_compiling() -> bool:
    programs = sys.modules.get("jaxtrain.programs")
    return programs is not None and any(thread.name.startswith(programs.THREAD) for thread in threading.enumerate())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names. Returns its exit code (`jaxtrain.commands.arguments`)."""
    with _plain_output():
        try:
            code = _named(list(sys.argv[1:] if argv is None else argv))
        finally:  # also where a parser ends it: whoever reads our output may have enough of what is only written now
            unwritten = arguments.run(_flush)
        return code or unwritten


def _named(argv: list[str]) -> int:
    if not argv or argv in (["-h"], ["--help"], ["help"]):
        return arguments.run(lambda: _say(listing()))
    if argv[0] == "--version":
        return arguments.run(lambda: _say(f"jaxtrain {jaxtrain.__version__}"))
    # What `jaxtrain` alone did before it had commands.
    if argv[0].partition("=")[0] in ("--explain", "--plan", "--plan-setup") or argv[0].startswith("--config"):
        argv.insert(0, "train")
    asked = argv[0] == "help"
    if argv[0] in ("-h", "--help", "help"):
        argv = [argv[1], "--help"]
    for command in COMMANDS:
        if command.name == argv[0]:
            return _run(command, argv)
    if arguments.asks_for_help(argv) and not asked:
        return arguments.run(lambda: _say(listing()))
    names = [*(command.name for command in COMMANDS), *FLAGS]
    what = "flag" if argv[0].startswith("-") else "command"
    remedy = checks.nearest(argv[0], names) or f"; {checks.expected(argv[0], names)}"
    arguments.report(f"{what} {argv[0]!r} is unknown{remedy}; see jaxtrain --help")
    return arguments.MISTAKE


def _say(text: str) -> int:
    print(text)
    return 0


def _flush() -> int:
    if sys.stdout:
        sys.stdout.flush()
    return 0


def _run(command: Command, argv: Sequence[str]) -> int:
    try:
        if wrong := "" if arguments.asks_for_help(argv) else _unfit(command, argv):
            arguments.report(wrong)
            return arguments.MISTAKE
        return importlib.import_module(command.module).main(argv[1:])
    except KeyboardInterrupt:  # while it imports what takes a second
        arguments.report("interrupted")
        return arguments.INTERRUPTED


@contextlib.contextmanager
def _plain_output() -> Iterator[None]:
    """What a command prints of files from elsewhere does not steer the terminal (`jaxtrain.console.Plain`)."""
    from jaxtrain import console

    before = sys.stdout, sys.stderr
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a character that it lacks ends no command
    plain: Any = console.Plain
    sys.stdout, sys.stderr = (stream and plain(stream) for stream in before)  # None: it was closed before we began
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _unfit(command: Command, argv: Sequence[str]) -> str:
    """Why this installation cannot run a command; empty where it can."""
    from jaxtrain.commands import installation

    return installation.problem(argv, caches=command.caches)


def listing() -> str:
    """The commands by their groups, with a line each, and the exit codes."""
    lines = ["usage: jaxtrain COMMAND [ARGUMENT …]        jaxtrain COMMAND --help"]
    width = max(len(command.name) for command in COMMANDS)
    for group in dict.fromkeys(command.group for command in COMMANDS):
        lines += ["", f"{group}:"]
        lines += [f"  {c.name:{width}}  {c.summary}" for c in COMMANDS if c.group == group]
    _, _, codes = (arguments.__doc__ or "").partition("Exit codes:\n\n")
    return "\n".join([*lines, "", "exit codes:", *(line.removeprefix("  ") for line in codes.rstrip().splitlines())])


if __name__ == "__main__":
    sys.exit(process(main))
