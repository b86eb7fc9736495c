"""Packed rows through a decoder of Llama's kind: PyTorch's modules with the weights of ours.

Attention stays within documents. On GPUs it is PyTorch's attention of rows of different lengths
(varlen, a flash kernel), or a kernel that `flex_attention` compiles from the mask. On CPUs it is
the formula with a mask.

Shapes: B rows, T tokens, D embed, H heads, G key/value heads, K head dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from jaxtrain.nn.layers import Rope
from jaxtrain.workloads.language import model as language
from tools.torch_steps import adamw

F = torch.nn.functional
WAYS = ("eager", "compile", "compile-flex")
CHUNK = 4096  # [tokens] whose logits exist at the same time, if not all
# (q [B, T, H, K], k and v [B, T, G, K]) -> [B, T, H, K]
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def document_starts(segments_bt: np.ndarray) -> np.ndarray:
    """Return the places, in the flattened rows, at which a document begins, and the last one + 1.

    Padding counts as a document.
    """
    first_bt = np.ones_like(segments_bt, bool)
    first_bt[:, 1:] = segments_bt[:, 1:] != segments_bt[:, :-1]
    return np.append(np.flatnonzero(first_bt), segments_bt.size).astype(np.int32)


def make_attention(segments_bt: np.ndarray, way: str) -> Attention:
    if torch.get_default_device().type == "cpu":
        return by_mask(segments_bt)
    return by_flex(segments_bt) if way == "compile-flex" else by_lengths(segments_bt)


def by_mask(segments_bt: np.ndarray) -> Attention:
    causal_tt = np.tri(segments_bt.shape[1], dtype=bool)
    seen_btt = (segments_bt[:, :, None] == segments_bt[:, None, :]) & causal_tt
    mask = adamw.tensor(seen_btt)[:, None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return y.transpose(1, 2)

    return attend


def by_lengths(segments_bt: np.ndarray) -> Attention:
    from torch.nn.attention.varlen import varlen_attn

    starts = document_starts(segments_bt)
    longest = int(np.diff(starts).max())
    offsets = adamw.tensor(starts)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat = (x.flatten(0, 1) for x in (q, k, v))
        y = varlen_attn(*flat, offsets, offsets, longest, longest, window_size=(-1, 0))
        return y.view_as(q)

    return attend


def by_flex(segments_bt: np.ndarray) -> Attention:
    from torch.nn.attention import flex_attention

    segments = adamw.tensor(segments_bt)
    b, t = segments_bt.shape

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (segments[b, q] == segments[b, k])

    mask = flex_attention.create_block_mask(mask_mod, b, None, t, t, device=segments.device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = flex_attention.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        return y.transpose(1, 2)

    return attend


def turns(rope: Rope, positions_bt: np.ndarray, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [B, T, 1, K / 2], stretched as in Llama 3.1."""
    frequencies = rope.theta ** (-np.arange(0, k, 2) / k)
    if rope.factor != 1:
        n_turns = rope.original * frequencies / (2 * np.pi)
        share = np.clip((n_turns - rope.low) / (rope.high - rope.low), 0, 1)
        frequencies = frequencies * share + frequencies / rope.factor * (1 - share)
    angles = positions_bt[..., None].astype("f4") * frequencies.astype("f4")
    return adamw.tensor(np.cos(angles))[:, :, None], adamw.tensor(np.sin(angles))[:, :, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class RMSNorm(torch.nn.Module):
    def __init__(self, scale_d: np.ndarray, eps: float):
        super().__init__()
        self.weight, self.eps = adamw.parameter(scale_d), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class Layer(torch.nn.Module):
    def __init__(self, c: language.Config, w: Mapping[str, np.ndarray], attention: Attention):
        super().__init__()
        d = c.embed
        self.sizes = [c.heads * c.k, c.g * c.k, c.g * c.k]
        self.k, self.attention = c.k, attention
        self.norm_1, self.norm_2 = (RMSNorm(w[f"scale_{n}"], c.eps) for n in ("attention", "mlp"))
        qkv = np.concatenate([w[f"w_{n}"].reshape(-1, d) for n in "qkv"])
        self.qkv = adamw.linear(qkv, transposed=True)
        self.out = adamw.linear(w["w_out"].reshape(d, -1), transposed=True)
        gate_up = np.concatenate([w["w_gate"], w["w_up"]])
        self.gate_up = adamw.linear(gate_up, transposed=True)
        self.down = adamw.linear(w["w_down"], transposed=True)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (
            y.view(b, t, -1, self.k) for y in self.qkv(self.norm_1(x)).split(self.sizes, dim=2)
        )
        y = self.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + self.out(y.reshape(b, t, -1))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(torch.nn.Module):
    """RMS norms, rotary positions, SwiGLU, a tied head, and the loss with its z-loss."""

    def __init__(self, case: adamw.Case):
        super().__init__()
        c, params = case.config.model, case.params
        self.dtype, self.z_loss, self.whole_loss = c.dtype, c.z_loss, case.whole_loss
        self.embed = adamw.parameter(params["embed"])
        attention = make_attention(case.batch["segments"], case.way)
        layers = ({name: w[i] for name, w in params["blocks"].items()} for i in range(c.depth))
        self.layers = torch.nn.ModuleList([Layer(c, w, attention) for w in layers])
        self.norm = RMSNorm(params["scale"], c.eps)
        self.turns = turns(c.rope, case.batch["positions"], c.k)

    def forward(
        self, tokens_bt: torch.Tensor, targets_bt: torch.Tensor, mask_bt: torch.Tensor
    ) -> torch.Tensor:
        x = F.embedding(tokens_bt, self.embed).to(getattr(torch, self.dtype))
        for layer in self.layers:
            x = layer(x, *self.turns)
        x, targets, mask = self.norm(x).flatten(0, 1), targets_bt.flatten(), mask_bt.flatten()
        parts = (x, targets, mask)
        return chunked(self.loss, self.embed, parts, whole=self.whole_loss) / mask.sum()

    def loss(
        self, w: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        logits = F.linear(x, w).float()
        lse = logits.logsumexp(-1)
        right = logits.gather(-1, targets[:, None])[:, 0]
        return ((lse - right + self.z_loss * lse.square()) * mask).sum()


def chunked(
    loss: Callable[..., torch.Tensor],
    w: torch.Tensor,
    parts: Sequence[torch.Tensor],
    *,
    whole: bool,
) -> torch.Tensor:
    """Return the sum of a loss of places, of all at once or of `CHUNK` at a time.

    ``loss``: of the head ``w`` and of each of ``parts``, whose first dimension is the places.
    """
    if whole:
        return loss(w, *parts)
    chunks = zip(*(part.split(CHUNK) for part in parts), strict=True)
    checkpoint = torch.utils.checkpoint.checkpoint
    sums = [checkpoint(loss, w, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(sums).sum()


def case_step(case: adamw.Case) -> adamw.Step:
    """Return PyTorch's step of a case with all of its documents, in the same rows as ours."""
    inputs = (
        *(adamw.tensor(case.batch[name]).long() for name in ("tokens", "targets")),
        adamw.tensor(case.batch["mask"]),
    )
    return adamw.adamw_step(
        Decoder(case),
        inputs,
        case.config.optim,
        compiled=case.is_compiled,
        spared=("embed",),
        half=case.config.model.dtype == "bfloat16",
        norms=case.norms,
    )
