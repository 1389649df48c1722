"""Enough trials, and intervals of a proportion."""

import pytest
from scipy.stats import binom, norm

from qmargin.errors import ConfigError, DataError, ProtocolError
from qmargin.metrics.sufficiency import rule_of_three, sufficiency, wilson


@pytest.mark.parametrize(
    ("far", "num_impostors", "status", "allowed"),
    [
        (1e-4, 275_488, "few", 27),  # VoxCeleb1-H
        (1e-5, 15_658_489, "ok", 156),  # IJB-C
        (1e-6, 15_658_489, "few", 15),
        (1e-3, 3_000, "few", 3),  # LFW
        (1e-4, 3_000, "not measurable", 0),
        (3e-4, 10_000, "few", 3),  # the product rounds down to 2
        (1e-3, 30_000, "ok", 30),
        (1e-3, 29_999, "few", 29),
        (1.0, 1, "few", 1),
        (1 / 3, 3, "few", 1),
    ],
)
def test_status_of_known_protocols(far, num_impostors, status, allowed):
    found = sufficiency(far, num_impostors)
    assert (found.status, found.allowed) == (status, allowed)
    assert found.message.startswith("not measurable") == (status == "not measurable")


def test_message_counts_in_the_singular():
    assert sufficiency(0.5, 2).message == "only 1 false accept is allowed, fewer than 30"


def test_without_impostors_nothing_is_sufficient():
    with pytest.raises(ProtocolError, match="0 impostor trials"):
        sufficiency(1e-3, 0)


@pytest.mark.parametrize("num_trials", [10, 300, 10**6])
def test_rule_of_three_is_the_exact_bound_to_a_few_percent(num_trials):
    exact = 1 - 0.05 ** (1 / num_trials)  # the rate at which no error is seen with chance 5 %
    assert rule_of_three(num_trials) == pytest.approx(exact, rel=0.17 if num_trials < 20 else 0.01)


def test_rule_of_three_is_a_rate():
    assert rule_of_three(1) == 1.0
    with pytest.raises(ProtocolError, match="0 trials"):
        rule_of_three(0)


@pytest.mark.parametrize("successes", [0, 1, 7, 19, 20])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_wilson_ends_solve_the_score_equation(successes, level):
    """At an end ``p``, the observed share is exactly ``z`` standard errors of ``p`` away."""
    z = norm.ppf(0.5 + level / 2)
    for end in wilson(successes, 20, level):
        distance = abs(successes / 20 - end)
        assert distance == pytest.approx(z * (end * (1 - end) / 20) ** 0.5, abs=1e-12)


def test_wilson_covers_independent_trials():
    rate, num_trials = 0.9, 200
    counts = range(num_trials + 1)
    covered = [low <= rate <= high for low, high in (wilson(k, num_trials) for k in counts)]
    coverage = sum(binom.pmf(k, num_trials, rate) for k in counts if covered[k])
    assert 0.93 < coverage < 0.97


def test_wilson_refuses_what_cannot_be():
    with pytest.raises(DataError, match="5 successes in 4"):
        wilson(5, 4)
    with pytest.raises(ProtocolError, match="0 trials"):
        wilson(0, 0)
    with pytest.raises(ConfigError, match="level=95"):
        wilson(1, 4, level=95)
