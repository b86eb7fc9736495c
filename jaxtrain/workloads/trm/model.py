"""The tiny recursive model (Jolicoeur-Martineau 2025): one small net, applied repeatedly.

It improves an answer and a thought.

A row is a puzzle: S cells in, S cells out. Two states, z_h (the answer) and z_l (the thought), are
refined in cycles: z_l <- net(z_l + z_h + x) some times, then z_h <- net(z_h + z_l). One supervision
step is H such cycles, of which only the last is differentiated. The others run on stopped values,
and nothing of them is kept for the backward pass. `loss` says how rows pass through such steps.

The net is two post-norm blocks: a mixer over positions (a SwiGLU along the sequence, or attention),
then a SwiGLU along the channels. Its norm has no weights.

Shapes: B batch, S cells, P puzzle tokens, T = P + S tokens, D embed, H heads, K head dimension,
M inner width of the channel MLP, N inner width of the token MLP, V symbols, L layers.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import ModelSection
from jaxtrain.nn import attention, remat
from jaxtrain.nn.layers import product, rotate
from jaxtrain.specs import fan_in, ones, truncated_normal, zeros
from jaxtrain.types import OF_DATA, Array, Export, OfData, PyTree, Shard, Spec
from loaders.io import checks
from loaders.sudoku.puzzles import kind_of

MIXERS = ("mlp", "attention")
POSITIONS = ("none", "rope", "learned")
LOSSES = ("stablemax", "softmax")
CONTRACTS = ("deep", "last")
DTYPES = ("float32", "bfloat16")
EPS = 1e-5  # of the norms
IGNORED = -100  # a label that is left out of loss and accuracy
Q_BIAS = -5.0  # the q-head starts closed: nothing halts before it has learned to
EXPORT = Export(model_state="^init_[hl]$")  # the states that a board begins with
Cycles = tuple[int, int]  # high, low


@dataclass(frozen=True)
class Config(ModelSection):
    """The published Sudoku model by default."""

    on_resume = checks.OnResume(
        checks.FUNCTION,
        free=("n_difficulties", "remat", "rollouts", "noise", "symmetry", "test_steps", "residual"),
        state=(
            *(
                "contract",
                "n_cells",
                "vocab",
                "n_puzzles",
                "mixer",
                "embed",
                "depth",
                "expansion",
                "inner_multiple",
            ),
            *("puzzle_tokens", "puzzle_embed"),
        ),
    )

    n_cells: OfData[int] = OF_DATA  # [cells] number of cells of a puzzle; None = as the data have
    vocab: OfData[int] = OF_DATA  # [symbols] number of symbols of inputs and outputs; 0 is padding
    n_puzzles: OfData[int] = OF_DATA  # [ids] rows of the puzzle embedding
    # [classes] number of classes of difficulty by which the exact accuracy is reported
    n_difficulties: OfData[int] = OF_DATA
    # [name] mixer of the cells: mlp (a SwiGLU along the sequence) or attention
    mixer: str = "mlp"
    positions: str = "none"  # [name] kind of positions: none, rope (attention only) or learned
    embed: int = 512  # [values] width of a token
    heads: int = 8  # [heads] number of heads of the attention
    depth: int = 2  # [layers] number of layers of the net that both states share
    # [1] inner width is two thirds of this times the width, rounded up to inner_multiple
    expansion: float = 4.0
    inner_multiple: int = 256  # [values] multiple to which the inner width is rounded up
    # [tokens] number of tokens before the cells, which hold the puzzle's embedding
    puzzle_tokens: int = 16
    puzzle_embed: int = 512  # [values] size of a puzzle's embedding
    rope_theta: float = 1e4  # [1] longest wavelength of the rotary positions, over 2 pi
    # [cycles] number of cycles of the answer in a supervision step, of which the last is
    # differentiated
    cycles_high: int = 3
    cycles_low: int = 6  # [cycles] number of cycles of the thought in each cycle of the answer
    # [cycles] number of cycles of the answer at step 0 of a curriculum; 0 = cycles_high
    first_high: int = 0
    # [cycles] number of cycles of the thought at step 0 of a curriculum; 0 = cycles_low
    first_low: int = 0
    growth: int = 0  # [steps] length of the linear growth of the cycles; 0 = no curriculum
    # [steps] length of the growth of the cycles of the thought; None = growth
    growth_low: int | None = None
    # [name] kind of training: deep (a loss after each supervision step), or last (one after the
    # last step of a detached history)
    contract: str = "deep"
    # [supervision steps] number of supervision steps after which a row is always done. An
    # evaluation takes all
    halt_steps: int = 16
    # [supervision steps] smallest number of supervision steps that contract last draws; 0 =
    # halt_steps
    least_steps: int = 0
    # [supervision steps] largest number of supervision steps at step 0, of contract last; 0 =
    # halt_steps
    first_steps: int = 0
    # [steps] length of the growth from first_steps to halt_steps; 0 = no curriculum
    growth_steps: int = 0
    # [probability] probability that a row ignores the q-head for a random number of steps
    explore: float = 0.1
    # [probability] the same probability at the end of the run, reached linearly; None = explore
    explore_end: float | None = None
    # [bool] halt by comparing with the value of another step, learned from one more forward pass
    q_continue: bool = False
    # [passes] passes over a board in an evaluation, all but the first with noise or symmetry; the
    # head chooses
    rollouts: int = 1
    # [1] standard deviation added to both states before each supervision step of rollouts, whose
    # size is 1
    noise: float = 0.0
    # [bool] each rollout sees the board with lines in another order, turned, or other digits
    symmetry: bool = False
    # [supervision steps] number of supervision steps of an evaluation; 0 = halt_steps
    test_steps: int = 0
    # [1] an evaluation stops a board at a smaller change of its state, as a fixed point; 0 = never
    residual: float = 0.0
    loss: str = "stablemax"  # [name] kind of cross-entropy of the cells: stablemax or softmax
    # [name] type of activations and matrix products; parameters, norms and losses are float32
    dtype: str = "bfloat16"
    # [name] recomputation in the backward pass: none, or full (each application of the net)
    remat: str = "none"

    def validate(self) -> Iterator[tuple[str, str]]:
        counts = (
            "embed",
            "heads",
            "depth",
            "inner_multiple",
            "cycles_high",
            "cycles_low",
            "halt_steps",
        )
        yield from checks.at_least(self, 1, *counts)
        yield from checks.not_negative(
            self, "puzzle_tokens", "puzzle_embed", "first_high", "first_low", "growth"
        )
        yield from checks.choice(self, MIXERS, "mixer")
        yield from checks.choice(self, POSITIONS, "positions")
        yield from checks.choice(self, LOSSES, "loss")
        yield from checks.choice(self, DTYPES, "dtype")
        yield from checks.choice(self, remat.WHOLE, "remat")
        if self.mixer == "attention" and self.heads > 0 and self.embed % (2 * self.heads):
            yield (
                "heads",
                f"is {self.heads}; embed={self.embed} must be an even number of values for each",
            )
        if self.mixer == "mlp" and self.positions == "rope":
            yield (
                "positions",
                (
                    "is 'rope', which turns queries and keys, and mixer='mlp' has none; use 'none'"
                    " or 'learned'"
                ),
            )
        if self.puzzle_embed > self.puzzle_tokens * self.embed:
            yield (
                "puzzle_embed",
                (
                    f"is {self.puzzle_embed}, more than puzzle_tokens × embed ="
                    f" {self.puzzle_tokens * self.embed}"
                ),
            )
        yield from self._contract_problems()
        explore = ("explore",) if self.explore_end is None else ("explore", "explore_end")
        yield from checks.within(self, "[0, 1]", *explore)
        curricula = (
            ("first_high", "cycles_high", "growth"),
            ("first_low", "cycles_low", "growth" if self.growth_low is None else "growth_low"),
            ("first_steps", "halt_steps", "growth_steps"),
        )
        for first, last, growth in curricula:
            n = getattr(self, first)
            if n and not getattr(self, growth):
                yield (
                    first,
                    (
                        f"is {n}, and {growth}=0 means no curriculum; set {growth} to its length in"
                        " steps"
                    ),
                )
            if n > getattr(self, last):
                yield first, f"is {n}, more than {last}={getattr(self, last)}"
        for growth in dict.fromkeys(growth for *_, growth in curricula):
            grown = [first for first, _, of in curricula if of == growth]
            if getattr(self, growth) and not any(getattr(self, first) for first in grown):
                yield (
                    growth,
                    (
                        f"is {getattr(self, growth)}, and nothing grows; set {' or '.join(grown)},"
                        f" or {growth}=0"
                    ),
                )

    def _contract_problems(self) -> Iterator[tuple[str, str]]:
        yield from checks.choice(self, CONTRACTS, "contract")
        yield from checks.at_least(self, 1, "rollouts")
        yield from checks.not_negative(self, "noise", "residual", "test_steps")
        for name in ("noise", "residual"):
            if math.isinf(getattr(self, name)):
                yield name, "is infinite; set a number"
        if self.rollouts > 1 and not (self.noise or self.symmetry):
            yield (
                "rollouts",
                (
                    f"is {self.rollouts}, and all would be the same; set symmetry=True, or noise,"
                    " for example 0.3"
                ),
            )
        if self.rollouts == 1 and (self.noise or self.symmetry):
            name = "noise" if self.noise else "symmetry"
            yield (
                name,
                (
                    f"is {getattr(self, name)} with rollouts=1, and the first has none; set"
                    " rollouts, for example 16"
                ),
            )
        yield from checks.not_negative(self, "least_steps", "first_steps", "growth_steps")
        yield from checks.not_negative(self, *(() if self.growth_low is None else ("growth_low",)))
        if self.contract == "deep":
            for name in ("least_steps", "first_steps", "growth_steps"):
                if getattr(self, name):
                    yield (
                        name,
                        (
                            f"is {getattr(self, name)}, of contract='last' alone; contract='deep'"
                            " has it from its halting"
                        ),
                    )
            return
        for name, unused in (("q_continue", False), ("explore_end", None)):
            if getattr(self, name) != unused:
                yield (
                    name,
                    (
                        f"is {getattr(self, name)}, of contract='deep' alone: no row of"
                        " contract='last' halts in training"
                    ),
                )
        most = self.first_steps or self.halt_steps
        if self.least_steps > most:
            yield "least_steps", f"is {self.least_steps}, more than the {most} steps that there are"

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("n_cells", "vocab", "n_puzzles", "n_difficulties"):
            value, needed = getattr(self, name), info.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif needed is not None and (value < needed or (name == "n_cells" and value != needed)):
                yield (
                    name,
                    f"is {value}, and the data need {needed}; config.model.{name}=None takes that",
                )

        if self.symmetry and not kind_of(self.n_cells or 0, self.vocab or 0):
            yield (
                "symmetry",
                (
                    f"is True, and no kind of puzzle has {self.n_cells} cells and {self.vocab}"
                    " symbols; use noise"
                ),
            )
        elif self.symmetry and self.n_puzzles != 1:
            yield (
                "symmetry",
                (
                    f"is True, of boards of one kind, and the data have {self.n_puzzles} ids of"
                    " puzzles; use noise"
                ),
            )

    @property
    def n_tokens(self) -> int:
        return self.puzzle_tokens + self.n_cells

    @property
    def cycles(self) -> Cycles:
        return self.cycles_high, self.cycles_low

    def inner(self, width: int) -> int:
        """Inner width of a SwiGLU: 2/3 of the usual, as it has three matrices (Shazeer 2020)."""
        return (
            -(-round(self.expansion * width * 2 / 3) // self.inner_multiple) * self.inner_multiple
        )


def make_specs(c: Config) -> PyTree:
    d, t, l, v, h, k = c.embed, c.n_tokens, c.depth, c.vocab, c.heads, c.embed // c.heads
    m, n = c.inner(d), c.inner(t)
    if c.mixer == "mlp":
        mixer = {
            "w_mix_up": Spec((l, t, 2, n), ("layer", "seq", None, "mlp"), fan_in(t)),
            "w_mix_down": Spec((l, n, t), ("layer", "mlp", "seq"), fan_in(n)),
        }
    else:
        mixer = {
            "w_qkv": Spec(
                (l, d, 3, h, k), ("layer", "embed", None, "heads", "head_dim"), fan_in(d)
            ),
            "w_out": Spec((l, h, k, d), ("layer", "heads", "head_dim", "embed"), fan_in(d)),
        }
    return {
        "net": {
            **mixer,
            "w_up": Spec((l, d, 2, m), ("layer", "embed", None, "mlp"), fan_in(d)),
            "w_down": Spec((l, m, d), ("layer", "mlp", "embed"), fan_in(m)),
        },
        "w_cells": Spec((v, d), (None, "embed"), fan_in(d)),
        "w_symbols": Spec((d, v), ("embed", None), fan_in(d)),
        "w_q": Spec((d, 2), ("embed", None), zeros),
        "b_q": Spec((2,), (None,), jax.nn.initializers.constant(Q_BIAS)),
        **({"pos": Spec((t, d), ("seq", "embed"), fan_in(d))} if c.positions == "learned" else {}),
        **(
            {"puzzle": {"w_rows": Spec((c.n_puzzles, c.puzzle_embed), ("item", None), zeros)}}
            if c.puzzle_embed
            else {}
        ),
    }


def make_model_state(c: Config, batch: int) -> PyTree:
    """Return a slot for each row of the batch, all done, the fixed initial states, and the step.

    The step is for the annealing.

    Of the contract "last", each step begins with its own rows: it has no slots.
    """
    begin = {f"init_{k}": Spec((c.embed,), (None,), truncated_normal(1.0)) for k in "hl"}
    begin["step"] = Spec((), (), zeros, "int32")
    if c.contract == "last":
        return begin
    z = Spec((batch, c.n_tokens, c.embed), ("batch", "seq", None), zeros, c.dtype)
    cells = Spec((batch, c.n_cells), ("batch", None), zeros, "int32")
    count = Spec((batch,), ("batch",), zeros, "int32")
    return {
        "z_h": z,
        "z_l": z,
        "steps": count,  # supervision steps of the slot's row
        "halted": Spec((batch,), ("batch",), ones, "bool"),
        "inputs": cells,
        "labels": cells,
        "puzzle": count,
        **begin,
    }


def start(c: Config, model_state: PyTree, n: int, shard: Shard) -> dict[str, Array]:
    """Return the states of rows that begin, z_h and z_l, [B, T, D]."""
    z = {
        f"z_{k}": jnp.broadcast_to(model_state[f"init_{k}"], (n, c.n_tokens, c.embed)) for k in "hl"
    }
    # Pinned from the start: XLA's partitioner would choose a layout of the loop's state by itself,
    # and another for the logits.
    return {name: shard(x.astype(c.dtype), "batch", "seq", None) for name, x in z.items()}


def rms_norm(x: Array, axis: int) -> Array:
    """Compute x / sqrt(mean(x^2) + eps) along ``axis``, in float32 (Zhang & Sennrich 2019)."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(axis, keepdims=True) + EPS)).astype(x.dtype)


def angles(c: Config) -> tuple[Array, Array]:
    """Return cos and sin [1, T, 1, K / 2] of the angles t theta^(-2i/K) (Su et al. 2021)."""
    k = c.embed // c.heads
    angle_tf = np.arange(c.n_tokens)[:, None] * c.rope_theta ** (-np.arange(0, k, 2) / k)[None]
    cos, sin = (jnp.asarray(f(angle_tf), jnp.float32)[None, :, None] for f in (np.cos, np.sin))
    return cos, sin


def products(equation: str, x: Array, w: Array, shard: Shard, *axes: str | None) -> list[Array]:
    """Compute `product` with each matrix side by side along w's dimension c, of result ``axes``.

    For CPUs they are products of their own: of one that is cut, the gradient's parts are padded to
    its size and added up there. Elsewhere one product fills the device better.
    """
    of_y = equation.split("->")[1]
    at_w, at_y = equation.split("->")[0].split(",")[1].index("c"), of_y.index("c")
    each = range(w.shape[at_w])
    if shard.devices[0] == "cpu":
        one = equation.replace("c", "")
        return [
            shard(product(one, x, jax.lax.index_in_dim(w, i, at_w, keepdims=False), shard), *axes)
            for i in each
        ]
    y = shard(product(equation, x, w, shard), *axes[:at_y], None, *axes[at_y:])
    return [jax.lax.index_in_dim(y, i, at_y, keepdims=False) for i in each]


def mix(up_tcn: Array, down_nt: Array, x_btd: Array, shard: Shard) -> Array:
    """Return the feed-forward net along a row's tokens, with its norm."""
    axes = ("batch", None, "mlp")
    # tokens last, or each product is written out once more, transposed
    if shard.devices[0] != "tpu":
        x_bdt = x_btd.swapaxes(1, 2)
        gate_bdn, y_bdn = products("bdt,tcn->bdcn", x_bdt, up_tcn, shard, *axes)
        y_bdt = product("bdn,nt->bdt", jax.nn.silu(gate_bdn) * y_bdn, down_nt, shard)
        return rms_norm(x_bdt + y_bdt, 2).swapaxes(1, 2)
    gate_bdn, y_bdn = products("btd,tcn->bcdn", x_btd, up_tcn, shard, *axes)
    return rms_norm(x_btd + jnp.einsum("bdn,nt->btd", jax.nn.silu(gate_bdn) * y_bdn, down_nt), 1)


def net(c: Config, w: PyTree, x_btd: Array, shard: Shard) -> Array:
    """Apply the net to the sum of states and inputs. ``w`` has the activations' dtype."""
    for l in range(c.depth):
        with jax.named_scope("mix"):
            if c.mixer == "mlp":
                x_btd = mix(w["w_mix_up"][l], w["w_mix_down"][l], x_btd, shard)
            else:
                axes = ("batch", "seq", "heads", "head_dim")
                q_bthk, k_bthk, v_bthk = products(
                    "btd,dchk->btchk", x_btd, w["w_qkv"][l], shard, *axes
                )
                if c.positions == "rope":
                    q_bthk, k_bthk = (rotate(x_bthk, angles(c)) for x_bthk in (q_bthk, k_bthk))
                y_bthk = attention.within(shard, q_bthk, k_bthk, v_bthk, policy=c.remat)
                x_btd = rms_norm(x_btd + product("bthk,hkd->btd", y_bthk, w["w_out"][l], shard), 2)
        with jax.named_scope("mlp"):
            gate_btm, y_btm = products(
                "btd,dcm->btcm", x_btd, w["w_up"][l], shard, "batch", "seq", "mlp"
            )
            x_btd = rms_norm(
                x_btd
                + product("btm,md->btd", jax.nn.silu(gate_btm) * y_btm, w["w_down"][l], shard),
                2,
            )
    return shard(x_btd, "batch", "seq", None)


def refine(
    c: Config, params: PyTree, rows: Mapping[str, Array], cycles: Cycles, shard: Shard
) -> tuple[Array, ...]:
    """One supervision step on the slots' states.

    Returns new (z_h, z_l, logits [B, S, V] float32, q [B, 2] float32).

    Gradients reach the parameters through the last cycle alone.
    """
    dtype = jnp.dtype(c.dtype)
    w = jax.tree.map(lambda x: x.astype(dtype), params["net"])
    with jax.named_scope("embed"):
        x_btd = embed(c, params, rows["inputs"], rows["puzzle"], shard)
    high, low = cycles

    def cycle(
        w: PyTree, x_btd: Array, z: tuple[Array, Array], unroll: int | bool
    ) -> tuple[Array, Array]:
        apply: Callable[..., Array] = functools.partial(net, c, shard=shard)
        apply = jax.checkpoint(apply) if c.remat == "full" and unroll is True else apply
        z_h, z_l = z
        z_l, _ = jax.lax.scan(
            lambda z_l, _: (apply(w, z_l + z_h + x_btd), None), z_l, length=low, unroll=unroll
        )
        return apply(w, z_h + z_l), z_l

    z = (rows["z_h"], rows["z_l"])
    if high > 1:
        with jax.named_scope("without_gradient"):
            stopped = jax.lax.stop_gradient((w, x_btd))
            z, _ = jax.lax.scan(lambda z, _: (cycle(*stopped, z, 1), None), z, length=high - 1)
    with jax.named_scope("with_gradient"):
        z_h, z_l = cycle(w, x_btd, jax.lax.stop_gradient(z), True)
    with jax.named_scope("heads"):
        symbols_dv, q_d2 = (
            shard(params[name].astype(dtype), None, None) for name in ("w_symbols", "w_q")
        )
        cells_bsd = z_h[:, c.puzzle_tokens :]
        logits_bsv = jnp.einsum(
            "bsd,dv->bsv", cells_bsd, symbols_dv, preferred_element_type=jnp.float32
        )
        q_b2 = (z_h[:, 0] @ q_d2 + params["b_q"].astype(dtype)[None]).astype(jnp.float32)
    return z_h, z_l, logits_bsv, q_b2


def embed(c: Config, params: PyTree, inputs_bs: Array, puzzle_b: Array, shard: Shard) -> Array:
    """Return x [B, T, D], of unit variance: the puzzle's vector in the first tokens, then cells."""
    dtype, b = jnp.dtype(c.dtype), inputs_bs.shape[0]
    # A product, not a gather: the symbols are few, and XLA's partitioner cannot yet split a gather
    # inside a manual axis. Pinned on both sides: else XLA's partitioner splits the widths, and
    # exchanges rows for them.
    hot_bsv = shard(jax.nn.one_hot(inputs_bs, c.vocab, dtype=dtype), "batch", None, None)
    x_btd = shard(hot_bsv @ shard(params["w_cells"].astype(dtype), None, None), "batch", None, None)
    if c.puzzle_tokens:
        width = c.puzzle_tokens * c.embed
        rows_be = jnp.zeros((b, 0), dtype)
        if c.puzzle_embed:
            rows_be = jnp.take(params["puzzle"]["w_rows"], puzzle_b, axis=0).astype(dtype)
        rows_be = jnp.pad(rows_be, ((0, 0), (0, width - rows_be.shape[1])))
        x_btd = jnp.concatenate([rows_be.reshape(b, c.puzzle_tokens, c.embed), x_btd], axis=1)
    if c.positions == "learned":
        x_btd = math.sqrt(0.5) * (x_btd + params["pos"].astype(dtype)[None])
    return math.sqrt(c.embed) * x_btd


def net_flops(c: Config) -> int:
    """Floating-point operations of one application of the net to one row, forward."""
    d, t = c.embed, c.n_tokens
    mix = 2 * d * t * 3 * c.inner(t) if c.mixer == "mlp" else 2 * t * 4 * d * d + 2 * 2 * t * t * d
    return c.depth * (mix + 2 * t * 3 * d * c.inner(d))


def train_flops(c: Config, cycles: Cycles) -> int:
    """Floating-point operations of one row in one training step.

    The backward pass costs twice the forward one, and only the last cycle has one. Of the contract
    "last", the supervision steps before it are forward alone: their mean, if their number is drawn.
    ``q_continue`` takes another supervision step, forward alone.
    """
    high, low = cycles
    heads = 2 * c.n_cells * c.embed * c.vocab + 2 * c.embed * 2
    step = high * (low + 1) * net_flops(c)
    if c.contract == "last":
        others = (c.halt_steps + (c.least_steps or c.halt_steps) - 2) * step // 2
    else:
        others = step + heads if c.q_continue else 0
    return (high - 1 + 3) * (low + 1) * net_flops(c) + 3 * heads + others
