"""The differences between a checkpoint's config and that of the run that resumes from it.

Every section declares the kinds of its fields (`loaders.io.checks.OnResume`): a field may change,
or it changes the function that is trained, or the arrays of the state.
"""

import dataclasses
import hashlib
import json
import operator
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxtrain.config.schema import Config
from loaders.io import checks, files
from loaders.io.checks import FUNCTION

SHOWN = 120  # [characters] of a value in a message


ENVIRONMENT = "environment"  # of the settings besides the config, which are no section of it


class Change(NamedTuple):
    """A field, or a setting of the environment, with another value than in the checkpoint."""

    # within the config: "model.window", "data.sources[0].share", or "environment.XLA_FLAGS…"
    path: str
    kind: str
    old: Any
    new: Any

    def __str__(self) -> str:
        content = " with other content" if self.old == self.new else ""
        old, new = _from_first_difference(self.old, self.new)
        path = self.path if self.is_of_environment else f"config.{self.path}"
        return f"{path}: {old} saved, {new} now{content}"

    @property
    def is_of_environment(self) -> bool:
        return self.path.startswith(f"{ENVIRONMENT}.")

    def is_allowed(self, allow: Iterable[str]) -> bool:
        """Whether a name of ``allow`` is this field or a section around it."""
        for name in allow:
            if self.path == name or self.path.startswith((f"{name}.", f"{name}[")):
                return True
        return False


def _from_first_difference(old: Any, new: Any) -> tuple[str, str]:
    """Return both values as text: of two long lists, each from the first unlike item on."""
    is_long = max(len(repr(old)), len(repr(new))) > SHOWN
    if not (is_long and isinstance(old, list) and isinstance(new, list)):
        return _short(old), _short(new)
    pairs = zip(old, new, strict=False)
    n_equal = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(old), len(new)))
    beginning = "…, " if n_equal else ""
    return beginning + _short(old[n_equal:]), beginning + _short(new[n_equal:])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def compare(saved: Mapping[str, Any], config: Config, digests: Mapping[str, str]) -> list[Change]:
    """Return the fields that differ, in the order of the sections.

    ``saved``: a checkpoint's config, as JSON. Fields that it lacks, newer than the run, count as
    their defaults. ``digests``: of its files, by `digests_of`.
    """
    digests_now = digests_of(config)
    has_adapters = config.lora.rank or (saved.get("lora") or {}).get("rank")
    changes = []
    for change in _changes(saved, config, "", FUNCTION):
        if not has_adapters and change.path.startswith(("lora.", "warm_start.")):
            continue  # nothing is frozen, and there is no adapter
        saved_digest = digests.get(change.path)
        if saved_digest and saved_digest == digests_now.get(change.path):
            continue  # the same file elsewhere
        changes.append(change)
    changed_paths = {change.path for change in changes}
    for path, digest in digests_now.items():
        if path not in changed_paths and digests.get(path) not in (None, digest):
            value = operator.attrgetter(path)(config)
            changes.append(Change(path, FUNCTION, value, value))
    return changes


def digests_of(config: Config) -> dict[str, str]:
    """Return the digest of all files that fields of the kind ``files`` name, by the field."""
    digests = {}
    for name, section in (("model", config.model), ("data", config.data)):
        if not dataclasses.is_dataclass(section):
            continue
        for f in dataclasses.fields(section):
            declared = checks.declared(type(section), f.name)
            path = getattr(section, f.name)
            if not (declared and f.name in declared.files and path):
                continue
            file = files.expanded(path)
            if file.is_file():
                digests[f"{name}.{f.name}"] = digest_of(file)
    return digests


def digest_of(file: pathlib.Path) -> str:
    """Return the digest of a file that a config names, as `digests_of` records it."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()[:16]


def kinds(
    section: Any, path: str = "", around: str | None = None
) -> Iterator[tuple[str, str | None]]:
    """Yield (path, kind) of each field of a section, nested too. None: nothing declares it."""
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        field_path = f"{path}.{f.name}".strip(".")
        declared = checks.declared(type(section), f.name)
        kind = declared.kind(f.name) if declared else around
        if dataclasses.is_dataclass(value):
            yield from kinds(value, field_path, kind)
            continue
        yield field_path, kind
        if _has_sections(value):
            for i, item in enumerate(value):
                yield from kinds(item, f"{field_path}[{i}]", kind)


def _changes(old: Mapping[str, Any], section: Any, path: str, around: str) -> Iterator[Change]:
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        field_path = f"{path}.{f.name}".strip(".")
        declared = checks.declared(type(section), f.name)
        kind = declared.kind(f.name) if declared else around
        if f.name in old:
            yield from _of_value(old[f.name], value, field_path, kind)
            continue
        default = _default(f)
        if default is not None:  # None: the data decide it, which the older version did not know
            yield from _of_value(_plain(default), value, field_path, kind)


def _of_value(old: Any, value: Any, path: str, kind: str) -> Iterator[Change]:
    new = _plain(value)
    if old == new or json.dumps(old) == json.dumps(new):  # nan equals itself
        return
    if dataclasses.is_dataclass(value) and isinstance(old, Mapping):
        yield from _changes(old, value, path, kind)
    elif isinstance(old, list) and _has_sections(value) and len(old) == len(value):
        for i, item in enumerate(value):
            yield from _of_value(old[i], item, f"{path}[{i}]", kind)
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
    if f.default_factory is not dataclasses.MISSING:
        return f.default_factory()
    return None


def _plain(value: Any) -> Any:
    """Return a value as it is once it was saved: sections are objects, tuples are lists."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))
