"""The functions of jaxtrain/ that a training step of the language model calls while it is traced.

    python -m tests.support.step_walk   # the table of docs/ARCHITECTURE.md, "A step, as it runs"

The step for an H100 is traced on any machine, from an abstract mesh, like a plan's.
"""

import ast
import collections
import pathlib
import sys
import tempfile
from types import FrameType
from typing import Any, NamedTuple

import jax

from jaxtrain import config as config_lib
from jaxtrain.assembly import assemble
from jaxtrain.parallel import layout as layout_lib

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
def get_config():
    return dict(
        workload="jaxtrain.workloads.language", loader="loaders.text.tokens",
        model=dict(embed=256, depth=2, heads=4, kv_heads=2, mlp=512, dtype="bfloat16"),
        data=dict(sources=(dict(path="text.txt"),), context=128, text="bytes", packing="concat"),
        train=dict(steps=2, batch=8, eval_every=0), optim=dict(lr=1e-3),
    )
"""
H100 = layout_lib.Devices("gpu", "9.0")


class Row(NamedTuple):
    """A file, and its functions that the trace calls, with the functions inside them."""

    path: str  # from jaxtrain/
    functions: tuple[str, ...]
    lines: int


def walk(device: str) -> list[Row]:
    """Trace a step for "h100" or "cpu", and return its files by their first call."""
    with tempfile.TemporaryDirectory() as folder:
        assembly = _assembled(pathlib.Path(folder), device)
    calls = _calls(lambda: assembly.trace(assembly.task.stage(0)))
    rows = [_row(path, first_lines) for path, first_lines in calls.items()]
    return [row for row in rows if row.functions]


def _assembled(folder: pathlib.Path, device: str) -> Any:
    text = folder / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 200)
    file = folder / "cfg.py"
    file.write_text(CONFIG.replace("text.txt", str(text)))
    config = config_lib.load(str(file), [("workdir", str(folder / "run"))])
    if device == "cpu":
        mesh = layout_lib.make_mesh(1, 1, 1, devices=jax.devices("cpu")[:1])
        return assemble(config, mesh)
    return assemble(
        config, layout_lib.abstract_mesh(1, 1, 1, count=1, what="one H100"), devices=H100
    )


def _calls(run: Any) -> dict[pathlib.Path, set[int]]:
    """Return the first lines of the functions of jaxtrain/ that ``run`` calls, by file."""
    calls: dict[pathlib.Path, set[int]] = collections.defaultdict(set)
    folder = str(ROOT / "jaxtrain")

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder):
            calls[pathlib.Path(code.co_filename)].add(code.co_firstlineno)

    jax.clear_caches()  # what an earlier trace has called is called again
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls


def _row(path: pathlib.Path, first_lines: set[int]) -> Row:
    names: dict[str, None] = {}  # in order; methods of two classes may share a name
    lines = 0
    for function in _outer_functions(ast.parse(path.read_text())):
        first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        last = function.end_lineno or first
        if any(first <= line <= last for line in first_lines):
            names[function.name] = None
            lines += last - first + 1
    return Row(str(path.relative_to(ROOT / "jaxtrain")), tuple(names), lines)


def _outer_functions(node: ast.AST) -> list[ast.FunctionDef]:
    functions = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            functions.append(child)
        else:
            functions += _outer_functions(child)
    return functions


def table(on_h100: list[Row], on_cpu: list[Row]) -> str:
    """Return the table of the page: the files, and the functions called, in the file's order.

    Functions that both devices call are in the first column of functions.
    """
    of_h100 = {row.path: row.functions for row in on_h100}
    of_cpu = {row.path: row.functions for row in on_cpu}
    lines = ["| file in `jaxtrain/` | on both | one H100 | one CPU |", "|---|---|---|---|"]
    for path in dict.fromkeys((*of_h100, *of_cpu)):
        first, second = of_h100.get(path, ()), of_cpu.get(path, ())
        both = [name for name in first if name in second]
        h100_alone = [name for name in first if name not in second]
        cpu_alone = [name for name in second if name not in first]
        cells = [f"`{path}`", _listed(both), _listed(h100_alone), _listed(cpu_alone)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    walks = [walk("h100"), walk("cpu")]
    for device, rows in zip(("h100", "cpu"), walks, strict=True):
        print(f"{device}: {len(rows)} files, {sum(row.lines for row in rows)} lines")
    print(f"\n{table(*walks)}")
