"""The supervised bird model as PyTorch modules with given weights: what `tools.bench_train --model=bird` compares with.

Shapes: B rows, F frames, W mels, N patches, T tokens, D embed, C classes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.nn import vit
from jaxtrain.workloads.bird import config as bird

F = torch.nn.functional


def _linear(w_io: np.ndarray, b_o: np.ndarray) -> torch.nn.Linear:
    """A linear layer of a matrix (in, out), whatever the dimensions that either side is made of."""
    out = b_o.size
    layer = torch.nn.Linear(w_io.size // out, out)
    layer.weight = torch.nn.Parameter(torch.from_numpy(w_io.reshape(-1, out).T.copy()))
    layer.bias = torch.nn.Parameter(torch.from_numpy(b_o.reshape(-1).copy()))
    return layer


def _norm(scale_d: np.ndarray, bias_d: np.ndarray) -> torch.nn.LayerNorm:
    norm = torch.nn.LayerNorm(scale_d.size, eps=vit.EPS)
    norm.weight = torch.nn.Parameter(torch.from_numpy(scale_d.copy()))
    norm.bias = torch.nn.Parameter(torch.from_numpy(bias_d.copy()))
    return norm


class Layer(torch.nn.Module):
    def __init__(self, heads: int, w: Mapping[str, np.ndarray]):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = (_norm(w[f"scale_{n}"], w[f"bias_{n}"]) for n in ("attention", "mlp"))
        self.qkv, self.out = _linear(w["w_qkv"], w["b_qkv"]), _linear(w["w_out"], w["b_out"])
        self.up, self.down = _linear(w["w_up"], w["b_up"]), _linear(w["w_down"], w["b_down"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Classifier(torch.nn.Module):
    """Encoder, head and online probe, for pool="patches" and learned positions."""

    def __init__(self, c: bird.Config, params: Mapping[str, Any]):
        super().__init__()
        e = params["encoder"]
        self.c = c
        self.patch = _linear(e["w_patch"], e["b_patch"])
        self.cls, self.pos = (torch.nn.Parameter(torch.from_numpy(e[name].copy())) for name in ("cls", "pos"))
        layers = ({name: w[i] for name, w in e["blocks"].items()} for i in range(c.depth))
        self.layers = torch.nn.Sequential(*(Layer(c.heads, w) for w in layers))
        self.norm = _norm(e["scale"], e["bias"])
        head, probe = params["objective"]["supervised"], params["probe"]
        self.head, self.probe = _linear(head["w"], head["b"]), _linear(probe["w"], probe["b"])
        self.probe_norm = _norm(probe["scale"], probe["bias"])

    def forward(self, x_bfw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, C] of the head and of the probe, which does not train the encoder."""
        b, (f, w), (m, n) = len(x_bfw), self.c.patch, self.c.grid
        x_bnp = x_bfw.view(b, m, f, n, w).transpose(2, 3).reshape(b, m * n, f * w)
        x = torch.cat([self.cls.expand(b, -1, -1), self.patch(x_bnp) + self.pos], 1)
        pooled = self.norm(self.layers(x))[:, self.c.n_cls :].mean(1)
        return self.head(pooled), self.probe(self.probe_norm(pooled.detach()))


def step(c: bird.Config, params: Mapping[str, Any], batch: Mapping[str, np.ndarray], *, lr: float) -> Callable[[], float]:
    """A training step of these weights on this batch; it returns the loss: the head's, smoothed, and the probe's."""
    model = Classifier(c, params)
    matrices = [p for p in model.parameters() if p.ndim > 1 and p is not model.cls and p is not model.pos]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=lr)
    x, label = torch.from_numpy(batch["spectrogram"]), torch.from_numpy(batch["label"]).long()

    def one() -> float:
        logits, probed = model(x)
        loss = F.cross_entropy(logits, label, label_smoothing=c.supervised.label_smoothing) + F.cross_entropy(probed, label)
        adamw.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        return loss.item()

    return one
