"""The run that a folder of checkpoints outside a workdir belongs to: no other may write there.

    workdir/run.json                    {"run": "6f1c…", "workdir": "/data/runs/xcm"}
    config.checkpoint.folder/run.json   the same

A run writes both when it first uses the folder. From then on only this run saves there, resumes
from there, and deletes old steps. A workdir that was moved keeps its file, and so its folder. If a
workdir was lost, a new one at the same path is the same run.
"""

import itertools
import json
import os
import pathlib
import uuid
from typing import NamedTuple

from etils import epath

from jaxtrain.config import Config
from jaxtrain.parallel.lease import WorkdirError
from loaders.io import atomic_write, files

NAME = "run.json"
MAX_BYTES = 10_000


class Identity(NamedTuple):
    run: str  # unique to a run
    workdir: str  # absolute, when the run last started


def folder_elsewhere(config: Config) -> str:
    """Return the folder of a run's checkpoints if it is not in the workdir, or a link there."""
    in_workdir = os.path.join(config.workdir, "checkpoints")
    return config.checkpoint.folder or (in_workdir if os.path.islink(in_workdir) else "")


def claim(workdir: str, folder: str) -> None:
    """Make ``folder`` that of the run in ``workdir``, while the leases of both are held.

    Raises WorkdirError: the folder is another run's, or a run.json cannot be read.
    """
    workdir = os.path.abspath(workdir)
    ours = _read(workdir)
    theirs = _read(folder)
    _refuse_a_copy(ours, workdir, folder)
    _refuse_another_workdir(workdir, folder)
    is_first = not theirs.run
    is_lost = not ours.run and theirs.workdir == workdir
    if not (is_first or is_lost or theirs.run == ours.run):
        raise WorkdirError(
            f"{folder} has the checkpoints of another run, {theirs.workdir}; choose another"
            " config.checkpoint.folder. If they are to be this run's, delete"
            f" {folder.rstrip('/')}/{NAME}"
        )
    identity = Identity(theirs.run or ours.run or uuid.uuid4().hex, workdir)
    for place, recorded in ((workdir, ours), (folder, theirs)):
        if recorded != identity:
            _write(place, identity)


def _refuse_a_copy(ours: Identity, workdir: str, folder: str) -> None:
    if not ours.run or ours.workdir == workdir or _read(ours.workdir).run != ours.run:
        return  # new, where it was, or moved
    raise WorkdirError(
        f"{workdir} is a copy of {ours.workdir}, whose checkpoints are in {folder}, and both would"
        f" write there; choose another config.checkpoint.folder, and delete {_path(workdir)}"
    )


def _refuse_another_workdir(workdir: str, folder: str) -> None:
    """Refuse a folder in the workdir of another run, also by a link: its checkpoints are there."""
    if "://" in folder:
        return
    places = dict.fromkeys(map(pathlib.Path, (os.path.abspath(folder), os.path.realpath(folder))))
    for above in itertools.chain.from_iterable((place, *place.parents) for place in places):
        is_workdir = (above / "config.json").exists() and (above / "metrics.jsonl").exists()
        if is_workdir and not _is_same(above, workdir):
            raise WorkdirError(
                f"{folder} is in the workdir of another run, {above}; choose another"
                " config.checkpoint.folder, and make no link there. To resume from its checkpoints,"
                " set config.resume.path"
            )


def _is_same(folder: pathlib.Path, workdir: str) -> bool:
    return os.path.exists(workdir) and os.path.samefile(folder, workdir)


def _path(folder: str) -> epath.Path:
    return epath.Path(folder) / NAME


def _write(folder: str, identity: Identity) -> None:
    text = json.dumps(identity._asdict()) + "\n"
    if "://" in folder:
        _path(folder).write_text(text)  # a store writes an object as a whole
    else:
        atomic_write.write(_path(folder), text)


def _read(folder: str) -> Identity:
    """Return the run that a folder names, an empty one without a file. Raises WorkdirError."""
    path = _path(folder)
    if not path.exists():
        return Identity("", "")
    try:
        is_remote = "://" in folder
        text = path.read_text() if is_remote else files.read_text(path, most=MAX_BYTES)
        identity = Identity(**json.loads(text))
        if not all(isinstance(value, str) and value for value in identity):
            raise ValueError("a value is no text")
    except (ValueError, TypeError, files.FileError) as error:
        raise WorkdirError(
            f"{path} does not name the run whose checkpoints are there; delete it if they are"
            " this run's"
        ) from error
    return identity
