"""``--dry-run``: estimate memory, build everything, take two steps, write nothing."""

from __future__ import annotations

import sys
import time
from typing import NamedTuple

import torch

from qmargin.data.samples import Dataset, read_sample
from qmargin.errors import ConfigError
from qmargin.heads.checks import available_memory, gib
from qmargin.models import create_backbone
from qmargin.training.build import build_backbone, build_dataset
from qmargin.training.distributed import Process, run_on_all, start_process_group
from qmargin.training.recipe import Recipe
from qmargin.training.reporting import duration
from qmargin.training.session import DTYPES, Session, build_session
from qmargin.training.step import part_sizes, take_step

_FLOAT = 4
_REMEDY = "use a smaller data.batch_size, more optimizer.accumulation, more ranks or fewer classes"


def estimate_memory(recipe: Recipe, process: Process, dataset: Dataset | None) -> dict[str, int]:
    """Bytes on one rank's device, by purpose; refuses a run that needs more than is free.

    Workspaces of libraries and blocks of the head are not included: add a tenth.
    """
    samples = build_dataset(recipe) if dataset is None else dataset
    input_shape = read_sample(samples, 0, seed=recipe.seed, epoch=0).inputs.shape
    part, device = recipe.optimizer, process.device
    backbone = build_backbone(recipe, device="meta")
    weights = _FLOAT * sum(weight.numel() for weight in backbone.parameters())
    num_states = 2 if part.kind == "adamw" else int(part.momentum > 0)
    rows = -(-samples.num_classes // process.world)
    matrix = _FLOAT * rows * recipe.model.embedding_dim
    shares = part_sizes(recipe.data.batch_size, process.world, part.accumulation)
    batch = (max(map(max, shares)), *input_shape)
    parts = {
        "weights": weights * (1 if recipe.run.ema_decay is None else 2),
        "gradients": weights * (2 if process.world > 1 else 1),  # and buckets to exchange them
        "optimizer": weights * num_states,
        "prototypes": matrix,
        "copy for the screen": matrix // 2 if device.type == "cuda" else matrix,
        "gradient of the prototypes": matrix if recipe.head.gradient_form == "dense" else 0,
        "optimizer of the head": matrix * num_states,
        "inputs": _FLOAT * torch.Size(batch).numel(),
        "activations": activation_bytes(recipe, batch),
    }
    available = available_memory(device)
    num_here = process.world if device.type == "cpu" else 1  # ranks on CPUs share one machine
    needed = num_here * sum(parts.values())
    if available is not None and needed > available:
        raise ConfigError(
            f"this recipe needs about {gib(needed)} on {device} ({_listed(parts, num_here)}) and "
            f"{gib(available)} are free; {_REMEDY}"
        )
    return parts


def _listed(parts: dict[str, int], factor: int = 1) -> str:
    return ", ".join(f"{name} {gib(factor * size)}" for name, size in parts.items() if size)


def activation_bytes(recipe: Recipe, batch_shape: tuple[int, ...]) -> int:
    """Bytes that the backbone keeps for its backward pass over a batch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    part, dtype = recipe.model, DTYPES[recipe.precision.dtype]
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        options = {"embedding_dim": part.embedding_dim, **part.options}
        backbone = create_backbone(part.backbone, **options)  # type: ignore[arg-type]
        own = {weight.untyped_storage()._cdata for weight in backbone.parameters()}
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            output = backbone(torch.empty(batch_shape))  # kept alive: so are its storages
    assert output is not None
    return sum(size for storage, size in kept.items() if storage not in own)


class DryRun(NamedTuple):
    """Time and memory of some steps of a recipe, on this rank."""

    rank: int
    seconds: list[float]  # of each step; the first includes one-time costs
    losses: list[float]
    lines: list[str]  # a report to print


def dry_run(
    recipe: Recipe, *, dataset: Dataset | None = None, device: str = "auto", num_steps: int = 2
) -> DryRun:
    """Build everything, take some steps, and report time and memory, without writing files."""
    with start_process_group(recipe.run.timeout_s, device=device) as process:
        available = available_memory(process.device)
        estimate = run_on_all(process, lambda: estimate_memory(recipe, process, dataset))
        try:
            with process.name_lost_ranks():
                session = build_session(recipe, process, dataset)
            seconds, losses = _steps(session, num_steps)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"this recipe was estimated at {gib(sum(estimate.values()))} on {process.device} "
                f"and ran out of memory ({error}); {_REMEDY}"
            ) from error
        stats, total = session.head.last_step, session.total_steps
        free = "unknown" if available is None else gib(available)
        lines = [
            f"recipe     {recipe.name}, sha256 {recipe.sha256[:16]}",
            f"data       {session.order.n:,} samples of {session.head.num_classes:,} classes",
            f"ranks      {process.world}, this one on {process.device}",
            f"length     {total:,} steps, about {duration(total * seconds[-1])} at the rate below",
            f"memory     about {gib(sum(estimate.values()))} expected per rank "
            f"({_listed(estimate)})",
            f"           {gib(_peak(process.device))} at the peak, {free} were free",
            f"steps      {', '.join(f'{1000 * value:,.1f} ms' for value in seconds)}; the "
            f"last is {recipe.data.batch_size / seconds[-1]:,.0f} samples/s",
            f"losses     {', '.join(f'{loss:.6g}' for loss in losses)}",
            f"head       {'no step' if stats is None else f'{stats.path}: {stats.reason}'}",
            *(f"warning: {sentence}" for sentence in session.unreached),
        ]
        return DryRun(process.rank, seconds, losses, lines)


def _steps(session: Session, num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds and losses of some steps."""
    device, seconds, losses = session.process.device, [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with session.stream() as batches:
        for _ in range(min(num_steps, session.total_steps)):
            began = time.perf_counter()
            with session.process.name_lost_ranks():
                losses.append(take_step(session, batches).loss)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
            session.progress.step += 1
    return seconds, losses


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest
