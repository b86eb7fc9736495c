"""Measures all that an accelerator is for, in order, and on the next call the rest.

    python -m tools.measure_card  # within 9 minutes; again until it says that all is done
    python -m tools.measure_card --minutes 60 --text /path/to/input.txt --birds /path/to/esc10
    python -m tools.measure_card --small --page page.md  # tiny sizes, on a CPU

    1. the check of a card (tools/gpu_check.py): all its parts
    2. the runs worth showing (tools/show_runs.py): boards, and characters and birds if their files
       are given

The figures are on the page of this kind of device (docs/results/h100.md), which is begun if there
is none, and below --out, whose default has the kind in its name. So figures of two kinds are never
mixed. done.json there has the device, and lists the steps that ended, with their codes: a step that
failed is not tried again, and the others go on. A unit of the check that failed is tried once more
by the next call, and peers without PyTorch are asked again. With other code all is measured again.

It exits with 0 if all is done and well, with 1 if a step failed, and with 2 if it was called
wrongly, the card is taken or there is none. It exits with 3 if the time was over or a part of the
check is left.
SIGTERM ends its child, too: a run saves first.
"""

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from loaders.io import atomic_write
from tools import child_group, gpu_check, show_runs
from tools.chip import results_file, results_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
LEAST = 60  # [s] with less, the next step is left to the next call; of --small, one second
NEEDS = {"characters": "text", "birds": "birds"}  # recipe -> the option with its files
CHECK = "check"
MAX_TRIES = 2  # calls, of a unit of the check that fails
FRONT_END = "vit-s data.form=waveform"  # the front end in the step, next to the case without it


class Step(NamedTuple):
    name: str
    command: tuple[str, ...]  # after python -m


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    deadline = time.monotonic() + 60 * args.minutes
    try:
        gpu_check.refuse_a_taken_card()
        return measure(args, deadline)
    except results_file.ResultsError as error:
        print(f"card: {error}", file=sys.stderr)
        return 2


def measure(args: argparse.Namespace, deadline: float) -> int:
    """Take the steps that are left. Raises ResultsError if nothing can be measured here."""
    device, kind = show_runs.this_device()
    if device == show_runs.NO_DEVICE:
        raise results_file.ResultsError(show_runs.NO_DEVICE_TEXT)
    if kind == "cpu" and not args.small:
        raise results_file.ResultsError(
            "JAX finds a CPU alone; install jax with your accelerator's plugin, or give --small"
            " --page page.md, which shows on a CPU that all works"
        )
    out = args.out or ROOT / "runs" / f"card-{kind}"
    out.mkdir(parents=True, exist_ok=True)
    page = args.page or show_runs.RESULTS / f"{kind}.md"
    done, left, refused = earlier(out, device), [], []
    for step in steps(args, out, page):
        if step.name in done:
            continue
        seconds = deadline - time.monotonic()
        if seconds < (1 if args.small else LEAST):
            return later(step.name)
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        command = [sys.executable, "-m", *step.command, f"--minutes={seconds / 60:.2f}"]
        code = child_group.run(command, ROOT)
        if code == 2 and step.name == CHECK:
            return 2  # it has said why, and it is of the card: no step can go on
        if code == 2:
            refused.append(step.name)
            continue
        if step.name == CHECK:
            found = put_on_page(out / "check.json", page, device)
            if found.get("left_out"):
                return later(CHECK)
            if left := to_try_again(found):
                continue
        if code == 3:
            return later(step.name)
        done[step.name] = code
        write(out, device, done)
    return end(done, left, refused, f"{page} and {out}")


def end(done: dict[str, int], left: list[str], refused: list[str], figures: str) -> int:
    failed = ", ".join([name for name, code in done.items() if code]) or "nothing"
    for line in left:
        print(f"left: {line}")
    for name in refused:
        print(f"refused: {name}; its reason is above, and the next call takes it again")
    print(f"all {'else ' if left or refused else ''}is done; failed: {failed}; figures: {figures}")
    if refused:
        return 2
    return 3 if left else 1 if failed != "nothing" else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.measure_card",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    recipes = show_runs.RECIPES
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call; default: 9")
    parser.add_argument("--text", help=f"{recipes['characters'].needs}, for the characters")
    parser.add_argument("--birds", help=f"{recipes['birds'].needs}, for the birds")
    parser.add_argument("--seed", type=int, default=0, help="of the runs worth showing")
    parser.add_argument("--out", type=pathlib.Path, help="default: runs/card-KIND")
    parser.add_argument("--page", type=pathlib.Path, help="default: that of this kind of device")
    parser.add_argument("--only", help="parts of the check; default: all")
    parser.add_argument("--models", help="workloads of the check; default: all")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    args = parser.parse_args(argv)
    for name in NEEDS.values():
        path = getattr(args, name)
        if path and not pathlib.Path(path).exists():
            parser.error(f"--{name}={path}: there is no such file or folder")
    if args.small and args.page is None:
        parser.error("--small shows that it works, and no page has its figures; give --page")
    show_runs.refuse_a_page_without_a_folder(parser, args.page)
    if args.minutes <= 0:
        parser.error(f"--minutes={args.minutes}: expected a number above 0")
    for recipe, name in NEEDS.items():  # a step that is refused after hours would come too late
        path = getattr(args, name)
        if path and (problem := show_runs.error_of(recipe, path, small=args.small)):
            parser.error(f"--{name}={path}: {problem}")
    gpu_check.parse(check_options(args, pathlib.Path()))
    return args


def check_options(args: argparse.Namespace, out: pathlib.Path) -> list[str]:
    options = [f"--out={out / 'check.json'}", f"--vary={FRONT_END}"]
    return options + [f"--{n}={v}" for n in ("only", "models") if (v := getattr(args, n))]


def steps(args: argparse.Namespace, out: pathlib.Path, page: pathlib.Path) -> list[Step]:
    made = [Step(CHECK, ("tools.gpu_check", *check_options(args, out)))]
    for name in show_runs.RECIPES:
        data = getattr(args, NEEDS[name]) if name in NEEDS else ""
        if data is None:
            print(f"{name}: left out; --{NEEDS[name]} names its files")
            continue
        command = ["tools.show_runs", name, f"--seed={args.seed}", f"--out={out / 'shown'}"]
        command += [f"--page={page}", *["--small"] * args.small]
        made.append(Step(name, (*command, *([f"--data={data}"] if data else []))))
    return made


def earlier(out: pathlib.Path, device: str) -> dict[str, int]:
    """Return the codes of the steps that ended with the code of today, by their names.

    Raises ResultsError if the list is damaged, or of another device.
    """
    try:
        found = json.loads((out / "done.json").read_text())
        codes = {str(name): int(code) for name, code in found["codes"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise results_file.ResultsError(
            f"{out / 'done.json'} lists no steps ({error!r}); remove it"
        ) from error
    before = found.get("device", device)
    if before != device:
        raise results_file.ResultsError(
            f"{out / 'done.json'} has steps of {before}, and this machine has {device}: runs of two"
            " devices are not put into one folder; give another one by --out"
        )
    return codes if found.get("code") == results_file.code() else {}


def write(out: pathlib.Path, device: str, done: dict[str, int]) -> None:
    parts = {"code": results_file.code(), "device": device, "codes": done}
    text = json.dumps(parts, indent=1)
    atomic_write.write(out / "done.json", text + "\n")


def put_on_page(path: pathlib.Path, page: pathlib.Path, device: str) -> dict[str, Any]:
    """Put the table of the check on the page. Return its figures, none if it ended before them."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text())
    table = results_table.text(found)
    text = f"## The check of this card\n\n```text\n{table}\n```"
    show_runs.add(page, device, f"{CHECK}, {device}", text)
    return found


def to_try_again(found: Mapping[str, Any]) -> list[str]:
    """Return the units that the next call takes again: skipped, or failed in one call alone."""
    again = [f"{unit}: {reason}" for unit, reason in found.get("skipped", {}).items()]
    once = [unit for unit, times in found.get("tries", {}).items() if times < MAX_TRIES]
    return again + [f"{unit}: it failed, and is tried once more" for unit in once]


def later(name: str) -> int:
    print(f"the time was over: the same command continues with {name}")
    return 3


if __name__ == "__main__":
    sys.exit(main())
