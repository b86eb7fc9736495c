"""Sums of two numbers by a language model of characters, scored by its text, in CPU minutes.

    jaxtrain train --config=sums

The text is made at the first use, in the cache folder: lines like "37+85=122", of 90 % of all pairs
up to 99. `load_environment` has the others as prompts, and scores what the model writes after "=".
After 1,000 steps (about 5 minutes on two busy cores) everything that it writes is a number, and 10
% are the sum; the records are in runs/sums/metrics.jsonl, completions in generations.jsonl.
"""

import os
import random

from ml_collections import config_dict

from jaxtrain.workloads.language.environments import Environment, Rubric
from loaders.io import machine

TEXT = machine.cache_folder("sums-v1.txt")


def pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs, shuffled: for training, and held out."""
    all_pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(0).shuffle(all_pairs)
    return all_pairs[:9_000], all_pairs[9_000:]


def load_environment() -> Environment:
    _, held_out = pairs()
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in held_out]
    return Environment(rows, Rubric([right, digits], [1.0, 0.0]))


def right(completion: str, answer: str) -> bool:
    """Check that the whole first line is the sum."""
    return completion.partition("\n")[0] == answer


def digits(completion: str) -> bool:
    """Check for a number, even a wrong one: counted, not rewarded."""
    return completion.partition("\n")[0].isdigit()


def get_config() -> config_dict.ConfigDict:
    if not TEXT.exists():
        TEXT.parent.mkdir(parents=True, exist_ok=True)
        training, _ = pairs()
        lines = [f"{a}+{b}={a + b}\n" for a, b in random.Random(1).choices(training, k=100_000)]
        temporary = TEXT.with_name(f".{TEXT.name}.{os.getpid()}")
        temporary.write_text("".join(lines))
        temporary.replace(TEXT)  # whole or not at all
    return config_dict.create(
        workload="jaxtrain.workloads.language",
        loader="loaders.text.tokens",
        model=dict(
            embed=128,
            depth=3,
            heads=4,
            mlp=384,
            dtype="float32",
            unroll=3,
            generation=dict(prompts=("12+34=", "9"), tokens=16),
            targets=(dict(module="jaxtrain.configs.sums", prompts=200, tokens=6),),
        ),
        data=dict(sources=(dict(path=str(TEXT)),), context=64, packing="random", test_share=0.02),
        train=dict(steps=1_000, batch=32, eval_every=250),
        optim=dict(lr=3e-3, warmup=0.05, lr_floor=0.05, b2=0.98, weight_decay=0.1),
        checkpoint=dict(every=500),
    )
