import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from helpers.results import HOSTILE, hostile_result, some_run, synthetic_result
from qmargin.evaluation.result import Result, Value
from qmargin.report.journal import Journal
from qmargin.report.numbers import LONGEST_NAME, LONGEST_TEXT, cleaned
from qmargin.report.page import _environment, render_page
from qmargin.report.systems import arrange, paired_differences

JOURNAL = Journal("journal", (0.0, 10.0), (900.0, 30.0), (5000.0, 700.0), 2, 2_059_906)
SECTIONS = ["verdict", "data", "det", "scores", "points", "pairs"]
SECTIONS += ["groups", "hardest", "sparsity", "calibration", "protocol"]


def page_of(*results: Result, **options: object) -> str:
    panels = arrange(results)
    differences = [paired_differences(panel) for panel in panels]
    return render_page("A title", panels, differences, **options)


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of the page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page() -> str:
    names = ("A", "B")
    results = [
        synthetic_result(name, separation=5.4 - i, groups=("g1", "g2"), keys=("k1", "k2"))
        for i, name in enumerate(names)
    ]
    return page_of(*results, journals=[JOURNAL])


def test_sections_come_in_the_order_of_the_definition(page: str) -> None:
    found = [attributes["id"] for tag, attributes in Elements(page).found if tag == "section"]
    assert found == SECTIONS


def test_sections_without_content_are_left_out() -> None:
    found = [a["id"] for tag, a in Elements(page_of(synthetic_result())).found if tag == "section"]
    assert found == [name for name in SECTIONS if name not in ("groups", "hardest", "sparsity")]


def test_measures_that_nobody_has_are_left_out(page: str) -> None:
    assert "minCllr" in page
    result = synthetic_result()
    metrics = replace(result.measures, cllr=Value(None), min_cllr=Value(None))
    bare = replace(result, measures=metrics, calibration=None)
    assert "minCllr" not in page_of(bare)


def test_trainings_share_a_drawing() -> None:
    other = replace(JOURNAL, name="other", largest=(None, None))
    section = page_of(synthetic_result(), journals=[JOURNAL, other]).partition('id="sparsity"')[2]
    assert section.count('class="plot"') == 1
    assert "5,000 (0.243 %)" in section  # of 2,059,906
    assert all(f"c{colour} support-mean" in section for colour in (0, 1))


def test_verdict_has_all_five_numbers(page: str) -> None:
    verdict = page.partition('id="verdict"')[2].partition("</section>")[0]
    point = synthetic_result("A", separation=5.4).measures.tar[1]
    assert f"{100 * point.tar:.2f} %" in verdict
    assert f"{100 * point.interval[0]:.2f} to {100 * point.interval[1]:.2f} %" in verdict
    for words in ("achieved FAR", "false accepts, 200 allowed", "threshold", "10⁻³"):
        assert words in verdict


def test_policy_allows_this_style_and_script_and_nothing_else(page: str) -> None:
    policy = next(a["content"] for _, a in Elements(page).found if "http-equiv" in a)
    for kind in ("style", "script"):
        (text,) = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy and "http" not in policy


def test_nothing_is_fetched_and_no_attribute_runs(page: str) -> None:
    for tag, attributes in Elements(page).found:
        assert tag not in ("iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "style"
            if name in ("src", "href"):
                assert value.startswith(("#", "data:")), value


def test_hostile_names_add_no_element() -> None:
    tame = Elements(page_of(*[synthetic_result(f"n{i}", seed=i) for i in range(len(HOSTILE))]))
    wild = Elements(page_of(*[hostile_result(i) for i in range(len(HOSTILE))]))
    assert {tag for tag, _ in wild.found} <= {tag for tag, _ in tame.found} | {
        "ol",
        "li",
        "h4",
        "h5",
    }
    names = {name for _, attributes in wild.found for name in attributes}
    assert not any(name.startswith("on") for name in names)
    assert '<img src=x onerror="window.__pwned=1">' in wild.text  # shown, not run


def test_names_keep_their_letters_and_lose_what_moves_text() -> None:
    assert cleaned("Ωμέγα 中文 é") == "Ωμέγα 中文 é"
    for sign in ("\x00", "\n", "\x1b", "\u202e", "\u2066", "\u200b", "\u2028", "\ud800"):
        assert cleaned(f"a{sign}b") == "a\ufffdb"
    assert len(cleaned("x" * 10_000)) == LONGEST_NAME


def test_every_text_is_escaped_and_cleaned_wherever_it_is_printed() -> None:
    template = _environment().from_string('<p title="{{ a }}">{{ a }}</p>{{ a|tojson }}')
    for attack in HOSTILE:
        page = template.render(a=attack)
        found = re.fullmatch(r'<p title="([^"<>]*)">([^<>]*)</p>([^<>&]*)', page)
        assert found is not None
        shown = cleaned(attack, LONGEST_TEXT)
        assert [html.unescape(part) for part in found.groups()[:2]] == [shown, shown]
        assert json.loads(found.group(3)) == attack


def test_the_run_and_the_protocol_are_listed() -> None:
    run = some_run("q_margin", 7, device="NVIDIA H200", steps=20_000)
    text = page_of(synthetic_result(run=run)).partition('id="protocol"')[2]
    for words in (
        "q_margin",
        "alpha 1.25",
        "prior 0.2",
        "NVIDIA H200",
        "20,000",
        run.recipe_sha256,
    ):
        assert words in text
    for words in ("trials", "cosine"):
        assert f"<bdi>{words}</bdi>" in text


def test_not_measurable_is_a_word_not_a_number() -> None:
    page = page_of(
        synthetic_result("A", num_impostors=5_000), synthetic_result("B", num_impostors=5_000)
    )
    table = page.partition('id="points"')[2].partition("</table>")[0]
    assert table.count("not measurable") == 4


def test_best_is_bold_and_the_rule_is_named() -> None:
    page = page_of(synthetic_result("A", separation=4.5), synthetic_result("B", separation=5.5))
    points = page.partition('id="points"')[2].partition("<details>")[0]
    assert "conservative rule" in points
    a, b = points.partition("</table>")[0].split("<tr>")[-2:]
    assert (a.count("<b>"), b.count("<b>")) == (0, 4)


def test_many_systems_and_panels_fit_one_page() -> None:
    results = [synthetic_result(f"s{i}", seed=i, num_replicates=20) for i in range(12)]
    results += [synthetic_result("s0", protocol="IJB-C")]
    page = page_of(*results)
    assert page.count('<figure class="det') == 2
    assert "dash0" in page  # twelve systems, eight colours


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_have_contrast_in_every_theme(page: str) -> None:
    blocks = re.findall(r"\{([^{}]*--paper:[^{}]*)\}", page)
    assert len(blocks) == 4  # light, dark by choice, dark by preference, print
    assert dict(re.findall(r"--(\w[\w-]*): (#\w{6})", blocks[1])) == dict(
        re.findall(r"--(\w[\w-]*): (#\w{6})", blocks[2])
    )
    for block in blocks:
        colours = dict(re.findall(r"--(\w[\w-]*): (#\w{6})", block))
        for text in ("ink", "soft", "link"):
            assert contrast(colours[text], colours["paper"]) >= 4.5, text
            assert contrast(colours[text], colours["panel"]) >= 4.5, text
        for badge in ("ok", "warn", "bad"):
            assert contrast(colours[badge], colours[f"{badge}-back"]) >= 4.5, badge
        for series in (f"s{i}" for i in range(8)):
            assert contrast(colours[series], colours["paper"]) >= 3.0, series


def test_templates_are_beside_the_package() -> None:
    import qmargin.report

    folder = Path(qmargin.report.__file__).parent / "templates"
    names = {"page.css", "page.js", "page.html.j2", "parts.html.j2", "sections.html.j2"}
    assert {path.name for path in folder.iterdir()} == names
