"""Ranks: who joins, who is lost, how fast the others know, and what they decide together."""

import signal
import time

import pytest
import torch

from helpers.ranks import Rank, ranks_running, run_ranks
from qmargin.errors import ConfigError, DataError
from qmargin.training.distributed import (
    EXIT_RANK_LOST,
    Heartbeat,
    Process,
    all_agree,
    choose_device,
    gather,
    ranks_from,
    run_on_all,
    seed_everything,
    share,
    start_process_group,
    vote,
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


def last_error(rank: Rank) -> str:
    return rank.errors().strip().splitlines()[-1]


def test_ranks_come_from_the_environment_of_torchrun() -> None:
    assert ranks_from({**TORCHRUN, "LOCAL_RANK": "1"}) == (2, 4, 1)
    assert ranks_from({"MASTER_ADDR": "somewhere"}) == (0, 1, 0)
    for changes, name in (
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
        ({"RANK": "4"}, "RANK is 4"),
        ({"RANK": "two"}, "two"),
    ):
        with pytest.raises(ConfigError, match=name):
            ranks_from({**TORCHRUN, **changes})


def test_one_process_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with start_process_group(device="cpu") as process:
        assert process.control is None and process.is_first
    assert not torch.distributed.is_initialized()
    with pytest.raises(ConfigError, match="timeout_s"):
        start_process_group(0.0)
    with pytest.raises(ConfigError, match="'tpu'"):
        choose_device(0, "tpu")


def test_one_rank_agrees_with_itself() -> None:
    process = Process()
    assert share(process, [1, -2]) == [[1, -2]]
    assert [all_agree(process, flag) for flag in (True, False)] == [True, False]
    assert gather(process, ["a", {"b": 1}]) == [["a", {"b": 1}]]
    with pytest.raises(DataError, match="row 7"):
        vote(process, error=DataError("row 7"))
    with pytest.raises(ZeroDivisionError):
        run_on_all(process, lambda: 1 // 0)
    with pytest.raises(ConfigError, match="control group"):
        share(Process(0, 2), [1])
    with pytest.raises(RuntimeError, match="shapes"), process.name_lost_ranks():
        raise RuntimeError("shapes cannot be multiplied")  # which is no rank's fault


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_seeds_depend_on_seed_and_rank(device: str) -> None:
    if device == "cuda":
        torch.cuda.init()  # as in any training run: a GPU that is not in use is not seeded
    modules = (torch.cuda, torch.xpu, torch.mtia)
    kept = [module._queued_calls for module in modules if hasattr(module, "_queued_calls")]
    before = [len(calls) for calls in kept]
    draws = []
    for seed, rank in [(0, 0), (0, 0), (0, 1), (1, 0)]:
        seed_everything(seed, rank=rank)
        draws.append(float(torch.rand((), device=device)))
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3
    # of every call for a device that was never used, torch would keep the stack
    assert [len(calls) for calls in kept] == before


@pytest.mark.dist
def test_ranks_agree_on_flags_counts_and_signals() -> None:
    script = """
from qmargin.training.distributed import all_agree, gather, share, vote
with start_process_group(60, device="cpu") as process:
    say(process.rank == RANK, process.world)
    say(all_agree(process, True), all_agree(process, RANK != 1))
    say(gather(process, "\u00e9" * RANK))
    say(share(process, [RANK, 2**62 + RANK]))
    say(tuple(vote(process, stop=15 * (RANK == 1), num_corrupt=RANK)))
    say(tuple(vote(process, is_finite=RANK != 0)))
"""
    expected = [
        "True 3",
        "True False",
        "['', '\u00e9', '\u00e9\u00e9']",
        str([[rank, 2**62 + rank] for rank in range(3)]),
        "(15, True, 3)",
        "(0, False, 0)",
    ]
    for output in run_ranks(script, 3):
        assert output.splitlines() == expected


@pytest.mark.dist
def test_the_first_error_is_raised_everywhere_with_its_traceback_first() -> None:
    script = """
from qmargin.training.distributed import vote
def open_the_parcel():
    raise ValueError("it is empty: \\u00e9\\nsecond line")
with start_process_group(60, device="cpu") as process:
    vote(process)
    error = None
    if RANK in (1, 2):
        try:
            open_the_parcel()
        except ValueError as caught:
            error = caught
    vote(process, error=error)
"""
    with ranks_running(script, 3) as ranks:
        assert [rank.wait() for rank in ranks] == [1, 1, 1]
        told = ranks[0].errors()
        assert told.index("in open_the_parcel") < told.index("RankError")
        assert "RankError: rank 1 stopped with ValueError: it is empty: é" in told
        for rank in ranks[1:]:
            assert "in open_the_parcel" in rank.errors()
            assert "RankError" not in rank.errors()


@pytest.mark.dist
def test_a_rank_that_never_joins_is_named() -> None:
    script = """
if RANK == 1:
    sys.exit(0)
start_process_group(2, device="cpu")
"""
    with ranks_running(script, 3) as ranks:
        for rank in (ranks[0], ranks[2]):
            assert rank.wait() == 1
            assert "RankError: rank 1 of 3 did not join within 2 s" in rank.errors()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("lost", "blow"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_the_others_name_a_rank_that_was_killed_or_frozen(lost: int, blow: signal.Signals) -> None:
    with ranks_running(MEET_FOR_EVER.format(timeout=6, before="pass"), 3) as ranks:
        for rank in ranks:
            rank.wait_for("ready")
        ranks[lost].process.send_signal(blow)
        began = time.monotonic()
        for rank in ranks[:lost] + ranks[lost + 1 :]:
            assert rank.wait() in ((1,) if blow == signal.SIGKILL else (1, EXIT_RANK_LOST))
            assert time.monotonic() - began < 6 + BUSY
            assert f"rank {lost} sent no heartbeat" in last_error(rank)


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
            assert "rank 0 or its launcher is lost" in last_error(rank)


@pytest.mark.dist
def test_the_others_name_a_rank_whose_main_thread_hangs() -> None:
    """Its heartbeat goes on: it is named because it did not come."""
    hang = "turn == 5 and RANK == 2 and time.sleep(1000)"
    with ranks_running(MEET_FOR_EVER.format(timeout=5, before=hang), 3) as ranks:
        ranks[0].wait_for("ready")
        assert [ranks[0].wait(), ranks[1].wait()] == [1, 1]
        for rank in ranks[:2]:
            assert "RankError: rank 2 did not reach collective" in last_error(rank)
        assert ranks[2].wait(20) == EXIT_RANK_LOST  # and it does not stay behind alone


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
        assert last_error(ranks[1]) == "ValueError: out of paper"
        for rank in (ranks[0], ranks[2]):
            assert "RankError: rank 1 stopped with ValueError: out of paper" in rank.errors()


@pytest.mark.dist
def test_a_main_thread_that_cannot_react_is_ended_within_the_timeout() -> None:
    """As one that waits for a GPU: it sees no exception, so the heartbeat ends the process."""
    script = """
with start_process_group(6, device="cpu") as process:
    say("ready")
    time.sleep(1000)
"""
    with ranks_running(script, 2) as ranks:
        for rank in ranks:
            rank.wait_for("ready")
        ranks[1].process.kill()
        began = time.monotonic()
        assert ranks[0].wait(20) == EXIT_RANK_LOST
        assert time.monotonic() - began < 6 + BUSY
        assert "qmargin: rank 1 sent no heartbeat" in ranks[0].errors()


class Slate:
    """A store in a dictionary."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self.values: dict[str, str] = {}
        self.is_broken = is_broken

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        if self.is_broken:
            raise RuntimeError("connection reset")
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.values.setdefault(key, desired).encode()


def test_a_store_that_is_gone_is_blamed_on_who_kept_it() -> None:
    reasons: list[str] = []
    store = Slate(is_broken=True)
    heartbeat = Heartbeat(store, rank=1, world=2, timeout_s=0.6, on_lost=reasons.append)
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
