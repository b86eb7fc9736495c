"""The software of a process."""

import platform

from jaxtrain.doctor.check import Check, ok
from jaxtrain.parallel import cluster

GROUP = "software"


def examine() -> Check:
    packages = cluster.versions()
    installed = f"jaxtrain {packages['jaxtrain']}"
    commit = cluster.commit()
    if commit:
        installed += f" ({commit})"
    python = platform.python_version()
    return ok(GROUP, "installation", f"{installed}, jax {packages['jax']}, Python {python}")
