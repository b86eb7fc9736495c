# %% [markdown]
# # Notebook: your own model and loader
#
# After this page you have trained a model of your own on data of your own, killed it, and resumed
# it without a difference.
# It takes two minutes on two cores. [The notebook](own_model.py) is plain Python with cells,
# and also has the imports and the code of the pictures.

# %% [hidden]
import json
import pathlib
import signal
import subprocess
import sys
import time

import matplotlib.pyplot as plt
import numpy as np

import jaxtrain

# %% [markdown]
# ## A loader
#
# A loader is a module: the rows of a batch are a pure function of its position.
# These rows are noisy values of a curve.

# %%
pathlib.Path("curve_loader.py").write_text("""
from dataclasses import dataclass

import numpy as np

from jaxtrain import DataSection, Field, Loader
from loaders.base import fingerprint


@dataclass(frozen=True)
class Config(DataSection):
    noise: float = 0.05  # [1] standard deviation


def element_spec(config):
    number = np.dtype("float32")
    return {"x": Field((1,), number), "y": Field((), number), "weight": Field((), number)}


def dataset_info(config):
    return {}


class Curve(Loader):
    order = {}

    def __init__(self, config, *, split, rows, seed):
        train = split == "train"
        super().__init__(element_spec(config), train=train, rows=rows, seed=seed, n_batches=8)
        self.noise = config.noise
        self.fingerprint = fingerprint(self._part(0, np.arange(8)))

    def _part(self, position, row):
        draws = [np.random.default_rng([self._seed, self._train, position, r]) for r in row]
        x = np.array([[rng.uniform(-3, 3)] for rng in draws], "f4")
        y = np.sin(2 * x[:, 0]) + self.noise * np.array([rng.standard_normal() for rng in draws])
        return {"x": x, "y": y.astype("f4"), "weight": np.ones(len(row), "f4")}


def make_loader(config, *, split, rows, seed):
    return Curve(config, split=split, rows=rows, seed=seed)
""")

# %% [markdown]
# ## A model
#
# A workload is a module with a `WORKLOAD`: a section of the config, and a function that returns a
# `Task`.

# %%
pathlib.Path("curve_model.py").write_text('''
from dataclasses import dataclass

import jax.numpy as jnp
from jax.nn.initializers import normal, zeros

from jaxtrain import LossOut, Mean, ModelSection, Spec, Task, Variables, Workload


@dataclass(frozen=True)
class Config(ModelSection):
    width: int = 64  # [values] of the hidden layer


def make_task(config, shard, batch):
    c = config.model
    table = {
        "w_in": Spec((1, c.width), (None, "embed"), normal(2.0)),
        "b_in": Spec((c.width,), ("embed",), normal(2.0)),
        "w_out": Spec((c.width, 1), ("embed", None), normal(0.1)),
        "b_out": Spec((1,), (None,), zeros),
    }

    def predict(v, rows):
        p = v.params
        hidden = jnp.tanh(rows["x"] @ p["w_in"] + p["b_in"][None])
        return (hidden @ p["w_out"] + p["b_out"][None])[:, 0]

    def evaluate(v, rows):
        error = (predict(v, rows) - rows["y"]) ** 2
        return {"loss": Mean((rows["weight"] * error).sum(), rows["weight"].sum())}

    def loss(v, rows, key):
        return LossOut(evaluate(v, rows)["loss"], {})

    axes = {"x": ("batch", None), "y": ("batch",), "weight": ("batch",)}
    return Task(Variables(table), loss, evaluate, axes, flops=12 * batch * c.width, predict=predict)


WORKLOAD = Workload(config=Config, make_task=make_task)


''' + '''def get_config():
    from ml_collections import ConfigDict

    train, optim = dict(steps=2_000, batch=64, eval_every=500), dict(lr=0.01, weight_decay=0.0)
    return ConfigDict(dict(
        workload="curve_model", loader="curve_loader", train=train, optim=optim,
        checkpoint=dict(every=200), metrics=dict(every=20),
    ))
''')  # fmt: skip
sys.path.insert(0, ".")

# %% [markdown]
# ## Train, and call the model

# %%
done = jaxtrain.train("curve_model.py", {"workdir": "runs/undisturbed"})
print(
    "test loss",
    round(done.evaluation["loss"], 4),
    "after",
    done.step,
    "steps; the noise alone is 0.0025",
)
model = jaxtrain.load("runs/undisturbed", workload="curve_model")

# %% [hidden]
x = np.linspace(-3, 3, 200, dtype="f4")[:, None]
figure, axis = plt.subplots(figsize=(7, 2.6))
axis.plot(x, np.sin(2 * x), color="0.7", linewidth=5, label="the curve")
axis.plot(x, model(x=x), label="the model")
axis.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## Kill it, and resume it
#
# The same run in another process gets a SIGKILL in the middle.
# The same command resumes it.

# %%
command = [
    sys.executable,
    "-m",
    "jaxtrain.main",
    "--config=curve_model.py",
    "--config.workdir=runs/killed",
]
log = pathlib.Path("runs/killed/metrics.jsonl")
process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
while not log.exists() or '"step": 900' not in log.read_text():
    time.sleep(0.01)
process.send_signal(signal.SIGKILL)
process.wait()
print("killed after step", json.loads(log.read_text().splitlines()[-1])["step"])
subprocess.run(command, stderr=subprocess.DEVNULL, check=True)


def losses(workdir):
    records = [
        json.loads(line) for line in pathlib.Path(workdir, "metrics.jsonl").read_text().splitlines()
    ]
    return {record["step"]: record["loss"] for record in records if record["split"] == "train"}


undisturbed, killed = losses("runs/undisturbed"), losses("runs/killed")
print("the same losses, to the last bit:", undisturbed == killed)

# %% [hidden]
figure, axis = plt.subplots(figsize=(7, 2.6))
axis.semilogy(
    undisturbed.keys(), undisturbed.values(), color="0.7", linewidth=5, label="undisturbed"
)
axis.semilogy(killed.keys(), killed.values(), linewidth=1, label="killed at step 900, resumed")
axis.axvline(900, color="C3", linestyle=":")
axis.set(xlabel="step", ylabel="loss")
axis.legend(frameon=False)
figure.tight_layout()

# %% [markdown]
# ## Next
#
# - [Your model](../your-model.md): optimizers, metrics and commands of your own.
# - `--config.mesh.fsdp=8` splits the model over eight devices, with the same numbers.
