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
    plain = (model["norm"], model["activation"], model["positions"], model["bias"])
    kinds = {"mistral": model["window"], "qwen3": model["qk_norm"], "qwen2": model["qkv_bias"]}
    if plain != ("rms", "swiglu", "rope", False) or sum(map(bool, kinds.values())) > 1:
        return None
    return next((family for family, has in kinds.items() if has), "llama")


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """Hugging Face's names of this architecture, else paths with dots. ``config``: ``model``."""
    if _family(config) is not None:
        return _NAMES.of(path, config["depth"])
    name = path.removeprefix("blocks/")
    return (
        path.replace("/", ".")
        if name == path
        else [f"blocks.{i}.{name}" for i in range(config["depth"])]
    )


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
    model, family = config["model"], _family(config["model"])
    base = _folder(config["warm_start"]["source"])
    data = config["data"]
    plain = "bytes" if model.get("symbols") or data.get("text") == "bytes" else ""
    named = (model.get("tokenizer"), plain, data.get("tokenizer"))
    found, same = hugging_face.tokenizer_files(
        named, base, model.get("vocab"), tokenizer.read_files
    )
    found |= (
        hugging_face.read_files(base, (_GENERATION,)) | hugging_face.terms_files(base)
        if base
        else {}
    )
    if not same and _GENERATION in found:
        found[_GENERATION] = _json(hugging_face.without_ids(json.loads(found[_GENERATION])))
    if family is None:
        return found
    kept = (
        files.read_json(files.inside(base, "config.json"))
        if base and (base / "config.json").is_file()
        else {}
    )
    if kept.get("model_type") not in _FAMILIES:
        kept = {}
    kept = kept if same else hugging_face.without_ids(kept)
    for key in ("rope_parameters", "torch_dtype", "dtype", "quantization_config"):
        kept.pop(key, None)
    fields = kept | _hugging_face_fields(
        model, family, dtype, least_context=kept.get("max_position_embeddings", 0)
    )
    found |= _ends(model, fields, found)
    return {"config.json": _json(fields), **found}


def _json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2, sort_keys=True) + "\n").encode()


def _folder(place: Any) -> pathlib.Path | None:
    """Return the folder of a path in a config, which may be a file in it."""
    if not place:
        return None
    path = files.expanded(str(place))
    return path if path.is_dir() else path.parent


def _ends(
    model: Mapping[str, Any], fields: dict[str, Any], found: Mapping[str, bytes]
) -> dict[str, bytes]:
    """Write the tokens that end a text into ``fields`` of config.json; return files naming them."""
    ends, named = model.get("ends"), ""
    with contextlib.suppress(files.DataError):  # the run's tokenizer has moved, or cannot be read
        if model.get("tokenizer") not in (None, "", "bytes"):
            of = tokenizer.open_tokenizer(model["tokenizer"])
            ends = of.ends() if ends is None else ends
            named = of.specials.get(ends[0], "") if ends else ""
    generation = json.loads(found.get(_GENERATION, b"{}"))
    theirs = generation.get("eos_token_id", fields.get("eos_token_id"))
    more: dict[str, bytes] = {}
    if ends and not set(ends) <= set(theirs if isinstance(theirs, list) else [theirs]):
        theirs = ends[0] if len(ends) == 1 else list(ends)
        # some programs look there
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if named and name in found:
                more[name] = _json({**json.loads(found[name]), "eos_token": named})
    # Without them transformers takes the ids of Llama's first tokenizer.
    fields |= {"eos_token_id": theirs, "bos_token_id": fields.get("bos_token_id")}
    more |= (
        {_GENERATION: _json({**generation, "eos_token_id": theirs})} if theirs is not None else {}
    )
    if "tokenizer.json" in found and "tokenizer_config.json" not in found:
        # Else transformers makes the architecture's own kind of it, which splits texts otherwise.
        about = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **({"eos_token": named} if named else {}),
        }
        more["tokenizer_config.json"] = _json(about)
    return more


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
ids = model.generate(torch.tensor([[0]]), max_new_tokens=32)  # of tokens: the export has no tokenizer
print(ids[0].tolist())"""


def export_hub(config: Mapping[str, Any], files: Collection[str]) -> Hub:
    """Return the card: transformers loads its architectures, and the tokenizer if there is one."""
    metrics, model = ("perplexity", "bits_per_byte", "accuracy", "cross_entropy"), config["model"]
    with_text = "tokenizer.json" in files
    of_bytes = not model.get("symbols") and "bytes" in (
        model.get("tokenizer"),
        config["data"].get("tokenizer"),
    )
    if _family(model) is None:
        known = with_text or of_bytes or model.get("symbols") or model["vocab"] == 256
        example = "$ jaxtrain generate . 'One morning' --tokens 32" if known else ""
        return Hub("jaxtrain", "text-generation", metrics, example)
    example = _EXAMPLE if with_text else _BYTES_EXAMPLE if of_bytes else _TOKENS_EXAMPLE
    return Hub("transformers", "text-generation", metrics, example)


def tied(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the head if the embedding takes its place. ``config``: the saved ``model``."""
    return {_NAMES.top["w_head"]: _NAMES.top["embed"]} if config.get("tied") else {}


EXPORT = Export(
    export_names, export_shape, export_files, export_hub, tied=tied, peft_task="CAUSAL_LM"
)


def _hugging_face_fields(
    model: Mapping[str, Any], family: str, dtype: str, *, least_context: int
) -> dict[str, Any]:
    """Return a model section as fields of config.json."""
    rope = model["rope"]
    scaling = {
        "rope_type": "llama3",
        **{theirs: rope[ours] for ours, theirs in hugging_face.ROPE.items()},
    }
    return {
        **{theirs: model[ours] for ours, theirs in hugging_face.SIZES.items()},
        "architectures": [_FAMILIES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "num_key_value_heads": model["kv_heads"] or model["heads"],
        "head_dim": model["head_dim"] or model["embed"] // model["heads"],
        "max_position_embeddings": max(model["context"], least_context),
        "rope_theta": rope["theta"],
        "rope_scaling": scaling if rope["factor"] != 1 else None,
        "tie_word_embeddings": model["tied"],
        "vocab_size": model["vocab"],
        "initializer_range": model["init_std"],
        "torch_dtype": dtype,
        **({"attention_bias": False} if family != "qwen2" else {}),
        **({"mlp_bias": False} if family == "llama" else {}),
        **({"use_sliding_window": False} if family.startswith("qwen") else {}),
        **({"sliding_window": model["window"]} if family == "mistral" else {}),
    }


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Return the fields of the section ``model`` from a config.json of transformers 4 or 5.

    Raises:
      HuggingFaceError: an architecture, an activation, biases, rotary positions or a sliding window
      that this model lacks.
    """
    path = files.expanded(path)
    path = path / "config.json" if path.is_dir() else path
    with hugging_face.reading(path):
        return _read_fields(files.read_json(path), path)


def _read_fields(h: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    family, problems = h.get("model_type"), []
    if family == "gpt2":
        d = h["n_embd"]
        return dict(
            PRESETS["gpt2"],
            embed=d,
            depth=h["n_layer"],
            heads=h["n_head"],
            mlp=h.get("n_inner") or 4 * d,
            vocab=h["vocab_size"],
            context=h["n_positions"],
            eps=h["layer_norm_epsilon"],
        )
    if family not in _FAMILIES:
        known = checks.expected(family, (*_FAMILIES, "gpt2 (sizes alone)"))
        raise HuggingFaceError(f"{path}: model_type is {family!r}; {known}")
    if "quantization_config" in h:
        problems.append("quantization_config is set; take the weights that were not quantised")
    if h.get("use_sliding_window") or (family == "llama" and h.get("sliding_window")):
        problems.append("use_sliding_window is set; only attention to all of a document is read")
    if _FAMILIES[family] not in (made := h.get("architectures") or [_FAMILIES[family]]):
        problems.append(f"architectures is {made}; expected {_FAMILIES[family]}")
    h = {"rms_norm_eps": 1e-6, **_DEFAULTS[family], **h}
    return dict(
        hugging_face.decoder_fields(h, path, problems),
        vocab=h["vocab_size"],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        window=(h.get("sliding_window") or 0) if family == "mistral" else 0,
        tied=bool(h.get("tie_word_embeddings", False)),
        init_std=h.get("initializer_range", 0.02),
    )


def from_hugging_face(folder: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return sections ``model`` and ``warm_start`` for a folder of config.json and safetensors.

    It is of Hugging Face, or of `jaxtrain export`. Raises HuggingFaceError.
    """
    if own := hugging_face.own_export(folder, __package__, ("vocab",)):
        return own, dict(source=str(folder))
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
        there = safetensors_reader.open_safetensors(folder)
    except stored.StoredError as error:
        raise HuggingFaceError(str(error)) from error
    head, embed = (there.get(_NAMES.top[name].replace(".", "/")) for name in ("w_head", "embed"))
    where = f"{pathlib.Path(folder) / 'config.json'}: tie_word_embeddings is {str(tied).lower()}"
    if not tied and embed and not head:
        raise HuggingFaceError(
            f"{where}, and lm_head.weight is not in the folder; set it to true if the head is the"
            " embedding"
        )
    if tied and head and embed and not _equal(head, embed):
        raise HuggingFaceError(
            f"{where}, and lm_head.weight differs from model.embed_tokens.weight: transformers 4"
            " ties them, and 5 does not; set it to false, or remove lm_head.weight"
        )
    inverse = "rotary_emb/inv_freq$"  # which follows from the config; old folders have it
    kept = (
        r"^lm_head/weight$" if tied and head else "",
        inverse if any(re.search(inverse, path) for path in there) else "",
    )
    return tuple(filter(None, kept))


def _equal(a: stored.Stored, b: stored.Stored) -> bool:
    return a.shape == b.shape and all(np.array_equal(a.read(i), b.read(i)) for i in a.pieces())
