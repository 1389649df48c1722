"""Records that the operations of a head exchange, whichever backend computes them.

Classes come in groups of ``GROUP`` consecutive ones. A *pair* is a row and a group that may hold
active classes of that row. Pairs and candidates are listed row by row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from qmargin.transfers import Reading

GROUP = 32  # consecutive classes that are listed together


class Target(NamedTuple):
    """What the margin made of each row's own class, ``[B]`` float64 each."""

    logits: Tensor
    log_reference: Tensor


class PreparedRows(NamedTuple):
    """A batch ready for the screen."""

    embeddings: Tensor  # [B, d] unit length
    rounded: Tensor  # [B, d] in the dtype of the copy
    rounding: Tensor  # [B] length of the rounding error
    targets: Tensor  # [B, d] unit prototypes of the rows' own classes, from the master prototypes
    target_cosines: Tensor  # [B] with them


class Batch(NamedTuple):
    """A batch and the prototypes it is scored with."""

    prepared: PreparedRows
    copy: Tensor  # [K, d] rounded unit prototypes
    prototypes: Tensor  # [k, d]
    inverse_norms: Tensor  # [k]
    labels: Tensor  # [B]


class Lengths(NamedTuple):
    """Lengths of a batch's lists: those of one step are a good guess for the next."""

    pairs: int
    candidates: int


class ListOverflow(Exception):
    """The lists of a batch exceed their limit: redo it by blocks of classes (F7)."""

    def __init__(self, maxima: Tensor | None = None) -> None:
        super().__init__()
        self.maxima = maxima  # of groups, if they are still there


class Pairs(NamedTuple):
    """Rows and the groups that may hold active classes of theirs, row by row."""

    groups: Tensor  # [n]
    rows: Tensor  # [n]
    starts: Tensor  # [B + 1]: where each row's pairs begin
    floor: Tensor  # [B]: exact cosines at or below it are certainly inactive
    slack: Tensor  # [B]: how far a screened cosine may be from the exact one


class Candidates(NamedTuple):
    """Classes that can be active, row by row, with their exact cosines."""

    rows: Tensor  # [n]
    columns: Tensor  # [n]
    scores: Tensor  # [n]
    starts: Tensor  # [B + 1]


class SolvedRows(NamedTuple):
    """Loss and posterior of a batch, the posterior as lists, row by row."""

    loss: Tensor  # [B] float64
    tau: Tensor  # [B] float64
    others_mass: Tensor  # [B] float64, posterior mass of all classes but the target
    in_reference: Tensor  # [B] float64, gradient of the loss in the target's log reference
    mass_error: Tensor  # [B] float64
    rows: Tensor  # [n]: the batch's candidates, row by row
    columns: Tensor  # [n]: their classes
    posterior: Tensor  # [n], zero for candidates that turned out inactive
    starts: Tensor  # [B + 1]: where each row's list begins


class ClassOrder(NamedTuple):
    """A batch's candidates and targets in ascending order of class."""

    columns: Tensor  # [n + B]
    order: Tensor  # [n + B]: which candidate, or from num_candidates on, which row's target
    num_candidates: int  # room included

    def cut(self, num_candidates: int) -> ClassOrder:
        """Remove the entries that no candidate has: they come last."""
        spare = self.num_candidates - num_candidates
        length = len(self.columns) - spare
        return self._replace(columns=self.columns[:length], order=self.order[:length])


@dataclass
class Support:
    """A solution that holds if the speculative list sizes sufficed, which ``verify`` finds out.

    It includes what a backward pass needs besides the incoming gradient: the device computes it
    while the host waits for the lengths.
    """

    solved: SolvedRows
    pulled: Tensor | None  # [B, d]: sum of posterior times unit prototype over the others
    order: ClassOrder | None
    lengths: Reading
    room: Lengths  # that the lists had
    limit: int  # of the pairs
    others_support: Tensor | None = None  # [B] over all ranks, where there are several

    def verify(self) -> Lengths | None:
        """Wait for the true lengths and cut the lists to them; None if they were too short."""
        found = Lengths(*self.lengths.wait().tolist())
        if found.pairs > self.limit:
            raise ListOverflow
        if found.pairs > self.room.pairs or found.candidates > self.room.candidates:
            return None
        if found.candidates < self.room.candidates:
            names = ("rows", "columns", "posterior")
            cut = {name: getattr(self.solved, name)[: found.candidates] for name in names}
            self.solved = self.solved._replace(**cut)
            if self.order is not None:
                self.order = self.order.cut(found.candidates)
        return found


class ClassGradient(NamedTuple):
    """Gradient of the cosines' classes as a sparse matrix, sorted by class."""

    columns: Tensor  # [n], ascending
    rows: Tensor  # [n]
    values: Tensor  # [n]

    def part(self, entries: slice | Tensor) -> ClassGradient:
        """Some of the entries."""
        return ClassGradient(self.columns[entries], self.rows[entries], self.values[entries])


class PrototypeState(NamedTuple):
    """What an update of the prototypes reads and rewrites in place."""

    prototypes: Tensor  # [k, d]
    momentum: Tensor | None  # [k, d]; None for an update without momentum
    inverse_norms: Tensor  # [k]: read for the gradient, then rewritten
    copy: Tensor  # [K, d], K >= k: unit prototypes in the precision of the screen

    def part(self, classes: slice) -> PrototypeState:
        """Views of consecutive classes."""
        momentum = None if self.momentum is None else self.momentum[classes]
        return PrototypeState(
            self.prototypes[classes], momentum, self.inverse_norms[classes], self.copy[classes]
        )


class SgdRule(NamedTuple):
    """Settings of one step of momentum SGD, as in ``torch.optim.SGD`` without dampening.

    With ``g = grad_scale * gradient + weight_decay * w``, ``v <- momentum * v + g`` and then
    ``w <- w - lr * v``, or with Nesterov ``w <- w - lr * (g + momentum * v)``. Buffers start at
    zero, which makes the first one ``g`` itself, as in torch.
    """

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool
    grad_scale: Tensor  # scalar on the device; if it is not finite, nothing is written
    only_active: bool  # step only classes whose gradient is not exactly zero
