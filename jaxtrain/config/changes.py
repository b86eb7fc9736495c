"""The differences between a checkpoint's config and that of the run that resumes from it.

Every section declares the kinds of its fields (`loaders.io.checks.OnResume`): a field may change,
or it changes the function that is trained, or the arrays of the state.
"""

import dataclasses
import hashlib
import json
import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxtrain.config.schema import Config
from loaders.io import checks, files
from loaders.io.checks import FUNCTION

SHOWN = 120  # [characters] of a value in a message


class Change(NamedTuple):
    """A field with another value than in the checkpoint."""

    path: str  # within the config: "model.window", "data.sources[0].share"
    kind: str
    old: Any
    new: Any

    def __str__(self) -> str:
        old, new = (
            text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
            for text in map(repr, (self.old, self.new))
        )
        same = " with other content" if self.old == self.new else ""
        return f"config.{self.path}: {old} saved, {new} now{same}"

    def is_allowed(self, allow: Iterable[str]) -> bool:
        """Whether a name of ``allow`` is this field or a section around it."""
        return any(
            self.path == name or self.path.startswith((f"{name}.", f"{name}[")) for name in allow
        )


def compare(saved: Mapping[str, Any], config: Config, digests: Mapping[str, str]) -> list[Change]:
    """Return the fields that differ, in the order of the sections.

    ``saved``: a checkpoint's config, as JSON. Fields that it lacks, newer than the run, count as
    their defaults. ``digests``: of its files, by `digests_of`.
    """
    now = digests_of(config)
    adapted = config.lora.rank or (saved.get("lora") or {}).get("rank")
    found = [
        change
        for change in _changes(saved, config, "", FUNCTION)
        # else nothing is frozen, and there is no adapter
        if adapted or not change.path.startswith(("lora.", "warm_start."))
        # else the same file elsewhere
        if not digests.get(change.path) or digests[change.path] != now.get(change.path)
    ]
    paths = {change.path for change in found}
    edited = [
        path for path in now if path not in paths and digests.get(path) not in (None, now[path])
    ]
    values = {path: operator.attrgetter(path)(config) for path in edited}
    return found + [Change(path, FUNCTION, value, value) for path, value in values.items()]


def digests_of(config: Config) -> dict[str, str]:
    """Return the digest of all files that fields of the kind ``files`` name, by the field."""
    found = {}
    for name, section in (("model", config.model), ("data", config.data)):
        for f in dataclasses.fields(section) if dataclasses.is_dataclass(section) else ():
            declared = checks.declared(type(section), f.name)
            path = getattr(section, f.name)
            if (
                declared
                and f.name in declared.files
                and path
                and (file := files.expanded(path)).is_file()
            ):
                with file.open("rb") as opened:
                    found[f"{name}.{f.name}"] = hashlib.file_digest(opened, "sha256").hexdigest()[
                        :16
                    ]
    return found


def kinds(
    section: Any, path: str = "", around: str | None = None
) -> Iterator[tuple[str, str | None]]:
    """Yield (path, kind) of each field of a section, nested too. None: nothing declares it."""
    for f in dataclasses.fields(section):
        value, where = getattr(section, f.name), f"{path}.{f.name}".strip(".")
        declared = checks.declared(type(section), f.name)
        kind = declared.kind(f.name) if declared else around
        if dataclasses.is_dataclass(value):
            yield from kinds(value, where, kind)
        else:
            yield where, kind
            for i, part in enumerate(value if _has_sections(value) else ()):
                yield from kinds(part, f"{where}[{i}]", kind)


def _changes(old: Mapping[str, Any], section: Any, path: str, around: str) -> Iterator[Change]:
    for f in dataclasses.fields(section):
        value, where = getattr(section, f.name), f"{path}.{f.name}".strip(".")
        declared = checks.declared(type(section), f.name)
        kind = declared.kind(f.name) if declared else around
        if f.name in old:
            yield from _of_value(old[f.name], value, where, kind)
        # None: the data decide it, which the older version did not know
        elif (default := _default(f)) is not None:
            yield from _of_value(_plain(default), value, where, kind)


def _of_value(old: Any, value: Any, path: str, kind: str) -> Iterator[Change]:
    new = _plain(value)
    if old == new or json.dumps(old) == json.dumps(new):  # nan equals itself
        return
    if dataclasses.is_dataclass(value) and isinstance(old, Mapping):
        yield from _changes(old, value, path, kind)
    elif isinstance(old, list) and _has_sections(value) and len(old) == len(value):
        for i, (a, b) in enumerate(zip(old, value, strict=True)):
            yield from _of_value(a, b, f"{path}[{i}]", kind)
    elif isinstance(value, Mapping) and isinstance(old, Mapping):
        for key in sorted({*old, *new}):
            yield from _of_value(old.get(key), new.get(key), f"{path}.{key}", kind)
    else:
        yield Change(path, kind, old, new)


def _has_sections(value: Any) -> bool:
    return isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value))


def _default(f: dataclasses.Field[Any]) -> Any:
    if f.default is not dataclasses.MISSING:
        return f.default
    return None if f.default_factory is dataclasses.MISSING else f.default_factory()


def _plain(value: Any) -> Any:
    """Return a value as it is once it was saved: sections are objects, tuples are lists."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))
