"""A small run of the bird encoder, and the output of `jaxtrain detect` and `jaxtrain review` for
it."""

import contextlib
import csv
import json
import threading

import jax.numpy as jnp
import pyarrow.parquet as pq

from jaxtrain import cli
from jaxtrain import config as config_lib
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird.inference import review, review_server
from tests.support import corpus, runs
from tests.support.cases import initial

CLIP = 0.5  # [s]
MODEL = dict(
    embed=32, depth=1, heads=2, patch=(16, 32), n_frames=64, dtype="float32", pool="patches"
)
NAMES = ("blackbird", "chiffchaff", "wren")


def make_run(folder, *, seconds=0.6, data=None, change=lambda params: params, **model):
    """A run of one step on recordings of ``seconds``. ``change``: of its initial parameters."""
    shard = corpus.table(
        [corpus.wav(i, seconds) for i in range(4)], [i % 3 for i in range(4)], NAMES
    )
    corpus.write(folder / "shards" / "data-train.arrow", shard)
    shards = dict(
        train=str(folder / "shards"),
        label="label",
        n_frames=64,
        clip_seconds=CLIP,
        threads=1,
        test_share=0.0,
    )
    config = config_lib.from_dict(
        dict(
            workload="jaxtrain.workloads.bird",
            loader="loaders.audio.spectrogram",
            model={**MODEL, **model},
            data={**shards, **(data or {})},
            workdir=str(folder / "run"),
        )
    )
    params = change(initial(bird.make_specs(config.model)))
    state = {"step": jnp.array(1, jnp.int32), "params": params, "model_state": (), "opt_state": ()}
    runs.save(folder / "run", 1, state, run=json.loads(config_lib.to_json(config)))
    return folder / "run"


def scores_of(out) -> list[dict]:
    return [
        row
        for path in sorted((out / "scores").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]


def table(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".txt" else ","))


def run_detect(*argv, code=0) -> None:
    assert cli.main(["detect", *map(str, argv), "--batch", "8", "--threads", "1"]) == code


@contextlib.contextmanager
def served(items, out):
    server = review_server.Server(review.Session(items, out))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def shown(number) -> str:
    """A JavaScript expression: whether a window is shown, according to the page."""
    return (
        f"document.body.dataset.number === '{number}' &&"
        " document.getElementById('picture').naturalWidth > 100"
    )
