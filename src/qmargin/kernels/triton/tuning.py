"""Tile sizes, in one table: no search at run time.

Chosen on an H200 (132 multiprocessors); other devices run the same tiles and are right, if not
fastest. ``num_programs`` of a persistent kernel is the number of multiprocessors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class ScreenTiles(NamedTuple):
    """Tiles of the fused product."""

    rows: int
    classes: int
    depth: int
    warps: int
    stages: int


def screen_tiles(num_rows: int) -> ScreenTiles:
    """Wide tiles for full batches, narrow ones when a tile would be mostly padding."""
    if num_rows > 64:
        return ScreenTiles(128, 256, 64, 8, 3)
    return ScreenTiles(64 if num_rows > 32 else 32 if num_rows > 16 else 16, 128, 64, 4, 3)


def num_programs(device: torch.device) -> int:
    """One persistent program per multiprocessor; a few in the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(number: int) -> int:
    """Smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
