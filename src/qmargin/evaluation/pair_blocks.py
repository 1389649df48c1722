"""Passes over all pairs of rows in blocks of matrix products.

A product is rounded, by at most a bound that is known, so it only says in which of many bins a
pair's exact score nearly lies. One pass counts the bins; from the counts follows which bins
matter; a second pass finds the pairs of those, which are then scored exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import BackendError, ConfigError
from qmargin.evaluation.pair_scores import Floats, PairNorm, Rows, exact_scores
from qmargin.files import Progress

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]
Found = Callable[[Rows, Rows, Floats, Ints], None]
NUM_BINS = 1 << 20
UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}


@dataclass(frozen=True)
class Bins:
    """Equal bins over all scores there can be.

    Attributes:
        low: Lower edge of the first.
        width: Of each.
        slack: A product's bin and its exact score's differ by at most this many.
    """

    low: float
    width: float
    slack: int

    @classmethod
    def of(cls, dim: int, dtype: str, norm: PairNorm | None = None) -> Bins:
        """Bins for products of unit rows of ``dim`` numbers.

        With unit roundoff ``u``, rounding the rows and summing ``d`` products in any order errs by
        at most about ``(d + 2) u`` times the product of the rows' lengths. AS-norm multiplies that
        by the gains, and its own six roundings err by ``u`` times the largest number in it each.
        """
        roundoff = UNIT_ROUNDOFF[dtype]
        error, reach = 1.01 * (dim + 3) * roundoff + 1e-12, 1.0
        if norm is not None:
            gain = 2.0 * float(norm.gain.max())
            reach = gain + 2.0 * float(np.abs(norm.shift).max())
            error = gain * error + reach * (6 * roundoff + 1e-12)
        reach += 2 * error + 4.0 * reach / NUM_BINS
        width = 2 * reach / NUM_BINS
        return cls(-reach, width, math.ceil(error / width) + 1)  # one for rounding the bin itself

    def of_scores(self, scores: Floats) -> Ints:
        """Bin of each score."""
        return np.clip((scores - self.low) / self.width, 0, NUM_BINS - 1).astype(np.int64)


class PairBlocks:
    """All pairs of rows of different groups, in blocks.

    Args:
        unit: ``[n, d]`` rows of length one, float64, sorted by group.
        groups: ``[n]`` sorted.
        block: Rows on each side of a block.
        device: Where products are computed.
        dtype: Precision of the products; it changes the time, never a result.
        norm: For scores by AS-norm instead of cosines.
    """

    def __init__(
        self,
        unit: Floats,
        groups: NDArray[np.intp],
        *,
        block: int,
        device: str,
        dtype: Literal["float32", "float64"],
        norm: PairNorm | None = None,
    ) -> None:
        import torch

        if dtype not in UNIT_ROUNDOFF:
            raise ConfigError(f"dtype={dtype!r} is unknown: choose float32 or float64")
        if block < 1:
            raise ConfigError(f"block={block} is below 1: give the rows of a block, such as 4096")
        self.unit, self.groups, self.norm = unit, groups, norm
        self.block = min(block, len(unit))
        self.bins = Bins.of(unit.shape[1], dtype, norm)
        place = {"device": device, "dtype": getattr(torch, dtype)}
        self._rows = torch.from_numpy(unit).to(**place)
        self._norm = norm and tuple(torch.from_numpy(column).to(**place) for column in norm)
        self._groups = torch.from_numpy(groups).to(device)
        self._starts = range(0, len(unit), self.block)

    @property
    def num_blocks(self) -> int:
        """Blocks of one pass."""
        return len(self._starts) * (len(self._starts) + 1) // 2

    def count(self, progress: Progress | None = None) -> Ints:
        """Pairs in every bin, ``[NUM_BINS]``."""
        import torch

        counts = torch.zeros(NUM_BINS + 1, dtype=torch.int64, device=self._rows.device)
        for done, (_, _, places) in enumerate(self._places(), start=1):
            counts += torch.bincount(places.flatten(), minlength=NUM_BINS + 1)
            if progress is not None:
                progress(done, 2 * self.num_blocks)
        return counts[:-1].cpu().numpy()

    def find(
        self, counts: Ints, is_open: NDArray[np.bool_], found: Found, progress: Progress | None
    ) -> None:
        """Score the pairs of some bins exactly.

        Args:
            counts: What ``count`` returned.
            is_open: ``[NUM_BINS]``, the bins.
            found: Called with two rows, exact scores and bins of some pairs at a time.
            progress: Called with blocks done and their total, counting those of ``count``.
        """
        seen = np.zeros(NUM_BINS, dtype=np.int64)
        for done, (top, left, places) in enumerate(self._places(), start=1):
            where, bins = _members(places, is_open)
            np.add.at(seen, bins, 1)
            first, second = top + where // places.shape[1], left + where % places.shape[1]
            step = 1 << 20
            for start in range(0, len(first), step):
                part = slice(start, start + step)
                scores = exact_scores(self.unit, first[part], second[part], self.norm)
                self._check_bins(scores, bins[part])
                found(first[part], second[part], scores, bins[part])
            if progress is not None:
                progress(self.num_blocks + done, 2 * self.num_blocks)
        if not np.array_equal(seen, np.where(is_open, counts, 0)):
            raise BackendError(
                f"two passes of matrix products on {self._rows.device} differ, results would not "
                f"be exact: use another device, or dtype='float64'"
            )

    def _check_bins(self, scores: Floats, bins: Ints) -> None:
        error = int(np.abs(self.bins.of_scores(scores) - bins).max(initial=0))
        if error > self.bins.slack:
            raise BackendError(
                f"a product on {self._rows.device} is {error} bins from its exact value, rounding "
                f"explains {self.bins.slack}: use another device, or dtype='float64'"
            )

    def _places(self) -> Iterator[tuple[int, int, Tensor]]:
        """First row, first column and the bins of each block; NUM_BINS where there is no pair."""
        import torch

        scale, offset = 1.0 / self.bins.width, -self.bins.low / self.bins.width
        size = self.block * self.block  # allocated once: a fresh page costs more than a product
        products = torch.empty(size, dtype=self._rows.dtype, device=self._rows.device)
        both = torch.empty_like(products) if self._norm else products
        bins = torch.empty(size, dtype=torch.int32, device=self._rows.device)
        for top in self._starts:
            upper = slice(top, top + self.block)
            for left in range(top, len(self.unit), self.block):
                lower = slice(left, left + self.block)
                shape = len(self._rows[upper]), len(self._rows[lower])
                cosines = products[: shape[0] * shape[1]].view(shape)
                with _full_precision(), torch.no_grad():
                    torch.mm(self._rows[upper], self._rows[lower].T, out=cosines)
                if self._norm:
                    gain, shift = self._norm
                    sums = both[: shape[0] * shape[1]].view(shape)
                    cosines.mul_(torch.add(gain[upper, None], gain[lower], out=sums))
                    cosines.sub_(torch.add(shift[upper, None], shift[lower], out=sums))
                places = bins[: shape[0] * shape[1]].view(shape)
                places.copy_(cosines.mul_(scale).add_(offset))
                if self.groups[min(top + self.block, len(self.unit)) - 1] >= self.groups[left]:
                    is_same = self._groups[upper, None] == self._groups[None, lower]
                    if top == left:
                        is_same |= torch.ones_like(is_same).tril_()
                    places.masked_fill_(is_same, NUM_BINS)
                yield top, left, places


def _members(places: Tensor, is_open: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Flat positions of the entries in open bins, and their bins."""
    import torch

    table = np.append(is_open, False)
    flat = places.flatten()
    if flat.device.type == "cpu":  # an order of magnitude faster than indexing a tensor
        bins = flat.numpy()
        where = np.flatnonzero(table.take(bins, mode="clip"))
        return where, bins[where].astype(np.int64)
    chosen = torch.from_numpy(table).to(flat.device)[flat.long()].nonzero().squeeze(1)
    return chosen.cpu().numpy(), flat[chosen].cpu().numpy().astype(np.int64)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products in the precision of their inputs, whatever the process allows elsewhere."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
