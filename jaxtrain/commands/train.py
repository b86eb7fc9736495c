"""Trains a config, or resumes its run from the newest checkpoint in its workdir.

    jaxtrain train --config=xcm[:/path/to/data] [--config.section.field=value …]

    jaxtrain train --config=xcm --config.train.batch=64 --config.optim.lr=3e-4
    jaxtrain train --config=xcm --explain  every field: value, unit, meaning  (jaxtrain explain)
    jaxtrain train --config=xcm --plan=gpu:h100x8  memory and time on any devices  (jaxtrain plan)

`python -m jaxtrain.main` is the same command. All errors of a config are reported at once, before
any device is used. A run that a signal ends is saved and exits with 75: rerun the same command to
resume.
"""

import errno
import logging
import pathlib
import shlex
import sys
from collections.abc import Sequence

from jaxtrain import config, workload
from jaxtrain.commands import arguments, explain, plan
from loaders.io import machine
from loaders.io.checks import UserError, first_line


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = arguments.Parser(
        "jaxtrain train", __doc__, usage=arguments.CONFIG_USAGE.format("train")
    )
    parser.add_argument(
        "--explain", action="store_true", help="print every field of the config, and train nothing"
    )
    parser.add_argument(
        "--plan",
        metavar="TARGET",
        nargs="?",
        help="plan the run for these devices, and train nothing",
    )
    parser.add_argument(
        "--plan-setup",
        metavar="KIND",
        help="fetch the compiler for plans of gpu or tpu, and train nothing",
    )
    if arguments.asks_for_help(argv):
        parser.print_help()
        return 0
    try:
        given = config.parse_args(argv)
    except config.ConfigError as error:
        arguments.report(error)
        return arguments.USER_ERROR
    if given.plan_setup:
        return plan.set_up(given.plan_setup)
    if given.explain:
        return explain.show(given)
    return _train(given) if given.plan is None else plan.show(given)


def last_lines(given: config.Arguments, run: config.Config) -> str:
    """Return the files of a run that has ended, and the commands that may follow."""
    from jaxtrain.telemetry import writers

    folder, workdir = run.workdir.rstrip("/"), shlex.quote(run.workdir)
    out, page = shlex.quote(f"{folder}-weights"), shlex.quote(f"{folder}/report.html")
    longer = [(path, text) for path, text in given.overrides if path != "train.steps"]
    longer.append(("train.steps", str(2 * run.train.steps)))
    words = [f"--config={given.source}", *(f"--config.{path}={text}" for path, text in longer)]
    again = " ".join(["jaxtrain train", *map(_quoted, words)])
    commands = [(f"jaxtrain report {workdir} --out {page}", "for its curves in a browser")]
    if run.checkpoint.final != "weights":
        commands.append((again, "to train for longer"))
    commands.append((f"jaxtrain export {workdir} --out {out}", "for safetensors and a model card"))
    if run.lora.rank:
        commands.append(
            (f"jaxtrain lora-to-peft {workdir} --out {out}-adapters", "for the adapters alone")
        )
    for command, why in workload.of(run.workload).next_steps:
        commands.append(
            (" ".join(shlex.quote(word.format(run=folder)) for word in command.split()), why)
        )
    commands.append(
        (f"jaxtrain checkpoint inspect {workdir}", "to see the contents of a checkpoint")
    )
    if run.workload not in workload.shipped():
        place = pathlib.Path(given.source.partition(":")[0]).parent.absolute()  # of the config
        file = pathlib.Path(str(sys.modules[run.workload].__file__))
        is_near = place != pathlib.Path.cwd() and file.is_relative_to(place)
        path = f"PYTHONPATH={shlex.quote(str(place))}:$PYTHONPATH " if is_near else ""
        own = f"{path}jaxtrain --workload {run.workload}"
        commands = [
            (x if x is again else x.replace("jaxtrain", own, 1), why) for x, why in commands
        ]
    files = [f"  {about}: {path}" for path, about in writers.left_behind(run)]
    return "\n".join(
        [
            "the run has ended; it left",
            *files,
            "next",
            *(f"  {why}: {text}" for text, why in commands),
        ]
    )


def _quoted(word: str) -> str:
    """Quote a word for a shell as a person would: single quotes between double ones."""
    return f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word)


def _train(given: config.Arguments) -> int:
    from jaxtrain.parallel import cluster
    from jaxtrain.telemetry import console

    console.start_console()
    cluster.use_compilation_cache()  # before a config's file, which may touch a device
    cluster.use_threads_for_host_devices()
    machine.keep_freed_memory()
    resolved = None
    try:
        resolved = config.load(given.source, given.overrides)
        return _run(given, resolved)
    except UserError as error:
        arguments.report(error)
        return arguments.USER_ERROR
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or resolved is None:
            raise
        where = f"{error.filename or resolved.workdir} could not be written: {error.strerror}"
        arguments.report(f"{where}; free some space, then rerun the same command to resume")
        return arguments.USER_ERROR
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # JAX has no type of its own for it
            raise
        reason = f"a device has too little memory: {first_line(error)}"
        arguments.report(f"{reason}; the same command with --plan names remedies")
        return arguments.USER_ERROR
    except KeyboardInterrupt:
        print("stopped; rerun the same command to resume from the last checkpoint", file=sys.stderr)
        return arguments.INTERRUPTED


def _run(given: config.Arguments, run: config.Config) -> int:
    # Not before the config is known to be right: optimizers and checkpoints take long to import.
    from jaxtrain.run import loop

    try:
        loop.run(run, {"source": given.source, "overrides": dict(given.overrides)})
        logging.getLogger("jaxtrain").info("%s", last_lines(given, run))
    except loop.Preempted as end:
        print(f"{end}; rerun the same command to resume", file=sys.stderr)
        return run.preemption.exit_code
    return 0
