"""Markup that is safe by construction: a string is escaped unless it is ``Html`` already."""

from __future__ import annotations

import html
import json
import unicodedata
from collections.abc import Iterable
from typing import Any

LONGEST_NAME = 120  # characters of a name that are shown
LONGEST_TEXT = 2000  # of a note, a path or a command
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta"})
_IN_JSON = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


class Html(str):
    """Text that is markup already; nothing else enters a page without being escaped."""

    __slots__ = ()


def cleaned(text: str, longest: int = LONGEST_NAME) -> str:
    """A name as it may be shown: no control, override or surrogate characters, not too long.

    Names come from files of others. Characters that would move the text around them, end a line
    or break the encoding are replaced by a sign that shows something was there.

    Examples:
        >>> cleaned("speaker" + chr(0x202E) + "7")
        'speaker\ufffd7'
    """
    signs = (
        "\ufffd" if unicodedata.category(sign) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp") else sign
        for sign in text[: longest + 1]
    )
    shown = "".join(signs)
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def tag(name: str, /, *children: str, **attributes: Any) -> Html:
    """One element; children that are not ``Html`` are escaped, and so is every attribute.

    Attributes are written as ``class_`` and ``aria_label``; None and False leave one out.

    Examples:
        >>> tag("p", "1 < 2", tag("b", "yes"), class_="note")
        '<p class="note">1 &lt; 2<b>yes</b></p>'
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(children)}</{name}>")


def joined(parts: Iterable[str], separator: str = "") -> Html:
    """Parts one after another, escaped where they are not ``Html``.

    Examples:
        >>> joined(["a & b", tag("br")])
        'a &amp; b<br>'
    """
    return Html(separator.join(escaped(part) for part in parts))


def escaped(text: str) -> Html:
    """The text as markup that shows it.

    Examples:
        >>> escaped('<i title="x">')
        '&lt;i title=&quot;x&quot;&gt;'
    """
    return text if isinstance(text, Html) else Html(html.escape(text, quote=True))


def name_of(text: str) -> Html:
    """A name from a file: cleaned, escaped, and its writing direction kept to itself.

    Examples:
        >>> name_of("<script>")
        '<bdi>&lt;script&gt;</bdi>'
    """
    return tag("bdi", cleaned(text))


def text_of(text: str) -> Html:
    """A longer text from a file: a note, a path, a command."""
    return tag("bdi", cleaned(text, LONGEST_TEXT))


def json_block(identifier: str, value: Any) -> Html:
    r"""Data for the page's script, which cannot end the element that holds it.

    Examples:
        >>> json_block("d", ["</script>"])
        '<script type="application/json" id="d">["\\u003c/script\\u003e"]</script>'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_IN_JSON)
    return Html(f'<script type="application/json" id="{escaped(identifier)}">{text}</script>')


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{escaped(str(value))}"'
