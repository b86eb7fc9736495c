"""One command for a machine with an accelerator: is it right, and how fast is it?

It asks that of each workload.

    python tools/gpu_check.py  # or python -m tools.gpu_check; within 9 minutes
    python tools/gpu_check.py  # again: the rest, after a first call without time for all
    python tools/gpu_check.py --quick  # within 2: the essence
    python tools/gpu_check.py --only speed --models language
    python tools/gpu_check.py --only speed --models bird --vary "vit-s model.unroll=1"

    correctness   the five workloads against the CPU of the same machine, kernels against formulas,
                  and more (tools/chip)
    speed         steps a second, MFU, the roofline of the compiled step at the rates that this card
                  reaches, memory next to the plan's lower bound, time to compile
    peers         the same steps by PyTorch, eager and compiled (tools/chip/peers.py)
    bits          whether steps repeat bit for bit, by array, with and without XLA's fixed order of
                  additions, and the cost of that order
    kills         killed runs, and replayed steps, both ways
    feeding       the loader by number of threads (tools/bench_feeding.py)

It needs no network. Every unit runs in a process of its own within a bounded time, so that one that
fails ends no other and keeps no memory of the device. It prints a table, and writes all numbers to
--out after each of them. A call with the same --out, code and device takes over the figures there,
and begins with the rest. A case that no size of fits the card is named. A variant (--vary) is
measured next to its case in one call, since cards of one kind differ. It exits with 1 if a check
failed or a part could not run, and with 2 if it was called wrongly or the card is taken. It exits
with 3 if the time was over before all parts ran, or PyTorch is missing. On a CPU it runs its small
form, which shows that it works, not how fast.

A unit that the end of a call cuts is left out, and is the first of the next call. If a unit fails
within its own time, the next call tries it again, after the others. Peers without PyTorch are asked
again in each call.

Conventions. FLOPs are of the model: of products of matrices, forward and backward, nothing that is
recomputed, and no gather of embeddings; "full" counts the places that a causal mask leaves out,
"causal" does not. MFU is of the chip's datasheet (dense bfloat16, jaxtrain/parallel/chips.py).
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # run as a file: its folder is on the path, and the repository is not
    sys.path[0] = str(ROOT)

PARTS = ("correctness", "speed", "peers", "bits", "kills", "feeding")
QUICK_PARTS = PARTS[:2]
FIXED = "-fixed"  # the end of a kind whose processes add in XLA's fixed order
FIXED_ORDER = "--xla_gpu_deterministic_ops=true"
# [s] of a call, and of a unit's process, at most; twice that on CPUs.
LIMIT, QUICK_LIMIT = 520, 115
BOUNDS = {"machine": 90, "correctness": 180, "model": 100}
BOUNDS |= {"peers": 420, "bits": 120, "kills": 300, "feeding": 300}
# [s] with less, a unit is left to the next call
LEAST = {"peers": 200, "bits": 60, "kills": 150, "feeding": 200}
QUICK_CASES = ("vit-s", "lm-1b-2k")  # at full size
# the others are these at another size
SMALL_CASES = ("vit-s", "lm-1b-2k", "trm", "higgs-lora", "giblet")
PR_SET_PDEATHSIG = 1
ENDED = "was ended after its "  # the begin of the reason, of a process that took too long
HIDDEN = 4096  # [MiB] in use on a card from which on it is somebody's, though no process is listed
CONVENTIONS = {
    "flops": (
        "products of matrices of the model, forward and backward; nothing recomputed, no gather of"
        " embeddings"
    ),
    "full_flops": "the same with the places of attention that a causal mask leaves out",
    "mfu": "of the datasheet's dense bfloat16 peak (jaxtrain/parallel/chips.py)",
}


class Unit(NamedTuple):
    """The task of one process."""

    kind: str  # machine, model, or a part, with "-fixed" for one in XLA's fixed order
    case: str = ""  # of a model, with the settings of a variant after its name

    @property
    def part(self) -> str:
        return self.kind.removesuffix(FIXED)

    def __str__(self) -> str:
        return f"{self.kind} {self.case}".strip()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.child:
        return child(args)
    from tools.chip import results_file, results_table

    # The unit's process is ended with this one: else it would hold the card.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        refuse_a_taken_card()
        found = check(args)
    except results_file.ResultsError as error:
        print(f"gpu_check: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
    print(results_table.text(found))
    print(f"all numbers: {args.out}")
    for line in remaining(found):
        print(f"left: {line}")
    return 1 if not found["well"] else 3 if found["left_out"] or found["skipped"] else 0


def remaining(found: dict[str, Any]) -> list[str]:
    """Return what the next call has to do, with the remedy if more calls alone do not help."""
    lines = []
    for unit in found["left_out"]:
        n_cut = found["cut"].get(unit, 0)
        bound = BOUNDS[unit.partition(" ")[0].removesuffix(FIXED)]
        longer = f", cut {n_cut} times: it may take {bound} s, give a longer call by --minutes"
        lines.append(unit + longer * (n_cut > 1))
    return lines + [f"{unit}: {reason}" for unit, reason in found["skipped"].items()]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = ("bird", "language", "trm", "higgs", "giblet")
    parser.add_argument(
        "--only",
        type=_names(PARTS),
        help=f"parts, of {','.join(PARTS)}; default: all, with --quick {','.join(QUICK_PARTS)}",
    )
    parser.add_argument(
        "--models", type=_names(models), default=models, help=f"workloads, of {','.join(models)}"
    )
    parser.add_argument("--quick", action="store_true", help="within 2 minutes")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        type=_variant,
        metavar='"CASE SECTION.FIELD=VALUE …"',
        help="measure a case of speed with other settings, too",
    )
    parser.add_argument(
        "--minutes", type=float, help="of this call, at most; default: 9, or 2 with --quick"
    )
    parser.add_argument("--anew", action="store_true", help="take over nothing from --out")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("gpu_check.json"),
        help="all numbers, as JSON",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)  # a process of ours: KIND or KIND CASE
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)  # its scratch
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)  # sizes for a CPU
    # [bytes/s] and [FLOP/s] that the card reaches
    parser.add_argument("--rates", type=float, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.only = args.only or (QUICK_PARTS if args.quick else PARTS)
    if args.minutes is not None and args.minutes <= 0:
        parser.error(f"--minutes={args.minutes}: expected a number above 0")
    if not args.child and not args.out.absolute().parent.is_dir():
        parser.error(f"--out={args.out}: {args.out.absolute().parent} is no folder")
    return args


def _names(allowed: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in allowed]:
            raise argparse.ArgumentTypeError(
                f"{unknown[0]!r} is unknown; expected one of: {', '.join(allowed)}"
            )
        return names

    return parse


def _variant(text: str) -> str:
    from tools.chip.cases import CASES

    name, *settings = text.split()
    if name not in (names := [case.name for case in CASES]):
        expected = ", ".join(names)
        raise argparse.ArgumentTypeError(f"{name!r} is no case; expected one of: {expected}")
    if not settings or not all("=" in setting for setting in settings):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no setting; write it as {name} model.unroll=1"
        )
    return " ".join((name, *settings))


def refuse_a_taken_card() -> None:
    """Raise ResultsError if somebody else computes on a GPU that this process may use.

    A driver lists no process of another container, but its memory.
    """
    from tools.chip import results_file

    # A driver that states no memory, or no name, has "[N/A]" there: it is a process all the same.
    listed = ask_driver("compute-apps=pid,name,used_memory")
    taken = [line for line in listed if line.count(",") >= 2]
    if taken:
        raise results_file.ResultsError(
            f"the card is taken by {'; '.join(taken)} (process, program, memory): its figures would"
            " not be the card's; end them, or choose a free card by CUDA_VISIBLE_DEVICES"
        )
    for line in ask_driver("gpu=index,name,memory.used"):
        amount = re.search(r"(\d+) MiB$", line)
        if amount is None:
            warn(f"nvidia-smi states no memory in use ({line})")
        elif int(amount[1]) > HIDDEN:
            raise results_file.ResultsError(
                f"the card is taken: {line} (card, kind, memory in use), by a process that"
                " nvidia-smi does not list, as one of another container; end it, or choose a free"
                " card by CUDA_VISIBLE_DEVICES"
            )


def ask_driver(query: str) -> list[str]:
    """Return the lines of nvidia-smi, of the cards that this process may use.

    They are none without a card of NVIDIA. If the driver does not answer, that is printed: a card
    that nothing is known of may be somebody's.
    """
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.TimeoutExpired) as error:
        warn(f"nvidia-smi failed ({error})")
        return []
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["without a word"]
        warn(f"nvidia-smi ended with code {done.returncode} ({lines[-1]})")
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def warn(reason: str) -> None:
    print(
        f"gpu_check: {reason}: whether somebody else computes on the card is not known",
        file=sys.stderr,
    )


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Run the units, one process after the other, and gather their results with earlier ones.

    Raises ResultsError if the file of earlier results cannot take those of this machine.
    """
    from tools.chip import results_file

    began = time.time()
    form = "quick" if args.quick else "full"
    found = {} if args.anew else results_file.earlier(args.out, form)
    failed = {failure["unit"] for failure in found.get("failures", ())}
    part: dict[str, Any] = {"when": _clock(began), "seconds": 0.0, "machine": None, "units": []}
    found = {
        "form": form,
        "code": results_file.code(),
        "conventions": CONVENTIONS,
        "correctness": None,
        "models": {},
        "more": {},  # of other kinds, by unit
        **found,
        "parts": [*found.get("parts", ()), part],
        "failures": [],
        "tries": found.get("tries", {}),  # unit -> number of calls in which it failed
        "left_out": [],  # for want of time
        "cut": found.get("cut", {}),  # unit -> number of calls whose end cut it
        "skipped": {},  # unit -> the reason, with the remedy; it is asked again
        "well": True,
    }
    limit = QUICK_LIMIT if args.quick else LIMIT  # the last process may take a few more to end
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        for unit in units(args, found, failed):
            machine = part["machine"] or {}
            args.small = machine.get("platform") == "cpu"
            of_call = 60 * args.minutes if args.minutes else (1 + args.small) * limit
            left = of_call - (time.time() - began)
            if left < LEAST.get(unit.part, 5):
                found["left_out"].append(str(unit))
                continue
            print(f"{time.time() - began:5.0f} s  {unit} …", file=sys.stderr, flush=True)
            whole = (1 + args.small) * BOUNDS[unit.part]
            result, why = run(unit, args, pathlib.Path(folder), min(whole, left))
            if left < whole and why.rpartition("\n")[2].startswith(ENDED):
                print(f"         {unit} was cut: the call is over", file=sys.stderr, flush=True)
                found["left_out"].append(str(unit))
                found["cut"][str(unit)] = found["cut"].get(str(unit), 0) + 1
                continue
            if unit.kind == "machine" and result:
                results_file.refuse_another_machine(args.out, found, result)
                reached = result["reached"]
                args.rates = [reached["bytes_per_second"], reached["flops_per_second"]]
            _add(found, part, unit, result, why)
            part["seconds"] = time.time() - began
            results_file.write(args.out, found)
    results_file.write(args.out, found)
    return found


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _add(found: dict[str, Any], part: dict[str, Any], unit: Unit, result: Any, why: str) -> None:
    found["cut"].pop(str(unit), None)
    n_failed = found["tries"].pop(str(unit), 0)
    if why:
        found["failures"].append({"unit": str(unit), "why": why})
        found["tries"][str(unit)] = n_failed + 1
        last_line = why.strip().splitlines()[-1]
        print(f"         {unit} failed: {last_line}", file=sys.stderr, flush=True)
    elif unit.kind == "machine":
        part["machine"] = result
    elif unit.kind == "peers" and "skipped" in result:
        found["skipped"][str(unit)] = result["skipped"]
    else:
        part["units"].append(str(unit))
        number = len(found["parts"]) - 1
        if unit.kind == "model":
            found["models"][unit.case] = {**result, "part": number}
        elif unit.kind == "correctness":
            found["correctness"] = result
        else:
            found["more"][str(unit)] = {**result, "kind": unit.kind, "part": number}
    from tools.chip import results_rows

    bad = [one for one in found["correctness"] or () if not one["well"]]
    bad += [one for one in found["more"].values() if results_rows.problems(one)]
    found["well"] = not found["failures"] and not bad


def units(
    args: argparse.Namespace, found: dict[str, Any], failed: Collection[str] = ()
) -> Iterator[Unit]:
    """Yield the units without figures of an earlier part. The machine decides which there are.

    The case of a variant is measured again next to it. One that the end of a call cut is the first.
    Those that ``failed`` in the last part are the last ones, so that the others are reached, as are
    those that two calls have cut.
    """
    yield Unit("machine")
    machine = found["parts"][-1]["machine"]
    if machine is None:
        return
    ranks = {unit: 0 if times == 1 else 2 for unit, times in found["cut"].items()}
    ranks |= dict.fromkeys(failed, 2)
    # sorted has read them all before a unit's result changes their order
    yield from sorted(_left(args, found, machine), key=lambda unit: ranks.get(str(unit), 1))


def _left(
    args: argparse.Namespace, found: dict[str, Any], machine: dict[str, Any]
) -> Iterator[Unit]:
    if "correctness" in args.only and found["correctness"] is None:
        yield Unit("correctness")
    if "speed" in args.only:
        yield from models(args, found)
    yield from (unit for unit in others(args, machine) if str(unit) not in found["more"])


def models(args: argparse.Namespace, found: dict[str, Any]) -> Iterator[Unit]:
    """Yield the cases of "speed" with their variants."""
    from tools.chip.cases import CASES

    chosen = [case.name for case in CASES]
    if found["parts"][-1]["machine"]["platform"] == "cpu":
        chosen = list(SMALL_CASES)
    elif args.quick:
        chosen = list(QUICK_CASES)
    measured = set(found["models"])  # by earlier parts
    for case in CASES:
        if case.name not in chosen or case.model not in args.models:
            continue
        variants = [
            text for text in args.vary if text.split()[0] == case.name and text not in measured
        ]
        if variants or case.name not in measured:
            yield Unit("model", case.name)
        for text in variants:
            yield Unit("model", text)


def others(args: argparse.Namespace, machine: dict[str, Any]) -> Iterator[Unit]:
    """Yield the units of the parts after "speed"."""
    from tools.chip.cases import CASES
    from tools.chip.peers import TWINS

    names = {case.name: case.model for case in CASES if case.model in args.models}
    small = [name for name in SMALL_CASES if name in names]
    if "peers" in args.only:
        is_cpu = machine["platform"] == "cpu"
        for name in TWINS:
            if name in (small if is_cpu else names):
                yield Unit("peers", name)
    for kind in ("bits", "kills"):
        if kind in args.only:
            for name in small:
                yield Unit(kind, name)
                yield Unit(kind + FIXED, name)
    if "feeding" in args.only and "bird" in args.models:
        yield Unit("feeding")


def run(
    unit: Unit, args: argparse.Namespace, folder: pathlib.Path, seconds: float
) -> tuple[Any, str]:
    """Return (the process's result, "") or (None, the reason)."""
    out, log = folder / "result.json", folder / "log"
    out.unlink(missing_ok=True)
    command = [
        *(
            sys.executable,
            str(ROOT / "tools" / "gpu_check.py"),
            f"--child={unit}",
            f"--folder={folder}",
            f"--out={out}",
        ),
        *(
            f"--only={','.join(args.only)}",
            f"--models={','.join(args.models)}",
            *(["--quick"] if args.quick else []),
        ),
        *(["--small"] if args.small else []),
        *(["--rates", *map(str, args.rates)] if args.rates else []),
    ]
    terminated: list[int] = []  # before the process can be ended
    handler = signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    with log.open("w+") as file:
        # A group of its own, so that what it started ends with it.
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment(unit, folder), start_new_session=True
        )
        try:
            signal.signal(signal.SIGTERM, handler)
            if terminated:
                signal.raise_signal(signal.SIGTERM)
            code, why = process.wait(seconds), ""
        except subprocess.TimeoutExpired:
            why = f"{ENDED}{seconds:.0f} s"
        finally:
            _end(process)
        file.seek(0)
        text = file.read()
    if not why and code == 0 and out.exists():
        return json.loads(out.read_text()), ""
    why = why or (
        f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    )
    return None, "\n".join([*text.strip().splitlines()[-30:], why])


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        pass
    process.wait()


def environment(unit: Unit, folder: pathlib.Path) -> dict[str, str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    if wanted := platforms():
        env["JAX_PLATFORMS"] = wanted
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in env:
        env.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
    # Of a model's own, and empty whatever ran on this machine before: cold is cold.
    env["JAX_COMPILATION_CACHE_DIR"] = str(folder / f"programs {unit.case}".strip())
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    flags = [os.environ.get("XLA_FLAGS", "")]
    if wanted == "cpu":
        # no speed is reported, so optimising is not worth the wait
        flags.append("--xla_backend_optimization_level=0")
    elif unit.kind == "correctness" or unit.kind.endswith(FIXED):
        flags.append(FIXED_ORDER)
    env["XLA_FLAGS"] = " ".join(filter(None, flags))
    return env


def platforms() -> str:
    """Return the value for JAX_PLATFORMS, or "" to leave the choice to JAX.

    The CPU is always needed. And libtpu must not be loaded without a TPU: its profiler can bring
    down the process that takes a trace (libtpu 0.0.51 with jaxlib 0.10.2).
    """
    if asked := os.environ.get("JAX_PLATFORMS", ""):
        return asked if "cpu" in asked.split(",") else f"{asked},cpu"
    plugins = {point.name for point in importlib.metadata.entry_points(group="jax_plugins")} - {
        "libtpu",
        "tpu",
    }
    dev = pathlib.Path("/dev")
    if any(dev.glob("accel*")) or any(dev.glob("vfio/[0-9]*")):
        return ""
    if not plugins:
        return "cpu"
    return (
        "cuda,cpu"
        if importlib.util.find_spec("libtpu") and any("cuda" in name for name in plugins)
        else ""
    )


def child(args: argparse.Namespace) -> int:
    """Return a process of `run`: one unit, whose result goes to --out."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone
        # else it would hold the card after a check that was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    kind, _, case = args.child.partition(" ")
    of_device = {"machine", "correctness", "model", "bits", f"bits{FIXED}"}
    result = on_device(args, kind, case) if kind in of_device else by_processes(args, kind, case)
    args.out.write_text(json.dumps(result))
    return 0


def on_device(args: argparse.Namespace, kind: str, case: str) -> Any:
    import jax

    from tools.chip import bits, cases, correctness, speed

    data = cases.Data(args.folder, small=args.small)
    device = jax.devices()[0]
    if kind == "machine":
        return machine(device)
    if kind == "correctness":
        checks = correctness.measure(data, device, quick=args.quick, models=set(args.models))
        return correctness.record(checks)
    name, *settings = case.split()
    chosen = next(one for one in cases.CASES if one.name == name)
    if kind != "model":
        return bits.measure(chosen, data, device)
    more = dict(setting.split("=", 1) for setting in settings)
    return speed.measure(chosen, data, device, args.rates, more=more, quick=args.quick)


def by_processes(args: argparse.Namespace, kind: str, case: str) -> Any:
    """Return the result of a unit whose own processes take the device, one after the other."""
    if kind == "feeding":
        from tools import bench_feeding, bench_loader

        out = args.folder / "feeding.json"
        cores = bench_loader.cores()
        numbers = {1, max(len(cores) // 2, 1), bench_feeding.n_physical(cores), len(cores)}
        threads = ",".join(str(n) for n in sorted(numbers))
        amount = ["--seconds=1", "--rounds=1", f"--threads={threads}", "--recordings=48"]
        if args.small:
            amount = ["--codecs=wav", "--threads=1", "--seconds=1", "--rounds=1", "--recordings=8"]
        bench_feeding.main([*amount, f"--out={out}"])
        return json.loads(out.read_text())
    from tools.chip import bits, cases, peers

    if kind == "peers":
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            return peers.measure(case, pathlib.Path(folder), small=args.small)
    chosen = next(one for one in cases.CASES if one.name == case)
    return bits.killed(chosen, cases.Data(args.folder, small=args.small))


def machine(device: Any) -> dict[str, Any]:
    import jax

    from jaxtrain.parallel import chips
    from loaders.io import machine
    from tools.chip import ceilings

    chip = chips.find(device.device_kind)
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "devices": jax.device_count(),
        "chip": chip.name if chip else None,
        "datasheet_flops_per_second": chip.flops if chip else None,
        "datasheet_bytes_per_second": chip.bandwidth if chip else None,
        "reached": ceilings.measure(device),
        "cores": machine.cores(),
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "backend": device.client.platform_version.splitlines()[0],
    }


if __name__ == "__main__":
    sys.exit(main())
