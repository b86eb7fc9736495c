"""Submit a run, or a sweep of runs, to SLURM.

It resumes by itself after a preemption and after its time limit.

    jaxtrain launch --config=FILE[:ARGUMENT] [--nodes=N --gpus-per-node=N …]
        [--config.section.field=value …]

    jaxtrain launch --config=xcm:/data/XCM --nodes=2 --gpus-per-node=8
    jaxtrain launch --config=xcm --sweep --gpus-per-node=1   a job array: sweeps() of the config
    jaxtrain launch … --dry-run                              prints the script, submits nothing
    jaxtrain launch --status=runs/xcm                        its jobs: state, restarts, step
    jaxtrain launch --tail=runs/xcm                          follows process 0 of the newest job

All errors of the config, and of every point of the sweep, are reported before anything is
submitted. A node runs one process with all its GPUs, unless --tasks-per-node is larger. A process
that ends by a fault is started again in the same job (`jaxtrain train --supervise`). Before the
time limit, and on preemption, SLURM signals the tasks; they save and end with
config.preemption.exit_code, and the script requeues the job, unless it was cancelled.

workdir/slurm holds each job's script, its pickled task, and <job>_<task>_log.out of every task;
secret-*, by which the processes of a job know each other, and which only its owner can read;
jobs.jsonl lists the jobs:
{"job": "17", "workdir": "…", "overrides": {…}}. Needs the package submitit (extra: slurm).
"""

import argparse
import json
import os
import pathlib
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtrain import config as config_lib
from jaxtrain.commands import arguments
from jaxtrain.telemetry.report import run as run_lib
from loaders.io import files
from loaders.io.checks import UserError

if TYPE_CHECKING:
    import submitit

ROOT = pathlib.Path(__file__).resolve().parents[2]
ACTIVE = (
    "PENDING",
    "CONFIGURING",
    "RUNNING",
    "COMPLETING",
    "REQUEUED",
    "SUSPENDED",
    "STOPPED",
    "SIGNALING",
    "RESV_DEL_HOLD",
)

ASKED = ("scontrol", "sacct")  # commands of SLURM that know a job's state

# Options of sbatch on which more of the script depends: options of this command replace them.
OWN = {
    "nodes": "--nodes",
    "ntasks_per_node": "--tasks-per-node",
    "time": "--time",
    "cpus_per_task": "--cpus",
}
SHARED = ("partition", "account", "qos", "constraint")  # options of this command that are sbatch's


class Run:
    """A run as a supervised task, with its exit code. Signals before it listens are not lost."""

    def __init__(self, argv: Sequence[str], preemption: config_lib.Preemption):
        self._argv, self._preemption = list(argv), preemption

    def __call__(self) -> None:
        for name in self._preemption.signals:
            signal.signal(getattr(signal, name), lambda *_: os._exit(self._preemption.exit_code))
        # its imports take seconds, in which there is nothing to save yet
        from jaxtrain.commands import train

        sys.exit(train.main(["--supervise", *self._argv]))


MAX_TEXT = 1 << 30  # [bytes] of jobs.jsonl
PIECE = 1 << 20  # [bytes] of a log that are printed together
REMEDY = "run jaxtrain launch on a login node of the cluster"


class LaunchError(UserError, ValueError):
    """An error in how a run is launched. The message names the remedy."""


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    config_arguments, options = arguments.split_config(argv)
    parser = arguments.Parser(
        "jaxtrain launch", __doc__, usage=arguments.CONFIG_USAGE.format("launch") + " [OPTION …]"
    )
    add = parser.add_argument
    add("--nodes", type=arguments.positive, default=1, help="default: 1")
    add("--gpus-per-node", type=int, default=0, help="default: 0")
    text = "processes of a node, which share its GPUs evenly; default: 1"
    add("--tasks-per-node", type=arguments.positive, default=1, help=text)
    add("--mem-gb", type=arguments.positive, default=64, help="of a node; default: 64")
    text = "cores of a process, which its loader uses; default: config.data.threads, or 8"
    add("--cpus", metavar="N", type=arguments.positive, help=text)
    add(
        "--time",
        type=arguments.positive,
        default=24 * 60,
        help="minutes after which the job is requeued; default: 1440",
    )
    add(
        "--notice",
        type=int,
        default=120,
        help="seconds before the time limit at which the tasks are signalled; default: 120",
    )
    add("--max-restarts", type=int, default=100, help="default: 100")
    add("--name", help="of the job; default: that of the workdir")
    for name in SHARED:
        add(f"--{name}", help="as sbatch has it")
    add(
        "--sbatch",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="any other option of sbatch",
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the tasks")
    add(
        "--setup",
        action="append",
        default=[],
        metavar="LINE",
        help="of shell, before the tasks: module load cuda",
    )
    runs_in = parser.add_mutually_exclusive_group()
    runs_in.add_argument(
        "--venv", help="a virtual environment on the nodes; default: the Python that runs this"
    )
    runs_in.add_argument(
        "--container", help="an image with Python, this project's needs and submitit"
    )
    add(
        "--container-runtime",
        choices=("apptainer", "singularity", "pyxis"),
        default="apptainer",
        help="default: apptainer",
    )
    add(
        "--sweep",
        action="store_true",
        help="one job of an array for each point of the config's sweeps()",
    )
    add(
        "--parallel",
        type=int,
        default=256,
        help="jobs of the array that may run at once; default: 256",
    )
    add("--dry-run", action="store_true", help="print the script, submit nothing")
    add("--status", metavar="WORKDIR", help="the jobs of this workdir: state, restarts, step")
    add("--tail", metavar="WORKDIR", help="follow process 0 of this workdir's newest job")
    args = parser.parse_args(options)
    if args.status or args.tail:
        return _status(args.status) if args.status else _tail(args.tail)
    return _submit(args, config_arguments)


def _submit(args: argparse.Namespace, config_arguments: Sequence[str]) -> int:
    parsed = config_lib.parse_args(config_arguments)
    missing = arguments.missing("submitit", "pip install 'jaxtrain[slurm]'")
    if missing:
        raise LaunchError(missing)
    source, overrides = parsed.source, parsed.overrides
    base = config_lib.load(source, overrides)
    points = config_lib.sweeps(source, overrides) if args.sweep else [(base, overrides)]
    folder = pathlib.Path(base.workdir).absolute() / "slurm"
    secret = None
    if args.nodes * args.tasks_per_node > 1:
        secret = folder / f"secret-{secrets.token_hex(4)}"
    executor = make_executor(args, base, folder, secret)
    if args.dry_run:
        if len(points) > 1:
            executor.parameters["map_count"] = len(points)
        print(executor._make_submission_file_text(executor._submitit_command_str, "dry-run"))
        for i, (config, texts) in enumerate(points):
            print(f"# task {i}: {config.workdir}: {shlex.join(_arguments(source, texts))}")
        return 0
    _check_installed("sbatch", remedy=f"{REMEDY}, or add --dry-run to print the script")
    runs = [Run(_arguments(source, texts), config.preemption) for config, texts in points]
    folder.mkdir(parents=True, exist_ok=True)
    if secret:
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    from submitit.core.utils import FailedJobError

    try:
        with executor.batch():
            jobs = [executor.submit(run) for run in runs]
    except (FailedJobError, OSError) as error:
        raise LaunchError(f"sbatch failed: {error}; correct the resources") from error
    with (folder / "jobs.jsonl").open("a") as file:
        for job, (config, texts) in zip(jobs, points, strict=True):
            workdir = os.path.abspath(config.workdir)
            record = {"job": job.job_id, "workdir": workdir, "overrides": dict(texts)}
            file.write(json.dumps(record) + "\n")
            log_file = folder / f"{job.job_id}_0_log.out"
            print(f"submitted job {job.job_id}: {workdir}; its log: {log_file}")
    return 0


def make_executor(
    args: argparse.Namespace,
    config: config_lib.Config,
    folder: pathlib.Path,
    secret: pathlib.Path | None,
) -> "submitit.SlurmExecutor":
    """Make the executor that submits to SLURM, with the script's resources, environment and ending.

    ``secret``: the file of the job's JAXTRAIN_SECRET in every node's sight, or None for one
    process. Raises LaunchError: an argument is malformed or would end its line of the script.
    """
    job_name = args.name or folder.parent.name
    for option in SHARED:
        _check_line(f"--{option}", getattr(args, option) or "")
    _check_line("--name" if args.name else "config.workdir", job_name)
    _check_line("config.workdir", str(folder))
    if "%" in str(folder):
        raise LaunchError(
            f"config.workdir is {str(folder.parent)!r}: SLURM replaces what follows a %; choose"
            " another folder"
        )
    python, srun = _python_of_tasks(args, folder)
    import submitit

    class Executor(submitit.SlurmExecutor):
        @classmethod
        def affinity(cls) -> int:  # so that a script is printed without a SLURM, too
            return 2

    environment = _environment(args, secret)
    # SIGTERM comes by itself. NCCL may take SIGUSR1 for itself.
    extra = _sbatch_options(args.sbatch, requeue=True, signal=f"USR2@{args.notice}")
    optional = {name: getattr(args, name) for name in SHARED if getattr(args, name)}
    if args.gpus_per_node:
        optional["gpus_per_node"] = args.gpus_per_node
    cpus = args.cpus or config.data.threads or 8
    signals = " ".join(name.removeprefix("SIG") for name in config.preemption.signals)
    executor = Executor(folder, python=python)
    executor.update_parameters(
        job_name=job_name,
        nodes=args.nodes,
        ntasks_per_node=args.tasks_per_node,
        cpus_per_task=cpus,
        mem=f"{args.mem_gb}GB",
        time=args.time,
        stderr_to_stdout=True,
        array_parallelism=args.parallel,
        additional_parameters=extra,
        srun_args=srun,
        # Bash must outlive the signal of a preemption, to see how the tasks ended. srun does not
        # know sbatch's CPUs per task.
        setup=[f"trap : {signals}", f"export SRUN_CPUS_PER_TASK={cpus}", *environment, *args.setup],
        teardown=_ending(config.preemption, args.max_restarts, 60 * args.time),
        **optional,
    )
    return executor


def _python_of_tasks(args: argparse.Namespace, folder: pathlib.Path) -> tuple[str, list[str]]:
    """Return the command of Python on the nodes, and the arguments of srun. Raises LaunchError."""
    srun = ["--kill-on-bad-exit=1"]
    if not args.container:
        return shlex.quote(f"{args.venv}/bin/python" if args.venv else sys.executable), srun
    mounts = [*dict.fromkeys(map(str, (ROOT, os.getcwd(), folder.parent)))]
    for place in mounts:
        if "," in place or ":" in place:
            raise LaunchError(
                f"--container mounts {place!r}, and a comma or colon would split it; choose another"
                " folder"
            )
    if args.container_runtime == "pyxis":
        pairs = ",".join(f"{place}:{place}" for place in mounts)
        srun += [
            f"--container-image={args.container}",
            f"--container-mounts={pairs}",
            f"--container-workdir={os.getcwd()}",
        ]
        return "python3", srun
    command = [args.container_runtime, "exec"]
    if args.gpus_per_node:
        command.append("--nv")
    command += ["--bind", ",".join(mounts), args.container, "python3"]
    return shlex.join(command), srun


def _environment(args: argparse.Namespace, secret: pathlib.Path | None) -> list[str]:
    """Return the script's lines that set the variables of the tasks. Raises LaunchError."""
    lines = [f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"]
    if secret:
        lines += [
            f"JAXTRAIN_SECRET=$(cat {shlex.quote(str(secret))}) || exit 2",
            "export JAXTRAIN_SECRET",
        ]
    for pair in args.env:
        name, equals, value = pair.partition("=")
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or not equals:
            raise LaunchError(f"--env is {pair!r}; expected NAME=VALUE")
        lines.append(f"export {name}={shlex.quote(value)}")
    # by which a run knows how long it was queued
    lines.append(f"export JAXTRAIN_SUBMITTED={int(time.time())}")
    return lines


def _sbatch_options(pairs: Sequence[str], **defaults: str | bool) -> dict[str, str | bool]:
    """Return the options of --sbatch, over ``defaults``, by their names. Raises LaunchError."""
    options = dict(defaults)
    pair_of_key: dict[str, str] = {}
    for pair in pairs:
        key, equals, text = pair.removeprefix("--").partition("=")
        if not re.fullmatch("[a-z][a-z0-9_-]*", key):
            raise LaunchError(
                f"--sbatch is {pair!r}; expected KEY=VALUE or KEY, with a long option of sbatch"
                " as KEY"
            )
        _check_line("--sbatch", text)
        key = key.replace("-", "_")  # as submitit spells them, which else writes a second line
        if key in OWN:
            raise LaunchError(
                f"--sbatch is {pair}; give it as {OWN[key]}, by which the rest of the script goes,"
                " too"
            )
        value = text if equals else True
        if key in pair_of_key and options[key] != value:
            raise LaunchError(
                f"--sbatch is given as {pair_of_key[key]} and as {pair}; give one of the two"
            )
        pair_of_key[key] = pair
        options[key] = value
    return options


def _check_installed(*commands: str, remedy: str = REMEDY) -> None:
    missing = [command for command in commands if not shutil.which(command)]
    if missing:
        raise LaunchError(
            f"SLURM's commands are not installed here: {' and '.join(missing)} not found; {remedy}"
        )


def _check_line(option: str, text: str) -> None:
    """Raise LaunchError for text that would end an #SBATCH comment, so its rest ran as shell."""
    if not text.isprintable():
        raise LaunchError(
            f"{option} is {text!r}, which has a line break or another control character; omit it"
        )


def _ending(preemption: config_lib.Preemption, max_restarts: int, limit: int) -> list[str]:
    """Return the script's lines after srun, which requeue a job that saved or could not listen yet.

    A job that is ending already was cancelled, or SLURM requeues it itself, or it is past its time
    limit of ``limit`` seconds, because the notice came while it compiled and could not answer.
    """
    codes = [preemption.exit_code]
    for name in preemption.signals:
        codes.append(128 + getattr(signal, name))
    pattern = "|".join(str(int(code)) for code in dict.fromkeys(codes))
    return [
        "code=$?",
        "state=$(scontrol show job --oneliner \"$SLURM_JOB_ID\" | grep -o 'JobState=[A-Z]*')",
        f"case $code in {pattern})",
        f'    if [ "$state" != JobState=RUNNING ] && [ "$SECONDS" -lt {limit - 5} ]; then',
        '        echo "ended with code $code; not requeued by itself: $state"',
        (
            f'    elif [ "${{SLURM_RESTART_COUNT:-0}}" -ge {max_restarts} ]; then echo "not'
            f' requeued: {max_restarts} restarts"'
        ),
        '    else echo "ended with code $code; requeued"; scontrol requeue "$SLURM_JOB_ID"; fi ;;',
        "esac",
        "exit $code",
    ]


def _arguments(source: str, texts: Sequence[tuple[str, str]]) -> list[str]:
    path, colon, argument = source.partition(":")
    if os.path.isfile(path):  # else the name of a shipped config
        path = os.path.abspath(path)
    overrides = [f"--config.{field}={text}" for field, text in texts]
    return [f"--config={path}{colon}{argument}", *overrides]


def _jobs(workdir: str) -> list[dict[str, Any]]:
    path = pathlib.Path(workdir) / "slurm" / "jobs.jsonl"
    if not path.exists():
        raise LaunchError(
            f"{path} does not exist: nothing was submitted with this workdir; name another"
        )
    jobs = []
    try:
        text = files.read_text(
            files.inside(pathlib.Path(workdir), "slurm/jobs.jsonl"), most=MAX_TEXT
        )
        for i, line in enumerate(files.lines(text)):
            jobs.append(files.parse(line, f"{path}: line {i + 1}"))
    except files.FileError as error:
        raise LaunchError(str(error)) from error
    for job in jobs:
        if not _is_job(job):
            raise LaunchError(
                f"{path} has a line that describes no job: {str(job)[:80]}; remove it"
            )
    return jobs


def _is_job(record: dict[str, Any]) -> bool:
    """Whether a line of jobs.jsonl has a job's number and its workdir."""
    number, workdir = record.get("job"), record.get("workdir")
    if not isinstance(number, str) or not isinstance(workdir, str):
        return False
    return bool(re.fullmatch(r"\d+(_\d+)?", number)) and workdir.isprintable()


def state_of(job: str) -> dict[str, str]:
    """Ask SLURM for JobState, Restarts, NodeList, Reason. It may forget ended jobs."""
    scontrol = ["scontrol", "show", "job", "--oneliner", job]
    active = subprocess.run(scontrol, capture_output=True, text=True)
    if active.returncode == 0:
        return dict(pair.partition("=")[::2] for pair in active.stdout.split())
    sacct = ["sacct", "-XnPo", "State", "-j", job]
    accounted = subprocess.run(sacct, capture_output=True, text=True)
    states = accounted.stdout.split()
    if accounted.returncode or not states:
        return {"JobState": "UNKNOWN"}
    return {"JobState": states[-1]}


def _status(workdir: str) -> int:
    jobs = _jobs(workdir)
    _check_installed(*ASKED)
    for job in jobs:
        state = state_of(job["job"])
        run = run_lib.Run(pathlib.Path(job["workdir"]), job["job"])
        restarts = state.get("Restarts", "?")
        nodes = state.get("NodeList") or "-"
        print(
            f"{run.name}  {state['JobState']}  {restarts} restarts  on {nodes}  step"
            f" {run.step}/{run.steps or '?'}  {run.path}"
        )
    return 0


def _tail(workdir: str) -> int:
    job = _jobs(workdir)[-1]["job"]
    _check_installed(*ASKED)
    read = 0
    try:
        path = files.inside(pathlib.Path(workdir), f"slurm/{job}_0_log.out")
        while True:
            active = state_of(job)["JobState"] in ACTIVE
            if path.exists():
                with files.regular(path) as file:
                    file.seek(read)
                    while text := file.read(PIECE):
                        read += len(text)
                        sys.stdout.write(text.decode(errors="replace"))
                sys.stdout.flush()
            if not active:
                return 0
            time.sleep(1)
    except files.FileError as error:
        raise LaunchError(str(error)) from error
