"""Compiled programs of several processes on CPUs, kept between starts, and of supervised runs.

JAX's cache has none but process 0's, and on CPUs each process's program is its own. A program that
was read back may run its collectives in another order than one just compiled (seen with jax 0.10.2:
the processes then wait for each other for ever). So each caches its own, and all must have one.

A supervised run has its programs here on all platforms, for `attempt_programs`.
"""

import contextlib
import hashlib
import json
import logging
import os
import pathlib
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxtrain.compile import jax_cache
from jaxtrain.parallel import cluster, supervised_attempt
from loaders.io import atomic_write, machine

log = logging.getLogger("jaxtrain")
FOLDER = "xla-processes"  # of the cache
LIMIT = 2 << 30  # [bytes] of all files together


def earlier(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Return the program that an earlier start compiled, or None if a process has none.

    All processes call it at once. Like JAX's cache, it trusts the folder, and runs its programs.
    """
    if not are_kept():
        return None
    program = None
    size = 0
    try:
        path = path_of(lowered, options)
        size = path.stat().st_size
        structure = jax.tree.structure(lowered.args_info)
        program = load(path, structure, lowered.out_tree)
    # there is none, or it is of another version: it is compiled
    except Exception as error:  # noqa: BLE001
        log.debug("a program is not read: %s", error)
    if not all(cluster.gather(int(program is not None))):
        return None
    log.info("a program of %.1f MB is that of an earlier start", size / 1e6)
    return program


def load(path: pathlib.Path, arguments: Any, results: Any) -> Callable[..., Any]:
    """Return the program in a file, with the trees of its arguments and results.

    Raises an error of any kind if it cannot be read.
    """
    content = read(path)
    with contextlib.suppress(OSError):  # another user's
        os.utime(path)
    program: Callable[..., Any] = serialize_executable.deserialize_and_load(
        content, arguments, results
    )
    return program


def read(path: pathlib.Path) -> bytes:
    """Return the content of a file of the cache. Raises ValueError: it is damaged; OSError."""
    digest, content = path.read_bytes().split(b"\n", 1)
    if hashlib.sha256(content).hexdigest().encode() != digest:
        raise ValueError(f"{path} is damaged")
    return content


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a file of the cache, with its digest, and remove others if they are too large."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write.file(path) as file:
        file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    machine.trim(path.parent, LIMIT)


def keep(
    lowered: jax.stages.Lowered, options: Mapping[str, Any], compile: Callable[[], Any]
) -> Callable[..., Any]:
    """``compile()``, kept for the next start."""
    began = time.perf_counter()
    with jax_cache.reading() as contents:
        program: jax.stages.Compiled = compile()
    seconds = time.perf_counter() - began
    config: Any = jax.config  # jax adds its options as it is imported
    is_slow = seconds >= config.jax_persistent_cache_min_compile_time_secs
    # A restart would also trace a program that JAX's own cache gave at once.
    if not are_recorded() and not (are_kept() and is_slow):
        return program
    try:
        write(path_of(lowered, options), jax_cache.serialize(program, contents))
    # a full disk, or a program with constants: the next start compiles again
    except Exception as error:  # noqa: BLE001
        log.debug("a program is not kept: %s", error)
    return program


def are_kept() -> bool:
    """Tell whether starts find this process's programs here: JAX's cache has the others."""
    return jax.process_count() > 1 and jax.default_backend() == "cpu" and not _is_off()


def are_recorded() -> bool:
    """Tell whether attempts of a supervised run find this process's programs by their names."""
    return bool(supervised_attempt.from_environment().run) and not _is_off()


def _is_off() -> bool:
    # Not jax.config's value: for several processes on CPUs `cluster.initialize` has set it.
    switch = os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower()
    return switch in ("0", "false", "f", "no", "n", "off")


def path_of(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> pathlib.Path:
    """Return a program's file. The text lacks unused arguments, and the facts number the used."""
    # these facts have no public name. Without them nothing is cached
    inner: Any = lowered._lowering
    facts = [
        str(lowered.args_info),
        str(lowered.out_tree),
        sorted(inner.compile_args["kept_var_idx"]),
        dict(options),
        [d.id for d in inner._device_list],
        surroundings(),
    ]
    name = hashlib.sha256(json.dumps(facts).encode() + lowered.as_text().encode()).hexdigest()
    return machine.cache_folder(FOLDER, name)


def surroundings() -> list[Any]:
    """Return everything outside a program's text that decides what the compiler makes of it."""
    settings: Any = jax.config  # jax adds its options as it is imported
    return [
        jax.process_index(),
        jax.process_count(),
        [[d.id, d.device_kind] for d in jax.local_devices()],
        jax.local_devices()[0].client.platform_version,  # of the driver, or of libtpu
        cluster.versions(),
        sorted((k, str(v)) for k, v in settings.values.items()),
        os.environ.get("XLA_FLAGS", ""),
        platform.machine(),
        _cpu(),
    ]


def _cpu() -> list[str]:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    names = ("flags", "Features", "model name", "CPU part")
    return sorted({line for line in lines if line.startswith(names)})
