"""Writes docs/reference.md: every field of every config, from the dataclasses' comments.

It has the default, the unit and the meaning.

python -m tools.write_reference            # writes it
python -m tools.write_reference --check    # ends with 1 when it is not what would be written
"""

import argparse
import dataclasses
import importlib
import pathlib
import pkgutil
import re
import sys
from collections.abc import Iterator, Sequence

import loaders
from jaxtrain import workload
from jaxtrain.config import Config, gloss
from jaxtrain.telemetry import glossary
from loaders.audio.recordings import annotations, column_names

ROOT = pathlib.Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference.md"
HEAD = """# Reference: every field of a config

After this page you know every field of a config, its default, unit and meaning, every metric, \
column and error in recordings.

```
jaxtrain explain --config=xcm              # the fields of one config with its own values
jaxtrain train --config=xcm --config.train.batch=64 --config.workdir=runs/batch-64  # sets fields
```

The section `model` has the fields of the config's `workload`, and `data` those of its `loader`.
`python -m tools.write_reference` writes this page.
"""


METRICS = (
    'Each line of `metrics.jsonl` is a record, `{"step": 10, "split": "train", "loss": 2.3, …}`. '
    "X, N and K stand for a\nname or a number. `jaxtrain explain` prints those of one config, and "
    "the card of an export has them with their values."
)


COLUMNS = """These names of columns in tables of recordings are recognised \
([recordings](recordings.md#columns)). \
Of several
columns with one meaning, the name that is listed first is used."""

ERRORS = """`jaxtrain index` lists these errors ([recordings](recordings.md#errors-in-the-data)). \
`--on KIND=drop` leaves their
rows out, and `--on KIND=keep` keeps them if the column "keep" says yes."""


def page() -> str:
    parts = [HEAD, "## Every run", *table(Config, "", leave_out=("model", "data"))]
    for name in workload.shipped():
        parts += [
            f"## `model` of workload `{name}`",
            *table(workload.of(name).config_class(), "model."),
        ]
    modules = pkgutil.walk_packages(loaders.__path__, "loaders.")
    for name in sorted(m.name for m in modules if m.name != "loaders._rust"):
        module = importlib.import_module(name)
        if callable(getattr(module, "make_loader", None)):
            parts += [f"## `data` of loader `{name}`", *table(module.Config, "data.")]
    parts += [
        "## Metrics",
        METRICS,
        'Metrics of each step, split "train":',
        glossary_table(glossary.STEP),
    ]
    for name in workload.shipped():
        parts += [
            f'Metrics of `{name}`, splits "train" and "test":',
            glossary_table(glossary.of_workload(name)),
        ]
    parts += ['Metrics of the order of the examples, split "data":', glossary_table(glossary.DATA)]
    parts += ['Metrics of saves, split "save":', glossary_table(glossary.SAVE)]
    parts += ["## Columns of tables", COLUMNS, columns_table()]
    parts += ["## Errors in recordings", ERRORS, errors_table()]
    return "\n\n".join(parts) + "\n"


def glossary_table(entries: Sequence[glossary.Entry]) -> str:
    rows = [
        (", ".join(f"`{name}`" for name in entry.names.split(", ")), sentences(entry.meaning))
        for entry in entries
    ]
    return markdown(("name", "meaning"), rows)


def columns_table() -> str:
    """Return the names of columns that tables of recordings may have, by their meaning."""
    rows = [
        (meaning, ", ".join(f"`{name}`" for name in names))
        for meaning, names in column_names.NAMES.items()
    ]
    return markdown(("column", "names"), rows)


def errors_table() -> str:
    """Return the kinds of errors that `jaxtrain index` lists."""
    done = {annotations.REFUSE: "refused", annotations.DROP: "dropped", annotations.KEEP: "kept"}
    rows = [
        (f"`{kind}`", sentences(meaning), done[policy], "yes" if may_keep else "no")
        for kind, (meaning, policy, may_keep) in annotations.KINDS.items()
    ]
    return markdown(("kind", "meaning", "default", "keep"), rows)


def table(cls: type, path: str, *, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    """One Markdown table for each section: that of ``cls``, then those inside it."""
    rows = []
    inner: list[str] = []
    glosses = gloss(cls)
    leave_out += getattr(cls, "facts", ())
    for f in dataclasses.fields(cls):
        if f.name in leave_out:
            continue
        value = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        if dataclasses.is_dataclass(value):
            inner += table(type(value), f"{path}{f.name}.")
            continue
        unit, meaning = glosses[f.name]
        default = "required" if value is dataclasses.MISSING else f"`{value!r}`"
        rows.append((f"`{path}{f.name}`", default, unit, sentences(meaning)))
    if rows:
        yield markdown(("field", "default", "unit", "meaning"), rows)
    yield from inner


def sentences(meaning: str) -> str:
    """Write a comment as sentences: its clauses after a semicolon are some, too.

    A first word that is a name, as in `lora.alpha`, keeps its spelling.
    """
    clauses = [clause.rstrip(".") for clause in re.split(r"; (?![^(]*\))", meaning)]
    named = [re.match(r"[\w.]*[._=]\w", clause) for clause in clauses]
    return " ".join(
        f"{clause}." if name else f"{clause[:1].upper()}{clause[1:]}."
        for clause, name in zip(clauses, named, strict=True)
    )


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        [cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, and compare")
    if not parser.parse_args().check:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print(f"{PAGE} is out of date; run python -m tools.write_reference", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
