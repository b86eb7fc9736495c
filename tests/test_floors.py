"""Imports only go down: cli ▸ workloads ▸ commands ▸ run ▸ mechanisms ▸ config ▸ types. The loaders
stand apart."""

import ast
import functools
import pathlib
import re

import pytest

from jaxtrain import workload
from tests.support import installed, step_walk, workload_loaders

ROOT = pathlib.Path(__file__).parent.parent
# A member is a module or a package of jaxtrain/. Each is on one floor, and imports only from lower
# ones.
FLOORS = (
    {"main", "__main__"},
    {"cli"},
    {"workloads"},
    {"commands"},
    {"api", "dissect"},
    {"run", "doctor"},
    {"plan"},
    {"checkpoint"},
    {"assembly", "arrays"},
    {"step"},
    {"nn", "optim", "supervise"},
    {"specs", "compile", "telemetry"},
    {"parallel"},
    {"config", "data"},
    # the folder of the shipped configs, which import the modules that they configure
    {"types", "workload", "configs"},
)
# Modules of loaders/ that every module of jaxtrain may use. They know of no data, and import
# nothing of ours except each other and, in a function, the compiled extension.
GROUND = {
    "loaders.base",
    "loaders.io.machine",
    "loaders.io.checks",
    "loaders.io.files",
    "loaders.io.atomic_write",
    "loaders.io.content",
}
NO_ROOMS = {"utils", "helpers", "common", "base_trainer", "registry", "callbacks", "hooks"}
# the public names
MODULES = sorted(
    p for p in (ROOT / "jaxtrain").rglob("*.py") if p != ROOT / "jaxtrain" / "__init__.py"
)
LOADERS = sorted((ROOT / "loaders").rglob("*.py")) + sorted((ROOT / "loaders").rglob("*.pyi"))


@functools.cache
def imports(path: pathlib.Path) -> frozenset[str]:
    """Every module that a file imports anywhere. ``from a import b`` counts as a.b."""
    return imported_by(path.read_text(), path)


def imported_by(text: str, path: pathlib.Path | None = None) -> frozenset[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import hides where it goes"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def member(module: str) -> str | None:
    """The member of a floor that jaxtrain.<member>... belongs to. It is None for the package itself
    and for other packages."""
    parts = module.split(".")
    is_member = parts[0] == "jaxtrain" and len(parts) > 1 and parts[1] in set.union(*FLOORS)
    return parts[1] if is_member else None


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


def name_of(path: pathlib.Path) -> str:
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return member(dotted) or dotted.partition(".")[2]


# The interface between the trainer and a workload names the types of higher floors, which only a
# type checker imports.
NAMES_TYPES_OF_HIGHER_FLOORS = ROOT / "jaxtrain" / "workload.py"


def imports_that_run(path: pathlib.Path) -> frozenset[str]:
    if path != NAMES_TYPES_OF_HIGHER_FLOORS:
        return imports(path)
    before, _, after = re.split(
        r"^(if TYPE_CHECKING:.*\n(?:    .*\n)+)", path.read_text(), flags=re.M
    )
    return imported_by(before + after, path)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    here = name_of(path)
    for there in {member(module) for module in imports_that_run(path)} - {None, here}:
        assert floor(there) > floor(here), f"{path}: {here} imports {there}, which is not below it"


def test_every_module_has_a_floor():
    assert {name_of(path) for path in MODULES} == set.union(*FLOORS)


def test_the_reader_sees_every_kind_of_import(tmp_path):
    file = tmp_path / "x.py"
    file.write_text(
        "import a.b\nfrom jaxtrain.run import loop as t\ndef f():\n    from jaxtrain.nn.attention"
        " import attention\n"
    )
    assert imports(file) == {"a.b", "jaxtrain.run.loop", "jaxtrain.nn.attention.attention"}
    assert [member(m) for m in sorted(imports(file))] == [None, "nn", "run"]


@pytest.mark.parametrize("path", LOADERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_loaders_know_neither_jax_nor_the_trainer(path):
    assert not {
        m
        for m in imports(path)
        if m.split(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax", "jaxtrain")
    }


def test_only_modules_that_hold_data_import_the_loaders():
    users = {
        name_of(path)
        for path in MODULES
        for module in imports(path)
        if module.split(".")[0] == "loaders"
        and not any(f"{module}.".startswith(f"{ground}.") for ground in GROUND)
    }
    assert users <= {
        "run",
        "assembly",
        "data",
        "commands",
        "workloads",
        "doctor",
    }


def test_the_ground_of_the_loaders_imports_nothing_of_ours_but_itself():
    for name in GROUND:
        used = imports(ROOT / f"{name.replace('.', '/')}.py")
        ours = {
            module
            for module in used
            if module.split(".")[0] in ("loaders", "jaxtrain", "tools", "configs")
        }
        ours -= {"loaders._rust", *GROUND}
        assert not {module for module in ours if module.rpartition(".")[0] not in GROUND}


def test_the_loaders_do_not_import_each_other_in_a_circle():
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in LOADERS}
    modules = set(names.values())
    above = {
        name: imports(path) | {m.rpartition(".")[0] for m in imports(path)}
        for path, name in names.items()
    }
    while leaves := {
        name for name, used in above.items() if not used & (modules - {name}) & set(above)
    }:
        above = {name: used for name, used in above.items() if name not in leaves}
    assert not above, f"each of {sorted(above)} imports, or is imported by, another of them"


# The shipped workloads and their domains.
WORDS = re.compile(
    r"(?<![a-z])(birds?|recordings?|species|spectrograms?|timm|onnx|vit|mae"
    r"|language|causal_lm|qwen|llama|audio|codecs?|higgs|chats?"
    r"|trm|boards?|sudoku|puzzles?|mazes?"
    r"|giblet|films?|brains?|fmri|voxels?|viewers?)\d*(?![a-z])",
    re.IGNORECASE,
)
# Not names of a workload:
# 1. examples in a command's help: a shipped config, its run, a page of the docs;
# 2. HTML's element of a sound, and its type; TensorBoard.
OTHERS = re.compile(r"TensorBoard|--config=\S+|\bruns/\S+|\w+\.md|</?audio\b|data:audio/")
# 3. The published decoders that shared layers compute.
DECODERS = re.compile(r"(llama|qwen) ?\d?", re.IGNORECASE)


def names_of_workloads(text: str, *, layers: bool = False) -> set[str]:
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", OTHERS.sub("", text))  # BirdSet is Bird and Set
    return {word[0] for word in WORDS.finditer(DECODERS.sub("", text) if layers else text)}


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if name_of(p) != "workloads"],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_the_trainer_names_no_workload(path):
    found = names_of_workloads(path.read_text(), layers=name_of(path) == "nn")
    assert not found, (
        f"{path} says {', '.join(sorted(found))}: that belongs to the package of a workload"
    )


def test_the_reader_sees_names_of_workloads():
    text = (
        "jaxtrain.workloads.language, TRM's n_voxels; --config=trm_sudoku in runs/bird, boarding"
        " Llama 3"
    )
    assert names_of_workloads(text) == {"language", "TRM", "voxels", "Llama"}
    assert names_of_workloads(text, layers=True) == {"language", "TRM", "voxels"}
    assert all(map(names_of_workloads, workload.shipped()))


def test_workloads_do_not_know_each_other():
    folder = ROOT / "jaxtrain" / "workloads"
    for path in folder.rglob("*.py"):
        own = f"jaxtrain.workloads.{path.relative_to(folder).parts[0].removesuffix('.py')}."
        assert not {
            m
            for m in imports(path)
            if m.startswith("jaxtrain.workloads") and not f"{m}.".startswith(own)
        }


def loader_packages(workload_folder: pathlib.Path) -> set[str]:
    """The packages of loaders/ that a workload's modules import, directly or through others."""
    files = list(workload_folder.rglob("*.py"))
    visited = set()
    while files:
        file = files.pop()
        visited.add(file)
        for module in imports(file):
            # The last part may be a name in the module.
            for dotted in (module, module.rpartition(".")[0]):
                imported = ROOT / f"{dotted.replace('.', '/')}.py"
                if imported in LOADERS and imported not in visited:
                    files.append(imported)
    parts = {file.relative_to(ROOT).parts for file in visited}
    return {path[1] for path in parts if path[0] == "loaders" and len(path) > 2} - {"io"}


@pytest.mark.parametrize("name", workload_loaders.LOADERS)
def test_a_workload_imports_only_its_own_packages_of_loaders(name):
    assert loader_packages(ROOT / "jaxtrain" / "workloads" / name) == workload_loaders.LOADERS[name]


def test_every_workload_and_every_package_of_loaders_is_in_the_table():
    table = workload_loaders.LOADERS
    assert {f"{workload.PACKAGE}.{name}" for name in table} == set(workload.shipped())
    packages = {path.parent.name for path in (ROOT / "loaders").glob("*/__init__.py")}
    assert packages - {"io"} == set.union(*table.values())


def test_nothing_imports_the_tools():
    everything = MODULES + LOADERS + sorted((ROOT / "configs").glob("*.py"))
    assert not {str(p) for p in everything if any(m.split(".")[0] == "tools" for m in imports(p))}


def test_tests_share_through_support_and_fixtures():
    """No test imports another one. Shared code is in tests/support/, and shared fixtures are in a
    conftest.py above the tests."""
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if "data" not in path.parts]
    assert [
        path
        for path in tests
        if any(part.startswith("test_") for m in imports(path) for part in m.split("."))
    ] == []
    assert [path for path in tests if not (path.parent / "__init__.py").exists()] == [], (
        "a folder of tests is a package"
    )


def test_no_module_is_called_utils_or_helpers():
    everything = [
        p for top in ("jaxtrain", "loaders", "configs", "tools") for p in (ROOT / top).rglob("*.py")
    ]
    assert not [str(p) for p in everything if {p.stem, *p.relative_to(ROOT).parts} & NO_ROOMS]


def closures(tree: ast.AST) -> list[str]:
    """Functions inside functions (except methods) that read a name to which the outer function
    assigns more than once."""
    found = []
    for outer in ast.walk(tree):
        if not isinstance(outer, ast.FunctionDef):
            continue
        inner = [
            node
            for node in ast.walk(outer)
            if isinstance(node, ast.FunctionDef | ast.Lambda) and node is not outer
        ]
        inside = {id(child) for function in inner for child in ast.walk(function)}
        own = [
            n
            for n in ast.walk(outer)
            if isinstance(n, ast.Name) and id(n) not in inside and isinstance(n.ctx, ast.Store)
        ]
        loops = [
            n for n in ast.walk(outer) if isinstance(n, ast.While | ast.For) and id(n) not in inside
        ]
        changing = {n.id for n in own if sum(o.id == n.id for o in own) > 1}
        changing |= {
            n.id for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Name) and n in own
        }
        for function in inner:
            bound = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
            bound |= {
                n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            }
            read = {
                n.id
                for n in ast.walk(function)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
            }
            if hit := sorted((read - bound) & changing):
                found.append(
                    f"{outer.name}: {getattr(function, 'name', 'lambda')} reads {', '.join(hit)}"
                )
    return found


def test_nothing_is_nonlocal():
    """State has a named owner: an object or an argument."""
    assert not [
        str(p) for p in MODULES if re.search(r"^\s*nonlocal\b", p.read_text(), re.MULTILINE)
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "jaxtrain/run").glob("*.py")), ids=lambda p: p.stem)
def test_the_run_has_no_closure_over_mutable_state(path):
    assert not closures(ast.parse(path.read_text()))


def test_the_reader_sees_closures_over_mutable_state():
    text = """
def run(n):
    state = 0
    fixed = n
    def report():
        return state + fixed
    while n:
        state = state + 1
    return report
"""
    assert closures(ast.parse(text)) == ["run: report reads state"]
    assert not closures(ast.parse(text.replace("return state + fixed", "return fixed")))


@pytest.mark.skipif("language" not in installed.NAMES, reason="its workload is deleted")
def test_the_page_has_the_functions_of_a_step():
    """`python -m tests.support.step_walk` prints the table."""
    on_h100, on_cpu = step_walk.walk("h100"), step_walk.walk("cpu")
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    assert step_walk.table(on_h100, on_cpu) in page
    for rows, files, lines in ((on_h100, 15, 1_300), (on_cpu, 14, 1_350)):
        assert len(rows) <= files and sum(row.lines for row in rows) <= lines
