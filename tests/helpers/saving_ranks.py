"""Ranks that save together, for tests that start and kill them."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from helpers import saving
from helpers.saving import NUM_CLASSES, TinyRun, random_state, resume
from qmargin.errors import CheckpointError, RankError
from qmargin.training.checkpoint import AsyncSaver, agree_on_newest, save_checkpoint
from qmargin.training.distributed import Process

TOLD = 3  # exit code of a rank that was told of a failure by a CheckpointError


def join_world(rank: int, world: int, store: str) -> Process:
    """Start gloo and return a process with a control group of its own."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=20)
    )
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    return Process(rank, world, control=group)


def save_for_ever(folder: Path, rank: int, world: int, store: str) -> None:
    """Resume, then step and save until killed, or until another rank is."""
    try:
        saving.save_for_ever(folder, join_world(rank, world, store))
    except CheckpointError:
        os._exit(TOLD)


def save_in_background(folder: Path, rank: int, world: int, store: str) -> None:
    """Step with collectives of the default group while a thread saves over its own."""
    process = join_world(rank, world, store)
    run = TinyRun(rank, world)
    with AsyncSaver(folder, process=process, keep=2) as saver:
        for _ in range(20):
            run.step()
            total = torch.tensor([float(rank + 1)])
            dist.all_reduce(total)
            assert float(total) == world * (world + 1) / 2
            saver.save(run.state())
    dist.destroy_process_group()


def fail_on_one_rank(folder: Path, rank: int, world: int, store: str) -> None:
    """Save a step; then rank 1 cannot write the next one, and every rank is told why."""
    process = join_world(rank, world, store)
    save_checkpoint(folder, random_state(1, rank=rank, world=world), process=process)
    state = random_state(2, rank=rank, world=world)
    if rank == 1:
        sparse = torch.zeros(state.head.stop - state.head.start, 2).to_sparse()
        tensors = {**state.head.tensors, "momentum": sparse}
        state = replace(state, head=replace(state.head, tensors=tensors))
    told = ""
    try:
        save_checkpoint(folder, state, process=process)
    except CheckpointError as error:
        told = str(error)
    assert "step 2" in told and "'momentum'" in told, told
    assert rank == 1 or "rank 1" in told, told
    assert rank or not list(folder.glob("*.tmp-*"))  # rank 0 has cleaned up when it raises
    assert agree_on_newest(folder, process).checkpoint.step == 1
    save_checkpoint(folder, random_state(3, rank=rank, world=world), process=process)
    dist.destroy_process_group()


def save_on_two_disks(folder: Path, rank: int, world: int, store: str) -> None:
    """Each rank has a disk of its own."""
    process = join_world(rank, world, store)
    own = folder / str(rank)
    try:
        save_checkpoint(own, random_state(1), process=process)
    except CheckpointError as error:
        assert "share" in str(error), error
        os._exit(TOLD)


def find_nothing_whole(folder: Path, rank: int, world: int, store: str) -> None:
    """Every rank refuses when rank 0 finds no whole checkpoint."""
    process = join_world(rank, world, store)
    try:
        agree_on_newest(folder, process)
    except (CheckpointError, RankError) as error:
        assert "none of the 1 checkpoints" in str(error), error
        os._exit(TOLD)


def resume_and_step(folder: Path, rank: int, world: int, store: str) -> None:
    """Resume with this number of ranks, and save one step more."""
    process = join_world(rank, world, store)
    run = resume(folder, process)
    assert run.num_steps > 0 and run.stop <= NUM_CLASSES
    run.step()
    save_checkpoint(folder, run.state(), process=process, keep=9)
    dist.destroy_process_group()
