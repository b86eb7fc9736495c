"""Measures what kernels and exchanges cost on the CPUs of this machine, once.

`calibrate` compiles and times small programs with one device, with one device a core and with two a
core, each in a process of its own, and JAX's profiler times their kernels. The cost of each kind of
work (`cpu_work`) is fitted to the times of the kernels, and then to the times of whole programs,
which also determine the cost of calls and exchanges, and of devices that share the cores. The costs
by kernels are expected in the second fit. Both are least squares of relative errors, with no cost
below zero.

The costs are kept in the cache folder, in calibrations/host.json: the machine (CPU, cores, version
of JAX), a hash of the kinds of work, and by devices the costs and the error of the fit. They are
refused on another machine, and if the kinds of work have changed since.
"""

import collections
import functools
import hashlib
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.plan import cpu_work, hlo, kernel_times
from jaxtrain.plan.target import PlanError
from loaders.io import atomic_write, files, machine

FOLDER, FILE = "calibrations", "host.json"
PROGRAM = "from jaxtrain.plan import calibration; calibration.main()"
SECONDS = 0.08  # of each program's measurement in a pass
SLICE = 0.015  # [s] of it, of which the fastest counts: other processes share the cores
PASSES = 4  # through all programs, since a virtual machine can be slow for seconds
CPUINFO = pathlib.Path("/proc/cpuinfo")
LAYERS = 4
STEP_WEIGHT = 3.0  # in the fit, of programs that are training steps
LEAST_WEIGHT = 0.05  # of a kernel that takes no time
TYPICAL_WEIGHT = 0.1  # of typical costs, which decide if few kernels have a kind of work
KERNEL_WEIGHT = 1.0  # of a cost by kernels' times, in the fit to whole programs
LEAST_SHARE = 0.2  # of a typical cost, that a kind of work is expected to cost
ROUNDS = 4  # of a fit
TRACED, MIN_TRACED, MAX_TRACED = 0.1, 3, 20  # [s] and calls that the profiler times
KERNELS, START = "time in kernels", "start of a kernel"
REMEDY = "jaxtrain plan --calibrate measures this machine, in about three minutes"


class Timed(NamedTuple):
    """A kernel, as the profiler timed it."""

    work: Mapping[str, float]
    times: int  # executions in a call of the program
    seconds: float  # of one (`kernel_times`)


class Sample(NamedTuple):
    program: str
    kernels: Sequence[Timed]
    work: Mapping[str, float]  # of a call, without its kernels
    seconds: float  # of a call


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
        if not _fits(content):
            return f"{path} has no costs. {REMEDY}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{path} cannot be read ({error}). {REMEDY}"
    return ""


def _read(path: pathlib.Path) -> dict[str, Any]:
    content: dict[str, Any] = files.parse(files.read(path, most=1 << 20).decode(), str(path))
    return content


def _fits(content: Mapping[str, Any]) -> dict[int, tuple[dict[str, float], float, int]]:
    """Return number of devices -> costs, error, programs. Raises as a damaged file does."""
    found = {}
    for n_devices, fit in content["fits"].items():
        costs = {kind: float(cost) for kind, cost in fit["costs"].items()}
        error = float(fit["error"])
        numbers = [*costs.values(), error]
        if int(n_devices) < 1 or not costs or not all(0 <= n < math.inf for n in numbers):
            raise ValueError(f"its fit for {n_devices} devices has no costs, or no such numbers")
        found[int(n_devices)] = costs, error, int(fit["programs"])
    return found


def load(n_devices: int) -> cpu_work.HostCosts | None:
    """Return the costs of kernels on each of ``n_devices`` of this machine, None by `refusal`."""
    if refusal():
        return None
    content = _read(machine.cache_folder(FOLDER, FILE))
    fits = _fits(content)
    # one device has no exchanges, so several devices take its costs only if there are no others
    measured = [n for n in fits if (n > 1) == (n_devices > 1)] or [*fits]
    nearest = max((n for n in measured if n <= n_devices), default=min(measured))
    costs, error, programs = fits[nearest]
    at_once = max(nearest, machine.cores())
    if n_devices > at_once:  # kernels of the other devices run after each other
        costs = {kind: cost * n_devices / at_once for kind, cost in costs.items()}
    threads = threads_of_each(n_devices)
    return cpu_work.HostCosts(costs, content["machine"]["cpu"], threads, error, programs)


def threads_of_each(n_devices: int) -> int:
    """Return how many cores one of the devices has for itself, at least 1."""
    return max(1, machine.cores() // n_devices)


def fit(samples: Sequence[Sample]) -> tuple[dict[str, float], float]:
    """Return the cost of each kind of work, and the median of the relative errors."""
    expected = _costs_of_kernels(samples)
    works = [_work_of_all(sample) for sample in samples]
    seconds = [sample.seconds for sample in samples]
    weights = [STEP_WEIGHT if "step" in sample.program else 1.0 for sample in samples]
    for kind, cost in expected.items():
        works.append({kind: 1.0})
        seconds.append(max(cost, LEAST_SHARE * cpu_work.typical_cost(kind)))
        weights.append(KERNEL_WEIGHT)
    costs = _least_squares(works, seconds, weights)
    errors = [abs(seconds_of(sample, costs) / sample.seconds - 1) for sample in samples]
    return costs, statistics.median(errors)


def _costs_of_kernels(samples: Sequence[Sample]) -> dict[str, float]:
    """Fit the costs of kernels' work to the times of the kernels, as long as in the programs."""
    kernels = [kernel for sample in samples for kernel in sample.kernels]
    weights = [weight for sample in samples for weight in _shares(sample)]
    works = [kernel.work for kernel in kernels]
    seconds = [kernel.seconds for kernel in kernels]
    for kind in sorted({kind for work in works for kind in work}):
        works.append({kind: 1.0})
        seconds.append(cpu_work.typical_cost(kind))
        weights.append(TYPICAL_WEIGHT)
    of_work = _least_squares(works, seconds, weights)
    rows = []
    for sample in samples:
        in_kernels = sum(kernel.times * kernel.seconds for kernel in sample.kernels)
        n_kernels = sum(kernel.times for kernel in sample.kernels)
        rows.append({**sample.work, KERNELS: in_kernels, START: n_kernels})
    weights = [STEP_WEIGHT if "step" in sample.program else 1.0 for sample in samples]
    found = _least_squares(rows, [sample.seconds for sample in samples], weights)
    costs = {}
    for kind, cost in of_work.items():
        starting = found[START] if kind in cpu_work.LAUNCHES else 0.0
        costs[kind] = found[KERNELS] * cost + starting
    return costs


def _work_of_all(sample: Sample) -> dict[str, float]:
    work: dict[str, float] = collections.defaultdict(float, sample.work)
    for kernel in sample.kernels:
        for kind, amount in kernel.work.items():
            work[kind] += kernel.times * amount
    return dict(work)


def seconds_of(sample: Sample, costs: Mapping[str, float]) -> float:
    """Return the time of a call by costs of work."""
    return sum(costs.get(kind, 0.0) * n for kind, n in _work_of_all(sample).items())


def _shares(sample: Sample) -> list[float]:
    """Return the weights of a program's kernels in the fit, by their shares of its time."""
    together = sum(kernel.times * kernel.seconds for kernel in sample.kernels)
    return [math.sqrt(k.times * k.seconds / together) + LEAST_WEIGHT for k in sample.kernels]


def _least_squares(
    works: Sequence[Mapping[str, float]], seconds: Sequence[float], weights: Sequence[float]
) -> dict[str, float]:
    """Fit a cost to each kind of work."""
    from scipy import optimize

    nnls: Any = optimize.nnls

    kinds = sorted({kind for work in works for kind in work})
    amounts = np.array([[work.get(kind, 0.0) for kind in kinds] for work in works])
    relative = amounts / np.array(seconds)[:, None]
    scale = np.maximum(relative.max(axis=0), 1e-300)
    found = np.ones(len(seconds))
    costs = np.zeros(len(kinds))
    for _ in range(ROUNDS):
        # Squares of relative errors alone prefer costs that are too low, since those of times that
        # are too short are 1 at most. Errors are relative to the mean of both.
        by = np.array(weights) / np.sqrt(np.clip(found, 0.1, 10))
        solution, _ = nnls(by[:, None] * relative / scale, by, maxiter=100 * len(kinds))
        costs = solution / scale
        found = relative @ costs
    return dict(zip(kinds, costs.tolist(), strict=True))


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
        [sys.executable, "-c", PROGRAM], env=env, stdout=subprocess.PIPE, text=True
    )
    if process.returncode:
        raise PlanError(f"a process that measures this machine ended with {process.returncode}")
    samples = []
    for program, kernels, work, seconds in json.loads(process.stdout.strip().splitlines()[-1]):
        samples.append(Sample(program, [Timed(*row) for row in kernels], work, seconds))
    return samples


def main() -> None:
    """Measure every program on the devices of this process, and print the samples."""
    from jaxtrain.parallel import cluster

    cluster.use_threads_for_host_devices()
    machine.keep_freed_memory()  # as runs do
    print(json.dumps([*_samples()]))


def _samples() -> Iterator[Sample]:
    n_devices = jax.device_count()
    mesh = jax.make_mesh((n_devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    compiled, calls = {}, {}
    for name, function, shapes in programs(n_devices):
        arguments = [_array(shape, mesh) for shape in shapes]
        in_mesh: Any = jax.set_mesh(mesh)
        with in_mesh:
            step = jax.jit(function).lower(*arguments).compile()
        compiled[name] = hlo.Program(step.as_text() or "")
        calls[name] = functools.partial(step, *arguments)
        jax.block_until_ready(calls[name]())
    seconds = dict.fromkeys(calls, math.inf)
    for _ in range(PASSES):
        for name, call in calls.items():
            seconds[name] = min(seconds[name], _time(call))
    threads = threads_of_each(n_devices)
    for name, call in calls.items():
        yield sample_of(name, compiled[name], threads, call, seconds[name])


def sample_of(
    name: str, program: hlo.Program, threads: int, call: Callable[[], Any], seconds: float
) -> Sample:
    """Time the kernels of a program, whose call takes so many seconds."""
    n_calls = min(max(MIN_TRACED, round(TRACED / seconds)), MAX_TRACED)
    quick = kernel_times.of_kernels(call, n_calls)
    kernels = []
    for kernel, work in cpu_work.works(program, threads):
        if kernel.name in quick:
            kernels.append(Timed(work, kernel.times, quick[kernel.name]))
    return Sample(name, kernels, cpu_work.work_without_kernels(program), seconds)


def _time(call: Callable[[], Any]) -> float:
    """Return the mean time of a call, in the fastest of some slices of time."""
    fastest = math.inf
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        n_calls = 0
        while n_calls < 2 or time.perf_counter() - began < SLICE:
            jax.block_until_ready(call())
            n_calls += 1
        fastest = min(fastest, (time.perf_counter() - began) / n_calls)
    return fastest


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
    for rows, width in ((256, 256), (2048, 256)):

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

    for rows, width, inner in ((1024, 128, 8), (4, 256, 256), (8, 1024, 512)):
        shapes = [("rows", (n * rows, width)), ("whole", (LAYERS, width, inner))]
        yield f"thin {rows} {width} {inner}", thin, shapes

    by_rows = jax.P("data")
    share = functools.partial(jax.shard_map, in_specs=(by_rows, by_rows), out_specs=by_rows)

    @share
    def gradient(x: Any, y: Any) -> Any:
        """Multiply over the rows, as for the gradient of a matrix."""
        return x.T @ y

    for rows, width, inner in ((256, 32, 64), (512, 64, 128), (1024, 128, 512)):
        shapes = [("rows", (n * rows, width)), ("rows", (n * rows, inner))]
        yield f"gradient {rows} {width}", gradient, shapes

    def attention(q: Any, k: Any) -> Any:
        for _ in range(2):
            scores = jnp.einsum("bhtk,bhsk->bhts", q, k)
            q = jnp.einsum("bhts,bhsk->bhtk", scores, k)
        return q

    for rows, heads, length, width in (
        (4, 4, 128, 32),
        (32, 4, 16, 8),
        (2, 4, 256, 16),
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

    for size in (1 << 14, 1 << 18, 1 << 21):
        shape = ("rows", (n * size,))
        yield f"map {size}", cheap, [shape, shape]
        yield f"add {size}", one, [shape, shape]
    for size in (1 << 12, 1 << 17):
        shape = ("rows", (n * size,))
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

    for rows, width in ((1024, 256), (4096, 16)):
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

    for count in (8, 200):
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
        (4, 32, 32, 2, True),
        (16, 32, 64, 4, False),
        (2, 128, 32, 2, True),
        (8, 128, 64, 4, False),
        (4, 96, 128, 8, True),
    )
    for rows, length, width, heads, in_loop in sizes:
        shapes: list[Shape] = [("numbers", (n * rows, length))]
        matrices = [(64, width), (LAYERS, width, 4 * width), (LAYERS, 4 * width, width)]
        matrices += [(LAYERS, width, 3 * width), (LAYERS, width, width)]
        parts: list[Shape] = [("whole", dims) for dims in matrices]
        step = functools.partial(_step, heads, in_loop)
        yield f"step {rows} {length} {width}", step, shapes + 3 * parts
        if n > 1 and LAYERS % n == 0 and in_loop:
            split: list[Shape] = [("parts", dims) for dims in matrices]
            yield f"split step {rows} {length} {width}", step, shapes + 3 * split


def _step(heads: int, in_loop: bool, tokens: jax.Array, *arrays: jax.Array) -> Sequence[jax.Array]:
    """Update a decoder of a few layers by Adam. ``arrays``: parameters and both moments."""
    n = len(arrays) // 3
    params, first, second = arrays[:n], arrays[n : 2 * n], arrays[2 * n :]
    gradients = jax.grad(functools.partial(_loss, heads, in_loop, tokens))(params)
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


def _loss(heads: int, in_loop: bool, tokens: jax.Array, params: Sequence[jax.Array]) -> jax.Array:
    table, *layers = params
    x = table[tokens]
    if in_loop:
        x, _ = jax.lax.scan(lambda x, layer: (_layer(heads, x, layer), None), x, tuple(layers))
    else:
        for i in range(LAYERS):
            x = _layer(heads, x, [stacked[i] for stacked in layers])
    logits = x @ table.T
    right = jax.nn.one_hot(tokens, table.shape[0])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(logits * right, -1))


def _layer(heads: int, x: jax.Array, layer: Sequence[jax.Array]) -> jax.Array:
    w_up, w_down, w_qkv, w_out = layer
    rows, length, width = x.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    qkv = jnp.reshape(y @ w_qkv, (rows, length, 3, heads, width // heads))
    scores = jnp.einsum("bthk,bshk->bhts", qkv[:, :, 0], qkv[:, :, 1])
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
    mixed = jnp.einsum("bhts,bshk->bthk", shares, qkv[:, :, 2])
    x = x + jnp.reshape(mixed, x.shape) @ w_out
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(y @ w_up) @ w_down
