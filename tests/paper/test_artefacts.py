"""The paper's tables and figures from results, and from trainings that are made for them."""

import json
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from helpers.tiny_demo import patch_demo
from qmargin.cli.main import main
from qmargin.demo.recipe import Size
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import read_result, write_result
from qmargin.paper import figures, numbers, pairs, runs, tables
from qmargin.paper.layout import latex, markdown
from qmargin.paper.measured import Measured
from qmargin.paper.runs import Request, loss_of
from qmargin.paper.scale import scale_of
from qmargin.report.systems import load_panels

TINY = Size(
    num_classes=30,
    samples_per_class=4,
    epochs=1,
    batch_size=30,
    width=8,
    depth=0,
    embedding_dim=16,
    num_test=60,
    samples_test=4,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Five tiny losses with one seed, as ``qmargin paper table-sota`` trains them."""
    patch = pytest.MonkeyPatch()
    patch_demo(patch, TINY)
    out = tmp_path_factory.mktemp("paper")
    table = tables.table_sota(Request(out, device="cpu"))
    yield out, table
    patch.undo()


def test_methods_of_other_papers_stand_beside_ours(made):
    _, table = made
    text = markdown(table)
    assert "| TopoFR | WF42M | R-200 | NeurIPS24 | - | - | 98.01 | 97.10 | - |" in text
    assert (
        "| Q-Margin (alpha=1.25, s=35, m=0.2) | WF42M | R-100 | - | **96.44** | **93.67** |" in text
    )
    assert "here, synthetic stroke identities: 1e-3" in text
    assert "trained on 30 identities, 1 epoch." in text
    assert "| *Re-implemented* |" in text
    made_latex = latex(table)
    assert "\\textit{Reported}}" in made_latex
    assert "ResNet$^{\\dagger}$" in made_latex and "F$^2$C" in made_latex
    assert "Q-Margin ($\\alpha=1.25$, $s=35$, $m=0.2$)" in made_latex
    assert "96.44} & \\textbf{93.67} & \\textbf{97.78} & \\textbf{96.35}" in made_latex
    assert "\\textbf{98.01}" not in made_latex  # reported numbers do not compete


def test_settings_stand_beside_those_of_the_paper(made, tmp_path):
    out, _ = made
    row = numbers.SPEAKER[-1]
    found = sorted((out / "runs").rglob("result.json"))
    result = read_result(found[0])
    card = {**result.system.model_card, "margin_kind": "prior"}
    card |= {"alpha": "1.5", "scale": "10", "margin": "0.1"}
    changed = replace(result, system=replace(result.system, name="mine", model_card=card))
    write_result(tmp_path / "result.json", changed)
    table = tables.table_speaker(Request(tmp_path, results=tmp_path))
    lines = markdown(table).splitlines()
    tar = next(100 * p.tar for p in result.metrics.tar if p.far_target == 1e-3)
    matching = next(line for line in lines if "| 1.5 | 10 | 0.1 |" in line)
    assert f"| {tar:.2f} |" in matching  # nothing to compare it with
    assert f"**{row.values[0]:.2f}**" in matching  # the paper's best, in bold as there
    assert len([line for line in lines if line.startswith("|")]) == 2 + len(numbers.SPEAKER)
    others = tables.table_face(Request(tmp_path, results=tmp_path))
    assert others.rows[-2] is None  # a setting that the paper does not have comes last
    assert others.rows[-1][:4] == ("mine", "1.5", "10", "0.1")


def test_seeds_have_a_mean_and_a_deviation(made, monkeypatch):
    out, _ = made
    table = tables.table_seeds(Request(out, device="cpu", seeds=2))
    (row,) = table.rows
    assert row[:4] == ("Q-Margin", "1.25", "32", "0.2")
    assert " +- " in row[4]
    assert "96.38 +- 0.07" in row
    assert "2 seeds" in table.caption
    assert "\\textbf" not in latex(table)  # one row is not the best of anything
    assert "$96.38 \\pm 0.07$" in latex(table)


def test_margins_beyond_reach_are_in_the_caption_and_no_warnings(made, monkeypatch):
    """Warnings are errors in tests, so that one of them would end the training."""
    out, _ = made
    rows = [row for row in numbers.FACE if row.setting[1:] in ((1.25, 32, 0.2), (1.25, 32, 0.5))]
    monkeypatch.setattr(numbers, "FACE", tuple(rows))
    table = tables.table_face(Request(out, device="cpu"))
    said = "Effective margins over 2, which no embedding reaches: Q-Margin (alpha=1.25, s=32, m=0.5"
    assert table.caption.endswith(f"{said}) 6.70.")


def test_rates_without_a_number_are_named(made, tmp_path):
    out, table = made
    lacking = "synthetic stroke identities has no TAR at FAR 1e-5 (needs 100,000 impostor pairs)."
    assert table.caption.endswith(lacking)
    result = read_result(sorted((out / "runs").rglob("result.json"))[0])
    protocol = replace(result.protocol, name="mine", num_impostors=5000)
    metrics = replace(result.metrics, tar=())
    write_result(tmp_path / "result.json", replace(result, protocol=protocol, metrics=metrics))
    text = markdown(tables.table_face(Request(tmp_path, results=tmp_path)))
    assert "5,000 impostor pairs, 1 seed" in text and "here, mine" not in text
    pairs_needed = "1e-4 (needs 10,000 impostor pairs), 1e-5 (needs 100,000 impostor pairs)"
    assert f"mine has no TAR at FAR 1e-3, {pairs_needed}." in text


def test_a_caption_has_the_fewest_and_the_most_pairs_of_the_seeds(made):
    out, _ = made
    result = read_result(sorted((out / "runs").rglob("result.json"))[0])
    found = [
        replace(result, protocol=replace(result.protocol, num_impostors=number))
        for number in (420, 393, 420)
    ]
    told = scale_of([Measured("ArcFace", None, "mine", tuple(found))])
    assert told.startswith("mine: 393 to 420 impostor pairs, 3 seeds; trained on ")


def test_pairs_are_drawn(made):
    out, _ = made
    path, page, tex = pairs.figure_pairs(Request(out, device="cpu"))
    picture = Image.open(path)
    assert picture.size == (3 * (8 * 70 + 6), 30 + 2 * (30 + 3 * 38) + 18)
    title = picture.crop((0, 0, picture.width, 30))
    assert title.getextrema()[0] < 80  # there are letters on the grey
    caption = page.read_text(encoding="utf-8")
    assert "![](figure-pairs.png)" in caption
    assert "synthetic stroke identities, seed 0" in caption
    assert "FAR 1e-3" in caption and "the other way round" in caption
    assert "\\includegraphics[width=\\textwidth]{figure-pairs.png}" in tex.read_text()


def test_pairs_of_given_models_train_and_write_nothing_there(made, tmp_path):
    out, _ = made
    given = tmp_path / "given"
    shutil.copytree(out / "runs", given)
    before = {path: path.stat().st_mtime_ns for path in given.rglob("*")}
    made_files = pairs.figure_pairs(Request(tmp_path / "out", results=given, device="cpu"))
    assert all(path.exists() for path in made_files)
    (given / "seed-0" / "arcface" / "result.json").rename(tmp_path / "kept.json")
    with pytest.raises(ConfigError, match="lacks arcface of seed 0") as refused:
        pairs.figure_pairs(Request(tmp_path / "out", results=given, device="cpu"))
    assert f"qmargin demo --out {given} --losses arcface q_margin" in str(refused.value)
    (tmp_path / "kept.json").rename(given / "seed-0" / "arcface" / "result.json")
    after = {path: path.stat().st_mtime_ns for path in given.rglob("*")}
    assert before.keys() == after.keys()
    assert all(before[path] == after[path] for path in before if path.is_file())


def test_pairs_need_the_models_of_a_demo(made, tmp_path):
    out, _ = made
    with pytest.raises(ConfigError, match="not a folder of `qmargin demo`"):
        pairs.figure_pairs(Request(out, results=out))
    shutil.copytree(out / "runs", tmp_path / "given")
    (tmp_path / "given" / "plan.json").write_text("[]")
    with pytest.raises(DataError, match="not the plan of a demo"):
        pairs.figure_pairs(Request(out, results=tmp_path / "given"))


def test_det_curves_become_a_page(made, monkeypatch, tmp_path):
    out, _ = made
    monkeypatch.setattr(figures, "has_matplotlib", lambda: False)
    pages = figures.figure_det_face(Request(tmp_path, results=out / "runs"))
    assert pages[0] == tmp_path / "figure-det-face" / "index.html"
    html = pages[0].read_text(encoding="utf-8")
    assert "figure: synthetic stroke identities" in html
    caption = (tmp_path / "figure-det-face" / "figure-det-face.md").read_text(encoding="utf-8")
    assert "synthetic stroke identities" in caption
    assert "Q-Margin (alpha=1.25, s=35, m=0.2) 96.44, 93.67, 97.78, 96.35." in caption
    assert figures.figure_det_speaker(Request(tmp_path, results=out / "runs"))


@pytest.mark.skipif(not figures.has_matplotlib(), reason="needs matplotlib")
def test_det_curves_say_what_they_are_about(made, monkeypatch):
    out, _ = made
    result = sorted((out / "runs" / "seed-0").rglob("result.json"))[0]
    (panel,) = load_panels([result])
    figure = figures.det_plot(panel)
    monkeypatch.setattr(figures, "det_plot", lambda panel: figure)
    assert list(figures.draw_det([panel])) == ["det.svg", "det.pdf"]
    assert figure.axes[0].get_title() == "synthetic stroke identities, seed 0"


def bench_file(path, **changes):
    def row(name, ratio, speed):
        return {"name": name, "ratio": ratio, "facts": {"images_per_s": speed}}

    rows = [
        row("ArcFace, common head", 2.0, 100.0),
        row("Q-Margin 5 %, paper", 4.0, 60.0),
        {**row("Q-Margin 100 %, paper", None, None), "failed": "memory"},
        row("Q-Margin, sparse", 1.25, 150.0),
        row("Q-Margin, sparse", 1.0, 180.0),
    ]
    record = {
        "settings": {"backbone": "small_conv", "batch": 512, "classes": 2_059_906},
        "machine": {"device": "NVIDIA H200"},
        "parts": {"end-to-end": rows},
        **changes,
    }
    path.write_text(json.dumps(record))
    return path


def test_throughput_is_read_from_a_benchmark(tmp_path, capsys):
    path = bench_file(tmp_path / "e2e.json")
    words = ["paper", "table-throughput", "--results", str(path), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "| here | 100.00 | - | 60.00 | - | 180.00 |" in said
    assert "| here, of ArcFace | 1.000 | - | 0.600 | - | 1.800 |" in said  # of the row above
    assert "quotients of the numbers above them" in said
    assert "| paper, of ArcFace | 1.000 | 0.987 | 0.948 | 0.731 | - |" in said
    assert "2,059,906 identities, NVIDIA H200" in said
    assert "small_conv" in said
    tex = (tmp_path / "out" / "table-throughput.tex").read_text(encoding="utf-8")
    assert "quotients of the numbers above them" in tex
    assert "small\\_conv" in tex
    assert "multicolumn" not in tex and "table*" not in tex  # no headings, and narrow
    assert main([*words[:2], "--results", str(bench_file(path, parts={}))]) == 2
    assert "has no part end-to-end" in capsys.readouterr().err
    for place, found in ((tmp_path, "is a folder"), (tmp_path / "gone", "is not there")):
        assert main([*words[:2], "--results", str(place)]) == 2
        said = capsys.readouterr().err
        assert found in said and "python -m benchmarks head --parts end-to-end --json FILE" in said


def test_throughput_without_a_benchmark_names_the_option_and_the_command(tmp_path, capsys):
    assert main(["paper", "table-throughput", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "--results" in said
    assert "python -m benchmarks head --parts end-to-end --json FILE" in said
    assert not (tmp_path / "out").exists()


def test_the_command_lists_and_explains(capsys, tmp_path):
    assert main(["paper", "--list"]) == 0
    assert "proposition-exact          Proposition 1" in capsys.readouterr().out
    assert main(["paper", "claim-cosface"]) == 0
    assert "CosFace is Q-Margin as alpha goes to 1" in capsys.readouterr().out
    assert main(["paper"]) == 2
    assert main(["paper", "table-faces"]) == 2
    assert "did you mean 'table-face'" in capsys.readouterr().err
    assert main(["paper", "table-face", "--results", str(tmp_path)]) == 2
    assert "has no result.json" in capsys.readouterr().err


def test_settings_of_the_paper_become_losses():
    keys = [loss_of(row).key for row in (*numbers.FACE, *numbers.SPEAKER)]
    assert len(set(keys)) == len(keys)
    assert loss_of(numbers.FACE[2]).margin_kind == "cosine"
    assert loss_of(numbers.SEEDS).margin_kind == "prior"


def test_results_that_are_not_there_are_named(tmp_path):
    with pytest.raises(DataError, match="has no result"):
        runs.results_for(Request(tmp_path, results=tmp_path / "gone"), [], far=1e-3)
