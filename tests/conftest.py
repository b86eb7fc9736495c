"""Eight CPU devices for every test; broadcasts between ranks are errors; compiled programs are kept between runs."""

import ctypes
import logging
import os
import pathlib
import re
import signal
import sys

from tests.support.xla import SOON

# Before jax is imported: afterwards neither has an effect.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {SOON}"
# XLA runs independent collectives of a program at once, each on a thread of a pool that has as many as there are cores (or
# NPROC): with few, eight devices can wait for each other in different ones for ever (jax 0.10.2: it aborts after 40 s).
os.environ.setdefault("NPROC", "32")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background: the tests' runs would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["NO_GCE_CHECK"] = "true"  # the tests' runs, on whatever machine, ask no metadata server

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxtrain.parallel import cluster  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
cluster.use_compilation_cache()


# A file is one worker's: those that take more than half a minute begin first, the longest of them before the others.
LONGEST = (
    "test_reliability.py",
    "test_train.py",
    "test_hostile_commands.py",
    "test_hosts.py",
    "test_steps.py",
    "test_bird.py",
    "test_giblet_run.py",
    "test_audio_language_run.py",
    "test_launch_slurm.py",
    "test_trm.py",
    "test_report.py",
    "test_object_store.py",
    "test_lease.py",
    "test_giblet_size.py",
    "test_step.py",
    "test_audio_language.py",
    "test_rendezvous.py",
    "test_matrix.py",
    "test_attention.py",
    "test_decode.py",
    "test_checkpointer.py",
    "test_language_run.py",
    "test_giblet.py",
    "test_fit.py",
    "test_objectives.py",
    "test_trm_run.py",
)


def pytest_addoption(parser):
    help = "write the skipped tests' names to FILE, for pytest @FILE"
    parser.addoption("--skipped", type=pathlib.Path, metavar="FILE", help=help)


def fetched(kind):
    """The environment of a compiler, fetched once and kept beneath the cache; where it cannot be had, the test skips."""
    from jaxtrain import plan  # here: most tests' workers need no planner

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


@pytest.fixture(autouse=True)
def handlers_of_this_test():
    """A command that a test calls sets up a console on the stream that pytest closes after that test."""
    root, level = logging.getLogger(), logging.getLogger("jaxtrain").level
    before = list(root.handlers)
    yield
    root.handlers[:] = before
    logging.getLogger("jaxtrain").setLevel(level)


@pytest.fixture
def libtpu(tpu_compiler, monkeypatch):
    """XLA's compiler for TPUs in this very process, where JAX looks for it first."""
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tpu_compiler / "libtpu" / "libtpu.so"))


def pytest_runtest_teardown(item, nextitem):
    """After each file, memory that its tests freed goes back to the system: commands that run here have malloc keep it."""
    if sys.platform == "linux" and (nextitem is None or nextitem.path != item.path):
        if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
            trim(0)


def pytest_collection_modifyitems(items):
    rank = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_terminal_summary(terminalreporter):
    """A line for each promise that was tried: tests are named test_promise_N_…; a loop says its trials by record_property."""
    if path := terminalreporter.config.getoption("skipped"):
        path.write_text("".join(f"{report.nodeid}\n" for report in terminalreporter.stats.get("skipped", [])))
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
        terminalreporter.write_line("| promise | trials | failures | seconds |\n|---:|---:|---:|---:|")
        for promise, (trials, failures, seconds) in sorted(rows.items(), key=lambda item: int(item[0])):
            terminalreporter.write_line(f"| {promise} | {trials} | {failures} | {seconds:.0f} |")
