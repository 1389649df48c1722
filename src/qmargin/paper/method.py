"""What the paper says about the loss itself."""

from __future__ import annotations

from qmargin.paper.items import Item

_MATHS, _LOSSES, _HEADS = "src/qmargin/maths", "src/qmargin/losses", "src/qmargin/heads"
_PROPERTIES = "tests/losses/test_properties.py"
_ACCURACY = "tests/losses/test_accuracy.py"
_MARGINS = "tests/maths/test_margins.py"
_BY_TESTS = "Any alpha in (0, 16], float16 to float64, up to two million classes, by the tests."

METHOD = (
    Item(
        "equation-softmax",
        "eq. 1",
        "softmax is the log-partition, the log of a sum of exponentials",
        (f"{_LOSSES}/functional.py:log_partition",),
        (f"{_ACCURACY}::test_log_partition_is_accurate",),
        "",
        _BY_TESTS,
    ),
    Item(
        "equation-softargmax",
        "eq. 2",
        "softargmax gives probabilities",
        (f"{_LOSSES}/functional.py:softargmax",),
        (f"{_ACCURACY}::test_definition_gives_softmax_and_its_cross_entropy",),
        "",
        _BY_TESTS,
    ),
    Item(
        "equation-softmax-gradient",
        "eq. 3, eq:softmax_grad",
        "the gradient of softmax is softargmax, for every f as well",
        (f"{_LOSSES}/autograd.py:FenchelYoung", f"{_LOSSES}/functional.py:log_partition"),
        ("tests/losses/test_transforms.py::test_grad_is_posterior_minus_target",),
        "",
        _BY_TESTS,
    ),
    Item(
        "equation-softmax-f",
        "eq. 4",
        "softmax_f is the maximum of <p, theta> - D_f(p : q) over the simplex",
        (f"{_LOSSES}/functional.py:log_partition", f"{_MATHS}/objective.py:log_partition"),
        (
            f"{_ACCURACY}::test_log_partition_is_accurate",
            f"{_PROPERTIES}::test_shifting_a_row_shifts_tau_and_nothing_else",
        ),
        "",
        _BY_TESTS,
        "Ours is smaller by (sum of q - 1) / alpha, a constant that cancels in every loss: "
        "docs/decisions/0006-log-partition-constant.md.",
    ),
    Item(
        "equation-loss",
        "eq. 5",
        "the loss is softmax_f(theta) + D_f(y : q) - <theta, y>",
        (f"{_LOSSES}/functional.py:fenchel_young_loss", f"{_MATHS}/objective.py:label_loss"),
        (
            f"{_ACCURACY}::test_loss_is_accurate",
            f"{_ACCURACY}::test_loss_over_all_identities",
            f"{_PROPERTIES}::test_loss_is_never_negative",
        ),
        "",
        _BY_TESTS,
        "The same number by another formula (M6): the paper's subtracts two sums of the size of k "
        "and loses digits in float32.",
    ),
    Item(
        "equation-generator",
        "eq. 6, eq:f",
        "the convex function of the alpha-divergence, with its derivative and its conjugate",
        (
            f"{_MATHS}/divergences.py:Alpha.generator",
            f"{_MATHS}/divergences.py:Alpha.derivative",
            f"{_MATHS}/divergences.py:Alpha.excess",
        ),
        (
            "tests/losses/test_gradients.py::test_jensen_shannon_and_alpha_share_the_generic_contract",
        ),
        "",
        _BY_TESTS,
        "The conjugate is kept shifted by f(0), so that it is zero off the support.",
    ),
    Item(
        "equation-prior",
        "eq. 7, eq:prior",
        "the margin is in the reference measure: q_y = exp(-s m), all others 1",
        (f"{_MATHS}/margins.py:PriorMargin",),
        (f"{_MARGINS}::test_prior_margin_lowers_the_reference_and_leaves_the_logit",),
        "",
        _BY_TESTS,
        "The log of q_y is stored: with s 64 and m 0.5 the measure itself is 1e-14.",
    ),
    Item(
        "equation-q-margin",
        "eq. 8",
        "Q-Margin is that loss on scaled cosines",
        (f"{_LOSSES}/presets.py:q_margin", f"{_LOSSES}/module.py:MarginLoss"),
        (
            "tests/losses/test_margin_loss.py::test_presets_match_the_definition",
            "tests/losses/test_margin_loss.py::test_every_margin_matches_its_definition",
        ),
        "qmargin train debug --out runs/debug",
        _BY_TESTS,
    ),
    Item(
        "equation-posterior",
        "eq. 9, eq:l_grad_theta",
        "the posterior is q_j [1 + (alpha - 1)(theta_j - tau)]_+ ^ (1 / (alpha - 1)); the gradient "
        "is the posterior minus the target",
        (f"{_MATHS}/divergences.py:Alpha.link", f"{_MATHS}/objective.py:posterior_rows"),
        (
            f"{_PROPERTIES}::test_posterior_is_the_link_of_the_slack",
            f"{_PROPERTIES}::test_gradient_is_posterior_minus_target",
            f"{_PROPERTIES}::test_classes_leave_at_the_edge",
        ),
        "",
        _BY_TESTS,
    ),
    Item(
        "equation-tau",
        "eq. 10, eq:tau",
        "tau is the root at which the posterior sums to one, found by bisection",
        (f"{_LOSSES}/functional.py:solve_tau", f"{_MATHS}/threshold.py:solve_newton"),
        (
            f"{_PROPERTIES}::test_posterior_sums_to_one",
            f"{_ACCURACY}::test_bisection_finds_the_same_tau",
            f"{_PROPERTIES}::test_newton_climbs_to_tau_and_never_passes_it",
        ),
        "python -m benchmarks loss --rows 64 --classes 20000",
        _BY_TESTS,
        "Up to alpha 2 by a Newton step that never overshoots (M5) and needs fewer evaluations "
        "(docs/benchmarks/loss.md); bisection beyond, and on request.",
    ),
    Item(
        "equation-bracket",
        "after eq. 10",
        "the root lies between theta_t - f'(1/q_t) and theta_t - f'(1/sum q), t the largest logit",
        (f"{_LOSSES}/functional.py:solve_tau", f"{_MATHS}/threshold.py:bound_from_below"),
        (
            f"{_ACCURACY}::test_bisection_on_the_bracket_of_the_paper_agrees",
            f"{_PROPERTIES}::test_tau_is_bracketed",
        ),
        "",
        _BY_TESTS,
        "It holds, but grows with 1/q when the target is the largest; ours takes the maximum over "
        'all classes (M4). `solve_tau(..., bracket="paper")` is theirs.',
    ),
    Item(
        "proposition-exact",
        "Proposition 1, prop:exact",
        "solving over the K largest logits gives the same tau and posterior if they hold the "
        "support",
        (f"{_HEADS}/paper.py:solve_top", f"{_HEADS}/sparse.py:SparseStep"),
        (
            f"{_PROPERTIES}::test_certified_candidates_give_the_exact_tau",
            "tests/heads/test_paths.py::test_path_matches_the_definition",
        ),
        "python -m benchmarks head --rows 32 --dim 32 --classes 5000 --paths paper --parts paths",
        "Two million classes on one H200: docs/benchmarks/head.md.",
    ),
    Item(
        "claim-runtime-check",
        "after Proposition 1",
        "a check at run time that the smallest kept logit is inactive was never violated",
        (f"{_HEADS}/paper.py:solve_top", f"{_HEADS}/paper.py:largest_left_out"),
        (
            "tests/heads/test_paths.py::test_the_paper_widens_what_its_check_refuses",
            "tests/heads/test_paths.py::test_classes_that_tie_in_half_precision_are_not_lost",
            "tests/heads/test_paths.py::test_the_bound_of_what_a_half_sort_left_out_holds",
        ),
        "",
        "Two million random prototypes on one H200: docs/benchmarks/head.md.",
        "The logits are sorted in half precision, so the check has to allow for rounding; the "
        "paper's does not say so. What fails it is solved again with twice as many. At alpha 1.25 "
        "and scale 10 the top 1 % does fail it on two million random classes: a support of 25,413.",
    ),
    Item(
        "claim-cosface",
        "section 3.4",
        "CosFace is Q-Margin as alpha goes to 1",
        (f"{_LOSSES}/presets.py:cosface",),
        (
            f"{_MARGINS}::test_prior_and_cosine_margin_are_the_same_loss_at_alpha_one",
            "tests/losses/test_margin_properties.py"
            "::test_prior_and_cosine_margins_are_one_loss_at_alpha_one",
        ),
        "",
        _BY_TESTS,
    ),
    Item(
        "claim-cross-entropy",
        "sections 1 and 3.2",
        "alpha 1 is cross-entropy, and the limit is smooth",
        (f"{_MATHS}/divergences.py:Alpha",),
        (f"{_PROPERTIES}::test_alpha_to_one_is_cross_entropy",),
        "",
        _BY_TESTS,
    ),
    Item(
        "claim-sparsemax",
        "section 1",
        "alpha 2 is SparseMax, and orders between are EntMax",
        (f"{_LOSSES}/presets.py:sparsemax_face", f"{_LOSSES}/presets.py:entmax_face"),
        (
            "tests/losses/test_entmax_agreement.py::test_sparsemax",
            "tests/losses/test_entmax_agreement.py::test_entmax15",
            f"{_ACCURACY}::test_definition_gives_the_projection_onto_the_simplex",
        ),
        "python -m benchmarks loss --rows 64 --classes 20000",
        "Against the entmax package, by the tests.",
    ),
    Item(
        "claim-combined-margin",
        "section 3.4",
        "the margin in the prior can be combined with an angular one; it brought no gain",
        (f"{_MATHS}/margins.py:SumMargin",),
        ("tests/losses/test_margin_loss.py::test_a_prior_and_a_geometric_margin_combine",),
        "",
        "The loss by tests; whether it helps was not tried.",
    ),
)
