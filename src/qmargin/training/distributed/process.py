"""This process among the ranks of a run: its device, its seeds, and the group it belongs to."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qmargin.data.order import derived_seed
from qmargin.errors import ConfigError, RankError
from qmargin.training.distributed.heartbeat import Heartbeat

DEFAULT_TIMEOUT_S = 600.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COLLECTIVE_MARKS = ("gloo", "nccl", "connection", "timed out", "process group")


@dataclass(frozen=True)
class Process:
    """One rank of a run; with one rank there is no group.

    Use it in a ``with`` block: an error that leaves the block is told to the other ranks.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = DEFAULT_TIMEOUT_S
    control: dist.ProcessGroup | None = None  # gloo, for a few numbers that never see a GPU
    heartbeat: Heartbeat | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes what is written once."""
        return self.rank == 0

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective on ``control``: its failure raises a ``RankError`` with a name."""
        if self.heartbeat is None:
            yield
            return
        with self.heartbeat.collective():
            yield

    def sum_(self, numbers: Tensor) -> Tensor:
        """Sum a tensor of a few integers on the CPU over all ranks, in place."""
        if self.control is not None:
            with self.collective():
                dist.all_reduce(numbers, group=self.control)
        elif self.world > 1:
            raise ConfigError(f"{self.world} ranks need a control group; pass one to Process")
        return numbers

    @contextmanager
    def name_lost_ranks(self) -> Iterator[None]:
        """Around a whole step: failures of any collective in it raise a ``RankError``."""
        try:
            yield
        except RuntimeError as error:
            is_named = isinstance(error, RankError) or self.heartbeat is None
            if is_named or not is_collective_failure(error):
                raise
            assert self.heartbeat is not None
            raise self.heartbeat.explain(error) from error

    def close(self, error: BaseException | None = None) -> None:
        """Leave the group; with an error, tell the other ranks why."""
        if self.heartbeat is None:
            return
        if error is not None and not isinstance(error, RankError | SystemExit):
            self.heartbeat.fail(error)
        self.heartbeat.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)


def is_collective_failure(error: BaseException) -> bool:
    """Whether an error comes from ranks talking, as far as its type and text tell.

    Examples:
        >>> is_collective_failure(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed"))
        True
        >>> is_collective_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(mark in text for mark in _COLLECTIVE_MARKS)


def start_process_group(timeout_s: float = DEFAULT_TIMEOUT_S, *, device: str = "auto") -> Process:
    """Join the ranks that ``torchrun`` started, or be the only one.

    Ranks meet through the variables that ``torchrun`` sets (``RANK``, ``WORLD_SIZE``,
    ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``). Without them, or with a world of one, there
    is no process group.

    Args:
        timeout_s: Longest time that ranks wait for each other: for a rank that never joins, that
            dies, or that hangs. It must exceed the longest time that one rank works alone.
        device: ``"cpu"``, ``"cuda"``, one GPU as in ``"cuda:1"``, or ``"auto"`` for a GPU where
            there is one.

    Raises:
        RankError: Not all ranks joined in time; the message names those that did not.

    Examples:
        >>> with start_process_group(device="cpu") as process:
        ...     process.rank, process.world, str(process.device)
        (0, 1, 'cpu')
    """
    if not 0.0 < timeout_s < float("inf"):
        raise ConfigError(f"timeout_s is {timeout_s}; give a positive number of seconds")
    rank, world, local_rank = ranks_from(os.environ)
    place = choose_device(local_rank, device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    if world == 1:
        return Process(device=place, timeout_s=timeout_s)
    timeout = timedelta(seconds=timeout_s)
    store = _connected(rank, world, timeout)
    _join(store, rank=rank, world=world, timeout_s=timeout_s)
    # Beats have a connection of their own: a thread that waits in the store blocks its connection.
    heartbeat = Heartbeat(
        _prefixed("heartbeat", _client(timeout)),
        rank=rank,
        world=world,
        timeout_s=timeout_s,
        hosts_store=_hosts_store(rank),
    )
    heartbeat.start()
    with heartbeat.collective():
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    return Process(rank, world, local_rank, place, timeout_s, control, heartbeat)


def ranks_from(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of ranks, and rank on this machine.

    Examples:
        >>> ranks_from({})
        (0, 1, 0)
    """
    given = [name for name in _VARIABLES if environment.get(name)]
    if not {"RANK", "WORLD_SIZE"} & set(given):
        return 0, 1, 0
    missing = [name for name in _VARIABLES if name not in given]
    if missing:
        raise ConfigError(
            f"{', '.join(given)} are set and {', '.join(missing)} are not; start ranks with "
            "torchrun, or unset them all for one process"
        )
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", "0"))
    except ValueError as error:
        raise ConfigError(
            f"a rank in the environment is no number ({error}); use torchrun"
        ) from None
    if not (0 <= rank < world and local_rank >= 0):
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world}; ranks count from 0 below it")
    return rank, world, local_rank


def choose_device(local_rank: int, name: str = "auto") -> torch.device:
    """The GPU of this rank, or the CPU.

    Examples:
        >>> choose_device(3, "cpu")
        device(type='cpu')
    """
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device is {name!r}; choose auto, cpu, cuda, or one GPU as in cuda:1")
    device = find_device(name)
    if device.type == "cpu" or device.index is not None:
        return device
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: there are "
            f"{torch.cuda.device_count()}; start at most that many ranks per machine"
        )
    return torch.device("cuda", local_rank)


def find_device(name: torch.device | str) -> torch.device:
    """The device of that name, ``"auto"`` being a GPU where there is one.

    Raises:
        ConfigError: torch knows no such device, or cannot use it on this machine.

    Examples:
        >>> find_device("cpu")
        device(type='cpu')
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.ones(1, device=device).cpu()  # meta has tensors, and no numbers in them
            return device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # by kind of device
        raise ConfigError(
            f"device {str(name)!r} cannot be used on this machine; choose auto, cpu, cuda, or one "
            "GPU as in cuda:1"
        ) from error
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device is {str(name)!r} and torch finds no GPU; choose cpu, or run `qmargin doctor` "
            "to see why"
        )
    if (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {str(name)!r} and there are {torch.cuda.device_count()} GPUs, which count "
            "from 0; choose one of them"
        )
    return device


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed the generators of Python and torch, on all devices in use.

    Ranks that must draw the same numbers, as when weights are made, pass the same rank; ranks that
    must not, as in dropout, pass their own.
    """
    value = derived_seed(seed, rank)
    random.seed(value)
    # not torch.manual_seed: for every kind of device that was never used, it keeps each call, with
    # its stack, for the day that it might be, and this is called at every step
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def _hosts_store(rank: int) -> bool:
    """Whether a rank keeps the store itself: rank 0, unless torchrun does it."""
    return rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def _client(timeout: timedelta, *, is_host: bool = False) -> Any:
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=is_host, timeout=timeout, wait_for_workers=False
    )


def _prefixed(name: str, store: Any) -> Any:
    # A restarted job may meet the store of its last attempt, kept by torchrun.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"qmargin/{attempt}/{name}"
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def _connected(rank: int, world: int, timeout: timedelta) -> Any:
    try:
        return _prefixed("group", _client(timeout, is_host=_hosts_store(rank)))
    except (RuntimeError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        who = "rank 0" if _hosts_store(0) else "the launcher"
        raise RankError(
            f"rank {rank} of {world} cannot meet the others at {place}, kept by {who}: {error}"
        ) from error


def _join(store: Any, *, rank: int, world: int, timeout_s: float) -> None:
    """Wait until every rank has said that it is here."""
    store.set(f"joined/{rank}", "1")
    deadline = time.monotonic() + timeout_s
    missing = list(range(world))
    while missing := [other for other in missing if not store.check([f"joined/{other}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(str(other) for other in missing)
            raise RankError(
                f"rank {names} of {world} did not join within {timeout_s:g} s; see that rank's "
                "own output, or raise the timeout"
            )
        time.sleep(0.02)
