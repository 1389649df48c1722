"""Five losses on one synthetic open-set verification task, in under a minute on two cores.

An identity is a Gaussian prototype. A sample is its prototype and a longer nuisance,
mixed by a fixed random layer: a toy of faces under changing light. A small network learns to embed
samples of some identities and is tested on pairs of samples of *other* identities. The task shows
that all five losses train, and how they are called; it says nothing about which of them is best
for faces or voices.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import qmargin

Scores = npt.NDArray[np.float32]

IDENTITY_DIM, NUISANCE_DIM, INPUT_DIM, EMBEDDING_DIM = 16, 48, 96, 64
TRAIN_IDENTITIES, TEST_IDENTITIES, TEST_SAMPLES = 500, 300, 8
FARS = (1e-2, 1e-3)

LOSSES = {  # the settings published for speaker verification, which also has few identities
    "ArcFace": qmargin.arcface_speaker(),
    "CosFace": qmargin.cosface_speaker(),
    "EntMax": qmargin.entmax_speaker(),
    "SparseMax": qmargin.sparsemax_face(scale=5.0, margin=0.1),
    "Q-Margin": qmargin.q_margin_speaker(),
}


@dataclass(frozen=True)
class World:
    """Identities from a seed, and samples of them."""

    prototypes: Tensor  # [identities, IDENTITY_DIM]
    mixing: Tensor  # [IDENTITY_DIM + NUISANCE_DIM, INPUT_DIM]
    noise: float = 0.3

    def sample(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Inputs ``[B, INPUT_DIM]``: what a sensor would see of these identities."""
        nuisance = torch.randn(len(labels), NUISANCE_DIM, generator=generator)
        latent = torch.cat([self.prototypes[labels], nuisance], dim=1)
        noise = self.noise * torch.randn(len(labels), INPUT_DIM, generator=generator)
        return torch.tanh(latent @ self.mixing) + noise


def make_world(seed: int) -> World:
    """Train identities first, test identities after them: disjoint by construction."""
    generator = torch.Generator().manual_seed(seed)
    num_identities = TRAIN_IDENTITIES + TEST_IDENTITIES
    latent_dim = IDENTITY_DIM + NUISANCE_DIM
    return World(
        prototypes=torch.randn(num_identities, IDENTITY_DIM, generator=generator),
        mixing=torch.randn(latent_dim, INPUT_DIM, generator=generator) / latent_dim**0.5,
    )


def make_backbone() -> nn.Module:
    """A small network from inputs to embeddings."""
    return nn.Sequential(
        nn.Linear(INPUT_DIM, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, EMBEDDING_DIM),
    )


def train(
    loss_fn: qmargin.MarginLoss, world: World, *, steps: int, seed: int, progress: Progress
) -> nn.Module:
    """Train a backbone; every loss sees the same batches from the same start."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    backbone = make_backbone()
    prototypes = nn.Parameter(0.01 * torch.randn(TRAIN_IDENTITIES, EMBEDDING_DIM))
    optimizer = torch.optim.AdamW([*backbone.parameters(), prototypes], lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    for _ in range(steps):
        labels = torch.randint(TRAIN_IDENTITIES, (256,), generator=generator)
        embeddings = functional.normalize(backbone(world.sample(labels, generator)))  # [B, d]
        cosines = embeddings @ functional.normalize(prototypes).t()  # [B, k]
        loss = loss_fn(cosines, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.advance(progress.task_ids[0])
    return backbone


@torch.no_grad()
def pair_scores(backbone: nn.Module, world: World, seed: int) -> tuple[Scores, Scores]:
    """Cosines of all pairs of test samples: same identity, and different identities."""
    generator = torch.Generator().manual_seed(seed + 2)
    labels = torch.arange(TEST_IDENTITIES).repeat_interleave(TEST_SAMPLES) + TRAIN_IDENTITIES
    embeddings = functional.normalize(backbone.eval()(world.sample(labels, generator)))
    first, second = torch.triu_indices(len(labels), len(labels), offset=1)
    scores = (embeddings @ embeddings.t())[first, second].numpy()
    is_same = (labels[first] == labels[second]).numpy()
    return scores[is_same], scores[~is_same]


def tar_at_far(genuine: Scores, impostor: Scores, far: float) -> float:
    """Largest share of genuine pairs accepted while at most ``far`` of the impostors are.

    A pair is accepted when its score is above the threshold, so that the threshold may be the score
    of the first impostor that has to be rejected.
    """
    allowed = int(far * len(impostor))
    threshold = np.partition(impostor, len(impostor) - allowed - 1)[len(impostor) - allowed - 1]
    return float(np.mean(genuine > threshold))


def equal_error_rate(genuine: Scores, impostor: Scores) -> float:
    """Error rate where rejecting genuine and accepting impostor pairs are equally frequent."""
    thresholds = np.sort(genuine)
    false_rejects = np.arange(len(genuine)) / len(genuine)  # strictly below each threshold
    accepted = len(impostor) - np.searchsorted(np.sort(impostor), thresholds, side="left")
    false_accepts = accepted / len(impostor)
    crossing = int(np.argmax(false_rejects >= false_accepts))
    return float((false_rejects[crossing] + false_accepts[crossing]) / 2)


def compare(steps: int, seed: int) -> list[list[str]]:
    """Train and test every loss; one row of text per loss."""
    torch.set_num_threads(1)  # the matrices are small: more threads would wait for each other
    world = make_world(seed)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:9}"), BarColumn(), TimeRemainingColumn())
    rows = []
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("", total=steps * len(LOSSES))
        for name, loss_fn in LOSSES.items():
            bar.update(task, description=name)
            start = time.perf_counter()
            backbone = train(loss_fn, world, steps=steps, seed=seed, progress=bar)
            seconds = time.perf_counter() - start
            if not sys.stderr.isatty():
                sys.stderr.write(f"trained {name} in {seconds:.1f} s\n")
            genuine, impostor = pair_scores(backbone, world, seed)
            tars = [f"{100 * tar_at_far(genuine, impostor, far):.1f}" for far in FARS]
            eer = f"{100 * equal_error_rate(genuine, impostor):.2f}"
            rows.append([name, *tars, eer, f"{seconds:.1f}"])
    return rows


def main() -> None:
    """Compare the five losses and print a table."""
    parser = argparse.ArgumentParser(description="Five losses on synthetic identities.")
    parser.add_argument("--steps", type=int, default=600, help="training steps per loss")
    parser.add_argument("--seed", type=int, default=0, help="seed of identities and networks")
    arguments = parser.parse_args()
    is_terminal = sys.stdout.isatty()
    console = Console() if is_terminal else Console(width=100, no_color=True)
    table = Table(box=box.SIMPLE_HEAD if is_terminal else box.MARKDOWN)
    table.add_column("loss")
    for heading in (*(f"TAR % at FAR {far:g}" for far in FARS), "EER %", "train s"):
        table.add_column(heading, justify="right")
    for row in compare(arguments.steps, arguments.seed):
        table.add_row(*row)
    console.print(
        f"{TRAIN_IDENTITIES} training identities, {TEST_IDENTITIES} other test identities, "
        f"{arguments.steps} steps per loss, seed {arguments.seed}",
        highlight=False,
    )
    console.print(table)


if __name__ == "__main__":
    main()
