"""Downloads from servers that are slow, that send elsewhere, and that need a password."""

import base64
import functools
import io
import socket
import stat
import threading
import time
import zipfile
from hashlib import sha256

import pytest
from PIL import Image

from helpers.commands import run_command
from qmargin.data import download
from qmargin.data.download import ARCHIVES, Archive, Remote, _notes, check_base, fetch, get_omniglot
from qmargin.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 40
SIZE = len(CONTENT)
REMOTE = Remote("a.zip", len(CONTENT), sha256(CONTENT).hexdigest())


class Server:
    """Calls a function with each connection and what was asked."""

    def __init__(self, answer):
        self.asked, self._answer = [], answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.base = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.close = self._listener.close
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection):
        with connection:
            request = connection.recv(65536)
            self.asked.append(request)
            try:
                self._answer(connection, request)
            except OSError:  # the other side has gone
                return


@pytest.fixture
def serve():
    servers = []

    def start(answer):
        servers.append(Server(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def impatient(monkeypatch):
    for name, value in (("TIMEOUT_S", 1.0), ("ANSWER_S", 0.4), ("WINDOW_S", 0.3)):
        monkeypatch.setattr(download, name, value)
    monkeypatch.setattr(download, "LEAST_SPEED", 10_000)


def head(length=SIZE, status="200 OK", more=""):
    return (
        f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{more}Connection: close\r\n\r\n".encode()
    )


def dripping(content, size, pause):
    def answer(connection, request):
        for start in range(0, len(content), size):
            connection.sendall(content[start : start + size])
            time.sleep(pause)

    return answer


def sending(content):
    return lambda connection, request: connection.sendall(content)


def redirecting(target):
    return sending(head(0, "302 Found", f"Location: {target}\r\n"))


@pytest.mark.parametrize(
    "answer",
    [
        dripping(head() + CONTENT, 1, 0.02),
        dripping(b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 1000, 1, 0.05),
        lambda connection, request: time.sleep(20),
    ],
    ids=["slow_body", "slow_headers", "silent"],
)
@pytest.mark.usefixtures("impatient")
def test_a_server_that_drips_is_given_up(tmp_path, serve, answer):
    start = time.monotonic()
    with pytest.raises(DataError, match="same command again"):
        fetch(REMOTE, serve(answer).base, tmp_path)
    assert time.monotonic() - start < 5.0


@pytest.mark.usefixtures("impatient")
def test_all_of_a_download_has_a_deadline(tmp_path, serve, monkeypatch):
    """Bursts that pass for speed in one window do not add up to a download that never ends."""
    monkeypatch.setattr(download, "WINDOW_S", 60.0)
    monkeypatch.setattr(download, "GRACE_S", -0.8)
    server = serve(dripping(head() + CONTENT, 200, 0.1))
    begun = time.monotonic()
    with pytest.raises(DataError, match="bytes"):
        fetch(REMOTE, server.base, tmp_path)
    assert time.monotonic() - begun < 4.0
    assert (tmp_path / "a.zip.part").stat().st_size > 0  # kept, to go on behind it


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/a.zip?token=secret", "data:text/plain,x"]
)
def test_redirects_go_to_the_web_only(tmp_path, serve, target):
    with pytest.raises(DataError, match=target.partition(":")[0]) as caught:
        fetch(REMOTE, serve(redirecting(target)).base, tmp_path)
    assert "secret" not in str(caught.value)
    assert "passwd" not in str(caught.value)


def with_password(base):
    return base.replace("http://", "http://ada:s3cret%21@")


def test_a_password_is_sent_to_its_server_alone(tmp_path, serve):
    second = serve(sending(head() + CONTENT))
    first = serve(redirecting(f"{second.base}/a.zip"))
    assert fetch(REMOTE, with_password(first.base), tmp_path).read_bytes() == CONTENT
    assert base64.b64encode(b"ada:s3cret!") in first.asked[0]
    assert b"Authorization" not in second.asked[0]


@pytest.mark.parametrize(
    "content",
    [
        head(0, "401 No \x1b[31m"),
        head() + CONTENT[::-1],
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + CONTENT * 2,
        head() + b"abc",
    ],
    ids=["refused", "other bytes", "too long", "hangs up"],
)
def test_messages_hold_no_credentials(tmp_path, serve, content):
    server = serve(sending(content))
    with pytest.raises(DataError) as caught:
        fetch(REMOTE, with_password(server.base), tmp_path)
    text = str(caught.value)
    assert "s3cret" not in text
    assert "ada" not in text
    assert server.base in text
    assert text.isprintable()
    server.close()
    with pytest.raises(DataError) as caught:  # nobody answers
        fetch(REMOTE, with_password(server.base), tmp_path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "base",
    [
        *("ftp://ada:s3cret@host/x", "ada:s3cret@host/x", "https://ada:s3cret@"),
        *("http://ada:s3cret@[::1", "//ada:s3cret@host", "file:///etc", "omniglot"),
    ],
)
def test_a_wrong_address_is_shown_without_credentials(base):
    with pytest.raises(ConfigError) as caught:
        check_base(base)
    assert "s3cret" not in str(caught.value)


def test_what_is_written_beside_the_data_holds_no_credentials():
    text = _notes((Archive(REMOTE, "train", 1, 1),), "https://ada:s3cret@host/python?token=abc")
    assert "https://host/python" in text
    assert "s3cret" not in text
    assert "abc" not in text


@functools.cache
def png(value):
    buffer = io.BytesIO()
    Image.new("1", (105, 105), value % 2).save(buffer, "PNG")
    return buffer.getvalue()


def drawings(part, alphabets=("Greek", "N_Ko_(West)")):
    return {
        f"images_{part}/{alphabet}/character0{character}/010{character}_0{sample}.png": png(sample)
        for alphabet in alphabets
        for character in (1, 2)
        for sample in (1, 2, 3)
    }


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
    return buffer.getvalue()


class Files:
    """Archives of a server that can stop after some bytes, or ignore ranges."""

    def __init__(self, serve):
        self.contents = {
            "images_background.zip": zipped(drawings("background")),
            "images_evaluation.zip": zipped(drawings("evaluation", ("Tengwar", "ULOG"))),
        }
        self.stop_after, self.has_ranges, self.ranges = None, True, []
        self.server = serve(self.answer)
        self.base = self.server.base

    def answer(self, connection, request):
        lines = request.decode().split("\r\n")
        content = self.contents.get(lines[0].split()[1].removeprefix("/"))
        asked = [line.removeprefix("Range: bytes=") for line in lines if line[:6] == "Range:"]
        self.ranges.append(asked[0] if asked else None)
        start = int(asked[0].removesuffix("-")) if asked and self.has_ranges else 0
        if content is None or start > len(content):
            connection.sendall(head(0, "404 No" if content is None else "416 No"))
            return
        place = f"Content-Range: bytes {start}-{len(content) - 1}/{len(content)}\r\n"
        status, more = ("206 Part", place) if start else ("200 OK", "")
        body = content[start:]
        connection.sendall(head(len(body), status, more) + body[: self.stop_after])

    @property
    def archives(self):
        return tuple(
            Archive(Remote(name, len(content), sha256(content).hexdigest()), archive.split, 4, 12)
            for archive, (name, content) in zip(ARCHIVES, self.contents.items(), strict=True)
        )

    def get(self, out, **options):
        options = {"base": self.base, "archives": self.archives, **options}
        return get_omniglot(out, **options)


@pytest.fixture
def files(serve):
    return Files(serve)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_archives_become_two_image_folders(tmp_path, files):
    more = {"__MACOSX/._x": b"x", "images_background/.DS_Store": b"y", "images_background/": b""}
    files.contents["images_background.zip"] = zipped({**drawings("background"), **more})
    stages = []
    out = files.get(
        tmp_path / "omniglot", base=files.base + "/", progress=lambda *stage: stages.append(stage)
    )
    assert names_in(out) == ["SOURCE.txt", "test", "train"]
    assert names_in(out / "train") == [
        *("Greek-character01", "Greek-character02"),
        *("N_Ko_(West)-character01", "N_Ko_(West)-character02"),
    ]
    assert names_in(out / "test" / "ULOG-character02") == [f"0102_0{n}.png" for n in (1, 2, 3)]
    assert len(list((out / "train").rglob("*"))) == 4 + 12  # harmless members are left out
    assert (out / "train" / "Greek-character01" / "0101_02.png").read_bytes() == png(2)
    assert ("unpacking test", 12, 12) in stages
    assert stages[0][0] == "images_background.zip"
    assert names_in(tmp_path) == ["omniglot"]  # the downloads are gone
    assert "MIT" in (out / "SOURCE.txt").read_text()
    before = len(files.ranges)
    files.get(out)
    assert len(files.ranges) == before  # complete: nothing to do


@pytest.mark.parametrize("has_ranges", [True, False])
def test_a_transfer_that_stops_is_gone_on_with(tmp_path, files, has_ranges):
    files.stop_after = 200
    for _ in range(2):
        with pytest.raises(DataError, match=r"stopped after|cannot be read"):
            files.get(tmp_path / "o")
        assert not (tmp_path / "o").exists()
    files.stop_after, files.has_ranges = None, has_ranges
    files.get(tmp_path / "o")
    assert files.ranges == [None, "200-", "400-", None]


def test_a_part_of_a_longer_file_is_thrown_away(tmp_path, files):
    size = len(files.contents["images_background.zip"])
    (tmp_path / "images_background.zip.part").write_bytes(bytes(2 * size))
    with pytest.raises(DataError, match="answers 416"):
        fetch(Remote("images_background.zip", 10 * size, "0" * 64), files.base, tmp_path)
    assert names_in(tmp_path) == []


def test_other_bytes_are_refused_and_not_kept(tmp_path, files):
    wanted, content = files.archives, bytearray(files.contents["images_evaluation.zip"])
    content[50] ^= 1
    files.contents["images_evaluation.zip"] = bytes(content)
    with pytest.raises(DataError, match=r"SHA-256 [0-9a-f]{64}; expected were"):
        files.get(tmp_path / "o", archives=wanted)
    assert not (tmp_path / "o").exists()
    assert names_in(tmp_path / "o.download") == ["images_background.zip"]
    files.contents["images_evaluation.zip"] += b"more"
    with pytest.raises(DataError, match="is longer than"):
        files.get(tmp_path / "o", archives=wanted)


def test_errors_of_the_network_say_what_to_do(tmp_path, files):
    with pytest.raises(DataError, match="answers 404"):
        files.get(tmp_path / "o", base=files.base + "/gone")
    (tmp_path / "o").mkdir()
    with pytest.raises(ConfigError, match="choose another --out"):
        files.get(tmp_path / "o")


def linked(name):
    member = zipfile.ZipInfo(name)
    member.external_attr = (stat.S_IFLNK | 0o777) << 16
    return member


GREEK = "images_background/Greek/character0"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"../../outside.png": b"x"}, "leads outside"),
        ({"images_background/../../../x.png": b"x"}, "leads outside"),
        ({"/etc/cron.d/x": b"x"}, "leads outside"),
        ({"C:/x.png": b"x"}, "leads outside"),
        ({"images_background\\..\\x.png": b"x"}, "leads outside"),
        ({"images_background\\x.png": b"x"}, "characters that a path"),
        ({"images_background/\x1b[2J.png": b"x"}, "characters that a path"),
        ({linked(f"{GREEK}1/0101_09.png"): b"../../target"}, "is a link"),
        ({f"{GREEK}1/0101_09.png": bytes(1 << 24)}, "16,777,216 bytes, above 65,536"),
        ({f"{GREEK}1/0101_09.png": png(0)}, "more than the 12"),
        ({f"{GREEK}2/0102_03.png": None}, "expected were 12 of 4"),
        ({f"{GREEK}1/0101_01.png": b"GIF89a"}, "not a small PNG"),
        ({f"other{number}": b"" for number in range(20)}, "most are 30"),
        (b"<html>not found</html>", "not a valid ZIP archive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_hostile_archives_are_refused(tmp_path, files, changes, words, monkeypatch):
    monkeypatch.setattr(download, "MOST_MEMBERS", 30)
    content = changes
    if isinstance(changes, dict):
        content = zipped({**drawings("background"), **changes})
    files.contents["images_background.zip"] = content
    with pytest.raises(DataError, match=words):
        files.get(tmp_path / "in" / "o")
    assert names_in(tmp_path) == ["in"]
    assert names_in(tmp_path / "in") == ["o.download"]


def test_the_command_makes_data_for_the_demo(tmp_path, files, monkeypatch, capsys):
    from qmargin.experiments.worlds import Drawn

    limited = functools.partial(get_omniglot, archives=files.archives)
    monkeypatch.setattr(download, "get_omniglot", limited)
    run_command("data", "get", "omniglot", "--out", tmp_path / "o", "--from", files.base)
    assert "| train  |          4 |" in capsys.readouterr().out
    world = Drawn(str(tmp_path / "o"), seed=0).opened()
    assert world.is_ink  # white paper was inverted
    train, test = world._parts(0, is_search=False)
    assert train.num_classes == test.num_classes == 4
    assert {test.sample_id(row).split("-")[0] for row in range(12)} == {"test"}
