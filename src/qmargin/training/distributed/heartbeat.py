"""Heartbeats: every rank writes them to a shared store, and reads there who is missing.

A collective that never returns does not say which rank failed. A thread of each rank writes a beat
with the number of collectives that its main thread has entered. A rank whose beats stop is dead or
frozen; one that beats but has entered fewer collectives is the one that the others wait for.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from qmargin.errors import RankError

EXIT_RANK_LOST = 75
"""Exit status of a rank that another rank's end left hanging: the job may be started again."""

_DONE = -1
_STORE_LOST = (
    "the store of the run does not answer: rank 0 or its launcher is lost; resume from the last "
    "checkpoint"
)


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> object:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Read a value that is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value unless there is one, and read what is there now."""
        ...


@dataclass
class _Peer:
    beat: int = 0
    collectives: int = 0
    seen: float = 0.0  # when the beat last changed, on this rank's clock


def end_process(reason: str) -> None:
    """Write the reason and leave at once: the main thread waits for a rank that will not come."""
    sys.stderr.write(f"qmargin: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_RANK_LOST)


class Heartbeat:
    """Beats of this rank, and an eye on those of the others.

    Args:
        store: Shared by all ranks, and used by no other thread of this process.
        rank: This rank.
        world: Number of ranks.
        timeout_s: A rank that dies, freezes or fails is named, and this process stopped, within it.
        hosts_store: Whether the store ends with this process.
        on_lost: Called in the heartbeat's thread with the reason, when the main thread has not
            reacted by itself.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world: int,
        timeout_s: float,
        hosts_store: bool = False,
        on_lost: Callable[[str], None] = end_process,
    ) -> None:
        self._store, self._rank, self._on_lost = store, rank, on_lost
        self._hosts_store = hosts_store
        self._timeout, self.interval = timeout_s, min(timeout_s / 12, 5.0)
        self._silence = 5 * self.interval  # of a rank that a collective has already failed on
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
        """Begin to beat; every rank must do so."""
        self._forgive(time.monotonic())
        for thread in self._threads:
            thread.start()

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Around a collective of all ranks: its failure becomes an error that names a rank."""
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
        """Who is to blame for a collective that failed: looks until beats are missed, then says."""
        began = time.monotonic() if self._collective_since is None else self._collective_since
        # After a connection was closed the beats of the dead rank must first be missed; after a
        # timeout everything is known already.
        patience = 6 * self.interval if time.monotonic() - began < self._timeout / 2 else 0.0
        deadline = time.monotonic() + patience
        while True:
            self._look(missed_after=self._silence)
            if self._reason is not None:
                break
            if time.monotonic() >= deadline:
                self._reason = self._agreed(self._behind() or f"a collective failed: {error}")
                break
            time.sleep(self.interval / 2)
        return RankError(self._reason)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank stops with an error, so that they need not wait."""
        summary = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._agreed(f"rank {self._rank} stopped with {summary}")

    def close(self) -> None:
        """Stop beating; the host of the store waits until the others have read from it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=self._silence)
        self._mine.beat = _DONE
        self._look(missed_after=self._silence)
        deadline = time.monotonic() + self._silence
        while self._hosts_store and time.monotonic() < deadline and self._any_present():
            time.sleep(min(0.02, self.interval))
            self._look(missed_after=self._silence)

    def _any_present(self) -> bool:
        oldest = time.monotonic() - self._silence
        return any(peer.beat != _DONE and peer.seen > oldest for peer in self._peers.values())

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self._mine.beat += 1
            self._look(missed_after=self._timeout / 2)

    def _watch(self) -> None:
        """End a process whose main thread does not react; this thread never asks the store."""
        last = time.monotonic()
        while not self._stop.wait(self.interval):
            now = time.monotonic()
            if now - last > 3 * self.interval:  # this process was frozen: others may be fine
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
        """Exchange beats through the store, and note a reason to stop if there is one."""
        if not self._lock.acquire(timeout=self.interval):
            return  # the other thread waits for a store that does not answer
        try:
            if self._reason is not None and self._mine.beat != _DONE:
                return
            now = time.monotonic()
            try:
                self._exchange(now)
                self._store_seen = now
                reason = self._published() or self._missing(now, missed_after)
            except RuntimeError:  # all errors of stores are
                reason = _STORE_LOST if now - self._store_seen > missed_after else None
            if reason is not None and self._reason is None:
                self._reason, self._reason_since = reason, now
        finally:
            self._lock.release()

    def _exchange(self, now: float) -> None:
        self._store.set(f"beat/{self._rank}", f"{self._mine.beat} {self._mine.collectives}")
        for other, peer in self._peers.items():
            if not self._store.check([f"beat/{other}"]):
                continue
            beat, collectives = (int(part) for part in self._store.get(f"beat/{other}").split())
            if (beat, collectives) != (peer.beat, peer.collectives):
                peer.beat, peer.collectives, peer.seen = beat, collectives, now

    def _published(self) -> str | None:
        if self._store.check(["reason"]):
            return self._store.get("reason").decode()
        return None

    def _missing(self, now: float, missed_after: float) -> str | None:
        silent = {
            other: now - peer.seen
            for other, peer in self._peers.items()
            if peer.beat != _DONE and now - peer.seen > missed_after
        }
        if not silent:
            return None
        return self._agreed(
            f"{_ranks(silent)} gave no sign of life for {max(silent.values()):.1f} s: killed, "
            "frozen or cut off; resume from the last checkpoint"
        )

    def _behind(self) -> str | None:
        """Ranks that beat, but have not reached the collective that this rank waits in."""
        late = [
            other
            for other, peer in self._peers.items()
            if peer.collectives < self._mine.collectives or peer.beat == _DONE
        ]
        if not late:
            return None
        return (
            f"{_ranks(late)} did not reach collective {self._mine.collectives}: hung, gone, or "
            f"slower than the timeout of {self._timeout:g} s; raise run.timeout_s if work takes "
            "longer, or resume from the last checkpoint"
        )

    def _agreed(self, reason: str) -> str:
        """The first reason that any rank published: this one, unless another came before."""
        if time.monotonic() - self._store_seen > self._silence:
            return _STORE_LOST
        try:
            return self._store.compare_set("reason", "", reason).decode()
        except RuntimeError:
            return reason


def _ranks(ranks: dict[int, float] | list[int]) -> str:
    names = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
