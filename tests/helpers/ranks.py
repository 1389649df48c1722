"""Several ranks as separate processes, each of which a test can signal, kill and ask how it ended.

The test keeps the store, as torchrun does: no port can be taken in between, and the store outlives
every rank. Without a launcher rank 0 keeps it.
"""

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from helpers.processes import Script

PROLOGUE = """
import os, signal, sys, time
import torch
torch.set_num_threads(1)
from qmargin.training.distributed import start_process_group
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def say(*words):
    print(*words, flush=True)
"""


@dataclass
class Rank:
    process: Script
    folder: Path
    rank: int
    started: float = field(default_factory=time.monotonic)

    def output(self) -> str:
        return (self.folder / f"{self.rank}.out").read_text()

    def errors(self) -> str:
        return (self.folder / f"{self.rank}.err").read_text()

    def wait(self, timeout: float = 60.0) -> int:
        return self.process.wait(timeout)

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Wait until the rank has said something, and fail with its errors if it never does."""
        deadline = time.monotonic() + timeout
        while text not in self.output():
            ended = self.process.poll() is not None and text not in self.output()
            assert not ended and time.monotonic() < deadline, (
                f"rank {self.rank} never said {text!r}: {self.output()}\n{self.errors()}"
            )
            time.sleep(0.02)


def environment(rank: int, world: int, port: int, *, launcher: bool) -> dict[str, str]:
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    return {
        **{name: str(value) for name, value in ranks.items()},
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": str(launcher),
        "GLOO_SOCKET_IFNAME": "lo",
    }


@contextmanager
def ranks_running(script: str, world: int, *, launcher: bool = True) -> Iterator[list[Rank]]:
    """Start ``world`` processes that run a script after ``PROLOGUE``; none survives the block."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not launcher:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder, ranks = Path(name), []
        try:
            for rank in range(world):
                paths = (folder / f"{rank}.out", folder / f"{rank}.err")
                variables = environment(rank, world, port, launcher=launcher)
                process = Script(PROLOGUE + script, *paths, variables)
                ranks.append(Rank(process, folder, rank))
            yield ranks
        finally:
            for rank in ranks:
                rank.process.kill()
                rank.process.wait()


def run_ranks(script: str, world: int, timeout: float = 60.0) -> list[str]:
    """What each rank said, once all have ended well."""
    with ranks_running(script, world) as ranks:
        for rank in ranks:
            assert rank.wait(timeout) == 0, f"rank {rank.rank}: {rank.errors()}"
        return [rank.output() for rank in ranks]
