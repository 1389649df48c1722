"""A cost model of the sharded head: shard times, collectives, candidates, memory.

Everything is in milliseconds and bytes. Nothing here imports torch: times come from
``scaling_measure``, and the page from ``scaling``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from scipy.special import betaincinv

from qmargin.errors import ConfigError

Floats = NDArray[np.float64]
PATHS = ("sparse", "chunked")
STAGES = ("forward + backward", "step", "screen")  # a step has the update as well
FLOAT, DOUBLE, INTEGER, FLAG, HALF = 4, 8, 8, 4, 2  # bytes
GROUP = 32  # classes that are listed together


class Shape(NamedTuple):
    """Sizes of a step as one rank sees it."""

    rows: int  # of the batch of all ranks
    classes: int  # in the shard
    dim: int
    own: float = 0.0  # candidates of all rows on this rank
    merged: float = 0.0  # of all rows and ranks


# What the device's time is made of, in work per step.
WORK: dict[str, Callable[[Shape], float]] = {
    "product of rows and prototypes": lambda s: float(s.rows) * s.classes * s.dim,
    "sweep over prototypes": lambda s: float(s.classes) * s.dim,
    "rows": lambda s: float(s.rows) * s.dim,
    "own candidates": lambda s: s.own * s.dim,
    "candidates of all ranks": lambda s: s.merged,
}
TERMS = {
    ("sparse", "forward + backward"): tuple(WORK),
    ("sparse", "step"): tuple(WORK),
    ("sparse", "screen"): tuple(WORK)[:2],
    ("chunked", "forward + backward"): tuple(WORK)[:3],
    ("chunked", "step"): tuple(WORK)[:3],
}


class Point(NamedTuple):
    """A measured time of a shard."""

    path: str
    stage: str
    shape: Shape
    ms: float


def read_points(rows: Iterable[dict[str, Any]]) -> list[Point]:
    """Measured times from their form in a JSON file.

    Raises:
        ConfigError: A row lacks a field, or has a path, stage or number that cannot be used.
    """
    found = []
    for row in rows:
        try:
            shape = Shape(**{name: row[name] for name in Shape._fields})
            point = Point(str(row["path"]), str(row["stage"]), shape, float(row["ms"]))
        except KeyError as error:
            raise ConfigError(f"a measured time has no field {error}: {row}") from None
        if (point.path, point.stage) not in TERMS:
            raise ConfigError(f"no stage {point.stage!r} of the path {point.path!r} is modelled")
        if min(*shape[:3]) < 1 or min(shape) < 0 or not 0.0 < point.ms < math.inf:
            raise ConfigError(f"sizes and times must be positive, and this is not: {row}")
        found.append(point)
    return found


OVERLAPS = (1.0, 2.0, 4.0, 16.0)  # see Curve


@dataclass(frozen=True)
class Curve:
    """Time of one stage: the host's constant part and the device's work.

    ``(host^p + device^p)^(1/p)``: they add up for ``p = 1``, and for a large ``p`` the longer of
    the two hides the other, as on a GPU whose host runs ahead.
    """

    host: float  # ms
    overlap: float  # p
    rates: dict[str, float]  # ms for a unit of each work
    errors: tuple[float, ...] = ()  # of the fit, relative, point by point

    def __call__(self, shape: Shape) -> float:
        """Milliseconds."""
        device = sum(rate * WORK[name](shape) for name, rate in self.rates.items())
        power = self.overlap
        return float((self.host**power + device**power) ** (1.0 / power))


def fit_curve(points: Sequence[Point], overlaps: Sequence[float] = OVERLAPS) -> Curve:
    """The curve with the smallest relative errors, no coefficient below zero.

    Args:
        points: Of one stage of one path.
        overlaps: That host and device may have; 1 where they are the same.

    Raises:
        ConfigError: There are no points, or they belong to different stages.
    """
    kinds = {(point.path, point.stage) for point in points}
    if len(kinds) != 1:
        raise ConfigError(f"one stage of one path is fitted at a time; these are {sorted(kinds)}")
    names = TERMS[kinds.pop()]
    times = np.array([point.ms for point in points])
    work = np.array([[WORK[name](point.shape) for name in names] for point in points])
    scales = np.maximum(work.max(0), 1.0)

    def fit(host: float, overlap: float) -> Curve:
        device = np.maximum(times**overlap - host**overlap, 0.0) ** (1.0 / overlap)
        rates, _ = nnls(work / scales / times[:, None], device / times)
        curve = Curve(host, overlap, dict(zip(names, (rates / scales).tolist(), strict=True)))
        errors = np.array([curve(point.shape) for point in points]) / times - 1.0
        return replace(curve, errors=tuple(errors.tolist()))

    def square_error(curve: Curve) -> float:
        return sum(error * error for error in curve.errors)

    hosts, step = np.linspace(0.0, times.min(), 33, retstep=True)
    best = min((fit(host, p) for p in overlaps for host in hosts.tolist()), key=square_error)
    nearer = np.clip(best.host + np.linspace(-step, step, 33), 0.0, times.min())
    return min((fit(host, best.overlap) for host in nearer.tolist()), key=square_error)


@dataclass(frozen=True)
class ShardTimes:
    """Fitted curves of the stages, and the sizes between which they were measured."""

    curves: dict[tuple[str, str], Curve]
    rows: tuple[int, int]
    classes: tuple[int, int]

    @classmethod
    def fit(cls, points: Sequence[Point], overlaps: Sequence[float] = OVERLAPS) -> ShardTimes:
        """Fit every stage that has points."""
        if not points:
            raise ConfigError("there are no measured times; make some with --measure --json FILE")
        kinds = dict.fromkeys((point.path, point.stage) for point in points)
        curves = {
            kind: fit_curve([one for one in points if (one.path, one.stage) == kind], overlaps)
            for kind in kinds
        }
        rows, classes = (
            [getattr(point.shape, name) for point in points] for name in ("rows", "classes")
        )
        return cls(curves, (min(rows), max(rows)), (min(classes), max(classes)))

    def ms(self, path: str, stage: str, shape: Shape) -> float:
        """Time of a stage."""
        if (path, stage) not in self.curves:
            raise ConfigError(f"the measured times have no stage {stage!r} of the path {path!r}")
        return self.curves[path, stage](shape)

    def covers(self, shape: Shape) -> bool:
        """Whether a shape lies between the measured ones."""
        pairs = ((shape.rows, self.rows), (shape.classes, self.classes))
        return all(low <= size <= high for size, (low, high) in pairs)


class Collective(NamedTuple):
    """One call of all ranks."""

    kind: str  # all_gather, all_reduce or reduce_scatter
    num_bytes: int  # that a rank hands over
    what: str = ""


NEWTON_STEPS = 40  # more than a root needs
BOUND_STEPS = 2  # of the sparse head, see ``qmargin.heads.sparse.tighten_pairs``


def list_collectives(
    path: str,
    alpha: float,
    *,
    ranks: int,
    rows: int,
    dim: int,
    candidates: int = 0,
    passes: int = 0,
    backend: str = "nccl",
    has_kernels: bool = True,
) -> list[Collective]:
    """What a step of forward, backward and update exchanges, in order.

    Args:
        path: ``"sparse"`` or ``"chunked"``.
        alpha: Of the loss.
        ranks: That share the classes.
        rows: Of each rank; all ranks know that.
        dim: Of the embeddings.
        candidates: Of all rows on the rank that has most, for ``"sparse"``.
        passes: Over the classes until the root is found, for ``"chunked"`` above ``alpha = 1``.
        backend: ``"nccl"`` scatters the sum of the gradient, ``"gloo"`` reduces all of it.
        has_kernels: Whether blocks are made by the kernels for GPUs, which ask once more.
    """
    _check_sizes(path, ranks, rows, dim)
    if ranks == 1:
        return []
    batch = ranks * rows

    def gather(num_bytes: int, what: str) -> Collective:
        return Collective("all_gather", num_bytes, what)

    def reduce(num_bytes: int, what: str) -> Collective:
        return Collective("all_reduce", num_bytes, what)

    found = [gather(rows * dim * FLOAT, "embeddings"), gather(rows * INTEGER, "labels")]
    if path == "chunked" and alpha == 1.0 and has_kernels:
        found.append(reduce(FLAG, "whether a guess was too low"))
    found.append(reduce(batch * FLOAT, "cosines of the targets"))
    if path == "sparse":
        found += [reduce(batch * DOUBLE, "floor"), gather(2 * INTEGER, "lengths of lists")]
        if alpha <= 2.0:
            found += [reduce(2 * batch * DOUBLE, "mass and slope at the floor")] * BOUND_STEPS
        found.append(gather(INTEGER, "numbers of candidates"))
        if candidates:
            found.append(gather(candidates * INTEGER, "rows of the candidates"))
            found.append(gather(candidates * FLOAT, "scores of the candidates"))
    elif alpha == 1.0:
        found += [reduce(batch * FLOAT, "largest cosines"), reduce(batch * DOUBLE, "masses")]
    else:
        found += [reduce(batch * DOUBLE, "where to begin")] * 3
        found += [reduce(2 * batch * DOUBLE, "mass and slope")] * passes
        found += [reduce(3 * batch * DOUBLE, "sums"), reduce(DOUBLE, "active classes")]
    kind = "reduce_scatter" if backend == "nccl" else "all_reduce"
    found.append(Collective(kind, batch * dim * FLOAT, "gradient of the embeddings"))
    found.append(reduce(FLAG, "whether the gradient is finite"))
    return found


def _check_sizes(path: str, ranks: int, rows: int, dim: int) -> None:
    if path not in PATHS:
        raise ConfigError(f"no path {path!r} is modelled; known are {', '.join(PATHS)}")
    for name, value in (("ranks", ranks), ("rows", rows), ("dim", dim)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")


class Source(NamedTuple):
    """Where a number of the model comes from."""

    meaning: str
    unit: str
    origin: str


TUNING = "tuning model of NCCL (src/graph/tuning.cc, 01afd20)"
SOURCES = {
    "node": Source("GPUs in a node", "", "assumption"),
    "nvlink": Source("NVLink of a GPU, one direction", "GB/s", "datasheet, H200 (900 both)"),
    "nic": Source("network of a GPU", "GB/s", "datasheet, 400 Gbit/s InfiniBand for each"),
    "efficiency": Source("share of both that a large message reaches", "", "assumption"),
    "ring_base": Source("ring, start, small messages (LL)", "us", TUNING),
    "ring_nvlink": Source("ring, hop within a node, LL", "us", TUNING),
    "ring_network": Source("ring, hop between nodes, LL", "us", TUNING),
    "large_base": Source("ring, start, large messages (Simple)", "us", TUNING),
    "large_nvlink": Source("ring, hop within a node, Simple", "us", TUNING),
    "large_network": Source("ring, hop between nodes, Simple", "us", TUNING),
    "tree_base": Source("tree, start, LL", "us", TUNING),
    "tree_nvlink": Source("tree, hop within a node, LL", "us", TUNING),
    "tree_network": Source("tree, level between nodes, LL", "us", TUNING),
    "crowded": Source("factor of hops within a node, LL, where there are several", "", TUNING),
    "small_share": Source("share of the bandwidth that LL reaches", "", TUNING),
    "call": Source("host, for each call", "us", "assumption"),
}  # fmt: skip


@dataclass(frozen=True)
class Network:
    """GPUs in nodes: NVLink within, one network adapter for each GPU between.

    A ring has a hop for each rank, of which one for each node is between nodes; its bandwidth is
    the smaller of a GPU's NVLink and a node's adapters. Of the algorithms that NCCL has, the
    fastest is taken.
    """

    node: int = 8
    nvlink: float = 450.0
    nic: float = 50.0
    efficiency: float = 0.8
    ring_base: float = 3.6
    ring_nvlink: float = 0.47
    ring_network: float = 2.7
    large_base: float = 8.4
    large_nvlink: float = 3.4
    large_network: float = 9.6
    tree_base: float = 4.4
    tree_nvlink: float = 0.52
    tree_network: float = 5.0
    crowded: float = 1.8
    small_share: float = 0.25
    call: float = 20.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            is_rate = one.name in ("node", "nvlink", "nic", "efficiency", "small_share")
            if not (value > 0 if is_rate else value >= 0) or value == math.inf:
                limit = "above 0" if is_rate else "at least 0"
                raise ConfigError(f"{one.name} is {value}; it must be finite and {limit}")

    def num_nodes(self, ranks: int) -> int:
        """Nodes of some ranks.

        Raises:
            ConfigError: They fill no whole number of nodes.
        """
        if ranks < 1:
            raise ConfigError(f"ranks is {ranks}; it must be at least 1")
        if ranks > self.node and ranks % self.node:
            raise ConfigError(
                f"{ranks} ranks do not fill nodes of {self.node}; take a multiple of {self.node}, "
                f"or at most {self.node}"
            )
        return max(1, ranks // self.node)

    def ms(self, call: Collective, ranks: int) -> float:
        """Time of a collective."""
        nodes = self.num_nodes(ranks)
        if ranks == 1:
            return 0.0
        rounds = 2 if call.kind == "all_reduce" else 1
        share = 1.0 if call.kind == "all_gather" else 1.0 / ranks  # of the bytes, for each hop
        hops, between = rounds * (ranks - 1), rounds * (nodes - 1)
        bandwidth = self.efficiency * (
            self.nvlink if nodes == 1 else min(self.nvlink, min(self.node, ranks) * self.nic)
        )
        crowded = self.crowded if nodes > 1 else 1.0
        sent = hops * share * call.num_bytes / bandwidth / 1e3  # us, for GB/s
        within = (hops - between) * self.ring_nvlink * crowded
        times = [
            self.ring_base + within + between * self.ring_network + sent / self.small_share,
            self.large_base
            + (hops - between) * self.large_nvlink
            + between * self.large_network
            + sent,
        ]
        if call.kind == "all_reduce":
            depth = (ranks // nodes - 1) * self.tree_nvlink * crowded
            depth += math.log2(nodes) * self.tree_network
            sent = 2.0 * call.num_bytes / bandwidth / 1e3
            times.append(self.tree_base + 2.0 * depth + sent / self.small_share)
        return (min(times) + self.call) / 1e3


@dataclass(frozen=True)
class Calibrated:
    """Collectives as they were measured on some number of ranks: a start and a rate."""

    ranks: int
    lines: dict[str, tuple[float, float]]  # by kind: ms, and ms for each byte handed over

    @classmethod
    def fit(cls, ranks: int, times: dict[str, list[tuple[int, float]]]) -> Calibrated:
        """Lines through measured bytes and milliseconds, by relative errors."""
        lines = {}
        for kind, pairs in times.items():
            sizes, ms = np.array(pairs, float).T
            scale = max(1.0, float(sizes.max()))
            terms = np.stack([np.ones_like(sizes), sizes / scale], 1) / ms[:, None]
            (start, rate), _ = nnls(terms, np.ones_like(ms))
            lines[kind] = (float(start), float(rate) / scale)
        return cls(ranks, lines)

    def ms(self, call: Collective, ranks: int) -> float:
        """Time of a collective."""
        if ranks == 1:
            return 0.0
        if ranks != self.ranks or call.kind not in self.lines:
            raise ConfigError(f"{call.kind} was not measured on {ranks} ranks")
        start, rate = self.lines[call.kind]
        return start + rate * call.num_bytes


@dataclass(frozen=True)
class Setting:
    """A loss, and the cosines of rows with their own classes."""

    alpha: float = 1.25
    scale: float = 35.0
    margin: float = 0.2
    cosines: tuple[float, float] = (0.3, 0.7)  # evenly between


@cache
def simulate_candidates(
    num_classes: int,
    ranks: int,
    dim: int,
    setting: Setting,
    *,
    rows: int = 32,
    steps: int = BOUND_STEPS,
    seed: int = 0,
) -> float:
    """Candidates of a row over all ranks, mean over rows, for classes unrelated to the row.

    The largest of ``k`` cosines with random directions are drawn and dealt to groups and ranks;
    every rank bounds the support by its own groups, and steps of Newton over all ranks raise the
    largest of these bounds, as in the head.

    Examples:
        >>> few = simulate_candidates(2_000_000, 8, 512, Setting())
        >>> 450 < few < 650 and simulate_candidates(2_000_000, 8, 512, Setting(), steps=0) > 3 * few
        True
    """
    b = setting.alpha - 1.0
    if not 0.0 < b <= 1.0:
        raise ConfigError(f"alpha is {setting.alpha:g}; candidates are simulated above 1, up to 2")
    _check_sizes("sparse", ranks, rows, dim)
    counts = [
        _draw_candidates((seed, row), num_classes, ranks, dim, setting, steps)
        for row in range(rows)
    ]
    return float(np.mean(counts))


@cache
def _tail(dim: int) -> tuple[Floats, Floats]:
    """Logarithms of probabilities, and the cosines that a random direction exceeds with them."""
    logs = np.linspace(math.log(1e-14), math.log(0.5), 1 << 14)
    # Above c lies half of the probability that 1 - c^2, which is Beta((d - 1) / 2, 1 / 2), is less.
    return logs, np.sqrt(1.0 - betaincinv((dim - 1) / 2.0, 0.5, 2.0 * np.exp(logs)))


def _draw_candidates(
    seed: tuple[int, int],
    num_classes: int,
    ranks: int,
    dim: int,
    setting: Setting,
    steps: int,
) -> int:
    """Candidates of one row over all ranks."""
    b, target = setting.alpha - 1.0, float(np.random.default_rng(seed).uniform(*setting.cosines))
    rate, num_groups = b * setting.scale, -(-num_classes // GROUP)
    weight = math.exp(-setting.scale * setting.margin)

    def raised(floor: Floats, maxima: Floats, owner: NDArray[np.int64]) -> Floats:
        """One step of Newton on ``mass^b``, for each owner of maxima."""
        heights = np.maximum(rate * (maxima - floor[owner]), 0.0)
        own = np.maximum(rate * (target - floor), 0.0)
        mass, slope = (
            np.bincount(owner, np.where(heights > 0, heights**power, 0.0), len(floor))
            + weight * np.where(own > 0, own**power, 0.0)
            for power in (1.0 / b, 1.0 / b - 1.0)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            change = (mass - mass ** (1.0 - b)) / (rate * slope)
        return np.where(change > 0.0, floor + change, floor)

    half = max(1, num_classes // 2)  # others have cosines below zero
    count = min(half, 1 << 12)
    while True:
        gaps = np.random.default_rng((*seed, 0)).exponential(size=count)  # more have these first
        drawn = np.cumsum(gaps) / num_classes
        cosines = np.interp(np.log(drawn), *_tail(dim))
        groups = np.random.default_rng((*seed, 1)).integers(num_groups, size=count)
        _, first = np.unique(groups, return_index=True)  # cosines fall: the group's maximum
        maxima, owner = cosines[first], groups[first] * ranks // num_groups
        floors = np.full(ranks, -1.0)
        np.maximum.at(floors, owner, maxima)
        floors -= 1.0 / rate  # the largest cosine alone has a posterior of one
        for _ in range(NEWTON_STEPS):
            floors = raised(floors, maxima, owner)
        floor = floors.max(keepdims=True)
        is_enough = count == half or floor[0] > cosines[-1]
        for _ in range(steps):
            floor = raised(floor, maxima, np.zeros_like(owner))
        if is_enough:
            return int((cosines > floor[0]).sum())
        count = min(half, 4 * count)


@dataclass(frozen=True)
class Prediction:
    """A step of the head on some ranks."""

    path: str
    ranks: int
    num_classes: int
    shape: Shape
    compute_ms: float
    calls: list[tuple[Collective, float]]  # with milliseconds
    screen_ms: float | None
    is_covered: bool  # whether the shard lies between measured ones

    @property
    def collectives_ms(self) -> float:
        """All collectives, one after the other."""
        return sum(ms for _, ms in self.calls)

    @property
    def ms(self) -> float:
        """Of a step."""
        return self.compute_ms + self.collectives_ms

    @property
    def memory_bytes(self) -> float:
        """Prototypes, momentum, screened copy and what a step holds at once, roughly."""
        rows, classes, dim, own, merged = self.shape
        prototypes = classes * dim * (2 * FLOAT + HALF) + classes * FLOAT
        batch = rows * dim * (6 * FLOAT + HALF)  # gathered, unit, rounded, targets, pull, gradient
        if self.path == "chunked":
            return prototypes + batch + (1 << 27) * 2 * HALF  # blocks of logits, see FUSED_LOGITS
        lists = rows * classes / GROUP * FLOAT + own * 5 * FLOAT + merged * 6 * INTEGER
        return prototypes + batch + lists

    def gather_ms(self) -> float:
        """Of the embeddings alone."""
        return sum(ms for call, ms in self.calls if call.what == "embeddings")


def predict(
    times: ShardTimes,
    network: Network | Calibrated,
    path: str,
    *,
    ranks: int,
    num_classes: int,
    rows: int,
    dim: int,
    setting: Setting,
    backend: str = "nccl",
) -> Prediction:
    """A step with ``rows`` on each of some ranks.

    Raises:
        ConfigError: Sizes below one, or ranks that fill no whole number of nodes.
    """
    _check_sizes(path, ranks, rows, dim)
    if num_classes < ranks:
        raise ConfigError(f"{num_classes} classes are fewer than {ranks} ranks")
    classes, batch, merged = -(-num_classes // ranks), ranks * rows, 0.0
    if path == "sparse":
        merged = batch * simulate_candidates(num_classes, ranks, dim, setting)
    shape = Shape(batch, classes, dim, merged / ranks, merged)
    calls = list_collectives(
        path,
        setting.alpha if path == "sparse" else 1.0,
        ranks=ranks,
        rows=rows,
        dim=dim,
        candidates=round(shape.own),
        backend=backend,
        has_kernels=backend == "nccl",
    )
    has_screen = (path, "screen") in times.curves
    return Prediction(
        path,
        ranks,
        num_classes,
        shape,
        times.ms(path, "step", shape),
        [(call, network.ms(call, ranks)) for call in calls],
        times.ms(path, "screen", shape) if has_screen else None,
        times.covers(shape),
    )


class Overlap(NamedTuple):
    """What hiding the gather of embeddings behind the screen could save, in shares of a step."""

    most: float  # all of the gather, or all of the screen
    own_first: float  # a rank's own rows are screened while the others' arrive


def overlap(times: ShardTimes, found: Prediction) -> Overlap:
    """What a sparse step would save."""
    shape, gather = found.shape, found.gather_ms()
    own = shape._replace(rows=shape.rows // found.ranks)
    rest = shape._replace(rows=shape.rows - own.rows)
    whole, first, second = (
        times.ms("sparse", "screen", part) if part.rows else 0.0 for part in (shape, own, rest)
    )
    hidden = min(gather, first) - max(0.0, first + second - whole)  # two products cost more
    return Overlap(min(gather, whole) / found.ms, max(0.0, hidden) / found.ms)
