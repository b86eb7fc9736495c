"""From a file and overrides of the command line to one frozen, checked `Config`, and back to JSON.

A config file defines ``get_config(argument="")``, which returns a ``ConfigDict`` or a dictionary of
sections. All errors are collected and raised together, before a device is used.
"""

import ast
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import json
import logging
import os
import pathlib
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxtrain import configs, workload
from jaxtrain.config.consistency import (
    ArgumentError,
    ConfigError,
    between_sections,
    beyond_the_run,
    on_this_machine,
    without_defaults,
)
from jaxtrain.config.schema import (
    AUTO,
    AUTO_FIELDS,
    MESH_SIZES,
    SHARES,
    Config,
    ModelSection,
    Train,
)
from loaders import base
from loaders.io import atomic_write, checks, files
from loaders.io.checks import DataSection, Section

log = logging.getLogger("jaxtrain")
Built = typing.TypeVar("Built")

# Files whose frames every import goes through.
IMPORTERS = (
    __file__,
    base.__file__,
    workload.__file__,
    importlib.__file__,
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)


class _Text(str):
    """A value from the command line, still to be parsed as its field's type."""


def load(source: str, overrides: Iterable[tuple[str, str]] = ()) -> Config:
    """Read ``path.py[:argument]`` or a shipped config's name, apply overrides, check everything.

    Overrides are (dotted path, text). Raises ConfigError with all errors: unknown keys (and the
    nearest spelling), wrong types, values that do not fit together, missing data, a workdir that
    cannot be written.
    """
    config, problems = read(source, overrides)
    _without(problems, config)
    for text in beyond_the_run(config):
        log.warning("%s", text)
    return config


def read(
    source: str, overrides: Iterable[tuple[str, str]] = (), *, make_data: bool = True
) -> tuple[Config, list[tuple[str, str]]]:
    """Like `load`, but return the config, with defaults for wrong values, and all its errors.

    Without ``make_data`` missing data are not made, and the fields that they decide stay None.
    Raises ConfigError if there is no config: no file, a module that fails to import.
    """
    name, tree = _read_file(source)
    problems: list[tuple[str, str]] = []
    for path, text in overrides:
        _override(tree, path, text, problems)
    tree["workdir"] = tree.get("workdir") or f"runs/{name}"
    return _checked(tree, problems, make_data=make_data, facts=False), problems


def _override(tree: dict[str, Any], path: str, text: str, problems: list[tuple[str, str]]) -> None:
    """Set the field at a dotted path, in sections that are made as needed."""
    if (path, text) == ("mesh", "auto"):
        for name in MESH_SIZES:
            _override(tree, f"mesh.{name}", text, problems)
        return
    *parents, last = path.split(".")
    section = tree
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            problems.append((path, f"cannot be set: {parent!r} is a value, not a section"))
            return
    section[last] = _Text(text)


def from_dict(tree: Mapping[str, Any]) -> Config:
    """Return a checked `Config` from nested dictionaries. Raises ConfigError with all errors."""
    problems: list[tuple[str, str]] = []
    return _without(problems, _checked(tree, problems, make_data=True, facts=True))


def _checked(
    tree: Mapping[str, Any], problems: list[tuple[str, str]], *, make_data: bool, facts: bool
) -> Config:
    """Build a config, add all its errors to ``problems``, and take the dataset info.

    ``facts``: the tree may be a run's saved config, which has the model's facts of the data.
    """
    tree = _shares_in_steps(tree)
    classes = {}
    for section, field, class_of in MODULES:
        module_name = tree.get(field, getattr(Config, field))
        if isinstance(module_name, str):  # if not, building `Config` reports it
            cls = _imported_class(module_name, field, class_of, problems)
            if cls:
                classes[section] = cls
    _move_auto(tree, classes, problems)
    trees = {name: tree.pop(name, {}) for name in ("model", "data")}
    if not facts and "model" in classes and isinstance(trees["model"], Mapping):
        trees["model"] = _without_facts(classes, trees["model"], problems)
    trees = _with_facts(classes, trees)
    sections: dict[str, Any] = {}
    for name, cls in classes.items():
        sections[name] = _build(cls, trees[name], name, problems)
    config: Config = dataclasses.replace(_build(Config, tree, "", problems), **sections)
    config = _with_expanded_folders(config, problems)
    for i, (path, text) in enumerate(problems):
        if path in SHARES and text.endswith(_described(int)):
            problems[i] = path, f"{text}, or a share of the run between 0 and 1"
    unread = tuple(path for path, _ in problems)
    wrong_values = [*_wrong_values(config), *between_sections(config), *on_this_machine(config)]
    if "model" in sections and config.warm_start.source:
        wrong_values += checks.under("model", config.model.validate_start(config.warm_start))
    problems += without_defaults(wrong_values, unread)
    if len(sections) == 2:
        config = _take_dataset_info(config, problems, unread, make_data=make_data)
    return config


def _imported_class(
    module_name: str,
    field: str,
    class_of: Callable[[str], type[Section]],
    problems: list[tuple[str, str]],
) -> type[Section] | None:
    """Return the class of the section that the module of ``field`` has, or add its error."""
    problem = ""
    if not module_name or module_name.startswith("."):
        expected = "the full name of a module"
        if field == "workload" and not module_name:
            expected = f"one of: {', '.join(workload.shipped())}, or a module of your own"
        problem = f"is {module_name!r}; expected {expected}"
    else:
        try:
            return class_of(module_name)
        except (ImportError, SyntaxError) as error:
            reason = f"{_where_and_why(error)}{_nearest(_missing(error, module_name))}"
            problem = f"is {module_name!r}, and importing it failed: {reason}"
        except workload.WorkloadError as error:
            problem = f"is {module_name!r}: {error}"
        except TypeError as error:
            problem = str(error)
    problems.append((field, problem))
    return None


def _with_expanded_folders(config: Config, problems: list[tuple[str, str]]) -> Config:
    """Expand the ``~`` of the folders that a run writes to, which have one path everywhere then."""
    workdir = _expanded("workdir", config.workdir, problems)
    folder = _expanded("checkpoint.folder", config.checkpoint.folder, problems)
    checkpoint = dataclasses.replace(config.checkpoint, folder=folder)
    return dataclasses.replace(config, workdir=workdir, checkpoint=checkpoint)


def _expanded(field: str, folder: str, problems: list[tuple[str, str]]) -> str:
    if not folder.startswith("~"):
        return folder
    try:
        return str(files.expanded(folder))
    except files.FileError as error:
        problems.append((field, str(error)))
        return ""


def _wrong_values(config: Config) -> list[tuple[str, str]]:
    """Return the errors that show in each section's own values."""
    problems = [*config.validate()]
    for name, section in vars(config).items():
        if isinstance(section, Section):
            try:
                problems += checks.under(name, section.validate())
            except files.FileError as error:  # a path that cannot be expanded
                if str(error) not in dict(problems).values():
                    problems.append((name, str(error)))
    return problems


def _with_facts(classes: Mapping[str, type[Section]], trees: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections model and data, the model with the facts that are fields of the data."""
    trees = dict(trees)
    if len(classes) < 2 or not all(isinstance(tree, Mapping) for tree in trees.values()):
        return trees
    data_class: Any = classes["data"]
    defaults = {f.name: f.default for f in dataclasses.fields(data_class)}
    for name in getattr(classes["model"], "facts", ()):
        value = trees["data"].get(name, defaults.get(name))
        # if it is of another kind, it is an error of the section data alone
        if name in defaults and _is_of_kind(data_class, name, value):
            trees["model"] = {name: value, **trees["model"]}
    return trees


def _without_facts(
    classes: Mapping[str, type[Section]], model: Mapping[str, Any], problems: list[tuple[str, str]]
) -> dict[str, Any]:
    """Return the section ``model`` without its facts of the data, each of which is an error."""
    facts = getattr(classes["model"], "facts", ())
    fields = getattr(classes.get("data"), "__dataclass_fields__", {})
    for name in model:
        if name in facts:
            remedy = f"set data.{name}" if name in fields else "omit it"
            problems.append((f"model.{name}", f"is decided by the data; {remedy}"))
    return {name: value for name, value in model.items() if name not in facts}


def _is_of_kind(cls: type, name: str, value: Any) -> bool:
    problems: list[tuple[str, str]] = []
    try:
        _convert(typing.get_type_hints(cls)[name], value, name, problems)
    except (TypeError, ValueError):
        return False
    return not problems


def _shares_in_steps(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Copy ``tree`` with `SHARES` in steps: 0.05 of 2,000 steps is 100."""
    copy = {}
    for name, section in tree.items():
        copy[name] = dict(section) if isinstance(section, Mapping) else section
    steps = Train.steps
    train = copy.get("train")
    if isinstance(train, Mapping):
        set_steps = _literal(train.get("steps"))
        steps = set_steps if isinstance(set_steps, int) else steps
    for path in SHARES:
        section_name, field = path.split(".")
        section = copy.get(section_name)
        if not isinstance(section, dict):
            continue
        value = _literal(section.get(field))
        if isinstance(value, float) and 0 < value < 1:
            whole = _steps_of_cycle(section, steps) if path == "optim.warmup" else steps
            section[field] = max(1, round(value * whole))
    return copy


def _move_auto(
    tree: dict[str, Any], classes: Mapping[str, type[Section]], problems: list[tuple[str, str]]
) -> None:
    """Take the fields whose value is "auto" out of ``tree``, and name them in train.auto.

    A model that lacks the field keeps it, as an error like any unknown field.
    """
    named = _move_auto_mesh(tree, problems)
    for path in AUTO_FIELDS:
        section_name, field = path.split(".")
        section = tree.get(section_name)
        cls: Any = Train if section_name == "train" else classes.get("model")
        fields = getattr(cls, "__dataclass_fields__", {})
        if field in fields and isinstance(section, dict) and section.get(field) == "auto":
            del section[field]
            named.append(path)
    if not named:
        return
    train = tree.setdefault("train", {})
    if "auto" in train:
        text = f"is set, and so are fields that are auto ({', '.join(named)}); omit train.auto"
        problems.append(("train.auto", text))
    elif isinstance(train, dict):
        train["auto"] = tuple(sorted(named, key=AUTO.index))


def _move_auto_mesh(tree: dict[str, Any], problems: list[tuple[str, str]]) -> list[str]:
    """Take the sizes of a mesh that is auto out of ``tree``. Return its path, [] if it is not."""
    mesh = tree.get("mesh")
    if mesh == "auto":
        mesh = tree["mesh"] = dict.fromkeys(MESH_SIZES, mesh)
    if not isinstance(mesh, dict):
        return []
    sizes = {name: mesh[name] for name in MESH_SIZES if name in mesh}
    if "auto" not in sizes.values():
        return []
    for name, size in sizes.items():
        del mesh[name]
        if size != "auto":
            text = f"is {size}, and another size of the mesh is auto, which chooses all; omit it"
            problems.append((f"mesh.{name}", text))
    return ["mesh"]


def _steps_of_cycle(optim: Mapping[str, Any], steps: int) -> int:
    """Return the steps of one cycle of the learning rate: the run's, unless it has several."""
    cycle = _literal(optim.get("cycle"))
    return min(cycle, steps) if isinstance(cycle, int) and cycle > 0 else steps


def section(cls: type, tree: Mapping[str, Any]) -> Any:
    problems: list[tuple[str, str]] = []
    return _without(problems, _build(cls, tree, cls.__name__.lower(), problems))


def _without(problems: list[tuple[str, str]], built: Built) -> Built:
    if problems:
        raise ConfigError(problems)
    return built


def _model_class(module_name: str) -> type[Section]:
    """Return the ``model`` section's dataclass. Raises ImportError, SyntaxError, TypeError."""
    imported = workload.of(module_name)
    if not callable(imported.config):
        raise TypeError(
            f"is {module_name!r}, whose WORKLOAD has the config {imported.config!r}; expected a"
            " dataclass"
        )
    functions = {"make_task": imported.make_task}
    return _checked_class(module_name, imported.config_class(), ModelSection, functions)


def _data_class(module_name: str) -> type[Section]:
    """Return the dataclass of the section ``data``, from its loader. Raises as `_model_class`."""
    module = base.module(module_name)
    names = ("element_spec", "dataset_info", "make_loader")
    functions = {name: getattr(module, name, None) for name in names}
    return _checked_class(module_name, getattr(module, "Config", None), DataSection, functions)


def _checked_class(
    module_name: str, cls: Any, parent: type[Section], functions: Mapping[str, Any]
) -> type[Section]:
    """Return ``cls``, a section of its kind with callable ``functions``. Raises TypeError."""
    missing = []
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        missing.append("a dataclass named Config")
    elif not issubclass(cls, parent):
        raise TypeError(
            f"is {module_name!r}, whose Config is not a {parent.__name__}; derive it from"
            f" {parent.__module__}.{parent.__name__}"
        )
    for name, function in functions.items():
        if not callable(function):
            missing.append(f"the function {name!r}")
    if missing:
        raise TypeError(
            f"is {module_name!r}, a module without {', '.join(missing)}; docs/your-model.md has an"
            " example"
        )
    section_class: type[Section] = cls
    return section_class


def _take_dataset_info(
    config: Config, problems: list[tuple[str, str]], unread: Sequence[str], *, make_data: bool
) -> Config:
    """Fill the model's None fields with the dataset info, if the data section has no error."""
    if any(path.startswith(("data", "loader")) for path, _ in problems):
        return config
    loader = base.module(config.loader)
    if (problems or not make_data) and not config.data.exists():
        # the data would have to be made first, and the config is refused anyway, or only looked at
        return config
    try:
        info = loader.dataset_info(config.data)
    except ValueError as error:
        problems.append(("data", checks.Message(error)))
        return config
    for name in config.model.facts:
        value, fact = getattr(config.model, name), info.get(name)
        if value is not None and value != fact:
            text = f"is {str(value)[:80]}, and the data have {str(fact)[:80]}; omit it"
            problems.append((f"model.{name}", text))
    decided = {}
    for f in dataclasses.fields(config.model):
        if getattr(config.model, f.name) is None and f.name in info:
            decided[f.name] = info[f.name]
    model = dataclasses.replace(config.model, **decided)
    problems += without_defaults(checks.under("model", model.validate_data(info)), unread)
    if not problems and not config.warm_start.source:
        for path, text in checks.under("model", model.data_notes(info)):
            log.warning("config.%s %s", path, text)
    return dataclasses.replace(config, model=model)


def _read_file(source: str) -> tuple[str, dict[str, Any]]:
    """Return the stem of a config file's name, and the dictionary of its ``get_config``."""
    # here: an exported encoder imports this package, and needs no config file
    from ml_collections import ConfigDict

    file, module, argument = import_file(source)
    get_config = function_of(module, file, "get_config", "get_config(argument='')")
    parameters = inspect.signature(get_config).parameters.values()
    if argument and not parameters:
        raise ConfigError([("", f"file {file} takes no argument, and {argument!r} is given")])
    needs_argument = any(p.default is inspect.Parameter.empty for p in parameters)
    try:
        config = get_config(argument) if argument or needs_argument else get_config()
    except (ValueError, OSError) as error:  # how a config refuses its argument
        raise ArgumentError([("", f"file {file} says: {error}")]) from error
    tree = config.to_dict() if isinstance(config, ConfigDict) else config
    if not isinstance(tree, Mapping) or not all(isinstance(name, str) for name in tree):
        text = (
            f"file {file}: get_config returns {str(config)[:80]!r} ({type(config).__name__});"
            " expected a ConfigDict, or a dictionary of sections"
        )
        raise ConfigError([("", text)])
    return file.stem, dict(tree)


def import_file(source: str) -> tuple[pathlib.Path, types.ModuleType, str]:
    """Import a config file. Return its path, module and the text after ":". Raises ConfigError."""
    path, _, argument = source.partition(":")
    file = locate(path)
    if file.parent != configs.FOLDER:
        # Modules that a user's config names lie next to it, or in the current folder: as with
        # `python -m`, also if another program started this process.
        for folder in (os.getcwd(), str(file.parent.absolute())):
            if folder not in sys.path:
                sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(f"jaxtrain_config_{file.stem}", file)
    assert spec and spec.loader, f"{file} is a Python file"
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            [("", f"file {file} cannot be imported: {_where_and_why(error)}{_moved(error)}")]
        ) from error
    return file, module, argument


def _missing(error: Exception, module_name: str) -> str:
    """Return the module that an import did not find: ``module_name``, or one that it imports."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    match = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
    if match:
        name = f"{match[2]}.{match[1]}"
    if not name or f"{module_name}.".startswith(f"{name}."):
        return module_name
    return name


def _moved(error: Exception) -> str:
    """Return the new place of a module of ours that an import did not find, as a question."""
    place = _place_of(_missing(error, ""))
    return f"; did you mean {place!r}?" if place else ""


def _place_of(module_name: str) -> str:
    """Return the only module of jaxtrain or loaders that has the last part of a name, or ""."""
    package, _, path = module_name.partition(".")
    last_part = path.rpartition(".")[2]
    if package not in ("jaxtrain", "loaders") or not last_part.isidentifier():
        return ""
    root = pathlib.Path(str(sys.modules[package].__file__)).parent
    places = [*root.rglob(f"{last_part}.py"), *root.rglob(f"{last_part}/__init__.py")]
    return _dotted(places[0], root) if len(places) == 1 else ""


def _dotted(path: pathlib.Path, package: pathlib.Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def _nearest(module_name: str) -> str:
    """Return the module that a name may stand for: of ours, or next to the config."""
    place = _place_of(module_name)
    if place and place != module_name:
        return f"; did you mean {place!r}?"
    candidates = {name.rpartition(".")[2]: name for name in workload.shipped()}
    if module_name.startswith("loaders."):
        package = pathlib.Path(base.__file__).parent
        for path in package.rglob("*.py"):
            if "def make_loader(" in path.read_text():
                candidates[path.stem] = _dotted(path, package)
    for folder in {*sys.path[:3], "."}:
        for path in pathlib.Path(folder or ".").glob("*.py"):
            candidates[path.stem] = path.stem
    last_part = module_name.rpartition(".")[2]
    matches = difflib.get_close_matches(last_part, candidates, n=1, cutoff=0.75)
    if not matches or candidates[matches[0]] == module_name:
        return ""
    return f"; did you mean {candidates[matches[0]]!r}?"


def _where_and_why(error: Exception) -> str:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    first_line = next(iter(str(error).splitlines()), "")
    reason = f"{type(error).__name__}: {first_line}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename not in IMPORTERS:
            return f"{frame.filename}, line {frame.lineno}: {reason}"
    return reason


def locate(path: str) -> pathlib.Path:
    """Return a config's file: the user's by path, or jaxtrain's by name. Raises ConfigError."""
    file = pathlib.Path(path)
    if file.is_file() and file.suffix == ".py":
        return file
    if path in configs.names():
        return configs.FOLDER / f"{path}.py"
    if file.suffix == ".py" and file.stem in configs.names():
        text = f"file {path} does not exist; the config that jaxtrain ships is --config={file.stem}"
        raise ConfigError([("", text)])
    if file.is_file():
        raise ConfigError([("", f"file {path} is no config; its name must end in .py")])
    neighbours = []
    if file.parent.is_dir():
        neighbours = sorted(str(neighbour) for neighbour in file.parent.glob("*.py"))
    name = path
    if file.suffix == ".py" and not neighbours:
        name = file.stem
    remedy = checks.expected(name, [*configs.names(), *neighbours])
    text = f"file {path} does not exist, nor does jaxtrain ship a config of this name; {remedy}"
    raise ConfigError([("", text)])


def function_of(
    module: types.ModuleType, file: pathlib.Path, name: str, what: str
) -> Callable[..., Any]:
    """Return a function, called ``what``, that a config file must define. Raises ConfigError."""
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError([("", f"file {file} defines no function {what}")])
    return function


def _build(cls: type, tree: Any, path: str, problems: list[tuple[str, str]]) -> Any:
    """Build a dataclass with defaults for what is wrong, which is added to ``problems``."""
    if not isinstance(tree, Mapping):
        problems.append((path, f"is {tree!r}; it is a section with the fields {_names(cls)}"))
        return cls()
    kinds = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        field_path = f"{path}.{key}".strip(".")
        if key not in kinds:
            problems.append((field_path, f"does not exist; {checks.expected(key, _names(cls))}"))
            continue
        try:
            values[key] = _convert(kinds[key], value, field_path, problems)
        except (TypeError, ValueError) as error:
            problems.append((field_path, str(error)))
    try:
        return cls(**values)
    except TypeError as error:
        missing = [
            f.name for f in dataclasses.fields(cls) if f.name not in values and _has_no_default(f)
        ]
        if not missing:
            raise
        for name in missing:
            problems.append((f"{path}.{name}".strip("."), "has no default and must be set"))
        raise ConfigError(problems) from error


def _convert(kind: Any, value: Any, path: str, problems: list[tuple[str, str]]) -> Any:
    """Convert ``value`` to ``kind`` without a guess, `_Text` parsed first: "1" is no int."""
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, _Text) and value.lower() == "none"):
            return None
        kind_of_value = next(option for option in options if option is not types.NoneType)
        return _convert(kind_of_value, value, path, problems)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _build(kind, _literal(value), path, problems)
    if kind is Any:
        # An argument of a factory of the user's is as a field is: false is no text.
        is_argument = path.startswith(("optim.arguments.", "optim.schedule_arguments."))
        if is_argument and _is_bool(value):
            return _as_bool(value)
        return _literal(value)
    if kind is str:
        if isinstance(value, str):
            return str(value)
        raise TypeError(f"is {value!r} ({type(value).__name__}); expected a string")
    if kind is bool and _is_bool(value):
        return _as_bool(value)
    if origin is tuple:
        return _convert_tuple(options, value, path, problems)
    value = _literal(value)
    if origin is dict:
        return _convert_dict(options, value, path, problems)
    if kind in (int, float) and isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise TypeError(f"is {str(value)[:40]}…; expected a number of at most 63 bits")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"is {value!r} ({type(value).__name__}); expected {_described(kind)}")
    return value


def _convert_tuple(
    options: tuple[Any, ...], value: Any, path: str, problems: list[tuple[str, str]]
) -> tuple[Any, ...]:
    """Convert a tuple whose type has the arguments ``options``."""
    items = _literal(value)
    are_names = options[0] is str and isinstance(items, str) and isinstance(value, _Text)
    if are_names and not set(items) & set("()[]{}'\""):
        # names, as typed in a shell
        items = tuple(filter(None, (name.strip() for name in items.split(","))))
    if not isinstance(items, list | tuple):
        example = ("a", "b") if options[0] is str else (1, 2)
        raise TypeError(f"is {items!r}; expected a tuple, for example {example}")
    kinds = [options[0]] * len(items) if options[-1] is Ellipsis else options
    if len(kinds) != len(items):
        raise TypeError(f"is {items!r}; expected {len(kinds)} values")
    converted = []
    for i, item in enumerate(items):
        converted.append(_convert(kinds[i], item, f"{path}[{i}]", problems))
    return tuple(converted)


def _convert_dict(
    options: tuple[Any, ...], value: Any, path: str, problems: list[tuple[str, str]]
) -> dict[Any, Any]:
    """Convert a dictionary whose type has the arguments ``options``."""
    if not isinstance(value, Mapping):
        raise TypeError(f"is {value!r}; expected a dictionary")
    key_kind, item_kind = options
    converted = {}
    for key, item in value.items():
        name = _convert(key_kind, key, path, problems)
        converted[name] = _convert(item_kind, item, f"{path}.{key}", problems)
    return converted


def _is_bool(value: Any) -> bool:
    """Whether a value of the command line is true or false."""
    return isinstance(value, _Text) and value.lower() in ("true", "false")


def _as_bool(value: str) -> bool:
    return value.lower() == "true"


def _literal(value: Any) -> Any:
    if not isinstance(value, _Text):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return str(value)


# The sections whose class a module has: name, the field that names the module, how it is found.
MODULES = (("model", "workload", _model_class), ("data", "loader", _data_class))


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2)


def save(config: Config, folder: str | os.PathLike[str]) -> None:
    """Write config.json into ``folder``, whole or not at all."""
    atomic_write.write(pathlib.Path(folder) / "config.json", to_json(config) + "\n")


def _names(cls: type) -> list[str]:
    """Return the fields that a config file may set."""
    facts = getattr(cls, "facts", ())
    return [f.name for f in dataclasses.fields(cls) if f.name not in facts]


def _has_no_default(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _described(kind: type) -> str:
    descriptions = {int: "a whole number", float: "a number", bool: "true or false"}
    return descriptions.get(kind, kind.__name__)
