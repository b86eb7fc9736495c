"""Links, pipes, folders and other files that replace a file after its name was checked and before
it is opened."""

import contextlib
import os
import pathlib
import threading

import pytest
from etils import epath

from jaxtrain.arrays import stored
from loaders.io import files

SECRET = b"secret"


@pytest.fixture
def folder(tmp_path):
    """A folder with the file deep/a, next to one with a secret of the same name."""
    for name, content in (("in", b"fine"), ("out", SECRET)):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "a").write_bytes(content)
    return tmp_path / "in"


def exchange(folder: pathlib.Path, what: str) -> None:
    deep, a = folder / "deep", folder / "deep" / "a"
    outside = folder.parent / "out" / "deep"
    if what == "the folder":
        deep.rename(folder / "gone")
        deep.symlink_to(outside)
        return
    a.unlink()
    if what == "a pipe":
        os.mkfifo(a)
    elif what == "another file":
        a.write_bytes(b"fine")
    else:
        (folder / "b").write_bytes(b"fine")
        a.symlink_to(
            {"a link": outside / "a", "a device": "/dev/zero", "a link inside": folder / "b"}[what]
        )


@pytest.mark.parametrize("what", ["a link", "the folder", "a pipe", "a device"])
def test_a_file_that_is_swapped_for_a_link_or_a_device_is_not_read(folder, what):
    found = files.inside(folder, "deep/a"), stored.inside(epath.Path(folder), "deep/a")
    exchange(folder, what)
    for each in found:
        with pytest.raises(files.FileError, match="leads out of|is a pipe|is a device"):
            files.read(each, most=100)


@pytest.mark.parametrize("what", ["a link inside", "another file"])
def test_a_file_that_is_replaced_is_read(folder, what):
    found = files.inside(folder, "deep/a")
    exchange(folder, what)
    assert files.read(found, most=100) == b"fine"


def test_links_that_may_lead_out_are_followed(folder):
    found = files.inside(folder, "deep/a", links=True)
    exchange(folder, "a link")
    assert files.read(found, most=100) == SECRET


def test_a_file_that_is_exchanged_all_the_time_is_never_another(folder):
    done, a, other = threading.Event(), folder / "deep" / "a", folder / "other"

    def exchanges():
        while not done.is_set():
            for make in (
                lambda: other.symlink_to(folder.parent / "out" / "deep" / "a"),
                lambda: other.write_bytes(b"fine"),
            ):
                make()
                other.replace(a)

    thread = threading.Thread(target=exchanges)
    thread.start()
    try:
        read = []
        for _ in range(1000):
            with contextlib.suppress(files.FileError):
                read.append(files.read(files.inside(folder, "deep/a"), most=100))
    finally:
        done.set()
        thread.join()
    assert set(read) <= {b"fine", b""} and read
