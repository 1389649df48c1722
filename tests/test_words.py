"""Words of user pages, docstrings and messages; ``python tests/test_words.py`` counts them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_WORDS = 25_000  # of user pages, results and benchmarks excluded
NO_USER_PAGES = ("benchmarks", "decisions", "maths", "results")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(ROOT / "docs" / "results" / name for name in ("faults.md", "paper-claims.md")),
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if path.parent.name not in NO_USER_PAGES
    ),
]
SOURCES = [
    path
    for path in sorted((ROOT / "src").rglob("*"))
    if path.suffix in (".py", ".j2", ".html", ".js") and path.is_file()
]
BANNED = {
    r"nobody (asked|foresaw|knows|listens|waits)": "say what happens",
    r"accept(ed|s) nobody": "TAR 0",
    r"(goes|going|gone) on|go on (from|where|with)": "continue, resume",
    r"trainings|a training (again|in|of|that|which|with)": "training run",
    r"so many(?! \w+ that)": "name the number",
    r"the \d+\. [a-z]+": "11 steps, step 11",
    r"(is|are|was|were) held to": "tested against",
    r"counts? out": "ignored",
    r"by another hand": "by whom",
    r"on (its|their) way": "what is copied or sent",
    r"errors? of ours": "QMarginError",
    r"next to nothing": "little",
    r"what was (chosen|guessed|said)": "name it",
    r"not be had": "not available",
    r"with a word on": "say what is reported",
    r"(every|some|any)(body|one) (else|has|sees|waits)|anybody|somebody": "name the subject",
    r"all but (coincide|the same|equal|a constant)": "nearly",
    r"of another (kind|shape|size|order)|than those of two": "different",
    r"(?<!there )is no (number|name|object|array|device)": "is not a",
    r"(made|drawn|read|chosen|begins?|starts?) anew": "again, new",
    r"has not the|pass such as|give such as": "does not have; try",
}


def found_in(text: str) -> list[str]:
    """Banned words of a text, across line ends, with what to write instead."""
    plain = re.sub(r"\s+(# )?", " ", text)
    return [
        f"{match[0]!r}: write {better!r}"
        for pattern, better in BANNED.items()
        for match in re.finditer(rf"\b({pattern})\b", plain, re.IGNORECASE)
    ]


@pytest.mark.parametrize("paths", [PAGES, SOURCES], ids=["pages", "sources"])
def test_plain_words(paths):
    assert len(paths) > 30
    found = {path: found_in(path.read_text(encoding="utf-8")) for path in paths}
    assert {str(path.relative_to(ROOT)): words for path, words in found.items() if words} == {}


def test_banned_words_are_found():
    examples = (
        "nobody listens; a run that was killed goes\n    # on; the 11. such step; short trainings"
    )
    assert len(found_in(examples)) == 4
    assert len(found_in("a rank is no number; drawn anew; images of another size; somebody")) == 4
    assert (
        found_in("go on training; so many pairs that none fits; count outliers; item 3. Next") == []
    )


def word_counts() -> dict[str, int]:
    """Words of every user page, code included."""
    folders = ("guide", "reference", "tutorial")
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("index.md", "paper.md"))]
    pages += [path for name in folders for path in sorted((ROOT / "docs" / name).glob("*.md"))]
    return {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").split()) for path in pages
    }


def test_user_pages_are_short():
    counts = word_counts()
    assert len(counts) > 30
    largest = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
    assert sum(counts.values()) <= MOST_WORDS, (
        f"user pages have {sum(counts.values()):,} words of {MOST_WORDS:,}; shorten some, or move "
        "measurements to docs/results or docs/benchmarks. Largest: "
        + ", ".join(f"{name} ({counts[name]:,})" for name in largest)
    )


if __name__ == "__main__":
    counts = word_counts()
    for name, count in {**counts, "all": sum(counts.values())}.items():
        print(f"{count:6,}  {name}")  # noqa: T201
