"""Digests, `jaxtrain diff` and `jaxtrain replay` repeat a run's steps, bit for bit, in real
runs."""

import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import cli, specs
from jaxtrain.commands import prove
from jaxtrain.parallel.layout import make_mesh
from jaxtrain.step import digest
from loaders.io import machine
from tests.support import processes
from tests.support.pages import examples

ROOT = pathlib.Path(__file__).parent.parent
TREE = {
    "a": {
        "w": np.arange(480, dtype="f4").reshape(24, 20),
        "half": jnp.arange(8, dtype=jnp.bfloat16),
    },
    "b": (np.int32(5), np.ones((2, 4), bool), np.zeros((0, 3), "f4"), np.arange(6, dtype=np.int8)),
}


def of(tree):
    return np.asarray(jax.jit(digest.of)(tree))


def test_a_digest_is_the_same_on_every_mesh_and_from_pieces_in_numpy():
    expected = of(TREE)
    for shape in ((8, 1, 1), (1, 4, 2)):
        mesh = make_mesh(*shape)
        split = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        tree = {
            "a": {
                "w": jax.device_put(TREE["a"]["w"], split),
                "half": jax.device_put(TREE["a"]["half"], split),
            }
        }
        np.testing.assert_array_equal(of({**tree, "b": TREE["b"]}), expected)
    added = np.zeros(2, np.uint32)
    for keys, x in jax.tree.leaves_with_path(TREE):
        x, path = np.asarray(x), specs.path_name(keys)
        for part in (slice(0, 3), slice(3, len(x))) if x.ndim and len(x) > 3 else (None,):
            added += digest.of_piece(
                path, x if part is None else x[part], () if part is None else (part,)
            )
    np.testing.assert_array_equal(added, expected)


def test_one_bit_anywhere_changes_both_halves_and_so_do_two_values_that_change_places():
    rng, seen = np.random.default_rng(0), {tuple(of(TREE))}
    for _ in range(60):
        w = TREE["a"]["w"].copy()
        w.view(np.uint32).reshape(-1)[rng.integers(w.size)] ^= np.uint32(1) << rng.integers(
            32, dtype=np.uint32
        )
        high, low = of({**TREE, "a": {**TREE["a"], "w": w}})
        assert all(high != h and low != l for h, l in seen)
        seen.add((high, low))
    w = TREE["a"]["w"].copy()
    w[0, 0], w[1, 0] = w[1, 0], w[0, 0]
    assert tuple(of({**TREE, "a": {**TREE["a"], "w": w}})) not in seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with digests on eight devices, and one with another learning rate."""
    folder = tmp_path_factory.mktemp("replay")
    for name in ("my_workload.py", "my_config.py", "my_loader.py"):
        (folder / name).write_text(examples()[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for name, rate in (("run", 0.03), ("other", 0.002)):
            command = [
                "train",
                "--config=my_config.py",
                f"--config.workdir={name}",
                "--config.train.steps=12",
            ]
            command += [
                "--config.checkpoint.every=4",
                "--config.metrics.every=2",
                "--config.metrics.digest=true",
            ]
            assert cli.main([*command, f"--config.optim.lr={rate}"]) == 0
        yield folder


MINE = ("--workload", "my_workload")


def replay(*arguments):
    return cli.main(["replay", *arguments, *MINE])


def cells(page, section):
    """The rows of the tables of a section, as texts."""
    part = page[page.index(f">{section}</h2>") :].partition("</section>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", part, re.S)
    return [
        [
            re.sub(r"<[^>]+>", "", cell)
            for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)
        ]
        for row in rows
    ]


def test_the_page_of_a_step_shows_its_examples_and_the_changed_step(runs, capsys):
    assert (
        replay(
            "run", "--step", "10", "--out", "paged", "--without", "row:1", "row:3", "--lr", "0.001"
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "without row:1, row:3: grad_norm" in said and "lr 0.001: grad_norm" in said
    page = (runs / "paged" / "step-10.html").read_text()
    head, *rows = cells(page, "The step")
    assert head == ["", "recorded", "again, on one device", "without row:1, row:3", "lr 0.001"]
    of = {row[0]: list(map(float, (x.replace("–", "nan") for x in row[1:]))) for row in rows}
    record = next(
        x
        for x in map(json.loads, (runs / "run" / "metrics.jsonl").read_text().splitlines())
        if x["step"] == 10
    )
    assert of["loss"][0] == pytest.approx(record["loss"], rel=1e-3) and of["loss"][
        1
    ] == pytest.approx(record["loss"], rel=1e-3)
    assert (
        of["grad_norm"][1] == pytest.approx(record["grad_norm"], rel=1e-3)
        and of["grad_norm"][2] != of["grad_norm"][1]
    )
    rate = 0.03 * (1 + math.cos(math.pi * 9 / 12)) / 2  # the config's cosine at its tenth update
    assert of["update_norm"][3] == pytest.approx(of["update_norm"][1] * 0.001 / rate, rel=2e-3)
    # The losses of single examples: their weighted mean is the loss of the batch. Without two of
    # them it is the loss of the other examples.
    _, *examples = cells(page, "Examples")
    each = {row[2]: (float(row[3]), float(row[4])) for row in examples}
    assert len(each) == len(examples) and sorted(each) == sorted(
        f"row:{k}" for k in range(len(each))
    )

    def mean(names):
        return sum(each[n][0] * each[n][1] for n in names) / sum(each[n][1] for n in names)

    assert mean(each) == pytest.approx(of["loss"][0], rel=1e-3)
    assert mean(each.keys() - {"row:1", "row:3"}) == pytest.approx(of["loss"][2], rel=1e-3)
    assert any(
        row[0] == "loss" and "10" in cells(page, "The steps around it")[0][-2]
        for row in cells(page, "The steps around it")
    )
    assert {len(row) for row in cells(page, "Parameters")} == {5} and cells(
        page, "Largest activations"
    )[1:]
    assert not list((runs / "paged").glob("before-*"))


def test_rewinds_are_made_again_and_a_page_of_an_early_step_outlives_later_saves(runs, capsys):
    (runs / "spiky_loader.py").write_text(
        """from my_loader import Config, Sums, dataset_info, element_spec

class Spiky(Sums):
    def _part(self, position, row):
        found = super()._part(position, row)
        return found | {"y": found["y"] * (1e4 if self._train and position in (9, 10, 11) else 1)}

make_loader = Spiky
"""
    )
    command = [
        "train",
        "--config=my_config.py",
        "--config.loader=spiky_loader",
        "--config.workdir=spiky",
        "--config.train.steps=20",
    ]
    command += [
        "--config.checkpoint.every=4",
        "--config.metrics.every=1",
        "--config.metrics.digest=true",
        "--config.guard.spike=4",
    ]
    assert (
        cli.main(
            [
                *command,
                "--config.guard.patience=3",
                "--config.guard.rewinds=1",
                "--config.guard.decay=0.8",
            ]
        )
        == 0
    )
    assert "the state is again that of step 8" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", "spiky", "--step", "12"]) == 0, (
        "saved after the rewind"
    )
    shutil.rmtree(runs / "spiky" / "checkpoints")
    assert replay("spiky", "--step", "3", "--until", "20") == 0
    said = capsys.readouterr()
    assert (
        "identical to step 20: 20 recorded steps" in said.out
        and "the state is again that of step 8" in said.err
    )
    assert "step 20 test" not in said.err, "a replay evaluates nothing"
    assert cells((runs / "spiky-replay-3" / "step-3.html").read_text(), "Parameters")[1:]


@pytest.mark.slow
def test_steps_are_replayed_on_the_mesh_of_the_start_that_made_them(runs, capsys):
    """The newest start has another mesh, as an attempt of fewer processes has."""
    command = ["train", "--config=my_config.py", "--config.workdir=meshes"]
    command += ["--config.checkpoint.every=3", "--config.checkpoint.keep=9"]
    command += ["--config.metrics.every=1", "--config.metrics.digest=true"]
    command.append("--config.optim.schedule=constant")
    first = ["--config.train.steps=6", "--config.mesh.data=8"]
    fewer = ["--config.train.steps=12", "--config.mesh.data=2", "--config.mesh.fsdp=4"]
    allowed = "--config.resume.allow=train.steps"
    assert cli.main([*command, *first]) == 0
    assert cli.main([*command, *fewer, "--config.train.accumulate=2", allowed]) == 0
    replayed = ("meshes", "--no-page", "--step")
    capsys.readouterr()
    assert replay(*replayed, "4", "--until", "6", "--out", "first") == 0
    assert "identical to step 6: 3 recorded steps" in capsys.readouterr().out
    assert replay(*replayed, "8", "--until", "12", "--out", "second") == 0  # from step 6 on
    assert "identical to step 12: 6 recorded steps" in capsys.readouterr().out
    replay(*replayed, "5", "--until", "8", "--out", "both")
    assert (
        "steps 7 to 8 were made by 1 process on mesh 2 × 4 × 1, and step 5 by 1 process on mesh"
        " 8 × 1 × 1: so their bits need not agree" in capsys.readouterr().out
    )
    assert cli.main(["diff", "meshes", "run"]) == 1
    assert "start.mesh.data: 8 → -1" in capsys.readouterr().out


def test_a_replay_on_another_mesh_says_so_and_how_far_apart_they_are(runs, capsys):
    replay(
        "run", "--step", "10", "--until", "12", "--out", "meshed", "--mesh", "2,4,1", "--no-page"
    )
    said = capsys.readouterr().out
    assert "mesh.data: -1 → 2; mesh.fsdp: 1 → 4: so bits need not agree" in said
    assert (
        "identical to step 12" in said
        or "step 10 differs: digest" in said
        and "are at most" in said
    )


def test_a_replayed_step_is_the_runs_own_and_the_checkpoint_has_its_digest(runs, capsys):
    assert replay("run", "--step", "10", "--until", "12", "--no-page") == 0
    assert "identical to step 12: 2 recorded steps have the same digest" in capsys.readouterr().out
    lines = [
        json.loads(line)
        for line in (runs / "run-replay-10" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if line["split"] == "train"] == [9, 10, 11, 12]
    last = next(line for line in lines if line["step"] == 12 and line["split"] == "train")
    assert cli.main(["checkpoint", "verify", "run", "--step", "12"]) == 0
    assert f"digest {last['digest_high']:08x}{last['digest_low']:08x}" in capsys.readouterr().out
    shutil.copytree(runs / "run", runs / "odd")
    _of_array(runs / "odd", 12, "params/w_in")
    assert cli.main(["checkpoint", "verify", "odd", "--step", "12"]) == 1
    assert re.search(
        r"\nparams/w_in: its digest is \w{16}, and the run recorded \w{16}\n",
        capsys.readouterr().out,
    )


def _of_array(run, step, name):
    """Change the recorded digest of an array at a step. Returns the names of all arrays."""
    path = run / "digests.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names, line = lines[0]["names"], next(line for line in lines if line["step"] == step)
    at = 16 * names.index(name)
    line["arrays"] = line["arrays"][:at] + "0" * 16 + line["arrays"][at + 16 :]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "odd\n")
    return names


def test_a_replay_says_which_step_differs_and_begins_at_0_without_a_checkpoint(
    runs, capsys, monkeypatch
):
    shutil.copytree(runs / "run", runs / "changed")
    shutil.rmtree(runs / "changed" / "checkpoints")
    path = runs / "changed" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    wrong = next(line for line in lines if line["split"] == "train" and line["step"] == 4)
    wrong["digest_low"] ^= 1
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    named = _of_array(runs / "changed", 4, "params/w_out")
    start = runs / "changed" / "goodput" / "process-0.jsonl"
    text = (
        start.read_text()
        .replace(f'"jax": "{jax.__version__}"', '"jax": "0.0.1"')
        .replace('"processes": 1', '"processes": 2')
    )
    start.write_text(re.sub(r'"cores": \d+, "threads": \d+', '"cores": 1, "threads": 77', text))
    monkeypatch.setenv("NPROC", os.environ.get("NPROC", "32"))
    monkeypatch.setattr(machine, "cores", lambda: 97)
    assert replay("changed", "--step", "6", "--no-page") == 1
    said = capsys.readouterr().out
    assert (
        "no checkpoint before step 6 is kept; the replay begins at step 0 and makes 6 steps, about"
        in said
    )
    options = json.loads((runs / "changed-replay-6" / "config.json").read_text())["compiler"]
    assert os.environ["NPROC"] == "77", "the threads of the run, by which XLA splits sums"
    assert "cores: 1 → 97" in said and options == {
        "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"
    }
    assert (
        f"versions.jax: 0.0.1 → {jax.__version__}" in said
        and "processes: 2 → 1" in said
        and "so bits need not agree" in said
    )
    assert (
        f"(1 of {len(named)} arrays: params/w_out)" in said and "the same digest to step 2" in said
    )


def test_a_replay_imports_no_module_that_a_foreign_config_names(runs, capsys):
    shutil.copytree(runs / "run", runs / "foreign")
    path = runs / "foreign" / "config.json"
    config = json.loads(path.read_text())
    for change in (
        {"loader": "my_loader"},
        {"loader": "loaders.text.tokens", "optim": {**config["optim"], "name": "evil:run"}},
    ):
        path.write_text(json.dumps({**config, "workload": "jaxtrain.workloads.language", **change}))
        assert cli.main(["replay", "foreign", "--step", "6"]) == 2
        assert "which is imported only if you trust its code" in capsys.readouterr().err
    path.write_text("{")
    assert replay("foreign", "--step", "6") == 2
    assert (
        "foreign/config.json is missing or cannot be read; put it back" in capsys.readouterr().err
    )
    assert cli.main(["diff", "foreign", "run"]) == 0
    assert (
        "foreign: config.json is missing or cannot be read, so no field is compared"
        in capsys.readouterr().out
    )


def test_a_run_that_still_trains_is_replayed_and_nothing_in_its_workdir_changes(runs, capsys):
    command = [
        "--config.workdir=live",
        "--config.train.steps=100000",
        "--config.checkpoint.every=4",
        "--config.metrics.every=2",
    ]
    live = processes.command(
        runs, "my_config.py", *command, "--config.metrics.digest=true", devices=8
    )
    try:
        processes.wait_for(lambda: processes.step_of(runs / "live") > 12, watch=[live])
        os.kill(live.pid, signal.SIGSTOP)  # so that a change would be the replay's
        threads = pathlib.Path(f"/proc/{live.pid}/task")
        if sys.platform == "linux":  # a thread that writes stops a little later
            processes.wait_for(
                lambda: all("State:\tT" in one.read_text() for one in threads.glob("*/status"))
            )
        before = {path: path.stat().st_mtime_ns for path in (runs / "live").rglob("*")}
        kept = sorted(
            int(path.name)
            for path in (runs / "live" / "checkpoints").iterdir()
            if path.name.isdecimal()
        )
        step = kept[-2] + 2
        assert replay("live", "--step", str(step), "--no-page") == 0
        assert f"identical to step {step}: 1 recorded steps" in capsys.readouterr().out
        assert {path: path.stat().st_mtime_ns for path in (runs / "live").rglob("*")} == before
        os.kill(live.pid, signal.SIGCONT)
        at = processes.step_of(runs / "live")
        processes.wait_for(lambda: processes.step_of(runs / "live") > at, watch=[live])
    finally:
        live.kill()
        live.communicate()


@pytest.mark.parametrize("gone", ["all of it", "a file"])
def test_a_checkpoint_that_is_deleted_during_the_replay_is_passed_over(
    runs, capsys, monkeypatch, gone
):
    for name in ("rotating", "rotating-replay-10"):
        shutil.rmtree(runs / name, ignore_errors=True)
    shutil.copytree(runs / "run", runs / "rotating")
    link, deleted = os.link, runs / "rotating" / "checkpoints" / "8"

    def rotated(source, target):
        if gone == "all of it":
            shutil.rmtree(deleted, ignore_errors=True)
        elif deleted.resolve() in pathlib.Path(source).resolve().parents:
            pathlib.Path(source).unlink(missing_ok=True)
        link(source, target)

    monkeypatch.setattr(os, "link", rotated)
    assert replay("rotating", "--step", "10", "--no-page") == 0
    assert "identical to step 10: 3 recorded steps have the same digest" in capsys.readouterr().out
    first = json.loads(
        (runs / "rotating-replay-10" / "metrics.jsonl").read_text().partition("\n")[0]
    )
    assert first["step"] == 5, "it began at the checkpoint of step 4"


def test_a_refusal_of_process_0_ends_every_process_at_once_with_the_same_line(runs):
    (runs / "there").mkdir()
    port = processes.free_port()
    command = [
        sys.executable,
        "-m",
        "jaxtrain",
        "replay",
        "run",
        "--step",
        "10",
        "--no-page",
        "--out",
        "there",
        *MINE,
    ]
    env = os.environ | {"PYTHONPATH": f"{runs}:{ROOT}"}
    started = [
        subprocess.Popen(
            command, cwd=runs, env=env | processes.at(port, i), stderr=subprocess.PIPE, text=True
        )
        for i in (0, 1)
    ]
    lines = [process.communicate(timeout=200)[1].splitlines()[-1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert lines == ["error: there exists; remove it, or choose another --out"] * 2
    assert not list((runs / "there").iterdir())


def test_a_run_in_an_object_store_is_refused_with_the_remedy(runs, capsys):
    shutil.copytree(runs / "run", runs / "stored")
    config = json.loads((runs / "stored" / "config.json").read_text())
    config["checkpoint"]["folder"] = "gs://bucket/run"
    (runs / "stored" / "config.json").write_text(json.dumps(config))
    for command in (["replay", "stored", "--step", "10", *MINE], ["diff", "stored", "other"]):
        assert cli.main(command) == 2
        assert (
            "its checkpoints are in gs://bucket/run; copy those that are needed"
            in capsys.readouterr().err.splitlines()[-1]
        )
    assert not (runs / "stored-replay-10").exists()


def test_a_replay_of_other_data_is_refused_before_its_first_step(runs, capsys):
    for name, error in (
        ("with", "999 now"),
        ("without", "began with other data or in another order (digest "),
    ):
        shutil.copytree(runs / "run", runs / name)
        config = json.loads((runs / name / "config.json").read_text())
        changed = {
            **config,
            "data": {**config["data"], "n": 999},
            "resume": {**config["resume"], "data": "restart"},
        }
        (runs / name / "config.json").write_text(json.dumps(changed))
        if name == "without":
            shutil.rmtree(runs / name / "checkpoints")
        assert replay(name, "--step", "6", "--no-page") == 2
        assert (
            error in capsys.readouterr().err.splitlines()[-1]
            and not (runs / f"{name}-replay-6").exists()
        )


def test_a_run_that_began_with_another_runs_checkpoint_is_replayed_from_it(runs, capsys):
    command = [
        "train",
        "--config=my_config.py",
        "--config.workdir=second",
        "--config.train.steps=14",
        "--config.optim.lr=0.03",
    ]
    command += [
        "--config.metrics.digest=true",
        "--config.metrics.every=1",
        "--config.resume.path=first",
    ]
    shutil.copytree(runs / "run", runs / "first")
    assert cli.main(command) == 0
    assert replay("second", "--step", "13", "--no-page") == 0
    assert "identical to step 13: 1 recorded steps have the same digest" in capsys.readouterr().out
    assert cli.main(["diff", "run", "second"]) == 1
    assert "run and second have recorded no step in common" in capsys.readouterr().out
    shutil.rmtree(runs / "first")
    assert replay("second", "--step", "14", "--no-page", "--out", "third") == 2
    assert (
        "began with a checkpoint of first (config.resume.path), which is no longer there"
        in capsys.readouterr().err
    )


def test_diff_names_the_first_step_and_the_field_and_the_arrays(runs, capsys):
    assert cli.main(["diff", "run", "run"]) == 0
    assert "identical to step 12: 6 recorded steps have the same digest" in capsys.readouterr().out
    assert cli.main(["diff", "run", "other"]) == 1
    said = capsys.readouterr().out
    assert "config.optim.lr: " in said and "→ 0.002" in said
    assert (
        "step 2 differs: digest" in said
        and "checkpoints of step 4: " in said
        and "of its values differ, by" in said
    )
    command = [
        "train",
        "--config=my_config.py",
        "--config.workdir=averaged",
        "--config.train.steps=4",
        "--config.train.ema=0.9",
    ]
    assert cli.main([*command, "--config.metrics.every=2"]) == 0
    assert cli.main(["diff", "run", "averaged"]) == 1
    assert "  only averaged has ema/" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["replay", "run", "--step", "13"],
            "has recorded its steps up to 12, and step 13 is asked for",
        ),
        (
            ["replay", "run", "--step", "1"],
            "has recorded its steps from 2 on; choose --step or --until from there",
        ),
        (["replay", "run", "--step", "5", "--until", "4"], "--until: 4 is before --step=5"),
        (
            ["replay", "run", "--step", "5"],
            "has a record every 2 steps, and none from step 5 to 5; add --until",
        ),
        (["replay", "run", "--step", "0"], "'0'; it must be an integer of at least 1"),
        (
            ["replay", "run", "--step", "6", "--out", "other", *MINE],
            "--out: other is in the workdir of a run",
        ),
        (
            ["replay", "run", "--step", "6", "--out", "run/x", *MINE],
            "run/x is inside the run, which is only read; choose an --out",
        ),
        (
            ["replay", "run", "--step", "6", "--out", "x"],
            "the run's workload is 'my_workload', which is imported only if you",
        ),
        (
            ["replay", "run", "--step", "6", "--without", "row:32", "--out", "x", *MINE],
            "has no such example; it has row:0, row:1",
        ),
        (
            ["replay", "run", "--step", "6", "--lr", "0"],
            "'0'; expected a number above 0, from 1.2e-38",
        ),
        (
            ["replay", "run", "--step", "6", "--lr", "1", "--no-page"],
            "--without and --lr are parts of the page",
        ),
        (
            ["replay", "run", "--step", "6", "--mesh", "2,2"],
            "'2,2'; expected three numbers of devices",
        ),
        (["replay", "nothing", "--step", "5"], "nothing"),
        (["diff", "run", "nothing"], "nothing"),
        (["prove", "--minutes", "nan"], "'nan'; expected a number of minutes, at least 0"),
        (
            ["replay", "gs://bucket/run", "--step", "5"],
            "gs://bucket/run is an address; copy the run's workdir into a folder",
        ),
    ],
)
def test_errors_are_one_line(runs, arguments, said, capsys):
    try:
        code = cli.main(arguments)
    except SystemExit as end:
        code = end.code
    lines = capsys.readouterr().err.splitlines()
    assert (
        code == 2
        and said in lines[-1]
        and not list(runs.glob("run-replay-1[3-9]")) + list(runs.glob("x"))
    )


def test_prove_kills_a_run_and_shows_that_it_ends_with_the_same_bits(runs, capfd, monkeypatch):
    command = [
        "prove",
        "--config=my_config.py",
        "--minutes=0",
        "--steps=12",
        "--kills=1",
        "--out=proof",
    ]
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setenv("PYTHONPATH", f"{runs}:{ROOT}")
    code = cli.main(command)
    printed = capfd.readouterr()
    assert code == 0, printed
    assert "1 kills in 1 runs: each ended with the same bits" in printed.out
    assert (
        "12 steps and the last checkpoint (" in printed.out
        and (runs / "proof" / "killed-1").is_dir()
    )
    assert cli.main(command) == 2
    assert "proof/undisturbed exists; choose another --out" in capfd.readouterr().err


def test_a_run_that_ended_before_its_kill_counts_as_none(tmp_path):
    assert prove._kill([sys.executable, "-c", "pass"], tmp_path, 60) is None
    assert prove._kill([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 0.5) == 0
