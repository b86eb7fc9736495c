"""Give every test eight CPU devices, make broadcasts between ranks errors, and keep compiled
programs between runs."""

import ctypes
import errno
import gc
import logging
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest

pytest.register_assert_rewrite("tests.support")

from tests.support.xla import KEEPS_PROGRAMS, SOON  # noqa: E402

# These are set before jax is imported: afterwards neither has an effect.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {SOON}"
)
# XLA runs independent collectives of a program at once, each on a thread of a pool. The pool has as
# many threads as there are cores (or NPROC). With few threads, eight devices can wait for each
# other in different collectives for ever (jax 0.10.2 aborts after 40 s).
os.environ.setdefault("NPROC", "32")
# a shell's background job: the tests' runs would ignore SIGINT, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Images of containers often forbid that bytecode is kept: each process, hundreds of them in the
# tests, would compile all modules again, and each worker rewrite the assertions of all test files.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    sys.dont_write_bytecode = False
os.environ["NO_GCE_CHECK"] = "true"  # the tests' runs ask no metadata server on any machine

import jax  # noqa: E402

from jaxtrain.parallel import cluster  # noqa: E402

# Tracing makes many objects that live on: with Python's own thresholds the collector walks them
# again and again, 8 % of the time of tests that compile.
gc.set_threshold(100_000, 50, 100)

jax.config.update("jax_numpy_rank_promotion", "raise")
cluster.start_jax()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
for name in KEEPS_PROGRAMS:  # those that tests start
    os.environ[name] = str(jax.config.values[name.lower()])


# One worker runs all tests of a file. The files that take more than 10 s of CPU time, or wait for
# more than 30 s, begin first, with the longest at the front.
LONGEST = (
    "test_hostile_commands.py",
    "test_hosts.py",
    "test_reliability.py",
    "test_train.py",
    "test_steps.py",
    "test_resume.py",
    "test_audio_language_run.py",
    "test_replay.py",
    "test_trm.py",
    "test_bird.py",
    "test_summary.py",
    "test_gpu_check.py",
    "test_matrix.py",
    "test_supervise.py",
    "test_pair_blocks.py",
    "test_audio_language.py",
    "test_trm_rollouts.py",
    "test_full_disks.py",
    "test_cli.py",
    "test_object_store.py",
    "test_generate_and_solve.py",
    "test_lora.py",
    "test_language_run.py",
    "test_doctor.py",
    "test_step.py",
    "test_workload.py",
    "test_trm_run.py",
    "test_steps_in_memory.py",
    "test_warm_process.py",
    "test_trm_contracts.py",
    "test_language_dropout.py",
    "test_install.py",
    "test_verify.py",
    "test_decode.py",
    "test_docs_commands.py",
    "test_embed.py",
    "test_tables.py",
    "test_planned_program.py",
    "test_residuals.py",
    "test_launch_slurm.py",
    "test_pages_of_runs.py",
    "test_giblet.py",
    "test_fit.py",
    "test_rendezvous.py",
    "test_lease.py",
    "test_attention.py",
    "test_export.py",
    "test_objectives.py",
    "test_paths.py",
    "test_docs.py",
    "test_docs_site.py",
    "test_installed.py",
    "test_giblet_run.py",
    "test_optimizer.py",
)


def pytest_addoption(parser):
    help = "write the skipped tests' names to FILE, for pytest @FILE"
    parser.addoption("--skipped", type=pathlib.Path, metavar="FILE", help=help)


def fetched(kind):
    """The environment of a compiler, fetched once into the cache. Without it the test is
    skipped."""
    from jaxtrain import plan  # imported here: most workers need no planner

    try:
        plan.set_up(kind)
    except plan.PlanError as error:
        pytest.skip(str(error))
    return plan.environment.folder(kind)


@pytest.fixture(scope="session")
def gpu_compiler():
    return fetched("gpu")


@pytest.fixture(scope="session")
def tpu_compiler():
    return fetched("tpu")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Recordings of 12 synthetic birds: 24 recordings to train, 13 to test."""
    from loaders.audio import demo

    return demo.ensure(tmp_path_factory.mktemp("corpus"), n_train=24, n_test=13)


@pytest.fixture
def folder(tmp_path):
    """A folder with toy.py, a run of the toy workload, and tiny.py, a small run of the bird
    encoder."""
    from tests.support import small_runs

    return small_runs.toy(small_runs.tiny(tmp_path))


@pytest.fixture
def ending():
    """A list of processes that do not outlive the test."""
    started = []
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def small_disk(tmp_path):
    """Make a disk of a number of kilobytes. It is unmounted after the test, or with ``lazily`` as
    soon as no process has it open."""
    mounted = []

    def make(kilobytes, *, lazily=False):
        disk = tmp_path / f"disk{len(mounted)}"
        disk.mkdir()
        if (
            os.geteuid() != 0
            or subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", disk]
            ).returncode
        ):
            pytest.skip("only root may mount a small file system")
        mounted.append(["umount", *(["--lazy"] if lazily else []), disk])
        return disk

    yield make
    # Python 3.12 keeps the frames of an error that a context manager changed, and a test's mapped
    # files in them
    gc.collect()
    for command in mounted:
        subprocess.run(command, check=True)


@pytest.fixture
def stale_files(monkeypatch):
    """Let files not open a number of times, or ever, as on NFS. Readers do not pause."""
    from jaxtrain.arrays import checksums

    left = {}
    really_open = os.open

    def open_unless_stale(path, *arguments, **named):
        if left.get(os.fspath(path), 0) > 0:
            left[os.fspath(path)] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
        return really_open(path, *arguments, **named)

    def make(*paths, times=math.inf):
        left.clear()
        left.update(dict.fromkeys(map(os.fspath, paths), times))

    monkeypatch.setattr(os, "open", open_unless_stale)
    monkeypatch.setattr(checksums, "PAUSES", (0.0, 0.0, 0.0))
    return make


@pytest.fixture
def hosts():
    """The names of two hosts, and a function that pulls the cable between them. A host is a network
    namespace."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    name = f"jt{os.getpid()}"
    names = [f"{name}-0", f"{name}-1"]
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    folders = []

    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True)

    try:
        ip("netns", "add", names[1])
        ip(
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            names[1],
        )
        for i, n in enumerate(names):
            ip("-n", n, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", n, "link", "set", device, "up")
            # `ip netns exec` shows these files as /etc/hosts: each host is known by its own
            # address, which collectives publish.
            folders.append(pathlib.Path("/etc/netns") / n)
            folders[-1].mkdir(parents=True)
            (folders[-1] / "hosts").write_text(
                f"127.0.0.1 localhost\n10.77.0.{i + 1} {socket.gethostname()}\n"
            )
        yield names, lambda: ip("-n", names[0], "link", "set", "cable", "down")
    finally:
        for n in names:
            subprocess.run(["ip", "netns", "del", n], capture_output=True)
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(autouse=True)
def handlers_of_this_test():
    """Restore the log handlers after each test: a command sets up a console on a stream that pytest
    then closes."""
    root, level = logging.getLogger(), logging.getLogger("jaxtrain").level
    before = list(root.handlers)
    yield
    root.handlers[:] = before
    logging.getLogger("jaxtrain").setLevel(level)


@pytest.fixture
def libtpu(tpu_compiler, monkeypatch):
    """XLA's compiler for TPUs in this very process, in the place that JAX searches first."""
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tpu_compiler / "libtpu" / "libtpu.so"))


def pytest_runtest_teardown(item, nextitem):
    """Return freed memory to the system after each file: commands that run here make malloc keep
    it."""
    if sys.platform == "linux" and (nextitem is None or nextitem.path != item.path):
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
            trim(0)


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_terminal_summary(terminalreporter):
    """Print a line for each promise that was tried. The tests are named test_promise_N_…, and a
    loop gives its number of trials by record_property."""
    if path := terminalreporter.config.getoption("skipped"):
        path.write_text(
            "".join(f"{report.nodeid}\n" for report in terminalreporter.stats.get("skipped", []))
        )
    rows: dict[str, list[float]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            found = re.search(r"::test_promises?_(\d+(?:_and_\d+)*)", report.nodeid)
            if not found or report.when != "call":
                continue
            trials = dict(report.user_properties).get("trials", 1)
            for promise in found[1].split("_and_"):
                row = rows.setdefault(promise, [0, 0, 0.0])
                row[0] += trials
                row[1] += outcome == "failed"
                row[2] += report.duration
    if rows:
        terminalreporter.section("promises")
        terminalreporter.write_line(
            "| promise | trials | failures | seconds |\n|---:|---:|---:|---:|"
        )
        for promise, (trials, failures, seconds) in sorted(
            rows.items(), key=lambda item: int(item[0])
        ):
            terminalreporter.write_line(f"| {promise} | {trials} | {failures} | {seconds:.0f} |")
