"""Schedules against closed forms, written here in the words of those who use them."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmargin.recipes import get_recipe, list_recipes
from qmargin.training.loss_part import LossSettings
from qmargin.training.recipe import OptimizerPart, Recipe, RunPart, SchedulePart, ValueSchedule
from qmargin.training.recipe_files import apply_settings
from qmargin.training.schedules import learning_rate, loss_settings, scheduled_value, unreached


def recipe_with(schedule: SchedulePart, *, epochs: int = 20, **optimizer: Any) -> Recipe:
    return replace(
        get_recipe("debug"),
        schedule=schedule,
        run=RunPart(epochs=epochs),
        optimizer=OptimizerPart(**{"lr": 0.1, **optimizer}),
    )


def test_the_papers_steps_for_faces() -> None:
    """0.1 for 7 epochs, 0.01 for 6, 0.001 for 7."""
    recipe = recipe_with(SchedulePart("step", milestones=(7, 13)))
    steps = 41_479  # an epoch of WebFace42M at batch 1024
    rates = [
        learning_rate(recipe, step, steps)
        for epoch in range(20)
        for step in (epoch * steps, (epoch + 1) * steps - 1)
    ]
    assert rates == pytest.approx([0.1] * 14 + [0.01] * 12 + [0.001] * 14, rel=1e-15)


@settings(max_examples=50, deadline=None)
@given(step=st.integers(0, 3000), steps_per_epoch=st.integers(1, 200))
def test_polynomial_with_warm_up_is_that_of_the_face_recipes(
    step: int, steps_per_epoch: int
) -> None:
    """Warm-up base*t/W for t <= W, then base*(1-(t-W)/(T-W))."""
    recipe = recipe_with(SchedulePart("polynomial", warmup_epochs=2), epochs=25, lr=0.4)
    warmup, total = 2 * steps_per_epoch, 25 * steps_per_epoch
    if step <= warmup:
        expected = 0.4 * step / warmup
    else:
        expected = 0.4 * (1.0 - (min(step, total) - warmup) / (total - warmup))
    assert learning_rate(recipe, step, steps_per_epoch) == pytest.approx(expected, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(step=st.integers(0, 30_000), steps_per_epoch=st.integers(1, 200))
def test_exponential_with_warm_up_is_that_of_the_speaker_recipe(
    step: int, steps_per_epoch: int
) -> None:
    """lr(t) = c(t)*lr0*(lrT/lr0)^(t/T); c = S*t/W before W, then S; S = batch/64."""
    recipe = recipe_with(
        SchedulePart("exponential", warmup_epochs=6, final_lr=5e-5, decay_in_warmup=True),
        epochs=150,
        base_batch=64,
    )
    recipe = replace(recipe, data=replace(recipe.data, batch_size=512))
    warmup, total = 6 * steps_per_epoch, 150 * steps_per_epoch
    factor = 8.0 * min(step / warmup, 1.0)
    expected = factor * 0.1 * (5e-5 / 0.1) ** (min(step, total) / total)
    assert learning_rate(recipe, step, steps_per_epoch) == pytest.approx(expected, rel=1e-12)


def test_exponential_as_the_paper_words_it() -> None:
    """A line up in six epochs, after which it falls from 0.1 to 5e-5 over what remains."""
    recipe = recipe_with(
        SchedulePart("exponential", warmup_epochs=6, final_lr=5e-5), epochs=150, base_batch=64
    )
    assert learning_rate(recipe, 0, 100) == 0.0
    assert learning_rate(recipe, 300, 100) == pytest.approx(0.05)
    assert learning_rate(recipe, 600, 100) == pytest.approx(0.1)
    assert learning_rate(recipe, 7800, 100) == pytest.approx(math.sqrt(0.1 * 5e-5))
    assert learning_rate(recipe, 15000, 100) == pytest.approx(5e-5)


def test_cosine_is_half_a_turn() -> None:
    recipe = recipe_with(SchedulePart("cosine", final_lr=0.02), epochs=10)
    for step in range(0, 101, 5):
        expected = 0.02 + 0.08 * (1 + math.cos(math.pi * step / 100)) / 2
        assert learning_rate(recipe, step, 10) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(recipe, 1000, 10) == pytest.approx(0.02)  # and stays there


def test_powers_starts_and_lengths() -> None:
    recipe = recipe_with(SchedulePart("polynomial", power=2.0, final_lr=0.01), epochs=10)
    assert learning_rate(recipe, 50, 10) == pytest.approx(0.01 + 0.09 * 0.25)
    recipe = recipe_with(SchedulePart("constant", warmup_epochs=1, warmup_start=0.25))
    rates = [learning_rate(recipe, step, 4) for step in (0, 2, 4)]
    assert rates == pytest.approx([0.025, 0.0625, 0.1])
    run = recipe_with(SchedulePart("cosine"), epochs=10)
    cut = recipe_with(SchedulePart("cosine", epochs=10), epochs=2)
    assert learning_rate(run, 13, 10) == learning_rate(cut, 13, 10)


@settings(max_examples=50, deadline=None)
@given(step=st.integers(0, 10_000), steps_per_epoch=st.integers(1, 200))
def test_the_margin_rises_as_in_the_speaker_recipe(step: int, steps_per_epoch: int) -> None:
    """m0+(m1-m0)*(1-exp(((t-a)/(b-a))*ln(1e-3/(1+1e-6)))), a and b in steps, epochs from 1."""
    rise = ValueSchedule("exponential", initial=0.0, final=0.2, start_epoch=19, end_epoch=39)
    first, last = (20 - 1) * steps_per_epoch, (40 - 1) * steps_per_epoch
    if step < first:
        expected = 0.0
    elif step >= last:
        expected = 0.2
    else:
        way = (step - first) / (last - first)
        expected = 0.2 * (1.0 - math.exp(way * math.log(1e-3 / (1.0 + 1e-6))))
    value = scheduled_value(rise, step / steps_per_epoch, final=9.0)
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_linear_and_constant_moves() -> None:
    line = ValueSchedule("linear", initial=10.0, final=30.0, start_epoch=1, end_epoch=3)
    found = [scheduled_value(line, step / 2, final=0.0) for step in (0, 2, 3, 4, 6, 9)]
    assert found == [10.0, 10.0, 15.0, 20.0, 30.0, 30.0]
    jump = ValueSchedule("constant", initial=1.0, start_epoch=2)
    assert [scheduled_value(jump, step / 2, final=5.0) for step in (0, 3, 4)] == [1.0, 1.0, 5.0]


def test_only_what_is_scheduled_moves() -> None:
    recipe = get_recipe("debug")
    assert loss_settings(recipe, 10, 5) == LossSettings(1.25, 0.2, 32.0)
    recipe = replace(
        recipe,
        margin_schedule=ValueSchedule("linear", end_epoch=4),
        alpha_schedule=ValueSchedule("linear", initial=1.05, final=1.45, end_epoch=4),
    )
    assert loss_settings(recipe, 10, 5) == pytest.approx(LossSettings(1.25, 0.1, 32.0))
    recipe = replace(recipe, scale_schedule=ValueSchedule("constant", initial=8, start_epoch=3))
    assert loss_settings(recipe, 10, 5).scale == 8.0
    assert loss_settings(recipe, 15, 5).scale == 32.0


def test_a_recipe_of_its_own_length_reaches_what_it_schedules() -> None:
    for recipe in map(get_recipe, list_recipes()):
        if recipe.run.max_steps is None:  # those with one are for measuring speed
            assert unreached(recipe, recipe.run.epochs) == [], recipe.name
    recipe = apply_settings(get_recipe("speakers_r34_arcface"), ["run.epochs=10"])
    assert unreached(recipe, 10) == []  # the margin rises until the end


@pytest.mark.parametrize(
    ("epochs", "words"),
    [
        (4, ["stays at 0", "0.1", "start_epoch is 5", "4 epochs", "margin_schedule=null"]),
        (5, ["stays at 0", "5 epochs"]),  # the step at which it would start is not taken
        (6, ["ends at 0.0749", "0.1", "end_epoch is 10", "6 epochs"]),
    ],
)
def test_a_margin_that_never_comes_is_named(epochs: int, words: list[str]) -> None:
    settings = [f"run.epochs={epochs}"]
    recipe = apply_settings(get_recipe("speakers_r34_q_margin_a150"), settings)
    (sentence,) = unreached(recipe, epochs)
    assert all(word in sentence for word in ("the margin", "margin_schedule", *words)), sentence
    proposed = re.findall(r"margin_schedule\.\w+=[\d.]*\d", sentence)
    assert len(proposed) == 2 and unreached(apply_settings(recipe, proposed), epochs) == []
    assert unreached(apply_settings(recipe, ["margin_schedule=null"]), epochs) == []


def test_other_marks_beyond_the_end_are_named() -> None:
    recipe = get_recipe("debug")  # warm-up to epoch 0.5, steps at epochs 4 and 5
    assert unreached(recipe, 6) == []
    (late,) = unreached(recipe, 5)
    assert "schedule.milestones" in late and "epoch 5" in late and "epoch 4" not in late
    early, late = unreached(recipe, 0.08)
    assert "schedule.warmup_epochs is 0.5" in early and "0.08 epochs" in early
    assert "epochs 4, 5" in late
    jump = ValueSchedule("constant", initial=8.0, start_epoch=6)
    (sentence,) = unreached(replace(recipe, scale_schedule=jump), 6)
    assert "the scale stays at 8" in sentence and "scale_schedule.start_epoch is 6" in sentence
    still = ValueSchedule("linear", initial=recipe.loss.alpha, end_epoch=99)
    assert unreached(replace(recipe, alpha_schedule=still), 6) == []
