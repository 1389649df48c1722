"""Every formula of the ledger is explained in the docs, named in the source and tested."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "docs" / "maths" / "ledger.md"
NUMBER = re.compile(r"\bM(\d+)\b")


def numbers_in(folder: str, pattern: str) -> set[int]:
    paths = {*(ROOT / folder).rglob(pattern)} - {LEDGER, Path(__file__)}
    texts = [path.read_text("utf-8") for path in paths if "report" not in path.parts]
    return {int(number) for text in texts for number in NUMBER.findall(text)}


def test_every_formula_is_explained_in_the_source_and_in_a_test():
    """No code names one that the ledger lacks; drawings of reports have such letters too."""
    rows = re.findall(r"^\| M(\d+) \|", LEDGER.read_text(encoding="utf-8"), re.MULTILINE)
    numbers = set(map(int, rows))
    assert numbers == set(range(1, len(rows) + 1)) and len(rows) >= 13
    assert numbers <= numbers_in("docs", "*.md")
    assert numbers == numbers_in("src", "*.py") == numbers_in("tests", "*.py")
