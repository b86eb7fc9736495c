"""`jaxtrain launch`: the scripts that it writes, and a run that a real SLURM signals, requeues and
cuts short."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jaxtrain import config as config_lib
from tests.support import small_runs
from tests.support.processes import ROOT, cluster, hashes, records, step_of, xla_flags
from tests.support.supervised_runs import pid_in
from tests.support.xla import KEEPS_PROGRAMS

submitit = pytest.importorskip("submitit", reason="submitit is not installed (extra: slurm)")
from jaxtrain.commands import launch as launch_command  # noqa: E402
from jaxtrain.commands import runs as runs_command  # noqa: E402

SWEEPS = """

def sweeps():
    for lr in (1e-3, 3e-4):
        yield {"optim.lr": lr, "metrics.wandb_project": ""}
    yield {"train.steps": 7, "model.depth": 3, "workdir": "elsewhere"}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(small_runs.TOY_AT + SWEEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def launch(capsys, *arguments, code=0):
    assert launch_command.main(arguments) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def options(script):
    lines = [
        line.removeprefix("#SBATCH --")
        for line in script.splitlines()
        if line.startswith("#SBATCH")
    ]
    return dict(line.partition("=")[::2] for line in lines)


def test_the_script_of_a_run(folder, corpus, capsys):
    script = launch(
        capsys,
        "--config",
        f"tiny.py:{corpus}",
        "--nodes=2",
        "--gpus-per-node=8",
        "--mem-gb=500",
        "--time=90",
        "--partition=long",
        "--sbatch=exclusive",
        "--sbatch=reservation=mine",
        "--env=NOTE=it's $HOME",
        "--setup=module load cuda",
        "--venv=/opt/my env",
        "--config.optim.lr=1e-4",
        "--dry-run",
    )
    found = options(script)
    wanted = {
        "nodes": "2",
        "gpus-per-node": "8",
        "ntasks-per-node": "1",
        "cpus-per-task": "2",
        "mem": "500GB",
        "time": "90",
    }
    wanted |= {
        "partition": "long",
        "reservation": "mine",
        "exclusive": "",
        "requeue": "",
        "signal": "USR2@120",
        "job-name": "tiny",
    }
    assert {k: found.get(k) for k in wanted} == wanted
    lines = script.splitlines()
    assert "module load cuda" in lines and "export SRUN_CPUS_PER_TASK=2" in lines
    srun = next(line for line in lines if line.startswith("srun "))
    assert "--kill-on-bad-exit=1" in srun and "'/opt/my env/bin/python' -u -m submitit" in srun
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    exports = "\n".join(line for line in lines if line.startswith("export"))
    told = subprocess.run(
        ["bash", "-c", exports + '\necho "$NOTE"; echo "$PYTHONPATH"'],
        capture_output=True,
        text=True,
    ).stdout
    assert told.splitlines()[0] == "it's $HOME" and told.splitlines()[1].startswith(str(ROOT))
    assert not (folder / "runs").exists(), "a dry run leaves nothing"


def test_processes_of_a_job_know_each_other_by_a_secret_that_only_its_owner_reads(
    folder, corpus, capsys, monkeypatch
):
    arguments = (f"--config=tiny.py:{corpus}", "--tasks-per-node=2")
    assert "SECRET" not in launch(capsys, arguments[0], "--dry-run"), "one process meets nobody"
    assert "JAXTRAIN_SECRET=$(cat " in launch(capsys, *arguments, "--dry-run")
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    (folder / "bin").mkdir()
    (folder / "bin" / "sbatch").write_text("#!/bin/sh\necho Submitted batch job 17\n")
    (folder / "bin" / "sbatch").chmod(0o755)
    seen = set()
    for _ in range(2):
        launch(capsys, *arguments)
        script = (folder / "runs" / "tiny" / "slurm" / "17_submission.sh").read_text()
        lines = script[script.index("JAXTRAIN_SECRET=") :].splitlines()[:2]
        printed = subprocess.run(
            ["bash", "-c", "\n".join([*lines, "env"])], capture_output=True, text=True, check=True
        ).stdout
        (secret,) = (
            line.partition("=")[2]
            for line in printed.splitlines()
            if line.startswith("JAXTRAIN_SECRET=")
        )
        assert len(bytes.fromhex(secret)) == 32 and secret not in script
        seen.add(secret)
    files = list((folder / "runs" / "tiny" / "slurm").glob("secret-*"))
    assert len(seen) == len(files) == 2 and all(
        path.stat().st_mode & 0o777 == 0o600 for path in files
    )


@pytest.mark.parametrize(
    "option",
    [
        "--name=a\nid",
        "--account=a\nid",
        "--partition=a\rid",
        "--qos=a\x0bid",
        "--constraint=a\u2028id",
        "--sbatch=comment=a\nid",
        "--sbatch=comment\nid=1",
        "--sbatch=--a b=1",
        "--config.workdir=a\nid",
    ],
    ids=lambda option: ascii(option),
)
def test_a_line_break_never_ends_a_comment_of_the_script(folder, corpus, capsys, option):
    message = launch(capsys, f"--config=tiny.py:{corpus}", "--dry-run", option, code=2)
    assert option.removeprefix("--").split("=")[0] in message and "Traceback" not in message


def test_cores_are_one_number(folder, corpus, capsys):
    """This holds for any name of the option and any memory. The script has no second line, and no
    other number for srun."""

    def cores(*arguments):
        script = launch(capsys, f"--config=tiny.py:{corpus}", "--dry-run", *arguments)
        lines = [
            line
            for line in script.splitlines()
            if "cpus-per-task" in line or "cpus_per_task" in line.replace("--", "")
        ]
        assert (
            len(lines) == 1
            and f"export SRUN_CPUS_PER_TASK={options(script)['cpus-per-task']}"
            in script.splitlines()
        )
        return options(script)["cpus-per-task"]

    assert cores() == "2", "as many threads as the config has"
    assert cores("--mem-gb=500") == "2" and cores("--config.data.threads=0") == "8"
    assert cores("--cpus=12") == "12"
    for key in ("cpus-per-task", "cpus_per_task", "--cpus-per-task"):
        error = launch(
            capsys, f"--config=tiny.py:{corpus}", "--dry-run", f"--sbatch={key}=16", code=2
        )
        assert f"--sbatch is {key}=16; give it as --cpus" in error
    twice = ("--sbatch=gpu-bind=none", "--sbatch=gpu_bind=closest")
    error = launch(capsys, f"--config=tiny.py:{corpus}", "--dry-run", *twice, code=2)
    assert (
        "--sbatch is given as gpu-bind=none and as gpu_bind=closest; give one of the two" in error
    )
    error = launch(capsys, f"--config=tiny.py:{corpus}", "--dry-run", "--sbatch=nodes=2", code=2)
    assert "--sbatch is nodes=2; give it as --nodes" in error, "else two hosts would have no secret"
    script = launch(
        capsys,
        f"--config=tiny.py:{corpus}",
        "--dry-run",
        "--sbatch=gpu-bind=none",
        "--sbatch=kill-on-invalid-dep=yes",
    )
    assert script.count("gpu-bind=none") == 1 and script.count("kill-on-invalid-dep=yes") == 1


@pytest.mark.parametrize(
    ("runtime", "parts"),
    [
        ("apptainer", ["apptainer exec --nv --bind", "image.sif python3 -u -m submitit"]),
        (
            "pyxis",
            ["--container-image=image.sif", "--container-workdir=", "python3 -u -m submitit"],
        ),
    ],
)
def test_containers(folder, corpus, capsys, runtime, parts):
    arguments = (
        "--gpus-per-node=1",
        "--container=image.sif",
        f"--container-runtime={runtime}",
        "--dry-run",
    )
    script = launch(capsys, f"--config=tiny.py:{corpus}", *arguments)
    srun = next(line for line in script.splitlines() if line.startswith("srun "))
    assert all(part in srun for part in [*parts, str(ROOT), str(folder)])


@pytest.mark.parametrize(
    ("name", "more", "why"),
    [("a,b", ["--container=image.sif"], "would split it"), ("50%j", [], "SLURM replaces")],
)
def test_a_workdir_that_slurm_or_a_container_reads_otherwise_is_refused(
    folder, corpus, capsys, name, more, why
):
    said = launch(
        capsys,
        f"--config=tiny.py:{corpus}",
        f"--config.workdir={name}/run",
        *more,
        "--dry-run",
        code=2,
    )
    assert why in said and repr(str(folder / name / "run")) in said


def test_the_notice_and_the_code_are_those_of_the_config(folder, corpus, capsys):
    code = "--config.preemption.exit_code=99"
    script = launch(capsys, f"--config=tiny.py:{corpus}", code, "--notice=60", "--dry-run")
    assert options(script)["signal"] == "USR2@60" and "case $code in 99|143|138|140|129)" in script


def test_a_sweep_is_an_array_of_checked_points(folder, corpus, capsys):
    script = launch(capsys, f"--config=tiny.py:{corpus}", "--sweep", "--parallel=2", "--dry-run")
    assert options(script)["array"] == "0-2%2" and "%A_%a_%t_log.out" in script
    points = [config for config, _ in config_lib.sweeps(f"tiny.py:{corpus}")]
    assert [(c.optim.lr, c.train.steps, c.model.depth) for c in points] == [
        (1e-3, 20, 2),
        (3e-4, 20, 2),
        (1e-3, 7, 3),
    ]
    base = folder / "runs" / "tiny"
    assert [c.workdir for c in points] == [str(base / "000"), str(base / "001"), "elsewhere"]


def test_errors_in_any_point_of_a_sweep_are_reported_before_submission(
    folder, corpus, capsys, monkeypatch
):
    monkeypatch.setattr(submitit.SlurmExecutor, "_submit_command", None)  # submitting would fail
    points = ("{'optim.lr': 1e-3}", "{'optim.leraning_rate': 1}", "{'train.batch': 7.5}")
    stale = (
        small_runs.TOY_AT
        + "\ndef sweeps():\n"
        + "".join(f"    yield {point}\n" for point in points)
    )
    (folder / "stale.py").write_text(stale)
    told = launch(capsys, f"--config=stale.py:{corpus}", "--sweep", code=2)
    assert "config.optim.leraning_rate does not exist" in told and "(sweep 1)" in told
    assert "config.train.batch is 7.5" in told and "(sweep 2)" in told
    assert "is given, and sweep 0 sets it too" in launch(
        capsys, f"--config=stale.py:{corpus}", "--sweep", "--config.optim.lr=1", code=2
    )
    for body, reason in (
        ("", "defines no function sweeps()"),
        ("\ndef sweeps():\n    return []\n", "yields nothing"),
        ("\ndef sweeps():\n    yield 3\n", "expected a dictionary"),
        (
            "\ndef sweeps():\n    yield {'workdir': 'a'}\n    yield {'workdir': './a'}\n",
            "in more than one sweep",
        ),
    ):
        (folder / "other.py").write_text(small_runs.TOY_AT + body)
        assert reason in launch(capsys, f"--config=other.py:{corpus}", "--sweep", code=2)
    with pytest.raises(SystemExit, match="2"):
        launch(capsys, f"--config=tiny.py:{corpus}", "--nodse=2")
    told = capsys.readouterr().err
    assert "argument '--nodse=2' is unknown" in told and "did you mean '--nodes'?" in told
    assert "'NOTE'; expected NAME=VALUE" in launch(
        capsys, f"--config=tiny.py:{corpus}", "--env=NOTE", "--dry-run", code=2
    )
    assert "jobs.jsonl does not exist" in launch(capsys, "--status=nowhere", code=2)
    assert not (folder / "runs").exists()


def test_without_slurm_the_missing_command_and_the_remedy_are_one_line(
    folder, corpus, capsys, monkeypatch
):
    """Nothing is written before the error."""
    source, before = f"--config=tiny.py:{corpus}", sorted(folder.glob("[!_]*"))
    assert "#SBATCH" in launch(capsys, source, "--dry-run")
    monkeypatch.setenv("PATH", str(folder / "bin"))
    remedy = "run jaxtrain launch on a login node of the cluster"
    told = launch(capsys, source, "--tasks-per-node=2", code=2)
    assert (
        told
        == f"error: SLURM's commands are not installed here: sbatch not found; {remedy}, or add"
        " --dry-run to print the script\n"
    )
    assert sorted(folder.glob("[!_]*")) == before
    (folder / "runs" / "tiny" / "slurm").mkdir(parents=True)
    (folder / "runs" / "tiny" / "slurm" / "jobs.jsonl").write_text(
        '{"job": "17", "workdir": "runs/tiny"}\n'
    )
    for option in ("--status=runs/tiny", "--tail=runs/tiny"):
        told = launch(capsys, option, code=2)
        assert (
            told == "error: SLURM's commands are not installed here: scontrol and sacct not found;"
            f" {remedy}\n"
        )


ON_SLURM = pytest.mark.xdist_group("slurm")  # one after the other: the node has room for one job


def slurm_of_one() -> str:
    """The reason why the tests below cannot run, or "" if they can. A cluster with other users is
    left alone."""
    if not shutil.which("sinfo"):
        return "no SLURM here; tests/slurm_up.sh starts one on Debian, as root"
    nodes = subprocess.run(
        ["sinfo", "-h", "-o", "%N %c"], capture_output=True, text=True, timeout=30
    )
    name, _, cpus = nodes.stdout.strip().partition(" ")
    if name != "localhost":
        return f"the SLURM here is not one of one node: {nodes.stdout or nodes.stderr}"
    return "" if int(cpus) >= 2 else "the node has one CPU, and two tasks need two"


@pytest.fixture
def slurm(folder, capsys):
    if reason := slurm_of_one():
        pytest.skip(reason)
    submitted = []

    def submit(*arguments, pause):
        environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(2), "NO_GCE_CHECK": "true"}
        # of each step
        environment |= {
            "PYTHONPATH": f"{ROOT}:{folder}",
            "IDS": str(folder / "ids.jsonl"),
            "PAUSE": str(pause),
        }
        environment |= {name: os.environ[name] for name in KEEPS_PROGRAMS}
        variables = [f"--env={k}={v}" for k, v in environment.items()]
        launch(
            capsys,
            "--tasks-per-node=2",
            "--mem-gb=2",
            "--cpus=1",
            "--notice=20",
            *variables,
            *arguments,
        )
        submitted.append(
            json.loads(
                (folder / "runs" / "tiny" / "slurm" / "jobs.jsonl").read_text().splitlines()[-1]
            )["job"]
        )
        return submitted[-1]

    yield submit
    for job in submitted:
        subprocess.run(["scancel", "--signal=KILL", "--full", job], capture_output=True)
        subprocess.run(["scancel", job], capture_output=True)


def log_of(folder, job):
    path = folder / "runs" / "tiny" / "slurm" / f"{job}_0_log.out"
    return path.read_text(errors="replace") if path.exists() else ""


def until(condition, folder, job, *, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        state = launch_command.state_of(job)
        assert time.monotonic() < deadline and state["JobState"] not in (
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
        ), log_of(folder, job)
        if state["JobState"] == "PENDING":  # SLURM makes a requeued job wait for two minutes
            subprocess.run(
                ["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True
            )
        time.sleep(0.3)


def test_a_job_that_waits_is_listed(folder, corpus, capsys, slurm):
    """`jaxtrain runs` lists it before the job has made its workdir, and no longer once it is
    cancelled."""
    job = slurm(f"--config=tiny.py:{corpus}", "--sbatch=hold", pause=0)
    assert runs_command.main(["runs"]) == 0
    [_, line] = capsys.readouterr().out.splitlines()
    assert line.split()[:3] == ["tiny", "queued", "0/?"]
    subprocess.run(["scancel", job], check=True)
    assert (
        runs_command.main(["runs"]) == 0
        and capsys.readouterr().out == "no run in runs, nor below it\n"
    )


@ON_SLURM
@pytest.mark.slow
def test_a_job_that_is_killed_signalled_and_requeued_ends_with_the_undisturbed_runs_numbers(
    folder, corpus, capsys, slurm
):
    """A kill is its supervisors', within the job, and SLURM requeues it after the signals."""
    overrides = (
        "--config.train.steps=40",
        "--config.train.eval_every=0",
        "--config.checkpoint.every=1000",
    )
    source, workdir = f"tiny.py:{corpus}", folder / "runs" / "tiny"
    in_memory = "--config.checkpoint.memory_every=1"
    job = slurm(f"--config={source}", *overrides, in_memory, "--time=10", pause=0.3)
    until(lambda: step_of(workdir) >= 3, folder, job)
    os.kill(pid_in(workdir, process=1), signal.SIGKILL)
    killed = step_of(workdir)
    until(lambda: "was killed by SIGKILL; attempt 1 begins" in log_of(folder, job), folder, job)
    until(lambda: step_of(workdir) > killed + 2, folder, job)
    state = launch_command.state_of(job)
    assert state["JobState"] == "RUNNING" and state["Restarts"] == "0", state
    resumed = re.findall(r"resuming from step (\d+): /dev/shm/", log_of(folder, job))
    assert len(resumed) == 1 and int(resumed[0]) >= killed - 1, log_of(folder, job)
    subprocess.run(["scancel", "--signal=USR2", job], check=True)
    until(lambda: log_of(folder, job).count("resuming from step") == 2, folder, job)
    first = step_of(workdir)
    until(lambda: step_of(workdir) > first + 2, folder, job)
    subprocess.run(["scontrol", "requeue", job], check=True)
    until(lambda: launch_command.state_of(job)["JobState"] == "COMPLETED", folder, job)
    log = log_of(folder, job)
    assert (
        "ended by SIGUSR2 after step" in log
        and "ended by SIGTERM after step" in log
        and log.count("resuming from step") == 3
    )
    whole = cluster(folder, source, *overrides, "--config.workdir=whole", processes=2, devices=2)
    outputs = [p.communicate(timeout=240)[0] for p in whole]
    assert [p.returncode for p in whole] == [0, 0], outputs
    assert hashes(workdir, 40) == hashes(folder / "whole", 40)
    assert records(workdir, "train") == records(folder / "whole", "train")
    status = launch(capsys, "--status=runs/tiny")
    assert (
        job in status
        and "COMPLETED" in status
        and "2 restarts" in status
        and "step 40/40" in status
    )
    assert "SIGUSR2" in launch(capsys, "--tail=runs/tiny")


@ON_SLURM
@pytest.mark.slow
def test_a_job_that_reaches_its_time_limit_resumes_and_a_cancelled_one_does_not(
    folder, corpus, capsys, slurm
):
    overrides = (
        "--config.train.steps=100",
        "--config.train.eval_every=0",
        "--config.checkpoint.every=1000",
    )
    source, workdir = f"tiny.py:{corpus}", folder / "runs" / "tiny"
    job = slurm(f"--config={source}", *overrides, "--time=2", pause=1.2)
    until(lambda: launch_command.state_of(job)["JobState"] == "COMPLETED", folder, job, seconds=600)
    assert (
        "resuming from step" in log_of(folder, job)
        and int(launch_command.state_of(job)["Restarts"]) >= 1
    )
    whole = cluster(folder, source, *overrides, "--config.workdir=whole", processes=2, devices=2)
    assert [p.wait(timeout=240) for p in whole] == [0, 0]
    assert hashes(workdir, 100) == hashes(folder / "whole", 100)

    job = slurm(f"--config={source}", *overrides, "--config.train.steps=1000", pause=0.3)
    until(lambda: step_of(workdir) >= 102, folder, job)
    subprocess.run(["scancel", job], check=True)
    deadline = time.monotonic() + 60
    while launch_command.state_of(job)["JobState"] != "CANCELLED" and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(3)
    assert launch_command.state_of(job)[
        "JobState"
    ] == "CANCELLED" and "ended by SIGTERM after step" in log_of(folder, job)


@ON_SLURM
@pytest.mark.slow
def test_a_sweep_runs_as_an_array(folder, corpus, capsys, slurm):
    sweeps = "\ndef sweeps():\n    yield {'optim.lr': 1e-3}\n    yield {'optim.lr': 2e-3}\n"
    (folder / "tiny.py").write_text(small_runs.TOY_AT + sweeps)
    job = slurm(
        f"--config=tiny.py:{corpus}", "--sweep", "--parallel=1", "--config.train.steps=2", pause=0
    )
    until(lambda: launch_command.state_of(job)["JobState"] == "COMPLETED", folder, job, seconds=400)
    assert {
        launch_command.state_of(j["job"])["JobState"] for j in launch_command._jobs("runs/tiny")
    } == {"COMPLETED"}
    for i, lr in enumerate((1e-3, 2e-3)):
        workdir = folder / "runs" / "tiny" / f"00{i}"
        assert json.loads((workdir / "config.json").read_text())["optim"]["lr"] == lr
        assert list(records(workdir, "train")) == [1, 2]
    assert (
        sys.executable
        in (
            folder / "runs" / "tiny" / "slurm" / f"{job.partition('_')[0]}_submission.sh"
        ).read_text()
    )
