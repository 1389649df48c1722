"""The server under load, with clients that misbehave, and at its end."""

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest

import qmargin
from helpers.commands import run_command
from helpers.serving import b64, face_model, picture, serving
from qmargin.errors import ConfigError
from qmargin.serve import app, gate, server

NUM_REQUESTS, NUM_CONNECTIONS = 2_000, 32
MOST_GROWTH = 200 * 1024**2  # bytes


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return face_model(tmp_path_factory.mktemp("serve") / "m")


def memory() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_many_requests_from_many_connections(directory):
    content = json.dumps({"inputs": [b64(picture())]}).encode()
    with serving(directory) as running:

        def send(number: int) -> list[int]:
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
            found = []
            for _ in range(number):
                headers = {"Content-Type": "application/json"}
                connection.request("POST", "/v1/embed", content, headers)
                answer = connection.getresponse()
                answer.read()
                found.append(answer.status)
            connection.close()
            return found

        send(20)
        before = memory()
        share = -(-NUM_REQUESTS // NUM_CONNECTIONS)
        with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
            found = [*chain(*pool.map(send, [share] * NUM_CONNECTIONS))]
        assert len(found) >= NUM_REQUESTS and set(found) == {200}
        assert memory() - before < MOST_GROWTH
        assert running.service.budget.held == 0
        assert running.service.budget.peak <= NUM_CONNECTIONS * 4 * len(content)
        assert running.service._batcher.num_batches < len(found)  # some went together


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /v1/embed HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        b"POST /v1/embed HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000\r\n\r\n{",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 10,
        b"GET / HTTP/9.9\r\n\r\n",
        b"A" * 200_000,
    ],
    ids=["silent", "half a head", "half a body", "TLS", "no HTTP", "endless"],
)
def test_a_client_that_hangs_or_sends_rubbish_blocks_nobody(directory, sent, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.5)
    monkeypatch.setattr(app, "BODY_S", 0.5)
    with serving(directory) as running:
        bad = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
        for one in bad:
            with suppress(OSError):  # it was closed already
                one.sendall(sent)
        began = time.monotonic()
        assert running.post("embed", {"inputs": [b64(picture())]})
        assert time.monotonic() - began < 5.0
        for one in bad:  # they are closed, with an answer or without
            one.settimeout(10)
            with suppress(ConnectionError):
                while one.recv(4096):
                    pass
            one.close()
        assert running.service.budget.held == 0


def test_a_connection_that_is_in_use_stays_open(directory, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 1.0)
    with serving(directory) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
        for _ in range(8):
            connection.request("GET", "/v1/gallery")
            assert connection.getresponse().read()
            kept = connection.sock
            time.sleep(0.3)
        assert connection.sock is kept
        connection.close()


def test_a_request_that_takes_long_is_answered(directory, monkeypatch):
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    with serving(directory) as running:
        embed = running.service._batcher._embed

        def slow(samples):
            time.sleep(1.0)
            return embed(samples)

        monkeypatch.setattr(running.service._batcher, "_embed", slow)
        assert running.post("embed", {"inputs": [b64(picture())]})


def test_connections_without_requests_make_room_for_others(directory, monkeypatch):
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 8)
    with serving(directory) as running:
        used = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
        used.request("GET", "/v1/gallery")
        assert used.getresponse().read()
        kept = used.sock
        silent = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(20)]
        assert running.post("embed", {"inputs": [b64(picture())]})
        used.request("GET", "/v1/gallery")
        assert used.getresponse().read() and used.sock is kept
        used.close()
        for one in silent[:12]:  # the oldest
            one.settimeout(5)
            with suppress(ConnectionError):
                assert one.recv(1) == b""
        for one in silent:
            one.close()


def test_more_requests_than_are_answered_at_once_are_refused_in_words(directory, monkeypatch):
    monkeypatch.setattr(gate, "MOST_ACTIVE", 2)
    content = json.dumps({"inputs": [b64(picture())]}).encode()
    head = (
        "POST /v1/embed HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode()
    with serving(directory) as running:
        slow = [socket.create_connection(("127.0.0.1", running.port)) for _ in range(2)]
        for one in slow:
            one.sendall(head + content[:9])
        deadline = time.monotonic() + 10.0
        while (answer := running.ask("GET", "/v1/model"))[0] == 200:  # until both have arrived
            assert time.monotonic() < deadline
            time.sleep(0.01)
        status, refused, headers = answer
        assert status == 503 and headers["retry-after"] == "1"
        assert refused["error"]["code"] == "busy"
        assert refused["error"]["message"] == "the server answers 2 requests at once; try again"
        for one in slow:
            one.sendall(content[9:])
            one.settimeout(20)
            assert one.recv(65536).startswith(b"HTTP/1.1 200")
            one.close()
        assert running.ask("GET", "/v1/model")[0] == 200


def started(directory, tmp_path, *options: str, **environment: str):
    """The command in a process of its own, and its address."""
    paths = [str(Path(qmargin.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "qmargin", "serve", directory, "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
    )
    assert process.stdout is not None
    lines = []
    while not lines or "Ctrl-C" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], process.communicate()[1]
    port = int(next(line for line in lines if line.startswith("http")).split(":")[2].split("/")[0])
    return process, port, "".join(lines)


@pytest.mark.slow
def test_sigterm_finishes_what_is_in_flight(directory, tmp_path):
    process, port, lines = started(directory, tmp_path, DISPLAY="", WAYLAND_DISPLAY="")
    assert "no browser was found here; open this address in one" in lines
    content = json.dumps({"inputs": [b64(picture())]}).encode()
    head = (
        "POST /v1/embed HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    ).encode()
    with socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(head + content[:100])
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None  # it waits for the request
        with pytest.raises(ConnectionError):  # and takes no other
            socket.create_connection(("127.0.0.1", port)).close()
        slow.sendall(content[100:])
        slow.settimeout(20)
        answer = slow.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
    assert process.wait(20) == 128 + signal.SIGTERM
    said = process.communicate()[1]
    assert said == "qmargin: interrupted by SIGTERM\n"
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_in_use_is_named(directory):
    with serving(directory) as running:
        port, said = running.port, rf"port {running.port} of 127\.0\.0\.1 is in use"
        with pytest.raises(ConfigError, match=said):
            server.listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot be opened .* choose another --host"):
        server.listen("203.0.113.7", 0)


def test_a_number_that_is_no_port_is_refused(directory, capsys):
    with pytest.raises(SystemExit):
        run_command("serve", directory, "--port", 65536)
    assert "argument --port: 65536 is not a port; give 0 to 65535" in capsys.readouterr().err


def test_no_browser_is_no_error(monkeypatch):
    import webbrowser

    monkeypatch.setenv("DISPLAY", ":0")

    def none():
        raise webbrowser.Error("could not locate runnable browser")

    monkeypatch.setattr(webbrowser, "get", none)
    assert server.open_page("http://127.0.0.1:1/") is False
    opened = threading.Event()

    class Window:
        def open(self, url):
            opened.set()

    monkeypatch.setattr(webbrowser, "get", Window)
    assert server.open_page("http://127.0.0.1:1/") is True and opened.wait(5)
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert server.open_page("http://127.0.0.1:1/") is (not sys.platform.startswith("linux"))
