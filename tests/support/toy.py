"""A workload for tests of the trainer. Its step is traced and compiled in a fraction of a real
model's time.

Two layers on 16 numbers: stacked parameters, noise by row, a metric, counts of classes.
tests.support.toy_rows has its data.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import ModelSection
from jaxtrain.specs import fan_in, zeros
from jaxtrain.types import LossOut, Mean, Spec, Task, Variables
from jaxtrain.workload import Workload
from tests.support.toy_rows import CLASSES, WIDTH


@dataclass(frozen=True)
class Config(ModelSection):
    embed: int = 32  # [values] of a row's features
    depth: int = 2  # [layers]
    noise: float = 0.1  # [1] standard deviation of the noise added to a row in training


def make_task(config, shard, batch):
    c = config.model
    specs = {
        "encoder": {
            "w_in": Spec((WIDTH, c.embed), (None, "embed"), fan_in(WIDTH)),
            "blocks": {
                "w_up": Spec(
                    (c.depth, c.embed, 4 * c.embed), (None, "embed", "mlp"), fan_in(c.embed)
                ),
                "b_up": Spec((c.depth, 4 * c.embed), (None, "mlp"), zeros),
                "w_down": Spec(
                    (c.depth, 4 * c.embed, c.embed), (None, "mlp", "embed"), fan_in(4 * c.embed)
                ),
            },
        },
        "head": {
            "w": Spec((c.embed, CLASSES), ("embed", None), fan_in(c.embed)),
            "b": Spec((CLASSES,), (None,), zeros),
        },
    }

    def classify(params, x_bd):
        x_bd = shard(x_bd @ params["encoder"]["w_in"], "batch", None)
        blocks = params["encoder"]["blocks"]
        for i in range(c.depth):
            x_bd = (
                x_bd
                + jnp.tanh(x_bd @ blocks["w_up"][i] + blocks["b_up"][i][None]) @ blocks["w_down"][i]
            )
        return x_bd @ params["head"]["w"] + params["head"]["b"][None]

    def score(variables, rows, x_bd):
        logits_bc, weight_b = classify(variables.params, x_bd), rows["weight"]
        loss_b = optax.softmax_cross_entropy_with_integer_labels(logits_bc, rows["label"])
        right_b = (logits_bc.argmax(1) == rows["label"]).astype(weight_b.dtype)
        means = {
            n: Mean((x * weight_b).sum(), weight_b.sum())
            for n, x in (("loss", loss_b), ("accuracy", right_b))
        }
        return means, logits_bc

    def loss(variables, rows, key):
        draw = jax.vmap(lambda row: jax.random.normal(jax.random.fold_in(key, row), (WIDTH,)))
        means, _ = score(variables, rows, rows["x"] + c.noise * draw(rows["row"]))
        return LossOut(means["loss"], {"accuracy": means["accuracy"]})

    def evaluate(variables, rows):
        means, logits_bc = score(variables, rows, rows["x"])
        own_bc = jax.nn.one_hot(rows["label"], CLASSES) * rows["weight"][:, None]
        answer_bc = jax.nn.one_hot(logits_bc.argmax(1), CLASSES)
        counts = jnp.stack(
            [
                x_bc.sum(0)
                for x_bc in (own_bc, own_bc * answer_bc, answer_bc * rows["weight"][:, None])
            ]
        )
        return means | {"classes": Mean(counts, jnp.ones(()))}

    axes = {"x": ("batch", None), "label": ("batch",), "weight": ("batch",), "index": ("batch",)}
    return Task(Variables(specs), loss, evaluate, axes, flops=6 * batch * 8 * c.depth * c.embed**2)


WORKLOAD = Workload(config=Config, make_task=make_task)
