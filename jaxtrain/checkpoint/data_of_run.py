"""Fields of the section data that a config leaves to the data, which a resumed run keeps."""

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from etils import epath

from jaxtrain.arrays import orbax_steps, stored
from jaxtrain.checkpoint import disk_usage
from jaxtrain.config import Config, ConfigError
from jaxtrain.parallel import cluster
from loaders import base
from loaders.io import checks, files

log = logging.getLogger("jaxtrain")


def settled(config: Config) -> Config:
    """Return the config of a run with values for such fields, and for those of the model by them.

    They are part of the order of rows. So they are those of the newest checkpoint of the run, or of
    the run that config.resume.path names, if there is one. All processes call it.

    Raises ConfigError: the model does not fit them.
    """
    before, data = config.data.settled(None), section(config)
    if data == before:
        return dataclasses.replace(config, data=data)
    dataset_info = base.module(config.loader).dataset_info
    old, new = dataset_info(before), dataset_info(data)
    log.info("the data are read as at the run's newest checkpoint: %s", _changes(before, data))
    taken = {}
    for f in dataclasses.fields(config.model):
        value = getattr(config.model, f.name)
        if f.name in new and value == old.get(f.name):
            taken[f.name] = new[f.name]
    model = dataclasses.replace(config.model, **taken)
    problems = [*checks.under("model", model.validate_data(new))]
    if problems:
        raise ConfigError(problems)
    return dataclasses.replace(config, data=data, model=model)


def section(config: Config) -> checks.DataSection:
    """Return the section data of `settled`."""
    unrecorded: checks.DataSection = config.data.settled(None)
    if unrecorded == config.data:
        return unrecorded  # nothing is left to the data
    text = json.dumps(_recorded_order(config)) if cluster.is_main() else ""
    order = json.loads(cluster.gather_texts(text)[0])
    return unrecorded if order is None else config.data.settled(order)


def _changes(old: Any, new: Any) -> str:
    changed = []
    for f in dataclasses.fields(new):
        value = getattr(new, f.name)
        if value != getattr(old, f.name):
            changed.append(f"data.{f.name}={value}")
    return ", ".join(changed)


def _recorded_order(config: Config) -> Mapping[str, Any] | None:
    """Read the order of rows of the newest checkpoint, None without one that can be read."""
    folders = [disk_usage.folder_of(config.workdir, config.checkpoint.folder)]
    if config.resume.path:
        folders.append(disk_usage.folder_of(config.resume.path, ""))
    for folder in folders:
        place = epath.Path(folder if "://" in folder else files.expanded(folder))
        for step in reversed(orbax_steps.steps_in(place)):
            try:
                saved = orbax_steps.read_json(place / str(step), "data") or {}
            except (OSError, stored.StoredError):
                continue  # it is reported when the step itself is read
            recorded = saved.get("order")
            if isinstance(recorded, dict):
                return recorded
    return None
