"""Downloads from servers that are slow, that send elsewhere, and that need a password."""

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from qmargin.data import download
from qmargin.data.download import Remote, check_base, fetch
from qmargin.data.omniglot import Archive, _notes
from qmargin.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 40
REMOTE = Remote("a.zip", len(CONTENT), sha256(CONTENT).hexdigest())
Answer = Callable[[socket.socket, bytes], None]


class Server:
    """Calls a function with each connection and what was asked."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stopped = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            request = connection.recv(65536)
            self.asked.append(request)
            try:
                self._answer(connection, request)
            except OSError:  # the other side has gone
                return

    def close(self) -> None:
        self._stopped.set()
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    servers: list[Server] = []

    def start(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(download, "ANSWER_S", 0.6)
    monkeypatch.setattr(download, "WINDOW_S", 0.4)
    monkeypatch.setattr(download, "LEAST_SPEED", 10_000)


def whole(connection: socket.socket, request: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + CONTENT)


def slow_body(connection: socket.socket, request: bytes) -> None:
    connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode())
    for byte in CONTENT:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def slow_headers(connection: socket.socket, request: bytes) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 1000:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


def silent(connection: socket.socket, request: bytes) -> None:
    time.sleep(20)


@pytest.mark.parametrize("answer", [slow_body, slow_headers, silent])
@pytest.mark.usefixtures("impatient")
def test_a_server_that_drips_is_given_up(tmp_path: Path, serve, answer: Answer) -> None:
    server = serve(answer)
    start = time.monotonic()
    with pytest.raises(DataError, match="same command again"):
        fetch(REMOTE, server.base, tmp_path)
    assert time.monotonic() - start < 5.0


@pytest.mark.usefixtures("impatient")
def test_all_of_a_download_has_a_deadline(
    tmp_path: Path, serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bursts that pass for speed in one window do not add up to a download that never ends."""
    monkeypatch.setattr(download, "WINDOW_S", 60.0)
    monkeypatch.setattr(download, "GRACE_S", 0.5)

    def bursts(connection: socket.socket, request: bytes) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode())
        for start in range(0, len(CONTENT), 100):
            connection.sendall(CONTENT[start : start + 100])
            time.sleep(0.1)

    server = serve(bursts)
    begun = time.monotonic()
    with pytest.raises(DataError, match=r"bytes"):
        fetch(REMOTE, server.base, tmp_path)
    assert time.monotonic() - begun < 5.0
    assert (tmp_path / "a.zip.part").stat().st_size > 0  # kept, to go on behind it


def redirecting(target: str) -> Answer:
    def answer(connection: socket.socket, request: bytes) -> None:
        head = f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
        connection.sendall(head.encode())

    return answer


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/a.zip?token=secret", "data:text/plain,x"]
)
def test_redirects_go_to_the_web_only(tmp_path: Path, serve, target: str) -> None:
    server = serve(redirecting(target))
    with pytest.raises(DataError, match=target.partition(":")[0]) as caught:
        fetch(REMOTE, server.base, tmp_path)
    assert "secret" not in str(caught.value)
    assert "passwd" not in str(caught.value)


def with_password(base: str) -> str:
    return base.replace("http://", "http://ada:s3cret%21@")


def test_a_password_is_sent_to_its_server_alone(tmp_path: Path, serve) -> None:
    second = serve(whole)
    first = serve(redirecting(f"{second.base}/a.zip"))
    assert fetch(REMOTE, with_password(first.base), tmp_path).read_bytes() == CONTENT
    sent = base64.b64encode(b"ada:s3cret!")
    assert sent in first.asked[0]
    assert b"Authorization" not in second.asked[0]


def refused(connection: socket.socket, request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 401 No \x1b[31m\r\nContent-Length: 0\r\n\r\n")


def other_bytes(connection: socket.socket, request: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\nConnection: close\r\n\r\n"
    connection.sendall(head.encode() + CONTENT[::-1])


def too_long(connection: socket.socket, request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + CONTENT * 2)


def hangs_up(connection: socket.socket, request: bytes) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10240\r\n\r\nabc")


@pytest.mark.parametrize("answer", [refused, other_bytes, too_long, hangs_up])
def test_messages_hold_no_credentials(tmp_path: Path, serve, answer: Answer) -> None:
    server = serve(answer)
    with pytest.raises(DataError) as caught:
        fetch(REMOTE, with_password(server.base), tmp_path)
    text = str(caught.value)
    assert "s3cret" not in text
    assert "ada" not in text
    assert server.base in text
    assert text.isprintable()


@pytest.mark.parametrize(
    "base",
    [
        "ftp://ada:s3cret@host/x",
        "ada:s3cret@host/x",
        "https://ada:s3cret@",
        "http://ada:s3cret@[::1",
        "//ada:s3cret@host",
    ],
)
def test_a_wrong_address_is_shown_without_credentials(base: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_base(base)
    assert "s3cret" not in str(caught.value)


def test_what_is_written_beside_the_data_holds_no_credentials() -> None:
    archive = Archive(REMOTE, "train", 1, 1)
    text = _notes((archive,), "https://ada:s3cret@host/python?token=abc")
    assert "https://host/python" in text
    assert "s3cret" not in text
    assert "abc" not in text


def test_nobody_answers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DataError) as caught:
        fetch(REMOTE, f"http://ada:s3cret@127.0.0.1:{port}", tmp_path)
    assert "s3cret" not in str(caught.value)
