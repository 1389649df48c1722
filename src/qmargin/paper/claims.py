"""What the paper claims about its experiments."""

from __future__ import annotations

from qmargin.paper.items import Item

_OTHER_SCALE = "Data, network and length of the training; the numbers are not comparable."
_RUN = "src/qmargin/demo/run.py:complete_parts"
_SEARCH = "src/qmargin/study/search.py:choose"
_EFFORT = "tests/study/test_search.py::test_every_loss_of_the_demo_gets_the_same_effort"
_CPU = "with --minutes 3 on a CPU (1,000 synthetic stroke identities, 2 epochs, one seed)"

CLAIMS = (
    Item(
        "claim-low-far",
        "abstract, section 4.3",
        "Q-Margin is consistently better than ArcFace and CosFace at low FARs",
        (_RUN, "src/qmargin/demo/report.py:verdict", _SEARCH),
        (
            "tests/demo/test_demo.py::test_a_demo_trains_tests_and_reports",
            _EFFORT,
        ),
        "qmargin demo --seeds 3",
        "On synthetic stroke identities by the command and by `qmargin study strokes-10k` and "
        "`strokes-1m`, on characters by `qmargin study omniglot`, on voices by `qmargin study "
        "audiomnist`; docs/results/ says who is ahead, by paired comparisons. At FAR 1e-4, "
        "against ArcFace and CosFace: on characters and on voices larger means, within chance; on "
        "10,000 stroke identities a tie with ArcFace, 1.1 points behind CosFace; on a million of "
        "two samples 2.5 and 1.5 points behind them. At 1e-3 behind CosFace on characters, and "
        "behind ArcFace on both strokes; at 1e-5 behind CosFace on both strokes. So the claim was "
        "not found here. What was looked at for a reason, margin, hardness and length of the "
        "training, is in docs/results/strokes-10k.md.",
        f"{_OTHER_SCALE} Every loss gets the same search on validation identities, which the paper "
        "does not have.",
    ),
    Item(
        "claim-partial-fc",
        "section 4.3",
        "Q-Margin nearly equals PartialFC with 0.4 % of the classes active, so that sparsity may "
        "act like hard-negative mining",
        ("src/qmargin/heads/sampled.py:sampled_rows", "src/qmargin/maths/hardness.py:hardness"),
        (
            "tests/heads/test_paths.py::test_sampled_is_the_dense_loss_on_the_sample",
            "tests/maths/test_hardness.py::test_it_is_that_of_drawn_classes",
        ),
        "qmargin study strokes-10k --losses arcface q_margin sampled --out runs/sampled",
        "No parity either way. Against ArcFace on a random tenth of the classes, by the same "
        "recipe, at FAR 1e-4: ahead by 2.60 points on 10,000 stroke identities "
        "(docs/results/strokes-10k.md), behind by 4.24 on a million of two samples "
        "(docs/results/strokes-1m.md); leads of 3.48 on characters (docs/results/omniglot.md) and "
        "of 5.60 on voices (docs/results/audiomnist.md) are within chance. That a "
        "sparse posterior weighs harder negatives is a formula here, `qmargin.hardness`; harder is "
        "not better everywhere, and at equal hardness CosFace, Q-Margin and SparseMax are level "
        "(docs/guide/choosing-alpha-scale-margin.md).",
        "A tenth of the classes instead of 0.3, with ArcFace's setting. The paper compares with a "
        "number that PartialFC's authors report.",
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
        f"Not seen {_CPU}: raising m makes (1.25, 32) a little better, TAR at FAR 1e-3 is 46.49 "
        "and then 47.74 %, at 1e-4 13.97 and 14.78. Over ten epochs at scale 10 TAR at 1e-4 is "
        "52.75 with m 0.2 and 52.50 with 0.5, where seeds deviate by 2 "
        "(docs/results/demo-search.md).",
        "What the paper saw has a reason in the formula: the cosine gap that m adds, m_eff = "
        "(exp(s m (alpha - 1)) - 1) / ((alpha - 1) s), is 0.49 for m 0.2 and 6.7 for 0.5, and "
        "cosines differ by 2 at most. A loss warns of it.",
    ),
    Item(
        "claim-start",
        "section 4.3, hyperparameter sensitivity",
        "start with alpha 1.25 and m 0.2 and tune s upward, since results are more sensitive to m "
        "than to s; alpha 1.5 brings little for faces",
        ("src/qmargin/losses/presets.py:q_margin", _SEARCH),
        (
            "tests/paper/test_map.py::test_margin_and_scale_in_the_papers_table",
            _EFFORT,
        ),
        "qmargin study demo --search-only --out runs/demo-search",
        "The opposite was found: scale decides, and the margin matters less. In table-face "
        f"{_CPU}, TAR of Q-Margin at alpha 1.25 and FAR 1e-3 changes by 0.05 to 1.25 points from m "
        "0.2 to 0.5, and by 8.15 and 9.05 from scale 10 to 32. After ten epochs "
        "(docs/results/demo-search.md), at FAR 1e-4: 52.75, 52.72 and 52.50 for m 0.2, 0.3 and 0.5 "
        "at scale 10; 51.60, 52.72, 52.95 and 52.54 for scales 8, 10, 12 and 16 at m 0.3; 50.25 at "
        "scale 35 and m 0.2; seeds deviate by 1.4 to 3.1. CosFace with 10,000 classes: 72.27 to "
        "72.38 for m 0.1 to 0.4 at scale 16, 64.60 to 72.51 for scales 11 to 32 at m 0.4 "
        "(docs/results/strokes-10k.md). Chosen scales are below the paper's, so that one tunes "
        "downward from 32; docs/guide/choosing-alpha-scale-margin.md says which scale to start "
        "with.",
        "Fewer classes and shorter trainings bear only easier negatives, which are smaller scales, "
        "and there a margin has little effect. The paper's own Table 2 is divided: at alpha 1.25 "
        "and FAR 1e-5 raising m from 0.2 to 0.5 changes TAR by 0.50 to 1.16 points on IJB-B and "
        "0.01 to 0.35 on IJB-C, raising s from 10 to 32 by 0.43 to 0.88 and 0.28 to 0.44.",
    ),
    Item(
        "claim-alpha-scale",
        "section 4.3, hyperparameter sensitivity",
        "alpha and scale are coupled: the best scale falls as alpha grows, and raising both at "
        "once makes training unstable",
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
        "The best scale of Q-Margin falls with alpha in the searches: 12 and 4 for alpha 1.25 and "
        "1.5 (docs/results/demo-search.md), 10 and 6 (docs/results/audiomnist.md). "
        "Raising both costs accuracy: on voices TAR at FAR 1 % is 68.16 with (1.25, 10), 66.60 "
        "with (1.5, 6) and 57.93 with (1.5, 10) (docs/results/audiomnist.md). No training became "
        "unstable: none of the searches has one that failed, and none did "
        f"{_CPU}, where TAR at FAR 1e-3 with m 0.2 falls from 55.54 to 46.49 % for scales 10 to 32 "
        "at alpha 1.25 and from 50.17 to 45.85 at alpha 1.5. The coupling is explained: scales "
        "that the paper chose for several alphas on the same data look at equally hard negatives, "
        "see `qmargin.hardness`.",
        "m_eff grows with alpha, scale and margin together, so that the three are confounded; the "
        "paper does not separate them. In its Table 2 at alpha 1.5 scale 32 is not worse than 10: "
        "with m 0.2 better in three of four columns, with 0.5 in all.",
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
        "python -m benchmarks head --rows 32 --dim 32 --classes 5000 --parts settings --repeats 3",
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
        "python -m benchmarks head --rows 32 --dim 32 --classes 5000 --parts paths --repeats 3",
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
        "qmargin study audiomnist --data audiomnist60 --search-only --out runs/audiomnist",
        "Against the claim, Q-Margin and EntMax both chose alpha 1.25 on voices, among 1.25, 1.5 "
        "and 1.75: for Q-Margin TAR at FAR 1 % on validation speakers is 68.16 with (1.25, 10, "
        "0.2), 66.60 with (1.5, 6, 0.2) and 59.01 with (1.75, 5, 0.1) "
        "(docs/results/audiomnist.md).",
        f"{_OTHER_SCALE} There are 120 classes, six settings of each loss and one training of each "
        "setting, and what was chosen has the smallest scale that was tried.",
    ),
    Item(
        "claim-speaker-grid",
        "section 5.3",
        "of s in 5, 10, 20, 32 and m in 0.1, 0.2, 0.3, moderate ones (s 5 or 10, m 0.1) gain most "
        "consistently",
        ("src/qmargin/sweep/axes.py:grid", "src/qmargin/recipes/speaker.py:TABLE"),
        (
            "tests/sweep/test_run.py::test_a_grid_is_trained_measured_and_written",
            "tests/recipes/test_speaker.py::test_every_row_of_the_paper_is_a_recipe",
        ),
        "qmargin sweep voxceleb2_r34_q_margin_a150 --grid loss.scale=5,10,20,32 "
        "--grid loss.margin=0.1,0.2,0.3 --out runs/grid",
        "This grid was not run: VoxCeleb2 is not here. Of six settings of Q-Margin on voices "
        "(docs/results/audiomnist.md) moderate scales are best as well, 10 before 16 at alpha 1.25 "
        "and 6 before 10 at 1.5; with m 0.1 and 0.2 at (1.25, 16) TAR at FAR 1 % is 65.10 and "
        "63.86, but the two best settings have m 0.2 and were not tried with 0.1.",
        "The paper prints one setting of each loss and alpha, so that its grid cannot be seen.",
    ),
    Item(
        "claim-other-lists",
        "section 5.1",
        "VoxCeleb1-O and VoxCeleb1-E lead to similar conclusions as VoxCeleb1-H",
        ("src/qmargin/evaluation/protocols/voxceleb.py:OFFICIAL",),
        ("tests/evaluation/test_voxceleb_lists.py::test_a_list_is_written_as_it_is",),
        "",
        "Not run: VoxCeleb is not here. The three official lists can be unpacked and evaluated.",
        "The paper gives no numbers for O and E. Its H has 550,894 trials, the list that is "
        "unpacked here the 552,536 of the first release.",
    ),
)
