"""Settings that experiments try, and what is refused before anything is trained."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmargin.errors import ConfigError
from qmargin.experiments.space import (
    Range,
    Values,
    check_axes,
    check_points,
    grid,
    parse_axis,
    reachable,
    with_point,
)
from qmargin.losses.hardness import hardness
from qmargin.recipes import get_recipe
from qmargin.training.recipe_files import apply_settings


@pytest.mark.parametrize(
    "text",
    [
        "loss.alpha",
        "=1,2",
        "loss.alpha=",
        "loss.alpha=1.25,,1.5",
        "loss.alpha=1.5,1.5",
        "loss.scale=a:b",
        "loss.scale=1:2:3",
        "loss.scale=5:5",
        "loss.scale=0:5:log",
        "loss.scale=1:inf",
    ],
)
def test_bad_axes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_axis(text)


def test_brackets_hold_lists_together() -> None:
    assert parse_axis("schedule.milestones=[4, 5],[3,5]") == Values(
        "schedule.milestones", ("[4, 5]", "[3,5]")
    )
    assert parse_axis("loss.scale=8:64") == Range("loss.scale", 8.0, 64.0)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["loss.margn=0.1,0.2"], "did you mean 'margin'"),
        (["loss.alpha=1.5", "loss.alpha=1.25"], "loss.alpha is given twice"),
        (["m_eff=0.3", "loss.margin=0.1"], "each decides the other"),
        (["seed=1,2"], "how many seeds"),
        (["loss.alpha=1.5,1.50"], "are the same run"),
        (["run.log_every=1,2"], "are the same run"),  # decides nothing
        (["loss.scale=8:64"], "loss.scale is a range"),
        (["loss.alpha=0.1,x"], "alpha is 'x'"),
        (["loss.preset=arcface", "m_eff=0.3"], "the margin is angular"),
        (["m_eff=wide"], "m_eff is 'wide'"),
        (["hardness=2", "loss.scale=16"], "hardness and loss.scale"),
        (["hardness=far"], "hardness is 'far'"),
        (["hardness=9"], "hardness is 9"),
        (["reach=0.5", "loss.margin=0.1"], "reach and loss.margin"),
        (["reach=0.5", "m_eff=0.1"], "m_eff and reach"),
        (["reach=wide"], "reach is 'wide'"),
        (["reach=0.5", "loss.alpha=1,1.5"], "alpha is 1: the loss of a row is never"),
        (["loss.alpha=1.5", "reach=2.5"], "differ by at most 2"),
        (["loss.preset=magface", "reach=0.5"], "the margin is magface"),
        (["loss.alpha=1.5", "reach=0.05"], "needs a gap of 0.0625 without any margin"),
        (["precision.compile=0:1"], "precision.compile is False"),
        (["loss.margn=0:1"], "did you mean 'margin'"),
    ],
)
def test_axes_that_do_not_fit_are_refused(texts: list[str], message: str) -> None:
    recipe, axes = get_recipe("debug"), [parse_axis(text) for text in texts]
    with pytest.raises(ConfigError, match=message):
        check_axes(recipe, axes)
        check_points(recipe, grid(axes))


@pytest.mark.parametrize(
    ("axis", "setting", "message"),
    [
        ("loss.scale=10,20", "loss.scale=3", "loss.scale is an axis"),
        ("loss.scale=8:64", " loss.scale = 3", "loss.scale is an axis"),
        ("m_eff=0.3", "loss.margin=0.3", "loss.margin follows from the axis m_eff"),
        ("hardness=2", "loss.scale=16", "loss.scale follows from the axis hardness"),
        ("reach=0.6", "loss.margin=0.3", "loss.margin follows from the axis reach"),
        ("loss.preset=arcface", "loss.scale=16", "loss follows from the axis loss.preset"),
    ],
)
def test_a_setting_that_an_axis_decides_is_refused(axis: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_axes(get_recipe("debug"), [parse_axis(axis)], [setting])


def test_the_last_axis_moves_fastest() -> None:
    axes = [parse_axis("loss.preset=arcface,q_margin"), parse_axis("loss.scale=10,16,32")]
    check_axes(get_recipe("debug"), axes[1:], ["loss.preset=cosface", "optimizer.lr=0.2"])
    points = grid(axes)
    assert len(points) == 6 and points[1] == {"loss.preset": "arcface", "loss.scale": "16"}
    recipe = with_point(get_recipe("debug"), points[1], seed=7)
    assert (recipe.loss.margin_kind, recipe.loss.scale, recipe.seed) == ("angular", 16.0, 7)


@settings(max_examples=50, deadline=None)
@given(alpha=st.floats(1.0, 2.0), scale=st.floats(1.0, 64.0), gap=st.floats(0.01, 1.9))
def test_an_effective_margin_is_met_at_every_alpha_and_scale(
    alpha: float, scale: float, gap: float
) -> None:
    point = {"loss.alpha": repr(alpha), "loss.scale": repr(scale), "m_eff": repr(gap)}
    found = with_point(get_recipe("debug"), point).loss.effective_margin
    assert found is not None and math.isclose(found, gap, rel_tol=1e-9)


@pytest.mark.parametrize("alpha", ["1", "1.25", "2"])
def test_a_hardness_is_met_before_the_margin_is_chosen(alpha: str) -> None:
    point = {"m_eff": "0.4", "hardness": "1.5", "loss.alpha": alpha}
    recipe = with_point(get_recipe("debug"), point)
    found = hardness(
        recipe.loss.alpha,
        recipe.loss.scale,
        num_classes=recipe.data.num_classes,
        embedding_dim=recipe.model.embedding_dim,
    )
    assert found.mean == pytest.approx(1.5)
    assert recipe.loss.effective_margin == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ["prior", "cosine", "angular"])
def test_a_reach_is_met_after_the_hardness(kind: str) -> None:
    point = {"reach": "0.9", "hardness": "2.2", "loss.alpha": "1.5", "loss.margin_kind": kind}
    recipe = with_point(get_recipe("debug"), point)
    sizes = {"num_classes": recipe.data.num_classes, "embedding_dim": recipe.model.embedding_dim}
    assert hardness(1.5, recipe.loss.scale, **sizes).mean == pytest.approx(2.2)
    assert recipe.loss.reach == pytest.approx(0.9)
    assert recipe.loss.margin > 0.0


def test_a_sum_or_class_margins_have_no_axis_of_their_own() -> None:
    for margin in ("[{prior: 0.1}, {angular: 0.1}]", "{prior: {per_class: [1, 2]}}"):
        recipe = apply_settings(get_recipe("debug"), [f"loss.margin={margin}"])
        for key in ("reach", "m_eff"):
            with pytest.raises(ConfigError, match="a sum or per class"):
                with_point(recipe, {key: "0.9", "loss.alpha": "1.5"})


def test_a_grid_leaves_out_what_no_margin_reaches() -> None:
    recipe = get_recipe("debug")
    axes = [parse_axis(text) for text in ("loss.alpha=1.25,1.5", "loss.scale=8,16", "reach=0.3,1")]
    check_axes(recipe, axes)
    kept, left_out = reachable(recipe, grid(axes))
    least = {("1.25", "8"): 0.5, ("1.25", "16"): 0.25, ("1.5", "8"): 0.25, ("1.5", "16"): 0.125}
    assert len(kept) == 7
    assert left_out == [{"loss.alpha": "1.25", "loss.scale": "8", "reach": "0.3"}]
    for point in kept:
        assert least[point["loss.alpha"], point["loss.scale"]] <= float(point["reach"])
        found = with_point(recipe, point).loss.reach
        assert found == pytest.approx(float(point["reach"]))
    with pytest.raises(ConfigError, match=r"no point of the grid is possible: reach is 0\.02"):
        reachable(recipe, grid([parse_axis("loss.alpha=1.5"), parse_axis("reach=0.01,0.02")]))


def test_what_decides_the_loss_needs_to_know_it() -> None:
    with pytest.raises(ConfigError, match=r"data\.num_classes"):
        with_point(get_recipe("audiomnist_r34_arcface"), {"hardness": "2"})
    recipe = with_point(get_recipe("debug"), {"loss.preset": "cosface", "m_eff": "0.35"})
    assert recipe.loss.margin == 0.35  # a cosine margin is its own gap
