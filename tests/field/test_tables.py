"""Tables as people have them give the rows that a person reads in them, or an error that names the
table."""

import csv
import json
import random
import shutil

import pytest

from jaxtrain import cli
from loaders.audio.recordings import values
from tests.field import corpus, kinds
from tests.field.corpus import rows_of

CASES = (*corpus.CASES, *kinds.CASES)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("field") / "recordings"
    corpus.write_recordings(folder)
    return folder


def row_of(text: str):
    """A row as a case writes it."""
    name = max((name for name in corpus.RECORDINGS if text.startswith(name)), key=len)
    rest = text[len(name) :].split(maxsplit=2) or ["0", str(corpus.SECONDS)]
    labels = tuple(sorted(rest[2].split("|"))) if len(rest) > 2 else ()
    return name, float(rest[0]), float(rest[1]), labels


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_table_is_read_as_a_person_reads_it(recordings, tmp_path, capsys, case):
    table = corpus.write(case, tmp_path)
    code = cli.main(
        [
            "index",
            str(table),
            "--audio",
            str(recordings),
            "--out",
            str(tmp_path / "out"),
            *case.options,
        ]
    )
    told = capsys.readouterr()
    if case.rows[0].startswith("!"):
        assert code == 2 and "error: " in told.err and not (tmp_path / "out").exists(), told.out
        assert all(word[1:] in told.err for word in case.rows), told.err
        return
    assert code == 0, told.err
    found = rows_of(tmp_path / "out")
    counts = json.loads((tmp_path / "out" / "index.json").read_text())["errors"]
    assert all(
        counts.get(kind, 0) == int(n)
        for kind, n in (row[1:].split() for row in case.rows if row[0] == "=")
    ), counts
    if case.rows[0].startswith(("test ", "train ")):
        assert sorted(f"{split} {name}" for split, name, *_ in found) == sorted(case.rows)
        return
    expected = sorted(row_of(row) for row in case.rows if row[0] != "=")
    assert [
        (row[1], pytest.approx(row[2], abs=1e-6), pytest.approx(row[3], abs=1e-6), row[4])
        for row in found
    ] == expected
    assert told.out.splitlines()[-1].startswith(
        f"{len({row[1] for row in found})} recordings used"
    ), told.out


EVENTS = [
    ("a.wav", 2.0, 3.25, "robin", 100.0, 400.0),
    ("a.wav", 2.0, 3.25, "wren", 100.0, 400.0),
    ("a.wav", 4.5, 5.0, "wren", 150.0, 300.0),
    ("A/x.wav", 0.0, 30.0, "robin", 10.0, 490.0),
    ("B/x.wav", 7.125, 8.0, "W\u00fcrger, Rotr\u00fccken", 100.0, 400.0),
]
# The lines of a table, by the program that writes it: its columns, and the values of an event.
FORMS = {
    "raven.txt": (
        "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tLow Freq (Hz)\tHigh Freq"
        " (Hz)\tBegin Path\tAnnotation".split("\t"),
        lambda n, e: (
            n + 1,
            "Spectrogram 1",
            1,
            e[1],
            e[2],
            e[4],
            e[5],
            f"D:\\rec\\{e[0]}".replace("/", "\\"),
            e[3],
        ),
    ),
    "birdnet.csv": (
        ["Start (s)", "End (s)", "Scientific name", "Confidence", "File"],
        lambda n, e: (e[1], e[2], e[3], 0.9, f"/home/me/rec/{e[0]}"),
    ),
    "long.csv": (["file", "start", "end", "label"], lambda n, e: (e[0], e[1], e[2], e[3])),
    "durations.csv": (
        ["filename", "offset", "duration", "species"],
        lambda n, e: (e[0], e[1], e[2] - e[1], e[3]),
    ),
    "ms.tsv": (
        ["path", "start_ms", "end_ms", "class"],
        lambda n, e: (e[0], e[1] * 1000, e[2] * 1000, e[3]),
    ),
    "kaleidoscope.csv": (
        ["INDIR", "FOLDER", "IN FILE", "OFFSET", "DURATION", "MANUAL ID"],
        lambda n, e: (
            "D:\\rec",
            e[0].rpartition("/")[0],
            e[0].rpartition("/")[2],
            e[1],
            e[2] - e[1],
            e[3],
        ),
    ),
}


def lines_of(form: str) -> list[list[str]]:
    columns, values = FORMS[form]
    return [columns, *(list(map(str, values(n, event))) for n, event in enumerate(EVENTS))]


def put(
    path,
    lines,
    separator: str,
    encoding: str = "utf-8",
    ends: str = "\n",
    quoting=csv.QUOTE_MINIMAL,
):
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=separator, lineterminator=ends, quoting=quoting).writerows(lines)
    return path


def events_of(out) -> list:
    return [(name, start, end, labels) for _, name, start, end, labels in rows_of(out)]


@pytest.fixture(scope="module")
def expected():
    parts = {(name, start, end) for name, start, end, *_ in EVENTS}
    return sorted((*part, tuple(sorted(e[3] for e in EVENTS if e[:3] == part))) for part in parts)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_table_gives_the_same_rows(recordings, tmp_path, form, expected):
    """An index that is written as a program would write it, and read again, has the same rows."""
    table = put(tmp_path / form, lines_of(form), "," if form.endswith(".csv") else "\t")
    assert (
        cli.main(["index", str(table), "--audio", str(recordings), "--out", str(tmp_path / "out")])
        == 0
    )
    found = [
        (*row[:1], *(pytest.approx(x, abs=1e-6) for x in row[1:3]), row[3])
        for row in events_of(tmp_path / "out")
    ]
    assert found == expected


def test_label_tracks_give_the_same_rows(recordings, tmp_path, expected):
    given = []
    for name in {event[0] for event in EVENTS}:
        given.append(tmp_path / f"{name}.txt")
        given[-1].parent.mkdir(exist_ok=True)
        lines = [
            f"{e[1]:.6f}\t{e[2]:.6f}\t{e[3]}\n\\\t{e[4]:.6f}\t{e[5]:.6f}\n"
            for e in EVENTS
            if e[0] == name
        ]
        given[-1].write_text("".join(lines))
    assert (
        cli.main(
            ["index", *map(str, given), "--audio", str(recordings), "--out", str(tmp_path / "out")]
        )
        == 0
    )
    assert events_of(tmp_path / "out") == expected


def changed(rng: random.Random, lines: list[list[str]], form: str) -> tuple[list[list[str]], dict]:
    """A table after some of the changes that people and programs make, and the form in which it is
    written."""
    lines = [list(line) for line in lines]
    how = {"separator": "," if form.endswith(".csv") else "\t"}
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(16):
            case 0:
                order = rng.sample(range(len(lines[0])), len(lines[0]))
                lines = [[line[i] for i in order if i < len(line)] for line in lines]
            case 1:
                style = rng.choice(
                    (
                        str.upper,
                        str.lower,
                        str.title,
                        lambda s: s.replace(" ", "_"),
                        lambda s: s.replace(" ", "."),
                    )
                )
                lines[0] = [style(name) for name in lines[0]]
            case 2:
                how["separator"] = rng.choice((",", ";", "\t", "|"))
            case 3:
                how["encoding"] = rng.choice(("utf-8-sig", "utf-16", "cp1252"))
            case 4:
                how["ends"] = rng.choice(("\r\n", "\r"))
            case 5:
                how["quoting"] = csv.QUOTE_ALL
            case 6:
                lines = [
                    [*line, extra]
                    for line, extra in zip(
                        lines, ["notes", *("x" * n for n in range(9))], strict=False
                    )
                ]
            case 7:
                lines.insert(rng.randint(1, len(lines)), [])
            case 8:
                lines = [[*line, ""] for line in lines]
            case 9:
                lines = [["" if n == 0 else str(n), *line] for n, line in enumerate(lines)]
            case 10:
                lines[0] = [
                    name.replace(" (s)", rng.choice(("_s", "", " [s]", ".s.", " (sec)")))
                    for name in lines[0]
                ]
            case 11:  # a cell is lost, or one is too many
                line = rng.choice([line for line in lines[1:] if line])
                line.pop(rng.randrange(len(line))) if rng.random() < 0.5 else line.append("loud")
            case 12:
                lines[0][rng.randrange(len(lines[0]))] = rng.choice(("column", "x1y", "Spalte"))
            case 13:
                lines = [lines[0], *rng.sample(lines[1:], len(lines) - 1)]
            case 14:
                line, how["other_value"] = rng.choice([line for line in lines[1:] if line]), True
                line[rng.randrange(len(line))] = rng.choice(("NA", "", "?", "1,5", "#", "0:00:05"))
            case 15:
                lines[0] = [rng.choice((f" {name}", f"{name} ", f"{name}")) for name in lines[0]]
    return lines, how


@pytest.mark.parametrize("number", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_changed_tables_lose_no_row_in_silence(recordings, tmp_path, capsys, expected, number):
    """Tables are changed by a seed. Each gives the right rows, an error that names the table,
    or a count of the rows that were left out."""
    rng, outcomes = random.Random(0), {"right": 0, "refused": 0, "counted": 0}
    for n in range(number):
        form = rng.choice(list(FORMS))
        lines, how = changed(rng, lines_of(form), form)
        other_value = how.pop("other_value", False)
        table = put(tmp_path / f"t{n}-{form}", lines, **how)
        out = tmp_path / "out"
        code = cli.main(["index", str(table), "--audio", str(recordings), "--out", str(out)])
        told = capsys.readouterr()
        if code:
            assert code == 2 and "error: " in told.err and "Traceback" not in told.err, (
                table,
                told.err,
            )
            outcomes["refused"] += 1
            continue
        found = [(row[0], round(row[1], 6), round(row[2], 6), row[3]) for row in events_of(out)]
        if found == expected:
            outcomes["right"] += 1
        elif not other_value or len(found) < len(expected):
            counted = json.loads((out / "index.json").read_text())["errors"]
            assert set(counted) - {"shared-times", "other-encoding", "overlapping-times"}, (
                table.read_bytes(),
                found,
            )
            outcomes["counted"] += 1
        shutil.rmtree(out)
    assert outcomes["right"] > 0.4 * number and outcomes["counted"] < 0.06 * number, outcomes


def test_the_corpus_is_large():
    assert len(CASES) >= 250 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("2024-05-01/2024-05-02", ("2024-05-01", "")),
        ("2024-05-01T05:30:00Z/2024-05-01T06:30:00Z", ("2024-05-01", "05:30:00+00:00")),
        ("2024-05-01 05:30 - 2024-05-02 06:30", ("2024-05-01", "05:30:00")),
        ("2024-05-01 to 2024-06-01", ("2024-05-01", "")),
        ("20240501_053000_20240501_063000", ("2024-05-01", "05:30:00")),
        ("2024-05-01T05:30:00-04:00", ("2024-05-01", "05:30:00-04:00")),
    ],
)
def test_an_interval_of_dates_is_its_begin(text, expected):
    assert values.Dates([text]).read(text) == expected


def test_an_event_of_two_tables_is_one(recordings, tmp_path):
    """Times that tables round to 1 ms, and a channel that one of them does not state."""
    (tmp_path / "a.csv").write_text(
        "file,start,end,label\na.wav,2.001,3.25,robin\na.wav,2.003,3.25,robin\n"
    )
    line = "1\tS\t1\t2.0005\t3.2504\t100\t400\ta.wav\trobin\n"
    (tmp_path / "a.txt").write_text(f"{corpus.RAVEN}\tBegin File\tSpecies\n{line}")
    given = [str(tmp_path / name) for name in ("a.csv", "a.txt")]
    assert (
        cli.main(["index", *given, "--audio", str(recordings), "--out", str(tmp_path / "out")]) == 0
    )
    assert [row[1:3] for row in events_of(tmp_path / "out")] == [(2.0005, 3.2504), (2.003, 3.25)]


def test_a_folder_of_tables_alone_names_the_remedy(tmp_path, capsys):
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "x.csv").write_text("file,start,end,label\na.wav,2,3,robin\n")
    assert cli.main(["index", str(tmp_path / "tables"), "--out", str(tmp_path / "out")]) == 2
    assert (
        "x.csv, name each as a source, and the folder of the recordings: --audio"
        in capsys.readouterr().err
    )
