"""A run's config, in a subprocess, as it imports the user's code: errors, folders, sizes."""

import os
from collections.abc import Sequence
from typing import Any

from jaxtrain.checkpoint import disk_usage
from jaxtrain.config import Config, ConfigError
from jaxtrain.doctor.check import Findings, fail, ok, raised
from loaders.io import files

GROUP = "config"
FIELD = "correct it as it says: jaxtrain explain lists every field"
FILE = "correct this file, or what it imports"
MISSING_FILE = f"{FILE}; if it is missing, copy it to this host"
MFU = 0.4  # share of the peak that rows are asked for at, since nothing is compiled here


def examine(*, source: str, overrides: Any, count: int, kind: str) -> Findings:
    """Check a config for ``count`` devices of ``kind`` in the whole job (0 and "" = not known)."""
    from jaxtrain import config as config_lib

    try:
        config, problems = config_lib.read(source, overrides, make_data=False)
    except ConfigError as error:
        return _errors("file", error.problems, MISSING_FILE)
    except (SystemExit, Exception) as error:  # any error of a user's file
        return Findings([fail(GROUP, "file", f"{source}: {raised(error)}", FILE)], {})
    if problems:
        return _errors("fields", problems, FIELD)
    checks = [ok(GROUP, "fields", f"{source}: every field is valid")]
    facts: dict[str, Any] = {
        "workdir": os.path.abspath(config.workdir),
        "folder": _absolute(config.checkpoint.folder),
    }
    if count and config.data.exists():  # else the fields that the data decide are unknown
        try:
            facts |= _sizes(config, count=count, kind=kind)
        except ValueError as error:  # LayoutError, OptimError, DataError …
            checks.append(fail(GROUP, "plan", str(error), FIELD))
        except Exception as error:  # noqa: BLE001  any error of a user's workload
            remedy = f"correct {config.workload}, or its imports"
            checks.append(fail(GROUP, "plan", f"{config.workload}: {raised(error)}", remedy))
    return Findings(checks, facts)


def _errors(name: str, problems: Sequence[tuple[str, str]], remedy: str) -> Findings:
    checks = [fail(GROUP, name, str(ConfigError([problem])), remedy) for problem in problems]
    return Findings(checks, {})


def _absolute(folder: str) -> str:
    if "://" in folder or not folder:
        return folder
    return os.path.abspath(files.expanded(folder))


def _sizes(config: Config, *, count: int, kind: str) -> dict[str, Any]:
    """Compute a run's checkpoints and rows per second on ``count`` devices. Raises ValueError."""
    from jaxtrain import plan
    from jaxtrain.assembly import assemble
    from jaxtrain.parallel import chips, layout

    sizes = config.mesh.data, config.mesh.fsdp, config.mesh.model
    mesh = layout.abstract_mesh(*sizes, count=count, what=kind or f"{count} devices")
    assembly = assemble(config, mesh, devices=layout.devices_of(kind))
    folder = disk_usage.folder_of(os.path.abspath(config.workdir), config.checkpoint.folder)
    n_checkpoints, n_bytes = plan.checkpoints(config, assembly.abstract.state)
    rows_per_second = 0.0
    chip = chips.find(kind)
    if chip and assembly.task.flops:
        seconds = assembly.task.flops / (count * chip.flops) / MFU
        rows_per_second = config.train.batch / seconds
    return {
        "checkpoints": [folder, n_checkpoints, n_bytes],  # bytes of each
        "rows_per_second": rows_per_second,
    }
