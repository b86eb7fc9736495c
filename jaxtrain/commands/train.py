"""Trains a config, or resumes its run from the newest checkpoint in its workdir.

    jaxtrain train --config=xcm[:/path/to/data] [--config.section.field=value …]

    jaxtrain train --config=xcm --config.train.batch=64 --config.workdir=runs/batch-64
    jaxtrain train --config=xcm --explain  every field: value, unit, meaning  (jaxtrain explain)
    jaxtrain train --config=xcm --supervise  it is started again after faults
    jaxtrain train --config=xcm --plan=gpu:h100x8  memory and time on any devices  (jaxtrain plan)

`python -m jaxtrain.main` is the same command. All errors of a config are reported at once, before
any device is used. A run that a signal ends is saved and exits with 75, after Ctrl-C with 130:
rerun the same command to resume.
"""

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
        "--supervise",
        action="store_true",
        help="start the run's process again when it ends by a fault, in step with other hosts",
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
        parsed = config.parse_args(argv)
    except config.ConfigError as error:
        arguments.report(error)
        return arguments.USER_ERROR
    if parsed.plan_setup:
        return plan.set_up(parsed.plan_setup)
    if parsed.supervise and (parsed.explain or parsed.plan is not None):
        arguments.report("--supervise restarts a run that trains; omit it for --explain and --plan")
        return arguments.USER_ERROR
    if parsed.explain:
        return explain.show(parsed)
    return _train(parsed) if parsed.plan is None else plan.show(parsed)


def last_lines(parsed: config.Arguments, run: config.Config) -> str:
    """Return the files of a run that has ended, and the commands that may follow."""
    from jaxtrain.telemetry import writers

    lines = ["the run has ended; it left"]
    for path, content in writers.left_behind(run):
        lines.append(f"  {content}: {path}")
    lines.append("next")
    next_steps = workload.of(run.workload).next_steps
    jaxtrain = _jaxtrain_with_workload(parsed.source, run)
    folder, workdir = run.workdir.rstrip("/"), shlex.quote(run.workdir)
    out, page = shlex.quote(f"{folder}-weights"), shlex.quote(f"{folder}/report.html")
    lines.append(f"  for its curves in a browser: {jaxtrain} report {workdir} --out {page}")
    if run.checkpoint.final != "weights":
        lines.append(f"  to train for longer: {_train_longer(parsed, run)}")
    lines.append(f"  for safetensors and a model card: {jaxtrain} export {workdir} --out {out}")
    if run.lora.rank:
        command = f"{jaxtrain} lora-to-peft {workdir} --out {out}-adapters"
        lines.append(f"  for the adapters alone: {command}")
    for command, reason in next_steps:
        words = [shlex.quote(word.format(run=folder)) for word in command.split()]
        lines.append(f"  {reason}: {' '.join(words).replace('jaxtrain', jaxtrain, 1)}")
    command = f"{jaxtrain} checkpoint inspect {workdir}"
    lines.append(f"  to see the contents of a checkpoint: {command}")
    return "\n".join(lines)


def _train_longer(parsed: config.Arguments, run: config.Config) -> str:
    """Return the command of the run, with twice as many steps."""
    words = [f"--config={parsed.source}"]
    for path, text in parsed.overrides:
        if path not in ("train.steps", "train.patience", "train.target"):
            words.append(f"--config.{path}={text}")
    if run.train.patience:  # which may have ended it
        words.append("--config.train.patience=0")
    if run.train.target is not None:
        words.append("--config.train.target=None")
    words.append(f"--config.train.steps={2 * run.train.steps}")
    return " ".join(["jaxtrain train", *map(_quoted, words)])


def _jaxtrain_with_workload(source: str, run: config.Config) -> str:
    """Return how `jaxtrain` is called for a run of a user's workload, which it has to find."""
    if run.workload in workload.shipped():
        return "jaxtrain"
    command = f"jaxtrain --workload {run.workload}"
    folder_of_config = pathlib.Path(source.partition(":")[0]).parent.absolute()
    file = pathlib.Path(str(sys.modules[run.workload].__file__))
    if folder_of_config == pathlib.Path.cwd() or not file.is_relative_to(folder_of_config):
        return command
    return f"PYTHONPATH={shlex.quote(str(folder_of_config))}:$PYTHONPATH {command}"


def _quoted(word: str) -> str:
    """Quote a word for a shell as a person would: single quotes between double ones."""
    if "'" in word and not set(word) & set('"$`\\!'):
        return f'"{word}"'
    return shlex.quote(word)


def _train(parsed: config.Arguments) -> int:
    preemption = config.Preemption()
    with arguments.exiting(preemption.signals, preemption.exit_code):  # while modules are imported
        return _start(parsed)


def _start(parsed: config.Arguments) -> int:
    from jaxtrain.parallel import cluster, supervised_attempt
    from jaxtrain.telemetry import console

    console.start_console()
    resolved = None
    try:
        cluster.start_jax()  # before a config's file, which may touch a device
        cluster.use_threads_for_host_devices()
        machine.keep_freed_memory()
        if parsed.supervise:
            cluster.leave_devices()
        resolved = config.load(parsed.source, parsed.overrides)
        if parsed.supervise:
            return _supervise(parsed, resolved)
        with arguments.exiting(resolved.preemption.signals, resolved.preemption.exit_code):
            return _run(parsed, resolved)
    except UserError as error:
        arguments.report(error)
        return supervised_attempt.code_of(error) or arguments.USER_ERROR
    except OSError as error:
        if not supervised_attempt.is_of_disk(error) or resolved is None:
            raise
        where = f"{error.filename or resolved.workdir} could not be written: {error.strerror}"
        arguments.report(f"{where}; free some space, then rerun the same command to resume")
        return supervised_attempt.code_of(error) or arguments.USER_ERROR
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):  # JAX has no type of its own for it
            raise
        reason = f"a device has too little memory: {first_line(error)}"
        arguments.report(f"{reason}; the same command with --plan names remedies")
        return arguments.USER_ERROR
    except KeyboardInterrupt as error:
        reason = str(error) or "ended by Ctrl-C"
        print(f"{reason}; rerun the same command to resume", file=sys.stderr)
        return arguments.INTERRUPTED


def _supervise(parsed: config.Arguments, run: config.Config) -> int:
    from jaxtrain import supervise

    overrides = [f"--config.{path}={text}" for path, text in parsed.overrides]
    with arguments.errors_of_process() as flags:
        return supervise.run(run, [f"--config={parsed.source}", *overrides, *flags])


def _run(parsed: config.Arguments, run: config.Config) -> int:
    # Not before the config is known to be right: optimizers and checkpoints take long to import.
    from jaxtrain.run import loop

    try:
        loop.run(run, {"source": parsed.source, "overrides": dict(parsed.overrides)})
        logging.getLogger("jaxtrain").info("%s", last_lines(parsed, run))
    except loop.Preempted as end:
        print(f"{end}; rerun the same command to resume", file=sys.stderr)
        return run.preemption.exit_code
    return 0
