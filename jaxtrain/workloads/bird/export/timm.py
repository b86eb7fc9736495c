"""Bird encoders from timm's vision transformers (AudioMAE, Bird-MAE among them), and as one.

`from_folder` gives the sections of a config that begins with such a folder, `run_config` the config
of a run that would have made it, and `FORMAT` the files of `jaxtrain export --format timm`. The
renaming is in `jaxtrain.workloads.bird.export.timm_names`.
"""

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from etils import epath

from jaxtrain.arrays import safetensors_reader, stored
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.types import Export, Foreign, Format, Hub
from jaxtrain.workloads.bird import export, vit
from jaxtrain.workloads.bird.export import saved, timm_names
from loaders.audio import front_end

# beginnings of arrays that the encoder of such a folder has no use for
UNUSED = ("head/", "norm/", "decoder", "mask_token")
GRID = "^encoder/pos$"
# next to the weights of others: fields of the section data that say which spectrograms they read
FRONT_END = "front_end.json"
ARCHITECTURES = {
    "ti": "vit_tiny_patch16_224",
    "s": "vit_small_patch16_224",
    "b": "vit_base_patch16_224",
    "l": "vit_large_patch16_224",
    "h": "vit_huge_patch14_224",
}


def from_folder(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections ``model`` and ``warm_start`` of a run that begins with the encoder of a folder.

    Raises StoredError, with everything that does not fit.
    """
    arrays = safetensors_reader.open_safetensors(folder)
    if not timm_names.unprefixed(arrays):
        patch = timm_names.PATCH.replace("/", ".")
        raise StoredError(
            f"{folder} holds no {patch}; expected a vision transformer under timm's names"
        )
    transformer = _model(arrays, folder)
    if transformer.problems:
        remedy = "set config.model yourself, and declare them by config.warm_start.skip and unused"
        lines = [f"{folder} is not a transformer that is here; {remedy}:"]
        lines += [f"  {problem}" for problem in transformer.problems]
        raise StoredError("\n".join(lines))
    start: dict[str, Any] = {"source": str(folder), "skip": ("^(objective|probe)/",)}
    if transformer.unused:
        start["unused"] = tuple(transformer.unused)
    return transformer.section, start


class Transformer(NamedTuple):
    """A folder's transformer, as a section ``model``."""

    section: dict[str, Any]
    unused: list[str]  # patterns of arrays that have no use
    problems: list[str]


def _model(arrays: Mapping[str, Stored], folder: str | os.PathLike[str]) -> Transformer:
    theirs = timm_names.unprefixed(arrays)
    ours = timm_names.as_ours(arrays, folder)
    width, _, *sides = theirs[timm_names.PATCH].shape
    settings = timm_names.about(folder, width)
    layers = {int(m[1]) for path in theirs if (m := re.match(r"blocks/(\d+)/", path))}
    section: dict[str, Any] = dict(
        embed=width,
        depth=len(layers),
        heads=settings.heads,
        patch=tuple(sides),
        mlp=timm_names.ACTIVATIONS[settings.activation],
        eps=settings.eps,
        norm="tokens",
        patch_norm=False,
        positions="learned",
        qk_norm=f"{timm_names.ENCODER}blocks/scale_q" in ours,
        n_registers=0,
        pool="patches" if settings.averages else "cls",
        layer_scale=1e-4 if f"{timm_names.ENCODER}blocks/scale_added_mlp" in ours else 0.0,
    )
    if "fc_norm/weight" in theirs:
        section |= dict(norm="pooled", pool="patches")
    registers = ours.get(f"{timm_names.ENCODER}embed_registers")
    if registers is not None:
        section["n_registers"] = registers.shape[0]
    if settings.averages and f"{timm_names.ENCODER}cls" not in ours:
        section["n_cls"] = 0
    positions = ours.get(f"{timm_names.ENCODER}pos")
    problems = _width_problems(ours, width)
    image = settings.image
    if image and any(n % side for n, side in zip(image, sides, strict=True)):
        problems.append(f"its image is {list(image)}, which patches of {sides} do not divide")
    elif image:
        section |= dict(n_frames=image[0], n_mels=image[1])
        grid = (image[0] // sides[0], image[1] // sides[1])
        problems += _grid_problems(grid, positions)
    elif positions is not None and positions.shape[0] % 8 == 0 and sides == [16, 16]:
        # as AudioMAE and Bird-MAE have it: 128 mels
        section |= dict(n_frames=16 * positions.shape[0] // 8, n_mels=128)
    if problems:
        return Transformer(section, [], problems)
    c = vit.Encoder(**{name: value for name, value in section.items() if name != "pool"})
    problems = [f"model.{name} {text}" for name, text in c.validate()]
    problems = problems or saved.misfits(c, ours)
    outside = [path for path in ours if not path.startswith(timm_names.ENCODER)]
    unused = [f"^{name}" for name in UNUSED if any(path.startswith(name) for path in outside)]
    for path in outside:
        if not path.startswith(UNUSED):
            name = path.replace("/", ".")
            problems.append(f"{name} {list(ours[path].shape)} has no place here")
    return Transformer(section, unused, problems)


def _width_problems(ours: Mapping[str, Stored], width: int) -> list[str]:
    w_up = ours.get(f"{timm_names.ENCODER}blocks/w_up")
    if not w_up or len(w_up.shape) != 3:
        return []
    ratio = w_up.shape[2] / width
    if ratio == vit.MLP_RATIO:
        return []
    return [f"mlp.fc1 is {ratio:g} times as wide as a token; expected {vit.MLP_RATIO} times"]


def _grid_problems(grid: tuple[int, int], positions: Stored | None) -> list[str]:
    rows, columns = grid
    if positions is None or positions.shape[0] == rows * columns:
        return []
    n_patches = positions.shape[0]
    return [f"pos_embed has {n_patches} patches, and config.json says a grid of {rows}x{columns}"]


def validate_start(c: vit.Encoder, rules: Any) -> Iterator[tuple[str, str]]:
    """Yield (field, text) if a run with ``rules`` of warm start would compute something else."""
    try:
        if "://" in rules.source or not safetensors_reader.is_safetensors(rules.source):
            return
        arrays = safetensors_reader.open_safetensors(rules.source)
        if not timm_names.unprefixed(arrays):
            return
        section = _model(arrays, rules.source).section
        image = timm_names.about(rules.source, section["embed"]).image
    except (StoredError, OSError):
        return  # the warm start itself reports the error
    for name in ("mlp", "eps", "norm", "heads"):
        value = getattr(c, name)
        if section[name] and value != section[name]:
            yield (
                name,
                f"is {value!r}, and {rules.source} has {section[name]!r}; set"
                f" config.model.{name}={section[name]}",
            )
    if not image or "n_frames" not in section or c.positions != "learned":
        return
    rows, columns = (n // side for n, side in zip(image, section["patch"], strict=True))
    patterns = (*rules.reshape, *rules.skip)
    is_declared = any(re.search(pattern, "encoder/pos") for pattern in patterns)
    if (rows, columns) != c.grid and not is_declared:
        theirs = f"{rows}x{columns}"
        ours = f"{c.grid[0]}x{c.grid[1]}"
        yield (
            "patch",
            f"cuts {c.n_frames} frames and {c.n_mels} mels into a grid of {ours}, and the"
            f" positions of {rules.source} are of {theirs}; resample them:"
            f" \"--config.warm_start.reshape={{'{GRID}': 'grid {theirs} to {ours}'}}\"",
        )


def run_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the config of a run that would have made a folder of others: model and spectrograms.

    These are of ``front_end.json`` in the folder, or Bird-MAE's for 512 frames and 128 mels. Raises
    StoredError as `from_folder`, and if they are not known.
    """
    model, _ = from_folder(folder)
    place = epath.Path(folder).expanduser()
    place = place if place.is_dir() else place.parent
    if "n_frames" not in model:
        raise StoredError(
            f'{folder}: config.json does not say the size of its image; write {{"img_size":'
            " [frames, mels]}"
        )
    n_frames, n_mels = model["n_frames"], model["n_mels"]
    data: dict[str, Any] = {}
    if (place / FRONT_END).exists():
        data = stored.read_object(place, FRONT_END)
    elif (n_frames, n_mels) != (512, 128):
        raise StoredError(
            f"{folder} reads {n_frames} frames of {n_mels} mels, and which spectrograms they are is"
            f" not known; write them to {FRONT_END} there, for example"
            ' {"sample_rate": 16000, "mean": -4.27, "std": 4.57, "clip_seconds": 10.0}'
        )
    try:
        of = front_end.saved({"n_mels": n_mels, **data})
    except ValueError as error:
        raise StoredError(f"{place / FRONT_END}: {error}") from error
    if of.n_mels != n_mels:
        raise StoredError(
            f"{place / FRONT_END}: n_mels is {of.n_mels}, and the weights read {n_mels}"
        )
    is_bird_mae = of == front_end.DEFAULT and n_frames == 512
    seconds = data.get("clip_seconds", 5.0 if is_bird_mae else None)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < 1e6:
        raise StoredError(
            f"{place / FRONT_END}: clip_seconds is {str(seconds)[:40]}; expected the seconds of a"
            " clip"
        )
    return {
        "workload": "jaxtrain.workloads.bird",
        "model": {**model, "dtype": "float32"},  # as its authors compute its features
        "data": {
            **dataclasses.asdict(of),
            "n_frames": n_frames,
            "clip_seconds": float(seconds),
            "short": "origin",
            "label": "",
        },
    }


EXAMPLE = '''\
"""The classes in a recording and their scores, or its features: python example.py bird.wav"""
import json, pathlib, sys
if len(sys.argv) != 2:
    print(f"usage: python {sys.argv[0]} RECORDING", file=sys.stderr); sys.exit(2)
import soundfile, timm, torch, torchaudio
from safetensors.torch import load_file
here = pathlib.Path(__file__).parent
config = json.loads((here / "config.json").read_text())
model = timm.create_model(
    config["architecture"], num_classes=config["num_classes"], **config["model_args"])
model.load_state_dict(load_file(here / "model.safetensors"))
model.eval()
for module in model.modules():
    if isinstance(module, torch.nn.LayerNorm):
        module.eps = config["norm_eps"]
of = config["spectrogram"]
wave, rate = soundfile.read(sys.argv[1], dtype="float32", always_2d=True)
x = torchaudio.functional.resample(torch.from_numpy(wave.mean(1)), rate, of["sample_rate"])
x = x[: of["samples"]]
x = torch.nn.functional.pad(x, (0, of["samples"] - len(x)))
x = torchaudio.compliance.kaldi.fbank(
    (x - x.mean())[None], htk_compat=True, use_energy=False, window_type="hanning", dither=0.0,
    num_mel_bins=of["n_mels"], sample_frequency=of["sample_rate"], frame_length=of["window_ms"],
    frame_shift=of["hop_ms"], low_freq=of["f_min"], high_freq=of["f_max"])
x = x[: of["n_frames"]]
x = torch.nn.functional.pad(x, (0, 0, 0, of["n_frames"] - len(x)), value=float(x.min()))
with torch.no_grad():
    x = ((x - of["mean"]) / (2 * of["std"]))[None, None]
    patches = model.forward_features(x)
    features = model.forward_head(patches, pre_logits=True)[0]
    logits = model.forward_head(patches)[0]
if not config["num_classes"]:
    print(*features.tolist())
else:
    scores = logits.softmax(0)
    names = config.get("label_names") or range(config["num_classes"])
    for k in scores.argsort(descending=True)[:5].tolist():
        print(f"{scores[k]:.4f}\\t{names[k]}")
'''


def files(config: Mapping[str, Any], dtype: str) -> dict[str, bytes]:
    """Return config.json as timm reads it, and example.py without JAX. Raises ValueError."""
    model = config["model"]
    data = config.get("data") or {}
    supervised = model.get("supervised") or {}
    n_classes = int(model.get("n_classes") or 0) if supervised.get("weight", 0) > 0 else 0
    fields = _config(model, data, n_classes)
    example = EXAMPLE
    if n_classes and supervised.get("loss", "softmax") != "softmax":
        example = EXAMPLE.replace("softmax(0)", "sigmoid()")
    return {
        "config.json": (json.dumps(fields, indent=2) + "\n").encode(),
        "example.py": example.encode(),
    }


def _config(model: Mapping[str, Any], data: Mapping[str, Any], n_classes: int) -> dict[str, Any]:
    """Return config.json of timm."""
    c = vit.from_saved(model)
    of = front_end.saved(data)
    pool: dict[str, Any] = {"global_pool": "avg" if model.get("pool") == "patches" else "token"}
    if not c.n_cls:
        pool["class_token"] = False
    arguments: dict[str, Any] = {
        "img_size": [c.n_frames, c.n_mels],
        "patch_size": list(c.patch),
        "in_chans": 1,
        "embed_dim": c.embed,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": vit.MLP_RATIO,
        "no_embed_class": True,
        "reg_tokens": c.n_registers,
        "qk_norm": c.qk_norm,
        "init_values": c.layer_scale or None,
        **pool,
        "fc_norm": timm_names.norm_of(model) == "fc_norm",
        "act_layer": "gelu" if c.mlp == "gelu_exact" else "gelu_tanh",
    }
    presets = [name for name, (width, _, _) in vit.PRESETS.items() if width == c.embed]
    preset = presets[0] if presets else "b"
    fields: dict[str, Any] = {
        "architecture": ARCHITECTURES[preset],  # its sizes are those of model_args
        "num_classes": n_classes,
        "num_features": c.embed,
        "model_args": arguments,
        "norm_eps": c.eps,
        "pretrained_cfg": {
            "input_size": [1, c.n_frames, c.n_mels],
            "fixed_input_size": True,
            "mean": [0.0],
            "std": [1.0],
            "num_classes": n_classes,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
        "spectrogram": {
            **dataclasses.asdict(of),
            "n_frames": c.n_frames,
            "samples": round(of.sample_rate * data.get("clip_seconds", 5.0)),
        },
    }
    names = list(model.get("class_names") or ())
    if n_classes and len(names) == n_classes:
        fields["label_names"] = names
    return fields


def hub(config: Mapping[str, Any], files: Collection[str]) -> Hub:
    """Return the model's part of the card of an export for timm."""
    return Hub("timm", export.task(config), export.METRICS, "$ python example.py bird.wav")


def _arrays(
    arrays: Mapping[str, Stored], folder: str | os.PathLike[str], ours: bool
) -> dict[str, Stored]:
    """Arrays by the paths of an encoder, and of an export by jaxtrain with its head."""
    renamed = timm_names.as_ours(arrays, folder)
    return timm_names.with_head(renamed) if ours else renamed


FORMAT = Format(rename=timm_names.as_timm, export=Export(files=files, hub=hub))
FOREIGN = Foreign(_arrays, run_config)
