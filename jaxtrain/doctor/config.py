"""The config of a run: its errors, and the folders and sizes that it decides.

It runs in a process of its own (`jaxtrain.doctor.apart`), which imports code of the user's.
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
from jaxtrain.doctor.check import Check, Found, fail, ok, raised

GROUP = "config"
FIELD = "correct it as it says: jaxtrain explain lists every field"
FILE = "correct this file, or what it imports"


def examine(*, source: str, overrides: Any, count: int, kind: str) -> Found:
    """Check a config.

    Args:
      count, kind: the devices of the whole job, as jax spells their kind (0 and "" = not known).
    """
    from jaxtrain import config as config_lib

    try:
        config, problems = config_lib.read(source, overrides, make_data=False)
    except ConfigError as error:
        remedy = f"{FILE}; if it is missing, copy it to this host"
        return _errors("file", error.problems, remedy), {}
    except (SystemExit, Exception) as error:  # any error of a user's file
        return [fail(GROUP, "file", f"{source}: {raised(error)}", FILE)], {}
    if problems:
        return _errors("fields", problems, FIELD), {}
    checks = [ok(GROUP, "fields", f"{source}: every field is valid")]
    facts: dict[str, Any] = {
        "config": json.loads(config_lib.to_json(config)),
        "workdir": os.path.abspath(config.workdir),
        "folder": _place(config.checkpoint.folder),
        "reads": _read_from(config.data),
    }
    if count and config.data.exists():  # else the model's fields that its data decide are not known
        try:
            facts |= _sizes(config, count=count, kind=kind)
        except ValueError as error:  # LayoutError, OptimError, DataError …
            checks.append(fail(GROUP, "plan", str(error), FIELD))
        except Exception as error:  # noqa: BLE001  any error of a user's workload
            text = f"{config.workload}: {raised(error)}"
            checks.append(fail(GROUP, "plan", text, f"correct {config.workload}, or its imports"))
    return checks, facts


def _errors(name: str, problems: Sequence[tuple[str, str]], remedy: str) -> list[Check]:
    """A finding for each error of a config, in the words of `ConfigError`."""
    return [fail(GROUP, name, str(ConfigError([problem])), remedy) for problem in problems]


def _place(folder: str) -> str:
    return folder if "://" in folder or not folder else os.path.abspath(os.path.expanduser(folder))


def _read_from(data: Any) -> dict[str, str]:
    """The folders and files of this machine that the data's fields name, by field."""
    found: dict[str, str] = {}
    for name, value in _paths(data):
        if not value or "://" in value:
            continue
        if glob.has_magic(value):
            value = os.path.dirname(re.split(r"[*?\[]", value)[0])
        path = os.path.abspath(os.path.expanduser(value))
        if os.path.lexists(path) and path not in found.values():  # else built-in data
            found[name] = path
    return found


def _paths(section: Any, within: str = "") -> Iterator[tuple[str, str]]:
    """The fields whose unit is a path, of nested sections too: ("sources[0].path", value)."""
    from jaxtrain.config.explain import gloss

    glosses = gloss(type(section))  # type: ignore[arg-type]  # mypy: an unknown class may not hash
    for field in dataclasses.fields(section):
        name, value = f"{within}{field.name}", getattr(section, field.name)
        if isinstance(value, str) and glosses[field.name][0] == "path":
            yield name, value
        elif dataclasses.is_dataclass(value):
            yield from _paths(value, f"{name}.")
        elif isinstance(value, tuple):
            for i, each in enumerate(value):
                if dataclasses.is_dataclass(each):
                    yield from _paths(each, f"{name}[{i}].")


def _sizes(config: Any, *, count: int, kind: str) -> dict[str, Any]:
    """The checkpoints of a run on ``count`` devices, and its need of rows. Raises ValueError."""
    from jaxtrain import plan
    from jaxtrain.parallel import chips, layout

    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    mesh = layout.abstract_mesh(*sizes, count=count, what=f"{count} devices")
    assembly = plan.assemble(config, mesh, devices=layout.devices_of(kind))
    chip = chips.find(kind)
    ideal = assembly.task.flops / (count * chip.flops) / plan.MFU if chip else 0.0
    folder = disk_usage.folder_of(os.path.abspath(config.workdir), config.checkpoint.folder)
    return {
        # Their folder, how many, the bytes of each.
        "checkpoints": [folder, *plan.checkpoints(config, assembly.abstract.state)],
        "rows_per_second": config.train.batch / ideal if ideal else 0.0,
    }
