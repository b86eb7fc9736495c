"""The bytes, products and kernels of steps that are bound by their parameters, or have adapters.

Ratchets: a change may lower a bound. One that raises it says why in the changelog.
"""

import json
import os
import subprocess
import sys

import pytest

from jaxtrain.plan import environment, traffic, worker
from tools.chip import cases

SIXTEENTH = {"model.video_widths": "(256, 2048, 1024)"}  # of giblet's first matrix
TARGET = "gpu:h100x1"
ONE_DEVICE = {"mesh.data": "1", "mesh.fsdp": "1"}
NARROW = {"model.param_dtype": "bfloat16", "optim.moments": "bfloat16"}


def compiled(name, overrides, folder, *, has_norms):
    case = next(case for case in cases.CASES if case.name == name)
    config = case.config(cases.Data(folder, small=False), {}, {**overrides, **ONE_DEVICE})
    job = worker.Job(config, TARGET, worker.LAST, has_norms)
    [answer] = worker.ask([job])
    assert answer.compiled, answer.error
    return answer.compiled


# Prints the bytes that a product of a matrix with an odd number of columns moves, by options.
ODD = """
import json, sys
import jax, jax.numpy as jnp
from jaxtrain.plan import compile, hlo, target, traffic
compile.ask_for_no_chips()
[device] = compile.gpu_devices(target.parse_target("gpu:h100x1"))
place = jax.sharding.SingleDeviceSharding(device)
x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place) for s in ((64, 4096), (4096, 77347)))
lowered = jax.jit(jnp.dot).trace(x, w).lower()
for options in ({}, {"xla_gpu_enable_triton_gemm": False}, compile.UNTUNED):
    figures, _ = compile.ask(lowered, [device], options)
    kernels = traffic.traffic(hlo.Program(figures.text))
    print("ANSWER", sum(kernel.read for kernel in kernels))
"""


@pytest.mark.slow
def test_a_matrix_of_odd_width_is_read_once_as_by_a_card(gpu_compiler):
    """A card has Triton's products for it. Those of cuBLAS would read a padded copy, too."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": environment.path(gpu_compiler)}
    process = subprocess.run([sys.executable, "-c", ODD], capture_output=True, text=True, env=env)
    lines = [line for line in process.stdout.splitlines() if line.startswith("ANSWER ")]
    of_card, of_cublas, of_plan = (json.loads(line[7:]) for line in lines)
    matrix = 2 * 4096 * 77347  # [bytes]
    assert matrix < of_card < 1.05 * matrix and matrix < of_plan < 1.05 * matrix
    assert of_cublas > 2 * matrix


@pytest.mark.slow
def test_giblet_reads_and_writes_its_parameters_as_often_as_it_must(tmp_path, gpu_compiler):
    """In 16 bits with Adam's moments in 16 bits, without norms of the update.

    Forward and backward read or write each matrix in a product (but the first has no gradient of
    its input), the guard's norm reads the gradients of matrices that are not much larger than the
    operands of their products, and the update has four reads and three writes. The voxels' matrix,
    of 77,347 columns, is not padded.
    """
    step = compiled("giblet", SIXTEENTH | NARROW, tmp_path, has_norms=False)
    n_bytes = sum(kernel.times * (kernel.read + kernel.written) for kernel in step.kernels)
    parameters = step.arguments / 3  # with two moments; inputs are 2 %
    assert n_bytes / parameters < 11.8
    update = [kernel for kernel in step.kernels if "/update/" in kernel.scope]
    assert sum(kernel.read + kernel.written for kernel in update) / parameters < 7.1
    # a gradient in float32 of the voxels' matrix alone has 5.1 GB
    assert step.temporaries < 1.1 * parameters
    assert sum(kernel.times for kernel in step.kernels) < 800
    rates = traffic.Rates(3.0e12, 732e12)
    assert traffic.roofline(step.kernels, rates).seconds < 0.0163


@pytest.mark.slow
def test_the_adapters_of_an_audio_language_model_cost_what_they_must(tmp_path, gpu_compiler):
    """Two layers of Higgs, 32 rows in one microbatch, without recomputation, as the plan chooses.

    All 28 layers take 466 ms, with 5,537 kernels. The formula counts no products of adapters.
    """
    fields = {"train.accumulate": "1", "model.remat": "none"}
    step = compiled("higgs-lora", {**fields, "model.depth": "2"}, tmp_path, has_norms=True)
    rates = traffic.Rates(3.0e12, 732e12)
    sums = traffic.roofline(step.kernels, rates)
    assert sums.seconds < 0.0372
    assert sums.kernels < 1_300  # 1,217 with jax 0.11.2
    assert sums.read + sums.written < 62e9
    assert sums.flops < 1.13 * 15.25e12
    assert step.peak < 6.9e9
