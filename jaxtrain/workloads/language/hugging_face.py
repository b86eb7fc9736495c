"""Llama, Mistral, Qwen2 and Qwen3 as Hugging Face has them: sizes, folders, and exports."""

import contextlib
import json
import pathlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxtrain.arrays import safetensors_reader, stored
from jaxtrain.nn import hugging_face
from jaxtrain.nn.hugging_face import LAYER, HuggingFaceError, Names
from jaxtrain.nn.layers import Rope
from jaxtrain.types import Export, Hub
from jaxtrain.workloads.language.model import Config, make_specs
from loaders.io import checks, files
from loaders.text import tokenizer

_LLAMA = dict(eps=1e-5, head_dim=128, vocab=128256)
_LLAMA_ROPE = dict(theta=5e5, low=1.0, high=4.0, original=8192)
_QWEN = dict(eps=1e-6, rope=dict(theta=1e6))
# Sizes as published in the models' config.json.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": dict(
        embed=768,
        depth=12,
        heads=12,
        mlp=3072,
        vocab=50257,
        context=1024,
        norm="layer",
        activation="gelu",
        positions="learned",
        qkv_bias=True,
        bias=True,
        tied=True,
    ),
    "llama-3.2-1b": dict(
        _LLAMA,
        embed=2048,
        depth=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        mlp=8192,
        tied=True,
        rope=dict(_LLAMA_ROPE, factor=32.0),
    ),
    "llama-3.2-3b": dict(
        _LLAMA,
        embed=3072,
        depth=28,
        heads=24,
        kv_heads=8,
        mlp=8192,
        tied=True,
        rope=dict(_LLAMA_ROPE, factor=32.0),
    ),
    "llama-3.1-8b": dict(
        _LLAMA,
        embed=4096,
        depth=32,
        heads=32,
        kv_heads=8,
        mlp=14336,
        rope=dict(_LLAMA_ROPE, factor=8.0),
    ),
    "llama-3.1-70b": dict(
        _LLAMA,
        embed=8192,
        depth=80,
        heads=64,
        kv_heads=8,
        mlp=28672,
        rope=dict(_LLAMA_ROPE, factor=8.0),
    ),
    "qwen2.5-0.5b": dict(
        _QWEN,
        embed=896,
        depth=24,
        heads=14,
        kv_heads=2,
        mlp=4864,
        vocab=151936,
        qkv_bias=True,
        tied=True,
    ),
    "qwen2.5-1.5b": dict(
        _QWEN,
        embed=1536,
        depth=28,
        heads=12,
        kv_heads=2,
        mlp=8960,
        vocab=151936,
        qkv_bias=True,
        tied=True,
    ),
    "qwen2.5-7b": dict(
        _QWEN, embed=3584, depth=28, heads=28, kv_heads=4, mlp=18944, vocab=152064, qkv_bias=True
    ),
    "qwen3-0.6b": dict(
        _QWEN,
        embed=1024,
        depth=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        mlp=3072,
        vocab=151936,
        qk_norm=True,
        tied=True,
    ),
    "qwen3-1.7b": dict(
        _QWEN,
        embed=2048,
        depth=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        mlp=6144,
        vocab=151936,
        qk_norm=True,
        tied=True,
    ),
    "qwen3-8b": dict(
        _QWEN,
        embed=4096,
        depth=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        mlp=12288,
        vocab=151936,
        qk_norm=True,
    ),
}
_NAMES = Names(
    {
        "embed": "model.embed_tokens.weight",
        "scale": "model.norm.weight",
        "w_head": "lm_head.weight",
    },
    LAYER,
    "model.layers",
)
_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# Values that transformers takes for fields that config.json omits, unless they are Llama's.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
_GENERATION = "generation_config.json"


def _family(model: Mapping[str, Any]) -> str | None:
    """Return the Hugging Face model_type of a model section, or None."""
    parts = (model["norm"], model["activation"], model["positions"], model["bias"])
    features = {"mistral": model["window"], "qwen3": model["qk_norm"], "qwen2": model["qkv_bias"]}
    families = [family for family, has_feature in features.items() if has_feature]
    if parts != ("rms", "swiglu", "rope", False) or len(families) > 1:
        return None
    return families[0] if families else "llama"


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """Hugging Face's names of this architecture, else paths with dots. ``config``: ``model``."""
    if _family(config) is not None:
        return _NAMES.of(path, config["depth"])
    name = path.removeprefix("blocks/")
    if name == path:
        return path.replace("/", ".")
    return [f"blocks.{i}.{name}" for i in range(config["depth"])]


def export_shape(config: Mapping[str, Any], path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of an exported array: heads and their dimensions are one axis there."""
    if _family(config) is None:
        return shape
    return hugging_face.folded(path.rpartition("/")[2], shape)


def export_files(config: Mapping[str, Any], dtype: str) -> dict[str, bytes]:
    """Return config.json, and the tokenizer's files if the run knows them.

    ``config`` is the whole run's, ``dtype`` the arrays'. Fields of the config.json of
    config.warm_start.source beyond the architecture (token ids, for one) are kept.
    """
    model, data = config["model"], config["data"]
    base = _folder(config["warm_start"]["source"])
    is_bytes = model.get("symbols") or data.get("text") == "bytes"
    tokenizers = (model.get("tokenizer"), "bytes" if is_bytes else "", data.get("tokenizer"))
    contents, has_base_ids = hugging_face.tokenizer_files(
        tokenizers, base, model.get("vocab"), tokenizer.read_files
    )
    if base:
        contents |= hugging_face.read_files(base, (_GENERATION,))
        contents |= hugging_face.terms_files(base)
    if not has_base_ids and _GENERATION in contents:
        generation = json.loads(contents[_GENERATION])
        contents[_GENERATION] = _json(hugging_face.without_ids(generation))
    family = _family(model)
    if family is None:
        return contents
    fields = _base_fields(base)
    if not has_base_ids:
        fields = hugging_face.without_ids(fields)
    least_context = fields.get("max_position_embeddings", 0)
    fields |= _hugging_face_fields(model, family, dtype, least_context=least_context)
    contents |= _ends(model, fields, contents)
    return {"config.json": _json(fields), **contents}


def _base_fields(base: pathlib.Path | None) -> dict[str, Any]:
    """Return the fields of the base weights' config.json beyond the architecture."""
    if not base or not (base / "config.json").is_file():
        return {}
    fields: dict[str, Any] = files.read_json(files.inside(base, "config.json"))
    if fields.get("model_type") not in _FAMILIES:
        return {}
    for name in ("rope_parameters", "torch_dtype", "dtype", "quantization_config"):
        fields.pop(name, None)
    return fields


def _json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2, sort_keys=True) + "\n").encode()


def _folder(place: Any) -> pathlib.Path | None:
    """Return the folder of a path in a config, which may be a file in it."""
    if not place:
        return None
    path = files.expanded(str(place))
    return path if path.is_dir() else path.parent


def _ends(
    model: Mapping[str, Any], fields: dict[str, Any], contents: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Write the tokens that end a text into ``fields`` of config.json; return files naming them."""
    end_ids, end_token = _end_tokens(model)
    generation = json.loads(contents.get(_GENERATION, b"{}"))
    base_end = generation.get("eos_token_id", fields.get("eos_token_id"))
    base_ids = base_end if isinstance(base_end, list) else [base_end]
    end, changed = base_end, {}
    if end_ids and not set(end_ids) <= set(base_ids):
        end = end_ids[0] if len(end_ids) == 1 else list(end_ids)
        # some programs look there
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if end_token and name in contents:
                changed[name] = _json({**json.loads(contents[name]), "eos_token": end_token})
    # Without them transformers takes the ids of Llama's first tokenizer.
    fields |= {"eos_token_id": end, "bos_token_id": fields.get("bos_token_id")}
    if end is not None:
        changed[_GENERATION] = _json({**generation, "eos_token_id": end})
    if "tokenizer.json" in contents and "tokenizer_config.json" not in contents:
        # Else transformers makes the architecture's own kind of it, which splits texts otherwise.
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if end_token:
            tokenizer_config["eos_token"] = end_token
        changed["tokenizer_config.json"] = _json(tokenizer_config)
    return changed


def _end_tokens(model: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the ids of the tokens that end a text, and the first one's name, "" if unknown."""
    end_ids, end_token = model.get("ends"), ""
    with contextlib.suppress(files.DataError):  # the run's tokenizer has moved, or cannot be read
        if model.get("tokenizer") not in (None, "", "bytes"):
            opened = tokenizer.open_tokenizer(model["tokenizer"])
            if end_ids is None:
                end_ids = opened.ends()
            if end_ids:
                end_token = opened.specials.get(end_ids[0], "")
    return end_ids, end_token


_EXAMPLE = """from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained("."), AutoTokenizer.from_pretrained(".")
ids = model.generate(**tokenizer("One morning", return_tensors="pt"), max_new_tokens=32)
print(tokenizer.decode(ids[0]))"""


# Of a run whose texts were bytes, and of one that knows no tokenizer.
_BYTES_EXAMPLE = """import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(".")
ids = model.generate(torch.tensor([list(b"One morning")]), max_new_tokens=32)  # a token is a byte
print(bytes(i for i in ids[0].tolist() if i < 256).decode(errors="replace"))"""
_TOKENS_EXAMPLE = """import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(".")
ids = model.generate(torch.tensor([[0]]), max_new_tokens=32)  # of tokens: \
the export has no tokenizer
print(ids[0].tolist())"""


def export_hub(config: Mapping[str, Any], files: Collection[str]) -> Hub:
    """Return the card: transformers loads its architectures, and the tokenizer if there is one."""
    metrics = ("perplexity", "bits_per_byte", "accuracy", "cross_entropy")
    model = config["model"]
    has_tokenizer = "tokenizer.json" in files
    tokenizers = (model.get("tokenizer"), config["data"].get("tokenizer"))
    is_bytes = not model.get("symbols") and "bytes" in tokenizers
    if _family(model) is None:
        reads_text = has_tokenizer or is_bytes or model.get("symbols") or model["vocab"] == 256
        example = "$ jaxtrain generate . 'One morning' --tokens 32" if reads_text else ""
        return Hub("jaxtrain", "text-generation", metrics, example)
    if has_tokenizer:
        example = _EXAMPLE
    else:
        example = _BYTES_EXAMPLE if is_bytes else _TOKENS_EXAMPLE
    return Hub("transformers", "text-generation", metrics, example)


def tied(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the head if the embedding takes its place. ``config``: the saved ``model``."""
    if not config.get("tied"):
        return {}
    return {_NAMES.top["w_head"]: _NAMES.top["embed"]}


EXPORT = Export(
    export_names, export_shape, export_files, export_hub, tied=tied, peft_task="CAUSAL_LM"
)


def _hugging_face_fields(
    model: Mapping[str, Any], family: str, dtype: str, *, least_context: int
) -> dict[str, Any]:
    """Return a model section as fields of config.json."""
    rope, scaling = model["rope"], None
    if rope["factor"] != 1:
        scaling = {"rope_type": "llama3"}
        scaling |= {theirs: rope[ours] for ours, theirs in hugging_face.ROPE.items()}
    fields: dict[str, Any] = {theirs: model[ours] for ours, theirs in hugging_face.SIZES.items()}
    fields |= {
        "architectures": [_FAMILIES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "num_key_value_heads": model["kv_heads"] or model["heads"],
        "head_dim": model["head_dim"] or model["embed"] // model["heads"],
        "max_position_embeddings": max(model["context"], least_context),
        "rope_theta": rope["theta"],
        "rope_scaling": scaling,
        "tie_word_embeddings": model["tied"],
        "vocab_size": model["vocab"],
        "initializer_range": model["init_std"],
        "torch_dtype": dtype,
    }
    if family != "qwen2":
        fields["attention_bias"] = False
    if family == "llama":
        fields["mlp_bias"] = False
    if family.startswith("qwen"):
        fields["use_sliding_window"] = False
    if family == "mistral":
        fields["sliding_window"] = model["window"]
    return fields


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Return the fields of the section ``model`` from a config.json of transformers 4 or 5.

    Raises:
      HuggingFaceError: an architecture, an activation, biases, rotary positions or a sliding window
      that this model lacks.
    """
    path = files.expanded(path)
    if path.is_dir():
        path = path / "config.json"
    with hugging_face.reading(path):
        fields = files.read_json(path)
        if fields.get("model_type") == "gpt2":
            return _read_gpt2(fields)
        return _read_fields(fields, path)


def saved_model(folder: str) -> dict[str, Any]:
    """Return the section ``model`` that the weights of a folder were trained with, or {}."""
    if not (files.expanded(folder) / "config.json").is_file():
        return {}
    try:
        return read_config(folder)
    except HuggingFaceError:
        return {}  # as of another system that `config.warm_start.renames` describes


def _read_gpt2(h: Mapping[str, Any]) -> dict[str, Any]:
    return dict(
        PRESETS["gpt2"],
        embed=h["n_embd"],
        depth=h["n_layer"],
        heads=h["n_head"],
        mlp=h.get("n_inner") or 4 * h["n_embd"],
        vocab=h["vocab_size"],
        context=h["n_positions"],
        eps=h["layer_norm_epsilon"],
    )


def _read_fields(h: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    family = h.get("model_type")
    if family not in _FAMILIES:
        expected = checks.expected(family, (*_FAMILIES, "gpt2 (sizes alone)"))
        raise HuggingFaceError(f"{path}: model_type is {family!r}; {expected}")
    problems = []
    if "quantization_config" in h:
        problems.append("quantization_config is set; take the weights that were not quantised")
    if h.get("use_sliding_window") or (family == "llama" and h.get("sliding_window")):
        problems.append("use_sliding_window is set; only attention to all of a document is read")
    architectures = h.get("architectures") or [_FAMILIES[family]]
    if _FAMILIES[family] not in architectures:
        problems.append(f"architectures is {architectures}; expected {_FAMILIES[family]}")
    h = {"rms_norm_eps": 1e-6, **_DEFAULTS[family], **h}
    window = h.get("sliding_window") or 0
    return dict(
        hugging_face.decoder_fields(h, path, problems),
        vocab=h["vocab_size"],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        window=window if family == "mistral" else 0,
        tied=bool(h.get("tie_word_embeddings", False)),
        init_std=h.get("initializer_range", 0.02),
    )


def from_hugging_face(folder: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections ``model`` and ``warm_start`` for a folder of config.json and safetensors.

    It is of Hugging Face, or of `jaxtrain export`. Raises HuggingFaceError.
    """
    if export_model := hugging_face.own_export(folder, __package__, ("vocab",)):
        return export_model, dict(source=str(folder))
    model = read_config(folder)
    if model.get("positions") == "learned":
        raise HuggingFaceError(
            f"{folder}: the arrays of gpt2 are kept differently; only its sizes are read"
        )
    table = make_specs(Config(**{**model, "rope": Rope()}))
    reshape = {"^blocks/(w_q|w_k|w_v|w_out|b_)": "fold"}
    unused = _unused(folder, model["tied"])
    return model, dict(
        source=str(folder), renames=_NAMES.renames(table), reshape=reshape, unused=unused
    )


def _unused(folder: str | pathlib.Path, tied: bool) -> tuple[str, ...]:
    """config.warm_start.unused: what transformers does not read either. Raises HuggingFaceError."""
    try:
        arrays = safetensors_reader.open_safetensors(folder)
    except stored.StoredError as error:
        raise HuggingFaceError(str(error)) from error
    head = arrays.get(_NAMES.top["w_head"].replace(".", "/"))
    embed = arrays.get(_NAMES.top["embed"].replace(".", "/"))
    setting = f"{pathlib.Path(folder) / 'config.json'}: tie_word_embeddings is {str(tied).lower()}"
    if not tied and embed and not head:
        raise HuggingFaceError(
            f"{setting}, and lm_head.weight is not in the folder; set it to true if the head is the"
            " embedding"
        )
    if tied and head and embed and not _equal(head, embed):
        raise HuggingFaceError(
            f"{setting}, and lm_head.weight differs from model.embed_tokens.weight: transformers 4"
            " ties them, and 5 does not; set it to false, or remove lm_head.weight"
        )
    patterns = []
    if tied and head:
        patterns.append(r"^lm_head/weight$")
    frequencies = "rotary_emb/inv_freq$"  # which follow from the config; old folders have them
    if any(re.search(frequencies, path) for path in arrays):
        patterns.append(frequencies)
    return tuple(patterns)


def _equal(a: stored.Stored, b: stored.Stored) -> bool:
    return a.shape == b.shape and all(np.array_equal(a.read(i), b.read(i)) for i in a.pieces())
