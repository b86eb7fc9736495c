"""Commands on small, full disks print one line that names a file, and leave nothing that looks
finished."""

import contextlib
import subprocess

import numpy as np
import pytest

from jaxtrain.commands import arguments
from jaxtrain.workloads.audio_language.commands import encode_audio, train_codec
from jaxtrain.workloads.bird.commands import index
from jaxtrain.workloads.bird.inference import embed, measures, probe
from jaxtrain.workloads.language.commands import tokens
from jaxtrain.workloads.trm.commands import sudoku
from loaders.chat import codec
from tests.support.full_disk import assert_told, files


@pytest.mark.parametrize("how", ["csv", "npy"])
def test_sudoku(small_disk, capsys, how):
    folder = small_disk(8)
    assert sudoku.main(["--train=100", "--test=2", f"--format={how}", str(folder)]) == 2
    assert_told(capsys, folder)
    for name in files(folder):  # the remaining files are complete
        assert name.endswith((".npy", ".json")) and (
            not name.endswith(".npy") or len(np.load(folder / name))
        )


@pytest.fixture
def sounds(tmp_path):
    """A folder with a recording of half a second, and a codec next to it."""
    rng = np.random.default_rng(0)
    (tmp_path / "sounds").mkdir()
    codec.write_wav(tmp_path / "sounds" / "0.wav", rng.normal(size=16_000).astype("f4"))
    parts = (rng.normal(size=shape).astype("f4") for shape in ((512,), (4, 512), (1, 4, 4)))
    codec.Rvq(*parts).save(tmp_path / "c.npz")
    return tmp_path / "sounds"


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens(small_disk, tmp_path, capsys, workers):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text("so many words " * 1000)
    folder = small_disk(60)
    command = [
        str(folder / "out"),
        *(str(tmp_path / f"{i}.txt") for i in range(3)),
        "--tokenizer=bytes",
    ]
    assert tokens.main([*command, f"--workers={workers}"]) == 2
    told = capsys.readouterr()
    assert (
        "No space left on device; free some space" in told.err
        and str(folder / "out" / "0000") in told.err
    ), told
    assert "Traceback" not in told.err and not [
        name for name in files(folder) if "partial" in name.rpartition("/")[2]
    ]
    assert not (folder / "out" / "tokens.json").exists()
    subprocess.run(["mount", "-o", "remount,size=2000k", folder], check=True)
    assert tokens.main(command) == 0 and "resuming: " in capsys.readouterr().err


def test_a_codec(small_disk, sounds, capsys):
    folder = small_disk(8)
    small = "--codebooks=1 --size=4 --components=8 --rounds=1 --test-share=0".split()
    assert train_codec.main([str(folder / "c.npz"), str(sounds), *small]) == 2
    assert_told(capsys, folder / "c.npz")
    assert list(folder.iterdir()) == []


def test_a_recording_that_a_codec_makes(small_disk, sounds, capsys):
    folder, options = small_disk(8), "--codebooks=1 --codebook-size=4".split()
    listened = [
        "--listen",
        str(sounds / "0.wav"),
        "--codec",
        str(sounds.parent / "c.npz"),
        *options,
    ]
    assert encode_audio.main([*listened, "--out", str(folder / "again.wav")]) == 2
    assert_told(capsys, folder / "again.wav")
    assert list(folder.iterdir()) == []


def test_an_index(small_disk, sounds, capsys):
    folder = small_disk(8)
    assert index.main([str(sounds), "--labels=none", "--out", str(folder / "out")]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(
        f"error: {folder / 'out'} could not be written: No space left on device; free some space"
    ), told
    assert list(folder.iterdir()) == []


def test_embeddings_reserve_their_space_and_are_partial_until_they_are_whole(small_disk):
    import jax

    shapes = {
        "mean": jax.ShapeDtypeStruct((100, 32), np.float32),
        "cls": jax.ShapeDtypeStruct((100, 64), np.float32),
    }
    folder = small_disk(32)
    with pytest.raises(OSError, match="No space left on device.*cls.npy"):
        embed._open(folder, shapes, 0)
    assert files(folder) == []
    folder = small_disk(64)
    made = embed._open(folder, shapes, 0)
    assert files(folder) == ["cls.npy.partial", "mean.npy.partial"]
    with contextlib.suppress(OSError):  # anything may fill the disk meanwhile
        (folder / "ballast").write_bytes(bytes(64_000))
    for array in made.values():
        array[:] = 1
        array.flush()
    assert all((x == 1).all() for x in embed._open(folder, shapes, 50).values())


def test_a_probes_report(small_disk, capsys):
    folder = small_disk(8)
    (folder / "ballast").write_bytes(bytes(8192 - 4096))
    score = {"value": 0.5, "low": 0.4, "high": 0.6}

    def act():
        probe.report(
            {
                f"run {i}": {
                    "linear": {m: score for m in measures.MEASURES},
                    "few shot": {},
                    "evidence": {"in words": []},
                }
                for i in range(100)
            },
            folder,
        )
        return 0

    assert arguments.run(act) == 2
    assert_told(capsys, folder / "results.json")
    assert files(folder) == ["ballast"]
