"""Every Python block of the README and the documentation runs; other links lead somewhere."""

import inspect
import itertools
import re
import shlex
from pathlib import Path

import pytest

import qmargin
from helpers.commands import PROGRAMS, parse_command
from helpers.registries import forget_registered

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "tutorial").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    *sorted((ROOT / "docs" / "benchmarks").glob("*.md")),
]
TEXTS = [
    *sorted(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
    *sorted((ROOT / "docs").rglob("*.md")),
]
SHELL = re.compile(r"^```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
STARTS = tuple(" ".join(program) + " " for program in PROGRAMS)
INLINE = re.compile(rf"`((?:{'|'.join(STARTS)})[^`]+)`")
BEFORE = ["qmargin", "bench"]  # what benchmarks were when the numbers of their pages were measured
STUDY = ["qmargin", "study"]  # what experiments were, likewise
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
DIRECTIVE = re.compile(
    r"^::: (\S+)\n(?:    (?!  members).*\n|      members: \[(.*)\]\n)*", re.MULTILINE
)


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """Line number and code of every Python block of a page."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in FENCE.finditer(text)
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_blocks_run(path, tmp_path, monkeypatch, capsys):
    """Blocks of one page share a namespace; line numbers in a failure are those of the page."""
    monkeypatch.chdir(tmp_path)
    forget_registered(monkeypatch)
    namespace: dict[str, object] = {"__name__": path.stem}
    for line, code in python_blocks(path):
        padded = "\n" * (line - 1) + code
        exec(compile(padded, str(path), "exec"), namespace)
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert warned == []  # as of a margin that a short run never reaches


def commands(text: str) -> tuple[list[list[str]], list[list[str]]]:
    """Words of every command up to what a shell reads: of blocks, and of mentions."""
    blocks = [block.replace("\\\n", " ") for block in SHELL.findall(text)]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    mentions = [" ".join(code.split()) for code in INLINE.findall(SHELL.sub("", text))]
    whole, named = (
        [_words(one) for one in some if one.startswith(STARTS)] for some in (lines, mentions)
    )
    return whole, named


def _words(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    return list(itertools.takewhile(lambda word: word not in (">", "|", "&&"), words))


def test_commands_are_found():
    text = "`qmargin a\n--b 'c d'`\n```text\nqmargin e \\\n  f  # why\nother\nqmargin g > h\n"
    whole, named = commands(text + "python -m benchmarks i\npython -m pip\n```\n")
    assert whole == [["qmargin", "e", "f"], ["qmargin", "g"], ["python", "-m", "benchmarks", "i"]]
    assert named == [["qmargin", "a", "--b", "c d"]]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_are_understood(path, capsys):
    """Mentions may leave out what is required; ``...`` and ``[--option]`` stand for more."""
    wrong = []
    whole, named = commands(path.read_text(encoding="utf-8"))
    for words in [*whole, *named]:
        if {"...", "N"} & set(words) or any("[" in word for word in words):
            continue
        if path.parent.name == "results" and words[:2] == STUDY:
            continue
        is_record = path.parent.name == "benchmarks" and words[:2] == BEFORE
        try:
            parse_command(["python", "-m", "benchmarks", *words[2:]] if is_record else words)
        except SystemExit as end:
            message = capsys.readouterr().err.strip().rpartition("\n")[2]
            is_short = "arguments are required" in message or "expected one argument" in message
            if end.code and (words in whole or not is_short):
                wrong.append(f"{shlex.join(words)}: {message}")
    assert wrong == []


def test_links_outside_the_site_lead_somewhere():
    """Inside the site ``make docs`` looks; these pages are not part of it."""
    assert python_blocks(ROOT / "README.md")[0][0] > 1
    texts = [path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")]
    targets = [target for text in texts for target in LINK.findall(text)]
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_formulas_of_docstrings_become_text(monkeypatch):
    pytest.importorskip("griffe", reason="comes with the docs extra")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    from formulas import with_text_formulas

    docstring = (
        "Of :math:`a`.\n\n    .. math::\n\n        x = \\frac{a + 1}{2},\n        \\qquad y\n\nEnd"
    )
    assert with_text_formulas(docstring) == (
        "Of `a`.\n\n    ```text\n    x = (a + 1)/2\n    y\n    ```\n\nEnd"
    )


def test_public_names_in_docstrings_become_links(monkeypatch):
    pytest.importorskip("griffe", reason="comes with the docs extra")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    from links import public_names, with_links

    names = public_names()
    assert names["MarginLoss"] == "qmargin.losses.margin_loss.MarginLoss"
    docstring = "``MarginLoss``, :func:`as_norm`, ``train`` and ```Alpha```"
    assert with_links(docstring, names) == (
        "[`MarginLoss`][qmargin.losses.margin_loss.MarginLoss], "
        "[`as_norm`][qmargin.metrics.normalise.as_norm], ``train`` and ```Alpha```"
    )


def test_every_public_name_is_in_the_reference():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    blocks = [block for page in pages for block in DIRECTIVE.findall(page.read_text("utf-8"))]
    shown = {(module, name) for module, names in blocks for name in re.findall(r"\w+", names)}
    whole = {module for module, names in blocks if not names}
    values = [
        *(getattr(qmargin, name) for name in qmargin.__all__ if name != "metrics"),
        *(getattr(qmargin.metrics, name) for name in qmargin.metrics.__all__),
    ]
    places = [(value.__module__, value.__name__) for value in values if not inspect.ismethod(value)]
    assert len(places) > 100
    assert [place for place in places if place not in shown and place[0] not in whole] == []


def test_every_decision_is_in_the_list():
    folder = ROOT / "docs" / "decisions"
    listed = LINK.findall((folder / "index.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in folder.glob("0*.md"))
