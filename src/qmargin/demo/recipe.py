"""The one recipe that every loss of the demo is trained by."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from qmargin.demo.losses import DemoLoss

if TYPE_CHECKING:
    from qmargin.training.fields import Option
    from qmargin.training.recipe import Recipe


SHIFT = 2  # pixels by which training moves a sample
LR_RATIO = 20.0  # of prototypes to network: with one rate for both every loss is worse
EPSILON = 1e-12  # of AdamW, far below the gradient of the smallest scale


class Size(NamedTuple):
    """How much is trained and tested.

    ``num_test`` and ``samples_test`` make 12.5 million pairs of different identities.
    """

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
    def steps_per_epoch(self) -> int:
        """Whole batches of an epoch."""
        return self.num_classes * self.samples_per_class // self.batch_size

    @property
    def total_steps(self) -> int:
        """Of a training."""
        return self.epochs * self.steps_per_epoch


SIZES = {  # by the kind of device
    "cpu": Size(),
    "cuda": Size(num_classes=10_000, epochs=20, batch_size=512, width=64, depth=2, batch_norm=True),
}


def demo_recipe(loss: DemoLoss, *, seed: int, size: Size, path: str | None = None) -> Recipe:
    """The recipe with a loss; all losses share everything else.

    AdamW, because its steps do not depend on the scale of the gradient: scales of the losses differ
    by more than ten, and the same learning rates have to serve all of them.

    Args:
        loss: Divergence, margin and scale.
        seed: Of identities, weights and order.
        size: How much is trained.
        path: Of pictures that are given to the training; None for stroke identities.
    """
    from qmargin.training import recipe

    network: dict[str, Option] = {"width": size.width, "depth": size.depth}
    if size.batch_norm:
        network["batch_norm"] = True
    strokes: dict[str, Option] = {
        "samples_per_class": size.samples_per_class,
        "shift": SHIFT,
        "in_memory": True,
    }
    return recipe.Recipe(
        name=f"demo-{loss.key}",
        data=recipe.DataPart(
            "strokes" if path is None else "images",
            batch_size=size.batch_size,
            path=path,
            num_classes=size.num_classes,
            options=strokes if path is None else {},
        ),
        model=recipe.ModelPart(
            size.network,
            embedding_dim=size.embedding_dim,
            options=network,
        ),
        loss=recipe.LossPart(loss.alpha, loss.margin_kind, loss.margin, loss.scale),
        optimizer=recipe.OptimizerPart(
            lr=5e-3,
            kind="adamw",
            weight_decay=0.05,
            beta2=0.99,
            epsilon=EPSILON,
            decay_norms=False,
        ),
        head=recipe.HeadPart(update="torch", lr_ratio=LR_RATIO),
        schedule=recipe.SchedulePart("cosine", warmup_epochs=0.5),
        precision=recipe.PrecisionPart(channels_last=True),
        run=recipe.RunPart(
            epochs=size.epochs,
            save_every_steps=200,
            keep=1,
            log_every=max(1, min(20, size.total_steps)),
        ),
        seed=seed,
    )
