"""What ``qmargin evaluate`` refuses before any work is done."""

from __future__ import annotations

import argparse
from pathlib import Path

from qmargin.errors import ConfigError


def check_out(path: Path) -> None:
    """Refuse a place that cannot be written."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"--out {path} is not a file in an existing folder: make the folder first"
        )


def check_protocol(arguments: argparse.Namespace) -> None:
    """The same of a protocol, which also needs a model or its embeddings."""
    check_out(arguments.out)
    if arguments.model is None and arguments.embeddings is None:
        raise ConfigError("there is neither --model nor --embeddings: give one of them")
    if arguments.model is not None:
        from qmargin.training.process import find_device

        find_device(arguments.device)
