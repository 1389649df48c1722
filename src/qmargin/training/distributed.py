"""The ranks of a run: devices, seeds, process groups, heartbeats, and common decisions."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from qmargin.data.order import derived_seed
from qmargin.errors import ConfigError, RankError
from qmargin.training.signals import Interrupted

T = TypeVar("T")
EXIT_RANK_LOST = 75
"""Exit status of a rank after the loss of another rank: the job may be restarted."""
DEFAULT_TIMEOUT_S = 600.0
_LONGEST_STORY = 1 << 16
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_COLLECTIVE_MARKS = ("gloo", "nccl", "connection", "timed out", "process group")
_DONE = -1
_STORE_LOST = (
    "the store of the run does not respond: rank 0 or its launcher is lost; resume from the last "
    "checkpoint"
)


@dataclass
class _Peer:
    beat: int = 0
    collectives: int = 0
    seen: float = 0.0  # when the beat last changed, on this rank's clock


def end_process(reason: str) -> None:
    """Write the reason and exit at once: the main thread waits for a lost rank."""
    sys.stderr.write(f"qmargin: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_RANK_LOST)


class Heartbeat:
    """Send heartbeats of this rank and monitor those of the others, through a shared store.

    A collective that never returns does not say which rank failed. A thread of each rank writes a
    beat with the number of collectives that its main thread has entered. A rank whose beats stop is
    dead or frozen; the others wait for a rank that beats but has entered fewer collectives. Either
    is named, and this process stopped, within ``timeout_s``.
    """

    def __init__(
        self,
        store: Any,  # a torch.distributed.Store that no other thread of this process uses
        *,
        rank: int,
        world: int,
        timeout_s: float,
        hosts_store: bool = False,  # whether the store ends with this process
        on_lost: Callable[[str], None] = end_process,  # if the main thread does not respond
    ) -> None:
        self._store, self._rank, self._on_lost = store, rank, on_lost
        self._hosts_store = hosts_store
        self._timeout, self.interval = timeout_s, min(timeout_s / 12, 5.0)
        self._silence = 5 * self.interval  # of a rank on which a collective has already failed
        self._peers = {other: _Peer() for other in range(world) if other != rank}
        self._mine = _Peer()
        self._reason: str | None = None
        self._reason_since = 0.0
        self._store_seen = 0.0
        self._collective_since: float | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"qmargin{target.__name__}", daemon=True)
            for target in (self._run, self._watch)
        ]

    def start(self) -> None:
        """Start the heartbeats; every rank must call this."""
        self._forgive(time.monotonic())
        for thread in self._threads:
            thread.start()

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Context of a collective of all ranks; its failure raises an error that names a rank."""
        self._mine.collectives += 1
        self._collective_since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise self.explain(error) from error
        finally:
            self._collective_since = None

    def explain(self, error: BaseException) -> RankError:
        """Name the rank that caused a failed collective, once its beats are missing."""
        began = time.monotonic() if self._collective_since is None else self._collective_since
        # After a closed connection, wait until the beats of the dead rank are missing; after a
        # timeout it is known already.
        patience = 6 * self.interval if time.monotonic() - began < self._timeout / 2 else 0.0
        deadline = time.monotonic() + patience
        while True:
            self._look(missed_after=self._silence)
            if self._reason is None and time.monotonic() >= deadline:
                self._reason = self._agreed(self._behind() or f"a collective failed: {error}")
            if self._reason is not None:
                return RankError(self._reason)
            time.sleep(self.interval / 2)

    def fail(self, error: BaseException) -> None:
        """Inform the others that this rank stops with an error, so that they need not wait."""
        self._agreed(f"rank {self._rank} stopped with {_summary(error)}")

    def close(self) -> None:
        """Stop beating; the host of the store waits until the others have read from it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=self._silence)
        self._mine.beat = _DONE
        self._look(missed_after=self._silence)
        began = time.monotonic()
        while self._hosts_store and (now := time.monotonic()) < began + self._silence:
            peers = self._peers.values()
            if not any(one.beat != _DONE and one.seen > now - self._silence for one in peers):
                break
            time.sleep(min(0.02, self.interval))
            self._look(missed_after=self._silence)

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self._mine.beat += 1
            self._look(missed_after=self._timeout / 2)

    def _watch(self) -> None:
        """End a process whose main thread does not respond; this thread never uses the store."""
        last = time.monotonic()
        while not self._stop.wait(self.interval):
            now = time.monotonic()
            if now - last > 3 * self.interval:  # this process was frozen, not the others
                self._forgive(now)
            last = now
            if self._reason is None and now - self._store_seen > self._timeout / 2:
                self._reason, self._reason_since = _STORE_LOST, now
            if self._reason is not None and now - self._reason_since > self._timeout / 4:
                if not self._stop.is_set():
                    self._on_lost(self._reason)
                return

    def _forgive(self, now: float) -> None:
        self._store_seen = now
        for peer in self._peers.values():
            peer.seen = now

    def _look(self, *, missed_after: float) -> None:
        """Exchange beats through the store, and record a reason to stop, if any."""
        if not self._lock.acquire(timeout=self.interval):
            return  # the other thread waits for a store that does not respond
        try:
            if self._reason is not None and self._mine.beat != _DONE:
                return
            now = time.monotonic()
            try:
                self._store.set(f"beat/{self._rank}", f"{self._mine.beat} {self._mine.collectives}")
                for other, peer in self._peers.items():
                    if not self._store.check([f"beat/{other}"]):
                        continue
                    beat, collectives = map(int, self._store.get(f"beat/{other}").split())
                    if (beat, collectives) != (peer.beat, peer.collectives):
                        peer.beat, peer.collectives, peer.seen = beat, collectives, now
                self._store_seen = now
                is_told = self._store.check(["reason"])
                told = self._store.get("reason").decode() if is_told else None
                reason = told or self._missing(now, missed_after)
            except RuntimeError:  # all errors of stores are
                reason = _STORE_LOST if now - self._store_seen > missed_after else None
            if reason is not None and self._reason is None:
                self._reason, self._reason_since = reason, now
        finally:
            self._lock.release()

    def _missing(self, now: float, missed_after: float) -> str | None:
        silent = {
            other: now - peer.seen
            for other, peer in self._peers.items()
            if peer.beat != _DONE and now - peer.seen > missed_after
        }
        if not silent:
            return None
        return self._agreed(
            f"{_ranks(silent)} sent no heartbeat for {max(silent.values()):.1f} s: killed, "
            "frozen or cut off; resume from the last checkpoint"
        )

    def _behind(self) -> str | None:
        """Ranks that beat, but have not reached the collective that this rank waits in."""
        reached = self._mine.collectives
        late = [
            other
            for other, peer in self._peers.items()
            if peer.collectives < reached or peer.beat == _DONE
        ]
        if not late:
            return None
        return (
            f"{_ranks(late)} did not reach collective {reached}: hung, lost, or slower than "
            f"{self._timeout:g} s; raise run.timeout_s, or resume from the last checkpoint"
        )

    def _agreed(self, reason: str) -> str:
        """The first reason that any rank published."""
        if time.monotonic() - self._store_seen > self._silence:
            return _STORE_LOST
        try:
            agreed: str = self._store.compare_set("reason", "", reason).decode()
        except RuntimeError:
            return reason
        return agreed


def _ranks(ranks: Collection[int]) -> str:
    names = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@dataclass(frozen=True)
class Process:
    """One rank of a run; an error in its ``with`` block is sent to the other ranks."""

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = DEFAULT_TIMEOUT_S
    control: dist.ProcessGroup | None = None  # gloo, for a few numbers on the CPU
    heartbeat: Heartbeat | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes shared files."""
        return self.rank == 0

    def collective(self) -> AbstractContextManager[None]:
        """Context of a collective on ``control``; its failure raises a ``RankError``."""
        return nullcontext() if self.heartbeat is None else self.heartbeat.collective()

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
        """Context of a whole step; a failure of any collective in it raises a ``RankError``."""
        try:
            yield
        except RuntimeError as error:
            is_marked = any(mark in str(error).lower() for mark in _COLLECTIVE_MARKS)
            is_lost = is_marked or isinstance(error, dist.DistError)
            if isinstance(error, RankError) or self.heartbeat is None or not is_lost:
                raise
            raise self.heartbeat.explain(error) from error

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.heartbeat is None:
            return
        if error is not None and not isinstance(error, RankError | SystemExit):
            self.heartbeat.fail(error)
        self.heartbeat.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def start_process_group(timeout_s: float = DEFAULT_TIMEOUT_S, *, device: str = "auto") -> Process:
    """Join the ranks that ``torchrun`` started, or run as the only rank without a process group.

    Ranks wait ``timeout_s`` for each other; it must exceed the longest time that one works alone.
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
    is_host = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = _open_store("group", timeout, is_host=is_host)
    except (RuntimeError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise RankError(f"rank {rank} cannot meet the others at {address}: {error}") from error
    store.set(f"joined/{rank}", "1")
    deadline, missing = time.monotonic() + timeout_s, list(range(world))
    while missing := [other for other in missing if not store.check([f"joined/{other}"])]:
        if time.monotonic() > deadline:
            raise RankError(
                f"{_ranks(missing)} of {world} did not join within {timeout_s:g} s; see the output "
                "there, or raise the timeout"
            )
        time.sleep(0.02)
    # Beats use a separate connection: a thread that waits in the store blocks its connection.
    beats = _open_store("heartbeat", timeout)
    heartbeat = Heartbeat(beats, rank=rank, world=world, timeout_s=timeout_s, hosts_store=is_host)
    heartbeat.start()
    with heartbeat.collective():
        backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
        control = dist.new_group(backend="gloo", timeout=timeout)
    return Process(rank, world, place, timeout_s, control, heartbeat)


def ranks_from(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """Rank, number of ranks, and rank on this machine."""
    given = [name for name in _VARIABLES if environment.get(name)]
    if not {"RANK", "WORLD_SIZE"} & set(given):
        return 0, 1, 0
    missing = [name for name in _VARIABLES if name not in given]
    if missing:
        raise ConfigError(f"{given} are set and {missing} are not; use torchrun, or unset them all")
    try:
        rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local_rank = int(environment.get("LOCAL_RANK", "0"))
    except ValueError as error:
        raise ConfigError(
            f"a rank in the environment is not a number ({error}); use torchrun"
        ) from None
    if not (0 <= rank < world and local_rank >= 0):
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {world}; ranks count from 0 below it")
    return rank, world, local_rank


def choose_device(local_rank: int, name: str = "auto") -> torch.device:
    """The GPU of this rank, or the CPU."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device is {name!r}; choose auto, cpu, cuda, or one GPU as in cuda:1")
    device = find_device(name)
    if device.type == "cpu" or device.index is not None:
        return device
    if local_rank >= (count := torch.cuda.device_count()):
        raise ConfigError(f"local rank {local_rank} has no GPU of its own; start {count} ranks")
    return torch.device("cuda", local_rank)


def find_device(name: torch.device | str) -> torch.device:
    """The device of that name; ``"auto"`` is a GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type != "cuda":
            torch.ones(1, device=device).cpu()  # meta has tensors, and no numbers in them
            return device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # by kind of device
        raise ConfigError(
            f"device {str(name)!r} cannot be used on this machine; choose auto, cpu or cuda"
        ) from error
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        found = f"{count} GPUs, counted from 0" if count else "no GPU"
        raise ConfigError(
            f"device is {str(name)!r} and torch finds {found}; choose cpu, or see `qmargin doctor`"
        )
    return device


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed the generators of Python and torch, on all devices in use."""
    value = derived_seed(seed, rank)
    random.seed(value)
    # not torch.manual_seed: for every unused kind of device, it stores each call, with
    # its stack, for later use, and this is called at every step
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


def _open_store(name: str, timeout: timedelta, *, is_host: bool = False) -> Any:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=is_host, timeout=timeout, wait_for_workers=False
    )
    # A restarted job may find the store of its last attempt, kept by torchrun.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"qmargin/{attempt}/{name}", store)  # type: ignore[attr-defined]


class RemoteTraceback(Exception):
    """Traceback of an exception on another rank; it is printed before its consequence."""

    def __str__(self) -> str:
        return "\n" + str(self.args[0])


class Verdict(NamedTuple):
    """Common state of the ranks for one step."""

    stop: int  # the signal that asked some rank to stop, or 0
    is_finite: bool  # on every rank
    num_corrupt: int  # over all ranks


def share(process: Process, numbers: Sequence[int]) -> list[list[int]]:
    """The same number of values from every rank, in one collective."""
    rows = torch.zeros(process.world, len(numbers), dtype=torch.int64)
    rows[process.rank] = torch.tensor([int(number) for number in numbers])
    gathered: list[list[int]] = process.sum_(rows).tolist()
    return gathered


def gather(process: Process, value: T) -> list[T]:
    """The JSON value of every rank, in two collectives."""
    mine = bytearray(json.dumps(value).encode())
    sizes = [row[0] for row in share(process, [len(mine)])]
    rows = torch.zeros(process.world, max(sizes), dtype=torch.uint8)
    rows[process.rank, : len(mine)] = torch.frombuffer(mine, dtype=torch.uint8)
    pairs = zip(process.sum_(rows), sizes, strict=True)
    return [json.loads(bytes(row[:size].numpy())) for row, size in pairs]


def all_agree(process: Process, flag: bool) -> bool:
    """Whether the flag is set on every rank."""
    return all(row[0] for row in share(process, [flag]))


def vote(
    process: Process,
    *,
    error: BaseException | None = None,
    stop: int = 0,
    is_finite: bool = True,
    num_corrupt: int = 0,
) -> Verdict:
    """Agree on the state of a step, in one exchange; every rank must call it.

    A rank that passes an error raises it as it is. The others raise a ``RankError`` with the error
    of the lowest such rank, and its traceback, as the cause.
    """
    rows = share(process, [error is not None, stop, is_finite, num_corrupt])
    failed = [rank for rank, row in enumerate(rows) if row[0]]
    if failed:
        story = ""
        if error is not None:
            trace = "".join(traceback.format_exception(error))
            story = f"{_summary(error)}\n{trace}"[:_LONGEST_STORY]
        stories = gather(process, story)
        if error is not None:
            raise error
        summary, _, trace = stories[failed[0]].partition("\n")
        raise RankError(f"rank {failed[0]} stopped with {summary}") from RemoteTraceback(trace)
    stops, finite, corrupt = list(zip(*rows, strict=True))[1:]
    return Verdict(max(stops), all(finite), sum(corrupt))


def run_on_all(process: Process, action: Callable[[], T]) -> T:
    """Run an action that does not wait for others on every rank; all continue, or all raise."""
    value, failure, stop = None, None, 0
    try:
        value = action()
    except Interrupted as interruption:
        stop = interruption.signal
    except Exception as error:
        failure = error
    if number := vote(process, error=failure, stop=stop).stop:
        raise Interrupted(number)
    return value  # type: ignore[return-value]
