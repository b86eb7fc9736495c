"""The adapters of a run with config.lora, in peft's format.

Of workloads whose matrices are exported as (out, in) under names that end in ".weight" (jaxtrain.workloads.language).
"""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.arrays import run_workload, safetensors
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.stored import StoredError
from jaxtrain.nn import lora
from loaders.io import atomic_write

SIDES = {lora.A: "lora_A", lora.B: "lora_B"}


def export(run: str, out: str, *, step: int | None = None, named: str = "") -> str:
    """Write the folder ``out``. Return a line about it. ``named``: --workload (`jaxtrain.arrays.run_workload`).

    Raises StoredError: no such step, no adapters, no names for them.
    """
    source = source_lib.find(run, step, export="its adapters, if it had any, are merged into its weights")
    config = source.config()
    adapters = {path: one for path, one in source.parameters().items() if lora.is_adapter(path)}
    if not adapters:
        raise StoredError(f"{source.path} holds no adapters: config.lora.rank was 0; `jaxtrain export` writes its weights")
    workload = run_workload.of_run(config, named)
    if workload is None:
        raise StoredError(f"{run_workload.unknown(config)}; without it the adapters have no names that peft knows")
    if workload.export is None:
        raise StoredError(f"{config['workload']} has no names that peft knows: it has no EXPORT")
    names, model = run_workload.export_of(config, named).names, run_workload.model_of(config)
    tensors: dict[str, np.ndarray] = {}
    for path, one in adapters.items():
        matrix, _, side = path.rpartition("/")
        try:
            modules = names(model, matrix)
        except Exception as error:  # noqa: BLE001  a config of others may hold anything
            raise StoredError(f"{source.path}: its config.model does not describe {matrix}: {error!r}") from error
        x = one.read(())
        if x.ndim < (2 if isinstance(modules, str) else 3) or not isinstance(modules, str) and len(modules) != len(x):
            raise StoredError(f"{source.path}: {path} is {list(x.shape)}; its config.model describes another shape")
        for name, part in zip(
            [modules] if isinstance(modules, str) else modules, [x] if isinstance(modules, str) else x, strict=True
        ):
            if not name.endswith(".weight") or name.count(".") < 2:
                raise StoredError(
                    f"{matrix} is exported as {name!r}, which is not the weight of a module, so that peft has no adapter for it"
                )
            part = part.reshape(part.shape[0], -1) if side == lora.A else part.reshape(-1, part.shape[-1])
            tensors[f"base_model.model.{name.removesuffix('.weight')}.{SIDES[side]}.weight"] = part
    about = _config(config, tensors)
    target = pathlib.Path(out).expanduser().absolute()
    if target.exists() and any(target.iterdir()):
        raise StoredError(f"{target} is not empty; choose another --out")
    entries = [safetensors.Entry(name, name, tensors[name].shape, tensors[name].dtype) for name in sorted(tensors)]
    with atomic_write.folder(target) as partial:
        with (partial / "adapter_model.safetensors").open("wb") as file:
            file.write(safetensors.header(entries, "pt"))
            for entry in entries:
                file.write(np.ascontiguousarray(tensors[entry.name]).tobytes())
        (partial / "adapter_config.json").write_text(json.dumps(about, indent=2, sort_keys=True) + "\n")
    numbers = sum(math.prod(entry.shape) for entry in entries)
    return f"{target}: adapters of {source.path}, {len(entries)} arrays, {numbers:,} numbers"


def _config(config: Mapping[str, Any], names: Mapping[str, np.ndarray]) -> dict[str, Any]:
    adapters = run_workload.section_of(config, "lora", config_lib.Lora)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run_workload.section_of(config, "warm_start", config_lib.WarmStart).source or None,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in names}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
    }
