"""A training step of jaxtrain, and one by AdamW in PyTorch: what this folder shares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jaxtrain import config as config_lib
from jaxtrain.assembly import assemble
from jaxtrain.compile import xla_options
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.step import state as state_lib
from jaxtrain.step import train_step as step_lib
from jaxtrain.types import PyTree, Task
from loaders.base import Field

Step = Callable[[], float]  # takes a step, waits for it and returns its loss
Batch = Mapping[str, np.ndarray]


class Ours:
    """jaxtrain's step on one device, always of one batch, whose way to the device is included."""

    def __init__(
        self, make_task: Callable[..., Task], model: Any, o: config_lib.Optim, batch: Batch, *,
        adapters: config_lib.Lora | None = None, ema: float = 0.0, stage: Any = None,
    ):  # fmt: skip
        train = config_lib.Train(steps=1000, batch=len(next(iter(batch.values()))), ema=ema)
        config = config_lib.Config(model=model, train=train, optim=o, lora=adapters or config_lib.Lora())
        fields = {name: Field(x.shape[1:], x.dtype) for name, x in batch.items()}
        mesh = layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
        run = assemble(config, mesh, make_task=make_task, fields=fields)
        self.flops = run.task.flops
        self._step = xla_options.compile(run.trace(stage).lower(), run.compiler_options(), config.compiler)
        self._stop = step_lib.put_stop(run.layout, False)
        self._batch, self._place = batch, run.abstract.batch
        self._state = state_lib.init_state(run.task, run.tx, run.abstract, jax.random.key(0))

    def __call__(self) -> float:
        rows = {name: jax.device_put(self._batch[name], x.sharding) for name, x in self._place.items()}
        self._state, out = self._step(self._state, rows, self._stop)
        return float(out["loss"].total / out["loss"].weight)

    def params(self) -> PyTree:
        return jax.device_get(self._state.variables.params)

    def carry(self) -> PyTree:
        return jax.device_get(self._state.variables.carry)


class Sides(NamedTuple):
    """Steps to compare. The others are made when they are called: each holds a model of its own."""

    ours: Ours
    others: Mapping[str, Callable[[], Step]]
    count: int  # type: ignore[assignment]  # of what a step has
    unit: str
    within: float | None = None  # largest relative difference of losses from the same weights; None = weights differ
    steps: int = 20  # whose losses are held to that: fewer where a step makes rounding a thousand times what it was
    same: Callable[[], tuple[Step, Step]] | None = None  # steps without randomness, whose losses are compared instead


def theirs(make: Callable[[bool], Step]) -> dict[str, Callable[[], Step]]:
    return {"PyTorch, eager": lambda: make(False), "torch.compile": lambda: make(True)}


def parameter(x: np.ndarray) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.from_numpy(np.array(x)))


def linear(w_io: np.ndarray, b_o: np.ndarray | None = None, *, transposed: bool = False) -> torch.nn.Linear:
    """Return a linear layer [inputs, outputs], or transposed, whose caller flattens heads."""
    w_oi = w_io if transposed else w_io.T
    layer = torch.nn.utils.skip_init(torch.nn.Linear, w_oi.shape[1], w_oi.shape[0], bias=b_o is not None)
    layer.weight = parameter(np.ascontiguousarray(w_oi))
    if b_o is not None:
        layer.bias = parameter(b_o)
    return layer


def layer_norm(scale_d: np.ndarray, bias_d: np.ndarray | None, eps: float) -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(scale_d.size, eps=eps, bias=bias_d is not None)
    norm.weight = parameter(scale_d)
    if bias_d is not None:
        norm.bias = parameter(bias_d)
    return norm


def adamw_step(
    model: torch.nn.Module, inputs: Sequence[torch.Tensor], o: config_lib.Optim, *, compiled: bool = False,
    spared: tuple[str, ...] = (),
) -> Step:  # fmt: skip
    """Return a training step: the model's loss, its gradients clipped by norm, AdamW.

    ``o``: lr, b1, b2, eps, weight_decay and clip of it. Matrices decay but ``spared``, parameters
    by their names.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trained.items() if p.ndim > 1 and name not in spared]
    others = [p for p in trained.values() if not any(p is d for d in decayed)]
    groups = [{"params": decayed, "weight_decay": o.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.b1, o.b2), eps=o.eps)
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        loss = forward(*inputs)
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), o.clip)
        adamw.step()
        return loss.item()

    return step
