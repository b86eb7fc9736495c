"""A roll call before the run: every process connects to process 0, which checks that all are present and identical.

jax.distributed aborts when a process is late, without naming it, ends with a segmentation fault when the port is taken, and
lets two runs that share a port mix. So the processes meet here first, on the same port, where each of these is an error that
names the process and the reason. A process sends one line of JSON, and gets one line back once the roll call is over:

    → {"job": "…", "process": 3, "processes": 4, "host": "node7", "facts": {"config": {…}, "versions": {…}}}
    ← {"error": "", "stopped": false}    all are present and agree; or the reason, the same for all

A process that a signal asks to stop while it waits sends one more line, and the roll call ends for all.
"""

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LINE = 1 << 22  # [bytes] longest line that is read


class RendezvousError(RuntimeError):
    """The processes did not all connect, or they differ."""


class Stopped(RendezvousError):
    """A process was asked to stop while it waited for the others."""


def meet(
    coordinator: str,
    *,
    process: int,
    processes: int,
    job: str,
    facts: Mapping[str, Any],
    timeout: float,
    leave: Callable[[], Any] = lambda: False,
) -> None:
    """Returns once all processes have reported that they are present, with equal facts.

    Args:
      coordinator: host:port, where process 0 listens.
      job: the same in all processes of this run, and in no other run.
      facts: nested dictionaries that must be equal in all processes.
      timeout: seconds within which all must have connected.
      leave: called repeatedly during the wait, which ends when it returns true.

    Raises:
      RendezvousError: processes, by number, did not connect, or differ in named facts; the port is taken.
      Stopped: ``leave`` returned true, here or in another process.
    """
    hello = {"job": job, "process": process, "processes": processes, "host": socket.gethostname(), "facts": facts}
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    if process == 0:
        verdict = _hold_roll_call(hello, int(port), deadline, timeout, leave)
    else:
        verdict = _answer_roll_call(hello, host.strip("[]"), int(port), deadline, timeout, leave)
    if verdict["error"]:
        raise (Stopped if verdict["stopped"] else RendezvousError)(verdict["error"])


def _hold_roll_call(hello: dict, port: int, deadline: float, timeout: float, leave: Callable[[], Any]) -> dict:
    """Waits for all others, as process 0, and replies to them. Returns the verdict."""
    present: dict[int, tuple[dict, socket.socket]] = {}
    verdict = {"error": f"process 0 ({hello['host']}) has failed", "stopped": False}
    with _listen(port, min(deadline, time.monotonic() + 10), leave) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, None)
        try:
            verdict = _verdict(selector, listener, hello, present, deadline, timeout, leave)
        finally:
            for _, connection in present.values():
                _reply(connection, verdict)
            for key in list(selector.get_map().values()):
                _socket(key).close()
    return verdict


def _verdict(
    selector: selectors.BaseSelector,
    listener: socket.socket,
    hello: dict,
    present: dict,
    deadline: float,
    timeout: float,
    leave: Callable[[], Any],
) -> dict:
    while len(present) < hello["processes"] - 1:
        if leave():
            return {"error": f"process 0 ({hello['host']}) was asked to stop while it waited for others", "stopped": True}
        if time.monotonic() > deadline:
            late = _numbered([p for p in range(1, hello["processes"]) if p not in present])
            where = f"{hello['host']}:{listener.getsockname()[1]}"
            return {
                "error": f"{late} of {hello['processes']} did not connect to {where} within {timeout:g} s",
                "stopped": False,
            }
        for key, _ in selector.select(0.2):
            if key.data is None:
                connection, _ = listener.accept()
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, bytearray())
            elif (stopped := _receive(key, selector, hello, present)) is not None:
                return {"error": f"process {stopped} was asked to stop while it waited for others", "stopped": True}
    return {"error": differences([hello, *(present[p][0] for p in sorted(present))]), "stopped": False}


def _listen(port: int, deadline: float, leave: Callable[[], Any]) -> socket.socket:
    """Opens the port for this process alone: gRPC would share it with another run."""
    both = socket.has_dualstack_ipv6()
    while True:
        try:
            # create_server sets SO_REUSEADDR: another listener is an error, connections left by an earlier run are not.
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            if time.monotonic() > deadline or leave():
                raise RendezvousError(
                    f"process 0 ({socket.gethostname()}) cannot listen on port {port}: {error.strerror}. If another run uses "
                    "it, choose another port"
                ) from error
        time.sleep(0.5)


def _socket(key: selectors.SelectorKey) -> socket.socket:
    """What is registered here; a selector would also take a file's number."""
    assert isinstance(key.fileobj, socket.socket)
    return key.fileobj


def _receive(key: selectors.SelectorKey, selector: selectors.BaseSelector, hello: dict, present: dict) -> int | None:
    """Reads from a connection: a whole line admits a process, its end removes one. Returns the process that asks to stop."""
    connection, received = _socket(key), key.data
    known = next((p for p, (_, c) in present.items() if c is connection), None)
    try:
        data = connection.recv(1 << 16)
    except OSError:
        data = b""
    if data and known is not None:
        return known
    received += data
    if data and b"\n" not in received and len(received) < LINE:
        return None
    refusal = ""
    if data:
        try:
            other = json.loads(received)
            refusal = _refusal(hello, other, present)
        except (ValueError, KeyError, TypeError):
            refusal = "this was not a process of a run"
        if not refusal:
            present[other["process"]] = (other, connection)
            return None
        _reply(connection, {"error": refusal, "stopped": False})
    present.pop(known, None)
    selector.unregister(connection)
    connection.close()
    return None


def _refusal(hello: dict, other: dict, present: Mapping) -> str:
    if other["job"] != hello["job"]:
        return f"another run's process 0 ({hello['host']}) listens here: {hello['job']}, not {other['job']}"
    if other["processes"] != hello["processes"]:
        return (
            f"process {other['process']} ({other['host']}) belongs to a run of {other['processes']} processes, and "
            f"process 0 ({hello['host']}) to one of {hello['processes']}"
        )
    if other["process"] in present or not 0 < other["process"] < hello["processes"]:
        first = present[other["process"]][0]["host"] if other["process"] in present else hello["host"]
        return f"two processes have the number {other['process']}: one on {first}, one on {other['host']}"
    return ""


def _reply(connection: socket.socket, verdict: dict) -> None:
    try:
        connection.setblocking(True)
        connection.settimeout(5)
        connection.sendall(json.dumps(verdict).encode() + b"\n")
    except OSError:
        pass  # it has left; the others are still answered


def _answer_roll_call(hello: dict, host: str, port: int, deadline: float, timeout: float, leave: Callable[[], Any]) -> dict:
    """Reports to process 0, as any other process, and waits for its reply. Returns the verdict."""
    name, reason = f"process {hello['process']} ({hello['host']})", "no answer"
    while not leave():
        if time.monotonic() > deadline:
            error = f"{name} found no process 0 at {host}:{port} within {timeout:g} s: {reason}"
            return {"error": error, "stopped": False}
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(0.3)
                # Process 0 names those who are late; it may have begun to wait later than this process.
                received = b""
                while not received.endswith(b"\n") and time.monotonic() < deadline + 10:
                    if leave():
                        connection.sendall(b"stop\n")
                        break
                    try:
                        data = connection.recv(1 << 16)
                    except TimeoutError:
                        continue
                    if not data:
                        raise ConnectionError("it closed the connection")
                    received += data
                else:
                    if not received:
                        return {"error": f"{name} waited for the others, and process 0 no longer answers", "stopped": False}
                    return json.loads(received)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        time.sleep(0.3)
    return {"error": f"{name} was asked to stop while it waited for others", "stopped": True}


def differences(reports: Sequence[Mapping[str, Any]]) -> str:
    """Lists the processes that differ from most others, and in which facts; "" when they are identical."""
    flat = [_flat(report["facts"]) for report in reports]
    lines = []
    for key in sorted({key for f in flat for key in f}):
        values = [f.get(key, "nothing") for f in flat]
        usual = Counter(values).most_common(1)[0][0]  # the first of equals is process 0's
        for value in sorted({v for v in values if v != usual}):
            who = [report["process"] for report, v in zip(reports, values, strict=True) if v == value]
            hosts = ", ".join(sorted({report["host"] for report in reports if report["process"] in who and "host" in report}))
            lines.append(f"  {_numbered(who)}{hosts and f' ({hosts})'}: {key} is {value}, elsewhere {usual}")
    return "\n".join([f"the {len(reports)} processes of this run differ:", *lines]) if lines else ""


def _flat(tree: Any, path: str = "") -> dict[str, str]:
    if isinstance(tree, Mapping) and tree:
        return {k: v for name, x in tree.items() for k, v in _flat(x, f"{path}.{name}".lstrip(".")).items()}
    return {path: json.dumps(tree)}


def _numbered(processes: Sequence[int]) -> str:
    if len(processes) > 16:
        return f"{len(processes)} processes ({processes[0]} … {processes[-1]})"
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
