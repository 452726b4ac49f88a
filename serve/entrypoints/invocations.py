"""POST /invocations, the one path that SageMaker calls: a body's fields and the model's task tell what is meant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from fastapi import Request
from fastapi.responses import Response

from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import JsonObject, Message
from serve.entrypoints.openai.chat import create_chat_completion
from serve.entrypoints.openai.completions import create_completion
from serve.entrypoints.openai.embeddings import create_classification, create_embeddings, create_pooling
from serve.entrypoints.openai.generation import read_body
from serve.entrypoints.openai.scores import create_ranking, create_scores
from serve.errors import InvalidRequest
from serve.pooling_params import PoolingTask

Handler = Callable[[AppState, Request], Awaitable[Response]]

# The first field that a body has decides.
_BY_FIELD: Final[Mapping[str, Handler]] = {
    "messages": create_chat_completion,
    "prompt": create_completion,
    "input": create_embeddings,
    "query": create_ranking,
    "queries": create_scores,
    "text_1": create_scores,
    "data_1": create_scores,
}
_BY_TASK: Final[Mapping[PoolingTask, Handler]] = {"embed": create_embeddings, "classify": create_classification}


async def invoke(state: AppState, request: Request) -> Response:
    """Answer as the endpoint does that takes such a body."""
    state.admitting()
    received: list[Message] = []

    async def record() -> Message:
        message = await request.receive()
        received.append(message)
        return message

    async def replay() -> Message:
        return received.pop(0) if received else await request.receive()

    body = await read_body(state, Request(request.scope, record))
    return await _handler_of(state, body)(state, Request(request.scope, replay))


def _handler_of(state: AppState, body: JsonObject) -> Handler:
    field = next((field for field in _BY_FIELD if body.get(field) is not None), None)
    if field is None:
        raise InvalidRequest(f"the body has none of the fields that tell what it asks for: {', '.join(_BY_FIELD)}")
    pooling = state.serving().llm.pooling
    if pooling is None or field not in ("messages", "input"):
        return _BY_FIELD[field]
    return create_pooling if body.get("task") is not None else _BY_TASK[pooling.task]
