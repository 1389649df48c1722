"""Embeddings per second over HTTP against ``qmargin embed`` on the same files."""

from __future__ import annotations

import argparse
import base64
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import ROOT, add_outputs, benchmark_options, write_record
from qmargin.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from qmargin.evaluation.model import Model

PACKAGES = ("torch", "starlette", "uvicorn", "pillow")  # whose versions matter
SIZE = 112
BATCH = 64  # of `qmargin embed`, its default


@dataclass(frozen=True)
class ServeBenchmark:
    """What to measure; the fields are the command's options."""

    images: int = 512
    backbone: str = "mobilefacenet"
    batches: tuple[int, ...] = (1, 8, 32)
    connections: int = 8
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.images, self.connections, self.repeats, *self.batches) < 1:
            raise ConfigError(
                f"images={self.images}, batches={self.batches}, connections={self.connections} and "
                f"repeats={self.repeats} must be at least 1: pass more"
            )


def add_subject(subjects: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``serve`` to the subjects of ``python -m benchmarks``."""
    parser = subjects.add_parser(
        "serve",
        help="embeddings per second over HTTP against qmargin embed",
        description="Write face-sized JPEGs and a model with fresh weights; embed the files as "
        "`qmargin embed` does and by requests to `qmargin serve`, in turns.",
    )
    defaults = ServeBenchmark()
    add = parser.add_argument
    add("--images", type=int, default=defaults.images, help=f"{SIZE} x {SIZE} JPEGs to embed")
    add("--backbone", default=defaults.backbone, help="network of the model")
    add("--batches", type=int, nargs="+", default=list(defaults.batches), help="files of a request")
    add("--connections", type=int, default=defaults.connections, help="clients at once")
    add("--repeats", type=int, default=defaults.repeats, help="timed turns; medians are shown")
    add("--seed", type=int, default=defaults.seed, help="of images and weights")
    add_outputs(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Run the command with its parsed arguments."""
    options, json_path, tables = benchmark_options(arguments, "serve")
    settings = ServeBenchmark(**{**options, "batches": tuple(options["batches"])})
    rates = measure(settings)
    tables.show(
        "serve",
        f"{settings.images:,} JPEGs of {SIZE} x {SIZE} pixels, {settings.backbone}, "
        f"{settings.connections} connections, medians of {settings.repeats} turns",
        ["by", "embeddings / s", "of qmargin embed"],
        [
            [name, f"{rate:.0f}", f"{rate / rates['qmargin embed']:.2f}"]
            for name, rate in rates.items()
        ],
    )
    if json_path is not None:
        write_record(json_path, asdict(settings), {"rates": rates}, PACKAGES)
    tables.write(PACKAGES)


def measure(settings: ServeBenchmark) -> dict[str, float]:
    """Embeddings per second by every way."""
    from qmargin.evaluation.embed import embed_files
    from qmargin.evaluation.model import load_model

    with tempfile.TemporaryDirectory(prefix="qmargin-bench-") as temporary:
        folder, directory = Path(temporary) / "faces", Path(temporary) / "model"
        names = write_images(settings, folder)
        write_fresh_model(settings, directory)
        model: Model = load_model(directory)
        contents = [base64.b64encode((folder / name).read_bytes()).decode() for name in names]
        seconds: dict[str, list[float]] = {}
        with served(directory) as port:
            for turn in range(settings.repeats + 1):  # the first turn warms up
                found = {}
                began = time.perf_counter()
                embed_files(model, folder, names, batch_size=BATCH)
                found["qmargin embed"] = time.perf_counter() - began
                for batch in settings.batches:
                    began = time.perf_counter()
                    request_all(port, contents, batch, settings.connections)
                    label = f"HTTP, {batch} file{'s' * (batch > 1)} a request"
                    found[label] = time.perf_counter() - began
                if turn:
                    for name, value in found.items():
                        seconds.setdefault(name, []).append(value)
    return {name: settings.images / statistics.median(v) for name, v in seconds.items()}


def write_images(settings: ServeBenchmark, folder: Path) -> list[str]:
    """Noise with the spectrum of pictures, as JPEG files."""
    import numpy as np

    from qmargin.data.images import encode_image

    folder.mkdir()
    generator, names = np.random.default_rng(settings.seed), []
    for number in range(settings.images):
        coarse = generator.integers(0, 256, (SIZE // 8, SIZE // 8, 3), dtype=np.uint8)
        pixels = coarse.repeat(8, axis=0).repeat(8, axis=1)
        names.append(f"{number:05d}.jpg")
        (folder / names[-1]).write_bytes(encode_image(pixels, quality=90))
    return names


def write_fresh_model(settings: ServeBenchmark, directory: Path) -> None:
    """A model directory with weights as they are drawn."""
    import torch

    from qmargin.models import create_backbone
    from qmargin.models.directory import ModelCard, write_model

    torch.manual_seed(settings.seed)
    weights = create_backbone(settings.backbone, embedding_dim=512).state_dict()
    card = ModelCard("benchmark", "images", (3, SIZE, SIZE), settings.backbone, 512)
    write_model(directory, weights=weights, card=card, recipe="")


@contextmanager
def served(directory: Path) -> Iterator[int]:
    """The port of `qmargin serve` in a process of its own."""
    command = [sys.executable, "-m", "qmargin", "serve", str(directory), "--no-open", "--port", "0"]
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("http"):
                break
        else:
            raise BackendError("qmargin serve did not start; run it by hand to see why")
        yield int(line.rsplit(":", 1)[1].strip("/\n"))
    finally:
        process.terminate()
        process.communicate()


def request_all(port: int, contents: Sequence[str], batch: int, connections: int) -> None:
    """Send all files, so many in a request, over so many connections."""
    bodies = [
        json.dumps({"inputs": contents[start : start + batch]})
        for start in range(0, len(contents), batch)
    ]

    def send(own: Sequence[str]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for body in own:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/embed", body, headers)
            answer = connection.getresponse()
            content = answer.read()
            if answer.status != 200:
                raise BackendError(f"the server answered {answer.status}: {content[:200]!r}")
        connection.close()

    with ThreadPoolExecutor(connections) as pool:
        list(pool.map(send, [bodies[start::connections] for start in range(connections)]))
