"""Every reader of files in Python reads thousands of damaged files in one process: python
readers.py FOLDER N.

A reader has a folder of small real files, and a function that reads them all. One file after the
other is changed, read and put back, drawn by a seed. The change is to its bytes, or to its unpacked
content, which is packed again correctly. A reader may refuse a file, in one line that names it. It
may not raise anything else, take long, take much memory, unpickle, or start a program. It may not
open a file elsewhere for any path in a file: Python code may open only files in the reader's
folder, and no code may open the files next to that folder.
"""

import contextlib
import faulthandler
import io
import json
import os
import pathlib
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.arrays import checksums, orbax_steps, safetensors_reader, source, stored, warm_start
from jaxtrain.config.schema import WarmStart
from jaxtrain.nn import hugging_face
from jaxtrain.parallel.lease import WorkdirError
from jaxtrain.telemetry.console import plain
from jaxtrain.telemetry.report import class_scores, records, trace
from jaxtrain.workloads.bird.export import timm_names
from jaxtrain.workloads.bird.inference import InferenceError, embeddings, heads
from jaxtrain.workloads.giblet import predict
from jaxtrain.workloads.language import hugging_face as language_files
from jaxtrain.workloads.trm import solve
from loaders.audio.recordings import columns, sources, store
from loaders.audio.recordings.annotations import Errors
from loaders.base import DataError
from loaders.chat import chatml, codec
from loaders.film import film_files, fmri, segments
from loaders.io import files, machine
from loaders.sudoku import sudoku
from tests.hostile import damage, inputs, probes
from tests.hostile.harness import ROOT, Watch

SECONDS = 10.0  # [s] of CPU time that a small file may take
# [bytes] that all damaged files of a reader together may add to its memory for whole files
MEMORY = 600 << 20
REFUSALS = (
    DataError,
    stored.StoredError,
    warm_start.WarmStartError,
    InferenceError,
    hugging_face.HuggingFaceError,
    chatml.ExampleError,
    WorkdirError,
)
# The paths that a reader opens besides its files: those of the program, of the cache, and those
# that Python looks up in the system.
INSTALLED = tuple(
    pathlib.Path(os.path.realpath(path))
    for path in (
        sys.prefix,
        sys.base_prefix,
        ROOT,
        machine.cache_folder(),
        "/etc",
        "/proc",
        "/sys",
        "/usr",
        "/dev/null",
    )
)
FORBIDDEN = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.posix_spawn",
    "os.fork",
    "os.exec",
    "socket.connect",
)


# next to the readers' folders: recordings, and files that openpyxl unpacks
HEARD, TEMPORARY = "heard-for-index", "temporary"


class Reader(NamedTuple):
    """A reader of the files that ``make`` puts into a folder."""

    name: str
    make: Callable[[pathlib.Path], None]
    read: Callable[[pathlib.Path], Any]


# Small real files that no other test needs.


def numpy_files(folder: pathlib.Path) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.save(folder / "c.npy", x)
    np.save(folder / "fortran.npy", np.asfortranarray(x))
    np.savez(folder / "plain.npz", a=x, b=np.arange(3))
    np.savez_compressed(folder / "packed.npz", a=x, b=np.array(["x", "yz"]))


def tables(folder: pathlib.Path) -> None:
    """Annotations of every kind that `jaxtrain index` reads."""
    for i in range(3):
        (folder / f"{i}.wav").write_bytes(inputs.tone(0.1))
    (folder / "labels.csv").write_text(
        "file,start,end,label\n0.wav,0.0,0.05,a\n1.wav,0.01,0.05,\"['a', 'b']\"\n"
    )
    (folder / "semicolons.csv").write_bytes(
        "file;start;end;label\n0.wav;0,0;0,05;Bl\xe4\n".encode("latin-1")
    )
    (folder / "0.selections.txt").write_text(
        "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tLow Freq"
        " (Hz)\tSpecies\n1\ts\t1\t0\t0.05\t100\ta\n"
    )
    (folder / "1.txt").write_text("0.0\t0.05\ta\n0.01\t0.05\tb\n")
    (folder / "id.csv").write_text(
        "INDIR,FOLDER,IN FILE,OFFSET,DURATION,MANUAL ID\n,,2.wav,0,0.05,a\n"
    )
    (folder / "list.txt").write_text("0.wav\n1.wav\n")
    found = [
        {
            "id": "1",
            "gen": "a",
            "sp": "b",
            "file-name": "0.wav",
            "time": "10:00",
            "date": "2020-01-01",
            "lat": "1.0",
        }
    ]
    (folder / "xc.json").write_text(json.dumps({"recordings": found}))


def scans(folder: pathlib.Path) -> None:
    """The inputs of `jaxtrain prepare-giblet` besides films."""
    import nibabel
    import openpyxl

    x = np.random.default_rng(0).normal(size=(3, 4, 2, 5)).astype(np.float32)
    image = nibabel.Nifti1Image(x, np.diag([3.0, 3, 3, 1]))
    image.header.set_xyzt_units("mm", "sec")
    image.header.set_zooms((3.0, 3.0, 3.0, 1.5))
    nibabel.save(image, folder / "a.nii")
    nibabel.save(image, folder / "b.nii.gz")
    np.save(folder / "codes.npy", np.arange(12).reshape(2, 6))
    np.savez(folder / "codes.npz", codes=np.arange(12).reshape(1, 2, 6), scale=np.ones((1, 1)))
    (folder / "words.csv").write_text("start;end;word\n00:00:01,5;0:02;a\n2,5;3;b\n")
    book = openpyxl.Workbook()
    for row in (["start", "end"], [0.5, "0:01"], [1, 2.5]):
        book.active.append(row)
    book.save(folder / "words.xlsx")


def indexed(folder: pathlib.Path) -> None:
    """An index, made in this process."""
    from loaders.audio.recordings import indexing, rows

    heard = folder.parent / HEARD
    heard.mkdir(exist_ok=True)
    inputs.annotated(heard)
    made = folder / "made"
    reading = columns.Options(audio=str(heard))
    indexing.make(
        [str(heard / "labels.csv")], made, reading=reading, options=rows.Options(), errors=Errors()
    )


def configs(folder: pathlib.Path) -> None:
    """A config.json from other projects' models."""
    llama = dict(
        model_type="llama",
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        vocab_size=64,
        max_position_embeddings=16,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        head_dim=8,
        tie_word_embeddings=True,
        hidden_act="silu",
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    )
    gpt2 = dict(
        model_type="gpt2",
        n_embd=16,
        n_layer=1,
        n_head=2,
        n_positions=16,
        vocab_size=64,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        n_inner=None,
    )
    for name, content in (("llama", llama), ("gpt2", gpt2)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content))


# The readers.


def _each(folder: pathlib.Path, read: Callable[[pathlib.Path], Any], pattern: str = "*") -> None:
    """Reads every file. If one is refused, the others are still read."""
    refused = None
    for path in sorted(folder.glob(pattern)):
        try:
            read(path)
        except REFUSALS as error:
            refused = error
    if refused is not None:
        raise refused


def _all_of(arrays: dict[str, stored.Stored]) -> None:
    for one in arrays.values():
        if one.n_bytes < 1 << 20:
            one.read(())


def read_numpy(folder: pathlib.Path) -> None:
    _each(folder, lambda path: np.array(files.array(path)), "*.npy")
    _each(folder, lambda path: {name: x.copy() for name, x in files.arrays(path).items()}, "*.npz")


def read_tables(folder: pathlib.Path) -> None:
    errors = Errors()
    _each(folder, lambda path: list(sources.read(str(path), columns.Options(), errors)), "*[!v]")
    _each(folder, lambda path: list(sources.read(str(path), columns.Options(), errors)), "*.csv")


def read_scans(folder: pathlib.Path) -> None:
    _each(folder, segments.read_codes, "codes.*")
    _each(folder, lambda path: segments.read_annotations(path, "start", "end"), "words.*")
    scan_files = sorted(folder.glob("*.nii*"))
    fmri.check(scan_files, None, 5)
    for path in scan_files:
        fmri.read_volumes(path, 5)


def read_index(folder: pathlib.Path) -> None:
    store.read(folder / "made")
    store.read_recordings(folder / "made")
    if probes.index(str(folder / "made")):
        raise DataError(f"{folder}: refused")  # with its message, which probes.py printed


def read_step(folder: pathlib.Path) -> None:
    step = orbax_steps.find_step(folder)
    checksums.verify(step)
    found = source.find(folder)
    found.meta(), found.config(), found.data(), records.read(folder / "metrics.jsonl")
    arrays = orbax_steps.open_step(step)
    found.step(arrays)
    _all_of(arrays)


def read_export(folder: pathlib.Path) -> None:
    refused = None
    for read in (
        lambda: _all_of(safetensors_reader.open_safetensors(folder)),
        lambda: source.find(folder).config(),
        lambda: hugging_face.own_export(folder, "jaxtrain.workloads.bird", ()),
        lambda: warm_start.open_source(WarmStart(source=str(folder))),
        lambda: timm_names.about(folder, 16),
    ):
        try:
            read()
        except REFUSALS as error:
            refused = error
    if refused is not None:
        raise refused


def read_manifest(folder: pathlib.Path) -> None:
    codec.open_codec(str(folder / "codec.npz"), codebooks=2, size=16, frame_rate=25.0)
    for sample in chatml.read_manifest(folder / "manifest.json"):
        with contextlib.suppress(chatml.ExampleError):
            chatml.render(sample)


def read_film(folder: pathlib.Path) -> None:
    film_files.digests(film_files.open_folder(folder))
    predict.read_brain(str(folder), 5)


def read_embeddings(folder: pathlib.Path) -> None:
    found = embeddings.read(folder)
    found.array("mean", 2), found.places()


def read_report(folder: pathlib.Path) -> None:
    records.read(folder / "metrics.jsonl")
    records.generations(folder / "generations.jsonl", steps=5, each=5)
    class_scores.read(folder / "classes.jsonl")
    for place in (folder / "traces").iterdir():
        trace.of_folder(place)


def _probe(probe: Callable[[str], int]) -> Callable[[pathlib.Path], None]:
    def read(folder: pathlib.Path) -> None:
        sudoku._split_once.cache_clear()
        if probe(str(folder)):
            raise DataError(f"{folder}: refused")  # with its message, which probes.py printed

    return read


READERS = (
    Reader("numpy's files", numpy_files, read_numpy),
    Reader("tables of annotations", tables, read_tables),
    Reader("scans, codes and sheets", scans, read_scans),
    Reader("an index", indexed, read_index),
    Reader("a checkpoint", inputs.birds, read_step),
    Reader("an export", inputs.export, read_export),
    Reader("config.json", configs, lambda folder: _each(folder, language_files.read_config)),
    Reader("a manifest and a codec", inputs.sounds, read_manifest),
    Reader("codes", inputs.codes, lambda folder: _each(folder, codec.read_many)),
    Reader("a film", inputs.masked_film, read_film),
    Reader("a head", inputs.head, lambda folder: heads.read(folder / "head.npz")),
    Reader("embeddings", inputs.whole_rows, read_embeddings),
    Reader("boards", inputs.boards, _probe(probes.puzzles)),
    Reader(
        "puzzles",
        inputs.puzzles,
        lambda folder: solve.read_puzzles(str(folder / "test.csv"), "sudoku4", 4),
    ),
    Reader("documents", inputs.tokens, _probe(probes.documents)),
    Reader("records of a run", inputs.workdir, read_report),
)


# The loop.

_watched: list[str] = []
_may_open: list[pathlib.Path] = []  # folders, while a file is read


def _hook(event: str, arguments: tuple) -> None:
    if event in FORBIDDEN:
        _watched.append(f"{event}{arguments!r:.200}")
    elif event == "open" and _may_open and isinstance(arguments[0], str | bytes):
        path = pathlib.Path(os.path.realpath(os.fsdecode(arguments[0])))
        if not any(path.is_relative_to(folder) for folder in _may_open):
            _watched.append(f"it opened {path}")


@contextlib.contextmanager
def watched(folder: pathlib.Path) -> Iterator[None]:
    """Records in `_watched` every forbidden event while files of ``folder`` are read."""
    outside = folder.parent / damage.OUTSIDE
    _may_open[:] = [
        *INSTALLED,
        *(
            pathlib.Path(os.path.realpath(folder.parent / name))
            for name in (folder.name, HEARD, TEMPORARY)
        ),
    ]
    try:
        with Watch(sorted(outside.iterdir())) as watch:
            yield
    finally:
        _may_open.clear()
        _watched.extend(f"it opened {name}" for name in watch.opened)


def _peak() -> int:
    """The peak memory [bytes] of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _replace(path: pathlib.Path, content: bytes) -> None:
    """Writes a new file, since threads of a loader may still have the old one mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def attack(reader: Reader, folder: pathlib.Path, n: int) -> tuple[int, list[str]]:
    """Reads ``n`` damaged files. Returns the number of refusals, and the wrong outcomes."""
    folder.mkdir()
    reader.make(folder)
    reader.read(folder)  # whole files are read
    whole = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    paths = [path for path in whole if path.suffix != ".wav"]  # which `make fuzz` attacks
    refused, problems, peak = 0, [], _peak()
    for number in range(n):
        rng = random.Random(f"{reader.name} {number}")
        path = rng.choice(paths)
        _replace(path, damage.changed(path.name, whole[path], rng))
        if rng.random() < 0.5:
            damage.seal(folder)
        faulthandler.dump_traceback_later(300, exit=True)
        began, text = time.process_time(), ""
        try:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
                watched(folder),
            ):
                reader.read(folder)
        except REFUSALS as error:
            refused += 1
            said = plain(str(error))  # as it is printed
            # which lists misfits
            lines = (
                said.splitlines() if not isinstance(error, warm_start.WarmStartError) else [said]
            )
            if (
                len(lines) > 1
                or len(said) > 9000
                or (str(folder) not in said and path.name not in said)
            ):
                text = f"it said {said[:500]!r}"
        except BaseException as error:  # noqa: BLE001  whatever it is, it is what is looked for
            text = f"it raised {type(error).__name__}: {str(error)[:300]}"
        seconds = time.process_time() - began
        text = text or (f"it took {seconds:.1f} s" if seconds > SECONDS else "")
        if (grown := _peak() - peak) > MEMORY:
            text, peak = text or f"{grown:,} bytes of memory more", peak + grown
        text = text or "; ".join(_watched)
        if text:
            problems.append(f"{reader.name}: case {number}, {path.relative_to(folder)}: {text}")
        _watched.clear()
        for each, content in whole.items():  # checksums were recomputed, too
            if each == path or each.name in ("manifest.json", "SHA256SUMS"):
                _replace(each, content)
    faulthandler.cancel_dump_traceback_later()
    return refused, problems


def main() -> None:
    folder, n, chosen = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    faulthandler.enable()
    sys.addaudithook(_hook)
    (folder / damage.OUTSIDE).mkdir()
    (folder / damage.OUTSIDE / "secret.json").write_text('{"secret": 1}')
    (folder / TEMPORARY).mkdir()
    tempfile.tempdir = str(folder / TEMPORARY)
    before = os.listdir(".")
    for number, reader in enumerate(READERS):
        if chosen and reader.name not in chosen:
            continue
        began = time.process_time()
        refused, problems = attack(reader, folder / str(number), n)
        seconds = time.process_time() - began
        print(
            json.dumps(
                {
                    "reader": reader.name,
                    "refused": refused,
                    "problems": problems,
                    "cpu": round(seconds, 2),
                }
            ),
            flush=True,
        )
    assert os.listdir(".") == before, "something was written where it ran"


if __name__ == "__main__":
    main()
