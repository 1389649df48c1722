"""A thing that the paper says, with where it is in the code and what shows it."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("equation", "proposition", "claim", "setup", "table", "figure")


@dataclass(frozen=True)
class Item:
    """A thing that the paper says.

    Attributes:
        name: Its key in ``qmargin paper``; begins with one of ``KINDS``.
        where: In the paper.
        says: In a sentence.
        code: Files of this repository, each with a name in it: ``src/qmargin/a.py:B.c``.
        tests: ``tests/a/test_b.py::test_c``.
        command: That shows or reproduces it.
        here: At which scale it was run here.
        differs: What differs from the paper, and why.
    """

    name: str
    where: str
    says: str
    code: tuple[str, ...]
    tests: tuple[str, ...]
    command: str
    here: str
    differs: str = "Nothing."

    @property
    def kind(self) -> str:
        """What it is."""
        return self.name.split("-")[0]
