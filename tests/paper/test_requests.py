"""What `qmargin paper` refuses, and when: before anything is trained, and in words."""

from pathlib import Path

import numpy as np
import pytest

from qmargin.cli.main import main
from qmargin.errors import ConfigError, DataError
from qmargin.paper import figures, pairs, runs, tables
from qmargin.paper.enough import check_pairs
from qmargin.paper.runs import Request


@pytest.fixture
def nothing_is_trained(monkeypatch):
    def train(*arguments):
        pytest.fail("a training was begun")

    monkeypatch.setattr(runs, "complete_parts", train)


def few_pictures(path: Path, num_identities: int = 10, num_samples: int = 3) -> Path:
    """Four tenths of the identities are for the test."""
    labels = np.repeat(np.arange(num_identities), num_samples)
    np.savez(path, label=labels, images=np.zeros((len(labels), 32, 32), dtype=np.uint8))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": 0}, "--seeds is 0; it must be at least 1"),
        ({"minutes": -1.0}, "--minutes is -1; it must be above 0"),
        ({"minutes": float("nan")}, "--minutes is nan; it must be above 0"),
        ({"results": Path("r"), "minutes": 3.0}, "--minutes is 3.0 and --results shows"),
        ({"results": Path("r"), "data": Path("d")}, "--data is d and --results shows"),
        ({"results": Path("r"), "seeds": 2}, "--seeds is 2 and --results shows"),
    ],
)
def test_options_that_cannot_be_or_would_do_nothing_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Request(Path("out"), **options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["table-throughput", "--data", "/nonexist"], "--data is /nonexist and table-throughput"),
        (["table-throughput", "--minutes", "3"], "--minutes is 3.0 and table-throughput times"),
        (["table-throughput", "--minutes", "-1"], "--minutes is -1; it must be above 0"),
        (["table-throughput", "--seeds", "2"], "--seeds is 2 and table-throughput times"),
        (["figure-pairs", "--seeds", "2"], "--seeds is 2 and figure-pairs shows the models of one"),
        (["table-sota", "--seeds", "0"], "--seeds is 0"),
        (["claim-cosface", "--data", "here"], "claim-cosface is described, and nothing is made"),
    ],
)
def test_the_command_refuses_options_that_an_artefact_does_not_look_at(
    words, message, capsys, tmp_path, nothing_is_trained
):
    assert main(["paper", *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "needed"),
    [
        (tables.table_sota, "FAR 0.001 needs at least 1,000"),
        (tables.table_face, "FAR 0.001 needs at least 1,000"),
        (tables.table_seeds, "FAR 0.001 needs at least 1,000"),
        (tables.table_speaker, "FAR 0.001 needs at least 1,000"),
        (pairs.figure_pairs, "FAR 0.001 needs at least 1,000"),
        (figures.figure_det_face, "FAR 0.01 needs at least 100"),
        (figures.figure_det_speaker, "FAR 0.01 needs at least 100"),
    ],
)
def test_too_few_pairs_are_refused_before_the_training(make, needed, tmp_path, nothing_is_trained):
    data = few_pictures(tmp_path / "few.npz")
    with pytest.raises(
        DataError, match=rf"few\.npz make 54 impostor pairs with seed 0, and {needed}"
    ):
        make(Request(tmp_path / "out", data=data, device="cpu"))
    assert not (tmp_path / "out").exists()


def test_pairs_that_are_just_enough_are_taken(tmp_path):
    data = few_pictures(tmp_path / "some.npz", num_identities=37)  # 15 to test, 945 pairs
    options = Request(tmp_path / "out", data=data, device="cpu", seeds=2).demo_options(1)
    with pytest.raises(DataError, match="make 945 impostor pairs"):
        check_pairs(options, 1e-3)
    check_pairs(options, 1e-2)
    few_pictures(data, num_identities=40)  # 16 to test, 1,080 pairs
    check_pairs(options, 1e-3)


def test_a_page_that_cannot_be_written_is_named(capsys):
    assert main(["paper", "--page", "/proc/x.md"]) == 2
    said = capsys.readouterr().err
    assert "error: /proc/x.md cannot be written (" in said and "choose another place" in said
