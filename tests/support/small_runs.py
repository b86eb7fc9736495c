"""Folders with a config and its data, in which each workload's run takes seconds."""

import pathlib

import numpy as np

from loaders.film import film_files
from tests.support import chat

TINY = """
import os

from ml_collections import ConfigDict

# another config may have set it in this process
os.environ["PROXIED"] = "loaders.audio.spectrogram"

def get_config(path):
    return ConfigDict(dict(
        workload="jaxtrain.workloads.bird",
        loader="tests.support.proxy_loader",
        model=dict(embed=32, depth=2, heads=4, patch=(32, 32), dtype="float32",
                   augment=dict(shift=50, time_masks=1, mel_masks=1)),
        data=dict(train=path, threads=2),
        train=dict(steps=20, batch=8, eval_every=8, ema=0.9),
        optim=dict(lr=1e-3),
        checkpoint=dict(every=10),
        metrics=dict(every=1),
    ))
"""
TOY = """
import os

os.environ["PROXIED"] = "tests.support.toy_rows"

def get_config():
    return dict(
        workload="tests.support.toy", loader="tests.support.proxy_loader",
        train=dict(steps=20, batch=8, eval_every=8, ema=0.9),
        optim=dict(lr=1e-3),
        checkpoint=dict(every=10),
        metrics=dict(every=1),
    )
"""
# for commands on a config with an argument
TOY_AT = TOY.replace("get_config()", "get_config(path)")
# Recordings for a workload of other rows: a config whose step is never traced.
SOUNDS = """
def get_config(path):
    return dict(
        workload="tests.support.toy", loader="loaders.audio.spectrogram",
        data=dict(train=path, threads=1), train=dict(steps=20, batch=8), checkpoint=dict(every=10),
    )
"""
# Without the proxy, for a run in the test's own process, which may have imported another one.
ROWS = TOY[TOY.index("def get_config") :].replace(
    "tests.support.proxy_loader", "tests.support.toy_rows"
)
QWEN = pathlib.Path(__file__).parents[1] / "data" / "lm" / "qwen2"
LANGUAGE = f"""
from ml_collections import ConfigDict
from jaxtrain.workloads.language import hugging_face

def get_config():
    model, warm_start = hugging_face.from_hugging_face({str(QWEN)!r})
    return ConfigDict(dict(
        workload="jaxtrain.workloads.language", loader="loaders.text.tokens",
        model=dict(model, dtype="float32", tokenizer="bytes",
                   generation=dict(prompts=("one ",), tokens=4)),
        data=dict(sources=(dict(path="text.txt"),), context=32, text="bytes", packing="random"),
        train=dict(steps=6, batch=8, eval_every=3),
        optim=dict(lr=1e-2, schedule="constant"),
        lora=dict(rank=2), warm_start=warm_start, checkpoint=dict(every=3), metrics=dict(every=1),
    ))
"""
BYTES = """
def get_config():
    return dict(
        workload="jaxtrain.workloads.language", loader="loaders.text.tokens",
        model=dict(embed=8, depth=1, heads=2, mlp=8, dtype="float32"),
        data=dict(sources=(dict(path="text.txt"),), context=8, text="bytes", packing="concat"),
        train=dict(steps=2, batch=8, eval_every=0), optim=dict(lr=0.1, schedule="constant"),
        checkpoint=dict(every=2, keep=9), metrics=dict(every=1),
    )
"""
TRM = """
import os
from ml_collections import ConfigDict

os.environ["PROXIED"] = "loaders.sudoku.sudoku"

def get_config():
    return ConfigDict(dict(
        workload="jaxtrain.workloads.trm",
        loader="tests.support.proxy_loader",
        model=dict(embed=16, heads=2, inner_multiple=16, puzzle_tokens=1, puzzle_embed=16,
                   dtype="float32", halt_steps=4, cycles_high=2, cycles_low=2, first_high=1,
                   first_low=1, growth=10, explore=0.9, explore_end=0.1),
        data=dict(sources=(dict(kind="sudoku4", n_train=40, n_test=9, blanks=(3, 6), views=10),)),
        train=dict(steps=16, batch=8, eval_every=8, eval_batches=1, ema=0.9),
        optim=dict(name="adam_atan2", lr=1e-3, clip=0.0, decayed=".", undecayed="^$",
                   groups=(dict(match="^puzzle/", name="sign_sgd", lr=1e-2),)),
        checkpoint=dict(every=4),
        metrics=dict(every=1),
    ))
"""
GIBLET = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(dict(
        workload="jaxtrain.workloads.giblet",
        loader="loaders.film.multimodal",
        model=dict(video_widths=(16, 16, 16), audio_widths=(8, 8), text_widths=(8, 8),
            trunk_widths=(16, 16),
                   bottleneck=8, head_width=16, decoder_widths=(16, 16, 16, 16),
                   decode_video_widths=(16, 16), decode_audio_widths=(16, 16),
                   decode_text_widths=(16, 16), dtype="float32", normalised=True),
        data=dict(path="film", hrf=("text",), hrf_seconds=6.0),
        train=dict(steps=50, batch=8, eval_every=2, patience=3, min_delta=100.0),
        checkpoint=dict(every=4, keep=1, best="fmri_r"),
    ))
"""
HIGGS = """
from ml_collections import ConfigDict
from jaxtrain.workloads.audio_language import hugging_face

def get_config(base=""):
    sizes = dict(embed=32, depth=2, heads=4, kv_heads=2, head_dim=8, mlp=32, vocab=272)
    sizes |= dict(codebooks=2, codebook_size=16)
    model, warm_start = hugging_face.from_hugging_face(base) if base else (sizes, {})
    lora = dict(hugging_face.ADAPTERS, rank=2, alpha=4.0) if base else {}
    return ConfigDict(dict(
        workload="jaxtrain.workloads.audio_language", loader="loaders.chat.chat_audio",
        model=dict(model, dtype="float32"),
        data=dict(manifest="manifest.json", tokenizer="tokenizer.json", codec="codec.npz",
                  buckets=2, test_share=0.25),
        train=dict(steps=8, batch=8, eval_every=4),
        optim=dict(lr=1e-2, schedule="constant"), lora=lora, warm_start=warm_start,
        checkpoint=dict(every=4), metrics=dict(every=1),
    ))
"""


def tiny(folder):
    (folder / "tiny.py").write_text(TINY)
    return folder


def toy(folder):
    (folder / "toy.py").write_text(TOY)
    return folder


def rows(folder):
    (folder / "rows.py").write_text(ROWS)
    return folder


def lm(folder):
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 200)
    (folder / "lm.py").write_text(LANGUAGE)
    return folder


def of_bytes(folder):
    (folder / "text.txt").write_text("one two three four five six seven eight nine ten\n" * 40)
    (folder / "cfg.py").write_text(BYTES)
    return folder


def trm(folder):
    (folder / "trm.py").write_text(TRM)
    return folder


def giblet(folder):
    film(folder / "film")
    (folder / "giblet.py").write_text(GIBLET)
    return folder


def higgs(folder):
    chat.corpus(folder, n=40)
    (folder / "higgs.py").write_text(HIGGS)
    return folder


def film(folder):
    """A film of a minute and two viewers, as `jaxtrain prepare-giblet` leaves them."""
    rng = np.random.default_rng(0)
    (folder / "fmri").mkdir(parents=True)
    np.save(folder / "video.npy", rng.integers(0, 256, (240, 6, 8, 3), np.uint8))
    np.save(folder / "audio.npy", rng.integers(0, 1024, (240, 2), np.int16))
    np.save(folder / "text.npy", rng.standard_normal((60, 8), np.float32))
    for name in "ab":
        np.save(folder / "fmri" / f"{name}.npy", rng.standard_normal((60, 12)).astype(np.float16))
    film_files.write(
        folder, {"tr": 1.0, "fps": 4.0, "audio_rate": 4.0, "audio": "codes", "subjects": ["a", "b"]}
    )
