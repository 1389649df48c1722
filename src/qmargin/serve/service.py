"""One model as a service: embeddings, comparisons, searches and their answers.

A few threads decode, and one thread runs the model. A budget limits the inputs in memory.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import qmargin
from qmargin.errors import BackendError, ConfigError, QMarginError
from qmargin.evaluation.model import Model, cosine
from qmargin.models.directory import INTENDED_USE, LIMITS
from qmargin.serve import api
from qmargin.serve.batching import Batcher, Budget
from qmargin.serve.gallery import Entry, Gallery, Row, checked_name, digest_of, name_in, unit
from qmargin.serve.gate import Refusal
from qmargin.serve.inputs import Limits, Reader, Sample
from qmargin.serve.made import Made
from qmargin.serve.operating import CHOSEN_FAR, CHOSEN_FPIR, Decisions, Operating
from qmargin.terminal import printable

BUDGET = 512 * 1024**2  # bytes of inputs that are held at once
DECODERS = 2  # threads: a decoded photo takes memory until it is small
ENROLLED_TOGETHER = 32  # files of a folder
MOST_CANDIDATES = 100
MOST_TEXT = 1_000  # characters of an error message

T = TypeVar("T")
Payload = dict[str, Any]
Progress = Callable[[int, int], None]  # files done, of all
Embedded = tuple[NDArray[np.float32], Payload | None]  # and the model's view of the sample


class Service:
    """One model with its embeddings, comparisons and searches."""

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
        self.decisions = Decisions(model.thresholds, fit=fit)
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

    def enrol_folder(
        self, folder: Path, names: Sequence[str], progress: Progress | None = None
    ) -> list[tuple[str, str]]:
        """Enrol the files of a folder; return files that cannot be enrolled, with reasons.

        A file that the store has already is not embedded again.
        """
        from qmargin.evaluation.embed import read_inside

        problems, found = list[tuple[str, str]](), dict[Entry, Row]()
        for start in range(0, len(names), ENROLLED_TOGETHER):
            waiting = dict[Entry, tuple[str, Future[Row]]]()
            part = names[start : start + ENROLLED_TOGETHER]
            for name in part:
                try:
                    content = read_inside(folder, name)
                    entry = Entry(name_in(name), digest_of(content))
                    if not (entry in waiting or entry in found or self.gallery.has(entry)):
                        self.gallery.check_room(len(found) + len(waiting) + 1)
                        sample = self.reader.read_bytes(content, name)
                        waiting[entry] = name, self._batcher.submit(sample.array)
                except QMarginError as error:
                    problems.append((name, str(error)))
            for entry, (name, future) in waiting.items():
                try:
                    found[entry] = unit(future.result(), name)
                except QMarginError as error:
                    problems.append((name, str(error)))
            is_last = start + len(part) == len(names)
            if is_last or len(found) > len(self.gallery):  # rarely: it writes the whole store
                self.gallery.add(list(found), list(found.values()))
                found.clear()
            if progress is not None:
                progress(start + len(part), len(names))
        return problems

    async def in_thread(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run short work in a thread: parsing, searches and encoding of answers."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._helper, lambda: work(*arguments, **options))

    async def embed(
        self, text: str, name: str, *, show: bool, turn: asyncio.Semaphore
    ) -> Embedded | QMarginError:
        """The embedding of a file in base64, or an error.

        ``turn`` is shared by the files of a request, so that one request does not occupy all
        decoders.
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
            "how_to": decisions.how_to if decisions.thresholds is None else None,
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
            (text, f"file {side}" + (f" of pair {number}" if len(asked.pairs) > 1 else ""))
            for number, pair in enumerate(asked.pairs, 1)
            for side, text in zip("AB", pair, strict=True)
        ]
        found = await self._embed_named(named, show=asked.show)
        pairs = zip(found[::2], found[1::2], strict=True)
        return {
            **_results([self._compared(first, second, at) for first, second in pairs]),
            **_decided(at),
        }

    def _operating(self, far: float | None) -> Operating | None:
        """The threshold of a rate; by default the usual rate, or the nearest available one."""
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
            **_decided(at),
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
            raise Refusal(
                404,
                "not_found",
                f"the gallery has no {name[:80]!r}; GET /v1/gallery lists its names",
            )
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
        for one in found:  # all are finished, so no input is in memory when the answer is sent
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


def _decided(at: Operating | None) -> Payload:
    return {
        "far": None if at is None else at.far_target,
        "threshold": None if at is None else at.threshold,
        "words": None if at is None else at.words,
    }


def _shown(one: Embedded) -> Payload:
    return {} if one[1] is None else {"shown": one[1]}


def _results(found: Sequence[Payload | QMarginError]) -> Payload:
    """Results with errors in their places; if all are errors, the request has the first error."""
    errors = [one for one in found if isinstance(one, QMarginError)]
    if len(errors) == len(found):
        raise errors[0]
    results = [failure_of(one).content() if isinstance(one, QMarginError) else one for one in found]
    return {"results": results}


def failure_of(error: QMarginError) -> Refusal:
    """The answer to a request that raised an error."""
    status, code = (501, "missing_package") if isinstance(error, BackendError) else (422, "input")
    return Refusal(status, code, str(error)[:MOST_TEXT])


def model_for_service(directory: Path, *, device: str) -> Model:
    """Load the model of a directory or a run, for samples of its own size.

    A run of an experiment has thresholds from the evaluation in its folder.
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
