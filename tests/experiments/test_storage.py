"""Several processes share an experiment through an Optuna storage."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.experiments import run, small_sweep, start, wait_for
from qmargin.errors import ConfigError
from qmargin.experiments import storage
from qmargin.experiments.run import RESULT

optuna = pytest.importorskip("optuna")
SHARED = """
    url, what = words
    if what == "optuna":
        made = small_sweep("loss.scale=8:64:log", method="optuna", num_points=6)
    else:
        made = small_comparison(seeds=(0, 1))
    finished, said = run(made, Path(out), storage=url)
    print(len(finished.rounds[0]), "rows,", sum("elsewhere" in line for line in said), "elsewhere")
"""


def url_of(kind: str, folder: Path) -> str:
    return f"sqlite:///{folder}/trials.db" if kind == "sqlite" else f"journal:{folder}/trials.log"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "what"), [("sqlite", "grid"), ("journal", "optuna")])
def test_two_processes_do_not_repeat_runs(tmp_path: Path, kind: str, what: str) -> None:
    """In folders of their own, as on two machines."""
    url = url_of(kind, tmp_path)
    processes = [start(tmp_path / name, SHARED, url, what) for name in ("first", "second")]
    said = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    names = [path.parent.name for path in tmp_path.glob(f"*/search/*/{RESULT}")]
    wanted = 6 if what == "optuna" else 2
    assert len(names) == len(set(names)) == wanted  # together all of them, none twice
    assert all(text.startswith(f"{wanted} rows") for text in said), said
    if what == "grid":  # both know what was chosen, and share out the runs that are tested
        tested = [path.parent.name for path in tmp_path.glob(f"*/runs/*/{RESULT}")]
        assert len(tested) == len(set(tested)) == 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", "journal"])
def test_runs_of_a_process_that_was_killed_are_taken_over(tmp_path: Path, kind: str) -> None:
    url = url_of(kind, tmp_path)
    process = start(tmp_path / "out", SHARED, url, "grid")
    wait_for("out/search/*/checkpoints", tmp_path, process)
    process.kill()
    process.communicate()
    again = start(tmp_path / "out", SHARED, url, "grid")  # in the same folder
    assert again.communicate(timeout=240)[0].startswith("2 rows, 0 elsewhere")
    assert len(list(tmp_path.glob(f"out/runs/*/{RESULT}"))) == 4


def test_tables_that_are_made_at_once(tmp_path: Path) -> None:
    """Several openers of a new database each find tables missing that another has just made."""
    storage.open_storage(url_of("sqlite", tmp_path))  # the imports
    barrier = threading.Barrier(4)

    def open_at_once(url: str) -> str:
        barrier.wait(timeout=60)
        return type(storage.open_storage(url)).__name__

    with ThreadPoolExecutor(4) as pool:
        for again in range(5):
            url = f"sqlite:///{tmp_path}/at_once{again}.db"
            assert list(pool.map(open_at_once, [url] * 4)) == ["RDBStorage"] * 4


def test_a_folder_that_was_removed_is_trained_again(tmp_path: Path) -> None:
    url = url_of("journal", tmp_path)
    experiment = small_sweep("loss.scale=10,16")
    run(experiment, tmp_path / "out", storage=url)
    folder = next((tmp_path / "out" / "search").iterdir())
    (folder / RESULT).unlink()
    finished, said = run(experiment, tmp_path / "out", storage=url)
    assert "2 runs, 1 of them complete" in said and len(finished.rounds[0]) == 2


@pytest.mark.parametrize(
    "url",
    [
        "trials.db",
        "sqlite:////nowhere/at/all/trials.db",
        "journal:/nowhere/at/all/trials.log",
        "redis://127.0.0.1:9/0",
        "postgresql://nobody@127.0.0.1:9/none",
        "nonsense://x",
    ],
)
def test_a_storage_that_cannot_be_reached_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="storage"):
        run(small_sweep("loss.scale=10"), tmp_path / "new", storage=url)
    assert not (tmp_path / "new").exists()


def test_a_process_without_a_heartbeat_is_gone(tmp_path: Path) -> None:
    book = storage.RunBook(url_of("journal", tmp_path), "x", measure="eer")
    study = book._study("arm")
    trial = study.ask()
    for name, value in {"host": "another", "pid": 1, "seen": time.time() - 10}.items():
        trial.set_user_attr(name, value)
    assert book.is_alive(study.trials[0])
    trial.set_user_attr("seen", time.time() - storage.STALE_S - 1)
    assert not book.is_alive(study.trials[0])
