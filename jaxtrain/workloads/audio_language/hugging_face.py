"""Higgs Audio v2 as it is released: published sizes, folders that a run begins with, and exports.

The released weights hold the same numbers in the same order under other names and shapes.
"""

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxtrain.arrays import safetensors_reader, stored
from jaxtrain.nn import hugging_face
from jaxtrain.nn.hugging_face import LAYER, HuggingFaceError, Names
from jaxtrain.nn.layers import Rope
from jaxtrain.types import Export, Hub
from jaxtrain.workloads.audio_language.model import N_SPECIAL, Config, make_specs
from loaders.io import files
from loaders.text import tokenizer

# Sizes as published.
PRESETS: dict[str, dict[str, Any]] = {
    "v2": dict(
        embed=3072,
        depth=28,
        heads=24,
        kv_heads=8,
        head_dim=128,
        mlp=8192,
        eps=1e-5,
        vocab=128256,
        codebooks=8,
        codebook_size=1024,
        rope=dict(theta=5e5, factor=32.0, low=1.0, high=4.0, original=8192),
    )
}
# Section `lora` of a run that adapts every matrix of both nets' layers, and nothing else.
ADAPTERS: dict[str, Any] = dict(
    rank=32,
    alpha=64.0,
    adapt=r"^blocks/(audio/|audio_attention/)?w_",
    freeze=r"^(embed|w_head)(_audio)?$|^scale$|/scale_[^/]*$",
    dtype="bfloat16",
)

_LAYER = {
    **LAYER,
    "audio/scale_attention": "audio_input_layernorm.weight",
    "audio/scale_mlp": "audio_post_attention_layernorm.weight",
    **{f"audio/{name}": f"audio_{LAYER[name]}" for name in ("w_gate", "w_up", "w_down")},
    **{f"audio_attention/w_{x}": f"audio_attn.{x[0]}_proj.weight" for x in ("q", "k", "v", "out")},
    "audio_attention/scale_after": "audio_post_audio_attn_layer_norm.weight",
}
_NAMES = Names(
    top={
        "embed": "embed_tokens.weight",
        "embed_audio": "audio_codebook_embeddings.weight",
        "scale": "norm.weight",
        "w_head": "audio_decoder_proj.text_lm_head.weight",
        "w_head_audio": "audio_decoder_proj.audio_lm_head.weight",
    },
    layer=_LAYER,
)
_OF_TRANSFORMERS = Names(  # of the same model in transformers, model_type higgs_audio_v2
    top={
        "embed": "model.embed_tokens.weight",
        "embed_audio": "model.embed_audio_tokens.embed_audio_tokens.weight",
        "scale": "model.norm.weight",
        "w_head": "text_lm_head.weight",
        "w_head_audio": "audio_lm_head.weight",
    },
    layer=_LAYER,
    prefix="model.layers",
)
# an encoder of waveforms, which this model does without
_ELSEWHERE = ("audio_tower", "audio_encoder_proj")
_CONFIG = ("text_config or text", "audio_num_codebooks", "audio_codebook_size")  # of config.json
_FILES = ("config.json", "generation_config.json", "preprocessor_config.json")


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """Return the released weights' names of a parameter. ``config``: the saved ``model``."""
    return _NAMES.of(path, config["depth"])


def export_shape(config: Mapping[str, Any], path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return an exported shape: heads × dimensions are an axis, as are codebooks × codes."""
    if path in ("embed_audio", "w_head_audio"):
        return (shape[0] * shape[1], shape[2])
    return hugging_face.folded(path.rpartition("/")[2], shape)


def export_files(config: Mapping[str, Any], dtype: str) -> dict[str, bytes]:
    """Return the tokenizer of the whole run's ``config``, and config.json of its first weights."""
    source = files.expanded(config["warm_start"]["source"] or "?")
    found, _ = hugging_face.tokenizer_files(
        (config["data"].get("tokenizer"),),
        source,
        config["model"].get("vocab"),
        tokenizer.read_files,
    )
    found |= hugging_face.read_files(source, _FILES) | hugging_face.terms_files(source)
    if "config.json" in found:
        about = files.read_json(source / "config.json")
        about.pop("quantization_config", None)  # the arrays are numbers, not codes
        if _is_of_transformers(about):  # under the release's names, it has the release's fields
            sizes = {
                "audio_num_codebooks": about["num_codebooks"],
                "audio_codebook_size": about["codebook_size"] - N_SPECIAL,
            }
            about = {
                "model_type": "higgs_audio",
                "text_config": {**about, "model_type": "llama"},
                **sizes,
            }
        found["config.json"] = (json.dumps(about, indent=2) + "\n").encode()
        # Of a model of Hugging Face, not of our own export (with a run's config) or another's.
        if "model_type" not in about:
            found.pop("config.json")
    return found


def export_hub(config: Mapping[str, Any], files: Collection[str]) -> Hub:
    """Return the card: with the tokenizer, an example that plays an audio sample."""
    metrics = ("text", "audio", "text_accuracy", "audio_accuracy_0")
    example = (
        "$ jaxtrain generate-audio . 'a dog' --codec codec.npz --out played"
        if "tokenizer.json" in files
        else ""
    )
    return Hub("jaxtrain", "text-to-audio", metrics, example)


EXPORT = Export(export_names, export_shape, export_files, export_hub, peft_task="CAUSAL_LM")


def from_hugging_face(folder: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections ``model`` and ``warm_start`` for a folder of config.json and safetensors.

    It is of Hugging Face, or of `jaxtrain export`. Raises HuggingFaceError.
    """
    own = ("vocab", "codebooks", "codebook_size", "average_codes", "audio_attention")
    if exported := hugging_face.own_export(folder, __package__, own):
        return exported, dict(source=str(folder))
    path = files.expanded(folder) / "config.json"
    with hugging_face.reading(path):
        h = files.read_json(path)
        if _is_of_transformers(h):
            return _read_transformers(h, path, safetensors_reader.open_safetensors(folder))
        if missing := [name for name in _CONFIG if not any(key in h for key in name.split(" or "))]:
            remedy = (
                "name a folder of Higgs Audio v2, or one of `jaxtrain export` with its"
                " jaxtrain.json"
            )
            raise HuggingFaceError(f"{path} has no {', no '.join(missing)}; {remedy}")
        text = h.get("text_config") or h["text"]
        head_dim = {"head_dim": h["head_dim"]} if "head_dim" in h else {}
        there = safetensors_reader.open_safetensors(folder)
        model = dict(
            hugging_face.decoder_fields({**text, **head_dim}, path),
            vocab=text["vocab_size"],
            codebooks=h["audio_num_codebooks"],
            codebook_size=h["audio_codebook_size"],
            tied="audio_decoder_proj/text_lm_head/weight" not in there,
            audio_attention="layers/0/audio_attn/q_proj/weight" in there,
            average_codes=bool(h.get("audio_embed_avg", False)),
        )
    table = make_specs(Config(**{**model, "rope": Rope()}))
    unused = tuple(
        f"^{prefix}/"
        for prefix in _ELSEWHERE
        if any(name.startswith(f"{prefix}/") for name in there)
    )
    reshape = {"w_(q|k|v|out)$|^(embed|w_head)_audio$": "fold"}
    return model, dict(
        source=str(folder), renames=_NAMES.renames(table), reshape=reshape, unused=unused
    )


def saved_model(folder: str) -> dict[str, Any]:
    """Return the section ``model`` that the weights of a folder were trained with, or {}."""
    if not (files.expanded(folder) / "config.json").is_file():
        return {}
    try:
        return from_hugging_face(folder)[0]
    except (HuggingFaceError, stored.StoredError):
        return {}  # as of another system that `config.warm_start.renames` describes


def _is_of_transformers(h: Mapping[str, Any]) -> bool:
    return h.get("model_type") == "higgs_audio_v2" and "num_codebooks" in h


def _read_transformers(
    h: Mapping[str, Any], path: pathlib.Path, there: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`from_hugging_face` of a folder that transformers wrote. Raises HuggingFaceError."""
    size = h["codebook_size"]
    ends = {"audio_stream_bos_id": size - 2, "audio_stream_eos_id": size - 1}
    if wrong := [
        f"{name} is {h.get(name)}; expected {value}"
        for name, value in ends.items()
        if h.get(name) != value
    ]:
        raise HuggingFaceError(f"{path}: {'; '.join(wrong)}, of {size} rows of a codebook")
    if "text_lm_head/weight" not in there:
        raise HuggingFaceError(
            f"{path.parent} has no text_lm_head.weight, without which no text is learned; take a"
            " folder with it"
        )
    model = dict(
        hugging_face.decoder_fields({"head_dim": 128, "rms_norm_eps": 1e-5, **h}, path),
        vocab=h["vocab_size"],
        codebooks=h["num_codebooks"],
        codebook_size=size - N_SPECIAL,
        tied=False,
        audio_attention=False,
        average_codes=False,
    )
    table = make_specs(Config(**{**model, "rope": Rope()}))
    reshape = {"w_(q|k|v|out)$|^(embed|w_head)_audio$": "fold"}
    return model, dict(
        source=str(path.parent), renames=_OF_TRANSFORMERS.renames(table), reshape=reshape
    )
