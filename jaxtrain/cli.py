"""`jaxtrain COMMAND …`: the table of commands, and how one of them is found.

Nothing of a command is imported before it is named, so that `jaxtrain --help` takes as long as Python's start.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

from jaxtrain.commands import arguments
from loaders import checks


class Command(NamedTuple):
    """A line of the table. ``main`` of jaxtrain.commands.<name, with underscores> runs it."""

    name: str
    group: str
    summary: str

    @property
    def module(self) -> str:
        return f"jaxtrain.commands.{self.name.replace('-', '_')}"


COMMANDS = (
    Command("train", "train", "train a config, or resume its run"),
    Command("plan", "look ahead", "memory, time and problems of a run on any devices, before it starts"),
    Command("explain", "look ahead", "every field of a config: value, unit, meaning"),
    Command("tokens", "data", "make token files of text, JSONL, Parquet or Arrow"),
    Command("sudoku", "data", "generate puzzles with one solution"),
    Command("prepare-giblet", "data", "make a dataset of a film and the brains of its viewers"),
    Command("train-codec", "data", "learn an audio codec from recordings"),
    Command("encode-audio", "data", "encode a manifest's recordings ahead of training"),
    Command("export", "weights", "convert a checkpoint to safetensors for Hugging Face, and back"),
    Command("lora-to-peft", "weights", "write the adapters of a run in peft's format"),
    Command("checkpoint", "weights", "inspect, verify, compare and strip checkpoints"),
    Command("embed", "look back", "embed any dataset with a trained encoder"),
    Command("probe", "look back", "measure how good embeddings are: linear probe, k-NN, few shot"),
    Command("generate-audio", "look back", "answer prompts with sound, by an audio language model"),
    Command("launch", "clusters", "submit a run or a sweep to SLURM, and watch it"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names. Returns its exit code (`jaxtrain.commands.arguments`)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(listing())
        return 0
    if argv[0] == "--version":
        from importlib import metadata

        print(f"jaxtrain {metadata.version('jaxtrain')}")
        return 0
    # What `jaxtrain` alone did before it had commands.
    if argv[0].partition("=")[0] in ("--explain", "--plan", "--plan-setup") or argv[0].startswith("--config"):
        argv.insert(0, "train")
    for command in COMMANDS:
        if command.name == argv[0]:
            try:
                return importlib.import_module(command.module).main(argv[1:])
            except KeyboardInterrupt:  # while it imports what takes a second
                arguments.report("interrupted")
                return arguments.INTERRUPTED
    remedy = checks.expected(argv[0], (command.name for command in COMMANDS))
    arguments.report(f"command {argv[0]!r} is unknown; {remedy}; see jaxtrain --help")
    return arguments.MISTAKE


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
    sys.exit(main())
