"""Trace the next steps of a running run, and show their time by part.

    jaxtrain profile RUN [--steps N] [--all]

    jaxtrain profile runs/xcm-demo --steps 3

The run notices within a second or so, waits for its device once before and once behind those steps,
and goes on. Its numbers stay as they are. The trace lies in RUN/traces, for
https://ui.perfetto.dev, XProf and `jaxtrain report`. To trace chosen steps:
--config.metrics.profile='(100, 103)'.
"""

import json
import pathlib
import time
import uuid
from collections.abc import Sequence

from jaxtrain.commands import arguments
from jaxtrain.telemetry.report import run as run_lib
from loaders.io import atomic_write

# as jaxtrain.telemetry.traces has them, which imports jax
REQUEST, MAX_STEPS = "profile.json", 1000
TIMEOUT = 600  # [s] to wait for the trace


@arguments.reported
def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.Parser("jaxtrain profile", __doc__)
    parser.add_argument("run", metavar="RUN", help="the workdir of a run that trains")
    parser.add_argument(
        "--steps", type=arguments.positive, default=3, metavar="N", help="how many; default: 3"
    )
    parser.add_argument("--all", action="store_true", help="every process; default: process 0")
    args = parser.parse_args(argv)
    if args.steps > MAX_STEPS:
        parser.error(f"argument --steps: {args.steps}; expected at most {MAX_STEPS}")
    path = args.run
    run = run_lib.open_run(path)
    if not run.is_alive:
        raise run_lib.RunError(
            f"{path} does not train now ({run.state}); start it, or trace it with"
            " --config.metrics.profile"
        )
    processes = run.starts[-1].processes if args.all and run.starts else 1
    before = {found.name: found.stat().st_mtime_ns for found in run.traces}
    request = run.path / REQUEST
    atomic_write.write(
        request, json.dumps({"id": uuid.uuid4().hex, "steps": args.steps, "all": args.all})
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        while (
            len(new := [f for f in run.traces if before.get(f.name) != f.stat().st_mtime_ns])
            < processes
        ):
            if time.monotonic() > deadline:
                starts = run_lib.open_run(path).starts
                phase = starts[-1].phase if starts else "unknown"
                raise run_lib.RunError(
                    f"{path} made no trace within {TIMEOUT} s; does it take steps? It is at:"
                    f" {phase}"
                )
            if not run_lib.open_run(path).is_alive:
                raise run_lib.RunError(f"{path} ended before it made the trace")
            time.sleep(0.3)
    finally:
        request.unlink(missing_ok=True)
    for folder in new:
        print(folder, *lines(folder), sep="\n")
    return 0


def lines(folder: pathlib.Path) -> list[str]:
    """Return the time of a trace by part, for people."""
    from jaxtrain.telemetry.report import trace as trace_lib

    found = trace_lib.of_folder(folder)
    if not found:
        return ["  it names no operation of a device"]
    return [
        f"  {1e3 * found.seconds:.1f} ms, {found.operations} operations",
        *(f"  {share:6.1%}  {part}" for part, share in found.parts.items()),
        "  of the operations' time:",
        *(f"  {share:6.1%}  {times:5} ×  {name}" for name, share, times in found.scopes[:10]),
    ]
