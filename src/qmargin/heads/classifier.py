"""``MarginClassifier``: prototypes of every identity and a loss, on one device or on many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError
from qmargin.heads.attempt import Attempt, KeptMargin
from qmargin.heads.batch import reduce_rows, unit_rows
from qmargin.heads.checks import (
    check_arguments,
    check_batch,
    check_data_parallel,
    check_embeddings,
    check_head_memory,
    check_norms,
    check_prototypes,
    check_settings,
)
from qmargin.heads.choice import Choice, choose_path
from qmargin.heads.chunked import ChunkedStep, chunked_step
from qmargin.heads.collectives import Ranks, equal_share, gather_rows
from qmargin.heads.dense import dense_rows, unit_prototypes
from qmargin.heads.paper import paper_rows
from qmargin.heads.sampled import sampled_rows
from qmargin.heads.shard import ClassShard, Prototypes, draw_prototypes
from qmargin.heads.sparse import LIST_CAPACITY, SparseStep, sparse_step
from qmargin.heads.step import StepRecord, StepStats
from qmargin.heads.step_loss import step_loss
from qmargin.kernels.dispatch import Call, load_backend
from qmargin.kernels.head_records import Lengths, ListOverflow
from qmargin.kernels.head_reference import BLOCK_CLASSES
from qmargin.losses.checks import check_margin
from qmargin.losses.module import MarginLoss
from qmargin.losses.operators import checked_labels
from qmargin.maths.divergences import Alpha

__all__ = ["MarginClassifier", "StepStats"]


STEPS: dict[str, Callable[..., SparseStep | ChunkedStep]] = {
    "sparse": sparse_step,
    "chunked": chunked_step,
}
PATHS: dict[str, Callable[..., tuple[Tensor, StepRecord]]] = {
    "dense": dense_rows,
    "sampled": sampled_rows,
    "paper": paper_rows,
}
PADDING = 256  # the screen's tiles: a copy of the prototypes has a multiple of this many rows
NUM_MEASURED = 4  # steps whose support decides the next path


class MarginClassifier(nn.Module):
    """Prototypes of ``num_classes`` identities and the loss over them.

    Args:
        embedding_dim: ``d``.
        num_classes: ``k``, any number.
        loss: A ``MarginLoss``; its ``reduction`` is that of the head's loss. ``"none"`` gives one
            value per row, on a single rank.
        path: How a step is taken: ``"sparse"`` (exact lists of active classes, ``alpha > 1``),
            ``"chunked"`` (blocks of classes, any alpha), ``"dense"`` (all cosines, any
            divergence), ``"sampled"`` (Partial FC), ``"paper"`` (top K percent and bisection), or
            ``"auto"``, which chooses between the first three and says why in ``last_step``.
        gradient: What backward leaves: ``"dense"`` or ``"sparse"`` (COO) in ``prototypes.grad``, or
            ``"fused"`` for the optimizers of ``qmargin.heads.updates``, which never build it.
        screen_dtype: Precision of the copy that is screened; by default the prototypes' own, and
            float16 for float32 prototypes on a GPU.
        sample_rate: Share of the classes that ``"sampled"`` takes.
        top_percent: Percentage of the classes that ``"paper"`` takes.
        seed: Of the samples; the position in their sequence is part of ``state_dict()``.
        group: Process group whose ranks share the classes: each has the prototypes of a range,
            ``shard``, passes its own rows to ``forward``, and gets the mean loss over all rows,
            the same on every rank. Their gradients are made for a backbone under
            ``DistributedDataParallel``. None for one rank.
        device: Where the prototypes live.
        dtype: Of the prototypes: float32, or float64.

    Three more settings are attributes: ``list_capacity`` (groups of classes that a sparse step may
    list per row, on average; above it the step is redone as a chunked one), ``chunk_dtype``
    (operands of ``"chunked"``, see ``qmargin.heads.chunked``) and ``waits`` (see ``confirm``).

    Prototypes may be changed by any optimizer, any in-place operation on the parameter, and through
    ``prototypes.data``. After a write that leaves no trace there (a NumPy array that shares the
    memory, a view kept of ``.data``), call ``refresh(force=True)``.

    A prototype that is zero or not finite has no direction, so the loss of every row is NaN, and so
    are the gradients of the rows and of their classes, on every path that looks at the class. A
    loss with ``debug=True`` raises instead and names the class.

    Examples:
        >>> from qmargin.losses.presets import q_margin
        >>> head = MarginClassifier(8, 1000, q_margin(), path="sparse")
        >>> head(torch.randn(4, 8), torch.tensor([0, 7, 7, 999])).backward()
        >>> head.prototypes.grad.shape, head.last_step.path
        (torch.Size([1000, 8]), 'sparse')
    """

    inverse_norms: Tensor  # [k]
    copy: Tensor  # [K, d] unit prototypes in the precision of the screen, K >= k
    copy_error: Tensor  # scalar: length of the largest rounding error in the copy
    prototypes: nn.Parameter  # [k, d]

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        loss: MarginLoss,
        *,
        path: str = "auto",
        gradient: str = "dense",
        screen_dtype: torch.dtype | None = None,
        sample_rate: float = 0.1,
        top_percent: float = 5.0,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_arguments(embedding_dim, num_classes, loss)
        self.embedding_dim, self.num_classes = embedding_dim, num_classes
        self.ranks = Ranks(group)
        self.shard = ClassShard.of(num_classes, self.ranks.rank, self.ranks.world)
        self.loss, self.path, self.gradient = loss, path, gradient
        self.sample_rate, self.top_percent, self.seed = sample_rate, top_percent, seed
        self.list_capacity = LIST_CAPACITY
        self.chunk_dtype: torch.dtype | None = None
        self.waits = True
        self._asked_screen_dtype = screen_dtype
        self.lengths: Lengths | None = None  # of the last sparse step's lists
        self.num_redone = 0  # sparse steps whose lists were too long, taken again by blocks
        self._num_samples = 0
        self.pending: Any = None  # what fused optimizers read, see heads/leaving.py
        self._step: StepRecord | None = None
        self._unconfirmed: Attempt | None = None
        self._reason = ""
        self._shares: deque[float] = deque(maxlen=NUM_MEASURED)
        self._home: tuple[Any, ...] | None = None
        self._kernels: Any = None
        self._kernels_key: tuple[Any, ...] | None = None
        self._stamp: Any = None  # see refresh
        self.may_have_moved = False
        self.has_optimizer = False  # of heads/updates.py
        self.checked_wrapper = 0  # id of the last DistributedDataParallel seen to leave it alone
        self._was_chunked = False
        check_settings(self, dtype, (*STEPS, *PATHS))
        check_margin(loss.margin, num_classes)
        check_head_memory(self, torch.empty((), device=device, dtype=dtype), screen_dtype)
        weights = torch.empty(len(self.shard), embedding_dim, device=device, dtype=dtype)
        drawn = int(torch.randint(1 << 62, ()))  # from the generator that torch.manual_seed seeds
        self.prototypes = Prototypes(draw_prototypes(self.shard, weights, drawn))

    @property
    def order(self) -> float:
        """``alpha - 1``, for paths that need it as a number."""
        divergence = self.loss.divergence
        if not isinstance(divergence, Alpha):
            raise ConfigError(
                f"path {self.path!r} takes the divergence Alpha and this is {divergence}; "
                "use path='dense'"
            )
        if _is_learned(divergence):
            raise ConfigError(
                f"path {self.path!r} has no gradient for alpha and this alpha requires one; "
                "use path='dense', or detach it"
            )
        return divergence.order

    @property
    def screen_dtype(self) -> torch.dtype:
        """Precision of the copy that is screened."""
        if self._asked_screen_dtype is not None:
            return self._asked_screen_dtype
        native = self.prototypes.dtype
        return torch.float16 if self.prototypes.is_cuda and native == torch.float32 else native

    @property
    def kernels(self) -> Any:
        """The operations of the sparse step for this device."""
        key = (self.prototypes.device, self.prototypes.dtype, self._asked_screen_dtype)
        if key != self._kernels_key:
            call = Call(key[0].type, key[1], self.screen_dtype)
            name = "auto" if len(self.shard) else "reference"  # kernels need a class to look at
            self._kernels_key, self._kernels = key, load_backend(call, name)
        return self._kernels

    @property
    def last_step(self) -> StepStats | None:
        """What the last forward pass did; reading it waits for a GPU.

        None before the first, and for one that is not confirmed.
        """
        if self._step is None or not self.is_confirmed:
            return None
        stats = self._step.stats()
        reasons = [reason for reason in (self._reason, stats.reason) if reason]
        return replace(stats, reason="; ".join(reasons))

    @torch.inference_mode(False)  # training goes on with what an evaluation made
    def refresh(self, *, force: bool = False) -> None:
        """Bring the screened copy up to date if the prototypes changed or moved since."""
        prototypes = self.prototypes.detach()
        home = (prototypes.data_ptr(), prototypes.device, prototypes.dtype, self.screen_dtype)
        if home != self._home:
            k, d = prototypes.shape
            padded = -(-k // PADDING) * PADDING
            self.copy = prototypes.new_zeros((padded, d), dtype=self.screen_dtype)
            self.inverse_norms = prototypes.new_empty(k)
        elif not (force or self.may_have_moved) and self._is_current():
            return
        self.copy_error = self.kernels.refresh_copy(prototypes, self.copy, self.inverse_norms)
        self._home = home
        self.note_current()
        # Fused optimizers of PyTorch leave no trace in the version: where a gradient was left, and
        # as long as it is there, they may have used it.
        self.may_have_moved = self.prototypes.grad is not None

    def _is_current(self) -> bool:
        """Whether the prototypes have certainly not been written since ``note_current``."""
        prototypes = self.prototypes
        if not isinstance(prototypes, Prototypes):  # replaced: writes through .data go unnoticed
            return False
        stamp = prototypes.stamp()
        return stamp is not None and stamp == self._stamp

    def note_current(self) -> None:
        """The screened copy is that of the prototypes as they are now."""
        prototypes = self.prototypes
        self._stamp = prototypes.stamp() if isinstance(prototypes, Prototypes) else None

    def forward(
        self, embeddings: Tensor, labels: Tensor, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Loss of a batch of embeddings ``[B, d]`` (any length) with labels ``[B]``.

        It is reduced as the loss says: a scalar, or ``[B]`` for ``reduction="none"``. With several
        ranks each passes its own rows, some of them none, and gets the mean or sum over all;
        ``sizes``, how many rows each has, saves asking them.
        """
        check_settings(self, self.prototypes.dtype, (*STEPS, *PATHS))
        embeddings = check_batch(self, embeddings, labels)
        check_data_parallel(self)
        ranks, ignored = self.ranks, self.loss.ignore_index  # a negative number, for the margins
        if ranks.world > 1:
            if sizes is None:
                asked = ranks.integers(len(labels), device=labels.device)
                sizes = [size for (size,) in asked]
            embeddings = gather_rows(embeddings.to(self.prototypes.dtype), ranks, sizes)
            labels = ranks.gather(labels, sizes)
        if len(labels) == 0:
            raise ShapeError("the batch is empty, so its mean loss is undefined; skip it")
        if not labels.is_cuda or self.loss.debug:
            counted = labels.masked_fill(labels == ignored, 0)
            checked_labels(counted, self.num_classes, self.loss.debug)
        if self.loss.debug:
            check_prototypes(self)
        choice = self._choose(len(labels))
        if self._unconfirmed is not None and self.pending is not None:
            raise ConfigError(
                "the last forward pass left a gradient and is not confirmed; call head.confirm() "
                "or head.discard() before the next"
            )
        self._step = self._unconfirmed = None  # what they kept is free for this step
        with torch.autocast(embeddings.device.type, enabled=False):
            wide = embeddings.to(self.prototypes.dtype)
            unit, norms = unit_rows(wide, labels, ignored, self.kernels)
            check_norms(norms, debug=self.loss.debug)
            if choice.path in ("sparse", "chunked") or self.gradient == "fused":
                self.refresh()
            loss, self._step = self._take(choice.path, unit, labels.long(), norms)
        self._reason = choice.reason
        self._was_chunked = isinstance(self._step, ChunkedStep)
        if self._unconfirmed is None:
            self._remember_share()
        return loss

    @property
    def is_confirmed(self) -> bool:
        """Whether the last forward pass is known to stand."""
        return self._unconfirmed is None

    def confirm(self) -> bool:
        """Whether the last forward pass stands; waits for the device.

        A forward pass guesses how long its lists will be, and waits to see whether it was right.
        With ``head.waits = False``, a fused gradient and one rank it does not: a host may launch
        the backward pass meanwhile, and has to ask here before it uses the loss or steps an
        optimizer. If the answer is no, all gradients of the batch are void: take it again, with
        ``head.waits = True``. Or call ``discard``, and ask nothing.
        """
        attempt = self._unconfirmed
        if attempt is None:
            return True
        if not attempt.stands():
            self.discard()
            return False
        self._unconfirmed = None
        self.pending = attempt.cut(self.pending)
        self._remember_share()
        return True

    def discard(self) -> None:
        """Forget a forward pass that is not confirmed, as if its batch had never come."""
        attempt = self._unconfirmed
        if attempt is not None:
            attempt.margin.put_back()
            if attempt.has_left(self.pending):
                self.pending = None
            self._unconfirmed = self.lengths = self._step = None

    def _remember_share(self) -> None:
        if self.path == "auto" and isinstance(self._step, SparseStep | ChunkedStep):
            self._shares.append(self._step.class_share())

    def _take(
        self, path: str, unit: Tensor, labels: Tensor, norms: Tensor
    ) -> tuple[Tensor, StepRecord]:
        """Mean loss of a batch by some path, and the record of the step."""
        if path not in STEPS:
            # These look at all classes, on every rank.
            unit, norms = equal_share(unit, self.ranks), equal_share(norms, self.ranks)
            rows, record = PATHS[path](self, unit, labels, norms)
            loss = self.loss
            return reduce_rows(rows, labels, loss.ignore_index, loss.reduction), record
        margin = KeptMargin(self.loss.margin)

        def take(path: str, **hints: Any) -> Attempt:
            step = STEPS[path](self, unit, labels, **hints)
            return Attempt(step_loss(step, unit, labels, norms), step, margin)

        try:
            attempt = take(path)
            if self._may_run_ahead():
                self._unconfirmed = attempt
            elif not attempt.step.confirm():  # a guess failed; the second time there are none
                margin.put_back()
                attempt = take(path, **({} if path == "sparse" else {"is_certain": True}))
                attempt.step.confirm()
        except ListOverflow as overflow:
            self.lengths = None
            self.num_redone += 1
            margin.put_back()
            attempt = take("chunked", maxima=overflow.maxima)
            assert isinstance(attempt.step, ChunkedStep)
            attempt.step.num_overflowed = len(labels)
        return attempt.loss, attempt.step

    def _may_run_ahead(self) -> bool:
        """Whether this forward pass may return before it is known to stand."""
        is_alone = self.gradient == "fused" and self.ranks.world == 1
        return not self.waits and is_alone and torch.is_grad_enabled()

    def _choose(self, num_rows: int) -> Choice:
        """The path of this step."""
        if self.path != "auto":
            return Choice(self.path, f"path={self.path!r} was asked for")
        divergence = self.loss.divergence
        is_known = isinstance(divergence, Alpha) and not _is_learned(divergence)
        return choose_path(
            order=self.order if is_known else None,
            device=self.prototypes.device.type,
            num_logits=num_rows * self.num_classes,
            class_share=sum(self._shares) / len(self._shares) if self._shares else None,
            was_chunked=self._was_chunked,
        )

    @property
    def weight(self) -> nn.Parameter:
        """The prototypes, by the name that most heads give them."""
        return self.prototypes

    def cosines(self, embeddings: Tensor) -> Tensor:
        """Cosines with every class, ``[B, k]``, differentiable; every rank gets those of its rows.

        With several ranks all have to call it, and each gathers all prototypes.
        """
        embeddings = check_embeddings(self, embeddings).to(self.prototypes.dtype)
        return nn.functional.normalize(embeddings) @ unit_prototypes(self).t()

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """Most similar class of each row, ``[B]`` int64, without a ``[B, k]`` matrix.

        The training accuracy is ``(head.predict(embeddings) == labels).float().mean()``. With
        several ranks all have to call it, each with its own rows.
        """
        rows = check_embeddings(self, embeddings).detach().to(self.prototypes.dtype)
        ranks, sizes = self.ranks, [len(embeddings)]
        if ranks.world > 1:
            sizes = [size for (size,) in ranks.integers(len(rows), device=rows.device)]
            rows = ranks.gather(rows, sizes)
        best = rows.new_full((len(rows),), -torch.inf)
        found = torch.full_like(best, self.num_classes, dtype=torch.int64)
        for start in range(0, len(self.shard), BLOCK_CLASSES):
            block = nn.functional.normalize(self.prototypes[start : start + BLOCK_CLASSES])
            value, index = (rows @ block.t()).max(1)  # lengths of rows do not change the order
            is_better = value > best
            found = torch.where(is_better, self.shard.start + start + index, found)
            best = torch.where(is_better, value, best)
        if ranks.world > 1:
            is_best = best == ranks.max_(best.clone())
            found = -ranks.max_(-torch.where(is_best, found, self.num_classes))
        return ranks.part(found, sizes)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Take prototypes that come alone, or by the name ``weight``, as other heads save them."""
        own, other = f"{prefix}prototypes", f"{prefix}weight"
        if other in state_dict and own not in state_dict:
            state_dict[own] = state_dict.pop(other)
        extra = f"{prefix}_extra_state"
        if own in state_dict and extra not in state_dict:
            state_dict[extra] = self.get_extra_state()  # samples and choices go on as they were
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def next_seed(self) -> int:
        """Seed of the next sample of classes: a function of ``seed`` and of the samples so far."""
        self._num_samples += 1
        return (self.seed * 0x9E3779B97F4A7C15 + self._num_samples) % (1 << 63)

    def get_extra_state(self) -> Tensor:
        """What the next samples and the next choice of path depend on, as integers."""
        shares = torch.tensor(list(self._shares), dtype=torch.float64).view(torch.int64)
        numbers = [self.seed, self._num_samples, int(self._was_chunked)]
        return torch.cat([torch.tensor(numbers, dtype=torch.int64), shares])

    def set_extra_state(self, state: Tensor) -> None:
        """Go on where ``get_extra_state`` was called."""
        self.seed, self._num_samples, was_chunked = (int(number) for number in state[:3])
        self._was_chunked = bool(was_chunked)
        shares = state[3:].cpu().clone().view(torch.float64)
        self._shares = deque(shares.tolist(), maxlen=NUM_MEASURED)

    def extra_repr(self) -> str:
        """Shown by ``print(head)``."""
        text = f"{self.embedding_dim}, {self.num_classes}, path={self.path!r}"
        if not self.shard.is_whole:
            text += f", classes {self.shard.start} to {self.shard.stop - 1}"
        return f"{text}, gradient={self.gradient!r}, screen_dtype={self.screen_dtype}"

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle holds: no step in flight, and no copy that can be made again."""
        fresh = dict.fromkeys(("pending", "_step", "_unconfirmed", "_home", "_kernels"))
        fresh |= {"_kernels_key": None, "_stamp": None, "has_optimizer": False}
        state = {**self.__dict__, **fresh, "_shares": deque(self._shares, NUM_MEASURED)}
        for name in ("copy", "inverse_norms", "copy_error"):
            state.pop(name, None)
        return state


def _is_learned(divergence: Alpha) -> bool:
    return isinstance(divergence.alpha, Tensor) and divergence.alpha.requires_grad
