"""Speaker runs: every row of the paper's speaker table, and the same recipe for other networks.

All follow one recipe, that of the paper: SGD with momentum 0.9 and weight decay 1e-4 for 150
epochs, a warm-up of 6 epochs, a learning rate that falls exponentially from 0.1 to 5e-5, a margin
that rises exponentially from 0 between epochs 20 and 40 (counted from 1), 128 samples on each of 4
GPUs. What the paper leaves to the toolkit it was built on, WeSpeaker, is as there: Nesterov's
momentum, chunks of 2.015 s, three speeds with speakers of their own (17,982 classes), noise or
reverberation for 6 of 10 samples, decay that begins under the warm-up, and an average of the
checkpoints of the last 10 epochs. Its factor on the learning rate is written out: ``base_batch``
is 64, so that the peak is 0.8 times what the decay has left of it.

Say where the recordings are with ``--set data.path=DIR``, and the corpora of noises and impulse
responses with ``data.options.noise_path`` and ``data.options.response_path``. None of the runs on
VoxCeleb2 has been made end to end with this package.

Names that end in ``_lm`` fine-tune with a large margin, as WeSpeaker does: from the averaged
weights of another run, ``--set run.start_from=DIR``, on chunks of 6 s at one speed. Names that
begin with ``audiomnist`` are of a small collection that is kept in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from qmargin.recipes import Loss, builder
from qmargin.registry import register_recipe

if TYPE_CHECKING:
    from qmargin.training.recipe import Recipe

    Builder = Callable[[], Recipe]
    Build = Callable[[str, "SpeakerRun"], Recipe]

NUM_SPEAKERS = 5_994
NUM_SPEEDS = 3
NUM_UTTERANCES = 1_092_009
BATCH = 4 * 128
ONE_GPU_BATCH = 128
BASE_BATCH = 64
SMALL_BATCH = 64
TUNING_BATCH = 4 * 64
EPOCHS, SMALL_EPOCHS, TUNING_EPOCHS = 150, 40, 5
AUDIOMNIST_EPOCHS = 60
NUM_AVERAGED = 10
NUM_ROOMS = 512  # simulated once in each process, instead of a corpus of impulse responses


class Network(NamedTuple):
    """A backbone as it is usually trained."""

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
OTHERS = ("arcface", "q_margin_a150")  # rows that the other networks are trained with as well
COMPARED = ("arcface", "cosface", "entmax_a175", "q_margin_a150")  # of small collections
LARGE_MARGINS = {"arcface": 0.5, "q_margin_a150": 0.2}  # that runs are fine-tuned with


@dataclass(frozen=True)
class SpeakerRun:
    """What tells one speaker run from another.

    Args:
        network: A key of ``NETWORKS``.
        loss: Preset and numbers.
        note: What is special about the run, for its description.
        batch_size: Over all GPUs.
    """

    network: str
    loss: Loss
    note: str = ""
    batch_size: int = BATCH

    def describe(self, data: str) -> str:
        """One line for lists."""
        note = f" ({self.note})" if self.note else ""
        return f"{data}, {NETWORKS[self.network].title}, {self.loss.describe()}{note}."

    def build(self, name: str) -> Recipe:
        """The recipe on VoxCeleb2."""
        # imported here, so that a list of recipes need not wait for torch
        from qmargin.training import recipe

        network, row = NETWORKS[self.network], self.loss
        return recipe.Recipe(
            name=name,
            data=recipe.DataPart(
                "audio",
                batch_size=self.batch_size,
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
            model=recipe.ModelPart(network.backbone, embedding_dim=network.embedding_dim),
            loss=recipe.LossPart.from_preset(row.preset, **row.numbers),
            optimizer=recipe.OptimizerPart(
                lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True, base_batch=BASE_BATCH
            ),
            schedule=recipe.SchedulePart(
                "exponential", warmup_epochs=6.0, decay_in_warmup=True, final_lr=5e-5
            ),
            margin_schedule=recipe.ValueSchedule("exponential", start_epoch=19.0, end_epoch=39.0),
            run=recipe.RunPart(
                epochs=EPOCHS,
                save_every_steps=NUM_UTTERANCES // self.batch_size,  # once an epoch
                keep=NUM_AVERAGED,
                average_last=NUM_AVERAGED,
            ),
            seed=42,
        )


def _small(name: str, run: SpeakerRun) -> Recipe:
    """A folder of recordings and no other corpus: simulated rooms, a shorter run."""
    recipe = run.build(name)
    margins = recipe.margin_schedule
    assert margins is not None  # every run above has one
    return replace(
        recipe,
        data=replace(
            recipe.data,
            path="data/speakers",
            num_classes=None,
            num_workers=2,
            options={
                "num_frames": 200,
                "simulate_rooms": True,
                "num_rooms": NUM_ROOMS,
                "dither": 1.0,
            },
        ),
        model=replace(recipe.model, options={"embedding_norm": True}),
        schedule=replace(recipe.schedule, warmup_epochs=2.0),
        margin_schedule=replace(margins, start_epoch=5.0, end_epoch=10.0),
        run=replace(recipe.run, epochs=SMALL_EPOCHS, save_every_steps=100),
        seed=0,
    )


def _audiomnist(name: str, run: SpeakerRun) -> Recipe:
    """An hour of speech, decoded once: about a thousand steps, which a GPU takes in a minute."""
    recipe = _small(name, run)
    margins = recipe.margin_schedule
    assert margins is not None  # every run above has one
    return replace(
        recipe,
        data=replace(
            recipe.data,
            path="data/audiomnist60/train",
            num_workers=8,
            options={**recipe.data.options, "in_memory": True},
        ),
        margin_schedule=replace(margins, start_epoch=10.0, end_epoch=20.0),
        precision=replace(recipe.precision, dtype="bf16", channels_last=True),
        run=replace(
            recipe.run, epochs=AUDIOMNIST_EPOCHS, save_every_steps=500, keep=1, average_last=0
        ),
    )


def _large_margin(name: str, run: SpeakerRun) -> Recipe:
    """WeSpeaker's fine-tuning: longer chunks, a larger margin from the first step on."""
    recipe = run.build(name)
    options = {**recipe.data.options, "num_frames": 600, "speed_perturbation": False}
    return replace(
        recipe,
        data=replace(recipe.data, options={**options, "keep_speed_classes": True}),
        optimizer=replace(recipe.optimizer, lr=1e-4),
        schedule=replace(recipe.schedule, warmup_epochs=1.0, final_lr=2.5e-5),
        margin_schedule=None,
        run=replace(
            recipe.run,
            epochs=TUNING_EPOCHS,
            start_from=f"runs/{name.removesuffix('_lm')}",
            keep=TUNING_EPOCHS,
            average_last=TUNING_EPOCHS,
        ),
    )


def _voxceleb2(name: str, run: SpeakerRun) -> Recipe:
    return run.build(name)


def _speaker_recipes() -> dict[str, Builder]:
    found: dict[str, Builder] = {}

    def add(
        name: str, run: SpeakerRun, build: Callable[[str, SpeakerRun], Recipe], data: str
    ) -> None:
        found.setdefault(name, builder(name, run, build, line=run.describe(data)))

    for row, loss in TABLE.items():
        add(f"voxceleb2_r34_{row}", SpeakerRun("r34", loss), _voxceleb2, "VoxCeleb2")
    for row in OTHERS:
        for network in NETWORKS:
            run = SpeakerRun(network, TABLE[row])
            add(f"voxceleb2_{network}_{row}", run, _voxceleb2, "VoxCeleb2")
        run = SpeakerRun("r34", TABLE[row], note="1 GPU", batch_size=ONE_GPU_BATCH)
        add(f"voxceleb2_r34_{row}_1gpu", run, _voxceleb2, "VoxCeleb2")
    for row, margin in LARGE_MARGINS.items():
        loss = TABLE[row]._replace(margin=margin)
        run = SpeakerRun("r34", loss, note="fine-tuning", batch_size=TUNING_BATCH)
        add(f"voxceleb2_r34_{row}_lm", run, _large_margin, "VoxCeleb2")
    for row in COMPARED:
        run = SpeakerRun("r34", TABLE[row], batch_size=SMALL_BATCH)
        add(f"speakers_r34_{row}", run, _small, "A folder of speakers")
        add(f"audiomnist_r34_{row}", run, _audiomnist, "AudioMNIST")
    return found


SPEAKER_RECIPES = _speaker_recipes()
"""Functions that return a recipe, by its name."""

for _name, _build in SPEAKER_RECIPES.items():
    register_recipe(_name, _build)
