"""A decoder-only language model: its settings, its parameter table and its forward pass.

The architecture is `jaxtrain.nn.transformer.Decoder`. `loss` has the task, `evals` its
generations at an evaluation, and `hugging_face` the published sizes and other programs' files.

Shapes: B batch, S tokens, D embed, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtrain import specs
from jaxtrain.nn import transformer
from jaxtrain.types import OF_DATA, Array, Batch, OfData, PyTree, Shard
from jaxtrain.workloads.language import environments
from jaxtrain.workloads.language import text as text_lib
from jaxtrain.workloads.language.text import Codec, CodecError, make_codec
from loaders.base import DataError
from loaders.io import checks
from loaders.text import tokenizer as tokenizer_lib


@dataclass(frozen=True)
class Generation:
    """Continuations that are written to generations.jsonl at every evaluation."""

    # [texts] prompts that are continued at an evaluation; empty = none
    prompts: tuple[str, ...] = ()
    tokens: int = 64  # [tokens] length of each continuation
    # [1] temperature, by which logits are divided; 0 = always the likeliest token
    temperature: float = 0.8
    top_p: float = 0.95  # [probability] total probability of the tokens that may be drawn


@dataclass(frozen=True)
class Target:
    """An environment to evaluate on (`environments`). Its numbers are named module/…."""

    module: str = ""  # [module] that has load_environment
    arguments: dict[str, str] = field(default_factory=dict)  # [name: value] of load_environment
    prompts: int = 64  # [prompts] of its dataset, the first ones
    tokens: int = 64  # [tokens] of a completion
    # [1] temperature, by which logits are divided; 0 = always the likeliest token
    temperature: float = 0.0


@dataclass(frozen=True)
class Config(transformer.Decoder):
    """Tokens in, tokens out."""

    on_resume = checks.OnResume(
        checks.FUNCTION,
        free=(
            "bytes_per_token",
            "chunk",
            "n_test",
            "generation",
            "targets",
            "dropout",
            "attention_dropout",
        ),
        state=("vocab",),
        files=("tokenizer",),
    )

    vocab: OfData[int] = OF_DATA  # [tokens] tokens known to the model; None = as the data have
    # [bytes] bytes of text behind a token, for bits per byte; None = as the data have
    bytes_per_token: OfData[float] = OF_DATA
    # [1] factor of the squared log normaliser of the softmax in the loss; 0 = none
    z_loss: float = 0.0
    # [tokens] places of each device whose logits exist at the same time; 0 = 2048 on GPUs, 4096
    # on TPUs, else 1024; devices that share the matrix have 1024 on TPUs, and on GPUs if these
    # logits are more than 1 GiB
    chunk: int = 0
    # [probability] probability with which a training step drops each number of the embeddings, and
    # of the results that attention and feed-forward nets add to them
    dropout: float = 0.0
    # [probability] probability with which it drops each weight of attention, which XLA computes
    # then; 0 = fused kernels
    attention_dropout: float = 0.0
    # [documents] documents held out of each source, and of several also separately; None = the
    # data's
    n_test: OfData[tuple[int, ...]] = OF_DATA
    generation: Generation = field(default_factory=Generation)  # [section]
    targets: tuple[Target, ...] = ()  # [environments] environments to evaluate on
    # [path] path of a tokenizer.json for prompts, or "bytes"; None = as the data have
    tokenizer: OfData[str] = OF_DATA
    # [tokens] ids of the tokens that end a text, for prompts; None = as the data have
    ends: OfData[tuple[int, ...]] = OF_DATA
    # [text] characters of the vocabulary: the i-th is token i; None = as the data have
    symbols: OfData[str] = OF_DATA

    def validate(self) -> Iterator[tuple[str, str]]:
        yield from super().validate()
        yield from checks.not_negative(self, "chunk", "z_loss")
        yield from checks.within(self, "[0, 1)", "dropout", "attention_dropout")
        yield from checks.under("generation", checks.within(self.generation, "(0, 1]", "top_p"))
        for where, section in self._writers():
            yield from checks.under(where, checks.at_least(section, 1, "tokens"))
            yield from checks.under(where, checks.not_negative(section, "temperature"))
        for i, target in enumerate(self.targets):
            try:
                environments.load(target.module, target.arguments, target.prompts)
            except environments.BadEnvironment as error:
                yield f"targets[{i}].module", str(error)

    def validate_data(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("vocab", "context"):
            value, needed = getattr(self, name), info.get(name)
            if value is None:
                yield name, "is None, and the data do not give it; set it"
            elif needed is not None and value < needed:
                shorter = (
                    f", or shorter rows: config.data.context={value}" if name == "context" else ""
                )
                yield (
                    name,
                    (
                        f"is {value}, and the data need {needed}; set"
                        f" config.model.{name}={needed}{shorter}"
                    ),
                )
        most = info.get("documents", 0)
        if self.documents is not None and 1 <= self.documents < most:
            yield (
                "documents",
                (
                    f"is {self.documents}, and a row of the data has up to {most}; omit it, or set"
                    f" config.data.documents={self.documents}"
                ),
            )
        for where, section in self._writers():
            if section is self.generation and not self.generation.prompts:
                continue  # nothing is continued
            if self.context is not None and section.tokens >= self.context:
                text = (
                    f"is {section.tokens}, and the model's context is {self.context}, prompt"
                    " included"
                )
                yield f"{where}.tokens", f"{text}; {self._fewer(where)}"
        yield from self._other_tokenizer(info)
        try:
            codec = self.codec()
            for prompt in self.generation.prompts:
                if (token := max(codec.encode(prompt))) >= (self.vocab or token + 1):
                    yield (
                        "generation.prompts",
                        (
                            f"{prompt[:40]!r} has a token {token}, of {self.vocab}; set"
                            " config.model.tokenizer"
                        ),
                    )
        except CodecError as error:
            if self.generation.prompts or self.targets:
                yield "generation.prompts", str(error)

    def _other_tokenizer(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield an error if the tokenizer for prompts has other tokens than the data's."""
        data_tokenizer = info.get("tokenizer")
        if not self.tokenizer or not data_tokenizer or self.tokenizer == data_tokenizer:
            return
        try:
            prompts = text_lib.vocabulary_of({"tokenizer": self.tokenizer})
            data = text_lib.vocabulary_of({"tokenizer": data_tokenizer})
        except DataError as error:
            yield "tokenizer", str(error)
            return
        if prompts is None or data is None:
            return
        difference = tokenizer_lib.difference(data.tokens, prompts.tokens)
        if difference:
            yield (
                "tokenizer",
                f"is {self.tokenizer!r}, and the data's tokens are those of {data_tokenizer!r}:"
                f" {difference}; leave it unset",
            )

    def validate_warm_start(
        self, source: Mapping[str, Any], place: str, data: checks.DataSection
    ) -> Iterator[str]:
        yield from text_lib.other_tokens(self, source, place)

    def foreign_model(self, folder: str) -> Mapping[str, Any]:
        from jaxtrain.workloads.language import hugging_face  # which imports this module

        return hugging_face.saved_model(folder)

    def data_notes(self, info: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        data_vocab = info.get("vocab")
        if not data_vocab or not self.vocab or self.vocab < 4 * data_vocab:
            return
        n_parameters = specs.count(make_specs(self))
        n_idle = n_parameters - specs.count(transformer.decoder_specs(self, data_vocab))
        if 2 * n_idle > n_parameters:
            share = min(round(100 * n_idle / n_parameters), 99)
            yield (
                "vocab",
                (
                    f"is {self.vocab:,}, and the data have {data_vocab:,} tokens: {share}% of the"
                    " parameters are rows of tokens that never come; --config.model.vocab=None"
                    " takes the data's"
                ),
            )

    def _fewer(self, where: str) -> str:
        """Return the remedy for continuations of ``where`` that the context does not hold."""
        half = max(self.context // 2, 1)
        if where == "generation":
            return (
                f"set config.model.generation.tokens={half}, or write nothing:"
                " config.model.generation.prompts=()"
            )
        return (
            f"set tokens to {half} in config.model.targets, or score nothing:"
            " config.model.targets=()"
        )

    def _writers(self) -> Iterator[tuple[str, Generation | Target]]:
        """Yield the sections that have the model write: (path, section)."""
        yield "generation", self.generation
        yield from ((f"targets[{i}]", target) for i, target in enumerate(self.targets))

    @property
    def n_sources(self) -> int:
        return len(self.n_test or ())

    def codec(self) -> Codec:
        """Text to tokens and back. Raises CodecError."""
        return make_codec(self.tokenizer, self.symbols, self.vocab, self.ends)


def make_specs(c: Config) -> PyTree:
    return transformer.decoder_specs(c, c.vocab)


def logits(c: Config, params: PyTree, batch: Batch, shard: Shard) -> Array:
    """[B, S, V] float32, whole: for tests and short prompts."""
    x_bsd = transformer.decode(c, params, batch, shard)
    w_vd = transformer.head(c, params).astype(x_bsd.dtype)
    return jnp.einsum("bsd,vd->bsv", x_bsd, w_vd, preferred_element_type=jnp.float32)


def row_flops(c: Config, length: int, *, causal: bool, frozen: bool) -> int:
    """Count the FLOPs of one full row of ``length`` tokens, forward and backward.

    With ``causal``, places that the mask or a window hides are left out of attention. Matrices that
    are ``frozen`` have no derivative. Their adapters' products are left out.
    """
    products = length * transformer.token_flops(c, make_specs(c))
    attention = transformer.attention_flops(c, length, causal=causal)
    return (2 if frozen else 3) * products + 3 * attention


def document_flops(
    c: Config, frozen: bool, position_bs: np.ndarray, segment_bs: np.ndarray
) -> float:
    """Count the FLOPs of rows, forward and backward, with attention within documents alone."""
    b, s = position_bs.shape
    products = s * transformer.token_flops(c, make_specs(c))
    n_seen_bs = np.minimum(position_bs + 1, c.window or s) * (segment_bs > 0)
    attention = transformer.pair_flops(c) * int(n_seen_bs.sum())
    return float((2 if frozen else 3) * b * products + 3 * attention)
