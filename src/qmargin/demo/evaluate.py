"""From the embeddings of test identities to a ``Result`` over all of their pairs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol as Shape

import numpy as np
from numpy.typing import NDArray

from qmargin.evaluation.all_pairs import num_impostor_pairs
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.all_pairs import PairSamples, measure_pairs
from qmargin.evaluation.result import Result, Source
from qmargin.metrics.normalise import Moments
from qmargin.metrics.sufficiency import sufficiency

FARS = (1e-2, 1e-3, 1e-4, 1e-5)
NUM_REPLICATES = 1000  # fewer could not show a difference among ten pairs
NUM_HARDEST = 12
ENLARGED = 4  # a pixel of a picture in the report


class Pictures(Shape):
    """Drawings of test identities, such as ``StrokeIdentities``."""

    @property
    def num_classes(self) -> int:
        """Number of identities."""
        ...

    @property
    def labels(self) -> NDArray[np.int64]:
        """Identity of each sample."""
        ...

    def __len__(self) -> int: ...

    def images(self, indices: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Some samples, ``[n, size, size]``."""
        ...

    def sample_id(self, index: int) -> str:
        """Name of a sample."""
        ...


@dataclass(frozen=True)
class Facts:
    """What a result is of: the system, its facts, the trials and what was run."""

    name: str
    card: dict[str, str]
    protocol: str
    command: str
    prefix: str = ""  # of the samples' names: the folder of their pictures


def evaluate_pictures(
    embeddings: NDArray[np.float32],
    dataset: Pictures,
    facts: Facts,
    *,
    moments: Moments | None = None,
    num_replicates: int = NUM_REPLICATES,
    device: str = "cpu",
) -> Result:
    """Measure all pairs of a dataset's samples.

    Args:
        embeddings: ``[n, d]`` of all samples, in order.
        dataset: Of test or validation identities.
        facts: For the record.
        moments: Of each sample's scores against a cohort, for AS-norm; None for cosines.
        num_replicates: Of the bootstrap over identities.
        device: Where products are computed.

    Raises:
        ProtocolError: There are too few pairs for a rate, or none of a kind.
    """
    num_impostors = num_impostor_pairs(np.bincount(dataset.labels, minlength=dataset.num_classes))
    fars = tuple(far for far in FARS if sufficiency(far, num_impostors).allowed > 0)
    digits = len(str(dataset.num_classes))
    source, sha256 = _source(dataset, facts)
    samples = PairSamples(
        embeddings,
        dataset.labels,
        tuple(f"identity-{label:0{digits}d}" for label in range(dataset.num_classes)),
        lambda row: facts.prefix + dataset.sample_id(row),
        sha256,
    )
    options = EvaluationOptions(
        name=facts.name,
        protocol=facts.protocol,
        fars=fars or FARS,
        num_replicates=num_replicates,
        num_hardest=NUM_HARDEST,
        model_card=facts.card,
        sources=(source,),
    )
    return measure_pairs(samples, options, moments=moments, device=device, command=facts.command)


def picture_keys(result: Result) -> set[str]:
    """Names of the samples in the hardest pairs."""
    if result.hardest is None:
        return set()
    pairs = (*result.hardest.false_accepts, *result.hardest.false_rejects)
    return {key for pair in pairs for key in (pair.enrol, pair.test)}


def has_pictures(folder: Path, result: Result) -> bool:
    """Whether the samples of the hardest pairs are drawn in a folder."""
    paths = (folder / f"{key}.png" for key in picture_keys(result))
    return folder.is_dir() and all(path.exists() for path in paths)


def write_pictures(
    folder: Path, dataset: Pictures, result: Result, *, prefix: str = "", is_ink: bool = True
) -> None:
    """Draw the samples of the hardest pairs, where a report looks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    from PIL import Image

    flip = np.uint8(255 if is_ink else 0)  # ink is black on white paper
    indices = {prefix + dataset.sample_id(index): index for index in range(len(dataset))}
    for key in sorted(picture_keys(result)):
        picture = dataset.images(np.array([indices[key]]))[0] ^ flip
        path = folder / f"{key}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture.repeat(ENLARGED, axis=0).repeat(ENLARGED, axis=1)).save(path)


def _source(dataset: Pictures, facts: Facts) -> tuple[Source, str]:
    """All pairs have no file: what they are made from stands for it."""
    text = f"{facts.protocol}, {dataset!r}, {len(dataset)} samples"
    sha256 = hashlib.sha256(text.encode("utf-8") + dataset.labels.tobytes()).hexdigest()
    return Source(f"{dataset!r}, all pairs", sha256, "trials"), sha256
