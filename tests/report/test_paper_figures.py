"""The paper's figures from results: DET curves, effective margins, pairs of two systems."""

import numpy as np
import pytest
from PIL import Image

from helpers.paper_results import run_result, write_run
from qmargin.cli.main import main
from qmargin.errors import ConfigError, DataError
from qmargin.report import paper
from qmargin.report.paper import paper_figure
from qmargin.report.paper_layouts import Setting

pytest.importorskip("matplotlib", reason="figures need matplotlib")
ARCFACE, OURS = Setting("angular", 1.0, 64.0, 0.5), Setting("prior", 1.25, 35.0, 0.2)


def test_det_curves_have_the_papers_points_in_the_caption(tmp_path):
    write_run(tmp_path / "a", run_result(ARCFACE, protocol="mine"))
    write_run(tmp_path / "b", run_result(OURS, protocol="mine"))
    files = paper_figure("figure-det-face", tmp_path)
    assert list(files) == [f"figure-det-face.{kind}" for kind in ("svg", "pdf", "md", "tex")]
    caption = files["figure-det-face.md"].decode()
    assert "![](figure-det-face.svg)" in caption and "mine: 200,000 impostor pairs" in caption
    assert "Q-Margin (\u03b1=1.25, s=35, m=0.2) 96.44, 93.67, 97.78, 96.35." in caption
    assert "{figure-det-face.pdf}" in files["figure-det-face.tex"].decode()
    write_run(tmp_path / "c", run_result(OURS, protocol="other", num_impostors=1000))
    assert {"figure-det-speaker-2.svg"} < paper_figure("figure-det-speaker", tmp_path).keys()


def test_tar_is_drawn_over_the_effective_margin(tmp_path):
    write_run(tmp_path / "a", run_result(OURS))
    with pytest.raises(DataError, match="two effective margins"):
        paper_figure("figure-margin", tmp_path)
    write_run(tmp_path / "b", run_result(OURS._replace(margin=0.1)))
    write_run(tmp_path / "c", run_result(ARCFACE))  # an angle has no effective margin
    files = paper_figure("figure-margin", tmp_path)
    assert "at FAR 10⁻⁵" in files["figure-margin.md"].decode()
    assert b"ArcFace" not in files["figure-margin.md"]


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """Pairs of pictures that two systems scored, by ``qmargin evaluate scores``."""
    generator = np.random.default_rng(0)
    (tmp_path / "faces").mkdir()
    names = [f"p{i:02}" for i in range(80)]
    for name in names:
        pixels = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "faces" / f"{name}.png")
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    for index, setting in enumerate((ARCFACE, OURS)):
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


def test_pairs_are_those_on_which_two_systems_disagree(judged):
    files = paper_figure("figure-pairs", judged / "runs", judged / "faces")
    caption = files["figure-pairs.md"].decode()
    assert "that ArcFace gets right and Q-Margin wrong" in caption  # two results, in their order
    ours, theirs = (paper.judge(judged / "runs" / i / "result.json") for i in "01")
    wanted = ours.is_genuine & ours.is_right & ~theirs.is_right
    opposite = ours.is_genuine & theirs.is_right & ~ours.is_right
    assert wanted.sum() > 0
    counts = f"rejected by Q-Margin: {wanted.sum():,}; the opposite: {opposite.sum():,}."
    assert f"Genuine pairs accepted by ArcFace and {counts}" in caption
    out = judged / "out"
    words = ["--results", str(judged / "runs"), "--media", str(judged / "faces")]
    assert main(["paper", "figure-pairs", *words, "--out", str(out)]) == 0
    assert (out / "figure-pairs.pdf").exists()


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
