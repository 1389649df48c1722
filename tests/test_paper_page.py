"""The paper, mapped and measured: code, tests, commands, links and numbers of both pages exist."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from helpers.commands import parse_command
from helpers.pages import ROOT, code_in, missing, spans
from qmargin.report.paper import FIGURES
from qmargin.report.paper_layouts import TABLES

CLAIMS = ROOT / "docs" / "results" / "paper-claims.md"
PAGES = (ROOT / "docs" / "paper.md", CLAIMS)
PAGE = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
SPANS = spans(PAGE)
TESTS = sorted({span for span in SPANS if span.startswith("tests/")})
COMMANDS = sorted({s for s in SPANS if re.match(r"(qmargin|python -m benchmarks) (?!.*NAME)", s)})
LINK = re.compile(r"\]\(([^)#]+)\)")


@cache
def names_in(path: Path) -> set[str]:
    """Functions of a test file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_names_much():
    assert len(code_in(PAGE)) > 30 and len(TESTS) > 30 and len(COMMANDS) > 12


def test_code_exists():
    assert missing(PAGE) == []


def test_tests_exist():
    missing = []
    for place in TESTS:
        path, _, name = place.partition("::")
        if not (ROOT / path).is_file() or name not in names_in(ROOT / path):
            missing.append(place)
    assert missing == []


def test_commands_can_be_typed():
    for command in COMMANDS:
        assert callable(parse_command(shlex.split(command)).run), command


def test_every_table_and_figure_has_its_command():
    shown = {words[2] for words in map(shlex.split, COMMANDS) if words[1] == "paper"}
    assert shown - {"--list"} == TABLES.keys() | FIGURES.keys()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_pages(path):
    targets = {target for target in LINK.findall(path.read_text("utf-8")) if "://" not in target}
    assert len(targets) > 3
    assert {target for target in targets if not (path.parent / target).is_file()} == set()


def test_numbers_are_on_the_pages_they_link():
    """Numbers with two or three decimals in a sentence or table row with links to results."""
    prose = re.sub(r"(?<!\n)\n(?![\n|#-])", " ", CLAIMS.read_text(encoding="utf-8"))
    num_checked = 0
    for part in re.split(r"(?<=[a-z)%])\. (?=[A-Z\[`])|\n", prose):
        paths = [(CLAIMS.parent / target).resolve() for target in LINK.findall(part)]
        if paths := [path for path in paths if path.parent.name in ("results", "benchmarks")]:
            text = " ".join(path.read_text(encoding="utf-8") for path in paths)
            numbers = set(re.findall(r"(?<![\d.(])\d+\.\d{2,3}(?!\d)", part)) - {"1.25", "0.07"}
            assert {number for number in numbers if number not in text} == set(), part
            num_checked += len(numbers)
    assert num_checked > 20


def test_every_label_of_the_paper_is_on_the_page():
    path = ROOT.parent / "shared" / "paper" / "q-margin.tex"
    if not path.exists():
        pytest.skip(f"no paper in {path}")
    tex = path.read_text(encoding="utf-8")
    labels = set(re.findall(r"\\label\{((?:eq|prop|tab|fig):[^}]+)\}", tex)) - {"fig:short"}
    assert {label for label in labels if f"`{label}`" not in PAGE} == set()
