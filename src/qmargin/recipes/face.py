"""Face runs: every row of the paper's face tables, and the same recipe on other data.

Settings that the paper does not give are those of InsightFace, on which it is based: half precision
for the convolutions, the gradient of the backbone clipped at 5. Two things differ on purpose: the
gradient of an angular margin is exact (``..._straight_through`` is InsightFace's), and the
posterior is solved over all classes (``..._top5`` is the paper's own procedure). The paper does not
name its three seeds; here they are 0, 1 and 2.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from qmargin.recipes import Loss, add_recipe

if TYPE_CHECKING:
    from qmargin.recipes import Builder
    from qmargin.training.recipe import Recipe

BACKBONES = {"r18": "iresnet18", "r50": "iresnet50", "r100": "iresnet100", "mbf": "mobilefacenet"}
BASE_BATCH = 1024
ONE_GPU = "data.batch_size=256"
SMALL = (  # thousands of photos instead of millions: darker, lighter and coarser ones
    "data.batch_size=64",
    "data.num_workers=2",
    "data.options.photometric=0.2",
    "data.options.low_resolution=0.2",
    "optimizer.base_batch=512",
    "schedule.warmup_epochs=1",
    "precision.dtype=fp32",
    "run.save_every_steps=500",
)
SYNTHETIC = (  # the number of identities of WebFace42M without its images: for speed and memory
    ONE_GPU,
    "data.kind=synthetic",
    "data.path=null",
    "data.num_workers=12",
    "data.options.samples_per_class=1",
    "data.options.shape=[3, 112, 112]",
    "data.options.noise=0.5",
    "data.options.as_bytes=true",
    "precision.dtype=bf16",
    "run.epochs=1",
    "run.max_steps=200",
    "run.log_every=20",
    "schedule.epochs=20",
)


class Images(NamedTuple):
    """A training set: its title, and its number of identities if known."""

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
Q_MARGIN = Loss("Q-Margin", "q_margin", 35.0, 0.2, 1.25)  # the paper's best
Q_MARGIN_START = Q_MARGIN._replace(scale=32.0)  # the paper's starting point
HEADLINES = {  # the table that compares methods
    "arcface": ARCFACE,
    "cosface": COSFACE,
    "entmax": Loss("EntMax", "entmax_face", 64.0, 0.5, 1.25),
    "sparsemax": Loss("SparseMax", "sparsemax_face", 1.9, 0.2, 2.0),
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
FACE_RECIPES: dict[str, Builder] = {}
"""Functions that return a recipe, by its name."""


def _recipe(images: str, backbone: str, loss: Loss) -> Recipe:
    """The paper's run on 8 GPUs; learning rates scale with the batch."""
    from qmargin.training import recipe  # listing recipes does not import torch

    return recipe.Recipe(
        name="face",
        data=recipe.DataPart(
            "images",
            batch_size=BASE_BATCH,
            path=f"data/{images}",
            num_classes=IMAGES[images].num_classes,
            num_workers=4,
        ),
        model=recipe.ModelPart(BACKBONES[backbone], embedding_dim=512),
        loss=loss.build(),
        optimizer=recipe.OptimizerPart(
            lr=0.1,
            momentum=0.9,
            weight_decay=IMAGES[images].weight_decay,
            clip_norm=5.0,
            clip_head=False,
            base_batch=BASE_BATCH,
        ),
        schedule=recipe.SchedulePart("step", milestones=(7, 13)),
        precision=recipe.PrecisionPart("fp16", channels_last=True),
        run=recipe.RunPart(epochs=20, save_every_steps=5000),
    )


def _add(images: str, backbone: str, name: str, loss: Loss, *settings: str, note: str = "") -> None:
    line = f"{IMAGES[images].title}, {backbone.upper()}, {loss.describe(note)}"
    build = partial(_recipe, images, backbone, loss)
    add_recipe(FACE_RECIPES, f"{images}_{backbone}_{name}", line, build, settings)


_webface = partial(_add, "webface42m", "r100")
for _name, _loss in {**HEADLINES, **SWEEP}.items():
    _webface(_name, _loss)
for _seed in (1, 2):
    _repeated = f"q_margin_a125_s32_m02_seed{_seed}"
    _webface(_repeated, Q_MARGIN_START, f"seed={_seed}", note=f"seed {_seed}")
for _percent in (1, 5, 100):
    _head = ("head.path=paper", f"head.top_percent={_percent}")
    _webface(f"q_margin_top{_percent}", Q_MARGIN, *_head, note=f"top {_percent} %")
_webface(
    "arcface_straight_through",
    ARCFACE,
    "loss.options.gradient=straight_through",
    note="straight-through",
)
for _images, _backbone in (("ms1mv3", "r50"), ("ms1mv3", "r100"), ("glint360k", "r100")):
    for _name, _loss in HEADLINES.items():
        _add(_images, _backbone, _name, _loss)
for _images, _backbone in (("webface42m", "r100"), ("ms1mv3", "r50"), ("glint360k", "r100")):
    for _name in ("arcface", "q_margin"):
        _add(_images, _backbone, f"{_name}_1gpu", HEADLINES[_name], ONE_GPU, note="1 GPU")
_add("faces", "r18", "arcface", ARCFACE, *SMALL)
for _backbone in ("r18", "mbf"):
    _add("faces", _backbone, "q_margin", Q_MARGIN_START, *SMALL)
_add("synthetic2m", "r100", "q_margin", Q_MARGIN, *SYNTHETIC, note="1 GPU")
