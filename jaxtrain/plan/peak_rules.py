"""What each primitive of a jaxpr becomes in the peak-memory walk's graph: the table RULES, primitive -> rule.

A rule appends instructions to a graph (`jaxtrain.plan.graph`) and returns the arrays of the equation's results, split over the
mesh as XLA's partitioner would split them. What moves between devices follows from the same splits: partial sums of products
are summed, parameters split over devices that have different rows are gathered.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np

from jaxtrain.plan import graph as graph_lib
from jaxtrain.plan import lifetimes
from jaxtrain.plan.graph import Graph, Split, Value, axes_of, constants, is_half, joined, reshaped, split_of, title
from jaxtrain.step.state import HOST

Rule = Callable[[Graph, Any, list[Value]], list[Value]]  # (graph, equation, operands) -> results

CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
ALIASES = {"copy", "copy_p", "pvary", "pcast", "stop_gradient", "reshard", "name"}
CHEAP = {
    "add", "add_any", "sub", "mul", "neg", "abs", "sign", "max", "min", "and", "or", "not", "xor", "eq", "ne", "lt", "le", "gt",
    "ge", "select_n", "clamp", "convert_element_type", "integer_pow", "square", "is_finite", "floor", "ceil", "round", "rem",
    "shift_right_logical", "shift_left", "shift_right_arithmetic", "bitcast_convert_type", "iota", "slice", "pad", "rev",
    "concatenate", "dynamic_slice", "population_count", "nextafter", "convert", "real", "imag", "split", "one_minus_square",
}  # fmt: skip
DEAR = {
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erf_inv", "sqrt", "rsqrt", "cbrt", "pow", "div", "sin",
    "cos", "tan", "atan2", "random_bits", "threefry2x32", "random_wrap", "random_unwrap", "random_fold_in", "random_seed",
    "random_split",
}  # fmt: skip
REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin", "reduce"}
COLLECTIVES = {
    **dict.fromkeys(("psum", "psum_invariant", "pmax", "pmin"), "all-reduce"),
    **dict.fromkeys(("reduce_scatter", "psum_scatter"), "reduce-scatter"),
    "all_gather": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def block(graph: Graph, jaxpr: Any, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
    """Appends a whole jaxpr to the graph; returns the arrays of its results."""
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v: Any) -> Value:
        return graph.literal(v) if isinstance(v, jex.core.Literal) else env[v]

    for eqn in jaxpr.eqns:
        for var, value in zip(eqn.outvars, equation(graph, eqn, [read(v) for v in eqn.invars]), strict=True):
            env[var] = value
    return [read(v) for v in jaxpr.outvars]


def equation(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    """The rule's results; those of an equal computation before, where the compiler merges equal ones."""
    name = eqn.primitive.name
    rule = RULES.get(name, other)
    if not graph.compiler.merges or rule in (call, manual, scan, branch):
        return rule(graph, eqn, inputs)
    key = (name, *map(id, inputs), str(eqn.params), *(str(v.aval) for v in eqn.outvars))
    if key not in graph.done:
        graph.done[key] = rule(graph, eqn, inputs)
    return graph.done[key]


# --- arithmetic ----------------------------------------------------------------------------------------------------------


def cheap(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    return _elementwise("cheap", graph, eqn, inputs)


def dear(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    return _elementwise("dear", graph, eqn, inputs)


def other(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    """An instruction of its own, whose result is an array; split as its operands of the same rank are."""
    return _elementwise("other", graph, eqn, inputs)


def _elementwise(kind: str, graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    splits = []
    for var in eqn.outvars:
        shape = getattr(var.aval, "shape", ())
        splits.append(joined([v for v in inputs if len(v.shape) == len(shape)], shape))
    return graph.add(kind, eqn, inputs, splits, weak=all(v.weak for v in inputs))


def kernel(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    """One of Pallas: what it reads and writes lies in memory in the order of its dimensions.

    On TPUs heads of 64 values then fill half of the 128 lanes, in every array that is kept for the backward pass, too.
    """
    outputs = other(graph, eqn, inputs)
    for value in (*inputs, *outputs):
        value.in_order = True
    return outputs


def erfc(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    if not graph.compiler.merges:
        return dear(graph, eqn, inputs)
    closed = jax.make_jaxpr(_expanded_erfc)(eqn.invars[0].aval)
    return block(graph, closed.jaxpr, [], inputs)


def _expanded_erfc(x: jax.Array) -> jax.Array:
    """As XLA expands it, in what is dear of it: one exponential, which the derivative shares, and two divisions."""
    far = jnp.exp(-jax.lax.square(x)) * (1 / jnp.abs(x))
    return jnp.where(jnp.abs(x) > 1, far, 1 - x / (x * x + 1))


def reduce(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    gone = set(eqn.params["dimensions"] if eqn.primitive.name == "reduce" else eqn.params["axes"])
    split = tuple(s for i, s in enumerate(inputs[0].split) if i not in gone)
    outputs = graph.add("reduce", eqn, inputs, [split] * len(eqn.outvars))
    for value in outputs:
        graph.move("all-reduce", value, axes_of(inputs[0].split) - axes_of(split))
    return outputs


# --- shapes --------------------------------------------------------------------------------------------------------------


def broadcast(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    shape = eqn.params["shape"]
    split: list[tuple[str, ...]] = [()] * len(eqn.outvars[0].aval.shape)
    for i, dim in enumerate(eqn.params["broadcast_dimensions"]):
        if shape[dim] == inputs[0].shape[i]:
            split[dim] = inputs[0].split[i]
    return graph.add("cheap", eqn, inputs, [tuple(split)], weak=True)


def transpose(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    split = tuple(inputs[0].split[i] for i in eqn.params["permutation"])
    return graph.add("cheap", eqn, inputs, [split], weak=inputs[0].weak)


def reshape(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    split = reshaped(inputs[0].shape, eqn.outvars[0].aval.shape, inputs[0].split, graph.mesh)
    return graph.add("cheap", eqn, inputs, [split], weak=inputs[0].weak)


def alias(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    return [
        graph.append("alias", title(eqn), [value], [(var.aval.shape, var.aval.dtype, value.split)], weak=value.weak).outputs[0]
        for var, value in zip(eqn.outvars, inputs, strict=False)
    ]


def barrier(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    """The operands under other names: what reads one comes after all of them."""
    outputs = alias(graph, eqn, inputs)
    for value in outputs:
        assert value.node is not None  # just made
        value.node.waits = inputs
    return outputs


def constraint(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    wanted = split_of(eqn.params["sharding"].spec, len(eqn.outvars[0].aval.shape))
    split = tuple(tuple(a for a in dim if a in graph.mesh) for dim in wanted)
    if not inputs[0].weak:
        graph.move("all-gather", inputs[0], axes_of(inputs[0].split) - axes_of(split))
    return graph.add("alias", eqn, inputs, [split])


# --- products of matrices ------------------------------------------------------------------------------------------------


def product(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    numbers = eqn.params["dimension_numbers"]
    x, y = inputs
    split = _product_split(numbers, x, y)
    gathers, partial = _exchanged(numbers, x, y, split)
    read = list(inputs)
    for i, axes in enumerate(gathers):
        graph.move("all-gather", inputs[i], axes)
        if graph.compiler.halves and (axes := graph.several(axes)):
            read[i] = graph.gathered(inputs[i], axes)
    outputs = graph.add("product", eqn, _operands(graph, numbers, read), [split])
    if graph.compiler.widens_products and numbers[0][0] == (len(x.shape) - 1,) and is_half(outputs[0]):
        outputs[0].dtype = np.dtype(np.float32)
    if graph.compiler.rings:
        graph.nodes[-1].ring = any(graph.sizes.get(a, 1) > 2 for axes in gathers for a in axes)
        graph.nodes[-1].summed = {a for a in partial if graph.sizes.get(a, 1) > 2}
    graph.move("all-reduce", outputs[0], partial)
    return outputs


def _operands(graph: Graph, numbers: Any, inputs: Sequence[Value]) -> list[Value]:
    """What a product reads: float32 where it takes no 16-bit numbers, transposes where it makes matrices of arrays."""
    operands = list(inputs)
    if not graph.compiler.halves:
        operands = [graph.written("widened", v, np.float32) if is_half(v) else v for v in operands]
    elif graph.compiler.apart and not all(is_half(v) for v in operands):  # cuBLAS takes two of one type
        operands = [_wide(graph, v) if is_half(v) else v for v in operands]
    if graph.compiler.merges:
        turned = _turned(numbers, [len(v.shape) for v in inputs])
        operands = [graph.written("turned", v, v.dtype) if turn else v for v, turn in zip(operands, turned, strict=True)]
    return operands


def _wide(graph: Graph, value: Value) -> Value:
    """A 16-bit array in float32: what it was rounded from, where that is so (XLA leaves both roundings out), else another."""
    source = value
    while source.node and source.node.kind == "alias" and source.node.inputs[0].split == value.split:
        source = source.node.inputs[0]
    if source.node and source.node.name.startswith("convert_element_type"):
        before = source.node.inputs[0]
        if before.dtype == np.float32 and before.split == value.split:
            return before
    return graph.written("widened", value, np.float32)


def _turned(numbers: Any, ranks: Sequence[int]) -> list[bool]:
    """Of a product's operands, which are transposed first.

    Products of matrices are done as they are. Of others XLA for CPUs makes such products: [batch, free, summed] on the left,
    [batch, summed, free] on the right (its DotDecomposer).
    """
    sums, batches = numbers
    n = len(batches[0])
    if len(sums[0]) == 1 and all(tuple(b) == tuple(range(n)) for b in batches) and max(ranks) <= n + 2:
        return [False, False]
    is_turned = []
    for side, (summed, batch, rank) in enumerate(zip(sums, batches, ranks, strict=True)):
        free = [i for i in range(rank) if i not in (*summed, *batch)]
        order = (*batch, *summed, *free) if side else (*batch, *free, *summed)
        is_turned.append(order != tuple(range(rank)))
    return is_turned


def _product_split(numbers: Any, x: Value, y: Value) -> Split:
    """Batch dimensions, then what is left of x, then of y; an axis that both want stays with the larger operand."""
    (x_sum, y_sum), (x_batch, y_batch) = numbers
    batch = [x.split[i] or y.split[j] for i, j in zip(x_batch, y_batch, strict=True)]
    own = [x.split[i] for i in range(len(x.shape)) if i not in (*x_sum, *x_batch)]
    others = [y.split[i] for i in range(len(y.shape)) if i not in (*y_sum, *y_batch)]
    summed = {a for i, j in zip(x_sum, y_sum, strict=True) for a in x.split[i] if a in y.split[j]}
    taken: set[str] = {a for dim in batch for a in dim} | summed

    def keep(dims: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        kept = [tuple(a for a in dim if a not in taken) for dim in dims]
        taken.update(a for dim in kept for a in dim)
        return kept

    if math.prod(x.shape) >= math.prod(y.shape):
        own = keep(own)
        others = keep(others)
    else:
        others = keep(others)
        own = keep(own)
    return (*batch, *own, *others)


def _exchanged(numbers: Any, x: Value, y: Value, split: Split) -> tuple[list[set[str]], set[str]]:
    """What a product of split operands costs: the mesh axes over which each of them is gathered, and partial sums summed."""
    (x_sum, y_sum), (x_batch, y_batch) = numbers
    summed = [{a for i in dims for a in v.split[i]} for v, dims in ((x, x_sum), (y, y_sum))]
    partial = (summed[0] | summed[1]) - axes_of(split)  # split on one side only: the other side takes its slice
    at, gathers = len(x_batch), []
    for value, own, dims, batch in ((x, summed[0], x_sum, x_batch), (y, summed[1], y_sum, y_batch)):
        free = [i for i in range(len(value.shape)) if i not in (*dims, *batch)]
        places = split[at : at + len(free)]
        lost = {a for i, place in zip(free, places, strict=True) for a in value.split[i] if a not in place}
        at += len(free)
        gathers.append((own - partial) | lost)
    return gathers, partial


# --- memories and devices ------------------------------------------------------------------------------------------------


def device_put(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    outputs = graph.add("other", eqn, inputs, [v.split for v in inputs])
    for value, place in zip(outputs, eqn.params["devices"], strict=True):
        value.on_host = getattr(place, "memory_kind", None) == HOST
    return outputs


def collective(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    for value in inputs:
        graph.move(COLLECTIVES[eqn.primitive.name], value, {axes} if isinstance(axes, str) else set(axes))
    outputs = graph.add("other", eqn, inputs, [v.split for v in inputs])
    graph.nodes[-1].apart = graph.compiler.apart and COLLECTIVES[eqn.primitive.name] != "all-reduce"
    return outputs


def manual(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A shard_map: inside, the manual axes are gone from shapes and splits."""
    axes, jaxpr = eqn.params["newly_manual_axes"], eqn.params["jaxpr"]
    local = []
    for var, value, spec in zip(jaxpr.invars, inputs, eqn.params["in_specs"], strict=True):
        # An array that is split, and needed whole, is gathered first.
        kept = [set(dim) for dim in split_of(spec, len(value.shape))]
        lost = {a for dim, kept_axes in zip(value.split, kept, strict=True) for a in dim if a in axes and a not in kept_axes}
        if not value.weak and (lost := graph.several(lost)):
            graph.move("all-gather", value, lost)
            value = graph.gathered(value, lost)
        split = tuple(tuple(a for a in dim if a not in axes) for dim in value.split)
        local.append(graph.renamed("shard_map", value, shape=var.aval.shape, split=split))
    results = []
    outputs = block(graph.manual(axes), jaxpr, [], local)
    for value, spec in zip(outputs, eqn.params["out_specs"], strict=True):
        extra = split_of(spec, len(value.shape))
        split = tuple((*e, *s) for e, s in zip(extra, value.split, strict=True))
        shape = [n * math.prod(graph.mesh[a] for a in e) for n, e in zip(value.shape, extra, strict=True)]
        results.append(graph.renamed("shard_map", value, shape=shape, split=split))
    return results


# --- computations inside -------------------------------------------------------------------------------------------------


def call(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    params, before = eqn.params, graph.again
    if params.get("differentiated") and params.get("prevent_cse"):
        inputs, graph.again = _held(graph, inputs) if graph.compiler.checkpoints else inputs, True
    inner, consts = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr"))), []
    core: Any = jex.core  # of which jax 0.12 leaves out the name for type checkers; there every jaxpr is a closed one
    if isinstance(inner, core.ClosedJaxpr):
        inner, consts = inner.jaxpr, constants(inner.consts)
    outputs = block(graph, inner, consts, inputs)
    graph.again = before
    return outputs


def _held(graph: Graph, values: list[Value]) -> list[Value]:
    """What a checkpoint computes from: arrays, and none of it before all of them are there (it is lowered to a barrier)."""
    held = [graph.renamed("barrier", v, split=v.split, weak=v.weak) for v in values]
    for value in held:
        assert value.node is not None  # just made
        value.node.holds, value.node.waits = True, values
    return held


def scan(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A loop. Where ``unroll`` writes its body out several times, what is left over comes after it, without a loop."""
    p = eqn.params
    if "ft_in" in p:  # jax 0.11
        n_consts, n_carry, _ = map(len, p["ft_in"].unpack())
    else:
        n_consts, n_carry = p["num_consts"], p["num_carry"]
    consts, carry, xs = inputs[:n_consts], inputs[n_consts : n_consts + n_carry], inputs[n_consts + n_carry :]
    each = max(p["unroll"], 1)
    rounds, rest = divmod(p["length"], each)
    if rounds == 0 or rounds == 1 and not rest:  # no loop at all, and the compiler sees through what is stacked
        carry, parts = _copies(graph, eqn, consts, carry, xs, p["length"])
        return [*carry, *_stacked(graph, parts)]
    if not rest:
        return _loop(graph, eqn, consts, carry, xs, rounds, each)
    first = rest if p["reverse"] else 0  # of the loop's rows
    looped = [_rows(graph, x, first, rounds * each) for x in xs]
    if rounds == 1:
        carry, parts = _copies(graph, eqn, consts, carry, looped, each)
        ys = _stacked(graph, parts)
    else:
        out = _loop(graph, eqn, consts, carry, looped, rounds, each)
        carry, ys = out[:n_carry], out[n_carry:]
    carry, parts = _copies(graph, eqn, consts, carry, xs, rest, first=0 if p["reverse"] else rounds * each)
    joined_ys = []
    for y, last in zip(ys, zip(*parts, strict=True), strict=True):
        shape = ((p["length"], *y.shape[1:]), y.dtype, y.split)
        joined_ys += graph.append("other" if rounds == 1 else "cheap", "concatenate", [y, *last], [shape]).outputs
    return [*carry, *joined_ys]


def _loop(
    graph: Graph, eqn: Any, consts: list[Value], carry: list[Value], xs: list[Value], rounds: int, each: int
) -> list[Value]:
    """``rounds`` of a loop whose body is written out ``each`` times."""
    closed, n_consts, n_carry = eqn.params["jaxpr"], len(consts), len(carry)
    body, own_consts = closed.jaxpr, constants(closed.consts)
    start = [v.split for v in carry]
    for _ in range(2):  # what a loop hands on is split as its body leaves it
        inner = graph.body(times=rounds)
        own = [Value(v.aval.shape, v.aval.dtype, s, None) for v, s in zip(body.invars[n_consts:], start, strict=False)]
        fixed = [Value(v.shape, v.dtype, v.split, None, weak=v.weak) for v in consts]
        if each == 1:
            rows = [Value(x.shape[1:], x.dtype, x.split[1:], None) for x in xs]
            if graph.compiler.breadth_first:
                made = [inner.append("cheap", "row", [v], [(v.shape, v.dtype, v.split)]).outputs[0] for v in rows]
                row_of = dict(zip(map(id, xs), made, strict=True))  # what is read under several names is fetched once
                rows = [row_of[id(x)] for x in xs]
            out = block(inner, body, own_consts, [*fixed, *own, *rows])
        else:
            rows = [Value((each, *x.shape[1:]), x.dtype, ((), *x.split[1:]), None) for x in xs]
            after, parts = _copies(inner, eqn, fixed, own, rows, each)
            out = [*after, *_stacked(inner, parts)]
        start = [v.split if any(v.split) and not v.weak else o.split for o, v in zip(out[:n_carry], carry, strict=True)]
    read = [*consts, *carry, *xs]
    for i, value in (*enumerate(fixed), *enumerate(rows, n_consts + n_carry)):
        if id(value) in inner.copied:
            read[i] = graph.written("turned", read[i], read[i].dtype)
    streamed = out[n_carry:]
    if graph.compiler.rounds_rows and each == 1:
        for i, value in enumerate(rows, n_consts + n_carry):
            if (dtype := _rounded_to(value)) is not None:
                read[i] = graph.written("rounded", read[i], dtype)
    if graph.compiler.halves:
        graph_lib.pin(inner.nodes)
    peak = lifetimes.fullest(inner, [*fixed, *own], out, reusable={id(v) for v in own}, streamed=streamed)
    of_carry = [(v.aval.shape, v.aval.dtype, s) for v, s in zip(eqn.outvars, start, strict=False)]
    of_rows = [
        ((rounds * each, *v.aval.shape[1:]), v.aval.dtype, ((), *(o.split if each == 1 else o.split[1:])))
        for v, o in zip(eqn.outvars[n_carry:], streamed, strict=True)
    ]
    node = graph.append("other", title(eqn), read, [*of_carry, *of_rows])
    node.again, node.inner = graph.again, peak.bytes
    node.state = list(zip(carry, node.outputs, strict=False))
    graph.moves += inner.moves
    for o, v in zip(out, node.outputs, strict=True):
        o.outer, v.in_order = v, graph_lib.lies_in_order(o)
    if graph.compiler.widens_stacks:
        for v in node.outputs[n_carry:]:
            v.dtype = np.dtype(np.float32) if v.dtype == jnp.bfloat16 else v.dtype
    if graph.compiler.merges and math.prod(graph.sizes.values()) > 1:
        # Rows that the body gives several times are written once in a program that was partitioned, and as often as they are
        # given on one device (XLA for CPUs of jaxlib 0.10.2 and 0.12.0.1): queries, keys and values keep one input each.
        stack_of = dict(zip(map(id, streamed), node.outputs[n_carry:], strict=True))
        return [*node.outputs[:n_carry], *(stack_of[id(o)] for o in streamed)]
    return node.outputs


def _rounded_to(value: Value) -> Any:
    """The narrower type to which all that reads a row rounds it; None where something reads it as it is."""
    types, todo = set(), list(value.readers)
    while todo:
        node = todo.pop()
        if node.kind == "alias":
            todo += node.outputs[0].readers
        else:
            types.add(node.outputs[0].dtype if node.name.startswith("convert_element_type") else value.dtype)
    [dtype] = types if len(types) == 1 else [value.dtype]
    return dtype if dtype.itemsize < value.dtype.itemsize else None


def _copies(
    graph: Graph, eqn: Any, consts: list[Value], carry: list[Value], xs: list[Value], n: int, *, first: int = 0
) -> tuple[list[Value], list[list[Value]]]:
    """A loop's body written out ``n`` times, for the rows of ``xs`` from ``first`` on: the carry, and each row's results."""
    p, n_carry = eqn.params, len(carry)
    body, own_consts = p["jaxpr"].jaxpr, constants(p["jaxpr"].consts)
    each: list[list[Value]] = []
    for i in reversed(range(n)) if p["reverse"] else range(n):
        rows = [_sliced(graph, x, v, first + i) for x, v in zip(xs, body.invars[len(consts) + n_carry :], strict=True)]
        out = block(graph, body, own_consts, [*consts, *carry, *rows])
        carry = out[:n_carry]
        each.append(out[n_carry:])
    return carry, each[::-1] if p["reverse"] else each


def _stacked(graph: Graph, parts: list[list[Value]]) -> list[Value]:
    """The results of a body that is written out, as the arrays that a loop would have filled."""
    return [
        graph.append(
            "cheap", "stack", list(rows), [((len(rows), *rows[0].shape), rows[0].dtype, ((), *rows[0].split))]
        ).outputs[0]
        for rows in zip(*parts, strict=True)
    ]


def _rows(graph: Graph, x: Value, first: int, n: int) -> Value:
    """``n`` rows of an array: an array of its own where a loop reads it."""
    return graph.append("cheap", "slice", [x], [((n, *x.shape[1:]), x.dtype, x.split)]).outputs[0]


def _sliced(graph: Graph, x: Value, var: Any, at: int) -> Value:
    """What iteration ``at`` of an unrolled loop reads of ``x``."""
    if x.node and x.node.name == "stack":  # of an unrolled loop before: the compiler sees through it
        return x.node.inputs[at]
    if (id(x), at) not in graph.slices:
        shape = (var.aval.shape, var.aval.dtype, x.split[1:])
        graph.slices[id(x), at] = graph.append("cheap", "slice", [x], [shape]).outputs[0]
    return graph.slices[id(x), at]


def branch(graph: Graph, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A loop of unknown length, or one of several branches: the fullest of the computations."""
    p = eqn.params
    if eqn.primitive.name == "while":
        computations, own = [p["body_jaxpr"]], inputs[p["cond_nconsts"] :]
    else:
        computations, own = list(p["branches"]), inputs[1:]
    most, splits = 0, list[Split]()
    for closed in computations:
        inner = graph.body()
        given = [Value(v.shape, v.dtype, v.split, None, weak=v.weak) for v in own]
        out = block(inner, closed.jaxpr, constants(closed.consts), given)
        most = max(most, lifetimes.fullest(inner, given, out, reusable=set()).bytes)
        graph.moves += inner.moves
        splits = [v.split for v in out]
    outs = graph.add("other", eqn, inputs, splits)
    graph.nodes[-1].inner = most
    return outs


RULES: dict[str, Rule] = {
    **dict.fromkeys(CHEAP, cheap),
    **dict.fromkeys(DEAR, dear),
    **dict.fromkeys(REDUCES, reduce),
    **dict.fromkeys(ALIASES, alias),
    **dict.fromkeys(CALLS, call),
    **dict.fromkeys(COLLECTIVES, collective),
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), reshape),
    **dict.fromkeys(("while", "cond"), branch),
    "broadcast_in_dim": broadcast,
    "device_put": device_put,
    "dot_general": product,
    "erfc": erfc,
    "optimization_barrier": barrier,
    "pallas_call": kernel,
    "scan": scan,
    "shard_map": manual,
    "sharding_constraint": constraint,
    "transpose": transpose,
}
