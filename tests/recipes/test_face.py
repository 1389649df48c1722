"""Face recipes: the paper's rows with the paper's numbers, and their scaled variants."""

import itertools

import pytest

from qmargin.recipes import get_recipe
from qmargin.recipes.face import FACE_RECIPES, HEADLINES
from qmargin.training.recipe import Recipe
from qmargin.training.recipe_files import apply_settings
from qmargin.training.schedules import learning_rate

Row = tuple[str, float, float, float]  # kind of margin, alpha, scale, margin

ROWS: set[Row] = {  # both tables of results on faces, word for word; a dash is alpha 1
    *(("angular", 1.0, scale, 0.5) for scale in (32.0, 64.0)),
    *(("cosine", 1.0, scale, 0.5) for scale in (32.0, 64.0)),
    *(("prior", *row) for row in itertools.product((1.25, 1.5), (10.0, 20.0, 32.0), (0.2, 0.5))),
    ("prior", 1.25, 35.0, 0.2),
    ("angular", 1.25, 64.0, 0.5),  # EntMax
    ("angular", 2.0, 1.9, 0.2),  # SparseMax
}
PAPER_RUNS = [name for name in FACE_RECIPES if name.startswith("webface42m") and "1gpu" not in name]


def row_of(recipe: Recipe) -> Row:
    loss = recipe.loss
    return loss.margin_kind, loss.alpha, loss.scale, loss.margin


def test_every_row_of_the_paper_has_a_name_and_no_name_has_another_row() -> None:
    recipes = [get_recipe(name) for name in PAPER_RUNS]
    assert {row_of(recipe) for recipe in recipes} == ROWS
    assert len({recipe.sha256 for recipe in recipes}) == len(recipes)  # no two names for one run


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_paper_runs_have_the_papers_settings(name: str) -> None:
    recipe = get_recipe(name)
    optimizer = recipe.optimizer
    assert recipe.data.num_classes == 2_059_906
    assert (recipe.data.batch_size, recipe.run.epochs) == (8 * 128, 20)
    assert (recipe.model.backbone, recipe.model.embedding_dim) == ("iresnet100", 512)
    assert (optimizer.kind, optimizer.momentum, optimizer.weight_decay) == ("sgd", 0.9, 5e-4)
    assert (optimizer.nesterov, optimizer.decay_norms) == (False, True)
    assert (optimizer.clip_norm, optimizer.clip_head) == (5.0, False)
    rates = [learning_rate(recipe, epoch, 1) for epoch in range(20)]
    assert rates == pytest.approx([0.1] * 7 + [0.01] * 6 + [0.001] * 7, rel=1e-12)


def test_seeds_of_the_repeated_run_differ_in_nothing_else() -> None:
    name = "webface42m_r100_q_margin_a125_s32_m02"
    runs = [get_recipe(name), get_recipe(f"{name}_seed1"), get_recipe(f"{name}_seed2")]
    assert [run.seed for run in runs] == [0, 1, 2]
    assert len({apply_settings(run, ["seed=0"]).sha256 for run in runs}) == 1


@pytest.mark.parametrize("percent", [1, 5, 100])
def test_rows_of_the_throughput_table_follow_the_papers_procedure(percent: int) -> None:
    recipe = get_recipe(f"webface42m_r100_q_margin_top{percent}")
    assert (recipe.head.path, recipe.head.top_percent) == ("paper", percent)


def test_the_toolkits_arcface_is_a_variant_of_its_own() -> None:
    assert get_recipe("webface42m_r100_arcface").loss.options == {}
    straight = get_recipe("webface42m_r100_arcface_straight_through")
    assert straight.loss.options == {"gradient": "straight_through"}


@pytest.mark.parametrize("loss", HEADLINES)
def test_other_sets_have_their_identities(loss: str) -> None:
    for images, classes, decay in (("ms1mv3", 93_431, 5e-4), ("glint360k", 360_232, 1e-4)):
        recipe = get_recipe(f"{images}_r100_{loss}")
        assert (recipe.data.num_classes, recipe.optimizer.weight_decay) == (classes, decay)
        assert row_of(recipe) == row_of(get_recipe(f"webface42m_r100_{loss}"))


@pytest.mark.parametrize("name", [name for name in FACE_RECIPES if name.endswith("_1gpu")])
def test_learning_rates_follow_the_batch_on_one_gpu(name: str) -> None:
    recipe, large = get_recipe(name), get_recipe(name.removesuffix("_1gpu"))
    halved = apply_settings(recipe, ["data.batch_size=128"])
    for step in (0, 7, 13):
        expected = learning_rate(large, step, 1)
        assert learning_rate(recipe, step, 1) == pytest.approx(expected / 4, rel=1e-12)
        assert learning_rate(halved, step, 1) == pytest.approx(expected / 8, rel=1e-12)


@pytest.mark.parametrize("name", [name for name in FACE_RECIPES if name.startswith("faces_")])
def test_small_runs_count_their_identities_and_run_anywhere(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.data.num_classes is None and recipe.precision.dtype == "fp32"
    assert learning_rate(recipe, 10, 10) == pytest.approx(0.1 * 64 / 512)
    assert learning_rate(recipe, 0, 10) == 0.0  # warming up
    assert recipe.data.options["photometric"] > 0


def test_as_many_identities_as_the_paper_has_need_no_files() -> None:
    recipe = get_recipe("synthetic2m_r100_q_margin")
    assert (recipe.data.kind, recipe.data.num_classes) == ("synthetic", 2_059_906)
    assert recipe.data.options["shape"] == (3, 112, 112)
    assert learning_rate(recipe, 0, 8046) == pytest.approx(0.1 * 256 / 1024)
