"""`jaxtrain doctor` as it is typed: alone, and as one process of a job."""

import json
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import jaxtrain
from jaxtrain.doctor import config, data, devices, host, in_subprocess, output, software
from jaxtrain.doctor.check import FAIL, OK, WARN, fail, ok
from loaders.audio import demo, remote, spectrogram
from loaders.film import demo_film, multimodal
from loaders.io import machine
from tests.support import installed, small_runs
from tests.support.processes import ROOT, at, free_port

# data that are not generated
NAMED = {"workload": "tests.support.toy", "loader": "loaders.film.multimodal"}


def start(folder, *arguments, limits=None, **environment):
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "GLOO", "NCCL"))
    }
    env = inherited | {
        "PYTHONPATH": f"{ROOT}:{folder}",
        "JAX_PLATFORMS": "cpu",
        "NO_GCE_CHECK": "true",
    }
    env |= {"JAXTRAIN_CACHE": str(folder / "cache")} | environment
    command = [sys.executable, "-m", "jaxtrain.cli", "doctor", "--json", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=env, stdout=-1, stderr=-1, text=True, preexec_fn=limits
    )


def found(process, *, code):
    output, errors = process.communicate(timeout=200)
    assert process.returncode == code, (process.returncode, output, errors)
    return json.loads(output) if output else None


def checks(told, verdict):
    return {(x["group"], x["name"]): x for x in told["checks"] if x["verdict"] == verdict}


def test_a_process_of_a_job_reports_on_itself_alone(folder):
    """Nobody listens at the coordinator, and the process has too few open files."""
    environment = at(free_port(), 1)
    process = start(
        folder,
        limits=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)),
        XLA_FLAGS="--xla_force_host_platform_device_count=2",
        **environment,
    )
    told = found(process, code=1)
    assert (told["process"], told["processes"], told["ok"]) == (1, 2, False)
    assert told["host"] == socket.gethostname()
    wrong, well = checks(told, FAIL), checks(told, OK)
    assert set(wrong) == {("host", "open files")}
    assert "ulimit -n" in wrong["host", "open files"]["remedy"]
    launcher = well["processes", "launcher"]["text"]
    assert launcher == (
        f"2 processes, with process 0 at {environment['JAXTRAIN_COORDINATOR']} (JAXTRAIN variables)"
    )
    assert "on 2 devices" in well["devices", "product"]["text"]


def tiny(folder, corpus, process=0, processes=1, wanted=0.0):
    """The arguments of the group `data`."""
    (folder / "tiny.py").write_text(small_runs.SOUNDS)
    overrides = []
    given = {"source": f"{folder}/tiny.py:{corpus}", "overrides": overrides}
    return given | {"process": process, "processes": processes, "wanted": wanted}


def test_alone_with_a_config(folder, corpus, monkeypatch):
    """This runs in this process. Groups that need a process of their own are tested with the
    command."""
    monkeypatch.setattr(data, "COUNTING", 0.2)
    (index, train, test, rate), _ = data.examine(**tiny(folder, corpus, wanted=1e9))
    assert index.verdict == train.verdict == test.verdict == OK
    assert "of 2 shards" in train.text and (train.name, test.name) == (
        "train examples",
        "test examples",
    )
    assert rate.verdict == WARN and "a step needs 1,000,000,000 of this process" in rate.text


def test_a_batch_that_takes_longer_than_the_count_counts(folder, corpus, monkeypatch):
    """If the time is up before the first sample, no sample counts as good."""
    monkeypatch.setattr(data, "COUNTING", 0.0)
    monkeypatch.setattr(data, "SAMPLING", -1.0)
    (_, train, test, rate), _ = data.examine(**tiny(folder, corpus))
    assert float(rate.text.split(" rows/s")[0].replace(",", "")) > 0, rate
    assert train.verdict == test.verdict == WARN and "0 of 2 shards" in train.text


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_shard_that_cannot_be_decoded(folder, corpus, monkeypatch, split):
    monkeypatch.setattr(data, "COUNTING", 0.0)
    broken = folder / "broken"
    shutil.copytree(corpus, broken)
    shard = min((broken / split).glob("*.arrow"))
    whole = shard.read_bytes()
    at_audio = whole.index(b"OggS") if b"OggS" in whole else whole.index(b"RIFF")
    shard.write_bytes(whole[:at_audio] + bytes(2000) + whole[at_audio + 2000 :])
    looked, _ = data.examine(**tiny(folder, broken))
    (wrong,) = [check for check in looked if check.verdict == FAIL]
    assert wrong.name == f"{split} examples", looked
    assert (
        "cannot be read; row" in wrong.text or "unreadable" in wrong.text or "row 0" in wrong.text
    )


@pytest.mark.parametrize(
    ("text", "name", "says"),
    [
        (
            f"def get_config():\n    return dict(train=dict(stepps=3), **{NAMED})\n",
            "fields",
            "stepps",
        ),
        ("def get_config(:\n", "file", "wrong.py, line 1"),
        ("import nothing_of_this_name\n", "file", "wrong.py, line 1"),
        ("def get_config():\n    return undefined\n", "file", "wrong.py, line 2"),
        ("import sys\nsys.exit(3)\n", "file", "wrong.py: SystemExit: 3"),
    ],
)
def test_config_errors_are_findings_about_the_config(folder, text, name, says):
    (folder / "wrong.py").write_text(text)
    looked, facts = config.examine(source=f"{folder}/wrong.py", overrides=[], count=2, kind="cpu")
    (wrong,) = [check for check in looked if check.verdict == FAIL]
    assert (wrong.group, wrong.name) == ("config", name) and says in wrong.text
    assert not facts


def test_each_error_of_a_config_is_a_finding_and_the_last_is_not_lost(folder):
    names = [f"no_such_field_of_this_name_{i}" for i in range(30)]
    text = f"def get_config():\n    return dict(train=dict.fromkeys({names}, 3), **{NAMED})\n"
    (folder / "wrong.py").write_text(text)
    looked, _ = config.examine(source=f"{folder}/wrong.py", overrides=[], count=2, kind="cpu")
    assert [
        name
        for check in looked
        for name in names
        if f"config.train.{name} does not exist" in check.text
    ] == names
    assert all(
        check.verdict == FAIL and len(check.text.split("does not exist")) == 2 for check in looked
    )


def test_a_long_list_is_whole_in_json_and_cut_in_a_line():
    reasons = [f"process {p} has another value" for p in range(60)]
    check = fail(
        "software",
        "same config",
        "\n".join(["they differ:", *(f"  {x}" for x in reasons)]),
        "use one",
    )
    assert check.text == f"they differ: {'; '.join(reasons)}"
    told = output.Report([check], 0, 1, "a", 0.0)
    assert reasons[-1] in json.loads(output.as_json(told))["checks"][0]["text"]
    line, _ = output.lines(told)
    assert len(line) < 700 and line.endswith("… (--json has the rest) → use one")


def test_a_loader_that_fails_is_not_blamed_on_the_file_system(folder, corpus, monkeypatch):
    def make_loader(*given, **named):
        raise KeyError("no such column")

    monkeypatch.setattr("loaders.audio.spectrogram.make_loader", make_loader)
    (wrong,), _ = data.examine(**tiny(folder, corpus))
    assert (wrong.verdict, wrong.name) == (
        FAIL,
        "loader",
    ) and "loaders.audio.spectrogram failed: KeyError" in wrong.text
    assert "no such column" in wrong.text and ", line " in wrong.text
    assert "file system" not in wrong.remedy and "report it" in wrong.remedy


def test_folders_are_known_where_a_plan_cannot_be_made(folder):
    given = {"source": f"{small_runs.rows(folder)}/rows.py", "overrides": [["mesh.data", "8"]]}
    (_, wrong), facts = config.examine(**given, count=2, kind="cpu")
    assert wrong.verdict == FAIL and wrong.name == "plan" and "2 devices" in wrong.text
    assert facts["workdir"].endswith("runs/rows") and "checkpoints" not in facts
    given["overrides"][-1] = ["checkpoint.folder", "~/saves"]
    _, facts = config.examine(**given, count=2, kind="cpu")
    assert facts["folder"] == os.path.expanduser("~/saves")
    place, n, each = facts["checkpoints"]
    assert place == os.path.expanduser("~/saves") and n == 4 and each > 1000


@pytest.mark.parametrize(("loader", "made"), [(multimodal, demo_film), (spectrogram, demo)])
def test_built_in_data_are_not_made_to_look_at_a_config(tmp_path, monkeypatch, loader, made):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    assert "the first run makes" in loader.Config().missing()
    made.folder().mkdir(parents=True)
    assert loader.Config().exists() and not loader.Config().missing()


def test_errors_of_jax_and_of_a_config_are_separate_findings(folder):
    """The wheel is wrong, and a config cannot be imported. Neither is blamed on the driver, and the
    other checks still run."""
    (folder / "broken.py").write_text("import nothing_of_this_name\n")
    broken = start(folder, "--config=broken.py", JAX_PLATFORMS="cuda", JAX_ENABLE_X64="1")
    told = found(broken, code=1)
    wrong = checks(told, FAIL)
    assert set(wrong) == {("devices", "jax"), ("devices", "options"), ("config", "file")}
    assert "JAX_ENABLE_X64 is True" in wrong["devices", "options"]["text"]
    assert (
        "with JAX_PLATFORMS=cuda" in wrong["devices", "jax"]["text"]
        and "jaxtrain[cuda12]" in wrong["devices", "jax"]["remedy"]
    )
    assert "nothing_of_this_name" in wrong["config", "file"]["text"]
    assert ("disk", "cache") in {(x["group"], x["name"]) for x in told["checks"]}


def test_data_in_a_store_are_not_copied(folder, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(remote, "fetch", None)  # fetching would fail
    given = tiny(folder, "http://127.0.0.1:9/birds")
    (index,), _ = data.examine(**given)
    assert index.verdict == WARN and "not here yet" in index.text
    looked, facts = config.examine(
        source=given["source"], overrides=given["overrides"], count=1, kind="cpu"
    )
    assert [check.verdict for check in looked] == [OK] and "workdir" in facts


@pytest.mark.parametrize("wrong", [1.0, 0.5, np.nan])
def test_a_device_that_computes_wrongly_is_seen(monkeypatch, wrong):
    """The error is in one of three products, at one place."""
    monkeypatch.setattr(devices, "SECONDS", 0.0)
    (check,) = devices._check_products(jax.devices()[:1])
    assert check.verdict == OK and "2 products of 256 × 256 on 1 devices are exact" in check.text
    calls = []

    def broken(function):
        def product(a, b):
            calls.append(len(calls))
            found = np.array(function(a, b))
            found[17, 3] += wrong if len(calls) == 2 else 0
            return found

        return product

    monkeypatch.setattr(jax, "jit", broken)
    (check,) = devices._check_products(jax.devices()[:1])
    assert (
        check.verdict == FAIL
        and "computed a product of small integers wrongly" in check.text
        and len(calls) == 2
    )


def nvidia_smi(folder, monkeypatch, *lines):
    """A stand-in for nvidia-smi, because the machines of the tests have none. With ``--id`` it
    lists only the named GPUs."""
    rows = "".join(
        f'[ -n "$3" ] && [ "$3" != --id={line[0]} ] || echo \'{line}\'\n' for line in lines
    )
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{rows}exit 0\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_values_of_nvidia_smi_are_checked_against_limits(tmp_path, monkeypatch):
    nvidia_smi(tmp_path, monkeypatch, "0, 470.82.01, 40000, 81559, 0", "1, 470.82.01, 1, 81559, 3")
    judged = {check.name: check for check in devices._check_driver([])}
    assert (
        judged["driver"].text == "470.82.01, of 2 GPUs memory in use and memory errors"
        and judged["driver"].verdict == OK
    )
    assert (
        judged["memory"].verdict == WARN
        and "GPU 0: 41.9 GB of 85.5 GB are in use" in judged["memory"].text
    )
    assert judged["ECC"].verdict == FAIL and "GPU 1 has had 3 memory errors" in judged["ECC"].text
    assert {check.name for check in devices._check_driver([0])} == {
        "memory",
        "driver",
    }, "GPU 1 is another process's"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert {check.name for check in devices._check_driver([])} == {"ECC", "driver"}


def test_values_missing_from_nvidia_smi_are_not_taken_as_healthy(tmp_path, monkeypatch):
    """A card has no ECC, and then the driver is missing."""
    nvidia_smi(tmp_path, monkeypatch, "0, 580.1, 1, 24000, [N/A]")
    (driver,) = devices._check_driver([])
    assert driver.verdict == OK and driver.text.endswith("; not readable: memory errors")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    (driver,) = devices._check_driver([])
    assert driver.verdict == FAIL and "nvidia-smi: NVIDIA-SMI has failed" in driver.text


def test_limits_are_read_of_every_cgroup_above(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "membership").write_text("0::/a/b\n")
    for place, most in (("a", "3000000000"), ("a/b", "max")):
        (tmp_path / place / "memory.max").write_text(most)
        (tmp_path / place / "memory.current").write_text("1000000000")
    folders = host.machine.cgroups(str(tmp_path / "membership"), str(tmp_path))
    assert host.of_cgroup("memory", folders) == (3000000000, 1000000000)
    assert host.of_cgroup("pids", folders) == (float("inf"), 0)
    assert host.machine.cgroups(str(tmp_path / "nothing")) == []


def test_each_check_of_a_host_is_a_finding():
    names = [check.name for check in host.examine(processes=1)]
    assert names == ["cores", "memory", "open files", "threads", "/dev/shm"]


@pytest.mark.parametrize(
    ("used", "there", "environment", "says"),
    [
        (8, 64, {}, ""),
        (2, 4, {}, ""),
        (1, 64, {}, "leaves 1"),
        (2, 64, {}, "leaves 2"),
        (8, 64, {"SLURM_CPUS_PER_TASK": "16"}, "SLURM_CPUS_PER_TASK=16"),
        (16, 64, {"SLURM_CPUS_PER_TASK": "16"}, ""),
    ],
)
def test_a_process_with_few_of_many_cores_is_warned(monkeypatch, used, there, environment, says):
    monkeypatch.setattr(host.machine, "cores", lambda: used)
    monkeypatch.setattr(os, "cpu_count", lambda: there)
    check = host._cores(environment)
    assert (check.verdict, says in check.text) == (WARN if says else OK, True), check
    assert not says or ("--cpus-per-task" in check.remedy and "--cpu-bind" in check.remedy)


def test_a_container_that_leaves_few_threads_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(host.machine, "cores", lambda: 8)
    monkeypatch.setattr(host.machine, "cgroups", lambda: [tmp_path])
    for most, verdict in (("max", OK), ("400", OK), ("200", FAIL)):
        (tmp_path / "pids.max").write_text(most)
        (tmp_path / "pids.current").write_text("100")
        check = host._threads()
        assert check.verdict == verdict and ("leaves" in check.text) == (most != "max")


def test_a_machine_that_does_not_say_what_memory_is_available(monkeypatch):
    """This is the case on macOS."""
    monkeypatch.setattr(machine, "meminfo", dict)
    check = host._memory()
    assert check.verdict == WARN and "not known" in check.text and "0 B" not in check.text


def test_shared_memory_is_reported_with_and_without_gpus():
    assert host._shared_memory(0).verdict == OK and host._shared_memory(8).name == "/dev/shm"


class Gpu:
    platform, device_kind = "gpu", "NVIDIA H100"


@pytest.mark.parametrize(
    ("found", "environment", "verdict", "says"),
    [
        (8, {}, OK, "8 ×"),
        (7, {}, FAIL, "this machine has 8"),
        (4, {"SLURM_GPUS_ON_NODE": "4"}, OK, "4 ×"),
        (3, {"SLURM_GPUS_ON_NODE": "4"}, FAIL, "SLURM gave 4"),
        (8, {"SLURM_GPUS_ON_NODE": "4"}, FAIL, "SLURM gave 4"),
        (2, {"CUDA_VISIBLE_DEVICES": "0,1"}, OK, "2 ×"),
    ],
)
def test_gpus_that_jax_does_not_find_are_missed_by_the_one_process_of_a_node(
    monkeypatch, found, environment, verdict, says
):
    monkeypatch.setattr(
        devices.machine, "accelerators", lambda: [pathlib.Path(f"/dev/nvidia{i}") for i in range(8)]
    )
    check = devices._check_count([Gpu()] * found, [], environment)
    assert check.verdict == verdict and says in check.text


def device(platform, **more):
    return types.SimpleNamespace(platform=platform, device_kind=platform, **more)


@pytest.mark.parametrize(
    ("paths", "vendors", "environment", "verdict", "says"),
    [
        (["vfio/0", "vfio/1"], ["0x1ae0", "0x1ae0"], {}, FAIL, "this machine has 2 TPU chips"),
        (["accel0"], [], {}, FAIL, "this machine has 1 TPU chips"),
        # a host of virtual machines
        (["vfio/0", "vfio/1"], ["0x10de", "0x8086"], {}, OK, "1 × cpu"),
        (["vfio/0", "vfio/1"], [], {}, OK, "1 × cpu"),
        (["vfio/0"], ["0x1ae0"], {"JAX_PLATFORMS": "cpu"}, OK, "1 × cpu"),
        (["kfd"], [], {}, OK, "1 × cpu"),
    ],
)
def test_accelerators_that_jax_leaves_alone_are_seen(
    tmp_path, monkeypatch, paths, vendors, environment, verdict, says
):
    for group, vendor in enumerate(vendors):
        place = tmp_path / "kernel" / "iommu_groups" / str(group) / "devices" / "0000:00:05.0"
        place.mkdir(parents=True)
        (place / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(
        devices.machine, "accelerators", lambda: [pathlib.Path("/dev", path) for path in paths]
    )
    found = devices.accelerators(str(tmp_path))
    monkeypatch.setattr(devices, "accelerators", lambda: found)
    check = devices._check_count(
        [types.SimpleNamespace(platform="cpu", device_kind="cpu")], [], environment
    )
    assert check.verdict == verdict and says in check.text


def test_the_installed_packages_and_the_commit_are_named(monkeypatch):
    monkeypatch.setattr(software.cluster, "commit", lambda: "abc-dirty")
    check = software.examine()
    assert check.verdict == OK
    assert f"jaxtrain {jaxtrain.__version__} (abc-dirty), jax {jax.__version__}" in check.text


def test_a_check_that_crashes_or_hangs_is_a_finding(tmp_path, monkeypatch):
    package = tmp_path / "jaxtrain" / "doctor"
    package.mkdir(parents=True)
    (package / "crash.py").write_text(
        "import os, sys\ndef examine():\n    print('the driver says no', file=sys.stderr)\n   "
        " os.abort()\n"
    )
    (package / "hang.py").write_text("import time\ndef examine():\n    time.sleep(60)\n")
    more = (
        f"import jaxtrain.doctor; jaxtrain.doctor.__path__.append({str(package)!r})\nimport"
        " jaxtrain.doctor.in_subprocess"
    )
    monkeypatch.setattr(
        in_subprocess,
        "PROGRAM",
        in_subprocess.PROGRAM.replace("import jaxtrain.doctor.in_subprocess", more),
    )
    (check,), _ = in_subprocess.examine("crash", {}, within=100, remedy="see dmesg")
    assert (
        check.verdict == FAIL
        and "ended by SIGABRT: the driver says no" in check.text
        and check.remedy == "see dmesg"
    )
    (check,), _ = in_subprocess.examine("hang", {}, within=1, remedy="mount it again")
    assert check.verdict == FAIL and "no answer within 1 s" in check.text


def test_findings_are_lines_in_the_order_of_their_groups():
    found = [fail("disk", "workdir", "it is full", "free some"), ok("host", "cores", "8 cores")]
    told = output.Report(found, 3, 6, "node1", 3.2)
    assert list(output.lines(told)) == [
        "process 3 of 6, on node1",
        "ok    host: cores    8 cores",
        "fail  disk: workdir  it is full → free some",
        "1 ok, 0 warn, 1 fail, in 3 s",
    ]
    groups = [check["group"] for check in json.loads(output.as_json(told))["checks"]]
    assert groups == ["host", "disk"]


@pytest.mark.slow
@installed.needs("bird")
def test_a_healthy_run(folder, corpus):
    """It is the second of two processes, which both read their own rows."""
    config = (f"--config=tiny.py:{corpus}", "--config.loader=loaders.audio.spectrogram")
    told = found(start(folder, *config, **at(free_port(), 1)), code=0)
    assert told["ok"] and not checks(told, FAIL)
    assert {
        ("disk", "workdir"),
        ("disk", "free space"),
        ("data", "train examples"),
        ("data", "test examples"),
        ("data", "rate"),
    } <= set(checks(told, OK))
