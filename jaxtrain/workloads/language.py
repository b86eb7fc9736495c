"""A decoder-only language model: next-token prediction on packed rows of documents.

A row of a batch is S tokens of one or several documents. Its fields, all [B, S]:

    tokens     int32    what is read
    targets    int32    the token after each; any value where ``mask`` is 0
    positions  int32    places within the document
    segments   int32    documents, numbered from 1 in a row; 0 is padding. Nothing is seen across them
    mask       float32  1 where the target counts: not in padding, not at a document's last token

The architecture is `jaxtrain.nn.transformer.Decoder`; `PRESETS` has published sizes, `from_hugging_face` reads a folder with
config.json and safetensors, and `export_names`, `export_shape` and `export_files` let tools/orbax_to_safetensors.py write one.

Shapes: B batch, S tokens, D embed, V vocabulary.
"""

import json
import math
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxtrain.config import Config as RunConfig
from jaxtrain.nn import transformer
from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.types import Array, Batch, Key, LossOut, Mean, PyTree, Shard, Task, Variables


@dataclass(frozen=True)
class Config(transformer.Decoder):
    """Tokens in, tokens out."""

    vocab: int | None = None  # [tokens] known to the model; None = as the data have
    bytes_per_token: float | None = None  # [bytes] of text behind a token, for bits per byte; None = as the data have
    z_loss: float = 0.0  # [1] times the square of the softmax's log normaliser, added to the loss; 0 = none
    chunk: int = 1024  # [tokens] of each device whose logits are there at the same time

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        if self.chunk < 1:
            yield "chunk", f"is {self.chunk}; it must be at least 1"
        if self.z_loss < 0:
            yield "z_loss", f"is {self.z_loss}; it must not be negative"

    def data_problems(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("vocab", "context"):
            value, needed = getattr(self, name), facts.get(name)
            if value is None:
                yield name, "is None, and the data do not say it; set it"
            elif needed is not None and value < needed:
                yield name, f"is {value}, and the data need {needed}"


_LLAMA = dict(eps=1e-5, head_dim=128, vocab=128256)
_LLAMA_ROPE = dict(theta=5e5, low=1.0, high=4.0, original=8192)
_QWEN = dict(eps=1e-6, rope=dict(theta=1e6))
# Sizes as published in the models' config.json.
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": dict(
        embed=768, depth=12, heads=12, mlp=3072, vocab=50257, context=1024, norm="layer", activation="gelu",
        positions="learned", qkv_bias=True, bias=True, tied=True,
    ),
    "llama-3.2-1b": dict(
        _LLAMA, embed=2048, depth=16, heads=32, kv_heads=8, head_dim=64, mlp=8192, tied=True,
        rope=dict(_LLAMA_ROPE, factor=32.0),
    ),
    "llama-3.2-3b": dict(
        _LLAMA, embed=3072, depth=28, heads=24, kv_heads=8, mlp=8192, tied=True, rope=dict(_LLAMA_ROPE, factor=32.0)
    ),
    "llama-3.1-8b": dict(_LLAMA, embed=4096, depth=32, heads=32, kv_heads=8, mlp=14336, rope=dict(_LLAMA_ROPE, factor=8.0)),
    "llama-3.1-70b": dict(_LLAMA, embed=8192, depth=80, heads=64, kv_heads=8, mlp=28672, rope=dict(_LLAMA_ROPE, factor=8.0)),
    "qwen2.5-0.5b": dict(
        _QWEN, embed=896, depth=24, heads=14, kv_heads=2, mlp=4864, vocab=151936, qkv_bias=True, tied=True
    ),
    "qwen2.5-1.5b": dict(
        _QWEN, embed=1536, depth=28, heads=12, kv_heads=2, mlp=8960, vocab=151936, qkv_bias=True, tied=True
    ),
    "qwen2.5-7b": dict(_QWEN, embed=3584, depth=28, heads=28, kv_heads=4, mlp=18944, vocab=152064, qkv_bias=True),
    "qwen3-0.6b": dict(
        _QWEN, embed=1024, depth=28, heads=16, kv_heads=8, head_dim=128, mlp=3072, vocab=151936, qk_norm=True, tied=True
    ),
    "qwen3-1.7b": dict(
        _QWEN, embed=2048, depth=28, heads=16, kv_heads=8, head_dim=128, mlp=6144, vocab=151936, qk_norm=True, tied=True
    ),
    "qwen3-8b": dict(_QWEN, embed=4096, depth=36, heads=32, kv_heads=8, head_dim=128, mlp=12288, vocab=151936, qk_norm=True),
}  # fmt: skip


def make_specs(c: Config) -> PyTree:
    return transformer.decoder_specs(c, c.vocab)


def logits(c: Config, params: PyTree, batch: Batch, shard: Shard) -> Array:
    """[B, S, V] float32, whole: for tests and short prompts."""
    x_bsd = transformer.decode(c, params, batch["tokens"], batch["positions"], batch.get("segments"), shard)
    w_vd = transformer.head(c, params).astype(x_bsd.dtype)
    return jnp.einsum("bsd,vd->bsv", x_bsd, w_vd, preferred_element_type=jnp.float32)


def make_task(config: RunConfig, shard: Shard, batch: int) -> Task:
    c: Config = config.model
    specs = make_specs(c)

    def measure(params: PyTree, batch: Batch) -> tuple[Mean, dict[str, Mean]]:
        x_bsd = transformer.decode(c, params, batch["tokens"], batch["positions"], batch["segments"], shard)
        mask_bs = batch["mask"].astype(jnp.float32)
        w_vd = transformer.head(c, params)
        sums = cross_entropy(x_bsd, w_vd, batch["targets"], mask_bs, shard, z_loss=c.z_loss, chunk=c.chunk)
        n = mask_bs.sum()
        found = {"cross_entropy": Mean(sums.cross_entropy, n), "accuracy": Mean(sums.correct, n)}
        if c.z_loss:
            found["z_loss"] = Mean(c.z_loss * sums.z, n)
        return Mean(sums.loss, n), found

    def loss(variables: Variables, batch: Batch, key: Key) -> LossOut:
        del key  # nothing is random
        total, found = measure(variables.params, batch)
        found["tokens"] = Mean(total.weight, jnp.float32(batch["row"].shape[0]))  # that count, in a row
        return LossOut(total, found)

    def evaluate(variables: Variables, batch: Batch) -> dict[str, Mean]:
        _, found = measure(variables.params, batch)
        return found

    return Task(
        specs=Variables(specs),
        loss=loss,
        evaluate=evaluate,
        axes={name: ("batch", "seq") for name in ("tokens", "targets", "positions", "segments", "mask")},
        flops=3 * batch * forward_flops(c, causal=True),
    )


def forward_flops(c: Config, *, causal: bool) -> int:
    """Of one full row, forward; the backward pass costs twice as much. With attention to all places, or to those not masked."""
    return c.context * transformer.token_flops(c, make_specs(c)) + transformer.attention_flops(c, c.context, causal=causal)


# Hugging Face: Llama, Qwen2 and Qwen3. Theirs and ours hold the same numbers in the same order; only names and shapes differ.

_LAYER = {
    "scale_attention": "input_layernorm.weight",
    "w_q": "self_attn.q_proj.weight",
    "w_k": "self_attn.k_proj.weight",
    "w_v": "self_attn.v_proj.weight",
    "b_q": "self_attn.q_proj.bias",
    "b_k": "self_attn.k_proj.bias",
    "b_v": "self_attn.v_proj.bias",
    "scale_q": "self_attn.q_norm.weight",
    "scale_k": "self_attn.k_norm.weight",
    "w_out": "self_attn.o_proj.weight",
    "scale_mlp": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
}
_TOP = {"embed": "model.embed_tokens.weight", "scale": "model.norm.weight", "w_head": "lm_head.weight"}
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
              "generation_config.json")  # fmt: skip


class HuggingFaceError(ValueError):
    """A config.json that this model cannot be."""


def _family(model: Mapping[str, Any]) -> str | None:
    """The architecture of Hugging Face that a model section is; None where there is none."""
    plain = (model["norm"], model["activation"], model["positions"], model["bias"], model["window"])
    if plain != ("rms", "swiglu", "rope", False, 0) or (model["qk_norm"] and model["qkv_bias"]):
        return None
    return "qwen3" if model["qk_norm"] else "qwen2" if model["qkv_bias"] else "llama"


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """Hugging Face's names where it has this architecture, else paths with dots. ``config`` is this section as it was saved."""
    stack, _, name = path.rpartition("blocks/")
    if _family(config) is None:
        return [f"blocks.{i}.{name}" for i in range(config["depth"])] if path != name else path.replace("/", ".")
    return [f"model.layers.{i}.{_LAYER[name]}" for i in range(config["depth"])] if path != name else _TOP[path]


def export_shape(config: Mapping[str, Any], path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of one exported array: heads and their dimensions are one axis at Hugging Face."""
    if _family(config) is None:
        return shape
    name = path.rpartition("/")[2]
    if name in ("w_q", "w_k", "w_v", "b_q", "b_k", "b_v"):
        return (shape[0] * shape[1], *shape[2:])
    return (shape[0], shape[1] * shape[2]) if name == "w_out" else shape


def export_files(config: Mapping[str, Any], dtype: str) -> dict[str, bytes]:
    """config.json, and the tokenizer's files where the run knows them. ``config`` is the whole run's, ``dtype`` the arrays'.

    What the config.json of config.warm_start.source says beyond the architecture (token ids, for one) is kept.
    """
    model, family = config["model"], _family(config["model"])
    if family is None:
        return {}
    places = [config["warm_start"]["source"], *(v for k, v in config["data"].items() if k in ("tokenizer", "path") and v)]
    folders = [p if p.is_dir() else p.parent for p in (pathlib.Path(str(place)).expanduser() for place in places if place)]
    files = {
        name: (folder / name).read_bytes() for folder in reversed(folders) for name in _TOKENIZER if (folder / name).is_file()
    }
    source = next((folder / "config.json" for folder in folders[:1] if (folder / "config.json").is_file()), None)
    kept = json.loads(source.read_text()) if source else {}
    kept = kept if kept.get("model_type") in _FAMILIES else {}
    for key in ("rope_parameters", "torch_dtype", "dtype"):
        kept.pop(key, None)
    rope = model["rope"]
    scaling = None
    if rope["factor"] != 1:
        scaling = {
            "rope_type": "llama3",
            "factor": rope["factor"],
            "low_freq_factor": rope["low"],
            "high_freq_factor": rope["high"],
            "original_max_position_embeddings": rope["original"],
        }
    kept |= {
        "architectures": [_FAMILIES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": model["embed"],
        "intermediate_size": model["mlp"],
        "num_hidden_layers": model["depth"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"] or model["heads"],
        "head_dim": model["head_dim"] or model["embed"] // model["heads"],
        "max_position_embeddings": max(model["context"], kept.get("max_position_embeddings", 0)),
        "rms_norm_eps": model["eps"],
        "rope_theta": rope["theta"],
        "rope_scaling": scaling,
        "tie_word_embeddings": model["tied"],
        "vocab_size": model["vocab"],
        "initializer_range": model["init_std"],
        "torch_dtype": dtype,
        **({"attention_bias": False} if family != "qwen2" else {}),
        **({"mlp_bias": False} if family == "llama" else {}),
        **({"use_sliding_window": False} if family != "llama" else {}),
    }
    return {"config.json": (json.dumps(kept, indent=2, sort_keys=True) + "\n").encode(), **files}


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Our fields from a config.json, in the spelling of transformers 4 or 5: what the section ``model`` shall hold.

    Raises:
      HuggingFaceError: an architecture, an activation, biases, rotary positions or a sliding window that are not here.
    """
    path = pathlib.Path(path).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        h = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise HuggingFaceError(f"{path} cannot be read: {error}") from error
    family, problems = h.get("model_type"), []
    if family == "gpt2":
        d = h["n_embd"]
        return dict(
            PRESETS["gpt2"], embed=d, depth=h["n_layer"], heads=h["n_head"], mlp=h.get("n_inner") or 4 * d,
            vocab=h["vocab_size"], context=h["n_positions"], eps=h["layer_norm_epsilon"],
        )  # fmt: skip
    if family not in _FAMILIES:
        raise HuggingFaceError(f"{path}: model_type is {family!r}; there are: {', '.join(_FAMILIES)}, gpt2 (sizes alone)")
    rope = h.get("rope_parameters") or {**(h.get("rope_scaling") or {}), "rope_theta": h.get("rope_theta", 1e4)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        problems.append(f"rope_type is {kind!r}; there are: default, llama3")
    if h.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act is {h['hidden_act']!r}; only silu is there")
    if h.get("attention_bias") or h.get("mlp_bias"):
        problems.append("attention_bias and mlp_bias must be false")
    if h.get("use_sliding_window") or (family == "llama" and h.get("sliding_window")):
        problems.append("use_sliding_window is set; only attention to all of a document is read")
    if problems:
        raise HuggingFaceError(f"{path}: {'; '.join(problems)}")
    heads = h["num_attention_heads"]
    scaled = {
        "factor": float(rope["factor"]),
        "low": float(rope["low_freq_factor"]),
        "high": float(rope["high_freq_factor"]),
        "original": rope["original_max_position_embeddings"],
    } if kind == "llama3" else {}  # fmt: skip
    return dict(
        embed=h["hidden_size"],
        depth=h["num_hidden_layers"],
        heads=heads,
        kv_heads=h.get("num_key_value_heads") or heads,
        head_dim=h.get("head_dim") or h["hidden_size"] // heads,
        mlp=h["intermediate_size"],
        eps=h["rms_norm_eps"],
        rope=dict(theta=float(rope["rope_theta"]), **scaled),
        vocab=h["vocab_size"],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(h.get("tie_word_embeddings", False)),
        init_std=h.get("initializer_range", 0.02),
    )


def from_hugging_face(folder: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections ``model`` and ``warm_start`` for a folder with config.json and safetensors. Raises HuggingFaceError."""
    model = read_config(folder)
    if model.get("positions") == "learned":
        raise HuggingFaceError(f"{folder}: the arrays of gpt2 are kept differently; only its sizes are read")
    table = make_specs(Config(**{**model, "rope": transformer.Rope()}))
    slashes = lambda name: name.replace(".", "/")  # noqa: E731
    renames = [(rf"^model/layers/(\d+)/{slashes(_LAYER[name])}$", rf"blocks/{name}[\1]") for name in table["blocks"]]
    renames += [(f"^{slashes(_TOP[name])}$", name) for name in table if name != "blocks"]
    return model, dict(source=str(folder), renames=tuple(renames), reshape={r"^blocks/(w_(q|k|v|out)|b_.)$": "fold"})


def perplexity(cross_entropy: float) -> float:
    """exp of nats per token; infinite where a float cannot hold it."""
    return math.exp(cross_entropy) if cross_entropy < 700 else math.inf
