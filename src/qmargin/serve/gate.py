"""Checks of every request, and headers of every answer.

A page of another site can send requests to a server on this machine, and can let a host name of its
own resolve to 127.0.0.1 (DNS rebinding). Each check refuses one such attack, independently of the
others.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = dict[str, str]

API = "/v1/"
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
        "media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(self), geolocation=()",
    "cache-control": "no-store",
}


class Refusal(Exception):
    """An error answer; ``code`` names its kind for programs."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"code": self.code, "message": self.message}}


@dataclass(frozen=True)
class Rules:
    """Address of the server, its token, and the limit of uploads."""

    host: str = "127.0.0.1"
    token: str | None = None  # without one, every client that reaches the server may use it
    upload_bytes: int = 1 << 25

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host == "localhost" or _is_loopback(self.host)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(scope: Scope, headers: Headers, rules: Rules) -> None:
    """Check the Host header: a name of this machine, or an IP address, which cannot be rebound."""
    name = _host_of(headers.get("host", ""))
    try:
        is_known = ipaddress.ip_address(name).is_loopback or not rules.is_loopback
    except ValueError:
        is_known = name in ("localhost", rules.host.lower())
    if not is_known:
        raise Refusal(
            403,
            "host",
            f"the request is for the host {name[:80]!r} and this server is {rules.host}; open it "
            "by the address that it printed",
        )


def check_origin(scope: Scope, headers: Headers, rules: Rules) -> None:
    """Refuse requests of pages of other sites, by their Origin."""
    origin, host = headers.get("origin"), headers.get("host")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        raise Refusal(
            403,
            "origin",
            f"the request comes from a page of {origin[:80]!r}; use the page of this server, or a "
            "program, which sends no Origin",
        )


def check_site(scope: Scope, headers: Headers, rules: Rules) -> None:
    """Refuse embedding by other sites, by the Sec-Fetch headers of browsers."""
    site = headers.get("sec-fetch-site", "none")
    is_visit = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
    if site not in ("none", "same-origin") and not is_visit:
        raise Refusal(
            403,
            "site",
            f"the browser says that the request comes from another site ({site[:40]}); use the "
            "page of this server",
        )


def check_token(scope: Scope, headers: Headers, rules: Rules) -> None:
    """Check the token, if there is one; the empty page does not need it."""
    if rules.token is None or not scope["path"].startswith(API):
        return
    kind, _, given = headers.get("authorization", "").partition(" ")
    is_right = hmac.compare_digest(given.strip().encode(), rules.token.encode())
    if kind.lower() != "bearer" or not is_right:
        raise Refusal(
            401,
            "token",
            "the token is missing or wrong; send the header `Authorization: Bearer TOKEN` with the "
            "token that the server was started with",
            www_authenticate="Bearer",
        )


def check_type(scope: Scope, headers: Headers, rules: Rules) -> None:
    """Require JSON, which forms of other sites cannot send without permission."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] == "POST" and kind != "application/json":
        raise Refusal(
            415,
            "content_type",
            f"the content type is {kind[:80]!r}; send JSON with `Content-Type: application/json`",
        )


def check_length(scope: Scope, headers: Headers, rules: Rules) -> None:
    """Require a Content-Length within the limit."""
    if scope["method"] != "POST":
        return
    text = headers.get("content-length", "")
    if "transfer-encoding" in headers or not (text.isascii() and text.isdigit()):
        raise Refusal(
            411,
            "length",
            "the request does not say how long it is; send a Content-Length and no parts",
            connection="close",
        )
    if len(text) > 15 or int(text) > rules.upload_bytes:
        raise Refusal(
            413,
            "too_large",
            f"the request has {text[:20]} bytes and the limit is {rules.upload_bytes:,}; send "
            "smaller files or fewer at once, or start the server with a larger --max-upload",
            connection="close",
        )


CHECKS = (check_host, check_origin, check_site, check_token, check_type, check_length)


class Gate:
    """The application behind the checks."""

    def __init__(self, app: App, rules: Rules) -> None:
        self._app, self._rules = app, rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        try:
            for check in CHECKS:
                check(scope, headers, self._rules)
        except Refusal as refusal:
            await refuse(refusal, guarded)
            return
        await self._app(scope, receive, guarded)


async def refuse(refusal: Refusal, send: Send) -> None:
    """Send an error as the whole answer."""
    content = json.dumps(refusal.content()).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        **refusal.headers,
    }
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": content})


def _host_of(text: str) -> str:
    """The name in a Host header, without the port."""
    try:
        return urlsplit(f"//{text}").hostname or ""
    except ValueError:
        return ""
