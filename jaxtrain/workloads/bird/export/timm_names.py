"""Transformers under timm's names (AudioMAE, Bird-MAE) as `jaxtrain.workloads.bird.vit`, and back.

A spectrogram is an image of one channel, time down and mel to the right. The same numbers in the
same order, but for

    matrices      are (out, in) there, and transposed here
    cls_token     and registers have positions there, the first of pos_embed, which are added here
    fc_norm       the norm of pooled features, in place of that of tokens: model.norm is "pooled"
    three colours of an image are summed to one channel, for a spectrogram is grey

timm's config.json has the sizes that no array shows: heads, image, activation, epsilons.
"""

import functools
import math
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jaxtrain.arrays import stored
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.export import saved

PATCH = "patch_embed/proj/weight"
ENCODER, HEAD = "encoder/", "objective/supervised/"
LAYER = {
    "scale_attention": "norm1/weight",
    "bias_attention": "norm1/bias",
    "w_qkv": "attn/qkv/weight",
    "b_qkv": "attn/qkv/bias",
    "scale_q": "attn/q_norm/weight",
    "bias_q": "attn/q_norm/bias",
    "scale_k": "attn/k_norm/weight",
    "bias_k": "attn/k_norm/bias",
    "w_out": "attn/proj/weight",
    "b_out": "attn/proj/bias",
    "scale_added_attention": "ls1/gamma",
    "scale_mlp": "norm2/weight",
    "bias_mlp": "norm2/bias",
    "w_up": "mlp/fc1/weight",
    "b_up": "mlp/fc1/bias",
    "w_down": "mlp/fc2/weight",
    "b_down": "mlp/fc2/bias",
    "scale_added_mlp": "ls2/gamma",
}
ACTIVATIONS = {
    "gelu": "gelu_exact",
    "gelu_tanh": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
}
WIDTHS = {embed: heads for embed, _, heads in vit.PRESETS.values()}
EPS = 1e-6  # timm's


class About(NamedTuple):
    """The values of such a folder's config.json, with timm's defaults for missing ones."""

    heads: int  # 0 = it does not say, and the width is no preset's
    activation: str  # timm's name
    eps: float
    image: tuple[int, int] | None  # frames and mels; None = it does not say
    own_position: bool  # whether CLS and registers have one
    averages: bool  # whether its features are the mean of the patches


def unprefixed(arrays: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the arrays by timm's own paths, without a folder (``encoder/``, ``model/``) of them.

    They are {} if they are no transformer under timm's names.
    """
    prefix = next(
        (path.removesuffix(PATCH) for path in arrays if f"/{path}".endswith(f"/{PATCH}")), None
    )
    return (
        {} if prefix is None else {path.removeprefix(prefix): one for path, one in arrays.items()}
    )


def about(folder: str | os.PathLike[str], width: int) -> About:
    """Read config.json of timm, for tokens of a ``width``. Raises StoredError: no sense in it."""
    place = epath.Path(folder).expanduser()
    place = place if place.is_dir() else place.parent
    found = stored.read_object(place, "config.json") if (place / "config.json").exists() else {}
    parts = [found.get(name) for name in ("pretrained_cfg", "model_args")]
    flat: dict[str, Any] = {
        **found,
        **{k: v for part in parts if isinstance(part, dict) for k, v in part.items()},
    }
    flat = {name: value for name, value in flat.items() if value is not None}

    def first(*names: str, default: Any = None) -> Any:
        return next((flat[name] for name in names if name in flat), default)

    channels_first = flat.get("input_size")
    size = first(
        "img_size", default=channels_first[1:] if isinstance(channels_first, list) else None
    )
    if "img_size_x" in flat and "img_size_y" in flat:
        size = [flat["img_size_x"], flat["img_size_y"]]
    size = [size, size] if isinstance(size, int) else size
    heads = first("num_heads", "num_attention_heads", "n_heads", default=WIDTHS.get(width, 0))
    eps = first("norm_layer_eps", "layer_norm_eps", "norm_eps", default=EPS)
    activation = first("act_layer", "hidden_act", default="gelu")
    problems = []
    if not _is_size(heads) and heads != 0:
        problems.append(f"num_heads is {str(heads)[:40]!r}; expected a number of heads")
    elif heads and width % heads:
        problems.append(f"num_heads is {heads}, which does not divide the width {width}")
    if type(eps) is not float or not 0 < eps < 1:
        problems.append(f"the norms' epsilon is {str(eps)[:40]!r}; expected a number in (0, 1)")
    if size is not None and not (
        isinstance(size, list) and len(size) == 2 and all(map(_is_size, size))
    ):
        problems.append(f"img_size is {str(size)[:40]!r}; expected [frames, mels]")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        problems.append(
            f"the activation is {str(activation)[:40]!r}; expected one of: {', '.join(ACTIVATIONS)}"
        )
    if problems:
        raise StoredError(f"{place / 'config.json'}: {'; '.join(problems)}")
    image = (size[0], size[1]) if size is not None else None
    averages = flat.get("global_pool") in ("avg", "mean")
    return About(heads, activation, eps, image, not flat.get("no_embed_class"), averages)


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20


def as_ours(arrays: Mapping[str, Stored], folder: str | os.PathLike[str]) -> dict[str, Stored]:
    """Return the encoder's parameters of a folder by our paths, others by their own, unread.

    An array of a wrong shape stays as it is: the reader of the table refuses it. Raises
    StoredError: odd patches, an unknown number of heads, layers that differ, an odd config.json.
    """
    there = unprefixed(arrays)
    patch = there.pop(PATCH)
    if len(patch.shape) != 4 or patch.shape[1] not in (1, 3):
        raise StoredError(
            f"{folder}: {PATCH} is {list(patch.shape)}; expected [width, 1 or 3 channels, frames,"
            " mels]"
        )
    width, _, *sides = patch.shape
    says = about(folder, width)
    ours = {f"{ENCODER}w_patch": _view(patch, (math.prod(sides), width), _patches)}
    names = {"patch_embed/proj/bias": "b_patch"}
    norm = "fc_norm" if "fc_norm/weight" in there else "norm"
    names |= {f"{norm}/weight": "scale", f"{norm}/bias": "bias"}
    ours |= {f"{ENCODER}{name}": there.pop(path) for path, name in names.items() if path in there}

    named = {"cls_token": "cls", "reg_token": "embed_registers", "pos_embed": "pos"}
    tokens = {name: there.pop(path) for path, name in named.items() if path in there}
    odd = {
        name for name, one in tokens.items() if len(one.shape) != 3 or one.shape[::2] != (1, width)
    }
    ours |= {f"{ENCODER}{name}": tokens.pop(name) for name in odd}
    positions = tokens.pop("pos", None)
    before = sum(one.shape[1] for one in tokens.values()) if says.own_position else 0
    if positions is not None and positions.shape[1] <= before:
        ours[f"{ENCODER}pos"], positions = positions, None
    if positions is not None:
        ours[f"{ENCODER}pos"] = _view(
            positions, (positions.shape[1] - before, width), lambda x: x[0, before:]
        )
    at = 0
    for name, one in tokens.items():
        n = one.shape[1]
        read = functools.partial(_token, one, positions if before else None, slice(at, at + n))
        ours[f"{ENCODER}{name}"] = Stored((n, width), one.dtype, _indexed(read), (), (n, width))
        at += n

    by_name = {path: name for name, path in LAYER.items()}
    for path in list(there):
        layer = re.fullmatch(r"blocks/(\d+)/(.*)", path)
        if not layer or layer[2] not in by_name:
            continue
        name, one = by_name[layer[2]], there.pop(path)
        ours[f"{ENCODER}blocks/{name}[{layer[1]}]"] = _of_layer(
            name, one, width, says.heads, f"{folder}: {path}"
        )
    ours |= there
    return {
        path: one._replace(keys=tuple(path.split("/"))) for path, one in stored.stack(ours).items()
    }


def _of_layer(name: str, one: Stored, width: int, heads: int, where: str) -> Stored:
    sizes = {"w_qkv": (3 * width, width), "b_qkv": (3 * width,), "w_out": (width, width)}
    if one.shape != sizes.get(name, one.shape) or name.startswith("w_") and len(one.shape) != 2:
        return one
    if name in sizes and not heads:
        known = ", ".join(f"{w} ({h})" for w, h in sorted(WIDTHS.items()))
        raise StoredError(
            f"{where}: how many heads it has is not known: config.json has no num_heads, and its"
            f" width {width} is none of "
            f'{known}; write {{"num_heads": …}} there'
        )
    if name.startswith("w_"):
        shape = one.shape[::-1]
        k = width // heads if heads else 0
        shape = {"w_qkv": (width, 3, heads, k), "w_out": (heads, k, width)}.get(name, shape)
        return _view(one, shape, lambda x: x.T.reshape(shape))
    shape = (3, heads, width // heads) if name == "b_qkv" else one.shape
    return _view(one, shape, lambda x: x.reshape(shape))


def _patches(x_dchw: np.ndarray) -> np.ndarray:
    x = x_dchw.astype(np.float32).sum(1) if x_dchw.shape[1] > 1 else x_dchw[:, 0]
    return x.reshape(len(x), -1).T.astype(x_dchw.dtype)


def _token(one: Stored, positions: Stored | None, place: slice) -> np.ndarray:
    x: np.ndarray = one.read(())[0]
    if positions is not None:
        x = (x.astype(np.float32) + positions.read(())[0, place].astype(np.float32)).astype(x.dtype)
    return x


def _indexed(read: Any) -> Any:
    return lambda index: read()[index] if index else read()


def _view(one: Stored, shape: tuple[int, ...], change: Any) -> Stored:
    """Return an array that is read whole and then changed."""
    return Stored(shape, one.dtype, _indexed(lambda: change(one.read(()))), one.keys, shape)


def as_timm(arrays: Mapping[str, Stored], model: Mapping[str, Any]) -> dict[str, Stored]:
    """Return a run's encoder, and its supervised head, by timm's paths and in its shapes.

    ``model``: the section of the run's config. Raises StoredError, with all that timm's has not,
    and every array that is missing.
    """
    c = vit.from_saved(model)
    problems = []
    if c.positions != "learned":
        problems.append(f"model.positions is {c.positions!r}, and timm's has learned ones")
    if c.mlp == "swiglu":
        problems.append("model.mlp is 'swiglu', and timm's has gelu or gelu_exact")
    sides, d = c.patch, c.embed
    places: dict[str, tuple[str, tuple[int, ...], Any]] = {
        PATCH: ("w_patch", (d, 1, *sides), lambda x: x.T.reshape(d, 1, *sides)),
        "patch_embed/proj/bias": ("b_patch", (d,), None),
        "cls_token": ("cls", (1, 1, d), lambda x: x[None]),
        "pos_embed": ("pos", (1, c.n_patches, d), lambda x: x[None]),
    }
    norm = norm_of(model)
    places |= {f"{norm}/weight": ("scale", (d,), None), f"{norm}/bias": ("bias", (d,), None)}
    if c.n_registers:
        places["reg_token"] = ("embed_registers", (1, c.n_registers, d), lambda x: x[None])
    if problems := problems + saved.misfits(c, arrays):
        raise StoredError(f"timm has no such transformer: {'; '.join(problems)}; omit --timm")
    there = {
        path.removeprefix(ENCODER): one for path, one in arrays.items() if path.startswith(ENCODER)
    }
    found = {
        path: _view(there[name], shape, change or (lambda x: x))
        for path, (name, shape, change) in places.items()
    }
    for name, path in LAYER.items():
        if name in vit.make_specs(c)["blocks"]:
            found |= {
                f"blocks/{i}/{path}": _one_layer(name, there[f"blocks/{name}"], i)
                for i in range(c.depth)
            }
    w, b = (arrays.get(f"{HEAD}{name}") for name in ("w", "b"))
    if w is not None and b is not None:
        found["head/weight"], found["head/bias"] = _view(w, w.shape[::-1], lambda x: x.T), b
    return {path: one._replace(keys=tuple(path.split("/"))) for path, one in found.items()}


def norm_of(model: Mapping[str, Any]) -> str:
    """Return timm's name of the last norm, the same before and after pooling CLS alone."""
    return "fc_norm" if model.get("norm") == "pooled" and model.get("pool") == "patches" else "norm"


def _one_layer(name: str, one: Stored, i: int) -> Stored:
    """Entry ``i`` of a stack as timm has it: (out, in), or one axis."""
    inner = one.shape[1:]
    split = 2 if name == "w_out" else 1
    out, width = math.prod(inner[split:]), math.prod(inner[:split])
    shape = (out, width) if name.startswith("w_") else (math.prod(inner),)

    def read() -> np.ndarray:
        x = one.read((slice(i, i + 1), *(slice(0, n) for n in inner)))[0]
        return (
            np.ascontiguousarray(x.reshape(width, out).T)
            if name.startswith("w_")
            else x.reshape(shape)
        )

    return Stored(shape, one.dtype, _indexed(read), one.keys, shape)


def with_head(arrays: dict[str, Stored]) -> dict[str, Stored]:
    """Return the arrays of an export of ours by `as_ours`, with its head if the run has one."""
    if not {"head/weight", "head/bias"} <= arrays.keys():
        return arrays
    rest = dict(arrays)
    w, b = rest.pop("head/weight"), rest.pop("head/bias")
    return {**rest, f"{HEAD}w": _view(w, w.shape[::-1], lambda x: x.T), f"{HEAD}b": b}
