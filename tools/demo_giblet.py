"""The autoencoder at a hundredth of its size, on a generated film: trained twice, on three meshes, to one curve.

    python -m tools.demo_giblet [--out runs/giblet-demo] [--config.section.field=value …]        (make giblet-demo)

1. One process with 8 devices, the parameters split over all of them (data 1 × fsdp 8).
2. Two processes with 4 devices each (data 2 × fsdp 4), asked to stop in the middle: they save and end.
3. One process again, with data 2 × fsdp 2 × model 2, resumes from the checkpoint of the two.

Both runs end with an evaluation on the held-out part of the film: Pearson's r of the predicted fMRI of moments that were never
trained on, across 2,000 voxels. No prediction can reach more than about 0.7. Next to it is the r of
shuffled pairs. Exits with 1 when that is below 0.3, or the two curves are not one.
"""

import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

CONFIG = "configs/giblet.py:demo"
# Of the losses of the two runs: on average over steps, and of any step. Sums round differently on different meshes, and at a
# high rate differences of 1e-7 grow to a few percent within tens of steps (seen: 0.9 % and 3.8 %); a run on the same mesh
# resumes bit for bit.
MEAN_APART, MOST_APART = 0.02, 0.08


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.demo_giblet", description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/giblet-demo"))
    args, rest = parser.parse_known_args(argv)
    began = time.perf_counter()
    one, two = args.out / "one-process", args.out / "two-processes"
    for folder in (one, two):
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
    print("1. one process, 8 devices: data 1 × fsdp 8", flush=True)
    finished(start(one, (1, 8, 1), 8, rest))
    steps = records(one, "train")[-1]["step"]
    print(f"2. two processes, 4 devices each: data 2 × fsdp 4, until step {steps // 2}", flush=True)
    port = free_port()
    both = [start(two, (2, 4, 1), 4, rest, process=i, port=port) for i in range(2)]
    while not any(r["step"] >= steps // 2 for r in records(two, "train")) and all(p.poll() is None for p in both):
        time.sleep(0.1)
    for process in both:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    finished(*both, code=75)
    print(f"3. one process, 8 devices: data 2 × fsdp 2 × model 2, from step {records(two, 'train')[-1]['step']}", flush=True)
    finished(start(two, (2, 2, 2), 8, rest))
    return compare(one, two, time.perf_counter() - began)


def compare(one: pathlib.Path, two: pathlib.Path, seconds: float) -> int:
    """Print the results of both runs. Return 0 when their curves agree, and the model has learned."""
    curves = [{r["step"]: r for r in records(folder, "train")} for folder in (one, two)]
    same_steps = curves[0].keys() == curves[1].keys()
    differences = [abs(a["loss"] - curves[1][step]["loss"]) / a["loss"] for step, a in curves[0].items() if step in curves[1]]
    apart = sum(differences) / len(differences)
    print(f"{seconds:.0f} s; the losses of {len(differences)} steps are {apart:.2%} apart, at most {max(differences):.2%}")
    ends = [records(folder, "test")[-1] for folder in (one, two)]
    for folder, end in zip((one, two), ends, strict=True):
        print(
            f"{folder.name}: held-out r {end['fmri_r']:.3f} (shuffled pairs {end['fmri_r_null']:+.3f}), over time "
            f"{end['voxel_r']:.3f} a voxel ({end['voxel_r_null']:+.3f}), R² {end['fmri_r2']:.3f}; pictures in {folder}/pictures"
        )
    good = same_steps and apart < MEAN_APART and max(differences) < MOST_APART
    good &= all(end["fmri_r"] > 0.3 and abs(end["fmri_r_null"]) < 0.1 for end in ends)
    print(
        "within bounds"
        if good
        else f"out of bounds: the curves may be {MEAN_APART:.0%} apart, {MOST_APART:.0%} at most; r over 0.3"
    )
    return 0 if good else 1


def start(
    workdir: pathlib.Path, mesh: tuple[int, int, int], devices: int, rest: Sequence[str], *, process: int = 0, port: int = 0
) -> subprocess.Popen[bytes]:
    sizes = [f"--config.mesh.{name}={n}" for name, n in zip(("data", "fsdp", "model"), mesh, strict=True)]
    command = [sys.executable, "-m", "jaxtrain.main", f"--config={CONFIG}", f"--config.workdir={workdir}", *sizes, *rest]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    if port:
        env |= {"JAXTRAIN_COORDINATOR": f"127.0.0.1:{port}", "JAXTRAIN_PROCESSES": "2", "JAXTRAIN_PROCESS": str(process)}
    return subprocess.Popen(command, env=env)


def finished(*processes: subprocess.Popen[bytes], code: int = 0) -> None:
    codes = [p.wait() for p in processes]
    if codes != [code] * len(codes):
        sys.exit(f"tools.demo_giblet: the processes ended with {codes}; expected {code}")


def records(folder: pathlib.Path, split: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    all_records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [r for r in all_records if r["split"] == split]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
