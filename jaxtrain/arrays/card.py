"""The card of an export, README.md: the Hub's metadata, the model's results, and its use."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain import config as config_lib
from jaxtrain.arrays import run_workload, stored
from jaxtrain.arrays.source import Source
from jaxtrain.arrays.stored import StoredError
from jaxtrain.telemetry import glossary
from jaxtrain.types import Hub
from loaders.io import files as files_lib

SPLITS = ("test", "train")  # in this order: how good the model is comes first
MAX_METRICS = 1 << 30  # [bytes] of metrics.jsonl
MAX_ROWS = 8  # of a split, if the workload names no metrics
KNOWN = {"accuracy", "perplexity"}  # the Hub's own names of metrics
CONFIG_AND_FILES = """## Config

<details><summary>of the run</summary>

```json
{}
```

</details>

## Files

`sha256sum --check SHA256SUMS` checks them. To warm-start a run from them, set `config.warm_start.source` to
this folder; `jaxtrain export --reverse` makes a checkpoint of it.
"""


class LeftOut(NamedTuple):
    only: str = ""  # [regex] of the paths that are exported
    n: int = 0  # arrays left out
    is_part: bool = False  # whether a library that loads the model needs one of them


class Model(NamedTuple):
    name: str  # of the run
    step: int | None
    group: str  # params or ema
    entries: Sequence[Any]  # `safetensors.Entry`
    config: Mapping[str, Any]  # of the run
    meta: Mapping[str, Any]
    hub: Hub
    left_out: LeftOut = LeftOut()


def last_metrics(source: Source, step: int | None) -> dict[str, dict[str, Any]]:
    """split -> the last record of metrics.jsonl up to ``step``."""
    run = source.path.parent.parent
    records: dict[str, dict[str, Any]] = {}
    if step is None or not (run / "metrics.jsonl").exists():
        return records
    try:
        lines = files_lib.lines(
            files_lib.read_text(stored.inside(run, "metrics.jsonl"), most=MAX_METRICS)
        )
    except (files_lib.FileError, StoredError) as error:
        print(f"{error}: the card has no metrics")
        return records
    for line in lines:
        try:
            record = files_lib.parse(line, "")
        except files_lib.FileError:  # cut short by a kill, or damaged
            continue
        at, split = record.get("step"), record.get("split")
        if isinstance(at, int) and at <= step and isinstance(split, str):
            records[split] = record
    return records


def text(model: Model, metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the card with `last_metrics`. Raises StoredError: config.card is no section."""
    step, config, only, n_left_out = model.step, model.config, model.left_out.only, model.left_out.n
    kinds = sorted({e.dtype.name for e in model.entries})
    numbers = sum(math.prod(e.shape) for e in model.entries)
    what = "the average of the parameters" if model.group == "ema" else "the parameters"
    # An evaluation is of the average, if the run keeps one, and so are the card's numbers.
    averaged = isinstance(train := config.get("train"), Mapping) and bool(train.get("ema"))
    others = [
        split
        for split in SPLITS
        if split in metrics and (model.group == "ema") != (averaged and split == "test")
    ]
    whole = () if model.left_out.is_part else SPLITS
    chosen = {
        split: _chosen(model.hub, metrics[split])
        for split in whole
        if split in metrics and split not in others
    }
    name = str(config.get("workload", ""))
    rows = [
        f"| {split} | {each} | {value} | {glossary.meaning(each, workload=name, split=split)} |"
        for split, values in chosen.items()
        for each, value in values.items()
    ]
    at = ", ".join(f"{split} at step {metrics[split].get('step')}" for split in chosen)
    versions = ", ".join(f"{k} {v}" for k, v in sorted(model.meta.get("versions", {}).items()))
    return "\n".join(
        [
            *_metadata(model, chosen.get("test", {})),
            "",
            f"# {model.name}",
            "",
            (
                f"{numbers:,} numbers in {len(model.entries)} arrays ({', '.join(kinds)}): {what}"
                f" of a run of {name or 'a model'} at step {step}."
            ),
            *(
                [f"Only parameters whose path matches `{only}`: {n_left_out} arrays are left out."]
                if n_left_out
                else []
            ),
            f"Trained with {versions or 'versions that were not recorded'}.",
            "",
            *_example(model.hub.example),
            "## Last metrics",
            "",
            *(
                [
                    f"The newest of each split: {at}.",
                    "",
                    "| split | metric | value | meaning |",
                    "|---|---|---|---|",
                    *rows,
                ]
                if rows
                else (
                    ["Those of the run are of the whole model, and are not shown."]
                    if model.left_out.is_part
                    else ["None of these weights were found next to the checkpoint."]
                )
            ),
            *(
                f"\nThose of {split} are of"
                f" {'the average' if split == 'test' else 'the parameters before averaging'}, which"
                f" {'`jaxtrain export --ema`' if split == 'test' else '`jaxtrain export`'} writes,"
                " and are not shown."
                for split in ([] if model.left_out.is_part else others)
            ),
            "",
            CONFIG_AND_FILES.format(json.dumps(config, indent=2, sort_keys=True)),
        ]
    )


def _chosen(hub: Hub, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the card shows: the loss and the workload's choice, or a few."""
    values = {
        k: v for k, v in record.items() if k not in ("split", "step") and type(v) in (int, float)
    }
    names = [name for name in hub.metrics if name in values] or sorted(values)[:MAX_ROWS]
    return {
        name: values[name]
        for name in dict.fromkeys((*names, *(["loss"] if "loss" in values else [])))
    }


def _metadata(model: Model, test: Mapping[str, float]) -> list[str]:
    """Return the YAML between two lines of ---, whose strings are JSON's, which YAML reads, too."""
    quoted, card = json.dumps, run_workload.section_of(model.config, "card", config_lib.Card)
    lines = [f"library_name: {model.hub.library}"]
    if card.license:
        lines.append(f"license: {card.license}")
    if model.hub.task:
        lines.append(f"pipeline_tag: {model.hub.task}")
    lines.append(
        "tags:"
        f" [{', '.join(dict.fromkeys(('jax', 'jaxtrain', *([model.hub.task] if model.hub.task else []))))}]"
    )
    if card.datasets:
        lines += ["datasets:", *(f"- {quoted(name)}" for name in card.datasets)]
    values = {name: value for name, value in test.items() if math.isfinite(value)}
    if values:
        data = card.datasets[0] if card.datasets else "held-out data"
        names = {
            metric: metric if metric in KNOWN else metric.replace("_", " ") for metric in values
        }
        lines += [
            "model-index:",
            f"- name: {quoted(model.name)}",
            "  results:",
            f"  - task: {{type: {quoted(model.hub.task or 'other')}}}",
            f"    dataset: {{type: {quoted(data)}, name: {quoted(data)}, split: test}}",
            "    metrics:",
            *(
                f"    - {{type: {quoted(n)}, name: {quoted(names[n])}, value: {quoted(v)}}}"
                for n, v in values.items()
            ),
        ]
    return ["---", *lines, "---"]


def _example(example: str) -> list[str]:
    if not example:
        return []
    where, kind = (
        ("", "bash") if example.startswith("$ ") else (", with the library above", "python")
    )
    return [
        "## Use",
        "",
        f"In this folder{where}:",
        "",
        f"```{kind}",
        example.removeprefix("$ "),
        "```",
        "",
    ]
