"""Public names: read by type checkers, and by ``__init__.py`` at run time."""

from qmargin import metrics as metrics
from qmargin.errors import (
    MarginWarning as MarginWarning,
    QMarginError as QMarginError,
)
from qmargin.evaluation.evaluate import (
    evaluate_scores as evaluate_scores,
)
from qmargin.evaluation.model import (
    load_model as load_model,
)
from qmargin.experiments.experiment import (
    Experiment as Experiment,
)
from qmargin.experiments.runner import (
    run_experiment as run_experiment,
)
from qmargin.heads.checks import (
    exclude_from_ddp as exclude_from_ddp,
)
from qmargin.heads.classifier import (
    MarginClassifier as MarginClassifier,
)
from qmargin.heads.optimizers import (
    ExactSGD as ExactSGD,
    SparseSGD as SparseSGD,
    clip_grad_norm_ as clip_grad_norm_,
)
from qmargin.heads.paths import (
    Auto as Auto,
    Chunked as Chunked,
    Dense as Dense,
    Sampled as Sampled,
    Sparse as Sparse,
    TopK as TopK,
)
from qmargin.heads.step import (
    StepStats as StepStats,
)
from qmargin.losses.functional import (
    TauSolution as TauSolution,
    fenchel_young_loss as fenchel_young_loss,
    log_partition as log_partition,
    softargmax as softargmax,
    solve_tau as solve_tau,
)
from qmargin.losses.margin_loss import (
    LossOutput as LossOutput,
    MarginLoss as MarginLoss,
    margin_loss as margin_loss,
    margin_loss_with_stats as margin_loss_with_stats,
)
from qmargin.losses.presets import (
    adaface as adaface,
    arcface as arcface,
    arcface_speaker as arcface_speaker,
    cosface as cosface,
    cosface_speaker as cosface_speaker,
    elasticface as elasticface,
    entmax_face as entmax_face,
    entmax_speaker as entmax_speaker,
    magface as magface,
    q_margin as q_margin,
    q_margin_face as q_margin_face,
    q_margin_speaker as q_margin_speaker,
    q_margin_speaker_strict as q_margin_speaker_strict,
    sparsemax_face as sparsemax_face,
    sphereface as sphereface,
)
from qmargin.losses.divergences import (
    Alpha as Alpha,
    Divergence as Divergence,
    JensenShannon as JensenShannon,
)
from qmargin.losses.hardness import (
    Hardness as Hardness,
    hardness as hardness,
    scale_of_hardness as scale_of_hardness,
)
from qmargin.losses.margins import (
    AdaFaceMargin as AdaFaceMargin,
    AngularMargin as AngularMargin,
    CombinedMargin as CombinedMargin,
    CosineMargin as CosineMargin,
    ElasticMargin as ElasticMargin,
    MagFaceMargin as MagFaceMargin,
    Margin as Margin,
    PerClass as PerClass,
    PriorMargin as PriorMargin,
    SumMargin as SumMargin,
    TargetTerm as TargetTerm,
)
from qmargin.losses.reach import (
    margin_of_reach as margin_of_reach,
    reach as reach,
)
from qmargin.losses.references import (
    ClassPrior as ClassPrior,
    LookAlike as LookAlike,
    Quality as Quality,
    Reference as Reference,
)
from qmargin.recipes import get_recipe as get_recipe
from qmargin.registry import (
    register_backbone as register_backbone,
    register_dataset as register_dataset,
    register_divergence as register_divergence,
    register_experiment as register_experiment,
    register_margin as register_margin,
    register_metric as register_metric,
    register_protocol as register_protocol,
    register_reader as register_reader,
    register_recipe as register_recipe,
    register_reference as register_reference,
)
from qmargin.training.loop import train as train
from qmargin.training.recipe import Recipe as Recipe

__version__: str
