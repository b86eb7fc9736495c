"""tools/launch_tpu.sh against a stand-in for gcloud that records its arguments."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from jaxtrain.plan import PlanError, parse_target
from tools import write_tpu_slices

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tools" / "launch_tpu.sh"

# Answers are files: <nth call of its kind>, or <kind>. The last line is the exit code, and the
# other lines are printed.
GCLOUD = f"""#!{sys.executable}
import json, os, pathlib, sys
here = pathlib.Path(os.environ["FAKE"])
argv = sys.argv[1:]
kind = "-".join(a for a in argv[2:4])
command = next((a.removeprefix("--command=") for a in argv if a.startswith("--command=")), "")
words = ("nohup", "tail -n", "cat jaxtrain/exit-code", "pip install")
for word, name in zip(words, ("start", "stream", "code", "install")):
    if word in command:
        kind = name
calls = here / "calls"
lines = calls.read_text().splitlines() if calls.exists() else []
n = sum(json.loads(line)["kind"] == kind for line in lines)
with calls.open("a") as file:
    file.write(json.dumps({{"kind": kind, "argv": argv}}) + "\\n")
answer = next((p for p in (here / f"{{kind}}.{{n}}", here / kind) if p.exists()), None)
*lines, code = answer.read_text().splitlines() if answer else ["0"]
print("\\n".join(lines)) if lines else None
sys.exit(int(code))
"""


@pytest.fixture
def launch(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gcloud").write_text(GCLOUD)
    (tmp_path / "bin" / "gcloud").chmod(0o755)
    answers = {"code": "0\n0", "tpu-vm-describe": "READY\n0", "stream": "step 1\n0"}

    wheel = tmp_path / "jaxtrain-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"a wheel")

    def run(*arguments, code=0, rest=("--config=configs/xcm.py",), **changed):
        for name, text in {**answers, **changed}.items():
            (tmp_path / name.replace("__", ".").replace("_", "-")).write_text(text)
        environment = {
            **os.environ,
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "FAKE": str(tmp_path),
            "LAUNCH_TPU_PAUSE": "0",
        }
        where = (
            f"--wheel={wheel}",
            "--name=pod",
            "--zone=us-central2-b",
            "--type=v4-32",
            "--version=tpu-ubuntu2204-base",
        )
        done = subprocess.run(
            [SCRIPT, *where, *arguments, "--", *rest],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == code, done.stderr + done.stdout
        calls = tmp_path / "calls"
        found = (
            [json.loads(line) for line in calls.read_text().splitlines()] if calls.exists() else []
        )
        return done, [c["kind"] for c in found], [c["argv"] for c in found]

    return run


RUN = ["tpu-vm-create", "tpu-vm-scp", "install", "start", "stream", "code"]


def test_a_run_from_creation_to_deletion(launch):
    done, kinds, calls = launch("--project=p", "--setup=sudo mount /data")
    assert kinds == [*RUN, "tpu-vm-delete"]
    assert all("--zone=us-central2-b" in c and "--project=p" in c for c in calls)
    creation = [
        "--accelerator-type=v4-32",
        "--version=tpu-ubuntu2204-base",
        "--zone=us-central2-b",
        "--project=p",
    ]
    assert calls[0] == ["compute", "tpus", "tpu-vm", "create", "pod", *creation]
    assert "--worker=all" in calls[1] and "--worker=all" in calls[3] and "--worker=0" in calls[4]
    assert "sudo mount /data" in next(a for a in calls[3] if a.startswith("--command"))
    assert "step 1" in done.stdout


def test_the_launchers_slices_are_those_of_the_plan():
    """`python -m tools.write_tpu_slices` writes them."""
    assert write_tpu_slices.FILE.read_text().splitlines() == list(write_tpu_slices.lines())


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("tpu:v4:2x2x4", ["--type=v4", "--topology=2x2x4"]),
        ("tpu:v5e:2x4", ["--type=v5litepod", "--topology=2x4"]),
        ("tpu:v5p:4x4x8", ["--type=v5p", "--topology=4x4x8"]),
        ("tpu:v6e:16x16", ["--type=v6e", "--topology=16x16"]),
        ("tpu:tpu7x:2x2x1", ["--type=tpu7x", "--topology=2x2x1"]),
        ("tpu:v4-32", ["--accelerator-type=v4-32"]),
        ("tpu:v5e-8", ["--accelerator-type=v5litepod-8"]),
        ("v5e-8", ["--accelerator-type=v5litepod-8"]),
        ("v5litepod-8", ["--accelerator-type=v5litepod-8"]),
        ("tpu:V5E:2x4", ["--type=v5litepod", "--topology=2x4"]),
        ("TPU:v4:2X2X4", ["--type=v4", "--topology=2x2x4"]),
        ("tpu:V5E-8", ["--accelerator-type=v5litepod-8"]),
        ("V5E-8", ["--accelerator-type=v5litepod-8"]),
        # gcloud may have them
        ("v9-8", ["--accelerator-type=v9-8"]),
        ("v4-384", ["--accelerator-type=v4-384"]),
        ("V4-384", ["--accelerator-type=v4-384"]),
    ],
)
def test_a_target_of_the_plan_is_a_type(kind, spec, launch):
    _, kinds, calls = launch(f"--type={kind}")
    assert kinds == [*RUN, "tpu-vm-delete"]
    types = ("--type", "--topology", "--accelerator-type")
    assert [word for word in calls[0] if word.startswith(types)] == spec
    if kind.lower() not in ("v9-8", "v4-384"):
        parse_target(f"tpu:{kind.lower().removeprefix('tpu:')}")


@pytest.mark.parametrize(
    ("kind", "nearest"),
    [
        ("v5e-2", "v5e-1 and v5e-4"),
        ("V5E-2", "v5e-1 and v5e-4"),
        ("v5litepod-0", "v5litepod-1"),
        ("v6e-2", "v6e-1 and v6e-4"),
        ("v5p-3", "v5p-2 and v5p-4"),
        ("v4-24", "v4-16 and v4-32"),
        (f"v5e-{10**20}", "v5e-256"),
    ],
)
def test_a_number_that_no_slice_of_a_known_version_has_is_refused(kind, nearest, launch):
    done, kinds, _ = launch(f"--type={kind}", code=2)
    assert done.stderr == f"launch_tpu: --type={kind} is no slice; the nearest: {nearest}\n"
    assert not kinds
    with pytest.raises(PlanError):
        parse_target(f"tpu:{kind}")


def test_the_targets_of_its_help_are_those_of_the_plan():
    text = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout
    [targets] = re.findall("`jaxtrain plan`: (.*)", text)
    for target in re.split(", | or ", targets):
        parse_target(target)


@pytest.mark.parametrize(
    "kind",
    ["v5e:3x5", "v5e:4x2", "v4:2x2", "v5e:999x999", "v4-24", "v9:2x2", "v5e:2x4*2", "v5e:x", "v5e"],
)
def test_a_slice_that_no_plan_has_is_refused(kind, launch):
    done, kinds, _ = launch(f"--type=tpu:{kind}", code=2)
    assert f"--type=tpu:{kind} is no slice; expected one of `jaxtrain plan`" in done.stderr
    assert not kinds
    if "*" not in kind:
        with pytest.raises(PlanError):
            parse_target(f"tpu:{kind}")


def test_a_check_writes_its_numbers_to_its_own_file(launch):
    done, kinds, _ = launch("--check", rest=("--out=mine.json",), code=2)
    assert "--out is --check's own" in done.stderr and not kinds


@pytest.mark.parametrize(("code", "reason"), [(0, ""), (1, "a check failed"), (3, "were left")])
def test_a_check_of_the_slice_runs_on_every_worker_and_its_numbers_come_back(code, reason, launch):
    done, kinds, calls = launch("--check", rest=("--minutes=20",), code=code, code__0=f"{code}\n0")
    assert kinds == [*RUN, "tpu-vm-scp", "tpu-vm-delete"]
    started = next(a for a in calls[kinds.index("start")] if a.startswith("--command="))
    assert "-m tools.tpu_check --minutes=20 --out=tpu_check.json" in started
    assert "--supervise" not in started
    assert {"pod:jaxtrain/tpu_check.json", ".", "--worker=0"} < set(calls[-2])
    assert reason in done.stderr


def test_a_check_sends_the_tools_and_the_configs(launch):
    done, _, _ = launch("--check", "--dry-run", rest=())
    copied = next(line for line in done.stdout.splitlines() if line.startswith("cp -R"))
    assert f"{ROOT}/tools {ROOT}/configs" in copied


def test_the_runs_arguments_reach_the_workers_as_they_are(launch, tmp_path):
    """The command passes through gcloud's one string and the worker's shell: quotes, blanks,
    dollars, globs."""
    rest = (
        "--config=configs/a b.py:/data/$x",
        "--config.warm_start.skip=('^head/',)",
        "--config.metrics.wandb_project=it's *\"",
    )
    _, kinds, calls = launch(rest=rest)
    command = next(
        a for a in calls[kinds.index("start")] if a.startswith("--command=")
    ).removeprefix("--command=")
    python = tmp_path / "jaxtrain" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    (tmp_path / "jaxtrain-secret").write_text("5e" * 32)
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nfor name, what in (('seen', sys.argv[1:]),"
        " ('secret', os.environ['JAXTRAIN_SECRET'])): json.dump(what, open(name,"
        " 'w'))\nsys.exit(75)\n"
    )
    python.chmod(0o755)
    subprocess.run(["bash", "-c", command + "\nwait"], cwd=tmp_path, check=True, timeout=20)
    assert json.loads((tmp_path / "jaxtrain" / "seen").read_text()) == [
        "-m",
        "jaxtrain.main",
        "--supervise",
        *rest,
    ]
    assert json.loads((tmp_path / "jaxtrain" / "secret").read_text()) == "5e" * 32
    assert (tmp_path / "jaxtrain" / "exit-code").read_text() == "75\n"


def test_every_pod_has_a_secret_of_its_own_that_no_command_line_shows(launch, tmp_path):
    copy = f"""#!{sys.executable}
import os, pathlib, stat, sys
for path in sys.argv[1:]:
    if path.endswith("jaxtrain-secret"):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        with open(pathlib.Path(os.environ["FAKE"]) / "secrets", "a") as file:
            file.write(pathlib.Path(path).read_text() + "\\n")
os.execv(os.path.join(os.environ["FAKE"], "gcloud"), ["gcloud", *sys.argv[1:]])
"""
    (tmp_path / "bin" / "gcloud").rename(tmp_path / "gcloud")
    (tmp_path / "bin" / "gcloud").write_text(copy)
    (tmp_path / "bin" / "gcloud").chmod(0o755)
    _, _, calls = launch("--retries=1", code=75, **{"code__0": "75\n0", "code__1": "75\n0"})
    secrets = (tmp_path / "secrets").read_text().split()
    assert len(set(secrets)) == 2 and all(len(bytes.fromhex(secret)) == 32 for secret in secrets)
    assert not any(secret in argument for secret in secrets for argv in calls for argument in argv)


@pytest.mark.parametrize(
    "option",
    ["--name=pod\nid", "--zone=a\nid", "--type=a\rb", "--version=a\x1bb", "--project=a\nb"],
)
def test_a_line_break_in_an_option_is_refused(launch, option):
    done, kinds, _ = launch(option, code=2)
    assert option.partition("=")[0] in done.stderr and not kinds


def test_a_queued_spot_pod_waits_and_is_made_again_after_a_preemption(launch):
    done, kinds, calls = launch(
        "--spot",
        queued_resources_describe__0="WAITING_FOR_RESOURCES\n0",
        queued_resources_describe="ACTIVE\n0",
        code__0="75\n0",
    )
    queue = ["queued-resources-create", "queued-resources-describe", "queued-resources-describe"]
    assert kinds == [
        *queue,
        *RUN[1:],
        "queued-resources-delete",
        *queue[:2],
        *RUN[1:],
        "queued-resources-delete",
    ]
    assert (
        "--spot" in calls[0]
        and "--node-id=pod" in calls[0]
        and "--runtime-version=tpu-ubuntu2204-base" in calls[0]
    )
    assert "waits for its resources" in done.stderr and "preempted; pod 2 of 21" in done.stderr


def test_a_pod_that_vanishes_counts_as_preempted(launch):
    _, kinds, _ = launch(
        code__0="ssh: connect to host\n255",
        tpu_vm_describe__0="PREEMPTED\n0",
        stream__0="step 1\n255",
    )
    assert kinds == [*RUN, "tpu-vm-describe", "tpu-vm-delete", *RUN, "tpu-vm-delete"]


def test_a_lost_connection_is_taken_up_where_it_broke(launch):
    _, kinds, calls = launch(stream__0="step 1\nstep 2\n255", code__0="\n255")
    assert kinds == [*RUN, "tpu-vm-describe", "stream", "code", "tpu-vm-delete"]
    streams = [
        a
        for c, k in zip(calls, kinds, strict=True)
        if k == "stream"
        for a in c
        if a.startswith("--command")
    ]
    assert "tail -n +1 " in streams[0] and "tail -n +3 " in streams[1]


def test_failures_end_with_a_reason_and_leave_no_pod(launch):
    done, kinds, _ = launch(code=70, **{"code__0": "70\n0"})
    assert "ended with code 70" in done.stderr and kinds[-1] == "tpu-vm-delete"


@pytest.mark.parametrize("step", ["tpu-vm-create", "tpu-vm-scp", "install", "start"])
def test_a_command_that_fails_ends_it_and_the_pod(launch, step):
    _, kinds, _ = launch(code=7, **{step: "7"})
    assert kinds == [*RUN[: RUN.index(step) + 1], "tpu-vm-delete"]


def test_retries_end(launch):
    done, kinds, _ = launch("--retries=1", code=75, **{"code__0": "75\n0", "code__1": "75\n0"})
    assert (
        kinds.count("tpu-vm-create") == 2
        and "1 retries are used up" in done.stderr
        and kinds[-1] == "tpu-vm-delete"
    )


def test_a_queue_that_fails(launch):
    done, kinds, _ = launch("--queued", code=1, **{"queued_resources_describe": "FAILED\n0"})
    assert "is FAILED" in done.stderr and kinds[-1] == "queued-resources-delete"


def test_keep(launch):
    assert launch("--keep")[1] == RUN


def test_a_dry_run_calls_nothing_and_prints_what_a_shell_can_read(launch):
    done, kinds, _ = launch("--queued", "--dry-run", rest=("--config=it's.py",))
    assert not kinds
    lines = subprocess.run(["bash", "-n"], input=done.stdout, text=True, capture_output=True)
    assert lines.returncode == 0 and done.stdout.count("gcloud compute tpus") == 7


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nmae=x"], "--nmae=x is unknown"),
        (["--name=X_1"], "--name=X_1"),
        (["--type="], "--type="),
        (["--retries=a"], "--retries=a"),
        (["--wheel=nowhere.whl"], "`make wheel` makes one"),
        (["--files=nowhere"], "--files=nowhere is no folder"),
    ],
)
def test_errors_are_reported_before_anything_is_called(launch, arguments, told):
    done, kinds, _ = launch(*arguments, code=2)
    assert told in done.stderr and not kinds


def test_every_worker_installs_the_wheel_and_has_the_files(launch, tmp_path):
    """The workers use their own Python if it is new enough, or one that uv fetches. No worker
    compiles anything."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.py").write_text("1")
    keep = tmp_path / "kept.tar.gz"
    (tmp_path / "bin" / "tar").write_text(
        f'#!/bin/bash\nPATH=${{PATH#*:}}\ntar "$@" && [[ $3 != -czf ]] || cp "$4" {keep}\n'
    )
    (tmp_path / "bin" / "tar").chmod(0o755)
    _, kinds, calls = launch(f"--files={tmp_path / 'mine'}")
    command = next(
        a for a in calls[kinds.index("install")] if a.startswith("--command=")
    ).removeprefix("--command=")
    assert "cargo" not in command and "rustup" not in command
    for old in (False, True):  # the worker's Python: its --version test fails, or not
        home = tmp_path / f"worker-{old}"
        (home / "bin").mkdir(parents=True)
        shutil.copy(keep, home / "jaxtrain.tar.gz")
        (home / "jaxtrain-secret").write_text("5e")
        fake = (
            'echo "$0 $*" >>"$HOME/said"; [[ $1 != -c ]] || exit OLD; [[ $1 != -m ]] || { mkdir -p'
            " $3/bin; for p in pip uv; do "
        )
        fake += (
            'cp "$0" $3/bin/$p; done; }; [[ $1 != venv ]] || { mkdir -p .venv/bin; cp "$0"'
            " .venv/bin/pip; }"
        )
        for name in ("python3", "python3.13", "python3.12", "python3.11"):
            (home / "bin" / name).write_text(f"#!/bin/bash\n{fake.replace('OLD', str(int(old)))}\n")
            (home / "bin" / name).chmod(0o755)
        environment = {"HOME": str(home), "PATH": f"{home}/bin:/usr/bin:/bin"}
        subprocess.run(["bash", "-c", command], cwd=home, env=environment, check=True, timeout=20)
        said = (home / "said").read_text()
        assert ("uv venv -q --seed --python 3.12 .venv" in said) == old
        assert (
            said.splitlines()[-1].endswith(
                "/pip install -q ./jaxtrain-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl[tpu]"
            )
            or said.splitlines()[-1]
            == ".venv/bin/pip install -q ./jaxtrain-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl[tpu]"
        )
        assert (home / "jaxtrain" / "own.py").read_text() == "1"
        assert (
            home / "jaxtrain" / "jaxtrain-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"
        ).read_bytes() == b"a wheel"


def test_no_config(launch):
    assert "no config" in launch(code=2, rest=())[0].stderr


def test_the_scripts_are_clean():
    shellcheck = shutil.which(
        "shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    if not shellcheck:
        pytest.skip("no shellcheck (extra: dev)")
    scripts = (SCRIPT, ROOT / "tests" / "slurm_up.sh", ROOT / ".ci" / "run")
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
