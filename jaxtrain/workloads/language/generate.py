"""Continuations of prompts by a trained language model, many at a time."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.arrays import run_workload, stored_params
from jaxtrain.arrays import source as source_lib
from jaxtrain.nn import sampling
from jaxtrain.parallel.layout import Layout
from jaxtrain.types import PyTree
from jaxtrain.workloads.language import text as text_lib
from jaxtrain.workloads.language.model import Config, make_specs
from jaxtrain.workloads.language.text import Codec
from loaders.base import DataError
from loaders.io import files
from loaders.text import tokenizer as tokenizer_lib

MAX_BYTES = 64 << 20  # [bytes] of a file of prompts


class Writer(NamedTuple):
    """A model and its tokenizer."""

    model: Config
    params: PyTree
    codec: Codec
    layout: Layout
    name: str  # of the step, and its parameters


class Continuation(NamedTuple):
    """The text that follows a prompt."""

    prompt: str
    seed: int
    text: str  # with the blank before it
    tokens: int  # that were written, the one that ends it excepted
    ended: bool  # whether a token ended it


def load(run: str, *, step: int | None = None, ema: bool = False, tokenizer: str = "") -> Writer:
    """Read a run with its tokenizer or another. Raises StoredError, WarmStartError, DataError."""
    source = source_lib.find_best(run, step)
    config = source.config(__package__)
    data = config.get("data") or {}
    run_tokenizer = run_workload.model_of(config).get("tokenizer") or data.get("tokenizer")
    exported = run_workload.exported_file(source, "tokenizer.json")
    codec_source = tokenizer or exported or run_tokenizer
    if codec_source == run_tokenizer:
        run_workload.refuse_other_file(source, "model.tokenizer", run_tokenizer, "--tokenizer")
    changes = {"tokenizer": str(codec_source)} if codec_source else {}
    model = run_workload.model_section(config, Config, **changes, targets=(), generation={})
    try:
        codec = model.codec()
    except DataError as error:
        raise DataError(f"{error}; name a tokenizer.json: --tokenizer") from error
    if tokenizer:
        own = {**run_workload.model_of(config), "tokenizer": run_tokenizer}
        _warn_of_other_tokens(source, own, exported or run_tokenizer, tokenizer)
    layout = stored_params.one_device()
    params = stored_params.read(source, make_specs(model), layout, ema=ema)
    return Writer(model, params, codec, layout, f"{source.name(ema=ema)} {codec_source}")


def _warn_of_other_tokens(
    source: source_lib.Source, model: Mapping[str, Any], own: Any, given: str
) -> None:
    """Print a warning if a tokenizer that the user names is not the run's.

    Args:
      model: the run's section, with its tokenizer.
      own: the path of that tokenizer, or "bytes".
    """
    folder = str(source.path) if source.is_export else ""
    difference = ""
    with contextlib.suppress(DataError, TypeError):  # the run's own may be damaged or gone
        theirs = text_lib.vocabulary_of(model, folder)
        ours = text_lib.vocabulary_of({"tokenizer": given})
        if theirs and ours:
            difference = tokenizer_lib.difference(theirs.tokens, ours.tokens)
            own = own or theirs.name
    run_workload.warn_of_other_file(
        source, "model.tokenizer", own, given, "--tokenizer", difference=difference
    )


def read_prompts(path: str) -> list[str]:
    """Return the prompts of a file: of .jsonl the "prompt" of each line, else each line.

    A line of .jsonl may be a string, too. Raises DataError.
    """
    file = files.expanded(path)
    prompts = []
    for number, line in enumerate(files.lines(files.read_text(file, most=MAX_BYTES)), 1):
        if line.strip() and file.suffix != ".jsonl":
            prompts.append(line)
        elif line.strip():
            tree: Any = files.parse(line, f"{path}:{number}", kind=object)
            prompt = tree.get("prompt") if isinstance(tree, dict) else tree
            if not isinstance(prompt, str) or not prompt:
                raise DataError(f'{path}:{number} has no "prompt" of text')
            prompts.append(prompt)
    if not prompts:
        raise DataError(f"{path} holds no prompt; expected one a line")
    return prompts


def _require_room(
    prompts: Sequence[str], ids: Sequence[Sequence[int]], tokens: int, context: int
) -> None:
    """Raise DataError if the longest prompt and its continuation are longer than the context."""
    lengths = [len(i) for i in ids]
    longest = max(lengths, default=0)
    if longest + tokens <= context:
        return
    prompt = prompts[lengths.index(longest)]
    problem = (
        f"the prompt {prompt[:40]!r} takes {longest} of the {context} tokens of the model's"
        f" context, and --tokens asks for {tokens} more"
    )
    if longest < context:
        raise DataError(f"{problem}: --tokens {context - longest} is the most")
    raise DataError(f"{problem}: shorten the prompt to {context - 1} tokens or fewer")


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
    """Continue each prompt once for each seed, in order, from continuation number ``first`` on.

    A continuation depends on prompt and seed alone, up to rounding in other shapes: not on the
    other prompts, their order or ``batch``.

    Raises DataError: a prompt too long for the model's context, or without tokens.
    """
    c, codec = writer.model, writer.codec
    ids = []
    for prompt in prompts:
        ids.append(codec.encode(prompt))
        if max(ids[-1]) >= (c.vocab or 0):
            raise DataError(
                f"the prompt {prompt[:40]!r} has a token {max(ids[-1])}, of {c.vocab}; name the"
                " model's own --tokenizer"
            )
    _require_room(prompts, ids, tokens, int(c.context))
    rows = [(prompt, i, seed) for prompt, i in zip(prompts, ids, strict=True) for seed in seeds][
        first:
    ]
    longest = max((len(i) for i in ids), default=1)

    @jax.jit
    def run(
        params: PyTree, prompt_bp: jax.Array, length_b: jax.Array, seed_b: jax.Array
    ) -> jax.Array:
        def one(prompt_p: jax.Array, length: jax.Array, seed: jax.Array) -> jax.Array:
            return sampling.generate(
                c,
                params,
                prompt_p[None],
                length[None],
                jax.random.key(seed),
                writer.layout.shard,
                n_new=tokens,
                temperature=temperature,
                top_p=top_p,
                ends=codec.ends,
            )[0]

        return jax.vmap(one)(prompt_bp, length_b, seed_b)

    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        padded = [*some, *[some[0]] * (batch - len(some))]  # one program for all
        prompt_bp, length_b = sampling.pad([i for _, i, _ in padded], longest)
        seed_b = np.array([seed for _, _, seed in padded], np.int32)
        arrays = map(jnp.asarray, (prompt_bp, length_b, seed_b))
        tokens_bn = np.asarray(run(writer.params, *arrays))
        for (prompt, i, seed), new in zip(some, tokens_bn.tolist(), strict=False):
            yield Continuation(prompt, seed, *codec.continuation(i, new, prompt))
