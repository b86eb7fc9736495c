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

from google.protobuf import descriptor_pb2, message_factory
from google.protobuf.message import DecodeError

from loaders.io import files

MAX_BYTES = 1 << 30  # [bytes] of a file that is read
# Parts of a step: the first whose pattern is in the scope, or in an operation's name.
PARTS = (
    (
        "collectives",
        re.compile(r"all-?reduce|all-?gather|reduce-?scatter|all-?to-?all|collective|nccl", re.I),
    ),
    ("optimizer", re.compile(r"/update(/|$)")),
    ("backward", re.compile(r"transpose\(")),
    ("forward", re.compile(r"/loss_and_grad(/|$)|jvp\(")),
    ("guard and metrics", re.compile(r"/guard(/|$)|norm")),
)
# What is read of an XSpace: message -> field -> its number, and int, bytes, or the messages that it
# holds, of which there may be several.
MESSAGES: dict[str, dict[str, tuple[int, type | str]]] = {
    "XSpace": {"planes": (1, "XPlane")},
    "XPlane": {
        "name": (2, bytes),
        "lines": (3, "XLine"),
        "event_metadata": (4, "Entry"),
        "stat_metadata": (5, "Entry"),
    },
    "XLine": {"name": (2, bytes), "timestamp_ns": (3, int), "events": (4, "XEvent")},
    "XEvent": {
        "metadata_id": (1, int),
        "offset_ps": (2, int),
        "duration_ps": (3, int),
        "stats": (4, "XStat"),
    },
    "XStat": {
        "metadata_id": (1, int),
        "uint64_value": (3, int),
        "int64_value": (4, int),
        "str_value": (5, bytes),
        "bytes_value": (6, bytes),
        "ref_value": (7, int),
    },
    "Entry": {"key": (1, int), "value": (2, "Metadata")},  # of a map
    # of events; those of stats have a name alone
    "Metadata": {"name": (2, bytes), "stats": (5, "XStat")},
    "HloProto": {"hlo_module": (1, "HloModuleProto")},
    "HloModuleProto": {"computations": (3, "HloComputationProto")},
    "HloComputationProto": {"instructions": (2, "HloInstructionProto")},
    "HloInstructionProto": {"name": (1, bytes), "metadata": (7, "OpMetadata")},
    "OpMetadata": {"op_name": (2, bytes)},
}
OTHER, GAPS = "other operations", "gaps"
Program = tuple[int | None, str]  # its number and name, as far as a trace has them
# their time is their parts'
CONTAINER = re.compile(r"^(while|conditional|call|async-start|async-done)([.\-_]\d+)*$")


class Trace(NamedTuple):
    """A trace of some steps."""

    seconds: float  # from the first operation to the last
    parts: dict[str, float]  # part of a step -> share of the time. With the gaps they add up to 1
    # (scope or operation, share of the operations' time, times), the most first
    scopes: list[tuple[str, float, int]]
    operations: int


def read(path: pathlib.Path) -> Trace | None:
    """Read an XSpace file, or return None if it names no operation. Raises FileError."""
    return _summary(operations(path))


def operations(path: pathlib.Path) -> list[tuple[str, str, int, int]]:
    """(name, scope, start, end) [ps] of an XSpace file's operations. Raises FileError as `read`."""
    try:
        return list(_operations(files.read(path, most=MAX_BYTES)))
    except DecodeError as error:
        raise files.FileError(
            f"{path} is no trace, or is cut short; make another with jaxtrain profile"
        ) from error


def of_folder(folder: pathlib.Path) -> Trace | None:
    """Return the trace of JAX's profiler below a folder, or None. Raises FileError."""
    found = sorted(path for path in folder.glob("plugins/profile/*/*.xplane.pb") if path.is_file())
    return read(files.inside(folder, str(found[-1].relative_to(folder)))) if found else None


def _summary(found: list[tuple[str, str, int, int]]) -> Trace | None:
    """Shares of the time by parts. Operations that run side by side share their time."""
    if not found:
        return None
    edges = sorted(
        [(start, 1, i) for i, (_, _, start, _) in enumerate(found)]
        + [(end, 0, i) for i, (*_, end) in enumerate(found)]
    )
    begin, end = edges[0][0], edges[-1][0]
    whole = max(end - begin, 1)
    # a file may name one long scope in millions of events
    part, short = functools.cache(_part), functools.cache(_short)
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
    shares = {
        part: parts[part] / whole
        for part in sorted(parts, key=lambda part: (part == GAPS, -parts[part]))
    }
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


def _operations(space: bytes) -> Iterator[tuple[str, str, int, int]]:
    """(name, scope, start, end) [ps] of operations, on CPUs of events that name them."""
    planes = list(_message("XSpace").FromString(space).planes)
    programs = {title: scopes for plane in planes for title, scopes in _programs(plane)}
    is_container = functools.cache(lambda name: bool(CONTAINER.match(name)))
    devices = [plane for plane in planes if re.match(rb"/device:(GPU|TPU):", plane.name)]
    found: list[tuple[str, str, Program, int, int]] = []
    names: dict[Program, set[str]] = collections.defaultdict(set)
    for plane in devices or planes:
        kinds, stats = _titles(plane.event_metadata), _titles(plane.stat_metadata)
        lines = plane.lines
        if devices:
            lines = [x for x in lines if x.name.startswith(b"Stream")] or [
                x for x in lines if x.name == b"XLA Ops"
            ]
        for line in lines:
            for event in line.events:
                op, program = _instruction(event, stats)
                kind, start = (
                    kinds.get(event.metadata_id, ""),
                    1000 * line.timestamp_ns + event.offset_ps,
                )
                name = op or kind
                if event.duration_ps and (op or devices) and not is_container(name):
                    found.append((kind, name, program, start, start + event.duration_ps))
                    names[program].add(name)
    scopes = {program: _scopes_of(programs, *program, seen) for program, seen in names.items()}
    for kind, name, program, start, end in found:
        yield kind, scopes[program].get(name, ""), start, end


def _scopes_of(
    programs: Mapping[str, dict[str, str]], number: int | None, module: str, seen: Set[str]
) -> Mapping[str, str]:
    """Return each instruction's scope in a program that a trace knows by number, name or not.

    ``programs``: title, such as ``jit_step(6)``, -> instruction -> scope. Several share names.
    ``seen``: instructions that ran. They decide, and the number only between equals: a program that
    a CPU read from the cache keeps its compilation's number, which is another program's here.
    """
    numbered = f"{module}({number})"
    titles = [
        title
        for title in programs
        if (title.rpartition("(")[0] == module if module else title.endswith(numbered))
    ]
    if titles:
        return programs[
            max(titles, key=lambda title: (len(programs[title].keys() & seen), title == numbered))
        ]
    return {name: scope for title in programs for name, scope in programs[title].items()}


def _programs(plane: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (title, instruction -> scope) of the programs that a plane describes."""
    for entry in plane.event_metadata:
        for about in entry.value:
            for stat in about.stats:
                if stat.HasField("bytes_value"):
                    program = _message("HloProto").FromString(stat.bytes_value)
                    computations = (
                        each for module in program.hlo_module for each in module.computations
                    )
                    every = (
                        each for computation in computations for each in computation.instructions
                    )
                    yield (
                        _text(about.name),
                        {
                            _text(i.name): _text(m.op_name)
                            for i in every
                            for m in i.metadata
                            if m.op_name
                        },
                    )


def _instruction(event: Any, stats: Mapping[int, str]) -> tuple[str, Program]:
    """Return an event's instruction and program, as far as the event names them."""
    number, named = None, {"hlo_op": "", "hlo_module": ""}
    for stat in event.stats:
        if (name := stats.get(stat.metadata_id)) in named:
            named[name] = (
                _text(stat.str_value)
                if stat.HasField("str_value")
                else stats.get(stat.ref_value, "")
            )
        elif name == "program_id":
            number = stat.uint64_value or stat.int64_value
    return named["hlo_op"], (number, named["hlo_module"])


def _titles(entries: Any) -> dict[int, str]:
    return {entry.key: _text(about.name) for entry in entries for about in entry.value}


@functools.cache
def _message(name: str) -> Any:
    """Return the class of one of `MESSAGES`."""
    file = descriptor_pb2.FileDescriptorProto(name="jaxtrain/trace.proto", package="jaxtrain")
    for message, fields in MESSAGES.items():
        made = file.message_type.add(name=message)
        for field, (number, kind) in fields.items():
            if isinstance(kind, str):
                made.field.add(
                    name=field,
                    number=number,
                    type="TYPE_MESSAGE",
                    type_name=kind,
                    label="LABEL_REPEATED",
                )
            else:
                of = "TYPE_UINT64" if kind is int else "TYPE_BYTES"
                made.field.add(name=field, number=number, type=of, label="LABEL_OPTIONAL")
    return message_factory.GetMessages([file])[f"jaxtrain.{name}"]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
