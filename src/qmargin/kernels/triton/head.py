"""The operations of the sparse step, fused: the same names and meanings as ``head_reference``."""

from __future__ import annotations

from qmargin.kernels.head_reference import (
    ClassGradient,
    SolvedRows,
    refresh_copy,
    sort_by_class,
)
from qmargin.kernels.triton.bound import bound_tau, list_groups
from qmargin.kernels.triton.gradients import embedding_gradient, prototype_gradient
from qmargin.kernels.triton.rescore import rescore
from qmargin.kernels.triton.screen import group_maxima
from qmargin.kernels.triton.solve import solve_lists

__all__ = [
    "ClassGradient",
    "SolvedRows",
    "bound_tau",
    "embedding_gradient",
    "group_maxima",
    "list_groups",
    "prototype_gradient",
    "refresh_copy",
    "rescore",
    "solve_lists",
    "sort_by_class",
]
