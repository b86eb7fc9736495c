"""An evaluation as a waiting user sees it."""

import io
import types

import jax.numpy as jnp
import pytest

from jaxtrain.config import Config, Train
from jaxtrain.run import evaluate
from jaxtrain.run.metrics_logger import MetricsLogger
from jaxtrain.telemetry import console, goodput
from jaxtrain.types import Mean, Variables


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("trials", [0, 1])
def test_a_long_evaluation_says_how_far_it_is(monkeypatch, trials):
    """An evaluation of a whole split can take minutes. Each batch moves the line, and so do the
    model's own generations."""
    shown = Terminal()
    screen = console.Console(shown)
    screen._every = 0.0
    host = types.SimpleNamespace(
        console=screen, beat=lambda doing: None, stopping=lambda: False, clock=goodput.Clock()
    )
    trial = types.SimpleNamespace(
        run=lambda variables: jnp.zeros(()), score=lambda found: ({"reward": 1.0}, [])
    )
    task = types.SimpleNamespace(
        progress=lambda v, b: {}, finish=lambda record: record, generative=(trial,) * trials
    )
    assembly = types.SimpleNamespace(
        config=Config(train=Train(steps=9)),
        task=task,
        layout=types.SimpleNamespace(replicated=lambda: None),
    )
    data = types.SimpleNamespace(
        test=types.SimpleNamespace(n_batches=3),
        test_batches=lambda n: iter([(0, jnp.float32(i)) for i in range(n)]),
    )
    sums = lambda variables, batch: {"loss": Mean(batch, jnp.float32(1))}  # noqa: E731
    programs = types.SimpleNamespace(evaluation=lambda bucket: sums)
    of_log = types.SimpleNamespace(_process=host)
    note = types.SimpleNamespace(
        evaluating=lambda *a: MetricsLogger.evaluating(of_log, *a),
        pictures=lambda *a, **k: None,
        evaluated=lambda *a: None,
    )
    saves = types.SimpleNamespace(score=lambda step, record: None)
    state = types.SimpleNamespace(variables=Variables(jnp.zeros(2)))
    record = evaluate.Evaluator(assembly, data, programs, note, saves, host)(state, 9)
    assert record["loss"] == 1.0, "the mean of 0, 1 and 2"
    lines = shown.getvalue().split("\r\x1b[2K")[1:]
    batches = [f"evaluation after step 9: batch {i} of 3" for i in (1, 2, 3)]
    assert lines == [*batches, *["evaluation after step 9: prompts are answered"] * trials]
