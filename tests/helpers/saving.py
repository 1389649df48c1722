"""A tiny run that saves after every step, for tests that kill it; and states to save."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qmargin.training.checkpoint import (
    CheckpointState,
    HeadRows,
    agree_on_newest,
    join_rows,
    load_checkpoint,
    save_checkpoint,
    split_rows,
)
from qmargin.training.distributed import Process

NUM_CLASSES, DIM = 41, 6
SAVED = "acknowledged.txt"


def class_range(rank: int, world: int, num_classes: int = NUM_CLASSES) -> tuple[int, int]:
    """Contiguous and uneven parts; none for ranks beyond the classes."""
    return rank * num_classes // world, (rank + 1) * num_classes // world


def random_state(step: int, *, rank: int = 0, world: int = 1, seed: int = 0) -> CheckpointState:
    """A state with every kind of content; rows of a class do not depend on the ranks."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    rows = torch.randn(2, NUM_CLASSES, DIM, generator=generator)
    start, stop = class_range(rank, world)
    optimizer = {
        "state": {0: {"momentum_buffer": torch.randn(3, 2, generator=generator), "step": 7}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0], "limit": float("inf")}],
    }
    head = HeadRows(
        start, NUM_CLASSES, {"prototypes": rows[0, start:stop], "momentum": rows[1, start:stop]}
    )
    return CheckpointState(
        step=step,
        backbone={
            "conv.weight": torch.randn(4, 3, 3, 3, generator=generator).bfloat16(),
            "bn.num_batches_tracked": torch.tensor(step),
            "mask": torch.tensor([True, False, True]),
            "empty": torch.zeros(0, 5),
        },
        head=head,
        parts={"optimizer": optimizer, "scaler": {"scale": 65536.0, "_growth_tracker": 3}},
        loop={"epoch": step // 10, "position": step % 10, "best": float("nan"), "ids": ["a", "b"]},
        recipe_yaml="name: test\nseed: 0\n",
        recipe_sha256="ab" * 32,
    )


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """Hash of names, dtypes, shapes and bits."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class TinyRun:
    """Momentum SGD on a backbone and on this rank's classes, with gradients made from the step."""

    def __init__(self, rank: int = 0, world: int = 1, size: int = DIM) -> None:
        self.rank, self.world, self.num_steps = rank, world, 0
        self.start, self.stop = class_range(rank, world)
        self.backbone = torch.nn.Parameter(torch.zeros(size, size))
        self.rows = torch.nn.Parameter(torch.zeros(self.stop - self.start, size))
        self.optimizers = [
            torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=1e-3)
            for parameter in (self.backbone, self.rows)
        ]

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.num_steps)
        size = len(self.backbone)
        self.backbone.grad = torch.randn(size, size, generator=generator)
        rows = torch.randn(NUM_CLASSES, size, generator=generator)
        self.rows.grad = rows[self.start : self.stop]
        for optimizer in self.optimizers:
            optimizer.step()
        self.num_steps += 1

    def state(self) -> CheckpointState:
        backbone, head = (optimizer.state_dict() for optimizer in self.optimizers)
        rest, rows = split_rows(head, self.rows.shape)
        return CheckpointState(
            step=self.num_steps,
            backbone={"weight": self.backbone.detach()},
            head=HeadRows(self.start, NUM_CLASSES, {"prototypes": self.rows.detach(), **rows}),
            parts={"optimizer": backbone, "head_optimizer": rest},
        )

    @torch.no_grad()
    def load(self, state: CheckpointState) -> None:
        assert state.head is not None
        self.num_steps = state.step
        self.backbone.copy_(state.backbone["weight"])
        self.rows.copy_(state.head.tensors["prototypes"])
        self.optimizers[0].load_state_dict(state.parts["optimizer"])
        self.optimizers[1].load_state_dict(
            join_rows(state.parts["head_optimizer"], state.head.tensors)
        )

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the next step depends on."""
        momenta = [next(iter(o.state.values()))["momentum_buffer"] for o in self.optimizers]
        return {
            "backbone": self.backbone.detach(),
            "rows": self.rows.detach(),
            "momentum": momenta[0],
            "rows_momentum": momenta[1],
        }


def resume(folder: Path, process: Process | None = None) -> TinyRun:
    """The run of the newest checkpoint, or a fresh one."""
    process = process or Process()
    run = TinyRun(process.rank, process.world)
    search = agree_on_newest(folder, process)
    if search.checkpoint is not None:
        run.load(load_checkpoint(search.checkpoint, start=run.start, stop=run.stop))
    return run


def save_for_ever(folder: Path, process: Process | None = None) -> None:
    """Resume, then step and save until killed; every save that returned is noted in a file."""
    torch.set_num_threads(1)
    process = process or Process()
    run = resume(folder, process)
    with (folder.parent / f"{SAVED}{process.rank}").open("a") as notes:
        print("ready", file=notes, flush=True)
        while True:
            run.step()
            save_checkpoint(folder, run.state(), process=process, keep=2)
            print(run.num_steps, file=notes, flush=True)


def save_and_die(folder: Path, step: int, number: int) -> None:
    """Save one step; kill -9 this process at its ``number``-th open, rename or deletion."""
    torch.set_num_threads(1)
    state, left = random_state(step), number

    def watch(event: str, arguments: Sequence[Any]) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save_checkpoint(folder, state, keep=2)
