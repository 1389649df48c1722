"""A demo in a folder that lost some of its files."""

import json
import shutil

import numpy as np
import pytest

from helpers.tiny_demo import TINY, options_for, patch_demo
from qmargin.demo import plan
from qmargin.demo.losses import LOSSES
from qmargin.demo.run import run_demo
from qmargin.errors import CheckpointError, ConfigError
from qmargin.evaluation.result import read_result

LONGER = TINY._replace(epochs=2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    patch_demo(monkeypatch, LONGER)


def results_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("seed-*/*/result.json")}


def test_pictures_that_are_gone_are_drawn_again(tmp_path):
    first = run_demo(options_for(tmp_path)).read_text(encoding="utf-8")
    before = results_of(tmp_path)
    pictures = {path: path.read_bytes() for path in (tmp_path / "pictures").rglob("*.png")}
    shutil.rmtree(tmp_path / "pictures")
    assert run_demo(options_for(tmp_path)).read_text(encoding="utf-8") == first
    assert all(path.read_bytes() == content for path, content in pictures.items())
    next(iter(pictures)).unlink()  # and a single one
    run_demo(options_for(tmp_path))
    assert all(path.exists() for path in pictures)
    assert results_of(tmp_path) == before


def test_a_journal_that_is_gone_is_done_without(tmp_path, capsys):
    run_demo(options_for(tmp_path))
    journal = tmp_path / "seed-0" / "cosface" / "journal.jsonl"
    journal.unlink()
    capsys.readouterr()
    run_demo(options_for(tmp_path))
    assert "the journal of" not in capsys.readouterr().out  # the copy is still there
    shutil.rmtree(tmp_path / "journals")
    run_demo(options_for(tmp_path))
    said = capsys.readouterr().out
    assert "the journal of CosFace, seed 0 is gone or damaged" in said
    assert f"remove {journal.parent} and run again" in said and "Q-Margin, seed 0 is" not in said


def test_a_damaged_journal_is_done_without(tmp_path, capsys):
    run_demo(options_for(tmp_path, losses=("cosface",)))
    shutil.rmtree(tmp_path / "journals")
    (tmp_path / "seed-0" / "cosface" / "journal.jsonl").write_text("{\n{}\n")
    run_demo(options_for(tmp_path, losses=("cosface",)))
    assert "the journal of CosFace, seed 0 is gone or damaged" in capsys.readouterr().out


def test_a_damaged_checkpoint_costs_one_part(tmp_path):
    run_demo(options_for(tmp_path))
    part = tmp_path / "seed-0" / "cosface"
    (part / "result.json").unlink()
    for path in (part / "checkpoints").glob("step-*/*"):
        path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(CheckpointError) as refused:
        run_demo(options_for(tmp_path))
    words = f"remove the folder {part} and run the same command again: only CosFace, seed 0 is"
    assert words in str(refused.value)
    other = (tmp_path / "seed-0" / "q_margin" / "result.json").stat().st_mtime_ns
    shutil.rmtree(part)
    run_demo(options_for(tmp_path))
    assert (part / "result.json").exists()
    assert (tmp_path / "seed-0" / "q_margin" / "result.json").stat().st_mtime_ns == other


def lose_plan(folder):
    content = json.loads((folder / plan.PLAN).read_text(encoding="utf-8"))
    (folder / plan.PLAN).unlink()
    return content


@pytest.mark.parametrize("is_tested", [True, False])
def test_a_plan_that_is_gone_is_found_by_the_trainings(tmp_path, monkeypatch, capsys, is_tested):
    run_demo(options_for(tmp_path, minutes=1.0, losses=("cosface",)))
    before, results = lose_plan(tmp_path), results_of(tmp_path)
    if not is_tested:
        (tmp_path / "seed-0" / "cosface" / "result.json").unlink()
    monkeypatch.setattr(plan, "_seconds_per_step", lambda size, device: 1e3)
    run_demo(options_for(tmp_path))  # all losses, and a machine that is slower now
    after = json.loads((tmp_path / plan.PLAN).read_text(encoding="utf-8"))
    assert after["size"] == before["size"] and after["size"]["epochs"] != LONGER.epochs
    said = capsys.readouterr().out
    assert "plan.json is gone: going on with the length of the trainings there" in said
    assert not is_tested or results.items() <= results_of(tmp_path).items()


def test_a_plan_is_found_by_losses_that_are_not_asked_for(tmp_path, monkeypatch):
    run_demo(options_for(tmp_path, losses=("cosface",)))
    before = lose_plan(tmp_path)
    monkeypatch.setattr(plan, "_seconds_per_step", lambda size, device: 1e3)
    run_demo(options_for(tmp_path, losses=("q_margin",)))
    after = json.loads((tmp_path / plan.PLAN).read_text(encoding="utf-8"))
    assert after["size"] == before["size"]


def test_trainings_of_another_recipe_have_no_plan(tmp_path, monkeypatch):
    run_demo(options_for(tmp_path, losses=("cosface",)))
    lose_plan(tmp_path)
    monkeypatch.setitem(LOSSES, "cosface", LOSSES["cosface"]._replace(margin=0.33))
    with pytest.raises(ConfigError, match=r"no plan\.json, .* remove the folders seed-\*"):
        run_demo(options_for(tmp_path, losses=("cosface",)))


def test_given_pictures(tmp_path, monkeypatch, capsys):
    """Their plan can be found, too, and the settings are said to be of other data."""
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (160, 32, 32), dtype=np.uint8)
    data = tmp_path / "pictures.npz"
    np.savez(data, images=images, label=np.arange(160) // 4)
    out = tmp_path / "out"
    page = run_demo(options_for(out, data=data, minutes=0.7))
    said = capsys.readouterr().out
    assert "were chosen on synthetic strokes, not on these pictures" in said
    assert "with settings chosen on synthetic strokes" in page.read_text(encoding="utf-8")
    card = read_result(out / "seed-0" / "cosface" / "result.json").system.model_card
    assert card is not None and card["settings"].startswith("chosen on synthetic")
    before = results_of(out)
    lose_plan(out)
    shutil.rmtree(out / "pictures")
    monkeypatch.setattr(plan, "_seconds_per_step", lambda size, device: 1e3)
    run_demo(options_for(out, data=data))
    assert results_of(out) == before
