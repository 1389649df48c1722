"""Embeddings of several views of an image."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qmargin.errors import ConfigError
from qmargin.evaluation.views import embed_turned


def backbone(images: Tensor) -> Tensor:
    weights = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    return images.flatten(1) @ weights


@pytest.mark.parametrize("num_views", [2, 4])
def test_a_cosine_is_the_mean_over_the_turns(num_views: int) -> None:
    images = torch.rand(5, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    found = F.normalize(embed_turned(backbone, images, num_views))
    turned = [torch.rot90(images, turn, (2, 3)) for turn in range(num_views)]
    units = [F.normalize(backbone(one)) for one in turned]
    mean = torch.stack([unit @ unit.t() for unit in units]).mean(0)
    torch.testing.assert_close(found @ found.t(), mean)
    assert not torch.allclose(mean, units[0] @ units[0].t(), atol=1e-2)


def test_one_view_is_the_embedding_as_it_is() -> None:
    images = torch.rand(5, 1, 6, 6)
    assert torch.equal(embed_turned(backbone, images), backbone(images))


@pytest.mark.parametrize("num_views", [0, 5])
def test_other_numbers_of_views_are_refused(num_views: int) -> None:
    with pytest.raises(ConfigError, match=f"num_views is {num_views}; there are 1 to 4"):
        embed_turned(backbone, torch.rand(1, 1, 6, 6), num_views)
