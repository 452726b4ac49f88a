"""Phases 1 and 11 of 11 for many conversations in one body: POST /v1/chat/completions/batch.

Each conversation is a turn of its own with the same settings; all run at once, and one answer holds them in order.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Final

import msgspec
from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import run_while_connected, wait_for_disconnect
from serve.entrypoints.openai.chat import chat_choice, chat_usage
from serve.entrypoints.openai.fields import AtMost, Int, Objects
from serve.entrypoints.openai.generation import FINGERPRINT, Generation, read_body, start_generation
from serve.entrypoints.openai.logprobs import prompt_logprobs
from serve.entrypoints.openai.protocol import ChatCompletionRequest, parse_request
from serve.entrypoints.openai.turn import Turn, collect, open_turn
from serve.errors import InvalidRequest
from serve.limits import check_count

MAX_CONVERSATIONS: Final = 1 << 16
Conversation = Annotated[Objects, Field(min_length=1)]


class ChatBatchRequest(BaseModel):
    """Body of POST /v1/chat/completions/batch: lists of messages; the other fields are those of one chat request."""

    model_config = ConfigDict(extra="allow")
    messages: Annotated[
        list[Conversation], Field(min_length=1, fail_fast=True), BeforeValidator(AtMost(MAX_CONVERSATIONS))
    ]
    n: Int = 1
    stream: bool = False
    tools: object = None

    def check(self) -> None:
        """Refuse what only a single conversation can have. Raises InvalidRequest."""
        for name, is_asked in (("n", self.n != 1), ("stream", self.stream), ("tools", self.tools is not None)):
            if is_asked:
                raise InvalidRequest(
                    f"{name} is not supported for many conversations in one request; send each by itself", param=name
                )

    def chats(self) -> list[ChatCompletionRequest]:
        """Give one chat request for each conversation; the fields they share are checked once."""
        first = parse_request(ChatCompletionRequest, {**(self.model_extra or {}), "messages": self.messages[0]})
        return [first, *(first.model_copy(update={"messages": messages}) for messages in self.messages[1:])]


async def create_chat_batch(state: AppState, request: Request) -> Response:
    """Answer POST /v1/chat/completions/batch; one refused conversation refuses them all."""
    arrival_time = time.time()
    state.admitting()
    batch = parse_request(ChatBatchRequest, await read_body(state, request))
    limit = state.config.server.max_num_prompts
    check_count(batch.messages, limit, param="messages", what="conversations", flag_name="--max-num-prompts")
    chats = batch.chats()
    generation = start_generation(state, request, chats[0], prefix="chatcmpl-", arrival_time=arrival_time)
    work = _complete(generation, chats)
    return Response(
        await run_while_connected(work, wait_for_disconnect(request.receive)), media_type="application/json"
    )


async def _complete(generation: Generation, chats: list[ChatCompletionRequest]) -> bytes:
    turns: list[Turn] = []
    choices: list[dict[str, object]] = []
    try:
        for index, chat in enumerate(chats):
            turns.append(await _open(generation, chat, index))
        for index, (chat, turn) in enumerate(zip(chats, turns, strict=True)):
            [answer] = await collect(turn)
            choice = chat_choice(generation, chat, turn, answer)
            choice["index"] = index
            if chat.return_token_ids:
                choice["prompt_token_ids"] = turn.prompt.token_ids
            if chat.prompt_logprobs is not None and turn.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(turn.prompt_logprobs)
            choices.append(choice)
    finally:
        for turn in turns:
            await turn.aclose()
    return msgspec.json.encode(
        {
            "id": generation.response_id,
            "object": "chat.completion",
            "created": generation.created,
            "model": generation.model,
            "choices": choices,
            "usage": chat_usage(generation, *turns),
            "system_fingerprint": FINGERPRINT,
        }
    )


async def _open(generation: Generation, chat: ChatCompletionRequest, index: int) -> Turn:
    """Submit one conversation; a refusal says which it was."""
    own = replace(generation, response_id=f"{generation.response_id}-{index}")
    try:
        return await open_turn(own, chat)
    except InvalidRequest as error:
        param = error.param
        if param is not None and (param == "messages" or param.startswith("messages.")):
            param = f"messages.{index}" + param.removeprefix("messages")
        raise InvalidRequest(f"conversation {index}: {error}", param=param, code=error.code) from None
