"""The rows of a batch as the page of a step shows them: each workload's `WORKLOAD.examples`."""

import jax
import numpy as np
import pytest

from jaxtrain import config as config_lib
from jaxtrain import workload
from jaxtrain.parallel import one_device
from loaders import base
from tests.support import birds, corpus, small_runs
from tests.support.cases import initial

ROWS = 8
BIRD = """
def get_config():
    return dict(
        workload="jaxtrain.workloads.bird", loader="loaders.audio.spectrogram",
        model=dict(embed=32, depth=1, heads=2, patch=(16, 32), dtype="float32"),
        data=dict(train="shards", label="label", n_frames=64, clip_seconds=0.5, threads=1,
                  test_share=0.0),
        train=dict(steps=9, batch=8),
    )
"""


def shown(config, position=1):
    """A batch at a position, and its examples, with the initial model state."""
    rows = base.Rows(ROWS, ((0, ROWS),))
    loader = base.module(config.loader).make_loader(
        config.data, split="train", rows=rows, seed=config.seed
    )
    loader.seek(position)
    batch = {name: x[0] for name, x in next(loader)[1].items()}
    loader.close()
    of = workload.of(config.workload)
    task = of.make_task(config, one_device.shard, ROWS)
    model_state = jax.device_get(initial(task.specs.model_state))
    found = list(of.examples(config, model_state, batch, position))
    assert len(found) == ROWS
    return batch, found, model_state


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_sound_of_a_recording_is_the_crop_that_its_spectrogram_shows(here):
    rng = np.random.default_rng(0)
    loud = [
        np.repeat(rng.uniform(0.001, 0.5, 12), 1600) * rng.standard_normal(19_200)
        for _ in range(12)
    ]
    shard = corpus.table(
        [corpus.encode(x.astype("f4"), 32_000) for x in loud],
        [i % 3 for i in range(12)],
        birds.NAMES,
    )
    corpus.write(here / "shards" / "data-train.arrow", shard)
    (here / "cfg.py").write_text(BIRD)
    batch, found, _ = shown(config_lib.load("cfg.py"), position=3)
    for spectrogram, label, example in zip(
        batch["spectrogram"], batch["label"], found, strict=True
    ):
        samples, rate = example.sound
        assert rate == 32_000 and len(samples) == 16_000 and example.text == birds.NAMES[label]
        power = np.square(samples[: 50 * 320]).reshape(50, -1).mean(1)
        assert np.corrcoef(np.log(power[1:49]), spectrogram.mean(1)[:48])[0, 1] > 0.85, (
            "a frame is 25 ms, every 10 ms"
        )
        assert example.pictures["spectrogram"].shape == spectrogram.T.shape


def test_a_board_is_drawn_and_a_slot_that_continues_has_no_id_of_the_batch(here):
    (here / "trm.py").write_text(
        small_runs.TRM.replace("tests.support.proxy_loader", "loaders.sudoku.sudoku")
    )
    batch, found, model_state = shown(config_lib.load("trm.py"))
    assert all(x.id == "" for x in found), "a new slot takes the batch's row"
    picture = np.asarray(found[0].pictures["puzzle and solution"])
    assert picture.ndim == 2 and 0 <= picture.min() and picture.max() <= 1 and picture.std() > 0.1
    task_examples = workload.of("jaxtrain.workloads.trm").examples
    model_state = {**model_state, "halted": np.arange(ROWS) != 3}
    ids = [x.id for x in task_examples(config_lib.load("trm.py"), model_state, batch, 1)]
    assert ids == ["", "", "", "row:3", "", "", "", ""]


def test_documents_are_text(here):
    small_runs.of_bytes(here)
    batch, found, _ = shown(config_lib.load("cfg.py"))
    for tokens, example in zip(batch["tokens"], found, strict=True):
        assert example.text.replace("\n¶ ", "") == bytes(tokens.tolist()).decode()


def test_a_conversation_has_its_text_and_sound(here):
    small_runs.higgs(here)
    _, found, _ = shown(config_lib.load("higgs.py"))
    assert all(x.text.strip() for x in found)
    sounds = [x.sound for x in found if x.sound]
    assert sounds and all(
        rate == 32_000 and len(x) > 1000 and np.isfinite(x).all() for x, rate in sounds
    )


def test_a_film_shows_its_last_frame(here):
    small_runs.giblet(here)
    batch, found, _ = shown(config_lib.load("giblet.py"))
    frame = batch["video"].reshape(ROWS, -1, 6, 8, 3)[2, -1].astype(float).mean(-1)[::-1] / 255
    got = np.asarray(found[2].pictures["last frame"])
    assert got.shape == (6, 8) and np.corrcoef(got.ravel(), frame.ravel())[0, 1] > 0.99
    assert found[2].text == f"volume {batch['volume'][2]}"
