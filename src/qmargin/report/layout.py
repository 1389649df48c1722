"""Tables of the page: a caption that stays put above a body that may scroll sideways."""

from __future__ import annotations

from collections.abc import Sequence

from qmargin.report.markup import Html, tag


def data_table(
    head: Sequence[str | Html], rows: Sequence[Html], caption: str = "", *, class_: str = "plain"
) -> Html:
    """A table with column headings; those that begin with ``<`` sit over words, to the left.

    An empty heading belongs to a drawing that repeats the number beside it.
    """
    titles = tag("tr", *[text if isinstance(text, Html) else _heading(text) for text in head])
    table = tag("table", tag("thead", titles), tag("tbody", *rows), class_=class_)
    return scrolling(table, caption)


def scrolling(table: Html, caption: str = "") -> Html:
    """A table in a box that can be scrolled with the keyboard as well."""
    label = caption or "Table"
    box = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)
    return tag("figure", tag("figcaption", caption), box) if caption else box


def _heading(text: str) -> Html:
    if not text:
        return tag("td", tag("span", "drawing", class_="unseen"))
    if text.startswith("<"):
        return tag("th", text[1:], scope="col", class_="left")
    return tag("th", text, scope="col")
