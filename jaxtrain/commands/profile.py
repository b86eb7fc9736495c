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
    old_times = {trace.name: trace.stat().st_mtime_ns for trace in run.traces}
    request = run.path / REQUEST
    content = {"id": uuid.uuid4().hex, "steps": args.steps, "all": args.all}
    atomic_write.write(request, json.dumps(content))
    new_traces: list[pathlib.Path] = []
    try:
        deadline = time.monotonic() + TIMEOUT
        while len(new_traces) < processes:
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
            new_traces = []
            for trace in run.traces:
                if old_times.get(trace.name) != trace.stat().st_mtime_ns:
                    new_traces.append(trace)
    finally:
        request.unlink(missing_ok=True)
    for folder in new_traces:
        print(folder, *lines(folder), sep="\n")
    return 0


def lines(folder: pathlib.Path) -> list[str]:
    """Return the time of a trace by part, for people."""
    from jaxtrain.telemetry.report import trace as trace_lib

    trace = trace_lib.of_folder(folder)
    if not trace:
        return ["  it names no operation of a device"]
    text = [f"  {1e3 * trace.seconds:.1f} ms, {trace.operations} operations"]
    for part, share in trace.parts.items():
        text.append(f"  {share:6.1%}  {part}")
    text.append("  of the operations' time:")
    for name, share, times in trace.scopes[:10]:
        text.append(f"  {share:6.1%}  {times:5} ×  {name}")
    return text
