"""What is studied: data, one recipe, and the settings that each loss may choose from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from qmargin.demo.losses import GRID as DEMO_GRID
from qmargin.demo.losses import LOSSES, DemoLoss
from qmargin.demo.recipe import SIZES, Size, demo_recipe
from qmargin.errors import ConfigError
from qmargin.recipes.registry import get_recipe
from qmargin.training.fields import check_known
from qmargin.training.recipe import LossPart, Recipe

SAMPLE_RATE = 0.1  # of the classes, in the baseline that samples negatives
SEARCH_SEED = 1000  # the first of a search; no final training and no demo has it
Setting = tuple[float, float, float]  # alpha, scale, margin
SYSTEMS = {
    **LOSSES,
    "sampled": DemoLoss("sampled", "ArcFace, 10 % of classes", 1.0, "angular", 16.0, 0.2),
}
# Twelve of each, three margins among them. The hardness of these scales, for 10,000 classes, is
# between 0.7 and 3.3, see `qmargin.hardness`; sparse losses were worse below 1.8.
_SPARSE = ((1.25, 2.9), (1.25, 4.4), (1.5, 1.6), (1.75, 1.1))
GRID: Mapping[str, tuple[Setting, ...]] = {
    "arcface": tuple((1.0, s, m) for s in (8.0, 11.0, 16.0, 23.0) for m in (0.02, 0.05, 0.1)),
    "cosface": tuple((1.0, s, m) for s in (11.0, 16.0, 23.0, 32.0) for m in (0.2, 0.4, 0.6)),
    "entmax": tuple((alpha, s, m) for alpha, s in _SPARSE for m in (0.05, 0.1, 0.2)),
    "sparsemax": tuple((2.0, s, m) for s in (0.031, 0.1, 0.4, 1.0) for m in (0.05, 0.1, 0.2)),
    "q_margin": tuple((alpha, s, m) for alpha, s in _SPARSE for m in (0.2, 0.4, 0.6)),
}
# Where a training takes minutes: 1.6, 2 and 2.5 for a million classes.
SHORT_GRID: Mapping[str, tuple[Setting, ...]] = {
    "arcface": tuple((1.0, s, 0.1) for s in (13.0, 16.0, 20.0)),
    "cosface": tuple((1.0, s, 0.3) for s in (13.0, 16.0, 20.0)),
    "entmax": tuple((1.25, s, 0.1) for s in (0.54, 0.8, 1.3)),
    "sparsemax": tuple((2.0, s, 0.1) for s in (4.5e-5, 1.2e-4, 5.3e-4)),
    "q_margin": tuple((1.25, s, 0.4) for s in (0.54, 0.8, 1.3)),
}
# Of the paper's speaker table, and what suits a few speakers.
_SOFT_SPEECH = tuple((1.0, s, m) for s in (16.0, 32.0) for m in (0.1, 0.2, 0.3))
_SPARSE_SPEECH = (
    (1.25, 10.0, 0.2),
    *((1.25, 16.0, m) for m in (0.1, 0.2)),
    (1.5, 6.0, 0.2),
    (1.5, 10.0, 0.1),
    (1.75, 5.0, 0.1),
)
SPEECH_GRID: Mapping[str, tuple[Setting, ...]] = {
    "arcface": _SOFT_SPEECH,
    "cosface": _SOFT_SPEECH,
    "entmax": _SPARSE_SPEECH,
    "sparsemax": tuple((2.0, s, m) for s in (1.9, 3.0, 5.0) for m in (0.1, 0.2)),
    "q_margin": _SPARSE_SPEECH,
}


class Round(NamedTuple):
    """A part of a search.

    Attributes:
        name: Of its folder.
        epochs: Of a training.
    """

    name: str
    epochs: int


@dataclass(frozen=True)
class Study:
    """One kind of data and the recipe by which every loss is trained on it.

    Attributes:
        name: On the command line and of folders.
        title: Of the protocol.
        kind: Of the data: made by this package, or read from a path.
        size: Of a training and its test.
        search_epochs: Of a training of the search, in which losses choose their settings.
        finalists: Settings of each loss, the best of the search, that are trained as long as the
            final trainings before one is chosen; 0 to choose at once. What is best after a short
            training need not be so after a long one. See ``finalists_of``.
        grid: Settings by loss; negative sampling takes those that ArcFace chose.
        losses: Keys of ``SYSTEMS`` that are compared.
        search_seeds: Trainings of each setting in the search; their mean counts.
        has_turns: Whether quarter turns of a training identity are identities of their own.
        has_mirrors: And mirror images, where turns are.
        alike: From which on two of them are one; see ``Drawings.with_turns``.
        warp: How far training samples are turned, stretched, slanted and moved; see ``warped``.
        num_views: Of a tested drawing: it and its turns, see ``embed_turned``.
        lr: Learning rate of a network for drawings.
        dtype: Of a backbone that is trained on drawings.
        world: Seed of the identities; None for that of the training.
        measure: By which losses choose their settings.
    """

    name: str
    title: str
    kind: Literal["strokes", "pictures", "speech"]
    size: Size
    search_epochs: int
    grid: Mapping[str, tuple[Setting, ...]] = field(default_factory=lambda: GRID, repr=False)
    losses: tuple[str, ...] = tuple(SYSTEMS)
    search_seeds: int = 1
    finalists: int = 0
    has_turns: bool = False
    has_mirrors: bool = False
    alike: float | None = None
    warp: float = 0.0
    num_views: int = 1
    lr: float = 5e-3
    dtype: Literal["fp32", "bf16"] = "fp32"
    world: int | None = None
    measure: str = "tar@0.0001"

    @property
    def seeds_of_search(self) -> range:
        """Seeds of the trainings by which losses choose."""
        return range(SEARCH_SEED, SEARCH_SEED + self.search_seeds)

    @property
    def rounds(self) -> tuple[Round, ...]:
        """Of the search: all settings; then maybe the best of them, for longer."""
        first, last = Round("search", self.search_epochs), Round("finalists", self.size.epochs)
        return (first, last) if self.finalists else (first,)

    def recipe(self, loss: DemoLoss, *, seed: int, epochs: int, path: str | None) -> Recipe:
        """The recipe with a loss; all losses share everything else.

        Args:
            loss: With its settings.
            seed: Of the training.
            epochs: Those of a round of the search, or of ``size``.
            path: Of the training data; None for stroke identities.

        Every training reads its own data: with many of them at a time there are no cores left for
        processes that do nothing else.
        """
        if self.kind == "speech":
            made = _speech_recipe(loss, seed=seed, epochs=epochs, path=path)
        else:
            size = self.size._replace(epochs=epochs)
            made = self._picture_recipe(loss, seed=seed, size=size, path=path)
        head = made.head
        if loss.key == "sampled":
            head = replace(head, path="sampled", sample_rate=SAMPLE_RATE, update="torch")
        return replace(made, name=f"{self.name}-{loss.key}", head=head)

    def _picture_recipe(self, loss: DemoLoss, *, seed: int, size: Size, path: str | None) -> Recipe:
        made = demo_recipe(loss, seed=seed, size=size, path=path)
        options = dict(made.data.options)
        if self.world is not None:
            options["seed"] = self.world
        # of pictures only a part is trained on while settings are chosen: their number follows
        count = made.data.num_classes if self.kind == "strokes" else None
        data = replace(made.data, options=options, num_classes=count, num_workers=0)
        return replace(
            made,
            data=data,
            optimizer=replace(made.optimizer, lr=self.lr),
            precision=replace(made.precision, dtype=self.dtype),
        )


def _speech_recipe(loss: DemoLoss, *, seed: int, epochs: int, path: str | None) -> Recipe:
    """The recipe of small collections, its schedules in proportion to its length, with AdamW.

    By SGD at one learning rate, losses of large scales hardly learned while that of the smallest
    did: updates are those of the demo, whose steps do not depend on the scale.
    """
    made = get_recipe("audiomnist_r34_arcface")
    demo = demo_recipe(loss, seed=seed, size=SIZES["cpu"])
    share = epochs / made.run.epochs
    margins = made.margin_schedule
    assert margins is not None and margins.end_epoch is not None  # the recipe has both
    return replace(
        made,
        data=replace(made.data, path=path, num_workers=0),
        loss=LossPart(loss.alpha, loss.margin_kind, loss.margin, loss.scale),
        optimizer=replace(demo.optimizer, lr=1e-3),
        head=replace(demo.head, lr_ratio=1.0),  # few speakers, each with many samples
        schedule=replace(demo.schedule, warmup_epochs=share * made.schedule.warmup_epochs),
        margin_schedule=replace(
            margins,
            start_epoch=share * margins.start_epoch,
            end_epoch=share * margins.end_epoch,
        ),
        run=replace(made.run, epochs=epochs),
        seed=seed,
    )


_GPU = SIZES["cuda"]
STUDIES = {
    study.name: study
    for study in (
        Study(
            "demo",
            "the demo's synthetic stroke identities, 1,000 classes",
            "strokes",
            SIZES["cpu"],
            search_epochs=SIZES["cpu"].epochs,
            grid=DEMO_GRID,
            losses=tuple(LOSSES),
            search_seeds=2,
        ),
        Study(
            "omniglot",
            "Omniglot, evaluation alphabets",
            "pictures",
            Size(
                num_classes=6368,
                epochs=16,
                batch_size=512,
                network="stroke_resnet",
                width=64,
                depth=2,
                num_test=659,
            ),
            search_epochs=4,
            finalists=3,
            has_turns=True,
            has_mirrors=True,
            alike=0.9,
            lr=2e-3,
            warp=0.6,
            num_views=4,
            dtype="bf16",
        ),
        Study(
            "strokes-10k",
            "synthetic stroke identities, 10,000 classes",
            "strokes",
            _GPU._replace(num_classes=10_000, samples_per_class=20, epochs=6, num_test=1000),
            search_epochs=2,
            finalists=3,
            dtype="bf16",
        ),
        Study(
            "strokes-1m",
            "synthetic stroke identities, 1,000,000 classes",
            "strokes",
            Size(
                num_classes=1_000_000,
                samples_per_class=2,
                epochs=2,
                batch_size=4096,
                width=32,
                embedding_dim=64,
                batch_norm=True,
                num_test=1000,
            ),
            search_epochs=1,
            grid=SHORT_GRID,
            world=0,
            dtype="bf16",
        ),
        Study(
            "audiomnist",
            "AudioMNIST, 20 speakers",
            "speech",
            Size(num_classes=120, epochs=40, batch_size=64, embedding_dim=256, num_test=20),
            search_epochs=12,
            grid=SPEECH_GRID,
            measure="tar@0.01",
        ),
    )
}


def find_study(name: str) -> Study:
    """A study by its name."""
    check_known(name, STUDIES, "a study")
    return STUDIES[name]


def with_setting(key: str, setting: Setting) -> DemoLoss:
    """A loss with alpha, scale and margin."""
    if key not in SYSTEMS:
        raise ConfigError(f"{key!r} is no loss of a study; there are {', '.join(SYSTEMS)}")
    alpha, scale, margin = setting
    return SYSTEMS[key]._replace(alpha=alpha, scale=scale, margin=margin)
