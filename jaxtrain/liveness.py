"""What a step holds at its fullest moment, on one device, without compiling it.

The step's jaxpr is walked once. Every array is followed with the mesh axes that split its dimensions (batch, fsdp and model
spread from the arguments and from the constraints in the program as XLA's partitioner spreads them), so that sizes are those of
one device. Then it is decided what becomes an array in memory at all: XLA fuses element-wise arithmetic, broadcasts and
slices into whoever reads them, and keeps the results of products, reductions and loops, what crosses a loop's border, and what
is too dear to compute for each reader again. A last pass counts what lives at the same time, in program order, a result taking
its place over from an operand that is read for the last time, as donated arguments are.

What moves between devices follows from the same splits: partial sums of products are summed, parameters split over devices that
have different rows are gathered.

It is an estimate. Its tests hold it against the compilers' own figures.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

Split = tuple[tuple[str, ...], ...]  # for each dimension, the mesh axes that it is split over

CALLS = {"jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"}
ALIASES = {
    "optimization_barrier",
    "copy",
    "copy_p",
    "pvary",
    "pcast",
    "stop_gradient",
    "reshard",
    "sharding_constraint",
    "name",
}
CHEAP = {
    "add", "add_any", "sub", "mul", "neg", "abs", "sign", "max", "min", "and", "or", "not", "xor", "eq", "ne", "lt", "le", "gt",
    "ge", "select_n", "clamp", "convert_element_type", "integer_pow", "square", "is_finite", "floor", "ceil", "round", "rem",
    "shift_right_logical", "shift_left", "shift_right_arithmetic", "bitcast_convert_type", "iota", "broadcast_in_dim",
    "reshape", "squeeze", "expand_dims", "slice", "pad", "rev", "concatenate", "dynamic_slice", "population_count", "nextafter",
    "convert", "real", "imag", "split", "transpose",
}  # fmt: skip
DEAR = {
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "erf", "erf_inv", "erfc", "sqrt", "rsqrt", "cbrt", "pow", "div",
    "sin", "cos", "tan", "atan2", "random_bits", "threefry2x32", "random_wrap", "random_unwrap", "random_fold_in",
    "random_seed", "random_split",
}  # fmt: skip
REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin", "reduce"}
COLLECTIVES = {
    "psum",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "ppermute",
    "psum_scatter",
}


HOST = "pinned_host"  # memory kind
NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "psum_scatter": "reduce-scatter",
         "all_to_all": "all-to-all", "ppermute": "collective-permute"}  # fmt: skip
PASSES = {"transpose", "reshape", "convert_element_type", "mul", "div", "squeeze", "expand_dims", "add_any", "pad", "stack"}
STORED = -1  # among the readers that a value is computed inside of: one that wants an array
ARITHMETIC = {"add", "add_any", "sub", "mul", "max", "min", "integer_pow", "square", "select_n"}


class Compiler(NamedTuple):
    """How a compiler lays out and fuses."""

    bytes_of: Callable[[Sequence[int], np.dtype], int]  # (shape on a device, dtype) -> bytes in memory
    into_products: bool  # element-wise operands are computed inside a matrix product
    recomputes: bool  # cheap arithmetic is computed again for each of its readers
    recomputes_logistic: bool  # and so are sigmoids, as TPUs from v5e on were seen to do (a v4 those of checkpoints)
    halves: bool  # it multiplies 16-bit numbers; else it widens them to float32 first
    merges: bool  # equal computations are done once, also those that a checkpoint wants done again (outside of loops)
    copies: bool  # a donated argument that is read beside the result in its place is copied before the first instruction


class Value:
    """An array of the program, on one device."""

    __slots__ = ("shape", "split", "dtype", "node", "readers", "weak", "size", "constant", "on_host", "inline", "outer")

    def __init__(self, shape: Sequence[int], dtype: Any, split: Split, node: "Node | None", *, weak: bool = False):
        self.shape, self.dtype, self.split, self.node, self.weak = tuple(shape), dtype, split, node, weak
        self.constant = self.on_host = self.inline = False
        self.outer: Value | None = None  # of a loop's result, the same outside
        self.readers: list[Node] = []
        self.size = 0


class Node:
    """An instruction. ``kind``: cheap, dear, reduce, product, alias or other (which stands for itself)."""

    __slots__ = ("kind", "name", "inputs", "outputs", "inner", "place", "kept", "holds", "free", "costly", "again")

    def __init__(self, kind: str, name: str, inputs: list[Value]):
        self.kind, self.name, self.inputs, self.outputs, self.inner = kind, name, inputs, [], 0
        self.place, self.kept, self.holds = 0, False, False
        self.free = all(v.constant if v.node is None else v.node.free for v in inputs)  # computed from no array at all
        self.again = False  # a checkpoint's, computed again
        self.costly = kind == "dear" or any(v.node and v.node.costly for v in inputs) and kind in ("cheap", "alias")


class Peak(NamedTuple):
    """The fullest moment of a step."""

    bytes: int  # besides the arguments
    where: str  # the instruction
    largest: list[tuple[int, str]]  # (bytes, what) of the largest arrays that live then
    moved: dict[tuple[str, tuple[str, ...]], tuple[int, float]]  # as of `jaxtrain.hlo.summary`


def peak(closed: Any, splits: Sequence[Split], mesh: Mapping[str, int], donated: Sequence[bool], compiler: Compiler) -> Peak:
    """Of a jaxpr whose arguments are split over a mesh (axis -> size) as ``splits`` says.

    Args:
      donated: for each argument, whether a result may take its place. What is in host memory may not.
    """
    jaxpr = closed.jaxpr
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    walk = _Walk(dict(mesh), compiler)
    split = [s for s, u in zip(splits, used, strict=True) if u]
    free = [d for d, u in zip(donated, used, strict=True) if u]
    inputs = [Value(v.aval.shape, v.aval.dtype, s, None) for v, s in zip(jaxpr.invars, split, strict=True)]
    constants = [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in closed.consts]
    outputs = walk.block(jaxpr, constants, inputs)
    given = [v for v, f in zip(inputs, free, strict=True) if f]
    return walk.finish(inputs, outputs, reusable={id(v) for v in given}, replaced=_pairs(given, outputs))


class _Walk:
    """One computation: the step itself, or a loop's body."""

    def __init__(self, mesh: dict[str, int], compiler: Compiler, *, times: int = 1):
        self.mesh, self.compiler, self.times = mesh, compiler, times
        self.moves: list[tuple[str, Value, set[str], int]] = []  # (kind, array, mesh axes, how often)
        self.sizes = mesh  # of all axes, those that are manual here included
        self.nodes: list[Node] = []
        self.again = False  # inside of what a checkpoint computes again
        self.literals: dict[tuple, Value] = {}
        self.done: dict[tuple, list[Value]] = {}  # results by what computes them, where equal computations are merged
        self.slices: dict[tuple[int, int], Value] = {}  # of what an unrolled loop reads, and the loop backward again

    # --- building ------------------------------------------------------------------------------------------------------

    def block(self, jaxpr: Any, constants: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
        env = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> Value:
            if isinstance(v, jex.core.Literal):
                return self.literal(v)
            return env[v]

        for eqn in jaxpr.eqns:
            for var, value in zip(eqn.outvars, self.once(eqn, [read(v) for v in eqn.invars]), strict=True):
                env[var] = value
        return [read(v) for v in jaxpr.outvars]

    def literal(self, v: Any) -> Value:
        key = (repr(v.val), str(v.aval))
        if key not in self.literals:
            value = Value(np.shape(v.val), v.aval.dtype, ((),) * np.ndim(v.val), None, weak=True)
            value.constant = True
            self.literals[key] = value
        return self.literals[key]

    def add(self, kind: str, eqn: Any, inputs: list[Value], splits: Sequence[Split], *, weak: bool = False) -> list[Value]:
        node = Node(kind, _title(eqn), inputs)
        node.again = self.again
        node.outputs = [
            Value(v.aval.shape, getattr(v.aval, "dtype", np.int32), s, node, weak=weak)
            for v, s in zip(eqn.outvars, splits, strict=True)
        ]
        for value in inputs:
            value.readers.append(node)
        self.nodes.append(node)
        return node.outputs

    def once(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if not self.compiler.merges or name in CALLS or name in ("scan", "while", "cond", "shard_map"):
            return self.equation(eqn, inputs)
        key = (name, *map(id, inputs), str(eqn.params), *(str(v.aval) for v in eqn.outvars))
        if key not in self.done:
            self.done[key] = self.equation(eqn, inputs)
        return self.done[key]

    def equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        ranks = [len(getattr(v.aval, "shape", ())) for v in eqn.outvars]
        if name in CALLS:
            before = self.again
            if params.get("differentiated") and params.get("prevent_cse") and not self.compiler.merges:
                inputs, self.again = [self.barrier(v) for v in inputs], True
            inner, constants = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr"))), []
            if hasattr(inner, "jaxpr"):
                constants = [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in inner.consts]
                inner = inner.jaxpr
            outputs = self.block(inner, constants, inputs)
            self.again = before
            return outputs
        if name == "shard_map":
            return self.manual(params, inputs)
        if name == "scan":
            return self.scan(eqn, inputs)
        if name in ("while", "cond"):
            return self.branch(eqn, inputs)
        if name == "sharding_constraint":
            wanted = split_of(params["sharding"].spec, ranks[0])
            split = tuple(tuple(a for a in dim if a in self.mesh) for dim in wanted)
            if not inputs[0].weak:
                self.move("all-gather", inputs[0], _axes(inputs[0].split) - _axes(split))
            return self.add("alias", eqn, inputs, [split])
        if name in ALIASES:
            outs = []
            for var, value in zip(eqn.outvars, inputs, strict=False):
                node = Node("alias", _title(eqn), [value])
                node.outputs = [Value(var.aval.shape, var.aval.dtype, value.split, node, weak=value.weak)]
                value.readers.append(node)
                self.nodes.append(node)
                outs += node.outputs
            return outs
        if name == "erfc" and self.compiler.merges:
            closed = jax.make_jaxpr(_erfc)(eqn.invars[0].aval)
            return self.block(closed.jaxpr, [], inputs)
        if name == "dot_general":
            split = self.product(params["dimension_numbers"], *inputs)
            found = self.add("product", eqn, self.operands(params["dimension_numbers"], inputs), [split])
            self.exchange(params["dimension_numbers"], *inputs, found[0])
            return found
        if name == "broadcast_in_dim":
            split = [()] * ranks[0]
            for i, dim in enumerate(params["broadcast_dimensions"]):
                if params["shape"][dim] == inputs[0].shape[i]:
                    split[dim] = inputs[0].split[i]
            return self.add("cheap", eqn, inputs, [tuple(split)], weak=True)
        if name == "transpose":
            return self.add(
                "cheap", eqn, inputs, [tuple(inputs[0].split[i] for i in params["permutation"])], weak=inputs[0].weak
            )
        if name in ("reshape", "squeeze", "expand_dims"):
            split = _reshaped(inputs[0].shape, eqn.outvars[0].aval.shape, inputs[0].split, self.mesh)
            return self.add("cheap", eqn, inputs, [split], weak=inputs[0].weak)
        if name in REDUCES:
            gone = set(params["dimensions"] if name == "reduce" else params["axes"])
            split = tuple(s for i, s in enumerate(inputs[0].split) if i not in gone)
            found = self.add("reduce", eqn, inputs, [split] * len(ranks))
            for value in found:
                self.move("all-reduce", value, _axes(inputs[0].split) - _axes(split))
            return found
        if name == "device_put":
            found = self.add("other", eqn, inputs, [v.split for v in inputs])
            for value, place in zip(found, params["devices"], strict=True):
                value.on_host = getattr(place, "memory_kind", None) == HOST
            return found
        if name in COLLECTIVES:
            axes = params.get("axes", params.get("axis_name", ()))
            for value in inputs:
                self.move(NAMES.get(name, "all-reduce"), value, {axes} if isinstance(axes, str) else set(axes))
            return self.add("other", eqn, inputs, [v.split for v in inputs])
        kind = "cheap" if name in CHEAP else "dear" if name in DEAR else "other"
        splits = []
        for var, rank in zip(eqn.outvars, ranks, strict=True):
            shape = getattr(var.aval, "shape", ())
            splits.append(_joined([v for v in inputs if len(v.shape) == rank], shape))
        weak = all(v.weak for v in inputs)
        return self.add(kind, eqn, inputs, splits, weak=weak)

    def barrier(self, value: Value) -> Value:
        """What a checkpoint computes from is an array: it is lowered to a barrier."""
        node = Node("alias", "barrier", [value])
        node.outputs, node.holds = [Value(value.shape, value.dtype, value.split, node, weak=value.weak)], True
        value.readers.append(node)
        self.nodes.append(node)
        return node.outputs[0]

    def operands(self, numbers: Any, inputs: Sequence[Value]) -> list[Value]:
        """What a product reads: float32 where it takes no 16-bit numbers, transposes where it makes matrices of arrays."""
        found = list(inputs)
        if not self.compiler.halves:
            found = [self.written("widened", v, np.float32) if _is_half(v) else v for v in found]
        if self.compiler.merges:
            turned = _turned(numbers, [len(v.shape) for v in inputs])
            found = [self.written("turned", v, v.dtype) if turn else v for v, turn in zip(found, turned, strict=True)]
        return found

    def written(self, name: str, value: Value, dtype: Any) -> Value:
        """A value in another form, once for all its readers."""
        if (name, id(value)) not in self.done:
            node = Node("cheap", name, [value])
            node.outputs = [Value(value.shape, dtype, value.split, node, weak=value.weak)]
            value.readers.append(node)
            self.nodes.append(node)
            self.done[name, id(value)] = node.outputs
        return self.done[name, id(value)][0]

    def product(self, numbers: Any, x: Value, y: Value) -> Split:
        """Batch dimensions, then what is left of x, then of y; an axis that both want stays with the larger operand."""
        (x_sum, y_sum), (x_batch, y_batch) = numbers
        batch = [x.split[i] or y.split[j] for i, j in zip(x_batch, y_batch, strict=True)]
        own = [x.split[i] for i in range(len(x.shape)) if i not in (*x_sum, *x_batch)]
        other = [y.split[i] for i in range(len(y.shape)) if i not in (*y_sum, *y_batch)]
        summed = {a for i, j in zip(x_sum, y_sum, strict=True) for a in x.split[i] if a in y.split[j]}
        taken: set[str] = {a for dim in batch for a in dim} | summed

        def keep(dims: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
            kept = [tuple(a for a in dim if a not in taken) for dim in dims]
            taken.update(a for dim in kept for a in dim)
            return kept

        if math.prod(x.shape) >= math.prod(y.shape):
            own = keep(own)
            other = keep(other)
        else:
            other = keep(other)
            own = keep(own)
        return (*batch, *own, *other)

    def exchange(self, numbers: Any, x: Value, y: Value, out: Value) -> None:
        """What a product of split operands costs: one that cannot stay split is gathered; partial sums are summed."""
        (x_sum, y_sum), (x_batch, y_batch) = numbers
        summed = [{a for i in dims for a in v.split[i]} for v, dims in ((x, x_sum), (y, y_sum))]
        kept = _axes(out.split)
        partial = (summed[0] | summed[1]) - kept  # split on one side only: the other side takes its slice
        at = len(x_batch)
        for value, own, dims, batch in ((x, summed[0], x_sum, x_batch), (y, summed[1], y_sum, y_batch)):
            free = [i for i in range(len(value.shape)) if i not in (*dims, *batch)]
            lost = {
                a
                for i, place in zip(free, out.split[at : at + len(free)], strict=True)
                for a in value.split[i]
                if a not in place
            }
            at += len(free)
            self.move("all-gather", value, (own - partial) | lost)
        self.move("all-reduce", out, partial)

    def move(self, kind: str, value: Value, axes: set[str]) -> None:
        if axes := {a for a in axes if self.sizes.get(a, 1) > 1}:
            self.moves.append((kind, value, axes, self.times))

    def moved(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, float]]:
        """(kind, axes) -> (executions, bytes that a device sends), by the ring algorithms."""
        table: dict[tuple[str, tuple[str, ...]], tuple[int, float]] = {}
        for kind, value, axes, times in {(kind, id(v), *axes): (kind, v, axes, n) for kind, v, axes, n in self.moves}.values():
            n = math.prod(self.sizes[a] for a in axes)
            parts = [math.prod(self.sizes.get(a, 1) for a in dim) for dim in value.split]
            shape = [-(-d // part) for d, part in zip(value.shape, parts, strict=True)]
            size = math.prod(shape) * (_width(value) if value.dtype != jax.dtypes.prng_key else 8)
            if kind == "all-reduce" and axes <= _wanted(value):
                kind = "reduce-scatter"
            factor = {
                "all-reduce": 2 * (n - 1) / n,
                "reduce-scatter": (n - 1) / n,
                "all-gather": n - 1,
                "all-to-all": (n - 1) / n,
            }
            key = (kind, tuple(a for a in self.sizes if a in axes))
            count, sent = table.get(key, (0, 0.0))
            table[key] = (count + times, sent + times * size * factor.get(kind, 1))
        return table

    def manual(self, params: Mapping[str, Any], inputs: list[Value]) -> list[Value]:
        """Inside, the manual axes are gone from shapes and splits."""
        axes = params["newly_manual_axes"]
        inner = _Inline(self, {k: n for k, n in self.mesh.items() if k not in axes})
        jaxpr = params["jaxpr"]
        local = []
        for var, value in zip(jaxpr.invars, inputs, strict=True):
            node = Node("alias", "shard_map", [value])
            split = tuple(tuple(a for a in dim if a not in axes) for dim in value.split)
            node.outputs = [Value(var.aval.shape, var.aval.dtype, split, node)]
            value.readers.append(node)
            self.nodes.append(node)
            local += node.outputs
        outputs = inner.walk.block(jaxpr, [], local)
        found = []
        for value, spec in zip(outputs, params["out_specs"], strict=True):
            extra = split_of(spec, len(value.shape))
            node = Node("alias", "shard_map", [value])
            split = tuple((*e, *s) for e, s in zip(extra, value.split, strict=True))
            shape = [n * math.prod(self.mesh[a] for a in e) for n, e in zip(value.shape, extra, strict=True)]
            node.outputs = [Value(shape, value.dtype, split, node)]
            value.readers.append(node)
            self.nodes.append(node)
            found += node.outputs
        return found

    def scan(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        p = eqn.params
        if "ft_in" in p:  # jax 0.11
            (n_consts, n_carry, _), length = map(len, p["ft_in"].unpack()), p["length"]
        else:
            n_consts, n_carry, length = p["num_consts"], p["num_carry"], p["length"]
        body, closed = p["jaxpr"].jaxpr, p["jaxpr"].consts
        consts, carry, xs = inputs[:n_consts], inputs[n_consts : n_consts + n_carry], inputs[n_consts + n_carry :]
        constants = [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in closed]
        if p["unroll"] >= length:
            ys: list[list[Value]] = []
            for i in range(length):
                at = length - 1 - i if p["reverse"] else i
                rows = [self.sliced(x, v, at) for x, v in zip(xs, body.invars[n_consts + n_carry :], strict=True)]
                out = self.block(body, constants, [*consts, *carry, *rows])
                carry = out[:n_carry]
                ys.append(out[n_carry:])
            stacked, ys = [], ys[::-1] if p["reverse"] else ys
            for var, parts in zip(eqn.outvars[n_carry:], zip(*ys, strict=True), strict=True):
                node = Node("cheap", "stack", list(parts))
                node.outputs = [Value(var.aval.shape, var.aval.dtype, ((), *parts[0].split), node)]
                for part in parts:
                    part.readers.append(node)
                self.nodes.append(node)
                stacked += node.outputs
            return [*carry, *stacked]
        start = [v.split for v in carry]
        for _ in range(2):  # what a loop hands on is split as its body leaves it
            inner = _Walk(self.mesh, self.compiler, times=self.times * length)
            own = [Value(v.aval.shape, v.aval.dtype, s, None) for v, s in zip(body.invars[n_consts:], start, strict=False)]
            rows = [
                Value(v.aval.shape, v.aval.dtype, x.split[1:], None)
                for v, x in zip(body.invars[n_consts + n_carry :], xs, strict=True)
            ]
            fixed = [Value(v.shape, v.dtype, v.split, None, weak=v.weak) for v in consts]
            out = inner.block(body, constants, [*fixed, *own, *rows])
            start = [v.split if any(v.split) and not v.weak else o.split for o, v in zip(out[:n_carry], carry, strict=True)]
        found = inner.finish([*fixed, *own], out, reusable={id(v) for v in own}, streamed=out[n_carry:])
        outs = self.add("other", eqn, inputs, [*start, *[((), *v.split) for v in out[n_carry:]]])
        self.nodes[-1].inner = found.bytes
        self.moves += inner.moves
        for o, v in zip(out, outs, strict=True):
            o.outer = v
        if not self.compiler.halves:
            for v in outs[n_carry:]:
                v.dtype = np.dtype(np.float32) if v.dtype == jnp.bfloat16 else v.dtype
        return outs

    def sliced(self, x: Value, var: Any, at: int) -> Value:
        if x.node and x.node.name == "stack":  # of an unrolled loop before: the compiler sees through it
            return x.node.inputs[at]
        if (id(x), at) not in self.slices:
            node = Node("cheap", "slice", [x])
            node.outputs = [Value(var.aval.shape, var.aval.dtype, x.split[1:], node)]
            x.readers.append(node)
            self.nodes.append(node)
            self.slices[id(x), at] = node.outputs[0]
        return self.slices[id(x), at]

    def branch(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """A loop of unknown length, or one of several branches: the fullest of the computations."""
        p = eqn.params
        if eqn.primitive.name == "while":
            closed, own = [p["body_jaxpr"]], inputs[p["cond_nconsts"] :]
        else:
            closed, own = list(p["branches"]), inputs[1:]
        most, splits = 0, None
        for one in closed:
            inner = _Walk(self.mesh, self.compiler, times=self.times)
            given = [Value(v.shape, v.dtype, v.split, None, weak=v.weak) for v in own]
            out = inner.block(
                one.jaxpr, [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in one.consts], given
            )
            most = max(most, inner.finish(given, out, reusable=set()).bytes)
            self.moves += inner.moves
            splits = [v.split for v in out]
        outs = self.add("other", eqn, inputs, splits)
        self.nodes[-1].inner = most
        return outs

    # --- counting ------------------------------------------------------------------------------------------------------

    def size(self, value: Value) -> int:
        if not value.size and not value.on_host and not value.inline:
            shape = [
                -(-n // math.prod(self.mesh.get(a, 1) for a in dim)) for n, dim in zip(value.shape, value.split, strict=True)
            ]
            dtype = value.dtype
            try:
                dtype = np.dtype(dtype)
            except TypeError:  # a key is two words
                dtype, shape = np.dtype(np.uint32), [*shape, 2]
            value.size = self.compiler.bytes_of(shape, dtype)
        return value.size

    def finish(
        self,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        *,
        reusable: set[int],
        streamed: Sequence[Value] = (),
        replaced: Sequence[tuple[Value, Value]] = (),
    ) -> Peak:
        """The peak of bytes besides the inputs. ``streamed`` results are written into arrays that the caller counts.

        ``replaced``: inputs that are donated, and the results that take their places.
        """
        for place, node in enumerate(self.nodes):
            node.place = place
        ends = {id(v) for v in outputs}
        self._decide(ends, {id(v) for v in streamed})
        last: dict[int, int] = {}
        values: dict[int, Value] = {}

        def sources(value: Value) -> list[Value]:
            """The arrays in memory that a value is computed from, wherever it is read."""
            found, todo, seen = [], [value], set()
            while todo:
                v = todo.pop()
                if id(v) in seen:
                    continue
                seen.add(id(v))
                if v.node is None or v.node.kept:
                    found.append(v)
                else:
                    todo += v.node.inputs
            return found

        steps = [
            (node, {id(s): s for v in node.inputs for s in sources(v)}) for node in self._in_order(ends, sources) if node.kept
        ]
        for node, read in steps:
            for key, value in read.items():
                last[key] = node.place
                values[key] = value
        end = len(self.nodes)
        for v in outputs:
            for s in sources(v):
                last[id(s)] = end
        ours = {id(v) for v in streamed}
        live: dict[int, int] = {}
        best, where, snapshot = 0, "", []
        if self.compiler.copies:
            live, placed = self._copied(steps, last, replaced, sources)
            ours |= placed
        free_args = {id(v): self.size(v) for v in inputs if id(v) in reusable and id(v) not in live}
        for node, read in steps:
            made = [v for v in node.outputs if id(v) not in ours and (v.readers or id(v) in ends)]
            dying = {k: live[k] for k in read if k in live and last[k] == node.place}
            dying |= {k: free_args[k] for k in read if k in free_args and last.get(k) == node.place}
            fresh = 0
            if node.kind in ("cheap", "dear", "other") and node.name != "turned" and not node.inner:
                pool = sorted(dying.items(), key=lambda item: item[1])
                for v in made:
                    match = next((k for k, n in pool if n == self.size(v)), None)
                    if match is None:
                        fresh += self.size(v)
                    else:
                        pool = [(k, n) for k, n in pool if k != match]
            else:
                fresh = sum(self.size(v) for v in made)
                if node.kind == "product" and not self.compiler.halves:
                    fresh += sum(2 * self.size(v) for v in node.outputs if _is_half(v))
                if node.inner or node.name.startswith("scan"):  # a loop's state changes in place
                    spare = dict(dying)
                    for v in made:
                        match = next((k for k, n in spare.items() if n == self.size(v)), None)
                        if match is not None:
                            fresh -= spare.pop(match)
            now = sum(live.values()) + fresh + node.inner
            if now > best:
                best, where = now, node.name
                snapshot = [(n, values[k].node.name if k in values and values[k].node else "") for k, n in live.items()]
                snapshot += [(self.size(v), node.name) for v in made] + [(node.inner, f"inside {node.name}")] * bool(node.inner)
            for k in dying:
                live.pop(k, None)
            taken = set()
            for v in made:
                reused = next((k for k in dying if k in free_args and k not in taken and free_args[k] == self.size(v)), None)
                if reused is not None:
                    taken.add(reused)
                    free_args.pop(reused)
                    if id(v) in ends:
                        continue
                values[id(v)] = v
                if last.get(id(v), -1) > node.place:
                    live[id(v)] = self.size(v)
        return Peak(best, where, sorted(snapshot, reverse=True)[:12], self.moved())

    def _copied(
        self,
        steps: Sequence[tuple[Node, dict[int, Value]]],
        last: Mapping[int, int],
        replaced: Sequence[tuple[Value, Value]],
        sources: Callable[[Value], list[Value]],
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
        rooms: list[tuple[int, list[tuple[float, float]]]] = []  # (bytes, when they are taken)
        for old, result in replaced:
            [new] = sources(result)
            if new.node is None:  # an argument that is handed on
                continue
            placed.add(id(new))
            own = readers.get(id(old), [])
            if any(above[id(node)] & ~above[id(new.node)] for node in own):
                copies[id(old)] = self.size(old)
                own = []
            read_until = max((node.place for node in own), default=-1)
            rooms.append((self.size(old), [(-1, read_until), (new.node.place, len(self.nodes))]))
        rooms.sort(key=lambda room: room[0])
        others = [v for node, _ in steps for v in node.outputs if id(v) in last and id(v) not in placed]
        for value in sorted(others, key=self.size, reverse=True):
            # Only arithmetic can write where an operand lay.
            begin = value.node.place - (0 if value.node.kind in ("cheap", "dear") else 0.5)
            end = last[id(value)]
            for size, taken in rooms:
                if size >= self.size(value) and all(end <= since or until <= begin for since, until in taken):
                    taken.append((begin, end))
                    placed.add(id(value))
                    break
        return copies, placed

    def _in_order(self, ends: set[int], sources: Callable[[Value], list[Value]]) -> list[Node]:
        """The program's order, but sums, and results that are arithmetic, at once: then what they are made of can go.

        A sum of such a result is computed along with it, from what the result is computed from; and results of one large array
        (a parameter and its moments, of a gradient) are computed together, when all they need is there.
        """
        together: dict[int, float] = {}
        for _ in range(2):
            when: dict[int, float] = {}
            early: dict[int, float] = {}
            places = []
            for place, node in enumerate(self.nodes):
                time: float = place
                if node.kept and not node.inner:
                    read = [s for v in node.inputs for s in sources(v)]
                    if node.kind == "reduce":
                        time = max((early.get(id(s), when.get(id(s), -1)) for s in read), default=-1) + 0.25
                    elif node.kind in ("cheap", "dear") and all(id(v) in ends for v in node.outputs):
                        group = id(max((s for s in read if s.node), key=self.size, default=node))
                        before = max((when.get(id(s), -1) for s in read), default=-1)
                        before = together[group] = max(before, together.get(group, -1))
                        time = before + 0.5
                        early |= {id(v): before for v in node.outputs}
                when |= {id(v): time for v in node.outputs}
                places.append(time)
        for node, time in zip(self.nodes, places, strict=True):
            node.place = time
        found = sorted(self.nodes, key=lambda node: node.place)
        for place, node in enumerate(found):
            node.place = place
        return found

    def _narrows(self, node: Node) -> bool:
        """Whether it rounds what was dear to compute: of the two the narrower is kept."""
        wide = node.inputs[0] if node.inputs else None
        rounds = node.name.startswith("convert_element_type") and node.costly and len(wide.readers) == 1
        return rounds and _width(node.outputs[0]) < _width(wide)

    def _is_kept_for_several(self, node: Node) -> bool:
        """Whether a result that several read is worth an array."""
        name = node.name.split()[0]
        if name == "logistic" and (self.compiler.recomputes_logistic or node.again):
            return False
        if self._narrows(node):
            return True
        return node.kind == "dear" or (name in ARITHMETIC and not self.compiler.recomputes)

    def _decide(self, ends: set[int], streamed: set[int]) -> None:
        """Marks the nodes whose results become arrays, from the last to the first."""
        updates: set[int] = set()  # kept nodes: results that are arithmetic
        sums: set[int] = set()
        reach: dict[int, frozenset[int]] = {}  # value -> the kept nodes that it is computed inside of
        for node in reversed(self.nodes):
            readers = {id(r): r for v in node.outputs for r in v.readers}
            at_end = any(id(v) in ends and id(v) not in streamed for v in node.outputs)
            inside: set[int] = set()
            stored = at_end
            for r in readers.values():
                if not r.kept:
                    inside |= reach[id(r)]
                elif r.kind in ("cheap", "dear", "reduce") or r.kind == "product" and self.compiler.into_products:
                    inside.add(id(r))
                else:
                    stored = True
            stream = any(id(v) in streamed for v in node.outputs)
            if stream:
                inside.add(-id(node))
            if node.kind == "alias":  # one array under two names: stored where its source is
                reach[id(node)] = frozenset({STORED, *inside} if stored or node.holds else inside)
                continue
            stored |= STORED in inside
            inside.discard(STORED)
            if not stored and inside & updates and inside <= updates | sums and not self._narrows(node):
                # Parameters and moments come of one fusion, and sums of what they are made of have it inside.
                inside = {min(inside)}
            if node.kind in ("other", "product", "reduce") or _is_running_sum(node):
                node.kept = bool(readers) or at_end or stream
                if node.kind == "product" and self.compiler.halves and not at_end:
                    node.outputs[0].inline = _becomes_another(node)
            elif node.free:  # constants and counters are made wherever they are read, in loops too
                node.kept = at_end
            elif self._is_kept_for_several(node):
                node.kept = stored or len(inside) > 1
            else:
                node.kept = stored
            if not node.kept:
                reach[id(node)] = frozenset(inside)
            elif node.kind == "reduce":
                sums.add(id(node))
            elif at_end and node.kind in ("cheap", "dear"):
                updates.add(id(node))


def _pairs(given: Sequence[Value], outputs: Sequence[Value]) -> list[tuple[Value, Value]]:
    """Donated inputs, each with the result that takes its place: the next of its kind, as JAX matches them."""
    free: dict[tuple, list[Value]] = {}
    for v in reversed(outputs):
        if not v.on_host:
            free.setdefault((v.shape, v.dtype), []).append(v)
    return [(v, free[v.shape, v.dtype].pop()) for v in given if free.get((v.shape, v.dtype))]


def _axes(split: Split) -> set[str]:
    return {a for dim in split for a in dim}


def _wanted(value: Value) -> set[str]:
    """The mesh axes that a result is pinned to, by the first constraint on its way."""
    readers = value.readers
    while value.outer or len(readers) == 1 and readers[0].name.split()[0] in PASSES:
        value = value.outer or readers[0].outputs[0]
        readers = value.readers
    pinned = [r for r in readers if r.name.startswith("sharding_constraint")]
    return _axes(pinned[0].outputs[0].split) if pinned and len(readers) == 1 else set()


def _becomes_another(product: Node) -> bool:
    """Whether all that becomes of a product is arithmetic whose result is an array: that is what is written."""
    readers = product.outputs[0].readers
    while len(readers) == 1 and readers[0].kind in ("cheap", "dear", "alias"):
        if readers[0].kept:
            return readers[0].name.startswith("convert_element_type")
        readers = readers[0].outputs[0].readers
    return False


def _is_half(value: Value) -> bool:
    return np.dtype(value.dtype).itemsize == 2


def _turned(numbers: Any, ranks: Sequence[int]) -> list[bool]:
    """Of a product's operands, which are transposed first.

    Products of matrices are done as they are. Of others XLA for CPUs makes such products: [batch, free, summed] on the left,
    [batch, summed, free] on the right (its DotDecomposer).
    """
    sums, batches = numbers
    n = len(batches[0])
    if len(sums[0]) == 1 and all(tuple(b) == tuple(range(n)) for b in batches) and max(ranks) <= n + 2:
        return [False, False]
    found = []
    for side, (summed, batch, rank) in enumerate(zip(sums, batches, ranks, strict=True)):
        free = [i for i in range(rank) if i not in (*summed, *batch)]
        order = (*batch, *summed, *free) if side else (*batch, *free, *summed)
        found.append(order != tuple(range(rank)))
    return found


def _erfc(x: jax.Array) -> jax.Array:
    """As XLA expands it, in what is dear of it: one exponential, which the derivative shares, and two divisions."""
    far = jnp.exp(-jax.lax.square(x)) * (1 / jnp.abs(x))
    return jnp.where(jnp.abs(x) > 1, far, 1 - x / (x * x + 1))


def _width(value: Value) -> int:
    return np.dtype(value.dtype).itemsize


def _is_running_sum(node: Node) -> bool:
    """Whether it adds to a sum of cotangents: kept, since else all that is added would have to be."""
    return node.name.startswith("add_any ") and any(v.node and v.node.name.startswith("add_any ") for v in node.inputs)


class _Inline:
    """A walk inside a region where some axes are manual, writing into the walk around it."""

    def __init__(self, outer: _Walk, mesh: dict[str, int]):
        self.walk = _Walk(mesh, outer.compiler, times=outer.times)
        self.walk.nodes, self.walk.moves, self.walk.sizes = outer.nodes, outer.moves, outer.sizes


def _title(eqn: Any) -> str:
    stack = str(eqn.source_info.name_stack)
    shapes = ",".join(getattr(v.aval, "str_short", lambda: "")() for v in eqn.outvars[:2])
    return f"{eqn.primitive.name} {shapes} {stack}"


def split_of(spec: jax.sharding.PartitionSpec, rank: int) -> Split:
    dims = [() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in spec]
    return (*dims, *[()] * (rank - len(dims)))


def _joined(values: Sequence[Value], shape: Sequence[int]) -> Split:
    """Of element-wise arithmetic: what any operand is split over; an axis goes to one dimension, the stronger operand's."""
    split: list[tuple[str, ...]] = [()] * len(shape)
    used: set[str] = set()
    for value in sorted(values, key=lambda v: v.weak):
        for i, dim in enumerate(value.split):
            if not split[i] and value.shape[i] == shape[i] and not used & set(dim):
                split[i] = dim
                used |= set(dim)
    return tuple(split)


def _reshaped(old: Sequence[int], new: Sequence[int], split: Split, mesh: Mapping[str, int]) -> Split:
    """An axis stays with the leading new dimension of the group that its old one is part of, where it divides that."""
    found: list[tuple[str, ...]] = [()] * len(new)
    i = j = 0
    while i < len(old) and j < len(new):
        a, b, i2, j2 = old[i], new[j], i + 1, j + 1
        while a != b:
            if a < b and i2 < len(old):
                a, i2 = a * old[i2], i2 + 1
            elif b < a and j2 < len(new):
                b, j2 = b * new[j2], j2 + 1
            else:
                break
        axes = [x for k in range(i, i2) for x in split[k]]
        if i2 - i == 1 or split[i]:
            for k in range(j, j2):
                places = math.prod(mesh.get(x, 1) for x in axes)
                if axes and new[k] % places == 0:
                    found[k], axes = tuple(axes), []
        else:
            for k in range(i, i2):  # a dimension inside the group: the new one of the same size keeps it
                for m in range(j, j2):
                    if split[k] and new[m] == old[k] and not found[m]:
                        found[m] = split[k]
        i, j = i2, j2
    return tuple(found)
