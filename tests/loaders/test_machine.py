"""Cores and memory that a process may use, on any machine."""

import math
import os
import platform
import signal
import subprocess
import sys

import pytest

from loaders.io import machine


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Quotas of a cgroup and its ancestors, as the kernel writes them."""
    (tmp_path / "cgroup").write_text("4:memory:/other\n0::/job/step\n")
    (tmp_path / "job" / "step").mkdir(parents=True)

    def limits(**texts) -> float:
        for name, text in texts.items():
            (tmp_path / ("job" if name == "job" else "job/step") / "cpu.max").write_text(text)
        return machine._quota(machine.cgroups(str(tmp_path / "cgroup"), str(tmp_path)))

    return limits


def test_the_smallest_quota_on_the_way_to_the_root_binds(cgroup):
    assert cgroup() == math.inf
    assert cgroup(job="max 100000\n", step="max 100000\n") == math.inf
    assert cgroup(job="150000 100000\n") == 1.5
    assert cgroup(step="50000 100000\n") == 0.5


@pytest.mark.parametrize("quota, expected", [(math.inf, 6), (2.5, 3), (0.1, 1), (64.0, 6)])
def test_cores_are_those_of_the_mask_within_the_quota(monkeypatch, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(machine, "_quota", lambda folders: quota)
    assert machine.cores() == expected


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_without_affinity_all_cores_count(monkeypatch, system):
    """Systems other than Linux have no affinity masks."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(machine, "_quota", lambda folders: math.inf)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert machine.cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.cores() == 1


def test_the_most_memory_that_was_held_is_in_bytes():
    """On every system, an array of 64 MB is counted, and the result is less than the machine's
    memory."""
    held = bytearray(64 << 20)
    assert (
        len(held) < machine.peak_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


def page_faults(program: str) -> int:
    """The page faults of ten rounds, after one warm-up round that is not counted. A separate
    process allocates, fills and frees 64 MB in each."""
    rounds = "x = numpy.ones(8 << 20); del x\n"
    counted = "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)"
    begin = "begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt"
    program = (
        "import numpy, resource\nfrom loaders.io import"
        f" machine\n{program}\n{rounds}{begin}\n{rounds * 10}{counted}"
    )
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_is_freed_is_taken_again():
    pages = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert page_faults("") > 9 * pages / 512, "glibc keeps it by itself, and nothing is to be done"
    assert page_faults("assert machine.keep_freed_memory()") < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_that_is_kept_can_be_given_back():
    """Freed memory below memory in use can be given back, too."""
    held = "int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE') >> 20"
    program = f"""
import os, numpy
from loaders.io import machine
machine.give_back_freed_memory()  # nothing is kept yet
assert machine.keep_freed_memory()
x, above = numpy.ones(8 << 20), numpy.ones(1 << 10)
whole = {held}
del x
print(whole - ({held}))
machine.give_back_freed_memory()
print(whole - ({held}), above.sum())
"""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    kept, returned, above = map(float, found.stdout.split())
    assert kept < 2 and returned > 60 and above == 1024


def test_hosts_of_accelerators_are_left_alone(monkeypatch):
    monkeypatch.setattr(machine, "accelerators", lambda: ["/dev/nvidia0"])
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert not machine.keep_freed_memory()


def test_what_the_environment_says_of_malloc_stays(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
    assert not machine.keep_freed_memory()


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_a_signal_that_the_shell_ignores_is_not_handled(monkeypatch, name):
    names = ["SIGINT", "SIGTERM", "SIGHUP"]
    assert signal.SIGTERM in machine.signal_numbers(names)
    monkeypatch.setattr(signal, "getsignal", {getattr(signal, name): signal.SIG_IGN}.get)
    assert getattr(signal, name) not in machine.signal_numbers(names)
    assert len(machine.signal_numbers(names)) == 2
