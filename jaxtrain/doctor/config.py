"""The config of a run: its mistakes, and what it says of folders and of sizes.

It runs in a process of its own (`jaxtrain.doctor.apart`), which imports code of the user's, and looks at folders that may hang.
It computes nothing, and asks jax for no accelerator: what is wrong with those is found elsewhere.
"""

import dataclasses
import glob
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain.checkpoint import disk_usage
from jaxtrain.config import ConfigError
from jaxtrain.doctor.check import Check, fail, ok, raised
from loaders.io.checks import DataSection

GROUP = "config"
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}  # of its process


def examine(*, source: str, overrides: list[list[str]], count: int, kind: str) -> tuple[list[Check], dict[str, Any]]:
    """Args: the config; the devices of the whole job, and their kind as jax spells it (0 and "" = not known)."""
    from jaxtrain import config as config_lib

    try:
        config, problems = config_lib.read(source, [(path, text) for path, text in overrides], make_data=False)
    except config_lib.ConfigError as error:
        remedy = "correct this file, or what it imports; where it is missing, copy it to this host"
        return list(_mistakes("file", error.problems, remedy)), {}
    except SystemExit as error:
        text = f"{source} ends the program that reads it: {raised(error)}"
        return [fail(GROUP, "file", text, "remove this call: get_config returns the config, or raises ValueError")], {}
    except Exception as error:  # noqa: BLE001  whatever a file of the user's raises
        return [fail(GROUP, "file", f"{source}: {raised(error)}", "correct this file, or what it imports")], {}
    if problems:
        return list(_mistakes("fields", problems, "correct it as it says: jaxtrain explain lists every field")), {}
    checks = [ok(GROUP, "fields", f"{source}: every field is valid")]
    workdir, folder = os.path.abspath(config.workdir), config.checkpoint.folder
    facts: dict[str, Any] = {
        "config": json.loads(config_lib.to_json(config)),
        "workdir": workdir,
        "folder": _place(folder),
        "reads": _read_from(config.data),
    }
    if count and config.data.exists():  # else what the model takes from its data is not known
        try:
            facts |= _sizes(config, count=count, kind=kind)
        except ValueError as error:  # LayoutError, OptimError, DataError …
            checks.append(fail(GROUP, "plan", str(error), "correct it as it says: jaxtrain explain lists every field"))
        except Exception as error:  # noqa: BLE001  whatever a workload of the user's raises
            remedy = f"correct config.workload={config.workload}, or what it imports"
            checks.append(fail(GROUP, "plan", f"{config.workload}: {raised(error)}", remedy))
    return checks, facts


def _mistakes(name: str, problems: Sequence[tuple[str, str]], remedy: str) -> Iterator[Check]:
    """A finding for each mistake of a config, in the words of `ConfigError`."""
    for problem in problems:
        yield fail(GROUP, name, str(ConfigError([problem])), remedy)


def typed(overrides: Sequence[tuple[str, str]]) -> dict[str, str]:
    """The folders that the command line names, for a config that gave no answer: "workdir" and "folder", or nothing."""
    given = dict(overrides)
    if not given.get("workdir"):
        return {}
    return {"workdir": _place(given["workdir"]), "folder": _place(given.get("checkpoint.folder", ""))}


def _place(folder: str) -> str:
    return folder if "://" in folder or not folder else os.path.abspath(os.path.expanduser(folder))


def _read_from(data: DataSection) -> dict[str, str]:
    """Folders of this machine that the data's fields name: field -> the folder, or the file."""
    found: dict[str, str] = {}
    for name, value in _paths(data):
        if not value or "://" in value:
            continue
        pattern = glob.has_magic(value)
        path = os.path.abspath(os.path.expanduser(os.path.dirname(re.split(r"[*?\[]", value)[0]) if pattern else value))
        if os.path.lexists(path) and path not in found.values():  # else it is a built-in one, or a mistake of the config
            found[name] = path
    return found


def _paths(section: Any, within: str = "") -> Iterator[tuple[str, str]]:
    """(field, value) of all fields whose unit is a path, those of nested sections included: "sources[0].path"."""
    from jaxtrain.config.explain import gloss

    glosses = gloss(type(section))  # type: ignore[arg-type]  # mypy: a class of which nothing is known may not hash
    for field in dataclasses.fields(section):
        name, value = f"{within}{field.name}", getattr(section, field.name)
        if isinstance(value, str):
            if glosses[field.name][0] == "path":
                yield name, value
        elif dataclasses.is_dataclass(value):
            yield from _paths(value, f"{name}.")
        elif isinstance(value, tuple):
            for i, each in enumerate(value):
                if dataclasses.is_dataclass(each):
                    yield from _paths(each, f"{name}[{i}].")


def _sizes(config: Any, *, count: int, kind: str) -> dict[str, Any]:
    """What a run holds on disk and asks of its loader, on ``count`` devices. Raises ValueError."""
    from jaxtrain import plan
    from jaxtrain.parallel import chips
    from jaxtrain.parallel import layout as layout_lib

    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    mesh = layout_lib.abstract_mesh(*sizes, count=count, what=f"{count} devices")
    assembly = plan.assemble(config, mesh, devices=layout_lib.devices_of(kind))
    chip = chips.find(kind)
    ideal = assembly.task.flops / (count * chip.flops) / plan.MFU if chip else 0.0
    return {
        # Their folder, how many, the bytes of each.
        "checkpoints": [
            disk_usage.folder_of(os.path.abspath(config.workdir), config.checkpoint.folder),
            *plan.checkpoints(config, assembly.abstract.state),
        ],
        "rows_per_second": config.train.batch / ideal if ideal else 0.0,  # that the whole job will ask for
    }
