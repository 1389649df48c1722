"""``qmargin export``: a run as a model directory, with thresholds and an ONNX file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from qmargin.cli.options import add_keep_paths, add_overwrite, guard_of
from qmargin.errors import ConfigError

if TYPE_CHECKING:
    from qmargin.models.card import ModelCard
    from qmargin.models.onnx_file import OnnxRecord

ONNX, FEATURES_ONNX = "model.onnx", "model-features.onnx"
ONNX_MARK = "weights_sha256"  # an entry of the metadata, which is at the end of the file
_LENGTHS = (32_240, 24_000, 50_001)  # samples of recordings: traced, shorter, longer
_FRAMES = (200, 148, 311)  # of filter banks, likewise
_NUM_BINS = 80
_INPUTS = {
    "images": "aligned faces, RGB, [batch, 3, height, width], (value / 255 - 0.5) / 0.5",
    "audio": "mono samples in [-1, 1] at 16,000 Hz, [batch, samples]",
    "arrays": "float32, as they are",
    "features": "log-mel filter banks of qmargin.features.FilterBank(subtract_mean=True), "
    "[batch, frames, bins]",
}


def add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "export",
        help="make a model directory of a run; add thresholds and an ONNX file to one",
        description="Make a model directory (weights, recipe, card) of a training run, or go on "
        "with one that exists. A result of its evaluation gives it thresholds for `qmargin "
        "verify`; --onnx adds an ONNX file that was compared with PyTorch.",
    )
    add = parser.add_argument
    add("source", type=Path, metavar="SOURCE", help="run, checkpoint or model directory")
    add("--out", type=Path, metavar="DIR", help="model directory to make; needed for a run")
    weights = ("last", "average", "ema")
    add("--weights", choices=weights, default=weights[0], help="those of the run to take (last)")
    add("--name", help="name of the model (that of the recipe)")
    add("--result", type=Path, metavar="FILE", help="result.json of this model: adds thresholds")
    add("--flip", choices=("none", "sum"), help="how it used mirror images (what it says itself)")
    add(
        "--trust-result",
        action="store_true",
        help="take a result that does not name its model's weights for one of this model",
    )
    add(
        "--prototypes",
        type=Path,
        metavar="FILE",
        help="of a run: write its class vectors as embeddings, for `qmargin evaluate --cohort` "
        "without --center",
    )
    add("--onnx", action="store_true", help=f"write {ONNX} into the directory")
    add(
        "--features",
        action="store_true",
        help=f"with --onnx, of a speaker model: also write {FEATURES_ONNX}, which takes filter "
        "banks instead of waveforms",
    )
    add(
        "--card",
        action="append",
        default=[],
        metavar="KEY=TEXT",
        help="write a fact into the model card, as in licence=CC0; may be repeated",
    )
    add_overwrite(parser)
    add_keep_paths(parser)
    parser.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> None:
    """Make or complete a model directory."""
    from qmargin.evaluation.exporting import add_thresholds
    from qmargin.models.directory import add_facts

    if arguments.features and not arguments.onnx:
        raise ConfigError("--features says what an ONNX file takes; add --onnx, or leave it out")
    _check_outputs(arguments)
    facts = dict(map(_fact, arguments.card))
    if arguments.prototypes is not None:
        _check_prototypes(arguments)
        _write_prototypes(arguments.source, arguments.prototypes)
        if arguments.out is None:
            return
    directory = _directory(arguments)
    if facts:
        add_facts(directory, facts)
    sys.stdout.write(f"{directory}\n")
    if arguments.result is not None:
        thresholds = add_thresholds(
            directory,
            arguments.result,
            flip=arguments.flip,
            is_trusted=arguments.trust_result,
        )
        fars = ", ".join(f"{point.far_target:g}" for point in thresholds.points)
        sys.stdout.write(f"thresholds at FAR {fars}\n")
    if arguments.onnx:
        _write_onnx(directory)
    if arguments.features:
        _write_features_onnx(directory)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse what cannot be written, packages that are missing included, before any work."""
    from qmargin.evaluation.embed_folder import MARKS, check_suffix
    from qmargin.models.directory import THRESHOLDS
    from qmargin.models.onnx_file import check_packages

    guard = guard_of(arguments, ("out", "prototypes"))
    if arguments.prototypes is not None:
        guard.check(arguments.prototypes, MARKS[check_suffix(arguments.prototypes).suffix])
    directory: Path = arguments.out or arguments.source
    if arguments.onnx:
        check_packages()
        guard.check(directory / ONNX, ONNX_MARK)
    if arguments.features:
        guard.check(directory / FEATURES_ONNX, ONNX_MARK)
    if arguments.result is not None:
        guard.check(directory / THRESHOLDS, '"format": "qmargin-thresholds"')


def _check_prototypes(arguments: argparse.Namespace) -> None:
    from qmargin.models.directory import is_model_directory

    if is_model_directory(arguments.source):
        raise ConfigError(
            f"{arguments.source} is a model directory, which has no prototypes; give the run it "
            "was made of"
        )
    is_last = arguments.weights == "last"
    others = (arguments.name, arguments.result, arguments.flip, arguments.onnx, arguments.card)
    if arguments.out is None and (any(others) or not is_last):
        raise ConfigError(
            "--out is missing: options other than --prototypes are about a model directory"
        )


def _write_prototypes(source: Path, path: Path) -> None:
    from qmargin.evaluation.exporting import write_prototypes

    sys.stdout.write(f"{path}: {write_prototypes(source, path):,} prototypes\n")


def _directory(arguments: argparse.Namespace) -> Path:
    """The model directory, made of a run where the source is one."""
    from qmargin.evaluation.exporting import export_run, is_export_of
    from qmargin.models.directory import is_model_directory, read_card

    source: Path = arguments.source
    if not is_model_directory(source):
        if arguments.out is None:
            raise ConfigError(
                f"{source} is not a model directory and --out is missing; name the one to make, as "
                "in --out models/mine"
            )
        out: Path = arguments.out
        if not is_export_of(out, source, weights=arguments.weights):
            export_run(
                source,
                out,
                weights=arguments.weights,
                name=arguments.name,
                keep_paths=arguments.keep_paths,
            )
        elif arguments.name not in (None, read_card(out).name):
            raise ConfigError(
                f"{out} is this run's model already, under the name {read_card(out).name!r}; leave "
                "--name out"
            )
        return out
    is_changed = arguments.result or arguments.onnx or arguments.card
    if arguments.out is not None or arguments.name is not None or not is_changed:
        raise ConfigError(
            f"{source} is a model directory already; add to it with --result, --onnx or --card, "
            "without --out and --name"
        )
    return source


def _fact(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--card {text!r} has no value; write it as KEY=TEXT")
    return key.strip(), value.strip()


def _write_onnx(directory: Path) -> None:
    from qmargin.models.directory import add_facts, load_backbone
    from qmargin.models.onnx_file import write_onnx

    backbone, card = load_backbone(directory)
    record = write_onnx(
        backbone,
        directory / ONNX,
        input_shape=card.input_shape,
        lengths=_LENGTHS if card.modality == "audio" else (),
        metadata=_metadata(card),
    )
    add_facts(directory, record.to_facts(ONNX))
    _say(directory / ONNX, record)


def _write_features_onnx(directory: Path) -> None:
    """The same network for filter banks that another program computes."""
    from qmargin.models.directory import add_facts, load_backbone
    from qmargin.models.onnx_file import write_onnx

    backbone, card = load_backbone(directory)
    if card.modality != "audio":
        raise ConfigError(
            f"{directory} takes {card.modality}, which have no filter banks; leave --features out"
        )
    record = write_onnx(
        backbone,
        directory / FEATURES_ONNX,
        input_shape=(card.options.get("num_bins", _NUM_BINS),),
        lengths=_FRAMES,
        metadata=_metadata(card, inputs="features"),
    )
    facts = record.to_facts(FEATURES_ONNX)
    add_facts(directory, {f"features_{name}": text for name, text in facts.items()})
    _say(directory / FEATURES_ONNX, record)


def _say(path: Path, record: OnnxRecord) -> None:
    from qmargin.models.onnx_file import TOLERANCE

    sys.stdout.write(
        f"{path}: differs from PyTorch by {record.max_difference:.2g}, at most {TOLERANCE:g} is "
        "accepted\n"
    )


def _metadata(card: ModelCard, *, inputs: str | None = None) -> dict[str, str]:
    """What a program that reads the ONNX file alone has to know."""
    return {
        "name": card.name,
        "modality": card.modality,
        "inputs": _INPUTS[inputs or card.modality],
        "embeddings": "not of unit length; compare them by their cosine",
        "weights_sha256": card.weights_sha256,
    }
