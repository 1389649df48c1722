"""The tests that the page of faults names exist, and its rows all name one."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "results" / "faults.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_every_named_test_exists():
    named = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(named) > 40
    texts = {file: (TESTS / file).read_text(encoding="utf-8") for file, _ in named}
    assert [place for place in named if f"\ndef {place[1]}(" not in texts[place[0]]] == []


def test_every_fault_names_a_test():
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| ---")]
    rows = [row for row in rows if not row.endswith("| tests |")]
    assert len(rows) > 20 and [row for row in rows if not NAMED.search(row)] == []
