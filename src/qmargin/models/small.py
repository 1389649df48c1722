"""Small networks for trial runs, whose outputs do not depend on who else is in the batch.

Norms are over one sample. Batch norms would see other samples with another number of ranks, and a
run could not be compared with itself. Activations are smooth for the same reason: a kink turns a
difference of rounding into one of a whole gradient.
"""

from __future__ import annotations

from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError


class SmallMLP(nn.Module):
    """Vectors to embeddings ``[B, d]`` by two layers.

    Args:
        embedding_dim: ``d``.
        input_dim: Length of the vectors.
        hidden_dim: Width of the layer between.
    """

    def __init__(self, embedding_dim: int, *, input_dim: int = 32, hidden_dim: int = 64) -> None:
        super().__init__()
        _check_sizes(embedding_dim=embedding_dim, input_dim=input_dim, hidden_dim=hidden_dim)
        self.embedding_dim, self.input_dim = embedding_dim, input_dim
        self.layers = nn.Sequential(
            nn.Linear(input_dim, hidden_dim),
            nn.LayerNorm(hidden_dim),
            nn.SiLU(),
            nn.Linear(hidden_dim, embedding_dim),
        )

    def forward(self, vectors: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        if vectors.dim() != 2 or vectors.shape[1] != self.input_dim:
            raise ShapeError(
                f"inputs have shape {tuple(vectors.shape)}; this network takes "
                f"[B, {self.input_dim}], set its option input_dim"
            )
        embeddings: Tensor = self.layers(vectors)
        return embeddings


class SmallConv(nn.Module):
    """Images of any size to embeddings ``[B, d]`` by three convolutions.

    Args:
        embedding_dim: ``d``.
        in_channels: Of the images.
        width: Channels of the first convolution; doubled by each of the others.
    """

    def __init__(self, embedding_dim: int, *, in_channels: int = 3, width: int = 16) -> None:
        super().__init__()
        _check_sizes(embedding_dim=embedding_dim, in_channels=in_channels, width=width)
        self.embedding_dim, self.in_channels = embedding_dim, in_channels
        layers: list[nn.Module] = []
        for channels in (width, 2 * width, 4 * width):
            layers += [
                nn.Conv2d(in_channels, channels, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(1, channels),
                nn.SiLU(),
            ]
            in_channels = channels
        self.layers = nn.Sequential(*layers)
        self.project = nn.Linear(in_channels, embedding_dim)

    def forward(self, images: Tensor) -> Tensor:
        """Embeddings ``[B, d]``."""
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise ShapeError(
                f"inputs have shape {tuple(images.shape)}; this network takes images "
                f"[B, {self.in_channels}, height, width]"
            )
        embeddings: Tensor = self.project(self.layers(images).mean((2, 3)))
        return embeddings


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} is {size}; it must be at least 1")
