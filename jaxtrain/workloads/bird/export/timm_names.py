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
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from jaxtrain.arrays import stored
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.export import saved

PATCH = "patch_embed/proj/weight"
ENCODER = "encoder/"
HEAD = "objective/supervised/"
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
    for path in arrays:
        if f"/{path}".endswith(f"/{PATCH}"):
            prefix = path.removesuffix(PATCH)
            return {path.removeprefix(prefix): array for path, array in arrays.items()}
    return {}


def about(folder: str | os.PathLike[str], width: int) -> About:
    """Read config.json of timm, for tokens of a ``width``. Raises StoredError: no sense in it."""
    place = epath.Path(folder).expanduser()
    place = place if place.is_dir() else place.parent
    fields = _fields(place)

    def first(*names: str, default: Any) -> Any:
        return next((fields[name] for name in names if name in fields), default)

    size = _image_size(fields)
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
    is_image = isinstance(size, list) and len(size) == 2 and all(map(_is_size, size))
    if size is not None and not is_image:
        problems.append(f"img_size is {str(size)[:40]!r}; expected [frames, mels]")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        problems.append(
            f"the activation is {str(activation)[:40]!r}; expected one of: {', '.join(ACTIVATIONS)}"
        )
    if problems:
        raise StoredError(f"{place / 'config.json'}: {'; '.join(problems)}")
    return About(
        heads=heads,
        activation=activation,
        eps=eps,
        image=(size[0], size[1]) if size is not None else None,
        own_position=not fields.get("no_embed_class"),
        averages=fields.get("global_pool") in ("avg", "mean"),
    )


def _fields(folder: epath.Path) -> dict[str, Any]:
    """Return the values of a folder's config.json, those of its parts by their own names."""
    path = folder / "config.json"
    config = stored.read_object(folder, "config.json") if path.exists() else {}
    fields = dict(config)
    for name in ("pretrained_cfg", "model_args"):
        if isinstance(config.get(name), dict):
            fields |= config[name]
    return {name: value for name, value in fields.items() if value is not None}


def _image_size(fields: Mapping[str, Any]) -> Any:
    """Return the image as config.json has it: [frames, mels] if it is valid, None if it is none."""
    if "img_size_x" in fields and "img_size_y" in fields:
        return [fields["img_size_x"], fields["img_size_y"]]
    size = fields.get("img_size")
    channels_first = fields.get("input_size")
    if size is None and isinstance(channels_first, list):
        size = channels_first[1:]
    return [size, size] if isinstance(size, int) else size


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20


def as_ours(arrays: Mapping[str, Stored], folder: str | os.PathLike[str]) -> dict[str, Stored]:
    """Return the encoder's parameters of a folder by our paths, others by their own, unread.

    An array of a wrong shape stays as it is: the reader of the table refuses it. Raises
    StoredError: odd patches, an unknown number of heads, layers that differ, an odd config.json.
    """
    theirs = unprefixed(arrays)
    patch = theirs.pop(PATCH)
    if len(patch.shape) != 4 or patch.shape[1] not in (1, 3):
        raise StoredError(
            f"{folder}: {PATCH} is {list(patch.shape)}; expected [width, 1 or 3 channels, frames,"
            " mels]"
        )
    width, _, *sides = patch.shape
    settings = about(folder, width)
    ours = {f"{ENCODER}w_patch": _view(patch, (math.prod(sides), width), _patches)}
    norm = "fc_norm" if "fc_norm/weight" in theirs else "norm"
    for path, name in (
        ("patch_embed/proj/bias", "b_patch"),
        (f"{norm}/weight", "scale"),
        (f"{norm}/bias", "bias"),
    ):
        if path in theirs:
            ours[f"{ENCODER}{name}"] = theirs.pop(path)
    ours |= _tokens(theirs, width, settings)

    names = {path: name for name, path in LAYER.items()}
    for path in list(theirs):
        layer = re.fullmatch(r"blocks/(\d+)/(.*)", path)
        if layer and layer[2] in names:
            name = names[layer[2]]
            array = _of_layer(name, theirs.pop(path), width, settings.heads, f"{folder}: {path}")
            ours[f"{ENCODER}blocks/{name}[{layer[1]}]"] = array
    return _with_keys(stored.stack(ours | theirs))


def _with_keys(arrays: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return the arrays with their paths as their keys."""
    return {path: array._replace(keys=tuple(path.split("/"))) for path, array in arrays.items()}


def _tokens(theirs: dict[str, Stored], width: int, settings: About) -> dict[str, Stored]:
    """Take CLS, registers and positions out of timm's arrays, and return them by our paths.

    If CLS and registers have positions, the first of all, these are added to them.
    """
    ours: dict[str, Stored] = {}
    tokens: dict[str, Stored] = {}
    for path, name in (
        ("cls_token", "cls"),
        ("reg_token", "embed_registers"),
        ("pos_embed", "pos"),
    ):
        if path not in theirs:
            continue
        array = theirs.pop(path)
        if len(array.shape) == 3 and array.shape[0] == 1 and array.shape[2] == width:
            tokens[name] = array
        else:
            ours[f"{ENCODER}{name}"] = array
    positions = tokens.pop("pos", None)
    n_before = 0
    if settings.own_position:
        n_before = sum(array.shape[1] for array in tokens.values())
    if positions is not None and positions.shape[1] <= n_before:
        ours[f"{ENCODER}pos"], positions = positions, None
    if positions is not None:
        shape = (positions.shape[1] - n_before, width)
        ours[f"{ENCODER}pos"] = _view(positions, shape, lambda x: x[0, n_before:])
    start = 0
    for name, array in tokens.items():
        stop = start + array.shape[1]
        of_tokens = positions if n_before else None
        read = functools.partial(_token, array, of_tokens, slice(start, stop))
        shape = (array.shape[1], width)
        ours[f"{ENCODER}{name}"] = Stored(shape, array.dtype, _indexed(read), (), shape)
        start = stop
    return ours


def _of_layer(name: str, array: Stored, width: int, heads: int, source: str) -> Stored:
    """Return one layer's array in our shape, or as it is if its own shape is a wrong one."""
    sizes = {"w_qkv": (3 * width, width), "b_qkv": (3 * width,), "w_out": (width, width)}
    if array.shape != sizes.get(name, array.shape):
        return array
    if name.startswith("w_") and len(array.shape) != 2:
        return array
    if name in sizes and not heads:
        presets = ", ".join(f"{w} ({h})" for w, h in sorted(WIDTHS.items()))
        raise StoredError(
            f"{source}: how many heads it has is not known: config.json has no num_heads, and its"
            f' width {width} is none of {presets}; write {{"num_heads": …}} there'
        )
    head_dim = width // heads if heads else 0
    if name == "b_qkv":
        return _view(array, (3, heads, head_dim), lambda x: x.reshape(3, heads, head_dim))
    if not name.startswith("w_"):
        return _view(array, array.shape, lambda x: x)
    shape = array.shape[::-1]
    if name == "w_qkv":
        shape = (width, 3, heads, head_dim)
    elif name == "w_out":
        shape = (heads, head_dim, width)
    return _view(array, shape, lambda x: x.T.reshape(shape))


def _patches(x_dchw: np.ndarray) -> np.ndarray:
    width, n_channels, _, _ = x_dchw.shape
    x_dhw = x_dchw[:, 0]
    if n_channels > 1:
        x_dhw = x_dchw.astype(np.float32).sum(1)
    return x_dhw.reshape(width, -1).T.astype(x_dchw.dtype)


def _token(array: Stored, positions: Stored | None, place: slice) -> np.ndarray:
    x: np.ndarray = array.read(())[0]
    if positions is None:
        return x
    position = positions.read(())[0, place].astype(np.float32)
    return (x.astype(np.float32) + position).astype(x.dtype)


def _indexed(read: Callable[[], np.ndarray]) -> Callable[[Any], np.ndarray]:
    return lambda index: read()[index] if index else read()


def _view(array: Stored, shape: tuple[int, ...], change: Any) -> Stored:
    """Return an array that is read whole and then changed."""
    read = _indexed(lambda: change(array.read(())))
    return Stored(shape, array.dtype, read, array.keys, shape)


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
    if c.patch_norm:
        problems.append("model.patch_norm is True, and timm's patches are not normalised")
    problems += saved.misfits(c, arrays)
    if problems:
        raise StoredError(
            f"timm has no such transformer: {'; '.join(problems)}; omit --format timm"
        )
    ours = {
        path.removeprefix(ENCODER): array
        for path, array in arrays.items()
        if path.startswith(ENCODER)
    }
    d = c.embed
    patch_shape = (d, 1, *c.patch)
    norm = norm_of(model)
    theirs = {
        PATCH: _view(ours["w_patch"], patch_shape, lambda x: x.T.reshape(patch_shape)),
        "patch_embed/proj/bias": ours["b_patch"],
        "pos_embed": _view(ours["pos"], (1, c.n_patches, d), lambda x: x[None]),
        f"{norm}/weight": ours["scale"],
        f"{norm}/bias": ours["bias"],
    }
    if c.n_cls:
        theirs["cls_token"] = _view(ours["cls"], (1, 1, d), lambda x: x[None])
    if c.n_registers:
        shape = (1, c.n_registers, d)
        theirs["reg_token"] = _view(ours["embed_registers"], shape, lambda x: x[None])
    blocks = vit.make_specs(c)["blocks"]
    for name, path in LAYER.items():
        if name in blocks:
            for i in range(c.depth):
                theirs[f"blocks/{i}/{path}"] = _one_layer(name, ours[f"blocks/{name}"], i)
    w, b = arrays.get(f"{HEAD}w"), arrays.get(f"{HEAD}b")
    if w is not None and b is not None:
        theirs["head/weight"] = _view(w, w.shape[::-1], lambda x: x.T)
        theirs["head/bias"] = b
    return _with_keys(theirs)


def norm_of(model: Mapping[str, Any]) -> str:
    """Return timm's name of the last norm, the same before and after pooling CLS alone."""
    if model.get("norm") == "pooled" and model.get("pool") == "patches":
        return "fc_norm"
    return "norm"


def _one_layer(name: str, stack: Stored, i: int) -> Stored:
    """Entry ``i`` of a stack as timm has it: (out, in), or one axis."""
    inner = stack.shape[1:]

    def read_entry() -> np.ndarray:
        index = (slice(i, i + 1), *(slice(0, n) for n in inner))
        entry: np.ndarray = stack.read(index)[0]
        return entry

    if not name.startswith("w_"):
        shape: tuple[int, ...] = (math.prod(inner),)
        read = _indexed(lambda: read_entry().reshape(shape))
        return Stored(shape, stack.dtype, read, stack.keys, shape)
    n_in_axes = 2 if name == "w_out" else 1
    n_in = math.prod(inner[:n_in_axes])
    n_out = math.prod(inner[n_in_axes:])
    read = _indexed(lambda: np.ascontiguousarray(read_entry().reshape(n_in, n_out).T))
    return Stored((n_out, n_in), stack.dtype, read, stack.keys, (n_out, n_in))


def with_head(arrays: dict[str, Stored]) -> dict[str, Stored]:
    """Return the arrays of an export of ours by `as_ours`, with its head if the run has one."""
    if not {"head/weight", "head/bias"} <= arrays.keys():
        return arrays
    arrays = dict(arrays)
    w = arrays.pop("head/weight")
    b = arrays.pop("head/bias")
    arrays[f"{HEAD}w"] = _view(w, w.shape[::-1], lambda x: x.T)
    arrays[f"{HEAD}b"] = b
    return arrays
