"""Saving and loading: what comes back, on any number of ranks; what is refused; averages."""

import json
import os
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.saving import NUM_CLASSES, class_range, fingerprint, random_state
from qmargin.errors import CheckpointError, ConfigError, ShapeError
from qmargin.training.checkpoint import (
    AsyncSaver,
    Checkpoint,
    CheckpointState,
    HeadRows,
    check_writable,
    flatten,
    join_rows,
    list_leftovers,
    list_steps,
    load_checkpoint,
    newest,
    open_checkpoint,
    read_class_rows,
    save_checkpoint,
    set_aside,
    split_rows,
    unflatten,
)
from qmargin.training.distributed import Process
from qmargin.training.optim import MovingAverage, average_checkpoints, write_weights


def load(path: Path) -> CheckpointState:
    return load_checkpoint(open_checkpoint(path))


def head_of(start: int, num_classes: int, **tensors: torch.Tensor) -> CheckpointState:
    return CheckpointState(1, head=HeadRows(start, num_classes, tensors))


def assert_states_equal(left: CheckpointState, right: CheckpointState) -> None:
    texts = []
    for state in (left, right):
        assert state.head is not None
        tensors = (dict(sorted(one.items())) for one in (state.backbone, state.head.tensors))
        trees = (*tensors, state.parts, state.loop)
        plain = (state.step, state.recipe_yaml, state.recipe_sha256)
        found = [flatten(tree) for tree in (*trees, plain, (state.head.start, state.head.stop))]
        texts.append([(text, fingerprint(one)) for text, one in found])
    assert texts[0] == texts[1]


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = random_state(12)
    path = save_checkpoint(tmp_path, state)
    assert path == tmp_path / "step-000012"
    assert_states_equal(load(path), state)
    assert newest(tmp_path).checkpoint == open_checkpoint(path)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert 0 < size - state.num_bytes() < 6000  # known before it is written


def test_every_file_is_one_that_common_tools_read(tmp_path: Path) -> None:
    state = random_state(3)
    path = save_checkpoint(tmp_path, state)
    pairs = [f"{part}.{kind}" for part in state.parts for kind in ("json", "safetensors")]
    assert {file.name for file in path.iterdir()} == {
        "manifest.json",
        "backbone.safetensors",
        "head-00000-of-00001.safetensors",
        "loop.json",
        "recipe.yaml",
        *pairs,
    }
    weights = load_file(path / "backbone.safetensors")
    assert fingerprint(weights) == fingerprint(dict(state.backbone))
    for file in path.glob("*.json"):
        json.loads(file.read_text(), parse_constant=pytest.fail)  # no NaN: it is not JSON


def test_tensors_of_all_dtypes_and_layouts_are_exact(tmp_path: Path) -> None:
    dtypes = (torch.bool, torch.uint8, torch.float64, torch.int16, torch.bfloat16, torch.int64)
    tensors = {str(dtype): torch.arange(3).to(dtype) for dtype in dtypes}
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    tensors |= {"w": weight, "t": weight[0, 0].t()}
    state = load(save_checkpoint(tmp_path, CheckpointState(1, tensors)))
    assert fingerprint(dict(state.backbone)) == fingerprint(tensors)
    assert state.head is None


def test_names_that_look_like_paths_do_not_collide(tmp_path: Path) -> None:
    tree = {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, "$tensor": "x", 3: [()], "": None}
    with AsyncSaver(tmp_path) as saver:  # its host memory is one buffer per tensor as well
        saver.save(CheckpointState(1, parts={"odd": tree}))
    for back in (unflatten(*flatten(tree)), load(tmp_path / "step-000001").parts["odd"]):
        assert torch.equal(back["a/b"], torch.zeros(2))
        assert torch.equal(back["a"]["b"], torch.ones(2))
        assert (back["$tensor"], back[3], back[""]) == ("x", [()], None)


@pytest.mark.parametrize("text", ["[", '{"$tensor": "gone"}', '{"$code": 1}', '{"$items": 3}'])
def test_a_foreign_tree_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError):
        unflatten(text, {})


def test_states_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="state/0/hook"):
        flatten({"state": [{"hook": lambda: None}]})
    with pytest.raises(CheckpointError, match=r"1\.5"):
        flatten({1.5: 0})
    with pytest.raises(ShapeError, match="momentum"):
        HeadRows(0, 3, {"prototypes": torch.zeros(3, 2), "momentum": torch.zeros(2, 2)})
    with pytest.raises(ShapeError, match="2 to 5 of 4"):
        head_of(2, 4, prototypes=torch.zeros(3, 2))
    with pytest.raises(CheckpointError, match=r"'\.\./x'"):
        CheckpointState(1, parts={"../x": {}})
    two = {0: {"momentum_buffer": torch.zeros(3, 2)}, 1: {"momentum_buffer": torch.ones(3, 2)}}
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        split_rows(two, torch.Size([3, 2]))
    rest, rows = split_rows({"momentum_buffer": torch.zeros(3, 2)}, torch.Size([3, 2]))
    assert join_rows(rest, rows)["momentum_buffer"] is rows["momentum_buffer"]
    with pytest.raises(CheckpointError, match="momentum_buffer"):
        join_rows(rest, {})
    for state, message in (
        (CheckpointState(1, {"counter": 3}), "'counter'"),  # type: ignore[dict-item]
        (CheckpointState(1, loop={"x": torch.ones(1)}), "'x'"),
        (CheckpointState(1, {"s": torch.eye(2).to_sparse()}), "'s'"),
        (head_of(0, 4, prototypes=torch.zeros(3, 2)), "class 3 of 4"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_checkpoint(tmp_path, state)
    with pytest.raises(CheckpointError, match="control group"):
        save_checkpoint(tmp_path, CheckpointState(1), process=Process(0, 2))
    assert not list(tmp_path.iterdir())  # nothing half-written stays


def test_only_the_newest_are_kept_and_later_ones_spared(tmp_path: Path) -> None:
    """A run that resumed from an older checkpoint has bad ones ahead of it; they do not count."""
    for step in (5, 10, 999_999, 1_000_000):
        save_checkpoint(tmp_path / "many", random_state(step), keep=2)
    assert list(list_steps(tmp_path / "many")) == [1_000_000, 999_999]
    assert newest(tmp_path / "many").checkpoint.step == 1_000_000
    for step in (1, 8, 9):
        save_checkpoint(tmp_path, random_state(step), keep=5)
    save_checkpoint(tmp_path, random_state(2), keep=1)
    assert list(list_steps(tmp_path)) == [9, 8, 2]
    assert set_aside(tmp_path, 2) == [tmp_path / "step-000009", tmp_path / "step-000008"]
    assert newest(tmp_path).checkpoint.step == 2
    assert len(list(tmp_path.glob("step-*.aside-*"))) == 2


def test_a_whole_checkpoint_is_never_overwritten_and_a_bad_one_is(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, random_state(4))
    before = open_checkpoint(first).sha256
    again = replace(random_state(4), loop={"seconds": 3.0})
    assert save_checkpoint(tmp_path, again) == first  # the same weights: nothing to do
    with pytest.raises(CheckpointError, match="other values"):
        save_checkpoint(tmp_path, random_state(4, seed=1))
    assert open_checkpoint(first).sha256 == before
    assert not list_leftovers(tmp_path)
    (first / "loop.json").write_text("{}")
    save_checkpoint(tmp_path, random_state(4, seed=1))
    assert_states_equal(load(first), random_state(4, seed=1))


def test_nothing_is_renamed_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file, then the folder, then the rename, then the parent, and only then deletions."""
    save_checkpoint(tmp_path, random_state(1), keep=1)
    events = []
    sync, rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        events.append(("sync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        sync(descriptor)

    def record(self: Path, target: Path) -> Path:
        events.append(("rename", self.name))
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", record)
    path = save_checkpoint(tmp_path, random_state(2), keep=1)
    moved = next(i for i, event in enumerate(events) if event[0] == "rename")
    temporary = events[moved][1]
    assert temporary.startswith("step-000002.tmp-")
    synced = {name for _, name in events[:moved]}
    assert {file.name for file in path.iterdir()} | {temporary} == synced
    assert events[moved - 2 : moved] == [("sync", "manifest.json"), ("sync", temporary)]
    assert events[moved + 1] == ("sync", tmp_path.name)
    assert events[moved + 2 :] == [("rename", "step-000001")]


def test_background_saves_hold_the_values_of_their_step(tmp_path: Path) -> None:
    """Training changes the tensors while they are being written."""
    state = random_state(1)
    assert state.head is not None
    with AsyncSaver(tmp_path, keep=5) as saver:
        saver.reserve(state)
        for step in range(1, 6):
            fresh = random_state(step)
            for name, tensor in state.head.tensors.items():
                tensor.copy_(fresh.head.tensors[name])
            saver.save(replace(fresh, head=state.head))
            for tensor in (*state.head.tensors.values(), *fresh.backbone.values()):
                tensor.zero_()
    assert len(list_steps(tmp_path)) == 5
    for step, path in list_steps(tmp_path).items():
        assert_states_equal(load(path), random_state(step))


def test_results_and_errors_of_background_saves_are_told_once(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path / "good")
    assert saver.poll() is None and not saver.is_busy
    saver.save(random_state(1))
    while saver.is_busy:
        pass
    assert saver.poll() == tmp_path / "good" / "step-000001"
    assert saver.poll() is None
    (tmp_path / "file").write_text("")
    saver = AsyncSaver(tmp_path / "file")
    saver.save(random_state(1))
    with pytest.raises(CheckpointError, match="step 1"):
        saver.wait()
    assert saver.poll() is None
    saver.save(random_state(2))
    with pytest.raises(CheckpointError, match="step 2"):
        saver.save(random_state(3))
    saver.save(random_state(4))
    with pytest.raises(KeyError), saver:  # what came first is shown
        raise KeyError("training failed")


def test_unwritable_folders_are_refused_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/out"):
        check_writable(tmp_path / "file" / "out")
    with pytest.raises(CheckpointError, match="bytes left"):
        check_writable(tmp_path, needed_bytes=2 * shutil.disk_usage(tmp_path).free)


@pytest.fixture
def mounted(tmp_path: Path):
    """Mounts a file system of a given size; skips where that is not allowed."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("file systems cannot be mounted here")
        return folder

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_file_system_is_refused(mounted) -> None:
    with pytest.raises(CheckpointError, match="Read-only file system"):
        check_writable(mounted("ro,size=64k") / "out")


def test_a_full_disk_leaves_the_older_checkpoint_and_no_rubbish(mounted) -> None:
    folder = mounted("size=512k")
    first = save_checkpoint(folder, random_state(1))
    save_checkpoint(folder, replace(random_state(2), backbone={"w": torch.zeros(300, 300)}))
    too_large = replace(random_state(3), backbone={"w": torch.zeros(400, 400)})
    with pytest.raises(CheckpointError, match=r"step 3 .*No space left on device.* free some"):
        save_checkpoint(folder, too_large)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002"]
    assert_states_equal(load(first), random_state(1))
    with AsyncSaver(folder) as saver:
        saver.save(too_large)
        with pytest.raises(CheckpointError, match="No space left"):
            saver.wait()
    save_checkpoint(folder, random_state(4), keep=1)  # and it goes on when there is room
    assert list(list_steps(folder)) == [4]


def test_a_limit_on_file_sizes_is_like_a_full_disk(tmp_path: Path) -> None:
    """Needs no privileges, and hits in the middle of a file."""
    resource = pytest.importorskip("resource")
    save_checkpoint(tmp_path, random_state(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        large = replace(random_state(2), backbone={"w": torch.zeros(400, 400)})
        with pytest.raises(CheckpointError, match=r"File too large.* earlier checkpoints are"):
            save_checkpoint(tmp_path, large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


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
    return newest(folder).checkpoint


@pytest.mark.parametrize("written", [1, 2, 5])
def test_rows_written_by_w_ranks_load_into_v_ranks_bit_for_bit(
    tmp_path: Path, written: int
) -> None:
    states = [random_state(1, rank=rank, world=written) for rank in range(written)]
    checkpoint = save_in_threads(tmp_path, states)
    expected = random_state(1).head.tensors
    for world in (1, 2, 3, 60):
        for rank in range(world):
            start, stop = class_range(rank, world)
            head = load_checkpoint(checkpoint, start=start, stop=stop).head
            assert (head.start, head.stop) == (start, stop)
            assert head.tensors.keys() == {"prototypes", "momentum"}
            for name, rows in head.tensors.items():
                assert torch.equal(rows, expected[name][start:stop])
    with pytest.raises(ConfigError, match=f"{NUM_CLASSES}"):
        read_class_rows(checkpoint, 0, NUM_CLASSES + 1)


def test_ranks_without_classes_and_ranks_without_momentum(tmp_path: Path) -> None:
    rows = torch.randn(4, 3)
    states = [
        head_of(0, 4, prototypes=rows[:0]),
        head_of(0, 4, prototypes=rows[:2]),
        head_of(2, 4, prototypes=rows[2:], momentum=rows[2:]),
    ]
    checkpoint = save_in_threads(tmp_path, states)
    read = read_class_rows(checkpoint, 1, 4)
    assert torch.equal(read["prototypes"], rows[1:])
    assert torch.equal(read["momentum"], torch.cat([torch.zeros(1, 3), rows[2:]]))
    assert read_class_rows(checkpoint, 4, 4)["prototypes"].shape == (0, 3)


def test_gaps_overlaps_and_ranks_that_disagree_are_refused(tmp_path: Path) -> None:
    for ranges in (((0, 2), (3, 5)), ((0, 3), (2, 5)), ((0, 2), (2, 4))):
        states = [head_of(start, 5, prototypes=torch.zeros(stop - start, 2))
                  for start, stop in ranges]  # fmt: skip
        with pytest.raises(CheckpointError, match="class"):
            save_in_threads(tmp_path, states)
    with pytest.raises(CheckpointError, match=r"\[1, 2\]"):
        save_in_threads(tmp_path, [random_state(1, world=2), random_state(2, rank=1, world=2)])
    with pytest.raises(CheckpointError, match=r"\[2, 3\] classes"):
        save_in_threads(tmp_path, [head_of(0, k, prototypes=torch.zeros(2, 2)) for k in (2, 3)])
    assert not list(tmp_path.iterdir())


def values(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(4, 3, generator=generator).to(dtype),
        "running_var": torch.rand(4, generator=generator),
        "num_batches_tracked": torch.tensor(seed),
    }


def test_a_moving_average_is_the_weighted_sum_of_what_it_saw() -> None:
    average, decay = MovingAverage(0.9), 0.9
    for seed in range(6):
        seen = values(seed)
        average.update(seen)
        seen["weight"].zero_()  # the average is a copy
    weights = [decay**5] + [(1 - decay) * decay ** (5 - i) for i in range(1, 6)]
    for name in ("weight", "running_var"):
        expected = sum(w * values(i)[name].double() for i, w in enumerate(weights))
        torch.testing.assert_close(average.tensors[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert average.tensors["num_batches_tracked"] == 5
    for other in ({"weight": torch.zeros(3, 4)}, {"bias": torch.zeros(3)}):
        with pytest.raises(ShapeError, match=next(iter(other))):
            average.update({**values(1), **other})


def test_half_precision_weights_are_averaged_in_float32() -> None:
    """In bfloat16 a step of 1e-4 of the difference would be lost every time."""
    average = MovingAverage(0.9999)
    average.update({"weight": torch.ones(1, dtype=torch.bfloat16)})
    for _ in range(100):
        average.update({"weight": torch.zeros(1, dtype=torch.bfloat16)})
    torch.testing.assert_close(average.tensors["weight"], torch.tensor([0.9999**100]))


def test_the_mean_of_checkpoints(tmp_path: Path) -> None:
    states = [CheckpointState(seed, values(seed, torch.bfloat16)) for seed in (3, 1, 2)]
    checkpoints = [open_checkpoint(save_checkpoint(tmp_path, state)) for state in states]
    mean = average_checkpoints(checkpoints)
    exact = sum(values(seed, torch.bfloat16)["weight"].double() for seed in (1, 2, 3)) / 3
    assert torch.equal(mean["weight"], exact.bfloat16())
    assert mean["num_batches_tracked"] == 3  # the last one's, whatever the order


def test_weights_are_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "average.safetensors"
    for seed in (1, 2):
        write_weights(path, values(seed))
    assert torch.equal(load_file(path)["weight"], values(2)["weight"])
    with pytest.raises(CheckpointError, match="'weight'"):
        write_weights(path, {"weight": torch.eye(2).to_sparse()})
    with pytest.raises(CheckpointError, match="missing"):
        write_weights(tmp_path / "missing" / "average.safetensors", values(1))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
