"""A small film whose content is known by its value, for tests."""

import numpy as np

from loaders.film import film_files
from loaders.film.multimodal import Config

TR, FPS, RATE = 1.5, 5.0, 7.0  # 7.5 frames and 10.5 times in a volume: windows of 8 and of 10
VOLUMES, FRAMES, TIMES = 30, 218, 305


def make(folder, *, viewers=3, audio="codes", volumes=VOLUMES, dtype=np.float16):
    """A film whose every frame, code and embedding is known by its value."""
    (folder / "fmri").mkdir(parents=True)
    np.save(
        folder / "video.npy",
        np.arange(FRAMES, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 3), np.uint8),
    )
    times = np.arange(TIMES)[:, None] * 3 + np.arange(2)
    np.save(folder / "audio.npy", times.astype(np.int16 if audio == "codes" else np.float32))
    np.save(folder / "text.npy", np.arange(volumes * 4, dtype=np.float32).reshape(volumes, 4))
    rng = np.random.default_rng(0)
    names = [f"s{i}" for i in range(viewers)]
    for name in names:
        np.save(folder / "fmri" / f"{name}.npy", rng.standard_normal((volumes, 11)).astype(dtype))
    info = {"tr": TR, "fps": FPS, "audio_rate": RATE, "audio": audio, "subjects": names}
    film_files.write(folder, info)
    return Config(path=str(folder))
