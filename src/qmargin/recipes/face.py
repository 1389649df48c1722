"""Face runs: every row of the paper's face tables, and the same recipe on other data.

All follow one recipe, that of the paper: SGD with momentum 0.9 and weight decay 5e-4 for 20 epochs,
a learning rate of 0.1, 0.01 and 0.001 for 7, 6 and 7 of them, 128 samples on each of 8 GPUs. What
the paper does not say is taken from InsightFace, which it was built on: half precision for the
convolutions, the gradient of the backbone clipped at 5, a mirrored image every other time. Two
things differ on purpose: the gradient of an angular margin is exact (``..._straight_through`` is
InsightFace's), and the posterior is solved over all classes (``..._top5`` is the paper's own
procedure). The paper does not name its three seeds; here they are 0, 1 and 2.

Learning rates are those of a batch of 1024 and scale with it: ``--set data.batch_size=512`` halves
them. Say where the images are with ``--set data.path=DIR``. None of these runs has been made end to
end with this package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from qmargin.recipes import Loss, builder
from qmargin.registry import register_recipe

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

    Builder = Callable[[], Recipe]

BACKBONES = {"r18": "iresnet18", "r50": "iresnet50", "r100": "iresnet100", "mbf": "mobilefacenet"}
BASE_BATCH = 1024
ONE_GPU_BATCH = 256
SMALL_BATCH, SMALL_BASE_BATCH = 64, 512
SMALL_AUGMENTATION = {"photometric": 0.2, "low_resolution": 0.2}


class Images(NamedTuple):
    """A training set: how it is called, and how many identities it has, if that is known."""

    title: str
    num_classes: int | None
    weight_decay: float = 5e-4


IMAGES = {
    "webface42m": Images("WebFace42M", 2_059_906),
    "ms1mv3": Images("MS1MV3", 93_431),
    "glint360k": Images("Glint360K", 360_232, weight_decay=1e-4),  # as InsightFace has it
    "faces": Images("A folder of faces", None),
    "synthetic2m": Images("Noise instead of faces", 2_059_906),
}


ARCFACE = Loss("ArcFace", "arcface", 64.0, 0.5)
COSFACE = Loss("CosFace", "cosface", 64.0, 0.5)
ENTMAX = Loss("EntMax", "entmax_face", 64.0, 0.5, 1.25)
SPARSEMAX = Loss("SparseMax", "sparsemax_face", 1.9, 0.2, 2.0)
Q_MARGIN = Loss("Q-Margin", "q_margin", 35.0, 0.2, 1.25)  # the paper's best
Q_MARGIN_START = Q_MARGIN._replace(scale=32.0)  # where the paper advises to start

HEADLINES = {  # the table that compares methods
    "arcface": ARCFACE,
    "cosface": COSFACE,
    "entmax": ENTMAX,
    "sparsemax": SPARSEMAX,
    "q_margin": Q_MARGIN,
}
SWEEP = {  # the other rows of the table of all configurations
    "arcface_s32": ARCFACE._replace(scale=32.0),
    "cosface_s32": COSFACE._replace(scale=32.0),
    **{
        f"q_margin_a{100 * alpha:.0f}_s{scale}_m{10 * margin:02.0f}": Loss(
            "Q-Margin", "q_margin", float(scale), margin, alpha
        )
        for alpha in (1.25, 1.5)
        for scale in (10, 20, 32)
        for margin in (0.2, 0.5)
    },
}


@dataclass(frozen=True)
class FaceRun:
    """What tells one face run from another.

    Args:
        images: A key of ``IMAGES``.
        backbone: A key of ``BACKBONES``.
        loss: Preset and numbers.
        note: What is special about the run, for its description.
        batch_size: Over all GPUs.
        seed: Of the run.
        loss_options: Further settings of the margin.
        head: Settings of the head's part.
    """

    images: str
    backbone: str
    loss: Loss
    note: str = ""
    batch_size: int = BASE_BATCH
    seed: int = 0
    loss_options: dict[str, str] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """One line for lists."""
        note = f" ({self.note})" if self.note else ""
        network = self.backbone.upper()
        return f"{IMAGES[self.images].title}, {network}, {self.loss.describe()}{note}."

    def build(self, name: str) -> Recipe:
        """The recipe."""
        # imported here, so that a list of recipes need not wait for torch
        from qmargin.training import recipe

        images, row = IMAGES[self.images], self.loss
        return recipe.Recipe(
            name=name,
            data=recipe.DataPart(
                "images",
                batch_size=self.batch_size,
                path=f"data/{self.images}",
                num_classes=images.num_classes,
                num_workers=4,
            ),
            model=recipe.ModelPart(BACKBONES[self.backbone], embedding_dim=512),
            loss=recipe.LossPart.from_preset(row.preset, options=self.loss_options, **row.numbers),
            head=recipe.HeadPart(**self.head),
            optimizer=recipe.OptimizerPart(
                lr=0.1,
                momentum=0.9,
                weight_decay=images.weight_decay,
                clip_norm=5.0,
                clip_head=False,
                base_batch=BASE_BATCH,
            ),
            schedule=recipe.SchedulePart("step", milestones=(7, 13)),
            precision=recipe.PrecisionPart("fp16", channels_last=True),
            run=recipe.RunPart(epochs=20, save_every_steps=5000),
            seed=self.seed,
        )


def _webface42m_runs() -> dict[str, FaceRun]:
    """Every row of the paper's face tables, by what follows ``webface42m_r100_``."""
    base = FaceRun("webface42m", "r100", Q_MARGIN)
    reference = replace(base, loss=Q_MARGIN_START)
    rows = {name: replace(base, loss=loss) for name, loss in {**HEADLINES, **SWEEP}.items()}
    seeds = {
        f"q_margin_a125_s32_m02_seed{seed}": replace(reference, note=f"seed {seed}", seed=seed)
        for seed in (1, 2)
    }
    throughput = {
        f"q_margin_top{percent}": replace(
            base, note=f"top {percent} %", head={"path": "paper", "top_percent": float(percent)}
        )
        for percent in (1, 5, 100)
    }
    straight = replace(
        base,
        loss=ARCFACE,
        note="straight-through",
        loss_options={"gradient": "straight_through"},
    )
    return {**rows, **seeds, **throughput, "arcface_straight_through": straight}


def _runs() -> dict[str, FaceRun]:
    runs = {f"webface42m_r100_{name}": run for name, run in _webface42m_runs().items()}
    for images, backbone in (("ms1mv3", "r50"), ("ms1mv3", "r100"), ("glint360k", "r100")):
        for name, loss in HEADLINES.items():
            runs[f"{images}_{backbone}_{name}"] = FaceRun(images, backbone, loss)
    for images, backbone in (("webface42m", "r100"), ("ms1mv3", "r50"), ("glint360k", "r100")):
        for name in ("arcface", "q_margin"):
            runs[f"{images}_{backbone}_{name}_1gpu"] = FaceRun(
                images, backbone, HEADLINES[name], note="1 GPU", batch_size=ONE_GPU_BATCH
            )
    return runs


def _plain(name: str, run: FaceRun) -> Recipe:
    return run.build(name)


def _small(name: str, run: FaceRun) -> Recipe:
    """Thousands of photos instead of millions: shown darker, lighter and coarser than they are."""
    recipe = run.build(name)
    return replace(
        recipe,
        data=replace(recipe.data, num_workers=2, options=dict(SMALL_AUGMENTATION)),
        optimizer=replace(recipe.optimizer, base_batch=SMALL_BASE_BATCH),
        schedule=replace(recipe.schedule, warmup_epochs=1.0),
        precision=replace(recipe.precision, dtype="fp32"),
        run=replace(recipe.run, save_every_steps=500),
    )


def _synthetic(name: str, run: FaceRun) -> Recipe:
    """As many identities as WebFace42M without its images: for speed and memory on one GPU."""
    recipe = run.build(name)
    options: dict[str, Any] = {
        "samples_per_class": 1,
        "shape": (3, 112, 112),
        "noise": 0.5,
        "as_bytes": True,
    }
    return replace(
        recipe,
        data=replace(recipe.data, kind="synthetic", path=None, num_workers=12, options=options),
        precision=replace(recipe.precision, dtype="bf16"),
        run=replace(recipe.run, epochs=1, max_steps=200, log_every=20),
        schedule=replace(recipe.schedule, epochs=20),
    )


def _face_recipes() -> dict[str, Builder]:
    runs = {name: (run, _plain) for name, run in _runs().items()}
    for backbone, losses in (("r18", ("arcface", "q_margin")), ("mbf", ("q_margin",))):
        for loss in losses:
            row = Q_MARGIN_START if loss == "q_margin" else HEADLINES[loss]
            run = FaceRun("faces", backbone, row, batch_size=SMALL_BATCH)
            runs[f"faces_{backbone}_{loss}"] = run, _small
    run = FaceRun("synthetic2m", "r100", Q_MARGIN, note="1 GPU", batch_size=ONE_GPU_BATCH)
    runs["synthetic2m_r100_q_margin"] = run, _synthetic
    return {
        name: builder(name, run, build, line=run.describe()) for name, (run, build) in runs.items()
    }


FACE_RECIPES = _face_recipes()
"""Functions that return a recipe, by its name."""

for _name, _build in FACE_RECIPES.items():
    register_recipe(_name, _build)
