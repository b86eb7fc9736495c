"""A task that is never computed: arrays of every kind in its state."""

import jax
import numpy as np

from jaxtrain import specs
from jaxtrain.config import Group, Optim
from jaxtrain.optim import make_optimizer
from jaxtrain.types import LossOut, Spec, Task, Variables
from loaders.base import Field

TASK = Task(
    specs=Variables(
        params={
            "body": {
                "w": Spec((8, 6), ("embed", "mlp"), specs.fan_in(8)),
                "scale": Spec((8,), ("embed",), specs.ones),
            },
            "head": {"w": Spec((8, 5), ("embed", "vocab"), specs.fan_in(8), "bfloat16")},
        },
        frozen={"base": Spec((4, 8), (None, "embed"), specs.ones, "bfloat16")},
        model_state={
            "latent": Spec((16, 8), ("batch", "embed"), specs.zeros),
            "count": Spec((), (), specs.zeros, "int32"),
        },
    ),
    loss=lambda variables, batch, key: LossOut(None, {}),
    evaluate=lambda variables, batch: {},
    axes={"x": ("batch", None), "label": ("batch",)},
    flops=0,
)
FIELDS = {
    "x": Field((3,), np.dtype("f4")),
    "label": Field((), np.dtype("i4")),
    "unused": Field((9,), np.dtype("f4")),
}
TX = make_optimizer(Optim(groups=(Group("^head/", freeze=True),)), TASK.specs.params, steps=10)


def planned():
    """The abstract state of the task on one device."""
    from jaxtrain.parallel.layout import make_layout, make_mesh
    from jaxtrain.step import state as state_lib

    layout = make_layout(make_mesh(1, 1, 1, devices=jax.devices()[:1]), {"batch": "data"})
    return state_lib.make_abstract(TASK, TX, layout, FIELDS, batch=16, ema=False)
