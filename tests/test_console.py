"""The console: its progress line, messages and log file."""

import io
import logging
import math
import re
import sys
import time
import types

import pytest

from jaxtrain.telemetry import console

CLEAR = "\r\x1b[2K"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""
    now = types.SimpleNamespace(time=1000.0)
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: now.time)
    return now


@pytest.fixture
def logger():
    """A logger whose records go to one handler only, as main() sets it up for the root logger."""
    log = logging.getLogger("test_console")
    log.propagate, log.handlers = False, []
    log.setLevel(logging.INFO)
    return log


def screen(text):
    """The rows that a terminal shows of the text, after carriage returns and clears."""
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
    line = console.Console(terminal)
    logger.addHandler(console.ConsoleHandler(line))
    logger.info("starting")
    line.progress("step 1")
    logger.warning("disk is %s", "full")
    assert terminal.getvalue() == f"starting\n{CLEAR}step 1{CLEAR}warning: disk is full\nstep 1"
    clock.time += 1
    line.progress("step 2")
    logger.error("two\nlines")
    line.finish()
    logger.info("done")
    assert screen(terminal.getvalue()) == [
        "starting",
        "warning: disk is full",
        "error: two",
        "lines",
        "step 2",
        "done",
        "",
    ]


def test_a_terminal_is_not_written_to_at_every_step(clock):
    terminal = Terminal()
    line = console.Console(terminal)
    for step in range(100):
        line.progress(f"step {step}")
        clock.time += 0.01
    line.finish()
    assert terminal.getvalue().count(CLEAR) <= 12
    assert screen(terminal.getvalue()) == ["step 99", ""]


def test_a_progress_line_does_not_wrap(clock, monkeypatch):
    """A line of two rows could not be cleared: its first row would stay on the screen at every
    step."""
    monkeypatch.setenv("COLUMNS", "40")
    terminal = Terminal()
    console.Console(terminal).progress("x" * 100)
    assert terminal.getvalue() == CLEAR + "x" * 39


def test_a_log_file_gets_whole_lines_now_and_then(clock, logger):
    file = io.StringIO()
    line = console.Console(file, every=10)
    logger.addHandler(console.ConsoleHandler(line))
    for step in range(25):
        line.progress(f"step {step}")
        clock.time += 1
    logger.warning("disk is full")
    line.finish()
    line.finish()
    assert file.getvalue().splitlines() == [
        "step 0",
        "step 10",
        "step 20",
        "warning: disk is full",
        "step 24",
    ]


def test_the_last_line_of_a_log_file_is_there_once(clock):
    file = io.StringIO()
    line = console.Console(file)
    line.progress("step 1")
    line.finish()
    assert file.getvalue() == "step 1\n"


def test_a_run_logs_through_one_console(monkeypatch):
    """A message is printed once, although main and the run both start a console and a library has
    set up a handler of its own."""
    root, err = logging.getLogger(), io.StringIO()
    monkeypatch.setattr(root, "handlers", [logging.StreamHandler(err)])
    monkeypatch.setattr(sys, "stderr", err)
    console.start_console()
    console.start_console()
    logging.getLogger("jaxtrain").info("ours")
    logging.getLogger("jax").info("theirs, at a level that nobody asked for")
    logging.getLogger("jax").warning("theirs")
    assert err.getvalue() == "ours\nwarning: theirs\n"
    console.start_console(process=1)
    logging.getLogger("jaxtrain").warning("of another process")
    assert "another" not in err.getvalue()
    logging.captureWarnings(False)


def test_the_progress_line_has_step_loss_rate_and_time_left():
    rates = {
        "examples_per_second": 123.456,
        "mfu": 0.4321,
        "data_wait_share": 0.071,
        "eta_seconds": 3725.0,
    }
    line = console.progress_line(30, 1000, 2.34567, rates)
    for part in (
        "step 30/1000",
        "loss 2.3457",
        "123.5 examples/s",
        "MFU 43.2%",
        "waiting for data 7%",
        "1:02:05 left",
    ):
        assert part in line
    assert "above 100%" not in line
    line = console.progress_line(30, 1000, 2.0, rates | {"mfu_documents": 0.3})
    assert "MFU 43.2% (by documents 30.0%)" in line
    line = console.progress_line(30, 1000, 2.0, rates | {"mfu": 24.96})
    assert "MFU 2496.0% (above 100%: Task.flops is too high, or the measured peak too low)" in line
    assert "? left" in console.progress_line(0, 1000, 2.0, rates | {"eta_seconds": math.nan})


def test_the_progress_line_names_the_slowest_stage_of_the_loader():
    rates = {"examples_per_second": 1.0, "mfu": 0.1, "data_wait_share": 0.23, "eta_seconds": 1.0}
    assert "waiting for data 23% (most in decode)" in console.progress_line(
        1, 9, 2.0, rates, slowest="decode"
    )
    assert "waiting for data 23%  " in console.progress_line(1, 9, 2.0, rates)
    assert "decode" not in console.progress_line(
        1, 9, 2.0, rates | {"data_wait_share": 0.01}, slowest="decode"
    )
    supply = {"rows_asked_per_second": 6000.0, "rows_given_per_second": 1500.0, "cores_missing": 6}
    line = console.progress_line(1, 9, 2.0, rates | supply, slowest="decode")
    assert (
        "(most in decode; steps take 6,000 rows/s, the loader gives 1,500: 6 more cores for each"
        " process)" in line
    )


def test_the_progress_line_has_the_terms_of_the_loss():
    rates = {"examples_per_second": 1.0, "mfu": 0.1, "data_wait_share": 0.0, "eta_seconds": 1.0}
    line = console.progress_line(
        1, 9, 5.0, rates, terms={"supervised_loss": 2.25, "probe_loss": 2.75}
    )
    assert "loss 5.0000 = supervised 2.2500 + probe 2.7500  " in line


def test_a_message_is_shown_and_the_progress_line_returns(clock, logger):
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        line = console.Console(stream, every=10)
        logger.handlers = [console.ConsoleHandler(line)]
        line.progress("step 1")
        clock.time += 11
        line.progress("batch 1 of 2", passing=True)
        clock.time += 5
        line.progress("batch 2 of 2", passing=True)
        logger.info("evaluated")
        line.finish()
        logger.info("ended")
    assert screen(terminal.getvalue()) == ["evaluated", "step 1", "ended", ""]
    assert "batch 2 of 2" in terminal.getvalue()
    assert file.getvalue().splitlines() == [
        "step 1",
        "batch 1 of 2",
        "evaluated",
        "step 1",
        "ended",
    ]


def test_a_log_that_was_closed_and_whose_folder_is_gone_loses_its_line(tmp_path):
    log = console.LogFile(str(tmp_path / "logs"), process=0)
    log.close()
    (tmp_path / "logs").rename(tmp_path / "moved")
    log.emit(logging.makeLogRecord({"msg": "of a thread that outlives the run"}))
    assert not (tmp_path / "logs").exists()
