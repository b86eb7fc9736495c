import os
import resource
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pytest

from loaders import _rust
from tests.support import corpus, pipelines
from tests.support.corpus import LABELS, ROWS, check, rows

CODECS = ["none", "snappy", "gzip", "brotli", "zstd", "lz4"]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [False, True], ids=["plain", "dictionary"])
@pytest.mark.parametrize("codec", CODECS)
def test_formats(tmp_path, codec, dictionary, version):
    options = {"compression": codec, "use_dictionary": dictionary, "data_page_version": version}
    for group in (1, 2, 100):
        shard = corpus.write_parquet(
            tmp_path / "s.parquet", rows(), row_group_size=group, **options
        )
        check(_rust.Index([shard], label="label"))


def many(n=400, seed=0):
    """Rows of 0 to 3000 bytes, every seventh null, some of them repeated."""
    rng = np.random.default_rng(seed)
    words = [rng.bytes(int(size)) for size in rng.integers(0, 3000, n)]
    picks = rng.integers(0, n, n)
    return [None if i % 7 == 3 else words[picks[i]] for i in range(n)]


@pytest.mark.parametrize("codec", ["none", "snappy", "zstd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dictionary": False},
        {"dictionary_pagesize_limit": 20_000},
        {"write_page_index": True},
    ],
)
def test_rows_of_many_pages_in_any_order(tmp_path, codec, options):
    """A chunk of many pages, and one whose dictionary became too large, so that it continues
    without it."""
    encoded = many()
    shard = corpus.write_parquet(
        tmp_path / "s.parquet",
        corpus.table(encoded, [i % 2 for i in range(400)]),
        row_group_size=150,
        data_page_size=10_000,
        write_batch_size=8,
        compression=codec,
        **options,
    )
    index = _rust.Index([shard], label="label")
    assert index.labels.tolist() == [i % 2 for i in range(400)]
    for row in np.random.default_rng(1).permutation(400):
        if encoded[row] is None:
            with pytest.raises(
                ValueError,
                match=(
                    rf"row {row} \(row {row} of this shard\): holds no audio bytes, only the path"
                ),
            ):
                index.encoded(row)
        else:
            assert index.encoded(row) == encoded[row]
    assert index.paths() == [f"{i}.wav" for i in range(400)]


def test_arrow_and_parquet_shards_are_one_corpus(tmp_path):
    arrow = corpus.write(tmp_path / "0.arrow", rows()[:2])
    parquet = corpus.write_parquet(tmp_path / "1.parquet", rows()[2:])
    check(_rust.Index([arrow, parquet], label="label"))


def test_large_binary_and_other_columns(tmp_path):
    kind = pa.struct({"path": pa.large_string(), "bytes": pa.large_binary(), "rate": pa.int32()})
    audio = pa.array(
        [{"bytes": data, "path": f"{i}.wav", "rate": i} for i, data in enumerate(ROWS)], kind
    )
    table = pa.table(
        {
            "list": pa.array([[1, 2], [], None, [3], [4]], pa.list_(pa.int32())),
            "deep": pa.array([{"a": {"b": [{"c": "x"}]}}] * 5),
            "audio": audio,
            "label": pa.array(LABELS, pa.int64()),
        }
    ).replace_schema_metadata(rows().schema.metadata)
    check(_rust.Index([corpus.write_parquet(tmp_path / "s.parquet", table)], label="label"))


def test_a_null_struct_is_a_null_recording(tmp_path):
    shard = corpus.write_parquet(
        tmp_path / "s.parquet",
        pa.table({"audio": pa.array([{"bytes": b"x", "path": "p"}, None], corpus.AUDIO)}),
    )
    index = _rust.Index([shard])
    assert (index.encoded(0), index.path(0), index.path(1)) == (b"x", "p", None)


def test_required_fields_have_no_levels(tmp_path):
    fields = [
        pa.field("bytes", pa.binary(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
    ]
    schema = pa.schema(
        [
            pa.field("audio", pa.struct(fields), nullable=False),
            pa.field("label", pa.int64(), nullable=False),
        ]
    )
    audio = pa.array(
        [{"bytes": b"a", "path": "p"}, {"bytes": b"bc", "path": "q"}], pa.struct(fields)
    )
    table = pa.table([audio, pa.array([1, 0])], schema=schema)
    index = _rust.Index([corpus.write_parquet(tmp_path / "s.parquet", table)], label="label")
    assert [index.encoded(0), index.encoded(1), *index.labels] == [b"a", b"bc", 1, 0]


def error(path, table, match, label="label", **options):
    with pytest.raises(ValueError, match=match) as caught:
        _rust.Index([corpus.write_parquet(path, table, **options)], label=label)
    assert str(path) in str(caught.value)


def test_columns_that_do_not_fit(tmp_path):
    path, good = tmp_path / "s.parquet", rows()
    code = pa.array(["houspa"] * 5)
    error(
        path,
        good.append_column("ebird_code", code),
        r"ebird_code.* holds strings.*cast_column\(",
        label="ebird_code",
    )
    error(
        path,
        good,
        r'no column "species"; the columns are audio \(struct<bytes: binary, path: string>\), label'
        r" \(int64\)",
        "species",
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
        r'"label" is double, but labels must be',
    )
    error(
        path,
        good.set_column(1, "label", pa.array([1] * 5, pa.uint64())),
        r'"label" is int64, but labels must be',
    )
    error(
        path,
        corpus.table(ROWS, [0, 1, 2, 0, 0]),
        r"row 2 \(row 2 of this shard\) has label 2, but there are 2 classes",
    )
    for encoding in ("DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"):
        column = {"audio.bytes": encoding, "audio.path": "PLAIN", "label": "PLAIN"}
        error(
            path,
            good,
            "only PLAIN and dictionary are supported; write it",
            use_dictionary=False,
            column_encoding=column,
        )


@pytest.mark.parametrize("codec", CODECS)
def test_broken_shards_never_crash(tmp_path, codec):
    """For any changed byte, reading ends with rows or with a ValueError that names the shard."""
    shard = corpus.write_parquet(
        tmp_path / "w.parquet", rows(), compression=codec, row_group_size=3
    )
    whole = np.frombuffer(shard.read_bytes(), np.uint8)
    rng, path, failed = np.random.default_rng(0), tmp_path / "b.parquet", 0
    cuts = [whole[:size] for size in range(4, len(whole), 7)]
    for trial in range(1500 + len(cuts)):
        broken = whole.copy()
        places = rng.integers(len(broken), size=1 + trial % 3)
        broken[places] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)], size=len(places))
        path.write_bytes((broken if trial < 1500 else cuts[trial - 1500]).tobytes())
        try:
            index = _rust.Index([path], label="label")
            for row in range(index.n_rows):
                try:
                    index.encoded(row), index.path(row)
                except ValueError:
                    pass
        except ValueError as error:
            assert "b.parquet" in str(error)
            failed += 1
    assert failed > 100


def test_fingerprint_follows_the_data_and_not_the_folder(tmp_path):
    def fingerprint(table, folder="a", **options):
        return _rust.Index(
            [corpus.write_parquet(tmp_path / folder / "0.parquet", table, **options)], label="label"
        ).fingerprint

    first = fingerprint(rows())
    assert first == fingerprint(rows(), folder="b")
    others = [
        fingerprint(rows()[:4]),
        fingerprint(corpus.table(ROWS, [1, *LABELS[1:]])),
        fingerprint(rows(), compression="none"),
    ]
    assert len({first, *others}) == 4


@pytest.mark.parametrize("codec", ["none", "snappy"])
def test_the_pipeline_reads_parquet_as_it_reads_arrow(tmp_path, codec):
    encoded = [corpus.wav(i, 0.2 + 0.01 * i) for i in range(12)]
    table = corpus.table(encoded, [i % 2 for i in range(12)])
    shards = [
        corpus.write(tmp_path / "s.arrow", table),
        corpus.write_parquet(tmp_path / "s.parquet", table, compression=codec, row_group_size=5),
    ]
    found = []
    for shard in shards:
        index = _rust.Index([shard], label="label")
        pipeline = pipelines.make(
            index,
            rows=np.arange(12),
            batch=4,
            ranges=[(0, 4)],
            seed=3,
            train=True,
            clip_samples=5600,
            n_frames=16,
            threads=2,
        )
        batches = [pipeline.next()[1] for _ in range(6)]
        found.append({k: np.concatenate([b[k][0] for b in batches]) for k in batches[0]})
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])


def files(folder, n=4):
    """A shard of paths without bytes, and the files at these paths."""
    for i in range(n):
        (folder / f"{i}.wav").write_bytes(corpus.wav(i))
    return corpus.table([None] * n, [0] * n)


@pytest.mark.parametrize("write", [corpus.write, corpus.write_parquet])
def test_recordings_in_files_of_their_own(tmp_path, write):
    table = files(tmp_path)
    beside = _rust.Index([write(tmp_path / "s", table)])
    assert [beside.encoded(i) for i in range(4)] == [corpus.wav(i) for i in range(4)]
    elsewhere = write(tmp_path / "shards" / "s", table)
    assert _rust.Index([elsewhere], root=tmp_path).encoded(3) == corpus.wav(3)
    with pytest.raises(
        ValueError,
        match=r"row 3 .*only the path \"3.wav\".*shards.3\.wav: No such file.*set audio_root",
    ):
        _rust.Index([elsewhere]).encoded(3)
    (tmp_path / "0.wav").unlink()
    (tmp_path / "0.wav").mkdir()
    with pytest.raises(ValueError, match="is not a regular file"):
        beside.encoded(0)
    (tmp_path / "1.wav").write_bytes(b"")
    assert beside.encoded(1) == b""


def test_a_pipe_in_place_of_a_recording_is_no_hang(tmp_path):
    table = files(tmp_path)
    (tmp_path / "2.wav").unlink()
    os.mkfifo(tmp_path / "2.wav")
    with pytest.raises(ValueError, match="is not a regular file"):
        _rust.Index([corpus.write(tmp_path / "s.arrow", table)]).encoded(2)


def test_any_number_of_shards_with_few_descriptors(tmp_path):
    """150 shards, half of them Parquet, and recordings in separate files are read under a limit of
    40 descriptors."""
    table = files(tmp_path, 2)
    wavs = corpus.table([corpus.wav(9, 0.2), corpus.wav(8, 0.2)], [1, 1])
    for k in range(50):
        corpus.write(tmp_path / f"{k}.arrow", wavs)
        corpus.write_parquet(tmp_path / f"{k}.parquet", wavs)
        corpus.write_parquet(tmp_path / f"{k}-files.parquet", table)
    code = """
        import pathlib, resource, sys
        import numpy as np
        from loaders import _rust
        from tests.support import pipelines
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        folder = pathlib.Path(sys.argv[1])
        shards = sorted(folder.glob("*.arrow")) + sorted(folder.glob("*.parquet"))
        index = _rust.Index(shards, label="label")
        pipeline = pipelines.make(index, rows=np.arange(300), batch=50, ranges=[(0, 50)], seed=0,
            train=True, threads=4,
                                  clip_samples=5600, n_frames=16, bad_budget=0.0)
        for _ in range(12):
            pipeline.next()
        print(index.n_rows)
    """
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 40
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), tmp_path], capture_output=True, text=True
    )
    assert run.stdout == "300\n", run.stderr


@pytest.mark.parametrize("write", [corpus.write, corpus.write_parquet])
def test_a_named_recording_lies_below_its_folder_and_is_a_regular_file(tmp_path, write):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.wav").write_bytes(corpus.wav(0))
    (folder / "link.wav").symlink_to(tmp_path / "secret.wav")
    os.mkfifo(folder / "pipe.wav")
    names = [
        "../secret.wav",
        str(tmp_path / "secret.wav"),
        "link.wav",
        "pipe.wav",
        "/dev/zero",
        "in/../../secret.wav",
    ]
    audio = [{"bytes": None, "path": name} for name in names]
    table = pa.table(
        [pa.array(audio, corpus.AUDIO), pa.array([0] * len(names), pa.int64())],
        schema=corpus.schema(None),
    )
    for links in (False, True):
        index = _rust.Index([write(folder / "s", table)], root=folder, links=links)
        for row, name in enumerate(names):
            if name == "link.wav" and links:
                assert index.encoded(row) == corpus.wav(0)
                continue
            with pytest.raises(ValueError, match="leads out of|is not a regular file|No such file"):
                index.encoded(row)
    os.mkfifo(folder / "x.arrow")
    with pytest.raises(OSError, match="not a regular file"):
        _rust.Index([folder / "x.arrow"])
