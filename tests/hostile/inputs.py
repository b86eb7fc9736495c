"""Small inputs of every kind, as commands read them, for `damage` to damage. Each function fills an
empty folder."""

import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import wave

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).parents[2]
AUDIO = pa.struct({"bytes": pa.binary(), "path": pa.string()})
BIRDS = dict(embed=16, depth=1, heads=1, patch=(16, 16), n_frames=32, n_mels=128, dtype="float32")
SMALL = (
    "--config.model.embed=16 --config.model.depth=1"
    " --config.model.heads=1 --config.model.patch=(16,16) --config.data.clip_seconds=0.3"
    " --config.data.n_frames=32 --config.data.threads=1 --config.data.label=label"
    " --config.data.test_share=0 --config.train.batch=2 --config.train.steps=1"
    " --config.optim.warmup=0 --config.train.eval_every=0"
)
LANGUAGE = dict(
    embed=16, depth=1, heads=2, kv_heads=1, mlp=32, vocab=64, context=16, dtype="float32"
)


def tone(seconds: float = 0.3, rate: int = 32_000) -> bytes:
    """A WAV of 16 bits, mono."""
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        t = np.arange(int(seconds * rate)) / rate
        file.writeframes((np.sin(2 * np.pi * 440 * t) * 10_000).astype("<i2").tobytes())
    return content.getvalue()


def table(rows: int = 4, *, lists: bool = False, paths: bool = False) -> pa.Table:
    """Recordings with a class each, or a list of classes. Every other recording, or every one, is
    the path of a file."""
    audio = [
        {"bytes": None if paths or i % 2 else tone(0.25), "path": f"{i}.wav"} for i in range(rows)
    ]
    label = {"names": ["a", "b", "c"], "_type": "ClassLabel"}
    features = {
        "audio": {"_type": "Audio"},
        "label": label,
        "labels": {"feature": label, "_type": "List"},
    }
    name, values, kind = "label", [0, 1, 2, 1], pa.int64()
    if lists:
        name, values, kind = "labels", [[0, 1], [], [2], None], pa.list_(pa.int64())
    schema = pa.schema({"audio": AUDIO, name: kind})
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    return pa.table([pa.array(audio, AUDIO), pa.array((values * rows)[:rows], kind)], schema=schema)


def _arrow(path: pathlib.Path, content: pa.Table) -> None:
    with pa.ipc.new_stream(str(path), content.schema) as writer:
        writer.write_table(content, max_chunksize=2)


def recordings(folder: pathlib.Path) -> None:
    """Recordings as datasets.save_to_disk writes them, and recordings in files."""
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name in names:
        _arrow(folder / name, table())
    for i in (1, 3):
        (folder / f"{i}.wav").write_bytes(tone(0.22))
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": name} for name in names]})
    )


def parquet(folder: pathlib.Path) -> None:
    """Recordings as the Hub stores them."""
    (folder / "data").mkdir()
    pq.write_table(table(), folder / "data" / "train-00000-of-00001.parquet", row_group_size=2)
    for i in (1, 3):
        (folder / "data" / f"{i}.wav").write_bytes(tone(0.22))


def annotated(folder: pathlib.Path) -> None:
    """Recordings, and a table of events in them."""
    for i in range(3):
        (folder / f"{i}.wav").write_bytes(tone(0.5 + 0.1 * i))
    lines = [f"{i}.wav,0.0,0.{k},{'ab'[i % 2]}" for i in range(3) for k in (2, 3)]
    (folder / "labels.csv").write_text("file,start,end,label\n" + "\n".join(lines) + "\n")


def index(folder: pathlib.Path) -> None:
    """The output of `jaxtrain index`, for recordings in the same folder."""
    source = folder.parent / "indexed"
    source.mkdir(exist_ok=True)
    annotated(source)
    command = [sys.executable, "-m", "jaxtrain.cli", "index", str(source), "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    about = json.loads((folder / "index.json").read_text())
    for i in range(3):
        shutil.copy(source / f"{i}.wav", folder)
    (folder / "index.json").write_text(json.dumps({**about, "root": "."}))


def class_lists(folder: pathlib.Path) -> None:
    """Recordings of several classes, in a stream and in a table."""
    _arrow(folder / "a.arrow", table(lists=True))


def events(folder: pathlib.Path) -> None:
    """Events of recordings, with their times and the name of the recording."""
    found = table(lists=True)
    for name, values in (("start_time", [0.0, 0.1, 0.2, 0.0]), ("end_time", [0.1, 0.2, 0.3, 0.1])):
        found = found.append_column(name, pa.array(values))
    _arrow(
        folder / "events.arrow",
        found.append_column("filepath", pa.array(["0.wav", "0.wav", "1.wav", "1.wav"])),
    )


def class_lists_parquet(folder: pathlib.Path) -> None:
    pq.write_table(table(lists=True), folder / "a.parquet")


def sounds(folder: pathlib.Path) -> None:
    """A manifest of conversations, its recordings, a codec and a tokenizer."""
    from loaders.chat import codec, demo_chat

    rng = np.random.default_rng(0)
    for i in range(2):
        (folder / f"{i}.wav").write_bytes(tone(0.4 + 0.2 * i))
    audio = [
        {"type": "audio", "audio_url": f"{i}.wav", "offset": 0.0, "duration": 0.2} for i in range(2)
    ]
    samples = [
        {
            "messages": [
                {"role": "user", "content": "play"},
                {"role": "assistant", "content": [audio[0]]},
            ],
            "start_index": 0,
        },
        {
            "messages": [
                {"role": "user", "content": ["what?", audio[1]]},
                {"role": "assistant", "content": "a tone"},
            ]
        },
    ]
    (folder / "manifest.json").write_text(json.dumps(samples))
    codec.train(
        rng.normal(size=(40, 512)).astype("f4"), codebooks=2, size=16, components=8, rounds=1
    ).save(folder / "codec.npz")
    demo_chat.tokenizer(folder / "tokenizer.json")


def texts(folder: pathlib.Path) -> None:
    """Documents in every kind of file that `jaxtrain tokens` reads."""
    lines = [{"text": f"document {i}"} for i in range(4)]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "b.txt").write_text("one\n\ntwo\n")
    pq.write_table(pa.Table.from_pylist(lines), folder / "c.parquet")
    _arrow(folder / "d.arrow", pa.Table.from_pylist(lines))


def tokens(folder: pathlib.Path) -> None:
    """A folder of token files."""
    from loaders.text import token_files

    documents = [np.arange(5 + i) for i in range(6)]
    shards = [
        token_files.write_shard(folder, f"{i:05}", documents, [9] * 6, np.uint16) for i in range(2)
    ]
    token_files.write_about(folder, vocab=64, eos=None, tokenizer=None, shards=shards)


def film(folder: pathlib.Path) -> None:
    """The output of `jaxtrain prepare-giblet`."""
    from loaders.film import film_files

    (folder / "fmri").mkdir()
    rng = np.random.default_rng(0)
    np.save(folder / "video.npy", rng.integers(0, 255, (40, 4, 4, 3), np.uint8))
    np.save(folder / "audio.npy", rng.normal(size=(40, 3)).astype("f4"))
    np.save(folder / "text.npy", rng.normal(size=(10, 3)).astype("f4"))
    for name in "ab":
        np.save(folder / "fmri" / f"{name}.npy", rng.normal(size=(10, 5)).astype("f4"))
    film_files.write(
        folder,
        {"tr": 1.0, "fps": 4.0, "audio_rate": 4.0, "audio": "features", "subjects": ["a", "b"]},
    )


def boards(folder: pathlib.Path) -> None:
    """Sudoku boards in numpy's files."""
    arrays = {
        "inputs": np.ones((4, 81), np.uint8),
        "labels": np.full((4, 81), 2, np.uint8),
        "puzzle_identifiers": np.zeros(4, np.int32),
        "puzzle_indices": np.arange(5, dtype=np.int32),
        "group_indices": np.arange(5, dtype=np.int32),
    }
    for split in ("train", "test"):
        (folder / split).mkdir()
        for name, x in arrays.items():
            np.save(folder / split / f"all__{name}.npy", x)


def embeddings(folder: pathlib.Path) -> None:
    """The output of `jaxtrain embed`."""
    n, rng = 12, np.random.default_rng(0)
    arrays = {
        "mean": rng.normal(size=(n, 4)).astype("f4"),
        "label": np.arange(n) % 2,
        "weight": np.ones(n, "f4"),
        "index": np.arange(n),
        "scores": rng.normal(size=(n, 2)).astype("f4"),
        "fold": np.arange(n) % 3,
    }
    for name, x in arrays.items():
        np.save(folder / f"{name}.npy", x)
    about = {
        "version": 1,
        "done": n,
        "rows": n,
        "class_names": ["a", "b"],
        "multilabel": False,
        "model": "a run",
        "kinds": ["mean"],
    }
    (folder / "embeddings.json").write_text(json.dumps(about))


def whole_rows(folder: pathlib.Path) -> None:
    """Embeddings that state the places of their rows."""
    embeddings(folder)
    n = len(np.load(folder / "mean.npy"))
    places = {
        "path": [f"{i % 3}.wav" for i in range(n)],
        "start": [0.1 * (i // 3) for i in range(n)],
    }
    pq.write_table(
        pa.table({**places, "end": [x + 0.2 for x in places["start"]], "clock": [""] * n}),
        folder / "rows.parquet",
    )


def head(folder: pathlib.Path) -> None:
    """The output of `jaxtrain fit`."""
    from jaxtrain.workloads.bird.inference import heads

    arrays = {"w": np.ones((4, 1), "f4"), "b": np.zeros(1, "f4")}
    heads.save(
        folder / "head.npz",
        heads.Head("linear", "mean", "sigmoid", arrays, ("a",), "", np.ones(1, "f4")),
    )


def head_of_run(folder: pathlib.Path) -> None:
    """The output of `jaxtrain fit`, for features of the run of the bird encoder."""
    from jaxtrain.workloads.bird.inference import heads

    n = BIRDS["embed"]
    arrays = {
        "mean": np.zeros(n, "f4"),
        "prototypes": np.ones((1, 2, n), "f4"),
        "scale": np.ones(1, "f4"),
    }
    arrays["b"] = np.zeros(1, "f4")
    heads.save(
        folder / "head.npz",
        heads.Head("patches", "mean", "sigmoid", arrays, ("a",), "", np.full(1, 0.5, "f4")),
    )


def codes(folder: pathlib.Path) -> None:
    """Codes from another program."""
    np.savez(folder / "codes.npz", **{"0.wav": np.ones((2, 5), np.int16)})
    pq.write_table(
        pa.Table.from_pylist([{"audio_url": "0.wav", "codes": [[1, 2], [3, 4]]}]),
        folder / "codes.parquet",
    )


def jobs(folder: pathlib.Path) -> None:
    """The notes that `jaxtrain launch` keeps about submitted jobs."""
    (folder / "slurm").mkdir()
    (folder / "slurm" / "jobs.jsonl").write_text(
        json.dumps({"job": "12", "workdir": str(folder)}) + "\n"
    )
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 30}}))
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 10, "split": "train", "loss": 1.0}) + "\n"
    )


def birds(folder: pathlib.Path) -> None:
    """A run of the bird encoder: the weights of one step, and its metrics."""
    from jaxtrain.workloads.bird import model as bird

    data = dict(train="recordings", label="label", clip_seconds=0.3, n_frames=32, threads=1)
    _run(folder, bird, BIRDS, data, lambda c: {"encoder": _vit().make_specs(c)})


def birds_with_head(folder: pathlib.Path) -> None:
    """A run of the bird encoder with a head for two classes, and their names."""
    from jaxtrain.workloads.bird import model as bird

    data = dict(train="recordings", label="label", clip_seconds=0.3, n_frames=32, threads=1)
    _run(folder, bird, {**BIRDS, "n_classes": 2, "class_names": ("a", "b")}, data, bird.make_specs)


def detected(folder: pathlib.Path) -> None:
    """The output of `jaxtrain detect`."""
    run, source = folder.parent / "run-that-detects", folder.parent / "heard"
    for place, make in ((run, birds_with_head), (source, annotated)):
        place.mkdir(exist_ok=True)
        make(place)
    command = [
        sys.executable,
        "-m",
        "jaxtrain.cli",
        "detect",
        str(run),
        str(source),
        "--out",
        str(folder),
        "--batch",
        "2",
    ]
    environment = {**os.environ, "XLA_FLAGS": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)


def trained(folder: pathlib.Path) -> None:
    """A run of the bird encoder that can be resumed."""
    data = folder.parent / "trained-on" / "recordings"
    data.mkdir(parents=True, exist_ok=True)
    recordings(data)
    config = (
        f"--config={ROOT / 'configs' / 'xcm.py'}:{data} --config.workdir={folder}"
        " --config.train.steps=1"
    )
    command = [sys.executable, "-m", "jaxtrain.main", *config.split(), *SMALL.split()]
    environment = {**os.environ, "XLA_FLAGS": ""}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    shutil.rmtree(folder / "logs", ignore_errors=True)


def language(folder: pathlib.Path) -> None:
    """A run of a language model."""
    from jaxtrain.workloads.language import model as workload

    _run(folder, workload, LANGUAGE, {}, workload.make_specs)


def solver(folder: pathlib.Path) -> None:
    """A run of the recursive model on boards of 4 × 4."""
    from jaxtrain.workloads.trm import model as trm

    model = dict(
        n_cells=16,
        vocab=6,
        n_puzzles=1,
        n_difficulties=1,
        embed=16,
        heads=2,
        depth=1,
        inner_multiple=16,
    )
    model |= dict(
        puzzle_tokens=1, puzzle_embed=16, cycles_high=1, cycles_low=1, halt_steps=2, dtype="float32"
    )
    _run(
        folder,
        trm,
        model,
        {},
        trm.make_specs,
        model_state={name: np.ones(16, "f4") for name in ("init_h", "init_l")},
    )


def masked_film(folder: pathlib.Path) -> None:
    """The output of `jaxtrain prepare-giblet`, with the mask."""
    import nibabel

    film(folder)
    voxels = np.load(sorted((folder / "fmri").glob("*.npy"))[0]).shape[1]
    nibabel.save(
        nibabel.Nifti1Image(np.ones((voxels, 1, 1), np.uint8), np.eye(4)), folder / "mask.nii.gz"
    )


def brains(folder: pathlib.Path) -> None:
    """A run of the autoencoder of fMRI encoding (giblet)."""
    import jax

    from jaxtrain import specs
    from jaxtrain.workloads.giblet import model as giblet
    from loaders.film import multimodal

    source = folder.parent / "film-of-brains"
    source.mkdir(exist_ok=True)
    film(source)
    info = multimodal.dataset_info(multimodal.Config(path=str(source), test_share=0.0))
    widths = dict(
        video_widths=(4, 4, 4),
        audio_widths=(4, 4),
        text_widths=(4, 4),
        trunk_widths=(4, 4),
        bottleneck=4,
    )
    widths |= dict(
        head_width=4,
        decoder_widths=(4, 4, 4, 4),
        decode_video_widths=(4, 4),
        decode_audio_widths=(4, 4),
    )
    model = {**widths, "decode_text_widths": (4, 4), "dtype": "float32"}
    model |= {name: info[name] for name in (*giblet.SIZES, "audio")}
    model_state = giblet.make_model_state(giblet.Config(**model))
    leaves = zip(
        specs.paths(model_state), jax.tree.leaves(model_state, is_leaf=specs.is_spec), strict=True
    )
    _run(
        folder,
        giblet,
        model,
        {},
        giblet.make_specs,
        model_state={path: np.ones(spec.shape, "f4") for path, spec in leaves},
    )


def puzzles(folder: pathlib.Path) -> None:
    """Boards as `jaxtrain sudoku` writes them."""
    (folder / "test.csv").write_text(
        "source,question,answer,rating\na,1.34341221434.21,1234341221434321,0\n"
    )


def adapters(folder: pathlib.Path) -> None:
    """The adapters of a language model."""
    from jaxtrain.workloads.language import model as workload

    given = {
        "blocks": {"w_q": {"w_a": np.ones((1, 2, 16), "f4"), "w_b": np.ones((1, 2, 8, 2), "f4")}}
    }
    _run(folder, workload, LANGUAGE, {}, lambda c: {}, adapters=given)


def speech(folder: pathlib.Path) -> None:
    """A run of the audio language model."""
    from jaxtrain.workloads.audio_language import model as audio_language

    model = {**LANGUAGE, "codebooks": 2, "codebook_size": 16}
    names = ("manifest", "tokenizer", "codec")
    data = dict(
        zip(
            names,
            ("sounds/manifest.json", "sounds/tokenizer.json", "sounds/codec.npz"),
            strict=True,
        )
    )
    _run(folder, audio_language, model, data, audio_language.make_specs)


def export(folder: pathlib.Path) -> None:
    """An export of the run of the bird encoder, in two files of one layer each."""
    from jaxtrain.arrays import safetensors

    run = folder.parent / "run-for-export"
    run.mkdir()
    birds(run)
    safetensors.export(str(run), str(folder), safetensors.Options(shard_size=9_000))


def timm(folder: pathlib.Path) -> None:
    """An encoder from elsewhere, with timm's names."""
    for path in (ROOT / "tests" / "data" / "timm" / "pooled").iterdir():
        shutil.copy(path, folder)
    (folder / "front_end.json").write_text(json.dumps({"sample_rate": 32_000, "clip_seconds": 0.3}))


def birdset(folder: pathlib.Path) -> None:
    """Segments of an unpacked set of BirdSet, with their metadata."""
    for i in range(4):
        (folder / f"{i}.wav").write_bytes(tone(0.3 + 0.01 * i))
    codes = (["a"], ["b"], [], ["a", "b"])
    rows = [
        {"filepath": f"{i}.wav", "ebird_code": None, "ebird_code_multilabel": each}
        for i, each in enumerate(codes)
    ]
    schema = pa.schema(
        [
            ("filepath", pa.string()),
            ("ebird_code", pa.string()),
            ("ebird_code_multilabel", pa.list_(pa.string())),
        ]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "HSN_metadata_test_5s.parquet")


def clips_in_folds(folder: pathlib.Path) -> None:
    """ESC-10 as it is published: two classes in five folds."""
    for name in ("audio", "meta"):
        (folder / name).mkdir()
    lines = [f"{fold}-{k}.wav,{fold},{k},{'ab'[k]},True" for fold in range(1, 6) for k in range(2)]
    (folder / "meta" / "esc50.csv").write_text(
        "\n".join(["filename,fold,target,category,esc10", *lines]) + "\n"
    )
    for i, line in enumerate(lines):
        (folder / "audio" / line.partition(",")[0]).write_bytes(tone(0.3 + 0.01 * i))


def embedded(folder: pathlib.Path) -> None:
    """The output of `jaxtrain embed`, by the run of the bird encoder of `birds`."""
    run, source = folder.parent / "run-that-embeds", folder.parent / "embedded-index"
    for place, make in ((run, birds), (source, index)):
        place.mkdir(exist_ok=True)
        make(place)
    command = [
        sys.executable,
        "-m",
        "jaxtrain.cli",
        "embed",
        str(run),
        "--data",
        str(source),
        "--out",
        str(folder),
    ]
    subprocess.run(
        [*command, "--batch", "2"],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": ""},
        check=True,
        capture_output=True,
    )


def _vit():
    from jaxtrain.workloads.bird import vit

    return vit


def _run(
    folder: pathlib.Path,
    workload,
    model: dict,
    data: dict,
    table_of,
    adapters: dict | None = None,
    model_state: dict | None = None,
) -> None:
    """A workdir whose only step holds weights."""
    import dataclasses

    import jax

    from jaxtrain import specs
    from jaxtrain.arrays import saved_steps
    from jaxtrain.arrays.stored import Stored

    c = workload.Config(**model)
    table = table_of(c)
    arrays = {"step": _stored(Stored, np.array(10, np.int32), ("step",))}
    leaves = zip(specs.paths(table), jax.tree.leaves(table, is_leaf=specs.is_spec), strict=True)
    found = {path: np.full(spec.shape, 0.1, np.float32) for path, spec in leaves}
    for path, x in {**found, **_flat(adapters or {})}.items():
        arrays[f"params/{path}"] = _stored(Stored, x, ("params", *path.split("/")))
    for name, x in (model_state or {}).items():
        arrays[f"model_state/{name}"] = _stored(Stored, x, ("model_state", *name.split("/")))
    config = {
        "workload": workload.__package__,
        "model": dataclasses.asdict(c),
        "data": data,
        "train": {"steps": 10},
        "seed": 0,
        "warm_start": {"source": ""},
        "lora": {"rank": 2 if adapters else 0, "alpha": 4.0},
    }
    meta = {"config": config, "parameters": "abc", "versions": {"jax": "0.10"}}
    saved_steps.save_weights(str(folder), 10, arrays, data={"position": 10, "seed": 0}, meta=meta)
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 10, "split": "train", "loss": 1.0}) + "\n"
    )


def _stored(cls, x: np.ndarray, keys: tuple):
    return cls(x.shape, x.dtype, lambda index: x[index] if index else x, keys, x.shape)


def _flat(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
    found = {}
    for key, value in tree.items():
        found |= (
            _flat(value, f"{prefix}{key}/")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return found


def workdir(folder: pathlib.Path) -> None:
    """The files that a run leaves for people to read: metrics, goodput, pictures, samples, classes
    and logs."""
    from PIL import Image

    from jaxtrain.telemetry import goodput

    (folder / "config.json").write_text(
        json.dumps({"workload": "x", "train": {"steps": 9}, "optim": {"lr": 1.5}})
    )
    lines = [
        {"step": s, "split": split, "loss": 1 / s, "skipped": 0.0}
        for s in (1, 2, 3)
        for split in ("train", "test")
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "schedule.json").write_text(json.dumps({"step": [0, 5, 9], "lr": [0.0, 1.0, 0.5]}))
    (folder / "generations.jsonl").write_text(
        json.dumps({"step": 2, "prompt": "a", "score": 0.5}) + "\n"
    )
    line = {
        "step": 2,
        "n": 5,
        "classes": 2,
        "rows": [3, 2],
        "right": [2, 1],
        "answers": [3, 2],
        "confused": [[0, 1, 1], [1, 0, 1]],
    }
    (folder / "classes.jsonl").write_text(json.dumps(line) + "\n")
    clock = goodput.Clock()
    clock.open(
        str(folder), process=0, processes=1, facts={"versions": {"jax": "1"}, "commit": "abc"}
    )
    clock.close("ended")
    (folder / "logs").mkdir()
    (folder / "logs" / "process-0.log").write_text(
        "2026-01-01 00:00:00,000 WARNING step 2 skipped\n"
    )
    (folder / "pictures").mkdir()
    for name in ("input_0.png", "step000002_restored_0.png"):
        Image.fromarray(np.zeros((2, 2), np.uint8)).save(folder / "pictures" / name)
    (folder / "traces" / "steps-000001-000002-process-0" / "plugins" / "profile" / "now").mkdir(
        parents=True
    )
    [place] = (folder / "traces").glob("*/plugins/profile/now")
    (place / "host.xplane.pb").write_bytes(xspace())


def xspace() -> bytes:
    """A trace of one operation, as the profiler of a CPU writes it, with the scope of its
    instruction."""

    def field(number: int, value: bytes | int) -> bytes:
        if isinstance(value, int):
            return bytes([number << 3, value])
        size = (
            bytes([len(value)])
            if len(value) < 128
            else bytes([len(value) & 127 | 128, len(value) >> 7])
        )
        return bytes([number << 3 | 2]) + size + value

    instruction = field(1, b"dot.1") + field(
        7, field(2, b"jit(step)/loss_and_grad/jvp(x)/dot_general")
    )
    program = field(1, field(3, field(2, instruction)))
    kind = field(
        4,
        field(1, 1)
        + field(2, field(1, 1) + field(2, b"dot") + field(5, field(1, 9) + field(6, program))),
    )
    stat = field(5, field(1, 3) + field(2, field(1, 3) + field(2, b"hlo_op")))
    event = field(
        4, field(1, 1) + field(2, 5) + field(3, 100) + field(4, field(1, 3) + field(5, b"dot.1"))
    )
    plane = field(1, field(2, b"/host:CPU") + kind + stat + field(3, field(2, b"thread") + event))
    return plane
