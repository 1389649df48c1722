"""What pages name in backticks: code as ``qmargin.module:name``, and files of the repository."""

import importlib
import re
from functools import reduce
from pathlib import Path

ROOT = Path(__file__).parents[2]


def spans(text: str) -> list[str]:
    """Texts in single backticks; lines that were broken are joined."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]


def code_in(text: str) -> list[str]:
    """Modules, and names in modules after a colon."""
    pattern = r"qmargin(\.\w+)+|qmargin[\w.]*:[\w.]+"
    return sorted({span for span in spans(text) if re.fullmatch(pattern, span)})


def paths_in(text: str) -> list[str]:
    """Files and folders below the root of the repository."""
    pattern = r"(src|tests|docs|benchmarks|examples)/[\w./-]*"
    return sorted({span for span in spans(text) if re.fullmatch(pattern, span)})


def missing(text: str) -> list[str]:
    """Code and files that a page names and that do not exist."""
    found = [path for path in paths_in(text) if not (ROOT / path).exists()]
    return found + [place for place in code_in(text) if not _exists(place)]


def _exists(place: str) -> bool:
    module, _, name = place.partition(":")
    try:
        reduce(getattr, filter(None, name.split(".")), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True
