"""Values that a file may hold but no command expects: each becomes one message, and none becomes a
traceback."""

import io
import json
import os
import pathlib
import shutil
import signal
import socket
import tarfile

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxtrain import cli
from jaxtrain.arrays import merge_adapters, safetensors_reader, stored
from jaxtrain.commands import launch
from jaxtrain.specs import zeros
from jaxtrain.types import Spec
from jaxtrain.workloads.bird import model as bird
from jaxtrain.workloads.bird import vit
from jaxtrain.workloads.bird.inference import InferenceError, embed, encoder
from loaders.audio import shards
from loaders.io import files
from tests.hostile import damage, inputs

RAVEN = "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tSpecies\n1\ts\t{}\t0\t0.1\ta\n"
NO_UTF8 = pa.Array.from_buffers(pa.string(), 1, pa.array([b"0.wav\xff"], pa.binary()).buffers())
HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }\n"


def refused(capsys, *argv: str) -> str:
    """Runs a command that has to refuse its input. Returns its message on stderr."""
    assert cli.main(list(argv)) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "shape", ["(18446744073709551616, 0)", "(True,)", str((1,) * 65), "(0, 4611686018427387904)"]
)
def test_a_shape_that_no_array_has_is_refused(tmp_path, shape):
    header = (HEADER % shape).encode()
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))
    with pytest.raises(files.FileError, match=r"a\.npy cannot be read as an array"):
        files.array(path)


def test_features_of_two_runs_are_refused(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        inputs.embeddings(tmp_path / name)
    np.save(tmp_path / "b" / "mean.npy", np.zeros((12, 3), np.float32))
    said = refused(
        capsys,
        "probe",
        "--train",
        str(tmp_path / "a"),
        "--test",
        str(tmp_path / "b"),
        "--out",
        str(tmp_path / "c"),
    )
    assert "the train rows have 4 features, the test rows 3" in said


def test_half_a_character_is_refused_in_every_file_of_json(tmp_path, capsys):
    with pytest.raises(files.FileError, match="is not JSON.*surrogates"):
        files.parse('{"a": ["\\ud800"]}', "x.json")
    assert files.parse('{"a": "\\ud83d\\udc26"}', "x.json") == {"a": "\N{BIRD}"}
    (tmp_path / "in.jsonl").write_text('{"text": "\\ud800"}\n{"text": "b"}\n')
    command = ("tokens", str(tmp_path / "out"), str(tmp_path / "in.jsonl"), "--tokenizer", "bytes")
    assert "line at byte 0" in refused(capsys, *command)


@pytest.mark.parametrize(
    "column",
    [
        {"ebird_code_multilabel": [5]},
        {"start_time": ["x"], "end_time": ["y"]},
        {"start_time": [[1.0]], "end_time": [[2.0]]},
        {"low_freq": ["x"]},
        {"local_time": pa.array([2**62], pa.timestamp("us"))},
        {"local_time": pa.array([0], pa.timestamp("ns", "Nowhere/Zone"))},
        {"filepath": NO_UTF8},
    ],
    ids=lambda column: f"{next(iter(column))} {type(next(iter(column.values())))}",
)
def test_metadata_of_other_kinds_is_refused(tmp_path, capsys, column):
    inputs.annotated(tmp_path)
    pq.write_table(
        pa.table({"filepath": ["0.wav"], "ebird_code": ["a"], **column}),
        tmp_path / "x_metadata_test.parquet",
    )
    assert "x_metadata_test.parquet" in refused(
        capsys, "index", str(tmp_path), "--out", str(tmp_path / "out")
    )


@pytest.mark.parametrize(
    "name, text",
    [
        ("l.csv", "file,label\n0.wav," + "a" * 200_000 + "\n"),
        (
            "c.json",
            json.dumps({"recordings": [{"id": "1", "file-name": "0.wav", "gen": "\ud800"}]}),
        ),
    ],
    ids=["a long field", "half a character"],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path, capsys, name, text):
    inputs.annotated(tmp_path)
    (tmp_path / name).write_text(text)
    assert name in refused(capsys, "index", str(tmp_path / name), "--out", str(tmp_path / "out"))


def test_a_channel_of_many_digits_is_none(tmp_path):
    inputs.annotated(tmp_path)
    (tmp_path / "0.selections.txt").write_text(RAVEN.format("9" * 5000))
    assert cli.main(["index", str(tmp_path), "--out", str(tmp_path / "out")]) == 0


def test_a_table_in_a_folder_is_not_read_through_a_link_out_of_it(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    inputs.annotated(tmp_path / "in")
    (tmp_path / "secret_metadata.csv").write_text("filepath,ebird_code\nsecret-name,a\n")
    os.symlink("../secret_metadata.csv", tmp_path / "in" / "x_metadata.csv")
    said = refused(capsys, "index", str(tmp_path / "in"), "--out", str(tmp_path / "out"))
    assert "leads out of" in said and "secret-name" not in said


@pytest.mark.parametrize(
    "lie",
    [{"rate": 0}, {"rate": None}, {"frames": -5}, {"digest": None}, {"channels": "x"}],
    ids=str,
)
def test_headers_that_lie_are_read_again(tmp_path, capsys, lie):
    (tmp_path / "in").mkdir()
    inputs.annotated(tmp_path / "in")
    command = ["index", str(tmp_path / "in"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    kept = tmp_path / "out" / "headers.cache"
    table = pq.read_table(kept)
    for name, value in lie.items():
        table = table.set_column(
            table.schema.get_field_index(name), name, pa.array([value] * len(table))
        )
    pq.write_table(table, kept)
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "3 recordings read" in capsys.readouterr().out


def test_a_name_too_long_for_a_file_is_refused_in_an_archive(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "in" / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("x" * 300 + ".wav"))
    unpacked: pathlib.Path = tmp_path / "unpacked"
    said = refused(
        capsys,
        "index",
        str(tmp_path / "in"),
        "--unpack",
        str(unpacked),
        "--out",
        str(tmp_path / "out"),
    )
    assert "a.tar cannot be unpacked" in said


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A run of adapters, the run of the weights that they change, and a run of the bird encoder."""
    folder = tmp_path_factory.mktemp("adapted")
    for name, make in (
        ("adapters", inputs.adapters),
        ("base", inputs.language),
        ("birds", inputs.birds),
    ):
        (folder / name).mkdir()
        make(folder / name)
    return folder


def changed(run: pathlib.Path, target: pathlib.Path, section: str, **values) -> pathlib.Path:
    """A copy of a run whose config has other values, with checksums that fit."""
    shutil.copytree(run, target)
    (meta,) = target.glob("checkpoints/*/meta/metadata")
    content = json.loads(meta.read_text())
    content["config"].setdefault(section, {}).update(values)
    meta.write_text(json.dumps(content))
    damage.seal(target)
    return target


@pytest.mark.parametrize("field", ["vocab", "codebooks", "codebook_size"])
def test_a_run_that_does_not_say_a_size_of_its_model_is_refused(tmp_path, capsys, field):
    (tmp_path / "run").mkdir()
    inputs.speech(tmp_path / "run")
    run = changed(tmp_path / "run", tmp_path / "changed", "model", **{field: None})
    said = refused(
        capsys,
        "generate-audio",
        str(run),
        "hello",
        "--out",
        str(tmp_path / "out"),
        "--seconds",
        "0.2",
    )
    assert (
        f"its config does not say model.{field}: it is damaged" in said
        and len(said.splitlines()) == 1
    )


@pytest.fixture
def unreachable(monkeypatch):
    """Fails a test that looks for any host."""

    def found(*args, **kwargs):
        pytest.fail(f"it asks for {args}")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, found)
    monkeypatch.setattr(socket.socket, "connect", found)


ADDRESSES = (
    "gs://bucket/run",
    "https://host.example/x",
    "hf://a/b",
    "/gs/bucket/run",
    "/tmp/../s3/bucket/run",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_address_in_a_run_is_connected_to_only_if_the_user_names_it(
    tmp_path, capsys, adapted, unreachable, address
):
    run = changed(adapted / "adapters", tmp_path / "run", "warm_start", source=address)
    said = refused(capsys, "export", str(run), "--out", str(tmp_path / "out"))
    assert (
        f"config.warm_start.source is the address '{address}'" in said
        and "name it with --base" in said
    )
    assert not (tmp_path / "out").exists()
    for field in ("train", "test"):
        run = changed(adapted / "birds", tmp_path / field, "data", **{field: address})
        said = refused(capsys, "embed", str(run), "--out", str(tmp_path / "out"))
        assert (
            f"config.data.{field} is the address '{address}'" in said
            and "name it with --data" in said
        )


@pytest.mark.parametrize(
    "run, reason", [("gs://bucket/run", "is connected to only if"), (5, "does not say which run")]
)
def test_the_run_of_embeddings_is_none_that_the_user_would_not_name(
    tmp_path, capsys, unreachable, run, reason
):
    inputs.whole_rows(tmp_path)
    about = json.loads((tmp_path / "embeddings.json").read_text())
    (tmp_path / "embeddings.json").write_text(json.dumps({**about, "model": run}))
    assert reason in refused(capsys, "search", str(tmp_path), "--like", "clip.wav")


@pytest.mark.parametrize("w, b", [((16, 3), (2,)), ((8, 2), (2,)), ((16,), ())])
def test_a_head_that_does_not_fit_its_encoder_is_refused(tmp_path, w, b):
    head = {name: Spec(shape, (None,) * len(shape), zeros) for name, shape in (("w", w), ("b", b))}

    def table(c):
        return {
            "encoder": vit.make_specs(c),
            "objective": {"supervised": head},
        }  # noqa: E731

    inputs._run(tmp_path, bird, inputs.BIRDS, {}, table)
    with pytest.raises(stored.StoredError, match="objective/supervised/[wb] is .*expect"):
        encoder.load(str(tmp_path))


@pytest.mark.parametrize(
    "data, reason", [({"clip_seconds": 1e-320}, "clip_seconds"), ({"n_frames": "x"}, "n_frames")]
)
def test_a_run_that_no_clip_fits_embeds_no_query(tmp_path, capsys, adapted, data, reason):
    inputs.whole_rows(tmp_path)
    run = changed(adapted / "birds", tmp_path / "run", "data", **data)
    about = json.loads((tmp_path / "embeddings.json").read_text())
    (tmp_path / "embeddings.json").write_text(
        json.dumps({**about, "encoder": encoder.load(str(run)).digest})
    )
    (tmp_path / "clip.wav").write_bytes(inputs.tone())
    assert reason in refused(
        capsys, "search", str(tmp_path), "--like", str(tmp_path / "clip.wav"), "--run", str(run)
    )


@pytest.mark.parametrize(
    "seconds, reason",
    [(None, "clip_seconds"), (0, "clip_seconds"), (1e-3, "at most 100 are scored")],
)
def test_a_benchmark_refuses_a_run_whose_clips_have_no_length(
    tmp_path, capsys, adapted, seconds, reason
):
    (tmp_path / "data").mkdir()
    inputs.birdset(tmp_path / "data")
    run = changed(
        adapted / "birds",
        tmp_path / "run",
        "data",
        clip_seconds=seconds,
        window_ms=0.5,
        hop_ms=0.25,
    )
    command = (
        "benchmark",
        "birdset",
        "HSN",
        str(run),
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
    )
    assert reason in refused(capsys, *command)


@pytest.mark.parametrize(
    "line", ["../audio/1-0.wav,1,0,a,True", f"1-0.wav,{10**30},0,a,True", "1-0.wav,-1,0,a,True"]
)
def test_a_benchmark_refuses_clips_that_have_no_fold(tmp_path, capsys, adapted, line):
    (tmp_path / "data").mkdir()
    inputs.clips_in_folds(tmp_path / "data")
    with (tmp_path / "data" / "meta" / "esc50.csv").open("a") as file:
        file.write(line + "\n")
    command = (
        "esc10",
        str(adapted / "birds"),
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
    )
    assert "esc50.csv is not ESC's table" in refused(capsys, "benchmark", *command)


def test_a_benchmark_reads_no_table_through_a_link_out_of_its_folder(tmp_path, capsys, adapted):
    (tmp_path / "data").mkdir()
    inputs.birdset(tmp_path / "data")
    (table,) = (tmp_path / "data").glob("*.parquet")
    table.rename(tmp_path / "secret.parquet")
    table.symlink_to("../secret.parquet")
    command = (
        "birdset",
        "HSN",
        str(adapted / "birds"),
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
    )
    assert "leads out of" in refused(capsys, "benchmark", *command)


def test_a_base_that_the_user_names_is_merged(tmp_path, adapted):
    run = changed(adapted / "adapters", tmp_path / "run", "warm_start", source="gs://bucket/run")
    assert (
        cli.main(
            ["export", str(run), "--base", str(adapted / "base"), "--out", str(tmp_path / "out")]
        )
        == 0
    )
    merged = safetensors_reader.open_safetensors(tmp_path / "out")["blocks/w_q"].read(())
    # 0.1 of the base, and alpha 4 over rank 2 times the product of ones over both ranks.
    np.testing.assert_allclose(merged, np.full_like(merged, 0.1 + 2 * 2), rtol=1e-6)


def test_a_pattern_that_takes_for_ever_is_ended(tmp_path, capsys, adapted, monkeypatch):
    monkeypatch.setattr(merge_adapters, "PATTERNS", 0.2)
    run = changed(adapted / "adapters", tmp_path / "run", "warm_start", skip=["((.|.|.|.)*)*!"])
    said = refused(
        capsys, "export", str(run), "--base", str(adapted / "base"), "--out", str(tmp_path / "out")
    )
    assert "the patterns of its config.warm_start were not done after 0.2 s" in said
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and signal.getitimer(
        signal.ITIMER_REAL
    ) == (0.0, 0.0)


@pytest.mark.parametrize(
    "rules, reason",
    [
        ({"skip": ["(" * 5000 + ")" * 5000]}, "not a regular expression"),
        ({"skip": ["a{99999999999999999999}"]}, "not a regular expression"),
        ({"skip": ["a" * 20_000]}, "has 20,000 characters"),
        ({"renames": [["a", r"\9"]]}, "cannot be replaced by"),
        ({"renames": [["a", r"\g<x>"]]}, "cannot be replaced by"),
        ({"renames": [["a", "b" * 300]]}, "has 300 characters"),
        ({"renames": [["(.*)", r"\1\1"]] * 40}, "is renamed to more than 1000 characters"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_patterns_without_bounds_are_refused(tmp_path, capsys, adapted, rules, reason):
    run = changed(adapted / "adapters", tmp_path / "run", "warm_start", **rules)
    said = refused(
        capsys, "export", str(run), "--base", str(adapted / "base"), "--out", str(tmp_path / "out")
    )
    assert reason in said and len(said) < 5000


def test_terminal_control_characters_are_printed_as_escapes(tmp_path, capsys):
    name = "\x1b[2J\u202e\udcff.jsonl"
    os.mkdir(tmp_path / "in")
    (tmp_path / "in" / name).write_text("no json\n")
    said = refused(
        capsys, "tokens", str(tmp_path / "out"), str(tmp_path / "in"), "--tokenizer", "bytes"
    )
    assert "\\u001b[2J\\u202e\\udcff.jsonl: line at byte 0" in said and "\x1b" not in said


@pytest.mark.parametrize("name", ["a\nall files are as they were written", "\x1b[2J", "a\u2028b"])
def test_a_name_of_an_array_is_printable(tmp_path, capsys, name):
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(4)
    )
    said = refused(capsys, "checkpoint", "inspect", str(tmp_path))
    assert "expected printable characters" in said and said.count("\n") == 1


def test_a_recording_outside_is_not_opened_before_it_is_refused(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    inputs.annotated(tmp_path / "in")
    (tmp_path / "secret").write_text("what nobody may read")
    (tmp_path / "in" / "0.wav").unlink()
    os.symlink("../secret", tmp_path / "in" / "0.wav")
    said = refused(
        capsys,
        "index",
        str(tmp_path / "in" / "labels.csv"),
        "--audio",
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "o"),
    )
    assert "leads to" in said and "begins with bytes" not in said


@pytest.mark.parametrize(
    "job",
    [
        {"job": 1},
        {"job": "--help"},
        {"job": "1", "workdir": "x" * 5000},
        {"job": "1", "workdir": "\x1b"},
    ],
)
def test_invalid_jobs_are_refused(tmp_path, capsys, monkeypatch, job):
    # a SLURM that knows no job
    monkeypatch.setenv("PATH", f"{pathlib.Path(__file__).parent / 'bin'}:{os.environ['PATH']}")
    inputs.jobs(tmp_path)
    (tmp_path / "slurm" / "jobs.jsonl").write_text(
        json.dumps({"workdir": str(tmp_path), **job}) + "\n"
    )
    (tmp_path / "metrics.jsonl").write_text('{"step": "\\u001b[2J"}\n{"step": 1e999}\n')
    code = cli.main(["launch", "--status", str(tmp_path)])
    told = capsys.readouterr()
    assert code == (0 if len(job.get("workdir", "")) == 5000 else 2), told
    assert "\x1b" not in told.out + told.err


def test_an_archive_is_unpacked_neither_through_a_link_nor_beyond_its_size(tmp_path, capsys):
    (tmp_path / "outside").mkdir()
    for name, options in (
        ("link/a.wav", {}),
        ("a.wav", {"GNU.sparse.map": "0,3", "GNU.sparse.size": str(1 << 40)}),
    ):
        folder = tmp_path / f"in-{len(options)}"
        folder.mkdir()
        (folder / "link").symlink_to("../outside")
        with tarfile.open(folder / "a.tar", "w") as archive:
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = 3, options
            archive.addfile(member, io.BytesIO(b"abc"))
        said = refused(
            capsys, "index", str(folder), "--unpack", str(folder), "--out", str(tmp_path / "out")
        )
        assert "leads out of" in said or "which is no plain file below it" in said
    assert list((tmp_path / "outside").iterdir()) == []


def test_an_archive_in_a_folder_is_not_read_through_a_link_out_of_it(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    with tarfile.open(tmp_path / "secret.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a.wav"))
    (tmp_path / "in" / "a.tar").symlink_to("../secret.tar")
    command = (
        "index",
        str(tmp_path / "in"),
        "--unpack",
        str(tmp_path / "unpacked"),
        "--out",
        str(tmp_path / "out"),
    )
    assert "leads out of" in refused(capsys, *command) and not (tmp_path / "unpacked").exists()


def test_an_index_without_one_of_its_columns_is_refused(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    inputs.annotated(tmp_path / "in")
    assert cli.main(["index", str(tmp_path / "in"), "--out", str(tmp_path / "out")]) == 0
    (shard,) = (tmp_path / "out" / "data").iterdir()
    pq.write_table(pq.read_table(shard).drop_columns("labels"), shard)
    assert f"{shard.name}: it has no column 'labels'" in refused(
        capsys, "index", "--show", str(tmp_path / "out")
    )


def test_a_column_whose_name_is_no_text_is_refused(tmp_path, capsys):
    path = tmp_path / "a.arrow"
    with pa.ipc.new_stream(str(path), pa.schema({"textQ": pa.string()})) as writer:
        writer.write_table(pa.table({"textQ": ["a"]}))
    path.write_bytes(path.read_bytes().replace(b"textQ", b"text\xff"))
    assert "a.arrow" in refused(
        capsys, "tokens", str(tmp_path / "out"), str(path), "--tokenizer", "bytes"
    )


def test_embeddings_are_not_written_through_a_link(tmp_path):
    shapes = {"mean": jax.ShapeDtypeStruct((10, 4), np.float32)}
    (tmp_path / "out").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "out" / "mean.npy.partial").symlink_to("../mine")
    embed._open(tmp_path / "out", shapes, 0)
    assert (tmp_path / "mine").read_text() == "mine"
    (tmp_path / "out" / "mean.npy.partial").unlink()
    np.save(tmp_path / "mine.npy", np.zeros((10, 4), np.float32))
    (tmp_path / "out" / "mean.npy").symlink_to("../mine.npy")
    with pytest.raises(InferenceError, match="leads out of"):
        embed._open(tmp_path / "out", shapes, 5)


def test_an_export_copies_no_file_through_a_link_out_of_what_the_run_began_with(
    tmp_path, capsys, adapted
):
    shutil.copytree(adapted / "base", tmp_path / "base")
    (tmp_path / "secret").write_text("what nobody may read")
    (tmp_path / "base" / "tokenizer.json").symlink_to("../secret")
    said = refused(
        capsys,
        "export",
        str(adapted / "adapters"),
        "--base",
        str(tmp_path / "base"),
        "--out",
        str(tmp_path / "out"),
    )
    assert "leads out of" in said and not (tmp_path / "out").exists()


def test_a_glob_of_a_run_does_not_search_the_disk(tmp_path, capsys, adapted):
    run = changed(adapted / "birds", tmp_path / "run", "data", train="/**/*.arrow")
    assert "name the data with --data" in refused(
        capsys, "embed", str(run), "--out", str(tmp_path / "out")
    )


def test_the_log_of_a_job_is_a_file_of_its_folder(tmp_path, capsys, monkeypatch):
    inputs.jobs(tmp_path)
    monkeypatch.setattr(launch, "state_of", lambda job: {"JobState": "COMPLETED"})
    # a SLURM that knows no job
    monkeypatch.setenv("PATH", f"{pathlib.Path(__file__).parent / 'bin'}:{os.environ['PATH']}")
    log = tmp_path / "slurm" / "12_0_log.out"
    os.mkfifo(log)
    assert "is a pipe" in refused(capsys, "launch", "--tail", str(tmp_path))
    log.unlink()
    log.symlink_to("/etc/passwd")
    assert "leads out of" in refused(capsys, "launch", "--tail", str(tmp_path))
    log.unlink()
    log.write_text("\x1b[2Jdone\n")
    assert cli.main(["launch", "--tail", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "\\u001b[2Jdone\n"


def test_an_index_does_not_lead_through_a_link_out_of_its_folder(tmp_path):
    (tmp_path / "index").mkdir()
    (tmp_path / "secret.json").write_text('{"root": "."}')
    (tmp_path / "index" / "index.json").symlink_to("../secret.json")
    with pytest.raises(files.DataError, match="leads out of"):
        shards.index_root(tmp_path / "index" / "index.json")
