"""No command writes over its inputs, nor over files that it did not write."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import run_command as run
from helpers.model_directories import make_model, pictures, write_pictures
from helpers.results import synthetic_result, write_results
from helpers.speakers import make_speakers
from qmargin.errors import ConfigError
from qmargin.evaluation.result import read_result

NOTES = b"my own notes\n"


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    speakers = make_speakers(6, 3)
    speakers.write_scores(tmp_path / "system.txt")
    speakers.write_trials(tmp_path / "trials.txt")
    speakers.write_embeddings(tmp_path / "model.npz")
    lines = "".join(f"id{i:02d},{'f' if i % 2 else 'm'}\n" for i in range(6))
    (tmp_path / "groups.csv").write_text("subject,group\n" + lines)
    (tmp_path / "card.json").write_text('{"weights_sha256": "ab"}')
    return tmp_path


def scores(folder: Path, *options: object) -> list[object]:
    return ["evaluate", "scores", folder / "system.txt", "--replicates", 0, *options]


def trials(folder: Path, *options: object) -> list[object]:
    files = ["trials", folder / "trials.txt", "--embeddings", folder / "model.npz"]
    return ["evaluate", *files, "--replicates", 0, *options]


@pytest.mark.parametrize("name", ["system.txt", "groups.csv", "card.json"])
@pytest.mark.parametrize("how", ["same", "symbolic", "hard", "dotted"])
@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)])
def test_an_input_is_never_written_over(
    folder: Path, name: str, how: str, overwrite: tuple[str, ...]
) -> None:
    out = folder / name
    if how == "symbolic":
        out = folder / "link"
        out.symlink_to(folder / name)
    elif how == "hard":
        out = folder / "link"
        os.link(folder / name, out)
    elif how == "dotted":
        out = folder / ".." / folder.name / name
    before = content_of(folder)
    extra = ["--groups", folder / "groups.csv", "--model-card", folder / "card.json"]
    with pytest.raises(ConfigError, match=rf"{out.name} is an input"):
        run(*scores(folder, "--out", out, *extra, *overwrite))
    assert content_of(folder) == before


@pytest.mark.parametrize("name", ["trials.txt", "model.npz"])
def test_scores_do_not_replace_an_input(folder: Path, name: str) -> None:
    before = content_of(folder)
    with pytest.raises(ConfigError, match=rf"{name} is an input"):
        run(*trials(folder, "--out", folder / "r.json", "--scores", folder / name))
    with pytest.raises(ConfigError, match=r"r\.json is named for two outputs"):
        run(*trials(folder, "--out", folder / "r.json", "--scores", folder / "r.json"))
    assert content_of(folder) == before


def test_a_foreign_file_needs_permission_and_our_own_does_not(folder: Path) -> None:
    out = folder / "r.json"
    out.write_bytes(NOTES)
    with pytest.raises(ConfigError, match=r"r\.json exists .*--overwrite"):
        run(*scores(folder, "--out", out))
    assert out.read_bytes() == NOTES
    run(*scores(folder, "--out", out, "--overwrite"))
    run(*scores(folder, "--out", out, "--name", "again"))
    assert read_result(out).system.name == "again"


@pytest.mark.parametrize("content", [NOTES, b"enrol\ttest\tscore\tlabel\nann\tbob\t0.5\t1\n"])
def test_a_foreign_table_of_scores_stays(folder: Path, content: bytes) -> None:
    table = folder / "r.scores.tsv"
    table.write_bytes(content)
    with pytest.raises(ConfigError, match=r"r\.scores\.tsv exists .*--overwrite"):
        run(*trials(folder, "--out", folder / "r.json"))
    assert table.read_bytes() == content
    run(*trials(folder, "--out", folder / "r.json", "--overwrite"))
    assert table.read_bytes() != content


def test_our_own_table_of_scores_is_replaced(folder: Path) -> None:
    run(*trials(folder, "--out", folder / "r.json"))
    first = (folder / "r.scores.tsv").read_bytes()
    run(*trials(folder, "--out", folder / "r.json"))  # the same again
    center = ["--center", folder / "model.npz"]
    run(*trials(folder, "--out", folder / "r.json", *center))  # others, and the result knows them
    assert (folder / "r.scores.tsv").read_bytes() != first


def test_a_run_that_was_stopped_after_scoring_goes_on(folder: Path) -> None:
    """The table is there, and no result that knows it."""
    run(*trials(folder, "--out", folder / "r.json"))
    (folder / "r.json").unlink()
    run(*trials(folder, "--out", folder / "r.json"))
    assert (folder / "r.json").exists()


def test_scores_that_were_read_are_not_taken_for_our_own(folder: Path) -> None:
    """A result of `evaluate scores` knows the table too, as somebody else's."""
    run(*trials(folder, "--out", folder / "first.json"))
    table = folder / "r.scores.tsv"
    table.write_bytes((folder / "first.scores.tsv").read_bytes().replace(b"id05", b"id77"))
    before = table.read_bytes()
    run("evaluate", "scores", table, "--out", folder / "r.json", "--replicates", 0)
    with pytest.raises(ConfigError, match=r"r\.scores\.tsv exists"):
        run(*trials(folder, "--out", folder / "r.json"))
    assert table.read_bytes() == before


def test_a_device_or_a_dangling_link_is_not_replaced(folder: Path) -> None:
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        run(*scores(folder, "--out", pipe, "--overwrite"))
    link = folder / "nowhere.json"
    link.symlink_to(folder / "missing")
    with pytest.raises(ConfigError, match=r"nowhere\.json exists"):
        run(*scores(folder, "--out", link))
    assert link.is_symlink()


def test_a_part_that_is_not_ours_is_not_cut(folder: Path) -> None:
    part = folder / "r.scores.tsv.partial"
    part.write_bytes(NOTES)
    with pytest.raises(ConfigError, match=r"r\.scores\.tsv\.partial exists"):
        run(*trials(folder, "--out", folder / "r.json"))
    assert part.read_bytes() == NOTES


@pytest.mark.parametrize(
    "name", ["index.html", "metrics.json", "tables.md", "tables.tex", "tables.csv"]
)
def test_a_report_replaces_reports_only(tmp_path: Path, name: str) -> None:
    (result,) = write_results(tmp_path / "in", synthetic_result())
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(NOTES)
    with pytest.raises(ConfigError, match=rf"{name} exists"):
        run("report", result, "--out", out, "--no-figures")
    assert content_of(out) == {name: NOTES}
    run("report", result, "--out", out, "--no-figures", "--overwrite")
    before = content_of(out)
    run("report", result, "--out", out, "--no-figures", "--title", "Another")
    assert content_of(out)["index.html"] != before["index.html"]


def test_a_report_does_not_replace_its_result(tmp_path: Path) -> None:
    (result,) = write_results(tmp_path, synthetic_result())
    inside = result.rename(tmp_path / "metrics.json")
    before = inside.read_bytes()
    with pytest.raises(ConfigError, match=r"metrics\.json is an input"):
        run("report", inside, "--out", tmp_path, "--no-figures", "--overwrite")
    assert inside.read_bytes() == before


def test_figures_replace_figures_only(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="comes with the figures extra")
    (result,) = write_results(tmp_path / "in", synthetic_result())
    figures = tmp_path / "out" / "figures"
    figures.mkdir(parents=True)
    for name in ("det.svg", "det.pdf"):
        (figures / name).write_bytes(NOTES)
        with pytest.raises(ConfigError, match=rf"{name} exists"):
            run("report", result, "--out", tmp_path / "out")
        assert content_of(tmp_path / "out") == {f"figures/{name}": NOTES}
        (figures / name).unlink()
    run("report", result, "--out", tmp_path / "out")
    run("report", result, "--out", tmp_path / "out")


@pytest.mark.parametrize("name", ["e.npz", "e.safetensors", "e.npz.manifest.csv"])
def test_embeddings_replace_embeddings_only(tmp_path: Path, name: str) -> None:
    make_model(tmp_path / "m")
    write_pictures(tmp_path / "faces", pictures(4))
    command = ["embed", tmp_path / "faces", "--model", tmp_path / "m", "--out"]
    out = tmp_path / name.removesuffix(".manifest.csv")
    (tmp_path / name).write_bytes(NOTES)
    with pytest.raises(ConfigError, match=rf"{name} exists"):
        run(*command, out)
    assert (tmp_path / name).read_bytes() == NOTES
    run(*command, out, "--overwrite")
    run(*command, out)


def test_pictures_do_not_replace_other_pictures(tmp_path: Path) -> None:
    from qmargin.evaluation.protocols.face_sets import VerificationSet, write_pictures
    from qmargin.evaluation.result import Hardest, HardPair, Source
    from qmargin.files import Guard

    rows, one = np.array([[0, 1]]), np.array([True])
    made = (b"one", b"two")
    pairs = VerificationSet(made, rows, np.arange(2), one, Source("set.bin", "ab", "pairs"))
    keys = pairs.keys
    hardest = Hardest((HardPair(keys[0], keys[1], 0.5),), ())
    (tmp_path / f"{keys[0]}.jpg").write_bytes(NOTES)
    with pytest.raises(ConfigError, match=rf"{keys[0]}\.jpg exists"):
        write_pictures(tmp_path, pairs, hardest, guard=Guard())
    assert (tmp_path / f"{keys[0]}.jpg").read_bytes() == NOTES
    for _ in range(2):
        write_pictures(tmp_path / "new", pairs, hardest, guard=Guard())


def test_a_page_of_results_is_looked_at_before_training(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_bytes(NOTES)
    with pytest.raises(ConfigError, match=r"page\.md exists"):
        run("compare", "demo", "--out", tmp_path / "demo", "--devices", "cpu", "--page", page)
    assert content_of(tmp_path) == {"page.md": NOTES}
