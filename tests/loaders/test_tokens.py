"""Packing loses nothing and does not cut a document that fits. Rows are a pure function of
position, and text is read as nanoGPT reads it."""

from dataclasses import replace

import numpy as np
import pytest

from loaders.base import DataError, Rows
from loaders.text import packing, token_files, tokens
from tests.support.documents import CONTEXT, config_of, corpus


def read(config, *, batch=8, n=None, split="train", seed=0, start=0, ranges=None):
    """Maps each field to the rows of n batches (without n: of a test pass), in order."""
    loader = tokens.make_loader(
        config, split=split, rows=Rows(batch, ranges or ((0, batch),)), seed=seed
    )
    loader.seek(start)
    batches = [b for _, b in zip(range(loader.n_batches if n is None else n), loader, strict=False)]
    return {
        name: np.concatenate([x for _, b in batches for x in b[name]])
        for name in loader.element_spec
    }


def pairs_of(rows):
    """The sorted (position, token, target) of all places that count."""
    at = rows["mask"] > 0
    return sorted(
        zip(
            rows["positions"][at].tolist(),
            rows["tokens"][at].tolist(),
            rows["targets"][at].tolist(),
            strict=True,
        )
    )


def expected_pairs(documents):
    return sorted(
        (i % CONTEXT, int(d[i]), int(d[i + 1])) for d in documents for i in range(len(d) - 1)
    )


def test_an_epoch_holds_every_prediction_of_every_document_once(tmp_path):
    documents = corpus(tmp_path / "x")
    config = config_of(tmp_path / "x")
    rows = read(config, n=200)
    assert rows["epoch"].max() >= 2
    for epoch in (0, 1):
        of = {name: x[rows["epoch"] == epoch] for name, x in rows.items()}
        assert pairs_of(of) == expected_pairs(documents)
    first, second = (rows["index"][rows["epoch"] == e].tolist() for e in (0, 1))
    assert first != second and len(first) != 0


def test_rows_hold_whole_documents_and_the_next_token_as_target(tmp_path):
    """Segments are whole documents, one after the other. A target is the next token of its own
    document, and no document that fits is cut."""
    documents = corpus(tmp_path / "x")
    rows = read(config_of(tmp_path / "x"), n=20)
    texts = {d.tobytes() for d in documents}
    whole = {n: 0 for n in ("fits", "cut")}
    for t, y, p, s, m in zip(
        *(rows[n] for n in ("tokens", "targets", "positions", "segments", "mask")), strict=True
    ):
        assert (np.diff(s[s > 0]) >= 0).all() and (s[: (s > 0).sum()] > 0).all()
        np.testing.assert_array_equal(m, s > 0)
        assert not t[s == 0].any() and not y[s == 0].any() and not p[s == 0].any()
        for segment in range(1, s.max() + 1):
            at = np.flatnonzero(s == segment)
            np.testing.assert_array_equal(p[at], np.arange(len(at)))
            np.testing.assert_array_equal(t[at[1:]], y[at[:-1]])
            document = np.append(t[at], y[at[-1]]).astype(np.uint16).tobytes()
            whole["fits" if document in texts else "cut"] += 1
            assert document in texts or any(
                document in text and len(text) > 2 * (CONTEXT + 1) for text in texts
            )
    assert whole["fits"] > 40 and whole["cut"] > 40


def test_best_fit_is_best_fit_decreasing():
    """The result is compared with the plain rule, one length after the other."""
    rng = np.random.default_rng(0)
    for capacity in (1, 7, 50, 300):
        for n in (0, 1, 40, 400):
            lengths = rng.integers(1, capacity + 1, n)
            found, n_bins = packing.best_fit(lengths, capacity)
            room: list[int] = []
            for size in sorted(lengths.tolist(), reverse=True):
                fits = [r for r in room if r >= size]
                if fits:
                    room.remove(min(fits))
                room.append((min(fits) if fits else capacity) - size)
            used = np.bincount(found, weights=lengths, minlength=n_bins)
            assert sorted((capacity - used).tolist()) == sorted(room)


def test_a_row_has_no_more_documents_than_its_limit_and_none_is_lost(tmp_path, caplog):
    """Documents of two to five tokens, of which a row of 32 places would hold up to 32."""
    documents = corpus(tmp_path / "x", longest=6)
    unlimited = read(config_of(tmp_path / "x"), n=1, batch=8)
    assert unlimited["segments"].max() > 4
    config = config_of(tmp_path / "x", documents=4)
    loader = tokens.make_loader(config, split="train", rows=Rows(8, ((0, 8),)), seed=0)
    with caplog.at_level("INFO", "jaxtrain"):
        rows = read(config, n=40)
    assert rows["segments"].max() == 4
    of_epoch = {name: x[rows["epoch"] == 0] for name, x in rows.items()}
    assert pairs_of(of_epoch) == expected_pairs(documents)
    # the longest ones stay, so that a row of few documents is as full as it can be
    assert np.diff(of_epoch["mask"].sum(1)).any() and of_epoch["mask"].sum(1).max() == 16
    [padded] = [line for line in caplog.messages if "are padding, since" in line]
    assert padded.startswith("64.7 % of the places") and "at most 4 documents" in padded
    of_epochs = [line for line in caplog.messages if line.startswith("up to the end of epoch")]
    assert len(of_epochs) > 1 and "a row has at most 4 (data.documents)" in of_epochs[0]
    next(loader)
    [moved] = loader.diagnostics()["moved_documents"]
    assert 0 < moved < len(documents)
    assert tokens.dataset_info(config)["documents"] == 4
    assert loader.order["documents"] == 4


@pytest.mark.parametrize(
    ("mean", "context", "most"),
    [
        (600, 1024, 32),
        (600, 8192, 64),
        (600, 32768, 128),
        (40, 2048, 128),
        (12, 1024, None),
        (12, 8192, None),
        (12, 131072, None),
        (250, 32768, 128),
        (2000, 131072, 128),
    ],
)
def test_the_limit_of_documents_by_default_pads_little(mean, context, most):
    """It does not grow with the context, since the kernel's numbers grow with both. None: such a
    limit would pad much, and there is none."""
    rng = np.random.default_rng(0)
    lengths = 1 + np.clip(rng.lognormal(np.log(mean) - 0.4, 0.9, 16_384), 2, None).astype(int)
    limit = packing.limit_of([lengths], [1.0], context, 16_384)
    assert limit == (most or context)
    rows = [len(packing.pack(lengths, context, x).stops) for x in (limit, context)]
    assert 1 - rows[1] / rows[0] <= max(packing.MUCH, context / (context + packing.LONG))
    # a source of few rows does not decide it
    both = [np.full(16_384, context // 2), lengths]
    assert packing.limit_of(both, [999.0, 1.0], context, 16_384) == 32


@pytest.mark.parametrize(
    ("packing", "context", "most"),
    [("best_fit", 1024, 64), ("best_fit", 16, 16), ("concat", 1024, 1), ("random", 1024, 1)],
)
def test_the_limit_of_documents_of_a_row(packing, context, most, tmp_path):
    corpus(tmp_path / "x")
    config = config_of(tmp_path / "x", packing=packing, context=context, window=1000)
    assert tokens.dataset_info(config)["documents"] == most
    [loader] = (tokens.make_loader(config, split="train", rows=Rows(8, ((0, 8),)), seed=0),)
    # without a limit rows are those that they were before there was one
    assert loader.order.get("documents") == (64 if most == 64 else None)


def test_a_limit_without_packing_is_an_error(tmp_path):
    corpus(tmp_path / "x")
    for way in ("concat", "random"):
        config = config_of(tmp_path / "x", packing=way, documents=5)
        [(field, problem)] = config.validate()
        assert field == "documents" and "'best_fit'" in problem


def test_a_limit_that_no_row_reaches_changes_no_row(tmp_path):
    corpus(tmp_path / "x")
    found, expected = (read(config_of(tmp_path / "x", documents=n), n=9) for n in (16, 32))
    for name, x in found.items():
        np.testing.assert_array_equal(x, expected[name])


@pytest.mark.parametrize("packing", tokens.PACKINGS)
def test_a_batch_depends_only_on_its_position(tmp_path, packing):
    """Row number s is the same for any start, any batch size and any split over processes."""
    corpus(tmp_path / "a")
    corpus(tmp_path / "b", seed=1, n=90)
    sources = tuple(
        tokens.Source(str(tmp_path / name), share=share) for name, share in (("a", 2.0), ("b", 1.0))
    )
    config = replace(config_of(tmp_path / "a", packing=packing), sources=sources)
    whole = read(config, n=24)
    others = (
        (read(config, start=18, n=6), slice(18 * 8, None)),
        (read(config, batch=24, n=8), slice(None)),
        (read(config, start=5, n=1, ranges=((2, 4), (6, 8))), np.r_[42:44, 46:48]),
    )
    for part, at in others:
        for name, x in part.items():
            np.testing.assert_array_equal(x, whole[name][at], err_msg=name)
    assert set(whole["source"]) == {0, 1}
    other = read(config, n=24, seed=1)
    assert (other["tokens"] != whole["tokens"]).any()


def test_the_test_split_is_read_once_in_order(tmp_path):
    documents = corpus(tmp_path / "x" / "test", n=50)
    corpus(tmp_path / "x" / "train", n=100, seed=1)
    rows = read(config_of(tmp_path / "x"), split="test", batch=7)
    assert pairs_of(rows) == expected_pairs(documents)
    used = rows["weight"].sum()
    assert (rows["weight"] == (np.arange(len(rows["weight"])) < used)).all()
    assert (rows["index"][rows["weight"] == 0] == -1).all() and not rows["mask"][
        rows["weight"] == 0
    ].any()
    stream = np.concatenate(documents)
    rows = read(config_of(tmp_path / "x", packing="concat"), split="test", batch=7)
    at = rows["mask"] > 0
    np.testing.assert_array_equal(rows["tokens"][at], stream[:-1])
    np.testing.assert_array_equal(rows["targets"][at], stream[1:])


def test_without_a_test_folder_documents_are_held_out(tmp_path):
    corpus(tmp_path / "x")
    config = config_of(tmp_path / "x", test_share=0.2)
    info = tokens.dataset_info(config)
    (n_train,), (n_test,) = info["n_train"], info["n_test"]
    assert n_train + n_test == 300 and 30 < n_test < 90
    assert info["vocab"] == 1000 and info["context"] == CONTEXT and info["bytes_per_token"] == 3.0


TEXT = "to be, or not to be: that is the question. naïve, ünd 東京!\n" * 20


def test_a_text_is_characters_and_its_end_is_for_testing(tmp_path):
    (tmp_path / "x.txt").write_text(TEXT)
    config = config_of(tmp_path / "x.txt", packing="random", test_share=0.1)
    info = tokens.dataset_info(config)
    n = int(len(TEXT) * 0.9)
    assert info["symbols"] == "".join(sorted(set(TEXT))) and info["vocab"] == len(set(TEXT))
    assert info["bytes_per_token"] == pytest.approx(
        len(TEXT[n + 1 :].encode()) / len(TEXT[n + 1 :])
    )
    rows = read(config, n=20)
    for t, y in zip(rows["tokens"], rows["targets"], strict=True):
        text = "".join(info["symbols"][i] for i in [*t, y[-1]])
        assert text in TEXT[:n] and text[1:] == "".join(info["symbols"][i] for i in y)
    assert len(set(map(bytes, rows["tokens"]))) > 30
    rows = read(config, split="test")
    at = rows["mask"] > 0
    assert "".join(info["symbols"][i] for i in rows["targets"][at]) == TEXT[n + 1 :]
    byte_rows = read(replace(config, text="bytes"), split="test")
    encoded = TEXT.encode()
    assert (
        bytes(byte_rows["targets"][byte_rows["mask"] > 0].tolist())
        == encoded[int(len(encoded) * 0.9) + 1 :]
    )


def test_a_state_changes_with_what_changes_the_rows(tmp_path):
    corpus(tmp_path / "a")
    corpus(tmp_path / "b", seed=1)

    def state(config, seed=0):
        return tokens.make_loader(config, split="train", rows=Rows(8, ((0, 8),)), seed=seed).state(
            5
        )

    base = config_of(tmp_path / "a")
    others = [
        replace(base, context=16),
        replace(base, window=32),
        replace(base, packing="concat"),
        config_of(tmp_path / "b"),
    ]
    states = [
        state(base),
        state(base, seed=1),
        *map(state, others),
        state(replace(base, test_share=0.1)),
    ]
    assert len({str(s) for s in states}) == len(states)
    assert state(base) == states[0] and states[0]["position"] == 5


def test_diagnostics_report_shares_and_passes(tmp_path):
    corpus(tmp_path / "a")
    corpus(tmp_path / "b", seed=1, n=48)
    sources = tuple(
        tokens.Source(str(tmp_path / name), share=share) for name, share in (("a", 3.0), ("b", 1.0))
    )
    loader = tokens.make_loader(
        replace(config_of(tmp_path / "a"), sources=sources),
        split="train",
        rows=Rows(64, ((0, 64),)),
        seed=0,
    )
    masks = [next(loader)[1]["mask"][0] for _ in range(20)]
    assert 1 - sum(mask.sum() for mask in masks) / (20 * 64 * CONTEXT) < 0.05, "of padding"
    found = loader.diagnostics()
    np.testing.assert_allclose(found["share"], [0.75, 0.25], atol=0.05)
    assert found["wanted_share"] == [0.75, 0.25] and found["epoch"][1] > found["epoch"][0]


def test_errors_are_named(tmp_path):
    def fails(config, match):
        with pytest.raises(DataError, match=match):
            tokens.make_loader(config, split="train", rows=Rows(8, ((0, 8),)), seed=0)

    (tmp_path / "empty").mkdir()
    corpus(tmp_path / "a")
    fails(config_of(tmp_path / "nowhere"), r"sources\[0\].path is .*nowhere.*does not exist")
    fails(config_of(tmp_path / "empty"), "has no tokens.json; it holds nothing.*jaxtrain tokens")
    fails(tokens.Config(), "sources is empty")
    fails(
        config_of(tmp_path / "a", packing="first_fit"),
        "packing is 'first_fit'; expected one of: best_fit",
    )
    fails(
        config_of(tmp_path / "a", packing="concat", context=10**6),
        "too few for a context of 1000000",
    )
    fails(config_of(tmp_path / "a", packing="random", exhausted="stop"), "never exhaust")
    (tmp_path / "single").mkdir()
    single = [np.ones(1, np.uint16)] * 5
    entry = token_files.write_shard(tmp_path / "single", "00000", single, [3] * 5, np.uint16)
    token_files.write_about(tmp_path / "single", vocab=9, eos=None, tokenizer=None, shards=[entry])
    # which packing would search for a row of without end
    fails(config_of(tmp_path / "single"), r"sources\[0\].path=.*single has no document of two")
    corpus(tmp_path / "torn")
    (tmp_path / "torn" / "00001.tokens").write_bytes(b"xx")
    fails(config_of(tmp_path / "torn"), "00001.tokens has 2 bytes, but tokens.json names")
    corpus(tmp_path / "b", vocab=500)
    corpus(tmp_path / "c")
    sources = tuple(tokens.Source(str(tmp_path / name)) for name in "bc")
    fails(
        replace(config_of(tmp_path / "b"), sources=sources),
        r"different vocabularies: \[500, 1000\]",
    )


def test_sources_whose_ids_mean_other_characters_are_refused(tmp_path):
    """The sources both have eight symbols."""
    for name, text in (("a", "abcdefgh\n"), ("b", "klmnopqr\n"), ("c", "hgfedcba\n")):
        (tmp_path / f"{name}.txt").write_text(text * 50)

    def both(*names):
        return config_of(
            "", sources=tuple(tokens.Source(str(tmp_path / f"{n}.txt")) for n in names)
        )  # noqa: E731

    assert tokens.dataset_info(both("a", "c"))["symbols"] == "\nabcdefgh"
    with pytest.raises(
        tokens.DataError,
        match="b.txt have other tokens for one id; make their tokens with one tokenizer",
    ):
        tokens.dataset_info(both("a", "b"))
