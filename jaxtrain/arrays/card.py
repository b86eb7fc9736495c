"""The card of an export, README.md: the Hub's metadata, the model's results, and its use."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.arrays import stored
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

`sha256sum --check SHA256SUMS` checks them. \
To warm-start a run from them, set `config.warm_start.source` to
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
    license: str = ""  # of the weights, as the Hub names it; "" = unsaid
    datasets: Sequence[str] = ()  # ids on the Hub of the data that they were trained on


def last_metrics(source: Source, step: int | None) -> dict[str, dict[str, Any]]:
    """split -> the last record of metrics.jsonl up to ``step``."""
    run = source.path.parent.parent
    records: dict[str, dict[str, Any]] = {}
    if step is None or not (run / "metrics.jsonl").exists():
        return records
    try:
        path = stored.inside(run, "metrics.jsonl")
        lines = files_lib.lines(files_lib.read_text(path, most=MAX_METRICS))
    except (files_lib.FileError, StoredError) as error:
        print(f"{error}: the card has no metrics")
        return records
    for line in lines:
        try:
            record = files_lib.parse(line, "")
        except files_lib.FileError:  # cut short by a kill, or damaged
            continue
        record_step, split = record.get("step"), record.get("split")
        if isinstance(record_step, int) and record_step <= step and isinstance(split, str):
            records[split] = record
    return records


def text(model: Model, metrics: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the card with `last_metrics`."""
    shown, left_out = {}, []
    if not model.left_out.is_part:
        for split in SPLITS:
            if split in metrics and _is_of_weights(model, split):
                shown[split] = _select(model.hub, metrics[split])
            elif split in metrics:
                left_out.append(split)
    lines = [
        *_metadata(model, shown.get("test", {})),
        "",
        f"# {model.name}",
        "",
        *_description(model),
        "",
        *_example(model.hub.example),
        "## Last metrics",
        "",
        *_metrics_table(model, metrics, shown),
    ]
    for split in left_out:
        if split == "test":
            weights, command = "the average", "`jaxtrain export --ema`"
        else:
            weights, command = "the parameters before averaging", "`jaxtrain export`"
        lines.append(
            f"\nThose of {split} are of {weights}, which {command} writes, and are not shown."
        )
    config = json.dumps(model.config, indent=2, sort_keys=True)
    return "\n".join([*lines, "", CONFIG_AND_FILES.format(config)])


def _is_of_weights(model: Model, split: str) -> bool:
    """Whether the metrics of a split are of the exported weights."""
    # An evaluation is of the average, if the run keeps one, and so are the card's numbers.
    train = model.config.get("train")
    is_averaged = split == "test" and isinstance(train, Mapping) and bool(train.get("ema"))
    return is_averaged == (model.group == "ema")


def _description(model: Model) -> list[str]:
    dtypes = sorted({entry.dtype.name for entry in model.entries})
    numbers = sum(math.prod(entry.shape) for entry in model.entries)
    weights = "the average of the parameters" if model.group == "ema" else "the parameters"
    workload = str(model.config.get("workload", "")) or "a model"
    lines = [
        f"{numbers:,} numbers in {len(model.entries)} arrays ({', '.join(dtypes)}): {weights}"
        f" of a run of {workload} at step {model.step}."
    ]
    if model.left_out.n:
        lines.append(
            f"Only parameters whose path matches `{model.left_out.only}`:"
            f" {model.left_out.n} arrays are left out."
        )
    versions = [
        f"{name} {number}" for name, number in sorted(model.meta.get("versions", {}).items())
    ]
    return [*lines, f"Trained with {', '.join(versions) or 'versions that were not recorded'}."]


def _metrics_table(
    model: Model,
    metrics: Mapping[str, Mapping[str, Any]],
    shown: Mapping[str, Mapping[str, float]],
) -> list[str]:
    workload = str(model.config.get("workload", ""))
    rows = []
    for split, values in shown.items():
        for name, value in values.items():
            meaning = glossary.meaning(name, workload=workload, split=split)
            rows.append(f"| {split} | {name} | {value} | {meaning} |")
    if rows:
        steps = ", ".join(f"{split} at step {metrics[split].get('step')}" for split in shown)
        return [
            f"The newest of each split: {steps}.",
            "",
            "| split | metric | value | meaning |",
            "|---|---|---|---|",
            *rows,
        ]
    if model.left_out.is_part:
        return ["Those of the run are of the whole model, and are not shown."]
    return ["None of these weights were found next to the checkpoint."]


def _select(hub: Hub, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that the card shows: the loss and the workload's choice, or a few."""
    values = {}
    for name, value in record.items():
        if name not in ("split", "step") and type(value) in (int, float):
            values[name] = value
    names = [name for name in hub.metrics if name in values] or sorted(values)[:MAX_ROWS]
    if "loss" in values and "loss" not in names:
        names.append("loss")
    return {name: values[name] for name in names}


def _metadata(model: Model, test: Mapping[str, float]) -> list[str]:
    """Return the YAML between two lines of ---, whose strings are JSON's, which YAML reads, too."""
    lines = [f"library_name: {model.hub.library}"]
    if model.license:
        lines.append(f"license: {model.license}")
    tags = ["jax", "jaxtrain"]
    if model.hub.task:
        lines.append(f"pipeline_tag: {model.hub.task}")
        tags.append(model.hub.task)
    lines.append(f"tags: [{', '.join(dict.fromkeys(tags))}]")
    if model.datasets:
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in model.datasets)]
    finite = {name: value for name, value in test.items() if math.isfinite(value)}
    if finite:
        lines += _results(model, finite)
    return ["---", *lines, "---"]


def _results(model: Model, values: Mapping[str, float]) -> list[str]:
    """Return the metadata's evaluation, which the Hub shows next to the model."""
    quoted = json.dumps
    dataset = quoted(model.datasets[0] if model.datasets else "held-out data")
    lines = [
        "model-index:",
        f"- name: {quoted(model.name)}",
        "  results:",
        f"  - task: {{type: {quoted(model.hub.task or 'other')}}}",
        f"    dataset: {{type: {dataset}, name: {dataset}, split: test}}",
        "    metrics:",
    ]
    for metric, value in values.items():
        name = metric if metric in KNOWN else metric.replace("_", " ")
        lines.append(
            f"    - {{type: {quoted(metric)}, name: {quoted(name)}, value: {quoted(value)}}}"
        )
    return lines


def _example(example: str) -> list[str]:
    if not example:
        return []
    condition, fence = ", with the library above", "python"
    if example.startswith("$ "):
        condition, fence = "", "bash"
    return [
        "## Use",
        "",
        f"In this folder{condition}:",
        "",
        f"```{fence}",
        example.removeprefix("$ "),
        "```",
        "",
    ]
