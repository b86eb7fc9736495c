"""Trackers that fail, in real processes: before the run an error, later a warning."""

import pytest

from loaders.io import machine
from tests.support.processes import records, run

ALL = (
    "--config.metrics.tensorboard=true",
    "--config.metrics.wandb_project=birds",
    "--config.metrics.mlflow_experiment=birds",
    "--config.metrics.trackio_project=birds",
)
FIELDS = ("tensorboard", "wandb_project", "mlflow_experiment", "trackio_project")
# Clients that fail at the moment that FAIL names.
CLIENT = '''
import os, pathlib, time, types

def at(moment):
    """A method that fails at this moment, which comes once if FAIL ends with -once."""
    def call(*args, **options):
        if moment == "write":
            calls.append(args)
        fail = os.environ.get("FAIL", "").removesuffix("-once")
        if fail == f"{moment}-hang":
            time.sleep(1000)
        if fail == f"{moment}-exit":
            raise SystemExit(3)
        if fail == moment and (fail == os.environ["FAIL"] or len(calls) == 1):
            raise ConnectionError(f"{__name__}: broken pipe\\nand more")
        return client
    return call

calls = []
info = types.SimpleNamespace(run_id="r1")
utils = types.SimpleNamespace(TRACKIO_DIR=pathlib.Path("trackio-records"))
client = types.SimpleNamespace(step=0, log=at("write"), finish=at("end"), info=info)
init = at("start")
set_experiment, start_run, log_params = at("start"), at("params"), at("params")
log_metrics, end_run = at("write"), at("end")
'''
TENSORBOARD = """
import types
from wandb import at
record_writer = types.SimpleNamespace(register_writer_factory=at("start"))
summary = types.SimpleNamespace(scalar=at("write"), image=at("picture"), text=at("text"))
class EventsWriter:
    def __init__(self, *names): pass
    write_event, flush, close = at("event"), at("flush"), at("end")
event_file_writer = types.SimpleNamespace(EventsWriter=EventsWriter)
"""
PROTOBUF = """
def Event(**fields): return fields
class SessionLog:
    START = 1
    def __init__(self, **fields): pass
"""


@pytest.fixture
def faulty(folder):
    for name in ("wandb", "mlflow", "trackio"):
        (folder / f"{name}.py").write_text(CLIENT)
    (folder / "tensorboardX" / "proto").mkdir(parents=True)
    (folder / "tensorboardX" / "__init__.py").write_text(TENSORBOARD)
    (folder / "tensorboardX" / "proto" / "event_pb2.py").write_text(PROTOBUF)
    return folder


def test_trackers_that_fail_at_the_start_are_errors_of_their_fields(faulty):
    output = run(faulty, "toy.py", *ALL, FAIL="start", code=2)
    assert "the config has 4 errors" in output and "Traceback" not in output
    for field in FIELDS:
        assert f"config.metrics.{field} is " in output
    assert output.count("which cannot be used now: ") == output.count("; or unset it") == 4
    assert "now: wandb: broken pipe and more; or unset it" in output
    assert "parameters" not in output, "no device was read"


@pytest.mark.parametrize("fail", ["write", "write-exit", "end"])
def test_trackers_that_fail_later_are_warnings(faulty, fail):
    output = run(faulty, "toy.py", "--config.train.steps=4", *ALL, FAIL=fail)
    assert sorted(records(faulty / "runs" / "toy", "train")) == [1, 2, 3, 4]
    for field in FIELDS:
        warnings = [line for line in output.split("\n") if f"config.metrics.{field}: " in line]
        first, last = warnings[0], warnings[-1]
        if fail == "end":
            assert "it could not be ended: " in first and first == last
        else:
            assert "the run goes on, and tries again" in first
            assert "records were not sent: " in last and len(warnings) == 2
    assert "Traceback" not in output


def test_a_tracker_that_recovers_gets_every_record(faulty):
    overrides = ("--config.train.steps=4", "--config.metrics.wandb_project=birds")
    output = run(faulty, "toy.py", *overrides, FAIL="write-once")
    assert "wandb: broken pipe; the run goes on, and tries again" in output
    assert "records are sent again" in output and "were not sent" not in output


def test_a_folder_with_the_name_of_a_package_is_none(folder):
    names = ("wandb", "mlflow", "trackio")
    for name in names:
        (folder / name / "run-1").mkdir(parents=True)
    output = run(folder, "toy.py", *ALL[1:], code=2)
    missing = [name for name in names if not machine.has_package(name)]
    for name in missing:
        assert f"needs the package {name}; install it" in output
