"""jaxtrain review: access, the windows shown, answers that are stored at each key, and the page in
a real browser."""

import contextlib
import csv
import http.client
import io
import json
import os
import pathlib
import urllib.parse

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image

from jaxtrain import cli
from jaxtrain.workloads.bird.inference import InferenceError, embeddings, neighbours, review
from tests.support import chromium, corpus
from tests.support.birds import served, shown

RATE = 32_000
KEYS = ("file", "start", "end", "label", "answer", "asked", "score")


@pytest.fixture
def table(tmp_path):
    """Windows of two recordings, of two classes."""
    rows = [("file", "start", "end", "label", "score")]
    for n, name in enumerate(("a/x.wav", "b/y.flac")):
        (tmp_path / "recordings" / name).parent.mkdir(parents=True)
        soundfile.write(tmp_path / "recordings" / name, corpus.noise(n, 6.0, RATE), RATE)
        rows += [
            (name, i, i + 1.0, ("owl", "wren")[i % 2], round(0.95 - 0.1 * i - 0.03 * n, 3))
            for i in range(5)
        ]
    with open(tmp_path / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    return tmp_path / "table.csv"


@contextlib.contextmanager
def serving(table, out, **options):
    items = review.read(str(table), root=str(table.parent / "recordings"), **options)
    with served(items, out) as server:
        yield server


def ask(server, path, body=None, token=None, host="127.0.0.1"):
    """The status and content of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    token = server.token if token is None else token
    headers = {
        "Host": f"{host}:{server.server_port}",
        **({"X-Token": token} if body is not None else {}),
    }
    query = "" if body is not None else f"?token={urllib.parse.quote(token)}"
    connection.request(
        "POST" if body is not None else "GET",
        path + query,
        None if body is None else json.dumps(body),
        headers,
    )
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, (
        json.loads(content) if answer.headers["Content-Type"] == "application/json" else content
    )


def answers(path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_only_requests_with_the_token_are_answered_and_windows_are_named_by_number(table, tmp_path):
    with serving(table, tmp_path / "out.csv") as server:
        assert server.server_address[0] == "127.0.0.1"
        for path in ("/", "/item/0", "/sound/0", "/picture/0", "/open"):
            assert ask(server, path)[0] == 200
            assert (
                ask(server, path, token="x" * 32)[0] == 403
                and ask(server, path, token="")[0] == 403
            )
            assert ask(server, path, host="evil.example")[0] == 403, (
                "a page elsewhere that has its name lead here"
            )
        assert (
            ask(server, "/answer", {"number": 0, "answer": "yes", "label": ""}, token="wrong")[0]
            == 403
        )
        for path in (
            "/item/99",
            "/sound/99",
            "/sound/../../etc/passwd",
            "/item/-1",
            "/../table.csv",
            "/sound/0x0",
            "/x",
        ):
            assert ask(server, path)[0] == 404, path
        assert (
            ask(server, "http://[")[0] == 404 and ask(server, "http://[", token="wrong")[0] == 403
        ), "no address"
        for body in (
            [],
            {},
            {"number": "0", "answer": "yes", "label": ""},
            {"number": 0, "answer": "maybe", "label": ""},
            {"number": 0, "answer": "yes", "label": "x" * 300},
        ):
            assert ask(server, "/answer", body)[0] == 400, body
        assert (
            ask(server, "/answer", {"number": 0, "answer": "yes", "label": "x" * 20_000})[0] == 413
        )
        assert not (tmp_path / "out.csv").exists()


def test_sound_and_picture_are_of_the_window(table, tmp_path):
    with serving(table, tmp_path / "out.csv", order="table") as server:
        status, content = ask(server, "/sound/7")
        wave, rate = soundfile.read(io.BytesIO(content))
        whole, _ = soundfile.read(tmp_path / "recordings" / "b" / "y.flac")
        part = whole[1 * RATE : 4 * RATE]  # a second around the window from 2 to 3 s
        assert status == 200 and rate == RATE and len(wave) == len(part)
        assert np.corrcoef(wave, part)[0, 1] > 0.999
        picture = Image.open(io.BytesIO(ask(server, "/picture/7")[1]))
        assert picture.size[1] == 256 and picture.size[0] > 300 and np.asarray(picture).std() > 10


@pytest.mark.parametrize(
    ("rate", "tone"), [(8_000, 1_000.0), (44_100, 20_000.0), (384_000, 150_000.0)]
)
def test_a_picture_holds_all_that_the_recording_does(tmp_path, rate, tone):
    """The picture includes bats, too: it is not limited to the bands that an encoder hears. A
    window of 20 ms has a picture."""
    soundfile.write(
        tmp_path / "x.wav", 0.5 * np.sin(2 * np.pi * tone / rate * np.arange(rate // 2)), rate
    )
    for end in (0.5, 0.02):
        item = review.Item(str(tmp_path / "x.wav"), "x.wav", 0.0, end, "bat", 0.5, "")
        grey = np.asarray(Image.open(io.BytesIO(review.picture(item))), float)
        mel = lambda hz: 1127 * np.log(1 + hz / 700)  # noqa: E731
        # of the height, from the bottom
        at = (mel(tone) - mel(20)) / (mel(max(rate, 32_000) / 2) - mel(20))
        assert abs(1 - grey[:, 5:-5].mean(1).argmin() / 256 - at) < 0.02


def test_each_answer_is_saved_and_a_review_can_be_resumed(table, tmp_path):
    out = tmp_path / "out.csv"
    with serving(table, out, order="table") as server:
        ask(server, "/answer", {"number": 0, "answer": "yes", "label": ""})
        assert [[row[key] for key in KEYS] for row in answers(out)] == [
            ["a/x.wav", "0.0", "1.0", "owl", "yes", "owl", "0.9500"]
        ]
        ask(server, "/answer", {"number": 1, "answer": "no", "label": ""})
        shown = ask(server, "/answer", {"number": 2, "answer": "yes", "label": " barn  owl "})[1]
        assert shown["item"]["number"] == 3 and "barn owl" in shown["labels"]
        ask(server, "/answer", {"number": 0, "answer": "skip", "label": ""})  # a changed answer
    rows = {(row["start"], row["answer"]): row["label"] for row in answers(out)}
    assert rows == {("1.0", "no"): "", ("2.0", "yes"): "barn owl", ("0.0", "skip"): ""}
    with serving(table, out, order="table") as server:
        found = ask(server, "/open")[1]
        assert found["item"]["number"] == 3 and found["counts"] == {
            "items": 10,
            "yes": 1,
            "no": 1,
            "skip": 1,
        }
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with (
        pytest.raises(InferenceError, match="no table of answers"),
        serving(table, tmp_path / "other.csv"),
    ):
        pass


def test_windows_come_in_the_order_of_the_option(table):
    root = str(table.parent / "recordings")

    def scores(order):
        return [item.score for item in review.read(str(table), root=root, order=order)]

    assert scores("best") == sorted(scores("table"), reverse=True)
    assert [round(abs(x - 0.5), 3) for x in scores("uncertain")] == sorted(
        round(abs(x - 0.5), 3) for x in scores("table")
    )
    first = review.read(str(table), root=root, order="diverse")[:4]
    assert len({(item.name, item.label) for item in first}) == 4
    assert {item.label for item in review.read(str(table), root=root, label="owl")} == {"owl"}


def test_similar_windows_are_shown_with_their_answers(table, tmp_path, capsys):
    """Similarity is the cosine of embeddings of the same recordings, cut into other windows. No
    part of the window itself is shown."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 8))
    paths = [name for name in ("a/x.wav", "b/y.flac") for _ in range(12)]
    start = [0.5 * i for i in range(12)] * 2
    x[2 * 4] = x[12 + 2 * 1] + 0.01  # 4 s of x sound like 1 s of y
    emb = tmp_path / "emb"
    emb.mkdir()
    np.save(emb / "mean.npy", x.astype("f4"))
    np.save(emb / "weight.npy", np.ones(24, "f4"))
    ends = [s + 0.5 for s in start]
    rows = {"path": paths, "start": start, "end": ends, "clock": pa.array([None] * 24, pa.string())}
    pq.write_table(pa.table(rows), emb / "rows.parquet")
    about = {
        "version": 1,
        "done": 24,
        "rows": 24,
        "class_names": [],
        "multilabel": False,
        "encoder": "e",
    }
    (emb / "embeddings.json").write_text(
        json.dumps({**about, "root": str(tmp_path / "recordings")})
    )
    items = review.read(str(table), root=str(tmp_path / "recordings"))
    windows = [neighbours.Window(item.path, item.start, item.end) for item in items]
    near = neighbours.Neighbours([embeddings.read(emb)], windows)
    assert near.missing == 0
    session = review.Session(items, tmp_path / "out.csv", near)
    session.answer(4, "yes", "owl")
    shown = session.about(6)["similar"]
    assert (shown[0]["number"], shown[0]["answer"], shown[0]["said"]) == (
        4,
        "yes",
        "owl",
    ) and shown[0]["cosine"] > 0.99
    # the first half second of each window
    unit = x[::2] / np.linalg.norm(x[::2], axis=1, keepdims=True)
    unit = np.concatenate([unit[:5], unit[6:11]])
    expected = [int(i) for i in np.argsort(-(unit @ unit[6])) if i != 6][: review.NEIGHBOURS]
    assert [each["number"] for each in shown] == expected
    assert (
        session.about(6)["nearby"]
        and not review.Session(items, tmp_path / "out.csv").about(6)["similar"]
    )
    (emb / "embeddings.json").write_text(json.dumps({**about, "root": str(tmp_path)}))
    argv = [
        "review",
        str(table),
        "--root",
        str(tmp_path / "recordings"),
        "--out",
        str(tmp_path / "out.csv"),
    ]
    assert cli.main([*argv, "--embeddings", str(emb)]) == 2
    assert "holds none of the windows; embed their recordings" in capsys.readouterr().err


def test_a_hundred_thousand_windows(table, tmp_path):
    """A request reads each window a few times, and does not compare every pair."""
    looks = [0]

    class Items(list):
        def __getitem__(self, i):
            looks[0] += 1
            return super().__getitem__(i)

    item = review.read(str(table), root=str(tmp_path / "recordings"))[0]
    items = Items(item._replace(start=i / 100, end=i / 100 + 1) for i in range(100_000))
    session = review.Session(items, tmp_path / "out.csv")
    assert session.first_open() == 0 and len(session.about(50_000)["nearby"]) == review.NEIGHBOURS
    session.answer(0, "no")
    assert session.first_open() == 1 and session.counts()["no"] == 1
    assert 100_000 <= looks[0] < 1_000_000, looks


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("file,start,end,label\n../secret.wav,0,1,owl\n", "is not below"),
        ("file,start,end,label\nlink.wav,0,1,owl\n", "is not below"),
        ("file,start,end,label\nnone.wav,0,1,owl\n", "is not there"),
        ("file,start,end,label\na/x.wav,2,1,owl\n", "t.csv:2: the times 2.0 to 1.0 s"),
        ("file,label\na/x.wav,owl\n", "expected file, start and end"),
        ("file,start,end,label\n", "no line to review"),
    ],
)
def test_an_error_is_one_line(table, tmp_path, capsys, text, said):
    (tmp_path / "secret.wav").write_bytes(corpus.wav(0))
    (tmp_path / "recordings" / "link.wav").symlink_to(tmp_path / "secret.wav")
    (tmp_path / "t.csv").write_text(text)
    argv = [
        "review",
        str(tmp_path / "t.csv"),
        "--root",
        str(tmp_path / "recordings"),
        "--out",
        str(tmp_path / "out.csv"),
    ]
    assert cli.main(argv) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ") and said in told and told.count("\n") == 1


def test_a_port_in_use_is_one_line(table, tmp_path, capsys):
    with serving(table, tmp_path / "out.csv") as server:
        argv = [
            "review",
            str(table),
            "--root",
            str(tmp_path / "recordings"),
            "--port",
            str(server.server_port),
        ]
        assert cli.main([*argv, "--out", str(tmp_path / "out.csv")]) == 2
    assert "is in use" in capsys.readouterr().err


@pytest.mark.skipif(
    chromium.PROGRAM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)
def test_the_page_is_used_by_keys(table, tmp_path):
    out = tmp_path / "out.csv"
    with serving(table, out, order="table") as server, chromium.Browser() as browser:
        browser.open(server.address)
        browser.until(shown(0))
        assert browser.value("document.getElementById('label').textContent") == "owl?"
        browser.until("document.getElementById('sound').duration > 1.9")
        for number, key in enumerate("yns"):
            browser.press(key)
            browser.until(shown(number + 1))
        assert [row["answer"] for row in answers(out)] == ["yes", "no", "skip"]
        browser.press("c")
        browser.until("document.activeElement.id === 'name'")
        for key in "tit":  # letters of the name do not count as answers
            browser.press(key)
        browser.press("Enter")
        browser.until(shown(4))
        assert answers(out)[-1]["label"] == "tit" and answers(out)[-1]["answer"] == "yes"
        browser.press("ArrowLeft")
        browser.until(shown(3))
        browser.press("n")
        browser.until(shown(4))
        assert answers(out)[-1]["answer"] == "no" and len(answers(out)) == 4
        browser.press("ArrowRight")
        browser.until(shown(5))
        assert browser.value("document.getElementById('error').textContent") == ""
        if folder := os.environ.get("SCREENSHOTS"):
            browser.screenshot(pathlib.Path(folder) / "review.png")
    with (
        serving(table, out, order="table") as server,
        chromium.Browser(width=340, height=700) as browser,
    ):
        browser.open(server.address)
        browser.until(shown(4))
        assert browser.value("document.documentElement.scrollWidth") <= 340, (
            "nothing is cut off in a narrow window"
        )
        if folder := os.environ.get("SCREENSHOTS"):
            browser.screenshot(pathlib.Path(folder) / "review-narrow.png")
        browser.open(f"http://127.0.0.1:{server.server_port}/?token=wrong")
        browser.until("document.body.textContent.includes('token is missing or wrong')")
