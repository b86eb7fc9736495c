"""Token files are written from every kind of input, also if the command ends midway or rows are
bad."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from jaxtrain.workloads.language.commands import tokens as tokens_command
from loaders.base import DataError
from loaders.text import tokenise, tokens

ROOT = pathlib.Path(__file__).parent.parent.parent
TEXTS = ["To be, or not to be.", "Fünf Wörter – über Öl.", "", "x" * 3000, "last one\nof two lines"]


def documents(folder):
    """Decode the documents without the library, by the format in loaders.text.tokens."""
    about, found = json.loads((folder / "tokens.json").read_text()), []
    for shard in about["shards"]:
        ids = np.fromfile(folder / f"{shard['name']}.tokens", about["dtype"])
        index = np.fromfile(folder / f"{shard['name']}.docs", "<i8").reshape(-1, 2)
        assert len(ids) == shard["tokens"] == index[-1, 0] and index[-1, 1] == shard["bytes"]
        found += [ids[a:b].tolist() for a, b in zip(index[:-1, 0], index[1:, 0], strict=True)]
    return found


def write(folder, kind):
    table = pa.table({"text": TEXTS, "id": range(len(TEXTS))})
    path = folder / f"corpus.{kind.split('-')[0]}"
    if kind == "jsonl":
        path.write_text(
            "".join(
                json.dumps({"text": t, "id": i}, ensure_ascii=i % 2 == 0) + "\n"
                for i, t in enumerate(TEXTS)
            )
        )
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        new = pa.ipc.new_file if kind == "arrow-file" else pa.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow-file", "arrow-stream"])
def test_every_document_of_every_kind_in_order(tmp_path, kind, monkeypatch):
    # lines may begin in one part and end in another
    monkeypatch.setattr(tokenise, "LEAST_PART", 100)
    path = write(tmp_path, kind)
    assert tokens_command.main([str(tmp_path / "out"), str(path), "--tokenizer=bytes"]) == 0
    assert documents(tmp_path / "out") == [list(t.encode()) for t in TEXTS]
    assert len(json.loads((tmp_path / "out" / "tokens.json").read_text())["shards"]) > 2
    assert sorted(p.name for p in (tmp_path / "out").iterdir() if p.name.startswith(".")) == []


def test_documents_of_a_text_and_a_tokenizer_of_hugging_face(tmp_path, capsys):
    words = ["[unk]", "<eos>", "to", "be", "or", "not"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[unk]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("to be\nor not\n\n\nto be it\n")
    common = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--eos=<eos>"]
    for how, expected in {
        "file": [[2, 3, 4, 5, 2, 3, 0, 1]],
        "paragraph": [[2, 3, 4, 5, 1], [2, 3, 0, 1]],
        "line": [[2, 3, 1], [4, 5, 1], [2, 3, 0, 1]],
    }.items():
        assert (
            tokens_command.main(
                [str(tmp_path / how), str(tmp_path / "a.txt"), f"--documents={how}", *common]
            )
            == 0
        )
        assert documents(tmp_path / how) == expected
    about = json.loads((tmp_path / "file" / "tokens.json").read_text())
    assert (about["vocab"], about["eos"], about["ends"], about["tokenizer"]) == (
        6,
        1,
        [1],
        "tokenizer.json",
    )
    line = json.loads((tmp_path / "line" / "tokens.json").read_text())["shards"][0]
    assert (line["bytes"], line["first_bytes"]) == (len("to beor notto be it"), len("toorto"))
    rows = tokens.dataset_info(
        tokens.Config((tokens.Source(str(tmp_path / "line")),), context=8, test_share=0.0)
    )
    # The predicted tokens are " be", the end, " not", the end, " be", " it", the end.
    assert rows["bytes_per_token"] == len(" be not be it") / 7 and rows["ends"] == (1,)
    assert (tmp_path / "file" / "tokenizer.json").read_bytes() == (
        tmp_path / "tokenizer.json"
    ).read_bytes()

    again = [str(tmp_path / "file"), str(tmp_path / "a.txt"), "--documents=file", *common]
    assert tokens_command.main(again) == 0
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool.jinja").write_text("new")
    assert (
        tokens_command.main(again) == 2
        and "or with other files of the tokenizer" in capsys.readouterr().err
    )
    assert tokens_command.main([str(tmp_path / "new"), *again[1:]]) == 0
    assert (tmp_path / "new" / "additional_chat_templates" / "tool.jinja").read_text() == "new"


def test_a_text_that_ends_with_the_end_of_a_text_gets_no_second_one(tmp_path, capsys):
    words = ["[unk]", "a", "b", "\\n"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[unk]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<eos>", "<s>"])  # 4 and 5
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["<s> a b <eos>", "b a <eos>", "a", "a <eos> b", ""]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    common = [str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert tokens_command.main([str(tmp_path / "ended"), *common, "--eos=<eos>"]) == 0
    expected = [[5, 1, 2, 4], [2, 1, 4], [1, 4], [1, 4, 2, 4], [4]]
    assert documents(tmp_path / "ended") == expected
    said = capsys.readouterr().err
    assert "texts that end with <eos> themselves, and get no second one: 2" in said
    assert "texts with <eos> inside, where a text ends: 1; make a document of each part" in said
    assert "1 special tokens come from their names inside texts; --specials-as-text" in said
    # Without --eos the texts have the ends of their own, and the line about the files counts them.
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    assert tokens_command.main([str(tmp_path / "own"), *common]) == 0
    assert documents(tmp_path / "own") == [[5, 1, 2, 4], [2, 1, 4], [1], [1, 4, 2], []]
    assert (
        "documents that end with a token: 2; the tokenizer's own files" in capsys.readouterr().err
    )


def test_a_folder_of_an_earlier_version_that_lost_ids_is_refused(tmp_path):
    """That version used the number of tokens as the vocabulary, and stored larger ids as other
    ids."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[unk]": 0, "to": 1, "be": 70000}, unk_token="[unk]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("to be to be")
    out = tmp_path / "out"
    assert (
        tokens_command.main(
            [str(out), str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "tokenizer.json")]
        )
        == 0
    )
    assert documents(out) == [[1, 70000, 1, 70000]]
    config = tokens.Config((tokens.Source(str(out)),), context=8, test_share=0.0)
    assert tokens.dataset_info(config)["vocab"] == 70001
    about = json.loads((out / "tokens.json").read_text())
    del about["ends"]
    (out / "tokens.json").write_text(json.dumps(about))
    assert tokens.dataset_info(config)["vocab"] == 70001
    np.array([1, 4464, 1, 4464], np.uint16).tofile(out / "00000.tokens")
    (out / "tokens.json").write_text(json.dumps({**about, "vocab": 3, "dtype": "uint16"}))
    with pytest.raises(
        DataError,
        match="a vocabulary of 3, and its tokenizer.json one of 70001.*make the tokens again",
    ):
        tokens.dataset_info(config)


def test_a_killed_run_resumes_and_workers_change_no_byte(tmp_path):
    for i in range(30):
        (tmp_path / f"in{i:02}.txt").write_text(f"file {i} " * 20_000)
    args = [str(tmp_path / "in*.txt"), "--tokenizer=bytes"]
    assert tokens_command.main([str(tmp_path / "whole"), *args]) == 0
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "jaxtrain.cli", "tokens", str(out), *args, "--workers=2"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    while (
        len(list((out / ".parts").glob("*.json"))) < 3
        and process.poll() is None
        and time.monotonic() < deadline
    ):
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / "tokens.json").exists()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "resuming: " in again.stderr
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()
    }


def test_files_of_a_folder_that_are_not_read_are_reported(tmp_path, capsys):
    folder = tmp_path / "in"
    for name in ("a.txt", "B.TXT", "c.jsonl.gz", "d.json", "e.csv", ".h.txt", ".cache/f.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    assert tokens_command.main([str(tmp_path / "out"), str(folder), "--tokenizer=bytes"]) == 0
    assert documents(tmp_path / "out") == [list(b"B.TXT"), list(b"a.txt")]
    assert (
        f"{folder}: 5 files in it are not read (2 hidden, 1 .gz, 1 .json, 1 .csv), for example"
        in capsys.readouterr().err
    )


def test_a_paragraph_ends_at_a_blank_line_alone(tmp_path):
    (tmp_path / "a.txt").write_bytes(
        "\r\none\r\ntwo\r\n \t\r\n\r\nthree\n\u2028\nfour\n\f\nfive\r\n".encode()
    )
    assert (
        tokens_command.main(
            [
                str(tmp_path / "out"),
                str(tmp_path / "a.txt"),
                "--documents=paragraph",
                "--tokenizer=bytes",
            ]
        )
        == 0
    )
    found = [bytes(ids).decode() for ids in documents(tmp_path / "out")]
    assert found == ["one\ntwo", "three\n\u2028\nfour\n\f\nfive"]


def test_errors_are_named(tmp_path, capsys):
    def fails(match, *args):
        assert tokens_command.main([str(tmp_path / "out"), *map(str, args)]) == 2
        assert match in capsys.readouterr().err

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"text": null}\n{oops\n["text"]\n{"text": 3}\n')
    fails("4 rows hold no text", bad, "--tokenizer=bytes")
    fails("line at byte 17, column 'text': holds None", bad, "--tokenizer=bytes")
    fails("line at byte 32 is not JSON", bad, "--tokenizer=bytes", "--skip=3")
    fails("begun with other inputs or options", bad, "--tokenizer=bytes", "--column=id")
    assert (
        tokens_command.main([str(tmp_path / "out"), str(bad), "--tokenizer=bytes", "--skip=4"]) == 0
    )
    assert (
        documents(tmp_path / "out") == [list(b"fine")]
        and capsys.readouterr().err.count("skipped: ") == 4
    )
    fails(
        "holds token files of other inputs or options already",
        bad,
        "--tokenizer=bytes",
        "--column=id",
        "--skip=4",
    )
    fails("nowhere is not a file", tmp_path / "nowhere", "--tokenizer=bytes")
    fails("give the path of a tokenizer.json", bad, "--tokenizer=gpt2")
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 and no more")
    fails("torn.parquet cannot be read", torn, "--tokenizer=bytes")
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "other.parquet")
    assert (
        tokens_command.main(
            [str(tmp_path / "out2"), str(tmp_path / "other.parquet"), "--tokenizer=bytes"]
        )
        == 2
    )
    assert "has no column 'text'; expected one of: body (--column)" in capsys.readouterr().err


TURN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "options", "text"),
    [
        (
            {"messages": TURN},
            [],
            "column 'messages' holds conversations, which have no text of their own; write the text"
            " of each row first: tokenizer.apply_chat_template(row['messages'], tokenize=False)",
        ),
        ({"id": "a", "messages": TURN}, ["--column=messages"], "'messages' holds conversations"),
        (
            {"conversations": [{"from": "human", "value": "hello"}]},
            [],
            "column 'conversations' holds conversations",
        ),
        (
            {"prompt": "hello", "completion": "hi"},
            [],
            "has no column 'text'; completion and prompt are one text together: join them first",
        ),
        ({"text": "hello", "messages": TURN}, [], ""),
    ],
    ids=["messages", "chosen", "sharegpt", "parts", "text"],
)
def test_conversations_are_refused_with_the_way_to_their_text(
    tmp_path, capsys, kind, row, options, text
):
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text(f"{json.dumps(row)}\n" * 2)
    else:
        pq.write_table(pa.Table.from_pylist([row] * 2), path)
    command = [str(tmp_path / "out"), str(path), "--tokenizer=bytes", *options]
    assert tokens_command.main(command) == (2 if text else 0)
    error = capsys.readouterr().err
    assert text in error
    assert error.count("error:") == (1 if text else 0)


def test_a_table_is_no_text_to_train_on(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": TURN}))
    config = tokens.Config(sources=(tokens.Source(path=str(path)),))
    [(field, text)] = config.validate()
    assert field == "sources[0].path"
    assert f"make token files of them: jaxtrain tokens corpus/train {path}" in text


def test_running_the_same_command_again_reports_the_existing_output(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("to be")
    command = [str(tmp_path / "out"), str(tmp_path / "a.txt"), "--tokenizer=bytes"]
    assert tokens_command.main(command) == 0
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "out").iterdir()}
    capsys.readouterr()
    assert tokens_command.main(command) == 0
    told = capsys.readouterr().out
    assert (
        told == f"{tmp_path / 'out'} is there already, of these inputs: 1 documents, 5 tokens of 5"
        " bytes\n"
    )
    assert {
        p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "out").iterdir()
    } == before
    (tmp_path / "a.txt").write_text("or not to be")
    assert tokens_command.main(command) == 2
    assert "other inputs or options already" in capsys.readouterr().err
