"""Named experiments, as data: the demo, and the comparisons whose results are documented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from qmargin.errors import ConfigError
from qmargin.experiments.experiment import (
    SEARCH_SEED,
    TITLES,
    Arm,
    Experiment,
    Search,
    TestProtocol,
)
from qmargin.experiments.space import Point, value_text
from qmargin.experiments.worlds import HELD_OUT, SHIFT, Drawn, Made, Stored
from qmargin.recipes import get_recipe
from qmargin.registry import experiments, register_experiment
from qmargin.report.paper_layouts import FACE_ROWS, SEEDS_ROW, SPEAKER_ROWS, PaperRow
from qmargin.training.recipe import (
    DataPart,
    HeadPart,
    LossPart,
    ModelPart,
    OptimizerPart,
    PrecisionPart,
    Recipe,
    RunPart,
    SchedulePart,
    flatten,
)

if TYPE_CHECKING:
    from qmargin.schema import Option

LR_RATIO = 20.0  # of prototypes to network: with one rate for both every loss is worse
EPSILON = 1e-12  # of AdamW, far below the gradient of the smallest scale
SAMPLE_RATE = 0.1  # of the classes, in the baseline that samples negatives
Setting = tuple[float, float, float]  # alpha, scale, margin
MARGIN_KINDS = {
    "arcface": "angular",
    "cosface": "cosine",
    "entmax": "angular",
    "sparsemax": "angular",
    "q_margin": "prior",
}
# Settings of the demo by the kind of device: those that `demo-search` and `strokes-10k` chose.
DEMO_SETTINGS: dict[str, dict[str, Setting]] = {
    "cpu": {
        "arcface": (1.0, 24.0, 0.2),
        "cosface": (1.0, 32.0, 0.4),
        "entmax": (1.5, 4.0, 0.1),
        "sparsemax": (2.0, 1.9, 0.05),
        "q_margin": (1.25, 12.0, 0.3),
    },
    "cuda": {
        "arcface": (1.0, 16.0, 0.05),
        "cosface": (1.0, 23.0, 0.4),
        "entmax": (1.5, 1.6, 0.1),
        "sparsemax": (2.0, 0.4, 0.1),
        "q_margin": (1.25, 4.4, 0.4),
    },
}
Grid = Mapping[str, Sequence[Setting]]
# Twelve of each loss, around where it is good and at the paper's settings.
DEMO_GRID: Grid = {
    "arcface": (
        *((1.0, s, m) for s in (12.0, 16.0, 20.0) for m in (0.025, 0.05, 0.1)),
        *((1.0, 24.0, m) for m in (0.1, 0.2)),
        (1.0, 64.0, 0.5),
    ),
    "cosface": (
        (1.0, 16.0, 0.3),
        *((1.0, 24.0, m) for m in (0.2, 0.3, 0.4)),
        *((1.0, 32.0, m) for m in (0.2, 0.3, 0.4, 0.5)),
        *((1.0, 40.0, m) for m in (0.3, 0.4)),
        (1.0, 48.0, 0.4),
        (1.0, 64.0, 0.4),
    ),
    "entmax": (
        *((1.25, s, m) for s in (5.0, 7.0, 10.0) for m in (0.05, 0.1)),
        *((1.5, s, 0.1) for s in (3.0, 4.0, 6.0)),
        (1.5, 4.0, 0.2),
        (1.75, 2.5, 0.1),
        (1.25, 64.0, 0.5),
    ),
    "sparsemax": (
        *((2.0, s, m) for s in (0.5, 0.7, 1.0, 1.4, 1.9) for m in (0.05, 0.1)),
        (2.0, 1.0, 0.2),
        (2.0, 3.0, 0.1),
    ),
    "q_margin": (
        *((1.25, s, 0.3) for s in (8.0, 10.0, 12.0, 16.0)),
        *((1.25, 10.0, m) for m in (0.2, 0.5)),
        (1.25, 12.0, 0.5),
        *((1.5, s, 0.4) for s in (4.0, 6.0, 8.0)),
        (1.75, 4.0, 0.4),
        (1.25, 35.0, 0.2),
    ),
}
# Twelve of each, three margins among them. The hardness of these scales, for 10,000 classes, is
# between 0.7 and 3.3, see `qmargin.hardness`; sparse losses were worse below 1.8.
_SPARSE = ((1.25, 2.9), (1.25, 4.4), (1.5, 1.6), (1.75, 1.1))
STROKE_GRID: Grid = {
    "arcface": tuple((1.0, s, m) for s in (8.0, 11.0, 16.0, 23.0) for m in (0.02, 0.05, 0.1)),
    "cosface": tuple((1.0, s, m) for s in (11.0, 16.0, 23.0, 32.0) for m in (0.2, 0.4, 0.6)),
    "entmax": tuple((alpha, s, m) for alpha, s in _SPARSE for m in (0.05, 0.1, 0.2)),
    "sparsemax": tuple((2.0, s, m) for s in (0.031, 0.1, 0.4, 1.0) for m in (0.05, 0.1, 0.2)),
    "q_margin": tuple((alpha, s, m) for alpha, s in _SPARSE for m in (0.2, 0.4, 0.6)),
}
# Where a run takes minutes: a hardness of 1.6, 2 and 2.5 for a million classes.
MILLION_GRID: Grid = {
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
SPEECH_GRID: Grid = {
    "arcface": _SOFT_SPEECH,
    "cosface": _SOFT_SPEECH,
    "entmax": _SPARSE_SPEECH,
    "sparsemax": tuple((2.0, s, m) for s in (1.9, 3.0, 5.0) for m in (0.1, 0.2)),
    "q_margin": _SPARSE_SPEECH,
}


class Size(NamedTuple):
    """How much is trained and tested on drawings."""

    num_classes: int = 1000
    samples_per_class: int = 20
    epochs: int = 10
    batch_size: int = 256
    network: str = "stroke_net"
    width: int = 16
    depth: int = 1
    embedding_dim: int = 128
    batch_norm: bool = False
    num_test: int = 500
    samples_test: int = 10

    @property
    def total_steps(self) -> int:
        """Of a run: whole batches of all epochs."""
        return self.epochs * (self.num_classes * self.samples_per_class // self.batch_size)


SIZES = {  # of the demo, by the kind of device
    "cpu": Size(),
    "cuda": Size(num_classes=10_000, epochs=20, batch_size=512, width=64, depth=2, batch_norm=True),
}


def stroke_recipe(
    size: Size,
    *,
    lr: float = 5e-3,
    dtype: Literal["fp32", "bf16"] = "fp32",
    data_seed: int | None = None,
    num_workers: int = 0,
) -> Recipe:
    """The recipe of every loss on stroke identities.

    AdamW, because its steps do not depend on the scale of the gradient: scales of the losses differ
    by more than ten, and the same learning rates have to serve all of them.

    Args:
        size: How much is trained.
        lr: Learning rate of the network.
        dtype: Of the network.
        data_seed: Of the identities; None for the seed of each run.
        num_workers: Processes that read data; runs side by side leave no cores for them.
    """
    network: dict[str, Option] = {"width": size.width, "depth": size.depth}
    if size.batch_norm:
        network["batch_norm"] = True
    strokes: dict[str, Option] = {
        "samples_per_class": size.samples_per_class,
        "shift": SHIFT,
        "in_memory": True,
    }
    if data_seed is not None:
        strokes["seed"] = data_seed
    return Recipe(
        name="strokes",
        data=DataPart(
            "strokes",
            batch_size=size.batch_size,
            num_classes=size.num_classes,
            options=strokes,
            num_workers=num_workers,
        ),
        model=ModelPart(size.network, embedding_dim=size.embedding_dim, options=network),
        loss=LossPart(1.0, "angular", 0.1, 16.0),
        optimizer=OptimizerPart(
            lr=lr, kind="adamw", weight_decay=0.05, beta2=0.99, epsilon=EPSILON, decay_norms=False
        ),
        head=HeadPart(update="torch", lr_ratio=LR_RATIO),
        schedule=SchedulePart("cosine", warmup_epochs=0.5),
        precision=PrecisionPart(channels_last=True, dtype=dtype),
        run=RunPart(
            epochs=size.epochs,
            save_every_steps=200,
            keep=1,
            log_every=max(1, min(20, size.total_steps)),
        ),
    )


def speech_recipe(epochs: int) -> Recipe:
    """The recipe of small collections of recordings, its schedules in proportion, with AdamW.

    By SGD at one learning rate, losses of large scales hardly learned while that of the smallest
    did: updates are those of the demo, whose steps do not depend on the scale.
    """
    made, strokes = get_recipe("audiomnist_r34_arcface"), stroke_recipe(SIZES["cpu"])
    share, margins = epochs / made.run.epochs, made.margin_schedule
    assert margins is not None and margins.end_epoch is not None  # the recipe has both
    return replace(
        made,
        data=replace(made.data, num_workers=0),
        optimizer=replace(strokes.optimizer, lr=1e-3),
        head=replace(strokes.head, lr_ratio=1.0),  # few speakers, each with many samples
        schedule=replace(strokes.schedule, warmup_epochs=share * made.schedule.warmup_epochs),
        margin_schedule=replace(
            margins, start_epoch=share * margins.start_epoch, end_epoch=share * margins.end_epoch
        ),
        run=replace(made.run, epochs=epochs),
    )


def loss_arm(name: str, points: Sequence[Setting], title: str | None = None) -> Arm:
    """A loss with settings to choose from, or one."""
    settings = (f"loss.margin_kind={MARGIN_KINDS[name]}",)
    return Arm(title or TITLES[name], settings, points=tuple(map(setting_point, points)))


def setting_point(setting: Setting) -> Point:
    """Alpha, scale and margin as a point.

    Examples:
        >>> setting_point((1.25, 16.0, 0.1))
        {'loss.alpha': '1.25', 'loss.scale': '16', 'loss.margin': '0.1'}
    """
    keys = ("loss.alpha", "loss.scale", "loss.margin")
    return {key: value_text(value) for key, value in zip(keys, setting, strict=True)}


def grid_arms(grid: Grid, *, sampled: bool = True) -> dict[str, Arm]:
    """Arms of all losses of a grid, and ArcFace with sampled negatives."""
    arms = {name: loss_arm(name, points) for name, points in grid.items()}
    if sampled:
        settings = (
            "loss.margin_kind=angular",
            "head.path=sampled",
            f"head.sample_rate={SAMPLE_RATE}",
            "head.update=torch",
        )
        arms["sampled"] = Arm(TITLES["sampled"], settings, like="arcface")
    return arms


@register_experiment("demo")
def demo_experiment(
    device: str = "cpu", data: Path | None = None, *, size: Size | None = None
) -> Experiment:
    """Five losses with settings that were chosen before, on synthetic strokes or on pictures."""
    size = size or SIZES[device]
    arms = {name: loss_arm(name, [point]) for name, point in DEMO_SETTINGS[device].items()}
    world: Made | Drawn = Made(num_test=size.num_test, samples_test=size.samples_test)
    title = "synthetic stroke identities"
    if data is not None:
        budget = size.total_steps * size.batch_size
        most = size.num_test * size.samples_test
        world = Drawn(str(data), budget=budget, most_test=most)
        title = f"{data.name}, with settings chosen on synthetic strokes"
    return Experiment("demo", stroke_recipe(size), arms, world, title, seeds=(0,))


@register_experiment("demo-search")
def demo_search(device: str = "cpu", data: Path | None = None) -> Experiment:
    """How the settings of the demo on a CPU were chosen."""
    size = SIZES["cpu"]
    return Experiment(
        "demo-search",
        stroke_recipe(size),
        grid_arms(DEMO_GRID, sampled=False),
        Made(500, 10, size.num_test, size.samples_test),
        "the demo's synthetic stroke identities, 1,000 classes",
        TestProtocol(normalise=True),
        Search(measure="tar@0.0001", seeds=(SEARCH_SEED, SEARCH_SEED + 1)),
    )


def _paper_experiment(
    name: str,
    rows: Sequence[PaperRow],
    device: str,
    data: Path | None,
    seeds: tuple[int, ...] = (0,),
) -> Experiment:
    """The paper's settings by the recipe of the demo, for ``qmargin paper``."""
    arms = {}
    for row in rows:
        assert row.setting is not None
        kind, *numbers = row.setting
        alpha, scale, margin = numbers
        key = f"{row.loss.lower()}-a{alpha:g}-s{scale:g}-m{margin:g}"
        points = (setting_point((alpha, scale, margin)),)
        settings = (f"loss.margin_kind={kind}",)
        arms[key] = Arm(f"{row.loss} ({row.setting.text})", settings, points=points)
    demo = demo_experiment(device, data)
    return replace(demo, name=name, arms=arms, seeds=seeds)


@register_experiment("paper-face")
def paper_face(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Every setting of the paper's table of faces, at the scale of the demo."""
    return _paper_experiment("paper-face", FACE_ROWS, device, data)


@register_experiment("paper-seeds")
def paper_seeds(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Three seeds of the setting that the paper repeats, at the scale of the demo."""
    return _paper_experiment("paper-seeds", (SEEDS_ROW,), device, data, seeds=(0, 1, 2))


@register_experiment("paper-speaker")
def paper_speaker(device: str = "cpu", data: Path | None = None) -> Experiment:
    """Every setting of the paper's table of speakers, at the scale of the demo."""
    return _paper_experiment("paper-speaker", SPEAKER_ROWS, device, data)


@register_experiment("strokes-10k")
def strokes_10k(device: str = "cuda", data: Path | None = None) -> Experiment:
    """10,000 synthetic stroke identities, settings chosen by each loss."""
    size = SIZES["cuda"]._replace(epochs=6, num_test=1000)
    return Experiment(
        "strokes-10k",
        stroke_recipe(size, dtype="bf16"),
        grid_arms(STROKE_GRID),
        Made(500, 10, size.num_test, size.samples_test),
        "synthetic stroke identities, 10,000 classes",
        TestProtocol(normalise=True),
        Search(measure="tar@0.0001", settings=("run.epochs=2",), finalists=3),
    )


@register_experiment("strokes-1m")
def strokes_1m(device: str = "cuda", data: Path | None = None) -> Experiment:
    """1,000,000 synthetic stroke identities of two samples each."""
    size = Size(
        num_classes=1_000_000,
        samples_per_class=2,
        epochs=2,
        batch_size=4096,
        width=32,
        embedding_dim=64,
        batch_norm=True,
        num_test=1000,
    )
    return Experiment(
        "strokes-1m",
        stroke_recipe(size, dtype="bf16", data_seed=0),
        grid_arms(MILLION_GRID),
        Made(500, 10, size.num_test, size.samples_test),
        "synthetic stroke identities, 1,000,000 classes",
        TestProtocol(normalise=True),
        Search(measure="tar@0.0001", settings=("run.epochs=1",)),
    )


@register_experiment("omniglot")
def omniglot(device: str = "cuda", data: Path | None = None) -> Experiment:
    """Handwritten characters of alphabets that no network was trained on."""
    size = Size(
        num_classes=6368, epochs=16, batch_size=512, network="stroke_resnet", width=64, depth=2
    )
    world = Drawn(
        str(_needed(data, "omniglot")),
        seed=HELD_OUT,
        samples_test=10,
        turns=True,
        mirrors=True,
        alike=0.9,
        warp=0.6,
        num_variants=size.epochs,
    )
    return Experiment(
        "omniglot",
        stroke_recipe(size, lr=2e-3, dtype="bf16"),
        grid_arms(STROKE_GRID),
        world,
        "Omniglot, evaluation alphabets",
        TestProtocol(views=4, normalise=True),
        Search(measure="tar@0.0001", settings=("run.epochs=4",), finalists=3),
    )


@register_experiment("audiomnist")
def audiomnist(device: str = "cuda", data: Path | None = None) -> Experiment:
    """Spoken digits of speakers that no network was trained on, by a list of trials."""
    path, epochs, short = _needed(data, "audiomnist"), 40, speech_recipe(12)
    keys = ("run.epochs", "schedule.warmup_epochs", "margin_schedule.start_epoch")
    settings = tuple(f"{k}={flatten(short)[k]}" for k in (*keys, "margin_schedule.end_epoch"))
    return Experiment(
        "audiomnist",
        speech_recipe(epochs),
        grid_arms(SPEECH_GRID),
        Stored(str(path / "train"), str(path / "test"), 0.25, str(path / "trials.txt")),
        "AudioMNIST, 20 speakers",
        TestProtocol("trials", fars=(1e-2, 1e-3, 1e-4)),
        Search(measure="tar@0.01", settings=settings),
    )


def _needed(data: Path | None, name: str) -> Path:
    if data is None:
        raise ConfigError(f"{name} reads its data; say where they are with --data PATH")
    return data.resolve()


def get_experiment(name: str, *, device: str = "cpu", data: Path | None = None) -> Experiment:
    """An experiment by its name.

    Args:
        name: One that ``list_experiments`` has.
        device: ``"cpu"`` or ``"cuda"``, which decides the size of the demo.
        data: Path of pictures or recordings, where the experiment reads them.

    Raises:
        ConfigError: The name is not known, or data is missing or not read.
    """
    made: Experiment = experiments.get(name)(device, data)
    if data is not None and isinstance(made.world, Made):
        raise ConfigError(f"{name} makes its own data; leave --data out")
    return made


def list_experiments() -> dict[str, str]:
    """Names that ``get_experiment`` knows, each with a line that describes it.

    Examples:
        >>> list_experiments()["omniglot"]
        'Handwritten characters of alphabets that no network was trained on.'
    """
    return experiments.describe()
