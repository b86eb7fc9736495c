"""What a step holds at its fullest moment, on one device, without compiling it.

The step's jaxpr is walked once. Every array is followed with the mesh axes that split its dimensions (batch, fsdp and model
spread from the arguments and from the constraints in the program as XLA's partitioner spreads them), so that sizes are those of
one device. Then it is decided what becomes an array in memory at all: XLA fuses element-wise arithmetic, broadcasts and
slices into whoever reads them, and keeps the results of products, reductions and loops, what crosses a loop's border, and what
is too dear to compute for each reader again. A last pass counts what lives at the same time, in program order, a result taking
its place over from an operand that is read for the last time, as donated arguments are.

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


STORED = -1  # among the readers that a value is computed inside of: one that wants an array
ARITHMETIC = {"add", "add_any", "sub", "mul", "max", "min", "integer_pow", "square", "select_n"}


class Compiler(NamedTuple):
    """How a compiler lays out and fuses."""

    bytes_of: Callable[[Sequence[int], np.dtype], int]  # (shape on a device, dtype) -> bytes in memory
    into_products: bool  # element-wise operands are computed inside a matrix product
    recomputes: bool  # cheap arithmetic is computed again for each of its readers
    recomputes_logistic: bool  # and so are sigmoids, as TPUs from v5e on were seen to do
    halves: bool  # it multiplies 16-bit numbers; else it widens them to float32 first


class Value:
    """An array of the program, on one device."""

    __slots__ = ("shape", "split", "dtype", "node", "readers", "weak", "size")

    def __init__(self, shape: Sequence[int], dtype: Any, split: Split, node: "Node | None", *, weak: bool = False):
        self.shape, self.dtype, self.split, self.node, self.weak = tuple(shape), dtype, split, node, weak
        self.readers: list[Node] = []
        self.size = 0


class Node:
    """An instruction. ``kind``: cheap, dear, reduce, product, alias or other (which stands for itself)."""

    __slots__ = ("kind", "name", "inputs", "outputs", "inner", "place", "kept")

    def __init__(self, kind: str, name: str, inputs: list[Value]):
        self.kind, self.name, self.inputs, self.outputs, self.inner = kind, name, inputs, [], 0
        self.place, self.kept = 0, False


class Peak(NamedTuple):
    """The fullest moment of a step."""

    bytes: int  # besides the arguments
    where: str  # the instruction
    largest: list[tuple[int, str]]  # (bytes, what) of the largest arrays that live then


def peak(closed: Any, splits: Sequence[Split], mesh: Mapping[str, int], donated: Sequence[bool], compiler: Compiler) -> Peak:
    """Of a jaxpr whose arguments are split over a mesh (axis -> size) as ``splits`` says.

    Args:
      donated: for each argument, whether a result may take its place.
    """
    jaxpr = closed.jaxpr
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    walk = _Walk(dict(mesh), compiler)
    split = [s for s, u in zip(splits, used, strict=True) if u]
    free = [d for d, u in zip(donated, used, strict=True) if u]
    inputs = [Value(v.aval.shape, v.aval.dtype, s, None) for v, s in zip(jaxpr.invars, split, strict=True)]
    constants = [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in closed.consts]
    outputs = walk.block(jaxpr, constants, inputs)
    return walk.finish(inputs, outputs, reusable={id(v) for v, f in zip(inputs, free, strict=True) if f})


class _Walk:
    """One computation: the step itself, or a loop's body."""

    def __init__(self, mesh: dict[str, int], compiler: Compiler):
        self.mesh, self.compiler = mesh, compiler
        self.nodes: list[Node] = []

    # --- building ------------------------------------------------------------------------------------------------------

    def block(self, jaxpr: Any, constants: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
        env = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, inputs, strict=True))

        def read(v: Any) -> Value:
            if isinstance(v, jex.core.Literal):
                return Value(np.shape(v.val), v.aval.dtype, ((),) * np.ndim(v.val), None, weak=True)
            return env[v]

        for eqn in jaxpr.eqns:
            for var, value in zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars]), strict=True):
                env[var] = value
        return [read(v) for v in jaxpr.outvars]

    def add(self, kind: str, eqn: Any, inputs: list[Value], splits: Sequence[Split], *, weak: bool = False) -> list[Value]:
        node = Node(kind, _title(eqn), inputs)
        node.outputs = [
            Value(v.aval.shape, getattr(v.aval, "dtype", np.int32), s, node, weak=weak)
            for v, s in zip(eqn.outvars, splits, strict=True)
        ]
        for value in inputs:
            value.readers.append(node)
        self.nodes.append(node)
        return node.outputs

    def equation(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        name, params = eqn.primitive.name, eqn.params
        ranks = [len(getattr(v.aval, "shape", ())) for v in eqn.outvars]
        if name in CALLS:
            inner = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
            if hasattr(inner, "jaxpr"):
                constants = [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in inner.consts]
                return self.block(inner.jaxpr, constants, inputs)
            return self.block(inner, [], inputs)
        if name == "shard_map":
            return self.manual(params, inputs)
        if name == "scan":
            return self.scan(eqn, inputs)
        if name in ("while", "cond"):
            return self.branch(eqn, inputs)
        if name == "sharding_constraint":
            wanted = split_of(params["sharding"].spec, ranks[0])
            split = tuple(tuple(a for a in dim if a in self.mesh) for dim in wanted)
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
        if name == "dot_general":
            return self.add("product", eqn, inputs, [self.product(params["dimension_numbers"], *inputs)])
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
            return self.add("reduce", eqn, inputs, [split] * len(ranks))
        if name in COLLECTIVES:
            return self.add("other", eqn, inputs, [v.split for v in inputs])
        kind = "cheap" if name in CHEAP else "dear" if name in DEAR else "other"
        splits = []
        for var, rank in zip(eqn.outvars, ranks, strict=True):
            shape = getattr(var.aval, "shape", ())
            splits.append(_joined([v for v in inputs if len(v.shape) == rank], shape))
        weak = all(v.weak for v in inputs)
        return self.add(kind, eqn, inputs, splits, weak=weak)

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
        n_consts, n_carry, length = p["num_consts"], p["num_carry"], p["length"]
        body, closed = p["jaxpr"].jaxpr, p["jaxpr"].consts
        consts, carry, xs = inputs[:n_consts], inputs[n_consts : n_consts + n_carry], inputs[n_consts + n_carry :]
        constants = [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in closed]
        if p["unroll"] >= length:
            ys: list[list[Value]] = []
            for _ in range(length):
                rows = [self.sliced(x, v) for x, v in zip(xs, body.invars[n_consts + n_carry :], strict=True)]
                out = self.block(body, constants, [*consts, *carry, *rows])
                carry = out[:n_carry]
                ys.append(out[n_carry:])
            stacked = []
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
            inner = _Walk(self.mesh, self.compiler)
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
        if not self.compiler.halves:
            for v in outs[n_carry:]:
                v.dtype = np.dtype(np.float32) if v.dtype == jnp.bfloat16 else v.dtype
        return outs

    def sliced(self, x: Value, var: Any) -> Value:
        node = Node("cheap", "slice", [x])
        node.outputs = [Value(var.aval.shape, var.aval.dtype, x.split[1:], node)]
        x.readers.append(node)
        self.nodes.append(node)
        return node.outputs[0]

    def branch(self, eqn: Any, inputs: list[Value]) -> list[Value]:
        """A loop of unknown length, or one of several branches: the fullest of the computations."""
        p = eqn.params
        if eqn.primitive.name == "while":
            closed, own = [p["body_jaxpr"]], inputs[p["cond_nconsts"] :]
        else:
            closed, own = list(p["branches"]), inputs[1:]
        most, splits = 0, None
        for one in closed:
            inner = _Walk(self.mesh, self.compiler)
            given = [Value(v.shape, v.dtype, v.split, None, weak=v.weak) for v in own]
            out = inner.block(
                one.jaxpr, [Value(np.shape(c), np.result_type(c), ((),) * np.ndim(c), None) for c in one.consts], given
            )
            most = max(most, inner.finish(given, out, reusable=set()).bytes)
            splits = [v.split for v in out]
        outs = self.add("other", eqn, inputs, splits)
        self.nodes[-1].inner = most
        return outs

    # --- counting ------------------------------------------------------------------------------------------------------

    def size(self, value: Value) -> int:
        if not value.size and value.shape is not None:
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
    ) -> Peak:
        """The peak of bytes besides the inputs. ``streamed`` results are written into arrays that the caller counts."""
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

        steps = []
        for node in self.nodes:
            if not node.kept:
                continue
            read = {id(s): s for v in node.inputs for s in sources(v)}
            for key, value in read.items():
                last[key] = node.place
                values[key] = value
            steps.append((node, read))
        end = len(self.nodes)
        for v in outputs:
            for s in sources(v):
                last[id(s)] = end
        ours = {id(v) for v in streamed}
        live: dict[int, int] = {}
        best, where, snapshot = 0, "", []
        free_args = {id(v): self.size(v) for v in inputs if id(v) in reusable}
        for node, read in steps:
            made = [v for v in node.outputs if id(v) not in ours and (v.readers or id(v) in ends)]
            dying = {k: live[k] for k in read if k in live and last[k] == node.place}
            dying |= {k: free_args[k] for k in read if k in free_args and last.get(k) == node.place}
            fresh = 0
            if node.kind in ("cheap", "dear", "other") and not node.inner:
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
                    wide = [v for v in (*node.inputs, *node.outputs) if np.dtype(v.dtype).itemsize == 2]
                    fresh += sum(2 * self.size(v) for v in wide)
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
        return Peak(best, where, sorted(snapshot, reverse=True)[:12])

    def _is_kept_for_several(self, node: Node) -> bool:
        """Whether a result that several read is worth an array."""
        name = node.name.split()[0]
        if name == "logistic" and self.compiler.recomputes_logistic:
            return False
        return node.kind == "dear" or (name in ARITHMETIC and not self.compiler.recomputes)

    def _decide(self, ends: set[int], streamed: set[int]) -> None:
        """Marks the nodes whose results become arrays, from the last to the first."""
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
                reach[id(node)] = frozenset({STORED, *inside} if stored else inside)
                continue
            stored |= STORED in inside
            inside.discard(STORED)
            if node.kind in ("other", "product", "reduce"):
                node.kept = bool(readers) or at_end or stream
            elif self._is_kept_for_several(node):
                node.kept = stored or len(inside) > 1
            else:
                node.kept = stored
            if not node.kept:
                reach[id(node)] = frozenset(inside)


class _Inline:
    """A walk inside a region where some axes are manual, writing into the walk around it."""

    def __init__(self, outer: _Walk, mesh: dict[str, int]):
        self.walk = _Walk(mesh, outer.compiler)
        self.walk.nodes = outer.nodes


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
