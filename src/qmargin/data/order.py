"""The order of samples: a function of seed, epoch and position only.

A keyed permutation gives the sample at a position, so that any number of ranks and
workers, and a run restarted in the middle of an epoch, read the same samples in the same order.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from qmargin.errors import ConfigError

LARGEST_DOMAIN = 1 << 62
MAX_BYTES = 16 << 30  # of samples that a process holds
MOST_SAMPLES = 1 << 36  # limit of computed data: half a terabyte of labels
_ROUNDS = 16  # fewer leave the orders of five or six samples visibly uneven
_BLOCK = 1 << 14  # positions mapped at once: a few arrays of this size stay in the cache
_SHIFT = np.uint64(32)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)  # with the step above, of splitmix64
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def derived_seed(*parts: int) -> int:
    """A seed in ``[0, 2**63)`` that depends on every part, the same on every machine."""
    text = ",".join(map(str, map(int, parts))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash of each key: the finaliser of splitmix64, a permutation of 64-bit numbers."""
    mixed = keys ^ (keys >> np.uint64(30))
    mixed *= _FIRST_FACTOR
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND_FACTOR
    mixed ^= mixed >> np.uint64(31)
    return mixed


def sample_seeds(seed: int, epoch: int, samples: NDArray[np.int64]) -> list[int]:
    """Seeds in ``[0, 2**63)`` of the readings of samples in an epoch.

    All at once, because ``derived_seed`` of each would take a few percent of the time of decoding.
    """
    keys = samples.astype(np.uint64) * GOLDEN + np.uint64(derived_seed(seed, epoch))
    found: list[int] = (mixed(keys) >> np.uint64(1)).tolist()
    return found


def check_count(value: object, name: str, *, low: int = 0) -> int:
    """The value as an int, or ``ConfigError`` unless it is an integer of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
        raise ConfigError(f"{name} is {value!r}; give an integer of at least {low}")
    return int(value)


def check_samples(num_classes: int, samples_per_class: int) -> None:
    """Refuse more computed samples than there can be labels for."""
    if num_classes * samples_per_class > MOST_SAMPLES:
        given = f"num_classes is {num_classes} and samples_per_class {samples_per_class}"
        raise ConfigError(f"{given}; at most {MOST_SAMPLES} samples are possible, lower one")


class KeyedPermutation:
    """A permutation of ``range(n)`` that is computed, never stored.

    An index is split into a row and a column of a grid with at least ``n`` cells. Each round shifts
    one of the two by a keyed hash of the other (a Feistel network with addition in place of XOR),
    which can be undone, so the cells are permuted. A cell past ``n`` is mapped again until it falls
    inside; the grid has at most ``sqrt(n)`` such cells. Seed and epoch may be any integers.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self.n = check_count(n, "the number of samples", low=1)
        if self.n > LARGEST_DOMAIN:
            raise ConfigError(f"cannot order {n} samples; at most {LARGEST_DOMAIN} are supported")
        num_columns = math.isqrt(self.n - 1) + 1
        self._columns = np.uint64(num_columns)
        self._rows = np.uint64(-(-self.n // num_columns))
        self._keys = [np.uint64(derived_seed(self.n, seed, epoch, turn)) for turn in range(_ROUNDS)]

    @overload
    def __getitem__(self, position: int) -> int: ...
    @overload
    def __getitem__(self, position: NDArray[np.integer]) -> NDArray[np.int64]: ...
    def __getitem__(self, position: int | NDArray[np.integer]) -> int | NDArray[np.int64]:
        """Sample at a position, or samples at an array of positions ``[...]``."""
        positions = np.asarray(position)
        if not np.issubdtype(positions.dtype, np.integer) and positions.size:
            raise ConfigError(f"positions are {positions.dtype}; give integers")
        if positions.size and (positions.min() < 0 or positions.max() >= self.n):
            raise IndexError(f"a position is outside [0, {self.n}) in an order of {self.n} samples")
        cells = positions.astype(np.uint64).ravel()
        for start in range(0, cells.size, _BLOCK):
            block = cells[start : start + _BLOCK]
            block[:] = self._mapped(block)
            while (outside := np.flatnonzero(block >= np.uint64(self.n))).size:
                block[outside] = self._mapped(block[outside])
        samples: NDArray[np.int64] = cells.astype(np.int64).reshape(positions.shape)
        return samples if isinstance(position, np.ndarray) else int(samples)

    def _mapped(self, cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """One pass through all rounds: a permutation of the cells of the grid."""
        rows, columns = np.divmod(cells, self._columns)
        for turn in range(0, _ROUNDS, 2):
            rows = _shifted(rows, columns, key=self._keys[turn], modulus=self._rows)
            columns = _shifted(columns, rows, key=self._keys[turn + 1], modulus=self._columns)
        joined: NDArray[np.uint64] = rows * self._columns + columns
        return joined


def _shifted(
    values: NDArray[np.uint64], others: NDArray[np.uint64], *, key: np.uint64, modulus: np.uint64
) -> NDArray[np.uint64]:
    """``(values + hash(others, key)) mod modulus``, without a division."""
    mixed: NDArray[np.uint64] = (others ^ key) * _FIRST_FACTOR
    mixed ^= mixed >> _SHIFT
    mixed *= _SECOND_FACTOR
    mixed >>= _SHIFT
    mixed *= modulus  # 32 bits times at most 32 bits: the high half is uniform below the modulus
    mixed >>= _SHIFT
    mixed += values
    # A sum below the modulus wraps to a huge number when the modulus is taken off.
    np.minimum(mixed, mixed - modulus, out=mixed)
    return mixed


@dataclass(frozen=True)
class GlobalOrder:
    """Samples of the global batch of each step, and of each rank's part.

    Steps are counted through all epochs. The parts of the ranks are contiguous: joined in the order
    of the ranks they are the global batch, for any number of ranks. Where the batch does not divide
    evenly, the first ranks have one sample more; a rank may have none.

    Without ``drop_last``, the incomplete batch at the end of an epoch is read as well.

    Examples:
        >>> order = GlobalOrder(10, seed=0, batch_size=4)
        >>> order.steps_per_epoch, order.epoch_of(5), len(order.batch(5))
        (2, 2, 4)
    """

    n: int
    seed: int
    batch_size: int  # samples of one step over all ranks
    drop_last: bool = True

    def __post_init__(self) -> None:
        check_count(self.n, "the number of samples", low=1)
        check_count(self.batch_size, "batch_size", low=1)
        if self.drop_last and self.batch_size > self.n:
            given = f"data.batch_size is {self.batch_size} and there are {self.n} samples"
            raise ConfigError(
                f"{given}; set data.batch_size to at most {self.n}, or data.drop_last=false"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one pass over the samples."""
        if self.drop_last:
            return self.n // self.batch_size
        return -(-self.n // self.batch_size)

    def epoch_of(self, step: int) -> int:
        """The epoch, counted from zero, that a step is in."""
        return check_count(step, "step") // self.steps_per_epoch

    def batch(self, step: int) -> NDArray[np.int64]:
        """Samples of the step's global batch, in order."""
        return self.part(step, rank=0, world=1)

    def part(self, step: int, *, rank: int, world: int) -> NDArray[np.int64]:
        """Samples of the step that one of ``world`` ranks reads, in order; may be empty."""
        if not 0 <= check_count(rank, "rank") < check_count(world, "world", low=1):
            raise ConfigError(f"rank is {rank} of {world}; ranks count from 0 to {world - 1}")
        epoch, turn = divmod(check_count(step, "step"), self.steps_per_epoch)
        first = turn * self.batch_size
        size = min(self.batch_size, self.n - first)
        share, extra = divmod(size, world)
        start = first + rank * share + min(rank, extra)
        positions = np.arange(start, start + share + (rank < extra))
        return KeyedPermutation(self.n, self.seed, epoch)[positions]
