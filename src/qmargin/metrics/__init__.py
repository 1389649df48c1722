"""Verification metrics from scores: exact at any scale, with NumPy and SciPy only."""

from qmargin.metrics.bootstrap import Replicates, bootstrap, interval
from qmargin.metrics.checks import checked_scores
from qmargin.metrics.comparison import Comparison, Difference, compare, paired_difference
from qmargin.metrics.crossing import Eer, MinDcf, eer, min_dcf
from qmargin.metrics.curve import DetCurve, det_curve
from qmargin.metrics.folds import KFoldAccuracy, kfold_accuracy
from qmargin.metrics.groups import Group, GroupRate, GroupRates, Spread, group_rates
from qmargin.metrics.identification import FnirAtFpir, Identification, identify
from qmargin.metrics.llr import Calibration, actual_dcf, calibrate, cllr, min_cllr
from qmargin.metrics.normalise import as_norm, s_norm, t_norm, z_norm
from qmargin.metrics.operating import (
    Rates,
    TarAtFar,
    num_allowed,
    rates_at,
    tar_at_far,
    tars_at_fars,
)
from qmargin.metrics.subjects import SubjectWeights, Trials, make_trials
from qmargin.metrics.sufficiency import Sufficiency, rule_of_three, sufficiency, wilson
from qmargin.metrics.tail import ImpostorTail

__all__ = [
    "Calibration",
    "Comparison",
    "DetCurve",
    "Difference",
    "Eer",
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
    "eer",
    "group_rates",
    "identify",
    "interval",
    "kfold_accuracy",
    "make_trials",
    "min_cllr",
    "min_dcf",
    "num_allowed",
    "paired_difference",
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
