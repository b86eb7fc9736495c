"""A small audio language model from nothing: it plays and names classes of sound.

Then it learns others with adapters.

    python -m tools.demo_higgs [--data PATH] [--out runs/higgs-demo]
        [--config.section.field=value …]  (make higgs-demo)

PATH is a folder of sounds with classes as configs/esc10.py takes it (default: JAXTRAIN_ESC10, else
the built-in birds). Each step is a command, which is printed first:

1. A codec is learned from the training recordings, which prints its error after each codebook.
2. The base is trained, all of it, on the first six tenths of the classes: "dog" → sound, and sound
   → "dog".
3. Adapters are trained on the other classes, on the frozen base in bfloat16.
4. Adapters are exported for peft, and merged as safetensors.
5. The merged model plays each new class: WAV files and spectrograms, in OUT/played.

It ends with the loss on held-out recordings of the new classes, before and after. It exits with 1
when a step failed, or when the loss did not fall, of sound alone and by a tenth with text.
"""

import argparse
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxtrain import config as config_lib
from jaxtrain.parallel import layout as layout_lib
from jaxtrain.telemetry import metrics
from jaxtrain.types import Variables
from jaxtrain.workloads.audio_language import generate_audio
from jaxtrain.workloads.audio_language import loss as audio_loss
from loaders import _rust
from loaders.audio import demo, shards
from loaders.base import Rows
from loaders.chat import chat_audio, demo_chat

SECONDS = 3.2  # of an example, one of several parts of a recording
OFFSETS = (0.0, 0.6, 1.2, 1.8)  # [s]
EACH = 12  # played clips of each new class
FALL = 0.1


class Recording(NamedTuple):
    path: str  # relative to the manifests
    name: str  # of its class


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tools.demo_higgs", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--data", default=os.environ.get("JAXTRAIN_ESC10", ""))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/higgs-demo"))
    args, rest = parser.parse_known_args(argv)
    began, out = time.perf_counter(), args.out.absolute()
    shutil.rmtree(out, ignore_errors=True)  # of an earlier demo
    splits = {split: unpack(args.data or "demo", split, out) for split in ("train", "test")}
    names = sorted({r.name for r in splits["train"]})
    old, new = names[: round(0.6 * len(names))], names[round(0.6 * len(names)) :]
    print(
        f"{len(splits['train'])} recordings to learn from, {len(splits['test'])} held out; the"
        f" base's classes are {', '.join(old)}; new ones {', '.join(new)}"
    )
    for kind, classes in (("base", old), ("adapters", new)):
        for split, found in splits.items():
            examples = [
                s
                for r in found
                if r.name in classes
                for s in conversations(r, OFFSETS if split == "train" else (0.6,))
            ]
            (out / f"{kind}-{split}.json").write_text(json.dumps(examples))
    demo_chat.tokenizer(out / "tokenizer.json")

    def run(*command: object) -> None:
        words = ["jaxtrain", *map(str, command)]
        print(f"[{time.perf_counter() - began:4.0f} s] {shlex.join(words)}", flush=True)
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        if code := subprocess.run([sys.executable, "-m", *words], env=env).returncode:
            sys.exit(f"tools.demo_higgs: {words[1]} ended with {code}")

    def train(kind: str, *more: str) -> None:
        flags = [f"--config.data.{name}={value}" for name, value in data_flags(out, kind).items()]
        run(
            "train",
            f"--config=configs/higgs_demo.py:{kind}",
            f"--config.workdir={out / kind}",
            *flags,
            *more,
            *rest,
        )

    sizes = ["--codebooks=4", "--size=128", "--rounds=10", "--frames=40000", "--components=64"]
    run("train-codec", out / "codec.npz", out / "sounds" / "train", *sizes)
    train("base")
    run("export", out / "base", "--out", out / "base-weights")
    train("adapters", f"--config.warm_start.source={out / 'base-weights'}")
    run("lora-to-peft", out / "adapters", "--out", out / "peft")
    run("export", out / "adapters", "--out", out / "merged")
    playing = [f"--each={EACH}", f"--seconds={SECONDS}", "--temperature=0.6"]
    run("generate-audio", out / "merged", *new, "--out", out / "played", *playing)
    before, after = (held_out(out, weights) for weights in ("base-weights", "merged"))
    for name in ("text", "audio", "loss"):
        print(f"  {name:6} of new classes: {before[name]:.3f} before, {after[name]:.3f} after")
    good = after["loss"] < (1 - FALL) * before["loss"] and after["audio"] < before["audio"]
    print(
        f"{time.perf_counter() - began:.0f} s; the loss"
        f" {'fell' if good else 'did not fall enough'}; listen to {out}/played"
    )
    return 0 if good else 1


def unpack(data: str, split: str, out: pathlib.Path) -> list[Recording]:
    folder = data
    if data == "demo":
        folder = str(demo.ensure())
    label = "ebird_code" if data == "demo" else "label"
    index = _rust.Index([str(p) for p in shards.find_shards(folder, split)], label=label)
    (out / "sounds" / split).mkdir(parents=True)
    unpacked = []
    names = index.class_names or []
    for row in range(index.n_rows):
        name = names[index.labels[row]].replace("_", " ")
        suffix = pathlib.Path(index.path(row) or "x.ogg").suffix or ".ogg"
        path = f"sounds/{split}/{row:03}{suffix}"
        (out / path).write_bytes(index.encoded(row))
        unpacked.append(Recording(path, name))
    return unpacked


def conversations(recording: Recording, offsets: Sequence[float]) -> list[dict[str, Any]]:
    """Asked for a class, it is played; played a recording, its class is named."""
    examples = []
    for offset in offsets:
        audio = [
            {"type": "audio", "audio_url": recording.path, "offset": offset, "duration": SECONDS}
        ]
        for question, answer in ((recording.name, audio), (audio, recording.name)):
            examples.append(
                {
                    "messages": [
                        {"role": "user", "content": question},
                        {"role": "assistant", "content": answer},
                    ]
                }
            )
    return examples


def data_flags(out: pathlib.Path, kind: str) -> dict[str, str | float]:
    files = {
        "manifest": f"{kind}-train.json",
        "test": f"{kind}-test.json",
        "tokenizer": "tokenizer.json",
        "codec": "codec.npz",
    }
    return {name: str(out / file) for name, file in files.items()} | {"bad_budget": 0.05}


def held_out(out: pathlib.Path, weights: str) -> Mapping[str, float]:
    """Return an evaluation of exported weights on the held-out recordings of the new classes."""
    speaker = generate_audio.load(str(out / weights))
    data = config_lib.section(chat_audio.Config, data_flags(out, "adapters"))
    layout = layout_lib.make_layout(layout_lib.make_mesh(1, 1, 1, devices=jax.devices()[:1]), {})
    task = audio_loss.make_task(config_lib.Config(model=speaker.model), layout.shard, 32)
    evaluate = jax.jit(lambda params, batch: task.evaluate(Variables(params), batch))
    loader = chat_audio.make_loader(data, split="test", rows=Rows(32, ((0, 32),)), seed=0)
    sums = [
        evaluate(speaker.params, {name: batch[name][0] for name in task.axes})
        for _, batch in loader
    ]
    return task.finish(metrics.mean(sums))


if __name__ == "__main__":
    sys.exit(main())
