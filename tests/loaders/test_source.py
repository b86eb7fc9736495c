import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest

from loaders import _rust
from tests.support import corpus
from tests.support.corpus import LABELS, ROWS, check, rows


@pytest.mark.parametrize(
    "options", [{}, {"use_legacy_format": True}], ids=["current", "before-0.15"]
)
@pytest.mark.parametrize("batch", [None, 1, 2])
@pytest.mark.parametrize("file", [False, True], ids=["stream", "file"])
def test_formats(tmp_path, file, batch, options):
    check(
        _rust.Index(
            [corpus.write(tmp_path / "s.arrow", rows(), file=file, batch=batch, **options)],
            label="label",
        )
    )


def test_rows_are_numbered_across_shards(tmp_path):
    halves = [
        corpus.write(tmp_path / "0.arrow", rows()[:2]),
        corpus.write(tmp_path / "1.arrow", rows()[2:]),
    ]
    check(_rust.Index(halves, label="label"))
    check(
        _rust.Index(
            [halves[0], corpus.write(tmp_path / "none.arrow", rows()[:0]), halves[1]], label="label"
        )
    )
    assert _rust.Index(halves[::-1], label="label").encoded(0) == b"third recording"


def test_slices_and_empty_batches(tmp_path):
    """Batches that are windows into larger arrays: offsets do not begin at 0."""
    whole = pa.concat_tables(
        [corpus.table([b"x" * 100] * 3, [1] * 3), rows(), corpus.table([b"y"], [1])]
    ).combine_chunks()
    batch = whole.to_batches()[0]
    with pa.ipc.new_stream(str(tmp_path / "s.arrow"), batch.schema) as writer:
        for part in (batch.slice(0, 0), batch.slice(3, 2), batch.slice(5, 0), batch.slice(5, 3)):
            writer.write_batch(part)
    check(_rust.Index([tmp_path / "s.arrow"], label="label"))


def test_large_offsets_and_swapped_children(tmp_path):
    kind = pa.struct({"path": pa.large_string(), "bytes": pa.large_binary()})
    audio = pa.array([{"bytes": data, "path": f"{i}.wav"} for i, data in enumerate(ROWS)], kind)
    large = pa.table([audio, pa.array(LABELS, pa.int64())], schema=corpus.schema("ab", audio=kind))
    check(_rust.Index([corpus.write(tmp_path / "s.arrow", large)], label="label"))


def test_columns_of_every_layout_are_stepped_over(tmp_path):
    others = {
        "null": pa.nulls(5),
        "bool": pa.array([True, None, False, True, True]),
        "list": pa.array([[1, 2], [], None, [3], [4]], pa.list_(pa.int32())),
        "lists": pa.array(
            [[[b"x"]], None, [], [[b"y"], []], [[]]], pa.large_list(pa.list_(pa.binary()))
        ),
        "fixed": pa.array([[1, 2]] * 5, pa.list_(pa.float32(), 2)),
        "map": pa.array([{"k": 1}, {}, None, {"l": 2}, {}], pa.map_(pa.string(), pa.int8())),
        "dictionary": pa.array(["x", "y", None, "x", "x"]).dictionary_encode(),
        "digest": pa.array([b"abcd"] * 5, pa.binary(4)),
        "time": pa.array([1, 2, 3, 4, None], pa.timestamp("us")),
        "sparse": pa.UnionArray.from_sparse(pa.array([0] * 5, pa.int8()), [pa.array(range(5))]),
        "dense": pa.UnionArray.from_dense(
            pa.array([0] * 5, pa.int8()), pa.array(range(5), pa.int32()), [pa.array(range(5))]
        ),
        "runs": pa.RunEndEncodedArray.from_arrays(
            pa.array([2, 5], pa.int32()), pa.array(["a", "b"])
        ),
        "struct": pa.array([{"a": 1, "b": ["s"]}] * 5),
        "view": pa.array(["short", "x" * 100, None, "y" * 50, ""], pa.string_view()),
        "views": pa.array([[b"z" * 20]] * 5, pa.list_(pa.binary_view())),
    }
    wide = rows()
    for name, column in others.items():
        wide = wide.add_column(0, name, column).append_column(f"{name}2", column)
    for file in (False, True):
        check(
            _rust.Index(
                [corpus.write(tmp_path / "w.arrow", wide.combine_chunks(), file=file, batch=3)],
                label="label",
            )
        )


def test_a_null_struct_is_a_null_recording(tmp_path):
    audio = pa.array([{"bytes": b"x", "path": "p"}, None], corpus.AUDIO)
    shard = corpus.write(tmp_path / "s.arrow", pa.table({"audio": audio}))
    index = _rust.Index([shard])
    assert (index.encoded(0), index.path(0), index.path(1)) == (b"x", "p", None)
    with pytest.raises(
        ValueError,
        match=r"s\.arrow: row 1 \(row 1 of this shard\): holds no audio bytes and no path",
    ):
        index.encoded(1)


def test_without_a_label_column(tmp_path):
    index = _rust.Index([corpus.write(tmp_path / "s.arrow", rows())])
    assert index.labels.tolist() == [-1] * 5
    assert index.class_names is None


def test_int64_labels_without_names(tmp_path):
    index = _rust.Index([corpus.write(tmp_path / "s.arrow", rows(names=None))], label="label")
    assert index.labels.tolist() == [0, -1, 1, 1, 0]
    assert index.class_names is None


def error(path: pathlib.Path, table: pa.Table, match: str, **options) -> None:
    label = options.pop("label", "label")
    with pytest.raises(ValueError, match=match) as caught:
        _rust.Index([corpus.write(path, table, **options)], label=label)
    assert str(path) in str(caught.value)


def test_columns_that_do_not_fit(tmp_path):
    path, good = tmp_path / "s.arrow", rows()
    code = pa.array(["houspa"] * 5)
    error(
        path,
        good.append_column("ebird_code", code),
        r"'?\"?ebird_code.* holds strings.*cast_column\(",
        label="ebird_code",
    )
    error(
        path,
        good,
        r'no column "species"; the columns are audio \(struct<.*>\), label \(int64\)',
        label="species",
    )
    error(
        path, good.rename_columns(["sound", "label"]), r'no column "audio"; the columns are sound'
    )
    error(
        path,
        good.set_column(0, "audio", pa.array([b"x"] * 5)),
        r'"audio" is binary, but audio must be a struct of bytes',
    )
    error(
        path,
        good.set_column(1, "label", pa.array([1.0] * 5)),
        r'"label" is floatingpoint, but labels must be',
    )
    error(
        path,
        good.set_column(1, "label", pa.array([1] * 5, pa.int32())),
        r'"label" is int32, but labels must be',
    )
    error(
        path,
        corpus.table(ROWS, [0, 1, 2, 0, 0]),
        r"row 2 \(row 2 of this shard\) has label 2, but there are 2 classes",
    )
    for codec in ("lz4", "zstd"):
        error(path, good, f"record batch 0 is compressed with {codec}", batch=2, compression=codec)


def test_shards_must_agree_in_their_classes(tmp_path):
    first = corpus.write(tmp_path / "0.arrow", rows())
    for names, match in (
        (("a", "c"), 'class 1 is "c" and "b"'),
        ("abc", "3 and 2 classes"),
        (None, "former does not name"),
    ):
        with pytest.raises(ValueError, match=match) as caught:
            _rust.Index([first, corpus.write(tmp_path / "1.arrow", rows(names))], label="label")
        assert "1.arrow" in str(caught.value) and "0.arrow" in str(caught.value)


def test_files_that_are_no_shards(tmp_path):
    path = tmp_path / "x.arrow"
    with pytest.raises(OSError, match=r"x\.arrow.*No such file"):
        _rust.Index([path])
    for content in (
        b"",
        b"RIFF",
        bytes(1000),
        b"\xff" * 1000,
        os.urandom(4096),
        b"ARROW1\0\0",
        b"ARROW1\0\0" + b"\xff" * 64,
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.arrow: "):
            _rust.Index([path])
    with pytest.raises(ValueError, match="no shards"):
        _rust.Index([])


@pytest.mark.parametrize("file", [False, True], ids=["stream", "file"])
def test_a_shard_that_is_cut_short(tmp_path, file):
    whole = corpus.write(tmp_path / "w.arrow", rows(), file=file, batch=2).read_bytes()
    ends, path = 0, tmp_path / "cut.arrow"
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        try:
            index = _rust.Index([path], label="label")
        except ValueError as error:
            assert "cut.arrow" in str(error)
        else:  # a stream may end between two messages
            ends += 1
            assert index.n_rows in (0, 2, 4, 5)
    assert ends <= (0 if file else 12)


@pytest.mark.parametrize("file", [False, True], ids=["stream", "file"])
def test_broken_metadata_never_crashes(tmp_path, file):
    """For any changed byte, reading ends with rows or with a ValueError that names the shard."""
    whole = np.frombuffer(
        corpus.write(tmp_path / "w.arrow", rows(), file=file, batch=3).read_bytes(), np.uint8
    )
    rng, path, failed = np.random.default_rng(0), tmp_path / "b.arrow", 0
    for trial in range(3000):
        broken = whole.copy()
        places = rng.integers(len(broken), size=1 + trial % 3)
        broken[places] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)], size=len(places))
        path.write_bytes(broken.tobytes())
        try:
            index = _rust.Index([path], label="label")
            for row in range(index.n_rows):
                try:
                    index.encoded(row), index.path(row)
                except ValueError:
                    pass
        except ValueError as error:
            assert "b.arrow" in str(error)
            failed += 1
    assert failed > 100


def test_fingerprint_follows_the_data_and_not_the_folder(tmp_path):
    def fingerprint(table, folder="a", name="0.arrow", label="label"):
        return _rust.Index([corpus.write(tmp_path / folder / name, table)], label=label).fingerprint

    first = fingerprint(rows())
    assert first == fingerprint(rows(), folder="b")
    longer = corpus.table([b"first!", *ROWS[1:]], LABELS)
    others = [
        fingerprint(rows(), name="1.arrow"),
        fingerprint(rows(names=("a", "c"))),
        fingerprint(rows(), label=None),
        fingerprint(corpus.table(ROWS, [1, *LABELS[1:]])),
        fingerprint(longer),
        fingerprint(rows()[:4]),
    ]
    assert len({first, *others}) == 7
    shards = [corpus.write(tmp_path / f"{i}.arrow", rows()) for i in range(2)]
    assert _rust.Index(shards).fingerprint != _rust.Index(shards[::-1]).fingerprint


def test_indexing_reads_no_audio_and_holds_no_descriptors(tmp_path):
    shard = corpus.write(
        tmp_path / "big.arrow", corpus.table([bytes(4 << 20)] * 16, [0] * 16), batch=4
    )
    for k in range(20):
        (
            shutil.copy(shard, tmp_path / f"copy{k}.arrow")
            if k < 2
            else os.link(shard, tmp_path / f"copy{k}.arrow")
        )
    code = """
        import os, pathlib, re, sys
        from loaders import _rust
        before = len(os.listdir("/proc/self/fd"))
        index = _rust.Index(sorted(pathlib.Path(sys.argv[1]).glob("*.arrow")), label="label")
        assert index.n_rows == 21 * 16
        assert len(os.listdir("/proc/self/fd")) == before
        smaps = pathlib.Path("/proc/self/smaps").read_text()
        sizes = re.findall(r"big\\.arrow\\nSize:.*\\n(?:.*\\n)*?Rss: +(\\d+) kB", smaps)
        rss = [int(kb) for kb in sizes]
        assert len(rss) == 1, rss
        print(rss[0])
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 1024, "kB of a 64 MB shard are mapped in"


def test_rows_outside_are_errors(tmp_path):
    index = _rust.Index([corpus.write(tmp_path / "s.arrow", rows())])
    for row in (-1, 5):
        with pytest.raises(IndexError, match=f"row {row} does not exist; there are 5 rows"):
            index.encoded(row)


def test_esc10():
    if not corpus.ESC10.is_dir():
        pytest.skip(f"{corpus.ESC10} is not there")
    shards = sorted((corpus.ESC10 / "train").glob("*.arrow"))
    index = _rust.Index(shards, label="label")
    table = pa.concat_tables([pa.ipc.open_stream(str(shard)).read_all() for shard in shards])
    assert index.labels.tolist() == table["label"].to_pylist()
    for row in range(0, 320, 37):
        assert index.encoded(row) == table["audio"][row]["bytes"].as_py()
        assert index.path(row) == table["audio"][row]["path"].as_py()
