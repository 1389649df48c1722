"""The paper's tables and figures from results, and from trainings that are made for them."""

import json
from dataclasses import replace

import pytest
from PIL import Image

from qmargin.cli.main import main
from qmargin.demo import plan
from qmargin.demo.recipe import Size
from qmargin.errors import ConfigError, DataError
from qmargin.evaluation.result import read_result, write_result
from qmargin.paper import figures, numbers, runs, tables
from qmargin.paper.layout import Group, Table, latex, markdown
from qmargin.paper.runs import Request, loss_of

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
    patch.setitem(plan.SIZES, "cpu", TINY)
    patch.setattr(plan, "_seconds_per_step", lambda size, device: 0.001)
    out = tmp_path_factory.mktemp("paper")
    table = tables.table_sota(Request(out, device="cpu"))
    yield out, table
    patch.undo()


def test_methods_of_other_papers_stand_beside_ours(made):
    _, table = made
    text = markdown(table)
    assert "| TopoFR | WF42M | R-200 | NeurIPS24 | - | - | 98.01 | 97.10 | - |" in text
    assert "| Q-Margin (alpha=1.25, s=35, m=0.2) | WF42M | R-100 | - | 96.44 | 93.67 |" in text
    assert "here, synthetic stroke identities: 1e-3" in text
    assert "trained on 30 identities, 1 epochs" in text
    assert "\\midrule" in latex(table)
    assert "$\\alpha$=1.25" in latex(table)


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
    assert f"| **{tar:.2f}** |" in matching
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


def test_pairs_are_drawn(made):
    out, _ = made
    (path,) = figures.figure_pairs(Request(out, device="cpu"))
    picture = Image.open(path)
    assert picture.size == (3 * (8 * 70 + 6), 3 * (2 * 38 + 6))
    assert len(picture.convert("L").getcolors()) > 10
    with pytest.raises(ConfigError, match="not a folder of `qmargin demo`"):
        figures.figure_pairs(Request(out, results=out))


def test_det_curves_become_a_page(made, monkeypatch, tmp_path):
    out, _ = made
    monkeypatch.setattr(figures, "has_matplotlib", lambda: False)
    pages = figures.figure_det_face(Request(tmp_path, results=out / "runs"))
    assert pages[0] == tmp_path / "figure-det-face" / "index.html"
    assert "synthetic stroke identities" in pages[0].read_text(encoding="utf-8")
    assert figures.figure_det_speaker(Request(tmp_path, results=out / "runs"))


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
        "settings": {"backbone": "iresnet100", "batch": 512, "classes": 2_059_906},
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
    assert "| here, of ArcFace | 1.000 | - | 0.500 | - | 2.000 |" in said
    assert "| paper, of ArcFace | 1.000 | 0.987 | 0.948 | 0.731 | - |" in said
    assert "2,059,906 identities, NVIDIA H200" in said
    assert (tmp_path / "out" / "table-throughput.tex").exists()
    assert main([*words[:2], "--results", str(bench_file(path, parts={}))]) == 2
    assert "has no part end-to-end" in capsys.readouterr().err


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


def test_a_table_escapes_what_others_named():
    table = Table(
        "t", "50 % of x_1", (Group("a&b", ("c",), has_best=True),), (("1",), None, ("2",))
    )
    assert "50 \\% of x\\_1" in latex(table)
    assert "\\multicolumn{1}{c}{a\\&b}" in latex(table)
    assert "\\textbf{2}" in latex(table)
    assert "| **2** |" in markdown(table)


def test_results_that_are_not_there_are_named(tmp_path):
    with pytest.raises(DataError, match="has no result"):
        runs.results_for(Request(tmp_path, results=tmp_path / "gone"), [])
