"""The map of the paper: what it names exists, and the page is up to date."""

import ast
import itertools
import re
import shlex
from pathlib import Path

import pytest

from helpers.commands import parse_command
from qmargin.cli.paper import makers
from qmargin.paper import numbers
from qmargin.paper.items import KINDS
from qmargin.paper.page import ITEMS, item_text, paper_page

ROOT = Path(__file__).parents[2]
ALL = pytest.mark.parametrize("item", ITEMS.values(), ids=lambda item: item.name)


def names_in(path):
    """Functions, classes, their members and assigned names of a file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
            members = node.body if isinstance(node, ast.ClassDef) else []
            found |= {f"{node.name}.{m.name}" for m in members if isinstance(m, ast.FunctionDef)}
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@ALL
def test_code_and_tests_exist(item):
    assert item.kind in KINDS
    assert item.code and item.tests
    for place in item.code:
        path, _, name = place.partition(":")
        assert name in names_in(ROOT / path), place
    for place in item.tests:
        path, _, name = place.partition("::")
        assert name in names_in(ROOT / path), place
    for page in re.findall(r"docs/[\w/.-]+\.md", item.here + item.differs):
        assert (ROOT / page).exists(), page


@ALL
def test_commands_can_be_typed(item):
    if item.command:
        assert callable(parse_command(shlex.split(item.command)).run)
    assert item.name in item_text(item)


@ALL
def test_numbers_of_pages_are_on_them(item):
    for sentence in re.split(r"\. (?=[A-Z])", item.here):
        if "--minutes" in sentence:  # a run of the command itself
            continue
        pages = re.findall(r"docs/[\w/.-]+\.md", sentence)
        text = " ".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
        found = set(re.findall(r"(?<![\d.])\d+\.\d{2,3}(?!\d)", sentence)) - {"1.25", "1.75"}
        assert not {number for number in found if number not in text}, sentence


def test_margin_and_scale_in_the_papers_table():
    """How much each changes TAR at FAR 1e-5, as the entry on where to start says."""
    rows = {row.setting[1:]: row.values for row in numbers.FACE if row.loss == "Q-Margin"}

    def spans(changes, column):
        sizes = [abs(rows[a][column] - rows[b][column]) for a, b in changes]
        return f"{min(sizes):.2f} to {max(sizes):.2f}"

    margins = [((1.25, s, 0.2), (1.25, s, 0.5)) for s in (10, 20, 32)]
    scales = [((1.25, 10, m), (1.25, 32, m)) for m in (0.2, 0.5)]
    said = ITEMS["claim-start"].differs
    for changes, column in itertools.product((margins, scales), (6, 8)):
        assert spans(changes, column) in said
    for margin, num_better in ((0.2, 3), (0.5, 4)):  # as the entry on alpha and scale says
        small, large = rows[1.5, 10, margin], rows[1.5, 32, margin]
        assert sum(large[column] > small[column] for column in range(5, 9)) == num_better


def test_overheads_of_the_paper_are_those_of_its_table():
    whole, *others = numbers.THROUGHPUT.values()
    assert [f"{speed / whole:.3f}" for speed in others] == ["0.987", "0.948", "0.731"]
    added = [f"{1024 / speed * 1e3 - 1024 / whole * 1e3:.0f}" for speed in others]
    assert added == ["7", "28", "188"]


def test_every_table_and_figure_can_be_made():
    artefacts = {name for name, item in ITEMS.items() if item.kind in ("table", "figure")}
    assert artefacts == set(makers())


def test_the_page_is_up_to_date():
    page = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert page == paper_page(), "run: qmargin paper --page docs/paper.md"


@pytest.fixture(scope="module")
def tex():
    path = ROOT.parent / "shared" / "paper" / "q-margin.tex"
    if not path.exists():
        pytest.skip(f"no paper in {path}")
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\\(?:bf|textbf)\{([\d.]+)\}", r"\1", text)
    return re.sub(r"[ $\t]", "", text)


def test_numbers_are_those_of_the_paper(tex):
    lines = tex.splitlines()
    for row in (*numbers.FACE, *numbers.SPEAKER):
        values = "&".join(f"{value:.2f}" for value in row.values)
        alpha = "-" if row.alpha == 1.0 else f"{row.alpha:g}"
        start = rf"{row.loss}&{re.escape(alpha)}(\.0)?&{row.scale:g}&{row.margin:g}&{values}"
        assert any(re.match(start, line) for line in lines), row
    for row in (*numbers.REIMPLEMENTED, *numbers.REPORTED):
        values = "&".join("-" if value is None else f"{value:.2f}" for value in row.values)
        assert any(values in line for line in lines), row
    for value in numbers.THROUGHPUT.values():
        assert f"{value:.2f}" in tex


def test_every_label_of_the_paper_is_mapped(tex):
    labels = set(re.findall(r"\\label\{((?:eq|prop|tab|fig):[^}]+)\}", tex)) - {"fig:short"}
    where = " ".join(item.where for item in ITEMS.values())
    assert not {label for label in labels if label not in where}
