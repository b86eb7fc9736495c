"""The adapters of a run with config.lora, and what it trained besides, in peft's format.

Of workloads whose matrices are exported as (out, in) under names that end in ".weight".
"""

import contextlib
import json
import pathlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs as spec_lib
from jaxtrain.arrays import run_workload, safetensors, safetensors_reader
from jaxtrain.arrays import safetensors_writer as writer
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.source import Source
from jaxtrain.arrays.stored import StoredError
from jaxtrain.nn import lora
from jaxtrain.types import Export
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

    If the base is a run, its weights are written too, since peft reads those of a folder.

    ``base``: the place of the weights that the adapters change; "" = where the run has them from.
    Raises StoredError: no such step, no adapters, no names for them, a trained parameter that peft
    has no place for, or frozen weights that are gone or differ.
    """
    source = source_lib.find_best(
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
    contract = run_workload.export_of(config, named)
    model = run_workload.model_of(config)
    # by the names of the base model, adapters by module.lora_A.weight
    tensors: dict[str, np.ndarray] = {}
    for path, array in trained.items():
        if lora.is_adapter(path):
            tensors |= _adapter(source, contract, model, path, array.read(()))
        else:
            tensors |= _parameter(source, contract, model, path, array.read(()))
    for copy, origin in contract.tied(model).items():
        if origin in tensors:
            tensors[copy] = tensors[origin]
    config_with_base = run_workload.with_base(source, config, base)
    adapter_config = _config(config_with_base, tensors, _names(workload, config, contract))
    adapter_config["task_type"] = contract.peft_task
    target = files.expanded(out).absolute()
    base_folder = target.parent / f"{target.name}-base"
    is_run = _is_run(config_with_base["warm_start"].get("source"))
    for folder in (target, base_folder) if is_run else (target,):
        if folder.exists() and any(folder.iterdir()):
            raise StoredError(f"{folder} is not empty; choose another --out")
    if is_run:
        options = safetensors.Options(ema=ema, workload=named, base=base, adapters=False)
        safetensors.export(str(source.path), str(base_folder), options)
        adapter_config["base_model_name_or_path"] = str(base_folder)
    named_tensors = {f"base_model.model.{name}": x for name, x in sorted(tensors.items())}
    with atomic_write.folder(target) as partial:
        _write_tensors(partial / "adapter_model.safetensors", named_tensors)
        config_text = json.dumps(adapter_config, indent=2, sort_keys=True) + "\n"
        (partial / "adapter_config.json").write_text(config_text)
    modules = adapter_config["modules_to_save"]
    content = f"adapters and {', '.join(modules)}" if modules else "adapters"
    average = ", averaged" if ema else ""
    numbers = sum(x.size for x in tensors.values())
    base_dtype = run_workload.section_of(config, "lora", config_lib.Lora).dtype
    remark = ""
    if is_run:
        remark = f"; their base is a run, whose weights are written to {base_folder}"
    elif not adapter_config["base_model_name_or_path"]:
        remark = "; their base was initialised by the run, and no other program has it"
    if base_dtype != "float32":
        remark += (
            f"; trained over a base in {base_dtype}: load it with torch_dtype=torch.{base_dtype}"
        )
    return (
        f"{target}: {content} of {source.path}{average}, {len(tensors)} arrays, {numbers:,}"
        f" numbers{remark}"
    )


def _is_run(source: str | None) -> bool:
    """Whether weights are a step of a run, which no other program reads."""
    if not source:
        return False
    return not safetensors_reader.is_safetensors(source)


def _parameter(
    source: Source, contract: Export, model: Mapping[str, Any], path: str, x: np.ndarray
) -> dict[str, np.ndarray]:
    """Return a trained parameter by its names in the base model, a layer of a stack each."""
    with _describing(source, path):
        names = contract.names(model, path)
        is_stack = not isinstance(names, str)
        shape = contract.shape(model, path, x.shape[1:] if is_stack else x.shape)
    layers = _layers(source, path, names, x, min_dimensions=1)
    return {name: layer.reshape(shape) for name, layer in layers.items()}


def _adapter(
    source: Source, contract: Export, model: Mapping[str, Any], path: str, x: np.ndarray
) -> dict[str, np.ndarray]:
    """Return an adapter by peft's names, as two matrices [rank, in] and [out, rank]."""
    matrix, _, side = path.rpartition("/")
    with _describing(source, matrix):
        names = contract.names(model, matrix)
    tensors = {}
    for name, layer in _layers(source, path, names, x, min_dimensions=2).items():
        if not name.endswith(".weight"):
            raise StoredError(
                f"{matrix} is exported as {name!r}, which is not the weight of a module, so that"
                " peft has no adapter for it"
            )
        if side == lora.A:
            shape = (layer.shape[0], -1)
        else:
            shape = (-1, layer.shape[-1])
        tensors[f"{_module(name)}.{SIDES[side]}.weight"] = layer.reshape(shape)
    return tensors


def _layers(
    source: Source,
    path: str,
    names: str | Sequence[str],
    x: np.ndarray,
    *,
    min_dimensions: int,
) -> dict[str, np.ndarray]:
    """Return the layers of a stack by their names. Raises StoredError: they do not fit."""
    if isinstance(names, str) and x.ndim >= min_dimensions:
        return {names: x}
    if not isinstance(names, str) and x.ndim > min_dimensions and len(names) == len(x):
        return dict(zip(names, x, strict=True))
    raise StoredError(
        f"{source.path}: {path} is {list(x.shape)}; its config.model describes another shape"
    )


@contextlib.contextmanager
def _describing(source: Source, path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  a config of others may hold anything
        raise StoredError(
            f"{source.path}: its config.model does not describe {path}: {error!r}"
        ) from error


def _write_tensors(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
    entries = [writer.Entry(name, name, x.shape, x.dtype) for name, x in tensors.items()]
    with path.open("wb") as file:
        file.write(writer.header(entries, "pt"))
        for x in tensors.values():
            file.write(np.ascontiguousarray(x).tobytes())


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _names(workload: Workload[Any], config: Mapping[str, Any], contract: Export) -> set[str]:
    """Return the names of all parameters of the base model."""
    model = run_workload.model_of(config)
    all_names = set()
    for path in spec_lib.paths(run_workload.specs_of(config, workload)):
        names = contract.names(model, path)
        all_names.update([names] if isinstance(names, str) else names)
    return all_names


def _config(
    config: Mapping[str, Any], tensors: Collection[str], everything: Collection[str]
) -> dict[str, Any]:
    """adapter_config.json. Raises StoredError: a module is saved in part, unlike in peft."""
    adapters = run_workload.section_of(config, "lora", config_lib.Lora)
    adapted = set()
    for name in tensors:
        if _module(name).endswith(tuple(SIDES.values())):
            adapted.add(_module(_module(name)))
    saved_whole = {name for name in tensors if _module(_module(name)) not in adapted}
    modules = {_module(name) for name in saved_whole}
    half_adapted = {name for name in saved_whole if _module(name) in adapted}
    missing = {name for name in everything if _module(name) in modules and name not in saved_whole}
    misfits = sorted(half_adapted | missing)
    if misfits:
        raise StoredError(
            f"{', '.join(misfits[:3])}: peft saves the adapter of a module, or all of its arrays,"
            " and this run trained another part of it; `jaxtrain export` writes the merged weights"
        )
    all_modules = {_module(name) for name in everything} | modules
    source = run_workload.section_of(config, "warm_start", config_lib.WarmStart).source
    return {
        "peft_type": "LORA",
        "inference_mode": True,
        "init_lora_weights": True,
        "base_model_name_or_path": _place(source),
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_dora": False,
        "use_rslora": False,
        "target_modules": _endings(adapted, all_modules),
        "modules_to_save": _endings(modules, all_modules) or None,
    }


def _place(source: str) -> str | None:
    """Return a place that means the same in every folder: an existing path becomes absolute."""
    if not source:
        return None
    path = files.expanded(source)
    return str(path.absolute()) if path.exists() else source


def _endings(adapted: Collection[str], modules: Collection[str]) -> list[str]:
    """Return the shortest endings of module names that match ``adapted`` and no other."""
    return sorted({_shortest_ending(module, adapted, modules) for module in adapted})


def _shortest_ending(module: str, adapted: Collection[str], modules: Collection[str]) -> str:
    parts = module.split(".")
    for n in range(1, len(parts) + 1):
        ending = ".".join(parts[-n:])
        if all(name in adapted for name in modules if name.endswith(ending)):
            return ending
    return module
