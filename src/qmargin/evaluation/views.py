"""Several views of an image, embedded side by side."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qmargin.errors import ConfigError


def embed_turned(
    backbone: Callable[[Tensor], Tensor], images: Tensor, num_views: int = 1
) -> Tensor:
    """Embeddings of images and their quarter turns, ``[B, num_views * d]``.

    The cosine of two of them is the mean of the cosines of the turns. Where turns are identities
    of their own in training, a network judges each anew, and errs less in the mean.

    Args:
        backbone: Images ``[B, c, h, w]`` to embeddings ``[B, d]``.
        images: Square ones: others have another shape after a turn.
        num_views: Of each image, at most 4; with 1, its embedding as it is.

    Examples:
        >>> images = torch.eye(2)[None, None]
        >>> embed_turned(lambda one: one.flatten(1), images, 2)
        tensor([[0.7071, 0.0000, 0.0000, 0.7071, 0.0000, 0.7071, 0.7071, 0.0000]])
    """
    if not 1 <= num_views <= 4:
        raise ConfigError(f"num_views is {num_views}; there are 1 to 4 quarter turns")
    if num_views == 1:
        return backbone(images).float()
    turned = (torch.rot90(images, turn, (2, 3)).contiguous() for turn in range(num_views))
    return torch.cat([F.normalize(backbone(one).float()) for one in turned], dim=1)
