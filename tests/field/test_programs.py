"""Tables and folders of other programs, by the rules of these programs: APLOSE, the Macaulay
Library, Raven over several files, BirdNET's folders, and the tables of jaxtrain itself."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import soundfile

from jaxtrain import cli
from jaxtrain.workloads.bird.inference import review
from tests.support import birds

RATE = 1000


@pytest.fixture
def index(tmp_path, capsys):
    """Runs `jaxtrain index` on a table or a folder. Returns its rows, what it said, and counts."""

    def run(source, *options, code=0):
        out = tmp_path / "index"
        argv = ["index", str(source), "--out", str(out), *map(str, options)]
        assert cli.main(argv) == code, capsys.readouterr().err
        said = capsys.readouterr().err
        if code:
            return said
        about = json.loads((out / "index.json").read_text())
        rows = []
        for path in sorted((out / "data").iterdir()):
            for row in pq.read_table(path).to_pylist():
                row["classes"] = [about["classes"][i] for i in row["labels"]]
                row["name"] = row["audio"]["path"]
                rows.append(row)
        return rows, about["errors"]

    return run


def record(folder, **seconds):
    """Recordings of noise with these names, of so many seconds."""
    for seed, (name, length) in enumerate(seconds.items()):
        path = folder / name.replace("__", "/")
        path = path.with_name(f"{path.name}.wav")
        path.parent.mkdir(parents=True, exist_ok=True)
        wave = np.random.default_rng(seed).normal(0, 0.1, round(RATE * length))
        soundfile.write(path, wave, RATE, "PCM_16")
    return folder


def values(rows, *names):
    return [tuple(row[name] for name in names) for row in rows]


APLOSE = (
    "dataset,filename,start_time,end_time,start_frequency,end_frequency,annotation,annotator,"
    "start_datetime,end_datetime,is_box\n"
    "X,a.wav,0,30,0,500,Bm,me,2024-05-01T05:30:00+00:00,2024-05-01T05:30:30+00:00,0\n"
    "X,a.wav,12.5,15.5,100,300,Bm,me,2024-05-01T05:30:12+00:00,2024-05-01T05:30:15+00:00,1\n"
)
NEW_APLOSE = (
    "dataset,analysis,filename,annotation_id,is_update_of_id,start_time,end_time,min_frequency,"
    "max_frequency,annotation,annotator,annotator_expertise,start_datetime,end_datetime,type,"
    "confidence_indicator_label,confidence_indicator_level,comments,created_at_phase,"
    "signal_quantity,signal_does_overlap_other_signals,signal_start_frequency,signal_steps_count\n"
    "X,A,a.wav,1,,,,,,Bm,me,EXPERT,2024-05-01T05:30:00Z,2024-05-01T05:30:30Z,WEAK,sure,1/2,,"
    "ANNOTATION,,,,\n"
    "X,A,a.wav,2,,12.5,15.5,100,300,Bm,me,EXPERT,2024-05-01T05:30:12Z,2024-05-01T05:30:15Z,BOX,"
    "sure,1/2,,ANNOTATION,SINGLE,false,300,0\n"
)


@pytest.mark.parametrize("table", [APLOSE, NEW_APLOSE, APLOSE.replace(",0\n", ",False\n")])
def test_aplose_tells_boxes_from_whole_files(index, tmp_path, table):
    audio = record(tmp_path / "audio", a=30)
    (tmp_path / "aplose.csv").write_text(table)
    rows, counts = index(tmp_path / "aplose.csv", "--audio", audio)
    assert values(rows, "start", "end", "low", "high", "classes") == [
        (0, 30, None, None, ["Bm"]),
        (12.5, 15.5, 100, 300, ["Bm"]),
    ]
    assert "unused-column" not in counts


def test_a_falling_sound_has_its_lowest_frequency_first(index, tmp_path):
    audio = record(tmp_path / "audio", a=30)
    table = "file,start,end,start_freq_khz,end_freq_khz,label\na.wav,2,3,0.4,0.1,bat\n"
    (tmp_path / "calls.csv").write_text(table)
    rows, counts = index(tmp_path / "calls.csv", "--audio", audio)
    assert values(rows, "low", "high") == [(100, 400)] and "unused-column" not in counts


@pytest.mark.parametrize(
    "names",
    [
        "low_freq_kHz,high_freq_kHz",
        "Low Frequency [kHz],High Frequency [kHz]",
        "lowFreqkHz,highFreqkHz",
        "Low Freq (kHz),Fmax_KHZ",
    ],
)
def test_frequencies_in_khz_are_read_in_every_spelling(index, tmp_path, names):
    audio = record(tmp_path / "audio", a=30)
    (tmp_path / "calls.csv").write_text(f"file,start,end,{names},label\na.wav,2,3,0.1,0.4,bat\n")
    rows, counts = index(tmp_path / "calls.csv", "--audio", audio)
    assert values(rows, "low", "high") == [(100, 400)] and "unused-column" not in counts


@pytest.mark.parametrize(
    ("low", "high", "kept", "kinds"),
    [
        (1.5, 3.5, (1.5, 3.5), {"unclear-unit"}),  # kHz, or a whale
        (100, 400, (100, 400), set()),
        (100, 900, (100, 500), {"beyond-nyquist"}),
        (600, 900, (None, None), {"beyond-nyquist"}),
    ],
)
def test_a_band_in_no_unit_or_above_the_recordings_rate_is_named(
    index, tmp_path, low, high, kept, kinds
):
    audio = record(tmp_path / "audio", a=30)
    (tmp_path / "calls.csv").write_text(
        f"file,start,end,fmin,fmax,label\na.wav,2,3,{low},{high},bat\n"
    )
    rows, counts = index(tmp_path / "calls.csv", "--audio", audio)
    assert values(rows, "low", "high") == [kept]
    assert kinds == {"unclear-unit", "beyond-nyquist"} & set(counts)


def test_macaulays_table_names_recordings_by_number(index, tmp_path):
    audio = record(tmp_path / "audio", ML123456=2, ML204568=3, **{"339741": 4})
    header = (
        "ML Catalog Number,Format,Common Name,Scientific Name,Background Species,Recordist,Date,"
        "Year,Month,Day,Time,Country,State,Locality,Latitude,Longitude,Behaviors,Playback,"
        "Media notes,eBird Species Code,Taxonomic Sort"
    )
    lines = (
        "123456,Audio,Song Sparrow,Melospiza melodia,,A,2019-05-01,2019,5,1,615,US,NY,Woods,"
        "42.48,-76.45,Song,,,sonspa,31000",
        "ML204568,Audio,Gray Catbird,Dumetella carolinensis,,A,2019-05-02,2019,5,2,1730,US,NY,"
        "Woods,42.48,-76.45,Call,false,,grycat,30000",
        "339741,Audio,Gray Catbird,Dumetella carolinensis,,A,2019-05-02,2019,5,2,,US,NY,Woods,"
        "42.48,-76.45,Call,,,grycat,30000",
    )
    (tmp_path / "ML.csv").write_text("\n".join([header, *lines]) + "\n")
    rows, counts = index(tmp_path / "ML.csv", "--audio", audio)
    assert values(rows, "name", "end", "classes", "date", "time", "site") == [
        ("339741.wav", 4, ["Gray Catbird"], "2019-05-02", None, "Woods"),
        ("ML123456.wav", 2, ["Song Sparrow"], "2019-05-01", "06:15:00", "Woods"),
        ("ML204568.wav", 3, ["Gray Catbird"], "2019-05-02", "17:30:00", "Woods"),
    ]
    assert counts["unused-column"] == 2, "the two other names of the species"


RAVEN = "Selection\tView\tChannel\tBegin Time (s)\tEnd Time (s)\tBegin File\tAnnotation\n"


def raven(path, *events):
    lines = [
        f"{n}\tSpectrogram 1\t1\t{start}\t{start + 1}\t{file}\trobin\n"
        for n, (file, start) in enumerate(events, 1)
    ]
    path.write_text(RAVEN + "".join(lines))
    return path


@pytest.mark.parametrize(
    "events, counts_over_all",
    [
        ([("a.wav", 3), ("b.wav", 12), ("b.wav", 40)], True),
        ([("a.wav", 3), ("b.wav", 12), ("b.wav", 9)], False),  # b begins in a
        ([("a.wav", 3), ("b.wav", 40)], True),
        ([("b.wav", 3), ("a.wav", 5)], False),
        ([("a.wav", 3), ("a.wav", 8)], False),
        ([("a.wav", 3), ("b.wav", 12), ("c.wav", 75)], True),
        ([("a.wav", 3), ("b.wav", 12), ("c.wav", 60)], False),  # c begins in b
    ],
)
def test_times_of_raven_over_several_files_are_refused_unless_lengths_tell(
    index, tmp_path, events, counts_over_all
):
    audio = record(tmp_path / "audio", a=10, b=60, c=90)
    table = raven(tmp_path / "all.selections.txt", *events)
    options = ("--audio", audio)
    if counts_over_all:
        said = index(table, *options, code=2)
        assert "File Offset (s)" in said and "--start-column 'Begin Time (s)'" in said
        assert said.count("\n") == 1
        with pytest.raises(Exception, match="may count over all"):
            review.read(str(table), root=str(audio))
        options = (*options, "--start-column", "Begin Time (s)")
    rows, _ = index(table, *options)
    assert sorted(values(rows, "name", "start")) == sorted(events)
    assert counts_over_all or len(review.read(str(table), root=str(audio))) == len(events)


def test_a_folder_of_birdnet_of_what_a_class_is_not_is_no_class(index, tmp_path):
    folder = record(
        tmp_path / "rec",
        wren__a=2,
        robin__b=2,
        **{"-wren__c": 2, "-10 dB__d": 2, "robin,-wren__e": 3},
    )
    rows, counts = index(folder)
    assert sorted(values(rows, "name", "classes")) == [
        ("-10 dB/d.wav", ["-10 dB"]),
        ("-wren/c.wav", []),
        ("robin,-wren/e.wav", ["robin"]),
        ("robin/b.wav", ["robin"]),
        ("wren/a.wav", ["wren"]),
    ]
    assert counts == {"negative-folder": 2}
    rows, counts = index(folder, "--on", "negative-folder=drop")
    assert len(rows) == 3 and counts == {"negative-folder": 2}
    own = ("--labels", "(?P<label>[^/]+)/[^/]+$", "--on", "joined-labels=keep")
    rows, _ = index(folder, *own, "--on", "denied-label=keep")
    assert ["-wren"] in [row["classes"] for row in rows]


def detections(folder, audio, run):
    """Every table that a detection makes, of two classes in three recordings."""
    out = folder / "found"
    argv = ["detect", str(run), str(audio), "--threshold", "0", "--out", str(out)]
    assert cli.main([*argv, "--batch", "8", "--threads", "1"]) == 0
    return out


def test_tables_of_detect_come_back_without_a_word_about_themselves(index, tmp_path, capsys):
    audio = record(tmp_path / "rec", a=1, deep__b=1)
    found = detections(tmp_path, audio, birds.make_run(tmp_path / "run"))
    assert (found / "audacity/deep/b.wav.txt").is_file()
    expected = [
        ("a.wav", 0, 1, list(birds.NAMES)),
        ("deep/b.wav", 0, 1, list(birds.NAMES)),
    ]
    for name in ("detections.csv", "raven", "audacity", "", "raven/a.wav.selections.txt"):
        options = () if name in ("", "detections.csv") else ("--audio", audio)
        rows, counts = index(found / name, *options)
        places = expected[:1] if name.endswith(".txt") else expected
        assert values(rows, "name", "start", "end", "classes") == places, name
        assert counts.keys() <= {"shared-times", "no-table"}, "three classes at the same time"
    rows, counts = index(found / "recordings.csv", "--audio", audio)
    assert values(rows, "name", "classes") == [(name, []) for name, *_ in expected]
    assert counts == {}


def test_tables_of_search_and_review_come_back(index, tmp_path):
    audio = record(tmp_path / "rec", a=9, deep__b=9)
    (tmp_path / "answers.csv").write_text(
        "file,start,end,label,answer,asked,score\n"
        "a.wav,0.0,3.0,wren,yes,wren,0.7000\na.wav,3.0,6.0,,no,wren,0.6000\n"
        "deep/b.wav,0.0,3.0,owl,yes,robin,\ndeep/b.wav,3.0,6.0,,skip,robin,0.1000\n"
    )
    rows, counts = index(tmp_path / "answers.csv", "--audio", audio)
    assert values(rows, "name", "start", "classes") == [
        ("a.wav", 0, ["wren"]),
        ("a.wav", 3, []),
        ("deep/b.wav", 0, ["owl"]),
    ]
    assert counts == {"unanswered": 1}
    (tmp_path / "hits.csv").write_text(
        "file,start,end,clock,score,query,embeddings,row\n"
        "deep/b.wav,0.0,3.0,2024-05-01T05:30:00,0.9,call.wav@3,emb,7\na.wav,3.0,6.0,,0.8,,emb,0\n"
    )
    rows, counts = index(tmp_path / "hits.csv", "--audio", audio)
    assert values(rows, "name", "start", "end") == [("a.wav", 3, 6), ("deep/b.wav", 0, 3)]
    assert counts == {"no-label": 2}, "nothing says what they are"


def test_a_folder_of_label_tracks_alone_is_read(index, tmp_path):
    audio = record(tmp_path / "rec", a=9, deep__b=9)
    tracks = tmp_path / "tracks"
    (tracks / "deep").mkdir(parents=True)
    (tracks / "a.txt").write_text("1.0\t2.0\twren\n\\\t100\t200\n")
    (tracks / "deep/b.txt").write_text("3.0\t4.0\towl\n")
    (tracks / "notes.txt").write_text("heard an owl\n")
    rows, counts = index(tracks, "--audio", audio)
    assert values(rows, "name", "start", "low", "classes") == [
        ("a.wav", 1, 100, ["wren"]),
        ("deep/b.wav", 3, None, ["owl"]),
    ]
    assert counts == {"other-file": 1}
