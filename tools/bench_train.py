"""Training steps against the same formulas in eager PyTorch, on the same cores.

    python -m tools.bench_train [--embed=128] [--batch=32] [--rounds=10] [--dtype=float32] [--cells=81] [--low=6] [--high=3]
    python -m tools.bench_train --model=language [--embed=128] [--depth=4] [--heads=4] [--context=64] [--batch=12] [--rounds=50]
    python -m tools.bench_train --model=bird [--embed=128] [--depth=3] [--heads=4] [--patch=32] [--batch=32] [--rounds=20]
    python -m tools.bench_train --model=higgs [--embed=128] [--depth=4] [--heads=4] [--context=64] [--batch=8] [--branches]

The recursive model, the small GPT-2 of configs/shakespeare_char.py, the supervised ViT of the demo birds (same weights, rows:
the losses of the first 20 steps are compared too), or adapters on a small audio language model compared with peft (rows of
--context text tokens and as many times of sound): forward, backward, gradient clipping, AdamW.

Of the recursive model both do what a step of the published recipe does: the slots are refilled, high cycles of low + 1
applications of the net, the last of them differentiated, stable-max cross-entropy (in float64 there, as the original has it),
the q-head's loss, halting, AdamATan2 and the average of the parameters. Steps alternate, ours and theirs, so that what else the
machine does meets both; the medians are compared. PyTorch comes with the extra `bench`.
"""

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch

from jaxtrain import compiler
from jaxtrain import config as config_lib
from jaxtrain import layout as layout_lib
from jaxtrain import state as state_lib
from jaxtrain import step as step_lib
from jaxtrain.assembly import assemble
from jaxtrain.types import Task
from jaxtrain.workloads import audio_language, language, trm
from jaxtrain.workloads.bird import config as bird
from jaxtrain.workloads.bird import task as bird_task
from jaxtrain.workloads.bird.objectives import supervised
from loaders import chatml, machine
from loaders.base import Field
from tools import torch_vit

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


def ours(
    make_task: Callable[..., Task],
    model: Any,
    o: config_lib.Optim,
    batch: dict[str, np.ndarray],
    *,
    adapters: config_lib.Lora | None = None,
    ema: float = 0.0,
    stage: Any = None,
) -> Callable[[], float]:
    """One step on one device, waited for, its batch's way to the device included; returns its loss."""
    train = config_lib.Train(steps=1000, batch=len(next(iter(batch.values()))), ema=ema)
    config = config_lib.Config(model=model, train=train, optim=o, lora=adapters or config_lib.Lora())
    fields = {name: Field(x.shape[1:], x.dtype) for name, x in batch.items()}
    mesh = layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1])
    run = assemble(config, mesh, make_task=make_task, fields=fields)
    step = compiler.compile(run.trace(stage).lower(), run.compiler_options(), config.compiler)
    proceed = step_lib.put_stop(run.layout, False)
    latest = [state_lib.init_state(run.task, run.tx, run.abstract, jax.random.key(0))]

    def take() -> float:
        rows = {name: jax.device_put(batch[name], x.sharding) for name, x in run.abstract.batch.items()}
        latest[0], out = step(latest[0], rows, proceed)
        return float(out["loss"].total / out["loss"].weight)

    take.params = lambda: jax.device_get(latest[0].variables.params)  # type: ignore[attr-defined]
    return take


def make_ours(c: trm.Config, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    o = config_lib.Optim(
        name="adam_atan2", lr=1e-4, b2=0.95, weight_decay=1.0, schedule="constant", clip=0.0, decayed=".", undecayed="^$"
    )
    return ours(trm.make_task, c, o, batch, ema=0.999, stage=c.cycles)


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
    o = config_lib.Optim(
        lr=1e-3, b2=0.99, weight_decay=0.1, schedule="constant", decayed=r"(^|/)(w|embed|pos)[^/]*$", undecayed=r"(^|/)scale"
    )
    return ours(language.make_task, c, o, batch)


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


def bird_batch(c: bird.Config, batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "spectrogram": rng.standard_normal((batch, c.n_frames, c.n_mels), dtype="f4"),
        "label": rng.integers(0, c.n_classes, batch, dtype="i4"),
        "index": np.arange(batch, dtype="i4"),
        "epoch": np.zeros(batch, "i4"),
        "weight": np.ones(batch, "f4"),
    }


def compare_bird(args: argparse.Namespace) -> float:
    c = bird.Config(
        embed=args.embed, depth=args.depth, heads=args.heads, patch=(args.patch, args.patch), pool="patches", dtype="float32",
        unroll=args.depth, n_classes=12, supervised=supervised.Supervised(label_smoothing=0.1),
    )  # fmt: skip
    batch = bird_batch(c, args.batch)
    mine = ours(bird_task.make_task, c, config_lib.Optim(lr=1e-3, schedule="constant"), batch)
    theirs = torch_vit.step(c, mine.params(), batch, lr=1e-3)  # type: ignore[attr-defined]
    both = np.array([(mine(), theirs()) for _ in range(20)])
    apart = np.abs(both[:, 0] / both[:, 1] - 1).max()
    print(f"losses of the first 20 steps, {both[0, 0]:.4f} to {both[-1, 0]:.4f}, are within {apart:.1e} of each other's")
    medians, losses = compare({"jaxtrain": mine, "PyTorch, eager": theirs}, args.rounds)
    for name, seconds in medians.items():
        rate = args.batch * bird.train_flops(c) / seconds / 1e9
        print(f"{name:15} {1e3 * seconds:8.1f} ms per step, {args.batch / seconds:7.1f} rows/s, {rate:6.1f} GFLOP/s; "
              f"loss {losses[name]:.3f}")  # fmt: skip
    mine_s, theirs_s = medians.values()
    return theirs_s / mine_s


def higgs_batch(c: audio_language.Config, batch: int, text: int, times: int) -> dict[str, np.ndarray]:
    """Rows of a question in text and an answer in sound, as loaders.chat_audio lays them out."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(batch):
        tokens = np.concatenate([rng.integers(4, c.vocab, text - 1), [1, 2]]).astype("i4")  # the last: in place of the sound
        labels = np.where(np.arange(len(tokens)) == text, 2, chatml.NONE).astype("i4")
        codes = [rng.integers(0, c.codebook_size, (c.codebooks, times))]
        rows.append(chatml.expand(
            tokens, labels, codes, audio_in=3, audio_out=2, size=c.codebook_size, codebooks=c.codebooks
        ))  # fmt: skip
    sizes = [chatml.targets(x) for x in rows]
    shape = (text, times + 1 + c.codebooks, 1, len(sizes[0].audio))
    samples = [chatml.row(x, shape, 0) for x in rows]
    stacked = {name: np.stack([row[name] for row in samples]) for name in samples[0]}
    scale = chatml.label_scale(0, (stacked["audio_target"] >= 0).sum((0, 1)), batch)
    return stacked | {"label_scale": np.tile(scale, (batch, 1)), "index": np.arange(batch, dtype="i4")}


def higgs_ours(
    c: audio_language.Config, adapters: config_lib.Lora, batch: dict[str, np.ndarray], *, gathered: bool = True
) -> Callable[[], float]:
    o = config_lib.Optim(lr=2e-4, b2=0.95, weight_decay=0.01, schedule="constant")
    make_task = functools.partial(audio_language.make_task, gathered=gathered)
    return ours(make_task, c, o, batch, adapters=adapters)


def higgs_theirs(c: audio_language.Config, adapters: config_lib.Lora, batch: dict[str, np.ndarray]) -> Callable[[], float]:
    """The same decoder of PyTorch's own layers under peft, places in their own nets by a mask, fused attention included."""
    import peft

    torch.manual_seed(0)
    f, d, nn = torch.nn.functional, c.embed, torch.nn
    inside = torch.from_numpy(batch["slot"] >= batch["text"].shape[1])
    position = torch.arange(inside.shape[1], dtype=torch.float32)
    angle = position[:, None] * torch.from_numpy(c.rope.theta ** (-np.arange(0, c.k, 2) / c.k)).float()
    cos, sin = (torch.cat([x, x], -1) for x in (angle.cos(), angle.sin()))
    linear = functools.partial(nn.Linear, bias=False)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj, self.down_proj = linear(d, c.mlp), linear(d, c.mlp), linear(c.mlp, d)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(f.silu(self.gate_proj(x)) * self.up_proj(x))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.o_proj = linear(d, c.heads * c.k), linear(c.heads * c.k, d)
            self.k_proj, self.v_proj = linear(d, c.g * c.k), linear(d, c.g * c.k)
            self.mlp, self.audio_mlp = Net(), Net()
            self.norms = nn.ModuleList(nn.RMSNorm(d, eps=c.eps) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            b, t, _ = x.shape
            h = torch.where(inside[..., None], self.norms[0](x), self.norms[1](x))
            q, k, v = (p(h).view(b, t, -1, c.k).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            q, k = (z * cos + torch.cat([-z[..., c.k // 2 :], z[..., : c.k // 2]], -1) * sin for z in (q, k))
            y = f.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
            y = torch.empty_like(x)
            y[inside] = self.audio_mlp(self.norms[2](x[inside]))
            y[~inside] = self.mlp(self.norms[3](x[~inside]))
            return x + y

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.codes = nn.Embedding(c.vocab, d), nn.Embedding(c.codebooks * c.n_codes, d)
            self.layers, self.norm = nn.ModuleList(Layer() for _ in range(c.depth)), nn.RMSNorm(d, eps=c.eps)
            self.head = linear(d, c.codebooks * c.n_codes)
            for p in self.parameters():
                if p.ndim > 1:
                    nn.init.normal_(p, std=c.init_std)

        def forward(self, text: torch.Tensor, codes: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            x = torch.empty(*inside.shape, d)
            x[~inside] = self.text(text).flatten(0, 1)
            x[inside] = self.codes(codes + torch.arange(c.codebooks) * c.n_codes).sum(-2).flatten(0, 1)
            for one in self.layers:
                x = one(x)
            x = self.norm(x)[torch.arange(len(x))[:, None], at]
            return self.head(x).unflatten(-1, (c.codebooks, c.n_codes))

    matrices = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    lora_config = peft.LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=matrices)
    model = peft.get_peft_model(Decoder(), lora_config)
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=2e-4, betas=(0.9, 0.95), weight_decay=0.01)

    def one() -> float:
        text, codes, at, target = (
            torch.from_numpy(batch[name]).long() for name in ("text", "codes", "audio_at", "audio_target")
        )
        logits = model(text, codes, at)
        each = [f.cross_entropy(logits[..., k, :].flatten(0, 1), target[..., k].flatten(), ignore_index=-100)
                for k in range(c.codebooks)]  # fmt: skip
        loss = torch.stack(each).mean()
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adamw.step()
        return loss.item()

    return one


def compare(makers: dict[str, Callable[[], float]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Steps in turn. Medians of the seconds and last losses, by name, ours first; prints the ratio and its spread."""
    times: dict[str, list[float]] = {name: [] for name in makers}
    cpu: dict[str, list[float]] = {name: [] for name in makers}
    losses = {name: step() for name, step in makers.items()}  # the first step of each warms up
    for _ in range(rounds):
        for name, step in makers.items():
            began, spent = time.perf_counter(), time.process_time()
            losses[name] = step()
            times[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - spent)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ours, theirs = medians.values()
    ratios = sorted(t / o for o, t in zip(*times.values(), strict=True))
    best, least = ([min(values) for values in each.values()] for each in (times, cpu))
    print(f"ratio of medians {theirs / ours:.2f} (of single rounds {ratios[0]:.2f} to {ratios[-1]:.2f}), of the shortest "
          f"{best[1] / best[0]:.2f}, of the least CPU time {least[1] / least[0]:.2f}, which a busy machine disturbs less; "
          f"{torch.get_num_threads()} threads")  # fmt: skip
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


def compare_higgs(args: argparse.Namespace) -> float:
    c = audio_language.Config(
        vocab=512, codebooks=8, codebook_size=1024, embed=args.embed, depth=args.depth, heads=args.heads,
        kv_heads=args.heads // 2, mlp=4 * args.embed, dtype="float32", unroll=args.depth,
    )  # fmt: skip
    changes = {"rank": 8, "alpha": 16.0, "dtype": "float32"}
    adapters = config_lib.section(config_lib.Lora, {**audio_language.ADAPTERS, **changes})
    batch = higgs_batch(c, args.batch, args.context, args.context)
    if args.branches:
        steps = {"gathered": higgs_ours(c, adapters, batch), "both, where": higgs_ours(c, adapters, batch, gathered=False)}
    else:
        steps = {"jaxtrain": higgs_ours(c, adapters, batch), "PyTorch + peft": higgs_theirs(c, adapters, batch)}
    medians, losses = compare(steps, args.rounds)
    for name, seconds in medians.items():
        rate = args.batch * batch["place"].shape[1] / seconds
        print(f"{name:15} {1e3 * seconds:8.1f} ms per step, {rate:9.0f} places/s; loss {losses[name]:.3f}")
    ours, theirs = medians.values()
    return theirs / ours


def main(argv: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("trm", "language", "bird", "higgs"), default="trm")
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
        "patch": 32,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batch", type=int, help="rows; default: 32 puzzles, 12 texts, 32 spectrograms, 8 conversations")
    parser.add_argument(
        "--branches", action="store_true", help="of higgs: instead, positions gathered for one net compared with both nets"
    )
    parser.add_argument("--dtype", choices=trm.DTYPES, default="float32", help="of trm")
    args = parser.parse_args(argv)
    machine.keep_freed_memory()  # as a run does; PyTorch, in the same process, has the same of it
    args.batch = args.batch or {"trm": 32, "language": 12, "bird": 32, "higgs": 8}[args.model]
    if args.model != "trm":
        return {"language": compare_language, "bird": compare_bird, "higgs": compare_higgs}[args.model](args)
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
