"""The application: from a request to samples, through the model, to an answer.

The event loop only moves bytes. Parsing and decoding are done by a few threads, the model runs in
one of its own, and every input is accounted for in a budget while it is held.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import qmargin
from qmargin.errors import BackendError, ConfigError, QMarginError, nearest
from qmargin.evaluation.model import Model, cosine
from qmargin.models.directory import INTENDED_USE, LIMITS
from qmargin.schema import decode_settings
from qmargin.serve import api
from qmargin.serve.batching import Batcher, Budget, Busy
from qmargin.serve.gallery import Entry, Gallery, checked_name, digest_of, name_in
from qmargin.serve.gate import App, Gate, Refusal, Rules
from qmargin.serve.inputs import Limits, Reader, Sample
from qmargin.serve.made import Made
from qmargin.serve.operating import (
    CHOSEN_FAR,
    CHOSEN_FPIR,
    HOW_TO,
    Decisions,
    Operating,
)
from qmargin.terminal import printable

BODY_S = 30.0  # seconds in which a request has to arrive
BUDGET = 512 * 1024**2  # bytes of inputs that are held at once
COPIES = 3  # of a body while it is parsed
DECODERS = 2  # threads: a decoded photo takes memory until it is small
MOST_SIGNS = 10_000  # brackets and commas of a request; base64 has none
ENROLLED_TOGETHER = 32  # files of a folder
MOST_CANDIDATES = 100
MOST_TEXT = 1_000  # characters of an error message
STATIC = {
    "": ("qmargin.serve", "static/index.html", "text/html; charset=utf-8"),
    "report.css": ("qmargin.report", "templates/page.css", "text/css; charset=utf-8"),
    "serve.css": ("qmargin.serve", "static/serve.css", "text/css; charset=utf-8"),
    "serve.js": ("qmargin.serve", "static/serve.js", "text/javascript; charset=utf-8"),
    "recorder.js": ("qmargin.serve", "static/recorder.js", "text/javascript; charset=utf-8"),
}

T = TypeVar("T")
Payload = dict[str, Any]
Embedded = tuple[NDArray[np.float32], Payload | None]  # and how the sample looks to the model


class Service:
    """One model and everything that is done with it."""

    def __init__(
        self,
        model: Model,
        *,
        limits: Limits | None = None,
        fit: str = "auto",
        store: Path | None = None,
        made: Made | None = None,
        budget: int = BUDGET,
    ) -> None:
        self.model, self.limits, self.made = model, limits or Limits(), made
        self.reader = Reader(model, self.limits, fit=fit)
        self.decisions = Decisions(model.thresholds)
        self.flip = "none" if model.thresholds is None else model.thresholds.flip
        self.is_stored = store is not None
        about = {"model": model.card.weights_sha256, "flip": self.flip, "fit": fit}
        self.gallery = Gallery(model.embedding_dim, about=about, store=store)
        self.budget = Budget(budget)
        self._batcher = Batcher(self._through_model)
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decoder")
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="helper")  # never waits for those

    def close(self) -> None:
        """End all threads."""
        self._decoders.shutdown()
        self._helper.shutdown()
        self._batcher.close()

    def enrol_folder(self, folder: Path, names: Sequence[str]) -> list[tuple[str, str]]:
        """Enrol the files of a folder; returns those that cannot be, with the reason.

        A file that the store has already is not embedded again.
        """
        from qmargin.evaluation.embed import read_inside

        problems = []
        for start in range(0, len(names), ENROLLED_TOGETHER):
            waiting = []
            for name in names[start : start + ENROLLED_TOGETHER]:
                try:
                    content = read_inside(folder, name)
                    entry = Entry(name_in(name), digest_of(content))
                    if not self.gallery.has(entry):
                        sample = self.reader.read_bytes(content, name)
                        waiting.append((name, entry, self._batcher.submit(sample.array)))
                except QMarginError as error:
                    problems.append((name, str(error)))
            try:  # together: the store is written once
                rows = [future.result() for _, _, future in waiting]
                self.gallery.add([entry for _, entry, _ in waiting], rows)
            except QMarginError:  # of one of them: the others are enrolled all the same
                for name, entry, future in waiting:
                    try:
                        self.gallery.add([entry], [future.result()])
                    except QMarginError as error:
                        problems.append((name, str(error)))
        return problems

    async def in_thread(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run short work in a thread: parsing, searches and encoding of answers."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._helper, lambda: work(*arguments, **options))

    async def embed(
        self, text: str, name: str, *, show: bool, turn: asyncio.Semaphore
    ) -> Embedded | QMarginError:
        """The embedding of a file in base64, or why there is none.

        ``turn`` is shared by the files of a request, so that they do not keep all decoders.
        """
        try:
            loop = asyncio.get_running_loop()
            async with turn:
                sample: Sample = await loop.run_in_executor(
                    self._decoders, lambda: self.reader.read(text, name, show=show)
                )
            self.budget.take(sample.array.nbytes)
            try:
                return await self._batcher.embed(sample.array), sample.shown
            finally:
                self.budget.give(sample.array.nbytes)
        except QMarginError as error:
            return error

    def _through_model(self, samples: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        rows: NDArray[np.float32]
        if self.model.card.modality == "images":
            rows = self.model.embed(np.stack(samples), batch_size=len(samples), flip=self.flip)
        else:
            rows = self.model.embed(list(samples))
        return rows

    # -- answers ----------------------------------------------------------------------------------

    async def describe(self) -> Payload:
        """``GET /v1/model``."""
        card, limits, decisions = self.model.card, self.limits, self.decisions
        return {
            "name": card.name,
            "modality": card.modality,
            "input_shape": list(card.input_shape),
            "embedding_dim": card.embedding_dim,
            "weights_sha256": card.weights_sha256,
            "fit": self.reader.fit,
            "intended_use": card.facts.get("intended_use", INTENDED_USE),
            "limits_of_use": card.facts.get("limits", LIMITS),
            "thresholds": decisions.described(),
            "how_to": HOW_TO if decisions.thresholds is None else None,
            "chosen": {"far": CHOSEN_FAR, "fpir": CHOSEN_FPIR},
            "limits": vars(limits),
            "generated": None if self.made is None else self.made.noun,
            "qmargin": qmargin.__version__,
        }

    async def answer_embed(self, asked: api.EmbedRequest) -> Payload:
        """``POST /v1/embed``."""
        found = await self._embed_all(asked.inputs, "input", show=asked.show)
        return _results(
            [
                one
                if isinstance(one, QMarginError)
                else {"embedding": one[0].tolist(), **_shown(one)}
                for one in found
            ]
        )

    async def answer_verify(self, asked: api.VerifyRequest) -> Payload:
        """``POST /v1/verify``."""
        for number, pair in enumerate(asked.pairs, 1):
            if len(pair) != 2:
                raise ConfigError(f"pair {number} has {len(pair)} files; give two")
        at = self._operating(asked.far)
        named = [
            (text, f"file {'AB'[side]} of pair {number}")
            for number, pair in enumerate(asked.pairs, 1)
            for side, text in enumerate(pair)
        ]
        found = await self._embed_named(named, show=asked.show)
        pairs = zip(found[::2], found[1::2], strict=True)
        return {
            **_results([self._compared(first, second, at) for first, second in pairs]),
            "far": None if at is None else at.far_target,
            "threshold": None if at is None else at.threshold,
            "words": None if at is None else at.words,
        }

    def _operating(self, far: float | None) -> Operating | None:
        """The threshold of a rate; without one the usual rate, or the nearest that is known."""
        if far is not None:
            return self.decisions.at(far)
        stops = self.decisions.stops
        return min(stops, key=lambda stop: abs(stop.far_target - CHOSEN_FAR), default=None)

    def _compared(
        self, first: Embedded | QMarginError, second: Embedded | QMarginError, at: Operating | None
    ) -> Payload | QMarginError:
        for one in (first, second):
            if isinstance(one, QMarginError):
                return one
        assert not isinstance(first, QMarginError) and not isinstance(second, QMarginError)
        try:
            score = cosine(first[0], second[0])
        except QMarginError as error:
            return error
        thresholds = self.model.thresholds
        map_ = None if thresholds is None else thresholds.calibration
        shown = [one[1] for one in (first, second)]
        return {
            "score": score,
            "is_same": None if at is None else at.accepts(score),
            "llr": None if map_ is None else map_.scale * score + map_.offset,
            **({} if shown[0] is None else {"shown": shown}),
        }

    async def answer_identify(self, asked: api.IdentifyRequest) -> Payload:
        """``POST /v1/identify``."""
        if not 1 <= asked.top <= MOST_CANDIDATES:
            raise ConfigError(f"top is {asked.top}; give 1 to {MOST_CANDIDATES}")
        embedded = await self._embed_all(asked.inputs, "input", show=asked.show)
        size, at = len(self.gallery), None
        if not size:
            raise ConfigError("the gallery is empty; enrol a person, or start with --gallery DIR")
        if self.decisions.thresholds is not None:
            at = self.decisions.search_at(asked.fpir, size)

        def search(one: Embedded) -> Payload:
            found = self.gallery.search(one[0], asked.top)
            candidates = [
                {
                    "name": candidate.name,
                    "score": candidate.score,
                    "is_accepted": None if at is None else at.accepts(candidate.score),
                }
                for candidate in found
            ]
            return {"candidates": candidates, **_shown(one)}

        results: list[Payload | QMarginError] = []
        for one in embedded:
            try:
                failed = isinstance(one, QMarginError)
                results.append(one if failed else await self.in_thread(search, one))  # type: ignore[arg-type]
            except QMarginError as error:
                results.append(error)
        return {
            **_results(results),
            "fpir": asked.fpir,
            "num_samples": size,
            "far": None if at is None else at.far_target,
            "threshold": None if at is None else at.threshold,
            "words": None if at is None else at.words,
        }

    async def answer_gallery(self) -> Payload:
        """``GET /v1/gallery``."""
        return {
            "names": self.gallery.names,
            "num_samples": len(self.gallery),
            "is_stored": self.is_stored,
        }

    async def answer_enrol(self, asked: api.EnrolRequest) -> Payload:
        """``POST /v1/gallery``."""
        name = checked_name(asked.name)
        found = await self._embed_all(asked.inputs, "input", show=False)
        results: list[Payload | QMarginError] = [
            one if isinstance(one, QMarginError) else {} for one in found
        ]
        answer = _results(results)

        def add() -> None:
            good = [
                (Entry(name, digest_of(base64.b64decode(text))), one[0])
                for text, one in zip(asked.inputs, found, strict=True)
                if not isinstance(one, QMarginError)
            ]
            self.gallery.add([entry for entry, _ in good], [row for _, row in good])

        await self.in_thread(add)
        return {**answer, **await self.answer_gallery()}

    async def answer_forget(self, name: str) -> Payload:
        """``DELETE /v1/gallery/NAME``."""
        if not await self.in_thread(self.gallery.remove, name):
            raise Refusal(404, "not_found", f"nobody in the gallery is named {name[:80]!r}")
        return await self.answer_gallery()

    async def answer_generate(self, asked: api.GenerateRequest) -> Payload:
        """``POST /v1/generate``."""
        if self.made is None:
            raise Refusal(
                404, "not_found", "the model was not trained on generated data; upload files"
            )
        pair = await self.in_thread(self.made.pair, abs(asked.number), same=asked.same)
        encoded = [base64.b64encode(content).decode("ascii") for content in pair]
        return {"files": encoded, "same": asked.same}

    async def _embed_all(
        self, texts: Sequence[str], noun: str, *, show: bool
    ) -> list[Embedded | QMarginError]:
        named = [(text, f"{noun} {number}") for number, text in enumerate(texts, 1)]
        return await self._embed_named(named, show=show)

    async def _embed_named(
        self, named: Sequence[tuple[str, str]], *, show: bool
    ) -> list[Embedded | QMarginError]:
        self._check_number(len(named))
        turn = asyncio.Semaphore(DECODERS)
        work = (self.embed(text, name, show=show, turn=turn) for text, name in named)
        found = await asyncio.gather(*work, return_exceptions=True)
        for one in found:  # all are over: nothing is held when the answer is sent
            if isinstance(one, BaseException) and not isinstance(one, QMarginError):
                raise one
        return found  # type: ignore[return-value]

    def _check_number(self, number: int) -> None:
        if not 1 <= number <= self.limits.batch:
            raise Refusal(
                413 if number else 422,
                "batch",
                f"the request has {number:,} files; give 1 to {self.limits.batch}",
            )


def _shown(one: Embedded) -> Payload:
    return {} if one[1] is None else {"shown": one[1]}


def _results(found: Sequence[Payload | QMarginError]) -> Payload:
    """Results with errors in their places; an error alone is the error of the request."""
    errors = [one for one in found if isinstance(one, QMarginError)]
    if len(errors) == len(found):
        raise errors[0]
    results = [
        {"error": {"code": _code(one)[1], "message": str(one)[:MOST_TEXT]}}
        if isinstance(one, QMarginError)
        else one
        for one in found
    ]
    return {"results": results}


def _code(error: QMarginError) -> tuple[int, str]:
    return (501, "missing_package") if isinstance(error, BackendError) else (422, "input")


# -- HTTP -----------------------------------------------------------------------------------------


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
        return Response(content, headers={"content-type": kind})

    return endpoint


async def _unknown_path(request: Request, error: HTTPException) -> Response:
    known = sorted({route.path for route in api.ROUTES} | {"/", "/v1/openapi.json"})
    path, method = request.url.path[:80], request.method
    message = f"there is no {method} {path}; see /v1/openapi.json. {nearest(path, known)}".strip()
    return _error(Refusal(error.status_code, "not_found", message))


async def _taken(
    service: Service, request: Request, record: type, answer: Callable[[Any], Awaitable[Payload]]
) -> Response:
    """Read the body of a request into a record, answer it, and give back its memory."""
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
    """The answer of some work, or its error; nothing of an input is written anywhere."""
    try:
        payload = await work
        return _as_json(await service.in_thread(_encoded, payload))
    except Refusal as refusal:
        return _error(refusal)
    except Busy as busy:
        return _error(Refusal(503, "busy", str(busy), retry_after="1"))
    except QMarginError as error:
        status, code = _code(error)
        return _error(Refusal(status, code, str(error)[:MOST_TEXT]))
    except asyncio.TimeoutError:
        message = f"the request did not arrive within {BODY_S:g} s; send it again"
        return _error(Refusal(408, "timeout", message, connection="close"))
    except ClientDisconnect:
        return Response(status_code=400)  # to nobody
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}, line {frame.lineno}"
        with suppress(OSError):  # the message may have something of an input in it
            sys.stderr.write(f"unforeseen {type(error).__name__} in {place}\n")
        message = f"unforeseen {type(error).__name__} in {place}; report it with the command"
        return _error(Refusal(500, "unforeseen", message))


def _encoded(payload: Payload) -> bytes:
    return json.dumps(payload, allow_nan=False, separators=(",", ":")).encode()


def _as_json(content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(content, status, {"content-type": "application/json", **(headers or {})})


def _error(refusal: Refusal) -> Response:
    return _as_json(refusal.content(), refusal.status, refusal.headers)


def model_for_service(directory: Path, *, device: str) -> Model:
    """The model of a directory or a run; samples reach it at its own size.

    A run of an experiment has its evaluation beside it, which gives the thresholds.
    """
    from qmargin.evaluation.export import thresholds_of
    from qmargin.evaluation.model import load_model
    from qmargin.evaluation.result import read_result
    from qmargin.files import sha256_of

    model = load_model(directory, device=device, fit="exact")
    result = directory / "result.json"
    if model.thresholds is None and result.is_file():
        try:
            found = read_result(result)
            model.thresholds = thresholds_of(
                found,
                weights_sha256=model.card.weights_sha256,
                result_sha256=sha256_of(result),
                flip=found.protocol.flip or "none",
            )
        except QMarginError as error:  # a model without thresholds can be shown
            sys.stderr.write(f"no thresholds from {printable(str(result))}: {error}\n")
    return model
