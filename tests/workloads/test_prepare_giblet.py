"""Real small files go through `jaxtrain prepare-giblet`: its folder has the contents of the film,
the scans and the tables."""

import csv
import datetime
import json
import pathlib
import re
import sys
from fractions import Fraction

import av
import nibabel
import numpy as np
import openpyxl
import pytest

from jaxtrain.workloads.giblet.commands import prepare_giblet as tool
from loaders.base import DataError, Rows
from loaders.film import fmri, multimodal, segments, streams

TR, VOLUMES, FPS = 1.5, 8, 10
GRID = (4, 5, 3)


def level(k):
    """The grey of frame k."""
    return 40 + k % 160


def film(
    path,
    *,
    seconds=12.0,
    tone=3000.0,
    picture_at=0.0,
    sound_at=0.0,
    silent=(0, 0),
    shown=lambda k: True,
):
    """Write a film without H.264: MPEG-4 at 10 frames/s, each frame of one grey, and a tone that
    doubles its pitch in the middle.

    A stream may begin later. Frames for which ``shown`` is false and sound within ``silent`` [s]
    are left out of the file.
    """
    with av.open(str(path), "w") as container:
        video = container.add_stream("mpeg4", rate=FPS)
        video.width, video.height, video.pix_fmt, video.bit_rate = 64, 48, "yuv420p", 4_000_000
        audio = container.add_stream("aac", rate=24_000)
        for k in range(round(seconds * FPS)):
            picture = av.VideoFrame.from_ndarray(
                np.full((48, 64, 3), level(k), np.uint8), format="rgb24"
            )
            picture.pts, picture.time_base = k + round(picture_at * FPS), Fraction(1, FPS)
            for packet in video.encode(picture) if shown(k) else ():
                container.mux(packet)
        t = np.arange(round(seconds * 24_000)) / 24_000
        wave = (0.5 * np.sin(2 * np.pi * np.where(t < seconds / 2, tone, 2 * tone) * t)).astype(
            np.float32
        )
        for start in range(0, len(wave) - 1024, 1024):
            frame = av.AudioFrame.from_ndarray(
                wave[None, start : start + 1024], format="fltp", layout="mono"
            )
            frame.sample_rate, frame.pts = 24_000, start + round(sound_at * 24_000)
            for packet in (
                audio.encode(frame) if not silent[0] <= start / 24_000 < silent[1] else ()
            ):
                container.mux(packet)
        for stream in (video, audio):
            for packet in stream.encode():
                container.mux(packet)


def brain(
    path, seed, *, volumes=VOLUMES, tr=TR, grid=GRID, broken=False, place=(0, 0, 0), unit="sec"
):
    """Write a scan and return its values. Voxels of the first plane do not vary."""
    rng = np.random.default_rng(seed)
    x = (100 + 10 * rng.standard_normal((*grid, volumes))).astype(np.float32)
    x[0] = 100
    if broken:
        x[2, 2, 2, 3] = np.nan
    affine = np.diag([3.0, 3, 3, 1])
    affine[:3, 3] = place
    image = nibabel.Nifti1Image(x, affine)
    image.header.set_zooms((3, 3, 3, tr))
    image.header.set_xyzt_units("mm", unit)
    nibabel.save(image, path)
    return x


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    film(folder / "film.mp4")
    brains = [brain(folder / f"sub-{i}.nii.gz", i) for i in (1, 2)]
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1024, (1, 8, 900))
    np.savez(folder / "codes.npz", codes=codes)
    np.savez(
        folder / "embeddings.npz",
        e=np.arange(1, 6, dtype=np.float32)[:, None] * np.ones(4, np.float32),
    )
    rows = [("scene", "start", "end"), *((f"s{i}", 2.0 * i, 2.0 * i + 2.5) for i in range(5))]
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    book.save(folder / "segments.xlsx")
    with (folder / "segments.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return folder, brains, codes[0]


def call(sources, out, **changes):
    """Call the command with changed arguments. ``None`` leaves an argument out."""
    folder = sources[0]
    args = {
        "video": folder / "film.mp4",
        "fmri": [folder / "sub-1.nii.gz", folder / "sub-2.nii.gz"],
        "codes": folder / "codes.npz",
        "embeddings": folder / "embeddings.npz",
        "annotations": folder / "segments.xlsx",
        "fps": FPS,
        "size": "16x9",
        "slots": 2,
    } | changes
    line = ["--out", str(out)]
    for name, value in args.items():
        if value is not None:
            line += [
                f"--{name.replace('_', '-')}",
                *map(str, value if isinstance(value, list) else [value]),
            ]
    return tool.main(line)


@pytest.fixture(scope="module")
def prepared(sources, tmp_path_factory):
    out = tmp_path_factory.mktemp("prepared") / "film"
    assert call(sources, out) == 0
    return out


def test_frames_are_those_on_the_screen(prepared):
    video = np.load(prepared / "video.npy", mmap_mode="r")
    assert video.shape == (VOLUMES * 15, 9, 16, 3), "no more than the volumes need"
    grey = video.reshape(len(video), -1).mean(1)
    # lossy, with limited range in between
    np.testing.assert_allclose(grey, level(np.arange(len(video))), atol=4)


@pytest.mark.parametrize("turned", [0, 90, 180, 270])
def test_a_film_that_was_held_sideways_is_upright(tmp_path, turned):
    """Phones write such films: the matrix of the track gives the angle by which players turn the
    picture (clockwise)."""
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        picture = np.zeros((48, 64, 3), np.uint8)
        picture[:24, :32] = 200  # the top left corner
        for packet in (
            *stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")),
            *stream.encode(),
        ):
            container.mux(packet)
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    place = content.index(b"tkhd") + 4 + 40
    c, s = round(np.cos(np.radians(turned))), round(np.sin(np.radians(turned)))
    matrix = [c << 16, s << 16, 0, -s << 16, c << 16, 0, 0, 0, 1 << 30]
    content[place : place + 36] = b"".join(x.to_bytes(4, "big", signed=True) for x in matrix)
    (tmp_path / "a.mp4").write_bytes(content)
    streams.write_video(tmp_path / "a.mp4", tmp_path / "a.npy", FPS, (16, 8), limit=1)
    frame = np.load(tmp_path / "a.npy")[0]
    assert frame.shape == (8, 16, 3)
    # clockwise from the top left corner
    corners = [frame[1, 2], frame[1, -3], frame[-2, -3], frame[-2, 2]]
    assert [corner.mean() > 100 for corner in corners].index(True) == turned // 90


def test_another_frame_rate_repeats_and_drops(sources, tmp_path):
    for fps, expected in (
        (25, lambda k: int(k / 25 * FPS + 1e-6)),
        (4, lambda k: int(k / 4 * FPS + 1e-6)),
    ):
        n = streams.write_video(
            sources[0] / "film.mp4", tmp_path / f"{fps}.npy", fps, (16, 9), limit=10_000
        )
        grey = np.load(tmp_path / f"{fps}.npy").reshape(n, -1).mean(1)
        assert abs(n - 12 * fps) <= fps / FPS + 1
        np.testing.assert_allclose(grey, [level(expected(k)) for k in range(n)], atol=4)


def test_fmri_is_the_masked_and_z_scored_scan(prepared, sources):
    mask = np.asanyarray(nibabel.load(prepared / "mask.nii.gz").dataobj) > 0
    assert not mask[0].any() and mask[1:].sum() > 0.8 * mask[1:].size
    for name, x in zip(("sub-1", "sub-2"), sources[1], strict=True):
        series = x[mask].T
        z = (series - series.mean(0)) / series.std(0)
        np.testing.assert_allclose(np.load(prepared / "fmri" / f"{name}.npy"), z, atol=2e-3)


def test_the_users_own_mask_is_used(sources, tmp_path):
    inside = np.zeros(GRID, np.uint8)
    inside[:2, 1, 1] = 1  # one of these is constant
    nibabel.save(nibabel.Nifti1Image(inside, np.diag([3, 3, 3, 1])), tmp_path / "mask.nii")
    assert call(sources, tmp_path / "out", mask=tmp_path / "mask.nii", dtype="float32") == 0
    x = np.load(tmp_path / "out" / "fmri" / "sub-2.npy")
    assert x.shape == (VOLUMES, 2) and x.dtype == np.float32 and not x[:, 0].any()
    np.testing.assert_allclose(x[:, 1].std(), 1, atol=1e-5)


def test_scans_that_say_little_or_round_otherwise_are_taken(sources, tmp_path):
    """A TR without a unit is a placeholder, origins may differ by rounding, a mask may have a
    fourth axis, and --out may be a link."""
    scans = [tmp_path / "a.nii.gz", tmp_path / "b.nii.gz"]
    for seed, path in enumerate(scans):
        brain(path, seed, tr=1.0, unit="unknown", place=(-90 + 0.004 * seed, 0, 0))
    inside = np.ones((*GRID, 1), np.uint8)
    nibabel.save(nibabel.Nifti1Image(inside, nibabel.load(scans[0]).affine), tmp_path / "mask.nii")
    np.savez(tmp_path / "codes.npz", codes=sources[2][None], scale=np.ones((1, 1), np.float32))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    changes = dict(fmri=scans, mask=tmp_path / "mask.nii", codes=tmp_path / "codes.npz")
    assert call(sources, tmp_path / "out", **changes) == 2, "and nothing else says the TR"
    assert call(sources, tmp_path / "out", tr=TR, **changes) == 0
    info = json.loads((tmp_path / "elsewhere" / "dataset.json").read_text())
    assert info["tr"] == TR and not list(tmp_path.glob(".*"))


def test_moments_are_in_the_volume_that_they_begin(sources, tmp_path):
    """Segments without length lie at multiples of the TR. Each is in the window that begins with
    it."""
    rows = "".join(f"{TR * i},{TR * i}\n" for i in range(5))
    (tmp_path / "points.csv").write_text("start,end\n" + rows)
    assert call(sources, tmp_path / "out", annotations=tmp_path / "points.csv", slots=1) == 0
    text = np.load(tmp_path / "out" / "text.npy")[:, 0]
    assert text.tolist() == [1, 1, 2, 3, 4, 5, 0, 0]


@pytest.mark.parametrize(("mean", "dtype"), [(3e4, "f4"), (1e9, "f8")])
def test_a_large_mean_is_taken_away_whole(tmp_path, mean, dtype):
    x = np.random.default_rng(0).normal(mean, 1, (50, 1, 1, 900)).astype(dtype)
    nibabel.save(nibabel.Nifti1Image(x, np.eye(4)), tmp_path / "a.nii")
    nibabel.save(nibabel.Nifti1Image(np.ones((50, 1, 1), "u1"), np.eye(4)), tmp_path / "mask.nii")
    (tmp_path / "fmri").mkdir()
    assert (
        fmri.write(tmp_path, [tmp_path / "a.nii"], ["a"], tmp_path / "mask.nii", 900, np.float32)
        == 0
    )
    z, wide = np.load(tmp_path / "fmri" / "a.npy"), x[:, 0, 0].astype("f8").T
    np.testing.assert_allclose(z, (wide - wide.mean(0)) / wide.std(0), atol=1e-5)
    assert abs(z.mean(0, dtype="f8")).max() < 1e-5


def test_a_constant_voxel_is_constant_whatever_its_value(tmp_path):
    x = np.random.default_rng(0).normal(100, 1, (4, 1, 1, 200))
    x[1], x[2], x[3] = (
        0.1,
        30000,
        1e-200 * (np.arange(200) % 2),
    )  # the mean of 200 times 0.1 is not 0.1; squares of 1e-200 are 0
    nibabel.save(nibabel.Nifti1Image(x, np.eye(4)), tmp_path / "a.nii")
    nibabel.save(nibabel.Nifti1Image(np.ones((4, 1, 1), "u1"), np.eye(4)), tmp_path / "mask.nii")
    (tmp_path / "fmri").mkdir()
    where = (tmp_path, [tmp_path / "a.nii"], ["a"], tmp_path / "mask.nii")
    assert fmri.write(*where, 200, np.float32) == 3
    found = np.load(tmp_path / "fmri" / "a.npy")
    assert found[:, 0].std() > 0.9 and not found[:, 1:].any()


def test_rows_say_since_when_they_share_a_segment(prepared):
    """Segments last 2.5 s and come every 2 s, and volumes last 1.5 s."""
    since = json.loads((prepared / "dataset.json").read_text())["text_since"]
    text = np.load(prepared / "text.npy").reshape(VOLUMES, 2, 4)[:, :, 0]
    for i in range(VOLUMES):
        alike = [j for j in range(i + 1) if set(text[i]) & set(text[j]) - {0}]
        assert since[i] == min([i, *alike])
    assert since != list(range(VOLUMES))


def test_arrays_may_come_as_npy_and_what_no_volume_has_is_reported(sources, tmp_path, capsys):
    np.save(tmp_path / "codes.npy", sources[2])
    np.save(tmp_path / "e.npy", np.ones((3, 4), np.float64))
    (tmp_path / "late.csv").write_text("start,end\n0,1\n6,7\n100,200\n")
    changes = dict(
        codes=tmp_path / "codes.npy",
        embeddings=tmp_path / "e.npy",
        annotations=tmp_path / "late.csv",
    )
    assert call(sources, tmp_path / "out", **changes) == 0
    assert "(none in 5 volumes; 1 of 3 segments are in no volume)" in capsys.readouterr().out


@pytest.mark.parametrize("table", ["segments.xlsx", "segments.csv"])
def test_text_and_codes_are_where_their_windows_are(sources, tmp_path, table):
    assert call(sources, tmp_path / "out", annotations=sources[0] / table) == 0
    text = np.load(tmp_path / "out" / "text.npy").reshape(VOLUMES, 2, 4)[:, :, 0]
    expected = np.zeros((VOLUMES, 2))
    for i in range(VOLUMES):
        window = (max(i - 1, 0) * TR, max(i, 1) * TR)
        touching = [s + 1 for s in range(5) if 2.0 * s < window[1] and 2.0 * s + 2.5 > window[0]][
            -2:
        ]
        expected[i, 2 - len(touching) :] = touching
    np.testing.assert_array_equal(text, expected)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "audio.npy"), sources[2].T)


def test_tables_written_by_other_tools_give_the_same_result(sources, tmp_path):
    """The tables have semicolons, Latin-1, decimal commas and hh:mm:ss, and a workbook has its own
    times."""
    folder, expected = (
        sources[0],
        segments.read_annotations(sources[0] / "segments.csv", "start", "end"),
    )
    lines = [
        f"café;0:00:0{2 * i};{f'00:{2 * i + 2:02d},5' if i % 2 else f'{2 * i + 2},5'}"
        for i in range(5)
    ]
    (tmp_path / "latin.csv").write_bytes("\n".join(["scene;start;end", *lines]).encode("latin-1"))
    book = openpyxl.Workbook()
    book.active.append(("scene", "start", "end"))
    for i in range(5):
        end = datetime.timedelta(seconds=2 * i + 2.5)
        book.active.append((f"s{i}", datetime.time(0, 0, 2 * i), end))
    book.save(tmp_path / "times.xlsx")
    for name in ("latin.csv", "times.xlsx"):
        np.testing.assert_allclose(
            segments.read_annotations(tmp_path / name, "start", "end"),
            expected,
            atol=1e-6,
            err_msg=name,
        )
    for wrong in ("1:2:3:4", "0:61", "-1:00", "a:b"):
        (tmp_path / "wrong.csv").write_text(f"start,end\n0,{wrong}\n")
        with pytest.raises(DataError, match="nor hh:mm:ss"):
            segments.read_annotations(tmp_path / "wrong.csv", "start", "end")
    (tmp_path / "wrong.csv").write_text("start,end\n0,1\n2,1\n3,x\n")
    with pytest.raises(DataError, match="row 3 ends at 1 s.*1 more: --errors FILE") as error:
        segments.read_annotations(tmp_path / "wrong.csv", "start", "end")
    assert ["row 3" in error.value.listed[0], "row 4" in error.value.listed[1]] == [True] * 2
    assert folder.is_dir()


@pytest.mark.parametrize(
    "text",
    [
        "start,end\n60,8100\n",
        "Start,END\n1:00,2:15:00\n",
        "sep=;\nstart;end\n60,0;135:00\n",
        "\ufeffSEP=,\r\nstart,end,\r\n60,2:15:00.0,\r\n",
        '"sep=;"\nscene;start;end\n"a; b";1:00;8100\n',
        "end,Start,start\n8100,no,60\n",
    ],
)
def test_a_table_made_by_hand_gives_the_same_result(tmp_path, text):
    """Headers may be in any case, and Excel's first line is accepted. Without hours, minutes may be
    above 59. A separator may follow the last cell."""
    (tmp_path / "a.csv").write_text(text)
    assert segments.read_annotations(tmp_path / "a.csv", "start", "end").tolist() == [[60, 8100]]


def test_one_column_may_be_both_begin_and_end(tmp_path):
    (tmp_path / "a.csv").write_text("onset\n2.5\n1:04\n")
    spans = segments.read_annotations(tmp_path / "a.csv", "onset", "onset")
    assert spans.tolist() == [[2.5, 2.5], [64, 64]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "start,end\n0,1:75:00\n",
            "row 2 has no seconds, nor hh:mm:ss, in start and end: .'0', '1:75:00'.",
        ),
        (
            "start,end\n\n00:00:01,5,00:00:02\n",
            "row 3 has 3 cells, and the header 2: .*; put quotes around a cell",
        ),
        ("sep=,\nstart,end\n0,1,2\n", "row 3 has 3 cells"),
        (
            'start,end\n0,"1,234"\n',
            "row 2 has '1,234', and commas separate the columns.*a point, or .* by semicolons",
        ),
        ('start,end\n"0:00:01,5",2\n', "row 2 has '0:00:01,5', and commas"),
        ("start,start,end\n0,5,1\n", "has the column start more than once: .*; rename"),
        ("Start,START,end\n0,5,1\n", "has the column start more than once"),
    ],
)
def test_a_cell_that_could_mean_two_times_is_refused(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=f"a.csv:? {message}"):
        segments.read_annotations(tmp_path / "a.csv", "start", "end")


@pytest.mark.parametrize("shape", [(*GRID, VOLUMES, 1), (*GRID, 1, VOLUMES)])
def test_a_scan_with_an_axis_of_one_is_the_scan(tmp_path, shape):
    plain = brain(tmp_path / "sub.nii.gz", 1)
    image = nibabel.Nifti1Image(plain.reshape(shape), np.diag([3.0, 3, 3, 1]))
    image.header.set_zooms((3, 3, 3, *(TR if n > 1 else 1 for n in shape[3:])))
    image.header.set_xyzt_units("mm", "sec")
    nibabel.save(image, tmp_path / "five.nii.gz")
    assert fmri.check([tmp_path / "five.nii.gz"], None, None) == (TR, VOLUMES, ["five"])
    np.testing.assert_array_equal(fmri.read_volumes(tmp_path / "five.nii.gz", 5), plain[..., :5])


def test_a_unit_that_does_not_exist_is_reported(tmp_path):
    brain(tmp_path / "sub.nii", 1)
    content = bytearray((tmp_path / "sub.nii").read_bytes())
    content[123] = 160  # xyzt_units of the header
    (tmp_path / "sub.nii").write_bytes(content)
    with pytest.raises(DataError, match=r"sub\.nii cannot be read: .*160"):
        fmri.check([tmp_path / "sub.nii"], None, None)


def test_the_bands_of_a_sound_follow_its_pitch(sources, tmp_path):
    assert call(sources, tmp_path / "out", codes=None, audio=sources[0] / "film.mp4") == 0
    features = np.load(tmp_path / "out" / "audio.npy")
    assert abs(len(features) - 12 * 75) <= 10 and features.shape[1] == 8
    centres = np.array([np.argmax(row) for row in streams.mel_bank(8, 1024)]) * 24_000 / 1024
    for pitch, part in ((3000, features[100:400]), (6000, features[500:800])):
        band = np.abs(centres - pitch).argmin()
        other = features[500:800] if pitch == 3000 else features[100:400]
        assert (part[:, band].mean() - other[:, band].mean()) > 1, f"the band around {pitch} Hz"
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["audio"] == "features"


def change_of_pitch(features, after):
    """The time [s] of the largest change in features of 20 Hz, from ``after`` [s] on."""
    return (np.abs(np.diff(features, axis=0)).sum(1)[20 * after :].argmax() + 1) / 20 + after


@pytest.mark.parametrize("ending", ["mp4", "mkv"])
def test_pictures_and_sound_are_on_one_clock(tmp_path, ending):
    """A stream that begins later, frames of unequal length and a hole in the sound do not shift
    anything else."""
    film(tmp_path / f"a.{ending}", seconds=8, sound_at=2.0, shown=lambda k: k < 10 or k % 3 == 0)
    film(tmp_path / f"b.{ending}", seconds=8, picture_at=2.0, silent=(1.0, 2.0))
    for name, pitch in (("a", 6.0), ("b", 4.0)):
        features = streams.sound_features(tmp_path / f"{name}.{ending}", 20, 8)
        assert abs(change_of_pitch(features, 3) - pitch) <= 0.1
    starts = streams.clock(tmp_path / f"b.{ending}").starts
    assert starts["audio"] == 0 and abs(starts["video"] - 2) < 0.05
    n = streams.write_video(tmp_path / f"a.{ending}", tmp_path / "a.npy", FPS, (16, 9), limit=80)
    grey = np.load(tmp_path / "a.npy").reshape(n, -1).mean(1)
    np.testing.assert_allclose(
        grey, [level(k if k < 10 else k - k % 3 if k >= 12 else 9) for k in range(n)], atol=4
    )
    n = streams.write_video(tmp_path / f"b.{ending}", tmp_path / "b.npy", FPS, (16, 9), limit=80)
    grey = np.load(tmp_path / "b.npy").reshape(n, -1).mean(1)
    np.testing.assert_allclose(grey[21:], level(np.arange(1, n - 20)), atol=6)
    assert not grey[:19].any(), "nothing is on the screen yet"


def test_a_scan_of_a_part_of_the_film(sources, tmp_path, capsys):
    """The output has the pictures, sound and segments of that part. Lengths that do not fit are
    reported."""
    changes = dict(codes=None, audio=sources[0] / "film.mp4", code_rate=20, slots=1, tr=TR)
    assert call(sources, tmp_path / "whole", **changes) == 0
    assert "differ by more" not in capsys.readouterr().out
    assert call(sources, tmp_path / "part", film_start=4.5, volumes=5, **changes) == 0
    assert "differ by more" not in capsys.readouterr().out
    whole, part = (
        {name: np.load(tmp_path / folder / f"{name}.npy") for name in ("video", "audio", "text")}
        for folder in ("whole", "part")
    )
    np.testing.assert_array_equal(part["video"], whole["video"][45:120])
    assert (
        abs(change_of_pitch(whole["audio"], 1) - 6) <= 0.1
        and abs(change_of_pitch(part["audio"], 1) - 1.5) <= 0.1
    )
    np.testing.assert_array_equal(part["text"][1:], whole["text"][4:])
    assert call(sources, tmp_path / "short", volumes=5, film_start=-3, **changes) == 0
    assert "film.mp4 15.0 s" in capsys.readouterr().out
    video = np.load(tmp_path / "short" / "video.npy")
    assert not video[:30].any() and np.array_equal(video[30:], whole["video"][:45])
    assert call(sources, tmp_path / "codes", film_start=-3) == 2
    assert "codes have none for silence before the film" in capsys.readouterr().err


def test_the_loader_reads_what_was_prepared(prepared):
    config = multimodal.Config(path=str(prepared), hrf=("text",), hrf_seconds=3.0, test_share=0.5)
    info = multimodal.dataset_info(config)
    assert (
        info["n_frames"] == 15
        and info["audio_frames"] == 112
        and info["n_subjects"] == 2
        and info["n_text"] == 8
    )
    position, batch = next(
        multimodal.make_loader(config, split="train", rows=Rows(4, ((0, 4),)), seed=0)
    )
    assert position == 1 and batch["video"][0].shape == (4, 15 * 9 * 16 * 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(video="none.mp4"), "no such file: .*none.mp4"),
        (dict(video="segments.csv"), "segments.csv cannot be decoded"),
        (
            dict(fmri=["sub-1.nii.gz", "codes.npz"]),
            "codes.npz is no NIfTI file by its name; expected .nii or .nii.gz",
        ),
        (
            dict(fmri=["sub-1.nii.gz", "short.nii.gz"]),
            r"volumes differ \(sub-1.nii.gz 8, short.nii.gz 6\).*--volumes=6",
        ),
        (dict(fmri=["sub-1.nii.gz", "grid.nii.gz"]), "the grids differ"),
        (dict(fmri=["sub-1.nii.gz", "slow.nii.gz"]), "TR of 2 s, and .*sub-1.* says 1.5 s"),
        (
            dict(fmri=["sub-1.nii.gz", "broken.nii.gz"]),
            "broken.nii.gz has values that are not finite in 1 voxels",
        ),
        (dict(tr=2.0), "TR of 1.5 s, and --tr says 2 s; omit --tr, or correct the header"),
        (dict(volumes=9), "--volumes=9, and .*sub-1.nii.gz has only 8"),
        (dict(codes="embeddings.npz"), "expected integers .codebooks, times."),
        (dict(codes="large.npz"), "codes from 0 to 1024; expected 0 … 1023"),
        (dict(codes="turned.npz"), "900 codebooks of 8 times.*transpose"),
        (dict(codes="film.mp4"), "film.mp4 cannot be read"),
        (dict(annotations="none.csv"), "no such file"),
        (dict(start="onset"), "has no column onset; expected one of: scene, start, end"),
        (
            dict(annotations="words.csv"),
            (
                r"words.csv: row 3 has no seconds, nor hh:mm:ss, in start and end: \['b', 'later',"
                r" '4'\]"
            ),
        ),
        (dict(annotations="few.csv"), "few.csv has 1 segments, and .*embeddings.npz 5 rows"),
        (dict(annotations=None), "has 5 rows for 8 volumes; give one for each, or --annotations"),
        (
            dict(annotations=None, embeddings="nine.npy"),
            "has 9 rows for 8 volumes; give one for each",
        ),
        (dict(fmri=["scan.mgz"]), "scan.mgz is no NIfTI file by its name"),
        (dict(codes="brief.npz"), "/out: the audio ends .* s before the last of 8 volumes"),
        (
            dict(code_rate=0.4),
            "/out: 1.5 s between volumes at 0.4 a second hold not one sample of audio",
        ),
        (dict(codes="none.npz"), r"int64 \(8, 0\); expected integers"),
        (dict(codes="cut.npz"), "cut.npz cannot be read"),
        (dict(codes="nothing.npz"), "nothing.npz cannot be read"),
        (
            dict(embeddings="huge.npz"),
            "huge.npz has values that are not finite in float32, in 1 of its rows",
        ),
        (dict(embeddings="narrow.npz"), r"float32 \(5, 0\); expected floating-point"),
        (
            dict(fmri=["sub-1.nii.gz", "two.nii.gz"]),
            r"two.nii.gz has the shape \(4, 5, 3, 8, 2\).*choose one of the scans",
        ),
        (dict(fmri=["still.nii.gz"]), r"still.nii.gz has the shape \(4, 5, 3, 0\)"),
        (dict(annotations="bad.xlsx"), "bad.xlsx cannot be read"),
        (
            dict(annotations="ms.csv"),
            "no segment touches the 12 s of film; they lie from 50000 to 99000 in start and end",
        ),
        (dict(fmri=["sub-1.nii.gz", "cut.nii.gz"]), "cut.nii.gz cannot be read"),
        (
            dict(fmri=["sub-1.nii.gz", "moved.nii.gz"]),
            "moved.nii.gz lies elsewhere in space than .*sub-1.nii.gz.*resample",
        ),
        (dict(mask="mask.nii.gz"), "mask.nii.gz lies elsewhere in space"),
        (dict(mask="share.nii.gz"), "share.nii.gz has 60 different values, 0 to 1; a mask has two"),
        (
            dict(mask="labels.nii.gz"),
            "labels.nii.gz has the values 1 and 2, so .*; write those outside as 0",
        ),
        (dict(fmri=["complex.nii.gz"]), "complex.nii.gz holds complex64; expected real numbers"),
        (dict(fmri=["type.nii"]), "type.nii cannot be read"),
        (dict(fmri=["hertz.nii.gz"]), "hertz.nii.gz does not say its TR with a unit; give --tr"),
    ],
)
def test_errors_are_reported_and_leave_nothing_behind(sources, tmp_path, capsys, changes, message):
    folder, _, codes = sources
    brain(folder / "short.nii.gz", 3, volumes=6)
    brain(folder / "grid.nii.gz", 3, grid=(4, 4, 4))
    brain(folder / "slow.nii.gz", 3, tr=2.0)
    brain(folder / "broken.nii.gz", 3, broken=True)
    np.savez(folder / "large.npz", codes=np.array([[0, 1024], [1, 2]]))
    np.savez(folder / "turned.npz", codes=codes.T)
    np.savez(folder / "brief.npz", codes=codes[:, :100])
    np.savez(folder / "none.npz", codes=codes[:, :0])
    (folder / "cut.npz").write_bytes((folder / "codes.npz").read_bytes()[:1000])
    (folder / "nothing.npz").write_bytes(b"")
    np.savez(folder / "huge.npz", e=np.diag([1e300, 1, 1, 1, 1]))
    np.savez(folder / "narrow.npz", e=np.zeros((5, 0), np.float32))
    nibabel.save(
        nibabel.Nifti1Image(np.ones((*GRID, 8, 2), np.float32), np.eye(4)), folder / "two.nii.gz"
    )
    nibabel.save(
        nibabel.Nifti1Image(np.ones((*GRID, 0), np.float32), np.eye(4)), folder / "still.nii.gz"
    )
    (folder / "bad.xlsx").write_bytes(b"PK no workbook")
    (folder / "ms.csv").write_text(
        "start,end\n" + "".join(f"{50 + 10 * i}000,{59 + 10 * i}000\n" for i in range(5))
    )
    (folder / "cut.nii.gz").write_bytes((folder / "sub-1.nii.gz").read_bytes()[:-600])
    brain(folder / "moved.nii.gz", 3, place=(0, 0, 5))
    nibabel.save(nibabel.Nifti1Image(np.ones(GRID, np.uint8), np.eye(4)), folder / "mask.nii.gz")
    share = np.linspace(0, 1, 60, dtype=np.float32).reshape(GRID)
    nibabel.save(nibabel.Nifti1Image(share, np.diag([3, 3, 3, 1])), folder / "share.nii.gz")
    labels = nibabel.Nifti1Image(
        np.where(share > 0.5, 2, 1).astype(np.uint8), np.diag([3, 3, 3, 1])
    )
    nibabel.save(labels, folder / "labels.nii.gz")
    nibabel.save(
        nibabel.Nifti1Image(np.ones((*GRID, 8), np.complex64), np.eye(4)), folder / "complex.nii.gz"
    )
    brain(folder / "type.nii", 3)
    header = bytearray((folder / "type.nii").read_bytes())
    header[70:72] = (999).to_bytes(2, "little")  # datatype
    (folder / "type.nii").write_bytes(header)
    brain(folder / "hertz.nii.gz", 3, unit="hz")
    np.save(folder / "nine.npy", np.ones((9, 4), np.float32))
    nibabel.save(nibabel.MGHImage(np.ones((*GRID, 8), np.float32), np.eye(4)), folder / "scan.mgz")
    (folder / "words.csv").write_text("scene,start,end\na,0,2\nb,later,4\n")
    (folder / "few.csv").write_text("scene,start,end\na,0,2\n")

    def place(value):
        return folder / value if isinstance(value, str) and "." in value else value

    full = {
        name: [place(v) for v in value] if isinstance(value, list) else place(value)
        for name, value in changes.items()
    }
    assert call(sources, tmp_path / "out", **full) == 2
    told = capsys.readouterr().err
    assert re.search(message, told), told
    assert not list(pathlib.Path(tmp_path).glob("*out*")) and not list(
        pathlib.Path(tmp_path).glob(".*")
    )


@pytest.mark.parametrize("kilobytes", [4, 16, 48])
def test_a_full_disk_is_reported_and_left_empty(sources, tmp_path, capsys, kilobytes, small_disk):
    """The disk fills up at the text, at a scan or at the film."""
    disk = small_disk(kilobytes)
    assert call(sources, disk / "out") == 2
    told = capsys.readouterr().err
    assert (
        told
        == f"error: {disk / 'out'} could not be written: No space left on device; free some space,"
        " then rerun the command\n"
    )
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    "change", [dict(tr="nan"), dict(fps="inf"), dict(code_rate="-1"), dict(slots=0)]
)
def test_a_text_in_place_of_a_number_is_refused(sources, tmp_path, capsys, change):
    with pytest.raises(SystemExit):
        call(sources, tmp_path / "out", **change)
    assert "expected a positive, finite number" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_with_its_extra(sources, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    assert call(sources, tmp_path / "out") == 2
    assert (
        "needs the package nibabel; install it with: pip install 'jaxtrain[giblet]'"
        in capsys.readouterr().err
    )


def test_long_sound_at_44_kilohertz_keeps_its_time(tmp_path):
    """A frame of this sound is not a whole number of samples at the rate of the features. An error
    of 0.28 samples per frame adds up to 0.1 s after 200 s."""
    rate, seconds, begin = 44_100, 215, 210
    with av.open(str(tmp_path / "a.mka"), "w", format="matroska") as container:
        audio = container.add_stream("aac", rate=rate)
        t = np.arange(seconds * rate) / rate
        wave = np.where(t < begin, 0, 0.5 * np.sin(2 * np.pi * 1000 * t)).astype(np.float32)
        for start in range(0, len(wave) - 1024, 1024):
            frame = av.AudioFrame.from_ndarray(
                wave[None, start : start + 1024], format="fltp", layout="mono"
            )
            frame.sample_rate, frame.pts = rate, start
            container.mux(audio.encode(frame))
        container.mux(audio.encode())
    heard = np.flatnonzero(np.abs(streams._sound(tmp_path / "a.mka")) > 0.1)[0] / streams.SOUND_RATE
    assert abs(heard - begin) < 0.05
