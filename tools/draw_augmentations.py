"""Draw the augmentations of jaxtrain.workloads.bird.augment.

python -m tools.draw_augmentations [--out tools/augmentations.png]

Each row is one augmentation alone, as it is drawn for the same recording in three epochs. Below them are all together.
Partners of mixup and backgrounds are other recordings. Without --data it draws the built-in demo birds.
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from jaxtrain.workloads.bird import augment
from loaders.audio import spectrogram
from loaders.base import Rows

EXAMPLES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "random resized crop": dict(crop=0.3),
    "time shift": dict(shift=200),
    "background": dict(background=1.0, background_snr=(0.0, 6.0)),
    "mixup": dict(mixup=4.0),
    "gain": dict(gain=0.5),
    "noise": dict(noise=0.15),
    "time masks": dict(time_masks=2, time_mask=100),
    "mel masks": dict(mel_masks=2, mel_mask=24),
    "all of them": dict(
        crop=0.5, shift=200, background=0.5, mixup=0.4, gain=0.2, noise=0.05, time_masks=2, mel_masks=2, time_mask=60
    ),
}
EPOCHS = 3
GAP, TITLE = 6, 14  # [pixels]


def draw(rows: np.ndarray, *, seed: int = 0) -> Image.Image:
    """float32 [≥ 4, F, W] recordings: the first is drawn, the second is its partner, the others are backgrounds."""
    frames, mels = rows.shape[1:]
    low, high = np.percentile(rows[0], [1, 99.9])
    picture = Image.new("L", (EPOCHS * (frames + GAP), len(EXAMPLES) * (mels + TITLE + GAP)), 255)
    pen = ImageDraw.Draw(picture)
    for i, (name, fields) in enumerate(EXAMPLES.items()):
        top = i * (mels + TITLE + GAP)
        pen.text((0, top + 1), name, fill=0)
        for epoch in range(EPOCHS):
            batch: Any = {
                "spectrogram": rows[:2],
                "background": rows[2:4],
                "index": np.arange(2, dtype=np.int32),
                "epoch": np.full(2, epoch, np.int32),
            }
            x = np.asarray(augment.augment(augment.Config(**fields), seed, batch).x[0])
            grey = (255 * (1 - np.clip((x - low) / (high - low), 0, 1))).astype(np.uint8)
            picture.paste(Image.fromarray(grey.T[::-1]), (epoch * (frames + GAP), top + TITLE))  # mel up, time to the right
    return picture


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="demo")
    parser.add_argument("--out", default="tools/augmentations.png")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    config = spectrogram.Config(train=args.data, label="", test_share=0.0)
    loader = spectrogram.make_loader(config, split="train", rows=Rows(4, ((0, 4),)), seed=args.seed)
    rows = next(loader)[1]["spectrogram"][0].astype(np.float32)
    loader.close()
    out = pathlib.Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    picture = draw(rows, seed=args.seed)
    picture.reduce(2).quantize(16).save(out, optimize=True)  # a file for a repository
    print(out)


if __name__ == "__main__":
    main()
