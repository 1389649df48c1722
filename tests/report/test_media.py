"""Images and recordings in pages, and figures as files."""

import base64
import io
import os
import wave
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

from helpers.results import HOSTILE, hostile_result, some_run, synthetic_result
from qmargin.errors import ConfigError
from qmargin.report import media
from qmargin.report.figures import draw_figures, identities_plot, sensitivity_plot
from qmargin.report.media import IMAGE_SIDE, LONGEST_AUDIO, MediaFolder
from qmargin.report.systems import arrange


def write_image(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((300, 400, 3), 90, np.uint8)).save(path)
    return path


def write_wave(path, seconds):
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(int(2 * 16000 * seconds)))


def content_of(uri):
    return base64.b64decode(uri.partition("base64,")[2])


def test_images_are_small_jpegs(tmp_path):
    write_image(tmp_path / "id1" / "a.png")
    for key in ("id1/a.png", "id1/a"):
        medium = MediaFolder(tmp_path).medium(key)
        assert (medium.kind, medium.problem) == ("image", "")
        image = Image.open(io.BytesIO(content_of(medium.uri)))
        assert (image.format, max(image.size)) == ("JPEG", IMAGE_SIDE)


def test_recordings_are_cut_or_travel_whole_or_not_at_all(tmp_path, monkeypatch):
    write_wave(tmp_path / "a.wav", 12.0)
    (tmp_path / "a.flac").write_bytes(b"fLaC" + bytes(100))
    medium = MediaFolder(tmp_path).medium("a.wav")
    assert medium.uri.startswith("data:audio/wav;base64,")
    with wave.open(io.BytesIO(content_of(medium.uri)), "rb") as file:
        assert file.getnframes() == LONGEST_AUDIO * file.getframerate()
    assert content_of(MediaFolder(tmp_path).medium("a.flac").uri) == b"fLaC" + bytes(100)
    monkeypatch.setattr(media, "MOST_FILE_BYTES", 50)
    for name in ("a.flac", "a.wav"):
        assert MediaFolder(tmp_path).medium(name).problem == "recording too large"


@pytest.mark.parametrize("name", ["a.png", "a.wav", "a.flac", "a.txt"])
def test_files_that_are_not_what_they_say_are_not_shown(tmp_path, name):
    (tmp_path / name).write_bytes(b"<script>window.__pwned=1</script>")
    medium = MediaFolder(tmp_path).medium(name)
    assert (medium.kind, medium.uri) == ("none", "")
    assert medium.problem


def test_nothing_outside_the_folder_is_read(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    secret = write_image(tmp_path / "secret.png")
    sibling = write_image(tmp_path / "root2" / "b.png")
    (root / "link.png").symlink_to(secret)
    (root / "folder").symlink_to(sibling.parent)
    folder = MediaFolder(root)
    escapes = ["../secret.png", str(secret), "link.png", "folder/b.png", "../root2/b.png"]
    for key in [*escapes, "a\x00b", "x" * 5000, "", ".", "..", "\ud800"]:
        assert folder.find(key) is None, key
        assert folder.medium(key).uri == ""


def test_pipes_and_loops_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "loop.png").symlink_to("loop.png")
    folder = MediaFolder(tmp_path)
    assert folder.medium("pipe.wav").problem == folder.medium("loop.png").problem == "no such file"
    with pytest.raises(ConfigError, match="not a folder"):
        MediaFolder(tmp_path / "nothing")


def test_huge_images_are_not_decoded_and_pages_do_not_grow_without_bound(tmp_path, monkeypatch):
    write_image(tmp_path / "a.png")
    write_wave(tmp_path / "a.wav", 1.0)
    folder = MediaFolder(tmp_path)
    monkeypatch.setattr(media, "MOST_PIXELS", 1000)
    assert folder.medium("a.png").problem == "image too large"
    monkeypatch.setattr(media, "MOST_BYTES", len(folder.medium("a.wav").uri) + 10)
    assert folder.embedded("a.wav").kind == "audio"
    assert folder.embedded("a.wav").problem == "left out, the page has reached its limit"


# -- figures --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def needs_matplotlib(request):
    if "figure" in request.node.name:
        pytest.importorskip("matplotlib", reason="comes with the figures extra")


def test_figures_are_svg_and_pdf_and_the_same_every_time():
    panels = arrange([synthetic_result("A", groups=("g", "h")), synthetic_result("声纹 𓀀 _hidden")])
    one, two = (draw_figures(panels, None) for _ in range(2))
    assert one.keys() == {"det.svg", "det.pdf", "groups.svg", "groups.pdf"}
    assert one == two
    for first in one.values():
        assert first.startswith(b"%PDF-") or ElementTree.fromstring(first).tag.endswith("svg")


def test_figures_show_hostile_names_as_text():
    panels = arrange([hostile_result(index) for index in range(len(HOSTILE))])
    for name, content in draw_figures(panels, None).items():
        if name.endswith(".svg"):
            root = ElementTree.fromstring(content)
            assert not [e for e in root.iter() if str(e.tag).rpartition("}")[2] == "script"]


def test_figure_of_scales_has_a_line_for_each_alpha_and_margin():
    results = [
        synthetic_result(f"s{i}", seed=i, run=some_run(f"s{i}", alpha=alpha, scale=scale))
        for i, (alpha, scale) in enumerate([(1.25, 10.0), (1.25, 32.0), (1.5, 10.0)])
    ]
    lines = sensitivity_plot(arrange(results)[0]).axes[0].get_lines()
    assert [line.get_xdata().tolist() for line in lines] == [[10.0, 32.0], [10.0]]
    assert lines[0].get_ydata()[1] == pytest.approx(100 * results[1].measures.tar[1].tar)
    assert sensitivity_plot(arrange([synthetic_result()])[0]) is None


def test_figure_of_identities_has_a_line_for_each_far_or_loss():
    def drawn(scales: list[float]) -> list[list[float]]:
        runs = zip((1000, 250, 500), scales, strict=True)
        results = [
            synthetic_result(f"s{n}", seed=n, run=some_run(f"s{n}", scale=scale, num_classes=n))
            for n, scale in runs
        ]
        figure = identities_plot(arrange(results)[0])
        assert figure is not None
        return [line.get_xdata().tolist() for line in figure.axes[0].get_lines()]

    for places in drawn([32.0, 32.0, 32.0]):
        assert places == [250, 500, 1000]
    assert drawn([32.0, 16.0, 32.0]) == [[250, 500, 1000]]  # at the headline's FAR
    few = [
        synthetic_result(f"s{n}", seed=n, run=some_run(f"s{n}", num_classes=250 + n % 2))
        for n in range(3)
    ]
    assert identities_plot(arrange(few)[0]) is None


def test_figure_of_pairs_has_their_images(tmp_path):
    keys = tuple(f"face{i}.png" for i in range(4))
    for key in keys[:3]:
        write_image(tmp_path / key)
    files = draw_figures(arrange([synthetic_result(keys=keys)]), MediaFolder(tmp_path))
    assert {"hardest.svg", "hardest.pdf"} <= files.keys()
    assert files["hardest.svg"].count(b"<image") == 2 * 2 * 2
