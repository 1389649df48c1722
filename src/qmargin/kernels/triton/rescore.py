"""Rescore: exact scores of the listed pairs, group by group, from the master prototypes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qmargin.kernels.head_reference import GROUP


@triton.jit
def _rescore(
    EMBEDDINGS, PROTOTYPES, INVERSE_NORMS, LABELS, PAIR_ROWS, ORDER, SEGMENTS, SCORES,
    num_classes, depth,
    GROUP: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    begin = tl.load(SEGMENTS + group)
    end = tl.load(SEGMENTS + group + 1)
    if begin == end:
        return
    classes = group * GROUP + tl.arange(0, GROUP)
    is_class = classes < num_classes
    inverse = tl.load(INVERSE_NORMS + classes, mask=is_class, other=0.0)
    prototypes = PROTOTYPES + classes[:, None].to(tl.int64) * depth
    for start in range(begin, end, BR):
        entry = start + tl.arange(0, BR)
        is_entry = entry < end
        pair = tl.load(ORDER + entry, mask=is_entry, other=0)
        row = tl.load(PAIR_ROWS + pair, mask=is_entry, other=0)
        label = tl.load(LABELS + row, mask=is_entry, other=-1)
        embeddings = EMBEDDINGS + row[:, None].to(tl.int64) * depth
        products = tl.zeros((BR, GROUP), dtype=tl.float32)
        for offset in range(0, depth, BK):
            column = offset + tl.arange(0, BK)
            inside = column[None, :] < depth
            x = tl.load(embeddings + column[None, :], mask=is_entry[:, None] & inside, other=0.0)
            w = tl.load(prototypes + column[None, :], mask=is_class[:, None] & inside, other=0.0)
            products = tl.dot(x, w.T, products, input_precision=PRECISION)
        scores = products * inverse[None, :]
        is_void = (classes[None, :] == label[:, None]) | (classes[None, :] >= num_classes)
        scores = tl.where(is_void, float("-inf"), scores)
        place = pair[:, None].to(tl.int64) * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(SCORES + place, scores, mask=is_entry[:, None])


def rescore(
    embeddings: Tensor,
    prototypes: Tensor,
    inverse_norms: Tensor,
    labels: Tensor,
    groups: Tensor,
    rows: Tensor,
) -> Tensor:
    """Exact cosines ``[n, GROUP]`` of the listed pairs; see ``head_reference.rescore``."""
    num_classes, depth = prototypes.shape
    num_groups = -(-num_classes // GROUP)
    scores = torch.empty((len(groups), GROUP), dtype=torch.float32, device=groups.device)
    if not len(groups):
        return scores
    ordered, order = groups.sort(stable=True)
    bounds = torch.arange(num_groups + 1, dtype=torch.int32, device=groups.device)
    segments = torch.searchsorted(ordered, bounds, out_int32=True)
    _rescore[(num_groups,)](
        embeddings, prototypes, inverse_norms, labels.to(torch.int32), rows,
        order.to(torch.int32), segments, scores, num_classes, depth,
        GROUP, 16, 64, "tf32x3", num_warps=4, num_stages=3,
    )  # fmt: skip
    return scores
