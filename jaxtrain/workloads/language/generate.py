"""Continuations of prompts by a trained language model, many at a time."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.arrays import run_workload, stored_params
from jaxtrain.arrays import source as source_lib
from jaxtrain.nn import sampling
from jaxtrain.parallel.layout import Layout
from jaxtrain.types import PyTree
from jaxtrain.workloads.language import model as language
from loaders.io import checks, files

LONGEST = 64 << 20  # [bytes] of a file of prompts


class GenerateError(ValueError):
    """Prompts or options that cannot be used."""


class Writer(NamedTuple):
    """A model and what turns text into its tokens."""

    model: language.Config
    params: PyTree
    codec: language.Codec
    layout: Layout
    name: str  # of the step, and what it holds


class Continuation(NamedTuple):
    """What follows a prompt."""

    prompt: str
    seed: int
    text: str
    tokens: int  # that were written, the one that ends it excepted
    ended: bool  # whether a token ended it


def load(run: str, *, step: int | None = None, ema: bool = False, tokenizer: str = "") -> Writer:
    """Reads a run of jaxtrain.workloads.language, with the tokenizer that it was trained with, or another.

    Raises StoredError, WarmStartError, ConfigError, CodecError; GenerateError: the tokenizer's file cannot be read.
    """
    source = source_lib.find(run, step)
    config = source.config(language.__package__)
    section = dict(run_workload.model_of(config))
    own = source.path / "tokenizer.json"
    data = config.get("data")
    data = data if isinstance(data, dict) else {}
    # That of an export before the path that its run knew, which may be on another machine.
    exported = str(own) if source.is_export and own.exists() else ""
    chosen = tokenizer or exported or section.get("tokenizer") or data.get("tokenizer")
    if chosen:
        section["tokenizer"] = chosen
        if chosen != "bytes":
            try:
                files.read(pathlib.Path(str(chosen)).expanduser(), most=LONGEST)  # the run may be anyone's, and name any file
            except files.FileError as error:
                raise GenerateError(f"{error}; name a tokenizer.json: --tokenizer") from error
    model = config_lib.section(language.Config, {**section, "targets": (), "samples": {}})
    if problems := list(checks.under("model", model.problems())):
        raise config_lib.ConfigError(problems)
    codec = language.make_codec(model)
    layout = stored_params.one_device()
    params = stored_params.read(source, language.make_specs(model), layout, ema=ema)
    return Writer(model, params, codec, layout, f"{source.name(ema=ema)} {chosen}")


def read_prompts(path: str) -> list[str]:
    """The prompts of a file: of .jsonl the "prompt" of each line, or the line where it is a string; else each line.

    Raises GenerateError.
    """
    place = pathlib.Path(path).expanduser()
    try:
        lines = files.read_text(place, most=LONGEST).splitlines()
        found = []
        for number, line in enumerate(lines, 1):
            if line.strip() and place.suffix != ".jsonl":
                found.append(line)
            elif line.strip():
                tree: Any = files.parse(line, f"{path}:{number}", kind=object)
                prompt = tree.get("prompt") if isinstance(tree, dict) else tree
                if not isinstance(prompt, str) or not prompt:
                    raise GenerateError(f'{path}:{number} has no "prompt" of text')
                found.append(prompt)
    except files.FileError as error:
        raise GenerateError(str(error)) from error
    if not found:
        raise GenerateError(f"{path} holds no prompt; expected one a line")
    return found


def generate(
    writer: Writer,
    prompts: Sequence[str],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seeds: Sequence[int] = (0,),
    batch: int = 16,
    first: int = 0,
) -> Iterator[Continuation]:
    """Continues each prompt once for each seed, in order, from continuation number ``first`` on.

    A continuation depends on prompt and seed alone, up to rounding in other shapes: not on the other prompts, their order or
    ``batch``.

    Raises GenerateError: a prompt too long for the model's context, or without tokens.
    """
    c, codec = writer.model, writer.codec
    if not 0 < tokens < c.context:
        raise GenerateError(
            f"--tokens is {tokens}; the model's context is {c.context}, prompt included: ask for {c.context - 1} at most"
        )
    ids = []
    for prompt in prompts:
        try:
            ids.append(codec.encode(prompt))
        except language.CodecError as error:
            raise GenerateError(str(error)) from error
        if max(ids[-1]) >= (c.vocab or 0):
            raise GenerateError(
                f"the prompt {prompt[:40]!r} has a token {max(ids[-1])}, of {c.vocab}; name the model's own --tokenizer"
            )
        if len(ids[-1]) + tokens > c.context:
            raise GenerateError(
                f"the prompt {prompt[:40]!r} has {len(ids[-1])} tokens, and {tokens} more are asked for; the context is "
                f"{c.context}: ask for fewer (--tokens), or shorten it"
            )
    rows = [(prompt, i, seed) for prompt, i in zip(prompts, ids, strict=True) for seed in seeds][first:]
    longest = max((len(i) for i in ids), default=1)

    @jax.jit
    def run(params: PyTree, prompt_bp: jax.Array, length_b: jax.Array, seed_b: jax.Array) -> jax.Array:
        def one(prompt_p: jax.Array, length: jax.Array, seed: jax.Array) -> jax.Array:
            return sampling.generate(
                c, params, prompt_p[None], length[None], jax.random.key(seed), writer.layout.shard, n_new=tokens,
                temperature=temperature, top_p=top_p, end=codec.end,
            )[0]  # fmt: skip

        return jax.vmap(one)(prompt_bp, length_b, seed_b)

    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        padded = [*some, *[some[0]] * (batch - len(some))]  # one program for all
        prompt_bp = np.zeros((batch, longest), np.int32)
        for row, (_, i, _) in enumerate(padded):
            prompt_bp[row, : len(i)] = i
        lengths, seeds_b = (np.array(x, np.int32) for x in ([len(i) for _, i, _ in padded], [s for _, _, s in padded]))
        written = np.asarray(run(writer.params, jnp.asarray(prompt_bp), jnp.asarray(lengths), jnp.asarray(seeds_b)))
        for (prompt, _, seed), new in zip(some, written.tolist(), strict=False):
            kept = new[: new.index(codec.end)] if codec.end in new else new
            yield Continuation(prompt, seed, codec.decode(kept), len(kept), len(kept) < len(new))
