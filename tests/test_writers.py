"""The files that a run leaves for readers: records and pictures."""

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import struct
import sys
import types

import numpy as np
import pytest
from PIL import Image

from jaxtrain.config import Config, ConfigError, Metrics
from jaxtrain.telemetry import trackers, writers


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_promise_15_a_resumed_run_drops_later_steps_and_a_line_cut_short(tmp_path):
    writer = writers.JsonlWriter(str(tmp_path), 0)
    for step in (10, 20, 30):
        writer.write(step, "train", {"loss": 1 / step})
    writer.write(20, "test", {"loss": 0.5})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "split": "tr')
    writer = writers.JsonlWriter(str(tmp_path), 20)
    writer.write(30, "train", {"loss": 3.0})
    writer.close()
    assert [(r["step"], r["split"]) for r in lines(tmp_path)] == [
        (10, "train"),
        (20, "train"),
        (20, "test"),
        (30, "train"),
    ]
    assert lines(tmp_path)[-1]["loss"] == 3.0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl", "metrics.jsonl.odd"]
    assert (tmp_path / "metrics.jsonl.odd").read_text() == '{"step": 20, "split": "tr\n'


def test_a_fresh_run_starts_a_fresh_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "split": "train"}\nnonsense\n[]\n')
    writers.JsonlWriter(str(tmp_path), 0).close()
    assert lines(tmp_path) == []


def test_records_are_json_and_reach_the_disk_at_once(tmp_path):
    writer = writers.JsonlWriter(str(tmp_path), 0)
    writer.write(
        1, "train", {"nan": math.nan, "inf": -math.inf, "x": float(np.float32(0.1)), "tiny": 1e-12}
    )
    record = lines(tmp_path)[0]  # before close, because a killed run has its records, too
    assert record["nan"] is None and record["inf"] is None
    assert np.float32(record["x"]) == np.float32(0.1) and record["tiny"] == 1e-12
    writer.close()


def scalars(folder):
    """{(tag, step): value} of TensorBoard event files, read by their format: length, crc, protobuf,
    crc."""
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    found, purged = {}, 0
    for path in sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event, data = events.Event.FromString(data[12 : 12 + size]), data[16 + size :]
            if event.session_log.status == event.session_log.START and event.step:
                purged = event.step
                found = {k: v for k, v in found.items() if k[1] < purged}
            found |= {(v.tag, event.step): v.simple_value for v in event.summary.value}
    return found, purged


def test_tensorboard_holds_the_records(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = trackers.TensorboardWriter(str(tmp_path))
    for step in (10, 20, 30):
        writer.write(step, "train", {"loss": 0.5 * step})
    writer.close()
    assert scalars(tmp_path / "tensorboard")[0] == {
        ("train/loss", s): 0.5 * s for s in (10, 20, 30)
    }


def test_tensorboard_begins_again_if_its_files_are_removed(tmp_path, caplog):
    pytest.importorskip("tensorboardX")
    writer = trackers.TensorboardWriter(str(tmp_path))
    writer.write(1, "train", {"loss": 2.0})
    shutil.rmtree(tmp_path / "tensorboard")
    with caplog.at_level("WARNING", "jaxtrain"):
        for step in (2, 3):
            writer.write(step, "train", {"loss": 1.0})
    writer.close()
    assert scalars(tmp_path / "tensorboard")[0] == {("train/loss", 2): 1.0, ("train/loss", 3): 1.0}
    assert "tensorboard was removed; records from step 2 on are there" in caplog.text
    assert len(caplog.records) == 1


def test_tensorboard_holds_pictures_and_generations(tmp_path):
    events = pytest.importorskip("tensorboardX.proto.event_pb2")
    writer = trackers.TensorboardWriter(str(tmp_path))
    images = np.zeros((2, 3, 5))
    images[0, 0] = 1.0  # the lowest row of the first image
    writer.pictures(7, {"restored": images})
    writer.generations(7, [{"prompt": "2 + 3 =\n# no heading", "reward": 0.5}])
    writer.close()
    found = {}
    for path in (tmp_path / "tensorboard").iterdir():
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event, data = events.Event.FromString(data[12 : 12 + size]), data[16 + size :]
            found |= {(v.tag, event.step): v for v in event.summary.value}
    with Image.open(io.BytesIO(found["restored/0", 7].image.encoded_image_string)) as picture:
        grey = np.asarray(picture.convert("L"))
    assert (
        grey.shape == (3, 5)
        and (grey[-1] == 255).all()
        and not grey[:-1].any()
        and ("restored/1", 7) in found
    )
    [text] = [
        v.tensor.string_val[0].decode()
        for (tag, _), v in found.items()
        if tag.startswith("generations/0")
    ]
    assert text == "    prompt: 2 + 3 =\n    # no heading\n    reward: 0.5"


def test_promise_15_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    for start, steps, factor in ((0, (10, 20, 30), 1), (20, (30,), 2)):
        # two files, also within one second
        monkeypatch.setattr("socket.gethostname", lambda start=start: f"host{start}")
        writer = trackers.TensorboardWriter(str(tmp_path))
        writer.resume(start)
        for step in steps:
            writer.write(step, "train", {"loss": factor * step})
        writer.close()
    found, purged = scalars(tmp_path / "tensorboard")
    assert purged == 21
    assert found == {("train/loss", 10): 10, ("train/loss", 20): 20, ("train/loss", 30): 60}


def test_promise_15_wandb_resumes_in_the_same_run(tmp_path, monkeypatch):
    """This uses a stand-in for the service's client. The id in the workdir is used again, and no
    step is sent twice."""
    calls = []

    class Run:
        step = 0

        def log(self, values, step):
            calls.append((step, values))
            self.step = step + 1

        def finish(self):
            calls.append("finish")

    client = types.SimpleNamespace(
        init=lambda **options: calls.append(options) or Run(),
    )
    monkeypatch.setitem(sys.modules, "wandb", client)
    metrics = Metrics(wandb_project="birds")
    for _ in range(2):
        with connected(Config(workdir=str(tmp_path), metrics=metrics)) as [tracker]:
            tracker.write(10, "train", {"loss": 1.0})
            tracker.write(9, "train", {"loss": 2.0})
    first, second = [c["id"] for c in calls if isinstance(c, dict)]
    assert first == second == (tmp_path / "wandb_id").read_text()
    options = {"project": "birds", "resume": "allow"}
    assert options.items() <= calls[0].items()
    assert not {"entity", "group", "name", "tags"} & calls[0].keys(), "WANDB_* decide these"
    assert calls.count((10, {"train/loss": 1.0})) == 2 and calls.count("finish") == 2
    assert (9, {"train/loss": 2.0}) not in calls


@contextlib.contextmanager
def connected(config):
    made = trackers.make(config)
    with trackers.closing(made, lambda: False):
        trackers.connect(made, lambda: False)
        yield made


def kept(tmp_path, **metrics):
    """The records that a service gets from a run that is killed after step 30, resumed from 20 and
    ended at 40."""
    for first, steps in ((0, (10, 20, 30)), (20, (30, 40))):
        config = Config(workdir=str(tmp_path / "run"), metrics=Metrics(**metrics))
        with connected(config) as made:
            records = writers.JsonlWriter(config.workdir, first)
            for step in steps:
                for writer in (records, *made):
                    writer.write(step, "train", {"loss": float(step), "odd": math.nan})
            if first:
                for writer in (records, *made):
                    writer.write(40, "test", {"accuracy": 0.5})
            records.close()


def test_promise_15_mlflow_resumes_in_the_same_run(tmp_path, monkeypatch):
    """This uses a stand-in for its client: there is one run, its config is sent once, and no record
    is sent twice. The next test uses the real client."""
    calls = []

    def said(name, result=None):
        return lambda *given, **options: calls.append((name, *given, options)) or result

    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))
    names = ("set_experiment", "log_params", "log_metrics", "end_run")
    client = types.SimpleNamespace(
        start_run=said("start_run", run), **{name: said(name) for name in names}
    )
    monkeypatch.setitem(sys.modules, "mlflow", client)
    (tmp_path / "run").mkdir()
    kept(tmp_path, mlflow_experiment="birds")
    assert [c[1:] for c in calls if c[0] == "start_run"] == [
        ({"run_name": "run"},),
        ({"run_id": "r1"},),
    ]
    params = [c[1] for c in calls if c[0] == "log_params"]
    assert params[0]["workdir"] == str(tmp_path / "run") and all(
        len(each) <= 100 for each in params
    )
    assert sum(params[0] == each for each in params) == 1, (
        "what a resumed run is set to was said before"
    )
    sent = [(c[2]["step"], c[1]) for c in calls if c[0] == "log_metrics"]
    assert sent == [
        *((s, {"train/loss": float(s)}) for s in (10, 20, 30, 40)),
        (40, {"test/accuracy": 0.5}),
    ]
    assert calls[-1][0] == "end_run"


def test_promise_15_trackio_resumes_in_the_same_run(tmp_path, monkeypatch):
    calls, sent = [], []
    run = types.SimpleNamespace(
        log=lambda values, step: sent.append((step, values)),
        finish=lambda: sent.append(("finish", {})),
    )
    utils = types.SimpleNamespace(TRACKIO_DIR=tmp_path / "trackio")
    client = types.SimpleNamespace(init=lambda **options: calls.append(options) or run, utils=utils)
    monkeypatch.setitem(sys.modules, "trackio", client)
    (tmp_path / "run").mkdir()
    kept(tmp_path, trackio_project="birds")
    first, second = calls
    assert (
        first == second
        and first["project"] == "birds"
        and first["resume"] == "allow"
        and first["name"].startswith("run-")
    )
    assert first["config"]["train.steps"] == "10000"
    found = [(step, values.get("train/loss", values.get("test/accuracy"))) for step, values in sent]
    expected = [
        (10, 10.0),
        (20, 20.0),
        (30, 30.0),
        ("finish", None),
        (40, 40.0),
        (40, 0.5),
        ("finish", None),
    ]
    assert found == expected, "no step twice"

    def refuse(**options):
        raise OSError("no such server\nand more")

    monkeypatch.setattr(client, "init", refuse)
    with pytest.raises(
        ConfigError,
        match="trackio_project.*cannot be used now: no such server and more; or unset it",
    ):
        kept(tmp_path, trackio_project="birds")
    (tmp_path / "file").touch()
    utils.TRACKIO_DIR = tmp_path / "file" / "trackio"
    with pytest.raises(ConfigError, match="trackio_project.*Not a directory"):
        kept(tmp_path, trackio_project="birds")


@pytest.mark.slow
def test_the_real_mlflow_and_trackio(tmp_path, monkeypatch):
    """Both keep the records of a killed and resumed run as one run, with each step once."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    # set before the import, which reads it
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    mlflow, trackio = pytest.importorskip("mlflow"), pytest.importorskip("trackio")
    (tmp_path / "run").mkdir()
    kept(tmp_path, mlflow_experiment="birds", trackio_project="birds")
    client = mlflow.MlflowClient()
    [run] = client.search_runs([client.get_experiment_by_name("birds").experiment_id])
    history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")]
    assert (
        sorted(history) == [(s, float(s)) for s in (10, 20, 30, 40)]
        and run.info.status == "FINISHED"
    )
    assert run.data.params["train.steps"] == "10000" and run.data.metrics["test/accuracy"] == 0.5
    [run] = trackio.Api().runs("birds")
    assert (
        run.name == (tmp_path / "run" / "trackio_name").read_text()
        and run.config["train.steps"] == "10000"
    )
    logs = trackio.sqlite_storage.SQLiteStorage.get_logs("birds", run.name)
    assert [(x["step"], x["train/loss"]) for x in logs if "train/loss" in x] == [
        (s, float(s)) for s in (10, 20, 30, 40)
    ]


def test_trackers_are_those_that_the_config_asks_for(tmp_path):
    config = Config(workdir=str(tmp_path))
    asked = Metrics(tensorboard=True, trackio_project="birds")
    assert trackers.make(config) == []
    made = trackers.make(dataclasses.replace(config, metrics=asked))
    assert [tracker.field for tracker in made] == ["tensorboard", "trackio_project"]


def test_pictures_have_one_pixel_for_each_value_with_low_bands_at_the_bottom(tmp_path):
    images = np.zeros((10, 3, 5), np.float32)
    images[:, 0, 1] = 1.0  # band 0, frame 1
    images[:, 2, 4] = 0.5
    images[:, 1, :3] = (np.nan, -1, 2)
    paths = writers.write_pictures(tmp_path / "pictures", {"input": images}, limit=4)
    assert [p.name for p in paths] == [f"input_{i}.png" for i in range(4)]
    with Image.open(paths[0]) as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "L", (5, 3))
        pixels = np.asarray(picture)
    np.testing.assert_array_equal(pixels, [[0, 0, 0, 0, 127], [0, 0, 255, 0, 0], [0, 255, 0, 0, 0]])


def test_promise_12_records_wait_for_room(small_disk, caplog):
    pytest.importorskip("tensorboardX")
    disk = small_disk(256)
    each, lines = (
        [writers.JsonlWriter(str(disk), 0), trackers.TensorboardWriter(str(disk))],
        writers.Lines(str(disk)),
    )
    lines.write("classes.jsonl", 0, [{"right": [1]}])
    room = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(room.f_bavail * room.f_frsize))
    for step in range(1, 401):
        for writer in each:
            writer.write(step, "train", {"loss": 0.5 * step})
        if step % 100 == 0:
            lines.write("classes.jsonl", step, [{"right": [step] * 3000}])
    for name in ("metrics.jsonl", "classes.jsonl", "events.out.tfevents"):
        assert (
            sum(
                "cannot be written (No space left on device)" in m and name in m
                for m in caplog.messages
            )
            == 1
        )
    (disk / "ballast").unlink()
    for closing in (*each, lines):
        closing.close()
    steps = [json.loads(line)["step"] for line in (disk / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 401))
    assert scalars(disk / "tensorboard")[0] == {("train/loss", s): 0.5 * s for s in steps}
    kept = [json.loads(line) for line in (disk / "classes.jsonl").read_text().splitlines()]
    assert [line["step"] for line in kept] == [
        0,
        100,
        200,
        300,
        400,
    ] and "never written" not in caplog.text
