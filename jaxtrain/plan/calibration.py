"""Measures what kernels and exchanges cost on the CPUs of this machine, once.

`calibrate` compiles and times small programs with one device, with one device a core and with two a
core, each in a process of its own. The cost of each kind of work (`cpu_work`) is fitted to the
times by least squares of the relative errors, with no cost below zero.

The costs are kept in the cache folder, in calibrations/host.json: the machine (CPU, cores, version
of JAX), a hash of the kinds of work, and by devices the costs and the error of the fit. They are
refused on another machine, and if the kinds of work have changed since.
"""

import functools
import hashlib
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.plan import cpu_work, hlo
from jaxtrain.plan.target import PlanError
from loaders.io import atomic_write, files, machine

FOLDER, FILE = "calibrations", "host.json"
START = "import sys; from jaxtrain.plan import calibration; calibration.main(*sys.argv[1:])"
SECONDS = 0.3  # of each program's measurement
SLICES = 5  # of it; other processes share the cores
CPUINFO = pathlib.Path("/proc/cpuinfo")
LAYERS = 4
STEP_WEIGHT = 3.0  # in the fit, of programs that are training steps
REMEDY = "jaxtrain plan --calibrate measures this machine, in about three minutes"


class Sample(NamedTuple):
    program: str
    work: dict[str, float]
    seconds: float


def machine_key() -> dict[str, Any]:
    """Name the machine that costs are measured on."""
    cpu = platform.processor() or platform.machine()
    try:
        text = files.read(CPUINFO, most=1 << 20).decode()
    except OSError:
        text = ""
    if match := re.search(r"^model name\s*: (.*)$", text, re.M):
        cpu = match[1]
    family = re.search(r"^model\s*: (\d+)$", text, re.M)
    model = f", model {family[1]}" if family else ""
    return {"cpu": cpu + model, "cores": machine.cores(), "jax": jax.__version__}


def kinds_hash() -> str:
    """Name the kinds of work that costs are fitted to, by the code that counts them."""
    return hashlib.sha256(pathlib.Path(cpu_work.__file__).read_bytes()).hexdigest()[:16]


def calibrate() -> str:
    """Measure this machine, keep the costs, and describe them."""
    n_cores = machine.cores()
    fits = {}
    for n_devices in sorted({1, n_cores, 2 * n_cores}):
        samples = measure(n_devices)
        costs, error = fit(samples)
        fits[str(n_devices)] = {"costs": costs, "error": error, "programs": len(samples)}
    content = {"machine": machine_key(), "kinds": kinds_hash(), "fits": fits}
    path = machine.cache_folder(FOLDER, FILE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write.file(path) as file:
        file.write(json.dumps(content, indent=1).encode())
    errors = ", ".join(f"{n} devices {fit['error']:.0%}" for n, fit in fits.items())
    return f"{path}: median error of the fit by number of devices: {errors}"


def refusal() -> str:
    """Tell why this machine has no calibration, "" if it has one."""
    path = machine.cache_folder(FOLDER, FILE)
    if not path.exists():
        return REMEDY
    try:
        content = _read(path)
        for name, value in machine_key().items():
            if (measured := content["machine"][name]) != value:
                there = f"its {name} is {measured}, and here it is {value}"
                return f"{path} is of another machine, since {there}. {REMEDY}"
        if content["kinds"] != kinds_hash():
            return f"{path} has costs of other kinds of work than this version counts. {REMEDY}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{path} cannot be read ({error}). {REMEDY}"
    return ""


def _read(path: pathlib.Path) -> dict[str, Any]:
    content: dict[str, Any] = files.parse(files.read(path, most=1 << 20).decode(), str(path))
    return content


def load(n_devices: int) -> cpu_work.HostCosts | None:
    """Return the costs of kernels on each of ``n_devices`` of this machine, None by `refusal`."""
    if refusal():
        return None
    content = _read(machine.cache_folder(FOLDER, FILE))
    fits = {int(n): fit for n, fit in content["fits"].items()}
    nearest = max((n for n in fits if n <= n_devices), default=min(fits))
    fitted = fits[nearest]
    costs = fitted["costs"]
    if nearest == max(fits):  # kernels of the other devices run after each other
        costs = {kind: cost * n_devices / nearest for kind, cost in costs.items()}
    threads = threads_of_each(n_devices)
    return cpu_work.HostCosts(
        costs, content["machine"]["cpu"], threads, fitted["error"], fitted["programs"]
    )


def threads_of_each(n_devices: int) -> int:
    """Return how many cores one of the devices has for itself, at least 1."""
    return max(1, machine.cores() // n_devices)


def fit(samples: Sequence[Sample]) -> tuple[dict[str, float], float]:
    """Return the cost of each kind of work, and the median of the relative errors."""
    from scipy import optimize

    nnls: Any = optimize.nnls

    kinds = sorted({kind for sample in samples for kind in sample.work})
    amounts = np.array([[s.work.get(kind, 0.0) for kind in kinds] for s in samples])
    relative = amounts / np.array([[s.seconds] for s in samples])
    scale = np.maximum(relative.max(axis=0), 1e-300)
    weights = np.array([STEP_WEIGHT if "step" in s.program else 1.0 for s in samples])
    solution, _ = nnls(weights[:, None] * relative / scale, weights)
    costs = solution / scale
    errors = np.abs(relative @ costs - 1)
    return dict(zip(kinds, costs.tolist(), strict=True)), float(np.median(errors))


def measure(n_devices: int) -> list[Sample]:
    """Compile and time the programs on ``n_devices`` of this machine."""
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={n_devices}",
    }
    process = subprocess.run(
        [sys.executable, "-c", START], env=env, stdout=subprocess.PIPE, text=True
    )
    if process.returncode:
        raise PlanError(f"a process that measures this machine ended with {process.returncode}")
    return [Sample(*row) for row in json.loads(process.stdout.strip().splitlines()[-1])]


def main() -> None:
    """Measure every program on the devices of this process, and print the samples."""
    from jaxtrain.parallel import cluster

    cluster.use_threads_for_host_devices()
    machine.keep_freed_memory()  # as runs do
    print(json.dumps([*_samples()]))


def _samples() -> Iterator[Sample]:
    n_devices = jax.device_count()
    threads = threads_of_each(n_devices)
    mesh = jax.make_mesh((n_devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for name, function, shapes in programs(n_devices):
        arguments = [_array(shape, mesh) for shape in shapes]
        in_mesh: Any = jax.set_mesh(mesh)
        with in_mesh:
            compiled = jax.jit(function).lower(*arguments).compile()
        program = hlo.Program(compiled.as_text() or "")
        seconds = _time(compiled, arguments)
        yield Sample(name, cpu_work.work_of_step(program, threads), seconds)


def _time(compiled: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Return the mean time of a call, in the fastest of some slices of time."""
    jax.block_until_ready(compiled(*arguments))
    means = []
    for _ in range(SLICES):
        began = time.perf_counter()
        n_calls = 0
        while n_calls < 2 or time.perf_counter() - began < SECONDS / SLICES:
            jax.block_until_ready(compiled(*arguments))
            n_calls += 1
        means.append((time.perf_counter() - began) / n_calls)
    return min(means)


Shape = tuple[str, tuple[int, ...]]  # "rows", "whole", "parts" or "numbers"
Entry = tuple[str, Callable[..., Any], Sequence[Shape]]


def _array(shape: Shape, mesh: jax.sharding.Mesh) -> jax.Array:
    """Make an array with its rows, or the first axis of its parts, over the devices."""
    how, dims = shape
    spec = jax.P() if how == "whole" else jax.P("data")
    sharding = jax.NamedSharding(mesh, spec)
    rng = np.random.default_rng(0)
    values = 0.1 * rng.standard_normal(dims, np.float32)
    if how == "numbers":
        values = rng.integers(0, 64, dims).astype(np.int32)
    array: jax.Array = jax.device_put(values, sharding)
    return array


def programs(n: int) -> Iterator[Entry]:
    """Yield the programs for ``n`` devices: name, function and the shapes of its arguments."""
    yield from _of_products(n)
    yield from _of_maps(n)
    yield from _of_sums(n)
    yield from _of_moves(n)
    yield from _of_exchanges(n)
    yield from _of_steps(n)


def _of_products(n: int) -> Iterator[Entry]:
    for rows, width in ((64, 64), (256, 256), (1024, 64), (2048, 256), (512, 512)):

        def product(x: Any, w: Any) -> Any:
            for i in range(LAYERS):
                x = x @ w[i]
            return x

        shapes = [("rows", (n * rows, width)), ("whole", (LAYERS, width, width))]
        yield f"product {rows} {width}", product, shapes

    def thin(x: Any, w: Any) -> Any:
        for i in range(LAYERS):
            x = (x @ w[i]) @ w[i].T
        return x

    for rows, width, inner in ((1024, 128, 8), (256, 512, 16), (4, 256, 256), (8, 1024, 512)):
        shapes = [("rows", (n * rows, width)), ("whole", (LAYERS, width, inner))]
        yield f"thin {rows} {width} {inner}", thin, shapes

    def attention(q: Any, k: Any) -> Any:
        for _ in range(2):
            scores = jnp.einsum("bhtk,bhsk->bhts", q, k)
            q = jnp.einsum("bhts,bhsk->bhtk", scores, k)
        return q

    for rows, heads, length, width in (
        (8, 2, 64, 16),
        (4, 4, 128, 32),
        (32, 4, 16, 8),
        (8, 4, 128, 16),
        (2, 2, 256, 16),
        (2, 4, 64, 64),
    ):
        shape = ("rows", (n * rows, heads, length, width))
        yield f"attention {rows} {length}", attention, [shape, shape]


def _of_maps(n: int) -> Iterator[Entry]:
    def cheap(x: Any, y: Any) -> Any:
        return jnp.where(x > y, x * y + 0.5, jnp.maximum(x - y, 0.25 * y)) * x

    def one(x: Any, y: Any) -> Any:
        return x + y

    def expensive(x: Any, y: Any) -> Any:
        return jnp.tanh(x) + jnp.exp(y) / (1 + jax.lax.rsqrt(x * x + 1.0))

    def most_expensive(x: Any, y: Any) -> Any:
        return jnp.cos(x) + jnp.sin(y)

    for size in (1 << 10, 1 << 14, 1 << 18, 1 << 21):
        shape = ("rows", (n * size,))
        yield f"map {size}", cheap, [shape, shape]
        yield f"add {size}", one, [shape, shape]
        if size < 1 << 20:
            yield f"expensive {size}", expensive, [shape, shape]
            yield f"most_expensive {size}", most_expensive, [shape, shape]

    def random(x: Any) -> Any:
        key = jax.random.key(0)
        for i in range(2):
            x = x + jax.random.normal(jax.random.fold_in(key, i), x.shape)
        return x

    yield "random", random, [("rows", (n * 16384,))]


def _of_sums(n: int) -> Iterator[Entry]:
    def norms(x: Any) -> Any:
        for _ in range(LAYERS):
            x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x

    def columns(x: Any) -> Any:
        return jnp.sum(jnp.reshape(x, (n, -1, x.shape[-1])), 1)

    def softmax(x: Any) -> Any:
        for _ in range(2):
            x = jax.nn.softmax(x, -1)
        return x

    for rows, width in ((256, 64), (1024, 256), (4096, 16)):
        shapes = [("rows", (n * rows, width))]
        yield f"norms {rows} {width}", norms, shapes
        yield f"columns {rows} {width}", columns, shapes
        yield f"softmax {rows} {width}", softmax, shapes


def _of_moves(n: int) -> Iterator[Entry]:
    def turned(x: Any) -> Any:
        return jnp.swapaxes(x, 1, 2) + 0.0, jnp.concatenate([x, x], -1)

    for rows, length, width in ((4, 64, 32), (16, 128, 128)):
        yield f"turned {rows} {length}", turned, [("rows", (n * rows, length, width))]

    def rows_by_number(table: Any, numbers: Any) -> Any:
        return table[numbers]

    shapes = [("whole", (64, 128)), ("numbers", (n * 1024,))]
    yield "gather", rows_by_number, shapes

    def scattered(table: Any, numbers: Any) -> Any:
        rows: Any = jax.vmap(lambda i: jnp.zeros_like(table[0]).at[i % 8].add(1.0))
        return jnp.sum(rows(numbers), 1)

    yield "scatter", scattered, [("whole", (64, 64)), ("numbers", (n * 256,))]

    def loop(x: Any, w: Any) -> Any:
        def body(x: Any, w: Any) -> Any:
            x = jnp.maximum(x @ w, 0.0)
            return x, x

        return jax.lax.scan(body, x, w)

    for rows, width, depth in ((16, 32, 32), (128, 64, 16)):
        shapes = [("rows", (n * rows, width)), ("whole", (depth, width, width))]
        yield f"loop {rows} {depth}", loop, shapes

    def small(*arrays: Any) -> Any:
        return [array * 0.5 + 1.0 for array in arrays]

    for count in (8, 64, 200):
        yield f"arguments {count}", small, [("whole", (64,))] * count


def _of_exchanges(n: int) -> Iterator[Entry]:
    if n == 1:
        return
    everywhere = jax.P("data")

    def summed(x: Any) -> Any:
        shared = functools.partial(jax.shard_map, in_specs=everywhere, out_specs=everywhere)

        @shared
        def add(x: Any) -> Any:
            for _ in range(4):
                x = jax.lax.pcast(jax.lax.psum(x, "data"), "data", to="varying") * 0.25
            return x

        return add(x)

    def gathered(x: Any) -> Any:
        for _ in range(2):
            whole = jax.lax.with_sharding_constraint(x, jax.P())
            x = jax.lax.with_sharding_constraint(whole * 0.5, everywhere)
        return x

    for size in (1 << 8, 1 << 14, 1 << 18):
        yield f"sum {size}", summed, [("rows", (n * size,))]
        yield f"gather {size}", gathered, [("rows", (n * size,))]


def _of_steps(n: int) -> Iterator[Entry]:
    """Yield training steps of small nets, with the mixture of kernels that a step has."""
    sizes = (
        (4, 32, 32, 2),
        (16, 32, 32, 4),
        (4, 64, 64, 4),
        (2, 128, 32, 2),
        (8, 128, 64, 4),
        (4, 96, 128, 8),
    )
    for rows, length, width, heads in sizes:
        shapes: list[Shape] = [("numbers", (n * rows, length))]
        matrices = [(64, width), (LAYERS, width, 4 * width), (LAYERS, 4 * width, width)]
        matrices += [(LAYERS, width, 3 * width), (LAYERS, width, width)]
        parts: list[Shape] = [("whole", dims) for dims in matrices]
        step = functools.partial(_step, heads)
        yield f"step {rows} {length} {width}", step, shapes + 3 * parts
        if n > 1 and LAYERS % n == 0:
            split: list[Shape] = [("parts", dims) for dims in matrices]
            yield f"split step {rows} {length} {width}", step, shapes + 3 * split


def _step(heads: int, tokens: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
    """Update a decoder of a few layers by Adam. ``arrays``: parameters and both moments."""
    n = len(arrays) // 3
    params, first, second = arrays[:n], arrays[n : 2 * n], arrays[2 * n :]
    gradients = jax.grad(functools.partial(_loss, heads, tokens))(params)
    changed: list[jax.Array] = []
    moments: list[jax.Array] = []
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
    for p, m, v, g in zip(params, first, second, gradients, strict=True):
        g = g * jnp.minimum(1.0, 1.0 / norm)
        m = 0.9 * m + 0.1 * g
        v = 0.99 * v + 0.01 * g * g
        changed.append(p - 0.001 * m / (jnp.sqrt(v) + 1e-8))
        moments += [m, v]
    return [*changed, *moments]


def _loss(heads: int, tokens: jax.Array, params: Sequence[jax.Array]) -> jax.Array:
    table, w_up, w_down, w_qkv, w_out = params
    x = table[tokens]
    rows, length, width = x.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    for i in range(LAYERS):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        qkv = jnp.reshape(y @ w_qkv[i], (rows, length, 3, heads, width // heads))
        scores = jnp.einsum("bthk,bshk->bhts", qkv[:, :, 0], qkv[:, :, 1])
        shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        mixed = jnp.einsum("bhts,bshk->bthk", shares, qkv[:, :, 2])
        x = x + jnp.reshape(mixed, x.shape) @ w_out[i]
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(y @ w_up[i]) @ w_down[i]
    logits = x @ table.T
    right = jax.nn.one_hot(tokens, table.shape[0])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * right, -1))
