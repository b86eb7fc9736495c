"""Inspect a step or an export, compare two, or copy the weights of one, without the model.

A copied step holds params, the average, the model state and the step. Its meta says
``"weights_only": true``. A run can be warm-started from it, not resumed.
"""

import contextlib
import functools
import json
import math
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from jaxtrain.arrays import checksums, orbax_steps, run_workload, stored
from jaxtrain.arrays.source import Source
from jaxtrain.arrays.stored import Stored
from jaxtrain.config import consistency
from jaxtrain.nn import lora
from jaxtrain.step import digest
from jaxtrain.telemetry import console
from jaxtrain.telemetry.report import step_differences
from jaxtrain.telemetry.report.run import RunError, open_run
from jaxtrain.telemetry.report.step_differences import digest_text
from loaders.io import files
from loaders.io.checks import first_line
from loaders.io.files import FileError

WEIGHTS = ("step", "params", "ema", "model_state")  # the parts of a state that an export has
_bytes = functools.partial(console.in_bytes, form=".1f")


def inspect(source: Source) -> int:
    arrays, data, meta = source.arrays(), source.data(), source.meta()
    step = source.step(arrays)
    groups: dict[str, list[Stored]] = {}
    for path, one in arrays.items():
        groups.setdefault(path.split("/")[0], []).append(one)
    totals = {
        name: {
            "arrays": len(g),
            "numbers": sum(math.prod(s.shape) for s in g),
            "bytes": sum(s.n_bytes for s in g),
        }
        for name, g in groups.items()
    }
    print(source.path)
    print(f"step {step}{', weights only' if meta.get('weights_only') else ''}")
    print(f"data {json.dumps(data)}")
    print(
        "versions"
        f" {_in_a_line(', '.join(f'{k} {v}' for k, v in (meta.get('versions') or {}).items())) or 'not recorded'}"
    )
    print(f"parameter table {_in_a_line(meta.get('parameters', 'not recorded'))}")
    print(f"{source.manifest} {'yes' if (source.path / source.manifest).exists() else 'no'}\n")
    rows = [
        (path, str(list(s.shape)), s.dtype.name, _bytes(s.n_bytes), s.sharding)
        for path, s in arrays.items()
    ]
    print(
        *console.columns([("array", "shape", "dtype", "size", "sharding as saved"), *rows]),
        sep="\n",
    )
    print()
    all_of_it = {
        key: sum(t[key] for t in totals.values()) for key in ("arrays", "numbers", "bytes")
    }
    sums = [
        (n, str(t["arrays"]), f"{t['numbers']:,}", _bytes(t["bytes"]))
        for n, t in {**totals, "all": all_of_it}.items()
    ]
    print(*console.columns([("group", "arrays", "numbers", "size"), *sums]), sep="\n")
    return 0


def _in_a_line(text: Any) -> str:
    """Return a file's text about itself, in one line, so that it cannot pass for a line of ours."""
    return " ".join(str(text).split())


def verify(source: Source) -> int:
    """Print all problems of a step or an export: files, then arrays. Return the exit code."""
    problems = []
    try:
        problems += source.damage()
        if not problems:
            print(f"checksums: every file of {source.path} is as it was written")
    except checksums.NoManifest as error:
        print(f"checksums: {error} (another program wrote it, or the file was deleted)")
        print("           so it is verified by reading alone, which detects fewer kinds of damage")
    numbers, digested, recorded = 0, np.zeros(2, np.uint32), _recorded(source)
    try:
        arrays = source.arrays()
    except stored.StoredError as error:
        arrays = {}
        problems.append(str(error))
    for path, one in arrays.items():
        nans = infinities = 0
        own = np.zeros(2, np.uint32)
        try:
            for index in one.pieces():
                piece = one.read(index)
                numbers += piece.size
                own += digest.of_piece(path, piece, index)
                # bfloat16 and its kin are V to numpy
                if np.issubdtype(piece.dtype, np.inexact) or piece.dtype.kind == "V":
                    n = int(np.isnan(piece).sum())
                    nans, infinities = (
                        nans + n,
                        infinities + piece.size - n - int(np.isfinite(piece).sum()),
                    )
        except Exception as error:  # noqa: BLE001  a damaged file raises many kinds
            problems.append(f"{path}: cannot be read: {first_line(error)}")
        else:
            if digest_text(own) != recorded.get(path, digest_text(own)):
                problems.append(
                    f"{path}: its digest is {digest_text(own)}, and the run recorded"
                    f" {recorded[path]}"
                )
        digested += own
        if nans or infinities:
            problems.append(
                f"{path}: {nans} NaN and {infinities} infinite of {math.prod(one.shape)} numbers"
            )
    for read in (source.data, source.meta):
        try:
            read()
        except stored.StoredError as error:
            problems.append(str(error))
    for problem in problems:
        print(problem)
    print(f"digest {digest_text(digested)}, as in the records of a run with config.metrics.digest")
    print(
        f"{len(arrays)} arrays, {numbers:,} numbers read; {len(problems) or 'no'}"
        f" problem{'s' * (len(problems) != 1)}"
    )
    return 1 if problems else 0


def _recorded(source: Source) -> dict[str, str]:
    """Return the digests of the arrays that the run recorded at this step, if it did."""
    try:
        return step_differences.arrays(open_run(str(source.path.parent.parent))).get(
            int(source.path.name), {}
        )
    except (RunError, FileError, ValueError, OSError):
        return {}


def digest_of(arrays: Mapping[str, Stored]) -> str:
    """Return the digest of a step's arrays, as in the run's records (`jaxtrain.step.digest`)."""
    pieces = (
        digest.of_piece(path, one.read(index), index)
        for path, one in arrays.items()
        for index in one.pieces()
    )
    return digest_text(sum(pieces, np.zeros(2, np.uint32)))


def diff(a: Source, b: Source) -> int:
    """Print the changes from ``a`` to ``b`` by array. Return the exit code. Raises StoredError."""
    before, after = a.arrays(), b.arrays()
    print(f"a {a.path}\nb {b.path}\n")
    rows: list[tuple[str, ...]] = []
    same = 0
    for path in {**before, **after}:
        x, y = before.get(path), after.get(path)
        if x is None or y is None:
            there = before.get(path) or after[path]
            what = "new" if x is None else "missing"
            rows.append((path, what, f"{list(there.shape)} {there.dtype.name}", *[""] * 5))
        elif x.shape != y.shape:
            rows.append((path, "reshaped", f"{list(x.shape)} → {list(y.shape)}", *[""] * 5))
        else:
            d = Difference(x, y)
            if d.equal and x.dtype == y.dtype:
                same += 1
                continue
            kind = "changed" if x.dtype == y.dtype else f"{x.dtype.name} → {y.dtype.name}"
            nans = f"{d.nans_a} → {d.nans_b}" if d.nans_a or d.nans_b else ""
            rows.append(
                (
                    path,
                    kind,
                    *(f"{v:.5g}" for v in (d.norm_a, d.norm_b, d.norm_d, d.largest, d.cosine)),
                    nans,
                )
            )
    if rows:
        head = ("array", "", "‖a‖", "‖b‖", "‖b−a‖", "max|b−a|", "cosine", "NaN")
        print(*console.columns([head, *rows]), sep="\n")
    for item, one, other in (("data", a.data(), b.data()), ("meta", a.meta(), b.meta())):
        for key, old, new in changes(one, other):
            print(f"{item}.{_in_a_line(f'{key}: {old} → {new}')}")
            rows.append((item,))
    print(f"{len(rows)} differ, {same} arrays are equal")
    return 1 if rows else 0


class Difference:
    """Float64 sums over two arrays of one shape, by pieces. A NaN equals nothing and is omitted."""

    def __init__(self, a: Stored, b: Stored):
        self.nans_a = self.nans_b = self.unequal = 0
        self.largest, self.equal = 0.0, True
        aa = bb = ab = dd = 0.0
        for index in a.pieces(16 << 20):
            raw_x, raw_y = a.read(index), b.read(index)
            self.equal &= raw_x.tobytes() == raw_y.tobytes()
            self.unequal += int(np.count_nonzero(raw_x != raw_y))
            x, y = np.atleast_1d(raw_x.astype(np.float64)), np.atleast_1d(raw_y.astype(np.float64))
            self.nans_a += int(np.isnan(x).sum())
            self.nans_b += int(np.isnan(y).sum())
            both = np.isfinite(x) & np.isfinite(y)
            x, y = x[both], y[both]
            aa, bb, ab = aa + float(x @ x), bb + float(y @ y), ab + float(x @ y)
            dd += float((y - x) @ (y - x))
            self.largest = max(self.largest, float(np.abs(y - x).max(initial=0.0)))
        self.norm_a, self.norm_b, self.norm_d = math.sqrt(aa), math.sqrt(bb), math.sqrt(dd)
        self.cosine = ab / math.sqrt(aa * bb) if aa and bb else math.nan


def export(source: Source, out: str, *, base: str = "") -> int:
    """Copy the weights of a step into a workdir of their own. Return the exit code.

    ``base``: the place of the weights that adapters change, which must be there; "" = the run's.
    """
    arrays = {path: s for path, s in source.arrays().items() if path.split("/")[0] in WEIGHTS}
    if "step" not in arrays:
        raise stored.StoredError(
            f"{source.path} holds no 'step': another program wrote it, and which arrays are weights"
            " is unknown"
        )
    if any(lora.is_adapter(path) for path in arrays):
        # the adapters are of no use without it
        run_workload.with_base(source, source.config(), base)
    step = source.step(arrays)
    assert step is not None  # there is one
    path = save_weights(out, step, arrays, data=source.data(), meta=source.meta())
    print(
        f"{path}: {len(arrays)} arrays, {_bytes(sum(s.n_bytes for s in arrays.values()))}; weights"
        " only, to warm-start from"
    )
    return 0


def save_weights(
    out: str,
    step: int,
    arrays: Mapping[str, Stored],
    *,
    data: Mapping[str, Any],
    meta: Mapping[str, Any],
) -> pathlib.Path:
    """Write ``arrays`` as out/checkpoints/<step>, weights only, with its manifest. Return it.

    The arrays wait in mapped files next to the result: this takes twice the disk space for a while,
    and host memory that the kernel may reclaim, except the arrays that Orbax encodes at once.
    Raises StoredError when that step is there already.
    """
    if why := consistency.unusable(out):
        raise stored.StoredError(f"{out} {why}; choose another --out")
    folder = files.expanded(out).absolute() / "checkpoints"
    if (folder / str(step)).exists():
        raise stored.StoredError(f"{folder / str(step)} exists already; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as closing:
        scratch = pathlib.Path(
            closing.enter_context(tempfile.TemporaryDirectory(prefix=".export-", dir=folder))
        )
        tree = stored.nest(
            [(s.keys, _on_disk(s, scratch / str(i))) for i, s in enumerate(arrays.values())]
        )
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
        # Orbax encodes as many arrays at once as fit into this: else all of them.
        limit = max(1, *(-(-s.n_bytes // 10**9) for s in arrays.values()))
        json_items = {name: ocp.JsonCheckpointHandler() for name in ("data", "meta")}
        handlers = {"state": ocp.StandardCheckpointHandler(save_concurrent_gb=limit), **json_items}
        manager = closing.enter_context(
            ocp.CheckpointManager(folder, options=options, item_handlers=handlers)
        )
        manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(tree, save_args=orbax_steps.in_chunks(tree)),
                data=ocp.args.JsonSave(dict(data)),
                meta=ocp.args.JsonSave({**meta, "format": stored.FORMAT, "weights_only": True}),
            ),
        )
    checksums.write(folder / str(step))
    return folder / str(step)


def _on_disk(one: Stored, path: pathlib.Path) -> np.ndarray:
    if not one.n_bytes:
        return np.zeros(one.shape, one.dtype)
    with path.open("wb") as file:
        for index in one.pieces():
            file.write(np.ascontiguousarray(one.read(index)).reshape(-1).view(np.uint8).data)
    return np.asarray(np.memmap(path, one.dtype, "r")).reshape(one.shape)


def changes(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from changes(a.get(key), b.get(key), f"{path}.{key}".strip("."))
    elif a != b:
        yield path, a, b
