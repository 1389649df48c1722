"""Axes of a sweep, and what is refused before anything is trained."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmargin.errors import ConfigError
from qmargin.maths.hardness import hardness
from qmargin.recipes import get_recipe
from qmargin.sweep.axes import (
    Range,
    Values,
    check_axes,
    check_points,
    check_settings,
    effective_margin,
    grid,
    parse_axis,
    with_point,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss.alpha", "has no values"),
        ("=1,2", "has no values"),
        ("loss.alpha=", "has an empty value"),
        ("loss.alpha=1.25,,1.5", "has an empty value"),
        ("loss.alpha=1.5,1.5", "has the value 1.5 twice"),
        ("loss.scale=a:b", "is not LOW:HIGH"),
        ("loss.scale=1:2:3", "is not LOW:HIGH"),
        ("loss.scale=5:5", "the first number must be the smaller"),
        ("loss.scale=0:5:log", "must begin above 0"),
        ("loss.scale=1:inf", "the first number must be the smaller"),
    ],
)
def test_bad_axes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_axis(text)


def test_brackets_hold_lists_together() -> None:
    assert parse_axis("schedule.milestones=[4, 5],[3,5]") == Values(
        "schedule.milestones", ("[4, 5]", "[3,5]")
    )
    assert parse_axis("loss.scale=8:64") == Range("loss.scale", 8.0, 64.0)


def check(*texts: str) -> None:
    recipe, axes = get_recipe("debug"), [parse_axis(text) for text in texts]
    check_axes(recipe, axes)
    check_points(recipe, grid(axes))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["loss.margn=0.1,0.2"], "did you mean 'margin'"),
        (["loss.alpha=1.5", "loss.alpha=1.25"], "loss.alpha is given twice"),
        (["m_eff=0.3", "loss.margin=0.1"], "each decides the other"),
        (["seed=1,2"], "say how many seeds with --seeds"),
        (["loss.alpha=1.5,1.50"], "are the same training"),
        (["run.log_every=1,2"], "are the same training"),  # decides nothing
        (["loss.scale=8:64"], "is a range, which a grid cannot visit"),
        (["loss.alpha=0.1,x"], "alpha is 'x'; give a finite number"),
        (["loss.preset=arcface", "m_eff=0.3"], "the margin is angular"),
        (["m_eff=wide"], "m_eff is 'wide'; give a number"),
        (["hardness=2", "loss.scale=16"], "hardness and loss.scale are both axes"),
        (["hardness=far"], "hardness is 'far'; give a number"),
        (["hardness=9"], "hardness is 9; .* nearest of 200 classes"),
        (["precision.compile=0:1"], "is False and has no range"),
        (["loss.margn=0:1"], "did you mean 'margin'"),
    ],
)
def test_axes_that_do_not_fit_are_refused(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(*texts)


@pytest.mark.parametrize(
    ("axis", "setting", "message"),
    [
        ("loss.scale=10,20", "loss.scale=3", "loss.scale=3 is set, and loss.scale is an axis"),
        ("loss.scale=8:64", " loss.scale = 3", "loss.scale is an axis"),
        ("m_eff=0.3", "loss.margin=0.3", "loss.margin follows from the axis m_eff"),
        ("hardness=2", "loss.scale=16", "loss.scale follows from the axis hardness"),
        ("loss.preset=arcface", "loss.scale=16", "loss follows from the axis loss.preset"),
        ("margin_schedule=null", "margin_schedule.start=0", "margin_schedule is an axis"),
    ],
)
def test_a_setting_that_an_axis_decides_is_refused(axis: str, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{message} in every trial; leave one of them out"):
        check_settings([parse_axis(axis)], [setting])


def test_settings_beside_the_axes_are_taken() -> None:
    axes = [parse_axis("loss.scale=10,20"), parse_axis("m_eff=0.3")]
    check_settings(axes, ["loss.preset=cosface", "loss.alpha=1.5", "optimizer.lr=0.2"])


def test_the_last_axis_moves_fastest() -> None:
    axes = [parse_axis("loss.preset=arcface,q_margin"), parse_axis("loss.scale=10,16,32")]
    points = grid(axes)
    assert len(points) == 6 and points[1] == {"loss.preset": "arcface", "loss.scale": "16"}
    recipe = with_point(get_recipe("debug"), points[1], seed=7)
    assert (recipe.loss.margin_kind, recipe.loss.scale, recipe.seed) == ("angular", 16.0, 7)


@settings(max_examples=50, deadline=None)
@given(alpha=st.floats(1.0, 2.0), scale=st.floats(1.0, 64.0), gap=st.floats(0.01, 1.9))
def test_an_effective_margin_is_met_at_every_alpha_and_scale(
    alpha: float, scale: float, gap: float
) -> None:
    """M12 and its inverse."""
    point = {"loss.alpha": repr(alpha), "loss.scale": repr(scale), "m_eff": repr(gap)}
    found = effective_margin(with_point(get_recipe("debug"), point))
    assert found is not None and math.isclose(found, gap, rel_tol=1e-9)


@pytest.mark.parametrize("alpha", ["1", "1.25", "2"])
def test_a_hardness_is_met_before_the_margin_is_chosen(alpha: str) -> None:
    point = {"m_eff": "0.4", "hardness": "1.5", "loss.alpha": alpha}
    recipe = with_point(get_recipe("debug"), point)
    sizes = {
        "num_classes": recipe.data.num_classes,
        "embedding_dim": recipe.model.embedding_dim,
    }
    assert hardness(recipe.loss.alpha, recipe.loss.scale, **sizes).mean == pytest.approx(1.5)
    assert effective_margin(recipe) == pytest.approx(0.4)


def test_a_hardness_needs_the_number_of_classes() -> None:
    recipe = get_recipe("audiomnist_r34_arcface")
    assert recipe.data.num_classes is None
    with pytest.raises(ConfigError, match="how many classes there are; give"):
        with_point(recipe, {"hardness": "2"})


def test_a_cosine_margin_is_its_own_gap() -> None:
    recipe = with_point(get_recipe("debug"), {"loss.preset": "cosface", "m_eff": "0.35"})
    assert recipe.loss.margin == 0.35
