"""Where each row's part of a common list begins."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
NO_LIMIT = (1 << 31) - 1  # entries of a list are counted in 32 bits


@triton.jit
def _starts(COUNTS, STARTS, TOTAL, num_rows, room, BLOCK: tl.constexpr):
    position = tl.zeros((1,), tl.int64)
    tl.store(STARTS + tl.arange(0, 1), position)
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        counts = tl.load(COUNTS + row, mask=row < num_rows, other=0).to(tl.int64)
        ends = position + tl.cumsum(counts, 0)
        tl.store(STARTS + 1 + row, tl.minimum(ends, room), mask=row < num_rows)
        position += tl.sum(counts, 0)
    tl.store(TOTAL + tl.arange(0, 1), position)


def list_starts(counts: Tensor, total: Tensor, room: int | None) -> Tensor:
    """Running sums ``[B + 1]`` of ``counts`` ``[B]``, none above ``room``; their sum in ``total``.

    With starts that end at the room, kernels never write past it. Whether that cut a list short is
    for the caller to see, from the total.
    """
    starts = torch.empty(len(counts) + 1, dtype=torch.int64, device=counts.device)
    limit = NO_LIMIT if room is None else room
    _starts[(1,)](counts, starts, total, len(counts), limit, BLOCK, num_warps=4)
    return starts
