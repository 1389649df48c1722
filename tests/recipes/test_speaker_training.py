"""The small speaker recipe end to end on real speech: train, embed whole recordings, evaluate."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from helpers.recordings import real_speech
from qmargin.data.speech import open_speech
from qmargin.evaluation.embeddings import read_embeddings
from qmargin.evaluation.options import EvaluationOptions
from qmargin.evaluation.protocols.trials import evaluate_speakers
from qmargin.evaluation.protocols.utterances import Recordings, embed_utterances
from qmargin.evaluation.trials import read_trials
from qmargin.models import registry
from qmargin.models.speaker_resnet import SpeakerResNet
from qmargin.recipes.speaker import SPEAKER_RECIPES
from qmargin.training.averaging import average_checkpoints
from qmargin.training.build import build_backbone
from qmargin.training.checkpoint import open_checkpoint
from qmargin.training.loop import train
from qmargin.training.recipe import Recipe

FRAMES = 100


class Embedder:
    """A network in evaluation mode."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network.eval()

    @torch.inference_mode()
    def embed(self, waveforms: list[np.ndarray]) -> torch.Tensor:
        found: torch.Tensor = self.network(torch.from_numpy(np.stack(waveforms)))
        return found


def tiny_recipe() -> Recipe:
    """A minute of the small recipe, with a network a hundredth the size."""
    recipe = SPEAKER_RECIPES["speakers_r34_q_margin_a150"]()
    assert recipe.margin_schedule is not None
    return replace(
        recipe,
        data=replace(recipe.data, batch_size=32, num_workers=0),
        model=replace(recipe.model, backbone="tiny_speaker", embedding_dim=32),
        schedule=replace(recipe.schedule, warmup_epochs=0.5, final_lr=1e-3),
        margin_schedule=replace(recipe.margin_schedule, start_epoch=1.0, end_epoch=2.0),
        run=replace(recipe.run, epochs=4, keep=1, average_last=0),
    )


def equal_error(network: nn.Module, folder: Path, out: Path) -> float:
    lines = (folder / "trials.txt").read_text().splitlines()
    kept = [line for line in lines if "A00" in line or "A01" in line]
    out.with_suffix(".txt").write_text("\n".join(kept) + "\n")
    trials = read_trials(out.with_suffix(".txt"))
    embed_utterances(Embedder(network), Recordings(folder, trials.keys.names), out, model_id="t")
    options = EvaluationOptions(fars=(1e-2,), num_replicates=0)
    return evaluate_speakers(read_embeddings(out), trials, options).metrics.eer.value


@pytest.mark.slow
def test_a_tiny_network_learns_speakers_it_has_never_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(embedding_dim: int) -> nn.Module:
        return SpeakerResNet((1, 1, 1, 1), embedding_dim, width=8)

    monkeypatch.setattr(registry, "_BACKBONES", {**registry._BACKBONES, "tiny_speaker": tiny})
    folder, recipe = real_speech(), tiny_recipe()
    speech = open_speech(folder / "train", num_frames=FRAMES, speed_perturbation=False)
    assert (len(speech), speech.num_classes) == (1200, 40)
    outcome = train(recipe, tmp_path / "run", dataset=speech, device="cpu")
    assert outcome.step == 4 * 37
    assert outcome.checkpoint is not None
    network = build_backbone(recipe)
    before = equal_error(network, folder, tmp_path / "before.safetensors")
    network.load_state_dict(average_checkpoints([open_checkpoint(outcome.checkpoint)]))
    after = equal_error(network, folder, tmp_path / "after.safetensors")
    assert after < 0.15
    assert after < 0.6 * before
