"""Paths: the ways to take a step, the settings of each, and the rule of ``path="auto"``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from qmargin.errors import ConfigError
from qmargin.losses.checks import check_number

LIST_CAPACITY = 8192  # listed groups per row, on average, above which blocks are faster than lists
MATRIX_LOGITS = 1 << 29  # a gibibyte of half-precision cosines
DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class StepPath:
    """Base of the paths: ``Auto``, ``Sparse``, ``Chunked``, ``Dense``, ``Sampled``, ``TopK``."""

    name: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Sparse(StepPath):
    """Compute only the classes that can be active; exact, for ``alpha > 1``.

    Args:
        screen_dtype: Precision of the screened copy of the prototypes; by default that of the
            prototypes, and float16 for float32 prototypes on a GPU.
        chunk_dtype: Operands of a step that is redone by blocks, see ``Chunked``.
        list_capacity: Groups of 32 classes that a step may list per row, on average; above it the
            step is redone by blocks of classes.
        matrix_logits: Largest ``B * k`` for which a step on one GPU keeps all screened cosines in a
            half-precision matrix, which is faster for up to a few hundred thousand classes. A step
            by blocks keeps posteriors as ``Chunked`` says. 0 for never.
        capture: Capture such steps as a CUDA graph after a few of the same shape.
    """

    name: ClassVar[str] = "sparse"
    screen_dtype: torch.dtype | None = None
    chunk_dtype: torch.dtype | None = None
    list_capacity: int = LIST_CAPACITY
    matrix_logits: int = MATRIX_LOGITS
    capture: bool = True

    def __post_init__(self) -> None:
        _check_dtypes(screen_dtype=self.screen_dtype, chunk_dtype=self.chunk_dtype)
        if self.list_capacity < 0:
            raise ConfigError(f"list_capacity is {self.list_capacity}; it must be at least 0")
        _check_matrix(self.matrix_logits)


@dataclass(frozen=True, kw_only=True)
class Auto(Sparse):
    """Choose ``Sparse``, ``Chunked`` or ``Dense`` by loss, support size and speed.

    The settings are those of ``Sparse``; ``chunk_dtype`` is that of all steps taken by blocks.
    """

    name: ClassVar[str] = "auto"


@dataclass(frozen=True, kw_only=True)
class Chunked(StepPath):
    """Compute all classes block by block, without storing the logits; any alpha.

    Args:
        dtype: Operands of the products; by default the prototypes' own precision on a CPU and that
            of the screened copy on a GPU. ``torch.float32`` gives exact products on a GPU.
        screen_dtype: Precision of the copy of the prototypes, see ``Sparse``.
        matrix_logits: Largest ``B * k`` for which a step at ``alpha = 1`` on one GPU keeps all
            posteriors in one half-precision matrix. Larger steps keep those of as many classes as
            fit for their backward pass; unless this is lowered, a 32nd of the GPU's memory may be
            used for them. 0 for never.
        capture: As for ``Sparse``.
    """

    name: ClassVar[str] = "chunked"
    dtype: torch.dtype | None = None
    screen_dtype: torch.dtype | None = None
    matrix_logits: int = MATRIX_LOGITS
    capture: bool = True

    def __post_init__(self) -> None:
        _check_dtypes(dtype=self.dtype, screen_dtype=self.screen_dtype)
        _check_matrix(self.matrix_logits)

    @property
    def chunk_dtype(self) -> torch.dtype | None:
        """The operands' precision, under its name in ``Sparse``."""
        return self.dtype


@dataclass(frozen=True)
class Dense(StepPath):
    """Compute all cosines ``[B, k]`` in plain PyTorch; any divergence, learnable alpha."""

    name: ClassVar[str] = "dense"


@dataclass(frozen=True)
class Sampled(StepPath):
    """Partial FC: the classes of the batch and a random sample of the others; approximate.

    Args:
        rate: Share of the classes that a step takes, in (0, 1].
        seed: Seed of the samples; the position in their sequence is part of ``state_dict()``.
    """

    name: ClassVar[str] = "sampled"
    rate: float = 0.1
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not 0.0 < check_number(self.rate, "rate") <= 1.0:
            raise ConfigError(f"rate is {self.rate!r}; choose a share of the classes in (0, 1]")


@dataclass(frozen=True)
class TopK(StepPath):
    """The paper's procedure: bisection on the largest K percent of the logits, with a check; exact.

    Args:
        percent: Percentage of the classes, in (0, 100]; doubled while the check fails.
    """

    name: ClassVar[str] = "top_k"
    percent: float = 5.0

    def __post_init__(self) -> None:
        if not 0.0 < check_number(self.percent, "percent") <= 100.0:
            raise ConfigError(f"percent is {self.percent!r}; choose a percentage in (0, 100]")


KINDS: tuple[type[StepPath], ...] = (Auto, Sparse, Chunked, Dense, Sampled, TopK)
PATHS = {path.name: path for path in KINDS} | {"paper": TopK}


def as_path(path: str | StepPath) -> StepPath:
    """Return a path given by name with its default settings."""
    if isinstance(path, StepPath):
        return path
    if not isinstance(path, str) or path not in PATHS:
        known = ", ".join(PATHS)
        raise ConfigError(f"path is {path!r}; known paths are {known}, or give a path object")
    return PATHS[path]()


def _check_dtypes(**dtypes: object) -> None:
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise ConfigError(f"{name} is {dtype!r}; choose a floating dtype such as torch.float16")


def _check_matrix(matrix_logits: int) -> None:
    if matrix_logits < 0:
        raise ConfigError(f"matrix_logits is {matrix_logits}; it must be at least 0")


SMALL_LOGITS = 1 << 22  # below this, computing all cosines of a batch is the fastest
# On a CPU it always is, up to the memory limit: 256 MiB each for cosines, posterior, gradient.
CPU_LOGITS = 1 << 26
# Share of all classes that a row's list may hold on a CPU: above the first it loses to `chunked`,
# below the second it is tried again. Two numbers, so that a share in between changes nothing, and
# because `chunked` counts active classes, of which lists hold some more.
LISTS_LOSE = 0.2
LISTS_WIN = 0.1

# On a GPU the fastest way is chosen. Milliseconds of a step, update left out, as measured on an
# H200 (docs/benchmarks/sizes.md); on another GPU they change together, and only their ratios count.
TFLOP_PER_MS = 0.635  # of a product in half precision
FLOAT32_TFLOP_PER_MS = 0.05
GB_PER_MS = 4.0
MATRIX_MS, LISTS_MS, CHUNKED_MS, DENSE_MS = 0.35, 1.2, 1.0, 2.5  # launches, and what they wait for
FEWEST_LISTS_MS, FEWEST_CHUNKED_MS = 2.5, 6.0  # the host takes as long to launch such a step
MATRIX_BYTES = 6.0  # per cosine: one is written and read twice
LISTED_BYTES = 12.0  # per listed class and dimension: scored, pulled, and read by the update
CHUNKED_PRODUCTS, PLAIN_PRODUCTS = 9.0, 35.0  # the second above alpha 2, where kernels do less
DENSE_LOGITS = 1 << 25  # that may exist at once on a GPU: about 20 bytes each
MATRIX_LISTED = 4096  # classes of a row, on average, that lists of a matrix step hold; they end at
# twice as many, and a row with more makes the whole step slow
ROOM_TO_RETURN = 3.0  # lists hold more classes than are active, which is all that blocks count
GAIN_TO_RETURN = 1.25


class Choice(NamedTuple):
    """The name of a path and why it was chosen."""

    path: str
    reason: str
    by_matrix: bool = True  # by one matrix, if it fits: see ``heads.matrix``


def choose_path(
    *,
    alpha: float | None,
    device: str,
    num_rows: int,
    num_classes: int,
    dim: int = 512,
    class_share: float | None,
    was_chunked: bool,
    has_matrix: bool = False,
    num_ranks: int = 1,
) -> Choice:
    """Choose the path of the next step.

    Args:
        alpha: None for another divergence, or an alpha that is learned.
        device: ``"cpu"``, ``"cuda"``.
        num_rows: ``B``, of all ranks.
        num_classes: ``k``, of all ranks.
        dim: ``d``.
        class_share: Share of the classes that are, or may be, active in a row, measured in the
            last steps; None before the first.
        was_chunked: Whether the step before was chunked, or dense for the same reason.
        has_matrix: Whether the step can go by one matrix.
        num_ranks: Ranks that share the classes; a dense step would have to gather them.
    """
    num_logits = num_rows * num_classes
    is_cpu = device == "cpu"
    fits_cpu = is_cpu and num_ranks == 1 and num_logits <= CPU_LOGITS
    if alpha is None:
        return Choice("dense", "only the dense path has this divergence or a learned alpha")
    if alpha <= 1.0:
        if (num_logits < SMALL_LOGITS and device != "cuda") or fits_cpu:
            return Choice("dense", f"{num_logits:,} logits are few and alpha is {alpha:g}")
        return Choice("chunked", f"alpha is {alpha:g}: every class is active")
    if class_share is None:
        return Choice("sparse", f"alpha is {alpha:g}: few classes are active")
    share = f"{100 * class_share:.3g} % of the classes can be active in a row"
    if is_cpu:
        limit = LISTS_WIN if was_chunked else LISTS_LOSE
        if class_share <= limit:
            return Choice("sparse", f"{share}, few enough for lists")
        path = "dense" if fits_cpu else "chunked"
        return Choice(path, f"{share}, lists pay below {100 * limit:.3g} %")
    ways = ["matrix"] if has_matrix else []
    ways += ["lists", "chunked"]
    if num_ranks == 1 and num_logits <= DENSE_LOGITS:
        ways.append("dense")
    own = (num_rows, num_classes / num_ranks, dim)

    def expect(share: float) -> dict[str, float]:
        costs = gpu_costs(*own, listed=min(1.0, share) * own[1], alpha=alpha)
        return {name: costs[name] for name in ways}

    costs = expect(class_share)
    told = ", ".join(f"{ms:.2g} by {WAYS[name]}" for name, ms in costs.items() if ms < math.inf)
    reason = f"{share}; expected milliseconds: {told}"
    best = min(costs, key=costs.__getitem__)
    if was_chunked and best in SPARSE_WAYS:
        costs = expect(ROOM_TO_RETURN * class_share)
        best = min(costs, key=costs.__getitem__)
        rest = min(ms for name, ms in costs.items() if name not in SPARSE_WAYS)
        if GAIN_TO_RETURN * costs[best] > rest:
            best = min(set(ways) - set(SPARSE_WAYS), key=costs.__getitem__)
            reason += ", and lists are tried again only if clearly faster"
    return Choice("sparse" if best in SPARSE_WAYS else best, reason, best == "matrix")


SPARSE_WAYS = ("matrix", "lists")
WAYS = {"matrix": "one matrix", "lists": "lists", "chunked": "blocks", "dense": "all cosines"}


def gpu_costs(
    num_rows: int, num_classes: float, dim: int, *, listed: float, alpha: float
) -> dict[str, float]:
    """Milliseconds that a step is expected to take on one GPU, by the ways to take it.

    Args:
        num_rows: ``B``.
        num_classes: ``k``, of this GPU.
        dim: ``d``.
        listed: Classes of this GPU that a row lists, on average.
        alpha: Above one.
    """
    num_logits = num_rows * num_classes
    tflop = 2e-12 * num_logits * dim
    one_product = tflop / TFLOP_PER_MS
    lists = one_product + 1e-9 * LISTED_BYTES * num_rows * listed * dim / GB_PER_MS
    can_list = listed <= MATRIX_LISTED or num_classes <= 2 * MATRIX_LISTED
    matrix = MATRIX_MS + 1e-9 * MATRIX_BYTES * num_logits / GB_PER_MS + lists
    products = CHUNKED_PRODUCTS if alpha <= 2.0 else PLAIN_PRODUCTS
    return {
        "matrix": matrix if can_list else math.inf,
        "lists": max(FEWEST_LISTS_MS, LISTS_MS + lists),
        "chunked": max(FEWEST_CHUNKED_MS, CHUNKED_MS + products * one_product),
        "dense": DENSE_MS + 3.0 * tflop / FLOAT32_TFLOP_PER_MS,
    }
