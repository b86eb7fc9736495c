"""The fMRI autoencoder at the demo's size: its step, and that of PyTorch's layers.

The weights are the same. Dropout draws other numbers in PyTorch. Times are of steps with the demo's
rates. Losses are compared without any, at a thousandth of the demo's learning rate, those of the
first three steps, with PyTorch's in float64. Ours are 8e-8, 8e-7 and 8e-6 from them. With weights
that are one rounding off they are as far from themselves (docs/results/cpu-steps.md). The losses of
PyTorch in float32 are 6e-8, 1e-4 and 7e-4 from them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from jaxtrain import config as config_lib
from jaxtrain.types import PyTree
from jaxtrain.workloads.giblet import loss as giblet_loss
from jaxtrain.workloads.giblet import model as giblet
from loaders.base import Field
from loaders.film import multimodal
from tools.our_step import Ours
from tools.torch_steps import adamw

F = torch.nn.functional
DEFAULTS = {"batch": 32, "rounds": 10}
CONFIG = Path(__file__).parents[2] / "configs" / "giblet.py"


def make_batch(fields: Mapping[str, Field], batch: int) -> dict[str, np.ndarray]:
    """Rows of noise in the loader's types: brightness in 0..1, codes, unit variance."""
    rng, rows = np.random.default_rng(0), {}
    for name, field in fields.items():
        shape = (batch, *field.shape)
        if name == "audio":
            rows[name] = rng.integers(0, 1024, shape).astype(field.dtype)
        elif name == "video":
            rows[name] = rng.random(shape, "f4").astype(field.dtype)
        elif name == "weight":
            rows[name] = np.ones(shape, field.dtype)
        elif field.shape:
            rows[name] = rng.standard_normal(shape, "f4").astype(field.dtype)
        else:
            rows[name] = np.arange(batch, dtype=field.dtype)
    return rows


def chain(c: giblet.Config, layers: list[giblet.Layer], params: PyTree) -> torch.nn.Sequential:
    modules: list[torch.nn.Module] = []
    for i, layer in enumerate(layers):
        w = params[str(i)]
        modules.append(adamw.linear(w["w"], w["b"]))
        if layer.norm:
            norm = torch.nn.BatchNorm1d(layer.n_out, eps=giblet.EPS, momentum=giblet.MOMENTUM)
            norm.weight, norm.bias = adamw.parameter(w["scale"]), adamw.parameter(w["bias"])
            modules.append(norm)
        if layer.relu:
            modules.append(torch.nn.ReLU())
        if layer.rate and c.dropout:
            modules.append(torch.nn.Dropout(c.dropout * layer.rate))
    return torch.nn.Sequential(*modules)


def mean_error(y_bd: torch.Tensor, target_bd: torch.Tensor) -> torch.Tensor:
    """Return the mean square, over the standard deviation of the targets."""
    std, mean = torch.std_mean(target_bd)
    return F.mse_loss(y_bd, target_bd) / torch.where(
        std > 1e-5 * mean.abs(), std + giblet_loss.STD_EPS, 1.0
    )


class Autoencoder(torch.nn.Module):
    """Codes of sound: one frame reconstructed, and mean squares over targets' deviation."""

    def __init__(self, c: giblet.Config, params: PyTree):
        super().__init__()
        self.c = c
        self.encoder, self.decoder = (
            torch.nn.ModuleDict(
                {name: chain(c, layers, params[part][name]) for name, layers in branches.items()}
            )
            for part, branches in giblet.layers(c).items()
        )

    def forward(
        self, video: torch.Tensor, audio: torch.Tensor, text: torch.Tensor, fmri: torch.Tensor
    ) -> torch.Tensor:
        c, dtype = self.c, self.encoder["fmri"][0].weight.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32  # of the losses
        frames, codes, words, fmri = (x.to(wide) for x in (video, audio, text, fmri))
        video, audio, text = (x.to(dtype) for x in (video, audio, text))
        joined = torch.cat(
            [
                self.encoder["video"](video),
                self.encoder["audio"](audio),
                self.encoder["text"](text),
            ],
            1,
        )
        bottleneck = self.encoder["trunk"](joined)
        shared = self.decoder["trunk"](bottleneck)
        start = c.frame % c.n_frames * c.frame_size
        sound = giblet.LARGEST_CODE * self.decoder["audio"](shared).to(wide).sigmoid()
        film = self.decoder["video"](shared).to(wide).sigmoid()
        return (
            c.weight_video * mean_error(film, frames[:, start : start + c.frame_size])
            + c.weight_audio * mean_error(sound, codes)
            + c.weight_text * mean_error(self.decoder["text"](shared).to(wide), words)
            + c.weight_fmri * mean_error(self.encoder["fmri"](bottleneck).to(wide), fmri)
        )


def case_step(case: adamw.Case) -> adamw.Step:
    """Return PyTorch's step of a case, whose parameters and moments have the type of ours."""
    c, o = case.config.model, case.config.optim
    inputs = tuple(adamw.tensor(case.batch[name]) for name in (*giblet.MODALITIES, "fmri"))
    model = Autoencoder(c, case.params)
    half = c.dtype == "bfloat16" and c.param_dtype == "float32"
    options = {"compiled": case.is_compiled, "half": half, "norms": case.norms}
    return adamw.adamw_step(model, inputs, o, **options)


def sides(size: Mapping[str, int]) -> adamw.Sides:
    run = config_lib.load(f"{CONFIG}:demo")
    o = dataclasses.replace(run.optim, schedule="constant", warmup=0)
    batch = make_batch(multimodal.element_spec(run.data), size["batch"])

    inputs = tuple(adamw.tensor(batch[name]) for name in (*giblet.MODALITIES, "fmri"))

    def pair(c: giblet.Config, o: config_lib.Optim) -> tuple[Ours, Callable[[bool], adamw.Step]]:
        ours = Ours(giblet_loss.make_task, c, o, batch)
        params = ours.params()
        return ours, lambda compiled: adamw.adamw_step(
            Autoencoder(c, params), inputs, o, compiled=compiled
        )

    def same() -> tuple[adamw.Step, adamw.Step]:
        c, slow = (
            dataclasses.replace(run.model, dropout=0.0),
            dataclasses.replace(o, lr=1e-3 * o.lr),
        )
        ours, _ = pair(c, slow)
        return ours, adamw.adamw_step(Autoencoder(c, ours.params()).double(), inputs, slow)

    ours, make = pair(run.model, o)
    return adamw.Sides(
        ours, adamw.theirs(make), size["batch"], "rows", within=5e-5, steps=3, same=same
    )
