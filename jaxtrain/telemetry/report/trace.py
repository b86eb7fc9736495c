"""The time of traced steps by the program's scopes: an XSpace file (*.xplane.pb) without jax.

The file is a protocol buffer (tsl/profiler/protobuf/xplane.proto): planes of lines of events, and
with the programs that ran (xla/service/hlo.proto), whose instructions carry the scope that they
were traced in. An operation names its instruction.
"""

import collections
import functools
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
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


class Operation(NamedTuple):
    """An operation that ran."""

    name: str
    scope: str  # in the program
    start: int  # [ps]
    end: int


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


def operations(path: pathlib.Path) -> list[Operation]:
    """List the operations of an XSpace file. Raises FileError as `read`."""
    try:
        return list(_operations(files.read(path, most=MAX_BYTES)))
    except DecodeError as error:
        raise files.FileError(
            f"{path} is no trace, or is cut short; make another with jaxtrain profile"
        ) from error


def of_folder(folder: pathlib.Path) -> Trace | None:
    """Return the trace of JAX's profiler below a folder, or None. Raises FileError."""
    traces = [path for path in folder.glob("plugins/profile/*/*.xplane.pb") if path.is_file()]
    if not traces:
        return None
    newest = max(traces)
    return read(files.inside(folder, str(newest.relative_to(folder))))


def _summary(ops: Sequence[Operation]) -> Trace | None:
    if not ops:
        return None
    begin = min(op.start for op in ops)
    total = max(max(op.end for op in ops) - begin, 1)
    times: collections.Counter[str] = collections.Counter()
    spent: collections.Counter[str] = collections.Counter()
    # a file may name one long scope in millions of events
    short = functools.cache(_short)
    for op in ops:
        scope = short(op.name, op.scope)
        times[scope] += 1
        spent[scope] += op.end - op.start
    busy = spent.total() or 1
    scopes = [(scope, time / busy, times[scope]) for scope, time in spent.most_common(15)]
    by_part = _times_of_parts(ops)
    parts = sorted(by_part, key=lambda part: (part == GAPS, -by_part[part]))
    shares = {part: by_part[part] / total for part in parts}
    return Trace(total * 1e-12, shares, scopes, len(ops))


def _times_of_parts(ops: Sequence[Operation]) -> dict[str, float]:
    """Return the time of each part [ps]. Operations that run side by side share their time."""
    part_of = functools.cache(_part)
    parts = [part_of(op.name, op.scope) for op in ops]
    starts = [(op.start, 1, i) for i, op in enumerate(ops)]
    ends = [(op.end, 0, i) for i, op in enumerate(ops)]
    times: dict[str, float] = collections.defaultdict(float)
    running: collections.Counter[str] = collections.Counter()
    n_running = 0
    now = min(starts)[0]
    for at, is_start, i in sorted(starts + ends):
        if at > now and not n_running:
            times[GAPS] += at - now
        elif at > now:
            for part, count in running.items():
                if count:
                    times[part] += (at - now) * count / n_running
        now = max(at, now)
        change = 1 if is_start else -1
        running[parts[i]] += change
        n_running += change
    return times


def _part(name: str, scope: str) -> str:
    if PARTS[0][1].search(name):
        return PARTS[0][0]
    return next((part for part, pattern in PARTS[1:] if pattern.search(scope)), OTHER)


def _short(name: str, scope: str) -> str:
    """Return a scope without JAX's decoration, as in ``jit(step)/loss/transpose(jvp(block))/dot``.

    Without a scope, the operation's name without the numbers at its end.
    """
    path = "/".join(part for part in scope.split("/")[1:] if part)
    if path:
        return path[:120]
    numbers = re.match(r"(?:\d++[._])++", name[::-1])
    return name[: -numbers.end()] if numbers else name


class Event(NamedTuple):
    """An event of a line, before its scope is known."""

    kind: str
    name: str  # of its instruction, else its kind
    program: Program
    start: int  # [ps]
    end: int


def _operations(space: bytes) -> Iterator[Operation]:
    """Yield operations, on CPUs those of events that name them."""
    planes = list(_message("XSpace").FromString(space).planes)
    programs = {title: scopes for plane in planes for title, scopes in _programs(plane)}
    devices = [plane for plane in planes if re.match(rb"/device:(GPU|TPU):", plane.name)]
    events: list[Event] = []
    for plane in devices or planes:
        events += _events(plane, is_device=bool(devices))
    names: dict[Program, set[str]] = collections.defaultdict(set)
    for event in events:
        names[event.program].add(event.name)
    scopes = {program: _scopes_of(programs, *program, seen) for program, seen in names.items()}
    for event in events:
        scope = scopes[event.program].get(event.name, "")
        yield Operation(event.kind, scope, event.start, event.end)


def _events(plane: Any, *, is_device: bool) -> Iterator[Event]:
    kinds = _titles(plane.event_metadata)
    stats = _titles(plane.stat_metadata)
    is_container = functools.cache(lambda name: bool(CONTAINER.match(name)))
    for line in _lines(plane) if is_device else plane.lines:
        for event in line.events:
            instruction, program = _instruction(event, stats)
            if not event.duration_ps or not (instruction or is_device):
                continue
            kind = kinds.get(event.metadata_id, "")
            name = instruction or kind
            if not is_container(name):
                start = 1000 * line.timestamp_ns + event.offset_ps
                yield Event(kind, name, program, start, start + event.duration_ps)


def _lines(plane: Any) -> list[Any]:
    """Return the lines of a device's operations: its streams, or those of XLA."""
    streams = [line for line in plane.lines if line.name.startswith(b"Stream")]
    return streams or [line for line in plane.lines if line.name == b"XLA Ops"]


def _scopes_of(
    programs: Mapping[str, dict[str, str]], number: int | None, module: str, seen: Set[str]
) -> Mapping[str, str]:
    """Return each instruction's scope in a program that a trace knows by number, name or not.

    ``programs``: title, such as ``jit_step(6)``, -> instruction -> scope. Several share names.
    ``seen``: instructions that ran. They decide, and the number only between equals: a program that
    a CPU read from the cache keeps its compilation's number, which is another program's here.
    """
    numbered = f"{module}({number})"
    if module:
        titles = [title for title in programs if title.rpartition("(")[0] == module]
    else:
        titles = [title for title in programs if title.endswith(numbered)]
    if not titles:
        return {name: scope for scopes in programs.values() for name, scope in scopes.items()}

    def similarity(title: str) -> tuple[int, bool]:
        return len(programs[title].keys() & seen), title == numbered

    return programs[max(titles, key=similarity)]


def _programs(plane: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (title, instruction -> scope) of the programs that a plane describes."""
    for entry in plane.event_metadata:
        for metadata in entry.value:
            for stat in metadata.stats:
                if stat.HasField("bytes_value"):
                    program = _message("HloProto").FromString(stat.bytes_value)
                    yield _text(metadata.name), _scopes(program)


def _scopes(program: Any) -> dict[str, str]:
    scopes = {}
    for module in program.hlo_module:
        for computation in module.computations:
            for instruction in computation.instructions:
                for metadata in instruction.metadata:
                    if metadata.op_name:
                        scopes[_text(instruction.name)] = _text(metadata.op_name)
    return scopes


def _instruction(event: Any, stats: Mapping[int, str]) -> tuple[str, Program]:
    """Return an event's instruction and program, as far as the event names them."""
    number = None
    values = {"hlo_op": "", "hlo_module": ""}
    for stat in event.stats:
        name = stats.get(stat.metadata_id)
        if name in values:
            is_text = stat.HasField("str_value")
            values[name] = _text(stat.str_value) if is_text else stats.get(stat.ref_value, "")
        elif name == "program_id":
            number = stat.uint64_value or stat.int64_value
    return values["hlo_op"], (number, values["hlo_module"])


def _titles(entries: Any) -> dict[int, str]:
    return {entry.key: _text(metadata.name) for entry in entries for metadata in entry.value}


@functools.cache
def _message(name: str) -> Any:
    """Return the class of one of `MESSAGES`."""
    file = descriptor_pb2.FileDescriptorProto(name="jaxtrain/trace.proto", package="jaxtrain")
    for name_of_message, fields in MESSAGES.items():
        message = file.message_type.add(name=name_of_message)
        for field, (number, kind) in fields.items():
            if isinstance(kind, str):
                message.field.add(
                    name=field,
                    number=number,
                    type="TYPE_MESSAGE",
                    type_name=kind,
                    label="LABEL_REPEATED",
                )
            else:
                scalar = "TYPE_UINT64" if kind is int else "TYPE_BYTES"
                message.field.add(name=field, number=number, type=scalar, label="LABEL_OPTIONAL")
    return message_factory.GetMessages([file])[f"jaxtrain.{name}"]


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
