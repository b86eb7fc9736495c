"""A folder with real faults: a full tmpfs and a read-only mount."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from jaxtrain.doctor import disk
from jaxtrain.doctor.check import FAIL, OK, WARN
from tests.support.processes import ROOT

# Only this process and its children see the mounts.
LOOK = (
    "import json, sys; from jaxtrain.doctor import disk;"
    " print(json.dumps(disk.examine(folder=sys.argv[1], what='workdir')[0]))"
)


def mounted(folder, mount, program=LOOK):
    """The output of ``program`` after the command ``mount``."""
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        f'{mount} && exec "$0" -c "$1" "$2"',
        sys.executable,
        program,
        str(folder),
    ]
    if not shutil.which("unshare"):
        pytest.skip("no mount namespace can be made here: no unshare")
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"no mount namespace can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_healthy_folder_is_ok_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "WRITTEN", 4 << 20)
    checks, _ = disk.examine(folder=str(tmp_path / "runs" / "new"), what="workdir")
    assert checks[0].name == "workdir" and checks[0].verdict in (OK, WARN), checks
    assert "MB/s" in checks[0].text and " free" in checks[0].text and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    checks, _ = disk.examine(folder=str(tmp_path / "file" / "run"), what="workdir")
    assert checks[0].verdict == FAIL and f"{tmp_path}/file is not a folder" in checks[0].text


def test_a_read_only_mount_and_a_full_one_fail_with_what_to_do(tmp_path):
    (found,) = mounted(tmp_path, f"mount -t tmpfs -o ro none {tmp_path}")
    assert (
        found[2] == FAIL
        and "cannot be written: Read-only file system" in found[3]
        and "mount it again with rw" in found[4]
    )
    filled = f"{{ dd if=/dev/zero of={tmp_path}/data bs=1k count=2000 2>/dev/null || :; }}"
    full = f"mount -t tmpfs -o size=1m none {tmp_path} && {filled}"
    (found,) = mounted(tmp_path, full)
    assert (
        found[2] == FAIL and "No space left on device" in found[3] and "free some space" in found[4]
    )


def test_a_limit_of_files_is_named(tmp_path):
    """The folder is not blamed, because it can be written."""
    command = [
        "sh",
        "-c",
        'ulimit -f 2048 && exec "$0" -c "$1" "$2"',
        sys.executable,
        LOOK,
        str(tmp_path),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    (found,) = json.loads(done.stdout)
    assert found[2] == FAIL and "File too large" in found[3] and "ulimit -f unlimited" in found[4]


def test_the_needs_of_a_plan_are_compared_with_the_free_space(tmp_path):
    assert disk.free_space(str(tmp_path), 2, 1000).verdict == OK
    check = disk.free_space(str(tmp_path), 3, 1 << 60)
    assert (
        check.verdict == FAIL and "3 checkpoints of 1152921.50 TB need 3458764.51 TB" in check.text
    )


def test_checkpoints_that_are_there_are_not_asked_for_again(tmp_path):
    """Two checkpoints of 6 MB take 12 of 16 MB. A third one does not fit, even if it is to replace
    one of them. In 20 MB it fits."""
    steps = " ".join(f"{tmp_path}/checkpoints/{step}" for step in (10, 20))
    fill = (
        f"for s in {steps}; do mkdir -p $s; dd if=/dev/zero of=$s/state bs=1M count=6 2>/dev/null;"
        " done"
    )
    look = (
        "import json, sys; from jaxtrain.doctor import disk;"
        " print(json.dumps([disk.free_space(sys.argv[1] + '/checkpoints', n, 6 << 20) for n in (2,"
        " 3)]))"
    )
    fits, beyond = mounted(tmp_path, f"mount -t tmpfs -o size=16m none {tmp_path} && {fill}", look)
    assert fits[2] == FAIL and "of which 6.29 MB are there" in fits[3], (
        "it is written before the older of two goes"
    )
    assert beyond[2] == FAIL and "of which 12.58 MB are there" in beyond[3]
    fits, beyond = mounted(tmp_path, f"mount -t tmpfs -o size=20m none {tmp_path} && {fill}", look)
    assert fits[2] == OK and beyond[2] == OK


def test_the_room_is_that_of_the_checkpoints_disk(tmp_path):
    """The checkpoints are on a small disk and the workdir on a large one, then the other way
    round."""
    look = (
        "import json, sys; from jaxtrain.doctor import disk; disk.WRITTEN = 1 << 20;"
        " print(json.dumps([disk.examine(folder=f'{sys.argv[1]}/{name}', what=name,"
        " checkpoints=(f'{sys.argv[1]}/{name}', 2, 20 << 20))[0][-1] for name in ('small',"
        " 'large')]))"
    )
    small, large = mounted(
        tmp_path,
        f"mkdir {tmp_path}/small && mount -t tmpfs -o size=30m none {tmp_path}/small",
        look,
    )
    assert small[1] == large[1] == "free space" and small[2] == FAIL and large[2] == OK


def test_a_disk_with_little_left_is_a_warning(tmp_path):
    (found,) = mounted(tmp_path, f"mount -t tmpfs -o size=9m none {tmp_path}")
    assert found[2] == WARN and "expected at least 100 MB" in found[3]
