"""Time and memory of steps on the device at hand, the rows that hold them, and a plain head."""

from __future__ import annotations

import gc
import math
import platform
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import qmargin
from benchmarks.common import current_commit
from qmargin.cli.doctor import installed_version

BURST = 4  # calls of a step in a turn on a GPU, at least
BURST_MS = 10.0  # that a turn lasts: the first of a few short steps would count as much as the rest
MOST_CALLS = 64
LONG_MS = 500.0  # of a step that is called once in a turn: launches do not show in it
WARM_TURNS = 3  # the first compiles kernels, the second may still grow the allocator's pools
FEWEST_TURNS = 3
Step = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One measurement: what it was, and what came out, or why nothing did."""

    name: str
    step: str = ""  # what was timed, such as "forward + backward"
    ms: float | None = None  # median
    ms_all: list[float] = field(default_factory=list)
    reference_ms: float | None = None  # of the reference that took turns with it, median
    ratio: float | None = None  # to that reference
    peak_gib: float | None = None
    failed: str | None = None  # why there is no number
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def once_ms(step: Step, device: torch.device, num_calls: int) -> float:
    """Milliseconds of one call, launches included.

    On a GPU, of one among ``num_calls``: as in training, a call may be launched while the device
    still works on the one before. The device is idle before the first and after the last.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        step()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(num_calls):
        step()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / num_calls


def time_turns(
    steps: Sequence[Step],
    device: torch.device,
    *,
    repeats: int,
    seconds: float,
    burst: int = BURST,
) -> list[list[float]]:
    """Milliseconds of every call of each step, all in turns, after some that warm up.

    Turns, so that a change of the clock meets all of them; in another order each time, so that none
    always follows a slow one and finds the caches cold.

    Args:
        steps: What to time.
        device: Where they run.
        repeats: Turns.
        seconds: Slow steps get fewer turns, three at least, to stay near this time.
        burst: Calls of a step in a turn on a GPU, or more where they are short; with 1, each is
            waited for.
    """
    calls, turn_ms = [1] * len(steps), 0.0
    for turn in range(WARM_TURNS):
        found = [once_ms(step, device, count) for step, count in zip(steps, calls, strict=True)]
        calls = [num_calls(ms, burst) if device.type == "cuda" else 1 for ms in found]
        turn_ms = sum(ms * count for ms, count in zip(found, calls, strict=True))
        if turn > 0 and turn_ms > 1e3 * seconds / 4:  # the first may be slow for having compiled
            break
    affordable = int(1e3 * seconds / max(turn_ms, 1e-6))
    turns = min(repeats, max(FEWEST_TURNS, affordable))
    times: list[list[float]] = [[] for _ in steps]
    order, dice = list(range(len(steps))), random.Random(0)
    for _ in range(turns):
        dice.shuffle(order)
        for number in order:
            times[number].append(once_ms(steps[number], device, calls[number]))
    return times


def num_calls(ms: float, burst: int) -> int:
    """Calls of a step of so many milliseconds in a turn.

    Examples:
        >>> num_calls(5.0, 4), num_calls(0.4, 4), num_calls(0.4, 1), num_calls(900.0, 4)
        (4, 25, 1, 1)
    """
    if burst == 1 or ms >= LONG_MS:
        return 1
    return max(burst, min(MOST_CALLS, math.ceil(BURST_MS / max(ms, 1e-6))))


def peak_gib(step: Step, device: torch.device, known_bytes: int = 0) -> float | None:
    """Most memory that a call has allocated, less what is known; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - known_bytes) / 2**30


def allocated_bytes(device: torch.device) -> int:
    """Bytes of live tensors on a GPU; zero on a CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def guarded(name: str, step: str, measure: Callable[[], Row], facts: dict[str, Any]) -> Row:
    """The measured row, or one that says what went wrong, so that the others can go on."""
    try:
        return measure()
    except Exception as error:  # whatever it is belongs in its row
        lines = str(error).splitlines() or [""]
        failed = f"{type(error).__name__}: {lines[0][:160]}"
    clean_up()  # out here the traceback, and the tensors in its frames, are gone
    return Row(name, step, failed=failed, facts=facts)


def clean_up() -> None:
    """Give back what nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def median(times: Sequence[float]) -> float:
    """Of one step's turns."""
    return statistics.median(times)


def describe_machine(device: torch.device, commit: str | None) -> dict[str, Any]:
    """What a number depends on besides the settings."""
    machine: dict[str, Any] = {
        "device": "CPU",
        "platform": platform.platform(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "qmargin": qmargin.__version__,
        "torch": torch.__version__,
        "triton": installed_version("triton"),
        "commit": commit or current_commit(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["device"] = properties.name
        machine["memory_gib"] = round(properties.total_memory / 2**30, 1)
        machine["cuda"] = torch.version.cuda
    return machine


class CommonHead(nn.Module):
    """ArcFace over all classes, or over a sample of them that has the batch's own.

    Args:
        embedding_dim: ``d``.
        num_classes: ``k``.
        scale: Of the logits.
        margin: In radians.
        rate: Share of the classes in a step.
        device: Where the prototypes live.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        scale: float = 64.0,
        margin: float = 0.5,
        rate: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.scale, self.margin, self.rate = scale, margin, rate
        self.weight = nn.Parameter(
            torch.empty(num_classes, embedding_dim, device=device).normal_(0.0, 0.01)
        )

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of embeddings ``[B, d]`` with labels ``[B]``."""
        weight: Tensor = self.weight
        if self.rate < 1.0:
            classes = self._sample(labels)
            weight, labels = weight[classes], torch.searchsorted(classes, labels)
        device_type = embeddings.device.type
        half = torch.float16 if device_type == "cuda" else torch.bfloat16
        with torch.autocast(device_type, dtype=half):
            cosines = functional.linear(
                functional.normalize(embeddings), functional.normalize(weight)
            )
        cosines = cosines.float().clamp(-1.0, 1.0)  # [B, k]
        rows = torch.arange(len(labels), device=labels.device)
        target = cosines[rows, labels]
        sine = (1.0 - target.square()).clamp_min(1e-12).sqrt()
        cosines[rows, labels] = target * math.cos(self.margin) - sine * math.sin(self.margin)
        return functional.cross_entropy(cosines * self.scale, labels)

    def _sample(self, labels: Tensor) -> Tensor:
        """Ascending classes: those of the batch first, then others at random."""
        keys = torch.rand(len(self.weight), device=labels.device)
        keys[labels] = 2.0
        num_sampled = min(len(keys), max(len(labels), int(self.rate * len(keys))))
        return keys.topk(num_sampled).indices.sort().values
