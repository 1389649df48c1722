"""Downloads from servers that are slow, that send elsewhere, and that need a password."""

import base64
import functools
import io
import socket
import stat
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from PIL import Image

from helpers.commands import run_command
from qmargin.data import download
from qmargin.data.download import ARCHIVES, Archive, Remote, _notes, check_base, fetch, get_omniglot
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


@functools.cache
def png(value):
    buffer = io.BytesIO()
    Image.new("1", (105, 105), value % 2).save(buffer, "PNG")
    return buffer.getvalue()


def drawings(part, alphabets=("Greek", "N_Ko_(West)"), characters=2, samples=3):
    return {
        f"images_{part}/{alphabet}/character0{character}/010{character}_0{sample}.png": png(sample)
        for alphabet in alphabets
        for character in range(1, characters + 1)
        for sample in range(1, samples + 1)
    }


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
    return buffer.getvalue()


class FileServer:
    """Files by name; it can stop after some bytes, ignore ranges, or answer with an error."""

    def __init__(self, files):
        self.files, self.requests = files, []
        self.stop_after = None
        self.has_ranges = True
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self.server.server_address[1]}/python"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def answer(self, handler):
        content = self.files.get(handler.path.removeprefix("/python/"))
        asked = handler.headers.get("Range")
        self.requests.append((handler.path, asked))
        if content is None:
            handler.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        if not self.has_ranges:
            start = 0
        if start > len(content):
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        handler.send_header("Content-Length", str(len(content) - start))
        handler.end_headers()
        body = content[start:]
        handler.wfile.write(body if self.stop_after is None else body[: self.stop_after])

    def close(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.server.server_close()
            self.thread.join(timeout=10)


def archives_of(files, *, classes=4, count=12):
    return tuple(
        Archive(
            Remote(archive.remote.name, len(content), sha256(content).hexdigest()),
            archive.split,
            classes,
            count,
        )
        for archive, content in zip(ARCHIVES, files.values(), strict=True)
    )


@pytest.fixture
def files():
    return {
        "images_background.zip": zipped(drawings("background")),
        "images_evaluation.zip": zipped(drawings("evaluation", ("Tengwar", "ULOG"))),
    }


@pytest.fixture
def server(files):
    made = FileServer(files)
    yield made
    made.close()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_archives_become_two_image_folders(tmp_path, server, files):
    stages = []
    out = get_omniglot(
        tmp_path / "omniglot",
        base=server.base + "/",
        archives=archives_of(files),
        progress=lambda stage, done, total: stages.append((stage, done, total)),
    )
    assert names_in(out) == ["SOURCE.txt", "test", "train"]
    assert names_in(out / "train") == [
        *("Greek-character01", "Greek-character02"),
        *("N_Ko_(West)-character01", "N_Ko_(West)-character02"),
    ]
    assert names_in(out / "test" / "ULOG-character02") == [f"0102_0{n}.png" for n in (1, 2, 3)]
    assert (out / "train" / "Greek-character01" / "0101_02.png").read_bytes() == png(2)
    assert ("unpacking test", 12, 12) in stages
    assert stages[0][0] == "images_background.zip"
    assert names_in(tmp_path) == ["omniglot"]  # the downloads are gone
    assert "MIT" in (out / "SOURCE.txt").read_text()
    before = len(server.requests)
    get_omniglot(out, base=server.base, archives=archives_of(files))
    assert len(server.requests) == before  # complete: nothing to do


def test_a_transfer_that_stops_is_gone_on_with(tmp_path, server, files):
    server.stop_after = 200
    for _ in range(2):
        with pytest.raises(DataError, match=r"stopped after|cannot be read"):
            get_omniglot(tmp_path / "o", base=server.base, archives=archives_of(files))
        assert not (tmp_path / "o").exists()
    server.stop_after = None
    get_omniglot(tmp_path / "o", base=server.base, archives=archives_of(files))
    ranges = [asked for _, asked in server.requests]
    assert ranges == [None, "bytes=200-", "bytes=400-", None]


def test_a_server_without_ranges_starts_again(tmp_path, server, files):
    server.stop_after = 200
    with pytest.raises(DataError):
        get_omniglot(tmp_path / "o", base=server.base, archives=archives_of(files))
    server.stop_after, server.has_ranges = None, False
    get_omniglot(tmp_path / "o", base=server.base, archives=archives_of(files))


def test_a_part_of_a_longer_file_is_thrown_away(tmp_path, server, files):
    content = files["images_background.zip"]
    remote = Remote("images_background.zip", 10 * len(content), "0" * 64)
    (tmp_path / "images_background.zip.part").write_bytes(bytes(2 * len(content)))
    with pytest.raises(DataError, match="answers 416"):
        fetch(remote, server.base, tmp_path)
    assert names_in(tmp_path) == []


def test_other_bytes_are_refused_and_not_kept(tmp_path, server, files):
    wanted = archives_of(files)
    content = bytearray(files["images_evaluation.zip"])
    content[50] ^= 1
    server.files["images_evaluation.zip"] = bytes(content)
    with pytest.raises(DataError, match=r"SHA-256 [0-9a-f]{64}; expected were"):
        get_omniglot(tmp_path / "o", base=server.base, archives=wanted)
    assert not (tmp_path / "o").exists()
    assert names_in(tmp_path / "o.download") == ["images_background.zip"]
    server.files["images_evaluation.zip"] += b"more"
    with pytest.raises(DataError, match="is longer than"):
        get_omniglot(tmp_path / "o", base=server.base, archives=wanted)


def test_errors_of_the_network_say_what_to_do(tmp_path, server, files):
    with pytest.raises(DataError, match="answers 404"):
        get_omniglot(tmp_path / "o", base=server.base + "/gone", archives=archives_of(files))
    server.close()
    with pytest.raises(DataError, match=r"cannot be read .* check the network"):
        get_omniglot(tmp_path / "o", base=server.base, archives=archives_of(files))
    for base in ("file:///etc", "ftp://x/y", "omniglot"):
        with pytest.raises(ConfigError, match="must begin with https"):
            get_omniglot(tmp_path / "o", base=base)


def linked(name):
    member = zipfile.ZipInfo(name)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


@pytest.mark.parametrize(
    ("member", "words"),
    [
        ("../../outside.png", "leads outside"),
        ("images_background/../../../x.png", "leads outside"),
        ("/etc/cron.d/x", "leads outside"),
        ("C:/x.png", "leads outside"),
        ("images_background\\..\\x.png", "leads outside"),
        ("images_background\\x.png", "signs that a path"),
        ("images_background/\x1b[2J.png", "signs that a path"),
        (linked("images_background/Greek/character01/0101_09.png"), "is a link"),
    ],
    ids=str,
)
def test_hostile_archives_are_refused(tmp_path, server, files, member, words):
    _refused(tmp_path, server, files, {**drawings("background"), member: b"../../target"}, words)


def test_bombs_are_refused(tmp_path, server, files, monkeypatch):
    name = "images_background/Greek/character01/0101_09.png"
    bomb = {**drawings("background"), name: bytes(1 << 24)}
    _refused(tmp_path, server, files, bomb, "16,777,216 bytes, above 65,536")
    monkeypatch.setattr(download, "MOST_MEMBERS", 5)
    _refused(tmp_path, server, files, drawings("background"), "most are 5")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"images_background/Greek/character01/0101_09.png": png(0)}, "more than the 12"),
        ({"images_background/Greek/character02/0102_03.png": None}, "expected were 12 of 4"),
        ({"images_background/Greek/character01/0101_01.png": b"GIF89a"}, "not a small PNG"),
    ],
)
def test_archives_of_something_else_are_refused(tmp_path, server, files, changes, words):
    _refused(tmp_path, server, files, {**drawings("background"), **changes}, words)


def test_what_is_no_archive_is_refused(tmp_path, server, files):
    server.files = {**files, "images_background.zip": b"<html>not found</html>"}
    with pytest.raises(DataError, match="not a sound ZIP archive"):
        get_omniglot(tmp_path / "o", base=server.base, archives=archives_of(server.files))


def test_harmless_members_are_left_out(tmp_path, server, files):
    more = {"__MACOSX/._x": b"x", "images_background/.DS_Store": b"y", "images_background/": b""}
    server.files = {**files, "images_background.zip": zipped({**drawings("background"), **more})}
    out = get_omniglot(tmp_path / "o", base=server.base, archives=archives_of(server.files))
    assert len(list((out / "train").rglob("*"))) == 4 + 12


def _refused(tmp_path, server, files, members, words):
    server.files = {**files, "images_background.zip": zipped(members)}
    with pytest.raises(DataError, match=words):
        get_omniglot(tmp_path / "in" / "o", base=server.base, archives=archives_of(server.files))
    assert names_in(tmp_path) == ["in"]
    assert names_in(tmp_path / "in") == ["o.download"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "o").mkdir()
    with pytest.raises(ConfigError, match="choose another --out"):
        get_omniglot(tmp_path / "o", base="http://127.0.0.1:9")


def test_the_command_makes_data_for_the_demo(tmp_path, server, files, monkeypatch, capsys):
    from qmargin.experiments.worlds import Drawn

    monkeypatch.setattr(
        download,
        "get_omniglot",
        functools.partial(get_omniglot, archives=archives_of(files)),
    )
    run_command("data", "get", "omniglot", "--out", tmp_path / "o", "--from", server.base)
    assert "| train  |          4 |" in capsys.readouterr().out
    world = Drawn(str(tmp_path / "o"), seed=0).opened()
    assert world.is_ink  # white paper was inverted
    train, test = world._parts(0, is_search=False)
    assert train.num_classes == test.num_classes == 4
    assert {test.sample_id(row).split("-")[0] for row in range(12)} == {"test"}
