"""The page in a real browser; ``make browser`` installs one where it is missing."""

import io
import re
import wave
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from helpers.browser import LOW_CONTRAST, Browser, find_browser, running_browser
from helpers.results import HOSTILE, hostile_result, synthetic_result, write_results
from qmargin.report import ReportOptions, write_report

JOURNAL = '{"step": 0, "support_mean": 900, "support_max": 5000}\n{"step": 9, "support_mean": 30}\n'
BROKEN_WORDS = """(() => {
  const broken = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode()); ) {
    if (node.parentElement.closest("code, svg, .definitions, .unseen, thead")) continue;
    for (const word of node.data.matchAll(/[\\p{L}\\d.,]+/gu)) {
      const range = document.createRange();
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      const tops = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
      if (tops.size > 1) broken.push(word[0]);
    }
  }
  return broken;
})()"""


OVERLAPPING_LABELS = """(() => {
  const overlapping = [], seen = [];
  for (const svg of document.querySelectorAll("svg.plot")) {
    const labels = [...svg.querySelectorAll("text.tick, text.axis")]
      .filter((e) => e.textContent && e.getClientRects().length)
      .map((e) => [e.textContent, e.getBoundingClientRect()]);
    seen.push(...labels);
    labels.forEach(([a, one], place) => labels.slice(place + 1).forEach(([b, other]) => {
      if (one.left < other.right && other.left < one.right && one.top + 3 < other.bottom
        && other.top + 3 < one.bottom) overlapping.push(`${a} | ${b}`);
    }));
  }
  return {seen: seen.length, overlapping};
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    executable = find_browser()
    if executable is None:
        pytest.skip("no chromium on this machine: make browser installs it")
    with running_browser(executable, tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    options = {"groups": ("a", "b", "c"), "keys": tuple(f"id{i}/{i}.wav" for i in range(5))}
    results = [
        synthetic_result(name, seed=i, separation=5.4 - 0.2 * i, card={"loss": name}, **options)
        for i, name in enumerate(("Q-Margin", "ArcFace", "CosFace"))
    ]
    journal = folder / "journal.jsonl"
    journal.write_text(JOURNAL)
    chosen = ReportOptions(journals=(journal,), has_figures=False)
    return write_report(write_results(folder, *results), folder / "out", chosen)[0]


@pytest.fixture(autouse=True)
def desktop(browser: Browser):
    browser.prefer("light")
    browser.resize(1280, 900)


def readout(browser: Browser) -> tuple[str, str]:
    at, tar = (
        browser.evaluate(f"document.querySelector('.readout {part}').textContent")
        for part in (".at", ".tar")
    )
    return at, tar


def test_page_loads_without_a_complaint_fetches_nothing_and_draws_the_det(browser, page):
    browser.open(page)
    assert browser.problems() == []
    assert [url for url in browser.requested() if not url.startswith("data:")] == [page.as_uri()]
    assert browser.evaluate("document.title") == "Verification report"
    sizes = browser.evaluate(
        "[...document.querySelectorAll('.det svg .curve')].filter((c) => c.closest('.plot'))"
        ".map((c) => [c.getTotalLength(), getComputedStyle(c).stroke])"
    )
    assert len(sizes) == 3
    assert all(length > 300 for length, _ in sizes)
    assert len({stroke for _, stroke in sizes}) == 3  # the style was not blocked
    assert browser.evaluate("document.querySelectorAll('.det .band').length") == 3
    assert browser.evaluate("document.querySelector('.few').getBBox().width") > 20


def test_hovering_reads_out(browser, page):
    browser.open(page)
    assert readout(browser)[0] == "0.1 %"
    browser.evaluate("document.querySelector('.det').scrollIntoView({behavior: 'instant'})")
    box = browser.evaluate(
        "(() => {const b = document.querySelector('.det .plot').getBoundingClientRect();"
        "return [b.left, b.top, b.width, b.height]})()"
    )
    seen = []
    for share in (0.2, 0.5, 0.9):
        browser.hover(box[0] + share * box[2], box[1] + 0.5 * box[3])
        seen.append(readout(browser))
    assert len({at for at, _ in seen}) == 3
    tars = [float(tar) for _, tar in seen]
    assert tars == sorted(tars) and tars[0] < tars[-1]  # a larger FAR accepts more


def test_keyboard_reads_out(browser, page):
    browser.open(page)
    browser.evaluate("document.querySelector('.det-slider').focus()")
    before = readout(browser)
    for _ in range(3):
        browser.press("ArrowRight", 39)
    after = readout(browser)
    assert (before[0], after[0]) == ("0.1 %", "0.2 %")
    assert float(after[1]) > float(before[1])
    spoken = browser.evaluate(
        "document.querySelector('.det-slider').getAttribute('aria-valuetext')"
    )
    assert spoken.startswith("FAR 0.2 %: TAR % Q-Margin ")


def test_systems_can_be_hidden(browser, page):
    browser.open(page)
    count = (
        "[...document.querySelectorAll('.det .plot .curve')]"
        ".filter((c) => c.getClientRects().length).length"
    )
    assert browser.evaluate(count) == 3
    browser.evaluate("document.querySelector('[data-toggle]').click()")
    assert browser.evaluate(count) == 2
    pressed = "document.querySelector('[data-toggle]').getAttribute('aria-pressed')"
    assert browser.evaluate(pressed) == "false"


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("light", 320)]
)
def test_page_fits_the_screen_and_text_has_contrast(browser, page, scheme, width):
    browser.prefer(scheme)
    browser.resize(width, 900, is_mobile=width < 1000)
    browser.open(page)
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    drawn = Image.open(io.BytesIO(browser.screenshot(page.with_suffix(".png")))).convert("RGB")
    assert drawn.width == width and drawn.height > 2000
    assert len(drawn.getcolors(1 << 24)) > 100
    browser.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert browser.evaluate(LOW_CONTRAST) == []


@pytest.mark.parametrize("width", [1280, 390])
def test_labels_of_an_axis_do_not_overlap(browser, page, width):
    browser.resize(width, 900, is_mobile=width < 1000)
    browser.open(page)
    found = browser.evaluate(OVERLAPPING_LABELS)
    assert found["seen"] > 20 and found["overlapping"] == []


def test_tables_and_differences_have_room_on_a_desktop(browser, page):
    browser.resize(1100, 900)
    browser.open(page)
    browser.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    hidden = (
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
        ".map((e) => e.ariaLabel)"
    )
    assert browser.evaluate(hidden) == []
    places = [
        browser.evaluate(
            f"(({{left, top, right, bottom}}) => [left, top, right, bottom])"
            f"(document.querySelector('.det .{name}').getBoundingClientRect())"
        )
        for name in ("det-plot", "differences")
    ]
    (_, _, right, bottom), (left, top, _, _) = places
    assert left > right and top < bottom  # beside the curves, not below them


def test_a_phone_shows_every_column_and_breaks_no_word(browser, page):
    browser.resize(390, 900, is_mobile=True)
    browser.open(page)
    browser.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    hidden = (
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth)"
    )
    assert browser.evaluate(f"{hidden}.length") == 0
    assert browser.evaluate(BROKEN_WORDS) == []


def test_theme_follows_the_system_and_the_button(browser, page):
    colour = "getComputedStyle(document.body).backgroundColor"
    browser.open(page)
    light = browser.evaluate(colour)
    browser.prefer("dark")
    browser.open(page)
    dark = browser.evaluate(colour)
    assert dark != light
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(colour) == light
    browser.open(page)
    assert browser.evaluate(colour) == light  # remembered
    browser.evaluate("localStorage.clear()")


def test_fields_and_drawings_are_labelled(browser, page):
    browser.open(page)
    tree = browser.call("Accessibility.getFullAXTree")["nodes"]
    for role in ("slider", "button", "image", "region", "navigation"):
        found = [node for node in tree if node.get("role", {}).get("value") == role]
        assert found, role
        for node in found:
            assert node["name"]["value"].strip(), node


@pytest.mark.parametrize("has_policy", [True, False])
def test_hostile_names_do_not_run(browser, tmp_path, has_policy):
    """Once with the policy, and once without it: escaping alone must be enough."""
    results = [hostile_result(index) for index in range(len(HOSTILE))]
    options = ReportOptions(title=HOSTILE[1], has_figures=False)
    page = write_report(write_results(tmp_path, *results), tmp_path / "out", options)[0]
    if not has_policy:
        text = page.read_text(encoding="utf-8")
        bare, count = re.subn(r"<meta http-equiv=[^>]*>", "", text)
        assert count == 1
        page.write_text(bare, encoding="utf-8")
    browser.open(page)
    browser.evaluate("new Promise((done) => setTimeout(done, 200))")
    assert browser.evaluate("typeof window.__pwned") == "undefined"
    assert browser.problems() == []
    shown = browser.evaluate("document.querySelector('.legend bdi').textContent")
    assert shown == HOSTILE[0]
    assert browser.evaluate("document.querySelectorAll('script').length") == 2


def test_an_injected_script_would_be_seen(browser, page, tmp_path):
    """The test above can fail: the same attack, unescaped, runs without the policy only."""
    attack = "<script>window.__pwned=1</script></body>"
    text = page.read_text(encoding="utf-8").replace("</body>", attack)
    guarded, bare = tmp_path / "guarded.html", tmp_path / "bare.html"
    guarded.write_text(text, encoding="utf-8")
    bare.write_text(re.sub(r"<meta http-equiv=[^>]*>", "", text), encoding="utf-8")
    browser.open(guarded)
    assert browser.evaluate("typeof window.__pwned") == "undefined"
    assert browser.problems() != []
    browser.open(bare)
    assert browser.evaluate("window.__pwned") == 1


def test_recordings_can_be_played_and_images_are_shown(browser, tmp_path):
    keys = ("voice0.wav", "voice1.wav", "face0.png", "face1.png")
    for key in keys[:2]:
        with wave.open(str(tmp_path / key), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(bytes(2 * 8000))
    for key in keys[2:]:
        Image.new("RGB", (64, 64), "green").save(tmp_path / key)
    paths = write_results(tmp_path, synthetic_result(keys=keys))
    options = ReportOptions(media=tmp_path, has_figures=False)
    browser.open(write_report(paths, tmp_path / "out", options)[0])
    seconds = browser.evaluate(
        "Promise.all([...document.querySelectorAll('audio')].map((player) => new Promise((done) => "
        "{ player.onloadedmetadata = () => done(player.duration); player.onerror = done; "
        "player.load(); })))"
    )
    assert browser.problems() == []
    assert seconds == [1.0] * 14  # in the opening, too
    widths = browser.evaluate(
        "[...document.querySelectorAll('.pairs img')].map((i) => i.naturalWidth)"
    )
    assert widths == [64] * 10


def test_page_prints_light_on_paper(browser, page):
    browser.prefer("dark")
    browser.open(page)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert (
        browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    )
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.call("Page.printToPDF")["data"].startswith("JVBERi0")  # %PDF-
    browser.call("Emulation.setEmulatedMedia", media="")
