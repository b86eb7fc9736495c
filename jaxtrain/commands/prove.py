"""Kill a run at random instants, again and again, and show that it ends with the same bits.

    jaxtrain prove [--config=FILE[:ARGUMENT] …] [--minutes M] [--steps N] [--kills K] [--out DIR]

    jaxtrain prove --minutes 10                     the demo, --config=xcm
    jaxtrain prove --config=folder:index            a run of yours

One run is undisturbed. Then, until the time is over, a run with the same config gets up to K
SIGKILLs, the first at any instant, the others after random steps. Each time it is started again by
the same command. A run that has ended before its SIGKILL is not counted. The digest of the whole
state must be the same after each step that both recorded, and in the last checkpoint. On GPUs this
needs XLA_FLAGS=--xla_gpu_deterministic_ops=true.

These runs write into DIR alone: not into the config's workdir or checkpoint.folder, and to no
tracker.

Ends with 0 if every run was the same to the last bit, else with 1.
"""

import argparse
import math
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from jaxtrain.commands import arguments

DEMO = "xcm"  # makes its own data
# A run as long as --steps says, without evaluations, by whose scores it might end.
FIELDS = {
    "metrics.every": "1",
    "metrics.digest": "true",
    "train.eval_every": "0",
    "train.patience": "0",
    "train.target": "None",
}


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    config_arguments, options = arguments.split_config(argv)
    usage = (
        "jaxtrain prove [--config=FILE[:ARGUMENT] …] [--minutes M] [--steps N] [--kills K] [--out"
        " DIR]"
    )
    parser = arguments.Parser("jaxtrain prove", __doc__, usage=usage)
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=10,
        metavar="M",
        help="after which no run begins; default: 10",
    )
    parser.add_argument(
        "--steps", type=arguments.positive, default=60, metavar="N", help="of each run; default: 60"
    )
    parser.add_argument(
        "--kills", type=arguments.positive, default=3, metavar="K", help="of each run; default: 3"
    )
    text = "the runs, which are kept; default: a temporary folder"
    parser.add_argument("--out", type=arguments.out_folder, metavar="DIR", help=text)
    args = parser.parse_args(options)
    if args.out:
        return _prove(config_arguments, args, pathlib.Path(args.out))
    with tempfile.TemporaryDirectory(prefix="jaxtrain-prove-") as folder:
        return _prove(config_arguments, args, pathlib.Path(folder))


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number of minutes, at least 0")
    return value


def _prove(config_arguments: Sequence[str], args: argparse.Namespace, folder: pathlib.Path) -> int:
    from jaxtrain.config import WITHOUT_OUTPUTS
    from jaxtrain.telemetry.report.run import RunError

    config_arguments = config_arguments or [f"--config={DEMO}"]
    fields = FIELDS | {
        **WITHOUT_OUTPUTS,
        "train.steps": str(args.steps),
        "checkpoint.every": str(max(args.steps // 12, 1)),
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "jaxtrain", "train", *config_arguments, *overrides]
    undisturbed = folder / "undisturbed"
    if undisturbed.exists():
        raise RunError(f"{undisturbed} exists; choose another --out")
    print(f"the undisturbed run: {args.steps} steps", flush=True)
    began = time.monotonic()
    _train(command, undisturbed)
    seconds = time.monotonic() - began
    rng = random.Random(0)
    all_same = True
    n_runs, n_kills = 0, 0
    print(f"{'run':>4} {'kills':>5} {'after steps':<20} {'starts':>6}  result", flush=True)
    while n_runs == 0 or time.monotonic() - began < 60 * args.minutes:
        n_runs += 1
        workdir = folder / f"killed-{n_runs}"
        # Faster than the undisturbed run, which compiled, this one may end before its first kill.
        while (first_kill := _kill(command, workdir, rng.uniform(0, seconds))) is None:
            shutil.rmtree(workdir)
            seconds /= 2
        killed_after = [first_kill]
        for step in sorted(rng.choices(range(args.steps), k=args.kills - 1)):
            kill = _kill(command, workdir, rng.uniform(0, seconds / args.steps), after=step)
            if kill is not None:
                killed_after.append(kill)
        _train(command, workdir)
        is_same, result = _compare(undisturbed, workdir)
        all_same = all_same and is_same
        n_kills += len(killed_after)
        steps = ", ".join(map(str, killed_after))
        print(
            f"{n_runs:>4} {len(killed_after):>5} {steps:<20} {args.kills + 1:>6}  {result}",
            flush=True,
        )
    verdict = "each ended with the same bits" if all_same else "not all ended with the same bits"
    print(f"{n_kills} kills in {n_runs} runs: {verdict}")
    return 0 if all_same else 1


def _train(command: Sequence[str], workdir: pathlib.Path) -> None:
    """Start a run or start it again, to its end. Raises RunError with the end of its output."""
    from jaxtrain.telemetry.report.run import RunError

    command = [*command, f"--config.workdir={workdir}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        output = (ended.stderr or ended.stdout)[-1000:].strip()
        raise RunError(f"a run ended with code {ended.returncode}:\n{output}")


def _kill(
    command: Sequence[str], workdir: pathlib.Path, seconds: float, *, after: int = 0
) -> int | None:
    """Start a run, and kill it ``seconds`` after it has recorded step ``after``.

    Return its last recorded step, None if it ended before.
    """
    process = subprocess.Popen(
        [*command, f"--config.workdir={workdir}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while process.poll() is None and _step(workdir) < after:
            time.sleep(0.05)
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    return _step(workdir) if process.returncode == -signal.SIGKILL else None


def _step(workdir: pathlib.Path) -> int:
    from jaxtrain.telemetry.report import run as run_lib

    if not (workdir / "metrics.jsonl").exists():
        return 0
    return run_lib.open_run(str(workdir)).step


def _compare(undisturbed: pathlib.Path, killed: pathlib.Path) -> tuple[bool, str]:
    """Whether two runs agree in each recorded step and the last checkpoint, and a line on it."""
    from jaxtrain.arrays import saved_steps, source
    from jaxtrain.telemetry.report import run as run_lib
    from jaxtrain.telemetry.report import step_differences

    runs = [str(undisturbed), str(killed)]
    steps, steps_again = (step_differences.read(run_lib.open_run(run)) for run in runs)
    compared = step_differences.Compared(steps, steps_again)
    if compared.differs is not None or compared.steps != sorted(steps.values["loss"]):
        return False, compared.summary()
    digest, digest_again = (saved_steps.digest_of(source.find(run).arrays()) for run in runs)
    is_same = digest == digest_again
    verdict = "equal" if is_same else "not equal"
    text = f"{len(compared.steps)} steps and the last checkpoint ({digest}) are {verdict}"
    return is_same, text
