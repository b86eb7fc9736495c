"""Stand-ins for the compilers of chips, for the tests of searches and of growth."""

import contextlib
import types

from jaxtrain import plan
from jaxtrain.plan import mesh_search, worker
from jaxtrain.plan.compile import Compiled
from jaxtrain.plan.forecast import Forecast


def compiled_as(monkeypatch, *, seconds, size=lambda config: 1e9):
    """Answer for a compiler: configs -> seconds and bytes. Returns the list of those asked for."""
    asked = []

    def ask(job):
        asked.append(job.config)
        return worker.Answer(Compiled(0, 0, int(size(job.config)), {}, 1.0, text="HloModule m"))

    def forecast_of(step, assembly, target):
        return Forecast(seconds(assembly.config), {}, 0.0, None, "")

    process = contextlib.nullcontext(types.SimpleNamespace(ask=ask))
    monkeypatch.setattr(worker, "Process", lambda kind: process)
    monkeypatch.setattr(worker.environment, "find", lambda kind: "here")
    monkeypatch.setattr(mesh_search, "forecast_of", forecast_of)
    return asked


def quickly(monkeypatch):
    """Give every candidate a lower bound without a trace."""
    bound = plan.bound.Bound(0, 0, [])
    monkeypatch.setattr(mesh_search, "bound_of", lambda config, target: bound)
