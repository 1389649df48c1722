"""How much memory a head needs and how much there is."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from qmargin.errors import ConfigError

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device, None where nobody can tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + cached
    if device.type != "cpu":
        return None
    facts = Path("/proc/meminfo")  # counts what caches would give back; sysconf does not
    if facts.exists():
        for line in facts.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def check_memory(parts: dict[str, int], device: torch.device, *, subject: str) -> None:
    """Raise ``ConfigError`` if the parts, in bytes, exceed what the device has left."""
    available, needed = available_memory(device), sum(parts.values())
    if available is None or needed <= available:
        return
    listed = ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
    raise ConfigError(
        f"{subject} needs {gib(needed)} on {device} ({listed}) and {gib(available)} are free; "
        "use fewer classes, a smaller embedding_dim, gradient='fused', or a larger device"
    )


def gib(size: float) -> str:
    """A size for people.

    Examples:
        >>> gib(3 * 2**30), gib(5 * 2**20), gib(100)
        ('3.0 GiB', '5.0 MiB', '0.1 KiB')
    """
    unit, name = next((unit, name) for unit, name in _UNITS if size >= unit or unit == 2**10)
    return f"{size / unit:,.1f} {name}"
