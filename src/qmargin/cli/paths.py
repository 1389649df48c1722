"""Paths on the command line."""

import argparse
from pathlib import Path


def named_path(text: str) -> Path:
    """A path; an empty one is a shell variable that was not set, not the current folder.

    Examples:
        >>> named_path("runs/first").name
        'first'
    """
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, or . for this folder")
    return Path(text)
