"""Saving and loading: what comes back, what is refused, and what is left on the disk."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from helpers.saving import NUM_CLASSES, fingerprint, random_state
from qmargin.errors import CheckpointError, ShapeError
from qmargin.training.checkpoint import (
    AsyncSaver,
    CheckpointState,
    HeadRows,
    check_writable,
    flatten,
    list_leftovers,
    list_steps,
    load_checkpoint,
    map_leaves,
    newest,
    open_checkpoint,
    read_part,
    save_checkpoint,
    set_aside,
    unflatten,
)
from qmargin.training.distributed import Process


def assert_states_equal(left: CheckpointState, right: CheckpointState) -> None:
    assert fingerprint(dict(left.backbone)) == fingerprint(dict(right.backbone))
    for field in ("parts", "loop"):
        texts = [flatten(getattr(state, field)) for state in (left, right)]
        assert texts[0][0] == texts[1][0]
        assert fingerprint(texts[0][1]) == fingerprint(texts[1][1])
    assert (left.step, left.recipe_yaml, left.recipe_sha256) == (
        right.step,
        right.recipe_yaml,
        right.recipe_sha256,
    )
    assert left.head is not None and right.head is not None
    assert (left.head.start, left.head.num_classes) == (right.head.start, right.head.num_classes)
    assert fingerprint(dict(left.head.tensors)) == fingerprint(dict(right.head.tensors))


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = random_state(12)
    path = save_checkpoint(tmp_path, state)
    assert path == tmp_path / "step-000012"
    assert_states_equal(load_checkpoint(open_checkpoint(path)), state)
    assert newest(tmp_path).checkpoint == open_checkpoint(path)


def test_every_file_is_one_that_common_tools_read(tmp_path: Path) -> None:
    state = random_state(3)
    path = save_checkpoint(tmp_path, state)
    assert {file.name for file in path.iterdir()} == {
        "manifest.json",
        "backbone.safetensors",
        "optimizer.safetensors",
        "optimizer.json",
        "scaler.safetensors",
        "scaler.json",
        "head-00000-of-00001.safetensors",
        "loop.json",
        "recipe.yaml",
    }
    weights = load_file(path / "backbone.safetensors")
    assert fingerprint(weights) == fingerprint(dict(state.backbone))
    for file in path.glob("*.json"):
        json.loads(file.read_text(), parse_constant=pytest.fail)  # no NaN: it is not JSON


def test_optimizers_go_on_exactly_after_a_round_trip(tmp_path: Path) -> None:
    """Integer keys, tuples and missing values of real state dicts survive."""
    parameters = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    results = []
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.01)
    for parameter in parameters:
        parameter.grad = torch.randn(5, 3)
    optimizer.step()
    path = save_checkpoint(
        tmp_path,
        CheckpointState(
            1, {"a": parameters[0], "b": parameters[1]}, parts={"optimizer": optimizer.state_dict()}
        ),
    )
    loaded = load_checkpoint(open_checkpoint(path))
    again = [torch.nn.Parameter(loaded.backbone[name]) for name in ("a", "b")]
    for parameter, copy in zip(parameters, again, strict=True):
        copy.grad = parameter.grad
    other = torch.optim.AdamW([{"params": again[:1]}, {"params": again[1:]}], lr=0.5)
    other.load_state_dict(loaded.parts["optimizer"])
    for some in (optimizer, other):
        some.step()
        results.append(fingerprint(flatten(some.state_dict())[1]))
    assert results[0] == results[1]
    assert all(torch.equal(p, q) for p, q in zip(parameters, again, strict=True))


def test_channels_last_and_strided_tensors_keep_their_values(tmp_path: Path) -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    path = save_checkpoint(tmp_path, CheckpointState(1, {"w": weight, "t": weight[0, 0].t()}))
    loaded = load_checkpoint(open_checkpoint(path)).backbone
    assert torch.equal(loaded["w"], weight) and torch.equal(loaded["t"], weight[0, 0].t())


def test_tensors_of_all_dtypes_are_aligned_and_exact(tmp_path: Path) -> None:
    tensors = {
        f"{index}": torch.arange(3).to(dtype)
        for index, dtype in enumerate(
            (torch.bool, torch.uint8, torch.float64, torch.int16, torch.bfloat16, torch.int64)
        )
    }
    path = save_checkpoint(tmp_path, CheckpointState(1, tensors))
    assert fingerprint(load_checkpoint(open_checkpoint(path)).backbone) == fingerprint(tensors)


def test_names_that_look_like_paths_do_not_collide(tmp_path: Path) -> None:
    tree = {"a/b": torch.zeros(2), "a": {"b": torch.ones(2)}, "$tensor": "x", 3: [()], "": None}
    text, tensors = flatten(tree)
    back = unflatten(text, tensors)
    assert torch.equal(back["a/b"], torch.zeros(2)) and torch.equal(back["a"]["b"], torch.ones(2))
    assert (back["$tensor"], back[3], back[""]) == ("x", [()], None)
    with AsyncSaver(tmp_path) as saver:  # its host memory is one buffer per tensor as well
        saver.save(CheckpointState(1, parts={"odd": tree}))
    part = load_checkpoint(open_checkpoint(tmp_path / "step-000001")).parts["odd"]
    assert torch.equal(part["a/b"], torch.zeros(2)) and torch.equal(part["a"]["b"], torch.ones(2))


@pytest.mark.parametrize("text", ["[", '{"$tensor": "gone"}', '{"$code": 1}', '{"$items": 3}'])
def test_a_foreign_tree_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError, match="the state is damaged"):
        unflatten(text, {})


def test_objects_are_refused_by_place() -> None:
    with pytest.raises(CheckpointError, match="state/0/hook is a function"):
        flatten({"state": [{"hook": lambda: None}]})
    with pytest.raises(CheckpointError, match=r"key 1\.5"):
        flatten({1.5: 0})


def test_states_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="momentum is"):
        HeadRows(0, 3, {"prototypes": torch.zeros(3, 2), "momentum": torch.zeros(2, 2)})
    with pytest.raises(ShapeError, match="classes 2 to 5 of 4"):
        HeadRows(2, 4, {"prototypes": torch.zeros(3, 2)})
    with pytest.raises(CheckpointError, match=r"'\.\./x'"):
        CheckpointState(1, parts={"../x": {}})
    with pytest.raises(CheckpointError, match=r"'counter' is a .*int"):
        save_checkpoint(tmp_path, CheckpointState(1, {"counter": 3}))  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="loop holds the tensor 'x'"):
        save_checkpoint(tmp_path, CheckpointState(1, loop={"x": torch.ones(1)}))
    with pytest.raises(CheckpointError, match="strided"):
        save_checkpoint(tmp_path, CheckpointState(1, {"s": torch.eye(2).to_sparse()}))
    head = HeadRows(0, 4, {"prototypes": torch.zeros(3, 2)})
    with pytest.raises(CheckpointError, match="shards end at class 3 of 4"):
        save_checkpoint(tmp_path, CheckpointState(1, head=head))
    with pytest.raises(CheckpointError, match="control group"):
        save_checkpoint(tmp_path, CheckpointState(1), process=Process(0, 2))
    assert not list(tmp_path.iterdir())  # nothing half-written stays


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 999_999, 1_000_000):
        save_checkpoint(tmp_path, random_state(step), keep=2)
    assert list(list_steps(tmp_path)) == [1_000_000, 999_999]
    search = newest(tmp_path)
    assert search.checkpoint is not None and search.checkpoint.step == 1_000_000


def test_pruning_spares_what_was_just_written(tmp_path: Path) -> None:
    """A run that resumed from an older checkpoint has bad ones ahead of it; they do not count."""
    for step in (1, 8, 9):
        save_checkpoint(tmp_path, random_state(step), keep=5)
    save_checkpoint(tmp_path, random_state(2), keep=1)
    assert list(list_steps(tmp_path)) == [9, 8, 2]
    assert set_aside(tmp_path, 2) == [tmp_path / "step-000009", tmp_path / "step-000008"]
    search = newest(tmp_path)
    assert search.checkpoint is not None and search.checkpoint.step == 2
    assert len(list(tmp_path.glob("step-*.aside-*"))) == 2


def test_a_whole_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    first = save_checkpoint(tmp_path, random_state(4))
    before = open_checkpoint(first).sha256
    again = replace(random_state(4), loop={"seconds": 3.0})
    assert save_checkpoint(tmp_path, again) == first  # the same weights: nothing to do
    with pytest.raises(CheckpointError, match="exists with other values"):
        save_checkpoint(tmp_path, random_state(4, seed=1))
    assert open_checkpoint(first).sha256 == before
    assert not list_leftovers(tmp_path)


def test_a_bad_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, random_state(4))
    (path / "loop.json").write_text("{}")
    save_checkpoint(tmp_path, random_state(4, seed=1))
    assert_states_equal(load_checkpoint(open_checkpoint(path)), random_state(4, seed=1))


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
            assert fresh.head is not None
            for name, tensor in state.head.tensors.items():
                tensor.copy_(fresh.head.tensors[name])
            saver.save(replace(fresh, head=state.head))
            for tensor in state.head.tensors.values():
                tensor.fill_(float("nan"))
            map_leaves(fresh.backbone, lambda _, tensor: tensor.zero_())
    for step, path in list_steps(tmp_path).items():
        assert_states_equal(load_checkpoint(open_checkpoint(path)), random_state(step))
    assert len(list_steps(tmp_path)) == 5


def test_errors_of_background_saves_are_raised(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    saver = AsyncSaver(blocked)
    saver.save(random_state(1))
    with pytest.raises(CheckpointError, match="step 1 was not saved"):
        saver.wait()
    assert saver.poll() is None  # raised once
    saver.save(random_state(2))
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        saver.save(random_state(3))
    saver.save(random_state(4))
    with pytest.raises(KeyError), saver:  # what came first is shown
        raise KeyError("training failed")


def test_poll_reports_a_finished_save_once(tmp_path: Path) -> None:
    saver = AsyncSaver(tmp_path)
    assert saver.poll() is None and not saver.is_busy
    saver.save(random_state(1))
    while saver.is_busy:
        pass
    assert saver.poll() == tmp_path / "step-000001"
    assert saver.poll() is None


def test_a_missing_part_names_the_others(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, random_state(1)))
    with pytest.raises(CheckpointError, match="no part 'ema'; it has optimizer, scaler"):
        read_part(checkpoint, "ema")


def test_the_size_of_a_checkpoint_is_known_before_it_is_written(tmp_path: Path) -> None:
    state = random_state(1)
    path = save_checkpoint(tmp_path, state)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert 0 < size - state.num_bytes() < 6000


def test_unwritable_folders_are_refused_before_the_run(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        check_writable(tmp_path / "file" / "out")
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(CheckpointError, match="bytes left"):
        check_writable(tmp_path, needed_bytes=2 * free)


@pytest.fixture
def mounted(tmp_path: Path):
    """Mounts a file system of a given size; skips where that is not allowed."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            done = False
        if not done:
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
    large = replace(random_state(2), backbone={"w": torch.zeros(300, 300)})
    save_checkpoint(folder, large)
    too_large = replace(random_state(3), backbone={"w": torch.zeros(400, 400)})
    message = r"step 3 was not saved: No space left on device.* free some space and resume"
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(folder, too_large)
    assert sorted(path.name for path in folder.iterdir()) == ["step-000001", "step-000002"]
    assert_states_equal(load_checkpoint(open_checkpoint(first)), random_state(1))
    with pytest.raises(CheckpointError, match="bytes left"):
        check_writable(folder, needed_bytes=too_large.num_bytes())
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


def test_head_rows_without_a_head(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, CheckpointState(1, {"w": torch.ones(2)}))
    state = load_checkpoint(open_checkpoint(path))
    assert state.head is None
    assert_close(state.backbone["w"], torch.ones(2))


def test_all_classes_are_read_by_default(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, random_state(1))
    head = load_checkpoint(open_checkpoint(path)).head
    assert head is not None and (head.start, head.stop) == (0, NUM_CLASSES)
