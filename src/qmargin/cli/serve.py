"""``qmargin serve``: a local page and an HTTP interface for a model."""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

from qmargin.cli.options import Count, ModelUse, argument, option
from qmargin.cli.tables import stage_progress
from qmargin.errors import BackendError, ConfigError
from qmargin.terminal import printable

if TYPE_CHECKING:
    from qmargin.serve.service import Service

LOOPBACK = "127.0.0.1"
WILDCARDS = {"0.0.0.0": LOOPBACK, "::": "::1"}  # all addresses; where this machine finds them
LEAST_TOKEN = 16  # characters
_PACKAGES = ("starlette", "uvicorn")
_SHOWN = 5


def port(text: str) -> int:
    """A port number; 0 for any free port."""
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise ArgumentTypeError(f"{value} is not a port; give 0 to 65535")
    return value


@dataclass(frozen=True, kw_only=True)
class Serve(ModelUse):
    """Serve a model: a page that compares two files, and an HTTP interface.

    Page and interface compare two files, embed files, and search a gallery. Without --host, only
    this machine can reach them. Files are neither stored nor logged.
    """

    model: Path = argument("model directory, or a run", metavar="MODEL")
    host: str = option(
        "address to listen on; any but this machine's own needs --token",
        default=LOOPBACK,
        metavar="ADDRESS",
    )
    port: Annotated[int, port] = option("port; 0 for any free port", default=8765, metavar="N")
    token: str | None = option(
        f"secret that clients must send, {LEAST_TOKEN} characters or more", metavar="TEXT"
    )
    gallery: Path | None = option(
        "people to search: a folder with one sub-folder per person", metavar="DIR"
    )
    store: Path | None = option(
        "keep the embeddings of the gallery in this .safetensors file (in memory only)",
        metavar="FILE",
    )
    max_upload: Count = option("largest request, in MiB", default=32)
    max_pixels: Count = option("largest picture, in pixels", default=50_000_000)
    max_seconds: Count = option("longest recording, in seconds", default=60)
    open: bool = option("open the page in a browser (default: --open)", default=True)

    def run(self) -> None:
        check_packages()
        from qmargin.serve.app import build_app
        from qmargin.serve.gate import Rules
        from qmargin.serve.inputs import MEBIBYTE
        from qmargin.serve.server import listen, open_page, run

        rules = Rules(self.host, self.token, self.max_upload * MEBIBYTE)
        if self.token is not None and len(self.token) < LEAST_TOKEN:
            raise ConfigError(
                f"--token has {len(self.token)} characters; give {LEAST_TOKEN} or more, as from "
                'python -c "import secrets; print(secrets.token_urlsafe())"'
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigError("--token has characters other than printable ASCII; choose another")
        if self.token is None and not rules.is_loopback:
            raise ConfigError(
                f"--host {self.host} lets other machines use the model; choose a --token that they "
                "have to send, or leave --host out"
            )
        listener = listen(self.host, self.port)  # before the model is loaded
        with listener:
            service = self._service()
            try:
                app = build_app(service, rules)
                url = self._url(listener.getsockname()[1])
                sys.stdout.write(f"{self._summary(service)}\n{url}\n")
                if self.host in WILDCARDS:
                    sys.stdout.write("on other machines, put this machine's IP address into it\n")
                if self.open and not open_page(url):
                    sys.stdout.write("no browser was found here; open this address in one\n")
                sys.stdout.write("Ctrl-C stops the server\n")
                sys.stdout.flush()
                run(app, listener)
            finally:
                service.close()

    def _service(self) -> Service:
        from qmargin.evaluation.embed import find_files
        from qmargin.serve.app import COPIES
        from qmargin.serve.inputs import Limits
        from qmargin.serve.made import find_made
        from qmargin.serve.service import BUDGET, Service, model_for_service

        model = model_for_service(self.model, device=self.device)
        card = model.card
        limits = Limits(self.max_upload << 20, self.max_pixels, float(self.max_seconds))
        size = card.input_shape[-1] if card.modality == "images" else None
        made = find_made(self.model, size)
        service = Service(
            model,
            limits=limits,
            fit=self.fit,
            store=self.store,
            made=made,
            budget=max(BUDGET, 2 * COPIES * limits.upload_bytes),
        )
        if self.gallery is not None:
            names = find_files(self.gallery, card.modality)
            with stage_progress() as progress:
                problems = service.enrol_folder(
                    self.gallery, names, partial(progress, "embedding the gallery")
                )
            for name, problem in problems[:_SHOWN]:
                text = problem if name in problem else f"{name}: {problem}"
                sys.stderr.write(f"left out: {printable(text)}\n")
            if len(problems) > _SHOWN:
                sys.stderr.write(f"and {len(problems) - _SHOWN} more\n")
        return service

    def _summary(self, service: Service) -> str:
        card, thresholds = service.model.card, service.model.thresholds
        known = "without thresholds: the page says how to add them"
        if thresholds is not None:
            known = f"thresholds of {printable(thresholds.protocol)}"
        gallery = f"; gallery: {len(service.gallery.names):,} names" if len(service.gallery) else ""
        note = f"\n{service.reader.note}" if service.reader.note else ""
        return f"{printable(card.name)}, a model of {card.modality}, {known}{gallery}{note}"

    def _url(self, port: int) -> str:
        host = WILDCARDS.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{port}/" + (
            "" if self.token is None else f"#token={quote(self.token, safe='')}"
        )


def check_packages() -> None:
    """Refuse to serve without the extra."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise BackendError(
            f"serving needs {' and '.join(missing)}, which is not installed; run pip install "
            "'qmargin[serve]'"
        )
