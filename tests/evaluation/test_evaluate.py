"""A result holds what plain definitions give, and says what the trials cannot answer."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from helpers.speakers import make_speakers
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation.evaluate import default_name, evaluate_scores
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.result import Source
from qmargin.evaluation.score_files import ScoreSet, read_scores

QUICK = EvaluationOptions(num_replicates=50, fars=(0.1, 0.01, 1e-6))


@pytest.fixture(scope="module")
def score_set(tmp_path_factory: pytest.TempPathFactory) -> ScoreSet:
    return read_scores(make_speakers().write_scores(tmp_path_factory.mktemp("s") / "s.txt"))


def nameless(genuine: list[float], impostor: list[float]) -> ScoreSet:
    scores = np.array([*genuine, *impostor])
    is_genuine = np.arange(len(scores)) < len(genuine)
    return ScoreSet(scores, is_genuine, None, (Source("s.npz", "0" * 64, "scores"),))


def test_points_follow_the_definition(score_set: ScoreSet) -> None:
    genuine = score_set.scores[score_set.is_genuine]
    impostor = np.sort(score_set.scores[~score_set.is_genuine])[::-1]
    result = evaluate_scores(score_set, QUICK)
    for point in result.metrics.tar[:2]:
        allowed = max(k for k in range(len(impostor)) if k / len(impostor) <= point.far_target)
        assert point.allowed == allowed
        assert point.tar == np.mean(genuine > impostor[allowed])
        assert point.threshold == np.nextafter(impostor[allowed], np.inf)
        assert point.false_accepts == np.sum(impostor >= point.threshold)
        assert point.far == point.false_accepts / len(impostor)
        assert point.interval is not None
        assert point.interval[0] <= point.tar <= point.interval[1]
    assert [point.status for point in result.metrics.tar] == ["ok", "few", "not measurable"]


def test_what_is_not_measurable_is_no_number(score_set: ScoreSet) -> None:
    point = evaluate_scores(score_set, QUICK).metrics.tar[2]
    assert (point.tar, point.far, point.threshold, point.interval) == (None, None, None, None)
    assert point.note is not None
    assert "resolve no FAR below" in point.note


def test_subjects_are_drawn_and_replicates_kept(score_set: ScoreSet) -> None:
    result = evaluate_scores(score_set, QUICK)
    assert result.protocol.interval.method == "subject bootstrap"
    assert result.protocol.num_subjects == 12
    assert result.replicates is not None
    assert list(result.replicates.tar) == ["0.1", "0.01"]
    assert len(result.replicates.eer) == 50
    low, high = np.quantile(np.array(result.replicates.eer, dtype=float), [0.025, 0.975])
    assert result.metrics.eer.interval == (low, high)
    band = result.det.band
    assert band is not None
    assert all(low <= high for low, high in zip(band.low, band.high, strict=True))
    assert evaluate_scores(score_set, QUICK).replicates == result.replicates
    other = evaluate_scores(score_set, replace(QUICK, seed=1)).replicates
    assert other is not None
    assert other.eer != result.replicates.eer


def test_the_order_of_trials_changes_nothing(score_set: ScoreSet) -> None:
    assert score_set.keys is not None
    order = np.random.default_rng(0).permutation(len(score_set))
    shuffled = replace(
        score_set,
        scores=score_set.scores[order],
        is_genuine=score_set.is_genuine[order],
        keys=score_set.keys.take(order),
    )
    first, second = evaluate_scores(score_set, QUICK), evaluate_scores(shuffled, QUICK)
    assert second.metrics.tar == first.metrics.tar
    assert second.metrics.eer == first.metrics.eer
    assert second.det == first.det
    assert second.hardest == first.hardest
    assert second.replicates == first.replicates
    assert second.trials_sha256 == first.trials_sha256


def test_files_are_drawn_where_subjects_are_not_known(score_set: ScoreSet) -> None:
    result = evaluate_scores(score_set, replace(QUICK, subjects="none"))
    assert result.protocol.interval.method == "file bootstrap"
    assert result.protocol.num_subjects is None
    assert "too narrow" in str(result.protocol.interval.note)


def test_trials_without_names_have_wilson_intervals() -> None:
    scores = nameless([0.9, 0.8, 0.2], [0.5, 0.1, 0.3, 0.0])
    result = evaluate_scores(scores, replace(QUICK, fars=(0.25,)))
    assert result.protocol.interval.method == "wilson"
    low, high = result.metrics.tar[0].interval or (1.0, 0.0)
    assert low < 2 / 3 < high
    assert result.metrics.eer.interval is None
    assert (result.hardest, result.replicates, result.trials_sha256) == (None, None, None)


def test_too_few_subjects_mean_no_interval_and_a_reason(tmp_path: Path) -> None:
    path = tmp_path / "s.txt"
    path.write_text("a/1 a/2 .5 1\na/1 b/1 .1 0\na/1 b/2 .7 0\n")
    result = evaluate_scores(read_scores(path), replace(QUICK, fars=(0.5,)))
    assert result.metrics.tar[0].interval is None
    assert result.protocol.interval.method == "none"
    assert "more subjects" in str(result.protocol.interval.note)


def test_no_replicates_means_no_intervals(score_set: ScoreSet) -> None:
    result = evaluate_scores(score_set, replace(QUICK, num_replicates=0))
    assert result.protocol.interval.method == "none"
    assert result.metrics.eer.interval is None


def test_no_errors_are_not_certainty(tmp_path: Path) -> None:
    """Where every replicate is perfect, the interval is what 3 / n leaves."""
    path = tmp_path / "s.txt"
    lines = [f"s{i}/1 s{i}/2 0.9 1" for i in range(30)]
    lines += [f"s{i}/1 s{j}/2 0.1 0" for i in range(30) for j in range(30) if i != j]
    path.write_text("\n".join(lines))
    result = evaluate_scores(read_scores(path), QUICK)
    assert result.metrics.tar[0].tar == 1.0
    assert result.metrics.tar[0].interval == (0.9, 1.0)
    assert result.metrics.eer.interval == (0.0, 0.1)
    assert result.calibration is None  # one threshold separates everything


@pytest.mark.parametrize("rule", ["nearest", "interpolated"])
def test_other_rules_are_named_and_have_no_interval(score_set: ScoreSet, rule: str) -> None:
    result = evaluate_scores(score_set, replace(QUICK, rule=rule))
    assert result.protocol.rule == rule
    assert result.metrics.tar[0].interval is None
    assert rule in str(result.protocol.interval.note)


def test_the_hardest_trials_come_first(score_set: ScoreSet) -> None:
    hardest = evaluate_scores(score_set, replace(QUICK, num_hardest=3)).hardest
    assert hardest is not None
    impostor = np.sort(score_set.scores[~score_set.is_genuine])
    genuine = np.sort(score_set.scores[score_set.is_genuine])
    assert [pair.score for pair in hardest.false_accepts] == impostor[:-4:-1].tolist()
    assert [pair.score for pair in hardest.false_rejects] == genuine[:3].tolist()
    assert all(pair.enrol[:4] != pair.test[:4] for pair in hardest.false_accepts)
    assert evaluate_scores(score_set, replace(QUICK, num_hardest=0)).hardest is None


def test_the_histogram_counts_every_finite_score() -> None:
    infinite = nameless([1.0, 0.5, np.inf], [0.25, -np.inf, 0.5])
    result = evaluate_scores(infinite, replace(QUICK, fars=(0.5,)))
    assert sum(result.histogram.genuine) == 2
    assert sum(result.histogram.impostor) == 2
    assert len(result.histogram.edges) == 65
    assert result.calibration is None
    assert result.metrics.cllr.value is not None
    equal = evaluate_scores(nameless([1.0], [1.0]), replace(QUICK, fars=(0.5,)))
    assert sum(equal.histogram.genuine) == 1
    assert equal.metrics.eer.value == 0.5


def test_reliability_covers_all_trials(score_set: ScoreSet) -> None:
    calibration = evaluate_scores(score_set, QUICK).calibration
    assert calibration is not None
    reliability = calibration.reliability
    assert sum(reliability.count) == len(score_set)
    posterior = 1 / (1 + np.exp(-(calibration.scale * score_set.scores + calibration.offset)))
    place = np.minimum((posterior * 20).astype(int), 19)
    num_genuine = score_set.is_genuine.sum()
    weight = np.where(score_set.is_genuine, 1 / num_genuine, 1 / (len(score_set) - num_genuine))
    for index in range(20):
        inside = place == index
        if not inside.any():
            assert reliability.predicted[index] is None
            continue
        total = weight[inside].sum()
        share = weight[inside & score_set.is_genuine].sum() / total
        assert reliability.observed[index] == pytest.approx(share)
        mean = (weight * posterior)[inside].sum() / total
        assert reliability.predicted[index] == pytest.approx(mean)


def test_groups_are_audited_at_the_common_threshold(score_set: ScoreSet) -> None:
    groups = {f"id{i:02d}": "even" if i % 2 == 0 else "odd" for i in range(12)}
    result = evaluate_scores(score_set, replace(QUICK, group_of=groups))
    audit = result.groups
    assert audit is not None
    assert audit.far_target == 0.1  # the smallest FAR with enough trials
    assert audit.threshold == result.metrics.tar[0].threshold
    assert score_set.keys is not None
    for row in audit.rows:
        is_odd = row.group == "odd"
        inside = [
            all(int(name[2:4]) % 2 == is_odd for name in score_set.keys.trial(trial))
            for trial in range(len(score_set))
        ]
        impostor = score_set.scores[np.array(inside) & ~score_set.is_genuine]
        genuine = score_set.scores[np.array(inside) & score_set.is_genuine]
        assert (row.num_genuine, row.num_impostors) == (len(genuine), len(impostor))
        assert row.fmr == pytest.approx(np.mean(impostor >= audit.threshold))
        assert row.fnmr == pytest.approx(np.mean(genuine < audit.threshold))
    assert "two groups count in none" in str(audit.note)
    named = replace(QUICK, group_of=groups, group_far=0.01)
    chosen = evaluate_scores(score_set, named).groups
    assert chosen is not None
    assert chosen.far_target == 0.01
    with pytest.raises(ProtocolError, match="FAR=1e-06 is not measurable"):
        evaluate_scores(score_set, replace(named, group_far=1e-6))
    with pytest.raises(DataError, match="has no names"):
        evaluate_scores(nameless([1.0], [0.0]), replace(QUICK, group_of=groups))


@pytest.mark.parametrize(
    ("genuine", "impostor", "kind"), [([], [0.5], "genuine"), ([0.5], [], "impostor")]
)
def test_one_label_alone_is_refused(genuine: list[float], impostor: list[float], kind: str) -> None:
    with pytest.raises(ProtocolError, match=rf"s\.npz: there are 0 {kind} trials among 1"):
        evaluate_scores(nameless(genuine, impostor))


@pytest.mark.parametrize(
    "bad",
    [
        {"fars": (0.0,)},
        {"fars": ()},
        {"fars": (0.1, 0.1)},
        {"p_targets": (1.0,)},
        {"rule": "best"},
        {"subjects": "guess"},
        {"group_far": 0.3},
        {"num_replicates": -1},
        {"level": 1.0},
    ],
)
def test_options_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        EvaluationOptions(**bad)  # type: ignore[arg-type]


def test_progress_names_the_stage(score_set: ScoreSet) -> None:
    calls: list[tuple[str, int, int]] = []
    evaluate_scores(score_set, QUICK, progress=lambda *call: calls.append(call))
    assert calls[-1] == ("bootstrap", 50, 50)


def test_names_after_files() -> None:
    assert default_name(Path("a/b.scores.tsv")) == "b"
    assert default_name(".hidden") == "system"
