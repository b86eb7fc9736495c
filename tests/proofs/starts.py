"""The start of a run by its number of processes, each a real one with its own imports.

    python -m tests.proofs.starts 1 2 4 8

The processes of a small run are started at once on this machine, of one device each. A row has the
seconds until process 0 has computed its first step, by its own log, with the parts of it that the
log names, and the CPU seconds of all processes to their ends, two steps later.
"""

import argparse
import os
import pathlib
import re
import resource
import tempfile

from tests.support import small_runs
from tests.support.processes import cluster

LINE = re.compile(r"([\d.]+) s from the command to the first step: (.*)")
STEPS = 2


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("processes", nargs="+", type=int)
    arguments = parser.parse_args()
    os.environ["JAXTRAIN_TESTS_FORK"] = "0"
    print("| processes | first step [s] | of it | CPU of all [s] | load |")
    print("|---:|---:|---|---:|---:|")
    for n_processes in arguments.processes:
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            seconds, parts, cpu = start(pathlib.Path(folder), n_processes)
        print(f"| {n_processes} | {seconds} | {parts} | {cpu:.1f} | {load:.1f} |", flush=True)


def start(folder, n_processes):
    small_runs.rows(folder)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    overrides = [
        f"--config.train.steps={STEPS}",
        "--config.train.batch=16",
        "--config.train.eval_every=0",
        f"--config.workdir={folder}/run",
    ]
    running = cluster(folder, "rows.py", *overrides, processes=n_processes)
    outputs = [process.communicate(timeout=300)[0] for process in running]
    assert not any(process.returncode for process in running), outputs
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = LINE.search(outputs[0])
    assert found, outputs[0]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found[1], found[2], cpu


if __name__ == "__main__":
    main()
