"""What /openapi.json says of each route beyond its body: one table, read once while the application is assembled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import BaseModel

from serve.entrypoints import api_answers as answers
from serve.entrypoints.anthropic.protocol import MessagesRequest, PromptRequest
from serve.entrypoints.api_schemas import (
    ANTHROPIC_FIELDS,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    POOLING_FIELDS,
    RERANK_FIELDS,
    RESPONSES_FIELDS,
    SCORE_FIELDS,
    TOKENIZE_FIELDS,
    Schema,
    request_schema,
)
from serve.entrypoints.openai.chat_batch import ChatBatchRequest
from serve.entrypoints.openai.pooling_protocol import (
    InputRequest,
    RerankRequest,
    ScoreRequest,
)
from serve.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from serve.entrypoints.openai.responses_protocol import MAX_PAGE, ResponsesRequest

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
BYTES: Final = "application/octet-stream"
_BODY_ERRORS: Final = (400, 401, 404, 408, 413, 415, 500, 503)
_GENERATION_ERRORS: Final = (*_BODY_ERRORS, 429)
_CALL_ERRORS: Final = (401, 500, 503)
_STORED_ERRORS: Final = (401, 404, 500, 503)
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


class AnthropicErrorObject(BaseModel):
    """What went wrong: a type for programs and a sentence for people."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every error under /v1/messages; also the last event of a stream that fails there."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


_TEXT: Final[Schema] = {"type": "string"}
# What a medium holds when no model says more; of a stream it is one event.
_SCHEMAS: Final[dict[str, Schema]] = {
    JSON: {"type": "object"},
    EVENTS: {"type": "object", "required": ["data"], "properties": {"event": _TEXT, "data": _TEXT}},
    BYTES: {"type": "string", "format": "binary"},
}


@dataclass(frozen=True, slots=True)
class RouteDescription:
    """One line about a route, what it answers (media types, none for an empty body), and its error statuses."""

    summary: str
    answer: str
    media: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = ()
    parameters: tuple[str, ...] = ()
    body: type[BaseModel] | None = None
    error_body: type[BaseModel] = ErrorBody
    result: type[BaseModel] | None = None
    fields: Mapping[str, Schema | None] = field(default_factory=dict)
    query: Mapping[str, Schema] = field(default_factory=dict)

    def responses(self) -> dict[int | str, dict[str, object]]:
        """Give the answers in the form that add_api_route takes."""
        answers: dict[int | str, dict[str, object]] = {200: {"description": self.answer}}
        if self.result is not None:
            answers[200]["model"] = self.result
        kinds = [kind for kind in self.media if kind != JSON or self.result is None]
        if kinds:
            answers[200]["content"] = {kind: {"schema": _SCHEMAS.get(kind, _TEXT)} for kind in kinds}
        for status in self.errors:
            answers[status] = {"description": ERROR_MEANINGS[status], "model": self.error_body}
        return answers

    def extra(self) -> dict[str, object]:
        """Give the request's side: the body that the handler itself reads, and the parts of the path."""
        described: dict[str, object] = {}
        if self.body is not None:
            content = {JSON: {"schema": request_schema(self.body, self.fields)}}
            described["requestBody"] = {"required": True, "content": content}
        parameters: list[dict[str, object]] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in self.parameters
        ]
        parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in self.query.items()]
        if parameters:
            described["parameters"] = parameters
        return described


_STREAMED: Final = "One JSON object; with stream=true, events of chunks that end with data: [DONE]."
_HEALTHY: Final = "The model is loaded and the engine core makes progress."
_SCORE: Final = RouteDescription(
    "Say how well pairs of texts fit each other",
    "One score for each pair.",
    errors=_GENERATION_ERRORS,
    body=ScoreRequest,
    result=answers.Scores,
    fields=SCORE_FIELDS,
)
_RERANK: Final = RouteDescription(
    "Order documents by how well they answer a query",
    "The documents with their scores, best first.",
    errors=_GENERATION_ERRORS,
    body=RerankRequest,
    result=answers.Ranking,
    fields=RERANK_FIELDS,
)
ROUTES: Final = {
    "/v1/chat/completions": RouteDescription(
        "Answer a conversation",
        _STREAMED,
        media=(JSON, EVENTS),
        errors=_GENERATION_ERRORS,
        body=ChatCompletionRequest,
        fields=CHAT_FIELDS,
        result=answers.ChatCompletion,
    ),
    "/v1/chat/completions/batch": RouteDescription(
        "Answer many conversations with the same settings",
        "One JSON object with one choice for each conversation.",
        errors=_GENERATION_ERRORS,
        body=ChatBatchRequest,
        result=answers.ChatBatch,
    ),
    "/v1/completions": RouteDescription(
        "Continue one or more prompts",
        _STREAMED,
        media=(JSON, EVENTS),
        errors=_GENERATION_ERRORS,
        body=CompletionRequest,
        fields=COMPLETION_FIELDS,
        result=answers.Completion,
    ),
    "/v1/chat/completions/render": RouteDescription(
        "Show what a chat request would run, without running it",
        "The token ids, the prompt's text and the sampling parameters: a body for /inference/v1/generate.",
        errors=_BODY_ERRORS,
        body=ChatCompletionRequest,
        fields=CHAT_FIELDS,
        result=answers.RenderedRequest,
    ),
    "/v1/completions/render": RouteDescription(
        "Show what a completion request would run, without running it",
        "For each prompt its token ids, text and sampling parameters: a body for /inference/v1/generate.",
        errors=_BODY_ERRORS,
        body=CompletionRequest,
        fields=COMPLETION_FIELDS,
        result=answers.RenderedRequests,
    ),
    "/inference/v1/generate": RouteDescription(
        "Continue token ids with token ids",
        _STREAMED,
        media=(JSON, EVENTS),
        errors=_GENERATION_ERRORS,
        body=GenerateRequest,
        result=answers.Generated,
    ),
    "/v1/embeddings": RouteDescription(
        "Turn texts into embeddings",
        "One vector for each input.",
        errors=_GENERATION_ERRORS,
        body=InputRequest,
        result=answers.Embeddings,
        fields=POOLING_FIELDS,
        media=(JSON, BYTES),
    ),
    "/pooling": RouteDescription(
        "Give what a pooling model makes of texts",
        "One result for each input: a vector, or one for each token.",
        errors=_GENERATION_ERRORS,
        body=InputRequest,
        result=answers.PooledEntries,
        fields=POOLING_FIELDS,
        media=(JSON, BYTES),
    ),
    "/classify": RouteDescription(
        "Classify texts",
        "One label for each input, and all probabilities.",
        errors=_GENERATION_ERRORS,
        body=InputRequest,
        result=answers.Classifications,
        fields=POOLING_FIELDS,
    ),
    "/score": _SCORE,
    "/v1/score": _SCORE,
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/v1/messages": RouteDescription(
        "Answer a conversation in the form of Anthropic's Messages API",
        "One message; with stream=true, named events from message_start to message_stop.",
        media=(JSON, EVENTS),
        errors=_GENERATION_ERRORS,
        body=MessagesRequest,
        fields=ANTHROPIC_FIELDS,
        error_body=AnthropicErrorBody,
        result=answers.Message,
    ),
    "/v1/messages/count_tokens": RouteDescription(
        "Count the tokens of a conversation",
        "The input_tokens that such a message would have.",
        errors=_BODY_ERRORS,
        body=PromptRequest,
        fields=ANTHROPIC_FIELDS,
        error_body=AnthropicErrorBody,
        result=answers.InputTokens,
    ),
    "/v1/responses": RouteDescription(
        "Answer a conversation given as items, and keep the answer",
        "One Response; with stream=true, its events by name.",
        media=(JSON, EVENTS),
        errors=_GENERATION_ERRORS,
        body=ResponsesRequest,
        fields=RESPONSES_FIELDS,
        result=answers.ResponseObject,
    ),
    "GET /v1/responses/{response_id}": RouteDescription(
        "Give a kept Response, or with stream=true its events from starting_after on",
        "The Response as it is now.",
        media=(JSON, EVENTS),
        errors=(400, *_STORED_ERRORS),
        parameters=("response_id",),
        query={"stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": -1}},
        result=answers.ResponseObject,
    ),
    "DELETE /v1/responses/{response_id}": RouteDescription(
        "Forget a Response; one that runs is stopped",
        "That it is gone.",
        errors=_STORED_ERRORS,
        parameters=("response_id",),
        result=answers.DeletedResponse,
    ),
    "/v1/responses/{response_id}/cancel": RouteDescription(
        "Stop a background Response",
        "The Response as it is then.",
        errors=(400, *_STORED_ERRORS),
        parameters=("response_id",),
        result=answers.ResponseObject,
    ),
    "/v1/responses/{response_id}/input_items": RouteDescription(
        "List what led to a Response: limit, order, after",
        "A page of items.",
        errors=(400, *_STORED_ERRORS),
        parameters=("response_id",),
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
            "order": {"enum": ["asc", "desc"]},
            "after": {"type": "string"},
        },
        result=answers.ItemPage,
    ),
    "/invocations": RouteDescription(
        "Answer as the endpoint does that takes such a body",
        "What that endpoint answers.",
        media=(JSON, EVENTS),
        errors=_GENERATION_ERRORS,
    ),
    "/tokenize": RouteDescription(
        "Turn a prompt or a conversation into token ids",
        "Token ids, their number, and the context length.",
        errors=_BODY_ERRORS,
        body=TokenizeRequest,
        fields=TOKENIZE_FIELDS,
        result=answers.Tokens,
    ),
    "/tokenizer_info": RouteDescription("Describe the tokenizer", "Its description.", errors=_CALL_ERRORS),
    "/detokenize": RouteDescription(
        "Turn token ids into text",
        "The text.",
        errors=_BODY_ERRORS,
        body=DetokenizeRequest,
        result=answers.Text,
    ),
    "/v1/models": RouteDescription(
        "List the names of the model",
        "The list.",
        errors=(401, 500, 503),
        result=answers.Models,
    ),
    "/v1/models/{model_id}": RouteDescription(
        "Describe the model under one of its names",
        "Its entry of the list.",
        errors=(401, 404, 500, 503),
        parameters=("model_id",),
        result=answers.Model,
    ),
    "/live": RouteDescription(
        "Tell that the process lives, also while it loads",
        "The phase the process is in.",
        result=answers.Alive,
    ),
    "/health": RouteDescription("Tell whether the engine works", _HEALTHY, media=(), errors=(503,)),
    "/ready": RouteDescription(
        "Tell whether a new request would be admitted now", "It would be.", media=(), errors=(503,)
    ),
    "/ping": RouteDescription("The same as /health", _HEALTHY, media=(), errors=(503,)),
    "/version": RouteDescription(
        "Give the server's version",
        "The version.",
        result=answers.Version,
    ),
    "/load": RouteDescription(
        "Count the requests being answered now",
        "The number.",
        errors=(401,),
        result=answers.Load,
    ),
    "/metrics": RouteDescription(
        "Give the metrics for Prometheus", "Prometheus text.", media=("text/plain",), errors=(401, 500)
    ),
    "/pause": RouteDescription(
        "Stop admitting work",
        "The new status.",
        errors=(400, *_CALL_ERRORS),
        result=answers.Status,
    ),
    "/resume": RouteDescription(
        "Undo a pause",
        "The new status.",
        errors=_CALL_ERRORS,
        result=answers.Status,
    ),
    "/is_paused": RouteDescription(
        "Tell whether the scheduler is paused",
        "The answer.",
        errors=_CALL_ERRORS,
        result=answers.Paused,
    ),
    "/reset_prefix_cache": RouteDescription(
        "Drop all cached prefixes",
        "Whether it was done; not while blocks are in use.",
        errors=(400, *_CALL_ERRORS),
        result=answers.Success,
    ),
}
