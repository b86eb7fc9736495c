"""No process holds all of a large state, at its start, in a save or a restore."""

import json
import os
import socket
import subprocess
import sys

import pytest

from jaxtrain.plan import environment
from tests.support.processes import ROOT, xla_flags

PROCESSES, DEVICES = 4, 2
# Shares of the bytes of all devices' state by which a process may grow at most. It holds a quarter.
# The start also has the random bits of its parts, and a restore the chunks that it reads.
MOST = {"start": 0.65, "save": 0.35, "restore": 0.5}
# The same of the bytes that it reads: each file once for its checksum, and in a restore twice.
MOST_READ = {"read in a save": 0.3, "read in a restore": 0.65}
MESH = (("mesh.data", "1"), ("mesh.fsdp", "8"), ("train.batch", "16"))
# A hundredth of giblet's parameters: its widest matrix has 1,641,600 rows, here as there.
GIBLET = (
    *MESH,
    ("model.head_width", "64"),
    ("model.bottleneck", "128"),
    ("model.decoder_widths", "(64, 64, 64, 64)"),
    ("model.trunk_widths", "(64, 64)"),
    ("model.decode_video_widths", "(64, 48)"),
    ("model.decode_audio_widths", "(64, 64)"),
    ("model.decode_text_widths", "(64, 64)"),
)
# A hundredth of the parameters of llama-3.1-70b, 0.7 billion with its whole vocabulary. The moments
# have 16 bits, since all of the state is in the memory of one machine here.
LANGUAGE = (
    *MESH,
    ("model.embed", "1024"),
    ("model.heads", "8"),
    ("model.kv_heads", "1"),
    ("model.mlp", "3584"),
    ("optim.moments", "bfloat16"),
)
CASES = {
    "language": ("configs/lm.py:llama-3.1-70b", LANGUAGE, "model.depth", "{}", (3, 33)),
    "giblet": ("configs/giblet.py:blank", GIBLET, "model.video_widths", "({}, 48, 32)", (8, 48)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_process_holds_the_whole_state(name, tmp_path):
    """The growth with the size of the model: programs and threads take the same for any."""
    source, overrides, field, form, sizes = CASES[name]
    found = []
    for size in sizes:
        folder = tmp_path / str(size)
        folder.mkdir()
        found.append(phases(folder, source, [*overrides, (field, form.format(size))]))
    small, large = found
    whole = large[0]["whole"] - small[0]["whole"]
    held = large[0]["held"] - small[0]["held"]
    assert whole > 5e8 and held == pytest.approx(whole / PROCESSES, rel=0.02)
    shares = {}
    for phase in (*MOST, *MOST_READ):
        most = max(process[phase] for process in large)
        least = min(process[phase] for process in small)
        shares[phase] = (most - least) / whole
    print(
        f"{name}: {whole / 1e6:,.0f} MB of state; a process holds {held / whole:.2f} of it;", end=""
    )
    print(
        " grows by or reads at most "
        + ", ".join(f"{x:.2f} ({phase})" for phase, x in shares.items())
    )
    for phase, share in shares.items():
        assert share < {**MOST, **MOST_READ}[phase], shares


@pytest.mark.slow
@pytest.mark.parametrize("source", ["configs/lm.py:llama-3.1-70b", "configs/giblet.py:blank"])
@pytest.mark.parametrize("target", ["gpu:h100x64", "tpu:v5p:4x4x4"])
def test_an_accelerator_holds_no_random_bits_next_to_its_part(target, source, tmp_path, request):
    """At full size. CPUs draw them in a loop, whose arrays the test above counts."""
    kind = target.partition(":")[0]
    request.getfixturevalue(f"{kind}_compiler")
    overrides = [*MESH[:1], ("mesh.fsdp", "-1"), ("train.batch", "64")]
    overrides += [("workdir", str(tmp_path / "run"))]
    if "70b" in source:
        overrides += [("optim.moments", "bfloat16")]
    packages = environment.find(kind)
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": environment.path(packages)}
    command = [sys.executable, "-m", "tests.support.start_program", target, source]
    ended = subprocess.run(
        [*command, json.dumps(overrides)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    print(f"{target}, {source}: {found}")
    assert found["state"] > 1e9
    assert found["temporaries"] < 1e-4 * found["state"]


def phases(tmp_path, source, overrides):
    """Start, save and restore in four processes of two devices. Return what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{probe.getsockname()[1]}"
    overrides = [*overrides, ("workdir", str(tmp_path / "run"))]
    running = []
    for process in range(PROCESSES):
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": xla_flags(DEVICES),
            "JAXTRAIN_COORDINATOR": place,
            "JAXTRAIN_PROCESSES": str(PROCESSES),
            "JAXTRAIN_PROCESS": str(process),
            "JAXTRAIN_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "tests.support.host_parts", source, json.dumps(overrides)]
        running.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    found = []
    for process in running:
        output = process.communicate(timeout=900)[0]
        assert process.returncode == 0, output[-3000:]
        found.append(json.loads(output.strip().splitlines()[-1]))
    return found
