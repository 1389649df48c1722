"""A protocol: scores in two files, one number a line."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qmargin.evaluation.evaluate import EvaluationOptions, evaluate_scores
from qmargin.evaluation.result import Result, Source
from qmargin.evaluation.scores import ScoreSet
from qmargin.files import sha256_of


@dataclass(frozen=True)
class TwoFiles:
    """Evaluate genuine and impostor scores from two files of numbers."""

    genuine: Path = field(metadata={"help": "scores of one identity", "positional": True})
    impostor: Path = field(metadata={"help": "scores of two identities", "positional": True})
    negate: bool = field(default=False, metadata={"help": "scores are distances"})

    def run(self, options: EvaluationOptions, **context: Any) -> Result:
        """Read both files and measure."""
        genuine, impostor = np.loadtxt(self.genuine), np.loadtxt(self.impostor)
        scores = np.concatenate([genuine, impostor])
        is_genuine = np.arange(len(scores)) < len(genuine)
        sources = tuple(
            Source(str(path), sha256_of(path), "scores") for path in (self.genuine, self.impostor)
        )
        score_set = ScoreSet(-scores if self.negate else scores, is_genuine, None, sources)
        return evaluate_scores(score_set, options, **context)
