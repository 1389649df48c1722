"""Search in a gallery against a loop over every search."""

import numpy as np
import pytest

from qmargin.errors import ProtocolError
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols import identification as module
from qmargin.evaluation.protocols.identification import TemplateList, evaluate_identification
from qmargin.evaluation.protocols.templates import Templates
from qmargin.evaluation.result import Source

OPTIONS = EvaluationOptions(fars=(0.1, 0.2), num_replicates=20, num_hardest=5, protocol="ijbc")


def make_search(seed: int = 0) -> tuple[Templates, TemplateList, TemplateList]:
    """20 subjects; 12 are in the gallery, three of them twice."""
    rng = np.random.default_rng(seed)
    subject = np.concatenate([np.arange(12), [0, 1, 2], np.repeat(np.arange(20), 3)])
    vectors = rng.normal(size=(20, 8))[subject] + 0.9 * rng.normal(size=(len(subject), 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    ids = 5 + 3 * np.arange(len(subject))
    names = np.array([f"s{each:02d}" for each in subject])
    gallery = TemplateList("G1", ids[:15], names[:15], Source("g.csv", "1" * 64, "trials"))
    probes = TemplateList("mixed", ids[15:], names[15:], Source("p.csv", "2" * 64, "trials"))
    return Templates(ids, vectors), probes, gallery


@pytest.mark.parametrize("block", [4, 1024])
def test_rates_follow_the_loop(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROBES", block)
    templates, probes, gallery = make_search()
    found = evaluate_identification(templates, probes, gallery, OPTIONS)
    vector = dict(zip(templates.ids.tolist(), templates.vectors, strict=True))
    mates, others, first_ranks = [], [], []
    for probe, subject in zip(probes.template.tolist(), probes.subject.tolist(), strict=True):
        best: dict[str, float] = {}
        for entry, name in zip(gallery.template.tolist(), gallery.subject.tolist(), strict=True):
            best[name] = max(best.get(name, -2.0), float(vector[probe] @ vector[entry]))
        if subject in best:
            mates.append(best[subject])
            first_ranks.append(sum(score >= best[subject] for score in best.values()))
        else:
            others.append(max(best.values()))
    named = {measure.name: measure.value for measure in found.measures}
    assert set(named) == {"rank-1 rate in G1", "rank-5 rate in G1", "rank-10 rate in G1"}
    for rank in (1, 5, 10):
        assert named[f"rank-{rank} rate in G1"] == np.mean(np.array(first_ranks) <= rank)
    result = found.result
    assert (result.protocol.num_genuine, result.protocol.num_impostors) == (36, 24)
    for point in result.metrics.tar:
        allowed = int(np.floor(point.far_target * 24 + 1e-9))
        limit = sorted(others, reverse=True)[allowed]
        assert point.tar == pytest.approx(np.mean(np.array(mates) > limit))
        assert point.false_accepts == allowed
    assert result.hardest is not None
    assert result.hardest.false_accepts[0].score == pytest.approx(max(others))
    assert result.hardest.false_rejects[0].score == pytest.approx(min(mates))
    assert result.protocol.name == "ijbc, 1:N in G1 (TAR is TPIR, FAR is FPIR)"


def test_searches_are_the_same_for_two_systems() -> None:
    _, probes, gallery = make_search(0)
    first = evaluate_identification(make_search(0)[0], probes, gallery, OPTIONS).result
    second = evaluate_identification(make_search(1)[0], probes, gallery, OPTIONS).result
    assert first.trials_sha256 == second.trials_sha256
    assert first.hardest != second.hardest
    fewer = TemplateList("G1", gallery.template[1:], gallery.subject[1:], gallery.source)
    third = evaluate_identification(make_search(0)[0], probes, fewer, OPTIONS).result
    assert third.trials_sha256 != first.trials_sha256


def test_searches_that_all_have_a_mate() -> None:
    templates, probes, gallery = make_search()
    known = np.isin(probes.subject, gallery.subject)
    some = TemplateList("p", probes.template[known], probes.subject[known], probes.source)
    with pytest.raises(ProtocolError, match=r"all 36 searches of p\.csv have a mate"):
        evaluate_identification(templates, some, gallery, OPTIONS)
    none = TemplateList("p", probes.template[~known], probes.subject[~known], probes.source)
    with pytest.raises(ProtocolError, match="mate"):
        evaluate_identification(templates, none, gallery, OPTIONS)
