"""Characters of Shakespeare with a GPT-2 of 4 layers, by the public recipe for a CPU.

    jaxtrain train --config=shakespeare_char:/path/to/input.txt

The file is the tiny-Shakespeare text (1,115,394 characters; 65 different ones), of which the last
tenth is held out. Over all of that the loss reached 1.917 (seed 0) and 1.910 (seed 1), in 3.5
minutes of CPU time; nanoGPT's README reports 1.88 for this recipe, estimated from 20 batches.
Continuations are in runs/shakespeare_char/generations.jsonl.

--config=shakespeare_char:/path/to/input.txt,gpu is the same text with nanoGPT's model and recipe
for a GPU: 6 layers of 384, 256 characters, 5,000 steps, and dropout of 0.2, also of attention.
nanoGPT's README reports 1.4697, its best evaluation. The parameters are averaged here, which that
recipe does not do. No card has run it yet: expect 1.45 to 1.48, where the model without dropout had
1.530 (docs/results/h100.md). `python -m tools.show_runs characters` measures it on a card.

The same model's steps compared with PyTorch's, in one run on the same cores
(docs/results/cpu-steps.md has what came out):

    python -m tools.bench train --model=language
"""

from ml_collections import config_dict


def get_config(argument: str = "input.txt") -> config_dict.ConfigDict:
    path, _, size = argument.partition(",")
    if size not in ("", "gpu"):
        raise ValueError(f"{argument!r} is not PATH or PATH,gpu")
    config = small(path)
    if size == "gpu":
        config.update(for_gpu())
    return config


def for_gpu() -> config_dict.ConfigDict:
    """Return the fields of nanoGPT's recipe for a GPU, a run of about two minutes on an H100."""
    return config_dict.create(
        workdir="runs/shakespeare_char-gpu",
        model=dict(
            embed=384,
            depth=6,
            heads=6,
            mlp=1536,
            dropout=0.2,
            attention_dropout=0.2,
            dtype="bfloat16",
            unroll=6,
        ),
        data=dict(context=256),
        train=dict(steps=5_000, batch=64, ema=0.998),
        optim=dict(warmup=0.02),
        checkpoint=dict(best="-cross_entropy"),
    )


def small(path: str) -> config_dict.ConfigDict:
    """Return the public recipe for a CPU."""
    return config_dict.create(
        workload="jaxtrain.workloads.language",
        loader="loaders.text.tokens",
        model=dict(
            embed=128,
            depth=4,
            heads=4,
            mlp=512,
            norm="layer",
            activation="gelu",
            positions="learned",
            tied=True,
            dtype="float32",
            unroll=4,
            generation=dict(prompts=("\n", "ROMEO:"), tokens=56),
        ),
        data=dict(sources=(dict(path=path),), context=64, packing="random", test_share=0.1),
        train=dict(steps=2_000, batch=12, eval_every=250, eval_batches=0),
        optim=dict(
            lr=1e-3,
            warmup=0.05,
            lr_floor=0.1,
            b2=0.99,
            weight_decay=0.1,
            decayed=r"(^|/)(w|embed|pos)[^/]*$",  # the recipe decays everything with two dimensions
            undecayed=r"(^|/)scale[^/]*$",
        ),
        checkpoint=dict(every=1_000),
        metrics=dict(every=50),
    )
