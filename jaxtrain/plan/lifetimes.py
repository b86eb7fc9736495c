"""Which results of a graph become arrays in memory, and the moment at which most of them live.

XLA fuses element-wise arithmetic, broadcasts and slices into whoever reads them, and keeps the results of products, reductions
and loops, what crosses a loop's border, and what is too dear to compute for each reader again (`_decide`). Arrays live in
program order (`_ordered`), a result taking its place over from an operand that is read for the last time, as donated arguments
are (`fullest`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxtrain.plan.graph import Graph, Moved, Node, Value, is_half, pinned_axes, width

STORED = -1  # among the readers that a value is computed inside of: one that needs an array
ARITHMETIC = {"add", "add_any", "sub", "mul", "max", "min", "integer_pow", "square", "select_n"}


class Peak(NamedTuple):
    """The fullest moment of a step."""

    bytes: int  # besides the arguments
    where: str  # the instruction
    largest: list[tuple[int, str]]  # (bytes, what) of the largest arrays that live then
    moved: Moved


class Read(NamedTuple):
    """An instruction that makes arrays, and the arrays that it reads."""

    node: Node
    arrays: dict[int, Value]  # by id


def fullest(
    graph: Graph,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    *,
    reusable: set[int],
    streamed: Sequence[Value] = (),
    replaced: Sequence[tuple[Value, Value]] = (),
) -> Peak:
    """The peak of bytes besides the inputs.

    Args:
      reusable: ids of the inputs whose places results may take.
      streamed: results that are written into arrays that the caller counts.
      replaced: inputs that are donated, and the results that take their places.
    """
    for place, node in enumerate(graph.nodes):
        node.place = place
    ends = {id(v) for v in outputs}
    _decide(graph, ends, {id(v) for v in streamed})
    ordered = _breadth_first(graph) if graph.compiler.breadth_first and graph.is_body else _ordered(graph, ends)
    steps = [Read(node, {id(s): s for v in node.inputs for s in _sources(v)}) for node in ordered if node.kept]
    last = _last_reads(steps, outputs, len(graph.nodes))
    elsewhere = {id(v) for v in streamed}  # results that take no memory of their own
    live: dict[int, int] = {}
    if graph.compiler.copies:
        live, placed = _copied(graph, steps, last, replaced)
        elsewhere |= placed
    free_inputs = {id(v): graph.size(v) for v in inputs if id(v) in reusable and id(v) not in live}
    return _sweep(graph, steps, last, live, free_inputs, elsewhere, ends)


def _sources(value: Value) -> list[Value]:
    """The arrays in memory that a value is computed from, wherever it is read."""
    sources, todo, seen = [], [value], set()
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if v.node is None or v.node.kept:
            sources.append(v)
        else:
            todo += v.node.inputs
    return sources


def _awaited(node: Node) -> list[Value]:
    """The arrays in memory that come first because of barriers on the way to what a node reads."""
    lists: dict[int, list[Value]] = {}
    todo, seen = list(node.inputs), set()
    while todo:
        v = todo.pop()
        if id(v) in seen or v.node is None or v.node.kept:
            continue
        seen.add(id(v))
        if v.node.waits:
            lists[id(v.node.waits)] = v.node.waits
        todo += v.node.inputs
    return [s for values in lists.values() for v in values for s in _sources(v)]


def _last_reads(steps: Sequence[Read], outputs: Sequence[Value], end: int) -> dict[int, float]:
    """Array -> the place of the instruction that reads it last."""
    last: dict[int, float] = {}
    for node, read in steps:
        for key in read:
            last[key] = node.place
    for v in outputs:
        for s in _sources(v):
            last[id(s)] = end
    return last


def _sweep(
    graph: Graph,
    steps: Sequence[Read],
    last: Mapping[int, float],
    live: dict[int, int],
    free_inputs: dict[int, int],
    elsewhere: set[int],
    ends: set[int],
) -> Peak:
    """Goes through the instructions in order, with the arrays (id -> bytes) that live."""
    values = {key: value for _, read in steps for key, value in read.items()}
    best, where, snapshot = 0, "", []
    summed: set[int] = set()  # arrays that sums over devices, which go on side by side, have yet to read
    for node, read in steps:
        if not node.apart:
            for k in summed:
                live.pop(k, None)
            summed.clear()
        made = [v for v in node.outputs if id(v) not in elsewhere and (v.readers or id(v) in ends)]
        dying = {k: live[k] for k in read if k in live and last[k] == node.place}
        dying |= {k: free_inputs[k] for k in read if k in free_inputs and last.get(k) == node.place}
        now = sum(live.values()) + _fresh(graph, node, made, dying) + node.inner
        if now > best:
            best, where = now, node.name
            makers = {k: values[k].node for k in live if k in values}
            snapshot = [(n, maker.name if (maker := makers.get(k)) else "") for k, n in live.items()]
            snapshot += [(graph.size(v), node.name) for v in made]
            snapshot += [(node.inner, f"inside {node.name}")] * bool(node.inner)
        if node.apart:
            summed |= dying.keys()
        else:
            for k in dying:
                live.pop(k, None)
        taken = set()
        for v in made:
            size = graph.size(v)
            reused = next((k for k in dying if k in free_inputs and k not in taken and free_inputs[k] == size), None)
            if reused is not None:
                taken.add(reused)
                free_inputs.pop(reused)
                if id(v) in ends:
                    continue
            values[id(v)] = v
            if last.get(id(v), -1) > node.place:
                live[id(v)] = size
    return Peak(best, where, sorted(snapshot, reverse=True)[:12], graph.moved())


def _fresh(graph: Graph, node: Node, made: Sequence[Value], dying: Mapping[int, int]) -> int:
    """Bytes of an instruction's results that do not lie where an operand lay that is read for the last time."""
    if node.kind in ("cheap", "dear", "other") and node.name != "turned" and not node.inner and not node.apart:
        same = set(dying)
        if graph.compiler.merges and node.kind in ("cheap", "dear"):
            same = _element_by_element(node)
        pool = sorted(((k, n) for k, n in dying.items() if k in same), key=lambda item: item[1])
        fresh = 0
        for v in made:
            match = next((k for k, n in pool if n == graph.size(v)), None)
            if match is None:
                fresh += graph.size(v)
            else:
                pool = [(k, n) for k, n in pool if k != match]
        return fresh
    fresh = sum(graph.size(v) for v in made)
    if node.kind == "product" and not graph.compiler.halves:
        fresh += sum(2 * graph.size(v) for v in node.outputs if is_half(v))
    if node.state is not None:  # a loop's state changes in place; the rows that it reads and writes lie beside each other
        spare = dict(dying)
        for before, after in node.state:
            places = [id(s) for s in _sources(before) if spare.get(id(s)) == graph.size(after)]
            if places and any(v is after for v in made):
                fresh -= spare.pop(places[0])
    elif node.inner:
        spare = dict(dying)
        for v in made:
            match = next((k for k, n in spare.items() if n == graph.size(v)), None)
            if match is not None:
                fresh -= spare.pop(match)
    return fresh


def _element_by_element(node: Node) -> set[int]:
    """Arrays of the shape of arithmetic's result that are read for it as they lie, through no reshape or transpose."""
    shape, todo = node.outputs[0].shape, list(node.inputs)
    found: set[int] = set()
    if node.name.split()[0] in ("reshape", "transpose", "rev"):
        return found
    while todo:
        value = todo.pop()
        if value.shape != shape or id(value) in found:
            continue
        found.add(id(value))
        if value.node and not value.node.kept and value.node.name.split()[0] not in ("reshape", "transpose", "rev"):
            todo += value.node.inputs
    return found


def _copied(
    graph: Graph, steps: Sequence[Read], last: Mapping[int, float], replaced: Sequence[tuple[Value, Value]]
) -> tuple[dict[int, int], set[int]]:
    """Of donated arguments those that are copied, with their bytes, and all values that lie in donated arguments' places.

    XLA for CPUs decides that before it orders the instructions: an argument is copied unless whatever reads it comes before
    what writes its place in every order (a moment is read for the parameters too, and these for their norm, so both are).
    Until the result is written, its place is then free for other arrays, of which the largest choose first.
    """
    above: dict[int, int] = {}  # kept node -> itself and all that it waits for, as bits
    readers: dict[int, list[Node]] = {}
    for i, (node, read) in enumerate(steps):
        above[id(node)] = 1 << i
        for key, value in read.items():
            above[id(node)] |= above.get(id(value.node), 0)
            readers.setdefault(key, []).append(node)
    copies: dict[int, int] = {}
    placed: set[int] = set()
    places: list[tuple[int, list[tuple[float, float]]]] = []  # (bytes, when they are taken)
    for old, result in replaced:
        [new] = _sources(result)
        if new.node is None:  # an argument that is handed on
            continue
        placed.add(id(new))
        own = readers.get(id(old), [])
        if any(above[id(node)] & ~above[id(new.node)] for node in own):
            copies[id(old)] = graph.size(old)
            own = []
        read_until = max((node.place for node in own), default=-1)
        places.append((graph.size(old), [(-1, read_until), (new.node.place, len(graph.nodes))]))
    places.sort(key=lambda place: place[0])
    others = [v for node, _ in steps for v in node.outputs if id(v) in last and id(v) not in placed]
    for value in sorted(others, key=graph.size, reverse=True):
        # Only arithmetic can write where an operand lay.
        assert value.node is not None  # it is an output of one
        begin = value.node.place - (0 if value.node.kind in ("cheap", "dear") else 0.5)
        end = last[id(value)]
        for size, taken in places:
            if size >= graph.size(value) and all(end <= since or until <= begin for since, until in taken):
                taken.append((begin, end))
                placed.add(id(value))
                break
    return copies, placed


def _ordered(graph: Graph, ends: set[int]) -> list[Node]:
    """The instructions in the order in which arrays are made.

    The program's order, but sums, and results that are arithmetic, at once: then what they are made of can go. Where the
    compiler puts first what is ready first, so are slices: of the rows that a loop kept, what is left over to be read after
    the next loop does not keep all of them. And so is what it computes again, unless a checkpoint's barrier holds that back.
    A sum of such a result is computed along with it, from what the result is computed from; and results of one large array
    (a parameter and its moments, of a gradient) are computed together, when all they need is there.
    """
    groups = _groups(graph, ends)
    together: dict[tuple[int, int], float] = {}
    for _ in range(2):
        when: dict[int, float] = {}
        early: dict[int, float] = {}
        places = []
        for place, node in enumerate(graph.nodes):
            time: float = place
            if node.kept and not node.inner:
                read = [s for v in node.inputs for s in _sources(v)]
                if graph.compiler.breadth_first and (node.name == "slice" or node.again and not graph.compiler.checkpoints):
                    time = max((when.get(id(s), -1) for s in read), default=-1) + 0.25
                elif node.kind == "reduce":
                    time = max((early.get(id(s), when.get(id(s), -1)) for s in read), default=-1) + 0.25
                elif node.kind in ("cheap", "dear") and all(id(v) in ends for v in node.outputs):
                    group = groups[id(node)]
                    before = max((when.get(id(s), -1) for s in (*read, *_awaited(node))), default=-1)
                    before = together[group] = max(before, together.get(group, -1))
                    time = before + 0.5
                    early |= {id(v): before for v in node.outputs}
            when |= {id(v): time for v in node.outputs}
            places.append(time)
    for node, time in zip(graph.nodes, places, strict=True):
        node.place = time
    ordered = sorted(graph.nodes, key=lambda node: node.place)
    for place, node in enumerate(ordered):
        node.place = place
    return ordered


def _groups(graph: Graph, ends: set[int]) -> dict[int, tuple[int, int]]:
    """Results that are arithmetic, and which of them are computed together: of one array, none waiting for another of them."""
    above: dict[int, int] = {}  # kept node -> the results, as bits, that it waits for, and itself
    groups: dict[int, tuple[int, int]] = {}
    members: dict[int, tuple[int, int]] = {}  # array -> the number of its group, and the results in it
    for node in graph.nodes:
        if not node.kept:
            continue
        read = [s for v in node.inputs for s in _sources(v)]
        waits = 0
        for s in read:
            waits |= above.get(id(s.node), 0)
        if not node.inner and node.kind in ("cheap", "dear") and all(id(v) in ends for v in node.outputs):
            source = id(max((s for s in read if s.node), key=graph.size, default=node))
            number, others = members.get(source, (0, 0))
            if waits & others:
                number, others = number + 1, 0
            groups[id(node)], own = (source, number), 1 << len(groups)
            members[source] = number, others | own
            waits |= own
        above[id(node)] = waits
    return groups


def _breadth_first(graph: Graph) -> list[Node]:
    """The order of a loop's body where the compiler puts first what is ready first, so that instructions can go side by side.

    All rows that a loop reads are then there from its first instruction on, however late they are read.
    """
    kept = [node for node in graph.nodes if node.kept]
    readers: dict[int, list[Node]] = {}
    missing: dict[int, int] = {}
    for node in kept:
        read = [s for v in node.inputs for s in _sources(v)]
        makers = {id(s.node) for s in (*read, *_awaited(node)) if s.node is not None}
        missing[id(node)] = len(makers)
        for key in makers:
            readers.setdefault(key, []).append(node)
    ordered = [node for node in kept if not missing[id(node)]]
    for node in ordered:
        for reader in reversed(readers.get(id(node), [])):
            missing[id(reader)] -= 1
            if not missing[id(reader)]:
                ordered.append(reader)
    assert len(ordered) == len(kept)
    for place, node in enumerate(ordered):
        node.place = place
    return ordered


# --- what becomes an array -----------------------------------------------------------------------------------------------


def _decide(graph: Graph, ends: set[int], streamed: set[int]) -> None:
    """Marks the nodes whose results become arrays (``kept``), from the last to the first."""
    updates: set[int] = set()  # kept nodes: results that are arithmetic
    sums: set[int] = set()
    reach: dict[int, frozenset[int]] = {}  # node -> the kept nodes that its result is computed inside of
    awaited: set[int] = set()  # nodes that results which are arithmetic wait for
    for node in reversed(graph.nodes):
        at_end = any(id(v) in ends and id(v) not in streamed for v in node.outputs)
        stream = any(id(v) in streamed for v in node.outputs)
        inside, stored = _computed_inside(graph, node, reach)
        stored |= at_end
        if any(id(r) in awaited or id(r) in updates for v in node.outputs for r in v.readers):
            awaited.add(id(node))
        if stream:
            inside.add(-id(node))
        if node.kind == "alias":  # one array under two names: stored where its source is
            reach[id(node)] = frozenset({STORED, *inside} if stored or node.holds else inside)
            continue
        stored |= STORED in inside
        inside.discard(STORED)
        if not stored and inside & updates and inside <= updates | sums - awaited and not _narrows(graph, node):
            # Parameters and moments come of one fusion, and sums of what they are made of have it inside.
            inside = {min(inside)}
        if node.kind in ("other", "product", "reduce") or _is_running_sum(node):
            node.kept = any(v.readers for v in node.outputs) or at_end or stream
            if node.kind == "product" and not at_end and _rounds(graph, node):
                node.outputs[0].inline = _becomes_another(node)
        elif node.free:  # constants and counters are made wherever they are read, in loops too
            node.kept = at_end
        else:
            stored |= node.name == "row" and bool(inside & sums)  # libraries that sum read arrays
            node.kept = stored or len(inside) > 1 and _is_kept_for_several(graph, node, bool(inside & sums))
        if not node.kept:
            reach[id(node)] = frozenset(inside)
        elif node.kind == "reduce":
            sums.add(id(node))
        elif at_end and node.kind in ("cheap", "dear"):
            updates.add(id(node))


def _computed_inside(graph: Graph, node: Node, reach: Mapping[int, frozenset[int]]) -> tuple[set[int], bool]:
    """The kept nodes that a node's result could be computed inside of, and whether some reader needs an array."""
    inside: set[int] = set()
    stored = False
    for r in {id(r): r for v in node.outputs for r in v.readers}.values():
        if not r.kept:
            inside |= reach[id(r)]
        elif r.kind in ("cheap", "dear", "reduce") or _reads_inside(graph, r):
            inside.add(id(r))
        else:
            stored = True
    return inside, stored


def _reads_inside(graph: Graph, node: Node) -> bool:
    """Whether a product computes its operands as it reads them."""
    if node.kind != "product" or not graph.compiler.into_products or node.ring:
        return False
    pinned = pinned_axes(node.outputs[0]) if node.summed else None
    return not node.summed or pinned is not None and not node.summed & pinned


def _is_kept_for_several(graph: Graph, node: Node, summed: bool) -> bool:
    """Whether a result that several read, of which one may be a sum (``summed``), is worth an array."""
    name = node.name.split()[0]
    if name == "logistic" and (graph.compiler.recomputes_more or graph.compiler.recomputes and node.again):
        return False
    if name == "div" and graph.compiler.recomputes_more and _is_by_a_scalar(node):
        return False
    if _narrows(graph, node) or name == "mul" and node.again and node.costly and _is_for_products(graph, node):
        return True
    if node.name == "row":  # rounded from what the loop keeps in float32
        return is_half(node.outputs[0])
    if name in ARITHMETIC and not graph.compiler.recomputes:
        return summed or not _is_of_one_array(node)
    return node.kind == "dear"


def _narrows(graph: Graph, node: Node) -> bool:
    """Whether it rounds what was dear to compute, or all that becomes of a product: of the two the narrower is kept."""
    if not node.name.startswith("convert_element_type") or not width(node.outputs[0]) < width(node.inputs[0]):
        return False
    return len(node.inputs[0].readers) == 1 and (node.costly or _rounds_a_product(graph, node))


def _rounds_a_product(graph: Graph, node: Node) -> bool:
    value = node.inputs[0]
    while len(value.readers) == 1 and value.node and (value.node.kind == "alias" or value.node.name.startswith("transpose ")):
        value = value.node.inputs[0]
    return len(value.readers) == 1 and value.node is not None and value.node.kind == "product" and _rounds(graph, value.node)


def _rounds(graph: Graph, product: Node) -> bool:
    """Whether a product can write its result as a narrower type."""
    return graph.compiler.halves and not (graph.compiler.apart and not all(is_half(v) for v in product.inputs))


def _is_of_one_array(node: Node) -> bool:
    """Whether it is made of one array of its size, and of scalars, counters and what is broadcast: XLA duplicates that.

    On CPUs the choice between the two forms of erfc was seen duplicated, too, each time from its exponential and quotients.
    """
    if node.name.startswith("select_n "):
        return True
    whole = [v for v in node.inputs if v.shape == node.outputs[0].shape and not v.constant and not (v.node and v.node.free)]
    return len([v for v in whole if not (v.node and v.node.name.startswith(("broadcast_in_dim ", "iota ")))]) <= 1


def _is_for_products(graph: Graph, node: Node) -> bool:
    """Whether only products read it, of which each would compute it anew: where sigmoids are dear, that is an array instead."""
    readers = [r for v in node.outputs for r in v.readers]
    while len(readers) == 1 and readers[0].kind == "alias":
        readers = [r for v in readers[0].outputs for r in v.readers]
    return graph.compiler.recomputes and not graph.compiler.recomputes_more and all(r.kind == "product" for r in readers)


def _is_by_a_scalar(division: Node) -> bool:
    value = division.inputs[1]
    while value.node and (value.node.kind == "alias" or value.node.name.startswith("broadcast_in_dim ")):
        value = value.node.inputs[0]
    return not value.shape


def _becomes_another(product: Node) -> bool:
    """Whether all that becomes of a product is arithmetic whose result is an array: that is what is written."""
    readers = product.outputs[0].readers
    while len(readers) == 1 and readers[0].kind in ("cheap", "dear", "alias"):
        if readers[0].kept:
            return readers[0].name.startswith("convert_element_type")
        readers = readers[0].outputs[0].readers
    return False


def _is_running_sum(node: Node) -> bool:
    """Whether it adds to a sum of cotangents: kept, since else all that is added would have to be."""
    return node.name.startswith("add_any ") and any(v.node and v.node.name.startswith("add_any ") for v in node.inputs)
