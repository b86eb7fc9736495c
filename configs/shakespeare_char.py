"""Characters of Shakespeare with a GPT-2 of 4 layers, by the public recipe for a CPU.

    jaxtrain train --config=shakespeare_char:/path/to/input.txt

The file is the tiny-Shakespeare text (1,115,394 characters; 65 different ones), of which the last
tenth is held out. Over all of that the loss reached 1.917 (seed 0) and 1.910 (seed 1), in 3.5
minutes of CPU time; nanoGPT's README reports 1.88 for this recipe, estimated from 20 batches.
Continuations are in runs/shakespeare_char/generations.jsonl.

The same model's steps compared with PyTorch's, in one run on the same cores
(docs/results/cpu-steps.md has what came out):

    python -m tools.bench train --model=language
"""

from ml_collections import config_dict


def get_config(path: str = "input.txt") -> config_dict.ConfigDict:
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
