"""Every formula of the ledger is explained in the docs, named in the source and tested."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEDGER = ROOT / "docs" / "maths" / "ledger.md"
NUMBER = re.compile(r"\bM(\d+)\b")


def numbers_in(*paths: Path) -> set[int]:
    return {
        int(number) for path in paths for number in NUMBER.findall(path.read_text(encoding="utf-8"))
    }


def ledger_numbers() -> list[int]:
    rows = re.findall(r"^\| M(\d+) \|", LEDGER.read_text(encoding="utf-8"), re.MULTILINE)
    return [int(number) for number in rows]


def test_the_ledger_counts_from_one_without_gaps() -> None:
    numbers = ledger_numbers()
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 13


def test_every_formula_is_explained_outside_the_ledger() -> None:
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path != LEDGER]
    assert set(ledger_numbers()) <= numbers_in(*pages)


def test_every_formula_occurs_in_the_source() -> None:
    assert set(ledger_numbers()) <= numbers_in(*(ROOT / "src").rglob("*.py"))


def test_every_formula_occurs_in_a_test() -> None:
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    assert set(ledger_numbers()) <= numbers_in(*tests)


def test_no_code_names_a_formula_that_the_ledger_lacks() -> None:
    files = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    files = [path for path in files if "report" not in path.parts]  # drawings have such letters too
    assert numbers_in(*files) <= set(ledger_numbers())
