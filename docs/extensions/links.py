"""Links between the pages of the API: a public name in a docstring leads to its entry."""

import ast
import re
from pathlib import Path
from typing import Any

import griffe

SOURCE = Path(__file__).parents[2] / "src" / "qmargin"
CODE = re.compile(r"(?<!`)``(\w+)``(?!`)")
ROLE = re.compile(r":(?:func|meth|class):`(?:[\w.]*\.)?(\w+)`")


def public_names() -> dict[str, str]:
    """Full paths of the classes and functions in ``qmargin.__all__`` and in that of its metrics."""
    found = {}
    for file in ("__init__.pyi", "metrics/__init__.py"):
        for node in ast.parse((SOURCE / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom) and node.module != "qmargin":
                found |= {one.name: f"{node.module}.{one.name}" for one in node.names}
    return found


def with_links(docstring: str, names: dict[str, str]) -> str:
    """The docstring with links for names that cannot be taken for plain words.

    Example:
        >>> with_links("See ``as_norm`` and ``eer``.", {"as_norm": "m.as_norm", "eer": "m.eer"})
        'See [`as_norm`][m.as_norm] and ``eer``.'
    """

    def link(found: re.Match[str]) -> str:
        name = found[1]
        is_plain = name not in names or (name.islower() and "_" not in name)
        return found[0] if is_plain else f"[`{name}`][{names[name]}]"

    return CODE.sub(link, ROLE.sub(r"``\1``", docstring))


class Links(griffe.Extension):
    """Rewrites docstrings as they are read."""

    def __init__(self) -> None:
        self.names = public_names()

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_links(obj.docstring.value, self.names)
