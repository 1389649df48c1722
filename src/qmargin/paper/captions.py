"""What is said below a figure, as Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qmargin.files import Guard
from qmargin.paper.layout import escaped, latex_caption, markdown_words
from qmargin.paper.numbers import Columns, Row


def described(alpha: float, scale: float, margin: float) -> str:
    """A setting in a few signs.

    Examples:
        >>> described(1.25, 35.0, 0.2), described(1.0, 64.0, 0.5)
        ('alpha=1.25, s=35, m=0.2', 's=64, m=0.5')
    """
    order = "" if alpha == 1.0 else f"alpha={alpha:g}, "
    return f"{order}s={scale:g}, m={margin:g}"


def points_of_paper(rows: Sequence[Row], columns: Columns) -> str:
    """The paper's TARs at its FARs, which it gives in tables and draws as curves."""
    heads = ", ".join(f"{title} at {' and '.join(fars)}" for title, fars in columns)
    found = [
        f"{row.loss} ({described(*row.setting[1:])}) " + ", ".join(f"{v:.2f}" for v in row.values)
        for row in rows
    ]
    return f"The paper's TAR (%), {heads}: {'; '.join(found)}."


def write_captions(
    stem: Path, pictures: Sequence[str], caption: str, *, guard: Guard | None = None
) -> list[Path]:
    """Pictures of the same folder with their caption in ``stem.md`` and ``stem.tex``.

    Args:
        stem: Path without an ending; its name becomes a part of the label in LaTeX.
        pictures: File names without a folder.
        caption: In plain words.
        guard: Decides what may be written over.
    """
    shown = "".join(f"![]({name})\n\n" for name in pictures if not name.endswith(".pdf"))
    texts = {
        "md": f"{shown}{escaped(caption, markdown_words)}\n",
        "tex": _latex([name for name in pictures if not name.endswith(".svg")], stem, caption),
    }
    files = {stem.with_name(f"{stem.name}.{kind}"): text.encode() for kind, text in texts.items()}
    return (guard or Guard()).write_all(files)


def _latex(pictures: Sequence[str], stem: Path, caption: str) -> str:
    parts = [
        "% Needs \\usepackage{graphicx}",
        "\\begin{figure*}[t]",
        "\\centering",
        *(f"\\includegraphics[width=\\textwidth]{{{name}}}" for name in pictures),
        f"\\caption{{{latex_caption(caption)}}}",
        f"\\label{{fig:{stem.name}}}",
        "\\end{figure*}",
    ]
    return "\n".join(parts) + "\n"
