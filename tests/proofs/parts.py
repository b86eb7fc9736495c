"""The slow proofs in parts, each of at most 80 minutes on two cores: make proofs-kills, or

    python -m tests.proofs kills matrix     these parts, one after the other
    python -m tests.proofs                  all of them
    python -m tests.proofs --list           the parts, and their claims

A part is the slow tests of some files; tests/proofs/test_parts.py holds that each slow test is in
exactly one of them. It prints the output of its tests and their tables, then a row: passed, failed,
skipped, minutes. The row is kept in docs/results/proofs.md, with the commit and the day, until the
part is run again. It exits with 1 if a test failed, or a part took longer.
"""

import argparse
import datetime
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from typing import NamedTuple

from tests.proofs import newest_jax

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "proofs.md"
MINUTES = 80  # that a part may take
BEGIN, END = (
    "<!-- results of make proofs-…: written by tests/proofs/parts.py -->\n",
    "<!-- end of the results -->\n",
)
HEAD = (
    "| part | what it proves | passed | failed | skipped | minutes | commit | day"
    " |\n|---|---|---:|---:|---:|---:|---|---|\n"
)


class Part(NamedTuple):
    what: str
    names: str  # files below tests/, or FILE::FUNCTION, with spaces between
    # processes that run the tests; those that share a service are in one xdist_group
    workers: int = 1
    # tests of other parts and of the gate, run again on the newest jax (newest_jax.py)
    on_newest_jax: bool = False

    @property
    def tests(self) -> list[str]:
        return [str(pathlib.Path("tests", name)) for name in self.names.split()]


PARTS = {
    "kills": Part(
        "200 kills at any instant; one sequence of recordings with any number of processes;"
        " steps of a run on several meshes, replayed",
        "test_kills.py loaders/test_one_sequence.py test_replay.py",
        workers=4,
    ),
    "faults": Part(
        "signals, stuck processes, supervisors, hosts off the network, full disks, object stores,"
        " leases, the doctor",
        "test_reliability.py test_train.py test_hosts.py test_supervise.py"
        " test_supervise_full_disk.py test_supervise_opponent.py test_fewer_hosts.py"
        " test_supervise_differing_hosts.py test_steps_in_memory.py"
        " workloads/test_commands_on_full_disks.py"
        " test_object_store.py parallel/test_lease.py doctor/test_doctor.py"
        " commands/test_launch_slurm.py commands/test_errors_file.py proofs/test_soak.py",
        workers=2,
    ),
    "damage": Part(
        "every file of a checkpoint damaged at many places; damaged shards, and all that Python"
        " reads; the targets of fuzzing",
        "checkpoint/test_checkpointer.py hostile/test_hostile_shards.py"
        " hostile/test_hostile_readers.py proofs/test_fuzz.py",
        workers=2,
    ),
    "hostile": Part(
        "hostile files to every command", "hostile/test_hostile_commands.py", workers=3
    ),
    "matrix": Part(
        "every workload on every mesh, in one process",
        "test_matrix.py::test_steps_on_a_mesh_are_those_of_one_device optim/test_open.py"
        " parallel/test_replicas.py",
        workers=2,
    ),
    "processes": Part(
        "every workload in 2 and 4 processes",
        "test_matrix.py::test_steps_of_several_processes_are_those_of_one_device plan/test_auto.py"
        " plan/test_search.py",
        workers=2,
    ),
    "plan": Part(
        "lower bounds of steps against the compilers of chips; the list of TPU slices against"
        " libtpu",
        "plan/test_bound.py plan/test_slices.py",
        workers=2,
    ),
    "compiled": Part(
        "steps and kernels compiled for GPUs and TPUs",
        "compiled/test_steps.py compiled/test_gpu_check_cases.py compiled/test_language_model.py"
        " compiled/test_passes.py compiled/test_encoder.py compiled/test_recursive.py"
        " compiled/test_mesh.py compiled/test_tpu_attention.py compiled/test_tpu_steps.py"
        " nn/test_attention.py nn/test_attention_compiled.py nn/test_document_blocks.py"
        " nn/test_pair_blocks.py compiled/test_evaluation.py"
        " test_compiler.py",
        workers=2,
    ),
    "newest": Part(
        "the compiled steps on the newest jax, in an environment of its own",
        "compiled/test_steps.py compiled/test_gpu_check_cases.py compiled/test_language_model.py"
        " compiled/test_passes.py compiled/test_encoder.py compiled/test_recursive.py"
        " compiled/test_mesh.py",
        workers=2,
        on_newest_jax=True,
    ),
    "newest-kernels": Part(
        "attention, exchanges and the reading of compiled programs on the newest jax",
        "nn/test_attention_compiled.py nn/test_tokamax_attention.py"
        " parallel/test_replicas.py plan/test_traffic.py plan/test_hlo.py plan/test_exposure.py"
        " test_compiler.py::test_jaxlib_knows_every_option_for_gpus_and_a_config_overrides_the"
        "_table",
        workers=2,
        on_newest_jax=True,
    ),
    "size": Part(
        "giblet at its published size, its film and its memory; the memory of each of four"
        " processes",
        "test_parts_of_hosts.py workloads/test_giblet_size.py workloads/test_giblet.py"
        " loaders/test_multimodal.py",
        workers=2,
    ),
    "workloads": Part(
        "language and audio language on more meshes and processes; a killed run of puzzles; exports"
        " and embeddings",
        "workloads/test_language.py workloads/test_language_dropout.py"
        " workloads/test_audio_language.py"
        " workloads/test_audio_language_run.py workloads/bird/test_embed.py commands/test_export.py"
        " workloads/test_trm_run.py",
        workers=2,
    ),
    "rest": Part(
        "larger runs of what `make test` shows in small: exports, frozen weights and changes of a"
        " resumed run, rollouts on a mesh, changed tables, hard names, `prove` beside other runs",
        "field/test_resume.py field/test_paths.py field/test_tables.py"
        " commands/test_outputs_of_other_runs.py checkpoint/test_data_of_run.py"
        " run/test_verify.py workloads/test_language_run.py workloads/test_trm_rollouts.py"
        " workloads/test_trm.py workloads/test_trm_contracts.py plan/test_summary.py"
        " parallel/test_jax_options.py test_api.py",
        workers=2,
    ),
    "data": Part(
        "the built-in birds, the loader's pipeline, indexes at length; a review in a browser; a"
        " check of a chip; benchmarks",
        "loaders/test_demo.py loaders/test_pipeline.py loaders/test_recordings.py"
        " loaders/test_doubts.py workloads/bird/test_fit.py tools/test_benches.py"
        " tools/test_measure_card.py tools/test_gpu_check.py tools/test_show_runs.py"
        " tools/test_tpu_check.py",
        workers=2,
    ),
    "docs": Part(
        "every command that the pages show; a report's page of every workload; MLflow and Trackio",
        "test_docs.py test_docs_commands.py test_docs_notebooks.py report/test_pages_of_runs.py"
        " test_writers.py",
        workers=2,
    ),
    "peers": Part(
        "exports as transformers, peft, timm and onnxruntime load them (pip install --group peers;"
        " skipped without)",
        "workloads/test_hugging_face.py workloads/test_lora.py workloads/bird/test_onnx.py"
        " workloads/test_predict.py workloads/bird/test_timm.py tools/test_peers.py",
    ),
    "wheel": Part(
        "the wheel, installed where no compiler is, and an installation without a network",
        "test_wheel.py test_installed.py",
    ),
    "alone": Part(
        "the trainer's tests without one of the workloads, and without any",
        "test_workload.py",
        workers=2,
    ),
}


class Result(NamedTuple):
    passed: int
    failed: int  # errors and what was cut off included
    skipped: int
    minutes: float


def run(name: str) -> Result:
    part = PARTS[name]
    try:
        python = newest_jax.python() if part.on_newest_jax else sys.executable
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        print(f"{name} could not be run: {error}", flush=True)
        return Result(0, 1, 0, 0)
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        # another jax repeats the tests of the gate, too
        chosen = [] if part.on_newest_jax else ["-m", "slow"]
        command = [python, "-m", "pytest", *chosen, f"--junit-xml={report.name}", *part.tests]
        command += ["-n", str(part.workers), "--dist=loadgroup", "-v"] if part.workers > 1 else []
        began, late = time.monotonic(), False
        # as a shell's job in the background inherits it
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            process.wait(timeout=60 * MINUTES)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then reports what it has found so far
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
            late = True
        minutes = (time.monotonic() - began) / 60
        text = pathlib.Path(report.name).read_text()
    found = result_of(text, minutes) if text else Result(0, 1, 0, minutes)
    if late:
        print(f"{name} took longer than {MINUTES} minutes, and was ended", flush=True)
    # A code of 5 is that no test was found, any other than 0 and 1 that they could not be run.
    unwell = late or process.returncode not in (0, 1)
    return found._replace(failed=max(found.failed, 1)) if unwell else found


def result_of(text: str, minutes: float) -> Result:
    suites = list(xml.etree.ElementTree.fromstring(text).iter("testsuite"))
    count = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = count["failures"] + count["errors"]
    return Result(
        max(count["tests"] - failed - count["skipped"], 0), failed, count["skipped"], minutes
    )


def commit() -> str:
    """Return the commit of the checkout, with "-dirty" if it has other changes than results."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    status = [*git, "status", "--porcelain", "--", ".", f":!{PAGE.relative_to(ROOT)}"]
    differs = subprocess.run(status, capture_output=True, text=True).stdout
    return f"{name or 'unknown'}{'-dirty' if differs else ''}"


def table(rows: dict[str, str]) -> str:
    """Return the table of the page, of a row for each part, or a place for it."""
    lines = [
        rows.get(name, f"| {name} | {part.what} | | | | | not run yet | |")
        for name, part in PARTS.items()
    ]
    return HEAD + "".join(f"{line}\n" for line in lines)


def rows_of(page: str) -> dict[str, str]:
    kept = page[page.index(BEGIN) : page.index(END)]
    found = {
        line.split("|")[1].strip(): line for line in kept.splitlines() if line.startswith("| ")
    }
    return {
        name: line for name, line in found.items() if name in PARTS and "not run yet" not in line
    }


def keep(page: str, name: str, result: Result, where: str, day: str) -> str:
    """Return the page with a part's newest row."""
    numbers = f"{result.passed} | {result.failed} | {result.skipped} | {result.minutes:.0f}"
    rows = rows_of(page) | {name: f"| {name} | {PARTS[name].what} | {numbers} | {where} | {day} |"}
    return page[: page.index(BEGIN)] + BEGIN + table(rows) + page[page.index(END) :]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument("--list", action="store_true", help="print the parts, and run none")
    args = parser.parse_args(argv)
    if args.list:
        for name, part in PARTS.items():
            print(f"{name:10} {part.what}")
        return 0
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; expected one of: {', '.join(PARTS)}")
    failed = []
    for name in args.parts or PARTS:
        started = commit()
        result = run(name)
        where = started if commit() == started else f"{started}, changed meanwhile"
        page = keep(PAGE.read_text(), name, result, where, datetime.date.today().isoformat())
        PAGE.write_text(page)
        print(f"\n{HEAD}{rows_of(page)[name]}\n", flush=True)
        failed += [name] if result.failed else []
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
