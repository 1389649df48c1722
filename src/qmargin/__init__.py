"""Sparse alpha-divergence losses with a probabilistic margin for biometric verification."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qmargin import metrics
    from qmargin.errors import MarginWarning, QMarginError
    from qmargin.evaluation.model import load_model
    from qmargin.heads.checks import exclude_from_ddp
    from qmargin.heads.classifier import MarginClassifier
    from qmargin.heads.step import StepStats
    from qmargin.heads.updates import ExactSGD, SparseSGD, clip_grad_norm_
    from qmargin.losses.functional import (
        TauSolution,
        fenchel_young_loss,
        log_partition,
        softargmax,
        solve_tau,
    )
    from qmargin.losses.module import LossOutput, MarginLoss, margin_loss, margin_loss_with_stats
    from qmargin.losses.presets import (
        adaface,
        arcface,
        arcface_speaker,
        cosface,
        cosface_speaker,
        elasticface,
        entmax_face,
        entmax_speaker,
        magface,
        q_margin,
        q_margin_face,
        q_margin_speaker,
        q_margin_speaker_strict,
        sparsemax_face,
        sphereface,
    )
    from qmargin.maths.adaptive import AdaFaceMargin, ElasticMargin, MagFaceMargin
    from qmargin.maths.divergences import Alpha, Divergence, JensenShannon
    from qmargin.maths.hardness import Hardness, hardness, scale_of_hardness
    from qmargin.maths.margins import (
        AngularMargin,
        CombinedMargin,
        CosineMargin,
        Margin,
        PerClass,
        PriorMargin,
        SumMargin,
        TargetTerm,
    )

__version__ = "0.1.0"
__all__ = [
    "AdaFaceMargin",
    "Alpha",
    "AngularMargin",
    "CombinedMargin",
    "CosineMargin",
    "Divergence",
    "ElasticMargin",
    "ExactSGD",
    "Hardness",
    "JensenShannon",
    "LossOutput",
    "MagFaceMargin",
    "Margin",
    "MarginClassifier",
    "MarginLoss",
    "MarginWarning",
    "PerClass",
    "PriorMargin",
    "QMarginError",
    "SparseSGD",
    "StepStats",
    "SumMargin",
    "TargetTerm",
    "TauSolution",
    "adaface",
    "arcface",
    "arcface_speaker",
    "clip_grad_norm_",
    "cosface",
    "cosface_speaker",
    "elasticface",
    "entmax_face",
    "entmax_speaker",
    "exclude_from_ddp",
    "fenchel_young_loss",
    "hardness",
    "load_model",
    "log_partition",
    "magface",
    "margin_loss",
    "margin_loss_with_stats",
    "metrics",
    "q_margin",
    "q_margin_face",
    "q_margin_speaker",
    "q_margin_speaker_strict",
    "scale_of_hardness",
    "softargmax",
    "solve_tau",
    "sparsemax_face",
    "sphereface",
]

_HOMES = {  # imported on first use, so that `qmargin --help` need not wait for torch
    "qmargin.errors": "MarginWarning QMarginError",
    "qmargin.evaluation.model": "load_model",
    "qmargin.heads.checks": "exclude_from_ddp",
    "qmargin.heads.classifier": "MarginClassifier",
    "qmargin.heads.step": "StepStats",
    "qmargin.heads.updates": "ExactSGD SparseSGD clip_grad_norm_",
    "qmargin.losses.functional": (
        "TauSolution fenchel_young_loss log_partition softargmax solve_tau "
    ),
    "qmargin.losses.module": "LossOutput MarginLoss margin_loss margin_loss_with_stats",
    "qmargin.losses.presets": (
        "adaface arcface arcface_speaker cosface cosface_speaker elasticface entmax_face "
        "entmax_speaker magface q_margin q_margin_face q_margin_speaker "
        "q_margin_speaker_strict sparsemax_face sphereface "
    ),
    "qmargin.maths.adaptive": "AdaFaceMargin ElasticMargin MagFaceMargin",
    "qmargin.maths.divergences": "Alpha Divergence JensenShannon",
    "qmargin.maths.hardness": "Hardness hardness scale_of_hardness",
    "qmargin.maths.margins": (
        "AngularMargin CombinedMargin CosineMargin Margin PerClass PriorMargin SumMargin "
        "TargetTerm "
    ),
}


def __getattr__(name: str) -> object:
    if name == "metrics":
        return import_module("qmargin.metrics")
    for home, names in _HOMES.items():
        if name in names.split():
            globals()[name] = value = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module 'qmargin' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
