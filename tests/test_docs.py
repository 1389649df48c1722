"""Every Python block of the README and the documentation runs; other links lead somewhere."""

import re
from pathlib import Path

import pytest

from qmargin.study import studies

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
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """Line number and code of every Python block of a page."""
    text = path.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, match.start(1)) + 1, match.group(1)) for match in FENCE.finditer(text)
    ]


def test_blocks_are_found_with_their_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n\n```python\nx = 1\n```\n\n```text\nno\n```\n\n```python\ny = x\n```\n")
    assert python_blocks(page) == [(4, "x = 1\n"), (12, "y = x\n")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one page share a namespace; line numbers in a failure are those of the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(studies, "STUDIES", dict(studies.STUDIES))  # a page adds one
    namespace: dict[str, object] = {"__name__": path.stem}
    for line, code in python_blocks(path):
        padded = "\n" * (line - 1) + code
        exec(compile(padded, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", PAGES[:1], ids=["README.md"])
def test_the_readme_has_an_example(path: Path) -> None:
    assert python_blocks(path)


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.md")), ids=lambda path: path.name)
def test_links_outside_the_site_lead_somewhere(path: Path) -> None:
    """Inside the site ``make docs`` looks; these pages are not part of it."""
    targets = LINK.findall(path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_formulas_of_docstrings_become_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("griffe", reason="comes with the docs extra")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    from formulas import with_text_formulas

    docstring = (
        "Of :math:`a`.\n\n    .. math::\n\n        x = \\frac{a + 1}{2},\n        \\qquad y\n\nEnd"
    )
    assert with_text_formulas(docstring) == (
        "Of `a`.\n\n    ```text\n    x = (a + 1)/2\n    y\n    ```\n\nEnd"
    )
