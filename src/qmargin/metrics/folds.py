"""Accuracy with a threshold from the other folds: the protocol of LFW and similar sets."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.checks import Floats, Scores, checked_scores, count_accepted
from qmargin.metrics.curve import rejecting_threshold, staircase


@dataclass(frozen=True, eq=False)
class KFoldAccuracy:
    """Accuracy of each fold at the threshold of the others, its mean and standard deviation.

    The deviation has ``num_folds - 1`` in the denominator.
    """

    mean: float
    std: float
    accuracies: Floats
    thresholds: Floats

    @property
    def standard_error(self) -> float:
        """Standard error of the mean, as in LFW tables."""
        return float(self.std / np.sqrt(len(self.accuracies)))


def kfold_accuracy(
    scores: ArrayLike,
    is_genuine: ArrayLike,
    *,
    num_folds: int = 10,
    folds: ArrayLike | None = None,
) -> KFoldAccuracy:
    """Compute k-fold accuracy; the threshold of each fold comes from the others.

    It lies halfway between two neighbouring scores of the other folds, the lowest two between which
    the errors are fewest.

    Args:
        scores: Scores of the trials.
        is_genuine: Whether each trial is of one subject.
        num_folds: Number of folds of equal size, in the order of the trials; where ``folds`` is
            None.
        folds: The fold of each trial, any whole numbers.

    Examples:
        >>> result = kfold_accuracy([0.9, 0.2, 0.8, 0.1], [1, 0, 1, 0], num_folds=2)
        >>> result.mean, result.thresholds
        (1.0, array([0.45, 0.55]))
    """
    scores = checked_scores(scores, "trial")
    labels, size = np.asarray(is_genuine), len(scores)
    if labels.shape != (size,):
        raise ShapeError(f"labels have shape {labels.shape} but there are {size} scores")
    if (wrong := np.flatnonzero(~np.isin(labels, (0, 1)))).size:
        raise DataError(f"label {wrong[0]} is {labels[wrong[0]]}: pass 1 for genuine, else 0")
    if folds is not None:
        home = np.asarray(folds)
    elif num_folds < 2:
        raise ConfigError(f"num_folds={num_folds} is too few: at least 2 are needed")
    elif size < num_folds:
        raise ProtocolError(f"{size} trials do not fill {num_folds} folds: ask for fewer folds")
    else:
        home = np.arange(size, dtype=np.int64) * num_folds // size
    if home.shape != (size,):
        raise ShapeError(f"folds have shape {home.shape} but there are {size} scores")
    names = np.unique(home)
    if len(names) < 2:
        raise ProtocolError(f"there is {len(names)} fold: give at least 2")
    results = [_fold_accuracy(scores, labels.astype(np.bool_), home == name) for name in names]
    accuracies, thresholds = np.array(results, np.float64).T
    mean, std = float(accuracies.mean()), float(accuracies.std(ddof=1))
    return KFoldAccuracy(mean, std, accuracies, thresholds)


def _fold_accuracy(
    scores: Scores, labels: NDArray[np.bool_], is_test: NDArray[np.bool_]
) -> tuple[float, float]:
    """Accuracy of the fold and the threshold of the others."""
    genuine = checked_scores(scores[~is_test & labels], "genuine training")
    impostor = checked_scores(scores[~is_test & ~labels], "impostor training")
    values, accepts, rejects = staircase(genuine, impostor)
    best = int(np.argmin(np.append(accepts + rejects, len(genuine))))
    if best == len(values):
        threshold = rejecting_threshold(scores)
    else:  # halfway, as long as that rejects the lower and accepts the higher score
        low, high = float(values[max(best - 1, 0)]), float(values[best])
        middle = 0.5 * low + 0.5 * high
        threshold = middle if np.isfinite(middle) and middle > low else high
    right = count_accepted(scores[is_test & labels], threshold)
    wrong = count_accepted(scores[is_test & ~labels], threshold)
    num_impostors = np.count_nonzero(is_test & ~labels)
    return (right + num_impostors - wrong) / np.count_nonzero(is_test), threshold
