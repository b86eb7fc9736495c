"""Rows of a batch as a person hears and sees them: the recording's crop and its spectrogram."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.parallel import one_device
from jaxtrain.types import Example
from jaxtrain.workloads.bird import views
from loaders import base
from loaders.audio import spectrogram


def examples(
    config: Any, model_state: Any, batch: Mapping[str, Any], position: int
) -> Sequence[Example]:
    """Draw the first view of each row. The sound of the same place is read again."""
    c, n = config.model, len(batch["index"])
    made = views.with_spectrograms(c, batch, one_device.shard)["spectrogram"]
    pictures = np.asarray(views.as_picture(views.flat(c, made)[:: c.n_views]))
    waves = batch["waveform"] if "waveform" in batch else _waves(config, n, position)
    waves = None if waves is None else waves.reshape(n, -1, waves.shape[-1])[:, 0] / 32768
    names = c.class_names or ()
    found = []
    for k in range(n):
        sound = None if waves is None else (waves[k], config.data.sample_rate)
        classes = np.flatnonzero(batch["labels"][k]).tolist() if "labels" in batch else []
        classes = [int(batch["label"][k])] if "label" in batch else classes
        text = ", ".join(str(names[i]) if 0 <= i < len(names) else f"class {i}" for i in classes)
        found.append(Example(text=text, pictures={"spectrogram": pictures[k]}, sound=sound))
    return found


def _waves(config: Any, n: int, position: int) -> np.ndarray | None:
    """Read samples int16 of a batch of `loaders.audio.spectrogram`, or None of other loaders."""
    if not isinstance(config.data, spectrogram.Config):
        return None
    data = dataclasses.replace(config.data, form="waveform", dtype="float32")
    loader = spectrogram.make_loader(
        data, split="train", rows=base.Rows(n, ((0, n),)), seed=config.seed
    )
    try:
        loader.seek(position)
        return np.asarray(next(loader)[1]["waveform"][0])
    finally:
        loader.close()
