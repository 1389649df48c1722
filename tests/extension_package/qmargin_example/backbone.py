"""A backbone: vectors to embeddings by one layer."""

from torch import Tensor, nn


class ExampleNet(nn.Module):
    """One linear layer of vectors.

    Args:
        embedding_dim: Size of the embeddings, given by the recipe.
        input_dim: Size of the inputs, one of ``model.options``.
    """

    def __init__(self, embedding_dim: int, input_dim: int = 32) -> None:
        super().__init__()
        self.embedding_dim = embedding_dim
        self.layer = nn.Linear(input_dim, embedding_dim)

    def forward(self, inputs: Tensor) -> Tensor:
        """Embeddings ``[B, embedding_dim]`` of inputs ``[B, input_dim]``."""
        embeddings: Tensor = self.layer(inputs)
        return embeddings
