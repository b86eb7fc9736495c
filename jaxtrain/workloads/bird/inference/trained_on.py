"""The recordings that a run was trained on. Its scores on them flatter, and so do its features'.

A run that was trained on an index has their names, sizes and digests in its workdir
(`jaxtrain.telemetry.training_sources`). Of other data, names are compared, if the data are here.
"""

import csv
import io
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain import config as config_lib
from jaxtrain.arrays import stored
from jaxtrain.telemetry import training_sources
from jaxtrain.workloads.bird.inference import encoder
from loaders.audio import spectrogram
from loaders.audio.recordings import headers
from loaders.base import DataError
from loaders.io import files

LOADER = spectrogram.__name__
MAX_BYTES = 1 << 30  # of a list of recordings
MAX_ROWS = 2_000_000  # of data whose names are read
Content = tuple[int, str]  # size and digest


class TrainedOn(NamedTuple):
    """The recordings of a run."""

    contents: frozenset[Content]
    names: frozenset[str]  # of all
    bare_names: frozenset[str]  # of those whose content is not known
    full_names: frozenset[str] = frozenset()  # of all, with their endings

    def has(self, name: str, content: Content | None) -> bool | None:
        """Whether a recording is one of them, by its content, or else by its name.

        None if it has other bytes and the name of one with another ending, as a converted one has.
        """
        if content is None:
            return _stem(name) in self.names
        if content in self.contents or _stem(name) in self.bare_names:
            return True
        may_be_converted = _stem(name) in self.names and _base(name) not in self.full_names
        return None if may_be_converted else False


def of_model(model: encoder.Model) -> TrainedOn | None:
    """Return the recordings of a run, or None if they are not known."""
    if not model.path:  # its weights are initialised
        return TrainedOn(frozenset(), frozenset(), frozenset())
    sources = _written_down(model.path)
    if sources is None:
        sources = _of_data(model)
    if sources is None:
        return None
    contents = frozenset(content for content in sources.values() if content)
    names = frozenset(map(_stem, sources))
    bare_names = frozenset(_stem(name) for name, content in sources.items() if not content)
    return TrainedOn(contents, names, bare_names, frozenset(map(_base, sources)))


def of_rows(
    trained_on: TrainedOn | None, names: Iterable[str | None], root: str, *, links: bool
) -> list[bool | None]:
    """Return whether the recording of each row is one of a run's, None if that is not known."""
    is_trained: dict[str | None, bool | None] = {}
    rows = []
    for name in names:
        if name not in is_trained:
            is_trained[name] = None
            if trained_on and name:
                is_trained[name] = trained_on.has(name, _content(root, name, links))
        rows.append(is_trained[name])
    return rows


def _content(root: str, name: str, links: bool) -> Content | None:
    if not root:
        return None
    try:
        path = files.inside(pathlib.Path(root), name, links=links)
        return headers.content_by_samples(str(path))
    except (OSError, files.FileError):
        return None


def _base(name: str) -> str:
    return name.replace("\\", "/").rpartition("/")[2].casefold()


def _stem(name: str) -> str:
    return os.path.splitext(_base(name))[0]


def _written_down(path: str) -> dict[str, Content | None] | None:
    """Return the content of each recording that a run's workdir lists, or None."""
    place = pathlib.Path(path)
    for folder in (place, *place.parents[:2]):
        file = folder / training_sources.FILE
        if not file.is_file():
            continue
        try:
            text = files.read_text(files.inside(folder, file.name), most=MAX_BYTES)
            return dict(_read_line(line) for line in csv.reader(io.StringIO(text)) if line)
        except (files.FileError, OSError, ValueError, csv.Error):
            return None
    return None


def _read_line(cells: Sequence[str]) -> tuple[str, Content | None]:
    name, n_bytes, digest = cells
    return name, (int(n_bytes), digest) if digest else None


def _of_data(model: encoder.Model) -> dict[str, Content | None] | None:
    """Return the recordings of the data that a run's config names, or None if they are not here."""
    section = model.run.get("data") or {}
    train = str(section.get("train") or "")
    if model.run.get("loader") != LOADER or "**" in train or stored.is_address(train):
        return None
    changes = {
        "train": _here(train, model),
        "audio_root": "",
        "follow_links": False,
        "label": "",
        "multilabel": False,
        "background": "",
        "exclude_paths": (),
    }
    fields = spectrogram.Config.__dataclass_fields__
    known_fields: Mapping[str, Any] = {name: section[name] for name in section if name in fields}
    try:
        data = config_lib.section(spectrogram.Config, {**known_fields, **changes})
        return dict.fromkeys(spectrogram.recordings(data, most=MAX_ROWS)) or None
    except (DataError, config_lib.ConfigError, ValueError, OSError):
        return None


def _here(train: str, model: encoder.Model) -> str:
    """Return a path of a run's config as it is from here: relative to where the run was started."""
    if train == "demo" or os.path.isabs(files.expanded(train)) or files.expanded(train).exists():
        return train
    workdir = os.path.normpath(str(model.run.get("workdir") or ""))
    if os.path.isabs(workdir):
        return train
    for folder in pathlib.Path(model.path).parents:
        started_in, has_workdir, _ = f"{folder}/".rpartition(f"/{workdir}/")
        if has_workdir:
            return os.path.join(started_in, train)
    return train
