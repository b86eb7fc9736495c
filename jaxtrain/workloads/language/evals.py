"""Generative evaluation: continuations of prompts, shown or scored by environments.

Shapes: B prompts, P places of the longest prompt, N new tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.nn import sampling
from jaxtrain.types import Array, GenerativeEvaluation, Shard, Variables
from jaxtrain.workloads.language import environments
from jaxtrain.workloads.language.model import Config, Generation, Target

Scored = tuple[dict[str, float], list[dict[str, Any]]]  # for the record, for generations.jsonl
MAX_LINES = 8  # [prompts] of an environment that generations.jsonl shows


def generative_evaluations(c: Config, shard: Shard, seed: int) -> Iterator[GenerativeEvaluation]:
    """Yield the generative evaluations that a config asks for."""
    if c.generation.prompts:

        def show(texts: Sequence[str]) -> Scored:
            pairs = zip(c.generation.prompts, texts, strict=True)
            return {}, [{"prompt": prompt, "continuation": text} for prompt, text in pairs]

        yield _evaluation(
            c, shard, seed, c.generation.prompts, c.generation, c.generation.top_p, show
        )
    for target in c.targets:
        prompts = environments.load(target.module, target.arguments, target.prompts)

        def score(
            texts: Sequence[str], prompts: environments.Prompts = prompts, name: str = target.module
        ) -> Scored:
            means, rewards = prompts.score(texts)
            lines = []
            for row, text, reward in zip(prompts.rows, texts, rewards, strict=True):
                line = {"target": name, "prompt": row["prompt"], "continuation": text}
                lines.append({**line, "reward": reward})
            metrics = {f"{name}/{metric}": mean for metric, mean in means.items()}
            return metrics, lines[:MAX_LINES]

        yield _evaluation(
            c, shard, seed, [row["prompt"] for row in prompts.rows], target, 1.0, score
        )


def _evaluation(
    c: Config,
    shard: Shard,
    seed: int,
    prompts: Sequence[str],
    section: Generation | Target,
    top_p: float,
    score: Callable[[Sequence[str]], Scored],
) -> GenerativeEvaluation:
    """Continues prompts. Too long ones keep their last tokens. ``score`` gets the texts."""
    codec = c.codec()
    ids = [codec.encode(prompt)[-(c.context - section.tokens) :] for prompt in prompts]
    n_parts = shard.size("batch", shard.mesh.size if shard.mesh else 1)
    # rows divide over the devices: the first prompt comes again
    prompt_bp, length_b = sampling.pad(ids + ids[:1] * (-len(ids) % n_parts))

    def run(variables: Variables) -> Array:
        return sampling.generate(
            c,
            variables.params,
            jnp.asarray(prompt_bp),
            jnp.asarray(length_b),
            jax.random.key(seed),
            shard,
            n_new=section.tokens,
            temperature=section.temperature,
            top_p=top_p,
            ends=codec.ends,
        )

    def texts(tokens_bn: Array) -> Scored:
        pairs = zip(ids, np.asarray(tokens_bn)[: len(ids)].tolist(), strict=True)
        return score([codec.continuation(prompt, new)[0] for prompt, new in pairs])

    return GenerativeEvaluation(run, texts)
