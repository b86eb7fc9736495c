"""--errors FILE lists every error of the data, of which a message names the first."""

import wave

import pytest

from jaxtrain import cli
from jaxtrain.commands import arguments
from tests.support.processes import run


@pytest.fixture
def recordings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recordings" / "wren").mkdir(parents=True)
    for i in range(4):
        with wave.open(f"recordings/wren/{i}.wav", "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes([i, 32]) * 8000)
    return tmp_path


def lines(path="errors.txt"):
    with open(path) as file:
        head, *found = file.read().splitlines()
    assert head == f"# errors of jaxtrain: {len(found)}"
    return found


def test_a_refused_index_and_a_dry_run_list_every_error(recordings, capsys):
    rows = ["file,start,end,label", "wren/0.wav,0,1,wren"]
    rows += [f"gone{i}.wav,0,1,wren" for i in range(12)]
    (recordings / "labels.csv").write_text("\n".join(rows))
    index = ["index", "labels.csv", "--audio", "recordings"]
    assert cli.main([*index, "--out", "index", "--errors", "errors.txt"]) == 2
    assert "and 9 more" in (said := capsys.readouterr().err)
    assert said.rstrip().endswith("--on missing-file=drop; --errors FILE lists every one")
    named = [line for line in lines() if line.startswith("missing-file: labels.csv:")]
    assert [f"'gone{i}.wav'" in named[i] for i in range(12)] == [True] * 12
    assert cli.main([*index, "--dry-run", "--errors=-"]) == 1
    assert capsys.readouterr().out.splitlines()[-12:] == named
    assert cli.main([*index, "--out", "index", "--on=all=drop", "--errors=errors.txt"]) == 0
    assert len(lines()) == 15  # with three recordings that the table does not name
    assert cli.main(["index", "--show", "index", "--errors=errors.txt"]) == 0 and lines() == []


def test_a_file_of_errors_that_cannot_be_written_is_refused_first(recordings, capsys):
    (recordings / "labels").touch()
    command = ["index", "recordings", "--out", "index", "--errors", "labels/errors.txt"]
    assert cli.main(command) == 2
    assert "/labels: Not a directory; name another path" in capsys.readouterr().err
    assert not (recordings / "index").exists()


@pytest.mark.parametrize("taken", ["labels.csv", "other.csv", "recordings/wren/0.wav"])
def test_a_file_that_is_no_list_of_errors_is_never_replaced(recordings, capsys, taken):
    (recordings / "labels.csv").write_text("file,start,end,label\ngone.wav,0,1,wren\n")
    (recordings / "other.csv").write_text("a,b\n1,2\n")
    before = (recordings / taken).read_bytes()
    command = ["index", "labels.csv", "--audio", "recordings", "--out", "index"]
    assert cli.main([*command, "--errors", taken]) == 2
    said = capsys.readouterr().err
    assert f"--errors: {taken} is there already, and no list of errors; name another file" in said
    assert (recordings / taken).read_bytes() == before


def test_an_input_is_never_replaced_by_the_output(recordings, capsys):
    (recordings / "scores.csv").write_text("file,start,end,label\nwren/0.wav,0,1,wren\n")
    (recordings / "link.csv").symlink_to("scores.csv")
    for out in ("scores.csv", "link.csv"):
        command = ["review", "scores.csv", "--root", "recordings", "--out", out]
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 2
        said = capsys.readouterr().err
        assert f"is {out}, which the command reads; name another file" in said
    assert (recordings / "scores.csv").read_text().count("\n") == 2


@pytest.mark.parametrize("name", ["wren/0.wav", "WREN.FLAC", "tokens.json", "page.html"])
def test_no_file_of_an_input_folder_is_replaced_but_an_earlier_output(recordings, capsys, name):
    (recordings / "scores.csv").write_text("file,start,end,label\nwren/0.wav,0,1,wren\n")
    taken = recordings / "recordings" / name
    taken.touch()
    argv = ["review", "scores.csv", "--root", "recordings", "--out", str(taken), "--class", "no"]
    if name == "page.html":
        assert cli.main(argv) == 2
        assert "has no line of the class 'no'" in capsys.readouterr().err
        return
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert f"is {taken}, which the command reads; name another file" in capsys.readouterr().err


def test_errors_of_a_process_are_listed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": 1}\n' * 30)
    with arguments.noting_errors() as noted, arguments.errors_of_process() as flags:
        assert cli.main(["tokens", "out", "texts.jsonl", "--tokenizer=bytes", *flags]) == 2
        assert not noted
    assert len(noted) == 30 and "byte" in noted[-1]
    with arguments.errors_of_process() as flags:
        assert not flags


def test_rows_without_text_are_listed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n' + '{"text": 1}\n' * 30)
    command = ["tokens", "out", "texts.jsonl", "--tokenizer=bytes", "--errors=errors.txt"]
    assert cli.main(command) == 2
    assert "and 10 more: --errors FILE lists every one" in capsys.readouterr().err
    assert len(lines()) == 30 and "byte 362" in lines()[-1]


@pytest.mark.parametrize("flags", [(), pytest.param(("--supervise",), marks=pytest.mark.slow)])
def test_a_run_lists_every_wrong_board_of_its_data(tmp_path, flags):
    answer = "1234341221434321"
    boards = [answer, "." * 16, "12", "1" + answer[1:15] + "7"] + ["11" + answer[2:]] * 4
    rows = ["source,question,answer,rating", *(f"0,{board},{answer},0" for board in boards)]
    for split in ("train", "test"):
        (tmp_path / "boards").mkdir(exist_ok=True)
        (tmp_path / "boards" / f"{split}.csv").write_text("\n".join(rows))
    (tmp_path / "config.py").write_text(
        "def get_config():\n"
        "    source = dict(kind='sudoku4', path='boards', n_train=0)\n"
        "    return dict(workload='jaxtrain.workloads.trm', loader='loaders.sudoku.sudoku',\n"
        "                data=dict(sources=(source,)))\n"
    )
    output = run(tmp_path, "config.py", "--errors=errors.txt", *flags, code=2)
    assert "train.csv:3: the board has several" in output and "(6 more: --errors FILE" in output
    numbers = [int(line.split(":")[1]) for line in lines(tmp_path / "errors.txt")]
    assert numbers == [3, 4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("name", "kind"), [("recordings", "a folder of recordings"), ("labels.csv", "a table")]
)
def test_recordings_where_an_index_belongs_name_the_right_command(recordings, capsys, name, kind):
    (recordings / "labels.csv").write_text("file,label\nwren/0.wav,wren\n")
    audio = " --audio FOLDER" if name == "labels.csv" else ""
    remedy = f"jaxtrain index {name} --out {name}-index --split recording=0.2{audio}, and name"
    for command in (
        ["train", f"--config=folder:{name}"],
        ["train", f"--config=xcm:{name}"],
        ["prepare", name, "--out", "prepared"],
    ):
        assert cli.main(command) == 2
        said = capsys.readouterr().err
        assert f"it is {kind}; make an index first: {remedy} {name}-index" in said
