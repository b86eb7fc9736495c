"""The time of traced steps by the program's scopes: an XSpace file (*.xplane.pb) without jax.

The file is a protocol buffer (tsl/profiler/protobuf/xplane.proto): planes of lines of events, and
with the programs that ran (xla/service/hlo.proto), whose instructions carry the scope that they
were traced in. An operation names its instruction.
"""

import collections
import functools
import pathlib
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, NamedTuple

from loaders.io import files

MAX_BYTES = 1 << 30  # [bytes] of a file that is read
# Parts of a step: the first whose pattern is in the scope, or in an operation's name.
PARTS = (
    ("collectives", re.compile(r"all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective|nccl", re.I)),
    ("optimizer", re.compile(r"/update(/|$)")),
    ("backward", re.compile(r"transpose\(")),
    ("forward", re.compile(r"/loss_and_grad(/|$)|jvp\(")),
    ("guard and metrics", re.compile(r"/guard(/|$)|norm")),
)
OTHER, GAPS = "other operations", "gaps"
Program = tuple[int | None, str]  # its number and name, as far as a trace has them
CONTAINER = re.compile(r"^(while|conditional|call|async-start|async-done)([.\-_]\d+)*$")  # their time is their parts'


class Trace(NamedTuple):
    """A trace of some steps."""

    seconds: float  # from the first operation to the last
    parts: dict[str, float]  # part of a step -> share of the time. With the gaps they add up to 1
    scopes: list[tuple[str, float, int]]  # (scope or operation, share of the operations' time, times), the most first
    operations: int


def read(path: pathlib.Path) -> Trace | None:
    """Read an XSpace file, or return None if it names no operation. Raises FileError."""
    return _summary(operations(path))


def operations(path: pathlib.Path) -> list[tuple[str, str, int, int]]:
    """(name, scope, start, end) [ps] of an XSpace file's operations. Raises FileError as `read`."""
    try:
        return list(_operations(memoryview(files.read(path, most=MAX_BYTES))))
    except (IndexError, ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, files.FileError):
            raise
        raise files.FileError(f"{path} is no trace, or is cut short; make another with jaxtrain profile") from error


def of_folder(folder: pathlib.Path) -> Trace | None:
    """Return the trace of JAX's profiler below a folder, or None. Raises FileError."""
    found = sorted(path for path in folder.glob("plugins/profile/*/*.xplane.pb") if path.is_file())
    return read(files.inside(folder, str(found[-1].relative_to(folder)))) if found else None


def _summary(found: list[tuple[str, str, int, int]]) -> Trace | None:
    """Shares of the time by parts. Operations that run side by side share their time."""
    if not found:
        return None
    edges = sorted(
        [(start, 1, i) for i, (_, _, start, _) in enumerate(found)] + [(end, 0, i) for i, (*_, end) in enumerate(found)]
    )
    begin, end = edges[0][0], edges[-1][0]
    whole = max(end - begin, 1)
    part, short = functools.cache(_part), functools.cache(_short)  # a file may name one long scope in millions of events
    of = [part(name, scope) for name, scope, _, _ in found]
    parts: dict[str, float] = collections.defaultdict(float)
    running: collections.Counter[str] = collections.Counter()
    n, last = 0, begin
    for at, starts, i in edges:
        if at > last:
            if not n:
                parts[GAPS] += at - last
            for each, count in running.items() if n else ():
                if count:
                    parts[each] += (at - last) * count / n
            last = at
        running[of[i]] += 1 if starts else -1
        n += 1 if starts else -1
    times: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    for name, scope, start, stop in found:
        key = short(name, scope)
        times[key] += 1
        spent[key] += stop - start
    busy = spent.total() or 1
    shares = {part: parts[part] / whole for part in sorted(parts, key=lambda part: (part == GAPS, -parts[part]))}
    scopes = [(name, time / busy, times[name]) for name, time in spent.most_common(15)]
    return Trace(whole * 1e-12, shares, scopes, len(found))


def _part(name: str, scope: str) -> str:
    if PARTS[0][1].search(name):
        return PARTS[0][0]
    return next((part for part, pattern in PARTS[1:] if pattern.search(scope)), OTHER)


def _short(name: str, scope: str) -> str:
    """Return a scope without JAX's decoration, as in ``jit(step)/loss/transpose(jvp(block))/dot``.

    Without a scope, the operation's name without the numbers at its end.
    """
    if path := "/".join(part for part in scope.split("/")[1:] if part):
        return path[:120]
    numbers = re.match(r"(?:\d++[._])++", name[::-1])
    return name[: len(name) - (numbers.end() if numbers else 0)]


def _operations(space: memoryview) -> Iterator[tuple[str, str, int, int]]:
    """(name, scope, start, end) [ps] of operations, on CPUs of events that name them."""
    planes = [_plane(value) for value in _all(space, 1)]
    programs = {title: scopes for plane in planes for title, scopes in plane["programs"].items()}
    is_container = functools.cache(lambda name: bool(CONTAINER.match(name)))
    devices = [plane for plane in planes if re.match(r"/device:(GPU|TPU):", plane["name"])]
    found: list[tuple[str, str, Program, int, int]] = []
    names: dict[Program, set[str]] = collections.defaultdict(set)
    for plane in devices or planes:
        lines = plane["lines"]
        if devices:
            lines = [x for x in lines if x[0].startswith("Stream")] or [x for x in lines if x[0] == "XLA Ops"]
        for _, begin, events in lines:
            for event in events:
                kind, offset, length, op, number, module = _event(event, plane)
                name = op or kind
                if length and (op or devices) and not is_container(name):
                    found.append((kind, name, (number, module), begin + offset, begin + offset + length))
                    names[number, module].add(name)
    scopes = {program: _scopes_of(programs, *program, seen) for program, seen in names.items()}
    for kind, name, program, start, end in found:
        yield kind, scopes[program].get(name, ""), start, end


def _scopes_of(programs: Mapping[str, dict[str, str]], number: int | None, module: str, seen: Set[str]) -> Mapping[str, str]:
    """Return each instruction's scope in a program that a trace knows by number, name or not.

    ``programs``: title, such as ``jit_step(6)``, -> instruction -> scope. Several share names.
    ``seen``: instructions that ran. They decide, and the number only between equals: a program that
    a CPU read from the cache keeps its compilation's number, which is another program's here.
    """
    numbered = f"{module}({number})"
    titles = [title for title in programs if (title.rpartition("(")[0] == module if module else title.endswith(numbered))]
    if titles:
        return programs[max(titles, key=lambda title: (len(programs[title].keys() & seen), title == numbered))]
    return {name: scope for title in programs for name, scope in programs[title].items()}


def _plane(data: memoryview) -> dict[str, Any]:
    """XPlane: name = 2, lines = 3, event_metadata = 4, stat_metadata = 5."""
    plane: dict[str, Any] = {"name": "", "lines": [], "kinds": {}, "stats": {}, "programs": {}}
    for number, value in _fields(data):
        if number == 2:
            plane["name"] = _text(value)
        elif number == 3:  # XLine: name = 2, timestamp_ns = 3, events = 4
            fields = list(_fields(value))
            about = dict(fields)
            plane["lines"].append((_text(about.get(2, b"")), 1000 * about.get(3, 0), [v for n, v in fields if n == 4]))
        elif number in (4, 5):  # maps: key = 1, value = 2, which has id = 1, name = 2, and stats = 5
            entry = dict(_fields(value))
            fields = list(_fields(entry[2]))
            title = _text(dict(fields).get(2, b""))
            plane["kinds" if number == 4 else "stats"][entry.get(1, 0)] = title
            stats = [v for n, v in fields if n == 5] if number == 4 else []
            for stat in stats:
                if isinstance(program := dict(_fields(stat)).get(6), memoryview):  # bytes_value: an HloProto
                    plane["programs"][title] = _scopes(program)
    return plane


def _event(data: memoryview, plane: dict[str, Any]) -> tuple[str, int, int, str, int | None, str]:
    """(kind, offset, length, instruction, program's number, program's name).

    XEvent: metadata_id = 1, offset_ps = 2, duration_ps = 3, stats = 4 (metadata_id = 1,
    uint64_value = 3, int64_value = 4, str_value = 5, ref_value = 7).
    """
    kind = offset = length = 0
    program = None
    named = {"hlo_op": "", "hlo_module": ""}
    for number, value in _fields(data):
        if number == 1:
            kind = value
        elif number == 2:
            offset = value
        elif number == 3:
            length = value
        elif number == 4:
            stat = dict(_fields(value))
            if (name := plane["stats"].get(stat.get(1))) in named:
                named[name] = _text(stat[5]) if 5 in stat else plane["stats"].get(stat.get(7), "")
            elif name == "program_id":
                program = stat.get(3, stat.get(4))
    return plane["kinds"].get(kind, ""), offset, length, named["hlo_op"], program, named["hlo_module"]


def _scopes(program: memoryview) -> dict[str, str]:
    """Instruction -> scope, of HloProto: hlo_module = 1, computations = 3, instructions = 2."""
    found = {}
    for module in _all(program, 1):
        for computation in _all(module, 3):
            for instruction in _all(computation, 2):
                fields = dict(_fields(instruction))  # name = 1, metadata = 7, an OpMetadata: op_name = 2
                scope = dict(_fields(fields[7])).get(2) if 7 in fields else None
                if 1 in fields and scope is not None:
                    found[_text(fields[1])] = _text(scope)
    return found


def _all(data: memoryview, field: int) -> list[Any]:
    return [value for number, value in _fields(data) if number == field]


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield (number, value) of a message's fields: an integer, or the bytes of a field."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 2:
            length, at = _varint(data, at)
            if at + length > end:
                raise ValueError("a field is longer than its message")
            yield number, data[at : at + length]
            at += length
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has too many bytes")


def _text(value: Any) -> str:
    return bytes(value).decode(errors="replace")
