"""A decoder-only language model: next-token prediction on packed rows of documents.

A row of a batch is S tokens of one or several documents. Its fields, all [B, S]:

    tokens     int32    the inputs
    targets    int32    the token after each; any value where ``mask`` is 0
    positions  int32    places within the document
    segments   int32    documents, numbered from 1 in a row; 0 is padding. Nothing is seen across them
    mask       float32  1 where the target is valid: not in padding, not at a document's last token

The architecture is `jaxtrain.nn.transformer.Decoder`; `PRESETS` has published sizes, `from_hugging_face` reads a folder with
config.json and safetensors, and `EXPORT` lets `jaxtrain export` write one.

Shapes: B batch, S tokens, D embed, V vocabulary.
"""

import functools
import json
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Config as RunConfig
from jaxtrain.nn import sampling, transformer
from jaxtrain.nn.cross_entropy import cross_entropy
from jaxtrain.nn.hugging_face import LAYER, HuggingFaceError, decoder_fields, folded, own_export
from jaxtrain.nn.layers import Rope
from jaxtrain.types import (
    OF_DATA,
    Array,
    Batch,
    Export,
    Hub,
    Key,
    LossOut,
    Mean,
    OfData,
    PyTree,
    Shard,
    Spec,
    Task,
    Trial,
    Variables,
)
from jaxtrain.workloads.language import environments
from loaders.io import checks, files


@dataclass(frozen=True)
class Samples:
    """Continuations that are written to samples.jsonl at every evaluation."""

    prompts: tuple[str, ...] = ()  # [texts] to be continued; empty = none
    tokens: int = 64  # [tokens] of each continuation
    temperature: float = 0.8  # [1] by which logits are divided; 0 = always the likeliest token
    top_p: float = 0.95  # [probability] that the tokens that may be drawn add up to


@dataclass(frozen=True)
class Target:
    """An environment to evaluate on (jaxtrain.workloads.language.environments); its numbers are named module/…"""

    module: str = ""  # [module] that has load_environment
    arguments: dict[str, str] = field(default_factory=dict)  # [name: value] of load_environment
    prompts: int = 64  # [prompts] of its dataset, the first ones
    tokens: int = 64  # [tokens] of a completion
    temperature: float = 0.0  # [1] by which logits are divided; 0 = always the likeliest token


@dataclass(frozen=True)
class Config(transformer.Decoder):
    """Tokens in, tokens out."""

    vocab: OfData[int] = OF_DATA  # [tokens] known to the model; None = as the data have
    bytes_per_token: OfData[float] = OF_DATA  # [bytes] of text behind a token, for bits per byte; None = as the data have
    z_loss: float = 0.0  # [1] times the square of the softmax's log normaliser, added to the loss; 0 = none
    chunk: int = 1024  # [tokens] of each device whose logits exist at the same time
    n_test: OfData[tuple[int, ...]] = OF_DATA  # [documents] held out of each source, several also apart; None = the data's
    samples: Samples = field(default_factory=Samples)  # [section]
    targets: tuple[Target, ...] = ()  # [environments] to evaluate on
    tokenizer: OfData[str] = OF_DATA  # [path] of a tokenizer.json, for prompts, or "bytes"; None = as the data have
    symbols: OfData[str] = OF_DATA  # [text] whose i-th character is token i; None = as the data have

    def problems(self) -> Iterator[tuple[str, str]]:
        yield from super().problems()
        yield from checks.at_least(self, 1, "chunk")
        yield from checks.not_negative(self, "z_loss")
        yield from checks.under("samples", checks.within(self.samples, "(0, 1]", "top_p"))
        for where, section in self._writers():
            yield from checks.under(where, checks.at_least(section, 1, "tokens"))
            yield from checks.under(where, checks.not_negative(section, "temperature"))
        for i, target in enumerate(self.targets):
            try:
                environments.load(target.module, target.arguments, target.prompts)
            except environments.BadEnvironment as error:
                yield f"targets[{i}].module", str(error)

    def data_problems(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("vocab", "context"):
            value, needed = getattr(self, name), facts.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif needed is not None and value < needed:
                shorter = f", or shorter rows: config.data.context={value}" if name == "context" else ""
                yield name, f"is {value}, and the data need {needed}; set config.model.{name}={needed}{shorter}"
        for where, section in self._writers():
            if section is self.samples and not self.samples.prompts:
                continue  # nothing is continued
            if self.context is not None and section.tokens >= self.context:
                text = f"is {section.tokens}, and the model's context is {self.context}, prompt included"
                yield f"{where}.tokens", f"{text}; {self._fewer(where)}"
        try:
            codec = make_codec(self)
            for prompt in self.samples.prompts:
                codec.encode(prompt)
        except CodecError as error:
            if self.samples.prompts or self.targets:
                yield "samples.prompts", str(error)

    def data_notes(self, facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        used = facts.get("vocab")
        if not used or not self.vocab or self.vocab < 4 * used:
            return
        whole = _n_numbers(self, self.vocab)
        idle = whole - _n_numbers(self, used)
        if 2 * idle > whole:
            share = min(round(100 * idle / whole), 99)
            yield (
                "vocab",
                f"is {self.vocab:,}, and the data have {used:,} tokens: {share}% of the parameters are rows of "
                "tokens that never come; --config.model.vocab=None takes the data's",
            )

    def _fewer(self, where: str) -> str:
        """The remedy for continuations of ``where`` that the context does not hold."""
        half = max(self.context // 2, 1)
        if where == "samples":
            return f"set config.model.samples.tokens={half}, or write nothing: config.model.samples.prompts=()"
        return f"set tokens to {half} in config.model.targets, or score nothing: config.model.targets=()"

    def _writers(self) -> Iterator[tuple[str, Samples | Target]]:
        """The sections that have the model write: (path, section)."""
        yield "samples", self.samples
        yield from ((f"targets[{i}]", target) for i, target in enumerate(self.targets))

    @property
    def n_sources(self) -> int:
        return len(self.n_test or ())


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


def _n_numbers(c: Config, vocab: int) -> int:
    """Parameters of the model with another vocabulary."""
    table = transformer.decoder_specs(c, vocab)
    return sum(math.prod(spec.shape) for spec in jax.tree.leaves(table, is_leaf=lambda x: isinstance(x, Spec)))


class Model(NamedTuple):
    """The part of the run that every function of the task reads."""

    c: Config
    shard: Shard


def make_task(config: RunConfig, shard: Shard, batch: int) -> Task:
    c: Config = config.model
    model = Model(c, shard)
    fields = {name: ("batch", "seq") for name in ("tokens", "targets", "positions", "segments", "mask")}
    return Task(
        specs=Variables(make_specs(c)),
        loss=functools.partial(loss, model),
        evaluate=functools.partial(evaluate, model),
        axes={**fields, **({"source": ("batch",)} if c.n_sources > 1 else {})},
        flops=3 * batch * forward_flops(c, causal=True),
        full_flops=3 * batch * forward_flops(c, causal=False),
        tokens=batch * c.context,
        finish=functools.partial(finish, c),
        trials=tuple(_trials(c, shard, config.seed)),
        terms=("cross_entropy", "z_loss") if c.z_loss else (),
        predict=functools.partial(predict, model),
    )


def loss(model: Model, variables: Variables, batch: Batch, key: Key) -> LossOut:
    del key  # nothing is random
    x_bsd = hidden(model, variables.params, batch)
    total, metrics = measure(model, variables.params, x_bsd, batch, batch["mask"].astype(jnp.float32))
    metrics["tokens"] = Mean(total.weight, jnp.float32(batch["row"].shape[0]))  # valid ones in a row
    return LossOut(total, metrics)


def predict(model: Model, variables: Variables, batch: Batch) -> Array:
    """Logits [B, S, V] of ``tokens`` [B, S]."""
    tokens_bs = batch["tokens"]
    positions_bs = jnp.broadcast_to(jnp.arange(tokens_bs.shape[1])[None], tokens_bs.shape)
    return logits(model.c, variables.params, {"tokens": tokens_bs, "positions": positions_bs}, model.shard)


def evaluate(model: Model, variables: Variables, batch: Batch) -> dict[str, Mean]:
    c, params, x_bsd = model.c, variables.params, hidden(model, variables.params, batch)
    mask_bs = batch["mask"].astype(jnp.float32)
    if c.n_sources < 2:
        return measure(model, params, x_bsd, batch, mask_bs)[1]
    by_source = [
        measure(model, params, x_bsd, batch, jnp.where((batch["source"] == source)[:, None], mask_bs, 0))[1]
        for source in range(c.n_sources)
    ]
    metrics = jax.tree.map(lambda *sums: sum(sums), *by_source)  # every row is of one source
    return metrics | {f"cross_entropy_source_{i}": of_source["cross_entropy"] for i, of_source in enumerate(by_source)}


def hidden(model: Model, params: PyTree, batch: Batch) -> Array:
    """Last hidden states [B, S, D]."""
    return transformer.decode(model.c, params, batch["tokens"], batch["positions"], batch["segments"], model.shard)


def measure(model: Model, params: PyTree, x_bsd: Array, batch: Batch, mask_bs: Array) -> tuple[Mean, dict[str, Mean]]:
    """The loss over the targets of ``mask_bs``, and metrics."""
    c, w_vd = model.c, transformer.head(model.c, params)
    sums = cross_entropy(
        x_bsd, w_vd, batch["targets"], mask_bs, model.shard, z_loss=c.z_loss, chunk=c.chunk, axes=transformer.TABLE
    )
    n = mask_bs.sum()
    metrics = {"cross_entropy": Mean(sums.cross_entropy, n), "accuracy": Mean(sums.correct, n)}
    if c.z_loss:
        metrics["z_loss"] = Mean(c.z_loss * sums.z, n)
    return Mean(sums.loss, n), metrics


def finish(c: Config, record: Mapping[str, Any]) -> dict[str, float]:
    """Adds exp(nats per token), and bits for each byte of the text behind the tokens."""
    complete = dict(record)
    for name in [name for name in record if name.startswith("cross_entropy")]:
        suffix = name.removeprefix("cross_entropy")
        complete[f"perplexity{suffix}"] = math.exp(min(record[name], 700.0))  # exp(700) is the last that a float holds
    if c.bytes_per_token:
        complete["bits_per_byte"] = record["cross_entropy"] / math.log(2) / c.bytes_per_token
    return complete


def _trials(c: Config, shard: Shard, seed: int) -> Iterator[Trial]:
    if c.samples.prompts:
        codec = make_codec(c)

        def show(texts: Sequence[str]) -> tuple[dict[str, float], list[dict[str, Any]]]:
            return {}, [{"prompt": p, "continuation": x} for p, x in zip(c.samples.prompts, texts, strict=True)]

        yield _trial(c, shard, seed, codec, c.samples.prompts, c.samples, c.samples.top_p, show)
    for target in c.targets:
        codec, prompts = make_codec(c), environments.load(target.module, target.arguments, target.prompts)

        def score(
            texts: Sequence[str], prompts: Any = prompts, name: str = target.module
        ) -> tuple[dict[str, float], list[dict[str, Any]]]:
            means, rewards = prompts.score(texts)
            triples = zip(prompts.rows, texts, rewards, strict=True)
            lines = [{"target": name, "prompt": r["prompt"], "continuation": x, "reward": y} for r, x, y in triples]
            return {f"{name}/{k}": v for k, v in means.items()}, lines[:8]

        yield _trial(c, shard, seed, codec, [row["prompt"] for row in prompts.rows], target, 1.0, score)


def _trial(
    c: Config,
    shard: Shard,
    seed: int,
    codec: "Codec",
    prompts: Sequence[str],
    section: Samples | Target,
    top_p: float,
    judge: Callable[[Sequence[str]], tuple[dict[str, float], list[dict[str, Any]]]],
) -> Trial:
    """Continues prompts, of which too long ones keep their last tokens; ``judge`` gets the texts."""
    ids = [codec.encode(prompt)[-(c.context - section.tokens) :] for prompt in prompts]
    length_b = np.array([len(i) for i in ids], np.int32)
    prompt_bp = np.zeros((len(ids), length_b.max()), np.int32)
    for row, i in enumerate(ids):
        prompt_bp[row, : len(i)] = i

    def run(variables: Variables) -> Array:
        return sampling.generate(
            c, variables.params, jnp.asarray(prompt_bp), jnp.asarray(length_b), jax.random.key(seed), shard,
            n_new=section.tokens, temperature=section.temperature, top_p=top_p, end=codec.end,
        )  # fmt: skip

    def texts(tokens_bn: Array) -> tuple[dict[str, float], list[dict[str, Any]]]:
        return judge([codec.decode([i for i in row if i != codec.end]) for row in np.asarray(tokens_bn).tolist()])

    return Trial(run, texts)


class CodecError(ValueError):
    """A text that the vocabulary has no tokens for."""


class Codec(NamedTuple):
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    end: int  # token that ends a document; -1 = none


def make_codec(c: Config) -> Codec:
    """Text to tokens and back: by a tokenizer.json, by a list of characters, or as bytes. Raises CodecError."""
    if c.tokenizer and c.tokenizer != "bytes":
        try:
            import tokenizers  # not needed to train

            tokenizer = tokenizers.Tokenizer.from_file(c.tokenizer)
        except Exception as error:  # tokenizers raises plain Exceptions
            raise CodecError(f"{c.tokenizer} cannot be read as a tokenizer.json: {error}") from error
        ends = [tokenizer.token_to_id(t) for t in ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")]
        end = next((i for i in ends if i is not None), -1)
        return Codec(lambda text: _not_empty(tokenizer.encode(text, add_special_tokens=False).ids, text), tokenizer.decode, end)
    if c.symbols:
        place = {symbol: i for i, symbol in enumerate(c.symbols)}

        def encode(text: str) -> list[int]:
            if unknown := sorted(set(text) - set(place)):
                raise CodecError(f"{text!r} has the characters {unknown}, and no token of the data stands for them")
            return _not_empty([place[x] for x in text], text)

        return Codec(encode, lambda ids: "".join(c.symbols[i] for i in ids if i < len(c.symbols)), -1)
    if c.vocab != 256 and c.tokenizer != "bytes":
        raise CodecError(
            'text cannot be turned into tokens: the data name no tokenizer; set tokenizer to a tokenizer.json, or to "bytes"'
        )

    def decode(ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    return Codec(lambda text: _not_empty(list(text.encode()), text), decode, -1)


def _not_empty(ids: list[int], text: str) -> list[int]:
    if not ids:
        raise CodecError(f"{text!r} has no tokens, and a continuation must begin with one")
    return ids


def forward_flops(c: Config, *, causal: bool) -> int:
    """Floating-point operations of one full row, forward; the backward pass costs twice as much.

    With ``causal``, places that the mask or a window hides are left out of attention.
    """
    return c.context * transformer.token_flops(c, make_specs(c)) + transformer.attention_flops(c, c.context, causal=causal)


# Hugging Face: Llama, Qwen2 and Qwen3.

_TOP = {"embed": "model.embed_tokens.weight", "scale": "model.norm.weight", "w_head": "lm_head.weight"}
_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
              "generation_config.json")  # fmt: skip


def _family(model: Mapping[str, Any]) -> str | None:
    """The Hugging Face model_type of a model section; None where there is none."""
    plain = (model["norm"], model["activation"], model["positions"], model["bias"], model["window"])
    if plain != ("rms", "swiglu", "rope", False, 0) or (model["qk_norm"] and model["qkv_bias"]):
        return None
    return "qwen3" if model["qk_norm"] else "qwen2" if model["qkv_bias"] else "llama"


def export_names(config: Mapping[str, Any], path: str) -> str | list[str]:
    """Hugging Face's names where it has this architecture, else paths with dots. ``config`` is the saved section ``model``."""
    stack, _, name = path.rpartition("blocks/")
    if _family(config) is None:
        return [f"blocks.{i}.{name}" for i in range(config["depth"])] if path != name else path.replace("/", ".")
    return [f"model.layers.{i}.{LAYER[name]}" for i in range(config["depth"])] if path != name else _TOP[path]


def export_shape(config: Mapping[str, Any], path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one exported array: Hugging Face has heads and their dimensions as one axis."""
    if _family(config) is None:
        return shape
    return folded(path.rpartition("/")[2], shape)


def export_files(config: Mapping[str, Any], dtype: str) -> dict[str, bytes]:
    """config.json, and the tokenizer's files where the run knows them. ``config`` is the whole run's, ``dtype`` the arrays'.

    Fields of the config.json of config.warm_start.source beyond the architecture (token ids, for one) are kept.
    """
    model, family = config["model"], _family(config["model"])
    # What the run began with, what its texts were read with, and what its prompts are (that of token files).
    places = [config["warm_start"]["source"], config["data"].get("tokenizer"), model.get("tokenizer")]
    folders = [p if p.is_dir() else p.parent for p in (pathlib.Path(str(x)).expanduser() for x in places if x and x != "bytes")]
    found = {
        name: files.read(files.inside(folder, name), most=files.MOST_JSON)
        for folder in reversed(folders)
        for name in _TOKENIZER
        if (folder / name).is_file()
    }
    if family is None:
        return found
    if "tokenizer.json" in found and "tokenizer_config.json" not in found:
        # Else transformers makes one of the architecture's own kind from it, which splits texts in another way.
        found["tokenizer_config.json"] = b'{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
    source = next((folder / "config.json" for folder in folders[:1] if (folder / "config.json").is_file()), None)
    kept = files.read_json(files.inside(source.parent, source.name)) if source else {}
    if kept.get("model_type") not in _FAMILIES:
        kept = {}
    for key in ("rope_parameters", "torch_dtype", "dtype"):
        kept.pop(key, None)
    fields = kept | _hugging_face_fields(model, family, dtype, least_context=kept.get("max_position_embeddings", 0))
    return {"config.json": (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode(), **found}


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
    """What the card says: transformers loads the architectures that it has, and the tokenizer where it is there."""
    metrics, model = ("perplexity", "bits_per_byte", "accuracy", "cross_entropy"), config["model"]
    with_text = "tokenizer.json" in files
    of_bytes = not model.get("symbols") and "bytes" in (model.get("tokenizer"), config["data"].get("tokenizer"))
    if _family(model) is None:
        known = with_text or of_bytes or model.get("symbols") or model["vocab"] == 256
        example = "$ jaxtrain generate . 'One morning' --tokens 32" if known else ""
        return Hub("jaxtrain", "text-generation", metrics, example)
    example = _EXAMPLE if with_text else _BYTES_EXAMPLE if of_bytes else _TOKENS_EXAMPLE
    return Hub("transformers", "text-generation", metrics, example)


EXPORT = Export(export_names, export_shape, export_files, export_hub)


def _hugging_face_fields(model: Mapping[str, Any], family: str, dtype: str, *, least_context: int) -> dict[str, Any]:
    """A model section as fields of config.json."""
    rope = model["rope"]
    scaling = {
        "rope_type": "llama3",
        "factor": rope["factor"],
        "low_freq_factor": rope["low"],
        "high_freq_factor": rope["high"],
        "original_max_position_embeddings": rope["original"],
    }
    return {
        "architectures": [_FAMILIES[family]],
        "model_type": family,
        "hidden_act": "silu",
        "hidden_size": model["embed"],
        "intermediate_size": model["mlp"],
        "num_hidden_layers": model["depth"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"] or model["heads"],
        "head_dim": model["head_dim"] or model["embed"] // model["heads"],
        "max_position_embeddings": max(model["context"], least_context),
        "rms_norm_eps": model["eps"],
        "rope_theta": rope["theta"],
        "rope_scaling": scaling if rope["factor"] != 1 else None,
        "tie_word_embeddings": model["tied"],
        "vocab_size": model["vocab"],
        "initializer_range": model["init_std"],
        "torch_dtype": dtype,
        **({"attention_bias": False} if family != "qwen2" else {}),
        **({"mlp_bias": False} if family == "llama" else {}),
        **({"use_sliding_window": False} if family != "llama" else {}),
    }


def read_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The fields of the section ``model`` from a config.json, in the spelling of transformers 4 or 5.

    Raises:
      HuggingFaceError: an architecture, an activation, biases, rotary positions or a sliding window that this model lacks.
    """
    path = pathlib.Path(path).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        return _read_fields(files.read_json(path), path)
    except files.FileError as error:
        raise HuggingFaceError(str(error)) from error
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise error if isinstance(error, HuggingFaceError) else HuggingFaceError(f"{path}: {error!r}") from error


def _read_fields(h: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    family, problems = h.get("model_type"), []
    if family == "gpt2":
        d = h["n_embd"]
        return dict(
            PRESETS["gpt2"], embed=d, depth=h["n_layer"], heads=h["n_head"], mlp=h.get("n_inner") or 4 * d,
            vocab=h["vocab_size"], context=h["n_positions"], eps=h["layer_norm_epsilon"],
        )  # fmt: skip
    if family not in _FAMILIES:
        known = checks.expected(family, (*_FAMILIES, "gpt2 (sizes alone)"))
        raise HuggingFaceError(f"{path}: model_type is {family!r}; {known}")
    if h.get("use_sliding_window") or (family == "llama" and h.get("sliding_window")):
        problems.append("use_sliding_window is set; only attention to all of a document is read")
    return dict(
        decoder_fields(h, path, problems),
        vocab=h["vocab_size"],
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied=bool(h.get("tie_word_embeddings", False)),
        init_std=h.get("initializer_range", 0.02),
    )


def from_hugging_face(folder: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sections ``model`` and ``warm_start`` for a folder with config.json and safetensors, or one of `jaxtrain export`.

    Raises HuggingFaceError.
    """
    if own := own_export(folder, __name__, ("vocab",)):
        return own, dict(source=str(folder))
    model = read_config(folder)
    if model.get("positions") == "learned":
        raise HuggingFaceError(f"{folder}: the arrays of gpt2 are kept differently; only its sizes are read")
    table = make_specs(Config(**{**model, "rope": Rope()}))
    slashes = lambda name: name.replace(".", "/")  # noqa: E731
    renames = [(rf"^model/layers/(\d+)/{slashes(LAYER[name])}$", rf"blocks/{name}[\1]") for name in table["blocks"]]
    renames += [(f"^{slashes(_TOP[name])}$", name) for name in table if name != "blocks"]
    return model, dict(source=str(folder), renames=tuple(renames), reshape={"^blocks/(w_q|w_k|w_v|w_out|b_)": "fold"})
