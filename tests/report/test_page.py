"""The page, its drawings and what is written beside it."""

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from PIL import Image
from scipy.special import ndtri

from helpers.results import FARS, HOSTILE, hostile_result, some_run, synthetic_result, write_results
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import (
    Det,
    GroupSpread,
    HardPair,
    Histogram,
    TrainingPoint,
    Value,
    read_result,
    write_result,
)
from qmargin.report import ReportOptions, write, write_report
from qmargin.report.figures import DASHES, draw_figures, has_matplotlib
from qmargin.report.journal import MOST_POINTS, Journal, read_journal
from qmargin.report.media import MediaFolder
from qmargin.report.numbers import LONGEST_NAME, LONGEST_TEXT, cleaned, rate_text
from qmargin.report.page import NO_BREAK, _environment, _examples, _kept, _shown, render_page
from qmargin.report.plots import (
    LETTERS,
    RATES,
    Scale,
    curve_points,
    det_geometry,
    histogram_chart,
    outcome_charts,
    point_below,
    probit,
    round_ticks,
    support_chart,
)
from qmargin.report.systems import arrange, paired_differences
from qmargin.report.tables import spread_table, tar_table, time_table

JOURNAL = Journal("journal", (0.0, 10.0), (900.0, 30.0), (5000.0, 700.0), 2, 2_059_906)
SECTIONS = ["world", "verdict", "data", "det", "scores", "points", "pairs"]
SECTIONS += ["groups", "hardest", "sparsity", "calibration", "next", "protocol"]
PLAIN = ReportOptions(has_figures=False)


def page_of(*results, **options):
    panels = arrange(results)
    return render_page("A title", panels, list(map(paired_differences, panels)), **options)


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of the page."""

    def __init__(self, page):
        super().__init__()
        self.found, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    @property
    def sections(self):
        return [attributes["id"] for tag, attributes in self.found if tag == "section"]


@pytest.fixture(scope="module")
def page():
    results = [
        synthetic_result(name, separation=5.4 - i, groups=("g1", "g2"), keys=("k1", "k2"))
        for i, name in enumerate(("A", "B"))
    ]
    return page_of(*results, journals=[JOURNAL])


def test_sections_have_an_order_and_are_left_out_without_content(page):
    assert Elements(page).sections == SECTIONS
    result = synthetic_result()
    found = Elements(page_of(result)).sections
    assert found == [name for name in SECTIONS if name not in ("groups", "hardest", "sparsity")]
    assert "minCllr" in page
    metrics = replace(result.measures, cllr=Value(None), min_cllr=Value(None))
    assert "minCllr" not in page_of(replace(result, measures=metrics, calibration=None))


def test_training_runs_share_a_drawing():
    other = replace(JOURNAL, name="other", largest=(None, None))
    section = page_of(synthetic_result(), journals=[JOURNAL, other]).partition('id="sparsity"')[2]
    assert section.count('class="plot"') == 1
    assert "5,000 (0.243 %)" in section  # of 2,059,906
    assert all(f"c{colour} dash{colour} support-mean" in section for colour in (0, 1))


def test_verdict_has_all_five_numbers(page):
    verdict = page.partition('id="verdict"')[2].partition("</section>")[0].replace(NO_BREAK, " ")
    point = synthetic_result("A", separation=5.4).measures.tar[1]
    assert f"{100 * point.tar:.2f} %" in verdict
    assert f"{100 * point.interval[0]:.2f} to {100 * point.interval[1]:.2f} %" in verdict
    for words in ("achieved FAR", "false accepts, 200 allowed", "threshold", "0.1 %"):
        assert words in verdict


def verdict_of(*results, **options):
    return Elements(
        page_of(*results, **options).partition('id="verdict"')[2].partition("</section>")[0]
    )


def test_headline_in_plain_words(page):
    text = Elements(page.partition('id="verdict"')[2].partition("</section>")[0]).text
    tar = synthetic_result("A", separation=5.4).measures.tar[1].tar
    refused = 1000 * (1 - tar) if tar > 0.99 else 100 * (1 - tar)
    size = "1,000" if tar > 0.99 else "100"
    expected = f"1 impostor in 1,000 is accepted, and {refused:.0f} of {size} genuine attempts are"
    assert expected in text
    assert "equal error rate (EER)" in text and "A tie" not in text and "Caution" not in text
    assert "Check the lead of A" in page.partition('id="next"')[2]


def test_a_tie_is_headlined_as_a_tie_and_nothing_is_bold():
    results = [synthetic_result("A"), synthetic_result("B")]
    assert "A tie: A is ahead of B by no more than chance. A accepts" in verdict_of(*results).text
    page = page_of(*results)
    points = page.partition('id="points"')[2].partition("</section>")[0]
    assert "<b>" not in points
    assert "To break the tie" in page.partition('id="next"')[2]


def test_few_false_accepts_are_cautioned_in_the_headline():
    text = verdict_of(synthetic_result(num_impostors=2_000)).text
    assert "Caution: this rests on 2 false accepts; 30 are needed" in text
    assert "Caution" not in verdict_of(synthetic_result(num_impostors=200_000)).text


def test_without_paired_replicates_nothing_is_claimed():
    text = verdict_of(*(synthetic_result(n, num_replicates=0) for n in "AB")).text
    assert "unknown whether the lead over 1 other is chance" in text and "A tie" not in text


def test_differences_to_the_best_baseline_have_intervals_and_axes(page):
    runs = {"soft": some_run("soft", alpha=1.0), "weak": some_run("weak", alpha=1.0)}
    results = [
        synthetic_result("ours", separation=5.0, run=some_run("ours")),
        synthetic_result("soft", separation=4.5, run=runs["soft"]),
        synthetic_result("weak", separation=4.0, run=runs["weak"]),
    ]
    part = page_of(*results).partition('class="differences"')[2].partition("</svg>")[0]
    assert re.search("minus that of <b><bdi[^>]*>soft</bdi>", part)
    assert part.count('class="whisker') == 2 and "percentage points</text>" in part
    assert part.index(">ours<") < part.index(">weak<")


def test_every_chart_names_its_axes(page):
    drawings = re.findall(r'<svg [^>]*class="plot.*?</svg>', page, re.DOTALL)
    assert len(drawings) >= 6
    for drawing in drawings:
        assert 1 <= drawing.count('class="axis') <= 2, drawing[:200]


def test_rates_have_one_notation(page):
    assert not re.search(
        "10[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]|\\de-\\d",
        Elements(page.partition("<main>")[2]).text.partition("Protocol, files")[0],
    )


def test_digits_grow_where_scores_lie_close_together():
    chart = histogram_chart(Histogram((0.99990, 0.99995, 0.99999), (1, 3), (40, 10)), None)
    labels = [tick.label for tick in chart.bottom]
    assert len(labels) > 1 and len(set(labels)) == len(labels)
    (panel,) = arrange([synthetic_result("A"), synthetic_result("B")])
    points = [e.result.measures.tar[0] for e in panel.entries]
    close = [replace(p, tar=0.9999 + 1e-6 * i) for i, p in enumerate(points)]
    entries = [
        replace(e.result, measures=replace(e.result.measures, tar=(point,)))
        for e, point in zip(panel.entries, close, strict=True)
    ]
    cells = [row[1].text for row in tar_table(arrange(entries)[0]).body]
    assert cells == ["99.99000", "99.99010"]


def test_labels_of_an_axis_do_not_meet():
    scale = Scale(1e-9, 0.4, 74.0, 624.0, probit)
    for letter, kept in zip(LETTERS, (lambda t: t.label, lambda t: not t.is_minor), strict=True):
        ticks = [tick for tick in scale.spaced_ticks(RATES[:-8], rate_text) if kept(tick)]
        assert len(ticks) > 4 and ticks[-1].label == "10 %"
        for left, right in pairwise(ticks):
            room = 0.5 * letter * (len(left.label) + len(right.label))
            assert right.place - left.place > room
    every = Scale(0.01, 0.4, 0.0, 2000.0, probit).spaced_ticks((0.01, 0.1, 0.4), rate_text)
    assert [(tick.label, tick.is_minor) for tick in every] == [
        (label, False) for label in ("1 %", "10 %", "40 %")
    ]


def test_scores_of_pairs_have_the_digits_of_the_threshold():
    (panel,) = arrange([synthetic_result("A")])
    (entry,) = panel.entries
    pairs = [HardPair("a", "b", score) for score in (0.5, -0.25, 0.123456789, 0.123456781)]
    shown = [score for score, _ in _shown(entry, pairs[:2], None)]
    assert shown == [entry.score_text(0.5), entry.score_text(-0.25)]
    assert shown[1].startswith("\u22120.25") and len(shown[1]) == len(shown[0]) + 1
    close = [score for score, _ in _shown(entry, pairs[2:], None)]
    assert close[0] != close[1] and len(close[0]) == len(close[1])


def test_examples_are_of_several_identities():
    keys = ("x/ada/1", "x/ada/2"), ("x/ada/1", "x/ada/3"), ("x/bea/1", "x/cid/1")
    pairs = [HardPair(*key, 0.5) for key in keys]
    assert _examples(pairs) == [pairs[0], pairs[2]]
    assert _examples(pairs[:2]) == pairs[:2]  # better than a single one
    plain = [HardPair("1.wav", "2.wav", 0.5), HardPair("3.wav", "4.wav", 0.4)]
    assert _examples(plain) == plain


def test_lists_of_pairs_have_no_table_of_spreads():
    result = synthetic_result("A", groups=("a", "b"))
    assert "GARBE" in page_of(result) and spread_table(result.groups) is not None
    none = GroupSpread(None, None, None)
    lists = replace(
        result.groups, fmr=none, fnmr=None, ineq=None, garbe=None, note="lists of pairs"
    )
    page = page_of(replace(result, groups=lists))
    assert "GARBE" not in page and '<p class="hint">lists of pairs.</p>' in page


def test_groups_of_the_leader_are_open_and_others_folded():
    results = [
        synthetic_result(n, groups=("a", "b"), separation=s) for n, s in (("A", 4), ("B", 6))
    ]
    part = page_of(*results).partition('id="groups"')[2].partition("</section>")[0]
    first, _, others = part.partition("<details>")
    assert ">B</bdi>" in first and ">A</bdi>" not in first and ">A</bdi>" in others


def test_a_note_on_the_data_is_in_the_opening():
    page = page_of(synthetic_result("A"), data_note="All data are <drawn>")
    opening = page.partition('id="world"')[2].partition("</section>")[0]
    assert " All data are &lt;drawn&gt;.</p>" in opening


def test_time_and_memory_of_each_loss():
    run = some_run("a", train_seconds=90.0, steps=1000, peak_bytes=3 * 2**30, device="cpu")
    part = page_of(synthetic_result("A", run=run)).partition('id="cost"')[2]
    for text in (">90.0<", ">3.00<", ">cpu</bdi>"):
        assert text in part.partition("</section>")[0]
    assert 'id="cost"' not in page_of(synthetic_result("A", run=some_run("a")))


def test_tar_over_training_time(tmp_path):
    """The time to a TAR is that of a line between the points around it."""

    def run(name, seed, *tars):
        points = [
            TrainingPoint(10 * n, 100.0 * n, 0.1, {"0.001": t}) for n, t in enumerate(tars, 1)
        ]
        return some_run(name, seed, train_seconds=100.0 * len(tars), progress=tuple(points))

    results = [
        synthetic_result("A", run=run("a", 0, 0.5, 0.7, 0.9)),
        synthetic_result("A", seed=1, run=run("a", 1, 0.6, 0.8, 0.82)),
        synthetic_result("B", seed=2, run=run("b", 0, 0.8)),
    ]
    (panel,) = arrange(results)
    table = time_table({"A": panel.entries[:2], "B": panel.entries[2:]}, 1e-3)
    assert table.columns[2].title == "To TAR 80.00 %, s"  # B never had more
    # from 0.7 to 0.9 at 250 s, and at 200 s; B at its only point
    assert [row[2].text for row in table.body] == ["225.0 ± 35.4", "100.0"]
    assert [row[3].text for row in table.body] == ["300.0", "100.0"]
    assert time_table({"A": arrange([synthetic_result()])[0].entries}, 1e-3) is None
    page = page_of(*results)
    part = page.partition('id="cost"')[2].partition("</section>")[0]
    assert "TAR at FAR 0.1 %, %" in part and part.count('class="curve c') == 3 + 2  # and the legend
    assert "To TAR 80.00 %, s" in part and "Per step, ms" in part
    if has_matplotlib():
        assert {"time.svg", "time.pdf"} <= set(draw_figures([panel], None))
    write_result(tmp_path / "r.json", results[0])
    assert read_result(tmp_path / "r.json").run.progress == results[0].run.progress


def test_opening_shows_easy_and_hard_pairs(tmp_path):
    for key in ("k1", "k2"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{key}.png")
    result = synthetic_result(keys=("k1", "k2"))
    easy = (HardPair("k1", "k2", 0.91),)
    result = replace(result, hardest=replace(result.hardest, easy_genuine=easy))
    page = page_of(result, media=MediaFolder(tmp_path))
    opening = page.partition('id="world"')[2].partition("</section>")[0]
    assert "2,000 genuine and 200,000 impostor pairs of 1,190 identities" in opening
    assert "Easy: one identity" in opening and "Hard: two identities" in opening
    assert "Easy: two identities" not in opening  # this result has none
    assert opening.count("<img") == 2 * (1 + 2 + 2) and "Score 0.91" in opening


def test_policy_allows_this_style_and_script_and_nothing_else(page):
    policy = next(a["content"] for _, a in Elements(page).found if "http-equiv" in a)
    for kind in ("style", "script"):
        (text,) = re.findall(f"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy and "http" not in policy
    for tag, attributes in Elements(page).found:
        assert tag not in ("iframe", "object", "embed", "base")
        for name, value in attributes.items():
            assert not name.startswith("on") and name != "style"
            assert name not in ("src", "href") or value.startswith(("#", "data:"))


def test_hostile_names_add_no_element():
    tame = Elements(page_of(*[synthetic_result(f"n{i}", seed=i) for i in range(len(HOSTILE))]))
    wild = Elements(page_of(*[hostile_result(i) for i in range(len(HOSTILE))]))
    known = {tag for tag, _ in tame.found} | {"ol", "li", "h4", "h5"}
    assert {tag for tag, _ in wild.found} <= known
    assert not any(name.startswith("on") for _, found in wild.found for name in found)
    assert '<img src=x onerror="window.__pwned=1">' in wild.text  # shown, not run


def test_names_keep_their_letters_and_lose_what_moves_text():
    assert cleaned("Ωμέγα 中文 é") == "Ωμέγα 中文 é"
    for sign in ("\x00", "\n", "\x1b", "\u202e", "\u2066", "\u200b", "\u2028", "\ud800"):
        assert cleaned(f"a{sign}b") == "a\ufffdb"
    assert len(cleaned("x" * 10_000)) == LONGEST_NAME


@pytest.mark.parametrize("attack", HOSTILE)
def test_every_text_is_escaped_and_cleaned_wherever_it_is_printed(attack):
    template = _environment().from_string('<p title="{{ a }}">{{ a }}</p>{{ a|tojson }}')
    found = re.fullmatch(r'<p title="([^"<>]*)">([^<>]*)</p>([^<>&]*)', template.render(a=attack))
    assert found is not None
    shown = cleaned(attack, LONGEST_TEXT)
    assert [html.unescape(part) for part in found.groups()[:2]] == [shown, shown]
    assert json.loads(found.group(3)) == attack


def test_the_run_and_the_protocol_are_listed():
    run = some_run("q_margin", 7, device="NVIDIA H200", steps=20_000)
    text = page_of(synthetic_result(run=run)).partition('id="protocol"')[2]
    shown = ("q_margin", "alpha 1.25", "prior 0.2", "NVIDIA H200", "20,000", run.recipe_sha256)
    for words in (*shown, "trials", "cosine"):
        assert f"<bdi>{words}</bdi>" in text


def test_best_is_bold_the_rule_is_named_and_not_measurable_is_a_word():
    page = page_of(synthetic_result("A", separation=4.5), synthetic_result("B", separation=5.5))
    points = page.partition('id="points"')[2].partition("<details>")[0]
    assert "conservative rule" in points
    a, b = points.partition("</table>")[0].split("<tr>")[-2:]
    assert (a.count("<b>"), b.count("<b>")) == (0, 4)
    page = page_of(*(synthetic_result(name, num_impostors=5_000) for name in "AB"))
    table = page.partition('id="points"')[2].partition("</table>")[0]
    assert table.count("not measurable") == 4


def test_many_systems_and_panels_fit_one_page():
    results = [synthetic_result(f"s{i}", seed=i, num_replicates=20) for i in range(12)]
    page = page_of(*results, synthetic_result("s0", protocol="IJB-C"))
    assert page.count('<figure class="det') == 2
    looks = re.findall(r'class="curve (c\d dash\d)"', page.partition("det-body")[2])
    assert len(set(looks)) == 12  # twelve systems, eight colours


def test_the_first_systems_differ_in_their_lines_without_colours():
    page = page_of(*[synthetic_result(f"s{i}", seed=i, num_replicates=20) for i in range(8)])
    drawn = re.findall(r'class="curve c\d (dash\d)"', page.partition("det-body")[2])
    assert len(set(drawn)) == 8
    patterns = dict(re.findall(r"\.(dash\d) \{ stroke-dasharray: ([\d ]+); \}", page))
    assert len({patterns.get(name, "solid") for name in drawn}) == 8
    assert len(set(map(str, DASHES))) == 8  # of figures


def contrast(one, other):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_have_contrast_in_every_theme(page):
    blocks = re.findall(r"\{([^{}]*--paper:[^{}]*)\}", page)
    assert len(blocks) == 4  # light, dark by choice, dark by preference, print
    themes = [dict(re.findall(r"--(\w[\w-]*): (#\w{6})", block)) for block in blocks]
    assert themes[1] == themes[2]
    for colours in themes:
        for text in ("ink", "soft", "link"):
            assert contrast(colours[text], colours["paper"]) >= 4.5, text
            assert contrast(colours[text], colours["panel"]) >= 4.5, text
        for badge in ("ok", "warn", "bad"):
            assert contrast(colours[badge], colours[f"{badge}-back"]) >= 4.5, badge
        for series in (f"s{i}" for i in range(8)):
            assert contrast(colours[series], colours["paper"]) >= 3.0, series


# -- drawings -------------------------------------------------------------------------------------


def geometry_of(*results):
    (panel,) = arrange(results)
    return det_geometry(panel)


def drawing_of(*results):
    page = render_page("t", arrange(results), [[]])
    return page.partition('<figure class="det')[2].partition("</svg>\n</div>")[0]


def test_axes_are_spaced_by_normal_quantiles():
    for rate in (1e-9, 1e-4, 0.02, 0.5, 0.99):
        assert probit(rate) == pytest.approx(float(ndtri(rate)), rel=1e-9)
    share = (ndtri(0.01) - ndtri(1e-4)) / (ndtri(0.4) - ndtri(1e-4))
    assert Scale(1e-4, 0.4, 0.0, 100.0, probit)(0.01) == pytest.approx(100.0 * share)
    for low, high in ((0.0, 1.0), (-3.2, 9.0), (1e-8, 2e-8), (0.0, 1e6)):
        ticks = round_ticks(low, high)
        assert 2 <= len(ticks) <= 9 and all(low <= tick <= high for tick in ticks)


def test_readout_at_a_target_is_the_measured_operating_point():
    det = geometry_of(synthetic_result())
    (curve,) = det.curves
    stops = [round(stop.place, 6) for stop in det.stops]
    for far in FARS:
        point = curve.entry.point_at(far)
        low, high = point.interval
        assert curve.cells[stops.index(round(det.across(far), 6))] == [
            f"{100 * point.tar:.2f}",
            f"{100 * low:.2f}\u2013{100 * high:.2f}",
            f"{point.false_accepts:,} FA",
            f"≥ {point.threshold:.4g}",
        ]


def test_point_below_never_exceeds_the_far():
    points = curve_points(arrange([synthetic_result()])[0].entries[0])
    for far in (0.0, 1e-6, 4.9e-6, 5e-6, 3e-4, 0.2, 1.0):
        below = [point for point in points if point.far <= far]
        assert point_below(points, far) == below[-1]
    assert point_below(points[-1:], 0.01) is None


def test_readout_begins_at_the_verdict_and_has_a_cell_for_every_stop():
    det = geometry_of(synthetic_result("A"), synthetic_result("B", seed=1))
    assert det.stops[det.start].label == "0.1 %"
    data = det.data
    assert data["x"] == sorted(data["x"])
    assert len(data["systems"]) == 2
    for system in data["systems"]:
        assert len(system["cells"]) == len(system["y"]) == len(data["x"]) == len(data["labels"])


def test_region_with_too_few_false_accepts_is_shaded():
    result = synthetic_result(num_impostors=200_000)
    det = geometry_of(result)
    assert det.few == [det.across(30 / 200_000)]
    assert f'width="{det.few[0] - det.box.left:.1f}"' in drawing_of(result)


@pytest.mark.parametrize(
    ("far", "frr"),
    [
        ((0.0, 1.0), (1.0, 0.0)),  # nothing but the ends
        ((0.0, 0.0, 1.0), (1.0, 0.0, 0.0)),  # no errors at all
        ((0.0, 1.0), (1.0, 1.0)),
        ((0.0, 1e-5, 1e-5, 1.0), (1.0, 0.5, 0.2, 0.0)),
    ],
)
def test_extreme_curves_can_be_drawn(far, frr):
    ends = (math.inf, *([0.5] * (len(far) - 2)), -math.inf)
    drawn = drawing_of(replace(synthetic_result(), det=Det(far, frr, ends, None)))
    assert drawn and "nan" not in drawn and "inf" not in drawn.lower()


@pytest.mark.parametrize("num_impostors", [1, 20, 50])
def test_tiny_protocols_can_be_drawn(num_impostors):
    result = synthetic_result(num_impostors=num_impostors, num_genuine=5)
    cells = geometry_of(result).data["systems"][0]["cells"]
    assert cells[0][0] == "not measurable" or num_impostors >= 20
    assert "nan" not in drawing_of(result)


def test_histograms_are_shares_of_their_own_count():
    chart = histogram_chart(Histogram((0.0, 1.0, 2.0), (1, 3), (40, 10)), 1.0)
    for counts, kind in (((1, 3), "genuine"), ((40, 10), "impostor")):
        steps = chart.shapes["areas"]["linear"][kind]
        heights = [chart.box.bottom - y for _, y in steps[1:-1:2]]
        assert heights == pytest.approx(
            [(chart.box.bottom - chart.box.top) * n / max(counts) for n in counts]
        )
    assert chart.shapes["threshold"] == (chart.box.left + chart.box.right) / 2
    assert histogram_chart(Histogram((0.0, 0.0), (1,), (1,)), 9.0).shapes["threshold"] is None


# -- journals -------------------------------------------------------------------------------------


def journal_of(path, rows, end="\n"):
    path.write_text("\n".join(map(json.dumps, rows)) + end, encoding="utf-8")
    return read_journal(path)


def test_long_journals_keep_their_peak_and_their_mean(tmp_path):
    rows = [{"step": i, "support_mean": float(i % 7), "support_max": 10.0} for i in range(7000)]
    rows[4321]["support_max"] = 7976.0
    journal = journal_of(tmp_path / "journal.jsonl", rows)
    assert len(journal.steps) <= MOST_POINTS
    assert (max(journal.largest), journal.num_steps) == (7976.0, 7000)
    assert sum(journal.mean) / len(journal.mean) == pytest.approx(3.0, abs=0.05)


def test_other_lines_and_a_cut_last_line_are_passed_over(tmp_path):
    rows = [{"epoch": 1}, {"step": 1, "support_mean": 4}, {"step": 2, "support_mean": math.nan}]
    journal = journal_of(tmp_path / "journal.jsonl", rows, '\n{"step": 3, "supp')
    assert (journal.steps, journal.mean) == ((1.0,), (4.0,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "support_mean": 2}\n{oops\n{"step": 2}\n', "line 2 is not JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
        ('{"step": 1}\n', "0 lines with a step"),
    ],
)
def test_broken_journals_are_named_and_nothing_is_written(tmp_path, text, message):
    paths, journal = write_results(tmp_path, synthetic_result()), tmp_path / "journal.jsonl"
    journal.write_text(text)
    with pytest.raises(DataError, match=rf"journal\.jsonl.* {message}"):
        write_report(paths, tmp_path / "out", replace(PLAIN, journals=(journal,)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "row", [{"support_mean": 0.0}, {"support_max": 1.0}, {"support_mean": 1e7, "support_max": 1e9}]
)
def test_one_step_can_be_drawn(tmp_path, row):
    chart = support_chart([journal_of(tmp_path / "j.jsonl", [{"step": 0, **row}])])
    assert all(math.isfinite(x + y) for line in chart.shapes["lines"][0].values() for x, y in line)


def outcome_rows(count=5, reach=0.6):
    return [
        {"step": i, "support_mean": 9.0, "satisfied_share": i / 10, "target_posterior": None}
        | {"cosine_gap": 0.1 * i - 0.1, "reach": reach}
        for i in range(count)
    ]


def test_outcomes_are_read_and_averaged_like_the_support(tmp_path):
    journal = journal_of(tmp_path / "journal.jsonl", outcome_rows(900))
    assert len(journal.steps) == 300 and journal.reach == 0.6
    assert journal.outcomes["satisfied_share"][:2] == pytest.approx((0.1, 0.4))
    assert set(journal.outcomes["target_posterior"]) == {None}
    assert journal_of(tmp_path / "j.jsonl", [{"step": 1, "support_mean": 4}]).reach is None


def test_outcomes_are_small_charts_and_the_reach_is_marked(tmp_path):
    first = journal_of(tmp_path / "a.jsonl", outcome_rows())
    plain = journal_of(tmp_path / "b.jsonl", [{"step": 3, "support_mean": 4.0}])
    far = journal_of(tmp_path / "c.jsonl", outcome_rows(reach=7.8))
    shares, gaps = outcome_charts([first, plain, far])
    assert (shares.up_title, gaps.up_title) == ("Share of satisfied rows", "Cosine gap")
    assert shares.shapes["marks"] == [None, None, None]
    assert [len(line) for line in gaps.shapes["lines"]] == [5, 0, 5]
    mark, *others = gaps.shapes["marks"]
    assert others == [None, None]  # no embedding has the gap of the last
    last = gaps.shapes["lines"][0][-1][1]
    assert gaps.box.top < mark < last < gaps.box.bottom  # 0.6 is above 0.3
    for chart in (shares, gaps):
        for line in chart.shapes["lines"]:
            assert all(chart.box.top <= y <= chart.box.bottom for _, y in line)
    assert outcome_charts([plain]) == []


def test_the_page_tells_where_a_run_ended(tmp_path):
    paths, journal = write_results(tmp_path, synthetic_result()), tmp_path / "journal.jsonl"
    journal_of(journal, outcome_rows())
    write_report(paths, tmp_path / "out", replace(PLAIN, journals=(journal,)))
    page = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    section = page[page.index('id="sparsity"') :]
    assert section.count('class="plot small"') >= 2 and "Cosine gap over training steps" in section
    assert ">Satisfied</th>" in section and ">Target posterior</th>" not in section
    row = section[section.index('data-label="Satisfied"') :]
    assert [float(text) for text in re.findall(r"<span>([\d.]+)</span>", row)[:3]] == [
        0.4,
        0.3,
        0.6,
    ]


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5])
def test_one_step_of_outcomes_can_be_drawn(tmp_path, value):
    row = {"step": 0, "support_mean": 1.0, "cosine_gap": value, "satisfied_share": abs(value)}
    for chart in outcome_charts([journal_of(tmp_path / "j.jsonl", [row])]):
        (line,) = chart.shapes["lines"]
        assert all(math.isfinite(x + y) for x, y in line) and len(chart.left) >= 2


# -- files ----------------------------------------------------------------------------------------


def test_files_of_a_report(tmp_path):
    paths = write_results(tmp_path, synthetic_result("A"), synthetic_result("B", seed=1))
    written = write_report(paths, tmp_path / "out", PLAIN)
    names = ["index.html", "metrics.json", "tables.md", "tables.tex", "tables.csv"]
    assert [path.name for path in written] == names
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    (panel,) = json.loads((tmp_path / "out" / "metrics.json").read_text())["panels"]
    assert [system["name"] for system in panel["systems"]] == ["A", "B"]
    assert panel["systems"][0]["measures"]["tar"][0]["far_target"] == 1e-2
    assert len(panel["differences"]) == 5


def test_hostile_results_can_be_written(tmp_path):
    paths = write_results(tmp_path, *[hostile_result(index) for index in range(7)])
    for path in write_report(paths, tmp_path / "out", PLAIN):
        path.read_text(encoding="utf-8")  # no lone surrogate went through


def test_levels_and_missing_packages_are_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"level is 1\.5"):
        ReportOptions(level=1.5)
    monkeypatch.setattr(write, "has_matplotlib", lambda: False)
    with pytest.raises(ConfigError, match=r"qmargin\[figures\]"):
        ReportOptions(has_figures=True)


def test_the_page_of_five_systems_of_many_trials_is_small(tmp_path):
    keys = tuple(f"id{i:05d}/video/{i:05d}.wav" for i in range(20))
    options = {"num_genuine": 50_000, "num_impostors": 950_000, "num_replicates": 1000}
    results = [
        synthetic_result(f"system {i}", groups=tuple("abcd"), keys=keys, **options)
        for i in range(5)
    ]
    written = write_report(write_results(tmp_path, *results), tmp_path / "out", PLAIN)
    assert written[0].stat().st_size < 600_000


def test_a_number_stays_on_a_line_with_its_unit():
    assert _kept("At FAR 0.01 %: p < 0.001, p = 1.000") == (
        "At FAR 0.01\u00a0%: p\u00a0&lt;\u00a00.001, p\u00a0=\u00a01.000"
    )
    assert _kept("Q-Margin - <b>") == '<span class="few-letters">Q-Margin</span> - &lt;b&gt;'
