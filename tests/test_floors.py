"""Imports go down only: main ▸ train ▸ the run's parts ▸ workloads ▸ mechanisms ▸ ground. The loaders are a wing apart."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = (
    {"main"},
    {"train"},
    {"plan", "checkpoint", "workloads", "step", "feed"},
    {"state", "optim", "layout", "specs", "nn", "lora", "environments", "metrics", "cluster", "compiler"},
    {"types", "config", "chips", "hlo", "liveness"},
)
# Neighbours on one floor, and why.
ALLOWED = {
    ("plan", "feed"): "a plan counts the rows that a process holds",
    ("plan", "step"): "a plan traces and compiles the real step",
    ("workloads", "checkpoint"): "a workload reads and exports the arrays of others",
    ("state", "layout"): "a state is planned with its shardings",
    ("state", "specs"): "a state is made from the parameter table",
    ("specs", "layout"): "abstract arrays carry the layout's shardings",
    ("nn", "layout"): "statistics of the global batch are summed over the mesh axis of replicas",
    ("nn", "specs"): "layers that workloads share come with their part of the table",
    ("lora", "specs"): "adapters are chosen by the paths of the parameter table",
    ("optim", "specs"): "groups are chosen by the paths of the parameter table",
}
# Modules of loaders/ that know of no data and import nothing of ours: every module of jaxtrain may use them.
GROUND = {"loaders.machine", "loaders.checks"}
NO_ROOMS = {"utils", "helpers", "common", "base_trainer", "registry", "callbacks", "hooks"}
MODULES = sorted((ROOT / "jaxtrain").rglob("*.py"))
LOADERS = sorted((ROOT / "loaders").rglob("*.py")) + sorted((ROOT / "loaders").rglob("*.pyi"))


def imports(path: pathlib.Path) -> set[str]:
    """Every module that a file imports, anywhere in it; ``from a import b`` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: a relative import hides where it goes"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str | None:
    """The floor's member that jaxtrain.<room>... belongs to."""
    top, _, rest = module.partition(".")
    return rest.split(".")[0] if top == "jaxtrain" and rest else None


def floor(name: str) -> int:
    return next(i for i, rooms in enumerate(FLOORS) if name in rooms)


def name_of(path: pathlib.Path) -> str:
    return path.relative_to(ROOT / "jaxtrain").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    here = name_of(path)
    for there in {room(module) for module in imports(path)} - {None, here}:
        assert here != "__init__", f"{path} imports {there}; the package itself stays empty"
        down = floor(there) > floor(here) or (here, there) in ALLOWED
        assert down, f"{here} imports {there}, which is not below it"


def test_every_module_has_a_floor():
    assert {name_of(path) for path in MODULES} - {"__init__"} == set.union(*FLOORS)


def test_neighbours_that_are_allowed_are_used():
    used = {(name_of(path), room(module)) for path in MODULES for module in imports(path)}
    assert set(ALLOWED) <= used


def test_the_reader_sees_every_kind_of_import(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("import a.b\nfrom jaxtrain import train as t\ndef f():\n    from jaxtrain.nn.attention import attention\n")
    assert imports(file) == {"a.b", "jaxtrain.train", "jaxtrain.nn.attention.attention"}
    assert [room(m) for m in sorted(imports(file))] == [None, "nn", "train"]


@pytest.mark.parametrize("path", LOADERS, ids=lambda p: str(p.relative_to(ROOT)))
def test_loaders_know_neither_jax_nor_the_trainer(path):
    assert not {m for m in imports(path) if m.split(".")[0] in ("jax", "jaxlib", "flax", "optax", "orbax", "jaxtrain")}


def test_only_train_and_feed_know_the_loaders():
    users = {
        name_of(path)
        for path in MODULES
        for module in imports(path)
        if module.split(".")[0] == "loaders" and ".".join(module.split(".")[:2]) not in GROUND
    }
    assert users <= {"train", "feed"}


def test_the_ground_of_the_loaders_imports_nothing_of_ours():
    for name in GROUND:
        used = imports(ROOT / f"{name.replace('.', '/')}.py")
        assert not {module for module in used if module.split(".")[0] in ("loaders", "jaxtrain", "tools", "configs")}


def test_workloads_do_not_know_each_other():
    for path in (ROOT / "jaxtrain" / "workloads").glob("*.py"):
        assert not {m for m in imports(path) if m.startswith("jaxtrain.workloads")}


def test_nothing_imports_the_tools():
    everything = MODULES + LOADERS + sorted((ROOT / "configs").glob("*.py"))
    assert not {str(p) for p in everything if any(m.split(".")[0] == "tools" for m in imports(p))}


def test_no_module_is_a_drawer():
    everything = [p for top in ("jaxtrain", "loaders", "configs", "tools") for p in (ROOT / top).rglob("*.py")]
    assert not [str(p) for p in everything if {p.stem, *p.relative_to(ROOT).parts} & NO_ROOMS]


@pytest.mark.xfail(
    strict=True, reason="train.py keeps its loop's state in closures until it is rewritten; then remove this mark"
)
def test_no_function_rebinds_the_variables_of_another():
    """State that changes belongs to an object with a name; a ``nonlocal`` hides it in a function's frame."""
    assert not {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Nonlocal)
    }
