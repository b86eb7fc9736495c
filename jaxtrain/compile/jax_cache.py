"""Programs that JAX's own cache gives, as bytes.

A program that was read from a cache must not be serialized again: on CPUs it then lacks functions,
and its first run fails (seen with jax 0.10.2). So `serialize` takes the bytes of JAX's cache. They
have no public name: if a version of JAX has another one, such a program is not serialized.
"""

import contextlib
import io
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import serialize_executable


class _Reads(threading.local):
    contents: list[bytes] | None = None  # that JAX's cache gave to this thread; None: not noted


_reads = _Reads()


@contextlib.contextmanager
def reading() -> Iterator[list[bytes] | None]:
    """Yield a list of the bytes that JAX's cache gives to this thread meanwhile.

    None: this version of JAX does not tell.
    """
    try:
        _install()
    except (ImportError, AttributeError):
        yield None
        return
    contents: list[bytes] = []
    _reads.contents = contents
    try:
        yield contents
    finally:
        _reads.contents = None


def _install() -> None:
    from jax._src import compilation_cache  # the only place where the bytes are

    module: Any = compilation_cache
    extract = module.extract_executable_and_time
    if getattr(extract, "notes", False):
        return

    def extract_and_note(entry: bytes) -> tuple[bytes, int]:
        content, seconds = extract(entry)
        if _reads.contents is not None:
            _reads.contents.append(content)
        return content, seconds

    vars(extract_and_note)["notes"] = True
    module.extract_executable_and_time = extract_and_note


def serialize(program: jax.stages.Compiled, contents: list[bytes] | None) -> bytes:
    """Return a compiled program as `serialize_executable.deserialize_and_load` reads it.

    ``contents``: those that JAX's cache gave during its compilation. Raises an error of any kind if
    that cannot be done.
    """
    if contents is None:
        if jax.config.values["jax_enable_compilation_cache"]:
            raise ValueError("it may be of JAX's cache, which does not tell")
        contents = []
    if not contents:
        return bytes(serialize_executable.serialize(program)[0])
    if len(contents) > 1:
        raise ValueError("its compilation read several programs")
    inner: Any = program  # these parts have no public names
    if inner._params.const_args:
        raise ValueError("it has constants")
    unloaded = inner._executable._unloaded_executable
    file = io.BytesIO()
    arguments = jax.tree.leaves(program.args_info)
    pickler = _Pickler(file, program.runtime_executable(), contents[0])
    pickler.dump((unloaded, arguments, inner._no_kwargs))
    if not pickler.has_written:
        raise ValueError("it has another executable")
    return file.getvalue()


class _Pickler(serialize_executable._JaxPjrtPickler):
    """A pickler that writes given bytes for an executable."""

    def __init__(self, file: io.BytesIO, executable: Any, content: bytes):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._executable = executable
        self._content = content
        self.has_written = False

    def persistent_id(self, obj: Any) -> Any:
        if obj is self._executable:
            self.has_written = True
            return "exec", self._content
        parent: Any = super()
        return parent.persistent_id(obj)
