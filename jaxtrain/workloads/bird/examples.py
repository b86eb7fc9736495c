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
    c = config.model
    n_rows = len(batch["index"])
    x = views.with_spectrograms(c, batch, one_device.shard)["spectrogram"]
    pictures = np.asarray(views.as_picture(views.flat(c, x)[:: c.n_views]))
    waves = batch["waveform"] if "waveform" in batch else _waves(config, n_rows, position)
    examples = []
    for row in range(n_rows):
        sound = None
        if waves is not None:
            first_view = waves[row].reshape(-1, waves.shape[-1])[0]
            sound = (first_view / 32768, config.data.sample_rate)
        text = ", ".join(_class_name(c, i) for i in _classes(batch, row))
        pictures_of_row = {"spectrogram": pictures[row]}
        examples.append(Example(text=text, pictures=pictures_of_row, sound=sound))
    return examples


def _classes(batch: Mapping[str, Any], row: int) -> list[int]:
    if "label" in batch:
        return [int(batch["label"][row])]
    if "labels" in batch:
        return [int(i) for i in np.flatnonzero(batch["labels"][row])]
    return []


def _class_name(c: Any, i: int) -> str:
    names = c.class_names or ()
    return str(names[i]) if 0 <= i < len(names) else f"class {i}"


def _waves(config: Any, n: int, position: int) -> np.ndarray | None:
    """Read samples int16 of a batch of `loaders.audio.spectrogram`, or None of other loaders."""
    if not isinstance(config.data, spectrogram.Config):
        return None
    data = dataclasses.replace(config.data, form="waveform", dtype="float32")
    rows = base.Rows(n, ((0, n),))
    loader = spectrogram.make_loader(data, split="train", rows=rows, seed=config.seed)
    try:
        loader.seek(position)
        return np.asarray(next(loader)[1]["waveform"][0])
    finally:
        loader.close()
