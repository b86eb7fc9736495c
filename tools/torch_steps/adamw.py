"""A training step by AdamW in PyTorch, and the sides of a comparison: what this folder shares."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from jaxtrain import config as config_lib
from tools.our_step import Ours

Step = Callable[[], float]  # takes a step, waits for it and returns its loss


class Sides(NamedTuple):
    """Steps to compare. The others are made when they are called: each holds a model of its own."""

    ours: Ours
    others: Mapping[str, Callable[[], Step]]
    count: int  # type: ignore[assignment]  # of what a step has
    unit: str
    # largest relative difference of losses from the same weights; None = weights differ
    within: float | None = None
    # whose losses are held to that: fewer where a step makes rounding a thousand times what it was
    steps: int = 20
    # steps without randomness, whose losses are compared instead
    same: Callable[[], tuple[Step, Step]] | None = None


def theirs(make: Callable[[bool], Step]) -> dict[str, Callable[[], Step]]:
    return {"PyTorch, eager": lambda: make(False), "torch.compile": lambda: make(True)}


def parameter(x: np.ndarray) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.from_numpy(np.array(x)))


def linear(
    w_io: np.ndarray, b_o: np.ndarray | None = None, *, transposed: bool = False
) -> torch.nn.Linear:
    """Return a linear layer [inputs, outputs], or transposed, whose caller flattens heads."""
    w_oi = w_io if transposed else w_io.T
    layer = torch.nn.utils.skip_init(
        torch.nn.Linear, w_oi.shape[1], w_oi.shape[0], bias=b_o is not None
    )
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
    model: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    o: config_lib.Optim,
    *,
    compiled: bool = False,
    spared: tuple[str, ...] = (),
) -> Step:
    """Return a training step: the model's loss, its gradients clipped by norm, AdamW.

    ``o``: lr, b1, b2, eps, weight_decay and clip of it. Matrices decay but ``spared``, parameters
    by their names.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    decayed = [p for name, p in trained.items() if p.ndim > 1 and name not in spared]
    others = [p for p in trained.values() if not any(p is d for d in decayed)]
    groups = [
        {"params": decayed, "weight_decay": o.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=o.lr, betas=(o.b1, o.b2), eps=o.eps)
    forward = torch.compile(model) if compiled else model

    def step() -> float:
        loss = forward(*inputs)
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), o.clip)
        adamw.step()
        return float(loss.item())

    return step
