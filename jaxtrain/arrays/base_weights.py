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
        if not (source and self.named):
            return source == self.named
        return source == self.named or _whole(source) in (_whole(self.named), _whole(self.source))


def recorded(data: Mapping[str, Any]) -> Base | None:
    """Return the record in a step's item ``data``, or None. Raises StoredError: damage."""
    found = data.get("base")
    if found is None:
        return None
    if not isinstance(found, dict) or not all(
        isinstance(found.get(name), str) for name in Base._fields
    ):
        raise StoredError(
            f"the record of the frozen weights is {str(found)[:80]!r}; expected"
            f" {', '.join(Base._fields)}"
        )
    return Base(*(found[name] for name in Base._fields))


def pin(rules: WarmStart) -> WarmStart:
    """Replace the run that ``rules`` name by the step that they mean now. Raises StoredError."""
    if not rules.source or safetensors_reader.is_safetensors(rules.source):
        return rules
    return at(rules, os.fspath(orbax_steps.find_step(rules.source, rules.step)))


def at(rules: WarmStart, place: str) -> WarmStart:
    """Return the same rules for a step directory, or for safetensors, at another place."""
    return dataclasses.replace(rules, source=place, step=None)


def digest(rules: WarmStart) -> str:
    """Read a source once. Return a digest of its parameters by path. Raises WarmStartError."""
    total = hashlib.sha256()
    for path, one in sorted(warm_start.open_source(rules).items()):
        total.update(f"{path} {list(one.shape)} {one.dtype.name}\n".encode())
        for index in one.pieces():
            total.update(np.ascontiguousarray(one.read(index)).reshape(-1).view(np.uint8).data)
    return total.hexdigest()[:32]


def workdirs(step: epath.Path, workdir: Any) -> list[epath.PathLike]:
    """Return a step's workdirs: above its checkpoints, or by config.checkpoint.folder."""
    return [
        step.parent.parent,
        *([workdir] if isinstance(workdir, str) and workdir and "://" not in workdir else []),
    ]


def places(base: Base, workdirs: Iterable[epath.PathLike]) -> list[str]:
    """Return the places where a run's base may lie: its copies in workdirs, and its origin."""
    name = f"{base.digest[:SHORT]}-{pathlib.PurePath(base.source).name}"
    kept = [
        os.fspath(place)
        for workdir in workdirs
        if (place := epath.Path(workdir) / FOLDER / name).exists()
    ]
    return list(dict.fromkeys([*kept, base.source]))


def find(base: Base, rules: WarmStart, places: Sequence[str]) -> str:
    """Return the first of ``places`` with the base. Raises StoredError: none, or another."""
    tried = []
    for place in places:
        try:
            found = digest(at(rules, place))
        except (OSError, ValueError) as error:
            tried.append(f"{place} cannot be read: {(str(error).splitlines() or [''])[-1].strip()}")
            continue
        if found == base.digest:
            return place
        tried.append(f"{place} holds other weights: their digest is {found}")
    raise StoredError(
        f"the weights that the run froze are those of {base.source}, digest {base.digest}, and they"
        f" are gone or differ: {'; '.join(tried)}"
    )


def keep(rules: WarmStart, workdir: str, short: str) -> str:
    """Copy a source into ``workdir/base``, unless it is there. Return its place there.

    ``short``: the first characters of its digest, which tell other copies of that name.
    """
    source = stored.place_of(rules.source)
    folder = pathlib.Path(workdir).absolute() / FOLDER
    target = folder / f"{short}-{source.name}"
    if pathlib.Path(place := str(source)).parent == folder:
        return place
    folder.mkdir(parents=True, exist_ok=True)
    if not target.exists() and not source.is_dir():
        _copy(source, target)
    elif not target.exists():
        with atomic_write.folder(target) as partial:
            for file in _files(source):
                copy = partial / os.path.relpath(os.fspath(file), os.fspath(source))
                copy.parent.mkdir(parents=True, exist_ok=True)
                _copy(file, copy)
    return str(target)


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    for path in folder.iterdir():
        yield from _files(path) if path.is_dir() else (path,)


def _copy(source: epath.Path, target: pathlib.Path) -> None:
    with atomic_write.file(target) as out, source.open("rb") as file:
        # Never a hard link: who writes into the source would write into the copy.
        # another disk or a store, or a file system that cannot share blocks
        with contextlib.suppress(OSError):
            fcntl.ioctl(out.fileno(), FICLONE, file.fileno())
            return
        shutil.copyfileobj(file, out)


def _whole(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.abspath(files.expanded(path))
