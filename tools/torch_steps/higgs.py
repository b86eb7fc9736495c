"""Adapters on the frozen audio language model: PyTorch's modules with the weights of ours.

Each adapted matrix is a module of its own, as in peft: W x + scale × B (A x). Text and columns go
through their own nets at their own places alone, as in ours.

Shapes: as in jaxtrain/workloads/audio_language/model.py.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from jaxtrain.nn import lora
from tools.torch_steps import adamw, packed

F = torch.nn.functional
FIELDS = ("text", "codes", "place", "slot", "text_at", "text_target", "audio_at", "audio_target")
Weights = Mapping[str, Any]


class Adapted(torch.nn.Module):
    """A frozen matrix [first…, last…] with its trained factors A [rank, last…], B [first…, rank].

    ``n_last``: dimensions of the last side, which are flattened, as the first side's are.
    """

    def __init__(self, w: np.ndarray, factors: Weights, scale: float, dtype: torch.dtype):
        super().__init__()
        a, b = factors[lora.A], factors[lora.B]
        rank, n_in = a.shape[0], math.prod(a.shape[1:])
        self.scale = scale
        self.register_buffer("w", adamw.tensor(w.reshape(-1, n_in)).to(dtype))
        self.a, self.b = (
            adamw.parameter(a.reshape(rank, n_in)),
            adamw.parameter(b.reshape(-1, rank)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.w) + F.linear(self.scale * F.linear(x, self.a), self.b)


class Norm(torch.nn.Module):
    """An RMS norm by frozen scales."""

    def __init__(self, scale_d: np.ndarray, eps: float):
        super().__init__()
        self.eps = eps
        self.register_buffer("scale", adamw.tensor(scale_d).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.scale, self.eps).to(x.dtype)


class Net(torch.nn.Module):
    def __init__(self, weights: Mapping[str, Adapted], norm: Norm):
        super().__init__()
        self.norm = norm
        self.gate, self.up, self.down = (weights[f"w_{n}"] for n in ("gate", "up", "down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Layer(torch.nn.Module):
    def __init__(self, c: Any, frozen: Weights, trained: Weights, scale: float):
        super().__init__()
        self.k = c.k
        dtype = getattr(torch, c.dtype)

        def adapted(frozen: Weights, trained: Weights) -> dict[str, Adapted]:
            return {
                n: Adapted(frozen[n], trained[n], scale, dtype) for n in trained if n[:2] == "w_"
            }

        weights, of_audio = adapted(frozen, trained), adapted(frozen["audio"], trained["audio"])
        self.q, self.key, self.v, self.out = (weights[f"w_{n}"] for n in ("q", "k", "v", "out"))
        self.norm, self.audio_norm = (
            Norm(part["scale_attention"], c.eps) for part in (frozen, frozen["audio"])
        )
        self.net = Net(weights, Norm(frozen["scale_mlp"], c.eps))
        self.audio_net = Net(of_audio, Norm(frozen["audio"]["scale_mlp"], c.eps))

    def forward(
        self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], order: "Order"
    ) -> torch.Tensor:
        y = torch.where(order.is_audio, self.audio_norm(x), self.norm(x))
        q, k, v = (m(y).unflatten(-1, (-1, self.k)) for m in (self.q, self.key, self.v))
        heads = (z.transpose(1, 2) for z in (packed.rotate(q, *turns), packed.rotate(k, *turns), v))
        y = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        text, audio = taken(x, order.place).split(order.sizes, dim=1)
        return taken(torch.cat([self.net(text), self.audio_net(audio)], 1), order.slot)


class Order:
    """The places of text and columns of a batch, as in ours."""

    def __init__(self, text: torch.Tensor, place: torch.Tensor, slot: torch.Tensor):
        self.place, self.slot = place, slot
        n_text = text.shape[1]
        self.sizes = [n_text, place.shape[1] - n_text]
        self.is_audio = (slot >= n_text)[..., None]


def taken(x: torch.Tensor, at_bn: torch.Tensor) -> torch.Tensor:
    """x[b, at[b, n]]."""
    return x.gather(1, at_bn[..., None].expand(-1, -1, x.shape[-1]))


class Decoder(torch.nn.Module):
    """The loss of whole rows: text and each codebook, by the scales of their labels."""

    def __init__(self, case: adamw.Case):
        super().__init__()
        c, frozen = case.config.model, case.frozen
        dtype = getattr(torch, c.dtype)
        self.whole_loss, self.average = case.whole_loss, c.average_codes
        for name in ("embed", "embed_audio", "w_head_audio"):
            self.register_buffer(name, adamw.tensor(frozen[name]).to(dtype))
        head = self.embed if c.tied else adamw.tensor(frozen["w_head"]).to(dtype)
        self.register_buffer("head", head)
        # the same in all rows
        self.register_buffer("label_scale", adamw.tensor(case.batch["label_scale"].max(0)))
        scale = case.config.lora.alpha / case.config.lora.rank
        layers = zip(
            stack(frozen["blocks"], c.depth), stack(case.params["blocks"], c.depth), strict=True
        )
        self.layers = torch.nn.ModuleList([Layer(c, *both, scale) for both in layers])
        self.norm = Norm(frozen["scale"], c.eps)
        self.turns = packed.turns(c.rope, np.arange(case.batch["place"].shape[1])[None], c.k)

    def forward(
        self,
        text: torch.Tensor,
        codes: torch.Tensor,
        place: torch.Tensor,
        slot: torch.Tensor,
        text_at: torch.Tensor,
        text_target: torch.Tensor,
        audio_at: torch.Tensor,
        audio_target: torch.Tensor,
    ) -> torch.Tensor:
        order = Order(text, place, slot)
        n_codebooks = codes.shape[-1]
        columns = sum(F.embedding(codes[..., k], self.embed_audio[k]) for k in range(n_codebooks))
        columns = columns / n_codebooks if self.average else columns
        x = taken(torch.cat([F.embedding(text, self.embed), columns], 1), slot)
        for layer in self.layers:
            x = layer(x, self.turns, order)
        x = self.norm(x)
        total = self.nats(taken(x, text_at), self.head, text_target) * self.label_scale[0]
        y = taken(x, audio_at)
        for k in range(n_codebooks):
            nats = self.nats(y, self.w_head_audio[k], audio_target[..., k])
            total = total + nats * self.label_scale[1 + k]
        return total / len(text)

    def nats(self, x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of all labels, without negative ones."""
        parts = (x.flatten(0, 1), targets.flatten(), (targets >= 0).flatten().float())
        return packed.chunked(cross_entropy, w, parts, whole=self.whole_loss)


def cross_entropy(
    w: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    logits = F.linear(x, w).float()
    right = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return ((logits.logsumexp(-1) - right) * weight).sum()


def stack(table: Weights, depth: int) -> Iterator[Weights]:
    """Yield the weights of each layer of a stack."""

    def of_layer(part: Any, i: int) -> Any:
        return (
            {n: of_layer(x, i) for n, x in part.items()} if isinstance(part, Mapping) else part[i]
        )

    for i in range(depth):
        yield of_layer(table, i)


def case_step(case: adamw.Case) -> adamw.Step:
    """Return PyTorch's step of a case, in as many microbatches as ours."""
    return adamw.adamw_step(
        Decoder(case),
        [adamw.tensor(case.batch[name]).long() for name in FIELDS],
        case.config.optim,
        compiled=case.is_compiled,
        half=case.config.model.dtype == "bfloat16",
        microbatches=math.gcd(case.config.train.accumulate, len(case.batch["text"])),
        norms=case.norms,
    )
