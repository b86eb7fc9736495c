"""The audio language model in a small size."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np

from jaxtrain import config as config_lib
from jaxtrain.workloads.audio_language import loss as audio_loss
from jaxtrain.workloads.audio_language import model as audio_language
from loaders.chat import chatml
from tests.support.cases import Case

DATA = pathlib.Path(__file__).parents[2] / "data" / "higgs"
GOLDEN = json.loads((DATA / "config.json").read_text())
IDS = GOLDEN["special_token_ids"]
BATCH = 16
TINY = audio_language.Config(
    vocab=64,
    codebooks=2,
    codebook_size=6,
    embed=32,
    depth=2,
    heads=8,
    kv_heads=2,
    head_dim=4,
    mlp=48,
    dtype="float32",
    chunk=24,
    init_std=0.1,
    context=0,
)
OPTIM = config_lib.Optim(lr=0.01, schedule="constant", eps=1e-3)


def batch_of(rows, spare=3, pad=IDS["<|pad|>"]):
    """A batch of conversations, in places for more than they have."""
    sizes = []
    for x in rows:
        t = chatml.targets(x)
        sizes.append(((x.recording < 0).sum(), (x.recording >= 0).sum(), len(t.text), len(t.audio)))
    shape = tuple(int(n) + spare for n in np.max(sizes, axis=0))
    batch = [chatml.row(x, shape, pad) for x in rows]
    batch = {name: np.stack([row[name] for row in batch]) for name in batch[0]}
    scale = chatml.label_scale(
        (batch["text_target"] >= 0).sum(), (batch["audio_target"] >= 0).sum((0, 1)), len(rows)
    )
    batch |= {
        "label_scale": np.tile(scale, (len(rows), 1)),
        "row": np.arange(len(rows)),
        "index": np.arange(len(rows)),
    }
    return {name: jnp.asarray(x) for name, x in batch.items()}


def conversations(seed, n=BATCH):
    """Rows of text and columns by turns, of any length. Some have no labels of one kind, or of
    both."""
    rng, found = np.random.default_rng(seed), []
    for row in range(n):
        tokens, labels, audios = [], [], []
        for turn in range(int(rng.integers(1, 3))):
            text = rng.integers(4, TINY.vocab, int(rng.integers(1, 6))).tolist()
            place = [2 if turn % 2 else 3]
            tokens += text + place
            labels += (text if row % 3 else [chatml.NONE] * len(text)) + (
                place if row % 4 else [chatml.NONE]
            )
            audios.append(
                rng.integers(
                    0, TINY.codebook_size, (TINY.codebooks, int(rng.integers(1, 5))), dtype="i4"
                )
            )
        arrays = (np.array(x, "i4") for x in (tokens, labels))
        found.append(
            chatml.expand(
                *arrays, audios, audio_in=2, audio_out=3, size=TINY.codebook_size, codebooks=2
            )
        )
    return found


def rows_of_all(seed):
    """The same batch at every step: two means in the loss, and rows without either."""
    return {
        name: np.asarray(x)
        for name, x in batch_of(conversations(0), spare=1, pad=1).items()
        if name != "row"
    }


CASE = Case(audio_loss, TINY, OPTIM, rows_of_all)
MATRIX = {"audio_language": CASE}  # a loss with two means
