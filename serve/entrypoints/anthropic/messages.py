"""Phases 1 and 11 of 11 for the Messages API: POST /v1/messages, plain and streamed, and its count_tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec
from fastapi import Request
from fastapi.responses import Response

from serve.entrypoints.anthropic.conversion import to_chat
from serve.entrypoints.anthropic.protocol import MessagesRequest, PromptRequest
from serve.entrypoints.anthropic.reply import AnswerBlocks, message_fields, stop_fields, usage
from serve.entrypoints.anthropic.stream import MessageStreamWriter
from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import run_while_connected, wait_for_disconnect
from serve.entrypoints.openai.generation import Generation, read_body, start_generation
from serve.entrypoints.openai.protocol import ChatCompletionRequest, parse_request
from serve.entrypoints.openai.turn import chat_render_request, open_turn
from serve.entrypoints.sse import start_stream
from serve.entrypoints.tasks import require_generation
from serve.renderers.renderer import TokenizeParams

ID_PREFIX = "msg_"


async def create_message(state: AppState, request: Request) -> Response:
    """Answer POST /v1/messages; refusals come before a stream begins."""
    arrival_time = time.time()
    can_think = state.admitting().answer_format.reasoning is not None
    body = parse_request(MessagesRequest, await read_body(state, request))
    chat = to_chat(body, can_think=can_think)
    generation = start_generation(state, request, chat, prefix=ID_PREFIX, arrival_time=arrival_time)
    if body.stream:
        events = stream_message(generation, chat, hides_thoughts=body.hides_thoughts)
        return await start_stream(events, request.receive, done=b"")
    work = complete_message(generation, chat, hides_thoughts=body.hides_thoughts)
    answer = await run_while_connected(work, wait_for_disconnect(request.receive))
    return Response(answer, media_type="application/json")


async def complete_message(generation: Generation, chat: ChatCompletionRequest, *, hides_thoughts: bool) -> bytes:
    """Give the body of a plain answer."""
    answer = AnswerBlocks()
    turn = await open_turn(generation, chat)
    try:
        deltas = [delta async for step in turn for delta in step]
    finally:
        await turn.aclose()
    for delta in deltas:
        answer.add(delta.events)
    has_calls = any(block.kind == "tool_use" for block in answer.blocks)
    message = message_fields(generation.response_id, generation.model)
    message["content"] = answer.content(hides_thoughts=hides_thoughts)
    message |= stop_fields(deltas[-1], has_calls=has_calls)
    message["usage"] = usage(turn)
    return msgspec.json.encode(message)


async def stream_message(
    generation: Generation, chat: ChatCompletionRequest, *, hides_thoughts: bool
) -> AsyncGenerator[bytes, None]:
    """Give one block of events per hand-over; closing the generator aborts the request."""
    turn = await open_turn(generation, chat)
    try:
        writer = MessageStreamWriter(generation, turn, hides_thoughts=hides_thoughts)
        is_first = True
        async for deltas in turn:
            block = b"".join([writer.events(delta) for delta in deltas])
            if is_first:
                block = writer.opening() + block
                is_first = False
            if block:
                yield block
        yield writer.closing()
    finally:
        await turn.aclose()


async def count_tokens(state: AppState, request: Request) -> dict[str, object]:
    """Answer POST /v1/messages/count_tokens: the input_tokens of such a message, also of one beyond the context."""
    services = state.admitting()
    require_generation(services.llm)
    body = parse_request(PromptRequest, await read_body(state, request))
    chat = to_chat(body, can_think=services.answer_format.reasoning is not None)
    state.check_model(body.model)
    no_limit = TokenizeParams(add_special_tokens=chat.add_special_tokens, max_total_tokens=None)
    render = replace(chat_render_request(state, services, chat), tokenize=no_limit)
    prompt = await services.renderer.render_chat(render)
    return {"input_tokens": len(prompt.token_ids)}
