"""jaxtrain generate and jaxtrain solve: the model's own answers to files, however they are
computed, and refusals."""

import csv
import dataclasses
import json
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from jaxtrain import cli
from jaxtrain.arrays import stored_params
from jaxtrain.workloads.language import generate
from jaxtrain.workloads.language import model as language
from jaxtrain.workloads.trm import loss as trm_loss
from jaxtrain.workloads.trm import model as trm
from jaxtrain.workloads.trm import solve
from loaders.sudoku import puzzles, sudoku
from tests.hostile import damage
from tests.support import runs
from tests.support.cases import initial

LANGUAGE = dict(
    embed=32, depth=2, heads=2, kv_heads=1, mlp=32, vocab=256, context=48, dtype="float32"
)
PUZZLES = dict(
    n_cells=16,
    vocab=6,
    n_puzzles=1,
    n_difficulties=1,
    embed=32,
    heads=2,
    depth=1,
    inner_multiple=32,
    puzzle_tokens=1,
    puzzle_embed=32,
    cycles_high=1,
    cycles_low=2,
    halt_steps=5,
    dtype="float32",
)

SOLUTION = "1234341221434321"


def saved(folder, workload, model, model_state=(), change=lambda params: params):
    c = workload.Config(**model)
    # The parameters are large, as after training. A new model gives nearly the same output for
    # every token, after any text.
    params = jax.tree.map(
        lambda x: x + 0.3 * np.random.default_rng(x.size).normal(size=x.shape).astype("f4"),
        initial(workload.make_specs(c)),
    )
    params = change(params)
    config = {
        "workload": workload.__package__,
        "model": dataclasses.asdict(c),
        "data": {},
        "train": {"steps": 1},
        "seed": 0,
    }
    config["warm_start"] = {"source": ""}
    runs.save(
        folder,
        1,
        {
            "step": jnp.array(1, jnp.int32),
            "params": params,
            "model_state": model_state,
            "opt_state": (),
        },
        run=config,
    )
    return folder


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("language"), language, LANGUAGE)


@pytest.fixture(scope="module")
def solver(tmp_path_factory):
    model_state = {
        name: jax.random.normal(jax.random.key(i), (32,))
        for i, name in enumerate(("init_h", "init_l"))
    }
    return saved(tmp_path_factory.mktemp("trm"), trm, PUZZLES, model_state)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A run with its halting head as initialised."""
    model_state = {name: jnp.ones(32) for name in ("init_h", "init_l")}
    closed = {"w_q": np.zeros((32, 2), "f4"), "b_q": np.full(2, -5, "f4")}
    return saved(
        tmp_path_factory.mktemp("untrained"),
        trm,
        PUZZLES,
        model_state,
        lambda params: {**params, **closed},
    )


def test_the_likeliest_tokens_are_those_of_the_whole_model(writer, tmp_path):
    """The reference computes each token by a forward pass over all tokens before it, without a
    cache."""
    out = tmp_path / "out.jsonl"
    (tmp_path / "prompts.txt").write_text("ab\n\nhello there\n")
    argv = [
        "generate",
        str(writer),
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--temperature",
        "0",
        "--tokens",
        "6",
    ]
    assert cli.main([*argv, "--out", str(out), "--batch", "2"]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["prompt"] for line in found] == ["ab", "hello there"] and {
        line["tokens"] for line in found
    } == {6}
    one = generate.load(str(writer))

    @jax.jit
    def logits(tokens):
        batch = {
            "tokens": tokens,
            "positions": jnp.arange(48)[None],
            "segments": jnp.ones((1, 48), jnp.int32),
        }
        return language.logits(one.model, one.params, batch, one.layout.shard)

    for line in found:
        ids = list(line["prompt"].encode())
        for _ in range(6):
            row = np.zeros((1, 48), np.int32)
            row[0, : len(ids)] = ids
            ids.append(int(np.asarray(logits(row))[0, len(ids) - 1].argmax()))
        assert bytes(ids[len(line["prompt"]) :]).decode(errors="replace") == line["text"]
    assert found[0]["text"] != found[1]["text"]


def test_an_export_has_its_tokenizer_wherever_it_is_taken(tmp_path, capsys):
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[unk]": 0, "wren": 1, "owl": 2}, unk_token="[unk]")
    )
    words.save(str(tmp_path / "tokenizer.json"))
    run = saved(
        tmp_path / "run", language, {**LANGUAGE, "tokenizer": str(tmp_path / "tokenizer.json")}
    )
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "tokenizer.json").unlink()  # as if on another machine
    assert generate.load(str(tmp_path / "out")).codec.encode("owl") == [2]
    assert cli.main(["generate", str(run), "owl"]) == 2
    assert "name a tokenizer.json: --tokenizer" in capsys.readouterr().err


def test_another_tokenizer_than_the_runs_own_is_named(tmp_path, capsys):
    def written(name, words):
        vocabulary = {word: i for i, word in enumerate(words)}
        model = tokenizers.models.WordLevel(vocabulary, unk_token="[unk]")
        tokenizers.Tokenizer(model).save(str(tmp_path / name))
        return str(tmp_path / name)

    own = written("own.json", ["[unk]", "wren", "owl"])
    shutil.copy(own, tmp_path / "copy.json")
    other = written("other.json", ["[unk]", "owl", "wren"])
    run = saved(tmp_path / "run", language, {**LANGUAGE, "tokenizer": own})
    assert cli.main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    of_bytes = saved(tmp_path / "bytes", language, {**LANGUAGE, "tokenizer": "bytes"})
    capsys.readouterr()
    for source in (run, tmp_path / "out"):
        for same in (own, str(tmp_path / "copy.json")):
            assert (
                cli.main(["generate", str(source), "owl", "--tokens=1", "--tokenizer", same]) == 0
            )
            assert not capsys.readouterr().err
        assert cli.main(["generate", str(source), "owl", "--tokens=1", "--tokenizer", other]) == 0
        said = capsys.readouterr().err
        assert (
            f"warning: --tokenizer {other} is not " in said and "(config.model.tokenizer)" in said
        )
        assert "id 1 is 'wren' there and 'owl' here (2 of 3 ids differ)" in said
    assert cli.main(["generate", str(of_bytes), "owl", "--tokens=1", "--tokenizer", own]) == 0
    assert f"--tokenizer {own} is not bytes, which " in capsys.readouterr().err
    pathlib.Path(own).write_text("{}")  # damaged, so that another is named
    assert cli.main(["generate", str(run), "owl", "--tokens=1", "--tokenizer", other]) == 0


def test_a_text_ends_where_its_data_end_a_text(tmp_path):
    """The end is given by the ids in tokens.json, which go into the run and its export. The token
    may have any name."""
    (tmp_path / "data").mkdir()
    words = {"[unk]": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 16)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[unk]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "data" / "tokenizer.json"))
    model = {**LANGUAGE, "vocab": 16, "tokenizer": str(tmp_path / "data" / "tokenizer.json")}

    def greedy(run):
        return next(generate.generate(generate.load(str(run)), ["w3 w4"], tokens=8, temperature=0))

    whole = greedy(saved(tmp_path / "whole", language, {**model, "ends": ()}))
    written = [words[word] for word in whole.text.split()]
    assert whole.text == " " + " ".join(f"w{i}" for i in written) and (
        whole.tokens,
        whole.ended,
    ) == (8, False)
    n = next(i for i, token in enumerate(written) if i and token not in written[:i])
    cut = ("w3 w4", 0, "".join(f" w{i}" for i in written[:n]), n, True)
    run = saved(tmp_path / "run", language, {**model, "ends": (written[n], 1)})
    assert greedy(run) == cut
    (tmp_path / "data" / "tokens.json").write_text(json.dumps({"eos": written[n]}))
    assert greedy(saved(tmp_path / "older", language, {**model, "ends": None})) == cut
    (tmp_path / "data" / "chat_template.jinja").write_text("{{ messages }}")
    for name, found in (("run", [written[n], 1]), ("older", written[n]), ("whole", None)):
        out = tmp_path / f"{name}-out"
        assert cli.main(["export", str(tmp_path / name), "--out", str(out)]) == 0
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == found, (
            "never that of another tokenizer"
        )
        assert (out / "generation_config.json").exists() == (found is not None)
        assert found is None or json.loads((out / "generation_config.json").read_text()) == {
            "eos_token_id": found
        }
        assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    assert greedy(tmp_path / "run-out") == cut
    # files of a base model with another end token
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (tmp_path / "data" / name).write_text('{"eos_token": "<eos>", "model_max_length": 9}')
    tokenizer.add_special_tokens([f"w{written[n]}"])
    tokenizer.save(str(tmp_path / "data" / "tokenizer.json"))
    assert cli.main(["export", str(run), "--out", str(tmp_path / "named")]) == 0
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        about = json.loads((tmp_path / "named" / name).read_text())
        assert about == {"eos_token": f"w{written[n]}", "model_max_length": 9}


def test_a_continuation_follows_from_its_prompt_and_seed(writer, tmp_path):
    """The continuation is the same for a prompt alone or next to longer ones, and in another
    batch."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "seven"}\n"one"\n')
    texts = {}
    for name, given, batch in (
        ("all", ["--prompts", str(tmp_path / "p.jsonl")], "3"),
        ("alone", ["one"], "2"),
    ):
        argv = [
            "generate",
            str(writer),
            *given,
            "--tokens",
            "8",
            "--temperature",
            "1.2",
            "--seeds",
            "3",
            "4",
            "--batch",
            batch,
        ]
        assert cli.main([*argv, "--out", str(tmp_path / name)]) == 0
        lines = map(json.loads, (tmp_path / name).read_text().splitlines())
        texts[name] = {(line["prompt"], line["seed"]): line["text"] for line in lines}
    assert list(texts["all"]) == [("seven", 3), ("seven", 4), ("one", 3), ("one", 4)]
    assert len(set(texts["all"].values())) == 4
    assert texts["alone"] == {("one", seed): texts["all"]["one", seed] for seed in (3, 4)}


def test_boards_are_those_of_the_model(solver, tmp_path, capsys):
    boards = [SOLUTION[:i] + "." + SOLUTION[i + 1 :] for i in range(5)]
    with open(tmp_path / "p.csv", "w", newline="") as file:
        csv.writer(file).writerows(
            [("source", "question", "answer", "rating"), *(("x", b, SOLUTION, 0) for b in boards)]
        )
    assert (
        cli.main(
            [
                "solve",
                str(solver),
                str(tmp_path / "p.csv"),
                "--out",
                str(tmp_path / "s.csv"),
                "--batch",
                "2",
            ]
        )
        == 0
    )
    assert "of 5 are the table's answer" in capsys.readouterr().out
    with open(tmp_path / "s.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    one = solve.load(str(solver))
    inputs = jnp.array([[1 if s == "." else int(s) + 1 for s in board] for board in boards])
    batch = {"inputs": inputs, "puzzle": jnp.zeros(5, jnp.int32)}
    alone = trm_loss.Model(one.c, stored_params.one_device().shard, 0)
    z, q, _ = trm_loss.solve(alone, jax.device_get(one.variables), batch)
    assert [row["question"] for row in rows] == boards
    for row, symbols, sure in zip(rows, np.asarray(z.argmax(-1)), np.asarray(q[:, 0]), strict=True):
        assert row["board"] == "".join(str(s - 1) if s >= 2 else "." for s in symbols)
        assert float(row["confidence"]) == pytest.approx(1 / (1 + np.exp(-sure)), abs=1e-3)
        assert 1 <= int(row["steps"]) <= 5 and row["valid"] == str(int(row["board"] == SOLUTION))
    (tmp_path / "plain.txt").write_text(boards[0].replace(".", "0") + "\n")
    assert cli.main(["solve", str(solver), str(tmp_path / "plain.txt")]) == 0
    assert capsys.readouterr().out.startswith(rows[0]["board"])


def test_rollouts_are_counted_calibrated_and_drawn_as_a_curve(solver, untrained, tmp_path, capsys):
    made = sudoku.generate(sudoku.Source(kind="sudoku4", n_train=30, n_test=9, blanks=(2, 6)), 0)
    for name, each in made.items():
        lines = [
            f"{puzzles.to_text('sudoku4', b)},{puzzles.to_text('sudoku4', a)}"
            for b, a in zip(each.inputs, each.labels, strict=True)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["question,answer", *lines]) + "\n")
    test, out = str(tmp_path / "test.csv"), tmp_path / "out.csv"
    argv = [
        "solve",
        str(solver),
        test,
        "--rollouts=5",
        "--noise=0.5",
        "--stop=check",
        "--choose=check",
    ]
    assert cli.main([*argv, "--out", str(out), "--calibrate", str(tmp_path / "train.csv")]) == 0
    told = capsys.readouterr().out
    assert (
        "calibrated on 30 boards, " in told
        and "of 5 rollouts each: the head's choice is valid for " in told
    )
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9 and {int(row["rollout"]) for row in rows} <= set(range(5))
    for row in rows:
        assert float(row["solves"]) * 5 % 1 == 0 and float(row["halts"]) * 4 % 1 == 0
        assert (row["valid"] == "1") == (float(row["solves"]) > 0) and row["q_valid"] <= row[
            "valid"
        ]
        assert 0 < float(row["confidence"]) < 0.5, "nearly none of these boards was right"
    argv = [
        "solve",
        str(solver),
        test,
        "--rollouts=3",
        "--noise",
        "0.5",
        "2",
        "--curve",
        str(tmp_path / "curve.csv"),
    ]
    assert cli.main(argv) == 0
    with (tmp_path / "curve.csv").open(newline="") as file:
        curve = list(csv.DictReader(file))
    assert [(row["rollouts"], row["noise"]) for row in curve] == [
        ("1", "0.0"),
        ("2", "0.5"),
        ("3", "0.5"),
        ("2", "2.0"),
        ("3", "2.0"),
    ]
    assert all(
        float(row["q_low"]) <= float(row["by_q"]) <= float(row["by_check"])
        and float(row["seconds"]) > 0
        for row in curve
    )
    capsys.readouterr()
    assert (
        cli.main(["solve", str(untrained), test, "--rollouts=3", "--noise=0.5", "--choose=check"])
        == 0
    )
    assert "at noise 0.5 no rollout halted" in capsys.readouterr().out


@pytest.mark.parametrize("kind, cells, symbols", [("maze", 64, "# SGo")])
def test_other_puzzles_are_solved_by_the_same_command(tmp_path, kind, cells, symbols):
    model = {**PUZZLES, "n_cells": cells, "vocab": len(symbols) + 1, "halt_steps": 2}
    run = saved(tmp_path / "run", trm, model, {name: jnp.ones(32) for name in ("init_h", "init_l")})
    made = [
        "sudoku",
        str(tmp_path / "p"),
        f"--kind={kind}",
        f"--side={round(cells**0.5)}",
        "--train=1",
        "--test=3",
    ]
    assert cli.main(made) == 0
    out = tmp_path / "s.csv"
    how = ["--rollouts=2", "--noise=0.1", "--symmetry", "--choose=check"]
    assert (
        cli.main(["solve", str(run), str(tmp_path / "p" / "test.csv"), *how, "--out", str(out)])
        == 0
    )
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and all(
        len(row["board"]) == cells and set(row["board"]) <= {*symbols, "?"} for row in rows
    )
    assert {row["valid"] for row in rows} == {"0"}


def test_an_export_of_a_run_solves_as_the_run_does(solver, tmp_path):
    """The export has the states that a board begins with, and no slots of training."""
    (tmp_path / "p.txt").write_text(SOLUTION[:8] + "." * 3 + SOLUTION[11:] + "\n")
    assert cli.main(["export", str(solver), "--out", str(tmp_path / "exported")]) == 0
    for run, out in ((solver, "a.csv"), (tmp_path / "exported", "b.csv")):
        assert (
            cli.main(["solve", str(run), str(tmp_path / "p.txt"), "--out", str(tmp_path / out)])
            == 0
        )
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    names = set(safetensors.numpy.load_file(tmp_path / "exported" / "model.safetensors"))
    assert {name for name in names if name.startswith("model_state.")} == {
        "model_state.init_h",
        "model_state.init_l",
    }


@pytest.mark.parametrize("what", ["generate", "solve"])
def test_a_disk_that_fills_midway_keeps_what_was_done(
    writer, solver, tmp_path, monkeypatch, capsys, what, small_disk
):
    if what == "generate":
        (tmp_path / "in").write_text("".join(f"{i:03}\n" for i in range(64)))
        argv = ["generate", str(writer), "--prompts", str(tmp_path / "in"), "--tokens", "4"]
    else:
        made = sudoku.generate(
            sudoku.Source(kind="sudoku4", n_train=192, n_test=0, blanks=(8, 8)), 0
        )["train"].inputs
        (tmp_path / "in").write_text(
            "".join(puzzles.to_text("sudoku4", board) + "\n" for board in made)
        )
        argv = ["solve", str(solver), str(tmp_path / "in")]
    assert cli.main([*argv, "--out", str(tmp_path / "whole")]) == 0
    disk, module = small_disk(8), {"generate": generate, "solve": solve}[what]
    assert cli.main([*argv, "--out", str(disk / "out")]) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith("error: ")
        and told.count("\n") == 1
        and f"{disk / 'out'} could not be written" in told
    )
    assert not (disk / "out").exists()
    subprocess.run(["mount", "-o", "remount,size=100k", disk], check=True)
    original, given = getattr(module, what), []
    monkeypatch.setattr(module, what, lambda *a, **k: given.append((a, k)) or original(*a, **k))
    assert cli.main([*argv, "--out", str(disk / "out")]) == 0
    (args, options), everything = given[0], len((tmp_path / "in").read_text().splitlines())
    left = everything - options["first"] if what == "generate" else len(args[1])
    assert 0 < left < everything, "what was done is not computed again"
    assert (disk / "out").read_bytes() == (tmp_path / "whole").read_bytes()
    assert [p.name for p in disk.iterdir()] == ["out"]


def test_a_table_that_excel_marked_as_utf_8_is_read_as_the_loader_reads_it(tmp_path):
    question = "." + SOLUTION[1:]
    (tmp_path / "train.csv").write_bytes(
        f"question,answer\r\n{question},{SOLUTION}\r\n".encode("utf-8-sig")
    )
    assert solve.read_puzzles(str(tmp_path / "train.csv"), "sudoku4", 4) == [
        solve.Puzzle(question, SOLUTION)
    ]
    read = sudoku._split(sudoku.Source(kind="sudoku4", path=str(tmp_path)), 0, "train")
    assert (read.inputs - 1).tolist() == [[0, *map(int, SOLUTION[1:])]]


@pytest.mark.parametrize(
    "text",
    [
        '"source","question","answer"\n"a, b","{q}","{a}"\n',
        "\nsource,Question ,ANSWER\ns,{q},{a}\n",
        "question,answer\r{q},{a}\r",
    ],
)
def test_a_table_is_read_however_it_is_written(tmp_path, text):
    question = "." + SOLUTION[1:]
    (tmp_path / "p.csv").write_bytes(text.format(q=question, a=SOLUTION).encode())
    assert solve.read_puzzles(str(tmp_path / "p.csv"), "sudoku4", 4) == [
        solve.Puzzle(question, SOLUTION)
    ]


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["generate", "{writer}", "x" * 60, "--tokens", "40"],
            "takes 60 of the 48 tokens of the model's context, and --tokens asks for 40 more:"
            " shorten the prompt to 47 tokens or fewer",
        ),
        (
            ["generate", "{writer}", "x", "xyz", "--tokens", "48"],
            "'xyz' takes 3 of the 48 tokens of the model's context, and --tokens asks for 48 more:"
            " --tokens 45 is the most",
        ),
        (["generate", "{solver}", "x"], "expected a run of jaxtrain.workloads.language"),
        (["generate", "{writer}", "--prompts", "{tmp}/none"], "does not exist"),
        (["generate", "{writer}", "--prompts", "{tmp}/bad.jsonl"], 'bad.jsonl:1 has no "prompt"'),
        (["generate", "{writer}", "--prompts", "{tmp}/empty.csv"], "empty.csv holds no prompt"),
        (
            ["solve", "{solver}", "{tmp}/short.csv"],
            "short.csv:2: '12..' has 4 characters; a board of this kind has 16 of",
        ),
        (
            ["solve", "{solver}", "{tmp}/five.txt"],
            "five.txt:2: row 1, column 3 is '5'; expected 1 to 4",
        ),
        (
            ["solve", "{solver}", "{tmp}/none.txt"],
            "none.txt:1: the board has no solution: row 1, column 1 and row 1, column 4",
        ),
        (
            ["solve", "{solver}", "{tmp}/many.txt"],
            "many.txt:1: the board has several solutions, which differ in row 3",
        ),
        (
            ["solve", "{solver}", "{tmp}/one.txt", "--rollouts=4"],
            "--rollouts is 4, and all would be the same; add --symmetry",
        ),
        (
            ["solve", "{solver}", "{tmp}/one.txt", "--symmetry"],
            "--symmetry is set with one rollout, and the first has none",
        ),
        (
            ["solve", "{solver}", "{tmp}/one.txt", "--noise=1"],
            "--noise is 1 with one rollout, and the first has none",
        ),
        (
            ["solve", "{untrained}", "{tmp}/one.txt", "--noise=1", "--rollouts=2"],
            "a halting head that was never trained",
        ),
        (
            ["solve", "{solver}", "{tmp}/one.txt", "--calibrate={tmp}/one.txt"],
            "one.txt shares 1 boards with",
        ),
        (["solve", "{solver}", "{tmp}/empty.csv"], "holds no board"),
        (
            ["solve", "{solver}", "{tmp}/wrong.csv"],
            "wrong.csv:3: the answer is no solution: row 1, column 1 is blank, or not",
        ),
        (["solve", "{solver}", "{tmp}/cut.csv"], "cut.csv:3: '1234' has 4 characters"),
        (
            ["solve", "{solver}", "{tmp}/other.csv"],
            "other.csv has no column question; it begins with 'id, grid'",
        ),
        (["solve", "{writer}", "{tmp}/short.csv"], "expected a run of jaxtrain.workloads.trm"),
    ],
)
def test_an_error_is_one_line(writer, solver, untrained, tmp_path, capsys, argv, text):
    boards = {
        "five": f"{SOLUTION}\n125{SOLUTION[3:]}",
        "none": f"1..1{SOLUTION[4:]}",
        "many": f"{SOLUTION[:8]}........",
    }
    for name, text_of in {**boards, "one": f".{SOLUTION[1:]}"}.items():
        (tmp_path / f"{name}.txt").write_text(text_of + "\n")
    (tmp_path / "short.csv").write_text("question\n12..\n")
    asked = f"question,answer\n,\n1.{SOLUTION[2:]},"
    (tmp_path / "wrong.csv").write_text(
        asked + SOLUTION.translate(str.maketrans("12", "21")) + "\n"
    )
    (tmp_path / "cut.csv").write_text(asked + SOLUTION[:4] + "\n")
    (tmp_path / "other.csv").write_text(f"id,grid\n0,{SOLUTION}\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n')
    tokens = [] if "--tokens" in argv or argv[0] == "solve" else ["--tokens", "4"]
    assert (
        cli.main(
            [
                *(
                    part.format(writer=writer, solver=solver, untrained=untrained, tmp=tmp_path)
                    for part in argv
                ),
                *tokens,
            ]
        )
        == 2
    )
    told = capsys.readouterr().err
    assert told.startswith("error: ") and text in told and told.count("\n") == 1


def test_a_size_that_a_damaged_config_leaves_open_is_named(writer, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(writer, run)
    for meta in run.glob("checkpoints/*/meta/metadata"):
        stored = json.loads(meta.read_text())
        stored["config"]["model"] |= {"vocab": None, "tokenizer": "bytes"}
        meta.write_text(json.dumps(stored))
        damage.seal(run)
    assert cli.main(["generate", str(run), "x", "--tokens", "4"]) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith("error: ") and "does not say the size of" in told and told.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("--noise=1e39", "it must be a number from 0 to 1e+38"),
        ("--seed=-1", "it must be an integer from 0 to 4294967295"),
        ("--curve=c.csv --calibrate=k.csv", "--curve writes none"),
    ],
)
def test_a_value_that_no_search_has_is_refused_before_anything_is_read(capsys, given, text):
    with pytest.raises(SystemExit):
        cli.main(["solve", "run", "p.csv", *given.split()])
    assert text in capsys.readouterr().err
