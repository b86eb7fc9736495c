"""Training steps against the same formulas in eager PyTorch, on the same cores.

    python -m tools.bench_train [--embed=128] [--batch=32] [--rounds=10] [--dtype=float32] [--cells=81] [--low=6] [--high=3]
    python -m tools.bench_train --model=language [--embed=128] [--depth=4] [--heads=4] [--context=64] [--batch=12] [--rounds=50]

The recursive model, or the small GPT-2 of configs/shakespeare_char.py: forward, backward, gradient clipping, AdamW.

Of the recursive model both do what a step of the published recipe does: the slots are refilled, high cycles of low + 1
applications of the net, the last of them differentiated, stable-max cross-entropy (in float64 there, as the original has it),
the q-head's loss, halting, AdamATan2 and the average of the parameters. Steps alternate, ours and theirs, so that what else the
machine does meets both; the medians are compared. PyTorch comes with the extra `bench`.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np
import torch

from jaxtrain import config as config_lib
from jaxtrain import layout as layout_lib
from jaxtrain import optim
from jaxtrain import state as state_lib
from jaxtrain import step as step_lib
from jaxtrain.workloads import language, trm
from loaders.base import Field

VOCAB = 11


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


def make_ours(c: trm.Config, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    """One step, waited for; returns its loss."""
    n = len(batch["weight"])
    layout = layout_lib.make_layout(layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1]), {})
    o = config_lib.Optim(
        name="adam_atan2", lr=1e-4, b2=0.95, weight_decay=1.0, schedule="constant", clip=0.0, decayed=".", undecayed="^$"
    )
    task = trm.make_task(config_lib.Config(model=c), layout.shard, n)
    tx = optim.make_optimizer(o, task.specs.params, steps=1000)
    fields = {name: Field(x.shape[1:], x.dtype) for name, x in batch.items()}
    plan = state_lib.make_plan(task, tx, layout, fields, batch=n, ema=True)
    step = step_lib.make_train_step(
        task, tx, layout, plan, accumulate=1, ema=0.999, guard=config_lib.Guard(), seed=0, stage=c.cycles
    )
    step = step.lower(plan.state, plan.batch, step_lib.abstract_stop(layout)).compile()
    go_on = step_lib.put_stop(layout, False)
    state = state_lib.init_state(task, tx, plan, jax.random.key(0))
    rows = {name: jax.device_put(batch[name], x.sharding) for name, x in plan.batch.items()}

    def one() -> float:
        nonlocal state
        state, out = step(state, rows, go_on)
        return float(out["loss"].total / out["loss"].weight)

    return one


def make_theirs(c: trm.Config, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    """The formulas as tests/data/trm was computed by, one PyTorch operation after another."""
    torch.manual_seed(0)
    dtype = getattr(torch, c.dtype)
    d, t, n = c.embed, c.n_tokens, len(batch["weight"])

    def matrix(out: int, inner: int) -> torch.Tensor:
        return (torch.randn(out, inner) / math.sqrt(inner)).requires_grad_()

    layers = [
        {
            "mix_up": matrix(2 * c.inner(t), t),
            "mix_down": matrix(t, c.inner(t)),
            "up": matrix(2 * c.inner(d), d),
            "down": matrix(d, c.inner(d)),
        }
        for _ in range(c.depth)
    ]
    embedding, head = matrix(VOCAB, d), matrix(VOCAB, d)
    q_head = torch.zeros(2, d, requires_grad=True)
    q_bias = torch.full((2,), -5.0, requires_grad=True)
    params = [*(w for layer in layers for w in layer.values()), embedding, head, q_head, q_bias]
    m, v, ema = ([f(p.detach()) for p in params] for f in (torch.zeros_like, torch.zeros_like, torch.clone))
    first = torch.randn(2, d).to(dtype)
    slots = {
        "z_h": torch.zeros(n, t, d, dtype=dtype),
        "z_l": torch.zeros(n, t, d, dtype=dtype),
        "steps": torch.zeros(n, dtype=torch.int32),
        "halted": torch.ones(n, dtype=torch.bool),
        "inputs": torch.zeros(n, c.n_cells, dtype=torch.int64),
        "labels": torch.zeros(n, c.n_cells, dtype=torch.int64),
    }
    rows = {name: torch.from_numpy(batch[name]).long() for name in ("inputs", "labels")}
    linear = torch.nn.functional.linear
    count = 0

    def rms(x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float32)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + trm.EPS)).to(x.dtype)

    def swiglu(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, value = linear(x, up.to(dtype)).chunk(2, dim=-1)
        return linear(torch.nn.functional.silu(gate) * value, down.to(dtype))

    def net(z: torch.Tensor, injected: torch.Tensor) -> torch.Tensor:
        x = z + injected
        for w in layers:
            y = x.transpose(1, 2)
            x = rms(y + swiglu(y, w["mix_up"], w["mix_down"])).transpose(1, 2)
            x = rms(x + swiglu(x, w["up"], w["down"]))
        return x

    def one() -> float:
        nonlocal count
        done = slots["halted"]
        for k, start in zip(("z_h", "z_l"), first, strict=True):
            slots[k] = torch.where(done[:, None, None], start, slots[k])
        for k in ("inputs", "labels"):
            slots[k] = torch.where(done[:, None], rows[k], slots[k])
        steps = torch.where(done, 0, slots["steps"]) + 1
        x = math.sqrt(d) * torch.cat([torch.zeros(n, c.puzzle_tokens, d), embedding[slots["inputs"]]], 1).to(dtype)
        z_h, z_l = slots["z_h"], slots["z_l"]
        with torch.no_grad():
            for _ in range(c.cycles_high - 1):
                for _ in range(c.cycles_low):
                    z_l = net(z_l, z_h + x)
                z_h = net(z_h, z_l)
        for _ in range(c.cycles_low):
            z_l = net(z_l, z_h + x)
        z_h = net(z_h, z_l)
        logits = linear(z_h[:, c.puzzle_tokens :], head.to(dtype))
        q = linear(z_h[:, 0], q_head.to(dtype), q_bias.to(dtype)).float()
        s = logits.double()
        s = torch.where(s < 0, 1 / (1 - s + 1e-30), s + 1)
        log_p = torch.log(s / s.sum(-1, keepdim=True))
        lm = -log_p.gather(-1, slots["labels"][..., None])[..., 0].mean(-1).sum()
        exact = (logits.argmax(-1) == slots["labels"]).all(-1)
        bce = torch.nn.functional.binary_cross_entropy_with_logits(q[:, 0], exact.float(), reduction="sum")
        loss = (lm + 0.5 * bce) / n
        loss.backward()
        with torch.no_grad():
            count += 1
            for p, pm, pv, pe in zip(params, m, v, ema, strict=True):
                pm.lerp_(p.grad, 0.1)
                pv.mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
                p.mul_(1 - 1e-4)
                p.sub_(torch.atan2(pm, (pv / (1 - 0.95**count)).sqrt()), alpha=1e-4 / (1 - 0.9**count))
                pe.lerp_(p, 0.001)
                p.grad = None
            least = torch.where(torch.rand(n) < c.explore, torch.randint(2, c.halt_steps + 1, (n,)), 0)
            wants = (q[:, 0] > 0) & (steps >= least)
            slots.update(z_h=z_h.detach(), z_l=z_l.detach(), steps=steps, halted=(steps >= c.halt_steps) | wants)
        return loss.item()

    return one


def language_batch(c: language.Config, batch: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, c.vocab, (batch, c.context + 1), dtype="i4")
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(c.context, dtype="i4"), (batch, 1)),
        "segments": np.ones((batch, c.context), "i4"),
        "mask": np.ones((batch, c.context), "f4"),
    }


def language_ours(c: language.Config, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    """One step, waited for; returns its loss."""
    n = len(batch["tokens"])
    layout = layout_lib.make_layout(layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1]), {})
    o = config_lib.Optim(
        lr=1e-3, b2=0.99, weight_decay=0.1, schedule="constant", decayed=r"(^|/)(w|embed|pos)[^/]*$", undecayed=r"(^|/)scale"
    )
    task = language.make_task(config_lib.Config(model=c), layout.shard, n)
    tx = optim.make_optimizer(o, task.specs.params, steps=1000)
    fields = {name: Field(x.shape[1:], x.dtype) for name, x in batch.items()}
    plan = state_lib.make_plan(task, tx, layout, fields, batch=n, ema=False)
    step = step_lib.make_train_step(task, tx, layout, plan, accumulate=1, ema=0.0, guard=config_lib.Guard(), seed=0)
    step = step.lower(plan.state, plan.batch, step_lib.abstract_stop(layout)).compile()
    go_on = step_lib.put_stop(layout, False)
    state = state_lib.init_state(task, tx, plan, jax.random.key(0))

    def one() -> float:
        nonlocal state
        rows = {name: jax.device_put(batch[name], x.sharding) for name, x in plan.batch.items()}
        state, out = step(state, rows, go_on)
        return float(out["loss"].total / out["loss"].weight)

    return one


def language_theirs(c: language.Config, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    """The same decoder from PyTorch's own layers and optimizer, its fused attention included."""
    torch.manual_seed(0)
    f, d = torch.nn.functional, c.embed

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm_1, self.norm_2 = (torch.nn.LayerNorm(d, bias=False) for _ in range(2))
            self.qkv, self.out = torch.nn.Linear(d, 3 * d, bias=False), torch.nn.Linear(d, d, bias=False)
            self.up, self.down = torch.nn.Linear(d, c.mlp, bias=False), torch.nn.Linear(c.mlp, d, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            qkv = self.qkv(self.norm_1(x)).split(d, dim=2)
            q, k, v = (y.view(b, t, c.heads, d // c.heads).transpose(1, 2) for y in qkv)
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
            return x + self.down(f.gelu(self.up(self.norm_2(x))))

    class Decoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.pos = torch.nn.Embedding(c.vocab, d), torch.nn.Embedding(c.context, d)
            self.blocks = torch.nn.Sequential(*(Block() for _ in range(c.depth)))
            self.norm = torch.nn.LayerNorm(d, bias=False)
            for name, p in self.named_parameters():
                if p.ndim > 1:
                    last = name.endswith(("out.weight", "down.weight"))
                    torch.nn.init.normal_(p, std=c.init_std / math.sqrt(2 * c.depth if last else 1))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens) + self.pos(torch.arange(tokens.shape[1]))
            return f.linear(self.norm(self.blocks(x)), self.embed.weight)

    model = Decoder()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))

    def one() -> float:
        tokens, targets = (torch.from_numpy(batch[name]).long() for name in ("tokens", "targets"))
        loss = f.cross_entropy(model(tokens).view(-1, c.vocab), targets.view(-1))
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        return loss.item()

    return one


def compare(makers: dict[str, Callable[[], float]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Steps in turn. Medians of the seconds and last losses, by name, ours first; prints the ratio and its spread."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    losses = {name: step() for name, step in makers.items()}  # the first step of each warms up
    for _ in range(rounds):
        for name, step in makers.items():
            began = time.perf_counter()
            losses[name] = step()
            times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours, theirs = medians.values()
    each = sorted(t / o for o, t in zip(*times.values(), strict=True))
    best = [min(values) for values in times.values()]
    print(f"ratio of medians {theirs / ours:.2f} (of single rounds {each[0]:.2f} to {each[-1]:.2f}), of the shortest "
          f"{best[1] / best[0]:.2f}, which a busy machine disturbs least; {torch.get_num_threads()} threads")  # fmt: skip
    return medians, losses


def compare_language(args: argparse.Namespace) -> float:
    c = language.Config(
        vocab=65, context=args.context, embed=args.embed, depth=args.depth, heads=args.heads, mlp=4 * args.embed, norm="layer",
        activation="gelu", positions="learned", tied=True, dtype="float32", unroll=args.depth,
    )  # fmt: skip
    batch = language_batch(c, args.batch)
    steps = {"jaxtrain": language_ours(c, batch), "PyTorch, eager": language_theirs(c, batch)}
    medians, losses = compare(steps, args.rounds)
    for name, seconds in medians.items():
        rate = args.batch * c.context / seconds
        print(f"{name:15} {1e3 * seconds:8.1f} ms per step, {rate:9.0f} tokens/s; loss {losses[name]:.3f}")
    ours, theirs = medians.values()
    return theirs / ours


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("trm", "language"), default="trm")
    defaults = {
        "embed": 128,
        "rounds": 10,
        "cells": 81,
        "low": 6,
        "high": 3,
        "inner": 256,
        "depth": 4,
        "heads": 4,
        "context": 64,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, help="rows; default: 32 puzzles, or 12 rows of text")
    parser.add_argument("--dtype", choices=trm.DTYPES, default="float32", help="of trm")
    args = parser.parse_args(argv)
    args.batch = args.batch or (12 if args.model == "language" else 32)
    if args.model == "language":
        return compare_language(args)
    c = trm.Config(
        n_cells=args.cells, vocab=VOCAB, n_puzzles=1, n_difficulties=1, embed=args.embed, heads=args.heads,
        inner_multiple=args.inner, puzzle_embed=0, cycles_high=args.high, cycles_low=args.low, dtype=args.dtype,
    )  # fmt: skip
    batch = make_batch(args.cells, args.batch)
    makers = {"jaxtrain": make_ours, "PyTorch, eager": make_theirs}
    medians, losses = compare({name: make(c, batch) for name, make in makers.items()}, args.rounds)
    for name, seconds in medians.items():
        rate = args.batch * trm.train_flops(c, c.cycles) / seconds / 1e9
        print(f"{name:15} {1e3 * seconds:8.1f} ms per step, {args.batch / seconds:7.1f} rows/s, {rate:6.1f} GFLOP/s; "
              f"loss {losses[name]:.3f}")  # fmt: skip
    ours, theirs = medians.values()
    return theirs / ours


if __name__ == "__main__":
    main()
