"""Checkpoints in an object store, which has no renames: the same code keeps the same promises."""

import os
import subprocess
import sys

import numpy as np
import pytest
from etils import epath

from jaxtrain import cli
from jaxtrain.arrays import safetensors, stored
from jaxtrain.arrays import source as source_lib
from loaders.io import files
from tests.support import installed, object_store, runs, small_runs
from tests.support.processes import ROOT, cluster, free_port, records, run, wait_for

RUN = "gs://bucket/toy/checkpoints"


@pytest.fixture
def bucket(tmp_path):
    """The environment that makes programs use the stand-in, and a view of its contents."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, object_store.__file__, str(port), str(tmp_path / "objects")]
    )
    try:
        yield object_store.environment(port), object_store.Store(tmp_path / "objects")
    finally:
        server.kill()
        server.wait()


def tool(folder, environment, *arguments):
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )


STEPS = (
    "toy.py",
    "--config.train.steps=6",
    "--config.train.eval_every=2",
    "--config.checkpoint.every=2",
)


def test_promises_1_and_7_in_an_object_store(folder, bucket):
    """A run is killed while it writes the objects of a step. That step does not exist, and the
    resumed run ends like the undisturbed one."""
    environment, store = bucket
    args = (folder, *STEPS)
    run(*args, "--config.workdir=whole")

    def there(name):
        return any(
            about["name"].startswith(f"toy/checkpoints/{name}") for about in store.all("bucket")
        )

    (process,) = cluster(*args, f"--config.checkpoint.folder={RUN}", processes=1, only0=environment)
    wait_for(lambda: there("4/"), watch=[process])
    process.kill()
    process.communicate()
    torn = not there("4/commit_success.txt")
    output = run(*args, f"--config.checkpoint.folder={RUN}", **environment)
    assert f"resuming from step {2 if torn else 4}: {RUN}" in output
    for split in ("train", "test"):
        assert records(folder / "runs" / "toy", split) == records(folder / "whole", split)


@pytest.mark.slow
def test_promise_6_in_an_object_store(folder, bucket):
    """A run in a store is verified and exported, and a damaged object is noticed."""
    environment, store = bucket
    args = (folder, *STEPS)
    run(*args, f"--config.checkpoint.folder={RUN}", **environment)
    verified = tool(folder, environment, "jaxtrain.cli", "checkpoint", "verify", f"{RUN}/6")
    assert verified.returncode == 0, verified.stderr
    exported = tool(
        folder,
        environment,
        "tools.orbax_to_safetensors",
        RUN.rsplit("/", 1)[0],
        "--out",
        str(folder / "out"),
    )
    assert exported.returncode == 0 and list((folder / "out").glob("*.safetensors")), (
        exported.stderr
    )

    largest = max(
        (a for a in store.all("bucket") if "checkpoints/6/" in a["name"]),
        key=lambda a: int(a["size"]),
    )
    data = bytearray(store.get("bucket", largest["name"])[0])
    data[len(data) // 2] ^= 1
    store.put("bucket", largest["name"], bytes(data))
    output = run(
        *args, "--config.train.steps=8", f"--config.checkpoint.folder={RUN}", **environment
    )
    assert (
        "damaged" in output
        and largest["name"].rsplit("/", 1)[1] in output
        and "resuming from step 4" in output
    )


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param("embed {run} --out o", marks=installed.needs("bird")),
        "checkpoint inspect {run}",
        "export {run} --out o",
    ],
)
def test_a_store_that_does_not_answer_is_reported(argv, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stored, "PATIENCE", 0.5)
    for name, value in object_store.environment(free_port()).items():
        monkeypatch.setenv(name, value)
    assert cli.main(argv.format(run="gs://silent/run").split()) == 2
    assert (
        capsys.readouterr().err
        == "error: gs://silent/run/ cannot be read: no answer within 0.5 s; check the address, the"
        " network and your access to it\n"
    )


def test_reading_from_a_store_equals_reading_from_a_disk(tmp_path, bucket, monkeypatch):
    environment, store = bucket
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    runs.save(tmp_path / "run", 20, runs.state(0, 20))
    safetensors.export(str(tmp_path / "run"), str(tmp_path / "out"))
    np.savez(tmp_path / "out" / "a.npz", a=np.arange(5))
    for path in (tmp_path / "out").iterdir():
        store.put("bucket", f"out/{path.name}", path.read_bytes())
    there = epath.Path("gs://bucket/out")
    assert files.read_json(there / "config.json") == files.read_json(
        tmp_path / "out" / "config.json"
    )
    assert files.arrays(there / "a.npz")["a"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(files.FileError, match="README.md has more than the 10 bytes"):
        files.read(there / "README.md", most=10)
    for name in ("missing.json", "../out/x.json"):
        with pytest.raises(files.FileError, match="does not exist"):
            files.read_json(there / name)
    source = source_lib.find(str(there))
    assert source.damage() == []
    for name, array in source.parameters().items():
        np.testing.assert_array_equal(
            array.read(()), source_lib.find(str(tmp_path / "out")).parameters()[name].read(())
        )
    store.delete("bucket", "out/README.md")
    (problem,) = source.damage()
    assert "README.md" in problem and "does not exist" in problem


SEES = """
import pathlib, sys
from jaxtrain.arrays import stored
if sys.argv[1] == "early":
    import fsspec
from jaxtrain.arrays import quiet_orbax
folder = stored.place_of("gs://bucket/shared")
print([path.name for path in folder.iterdir()], flush=True)
input()
print((folder / "two").exists(), sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.parametrize("fsspec", ["early", "late"])
def test_a_process_that_has_listed_a_folder_sees_what_others_write_there(bucket, fsspec):
    """gcsfs keeps listings: two processes were told that their folder is not the same."""
    environment, store = bucket
    store.put("bucket", "shared/one", b"1")
    process = subprocess.Popen(
        [sys.executable, "-c", SEES, fsspec],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "['one']\n"
    store.put("bucket", "shared/two", b"2")
    assert process.communicate("\n", timeout=60)[0] == "True ['one', 'two']\n"


@pytest.mark.slow
def test_a_base_in_a_bucket_is_frozen_kept_and_found_again_by_two_processes(tmp_path, bucket):
    """If the base is gone and no copy was kept, both processes refuse it by name."""
    environment, store = bucket
    folder, base = small_runs.of_bytes(tmp_path), "gs://bucket/base"
    run(
        folder,
        "cfg.py",
        "--config.workdir=base",
        f"--config.checkpoint.folder={base}/checkpoints",
        **environment,
    )

    def adapters(name, *more):
        args = (
            "--config.lora.rank=2",
            f"--config.warm_start.source={base}",
            f"--config.checkpoint.folder=gs://bucket/{name}",
            *more,
        )
        both = cluster(
            folder,
            "cfg.py",
            f"--config.workdir={name}",
            *args,
            processes=2,
            only0=environment,
            only1=environment,
        )
        outputs = [p.communicate(timeout=300)[0] for p in both]
        return [p.returncode for p in both], outputs

    for name, keep in (("kept", "true"), ("bare", "false")):
        codes, outputs = adapters(name, f"--config.warm_start.keep={keep}")
        assert codes == [0, 0], outputs
        assert len(list(folder.glob(f"{name}/base/*"))) == (keep == "true")
    for about in store.all("bucket"):
        if about["name"].startswith("base/"):
            store.delete("bucket", about["name"])
    codes, outputs = adapters("kept", "--config.warm_start.keep=true", "--config.train.steps=4")
    assert codes == [0, 0] and "resuming from step 2" in outputs[0], outputs
    codes, outputs = adapters("bare", "--config.train.steps=4")
    assert codes == [2, 2] and all(
        "gone or differ" in text or "process 0 says why" in text for text in outputs
    ), outputs


@pytest.mark.slow
def test_promise_4_two_processes_share_a_bucket(folder, bucket):
    environment, _ = bucket
    args = (folder, "toy.py", f"--config.checkpoint.folder={RUN}", "--config.train.eval_every=0")
    both = cluster(
        *args, "--config.train.steps=2", processes=2, only0=environment, only1=environment
    )
    outputs = [p.communicate(timeout=200)[0] for p in both]
    assert [p.returncode for p in both] == [0, 0], outputs
    assert "resuming from step 2" in run(*args, "--config.train.steps=3", **environment)
