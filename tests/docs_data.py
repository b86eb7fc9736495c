"""Small data of every kind that the docs' commands name, in one folder, under a reader's paths."""

import io
import json
import pathlib
import shutil
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import soundfile

from loaders.chat import demo_chat
from tests.support import chat, corpus, small_runs

TESTS = pathlib.Path(__file__).parent
NAMES = ("blackbird", "chiffchaff", "wren")
WORDS = "the wren sings at dawn and the owl hears it far away over wet fields of rye".split()


def make(folder: pathlib.Path) -> None:
    """Fill ``folder``, which must not contain the names below yet."""
    birds(folder)
    encoder(folder / "path" / "to" / "Bird-MAE-Base")
    recordings(folder)
    texts(folder)
    sounds(folder)
    small_runs.film(folder / "data" / "film")
    qwen = folder / "path" / "to" / "Qwen2.5-0.5B"
    shutil.copytree(TESTS / "data" / "lm" / "qwen2", qwen)
    shutil.copyfile(folder / "tokenizer.json", qwen / "tokenizer.json")
    weights = folder / "path" / "to" / "weights"
    weights.mkdir(parents=True)
    for source, name in (
        ("config.json", "config.json"),
        ("weights.safetensors", "model.safetensors"),
    ):
        shutil.copyfile(TESTS / "data" / "higgs" / source, weights / name)
    demo_chat.tokenizer(weights / "tokenizer.json")


def table(n: int, label: str, *, lists: bool = False) -> pa.Table:
    """``n`` recordings of 0.3 s with a class, or a list of classes, in the column ``label``."""
    feature: dict = {"names": list(NAMES), "_type": "ClassLabel"}
    kind = pa.list_(pa.int64()) if lists else pa.int64()
    features = {
        "audio": {"_type": "Audio"},
        label: {"feature": feature, "_type": "Sequence"} if lists else feature,
    }
    schema = pa.schema({"audio": corpus.AUDIO, label: kind})
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    labels = (
        [[i % 3] if i % 4 else [0, 2] for i in range(n)] if lists else [i % 3 for i in range(n)]
    )
    audio = [{"bytes": corpus.wav(i, 0.3), "path": f"{i}.wav"} for i in range(n)]
    return pa.table([pa.array(audio, corpus.AUDIO), pa.array(labels, kind)], schema=schema)


def birds(folder: pathlib.Path) -> None:
    """Write data/XCM and data/XCL as one folder, data/HSN with lists of classes and its splits, and
    data/esc10 with five folds."""
    corpus.save_to_disk(folder / "data" / "XCM", [table(20, "ebird_code"), table(20, "ebird_code")])
    for split, n in (("train", 24), ("test", 12), ("test_5s", 12)):
        corpus.save_to_disk(
            folder / "data" / "HSN" / split, [table(n, "ebird_code_multilabel", lists=True)]
        )
    folds = [
        table(80, "label").append_column("fold", pa.array([i + 1] * 80, pa.int64()))
        for i in range(5)
    ]
    corpus.save_to_disk(folder / "data" / "esc10" / "train", folds[:4])
    corpus.save_to_disk(folder / "data" / "esc10" / "test", folds[4:])


def encoder(folder: pathlib.Path) -> None:
    """Write a vision transformer in the published form of Bird-MAE: its names and its image, with a
    width of 32 and one layer."""
    import safetensors.numpy

    d, rng = 32, np.random.default_rng(0)
    shapes = {
        "cls_token": (1, 1, d),
        "pos_embed": (1, 257, d),
        "patch_embed.proj.weight": (d, 1, 16, 16),
    }
    shapes |= {
        f"blocks.0.{name}.weight": shape
        for name, shape in (
            ("attn.qkv", (3 * d, d)),
            ("attn.proj", (d, d)),
            ("mlp.fc1", (4 * d, d)),
            ("mlp.fc2", (d, 4 * d)),
        )
    }
    names = (
        "patch_embed.proj",
        *(name.removesuffix(".weight") for name in shapes if name.startswith("blocks")),
    )
    shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in names}
    norms = ("blocks.0.norm1", "blocks.0.norm2", "norm", "fc_norm")
    shapes |= {f"{name}.{part}": (d,) for name in norms for part in ("weight", "bias")}
    folder.mkdir(parents=True)
    arrays = {name: 0.1 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"img_size_x": 512, "img_size_y": 128, "num_heads": 2})
    )


def recordings(folder: pathlib.Path) -> None:
    """Write recordings/ with a folder of sounds for each class, events.csv and Raven's tables/
    about them, and an archive in BirdSet's form."""
    header = "Selection\tBegin Time (s)\tEnd Time (s)\tSpecies"
    (folder / "tables").mkdir()
    lines = ["file,start,end,label"]
    for n in range(12):
        label = ("wren", "owl")[n % 2]
        letter = "abcdefghijkl"[n]  # wren/a.flac is the first one, as on the pages
        name = f"{label}/{letter}.flac"
        path = folder / "recordings" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        samples, rate = soundfile.read(io.BytesIO(corpus.wav(n, 6.0)))
        soundfile.write(path, samples, rate)
        lines.append(f"{name},{n % 4},{n % 4 + 1.5},{label}")
        (folder / "tables" / f"{letter}.Table.1.selections.txt").write_text(
            f"{header}\n1\t1.0\t2.0\t{label}\n"
        )
    (folder / "events.csv").write_text("\n".join(lines))
    archive = folder / "data" / "HSN-archive"
    archive.mkdir(parents=True)
    row = {
        "ebird_code": "a",
        "ebird_code_multilabel": ["a"],
        "start_time": None,
        "end_time": None,
    }
    for number, split in enumerate(("train", "test"), 1):
        name = f"XC{number}.wav"
        pq.write_table(
            pa.Table.from_pylist([{**row, "filepath": name, "low_freq": None, "high_freq": None}]),
            archive / f"HSN_metadata_{split}.parquet",
        )
        (folder / name).write_bytes(corpus.wav(50 + number))
        with tarfile.open(archive / f"HSN_{split}_shard_0001.tar.gz", "w:gz") as tar:
            tar.add(folder / name, name)


def texts(folder: pathlib.Path) -> None:
    """Write texts/*.parquet with tokenizer.json, and input.txt."""
    import tokenizers

    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, 60)) for _ in range(300)]
    (folder / "texts").mkdir()
    pq.write_table(pa.table({"text": lines}), folder / "texts" / "birds.parquet")
    # a prompt of the config begins like this
    (folder / "input.txt").write_text("\n".join(f"ROMEO:\n{line}" for line in lines))
    words = ["[unk]", "<|endoftext|>", *sorted(set(WORDS))]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[unk]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def sounds(folder: pathlib.Path) -> None:
    """Write sounds/ and manifest.json as `jaxtrain train-codec` and configs/higgs.py read them."""
    (folder / "sounds").mkdir()
    for i in range(6):
        file = io.BytesIO()
        soundfile.write(file, chat.wave(i, 1.0), 32_000, format="WAV")
        (folder / "sounds" / f"{i}.wav").write_bytes(file.getvalue())
    samples = [chat.says(f"sounds/{i % 6}.wav", duration=0.4 + 0.1 * (i % 3)) for i in range(24)]
    (folder / "manifest.json").write_text(json.dumps(samples))
    # The output of another codec, of codebooks as in path/to/weights.
    model = json.loads((TESTS / "data" / "higgs" / "config.json").read_text())
    size = model["audio_codebook_size"]
    shape = (model["audio_num_codebooks"], 25)
    rng = np.random.default_rng(0)
    codes = {f"sounds/{i}.wav": rng.integers(0, size, shape, np.int16) for i in range(6)}
    np.savez(folder / "codes.npz", **codes)


if __name__ == "__main__":
    make(pathlib.Path(sys.argv[1]))
