"""Runs a command under limits, and reports effects that no input may cause.

A command may refuse any input. It may not end by a signal, print a traceback, hang, take memory
without bound, leave descriptors open, or end with an undocumented code. It may not open a file that
no user named.
"""

import ctypes
import json
import os
import pathlib
import re
import struct
import subprocess
import sys
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
CODES = (0, 1, 2, 75, 130)  # jaxtrain.commands.arguments documents them
SECONDS = 300  # [s] of a clock, on a shared machine: more counts as a hang
CPU = 60  # [s] of a core
# [bytes] of address space beyond that of the imports; compilers and thread pools reserve much
MEMORY = 6 << 30
PEAK = 2 << 30  # [bytes] resident
DESCRIPTORS = 256
CRASHES = (
    "Traceback (most recent call last)",
    "panicked at",
    "Fatal Python error",
    "LEAKED DESCRIPTOR",
    "terminate called",
)


class Outcome(NamedTuple):
    """How a command ended."""

    code: int | None
    text: str  # its output
    problems: tuple[str, ...]  # violations that no input may cause

    def __str__(self) -> str:
        text = self.text if len(self.text) < 2000 else f"{self.text[:1000]} … {self.text[-1000:]}"
        return f"{'; '.join(self.problems) or 'ok'}; exit code {self.code}\n{text}"


class Zygote:
    """A process that runs commands in forks of itself (zygote.py)."""

    def __init__(self, cache: pathlib.Path, *, xla_flags: str = ""):
        environment = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith(("JAX_", "XLA_", "SLURM_"))
            },
            "JAX_PLATFORMS": "cpu",
            "JAXTRAIN_CACHE": str(cache),
            "NO_GCE_CHECK": "true",
            "OMP_NUM_THREADS": "2",
            "PATH": os.pathsep.join([str(HERE / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": xla_flags,
            "COLUMNS": "200",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=cache,
        )
        assert self._process.stdout.readline().strip() == "ready"

    def run(
        self,
        argv: list[str],
        folder: pathlib.Path,
        *,
        protected: pathlib.Path | None = None,
        codes=CODES,
    ) -> Outcome:
        """Runs jaxtrain with ``argv`` in ``folder``. It may leave nothing of ``input`` open.

        ``protected``: a folder whose files must not be opened, and to which nothing may be added.
        """
        log = folder / "command.log"
        request = {
            "argv": argv,
            "log": str(log),
            "folder": str(folder),
            "input": str(folder / "input"),
            "seconds": SECONDS,
            "cpu": CPU,
            "memory": MEMORY,
            "descriptors": DESCRIPTORS,
        }
        before = sorted(protected.iterdir()) if protected else []
        with Watch(before) as watch:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
        text = log.read_text(errors="replace")
        problems = [f"it printed {word!r}" for word in CRASHES if word in text]
        if answer["hung"]:
            problems.append(f"it hung: more than {SECONDS} s")
        elif answer["signal"]:
            problems.append(f"it ended by signal {answer['signal']}")
        elif answer["code"] not in codes:
            problems.append(f"it ended with code {answer['code']}, which is not documented")
        elif answer["code"] in (1, 2) and not text.strip():
            problems.append("it refused without a word")
        if answer["peak"] > PEAK:
            problems.append(f"it took {answer['peak'] / 1e9:.1f} GB of memory")
        problems += [f"it opened {name}" for name in watch.opened]
        if protected and sorted(protected.iterdir()) != before:
            problems.append(f"it wrote into {protected}")
        return Outcome(answer["code"], text, tuple(problems))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)


class Watch:
    """Notices which files are opened, by any code in any process. It notices nothing on systems
    without inotify."""

    OPENED, NONBLOCK, CLOEXEC = 0x20, os.O_NONBLOCK, os.O_CLOEXEC

    def __init__(self, files: list[pathlib.Path]):
        self._files, self.opened = files, []

    def __enter__(self) -> "Watch":
        self._names, self._descriptor = {}, -1
        if sys.platform == "linux":
            libc = ctypes.CDLL(None, use_errno=True)
            self._descriptor = libc.inotify_init1(self.NONBLOCK | self.CLOEXEC)
            for file in self._files:
                self._names[
                    libc.inotify_add_watch(self._descriptor, os.fsencode(file), self.OPENED)
                ] = str(file)
        return self

    def __exit__(self, *_) -> None:
        if self._descriptor < 0:
            return
        try:
            while events := os.read(self._descriptor, 65536):
                while events:
                    watch, _, _, length = struct.unpack_from("iIII", events)
                    self.opened.append(self._names.get(watch, "?"))
                    events = events[16 + length :]
        except BlockingIOError:
            pass
        finally:
            os.close(self._descriptor)


def readable(name: str) -> str:
    """A name as a test's id."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
