"""Safe text on a terminal: control characters from files and servers are escaped."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live


def printable(text: str, *, keep: str = "") -> str:
    r"""Text with escapes for control characters other than ``keep``, overrides and stray bytes."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii")
        for one in text
    )


class SafeStream:
    """A text stream that escapes all but printable characters, line ends and tabs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write escaped text; returns the length of the original."""
        self._stream.write(printable(text, keep="\n\t"))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _OneLine(logging.Formatter):
    """A message on one line; a traceback keeps its lines."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keep="\n" if record.exc_info else "")


@contextmanager
def safe_streams() -> Iterator[None]:
    """Escape control characters in both streams, and in ``logging`` without a handler."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _safe(sys.stdout), _safe(sys.stderr)
    handler = logging.lastResort
    if handler is not None:
        formatter, handler.formatter = handler.formatter, _OneLine()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        if handler is not None:
            handler.formatter = formatter


def rich_console(stream: TextIO) -> Console:
    """Console of rich with its own control codes; those in texts are escaped."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                text = segment.text if segment.control else printable(segment.text, keep="\n")
                yield segment._replace(text=text)

    return SafeConsole(file=stream._stream if isinstance(stream, SafeStream) else stream)


def start_live(live: Live) -> None:
    """Start a live display; other output appears above it, escaped as before.

    rich replaces both streams until the display stops, and would obey escapes in what they get.
    """
    names = [name for name in ("stdout", "stderr") if isinstance(getattr(sys, name), SafeStream)]
    live.start(refresh=True)
    for name in names:
        setattr(sys, name, _safe(getattr(sys, name)))


def _safe(stream: TextIO) -> TextIO:
    return stream if isinstance(stream, SafeStream) else cast(TextIO, SafeStream(stream))


def without_passwords(text: str) -> str:
    """A text with the passwords of URLs removed."""
    return re.sub(r"(://[^\s/@:]*):[^\s@]*@", r"\1:***@", text)
