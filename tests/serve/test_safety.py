"""Every bullet of the safety list: an attack is refused, and gets through without its check."""

import io
import json
import os
import re
import sys
import time

import pytest

from helpers.commands import run_command
from helpers.serving import b64, face_model, huge_png, picture, recording, serving, voice_model
from qmargin.data import images
from qmargin.errors import ConfigError
from qmargin.evaluation import model as models
from qmargin.serve import app, gate, service
from qmargin.serve.gate import Rules
from qmargin.serve.inputs import Limits

TOKEN = "a-token-of-enough-characters"
FORM = "application/x-www-form-urlencoded"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return face_model(tmp_path_factory.mktemp("serve") / "m")


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    return voice_model(tmp_path_factory.mktemp("serve") / "v")


def body() -> dict[str, list[str]]:
    return {"inputs": [b64(picture())]}


ATTACKS = {  # the check, the headers of the attack, and the status of its refusal
    "DNS rebinding": (gate.check_host, {"Host": "evil.example:8765"}, 403),
    "an address elsewhere": (gate.check_host, {"Host": "192.168.1.7"}, 403),
    "no host": (gate.check_host, {"Host": ""}, 403),
    "cross-site": (gate.check_origin, {"Origin": "https://evil.example"}, 403),
    "another port": (gate.check_origin, {"Origin": "http://127.0.0.1:1"}, 403),
    "a sandbox": (gate.check_origin, {"Origin": "null"}, 403),
    "embedded": (gate.check_site, {"Sec-Fetch-Site": "cross-site"}, 403),
    "another server here": (gate.check_site, {"Sec-Fetch-Site": "same-site"}, 403),
    "no token": (gate.check_token, {"Authorization": ""}, 401),
    "a wrong token": (gate.check_token, {"Authorization": "Bearer guess"}, 401),
    "a part of the token": (gate.check_token, {"Authorization": f"Bearer {TOKEN[:-1]}"}, 401),
    "more than the token": (gate.check_token, {"Authorization": f"Bearer {TOKEN}x"}, 401),
    "another scheme": (gate.check_token, {"Authorization": f"Basic {TOKEN}"}, 401),
    "a form": (gate.check_type, {"Content-Type": FORM}, 415),
    "plain text": (gate.check_type, {"Content-Type": "text/plain"}, 415),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_by_its_check_alone(name, directory, monkeypatch):
    check, headers, status = ATTACKS[name]
    rules = Rules(token=TOKEN if check is gate.check_token else None)
    with serving(directory, rules=rules) as server:
        if headers.get("Host") == "":  # HTTP/1.1 itself needs one; an empty one is none
            headers = {"Host": " "}
        found, content, _ = server.ask("POST", "/v1/embed", body(), headers=headers)
        assert found == status and content["error"]["message"]
        monkeypatch.setattr(gate, "CHECKS", tuple(one for one in gate.CHECKS if one is not check))
        assert server.ask("POST", "/v1/embed", body(), headers=headers)[0] == 200


def test_the_page_can_be_opened_from_a_link_and_the_interface_cannot(directory):
    visit = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    with serving(directory) as server:
        assert server.ask("GET", "/", headers=visit)[0] == 200
        assert server.ask("GET", "/v1/model", headers=visit)[0] == 403
        own = {"Sec-Fetch-Site": "same-origin", "Origin": server.url.rstrip("/")}
        assert server.ask("POST", "/v1/embed", body(), headers=own)[0] == 200


def test_only_this_machine_is_served_unless_there_is_a_token(directory, monkeypatch):
    started = []
    monkeypatch.setattr("qmargin.serve.server.run", lambda app, listener: started.append(listener))
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 lets other machines .* --token"):
        run_command("serve", directory, "--host", "0.0.0.0", "--no-open", "--port", 0)
    with pytest.raises(ConfigError, match="--token has 5 characters; give 16"):
        run_command("serve", directory, "--host", "0.0.0.0", "--token", "short", "--no-open")
    assert started == []
    run_command("serve", directory, "--no-open", "--port", 0)
    run_command("serve", directory, "--host", "0.0.0.0", "--token", TOKEN, "--no-open", "--port", 0)
    assert len(started) == 2


def test_it_listens_on_the_loopback_address(directory, monkeypatch, capsys):
    places = []
    monkeypatch.setattr(
        "qmargin.serve.server.run", lambda app, listener: places.append(listener.getsockname()[0])
    )
    run_command("serve", directory, "--no-open", "--port", 0)
    assert places == ["127.0.0.1"]
    assert "http://127.0.0.1:" in capsys.readouterr().out


def test_the_address_of_all_addresses_is_one_that_a_browser_can_open(
    directory, monkeypatch, capsys
):
    monkeypatch.setattr("qmargin.serve.server.run", lambda app, listener: None)
    run_command("serve", directory, "--host", "0.0.0.0", "--token", TOKEN, "--no-open", "--port", 0)
    shown = capsys.readouterr().out
    assert re.search(rf"^http://127\.0\.0\.1:\d+/#token={TOKEN}$", shown, re.M)
    assert "on other machines, put this machine's IP address into it" in shown


def test_a_server_with_a_token_takes_addresses_and_its_own_name(directory):
    rules = Rules("example.test", TOKEN)
    with serving(directory, rules=rules) as server:
        for host, status in (("192.168.1.7:8", 200), ("example.test", 200), ("evil.test", 403)):
            assert server.ask("GET", "/v1/model", headers={"Host": host})[0] == status
        without = {"Authorization": ""}
        assert server.ask("GET", "/", headers=without)[0] == 200
        assert server.ask("GET", "/v1/model", headers=without)[0] == 401
        assert server.ask("GET", "/v1/openapi.json", headers=without)[0] == 401


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"inputs": [' + "[]," * 9_999 + "[]]}", "over 10,000 values"),
        ('{"pairs": [], "far": "' + "1" * 400_000 + 'x"}', "far"),
        ('{"' + "a" * 400_000 + '": 1}', "aaa"),
    ],
    ids=["many", "digits", "key"],
)
def test_a_request_that_would_take_long_to_read_is_refused_soon(directory, content, named):
    with serving(directory, fit="resize") as server:
        began = time.monotonic()
        status, answer, _ = server.ask("POST", "/v1/verify", raw=content.encode())
        assert status == 422 and named in answer["error"]["message"]
        assert (
            time.monotonic() - began < 10.0
        )  # minutes, where every digit is tried with the others


@pytest.mark.parametrize("is_checked", [True, False])
def test_the_size_of_an_upload_is_limited_before_it_is_read(directory, monkeypatch, is_checked):
    if not is_checked:
        monkeypatch.setattr(gate, "CHECKS", gate.CHECKS[:-1])
    with serving(directory, rules=Rules(upload_bytes=10_000), fit="resize") as server:
        large = json.dumps({"inputs": [b64(picture(size=100))]}).encode()
        assert len(large) > 10_000
        status, content, _ = server.ask("POST", "/v1/embed", raw=large)
        if is_checked:
            assert status == 413 and "limit is 10,000" in content["error"]["message"]
            promised = {"Content-Length": "999999999999"}  # nothing of it is sent
            assert server.ask("POST", "/v1/embed", raw=b"", headers=promised)[0] == 413
            chunked = {"Content-Length": "", "Transfer-Encoding": "chunked"}
            status, content, _ = server.ask("POST", "/v1/embed", raw=b"0\r\n\r\n", headers=chunked)
            assert status == 411 and "Content-Length" in content["error"]["message"]
            both = {"Content-Length": "1", "Transfer-Encoding": "chunked"}  # the second one counts
            assert server.ask("POST", "/v1/embed", raw=b"0\r\n\r\n", headers=both)[0] == 411
        else:
            assert status == 200


def test_pixels_are_limited_by_the_header(directory):
    content = picture(size=64)
    with serving(directory, limits=Limits(pixels=64 * 64 - 1), fit="resize") as server:
        status, message = server.refusal("embed", {"inputs": [b64(content)]})
        assert status == 422 and "64 x 64 pixels; at most 4,095" in message
        status, message = server.refusal("embed", {"inputs": [b64(huge_png())]})
        assert status == 422 and "at most 4,095 are decoded" in message
    with serving(directory, limits=Limits(pixels=64 * 64), fit="resize") as server:
        assert server.post("embed", {"inputs": [b64(content)]})


def test_a_picture_of_40000_pixels_is_refused_without_the_memory_for_it(directory):
    with serving(directory, fit="resize") as server:
        status, message = server.refusal("embed", {"inputs": [b64(huge_png())]})
        assert status == 422 and "pixels; at most 50,000,000 are decoded" in message
        status, message = server.refusal("embed", {"inputs": [b64(huge_png(12_000))]})
        assert status == 422 and "at most 50,000,000 are decoded" in message


def test_seconds_are_limited_by_the_header(voices):
    content = {"inputs": [b64(recording(seconds=3.0))]}
    with serving(voices, limits=Limits(seconds=2.0)) as server:
        status, message = server.refusal("embed", content)
        assert status == 422 and "the header says 3 s; at most 2 are read" in message
    with serving(voices, limits=Limits(seconds=3.0)) as server:
        assert server.post("embed", content)


def test_files_are_decoded_by_the_hardened_readers_alone(directory, monkeypatch):
    """Formats that Pillow knows and the reader does not are refused."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (16, 16), (1, 2, 3)).save(buffer, format="TIFF")
    with serving(directory) as server:
        status, message = server.refusal("embed", {"inputs": [b64(buffer.getvalue())]})
        assert status == 422 and "not an image of a known format" in message
    calls = []
    whole = images.decode_image

    def counted(*arguments, **options):
        calls.append(options["max_pixels"])
        return whole(*arguments, **options)

    monkeypatch.setattr(images, "decode_image", counted)
    with serving(directory, limits=Limits(pixels=9_999)) as server:
        server.post("embed", body())
    assert calls == [9_999]


@pytest.mark.parametrize("path", ["/", "/serve.js", "/v1/model", "/nowhere", "/v1/embed"])
def test_every_answer_has_the_policy(directory, path, monkeypatch):
    with serving(directory) as server:
        _, content, headers = server.ask("GET", path)
        policy = headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy and "http" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers and "server" not in headers
        if isinstance(content, bytes):
            assert b"http://" not in content.replace(b"http://www.w3.org/", b"")
            assert b"https://" not in content
        refused = server.ask("GET", path, headers={"Host": "evil.example"})
        assert refused[0] == 403 and refused[2]["content-security-policy"] == policy
        monkeypatch.setattr(gate, "HEADERS", {})
        assert "content-security-policy" not in server.ask("GET", path)[2]


def test_nothing_of_an_input_is_written_or_logged(directory, tmp_path, monkeypatch, capfd):
    """Not even where something unexpected happens."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    secret = "Ada-Lovelace"
    opened = []
    sys.addaudithook(lambda event, given: opened.append(given) if event == "open" else None)
    with serving(directory) as server:
        opened.clear()
        good = b64(picture())
        server.post("gallery", {"name": secret, "inputs": [good]})
        server.post("identify", {"inputs": [good], "fpir": 0.5, "show": True})
        server.refusal("embed", {"inputs": [b64(secret.encode())]})

        def fail(*_, **__):
            raise ValueError(secret)

        monkeypatch.setattr(server.service.reader, "read", fail)
        status, message = server.refusal("embed", {"inputs": [good]})
        assert status == 500 and "unexpected ValueError" in message and secret not in message
        written = [given for given in opened if _writes(given)]
    assert written == []
    assert list(tmp_path.iterdir()) == []
    shown = capfd.readouterr()
    assert shown.out == "" and secret not in shown.err
    assert shown.err.startswith("unexpected ValueError in ")


def _writes(given) -> bool:
    _, mode, flags = given
    can_write = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    return bool(can_write) or (isinstance(mode, str) and any(sign in mode for sign in "wax+"))


def test_the_gallery_is_written_only_where_a_store_is_named(directory, tmp_path):
    store = tmp_path / "gallery.safetensors"
    with serving(directory, store=store) as server:
        assert not store.exists()
        server.post("gallery", {"name": "Ada", "inputs": [b64(picture())]})
        assert store.stat().st_mode & 0o777 == 0o600


def test_the_page_says_how_the_model_may_be_used(directory):
    with serving(directory) as server:
        _, page, _ = server.ask("GET", "/")
        assert b'id="use"' in page and b"agreed" in page
        _, described, _ = server.ask("GET", "/v1/model")
        assert "agreed to it" in described["intended_use"]


@pytest.mark.parametrize("name", ["starlette", "uvicorn"])
def test_a_missing_package_is_named(name, directory, monkeypatch):
    from importlib import util

    from qmargin.cli import serve
    from qmargin.errors import BackendError

    monkeypatch.setattr(
        serve, "find_spec", lambda asked: None if asked == name else util.find_spec(asked)
    )
    with pytest.raises(BackendError, match=rf"needs {name}, .* pip install 'qmargin\[serve\]'"):
        run_command("serve", directory)


def test_memory_for_inputs_is_limited(directory):
    with serving(directory, budget=5_000) as server:
        status, message = server.refusal("embed", {"inputs": [b64(picture())] * 2})
        assert status == 503 and "takes at most 5,000" in message
        assert server.service.budget.held == 0
        assert server.post("embed", body())
    with pytest.raises(ConfigError, match="the limit batch is 0"):
        Limits(batch=0)


def test_models_are_read_with_limits_of_their_own(directory):
    assert models.Inputs(models.load_model(directory).card).max_pixels == images.MAX_PIXELS
    assert app.COPIES * Limits().upload_bytes < service.BUDGET
