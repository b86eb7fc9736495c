"""A checkpoint as safetensors for Hugging Face, and back.

Arrays are streamed. Host memory is that of one chunk of one array: its stored bytes, decoded and
copied.

Names, shapes and further files are those of the workload's `jaxtrain.types.Export`. Model state
that belongs to the model is exported in its own dtypes. A warm start takes parameters alone.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxtrain.arrays import card, merge_adapters, run_workload, saved_steps, stored
from jaxtrain.arrays import safetensors_writer as writer
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.safetensors_reader import INDEX, WHOLE
from jaxtrain.arrays.safetensors_writer import Entry
from jaxtrain.arrays.source import SUMS, Source
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.nn import lora
from jaxtrain.types import Export, Format, Hub
from loaders.io import atomic_write, checks, files

SHORT = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True)
class Options:
    """The choices of `jaxtrain export`."""

    step: int | None = None  # of the run; None = its best by checkpoint.best, else its newest
    ema: bool = False  # whether the average of the parameters is exported
    only: str = ""  # [regex] of the paths that are exported
    dtype: np.dtype | None = None  # of floating-point arrays; None = as they are
    shard_size: int = 5 * 10**9  # [bytes] of the largest file
    workload: str = ""  # module of the run's workload, if it is none of this package
    base: str = ""  # source of the run's first weights; "" = its config.warm_start.source
    adapters: bool = True  # whether those of the run are added to its first weights
    formats: Sequence[str] = ()  # names of the workload's `jaxtrain.types.Format`
    license: str = ""  # of the weights, for the card
    datasets: Sequence[str] = ()  # that the weights were trained on, for the card


def export(run: str, out: str, options: Options = Options()) -> str:
    """Write the folder ``out``, whole or not at all. Return a line about it.

    Raises StoredError: no such step, no average, a damaged step, an ``only`` that matches no path,
    names that are given twice, an ``out`` that exists.
    """
    source = source_lib.find_best(run, options.step, export="it is in safetensors already")
    config = source.config()
    selection = _select(source, config, options)

    # 1. Names and places follow from shapes alone.
    entries = _entries(selection, options.dtype)
    flat = [entry for entries_of_path in entries.values() for entry in entries_of_path]
    shards = _name_shards(writer.split(flat, options.shard_size))
    file_of = {entry.name: file for file, shard in shards.items() for entry in shard}

    # 2. Everything goes into a folder of another name, which is renamed when it is whole.
    target = files.expanded(out).absolute()
    if target.exists() and any(target.iterdir()):
        raise StoredError(f"{target} is not empty; choose another --out")
    with atomic_write.folder(target) as partial:
        further, hub = _further_files(selection, flat)
        # transformers needs a config.json of its own, and arrays marked as PyTorch's.
        framework = "pt" if "config.json" in further else "flax"
        content = writer.content(selection.arrays, entries)
        sums = writer.write_shards(partial, shards, content, framework)
        # 3. The files that make arrays a model: their index, config and card, and the way back.
        own_files = _own_files(selection, entries, file_of, hub)
        for name, file_content in {**own_files, **further}.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(file_content)
            sums[name] = hashlib.sha256(file_content).hexdigest()
        (partial / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
    use = f"loaded by {hub.library}"
    if selection.left_out.is_part:
        use = f"a part of the model (--only={options.only}), for warm starts"
    n_bytes = sum(entry.n_bytes for entry in flat)
    size = f"{len(flat)} arrays, {n_bytes / 1e6:.1f} MB in {len(shards)} file(s)"
    return f"{target}: {selection.group} of step {selection.step}, {size}, {use}"


def _name_shards(shards: Sequence[list[Entry]]) -> dict[str, list[Entry]]:
    """Return the content of each file by its name."""
    if len(shards) == 1:
        return {WHOLE: shards[0]}
    n = len(shards)
    return {f"model-{i + 1:05d}-of-{n:05d}.safetensors": shard for i, shard in enumerate(shards)}


class _Selection(NamedTuple):
    """The arrays of a step that an export has, and what its other files are made of."""

    source: Source
    step: int | None  # None: of weights without a step
    config: dict[str, Any]  # of the run
    config_with_base: dict[str, Any]  # the same, with the source of the weights below its adapters
    group: str  # of the parameters: params or ema
    arrays: dict[str, Stored]
    contract: Export  # of the workload, or of a format with names of its own
    formats: list[Format]
    whole_model: dict[str, Stored]  # for the files of ``formats``
    left_out: card.LeftOut
    license: str
    datasets: Sequence[str]


def _select(source: Source, config: dict[str, Any], options: Options) -> _Selection:
    """Return the arrays that ``only`` matches, with adapters merged, and the contract of names."""
    step_arrays = source.arrays()
    arrays = source.parameters(ema=options.ema)
    contract = run_workload.export_of(config, options.workload)
    if run_workload.of_run(config, options.workload) is None:
        print(
            f"{run_workload.unknown(config)}: its arrays are named by their paths, and it adds no"
            " files"
        )
    if contract.model_state:
        arrays |= _model_state(step_arrays, contract.model_state)
    config_with_base = config
    if options.base:
        warm_start = {**(config.get("warm_start") or {}), "source": options.base}
        config_with_base = {**config, "warm_start": warm_start}
    if any(lora.is_adapter(path) for path in arrays):
        config_with_base = run_workload.with_base(source, config, options.base)
        weights_of = merge_adapters.merged if options.adapters else merge_adapters.base
        arrays = weights_of(arrays, config_with_base, options.workload)

    formats = list(_formats(source, config, options))
    whole_model = arrays
    renaming = next((file_format for file_format in formats if file_format.rename), None)
    if renaming and renaming.rename:
        with _describing(source):
            arrays = renaming.rename(arrays, run_workload.model_of(config))
            contract = renaming.export or Export()
    else:
        whole_model = _matching(arrays, options.only)
    selected = _matching(arrays, options.only)
    if not selected:
        raise StoredError(f"--only={options.only} matches none of {', '.join(arrays)}")
    missing = arrays.keys() - selected.keys()
    is_part = any(re.search(contract.needed, path) for path in missing)
    return _Selection(
        source=source,
        step=source.step(step_arrays),
        config=config,
        config_with_base=config_with_base,
        group="ema" if options.ema else "params",
        arrays=selected,
        contract=contract,
        formats=formats,
        whole_model=whole_model,
        left_out=card.LeftOut(options.only, len(missing), is_part),
        license=options.license,
        datasets=options.datasets,
    )


def _model_state(step_arrays: Mapping[str, Stored], pattern: str) -> dict[str, Stored]:
    """Return the arrays of a step's model state that belong to the model."""
    arrays = {}
    for path, array in step_arrays.items():
        name = path.removeprefix(stored.MODEL_STATE)
        if path.startswith(stored.MODEL_STATE) and re.search(pattern, name):
            arrays[path] = array
    return arrays


def _matching(arrays: Mapping[str, Stored], only: str) -> dict[str, Stored]:
    return {path: array for path, array in arrays.items() if re.search(only, path)}


def _entries(selection: _Selection, dtype: np.dtype | None) -> dict[str, list[Entry]]:
    """Path -> its arrays in the files, in the order of the files."""
    entries: dict[str, list[Entry]] = {}
    count: collections.Counter[str] = collections.Counter()
    for path, array in selection.arrays.items():
        entries[path] = list(_entries_of(path, array, selection, dtype))
        count.update(entry.name for entry in entries[path])
    twice = sorted(name for name, n in count.items() if n > 1)
    if twice:
        workload = selection.config.get("workload")
        raise StoredError(
            f"the names {', '.join(twice)} are given twice, by the export of {workload}; make"
            " them differ there"
        )
    # Wide types first: every array begins at a multiple of its width, for readers that map it.
    return dict(sorted(entries.items(), key=lambda item: -item[1][0].dtype.itemsize))


def _entries_of(
    path: str, array: Stored, selection: _Selection, dtype: np.dtype | None
) -> Iterator[Entry]:
    """Yield a parameter as the contract names it: one array, or one for each layer."""
    is_floating = np.issubdtype(array.dtype, np.floating) or array.dtype.kind == "V"
    if not dtype or not is_floating or path.startswith(stored.MODEL_STATE):
        dtype = array.dtype
    model = run_workload.model_of(selection.config)
    contract = selection.contract
    try:
        names = contract.names(model, path)
        is_stack = not isinstance(names, str)
        shape = contract.shape(model, path, array.shape[1:] if is_stack else array.shape)
    except Exception as error:  # noqa: BLE001  a config of others may hold anything
        raise StoredError(
            f"{path} {list(array.shape)} does not fit the run's config.model:"
            f" {run_workload.reason(error)}"
        ) from error
    if isinstance(names, str):
        yield Entry(names, path, shape, dtype)
        return
    if not array.shape or len(names) != array.shape[0]:
        raise StoredError(
            f"the export of {selection.config['workload']} gives {len(names)} names for the first"
            f" axis of {path} {array.shape}"
        )
    for i, name in enumerate(names):
        yield Entry(name, f"{path}[{i}]", shape, dtype)


def _further_files(selection: _Selection, flat: Sequence[Entry]) -> tuple[dict[str, bytes], Hub]:
    """Return the files of the workload and of the formats by their names, and what the card says.

    They are of a whole model, and so is the card's example: a library fills gaps at random.
    """
    config, contract = selection.config, selection.contract
    bytes_of_dtype: collections.Counter[str] = collections.Counter()
    for entry in flat:
        bytes_of_dtype[entry.dtype.name] += entry.n_bytes
    further: dict[str, bytes] = {}
    hub = Hub()
    with _describing(selection.source):
        if not selection.left_out.is_part:
            ((main_dtype, _),) = bytes_of_dtype.most_common(1)
            further = contract.files(selection.config_with_base, main_dtype)
            hub = contract.hub(config, {*further, *selection.arrays})
        names = {"run": _name(config), "step": str(selection.step)}
        for file_format in selection.formats:
            if file_format.files:
                further |= file_format.files(config, selection.whole_model, names)
                hub = hub._replace(example=f"{hub.example}\n{file_format.example}")
    return further, hub


def _own_files(
    selection: _Selection,
    entries: Mapping[str, Sequence[Entry]],
    file_of: Mapping[str, str],
    hub: Hub,
) -> dict[str, bytes]:
    """Return the index, the config, the card and the way back, by their names."""
    source, step, config = selection.source, selection.step, selection.config
    flat = [entry for entries_of_path in entries.values() for entry in entries_of_path]
    n_bytes = sum(entry.n_bytes for entry in flat)
    meta = {name: value for name, value in source.meta().items() if name != "config"}
    reshaped = {}
    for path, entries_of_path in entries.items():
        array_shape = selection.arrays[path].shape
        entry = entries_of_path[0]  # of a stack, or the only one
        is_stack = entry.path.endswith("]")
        if entry.shape != (array_shape[1:] if is_stack else array_shape):
            reshaped[path] = list(array_shape)
    export = {
        "format": stored.FORMAT,
        "step": step,
        "group": selection.group,
        "meta": meta,
        "config": config,
        "paths": {entry.name: entry.path for entry in flat},
        "shapes": reshaped,
    }
    model = card.Model(
        name=_name(config),
        step=step,
        group=selection.group,
        entries=flat,
        config=config,
        meta=meta,
        hub=hub,
        left_out=selection.left_out,
        license=selection.license,
        datasets=selection.datasets,
    )
    texts = {
        INDEX: _json({"metadata": {"total_size": n_bytes}, "weight_map": file_of}),
        "config.json": _json(config),
        stored.EXPORT: _json(export),
        "README.md": card.text(model, card.last_metrics(source, step)),
    }
    return {name: text.encode() for name, text in texts.items()}


def _formats(source: Source, config: Mapping[str, Any], options: Options) -> Iterator[Format]:
    """Yield the formats of a run's workload by their names. Raises StoredError: an unknown name."""
    if not options.formats:
        return
    workload = run_workload.of_run(config, options.workload)
    formats = workload.formats if workload else {}
    for name in options.formats:
        if name not in formats:
            expected = checks.expected(name, formats) if formats else "it has none"
            raise StoredError(
                f"{source.path} is a run of {config.get('workload')!r}, whose formats do not"
                f" include {name!r}; {expected}"
            )
        yield formats[name]()


def reverse(folder: str, out: str) -> str:
    """Make ``out`` a workdir with one step, of a folder of safetensors. Return a line about it.

    With jaxtrain.json in the folder the step equals the exported one bit for bit. Without it, names
    become paths by their dots. Raises StoredError: a damaged folder, or a step that is there.
    """
    source = source_lib.find(folder)
    if not source.is_export:
        raise StoredError(
            f"--reverse is {folder}, which is a step of a run; expected a folder of safetensors"
        )
    arrays = source.arrays()
    step = source.step(arrays) or 0
    path = saved_steps.save_weights(out, step, arrays, data={}, meta=source.meta())
    n = sum(path.startswith("params/") for path in arrays)
    return f"{path}: {n} arrays, weights only, to warm-start from"


def _name(config: Mapping[str, Any]) -> str:
    """Return the name of a run: that of its workdir, else of its workload."""
    workdir = pathlib.PurePath(str(config.get("workdir") or ""))
    return workdir.name or str(config.get("workload") or "model").split(".")[-1]


@contextlib.contextmanager
def _describing(source: Source) -> Iterator[None]:
    try:
        yield
    except StoredError:
        raise
    except Exception as error:  # noqa: BLE001
        raise StoredError(
            f"{source.path}: its config does not describe its workload:"
            f" {run_workload.reason(error)}"
        ) from error


def _json(tree: Any) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"
