"""Recordings of speakers to train on, to choose settings by, and to test by a list of trials.

A path has the folders ``train`` and ``test`` with a folder per speaker, and ``trials.txt``.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qmargin.data.audio_lists import open_audio
from qmargin.data.order import derived_seed
from qmargin.data.speech import open_speech
from qmargin.demo.evaluate import Facts
from qmargin.errors import DataError
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.exporting import export_run
from qmargin.evaluation.model import load_model
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.trials import evaluate_speakers
from qmargin.evaluation.protocols.utterances import Recordings, embed_utterances
from qmargin.evaluation.result import Result
from qmargin.evaluation.trials import read_trials
from qmargin.files import write_atomically
from qmargin.study.studies import Study
from qmargin.sweep.trial import Trial
from qmargin.sweep.validation import TrialData
from qmargin.training.recipe import Recipe
from qmargin.training.signals import StopRequest

FARS = (1e-2, 1e-3, 1e-4)
VALIDATION_SHARE = 0.25  # of the speakers for training, while settings are chosen
VALIDATION = 0x57D4  # tells that choice of speakers from others
TRAIN, TEST, TRIALS = "train", "test", "trials.txt"


@dataclass(frozen=True)
class SpeechMaterial:
    """See ``Material``.

    Attributes:
        study: What is studied.
        path: Of the recordings.
        folder: Of lists that are written.
        is_search: Hold out speakers of the training; otherwise the test's.
    """

    study: Study
    path: Path
    folder: Path
    is_search: bool

    def __call__(self, recipe: Recipe) -> TrialData:
        """What the recipe says, and chunks of other speakers as they are."""
        frames = recipe.data.options["num_frames"]
        assert isinstance(frames, int)  # the recipe of small collections has it
        measured = self._list("validation") if self.is_search else self.path / TEST
        chunks = open_speech(
            measured, num_frames=frames, speed_perturbation=False, dither=0.0, in_memory=True
        )
        return TrialData(chunks)

    @property
    def training_path(self) -> str:
        """Of the recipes."""
        return str(self._list(TRAIN) if self.is_search else (self.path / TRAIN).resolve())

    def prepare(self, seeds: Sequence[int], request: StopRequest | None = None) -> None:
        """Write the lists of speakers that are held out, and of those that are not."""
        if not (self.path / TRIALS).exists():
            raise DataError(f"{self.path} has no {TRIALS}; it needs {TRAIN}/, {TEST}/ and {TRIALS}")
        if not self.is_search:
            return
        collection = open_audio(self.path / TRAIN)
        speakers = [collection.class_name(label) for label in range(collection.num_classes)]
        order = sorted(speakers, key=lambda name: derived_seed(VALIDATION, *name.encode()))
        held_out = set(order[: round(VALIDATION_SHARE * len(order))])
        rows: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        for index, label in enumerate(collection.labels.tolist()):
            name = collection.class_name(label)
            rows[name in held_out].append((str(collection.path(index).resolve()), name))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._list("validation"), _as_csv(rows[True]))
        write_atomically(self._list(TRAIN), _as_csv(rows[False]))

    def evaluate(self, trial: Trial, facts: Facts, device: str) -> tuple[Result]:
        """Whole recordings of the test, by the list of trials; cosines."""
        folder = trial.folder / "model"
        if not folder.exists():
            export_run(trial.folder, folder)
        model = load_model(folder, device=device)
        trials = read_trials(self.path / TRIALS)
        path = embed_utterances(
            model,
            Recordings(self.path, trials.keys.names),
            trial.folder / "embeddings.safetensors",
            model_id=model.card.weights_sha256,
        )
        options = EvaluationOptions(
            name=facts.name, protocol=facts.protocol, fars=FARS, model_card=facts.card
        )
        found = evaluate_speakers(read_embeddings(path), trials, options, command=facts.command)
        return (found,)

    def _list(self, name: str) -> Path:
        return (self.folder / f"{name}.csv").resolve()


def _as_csv(rows: Iterable[tuple[str, str]]) -> bytes:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([("path", "speaker"), *rows])
    return buffer.getvalue().encode()
