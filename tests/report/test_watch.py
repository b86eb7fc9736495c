"""`jaxtrain watch`: the page of a run in training is shown to clients with the token, and to no
others."""

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading

import pytest

from jaxtrain import cli
from jaxtrain.commands import watch
from jaxtrain.telemetry import loopback
from tests.support.reports import make

pytest.importorskip("plotly")


def ask(port, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "PAUSE", 0)
    path = make(tmp_path / "run", reached=40, end="")
    pages = watch.Pages([str(path)], "", 1e-9)  # a look at every request
    with watch.Server(pages) as server:
        server.token = "token"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield path, server.server_address[1]
        server.shutdown()


def test_the_page_follows_the_run_and_is_made_again_only_then(served):
    path, port = served
    status, text = ask(port, "/token/")
    assert status == 200 and "connect-src 'self'" in text and "40 / 100" in text
    assert ask(port, "/token/version") == (200, "1") == ask(port, "/token/version")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 50, "split": "train", "loss": 0.125}) + "\n" + '{"step": 60, "spl'
        )
    assert ask(port, "/token/version") == (200, "2")
    text = ask(port, "/token/")[1]
    assert "50 / 100" in text and 'data-version="2"' in text, (
        "and a line that is being written is no trouble"
    )
    path.rename(path.with_name("moved"))
    status, text = ask(port, "/token/version")
    assert status == 503 and "run does not exist" in text
    path.with_name("moved").rename(path)
    assert ask(port, "/token/version")[0] == 200


def test_requests_without_the_token_are_refused(served):
    _, port = served
    for path in (
        "/",
        "/other/",
        "/token/../config.json",
        "/token/config.json",
        "/token",
        "/t%6fken/",
    ):
        assert ask(port, path)[0] == 404, path
    assert ask(port, "/token/", host="evil.example:80")[0] == 404, (
        "a name that was made to lead to this machine"
    )
    assert ask(port, "/token/", host=f"localhost:{port}")[0] == 200


def test_unauthenticated_requests_block_no_reader_and_print_nothing(served, monkeypatch, capfd):
    _, port = served
    monkeypatch.setattr(loopback, "AT_ONCE", 3)
    with contextlib.ExitStack() as closing:
        idle = [
            closing.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            for _ in range(5)
        ]
        assert ask(port, "/token/version") == (200, "1"), "the oldest of them made way"
        assert idle[0].recv(1) == b"" and idle[1].recv(1) == b""
    for _ in range(5):  # asks for the page, and does not wait for it
        with socket.create_connection(("127.0.0.1", port)) as rude:
            rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            rude.sendall(f"GET /token/ HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    assert ask(port, "/token/version")[0] == 200 and capfd.readouterr().err == ""


def test_the_command_prints_its_address_and_control_c_ends_it(tmp_path, capsys):
    path = make(tmp_path / "run", reached=40)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "jaxtrain.cli", "watch", str(path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    port, token = re.match(
        r"http://127\.0\.0\.1:(\d+)/([\w-]{20,})/", process.stdout.readline()
    ).groups()
    assert ask(int(port), f"/{token}/")[0] == 200 and ask(int(port), "/x/")[0] == 404
    assert (
        cli.main(["watch", str(path), "--port", port]) == 2
        and "choose another --port" in capsys.readouterr().err
    )
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0 and not process.stderr.read()
    process.stdout.close()
    process.stderr.close()
    assert cli.main(["watch", str(tmp_path)]) == 2 and "holds neither" in capsys.readouterr().err
