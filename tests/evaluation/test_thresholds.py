"""Thresholds of a model: from its own evaluation, and from no other."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.results import synthetic_result
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.result import Source
from qmargin.evaluation.thresholds import (
    Thresholds,
    read_thresholds,
    thresholds_of,
    write_thresholds,
)

OURS, RESULT = "ab" * 32, "cd" * 32


def made(**changes: object) -> Thresholds:
    own = synthetic_result(num_impostors=2000, card={"weights_sha256": OURS})
    result = replace(own, **changes)
    return thresholds_of(result, weights_sha256=OURS, result_sha256=RESULT, flip="sum")


def test_points_are_those_that_could_be_measured() -> None:
    thresholds = made()
    assert [point.far_target for point in thresholds.points] == [1e-2, 1e-3]
    assert thresholds.at(0.001) == thresholds.points[1]
    with pytest.raises(ProtocolError, match=r"FAR 1e-05 .* 2,000 impostor .* 0\.01, 0\.001"):
        thresholds.at(1e-5)


def test_they_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    write_thresholds(path, made())
    assert read_thresholds(path) == made()
    write_thresholds(path, replace(made(), calibration=None))
    assert read_thresholds(path).calibration is None


def test_a_result_of_another_model_is_refused() -> None:
    assert made(system=replace(synthetic_result().system, model_card={"weights_sha256": OURS}))
    with pytest.raises(DataError, match="evaluate this model"):
        made(system=replace(synthetic_result().system, model_card={"weights_sha256": RESULT}))


@pytest.mark.parametrize("card", [None, {"loss": "Q-Margin"}])
def test_a_result_that_names_no_model_needs_trust(card: dict[str, str] | None) -> None:
    result = synthetic_result("someone", card=card)
    with pytest.raises(DataError, match=r"'someone'.* does not name the weights.*--trust-result"):
        thresholds_of(result, weights_sha256=OURS, result_sha256=RESULT)
    found = thresholds_of(result, weights_sha256=OURS, result_sha256=RESULT, is_trusted=True)
    assert found.weights_sha256 == OURS


def test_trust_does_not_extend_to_a_result_of_another_model() -> None:
    other = synthetic_result(card={"weights_sha256": RESULT})
    with pytest.raises(DataError, match="cdcdcdcdcdcd"):
        thresholds_of(other, weights_sha256=OURS, result_sha256=RESULT, is_trusted=True)


@pytest.mark.parametrize("role", ["cohort", "center"])
def test_normalised_scores_are_refused(role: str) -> None:
    """Their thresholds mean nothing for the plain cosine of two samples."""
    with pytest.raises(DataError, match=f"changed by a {role}"):
        made(sources=(Source("a", "b", "scores"), Source("a", "b", role)))


def test_scores_of_templates_are_refused() -> None:
    card = {"weights_sha256": OURS, "pooling": "norms kept"}
    with pytest.raises(DataError, match="compared templates"):
        made(system=replace(synthetic_result().system, model_card=card))


def test_an_evaluation_that_measured_nothing_is_refused() -> None:
    result = synthetic_result(num_impostors=20)
    with pytest.raises(ProtocolError, match="20 impostor trials"):
        thresholds_of(result, weights_sha256=OURS, result_sha256=RESULT, is_trusted=True)


def test_an_unknown_flip_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of none, sum"):
        replace(made(), flip="twice")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": "qmargin-thresholds", "version": 2}', "[" * 100_000]
)
def test_damaged_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "thresholds.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"thresholds\.json"):
        read_thresholds(path)


def test_numbers_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "thresholds.json"
    write_thresholds(path, made())
    content = json.loads(path.read_text())
    content["points"][0]["threshold"] = "low"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"points\[0\]\.threshold is 'low', not a number"):
        read_thresholds(path)
    path.write_text(json.dumps(content).replace('"low"', "NaN"))
    with pytest.raises(DataError, match="NaN is not a JSON number"):
        read_thresholds(path)
