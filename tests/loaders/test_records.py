"""Files made record by record have the same bytes after any interruption of their command, and
nothing of another command."""

import pytest

from loaders.io import resumable

RECORDS = [b"a line\n", b"x" * 9000, b"another\n", b"the last"]


def make(path, made_of, stop=None):
    """Writes the missing records. Returns how many existed before."""
    with resumable.file(path, made_of) as file:
        assert list(file.kept()) == RECORDS[: file.n]
        for i, record in enumerate(RECORDS[file.n :], file.n):
            if i == stop:
                raise KeyboardInterrupt
            file.write(record)
        return file.n


@pytest.mark.parametrize("torn", [0, 1, 5])
def test_an_interrupted_file_is_continued_after_its_last_complete_record(tmp_path, torn):
    path = tmp_path / "out [1].txt"
    with pytest.raises(KeyboardInterrupt):
        make(path, "ab", stop=2)
    (partial,) = tmp_path.glob("*.partial")
    if torn == 1:
        partial.write_bytes(partial.read_bytes() + b"half a rec")  # killed as it was written
    if torn == 5:
        partial.write_bytes(partial.read_bytes()[:-1])  # a machine lost its power
    assert not path.exists() and make(path, "ab") == (1 if torn == 5 else 2)
    assert path.read_bytes() == b"".join(RECORDS) and list(tmp_path.iterdir()) == [path]


def test_another_command_starts_over_and_leaves_nothing_behind(tmp_path):
    path = tmp_path / "out.txt"
    with pytest.raises(KeyboardInterrupt):
        make(path, ("a", 1), stop=2)
    assert make(path, ("a", 2)) == 0 and list(tmp_path.iterdir()) == [path]
    with pytest.raises(KeyboardInterrupt):
        make(path, "b", stop=1)
    (ends,) = tmp_path.glob("*.done")
    ends.write_bytes(b"\xff" * 24)  # damaged
    assert make(path, "b") == 0 and path.read_bytes() == b"".join(RECORDS)
