"""The tests that the page of faults names exist, and its rows all name one."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guide" / "faults.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_named_test_exists() -> None:
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 40
    missing = [(file, name) for file, name in named if name not in functions(TESTS / file)]
    assert not missing


def test_every_fault_names_a_test() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| ---")]
    rows = [row for row in rows if not row.endswith("| tests |")]
    assert len(rows) > 20
    assert [row for row in rows if not NAMED.search(row)] == []
