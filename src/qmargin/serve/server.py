"""The listening socket and the server around the application, until a signal ends it."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import sys
import threading
import webbrowser
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from qmargin.errors import ConfigError
from qmargin.serve.gate import App

IDLE_S = 10.0  # after which a connection without a complete request is checked, and closed
ANSWER_S = 300.0  # in which a request has to be answered, and the answer received
GRACE_S = 30  # seconds in which requests in flight are finished
MOST_CONNECTIONS = 512


class PatientProtocol(H11Protocol):
    """Close connections without a complete request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Check the connection from time to time."""
        super().connection_made(transport)
        self._seen: Any = None
        self._since = self.loop.time()
        self._timer = self.loop.call_later(IDLE_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop looking."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Close it if nothing has happened for too long."""
        cycle: Any = self.cycle  # the last request whose headers have arrived
        is_idle = cycle is None or cycle.response_complete
        is_idle = is_idle and not self.transport.get_write_buffer_size()
        if (cycle, is_idle) != self._seen:
            self._seen, self._since = (cycle, is_idle), self.loop.time()
        if self.loop.time() - self._since >= (IDLE_S if is_idle else ANSWER_S) - 0.1:
            self.transport.abort()
            return
        self._timer = self.loop.call_later(IDLE_S, self._look)


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket; ``ConfigError`` where that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            reason = "is in use by another program; stop it, or choose another with --port"
        elif error.errno in (errno.EACCES, errno.EPERM):
            reason = "is not allowed for this user; choose a --port from 1024 on"
        else:
            reason = (
                f"cannot be opened ({error.strerror or error}); choose another --host or --port"
            )
        raise ConfigError(f"port {port} of {host} {reason}, 0 for any that is free") from error
    return listener


def run(app: App, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, which is raised again when requests in flight are finished."""
    server_of(app).run(sockets=[listener])


def server_of(app: App) -> uvicorn.Server:
    """The server; it logs nothing."""
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=int(IDLE_S),
        timeout_graceful_shutdown=GRACE_S,
    )
    return uvicorn.Server(config)


def open_page(url: str) -> bool:
    """Open the page in a browser with a window; False where there is none."""
    if sys.platform.startswith("linux") and not (
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    ):
        return False  # a text browser would take over the terminal
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    threading.Thread(target=browser.open, args=(url,), daemon=True).start()
    return True
