"""Numbers for people: records, the console, rates, pictures."""

import dataclasses
import io
import json
import logging
import math
import re
import struct
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxtrain import metrics
from jaxtrain.config import Config, Metrics
from jaxtrain.types import Mean

CLEAR = "\r\x1b[2K"


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_sums_are_added_before_they_are_divided():
    sums = [{"a": Mean(jnp.float32(6), jnp.float32(2))}, {"a": Mean(jnp.float32(1), jnp.float32(3))}]
    assert metrics.mean(sums) == {"a": 7 / 5}
    assert math.isnan(metrics.mean([{"a": Mean(jnp.float32(0), jnp.float32(0))}])["a"])
    assert metrics.mean([]) == {}


def test_sums_over_many_batches_are_kept_in_float64():
    """In float32, 1 would vanish beside 2**25."""
    sums = [{"a": Mean(np.float32(2**25), np.float32(1))}] + [{"a": Mean(np.float32(1), np.float32(0))}] * 3
    assert metrics.mean(sums)["a"] == 2**25 + 3


def test_promise_15_a_resumed_run_drops_later_steps_and_a_line_cut_short(tmp_path):
    writer = metrics.JsonlWriter(str(tmp_path), 0)
    for step in (10, 20, 30):
        writer.write(step, "train", {"loss": 1 / step})
    writer.write(20, "test", {"loss": 0.5})
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "split": "tr')
    writer = metrics.JsonlWriter(str(tmp_path), 20)
    writer.write(30, "train", {"loss": 3.0})
    writer.close()
    assert [(r["step"], r["split"]) for r in lines(tmp_path)] == [(10, "train"), (20, "train"), (20, "test"), (30, "train")]
    assert lines(tmp_path)[-1]["loss"] == 3.0
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_run_starts_a_fresh_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 10, "split": "train"}\nnonsense\n[]\n')
    metrics.JsonlWriter(str(tmp_path), 0).close()
    assert lines(tmp_path) == []


def test_records_are_json_and_reach_the_disk_at_once(tmp_path):
    writer = metrics.JsonlWriter(str(tmp_path), 0)
    writer.write(1, "train", {"nan": math.nan, "inf": -math.inf, "x": float(np.float32(0.1)), "tiny": 1e-12})
    record = lines(tmp_path)[0]  # before close: a killed run has its records
    assert record["nan"] is None and record["inf"] is None
    assert np.float32(record["x"]) == np.float32(0.1) and record["tiny"] == 1e-12
    writer.close()


def scalars(folder):
    """{(tag, step): value} from TensorBoard event files, read as the format says: length, crc, protobuf, crc."""
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
    writer = metrics.TensorboardWriter(str(tmp_path), 0)
    for step in (10, 20, 30):
        writer.write(step, "train", {"loss": 0.5 * step})
    writer.close()
    assert scalars(tmp_path / "tensorboard")[0] == {("train/loss", s): 0.5 * s for s in (10, 20, 30)}


def test_promise_15_tensorboard_forgets_what_a_resumed_run_does_again(tmp_path, monkeypatch):
    pytest.importorskip("tensorboardX")
    for start, steps, factor in ((0, (10, 20, 30), 1), (20, (30,), 2)):
        monkeypatch.setattr("socket.gethostname", lambda start=start: f"host{start}")  # two files, also within a second
        writer = metrics.TensorboardWriter(str(tmp_path), start)
        for step in steps:
            writer.write(step, "train", {"loss": factor * step})
        writer.close()
    found, purged = scalars(tmp_path / "tensorboard")
    assert purged == 21
    assert found == {("train/loss", 10): 10, ("train/loss", 20): 20, ("train/loss", 30): 60}


def test_promise_15_wandb_goes_on_in_the_same_run(tmp_path, monkeypatch):
    """With a stand-in for the service's client: the id that a workdir keeps is used again, and no step is sent twice."""
    calls, ids = [], iter(["first", "second"])

    class Run:
        step = 0

        def log(self, values, step):
            calls.append((step, values))
            self.step = step + 1

        def finish(self):
            calls.append("finish")

    client = types.SimpleNamespace(
        util=types.SimpleNamespace(generate_id=lambda: next(ids)), init=lambda **options: calls.append(options) or Run()
    )
    monkeypatch.setitem(sys.modules, "wandb", client)
    for _ in range(2):
        writer = metrics.WandbWriter(str(tmp_path), "birds", {"seed": 0})
        writer.write(10, "train", {"loss": 1.0})
        writer.write(9, "train", {"loss": 2.0})
        writer.close()
    assert [c["id"] for c in calls if isinstance(c, dict)] == ["first", "first"]
    assert calls.count((10, {"train/loss": 1.0})) == 2 and calls.count("finish") == 2
    assert (9, {"train/loss": 2.0}) not in calls


def test_writers_are_those_that_the_config_asks_for(tmp_path):
    pytest.importorskip("tensorboardX")
    config = Config(workdir=str(tmp_path))
    for wanted in (config, dataclasses.replace(config, metrics=Metrics(tensorboard=True))):
        writers = metrics.make_writers(wanted, 0)
        assert [type(w).__name__ for w in writers] == ["JsonlWriter", "TensorboardWriter"][: len(writers)]
        assert len(writers) == 1 + wanted.metrics.tensorboard
        for writer in writers:
            writer.close()


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = types.SimpleNamespace(time=1000.0)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(metrics.time, name, lambda: now.time)
    return now


@pytest.fixture
def logger():
    """A logger whose records go to one handler only, as main() sets it up for the root logger."""
    log = logging.getLogger("test_metrics")
    log.propagate, log.handlers = False, []
    log.setLevel(logging.INFO)
    return log


def screen(text):
    """What a terminal shows of the text: rows, after carriage returns and clears."""
    rows = [""]
    for part in re.split(r"(\n|\r\x1b\[2K)", text):
        if part == "\n":
            rows.append("")
        elif part == CLEAR:
            rows[-1] = ""
        else:
            rows[-1] += part
    return rows


def test_a_warning_is_above_the_progress_line_never_through_it(clock, logger):
    terminal = Terminal()
    console = metrics.Console(terminal)
    logger.addHandler(metrics.ConsoleHandler(console))
    logger.info("starting")
    console.progress("step 1")
    logger.warning("disk is %s", "full")
    assert terminal.getvalue() == f"starting\n{CLEAR}step 1{CLEAR}warning: disk is full\nstep 1"
    clock.time += 1
    console.progress("step 2")
    logger.error("two\nlines")
    console.finish()
    logger.info("done")
    assert screen(terminal.getvalue()) == ["starting", "warning: disk is full", "error: two", "lines", "step 2", "done", ""]


def test_a_terminal_is_not_written_to_at_every_step(clock):
    terminal = Terminal()
    console = metrics.Console(terminal)
    for step in range(100):
        console.progress(f"step {step}")
        clock.time += 0.01
    console.finish()
    assert terminal.getvalue().count(CLEAR) <= 12
    assert screen(terminal.getvalue()) == ["step 99", ""]


def test_a_progress_line_does_not_wrap(clock, monkeypatch):
    """A line of two rows could not be cleared: its first row would stay on the screen, once for each step."""
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    metrics.Console(terminal).progress("x" * 100)
    assert terminal.getvalue() == CLEAR + "x" * 39


def test_a_log_file_gets_whole_lines_now_and_then(clock, logger):
    file = io.StringIO()
    console = metrics.Console(file, every=10)
    logger.addHandler(metrics.ConsoleHandler(console))
    for step in range(25):
        console.progress(f"step {step}")
        clock.time += 1
    logger.warning("disk is full")
    console.finish()
    console.finish()
    assert file.getvalue().splitlines() == ["step 0", "step 10", "step 20", "warning: disk is full", "step 24"]


def test_the_last_line_of_a_log_file_is_there_once(clock):
    file = io.StringIO()
    console = metrics.Console(file)
    console.progress("step 1")
    console.finish()
    assert file.getvalue() == "step 1\n"


def test_a_run_logs_through_one_console(monkeypatch):
    """Started twice (by main, then by the run), and after a library has set up a handler of its own: one line each."""
    root, err = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(err)])
    monkeypatch.setattr(sys, "stderr", err)
    metrics.start_console()
    metrics.start_console()
    logging.getLogger("jaxtrain").info("ours")
    logging.getLogger("jax").info("theirs, at a level that nobody asked for")
    logging.getLogger("jax").warning("theirs")
    assert err.getvalue() == "ours\nwarning: theirs\n"
    metrics.start_console(process=1)
    logging.getLogger("jaxtrain").warning("of another process")
    assert "another" not in err.getvalue()
    logging.captureWarnings(False)


def test_rates_are_those_since_the_last_line(clock):
    meter = metrics.Meter(steps=100, batch=8, flops=1000, peak=4000.0)
    meter.begin(10, 5.0)
    clock.time += 2
    rates = meter.rates(20, 5.5)
    assert rates == {
        "steps_per_second": 5.0,
        "samples_per_second": 40.0,
        "mfu": 1.25,
        "data_wait_share": 0.25,
        "eta_seconds": 16.0,
    }
    both = metrics.Meter(steps=100, batch=8, flops=1000, full_flops=1600, peak=4000.0)
    both.begin(10, 5.0)
    clock.time += 2
    assert {k: v for k, v in both.rates(20, 5.5).items() if "mfu" in k} == {"mfu": 1.25, "mfu_full_attention": 2.0}
    clock.time += 100  # an evaluation, which is nobody's speed
    meter.begin(20, 5.5)
    clock.time += 1
    assert meter.rates(25, 5.5)["steps_per_second"] == 5.0
    clock.time += 1
    assert meter.rates(26, 8.0)["data_wait_share"] == 1.0


def test_the_progress_line_says_what_people_ask():
    rates = {"samples_per_second": 123.456, "mfu": 0.4321, "data_wait_share": 0.071, "eta_seconds": 3725.0}
    line = metrics.progress_line(30, 1000, 2.34567, rates)
    for part in ("step 30/1000", "loss 2.3457", "123.5 samples/s", "MFU 43.2%", "waiting for data 7%", "1:02:05 left"):
        assert part in line
    assert "? left" in metrics.progress_line(0, 1000, 2.0, rates | {"eta_seconds": math.nan})


def test_the_progress_line_names_what_the_loader_is_slow_at():
    rates = {"samples_per_second": 1.0, "mfu": 0.1, "data_wait_share": 0.23, "eta_seconds": 1.0}
    assert "waiting for data 23% (most in decode)" in metrics.progress_line(1, 9, 2.0, rates, slowest="decode")
    assert "waiting for data 23%  " in metrics.progress_line(1, 9, 2.0, rates)
    assert "decode" not in metrics.progress_line(1, 9, 2.0, rates | {"data_wait_share": 0.01}, slowest="decode")


def test_peak_of_a_cpu_is_measured_once_for_all_its_devices():
    peak, source = metrics.peak_flops()
    assert 1e9 < peak < 1e15 and "measured" in source


@pytest.mark.parametrize(
    ("kind", "each"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
    ],
)
def test_peak_of_a_known_chip_is_its_datasheets(monkeypatch, kind, each):
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(device_kind=kind, platform="x")] * 4)
    peak, source = metrics.peak_flops()
    assert peak == 4 * each and kind in source


def test_pictures_have_one_pixel_for_each_value_with_low_bands_at_the_bottom(tmp_path):
    images = np.zeros((10, 3, 5), np.float32)
    images[:, 0, 1] = 1.0  # band 0, frame 1
    images[:, 2, 4] = 0.5
    images[:, 1, :3] = (np.nan, -1, 2)
    paths = metrics.write_pictures(tmp_path / "pictures", {"input": images}, limit=4)
    assert [p.name for p in paths] == [f"input_{i}.png" for i in range(4)]
    with Image.open(paths[0]) as picture:
        assert (picture.format, picture.mode, picture.size) == ("PNG", "L", (5, 3))
        pixels = np.asarray(picture)
    np.testing.assert_array_equal(pixels, [[0, 0, 0, 0, 127], [0, 0, 255, 0, 0], [0, 255, 0, 0, 0]])
