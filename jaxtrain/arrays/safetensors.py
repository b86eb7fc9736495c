"""A checkpoint as safetensors for Hugging Face, and back.

Arrays are streamed, which is possible because safetensors' header follows from shapes alone and is
written first. Host memory is that of one chunk of one array: its stored bytes, decoded and copied.

Names, shapes and further files are those of the workload's `jaxtrain.types.Export`. Model state
that belongs to the model is exported in its own dtypes. A warm start takes parameters alone.
"""

import collections
import contextlib
import functools
import hashlib
import json
import math
import pathlib
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain import specs as spec_lib
from jaxtrain.arrays import (
    card,
    checksums,
    run_workload,
    safetensors_reader,
    saved_steps,
    stored,
    warm_start,
)
from jaxtrain.arrays import source as source_lib
from jaxtrain.arrays.source import SUMS, Source
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.nn import lora
from jaxtrain.types import Export, Format, Hub
from loaders.io import atomic_write, checks, files

SHORT = {"f32": np.dtype("<f4"), "f16": np.dtype("<f2"), "bf16": np.dtype(ml_dtypes.bfloat16)}
# [s] that the patterns of a run's config may take; 10,000 parameters with 100 patterns take 1 s
PATTERNS = 60.0
CODES = {dtype: code for code, dtype in safetensors_reader.DTYPES.items()}


class Entry(NamedTuple):
    """One array of the export: a whole parameter, or an entry of its first axis."""

    name: str
    path: str  # of the parameter, or path[i] for entry i
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def export(
    run: str,
    out: str,
    *,
    step: int | None = None,
    ema: bool = False,
    only: str = "",
    dtype: np.dtype | None = None,
    shard_size: int = 5 * 10**9,
    named: str = "",
    base: str = "",
    formats: Sequence[str] = (),
    license: str = "",
) -> str:
    """Write the folder ``out``, whole or not at all. Return a line about it.

    Args:
      formats: names of the workload's `jaxtrain.types.Format`, whose names and files it takes.
      license: of the weights, for the card, in place of the run's config.card.license.
      named: the module of the run's workload, if it is none of this package.
      base: the source of the run's first weights, in place of its config.warm_start.source.

    Raises StoredError: no such step, no average, a damaged step, an ``only`` that matches no path,
    names that are given twice, an ``out`` that exists.
    """
    source = source_lib.find(run, step, export="it is in safetensors already")
    _refuse_damage(source)
    config = source.config()
    if license:
        config["card"] = {**(config.get("card") or {}), "license": license}
    chosen = _choose(
        source,
        config,
        "ema" if ema else "params",
        only=only,
        named=named,
        base=base,
        formats=formats,
    )

    # 1. Names and places follow from shapes alone.
    entries = _entries_of_each(chosen, dtype)
    flat = [entry for of_path in entries.values() for entry in of_path]
    shards = _split(flat, shard_size)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = names if len(names) > 1 else [safetensors_reader.WHOLE]
    where = {entry.name: file for file, shard in zip(names, shards, strict=True) for entry in shard}

    # 2. Everything goes into a folder of another name, which is renamed when it is whole.
    target = files.expanded(out).absolute()
    if target.exists() and any(target.iterdir()):
        raise StoredError(f"{target} is not empty; choose another --out")
    with atomic_write.folder(target) as partial:
        further, hub = _further_files(chosen, flat)
        # transformers needs a config.json of its own, and arrays marked as PyTorch's.
        framework = "pt" if "config.json" in further else "flax"
        sums = _write_shards(partial, names, shards, _content(chosen.arrays, entries), framework)
        # 3. The files that make arrays a model: their index, config and card, and the way back.
        for name, content in {**_own_files(chosen, entries, where, hub), **further}.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
            sums[name] = hashlib.sha256(content).hexdigest()
        (partial / SUMS).write_text("".join(f"{sums[name]}  {name}\n" for name in sorted(sums)))
    size = (
        f"{len(flat)} arrays, {sum(entry.n_bytes for entry in flat) / 1e6:.1f} MB in {len(names)}"
        " file(s)"
    )
    use = (
        f"a part of the model (--only={only}), for warm starts"
        if chosen.left_out.is_part
        else f"loaded by {hub.library}"
    )
    return f"{target}: {chosen.group} of step {chosen.step}, {size}, {use}"


class _Chosen(NamedTuple):
    """The arrays of a step that an export has, and what its other files are made of."""

    source: Source
    step: int | None  # None: of weights without a step
    config: dict[str, Any]  # of the run
    based: dict[str, Any]  # the same, with the source of the weights below its adapters
    group: str  # of the parameters: params or ema
    arrays: dict[str, Stored]
    contract: Export  # of the workload, or of a format with names of its own
    formats: list[Format]
    whole_model: dict[str, Stored]  # for the files of ``formats``
    left_out: card.LeftOut


def _choose(
    source: Source,
    config: dict[str, Any],
    group: str,
    *,
    only: str,
    named: str,
    base: str,
    formats: Sequence[str],
) -> _Chosen:
    """Return the arrays that ``only`` matches, with adapters merged, and the contract of names."""
    everything, arrays = source.arrays(), source.parameters(ema=group == "ema")
    contract = run_workload.export_of(config, named)
    if run_workload.of_run(config, named) is None:
        print(
            f"{run_workload.unknown(config)}: its arrays are named by their paths, and it adds no"
            " files"
        )
    if contract.model_state:
        kept = {
            path: path.removeprefix(stored.MODEL_STATE)
            for path in everything
            if path.startswith(stored.MODEL_STATE)
        }
        arrays |= {
            path: everything[path]
            for path, name in kept.items()
            if re.search(contract.model_state, name)
        }
    based = (
        {**config, "warm_start": {**(config.get("warm_start") or {}), "source": base}}
        if base
        else config
    )
    if any(lora.is_adapter(path) for path in arrays):
        based = run_workload.with_base(source, config, base)
        arrays = _merged(arrays, based, named)

    others = list(_formats(source, config, named, formats))
    renaming = next((one for one in others if one.rename), None)
    whole_model = {path: one for path, one in arrays.items() if renaming or re.search(only, path)}
    if renaming and renaming.rename:
        with _describing(source):
            arrays, contract = (
                renaming.rename(arrays, run_workload.model_of(config)),
                renaming.export or Export(),
            )
    chosen = {path: one for path, one in arrays.items() if re.search(only, path)}
    if not chosen:
        raise StoredError(f"--only={only} matches none of {', '.join(arrays)}")
    is_part = any(re.search(contract.needed, path) for path in arrays.keys() - chosen.keys())
    left_out = card.LeftOut(only, len(arrays) - len(chosen), is_part)
    return _Chosen(
        source,
        source.step(everything),
        config,
        based,
        group,
        chosen,
        contract,
        others,
        whole_model,
        left_out,
    )


def _entries_of_each(chosen: _Chosen, dtype: np.dtype | None) -> dict[str, list[Entry]]:
    """Path -> its arrays in the files, in the order of the files."""
    entries: dict[str, list[Entry]] = {}
    for path, one in chosen.arrays.items():
        floating = (
            np.issubdtype(one.dtype, np.floating) or one.dtype.kind == "V"
        ) and not path.startswith(stored.MODEL_STATE)
        of_file = dtype if dtype and floating else one.dtype
        entries[path] = list(_entries(path, one.shape, of_file, chosen.config, chosen.contract))
    count = collections.Counter(entry.name for of_path in entries.values() for entry in of_path)
    if twice := sorted(name for name, n in count.items() if n > 1):
        workload = chosen.config.get("workload")
        raise StoredError(
            f"the names {', '.join(twice)} are given twice, by the export of {workload}; make"
            " them differ there"
        )
    # Wide types first: every array begins at a multiple of its width, for readers that map it.
    return dict(sorted(entries.items(), key=lambda item: -item[1][0].dtype.itemsize))


def _further_files(chosen: _Chosen, flat: Sequence[Entry]) -> tuple[dict[str, bytes], Hub]:
    """Return the files of the workload and of the formats by their names, and what the card says.

    They are of a whole model, and so is the card's example: a library fills gaps at random.
    """
    bytes_of: collections.Counter[str] = collections.Counter()
    for entry in flat:
        bytes_of[entry.dtype.name] += entry.n_bytes
    is_part, config = chosen.left_out.is_part, chosen.config
    with _describing(chosen.source):
        further = (
            {} if is_part else chosen.contract.files(chosen.based, bytes_of.most_common(1)[0][0])
        )
        hub = Hub() if is_part else chosen.contract.hub(config, {*further, *chosen.arrays})
        for other in chosen.formats:
            if other.files:
                further |= other.files(
                    config, chosen.whole_model, {"run": _name(config), "step": str(chosen.step)}
                )
                hub = hub._replace(example=f"{hub.example}\n{other.example}")
    return further, hub


def _own_files(
    chosen: _Chosen, entries: Mapping[str, Sequence[Entry]], where: Mapping[str, str], hub: Hub
) -> dict[str, bytes]:
    """Return the index, the config, the card and the way back, by their names."""
    source, step, config, arrays = chosen.source, chosen.step, chosen.config, chosen.arrays
    flat = [entry for of_path in entries.values() for entry in of_path]
    meta = {name: value for name, value in source.meta().items() if name != "config"}
    first = {path: of_path[0] for path, of_path in entries.items()}  # of a stack, or the only one
    folded = {
        p
        for p, e in first.items()
        if e.shape != arrays[p].shape[1 if e.path.endswith("]") else 0 :]
    }
    export = {
        "format": stored.FORMAT,
        "step": step,
        "group": chosen.group,
        "meta": meta,
        "config": config,
        "paths": {e.name: e.path for e in flat},
        "shapes": {path: list(arrays[path].shape) for path in first if path in folded},
    }
    model = card.Model(_name(config), step, chosen.group, flat, config, meta, hub, chosen.left_out)
    texts = {
        safetensors_reader.INDEX: _json(
            {"metadata": {"total_size": sum(entry.n_bytes for entry in flat)}, "weight_map": where}
        ),
        "config.json": _json(config),
        stored.EXPORT: _json(export),
        "README.md": card.text(model, card.last_metrics(source, step)),
    }
    return {name: text.encode() for name, text in texts.items()}


def _formats(
    source: Source, config: Mapping[str, Any], named: str, names: Sequence[str]
) -> Iterator[Format]:
    """Yield the formats of a run's workload by their names. Raises StoredError: an unknown name."""
    if not names:
        return
    workload = run_workload.of_run(config, named)
    known = workload.formats if workload else {}
    for name in names:
        if name not in known:
            raise StoredError(
                f"{source.path} is a run of {config.get('workload')!r}, whose formats do not"
                f" include {name!r}; {checks.expected(name, known) if known else 'it has none'}"
            )
        yield known[name]()


def _merged(
    arrays: Mapping[str, Stored], config: Mapping[str, Any], named: str
) -> dict[str, Stored]:
    """Return merged weights of a run with adapters: the trained, over the warm start's."""
    with _within(PATTERNS, "the patterns of its config.warm_start"):
        rules = run_workload.section_of(config, "warm_start", config_lib.WarmStart)
    if not rules.source:
        raise StoredError(
            "the run's frozen parameters were initialised, not read: there is no"
            " config.warm_start.source to merge with; `jaxtrain lora-to-peft` writes its adapters"
        )
    workload = run_workload.of_run(config, named)
    if workload is None:
        raise StoredError(
            f"{run_workload.unknown(config)}; without it the adapters cannot be merged"
        )
    table = run_workload.specs_of(config, workload)
    specs = dict(
        zip(spec_lib.paths(table), jax.tree.leaves(table, is_leaf=spec_lib.is_spec), strict=True)
    )
    shapes = {path: (spec.shape, spec.dtype) for path, spec in specs.items()}
    try:
        source = warm_start.open_source(rules)
    except (warm_start.WarmStartError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001  of an address, whatever its store's client raises
        raise StoredError(
            f"the run's warm_start.source, {rules.source!r}, cannot be opened: {_reason(error)}"
        ) from error
    with _within(PATTERNS, "the patterns of its config.warm_start"):
        base = warm_start.match(shapes, source, rules).loaded
    adapters = run_workload.section_of(config, "lora", config_lib.Lora)
    if not adapters.rank:
        raise StoredError("the run's config.lora.rank is 0, and it holds adapters")
    scale = adapters.alpha / adapters.rank
    found = {}
    for path, spec in specs.items():
        if path not in arrays and path not in base:
            raise StoredError(
                f"{path} is neither in the run nor in its base weights (config.warm_start.skip)"
            )
        one = (
            arrays[path]
            if path in arrays
            else _as_kept(warm_start.folded(base[path], spec.shape), adapters.dtype)
        )
        n_layers, n_first = lora.sides(spec)
        layers, first, last = (
            spec.shape[:n_layers],
            spec.shape[n_layers:][:n_first],
            spec.shape[n_layers:][n_first:],
        )
        expected = {
            lora.A: (*layers, adapters.rank, *last),
            lora.B: (*layers, *first, adapters.rank),
        }
        parts = {name: arrays[f"{path}/{name}"] for name in expected if f"{path}/{name}" in arrays}
        there = {name: part.shape for name, part in parts.items()}
        if one.shape != spec.shape or there not in ({}, expected):
            raise StoredError(
                f"{path} is {one.shape} with adapters {there}; the run's config has {spec.shape}"
                f" with {expected}"
            )
        if parts:
            one = one._replace(
                read=functools.partial(
                    _merge, one, parts[lora.A], parts[lora.B], scale, n_layers, n_first
                )
            )
        found[path] = one
    return found


def _as_kept(one: Stored, dtype: str) -> Stored:
    """Round a frozen array to config.lora.dtype, as in the run, and keep its own dtype."""
    kept, path = jnp.dtype(dtype), "/".join(map(str, one.keys))
    if jnp.promote_types(one.dtype, kept) == kept:
        return one
    return one._replace(
        read=lambda index: _rounded(_rounded(one.read(index), kept, path), one.dtype, path)
    )


def _merge(
    one: Stored,
    a: Stored,
    b: Stored,
    scale: float,
    n_layers: int,
    n_first: int,
    index: stored.Index,
) -> np.ndarray:
    """W + scale × B A of the layers that are asked for, in float64, rounded once."""
    index = index or tuple(slice(0, n) for n in one.shape)
    layers = index[:n_layers]
    a_f8, b_f8 = (
        x.read((*layers, *(slice(0, n) for n in x.shape[n_layers:]))).astype("f8") for x in (a, b)
    )
    product = lora.product(a_f8, b_f8, n_first)
    w = one.read((*layers, *(slice(0, n) for n in one.shape[n_layers:])))
    merged = _rounded(w.astype("f8") + scale * product, w.dtype, "/".join(map(str, one.keys)))
    return merged[(*(slice(None) for _ in layers), *index[n_layers:])]


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
    _refuse_damage(source)
    arrays, meta = source.arrays(), source.meta()
    path = saved_steps.save_weights(out, source.step(arrays) or 0, arrays, data={}, meta=meta)
    n = sum(path.startswith("params/") for path in arrays)
    return f"{path}: {n} arrays, weights only, to warm-start from"


def _refuse_damage(source: Source) -> None:
    try:
        problems = source.damage()
    except checksums.NoManifest as error:
        print(f"{error}: it is read as it is, unverified")
        return
    if problems:
        raise StoredError(f"{source.path} is damaged: {'; '.join(problems)}")


@contextlib.contextmanager
def _within(seconds: float, what: str) -> Iterator[None]:
    """End the block after so many seconds with a StoredError: a pattern may take for ever.

    Python's looks for signals as it goes. Only the main thread can have them: others are not ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        del number, frame
        raise StoredError(f"{what} were not done after {seconds:g} s; one of them takes for ever")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _name(config: Mapping[str, Any]) -> str:
    """Return the name of a run: that of its workdir, else of its workload."""
    return (
        pathlib.PurePath(str(config.get("workdir") or "")).name
        or str(config.get("workload") or "model").split(".")[-1]
    )


@contextlib.contextmanager
def _describing(source: Source) -> Iterator[None]:
    try:
        yield
    except StoredError:
        raise
    except Exception as error:  # noqa: BLE001
        raise StoredError(
            f"{source.path}: its config does not describe its workload: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _entries(
    path: str, shape: tuple[int, ...], dtype: np.dtype, config: Mapping[str, Any], contract: Export
) -> Iterator[Entry]:
    model = run_workload.model_of(config)
    try:
        names = contract.names(model, path)
        part = contract.shape(model, path, shape if isinstance(names, str) else shape[1:])
    except Exception as error:  # noqa: BLE001  a config of others may hold anything
        raise StoredError(
            f"{path} {list(shape)} does not fit the run's config.model: {_reason(error)}"
        ) from error
    if isinstance(names, str):
        yield Entry(names, path, part, dtype)
        return
    if not shape or len(names) != shape[0]:
        raise StoredError(
            f"the export of {config['workload']} gives {len(names)} names for the first axis of"
            f" {path} {shape}"
        )
    for i, name in enumerate(names):
        yield Entry(name, f"{path}[{i}]", part, dtype)


def _split(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    """In order, as many to a file as fit, header included."""
    shards: list[list[Entry]] = []
    used = limit
    for entry in entries:
        # [bytes] of data, and at most so many of the header
        size = entry.n_bytes + 200 + len(entry.name)
        if not shards or used + size > limit:
            shards, used = [*shards, []], 0
        shards[-1].append(entry)
        used += size
    return shards


def _content(
    arrays: Mapping[str, Stored], entries: Mapping[str, Sequence[Entry]]
) -> Iterator[memoryview]:
    """Yield the bytes of all arrays, in order: layers of a stack follow each other already."""
    for path, of_path in entries.items():
        one, dtype = arrays[path], of_path[0].dtype
        for index in one.pieces():
            # No name for the piece: it would live on while the next one is read.
            yield (
                _rounded(np.ascontiguousarray(one.read(index)), dtype, path)
                .reshape(-1)
                .view(np.uint8)
                .data
            )


def _rounded(x: np.ndarray, dtype: np.dtype, path: str) -> np.ndarray:
    """``x`` in another dtype. Raises StoredError if a finite number becomes infinite."""
    with np.errstate(over="ignore"):
        found = x.astype(dtype, copy=False)
    if found.dtype != x.dtype and (lost := ~np.isfinite(found) & np.isfinite(x)).any():
        largest = float(np.abs(x[lost].astype("f8")).max())
        raise StoredError(
            f"{path} holds {largest:.4g}, which {np.dtype(dtype).name} cannot hold; choose another"
            " --dtype: bf16, f32"
        )
    return found


def _write_shards(
    folder: pathlib.Path,
    files: Sequence[str],
    shards: Sequence[Sequence[Entry]],
    content: Iterator[memoryview],
    framework: str,
) -> dict[str, str]:
    sums, rest = {}, memoryview(b"")
    for name, shard in zip(files, shards, strict=True):
        digest = hashlib.sha256()
        with (folder / name).open("wb") as file:
            head = header(shard, framework)
            file.write(head)
            digest.update(head)
            missing = sum(entry.n_bytes for entry in shard)
            while missing:
                if not rest:
                    rest = next(content)
                n = min(missing, len(rest))
                file.write(rest[:n])
                digest.update(rest[:n])
                missing -= n
                # an empty view would keep its array
                rest = rest[n:] if n < len(rest) else memoryview(b"")
        sums[name] = digest.hexdigest()
    return sums


def header(entries: Sequence[Entry], framework: str) -> bytes:
    # "flax" is Hugging Face's word for arrays of JAX
    content: dict[str, Any] = {"__metadata__": {"format": framework}}
    offset = 0
    for entry in entries:
        if entry.dtype not in CODES:
            raise StoredError(
                f"{entry.path} is {entry.dtype.name}, which safetensors does not have; choose"
                " another with --dtype"
            )
        place = [offset, offset + entry.n_bytes]
        content[entry.name] = {
            "dtype": CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": place,
        }
        offset += entry.n_bytes
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format's own padding: data begin at a multiple of eight
    return len(text).to_bytes(8, "little") + text


def _json(tree: Any) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"
