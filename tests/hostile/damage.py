"""Ways to damage a folder of files: every state in which an attacker, or a disk, might leave it.

`cases` lists them all, in the same order on every machine. Each is a name and a function that
damages a copy.
"""

import gzip
import hashlib
import io
import json
import os
import pathlib
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow.parquet as pq

OUTSIDE = "outside"  # the folder next to the damaged one whose files nobody may open
SECRET = f"../{OUTSIDE}/secret.json"
DEEP = b"[" * 100_000 + b"]" * 100_000
TEXTS = {  # of a JSON file
    "a number": b"5",
    "a string": b'"x"',
    "null": b"null",
    "a list": b"[]",
    "an object": b"{}",
    "deep": DEEP,
    "no UTF-8": b'{"\xff": 1}',
    "many digits": b'{"a": ' + b"9" * 5000 + b"}",
    "deep within": b'{"config": ' + b"[" * 500 + b"]" * 500 + b"}",
}
VALUES = (  # of an entry of a JSON file
    None,
    -1,
    0,
    3_000_000_000,
    10**30,
    1.5,
    float("nan"),
    True,
    "x",
    "",
    "\0",
    "a\nb",
    [],
    {},
    [1, 2],
    [-1],
    {"a": {}},
    SECRET,
    f"../../../{OUTSIDE}/secret.json",
    "/dev/zero",
    "payload",
    "os",
    "os:system",
    "~no-such-user/x",
    "x" * 5000,
)
NUMBERS = (
    "-1",
    "0",
    "1e400",
    "nan",
    "inf",
    "-inf",
    "9" * 400,
    "1e-320",
    "0x10",
    "1:2:3",
    "1_0",
    "٣",
    "1,5",
    "--",
    "",
)
CELLS = (  # of a table
    *NUMBERS,
    SECRET,
    "/dev/zero",
    "\0",
    "\ud7ff",
    "\u202e",
    "'",
    '"',
    "a;b",
    "a\tb",
    "=1+1",
    "x" * 5000,
    "[" * 900,
)


class Case(NamedTuple):
    """A damage. ``apply`` gets the copy."""

    name: str
    apply: Callable[[pathlib.Path], None]
    sealed: bool = False  # whether the checksums are recomputed, as an attacker would


def cases(folder: pathlib.Path, *, most: int = 400, named: Sequence[str] = ()) -> list[Case]:
    """The damages of a folder: of all its files, or ``most`` of them. Every call returns the same
    ones.

    Half of them are shared evenly between the files, since a JSON of a thousand entries is one
    file. The other half are drawn from all.

    ``named``: files that the user names, which may be links.
    """
    rng = random.Random(folder.name)
    found, turns = [], []  # a damage; how many of the same file are drawn before it
    for file in _files(folder):
        of_file = list(_of_file(folder, file, str(file) in named))
        found += of_file
        turns += rng.sample(range(len(of_file)), len(of_file))
    if len(found) > most:
        evenly = sorted(range(len(found)), key=lambda i: turns[i])
        kept = evenly[: most // 2] + rng.sample(evenly[most // 2 :], most - most // 2)
        found = [found[i] for i in sorted(kept)]
    return [case._replace(sealed=i % 2 == 1) for i, case in enumerate(found)]


def some(folder: pathlib.Path, n: int, seed: str, *, named: Sequence[str] = ()) -> list[Case]:
    """``n`` of the damages, drawn by a seed."""
    found = cases(folder, named=named)
    return [
        found[i] for i in sorted(random.Random(seed).sample(range(len(found)), min(n, len(found))))
    ]


def make(case: Case, source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies ``source`` to ``target``, and damages the copy."""
    shutil.copytree(source, target, symlinks=True)
    case.apply(target)
    if case.sealed:
        seal(target)


def seal(folder: pathlib.Path) -> None:
    """Recomputes the checksums of steps and exports below a folder."""
    from jaxtrain.arrays import checksums

    for name in ("manifest.json", "SHA256SUMS"):
        for path in sorted(folder.rglob(name)):
            if path.is_symlink() or not path.is_file():
                continue
            files = [
                p
                for p in sorted(path.parent.rglob("*"))
                if p.is_file() and not p.is_symlink() and p != path
            ]
            if name == "manifest.json":
                listed = {
                    str(p.relative_to(path.parent)): _entry(p) for p in files if p.name[0] != "."
                }
                for apart in checksums.UNLISTED:
                    listed.pop(apart, None)
                path.write_bytes(checksums._encode(listed))
            else:
                lines = (
                    f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.relative_to(path.parent)}\n"
                    for p in files
                )
                path.write_text("".join(lines))


def _entry(path: pathlib.Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"bytes": len(content), "hash": hashlib.sha256(content).hexdigest()}


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


def _of_file(folder: pathlib.Path, file: pathlib.Path, is_named: bool) -> Iterator[Case]:
    content, rng = (folder / file).read_bytes(), random.Random(str(file))
    bytes_of = {
        "empty": b"",
        "half": content[: len(content) // 2],
        "with more": content + b"\0" * 999,
    }
    for i in range(3):
        at = rng.randrange(max(len(content), 1))
        bytes_of[f"byte {i}"] = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
    for i in range(3):  # lengths, counts and offsets are small numbers somewhere near the beginning
        at = rng.randrange(max(min(len(content), 400), 1))
        bytes_of[f"word {i}"] = (
            content[:at]
            + rng.choice([b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f"])
            + content[at + 4 :]
        )
    tree = _json(content)
    if tree is not None:
        bytes_of |= TEXTS
    for what, new in bytes_of.items():
        yield Case(f"{file}: {what}", _writer(file, new))
    yield Case(f"{file}: missing", lambda copy: (copy / file).unlink())
    for what, kind in (
        ("a link out", SECRET),
        ("a link to a device", "/dev/zero"),
        ("a link to itself", file.name),
    ):
        if is_named and kind == SECRET:
            continue
        yield Case(f"{file}: {what}", _linker(file, kind))
    yield Case(f"{file}: a pipe", _replacer(file, os.mkfifo))
    yield Case(f"{file}: a folder", _replacer(file, os.mkdir))
    if tree is not None:
        for place in list(_places(tree)):
            for value in VALUES:
                yield Case(
                    f"{file}: {'.'.join(map(str, place))} = {str(value)[:20]!r}",
                    _setter(file, place, value),
                )


def _json(content: bytes) -> Any:
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return tree if isinstance(tree, dict | list) else None


def _places(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every entry."""
    for key, value in (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    ):
        yield (*path, key)
        yield from _places(value, (*path, key))


def _writer(file: pathlib.Path, content: bytes) -> Callable[[pathlib.Path], None]:
    return lambda copy: (copy / file).write_bytes(content) and None


def _linker(file: pathlib.Path, target: str) -> Callable[[pathlib.Path], None]:
    def apply(copy: pathlib.Path) -> None:
        (copy / file).unlink()
        up = "../" * (len(file.parts) - 1) if target == SECRET else ""
        (copy / file).symlink_to(up + target)

    return apply


def _replacer(
    file: pathlib.Path, make_one: Callable[[pathlib.Path], None]
) -> Callable[[pathlib.Path], None]:
    def apply(copy: pathlib.Path) -> None:
        (copy / file).unlink()
        make_one(copy / file)

    return apply


def _setter(file: pathlib.Path, place: tuple, value: Any) -> Callable[[pathlib.Path], None]:
    def apply(copy: pathlib.Path) -> None:
        tree = json.loads((copy / file).read_text())
        node = tree
        for key in place[:-1]:
            node = node[key]
        node[place[-1]] = value
        (copy / file).write_text(json.dumps(tree))

    return apply


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The bytes of a file after a change of a few bytes, words or stretches."""
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not changed:
            break
        at = rng.randrange(len(changed))
        kind = rng.randrange(6)
        if kind < 2:
            changed[at] = rng.randrange(256)
        elif kind == 2:
            changed[at : at + 8] = rng.choice((2**31 - 1, 2**32 - 1, 2**62, 0, 2**63)).to_bytes(
                8, "little"
            )[: len(changed) - at]
        elif kind == 3:
            changed[at : at + 4] = rng.randrange(2**32).to_bytes(4, "little")[: len(changed) - at]
        elif kind == 4:
            del changed[at : at + rng.randrange(1, 64)]
        else:
            other = rng.randrange(len(changed))
            changed[at : at + 16] = changed[other : other + 16]
    return bytes(changed)


def changed(name: str, content: bytes, rng: random.Random) -> bytes:
    """The content of a file, damaged."""
    kind = name.rpartition(".")[2]
    inner = INNER.get(kind)
    if inner and content and rng.random() < 0.6:
        return inner(name, content, rng)
    return mutated(content, rng) if content else rng.randbytes(rng.randrange(64))


def _of_json(name: str, content: bytes, rng: random.Random) -> bytes:
    tree = json.loads(content)
    if places := list(_places(tree)):
        *path, last = rng.choice(places)
        node = tree
        for key in path:
            node = node[key]
        if rng.random() < 0.1 and isinstance(node, dict):
            del node[last]
        else:
            node[last] = rng.choice(
                (*VALUES, node[last] * 2 if isinstance(node[last], int | str | list) else 0)
            )
    return json.dumps(tree).encode()


def _jsonl(name: str, content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = _of_json(name, lines[at], rng)
    return b"\n".join(lines) + b"\n"


def _safetensors(name: str, content: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(content[:8], "little")
    header = _of_json(name, content[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def _npy(name: str, content: bytes, rng: random.Random) -> bytes:
    """Replaces a value of the header and corrects the header's length."""
    length = int.from_bytes(content[8:10], "little")
    header = content[10 : 10 + length].decode("latin-1")
    found = list(re.finditer(r"\d+|'[^']*'|True|False", header))
    one = rng.choice(found)
    new = rng.choice(
        (
            *NUMBERS,
            "'O'",
            "'V8'",
            "[('a','<f4')]",
            "True",
            "2**60",
            "4611686018427387904",
            "'<U1000000000'",
            "()",
        )
    )
    header = header[: one.start()] + new + header[one.end() :]
    data = header.encode("utf-8", "replace")[:65535]
    return content[:8] + len(data).to_bytes(2, "little") + data + content[10 + length :]


def _zip(name: str, content: bytes, rng: random.Random) -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        chosen = rng.choice(old.infolist()).filename
        for info in old.infolist():
            data = old.read(info)
            new.writestr(
                info.filename,
                changed(info.filename, data, rng) if info.filename == chosen else data,
            )
    return out.getvalue()


def _gzip(name: str, content: bytes, rng: random.Random) -> bytes:
    return gzip.compress(changed(name.removesuffix(".gz"), gzip.decompress(content), rng), 1)


def _text(name: str, content: bytes, rng: random.Random) -> bytes:
    """A cell of a table replaced."""
    text = content.decode("latin-1")
    cells = re.split(r"([;,\t\n])", text)
    cells[rng.randrange(len(cells))] = rng.choice(CELLS)
    return "".join(cells).encode("utf-8", "replace")


def _parquet(name: str, content: bytes, rng: random.Random) -> bytes:
    """Changes the types of columns, or their order."""
    table = pq.read_table(io.BytesIO(content))
    at = rng.randrange(table.num_columns)
    other = table.column(rng.randrange(table.num_columns))
    out = io.BytesIO()
    pq.write_table(table.set_column(at, table.column_names[at], other), out)
    return out.getvalue()


INNER: dict[str, Callable[[str, bytes, random.Random], bytes]] = {
    "json": _of_json,
    "jsonl": _jsonl,
    "safetensors": _safetensors,
    "npy": _npy,
    "npz": _zip,
    "xlsx": _zip,
    "gz": _gzip,
    "csv": _text,
    "txt": _text,
    "parquet": _parquet,
}
