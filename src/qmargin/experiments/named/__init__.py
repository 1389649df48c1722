"""Named experiments, a module each: the demo, and the comparisons whose results are documented.

This module has the shared parts: the losses, the recipe of drawings, and the lookup by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from qmargin.errors import ConfigError
from qmargin.experiments.experiment import SHORT_KEYS, TITLES, Arm, Experiment
from qmargin.experiments.space import Point, value_text
from qmargin.experiments.worlds import SHIFT, Made
from qmargin.registry import experiments
from qmargin.schema import Option
from qmargin.training import recipe

LR_RATIO = 20.0  # prototypes to network: with equal rates every loss is worse
EPSILON = 1e-12  # of AdamW, far below the gradient of the smallest scale
SAMPLE_RATE = 0.1  # of the classes, in the baseline that samples negatives
MARGIN_KINDS = {
    "arcface": "angular",
    "cosface": "cosine",
    "entmax": "angular",
    "sparsemax": "angular",
    "q_margin": "prior",
    "adaface": "adaface",
    "magface": "magface",
}
Setting = tuple[float, float, float]  # alpha, scale, margin
Grid = Mapping[str, Sequence[Setting]]


class Size(NamedTuple):
    """Size of training and test sets of synthetic identities."""

    kind: str = "strokes"  # or "people" or "voices"
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


SIZES = {  # of strokes, by the kind of device
    "cpu": Size(),
    "cuda": Size(num_classes=10_000, epochs=20, batch_size=512, width=64, depth=2, batch_norm=True),
}
PEOPLE_SIZES = {  # of the demo, by the kind of device
    "cpu": Size("people", num_classes=2000, epochs=6, batch_norm=True),
    "cuda": SIZES["cuda"]._replace(kind="people"),
}
_VOICES = Size(
    "voices",
    num_classes=400,
    samples_per_class=12,
    epochs=5,
    batch_size=64,
    network="ecapa512",
    width=48,
    num_test=200,
    samples_test=8,
)
VOICE_SIZES = {  # of the demo, by the kind of device
    "cpu": _VOICES,
    "cuda": _VOICES._replace(num_classes=2000, epochs=15, batch_size=128, width=128),
}
VOICE_LR = 6e-3
VOICE_FRAMES = 100  # of a chunk: 1 s
LONGEST = 3.0  # seconds of an utterance, from 2


def drawn_recipe(
    size: Size,
    *,
    lr: float = 5e-3,
    dtype: Literal["fp32", "bf16"] = "fp32",
    data_seed: int | None = None,
) -> recipe.Recipe:
    """The recipe of every loss on drawn identities; ``data_seed`` fixes them for all runs.

    AdamW, because its steps do not depend on the scale of the gradient: scales of the losses differ
    by a factor of more than ten, and all of them share the learning rates.
    """
    network: dict[str, Option] = {"width": size.width, "depth": size.depth}
    if size.kind == "people":
        network["in_channels"] = 3
    if size.batch_norm:
        network["batch_norm"] = True
    drawn: dict[str, Option] = {
        "samples_per_class": size.samples_per_class,
        "shift": SHIFT,
        "in_memory": True,
    }
    if data_seed is not None:
        drawn["seed"] = data_seed
    return recipe.Recipe(
        name=size.kind,
        data=recipe.DataPart(
            size.kind,
            batch_size=size.batch_size,
            num_classes=size.num_classes,
            options=drawn,
            num_workers=0,  # parallel runs leave no cores for them
        ),
        model=recipe.ModelPart(size.network, embedding_dim=size.embedding_dim, options=network),
        loss=recipe.LossPart(1.0, "angular", 0.1, 16.0),
        optimizer=recipe.OptimizerPart(
            lr=lr, kind="adamw", weight_decay=0.05, beta2=0.99, epsilon=EPSILON, decay_norms=False
        ),
        head=recipe.HeadPart(update="torch", lr_ratio=LR_RATIO),
        schedule=recipe.SchedulePart("cosine", warmup_epochs=0.5),
        precision=recipe.PrecisionPart(channels_last=True, dtype=dtype),
        run=recipe.RunPart(
            epochs=size.epochs,
            save_every_steps=200,
            keep=1,
            log_every=max(1, min(20, size.total_steps)),
        ),
    )


def made_recipe(size: Size, *, data_seed: int | None = None) -> recipe.Recipe:
    """The recipe of every loss on synthetic identities of any kind."""
    if size.kind == "voices":
        return voice_recipe(size, data_seed=data_seed)
    return drawn_recipe(size, data_seed=data_seed)


def voice_recipe(size: Size, *, data_seed: int | None = None) -> recipe.Recipe:
    """The recipe of every loss on synthetic voices; all but data and network as for drawings."""
    made = drawn_recipe(size, lr=VOICE_LR, data_seed=data_seed)
    spoken: dict[str, Option] = {
        "samples_per_class": size.samples_per_class,
        "longest": LONGEST,
        "num_frames": VOICE_FRAMES,
    }
    if data_seed is not None:
        spoken["seed"] = data_seed
    network: dict[str, Option] = {
        "width": size.width,
        "mixed": 3 * size.width,
        "has_context": False,
    }
    return replace(
        made,
        data=replace(made.data, options=spoken),
        model=replace(made.model, options=network),
        precision=recipe.PrecisionPart(),
    )


def setting_point(setting: Setting) -> Point:
    """Alpha, scale and margin as a point."""
    return dict(zip(SHORT_KEYS.values(), map(value_text, setting), strict=True))


def loss_arm(name: str, points: Sequence[Setting]) -> Arm:
    """A loss with settings to search, or with fixed ones."""
    settings = (f"loss.margin_kind={MARGIN_KINDS[name]}",)
    return Arm(TITLES[name], settings, points=tuple(map(setting_point, points)))


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


def needed(data: Path | None, name: str) -> Path:
    """Return the path of the data; raise if it is missing."""
    if data is None:
        raise ConfigError(f"{name} reads its data from a path; give it with --data PATH")
    return data.resolve()


def get_experiment(name: str, *, device: str = "cpu", data: Path | None = None) -> Experiment:
    """An experiment by its name; the device, ``cpu`` or ``cuda``, decides the size of the demo."""
    made: Experiment = experiments.get(name)(device, data)
    if data is not None and isinstance(made.world, Made):
        raise ConfigError(f"{name} generates its data; leave --data out")
    return made


def list_experiments() -> dict[str, str]:
    """Names that ``get_experiment`` knows, each with a line that describes it."""
    return experiments.describe()
