"""`jaxtrain checkpoint` as its user calls it: its output and its exit code."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxtrain.arrays import checksums, orbax_steps, safetensors, stored
from jaxtrain.commands import checkpoint as tool
from jaxtrain.commands import export, lora_to_peft
from tests.support import runs

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A run with steps 10 and 20. Between them only the parameters and the step change."""
    folder = tmp_path_factory.mktemp("run")
    first = runs.state(0, 10)
    runs.save(folder, 10, first)
    second = first | {
        "step": jnp.int32(20),
        "params": jax.tree.map(lambda x: x * jnp.asarray(2, x.dtype), first["params"]),
    }
    runs.save(folder, 20, second)
    return folder


@pytest.fixture
def run(saved, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "run"))


def call(capsys, *args: object) -> tuple[int, str]:
    code = tool.main([str(a) for a in args])
    out, err = capsys.readouterr()
    return code, out + err


def test_inspect_on_one_device_without_model_code(saved):
    """It runs in a process of its own, with one device and without importing the trainer."""
    program = (
        "import sys, jax; from jaxtrain.commands import checkpoint; code ="
        " checkpoint.main(sys.argv[1:])\nassert len(jax.devices()) == 1\nassert not [m for m in"
        " sys.modules if m.startswith(('jaxtrain.workloads', 'jaxtrain.run.loop',"
        " 'jaxtrain.step.state'))]\nsys.exit(code)"
    )
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    out = subprocess.run(
        [sys.executable, "-c", program, "inspect", saved],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = {line.split()[0]: line for line in out.stdout.splitlines() if line.strip()}
    assert "step 20" in out.stdout.splitlines()
    assert json.loads(lines["data"].removeprefix("data ")) == {"position": 20, "seed": 7}
    assert jax.__version__ in lines["versions"] and "abc123" in lines["parameter"]
    row = lines["params/encoder/blocks/w_qkv"]
    for part in (
        "[3, 128, 64]",
        "float32",
        "98.3 kB",
        "(·, fsdp, model) on data 2 × fsdp 2 × model 2",
    ):
        assert part in row, row
    assert "bfloat16" in lines["params/head/w"]
    assert lines["opt_state"].split()[1] == "13" and lines["ema"].split()[1] == "6"
    n = 64 * 128 + 3 * 128 * 64 + 3 * 64 + 128 + 128 * 5 + 5
    assert [lines[name].split()[2] for name in ("params", "ema", "opt_state")] == [
        f"{n:,}",
        f"{n:,}",
        f"{2 * n + 1:,}",
    ]


def test_every_array_reads_back_bit_for_bit_whole_and_in_pieces(saved):
    expected = runs.numbers(runs.state(0, 10))
    arrays = orbax_steps.open_step(saved / "checkpoints" / "10")
    assert arrays.keys() == expected.keys()
    for path, one in arrays.items():
        assert one.dtype == expected[path].dtype
        assert one.read(()).tobytes() == expected[path].tobytes(), path
        pieces = [one.read(index) for index in one.pieces(limit=1000)]
        assert b"".join(p.tobytes() for p in pieces) == expected[path].tobytes(), path
    one = arrays["params/encoder/w_patch"]
    assert one.chunk[0] < 64 and len(list(one.pieces(limit=1000))) == 64 // one.chunk[0], (
        "no chunk is decoded twice"
    )


def test_verify_of_a_good_step(saved, capsys):
    code, out = call(capsys, "verify", saved)
    assert code == 0 and "as it was written" in out and "26 arrays" in out and "no problems" in out


def test_verify_without_a_manifest_reads_and_says_so(run, capsys):
    (run / "checkpoints" / "20" / checksums.NAME).unlink()
    code, out = call(capsys, "verify", run)
    assert code == 0 and "no manifest.json" in out and "reading alone" in out and "26 arrays" in out


def test_verify_names_a_flipped_byte_in_each_file(run, capsys):
    step = run / "checkpoints" / "20"
    names = [str(p.relative_to(step)) for p in step.rglob("*") if p.is_file()]
    names = [name for name in names if name not in checksums.UNLISTED[1:]]
    assert sum("/d/" in name for name in names) >= 2
    for name in names:
        content = (step / name).read_bytes()
        damaged = bytearray(content)
        damaged[len(content) // 2] ^= 0x10
        (step / name).write_bytes(damaged)
        code, out = call(capsys, "verify", step)
        assert code == 1 and any(line.startswith(f"{name}:") for line in out.splitlines()), (
            name,
            out,
        )
        (step / name).write_bytes(content)
    assert call(capsys, "verify", step)[0] == 0


@pytest.mark.parametrize("keep", [True, False], ids=["cut short", "deleted"])
def test_verify_by_reading_alone_finds_what_cannot_be_read(run, capsys, keep):
    step = run / "checkpoints" / "20"
    (step / checksums.NAME).unlink()
    largest = max((p for p in step.rglob("*") if "/d/" in str(p)), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000]) if keep else largest.unlink()
    code, out = call(capsys, "verify", step)
    assert code == 1 and "cannot be read" in out and "problem" in out


def test_verify_counts_what_is_not_finite(tmp_path, capsys):
    state = {
        "step": jnp.int32(1),
        "params": {
            "w": jnp.array([1, jnp.nan, jnp.inf, -jnp.inf], jnp.bfloat16),
            "b": jnp.zeros(2),
        },
    }
    runs.save(tmp_path, 1, state)
    code, out = call(capsys, "verify", tmp_path)
    assert (
        code == 1 and "params/w: 1 NaN and 2 infinite of 4 numbers" in out and "params/b" not in out
    )


def test_diff_tells_what_changed_and_how_much(saved, capsys):
    code, out = call(capsys, "diff", saved / "checkpoints" / "10", saved / "checkpoints" / "20")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    w = runs.numbers(runs.params(0))["encoder/w_patch"].astype(np.float64)
    _, kind, norm_a, norm_b, norm_d, largest, cosine = rows["params/encoder/w_patch"]
    assert (code, kind) == (1, "changed")
    np.testing.assert_allclose(float(norm_a), np.linalg.norm(w), rtol=1e-4)
    np.testing.assert_allclose(
        [float(norm_b), float(norm_d)], [2 * np.linalg.norm(w), np.linalg.norm(w)], rtol=1e-4
    )
    np.testing.assert_allclose([float(largest), float(cosine)], [np.abs(w).max(), 1], rtol=1e-4)
    assert not [path for path in rows if path.startswith(("ema", "opt_state"))], (
        "what is equal is not listed"
    )
    assert "data.position: 10 → 20" in out
    assert call(capsys, "diff", saved / "checkpoints" / "10", saved / "checkpoints" / "10")[0] == 0


def test_diff_tells_missing_new_reshaped_retyped_and_nan(tmp_path, capsys):
    x = jnp.arange(6.0)
    runs.save(
        tmp_path / "a", 1, {"gone": x, "shape": x, "dtype": x, "nan": x, "sign": jnp.array([0.0])}
    )
    nan = x.at[2].set(jnp.nan)
    b = {
        "new": x,
        "shape": x.reshape(2, 3),
        "dtype": x.astype(jnp.bfloat16),
        "nan": nan,
        "sign": jnp.array([-0.0]),
    }
    runs.save(tmp_path / "b", 1, b)
    code, out = call(capsys, "diff", tmp_path / "a", tmp_path / "b")
    rows = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert code == 1
    assert "missing" in rows["gone"] and "new" in rows["new"] and "[6] → [2, 3]" in rows["shape"]
    assert "float32 → bfloat16" in rows["dtype"] and rows["nan"].endswith("0 → 1")
    assert "changed" in rows["sign"], "bits, not values"


def test_export_keeps_the_weights_and_says_so(run, tmp_path, capsys):
    code, out = call(capsys, "export", run, "--out", tmp_path / "weights")
    assert code == 0 and "weights only" in out
    step = tmp_path / "weights" / "checkpoints" / "20"
    before, after = orbax_steps.open_step(run / "checkpoints" / "20"), orbax_steps.open_step(step)
    assert after.keys() == {p for p in before if not p.startswith("opt_state")}
    for path, one in after.items():
        assert (
            one.dtype == before[path].dtype
            and one.read(()).tobytes() == before[path].read(()).tobytes()
        )
    meta = orbax_steps.read_json(step, "meta")
    assert meta.pop("weights_only") is True and meta == orbax_steps.read_json(
        run / "checkpoints" / "20", "meta"
    )
    assert checksums.verify(step) == []
    assert [p.name for p in (tmp_path / "weights" / "checkpoints").iterdir()] == ["20"], (
        "nothing is left behind"
    )
    code, out = call(capsys, "export", run, "--out", tmp_path / "weights")
    assert code == 2 and "exists already" in out
    assert "weights only" in call(capsys, "inspect", tmp_path / "weights")[1]


def test_a_path_without_a_checkpoint_is_reported_with_the_steps_that_exist(saved, tmp_path, capsys):
    code, out = call(capsys, "inspect", tmp_path)
    assert code == 2 and "holds no step; expected a run's workdir" in out
    code, out = call(capsys, "inspect", saved, "--step", "15")
    assert code == 2 and "no step 15; expected one of: 10, 20" in out
    code, out = call(capsys, "inspect", saved, "--step", "10")
    assert code == 0 and "step 10" in out


def test_an_export_is_looked_into_as_a_step_is(saved, tmp_path, capsys):
    """Its parameters have the paths and the bits of the step. Its checksums are those of its own
    files."""
    out = tmp_path / "out"
    safetensors.export(str(saved), str(out))
    code, text = call(capsys, "inspect", out)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert (
        code == 0
        and "step 20, weights only" in text
        and "[3, 128, 64]" in rows["params/encoder/blocks/w_qkv"]
    )
    code, text = call(capsys, "verify", out)
    assert (
        code == 0 and "as it was written" in text and "7 arrays" in text and "no problems" in text
    )
    code, text = call(capsys, "diff", saved, out)
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines() if line.strip()}
    assert code == 1 and not [path for path in rows if path.startswith("params/")], (
        "the parameters are equal"
    )
    assert rows["ema/encoder/w_patch"] == rows["opt_state/0/count"] == "missing"
    assert call(capsys, "diff", out, out)[0] == 0
    file = out / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    code, text = call(capsys, "verify", out)
    assert code == 1 and "model.safetensors differs" in text
    code, text = call(capsys, "inspect", out, "--step", "20")
    assert code == 2 and "is an export, which holds one step; omit --step" in text


def test_commands_that_need_a_run_refuse_an_export(saved, tmp_path, capsys):
    safetensors.export(str(saved), str(tmp_path / "out"))
    for main in (export.main, lora_to_peft.main):
        assert main([str(tmp_path / "out"), "--out", str(tmp_path / "again")]) == 2
        told = capsys.readouterr().err
        assert (
            "is an export, and" in told
            and "expected a run's workdir or a step directory of it" in told
        )
    assert export.main(["--reverse", str(saved), "--out", str(tmp_path / "again")]) == 2
    assert "which is a step of a run; expected a folder of safetensors" in capsys.readouterr().err
    assert lora_to_peft.main([str(saved), "--out", str(tmp_path / "again")]) == 2
    assert "holds no adapters: config.lora.rank was 0" in capsys.readouterr().err


def test_a_step_directory_has_one_step(saved, capsys):
    folder = saved / "checkpoints" / "10"
    assert call(capsys, "inspect", folder, "--step", "10")[0] == 0
    code, out = call(capsys, "inspect", folder, "--step", "20")
    assert (
        code == 2 and "which is a step directory itself; omit the step, or name the workdir" in out
    )


def test_a_relative_path_is_one_from_here(saved, capsys, monkeypatch):
    monkeypatch.chdir(saved.parent)
    assert (
        call(capsys, "inspect", saved.name)[0]
        == call(capsys, "verify", f"{saved.name}/checkpoints/10")[0]
        == 0
    )


def test_other_peoples_orbax_directories_are_read_too(tmp_path):
    """These have one folder per array, as Orbax wrote them before it used one store for all arrays,
    and Orbax's own item name `default`."""
    x = {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "list": [np.int32(1), np.float16(2)]}
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(
        tmp_path / "old", ocp.args.PyTreeSave(x)
    )
    with ocp.CheckpointManager(tmp_path / "new") as manager:
        manager.save(5, args=ocp.args.StandardSave(x))
    for folder in (tmp_path / "old", orbax_steps.find_step(tmp_path / "new")):
        arrays = orbax_steps.open_step(folder)
        assert {p: s.read(()).tolist() for p, s in arrays.items()} == {
            "w": x["w"].tolist(),
            "list/0": 1,
            "list/1": 2,
        }
        assert stored.nest((s.keys, p) for p, s in arrays.items()) == {
            "list": ["list/0", "list/1"],
            "w": "w",
        }


@pytest.mark.parametrize(
    ("number", "text"),
    [(None, "from before formats had numbers"), (7, "of format 7"), ("a\nb", r"of format 'a\nb'")],
)
def test_a_step_of_another_format_is_an_error_that_says_so(number, text, tmp_path, capsys):
    step = runs.save(tmp_path / "run", 10, runs.state(0, 10), manifest=False)
    meta = json.loads((step / "meta" / "metadata").read_text())
    meta.pop("format")
    (step / "meta" / "metadata").write_text(
        json.dumps(meta if number is None else {**meta, "format": number})
    )
    assert tool.main(["inspect", str(tmp_path / "run")]) == 2
    assert (
        f"10 is {text}, and this version reads format 2; read it with the version that wrote it"
        in capsys.readouterr().err
    )
