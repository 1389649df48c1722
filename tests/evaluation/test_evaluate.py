"""A result holds what plain definitions give, and says what the trials cannot answer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import qmargin
from helpers.speakers import make_speakers
from qmargin import registry
from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.evaluation import columns
from qmargin.evaluation.columns import Growing, SplitScores
from qmargin.evaluation.embeddings import Embeddings
from qmargin.evaluation.evaluate import EvaluationOptions, evaluate_scores
from qmargin.evaluation.protocols import all_pairs
from qmargin.evaluation.protocols.all_pairs import evaluate_identities, identities_of
from qmargin.evaluation.result import Source, read_result, write_result
from qmargin.evaluation.scores import ScoreSet, read_scores
from qmargin.metrics import curve
from qmargin.metrics.calibration import min_cllr, min_cllr_of
from qmargin.metrics.curve import StaircaseParts, det_curve, staircase, thin_curve
from qmargin.registry import Registry

QUICK = EvaluationOptions(num_replicates=50, fars=(0.1, 0.01, 1e-6))


@pytest.fixture(scope="module")
def score_set(tmp_path_factory):
    return read_scores(make_speakers().write_scores(tmp_path_factory.mktemp("s") / "s.txt"))


def nameless(genuine, impostor):
    scores = np.array([*genuine, *impostor])
    is_genuine = np.arange(len(scores)) < len(genuine)
    return ScoreSet(scores, is_genuine, None, (Source("s.npz", "0" * 64, "scores"),))


def test_points_follow_the_definition(score_set):
    genuine = score_set.scores[score_set.is_genuine]
    impostor = np.sort(score_set.scores[~score_set.is_genuine])[::-1]
    result = evaluate_scores(score_set, QUICK)
    for point in result.measures.tar[:2]:
        allowed = max(k for k in range(len(impostor)) if k / len(impostor) <= point.far_target)
        assert point.allowed == allowed
        assert point.tar == np.mean(genuine > impostor[allowed])
        assert point.threshold == np.nextafter(impostor[allowed], np.inf)
        assert point.false_accepts == np.sum(impostor >= point.threshold)
        assert point.far == point.false_accepts / len(impostor)
        assert point.interval[0] <= point.tar <= point.interval[1]
    assert [point.status for point in result.measures.tar] == ["ok", "few", "not measurable"]
    last = result.measures.tar[2]
    assert (last.tar, last.far, last.threshold, last.interval) == (None, None, None, None)
    assert "resolve no FAR below" in last.note


def test_subjects_are_drawn_and_replicates_kept(score_set):
    calls = []
    result = evaluate_scores(score_set, QUICK, progress=lambda *call: calls.append(call))
    assert calls[-1] == ("bootstrap", 50, 50)
    assert result.protocol.interval.method == "subject bootstrap"
    assert result.protocol.num_subjects == 12
    assert list(result.replicates.tar) == ["0.1", "0.01"]
    assert len(result.replicates.eer) == 50
    low, high = np.quantile(np.array(result.replicates.eer, dtype=float), [0.025, 0.975])
    assert result.measures.eer.interval == (low, high)
    band = result.det.band
    assert all(low <= high for low, high in zip(band.low, band.high, strict=True))
    assert evaluate_scores(score_set, QUICK).replicates == result.replicates
    other = evaluate_scores(score_set, replace(QUICK, seed=1)).replicates
    assert other.eer != result.replicates.eer


def test_the_order_of_trials_changes_nothing(score_set):
    order = np.random.default_rng(0).permutation(len(score_set))
    shuffled = replace(
        score_set,
        scores=score_set.scores[order],
        is_genuine=score_set.is_genuine[order],
        keys=score_set.keys.take(order),
    )
    first, second = evaluate_scores(score_set, QUICK), evaluate_scores(shuffled, QUICK)
    assert second.measures.tar == first.measures.tar
    assert second.measures.eer == first.measures.eer
    assert second.det == first.det
    assert second.hardest == first.hardest
    assert second.replicates == first.replicates
    assert second.protocol.data_sha256 == first.protocol.data_sha256


@pytest.mark.parametrize(
    ("changes", "method", "note"),
    [
        ({"subjects": "none"}, "file bootstrap", "too narrow"),
        ({"num_replicates": 0}, "none", "not requested"),
        ({"rule": "nearest"}, "subject bootstrap", "nearest"),
        ({"rule": "interpolated"}, "subject bootstrap", "interpolated"),
    ],
)
def test_intervals_say_how_they_were_made(score_set, changes, method, note):
    result = evaluate_scores(score_set, replace(QUICK, **changes))
    assert result.protocol.interval.method == method
    assert note in result.protocol.interval.note
    assert (result.measures.tar[0].interval is None) == (method != "file bootstrap")
    assert (result.protocol.num_subjects is None) == (method == "file bootstrap")


def test_trials_without_names_have_wilson_intervals():
    scores = nameless([0.9, 0.8, 0.2], [0.5, 0.1, 0.3, 0.0])
    result = evaluate_scores(scores, replace(QUICK, fars=(0.25,)))
    assert result.protocol.interval.method == "wilson"
    low, high = result.measures.tar[0].interval or (1.0, 0.0)
    assert low < 2 / 3 < high
    assert result.measures.eer.interval is None
    assert (result.hardest, result.replicates, result.protocol.data_sha256) == (None, None, None)


def test_too_few_subjects_mean_no_interval_and_a_reason(tmp_path):
    path = tmp_path / "s.txt"
    path.write_text("a/1 a/2 .5 1\na/1 b/1 .1 0\na/1 b/2 .7 0\n")
    result = evaluate_scores(read_scores(path), replace(QUICK, fars=(0.5,)))
    assert result.measures.tar[0].interval is None
    assert result.protocol.interval.method == "none"
    assert "more subjects" in str(result.protocol.interval.note)


def test_no_errors_are_not_certainty(tmp_path):
    """Where every replicate is perfect, the interval is what 3 / n leaves."""
    path = tmp_path / "s.txt"
    lines = [f"s{i}/1 s{i}/2 0.9 1" for i in range(30)]
    lines += [f"s{i}/1 s{j}/2 0.1 0" for i in range(30) for j in range(30) if i != j]
    path.write_text("\n".join(lines))
    result = evaluate_scores(read_scores(path), QUICK)
    assert result.measures.tar[0].tar == 1.0
    assert result.measures.tar[0].interval == (0.9, 1.0)
    assert result.measures.eer.interval == (0.0, 0.1)
    assert result.calibration is None  # one threshold separates everything


def test_the_hardest_trials_come_first(score_set):
    hardest = evaluate_scores(score_set, replace(QUICK, num_hardest=3)).hardest
    impostor = np.sort(score_set.scores[~score_set.is_genuine])
    genuine = np.sort(score_set.scores[score_set.is_genuine])
    assert [pair.score for pair in hardest.false_accepts] == impostor[:-4:-1].tolist()
    assert [pair.score for pair in hardest.false_rejects] == genuine[:3].tolist()
    assert all(pair.enrol[:4] != pair.test[:4] for pair in hardest.false_accepts)
    assert evaluate_scores(score_set, replace(QUICK, num_hardest=0)).hardest is None


def test_the_histogram_counts_every_finite_score():
    infinite = nameless([1.0, 0.5, np.inf], [0.25, -np.inf, 0.5])
    result = evaluate_scores(infinite, replace(QUICK, fars=(0.5,)))
    assert sum(result.histogram.genuine) == 2
    assert sum(result.histogram.impostor) == 2
    assert len(result.histogram.edges) == 65
    assert result.calibration is None
    assert result.measures.cllr.value is not None
    equal = evaluate_scores(nameless([1.0], [1.0]), replace(QUICK, fars=(0.5,)))
    assert sum(equal.histogram.genuine) == 1
    assert equal.measures.eer.value == 0.5


def test_reliability_covers_all_trials(score_set):
    calibration = evaluate_scores(score_set, QUICK).calibration
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


def test_groups_are_audited_at_the_common_threshold(score_set):
    groups = {f"id{i:02d}": "even" if i % 2 == 0 else "odd" for i in range(12)}
    result = evaluate_scores(score_set, replace(QUICK, group_of=groups))
    audit = result.groups
    assert audit.far_target == 0.1  # the smallest FAR with enough trials
    assert audit.threshold == result.measures.tar[0].threshold
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
    assert "between two groups are left out" in str(audit.note)
    named = replace(QUICK, group_of=groups, group_far=0.01)
    chosen = evaluate_scores(score_set, named).groups
    assert chosen.far_target == 0.01
    with pytest.raises(ProtocolError, match="FAR=1e-06 is not measurable"):
        evaluate_scores(score_set, replace(named, group_far=1e-6))
    with pytest.raises(DataError, match="has no names"):
        evaluate_scores(nameless([1.0], [0.0]), replace(QUICK, group_of=groups))


@pytest.mark.parametrize(
    ("genuine", "impostor", "kind"), [([], [0.5], "genuine"), ([0.5], [], "impostor")]
)
def test_one_label_alone_is_refused(genuine, impostor, kind):
    with pytest.raises(ProtocolError, match=rf"s\.npz: there are 0 {kind} trials"):
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
def test_options_are_checked(bad):
    with pytest.raises(ConfigError):
        EvaluationOptions(**bad)


MOST_BYTES = 30  # for a score of 8 and a label of 1
CHILD = """
import resource, sys
from qmargin.evaluation.evaluate import evaluate_scores
from qmargin.evaluation.scores import read_scores
from qmargin.metrics import curve

curve.PART = 1 << 17

def peak(path):
    assert evaluate_scores(read_scores(path)).protocol.num_trials
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small, large = peak(sys.argv[1]), peak(sys.argv[2])
print(large - small)
"""


def write(path, num_scores):
    generator = np.random.default_rng(0)
    labels = generator.random(num_scores) < 0.1
    scores = np.round(generator.normal(3.0 * labels), 6)
    if path.name.startswith("two"):
        np.savez(path, genuine=scores[labels], impostor=scores[~labels])
    elif path.suffix == ".npz":
        np.savez(path, scores=scores, labels=labels.astype(np.int64))
    else:
        sign = "," if path.suffix == ".csv" else "\t"
        rows = zip(scores.tolist(), labels.tolist(), strict=True)
        path.write_text(f"score{sign}label\n" + "".join(f"{a}{sign}{b:d}\n" for a, b in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two.npz", "labels.npz", "s.csv", "s.tsv"])
def test_bytes_of_a_score_are_few(tmp_path, name):
    num_scores = 2_000_000
    small = write(tmp_path / f"{name.split('.')[0]}-small.{name.split('.')[1]}", 50_000)
    paths = [small, write(tmp_path / name, num_scores)]
    command = [sys.executable, "-c", CHILD, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) / num_scores < MOST_BYTES


@pytest.mark.parametrize("kind", ["distinct", "ties", "infinite", "one value", "float32"])
@pytest.mark.parametrize("size", [1, 7, 1000, 10**9])
def test_parts_are_the_whole(kind, size):
    generator = np.random.default_rng(3)
    genuine, impostor = generator.normal(1.0, size=60), generator.normal(size=300)
    if kind == "ties":
        genuine, impostor = np.round(genuine), np.round(impostor)
    elif kind == "infinite":
        genuine[:5], impostor[:5], impostor[5:9] = np.inf, np.inf, -np.inf
    elif kind == "one value":
        genuine, impostor = np.ones(60), np.ones(300)
    elif kind == "float32":
        genuine = genuine.astype(np.float32)
    parts = StaircaseParts(genuine, impostor, size=size)
    found = [np.concatenate(column) for column in zip(*parts, strict=True)]
    for column, expected in zip(found, staircase(genuine, impostor), strict=True):
        np.testing.assert_array_equal(column, expected)
    thin, whole = thin_curve(parts, 20), det_curve(genuine, impostor).thin(20)
    for name in ("thresholds", "far", "frr"):
        np.testing.assert_array_equal(getattr(thin, name), getattr(whole, name))
    assert min_cllr_of(parts) == pytest.approx(min_cllr(genuine, impostor), rel=1e-14, abs=1e-15)


def test_a_result_does_not_depend_on_parts(monkeypatch):
    generator = np.random.default_rng(1)
    scores = np.concatenate([generator.normal(2.0, size=3000), generator.normal(size=40_000)])
    source = Source("a", "b", "scores")
    score_set = ScoreSet(scores, np.arange(len(scores)) < 3000, None, (source,))
    options = EvaluationOptions(num_replicates=0)
    whole = evaluate_scores(score_set, options)
    monkeypatch.setattr(curve, "PART", 5000)
    parts = evaluate_scores(score_set, options)
    assert (parts.measures, parts.det) == (whole.measures, whole.det)


def test_an_array_grows_over_blocks(monkeypatch):
    monkeypatch.setattr(columns, "BLOCK", 4)
    growing, split = Growing(np.int32), SplitScores()
    values = np.arange(11)
    for part in (values[:3], values[3:4], values[4:4], values[4:]):
        growing.append(part)
        split.append(part.astype(float), part % 3 == 0)
    assert len(growing) == 11
    assert growing.array().tolist() == values.tolist()
    scores, is_genuine = split.arrays()
    assert scores.tolist() == [0, 3, 6, 9, 1, 2, 4, 5, 7, 8, 10]
    assert is_genuine.sum() == 4


def test_a_file_of_scores_is_enough(tmp_path):
    path = make_speakers(4, 3).write_scores(tmp_path / "s.txt")
    options = replace(QUICK, num_replicates=0)
    found, expected = (qmargin.evaluate_scores(each, options) for each in (path, read_scores(path)))
    assert replace(found, created="") == replace(expected, created="")


class TestRegisteredMetrics:
    """A metric is one function with a name."""

    @pytest.fixture(autouse=True)
    def _registry(self, monkeypatch):
        monkeypatch.setattr(registry, "metrics", Registry("test_metric"))
        registry.metrics.register("distance", self.distance)
        registry.metrics.register("extremes", self.extremes)

    @staticmethod
    def distance(genuine, impostor):
        """Distance of the means.

        In the unit of the scores.
        """
        return float(genuine.mean() - impostor.mean())

    @staticmethod
    def extremes(genuine, impostor):
        return {"low": genuine.min(), "high": impostor.max(), "none": float("nan")}

    def test_they_are_in_every_result_and_its_file(self, score_set, tmp_path):
        result = evaluate_scores(score_set, QUICK)
        genuine = score_set.scores[score_set.is_genuine]
        impostor = score_set.scores[~score_set.is_genuine]
        extra = result.measures.extra
        assert list(extra) == ["distance", "extremes low", "extremes high", "extremes none"]
        assert extra["distance"].value == pytest.approx(genuine.mean() - impostor.mean())
        assert extra["distance"].note == "Distance of the means."
        assert extra["extremes low"].value == genuine.min()
        assert extra["extremes none"].value is None
        write_result(tmp_path / "r.json", result, keep_paths=True)
        assert read_result(tmp_path / "r.json") == result

    def test_they_are_measured_over_all_pairs(self, monkeypatch):
        keys = tuple(f"{name}/{i}" for name in "abcdef" for i in range(3))
        rows = np.random.default_rng(0).normal(size=(18, 4))
        embeddings = Embeddings(keys, rows, Source("e.npz", "ab", "embeddings"))
        options = EvaluationOptions(fars=(0.1,), num_replicates=0, metrics=("extremes",))
        found = evaluate_identities(embeddings, identities_of(keys), options)
        highest = found.measures.extra["extremes high"].value
        assert highest == pytest.approx(found.hardest.false_accepts[0].score, abs=1e-6)
        monkeypatch.setattr(all_pairs, "MAX_ROWS", 5)
        large = evaluate_identities(embeddings, identities_of(keys), options)
        assert "not measured" in str(large.measures.extra["extremes"].note)

    def test_they_can_be_chosen(self, score_set):
        chosen = evaluate_scores(score_set, replace(QUICK, metrics=("distance",)))
        assert list(chosen.measures.extra) == ["distance"]
        assert evaluate_scores(score_set, replace(QUICK, metrics=())).measures.extra == {}
        with pytest.raises(ConfigError, match="distanc"):
            EvaluationOptions(metrics=("distanc",))

    def test_one_that_fails_is_listed_and_harms_no_other(self, score_set):
        def broken(genuine, impostor):
            genuine.sort()
            return 0.0

        plain = evaluate_scores(score_set, replace(QUICK, metrics=()))
        registry.metrics.register("broken", broken)
        result = evaluate_scores(score_set, QUICK)
        assert result.measures.extra["broken"].value is None
        assert "read-only" in str(result.measures.extra["broken"].note)
        assert replace(result.measures, extra={}) == plain.measures
