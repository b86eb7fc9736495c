r"""Lines end at \n and \r\n alone, a byte order mark is no text, and a folder has one writer."""

import json
import multiprocessing
import pathlib
import re
import time

import pytest

from jaxtrain.workloads.language import generate
from jaxtrain.workloads.language.commands import tokens as tokens_command
from loaders.audio.recordings import class_names
from loaders.io import atomic_write, files
from loaders.text import token_files, tokenise, tokens

ODD = "a\x0bb\x0cc\x1cd\x1de\x1ef\x85g\u2028h\u2029i"


def test_lines_end_at_newlines_alone():
    assert files.lines(f"{ODD}\r\nsecond\n\nfourth") == [ODD, "second", "", "fourth"]
    assert files.lines("one\n") == ["one"] and files.lines("") == [] and files.lines("\n") == [""]


def test_no_reader_splits_elsewhere():
    """`str.splitlines` is left for messages, programs' output and the kernel's files."""
    root = pathlib.Path(files.__file__).parents[1]
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if path.name != "machine.py"
        for line in path.read_text().split("\n")
        if ".splitlines" in line and "error)" not in line
    ]
    assert found == []


def documents(folder):
    found = token_files.open_splits(str(folder), "", text="bytes", test_share=0.0)["train"]
    return [bytes(found.read(i, 0, int(n)).tolist()).decode() for i, n in enumerate(found.length)]


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_tokens_are_those_of_the_text(tmp_path, ending):
    lines = (
        [ODD, "second"]
        if ending == "txt"
        else [json.dumps({"text": x}, ensure_ascii=False) for x in (ODD, "second")]
    )
    text = "\r\n".join([*lines, ""])
    (tmp_path / f"x.{ending}").write_bytes(b"\xef\xbb\xbf" + text.encode())
    tokenise.make(
        tmp_path / "out",
        [str(tmp_path / f"x.{ending}")],
        tokenise.Options("bytes", "", "text", "line", True),
    )
    assert documents(tmp_path / "out") == [ODD, "second"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbf" + b"hello " * 30)
    info = tokens.dataset_info(
        tokens.Config(sources=(tokens.Source(str(tmp_path / "x.txt")),), test_share=0.5)
    )
    assert info["symbols"] == " ehlo"
    (tmp_path / "prompts.txt").write_bytes(f"\ufeff{ODD}\r\nsecond".encode())
    assert generate.read_prompts(str(tmp_path / "prompts.txt")) == [ODD, "second"]
    (tmp_path / "labels.txt").write_bytes("\ufeffrobin\nwren\x0b2\n".encode())
    assert list(class_names.read(str(tmp_path / "labels.txt"))) is not None


def hold(folder, began):
    with atomic_write.folder(folder) as partial:
        (partial / "mine").touch()
        began.set()
        time.sleep(60)


def test_the_second_writer_of_a_folder_is_reported(tmp_path):
    context = multiprocessing.get_context("spawn")
    began = context.Event()
    other = context.Process(target=hold, args=(tmp_path / "out", began), daemon=True)
    other.start()
    assert began.wait(60)
    with (
        pytest.raises(OSError, match="another process writes it now.*out"),
        atomic_write.folder(tmp_path / "out"),
    ):
        pass
    assert (tmp_path / ".out.partial" / "mine").exists(), "nothing of the other's is touched"
    other.kill()
    other.join()
    with atomic_write.folder(tmp_path / "out") as partial:
        (partial / "new").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]


def test_two_writers_of_tokens(tmp_path, capsys, monkeypatch):
    (tmp_path / "x.txt").write_text("text")
    argv = [str(tmp_path / "out"), str(tmp_path / "x.txt"), "--tokenizer", "bytes"]
    seen = []

    def make(*arguments, real=tokenise.make, **options):
        if not seen:
            seen.append(tokens_command.main(argv))
        real(*arguments, **options)

    monkeypatch.setattr(tokenise, "make", make)
    assert tokens_command.main(argv) == 0 and seen == [2]
    assert re.search(
        r"out is in use by another run: process \d+ .*choose another folder",
        capsys.readouterr().err,
    )
    assert (
        sorted(
            path.name for path in (tmp_path / "out").iterdir() if not path.name.startswith("shard")
        )
        != []
    )
    assert not (tmp_path / "out" / "lease.json").exists()
