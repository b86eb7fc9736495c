"""The tiny recursive model on Sudoku-Extreme: 1000 puzzles, a thousand views of each, 65,104 steps.

    python -m jaxtrain.main --config=configs/trm_sudoku.py:/path/to/sudoku
        (or JAXTRAIN_SUDOKU=/path/to/sudoku)

The path is a folder with train.csv and test.csv (columns source, question, answer, rating), or with
the npy folders of the original (loaders/sudoku/sudoku.py has the formats). Without one, hard
puzzles with one solution
are generated, and nothing has to
be downloaded. The published result of this recipe is 87.4 % exact on the test boards (with
attention, see `get_config`: less).

For two CPU cores there are :deep and :last, the two contracts of training on graded boards, which
`make trm-demo` compares, and :4x4, :9x9 and :maze11. :maze and :lights are other puzzles, in full
size for one GPU.

What a step costs (--plan=gpu:h100x1 and, compiled for 16 chips, --plan=tpu:v4:2x2x4): an
application of the net 1.22 GFLOP a row; a cycle, 7 of them for 768 rows, 6.56 TFLOP, and the last
one, which is differentiated, three times that; in all 32.8 TFLOP for 2 + 3 cycles. At 40 % of the
peak the recipe takes 1.5 hours on one H100 and 0.34 on the slice. With train.accumulate=2 it needs
half of the 40 GB of one H100.

configs/trm_sudoku.py:extreme is the recipe of contract "last" for one GPU, on the files of
$JAXTRAIN_SUDOKU (`extreme`).

`python -m tools.bench_train --model=trm` compares steps with PyTorch's on the same cores
(docs/results/cpu-steps.md).
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict


def get_config(argument: str = "") -> ConfigDict:
    if argument in DEMOS:
        return ConfigDict(DEMOS[argument]())
    path = argument or os.environ.get("JAXTRAIN_SUDOKU", "")
    return ConfigDict(
        dict(
            workload="jaxtrain.workloads.trm",
            loader="loaders.sudoku.sudoku",
            model=dict(mixer="mlp", positions="none"),  # or "attention" and "rope"
            data=dict(sources=(dict(path=path, n_train=1000, n_test=10_000, views=1000),)),
            train=dict(steps=65_104, batch=768, ema=0.999, eval_every=6_510, eval_batches=4),
            optim=recipe(lr=1e-4, warmup=2_000 / 65_104, weight_decay=1.0),
            checkpoint=dict(every=1_000),
        )
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


def four() -> dict[str, Any]:
    """4 × 4 boards, 4 to 10 blanks; no views, as these would turn training boards into tests."""
    return dict(
        workload="jaxtrain.workloads.trm",
        loader="loaders.sudoku.sudoku",
        workdir="runs/trm-4x4",
        model=small(embed=64, cycles_low=2),
        data=dict(sources=(dict(kind="sudoku4", n_train=4_000, n_test=512, blanks=(4, 10), views=0),)),
        train=dict(steps=600, batch=64, ema=0.98, eval_every=100),
        optim=recipe(lr=2e-3, warmup=1 / 30, weight_decay=0.1),
        checkpoint=dict(every=200),
    )


def nine() -> dict[str, Any]:
    """9 × 9 boards with 4 to 12 blanks. The training mixture has boards with more of them."""
    return dict(
        workload="jaxtrain.workloads.trm",
        loader="loaders.sudoku.sudoku",
        workdir="runs/trm-9x9",
        model=small(embed=64, cycles_low=2),
        data=dict(sources=(dict(n_train=2_000, n_test=512, blanks=(4, 12)), dict(n_train=2_000, n_test=0, blanks=(20, 40)))),
        train=dict(steps=800, batch=64, ema=0.98, eval_every=200),
        optim=recipe(lr=2e-3, warmup=1 / 40, weight_decay=0.1),
        checkpoint=dict(every=200),
    )


def small(*, embed: int, cycles_low: int) -> dict[str, Any]:
    return dict(
        embed=embed,
        heads=4,
        inner_multiple=32,
        puzzle_tokens=1,
        puzzle_embed=embed,
        cycles_high=2,
        cycles_low=cycles_low,
        halt_steps=4,
        dtype="float32",
    )


def graded(contract: str) -> dict[str, Any]:
    """Return 9 × 9 boards that singles solve: 4.7 TFLOP, two CPU minutes, by either contract.

    "last" takes one to three supervision steps, so that it can afford more steps, of fewer rows.
    """
    optim, train = recipe(lr=2e-3, warmup=1 / 40, weight_decay=0.1), dict(steps=240, batch=64, ema=0.98, eval_every=0)
    model: dict[str, Any] = {}
    if contract == "last":
        model = dict(contract="last", least_steps=1, first_steps=1, growth_steps=360)
        train |= dict(steps=360, batch=32)
        optim |= dict(lr=3e-3, schedule="cosine", warmup=20, lr_floor=0.02)
    return dict(
        workload="jaxtrain.workloads.trm",
        loader="loaders.sudoku.sudoku",
        workdir=f"runs/trm-{contract}",
        model=small(embed=64, cycles_low=2) | model,
        data=dict(sources=(dict(n_train=4_000, n_test=512, blanks=(16, 24), grade="easy"),)),
        train=train,
        optim=optim,
        checkpoint=dict(every=120),
    )


def maze11() -> dict[str, Any]:
    """Mazes of 11 × 11 cells by the contract "last", in five CPU minutes (docs/results/trm.md)."""
    config = graded("last")
    return config | dict(
        workdir="runs/trm-maze11",
        model=config["model"] | dict(growth_steps=400),
        data=dict(sources=(dict(kind="maze", n_train=4_000, n_test=256, side=11, views=7),)),
        train=config["train"] | dict(steps=400, eval_every=100),
    )


def extreme() -> dict[str, Any]:
    """Return the recipe of contract "last" for Sudoku-Extreme on one GPU, in bfloat16.

    A step is 117 TFLOP on average: 7,500 take 1.1 hours at 22 % of an H100's peak, which contract
    "deep" reaches (docs/results/h100.md). `jaxtrain plan` counts each as one of the end. No result
    has been measured.
    """
    config = get_config().to_dict()
    return config | dict(
        workdir="runs/trm-extreme",
        model=config["model"]
        | dict(contract="last", least_steps=1, first_steps=1, growth_steps=6_000, test_steps=32, rollouts=4, symmetry=True),
        train=config["train"] | dict(steps=7_500, eval_every=1_500),
        optim=config["optim"] | dict(lr=2e-4, schedule="cosine", warmup=0.04, lr_floor=0.05),
    )


def other(**source: Any) -> dict[str, Any]:
    """Return another puzzle's config, with attention: 0.9 hours on one H100 at 40 %."""
    return dict(
        workload="jaxtrain.workloads.trm",
        loader="loaders.sudoku.sudoku",
        workdir=f"runs/trm-{source['kind']}",
        model=dict(mixer="attention", positions="rope", cycles_low=4, remat="full"),
        data=dict(sources=(source,)),
        train=dict(steps=20_000, batch=128, ema=0.999, eval_every=2_000, eval_batches=4),
        optim=recipe(lr=1e-4, warmup=0.1, weight_decay=1.0),
        checkpoint=dict(every=1_000),
    )


DEMOS: dict[str, Callable[[], dict[str, Any]]] = {
    "4x4": four,
    "9x9": nine,
    "deep": functools.partial(graded, "deep"),
    "last": functools.partial(graded, "last"),
    "maze11": maze11,
    "extreme": extreme,
    "maze": functools.partial(other, kind="maze", n_train=1_000, n_test=1_000, side=30, views=7),
    "lights": functools.partial(other, kind="lights", n_train=20_000, n_test=1_000, side=10, views=7),
}
