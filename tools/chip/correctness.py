"""The accelerator against the CPU, kernels against formulas, bfloat16 against float32.

A run is compared with itself, too.

Every check is a number and the bound that it must not exceed. Sizes are the small ones (`cases`),
on any machine.

- A workload's loss and gradients (with --quick of birds and language alone), the same parameters
  and batch on both. The error of the loss is relative to it. That of a gradient is the norm of the
  difference over the norm, and the largest counts. Products of float32 are exact on both sides
  (matmul precision "highest"; an accelerator's own default rounds to TF32). In bfloat16 a GPU takes
  cuDNN's attention.
- Attention, the kernel of this platform, against the formula with all weights at once, in float32
  from the same 16-bit numbers.
- Loss curves over 50 steps, all in bfloat16 and all in float32: the mean distance relative to the
  mean loss.
- The same steps twice, compiled twice, with deterministic operations (XLA_FLAGS of `gpu_check`):
  every bit of the state.
"""

import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import specs
from jaxtrain.nn import attention as attention_lib
from jaxtrain.nn import splash
from jaxtrain.parallel import one_device
from jaxtrain.step import accumulate
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.telemetry import metrics
from jaxtrain.types import PyTree
from loaders.io import machine
from tools.chip import cases

LOSS = {"float32": 1e-5, "bfloat16": 2e-2}  # relative
GRADIENT = {"float32": 1e-3, "bfloat16": 1e-1}  # relative, of the worst parameter
# Gradients of a handful of bfloat16 numbers differ by more than their own rounding; such small
# parameters are left out of it.
# share of all gradients' norm that a parameter must have to be compared
LEAST = {"float32": 0.0, "bfloat16": 1e-3}
ATTENTION = 2e-2  # of values of about 1, forward and backward, in bfloat16: eps is 8e-3
MIXER = 2e-2  # the same, of z and the gradients
PADDING_SHARE = 16  # the padding of a row with documents is one token of so many
CURVES = 0.03  # mean distance of two loss curves over the mean loss
MODELS = ("vit-s", "lm-1b-2k", "trm", "higgs-lora", "giblet")
ATTENDING = ("vit-s", "lm-1b-2k", "higgs-lora")  # those of which bfloat16 takes other kernels


class Check(NamedTuple):
    name: str
    found: float
    bound: float
    note: str = ""

    @property
    def well(self) -> bool:
        return self.found <= self.bound  # nan is not


def measure(data: cases.Data, device: jax.Device, *, quick: bool, models: set[str]) -> list[Check]:
    """All checks; ``models`` restricts the workloads."""
    chosen = [case for case in cases.CASES if case.name in MODELS and case.model in models]
    dtypes = ("float32",) if quick or device.platform == "cpu" else ("float32", "bfloat16")
    steppers = [case for case in chosen if case.model in ("bird", "language")]
    if quick:
        chosen = steppers or chosen
    found = [*attention(quick=quick)]
    # Compilers work side by side.
    with concurrent.futures.ThreadPoolExecutor(max(1, min(4, machine.cores() // 4))) as pool:
        pairs = [
            (case, dtype)
            for case in chosen
            for dtype in dtypes
            if dtype == "float32" or case.name in ATTENDING
        ]
        for checks in pool.map(lambda pair: list(workload(pair[0], data, device, pair[1])), pairs):
            found += checks
    if quick:
        return found
    for case in steppers[: 1 if device.platform == "cpu" else 2]:
        found.append(curves(case, data, device, steps=50))
    for case in steppers[:1]:
        found.append(repeated(case, data, device, steps=5))
    return found


def chosen_in(case: cases.Case, data: cases.Data, device: jax.Device, dtype: str) -> cases.Chosen:
    small = cases.Data(data.folder, small=True)
    return cases.put_together(case.config(small, {}, {"model.dtype": dtype}), device, {})


def gradients(
    chosen: cases.Chosen, variables: PyTree, batch: PyTree
) -> tuple[float, dict[str, np.ndarray]]:
    """Return the mean loss of a batch, and its gradients by path, in float32 on the host."""
    a = chosen.assembly
    task = a.task
    if chosen.stage is not None:
        task = task._replace(loss=functools.partial(task.loss, stage=chosen.stage))
    device = a.layout.mesh.devices.flat[0]

    def run(variables: PyTree, batch: PyTree) -> tuple[Any, ...]:
        key = jax.random.fold_in(jax.random.key(a.config.seed), 0)
        return accumulate.gradients(
            task, a.layout, variables, step_lib.with_rows(batch, a.layout), key, accumulate=1
        )

    # Where attention asks which kernel to take, the answer is: that of this device.
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        grads, out = jax.jit(run)(variables, batch)
    paths, leaves = specs.paths(grads), jax.tree.leaves(jax.device_get(grads))
    loss = metrics.mean([{"loss": out.loss}])["loss"]
    return loss, {path: np.asarray(x, np.float32) for path, x in zip(paths, leaves, strict=True)}


def workload(case: cases.Case, data: cases.Data, device: jax.Device, dtype: str) -> Iterator[Check]:
    """Loss and gradients of ``device`` against the CPU's, from the CPU's parameters."""
    cpu = jax.devices("cpu")[0]
    there, here = (chosen_in(case, data, d, dtype) for d in (cpu, device))
    a = there.assembly
    with jax.default_device(cpu):
        variables = state_lib.init_state(a.task, a.tx, a.abstract, jax.random.key(1)).variables
        batch = cases.first_batch(a)
    moved = [
        jax.tree.map(lambda x: jax.device_put(np.asarray(x), device), tree)
        for tree in (variables, dict(batch))
    ]
    yield from compare(
        f"{case.model} {dtype}",
        gradients(there, variables, dict(batch)),
        gradients(here, *moved),
        dtype,
    )


def compare(
    name: str, theirs: tuple[float, PyTree], ours: tuple[float, PyTree], dtype: str
) -> Iterator[Check]:
    (loss, grads), (our_loss, our_grads) = theirs, ours
    yield Check(
        f"{name}: loss", abs(our_loss - loss) / abs(loss), LOSS[dtype], f"{loss:.6g} on the CPU"
    )
    whole = math.sqrt(sum(float(np.square(g, dtype=np.float64).sum()) for g in grads.values()))
    errors = {
        path: float(np.linalg.norm((our_grads[path] - g).ravel()) / np.linalg.norm(g.ravel()))
        for path, g in grads.items()
        if np.linalg.norm(g.ravel()) > LEAST[dtype] * whole
    }
    if not all(np.isfinite(g).all() for g in our_grads.values()):
        worst, error = "a gradient is not finite", math.nan
    else:
        worst = max(errors, key=lambda path: errors[path])
        error = errors[worst]
    yield Check(
        f"{name}: gradients",
        error,
        GRADIENT[dtype],
        f"worst of {len(errors)} of {len(grads)}: {worst}",
    )


class AttentionShape(NamedTuple):
    rows: int
    tokens: int
    heads: int
    key_heads: int
    head_dim: int
    causal: bool
    packed: bool


def attention_shapes(*, quick: bool) -> dict[str, AttentionShape]:
    shapes = {"vit": (2, 257, 6, 6, 64, False, False), "packed": (2, 512, 8, 2, 64, True, True)}
    if not quick:
        shapes |= {
            "causal": (2, 512, 8, 2, 64, True, False),
            "wide": (1, 1024, 4, 4, 128, True, True),
            # several blocks of which a TPU skips those of other documents
            "documents": (1, 2048, 4, 2, 64, True, True),
            "short": (2, 608, 6, 2, 128, True, False),
        }
    return {name: AttentionShape(*shape) for name, shape in shapes.items()}


def attention(*, quick: bool) -> Iterator[Check]:
    """Yield the kernel here on bfloat16: causal, packed, few key heads, odd length."""
    for name, shape in attention_shapes(quick=quick).items():
        yield attention_of(f"attention {name}", shape)


def attention_kernel(shape: AttentionShape, devices: tuple[str, str] | None = None) -> str:
    """Name the kernel that devices take for a shape, None = those of this process."""
    b, t, h, g, k, causal, packed = shape
    q_bthk: Any = jax.ShapeDtypeStruct((b, t, h, k), jnp.bfloat16)
    masks = attention_lib.Masks(causal, packed=packed)
    return attention_lib.choose(q_bthk, devices or one_device.host(), masks, keys=(b, t, g, k))


def documents_of(rows: int, tokens: int) -> np.ndarray:
    """Return rows of four documents, with padding at their end, as a loader has them, [B, T]."""
    documents = np.sort(np.random.default_rng(0).integers(1, 5, (rows, tokens)), 1)
    documents[:, -tokens // PADDING_SHARE :] = splash.PADDING
    return documents.astype(np.int32)


def attention_of(name: str, shape: AttentionShape) -> Check:
    b, t, h, g, k, causal, packed = shape
    keys = jax.random.split(jax.random.key(0), 4)
    q, key, v, dy = (
        jax.random.normal(one, (b, t, n, k)).astype(jnp.bfloat16)
        for one, n in zip(keys, (h, g, g, h), strict=True)
    )
    segments = None
    if packed:
        segments = jnp.asarray(documents_of(b, t))
    kernel = functools.partial(attention_lib.attention, causal=causal, segments_bt=segments)
    ours = _with_derivatives(kernel, q, key, v, dy)
    wide = (x.astype(jnp.float32) for x in (q, key, v, dy))
    theirs = _with_derivatives(
        functools.partial(formula, causal=causal, segments_bt=segments), *wide
    )
    error = max(_relative(x, y) for x, y in zip(ours, theirs, strict=True))
    note = f"{'causal ' * causal}{'segments ' * packed}{b}×{t}×{h}/{g}×{k}"
    return Check(name, error, ATTENTION, note)


def mixer(*, quick: bool) -> Check | None:
    """Compare the kernel of the recursive model's mixer, at full width or small in the interpreter.

    None if it does not take that width here.
    """
    from jaxtrain.workloads.trm import model as trm
    from jaxtrain.workloads.trm import tpu_mixer

    b, t, d, n = (4, 21, 128, 128) if quick else (16, 97, 512, 512)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (((t, 2, n), t), ((n, t), n), ((b, t, d), 1), ((b, t, d), 1))
    narrow = [
        (jax.random.normal(key, shape) * fan_in**-0.5).astype(jnp.bfloat16)
        for key, (shape, fan_in) in zip(keys, shapes, strict=True)
    ]
    w_up, _, x, _ = narrow
    if not quick and not tpu_mixer.fits(x, w_up, one_device.shard):
        return None

    def kernel(w_up: jax.Array, w_down: jax.Array, x: jax.Array) -> jax.Array:
        shard = one_device.shard
        return tpu_mixer.mix(w_up, w_down, x, shard, eps=trm.EPS, interpret=quick)

    def by_formula(w_up: jax.Array, w_down: jax.Array, x: jax.Array) -> jax.Array:
        gate, value = jnp.einsum("btd,tcn->cbnd", x, w_up, precision="highest")
        inner = jax.nn.silu(gate) * value
        y = x + jnp.einsum("bnd,nt->btd", inner, w_down, precision="highest")
        return y / jnp.sqrt((y * y).mean(1, keepdims=True) + trm.EPS)

    ours = _with_derivatives(kernel, *narrow)
    theirs = _with_derivatives(by_formula, *(x.astype(jnp.float32) for x in narrow))
    error = max(_relative(x, y) for x, y in zip(ours, theirs, strict=True))
    return Check("mixer", error, MIXER, f"{b}×{t}×{d}, inner width {n}")


def formula(
    q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, segments_bt: jax.Array | None
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v with all weights at once."""
    b, t, h, d = q.shape
    k, v = (jnp.repeat(x, h // x.shape[2], axis=2) for x in (k, v))
    x_bhts = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") / math.sqrt(d)
    seen_bts = jnp.broadcast_to(jnp.tri(t, dtype=bool)[None] if causal else True, (b, t, t))
    if segments_bt is not None:
        seen_bts &= segments_bt[:, :, None] == segments_bt[:, None, :]
    p_bhts = jax.nn.softmax(jnp.where(seen_bts[:, None], x_bhts, -1e30), axis=-1)
    return jnp.einsum("bhts,bshd->bthd", p_bhts, v, precision="highest")


def _with_derivatives(f: Callable[..., Any], *args: jax.Array) -> list[np.ndarray]:
    """Return f's result, and its gradients by the last one of ``args`` as cotangent."""

    def run(*args: jax.Array) -> tuple[Any, ...]:
        *primals, dy = args
        y, pull = jax.vjp(f, *primals)
        return y, *pull(dy.astype(y.dtype))

    return [np.asarray(x, np.float32) for x in jax.jit(run)(*args)]


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm((x - y).ravel()) / np.linalg.norm(y.ravel()))


def curves(case: cases.Case, data: cases.Data, device: jax.Device, *, steps: int) -> Check:
    """Of the same run in two types, over the loader's first batches."""
    losses = []
    for dtype in ("float32", "bfloat16"):
        chosen = chosen_in(case, data, device, dtype)
        run = cases.Steps(chosen, cases.first_batch(chosen.assembly))
        batches = cases.batches(chosen.assembly, min(steps, 8))
        outs = [run(batches[i % len(batches)])["loss"] for i in range(steps)]
        losses.append(np.array([float(x.total / x.weight) for x in jax.device_get(outs)]))
    wide, narrow = losses
    note = f"{wide[0]:.4f} to {wide[-1]:.4f} in float32, to {narrow[-1]:.4f} in bfloat16"
    return Check(
        f"{case.model}: curves over {steps} steps",
        float(np.abs(narrow - wide).mean() / wide.mean()),
        CURVES,
        note,
    )


def repeated(case: cases.Case, data: cases.Data, device: jax.Device, *, steps: int) -> Check:
    """Leaves of the state that differ in any bit after two runs."""
    states = []
    jax.config.update("jax_enable_compilation_cache", False)
    for _ in range(2):
        jax.clear_caches()
        chosen = chosen_in(case, data, device, "bfloat16")
        run = cases.Steps(chosen, cases.first_batch(chosen.assembly))
        for _ in range(steps):
            run()
        states.append(jax.tree.leaves(jax.device_get(run.state)))
    differ = sum(x.tobytes() != y.tobytes() for x, y in zip(*states, strict=True))
    return Check(
        f"{case.model}: two runs of {steps} steps",
        differ,
        0,
        f"arrays of {len(states[0])} that differ",
    )


def record(checks: list[Check]) -> list[dict[str, Any]]:
    return [{**check._asdict(), "well": check.well} for check in checks]
