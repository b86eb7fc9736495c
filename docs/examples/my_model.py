# my_model.py: a classifier of bird sound. One layer on slices of a spectrogram, a mean over time
from dataclasses import dataclass

import jax
import optax
from jax.nn.initializers import lecun_normal

from jaxtrain import LossOut, Mean, ModelSection, Spec, Task, Variables, Workload


@dataclass(frozen=True)
class Config(ModelSection):
    n_classes: int | None = None  # [classes] None: the data decide
    width: int = 256  # [values] of a slice's features


def make_task(config, shard, batch):
    c, size = config.model, 8 * 128  # a slice has 8 frames of 128 mels
    table = {  # one line a parameter: shape, logical axes, initialisation
        "w_in": Spec((size, c.width), (None, "embed"), lecun_normal()),
        "w_out": Spec((c.width, c.n_classes), ("embed", None), lecun_normal()),
    }

    def evaluate(v, rows):  # a Mean is a sum over rows and the sum of their weights
        x = jax.nn.relu(rows["spectrogram"].reshape(-1, 64, size) @ v.params["w_in"]).mean(1)
        logits, label, weight = x @ v.params["w_out"], rows["label"], rows["weight"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, label)
        values = {"loss": loss, "accuracy": logits.argmax(1) == label}
        return {name: Mean((weight * value).sum(), weight.sum()) for name, value in values.items()}

    def loss(v, rows, key):
        return LossOut(evaluate(v, rows)["loss"], {})

    axes = {"spectrogram": ("batch", None, None), "label": ("batch",), "weight": ("batch",)}
    return Task(Variables(table), loss, evaluate, axes, flops=6 * batch * 64 * size * c.width)


WORKLOAD = Workload(config=Config, make_task=make_task)


def get_config(path="demo"):
    config = dict(workload="my_model", loader="loaders.audio.spectrogram")
    config["data"] = dict(train=path, short="origin")
    config["optim"] = dict(lr=1e-2, warmup=0.1)
    config["train"] = dict(steps=400, batch=32, eval_every=100)
    return config
