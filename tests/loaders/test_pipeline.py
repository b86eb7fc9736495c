import gc
import itertools
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import pytest

from loaders import _rust, order
from tests.support import corpus, pipelines

N_FRAMES = 16
CLIP = 800 + 15 * 320  # samples at 32 kHz
SMALL = {"clip_samples": CLIP, "n_frames": N_FRAMES, "bad_budget": 0.0}
FORMATS = [
    ("WAV", None, 22_050),
    ("FLAC", None, 48_000),
    ("OGG", "VORBIS", 32_000),
    ("MP3", None, 44_100),
    ("WAV", None, 8_000),
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """37 recordings of 0.05 to 0.6 s in all codecs, in two shards. The shortest are shorter than a
    clip."""
    encoded = []
    for i in range(37):
        kind, subtype, rate = FORMATS[i % len(FORMATS)]
        encoded.append(corpus.encode(corpus.noise(i, 0.05 + 0.015 * i, rate), rate, kind, subtype))
    return open_index(tmp_path_factory.mktemp("mixed"), encoded)


def open_index(folder, encoded, shards=2):
    parts = np.array_split(np.arange(len(encoded)), shards)
    tables = [corpus.table([encoded[i] for i in part], [i % 2 for i in part]) for part in parts]
    paths = [corpus.write(folder / f"{k}.arrow", table, batch=7) for k, table in enumerate(tables)]
    return _rust.Index(paths, label="label")


def make(index, *, rows=None, batch=8, ranges=None, seed=1, train=True, **options):
    rows = np.arange(index.n_rows) if rows is None else np.asarray(rows, np.int64)
    options = {**SMALL, **options}
    return pipelines.make(
        index,
        rows=rows,
        batch=batch,
        ranges=ranges or [(0, batch)],
        seed=seed,
        train=train,
        **options,
    )


def take(pipeline, n):
    """n batches as {field: [n, ...]} copies, ranges joined."""
    batches = [pipeline.next()[1] for _ in range(n)]
    return {name: np.stack([np.concatenate(b[name]) for b in batches]) for name in batches[0]}


def equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_batches_follow_the_order(mixed):
    with_order = take(make(mixed, batch=8), 12)  # 96 rows: more than two epochs of 37
    sample = np.arange(96)
    expected = [order.permutation(1, e, 37, np.arange(37)) for e in range(3)]
    np.testing.assert_array_equal(
        with_order["index"].ravel(), [expected[s // 37][s % 37] for s in sample]
    )
    np.testing.assert_array_equal(with_order["epoch"].ravel(), sample // 37)
    np.testing.assert_array_equal(with_order["label"], with_order["index"] % 2)
    np.testing.assert_array_equal(with_order["weight"], 1)
    assert with_order["spectrogram"].shape == (12, 8, N_FRAMES, 128)
    assert with_order["spectrogram"].dtype == np.float32
    assert np.isfinite(with_order["spectrogram"]).all()


def test_a_subset_keeps_the_index_of_its_recordings(mixed):
    rows = np.array([3, 30, 31, 36])
    found = take(make(mixed, rows=rows, batch=4), 2)["index"]
    assert [sorted(batch) for batch in found.tolist()] == [rows.tolist()] * 2


@pytest.mark.parametrize("train", [True, False])
def test_threads_change_no_byte(mixed, train):
    first, *others = (take(make(mixed, train=train, threads=threads), 5) for threads in (1, 2, 8))
    for other in others:
        equal(first, other)


def test_seek_equals_a_run_from_there(mixed):
    first = take(make(mixed), 9)
    pipeline = make(mixed, threads=2)
    for position in (5, 0, 7, 7, 2):
        pipeline.seek(position)
        after, batch = pipeline.next()
        assert after == position + 1
        equal(
            {k: np.concatenate(v) for k, v in batch.items()},
            {k: v[position] for k, v in first.items()},
        )
    pipeline.seek(10**12)
    assert pipeline.next()[0] == 10**12 + 1
    with pytest.raises(ValueError, match="out of range"):
        pipeline.seek(2**63)


def test_seeds_differ(mixed):
    assert (take(make(mixed, seed=1), 4)["index"] != take(make(mixed, seed=2), 4)["index"]).any()


@pytest.mark.parametrize("train", [True, False])
def test_processes_together_read_the_batch_of_one(mixed, train):
    whole = take(make(mixed, train=train), 5)
    parts = [
        make(mixed, train=train, ranges=ranges) for ranges in ([(0, 2), (4, 5)], [(2, 4)], [(5, 8)])
    ]
    found = [pipeline.next()[1] for _ in range(5) for pipeline in parts]
    for step in range(5):
        a, b, c = found[3 * step : 3 * step + 3]
        together = {k: np.concatenate([a[k][0], b[k][0], a[k][1], c[k][0]]) for k in whole}
        equal(together, {k: v[step] for k, v in whole.items()})


def test_the_test_split_ends_after_every_recording_once(mixed):
    pipeline = make(mixed, train=False)
    for _ in range(2):
        found = take(pipeline, 5)
        for _ in range(2):
            with pytest.raises(StopIteration):
                pipeline.next()
        np.testing.assert_array_equal(found["index"].ravel(), [*range(37), -1, -1, -1])
        np.testing.assert_array_equal(found["weight"].ravel(), [1] * 37 + [0] * 3)
        assert not found["spectrogram"][-1, -3:].any()
        assert not found["epoch"].any()
        pipeline.seek(0)


def reference(index, row, train, epoch=0, seed=1):
    """A row made by the extension's parts, joined in Python."""
    _, rate, n = _rust.decode(index.encoded(row))
    want = -(-CLIP * rate // 32_000)
    if n >= want:
        start = order.crop_start(seed, epoch, row, n - want + 1) if train else (n - want) // 2
        wave = _rust.resample(_rust.decode(index.encoded(row), start, want)[0], rate, 32_000)[:CLIP]
        # the pipeline decodes extra samples on both sides of a crop
        inner = slice(None) if rate == 32_000 else slice(2, -2)
    else:
        wave = _rust.resample(_rust.decode(index.encoded(row))[0], rate, 32_000)
        left = 0 if train else (CLIP - len(wave)) // 2
        wave = np.pad(wave, (left, CLIP - len(wave) - left))
        inner = slice(None)
    return wave.astype(np.float32), inner


def test_rows_hold_the_crop_that_the_reference_names(mixed):
    for train in (True, False):
        found = take(make(mixed, train=train, batch=37), 1)
        for spectrogram, row in zip(found["spectrogram"][0], found["index"][0], strict=True):
            wave, inner = reference(mixed, int(row), train)
            expected = (_rust.fbank(wave - wave.mean()) + 7.2) / 8.86
            difference = np.abs(spectrogram[inner] - expected[inner])
            assert np.median(difference) < 1e-2, (train, row)
            if inner == slice(None):
                np.testing.assert_allclose(
                    spectrogram, expected, atol=2e-4, err_msg=f"{train} {row}"
                )


def test_views_are_crops_of_one_recording(mixed):
    """Each view is the one that the reference draws for it. One decode of overlapping views, or one
    for each view, gives the same rows."""
    for train in (True, False):
        found = take(make(mixed, train=train, batch=37, views=3), 1)
        assert found["spectrogram"].shape == (1, 37, 3, N_FRAMES, 128)
        for views, row in zip(found["spectrogram"][0], found["index"][0], strict=True):
            _, rate, n = _rust.decode(mixed.encoded(int(row)))
            surplus = n - -(-CLIP * rate // 32_000)
            if surplus < 0:
                assert (views == views[0]).all()
                continue
            for view, spectrogram in enumerate(views):
                if train:
                    start = order.crop_start(1, 0, int(row), surplus + 1, view)
                else:
                    start = surplus * (2 * view + 1) // 6
                wave = _rust.decode(mixed.encoded(int(row)), start, n - surplus)[0]
                wave = _rust.resample(wave, rate, 32_000)[:CLIP]
                expected = (_rust.fbank(wave - wave.mean()) + 7.2) / 8.86
                inner = slice(None) if rate == 32_000 else slice(2, -2)
                assert np.median(np.abs(spectrogram[inner] - expected[inner])) < 1e-2, (
                    train,
                    row,
                    view,
                )


def test_one_view_is_the_first_of_many(mixed):
    one, many = (take(make(mixed, batch=37, views=views), 2) for views in (1, 5))
    lossless = np.array([FORMATS[i % len(FORMATS)][0] in ("WAV", "FLAC") for i in range(37)])[
        one["index"]
    ]
    np.testing.assert_allclose(
        many["spectrogram"][:, :, 0][lossless], one["spectrogram"][lossless], atol=1e-5
    )
    np.testing.assert_allclose(many["spectrogram"][:, :, 0], one["spectrogram"], atol=5e-2)
    np.testing.assert_array_equal(many["index"], one["index"])


@pytest.mark.parametrize("form", ["bfloat16", "waveform"])
def test_threads_and_processes_change_no_byte_of_views_and_16_bits(mixed, form):
    options = {"views": 4, "form": form, "block": (4, 3)}
    first, other = (take(make(mixed, threads=threads, **options), 6) for threads in (1, 8))
    equal(first, other)
    parts = [
        make(mixed, ranges=ranges, threads=2, **options)
        for ranges in ([(0, 2), (4, 5)], [(2, 4)], [(5, 8)])
    ]
    found = [pipeline.next()[1] for _ in range(6) for pipeline in parts]
    for step in range(6):
        a, b, c = found[3 * step : 3 * step + 3]
        equal(
            {k: np.concatenate([a[k][0], b[k][0], a[k][1], c[k][0]]) for k in first},
            {k: v[step] for k, v in first.items()},
        )


def test_bf16_is_the_nearest(mixed):
    import ml_dtypes

    wide, narrow = (
        take(make(mixed, train=False, batch=8, form=form), 5) for form in ("float32", "bfloat16")
    )
    assert narrow["spectrogram"].dtype == np.uint16
    expected = wide["spectrogram"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(narrow["spectrogram"], expected.view(np.uint16))
    np.testing.assert_array_equal(narrow["weight"], wide["weight"])


@pytest.mark.parametrize("views", [1, 3])
def test_waveforms_are_what_the_filter_bank_would_take(mixed, views):
    """For every format, length and rate, the spectrogram of the samples is the row of the other
    form, except for the rounding to 16 bits."""
    options = dict(train=False, batch=37, views=views)
    rows, waves = (take(make(mixed, form=form, **options), 1) for form in ("float32", "waveform"))
    assert (
        waves.keys() - {"waveform"} == rows.keys() - {"spectrogram"}
        and waves["waveform"].dtype == np.int16
    )
    assert waves["waveform"].shape == rows["spectrogram"].shape[:-2] + (CLIP,)
    for name in waves.keys() - {"waveform"}:
        np.testing.assert_array_equal(waves[name], rows[name])
    found = waves["waveform"].reshape(-1, CLIP).astype(np.float32) / 32768
    expected = rows["spectrogram"].reshape(-1, N_FRAMES, 128)
    for wave, row in zip(found, expected, strict=True):
        other = _rust.front_end(wave, 32_000, CLIP, N_FRAMES)
        # values that the rounding to 16 bits does not change
        loud = row >= row.max() - np.log(1e5) / 8.86
        assert np.abs(other - row)[loud].max(initial=0) < 0.05


def test_an_unknown_form_is_refused(mixed):
    with pytest.raises(ValueError, match="float32, bfloat16 or waveform"):
        make(mixed, form="int16")


def test_batches_follow_the_block_order(mixed):
    stops = order.block_stops(np.arange(37), mixed.first_rows, 4)
    expected = np.concatenate(
        [order.block_order(1, epoch, stops, 3, np.arange(37)) for epoch in range(3)]
    )
    pipeline = make(mixed, block=(4, 3), threads=2)
    found = take(pipeline, 13)
    np.testing.assert_array_equal(found["index"].ravel(), expected[: 13 * 8])
    pipeline.seek(5)
    np.testing.assert_array_equal(pipeline.next()[1]["index"][0], expected[40:48])
    pipeline.seek(10**9)
    assert pipeline.next()[0] == 10**9 + 1
    assert take(make(mixed, block=(4, 3), train=False), 1)["index"].tolist() == [list(range(8))]


def test_the_block_order_reads_ahead_and_not_too_far(mixed):
    """The rows of this window and of the next are requested. Rows of other processes and of later
    windows are not."""
    sizes = np.array([len(mixed.encoded(row)) for row in range(37)])
    stops = order.block_stops(np.arange(37), mixed.first_rows, 4)
    places = order.block_order(1, 0, stops, 2, np.arange(37))
    lengths = np.diff(stops, prepend=0)[
        order._permute(order.hash_of(order.BLOCK, 1, 0), len(stops), np.arange(len(stops)))
    ]
    for ranges in ([(0, 4)], [(1, 3)]):
        pipeline = make(
            mixed, batch=4, ranges=ranges, block=(4, 2), depth=1, threads=1, bad_budget=1.0
        )
        pipeline.next()
        deadline = time.monotonic() + 20
        while not pipeline.diagnostics()["bytes_ahead"] and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)
        # The queue is full: the workers are at place 12 at most, which is in the third window of
        # two blocks, or earlier.
        reach = lengths[:8].sum()
        mine = np.isin(np.arange(reach) % 4, np.arange(*ranges[0]))
        assert (
            reach < 37
            and 0 < pipeline.diagnostics()["bytes_ahead"] <= sizes[places[:reach]][mine].sum()
        )
        pipeline.close()


def test_crops_differ_between_epochs(tmp_path):
    index = open_index(tmp_path, [corpus.wav(0, 10.0)], shards=1)
    spectrograms = take(make(index, batch=1), 6)["spectrogram"]
    assert all((a != b).any() for a, b in itertools.combinations(spectrograms, 2))
    test = [take(make(index, batch=1, train=False), 1)["spectrogram"] for _ in range(2)]
    np.testing.assert_array_equal(*test)


def broken(seed):
    return [
        b"no audio at all",
        b"",
        b"RIFF\xff\xff\xff\xffWAVE",
        corpus.wav(seed)[:30],
        b"OggS" + bytes(200),
    ][seed % 5]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """200 recordings, 2 of which (1 %) are broken."""
    encoded = [corpus.wav(i, 0.2) for i in range(200)]
    encoded[17], encoded[130] = broken(0), broken(3)
    return open_index(tmp_path_factory.mktemp("damaged"), encoded)


def test_promise_11_training_replaces_a_bad_recording_by_the_next_in_order(damaged):
    pipelines = [make(damaged, batch=20, bad_budget=0.01, threads=threads) for threads in (1, 8)]
    first, other = (take(pipeline, 20) for pipeline in pipelines)
    equal(first, other)
    for epoch in range(2):
        places = order.permutation(1, epoch, 200, np.arange(200))
        for place in np.flatnonzero(np.isin(places, [17, 130]))[::-1]:
            places[place] = places[(place + 1) % 200]
        np.testing.assert_array_equal(first["index"].reshape(2, 200)[epoch], places)
    np.testing.assert_array_equal(first["label"], first["index"] % 2)
    assert first["weight"].all()
    for pipeline in pipelines:
        found = pipeline.diagnostics()
        assert (found["bad"], found["bad_allowed"]) == (2, 2)
        assert sorted(row for row, _ in found["bad_list"]) == [17, 130]
        assert all(
            f": row {row} (row " in reason and ".arrow" in reason
            for row, reason in found["bad_list"]
        )


def test_promise_11_testing_masks_a_bad_recording(damaged):
    found = take(make(damaged, batch=20, train=False, bad_budget=0.01), 10)
    bad = np.isin(found["index"], [17, 130])
    assert bad.sum() == 2
    np.testing.assert_array_equal(found["weight"], ~bad)
    assert not found["spectrogram"][bad].any()
    np.testing.assert_array_equal(found["index"].ravel(), np.arange(200))


def test_promise_11_more_bad_recordings_than_the_budget_are_an_error_that_lists_them(damaged):
    for train in (True, False):
        pipeline = make(damaged, batch=20, bad_budget=0.005, train=train, threads=2)
        with pytest.raises(
            RuntimeError, match="2 of 200 recordings could not be used, more than the 1 that"
        ) as caught:
            take(pipeline, 30)
        assert all(f": row {row} (" in str(caught.value) for row in (17, 130))
        with pytest.raises(RuntimeError, match="2 of 200"):
            pipeline.next()
    with pytest.raises(
        RuntimeError, match="1 of 200 recordings could not be used, more than the 0 that"
    ):
        take(make(damaged, batch=20, bad_budget=0.0), 30)


def test_one_bad_recording_among_few_is_no_end(tmp_path):
    index = open_index(tmp_path, [corpus.wav(0), broken(0), corpus.wav(2)], shards=1)
    assert set(take(make(index, batch=3, bad_budget=0.01), 4)["index"].ravel()) == {0, 2}


@pytest.mark.parametrize("n", [1, 2, 50])
def test_promise_11_nothing_but_bad_recordings(tmp_path, n):
    index = open_index(tmp_path, [broken(i) for i in range(n)], shards=1)
    for budget in (0.01, 1.0):
        with pytest.raises(RuntimeError, match="recordings c.*be used"):
            take(make(index, bad_budget=budget, threads=2), 2)
    masked = take(make(index, bad_budget=1.0, train=False), -(-n // 8))
    assert not masked["weight"].any()


def test_promise_11_samples_that_are_not_numbers(tmp_path):
    wave = corpus.noise(0, 1.0, 32_000)
    wave[::7] = np.nan
    huge = np.full(32_000, 3e38, np.float32)
    encoded = [
        corpus.encode(x, 32_000, "WAV", "FLOAT") for x in (wave, huge, corpus.noise(2, 1.0, 32_000))
    ]
    pipeline = make(open_index(tmp_path, encoded, shards=1), batch=3, train=False, bad_budget=1.0)
    assert take(pipeline, 1)["weight"].tolist() == [[0, 0, 1]]
    assert "finite" in pipeline.diagnostics()["bad_list"][0][1]


def test_promise_11_null_audio_is_a_bad_recording(tmp_path):
    pipeline = make(
        open_index(tmp_path, [corpus.wav(0), None], shards=1), batch=2, train=False, bad_budget=1.0
    )
    assert take(pipeline, 1)["weight"].tolist() == [[1, 0]]
    assert (
        "row 1 (row 1 of this shard): holds no audio bytes, only the path"
        in pipeline.diagnostics()["bad_list"][0][1]
    )


def test_invalid_plans_are_refused(mixed):
    for options, match in (
        ({"rows": []}, "rows is empty"),
        ({"ranges": [(0, 9)]}, r"range \[0, 9\) is not a part of a batch of 8"),
        ({"ranges": [(3, 3)]}, r"range \[3, 3\)"),
        ({"threads": 0}, "threads = 0"),
        ({"views": 0}, "views = 0"),
        ({"block": (0, 3)}, "blocks of 0 rows"),
        ({"block": (3, 3), "rows": [3, 1]}, "rows must increase"),
        ({"bad_budget": 1.5}, "bad_budget = 1.5"),
        ({"clip_samples": 799}, "has 0 frames"),
        ({"n_frames": 15}, "has 16 frames, but a row holds 1 to 15"),
    ):
        with pytest.raises(ValueError, match=match):
            make(mixed, **options)
    for row in (-1, 37):
        with pytest.raises(IndexError, match=f"row {row} does not exist; there are 37 rows"):
            make(mixed, rows=[0, row])


def test_arrays_are_aligned_contiguous_and_read_only(mixed):
    _, batch = make(mixed, ranges=[(0, 3), (3, 8)]).next()
    for arrays in batch.values():
        assert [len(array) for array in arrays] == [3, 5]
        for array in arrays:
            assert array.ctypes.data % 64 == 0
            assert array.flags.c_contiguous and not array.flags.writeable


def test_jax_aliases_a_slab_and_keeps_it_from_being_used_again(mixed):
    pipeline = make(mixed, batch=4, ranges=[(0, 2), (2, 4)], depth=1)
    held, copies = [], []
    for _ in range(3):
        batch = pipeline.next()[1]
        for array in batch["spectrogram"]:
            on_device = jax.device_put(array)
            assert on_device.unsafe_buffer_pointer() == array.ctypes.data
            held.append(on_device)
            copies.append(array.copy())
    del batch, array, on_device
    addresses = {x.unsafe_buffer_pointer() for x in held}
    for _ in range(30):
        batch = pipeline.next()[1]
        assert not addresses & {array.ctypes.data for array in batch["spectrogram"]}
    for on_device, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(on_device, copy)
    del held, on_device, batch
    gc.collect()
    limit = 1 + 2 + 3  # as below: waiting, in work, and handed out
    for _ in range(30):
        pipeline.next()
    assert pipeline.diagnostics()["slabs"] <= limit, "slabs come back when JAX lets go of them"


def test_one_array_of_a_batch_keeps_the_others_memory(mixed):
    pipeline = make(mixed, depth=1)
    weight = pipeline.next()[1]["weight"][0]
    for _ in range(20):
        pipeline.next()
    assert weight.tolist() == [1] * 8


def test_a_consumer_may_hold_many_batches(mixed):
    pipeline = make(mixed, depth=1)
    held = [pipeline.next()[1] for _ in range(40)]
    assert pipeline.diagnostics()["slabs"] >= 40
    expected = take(make(mixed), 40)["index"]
    np.testing.assert_array_equal([batch["index"][0] for batch in held], expected)
    del held
    gc.collect()
    limit = 1 + 2 + 3
    assert pipeline.diagnostics()["slabs"] <= limit
    for _ in range(50):
        pipeline.next()
    assert pipeline.diagnostics()["slabs"] <= limit


def test_arrays_outlive_the_pipeline(mixed):
    pipeline = make(mixed)
    batch = pipeline.next()[1]
    copy = batch["spectrogram"][0].copy()
    pipeline.close()
    del pipeline
    np.testing.assert_array_equal(batch["spectrogram"][0], copy)


def test_the_queue_is_bounded(mixed):
    pipeline = make(mixed, depth=3, batch=8, threads=2)
    pipeline.next()
    deadline = time.monotonic() + 20
    while (found := pipeline.diagnostics())["queued"] < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert found["queued"] == 4  # the depth, and the batch that was being filled
    assert pipeline.diagnostics()["rows"] == 5 * 8


def test_nothing_is_read_before_the_first_seek(mixed):
    pipeline = make(mixed)
    time.sleep(0.1)
    assert pipeline.diagnostics()["rows"] == 0


def test_small_batches_keep_many_threads_busy(mixed):
    pipeline = make(mixed, batch=1, threads=8, depth=1)
    pipeline.next()
    deadline = time.monotonic() + 20
    while pipeline.diagnostics()["queued"] < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pipeline.diagnostics()["queued"] >= 16


def test_diagnostics_name_the_stages(mixed):
    pipeline = make(mixed)
    take(pipeline, 6)
    seconds = pipeline.diagnostics()["seconds"]
    assert list(seconds) == _rust.STAGES
    stages = ("read", "seek", "decode", "resample", "fbank")
    assert all(seconds[stage] > 0 for stage in stages)
    assert pipeline.diagnostics()["slowest"] == max(stages, key=lambda stage: seconds[stage])
    assert make(mixed).diagnostics()["slowest"] is None


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A thread needs many seconds for one of these batches."""
    return open_index(
        tmp_path_factory.mktemp("slow"), [corpus.wav(i, 6.0, 44_100) for i in range(4)]
    )


SLOW = {"batch": 4096, "clip_samples": 160_000, "n_frames": 512}


def test_close_ends_a_wait_in_another_thread(slow):
    pipeline = make(slow, **SLOW)
    ended = []

    def wait():
        try:
            pipeline.next()
        except StopIteration:
            ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    closed = time.monotonic()
    pipeline.close()
    thread.join(5)
    assert ended and ended[0] - closed < 0.5
    with pytest.raises(StopIteration):
        pipeline.next()
    pipeline.close()


def test_seek_redirects_a_wait_in_another_thread(mixed):
    pipeline = make(mixed, train=False, threads=2)
    take(pipeline, 5)
    found = []
    for position in itertools.islice(itertools.cycle((3, 0, 4)), 60):
        thread = threading.Thread(target=lambda: found.append(pipeline.next()[0]))
        pipeline.seek(1)
        thread.start()
        pipeline.seek(position)
        thread.join(10)
        assert found.pop() in (2, position + 1)


def test_dropping_a_busy_pipeline_stops_its_threads(slow):
    before = len(os.listdir("/proc/self/task"))
    pipeline = make(slow, threads=4, **SLOW)
    pipeline.seek(0)
    time.sleep(0.1)
    begin = time.process_time()
    del pipeline
    assert time.process_time() - begin < 2, (
        "half a second of four threads, of the many that a batch takes"
    )
    assert len(os.listdir("/proc/self/task")) <= before


def run(code: str, *arguments) -> subprocess.Popen:
    code = textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def test_ctrl_c_ends_a_wait_within_half_a_second(slow, tmp_path):
    """Each thread gets half a second of CPU time, since wall-clock time varies on a busy
    machine."""
    shard = corpus.write(tmp_path / "0.arrow", corpus.table([corpus.wav(0, 6.0, 44_100)], [0]))
    process = run(
        f"""
        import signal, sys, time, numpy as np
        from loaders import _rust
        from tests.support import pipelines

        signal.signal(signal.SIGINT, signal.default_int_handler)  # under nohup it is ignored
        index = _rust.Index([sys.argv[1]], label="label")
        pipeline = pipelines.make(
            index, rows=np.arange(1), batch={SLOW["batch"]}, ranges=[(0, {SLOW["batch"]})],
                seed=0, train=True, threads=2)
        pipeline.seek(0)
        try:
            print("waiting", flush=True)
            while True:
                pipeline.next()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        """,
        shard,
    )
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = sum(
        map(
            int,
            pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13],
        )
    )
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "interrupted\n" and process.wait(60) == 0
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    whole = now.ru_utime + now.ru_stime - ended.ru_utime - ended.ru_stime
    assert whole - used / os.sysconf("SC_CLK_TCK") < 1.5  # the interpreter's own exit included


def test_memory_does_not_grow(tmp_path):
    encoded = [
        corpus.wav(i, 0.3, rate) for i, rate in enumerate([22_050, 32_000, 48_000, 44_100] * 3)
    ]
    encoded += [
        corpus.encode(corpus.noise(i, 0.3, 32_000), 32_000, *kind)
        for i, kind in enumerate([("OGG", "VORBIS"), ("FLAC",)])
    ]
    shard = corpus.write(tmp_path / "0.arrow", corpus.table(encoded, [0] * len(encoded)))
    process = run(
        f"""
        import sys, numpy as np
        from loaders import _rust
        from tests.support import pipelines

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        index = _rust.Index([sys.argv[1]], label="label")
        pipeline = pipelines.make(index, rows=np.arange(index.n_rows), batch=16, ranges=[(0,
            16)], seed=0, train=True,
                                  threads=2, clip_samples={CLIP}, n_frames={N_FRAMES})
        for batch in range(600):
            pipeline.next()
            if batch == 99:
                before, slabs = resident(), pipeline.diagnostics()["slabs"]
        print(resident() - before, pipeline.diagnostics()["slabs"] - slabs)
        """,
        shard,
    )
    grown, slabs = map(int, process.stdout.read().split())
    assert process.wait() == 0
    assert grown < 2 << 20
    assert slabs <= 1


@pytest.mark.slow
def test_an_hour_of_batches_takes_no_more_memory_than_a_minute(tmp_path):
    """6,000 batches (an hour at 0.6 s a step) of Arrow and compressed Parquet, with views, bf16,
    block order and a bad recording."""
    encoded = [
        corpus.wav(i, 0.3, rate) for i, rate in enumerate([22_050, 32_000, 48_000, 44_100] * 5)
    ]
    encoded[7] = broken(1)
    table = corpus.table(encoded, [0] * len(encoded))
    shards = [
        corpus.write(tmp_path / "0.arrow", table),
        corpus.write_parquet(tmp_path / "1.parquet", table, compression="snappy", row_group_size=6),
    ]
    process = run(
        f"""
        import sys, numpy as np
        from loaders import _rust
        from tests.support import pipelines

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * 4096

        index = _rust.Index(sys.argv[1:], label="label")
        pipeline = pipelines.make(index, rows=np.arange(index.n_rows), batch=16, ranges=[(0,
            16)], seed=0, train=True,
                                  threads=2, clip_samples={CLIP}, n_frames={N_FRAMES}, views=2,
                                      form="bfloat16", block=(4, 3),
                                  bad_budget=0.1)
        found = []
        for batch in range(6000):
            pipeline.next()
            if batch % 500 == 499:
                found.append(resident())
        print(*found)
        print(pipeline.diagnostics()["bad"])
        """,
        *shards,
    )
    found = [int(n) for n in process.stdout.readline().split()]
    assert process.stdout.readline() == "2\n" and process.wait() == 0
    assert len(found) == 12
    assert max(found[1:]) - found[0] < 2 << 20, found
