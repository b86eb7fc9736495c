"""The times of a program's kernels on this machine's CPUs, by JAX's profiler."""

import collections
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax


def of_kernels(call: Callable[[], Any], n_calls: int) -> dict[str, float]:
    """Call a program so often, and return each instruction's name -> seconds of one execution.

    Of all executions the quickest quarter ends there: other processes of a busy machine do not
    count.
    """
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="jaxtrain-") as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(n_calls):
                jax.block_until_ready(call())
        [path] = pathlib.Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                seconds[event.name].append(1e-9 * max(event.duration_ns, 1.0))
    return {name: sorted(each)[len(each) // 4] for name, each in seconds.items()}
