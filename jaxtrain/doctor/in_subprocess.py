"""A group of checks in a subprocess, where a driver may crash, or a dead file server hang."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from jaxtrain.doctor.check import Found, fail, from_json

# -P: the current folder is on the path only if it is on that of this process.
PROGRAM = """import json, sys
asked = json.load(sys.stdin)
sys.path[:] = asked["path"]
import jaxtrain.doctor.in_subprocess as in_subprocess
in_subprocess.answer(asked)
"""
NO_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def examine(group: str, arguments: Any, *, within: float, remedy: str, crashed: str = "") -> Found:
    """Run ``examine(**arguments)`` of jaxtrain.doctor.GROUP. A crash or a hang is a finding.

    ``crashed``: the remedy for a crash, if it is another than for a hang.
    """
    asked = {"path": sys.path, "group": group, "arguments": dict(arguments)}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ if group == "devices" else {**os.environ, **NO_DEVICES},
        )
        try:
            output, _ = process.communicate(json.dumps(asked).encode(), timeout=within)
            found = json.loads(output)
            return [from_json(each) for each in found["checks"]], dict(found["facts"])
        except subprocess.TimeoutExpired:
            process.kill()  # it may hang in the kernel, so there is no wait for its end
            return [fail(group, "answer", f"no answer within {within:g} s", remedy)], {}
        except (ValueError, KeyError, TypeError):
            code = process.returncode
            errors.seek(0)
            lines = errors.read()[-4000:].decode(errors="replace").strip().splitlines()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            text = f"the check ended {how}: {lines[-1] if lines else 'without a message'}"
            return [fail(group, "answer", text, crashed or remedy)], {}


def answer(asked: Mapping[str, Any]) -> None:
    """Print the findings, in the subprocess. Libraries print to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    checks, facts = importlib.import_module(f"jaxtrain.doctor.{asked['group']}").examine(
        **asked["arguments"]
    )
    json.dump({"checks": checks, "facts": facts}, output)
    output.flush()
    os._exit(0)  # the end of a driver may hang
