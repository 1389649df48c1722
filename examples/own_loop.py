"""The loss in a plain training loop: 100 synthetic identities, a few seconds on a CPU."""

import sys

import torch
from torch import nn
from torch.nn import functional

import qmargin


def main() -> None:
    """Train, and report the loss, the accuracy and how few classes carry any probability."""
    torch.manual_seed(0)
    num_classes, input_dim, embedding_dim = 100, 64, 32
    centres = torch.randn(num_classes, input_dim)
    backbone = nn.Sequential(nn.Linear(input_dim, 128), nn.ReLU(), nn.Linear(128, embedding_dim))
    prototypes = nn.Parameter(torch.randn(num_classes, embedding_dim))
    loss_fn = qmargin.q_margin(alpha=1.5, scale=10.0, margin=0.1)
    optimizer = torch.optim.AdamW([*backbone.parameters(), prototypes], lr=3e-3)

    for step in range(301):
        labels = torch.randint(num_classes, (256,))
        inputs = centres[labels] + 1.5 * torch.randn(256, input_dim)
        embeddings = functional.normalize(backbone(inputs))  # [B, d]
        cosines = embeddings @ functional.normalize(prototypes).t()  # [B, k]
        loss = loss_fn(cosines, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            stats = loss_fn.with_stats(cosines.detach(), labels)
            accuracy = (cosines.argmax(1) == labels).float().mean()
            sys.stdout.write(
                f"step {step:3d}  loss {loss:.3f}  accuracy {accuracy:.2f}  "
                f"active classes {stats.support_size.float().mean():.1f} of {num_classes}\n"
            )


if __name__ == "__main__":
    main()
