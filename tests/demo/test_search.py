"""The search behind the settings: fair, resumable, parallel, and what is shipped comes from it."""

import json
from pathlib import Path

import pytest

from qmargin.demo import search
from qmargin.demo.losses import GRID, LOSSES
from qmargin.demo.recipe import Size
from qmargin.demo.search import main, read_records, run_search, trials
from qmargin.demo.search_page import best_settings, search_page, settings_of
from qmargin.errors import DataError

RESULTS = Path(__file__).parents[2] / "docs" / "results" / "demo-search.jsonl"
TINY = Size(
    num_classes=30,
    samples_per_class=3,
    epochs=1,
    batch_size=30,
    width=8,
    depth=0,
    embedding_dim=8,
    num_test=120,
    samples_test=4,
)


def test_every_loss_gets_the_same_effort():
    assert set(GRID) == set(LOSSES)
    assert {len(points) for points in GRID.values()} == {12}
    for key, points in GRID.items():
        assert len(set(points)) == 12
        assert all(LOSSES[key].alpha == alpha for alpha, _, _ in points) or key in (
            "entmax",
            "q_margin",
        )


def test_no_world_is_one_of_a_demo():
    wanted = trials(tuple(GRID), seeds=2, size=TINY)
    assert len(wanted) == 5 * 12 * 2
    assert {trial.seed for trial in wanted} == {1000, 1001}


def made(trial, tar=0.5):
    rates = {"0.01": 0.9, "0.001": 0.7, "0.0001": tar, "1e-05": 0.1}
    return {**trial.name, "device": "cpu", "eer": 0.02, "tar": rates}


def test_a_search_goes_on_where_it_stopped(tmp_path, monkeypatch):
    wanted = trials(("cosface",), seeds=1, size=TINY)[:4]
    taken = []

    def measure(trial):
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(trial)
        return made(trial)

    monkeypatch.setattr(search, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run_search(tmp_path / "s.jsonl", wanted)
    with (tmp_path / "s.jsonl").open("a") as file:
        file.write('{"key": "cosf')  # killed in the middle of a line
    monkeypatch.setattr(search, "measure", lambda trial: taken.append(trial) or made(trial))
    records = run_search(tmp_path / "s.jsonl", wanted)
    assert taken == list(wanted)
    assert [json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines()] == records
    other = [trial._replace(size=TINY._replace(epochs=2)) for trial in wanted]
    assert not any(trial.made(record) for trial in other for record in records)


@pytest.mark.slow
def test_trainings_side_by_side_find_what_one_finds(tmp_path):
    wanted = trials(("sparsemax",), seeds=1, size=TINY)[:2]
    alone = run_search(tmp_path / "alone.jsonl", wanted)
    together = run_search(tmp_path / "together.jsonl", wanted, jobs=2)

    def order(record):
        return record["margin"]

    assert sorted(alone, key=order) == sorted(together, key=order)
    assert all(0.0 < record["eer"] < 0.6 for record in alone)


def test_a_training_that_fails_accepts_nobody(monkeypatch):
    def fails(trial):
        raise DataError("too many steps were not finite")

    monkeypatch.setattr(search, "_validated", fails)
    record = search.measure(trials(("arcface",), seeds=1, size=TINY)[0])
    assert record["tar"]["0.0001"] == 0.0
    assert "not finite" in record["failed"]


def test_the_best_is_chosen_by_the_mean_over_worlds():
    first, second, third = trials(("q_margin",), seeds=1, size=TINY)[:3]
    records = [
        made(first, 0.5),
        made(first._replace(seed=1001), 0.3),
        made(second, 0.45),
        made(second._replace(seed=1001), 0.45),
        made(third, 0.9),  # in one world only: not finished
    ]
    best = best_settings(records)["q_margin"]
    assert (best.alpha, best.scale, best.margin) == GRID["q_margin"][1]
    assert best.score == pytest.approx(0.45)
    assert len(settings_of(records)) == 3
    page = search_page(records, "python -m qmargin.demo.search --out s.jsonl")
    assert "| **1.25** | **10** | **0.2** | **2** | **2.00** |" in page
    assert "**45.0 (45.0, 45.0)**" in page
    assert "--out s.jsonl" in page
    assert "synthetic" in page


def test_the_command_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "measure", made)
    out, page = tmp_path / "s.jsonl", tmp_path / "results" / "page.md"
    words = ["--out", str(out), "--losses", "cosface", "--seeds", "1", "--page", str(page)]
    assert main(words) == 0
    assert len(read_records(out)) == 12
    assert "## CosFace" in page.read_text()
    assert "[12/12] CosFace alpha 1 scale 64 margin 0.5" in capsys.readouterr().out


def test_bad_input_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--out", str(tmp_path / "s"), "--jobs", "0"])
    assert "at least 1" in capsys.readouterr().err
    (tmp_path / "s").write_text('{"a": 1}\n')
    with pytest.raises(DataError, match=r"line 1 of .* is not of a search"):
        read_records(tmp_path / "s")


def test_shipped_settings_are_those_that_the_search_found():
    if not RESULTS.exists():
        pytest.skip(f"no search in {RESULTS}")
    for key, best in best_settings(read_records(RESULTS)).items():
        loss = LOSSES[key]
        assert (loss.alpha, loss.scale, loss.margin) == (best.alpha, best.scale, best.margin)
