"""jaxtrain index gives the same rows from every source, names every error, and never leaves a
half-written index."""

import json
import os
import pathlib
import struct
import subprocess
import sys
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from jaxtrain import cli
from jaxtrain import config as config_lib
from loaders.audio import shards
from loaders.audio.recordings import headers
from loaders.audio.spectrogram import Config, dataset_info, make_loader
from loaders.base import Rows
from tests.support import corpus

ROOT = pathlib.Path(__file__).parents[2]
RATE = 16_000
SPECIES = {
    "Parus major": "gretit1",
    "Turdus merula": "eurbla",
    "Erithacus rubecula": "eurrob1",
    "Apus apus": "comswi",
}
# recording, start, end, species, low, high; calls of different species overlap
EVENTS = [
    ("a.wav", 0.5, 1.25, "Parus major", 2000.0, 6000.0),
    ("a.wav", 1.0, 1.75, "Turdus merula", 1500.0, 4000.0),
    ("b.flac", 0.0, 2.0, "Erithacus rubecula", 2500.0, 7000.0),
    ("c.mp3", 3.25, 4.5, "Apus apus", 4000.0, 7500.0),
    ("c.mp3", 5.0, 5.5, "Parus major", 2000.0, 6000.0),
    ("d.ogg", 1.5, 2.0, "Turdus merula", 1500.0, 4000.0),
]
SECONDS = {"a.wav": 3.0, "b.flac": 2.0, "c.mp3": 8.0, "d.ogg": 4.0}


def index(*args, code: int = 0, capsys=None) -> str:
    """Runs `jaxtrain index`. Returns its stderr."""
    assert cli.main(["index", *map(str, args)]) == code, capsys.readouterr().err if capsys else ""
    return capsys.readouterr().err if capsys else ""


@pytest.fixture
def recordings(tmp_path):
    folder = tmp_path / "recordings"
    folder.mkdir()
    for seed, (name, seconds) in enumerate(SECONDS.items()):
        kind = name.rpartition(".")[2].upper()
        (folder / name).write_bytes(corpus.encode(corpus.noise(seed, seconds, RATE), RATE, kind))
    return folder


def raven(folder: pathlib.Path, events=EVENTS, names=SECONDS) -> list[pathlib.Path]:
    """A selection table for each recording, as Raven writes it. Each selection appears in both of
    its views."""
    paths = []
    columns = [
        "Selection",
        "View",
        "Channel",
        "Begin Time (s)",
        "End Time (s)",
        "Low Freq (Hz)",
        "High Freq (Hz)",
        "Species",
    ]
    for name in names:
        lines = ["\t".join(columns)]
        for number, (_, start, end, species, low, high) in enumerate(
            (e for e in events if e[0] == name), 1
        ):
            for view in ("Waveform 1", "Spectrogram 1"):
                lines.append("\t".join(map(str, (number, view, 1, start, end, low, high, species))))
        paths.append(folder / f"{name.rpartition('.')[0]}.Table.1.selections.txt")
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


def table(
    folder: pathlib.Path,
    separator: str = ";",
    encoding: str = "latin-1",
    events=EVENTS,
    names=SECONDS,
) -> pathlib.Path:
    del names
    lines = [separator.join(("Datei", "start", "end", "species", "low_freq", "high_freq"))]
    lines += [separator.join(map(str, event[:4] + event[4:])) for event in events]
    path = folder / "events.csv"
    path.write_bytes("\r\n".join(lines).encode(encoding))
    return path


def audacity(folder: pathlib.Path, events=EVENTS, names=SECONDS) -> list[pathlib.Path]:
    paths = []
    for name in names:
        lines = []
        for _, start, end, species, low, high in (e for e in events if e[0] == name):
            lines += [f"{start:.6f}\t{end:.6f}\t{species}", f"\\\t{low:.6f}\t{high:.6f}"]
        paths.append(folder / f"{name.rpartition('.')[0]}.txt")
        paths[-1].write_text("\n".join(lines) + "\n")
    return paths


def rows(folder: pathlib.Path, split: str = "train") -> list[dict]:
    return [
        row
        for path in shards.find_shards(str(folder), split)
        for row in pq.read_table(path).to_pylist()
    ]


def batches(folder: pathlib.Path, n: int = 3, **options) -> list[bytes]:
    config = Config(
        train=str(folder), test_share=0.0, clip_seconds=1.0, n_frames=128, threads=2, **options
    )
    loader = make_loader(config, split="train", rows=Rows(4, ((0, 4),)), seed=3)
    out = []
    for _ in range(n):
        _, batch = next(loader)
        out.append(b"".join(part[0].tobytes() for part in batch.values()))
    loader.close()
    return out


def test_every_source_gives_the_same_rows_and_batches(recordings, tmp_path, capsys):
    labels = tmp_path / "labels"
    labels.mkdir()
    sources = {
        "raven": [*raven(labels)],
        "folder of raven": [labels],
        "csv": [table(tmp_path), "--file-column", "datei"],
        "audacity": None,
    }
    found = {}
    for name, given in sources.items():
        if name == "audacity":
            for path in labels.iterdir():
                path.unlink()
            given = audacity(labels)
        out = tmp_path / name.replace(" ", "-")
        index(*given, "--audio", recordings, "--out", out, capsys=capsys)
        found[name] = rows(out)
        assert found[name] == found["raven"], name
        assert batches(out) == batches(tmp_path / "raven"), name
    events = [
        (r["audio"]["path"], r["start"], r["end"], r["low"], r["high"]) for r in found["raven"]
    ]
    assert events == [(e[0], e[1], e[2], e[4], e[5]) for e in EVENTS]
    names = json.loads((tmp_path / "raven" / "index.json").read_text())["classes"]
    assert names == sorted(SPECIES) and [names[r["label"]] for r in found["raven"]] == [
        e[3] for e in EVENTS
    ]
    assert all(r["rate"] == RATE and r["channels"] == 1 for r in found["raven"])
    # Whole recordings: a folder, and a table with the same content.
    for name in SECONDS:
        species = next(e[3] for e in EVENTS if e[0] == name)
        (recordings / species).mkdir(exist_ok=True)
        (recordings / name).rename(recordings / species / name)
    index(recordings, "--out", tmp_path / "folder", capsys=capsys)
    lines = [
        f"{path.relative_to(recordings)},{path.parent.name}"
        for path in sorted(recordings.rglob("*.*"))
    ]
    (tmp_path / "whole.tsv").write_text("\n".join(["filename,label", *lines]))
    index(tmp_path / "whole.tsv", "--audio", recordings, "--out", tmp_path / "whole", capsys=capsys)
    assert rows(tmp_path / "folder") == rows(tmp_path / "whole")
    assert batches(tmp_path / "folder") == batches(tmp_path / "whole")
    assert batches(tmp_path / "folder", multilabel=True) == batches(
        tmp_path / "whole", multilabel=True
    )
    # The large recipes accept an index wherever they accept shards.
    for name in ("xcm", "xcl"):
        config, problems = config_lib.read(
            f"{name}:{tmp_path / 'folder'}", [("workdir", str(tmp_path / "run"))]
        )
        assert not problems and (config.model.n_classes, config.data.short) == (4, "origin")


def test_other_tables(recordings, tmp_path, capsys):
    """Classes in columns as opensoundscape has them, BirdNET's results, Kaleidoscope, AudioSet's
    strong labels, and a list of paths.

    One more is a table that Excel wrote, whose first line states the separator.
    """
    names = sorted(SPECIES)
    hot = [",".join(("file", "start_time", "end_time", *names))]
    hot += [
        ",".join((f"/elsewhere/{f}", str(s), str(e), *(str(int(n == c)) for n in names)))
        for f, s, e, c, *_ in EVENTS
    ]
    birdnet = ["Start (s),End (s),Scientific name,Common name,Confidence,File"]
    birdnet += [f"{s},{e},{c},x,0.9,{recordings / f}" for f, s, e, c, *_ in EVENTS]
    kaleidoscope = ["INDIR,FOLDER,IN FILE,CHANNEL,OFFSET,DURATION,Fmin,Fmax,AUTO ID,MANUAL ID"]
    kaleidoscope += [
        f"C:\\x,,{f},0,{s},{e - s},{low},{high},wrong,{c}" for f, s, e, c, low, high in EVENTS
    ]
    strong = ["segment_id\tstart_time_seconds\tend_time_seconds\tlabel"]
    strong += [f"{f.rpartition('.')[0]}\t{s}\t{e}\t{c}" for f, s, e, c, *_ in EVENTS]
    excel = ["sep=;", *(line.replace(",", ";") for line in hot)]
    texts = {
        "hot.csv": hot,
        "excel.csv": excel,
        "birdnet.csv": birdnet,
        "kaleidoscope.csv": kaleidoscope,
        "strong.tsv": strong,
    }
    wanted = [(e[0], e[1], e[2], [names.index(e[3])]) for e in EVENTS]
    for name, lines in texts.items():
        (tmp_path / name).write_text("\n".join(lines))
        label = ["--label-column", "Scientific name"] if name == "birdnet.csv" else []
        index(
            tmp_path / name, "--audio", recordings, "--out", tmp_path / "out", *label, capsys=capsys
        )
        assert [
            (r["audio"]["path"], r["start"], r["end"], r["labels"]) for r in rows(tmp_path / "out")
        ] == wanted, name
    # AudioSet's table of clips: its times refer to the film, and the recording is the clip.
    clips = [("YTID", "start_seconds", "end_seconds", "positive_labels")]
    clips += [
        ("a", "30.000", "40.000", '"/m/09x0r,/t/dd00088"'),
        ("c", "0.000", "10.000", '"/m/09x0r"'),
    ]
    for name, between in (("balanced.csv", ", "), ("balanced.tsv", "\t")):
        lines = [
            "# Segments csv created Sun Mar  5 10:54:31 2017",
            "# num_ytids=2, num_segs=2, num_unique_labels=2",
        ]
        lines += [("# " if n == 0 else "") + between.join(clip) for n, clip in enumerate(clips)]
        (tmp_path / name).write_text("\n".join(lines))
        index(tmp_path / name, "--audio", recordings, "--out", tmp_path / "out", capsys=capsys)
        found = [
            (r["audio"]["path"], r["start"], r["end"], r["labels"]) for r in rows(tmp_path / "out")
        ]
        assert found == [("a.wav", 0.0, 3.0, [0, 1]), ("c.mp3", 0.0, 8.0, [0])], name
    (tmp_path / "list.txt").write_text("".join(f"{name}\n" for name in SECONDS))
    index(tmp_path / "list.txt", "--audio", recordings, "--out", tmp_path / "out", capsys=capsys)
    assert [(r["audio"]["path"], r["end"], r["label"]) for r in rows(tmp_path / "out")] == [
        (n, s, None) for n, s in SECONDS.items()
    ]


@pytest.mark.slow
def test_datasets_reads_an_index(recordings, tmp_path, capsys):
    """Hugging Face's library reads every row, with the names of classes, and would write the same
    features."""
    datasets = pytest.importorskip("datasets")
    index(*raven(tmp_path), "--audio", recordings, "--out", tmp_path / "out", capsys=capsys)
    files = {
        "train": [str(path) for path in sorted((tmp_path / "out" / "data").glob("train-*.parquet"))]
    }
    found = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert [
        {k: v for k, v in row.items() if k in rows(tmp_path / "out")[0]} for row in found
    ] == rows(tmp_path / "out")
    assert (
        found.features["label"].names == sorted(SPECIES) == found.features["labels"].feature.names
    )
    found.to_parquet(str(tmp_path / "again.parquet"))
    ours, theirs = (
        datasets.Features.from_arrow_schema(pq.read_schema(path))
        for path in (files["train"][0], tmp_path / "again.parquet")
    )
    assert ours == theirs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xcm", "xcl"])
def test_the_large_recipes_train_on_an_index(recordings, tmp_path, capsys, name):
    """At a small size, the rows, labels and recipe are those of the config."""
    index(*raven(tmp_path), "--audio", recordings, "--out", tmp_path / "out", capsys=capsys)
    small = (
        "model.embed=32 model.depth=1 model.heads=2 model.dtype=float32 train.batch=8"
        " train.accumulate=1"
    )
    small += (
        " train.steps=3 train.eval_every=0 data.threads=1 data.test_share=0.0 optim.warmup=1"
        " metrics.every=1"
    )
    given = [*small.split(), f"workdir={tmp_path / 'run'}"]
    command = [
        sys.executable,
        "-m",
        "jaxtrain.main",
        f"--config={name}:{tmp_path / 'out'}",
        *(f"--config.{x}" for x in given),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": ""}
    )
    assert done.returncode == 0, done.stderr
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [record["loss"] for record in records if record["split"] == "train"]
    assert len(losses) == 3 and all(np.isfinite(losses))


@pytest.mark.slow
def test_every_source_gives_the_same_rows_of_recordings_of_two_hours(tmp_path, capsys):
    """All formats, 2 s to 2 h, with overlapping calls of four species, as tables, labels and
    folders, in windows and as batches."""
    folder, rate, hours = tmp_path / "recordings", 8000, 2
    folder.mkdir()
    kinds = {
        "wav": None,
        "flac": None,
        "mp3": None,
        "ogg": "VORBIS",
        "opus": "OPUS",
        "aiff": "PCM_16",
    }
    rng, events = np.random.default_rng(0), []
    for k, (kind, subtype) in enumerate(kinds.items()):
        for length, seconds in (("long", 3600 * hours), ("short", 2 + k)):
            name = f"{length}-{kind}.{kind}"
            container = {"opus": "OGG", "mp3": "MP3"}.get(kind, kind.upper())
            with soundfile.SoundFile(
                folder / name, "w", rate, 1, subtype=subtype, format=container
            ) as file:
                for start in range(0, seconds, 60):
                    wave = rng.standard_normal(min(60, seconds - start) * rate) * rng.uniform(
                        0.01, 0.1
                    )
                    file.write(wave.astype(np.float32))
            for at in (
                np.linspace(0, seconds - 1.75, 40 if length == "long" else 2).round(2).tolist()
            ):
                first, second = rng.choice(sorted(SPECIES), 2, replace=False).tolist()
                events += [
                    (name, at, at + 1.0, first, 1000.0, 3000.0),
                    (name, at + 0.5, at + 1.75, second, 500.0, 2000.0),
                ]
    seconds = {name: 0.0 for name, *_ in events}
    out = {}
    for source, write in (("raven", raven), ("csv", table), ("audacity", audacity)):
        (tmp_path / source).mkdir()
        given = write(tmp_path / source, events=events, names=seconds)
        given = given if isinstance(given, list) else [given, "--file-column", "datei"]
        for cut, more in (("events", []), ("windows", ["--windows=5", "--hop=2.5", "--no-empty"])):
            place = tmp_path / f"{source}-{cut}"
            index(*given, "--audio", folder, "--out", place, *more, capsys=capsys)
            out[source, cut] = rows(place), batches(place, multilabel=True)
    for (source, cut), found in out.items():
        assert found == out["raven", cut], (source, cut)
    assert len(out["raven", "events"][0]) == len(events)
    # Whole recordings: by subfolder, and by a table with the same content.
    lines = ["file,label"]
    for k, name in enumerate(sorted(seconds)):
        species = sorted(SPECIES)[k % len(SPECIES)]
        place = tmp_path / "by-species" / species / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.hardlink_to(folder / name)
        lines.append(f"{species}/{name},{species}")
    (tmp_path / "whole.csv").write_text("\n".join(lines))
    for cut, more in (("whole", []), ("windows", ["--windows=5"])):
        index(tmp_path / "by-species", "--out", tmp_path / f"folder-{cut}", *more, capsys=capsys)
        given = (
            tmp_path / "whole.csv",
            "--audio",
            tmp_path / "by-species",
            "--out",
            tmp_path / f"table-{cut}",
        )
        index(*given, *more, capsys=capsys)
        places = tmp_path / f"folder-{cut}", tmp_path / f"table-{cut}"
        assert rows(places[0]) == rows(places[1]) and batches(places[0]) == batches(places[1]), cut


def test_raven_tables_over_several_recordings(recordings, tmp_path, capsys):
    """Times count from the first recording. Begin File and File Offset state the place of a
    selection."""
    lines = ["Selection\tBegin Time (s)\tEnd Time (s)\tBegin File\tFile Offset (s)\tAnnotation"]
    lines += ["1\t1.0\t1.5\ta.wav\t1.0\tx", "2\t6.0\t6.5\tc.mp3\t3.0\ty"]
    (tmp_path / "all.selections.txt").write_text("\n".join(lines))
    index(
        tmp_path / "all.selections.txt",
        "--audio",
        recordings,
        "--out",
        tmp_path / "out",
        capsys=capsys,
    )
    assert [(r["audio"]["path"], r["start"], r["end"]) for r in rows(tmp_path / "out")] == [
        ("a.wav", 1.0, 1.5),
        ("c.mp3", 3.0, 3.5),
    ]


def test_classes_have_an_order_and_synonyms(recordings, tmp_path, capsys):
    order = ["Turdus merula", "Parus major", "Apus apus", "Erithacus rubecula"]
    (tmp_path / "classes.csv").write_text(
        "\n".join(f"{SPECIES[name]},{name.upper()}" for name in order)
    )
    index(
        table(tmp_path),
        "--file-column=Datei",
        "--audio",
        recordings,
        "--out",
        tmp_path / "out",
        "--classes",
        tmp_path / "classes.csv",
        capsys=capsys,
    )
    codes = [SPECIES[name] for name in order]
    assert json.loads((tmp_path / "out" / "index.json").read_text())["classes"] == codes
    assert [codes[r["label"]] for r in rows(tmp_path / "out")] == [SPECIES[e[3]] for e in EVENTS]
    assert dataset_info(Config(train=str(tmp_path / "out"), test_share=0.0))[
        "class_names"
    ] == tuple(codes)
    (tmp_path / "classes.csv").write_text("a,x\nb,X\n")
    err = index(
        tmp_path / "events.csv",
        "--out",
        tmp_path / "o",
        "--classes",
        tmp_path / "classes.csv",
        code=2,
        capsys=capsys,
    )
    assert "classes.csv:2 gives 'X' to 'b'" in err


def test_windows_are_labelled_by_overlap(recordings, tmp_path, capsys):
    args = (
        table(tmp_path),
        "--file-column=Datei",
        "--audio",
        recordings,
        "--out",
        tmp_path / "out",
        "--windows=1",
        "--hop=0.5",
    )
    index(*args, capsys=capsys)
    names = sorted(SPECIES)
    found = [
        (r["start"], r["end"], [names[k] for k in r["labels"]])
        for r in rows(tmp_path / "out")
        if r["audio"]["path"] == "a.wav"
    ]
    great, black = "Parus major", "Turdus merula"
    assert found == [
        (0.0, 1.0, [great]),
        (0.5, 1.5, [great, black]),
        (1.0, 2.0, [great, black]),
        (1.5, 2.5, [black]),
        (2.0, 3.0, []),
    ]
    index(*args, "--min-overlap=0.6", "--no-empty", capsys=capsys)
    found = [
        (r["start"], [names[k] for k in r["labels"]])
        for r in rows(tmp_path / "out")
        if r["audio"]["path"] == "a.wav"
    ]
    assert found == [(0.5, [great]), (1.0, [black])]
    index(*args[:-2], "--windows=2.9", capsys=capsys)
    found = [
        (r["start"], r["end"]) for r in rows(tmp_path / "out") if r["audio"]["path"] == "c.mp3"
    ]
    assert found == [(0.0, 2.9), (2.9, 5.8), (5.1, 8.0)], "the last one lies at the end"


BAD_LINES = {
    "reversed-times": ("a.wav,2,1,x", 1),
    "outside-recording": ("a.wav,3.5,4,x", 1),
    "beyond-end": ("a.wav,2,9,x", 1),
    "bad-row": ("a.wav,one,2,x", 1),
    "missing-file": ("zzz.wav,1,2,x", 1),
    "unknown-label": ("a.wav,1,2,zzz", 1),
    "shared-times": ("a.wav,0,0.5,x\na.wav,0,0.5,y", 1),
    "duplicate-row": ("c.mp3,0,0.5,x\nc.mp3,0,0.5,x", 1),
    "overlapping-times": ("b.flac,0,1,x\nb.flac,0.5,1.5,x", 1),
}


def test_errors_are_listed_together_and_nothing_is_written(recordings, tmp_path, capsys):
    lines = ["file,start,end,label", *(text for text, _ in BAD_LINES.values()), "d.ogg,1,2,x"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    (tmp_path / "classes.txt").write_text("x\ny\n")
    args = (
        tmp_path / "t.csv",
        "--audio",
        recordings,
        "--classes",
        tmp_path / "classes.txt",
        "--out",
        tmp_path / "out",
    )
    err = index(*args, code=2, capsys=capsys)
    for kind, (_, n) in BAD_LINES.items():
        assert f"\n{kind}: {n} (" in "\n" + err, kind
    assert "t.csv:2: [2, 1) s" in err and "'zzz.wav', which is not below" in err
    assert (
        "nothing was written" in err
        and not (tmp_path / "out").exists()
        and not list(tmp_path.glob(".out*"))
    )
    err = index(
        *args, "--on=all=drop", "--on=beyond-end=keep", "--on=shared-times=keep", capsys=capsys
    )
    found = [
        (r["audio"]["path"], r["start"], r["end"], r["labels"]) for r in rows(tmp_path / "out")
    ]
    kept = [
        ("a.wav", 0.0, 0.5, [0, 1]),
        ("a.wav", 2.0, 3.0, [0]),
        ("b.flac", 0.0, 1.0, [0]),
        ("c.mp3", 0.0, 0.5, [0]),
        ("d.ogg", 1.0, 2.0, [0]),
    ]
    assert found == kept
    assert (tmp_path / "out" / "errors.csv").read_text().count("\n") > len(BAD_LINES)
    err = index(*args, "--on=reverse-times=drop", code=2, capsys=capsys)
    assert "names the error 'reverse-times'" in err and "did you mean 'reversed-times'" in err
    assert "cannot be" in index(*args, "--on=missing-file=keep", code=2, capsys=capsys)


def test_broken_recordings_are_a_line_each(recordings, tmp_path, capsys):
    data = (recordings / "a.wav").read_bytes()
    (recordings / "zero.wav").write_bytes(b"")
    (recordings / "cut.wav").write_bytes(data[: len(data) // 2])
    (recordings / "page.mp3").write_bytes(b"<html>not found</html>")
    (recordings / "copy.wav").write_bytes(data)
    (recordings / "circle").symlink_to(recordings)
    (recordings / "nowhere.wav").symlink_to("missing")
    (tmp_path / "elsewhere.wav").write_bytes(corpus.wav(77))
    (recordings / "out.wav").symlink_to(tmp_path / "elsewhere.wav")
    (tmp_path / "elsewhere.json").write_text('{"recordings": []}')
    (recordings / "out.json").symlink_to(tmp_path / "elsewhere.json")
    os.mkdir(os.fsencode(recordings) + b"/odd")
    with open(os.fsencode(recordings) + b"/odd/\xff.wav", "wb") as file:
        file.write(data[:-100])
    err = index(recordings, "--labels=none", "--out", tmp_path / "out", code=2, capsys=capsys)
    kinds = (
        "empty-file",
        "truncated-file",
        "unreadable-file",
        "duplicate-content",
        "odd-name",
        "missing-file",
        "link-circle",
    )
    for kind in kinds:
        assert f"\n{kind}: 1 (" in "\n" + err, kind
    assert "link-outside: 2 (" in err and f"out.json leads to {tmp_path / 'elsewhere.json'}" in err
    assert (
        "ends after 1.498 s; its header states 3.000 s" in err or "its header states 3.000 s" in err
    )
    assert not (tmp_path / "out").exists()
    index(recordings, "--labels=none", "--out", tmp_path / "out", "--on=all=drop", capsys=capsys)
    assert [r["audio"]["path"] for r in rows(tmp_path / "out")] == sorted(SECONDS)


def test_a_link_out_of_the_folder_is_judged_by_its_name(recordings, tmp_path, capsys):
    (tmp_path / "elsewhere").write_text(
        "Selection\tBegin Time (s)\tEnd Time (s)\tSpecies\n1\t0\t1\tx\n"
    )
    # by its content, a table of Raven
    (recordings / "table.txt").symlink_to(tmp_path / "elsewhere")
    (recordings / "notes.md").symlink_to(tmp_path / "elsewhere")
    err = index(recordings, "--labels=folder", "--out", tmp_path / "out", capsys=capsys)
    assert "unread-table: 1 (" in err and "table.txt" in err and "other-file: 1 (" in err
    err = index(recordings, "--out", tmp_path / "again", capsys=capsys)
    assert "unread-table: 1 (" in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_and_folders_without_permission_are_counted(recordings, tmp_path, capsys):
    (recordings / "closed").mkdir(mode=0)
    (recordings / "a.wav").chmod(0)
    err = index(recordings, "--labels=none", "--out", tmp_path / "out", code=2, capsys=capsys)
    assert "no-permission: 2" in err


def test_the_same_command_reads_only_what_is_new(recordings, tmp_path, capsys):
    index(recordings, "--out", tmp_path / "out", capsys=capsys)
    first = rows(tmp_path / "out")
    err = index(recordings, "--out", tmp_path / "out", capsys=capsys)
    assert "4 headers, 0 of them read now" in err and rows(tmp_path / "out") == first
    (recordings / "e.wav").write_bytes(corpus.wav(9))
    (recordings / "b.flac").write_bytes(corpus.encode(corpus.noise(7, 1.0, RATE), RATE, "FLAC"))
    err = index(recordings, "--out", tmp_path / "out", capsys=capsys)
    assert "5 headers, 2 of them read now" in err
    assert {r["audio"]["path"]: r["end"] for r in rows(tmp_path / "out")} == {
        **SECONDS,
        "b.flac": 1.0,
        "e.wav": 1.0,
    }
    # A failed command left the index unchanged.
    before = rows(tmp_path / "out")
    (recordings / "f.wav").write_bytes(b"")
    index(recordings, "--out", tmp_path / "out", code=2, capsys=capsys)
    assert rows(tmp_path / "out") == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    assert "holds other things" in index(
        recordings, "--out", tmp_path / "full", code=2, capsys=capsys
    )


def test_splits(recordings, tmp_path, capsys):
    for n in range(30):
        (recordings / f"SITE{n % 5}_202305{n % 28 + 1:02d}_053000.wav").write_bytes(
            corpus.wav(100 + n, 0.2, 8000)
        )
    out = tmp_path / "out"

    def split(how):
        index(recordings, "--labels=none", "--out", out, f"--split={how}", capsys=capsys)
        names = json.loads((out / "index.json").read_text())["splits"]
        return {name: {r["audio"]["path"] for r in rows(out, name)} for name in names}

    for path in SECONDS:
        (recordings / path).unlink()
    first = split("recording=0.3")
    assert (
        3 < len(first["test"]) < 16
        and not first["test"] & first["train"]
        and split("recording=0.3") == first
    )
    sites = split("site=test:0.3,valid:0.3")
    of_site = {name: {path.split("_")[0] for path in paths} for name, paths in sites.items()}
    assert sum(map(len, of_site.values())) == 5 and len(of_site) > 1, "a site is in one split"
    dates = split("date=2023-05-20")
    assert dates["test"] == {
        path for path in dates["test"] | dates["train"] if path.split("_")[1] >= "20230520"
    }
    lines = [f"{path.name},{n % 3}" for n, path in enumerate(sorted(recordings.iterdir()))]
    (tmp_path / "folds.csv").write_text("\n".join(["file,fold", *lines]))
    index(
        tmp_path / "folds.csv",
        "--audio",
        recordings,
        "--out",
        out,
        "--split=column=fold:2",
        capsys=capsys,
    )
    assert len(rows(out, "test")) == 10
    for how, text in (
        ("fold=1", "expected one of"),
        ("recording=2", "must lie in"),
        ("date=May", "expected a day"),
    ):
        assert text in index(recordings, "--out", out, f"--split={how}", code=2, capsys=capsys)


def test_a_recording_in_two_splits_is_a_leak(recordings, tmp_path, capsys):
    lines = [
        "file,start,end,label,split",
        "a.wav,0,1,x,train",
        "a.wav,1,2,x,test",
        "b.flac,0,1,x,train",
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    args = (tmp_path / "t.csv", "--audio", recordings, "--out", tmp_path / "out")
    assert "a.wav is in the splits test, train" in index(*args, code=2, capsys=capsys)
    index(*args, "--on=leaking-recording=drop", capsys=capsys)
    assert [r["audio"]["path"] for r in rows(tmp_path / "out")] == ["b.flac"]
    index(*args, "--on=leaking-recording=keep", capsys=capsys)
    assert [r["audio"]["path"] for r in rows(tmp_path / "out")] == ["a.wav", "b.flac"]


def test_the_same_sound_in_other_bytes_in_two_splits_is_a_leak(tmp_path, capsys):
    """As one video under two names: another format, or other tags."""
    sounds = {}
    for n, name in enumerate("abc"):
        sounds[name] = np.round(corpus.noise(n, 1.0, RATE) * 32_768) / 32_768
    sounds["silent"] = np.zeros(RATE, np.float32)
    lines = ["file,label,split"]
    for n, (name, form) in enumerate(
        [("a", "WAV"), ("b", "WAV"), ("silent", "WAV"), ("a", "FLAC"), ("c", "WAV")]
    ):
        file = f"{n}.{form.lower()}"
        (tmp_path / "audio").mkdir(exist_ok=True)
        (tmp_path / "audio" / file).write_bytes(corpus.encode(sounds[name], RATE, form))
        lines.append(f"{file},x,{'test' if n in (0, 2) else 'train'}")
    encoded = corpus.encode(sounds["silent"], RATE, "FLAC")
    (tmp_path / "audio" / "5.flac").write_bytes(encoded)
    (tmp_path / "t.csv").write_text("\n".join([*lines, "5.flac,x,train"]))
    args = (tmp_path / "t.csv", "--audio", tmp_path / "audio", "--out", tmp_path / "out")
    said = index(*args, code=2, capsys=capsys)
    assert "0.wav (test), " in said and "3.flac (train) have the same sound" in said
    assert said.count("have the same sound") == 1, "silence is alike, and no leak"
    index(*args, "--on=leaking-recording=drop", capsys=capsys)
    found = sorted(r["audio"]["path"] for r in rows(tmp_path / "out"))
    assert found == ["1.wav", "4.wav", "5.flac"]


def test_birdset_as_its_archive_publishes_it(tmp_path, capsys):
    """Archives of recordings and the metadata of three splits."""
    source = tmp_path / "HSN"
    source.mkdir()
    files = {"train": "XC1.ogg", "test": "HSN_001.ogg", "test5s": "HSN_001_000_005.ogg"}
    for n, (split, name) in enumerate(files.items()):
        (tmp_path / name).write_bytes(corpus.encode(corpus.noise(n, 6.0, RATE), RATE, "OGG"))
        with tarfile.open(source / f"HSN_{split}_shard_0001.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / name, name)
    none = {"low_freq": None, "high_freq": None, "lat": 1.5, "long": 2.5}
    metadata = {
        "train": [
            dict(
                filepath="XC1.ogg",
                start_time=None,
                end_time=None,
                ebird_code="x",
                ebird_code_multilabel=["x"],
                **none,
            )
        ],
        "test": [
            dict(
                filepath="HSN_001.ogg",
                start_time=s,
                end_time=s + 1,
                ebird_code=c,
                ebird_code_multilabel=[c],
                **none,
            )
            for s, c in ((1.0, "x"), (3.0, "y"))
        ],
        "test_5s": [
            dict(
                filepath="HSN_001_000_005.ogg",
                start_time=0.0,
                end_time=5.0,
                ebird_code=None,
                ebird_code_multilabel=["x", "y"],
                **none,
            )
        ],
    }
    for split, its in metadata.items():
        pq.write_table(pa.Table.from_pylist(its), source / f"HSN_metadata_{split}.parquet")
    index(source, "--unpack", source, "--out", tmp_path / "out", capsys=capsys)
    assert [(r["start"], r["end"], r["label"]) for r in rows(tmp_path / "out", "test")] == [
        (1.0, 2.0, 0),
        (3.0, 4.0, 1),
    ]
    (clip,) = rows(tmp_path / "out", "test_5s")
    assert clip["labels"] == [0, 1] and clip["label"] is None and clip["latitude"] == 1.5
    assert [r["label"] for r in rows(tmp_path / "out")] == [0]
    config = Config(
        train=str(tmp_path / "out"),
        multilabel=True,
        test_split="test_5s",
        clip_seconds=1.0,
        n_frames=128,
    )
    loader = make_loader(config, split="test", rows=Rows(1, ((0, 1),)), seed=0)
    assert next(loader)[1]["labels"][0].tolist() == [[1, 1]]
    loader.close()
    assert "0 files unpacked from 3 archives" in index(
        source, "--unpack", source, "--out", tmp_path / "out", capsys=capsys
    )


def test_xeno_canto(recordings, tmp_path, capsys):
    (recordings / "c.mp3").rename(recordings / "XC77.mp3")
    about = {
        "id": "77",
        "gen": "Turdus",
        "sp": "merula",
        "date": "2021-05-02",
        "time": "06:30",
        "lat": "50.1",
        "lng": "8.2",
    }
    (recordings / "page.json").write_text(json.dumps({"numRecordings": "1", "recordings": [about]}))
    index(recordings / "page.json", "--out", tmp_path / "out", capsys=capsys)
    (row,) = rows(tmp_path / "out")
    assert (row["recording"], row["date"], row["time"], row["latitude"]) == (
        "XC77",
        "2021-05-02",
        "06:30:00",
        50.1,
    )
    assert row["audio"]["path"] == "XC77.mp3" and row["label"] == 0


def chunk(name: bytes, body: bytes) -> bytes:
    return name + struct.pack("<I", len(body)) + body + b"\0" * (len(body) & 1)


def test_date_and_place_of_headers(tmp_path):
    wav = corpus.encode(corpus.noise(0, 0.5, 8000), 8000, "WAV", "PCM_16")
    comment = (
        b"Recorded at 19:17:30 23/06/2021 (UTC+1) by AudioMoth 24F3190361DBF81E at medium gain"
        b" while battery was 4.5V."
    )
    (tmp_path / "moth.wav").write_bytes(wav + chunk(b"LIST", b"INFO" + chunk(b"ICMT", comment)))
    guano = (
        b"GUANO|Version: 1.0\nTimestamp: 2020-08-12T21:04:05-05:00\nLoc Position: 32.18 -110.87\n"
    )
    (tmp_path / "bat.wav").write_bytes(wav + chunk(b"guan", guano))
    (tmp_path / "5E90A4D4.WAV").write_bytes(wav)
    found = {
        os.path.basename(path): headers._read(str(path), None).about for path in tmp_path.iterdir()
    }
    assert found["moth.wav"] == {"date": "2021-06-23", "time": "19:17:30+01:00"}
    assert found["bat.wav"] == {
        "date": "2020-08-12",
        "time": "21:04:05-05:00",
        "latitude": "32.18",
        "longitude": "-110.87",
    }
    assert found["5E90A4D4.WAV"] == {"date": "2020-04-10", "time": "16:54:44+00:00"}


def test_each_channel_as_a_row(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    wave = np.stack([corpus.noise(1, 1.0, RATE), corpus.noise(2, 1.0, RATE)], 1)
    soundfile.write(folder / "s.wav", wave, RATE)
    index(folder, "--channels=each", "--out", tmp_path / "out", capsys=capsys)
    assert [r["channel"] for r in rows(tmp_path / "out")] == [0, 1]
    assert "expected mean, each, table" in index(
        folder, "--channels=left", "--out", tmp_path / "o", code=2, capsys=capsys
    )
    err = index(folder, "--channels=2", "--out", tmp_path / "o", code=2, capsys=capsys)
    assert "bad-row: 1 (refused)" in err and "s.wav has 2 channels, and no channel 2 from 0" in err


def test_an_index_may_lie_next_to_its_recordings(recordings, tmp_path, capsys, monkeypatch):
    """The index is written to the recordings' folder, or to the working directory. The same command
    finds it there again."""
    for n in (4, 0):
        assert f"{n} of them read now" in index(
            recordings, "--out", recordings / "index", capsys=capsys
        )
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    index(recordings, "--out", ".", capsys=capsys)
    assert rows(tmp_path / "here") == rows(recordings / "index")


def test_a_selection_that_leaves_no_rows_is_reported(recordings, tmp_path, capsys):
    said = {"": "is empty; expected a table", "file,start,end,label\n": "they name no recording"}
    for text, what in said.items():
        (tmp_path / "t.csv").write_text(text)
        assert what in index(tmp_path / "t.csv", "--out", tmp_path / "o", code=2, capsys=capsys)
    err = index(
        recordings, "--windows=1", "--hop=1e-4", "--out", tmp_path / "o", code=2, capsys=capsys
    )
    assert "--hop is 0.0001; it must be at least 0.001 s" in err
    (tmp_path / "t.csv").write_text('file,start,end,label\na.wav,0,1,"a\x1b[2J\x0bb"\n')
    index(tmp_path / "t.csv", "--audio", recordings, "--out", tmp_path / "o", capsys=capsys)
    assert json.loads((tmp_path / "o" / "index.json").read_text())["classes"] == ["a [2J b"]


def test_show(recordings, tmp_path, capsys):
    index(
        table(tmp_path),
        "--file-column=Datei",
        "--audio",
        recordings,
        "--out",
        tmp_path / "out",
        "--windows=1",
        capsys=capsys,
    )
    assert (
        cli.main(
            ["index", "--show", str(tmp_path / "out"), "--pictures", str(tmp_path / "pictures")]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "train: 17 rows of 4 recordings" in out
        and "Parus major + Turdus merula: 1" in out
        and "16000: 17" in out
    )
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        "train-classes.png",
        "train-rows.png",
    }
    assert "is not an index" in index("--show", recordings, code=2, capsys=capsys)


def test_an_index_that_moved_names_the_remedy(recordings, tmp_path, capsys):
    index(recordings, "--out", tmp_path / "deep" / "er" / "out", "--labels=none", capsys=capsys)
    (tmp_path / "deep" / "er" / "out").rename(tmp_path / "moved")
    pq.read_table(tmp_path / "moved" / "data")
    config = Config(
        train=str(tmp_path / "moved"), test_share=0.0, bad_budget=1.0, audio_root=str(recordings)
    )
    loader = make_loader(config, split="test", rows=Rows(1, ((0, 1),)), seed=0, in_order=True)
    loader.close()
    loader = make_loader(config, split="train", rows=Rows(4, ((0, 4),)), seed=0, in_order=True)
    assert next(loader)[1]["weight"][0].sum() == 4
    loader.close()


@pytest.mark.slow
@pytest.mark.skipif(not corpus.ESC10.is_dir(), reason=f"{corpus.ESC10} is not there")
def test_esc10_as_a_plain_folder_gives_the_shards_batches(tmp_path, capsys):
    """ESC-10's WAVs lie in folders by split and class. A table of them in the shards' order gives
    the same batches, byte for byte."""
    from loaders import _rust

    lines = {"train": ["file,label"], "test": ["file,label"]}
    for split in lines:
        shard_paths = shards.find_shards(str(corpus.ESC10), split)
        source = _rust.Index(shard_paths, label="label")
        for row in range(source.n_rows):
            name = source.class_names[source.labels[row]]
            wave, rate, _ = _rust.decode(source.encoded(row))
            path, flat = (
                tmp_path / "wav" / split / name / f"{row:04d}.wav",
                tmp_path / "flat" / split / f"{row:04d}.wav",
            )
            for each in (path, flat):
                each.parent.mkdir(parents=True, exist_ok=True)
            soundfile.write(path, wave, rate, subtype="FLOAT")  # every bit that the loader decodes
            flat.hardlink_to(path)
            lines[split].append(f"{flat.relative_to(tmp_path / 'flat')},{name}")
    (tmp_path / "classes.txt").write_text("\n".join(source.class_names))
    options = (
        "--split=folder",
        "--on=duplicate-content=keep",
        "--classes",
        tmp_path / "classes.txt",
    )
    index(tmp_path / "wav", *options, "--out", tmp_path / "folder", capsys=capsys)
    (tmp_path / "flat.csv").write_text("\n".join([*lines["train"], *lines["test"][1:]]))
    index(
        tmp_path / "flat.csv",
        "--audio",
        tmp_path / "flat",
        *options,
        "--out",
        tmp_path / "table",
        capsys=capsys,
    )
    told = [
        dataset_info(Config(train=str(path), label="label"))
        for path in (corpus.ESC10, tmp_path / "folder", tmp_path / "table")
    ]
    assert told[0] == told[1] == told[2]
    for split in lines:
        loaders = [
            make_loader(
                Config(train=str(path), label="label"),
                split=split,
                rows=Rows(40, ((0, 40),)),
                seed=5,
            )
            for path in (corpus.ESC10, tmp_path / "table")
        ]
        for _ in range(2):
            ours, theirs = (next(loader)[1] for loader in loaders)
            for name in ours:
                assert ours[name][0].tobytes() == theirs[name][0].tobytes(), (split, name)
        for loader in loaders:
            loader.close()


def test_a_misspelt_source_is_answered_with_its_neighbour(recordings, tmp_path, capsys):
    told = index(tmp_path / "recordigns", "--out", tmp_path / "index", code=2, capsys=capsys)
    assert (
        f"recordigns does not exist; did you mean '{recordings}'?; name a folder of recordings"
        in told
    )
