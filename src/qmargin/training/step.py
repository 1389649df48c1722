"""One training step: read, embed, agree, solve, clip, update.

All ranks take a step or none does. Errors, values that are not finite, and signals of one rank are
put to a vote before rows of one rank reach the classes of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress

import torch
from torch import Tensor

from qmargin.data.faces import normalised
from qmargin.data.loader import Batch
from qmargin.data.order import GlobalOrder, derived_seed
from qmargin.devices import Reading
from qmargin.errors import ConfigError
from qmargin.training.distributed import all_agree, seed_everything, vote
from qmargin.training.optim import clip_gradients_, stored_norm
from qmargin.training.schedules import learning_rate, loss_settings
from qmargin.training.session import Session

BAD_INPUT = "an embedding is not finite, or has no direction"
BAD_GRADIENT = "the gradient is not finite"
OVERFLOW = "the scaled gradient overflowed"


@dataclass(frozen=True)
class StepResult:
    """Outcome of a step; equal on every rank, except for the samples."""

    loss: float = math.nan
    grad_norm: float = math.nan
    gap: float | None = None  # mean over the rows of all ranks, of steps that are recorded
    skipped: str | None = None  # reason why the step was skipped
    samples: tuple[str, ...] = ()  # of this rank: those that caused a skipped step
    replaced: tuple[str, ...] = ()  # of this rank: corrupt ones
    num_corrupt: int = 0
    stop: int = 0


@dataclass(frozen=True)
class _Passed:
    """Forward and backward of a whole batch, on the device."""

    loss: Tensor
    gap: Tensor | None  # mean, in steps that are recorded


def take_step(
    session: Session,
    batches: Iterator[Batch],
    *,
    stop: int = 0,
    failure: BaseException | None = None,
) -> StepResult:
    """Take the next step of the session; after a ``failure`` all ranks raise."""
    prepare_step_(session)
    session.keep_buffers_()
    batch = None
    if failure is None:
        try:
            batch = next(batches)
        except Exception as error:
            failure = error
    num_corrupt = 0 if batch is None else len(batch.replaced)
    # before the forward pass, in which the ranks of a wrapped backbone may meet
    verdict = vote(session.process, error=failure, stop=stop, num_corrupt=num_corrupt)
    assert batch is not None  # or the vote has raised
    result = StepResult(
        replaced=tuple(item.sample_id for item in batch.replaced),
        num_corrupt=verdict.num_corrupt,
        stop=verdict.stop,
    )
    found = _backpropagate(session, batch, speculative=session.runs_ahead)
    if found is None:  # the head's list sizes did not suffice: repeat it without speculation
        prepare_step_(session)
        session.keep_buffers_(restore=True)
        found = _backpropagate(session, batch)
    assert found is not None
    if isinstance(found, tuple):
        return _skip(session, replace(result, samples=found), BAD_INPUT)
    return _update(session, replace(result, samples=batch.ids), found)


def _backpropagate(
    session: Session, batch: Batch, *, speculative: bool = False
) -> _Passed | tuple[str, ...] | None:
    """Loss and gap after forward and backward in parts; None if the batch has to be repeated.

    If a row of any rank is unusable, it names the samples of this rank. A speculative pass
    launches everything before the host reads a result, so that a GPU does not wait for it. With
    several ranks the host reads first, because rows of one rank reach the classes of all.
    """
    process, head = session.process, session.head
    num_rows, first = batch_rows(session.order, session.progress.step), 0
    parts = session.recipe.optimizer.accumulation
    shares = [share for share in part_sizes(num_rows, process.world, parts) if sum(share)]
    losses, gaps = [], []
    is_recorded = session.is_recorded(session.progress.step + 1)

    def refused(part: slice, usable: Reading) -> tuple[str, ...]:
        return tuple(compress(batch.ids[part], (~usable.wait()).tolist()))

    for index, share in enumerate(shares):
        part = slice(first, first := first + share[process.rank])
        with session.without_sync(index + 1 < len(shares)):
            embeddings, failure = _embed(session, batch.inputs[part])
            usable = Reading(usable_rows(embeddings))
            is_finite = speculative or bool(usable.wait().all())  # the step's first wait for a GPU
            if not vote(process, error=failure, is_finite=is_finite).is_finite:
                return refused(part, usable)
            labels = batch.labels[part].to(process.device, non_blocking=True)
            loss = head(embeddings, labels, share, speculative=speculative)
            loss = loss * (sum(share) / num_rows)
            if is_recorded:  # before the prototypes move
                gaps.append(head.gaps(embeddings, labels, share).sum())
            session.scaler.scale(loss).backward()
        if speculative and not bool(usable.wait().all()):
            head.discard()
            return refused(part, usable)
        if not head.verify():
            return None
        losses.append(loss.detach())
    gap = head.ranks.sum_(torch.stack(gaps).sum()) / num_rows if is_recorded else None
    return _Passed(torch.stack(losses).sum(), gap)


def prepare_step_(session: Session) -> None:
    """Learning rate, loss and seeds of a step: functions of the recipe, the step and the rank."""
    recipe, step = session.recipe, session.progress.step
    per_epoch = session.order.steps_per_epoch
    session.optimizers.zero_grad()
    session.optimizers.set_learning_rate(learning_rate(recipe, step, per_epoch))
    loss = session.loss.at(loss_settings(recipe, step, per_epoch))
    if loss is not session.head.loss:
        session.head.loss = loss
    seed_everything(derived_seed(recipe.seed, step), rank=session.process.rank)


def part_sizes(num_rows: int, world: int, parts: int) -> list[list[int]]:
    """Number of rows of each rank in each part of a batch, ``[parts][world]``."""

    def cut(count: int, parts: int) -> list[int]:
        return [count // parts + (index < count % parts) for index in range(parts)]

    columns = [cut(share, parts) for share in cut(num_rows, world)]
    return [list(row) for row in zip(*columns, strict=True)]


def batch_rows(order: GlobalOrder, step: int) -> int:
    """Number of rows of a step over all ranks; fewer than a batch at the end of some epochs."""
    return min(order.batch_size, order.n - step % order.steps_per_epoch * order.batch_size)


@torch.no_grad()
def usable_rows(embeddings: Tensor) -> Tensor:
    """Rows that have a finite length above zero, ``[B]``."""
    norms = embeddings.float().norm(dim=1)
    is_usable: Tensor = (norms > 0) & norms.isfinite()
    return is_usable


def _embed(session: Session, inputs: Tensor) -> tuple[Tensor, Exception | None]:
    """Embeddings of a part, or None and the error."""
    device = session.process.device
    try:
        inputs = inputs.to(device, non_blocking=True)
        is_channels_last = session.recipe.precision.channels_last and inputs.dim() == 4
        layout = torch.channels_last if is_channels_last else torch.contiguous_format
        inputs = inputs.contiguous(memory_format=layout)
        if inputs.dtype == torch.uint8:  # pictures travel as bytes
            inputs = normalised(inputs)
        with session.autocast():
            return session.model(inputs), None
    except Exception as error:
        return torch.zeros(0, 1, device=device), _explained(session, error)


def _explained(session: Session, error: Exception) -> Exception:
    """The error, with a remedy if the compiler raised it."""
    if not session.recipe.precision.compile:
        return error
    from torch._dynamo.exc import TorchDynamoException

    if not isinstance(error, TorchDynamoException):
        return error
    lines = str(error).strip().splitlines() or [""]
    explained = ConfigError(
        f"precision.compile is true and {session.recipe.model.backbone} cannot be compiled into "
        f"one graph ({type(error).__name__}: {lines[0]}); set precision.compile=false, or remove "
        "what torch.compile(backbone, fullgraph=True) complains about"
    )
    explained.__cause__ = error
    return explained


def _update(session: Session, result: StepResult, passed: _Passed) -> StepResult:
    """Clip gradients and update weights, if every rank's gradient is finite."""
    optimizers, scaler = session.optimizers, session.scaler
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    norm, is_fine = _clip(session)
    loss, gap = passed.loss, passed.gap
    parts = (loss, norm, is_fine, torch.full_like(loss, math.nan) if gap is None else gap)
    numbers = torch.stack([number.to(loss.device).double() for number in parts])
    value, size, is_fine_here, mean_gap = numbers.tolist()  # the step's second wait for a GPU
    known = mean_gap if math.isfinite(mean_gap) else None  # infinite for a single class
    result = replace(result, loss=value, grad_norm=size, gap=known)
    if not all_agree(session.process, is_fine_here == 1.0 and math.isfinite(value)):
        if scaler.is_enabled():
            # set explicitly: only the prototypes of another rank may have overflowed
            scaler.update(scaler.get_scale() * scaler.get_backoff_factor())
            if scaler.get_scale() >= 1.0:
                return _skip(session, replace(result, samples=()), OVERFLOW)
        return _skip(session, result, BAD_GRADIENT)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    if session.average is not None:
        session.average.update(session.backbone.state_dict())
    return replace(result, samples=())


def _clip(session: Session) -> tuple[Tensor, Tensor]:
    """Norm of the gradient, on request with the head's, and whether it is finite on this rank."""
    part, optimizers = session.recipe.optimizer, session.optimizers
    if part.clip_norm is None:
        norm = stored_norm(optimizers.backbone)
    else:
        is_fused = session.head.gradient == "fused"  # its norm is over all ranks already
        sum_over_shards = None if is_fused else session.head.ranks.sum_
        norm = clip_gradients_(
            optimizers, part.clip_norm, with_head=part.clip_head, sum_over_shards=sum_over_shards
        )
        if part.clip_head:
            return norm, norm.isfinite()
    # a fused gradient shows here as its scale, which is infinite if the gradient is not finite
    return norm, norm.isfinite() & stored_norm(optimizers.head).to(norm.device).isfinite()


def _skip(session: Session, result: StepResult, reason: str) -> StepResult:
    session.optimizers.zero_grad()
    session.keep_buffers_(restore=True)
    return replace(result, skipped=reason)
