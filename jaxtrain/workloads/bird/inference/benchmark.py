"""Benchmarks by name: the published tables' scores of a run, from the published files.

`jaxtrain.workloads.bird.commands.benchmark` describes them. Of BirdSet (Rauch et al. 2025, arXiv
2403.10380) every segment counts in cmAP and AUROC, also without a bird. Top-1 is the share of
segments with a bird whose best class is there. Classes without a segment do not count.

An archive has BirdSet's NAME_metadata_test_5s.parquet with NAME_test5s_shard_….tar.gz, or ESC's
meta/esc50.csv and audio/. Shards of Hugging Face `datasets` have the same splits and columns.
"""

import csv
import dataclasses
import io
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.workloads.bird.inference import (
    InferenceError,
    detect,
    embed,
    encoder,
    evidence,
    measures,
)
from jaxtrain.workloads.bird.inference.embeddings import Embeddings
from jaxtrain.workloads.bird.inference.embeddings import read as read_embeddings
from loaders.audio.recordings import columns, indexing, rows
from loaders.audio.recordings.annotations import Errors
from loaders.audio.spectrogram import Config as DataConfig
from loaders.base import DataError
from loaders.io import atomic_write, columnar, files

# BirdSet's, and their classes
SETS = {"POW": 48, "PER": 132, "NES": 89, "UHH": 27, "HSN": 21, "NBP": 51, "SSW": 81, "SNE": 56}
SEGMENT = 5.0  # [s]
MAX_VIEWS = 100  # of a segment, which are in memory together
MAX_FOLDS = 1000
UNKNOWN = -1e9  # the score of a class that a run has no output for
NAMES = {"cmAP": "cmAP", "AUROC": "AUROC", "accuracy": "top-1"}


def birdset(
    model: encoder.Model,
    name: str,
    data: str,
    out: pathlib.Path,
    *,
    linear: bool = False,
    draws: int = 200,
    batch: int = 64,
    names: Sequence[str] = (),
) -> list[str]:
    """Score a run on a set of BirdSet, by its own head or a ``linear`` probe on the train split.

    ``names``: of the run's classes; empty: as the run, or its data, name them. Embeddings and
    results are written to ``out``. Returns lines for people. Raises InferenceError, DataError.
    """
    splits = ("train", "test_5s") if linear else ("test_5s",)
    place = _archive(name, data, out, splits=splits)
    config = _segments(model, place)
    pool = encoder.pool_of(model)
    folders = {split: out / "embeddings" / split for split in splits}
    for split, folder in folders.items():
        embed.embed(model, config, folder, split=split, kinds=(pool,), batch=batch)
    test = read_embeddings(folders["test_5s"])
    y, decoded = test.labels()
    missing: list[str] = []
    fitted: evidence.Recordings = {}
    if linear:
        scores = _probe_scores(data, folders["train"], test, pool)
        fitted = evidence.recordings_of(read_embeddings(folders["train"]))
    else:
        scores, missing = _head_scores(model, test, names)
    y = y[decoded]
    scores = scores[decoded]
    measured = scored(scores, y, draws)
    content: dict[str, Any] = {
        "set": name,
        "segments": len(y),
        "unreadable": int((~decoded).sum()),
        "classes": y.shape[1],
        "without a segment": int((~y.any(0)).sum()),
        "not in the run": missing,
        "scores": "probe" if linear else "head",
    }
    of_recordings = evidence.of(evidence.recordings_of(test), fitted)
    content["evidence"] = of_recordings.about()
    for measure, value in measured.items():
        content[NAMES[measure]] = value
    n_with_bird = int(y.any(1).sum())
    _write_results(content, out)
    return _birdset_lines(content, n_with_bird) + of_recordings.lines()


def _segments(model: encoder.Model, place: str) -> DataConfig:
    """Return the data whose views cover a segment. Raises DataError, InferenceError."""
    config = encoder.data_config(
        model,
        train=place,
        test="",
        views=1,
        time_expansion=1.0,
        label="ebird_code_multilabel",
        multilabel=True,
    )
    for field, problem in encoder.of_split(config, "test_5s").validate():
        raise DataError(f"data.{field} {problem}")
    views = max(1, math.ceil(SEGMENT / config.clip_seconds - 1e-6))
    if views > MAX_VIEWS:
        raise InferenceError(
            f"{model.name} hears {config.clip_seconds:g} s at a time, of which a segment of"
            f" {SEGMENT:g} s has {views:,}; at most {MAX_VIEWS} are scored"
        )
    return dataclasses.replace(config, views=views)


def _birdset_lines(content: Mapping[str, Any], n_with_bird: int) -> list[str]:
    name = content["set"]
    if content["scores"] == "probe":
        scorer = "a linear probe on its train split"
    else:
        scorer = "the run's own head"
    values = [f"{key} {measures.percent(content[key], 2)}" for key in NAMES.values()]
    lines = [
        f"BirdSet {name}, {content['segments']:,} segments ({n_with_bird:,} with a bird),"
        f" {content['classes']} classes, by {scorer}",
        "   ".join(values),
    ]
    if content["classes"] != SETS[name]:
        lines.append(
            f"the published {name} has {SETS[name]} classes, and these data have"
            f" {content['classes']}: compare with no table"
        )
    if content["unreadable"]:
        lines.append(f"{content['unreadable']} segments cannot be decoded and do not count")
    if missing := content["not in the run"]:
        lines.append(
            f"{len(missing)} classes are none of the run's, and count as never heard:"
            f" {', '.join(missing[:10])}"
        )
    if content["without a segment"]:
        lines.append(f"{content['without a segment']} classes are in no segment and do not count")
    return lines


def scored(scores: np.ndarray, y: np.ndarray, draws: int) -> dict[str, dict[str, float]]:
    """Return accuracy, cmAP and AUROC of scores [n, C], with intervals. Raises InferenceError."""
    if not y.any():
        raise InferenceError("no segment has a label; name the data with their split test_5s")
    return measures.summarised(scores, y, measures.bootstrap(len(y), draws))


def _write_results(content: Mapping[str, Any], out: pathlib.Path) -> None:
    atomic_write.write(out / "results.json", json.dumps(content, indent=2) + "\n")


def _probe_scores(data: str, train_folder: pathlib.Path, test: Embeddings, pool: str) -> np.ndarray:
    """Return the logits [n, C] by a linear probe. Raises InferenceError."""
    from jaxtrain.workloads.bird.inference import probe  # which needs scikit-learn

    train = probe.read(train_folder, kind=pool)
    if train.names != test.names:
        raise InferenceError(f"{data}: its train split has other classes than test_5s")
    x_test = np.asarray(test.array(pool, 2), np.float32)
    return probe.linear(train.x, train.y, x_test, multilabel=True)


def _head_scores(
    model: encoder.Model, test: Embeddings, names: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """Return the logits [n, C] of the set's classes by a run's head, and those that it lacks."""
    if not test.has("scores"):
        raise InferenceError(
            f"{model.name} has no head for classes: it was trained without labels, or is an encoder"
            " alone; add --probe"
        )
    logits = np.array(test.array("scores", 2), np.float32)
    run_names = tuple(names) or detect.class_names(model)
    if len(run_names) != logits.shape[1]:
        names_text = f"{len(run_names)} names" if run_names else "no names"
        raise InferenceError(
            f"{model.name} has {logits.shape[1]} classes and {names_text}; list them, one a line:"
            " --names FILE"
        )
    columns_by_name = {name: column for column, name in enumerate(run_names)}
    missing = [name for name in test.names if name not in columns_by_name]
    if len(missing) == len(test.names):
        raise InferenceError(
            f"{model.name} has none of the classes {', '.join(test.names[:5])} …, but"
            f" {', '.join(run_names[:5])} …; add --probe"
        )
    scores = np.full((len(logits), len(test.names)), UNKNOWN, np.float32)
    for c, name in enumerate(test.names):
        column = columns_by_name.get(name)
        if column is not None:
            scores[:, c] = logits[:, column]
    return scores, missing


def _archive(name: str, data: str, out: pathlib.Path, *, splits: Sequence[str]) -> str:
    """Return the data that the loader reads: ``data`` itself, or an index of the archive."""
    folder = files.expanded(data)
    candidates = folder.glob(f"{name}_metadata_*")
    tables = sorted(path for path in candidates if path.suffix in (".parquet", ".csv"))
    if not tables:
        other_tables = sorted(folder.glob("*_metadata_*")) if folder.is_dir() else []
        if other_tables:
            raise InferenceError(
                f"{folder} holds {other_tables[0].name}, and nothing of {name}; name the set that"
                " is there"
            )
        return data
    of_splits = re.compile(rf"_metadata_({'|'.join(splits)})\.")
    split_tables = [path for path in tables if of_splits.search(path.name)]
    if len(split_tables) < len(splits):
        raise InferenceError(
            f"{folder} holds {', '.join(p.name for p in tables)}; expected the metadata of"
            f" {', '.join(splits)}"
        )
    spellings = [split.replace("test_5s", "test_?5s") for split in splits]
    shards = re.compile(rf"_({'|'.join(spellings)})_shard")
    in_folder = indexing.archives_in(folder)
    archives = [str(path) for path in in_folder if shards.search(path.name)]
    recordings = folder
    if archives:
        recordings = out / "recordings"
        indexing.unpack(archives, recordings)
    codes: set[str] = set()
    for path in tables:  # the set's classes are those of all its splits
        files.inside(folder, path.name)
        codes |= _codes_in(path)
    class_file = out / "classes.txt"
    out.mkdir(parents=True, exist_ok=True)
    lines = [f"{code}\n" for code in sorted(codes)]
    atomic_write.write(class_file, "".join(lines))
    index = out / "index"
    _index(
        [str(path) for path in split_tables],
        index,
        audio=str(recordings),
        classes=str(class_file) if codes else "",
    )
    return str(index)


def _codes_in(path: pathlib.Path) -> set[str]:
    """Return the classes that a table of metadata names. Raises InferenceError."""
    if path.suffix != ".parquet":
        return set()
    codes: set[str] = set()
    try:
        for column in ("ebird_code", "ebird_code_multilabel"):
            for value in columnar.read_some(path, column).get(column, ()):
                if isinstance(value, str) and value:
                    codes.add(value)
                elif isinstance(value, list | tuple):
                    codes.update(str(code) for code in value)
    except (ValueError, OSError) as error:
        raise InferenceError(f"{path} cannot be read: {error}") from error
    return codes


def _index(sources: list[str], out: pathlib.Path, *, audio: str, classes: str = "") -> None:
    """Make an index, or bring it up to date. Raises DataError."""
    errors = Errors(["duplicate-content=keep", "leaking-recording=keep"])
    indexing.make(
        sources,
        out,
        reading=columns.Options(audio=audio),
        options=rows.Options(),
        class_file=classes,
        root=audio,
        errors=errors,
        note=lambda line: None,
    )


def esc(
    model: encoder.Model,
    name: str,
    data: str,
    out: pathlib.Path,
    *,
    draws: int = 200,
    batch: int = 64,
    views: int = 1,
) -> list[str]:
    """Score frozen features in the five folds of ESC, as `birdset` does."""
    from jaxtrain.workloads.bird.inference import probe  # which needs scikit-learn

    folder = files.expanded(data)
    table = folder / "meta" / "esc50.csv"
    pool = encoder.pool_of(model)
    place = data
    fold_columns = ["fold"]
    fold_by_file: dict[str, int] = {}
    if table.is_file():
        inside = files.inside(folder, "meta/esc50.csv")
        fold_by_file = _esc_table(inside, out, only_ten=name == "esc10")
        index = out / "index"
        _index([str(out / "table.csv")], index, audio=str(folder / "audio"))
        place = str(index)
        fold_columns = []
    elif folder.is_dir() and list(folder.glob("*/*.arrow")):
        place = f"{data}/*/*.arrow"
    config = encoder.data_config(
        model,
        train=place,
        test="",
        label="label",
        multilabel=False,
        views=views,
        time_expansion=1.0,
    )
    embeddings = out / "embeddings"
    embed.embed(model, config, embeddings, kinds=(pool,), columns=fold_columns, batch=batch)
    if fold_by_file:
        _save_folds(embeddings, fold_by_file, table)
    features = probe.read(embeddings, kind=pool, group="fold")
    splits = probe.folds_of(features)
    results = probe.evaluate(splits, draws=draws, shots=())
    n_clips, n_classes = features.y.shape
    content: dict[str, Any] = {
        "set": name,
        "clips": n_clips,
        "classes": n_classes,
        "folds": len(splits),
    }
    lines = [f"{name}, {n_clips:,} clips of {n_classes} classes in {len(splits)} folds"]
    for classifier in ("linear", "knn"):
        accuracy = results[classifier]["accuracy"]
        content[classifier] = accuracy
        folds = [f"{100 * value:.1f}" for value in accuracy.get("folds", [])]
        by_fold = ", ".join(folds)
        interval = measures.percent(accuracy, 2)
        lines.append(f"{classifier:7} accuracy {interval}   by fold: {by_fold}")
    content["evidence"] = results["evidence"]
    lines += results["evidence"]["in words"]
    published_classes = 10 if name == "esc10" else 50
    if (n_classes, len(splits)) != (published_classes, 5):
        lines.append(
            f"the published {name} has {published_classes} classes in 5 folds: compare with no"
            " table"
        )
    _write_results(content, out)
    return lines


def _save_folds(
    embeddings: pathlib.Path, fold_by_file: Mapping[str, int], table: pathlib.Path
) -> None:
    """Write the fold of each embedded clip. Raises InferenceError."""
    paths = read_embeddings(embeddings).places().paths
    names = [path.rpartition("/")[2] for path in paths]
    if unnamed := [name for name in names if name not in fold_by_file]:
        raise InferenceError(
            f"{table} has no line for {unnamed[0]!r}; write its names as the files have them"
        )
    folds = np.array([fold_by_file[name] for name in names], np.int64)
    atomic_write.save(embeddings / "fold.npy", folds)


class _Clip(NamedTuple):
    """A line of ESC's table."""

    file: str
    fold: int
    category: str


def _esc_table(path: pathlib.Path, out: pathlib.Path, *, only_ten: bool) -> dict[str, int]:
    """Write out/table.csv, file and label of each clip. Return the folds by file name."""
    try:
        clips = _read_clips(path, only_ten)
    except (files.FileError, KeyError, ValueError, csv.Error, AttributeError) as error:
        raise InferenceError(
            f"{path} is not ESC's table (filename, fold, category, esc10): {error!r}"
        ) from error
    if not clips:
        raise InferenceError(f"{path} names no clip of {'ESC-10' if only_ten else 'ESC-50'}")
    out.mkdir(parents=True, exist_ok=True)
    labels = [(clip.file, clip.category) for clip in clips]
    atomic_write.write_csv(out / "table.csv", [("file", "label"), *labels])
    return {clip.file: clip.fold for clip in clips}


def _read_clips(path: pathlib.Path, only_ten: bool) -> list[_Clip]:
    text = files.read_text(path, most=files.MAX_JSON)
    clips = []
    for row in csv.DictReader(io.StringIO(text)):
        if not only_ten or row["esc10"].strip().lower() == "true":
            clips.append(_Clip(row["filename"], int(row["fold"]), row["category"]))
    for clip in clips:
        if "/" in clip.file or not 0 <= clip.fold < MAX_FOLDS:
            raise ValueError(f"{clip.file[:80]!r} in fold {str(clip.fold)[:20]}")
    return clips
