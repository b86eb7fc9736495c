"""Rows of a batch for people: the last frame of the film's window, and whose volume it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.types import Example
from jaxtrain.workloads.giblet.model import CHANNELS, entry


def examples(config: Any, carry: Any, batch: Mapping[str, Any], position: int) -> Sequence[Example]:
    """Draw the window of each row."""
    c = config.model
    frames = np.asarray(entry(batch["video"][:, -c.frame_size :])).reshape(-1, c.height, c.width, CHANNELS)
    grey = frames.mean(-1)[:, ::-1]
    volumes = batch["volume"].tolist()
    return [Example(text=f"volume {volume}", pictures={"last frame": x}) for volume, x in zip(volumes, grey, strict=True)]
