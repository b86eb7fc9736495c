"""Exports on small, full disks print one line that names a file, and leave nothing that looks
finished."""

import os
import pathlib

import pytest

from jaxtrain.commands import export
from loaders.io import atomic_write
from tests.support import runs
from tests.support.full_disk import assert_told, files


@pytest.mark.parametrize("kilobytes", [4, 40, 100])
def test_an_export(small_disk, tmp_path, capsys, kilobytes):
    runs.save(tmp_path / "run", 20, runs.state(0, 20))
    folder = small_disk(kilobytes)
    assert export.main([str(tmp_path / "run"), "--out", str(folder / "out")]) == 2
    assert_told(capsys, folder / "out")
    assert files(folder) == [] and list(folder.iterdir()) == []


@pytest.mark.parametrize("kilobytes", [16, 2000])
def test_an_export_back_to_a_checkpoint(small_disk, tmp_path, capsys, kilobytes):
    runs.save(tmp_path / "run", 20, runs.state(0, 20))
    assert export.main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    folder = small_disk(kilobytes)
    if kilobytes > 16:
        (folder / "ballast").write_bytes(
            bytes((lambda f: f.f_bavail * f.f_frsize)(os.statvfs(folder)) - 30_000)
        )
    assert export.main(["--reverse", str(tmp_path / "out"), "--out", str(folder / "back")]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not (folder / "back" / "checkpoints" / "20").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        OSError("1024 requested and 512 written"),
        ValueError(
            'RESOURCE_EXHAUSTED: Error writing "x": No space left on device [os_error_code=28]'
        ),
        OSError(122, "Disk quota exceeded"),
    ],
    ids=["system", "NumPy", "TensorStore", "quota"],
)
def test_whole_files_and_folders(tmp_path, error):
    (tmp_path / "x.npy").write_bytes(b"before")
    with pytest.raises(OSError) as raised, atomic_write.file(tmp_path / "x.npy") as file:
        file.write(b"half")
        raise error
    assert (
        raised.value.filename == str(tmp_path / "x.npy")
        and (tmp_path / "x.npy").read_bytes() == b"before"
    )
    with pytest.raises(OSError) as raised, atomic_write.folder(tmp_path / "out") as folder:
        (folder / "a").write_text("half")
        raise error
    assert raised.value.filename == str(tmp_path / "out")
    with pytest.raises(ZeroDivisionError), atomic_write.folder(tmp_path / "out"):
        raise ZeroDivisionError
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]
    with atomic_write.folder(tmp_path / "out") as folder:
        atomic_write.write(pathlib.Path(folder) / "a", "all")
    assert files(tmp_path) == ["out/a", "x.npy"]


@pytest.mark.parametrize(("owner", "name"), [(pathlib.Path, "open"), (atomic_write.fcntl, "flock")])
def test_an_interrupt_while_a_file_is_made_leaves_none(tmp_path, monkeypatch, owner, name):
    call = getattr(owner, name)

    def interrupted(*args):
        call(*args)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt), atomic_write.file(tmp_path / "x.npy"):
        pass
    assert not list(tmp_path.iterdir())
