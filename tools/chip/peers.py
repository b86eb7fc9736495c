"""A case's step in turn with PyTorch's, on the same device, from the same weights and rows.

    python -m tools.chip.peers trm  # one case, as tools/gpu_check.py --only peers measures each

The twins are those of tools/torch_steps, eager and by torch.compile, in the types of ours. Each
side is a process of its own, so that it has all of the device's memory: ours, each way of
PyTorch's, and ours again, which shows the drift of the device. The first writes its weights and its
rows to a folder, and the others read them. All take their first steps from these, and their losses
and the norms of their first gradients are compared. Learning rates are constant and small here, so
that rounding does not grow.

PyTorch halves its rows if they do not fit, and then has a rate by fewer rows.
"""

import argparse
import functools
import gc
import importlib
import importlib.util
import json
import math
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS = 3  # whose losses are compared
LOSSES = {"float32": 1e-3, "bfloat16": 2e-2}  # relative, at most
# Relative, at most, of the first step's norms. Of random tokens a loss hardly depends on attention:
# without a mask of documents it stays within its bound, and these norms do not.
GRADIENTS = {"float32": 1e-3, "bfloat16": 5e-2}
SECONDS, SMALL_SECONDS = 3.0, 0.2
RATES = {"optim.schedule": "constant", "optim.warmup": "0", "optim.lr": "1e-4"}
Found = dict[str, Any]
# `varlen_attn` is causal by ``window_size`` since 2.11 (pytorch/pytorch pull request 172245), and
# asks for ``enable_gqa`` since 2.12 (179468). In 2.10 it has ``is_causal``, and 2.9 is without it.
FIRST, PAST = (2, 11), (2, 12)
INSTALL = "pip install 'torch>=2.11,<2.12'"


class Twin(NamedTuple):
    """The module with PyTorch's step of a case, and settings without which it is not the same."""

    module: str
    settings: Mapping[str, str] = {}
    # groups whose gradients are compared: ours -> the begin of PyTorch's names; "" is all
    groups: Mapping[str, str] = {"": ""}

    def load(self) -> Any:
        return importlib.import_module(f"tools.torch_steps.{self.module}")


DECAY = {"optim.decay": "0", "optim.decay_shape": "linear"}
LLAMA = Twin("packed", DECAY, {"": "", "blocks": "layers."})
# Its embeddings are 0.03 % of the step, and have a rule of their own.
TRM = Twin("trm", {"model.puzzle_embed": "0", "optim.groups": "()", "train.accumulate": "1"})
# Dropout draws other numbers in PyTorch, and its batch norms make much of rounding.
GIBLET = {"model.dropout": "0", "optim.lr": "1e-6", "optim.lr_init": "0", "optim.lr_floor": "0"}
TWINS = {
    "vit-s": Twin("bird"),
    "vit-b": Twin("bird"),
    "lm-1b-2k": LLAMA,
    "lm-1b-8k": LLAMA,
    "trm": TRM,
    "higgs-lora": Twin("higgs"),
    "giblet": Twin("giblet", GIBLET),
}


def missing(is_gpu: bool) -> str:
    """Return the reason why PyTorch cannot be measured here, or an empty text."""
    if importlib.util.find_spec("torch") is None:
        return f"PyTorch is not installed; {INSTALL}"
    import torch

    version = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if is_gpu and not FIRST <= version < PAST:
        return f"PyTorch {torch.__version__} has another attention of packed rows; {INSTALL}"
    if is_gpu and not torch.cuda.is_available():
        return f"this PyTorch ({torch.__version__}) finds no CUDA; install a build for CUDA"
    return ""


def measure(name: str, folder: pathlib.Path, *, small: bool) -> Found:
    """Return ours and PyTorch's ways of a case, each by its own process, or why there are none.

    Raises RuntimeError if ours fails, or every way of PyTorch's.
    """
    if reason := missing(not small):
        return {"case": name, "skipped": reason}
    ask = functools.partial(_ask, name, folder, small)
    first = ask("ours")
    ways = first["ways"][:1] if small else first["ways"]  # to compile says nothing of a CPU's form
    sides: Found = {}
    failures: dict[str, str] = {}
    for way in ways:
        try:
            sides[way] = ask(way)
        except RuntimeError as error:
            failures[way] = str(error)
    if not sides:
        raise RuntimeError("\n".join(failures.values()))
    again = ask("again")
    ours = 2 / (1 / first["units_per_second"] + 1 / again["units_per_second"])
    return {
        "case": name,
        "unit": first["unit"],
        "rows": first["rows"],
        "ours": first,
        "again": again,
        "theirs": sides,
        "failures": failures,
        "ours_by_theirs": {way: ours / side["units_per_second"] for way, side in sides.items()},
        "losses": {way: _apart(first, side) for way, side in sides.items()},
        "bound": LOSSES[first["dtype"]],
        "gradients": {way: _gradients_apart(first, side) for way, side in sides.items()},
        "gradient_bound": GRADIENTS[first["dtype"]],
    }


def _apart(ours: Found, theirs: Found) -> float | None:
    """Return the largest relative distance of losses, None if the rows are not the same."""
    if ours["rows"] != theirs["rows"]:
        return None
    pairs = zip(ours["losses"], theirs["losses"], strict=True)
    return max(float(abs(x / y - 1)) for x, y in pairs)


def _gradients_apart(ours: Found, theirs: Found) -> float | None:
    """Return the largest relative distance of norms, None if the rows are not the same."""
    if ours["rows"] != theirs["rows"]:
        return None
    return max(float(abs(theirs["norms"][name] / x - 1)) for name, x in ours["norms"].items())


def _ask(name: str, folder: pathlib.Path, small: bool, side: str) -> Found:
    """Return the figures of one side's process. Raises RuntimeError with its last lines."""
    out = folder / f"{side}.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.chip.peers", name, f"--side={side}"]
    command += [f"--folder={folder}", *["--small"] * small]
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    if side not in ("ours", "again"):
        env["JAX_PLATFORMS"] = "cpu"  # the device is PyTorch's
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    if done.returncode or not out.exists():
        lines = (done.stdout + done.stderr).strip().splitlines()[-8:]
        raise RuntimeError("\n".join([f"{side} ended with code {done.returncode}:", *lines]))
    found: Found = json.loads(out.read_text())
    return found


def _ours(name: str, folder: pathlib.Path, *, small: bool, writes: bool) -> Found:
    import jax

    from tools.chip import cases

    case = next(case for case in cases.CASES if case.name == name)
    device = jax.devices()[0]
    settings = {**RATES, **TWINS[name].settings}
    chosen = cases.choose(case, cases.Data(folder, small=small), device, settings)
    seconds = SMALL_SECONDS if small else SECONDS
    to = folder if writes else None
    groups = TWINS[name].groups
    found = cases.with_fewer_rows(
        chosen, device, lambda chosen: _our_step(chosen, seconds, to, groups)
    )
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    ways = getattr(TWINS[name].load(), "WAYS", ("eager", "compile"))
    return {**found, "unit": case.unit, "bytes": memory, "ways": ways}


def _our_step(
    chosen: Any, at_least: float, folder: pathlib.Path | None, groups: Iterable[str]
) -> Found:
    """Measure our step, and write its weights and rows to ``folder`` for the other sides."""
    import jax

    from jaxtrain.telemetry import metrics
    from tools.chip import cases

    config = chosen.assembly.config
    batch = cases.first_batch(chosen.assembly)
    steps = cases.Steps(chosen, batch)
    if folder:
        variables = jax.device_get(steps.state.variables)
        rows = {field: np.asarray(x) for field, x in batch.items()}
        parts = {"config": config, "params": variables.params, "batch": rows}
        parts |= {"model_state": variables.model_state, "frozen": variables.frozen}
        with (folder / "case.pickle").open("wb") as file:  # read by our own processes alone
            pickle.dump(parts, file, protocol=5)
    outs = [metrics.mean([steps()]) for _ in range(STEPS)]
    seconds = steps.seconds(at_least)
    task = chosen.assembly.task
    units = task.tokens or config.train.batch * getattr(config.model, "n_views", 1)
    return {
        "rows": config.train.batch,
        "units": units,
        "dtype": config.model.dtype,
        "losses": [out["loss"] for out in outs],
        "norms": {group: outs[0][f"grad_norm_{group}".rstrip("_")] for group in groups},
        "seconds_per_step": seconds,
        "units_per_second": units / seconds,
    }


def _theirs(name: str, folder: pathlib.Path, way: str, *, small: bool) -> Found:
    import torch

    from tools.torch_steps import adamw

    if small:
        torch.set_num_threads(1)  # threads that wait for each other show nothing
    device = torch.device("cpu" if small else "cuda")
    torch.set_float32_matmul_precision("highest")
    ours = json.loads((folder / "ours.json").read_text())
    with (folder / "case.pickle").open("rb") as file:
        parts = pickle.load(file)
    norms: dict[str, float] = {}
    case = adamw.Case(**parts, way=way, norms=norms)
    make: Callable[[adamw.Case], adamw.Step] = TWINS[name].load().case_step
    rows = ours["rows"]
    refused: list[str] = []
    while True:
        try:
            losses, seconds = _first_steps(make, case, device, small=small)
            break
        except torch.OutOfMemoryError:
            if len(refused) == 4 or rows == 1:
                raise
        refused.append(f"{rows} rows{', all logits at once' * _has_logits(case)}")
        if _has_logits(case):
            case = case._replace(whole_loss=False)
        else:
            rows //= 2
            case = case._replace(batch={field: x[:rows] for field, x in case.batch.items()})
        norms.clear()  # of the rows that did not fit
        gc.collect()
        torch.cuda.empty_cache()
    units = ours["units"] * rows / ours["rows"]
    is_gpu = torch.cuda.is_available() and not small
    return {
        "rows": rows,
        "norms": {
            group: math.hypot(*(x for name, x in norms.items() if name.startswith(begin)))
            for group, begin in TWINS[name].groups.items()
        },
        "refused": refused,
        "losses": losses,
        "seconds_per_step": seconds,
        "units_per_second": units / seconds,
        "bytes": torch.cuda.max_memory_allocated() if is_gpu else None,
        "torch": torch.__version__,
    }


def _first_steps(
    make: Callable[[Any], Callable[[], Any]], case: Any, device: Any, *, small: bool
) -> tuple[list[float], float]:
    """Return the first losses of PyTorch's step, and its seconds. Nothing of it is kept."""
    # Later it is not the default device: each call of PyTorch would take longer.
    with device:
        step = make(case)
    losses = [float(step()) for _ in range(STEPS)]
    return losses, _seconds(step, SMALL_SECONDS if small else SECONDS)


def _has_logits(case: Any) -> bool:
    has_tokens = "segments" in case.batch or "text_target" in case.batch
    return has_tokens and case.whole_loss


def _seconds(step: Callable[[], Any], at_least: float) -> float:
    """Return the seconds of a step on average, over ``at_least`` seconds and three steps."""

    def run(n: int) -> float:
        _wait()
        begin = time.perf_counter()
        for _ in range(n):
            step()
        _wait()
        return (time.perf_counter() - begin) / n

    return run(max(3, round(at_least / run(3))))


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write(name: str, folder: pathlib.Path, side: str, *, small: bool) -> Found:
    """Measure one side in this process. Return its figures, and write them to ``folder``."""
    if side in ("ours", "again"):
        found = _ours(name, folder, small=small, writes=side == "ours")
    else:
        found = _theirs(name, folder, side, small=small)
    (folder / f"{side}.json").write_text(json.dumps(found))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.chip.peers", description=__doc__)
    parser.add_argument("case", choices=list(TWINS))
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # a process of ours
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.side:
        write(args.case, args.folder, args.side, small=args.small)
        return 0
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        found = measure(args.case, pathlib.Path(folder), small=args.small)
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
