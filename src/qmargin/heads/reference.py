"""The reference measure in a step: values for the classes of this rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qmargin.errors import DataError
from qmargin.kernels.head_reference import RowReference, minima_of
from qmargin.losses.references import ClassPrior, on_device_of, pairs_now, version_of

if TYPE_CHECKING:
    from qmargin.heads.classifier import MarginClassifier


def row_reference(head: MarginClassifier, targets: Tensor) -> RowReference | None:
    """The reference of the classes but the target; None where it is one for all of them.

    ``targets`` ``[B, d]`` are the unit prototypes of the rows' own classes, zero where another rank
    has them. Values are read again in every step, so they are never out of date; only a class
    prior, whose values are its own, knows whether they have changed.
    """
    reference, scale = head.loss.active_reference, head.loss.scale
    if reference is None:
        return None
    classes, groups, pair, low, high = None, None, None, 0.0, 0.0
    if reference.has_classes:
        classes = reference.per_class()
    if classes is not None:
        given = classes
        if classes.shape != (head.num_classes,):
            reference.check_classes(head.num_classes)
        classes = on_device_of(classes.detach(), head.prototypes).double()
        classes = classes[head.shard.start : head.shard.stop]
        low, high = reference.class_bounds()
        if math.isnan(low) or not high < math.inf:
            raise DataError(
                f"log references of the classes are between {low:g} and {high:g}; return numbers "
                "below infinity, or -inf for a class that is left out"
            )
        if type(reference) is ClassPrior:  # its values are private
            groups = _group_minima(head, given, classes)
    bounds = reference.pair_bounds(scale)
    if bounds is not None:
        pair = pairs_now(reference, scale)
        targets = head.ranks.sum_(targets.clone()) if head.ranks.world > 1 else targets
        low, high = low + bounds[0], high + bounds[1]
    if classes is None and pair is None:
        return None
    pair_low = 0.0 if bounds is None else bounds[0]
    stamp = None if classes is None else version_of(classes)
    return RowReference(classes, pair, targets.detach(), (low, high), pair_low, stamp, groups)


def _group_minima(head: MarginClassifier, given: Tensor, classes: Tensor) -> Tensor:
    """Of these numbers of the rank's classes; kept while those of the reference stay the same."""
    known, version = head.known_minima, version_of(given)
    if known is not None and version is not None:
        values, known_version, minima = known
        if values is given and known_version == version and minima.device == classes.device:
            return minima
    with torch.inference_mode(False):  # they may be kept for training
        minima = minima_of(classes)
    head.known_minima = (given, version, minima)
    return minima
