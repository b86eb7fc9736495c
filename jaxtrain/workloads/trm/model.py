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
from jaxtrain.nn import attention, remat, tokamax_tracing
from jaxtrain.nn.layers import product, product_in_float32, rotate
from jaxtrain.specs import fan_in, ones, truncated_normal, zeros
from jaxtrain.types import OF_DATA, Array, Export, OfData, PyTree, Shard, Spec
from jaxtrain.workloads.trm import tokamax_glu, tpu_mixer
from loaders.io import checks, machine
from loaders.sudoku.puzzles import kind_of

MIXERS = ("mlp", "attention")
POSITIONS = ("none", "rope", "learned")
LOSSES = ("stablemax", "softmax")
CONTRACTS = ("deep", "last")
DTYPES = ("float32", "bfloat16")
KERNELS = ("auto", "xla", tokamax_tracing.PACKAGE)
EPS = 1e-5  # of the norms
IGNORED = -100  # a label that is left out of loss and accuracy
Q_BIAS = -5.0  # the q-head starts closed: nothing halts before it has learned to
EXPORT = Export(model_state="^init_[hl]$")  # the states that a board begins with
Cycles = tuple[int, int]  # high, low
States = tuple[Array, Array]  # z_h, z_l, [B, T, D]
Net = Callable[[PyTree, Array], Array]  # the net's weights, x [B, T, D] -> [B, T, D]
# fields of `Config` whose change a resumed run only reports
FREE_FIELDS = (
    "n_difficulties",
    "remat",
    "kernel",
    "rollouts",
    "noise",
    "symmetry",
    "test_steps",
    "residual",
)
# fields of `Config` that decide the arrays of the state
STATE_FIELDS = (
    "contract",
    "n_cells",
    "vocab",
    "n_puzzles",
    "mixer",
    "embed",
    "depth",
    "expansion",
    "inner_multiple",
    "puzzle_tokens",
    "puzzle_embed",
)


@dataclass(frozen=True)
class Config(ModelSection):
    """The published Sudoku model by default."""

    on_resume = checks.OnResume(checks.FUNCTION, free=FREE_FIELDS, state=STATE_FIELDS)

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
    # [name] computation of SwiGLU and its products: xla, tokamax (one kernel of that package for
    # H100s, if no gradient is taken), or auto (tokamax if it is installed and takes the arrays). On
    # TPUs both take a kernel for the mixer
    kernel: str = "auto"

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from checks.at_least(self, 1, "embed", "heads", "depth", "inner_multiple")
        yield from checks.at_least(self, 1, "cycles_high", "cycles_low", "halt_steps")
        yield from checks.not_negative(self, "puzzle_tokens", "puzzle_embed")
        yield from checks.not_negative(self, "first_high", "first_low", "growth")
        yield from checks.choice(self, MIXERS, "mixer")
        yield from checks.choice(self, POSITIONS, "positions")
        yield from checks.choice(self, LOSSES, "loss")
        yield from checks.choice(self, DTYPES, "dtype")
        yield from checks.choice(self, remat.WHOLE, "remat")
        yield from checks.choice(self, KERNELS, "kernel")
        if self.kernel == tokamax_tracing.PACKAGE:
            yield from self._problems_of_tokamax()
        yield from self._token_problems()
        yield from checks.choice(self, CONTRACTS, "contract")
        yield from self._rollout_problems()
        yield from checks.not_negative(self, "least_steps", "first_steps", "growth_steps")
        if self.growth_low is not None:
            yield from checks.not_negative(self, "growth_low")
        if self.contract == "deep":
            yield from self._problems_of_deep()
        else:
            yield from self._problems_of_last()
        yield from checks.within(self, "[0, 1]", "explore")
        if self.explore_end is not None:
            yield from checks.within(self, "[0, 1]", "explore_end")
        yield from self._curriculum_problems()

    def _problems_of_tokamax(self) -> Iterator[tuple[str, str]]:
        text = f"is {self.kernel!r}"
        if not machine.has_package(self.kernel):
            yield "kernel", f"{text}, which is not installed; pip install 'jaxtrain[tokamax]'"
        if self.dtype != "bfloat16":
            yield "kernel", f"{text}, whose kernel is for dtype='bfloat16'"
        if self.inner_multiple % tokamax_glu.OUTPUTS:
            takes = f"kernel={self.kernel!r} takes multiples of {tokamax_glu.OUTPUTS}"
            yield "inner_multiple", f"is {self.inner_multiple}, and {takes}"

    def _token_problems(self) -> Iterator[tuple[str, str]]:
        """Yield problems of the mixer, the positions and the puzzle's tokens."""
        embed = self.embed
        if self.mixer == "attention" and self.heads > 0 and embed % (2 * self.heads):
            text = f"is {self.heads}; embed={embed} must be an even number of values for each"
            yield "heads", text
        if self.mixer == "mlp" and self.positions == "rope":
            text = "is 'rope', which turns queries and keys, and mixer='mlp' has none; use 'none'"
            yield "positions", f"{text} or 'learned'"
        size = self.puzzle_tokens * embed
        if self.puzzle_embed > size:
            yield (
                "puzzle_embed",
                f"is {self.puzzle_embed}, more than puzzle_tokens × embed = {size}",
            )

    def _rollout_problems(self) -> Iterator[tuple[str, str]]:
        yield from checks.at_least(self, 1, "rollouts")
        yield from checks.not_negative(self, "noise", "residual", "test_steps")
        for name in ("noise", "residual"):
            if math.isinf(getattr(self, name)):
                yield name, "is infinite; set a number"
        rollouts_differ = self.noise or self.symmetry
        if self.rollouts > 1 and not rollouts_differ:
            text = f"is {self.rollouts}, and all would be the same"
            yield "rollouts", f"{text}; set symmetry=True, or noise, for example 0.3"
        if self.rollouts == 1 and rollouts_differ:
            name = "noise" if self.noise else "symmetry"
            text = f"is {getattr(self, name)} with rollouts=1, and the first has none"
            yield name, f"{text}; set rollouts, for example 16"

    def _problems_of_deep(self) -> Iterator[tuple[str, str]]:
        """Yield fields that contract "deep" ignores."""
        for name in ("least_steps", "first_steps", "growth_steps"):
            n_steps = getattr(self, name)
            if n_steps:
                text = f"is {n_steps}, of contract='last' alone"
                yield name, f"{text}; contract='deep' has it from its halting"

    def _problems_of_last(self) -> Iterator[tuple[str, str]]:
        """Yield fields that contract "last" ignores, and a smallest number above the largest."""
        for name, default in (("q_continue", False), ("explore_end", None)):
            value = getattr(self, name)
            if value != default:
                text = f"is {value}, of contract='deep' alone"
                yield name, f"{text}: no row of contract='last' halts in training"
        most = self.first_steps or self.halt_steps
        if self.least_steps > most:
            yield "least_steps", f"is {self.least_steps}, more than the {most} steps that there are"

    def _curriculum_problems(self) -> Iterator[tuple[str, str]]:
        growth_low = "growth_low"
        if self.growth_low is None:
            growth_low = "growth"
        curricula = (
            ("first_high", "cycles_high", "growth"),
            ("first_low", "cycles_low", growth_low),
            ("first_steps", "halt_steps", "growth_steps"),
        )
        growing: dict[str, list[str]] = {}  # a growth's field -> the fields where it begins
        for first, last, growth in curricula:
            growing.setdefault(growth, []).append(first)
            start = getattr(self, first)
            end = getattr(self, last)
            if start and not getattr(self, growth):
                text = f"is {start}, and {growth}=0 means no curriculum"
                yield first, f"{text}; set {growth} to its length in steps"
            if start > end:
                yield first, f"is {start}, more than {last}={end}"
        for growth, firsts in growing.items():
            n_steps = getattr(self, growth)
            grows = any(getattr(self, first) for first in firsts)
            if n_steps and not grows:
                text = f"is {n_steps}, and nothing grows"
                yield growth, f"{text}; set {' or '.join(firsts)}, or {growth}=0"

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("n_cells", "vocab", "n_puzzles", "n_difficulties"):
            value = getattr(self, name)
            of_data = info.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif of_data is not None and not self._covers(name, value, of_data):
                text = f"is {value}, and the data need {of_data}"
                yield name, f"{text}; config.model.{name}=None takes that"
        if self.symmetry and not kind_of(self.n_cells or 0, self.vocab or 0):
            size = f"{self.n_cells} cells and {self.vocab} symbols"
            yield "symmetry", f"is True, and no kind of puzzle has {size}; use noise"
        elif self.symmetry and self.n_puzzles != 1:
            text = f"is True, of boards of one kind, and the data have {self.n_puzzles} ids of"
            yield "symmetry", f"{text} puzzles; use noise"

    def _covers(self, name: str, value: int, of_data: int) -> bool:
        """Whether a model of this size fits the data: exactly as many cells, enough of others."""
        if name == "n_cells":
            return value == of_data
        return value >= of_data

    @property
    def n_tokens(self) -> int:
        return self.puzzle_tokens + self.n_cells

    @property
    def cycles(self) -> Cycles:
        return self.cycles_high, self.cycles_low

    def inner(self, width: int) -> int:
        """Inner width of a SwiGLU: 2/3 of the usual, as it has three matrices (Shazeer 2020)."""
        two_thirds = round(self.expansion * width * 2 / 3)
        n_multiples = -(-two_thirds // self.inner_multiple)  # rounded up
        return n_multiples * self.inner_multiple


def make_specs(c: Config) -> PyTree:
    d, v = c.embed, c.vocab
    closed = jax.nn.initializers.constant(Q_BIAS)
    specs = {
        "net": _net_specs(c),
        "w_cells": Spec((v, d), (None, "embed"), fan_in(d)),
        "w_symbols": Spec((d, v), ("embed", None), fan_in(d)),
        "w_q": Spec((d, 2), ("embed", None), zeros),
        "b_q": Spec((2,), (None,), closed),
    }
    if c.positions == "learned":
        specs["pos"] = Spec((c.n_tokens, d), ("seq", "embed"), fan_in(d))
    if c.puzzle_embed:
        shape = (c.n_puzzles, c.puzzle_embed)
        specs["puzzle"] = {"w_rows": Spec(shape, ("item", None), zeros)}
    return specs


def _net_specs(c: Config) -> dict[str, Spec]:
    """Return the matrices of all layers, one array for each kind."""
    l, d = c.depth, c.embed
    m = c.inner(d)
    if c.mixer == "mlp":
        specs = _mlp_mixer_specs(c)
    else:
        specs = _attention_specs(c)
    specs["w_up"] = Spec((l, d, 2, m), ("layer", "embed", None, "mlp"), fan_in(d))
    specs["w_down"] = Spec((l, m, d), ("layer", "mlp", "embed"), fan_in(m))
    return specs


def _mlp_mixer_specs(c: Config) -> dict[str, Spec]:
    l, t = c.depth, c.n_tokens
    n = c.inner(t)
    return {
        "w_mix_up": Spec((l, t, 2, n), ("layer", "seq", None, "mlp"), fan_in(t)),
        "w_mix_down": Spec((l, n, t), ("layer", "mlp", "seq"), fan_in(n)),
    }


def _attention_specs(c: Config) -> dict[str, Spec]:
    l, d = c.depth, c.embed
    h = c.heads
    k = d // h
    qkv_axes = ("layer", "embed", None, "heads", "head_dim")
    out_axes = ("layer", "heads", "head_dim", "embed")
    return {
        "w_qkv": Spec((l, d, 3, h, k), qkv_axes, fan_in(d)),
        "w_out": Spec((l, h, k, d), out_axes, fan_in(d)),
    }


def make_model_state(c: Config, batch: int) -> PyTree:
    """Return a slot for each row of the batch, all done, the fixed initial states, and the step.

    The step is for the annealing.

    Of the contract "last", each step begins with its own rows: it has no slots.
    """
    initial = Spec((c.embed,), (None,), truncated_normal(1.0))
    step = Spec((), (), zeros, "int32")
    fixed = {"init_h": initial, "init_l": initial, "step": step}
    if c.contract == "last":
        return fixed
    z_shape = (batch, c.n_tokens, c.embed)
    z = Spec(z_shape, ("batch", "seq", None), zeros, c.dtype)
    cells = Spec((batch, c.n_cells), ("batch", None), zeros, "int32")
    count = Spec((batch,), ("batch",), zeros, "int32")
    halted = Spec((batch,), ("batch",), ones, "bool")
    slots = {
        "z_h": z,
        "z_l": z,
        "steps": count,  # supervision steps of the slot's row
        "halted": halted,
        "inputs": cells,
        "labels": cells,
        "puzzle": count,
    }
    return slots | fixed


def start(c: Config, model_state: PyTree, n: int, shard: Shard) -> dict[str, Array]:
    """Return the states of rows that begin, z_h and z_l, [B, T, D]."""
    shape = (n, c.n_tokens, c.embed)
    z_h = jnp.broadcast_to(model_state["init_h"], shape)
    z_l = jnp.broadcast_to(model_state["init_l"], shape)

    # Pinned from the start: XLA's partitioner would choose a layout of the loop's state by itself,
    # and another for the logits.
    def pinned(z: Array) -> Array:
        return shard(z.astype(c.dtype), "batch", "seq", None)

    return {"z_h": pinned(z_h), "z_l": pinned(z_l)}


def rms_norm(x: Array, axis: int) -> Array:
    """Compute x / sqrt(mean(x^2) + eps) along ``axis``, in float32 (Zhang & Sennrich 2019)."""
    y = x.astype(jnp.float32)
    mean_square = (y * y).mean(axis, keepdims=True)
    y = y * jax.lax.rsqrt(mean_square + EPS)
    return y.astype(x.dtype)


def angles(c: Config) -> tuple[Array, Array]:
    """Return cos and sin [1, T, 1, K / 2] of the angles t theta^(-2i/K) (Su et al. 2021)."""
    k = c.embed // c.heads
    exponent_f = -np.arange(0, k, 2) / k
    frequency_f = c.rope_theta**exponent_f
    angle_tf = np.arange(c.n_tokens)[:, None] * frequency_f[None]

    def for_heads(x_tf: np.ndarray) -> Array:
        y_tf = jnp.asarray(x_tf, jnp.float32)
        return y_tf[None, :, None]

    cos_tf = np.cos(angle_tf)
    sin_tf = np.sin(angle_tf)
    return for_heads(cos_tf), for_heads(sin_tf)


def products(equation: str, x: Array, w: Array, shard: Shard, *axes: str | None) -> list[Array]:
    """Compute `product` with each matrix side by side along w's dimension c, of result ``axes``.

    For CPUs they are products of their own: of one that is cut, the gradient's parts are padded to
    its size and added up there. So they are for TPUs, where the kernel that cuts them would read
    them from memory again (docs/results/compiled-steps.md). One product fills GPUs better.
    """
    operands, of_y = equation.split("->")
    _, of_w = operands.split(",")
    c_of_w = of_w.index("c")
    c_of_y = of_y.index("c")
    n_matrices = w.shape[c_of_w]
    platform, _ = shard.devices
    results = []
    if platform in ("cpu", "tpu"):
        of_one_matrix = equation.replace("c", "")
        for i in range(n_matrices):
            matrix = jax.lax.index_in_dim(w, i, c_of_w, keepdims=False)
            y = product(of_one_matrix, x, matrix, shard)
            y = shard(y, *axes)
            results.append(y)
        return results
    y = product(equation, x, w, shard)
    y = shard(y, *axes[:c_of_y], None, *axes[c_of_y:])
    for i in range(n_matrices):
        results.append(jax.lax.index_in_dim(y, i, c_of_y, keepdims=False))
    return results


def swiglu(gate: Array, y: Array) -> Array:
    """Compute silu(gate) y (Shazeer 2020)."""
    return jax.nn.silu(gate) * y


def gated(equation: str, x: Array, w: Array, shard: Shard, *axes: str | None, kernel: str) -> Array:
    """Compute silu(x w_gate) (x w_up), of logical ``axes``, by one of `KERNELS`."""
    is_for_kernel = kernel != "xla" and tokamax_glu.fits(x, w, shard, axes)
    if is_for_kernel and (kernel == tokamax_tracing.PACKAGE or tokamax_glu.is_installed()):
        return tokamax_glu.swiglu(x, w, shard, axes)
    gate, y = products(equation, x, w, shard, *axes)
    return swiglu(gate, y)


def mix(
    w_up_tcn: Array, w_down_nt: Array, x_btd: Array, shard: Shard, kernel: str = "xla"
) -> Array:
    """Return the feed-forward net along a row's tokens, with its norm."""
    axes = ("batch", None, "mlp")
    platform, _ = shard.devices
    if platform == "tpu" and kernel != "xla":
        if tpu_mixer.fits(x_btd, w_up_tcn, shard):
            return tpu_mixer.mix(w_up_tcn, w_down_nt, x_btd, shard, eps=EPS)
        tpu_mixer.log_no_kernel(*x_btd.shape[1:], w_up_tcn.shape[2], x_btd.dtype.name)
    # tokens last, or each product is written out once more, transposed
    if platform != "tpu":
        x_bdt = x_btd.swapaxes(1, 2)
        inner_bdn = gated("bdt,tcn->bdcn", x_bdt, w_up_tcn, shard, *axes, kernel=kernel)
        x_bdt += product("bdn,nt->bdt", inner_bdn, w_down_nt, shard)
        x_bdt = rms_norm(x_bdt, 2)
        return x_bdt.swapaxes(1, 2)
    gate_bdn, y_bdn = products("btd,tcn->bcdn", x_btd, w_up_tcn, shard, *axes)
    inner_bdn = swiglu(gate_bdn, y_bdn)
    y_btd = jnp.einsum("bdn,nt->btd", inner_bdn, w_down_nt)
    return rms_norm(x_btd + y_btd, 1)


def attend(c: Config, w: PyTree, l: int, x_btd: Array, shard: Shard) -> Array:
    """Return the attention of a row's tokens in layer l, with its norm."""
    axes = ("batch", "seq", "heads", "head_dim")
    w_qkv_dchk = w["w_qkv"][l]
    q_bthk, k_bthk, v_bthk = products("btd,dchk->btchk", x_btd, w_qkv_dchk, shard, *axes)
    if c.positions == "rope":
        q_bthk = rotate(q_bthk, angles(c))
        k_bthk = rotate(k_bthk, angles(c))
    y_bthk = attention.within(shard, q_bthk, k_bthk, v_bthk, policy=c.remat)
    w_out_hkd = w["w_out"][l]
    y_btd = product("bthk,hkd->btd", y_bthk, w_out_hkd, shard)
    return rms_norm(x_btd + y_btd, 2)


def feed_forward(w: PyTree, l: int, x_btd: Array, shard: Shard, kernel: str = "xla") -> Array:
    """Return the feed-forward net along the channels in layer l, with its norm."""
    axes = ("batch", "seq", "mlp")
    w_up_dcm = w["w_up"][l]
    inner_btm = gated("btd,dcm->btcm", x_btd, w_up_dcm, shard, *axes, kernel=kernel)
    w_down_md = w["w_down"][l]
    y_btd = product("btm,md->btd", inner_btm, w_down_md, shard)
    return rms_norm(x_btd + y_btd, 2)


def net(c: Config, w: PyTree, x_btd: Array, shard: Shard, kernel: str = "xla") -> Array:
    """Apply the net to the sum of states and inputs. ``w`` has the activations' dtype.

    ``kernel``: one of `KERNELS`. Only "xla" has a derivative on all devices. On TPUs the mixer's
    kernel has one, too.
    """
    kernel_of_mixer = c.kernel if shard.devices[0] == "tpu" else kernel
    for l in range(c.depth):
        with jax.named_scope("mix"):
            if c.mixer == "mlp":
                x_btd = mix(w["w_mix_up"][l], w["w_mix_down"][l], x_btd, shard, kernel_of_mixer)
            else:
                x_btd = attend(c, w, l, x_btd, shard)
        with jax.named_scope("mlp"):
            x_btd = feed_forward(w, l, x_btd, shard, kernel)
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
        x_btd = embed(c, params, rows, shard)
    n_high, n_low = cycles
    with_any_kernel = functools.partial(net, c, shard=shard)
    apply: Net = with_any_kernel
    z: States = (rows["z_h"], rows["z_l"])
    if n_high > 1:
        with jax.named_scope("without_gradient"):
            fast = functools.partial(with_any_kernel, kernel=c.kernel)
            z = detached_cycles(fast, w, x_btd, z, (n_high - 1, n_low))
    if c.remat == "full":
        apply = jax.checkpoint(apply)
    with jax.named_scope("with_gradient"):
        z = jax.lax.stop_gradient(z)
        z_h, z_l = cycle(apply, w, x_btd, z, n_low, unroll=True)
    with jax.named_scope("heads"):
        logits_bsv, q_b2 = heads(c, params, z_h, shard)
    return z_h, z_l, logits_bsv, q_b2


def detached_cycles(apply: Net, w: PyTree, x_btd: Array, z: States, cycles: Cycles) -> States:
    """Refine thought and answer in cycles of which the backward pass keeps nothing."""
    n_high, n_low = cycles
    w, x_btd = jax.lax.stop_gradient((w, x_btd))

    def detached_cycle(z: States, _: None) -> tuple[States, None]:
        return cycle(apply, w, x_btd, z, n_low, unroll=1), None

    z, _ = jax.lax.scan(detached_cycle, z, length=n_high)
    return z


def cycle(
    apply: Net, w: PyTree, x_btd: Array, z: States, n_low: int, *, unroll: int | bool
) -> States:
    """Refine the thought ``n_low`` times, then the answer once. Return z_h, z_l."""
    z_h, z_l = z

    def think(z_l: Array, _: None) -> tuple[Array, None]:
        return apply(w, z_l + z_h + x_btd), None

    z_l, _ = jax.lax.scan(think, z_l, length=n_low, unroll=unroll)
    z_h = apply(w, z_h + z_l)
    return z_h, z_l


def heads(c: Config, params: PyTree, answer_btd: Array, shard: Shard) -> tuple[Array, Array]:
    """Return the symbols' logits [B, S, V] of the answer, and q [B, 2] of its first token."""
    dtype = jnp.dtype(c.dtype)
    w_symbols_dv = params["w_symbols"].astype(dtype)
    w_symbols_dv = shard(w_symbols_dv, None, None)
    w_q_d2 = params["w_q"].astype(dtype)
    w_q_d2 = shard(w_q_d2, None, None)
    cells_bsd = answer_btd[:, c.puzzle_tokens :]
    logits_bsv = product_in_float32("bsd,dv->bsv", cells_bsd, w_symbols_dv, shard)
    first_token_bd = answer_btd[:, 0]
    q_b2 = first_token_bd @ w_q_d2
    b_q_2 = params["b_q"].astype(dtype)
    q_b2 += b_q_2[None]
    return logits_bsv, q_b2.astype(jnp.float32)


def embed(c: Config, params: PyTree, rows: Mapping[str, Array], shard: Shard) -> Array:
    """Return x [B, T, D], of unit variance: the puzzle's vector in the first tokens, then cells."""
    dtype = jnp.dtype(c.dtype)
    # A product, not a gather: the symbols are few, and XLA's partitioner cannot yet split a gather
    # inside a manual axis. Pinned on both sides: else XLA's partitioner splits the widths, and
    # exchanges rows for them.
    hot_bsv = jax.nn.one_hot(rows["inputs"], c.vocab, dtype=dtype)
    hot_bsv = shard(hot_bsv, "batch", None, None)
    w_cells_vd = params["w_cells"].astype(dtype)
    w_cells_vd = shard(w_cells_vd, None, None)
    x_btd = hot_bsv @ w_cells_vd
    x_btd = shard(x_btd, "batch", None, None)
    if c.puzzle_tokens:
        puzzle_bpd = embed_puzzle(c, params, rows["puzzle"])
        x_btd = jnp.concatenate([puzzle_bpd, x_btd], axis=1)
    if c.positions == "learned":
        pos_td = params["pos"].astype(dtype)
        x_btd += pos_td[None]
        x_btd = math.sqrt(0.5) * x_btd
    return math.sqrt(c.embed) * x_btd


def embed_puzzle(c: Config, params: PyTree, puzzle_b: Array) -> Array:
    """Return the puzzle's vector, with zeros up to a whole number of tokens, [B, P, D]."""
    dtype = jnp.dtype(c.dtype)
    n_rows = puzzle_b.shape[0]
    vector_be = jnp.zeros((n_rows, 0), dtype)
    if c.puzzle_embed:
        w_rows = params["puzzle"]["w_rows"]
        vector_be = jnp.take(w_rows, puzzle_b, axis=0)
        vector_be = vector_be.astype(dtype)
    n_zeros = c.puzzle_tokens * c.embed - c.puzzle_embed
    vector_be = jnp.pad(vector_be, ((0, 0), (0, n_zeros)))
    return vector_be.reshape(n_rows, c.puzzle_tokens, c.embed)


def net_flops(c: Config) -> int:
    """Floating-point operations of one application of the net to one row, forward."""
    d, t = c.embed, c.n_tokens
    if c.mixer == "mlp":
        mix = 2 * d * t * 3 * c.inner(t)
    else:
        projections = 2 * t * 4 * d * d
        mix = projections + 2 * 2 * t * t * d
    feed_forward = 2 * t * 3 * d * c.inner(d)
    return c.depth * (mix + feed_forward)


def train_flops(c: Config, cycles: Cycles) -> int:
    """Floating-point operations of one row in one training step.

    The backward pass costs twice the forward one, and only the last cycle has one. Of the contract
    "last", the supervision steps before it are forward alone: their mean, if their number is drawn.
    ``q_continue`` takes another supervision step, forward alone.
    """
    n_high, n_low = cycles
    cycle = (n_low + 1) * net_flops(c)
    symbols = 2 * c.n_cells * c.embed * c.vocab
    heads = symbols + 2 * c.embed * 2
    forward = n_high * cycle  # of a supervision step, without its heads
    extra = 0
    if c.contract == "last":
        least = c.least_steps or c.halt_steps
        extra = (c.halt_steps + least - 2) * forward // 2
    elif c.q_continue:
        extra = forward + heads
    return (n_high - 1 + 3) * cycle + 3 * heads + extra
