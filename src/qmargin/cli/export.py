"""``qmargin export``: write a model directory, with thresholds and an ONNX file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qmargin.cli.options import KeepingPaths, Overwriting, argument, guard_of, option
from qmargin.errors import ConfigError

ONNX, FEATURES_ONNX = "model.onnx", "model-features.onnx"
ONNX_MARK = "weights_sha256"  # an entry of the metadata, which is at the end of the file
_LENGTHS = (32_240, 24_000, 50_001)  # samples of recordings: traced, shorter, longer
_FRAMES = (200, 148, 311)  # of filter banks, likewise
_NUM_BINS = 80
_INPUTS = {
    "images": "aligned faces, RGB, [batch, 3, height, width], (value / 255 - 0.5) / 0.5",
    "audio": "mono samples in [-1, 1] at 16,000 Hz, [batch, samples]",
    "arrays": "float32, as they are",
    "features": "log-mel filter banks of qmargin.models.features.FilterBank(subtract_mean=True), "
    "[batch, frames, bins]",
}


_UNIT_PIXELS = "RGB, [batch, 3, height, width], value / 255"  # of models of drawn identities


@dataclass(frozen=True, kw_only=True)
class Export(Overwriting, KeepingPaths):
    """Write a model directory of a run, or add thresholds or an ONNX file to one.

    Writes a model directory (weights, recipe, card) of a training run, or completes an existing
    one. --result adds the thresholds of an evaluation, for `qmargin verify`; --onnx adds an ONNX
    file that is compared with PyTorch.
    """

    source: Path = argument("run, checkpoint or model directory", metavar="SOURCE")
    out: Path | None = option("model directory to write; required for a run", metavar="DIR")
    weights: Literal["last", "average", "ema"] = option(
        "which weights of the run to export", default="last"
    )
    name: str | None = option("name of the model (that of the recipe)", metavar="NAME")
    result: Path | None = option("result.json of this model: adds thresholds")
    flip: Literal["none", "sum"] | None = option(
        "whether the evaluation used mirror images (as stored in the result)"
    )
    trust_result: bool = option("accept a result that does not name its model's weights")
    prototypes: Path | None = option("write the prototypes of a run to FILE, a cohort for AS-norm")
    onnx: bool = option(f"write {ONNX} into the directory")
    features: bool = option(f"with --onnx: also {FEATURES_ONNX}, which takes filter banks")
    card: tuple[str, ...] = option(
        "fact for the model card, as in licence=CC0", metavar="KEY=TEXT", repeated=True
    )

    def run(self) -> None:
        from qmargin.evaluation.export import add_thresholds, write_prototypes
        from qmargin.models.directory import add_facts
        from qmargin.report.numbers import rate_text

        if self.features and not self.onnx:
            raise ConfigError("--features needs --onnx; add --onnx, or leave --features out")
        self._check_outputs()
        facts = [text.partition("=") for text in self.card]
        for (key, equals, _), text in zip(facts, self.card, strict=True):
            if not equals or not key.strip():
                raise ConfigError(f"--card {text!r} has no value; write it as KEY=TEXT")
        if self.prototypes is not None:
            number = write_prototypes(self.source, self.prototypes)
            sys.stdout.write(f"{self.prototypes}: {number:,} prototypes\n")
            if self.out is None:
                return
        directory = self._directory()
        if facts:
            add_facts(directory, {key.strip(): value.strip() for key, _, value in facts})
        sys.stdout.write(f"{directory}\n")
        if self.result is not None:
            trusted = self.trust_result
            thresholds = add_thresholds(directory, self.result, flip=self.flip, is_trusted=trusted)
            fars = ", ".join(rate_text(point.far_target) for point in thresholds.points)
            sys.stdout.write(f"thresholds at FAR {fars}\n")
        if self.onnx:
            _write_onnx(directory)
        if self.features:
            _write_onnx(directory, features=True)

    def _check_outputs(self) -> None:
        """Refuse impossible outputs and missing packages before any work."""
        from qmargin.evaluation.embed import MARKS, check_suffix
        from qmargin.models.directory import THRESHOLDS, is_model_directory
        from qmargin.models.onnx_file import check_packages

        guard = guard_of(self, ("out", "prototypes"))
        if self.prototypes is not None:
            guard.check(self.prototypes, MARKS[check_suffix(self.prototypes).suffix])
            if is_model_directory(self.source):
                raise ConfigError(f"{self.source} is a model without prototypes; give its run")
            others = (self.name, self.result, self.flip, self.onnx, self.card)
            if self.out is None and (any(others) or self.weights != "last"):
                raise ConfigError("--out is missing: other options need a model directory")
        if self.onnx:
            check_packages()
        marks = {
            ONNX: self.onnx and ONNX_MARK,
            FEATURES_ONNX: self.features and ONNX_MARK,
            THRESHOLDS: self.result and '"format": "qmargin-thresholds"',
        }
        for name, mark in marks.items():
            if mark:
                guard.check((self.out or self.source) / name, mark)

    def _directory(self) -> Path:
        """The model directory, written from a run if the source is one."""
        from qmargin.evaluation.export import export_run, is_export_of
        from qmargin.models.directory import is_model_directory, read_card

        source, out = self.source, self.out
        if is_model_directory(source):
            is_changed = self.result or self.onnx or self.card
            if out is not None or self.name is not None or not is_changed:
                remedy = "add --result, --onnx or --card, without --out and --name"
                raise ConfigError(f"{source} is a model directory already; {remedy}")
            return source
        if out is None:
            raise ConfigError(f"{source} is a run and --out is missing; name the model to write")
        if not is_export_of(out, source, weights=self.weights):
            export_run(
                source, out, weights=self.weights, name=self.name, keep_paths=self.keep_paths
            )
        elif self.name not in (None, name := read_card(out).name):
            raise ConfigError(f"{out} is this run's model, named {name!r}; leave --name out")
        return out


def _write_onnx(directory: Path, *, features: bool = False) -> None:
    """Write an ONNX file, on request also one that takes filter banks."""
    from qmargin.models.directory import ModelCard, add_facts, load_backbone
    from qmargin.models.onnx_file import TOLERANCE, write_onnx

    backbone, card = load_backbone(directory)
    is_audio = card.modality == "audio"
    if features and not is_audio:
        raise ConfigError(f"{directory} takes {card.modality}; leave --features out")
    name, kind, prefix = ONNX, card.modality, ""
    shape, lengths = card.input_shape, _LENGTHS if is_audio else ()
    if features:
        name, kind, prefix = FEATURES_ONNX, "features", "features_"
        shape, lengths = (card.options.get("num_bins", _NUM_BINS),), _FRAMES
    metadata = {  # facts for programs that read only the ONNX file
        "name": card.name,
        "modality": card.modality,
        "inputs": _INPUTS[kind] if card.pixels == ModelCard.pixels else _UNIT_PIXELS,
        "embeddings": "not of unit length; compare them by their cosine",
        "weights_sha256": card.weights_sha256,
    }
    path = directory / name
    largest, facts = write_onnx(
        backbone, path, input_shape=shape, lengths=lengths, metadata=metadata
    )
    add_facts(directory, {prefix + key: text for key, text in facts.items()})
    difference = f"{largest:.2g}, at most {TOLERANCE:g} is accepted"
    sys.stdout.write(f"{path}: differs from PyTorch by {difference}\n")
