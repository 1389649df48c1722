"""``MarginClassifier``: prototypes of every identity and a loss, on one device or on many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qmargin.devices import Reading, on_device, without_autocast
from qmargin.errors import ConfigError, ShapeError
from qmargin.heads import checks
from qmargin.heads.chunked import ChunkedStep, chunked_step, fused_chunked_step, has_kernels
from qmargin.heads.dense import DenseStep, dense_rows, sampled_rows, top_k_rows, unit_prototypes
from qmargin.heads.gradients import PrototypeGradient
from qmargin.heads.matrix import (
    CAPACITY,
    CapturedSteps,
    MatrixStep,
    attach_loss,
    fits,
    fused_step,
    matrix_step,
    needs_gradient,
)
from qmargin.heads.paths import LIST_CAPACITY, Auto, Choice, Sampled, StepPath, as_path, choose_path
from qmargin.heads.sharding import (
    ClassShard,
    Prototypes,
    Ranks,
    draw_prototypes,
    equal_share,
    gather_rows,
)
from qmargin.heads.sparse import SparseStep, fused_sparse_step, sparse_step
from qmargin.heads.step import (
    StepRecord,
    StepStats,
    own_labels,
    reduce_rows,
    step_loss,
    unit_rows,
)
from qmargin.kernels.dispatch import load_backend
from qmargin.kernels.head_reference import BLOCK_CLASSES, Lengths, ListOverflow, drop_targets_
from qmargin.losses.checks import check_label_tensor, checked_labels
from qmargin.losses.divergences import Alpha
from qmargin.losses.margin_loss import MarginLoss
from qmargin.losses.margins import ClosedForm, check_margin, closed_form

# Paths whose steps solve rows without a [B, k] matrix, and paths that give a loss for each row.
STEPS: dict[str, Callable[..., SparseStep | ChunkedStep]] = {
    "sparse": sparse_step,
    "chunked": chunked_step,
}
ROW_LOSSES: dict[str, Callable[..., tuple[Tensor, StepRecord]]] = {
    "dense": dense_rows,
    "sampled": sampled_rows,
    "top_k": top_k_rows,
}
# Attributes that change in every step, which nn.Module need not search for parameters.
CHANGING = frozenset(
    (
        *("_labels", "_num_resting", "_num_watched", "_reading", "_reason", "_stamp", "_step"),
        *("_unverified", "_was_chunked", "fused_gradient", "list_lengths"),
    )
)
PADDING = 256  # tile of the screen: the copy of the prototypes has a multiple of this many rows
NUM_MEASURED = 4  # steps whose support decides the next path
WATCH_EVERY = 64  # on one GPU, one step in this many is watched; saved states count to it
REST = 4096  # steps by lists after a row had more candidates than a matrix step can list


class MarginClassifier(nn.Module):
    """Classification head: prototypes of ``num_classes`` identities and the loss over all of them.

    Args:
        embedding_dim: ``d``.
        num_classes: ``k``, any number.
        loss: A ``MarginLoss``; its ``reduction`` applies to the head. ``"none"`` gives one
            value per row, on a single rank.
        path: Algorithm of a step: ``Sparse()`` (exact lists of active classes, ``alpha > 1``),
            ``Chunked()`` (blocks of classes, any alpha), ``Dense()`` (all cosines, any
            divergence), ``Sampled(rate=0.1)`` (Partial FC), ``TopK(percent=5)`` (the paper's
            procedure), or ``Auto()``, which chooses among the first three and says why in
            ``last_step``. The name of a path stands for its defaults: ``"auto"``, ``"sparse"``,
            ``"chunked"``, ``"dense"``, ``"sampled"``, ``"top_k"`` or ``"paper"``.
        gradient: Form of the prototype gradient: ``"dense"`` or ``"sparse"`` (COO) in
            ``prototypes.grad``, or ``"fused"`` for ``ExactSGD`` and ``SparseSGD``, which never
            build it.
        group: Process group whose ranks share the classes: each has the prototypes of a range,
            ``shard``, passes its own rows to ``forward``, and gets the mean loss over all rows,
            the same on every rank. Gradients of embeddings allow for the averaging of
            ``DistributedDataParallel``. None for one rank.
        device: Where the prototypes live.
        dtype: Of the prototypes: float32, or float64.

    Prototypes may be changed by any optimizer, any in-place operation on the parameter, and through
    ``prototypes.data``. After a write that PyTorch cannot see (a NumPy array that shares the
    memory, a stored view of ``.data``), call ``refresh(force=True)``.

    A prototype that is zero or not finite has no direction, so the loss of every row is NaN, and so
    are the gradients of the rows and of their classes, on every path that uses the class. A
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
    # Log measures of the classes, their version, and the smallest of each group.
    known_minima: tuple[Tensor, int | None, Tensor] | None = None

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        loss: MarginLoss,
        *,
        path: str | StepPath = "auto",
        gradient: str = "dense",
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        checks.check_arguments(embedding_dim, num_classes, loss)
        self.embedding_dim, self.num_classes = embedding_dim, num_classes
        self.ranks = Ranks(group)
        self.shard = ClassShard.of(num_classes, self.ranks.rank, self.ranks.world)
        self.loss, self.gradient = loss, gradient
        self._path = as_path(path)
        self.list_lengths: Lengths | None = None  # of the last sparse step
        self.num_redone = 0  # sparse steps whose lists were too long, taken again by blocks
        self._num_samples = 0
        self.fused_gradient: PrototypeGradient | None = None  # for a fused optimizer to apply
        self._step: StepRecord | None = None
        self._labels: Tensor | None = None  # of the last pass, over all ranks
        # A speculative step, and a function that restores the earlier state of margin and
        # reference.
        self._unverified: tuple[SparseStep | ChunkedStep, Callable[[], object]] | None = None
        self._reason = ""
        self._shares: deque[float] = deque(maxlen=NUM_MEASURED)
        self._home: tuple[Any, ...] | None = None
        self._kernels: Any = None
        self._kernels_key: tuple[Any, ...] | None = None
        self._stamp: Any = None  # see refresh
        self.may_have_moved = False
        self.has_optimizer = False  # of heads/optimizers.py
        self.captured_steps = CapturedSteps()
        # Non-blocking copy of the candidates of a step, and whether it was by one matrix.
        self._reading: tuple[Reading, bool] | None = None
        self._num_watched = self._num_resting = 0
        self.checked_wrapper = 0  # id of the last DistributedDataParallel that excludes them
        self._was_chunked = False
        checks.check_settings(self, dtype)
        check_margin(loss.margin, num_classes)
        if loss.reference is not None:
            loss.reference.check_classes(num_classes)
        checks.check_head_memory(self, torch.empty((), device=device, dtype=dtype))
        weights = torch.empty(len(self.shard), embedding_dim, device=device, dtype=dtype)
        drawn = int(torch.randint(1 << 62, ()))  # from the generator that torch.manual_seed seeds
        self.prototypes = Prototypes(draw_prototypes(self.shard, weights, drawn))
        if loss.reference is not None:
            loss.reference.to(weights.device)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute."""
        if name in CHANGING:
            self.__dict__[name] = value
        else:
            super().__setattr__(name, value)

    @property
    def path(self) -> StepPath:
        """Algorithm of a step; a path or its name may be assigned."""
        return self._path

    @path.setter
    def path(self, path: str | StepPath) -> None:
        self._path = as_path(path)

    @property
    def alpha_minus_one(self) -> float:
        """``alpha - 1``, for paths that need it as a number."""
        divergence = self.loss.divergence
        if not isinstance(divergence, Alpha) or _is_learned(divergence):
            raise ConfigError(
                f"path is {self.path.name!r}, which needs Alpha with a fixed alpha, "
                f"and this is {divergence}; use path='dense'"
            )
        return divergence.alpha_minus_one

    @property
    def screen_dtype(self) -> torch.dtype:
        """Precision of the copy of the prototypes that is screened."""
        return self.screen_dtype_for(self.prototypes)

    def screen_dtype_for(self, prototypes: Tensor) -> torch.dtype:
        """Precision of the copy of such prototypes."""
        asked: torch.dtype | None = getattr(self.path, "screen_dtype", None)
        is_half = prototypes.is_cuda and prototypes.dtype == torch.float32
        return asked or (torch.float16 if is_half else prototypes.dtype)

    @property
    def chunk_dtype(self) -> torch.dtype:
        """Precision of the operands of chunked steps."""
        asked: torch.dtype | None = getattr(self.path, "chunk_dtype", None)
        return asked or (self.screen_dtype if self.prototypes.is_cuda else self.prototypes.dtype)

    @property
    def list_capacity(self) -> int:
        """Groups that a sparse step may list per row, on average."""
        return getattr(self.path, "list_capacity", LIST_CAPACITY)

    @property
    def kernels(self) -> Any:
        """The operations of the sparse step for this device."""
        prototypes = self.prototypes
        key = (prototypes.device.type, prototypes.dtype, self.screen_dtype_for(prototypes))
        if key != self._kernels_key:
            self._kernels_key, self._kernels = key, load_backend(*key, len(self.shard))
        return self._kernels

    @property
    def last_step(self) -> StepStats | None:
        """Statistics of the last forward pass; None if it is not verified. Waits for a GPU."""
        if self._step is None or not self.is_verified:
            return None
        assert self._labels is not None  # of the same pass
        stats = self._step.stats(self._labels != self.loss.ignore_index)
        reasons = [reason for reason in (self._reason, stats.reason) if reason]
        return replace(stats, reason="; ".join(reasons))

    def refresh(self, *, force: bool = False) -> None:
        """Update the screened copy if the prototypes have changed or moved since."""
        prototypes = self.prototypes
        home = (
            prototypes.data_ptr(),
            prototypes.stride(),
            prototypes.device,
            prototypes.dtype,
            self.screen_dtype_for(prototypes),
        )
        if force or home != self._home or not self._is_current():
            with on_device(prototypes):
                self._refresh(home)

    @torch.inference_mode(False)  # training reuses a copy made in evaluation
    def _refresh(self, home: tuple[Any, ...]) -> None:
        prototypes = self.prototypes.detach()
        if home != self._home:
            checks.check_layout(self)
            k, d = prototypes.shape
            padded = -(-k // PADDING) * PADDING
            self.copy = prototypes.new_zeros((padded, d), dtype=self.screen_dtype)
            self.inverse_norms = prototypes.new_empty(k)
            self.copy_error = prototypes.new_zeros(())
        # In place: captured steps read it there.
        error = self.kernels.refresh_copy(prototypes, self.copy, self.inverse_norms)
        self.copy_error.copy_(error)
        self._home = home
        self.note_current()
        # Fused optimizers of PyTorch do not change the version of a parameter: as long as there is
        # a gradient, they may have applied it.
        self.may_have_moved = self.prototypes.grad is not None

    def _is_current(self) -> bool:
        """Whether the copy certainly matches the current prototypes."""
        if self.may_have_moved or self._home is None:
            return False
        stamp = self._read_stamp()
        return stamp is not None and stamp == self._stamp

    def note_current(self) -> None:
        """Note that the screened copy matches the current prototypes."""
        self._stamp = self._read_stamp()

    def _read_stamp(self) -> tuple[int, int] | None:
        prototypes = self.prototypes  # when replaced, writes through .data go unnoticed
        return prototypes.stamp() if isinstance(prototypes, Prototypes) else None

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        sizes: Sequence[int] | None = None,
        *,
        speculative: bool = False,
    ) -> Tensor:
        """Loss of a batch of embeddings ``[B, d]`` (any length) with labels ``[B]``.

        It is reduced as the loss says: a scalar, or ``[B]`` for ``reduction="none"``. Each rank
        passes its own rows, possibly none, and gets the mean or sum over all; ``sizes``, the number
        of rows of each rank, saves one exchange.

        A step guesses the sizes of its lists and waits for the device to check them.
        With ``speculative=True``, a fused gradient and one rank it does not wait: the host may
        launch the backward pass, and must call ``verify`` before it uses the loss or steps an
        optimizer.
        """
        with on_device(self.prototypes):
            return self._forward(embeddings, labels, sizes, speculative)

    def _forward(
        self, embeddings: Tensor, labels: Tensor, sizes: Sequence[int] | None, speculative: bool
    ) -> Tensor:
        checks.check_data_parallel(self)
        loss = self.captured_steps.replay(self, embeddings, labels)
        if loss is not None:
            self._step, self._labels = self.captured_steps.step, labels
            self._note_share()
            return loss
        criterion, prototypes = self.loss, self.prototypes
        checks.check_settings(self, prototypes.dtype)
        given, embeddings = embeddings, checks.check_embeddings(self, embeddings)
        check_label_tensor(labels, embeddings, "embeddings")
        ranks, ignored = self.ranks, criterion.ignore_index  # a negative number, for the margins
        if ranks.world > 1:
            if sizes is None:
                sizes = [size for (size,) in ranks.integers(len(labels), device=labels.device)]
            embeddings = gather_rows(embeddings.to(prototypes.dtype), ranks, sizes)
            labels = ranks.gather(labels, sizes)
        if len(labels) == 0:
            raise ShapeError("the batch is empty, so its mean loss is undefined; skip it")
        if not labels.is_cuda or criterion.debug:
            counted = labels.masked_fill(labels == ignored, 0)
            checked_labels(counted, self.num_classes, criterion.debug)
        if criterion.debug:
            checks.check_prototypes(self)
        choice = self._choose(len(labels))
        self._num_resting = max(0, self._num_resting - 1)
        if self._unverified is not None and self.fused_gradient is not None:
            raise ConfigError(
                "the last forward pass was speculative and its gradient is not verified; call "
                "head.verify() or head.discard() before the next"
            )
        self._step = self._unverified = None  # their memory is free for this step
        self._labels = labels
        form = closed_form(criterion.margin)
        has_reference = criterion.active_reference is not None
        is_step = choice.path in STEPS and not criterion.debug
        by_matrix = choice.path in STEPS and choice.by_matrix
        by_matrix = by_matrix and fits(self, choice.path, len(labels))
        if is_step and form is not None and by_matrix and not has_reference:
            with without_autocast(embeddings):
                self.refresh()
                loss, self._step = fused_step(self, given, labels, form)
            self._reason, self._was_chunked = choice.reason, choice.path == "chunked"
            self._note_share()
            return loss
        is_alone = self.gradient == "fused" and ranks.world == 1
        speculative = speculative and is_alone and torch.is_grad_enabled()
        overflow = None
        can_fuse = is_step and form is not None and self._can_fuse and not by_matrix
        by_blocks = choice.path == "chunked"
        if by_blocks:
            can_fuse = can_fuse and not has_reference and has_kernels(self)
        if can_fuse:
            assert form is not None
            with without_autocast(embeddings):
                self.refresh()
                loss, overflow = self._take_fused(given, labels, form, speculative, by_blocks)
            if loss is not None:
                self._reason, self._was_chunked = choice.reason, by_blocks
                if self._unverified is None:
                    self._note_share()
                return loss
        with without_autocast(embeddings):
            wide = embeddings.to(prototypes.dtype)
            unit, norms = unit_rows(wide, labels, ignored, self.kernels)
            checks.check_norms(norms, debug=criterion.debug)
            if choice.path in ("sparse", "chunked") or self.gradient == "fused":
                self.refresh()
            rows = (unit, labels.long(), norms)
            loss, self._step = self._take(
                choice.path, *rows, speculative, overflow=overflow, by_matrix=by_matrix
            )
        self._reason = choice.reason
        self._was_chunked = isinstance(self._step, ChunkedStep | DenseStep)
        if self._unverified is None:
            self._note_share()
        return loss

    @property
    def is_verified(self) -> bool:
        """False after a speculative forward pass, until ``verify`` or ``discard`` is called."""
        return self._unverified is None

    def verify(self) -> bool:
        """Return True if the last forward pass is valid; waits for the device.

        False means that the list sizes of a speculative pass did not suffice: all gradients of the
        batch are invalid, including those of the backbone. Repeat it without ``speculative``.
        """
        if self._unverified is None:
            return True
        try:
            is_valid = self._unverified[0].verify()
        except ListOverflow:
            is_valid = False
        if is_valid:
            self._unverified = None
            self._note_share()
        else:
            self.discard()
        return is_valid

    def discard(self) -> None:
        """Undo a speculative forward pass."""
        if self._unverified is not None:
            step, restore_margin = self._unverified
            restore_margin()
            if step.owns(self.fused_gradient):
                self.fused_gradient = None
            self._unverified = self.list_lengths = self._step = None

    def _note_share(self) -> None:
        """Record the support of the last step, by which ``auto`` chooses.

        On one GPU nothing waits: at intervals the statistics of the rows are copied to the host,
        and read in a later step, when the copy is complete.
        """
        step = self._step
        if not isinstance(self.path, Auto) or not isinstance(
            step, SparseStep | ChunkedStep | MatrixStep | DenseStep
        ):
            return
        if isinstance(step, SparseStep) or not self.prototypes.is_cuda or self.ranks.world > 1:
            self._shares.append(step.class_share())  # the host knows how long lists are
            return
        self._num_watched = (self._num_watched + 1) % WATCH_EVERY
        is_due = self._num_watched == 1 or not self._shares
        if not is_due and self._reading is None:
            return
        if not self._is_sparse_loss or torch.cuda.is_current_stream_capturing():
            return  # the path is known; nothing may be read inside a user's own graph
        if self._reading is not None:
            if not self._reading[0].is_ready():
                return
            self._learn()
        if is_due:
            self._reading = Reading(step.candidates()), isinstance(step, MatrixStep)

    def _learn(self) -> None:
        """Record the number of candidates of each row of the step that was watched."""
        assert self._reading is not None
        (reading, is_matrix), self._reading = self._reading, None
        candidates = reading.wait()
        self._shares.append(float(candidates.double().mean()) / self.num_classes)
        if is_matrix:
            if float(candidates.max()) > CAPACITY:
                self._num_resting = REST
            choice = self._choose(len(candidates))
            if choice.path == "sparse" and choice.by_matrix:
                self._reason = choice.reason
            else:
                self.captured_steps = CapturedSteps()  # the next step takes a different path

    @property
    def _is_sparse_loss(self) -> bool:
        """Whether posteriors are zero for some classes, so that the support decides the path."""
        divergence = self.loss.divergence
        is_known = isinstance(divergence, Alpha) and not _is_learned(divergence)
        return is_known and self.alpha_minus_one > 0.0

    @property
    def _can_fuse(self) -> bool:
        """Whether kernels compute a whole sparse step."""
        return self.ranks.world == 1 and hasattr(self.kernels, "find_support")

    def _take_fused(
        self,
        embeddings: Tensor,
        labels: Tensor,
        form: ClosedForm,
        speculative: bool,
        by_blocks: bool,
    ) -> tuple[Tensor | None, ListOverflow | None]:
        """Take a step by kernels: its loss, or the reason why lists do not suit it."""
        restore_margin, has_gradient = _snapshot(self.loss), needs_gradient(self, embeddings)
        make: Callable[..., Any] = fused_chunked_step if by_blocks else fused_sparse_step

        def take(**options: Any) -> tuple[Any, Tensor]:  # what needs no wait comes before it
            step = make(self, embeddings, labels, form, **options)
            return step, attach_loss(step, embeddings, has_gradient)

        try:
            step, loss = take()
            if speculative:
                self._unverified = (step, restore_margin)
            elif not step.verify():  # redo it without guessing
                restore_margin()
                step, loss = take(**({"is_certain": True} if by_blocks else {}))
                step.verify()
        except ListOverflow as overflow:
            restore_margin()
            return None, overflow
        self._step = step
        return loss, None

    def _take(
        self,
        path: str,
        unit: Tensor,
        labels: Tensor,
        norms: Tensor,
        speculative: bool,
        *,
        overflow: ListOverflow | None,
        by_matrix: bool,
    ) -> tuple[Tensor, StepRecord]:
        """Take a step by some path: the loss of the batch and the record of the step.

        After an ``overflow`` of its lists, a sparse step goes by blocks at once.
        """
        if path not in STEPS:
            # Every rank computes these over all classes.
            unit, norms = equal_share(unit, self.ranks), equal_share(norms, self.ranks)
            rows, record = ROW_LOSSES[path](self, unit, labels, norms)
            return reduce_rows(rows, labels, self.loss.ignore_index, self.loss.reduction), record
        restore_margin = _snapshot(self.loss)

        def take(path: str, **hints: Any) -> tuple[Tensor, Any]:
            make: Callable[..., Any] = STEPS[path]
            if path == "sparse" and by_matrix:
                make = matrix_step
            step = make(self, unit, labels, **hints)
            return step_loss(step, unit, labels, norms), step

        try:
            if overflow is not None:
                raise overflow
            loss, step = take(path)
            if speculative:
                self._unverified = (step, restore_margin)
            elif not step.verify():  # redo it without guessing
                restore_margin()
                loss, step = take(path, **({} if path == "sparse" else {"is_certain": True}))
                step.verify()
        except ListOverflow as overflow:
            self.list_lengths = None
            self.num_redone += 1
            restore_margin()
            loss, step = take("chunked", maxima=overflow.maxima, is_certain=True)
            assert isinstance(step, ChunkedStep)
            step.num_overflowed = len(labels)
        return loss, step

    def _choose(self, num_rows: int) -> Choice:
        """The path of this step."""
        if not isinstance(self.path, Auto):
            return Choice(self.path.name, f"path={self.path.name!r} was requested")
        divergence = self.loss.divergence
        is_known = isinstance(divergence, Alpha) and not _is_learned(divergence)
        is_resting = self._num_resting > 0
        has_matrix = self._is_sparse_loss and not is_resting and fits(self, "sparse", num_rows)
        choice = choose_path(
            alpha=self.loss.alpha_value if is_known else None,
            device=self.prototypes.device.type,
            num_rows=num_rows,
            num_classes=self.num_classes,
            dim=self.embedding_dim,
            class_share=sum(self._shares) / len(self._shares) if self._shares else None,
            was_chunked=self._was_chunked,
            has_matrix=has_matrix,
            num_ranks=self.ranks.world,
        )
        return choice._replace(by_matrix=False) if is_resting else choice

    @property
    def weight(self) -> nn.Parameter:
        """The prototypes, under the name that most heads use."""
        return self.prototypes

    def cosines(self, embeddings: Tensor) -> Tensor:
        """Cosines with every class ``[B, k]``, differentiable; all ranks have to call it."""
        embeddings = checks.check_embeddings(self, embeddings).to(self.prototypes.dtype)
        return nn.functional.normalize(embeddings) @ unit_prototypes(self).t()

    @torch.no_grad()
    def predict(self, embeddings: Tensor) -> Tensor:
        """Most similar class of each row, ``[B]`` int64, without a ``[B, k]`` matrix.

        With several ranks all have to call it, each with its own rows.
        """
        rows = checks.check_embeddings(self, embeddings).detach().to(self.prototypes.dtype)
        ranks, sizes = self.ranks, [len(embeddings)]
        if ranks.world > 1:
            sizes = [size for (size,) in ranks.integers(len(rows), device=rows.device)]
            rows = ranks.gather(rows, sizes)
        best, found = self._nearest(rows)  # lengths of rows do not change the order
        if ranks.world > 1:
            is_best = best == ranks.max_(best.clone())
            found = -ranks.max_(-torch.where(is_best, found, self.num_classes))
        return ranks.part(found, sizes)

    @torch.no_grad()
    def gaps(
        self, embeddings: Tensor, labels: Tensor, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Cosine of each row with its own class minus the largest other one, ``[B]``.

        A row has zero loss where its gap is at least ``qmargin.reach`` of the loss at its cosine.
        All classes are compared, also where the path samples them, by one product with blocks of
        prototypes. Ignored rows are NaN. With several ranks all have to call it, each with its own
        rows; ``sizes``, the number of rows of each rank, saves one exchange.
        """
        rows = checks.check_embeddings(self, embeddings).detach().to(self.prototypes.dtype)
        check_label_tensor(labels, embeddings, "embeddings")
        ranks = self.ranks
        if sizes is None:
            sizes = [size for (size,) in ranks.integers(len(rows), device=rows.device)]
        rows, labels = ranks.gather(rows, sizes), ranks.gather(labels, sizes)
        with without_autocast(rows):
            rows = nn.functional.normalize(rows)
            local, columns = own_labels(self, labels)
            targets = rows.new_zeros(len(rows))
            if len(self.shard):
                own = nn.functional.normalize(self.prototypes[columns])
                targets = torch.where(local >= 0, (rows * own).sum(1), 0.0)
            others, _ = self._nearest(rows, local)
        gaps = ranks.sum_(targets) - ranks.max_(others)
        return ranks.part(gaps.masked_fill(labels == self.loss.ignore_index, torch.nan), sizes)

    def _nearest(self, rows: Tensor, left_out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Largest product with a unit prototype of this rank, ``[B]``, and the class that has it.

        ``left_out`` ``[B]`` is a class of this rank that is passed over, or -1.
        """
        best = rows.new_full((len(rows),), -torch.inf)
        found = torch.full_like(best, self.num_classes, dtype=torch.int64)
        for start in range(0, len(self.shard), BLOCK_CLASSES):
            block = nn.functional.normalize(self.prototypes[start : start + BLOCK_CLASSES])
            products = rows @ block.t()
            if left_out is not None:
                drop_targets_(products, left_out - start)
            value, index = products.max(1)
            is_better = value > best
            found = torch.where(is_better, self.shard.start + start + index, found)
            best = torch.where(is_better, value, best)
        return best, found

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load prototypes that are saved alone, or as ``weight``, as other heads save them."""
        own, other = f"{prefix}prototypes", f"{prefix}weight"
        if other in state_dict and own not in state_dict:
            state_dict[own] = state_dict.pop(other)
        extra = f"{prefix}_extra_state"
        if own in state_dict and extra not in state_dict:
            state_dict[extra] = self.get_extra_state()  # samples and choices continue
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def next_seed(self) -> int:
        """Seed of the next sample of classes, from ``Sampled.seed`` and the samples so far."""
        self._num_samples += 1
        return (self._sample_seed * 0x9E3779B97F4A7C15 + self._num_samples) % (1 << 63)

    @property
    def _sample_seed(self) -> int:
        return self.path.seed if isinstance(self.path, Sampled) else 0

    def get_extra_state(self) -> Tensor:
        """State on which the next samples and the next choice of path depend, as integers."""
        if self._reading is not None:
            self._learn()
        shares = torch.tensor(list(self._shares), dtype=torch.float64).view(torch.int64)
        # Three numbers in one: older states have the last alone.
        path = WATCH_EVERY * self._num_resting + self._num_watched
        numbers = [self._sample_seed, self._num_samples, 2 * path + self._was_chunked]
        return torch.cat([torch.tensor(numbers, dtype=torch.int64), shares])

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the state of ``get_extra_state``."""
        seed, self._num_samples, path = (int(number) for number in state[:3])
        if isinstance(self.path, Sampled):
            self.path = replace(self.path, seed=seed)
        self._num_resting, self._num_watched = divmod(path >> 1, WATCH_EVERY)
        self._was_chunked, self._reading = bool(path & 1), None
        shares = state[3:].cpu().clone().view(torch.float64)
        self._shares = deque(shares.tolist(), maxlen=NUM_MEASURED)

    def extra_repr(self) -> str:
        """Shown by ``print(head)``."""
        is_default = self.path == type(self.path)()
        path = repr(self.path.name) if is_default else repr(self.path)
        text = f"{self.embedding_dim}, {self.num_classes}, path={path}"
        if not self.shard.is_whole:
            text += f", classes {self.shard.start} to {self.shard.stop - 1}"
        return f"{text}, gradient={self.gradient!r}, screen_dtype={self.screen_dtype}"

    def __getstate__(self) -> dict[str, Any]:
        """State of a copy or a pickle, without pending steps and without the screened copy."""
        pending = "fused_gradient _labels _step _unverified _reading"
        derived = "_home _kernels _kernels_key _stamp known_minima"
        names = f"{pending} {derived}".split()
        fresh = {**dict.fromkeys(names), "has_optimizer": False}
        fresh["captured_steps"] = CapturedSteps()
        state = {**self.__dict__, **fresh, "_shares": deque(self._shares, NUM_MEASURED)}
        for name in ("copy", "inverse_norms", "copy_error"):
            state.pop(name, None)
        return state


def _snapshot(loss: MarginLoss) -> Callable[[], object]:
    """Return a function that restores the state of margin and reference."""
    reference = loss.reference
    changing: list[nn.Module] = [loss.margin] if isinstance(loss.margin, nn.Module) else []
    if reference is not None and reference.changes_in_training:
        changing.append(reference)
    states = [(part, deepcopy(part.state_dict())) for part in changing]
    return lambda: [part.load_state_dict(state) for part, state in states]


def _is_learned(divergence: Alpha) -> bool:
    return isinstance(divergence.alpha, Tensor) and divergence.alpha.requires_grad
