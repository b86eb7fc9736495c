"""Every byte of a step directory is verified: a file that is changed, cut or deleted is named."""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from jaxtrain.arrays import checksums

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
