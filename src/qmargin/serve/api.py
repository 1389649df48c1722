"""Requests and answers as dataclasses, and the OpenAPI description made from them."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin

import qmargin

BASE64 = {"contentEncoding": "base64"}  # schema of a file


@dataclass(frozen=True)
class EmbedRequest:
    """Files to embed."""

    inputs: tuple[str, ...] = field(metadata={"about": "files, as base64", "item": BASE64})
    show: bool = field(default=False, metadata={"about": "return each input as the model sees it"})


@dataclass(frozen=True)
class VerifyRequest:
    """Pairs of files to compare."""

    pairs: tuple[tuple[str, ...], ...] = field(
        metadata={"about": "pairs of files, as base64", "item": BASE64}
    )
    far: float | None = field(
        default=None,
        metadata={"about": "false accept rate of the decision; 0.001 where it can be measured"},
    )
    show: bool = field(default=False, metadata={"about": "return each input as the model sees it"})


@dataclass(frozen=True)
class IdentifyRequest:
    """Files to search in the gallery."""

    inputs: tuple[str, ...] = field(metadata={"about": "files, as base64", "item": BASE64})
    fpir: float = field(
        default=0.01,
        metadata={"about": "share of searches for unenrolled people that may return a name"},
    )
    top: int = field(default=10, metadata={"about": "candidates of each search"})
    show: bool = field(default=False, metadata={"about": "return each input as the model sees it"})


@dataclass(frozen=True)
class EnrolRequest:
    """Files of one person for the gallery."""

    name: str = field(metadata={"about": "name of the person"})
    inputs: tuple[str, ...] = field(metadata={"about": "files, as base64", "item": BASE64})


@dataclass(frozen=True)
class GenerateRequest:
    """A generated pair to try."""

    same: bool = field(metadata={"about": "of one identity, or of two"})
    number: int = field(default=0, metadata={"about": "which pair"})


@dataclass(frozen=True)
class Failure:
    """Reason why a request has no result."""

    code: str = field(metadata={"about": "kind of the error, for programs"})
    message: str = field(metadata={"about": "what happened, the value, and what to do"})


@dataclass(frozen=True)
class ErrorAnswer:
    """An error."""

    error: Failure


@dataclass(frozen=True)
class View:
    """An input as the model sees it."""

    image: str | None = field(default=None, metadata={"about": "PNG, as base64", **BASE64})
    seconds: float | None = field(default=None, metadata={"about": "of a recording"})
    peaks: tuple[tuple[float, ...], ...] | None = field(
        default=None, metadata={"about": "smallest and largest sample of parts of a recording"}
    )
    filter_bank: str | None = field(
        default=None, metadata={"about": "PNG of log-mel energies, as base64", **BASE64}
    )


@dataclass(frozen=True)
class Embedded:
    """An embedding, or an error."""

    embedding: tuple[float, ...] | None = field(
        default=None, metadata={"about": "not of length 1; compare by cosine"}
    )
    shown: View | None = None
    error: Failure | None = None


@dataclass(frozen=True)
class EmbedAnswer:
    """One result for each input, in their order."""

    results: tuple[Embedded, ...]


@dataclass(frozen=True)
class Verified:
    """A comparison, or an error."""

    score: float | None = field(default=None, metadata={"about": "cosine of the two embeddings"})
    is_same: bool | None = field(
        default=None, metadata={"about": "the decision; null without thresholds"}
    )
    llr: float | None = field(
        default=None,
        metadata={"about": "natural log-likelihood ratio; null without a calibration"},
    )
    shown: tuple[View, ...] | None = None
    error: Failure | None = None


@dataclass(frozen=True)
class VerifyAnswer:
    """One result for each pair, in their order, all at one threshold."""

    results: tuple[Verified, ...]
    far: float | None = field(default=None, metadata={"about": "requested rate; null: no decision"})
    threshold: float | None = field(
        default=None, metadata={"about": "scores at or above it are of one identity"}
    )
    words: str | None = field(default=None, metadata={"about": "what the threshold means"})


@dataclass(frozen=True)
class Named:
    """A person in the gallery."""

    name: str
    score: float = field(metadata={"about": "score of the person's best sample"})
    is_accepted: bool | None = field(
        default=None, metadata={"about": "whether the score suffices; null without thresholds"}
    )


@dataclass(frozen=True)
class Identified:
    """A search, or an error."""

    candidates: tuple[Named, ...] | None = field(
        default=None, metadata={"about": "the best first; only accepted candidates are matches"}
    )
    shown: View | None = None
    error: Failure | None = None


@dataclass(frozen=True)
class IdentifyAnswer:
    """One result for each input, in their order."""

    results: tuple[Identified, ...]
    fpir: float
    num_samples: int = field(metadata={"about": "of the gallery"})
    far: float | None = field(default=None, metadata={"about": "of one comparison"})
    threshold: float | None = None
    words: str | None = None


@dataclass(frozen=True)
class GalleryAnswer:
    """Names of the enrolled people, with their numbers of samples."""

    names: dict[str, int]
    num_samples: int
    is_stored: bool = field(metadata={"about": "whether the embeddings are stored in a file"})
    results: tuple[Embedded, ...] | None = field(
        default=None, metadata={"about": "for an enrolment: an error or null for each input"}
    )


@dataclass(frozen=True)
class GenerateAnswer:
    """Two generated files, as base64."""

    files: tuple[str, ...]
    same: bool


@dataclass(frozen=True)
class ModelAnswer:
    """The model, its thresholds and the limits of the server."""

    name: str
    modality: str
    input_shape: tuple[int, ...]
    embedding_dim: int
    weights_sha256: str
    fit: str
    intended_use: str
    limits_of_use: str
    thresholds: dict[str, Any] | None
    how_to: str | None = field(metadata={"about": "how to get thresholds, where there are none"})
    chosen: dict[str, float]
    limits: dict[str, float]
    generated: str | None = field(metadata={"about": "what can be generated to try, or null"})
    qmargin: str


class Route(typing.NamedTuple):
    """A route of the interface."""

    method: str
    path: str
    does: str
    takes: type | None
    gives: type


ROUTES = (
    Route("GET", "/v1/model", "Describe the model", None, ModelAnswer),
    Route("POST", "/v1/embed", "Embed files", EmbedRequest, EmbedAnswer),
    Route("POST", "/v1/verify", "Compare pairs of files", VerifyRequest, VerifyAnswer),
    Route("POST", "/v1/identify", "Look for files in the gallery", IdentifyRequest, IdentifyAnswer),
    Route("GET", "/v1/gallery", "List the gallery", None, GalleryAnswer),
    Route("POST", "/v1/gallery", "Enrol files in the gallery", EnrolRequest, GalleryAnswer),
    Route("DELETE", "/v1/gallery/{name}", "Delete a person", None, GalleryAnswer),
    Route("POST", "/v1/generate", "Generate a pair to try", GenerateRequest, GenerateAnswer),
)


def openapi() -> dict[str, Any]:
    """The OpenAPI 3.1 description of the interface."""
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for route in ROUTES:
        answer = {"content": _json(route.gives, schemas), "description": _about(route.gives)}
        failure = {"content": _json(ErrorAnswer, schemas), "description": "An error"}
        described: dict[str, Any] = {
            "summary": route.does,
            "operationId": route.does.lower().replace(" ", "_"),
            "responses": {"200": answer, "default": failure},
        }
        if route.takes is not None:
            described["requestBody"] = {"required": True, "content": _json(route.takes, schemas)}
        if "{name}" in route.path:
            name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
            described["parameters"] = [name]
        paths.setdefault(route.path, {})[route.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "qmargin serve",
            "version": qmargin.__version__,
            "description": "Embeddings, comparisons and searches by one model.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _json(record: type, schemas: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": _schema(record, schemas)}}


def _about(record: type) -> str:
    return (record.__doc__ or "").strip()


def _schema(
    hint: Any, schemas: dict[str, Any], item: dict[str, Any] | None = None
) -> dict[str, Any]:
    """JSON schema of an annotation; dataclasses go into ``schemas``, ``item`` into texts."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in schemas:
            schemas[hint.__name__] = {}  # it may contain itself
            schemas[hint.__name__] = _object(hint, schemas)
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    if origin in (typing.Union, types.UnionType):
        parts = [_schema(part, schemas, item) for part in arguments if part is not type(None)]
        return {"anyOf": [*parts, {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], schemas, item)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], schemas)}
    named = {str: "string", float: "number", int: "integer", bool: "boolean"}
    return {"type": named[hint], **(item or {})} if hint in named else {}


def _object(record: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(record)
    properties, required = {}, []
    for one in dataclasses.fields(record):
        own = {key: text for key, text in one.metadata.items() if key not in ("about", "item")}
        schema = _schema(hints[one.name], schemas, one.metadata.get("item") or own or None)
        about = one.metadata.get("about")
        properties[one.name] = {**schema, **({"description": about} if about else {})}
        if one.default is dataclasses.MISSING:
            required.append(one.name)
    return {
        "type": "object",
        "description": _about(record),
        "properties": properties,
        "required": required,
    }
