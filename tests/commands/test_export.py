"""Checkpoints are exported to safetensors and read back: every bit and name, with little memory,
from every writer."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import types

import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
import safetensors.numpy

from jaxtrain.arrays import orbax_steps, safetensors_reader, stored
from jaxtrain.commands import export as tool
from tests.support import runs

ROOT = pathlib.Path(__file__).parent.parent.parent
NAMES = """
from jaxtrain.types import Export, Hub
from jaxtrain.workload import Workload

def names(config, path):
    if path.startswith("encoder/blocks/"):
        return [f"layer.{i}.{path.split('/')[-1]}" for i in range(config["depth"])]
    return path.replace("/", "_")

def files(config, dtype):
    return {"config.json": b'{"architectures": ["Llama"]}'}

def hub(config, files):
    return Hub("transformers", "text-generation", ("loss",), "import transformers")

def export():
    return Export(names=names, files=files, hub=hub, needed="^encoder/")

WORKLOAD = Workload(config=None, make_task=None, export=export)
"""


@pytest.fixture
def named(saved, tmp_path, monkeypatch) -> pathlib.Path:
    """Save a run of a workload whose exports another library loads."""
    (tmp_path / "named_workload.py").write_text(NAMES)
    monkeypatch.syspath_prepend(tmp_path)
    run = shutil.copytree(saved, tmp_path / "run")
    (run / "checkpoints" / "10" / "manifest.json").unlink()
    meta = run / "checkpoints" / "10" / "meta" / "metadata"
    meta.write_text(meta.read_text().replace("none_such", "named_workload"))
    return run


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("run")
    runs.save(folder, 10, runs.state(0, 10), run=runs.config(depth=3))
    return folder


def call(*args: object) -> int:
    return tool.main([str(a) for a in args])


def read(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Read a folder as Hugging Face does, with the format's own library: first the index, then each
    file."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= safetensors.numpy.load_file(folder / file)
    assert {
        name: (folder / file).name for name, file in index["weight_map"].items()
    }.keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in found.values())
    return found


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}


def test_the_formats_own_library_reads_every_bit_bfloat16_included(saved, tmp_path):
    assert call(saved, "--out", tmp_path / "out") == 0
    expected = {path.replace("/", "."): x for path, x in runs.numbers(runs.params(0)).items()}
    found = read(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(same(found[name], expected[name]) for name in expected)
    assert {x.dtype.name for x in found.values()} == {"float32", "bfloat16"}
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "flax"}


def test_the_average_and_another_dtype(saved, tmp_path):
    assert call(saved, "--ema", "--dtype", "bf16", "--out", tmp_path / "out") == 0
    for name, x in read(tmp_path / "out").items():
        assert same(
            x, runs.numbers(runs.params(1000))[name.replace(".", "/")].astype(ml_dtypes.bfloat16)
        ), name


def test_two_exports_are_equal_byte_for_byte_and_sha256sum_agrees(saved, tmp_path):
    for out in ("a", "b"):
        assert call(saved, "--shard-size", "60kB", "--out", tmp_path / out) == 0
    assert content(tmp_path / "a") == content(tmp_path / "b")
    checked = subprocess.run(
        ["sha256sum", "--check", "SHA256SUMS"], cwd=tmp_path / "a", capture_output=True, text=True
    )
    assert (
        checked.returncode == 0 and checked.stdout.count(": OK") == len(content(tmp_path / "a")) - 1
    )


def test_an_export_of_a_part_of_a_model_is_labelled_as_a_part(named, tmp_path, capsys):
    """transformers would fill the missing arrays with random numbers, and the metrics are of the
    whole model."""
    for only, is_part, left_out in (
        ("^head/", True, 4),
        ("w_qkv", True, 5),
        ("^encoder/", False, 2),
        ("", False, 0),
    ):
        out = tmp_path / f"out-{left_out}"
        assert call(named, "--workload", "named_workload", "--only", only, "--out", out) == 0
        said, card = capsys.readouterr().out, (out / "README.md").read_text()
        expected = (
            f"a part of the model (--only={only}), for warm starts"
            if is_part
            else "loaded by transformers"
        )
        assert (
            expected in said
            and ("transformers" in card) != is_part
            and ("| test | loss |" in card) != is_part
        )
        assert ("architectures" in (out / "config.json").read_text()) != is_part
        assert (f"whose path matches `{only}`: {left_out} arrays are left out" in card) == bool(
            left_out
        )
    assert call("--reverse", tmp_path / "out-4", "--out", tmp_path / "back") == 0


def test_files_are_no_larger_than_asked_and_split_between_layers(named, tmp_path):
    assert (
        call(
            named, "--workload", "named_workload", "--shard-size", "60kB", "--out", tmp_path / "out"
        )
        == 0
    )
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert [p.name for p in files] == [
        f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))
    ]
    assert len(files) >= 3 and max(p.stat().st_size for p in files) <= 60_000
    found, expected = read(tmp_path / "out"), runs.numbers(runs.params(0))
    assert found.keys() == {"encoder_w_patch", "encoder_scale", "head_w", "head_b"} | {
        f"layer.{i}.{name}" for i in range(3) for name in ("w_qkv", "b_qkv")
    }
    for i in range(3):
        assert same(found[f"layer.{i}.w_qkv"], expected["encoder/blocks/w_qkv"][i])
    layers = {
        json.loads((tmp_path / "out" / safetensors_reader.INDEX).read_text())["weight_map"][
            f"layer.{i}.w_qkv"
        ]
        for i in range(3)
    }
    assert len(layers) > 1, "one stack went into several files"

    # On the way back, the stack is a stack again.
    assert call("--reverse", tmp_path / "out", "--out", tmp_path / "back") == 0
    back = orbax_steps.open_step(tmp_path / "back" / "checkpoints" / "10")
    assert same(back["params/encoder/blocks/w_qkv"].read(()), expected["encoder/blocks/w_qkv"])


def test_a_round_trip_is_bit_exact(saved, tmp_path):
    assert call(saved, "--shard-size", "60kB", "--out", tmp_path / "out") == 0
    assert call("--reverse", tmp_path / "out", "--out", tmp_path / "back") == 0
    before = orbax_steps.open_step(saved / "checkpoints" / "10")
    after = orbax_steps.open_step(orbax_steps.find_step(tmp_path / "back"))
    assert after.keys() == {p for p in before if p.startswith("params/")} | {"step"}
    assert all(same(after[p].read(()), before[p].read(())) for p in after)
    meta = orbax_steps.read_json(tmp_path / "back" / "checkpoints" / "10", "meta")
    assert (
        meta["weights_only"]
        and meta["config"]["model"] == {"depth": 3}
        and meta["parameters"] == "abc123"
    )
    assert call(tmp_path / "back", "--shard-size", "60kB", "--out", tmp_path / "again") == 0
    weights = {name for name in content(tmp_path / "out") if name.endswith(".safetensors")}
    assert {n: content(tmp_path / "again")[n] for n in weights} == {
        n: content(tmp_path / "out")[n] for n in weights
    }


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
def test_a_checkpoint_of_several_processes_is_read_by_one_without_their_mesh(tmp_path, processes):
    """Real processes on loopback write, and one process with one device reads."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={8 // processes}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    program = [sys.executable, runs.__file__, str(tmp_path / "run"), str(port), str(processes)]
    writers = [
        subprocess.Popen(
            [*program, str(i)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for i in range(processes)
    ]
    outputs = [p.communicate(timeout=300)[0] for p in writers]
    assert not any(p.returncode for p in writers), "\n".join(outputs)
    state = tmp_path / "run" / "checkpoints" / "10" / "state"
    wrote = {p.parent.parent.name for p in state.glob("ocdbt.process_*/d/*")}
    assert wrote == {f"ocdbt.process_{i}" for i in range(processes)}, "each wrote a part"
    env |= {"XLA_FLAGS": ""}
    command = [
        sys.executable,
        "-m",
        "tools.orbax_to_safetensors",
        str(tmp_path / "run"),
        "--out",
        str(tmp_path / "out"),
    ]
    subprocess.run(command, env=env, cwd=ROOT, check=True, timeout=300)
    expected = {path.replace("/", "."): x for path, x in runs.numbers(runs.params(0)).items()}
    found = read(tmp_path / "out")
    assert found.keys() == expected.keys() and all(
        same(found[name], expected[name]) for name in expected
    )


def test_the_model_card_and_the_config(saved, tmp_path):
    records = saved / "metrics.jsonl"
    assert call(saved, "--out", tmp_path / "out") == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "step 10" in card and '"depth": 3' in card and f"jax {jax.__version__}" in card
    assert "| test | loss | 1.0 | the minimised sum of its terms" in card, "with its meaning"
    assert card.index("| test | loss |") < card.index("| train | loss |"), (
        "how good the model is comes first"
    )
    assert "0.9" not in card, f"the last of {records.read_text()}"
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == runs.config(depth=3)


def test_the_cards_numbers_are_those_of_the_exported_weights(saved, tmp_path):
    """If there is an average, an evaluation uses it."""
    run = {**runs.config(depth=3), "train": {"steps": 30, "ema": 0.9}}
    runs.save(tmp_path / "run", 10, runs.state(0, 10), run=run)
    shutil.copy(saved / "metrics.jsonl", tmp_path / "run")
    assert call(tmp_path / "run", "--out", tmp_path / "plain") == 0
    assert call(tmp_path / "run", "--ema", "--out", tmp_path / "ema") == 0
    plain, ema = ((tmp_path / name / "README.md").read_text() for name in ("plain", "ema"))
    assert "| train | loss |" in plain and "| test |" not in plain and "model-index" not in plain
    assert "Those of test are of the average, which `jaxtrain export --ema` writes" in plain
    assert "| test | loss |" in ema and "| train |" not in ema and "model-index" in ema
    assert "the average of the parameters of a run" in ema


def test_a_number_too_large_for_the_dtype_is_an_error(tmp_path, capsys):
    state = runs.state(0, 10)
    state["params"]["norm"] = jnp.array([1.0, -7e4, jnp.inf])
    runs.save(tmp_path / "run", 10, state, run=runs.config(depth=3))
    assert call(tmp_path / "run", "--dtype", "f16", "--out", tmp_path / "out") == 2
    assert (
        "norm holds 7e+04, which float16 cannot hold; choose another --dtype"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()
    assert call(tmp_path / "run", "--dtype", "bf16", "--out", tmp_path / "out") == 0


class Hub:
    """A local stand-in for huggingface_hub.HfApi. It keeps the files of a commit, and its
    connection may break."""

    def __init__(self, breaks: bool = False):
        self.files, self.breaks = {}, breaks

    def create_repo(self, name, *, private, repo_type, exist_ok):
        assert repo_type == "model" and exist_ok
        self.private = private
        return types.SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, *, repo_id, folder_path, allow_patterns, commit_message):
        if self.breaks:
            raise ConnectionError("the line broke")
        assert repo_id == "me/birds" and commit_message
        names = [path.name for path in pathlib.Path(folder_path).iterdir()]
        chosen = huggingface_hub.utils.filter_repo_objects(names, allow_patterns=allow_patterns)
        self.files = {name: (pathlib.Path(folder_path) / name).read_bytes() for name in chosen}


def test_an_upload_sends_what_was_exported_alone_in_one_commit(
    saved, tmp_path, monkeypatch, capsys
):
    out = tmp_path / "out"
    assert call(saved, "--license", "cc-by-4.0", "--shard-size", "60kB", "--out", out) == 0
    made = content(out)
    assert "file(s), loaded by jaxtrain;" in capsys.readouterr().out
    (out / "mine").write_text("not exported")
    hub = Hub(breaks=True)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda **_: hub)
    assert call(out, "--push", "birds", "--private") == 2
    assert (
        "birds could not be uploaded: the line broke; rerun the same command to resume"
        in capsys.readouterr().err
    )
    assert hub.private and not hub.files
    hub.breaks = False
    assert call(out, "--push", "birds") == 0
    assert f"me/birds: {len(made)} files are there" in capsys.readouterr().out
    assert hub.files == made
    (out / "config.json").write_text("{}")
    assert call(out, "--push", "birds") == 2 and "config.json differs" in capsys.readouterr().err


def test_the_cards_metadata_are_what_the_hub_reads(saved, tmp_path):
    """They are read by the Hub's own parser: license, library, and the last evaluation."""
    runs.save(tmp_path / "run", 10, runs.state(0, 10), run=runs.config(depth=3))
    about = ("--license", "mit", "--dataset", "me/birds")
    assert call(tmp_path / "run", *about, "--out", tmp_path / "out") == 0
    data = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.license, data.library_name, data.datasets) == ("mit", "jaxtrain", ["me/birds"])
    (result,) = data.eval_results
    assert (result.dataset_type, result.dataset_split, result.metric_type, result.metric_value) == (
        "me/birds",
        "test",
        "loss",
        1.0,
    )
    # a header, test and train
    assert huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md").text.count("\n| ") == 3


def flipped(content: bytes) -> bytes:
    """Flip the last bit. The last byte of numbers around 1 is "?", so writing a "?" there could
    change nothing."""
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_damaged_source_is_refused_both_ways(saved, tmp_path, capsys):
    run = pathlib.Path(shutil.copytree(saved, tmp_path / "run"))
    data = max(run.rglob("d/*"), key=lambda p: p.stat().st_size)
    data.write_bytes(flipped(data.read_bytes()))
    assert call(run, "--out", tmp_path / "out") == 2
    assert data.name in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert call(saved, "--out", tmp_path / "out") == 0
    model = tmp_path / "out" / "model.safetensors"
    model.write_bytes(flipped(model.read_bytes()))
    assert call("--reverse", tmp_path / "out", "--out", tmp_path / "back") == 2
    assert (
        "model.safetensors differs" in capsys.readouterr().err and not (tmp_path / "back").exists()
    )


def test_impossible_exports_are_reported(saved, tmp_path, capsys):
    runs.save(
        tmp_path / "plain", 1, {"step": jnp.int32(1), "params": {"w": jnp.zeros(2)}, "ema": ()}
    )
    assert call(tmp_path / "plain", "--ema", "--out", tmp_path / "out") == 2
    assert "kept no average" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    assert call(saved, "--out", tmp_path / "out") == 2
    assert "not empty" in capsys.readouterr().err and (tmp_path / "out" / "mine").exists()
    with pytest.raises(SystemExit):
        call(saved, "--shard-size", "some", "--out", tmp_path / "out")
    with pytest.raises(SystemExit):
        call("--out", tmp_path / "out")


def test_safetensors_of_others_are_read_by_their_dots(tmp_path):
    arrays = {
        "a.w": np.arange(6, dtype=np.float16).reshape(2, 3),
        "b": np.array([True, False]),
        "c": np.array(3, np.int64),
    }
    arrays["d.e"] = np.zeros((0, 4), np.float32)
    safetensors.numpy.save_file(arrays, tmp_path / "other.safetensors")
    for place in (tmp_path, tmp_path / "other.safetensors"):
        assert safetensors_reader.is_safetensors(place)
        found = safetensors_reader.open_safetensors(place)
        assert {p.replace("/", ".") for p in found} == arrays.keys()
        assert all(same(one.read(()), arrays[p.replace("/", ".")]) for p, one in found.items())
    assert safetensors_reader.open_safetensors(tmp_path)["a/w"].read(
        (slice(1, 2), slice(0, 2))
    ).tolist() == [[3, 4]]


def written(folder, **files):
    """Write a folder of safetensors files and JSON files. The names of the safetensors files come
    without the ending."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if name.endswith("json"):
            (folder / name).write_text(json.dumps(content))
        else:
            safetensors.numpy.save_file(
                {k: np.full(2, v, np.float32) for k, v in content.items()},
                folder / f"{name}.safetensors",
            )
    return folder


def test_a_stray_file_next_to_the_model_is_not_read(tmp_path, caplog):
    """transformers does the same: a file that sorts last is not a model."""
    folder = written(tmp_path / "x", model={"a": 1, "b": 2}, model_old={"a": 3, "c": 4})
    found = safetensors_reader.open_safetensors(folder)
    assert {name: one.read(()).tolist() for name, one in found.items()} == {
        "a": [1, 1],
        "b": [2, 2],
    }
    assert "model.safetensors is read; not read: model_old.safetensors" in caplog.text
    assert safetensors_reader.open_safetensors(
        written(tmp_path / "parts", x={"a": 1}, y={"b": 2})
    ).keys() == {
        "a",
        "b",
    }


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"x": {"a": 1}, "y": {"a": 2}}, "a is in x.safetensors and in y.safetensors"),
        (
            {"x": {"a": 1, "b": 1}, INDEX: {"weight_map": {"a": "x.safetensors"}}},
            "does not fit x.safetensors, which holds, too: b",
        ),
        (
            {"x": {"a": 1}, INDEX: {"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}},
            "which lacks: b",
        ),
        (
            {
                "x": {"a": 1},
                "y": {"b": 1},
                INDEX: {"weight_map": {"a": "y.safetensors", "b": "x.safetensors"}},
            },
            "does not fit",
        ),
        (
            {"x": {"a": 1}, "model": {"a": 2}, INDEX: {"weight_map": {"a": "x.safetensors"}}},
            "names other files",
        ),
        (
            {"model": {"a": 1}, "config.json": {"quantization_config": {"quant_method": "fp8"}}},
            "quantization_config is set .fp8",
        ),
        ({"adapter_model": {"a": 1}, "adapter_config.json": {"r": 4}}, "an adapter of peft"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused_by_name(tmp_path, content, said):
    with pytest.raises(stored.StoredError, match=said):
        safetensors_reader.open_safetensors(written(tmp_path / "x", **content))


@pytest.mark.parametrize("damage", ["cut", "header", "offsets"])
def test_a_damaged_safetensors_file_is_named(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"w": np.zeros((8, 8), np.float32)}, path)
    raw = path.read_bytes()
    path.write_bytes(
        {
            "cut": raw[:-8],
            "header": b"\xff" * 8 + raw[8:],
            "offsets": raw.replace(b"[8,8]", b"[8,9]"),
        }[damage]
    )
    with pytest.raises(stored.StoredError, match="model.safetensors"):
        safetensors_reader.open_safetensors(tmp_path)


def test_an_array_larger_than_a_chunk_is_saved_and_exported_in_chunks(tmp_path, monkeypatch):
    """This holds for any part of it on a device. Here one device has all of it."""
    monkeypatch.setattr(orbax_steps, "CHUNK", 1 << 16)
    w = np.random.default_rng(0).standard_normal((1024, 128), np.float32)
    tree = {"step": jnp.int32(1), "params": {"w": jnp.asarray(w)}}
    with ocp.CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        save = ocp.args.StandardSave(tree, save_args=orbax_steps.in_chunks(tree))
        manager.save(1, args=ocp.args.Composite(state=save))
    one = orbax_steps.open_step(orbax_steps.find_step(tmp_path / "run"))["params/w"]
    assert one.chunk == (128, 128)
    pieces = list(one.pieces(limit=1 << 16))
    assert len(pieces) == 8 and all(same(one.read(i), w[i]) for i in pieces)
    assert call(tmp_path / "run", "--shard-size", "100kB", "--out", tmp_path / "out") == 0
    assert same(read(tmp_path / "out")["w"], w)


@pytest.mark.slow
def test_memory_is_one_array_not_the_model(tmp_path):
    """A model of 1.2 GB in 12 arrays is exported and read back, each in a process of its own. Each
    takes some 100 MB more than an empty process."""
    rng = np.random.default_rng(0)
    params = {f"w{i}": rng.standard_normal((2500, 10_000), np.float32) for i in range(12)}
    with ocp.CheckpointManager(tmp_path / "run" / "checkpoints") as manager:
        manager.save(
            1,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave({"step": np.int32(1), "params": params})
            ),
        )
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}

    def peak(*args: object) -> float:
        """The peak of memory [MB]."""
        program = (
            "import sys, resource; from jaxtrain.commands import export as t; c ="
            " t.main(sys.argv[1:]) if sys.argv[1:] else 0"
        )
        program += (
            "; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, file=sys.stderr);"
            " sys.exit(c)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, args)],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return float(done.stderr.split()[-1])

    empty = peak()
    assert peak(tmp_path / "run", "--shard-size", "300MB", "--out", tmp_path / "out") - empty < 450
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 6
    found = safetensors.numpy.load_file(tmp_path / "out" / "model-00001-of-00006.safetensors")
    assert all(same(x, params[name]) for name, x in found.items())
