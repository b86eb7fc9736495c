"""Runs a group of checks in a process of its own: a driver may crash there, and a dead file server may hold it for ever."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from jaxtrain.doctor.check import Check, fail, from_json

# -P: what lies in the current folder is imported only if this process would import it, too.
PROGRAM = "import json, sys; asked = json.load(sys.stdin); sys.path[:] = asked['path']; import jaxtrain.doctor.apart as apart"
PROGRAM += "; apart.answer(asked)"


class Apart:
    """``examine(**arguments)`` of jaxtrain.doctor.GROUP, begun at once."""

    def __init__(self, group: str, arguments: Mapping[str, Any], *, environment: Mapping[str, str] | None = None):
        self._group, self._began = group, time.monotonic()
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **(environment or {})},
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as asked:  # it has ended already, and says why
            asked.write(json.dumps({"path": sys.path, "group": group, "arguments": dict(arguments)}).encode())
        self._process.stdin = None

    def result(self, *, within: float, remedy: str, crashed: str = "") -> tuple[list[Check], dict[str, Any]]:
        """Its findings, and facts for other checks. One that crashed, or took longer than ``within`` [s], is a finding.

        Args:
          remedy: of one that took longer; and of one that crashed, unless ``crashed`` is another.
        """
        try:
            output, _ = self._process.communicate(timeout=max(self._began + within - time.monotonic(), 0.0))
            found = json.loads(output)
            return [from_json(each) for each in found["checks"]], dict(found["facts"])
        except subprocess.TimeoutExpired:
            self._process.kill()  # it may hang in the kernel, so that nothing waits for its end
            return [fail(self._group, "answer", f"no answer within {within:g} s", remedy)], {}
        except (ValueError, KeyError, TypeError):
            return [fail(self._group, "answer", self._end(), crashed or remedy)], {}
        finally:
            self._errors.close()

    def _end(self) -> str:
        code = self._process.returncode
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the check {how}: {lines[-1] if lines else 'without a word'}"


def answer(asked: Mapping[str, Any]) -> None:
    """What the process does: prints the findings of ``asked``. What libraries print goes to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(f"jaxtrain.doctor.{asked['group']}")
    checks, facts = module.examine(**asked["arguments"])
    json.dump({"checks": checks, "facts": facts}, output)
    output.flush()
    os._exit(0)  # a driver's own end may hang, and all is said
