"""The weights that a run freezes, which its checkpoints do not hold: their source and digest.

A checkpoint records `Base`: the step directory or the folder of safetensors, never "the newest
step", and a digest of its parameters, which is the same for a step and for an export of it.
Everything that needs the weights again calls `find`. With config.warm_start.keep,
``workdir/base/<digest>-<name>`` is a copy of the source, which comes first.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jaxtrain.arrays import orbax_steps, safetensors_reader, stored, warm_start
from jaxtrain.arrays.stored import StoredError
from jaxtrain.config import WarmStart
from loaders.io import atomic_write, files

FOLDER = "base"  # in a workdir
FICLONE = 0x40049409  # of Linux: both files share their blocks until one is written
SHORT = 7  # [characters] of a digest in the name of a copy


class Base(NamedTuple):
    """The source of frozen weights, as a checkpoint records it."""

    source: str  # step directory, or safetensors; "" = they were initialised
    named: str  # config.warm_start.source, which may be a run with several steps
    digest: str  # of the source's parameters

    def is_named(self, source: str) -> bool:
        """Whether a config's warm_start.source is the record's, perhaps by another spelling."""
        if source == self.named:
            return True
        if not source or not self.named:
            return False
        return _absolute(source) in (_absolute(self.named), _absolute(self.source))


def recorded(data: Mapping[str, Any]) -> Base | None:
    """Return the record in a step's item ``data``, or None. Raises StoredError: damage."""
    record = data.get("base")
    if record is None:
        return None
    fields = [record.get(name) for name in Base._fields] if isinstance(record, dict) else [None]
    if not all(isinstance(value, str) for value in fields):
        raise StoredError(
            f"the record of the frozen weights is {str(record)[:80]!r}; expected"
            f" {', '.join(Base._fields)}"
        )
    return Base(*fields)


def pin(rules: WarmStart, step: int | None = None) -> WarmStart:
    """Replace the run that ``rules`` name by its newest step, or ``step``. Raises StoredError."""
    if not rules.source or safetensors_reader.is_safetensors(rules.source):
        return rules
    return at(rules, os.fspath(orbax_steps.find_step(rules.source, step)))


def at(rules: WarmStart, place: str) -> WarmStart:
    """Return the same rules for a step directory, or for safetensors, at another place."""
    return dataclasses.replace(rules, source=place)


def digest(rules: WarmStart) -> str:
    """Read a source once. Return a digest of its parameters by path. Raises WarmStartError."""
    total = hashlib.sha256()
    for path, array in sorted(warm_start.open_source(rules).items()):
        total.update(f"{path} {list(array.shape)} {array.dtype.name}\n".encode())
        for index in array.pieces():
            piece = np.ascontiguousarray(array.read(index))
            total.update(piece.reshape(-1).view(np.uint8).data)
    return total.hexdigest()[:32]


def workdirs(step: epath.Path, workdir: Any) -> list[epath.PathLike]:
    """Return a step's workdirs: above its checkpoints, or by config.checkpoint.folder."""
    above: list[epath.PathLike] = [step.parent.parent]
    if isinstance(workdir, str) and workdir and "://" not in workdir:
        above.append(workdir)
    return above


def places(base: Base, workdirs: Iterable[epath.PathLike]) -> list[str]:
    """Return the places where a run's base may lie: its copies in workdirs, and its origin."""
    name = f"{base.digest[:SHORT]}-{pathlib.PurePath(base.source).name}"
    copies = [epath.Path(workdir) / FOLDER / name for workdir in workdirs]
    existing = [os.fspath(copy) for copy in copies if copy.exists()]
    return list(dict.fromkeys([*existing, base.source]))


def find(base: Base, rules: WarmStart, places: Sequence[str]) -> str:
    """Return the first of ``places`` with the base. Raises StoredError: none, or another."""
    problems = []
    for place in places:
        try:
            digest_there = digest(at(rules, place))
        except (OSError, ValueError) as error:
            lines = str(error).splitlines() or [""]
            problems.append(f"{place} cannot be read: {lines[-1].strip()}")
            continue
        if digest_there == base.digest:
            return place
        problems.append(f"{place} holds other weights: their digest is {digest_there}")
    raise StoredError(
        f"the weights that the run froze are those of {base.source}, digest {base.digest}, and they"
        f" are gone or differ: {'; '.join(problems)}"
    )


def keep(rules: WarmStart, workdir: str, short: str) -> str:
    """Copy a source into ``workdir/base``, unless it is there. Return its place there.

    ``short``: the first characters of its digest, which tell other copies of that name.
    """
    source = stored.place_of(rules.source)
    folder = pathlib.Path(workdir).absolute() / FOLDER
    target = folder / f"{short}-{source.name}"
    if pathlib.Path(str(source)).parent == folder:
        return str(source)
    folder.mkdir(parents=True, exist_ok=True)
    if target.exists():
        return str(target)
    if not source.is_dir():
        _copy(source, target)
        return str(target)
    with atomic_write.folder(target) as partial:
        for file in _files(source):
            copy = partial / os.path.relpath(os.fspath(file), os.fspath(source))
            copy.parent.mkdir(parents=True, exist_ok=True)
            _copy(file, copy)
    return str(target)


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _copy(source: epath.Path, target: pathlib.Path) -> None:
    with atomic_write.file(target) as out, source.open("rb") as file:
        # Never a hard link: who writes into the source would write into the copy. Blocks cannot be
        # shared with another disk or a store, nor by every file system.
        with contextlib.suppress(OSError):
            fcntl.ioctl(out.fileno(), FICLONE, file.fileno())
            return
        shutil.copyfileobj(file, out)


def _absolute(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.abspath(files.expanded(path))
