import math

import numpy as np
import pytest

from qmargin.errors import ConfigError, DataError, ProtocolError, ShapeError
from qmargin.metrics.folds import kfold_accuracy


def trials(seed: int = 0, size: int = 600) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    is_genuine = rng.random(size) < 0.5
    return np.round(rng.normal(is_genuine * 1.5, 1.0), 2), is_genuine


def fewest_errors(scores: np.ndarray, is_genuine: np.ndarray) -> int:
    thresholds = [*scores, math.inf]
    return min(int(np.sum((scores >= threshold) != is_genuine)) for threshold in thresholds)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_thresholds_are_best_on_the_other_folds(dtype: type) -> None:
    scores, is_genuine = trials()
    scores = scores.astype(dtype)
    folds = np.arange(600) * 7 % 5
    result = kfold_accuracy(scores, is_genuine, folds=folds)
    assert len(result.thresholds) == 5
    for fold, threshold, accuracy in zip(
        range(5), result.thresholds, result.accuracies, strict=True
    ):
        rest, test = folds != fold, folds == fold
        wrong = np.sum((scores[rest].astype(float) >= threshold) != is_genuine[rest])
        assert wrong == fewest_errors(scores[rest], is_genuine[rest])
        right = (scores[test].astype(float) >= threshold) == is_genuine[test]
        assert accuracy == np.mean(right)
    assert result.mean == pytest.approx(np.mean(result.accuracies))
    assert result.std == pytest.approx(np.std(result.accuracies, ddof=1))
    assert result.standard_error == pytest.approx(result.std / math.sqrt(5))


def test_ten_folds_follow_the_order_of_the_trials() -> None:
    scores, is_genuine = trials()
    plain = kfold_accuracy(scores, is_genuine)
    given = kfold_accuracy(scores, is_genuine, folds=np.repeat(np.arange(10), 60))
    np.testing.assert_array_equal(plain.accuracies, given.accuracies)


def test_the_order_within_a_fold_changes_nothing() -> None:
    scores, is_genuine = trials()
    folds = np.repeat(np.arange(10), 60)
    order = np.random.default_rng(1).permutation(600)
    plain = kfold_accuracy(scores, is_genuine, folds=folds)
    mixed = kfold_accuracy(scores[order], is_genuine[order], folds=folds[order])
    np.testing.assert_array_equal(plain.thresholds, mixed.thresholds)
    np.testing.assert_array_equal(plain.accuracies, mixed.accuracies)


def test_infinite_and_equal_scores() -> None:
    result = kfold_accuracy([math.inf, -math.inf] * 4, [1, 0] * 4, num_folds=2)
    assert result.mean == 1.0
    assert kfold_accuracy([0.5] * 8, [1, 0] * 4, num_folds=2).mean == 0.5
    swapped = kfold_accuracy([-math.inf, math.inf] * 4, [1, 0] * 4, num_folds=2)
    assert swapped.mean == 0.5


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_folds=1"):
        kfold_accuracy([1.0, 0.0], [1, 0], num_folds=1)
    with pytest.raises(ProtocolError, match="3 trials do not fill 10 folds"):
        kfold_accuracy([1.0, 0.0, 0.5], [1, 0, 1])
    with pytest.raises(ProtocolError, match="there is 1 fold"):
        kfold_accuracy([1.0, 0.0], [1, 0], folds=[3, 3])
    with pytest.raises(ProtocolError, match="0 genuine training scores"):
        kfold_accuracy([1.0, 0.0, 0.5], [1, 0, 1], folds=[0, 1, 0])
    with pytest.raises(ShapeError, match="labels have shape"):
        kfold_accuracy([1.0, 0.0], [1])
    with pytest.raises(ShapeError, match="folds have shape"):
        kfold_accuracy([1.0, 0.0], [1, 0], folds=[0])
    with pytest.raises(DataError, match="label 1 is 2"):
        kfold_accuracy([1.0, 0.0], [1, 2])
    with pytest.raises(DataError, match="trial score 0 is NaN"):
        kfold_accuracy([math.nan, 0.0], [1, 0])
