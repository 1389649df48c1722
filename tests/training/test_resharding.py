"""Rows written by W ranks and read by V ranks."""

import threading
from pathlib import Path

import pytest
import torch

import qmargin
from helpers.saving import NUM_CLASSES, class_range, random_state
from qmargin.errors import CheckpointError, ConfigError
from qmargin.heads.classifier import MarginClassifier
from qmargin.heads.optimizers import ExactSGD
from qmargin.training.checkpoint import (
    Checkpoint,
    CheckpointState,
    HeadRows,
    join_rows,
    load_checkpoint,
    newest,
    open_checkpoint,
    read_class_rows,
    save_checkpoint,
    split_rows,
)
from qmargin.training.distributed import Process


def save_in_threads(folder: Path, states: list[CheckpointState]) -> Checkpoint:
    """Save as many ranks do, each in a thread."""
    world = len(states)
    barrier, sums = threading.Barrier(world), [torch.zeros(0)] * world
    errors: list[BaseException] = []

    class Thread(Process):
        def sum_(self, numbers: torch.Tensor) -> torch.Tensor:
            sums[self.rank] = numbers
            barrier.wait(60)
            total = torch.stack(sums).sum(0).to(numbers.dtype)
            barrier.wait(60)
            return total

    def save(rank: int) -> None:
        try:
            save_checkpoint(folder, states[rank], process=Thread(rank, world))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        assert len(errors) == world  # a failure is everyone's
        raise errors[0]
    checkpoint = newest(folder).checkpoint
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("written", [1, 2, 3, 5])
@pytest.mark.parametrize("read", [1, 2, 3, 4, 60])
def test_rows_written_by_w_ranks_load_into_v_ranks_bit_for_bit(
    tmp_path: Path, written: int, read: int
) -> None:
    states = [random_state(1, rank=rank, world=written) for rank in range(written)]
    checkpoint = save_in_threads(tmp_path, states)
    expected = random_state(1).head
    assert expected is not None
    for rank in range(read):
        start, stop = class_range(rank, read)
        state = load_checkpoint(checkpoint, start=start, stop=stop)
        assert state.head is not None and (state.head.start, state.head.stop) == (start, stop)
        assert state.head.tensors.keys() == {"prototypes", "momentum"}
        for name, rows in state.head.tensors.items():
            assert torch.equal(rows, expected.tensors[name][start:stop])


def test_more_ranks_than_classes(tmp_path: Path) -> None:
    rows = torch.randn(2, 3)
    states = [
        CheckpointState(1, head=HeadRows(*piece))
        for piece in (
            (0, 2, {"prototypes": rows[:0]}),
            (0, 2, {"prototypes": rows[:1]}),
            (1, 2, {"prototypes": rows[1:1]}),
            (1, 2, {"prototypes": rows[1:]}),
        )
    ]
    checkpoint = save_in_threads(tmp_path, states)
    assert torch.equal(read_class_rows(checkpoint, 0, 2)["prototypes"], rows)
    assert read_class_rows(checkpoint, 2, 2)["prototypes"].shape == (0, 3)


def test_momentum_that_only_some_ranks_have_is_zero_elsewhere(tmp_path: Path) -> None:
    rows = torch.randn(4, 3)
    states = [
        CheckpointState(1, head=HeadRows(0, 4, {"prototypes": rows[:2]})),
        CheckpointState(1, head=HeadRows(2, 4, {"prototypes": rows[2:], "momentum": rows[2:]})),
    ]
    read = read_class_rows(save_in_threads(tmp_path, states), 1, 4)
    assert torch.equal(read["momentum"], torch.cat([torch.zeros(1, 3), rows[2:]]))


@pytest.mark.parametrize("ranges", [((0, 2), (3, 5)), ((0, 3), (2, 5)), ((0, 2), (2, 4))])
def test_gaps_and_overlaps_are_refused_when_saving(tmp_path: Path, ranges) -> None:
    states = [
        CheckpointState(1, head=HeadRows(start, 5, {"prototypes": torch.zeros(stop - start, 2)}))
        for start, stop in ranges
    ]
    with pytest.raises(CheckpointError, match="class"):
        save_in_threads(tmp_path, states)
    assert not list(tmp_path.iterdir())


def test_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step.*\[1, 2\]"):
        save_in_threads(tmp_path, [random_state(1, world=2), random_state(2, rank=1, world=2)])
    heads = [HeadRows(0, k, {"prototypes": torch.zeros(2, 2)}) for k in (2, 3)]
    with pytest.raises(CheckpointError, match=r"count \[2, 3\] classes"):
        save_in_threads(tmp_path, [CheckpointState(1, head=head) for head in heads])
    assert not list(tmp_path.iterdir())


def test_other_numbers_of_classes_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, random_state(1)))
    with pytest.raises(ConfigError, match=f"has {NUM_CLASSES}; the number of classes cannot"):
        read_class_rows(checkpoint, 0, NUM_CLASSES + 1)


def test_the_head_and_its_optimizer_go_on_after_resharding(tmp_path: Path) -> None:
    """Two pieces saved from one head come back as one head, which then takes the same step."""
    heads = []
    for _ in range(2):
        torch.manual_seed(0)
        heads.append(MarginClassifier(6, 11, qmargin.q_margin(), path="dense", gradient="fused"))
    optimizers = [ExactSGD(head, lr=0.1) for head in heads]
    batches = [(torch.randn(8, 6), torch.randint(11, (8,))) for _ in range(2)]
    heads[0](*batches[0]).backward()
    optimizers[0].step()

    rest, rows = split_rows(optimizers[0].state_dict(), heads[0].prototypes.shape)
    assert list(rows) == ["momentum_buffer"]
    rows = {"prototypes": heads[0].prototypes.detach(), **rows}
    states = [
        CheckpointState(
            1,
            head=HeadRows(a, 11, {name: tensor[a:b] for name, tensor in rows.items()}),
            parts={"head_optimizer": rest},
        )
        for a, b in ((0, 4), (4, 11))
    ]
    state = load_checkpoint(save_in_threads(tmp_path, states))
    assert state.head is not None
    with torch.no_grad():
        heads[1].prototypes.copy_(state.head.tensors["prototypes"])
    optimizers[1].load_state_dict(join_rows(state.parts["head_optimizer"], state.head.tensors))
    for head, optimizer in zip(heads, optimizers, strict=True):
        head(*batches[1]).backward()
        optimizer.step()
    assert torch.equal(heads[0].prototypes, heads[1].prototypes)
    with pytest.raises(CheckpointError, match="momentum_buffer is missing"):
        join_rows(state.parts["head_optimizer"], {})


def test_two_optimizers_in_one_state_are_refused() -> None:
    state = {0: {"momentum_buffer": torch.zeros(3, 2)}, 1: {"momentum_buffer": torch.ones(3, 2)}}
    with pytest.raises(CheckpointError, match="second tensor called momentum_buffer"):
        split_rows(state, torch.Size([3, 2]))
