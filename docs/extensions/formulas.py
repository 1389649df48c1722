"""Formulas of docstrings as readable text on the API page.

Docstrings write ``.. math::``, which Markdown does not know, and the site loads no script that
could typeset it. So a formula becomes a block of text in the notation of ``docs/maths``.
"""

import re
from typing import Any

import griffe

BLOCK = re.compile(r"^([ ]*)\.\. math::[ ]*(.*(?:\n(?:\1[ ]+.*|[ ]*(?=\n\1[ ])))*)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]*)`")
SYMBOLS = {
    "alpha": "α",  # noqa: RUF001
    "sigma": "σ",  # noqa: RUF001
    "theta": "θ", "tau": "τ", "mu": "μ", "lambda": "λ", "varphi": "φ", "varepsilon": "ε",
    "sum": "Σ", "ne": "≠", "cos": "cos", "log": "log", "left": "", "right": "", ",": "",
}  # fmt: skip


def as_text(latex: str) -> str:
    r"""The formula with symbols for commands; what has no symbol stays as it is.

    Example:
        >>> as_text(r"m = \frac{1}{s} \log(1 + s\, m_\text{eff}), \qquad q = e^{-s m}")
        'm = 1/s log(1 + s m_eff)\nq = e^(-s m)'
    """
    text = " ".join(latex.split())
    text = re.sub(r"\\(?:text|operatorname)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", _fraction, text)
    text = re.sub(r"\\lVert (.*?) \\rVert", r"‖\1‖", text)
    text = re.sub(r"([\^_])\{([^{}]*)\}", r"\1(\2)", text)
    text = re.sub(r"\\([A-Za-z]+|,)", lambda found: SYMBOLS.get(found[1], found[0]), text)
    text = text.replace("( ", "(").replace(" )", ")")
    return re.sub(r", *\\qquad *", "\n", text)


def _fraction(found: re.Match[str]) -> str:
    parts = (part if " " not in part else f"({part})" for part in found.groups())
    return "/".join(parts)


def with_text_formulas(docstring: str) -> str:
    """The docstring with every formula as a block of text, or as code within a line."""

    def block(found: re.Match[str]) -> str:
        indent = found[1]
        lines = ["```text", *as_text(found[2]).splitlines(), "```"]
        return "\n".join(indent + line for line in lines)

    return INLINE.sub(r"`\1`", BLOCK.sub(block, docstring))


class Formulas(griffe.Extension):
    """Rewrites docstrings as they are read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_text_formulas(obj.docstring.value)
