"""A trained backbone and its embeddings of drawings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from qmargin.demo.evaluate import Pictures
from qmargin.evaluation.views import embed_turned
from qmargin.training.build import build_backbone
from qmargin.training.checkpoint import open_checkpoint, read_backbone

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

BATCH = 500


@torch.no_grad()
def embed_pictures(
    recipe: Recipe,
    checkpoint: Path,
    dataset: Pictures,
    *,
    num_views: int = 1,
    device: str = "cpu",
) -> NDArray[np.float32]:
    """Embeddings of all samples, ``[n, d]``, by the backbone of a checkpoint.

    With several views of each sample, theirs are side by side, see ``embed_turned``.
    """
    backbone = build_backbone(recipe, device=device)
    backbone.load_state_dict(read_backbone(open_checkpoint(checkpoint)))
    backbone.eval()
    rows = []
    for start in range(0, len(dataset), BATCH):
        pictures = dataset.images(np.arange(start, min(start + BATCH, len(dataset))))
        images = torch.from_numpy(pictures).to(device, torch.float32).mul_(1.0 / 255.0)[:, None]
        rows.append(embed_turned(backbone, images, num_views).cpu())
    embeddings: NDArray[np.float32] = torch.cat(rows).numpy()
    return embeddings
