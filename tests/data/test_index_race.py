"""Several processes that open the same data while its index is being built."""

import errno
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.pictures import jpeg, write_folder
from qmargin.data import open as opening
from qmargin.data import open_dataset
from qmargin.data.index import default_index

IMAGES = [jpeg(seed) for seed in range(8)]
LABELS = [0, 0, 0, 1, 1, 2, 2, 2]


def _open_at_once(root: Path, start: Any, results: Any) -> None:
    start.wait()
    dataset = open_dataset(root)
    results.put((len(dataset), dataset.index.path.read_bytes()))


def test_processes_that_open_the_same_data_at_once_find_one_whole_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One builds, slowly; the others wait for it and build nothing."""
    root = write_folder(tmp_path / "faces", IMAGES, LABELS)
    context = multiprocessing.get_context("fork")
    builds = context.Value("i", 0)
    layout = opening._LAYOUTS["folder"]

    def slowly(*arguments: Any, **options: Any) -> None:
        with builds.get_lock():
            builds.value += 1
        time.sleep(0.5)
        layout.build(*arguments, **options)

    monkeypatch.setitem(opening._LAYOUTS, "folder", replace(layout, build=slowly))
    start, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_open_at_once, args=(root, start, results)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert builds.value == 1
    assert {length for length, _ in found} == {len(IMAGES)}
    assert len({content for _, content in found}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["faces", "faces.qmindex"]


def test_without_locks_each_process_builds_the_same_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def refused(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    root = write_folder(tmp_path / "faces", IMAGES, LABELS)
    contents = []
    for _ in range(2):
        opening.open_index(root, rebuild=True)
        contents.append(default_index(root).read_bytes())
    assert contents[0] == contents[1]
    assert "other processes may build it too" in caplog.text
