import dataclasses
import inspect
import json
import os
import re

import numpy as np
import pytest

from loaders import _rust, order
from loaders.audio import shards, spectrogram
from loaders.base import DataError, Rows
from tests.support import corpus

QUICK = {"label": "label", "clip_seconds": 0.2, "n_frames": 18, "threads": 2}


def small(n, names=("a", "b"), labels=None):
    return corpus.table(
        [corpus.wav(i, 0.25) for i in range(n)],
        [i % 2 for i in range(n)] if labels is None else labels,
        names,
    )


@pytest.fixture
def folder(tmp_path):
    """A DatasetDict of 2 × 20 and 10 recordings."""
    corpus.save_to_disk(tmp_path / "birds" / "train", [small(20), small(20)])
    corpus.save_to_disk(tmp_path / "birds" / "test", [small(10)])
    (tmp_path / "birds" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return tmp_path / "birds"


def config(train, **options):
    return spectrogram.Config(train=str(train), **{**QUICK, **options})


def loader(config, split="train", batch=8, seed=0):
    return spectrogram.make_loader(config, split=split, rows=Rows(batch, ((0, batch),)), seed=seed)


def problems(**options):
    return dict(spectrogram.Config(**{"train": "demo", **options}).validate())


def test_every_field_has_a_gloss_with_its_unit():
    """It stands at the field's end, or above it."""
    source = inspect.getsource(spectrogram.Config) + inspect.getsource(spectrogram.FrontEnd)
    gloss = r"# \[.+\] .+"
    for field in dataclasses.fields(spectrogram.Config):
        at_end = rf"^    {field.name}: .+ = .+  {gloss}$"
        above = rf"^    {gloss}\n(?:    # .+\n)*    {field.name}: .+ = .+$"
        assert re.search(f"{at_end}|{above}", source, re.MULTILINE), field.name


def test_defaults_have_no_problems():
    assert problems() == {}


def test_dataset_info_counts_recordings_and_classes(folder):
    assert spectrogram.dataset_info(config(folder)) == {
        "n_train": 40,
        "n_test": 10,
        "n_recordings": 40,
        "n_unlabelled": 0,
        "n_classes": 2,
        "class_names": ("a", "b"),
        "views": 1,
        "n_frames": 18,
        "n_mels": 128,
        "front_end": spectrogram.FrontEnd(),
        "form": "spectrogram",
        "multilabel": False,
        "background": False,
    }
    assert (
        spectrogram.dataset_info(
            config(folder / "train", exclude=(3, 39, 3), test=str(folder / "test"))
        )["n_train"]
        == 38
    )


def test_the_element_spec_describes_a_batch(folder):
    for split in ("train", "test"):
        found = loader(config(folder), split)
        position, batch = next(found)
        assert position == 1
        assert found.element_spec == spectrogram.element_spec(config(folder))
        assert list(batch) == list(found.element_spec)
        for name, field in found.element_spec.items():
            assert [(a.shape, a.dtype) for a in batch[name]] == [((8, *field.shape), field.dtype)]
        found.close()


@pytest.mark.parametrize(
    "options",
    [{"views": 3}, {"dtype": "bfloat16"}, {"views": 2, "dtype": "bfloat16", "order": "block"}],
)
def test_fields_of_views_and_bfloat16(folder, options):
    import jax

    found = loader(config(folder, **options))
    rows = next(found)[1]["spectrogram"][0]
    field = spectrogram.element_spec(config(folder, **options))["spectrogram"]
    assert rows.shape == (8, *field.shape) and rows.dtype == field.dtype
    on_device = jax.device_put(rows)
    assert on_device.dtype == options.get("dtype", "float32")
    assert on_device.unsafe_buffer_pointer() == rows.ctypes.data
    np.testing.assert_array_equal(on_device, rows)


def test_a_test_split_is_read_once_and_again_after_seek(folder):
    found = loader(config(folder), "test")
    assert found.n_batches == 2
    for _ in range(2):
        batches = list(found)
        assert [position for position, _ in batches] == [1, 2]
        assert sum(batch["weight"][0].sum() for _, batch in batches) == 10
        found.seek(0)


def test_training_never_reads_what_is_excluded(folder):
    found = loader(config(folder, exclude=(0, 39)))
    assert found.n_batches == 5
    seen = {int(row) for _ in range(10) for row in next(found)[1]["index"][0]}
    assert seen == set(range(1, 39))


def test_recordings_are_excluded_by_their_path(folder, tmp_path):
    (tmp_path / "list").write_text("3.wav\n\n 7.wav \n")
    found = config(folder, exclude_paths=("0", f"@{tmp_path / 'list'}"), exclude=(1,))
    # both shards name theirs 0.wav to 19.wav
    assert spectrogram.dataset_info(found)["n_train"] == 40 - 7
    seen = {int(row) for _ in range(10) for row in next(loader(found))[1]["index"][0]}
    assert not seen & {0, 1, 3, 7, 20, 23, 27}
    with pytest.raises(
        DataError, match="exclude_paths names '99.wav', which is not an audio.path in"
    ):
        spectrogram.dataset_info(config(folder, exclude_paths=("99.wav",)))
    assert (
        "which is not a file; did you mean"
        in problems(exclude_paths=(f"@{tmp_path}/lits",))["exclude_paths"]
    )


def test_recordings_next_to_the_shards(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.wav").write_bytes(corpus.wav(i, 0.25))
    shard = corpus.write_parquet(
        tmp_path / "shards" / "s.parquet", corpus.table([None] * 6, [0] * 6)
    )
    found = loader(config(shard, audio_root=str(tmp_path), test_share=0.0, bad_budget=0.0), batch=6)
    assert next(found)[1]["weight"][0].all()
    assert (
        "which is not a folder; did you mean"
        in problems(audio_root=str(tmp_path / "shard"))["audio_root"]
    )


def test_many_shards_are_indexed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    corpus.save_to_disk(tmp_path / "birds", [small(2)] * shards.CACHED_SHARDS)
    assert (
        spectrogram.dataset_info(config(tmp_path / "birds", test_share=0.0))["n_train"]
        == 2 * shards.CACHED_SHARDS
    )
    assert len(list((tmp_path / "cache" / "index").iterdir())) == 1


def test_a_share_is_held_out_where_no_path_holds_a_test_split(folder):
    whole = config(folder / "train", test_share=0.2)
    held = np.flatnonzero(order.held_out(np.arange(40), 0.2))
    assert 0 < len(held) < 20
    info = spectrogram.dataset_info(whole)
    assert (info["n_train"], info["n_test"]) == (40 - len(held), len(held))
    test = loader(whole, "test")
    rows = np.concatenate([batch["index"][0] for _, batch in test])
    np.testing.assert_array_equal(rows[rows >= 0], held)
    train = loader(whole)
    assert not set(held) & {int(row) for _ in range(10) for row in next(train)[1]["index"][0]}


def test_an_empty_test_split(folder):
    nothing = config(folder / "train", test_share=0.0)
    assert spectrogram.dataset_info(nothing)["n_test"] == 0
    test = loader(nothing, "test")
    test.seek(0)
    assert test.n_batches == 0 and list(test) == []
    test.close()


def test_state_names_all_that_decides_the_order(folder):
    def state(batch=8, seed=0, **options):
        found = loader(config(folder, **options), batch=batch, seed=seed).state(7)
        assert found == json.loads(json.dumps(found))
        assert found.pop("position") == 7
        return found

    first = state()
    assert state(order="block") != first
    assert state(threads=1, bad_budget=0.5) == first
    assert state(batch=4) != first and state(seed=1) != first and state(exclude=(1,)) != first
    assert state(exclude=(1,)) != state(exclude=(2,))
    assert set(first) == {"seed", "fingerprint", "order"}


@pytest.mark.parametrize("kind", ["state.json", "cache", "cache-with-splits", "glob", "file"])
def test_paths(tmp_path, kind):
    test = ""
    if kind == "state.json":  # the order is the file's, not the alphabet's
        corpus.save_to_disk(tmp_path, [small(1), small(2)])
        files = [
            {"filename": "data-00001-of-00002.arrow"},
            {"filename": "data-00000-of-00002.arrow"},
        ]
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
        path, sizes = tmp_path, [2, 1]
    elif kind == "cache":
        for name, n in (("xeno-canto-b", 2), ("xeno-canto-a", 1), ("cache-0123456789abcdef", 9)):
            corpus.write(tmp_path / f"{name}.arrow", small(n))
        path, sizes = tmp_path, [1, 2]
    elif kind == "cache-with-splits":
        for name, n in (
            ("train-00001-of-00002", 2),
            ("train-00000-of-00002", 1),
            ("test", 3),
            ("test_5s-00000-of-00001", 4),
        ):
            corpus.write(tmp_path / f"bird_set-{name}.arrow", small(n))
        path, sizes, test = tmp_path, [1, 2], [3]
    elif kind == "glob":
        for name, n in (("x/b", 2), ("x/a", 1), ("y/a", 3)):
            corpus.write(tmp_path / f"{name}.arrow", small(n))
        path, sizes = tmp_path / "*" / "[ab].arrow", [1, 2, 3]
    else:
        path, sizes = corpus.write(tmp_path / "one.arrow", small(4)), [4]

    def rows(split):
        return [_rust.Index([shard]).n_rows for shard in shards.find_shards(str(path), split)]

    assert rows("train") == sizes
    if test:
        assert rows("test") == test
    info = spectrogram.dataset_info(config(path, test_share=0.0))
    assert (info["n_train"], info["n_test"]) == (sum(sizes), sum(test))


@pytest.mark.parametrize("inside", ["", "data/"])
def test_a_folder_of_the_hub(tmp_path, inside):
    for name, n in (
        ("train-00001-of-00002", 20),
        ("train-00000-of-00002-0123456789abcdef", 21),
        ("test-00000-of-00001", 3),
    ):
        corpus.write_parquet(tmp_path / f"{inside}{name}.parquet", small(n))
    info = spectrogram.dataset_info(config(tmp_path))
    assert (info["n_train"], info["n_test"]) == (41, 3)
    assert next(loader(config(tmp_path)))[1]["spectrogram"][0].shape == (8, 18, 128)


def test_a_home_folder_is_expanded(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert problems(train="~/birds") == {}


def test_missing_paths_name_the_remedy(folder):
    parent = folder.parent
    assert "does not exist; did you mean" in problems(train=str(parent / "brids"))["train"]
    assert str(folder) in problems(train=str(parent / "brids" / "train"))["train"]
    assert f"{parent} exists, and holds birds" in problems(train=str(parent / "zzzz"))["train"]
    assert f"matches no file; {folder} exists" in problems(test=str(folder / "*.parquet"))["test"]
    (parent / "empty").mkdir()
    assert (
        "without Arrow or Parquet shards; it holds nothing"
        in problems(train=str(parent / "empty"))["train"]
    )
    assert (
        "without the split 'test'; expected one of: train"
        in problems(test=str(only_train(parent)))["test"]
    )
    (folder / "train" / "state.json").write_text("{}")
    assert "broken" in problems(train=str(folder))["train"]
    assert "is empty" in problems(train="")["train"]


def only_train(parent):
    corpus.save_to_disk(parent / "only" / "train", [small(1)])
    return parent / "only"


def test_numbers_that_are_invalid_are_reported_together():
    found = problems(
        test_share=1.0,
        bad_budget=-0.1,
        threads=-1,
        exclude=(4, -1),
        clip_seconds=6.0,
        views=0,
        dtype="half",
    )
    assert set(found) == {
        "test_share",
        "bad_budget",
        "threads",
        "exclude",
        "clip_seconds",
        "views",
        "dtype",
    }
    assert "makes 598 frames; n_frames=512 holds 0.025 s to 5.135 s" in found["clip_seconds"]
    assert "must lie in [1000, 768000]" in problems(sample_rate=900)["sample_rate"]
    assert "clip_seconds" in problems(clip_seconds=float("nan")) and "clip_seconds" in problems(
        clip_seconds=0.0
    )


def test_a_debug_build_is_refused(monkeypatch, folder):
    monkeypatch.setattr(_rust, "build_profile", lambda: "debug")
    assert "debug build, which is many times slower" in problems()["allow_debug_build"]
    assert problems(allow_debug_build=True) == {}
    with pytest.raises(DataError, match="debug build"):
        loader(config(folder))


def test_data_that_do_not_fit_are_data_errors(folder, tmp_path):
    def error(match, **options):
        with pytest.raises(DataError, match=match):
            spectrogram.dataset_info(config(options.pop("train", folder), **options))

    error("no column", label="species")
    error(r"exclude names row 40, but .*birds has 40 recordings", exclude=(40,))
    error("leaves no recordings to train on, of 40", exclude=tuple(range(40)))
    other = corpus.write(tmp_path / "other.arrow", small(2, names=("a", "c")))
    error("has other classes than", test=str(other))
    (tmp_path / "broken.arrow").write_bytes(b"nothing")
    error("broken.arrow: is not an Arrow IPC stream or file", train=tmp_path / "broken.arrow")


def test_unlabelled_recordings_are_counted(tmp_path):
    shard = corpus.write(tmp_path / "s.arrow", small(6, labels=[0, None, 1, None, 1, 0]))
    info = spectrogram.dataset_info(config(shard, exclude=(1,), test_share=0.0))
    assert info["n_unlabelled"] == 1
    info = spectrogram.dataset_info(config(shard, label="", test_share=0.0))
    assert info["n_unlabelled"] == 0 and "n_classes" not in info


def test_too_many_bad_recordings_are_a_data_error(tmp_path):
    shard = corpus.write(tmp_path / "s.arrow", corpus.table([b"rubbish"] * 9, [0] * 9))
    with pytest.raises(DataError, match="could not be used"):
        next(loader(config(shard, test_share=0.0)))


def test_a_shard_that_changed_is_read_again(tmp_path):
    path = config(corpus.write(tmp_path / "s.arrow", small(3)), test_share=0.0)
    assert spectrogram.dataset_info(path)["n_train"] == 3
    shard = corpus.write(tmp_path / "new.arrow", small(5))
    os.replace(shard, tmp_path / "s.arrow")
    assert spectrogram.dataset_info(path)["n_train"] == 5


def test_esc10():
    if not corpus.ESC10.is_dir():
        pytest.skip(f"{corpus.ESC10} is not there")
    esc10 = spectrogram.Config(train=str(corpus.ESC10), label="label")
    info = spectrogram.dataset_info(esc10)
    assert (info["n_train"], info["n_test"], info["n_classes"]) == (320, 80, 10)
    train = loader(esc10, batch=32)
    batches = [next(train)[1] for _ in range(3)]
    rows = np.concatenate([b["index"][0] for b in batches])
    np.testing.assert_array_equal(rows, order.permutation(0, 0, 320, np.arange(96)))
    spectrograms = np.concatenate([b["spectrogram"][0] for b in batches])
    assert spectrograms.shape == (96, 512, 128)
    assert np.isfinite(spectrograms).all() and 0.2 < spectrograms.std() < 2
    # the pad is the minimum
    np.testing.assert_array_equal(spectrograms[:, 498:].min((1, 2)), spectrograms.min((1, 2)))
    labels = np.concatenate([b["label"][0] for b in batches])
    assert set(labels) == set(range(10))
    assert train.diagnostics()["bad"] == 0


def test_a_missing_label_names_the_columns_of_labels_and_the_override(tmp_path):
    """The message has the same words for one label and for lists of labels, in Arrow and in
    Parquet."""
    shard = corpus.write(tmp_path / "s.arrow", small(3))
    for options in ({}, {"multilabel": True}):
        with pytest.raises(DataError) as error:
            spectrogram.dataset_info(config(shard, label="ebird_code", **options))
        assert (
            str(error.value)
            == f"{shard} has no column 'ebird_code'; it has audio, label; of these label holds"
            " class labels: set data.label=label"
        )
    assert spectrogram.dataset_info(config(shard, label="label", test_share=0.0))["n_classes"] == 2
    assert "the column of recordings" in problems(label="audio")["label"]
    plain = corpus.write(tmp_path / "p.arrow", small(3, names=None))
    with pytest.raises(DataError, match="none of these is a ClassLabel: cast one"):
        spectrogram.dataset_info(config(plain, label="ebird_code"))
