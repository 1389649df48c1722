"""Several processes save one checkpoint, and some of them die."""

import random
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from helpers import saving_ranks
from helpers.processes import finish, start
from helpers.saving import NUM_CLASSES, SAVED, TinyRun, fingerprint, random_state, resume
from qmargin.training.checkpoint import (
    list_leftovers,
    list_steps,
    load_checkpoint,
    newest,
    save_checkpoint,
)

pytestmark = pytest.mark.dist


def start_ranks(
    function: Callable[..., Any], folder: Path, world: int, store: Path
) -> list[BaseProcess]:
    store.unlink(missing_ok=True)
    return [start(function, folder, rank, world, str(store)) for rank in range(world)]


def run_ranks(function: Callable[..., Any], tmp_path: Path, world: int, code: int = 0) -> Path:
    folder = tmp_path / "checkpoints"
    ranks = start_ranks(function, folder, world, tmp_path / "store")
    assert [finish(rank) for rank in ranks] == [code] * world
    return folder


def left_alone(num_steps: int) -> TinyRun:
    run = TinyRun()
    for _ in range(num_steps):
        run.step()
    return run


def test_background_saves_of_two_ranks_do_not_mix_with_training(tmp_path: Path) -> None:
    folder = run_ranks(saving_ranks.save_in_background, tmp_path, 2)
    assert list(list_steps(folder)) == [20, 19]
    assert fingerprint(resume(folder).tensors()) == fingerprint(left_alone(20).tensors())


def test_a_failure_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    folder = run_ranks(saving_ranks.fail_on_one_rank, tmp_path, 2)
    assert list(list_steps(folder)) == [3, 1] and not list_leftovers(folder)


def test_ranks_on_different_disks_are_refused(tmp_path: Path) -> None:
    folder = run_ranks(saving_ranks.save_on_two_disks, tmp_path, 2, saving_ranks.TOLD)
    assert not list(folder.glob("*/step-*"))


def test_no_rank_starts_afresh_when_everything_is_bad(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", random_state(1))
    (path / "loop.json").unlink()
    run_ranks(saving_ranks.find_nothing_whole, tmp_path, 2, saving_ranks.TOLD)


def test_saved_by_2_ranks_resumed_by_1_and_by_3(tmp_path: Path) -> None:
    """Rows and momentum go through 2, 3, 1 and 2 ranks as if there had always been one."""
    folder = tmp_path / "checkpoints"
    run_ranks(saving_ranks.save_in_background, tmp_path, 2)
    for step, world in ((21, 3), (22, 1), (23, 2)):
        run_ranks(saving_ranks.resume_and_step, tmp_path, world)
        search = newest(folder)
        assert search.checkpoint is not None
        manifest = search.checkpoint.manifest
        assert (manifest.step, manifest.world, len(manifest.shards)) == (step, world, world)
    assert fingerprint(resume(folder).tensors()) == fingerprint(left_alone(23).tensors())
    head = load_checkpoint(search.checkpoint).head
    assert head is not None and head.stop == NUM_CLASSES


def wait_until_ready(tmp_path: Path, num_lines: list[int]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if all(len(notes(tmp_path, rank)) > lines for rank, lines in enumerate(num_lines)):
            return
        time.sleep(0.002)
    raise AssertionError("the ranks did not start within a minute")


def notes(tmp_path: Path, rank: int) -> list[str]:
    path = tmp_path / f"{SAVED}{rank}"
    return path.read_text().split() if path.exists() else []


@pytest.mark.slow
def test_kills_of_one_rank_or_both_lose_nothing_and_change_no_bit(tmp_path: Path) -> None:
    """51 times: rank 0, rank 1 or both are killed while they save; the others end by themselves."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    generator, step, num_unfinished = random.Random(7), 0, 0
    for trial in range(51):
        victims = [(0,), (1,), (0, 1)][trial % 3]
        num_lines = [len(notes(tmp_path, rank)) + trial % 2 for rank in range(2)]
        ranks = start_ranks(saving_ranks.save_for_ever, folder, 2, tmp_path / "store")
        wait_until_ready(tmp_path, num_lines)
        time.sleep(generator.uniform(0.0, 0.06))
        for victim in victims:
            ranks[victim].kill()
        for rank, process in enumerate(ranks):
            expected = -signal.SIGKILL if rank in victims else saving_ranks.TOLD
            assert finish(process) == expected
        num_unfinished += bool(list_leftovers(folder))
        told = max(
            (int(note) for rank in range(2) for note in notes(tmp_path, rank) if note != "ready"),
            default=0,
        )
        search = newest(folder)
        assert not [reason for reason in search.skipped if "never completed" not in reason]
        complete = max(told, step)
        step = search.checkpoint.step if search.checkpoint else 0
        assert step in (complete, complete + 1)
    assert num_unfinished > 5  # the kills did hit saves
    assert step >= 25  # in every other life, a save at least
    assert fingerprint(resume(folder).tensors()) == fingerprint(left_alone(step).tensors())
