"""No command writes over its inputs, nor over files that it did not write."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from helpers.commands import run_command as run
from helpers.results import synthetic_result, write_results
from helpers.speakers import make_speakers
from qmargin.errors import ConfigError
from qmargin.evaluation.protocols.face_sets import VerificationSet, write_pictures
from qmargin.evaluation.result import Hardest, HardPair, Source, read_result
from qmargin.files import Guard

NOTES = b"my own notes\n"


def content_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with inputs of evaluations."""
    monkeypatch.chdir(tmp_path)
    speakers = make_speakers(6, 3)
    speakers.write_scores(Path("system.txt"))
    speakers.write_trials(Path("trials.txt"))
    speakers.write_embeddings(Path("model.npz"))
    lines = "".join(f"id{i:02d},{'f' if i % 2 else 'm'}\n" for i in range(6))
    Path("groups.csv").write_text("subject,group\n" + lines)
    Path("card.json").write_text('{"weights_sha256": "ab"}')
    return tmp_path


def scores(*options: object) -> None:
    run("evaluate", "scores", "system.txt", "--replicates", 0, *options)


def trials(*options: object, out: str = "r.json") -> None:
    words = ("trials.txt", "--embeddings", "model.npz", "--out", out, "--replicates", 0)
    run("evaluate", "trials", *words, *options)


@pytest.mark.parametrize("name", ["system.txt", "groups.csv", "card.json"])
@pytest.mark.parametrize("how", ["same", "symbolic", "hard", "dotted"])
def test_an_input_is_never_written_over(folder, name, how):
    out = folder / name
    if how == "dotted":
        out = folder / ".." / folder.name / name
    elif how != "same":
        out = folder / "link"
        (os.link if how == "hard" else os.symlink)(folder / name, out)
    before = content_of(folder)
    extra = ("--groups", "groups.csv", "--model-card", "card.json")
    for overwrite in ((), ("--overwrite",)):
        with pytest.raises(ConfigError, match=rf"{out.name} is an input"):
            scores("--out", out, *extra, *overwrite)
    assert content_of(folder) == before


def test_scores_do_not_replace_an_input(folder):
    before = content_of(folder)
    for name in ("trials.txt", "model.npz"):
        with pytest.raises(ConfigError, match=rf"{name} is an input"):
            trials("--scores", name)
    with pytest.raises(ConfigError, match=r"r\.json is used for two outputs"):
        trials("--scores", "r.json")
    assert content_of(folder) == before


def test_a_foreign_file_needs_permission_and_our_own_does_not(folder):
    out = Path("r.json")
    out.write_bytes(NOTES)
    with pytest.raises(ConfigError, match=r"r\.json exists .*--overwrite"):
        scores("--out", out)
    assert out.read_bytes() == NOTES
    scores("--out", out, "--overwrite")
    scores("--out", out, "--name", "again")
    assert read_result(out).system.name == "again"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("r.scores.tsv", NOTES),
        ("r.scores.tsv", b"enrol\ttest\tscore\tlabel\nann\tbob\t0.5\t1\n"),
        ("r.scores.tsv.partial", NOTES),
    ],
)
def test_a_foreign_table_of_scores_stays(folder, name, content):
    table = Path(name)
    table.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{name} exists .*--overwrite"):
        trials()
    assert table.read_bytes() == content


def test_our_own_table_of_scores_is_replaced(folder):
    table = Path("r.scores.tsv")
    table.write_bytes(NOTES)
    trials("--overwrite")
    first = table.read_bytes()
    trials()  # the same again
    trials("--center", "model.npz")  # others, and the result knows them
    assert table.read_bytes() != first
    Path("r.json").unlink()  # a run that was stopped after scoring
    trials("--center", "model.npz")
    assert Path("r.json").exists()


def test_scores_that_were_read_are_not_taken_for_our_own(folder):
    """A result of `evaluate scores` knows the table too, as somebody else's."""
    trials(out="first.json")
    table = Path("r.scores.tsv")
    before = Path("first.scores.tsv").read_bytes().replace(b"id05", b"id77")
    table.write_bytes(before)
    run("evaluate", "scores", table, "--out", "r.json", "--replicates", 0)
    with pytest.raises(ConfigError, match=r"r\.scores\.tsv exists"):
        trials()
    assert table.read_bytes() == before


def test_a_device_or_a_dangling_link_is_not_replaced(folder):
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        scores("--out", "pipe", "--overwrite")
    link = Path("nowhere.json")
    link.symlink_to("missing")
    with pytest.raises(ConfigError, match=r"nowhere\.json exists"):
        scores("--out", link)
    assert link.is_symlink()


def test_a_report_replaces_reports_only(tmp_path):
    (result,) = write_results(tmp_path / "in", synthetic_result())
    out = tmp_path / "out"
    out.mkdir()
    command = ("report", result, "--out", out, "--no-figures")
    for name in ("index.html", "metrics.json", "tables.md", "tables.tex", "tables.csv"):
        (out / name).write_bytes(NOTES)
        with pytest.raises(ConfigError, match=rf"{name} exists"):
            run(*command)
        assert content_of(out) == {name: NOTES}
        (out / name).unlink()
    (out / "index.html").write_bytes(NOTES)
    run(*command, "--overwrite")
    before = content_of(out)
    run(*command, "--title", "Another")
    assert content_of(out)["index.html"] != before["index.html"]
    inside = result.rename(tmp_path / "metrics.json")
    before = inside.read_bytes()
    with pytest.raises(ConfigError, match=r"metrics\.json is an input"):
        run("report", inside, "--out", tmp_path, "--no-figures", "--overwrite")
    assert inside.read_bytes() == before


def test_figures_replace_figures_only(tmp_path):
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
    for _ in range(2):
        run("report", result, "--out", tmp_path / "out")


def test_pictures_do_not_replace_other_pictures(tmp_path):
    rows, made = np.array([[0, 1]]), (b"one", b"two")
    source = Source("set.bin", "ab", "pairs")
    pairs = VerificationSet(made, rows, np.arange(2), np.array([True]), source)
    hardest = Hardest((HardPair(*pairs.keys, 0.5),), ())
    mine = tmp_path / f"{pairs.keys[0]}.jpg"
    mine.write_bytes(NOTES)
    with pytest.raises(ConfigError, match=rf"{mine.name} exists"):
        write_pictures(tmp_path, pairs, hardest, guard=Guard())
    assert mine.read_bytes() == NOTES
    for _ in range(2):
        write_pictures(tmp_path / "new", pairs, hardest, guard=Guard())


def test_a_page_of_results_is_looked_at_before_training(tmp_path):
    page = tmp_path / "page.md"
    page.write_bytes(NOTES)
    with pytest.raises(ConfigError, match=r"page\.md exists"):
        run("compare", "demo", "--out", tmp_path / "demo", "--devices", "cpu", "--page", page)
    assert content_of(tmp_path) == {"page.md": NOTES}
