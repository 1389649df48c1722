"""Speaker runs: every row of the paper's speaker table, and the same recipe for other networks.

Settings that the paper does not give are those of WeSpeaker, on which it is based: Nesterov's
momentum, chunks of 2.015 s, three speeds with speakers of their own (17,982 classes), noise or
reverberation for 6 of 10 samples, decay that begins under the warm-up, and an average of the
checkpoints of the last 10 epochs. Its factor on the learning rate is written out: ``base_batch`` is
64, so that the peak is 0.8 times what the decay has left of it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from qmargin.recipes import Loss, add_recipe

if TYPE_CHECKING:
    from qmargin.recipes import Builder
    from qmargin.training.recipe import Recipe

NUM_SPEAKERS = 5_994
NUM_SPEEDS = 3
NUM_UTTERANCES = 1_092_009
BATCH, ONE_GPU_BATCH, SMALL_BATCH, TUNING_BATCH = 4 * 128, 128, 64, 4 * 64
BASE_BATCH = 64
NUM_AVERAGED = 10
SMALL = (  # a folder of recordings and no other corpus: simulated rooms, a shorter run
    "data.path=data/speakers",
    "data.num_classes=null",
    "data.num_workers=2",
    "data.options=null",
    "data.options.num_frames=200",
    "data.options.simulate_rooms=true",
    "data.options.num_rooms=512",  # simulated once in each process
    "data.options.dither=1.0",
    "model.options.embedding_norm=true",
    "schedule.warmup_epochs=2",
    "margin_schedule.start_epoch=5",
    "margin_schedule.end_epoch=10",
    "run.epochs=40",
    "run.save_every_steps=100",
    "seed=0",
)
AUDIOMNIST = (  # an hour of speech, decoded once: about a thousand steps, a minute on a GPU
    *SMALL,
    "data.path=data/audiomnist60/train",
    "data.num_workers=8",
    "data.options.in_memory=true",
    "margin_schedule.start_epoch=10",
    "margin_schedule.end_epoch=20",
    "precision.dtype=bf16",
    "precision.channels_last=true",
    "run.epochs=60",
    "run.save_every_steps=500",
    "run.keep=1",
    "run.average_last=0",
)
LARGE_MARGIN = (  # WeSpeaker's fine-tuning: longer chunks, a larger margin from the first step on
    "data.options.num_frames=600",
    "data.options.speed_perturbation=false",
    "data.options.keep_speed_classes=true",
    "optimizer.lr=1e-4",
    "schedule.warmup_epochs=1",
    "schedule.final_lr=2.5e-5",
    "margin_schedule=null",
    "run.epochs=5",
    "run.keep=5",
    "run.average_last=5",
)


class Network(NamedTuple):
    """A backbone with its usual settings."""

    title: str
    backbone: str
    embedding_dim: int


NETWORKS = {
    "r18": Network("R18", "speaker_resnet18", 256),
    "r34": Network("R34", "speaker_resnet34", 256),
    "r50": Network("R50", "speaker_resnet50", 256),
    "r101": Network("R101", "speaker_resnet101", 256),
    "ecapa512": Network("ECAPA-512", "ecapa512", 192),
    "ecapa1024": Network("ECAPA-1024", "ecapa1024", 192),
    "campplus": Network("CAM++", "campplus", 512),
}
TABLE = {  # every row of the paper's table
    "arcface": Loss("ArcFace", "arcface", 32.0, 0.2),
    "cosface": Loss("CosFace", "cosface", 32.0, 0.2),
    "entmax_a200": Loss("EntMax", "entmax_face", 5.0, 0.1, 2.0),
    "entmax_a175": Loss("EntMax", "entmax_face", 5.0, 0.1, 1.75),
    "q_margin_a175": Loss("Q-Margin", "q_margin", 5.0, 0.1, 1.75),  # best at FAR 1e-4
    "q_margin_a150": Loss("Q-Margin", "q_margin", 10.0, 0.1, 1.5),  # best at FAR 1e-3
}
COMPARED = ("arcface", "cosface", "entmax_a175", "q_margin_a150")  # of small collections
LARGE_MARGINS = {"arcface": 0.5, "q_margin_a150": 0.2}  # rows of the other networks, fine-tuned
SPEAKER_RECIPES: dict[str, Builder] = {}
"""Functions that return a recipe, by its name."""


def _recipe(network: str, loss: Loss, batch_size: int) -> Recipe:
    """The paper's run on VoxCeleb2."""
    from qmargin.training import recipe  # listing recipes does not import torch

    return recipe.Recipe(
        name="speaker",
        data=recipe.DataPart(
            "audio",
            batch_size=batch_size,
            path="data/voxceleb2/dev",
            num_classes=NUM_SPEEDS * NUM_SPEAKERS,
            num_workers=8,
            options={
                "num_frames": 200,
                "speed_perturbation": True,
                "augment": 0.6,
                "noise_path": "data/musan",
                "response_path": "data/rirs_noises/simulated_rirs",
                "dither": 1.0,
            },
        ),
        model=recipe.ModelPart(
            NETWORKS[network].backbone, embedding_dim=NETWORKS[network].embedding_dim
        ),
        loss=loss.build(),
        optimizer=recipe.OptimizerPart(
            lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True, base_batch=BASE_BATCH
        ),
        schedule=recipe.SchedulePart(
            "exponential", warmup_epochs=6.0, decay_in_warmup=True, final_lr=5e-5
        ),
        margin_schedule=recipe.ValueSchedule("exponential", start_epoch=19.0, end_epoch=39.0),
        run=recipe.RunPart(
            epochs=150,
            save_every_steps=NUM_UTTERANCES // batch_size,  # once an epoch
            keep=NUM_AVERAGED,
            average_last=NUM_AVERAGED,
        ),
        seed=42,
    )


def _add(
    name: str,
    loss: Loss,
    *settings: str,
    network: str = "r34",
    batch_size: int = BATCH,
    data: str = "VoxCeleb2",
    note: str = "",
) -> None:
    line = f"{data}, {NETWORKS[network].title}, {loss.describe(note)}"
    build = partial(_recipe, network, loss, batch_size)
    add_recipe(SPEAKER_RECIPES, name, line, build, settings)


for _row, _loss in TABLE.items():
    _add(f"voxceleb2_r34_{_row}", _loss)
for _row, _margin in LARGE_MARGINS.items():
    for _network in [name for name in NETWORKS if name != "r34"]:
        _add(f"voxceleb2_{_network}_{_row}", TABLE[_row], network=_network)
    _name = f"voxceleb2_r34_{_row}"
    _add(f"{_name}_1gpu", TABLE[_row], batch_size=ONE_GPU_BATCH, note="1 GPU")
    _tuned = TABLE[_row]._replace(margin=_margin)
    _settings = (*LARGE_MARGIN, f"run.start_from=runs/{_name}")
    _add(f"{_name}_lm", _tuned, *_settings, batch_size=TUNING_BATCH, note="fine-tuning")
for _row in COMPARED:
    _small = partial(_add, batch_size=SMALL_BATCH)
    _small(f"speakers_r34_{_row}", TABLE[_row], *SMALL, data="A folder of speakers")
    _small(f"audiomnist_r34_{_row}", TABLE[_row], *AUDIOMNIST, data="AudioMNIST")
