"""Versions of installed packages."""

from __future__ import annotations


def installed_version(package: str) -> str | None:
    """Version of a package, None if it is not installed.

    Examples:
        >>> installed_version("no-such-package") is None
        True
    """
    from importlib.metadata import PackageNotFoundError, version  # slow, and not needed for --help

    try:
        return version(package)
    except PackageNotFoundError:
        return None
