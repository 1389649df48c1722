"""The operations of the sparse step, fused: the same names and meanings as ``head_reference``."""

from __future__ import annotations

from qmargin.kernels.head_reference import class_order
from qmargin.kernels.triton.bound import list_pairs
from qmargin.kernels.triton.entries import class_gradient
from qmargin.kernels.triton.gradients import prototype_gradient, pull_rows
from qmargin.kernels.triton.prepare import prepare_rows
from qmargin.kernels.triton.rescore import score_candidates
from qmargin.kernels.triton.screen import group_maxima
from qmargin.kernels.triton.solve import solve_lists
from qmargin.kernels.triton.support import find_support
from qmargin.kernels.triton.unit import unit_gradient, unit_rows
from qmargin.kernels.triton.update import refresh_copy, sgd_update, sgd_update_rows

__all__ = [
    "class_gradient",
    "class_order",
    "find_support",
    "group_maxima",
    "list_pairs",
    "prepare_rows",
    "prototype_gradient",
    "pull_rows",
    "refresh_copy",
    "score_candidates",
    "sgd_update",
    "sgd_update_rows",
    "solve_lists",
    "unit_gradient",
    "unit_rows",
]
