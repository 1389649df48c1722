"""A server in a thread of the test, and a client that says what it sends."""

from __future__ import annotations

import base64
import http.client
import io
import json
import threading
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from helpers.model_directories import make_model
from helpers.results import synthetic_result
from qmargin.data.images import encode_image
from qmargin.evaluation import export
from qmargin.models import create_backbone
from qmargin.models.directory import THRESHOLDS, ModelCard, write_model
from qmargin.serve.app import build_app
from qmargin.serve.gate import Rules
from qmargin.serve.server import listen, server_of
from qmargin.serve.service import Service, model_for_service

JSON = {"Content-Type": "application/json"}


@dataclass
class Server:
    """A server that runs, and one request to it."""

    service: Service
    port: int
    headers: dict[str, str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Status, parsed content and headers; a header of "" is left out."""
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        sent = {**self.headers, **(JSON if method == "POST" else {}), **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host="Host" in sent)
            if content is not None and "Content-Length" not in sent:
                sent["Content-Length"] = str(len(content))
            for name, value in sent.items():
                if value:
                    connection.putheader(name, value)
            connection.endheaders(content)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        kind = answer.headers.get("content-type", "")
        return answer.status, json.loads(data) if "json" in kind else data, answer.headers

    def post(self, path: str, body: Any, **options: Any) -> Any:
        """Content of a POST that succeeds."""
        status, content, _ = self.ask("POST", f"/v1/{path}", body, **options)
        assert status == 200, content
        return content

    def refusal(self, path: str, body: Any, **options: Any) -> tuple[int, str]:
        """Status and message of a POST that is refused."""
        status, content, _ = self.ask("POST", f"/v1/{path}", body, **options)
        assert status >= 400, content
        return status, content["error"]["message"]


@contextmanager
def serving(directory: Path, *, rules: Rules | None = None, **options: Any) -> Iterator[Server]:
    """A server of a model directory on a free port; ``options`` are those of ``Service``."""
    service = Service(model_for_service(directory, device="cpu"), **options)
    rules = rules or Rules()
    listener = listen("127.0.0.1", 0)
    server = server_of(build_app(service, rules))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    headers = {} if rules.token is None else {"Authorization": f"Bearer {rules.token}"}
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield Server(service, listener.getsockname()[1], headers)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        service.close()
        listener.close()


def face_model(folder: Path, *, thresholds: bool = True) -> Path:
    """A model of 16 x 16 pictures, with thresholds of a made-up evaluation."""
    return _with_thresholds(folder, make_model(folder), thresholds)


def voice_model(folder: Path, *, thresholds: bool = True) -> Path:
    """A model of recordings."""
    torch.manual_seed(0)
    options = {"width": 8, "mixed": 24}
    backbone = create_backbone("ecapa512", embedding_dim=8, **options)
    card = ModelCard("small", "audio", (), "ecapa512", 8, options=options)
    card = write_model(folder, weights=backbone.state_dict(), card=card, recipe="")
    return _with_thresholds(folder, card, thresholds)


def _with_thresholds(folder: Path, card: ModelCard, thresholds: bool) -> Path:
    if thresholds:
        result = synthetic_result(card=card.to_texts(), num_impostors=20_000)
        made = export.thresholds_of(
            result, weights_sha256=card.weights_sha256, result_sha256="ab" * 32
        )
        export.write_thresholds(folder / THRESHOLDS, replace(made, calibration=None))
    return folder


def picture(seed: int = 0, *, size: int = 16, format: str = "PNG") -> bytes:
    """A file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    return encode_image(pixels, format=format)


def recording(seed: int = 0, *, seconds: float = 1.0, level: float = 0.3) -> bytes:
    """A WAV file of noise."""
    samples = np.random.default_rng(seed).normal(0.0, level, round(16_000 * seconds))
    return wav(samples)


def wav(samples: NDArray[Any]) -> bytes:
    """Samples in [-1, 1] as a file."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes((32767 * np.clip(samples, -1, 1)).astype("<i2").tobytes())
    return buffer.getvalue()


def b64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def huge_png(side: int = 40_000) -> bytes:
    """A PNG file whose header promises ``side x side`` pixels, and which has few bytes."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    return start + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
