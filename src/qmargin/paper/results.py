"""What the paper says about its experiments."""

from __future__ import annotations

from qmargin.paper.items import Item

_ARTEFACTS = "tests/paper/test_artefacts.py"
_FACE = "tests/recipes/test_face.py"
_SPEAKER = "tests/recipes/test_speaker.py"
_STROKES = (
    "Not at the paper's scale: its data are not here. On synthetic stroke identities by the demo's "
    "recipe, with the command; or from results that are given with --results."
)
_OTHER_SCALE = "Data, network and length of the training; the numbers are not comparable."
_RUN = "src/qmargin/demo/run.py:complete_parts"

RESULTS = (
    Item(
        "setup-face",
        "section 4.2",
        "ResNet-100 on WebFace42M, 20 epochs of SGD in steps, batch 1024",
        ("src/qmargin/recipes/face.py:FACE_RECIPES", "src/qmargin/models/iresnet.py:IResNet"),
        (
            f"{_FACE}::test_paper_runs_have_the_papers_settings",
            "tests/training/test_schedules.py::test_the_papers_steps_for_faces",
        ),
        "qmargin train webface42m_r100_q_margin --out runs/face --print-recipe",
        "Recipes are built by tests; none was run end to end.",
    ),
    Item(
        "setup-speaker",
        "section 5.2",
        "ResNet-34 on VoxCeleb2, 150 epochs, exponential learning rate, margin rising in epochs 20 "
        "to 40",
        ("src/qmargin/recipes/speaker.py:SPEAKER_RECIPES",),
        (
            f"{_SPEAKER}::test_the_margin_rises_between_epochs_20_and_40",
            "tests/training/test_schedules.py::test_exponential_as_the_paper_words_it",
        ),
        "qmargin train voxceleb2_r34_q_margin_a150 --out runs/speaker --print-recipe",
        "Recipes are built by tests; none was run end to end.",
        "The recipe follows WeSpeaker where the paper's words leave a choice.",
    ),
    Item(
        "setup-protocols",
        "sections 4.1 and 5.1",
        "TAR at FAR 1e-3 on five sets of pairs, 1e-4 and 1e-5 on IJB-B and IJB-C, 1e-3 and 1e-4 on "
        "VoxCeleb1-H",
        (
            "src/qmargin/metrics/operating.py:tar_at_far",
            "src/qmargin/evaluation/protocols/ijb_release.py:read_ijb",
        ),
        (
            "tests/metrics/test_operating.py::test_tar_at_far_is_the_definition",
            "tests/evaluation/test_templates.py::test_verification_of_templates",
        ),
        "",
        "Readers and numbers by tests on files made for them.",
        "A FAR that the pairs cannot resolve is refused. The five sets have about 3,000 impostor "
        "pairs each, so that FAR 1e-3 rests on three of them.",
    ),
    Item(
        "table-sota",
        "Table 1, tab:sota_comparison",
        "Q-Margin has the best TAR of five losses by one recipe on IJB-B and IJB-C",
        ("src/qmargin/paper/tables.py:table_sota", "src/qmargin/paper/numbers.py:REIMPLEMENTED"),
        (f"{_ARTEFACTS}::test_methods_of_other_papers_stand_beside_ours",),
        "qmargin paper table-sota",
        _STROKES,
        f"{_OTHER_SCALE} Settings are those of the demo's search, so a column names them.",
    ),
    Item(
        "table-face",
        "Table 2, tab:results-face",
        "every configuration of ArcFace, CosFace and Q-Margin on faces",
        ("src/qmargin/paper/tables.py:table_face", "src/qmargin/recipes/face.py:SWEEP"),
        (
            f"{_ARTEFACTS}::test_settings_stand_beside_those_of_the_paper",
            f"{_FACE}::test_every_row_of_the_paper_has_a_name_and_no_name_has_another_row",
        ),
        "qmargin paper table-face",
        _STROKES,
        _OTHER_SCALE,
    ),
    Item(
        "table-seeds",
        "Table 3, tab:multiseed",
        "three seeds of Q-Margin (1.25, 32, 0.2) differ by at most 0.07",
        ("src/qmargin/paper/tables.py:table_seeds",),
        (
            f"{_ARTEFACTS}::test_seeds_have_a_mean_and_a_deviation",
            f"{_FACE}::test_seeds_of_the_repeated_run_differ_in_nothing_else",
        ),
        "qmargin paper table-seeds",
        _STROKES,
        f"{_OTHER_SCALE} A seed of the demo also draws other identities.",
    ),
    Item(
        "table-throughput",
        "Table 4, tab:throughput",
        "samples a second: ArcFace 2005, Q-Margin 1978, 1900 and 1466 with the top 1, 5 and 100 %",
        (
            "src/qmargin/cli/paper_throughput.py:table_throughput",
            "src/qmargin/heads/paper.py:PaperStep",
        ),
        (
            f"{_ARTEFACTS}::test_throughput_is_read_from_a_benchmark",
            f"{_FACE}::test_rows_of_the_throughput_table_follow_the_papers_procedure",
        ),
        "qmargin paper table-throughput",
        "One H200 with all 2,059,906 classes and R-100: docs/benchmarks/head.md.",
        "One GPU instead of eight, random images, batch 512 instead of 1024. A column is added for "
        "the sparse head, which needs no sort.",
    ),
    Item(
        "table-speaker",
        "Table 5, tab:results-r34-vox2dev",
        "six configurations on VoxCeleb1-H; Q-Margin is best at both FARs",
        ("src/qmargin/paper/tables.py:table_speaker", "src/qmargin/recipes/speaker.py:TABLE"),
        (
            f"{_ARTEFACTS}::test_settings_stand_beside_those_of_the_paper",
            f"{_SPEAKER}::test_every_row_of_the_paper_is_a_recipe",
        ),
        "qmargin paper table-speaker",
        _STROKES,
        _OTHER_SCALE,
    ),
    Item(
        "figure-pairs",
        "Figure 1, fig:clean_grid",
        "pairs that Q-Margin gets right and ArcFace wrong",
        ("src/qmargin/paper/figures.py:figure_pairs",),
        (f"{_ARTEFACTS}::test_pairs_are_drawn",),
        "qmargin paper figure-pairs",
        "On synthetic stroke identities, at the thresholds of FAR 1e-3.",
        "The opposite pairs, which ArcFace gets right, exist as well; a figure like this compares "
        "nothing.",
    ),
    Item(
        "figure-det-face",
        "Figure 2 left, fig:det-curve",
        "DET curves of the losses on faces",
        ("src/qmargin/paper/figures.py:figure_det_face", "src/qmargin/metrics/curve.py:det_curve"),
        (f"{_ARTEFACTS}::test_det_curves_become_a_page",),
        "qmargin paper figure-det-face",
        _STROKES,
        f"{_OTHER_SCALE} Curves have bands.",
    ),
    Item(
        "figure-det-speaker",
        "Figure 2 right, fig:det-curve-speaker",
        "DET curves of the losses on speakers",
        (
            "src/qmargin/paper/figures.py:figure_det_speaker",
            "src/qmargin/metrics/curve.py:det_curve",
        ),
        (f"{_ARTEFACTS}::test_det_curves_become_a_page",),
        "qmargin paper figure-det-speaker",
        _STROKES,
        f"{_OTHER_SCALE} Curves have bands.",
    ),
    Item(
        "claim-low-far",
        "abstract, section 4.3",
        "Q-Margin is consistently better than ArcFace and CosFace at low FARs",
        (_RUN, "src/qmargin/demo/report.py:verdict", "src/qmargin/study/search.py:choose"),
        (
            "tests/demo/test_demo.py::test_a_demo_trains_tests_and_reports",
            "tests/study/test_search.py::test_every_loss_of_the_demo_gets_the_same_effort",
        ),
        "qmargin demo --seeds 3",
        "On synthetic stroke identities by the command and by `qmargin study strokes-10k` and "
        "`strokes-1m`, on characters by `qmargin study omniglot`, on voices by `qmargin study "
        "audiomnist`; docs/results/ says who is ahead, by paired comparisons. At FAR 1e-4, "
        "against ArcFace and CosFace: on characters ahead of ArcFace, a tie with CosFace; on "
        "voices larger means, within chance; on 10,000 stroke identities a tie with ArcFace, 1.1 "
        "points behind CosFace; on a million of two samples 2.5 and 1.5 points behind them.",
        f"{_OTHER_SCALE} Every loss gets the same search on validation identities, which the paper "
        "does not have.",
    ),
    Item(
        "claim-margin",
        "section 4.3, hyperparameter sensitivity",
        "raising m from 0.2 to 0.5 at alpha 1.25 and scale 32 makes Q-Margin worse",
        ("src/qmargin/maths/margins.py:PriorMargin.effective",),
        (
            "tests/losses/test_margin_loss.py::test_effective_margins_of_the_paper",
            "tests/maths/test_margins.py::test_an_effective_margin_out_of_reach_warns_with_the_remedy",
        ),
        "qmargin paper table-face",
        _STROKES,
        "The reason is in the formula: the cosine gap that is asked for, m_eff = "
        "(exp(s m (alpha - 1)) - 1) / ((alpha - 1) s), is 0.49 for m 0.2 and 6.7 for 0.5, and "
        "cosines differ by 2 at most. A loss warns of it.",
    ),
    Item(
        "claim-alpha-scale",
        "section 4.3, hyperparameter sensitivity",
        "alpha and scale are coupled: the best scale falls as alpha grows",
        (
            "src/qmargin/maths/hardness.py:hardness",
            "src/qmargin/maths/margins.py:PriorMargin.from_effective",
        ),
        (
            "tests/maths/test_hardness.py::"
            "test_what_the_paper_chose_for_several_alphas_is_equally_hard",
            "tests/maths/test_margins.py::test_effective_margin_is_its_formula_and_inverts",
        ),
        "qmargin paper table-face",
        f"{_STROKES} The coupling is explained: scales that the paper chose for several alphas on "
        "the same data look at equally hard negatives, see `qmargin.hardness`.",
        "m_eff grows with alpha, scale and margin together, so that the three are confounded; the "
        "paper does not separate them.",
    ),
    Item(
        "claim-support",
        "section 4.4",
        "at most 7,976 of two million classes are active, 1,020 on average",
        ("src/qmargin/heads/step.py:StepStats",),
        (
            "tests/heads/test_sparse.py::test_stats_count_what_was_done",
            "tests/losses/test_accuracy.py::test_tau_support_and_mass",
        ),
        "qmargin bench head --rows 32 --dim 32 --classes 5000 --parts settings --repeats 3",
        "Random prototypes on one H200: 585 on average and 960 at most for (1.25, 35, 0.2), "
        "docs/benchmarks/head.md. Every training records its support, and reports draw it.",
        "The support depends on the setting: 25,413 on average for (1.25, 10, 0.2).",
    ),
    Item(
        "claim-exact-training",
        "abstract, section 4.4",
        "sparsity makes training over all classes exact and saves memory",
        (
            "src/qmargin/heads/sparse.py:SparseStep",
            "src/qmargin/heads/classifier.py:MarginClassifier",
        ),
        (
            "tests/heads/test_paths.py::test_path_matches_the_definition",
            "tests/heads/test_paths.py::test_no_matrix_of_all_cosines_and_no_gradient_matrix",
        ),
        "qmargin bench head --rows 32 --dim 32 --classes 5000 --parts paths --repeats 3",
        "Two million classes on one H200: docs/benchmarks/head.md.",
        "The paper saves the solver's time and still builds all logits; here neither they nor the "
        "gradient matrix exist.",
    ),
    Item(
        "claim-speaker-alpha",
        "section 5.3",
        "speakers want larger alphas (1.5, 1.75) than faces, perhaps because there are fewer",
        ("src/qmargin/losses/presets.py:q_margin_speaker",),
        ("tests/losses/test_margin_loss.py::test_presets_have_the_numbers_of_the_paper",),
        "qmargin paper table-speaker",
        _STROKES,
        _OTHER_SCALE,
    ),
)
