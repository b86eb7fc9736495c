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

from jaxtrain.doctor.check import Findings, fail, from_json

# -P: the current folder is on the path only if it is on that of this process.
PROGRAM = """import json, sys
request = json.load(sys.stdin)
sys.path[:] = request["path"]
import jaxtrain.doctor.in_subprocess as in_subprocess
in_subprocess.answer(request)
"""
NO_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}


def examine(
    group: str, arguments: Mapping[str, Any], *, within: float, remedy: str, crashed: str = ""
) -> Findings:
    """Run ``examine(**arguments)`` of jaxtrain.doctor.GROUP. A crash or a hang is a finding.

    ``crashed``: the remedy for a crash, if it is another than for a hang.
    """
    request = {"path": sys.path, "group": group, "arguments": arguments}
    environment = dict(os.environ)
    if group != "devices":
        environment |= NO_DEVICES
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
        )
        try:
            output, _ = process.communicate(json.dumps(request).encode(), timeout=within)
            return _findings(output)
        except subprocess.TimeoutExpired:
            process.kill()  # it may hang in the kernel, so there is no wait for its end
            text = f"no answer within {within:g} s"
            return Findings([fail(group, "answer", text, remedy)], {})
        except (ValueError, KeyError, TypeError):
            errors.seek(0)
            text = _describe_end(process.returncode, errors.read())
            return Findings([fail(group, "answer", text, crashed or remedy)], {})


def _findings(output: bytes) -> Findings:
    """Parse a subprocess's output. Raises ValueError, KeyError or TypeError for anything else."""
    answer = json.loads(output)
    checks = [from_json(check) for check in answer["checks"]]
    return Findings(checks, dict(answer["facts"]))


def _describe_end(code: int, errors: bytes) -> str:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    lines = errors[-4000:].decode(errors="replace").strip().splitlines()
    last_line = lines[-1] if lines else "without a message"
    return f"the check ended {how}: {last_line}"


def answer(request: Mapping[str, Any]) -> None:
    """Print the findings, in the subprocess. Libraries print to stderr."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    group = importlib.import_module(f"jaxtrain.doctor.{request['group']}")
    findings: Findings = group.examine(**request["arguments"])
    json.dump(findings._asdict(), output)
    output.flush()
    os._exit(0)  # the end of a driver may hang
