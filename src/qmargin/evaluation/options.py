"""What an evaluation measures and how."""

from __future__ import annotations

from dataclasses import dataclass, field

from qmargin.errors import ConfigError
from qmargin.evaluation.result import Source
from qmargin.metrics.operating import RULES
from qmargin.metrics.sufficiency import check_level


@dataclass(frozen=True)
class EvaluationOptions:
    """What to measure and how; the fields are options of ``qmargin evaluate``.

    Attributes:
        name: Of the system.
        protocol: Of the trials.
        fars: False acceptance rates at which to measure TAR.
        p_targets: Priors of minDCF.
        rule: How the threshold of a FAR is chosen: conservative, nearest or interpolated.
        subjects: ``"auto"``, ``"path"`` or ``"none"``, see ``find_subjects``.
        subject_of: Subject of every name; goes before ``subjects``.
        group_of: Group of every subject; None for no audit of groups.
        group_far: FAR whose threshold the audit uses; None for the smallest that has enough trials.
        num_replicates: Of the bootstrap; 0 for none.
        seed: Of the bootstrap.
        level: Of the intervals.
        num_hardest: Hardest trials to keep of each kind.
        model_card: Facts about the system.
        sources: Files that were read besides those of the scores.
        notes: What is known to be odd, for the result's notes.
    """

    name: str = "system"
    protocol: str = "trials"
    fars: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5)
    p_targets: tuple[float, ...] = (0.01, 0.05)
    rule: str = "conservative"
    subjects: str = "auto"
    subject_of: dict[str, str] | None = field(default=None, repr=False)
    group_of: dict[str, str] | None = field(default=None, repr=False)
    group_far: float | None = None
    num_replicates: int = 1000
    seed: int = 0
    level: float = 0.95
    num_hardest: int = 20
    model_card: dict[str, str] | None = None
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, values in (("far", self.fars), ("p_target", self.p_targets)):
            for value in values:
                if not 0.0 < value < 1.0:
                    raise ConfigError(f"{name}={value:g} is outside (0, 1): give such as 0.001")
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{name} has the values {values}: give at least one, each once")
        if self.rule not in RULES:
            raise ConfigError(f"rule {self.rule!r} is unknown: choose one of {', '.join(RULES)}")
        if self.subjects not in ("auto", "path", "none"):
            raise ConfigError(f"subjects={self.subjects!r} is not one of auto, path, none")
        if self.group_far is not None and self.group_far not in self.fars:
            raise ConfigError(f"group_far={self.group_far:g} is not among the FARs: add it there")
        for name in ("num_replicates", "num_hardest", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is negative: give at least 0")
        check_level(self.level)
