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
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

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


class _Group(NamedTuple):
    """The arrays of one part of a state, in sum."""

    arrays: int
    numbers: int
    n_bytes: int

    def row(self, name: str) -> tuple[str, ...]:
        return name, str(self.arrays), f"{self.numbers:,}", _bytes(self.n_bytes)


def _sum(arrays: Collection[Stored]) -> _Group:
    numbers = sum(math.prod(array.shape) for array in arrays)
    return _Group(len(arrays), numbers, sum(array.n_bytes for array in arrays))


def inspect(source: Source) -> int:
    """Print the step, its metadata, its arrays and its damage. Return the exit code."""
    try:
        arrays = source.arrays()
    except stored.StoredError:
        if _print_damage(source):
            return 1
        raise
    data, meta = source.data(), source.meta()
    step = source.step(arrays)
    versions = [f"{name} {number}" for name, number in (meta.get("versions") or {}).items()]
    print(source.path)
    print(f"step {step}{', weights only' if meta.get('weights_only') else ''}")
    print(f"data {json.dumps(data)}")
    print(f"versions {_in_a_line(', '.join(versions)) or 'not recorded'}")
    print(f"parameter table {_in_a_line(meta.get('parameters', 'not recorded'))}\n")
    rows = [("array", "shape", "dtype", "size", "sharding as saved")]
    groups: dict[str, list[Stored]] = {}
    for path, array in arrays.items():
        size = _bytes(array.n_bytes)
        rows.append((path, str(list(array.shape)), array.dtype.name, size, array.sharding))
        groups.setdefault(path.split("/")[0], []).append(array)
    print(*console.columns(rows), sep="\n")
    print()
    sums: list[tuple[str, ...]] = [("group", "arrays", "numbers", "size")]
    for name, group in groups.items():
        sums.append(_sum(group).row(name))
    sums.append(_sum(arrays.values()).row("all"))
    print(*console.columns(sums), sep="\n")
    print(flush=True)  # the files are read after this, which may take long
    return 1 if _print_damage(source) else 0


def _print_damage(source: Source) -> int:
    """Print a line for each file that differs from its checksum. Return how many."""
    problems = _damage(source)
    for problem in problems:
        print(f"{source.path}: {problem}")
    return len(problems)


def _damage(source: Source) -> list[str]:
    """Compare all files of a step or an export with their checksums. Return the differences."""
    try:
        problems = source.damage()
    except checksums.NoManifest as error:
        print(f"checksums: {error} (another program wrote it, or the file was deleted)")
        return []
    if not problems:
        print(f"checksums: every file of {source.path} is as it was written")
    return problems


def _in_a_line(text: Any) -> str:
    """Return a file's text about itself, in one line, so that it cannot pass for a line of ours."""
    return " ".join(str(text).split())


class _Reading:
    """The findings of reading all arrays of a step."""

    def __init__(self, recorded: Mapping[str, str]):
        self._recorded = recorded  # digests of arrays, by the run
        self.problems: list[str] = []
        self.numbers = 0
        self.digest = np.zeros(2, np.uint32)

    def read(self, path: str, array: Stored) -> None:
        """Read an array, and note its numbers, its digest and its problems."""
        nans = infinities = 0
        digest_of_array = np.zeros(2, np.uint32)
        try:
            for index in array.pieces():
                piece = array.read(index)
                self.numbers += piece.size
                digest_of_array += digest.of_piece(path, piece, index)
                # bfloat16 and its kin are V to numpy
                if np.issubdtype(piece.dtype, np.inexact) or piece.dtype.kind == "V":
                    nans_of_piece = int(np.isnan(piece).sum())
                    nans += nans_of_piece
                    infinities += piece.size - nans_of_piece - int(np.isfinite(piece).sum())
        except Exception as error:  # noqa: BLE001  a damaged file raises many kinds
            self.problems.append(f"{path}: cannot be read: {first_line(error)}")
        else:
            self._compare(path, digest_text(digest_of_array))
        self.digest += digest_of_array
        if nans or infinities:
            self.problems.append(
                f"{path}: {nans} NaN and {infinities} infinite of {math.prod(array.shape)} numbers"
            )

    def _compare(self, path: str, digest_read: str) -> None:
        recorded = self._recorded.get(path)
        if recorded is not None and recorded != digest_read:
            self.problems.append(
                f"{path}: its digest is {digest_read}, and the run recorded {recorded}"
            )


def verify(source: Source) -> int:
    """Print all problems of a step or an export: files, then arrays. Return the exit code."""
    problems = _damage(source)
    if not (source.path / source.manifest).exists():
        print("           so it is verified by reading alone, which detects fewer kinds of damage")
    reading = _Reading(_recorded(source))
    try:
        arrays = source.arrays()
    except stored.StoredError as error:
        arrays = {}
        problems.append(str(error))
    for path, array in arrays.items():
        reading.read(path, array)
    problems += reading.problems
    for read_item in (source.data, source.meta):
        try:
            read_item()
        except stored.StoredError as error:
            problems.append(str(error))
    for problem in problems:
        print(problem)
    digest_read = digest_text(reading.digest)
    print(f"digest {digest_read}, as in the records of a run with config.metrics.digest")
    n_problems = f"{len(problems) or 'no'} problem{'s' * (len(problems) != 1)}"
    print(f"{len(arrays)} arrays, {reading.numbers:,} numbers read; {n_problems}")
    return 1 if problems else 0


def _recorded(source: Source) -> dict[str, str]:
    """Return the digests of the arrays that the run recorded at this step, if it did."""
    try:
        run = open_run(str(source.path.parent.parent))
        return step_differences.arrays(run).get(int(source.path.name), {})
    except (RunError, FileError, ValueError, OSError):
        return {}


def digest_of(arrays: Mapping[str, Stored]) -> str:
    """Return the digest of a step's arrays, as in the run's records (`jaxtrain.step.digest`)."""
    total = np.zeros(2, np.uint32)
    for path, array in arrays.items():
        for index in array.pieces():
            total += digest.of_piece(path, array.read(index), index)
    return digest_text(total)


def diff(a: Source, b: Source) -> int:
    """Print the changes from ``a`` to ``b`` by array. Return the exit code. Raises StoredError."""
    print(f"a {a.path}\nb {b.path}\n")
    n_different = _print_damage(a) + _print_damage(b)
    try:
        arrays_a, arrays_b = a.arrays(), b.arrays()
    except stored.StoredError:
        if n_different:
            return 1
        raise
    rows = []
    for path in {**arrays_a, **arrays_b}:
        row = _diff_row(arrays_a.get(path), arrays_b.get(path))
        if row:
            rows.append((path, *row))
    if rows:
        head = ("array", "", "‖a‖", "‖b‖", "‖b−a‖", "max|b−a|", "cosine", "NaN")
        print(*console.columns([head, *rows]), sep="\n")
    n_equal = len({**arrays_a, **arrays_b}) - len(rows)
    n_different += len(rows)
    for item, json_a, json_b in (("data", a.data(), b.data()), ("meta", a.meta(), b.meta())):
        for key, old, new in changes(json_a, json_b):
            print(f"{item}.{_in_a_line(f'{key}: {old} → {new}')}")
            n_different += 1
    print(f"{n_different} differ, {n_equal} arrays are equal")
    return 1 if n_different else 0


def _diff_row(a: Stored | None, b: Stored | None) -> tuple[str, ...] | None:
    """Return the columns behind the array's path, or None if the arrays are equal."""
    if a is None or b is None:
        array = a or b
        assert array is not None  # the path is from one of them
        kind = "new" if a is None else "missing"
        return (kind, f"{list(array.shape)} {array.dtype.name}", *[""] * 5)
    if a.shape != b.shape:
        return ("reshaped", f"{list(a.shape)} → {list(b.shape)}", *[""] * 5)
    d = Difference(a, b)
    if d.equal and a.dtype == b.dtype:
        return None
    kind = "changed" if a.dtype == b.dtype else f"{a.dtype.name} → {b.dtype.name}"
    numbers = [f"{x:.5g}" for x in (d.norm_a, d.norm_b, d.norm_d, d.largest, d.cosine)]
    nans = f"{d.nans_a} → {d.nans_b}" if d.nans_a or d.nans_b else ""
    return (kind, *numbers, nans)


class Difference:
    """Float64 sums over two arrays of one shape, by pieces. A NaN equals nothing and is omitted."""

    def __init__(self, a: Stored, b: Stored):
        self.nans_a = 0
        self.nans_b = 0
        self.unequal = 0
        self.largest = 0.0
        self.equal = True
        aa = bb = ab = dd = 0.0
        for index in a.pieces(16 << 20):
            raw_x, raw_y = a.read(index), b.read(index)
            self.equal &= raw_x.tobytes() == raw_y.tobytes()
            self.unequal += int(np.count_nonzero(raw_x != raw_y))
            x = np.atleast_1d(raw_x.astype(np.float64))
            y = np.atleast_1d(raw_y.astype(np.float64))
            self.nans_a += int(np.isnan(x).sum())
            self.nans_b += int(np.isnan(y).sum())
            is_finite = np.isfinite(x) & np.isfinite(y)
            x, y = x[is_finite], y[is_finite]
            d = y - x
            aa += float(x @ x)
            bb += float(y @ y)
            ab += float(x @ y)
            dd += float(d @ d)
            self.largest = max(self.largest, float(np.abs(d).max(initial=0.0)))
        self.norm_a = math.sqrt(aa)
        self.norm_b = math.sqrt(bb)
        self.norm_d = math.sqrt(dd)
        self.cosine = ab / math.sqrt(aa * bb) if aa and bb else math.nan


def export(source: Source, out: str, *, base: str = "") -> int:
    """Copy the weights of a step into a workdir of their own. Return the exit code.

    ``base``: the place of the weights that adapters change, which must be there; "" = the run's.
    """
    arrays = {}
    for path, array in source.arrays().items():
        if path.split("/")[0] in WEIGHTS:
            arrays[path] = array
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
    step_dir = save_weights(out, step, arrays, data=source.data(), meta=source.meta())
    size = _bytes(_sum(arrays.values()).n_bytes)
    print(f"{step_dir}: {len(arrays)} arrays, {size}; weights only, to warm-start from")
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
    problem = consistency.unusable(out)
    if problem:
        raise stored.StoredError(f"{out} {problem}; choose another --out")
    folder = files.expanded(out).absolute() / "checkpoints"
    step_dir = folder / str(step)
    if step_dir.exists():
        raise stored.StoredError(f"{step_dir} exists already; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as closing:
        temporary = tempfile.TemporaryDirectory(prefix=".export-", dir=folder)
        scratch = pathlib.Path(closing.enter_context(temporary))
        leaves = []
        for i, array in enumerate(arrays.values()):
            leaves.append((array.keys, _on_disk(array, scratch / str(i))))
        tree = stored.nest(leaves)
        # Orbax encodes as many arrays at once as fit into this: else all of them.
        gigabytes = max(1, *(-(-array.n_bytes // 10**9) for array in arrays.values()))
        manager = ocp.CheckpointManager(
            folder,
            options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
            item_handlers={
                "state": ocp.StandardCheckpointHandler(save_concurrent_gb=gigabytes),
                "data": ocp.JsonCheckpointHandler(),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )
        closing.enter_context(manager)
        meta = {**meta, "format": stored.FORMAT, "weights_only": True}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(tree, save_args=orbax_steps.in_chunks(tree)),
            data=ocp.args.JsonSave(dict(data)),
            meta=ocp.args.JsonSave(meta),
        )
        manager.save(step, args=items)
    checksums.write(step_dir)
    return step_dir


def _on_disk(array: Stored, path: pathlib.Path) -> np.ndarray:
    """Write an array to a file, and return it mapped."""
    if not array.n_bytes:
        return np.zeros(array.shape, array.dtype)
    with path.open("wb") as file:
        for index in array.pieces():
            piece = np.ascontiguousarray(array.read(index))
            file.write(piece.reshape(-1).view(np.uint8).data)
    return np.asarray(np.memmap(path, array.dtype, "r")).reshape(array.shape)


def changes(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from changes(a.get(key), b.get(key), f"{path}.{key}".strip("."))
    elif a != b:
        yield path, a, b
