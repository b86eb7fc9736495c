"""Every byte of a step directory is verified: a file that is changed, cut or deleted is named."""

import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from jaxtrain.arrays import checksums
from loaders.io import files

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, bytes]:
    """Every file of a step that Orbax saved from eight devices, with its manifest."""
    folder = tmp_path_factory.mktemp("run")
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.NamedSharding(mesh, jax.P("x"))
    with ocp.CheckpointManager(folder) as manager:
        # The array is larger than Orbax stores inside its index, so that data files exist.
        state = {
            "w": jax.device_put(jax.random.normal(jax.random.key(0), (64, 512)), sharding),
            "step": jnp.int32(3),
        }
        manager.save(
            3,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave({"a": 1})
            ),
        )
    checksums.write(folder / "3")
    return {
        str(p.relative_to(folder / "3")): p.read_bytes()
        for p in sorted((folder / "3").rglob("*"))
        if p.is_file()
    }


@pytest.fixture
def step(written, tmp_path) -> pathlib.Path:
    for name, content in written.items():
        path = tmp_path / "3" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "3"


def test_an_untouched_step_has_no_problem(step, written):
    assert checksums.verify(step) == []
    kinds = {name.split("/")[-2] if "/" in name else name for name in written}
    assert {
        "manifest.json",
        "d",
        "meta",
        "state",
        "array_metadatas",
    } <= kinds, "each class of file is there to be damaged"


def test_a_flipped_byte_anywhere_names_its_file(step, written):
    for name, content in written.items():
        if name in checksums.UNLISTED[1:]:
            continue
        for place in {0, len(content) // 2, len(content) - 1}:
            damaged = bytearray(content)
            damaged[place] ^= 0x01
            (step / name).write_bytes(damaged)
            problems = checksums.verify(step)
            assert len(problems) == 1 and problems[0].startswith(f"{name}:"), (
                name,
                place,
                problems,
            )
        (step / name).write_bytes(content)
    assert checksums.verify(step) == []


@pytest.mark.parametrize("keep", [0, -1, None], ids=["emptied", "cut short", "deleted"])
def test_a_file_that_is_cut_or_gone_is_named(step, written, keep):
    for name, content in written.items():
        if name in checksums.UNLISTED:
            continue
        (step / name).unlink() if keep is None else (step / name).write_bytes(content[:keep])
        problems = checksums.verify(step)
        assert len(problems) == 1 and problems[0].startswith(f"{name}:"), (name, problems)
        assert ("missing" if keep is None else f"and {len(content)} were written") in problems[0]
        (step / name).write_bytes(content)


def test_several_problems_are_reported_together(step, written):
    first, second, *_ = [name for name in written if name.startswith("state/")]
    (step / first).unlink()
    (step / second).write_bytes(b"")
    assert [p.split(":")[0] for p in checksums.verify(step)] == [first, second]


def test_a_cut_manifest_is_damage_and_a_missing_one_is_not(step, written):
    (step / checksums.NAME).write_bytes(written[checksums.NAME][:-10])
    assert checksums.verify(step)[0].startswith(f"{checksums.NAME}:")
    (step / checksums.NAME).unlink()
    with pytest.raises(checksums.NoManifest, match="has no manifest"):
        checksums.verify(step)


def test_files_that_nobody_wrote_are_no_damage(step):
    (step / "state" / ".nfs000123").write_bytes(b"left behind")
    (step / "state" / "stray").write_bytes(b"left behind")
    assert checksums.verify(step) == []


@pytest.mark.parametrize("name", ["meta/metadata", checksums.NAME])
def test_a_file_that_cannot_be_read_for_a_moment_is_read_again(step, name, stale_files, caplog):
    number = checksums.number(step)
    stale_files(step / name, times=1)
    assert checksums.verify(step) == [] and "tale file handle" in caplog.text
    stale_files(step / name, times=3)
    assert checksums.number(step) == number
    assert checksums.verify(step) == []


def test_a_file_that_is_never_read_is_damage_with_the_reason(step, written, stale_files):
    names = [name for name in written if name.startswith("state/")]
    stale_files(*[step / name for name in names])
    problems = checksums.verify(step)
    assert [problem.partition(":")[0] for problem in problems] == names
    assert all("stale file handle" in problem for problem in problems)
    stale_files(step / checksums.NAME)
    with pytest.raises(files.FileError, match="stale file handle"):
        checksums.number(step)
    [problem] = checksums.verify(step)
    assert problem.startswith("manifest.json: is damaged") and "stale file handle" in problem
    (step / checksums.NAME).unlink()
    assert checksums.number(step) == 0


def test_the_hashes_are_those_of_sha256sum(step):
    manifest = json.loads((step / checksums.NAME).read_text())["files"]
    lines = subprocess.run(
        ["sha256sum", *manifest], cwd=step, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {line.split("  ")[1]: line.split("  ")[0] for line in lines} == {
        k: v["hash"] for k, v in manifest.items()
    }


def test_a_kill_while_the_manifest_is_written_leaves_none_and_the_next_write_is_whole(
    step, written
):
    """SIGKILL arrives in the last instant before the rename, in a process of its own."""
    (step / checksums.NAME).unlink()
    program = (
        "import os, signal, sys; from etils import epath; from jaxtrain.arrays import"
        " checksums\ncls = type(epath.Path(sys.argv[1]))\ncls.rename = lambda self, target:"
        " os.kill(os.getpid(), signal.SIGKILL)\nchecksums.write(sys.argv[1])\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", program, str(step)], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert killed.returncode == -signal.SIGKILL
    assert any(p.name.startswith(".manifest.json.") for p in step.iterdir()), (
        "it was killed where it should be"
    )
    with pytest.raises(checksums.NoManifest):
        checksums.verify(step)
    checksums.write(step)
    assert (step / checksums.NAME).read_bytes() == written[checksums.NAME]
    assert checksums.verify(step) == []


def test_memory_is_bounded_by_pieces_not_by_files(tmp_path):
    """A file of 400 MB (sparse on disk) is hashed within some tens of MB."""
    (tmp_path / "3").mkdir()
    with (tmp_path / "3" / "large").open("wb") as file:
        file.truncate(400 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checksums.write(tmp_path / "3")
    assert checksums.verify(tmp_path / "3") == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # [KiB]


def test_a_process_measures_its_files_and_the_manifest_has_the_same_hashes(
    step, written, monkeypatch
):
    """Files of two processes: each reads its own, and process 0 reads neither again."""
    own, other = (step / checksums.OF_PROCESS.format(process) for process in (0, 1))
    shutil.copytree(own, other)
    whole = manifest_again(step)
    (step / checksums.NAME).unlink()
    read = record_reads(monkeypatch)
    for process, folder in enumerate((own, other)):
        read.clear()
        checksums.measure(step, process)
        assert read == {p for p in folder.rglob("*") if p.is_file()} and len(read) >= 2
    read.clear()
    checksums.write(step, processes=2)
    assert read and not any(own in path.parents or other in path.parents for path in read)
    assert (step / checksums.NAME).read_bytes() == whole and checksums.verify(step) == []
    assert not [p.name for p in step.iterdir() if p.name.startswith(".")]


def test_a_file_that_changes_after_its_process_measured_it_is_measured_again(step, written):
    (step / checksums.NAME).unlink()
    for _ in range(2):  # the first time in an attempt that was killed
        checksums.measure(step, 0)
    folder = step / checksums.OF_PROCESS.format(0)
    first, *_ = sorted(p for p in folder.rglob("*") if p.is_file())
    first.write_bytes(bytes(255 - byte for byte in first.read_bytes()))  # as many bytes
    checksums.write(step, processes=1)
    assert checksums.verify(step) == []
    first.write_bytes(written[str(first.relative_to(step))])
    assert [p.split(":")[0] for p in checksums.verify(step)] == [str(first.relative_to(step))]


@pytest.mark.parametrize("note", [b"", b"[1]", b'{"state/x": 3}', b"\xff"])
def test_hashes_of_a_process_that_cannot_be_read_are_measured_again(step, written, note):
    (step / checksums.NAME).unlink()
    (step / f".{checksums.NAME}.of-0").write_bytes(note)
    checksums.write(step, processes=3)  # processes 1 and 2 wrote nothing
    assert (step / checksums.NAME).read_bytes() == written[checksums.NAME]


@pytest.mark.parametrize("parts", [2, 3, 50])
def test_each_file_is_verified_by_one_of_several_processes(step, written, parts, monkeypatch):
    for name in written:
        if name != checksums.NAME:
            (step / name).write_bytes(b"")
    problems = [checksums.verify(step, part, parts) for part in range(parts)]
    every = [problem for of_part in problems for problem in of_part]
    assert sorted(every) == sorted(checksums.verify(step)) and len(every) >= 8
    assert sum(map(bool, problems)) > 1, "not one process alone"


def test_the_parts_of_a_step_have_about_as_many_bytes(tmp_path, monkeypatch):
    """Eleven processes saved; as many that restore have their own files, and five a fifth each."""
    for process in range(11):
        for name in "abcd":
            path = tmp_path / checksums.OF_PROCESS.format(process) / "d" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(1000))
    (tmp_path / "meta").write_bytes(bytes(100))
    checksums.write(tmp_path)
    read = record_reads(monkeypatch)
    for process in range(11):
        read.clear()
        checksums.verify(tmp_path, process, 11)
        folder = tmp_path / checksums.OF_PROCESS.format(process) / "d"
        assert {path for path in read if path.name != "meta"} == {folder / n for n in "abcd"}
    for process in range(5):
        read.clear()
        checksums.verify(tmp_path, process, 5)
        assert 8 <= len(read) <= 10


def manifest_again(step):
    (step / checksums.NAME).unlink()
    checksums.write(step)
    return (step / checksums.NAME).read_bytes()


def record_reads(monkeypatch):
    """Return a set of the files that are read for their hashes."""
    read = set()
    real = checksums._measure

    def measured(path):
        read.add(pathlib.Path(path))
        return real(path)

    monkeypatch.setattr(checksums, "_measure", measured)
    return read
