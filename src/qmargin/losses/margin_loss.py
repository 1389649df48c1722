"""``MarginLoss``: a divergence times a margin, and the statistics of a step."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from qmargin.errors import ConfigError, ShapeError
from qmargin.losses import checks, fused
from qmargin.losses.divergences import (
    Alpha,
    Divergence,
    check_divergence,
    generic_loss,
    solve_generic,
)
from qmargin.losses.functional import is_on_cpu, lift_target, value_of
from qmargin.losses.margins import (
    Margin,
    check_margin,
    closed_form,
    register_learnable,
    warn_if_unreachable,
)
from qmargin.losses.reach import reach
from qmargin.losses.references import (
    Reference,
    ReferencedMargin,
    check_reference,
    log_reference_of,
    warn_if_class_unreachable,
    warn_if_steep,
)

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


class LossOutput(NamedTuple):
    """Loss and solver statistics of each row; only ``loss`` carries gradients."""

    loss: Tensor  # [B]
    tau: Tensor  # [B]
    support_size: Tensor  # [B] classes with positive posterior
    target_posterior: Tensor  # [B]
    mass_error: Tensor  # [B] |sum of the posterior - 1|


def margin_loss_with_stats(
    cosines: Tensor,
    labels: Tensor,
    *,
    divergence: Divergence,
    margin: Margin,
    scale: float,
    norms: Tensor | None = None,
    ignore_index: int = -100,
    debug: bool = False,
    log_reference: Tensor | None = None,
) -> LossOutput:
    """Compute the loss of each row with tau, support size and target posterior.

    The margin turns the target's cosine into a logit and a log reference; every other class has
    reference measure one, or the given one. No mask of shape ``[B, k]`` is built.

    Args:
        cosines: ``[B, k]`` (or ``[..., k]``); half precision is computed in float32.
        labels: Class of each row, integers ``[B]``.
        divergence: Shape of the posterior.
        margin: Requirement on the target.
        scale: ``s``, the factor from cosines to logits.
        norms: Lengths of the embeddings ``[B]``, for margins that depend on them.
        ignore_index: Rows with this label have zero loss and gradient, whatever they hold; their
            statistics are meaningless.
        debug: Check labels and the range of cosines on every device; GPUs synchronise.
        log_reference: Log reference measure of the other classes, broadcastable to the cosines,
            ``[k]`` or ``[B, k]``. The margin sets the target's.
    """
    settings = scale, norms, ignore_index, debug
    if log_reference is None:
        found = _fused(cosines, labels, divergence, margin, *settings, "none", statistics=True)
        if found is not None:
            return LossOutput(*found)
    scale = checks.check_scale(scale)
    check_divergence(divergence)
    ignore_index = checks.check_ignore_index(ignore_index)
    cosines = checks.check_floating(cosines, "cosines")
    check_margin(margin, cosines.shape[-1])
    checks.check_label_tensor(labels, cosines, "cosines")
    if norms is not None:
        checks.check_norms(norms, labels)
    reference = checks.check_reference(log_reference, cosines)
    shape, rows, labels = labels.shape, cosines.reshape(-1, cosines.shape[-1]), labels.reshape(-1)
    if reference is not None:
        reference = reference.reshape(rows.shape)
    is_ignored, labels = _checked_rows(rows, labels, ignore_index, debug)
    rows, targets = lift_target(rows, labels)
    marked = labels
    if norms is not None:
        norms = norms.reshape(-1)
    if is_ignored is not None:
        # Ignored rows may hold anything, NaN included, and none of it may reach a gradient.
        targets = torch.where(is_ignored, 0.0, targets)
        norms = None if norms is None else torch.where(is_ignored, 1.0, norms)
        marked = torch.where(is_ignored, -1, labels)
    # One number per row is cheap in float64, and s * m can be far larger than what is left of it.
    term = margin(targets.double(), scale, labels=marked, norms=norms)
    if isinstance(divergence, Alpha):
        lifted = labels, term.logits, term.log_reference
        alpha = divergence.as_tensor()
        solved = value_of(rows, reference, alpha, lifted=lifted, is_ignored=is_ignored, scale=scale)
        stats = solved.tau, solved.support_size, solved.target_posterior, solved.mass_error
        output = LossOutput(solved.value, *stats)
    else:  # the generic solver needs full [B, k] matrices
        index = labels[:, None]
        logits = rows.double() * scale
        if is_ignored is not None:
            logits = torch.where(is_ignored[:, None], 0.0, logits)
        logits = logits.scatter(1, index, term.logits[:, None])
        wide = torch.zeros_like(logits) if reference is None else reference.double()
        reference = wide.scatter(1, index, term.log_reference[:, None])
        one_hot = torch.zeros_like(logits).scatter(1, index, 1.0)
        loss = generic_loss(logits, one_hot, reference, divergence)
        with torch.no_grad():
            tau, posterior = solve_generic(logits, reference, divergence)
        output = LossOutput(
            loss.to(rows.dtype),
            tau.squeeze(1).to(rows.dtype),
            (posterior > 0).sum(1),
            posterior.gather(1, index).squeeze(1).to(rows.dtype),
            (posterior.sum(1) - 1.0).abs().to(rows.dtype),
        )
    if term.penalty is not None:
        output = output._replace(loss=output.loss + term.penalty.to(output.loss.dtype))
    if is_ignored is not None:
        output = output._replace(loss=torch.where(is_ignored, 0.0, output.loss))
    return output if len(shape) == 1 else LossOutput(*(part.reshape(shape) for part in output))


def _checked_rows(
    rows: Tensor, labels: Tensor, ignore_index: int, debug: bool
) -> tuple[Tensor | None, Tensor]:
    """Mask of ignored rows (None if a CPU finds none), and valid labels in int64."""
    is_ignored = labels == ignore_index
    if is_on_cpu(rows) and not bool(is_ignored.any()):
        checks.check_labels(labels, rows.shape[1], debug)
        if debug:
            checks.check_cosines(rows, is_ignored)
        return None, labels.long()
    labels = checks.checked_labels(torch.where(is_ignored, 0, labels), rows.shape[1], debug)
    if debug:
        checks.check_cosines(rows, is_ignored)
    return is_ignored, labels


def _fused(
    cosines: Tensor,
    labels: Tensor,
    divergence: Divergence,
    margin: Margin,
    scale: float,
    norms: Tensor | None,
    ignore_index: int,
    debug: bool,
    reduction: Reduction,
    *,
    statistics: bool = False,
) -> tuple[Tensor, ...] | None:
    """Loss by kernels only, with statistics on request; None where they do not support it."""
    form = closed_form(margin)
    if form is None or not isinstance(divergence, Alpha) or not isinstance(cosines, Tensor):
        return None
    scale = checks.check_scale(scale)
    ignore_index = checks.check_ignore_index(ignore_index)
    checks.check_classes(cosines, "cosines")
    rows = cosines if cosines.dim() == 2 else cosines.reshape(-1, cosines.shape[-1])
    if not fused.serves(rows, divergence, scale):
        return None
    checks.check_label_tensor(labels, cosines, "cosines")
    if norms is not None:
        checks.check_norms(norms, labels)
    shape, labels = labels.shape, labels.reshape(-1)
    if debug or labels.device.type == "cpu":
        is_ignored = labels == ignore_index
        checks.checked_labels(torch.where(is_ignored, 0, labels), rows.shape[1], debug)
        if debug:
            checks.check_cosines(rows, is_ignored)
    b = divergence.alpha_minus_one
    settings = fused.Settings(b, scale, form, ignore_index, reduction)
    found = fused.loss_of(rows, labels, settings, statistics=statistics)
    if found is None or len(shape) == 1 or reduction != "none":
        return found
    return tuple(part.reshape(shape) for part in found)


def margin_loss(
    cosines: Tensor,
    labels: Tensor,
    *,
    divergence: Divergence,
    margin: Margin,
    scale: float,
    norms: Tensor | None = None,
    ignore_index: int = -100,
    debug: bool = False,
) -> Tensor:
    """Compute the loss of each row, ``[B]``; arguments as for ``margin_loss_with_stats``."""
    settings = scale, norms, ignore_index, debug
    found = _fused(cosines, labels, divergence, margin, *settings, "none")
    if found is not None:
        return found[0]
    return margin_loss_with_stats(
        cosines,
        labels,
        divergence=divergence,
        margin=margin,
        scale=scale,
        norms=norms,
        ignore_index=ignore_index,
        debug=debug,
    ).loss


class MarginLoss(nn.Module):
    """Loss with any divergence, any margin and any reference measure, at a scale.

    It has no state of its own. An alpha or a margin that is a parameter, a margin that is a module
    (AdaFace keeps running statistics) and the reference are registered, so that optimizers and
    ``state_dict()`` include them.

    Args:
        divergence: ``Alpha(1.25)``, or any other ``Divergence``.
        margin: ``PriorMargin(0.2)``, ``CosineMargin(0.35)``, ``AngularMargin(0.5)``, a sum, ...
        scale: ``s``, positive.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value per row.
        ignore_index: Rows with this label have zero loss and zero gradient, and do not count in
            the mean. The mean of a batch of such rows is NaN, with zero gradients, as in torch.
        debug: Check labels on a GPU too, and cosines on any device; a GPU then synchronises.
        label_smoothing: Not supported: a margin needs one target; the error says what to use.
        weight: Not supported: weigh the rows of ``reduction="none"`` instead.
        reference: Reference measure of the classes: ``ClassPrior(counts)``, ``LookAlike(0.1)``,
            ``Quality(0.33)``, a sum of them, or one of your own. A reference that equals 1
            everywhere, as with strength zero, is left out.

    Examples:
        >>> from qmargin.losses.margins import PriorMargin
        >>> loss_fn = MarginLoss(Alpha(1.25), PriorMargin(0.2), scale=32.0, reduction="none")
        >>> loss_fn(torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.1]]), torch.tensor([0, 0]))
        tensor([ 0.0000, 15.8497])
    """

    def __init__(
        self,
        divergence: Divergence,
        margin: Margin,
        *,
        scale: float,
        reduction: Reduction = "mean",
        ignore_index: int = -100,
        debug: bool = False,
        label_smoothing: float = 0.0,
        weight: Tensor | None = None,
        reference: Reference | None = None,
    ) -> None:
        super().__init__()
        if label_smoothing != 0.0:
            raise ConfigError(
                f"label_smoothing is {label_smoothing!r} and a margin needs a single target class; "
                "pass a distribution to qmargin.fenchel_young_loss, without a margin"
            )
        if weight is not None:
            raise ConfigError(
                f"weight is {checks.describe(weight)} and margin losses have no class weights; use "
                "reduction='none' and multiply each row by the weight of its class"
            )
        check_margin(margin)
        if reduction not in REDUCTIONS:
            raise ConfigError(f"reduction is {reduction!r}; known ones are {', '.join(REDUCTIONS)}")
        self.divergence = check_divergence(divergence)
        self.margin = margin
        self.scale = checks.check_scale(scale)
        self.reduction: Reduction = reduction
        self.ignore_index = checks.check_ignore_index(ignore_index)
        self.debug = debug
        if isinstance(divergence, Alpha) and isinstance(divergence.alpha, nn.Parameter):
            self.alpha = divergence.alpha
        register_learnable(self, margin, "margin")  # modules register their own
        check_reference(reference, margin, self._b)
        self.reference = reference
        if self.alpha_value is not None:
            warn_if_unreachable(margin, alpha=self.alpha_value, scale=self.scale)
            if reference is not None:
                b = self.alpha_value - 1.0
                warn_if_class_unreachable(reference, margin, b=b, scale=self.scale)
                warn_if_steep(reference, b=b, scale=self.scale)

    @property
    def _b(self) -> float | None:
        return self.divergence.alpha_minus_one if isinstance(self.divergence, Alpha) else None

    @property
    def alpha_value(self) -> float | None:
        """Order of the divergence as a number; None for other divergences."""
        b = self._b
        return None if b is None else b + 1.0

    @property
    def active_reference(self) -> Reference | None:
        """The reference; None for one that changes nothing."""
        reference = self.reference
        return None if reference is None or reference.is_one(self.scale) else reference

    @property
    def target_margin(self) -> Margin:
        """The margin, combined with the reference if there is one."""
        reference = self.active_reference
        if reference is None:
            return self.margin
        return ReferencedMargin(self.margin, reference, self._b)

    @property
    def effective_margin(self) -> float | None:
        """The cosine gap the margin adds (M12), without a reference; None if it is not a number."""
        if self.alpha_value is None:
            return None
        return self.margin.effective(self.alpha_value, self.scale)

    @property
    def reach(self) -> float | None:
        """The cosine gap from which on a row has zero loss, see ``qmargin.reach`` (M12).

        None with a reference, which may give each row a different one.
        """
        if self.alpha_value is None or self.active_reference is not None:
            return None
        return reach(self.alpha_value, self.scale, self.margin)

    def with_stats(
        self,
        cosines: Tensor,
        labels: Tensor,
        norms: Tensor | None = None,
        prototypes: Tensor | None = None,
    ) -> LossOutput:
        """Unreduced loss with tau, support size, target posterior and residual, per row."""
        reference, log_reference = self.active_reference, None
        if reference is not None:
            cosines = checks.check_floating(cosines, "cosines")
            checks.check_label_tensor(labels, cosines, "cosines")
            given = (cosines, labels, self.scale, prototypes)
            log_reference = log_reference_of(reference, *given)
        return margin_loss_with_stats(
            cosines,
            labels,
            divergence=self.divergence,
            margin=self.target_margin,
            scale=self.scale,
            norms=norms,
            ignore_index=self.ignore_index,
            debug=self.debug,
            log_reference=log_reference,
        )

    def forward(
        self,
        cosines: Tensor,
        labels: Tensor,
        norms: Tensor | None = None,
        prototypes: Tensor | None = None,
    ) -> Tensor:
        """Mean or sum over the rows that are not ignored, or one loss per row ``[B]``.

        ``norms`` ``[B]`` are the lengths of the embeddings and ``prototypes`` ``[k, d]`` the
        vectors of the classes, for margins and references that use them.
        """
        if self.active_reference is not None:
            rows = self.with_stats(cosines, labels, norms, prototypes).loss
            return self._reduced(rows, labels)
        key, is_planned = None, norms is None and not self.debug and self.reduction != "none"
        if is_planned and fused.may_plan(cosines):
            kinds = id(self.divergence), id(self.margin), self.scale
            key = fused.plan_key(cosines, labels, *kinds, self.reduction, self.ignore_index)
            loss = fused.planned_loss(key, cosines, labels)
            if loss is not None:
                return loss
        settings = self.scale, norms, self.ignore_index, self.debug, self.reduction
        found = _fused(cosines, labels, self.divergence, self.margin, *settings)
        if found is not None:
            if key is not None and isinstance(self.divergence, Alpha):
                form = closed_form(self.margin)
                assert form is not None
                b, ignored = self.divergence.alpha_minus_one, self.ignore_index
                planned = fused.Settings(b, self.scale, form, ignored, self.reduction)
                fused.remember(key, cosines, labels, planned, self.divergence, self.margin)
            return found[0]
        return self._reduced(self.with_stats(cosines, labels, norms).loss, labels)

    def _reduced(self, loss: Tensor, labels: Tensor) -> Tensor:
        if self.reduction == "none":
            return loss
        if self.reduction == "sum":
            return loss.sum()
        if loss.numel() == 0:
            raise ShapeError(
                "the batch is empty, so its mean loss is undefined; skip empty batches "
                "or use reduction='none'"
            )
        count = (labels != self.ignore_index).sum()
        if is_on_cpu(loss) and count == loss.numel():
            return loss.mean()
        return loss.sum() / count.clamp_min(1) + 0.0 / count  # of no rows: NaN, zero gradients

    def extra_repr(self) -> str:
        """Shown by ``print(loss_fn)``."""
        parts = [f"{self.divergence}", f"scale={self.scale:g}"]
        if not isinstance(self.margin, nn.Module):
            parts.insert(1, f"{self.margin}")
        if self.effective_margin is not None:
            parts.append(f"effective_margin={self.effective_margin:.3g}")
        return ", ".join(parts)
