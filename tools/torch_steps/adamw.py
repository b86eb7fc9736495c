"""A training step by AdamW in PyTorch, and the sides of a comparison."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxtrain import config as config_lib
from tools.our_step import Ours

Step = Callable[[], torch.Tensor]  # takes a step and returns its loss; a GPU is not waited for


class Case(NamedTuple):
    """A case of tools/chip/cases.py, of which a workload's `case_step` makes PyTorch's step."""

    config: Any  # of the run, with everything that the data and the plan decide
    params: Mapping[str, Any]  # ours, which the step begins with
    model_state: Any
    batch: Mapping[str, np.ndarray]
    way: str  # of `WAYS`, or of the workload's own
    frozen: Any = ()  # parameters that adapters leave as they are
    whole_loss: bool = True  # a language model's logits all at once, if they fit
    # filled by the first step: PyTorch's name of a parameter -> norm of its gradient, unclipped
    norms: dict[str, float] | None = None

    @property
    def is_compiled(self) -> bool:
        return self.way != "eager"


WAYS = ("eager", "compile")


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


def tensor(x: np.ndarray) -> torch.Tensor:
    """Return a copy on PyTorch's default device, also of bfloat16."""
    array = np.array(x)
    if array.dtype.name == "bfloat16":
        copied = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        copied = torch.from_numpy(array)
    return copied.to(torch.get_default_device())


def parameter(x: np.ndarray) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor(x))


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


class Part(NamedTuple):
    """Parameters with one learning rate, one decay and one clip."""

    decayed: list[torch.nn.Parameter]
    others: list[torch.nn.Parameter]
    lr: float
    weight_decay: float
    clip: float

    def options(self) -> Iterator[dict[str, Any]]:
        for parameters, weight_decay in ((self.decayed, self.weight_decay), (self.others, 0.0)):
            if parameters:
                yield {"params": parameters, "lr": self.lr, "weight_decay": weight_decay}


def parts(model: torch.nn.Module, o: config_lib.Optim, spared: Sequence[str]) -> list[Part]:
    """Return the parameters of each group of ``o``, by their names, and then all others."""
    made = [Part([], [], o.lr, o.weight_decay, o.clip)]
    for group in o.groups:
        lr = o.lr if group.lr is None else group.lr
        weight_decay = o.weight_decay if group.weight_decay is None else group.weight_decay
        made.append(Part([], [], lr, weight_decay, o.clip if group.clip is None else group.clip))
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        matches = (re.search(group.match, name.replace(".", "/")) for group in o.groups)
        part = made[next((i for i, match in enumerate(matches, 1) if match), 0)]
        (part.decayed if p.ndim > 1 and name not in spared else part.others).append(p)
    return [part for part in made if part.decayed or part.others]


def adamw_step(
    model: torch.nn.Module,
    inputs: Sequence[torch.Tensor],
    o: config_lib.Optim,
    *,
    compiled: bool = False,
    spared: tuple[str, ...] = (),
    half: bool = False,
    microbatches: int = 1,
    norms: dict[str, float] | None = None,
) -> Step:
    """Return a training step: the model's loss, its gradients clipped by norm, AdamW.

    ``o``: lr, b1, b2, eps, weight_decay, clip and groups of it. Matrices decay but ``spared``,
    parameters by their names. ``half``: products in bfloat16, by autocast. ``microbatches``: equal
    parts of the rows, whose gradients are added up; the loss is a mean over rows. ``norms``: as in
    `Case`.
    """
    trained = parts(model, o, spared)
    device = next(model.parameters()).device
    is_fused = {"fused": True} if device.type == "cuda" else {}  # one kernel for all parameters
    options = [each for part in trained for each in part.options()]
    adamw = torch.optim.AdamW(options, betas=(o.b1, o.b2), eps=o.eps, **is_fused)
    forward = torch.compile(model) if compiled else model

    parts_of_inputs = list(zip(*(x.chunk(microbatches) for x in inputs), strict=True))

    def step() -> torch.Tensor:
        adamw.zero_grad(set_to_none=True)
        losses = []
        for part_of_inputs in parts_of_inputs:
            with torch.autocast(device.type, torch.bfloat16, enabled=half):
                loss: torch.Tensor = forward(*part_of_inputs) / microbatches
            loss.backward()
            losses.append(loss.detach())
        note_norms(model, norms)
        for part in trained:
            if part.clip:
                torch.nn.utils.clip_grad_norm_([*part.decayed, *part.others], part.clip)
        adamw.step()
        return torch.stack(losses).sum()

    return step


def note_norms(model: torch.nn.Module, norms: dict[str, float] | None) -> None:
    """Fill an empty table with the norm of each parameter's gradient."""
    if norms is None or norms:
        return
    for name, p in model.named_parameters():
        if p.grad is not None:
            norms[name] = float(p.grad.float().norm())
