"""Verification metrics from scores: exact at any scale, with NumPy and SciPy only."""

from qmargin.metrics.bootstrap import (
    Comparison,
    Difference,
    Replicates,
    SubjectWeights,
    Trials,
    bootstrap,
    compare,
    interval,
    make_trials,
    paired_difference,
)
from qmargin.metrics.calibration import Calibration, actual_dcf, calibrate, cllr, min_cllr
from qmargin.metrics.checks import checked_scores
from qmargin.metrics.curve import DetCurve, det_curve
from qmargin.metrics.eer_dcf import Eer, MinDcf, eer, min_dcf
from qmargin.metrics.folds import KFoldAccuracy, kfold_accuracy
from qmargin.metrics.groups import Group, GroupRate, GroupRates, Spread, group_rates
from qmargin.metrics.identification import FnirAtFpir, Identification, identify
from qmargin.metrics.normalise import as_norm, s_norm, t_norm, z_norm
from qmargin.metrics.operating import (
    ImpostorTail,
    Rates,
    Sufficiency,
    TarAtFar,
    num_allowed,
    rates_at,
    rule_of_three,
    sufficiency,
    tar_at_far,
    tars_at_fars,
    wilson,
)
from qmargin.metrics.runs import (
    Estimate,
    Runs,
    difference_over_runs,
    logits,
    mean_over_runs,
    rate_difference,
)

__all__ = [
    "Calibration",
    "Comparison",
    "DetCurve",
    "Difference",
    "Eer",
    "Estimate",
    "FnirAtFpir",
    "Group",
    "GroupRate",
    "GroupRates",
    "Identification",
    "ImpostorTail",
    "KFoldAccuracy",
    "MinDcf",
    "Rates",
    "Replicates",
    "Runs",
    "Spread",
    "SubjectWeights",
    "Sufficiency",
    "TarAtFar",
    "Trials",
    "actual_dcf",
    "as_norm",
    "bootstrap",
    "calibrate",
    "checked_scores",
    "cllr",
    "compare",
    "det_curve",
    "difference_over_runs",
    "eer",
    "group_rates",
    "identify",
    "interval",
    "kfold_accuracy",
    "logits",
    "make_trials",
    "mean_over_runs",
    "min_cllr",
    "min_dcf",
    "num_allowed",
    "paired_difference",
    "rate_difference",
    "rates_at",
    "rule_of_three",
    "s_norm",
    "sufficiency",
    "t_norm",
    "tar_at_far",
    "tars_at_fars",
    "wilson",
    "z_norm",
]
