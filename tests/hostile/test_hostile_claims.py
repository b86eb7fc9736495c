"""Small files that claim to be large, or to take for ever. They are refused because of their claim,
before it is believed."""

import gzip
import http.server
import io
import json
import os
import resource
import tarfile
import threading
import tracemalloc
import zipfile

import nibabel
import numpy as np
import openpyxl
import pytest
from etils import epath

from jaxtrain import cli
from jaxtrain.arrays import orbax_steps, safetensors_reader, stored
from jaxtrain.telemetry import console
from jaxtrain.telemetry.report import trace
from jaxtrain.workloads.giblet import predict
from loaders import base
from loaders.audio import remote
from loaders.film import fmri, foreign_files, segments
from loaders.io import files, machine
from loaders.text import tokenise


def said_by(capsys, *argv: str) -> str:
    """The one-line error of a command that refuses its input."""
    assert cli.main(list(argv)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    return said


def test_an_archive_of_arrays_is_unpacked_as_far_as_it_claims(tmp_path):
    array = io.BytesIO()
    np.save(array, np.zeros(10, np.float32))
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_BZIP2) as file:
        file.writestr("w.npy", array.getvalue() + bytes(1 << 20))
    with pytest.raises(files.FileError, match="neither stored nor deflated"):
        files.arrays(tmp_path / "a.npz")
    # Deflated content whose header states another size: no more than the stated size is unpacked.
    with zipfile.ZipFile(tmp_path / "b.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("w.npy", array.getvalue() + bytes(64 << 20))
    content = (tmp_path / "b.npz").read_bytes()
    whole = (len(array.getvalue()) + (64 << 20)).to_bytes(4, "little")
    assert content.count(whole) == 2
    (tmp_path / "b.npz").write_bytes(
        content.replace(whole, len(array.getvalue()).to_bytes(4, "little"))
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(files.FileError, match="CRC"):
        files.arrays(tmp_path / "b.npz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10, "[KiB]"


def scan(path, shape, content: bytes, *, offset: int = 544, kind=nibabel.Nifti1Header):
    """A NIfTI file whose header claims ``shape`` in float64, ``offset`` bytes from its beginning,
    before ``content``."""
    header = kind()
    header.set_data_dtype(np.float64)
    header.set_data_shape(shape)
    header.set_xyzt_units("mm", "sec")
    header["vox_offset"] = offset
    whole = header.binaryblock + content
    path.write_bytes(gzip.compress(whole) if path.suffix == ".gz" else whole)
    return path


@pytest.mark.parametrize(
    "kind", [nibabel.Nifti1Header, nibabel.Nifti2Header], ids=["version 1", "version 2"]
)
@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "A.NII.GZ"])
def test_a_scan_that_claims_more_than_its_file_can_hold_is_named(tmp_path, capsys, name, kind):
    path = scan(tmp_path / name.lower(), (2000, 2000, 2000, 5), bytes(1000), kind=kind).rename(
        tmp_path / name
    )
    (tmp_path / "other").write_bytes(b"")
    other = str(tmp_path / "other")
    argv = [
        "--video",
        other,
        "--codes",
        other,
        "--embeddings",
        other,
        "--out",
        str(tmp_path / "out"),
    ]
    said = said_by(capsys, "prepare-giblet", "--fmri", str(path), *argv)
    size = path.stat().st_size
    most = (
        f"its {size:,} bytes cannot unpack to more than {1032 * size:,}"
        if "gz" in name.lower()
        else f"it has {size:,}"
    )
    claim = "its header claims 320,000,000,544 bytes, shape (2000, 2000, 2000, 5), and "
    assert said == f"error: {path} cannot be read: {claim}{most}\n"
    mask = scan(tmp_path / predict.MASK, (1000, 1000, 1000), b"", kind=kind)
    with pytest.raises(
        files.FileError, match=f"{mask} cannot be read: its header claims 8,000,000,"
    ):
        predict.read_brain(str(tmp_path), 5)


def test_a_scan_that_packs_best_is_read(tmp_path):
    image = nibabel.Nifti1Image(np.zeros((64, 64, 32, 20), np.int16), np.eye(4))
    nibabel.save(image, tmp_path / "a.nii.gz")
    assert (64 * 64 * 32 * 20 * 2) / (tmp_path / "a.nii.gz").stat().st_size > 100
    assert fmri.read_volumes(tmp_path / "a.nii.gz", 20).shape == (64, 64, 32, 20)


def test_a_sparse_scan_is_not_read_into_more_memory_than_there_is(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "most_memory", lambda: 1 << 20)
    path = scan(tmp_path / "a.nii", (64, 64, 64, 8), b"")
    os.truncate(path, 544 + 8 * 64**3 * 8)
    with pytest.raises(
        base.DataError,
        match=f"{path} takes 16,777,216 bytes for 8 volumes, and this machine has 1,048,576",
    ):
        fmri.read_volumes(path, 8)


@pytest.mark.parametrize("length", [-8, 32 << 20], ids=["to the end", "32 MiB"])
def test_header_extensions_of_a_scan_are_not_read(tmp_path, length):
    """An extension of its header that unpacks to gigabytes. The length in the header may differ
    from that."""
    content = b"\1\0\0\0" + length.to_bytes(4, "little", signed=True) + bytes(4 + (32 << 20) + 1000)
    path = scan(tmp_path / "a.nii.gz", (2, 2, 2, 2), content, offset=(32 << 20) + 352)
    tracemalloc.start()
    try:
        image = foreign_files.nifti(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "[bytes]"
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(image.dataobj[..., :1], np.zeros((2, 2, 2, 1)))


def sheet(path, rows: str, *, packing: int = zipfile.ZIP_DEFLATED):
    """A workbook whose only sheet has these rows, in the XML of such files."""
    openpyxl.Workbook().save(path.with_suffix(".plain"))
    with (
        zipfile.ZipFile(path.with_suffix(".plain")) as plain,
        zipfile.ZipFile(path, "w", packing, compresslevel=1) as file,
    ):
        for name in plain.namelist():
            content = plain.read(name)
            if name == "xl/worksheets/sheet1.xml":
                head = (
                    b'<worksheet xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main">'
                )
                content = (
                    head
                    + b'<dimension ref="A1:XFD1048576"/><sheetData>'
                    + rows.encode()
                    + b"</sheetData></worksheet>"
                )
            file.writestr(name, content)
    return path


def cells(number: int, *values: str) -> str:
    inside = "".join(
        f'<c r="{"ABC"[i]}{number}" t="inlineStr"><is><t>{x}</t></is></c>'
        for i, x in enumerate(values)
    )
    return f'<row r="{number}">{inside}</row>'


@pytest.mark.parametrize(
    "rows, packing, reason",
    [
        (
            cells(2, "x" * (65 << 20)),
            zipfile.ZIP_DEFLATED,
            "at most 67,108,864 are read; save the sheet as CSV",
        ),
        (cells(2, "0", "1"), zipfile.ZIP_BZIP2, "is neither stored nor deflated"),
        (cells(1 << 40, "0", "1"), zipfile.ZIP_DEFLATED, "has more than 10,000 rows"),
        (
            "".join(f'<row r="{n}"><c r="XFD{n}"><v>1</v></c></row>' for n in range(2, 200)),
            zipfile.ZIP_DEFLATED,
            "cells, with",
        ),
    ],
    ids=["one long cell", "bzip2", "a far row", "far columns"],
)
def test_a_sheet_that_would_grow_is_named(tmp_path, monkeypatch, rows, packing, reason):
    monkeypatch.setattr(segments, "MAX_ROWS", 10_000)
    monkeypatch.setattr(segments, "MAX_CELLS", 1_000_000)
    path = sheet(tmp_path / "a.xlsx", cells(1, "start", "end") + rows, packing=packing)
    tracemalloc.start()
    try:
        with pytest.raises(base.DataError, match=reason) as error:
            segments.read_annotations(path, "start", "end")
        assert str(path) in str(error.value)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20, "[bytes]"
    finally:
        tracemalloc.stop()


def test_a_sheet_whose_size_is_a_claim_is_read(tmp_path):
    path = sheet(tmp_path / "a.xlsx", cells(1, "start", "end") + cells(90_000, "0:01", "2"))
    np.testing.assert_array_equal(segments.read_annotations(path, "start", "end"), [[1, 2]])


def safetensors(folder, header: dict, size: int):
    folder.mkdir(exist_ok=True)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return folder


def of(begin: int, end: int) -> dict:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header, reason",
    [
        ({f"a{i}": of(0, 8) for i in range(9)}, "lie in each other's place"),
        ({"a.b": of(0, 4), "a/b": of(4, 8)}, "which another array has, too"),
        ({"x[1]": of(0, 8)}, "cannot be stacked"),
    ],
    ids=["overlap", "twice", "gap"],
)
def test_arrays_of_safetensors_have_a_place_and_a_path_each(tmp_path, capsys, header, reason):
    folder = safetensors(tmp_path / "in", header, 8)
    assert reason in said_by(
        capsys, "export", "--reverse", str(folder), "--out", str(tmp_path / "out")
    )
    assert not (tmp_path / "out").exists()


def test_a_number_with_thousands_of_digits_is_part_of_a_name(tmp_path):
    name = f"x[{'9' * 5000}]"
    assert list(
        safetensors_reader.open_safetensors(safetensors(tmp_path, {name: of(0, 8)}, 8))
    ) == [name]


def test_a_sparse_file_is_not_read_into_more_memory_than_there_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "most_memory", lambda: 1 << 20)
    safetensors(
        tmp_path,
        {"a": {"dtype": "U8", "shape": [1, 1 << 30], "data_offsets": [0, 1 << 30]}},
        1 << 30,
    )
    assert cli.main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert (
        "a: cannot be read: " in (out := capsys.readouterr().out)
        and "this machine has 1,048,576" in out
    )


@pytest.mark.parametrize(
    "name, size, ok",
    [
        ("a/0.0", 10 << 30, False),
        # a chunk that does not get smaller, although the disk gave it few blocks
        ("a/0.0", (1 << 30) + (1 << 24), True),
        ("b/c/0", 10 << 30, False),
        ("b/zarr.json", 10 << 30, False),
        ("manifest.ocdbt", 10 << 30, False),
        ("array_metadatas/process_0", 10 << 30, False),
        ("ocdbt.process_0/d/4f", 10 << 30, True),  # of which parts are read
    ],
)
def test_a_sparse_file_is_not_given_to_tensorstore_whole(tmp_path, name, size, ok):
    for folder, about in (
        ("a", {".zarray": {"chunks": [1 << 20, 256], "dtype": "<f4"}}),
        ("b", {"zarr.json": {"chunk_grid": {"configuration": {"chunk_shape": [4, 6]}}}}),
    ):
        (tmp_path / folder).mkdir()
        for file, content in about.items():
            (tmp_path / folder / file).write_text(json.dumps(content))
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.truncate(size)
    if ok:
        return orbax_steps.check_files(epath.Path(tmp_path))
    with pytest.raises(
        stored.StoredError, match=f"{path} has 10,737,418,240 bytes, and its contents take at most "
    ):
        orbax_steps.check_files(epath.Path(tmp_path))


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_the_size_that_an_archive_claims_for_a_member_is_bounded(tmp_path, capsys, kind):
    first, second = tarfile.TarInfo("a"), tarfile.TarInfo("b.wav")
    second.type, second.size = kind, 1 << 40
    with gzip.open(tmp_path / "a.tar.gz", "wb") as file:
        file.write(
            first.tobuf(tarfile.GNU_FORMAT) + second.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)
        )
    said = said_by(
        capsys,
        "index",
        str(tmp_path / "a.tar.gz"),
        "--unpack",
        str(tmp_path / "in"),
        "--out",
        str(tmp_path / "out"),
    )
    assert "it describes a member with 1,099,511,627,776 bytes" in said


def test_names_in_a_trace_are_looked_through_once():
    name, scope = ".1" * 300_000 + "x", "jit(a)/" + "b" * 1_000_000
    named = [trace.Operation(name, "", 2 * i, 2 * i + 1) for i in range(1000)]
    found = trace._summary(named + [trace.Operation("dot", scope, 5000, 5001)] * 5000)
    assert found.scopes[0][0] == "b" * 120 and found.scopes[1][0] == name
    assert (
        trace._short("dot.12_3", "") == "dot"
        and trace._short("dot1.2", "") == "dot1"
        and trace._short("1.2", "") == "1"
    )


def test_a_line_that_takes_all_memory_is_not_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokenise, "LONGEST_LINE", 1000)
    monkeypatch.setattr(machine, "most_memory", lambda: 2000)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "b"}\n' + b"x" * 1001 + b"\n")
    (tmp_path / "a.txt").write_bytes(bytes(2001))
    for name, reason in (
        ("a.jsonl", "the line at byte 14 is longer than 1,000 bytes"),
        ("a.txt", "more than the 2,000 bytes"),
    ):
        argv = [
            "tokens",
            str(tmp_path / f"out-{name}"),
            str(tmp_path / name),
            "--tokenizer",
            "bytes",
        ]
        assert reason in said_by(capsys, *argv)


def test_lines_of_a_name_or_a_text_are_none_of_ours(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    name = "b\nall files are as they were written\u200f.json"
    os.mkfifo(tmp_path / "in" / name)
    with pytest.raises(files.FileError) as error:
        files.read(tmp_path / "in" / name, most=10)
    assert "b\\nall files" in str(error.value) and "\n" not in str(error.value)
    assert console.plain("\u200f\u061c\u2028") == "\\u200f\\u061c\\u2028"
    safetensors(tmp_path / "export", {"a": of(0, 8)}, 8)
    meta = {"versions": {"jax": "1\n0 problems"}, "parameters": "x\nno problems"}
    (tmp_path / "export" / stored.EXPORT).write_text(
        json.dumps({"format": stored.FORMAT, "meta": meta, "config": {"a": 1}, "step": 1})
    )
    assert cli.main(["checkpoint", "inspect", str(tmp_path / "export")]) == 0
    assert {"versions jax 1 0 problems", "parameter table x no problems"} <= set(
        capsys.readouterr().out.splitlines()
    )


class Liar(http.server.BaseHTTPRequestHandler):
    """A web server that answers with `server.page`, or without end if that is None. Requests for
    parts of files get the same answers."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        page = None if self.path.endswith(".arrow") else self.server.page
        self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        if page is not None or not body:
            self.send_header("Content-Length", str(len(page) if page is not None else 1000))
        self.end_headers()
        if body:
            try:
                self.wfile.write(page or b"")
                for _ in range(1000 if page is None else 0):
                    self.wfile.write(bytes(1 << 20))
            except OSError:
                pass  # the client has read enough


@pytest.mark.parametrize(
    "page, reason",
    [
        (None, "cannot be listed: ClientPayloadError: more than 300,000 bytes come"),
        (b'<a href="a.arrow">', "after 2 tries (ClientPayloadError: more than 300,000 bytes come)"),
        (b'<a href="a/"><a href="b/">', "more than 20 pages of links"),
        (b'<a href="a%s.arrow">' % (b"b" * 300), "a name that no file should have"),
        (b'<a href="a.arrow"><a href="a.arrow/b.arrow">', "which lies in another file"),
        (
            b'<a href="http://127.0.0.2/a.arrow"><a href="/b.arrow"><a href="../c.arrow">',
            "holds no Arrow or Parquet shards",
        ),
    ],
    ids=["endless page", "endless file", "endless pages", "long", "nested", "elsewhere"],
)
def test_a_server_that_lies(tmp_path, monkeypatch, page, reason):
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path))
    for name, value in {"MAX_ANSWER": 300_000, "MAX_PAGES": 20, "TRIES": 2, "WAIT": 0.01}.items():
        monkeypatch.setattr(remote, name, value)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    server.page, server.daemon_threads = page, True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        with pytest.raises(remote.DataError) as error:
            remote.fetch(f"http://127.0.0.1:{server.server_port}/data/")
        assert reason in str(error.value) and "\0" not in str(error.value)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
