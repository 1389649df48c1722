"""The paper's tables and figures: its numbers, results matched by the settings of their loss."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers.paper_results import run_result, write_run
from qmargin import q_margin
from qmargin.cli.main import main
from qmargin.errors import ConfigError, DataError
from qmargin.report.figures import has_matplotlib
from qmargin.report.paper import (
    Measured,
    accuracy_table,
    find_results,
    judge,
    measured_in,
    notes_on,
    paper_figure,
    paper_table,
)
from qmargin.report.paper_layouts import (
    FACE_ROWS,
    LAYOUTS,
    REPORTED_ROWS,
    SEEDS_ROW,
    SOTA_ROWS,
    SPEAKER_ROWS,
    THROUGHPUT,
    Setting,
)

BEST = Setting("prior", 1.25, 35.0, 0.2)
OURS = Setting("prior", 1.5, 10.0, 0.1)
ARCFACE = Setting("angular", 1.0, 64.0, 0.5)


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


def test_results_fill_rows_of_their_setting(tmp_path):
    write_run(tmp_path / "a", run_result(OURS, protocol="mine"))
    write_run(tmp_path / "b", run_result(BEST, protocol="mine", separation=6.0))
    table = paper_table("table-speaker", tmp_path)
    text = table.to_markdown(level=None)
    tar = next(100 * p.tar for p in run_result(OURS).measures.tar if p.far_target == 1e-3)
    ours = line_of(text, "| Q-Margin | 1.5 | 10 | 0.1 |")
    assert f"| {tar:.2f} |" in ours and "**87.91**" in ours  # the paper's best is bold as there
    other = line_of(text, "| Q-Margin | 1.25 | 35 | 0.2 |")  # not in this table: comes last
    assert text.index("*Other settings*") < text.index(other)
    assert "Here, mine: 10⁻³" in text and "Paper, VoxCeleb1-H: 10⁻³" in text
    assert "mine: 200,000 impostor pairs, 1 seed. Trained on 30 identities." in text
    tex = table.to_latex()
    assert "\\multicolumn{3}{c}{Parameters} & \\multicolumn{3}{c}{mine}" in tex


def test_results_without_a_run_are_shown_by_name(tmp_path):
    with pytest.raises(DataError, match="has no result"):
        paper_table("table-face", tmp_path)
    write_run(tmp_path, run_result(None, protocol="mine"))
    text = paper_table("table-face", tmp_path).to_markdown()
    assert line_of(text, "| unknown |").startswith("| unknown | - | - | - | ")


def test_variants_of_a_loss_do_not_take_its_row():
    arcface, result = Setting("angular", 1.0, 32.0, 0.2), run_result(None)
    found = [Measured(name, arcface, "mine", (result,)) for name in ("ArcFace, 10 %", "ArcFace")]
    text = accuracy_table("table-speaker", found).to_markdown()
    assert text.index("| ArcFace | - | 32 | 0.2 |") < text.index("*Other settings*")
    assert text.index("*Other settings*") < text.index("| ArcFace, 10 % | - | 32 | 0.2 |")


def test_reported_methods_do_not_compete():
    text = accuracy_table("table-sota", []).to_markdown(level=None)
    assert "| TopoFR | WF42M | R-200 | NeurIPS24 | - | - | - | - | - | 98.01 | 97.10 |" in text
    ours = "| Q-Margin | WF42M | R-100 |  | 1.25 | 35 | 0.2 | **96.44** | **93.67** | **97.78** |"
    assert ours in text
    assert "No result has one of these settings" in text


def test_seeds_become_mean_and_deviation(tmp_path):
    for seed in (0, 1):
        result = run_result(SEEDS_ROW.setting, seed=seed, separation=5.0 + seed)
        write_run(tmp_path / str(seed), result)
    write_run(tmp_path / "other", run_result(OURS))
    table = paper_table("table-seeds", tmp_path)
    ((*_, here, _, _, _, _, _, _, _, _, _, _, _),) = table.rows  # other settings are left out
    assert here.deviation > 0.0
    text = table.to_markdown()
    assert "96.38 ± 0.07" in text and "2 seeds" in text and "**" not in text
    again = run_result(SEEDS_ROW.setting, seed=1)
    variant = replace(again, run=replace(again.run, arm="sampled", title="10 % of classes"))
    write_run(tmp_path / "again", variant)  # kept apart by its arm
    assert [one.name for one in measured_in(find_results(tmp_path))][1:] == [
        "10 % of classes",
        "Q-Margin",
    ]
    write_run(tmp_path / "again", again)
    with pytest.raises(DataError, match="have the same seed"):
        paper_table("table-seeds", tmp_path)


def test_seeds_of_recipes_with_other_names_are_gathered(tmp_path):
    for seed in (0, 1):
        result = run_result(OURS, seed=seed)
        write_run(tmp_path / str(seed), replace(result, run=replace(result.run, arm=f"s{seed}")))
    normed = replace(result, protocol=replace(result.protocol, scoring="as-norm"))
    write_run(tmp_path / "normed", normed)
    found = {one.protocol: len(one.results) for one in measured_in(find_results(tmp_path))}
    assert found == {"VoxCeleb1-H": 2, "VoxCeleb1-H, as-norm": 1}


def test_notes_name_missing_rates_and_margins_out_of_reach():
    few = run_result(None, num_impostors=5000)
    found = [
        Measured("a", Setting("prior", 1.25, 32.0, 0.5), "mine", (few,)),
        Measured("b", BEST, "mine", (run_result(None, num_impostors=8000),)),
    ]
    notes = " ".join(notes_on(found))
    assert "mine: 5,000 to 8,000 impostor pairs" in notes
    assert "Too few impostor pairs for FAR 10⁻⁴ and 10⁻⁵." in notes
    assert notes.endswith("no embedding reaches: Q-Margin (\u03b1=1.25, s=32, m=0.5) 6.70.")


@pytest.mark.parametrize("setting", [BEST, OURS, Setting("prior", 1.0, 10.0, 0.3)])
def test_effective_margins_are_those_of_the_loss(setting):
    loss = q_margin(alpha=setting.alpha, scale=setting.scale, margin=setting.margin)
    assert setting.effective_margin == pytest.approx(loss.effective_margin, rel=1e-12)
    assert Setting("cosine", 1.0, 64.0, 0.5).effective_margin == 0.5
    assert Setting("angular", 1.0, 64.0, 0.5).effective_margin is None


def test_numbers_are_those_of_the_paper():
    path = Path(__file__).parents[3] / "shared" / "paper" / "q-margin.tex"
    if not path.exists():
        pytest.skip(f"no paper in {path}")
    tex = re.sub(r"\\(?:bf|textbf)\{([\d.]+)\}", r"\1", path.read_text(encoding="utf-8"))
    lines = re.sub(r"[ $\t]", "", tex).splitlines()
    for row in (*FACE_ROWS, *SPEAKER_ROWS):
        _, alpha, scale, margin = row.setting
        shown = "-" if alpha == 1.0 else re.escape(f"{alpha:g}")
        values = "&".join(f"{value:.2f}" for value in row.values)
        start = rf"{row.loss}&{shown}(\.0)?&{scale:g}&{margin:g}&{values}"
        assert any(re.match(start, line) for line in lines), row
    for row in (*SOTA_ROWS, *REPORTED_ROWS):
        values = "&".join("-" if value is None else f"{value:.2f}" for value in row.values)
        assert any(values in line for line in lines), row
    seeds = zip(SEEDS_ROW.values, SEEDS_ROW.deviations, strict=True)
    shown = "&".join(rf"{value:.2f}\!\pm\!{deviation:.2f}" for value, deviation in seeds)
    assert any(shown in line for line in lines)
    assert all(f"{value:.2f}" in tex for value in THROUGHPUT.values())
    for row in (*SOTA_ROWS, *FACE_ROWS, *SPEAKER_ROWS):
        assert row.setting.loss == row.loss or row.setting.alpha == 2.0


def test_margin_and_scale_in_the_papers_table():
    """How much each changes TAR at FAR 1e-5, as ``docs/results/paper-claims.md`` says."""
    rows = {row.setting[1:]: row.values for row in FACE_ROWS if row.loss == "Q-Margin"}

    def spans(changes, column):
        sizes = [abs(rows[a][column] - rows[b][column]) for a, b in changes]
        return f"{min(sizes):.2f} to {max(sizes):.2f}"

    margins = [((1.25, s, 0.2), (1.25, s, 0.5)) for s in (10, 20, 32)]
    scales = [((1.25, 10, m), (1.25, 32, m)) for m in (0.2, 0.5)]
    path = Path(__file__).parents[2] / "docs" / "results" / "paper-claims.md"
    page = path.read_text(encoding="utf-8")
    for changes, column in itertools.product((margins, scales), (6, 8)):
        assert spans(changes, column) in page
    for margin, num_better in ((0.2, 3), (0.5, 4)):
        small, large = rows[1.5, 10, margin], rows[1.5, 32, margin]
        assert sum(large[column] > small[column] for column in range(5, 9)) == num_better
    whole, *others = THROUGHPUT.values()
    assert [f"{speed / whole:.3f}" for speed in others] == ["0.987", "0.948", "0.731"]


def bench_file(path, **changes):
    def row(name, speed):
        return {"name": name, "facts": {"images_per_s": speed}}

    rows = [
        row("ArcFace, common head", 100.0),
        row("Q-Margin 5 %, paper", 60.0),
        row("Q-Margin 100 %, paper", None),
        row("Q-Margin, sparse", 150.0),
        row("Q-Margin, sparse", 180.0),
    ]
    record = {
        "settings": {"backbone": "small_conv", "batch": 512, "classes": 2_059_906},
        "machine": {"device": "NVIDIA H200"},
        "parts": {"end-to-end": rows},
        **changes,
    }
    path.write_text(json.dumps(record))
    return path


def test_throughput_is_read_from_a_benchmark(tmp_path):
    text = paper_table("table-throughput", bench_file(tmp_path / "e2e.json")).to_markdown()
    assert "| here | 100.00 | - | 60.00 | - | 180.00 |" in text
    assert "| here / ArcFace | 1.000 | - | 0.600 | - | 1.800 |" in text
    assert "| paper / ArcFace | 1.000 | 0.987 | 0.948 | 0.731 | - |" in text
    assert "small_conv, batch 512, 2,059,906 identities, NVIDIA H200" in text


@pytest.mark.parametrize("changes", [{"parts": {}}, {"settings": {}}, {"machine": None}])
def test_other_files_are_no_benchmark(tmp_path, changes):
    with pytest.raises(DataError, match="python -m benchmarks head --parts end-to-end"):
        paper_table("table-throughput", bench_file(tmp_path / "e2e.json", **changes))
    with pytest.raises(DataError, match="is a folder"):
        paper_table("table-throughput", tmp_path)


def test_the_command_writes_a_table(tmp_path, capsys):
    write_run(tmp_path / "runs", run_result(BEST))
    out = tmp_path / "out"
    words = ["paper", "table-face", "--results", str(tmp_path / "runs"), "--out", str(out)]
    assert main(words) == 0
    assert "| Q-Margin | 1.25 | 35 | 0.2 |" in capsys.readouterr().out
    kinds = {path.suffix for path in out.glob("table-face.*")}
    assert kinds == {".md", ".tex", ".csv"}
    assert main(words) == 0  # its own files are replaced
    (out / "table-face.md").write_text("mine")
    assert main(words) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    capsys.readouterr()
    assert main(["paper", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in LAYOUTS) and "tab:throughput" in listed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["table-faces"], "table-face"),
        ([], "--list"),
        (["table-face"], "qmargin compare paper-face --out DIR"),
        (["table-throughput"], "python -m benchmarks head --parts end-to-end"),
        (["figure-pairs"], "qmargin evaluate pairs"),
        (["table-face", "--results", ".", "--media", "x"], "--media"),
    ],
)
def test_the_command_says_what_is_missing(words, named, capsys, tmp_path):
    assert main(["paper", *words, "--out", str(tmp_path / "out")]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# -- figures --------------------------------------------------------------------------------------

needs_matplotlib = pytest.mark.skipif(not has_matplotlib(), reason="figures need matplotlib")


@needs_matplotlib
def test_det_curves_have_the_papers_points_in_the_caption(tmp_path):
    write_run(tmp_path / "a", run_result(ARCFACE, protocol="mine"))
    write_run(tmp_path / "b", run_result(BEST, protocol="mine"))
    files = paper_figure("figure-det-face", tmp_path)
    assert list(files) == [f"figure-det-face.{kind}" for kind in ("svg", "pdf", "md", "tex")]
    caption = files["figure-det-face.md"].decode()
    assert "![](figure-det-face.svg)" in caption and "mine: 200,000 impostor pairs" in caption
    assert "Q-Margin (\u03b1=1.25, s=35, m=0.2) 96.44, 93.67, 97.78, 96.35." in caption
    assert "{figure-det-face.pdf}" in files["figure-det-face.tex"].decode()
    write_run(tmp_path / "c", run_result(BEST, protocol="other", num_impostors=1000))
    assert {"figure-det-speaker-2.svg"} < paper_figure("figure-det-speaker", tmp_path).keys()


@needs_matplotlib
def test_tar_is_drawn_over_the_effective_margin(tmp_path):
    write_run(tmp_path / "a", run_result(BEST))
    with pytest.raises(DataError, match="two effective margins"):
        paper_figure("figure-margin", tmp_path)
    write_run(tmp_path / "b", run_result(BEST._replace(margin=0.1)))
    write_run(tmp_path / "c", run_result(ARCFACE))  # an angle has no effective margin
    files = paper_figure("figure-margin", tmp_path)
    assert "at FAR 10⁻⁵" in files["figure-margin.md"].decode()
    assert b"ArcFace" not in files["figure-margin.md"]


@pytest.fixture
def judged(tmp_path):
    """Pairs of pictures that two systems scored, by ``qmargin evaluate scores``."""
    generator = np.random.default_rng(0)
    (tmp_path / "faces").mkdir()
    names = [f"p{i:02}" for i in range(80)]
    for name in names:
        pixels = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "faces" / f"{name}.png")
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    for index, setting in enumerate((ARCFACE, BEST)):
        lines = []
        for number, (a, b) in enumerate(pairs):
            genuine = number % 3 == 0
            score = float(genuine) + 0.2 * generator.standard_normal()
            lines.append(f"{a} {b} {score:.6f} {'target' if genuine else 'nontarget'}\n")
        folder = tmp_path / "runs" / str(index)
        folder.mkdir(parents=True)
        (folder / "scores.txt").write_text("".join(lines))
        words = ["evaluate", "scores", str(folder / "scores.txt"), "--name", setting.loss]
        out = folder / "result.json"
        assert main([*words, "--fars", "1e-3", "--replicates", "0", "--out", str(out)]) == 0
    return tmp_path


@needs_matplotlib
def test_pairs_are_those_on_which_two_systems_disagree(judged):
    files = paper_figure("figure-pairs", judged / "runs", judged / "faces")
    caption = files["figure-pairs.md"].decode()
    assert "that ArcFace gets right and Q-Margin wrong" in caption  # two results, in their order
    ours, theirs = (judge(judged / "runs" / i / "result.json") for i in "01")
    wanted = ours.is_genuine & ours.is_right & ~theirs.is_right
    opposite = ours.is_genuine & theirs.is_right & ~ours.is_right
    assert wanted.sum() > 0
    counts = f"rejected by Q-Margin: {wanted.sum():,}; the opposite: {opposite.sum():,}."
    assert f"Genuine pairs accepted by ArcFace and {counts}" in caption
    out = judged / "out"
    words = ["--results", str(judged / "runs"), "--media", str(judged / "faces")]
    assert main(["paper", "figure-pairs", *words, "--out", str(out)]) == 0
    assert (out / "figure-pairs.pdf").exists()


@needs_matplotlib
def test_pairs_need_pictures_and_the_scores_of_two_results(judged):
    runs, faces = judged / "runs", judged / "faces"
    with pytest.raises(ConfigError, match="--media"):
        paper_figure("figure-pairs", runs)
    with pytest.raises(DataError, match="has no picture"):
        paper_figure("figure-pairs", runs, runs)
    with pytest.raises(ConfigError, match="there are 1 results"):
        paper_figure("figure-pairs", runs / "0", faces)
    scores = runs / "1" / "scores.txt"
    text = scores.read_text()
    scores.write_text(text.replace("p00 p01", "p00 p99"))
    with pytest.raises(DataError, match=r"scores\.txt changed"):
        paper_figure("figure-pairs", runs, faces)
    scores.unlink()
    with pytest.raises(DataError, match=r"scores\.txt, the scores of"):
        paper_figure("figure-pairs", runs, faces)
    write_run(runs / "1", run_result(None, num_impostors=500))
    with pytest.raises(DataError, match="no threshold at FAR"):
        paper_figure("figure-pairs", runs, faces)
