"""The numbers this library promises, against the definition in 80 digits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import qmargin
from helpers.budget import POSTERIOR_TOLERANCE, assert_loss, assert_posterior
from helpers.cases import (
    ALPHAS,
    LOGIT_SCALES,
    NUM_IDENTITIES,
    Rows,
    grid_rows,
    grid_truth,
    random_cosines,
    satisfying_gap,
    spread_cosines,
)
from helpers.definition import AlphaGenerator, JensenShannonGenerator, exact, mp
from helpers.extended import extended
from qmargin.kernels.solver import others_gain

SCALE_IDS = [f"scale{scale:g}" for scale in LOGIT_SCALES]
ALPHA_IDS = [f"alpha{alpha:.7g}" for alpha in ALPHAS]
on_grid = pytest.mark.parametrize("scale", LOGIT_SCALES, ids=SCALE_IDS)
for_alphas = pytest.mark.parametrize("alpha", ALPHAS, ids=ALPHA_IDS)
for_two_million = pytest.mark.parametrize(  # seconds each
    "alpha",
    [0.5, 1 + 1e-6, 1.25, *(pytest.param(a, marks=pytest.mark.slow) for a in (1.0, 2.0, 3.0))],
)


@pytest.mark.parametrize("seed", range(3))
def test_definition_gives_softmax_and_its_cross_entropy(seed):
    """M1 at alpha = 1, and the log-partition is logsumexp."""
    logits = np.random.default_rng(seed).standard_normal(20)
    solution = exact(AlphaGenerator(1.0), logits)
    posterior = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(solution.posterior, posterior, atol=1e-16)
    assert float(solution.log_partition) == pytest.approx(np.log(np.exp(logits).sum()), rel=1e-15)
    assert float(solution.loss(4)) == pytest.approx(-np.log(posterior[4]), rel=1e-14)


@pytest.mark.parametrize("seed", range(3))
def test_definition_gives_the_projection_onto_the_simplex(seed):
    """M1 at alpha = 2 is SparseMax, found here by sorting."""
    logits = np.random.default_rng(seed).standard_normal(20)
    ordered = np.sort(logits)[::-1]
    sums = np.cumsum(ordered)
    size = int((1 + np.arange(1, 21) * ordered > sums).sum())
    posterior = np.maximum(logits - (sums[size - 1] - 1) / size, 0)
    solution = exact(AlphaGenerator(2.0), logits)
    np.testing.assert_allclose(solution.posterior, posterior, atol=1e-15)
    assert solution.support_size == size


@for_alphas
def test_definition_agrees_in_both_precisions(alpha):
    for scale in LOGIT_SCALES:
        rows = grid_rows(alpha, scale)
        for row in range(scale == 1.0, len(rows.names), 9):
            logits, log_reference = rows.logits[row], rows.log_reference[row]
            digits = exact(AlphaGenerator(alpha), logits, log_reference)
            wide = extended(alpha, logits, log_reference)
            losses = [float(solution.loss(int(rows.labels[row]))) for solution in (wide, digits)]
            np.testing.assert_allclose(wide.posterior, digits.posterior, rtol=0, atol=1e-14)
            assert float(wide.slope) == pytest.approx(digits.slope, rel=1e-9)
            assert losses[0] == pytest.approx(losses[1], rel=1e-9, abs=1e-9)


def test_definition_equals_the_solver_form_of_the_loss():
    """M6: ``tau + sum q excess(theta - tau) + target_cost(q_y) - theta_y`` is the loss."""
    generator = AlphaGenerator(1.25)
    rows = grid_rows(1.25, 10.0)
    for row in range(0, len(rows.names), 5):
        label = int(rows.labels[row])
        solution = exact(generator, rows.logits[row], rows.log_reference[row])
        terms = zip(solution.thetas, solution.log_qs, solution.counts, strict=True)
        excess = mp.fsum(
            count * mp.exp(log_q) * generator.f_prime_inverse(theta - solution.tau) ** mp.mpf(1.25)
            for theta, log_q, count in terms
        ) / mp.mpf(1.25)
        q = mp.exp(solution.log_q(label))
        cost = q * generator.f(1 / q) - q * generator.f(mp.zero)
        loss = solution.tau + excess + cost - solution.theta(label)
        assert abs(loss - solution.loss(label)) < 1e-40


@for_alphas
def test_posterior_with_more_classes_and_with_one(alpha):
    for scale, num_classes in ((0.1, 1000), (10.0, 257)):
        rows = grid_rows(alpha, scale, num_classes=num_classes)
        posterior = qmargin.softargmax(rows.logits, alpha=alpha, log_reference=rows.log_reference)
        truth = np.stack([s.posterior for s in grid_truth(alpha, scale, num_classes=num_classes)])
        assert_posterior(posterior, truth, names=rows.names)
    logits = torch.tensor([sign * scale for scale in LOGIT_SCALES for sign in (1, -1)])[:, None]
    labels = torch.zeros(len(logits), dtype=torch.int64)
    for log_reference in (0.0, -3.0, -60.0):
        options = {"alpha": alpha, "log_reference": log_reference}
        posterior = qmargin.softargmax(logits, **options)
        torch.testing.assert_close(posterior, torch.ones_like(logits), rtol=0, atol=1e-6)
        loss = qmargin.fenchel_young_loss(logits, labels, **options)
        assert_loss(loss, [0.0] * len(logits), names=[str(row) for row in logits])


def _check_tau(rows: Rows, solution: qmargin.TauSolution, truth: list, alpha: float) -> None:
    """``tau`` to the accuracy that the mass determines it to; support up to ties with the edge."""
    dtype = rows.logits.dtype
    tolerance = POSTERIOR_TOLERANCE[dtype]
    edge = AlphaGenerator(alpha).edge
    for row, true in enumerate(truth):
        name, tau = rows.names[row], float(true.tau)
        logits = rows.logits[row].double()
        size = max(1.0, abs(tau), float(logits.abs().max()))
        unit = torch.finfo(solution.tau.dtype).eps * size
        error = abs(float(solution.tau[row]) - tau)
        assert error <= 4 * unit + tolerance / true.slope, f"{name}: tau off by {error:.2e}"
        # a float64 tau moves the mass by its own spacing times the slope
        allowed = tolerance + 4 * torch.finfo(torch.float64).eps * size * true.slope
        assert float(solution.mass_error[row]) <= allowed, f"{name}: {solution.mass_error[row]}"
        # a positive posterior may be too small to be a number, and the edge is known to rounding
        is_positive = torch.from_numpy(true.posterior > 1e-30)
        least = int((is_positive & (logits > tau + edge + 4 * unit)).sum())
        most = int((logits > tau + edge - 4 * unit).sum())
        found = int(solution.support_size[row])
        assert least <= found <= most, f"{name}: support {found}, truth {true.support_size}"


@on_grid
@for_alphas
def test_every_operator_is_accurate(alpha, scale):
    """M1, M2, M3, M6: posterior, tau, support, log-partition and loss, in float32 and float64.

    The posterior is within 1e-6 in float32 and 1e-12 in float64, in every entry and in the sum; the
    loss within 1e-5 of itself or 1e-6, and exactly zero for rows that meet their margin.
    """
    for dtype in (torch.float32, torch.float64):
        rows, truth = grid_rows(alpha, scale, dtype=dtype), grid_truth(alpha, scale, dtype=dtype)
        options = {"alpha": alpha, "log_reference": rows.log_reference}
        posterior = qmargin.softargmax(rows.logits, **options)
        assert posterior.dtype == dtype
        assert_posterior(posterior, np.stack([s.posterior for s in truth]), names=rows.names)
        solvers = ("newton", "bisection") if alpha <= 2 and 0.1 <= scale <= 10.0 else ("auto",)
        for solver in solvers:
            solution = qmargin.solve_tau(rows.logits, solver=solver, **options)
            _check_tau(rows, solution, truth, alpha)
        total = np.exp(rows.log_reference.double().numpy()).sum(axis=1)
        # the paper's maximum plus (sum q - 1) / alpha
        maxima = [float(s.softmax_f) + (q - 1) / alpha for s, q in zip(truth, total, strict=True)]
        eps = torch.finfo(dtype).eps
        absolute = 4 * eps * float(rows.logits.abs().max()) + 20 * eps
        value = qmargin.log_partition(rows.logits, **options)
        assert_loss(value, maxima, names=rows.names, absolute=absolute)
        loss = qmargin.fenchel_young_loss(rows.logits, rows.labels, **options)
        losses = [float(s.loss(int(y))) for s, y in zip(truth, rows.labels, strict=True)]
        # The truth is long double, good to 1e-11 of the largest term of the loss near alpha = 1
        absolute = 1e-6 if dtype == torch.float32 else 1e-11 * max(1.0, scale)
        assert_loss(loss, losses, names=rows.names, absolute=absolute)
        assert loss.dtype == dtype and bool((loss >= 0).all())


@for_alphas
def test_half_precision_inputs_are_computed_in_float32(alpha):
    rows = grid_rows(alpha, 10.0)
    functions = (
        qmargin.softargmax,
        qmargin.log_partition,
        lambda x, **options: qmargin.fenchel_young_loss(x, rows.labels, **options),
        lambda x, **options: qmargin.solve_tau(x, **options).tau,
    )
    for dtype in (torch.float16, torch.bfloat16):
        logits, reference = rows.logits.to(dtype), rows.log_reference.to(dtype)
        for function in functions:
            half = function(logits, alpha=alpha, log_reference=reference)
            single = function(logits.float(), alpha=alpha, log_reference=reference.float())
            assert half.dtype == torch.float32 and torch.equal(half, single)


@for_two_million
def test_two_million_equal_logits(alpha):
    """``p = 1 / k``, without a loss of mass where ``1 + (alpha-1)(theta - tau)`` is 1e-13."""
    for dtype, value in ((torch.float32, 1e4), (torch.float64, 1e-3)):
        tolerance = POSTERIOR_TOLERANCE[dtype]
        logits = torch.full((1, NUM_IDENTITIES), value, dtype=dtype)
        posterior = qmargin.softargmax(logits, alpha=alpha).double()
        assert abs(float(posterior.sum()) - 1) <= tolerance
        assert float((posterior - 1 / NUM_IDENTITIES).abs().max()) <= tolerance
    logits = torch.full((1, NUM_IDENTITIES), 0.75)
    reference = torch.zeros(NUM_IDENTITIES)
    reference[17] = -7.0  # a lowered target among the equals
    truth = exact(AlphaGenerator(alpha), logits[0], reference)
    loss = qmargin.fenchel_young_loss(
        logits, torch.tensor([17]), alpha=alpha, log_reference=reference
    )
    assert_loss(loss, [float(truth.loss(17))], names=["lowered"])


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.25, 1.5, 2.0, 3.0])
def test_bisection_on_the_bracket_of_the_paper_agrees(alpha):
    """``tau`` between ``theta_t - f'(1 / q_t)`` and ``theta_t - f'(1 / sum q)``, t the argmax."""
    logits = 10.0 * random_cosines(8, 500, seed=5).double()
    reference = torch.zeros_like(logits)
    reference[:, 3] = torch.linspace(0.0, -6.0, 8, dtype=torch.float64)
    logits[::2, 3] = 4.0  # the argmax in every other row
    truth = [float(extended(alpha, *row).tau) for row in zip(logits, reference, strict=True)]
    for solver, bracket in (("bisection", "tight"), ("bisection", "paper"), ("auto", "tight")):
        options = {"alpha": alpha, "log_reference": reference}
        solution = qmargin.solve_tau(logits, solver=solver, bracket=bracket, **options)
        np.testing.assert_allclose(solution.tau, truth, rtol=0, atol=1e-11)
        assert float(solution.mass_error.max()) <= 1e-10


@pytest.mark.parametrize(("alpha", "limit"), [(1.25, 8), (2.0, 16)])
@pytest.mark.parametrize("scale", [5.0, 20.0, 64.0])
def test_few_evaluations_reach_float32_accuracy(alpha, limit, scale):
    """M5: at most 8 evaluations at alpha 1.25 and 16 at 2, on cosine logits."""
    cosines = random_cosines(6, 20_000, seed=int(scale))
    cosines[:, 0] = torch.tensor([-0.1, 0.1, 0.3, 0.5, 0.7, 0.95])
    reference = torch.zeros(20_000)
    reference[0] = -scale * 0.2
    logits = scale * cosines
    solution = qmargin.solve_tau(logits, alpha=alpha, log_reference=reference, solver="newton")
    assert int(solution.num_evaluations) <= limit
    assert float(solution.mass_error.max()) <= 1e-6


@pytest.mark.parametrize("alpha", [1.01, 1.25, 1.5, 2.0, 3.0])
def test_nearly_satisfied_rows_keep_their_digits(alpha):
    """A loss of 1e-9 is still known to 1e-4 of itself, though ``f'(1 / q_y)`` is thousands."""
    log_q = -min(7.0, 7.0 / (alpha - 1.0))
    gap = satisfying_gap(alpha, log_q)
    batch = torch.from_numpy(-3.0 - np.random.default_rng(3).random((4, 40))).float()
    batch[:, 1] = 0.0
    batch[:, 0] = gap - torch.tensor([0.5, 0.1, 0.01, 1e-3], dtype=torch.float64)
    reference = torch.zeros(40)
    reference[0] = log_q
    truth = [float(exact(AlphaGenerator(alpha), row, reference).loss(0)) for row in batch]
    labels = torch.zeros(4, dtype=torch.int64)
    loss = qmargin.fenchel_young_loss(batch, labels, alpha=alpha, log_reference=reference)
    # above 2 the posterior leaves the edge like a square root, where float64 is coarse
    absolute = 1e-12 if alpha <= 2 else 1e-9
    assert_loss(loss, truth, names=list("abcd"), relative=1e-4, absolute=absolute)


def _identities(scale: float, margin: float, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows over all identities: far from, near and (where there is such a thing) at the margin."""
    parts = (0.5, 0.97, 0.999, 1.001) if alpha > 1 else ()
    cosines = random_cosines(1 + len(parts), NUM_IDENTITIES, seed=11)
    labels = torch.tensor([5, 1_000_003, 77, 2_059_905, 9])[: len(cosines)]
    cosines.scatter_(1, labels[:, None], -1.0)
    best = cosines.amax(dim=1)
    gap = satisfying_gap(alpha, -scale * margin) / scale
    target = torch.tensor([0.1] + [float(best[i + 1]) + part * gap for i, part in enumerate(parts)])
    assert float(target.max()) < 1.0
    return cosines.scatter_(1, labels[:, None], target[:, None]), labels


OTHER_SETTINGS = (
    (1.5, 10.0, 0.1),
    (2.0, 10.0, 0.1),
    (1.0, 64.0, 0.35),
    (0.5, 10.0, 0.1),
    (3.0, 5.0, 0.05),
)


@pytest.mark.parametrize(
    ("alpha", "scale", "margin"),
    [(1.25, 35.0, 0.2), *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHER_SETTINGS)],
)
def test_loss_over_all_identities(alpha, scale, margin):
    """M6 at 2,059,906 classes in float32: 1e-5 relative or 1e-6 absolute; satisfied rows are 0."""
    cosines, labels = _identities(scale, margin, alpha)
    parts = {"divergence": qmargin.Alpha(alpha), "margin": qmargin.PriorMargin(margin)}
    output = qmargin.margin_loss_with_stats(cosines, labels, **parts, scale=scale)
    reference = np.zeros(NUM_IDENTITIES)
    truth, target_posterior = [], []
    for row, label in zip(cosines, labels.tolist(), strict=True):
        reference[label] = -scale * margin
        solution = extended(alpha, row, reference, scale=scale)
        reference[label] = 0.0
        truth.append(float(solution.loss(label)))
        target_posterior.append(solution.posterior[label])
    names = [f"row {row}" for row in range(len(truth))]
    assert_loss(output.loss, truth, names=names)
    np.testing.assert_allclose(output.target_posterior.numpy(), target_posterior, atol=2e-6)
    assert float(output.mass_error.max()) <= 1e-6
    if alpha > 1:
        assert float(output.loss[4]) == 0.0
        assert abs(truth[4]) < 1e-12


for_large_alphas = pytest.mark.parametrize("alpha", [4.0, 9.0, 16.0])


def large_alpha_rows(scale: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Random logits, a crowd just below the top, and classes that are rarer than others."""
    generator = torch.Generator().manual_seed(int(1e3 * scale))
    logits = scale * torch.randn(6, 40, generator=generator, dtype=torch.float64)
    logits[1, :20] = logits[1].max()
    logits[2] = 0.0
    reference = torch.zeros_like(logits)
    reference[3:, :5] = -torch.rand(3, 5, generator=generator, dtype=torch.float64)
    return logits.to(dtype), reference.to(dtype)


@for_large_alphas
@pytest.mark.parametrize("scale", [1e-3, 0.1, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_large_alphas_are_accurate(alpha, scale, dtype):
    """M1, M6 up to the largest alpha that is accepted."""
    logits, reference = large_alpha_rows(scale, dtype)
    truth = [
        exact(AlphaGenerator(alpha), x.double().numpy(), q.double().numpy())
        for x, q in zip(logits, reference, strict=True)
    ]
    names = [f"row {row}" for row in range(len(truth))]
    posterior = qmargin.softargmax(logits, alpha=alpha, log_reference=reference)
    assert_posterior(posterior, np.stack([s.posterior for s in truth]), names=names)
    for labels in (logits.argmax(1), logits.argsort(1)[:, -2], torch.arange(6)):
        loss = qmargin.fenchel_young_loss(logits, labels, alpha=alpha, log_reference=reference)
        values = [float(s.loss(int(y))) for s, y in zip(truth, labels, strict=True)]
        assert_loss(loss, values, names=names)


@for_large_alphas
def test_many_equal_logits_share_evenly(alpha):
    posterior = qmargin.softargmax(torch.full((1, 100_000), 0.5), alpha=alpha)
    torch.testing.assert_close(posterior, torch.full_like(posterior, 1e-5), rtol=1e-5, atol=0)


def test_neighbouring_logits_are_told_apart():
    """Classes one rounding apart at the edge: the lowest active one is found all the same."""
    alpha = 12.0
    logits = torch.zeros(1, 30, dtype=torch.float64)
    logits[0, 1:20] = -1.0 / 11.0 + torch.arange(-9, 10) * 2.0**-56
    logits[0, 20:] = -1.0
    truth = exact(AlphaGenerator(alpha), logits[0].numpy())
    posterior = qmargin.softargmax(logits, alpha=alpha)
    assert_posterior(posterior, truth.posterior[None], names=["neighbours"])


@pytest.mark.parametrize("b", [7.0, 15.0])
def test_the_cost_of_lost_mass_is_accurate(b):
    """M6: ``phi(r) = (1 - (1 - r)^b (1 + b r)) / b``, on both sides of where its series ends."""
    mass = torch.logspace(-8, -0.5, 60, dtype=torch.float64)
    truth = [float((1 - (1 - mp.mpf(r)) ** b * (1 + b * mp.mpf(r))) / b)
             for r in mass.tolist()]  # fmt: skip
    found = others_gain(mass, torch.log1p(-mass), b)
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-11)


@pytest.mark.parametrize("scale", [1e-3, 0.1, 1.0, 10.0])
def test_jensen_shannon_matches_its_definition(scale):
    """M1, M2, M6 for ``f(u) = u ln u - (u + 1) ln((u + 1) / 2)``, through the generic solver."""
    rng = np.random.default_rng(5)
    logits = torch.from_numpy(scale * rng.standard_normal((4, 15)))
    reference = torch.from_numpy(-2.0 * rng.random((4, 15)))
    reference[0] = 0.0
    labels = torch.tensor([0, 3, 14, 7])
    target = torch.from_numpy(rng.dirichlet(np.ones(15), size=4))
    common = {"divergence": qmargin.JensenShannon(), "log_reference": reference}
    posterior = qmargin.softargmax(logits, **common)
    loss = qmargin.fenchel_young_loss(logits, labels, **common)
    soft_loss = qmargin.fenchel_young_loss(logits, target, **common)
    partition = qmargin.log_partition(logits, **common)
    for row in range(4):
        truth = exact(JensenShannonGenerator(), logits[row], reference[row])
        np.testing.assert_allclose(posterior[row].numpy(), truth.posterior, atol=1e-12)
        label = int(labels[row])
        assert float(loss[row]) == pytest.approx(float(truth.loss(label)), rel=1e-10, abs=1e-12)
        soft = float(truth.distribution_loss(target[row].numpy()))
        assert float(soft_loss[row]) == pytest.approx(soft, rel=1e-9, abs=1e-11)
        # documented: the paper's value plus (sum q - 1) f(0), with f(0) = ln 2
        value = float(truth.softmax_f) + float(truth.total_q - 1) * math.log(2)
        assert float(partition[row]) == pytest.approx(value, rel=1e-10, abs=1e-10)


def test_jensen_shannon_in_a_margin_loss():
    cosines, labels = spread_cosines()
    loss_fn = qmargin.MarginLoss(
        qmargin.JensenShannon(), qmargin.PriorMargin(0.1), scale=5.0, reduction="none"
    )
    output = loss_fn.with_stats(cosines.double(), labels)
    for row, label in enumerate(labels.tolist()):
        reference = torch.zeros(12, dtype=torch.float64)
        reference[label] = -0.5
        truth = exact(JensenShannonGenerator(), cosines[row], reference, scale=5.0)
        assert float(output.loss[row]) == pytest.approx(float(truth.loss(label)), rel=1e-10)
        assert float(output.tau[row]) == pytest.approx(float(truth.tau), rel=1e-10)
        assert float(output.target_posterior[row]) == pytest.approx(
            truth.posterior[label], rel=1e-9, abs=1e-14
        )
    assert loss_fn.effective_margin is None


def test_the_generic_solver_agrees_with_the_closed_form():
    """A divergence the package has never seen, here the alpha-divergence in disguise."""

    class Disguised:
        """Delegates to ``Alpha(1.5)`` without being one."""

        def __getattr__(self, name: str) -> object:
            return getattr(qmargin.Alpha(1.5), name)

    cosines, labels = spread_cosines()
    logits = 5 * cosines.double()
    for function in (
        lambda d: qmargin.softargmax(logits, divergence=d),
        lambda d: qmargin.log_partition(logits, divergence=d),
        lambda d: qmargin.fenchel_young_loss(logits, labels, divergence=d),
    ):
        torch.testing.assert_close(
            function(Disguised()), function(qmargin.Alpha(1.5)), rtol=1e-10, atol=1e-11
        )
    truth = exact(AlphaGenerator(1.5), logits[0])
    posterior = qmargin.softargmax(logits, divergence=Disguised())
    np.testing.assert_allclose(posterior[0].numpy(), truth.posterior, atol=1e-12)
