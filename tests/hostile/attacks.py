"""Every command, and its damaged input. A new command of jaxtrain/cli.py needs a line in `ATTACKS`
or `HARMLESS`.

An attack has an input (a function of inputs.py, which fills a folder), other inputs that stay
whole, and the arguments. In the arguments, {input}, {out} and the other inputs' names stand for
their folders. The input is damaged in every way of `damage.cases`, and the command must not do
anything that `harness` forbids. Arguments come from the user and are trusted. Files are not
trusted.
"""

from collections.abc import Callable
from typing import NamedTuple

from tests.hostile import inputs

LIGHT = 2  # cases of the short form, which CI runs


class Attack(NamedTuple):
    """One command, and one input of it."""

    name: str
    argv: tuple[str, ...]
    make: Callable
    beside: tuple[Callable, ...] = ()  # other inputs, which are whole
    short: int = LIGHT  # cases in CI; 0: the long form alone
    most: int = 120  # cases of the long form
    # files that the user names in the arguments: the user chooses where they link to
    named: tuple[str, ...] = ()


def _attack(name: str, text: str, make: Callable, *beside: Callable, **options) -> Attack:
    return Attack(name, tuple(text.split()), make, beside, **options)


BIRDS = f"--config=configs/xcm.py:{{input}} --config.workdir={{out}} {inputs.SMALL}"
EMBED = "--out {out} --label label --data"
SOUND = "--codebooks 1 --size 4 --rounds 1 --test-share 0"
FROM = "--config.warm_start.source={input} --config.warm_start.skip=('^(?!encoder)',)"
OTHER = BIRDS.replace("{input}", "{recordings}")  # other than the damaged input

ATTACKS = (
    _attack("inspect a run", "checkpoint inspect {input}", inputs.birds),
    _attack("inspect an export", "checkpoint inspect {input}", inputs.export),
    _attack("verify a run", "checkpoint verify {input}", inputs.birds, short=3),
    _attack("verify an export", "checkpoint verify {input}", inputs.export, short=3),
    _attack("compare runs", "checkpoint diff {input} {birds}", inputs.birds, inputs.birds),
    _attack("strip a run", "checkpoint export {input} --out {out}", inputs.birds),
    _attack("export a run", "export {input} --out {out}", inputs.birds, short=3),
    _attack(
        "export a run as ONNX",
        "export {input} --format onnx --out {out}",
        inputs.birds_with_head,
        short=0,
    ),
    _attack(
        "export a run for timm",
        "export {input} --format timm --out {out}",
        inputs.birds_with_head,
        short=0,
        most=60,
    ),
    _attack("export a language model", "export {input} --out {out}", inputs.language),
    _attack("take an export back", "export --reverse {input} --out {out}", inputs.export, short=3),
    _attack("adapters of a run", "lora-to-peft {input} --out {out}", inputs.adapters),
    _attack(
        "embed with a run",
        f"embed {{input}} {EMBED} {{recordings}}",
        inputs.birds,
        inputs.recordings,
        short=2,
        most=75,
    ),
    _attack(
        "embed with an export",
        f"embed {{input}} {EMBED} {{recordings}}",
        inputs.export,
        inputs.recordings,
        short=0,
        most=50,
    ),
    _attack(
        "embed with timm's",
        f"embed {{input}} {EMBED} {{recordings}}",
        inputs.timm,
        inputs.recordings,
        short=0,
        most=50,
    ),
    _attack(
        "score on a benchmark",
        "benchmark birdset HSN {birds_with_head} --data {input} --out {out} --draws 3 --batch 2",
        inputs.birdset,
        inputs.birds_with_head,
        short=0,
        most=30,
    ),
    _attack(
        "score a run",
        "benchmark birdset HSN {input} --data {birdset} --out {out} --draws 3 --batch 2",
        inputs.birds_with_head,
        inputs.birdset,
        short=0,
        most=50,
    ),
    _attack(
        "score in folds",
        "benchmark esc10 {birds} --data {input} --out {out} --draws 3 --batch 2",
        inputs.clips_in_folds,
        inputs.birds,
        short=0,
        most=30,
    ),
    _attack(
        "embed recordings",
        f"embed {{birds}} {EMBED} {{input}}",
        inputs.recordings,
        inputs.birds,
        short=2,
        most=30,
    ),
    _attack(
        "embed several classes",
        f"embed {{birds}} {EMBED} {{input}} --label labels --multilabel",
        inputs.class_lists,
        inputs.birds,
        short=0,
        most=20,
    ),
    _attack(
        "detect with a run",
        "detect {input} {annotated} --out {out} --batch 2",
        inputs.birds_with_head,
        inputs.annotated,
        short=2,
        most=50,
    ),
    _attack(
        "detect in recordings",
        "detect {birds_with_head} {input} --out {out} --batch 2",
        inputs.annotated,
        inputs.birds_with_head,
        short=0,
        most=30,
    ),
    _attack(
        "detect in an index",
        "detect {birds_with_head} {input} --out {out} --batch 2",
        inputs.index,
        inputs.birds_with_head,
        short=0,
        most=50,
    ),
    _attack(
        "detect with a head",
        "detect {birds} {annotated} --model {input}/head.npz --out {out} --batch 2",
        inputs.head_of_run,
        inputs.birds,
        inputs.annotated,
        short=0,
        most=30,
        named=("head.npz",),
    ),
    _attack(
        "resume a detect",
        "detect {birds_with_head} {annotated} --out {input} --batch 2",
        inputs.detected,
        inputs.birds_with_head,
        inputs.annotated,
        short=0,
        most=50,
    ),
    _attack(
        "probe embeddings",
        "probe --train {input} --test {embeddings} --out {out}",
        inputs.embeddings,
        inputs.embeddings,
        short=2,
        most=60,
    ),
    _attack(
        "index a folder",
        "index {input} --out {out} --on duplicate-content=drop --on unreadable-file=drop --on"
        " empty-file=drop",
        inputs.recordings,
    ),
    _attack(
        "index what a table names",
        "index {input}/labels.csv --audio {input} --out {out}",
        inputs.annotated,
        named=("labels.csv",),
    ),
    _attack(
        "index again",
        "index {annotated} --out {input}",
        inputs.index,
        inputs.annotated,
        short=0,
        most=50,
    ),
    _attack("prepare an index", "prepare {input} --out {out}", inputs.index, short=0, most=50),
    _attack(
        "pictures of an index",
        "index --show {input} --pictures {out}",
        inputs.index,
        short=0,
        most=75,
    ),
    _attack("show an index", "index --show {input}", inputs.index),
    _attack("make tokens", "tokens {out} {input} --tokenizer bytes", inputs.texts),
    _attack(
        "encode a manifest",
        "encode-audio {input}/manifest.json --codec {input}/codec.npz",
        inputs.sounds,
        named=("manifest.json", "codec.npz"),
    ),
    _attack(
        "listen to a recording",
        "encode-audio --listen {input}/0.wav --codec {input}/codec.npz --out {out}.wav",
        inputs.sounds,
        most=20,
        named=("0.wav", "codec.npz"),
    ),
    _attack(
        "learn a codec",
        f"train-codec {{out}}.npz {{input}}/manifest.json {{input}} {SOUND}",
        inputs.sounds,
        short=0,
        most=50,
        named=("manifest.json",),
    ),
    _attack(
        "fit on embeddings", "fit {input} --out {out}.npz", inputs.embeddings, short=2, most=50
    ),
    _attack(
        "fit by a table",
        "fit {whole_rows} --labels {input}/labels.csv --out {out}.npz",
        inputs.annotated,
        inputs.whole_rows,
        short=0,
        most=30,
        named=("labels.csv",),
    ),
    _attack(
        "fit on an index",
        "fit {input} --run {birds} --labels {annotated}/labels.csv --out {out}.npz --batch 2",
        inputs.index,
        inputs.birds,
        inputs.annotated,
        short=0,
        most=30,
    ),
    _attack(
        "search embeddings", "search {input} --like {input}@0", inputs.whole_rows, short=2, most=50
    ),
    _attack(
        "search by a recording",
        "search {input} --like {annotated}/0.wav --run {birds}",
        inputs.embedded,
        inputs.annotated,
        inputs.birds,
        short=0,
        most=30,
    ),
    _attack(
        "search by a head",
        "search {whole_rows} --model {input}/head.npz",
        inputs.head,
        inputs.whole_rows,
        short=2,
        most=50,
        named=("head.npz",),
    ),
    _attack(
        "continue prompts",
        "generate {input} ! --tokenizer bytes --tokens 2",
        inputs.language,
        short=0,
        most=30,
    ),
    _attack(
        "predict with a run",
        "predict {input} {masked_film} --out {out}.nii",
        inputs.brains,
        inputs.masked_film,
        short=0,
        most=30,
    ),
    _attack(
        "predict of a film",
        "predict {brains} {input} --out {out}.nii",
        inputs.masked_film,
        inputs.brains,
        short=3,
        most=30,
    ),
    _attack(
        "solve with a run",
        "solve {input} {puzzles}/test.csv",
        inputs.solver,
        inputs.puzzles,
        short=0,
        most=30,
    ),
    _attack(
        "solve boards",
        "solve {solver} {input}/test.csv",
        inputs.puzzles,
        inputs.solver,
        short=3,
        most=30,
        named=("test.csv",),
    ),
    _attack(
        "generate with a run",
        "generate-audio {input} hello --out {out} --seconds 0.2",
        inputs.speech,
        inputs.sounds,
        short=0,
        most=50,
    ),
    _attack("explain recordings", f"explain {BIRDS}", inputs.recordings, short=2),
    _attack(
        "explain a film",
        "explain --config=configs/giblet.py:{input} --config.workdir={out}"
        " --config.data.test_share=0",
        inputs.film,
    ),
    _attack("list runs", "runs {input}", inputs.workdir),
    _attack(
        "metrics of a run", "metrics {input} --out {out}.parquet", inputs.workdir, short=2, most=30
    ),
    _attack(
        "steps of two runs",
        "diff {input} {workdir}",
        inputs.workdir,
        inputs.workdir,
        short=2,
        most=30,
    ),
    _attack("report on a run", "report {input} --out {out}.html", inputs.workdir, short=3),
    _attack("status of jobs", "launch --status {input}", inputs.jobs),
    _attack("plan recordings", f"plan {BIRDS}", inputs.recordings, short=0, most=20),
    _attack("train on recordings", f"train {BIRDS}", inputs.recordings, short=0, most=20),
    _attack("train on the Hub's shards", f"train {BIRDS}", inputs.parquet, short=0, most=20),
    _attack(
        "train from an export",
        f"train {OTHER} {FROM}",
        inputs.export,
        inputs.recordings,
        short=0,
        most=20,
    ),
    _attack(
        "resume a run",
        f"train {OTHER} --config.resume.path={{input}} --config.train.steps=2",
        inputs.trained,
        inputs.recordings,
        short=0,
        most=20,
    ),
    _attack(
        "resume in a workdir",
        f"train {OTHER.replace('{out}', '{input}')} --config.train.steps=2",
        inputs.trained,
        inputs.recordings,
        short=0,
        most=30,
    ),
)

PROBES = (
    _attack(
        "classes of recordings", "call class_lists {input}", inputs.class_lists, short=6, most=200
    ),
    _attack(
        "classes of the Hub's recordings",
        "call class_lists {input}",
        inputs.class_lists_parquet,
        short=4,
        most=200,
    ),
    _attack("read recordings", "call recordings {input}", inputs.recordings, short=6, most=200),
    _attack(
        "read the Hub's recordings", "call recordings {input}", inputs.parquet, short=4, most=200
    ),
    _attack("check recordings", "call problems {input}", inputs.recordings, short=3, most=50),
    _attack("read an index", "call index {input}", inputs.index, short=4, most=150),
    _attack("read documents", "call documents {input}", inputs.tokens, short=6, most=200),
    _attack("read boards", "call puzzles {input}", inputs.boards, short=4, most=100),
    _attack(
        "read codes",
        "call codes {input}",
        inputs.codes,
        short=4,
        most=100,
        named=("codes.npz", "codes.parquet"),
    ),
)

HARMLESS = {
    "replay": (
        "it reads as `diff` and trains as `train`, which are attacked; tests/test_replay.py gives"
        " it foreign modules"
    ),
    "prove": "it reads only the runs that it has made",
    "profile": (
        "it asks a run that lives, and reads what it writes then; traces are attacked by `report`"
    ),
    "watch": "it serves the pages of `report`, which is attacked, until Ctrl-C",
    "review": (
        "it serves until it is ended: tests/workloads/bird/test_review.py gives it tables, links"
        " and requests that lie"
    ),
    "doctor": (
        "it reads data as `train` does, which is attacked, and in a process of its own:"
        " tests/doctor damages a shard"
    ),
    "sudoku": "it reads no file: its boards follow from its arguments",
    "prepare-giblet": (
        "FFmpeg reads its film: trusted, says docs/security.md; readers.py attacks its scans, codes"
        " and sheets"
    ),
}
