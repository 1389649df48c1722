import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from helpers.results import HOSTILE, hostile_result, some_run, synthetic_result
from qmargin.report.figures import draw_figures, sensitivity_plot
from qmargin.report.media import MediaFolder
from qmargin.report.systems import arrange

pytest.importorskip("matplotlib", reason="comes with the figures extra")


def test_figures_are_svg_and_pdf_and_the_same_every_time() -> None:
    panels = arrange([synthetic_result("A", groups=("g", "h")), synthetic_result("B", seed=1)])
    one, two = (draw_figures(panels, None) for _ in range(2))
    assert one.keys() == {"det.svg", "det.pdf", "groups.svg", "groups.pdf"}
    assert one == two
    for first in one.values():
        assert first.startswith(b"%PDF-") or ElementTree.fromstring(first).tag.endswith("svg")


def test_hostile_names_are_drawn_as_text() -> None:
    panels = arrange([hostile_result(index) for index in range(len(HOSTILE))])
    for name, content in draw_figures(panels, None).items():
        if name.endswith(".svg"):
            root = ElementTree.fromstring(content)
            assert not [e for e in root.iter() if str(e.tag).rpartition("}")[2] == "script"]


def test_names_of_all_scripts_do_not_warn() -> None:
    assert draw_figures(arrange([synthetic_result("声纹 𓀀 _hidden")]), None)


def test_sensitivity_has_a_line_for_each_alpha_and_margin() -> None:
    settings = [(1.25, 10.0), (1.25, 32.0), (1.5, 10.0)]
    results = [
        synthetic_result(f"s{i}", seed=i, run=some_run(f"s{i}", alpha=alpha, scale=scale))
        for i, (alpha, scale) in enumerate(settings)
    ]
    (panel,) = arrange(results)
    figure = sensitivity_plot(panel)
    lines = figure.axes[0].get_lines()
    assert [line.get_xdata().tolist() for line in lines] == [[10.0, 32.0], [10.0]]
    tar = results[1].measures.tar[1].tar
    assert lines[0].get_ydata()[1] == pytest.approx(100 * tar)
    assert sensitivity_plot(arrange([synthetic_result()])[0]) is None


def test_pairs_of_images_become_a_grid(tmp_path: Path) -> None:
    from PIL import Image

    keys = tuple(f"face{i}.png" for i in range(4))
    for key in keys[:3]:
        Image.new("RGB", (40, 40), "red").save(tmp_path / key)
    media = MediaFolder(tmp_path)
    panels = arrange([synthetic_result(keys=keys)])
    files = draw_figures(panels, media)
    assert {"hardest.svg", "hardest.pdf"} <= files.keys()
    assert files["hardest.svg"].count(b"<image") == 2 * 2 * 2
