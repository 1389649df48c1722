"""Settings are chosen fairly, and those that the demo ships are those that were chosen."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import qmargin
from qmargin.cli.main import main
from qmargin.demo.losses import GRID, LARGE, LOSSES
from qmargin.demo.recipe import SIZES, Size, demo_recipe
from qmargin.errors import ConfigError, DataError
from qmargin.study import studies
from qmargin.study.page import edges_of, margins_of, search_page
from qmargin.study.run import StudyOptions
from qmargin.study.search import (
    Tried,
    choose,
    finalists_of,
    gather,
    grid_of,
    point_of,
    read_chosen,
    read_rounds,
    read_search,
)
from qmargin.study.studies import SYSTEMS, Study, find_study
from qmargin.sweep import slots
from qmargin.sweep.trial import State, Trial, TrialResult

RECORD = Path(__file__).parents[2] / "docs" / "results" / "demo-search.json"
MEASURE = "tar@0.0001"
GRIDS = {
    "cosface": ((1.0, 16.0, 0.1), (1.0, 16.0, 0.2), (1.0, 32.0, 0.2)),
    "q_margin": ((1.25, 10.0, 0.1), (1.25, 10.0, 0.2), (1.5, 10.0, 0.2)),
}
TWO_SEEDS = Study(
    "two",
    "two seeds",
    "strokes",
    Size(num_classes=4, samples_per_class=2, batch_size=4),
    search_epochs=1,
    grid=GRIDS,
    losses=tuple(GRIDS),
    search_seeds=2,
)


def result(key: str, place: int, seed: int, tar: float, state: State = "finished") -> TrialResult:
    metrics = {"eer": 0.02, MEASURE: tar} if state == "finished" else {}
    return TrialResult(point_of(key, GRIDS[key][place]), seed, "", state, 1, metrics, 1.0)


def test_the_best_is_chosen_by_the_mean_over_seeds() -> None:
    results = [
        result("q_margin", 0, 1000, 0.5),
        result("q_margin", 0, 1001, 0.3),
        result("q_margin", 1, 1000, 0.45),
        result("q_margin", 1, 1001, 0.45),
        result("q_margin", 2, 1000, 0.8),
        result("q_margin", 2, 1001, 0.9, "failed"),  # it accepted nobody
        result("q_margin", 0, 1002, 0.99),  # of no seed of the search
    ]
    tried = gather(TWO_SEEDS, grid_of(TWO_SEEDS, ["q_margin", "sampled"]), results)
    assert [one.mean(MEASURE) for one in tried] == pytest.approx([0.4, 0.45, 0.4])
    assert [one.num_failed for one in tried] == [0, 0, 1]
    assert tried[2].values("eer") == [0.02, 1.0]
    assert choose(tried, MEASURE) == {"q_margin": GRIDS["q_margin"][1]}


def test_a_loss_without_any_training_is_refused() -> None:
    results = [result("cosface", place, 1000, 0.9, "failed") for place in range(3)]
    with pytest.raises(DataError, match="no training of cosface ended well"):
        choose(gather(TWO_SEEDS, grid_of(TWO_SEEDS, ["cosface"]), results), MEASURE)


def test_a_measure_that_was_not_measured_is_refused() -> None:
    tried = [Tried("cosface", (1.0, 16.0, 0.2), ({"eer": 0.1},))]
    with pytest.raises(DataError, match=r"too few pairs for tar@0\.0001.*they measure eer"):
        choose(tried, MEASURE)


def test_every_loss_of_the_demo_gets_the_same_effort() -> None:
    study = find_study("demo")
    assert study.grid == GRID
    assert {len(settings) for settings in GRID.values()} == {12}
    assert "sampled" not in study.losses
    assert study.seeds_of_search == range(1000, 1002)
    for key, settings in GRID.items():
        is_free = key in ("entmax", "q_margin")
        assert is_free or {alpha for alpha, _, _ in settings} == {LOSSES[key].alpha}


def test_settings_of_the_demo_are_tried_by_its_own_recipe() -> None:
    made = find_study("demo").recipe(LOSSES["q_margin"], seed=1000, epochs=10, path=None)
    demo = demo_recipe(LOSSES["q_margin"], seed=1000, size=SIZES["cpu"])
    assert made == demo


def test_negative_sampling_is_no_loss_of_the_demo(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sampled"):
        StudyOptions(find_study("demo"), tmp_path, losses=("arcface", "sampled"))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Trainings that take no time: the larger the margin, the better; one diverges.

    A large scale is good in a short training, and bad in a long one.
    """
    run: list[Trial] = []

    def trained(trial: Trial, options: object, device: str) -> TrialResult:
        run.append(trial)
        recipe = trial.recipe
        fails = recipe.loss.alpha == 1.5 and recipe.seed == 1001
        is_long = trial.folder.parent.name == "finalists"
        is_large = (recipe.loss.scale == 32.0) != is_long
        tar = recipe.loss.margin + is_large + 0.01 * (recipe.seed - 1000)
        found = TrialResult(
            trial.point,
            recipe.seed,
            recipe.sha256,
            "failed" if fails else "finished",
            1,
            {} if fails else {"eer": 0.1, MEASURE: tar / 2},
            1.0,
        )
        trial.folder.mkdir(parents=True)
        content = {"format": "qmargin-sweep-trial", **vars(found)}
        (trial.folder / "result.json").write_text(json.dumps(content))
        return found

    monkeypatch.setattr(slots, "_run", trained)
    monkeypatch.setattr("qmargin.study.pictures.draw_to", lambda *arguments, **options: None)
    monkeypatch.setitem(studies.STUDIES, "two", TWO_SEEDS)
    return run


def test_a_search_from_the_command_line(
    measured: list[Trial], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "two", tmp_path / "results" / "two-search.md"
    command = ["study", "two", "--search-only", "--out", str(out), "--page", str(page)]
    assert main([*command, "--losses", "cosface"]) == 0
    assert len(measured) == 6
    assert read_chosen(out / "chosen.json") == {"cosface": (1.0, 32.0, 0.2)}
    assert main(command) == 0  # the other loss chooses, the first has chosen
    assert len(measured) == 12
    assert [trial.recipe.seed for trial in measured] == 2 * ([1000] * 3 + [1001] * 3)
    assert main(command) == 0
    assert len(measured) == 12
    assert not (out / "final").exists()
    assert f"settings: {out / 'chosen.json'}" in capsys.readouterr().out

    text = page.read_text()
    assert "| CosFace | 1 | 32 | 0.2 | 2.83 | 10.00 ± 0.00 | 60.25 ± 0.35 | chosen |" in text
    soft, hard = (
        qmargin.hardness(alpha, 10.0, num_classes=4, embedding_dim=128).mean
        for alpha in (1.25, 1.5)
    )
    row = f"| Q-Margin | 1.25 | 10 | 0.2 | {soft:.2f} | 10.00 ± 0.00 | 10.25 ± 0.35 | chosen |"
    assert row in text
    row = f"| Q-Margin | 1.5 | 10 | 0.2 | {hard:.2f} | 55.00 ± 63.64 | 5.00 ± 7.07 | 1 failed |"
    assert row in text
    assert "synthetic" in text
    assert "Negative sampling" not in text

    rounds, measure = read_search(page.with_suffix(".json"))
    assert rounds == read_rounds(TWO_SEEDS, out, TWO_SEEDS.losses)
    assert choose(rounds[-1], measure) == read_chosen(out / "chosen.json")


def test_finalists_differ_in_alpha_or_scale_as_long_as_there_are_such() -> None:
    easy, hard, sparse = (1.0, 16.0), (1.0, 32.0), (1.5, 16.0)
    by_tar = [(*easy, 0.2), (*easy, 0.1), (*hard, 0.1), (*easy, 0.3), (*sparse, 0.1), (*hard, 0.2)]
    tried = [Tried("x", one, ({MEASURE: 1.0 - 0.1 * rank},)) for rank, one in enumerate(by_tar)]
    best = [(*easy, 0.2), (*hard, 0.1), (*sparse, 0.1), (*easy, 0.1), (*hard, 0.2), (*easy, 0.3)]
    for count in range(7):
        assert finalists_of(tried[::-1], MEASURE, count) == {"x": best[:count]}


def test_the_best_of_a_short_search_are_trained_as_long_as_the_final_trainings(
    measured: list[Trial], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = replace(TWO_SEEDS, search_seeds=1, finalists=2)
    monkeypatch.setitem(studies.STUDIES, "two", study)
    out, page = tmp_path / "two", tmp_path / "page.md"
    command = ["study", "two", "--search-only", "--out", str(out), "--page", str(page)]
    assert main(command) == 0
    long = [trial for trial in measured if trial.recipe.run.epochs == study.size.epochs]
    assert {trial.recipe.run.epochs for trial in measured[:6]} == {study.search_epochs}
    assert long == measured[6:]
    assert {trial.folder.parent.name for trial in long} == {"finalists"}
    assert [(trial.point["loss"], trial.point["scale"]) for trial in long] == [
        ("cosface", "32"),
        ("cosface", "16"),
        ("q_margin", "10"),
        ("q_margin", "10"),
    ]
    assert {trial.point["alpha"] for trial in long} == {"1", "1.25", "1.5"}
    assert {trial.recipe.seed for trial in long} == {1000}
    # the second of the short search was best after the long one, as the fixture has it
    assert read_chosen(out / "chosen.json")["cosface"] == (1.0, 16.0, 0.2)
    text = page.read_text()
    assert "and with the best 2 of different alpha or scale for 10 epochs, and chose" in text
    assert text.index("After 10 epochs:") < text.index("After 1 epoch:")
    rounds, measure = read_search(page.with_suffix(".json"))
    assert [len(tried) for tried in rounds] == [6, 4]
    assert choose(rounds[-1], measure) == read_chosen(out / "chosen.json")
    assert main(command) == 0
    assert len(measured) == 10  # nothing is trained twice


def test_what_was_chosen_before_there_were_finalists_is_refused(
    measured: list[Trial],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    study = replace(TWO_SEEDS, search_seeds=1)
    monkeypatch.setitem(studies.STUDIES, "two", study)
    command = ["study", "two", "--search-only", "--out", str(tmp_path), "--losses", "cosface"]
    assert main(command) == 0
    monkeypatch.setitem(studies.STUDIES, "two", replace(study, finalists=2))
    assert main(command) == 2
    assert "never trained as long as two asks for; remove it" in capsys.readouterr().err
    assert len(measured) == 3
    (tmp_path / "chosen.json").unlink()
    assert main(command) == 0
    assert len(measured) == 5
    assert main(command) == 0
    (tmp_path / "search" / "cosface-1-16-0.1-1000" / "result.json").unlink()
    with pytest.raises(DataError, match=r"no whole search of two, cosface, 1, 16, 0\.1 is missing"):
        search_page(replace(study, finalists=2), tmp_path, command="", machine="")


def test_a_folder_without_a_search_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no search of two"):
        search_page(TWO_SEEDS, tmp_path, command="", machine="")


def test_files_that_are_no_search_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"format": "another"}')
    with pytest.raises(DataError, match="not the record of a search"):
        read_search(path)
    path.write_text('{"arcface": [1.0, 16.0]}')
    with pytest.raises(DataError, match="remove it to choose again"):
        read_chosen(path)


def test_shipped_settings_are_those_that_the_search_chose() -> None:
    if not RECORD.exists():
        pytest.skip(f"no search in {RECORD}; see docs/guide/demo.md for the command")
    (tried,), measure = read_search(RECORD)
    assert {(one.key, one.setting) for one in tried} == {
        (key, setting) for key, settings in GRID.items() for setting in settings
    }
    shipped = {key: (loss.alpha, loss.scale, loss.margin) for key, loss in LOSSES.items()}
    assert choose(tried, measure) == shipped


def test_settings_for_a_gpu_are_those_of_the_study() -> None:
    page = (Path(__file__).parents[2] / "docs" / "results" / "strokes-10k.md").read_text()
    rows = [line.split("|")[1:6] for line in page.splitlines() if line.endswith("| chosen |")]
    chosen = {row[0].strip(): tuple(map(float, row[1:4])) for row in rows}
    assert {loss.title: (loss.alpha, loss.scale, loss.margin) for loss in LARGE.values()} == chosen


def test_a_choice_at_an_edge_is_named() -> None:
    grid = ((1.25, 7.0, 0.2), (1.25, 7.0, 0.4), (1.25, 10.0, 0.3), (1.5, 4.0, 0.3))
    assert edges_of((1.25, 7.0, 0.4), grid) == ["smallest scale", "largest margin"]
    assert edges_of((1.25, 10.0, 0.3), grid) == ["largest scale"]
    assert edges_of((1.5, 4.0, 0.3), grid) == []  # nothing beside it was tried
    assert edges_of((1.25, 10.0, 0.3), (*grid, (1.25, 16.0, 0.3))) == []


def test_losses_with_one_margin_are_named() -> None:
    study = find_study("strokes-1m")
    assert {key: len(margins_of(study, key)) for key in study.grid} == dict.fromkeys(study.grid, 1)
    study = find_study("strokes-10k")
    assert {key: len(margins_of(study, key)) for key in study.grid} == dict.fromkeys(study.grid, 3)


def test_the_readme_says_what_the_pages_found() -> None:
    root = Path(__file__).parents[2]
    lines = (root / "README.md").read_text().splitlines()
    start = next(row for row, line in enumerate(lines) if line.startswith("| data | FAR |"))
    names = [cell.strip() for cell in lines[start].split("|")[3:-3]]
    page = ""
    rows = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))
    assert len(rows) >= 8
    for line in rows:
        data, far, *cells, ahead, behind = (cell.strip() for cell in line.split("|")[1:-1])
        if data:
            (target,) = re.findall(r"\((.*?)\)", data)
            page = (root / target).read_text()
        assert dict(zip(names, cells, strict=True)) == _column(page, _power(far))
        assert [ahead, behind] == _compared(page, _power(far))


def _power(far: str) -> str:
    return "10⁻" + "⁰¹²³⁴⁵⁶"[int(far.removeprefix("1e-"))]


def _column(page: str, far: str) -> dict[str, str]:
    """TARs at a FAR by system, of the first table of a page."""
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    heads = [cell.strip() for cell in rows[0]]
    place = heads.index(f"TAR % at {far}")
    table = itertools.takewhile(lambda row: len(row) == len(heads), rows[2:])
    return {row[0].strip(): row[place].strip() for row in table}


def _compared(page: str, far: str) -> list[str]:
    """Whom Q-Margin is ahead of at a FAR, and whom it is behind, by the intervals of a page."""
    lines = page.splitlines()
    start = next(row for row, line in enumerate(lines) if line.startswith("| Q-Margin minus |"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    heads, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table)
    place = heads.index(f"at {far}")
    ahead: list[str] = []
    behind: list[str] = []
    for cells in rows:
        bounds = re.findall(r"[+\u2212][0-9.]+", cells[place])[1:]
        low, high = (float(text.replace("\u2212", "-")) for text in bounds)
        name = "ArcFace 10 %" if cells[0] == SYSTEMS["sampled"].title else cells[0]
        ahead += [name] * (low > 0.0)
        behind += [name] * (high < 0.0)
    return [", ".join(names) or "nobody" for names in (ahead, behind)]
