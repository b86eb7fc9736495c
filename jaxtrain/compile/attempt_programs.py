"""Programs of a supervised run, which a later attempt of it finds without tracing them again.

`program_cache` finds a program by its text, which has to be traced and lowered first. Within one
run of supervisors a program's name is enough, if everything that decides its text is the same: the
config, the code, JAX, its options, the devices and their driver. They are hashed, and each process
keeps a file of this hash: name -> where the program lies, its arguments, results, and the digest of
its text. An attempt uses the names that all its processes have of the same attempt. Without a name,
a program is traced as ever, and so is one that cannot be loaded. After `IDLE` attempts in a row
without progress all are traced: a program that was loaded may be at fault.
"""

import hashlib
import json
import logging
import pathlib
import pickle
import sys
import sysconfig
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax

from jaxtrain.compile import program_cache
from jaxtrain.config import Config, to_json
from jaxtrain.parallel import cluster, jax_options, supervised_attempt
from jaxtrain.types import PyTree
from loaders.io import machine
from loaders.io.checks import first_line

log = logging.getLogger("jaxtrain")

IDLE = 2
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


class Entry(NamedTuple):
    """A program as the file has it."""

    path: str
    arguments: str  # a digest of their tree, shapes, dtypes and shardings
    out_tree: Any
    out_info: PyTree  # of ShapeDtypeStruct
    text: str  # its digest
    attempt: int  # that traced it


class Record(NamedTuple):
    """The content of the file."""

    programs: dict[str, Entry]
    peak: tuple[float, str] | None = None  # `metrics.peak_flops`, which may take a measurement


class Recorded(NamedTuple):
    """A program of an earlier attempt."""

    program: Callable[..., Any]
    out_info: PyTree
    text: str  # the digest of its text


class AttemptPrograms:
    """The programs of this process's run, made by all processes at once.

    Attributes:
      has_earlier: whether an earlier attempt has made programs in all processes, with the same
        config, code and devices.
    """

    def __init__(self, config: Config, mesh: Mesh):
        attempt = supervised_attempt.from_environment()
        self._attempt = attempt.attempt
        self._path: pathlib.Path | None = None
        self._record = Record({})
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()  # that all processes have
        self.has_earlier = False
        if not program_cache.are_recorded():
            return
        self._path = _file_of(attempt.run, config, mesh)
        if not self._attempt:
            return
        if attempt.idle >= IDLE:
            log.warning(
                "programs are traced again: the last %d attempts made no step with those of"
                " earlier ones",
                attempt.idle,
            )
            return
        self._record = _read(self._path)
        self._names = self._find_common_names()
        self.has_earlier = bool(self._names)
        if not self.has_earlier:
            log.info(
                "programs are traced again: attempt %d has other code, another config or other"
                " devices than those before it, or they made none",
                self._attempt,
            )

    def _find_common_names(self) -> frozenset[str]:
        """Return the names of programs that all processes have of the same attempt."""
        programs = self._record.programs
        listed = sorted((name, entry.attempt) for name, entry in programs.items())
        reports = cluster.gather_texts(json.dumps(listed))
        of_each = [{(name, attempt) for name, attempt in json.loads(text)} for text in reports]
        return frozenset(name for name, _ in set.intersection(*of_each))

    def peak(self, measure: Callable[[], tuple[float, str]]) -> tuple[float, str]:
        """Return the FLOP/s that an earlier attempt found, or ``measure()``, for the later ones."""
        if not self._record.peak:
            with self._lock:
                self._record = self._record._replace(peak=measure())
        assert self._record.peak
        return self._record.peak

    def find(self, name: str, arguments: PyTree) -> Recorded | None:
        """Return the program of this name and these arguments, or None. All call it at once."""
        if name not in self._names:
            return None
        recorded = None
        reason = ""
        entry = self._record.programs[name]
        try:
            if entry.arguments == _digest_of(arguments):
                structure = jax.tree.structure((arguments, {}))
                program = program_cache.load(pathlib.Path(entry.path), structure, entry.out_tree)
                recorded = Recorded(program, entry.out_info, entry.text)
        # it was removed from the cache, or is damaged: it is traced and compiled
        except Exception as error:  # noqa: BLE001
            reason = f": {first_line(error)}"
        if not all(cluster.gather(int(recorded is not None))):
            log.info("%s is traced again: not all processes load its program%s", name, reason)
            return None
        log.info("%s is the program of attempt %d, and is not traced again", name, entry.attempt)
        return recorded

    def note(
        self,
        name: str,
        arguments: PyTree,
        lowered: jax.stages.Lowered,
        options: Mapping[str, Any],
    ) -> None:
        """Record a program that is in the cache of programs, for the next attempt."""
        if not name or not self._path:
            return
        try:
            path = program_cache.path_of(lowered, options)
            if not path.exists():  # one with constants, for example
                return
            out_info = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered.out_info
            )
            text = hashlib.sha256(lowered.as_text().encode()).hexdigest()
            digest = _digest_of(arguments)
            entry = Entry(str(path), digest, lowered.out_tree, out_info, text, self._attempt)
            with self._lock:
                self._record.programs[name] = entry
                program_cache.write(self._path, pickle.dumps(self._record))
        # a full disk, or a tree that cannot be stored: the next attempt traces again
        except Exception as error:  # noqa: BLE001
            log.debug("%s is not recorded for the next attempt: %s", name, error)


def name_of_step(key: tuple[Hashable, ...]) -> str:
    """Return the name of a step's program, or "" for a stage whose value has no name."""
    try:
        return f"step {json.dumps(key)}"
    except TypeError:
        return ""


def _read(path: pathlib.Path) -> Record:
    try:
        record: Record = pickle.loads(program_cache.read(path))
        return record
    # there is none, or it is damaged
    except Exception as error:  # noqa: BLE001
        log.debug("no programs of earlier attempts: %s", error)
        return Record({})


def _file_of(run: str, config: Config, mesh: Mesh) -> pathlib.Path:
    """Return this process's file of programs, named by all that decides their text."""
    facts = [
        run,
        to_json(config),
        str(mesh),
        [str(device) for device in jax.devices()],
        jax_options.recorded(),
        cluster.digest_of_files(),
        _digest_of_own_modules(),
        program_cache.surroundings(),
    ]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return machine.cache_folder(program_cache.FOLDER, f"attempts-{name}")


def _digest_of_own_modules() -> str:
    """Hash the modules that are no installed package's, for example a user's model."""
    installed = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib")}
    installed.add(sysconfig.get_path("platlib"))
    digest = hashlib.sha256()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or file.startswith(tuple(installed)):
            continue
        digest.update(f"{name} {file}\n".encode())
        digest.update(hashlib.sha256(pathlib.Path(file).read_bytes()).digest())
    return digest.hexdigest()


def _digest_of(arguments: PyTree) -> str:
    leaves = [
        (x.shape, str(x.dtype), str(getattr(x, "sharding", ""))) for x in jax.tree.leaves(arguments)
    ]
    text = f"{jax.tree.structure(arguments)} {leaves}"
    return hashlib.sha256(text.encode()).hexdigest()
