"""Decisions of all ranks together."""

import pytest

from helpers.ranks import ranks_running, run_ranks
from qmargin.errors import ConfigError, DataError
from qmargin.training.distributed import Process, all_agree, gather, run_on_all, share, vote


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


@pytest.mark.dist
def test_ranks_agree_on_flags_counts_and_signals() -> None:
    script = """
from qmargin.training.distributed import all_agree, gather, run_on_all, share, vote
with start_process_group(60, device="cpu") as process:
    say(all_agree(process, True), all_agree(process, RANK != 1))
    say(gather(process, "\u00e9" * RANK))
    say(share(process, [RANK, 2**62 + RANK]))
    say(tuple(vote(process, stop=15 * (RANK == 1), num_corrupt=RANK)))
    say(tuple(vote(process, is_finite=RANK != 0)))
"""
    expected = [
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


BROKEN_LOADER = """
from qmargin.data.loader import build_loader
from qmargin.data.order import GlobalOrder
from qmargin.data.synthetic import SyntheticIdentities
from qmargin.training.distributed import vote

class Broken(SyntheticIdentities):
    def read(self, index, seed):
        if RANK == 1 and index == order.part(3, rank=1, world=WORLD)[2]:
            def unpack():
                raise OSError("the disk is on fire")
            unpack()
        return super().read(index, seed)

dataset = Broken(8, 8, shape=(4,))
order = GlobalOrder(64, seed=0, batch_size=16)
with start_process_group(30, device="cpu") as process:
    stream = build_loader(dataset, order, rank=RANK, world=WORLD, num_workers={workers})
    with stream:
        for step in range(10):
            error = None
            try:
                batch = next(stream)
            except Exception as caught:
                error = caught
            vote(process, error=error)
            say(step)
"""


@pytest.mark.dist
@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_in_one_loader_stops_all_ranks_at_the_same_step(workers: int) -> None:
    with ranks_running(BROKEN_LOADER.replace("{workers}", str(workers)), 2) as ranks:
        assert [rank.wait() for rank in ranks] == [1, 1]
        for rank in ranks:
            assert rank.output().split() == ["0", "1", "2"]
            told = rank.errors()
            assert told.index("in unpack") < told.index("DataError: cannot read step 3, sample")
            assert "the disk is on fire" in told
        assert "RankError: rank 1 stopped with DataError" in ranks[0].errors()
