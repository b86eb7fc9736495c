"""The supervised bird model: its step, and that of PyTorch modules with the same weights.

Shapes: B rows, F frames, W mels, N patches, T tokens, D embed, C classes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain import config as config_lib
from jaxtrain.types import PyTree
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.objectives import supervised
from tools.our_step import Ours
from tools.torch_steps import adamw

F = torch.nn.functional
DEFAULTS = {"embed": 128, "depth": 3, "heads": 4, "patch": 32, "batch": 32, "rounds": 20}


def make_batch(c: bird.Config, batch: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "spectrogram": rng.standard_normal((batch, c.n_frames, c.n_mels), dtype="f4"),
        "label": rng.integers(0, c.n_classes, batch, dtype="i4"),
        "index": np.arange(batch, dtype="i4"),
        "epoch": np.zeros(batch, "i4"),
        "weight": np.ones(batch, "f4"),
    }


class Layer(torch.nn.Module):
    def __init__(self, heads: int, w: Mapping[str, np.ndarray]):
        super().__init__()
        d = w["w_up"].shape[0]
        self.heads = heads
        self.norm_1, self.norm_2 = (
            adamw.layer_norm(w[f"scale_{n}"], w[f"bias_{n}"], vit.EPS) for n in ("attention", "mlp")
        )
        self.qkv = adamw.linear(w["w_qkv"].reshape(d, 3 * d), w["b_qkv"].reshape(-1))
        self.out = adamw.linear(w["w_out"].reshape(d, d), w["b_out"])
        self.up, self.down = (
            adamw.linear(w["w_up"], w["b_up"]),
            adamw.linear(w["w_down"], w["b_down"]),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.norm_1(x))
            .view(b, t, 3, self.heads, d // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Classifier(torch.nn.Module):
    """Encoder, head and online probe, for learned positions and one class token."""

    def __init__(self, c: bird.Config, params: PyTree):
        super().__init__()
        e = params["encoder"]
        self.c: Any = c
        self.patch = adamw.linear(e["w_patch"], e["b_patch"])
        self.cls, self.pos = (adamw.parameter(e[name]) for name in ("cls", "pos"))
        layers = ({name: w[i] for name, w in e["blocks"].items()} for i in range(c.depth))
        self.layers = torch.nn.Sequential(*(Layer(c.heads, w) for w in layers))
        self.norm = adamw.layer_norm(e["scale"], e["bias"], vit.EPS)
        head, probe = params["objective"]["supervised"], params["probe"]
        self.head = adamw.linear(head["w"], head["b"])
        self.probe = torch.nn.Sequential(  # of this name, by which its own rate is found
            adamw.layer_norm(probe["scale"], probe["bias"], vit.EPS),
            adamw.linear(probe["w"], probe["b"]),
        )

    def forward(self, x_bfw: torch.Tensor, label_b: torch.Tensor) -> torch.Tensor:
        """Return the loss: the head's, smoothed, and the probe's, which trains no encoder."""
        b, (f, w), (m, n) = len(x_bfw), self.c.patch, self.c.grid
        x_bnp = x_bfw.view(b, m, f, n, w).transpose(2, 3).reshape(b, m * n, f * w)
        with torch.autocast(x_bfw.device.type, enabled=False):  # the measurements stay as they are
            x = torch.cat([self.cls.expand(b, -1, -1), self.patch(x_bnp) + self.pos], 1)
        if self.c.dtype == "bfloat16":
            x = x.bfloat16()  # a residual stream of 16 bits, as ours
        x = self.norm(self.layers(x).float())
        pooled = x[:, 0] if self.c.pool == "cls" else x[:, 1:].mean(1)
        smoothed = F.cross_entropy(
            self.head(pooled), label_b, label_smoothing=self.c.supervised.label_smoothing
        )
        return smoothed + F.cross_entropy(self.probe(pooled.detach()), label_b)


def case_step(case: adamw.Case) -> adamw.Step:
    """Return PyTorch's step of a case, whose attention is the best of its fused kernels."""
    c = case.config.model
    inputs = adamw.tensor(case.batch["spectrogram"]), adamw.tensor(case.batch["label"]).long()
    return adamw.adamw_step(
        Classifier(c, case.params),
        inputs,
        case.config.optim,
        compiled=case.is_compiled,
        spared=("cls", "pos"),
        half=c.dtype == "bfloat16",
        norms=case.norms,
    )


def sides(size: Mapping[str, int]) -> adamw.Sides:
    make: Any = bird.Config  # its fields of objectives are made as it is imported
    c = make(
        embed=size["embed"],
        depth=size["depth"],
        heads=size["heads"],
        patch=(size["patch"], size["patch"]),
        pool="patches",
        dtype="float32",
        unroll=size["depth"],
        n_classes=12,
        supervised=supervised.Supervised(label_smoothing=0.1),
    )
    batch, o = make_batch(c, size["batch"]), config_lib.Optim(lr=1e-3, schedule="constant")
    ours = Ours(bird.make_task, c, o, batch)
    inputs = adamw.tensor(batch["spectrogram"]), adamw.tensor(batch["label"]).long()
    params = ours.params()

    def step(compiled: bool) -> adamw.Step:
        return adamw.adamw_step(
            Classifier(c, params), inputs, o, compiled=compiled, spared=("cls", "pos")
        )

    return adamw.Sides(ours, adamw.theirs(step), size["batch"], "rows", within=1e-4)
