"""The tiny recursive model on Sudoku-Extreme: 1000 puzzles, a thousand views of each, 65,104 steps.

    jaxtrain train --config=trm_sudoku:/path/to/sudoku
        (or JAXTRAIN_SUDOKU=/path/to/sudoku)

The path is a folder with train.csv and test.csv (columns source, question, answer, rating), or with
the npy folders of the original (loaders/sudoku/sudoku.py has the formats). Without one, hard
puzzles with one solution are generated. The published result of this recipe is 87.4 % exact on the
test boards (with attention, see `get_config`: less).

For two CPU cores there are :deep and :last, the two contracts of training on graded boards, which
`make trm-demo` compares, and :4x4, :9x9 and :maze11. :maze is in full size for one GPU.

What a step costs (--plan=gpu:h100x1 and, compiled for 16 chips, --plan=tpu:v4:2x2x4): an
application of the net 1.22 GFLOP a row; a cycle, 7 of them for 768 rows, 6.56 TFLOP, and the last
one, which is differentiated, three times that; in all 32.8 TFLOP for 2 + 3 cycles. At 40 % of the
peak the recipe takes 1.5 hours on one H100 and 0.34 on the slice. With train.accumulate=2 it needs
half of the 40 GB of one H100.

--config=trm_sudoku:extreme is the recipe of contract "last" for one GPU, on the files of
$JAXTRAIN_SUDOKU (`extreme`), and :medium and :hard are shorter ones on generated boards (`graded`).

`python -m tools.bench train --model=trm` compares steps with PyTorch's on the same cores
(docs/results/cpu-steps.md).
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from ml_collections import config_dict

SMALL = dict(
    embed=64,
    heads=4,
    inner_multiple=32,
    puzzle_tokens=1,
    puzzle_embed=64,
    cycles_high=2,
    cycles_low=2,
    halt_steps=4,
    dtype="float32",
)


def get_config(argument: str = "") -> config_dict.ConfigDict:
    if argument in DEMOS:
        return config_dict.create(**DEMOS[argument]())
    path = argument or os.environ.get("JAXTRAIN_SUDOKU", "")
    return config_dict.create(
        workload="jaxtrain.workloads.trm",
        loader="loaders.sudoku.sudoku",
        model=dict(mixer="mlp", positions="none"),  # or "attention" and "rope"
        data=dict(sources=(dict(path=path, n_train=1000, n_test=10_000, views=1000),)),
        train=dict(steps=65_104, batch=768, ema=0.999, eval_every=6_510, eval_batches=4),
        optim=recipe(lr=1e-4, warmup=2_000 / 65_104, weight_decay=1.0),
        checkpoint=dict(every=1_000),
    )


def recipe(*, lr: float, warmup: float, weight_decay: float) -> dict[str, Any]:
    """AdamATan2 on everything, biases too, but signs on the batch's rows of puzzle embeddings."""
    return dict(
        name="adam_atan2",
        lr=lr,
        schedule="constant",
        warmup=warmup,
        b1=0.9,
        b2=0.95,
        weight_decay=weight_decay,
        clip=0.0,
        decayed=".",
        undecayed="^$",
        groups=(dict(match="^puzzle/", name="sign_sgd", lr=lr, weight_decay=weight_decay),),
    )


def small(
    name: str, *sources: dict[str, Any], steps: int, eval_every: int, every: int, warmup: float
) -> dict[str, Any]:
    """Return a config of small boards, or puzzles, for two CPU cores."""
    return dict(
        workload="jaxtrain.workloads.trm",
        loader="loaders.sudoku.sudoku",
        workdir=f"runs/trm-{name}",
        model=SMALL,
        data=dict(sources=sources),
        train=dict(steps=steps, batch=64, ema=0.98, eval_every=eval_every),
        optim=recipe(lr=2e-3, warmup=warmup, weight_decay=0.1),
        checkpoint=dict(every=every),
    )


def last(
    name: str, *sources: dict[str, Any], steps: int, eval_every: int, growth: int
) -> dict[str, Any]:
    """Return `small` by contract "last": one to three passes, so more steps, of fewer rows."""
    config = small(name, *sources, steps=steps, eval_every=eval_every, every=120, warmup=20)
    config["optim"] |= dict(lr=3e-3, schedule="cosine", lr_floor=0.02)
    model = SMALL | dict(contract="last", least_steps=1, first_steps=1, growth_steps=growth)
    return config | dict(model=model, train=config["train"] | dict(batch=32))


def extreme() -> dict[str, Any]:
    """Return the recipe of contract "last" for Sudoku-Extreme on one GPU, in bfloat16.

    A step takes 1 to 16 supervision steps in the end, and fewer before: 117 TFLOP on average. At
    the 22 % of the peak that a step of contract "deep" reaches on an H100 (docs/results/h100.md),
    the 7,500 steps take 1.1 hours. `jaxtrain plan` says 0.95 hours at 40 %, since it counts each
    step as one of the end, and 31.5 GB. No result has been measured.
    """
    config: dict[str, Any] = get_config().to_dict()
    config["model"] |= dict(
        contract="last", least_steps=1, first_steps=1, growth_steps=6_000, test_steps=32, rollouts=4
    )
    config["model"]["symmetry"] = True
    config["train"] |= dict(steps=7_500, eval_every=1_500)
    config["optim"] |= dict(lr=2e-4, schedule="cosine", warmup=0.04, lr_floor=0.05)
    return config | dict(workdir="runs/trm-extreme")


def graded(grade: str) -> dict[str, Any]:
    """Return contract "last" on generated boards of a grade, for one GPU.

    A step of 384 rows takes 1 to 8 supervision steps in the end: 34 TFLOP on average. At the 22 %
    of the peak of `extreme`, the 6,000 steps take 16 minutes on an H100, and the evaluations one
    more. No solution of a test board is in training, under any symmetry. No result has been
    measured: `python -m tools.show_runs sudoku-hard` measures it.
    """
    config = extreme()
    config["model"] |= dict(halt_steps=8, growth_steps=4_500)
    config["train"] |= dict(steps=6_000, batch=384, eval_every=1_500, eval_batches=0)
    source = dict(n_train=20_000, n_test=512, views=1_000, grade=grade)
    return config | dict(workdir=f"runs/trm-{grade}", data=dict(sources=(source,)))


def other(**source: Any) -> dict[str, Any]:
    """Return another puzzle's config, with attention: 0.9 hours on one H100 at 40 %."""
    config: dict[str, Any] = get_config().to_dict()
    config["train"] |= dict(steps=20_000, batch=128, eval_every=2_000)
    return config | dict(
        workdir=f"runs/trm-{source['kind']}",
        model=dict(mixer="attention", positions="rope", cycles_low=4, remat="full"),
        data=dict(sources=(source,)),
        optim=recipe(lr=1e-4, warmup=0.1, weight_decay=1.0),
    )


# singles solve them; 4.7 TFLOP by either contract
GRADED = dict(n_train=4_000, n_test=512, blanks=(16, 24), grade="easy")
# five CPU minutes (docs/results/trm.md)
MAZES = dict(kind="maze", n_train=4_000, n_test=256, side=11, views=7)
# No views of 4 × 4 boards, which would turn training boards into tests.
FOUR = dict(kind="sudoku4", n_train=4_000, n_test=512, blanks=(4, 10), views=0)
NINE = (
    dict(n_train=2_000, n_test=512, blanks=(4, 12)),
    dict(n_train=2_000, n_test=0, blanks=(20, 40)),
)
DEMOS: dict[str, Callable[[], dict[str, Any]]] = {
    "4x4": functools.partial(
        small, "4x4", FOUR, steps=600, eval_every=100, every=200, warmup=1 / 30
    ),
    "9x9": functools.partial(
        small, "9x9", *NINE, steps=800, eval_every=200, every=200, warmup=1 / 40
    ),
    "deep": functools.partial(
        small, "deep", GRADED, steps=240, eval_every=0, every=120, warmup=1 / 40
    ),
    "last": functools.partial(last, "last", GRADED, steps=360, eval_every=0, growth=360),
    "maze11": functools.partial(last, "maze11", MAZES, steps=400, eval_every=100, growth=400),
    "extreme": extreme,
    "medium": functools.partial(graded, "medium"),
    "hard": functools.partial(graded, "hard"),
    "maze": functools.partial(other, kind="maze", n_train=1_000, n_test=1_000, side=30, views=7),
}
