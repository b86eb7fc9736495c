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
    "audio/w_gate": "audio_mlp.gate_proj.weight",
    "audio/w_up": "audio_mlp.up_proj.weight",
    "audio/w_down": "audio_mlp.down_proj.weight",
    "audio_attention/w_q": "audio_attn.q_proj.weight",
    "audio_attention/w_k": "audio_attn.k_proj.weight",
    "audio_attention/w_v": "audio_attn.v_proj.weight",
    "audio_attention/w_out": "audio_attn.o_proj.weight",
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
# Arrays whose released matrices have heads x dimensions, or codebooks x codes, as one axis.
_FOLDED = {"w_(q|k|v|out)$|^(embed|w_head)_audio$": "fold"}
# an encoder of waveforms, which this model does without
_WAVE_ENCODER = ("audio_tower", "audio_encoder_proj")
# fields of `Config` that decide shapes or the function, besides the decoder's
_FIELDS = ("vocab", "codebooks", "codebook_size", "average_codes", "audio_attention")
_FILES = ("config.json", "generation_config.json", "preprocessor_config.json")


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """Return the released weights' names of a parameter. ``config``: the saved ``model``."""
    return _NAMES.of(path, config["depth"])


def export_shape(config: Mapping[str, Any], path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return an exported shape: heads × dimensions are an axis, as are codebooks × codes."""
    if path in ("embed_audio", "w_head_audio"):
        n_codebooks, n_codes, width = shape
        return (n_codebooks * n_codes, width)
    name = path.rpartition("/")[2]
    return hugging_face.folded(name, shape)


def export_files(config: Mapping[str, Any], dtype: str) -> dict[str, bytes]:
    """Return the tokenizer of the whole run's ``config``, and config.json of its first weights."""
    source = files.expanded(config["warm_start"]["source"] or "?")
    run_tokenizer = config["data"].get("tokenizer")
    vocab = config["model"].get("vocab")
    contents, _ = hugging_face.tokenizer_files(
        (run_tokenizer,), source, vocab, tokenizer.read_files
    )
    contents |= hugging_face.read_files(source, _FILES)
    contents |= hugging_face.terms_files(source)
    if "config.json" in contents:
        fields = _release_fields(files.read_json(source / "config.json"))
        # Of a model of Hugging Face, not of our own export (with a run's config) or another's.
        if "model_type" in fields:
            text = json.dumps(fields, indent=2)
            contents["config.json"] = f"{text}\n".encode()
        else:
            del contents["config.json"]
    return contents


def _release_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json for weights under the release's names."""
    fields.pop("quantization_config", None)  # the arrays are numbers, not codes
    if not _is_of_transformers(fields):
        return fields
    return {
        "model_type": "higgs_audio",
        "text_config": {**fields, "model_type": "llama"},
        "audio_num_codebooks": fields["num_codebooks"],
        "audio_codebook_size": fields["codebook_size"] - N_SPECIAL,
    }


def export_hub(config: Mapping[str, Any], files: Collection[str]) -> Hub:
    """Return the card: with the tokenizer, an example that plays an audio sample."""
    metrics = ("text", "audio", "text_accuracy", "audio_accuracy_0")
    example = ""
    if "tokenizer.json" in files:
        example = "$ jaxtrain generate-audio . 'a dog' --codec codec.npz --out played"
    return Hub("jaxtrain", "text-to-audio", metrics, example)


EXPORT = Export(export_names, export_shape, export_files, export_hub, peft_task="CAUSAL_LM")


def from_hugging_face(folder: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections ``model`` and ``warm_start`` for a folder of config.json and safetensors.

    It is of Hugging Face, or of `jaxtrain export`. Raises HuggingFaceError.
    """
    exported = hugging_face.own_export(folder, __package__, _FIELDS)
    if exported:
        return exported, {"source": str(folder)}
    path = files.expanded(folder) / "config.json"
    with hugging_face.reading(path):
        fields = files.read_json(path)
        if _is_of_transformers(fields):
            arrays = safetensors_reader.open_safetensors(folder)
            return _read_transformers(fields, path, arrays)
        if missing := _missing_fields(fields):
            raise HuggingFaceError(
                f"{path} has no {', no '.join(missing)}; name a folder of Higgs Audio v2, or one"
                " of `jaxtrain export` with its jaxtrain.json"
            )
        arrays = safetensors_reader.open_safetensors(folder)
        model = _release_model(fields, path, arrays)
    unused = []
    for prefix in _WAVE_ENCODER:
        if any(name.startswith(f"{prefix}/") for name in arrays):
            unused.append(f"^{prefix}/")
    return model, {
        "source": str(folder),
        "renames": _renames(_NAMES, model),
        "reshape": _FOLDED,
        "unused": tuple(unused),
    }


def saved_model(folder: str) -> dict[str, Any]:
    """Return the section ``model`` that the weights of a folder were trained with, or {}."""
    if not (files.expanded(folder) / "config.json").is_file():
        return {}
    try:
        return from_hugging_face(folder)[0]
    except (HuggingFaceError, stored.StoredError):
        return {}  # as of another system that `config.warm_start.renames` describes


def _missing_fields(fields: Mapping[str, Any]) -> list[str]:
    """Return the fields that a config.json of the release lacks."""
    missing = []
    if not fields.keys() & {"text_config", "text"}:
        missing.append("text_config or text")
    for name in ("audio_num_codebooks", "audio_codebook_size"):
        if name not in fields:
            missing.append(name)
    return missing


def _release_model(
    fields: Mapping[str, Any], path: pathlib.Path, arrays: Collection[str]
) -> dict[str, Any]:
    """Return the section ``model`` of the release's folder, by its config.json and its arrays."""
    text = fields.get("text_config") or fields["text"]
    text_fields = {**text}
    if "head_dim" in fields:
        text_fields["head_dim"] = fields["head_dim"]
    decoder = hugging_face.decoder_fields(text_fields, path)
    return {
        **decoder,
        "vocab": text["vocab_size"],
        "codebooks": fields["audio_num_codebooks"],
        "codebook_size": fields["audio_codebook_size"],
        "tied": "audio_decoder_proj/text_lm_head/weight" not in arrays,
        "audio_attention": "layers/0/audio_attn/q_proj/weight" in arrays,
        "average_codes": bool(fields.get("audio_embed_avg", False)),
    }


def _renames(names: Names, model: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return config.warm_start.renames from names of arrays to the paths of a model's table."""
    c = Config(**{**model, "rope": Rope()})  # positions have no parameters
    return names.renames(make_specs(c))


def _is_of_transformers(fields: Mapping[str, Any]) -> bool:
    return fields.get("model_type") == "higgs_audio_v2" and "num_codebooks" in fields


def _read_transformers(
    fields: Mapping[str, Any], path: pathlib.Path, arrays: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`from_hugging_face` of a folder that transformers wrote. Raises HuggingFaceError."""
    size = fields["codebook_size"]
    expected_ids = {"audio_stream_bos_id": size - 2, "audio_stream_eos_id": size - 1}
    problems = []
    for name, expected in expected_ids.items():
        token_id = fields.get(name)
        if token_id != expected:
            problems.append(f"{name} is {token_id}; expected {expected}")
    if problems:
        raise HuggingFaceError(f"{path}: {'; '.join(problems)}, of {size} rows of a codebook")
    if "text_lm_head/weight" not in arrays:
        raise HuggingFaceError(
            f"{path.parent} has no text_lm_head.weight, without which no text is learned; take a"
            " folder with it"
        )
    defaults = {"head_dim": 128, "rms_norm_eps": 1e-5}
    decoder = hugging_face.decoder_fields({**defaults, **fields}, path)
    model = {
        **decoder,
        "vocab": fields["vocab_size"],
        "codebooks": fields["num_codebooks"],
        "codebook_size": size - N_SPECIAL,
        "tied": False,
        "audio_attention": False,
        "average_codes": False,
    }
    return model, {
        "source": str(path.parent),
        "renames": _renames(_OF_TRANSFORMERS, model),
        "reshape": _FOLDED,
    }
