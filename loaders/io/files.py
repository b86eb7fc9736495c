"""Opens files of other people, in this module alone.

A dataset, a checkpoint or an export may come from anyone. A name in it may lead out of its folder,
and its file may be a pipe, a device or a file of any size. So every such file is opened here: it is
regular, it lies inside its folder after links are resolved, nothing waits for it, and no more is
read of it than allowed. docs/security.md has the promises.

In the cache of Hugging Face's Hub, the files of a snapshot are links to ../../blobs: `home` takes
its repository as the folder.
"""

import contextlib
import errno
import glob
import io
import json
import math
import os
import pathlib
import re
import stat
import zipfile
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from loaders.io.checks import UserError, first_line

if TYPE_CHECKING:
    # imported for arrays alone: it takes a third of the start of commands that read none
    import numpy as np

MAX_JSON = 64 << 20  # [bytes] of a file that describes others
MAX_ARRAYS = 1 << 30  # [bytes] of arrays in an archive
MAX_DEPTH = 100  # of its lists and objects
MAX_AXES = 64  # that numpy's arrays may have
# an escape of half a character, which may lack its other half
HALF = re.compile(r"\\u[dD][89a-fA-F]")
Stamps = tuple[tuple[str, int, int], ...]  # path, size and time of files
LINKS = "; its links are followed with data.follow_links=true"


class DataError(UserError, ValueError):
    """Data that cannot be used. The message names the path, the value and the remedy."""


class FileError(DataError):
    """A file that is not opened, or of no use. The message is a line that begins with its path."""

    def __init__(self, message: str):
        # a name may have lines, which would be read as others' messages
        super().__init__(message.replace("\n", "\\n"))


class CheckedPath(type(pathlib.Path())):  # type: ignore[misc]  # that of this system
    """A path that `inside` has checked. It is checked again when it is opened."""

    # the folder that it must lie in, without links; None: wherever it leads
    within: pathlib.Path | None = None


def home(folder: pathlib.Path) -> pathlib.Path:
    """Return the folder that files must lie in: itself, or a Hub snapshot's repository."""
    for snapshot in (folder, *folder.parents):
        repository = snapshot.parent.parent
        if snapshot.parent.name == "snapshots" and (repository / "blobs").is_dir():
            return repository
    return folder


def expanded(path: str | os.PathLike[str]) -> pathlib.Path:
    """Return a user's path with the home that ~ or ~NAME stands for. Raises FileError: no home."""
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError as error:
        raise FileError(
            f"{path}: there is no such home on this machine; write the path out"
        ) from error


def inside(
    folder: pathlib.Path, name: Any, *, links: bool = False, remedy: str = ""
) -> pathlib.Path:
    """Return the path of the file ``name`` in ``folder``, which need not exist.

    ``name``: as another file gives it, so anything. ``links``: whether links in the folder may lead
    out of it. ``remedy``: the end of the message. Raises FileError for a name that leads out of it.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise FileError(
            f"{folder} has a file that names {str(name)[:80]!r}; expected the name of a file in"
            " that folder"
        )
    path = CheckedPath(folder / name)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path)  # a name that no file can have
        if links:
            absolute = pathlib.Path(os.path.abspath(path))
            is_inside = absolute.is_relative_to(os.path.abspath(folder))
        else:
            path.within = home(folder.absolute()).resolve()
            is_inside = path.resolve().is_relative_to(path.within)
    except (OSError, RuntimeError) as error:  # a loop of links
        reason = getattr(error, "strerror", None) or error
        raise FileError(f"{str(path)[:300]}: {reason}") from error
    if not is_inside:
        raise FileError(f"{path} leads out of {folder}, and is not read{remedy}")
    return path


def checked_as(path: pathlib.Path, kind: type) -> Any:
    """Return the result of `inside`, as a path of another kind."""
    converted = kind(path)
    converted.within = getattr(path, "within", None)
    return converted


@contextlib.contextmanager
def regular(path: os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a regular file to read. Raises FileError for everything else, without waiting for it.

    Args:
      path: on this machine, or an `etils.epath.Path` in an object store, which has no other files.
    """
    file = opened(path)
    with file:
        try:
            yield file
        except OSError as error:  # a store's missing file is missed as it is read
            if isinstance(error, FileNotFoundError):
                raise FileError(f"{path} does not exist") from error
            raise FileError(f"{path} cannot be read: {error.strerror or reason(error)}") from error


@contextlib.contextmanager
def reading(path: os.PathLike[str]) -> Iterator[None]:
    """Turn all errors of a library that reads a regular file, of any kind, into DataError."""
    try:
        with regular(path):  # a pipe would be waited for
            yield
    # zlib.error, BadZipFile, HeaderDataError, …; pyarrow's of memory that a damaged file claims
    except Exception as error:
        is_arrows = type(error).__module__.startswith("pyarrow")
        if isinstance(error, DataError | MemoryError) and not is_arrows:
            raise
        raise DataError(f"{path} cannot be read: {reason(error)[:300]}") from error


def reason(error: BaseException) -> str:
    """Return the message of an error in one line: those of pyarrow and nibabel may have several."""
    return " ".join(str(error).split()) or type(error).__name__


def opened(path: os.PathLike[str]) -> BinaryIO:
    """`regular`, for a caller that closes the file. Raises FileError."""
    if "://" in os.fspath(path):
        return _open_in_store(path)
    try:
        _check_regular(path, os.stat(path))  # first, since merely opening some devices has effects
        # it may have become a pipe
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            _check_regular(path, os.fstat(descriptor))
            _check_place(path, descriptor)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        if isinstance(error, FileError):
            raise
        if is_missing(error):
            raise FileError(f"{path} does not exist") from error
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise FileError(f"{path} cannot be read: {reason}") from error


def _open_in_store(path: Any) -> BinaryIO:
    try:
        file: BinaryIO = path.open("rb")
        return file
    except FileNotFoundError as error:
        raise FileError(f"{path} does not exist") from error
    except Exception as error:  # noqa: BLE001  a store's client raises many kinds
        raise FileError(f"{path} cannot be read: {str(error)[:300]}") from error


def is_missing(error: BaseException) -> bool:
    """Whether an error, or its cause, is a file that does not exist."""
    return any(
        isinstance(each, FileNotFoundError) or getattr(each, "errno", None) == errno.ENOENT
        for each in _with_causes(error)
    )


def may_pass(error: BaseException) -> bool:
    """Whether an error, or its cause, is one of a network file system that may soon be over."""
    numbers = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
    return any(getattr(each, "errno", None) in numbers for each in _with_causes(error))


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__


def read(path: os.PathLike[str], *, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes. Raises FileError."""
    with regular(path) as file:
        try:  # memory is taken for all that is asked for, before any is read
            size = os.fstat(file.fileno()).st_size
        except io.UnsupportedOperation:  # an object of a bucket has no descriptor
            size = most
        content = file.read(size + 1) if size <= most else b""
        if size < len(content) <= most:  # it has grown, or its size is not known, as in /proc
            content += file.read(most + 1 - len(content))
    if max(size, len(content)) > most:
        raise FileError(f"{path} has more than the {most:,} bytes that are read of such a file")
    return content


def read_text(path: os.PathLike[str], *, most: int) -> str:
    """Return the text of a regular file of at most ``most`` bytes. Raises FileError."""
    try:
        return read(path, most=most).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error


def lines(text: str) -> list[str]:
    """Return a text's lines without ends, "\\n" or "\\r\\n" alone: not form feeds or U+2028."""
    all_lines = [line.removesuffix("\r") for line in text.split("\n")]
    return all_lines if all_lines[-1] else all_lines[:-1]


def matches(pattern: pathlib.Path) -> list[pathlib.Path]:
    """Return the paths that a pattern matches. Signs in names of existing folders are no signs."""
    pattern = pattern.absolute()
    folder = next(path for path in pattern.parents if path.is_dir())
    escaped = f"{glob.escape(str(folder))}/{pattern.relative_to(folder)}"
    paths = glob.glob(escaped, recursive=True)
    return sorted(pathlib.Path(path) for path in paths)


def read_json(path: os.PathLike[str], *, most: int = MAX_JSON) -> dict[str, Any]:
    """Read a regular file as a JSON object. Raises FileError, also for too deep nesting."""
    content: dict[str, Any] = parse(read_text(path, most=most), os.fspath(path))
    return content


def parse(text: str, source: str, *, kind: type = dict) -> Any:
    """Read JSON. Raises FileError, ``source`` first: none, no ``kind``, or nested too deep."""
    try:
        tree = json.loads(text)
        too_deep = not _is_shallow(tree)
        if not too_deep and HALF.search(text):
            json.dumps(tree, ensure_ascii=False).encode()  # text must be writable and printable
    except RecursionError:
        too_deep = True
    except ValueError as error:  # also of a number with thousands of digits
        raise FileError(f"{source} is not JSON: {error}") from error
    if too_deep:
        raise FileError(f"{source} is nested more than {MAX_DEPTH} deep")
    if not isinstance(tree, kind):
        names: dict[type, str] = {dict: "an object", list: "a list"}
        content = names.get(type(tree), f"{str(tree)[:40]!r}")
        expected = names.get(kind, kind.__name__)
        raise FileError(f"{source} holds {content}; expected {expected}")
    return tree


def _is_shallow(tree: Any) -> bool:
    """Whether a tree is at most `MAX_DEPTH` deep, so that functions on it may recurse."""
    level = [tree]
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                children += node.values()
            elif isinstance(node, list):
                children += node
        if not children:
            return True
        level = children
    return False


def _check_regular(path: os.PathLike[str], status: os.stat_result) -> None:
    if stat.S_ISREG(status.st_mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "a device")
    raise FileError(f"{path} is {kind}; expected a regular file")


def _check_place(path: os.PathLike[str], descriptor: int) -> None:
    """Raise FileError if the opened file is not that of `inside`: a link took its place."""
    within = getattr(path, "within", None)
    if within is None:
        return
    try:  # the kernel has its path, also after the file was replaced or removed
        real = pathlib.Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        is_inside = real.is_relative_to(within)
        if not is_inside:
            # A disk that takes upper and lower case for one may spell the folder in another way.
            is_inside = any(_is_same(parent, within) for parent in real.parents)
    except OSError:  # a system without /proc: the file there now is the opened one, and no link
        real = pathlib.Path(os.path.realpath(path))
        is_inside = real.is_relative_to(within)
        if is_inside:
            is_inside = os.path.samestat(os.lstat(real), os.fstat(descriptor))
    if not is_inside:
        raise FileError(f"{path} leads out of {within} since a moment ago, and is not read")


def _is_same(place: pathlib.Path, other: pathlib.Path) -> bool:
    try:
        return os.path.samefile(place, other)
    except OSError:
        return False


def array(path: os.PathLike[str]) -> "np.ndarray":
    """Map an array of a regular .npy file, whose header must fit. Raises FileError."""
    import numpy as np

    with regular(path) as file:
        shape, column_major, dtype = _header(file, path)
        offset = file.tell()
        size = os.fstat(file.fileno()).st_size
        _check_size(path, shape, dtype, size - offset)
        order: Any = "F" if column_major else "C"
        if 0 in shape:
            return np.empty(shape, dtype, order)
        source: Any = file
        return np.memmap(source, dtype, "r", offset, shape, order)


def arrays(path: os.PathLike[str], *, most: int = MAX_ARRAYS) -> "dict[str, np.ndarray]":
    """Return the arrays of a regular .npz file, of ``most`` bytes at most. Raises FileError."""
    import numpy as np

    by_name: dict[str, np.ndarray] = {}
    try:
        with regular(path) as file, zipfile.ZipFile(file) as archive:
            check_archive(archive, path, most=most)
            for info in archive.infolist():
                name = info.filename.removesuffix(".npy")
                by_name[name] = _unpack(archive, info, path)
    except FileError:
        raise
    # zipfile and zlib raise many kinds for bytes that are no archive
    except Exception as error:  # noqa: BLE001
        raise FileError(
            f"{path} cannot be read as an archive of arrays: {error or type(error).__name__}"
        ) from error
    return by_name


def _unpack(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: os.PathLike[str]
) -> "np.ndarray":
    import numpy as np

    # its claimed size, and no more than that is unpacked
    with archive.open(info) as packed:
        content = io.BytesIO(packed.read(info.file_size))
    shape, column_major, dtype = _header(content, path)
    offset = content.tell()
    _check_size(path, shape, dtype, info.file_size - offset)
    flat = np.frombuffer(content.getbuffer(), dtype, math.prod(shape), offset)
    return flat.reshape(shape, order="F" if column_major else "C")


def check_archive(
    archive: zipfile.ZipFile, path: os.PathLike[str], *, most: int, remedy: str = ""
) -> None:
    """Raise FileError, with ``remedy``, if an archive takes more than ``most`` bytes, or could."""
    total = sum(info.file_size for info in archive.infolist())
    if total > most:
        raise FileError(f"{path} unpacks to {total:,} bytes; at most {most:,} are read{remedy}")
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise FileError(
                f"{path} is neither stored nor deflated, by which it could grow without bound; save"
                " it again"
            )


def _header(file: BinaryIO, path: os.PathLike[str]) -> "tuple[tuple[int, ...], bool, np.dtype]":
    """Return shape, whether column-major, and dtype of an array. Raises FileError."""
    import numpy as np

    try:
        version = np.lib.format.read_magic(file)
        readers = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, column_major, dtype = readers[version](file)
        size = math.prod(max(n, 1) for n in shape) * dtype.itemsize
        can_be_mapped = not dtype.hasobject and 0 < size < 2**63 and len(shape) <= MAX_AXES
        if not can_be_mapped or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"it holds {dtype} {shape}")
    except Exception as error:  # noqa: BLE001  numpy raises many kinds for files that are no arrays
        raise FileError(f"{path} cannot be read as an array: {first_line(error)}") from error
    return shape, column_major, dtype


def _check_size(
    path: os.PathLike[str], shape: tuple[int, ...], dtype: "np.dtype", size: int
) -> None:
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes > size:
        raise FileError(
            f"{path} cannot be read as an array: {size:,} bytes are too few for {dtype} {shape}"
        )


def changed_ns(status: os.stat_result) -> int:
    """Return when a file was changed last [ns], also if it was then given an older date."""
    return max(status.st_mtime_ns, status.st_ctime_ns)


def stamps(paths: Iterable[str | os.PathLike[str]]) -> Stamps:
    """Return the names, sizes and times of the files that exist, to tell them from later ones.

    A name that no file can have is left to the reader, whose error says what it is for.
    """
    existing = []
    for path in paths:
        # too long, a null, no such user's home
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            file = expanded(path)
            status = file.stat()
            if stat.S_ISREG(status.st_mode):
                existing.append((str(file), status.st_size, changed_ns(status)))
    return tuple(existing)
