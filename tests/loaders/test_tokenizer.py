"""A tokenizer.json gives every token of a text, for any other content of the file, and ids stay
the same."""

import ast
import json
import pathlib

import numpy as np
import pytest
import tokenizers

from loaders.base import DataError, narrowed
from loaders.text import tokenizer as tokenizer_lib
from loaders.text.tokenizer import open_tokenizer

ROOT = pathlib.Path(__file__).parents[2]
# Casts to integers of at most 32 bits that do not hold ids or counts, or that cannot overflow. Maps
# each file to their number, and the reason.
CASTS = {
    "loaders/film/fmri.py": (1, "a mask of 0 and 1"),
    "loaders/film/demo_film.py": (2, "pixels and samples, clipped before"),
    "loaders/text/token_files.py": (1, "0 alone"),
    "loaders/audio/recordings/show.py": (1, "grey values"),
    "loaders/chat/codec.py": (1, "samples of a WAV, scaled to its range"),
    "loaders/chat/chatml.py": (5, "positions in a row, and numbers that were int32 before"),
    "loaders/sudoku/sudoku.py": (1, "answers, which are bytes"),
    "jaxtrain/workloads/trm/solve.py": (1, "symbols, which are bytes"),
    "jaxtrain/workloads/bird/inference/review.py": (1, "grey values"),
    "jaxtrain/workloads/bird/inference/embeddings.py": (2, "0 and 1"),
    "jaxtrain/workloads/bird/inference/detect.py": (1, "columns of a head"),
    "jaxtrain/plan/calibration.py": (1, "drawn below 64"),
    "jaxtrain/telemetry/writers.py": (1, "pixels"),
    "jaxtrain/run/metrics_logger.py": (1, "digests, which are uint32 before"),
    "jaxtrain/telemetry/report/step_page.py": (1, "audio samples, scaled to the range"),
    "loaders/sudoku/puzzles.py": (2, "symbols, which are bytes; 0 and 1"),
}


def words(folder, ids, *, added=(), **settings):
    """A tokenizer.json of words, with ``settings`` in the file, in its own folder."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="[unk]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(list(added))
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({**json.loads(made.to_str()), **settings}))
    return folder / "tokenizer.json"


def test_truncation_padding_and_holes_change_no_token(tmp_path):
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    fill = {
        "strategy": {"Fixed": 6},
        "direction": "Right",
        "pad_id": 1,
        "pad_type_id": 0,
        "pad_token": "to",
    }
    fill |= {"pad_to_multiple_of": None}
    path = words(tmp_path / "a", {"[unk]": 0, "to": 1, "be": 65541}, truncation=cut, padding=fill)
    opened = open_tokenizer(path)
    assert opened.encode(["to be to be", "be"]) == [[1, 65541, 1, 65541], [65541]]
    assert opened.vocab == 65542 and opened.decode([1, 65541]) == "to be"


def test_one_text_has_the_same_tokens_every_time(tmp_path):
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.5)
    )
    made.save(str(tmp_path / "tokenizer.json"))
    assert {
        tuple(ids) for ids in open_tokenizer(tmp_path / "tokenizer.json").encode(["ab"] * 50)
    } == {(2,)}


@pytest.mark.parametrize("splits", [False, True])
def test_the_first_token_has_the_same_bytes_as_in_the_whole_text(tmp_path, splits):
    """It is looked for in the text's begin, unless that has other tokens."""
    models = tokenizers.models
    made = tokenizers.Tokenizer(
        models.BPE({"[unk]": 0, "to": 1, "t": 2, "o": 3}, [("t", "o")], unk_token="[unk]")
    )
    made.model.fuse_unk = True
    made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace() if splits else None
    made.save(str(tmp_path / "tokenizer.json"))
    opened = open_tokenizer(tmp_path / "tokenizer.json")
    texts = ["", " ", "to", "é" * 300, "é" * 63 + "to" * 9, "é" * 64 + "to" * 9, "to " * 90]
    texts += ["  to" * 50, "é" * 70 + "t", "t" * 65, "\u1f98to" * 40]
    for text, (ids, n_bytes) in zip(texts, opened.measured(texts), strict=True):
        whole = opened.inner.encode(text, add_special_tokens=False)
        first = whole.token_to_chars(0)
        assert ids == whole.ids
        assert n_bytes == (len(text[: first[1]].encode()) if first else 0), text


def test_the_end_of_a_text_is_what_the_files_say(tmp_path):
    """The end follows from the files in their order of precedence, and never from a token's
    name."""
    path = words(tmp_path / "t", {"[unk]": 0, "to": 1, "</s>": 2}, added=("<eos>", "[END]"))
    opened = open_tokenizer(path)
    assert opened.ends() == () and opened.specials == {3: "<eos>", 4: "[END]"}
    for name, content, expected in (
        ("special_tokens_map.json", {"eos_token": {"content": "[END]"}}, (4,)),
        ("tokenizer_config.json", {"eos_token": "to"}, (1,)),
        ("config.json", {"text_config": {"eos_token_id": 2}}, (2,)),
        ("config.json", {"eos_token_id": 1, "text_config": {"eos_token_id": 2}}, (1,)),
        ("generation_config.json", {"eos_token_id": [4, 3]}, (4, 3)),
        ("tokens.json", {"eos": None, "ends": [1, 2]}, (1, 2)),
    ):
        (path.parent / name).write_text(json.dumps(content))
        assert opened.ends() == expected, name
    (path.parent / "tokens.json").write_text('{"ends": ["nowhere"]}')
    with pytest.raises(
        DataError, match="tokens.json: ends is 'nowhere', which is no token of .*tokenizer.json"
    ):
        opened.ends()


def test_tokens_that_only_the_companions_have(tmp_path):
    """Ids are those of transformers' AutoTokenizer."""
    path = words(tmp_path / "t", {"[unk]": 0, "<": 1, "one": 2, "two": 3, "three": 4, "im": 5})
    listed = {
        "6": {
            "content": "<|im_end|>",
            "special": True,
            "normalized": False,
            "lstrip": False,
            "rstrip": False,
        }
    }
    for name, about, special in (
        ("added_tokens.json", {"<|im_end|>": 6}, {}),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": listed, "eos_token": "<|im_end|>"},
            {6: "<|im_end|>"},
        ),
    ):
        (path.parent / name).write_text(json.dumps(about))
        opened = open_tokenizer(path)
        assert opened.encode(["one two <|im_end|> three"]) == [[2, 3, 6, 4]], name
        assert (opened.vocab, opened.specials, opened.ends()) == (7, special, tuple(special)), name
    listed["6"]["special"] = False
    (path.parent / name).write_text(json.dumps({"added_tokens_decoder": listed}))
    added = words(
        tmp_path / "t",
        {"[unk]": 0, "<": 1, "one": 2, "two": 3, "three": 4, "im": 5},
        added=("<|im_end|>",),
    )
    assert open_tokenizer(added).specials == {}, "tokenizer_config.json comes first"
    listed["7"] = listed.pop("6")
    (path.parent / name).write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(
        DataError,
        match=r"tokenizer_config.json lists the token '<\|im_end\|>' as 7, and by .* it is 6",
    ):
        open_tokenizer(path)
    (path.parent / name).write_text(json.dumps({"added_tokens_decoder": [1]}))
    with pytest.raises(DataError, match="tokenizer_config.json lists no tokens by their ids"):
        open_tokenizer(path)
    (path.parent / name).write_text(
        json.dumps({"added_tokens_decoder": None, "eos_token": {"content": ["no text"]}})
    )
    assert open_tokenizer(path).vocab == 7, "by added_tokens.json"


def test_a_tokenizer_next_to_another_uses_none_of_its_files(tmp_path, capsys):
    other = words(tmp_path / "t", {"[unk]": 0, "to": 1})
    (other.parent / "tokenizer_config.json").write_text('{"eos_token": "to"}')
    own = other.parent / "mine.json"
    own.write_bytes(other.read_bytes())
    assert open_tokenizer(own).ends() == (1,) and len(tokenizer_lib.read_files(own)) == 2, (
        "one tokenizer by two names"
    )
    own.write_bytes(words(tmp_path / "m", {"[unk]": 0, "be": 1, "to": 2}).read_bytes())
    assert open_tokenizer(own).ends() == ()
    assert tokenizer_lib.read_files(own) == {"tokenizer.json": own.read_bytes()}
    assert (
        "mine.json lies beside another tokenizer.json, whose are tokenizer_config.json"
        in capsys.readouterr().err
    )


def test_the_name_of_a_special_token_in_a_text(tmp_path):
    path = words(tmp_path / "t", {"[unk]": 0, "to": 1, "eos": 2, "<": 3, ">": 4}, added=("<eos>",))
    assert open_tokenizer(path).encode(["to <eos>"]) == [[1, 5]]
    assert open_tokenizer(path, specials=False).encode(["to <eos>"]) == [[1, 3, 2, 4]]


@pytest.mark.parametrize("kind", ["blanks between words", "blanks before words"])
def test_a_continuation_keeps_the_blank_before_it(tmp_path, kind):
    path = words(tmp_path / "t", {"[unk]": 0, "to": 1, "be": 2})
    if kind == "blanks before words":
        made = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({"[unk]": 0, "▁to": 1, "▁be": 2}, unk_token="[unk]")
        )
        made.decoder, made.pre_tokenizer = (
            tokenizers.decoders.Metaspace(),
            tokenizers.pre_tokenizers.Metaspace(),
        )
        made.save(str(path))
    opened = open_tokenizer(path)
    prompt = opened.encode(["to"])[0]
    assert tokenizer_lib.continuation(opened.decode, prompt, [2, 1]) == " be to"
    assert tokenizer_lib.continuation(opened.decode, prompt, []) == ""
    assert tokenizer_lib.continuation(opened.decode, prompt, [2, 1], "to ") == "be to", (
        "the prompt has the blank already"
    )
    assert tokenizer_lib.continuation(opened.decode, prompt, [2], "To") == " be", (
        "as the tokenizer does not say it"
    )


def test_invalid_tokenizer_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(
        DataError, match="tokenizer.json cannot be read as a tokenizer.json of Hugging Face"
    ):
        open_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="nowhere does not exist"):
        open_tokenizer(tmp_path / "nowhere")


def test_a_number_that_does_not_fit_is_an_error():
    assert narrowed(np.array([0, 65535]), np.uint16, "x").dtype == np.uint16
    assert narrowed(np.empty(0, np.int64), np.uint16, "x").shape == (0,)
    for wrong in ([65536], [-1]):
        with pytest.raises(DataError, match="the ids are .*; uint16 holds 0 to 65535"):
            narrowed(np.array(wrong), np.uint16, "the ids")


def narrow(node: ast.AST) -> bool:
    """Whether a node casts an array to an integer of at most 32 bits without a check."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    of, name = node.func.value, node.func.attr
    if isinstance(of, ast.Name) and of.id == "jnp":
        return False
    arguments = [*node.args[1:], *(k.value for k in node.keywords if k.arg == "dtype")]
    if name == "astype":
        arguments = node.args
    elif (
        name not in ("asarray", "ascontiguousarray")
        or not node.args
        or isinstance(node.args[0], ast.List)
    ):
        return False
    kinds = {
        a.attr if isinstance(a, ast.Attribute) else a.value if isinstance(a, ast.Constant) else ""
        for a in arguments
    }
    of_jax = any(
        isinstance(a, ast.Attribute) and isinstance(a.value, ast.Name) and a.value.id == "jnp"
        for a in arguments
    )
    names = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32)}
    names |= {
        f"{order}{kind}{width}" for order in ("", "<", ">") for kind in "iu" for width in "124"
    }
    return bool(kinds & names) and not of_jax


def test_every_narrowing_cast_of_ids_and_counts_is_checked():
    """Unchecked casts are on a list, with the reason."""
    found = {}
    for path in (*(ROOT / "loaders").rglob("*.py"), *(ROOT / "jaxtrain").rglob("*.py")):
        if lines := [node.lineno for node in ast.walk(ast.parse(path.read_text())) if narrow(node)]:
            found[str(path.relative_to(ROOT))] = lines
    assert {name: len(lines) for name, lines in found.items()} == {
        name: n for name, (n, _) in CASTS.items() if n
    }, found


def test_a_tokenizer_is_read_in_one_module():
    users = [p for top in ("loaders", "jaxtrain", "configs") for p in (ROOT / top).rglob("*.py")]
    assert [p.name for p in users if "tokenizers.Tokenizer.from_" in p.read_text()] == [
        "tokenizer.py"
    ]
