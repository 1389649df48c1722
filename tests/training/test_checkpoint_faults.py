"""Damaged checkpoints, saves that are killed, and several processes that save together."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from helpers import saving_ranks
from helpers.processes import finish, start
from helpers.saving import (
    SAVED,
    TinyRun,
    fingerprint,
    random_state,
    resume,
    save_and_die,
)
from qmargin.errors import CheckpointError
from qmargin.training.checkpoint import (
    Manifest,
    list_leftovers,
    list_steps,
    load_checkpoint,
    newest,
    open_checkpoint,
    read_backbone,
    read_recipe,
    save_checkpoint,
)

FILES = ("manifest.json", "backbone.safetensors", "head-00000-of-00001.safetensors", "loop.json")


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def pipe(path: Path) -> None:
    """Nobody writes to it: opening it to read would wait forever."""
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


DAMAGES = [cut, grow, Path.unlink, lambda path: flip(path, 1001), device]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [*DAMAGES, *([pipe] if hasattr(os, "mkfifo") else [])])
def test_a_damaged_checkpoint_is_skipped_for_an_older_one(tmp_path: Path, name, damage) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, random_state(step))
    bad = tmp_path / "step-000002"
    damage(bad / name)
    search = newest(tmp_path)
    assert search.checkpoint.step == 1
    (skipped,) = search.skipped
    assert "step-000002" in skipped and name in skipped
    with pytest.raises(CheckpointError, match=name):  # asked for by name, it is an error
        open_checkpoint(bad)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_no_reader_of_a_checkpoint_waits_for_a_pipe(tmp_path: Path) -> None:
    """Not even where hashes were compared by another rank, or are not compared yet."""
    path = save_checkpoint(tmp_path, random_state(1))
    opened = open_checkpoint(path)
    for name in ("recipe.yaml", "loop.json", "backbone.safetensors"):
        pipe(path / name)
    for read in (read_recipe, load_checkpoint, read_backbone):
        with pytest.raises(CheckpointError, match="regular file"):
            read(opened)


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, random_state(1))
    generator = random.Random(0)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for _ in range(20):
            flip(file, generator.randrange(8 * len(whole)))
            with pytest.raises(CheckpointError):
                open_checkpoint(path)
            file.write_bytes(whole)
    assert open_checkpoint(path).step == 1


def test_every_checkpoint_bad_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, random_state(step))
        cut(tmp_path / f"step-{step:06d}" / "manifest.json")
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints") as caught:
        newest(tmp_path)
    assert all(f"step-00000{step}" in str(caught.value) for step in (1, 2, 3))


def test_what_is_not_whole_or_under_another_name_is_skipped(tmp_path: Path) -> None:
    assert newest(tmp_path / "missing").checkpoint is None
    (tmp_path / "step-000007.tmp-0a0b").mkdir()
    assert newest(tmp_path) == (None, ("step-000007.tmp-0a0b: never completed",))
    save_checkpoint(tmp_path, random_state(1)).rename(tmp_path / "step-000009")
    assert not list_leftovers(tmp_path)
    save_checkpoint(tmp_path, random_state(1))
    search = newest(tmp_path)
    assert search.checkpoint.step == 1 and "step-000009" in search.skipped[0]


@pytest.mark.parametrize("name", ["../loop.json", "/etc/passwd", ".hidden", "a/b", "manifest.json"])
def test_a_manifest_cannot_point_elsewhere(tmp_path: Path, name: str) -> None:
    text = open_checkpoint(save_checkpoint(tmp_path, random_state(1))).manifest.to_text()
    with pytest.raises(CheckpointError, match="not allowed"):
        Manifest.from_text(text.replace('"loop.json"', f'"{name}"'))
    with pytest.raises(CheckpointError, match="not allowed"):
        Manifest.from_text(text.replace('"scaler"', f'"{name}"'))
    with pytest.raises(CheckpointError, match="version 2"):
        Manifest.from_text(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointError, match="damaged"):
        Manifest.from_text('{"body": ' + "[" * 100_000)


def test_a_kill_at_every_event_of_a_save_loses_nothing(tmp_path: Path) -> None:
    """Death at each open, mkdir, rename and deletion of a save that also prunes, one by one."""
    for step in (1, 2):
        save_checkpoint(tmp_path, random_state(step), keep=2)
    deaths = 0
    while code := finish(start(save_and_die, tmp_path, 3, deaths)):
        assert code == -signal.SIGKILL
        deaths += 1
        search = newest(tmp_path)
        found = search.checkpoint.step
        assert found in (2, 3)
        assert all("never completed" in reason for reason in search.skipped)
        loaded = load_checkpoint(search.checkpoint)
        assert fingerprint(dict(loaded.backbone)) == fingerprint(dict(random_state(found).backbone))
        if found == 3:  # save the same step again, from the same two before it
            for path in tmp_path.iterdir():
                shutil.rmtree(path)
            for step in (1, 2):
                save_checkpoint(tmp_path, random_state(step), keep=2)
    assert deaths > 20
    assert list(list_steps(tmp_path)) == [3, 2]
    assert not list_leftovers(tmp_path)


def run_ranks(function: Callable[..., Any], tmp_path: Path, world: int, code: int = 0) -> Path:
    """Run a function of ``saving_ranks`` on every rank; the folder of its checkpoints."""
    ranks = start_ranks(function, tmp_path, world)
    assert [finish(rank) for rank in ranks] == [code] * world
    return tmp_path / "checkpoints"


def start_ranks(function: Callable[..., Any], tmp_path: Path, world: int) -> list[BaseProcess]:
    folder, store = tmp_path / "checkpoints", tmp_path / "store"
    store.unlink(missing_ok=True)
    return [start(function, folder, rank, world, str(store)) for rank in range(world)]


def assert_as_if_left_alone(folder: Path, num_steps: int) -> None:
    """The newest checkpoint is that of one rank that was never stopped, bit for bit."""
    alone = TinyRun()
    for _ in range(num_steps):
        alone.step()
    assert fingerprint(resume(folder).tensors()) == fingerprint(alone.tensors())


@pytest.mark.dist
def test_a_failure_of_one_rank_is_told_to_all(tmp_path: Path) -> None:
    folder = run_ranks(saving_ranks.fail_on_one_rank, tmp_path, 2)
    assert list(list_steps(folder)) == [3, 1] and not list_leftovers(folder)


@pytest.mark.dist
def test_ranks_on_different_disks_are_refused(tmp_path: Path) -> None:
    folder = run_ranks(saving_ranks.save_on_two_disks, tmp_path, 2, saving_ranks.TOLD)
    assert not list(folder.glob("*/step-*"))


@pytest.mark.dist
def test_no_rank_starts_afresh_when_everything_is_bad(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", random_state(1))
    (path / "loop.json").unlink()
    run_ranks(saving_ranks.find_nothing_whole, tmp_path, 2, saving_ranks.TOLD)


@pytest.mark.dist
def test_saved_by_2_ranks_resumed_by_1_and_by_3(tmp_path: Path) -> None:
    """Rows and momentum go through 2, 3, 1 and 2 ranks as if there had always been one."""
    folder = run_ranks(saving_ranks.save_in_background, tmp_path, 2)
    assert list(list_steps(folder)) == [20, 19]
    for step, world in ((21, 3), (22, 1), (23, 2)):
        run_ranks(saving_ranks.resume_and_step, tmp_path, world)
        manifest = newest(folder).checkpoint.manifest
        assert (manifest.step, manifest.world, len(manifest.shards)) == (step, world, world)
    assert_as_if_left_alone(folder, 23)


def notes(tmp_path: Path, rank: int) -> list[str]:
    path = tmp_path / f"{SAVED}{rank}"
    return path.read_text().split() if path.exists() else []


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2])
def test_50_kills_at_random_moments_lose_nothing_and_change_no_bit(
    tmp_path: Path, world: int
) -> None:
    """Rank 0, rank 1 or both are killed while they save; the others end by themselves."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    generator, step, num_unfinished = random.Random(7), 0, 0
    for trial in range(50):
        victims = (0,) if world == 1 else [(0,), (1,), (0, 1)][trial % 3]
        # in every other life, a save at least
        enough = [len(notes(tmp_path, rank)) + 1 + trial % 2 for rank in range(world)]
        ranks = start_ranks(saving_ranks.save_for_ever, tmp_path, world)
        deadline = time.monotonic() + 60
        while any(len(notes(tmp_path, rank)) < lines for rank, lines in enumerate(enough)):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(generator.uniform(0.0, 0.06))
        for victim in victims:
            ranks[victim].kill()
        for rank, process in enumerate(ranks):
            assert finish(process) == (-signal.SIGKILL if rank in victims else saving_ranks.TOLD)
        num_unfinished += bool(list_leftovers(folder))
        told = [note for rank in range(world) for note in notes(tmp_path, rank)]
        search = newest(folder)
        assert not [reason for reason in search.skipped if "never completed" not in reason]
        complete = max(step, *(int(note) for note in told if note != "ready"), 0)
        step = search.checkpoint.step if search.checkpoint else 0
        assert step in (complete, complete + 1)  # renamed, and killed before it said so
        assert world == 2 or len(list_steps(folder)) <= 3  # a rank that is told does not prune
    assert num_unfinished > 5  # the kills did hit saves
    assert step >= 25
    assert_as_if_left_alone(folder, step)
