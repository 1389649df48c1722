"""Ranks: who joins, who is lost, and how fast the others know."""

import signal
import time

import pytest
import torch

from helpers.ranks import ranks_running, run_ranks
from qmargin.errors import ConfigError
from qmargin.training.distributed import (
    EXIT_RANK_LOST,
    Heartbeat,
    Process,
    choose_device,
    ranks_from,
    seed_everything,
    start_process_group,
)

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BUSY = 10  # seconds more, for machines that do much else
MEET_FOR_EVER = """
from qmargin.training.distributed import all_agree
with start_process_group({timeout}, device="cpu") as process:
    for turn in range(10**9):
        {before}
        all_agree(process, True)
        if turn == 3:
            say("ready")
"""


def test_ranks_come_from_the_environment_of_torchrun() -> None:
    assert ranks_from({**TORCHRUN, "LOCAL_RANK": "1"}) == (2, 4, 1)
    assert ranks_from({"MASTER_ADDR": "somewhere"}) == (0, 1, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"MASTER_PORT": ""}, "MASTER_PORT are not"),
        ({"RANK": "4"}, "RANK is 4 and WORLD_SIZE 4"),
        ({"RANK": "two"}, "is no number"),
    ],
)
def test_a_half_set_environment_is_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ranks_from({**TORCHRUN, **changes})


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with start_process_group(device="cpu") as process:
        assert process.control is None
        assert process.is_first
    assert not torch.distributed.is_initialized()


def test_devices_and_timeouts_are_checked() -> None:
    with pytest.raises(ConfigError, match="choose auto, cpu, cuda, or one GPU"):
        choose_device(0, "tpu")
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        start_process_group(0.0)


def test_seeds_depend_on_seed_and_rank() -> None:
    draws = []
    for seed, rank in [(0, 0), (0, 0), (0, 1), (1, 0)]:
        seed_everything(seed, rank=rank)
        draws.append(float(torch.rand(())))
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


@pytest.mark.gpu
def test_seeds_reach_a_gpu() -> None:
    torch.cuda.init()  # as in any training: a GPU that is not in use is not seeded
    draws = []
    for seed in (3, 4, 3):
        seed_everything(seed)
        draws.append(float(torch.rand((), device="cuda")))
    assert draws[0] == draws[2] != draws[1]


def test_seeding_keeps_nothing() -> None:
    """Of every call for a device that was never used, torch would keep the stack."""
    modules = (torch.cuda, torch.xpu, torch.mtia)
    kept = [module._queued_calls for module in modules if hasattr(module, "_queued_calls")]
    before = [len(calls) for calls in kept]
    for seed in range(3):
        seed_everything(seed)
    assert [len(calls) for calls in kept] == before


def test_only_failures_of_collectives_are_blamed_on_ranks() -> None:
    with pytest.raises(RuntimeError, match="shapes"), Process().name_lost_ranks():
        raise RuntimeError("shapes cannot be multiplied")


@pytest.mark.dist
def test_three_ranks_meet_and_part() -> None:
    script = """
with start_process_group(60, device="cpu") as process:
    from qmargin.training.distributed import share
    say(process.rank, process.world, share(process, [10 * process.rank]))
"""
    outputs = run_ranks(script, 3)
    assert outputs == [f"{rank} 3 [[0], [10], [20]]\n" for rank in range(3)]


@pytest.mark.dist
def test_a_rank_that_never_joins_is_named() -> None:
    script = """
if RANK == 1:
    sys.exit(0)
start_process_group(2, device="cpu")
"""
    with ranks_running(script, 3) as ranks:
        assert ranks[0].wait() == 1
        assert ranks[2].wait() == 1
        for rank in (ranks[0], ranks[2]):
            assert "RankError: rank 1 of 3 did not join within 2 s" in rank.errors()


@pytest.mark.dist
@pytest.mark.parametrize("lost", [0, 1])
def test_the_others_name_a_rank_that_was_killed(lost: int) -> None:
    with ranks_running(MEET_FOR_EVER.format(timeout=12, before="pass"), 3) as ranks:
        for rank in ranks:
            rank.wait_for("ready")
        ranks[lost].process.kill()
        began = time.monotonic()
        others = [rank for rank in ranks if rank.rank != lost]
        assert [rank.wait() for rank in others] == [1, 1]
        assert time.monotonic() - began < 12 + BUSY
        for rank in others:
            last = rank.errors().strip().splitlines()[-1]
            assert f"RankError: rank {lost} gave no sign of life" in last


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_the_rank_that_keeps_the_store_is_noticed(blow: signal.Signals) -> None:
    """A frozen store does not even refuse to answer."""
    script = MEET_FOR_EVER.format(timeout=8, before="pass")
    with ranks_running(script, 3, launcher=False) as ranks:
        for rank in ranks:
            rank.wait_for("ready")
        ranks[0].process.send_signal(blow)
        began = time.monotonic()
        for rank in ranks[1:]:
            assert rank.wait() in (1, EXIT_RANK_LOST)
            assert time.monotonic() - began < 8 + BUSY
            assert "rank 0 or its launcher is lost" in rank.errors().strip().splitlines()[-1]


@pytest.mark.dist
def test_a_frozen_rank_is_named_within_the_timeout() -> None:
    with ranks_running(MEET_FOR_EVER.format(timeout=8, before="pass"), 2) as ranks:
        for rank in ranks:
            rank.wait_for("ready")
        ranks[1].process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert ranks[0].wait() in (1, EXIT_RANK_LOST)
        assert time.monotonic() - began < 8 + BUSY
        last = ranks[0].errors().strip().splitlines()[-1]
        assert "rank 1 gave no sign of life" in last


@pytest.mark.dist
def test_the_others_name_a_rank_whose_main_thread_hangs() -> None:
    """Its heartbeat goes on: it is named because it did not come."""
    hang = "turn == 5 and RANK == 2 and time.sleep(1000)"
    with ranks_running(MEET_FOR_EVER.format(timeout=6, before=hang), 3) as ranks:
        ranks[0].wait_for("ready")
        assert [ranks[0].wait(), ranks[1].wait()] == [1, 1]
        for rank in ranks[:2]:
            last = rank.errors().strip().splitlines()[-1]
            assert "RankError: rank 2 did not reach collective" in last
        ranks[2].wait(20)  # and it does not stay behind alone
        assert ranks[2].process.returncode == EXIT_RANK_LOST


@pytest.mark.dist
def test_an_error_is_told_to_ranks_that_wait_in_a_collective_of_their_own() -> None:
    script = """
import torch.distributed as dist
with start_process_group(12, device="cpu") as process:
    if RANK == 1:
        raise ValueError("out of paper")
    with process.name_lost_ranks():
        dist.all_reduce(torch.ones(1))
"""
    with ranks_running(script, 3) as ranks:
        assert [rank.wait() for rank in ranks] == [1, 1, 1]
        assert ranks[1].errors().strip().endswith("ValueError: out of paper")
        for rank in (ranks[0], ranks[2]):
            assert "RankError: rank 1 stopped with ValueError: out of paper" in rank.errors()


@pytest.mark.dist
def test_a_main_thread_that_cannot_react_is_ended_within_the_timeout() -> None:
    """As one that waits for a GPU: it sees no exception, so the heartbeat ends the process."""
    script = """
with start_process_group(8, device="cpu") as process:
    say("ready")
    time.sleep(1000)
"""
    with ranks_running(script, 2) as ranks:
        for rank in ranks:
            rank.wait_for("ready")
        ranks[1].process.kill()
        began = time.monotonic()
        assert ranks[0].wait(20) == EXIT_RANK_LOST
        assert time.monotonic() - began < 8 + BUSY
        assert "qmargin: rank 1 gave no sign of life" in ranks[0].errors()


class Slate:
    """A store in a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.values.setdefault(key, desired).encode()


class BrokenSlate(Slate):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection reset")


def test_a_store_that_is_gone_is_blamed_on_who_kept_it() -> None:
    reasons: list[str] = []
    heartbeat = Heartbeat(BrokenSlate(), rank=1, world=2, timeout_s=0.6, on_lost=reasons.append)
    heartbeat.start()
    deadline = time.monotonic() + 10
    while not reasons and time.monotonic() < deadline:
        time.sleep(0.01)
    heartbeat.close()
    assert "rank 0 or its launcher is lost" in reasons[0]


def test_ranks_that_finish_at_different_times_are_not_lost() -> None:
    slate, reasons = Slate(), []
    first, second = (
        Heartbeat(slate, rank=rank, world=2, timeout_s=0.6, on_lost=reasons.append)
        for rank in range(2)
    )
    first.start()
    second.start()
    second.close()
    time.sleep(1.2)
    first.close()
    assert reasons == []
