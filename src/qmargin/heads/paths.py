"""Paths: the ways to take a step, the settings of each, and the rule of ``path="auto"``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch

from qmargin.errors import ConfigError
from qmargin.losses.checks import check_number

LIST_CAPACITY = 8192  # listed groups per row, on average, above which lists lose to blocks
MATRIX_LOGITS = 1 << 29  # a gibibyte of half-precision cosines
DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


class StepPath:
    """Base of the paths: ``Auto``, ``Sparse``, ``Chunked``, ``Dense``, ``Sampled``, ``TopK``."""

    name: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Sparse(StepPath):
    """Exact lists of the classes that can be active, for ``alpha > 1``.

    Args:
        screen_dtype: Precision of the screened copy of the prototypes; by default that of the
            prototypes, and float16 for float32 prototypes on a GPU.
        chunk_dtype: Operands of a step that is redone by blocks, see ``Chunked``.
        list_capacity: Groups of 32 classes that a step may list per row, on average; above it the
            step is redone by blocks of classes.
        matrix_logits: Largest ``B * k`` for which a step on one GPU keeps all screened cosines in a
            half-precision matrix, which is faster for up to a few hundred thousand classes. 0 for
            never.
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
    """The fastest of ``Sparse``, ``Chunked`` and ``Dense`` for the loss and the support so far.

    The settings are those of ``Sparse``; ``chunk_dtype`` is that of all steps taken by blocks.
    """

    name: ClassVar[str] = "auto"


@dataclass(frozen=True, kw_only=True)
class Chunked(StepPath):
    """All classes, in blocks that are computed and discarded; any alpha.

    Args:
        dtype: Operands of the products; by default the prototypes' own precision on a CPU and that
            of the screened copy on a GPU. ``torch.float32`` gives exact products on a GPU.
        screen_dtype: Precision of the copy of the prototypes, see ``Sparse``.
        matrix_logits: Largest ``B * k`` for which a step at ``alpha = 1`` on one GPU keeps all
            posteriors in one half-precision matrix. 0 for never.
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
        """The operands' precision, by the name it has in ``Sparse``."""
        return self.dtype


@dataclass(frozen=True)
class Dense(StepPath):
    """All cosines ``[B, k]`` in plain PyTorch; any divergence, and an alpha that is learned."""

    name: ClassVar[str] = "dense"


@dataclass(frozen=True)
class Sampled(StepPath):
    """Partial FC: the classes of the batch and a random sample of the others, an estimate.

    Args:
        rate: Share of the classes that a step takes, in (0, 1].
        seed: Of the samples; the position in their sequence is part of ``state_dict()``.
    """

    name: ClassVar[str] = "sampled"
    rate: float = 0.1
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        if not 0.0 < check_number(self.rate, "rate") <= 1.0:
            raise ConfigError(f"rate is {self.rate!r}; choose a share of the classes in (0, 1]")


@dataclass(frozen=True)
class TopK(StepPath):
    """The paper's procedure: the largest K percent of the logits, bisection, a check; exact.

    Args:
        percent: Of the classes, in (0, 100]; doubled while the check fails.
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


SMALL_LOGITS = 1 << 22  # below this, all cosines of a batch cost less than going without them
# On a CPU they always do, and so many fit in memory: 256 MiB each for cosines, posterior, gradient.
CPU_LOGITS = 1 << 26
# Share of all classes that a row's list may hold: above the first it loses to `chunked`, below the
# second it is tried again. Two numbers, so that a share in between changes nothing, and because
# `chunked` counts active classes, of which lists hold some more.
LISTS_LOSE = {"cpu": 0.2, "cuda": 0.011}
LISTS_WIN = {"cpu": 0.1, "cuda": 0.0025}
# Classes in the lists of all rows together: with fewer a GPU does little but start kernels, of
# which `chunked` has more. Again two numbers.
FEW_LOSE = {"cpu": 0, "cuda": 1 << 23}
FEW_WIN = {"cpu": 0, "cuda": 1 << 22}


class Choice(NamedTuple):
    """The name of a path and why it was chosen."""

    path: str
    reason: str


def choose_path(
    *,
    alpha: float | None,
    device: str,
    num_logits: int,
    class_share: float | None,
    was_chunked: bool,
    num_ranks: int = 1,
) -> Choice:
    """Choose the path of the next step.

    Args:
        alpha: None for another divergence, or an alpha that is learned.
        device: ``"cpu"``, ``"cuda"``.
        num_logits: ``B * k``.
        class_share: Share of the classes that are, or may be, active in a row, measured in the
            last steps; None before the first.
        was_chunked: Whether the step before was chunked, or dense for the same reason.
        num_ranks: That share the classes; a dense step would have to gather them.
    """
    if alpha is None:
        return Choice("dense", "only the dense path has this divergence or a learned alpha")
    if alpha <= 1.0:
        is_small = num_logits < SMALL_LOGITS and device != "cuda"
        if is_small or _fits_cpu(device, num_logits, num_ranks):
            return Choice("dense", f"{num_logits:,} logits are few and alpha is {alpha:g}")
        return Choice("chunked", f"alpha is {alpha:g}: every class is active")
    if class_share is None:
        return Choice("sparse", f"alpha is {alpha:g}: few classes are active")
    shares, counts = (LISTS_WIN, FEW_WIN) if was_chunked else (LISTS_LOSE, FEW_LOSE)
    known = device if device in shares else "cuda"
    limit = max(shares[known], min(1.0, counts[known] / num_logits))
    share = f"{100 * class_share:.3g} % of the classes can be active in a row"
    if class_share > limit:
        path = "dense" if _fits_cpu(device, num_logits, num_ranks) else "chunked"
        return Choice(path, f"{share}, lists pay below {100 * limit:.3g} %")
    return Choice("sparse", f"{share}, few enough for lists")


def _fits_cpu(device: str, num_logits: int, num_ranks: int) -> bool:
    return device == "cpu" and num_ranks == 1 and num_logits <= CPU_LOGITS
