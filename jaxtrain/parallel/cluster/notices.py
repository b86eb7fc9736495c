"""Google's metadata server: the pod of a TPU VM, and the announced end of the machine.

GCE_METADATA_HOST (or GCE_METADATA_IP) names another server than the usual one. With
NO_GCE_CHECK=true, and on machines that are not Google's, no server is asked.
"""

import pathlib
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from loaders.io import machine

POD = ("agent-worker-number", "worker-network-endpoints", "tpu-env")  # attributes of a TPU VM
# The values that announce the machine's end. A VM with TPUs or GPUs is not moved, but stopped.
NOTICES = {"maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE",), "preempted": ("TRUE",)}


def metadata_server(environment: Mapping[str, str]) -> str:
    """Return the metadata server's host, or "" if this is not a machine of Google's."""
    if environment.get("NO_GCE_CHECK", "").lower() in ("1", "true"):
        return ""
    host = environment.get("GCE_METADATA_HOST") or environment.get("GCE_METADATA_IP")
    if host:
        return host
    product = pathlib.Path("/sys/class/dmi/id/product_name")
    if product.exists() and product.read_text().startswith("Google"):
        return "169.254.169.254"
    return ""


def read(host: str, name: str, *, timeout: float = 5.0) -> str | None:
    """Read instance/``name``. None if the server has no such value or does not answer."""
    url = f"http://{host}/computeMetadata/v1/instance/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without a proxy
    try:
        with opener.open(request, timeout=timeout) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError):
        return None


def tpu_metadata(environment: Mapping[str, str]) -> dict[str, str]:
    """Read the attributes `POD` of a TPU VM. Empty without TPUs, or without the package libtpu."""
    chips = [path for path in machine.accelerators() if not path.name.startswith(("nvidia", "kfd"))]
    host = metadata_server(environment)
    if (
        not host
        or not chips
        or "TPU_SKIP_MDS_QUERY" in environment
        or not machine.has_package("libtpu")
    ):
        return {}
    values = {name: read(host, f"attributes/{name}") for name in POD}
    return {name: value for name, value in values.items() if value}


class Notices:
    """A thread that asks every ``pause`` s whether this machine will stop, and reports once."""

    def __init__(self, host: str, report: Callable[[str], None], *, pause: float = 5.0):
        self._host = host
        self._report = report
        self._pause = pause
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
        if host:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            for name, ends in NOTICES.items():
                if (answer := read(self._host, name)) in ends:
                    self._report(f"{name}={answer}")
                    return
            self._closed.wait(self._pause)
