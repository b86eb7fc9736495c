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
from typing import Any

import numpy as np

from jaxtrain.workloads.bird.inference import InferenceError, detect, embed, encoder, measures
from jaxtrain.workloads.bird.inference.embeddings import Embeddings
from jaxtrain.workloads.bird.inference.embeddings import read as read_embeddings
from loaders.audio.recordings import columns, indexing, rows
from loaders.audio.recordings.annotations import Errors
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
    labels: dict[str, Any] = {"label": "ebird_code_multilabel", "multilabel": True}
    place = _archive(name, data, out, splits=splits)
    config = encoder.data_config(model, train=place, test="", views=1, time_expansion=1.0, **labels)
    for where, text in encoder.of_split(config, "test_5s").validate():
        raise DataError(f"data.{where} {text}")
    views = max(1, math.ceil(SEGMENT / config.clip_seconds - 1e-6))
    if views > MAX_VIEWS:
        raise InferenceError(
            f"{model.name} hears {config.clip_seconds:g} s at a time, of which a segment of"
            f" {SEGMENT:g} s has {views:,}; at most {MAX_VIEWS} are scored"
        )
    config = dataclasses.replace(config, views=views)
    pool = encoder.pool_of(model)
    folders = {split: out / "embeddings" / split for split in splits}
    for split, folder in folders.items():
        embed.embed(model, config, folder, split=split, kinds=(pool,), batch=batch)
    test = read_embeddings(folders["test_5s"])
    y, decoded = test.labels()
    missing: list[str] = []
    if linear:
        from jaxtrain.workloads.bird.inference import probe  # which needs scikit-learn

        train = probe.read(folders["train"], kind=pool)
        if train.names != test.names:
            raise InferenceError(f"{data}: its train split has other classes than test_5s")
        scores = probe.linear(
            train.x, train.y, np.asarray(test.array(pool, 2), np.float32), multilabel=True
        )
    else:
        scores, missing = _own(model, test, names)
    y, scores = y[decoded], scores[decoded]
    content: dict[str, Any] = {"set": name, "segments": len(y), "unreadable": int((~decoded).sum())}
    content |= {
        "classes": y.shape[1],
        "without a segment": int((~y.any(0)).sum()),
        "not in the run": missing,
        "scores": "probe" if linear else "head",
    }
    content |= {NAMES[k]: v for k, v in scored(scores, y, draws).items()}
    lines = [
        f"BirdSet {name}, {content['segments']:,} segments ({int(y.any(1).sum()):,} with a bird),"
        f" {y.shape[1]} classes, by "
        + ("a linear probe on its train split" if linear else "the run's own head"),
        "   ".join(f"{each} {measures.percent(content[each], 2)}" for each in NAMES.values()),
    ]
    if y.shape[1] != SETS[name]:
        lines.append(
            f"the published {name} has {SETS[name]} classes, and these data have {y.shape[1]}:"
            " compare with no table"
        )
    if content["unreadable"]:
        lines.append(f"{content['unreadable']} segments cannot be decoded and do not count")
    if missing:
        lines.append(
            f"{len(missing)} classes are none of the run's, and count as never heard:"
            f" {', '.join(missing[:10])}"
        )
    if content["without a segment"]:
        lines.append(f"{content['without a segment']} classes are in no segment and do not count")
    return _written(content, lines, out)


def scored(scores: np.ndarray, y: np.ndarray, draws: int) -> dict[str, dict[str, float]]:
    """Return accuracy, cmAP and AUROC of scores [n, C], with intervals. Raises InferenceError."""
    if not y.any():
        raise InferenceError("no segment has a label; name the data with their split test_5s")
    return measures.summarised(scores, y, measures.bootstrap(len(y), draws))


def _written(content: Mapping[str, Any], lines: list[str], out: pathlib.Path) -> list[str]:
    atomic_write.write(out / "results.json", json.dumps(content, indent=2) + "\n")
    return lines


def _own(
    model: encoder.Model, test: Embeddings, names: Sequence[str]
) -> tuple[np.ndarray, list[str]]:
    """Return the logits [n, C] of the set's classes by a run's head, and those that it lacks."""
    if not test.has("scores"):
        raise InferenceError(
            f"{model.name} has no head for classes: it was trained without labels, or is an encoder"
            " alone; add --probe"
        )
    logits = np.array(test.array("scores", 2), np.float32)
    known = tuple(names) or detect.class_names(model)
    if len(known) != logits.shape[1]:
        what = f"{len(known)} names" if known else "no names"
        raise InferenceError(
            f"{model.name} has {logits.shape[1]} classes and {what}; list them, one a line: --names"
            " FILE"
        )
    places = {each: i for i, each in enumerate(known)}
    missing = [each for each in test.names if each not in places]
    if len(missing) == len(test.names):
        raise InferenceError(
            f"{model.name} has none of the classes {', '.join(test.names[:5])} …, but"
            f" {', '.join(known[:5])} …; add --probe"
        )
    scores = np.full((len(logits), len(test.names)), UNKNOWN, np.float32)
    for c, each in enumerate(test.names):
        if each in places:
            scores[:, c] = logits[:, places[each]]
    return scores, missing


def _archive(name: str, data: str, out: pathlib.Path, *, splits: Sequence[str]) -> str:
    """Return the data that the loader reads: ``data`` itself, or an index of the archive."""
    folder = files.expanded(data)
    tables = sorted(
        path for path in folder.glob(f"{name}_metadata_*") if path.suffix in (".parquet", ".csv")
    )
    if not tables:
        others = sorted(folder.glob("*_metadata_*")) if folder.is_dir() else []
        if others:
            raise InferenceError(
                f"{folder} holds {others[0].name}, and nothing of {name}; name the set that is"
                " there"
            )
        return data
    chosen = [path for path in tables if re.search(rf"_metadata_({'|'.join(splits)})\.", path.name)]
    if len(chosen) < len(splits):
        raise InferenceError(
            f"{folder} holds {', '.join(p.name for p in tables)}; expected the metadata of"
            f" {', '.join(splits)}"
        )
    shards = "|".join({"test_5s": "test_?5s"}.get(split, split) for split in splits)
    archives = [
        str(path)
        for path in indexing.archives_in(folder)
        if re.search(rf"_({shards})_shard", path.name)
    ]
    recordings = out / "recordings" if archives else folder
    if archives:
        indexing.unpack(archives, recordings)
    codes: set[str] = set()
    for path in tables:  # the set's classes are those of all its splits
        files.inside(folder, path.name)
        try:
            for column in ("ebird_code", "ebird_code_multilabel"):
                for value in (
                    columnar.read_some(path, column).get(column, ())
                    if path.suffix == ".parquet"
                    else ()
                ):
                    codes |= {value} if isinstance(value, str) and value else set()
                    codes |= (
                        {str(each) for each in value} if isinstance(value, list | tuple) else set()
                    )
        except (ValueError, OSError) as error:
            raise InferenceError(f"{path} cannot be read: {error}") from error
    classes = out / "classes.txt"
    out.mkdir(parents=True, exist_ok=True)
    atomic_write.write(classes, "".join(f"{code}\n" for code in sorted(codes)))
    _index(
        [str(path) for path in chosen],
        out / "index",
        audio=str(recordings),
        classes=str(classes) if codes else "",
    )
    return str(out / "index")


def _index(given: Sequence[str], out: pathlib.Path, *, audio: str, classes: str = "") -> None:
    """Make an index, or brings it up to date. Raises DataError."""
    errors = Errors(["duplicate-content=keep", "leaking-recording=keep"])
    indexing.make(
        list(given),
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
    about = folder / "meta" / "esc50.csv"
    pool = encoder.pool_of(model)
    place, columns = data, ["fold"]
    by_file: dict[str, int] = {}
    if about.is_file():
        by_file = _esc_table(files.inside(folder, "meta/esc50.csv"), out, only_ten=name == "esc10")
        _index([str(out / "table.csv")], out / "index", audio=str(folder / "audio"))
        place, columns = str(out / "index"), []
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
    embed.embed(model, config, out / "embeddings", kinds=(pool,), columns=columns, batch=batch)
    if by_file:
        names = [
            path.rpartition("/")[2] for path in read_embeddings(out / "embeddings").places().paths
        ]
        if unnamed := [name for name in names if name not in by_file]:
            raise InferenceError(
                f"{about} has no line for {unnamed[0]!r}; write its names as the files have them"
            )
        atomic_write.save(
            out / "embeddings" / "fold.npy", np.array([by_file[name] for name in names], np.int64)
        )
    features = probe.read(out / "embeddings", kind=pool, group="fold")
    expected = 10 if name == "esc10" else 50
    splits = probe.folds_of(features)
    results = probe.evaluate(splits, draws=draws, shots=())
    n, n_classes = features.y.shape
    content: dict[str, Any] = {"set": name, "clips": n, "classes": n_classes, "folds": len(splits)}
    lines = [f"{name}, {n:,} clips of {n_classes} classes in {len(splits)} folds"]
    for each in ("linear", "knn"):
        content[each] = accuracy = results[each]["accuracy"]
        by_fold = ", ".join(f"{100 * x:.1f}" for x in accuracy.get("folds", []))
        lines.append(f"{each:7} accuracy {measures.percent(accuracy, 2)}   by fold: {by_fold}")
    if (n_classes, len(splits)) != (expected, 5):
        lines.append(
            f"the published {name} has {expected} classes in 5 folds: compare with no table"
        )
    return _written(content, lines, out)


def _esc_table(path: pathlib.Path, out: pathlib.Path, *, only_ten: bool) -> dict[str, int]:
    """Write out/table.csv, file and label of each clip. Return the folds by file name."""
    try:
        lines = list(csv.DictReader(io.StringIO(files.read_text(path, most=files.MAX_JSON))))
        chosen = [line for line in lines if not only_ten or line["esc10"].strip().lower() == "true"]
        folds = {line["filename"]: int(line["fold"]) for line in chosen}
        labels = [(line["filename"], line["category"]) for line in chosen]
        if odd := [
            name for name, fold in folds.items() if "/" in name or not 0 <= fold < MAX_FOLDS
        ]:
            raise ValueError(f"{odd[0][:80]!r} in fold {str(folds[odd[0]])[:20]}")
    except (files.FileError, KeyError, ValueError, csv.Error, AttributeError) as error:
        raise InferenceError(
            f"{path} is not ESC's table (filename, fold, category, esc10): {error!r}"
        ) from error
    if not folds:
        raise InferenceError(f"{path} names no clip of {'ESC-10' if only_ten else 'ESC-50'}")
    out.mkdir(parents=True, exist_ok=True)
    atomic_write.write_csv(out / "table.csv", [("file", "label"), *labels])
    return folds
