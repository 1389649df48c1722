"""Paths on the command line."""

import argparse
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from qmargin.files import Guard


def named_path(text: str) -> Path:
    """A path; an empty one is a shell variable that was not set, not the current folder.

    Examples:
        >>> named_path("runs/first").name
        'first'
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, or . for this folder")
    return Path(text)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets a command replace files of other programs."""
    note = "replace existing files that this command did not write; inputs are never replaced"
    parser.add_argument("--overwrite", action="store_true", help=note)


def add_keep_paths(parser: argparse.ArgumentParser) -> None:
    """Add the option that keeps absolute paths in what is written."""
    note = "write absolute paths as they are; otherwise names of files stand for them"
    parser.add_argument("--keep-paths", action="store_true", help=note)


def guard_of(
    arguments: argparse.Namespace, outputs: Collection[str], *, own: Iterable[str] = ()
) -> Guard:
    """A guard whose inputs are all paths of the command line, except those of the named options.

    Args:
        arguments: With ``overwrite``, from ``add_overwrite``.
        outputs: Options that name what is written.
        own: As in ``Guard``.
    """
    inputs = [
        path
        for name, value in vars(arguments).items()
        if name not in outputs
        for path in _paths(value)
    ]
    return Guard(inputs, overwrite=arguments.overwrite, own=own)


def _paths(value: Any) -> Iterator[Path]:
    """Paths in the value of an option; a text may name a file too."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _paths(item)
    elif isinstance(value, (str, Path)) and value:
        yield Path(value)
