"""The adapters of a run with config.lora, and what it trained besides, in peft's format.

Of workloads whose matrices are exported as (out, in) under names that end in ".weight".
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs as spec_lib
from jaxtrain.arrays import run_workload, safetensors
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.stored import StoredError
from jaxtrain.nn import lora
from jaxtrain.workload import Workload
from loaders.io import atomic_write, files

SIDES = {lora.A: "lora_A", lora.B: "lora_B"}


def export(
    run: str,
    out: str,
    *,
    step: int | None = None,
    ema: bool = False,
    named: str = "",
    base: str = "",
) -> str:
    """Write the folder ``out``, for ``named`` (--workload). Return a line about it.

    ``base``: the place of the weights that the adapters change; "" = where the run has them from.
    Raises StoredError: no such step, no adapters, no names for them, a trained parameter that peft
    has no place for, or frozen weights that are gone or differ.
    """
    source = source_lib.find(
        run, step, export="its adapters, if it had any, are merged into its weights"
    )
    config, trained = source.config(), source.parameters(ema=ema)
    if not any(lora.is_adapter(path) for path in trained):
        raise StoredError(
            f"{source.path} holds no adapters: config.lora.rank was 0; `jaxtrain export` writes its"
            " weights"
        )
    workload = run_workload.of_run(config, named)
    if workload is None:
        raise StoredError(
            f"{run_workload.unknown(config)}; without it the adapters have no names that peft knows"
        )
    if workload.export is None:
        raise StoredError(f"{config['workload']} has no names that peft knows: it has no export")
    contract, model = run_workload.export_of(config, named), run_workload.model_of(config)
    # by the names of the base model, adapters by module.lora_A.weight
    tensors: dict[str, np.ndarray] = {}
    for path, one in trained.items():
        matrix, _, side = path.rpartition("/") if lora.is_adapter(path) else (path, "", "")
        x = one.read(())
        try:
            names = contract.names(model, matrix)
            shape = (
                x.shape
                if side
                else contract.shape(
                    model, matrix, x.shape if isinstance(names, str) else x.shape[1:]
                )
            )
        except Exception as error:  # noqa: BLE001  a config of others may hold anything
            raise StoredError(
                f"{source.path}: its config.model does not describe {matrix}: {error!r}"
            ) from error
        parts = [x] if isinstance(names, str) else x
        least = (2 if side else 1) + (not isinstance(names, str))
        if x.ndim < least or not isinstance(names, str) and len(names) != len(x):
            raise StoredError(
                f"{source.path}: {path} is {list(x.shape)}; its config.model describes another"
                " shape"
            )
        for name, part in zip([names] if isinstance(names, str) else names, parts, strict=True):
            if not side:
                tensors[name] = part.reshape(shape)
                continue
            if not name.endswith(".weight"):
                raise StoredError(
                    f"{matrix} is exported as {name!r}, which is not the weight of a module, so"
                    " that peft has no adapter for it"
                )
            part = (
                part.reshape(part.shape[0], -1)
                if side == lora.A
                else part.reshape(-1, part.shape[-1])
            )
            tensors[f"{_module(name)}.{SIDES[side]}.weight"] = part
    tensors |= {copy: tensors[of] for copy, of in contract.tied(model).items() if of in tensors}
    about = _config(
        run_workload.with_base(source, config, base),
        tensors,
        _names(workload, config, contract.names),
    )
    about["task_type"] = contract.peft_task
    target = files.expanded(out).absolute()
    if target.exists() and any(target.iterdir()):
        raise StoredError(f"{target} is not empty; choose another --out")
    tensors = {f"base_model.model.{name}": x for name, x in sorted(tensors.items())}
    entries = [safetensors.Entry(name, name, x.shape, x.dtype) for name, x in tensors.items()]
    with atomic_write.folder(target) as partial:
        with (partial / "adapter_model.safetensors").open("wb") as file:
            file.write(safetensors.header(entries, "pt"))
            for entry in entries:
                file.write(np.ascontiguousarray(tensors[entry.name]).tobytes())
        (partial / "adapter_config.json").write_text(
            json.dumps(about, indent=2, sort_keys=True) + "\n"
        )
    numbers = sum(math.prod(entry.shape) for entry in entries)
    what = (
        f"adapters and {', '.join(about['modules_to_save'])}"
        if about["modules_to_save"]
        else "adapters"
    )
    average = ", averaged" if ema else ""
    kept = run_workload.section_of(config, "lora", config_lib.Lora).dtype
    rounded = (
        f"; trained over a base in {kept}: load it with torch_dtype=torch.{kept}"
        if kept != "float32"
        else ""
    )
    return (
        f"{target}: {what} of {source.path}{average}, {len(entries)} arrays, {numbers:,}"
        f" numbers{rounded}"
    )


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _names(workload: Workload[Any], config: Mapping[str, Any], names: Any) -> set[str]:
    table = run_workload.specs_of(config, workload)
    model, found = run_workload.model_of(config), set()
    for path in spec_lib.paths(table):
        found |= {each} if isinstance(each := names(model, path), str) else set(each)
    return found


def _config(
    config: Mapping[str, Any], tensors: Collection[str], everything: Collection[str]
) -> dict[str, Any]:
    """adapter_config.json. Raises StoredError: a module is saved in part, unlike in peft."""
    adapters = run_workload.section_of(config, "lora", config_lib.Lora)
    adapted = {
        _module(_module(name)) for name in tensors if _module(name).endswith(tuple(SIDES.values()))
    }
    whole = {name for name in tensors if _module(_module(name)) not in adapted}
    modules = {_module(name) for name in whole}
    missing = {name for name in everything if _module(name) in modules and name not in whole}
    if wrong := sorted({name for name in whole if _module(name) in adapted} | missing):
        raise StoredError(
            f"{', '.join(wrong[:3])}: peft saves the adapter of a module, or all of its arrays, and"
            " this run trained another part of it; `jaxtrain export` writes the merged weights"
        )
    there = {_module(name) for name in everything} | modules
    return {
        "peft_type": "LORA",
        "inference_mode": True,
        "init_lora_weights": True,
        "base_model_name_or_path": _place(
            run_workload.section_of(config, "warm_start", config_lib.WarmStart).source
        ),
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "target_modules": _endings(adapted, there),
        "modules_to_save": _endings(modules, there) or None,
    }


def _place(source: str) -> str | None:
    """Return a place that means the same in every folder: an existing path becomes absolute."""
    path = files.expanded(source)
    return str(path.absolute()) if source and path.exists() else source or None


def _endings(chosen: Iterable[str], modules: Collection[str]) -> list[str]:
    """Return the shortest endings of module names that match the chosen ones and no other."""
    chosen = set(chosen)

    def shortest(module: str) -> str:
        parts = module.split(".")
        endings = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        return next(
            (end for end in endings if {x for x in modules if x.endswith(end)} <= chosen), module
        )

    return sorted({shortest(module) for module in chosen})
