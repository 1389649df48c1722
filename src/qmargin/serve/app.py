"""The HTTP interface: routes, bodies and errors.

The event loop only moves bytes; threads of ``Service`` parse, decode and answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from qmargin.errors import ConfigError, QMarginError, nearest
from qmargin.schema import decode_settings
from qmargin.serve import api
from qmargin.serve.batching import Busy
from qmargin.serve.gate import App, Gate, Refusal, Rules
from qmargin.serve.service import Payload, Service, failure_of

BODY_S = 30.0  # seconds in which a request has to arrive
COPIES = 3  # of a body while it is parsed
MOST_SIGNS = 10_000  # brackets and commas of a request; base64 has none
STATIC = {
    "": ("qmargin.serve", "static/index.html", "html"),
    "report.css": ("qmargin.report", "templates/page.css", "css"),
    "serve.css": ("qmargin.serve", "static/serve.css", "css"),
    **{
        f"{name}.js": ("qmargin.serve", f"static/{name}.js", "javascript")
        for name in ("serve", "capture", "scale", "dom", "recorder")
    },
}


def build_app(service: Service, rules: Rules) -> App:
    """The page and the interface behind the checks of every request."""

    async def model(request: Request) -> Response:
        return await _answered(service, service.describe())

    async def openapi(request: Request) -> Response:
        return _as_json(json.dumps(api.openapi()).encode())

    async def gallery(request: Request) -> Response:
        return await _answered(service, service.answer_gallery())

    async def forget(request: Request) -> Response:
        return await _answered(service, service.answer_forget(request.path_params["name"]))

    def post(record: type, answer: Callable[[Any], Awaitable[Payload]]) -> Any:
        async def endpoint(request: Request) -> Response:
            return await _taken(service, request, record, answer)

        return endpoint

    routes = [
        Route("/v1/model", model),
        Route("/v1/openapi.json", openapi),
        Route("/v1/gallery", gallery, methods=["GET"]),
        Route("/v1/gallery/{name}", forget, methods=["DELETE"]),
    ]
    for path, record, answer in (
        ("embed", api.EmbedRequest, service.answer_embed),
        ("verify", api.VerifyRequest, service.answer_verify),
        ("identify", api.IdentifyRequest, service.answer_identify),
        ("gallery", api.EnrolRequest, service.answer_enrol),
        ("generate", api.GenerateRequest, service.answer_generate),
    ):
        routes.append(Route(f"/v1/{path}", post(record, answer), methods=["POST"]))
    for name, (package, place, kind) in STATIC.items():
        routes.append(Route(f"/{name}", _static(package, place, kind)))
    handlers: Any = {HTTPException: _unknown_path}
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return Gate(app, rules)


def _static(package: str, place: str, kind: str) -> Any:
    content = files(package).joinpath(place).read_bytes()

    async def endpoint(request: Request) -> Response:
        return Response(content, headers={"content-type": f"text/{kind}; charset=utf-8"})

    return endpoint


async def _unknown_path(request: Request, error: HTTPException) -> Response:
    path, method = request.url.path[:80], request.method
    if error.status_code == 405:
        methods = [route.method for route in api.ROUTES if route.path == path]
        found = (error.headers or {}).get("Allow", "").split(", ")  # in no order
        allowed = ", ".join(methods or sorted(found))
        message = f"{path} takes {allowed}, not {method}; see /v1/openapi.json"
        return _error(Refusal(405, "method", message, allow=allowed))
    known = sorted({route.path for route in api.ROUTES} | {"/", "/v1/openapi.json"})
    message = f"there is no {path}; see /v1/openapi.json. {nearest(path, known)}".strip()
    return _error(Refusal(error.status_code, "not_found", message))


async def _taken(
    service: Service, request: Request, record: type, answer: Callable[[Any], Awaitable[Payload]]
) -> Response:
    """Read the body of a request into a record, answer it, and release its memory."""
    held = 0

    async def body() -> list[bytes]:
        nonlocal held
        parts = list[bytes]()
        async for part in request.stream():
            service.budget.take(COPIES * len(part))
            held += COPIES * len(part)
            parts.append(part)
        return parts

    async def whole() -> Payload:
        parts = await asyncio.wait_for(body(), BODY_S)
        return await answer(await service.in_thread(_parsed, parts, record))

    try:
        return await _answered(service, whole())
    finally:
        service.budget.give(held)


def _parsed(parts: Sequence[bytes], record: type) -> Any:
    content = b"".join(parts)
    if sum(map(content.count, (b"[", b"{", b","))) > MOST_SIGNS:
        raise ConfigError(f"the request has over {MOST_SIGNS:,} values; send fewer files at once")
    try:
        payload = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200]
        raise ConfigError(f"the request is not JSON ({reason}); see /v1/openapi.json") from error
    if not isinstance(payload, dict):
        raise ConfigError(f"the request is a {type(payload).__name__}; send a JSON object")
    return decode_settings(record, payload, "request")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


async def _answered(service: Service, work: Awaitable[Payload]) -> Response:
    """The answer of some work, or its error; inputs are never written or logged."""
    try:
        payload = await work
        return _as_json(await service.in_thread(_encoded, payload))
    except Refusal as refusal:
        return _error(refusal)
    except Busy as busy:
        return _error(Refusal(503, "busy", str(busy), retry_after="1"))
    except QMarginError as error:
        return _error(failure_of(error))
    except asyncio.TimeoutError:
        message = f"the request did not arrive within {BODY_S:g} s; send it again"
        return _error(Refusal(408, "timeout", message, connection="close"))
    except ClientDisconnect:
        return Response(status_code=400)  # the client is gone
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        with suppress(OSError):  # the message may contain parts of an input
            sys.stderr.write(f"unexpected {type(error).__name__} in {place}\n")
        message = f"unexpected {type(error).__name__} in {place}; report it with the command"
        return _error(Refusal(500, "unforeseen", message))


def _encoded(payload: Payload) -> bytes:
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()


def _as_json(content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content, status, {"content-type": "application/json", **(headers or {})})


def _error(refusal: Refusal) -> Response:
    return _as_json(_encoded(refusal.content()), refusal.status, refusal.headers)
