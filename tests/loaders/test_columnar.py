"""Files of Arrow as commands read them."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loaders.io import columnar, files

ENDS_AT_ONCE = """
import pathlib, sys
import pyarrow.parquet as pq
from loaders.io import columnar
with columnar.native(pathlib.Path(sys.argv[1])) as file:
    print(pq.read_table(file).num_rows)
"""


def test_a_process_that_ends_as_soon_as_it_has_read_a_table_is_not_aborted(tmp_path):
    """Two of five processes were aborted after a read from a file that Python opened
    (pyarrow 26)."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({name: range(7) for name in "abcdefghij"}), path)
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(path)]
    ended = [
        subprocess.run(command, capture_output=True, text=True, timeout=120) for _ in range(12)
    ]
    assert [(each.returncode, each.stdout, each.stderr) for each in ended] == [(0, "7\n", "")] * 12


def test_opening_a_pipe_in_place_of_a_table_does_not_block(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, reason in (("folder", "is a folder"), ("missing", "does not exist")):
        with pytest.raises(files.FileError, match=reason), columnar.native(tmp_path / name):
            pass
