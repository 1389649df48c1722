"""The map of the paper as text: one item, or ``docs/paper.md``."""

from __future__ import annotations

from collections.abc import Iterable

from qmargin.paper.claims import CLAIMS
from qmargin.paper.items import KINDS, Item
from qmargin.paper.method import METHOD
from qmargin.paper.results import RESULTS

ITEMS = {item.name: item for item in (*METHOD, *RESULTS, *CLAIMS)}
TITLES = {
    "equation": "Equations",
    "proposition": "Propositions",
    "claim": "Claims",
    "setup": "Setups",
    "table": "Tables",
    "figure": "Figures",
}
PAGE_MARK = "This page is made by `qmargin paper"
INTRODUCTION = """# The paper, mapped

Everything in *Sparsity-Inducing Divergence Losses for Biometric Verification* that can be checked,
with where it is in the code, the tests that check it, the command that shows it, the scale at which
it was run here, and what differs. `qmargin paper --list` prints the names, `qmargin paper NAME` an
entry, or makes the table or figure of that name beside the paper's own numbers, as Markdown and
LaTeX. Without `--results` it trains by the demo's recipe on **synthetic** stroke identities: the
layout is the paper's, the scale is not, and captions say so.

The paper's face and speaker data are not part of this package, and none of its trainings was
repeated. A reader who has them runs the recipes of `qmargin recipes`, evaluates, and gives the
results to `qmargin paper table-face --results DIR`.

This page is made by `qmargin paper --page docs/paper.md`.
"""


def item_text(item: Item) -> str:
    """One item for a terminal.

    Examples:
        >>> print(item_text(ITEMS["equation-prior"]).splitlines()[0])
        equation-prior (eq. 7, eq:prior)
    """
    lines = [
        f"{item.name} ({item.where})",
        f"  says     {item.says}",
        *(f"  code     {place}" for place in item.code),
        *(f"  test     {place}" for place in item.tests),
        f"  command  {item.command or 'none beside its tests'}",
        f"  here     {item.here}",
        f"  differs  {item.differs}",
    ]
    return "\n".join(lines)


def paper_page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for kind in KINDS:
        own = [item for item in ITEMS.values() if item.kind == kind]
        parts.append(f"## {TITLES[kind]}\n")
        parts += [_section(item) for item in own]
    return "\n".join(parts)


def _section(item: Item) -> str:
    code = _listed(place.replace(":", ", ") for place in item.code)
    lines = [
        f"### {item.name}\n",
        f"{item.where[0].upper()}{item.where[1:]}: {item.says}.\n",
        f"- Code: {code}",
        f"- Tests: {_listed(item.tests)}",
        f"- Command: {_command(item)}",
        f"- Here: {item.here}",
        f"- Differs: {item.differs}\n",
    ]
    return "\n".join(lines)


def _command(item: Item) -> str:
    return f"`{item.command}`" if item.command else "none beside its tests"


def _listed(names: Iterable[str]) -> str:
    return "; ".join(f"`{name}`" for name in names)
