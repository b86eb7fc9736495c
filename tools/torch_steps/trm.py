"""The recursive model: its step, and its formulas by single PyTorch operations.

tests/data/trm was computed by these. Both take a step of the published recipe. The slots are
refilled, then come high cycles of low + 1 applications of the net, of which the last is
differentiated. The loss is stable-max cross-entropy (in float64 here, as the original has it) and
the q-head's. Halting, AdamATan2 and the average of the parameters follow.
"""

import itertools
import math
from collections.abc import Mapping

import numpy as np
import torch

from jaxtrain import config as config_lib
from jaxtrain.types import PyTree
from jaxtrain.workloads.trm import loss as trm_loss
from jaxtrain.workloads.trm import model as trm
from tools.our_step import Batch, Ours
from tools.torch_steps import adamw

F = torch.nn.functional
VOCAB = 11
DEFAULTS = {
    "embed": 128,
    "cells": 81,
    "low": 6,
    "high": 3,
    "inner": 256,
    "heads": 4,
    "batch": 32,
    "rounds": 10,
}
LR, DECAY, B1, B2, EMA = 1e-4, 1.0, 0.9, 0.95, 0.999


def make_batch(cells: int, batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = rng.integers(2, VOCAB, (batch, cells), dtype="i4")
    return {
        "inputs": np.where(rng.random(labels.shape) < 0.6, 1, labels).astype("i4"),
        "labels": labels,
        "puzzle": np.zeros(batch, "i4"),
        "difficulty": np.zeros(batch, "i4"),
        "weight": np.ones(batch, "f4"),
    }


def rms(x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + trm.EPS)).to(x.dtype)


def swiglu(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, value = F.linear(x, up.to(x.dtype)).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * value, down.to(x.dtype))


class Recursive(torch.nn.Module):
    """Matrices are [outputs, inputs], as PyTorch's products take them."""

    def __init__(self, c: trm.Config, params: PyTree):
        super().__init__()
        self.c, net = c, params["net"]

        def matrices(name: str) -> torch.nn.ParameterList:
            return torch.nn.ParameterList(
                adamw.parameter(w.reshape(len(w), -1).T) for w in net[name]
            )

        self.mix_up, self.mix_down, self.up, self.down = (
            matrices(f"w_{n}") for n in ("mix_up", "mix_down", "up", "down")
        )
        self.cells, self.head = (
            adamw.parameter(params["w_cells"]),
            adamw.parameter(params["w_symbols"].T),
        )
        self.q, self.q_bias = adamw.parameter(params["w_q"].T), adamw.parameter(params["b_q"])

    def net(self, z: torch.Tensor, injected: torch.Tensor) -> torch.Tensor:
        x = z + injected
        for mix_up, mix_down, up, down in zip(
            self.mix_up, self.mix_down, self.up, self.down, strict=True
        ):
            y = x.transpose(1, 2)
            x = rms(y + swiglu(y, mix_up, mix_down)).transpose(1, 2)
            x = rms(x + swiglu(x, up, down))
        return x

    def forward(
        self, z_h: torch.Tensor, z_l: torch.Tensor, inputs: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the loss, the new states, and the value of halting of each row."""
        c, n, dtype = self.c, len(inputs), z_h.dtype
        padding = torch.zeros(n, c.puzzle_tokens, c.embed, device=inputs.device)
        x = math.sqrt(c.embed) * torch.cat([padding, self.cells[inputs]], 1).to(dtype)
        with torch.no_grad():
            for _ in range(c.cycles_high - 1):
                for _ in range(c.cycles_low):
                    z_l = self.net(z_l, z_h + x)
                z_h = self.net(z_h, z_l)
        for _ in range(c.cycles_low):
            z_l = self.net(z_l, z_h + x)
        z_h = self.net(z_h, z_l)
        logits = F.linear(z_h[:, c.puzzle_tokens :], self.head.to(dtype))
        q = F.linear(z_h[:, 0], self.q.to(dtype), self.q_bias.to(dtype)).float()
        s = logits.double()
        s = torch.where(s < 0, 1 / (1 - s + 1e-30), s + 1)
        log_p = torch.log(s / s.sum(-1, keepdim=True))
        lm = -log_p.gather(-1, labels[..., None])[..., 0].mean(-1).sum()
        exact = (logits.argmax(-1) == labels).all(-1)
        bce = F.binary_cross_entropy_with_logits(q[:, 0], exact.float(), reduction="sum")
        return (lm + 0.5 * bce) / n, z_h.detach(), z_l.detach(), q.detach()[:, 0]


def make_theirs(
    c: trm.Config,
    params: PyTree,
    model_state: PyTree,
    batch: Batch,
    *,
    compiled: bool,
    norms: dict[str, float] | None = None,
) -> adamw.Step:
    model = Recursive(c, params)
    if compiled:  # the net alone: all of its 21 applications in one program took minutes to compile
        model.net = torch.compile(model.net)  # type: ignore[method-assign]
    trained = list(model.parameters())
    m, v, ema = (
        [f(p.detach()) for p in trained] for f in (torch.zeros_like, torch.zeros_like, torch.clone)
    )
    n, dtype = len(batch["weight"]), getattr(torch, c.dtype)
    first = {
        name: adamw.tensor(model_state[f"init_{name[-1]}"]).to(dtype) for name in ("z_h", "z_l")
    }
    rows = {name: adamw.tensor(batch[name]).long() for name in ("inputs", "labels")}
    slots = {
        **{name: torch.zeros(n, c.n_tokens, c.embed, dtype=dtype) for name in first},
        **{name: torch.zeros_like(x) for name, x in rows.items()},
        "steps": torch.zeros(n, dtype=torch.int32),
        "halted": torch.ones(n, dtype=torch.bool),
    }
    counts = itertools.count(1)

    @torch.no_grad()
    def update(count: int) -> None:
        for p, pm, pv, pe in zip(trained, m, v, ema, strict=True):
            assert p.grad is not None
            pm.lerp_(p.grad, 1 - B1)
            pv.mul_(B2).addcmul_(p.grad, p.grad, value=1 - B2)
            p.mul_(1 - LR * DECAY)
            p.sub_(torch.atan2(pm, (pv / (1 - B2**count)).sqrt()), alpha=LR / (1 - B1**count))
            pe.lerp_(p, 1 - EMA)
            p.grad = None

    def step() -> torch.Tensor:
        done = slots["halted"]
        for name, start in first.items():
            slots[name] = torch.where(done[:, None, None], start, slots[name])
        for name, new in rows.items():
            slots[name] = torch.where(done[:, None], new, slots[name])
        taken = torch.where(done, 0, slots["steps"]) + 1
        loss, z_h, z_l, q = model(slots["z_h"], slots["z_l"], slots["inputs"], slots["labels"])
        loss.backward()
        adamw.note_norms(model, norms)
        update(next(counts))
        explores = torch.rand(n, device=done.device) < c.explore
        drawn = torch.randint(2, c.halt_steps + 1, (n,), device=done.device)
        least = torch.where(explores, drawn, 0)
        wants = (q > 0) & (taken >= least)
        slots.update(z_h=z_h, z_l=z_l, steps=taken, halted=(taken >= c.halt_steps) | wants)
        return loss.detach()

    return step


def case_step(case: adamw.Case) -> adamw.Step:
    """Return PyTorch's step of a case without puzzle embeddings."""
    c = case.config.model
    parts = (case.params, case.model_state, case.batch)
    return make_theirs(c, *parts, compiled=case.is_compiled, norms=case.norms)


def sides(size: Mapping[str, int]) -> adamw.Sides:
    c = trm.Config(
        n_cells=size["cells"],
        vocab=VOCAB,
        n_puzzles=1,
        n_difficulties=1,
        embed=size["embed"],
        heads=size["heads"],
        inner_multiple=size["inner"],
        puzzle_embed=0,
        cycles_high=size["high"],
        cycles_low=size["low"],
        dtype="float32",
    )
    o = config_lib.Optim(
        name="adam_atan2",
        lr=LR,
        b1=B1,
        b2=B2,
        weight_decay=DECAY,
        schedule="constant",
        clip=0.0,
        decayed=".",
        undecayed="^$",
    )
    batch = make_batch(size["cells"], size["batch"])
    ours = Ours(trm_loss.make_task, c, o, batch, ema=EMA, stage=c.cycles)
    params, model_state = ours.params(), ours.model_state()

    def make(compiled: bool) -> adamw.Step:
        return make_theirs(c, params, model_state, batch, compiled=compiled)

    # Weights that are one rounding off give losses 2e-4 apart in the third step and 1.2e-2 in the
    # sixth: AdamATan2's first updates are the signs of gradients, also of those that are rounding.
    # PyTorch's are 2e-4 and 7e-3 off.
    return adamw.Sides(ours, adamw.theirs(make), size["batch"], "rows", within=1e-3, steps=3)
