"""What /openapi.json says of each route beyond its body: one table, read once while the application is assembled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from serve.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
_BODY_ERRORS: Final = (400, 401, 404, 408, 413, 415, 500, 503)
_GENERATION_ERRORS: Final = (*_BODY_ERRORS, 429)
_CALL_ERRORS: Final = (401, 500, 503)
ERROR_MEANINGS: Final = {
    400: "The request is malformed, or asks for what this model or server cannot do.",
    401: "The key is missing or wrong.",
    404: "The model, or the path, is not here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body has a content encoding.",
    429: "Too much is waiting; the header Retry-After says when to come back.",
    500: "The request failed inside the server, or the engine died.",
    503: "The server loads, drains, is full or has lost its engine; the code says which.",
}


class ErrorObject(BaseModel):
    """What went wrong: a sentence for people, a type and a code for programs, the field at fault if there is one."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(BaseModel):
    """The body of every answer that reports an error; also the last event of a stream that fails."""

    error: ErrorObject


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """One line about a route, what it answers (media types, none for an empty body), and its error statuses."""

    summary: str
    answer: str
    media: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    body: type[BaseModel] | None = None

    def responses(self) -> dict[int | str, dict[str, object]]:
        """Give the answers in the form that add_api_route takes."""
        kinds: dict[str, object] = {
            kind: {"schema": {"type": "object" if kind == JSON else "string"}} for kind in self.media
        }
        answers: dict[int | str, dict[str, object]] = {200: {"description": self.answer}}
        if kinds:
            answers[200]["content"] = kinds
        for status in self.errors:
            answers[status] = {"description": ERROR_MEANINGS[status], "model": ErrorBody}
        return answers

    def extra(self) -> dict[str, object]:
        """Give the request's side: the body that the handler itself reads, and the parts of the path."""
        described: dict[str, object] = {}
        if self.body is not None:
            schema = self.body.model_json_schema()
            definitions = schema.pop("$defs", {})
            content = {JSON: {"schema": _resolve_refs(schema, definitions)}}
            described["requestBody"] = {"required": True, "content": content}
        if self.parameters:
            described["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in self.parameters
            ]
        return described


def _resolve_refs(schema: object, definitions: dict[str, object]) -> object:
    """Put definitions in the place of references to them, which would not resolve inside the API description."""
    if isinstance(schema, list):
        return [_resolve_refs(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref")
    if isinstance(name, str):
        return _resolve_refs(definitions[name.removeprefix("#/$defs/")], definitions)
    return {key: _resolve_refs(value, definitions) for key, value in schema.items()}


_STREAMED: Final = "One JSON object; with stream=true, events of chunks that end with data: [DONE]."
_HEALTHY: Final = "The model is loaded and the engine core makes progress."
ROUTES: Final = {
    "/v1/chat/completions": RouteDescription(
        "Answer a conversation",
        _STREAMED,
        media=(JSON, EVENTS),
        errors=_GENERATION_ERRORS,
        body=ChatCompletionRequest,
    ),
    "/v1/completions": RouteDescription(
        "Continue one or more prompts",
        _STREAMED,
        media=(JSON, EVENTS),
        errors=_GENERATION_ERRORS,
        body=CompletionRequest,
    ),
    "/tokenize": RouteDescription(
        "Turn a prompt or a conversation into token ids",
        "Token ids, their number, and the context length.",
        errors=_BODY_ERRORS,
        body=TokenizeRequest,
    ),
    "/detokenize": RouteDescription(
        "Turn token ids into text", "The text.", errors=_BODY_ERRORS, body=DetokenizeRequest
    ),
    "/v1/models": RouteDescription("List the names of the model", "The list.", errors=(401, 500, 503)),
    "/v1/models/{model_id}": RouteDescription(
        "Describe the model under one of its names",
        "Its entry of the list.",
        errors=(401, 404, 500, 503),
        parameters=("model_id",),
    ),
    "/live": RouteDescription("Tell that the process lives, also while it loads", "The phase the process is in."),
    "/health": RouteDescription("Tell whether the engine works", _HEALTHY, media=(), errors=(503,)),
    "/ready": RouteDescription(
        "Tell whether a new request would be admitted now", "It would be.", media=(), errors=(503,)
    ),
    "/ping": RouteDescription("The same as /health", _HEALTHY, media=(), errors=(503,)),
    "/version": RouteDescription("Give the server's version", "The version."),
    "/load": RouteDescription("Count the requests being answered now", "The number.", errors=(401,)),
    "/metrics": RouteDescription(
        "Give the metrics for Prometheus", "Prometheus text.", media=("text/plain",), errors=(401, 500)
    ),
    "/pause": RouteDescription("Stop admitting work", "The new status.", errors=(400, *_CALL_ERRORS)),
    "/resume": RouteDescription("Undo a pause", "The new status.", errors=_CALL_ERRORS),
    "/is_paused": RouteDescription("Tell whether the scheduler is paused", "The answer.", errors=_CALL_ERRORS),
    "/reset_prefix_cache": RouteDescription(
        "Drop all cached prefixes", "Whether it was done; not while blocks are in use.", errors=(400, *_CALL_ERRORS)
    ),
}
