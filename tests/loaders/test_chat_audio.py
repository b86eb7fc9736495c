"""Conversations with sound are laid out as the original does it. Every recording is read once, in
few shapes, and nothing is lost silently."""

import dataclasses
import json
import os
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from jaxtrain.workloads.audio_language.commands import encode_audio
from loaders import buckets
from loaders.base import DataError, Rows
from loaders.chat import chat_audio, chat_examples, chatml, codec
from tests.support import chat

DATA = pathlib.Path(__file__).parent.parent / "data" / "higgs"


def one(batch=4, ranges=None):
    return Rows(batch, ranges or ((0, batch),))


@pytest.fixture(scope="module")
def numbers():
    return np.load(DATA / "forward.npz")


def test_the_delay_pattern_equals_the_originals_and_is_undone():
    g = np.load(DATA / "delay.npz")
    # the beginning token is the first after the codes
    size = json.loads((DATA / "config.json").read_text())["delay_bos"]
    for i in range(len(g["shapes"])):
        codes = g[f"case{i}.codes"]
        columns = chatml.delayed(codes, size)
        np.testing.assert_array_equal(columns.T, g[f"case{i}.delayed"])
        np.testing.assert_array_equal(chatml.delayed_labels(codes, size).T, g[f"case{i}.labels"])
        np.testing.assert_array_equal(chatml.undelayed(columns), codes)
        plain = chatml.delayed(codes, size, delay=False)
        np.testing.assert_array_equal(plain.T, g[f"case{i}.with_bos_eos"])
        np.testing.assert_array_equal(chatml.undelayed(plain, delay=False), codes)


def test_a_conversation_is_rendered_as_the_original_does():
    for case in json.loads((DATA / "chatml.json").read_text())["samples"]:
        found = [
            (p.kind, p.text, p.is_label, *([p.clip.url] if p.clip else []))
            for p in chatml.render(case["sample"])
        ]
        keys = ("kind", "text", "is_label", "audio_url")
        assert found == [tuple(s[key] for key in keys if key in s) for s in case["segments"]]


def test_a_recipient_is_a_label_wherever_it_stands():
    messages = [
        {"role": "assistant", "content": "a", "recipient": "tool"},
        {"role": "user", "content": "b"},
    ]
    found = {p.kind: p for p in chatml.render({"messages": messages, "start_index": 2})}
    assert (
        found["recipient"].is_label
        and found["recipient"].text == "tool<|recipient|>"
        and not found["text"].is_label
    )


def test_places_and_labels_equal_the_originals(numbers):
    """The predicted codes are those of the recording at that place, even if a reference precedes
    it."""
    golden = json.loads((DATA / "config.json").read_text())
    ids, size, codebooks = (
        golden[name] for name in ("special_token_ids", "audio_codebook_size", "audio_num_codebooks")
    )
    segments = numbers["expanded.audio_out_segment"]
    for i in range(len(segments)):
        audios = np.split(
            numbers[f"sample{i}.codes"], np.cumsum(numbers[f"sample{i}.code_lengths"])[:-1], axis=1
        )
        tokens, labels = numbers[f"sample{i}.input_ids"], numbers[f"sample{i}.label_ids"]
        x = chatml.expand(
            tokens,
            labels,
            audios,
            audio_in=ids["<|AUDIO|>"],
            audio_out=ids["<|AUDIO_OUT|>"],
            size=size,
            codebooks=codebooks,
        )
        n = len(x.tokens)
        assert n == numbers["expanded.attention_mask"][i].sum()
        for name in ("tokens", "codes", "text_labels", "audio_labels"):
            np.testing.assert_array_equal(
                getattr(x, name), numbers[f"expanded.{name}"][i, :n], err_msg=name
            )
        t = chatml.targets(x)
        for at, wanted in zip(t.audio_at, t.audio, strict=True):
            assert segments[i, at] == segments[i, at + 1] >= 0, "never over the edge of a recording"
            known = wanted != chatml.NONE
            np.testing.assert_array_equal(wanted[known], x.codes[at + 1][known])
        np.testing.assert_array_equal(t.text, x.tokens[t.text_at + 1])
        shape = tuple(
            int(v) + 3
            for v in ((x.recording < 0).sum(), (x.recording >= 0).sum(), len(t.text), len(t.audio))
        )
        row = chatml.row(x, shape, 7)
        np.testing.assert_array_equal(row["slot"][row["place"]], np.arange(len(row["slot"])))
        both = np.concatenate([row["text"], np.full(shape[1], -1)])[row["slot"]][:n]
        np.testing.assert_array_equal(np.where(x.recording < 0, x.tokens, -1), both)


def test_every_recording_is_read_and_decoded_once(tmp_path, monkeypatch):
    """All examples, splits, epochs and processes share one decoding of a recording. A changed
    recording is encoded again."""
    config = chat.corpus(tmp_path, n=12)
    decoded = []
    monkeypatch.setattr(
        codec._rust, "decode", lambda data, *a: decoded.append(len(data)) or chat.DECODE(data, *a)
    )
    for _ in range(2):
        loader = chat_audio.make_loader(config, split="train", rows=one(), seed=0)
        for _ in range(2 * loader.n_batches):
            next(loader)
        for _, _ in chat_audio.make_loader(config, split="test", rows=one(), seed=0):
            pass
        chat.forget()
    assert len(decoded) == 3, "three recordings, which twelve examples share"
    kept = sorted(tmp_path.glob("*.npy"))
    assert [path.name.split(".rvq")[0] for path in kept] == ["0.wav", "1.wav", "2.wav"]
    wave, rate = soundfile.read(tmp_path / "0.wav")
    soundfile.write(
        tmp_path / "0.wav", np.random.default_rng(0).uniform(-0.5, 0.5, wave.shape), rate
    )
    later = kept[0].stat().st_mtime_ns + 10**9
    os.utime(tmp_path / "0.wav", ns=(later, later))
    again = chat_audio.make_loader(config, split="train", rows=one(), seed=0)
    assert len(decoded) == 4
    assert again.fingerprint != loader.fingerprint and again.order == loader.order, (
        "a resume would train on other sound"
    )


def test_a_part_of_a_recording_is_cut_from_its_codes(tmp_path):
    config = chat.corpus(tmp_path, n=2)
    tools = chat_examples.tools_of(config, config.manifest)
    chat_examples.encode_all(config, config.manifest)
    whole = tools.codes(chatml.Clip("0.wav"))
    np.testing.assert_array_equal(
        tools.codes(chatml.Clip("0.wav", offset=0.2, duration=0.4)), whole[:, 5:15]
    )
    raw = chat.base64_of(tmp_path / "0.wav")
    codec.encode(codec.Source(None, raw), chat_examples.open_codec(config), str(tmp_path / "cache"))
    found = np.load(next((tmp_path / "cache").glob("*.npy")))
    np.testing.assert_array_equal(found, whole)
    with pytest.raises(chatml.ExampleError, match="offset 9"):
        tools.codes(chatml.Clip("0.wav", offset=9.0))


def test_an_epoch_has_every_sample_once_in_few_shapes(tmp_path):
    """Each bucket's pass covers its examples, for any split of the rows over processes. A seek
    leads to the same batches."""
    config = chat.corpus(tmp_path, n=40, buckets=3, test_share=0.0)
    loader = chat_audio.make_loader(config, split="train", rows=one(), seed=3)
    info = chat_audio.dataset_info(config)
    assert len(loader.buckets) == 3 == len(info["buckets"]) and loader.buckets[
        -1
    ] == chat_audio.element_spec(config)
    assert sum(b[-1] for b in info["buckets"]) == pytest.approx(1)
    seen, batches = {}, []
    for position in range(60):
        shape = loader.bucket_at(position)
        after, batch = next(loader)
        assert after == position + 1
        batches.append(batch)
        for name, field in loader.buckets[shape].items():
            assert (
                batch[name][0].shape == (4, *field.shape) and batch[name][0].dtype == field.dtype
            ), name
        for index, epoch in zip(batch["index"][0], batch["epoch"][0], strict=True):
            seen.setdefault((shape, int(epoch)), []).append(int(index))
    first = [set(seen[shape, 0]) for shape in range(3)]
    assert sum(map(len, first)) == 40 and set.union(*first) == set(range(40))
    for (shape, _), indices in seen.items():
        assert len(set(indices)) == len(indices) and set(indices) <= first[shape]
    halves = [
        chat_audio.make_loader(config, split="train", rows=one(4, r), seed=3)
        for r in (((0, 2),), ((2, 3), (3, 4)))
    ]
    for half in halves:
        half.seek(50)
    for position in range(50, 60):
        parts = [next(half)[1] for half in halves]
        for name, whole in batches[position].items():
            np.testing.assert_array_equal(
                np.concatenate([x for part in parts for x in part[name]]), whole[0], err_msg=name
            )


def test_an_evaluation_has_every_sample_once_and_padding_that_counts_for_nothing(tmp_path):
    config = chat.corpus(tmp_path, n=23, buckets=2, test_share=0.5)
    loader, found = chat_audio.make_loader(config, split="test", rows=one(), seed=0), []
    for _, batch in loader:
        weight = batch["weight"][0]
        found += batch["index"][0][weight > 0].tolist()
        for name in ("text_target", "audio_target"):
            assert (batch[name][0][weight == 0] < 0).all()
    train = chat_audio.make_loader(config, split="train", rows=one(), seed=0)
    ids = {i for _ in range(40) for i in next(train)[1]["index"][0].tolist()}
    assert (
        sorted(found) == sorted(set(found))
        and set(found) | ids == set(range(23))
        and not set(found) & ids
    )


def test_scales_make_the_means_of_the_global_batch(tmp_path):
    config = chat.corpus(tmp_path, n=20)
    _, batch = next(chat_audio.make_loader(config, split="train", rows=one(), seed=0))
    scale = batch["label_scale"][0]
    assert (scale == scale[0]).all()
    n_text, n_audio = ((batch[name][0] >= 0).sum() for name in ("text_target", "audio_target"))
    assert scale[0, 0] == pytest.approx(4 / n_text)
    # over 2 codebooks, each with half of the labels
    np.testing.assert_allclose(scale[0, 1:], 4 / n_audio)


def test_buckets_are_those_with_the_least_padding():
    rng = np.random.default_rng(0)
    sizes = np.concatenate([rng.integers(1, 40, (9, 2)), rng.integers(200, 260, (9, 2))])
    sizes = np.concatenate([sizes, sizes], axis=1)
    groups = buckets.partition(sizes, 2)
    assert [sorted(g.tolist()) for g in groups] == [list(range(9)), list(range(9, 18))]

    def cost(groups):
        return sum(buckets.round_up(sizes[g, :2].max(0)).sum() * len(g) for g in groups)

    costs = [cost(buckets.partition(sizes, n)) for n in range(1, 6)]
    assert costs == sorted(costs, reverse=True) and costs[1] < 0.7 * costs[0]
    by_length = np.argsort(sizes[:, :2].sum(1), kind="stable")
    best = min(
        cost([by_length[:a], by_length[a:b], by_length[b:]])
        for a in range(1, 17)
        for b in range(a + 1, 18)
    )
    assert costs[2] == best


def test_unusable_rows_are_left_out_and_counted_up_to_a_budget(tmp_path, caplog):
    config = chat.corpus(tmp_path, n=30, bad_budget=0.2)
    examples = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "broken.wav").write_bytes(b"RIFF but no sound")
    examples[3] = chat.says("broken.wav")
    examples[4] = chat.says("missing.wav")
    examples[7] = {"messages": [{"role": "narrator", "content": "x"}]}
    examples[8] = {"messages": [{"role": "user", "content": "no answer"}]}
    examples[9] = {"messages": [{"role": "assistant", "content": "x" * 5000}]}
    (tmp_path / "manifest.json").write_text(json.dumps(examples))
    loader = chat_audio.make_loader(config, split="train", rows=one(), seed=0)
    found = dict(loader.diagnostics()["bad_list"])
    assert sorted(found) == [3, 4, 7, 8, 9] and chat_audio.dataset_info(config)["n_bad"] == 5
    reasons = ("broken.wav", "missing.wav", "role", "no labels", "data.longest")
    for number, text in zip((3, 4, 7, 8, 9), reasons, strict=True):
        assert text in found[number] and f"example {number} is left out" in caplog.text
    seen = {i for _ in range(60) for i in next(loader)[1]["index"][0].tolist()}
    assert not seen & set(found)
    chat.forget()
    refusal = "5 of 30 examples cannot be used.*example 3: broken.wav.*4 more: --errors FILE"
    with pytest.raises(DataError, match=refusal) as error:
        chat_audio.dataset_info(dataclasses.replace(config, bad_budget=0.1))
    numbers = [int(text.split("example ")[1].split(":")[0]) for text in error.value.listed]
    assert numbers == [3, 4, 7, 8, 9]


def test_a_manifest_that_changed_is_read_again_in_the_same_process(tmp_path):
    """A notebook trains, its user changes the manifest, and it trains again."""
    config = chat.corpus(tmp_path, n=8, test_share=0.0)
    assert chat_audio.dataset_info(config)["n_train"] == 8
    examples = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(examples[:5]))
    assert chat_audio.dataset_info(config)["n_train"] == 5


def test_codes_that_were_made_elsewhere(tmp_path):
    """Codes as .npz, Parquet or Arrow, and codes from a custom function give the same batches."""
    config = chat.corpus(tmp_path, n=8)
    chat_examples.encode_all(config, config.manifest)
    tools = chat_examples.tools_of(config, config.manifest)
    codes = {f"{i}.wav": tools.codes(chatml.Clip(f"{i}.wav")) for i in range(3)}
    np.savez(tmp_path / "codes.npz", **codes)
    table = pa.table({"audio_url": list(codes), "codes": [x.tolist() for x in codes.values()]})
    pq.write_table(table, tmp_path / "codes.parquet")
    with (
        pa.OSFile(str(tmp_path / "codes.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    np.save(tmp_path / "all.npy", np.concatenate(list(codes.values()), axis=1))
    (expected,) = [next(chat_audio.make_loader(config, split="train", rows=one(), seed=0))[1]]
    other = dataclasses.replace(config, codec="", codebooks=2, codebook_size=chat.SIZE)
    for name in ("codes.npz", "codes.parquet", "codes.arrow"):
        _, found = next(
            chat_audio.make_loader(
                dataclasses.replace(other, codes=str(tmp_path / name)),
                split="train",
                rows=one(),
                seed=0,
            )
        )
        for field, x in expected.items():
            np.testing.assert_array_equal(found[field][0], x[0], err_msg=field)
    own = dataclasses.replace(
        other, codec="tests.support.chat:loudness", cache=str(tmp_path / "own")
    )
    loader = chat_audio.make_loader(own, split="train", rows=one(), seed=0)
    assert (
        len(list((tmp_path / "own").glob("*chat.loudness.npy"))) == 3
        and next(loader)[1]["codes"][0].max() > 0
    )
    with pytest.raises(DataError, match="at most|cannot be used"):
        chat_audio.dataset_info(
            dataclasses.replace(own, codebook_size=1, cache=str(tmp_path / "small"))
        )


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"manifest": "nowhere.json"}, "manifest", "not a file"),
        ({"codec": ""}, "codec", "jaxtrain train-codec"),
        ({"codec": "nowhere.npz"}, "codec", "does not exist"),
        ({"codec": "json:nothing"}, "codec", "name a function"),
        ({"bad_budget": 2.0}, "bad_budget", "[0, 1]"),
        ({"buckets": 0}, "buckets", "at least 1"),
        ({"tokenizer": ""}, "tokenizer", "empty"),
    ],
)
def test_errors_are_reported(tmp_path, changes, field, text):
    config = dataclasses.replace(chat.corpus(tmp_path, n=2), **changes)
    assert [(f, text in t) for f, t in config.validate()] == [(field, True)]


def test_a_tokenizer_without_the_special_tokens_is_refused(tmp_path):
    config = chat.corpus(tmp_path, n=2)
    text = pathlib.Path(config.tokenizer).read_text().replace("<|AUDIO_OUT|>", "<|SOUND_OUT|>")
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(DataError, match=r"no token <\|AUDIO_OUT\|>"):
        chat_audio.dataset_info(dataclasses.replace(config, tokenizer=str(tmp_path / "other.json")))


def test_wave_files_of_any_rate(tmp_path):
    """The codes of a recording are those of the sound, 25 a second, at any sample rate."""
    config = chat.corpus(tmp_path, n=2)
    rvq = chat_examples.open_codec(config)
    t = np.arange(48_000) / 48_000
    soundfile.write(tmp_path / "high.wav", np.sin(2 * np.pi * 440 * t), 48_000)
    wave, rate, _ = chat.DECODE((tmp_path / "high.wav").read_bytes())
    assert rvq.encode(wave, rate).shape == (2, 25)


def test_a_place_that_cannot_be_written_is_reported_with_the_remedy(tmp_path):
    config = chat.corpus(tmp_path, n=4)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="codes cannot be kept in .*file.*data.cache"):
        chat_audio.dataset_info(dataclasses.replace(config, cache=str(tmp_path / "file" / "codes")))


def test_recordings_that_are_encoded_already_are_counted_and_stay(tmp_path, capsys):
    """A second `jaxtrain encode-audio` reports the cached recordings, and exits with 0."""
    chat.corpus(tmp_path, n=12)
    command = [str(tmp_path / "manifest.json"), "--codec", str(tmp_path / "codec.npz")]
    assert encode_audio.main(command) == 0
    assert capsys.readouterr().out.startswith(
        "3 recordings encoded, 0 were there already, 0 could not be encoded; "
    )
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert encode_audio.main(command) == 0
    assert capsys.readouterr().out.startswith(
        "0 recordings encoded, 3 were there already, 0 could not be encoded; "
    )
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_names_that_no_file_can_have_are_refused_by_the_field() -> None:
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(DataError, match=r"^data\.tokenizer: "):
            chat_examples.tools_of(chat_examples.Config(manifest=name, tokenizer=name), name)
