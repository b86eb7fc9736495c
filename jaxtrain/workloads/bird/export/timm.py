"""Bird encoders from timm's vision transformers (AudioMAE, Bird-MAE among them), and as one.

`from_folder` gives the sections of a config that begins with such a folder, `run_config` the config
of a run that would have made it, and `FORMAT` the files of `jaxtrain export --format timm`. The
renaming is in `jaxtrain.workloads.bird.export.timm_names`.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from etils import epath

from jaxtrain.arrays import safetensors_reader, stored
from jaxtrain.arrays.stored import Stored, StoredError
from jaxtrain.types import Export, Foreign, Format, Hub
from jaxtrain.workloads.bird import export, vit
from jaxtrain.workloads.bird.export import saved, timm_names
from loaders.audio import front_end

# arrays that the encoder of such a folder has no use for
LEFT = ("head/", "norm/", "decoder", "mask_token")
GRID = "^encoder/pos$"
# next to the weights of others: fields of the section data that say which spectrograms they read
FRONT_END = "front_end.json"


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
    model, unused, problems = _model(arrays, folder)
    if problems:
        remedy = "set config.model yourself, and declare them by config.warm_start.skip and unused"
        raise StoredError(
            "\n".join(
                [
                    f"{folder} is not a transformer that is here; {remedy}:",
                    *(f"  {p}" for p in problems),
                ]
            )
        )
    start = {"source": str(folder), "skip": ("^(objective|probe)/",)}
    return model, {**start, "unused": tuple(unused)} if unused else start


def _model(
    arrays: Mapping[str, Stored], folder: str | os.PathLike[str]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the section ``model``, patterns of arrays that have no use, and the problems."""
    there = timm_names.unprefixed(arrays)
    patch = there[timm_names.PATCH]
    ours = timm_names.as_ours(arrays, folder)
    width, _, *sides = patch.shape
    says = timm_names.about(folder, width)
    layers = {int(m[1]) for path in there if (m := re.match(r"blocks/(\d+)/", path))}
    problems = []
    inner = ours.get(f"{timm_names.ENCODER}blocks/w_up")
    ratio = inner.shape[2] / width if inner and len(inner.shape) == 3 else 4
    if ratio != vit.MLP_RATIO:
        problems.append(
            f"mlp.fc1 is {ratio:g} times as wide as a token; expected {vit.MLP_RATIO} times"
        )
    model: dict[str, Any] = dict(
        embed=width,
        depth=len(layers),
        heads=says.heads,
        patch=tuple(sides),
        mlp=timm_names.ACTIVATIONS[says.activation],
        eps=says.eps,
        norm="tokens",
        positions="learned",
        qk_norm=f"{timm_names.ENCODER}blocks/scale_q" in ours,
        n_registers=0,
        pool="patches" if says.averages else "cls",
        layer_scale=1e-4 if f"{timm_names.ENCODER}blocks/scale_added_mlp" in ours else 0.0,
    )
    if "fc_norm/weight" in there:
        model |= dict(norm="pooled", pool="patches")
    if (registers := ours.get(f"{timm_names.ENCODER}embed_registers")) is not None:
        model["n_registers"] = registers.shape[0]
    positions = ours.get(f"{timm_names.ENCODER}pos")
    image = says.image
    if image and any(n % side for n, side in zip(image, sides, strict=True)):
        problems.append(f"its image is {list(image)}, which patches of {sides} do not divide")
    elif image:
        grid = (image[0] // sides[0], image[1] // sides[1])
        model |= dict(n_frames=image[0], n_mels=image[1])
        if positions is not None and positions.shape[0] != grid[0] * grid[1]:
            problems.append(
                f"pos_embed has {positions.shape[0]} patches, and config.json says a grid of"
                f" {grid[0]}x{grid[1]}"
            )
    elif positions is not None and positions.shape[0] % 8 == 0 and sides == [16, 16]:
        # as AudioMAE and Bird-MAE have it: 128 mels
        model |= dict(n_frames=16 * positions.shape[0] // 8, n_mels=128)
    if problems:
        return model, [], problems
    c = vit.Encoder(**{name: value for name, value in model.items() if name != "pool"})
    wrong = [f"model.{name} {text}" for name, text in c.validate()]
    if not wrong:
        wrong += saved.misfits(c, ours)
    rest = [path for path in ours if not path.startswith(timm_names.ENCODER)]
    unused = [f"^{name}" for name in LEFT if any(path.startswith(name) for path in rest)]
    extra = [path for path in rest if not path.startswith(LEFT)]
    return (
        model,
        unused,
        [
            *wrong,
            *(
                f"{path.replace('/', '.')} {list(ours[path].shape)} has no place here"
                for path in extra
            ),
        ],
    )


def validate_start(c: vit.Encoder, rules: Any) -> Iterator[tuple[str, str]]:
    """Yield (field, text) if a run with ``rules`` of warm start would compute something else."""
    try:
        if "://" in rules.source or not safetensors_reader.is_safetensors(rules.source):
            return
        arrays = safetensors_reader.open_safetensors(rules.source)
        if not timm_names.unprefixed(arrays):
            return
        model, _, _ = _model(arrays, rules.source)
        says = timm_names.about(rules.source, model["embed"])
    except (StoredError, OSError):
        return  # the warm start itself reports the error
    expected = {name: model[name] for name in ("mlp", "eps", "norm", "heads") if model[name]}
    for name, value in expected.items():
        if getattr(c, name) != value:
            yield (
                name,
                (
                    f"is {getattr(c, name)!r}, and {rules.source} has {value!r}; set"
                    f" config.model.{name}={value}"
                ),
            )
    if not says.image or "n_frames" not in model or c.positions != "learned":
        return
    grid = tuple(n // side for n, side in zip(says.image, model["patch"], strict=True))
    declared = any(re.search(pattern, "encoder/pos") for pattern in (*rules.reshape, *rules.skip))
    if grid != c.grid and not declared:
        theirs = f"{grid[0]}x{grid[1]}"
        ours = f"{c.grid[0]}x{c.grid[1]}"
        yield (
            "patch",
            (
                f"cuts {c.n_frames} frames and {c.n_mels} mels into a grid of {ours}, and the"
                f" positions of {rules.source} are of {theirs}; resample them:"
                f" \"--config.warm_start.reshape={{'{GRID}': 'grid {theirs} to {ours}'}}\""
            ),
        )


def run_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the config of a run that would have made a folder of others: model and spectrograms.

    These are of ``front_end.json`` in the folder, or Bird-MAE's for 512 frames and 128 mels. Raises
    StoredError as `from_folder`, and if they are not known.
    """
    model, _ = from_folder(folder)
    place = epath.Path(folder).expanduser()
    place = place if place.is_dir() else place.parent
    size = (model.get("n_frames"), model.get("n_mels"))
    if None in size:
        raise StoredError(
            f'{folder}: config.json does not say the size of its image; write {{"img_size":'
            " [frames, mels]}"
        )
    data: dict[str, Any] = {}
    if (place / FRONT_END).exists():
        data = stored.read_object(place, FRONT_END)
    elif size != (512, 128):
        raise StoredError(
            f"{folder} reads {size[0]} frames of {size[1]} mels, and which spectrograms they are is"
            " not known; write them to "
            f'{FRONT_END} there, for example {{"sample_rate": 16000, "mean": -4.27, "std": 4.57,'
            ' "clip_seconds": 10.0}'
        )
    try:
        of = front_end.saved({"n_mels": size[1], **data})
    except ValueError as error:
        raise StoredError(f"{place / FRONT_END}: {error}") from error
    if of.n_mels != size[1]:
        raise StoredError(
            f"{place / FRONT_END}: n_mels is {of.n_mels}, and the weights read {size[1]}"
        )
    seconds = data.get("clip_seconds", 5.0 if of == front_end.DEFAULT and size[0] == 512 else None)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < 1e6:
        raise StoredError(
            f"{place / FRONT_END}: clip_seconds is {str(seconds)[:40]}; expected the seconds of a"
            " clip"
        )
    settings = {name: getattr(of, name) for name in front_end.FrontEnd.__dataclass_fields__}
    return {
        "workload": "jaxtrain.workloads.bird",
        "model": {**model, "dtype": "float32"},  # as its authors compute its features
        "data": {
            **settings,
            "n_frames": size[0],
            "clip_seconds": float(seconds),
            "short": "origin",
            "label": "",
        },
    }


EXAMPLE = '''"""The classes in a recording and their scores, or its features: python example.py bird.wav"""
import json, pathlib, sys
if len(sys.argv) != 2:
    print(f"usage: python {sys.argv[0]} RECORDING", file=sys.stderr); sys.exit(2)
import soundfile, timm, torch, torchaudio
from safetensors.torch import load_file
here = pathlib.Path(__file__).parent
config = json.loads((here / "config.json").read_text())
model = timm.create_model(config["architecture"], num_classes=config["num_classes"], **config["model_args"])
model.load_state_dict(load_file(here / "model.safetensors"))
model.eval()
for module in model.modules():
    if isinstance(module, torch.nn.LayerNorm):
        module.eps = config["norm_eps"]
of = config["spectrogram"]
wave, rate = soundfile.read(sys.argv[1], dtype="float32", always_2d=True)
x = torchaudio.functional.resample(torch.from_numpy(wave.mean(1)), rate, of["sample_rate"])[: of["samples"]]
x = torch.nn.functional.pad(x, (0, of["samples"] - len(x)))
x = torchaudio.compliance.kaldi.fbank(
    (x - x.mean())[None], htk_compat=True, use_energy=False, window_type="hanning", dither=0.0, num_mel_bins=of["n_mels"],
    sample_frequency=of["sample_rate"], frame_length=of["window_ms"], frame_shift=of["hop_ms"], low_freq=of["f_min"],
    high_freq=of["f_max"])[: of["n_frames"]]
x = torch.nn.functional.pad(x, (0, 0, 0, of["n_frames"] - len(x)), value=float(x.min()))
with torch.no_grad():
    x = ((x - of["mean"]) / (2 * of["std"]))[None, None]
    patches = model.forward_features(x)
    features, logits = model.forward_head(patches, pre_logits=True)[0], model.forward_head(patches)[0]
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
    model, data = config["model"], config.get("data") or {}
    c = vit.from_saved(model)
    of = front_end.saved(data)
    names = list(model.get("class_names") or ())
    heads = (
        "supervised" in model
        and (model["supervised"] or {}).get("weight", 0) > 0
        and model.get("n_classes")
    )
    n_classes = int(model["n_classes"]) if heads else 0
    patches = model.get("pool") == "patches"
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
        "global_pool": "avg" if patches else "token",
        "fc_norm": timm_names.norm_of(model) == "fc_norm",
        "act_layer": "gelu" if c.mlp == "gelu_exact" else "gelu_tanh",
    }
    size = next((name for name, (width, _, _) in vit.PRESETS.items() if width == c.embed), "b")
    architecture = {
        "ti": "vit_tiny",
        "s": "vit_small",
        "b": "vit_base",
        "l": "vit_large",
        "h": "vit_huge",
    }[size]
    fields: dict[str, Any] = {
        # its sizes are those of model_args
        "architecture": f"{architecture}_patch{14 if size == 'h' else 16}_224",
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
            **{name: getattr(of, name) for name in front_end.FrontEnd.__dataclass_fields__},
            "n_frames": c.n_frames,
            "samples": round(of.sample_rate * data.get("clip_seconds", 5.0)),
        },
    }
    if n_classes and len(names) == n_classes:
        fields["label_names"] = names
    several = n_classes and model["supervised"].get("loss", "softmax") != "softmax"
    example = EXAMPLE.replace("softmax(0)", "sigmoid()") if several else EXAMPLE
    return {
        "config.json": (json.dumps(fields, indent=2) + "\n").encode(),
        "example.py": example.encode(),
    }


def hub(config: Mapping[str, Any], files: Collection[str]) -> Hub:
    """Return the model's part of the card of an export for timm."""
    return Hub("timm", export.task(config), export.METRICS, "$ python example.py bird.wav")


def _arrays(
    arrays: Mapping[str, Stored], folder: str | os.PathLike[str], ours: bool
) -> dict[str, Stored]:
    """Arrays by the paths of an encoder, and of an export by jaxtrain with its head."""
    named = timm_names.as_ours(arrays, folder)
    return timm_names.with_head(named) if ours else named


FORMAT = Format(rename=timm_names.as_timm, export=Export(files=files, hub=hub))
FOREIGN = Foreign(_arrays, run_config)
