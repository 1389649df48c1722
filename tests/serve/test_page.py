"""The served page in a real browser; ``make browser`` installs one where it is missing."""

import re
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.browser import LOW_CONTRAST, find_browser, running_browser
from helpers.serving import (
    b64,
    face_model,
    huge_png,
    picture,
    recording,
    serving,
    voice_model,
    wav,
)
from qmargin.serve import gate
from qmargin.serve.gate import Rules
from qmargin.serve.made import Made

MINUS = "\N{MINUS SIGN}"
FAKE_DEVICES = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    executable = find_browser()
    if executable is None:
        pytest.skip("no chromium on this machine: make browser installs it")
    with running_browser(executable, tmp_path_factory.mktemp("profile"), *FAKE_DEVICES) as started:
        yield started


@pytest.fixture(autouse=True)
def desktop(browser):
    browser.prefer("light")
    browser.resize(1280, 900)


@pytest.fixture(scope="module")
def faces(tmp_path_factory):
    made = Made("person", lambda index: picture(index // 20))
    directory = face_model(tmp_path_factory.mktemp("serve") / "m")
    with serving(directory, fit="resize", made=made) as server:
        yield server


@pytest.fixture(scope="module")
def voices(tmp_path_factory):
    with serving(voice_model(tmp_path_factory.mktemp("serve") / "v")) as server:
        yield server


@pytest.fixture
def files(tmp_path):
    """Pictures of two people, a recording, and what is neither."""
    contents = {
        "a.png": picture(1),
        "b.png": picture(2),
        "voice.wav": recording(),
        "other.wav": recording(1),
        "silence.wav": wav(np.zeros(16_000)),
        "cut.png": picture(3)[:200],
        "huge.png": huge_png(),
        "notes.txt": b"not a picture",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def visit(browser, server):
    browser.open(server.url)
    browser.wait_until("document.documentElement.dataset.ready")


def choose(browser, slot: str, path: Path):
    browser.upload(f'.slot[data-slot="{slot}"] input', path)


def text(browser, identity: str) -> str:
    return browser.evaluate(f"document.getElementById('{identity}').textContent")


def is_shown(browser, identity: str) -> bool:
    return browser.evaluate(f"!document.getElementById('{identity}').hidden")


def wait_for_outcome(browser):
    browser.wait_until("!document.getElementById('outcome').hidden")


def verify(browser, first: Path, second: Path):
    choose(browser, "a", first)
    browser.wait_until("document.querySelector('.slot[data-slot=a] .view img')")
    choose(browser, "b", second)
    wait_for_outcome(browser)


def test_two_files_are_compared(browser, faces, files):
    visit(browser, faces)
    assert browser.evaluate("document.title") == "qmargin: small"
    verify(browser, files / "a.png", files / "a.png")
    assert text(browser, "decision") == "The same person"
    assert re.search(
        r"The score 1\.0000 reaches the threshold .* accepts 1 pair of different people in 1,000 "
        r"and \d+ of 100 pairs of the same person\.$",
        text(browser, "sentence"),
    )
    sizes = "[...document.querySelectorAll('#verify img.face')].map((i) => i.naturalWidth)"
    assert browser.evaluate(sizes) == [16, 16]  # as the model sees them
    areas = "[...document.querySelectorAll('#scale .area')].map((a) => a.getBBox().width > 100)"
    assert browser.evaluate(areas) == [True, True]
    assert browser.evaluate("document.querySelectorAll('#scale .score-line').length") == 1
    assert browser.problems() == []
    outside = [u for u in browser.requested() if not u.startswith((faces.url, "data:", "blob:"))]
    assert outside == []


def test_files_are_dropped(browser, faces, files):
    """On a slot, where they are compared, and beside it, where the page stays."""
    visit(browser, faces)

    def drop(selector: str, path: Path):
        box = f"document.querySelector('{selector}').getBoundingClientRect()"
        place = {axis: browser.evaluate(f"{box}.{axis} + 20") for axis in ("x", "y")}
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            browser.call("Input.dispatchDragEvent", type=kind, data=data, **place)

    drop("h2", files / "a.png")
    assert browser.evaluate("location.href").rstrip("/") == faces.url.rstrip("/")
    for slot in "ab":
        drop(f".slot[data-slot={slot}]", files / f"{slot}.png")
        browser.wait_until(f"document.querySelector('.slot[data-slot={slot}] .view img')")
    wait_for_outcome(browser)
    assert text(browser, "sentence").startswith("The score ")


def test_the_slider_moves_the_threshold_and_the_decision(browser, faces, files):
    visit(browser, faces)
    verify(browser, files / "a.png", files / "b.png")
    score = float(
        re.search(r"score (.\d?\.?\d+)", text(browser, "sentence").replace(MINUS, "-"))[1]
    )
    limits = [stop.threshold for stop in faces.service.decisions.stops]
    for place, limit in ((0, limits[0]), (len(limits) - 1, limits[-1])):
        browser.evaluate(
            f"(() => {{const s = document.getElementById('far'); s.value = {place}; "
            "s.dispatchEvent(new Event('input'))})()"
        )
        expected = "The same person" if score >= limit else "Different people"
        assert text(browser, "decision") == expected
        assert f"threshold {limit:.4f}".replace("-", MINUS) in text(browser, "sentence")
    browser.evaluate("document.getElementById('far').focus()")
    before = text(browser, "far-text")
    browser.press("ArrowLeft", 37)
    assert text(browser, "far-text") != before
    spoken = "document.getElementById('far').getAttribute('aria-valuetext')"
    assert browser.evaluate(spoken) == f"FAR {text(browser, 'far-text')}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("notes.txt", "not an image of a known format"),
        ("voice.wav", "is a recording (WAV) and small compares pictures"),
        ("cut.png", "cannot be read"),
        ("huge.png", "at most 50,000,000 are decoded"),
    ],
)
def test_a_wrong_file_is_explained_and_the_next_one_works(browser, faces, files, name, message):
    visit(browser, faces)
    choose(browser, "a", files / name)
    browser.wait_until("!document.getElementById('verify-problem').hidden")
    assert message in text(browser, "verify-problem")
    assert text(browser, "verify-problem").startswith("file A ")  # as the page calls it
    verify_after(browser, files)


def verify_after(browser, files):
    choose(browser, "b", files / "b.png")
    browser.wait_until("document.querySelector('.slot[data-slot=b] .view img')")
    choose(browser, "a", files / "a.png")
    wait_for_outcome(browser)
    assert not is_shown(browser, "verify-problem")


def attempt(browser, kind: str):
    browser.evaluate(f"document.querySelector('[data-try={kind}]').click()")


def test_generated_people_can_be_compared(browser, faces, files):
    visit(browser, faces)
    attempt(browser, "same")
    wait_for_outcome(browser)
    assert text(browser, "decision") == "The same person"
    truth = "These pictures were generated as the same person, so the decision is right."
    assert text(browser, "truth") == truth
    browser.evaluate("document.getElementById('outcome').hidden = true")
    attempt(browser, "different")
    wait_for_outcome(browser)
    is_right = text(browser, "decision") == "Different people"
    assert text(browser, "truth").endswith("right." if is_right else "wrong.")
    browser.evaluate("document.getElementById('outcome').hidden = true")
    choose(browser, "b", files / "b.png")  # one of the two is not generated
    wait_for_outcome(browser)
    assert not is_shown(browser, "truth")


def test_generated_people_can_be_enrolled_and_searched(browser, tmp_path):
    made = Made("person", lambda index: picture(index // 20))
    with serving(face_model(tmp_path / "m"), made=made) as server:
        visit(browser, server)
        for _ in range(2):  # the same ten
            attempt(browser, "enrol")
            browser.wait_until("document.querySelectorAll('#gallery li').length === 10")
        assert text(browser, "gallery-size") == "10 names, 10 samples"
        browser.evaluate("document.getElementById('fpir').value = 11")  # 50 %
        attempt(browser, "member")
        browser.wait_until("document.querySelectorAll('#candidates li').length === 10")
        name = text(browser, "found")
        assert text(browser, "found-truth") == f"The picture was generated as {name}."
        attempt(browser, "stranger")
        browser.wait_until("document.getElementById('found-truth').textContent.includes('outside')")
        assert browser.problems() == []


def test_a_gallery_is_enrolled_searched_and_forgotten(browser, faces, files):
    visit(browser, faces)
    for name, file in (("Ada", "a.png"), ("Bea <b>", "b.png")):
        count = browser.evaluate("document.querySelectorAll('#gallery li').length")
        browser.evaluate(f"document.getElementById('enrol-name').value = '{name}'")
        browser.upload("#enrol-files", files / file)
        browser.evaluate("document.querySelector('#enrol button').click()")
        browser.wait_until(f"document.querySelectorAll('#gallery li').length === {count + 1}")
    browser.evaluate(
        "(() => {const s = document.getElementById('fpir'); s.value = s.max; "
        "s.dispatchEvent(new Event('input'))})()"
    )
    choose(browser, "probe", files / "b.png")
    browser.wait_until("document.querySelectorAll('#candidates li').length === 2")
    assert text(browser, "found") == "Bea <b>"  # a text, not markup
    assert "reaches the threshold" in text(browser, "found-words")
    assert text(browser, "gallery-size") == "2 names, 2 samples"
    assert text(browser, "fpir-note") == ""
    assert browser.evaluate("document.querySelectorAll('#candidates b').length") == 0
    for left in (1, 0):  # the search is made again
        browser.evaluate("document.querySelector('#gallery button').click()")
        browser.wait_until(f"document.querySelectorAll('#gallery li').length === {left}")
        browser.wait_until(f"document.querySelectorAll('#candidates li').length === {left}")
    browser.wait_until("!document.getElementById('identify-problem').hidden")
    assert text(browser, "identify-problem").startswith("The gallery is empty")
    assert browser.problems() == []


def test_files_that_cannot_be_enrolled_are_named(browser, tmp_path, files):
    with serving(face_model(tmp_path / "m")) as server:
        visit(browser, server)
        for names, left in ((("cut.png",), 0), (("a.png", "cut.png"), 1)):
            browser.evaluate("document.getElementById('enrol-name').value = 'Ada'")
            browser.upload("#enrol-files", *(files / name for name in names))
            browser.evaluate("document.querySelector('#enrol button').click()")
            browser.wait_until("!document.getElementById('gallery-problem').hidden")
            assert text(browser, "gallery-problem").startswith("cut.png cannot be read")
            assert browser.evaluate("document.querySelectorAll('#gallery li').length") == left
            browser.evaluate("document.getElementById('gallery-problem').hidden = true")


def test_recordings_are_compared_and_shown(browser, voices, files):
    visit(browser, voices)
    verify(browser, files / "voice.wav", files / "other.wav")
    assert text(browser, "decision") in ("The same speaker", "Different speakers")
    drawn = "document.querySelector('.slot[data-slot=a] svg path').getTotalLength() > 300"
    assert browser.evaluate(drawn)
    assert browser.evaluate("document.querySelector('.slot img.bank').naturalHeight") == 80
    choose(browser, "a", files / "silence.wav")
    browser.wait_until("!document.getElementById('verify-problem').hidden")
    assert "is silent" in text(browser, "verify-problem")
    choose(browser, "a", files / "a.png")
    browser.wait_until("document.getElementById('verify-problem').textContent.includes('PNG')")
    assert "is a picture (PNG)" in text(browser, "verify-problem")


def test_the_camera_is_asked_for_on_a_click_alone(browser, faces):
    visit(browser, faces)
    assert browser.evaluate("document.querySelectorAll('video').length") == 0
    browser.evaluate("document.querySelector('.slot[data-slot=a] .buttons button').click()")
    browser.wait_until(
        "document.querySelector('video') && document.querySelector('video').videoWidth"
    )
    time.sleep(0.5)  # the first frames are black
    browser.evaluate("document.querySelector('.take').click()")
    browser.wait_until("document.querySelector('.slot[data-slot=a] img.face')")
    assert "camera" in browser.evaluate("document.querySelector('.slot .title').textContent")
    assert browser.problems() == []


def test_a_capture_can_be_cancelled(browser, faces, files):
    visit(browser, faces)
    choose(browser, "a", files / "a.png")
    browser.wait_until("document.querySelector('.slot[data-slot=a] img.face')")
    device = "document.querySelector('.slot[data-slot=a] .buttons button')"
    browser.evaluate(f"{device}.click()")
    browser.wait_until("document.querySelector('video')")
    assert browser.evaluate("document.activeElement.className") == "take"
    assert browser.evaluate(f"{device}.textContent") == "Cancel"
    browser.evaluate(
        f"window.track = document.querySelector('video').srcObject.getTracks()[0]; {device}.click()"
    )
    browser.wait_until("document.querySelector('.slot[data-slot=a] img.face')")
    assert browser.evaluate("window.track.readyState") == "ended"
    assert browser.evaluate(f"{device}.textContent") == "Camera"
    assert browser.evaluate(f"document.activeElement === {device}")


def test_the_microphone_is_asked_for_on_a_click_alone(browser, voices):
    visit(browser, voices)
    browser.evaluate("document.querySelector('.slot[data-slot=a] .buttons button').click()")
    browser.wait_until("document.querySelector('meter.level')")
    time.sleep(1.5)  # the fake device beeps every second
    browser.evaluate("document.querySelector('.take').click()")
    browser.wait_until("document.querySelector('.slot[data-slot=a] img.bank')")
    assert browser.problems() == []


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
)
def test_the_page_fits_and_can_be_read(browser, faces, files, scheme, width):
    browser.prefer(scheme)
    browser.resize(width, 844, is_mobile=width < 1000)
    visit(browser, faces)
    verify(browser, files / "a.png", files / "b.png")
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate("document.documentElement.dataset.theme") == scheme
    assert browser.evaluate(LOW_CONTRAST) == []
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    for role in ("slider", "button", "image", "region", "navigation", "textbox"):
        found = [node for node in tree if node.get("role", {}).get("value") == role]
        assert found, role
        for node in found:
            assert node["name"]["value"].strip(), node


def test_a_page_without_the_token_asks_for_it(browser, tmp_path):
    rules = Rules(token="a-token-of-enough-characters")
    with serving(face_model(tmp_path / "m"), rules=rules) as server:
        browser.open(server.url)
        browser.wait_until("!document.getElementById('token-form').hidden")
        browser.evaluate(f"document.getElementById('token').value = '{rules.token}'")
        browser.evaluate("document.querySelector('#token-form button').click()")
        browser.wait_until("document.documentElement.dataset.ready")
        browser.open("about:blank")
        browser.open(f"{server.url}#token={rules.token}")
        browser.wait_until("document.documentElement.dataset.ready")
        assert browser.evaluate("window.location.hash") == ""


def test_a_model_without_thresholds_says_how_to_get_one(browser, tmp_path, files):
    with serving(face_model(tmp_path / "plain", thresholds=False)) as server:
        visit(browser, server)
        assert "qmargin export MODEL --result" in text(browser, "no-threshold")
        assert browser.evaluate("document.querySelectorAll('#no-threshold code').length") == 2
        verify(browser, files / "a.png", files / "a.png")
        assert text(browser, "decision") == "Score 1.0000"
        assert not is_shown(browser, "rate")
        assert text(browser, "scale-text") == ""
        assert browser.evaluate("document.querySelector('#scale svg').clientHeight") < 250


def test_an_injected_script_does_not_run(browser, faces, monkeypatch):
    """The policy stops it; without the policy the same script runs."""
    attack = (
        "(() => {const s = document.createElement('script'); s.textContent = 'window.__pwned = 1';"
        "document.body.append(s); return window.__pwned === 1})()"
    )
    guarded = attack.replace("s.textContent = ", "s.text = ")
    visit(browser, faces)
    ran = browser.evaluate(
        f"(() => {{try {{ return {guarded} }} catch (e) {{ return false }} }})()"
    )
    assert ran is False
    monkeypatch.setattr(gate, "HEADERS", {})
    visit(browser, faces)
    assert browser.evaluate(attack) is True


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(("impostor", "genuine"), [(0, 0), (1, 2), (2, 1), (31, 31), (0, 31)])
def test_the_labels_of_the_distributions_do_not_overlap(browser, faces, impostor, genuine, width):
    browser.resize(width, 844, is_mobile=width < 1000)
    visit(browser, faces)
    apart = browser.evaluate(
        "import('/scale.js').then(({drawScale}) => {"
        f"const peaks = {{impostor: {impostor}, genuine: {genuine}}};"
        "const histogram = {edges: [...Array(33)].map((_, i) => -1 + i / 16)};"
        "for (const kind in peaks) histogram[kind] = "
        "[...Array(32)].map((_, i) => i === peaks[kind] ? 9 : 1);"
        "const svg = document.querySelector('#scale svg');"
        "drawScale(svg, {thresholds: {histogram, protocol: '', num_genuine: 1, num_impostors: 1},"
        "score: null, nouns: {one: 'speaker', many: 'speakers'}});"
        "const [a, b] = ['impostor', 'genuine'].map((kind) => "
        "svg.querySelector(`.${kind}-label`).getBBox());"
        "return [a.x, b.x, 680 - a.x - a.width, 680 - b.x - b.width,"
        "Math.max(a.x - b.x - b.width, b.x - a.x - a.width)];})"
    )
    assert min(apart) > 0


def test_a_server_that_is_gone_is_said_on_the_page(browser, tmp_path, files):
    with serving(face_model(tmp_path / "m")) as server:
        visit(browser, server)
    choose(browser, "a", files / "a.png")
    browser.wait_until("!document.getElementById('verify-problem').hidden")
    assert "The server does not answer" in text(browser, "verify-problem")


def test_a_page_of_another_site_cannot_send_anything(browser, faces, tmp_path):
    """A page from a file is another origin, as that of any other site is."""
    page = tmp_path / "other.html"
    page.write_text("<!doctype html><title>other</title>")
    browser.open(page)
    sent = (
        f"fetch('{faces.url}v1/embed', {{method: 'POST', mode: 'no-cors', headers: "
        "{'Content-Type': 'text/plain'}, body: JSON.stringify({inputs: ['"
        + b64(picture())
        + "']})})"
        ".then(() => 'sent', () => 'failed')"
    )
    before = faces.service._batcher.num_batches
    assert browser.evaluate(sent) in ("sent", "failed")
    assert faces.service._batcher.num_batches == before  # refused before it was read
