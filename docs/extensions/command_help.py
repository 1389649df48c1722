"""Append the ``--help`` text of every command to the page of the command line."""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

from qmargin.cli.commands import build_parser
from qmargin.cli.options import commands_of

WIDTH = 100


def parsers(
    parser: argparse.ArgumentParser, words: str = "qmargin"
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command that has options of its own, with its words."""
    below = commands_of(parser)
    if not below:
        yield words, parser
    for name, one in below.items():
        yield from parsers(one, f"{words} {name}")


def sections() -> str:
    """One section for each command, with its help text."""
    parts = []
    for words, parser in parsers(build_parser()):
        parser.formatter_class = partial(parser.formatter_class, width=WIDTH)  # type: ignore
        parts.append(f"## {words}\n\n```text\n{parser.format_help().strip()}\n```\n")
    return "\n".join(parts)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs for every page."""
    if page.file.src_uri != "reference/command-line.md":
        return markdown
    return f"{markdown}\n{sections()}"
