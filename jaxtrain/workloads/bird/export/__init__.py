"""Names and further files of an exported bird encoder."""

from collections.abc import Collection, Mapping
from typing import Any

from jaxtrain.types import Export, Hub
from jaxtrain.workloads.bird import vit
from loaders.audio import front_end

METRICS = ("accuracy", "probe_accuracy", "supervised_loss", "probe_loss")
EXAMPLE = '''"""The features of a recording: python example.py bird.ogg"""
import json, pathlib
from sys import argv, exit, stderr
if len(argv) != 2:
    print(f"usage: python {argv[0]} RECORDING    (WAV, FLAC, MP3 or OGG)", file=stderr); exit(2)
import jax
from jaxtrain.workloads.bird import vit
from jaxtrain.types import Export
from loaders.audio import front_end, spectrogram
config = json.loads(pathlib.Path(__file__).with_name("config.json").read_text())
params = vit.read_exported(pathlib.Path(__file__).with_name("model.safetensors"))
c, data = vit.from_saved(config["model"]), config["data"]
clip = {name: data[name] for name in ("clip_seconds", "n_frames")} | {"of": front_end.saved(data)}
wave, rate, _ = spectrogram.decode(pathlib.Path(argv[1]).read_bytes())
x = spectrogram.front_end(wave, round(rate * data.get("time_expansion", 1)), **clip)
encode = jax.jit(lambda params, x: vit.pooled(c, params, vit.encode(c, params, x).patches))
print(*encode(params, x[None])[0].tolist())
'''


def hub(config: Mapping[str, Any], files: Collection[str]) -> Hub:
    """Return the model's part of a card, whose example names classes if the export has them."""
    example = "$ python example.py bird.ogg"
    class_names = (config.get("model") or {}).get("class_names")
    if class_names and "objective/supervised/w" in files:
        example = "$ jaxtrain detect . bird.ogg --out found"
    return Hub("jaxtrain", task(config), METRICS, example)


def task(config: Mapping[str, Any]) -> str:
    """Return the Hub's task of a run's model: classification if it was trained with labels."""
    supervised = (config.get("model") or {}).get("supervised") or {}
    if supervised.get("weight", 0) > 0:
        return "audio-classification"
    return "feature-extraction"


def files(config: Mapping[str, Any], dtype: Any) -> dict[str, bytes]:
    """Return example.py, which needs this package. Raises ValueError: two front ends are named."""
    front_end.of_run(config)
    return {"example.py": EXAMPLE.encode()}


EXPORT = Export(names=vit.export_names, files=files, hub=hub, needed="^encoder/")
