"""Windows of a stored film: the content of a row, the data that rows share, the haemodynamic
response, errors and memory."""

import json
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from loaders.base import DataError, Rows
from loaders.film import demo_film, film_files, hrf, multimodal
from loaders.film.multimodal import Config
from tests.support.films import FPS, FRAMES, RATE, TIMES, TR, VOLUMES, make

ROOT = pathlib.Path(__file__).parent.parent.parent


def amend(config, **entries):
    """Changes dataset.json."""
    path = pathlib.Path(config.path) / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    film_files._open_once.cache_clear()


def test_the_outline_of_the_built_in_film_has_its_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_film, "VOLUMES", 24)
    monkeypatch.setattr(demo_film, "VOXELS", 9)
    for name, write in (("film", demo_film.make), ("outline", demo_film.make_outline)):
        (tmp_path / name).mkdir()
        write(tmp_path / name)
    films = [film_files.open_folder(tmp_path / name) for name in ("film", "outline")]
    shapes = [
        [(x.shape, x.dtype) for x in (film.video, film.audio, film.text, *film.fmri)]
        for film in films
    ]
    assert shapes[0] == shapes[1]
    assert {k: v for k, v in films[0].info.items() if k != "files"} == films[1].info


@pytest.fixture
def config(tmp_path):
    return make(tmp_path / "film")


def rows_of(config, split="train", batch=8, ranges=None, batches=None):
    """All rows of some batches, in order."""
    loader = multimodal.make_loader(
        config, split=split, rows=Rows(batch, ranges or ((0, batch),)), seed=3
    )
    found = []
    for _ in range(loader.n_batches if batches is None else batches):
        found.append({name: np.concatenate(parts) for name, parts in next(loader)[1].items()})
    return {name: np.concatenate([f[name] for f in found]) for name in loader.element_spec}


def window(volume, rate, n, length):
    """Places of the last n samples before t, computed the slow way."""
    before = [k for k in range(-600, length + 2 * n) if k / rate < volume * TR - 1e-9]
    return np.array(before[-n:])


@pytest.mark.parametrize("skip", [1, 4])
@pytest.mark.parametrize("padding", ["edge", "zero"])
def test_a_row_is_the_window_before_its_volume(config, skip, padding):
    rows = rows_of(replace(config, frame_skip=skip, padding=padding), batch=6)
    fmri = [np.load(pathlib.Path(config.path) / "fmri" / f"s{i}.npy") for i in range(3)]
    assert sorted(rows["volume"][:60].tolist()) != rows["volume"][:60].tolist(), "mixed"
    for at, (subject, volume) in enumerate(zip(rows["subject"], rows["volume"], strict=True)):
        places = window(volume, FPS, 8, FRAMES)[::skip]
        frames = np.where((places < 0) & (padding == "zero"), 0, np.clip(places, 0, None))
        np.testing.assert_array_equal(
            rows["video"][at].reshape(len(places), 18), np.tile(frames[:, None], 18)
        )
        places = window(volume, RATE, 10, TIMES)
        codes = np.clip(places, 0, None)[:, None] * 3 + np.arange(2)
        codes[(places < 0) & (padding == "zero")] = 0
        np.testing.assert_array_equal(rows["audio"][at].reshape(2, 10), codes.T)
        np.testing.assert_array_equal(rows["text"][at], volume * 4 + np.arange(4))
        np.testing.assert_array_equal(rows["fmri"][at], fmri[subject][volume])
        assert rows["index"][at] == subject * VOLUMES + volume
    assert (
        rows["video"].dtype == np.uint8
        and rows["audio"].dtype == np.int16
        and rows["fmri"].dtype == np.float16
    )


def test_an_epoch_has_every_row_once_and_viewers_come_mixed(config):
    info = multimodal.dataset_info(config)
    n = 3 * info["n_train"]
    assert (info["n_train"], info["n_frames"], info["audio_frames"]) == (24, 8, 10)
    rows = rows_of(config, batch=n, batches=2)
    for epoch in range(2):
        pairs = set(
            zip(
                rows["subject"][epoch * n :][:n].tolist(),
                rows["volume"][epoch * n :][:n].tolist(),
                strict=True,
            )
        )
        assert pairs == {(s, v) for s in range(3) for v in range(24)}
    assert (rows["index"][:n] != rows["index"][n:]).any(), "another order in the next epoch"
    assert len(set(rows["subject"][:8].tolist())) > 1
    tested = rows_of(config, split="test", batch=5)
    real = tested["weight"] == 1
    assert sorted(tested["index"][real].tolist()) == [
        s * VOLUMES + v for s in range(3) for v in range(25, 30)
    ]
    assert (tested["index"][~real] == -1).all()


def test_rows_do_not_depend_on_who_reads_them_nor_on_where_reading_begins(config):
    whole = rows_of(config, batch=8, batches=3)
    parts = [
        rows_of(config, batch=8, batches=3, ranges=r) for r in (((0, 2), (4, 6)), ((2, 4), (6, 8)))
    ]
    for name, x in whole.items():
        x = x.reshape(3, 8, -1)
        np.testing.assert_array_equal(parts[0][name].reshape(3, 4, -1), x[:, [0, 1, 4, 5]])
        np.testing.assert_array_equal(parts[1][name].reshape(3, 4, -1), x[:, [2, 3, 6, 7]])
    loader = multimodal.make_loader(config, split="train", rows=Rows(8, ((0, 8),)), seed=3)
    loader.seek(2)
    position, batch = next(loader)
    assert position == 3
    np.testing.assert_array_equal(batch["index"][0], whole["index"][16:])


@pytest.mark.parametrize("hrf", [(), ("text",), ("video",), ("audio",), ("video", "text")])
@pytest.mark.parametrize("share", [0.2, 0.5])
def test_test_windows_share_nothing_with_training_windows(tmp_path, hrf, share):
    config = replace(
        make(tmp_path / "film", audio="features"), hrf=hrf, test_share=share, hrf_seconds=6.0
    )
    splits = multimodal.split_volumes(config)
    taps = 4

    def reads(volumes):
        """Everything that these volumes' rows are made of."""
        found = set()
        for v in volumes:
            for name, rate, n, length in (("video", FPS, 8, FRAMES), ("audio", RATE, 10, TIMES)):
                for k in range(taps if name in hrf else 1):
                    found |= {
                        (name, place)
                        for place in window(v - k, rate, n, length).tolist()
                        if place >= 0
                    }
            found |= {("text", v - k) for k in range(taps if "text" in hrf else 1)}
        return found

    assert not reads(splits.train) & reads(splits.test)
    assert reads(splits.train) & reads([splits.test[0] - 1]), "and none is left out without need"
    assert splits.test[-1] == VOLUMES - 1 and len(splits.train) == VOLUMES - round(share * VOLUMES)


@pytest.mark.parametrize(("hrf", "expected"), [((), [26, 28, 29]), (("text",), [29])])
def test_a_segment_that_lasts_over_the_border_is_tested_on_by_no_row(config, hrf, expected):
    """Three segments. The second begins in training, at volume 20, and is in rows up to 25. Volume
    27 shows the first one again."""
    segment = np.repeat([0, 1, 2], [20, 6, 4])
    segment[27] = 0
    since = [int(np.flatnonzero(segment == s)[0]) for s in segment]
    amend(config, text_since=since)
    # two taps: a row has its own text, and that of the previous row
    config = replace(config, hrf=hrf, hrf_seconds=3.0)
    splits = multimodal.split_volumes(config)
    assert len(splits.train) == 24
    assert splits.test.tolist() == expected
    rows = rows_of(config, split="test", batch=4)
    assert sorted(rows["volume"][rows["weight"] == 1].tolist()) == sorted(expected * 3)


def test_glover_is_the_difference_of_two_gamma_densities():
    """The densities by their formula: a peak after 5 s, an undershoot after it."""
    t, shape = np.arange(0, 32, 0.5), np.array([[6], [12]]) / 0.9
    first, second = (
        (t / 0.9) ** (shape - 1) * np.exp(-t / 0.9) / 0.9 / np.vectorize(math.gamma)(shape)
    )
    expected = first - 0.35 * second
    np.testing.assert_allclose(hrf.glover(0.5, norm="peak"), expected / expected.max(), atol=1e-6)
    np.testing.assert_allclose(hrf.glover(0.5), expected / expected.sum(), atol=1e-6)
    assert (
        4.5 <= t[expected.argmax()] <= 5.5 and expected.min() < 0 and 10 < t[expected.argmin()] < 14
    )


def test_continuous_features_are_convolved_and_codes_refused(tmp_path):
    config = replace(
        make(tmp_path / "film", audio="features"), hrf=("video", "audio", "text"), test_share=0.0
    )
    h = hrf.glover(TR)
    rows = rows_of(config, batch=4, batches=3)
    assert rows["video"].dtype == np.float16 and rows["audio"].dtype == np.float32
    for at, v in enumerate(rows["volume"].tolist()):
        places = [np.clip(window(v - k, FPS, 8, FRAMES), 0, None) for k in range(len(h))]
        expected = sum(w * p for w, p in zip(h, places, strict=True)) / 255
        np.testing.assert_allclose(rows["video"][at].reshape(8, 18)[:, 0], expected, atol=1e-3)
        times = sum(w * np.clip(window(v - k, RATE, 10, TIMES), 0, None) for k, w in enumerate(h))
        np.testing.assert_allclose(
            rows["audio"][at].reshape(2, 10)[0], 3 * times, rtol=1e-4, atol=1e-3
        )
        text = sum(w * (max(v - k, 0) * 4 + np.arange(4)) for k, w in enumerate(h))
        np.testing.assert_allclose(rows["text"][at], text, rtol=1e-4, atol=1e-3)
    coded = replace(make(tmp_path / "coded"), hrf=("audio",))
    with pytest.raises(DataError, match="has codes, which have no mean"):
        multimodal.element_spec(coded)


def test_an_average_is_over_the_viewers(config):
    rows = rows_of(replace(config, average=True), batch=6)
    fmri = np.stack(
        [np.load(pathlib.Path(config.path) / "fmri" / f"s{i}.npy") for i in range(3)]
    ).astype(np.float32)
    np.testing.assert_allclose(rows["fmri"], fmri.mean(0)[rows["volume"]], atol=1e-6)
    assert sorted(rows["volume"].tolist()) == list(range(24)) and set(rows["subject"].tolist()) == {
        0
    }
    assert rows["fmri"].dtype == np.float32
    chosen = rows_of(replace(config, subjects=("s2",)), batch=6)
    np.testing.assert_array_equal(chosen["fmri"], fmri[2][chosen["volume"]].astype(np.float16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(subjects=("s9",)), "names s9; .* has s0, s1, s2"),
        ("video.npy", "3 dimensions|no such file|No such file"),
        (
            4,
            (
                r"video.npy is uint8 \(100, 2, 3, 4\); expected 3 values for each pixel, RGB; save"
                r" x\[..., :3\] of RGBA, or"
            ),
        ),
        (
            1,
            (
                r"video.npy is uint8 \(100, 2, 3, 1\); expected 3 values .* numpy.repeat\(x\[...,"
                r" :1\], 3, -1\) of grey"
            ),
        ),
        ("fmri/s1.npy", "expected 30 volumes"),
        ("text.npy", "text.npy is Fortran-ordered"),
        ("short", "the video ends .* s before the last of 30 volumes"),
    ],
)
def test_a_folder_that_does_not_fit_together_is_reported(config, change, message):
    folder = pathlib.Path(config.path)
    if isinstance(change, dict):
        config = replace(config, **change)
    elif isinstance(change, int):  # RGBA, and grey
        np.save(folder / "video.npy", np.zeros((100, 2, 3, change), np.uint8))
    elif change == "short":
        np.save(folder / "video.npy", np.zeros((100, 2, 3, 3), np.uint8))
    elif change == "video.npy":
        np.save(folder / change, np.zeros((100, 2, 3), np.uint8))
        message = r"video.npy is uint8 \(100, 2, 3\); expected 4 dimensions of uint8"
    elif change == "text.npy":
        np.save(folder / change, np.asfortranarray(np.load(folder / change)))
    else:
        np.save(folder / change, np.zeros((29, 11), np.float16))
    film_files._open_once.cache_clear()
    with pytest.raises(DataError, match=message) as told:
        multimodal.element_spec(config)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (dict(tr=0), "tr is '0'; expected a positive number of seconds"),
        (dict(tr="1.5"), "tr is '1.5'; expected a positive"),
        (dict(fps=-1), "fps is '-1'; expected a positive"),
        (dict(audio_rate=0.5), "hold not one sample of audio.*higher rate"),
        (dict(audio="noise"), "audio is 'noise'; expected codes or features"),
        (dict(audio=["codes"]), "expected codes or features"),
        (dict(subjects=[]), r"subjects is '\[\]'; expected a list of names"),
        (dict(subjects=["s0", "s0"]), "each once"),
        (dict(text_since=[0, 1]), "for each of 30 volumes"),
        (dict(text_since=[1] * 30), "not later"),
        (dict(text_since=[-1] * 30), "expected a list of volumes"),
        (dict(text_since=None), "text_since is 'None'; expected a list"),
        (dict(fps=10**400), "fps is '1000*'; expected a positive"),
        (dict(tr=1e308), "tr is '1e.308'; expected a positive"),
        (dict(version=2), "format version 2; expected 1"),
    ],
)
def test_an_entry_of_dataset_json_that_means_nothing_is_reported(config, entry, message):
    amend(config, **entry)
    with pytest.raises(DataError, match=message):
        multimodal.dataset_info(config)


@pytest.mark.parametrize("content", ["[]", "", "{", '"a"', "{}"])
def test_an_invalid_dataset_json_is_reported(config, content):
    (pathlib.Path(config.path) / "dataset.json").write_text(content)
    film_files._open_once.cache_clear()
    with pytest.raises(DataError, match="film"):
        multimodal.dataset_info(config)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\3\4", None])
def test_an_array_that_is_broken_or_empty_is_reported(config, content):
    """The error names the array."""
    path = pathlib.Path(config.path) / "fmri" / "s1.npy"
    if content is None:
        np.save(path, np.zeros((30, 0), np.float16))
    else:
        path.write_bytes(content)
    film_files._open_once.cache_clear()
    with pytest.raises(DataError, match="s1.npy"):
        multimodal.dataset_info(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(hrf=("text",)),
            (
                "holds out 6 of 30 volumes, and each of them shares.*lower data.hrf_seconds"
                " .*reaches 31.5 s"
            ),
        ),
        (dict(test_share=0.01), "holds out 0 of 30 volumes"),
    ],
)
def test_a_test_split_of_nothing_is_refused(config, changes, message):
    with pytest.raises(DataError, match=message):
        multimodal.dataset_info(replace(config, **changes))
    assert (
        multimodal.dataset_info(replace(config, **(changes | dict(test_share=0.0))))["n_test"] == 0
    )


@pytest.mark.parametrize("seconds", [0.5, TR])
def test_a_response_that_is_cut_off_at_its_start_is_refused(config, seconds):
    with pytest.raises(DataError, match=f"hrf_seconds={seconds:g} leaves nothing"):
        rows_of(replace(config, hrf=("text",), hrf_seconds=seconds))


def test_config_errors_are_reported_together(tmp_path):
    wrong = Config(
        path=str(tmp_path),
        frame_skip=0,
        padding="none",
        hrf=("smell", "video"),
        hrf_norm="peak",
        test_share=1.0,
    )
    assert {name for name, _ in wrong.validate()} == {
        "path",
        "frame_skip",
        "padding",
        "hrf",
        "hrf_norm",
        "test_share",
    }
    assert {name for name, _ in Config(subjects=("a", "a"), hrf_seconds=1e9).validate()} == {
        "subjects",
        "hrf_seconds",
    }


def test_a_folder_that_was_rewritten_is_read_again(config):
    assert multimodal.dataset_info(config)["audio"] == "codes"
    path = pathlib.Path(config.path)
    shutil.rmtree(path)
    make(path, audio="features", viewers=2)
    assert (
        multimodal.dataset_info(config)["audio"] == "features"
        and multimodal.dataset_info(config)["n_subjects"] == 2
    )


def test_a_split_that_segments_leave_nothing_of_names_them(config):
    amend(config, text_since=[0] * 30)
    with pytest.raises(DataError, match="segments of text span the border, or occur again"):
        multimodal.dataset_info(config)


@pytest.mark.parametrize("known", [True, False])
def test_contents_that_no_step_should_see_are_reported_before_the_first(
    config, monkeypatch, tmp_path, known
):
    """A folder made by hand, with or without checksums."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    folder = pathlib.Path(config.path)
    info = json.loads((folder / "dataset.json").read_text())
    before = multimodal.make_loader(
        config, split="train", rows=Rows(4, ((0, 4),)), seed=0
    ).fingerprint
    if not known:
        (folder / "dataset.json").write_text(
            json.dumps({k: v for k, v in info.items() if k != "files"})
        )
    fmri, codes = np.load(folder / "fmri" / "s1.npy"), np.load(folder / "audio.npy")

    def told():
        film_files._open_once.cache_clear()
        try:
            return multimodal.make_loader(
                config, split="train", rows=Rows(4, ((0, 4),)), seed=0
            ).fingerprint
        except DataError as error:
            return str(error)

    assert told() == before, "the checksums are part of the data's name, whoever computed them"
    changed = fmri.copy()
    changed[7, 3] += 1
    np.save(folder / "fmri" / "s1.npy", changed)
    if known:
        assert "s1.npy is not the file whose checksum is in dataset.json" in told()
    else:
        assert len(told()) == 16 and told() != before
    changed[7, 3] = np.nan
    np.save(folder / "fmri" / "s1.npy", changed)
    assert re.search(r"s1.npy has numbers that are not finite, the first in row 7", told())
    np.save(folder / "fmri" / "s1.npy", fmri)
    codes[9, 1] = 1024
    np.save(folder / "audio.npy", codes)
    assert re.search("audio.npy has codes from 0 to 1024 .*expected 0 … 1023", told())
    assert multimodal.dataset_info(config)["n_subjects"] == 3, (
        "what only reads headers reads no content"
    )


def test_checksums_are_read_in_any_case_and_each_is_of_a_file(config, monkeypatch, tmp_path):
    """A hand-made folder may have checksums as `sha256sum` and other programs write them."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    sums = json.loads((pathlib.Path(config.path) / "dataset.json").read_text())["files"]

    def load():
        return multimodal.make_loader(
            config, split="train", rows=Rows(4, ((0, 4),)), seed=0
        ).fingerprint  # noqa: E731

    before = load()
    amend(config, files={name: digest.upper() for name, digest in sums.items()})
    assert load() == before
    amend(config, files={"vide.npy": "00"})
    with pytest.raises(
        DataError,
        match="\"files\" has a checksum of 'vide.npy', which does not exist; .* mean 'video.npy'",
    ):
        load()


def test_the_fingerprint_is_of_the_contents(tmp_path):
    states = []
    for i, changed in enumerate((False, False, True)):
        config = make(tmp_path / str(i), viewers=2 + changed)
        loader = multimodal.make_loader(config, split="train", rows=Rows(4, ((0, 4),)), seed=0)
        states.append(loader.state(5))
    assert (
        states[0] == states[1]
        and states[0]["fingerprint"] != states[2]["fingerprint"]
        and states[0]["position"] == 5
    )


FULL = """
import json, sys
from loaders.film import demo_film, film_files, hrf, multimodal
from loaders.base import Rows

viewers, volumes, voxels, batches = map(int, sys.argv[1:])
path = demo_film.ensure_blank(viewers=viewers, volumes=volumes, voxels=voxels)
config = multimodal.Config(path=str(path))
loader = multimodal.make_loader(config, split="train", rows=Rows(16, ((0, 16),)), seed=0)

def resident():
    "[MB] of this process, with the file pages that it maps."
    lines = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return int(lines["VmRSS"].split()[0]) / 1024

seen = []
for i in range(batches):
    position, batch = next(loader)
    assert batch["video"][0].shape == (16, 1_641_600) and batch["fmri"][0].shape == (16, voxels)
    seen.append(resident())
print(json.dumps([seen[1], max(seen[2:]), seen[-1]]))
"""


@pytest.mark.parametrize(
    ("viewers", "volumes", "batches"),
    [(2, 60, 6), pytest.param(17, 920, 782, marks=pytest.mark.slow)],
)
def test_memory_of_a_process_stays_flat(tmp_path, viewers, volumes, batches):
    """The slow case is an epoch of 17 viewers × 920 volumes × 77,347 voxels: 3.9 GB of files that
    hold 25 GB of windows."""
    command = [sys.executable, "-c", FULL, *map(str, (viewers, volumes, 77_347, batches))]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAXTRAIN_CACHE": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    second, most, last = json.loads(done.stdout)
    print(f"{second:.0f} MB after two batches, at most {most:.0f} MB, {last:.0f} MB at the end")
    assert most < second + 40 and most < 400


def test_the_demo_film_can_be_read_at_its_size(tmp_path, monkeypatch):
    """The memory layout of large results differs from that of small ones in numpy."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    info = multimodal.dataset_info(Config(path="demo"))
    assert (info["n_subjects"], info["n_train"], info["n_test"], info["n_voxels"]) == (
        4,
        576,
        144,
        2000,
    )


def test_the_demo_film_is_a_function_of_its_file_and_predictable(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_film, "VOLUMES", 120)
    for name in "ab":
        (tmp_path / name).mkdir()
        demo_film.make(tmp_path / name)
    a, b = (json.loads((tmp_path / name / "dataset.json").read_text()) for name in "ab")
    assert a == b
    config = Config(path=str(tmp_path / "a"), hrf=("video", "text"))
    viewers = [
        np.load(tmp_path / "a" / "fmri" / f"viewer-{i + 1}.npy").astype(np.float32)
        for i in range(4)
    ]
    between = [np.corrcoef(viewers[0][v], viewers[1][v])[0, 1] for v in range(0, 120, 3)]
    assert 0.4 < np.mean(between) < 0.6, "half of what a viewer shows is shared"
    assert len(multimodal.split_volumes(config).test) == 3
