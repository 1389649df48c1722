"""Losses of recipes: every way of writing one, sums, per-class margins, names of users."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.ranks import run_ranks
from helpers.registries import forget_registered
from helpers.runs import identities, losses, tiny_recipe
from qmargin.errors import ConfigError, DataError, MarginWarning
from qmargin.losses import presets
from qmargin.losses.divergences import Alpha, JensenShannon
from qmargin.losses.margin_loss import MarginLoss
from qmargin.losses.margins import AngularMargin, PerClass, PriorMargin, StatelessMargin, SumMargin
from qmargin.losses.references import Reference
from qmargin.registry import divergences, margins, references
from qmargin.schema import decode_settings, encode
from qmargin.training.build import build_head, build_loss
from qmargin.training.loop import train
from qmargin.training.loss_part import PRESETS, LossPart, LossSettings, ScheduledLoss
from qmargin.training.recipe import Recipe, ValueSchedule
from qmargin.training.recipe_files import apply_settings, from_yaml, to_yaml


def read(**values: Any) -> LossPart:
    part: LossPart = decode_settings(LossPart, values, "loss")
    return part


PRIOR = LossPart(1.25, "prior", 0.2, 32.0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_written_out_and_built_again(name: str) -> None:
    published: MarginLoss = getattr(presets, name)()
    part = LossPart.from_preset(name)
    built = part.build()
    assert repr(built) == repr(published) and type(built.margin) is type(published.margin)
    assert read(preset=name) == part
    assert set(encode(part, "loss")) == {"alpha", "margin_kind", "margin", "scale", "options"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"alpha": 1.25, "margin_kind": "prior", "margin": 0.2, "scale": 32}, PRIOR),
        ({"divergence": {"alpha": 1.25}, "margin": {"prior": 0.2}, "scale": 32}, PRIOR),
        ({"divergence": {"alpha": {"alpha": 1.25}}, "margin": {"prior": "2e-1"}, "scale": 32},
         PRIOR),
        ({"preset": "q_margin"}, PRIOR),
        ({"preset": "q_margin", "divergence": {"alpha": 1.5}}, replace(PRIOR, alpha=1.5)),
        (
            {"alpha": 1, "margin": {"angular": {"margin": 0.5, "gradient": "exact"}}, "scale": 64},
            LossPart(1.0, "angular", 0.5, 64.0, {"gradient": "exact"}),
        ),
        ({"alpha": 1, "margin": "adaface", "scale": 64}, LossPart.from_preset("adaface")),
        (
            {"alpha": 1.25, "margin": [{"prior": 0.1}, {"angular": 0.05}], "scale": 16},
            LossPart(1.25, "prior", 0.1, 16.0, plus={"angular": {"margin": 0.05}}),
        ),
        (
            {"divergence": "jensen_shannon", "margin": {"prior": 0.2}, "scale": 32},
            LossPart(None, "prior", 0.2, 32.0, divergence="jensen_shannon"),
        ),
        (
            {"alpha": 1.25, "margin": {"prior": {"per_class": [1, 2]}}, "scale": 32},
            LossPart(1.25, "prior", 1.0, 32.0, {"per_class": (1, 2)}),
        ),
    ],
)  # fmt: skip
def test_a_loss_is_written_as_it_is_thought(values: dict[str, Any], expected: LossPart) -> None:
    part = read(**values)
    assert part == expected
    assert decode_settings(LossPart, encode(part, "loss")) == part
    recipe = replace(tiny_recipe(), loss=part)
    assert from_yaml(to_yaml(recipe)) == recipe
    assert from_yaml(to_yaml(recipe)).sha256 == recipe.sha256


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "arcfac"}, "loss.preset is 'arcfac', did you mean 'arcface'"),
        ({"preset": "arcface", "margin": {"prior": 0.2}}, "loss.preset"),
        ({"preset": "arcface", "options": {"gradent": "exact"}}, "loss.options.gradent"),
        ({"alpha": 1, "margin": {"prio": 0.2}, "scale": 1}, "loss.margin .*did you mean 'prior'"),
        ({"alpha": 1, "margin": [], "scale": 1}, "loss.margin is an empty list"),
        ({"alpha": 1, "margin": [{"prior": 1}, {"prior": 2}], "scale": 1}, "prior twice"),
        ({"alpha": 1, "margin": [{"cosine": 1}, {"angular": 1}], "scale": 1}, "cannot add"),
        ({"alpha": 1, "margin": {"prior": 1, "cosine": 1}, "scale": 1}, "loss.margin is"),
        ({"alpha": 1, "margin": {"prior": {}}, "scale": 1}, "loss.margin.prior has no margin"),
        ({"alpha": 1, "margin": {"prior": 1}, "margin_kind": "prior", "scale": 1}, "margin_kind"),
        ({"margin": {"prior": 0.2}, "scale": 1}, "loss.alpha is missing"),
        ({"divergence": "alpha", "margin": {"prior": 0.2}, "scale": 1}, "loss.alpha is missing"),
        ({"divergence": {"jensen_shannon": 2}, "margin": {"prior": 0.2}, "scale": 1}, "no number"),
        ({"divergence": {"kl": 2}, "margin": {"prior": 1}, "scale": 1}, "loss.divergence is 'kl'"),
        ({"alpha": 2, "divergence": {"alpha": 1}, "margin": {"prior": 1}, "scale": 1}, "keep one"),
        ({"alpha": -1, "margin": {"prior": 0.2}, "scale": 1}, "loss.alpha is -1"),
        ({"alpha": 1, "margin": {"angular": 4}, "scale": 1}, "margin of AngularMargin is 4"),
        ({"alpha": 1, "margin": {"prior": {"per_class": ["a"]}}, "scale": 1}, "per_class"),
        ({"alpha": 1, "margin": {"adaface": {"per_class": [1]}}, "scale": 1}, "margin of AdaFace"),
    ],
)  # fmt: skip
def test_losses_that_make_no_sense_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**values)


def test_settings_replace_a_part_of_the_loss_or_a_number_of_it() -> None:
    recipe = tiny_recipe("loss.scale=20", "loss.preset=arcface")
    assert recipe.loss == LossPart(1.0, "angular", 0.5, 20.0)
    recipe = apply_settings(
        recipe, ["loss.plus.prior.margin=0.3", "loss.margin=[{angular: 0.1}, {prior: 0.2}]"]
    )
    assert recipe.loss == LossPart(1.0, "angular", 0.1, 20.0, plus={"prior": {"margin": 0.3}})
    recipe = apply_settings(recipe, ["loss.margin=0.4", "loss.divergence=jensen_shannon"])
    assert (recipe.loss.margin, recipe.loss.divergence) == (0.4, "jensen_shannon")
    assert apply_settings(recipe, ["loss.preset=q_margin"]).loss == PRIOR
    with pytest.raises(ConfigError, match=r"loss\.margin is 'prio', did you mean 'prior'"):
        apply_settings(recipe, ["loss.margin={prio: 1}"])


def test_hashes_tell_losses_apart() -> None:
    forms = (
        "divergence=jensen_shannon",
        "margin=[{prior: 0.2}, {angular: 0.1}]",
        "margin=[{prior: 0.2}, {angular: 0.2}]",
        "margin={prior: {per_class: a.npy}}",
        "margin={prior: {per_class: b.npy}}",
    )
    own = tiny_recipe().sha256
    assert len({own, *(tiny_recipe(f"loss.{form}").sha256 for form in forms)}) == 6
    same = tiny_recipe("loss.divergence={alpha: 1.25}", "loss.margin={prior: 0.2}")
    assert same.sha256 == own


def test_numbers_of_a_step_reach_the_parts() -> None:
    part = LossPart(1.25, "prior", 0.1, 16.0, plus={"angular": {"margin": 0.05}})
    loss = ScheduledLoss(part).at(LossSettings(1.5, 0.3, 8.0))
    assert (loss.divergence, loss.scale) == (Alpha(1.5), 8.0)
    assert loss.margin == SumMargin(PriorMargin(0.3), AngularMargin(0.05))
    assert isinstance(read(divergence="jensen_shannon", margin={"prior": 0.1}, scale=1).build()
                      .divergence, JensenShannon)  # fmt: skip
    drawn: Any = LossPart.from_preset("elasticface").build_margin(seed=5)
    assert drawn.seed == 5


def test_a_scheduled_loss_changes_with_its_numbers_and_keeps_state() -> None:
    scheduled = ScheduledLoss(LossPart.from_preset("adaface"))
    first, margin = scheduled.loss.eval(), scheduled.loss.margin
    assert scheduled.at(scheduled.part.settings) is first
    second = scheduled.at(LossSettings(1.0, 0.4, 16.0))
    assert second.scale == 16.0 and second.margin is margin and not second.training
    part = LossPart(1.0, "prior", 0.1, 16.0, plus={"elastic": {"margin": 0.5}})
    scheduled = ScheduledLoss(part, seed=1)
    kept: Any = scheduled.loss.margin
    changed: Any = scheduled.at(LossSettings(1.0, 0.3, 16.0)).margin
    assert changed.geometric is kept.geometric and changed.prior == PriorMargin(0.3)


def test_a_margin_out_of_reach_warns_when_it_is_built_and_not_before() -> None:
    recipe = tiny_recipe("loss.margin=1")
    with pytest.warns(MarginWarning):
        scheduled = ScheduledLoss(recipe.loss)
    scheduled.at(recipe.loss.settings._replace(margin=0.9))


@pytest.mark.parametrize("suffix", [".npy", ".txt", "list"])
def test_margins_per_class(suffix: str, tmp_path: Path) -> None:
    """One value per class, times the margin, from a file or a list; schedules scale them."""
    values = np.linspace(0.5, 1.5, 200, dtype=np.float32)
    source: Any = tmp_path / f"margins{suffix}"
    if suffix == ".npy":
        np.save(source, values)
    elif suffix == ".txt":
        source.write_text("\n".join(map(str, values)), encoding="utf-8")
    source = values.tolist() if suffix == "list" else str(source)
    part = read(alpha=1.25, margin={"prior": {"per_class": source, "margin": 0.2}}, scale=32)
    scheduled = ScheduledLoss(part, num_classes=200)
    margin: Any = scheduled.loss.margin
    torch.testing.assert_close(margin.margin.values, 0.2 * torch.from_numpy(values))
    margin = scheduled.at(LossSettings(1.25, 0.1, 32.0)).margin
    torch.testing.assert_close(margin.margin.values, 0.1 * torch.from_numpy(values))
    assert isinstance(margin.margin, PerClass)
    with pytest.raises(ConfigError, match=r"per_class.* 200 .* 7 classes"):
        ScheduledLoss(part, num_classes=7)
    if suffix == ".npy":
        recipe = replace(tiny_recipe("run.max_steps=3"), loss=part)
        train(recipe, tmp_path / "run", device="cpu")
        train(tiny_recipe("run.max_steps=3"), tmp_path / "plain", device="cpu")
        assert losses(tmp_path / "run") != losses(tmp_path / "plain")
        np.save(source, values[::-1])
        longer = apply_settings(recipe, ["run.max_steps=4"])
        with pytest.raises(DataError, match="per_class"):
            train(longer, tmp_path / "run", resume=True, allow_changes=True, device="cpu")


def test_files_of_margins_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    """One, too, whose header claims more than the file has."""
    np.save(tmp_path / "m.npy", np.zeros(3, dtype=np.float32))
    content = (tmp_path / "m.npy").read_bytes()
    claimed = content.replace(b"(3,), }" + b" " * 13, b"(999999999999,), }  ")
    assert claimed != content
    (tmp_path / "m.npy").write_bytes(claimed)
    for name, text in (("a.txt", ""), ("b.txt", "a b"), ("c.txt", "1 nan"), ("d.txt", "\0")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for name in ("a.txt", "b.txt", "c.txt", "d.txt", "m.npy", "none"):
        with pytest.raises(ConfigError, match=rf"loss\.options\.per_class.*{name}"):
            build_head(tiny_recipe(f"loss.margin={{prior: {{per_class: {tmp_path / name}}}}}"))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A margin and a divergence of a user, each a few lines."""
    for registry in (margins, divergences):
        registry.names()
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @margins.register("half")
    @dataclass(frozen=True, eq=False)
    class Half(StatelessMargin):
        """A cosine margin, of which half counts."""

        size: float
        share: float = 0.5

        def term(self, cosines: Any, scale: float, labels: Any, norms: Any) -> Any:
            plain = PriorMargin(0.0)(cosines, scale)
            return plain._replace(logits=scale * (cosines - self.share * self.size))

    @divergences.register("order")
    def order(q: float) -> Alpha:
        """An alpha-divergence by another name."""
        return Alpha(q)

    yield


@pytest.mark.usefixtures("registered")
def test_names_of_users_work_in_recipes_and_schedules(tmp_path: Path) -> None:
    recipe: Recipe = apply_settings(
        tiny_recipe("run.max_steps=4", "head.path=dense"),
        ["loss.divergence={order: 1.25}", "loss.margin={half: {size: 0.4, share: 0.5}}"],
    )
    assert recipe.loss.settings[:3] == (1.25, 0.4, 32.0)
    assert from_yaml(to_yaml(recipe)) == recipe
    train(recipe, tmp_path / "mine", device="cpu")
    plain = ["head.path=dense", "run.max_steps=4", "loss.margin={cosine: 0.2}"]
    train(tiny_recipe(*plain), tmp_path / "plain", device="cpu")
    expected = pytest.approx(list(losses(tmp_path / "plain").values()), rel=1e-5)
    assert list(losses(tmp_path / "mine").values()) == expected
    rise = ValueSchedule("linear", end_epoch=0.1)
    scheduled = replace(recipe, margin_schedule=rise, alpha_schedule=replace(rise, initial=1.1))
    train(scheduled, tmp_path / "rise", device="cpu")
    assert losses(tmp_path / "rise") != losses(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"loss\.options\.shre"):
        apply_settings(recipe, ["loss.options.shre=1"])


@pytest.mark.dist
def test_two_ranks_share_sums_and_per_class_margins(tmp_path: Path) -> None:
    np.save(tmp_path / "m.npy", np.linspace(0.5, 1.5, 200, dtype=np.float32))
    form = f"[{{prior: {{per_class: {tmp_path / 'm.npy'}, margin: 0.1}}}}, {{angular: 0.05}}]"
    settings = ["run.max_steps=4", f"loss.margin={form}", "margin_schedule.end_epoch=0.04"]
    train(tiny_recipe(*settings), tmp_path / "1", device="cpu")
    script = f"""
from helpers.runs import tiny_recipe
from qmargin.training.loop import train
train(tiny_recipe(*{settings!r}), {str(tmp_path / "2")!r}, device="cpu")
"""
    run_ranks(script, 2)
    one, two = (list(losses(tmp_path / name).values()) for name in "12")
    assert two == pytest.approx(one, rel=1e-4)


SCHEDULE = [f"reference_schedule.{key}" for key in ("kind=linear", "initial=0.1", "end_epoch=2")]
COUNTED = {"class_prior": {"strength": 0.5}, "quality": {"strength": 0.33}}


@pytest.mark.parametrize(
    "written",
    [
        [{"class_prior": {"strength": 0.5}}, {"quality": {"strength": 0.33}}],
        [{"class_prior": 0.5}, {"quality": 0.33}],
        {"class_prior": 0.5, "quality": {"strength": 0.33}},
        COUNTED,
    ],
)
def test_references_are_written_in_any_form_and_read_back(written: Any) -> None:
    part = read(preset="q_margin", reference=written)
    assert part.reference == COUNTED and part.settings == (1.25, 0.2, 32.0, 0.5)
    assert read(**encode(part, "loss")) == part
    recipe = apply_settings(tiny_recipe(), [f"loss.reference={written}"])
    assert from_yaml(to_yaml(recipe)) == recipe and recipe.loss.reference == COUNTED
    plain = apply_settings(recipe, ["loss.reference=null"])
    assert plain.loss.reference == {} and "reference" not in to_yaml(plain)
    assert plain.sha256 == tiny_recipe().sha256 != recipe.sha256
    changed = apply_settings(recipe, ["loss.reference.quality.strength=0.2"])
    assert changed.loss.reference["quality"] == {"strength": 0.2}
    built = part.build(counts=torch.tensor([1, 2, 3])).reference
    assert built is not None
    assert [one.strength for one in built.parts] == [0.5, 0.33]
    named = apply_settings(tiny_recipe(), ["loss.reference=look_alike"])
    assert named.loss.reference == {"look_alike": {"strength": 0.1}}
    assert named.sha256 != plain.sha256


@pytest.mark.parametrize(
    ("written", "match"),
    [
        ({"clas_prior": 0.5}, "reference is 'clas_prior', did you mean 'class_prior'"),
        ([{"quality": 0.1}, {"quality": 0.2}], "quality twice"),
        ({"class_prior": {"counts": [1, 2]}}, r"reference\.class_prior\.counts is unknown"),
        ({"look_alike": {"treshold": 0.1}}, "threshold"),
        ({"look_alike": -1.0}, "strength of LookAlike is -1"),
        (7, "not a name and settings"),
        ("numberless", "takes no number; give it a parameter"),
    ],
)
def test_references_that_cannot_be_are_refused(
    written: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_registered(monkeypatch)

    @references.register("numberless")
    class Numberless(Reference):
        pass

    with pytest.raises(ConfigError, match=match):
        read(preset="q_margin", reference=written)


def test_what_a_reference_needs_is_said_before_a_run() -> None:
    with pytest.raises(ConfigError, match="PriorMargin"):
        read(preset="cosface", reference={"quality": 0.3})
    with pytest.raises(ConfigError, match="training samples of each class"):
        read(preset="q_margin", reference={"class_prior": 0.3}).build()
    with pytest.raises(ConfigError, match="reference_schedule is given and"):
        apply_settings(tiny_recipe(), SCHEDULE)
    with pytest.raises(ConfigError, match=r"reference_schedule: .*strength of LookAlike is -1"):
        apply_settings(
            tiny_recipe(), ["loss.reference=look_alike", *SCHEDULE, "reference_schedule.initial=-1"]
        )


def test_counts_come_from_the_data_and_state_from_the_checkpoint(tmp_path: Path) -> None:
    """A run that is stopped and resumed ends as one that was not; the strength is scheduled."""
    settings = (
        "loss.reference=[{class_prior: 0.5}, {quality: 0.3}, {look_alike: {strength: 0.2}}]",
        "reference_schedule.kind=linear", "reference_schedule.initial=0",
        "reference_schedule.end_epoch=2",
    )  # fmt: skip
    recipe = tiny_recipe(*settings, "run.max_steps=6", "run.save_every_steps=3")
    train(recipe, tmp_path / "whole", device="cpu")
    train(replace(recipe, run=replace(recipe.run, max_steps=3)), tmp_path / "cut", device="cpu")
    train(recipe, tmp_path / "cut", device="cpu", resume=True, allow_changes=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    lines = (tmp_path / "whole" / "journal.jsonl").read_text().splitlines()
    strengths = [one["strength"] for one in map(json.loads, lines) if "strength" in one]
    assert strengths == sorted(strengths) and strengths[0] == 0.0 < strengths[-1]
    plain = tiny_recipe("run.max_steps=2")
    train(plain, tmp_path / "plain", device="cpu")
    assert '"strength"' not in (tmp_path / "plain" / "journal.jsonl").read_text()


def test_the_counts_are_those_of_the_labels() -> None:
    data = identities(num_classes=5, samples_per_class=3)
    recipe = tiny_recipe("loss.reference=class_prior")
    scheduled = build_loss(recipe, num_classes=5, dataset=data)
    reference: Any = scheduled.loss.reference
    labels = np.asarray(data.labels)
    assert reference.counts.tolist() == np.bincount(labels, minlength=5).tolist()

    class Unlisted:
        labels, num_classes = None, 5

    with pytest.raises(ConfigError, match="no list of labels"):
        build_loss(recipe, num_classes=5, dataset=Unlisted())  # type: ignore[arg-type]


def test_a_reference_of_ones_own_trains_by_its_name_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its state, which moves in every step, is in checkpoints; its main number is scheduled."""
    forget_registered(monkeypatch)

    @references.register("rising")
    class Rising(Reference):
        """Counts the rows of each class, and expects the frequent ones."""

        main_number = "power"
        changes_in_training = True

        def __init__(self, counts: torch.Tensor, power: float = 0.5) -> None:
            super().__init__()
            self.power = power
            self.register_buffer("seen", torch.ones(len(counts), dtype=torch.float64))

        def per_class(self) -> torch.Tensor:
            return self.power * self.seen.log()

        def margin_factor(self, labels: torch.Tensor, norms: Any) -> torch.Tensor:
            if self.training:
                used = labels[labels >= 0]
                self.seen = self.seen.index_add(0, used, torch.ones(len(used)).double())
            return torch.ones(len(labels), dtype=torch.float64)

    recipe = tiny_recipe(
        "loss.reference=[{rising: 0.5}]", "reference_schedule.kind=linear",
        "reference_schedule.initial=0.1", "reference_schedule.end_epoch=2",
        "run.max_steps=6", "run.save_every_steps=3",
    )  # fmt: skip
    short = replace(recipe, run=replace(recipe.run, max_steps=3))
    train(recipe, tmp_path / "whole", device="cpu")
    train(short, tmp_path / "cut", device="cpu")
    train(recipe, tmp_path / "cut", device="cpu", resume=True, allow_changes=True)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    train(tiny_recipe("run.max_steps=6"), tmp_path / "plain", device="cpu")
    assert losses(tmp_path / "plain") != losses(tmp_path / "whole")
