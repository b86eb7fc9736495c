"""The small GPT-2 of configs/shakespeare_char.py: its step, and that of PyTorch's layers.

The weights are the same. Shapes: B rows, T tokens, D embed.
"""

from collections.abc import Mapping

import numpy as np
import torch

from jaxtrain import config as config_lib
from jaxtrain.types import PyTree
from jaxtrain.workloads.language import loss as language_loss
from jaxtrain.workloads.language import model as language
from tools.our_step import Ours
from tools.torch_steps import adamw

F = torch.nn.functional
DEFAULTS = {"embed": 128, "depth": 4, "heads": 4, "context": 64, "batch": 12, "rounds": 50}


def make_batch(c: language.Config, batch: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, c.vocab, (batch, c.context + 1), dtype="i4")
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "positions": np.tile(np.arange(c.context, dtype="i4"), (batch, 1)),
        "segments": np.ones((batch, c.context), "i4"),
        "mask": np.ones((batch, c.context), "f4"),
    }


class Layer(torch.nn.Module):
    def __init__(self, c: language.Config, w: Mapping[str, np.ndarray]):
        super().__init__()
        d = c.embed
        self.heads = c.heads
        self.norm_1, self.norm_2 = (
            adamw.layer_norm(w[f"scale_{n}"], None, c.eps) for n in ("attention", "mlp")
        )
        qkv = np.concatenate([w[f"w_{n}"].reshape(-1, d) for n in "qkv"])
        self.qkv, self.out = (
            adamw.linear(qkv, transposed=True),
            adamw.linear(w["w_out"].reshape(d, -1), transposed=True),
        )
        self.up, self.down = (adamw.linear(w[f"w_{n}"], transposed=True) for n in ("up", "down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (
            y.view(b, t, self.heads, -1).transpose(1, 2)
            for y in self.qkv(self.norm_1(x)).split(d, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Decoder(torch.nn.Module):
    def __init__(self, c: language.Config, params: PyTree):
        super().__init__()
        self.embed, self.pos = (adamw.parameter(params[name]) for name in ("embed", "pos"))
        layers = ({name: w[i] for name, w in params["blocks"].items()} for i in range(c.depth))
        self.layers = torch.nn.Sequential(*(Layer(c, w) for w in layers))
        self.norm = adamw.layer_norm(params["scale"], None, c.eps)

    def forward(self, tokens_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        x = F.embedding(tokens_bt, self.embed) + self.pos[: tokens_bt.shape[1]]
        logits = F.linear(self.norm(self.layers(x)), self.embed)
        return F.cross_entropy(logits.flatten(0, 1), targets_bt.flatten())


def sides(size: Mapping[str, int]) -> adamw.Sides:
    c = language.Config(
        vocab=65,
        context=size["context"],
        embed=size["embed"],
        depth=size["depth"],
        heads=size["heads"],
        mlp=4 * size["embed"],
        norm="layer",
        activation="gelu",
        positions="learned",
        tied=True,
        dtype="float32",
        unroll=size["depth"],
    )
    o = config_lib.Optim(
        lr=1e-3,
        b2=0.99,
        weight_decay=0.1,
        schedule="constant",
        decayed=r"(^|/)(w|embed|pos)[^/]*$",
        undecayed=r"(^|/)scale",
    )
    batch = make_batch(c, size["batch"])
    ours = Ours(language_loss.make_task, c, o, batch)
    inputs = tuple(
        adamw.tensor(np.ascontiguousarray(batch[name])).long() for name in ("tokens", "targets")
    )
    params = ours.params()

    def make(compiled: bool) -> adamw.Step:
        return adamw.adamw_step(Decoder(c, params), inputs, o, compiled=compiled)

    return adamw.Sides(ours, adamw.theirs(make), size["batch"] * c.context, "tokens", within=1e-4)
