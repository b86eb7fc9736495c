"""A checkpoint restores every bit on any mesh, and never a bit of a damaged step."""

import asyncio
import errno
import functools
import json
import logging
import os
import random
import re
import shutil
import threading
import time
from unittest import mock

import jax
import numpy as np
import pytest
from orbax.checkpoint._src.handlers.json_checkpoint_handler import JsonCheckpointHandler

from jaxtrain import config as config_lib
from jaxtrain.arrays import checksums
from jaxtrain.checkpoint import Checkpointer, CheckpointError, History
from jaxtrain.checkpoint import checkpointer as module
from jaxtrain.parallel.layout import make_layout, make_mesh
from jaxtrain.step import state as state_lib
from tests.support.toy_task import FIELDS, TASK, TX

DATA = {"position": 0, "fingerprint": "a"}
MESHES = [(2, 2, 2), (1, 1, 1), (8, 1, 1), (1, 8, 1), (4, 1, 2), (1, 1, 2)]


@functools.cache
def plan(sizes):
    layout = make_layout(
        make_mesh(*sizes, devices=jax.devices()[: np.prod(sizes)]), {"batch": "data"}
    )
    return state_lib.make_abstract(TASK, TX, layout, FIELDS, batch=16, ema=True)


def state_of(sizes, seed):
    """A state with random numbers everywhere, also in the moments."""
    planned = plan(sizes)
    made = state_lib.init_state(TASK, TX, planned, jax.random.key(seed))
    draw = np.random.default_rng(seed)

    def numbers(x):
        random = draw.standard_normal(x.shape) * 100
        return jax.device_put(random.astype(x.dtype), x.sharding)

    return jax.tree.map(numbers, made)


def bits(state):
    saved = (
        state.step,
        state.variables.params,
        state.variables.model_state,
        state.opt_state,
        state.ema,
        state.norms,
    )
    return {
        jax.tree_util.keystr(p): np.asarray(x).tobytes()
        for p, x in jax.tree.leaves_with_path(saved)
    }


def checkpointer(workdir, **options):
    return Checkpointer(
        config_lib.Config(workdir=str(workdir), checkpoint=config_lib.Checkpoint(**options)), TASK
    )


def restore(workdir, sizes=(1, 1, 1), data=DATA):
    ours = checkpointer(workdir)
    try:
        return ours.restore(plan(sizes), data)
    finally:
        ours.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A workdir with steps 2 and 4, saved from 2 × 2 × 2, and the bits of each step."""
    folder = tmp_path_factory.mktemp("written")
    ours, states = checkpointer(folder), {step: state_of((2, 2, 2), step) for step in (2, 4)}
    for step, state in states.items():
        ours.save(step, state, DATA, History())
    ours.close()
    return folder, {step: bits(state) for step, state in states.items()}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_promise_5_every_bit_on_any_mesh(written, sizes):
    folder, expected = written
    # One array is read at a time, as in a state of large ones. Orbax refuses one above the limit.
    with mock.patch.object(module, "IN_FLIGHT", 1):
        found = restore(folder, sizes)
    assert found.step == 4 and bits(found.state) == expected[4]
    wanted = plan(sizes).state
    assert jax.tree.all(
        jax.tree.map(
            lambda x, w: x.sharding == w.sharding,
            found.state.variables.params,
            wanted.variables.params,
        )
    )


def test_a_sound_newer_checkpoint_is_found_and_damaged_ones_are_set_aside(written, tmp_path):
    folder, _ = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    ours = checkpointer(tmp_path)
    assert ours.has_newer(2) and not ours.has_newer(4)
    damaged = tmp_path / "checkpoints" / "4"
    (damaged / "manifest.json").write_text("{}")
    assert not ours.has_newer(2), "a restart takes step 2 of its memory"
    assert not damaged.exists() and list(damaged.parent.glob("4.damaged-*"))
    assert not ours.has_newer(2)
    ours.close()


@pytest.mark.parametrize("name", ["manifest.json", "meta/metadata"])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_set_aside(
    written, tmp_path, name, stale_files, caplog
):
    folder, _ = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    ours = checkpointer(tmp_path, every=2)
    step = tmp_path / "checkpoints" / "4"
    stale_files(step / name, times=1)
    assert ours.has_newer(2) and step.exists()
    stale_files(step / name)
    assert ours.rewind(plan((1, 1, 1)), 4)[1] == 2 and step.exists()
    reason = f"{step} is damaged and is skipped: .*stale file handle"
    assert re.search(reason, caplog.text, re.IGNORECASE), caplog.text
    caplog.clear()
    assert not ours.has_newer(2) and not step.exists()
    assert re.search(reason, caplog.text, re.IGNORECASE), caplog.text
    ours.close()


def test_processes_wait_for_the_manifest_of_process_0(written, tmp_path, stale_files, monkeypatch):
    """Process 0 cannot read it for a moment, or never, or another one sees it late."""
    folder, _ = written
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    ours = checkpointer(tmp_path)
    step = ours._path / "4"
    number = checksums.number(step)
    agreed = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(module.cluster, "agree", lambda value: agreed.append(value) or value)
    stale_files(step / "manifest.json", times=1)
    assert ours._other_manifest(step) == "" and agreed == [number]
    stale_files(step / "manifest.json")
    assert "stale file handle" in ours._other_manifest(step) and agreed[1] < 0

    stale_files()
    monkeypatch.setattr(module.cluster, "agree", lambda value: number)
    hidden = tmp_path / "hidden"
    (step / "manifest.json").rename(hidden)
    listdir = os.listdir

    def shows(path):  # as NFS, which asks the server for what is new in the folder that is listed
        if str(path) == str(step) and hidden.exists():
            hidden.rename(step / "manifest.json")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", shows)
    monkeypatch.setattr(module, "LATE", 1.0)
    assert ours._other_manifest(step) == ""
    (step / "manifest.json").unlink()
    assert "sees another manifest.json than process 0" in ours._other_manifest(step)
    monkeypatch.undo()
    ours.close()


def test_other_data_are_refused(written):
    with pytest.raises(
        CheckpointError, match="fingerprint: a saved, b now.*config.resume.data='restart'"
    ):
        restore(written[0], data=DATA | {"fingerprint": "b"})


def test_other_data_to_test_on_are_reported(written, tmp_path, caplog):
    workdir = tmp_path / "run"
    shutil.copytree(written[0], workdir)
    assert restore(workdir, data=DATA | {"test": "b"}).step == 4
    assert "the data to test on" not in caplog.text, "this run recorded none"
    data = workdir / "checkpoints" / "4" / "data" / "metadata"
    data.write_text(json.dumps({**json.loads(data.read_text()), "test": "a"}))
    (workdir / "checkpoints" / "4" / "manifest.json").unlink()
    checksums.write(workdir / "checkpoints" / "4")
    assert restore(workdir, data=DATA | {"test": "b"}).step == 4
    assert "the data to test on are others than those of" in caplog.text


@pytest.mark.parametrize("offsets", [1, pytest.param(24, marks=pytest.mark.slow)])
def test_promises_6_and_7_damage_of_every_file_at_many_offsets(
    written, offsets, tmp_path, caplog, record_property
):
    """Each file of the newest step is changed in a byte, cut short, emptied or deleted: the
    checksums name it. The step before is restored, bit for bit, which `make test` tries for a
    deleted file and for one other damage of each file, in turn."""
    folder, expected = written
    workdir, draw, trials = tmp_path / "run", random.Random(0), 0
    shutil.copytree(folder, workdir)
    step = workdir / "checkpoints" / "4"
    files = sorted(p for p in step.rglob("*") if p.is_file())
    kinds = {str(p.relative_to(step)).split("/")[0] for p in files}
    assert {"state", "data", "meta", "manifest.json"} <= kinds and len(files) >= 12
    for number, path in enumerate(files):
        whole = path.read_bytes()
        damages = [
            ("gone", None),
            ("emptied", b""),
            ("cut", whole[: draw.randrange(1, len(whole))]),
        ]
        for at in [0, len(whole) - 1, *draw.sample(range(len(whole)), min(offsets, len(whole)))]:
            damages.append(
                (
                    f"byte {at}",
                    whole[:at] + bytes([whole[at] ^ (1 << draw.randrange(8))]) + whole[at + 1 :],
                )
            )
        every = offsets > 1 or path.name == checksums.NAME
        restored = damages if every else (damages[0], damages[1 + number % (len(damages) - 1)])
        for what, data in damages:
            path.unlink() if data is None else path.write_bytes(data)
            if path.name not in checksums.UNLISTED:
                named = [line.partition(":")[0] for line in checksums.verify(step)]
                assert named == [str(path.relative_to(step))], (path, what)
            if (what, data) not in restored:
                continue
            caplog.clear()
            with caplog.at_level(logging.INFO, "jaxtrain"):
                found = restore(workdir)
            for aside in step.parent.glob("4.damaged-*"):
                aside.rename(step)
            trials += 1
            if path in (
                step / "_CHECKPOINT_METADATA",
                step / "commit_success.txt",
            ):  # these only hold the time of the save
                assert found.step == 4 and bits(found.state) == expected[4], (path, what)
            # another program may leave it out: read with a warning
            elif path.name == "manifest.json" and data is None:
                assert (
                    found.step == 4
                    and bits(found.state) == expected[4]
                    and "has no checksums" in caplog.text
                )
            else:
                assert found.step == 2 and bits(found.state) == expected[2], (path, what)
                assert (
                    f"{step} is damaged and is skipped" in caplog.text and path.name in caplog.text
                ), (path, what)
        path.write_bytes(whole)
    assert restore(workdir).step == 4, "and put back, it is whole"
    record_property("trials", trials)


def test_a_damaged_step_makes_room_for_the_same_step(written, tmp_path, caplog):
    """It counted as saved, so that every later start lost the same steps again."""
    folder, expected = written
    workdir = tmp_path / "run"
    shutil.copytree(folder, workdir)
    steps = workdir / "checkpoints"
    manifest = steps / "4" / "manifest.json"
    whole = manifest.read_bytes()
    for number in (1, 2):
        manifest.write_bytes(whole[:-9])
        ours = checkpointer(workdir, keep=2)
        found = ours.restore(plan((1, 1, 1)), DATA)
        assert found.step == 2 and bits(found.state) == expected[2]
        aside = f"4.damaged-{number}"
        assert f"{steps}/4 is now {aside}, so that step 4 can be saved again" in caplog.text
        assert (steps / aside / "manifest.json").read_bytes() == whole[:-9]
        ours.save(4, found.state, DATA, History())
        ours.close()
        assert not checksums.verify(steps / "4")
        whole = manifest.read_bytes()
    again = restore(workdir)
    assert again.step == 4 and bits(again.state) == expected[2]
    names = sorted(path.name for path in steps.iterdir())
    assert names == ["2", "4", "4.damaged-1", "4.damaged-2"]


def test_another_runs_damaged_step_stays_where_it_is(written, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(written[0], workdir)
    (workdir / "checkpoints/4/manifest.json").write_text("{")
    ours = checkpointer(tmp_path / "next")
    assert ours.restore(plan((1, 1, 1)), DATA, str(workdir)).step == 2
    ours.close()
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == ["2", "4"]


def test_a_step_is_never_complete_without_its_checksums(tmp_path, monkeypatch):
    """The checksums are written in the folder that Orbax renames. If that fails, the step does not
    exist, and the one before it stays."""
    ours, state, written = checkpointer(tmp_path, on_error="continue"), state_of((1, 1, 1), 0), []

    def write(folder, processes, real=checksums.write):
        written.append(
            (folder.name, [path.name for path in folder.parent.iterdir() if path.name.isdecimal()])
        )
        if len(written) == 2:
            raise OSError(errno.ENOSPC, "no space")
        real(folder, processes)

    monkeypatch.setattr(checksums, "write", write)
    for step in (2, 4, 6):
        ours.save(step, state, DATA, History())
    ours.close()
    assert [(name.partition(".")[0], there) for name, there in written] == [
        ("2", []),
        ("4", ["2"]),
        ("6", ["2"]),
    ]
    assert all("orbax-checkpoint-tmp" in name for name, _ in written)
    steps = sorted((tmp_path / "checkpoints").iterdir())
    assert [path.name for path in steps] == ["2", "6"] and [
        checksums.verify(path) for path in steps
    ] == [[], []]


def test_parts_of_a_step_that_orbax_cannot_read_are_reported(written, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(written[0], workdir)
    noted = workdir / "checkpoints" / "4" / "_CHECKPOINT_METADATA"
    noted.write_text("[]")
    with pytest.raises(
        CheckpointError, match=f"{workdir}/checkpoints: .*_CHECKPOINT_METADATA.* delete it"
    ):
        restore(workdir)
    noted.unlink()
    assert restore(workdir).step == 4


def test_promise_12_a_save_that_fails_in_two_threads_is_one_failure_and_the_next_one_is_whole(
    tmp_path, monkeypatch, caplog
):
    """On a full disk each of Orbax's threads may fail, in any order. Here its manager fails at
    once, and a file later."""
    ours, state = checkpointer(tmp_path, on_error="continue"), state_of((1, 1, 1), 0)

    async def full(*_):
        await asyncio.sleep(0.5)
        raise OSError(errno.ENOSPC, "no space")

    def full_at_once():
        if threading.current_thread().name == "save_finalize":
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(JsonCheckpointHandler, "_save_fn", full)
    monkeypatch.setattr(
        ours._manager._non_blocking_metadata_store, "wait_until_finished", full_at_once
    )
    ours.save(2, state, DATA, History())
    time.sleep(0.2)  # the manager's thread has failed, but the file's has not
    ours.poll()
    monkeypatch.undo()
    assert ours.save(4, state, DATA, History()).failures == 1
    ours.close()
    assert [r.message for r in caplog.records if r.name.startswith("jaxtrain")] == [
        f"checkpoint {tmp_path}/checkpoints/2 could not be written: [Errno {errno.ENOSPC}] no"
        " space; there is none yet; training continues (config.checkpoint.on_error), and so do"
        " later saves"
    ]
    assert bits(restore(tmp_path).state) == bits(state)


def test_promise_6_all_damaged_is_an_error_never_a_fresh_start(written, tmp_path):
    shutil.copytree(written[0], tmp_path / "run")
    for manifest in (tmp_path / "run").glob("checkpoints/*/state/manifest.ocdbt"):
        manifest.write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"none of the checkpoints \[4, 2\] in .* can be read"
    ):
        restore(tmp_path / "run")


def test_the_newest_listed_step_is_a_folder(tmp_path):
    """A stray file is not a step. The newest step is of this workdir, or else of the other one."""
    ours, (mine, others) = (
        checkpointer(tmp_path / "run"),
        [tmp_path / name / "checkpoints" for name in ("run", "other")],
    )
    try:
        assert ours.listed() == ours.listed(str(tmp_path / "other")) == 0
        for path in (others / "7", others / "4"):
            path.mkdir(parents=True)
        (mine / "20261123154739").touch()
        assert ours.listed() == 0 and ours.listed(str(tmp_path / "other")) == 7
        (mine / "2").mkdir()
        assert ours.listed(str(tmp_path / "other")) == 2
    finally:
        ours.close()
