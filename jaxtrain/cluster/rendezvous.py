"""A roll call before the run: every process connects to process 0, which looks whether all are there and all alike.

jax.distributed ends a process with an abort and without a name when another is late, with a segmentation fault when the
port is taken, and lets two runs that share a port mix. So the processes meet here first, on the same port, where each of
these is an error that says who and what. A process sends one line, JSON, and gets one line back once the roll call is over:

    → {"job": "…", "process": 3, "processes": 4, "host": "node7", "facts": {"config": {…}, "versions": {…}}}
    ← {"error": "", "stopped": false}    all are there and agree; or the reason, the same for all

A process that a signal asks to stop while it waits sends one more line, and the roll call ends for all.
"""

import json
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LINE = 1 << 22  # bytes of the longest line that is listened to


class RendezvousError(RuntimeError):
    """The processes did not come together, or are not alike."""


class Stopped(RendezvousError):
    """A process was asked to stop while the others were waited for."""


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
    """Returns once all processes have told that they are there, with equal facts.

    Args:
      coordinator: host:port, where process 0 listens.
      job: the same in all processes of this run, and in no other run.
      facts: nested dictionaries that must be equal in all processes.
      timeout: seconds within which all must have come.
      leave: asked all the time; the wait ends when it holds.

    Raises:
      RendezvousError: with the processes' numbers: who has not come, or differs in what; the port is taken.
      Stopped: ``leave`` held, here or in another process.
    """
    hello = {"job": job, "process": process, "processes": processes, "host": socket.gethostname(), "facts": facts}
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + timeout
    if process == 0:
        verdict = _call(hello, int(port), deadline, timeout, leave)
    else:
        verdict = _answer(hello, host.strip("[]"), int(port), deadline, timeout, leave)
    if verdict["error"]:
        raise (Stopped if verdict["stopped"] else RendezvousError)(verdict["error"])


def _call(hello: dict, port: int, deadline: float, timeout: float, leave: Callable[[], Any]) -> dict:
    """Process 0's side. Returns the verdict."""
    there: dict[int, tuple[dict, socket.socket]] = {}
    verdict = {"error": f"process 0 ({hello['host']}) has failed", "stopped": False}
    with _listen(port, min(deadline, time.monotonic() + 10), leave) as listener, selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, None)
        try:
            verdict = _verdict(selector, listener, hello, there, deadline, timeout, leave)
        finally:
            for _, connection in there.values():
                _reply(connection, verdict)
            for key in list(selector.get_map().values()):
                key.fileobj.close()
    return verdict


def _verdict(
    selector: selectors.BaseSelector,
    listener: socket.socket,
    hello: dict,
    there: dict,
    deadline: float,
    timeout: float,
    leave: Callable[[], Any],
) -> dict:
    while len(there) < hello["processes"] - 1:
        if leave():
            return {"error": f"process 0 ({hello['host']}) was asked to stop while it waited for others", "stopped": True}
        if time.monotonic() > deadline:
            late = _listed([p for p in range(1, hello["processes"]) if p not in there])
            where = f"{hello['host']}:{listener.getsockname()[1]}"
            return {"error": f"{late} of {hello['processes']} did not come to {where} within {timeout:g} s", "stopped": False}
        for key, _ in selector.select(0.2):
            if key.data is None:
                connection, _ = listener.accept()
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, bytearray())
            elif (stopped := _hear(key, selector, hello, there)) is not None:
                return {"error": f"process {stopped} was asked to stop while it waited for others", "stopped": True}
    return {"error": differences([hello, *(there[p][0] for p in sorted(there))]), "stopped": False}


def _listen(port: int, deadline: float, leave: Callable[[], Any]) -> socket.socket:
    """The port, for this process alone: gRPC would share it with another run's."""
    both = socket.has_dualstack_ipv6()
    while True:
        try:
            # create_server sets SO_REUSEADDR: a listener is in the way, connections that a former run has left are not.
            family = socket.AF_INET6 if both else socket.AF_INET
            return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=1024)
        except OSError as error:
            if time.monotonic() > deadline or leave():
                raise RendezvousError(
                    f"process 0 ({socket.gethostname()}) cannot listen on port {port}: {error.strerror}. If another run has "
                    "it, choose another port"
                ) from error
        time.sleep(0.5)


def _hear(key: selectors.SelectorKey, selector: selectors.BaseSelector, hello: dict, there: dict) -> int | None:
    """Reads what a connection has to say. A whole line is a process; its end, one that has left; returns one that stops."""
    connection, heard = key.fileobj, key.data
    known = next((p for p, (_, c) in there.items() if c is connection), None)
    try:
        data = connection.recv(1 << 16)
    except OSError:
        data = b""
    if data and known is not None:
        return known
    heard += data
    if data and b"\n" not in heard and len(heard) < LINE:
        return None
    refusal = ""
    if data:
        try:
            other = json.loads(heard)
            refusal = _refusal(hello, other, there)
        except (ValueError, KeyError, TypeError):
            refusal = "that was no process of a run"
        if not refusal:
            there[other["process"]] = (other, connection)
            return None
        _reply(connection, {"error": refusal, "stopped": False})
    there.pop(known, None)
    selector.unregister(connection)
    connection.close()
    return None


def _refusal(hello: dict, other: dict, there: Mapping) -> str:
    if other["job"] != hello["job"]:
        return f"another run's process 0 ({hello['host']}) listens here: {hello['job']}, not {other['job']}"
    if other["processes"] != hello["processes"]:
        return (
            f"process {other['process']} ({other['host']}) is of {other['processes']} processes, and process 0 "
            f"({hello['host']}) of {hello['processes']}"
        )
    if other["process"] in there or not 0 < other["process"] < hello["processes"]:
        first = there[other["process"]][0]["host"] if other["process"] in there else hello["host"]
        return f"there is a process {other['process']} already, on {first}, and one more on {other['host']}"
    return ""


def _reply(connection: socket.socket, verdict: dict) -> None:
    try:
        connection.setblocking(True)
        connection.settimeout(5)
        connection.sendall(json.dumps(verdict).encode() + b"\n")
    except OSError:
        pass  # it has left; the others are told


def _answer(hello: dict, host: str, port: int, deadline: float, timeout: float, leave: Callable[[], Any]) -> dict:
    """Any other process's side. Returns the verdict."""
    name, reason = f"process {hello['process']} ({hello['host']})", "no answer"
    while not leave():
        if time.monotonic() > deadline:
            error = f"{name} found no process 0 at {host}:{port} within {timeout:g} s: {reason}"
            return {"error": error, "stopped": False}
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                connection.settimeout(0.3)
                # Process 0 knows who is late and says so; it may have begun to wait some time after this process.
                heard = b""
                while not heard.endswith(b"\n") and time.monotonic() < deadline + 10:
                    if leave():
                        connection.sendall(b"stop\n")
                        break
                    try:
                        data = connection.recv(1 << 16)
                    except TimeoutError:
                        continue
                    if not data:
                        raise ConnectionError("it has left")
                    heard += data
                else:
                    if not heard:
                        return {"error": f"{name} has waited for others in vain; process 0 does not answer", "stopped": False}
                    return json.loads(heard)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        time.sleep(0.3)
    return {"error": f"{name} was asked to stop while it waited for others", "stopped": True}


def differences(told: Sequence[Mapping[str, Any]]) -> str:
    """Which processes differ from most of the others in what; "" when they are alike."""
    flat = [_flat(t["facts"]) for t in told]
    lines = []
    for key in sorted({key for f in flat for key in f}):
        values = [f.get(key, "nothing") for f in flat]
        usual = Counter(values).most_common(1)[0][0]  # the first of equals is process 0's
        for value in sorted({v for v in values if v != usual}):
            who = [t["process"] for t, v in zip(told, values, strict=True) if v == value]
            hosts = ", ".join(sorted({t["host"] for t in told if t["process"] in who and "host" in t}))
            lines.append(f"  {_listed(who)}{hosts and f' ({hosts})'}: {key} is {value}, elsewhere {usual}")
    return "\n".join([f"the {len(told)} processes of this run are not alike:", *lines]) if lines else ""


def _flat(tree: Any, path: str = "") -> dict[str, str]:
    if isinstance(tree, Mapping) and tree:
        return {k: v for name, x in tree.items() for k, v in _flat(x, f"{path}.{name}".lstrip(".")).items()}
    return {path: json.dumps(tree)}


def _listed(processes: Sequence[int]) -> str:
    if len(processes) > 16:
        return f"{len(processes)} processes ({processes[0]} … {processes[-1]})"
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"
