"""Loss of rows by kernels only: two launches forward, one backward, no wait for the device.

It serves the alpha-divergence with a margin in closed form, on a GPU, in float32, bfloat16 or
float16. All other cases use ``functional`` and ``margin_loss``; tests compare both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qmargin.kernels import dispatch
from qmargin.kernels import rows as row_kernels
from qmargin.kernels.rows import Rows
from qmargin.losses import checks
from qmargin.losses.divergences import Alpha, Divergence
from qmargin.losses.margins import ClosedForm


class Settings(NamedTuple):
    """Settings of a loss."""

    b: float  # alpha - 1
    scale: float
    margin: ClosedForm
    ignore_index: int | None
    reduction: str  # "mean", "sum" or "none"


class Solved(NamedTuple):
    """Results of one call; the first is the loss, reduced or not."""

    loss: Tensor
    anchor: Tensor
    level: Tensor
    target_gradient: Tensor
    share: Tensor | None  # of a row in the reduced loss
    tau: Tensor
    support_size: Tensor
    mass_error: Tensor
    target_posterior: Tensor


def serves(values: Tensor, divergence: Divergence, scale: float) -> bool:
    """Whether kernels support rows of these values with this divergence."""
    if not isinstance(divergence, Alpha) or isinstance(divergence.alpha, Tensor):
        return False
    if torch.compiler.is_compiling():  # shapes may be symbolic: the operator checks them
        is_there = values.device.type == "cuda" or dispatch.may_interpret
        return is_there and values.dtype in row_kernels.FUSED_DTYPES and values.numel() > 0
    if torch._C._are_functorch_transforms_active():
        return False
    return row_kernels.may_fuse(values, scale)


def loss_of(
    values: Tensor, labels: Tensor, settings: Settings, *, statistics: bool = False
) -> tuple[Tensor, ...] | None:
    """Loss of ``values`` ``[B, k]`` with labels ``[B]``, None where kernels fail to build.

    With ``statistics`` also tau, support size, target posterior and mass error, ``[B]`` each.
    """
    if torch.compiler.is_compiling():
        b, scale, margin, ignore_index, reduction = settings
        traced: Callable[..., tuple[Tensor, ...]] = TracedLoss.apply
        found = Solved(*traced(values, labels, b, scale, *margin, ignore_index, reduction))
        more = found.tau, found.support_size, found.target_posterior, found.mass_error
        return (found.loss, *more) if statistics else (found.loss,)
    apply: Callable[..., tuple[Tensor, ...]] = FusedLoss.apply
    try:
        return apply(values, labels, settings, statistics)
    except Exception as error:  # errors of Triton, its compiler or the driver
        row_kernels.report_fault(error)
        return None


def _solve(values: Tensor, labels: Tensor, settings: Settings, statistics: bool) -> Solved:
    from qmargin.kernels.triton import rows as kernels

    b, scale, margin, ignore_index, reduction = settings
    results = kernels.empty_results(values.shape[0], values.device, statistics=statistics)
    given = values, scale, b, labels, results
    kernels.launch_solve(*given, margin=margin, ignore_index=ignore_index)
    loss, share = results.value, None
    if reduction != "none":
        is_mean = reduction == "mean"
        loss, share = kernels.reduce_rows(loss, labels, mean=is_mean, ignore_index=ignore_index)
    solution = results.anchor, results.level, results.target_gradient, share
    more = results.tau, results.support_size, results.mass_error, results.target_posterior
    return Solved(loss, *solution, *more)


class FusedLoss(torch.autograd.Function):
    """Loss in eager mode: it calls the kernels directly, because operators cost time."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, labels: Tensor, settings: Settings, statistics: bool
    ) -> tuple[Tensor, ...]:
        solved = _solve(values, labels, settings, statistics)
        if ctx.needs_input_grad[0]:
            ctx.settings = settings
            saved = solved.anchor, solved.level, solved.target_gradient, solved.share
            ctx.save_for_backward(values, labels, *saved)
        if not statistics:
            return (solved.loss,)
        more = solved.tau, solved.support_size, solved.target_posterior, solved.mass_error
        ctx.mark_non_differentiable(*more)
        return (solved.loss, *more)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """The gradient of the whole row in one launch."""
        values, labels, anchor, level, target_gradient, share = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _again(values, labels, grad, ctx.settings), None, None, None
        from qmargin.kernels.triton import rows as kernels

        b, scale, _, ignore_index, _ = ctx.settings
        solution = anchor, level, target_gradient, share
        gradient = kernels.write_gradient(
            values, scale, b, labels, solution, grad, ignore_index=ignore_index
        )
        return gradient, None, None, None


class Plan:
    """Reduced loss on rows of one shape: its launches are recorded once and then repeated.

    Numbers of the rows are in one tensor: anchor and level, float64, then the loss of each row,
    the gradient of its target and the share of a row in the loss, float32.
    """

    def __init__(
        self, settings: Settings, values: Tensor, labels: Tensor, owners: tuple[Any, ...]
    ) -> None:
        self.settings, self.num_rows, self.owners = settings, len(labels), owners
        self.device, self.capacity, self.layout = values.device, 0, _layout(values, labels)
        self.forward: Any = None
        self.backward: Any = None

    def solve(self, values: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, and the numbers of the rows."""
        device, count = self.device, self.num_rows
        numbers = torch.empty(3 * count + 2, dtype=torch.float64, device=device)
        loss = torch.empty((), dtype=torch.float32, device=device)
        lists = torch.empty(count * self.capacity, dtype=torch.float32, device=device)
        if self.forward is not None:
            first = numbers.data_ptr()
            self.forward(
                device.index, values.data_ptr(), labels.data_ptr(), first, first + 8 * count,
                first + 16 * count, first + 20 * count, first + 24 * count, loss.data_ptr(),
                lists.data_ptr(),
            )  # fmt: skip
            return loss, numbers
        from qmargin.kernels.triton import rows as kernels
        from qmargin.kernels.triton.replay import Recording

        b, scale, margin, ignore_index, reduction = self.settings
        self.capacity = min(kernels.CAPACITY, values.shape[1]) if b > 0 else 0
        lists = torch.empty(count * self.capacity, dtype=torch.float32, device=device)
        anchor, level, value, gradient, share = self._parts(numbers)
        results = kernels.Results(anchor=anchor, level=level, value=value, target_gradient=gradient,
            tau=value, support_size=value, mass_error=value, target_posterior=value,
            target_deficit=value)  # fmt: skip
        with Recording() as recording:
            kernels.launch_solve(
                values, scale, b, labels, results, margin=margin, ignore_index=ignore_index,
                capacity=kernels.CAPACITY, lists=lists,
            )  # fmt: skip
            kernels.reduce_rows(
                value, labels, mean=reduction == "mean", ignore_index=ignore_index,
                out=(loss, share),
            )  # fmt: skip
        roles = (values, labels, anchor, level, value, gradient, share, loss, lists)
        self.forward = recording.between(*roles)
        return loss, numbers

    def gradient(self, values: Tensor, labels: Tensor, numbers: Tensor, grad: Tensor) -> Tensor:
        """Gradient in the values for the gradient of the loss."""
        out = torch.empty(values.shape, dtype=values.dtype, device=self.device)
        # Hooks on saved tensors may bring back a copy that is laid out otherwise.
        is_same = grad.data_ptr() % 16 == 0 and _layout(values, labels) == self.layout
        if self.backward is not None and is_same:
            count, first = self.num_rows, numbers.data_ptr()
            self.backward(
                self.device.index, values.data_ptr(), labels.data_ptr(), first, first + 8 * count,
                first + 20 * count, first + 24 * count, grad.data_ptr(), out.data_ptr(),
            )  # fmt: skip
            return out
        from qmargin.kernels.triton import rows as kernels
        from qmargin.kernels.triton.replay import Recording

        b, scale, _, ignore_index, _ = self.settings
        anchor, level, _, gradient, share = self._parts(numbers)
        solution = (anchor, level, gradient, share)
        with Recording() as recording:
            kernels.write_gradient(
                values, scale, b, labels, solution, grad, ignore_index=ignore_index, out=out
            )
        if is_same:
            roles = (values, labels, anchor, level, gradient, share, grad, out)
            self.backward = recording.between(*roles)
        return out

    def _parts(self, numbers: Tensor) -> tuple[Tensor, ...]:
        count, single = self.num_rows, numbers[2 * self.num_rows :].view(torch.float32)
        double = (numbers[:count], numbers[count : 2 * count])
        return *double, single[:count], single[count : 2 * count], single[2 * count]


class PlannedLoss(torch.autograd.Function):
    """A reduced loss by a plan."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, labels: Tensor, plan: Plan) -> Tensor:
        loss, numbers = plan.solve(values, labels)
        if ctx.needs_input_grad[0]:
            ctx.plan = plan
            ctx.save_for_backward(values, labels, numbers)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        values, labels, numbers = ctx.saved_tensors
        plan: Plan = ctx.plan
        if torch.is_grad_enabled():
            return _again(values, labels, grad, plan.settings), None, None
        return plan.gradient(values, labels, numbers, grad), None, None


MOST_PLANS = 256
_plans: dict[tuple[Any, ...], Plan] = {}


def may_plan(values: object) -> bool:
    """Whether a loss on these rows can have a plan, which needs addresses and so no tracing."""
    return (
        type(values) is Tensor
        and values.is_cuda
        and values.dim() == 2
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _layout(values: Tensor, labels: Tensor) -> tuple[Any, ...]:
    """Where the numbers are, as far as launches depend on it."""
    return values.stride(), labels.stride(), values.data_ptr() % 16, labels.data_ptr() % 16


def plan_key(values: Tensor, labels: Tensor, *settings: Any) -> tuple[Any, ...]:
    """Everything that the launches of a loss depend on."""
    kinds = values.dtype, values.device, labels.dtype, labels.device
    return values.shape, labels.shape, *_layout(values, labels), *kinds, *settings


def planned_loss(key: tuple[Any, ...], values: Tensor, labels: Tensor) -> Tensor | None:
    """Loss by the plan stored under this key; None without one."""
    plan = _plans.get(key)
    if plan is None or plan.device.index != torch.cuda.current_device():
        return None
    apply: Callable[..., Tensor] = PlannedLoss.apply
    return apply(values, labels, plan)


def remember(
    key: tuple[Any, ...], values: Tensor, labels: Tensor, settings: Settings, *owners: Any
) -> None:
    """Store a plan for rows that passed all checks; ids in the key are those of ``owners``."""
    if values.is_cuda and values.stride(1) == 1 and labels.is_contiguous() and len(labels) > 0:
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        _plans[key] = Plan(settings, values, labels, owners)


def _again(values: Tensor, labels: Tensor, grad: Tensor, settings: Settings) -> Tensor:
    """The gradient as a differentiable function of values and incoming gradient, in float64."""
    loss = reduced(_plain_loss(values, labels, settings), labels, settings)
    (gradient,) = torch.autograd.grad(loss, values, grad.to(loss.dtype), create_graph=True)
    return gradient


def _plain_loss(values: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """Loss of each row, by the differentiable functions behind every other call."""
    from qmargin.losses.functional import lift_target, value_of  # which imports this module

    b, scale, margin, ignore_index, _ = settings
    is_ignored = _ignored(labels, ignore_index)
    labels = torch.where(is_ignored, 0, labels).long()
    is_class = (labels >= 0) & (labels < values.shape[1])
    rows, targets = lift_target(values.double(), torch.where(is_class, labels, 0))
    term = margin.term(torch.where(is_ignored, 0.0, targets), scale)
    lifted = torch.where(is_class, labels, 0), term.logits, term.log_reference
    alpha = torch.tensor(b + 1.0, dtype=torch.float64, device="cpu")
    solved = value_of(rows, None, alpha, lifted=lifted, is_ignored=is_ignored, scale=scale)
    loss = torch.where(is_class, solved.value, torch.nan)
    return torch.where(is_ignored, 0.0, loss)


def _ignored(labels: Tensor, ignore_index: int | None) -> Tensor:
    if ignore_index is None:
        return torch.zeros_like(labels, dtype=torch.bool)
    return labels == ignore_index


def reduced(loss: Tensor, labels: Tensor, settings: Settings) -> Tensor:
    """Mean or sum over the rows that are not ignored, or the loss as it is."""
    if settings.reduction == "none":
        return loss
    if settings.reduction == "sum":
        return loss.sum()
    count = (~_ignored(labels, settings.ignore_index)).sum()
    return loss.sum() / count.clamp_min(1) + 0.0 / count  # mean over no rows: NaN, zero gradients


@torch.library.custom_op("qmargin::fused_loss", mutates_args=())
def fused_loss(
    values: Tensor,
    labels: Tensor,
    b: float,
    scale: float,
    prior: float,
    cosine: float,
    angle: float,
    is_straight: bool,
    ignore_index: int | None,
    reduction: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operator form of the loss, for compiled graphs: the fields of ``Solved``."""
    margin = ClosedForm(prior, cosine, angle, is_straight)
    settings = Settings(b, scale, margin, ignore_index, reduction)
    checks.check_alpha_range(b + 1.0)
    solved = None
    if row_kernels.may_fuse(values, scale):
        try:
            solved = _solve(values, labels, settings, True)
        except Exception as error:  # errors of Triton, its compiler or the driver
            row_kernels.report_fault(error)
    solved = solved or _solve_plain(values, labels, settings)
    if solved.share is None:
        solved = solved._replace(share=solved.anchor.new_ones((), dtype=torch.float32))
    return tuple(solved)  # type: ignore[return-value]


@fused_loss.register_fake
def _(values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    reduction, num_rows = rest[-1], values.shape[0]
    dtypes = (torch.float64,) * 2 + (torch.float32,) * 2 + (torch.int64,) + (torch.float32,) * 2
    anchor, level, gradient, tau, support, error, own = (
        values.new_empty(num_rows, dtype=dtype) for dtype in dtypes
    )
    loss, share = (
        values.new_empty(shape, dtype=torch.float32)
        for shape in ([num_rows] if reduction == "none" else [], [])
    )
    return loss, anchor, level, gradient, share, tau, support, error, own


def _solve_plain(values: Tensor, labels: Tensor, settings: Settings) -> Solved:
    """The same without kernels."""
    b, scale, margin, ignore_index, _ = settings
    is_ignored = _ignored(labels, ignore_index)
    labels = torch.where(is_ignored, 0, labels).long()
    is_class = (labels >= 0) & (labels < values.shape[1])
    rows, safe = values.float(), torch.where(is_class, labels, 0)
    targets = rows.gather(1, safe[:, None]).squeeze(1).double()
    targets = torch.where(is_ignored, 0.0, torch.where(is_class, targets, torch.nan))
    term = margin.term(targets, scale)
    lifted = safe, term.logits, term.log_reference
    outcome = row_kernels.solve(Rows(rows, scale, b, None, *lifted))
    gradient = -outcome.target_deficit.double() * margin.slope(targets, scale)
    gradient = torch.where(is_ignored | (targets == -torch.inf), 0.0, gradient).float()
    value = torch.where(is_ignored, 0.0, outcome.value)
    marked = torch.where(is_ignored, -1, labels)
    found = settings._replace(ignore_index=-1)
    loss = reduced(value, marked, found)
    count = (~is_ignored).sum()
    share = torch.where(count > 0, 1.0 / count.clamp_min(1), 0.0).float()
    more = outcome.tau, outcome.support_size, outcome.mass_error, outcome.target_posterior
    own_share = share if settings.reduction == "mean" else torch.ones_like(share)
    return Solved(loss, outcome.anchor, outcome.level, gradient, own_share, *more)


@torch.library.custom_op("qmargin::fused_gradient", mutates_args=())
def fused_gradient(
    values: Tensor,
    labels: Tensor,
    anchor: Tensor,
    level: Tensor,
    target_gradient: Tensor,
    share: Tensor,
    grad: Tensor,
    b: float,
    scale: float,
    ignore_index: int | None,
) -> Tensor:
    """Operator form of the gradient: that of the loss in the values, times the incoming one."""
    if row_kernels.may_fuse(values, scale):
        from qmargin.kernels.triton import rows as kernels

        solution = anchor, level, target_gradient, share
        found: Tensor = kernels.write_gradient(
            values, scale, b, labels, solution, grad, ignore_index=ignore_index
        )
        return found
    is_ignored = _ignored(labels, ignore_index)
    is_class = (labels >= 0) & (labels < values.shape[1])
    safe = torch.where(is_class, labels, 0).long()
    weights = torch.where(is_ignored, 0.0, (grad * share).expand(labels.shape))
    rows = Rows(values.float(), scale, b, None, safe)
    result = row_kernels.posterior(rows, anchor, level, weights * scale)
    own = torch.where(weights == 0, 0.0, weights * target_gradient)
    result.scatter_(1, safe[:, None], own[:, None])
    return result.masked_fill_(is_ignored[:, None], 0.0).to(values.dtype)


@fused_gradient.register_fake
def _(values: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(values, memory_format=torch.contiguous_format)


def _one_by_one(operator: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap rule: a call for each element of the mapped dimension."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        each = [
            operator(
                *(
                    value if dim is None else value.select(dim, index)
                    for value, dim in zip(args, in_dims, strict=True)
                )
            )
            for index in range(info.batch_size)
        ]
        if isinstance(each[0], Tensor):
            return torch.stack(each), 0
        stacked = tuple(torch.stack(list(parts)) for parts in zip(*each, strict=True))
        return stacked, (0,) * len(stacked)

    return rule


torch.library.register_vmap(fused_loss, _one_by_one(fused_loss))
torch.library.register_vmap(fused_gradient, _one_by_one(fused_gradient))


class TracedLoss(torch.autograd.Function):
    """The loss inside a compiled graph: the fields of ``Solved``, the first differentiable."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: Tensor,
        labels: Tensor,
        b: float,
        scale: float,
        prior: float,
        cosine: float,
        angle: float,
        is_straight: bool,
        ignore_index: int | None,
        reduction: str,
    ) -> tuple[Tensor, ...]:
        margin = prior, cosine, angle, is_straight
        outputs: tuple[Tensor, ...] = fused_loss(
            values, labels, b, scale, *margin, ignore_index, reduction
        )
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        values, labels, *settings = inputs
        ctx.settings = settings
        _, anchor, level, gradient, share, *_ = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(values, labels, anchor, level, gradient, share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """As ``FusedLoss``."""
        b, scale, prior, cosine, angle, is_straight, ignore_index, reduction = ctx.settings
        values, labels, *solution = ctx.saved_tensors
        if torch.is_grad_enabled():
            margin = ClosedForm(prior, cosine, angle, is_straight)
            settings = Settings(b, scale, margin, ignore_index, reduction)
            return _again(values, labels, grad, settings), *(None,) * 9
        gradient = fused_gradient(values, labels, *solution, grad, b, scale, ignore_index)
        return gradient, *(None,) * 9
