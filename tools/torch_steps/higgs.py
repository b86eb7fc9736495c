"""Adapters on a small audio language model: its step, and that of PyTorch's own layers under peft, from other weights.

Shapes: B rows, P places of a row, D embed, K head dimension.
"""

import functools
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from jaxtrain import config as config_lib
from jaxtrain.workloads.audio_language import hugging_face as higgs
from jaxtrain.workloads.audio_language import loss as audio_loss
from jaxtrain.workloads.audio_language import model as audio_language
from loaders.chat import chatml
from tools.torch_steps import steps

F = torch.nn.functional
DEFAULTS = {"embed": 128, "depth": 4, "heads": 4, "context": 64, "batch": 8, "rounds": 10}
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
linear = functools.partial(nn.Linear, bias=False)


def make_batch(c: audio_language.Config, batch: int, text: int, times: int) -> dict[str, np.ndarray]:
    """Rows of a question in text and an answer in sound, as loaders.chat.chat_audio lays them out."""
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


class Net(nn.Module):
    def __init__(self, c: audio_language.Config):
        super().__init__()
        d = c.embed
        self.gate_proj, self.up_proj, self.down_proj = linear(d, c.mlp), linear(d, c.mlp), linear(c.mlp, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Places in their own nets by the mask ``inside``; PyTorch's fused attention."""

    def __init__(self, c: audio_language.Config, inside: torch.Tensor):
        super().__init__()
        d = c.embed
        self.c, self.inside = c, inside
        self.q_proj, self.o_proj = linear(d, c.heads * c.k), linear(c.heads * c.k, d)
        self.k_proj, self.v_proj = linear(d, c.g * c.k), linear(d, c.g * c.k)
        self.mlp, self.audio_mlp = Net(c), Net(c)
        self.norms = nn.ModuleList(nn.RMSNorm(d, eps=c.eps) for _ in range(4))
        angle = (
            torch.arange(inside.shape[1]).float()[:, None]
            * torch.from_numpy(c.rope.theta ** (-np.arange(0, c.k, 2) / c.k)).float()
        )
        self.cos, self.sin = (torch.cat([x, x], -1) for x in (angle.cos(), angle.sin()))

    def turned(self, z: torch.Tensor) -> torch.Tensor:
        a, b = z.chunk(2, dim=-1)
        return z * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (b, t, _), inside = x.shape, self.inside
        h = torch.where(inside[..., None], self.norms[0](x), self.norms[1](x))
        q, k, v = (p(h).view(b, t, -1, self.c.k).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, t, -1))
        y = torch.empty_like(x)
        y[inside] = self.audio_mlp(self.norms[2](x[inside]))
        y[~inside] = self.mlp(self.norms[3](x[~inside]))
        return x + y


class Decoder(nn.Module):
    def __init__(self, c: audio_language.Config, inside: torch.Tensor):
        super().__init__()
        self.c, self.inside, d = c, inside, c.embed
        self.text, self.codes = nn.Embedding(c.vocab, d), nn.Embedding(c.codebooks * c.n_codes, d)
        self.layers, self.norm = nn.ModuleList(Layer(c, inside) for _ in range(c.depth)), nn.RMSNorm(d, eps=c.eps)
        self.head = linear(d, c.codebooks * c.n_codes)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=c.init_std)

    def forward(self, text: torch.Tensor, codes: torch.Tensor, at: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss, a mean over codebooks."""
        c = self.c
        x = torch.empty(*self.inside.shape, c.embed)
        x[~self.inside] = self.text(text).flatten(0, 1)
        x[self.inside] = self.codes(codes + torch.arange(c.codebooks) * c.n_codes).sum(-2).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)[torch.arange(len(x))[:, None], at]
        logits = self.head(x).unflatten(-1, (c.codebooks, c.n_codes))
        each = [F.cross_entropy(logits[..., k, :].flatten(0, 1), target[..., k].flatten(), ignore_index=chatml.NONE)
                for k in range(c.codebooks)]  # fmt: skip
        return torch.stack(each).mean()


def sides(size: Mapping[str, int]) -> steps.Sides:
    c = audio_language.Config(
        vocab=512, codebooks=8, codebook_size=1024, embed=size["embed"], depth=size["depth"], heads=size["heads"],
        kv_heads=size["heads"] // 2, mlp=4 * size["embed"], dtype="float32", unroll=size["depth"],
    )  # fmt: skip
    changes = {"rank": 8, "alpha": 16.0, "dtype": "float32"}
    adapters = config_lib.section(config_lib.Lora, {**higgs.ADAPTERS, **changes})
    batch = make_batch(c, size["batch"], size["context"], size["context"])
    o = config_lib.Optim(lr=2e-4, b2=0.95, weight_decay=0.01, schedule="constant")

    def make(compiled: bool) -> steps.Step:
        import peft

        torch.manual_seed(0)
        inside = torch.from_numpy(batch["slot"] >= batch["text"].shape[1])
        lora = peft.LoraConfig(r=adapters.rank, lora_alpha=adapters.alpha, target_modules=MATRICES)
        inputs = [torch.from_numpy(batch[name]).long() for name in ("text", "codes", "audio_at", "audio_target")]
        return steps.adamw_step(peft.get_peft_model(Decoder(c, inside), lora), inputs, o, compiled=compiled)

    ours = steps.Ours(audio_loss.make_task, c, o, batch, adapters=adapters)
    return steps.Sides(ours, steps.theirs(make), size["batch"] * batch["place"].shape[1], "places")
