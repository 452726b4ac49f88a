"""Phases 1 and 11 of 11: POST /v1/chat/completions: one turn, its parts written as an answer or as chunks.

Thoughts, text and calls of one hand-over share a chunk as far as the API allows: each piece of a call has its own.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import msgspec
from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from serve.engine.outputs import PositionLogprobs
from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import run_while_connected, wait_for_disconnect
from serve.entrypoints.openai.generation import (
    FINGERPRINT,
    Generation,
    detailed_usage,
    read_body,
    start_generation,
    usage,
)
from serve.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from serve.entrypoints.openai.protocol import ChatCompletionRequest, parse_request
from serve.entrypoints.openai.turn import Answer, Turn, TurnDelta, collect, open_turn
from serve.entrypoints.sse import ChunkWriter, start_stream
from serve.renderers.output_events import CallDelta, CallStart, ContentDelta, Event, ReasoningDelta

_encode = msgspec.json.Encoder().encode


class FunctionDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """What is new in a call's function; name comes once, with the first piece."""

    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class CallChunk(msgspec.Struct, omit_defaults=True, gc=False):
    """What is new in a call; id and type come once, with the first piece."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """What is new in a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallChunk] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, gc=False):
    """One choice of a chunk; finish_reason is written also while null."""

    index: int
    delta: ChatDelta
    logprobs: object = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


async def create_chat_completion(state: AppState, request: Request) -> Response:
    """Answer POST /v1/chat/completions; refusals come before a stream begins."""
    arrival_time = time.time()
    state.admitting()
    chat = parse_request(ChatCompletionRequest, await read_body(state, request))
    generation = start_generation(state, request, chat, prefix="chatcmpl-", arrival_time=arrival_time)
    if chat.stream:
        return await start_stream(stream_chat(generation, chat), request.receive)
    body = await run_while_connected(complete_chat(generation, chat), wait_for_disconnect(request.receive))
    return Response(body, media_type="application/json")


def reply_role(generation: Generation, chat: ChatCompletionRequest) -> str:
    """Give the role of the answer: the continued message's, or the configured one."""
    if chat.add_generation_prompt:
        return generation.state.config.server.response_role
    return str(chat.messages[-1].get("role", ""))


def echoed_text(generation: Generation, chat: ChatCompletionRequest) -> str:
    """Give the text that goes before the answer: with echo, the last message's when it has the answer's role."""
    last = chat.messages[-1]
    content = last.get("content")
    if chat.echo and last.get("role") == reply_role(generation, chat) and isinstance(content, str):
        return content
    return ""


def _logprobs(
    generation: Generation,
    chat: ChatCompletionRequest,
    positions: list[PositionLogprobs] | None,
    token_ids: list[int],
) -> object:
    if not chat.logprobs or positions is None:
        return None
    sent = chat.return_tokens_as_token_ids
    as_ids = sent if sent is not None else generation.state.config.server.return_tokens_as_token_ids
    chosen_ids = chat.logprob_token_ids or None
    return chat_logprobs(positions, token_ids, top=chat.top_logprobs, as_ids=as_ids, chosen_ids=chosen_ids)


def chat_usage(generation: Generation, *turns: Turn) -> dict[str, object]:
    """Give the counts over all choices of turns; the prompt of a turn counts once."""
    counts = detailed_usage(
        generation.state,
        sum(len(turn.prompt.token_ids) for turn in turns),
        sum(sum(turn.num_generated) for turn in turns),
        cached=sum(turn.num_cached_tokens for turn in turns),
    )
    counts["completion_tokens_details"] = {"reasoning_tokens": sum(sum(turn.num_reasoning) for turn in turns)}
    return counts


async def complete_chat(generation: Generation, chat: ChatCompletionRequest) -> bytes:
    """Give the body of a plain answer."""
    turn = await open_turn(generation, chat)
    try:
        answers = await collect(turn)
    finally:
        await turn.aclose()
    body: dict[str, object] = {
        "id": generation.response_id,
        "object": "chat.completion",
        "created": generation.created,
        "model": generation.model,
        "choices": [chat_choice(generation, chat, turn, answer) for answer in answers],
        "usage": chat_usage(generation, turn),
        "system_fingerprint": FINGERPRINT,
    }
    if chat.prompt_logprobs is not None and turn.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(turn.prompt_logprobs)
    if chat.return_token_ids:
        body["prompt_token_ids"] = turn.prompt.token_ids
    if chat.return_prompt_text:
        body["prompt_text"] = turn.prompt.text
    return msgspec.json.encode(body)


def chat_choice(generation: Generation, chat: ChatCompletionRequest, turn: Turn, answer: Answer) -> dict[str, object]:
    """Give a whole choice."""
    choice: dict[str, object] = {
        "index": answer.index,
        "message": _message(generation, chat, answer, has_reasoned=turn.num_reasoning[answer.index] > 0),
        "logprobs": _logprobs(generation, chat, answer.logprobs, answer.token_ids),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }
    if chat.return_token_ids:
        choice["token_ids"] = answer.token_ids
    return choice


def _message(
    generation: Generation, chat: ChatCompletionRequest, answer: Answer, *, has_reasoned: bool
) -> dict[str, object]:
    """Give the message; its content is null only beside calls, or when nothing but thoughts came."""
    content = echoed_text(generation, chat) + answer.content
    is_empty = not content and (answer.calls or answer.reasoning or has_reasoned)
    message: dict[str, object] = {
        "role": reply_role(generation, chat),
        "content": None if is_empty else content,
        "refusal": None,
    }
    if answer.reasoning:
        message["reasoning"] = answer.reasoning
        if generation.state.config.server.enable_reasoning_content:
            message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


async def stream_chat(generation: Generation, chat: ChatCompletionRequest) -> AsyncGenerator[bytes, None]:
    """Give one block of events per hand-over; closing the generator aborts the request."""
    turn = await open_turn(generation, chat)
    try:
        writer = ChatStreamWriter(generation, chat, turn)
        is_first = True
        async for deltas in turn:
            block = writer.events(deltas)
            if is_first:
                block = writer.opening() + block
                is_first = False
            if block:
                yield block
        yield writer.closing()
    finally:
        await turn.aclose()


class ChatStreamWriter:
    """Turns the deltas of one chat stream into events."""

    def __init__(self, generation: Generation, chat: ChatCompletionRequest, turn: Turn) -> None:
        self._generation = generation
        self._chat = chat
        self._turn = turn
        self._chunks = ChunkWriter(
            generation.response_id, "chat.completion.chunk", generation.created, model=generation.model
        )
        self._has_alias = generation.state.config.server.enable_reasoning_content
        is_forced = generation.state.config.server.enable_force_include_usage
        self._with_usage, self._is_continuous = chat.wants_usage(is_forced=is_forced)
        # Most chunks of most streams are text and nothing else: they are written around the text.
        has_more = self._is_continuous or chat.return_token_ids
        self._plain = [] if has_more else [self._around_text(index) for index in range(chat.n)]

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """Give what a chunk of text holds before and after the text."""
        mark = "\0"
        chunk = self._chunks.chunk(ChatChunkChoice(index, ChatDelta(content=mark)))
        head, _, tail = chunk.rpartition(_encode(mark))
        return head, tail

    def opening(self) -> bytes:
        """Give the role chunk of each choice, and the echoed text."""
        role, prompt_token_ids = reply_role(self._generation, self._chat), self._turn.prompt.token_ids
        usage_so_far = usage(len(prompt_token_ids), 0) if self._is_continuous else None
        events: list[bytes] = []
        for index in range(self._chat.n):
            choice = ChatChunkChoice(index, ChatDelta(role=role, content=""))
            extra: dict[str, object] = {}
            if self._chat.return_token_ids:
                extra["prompt_token_ids"] = prompt_token_ids
            if self._chat.return_prompt_text:
                extra["prompt_text"] = self._turn.prompt.text
            if extra:
                events.append(self._chunks.chunk_with(choice, extra, usage_so_far))
            else:
                events.append(self._chunks.chunk(choice, usage_so_far))
        echo = echoed_text(self._generation, self._chat)
        if echo:
            for index in range(self._chat.n):
                events.append(self._chunks.chunk(ChatChunkChoice(index, ChatDelta(content=echo)), usage_so_far))
        return b"".join(events)

    def events(self, deltas: list[TurnDelta]) -> bytes:
        """Give the chunks of one hand-over; empty when nothing in it can be shown yet."""
        if len(deltas) == 1:
            return self._event(deltas[0])
        return b"".join([self._event(delta) for delta in deltas])

    def _event(self, delta: TurnDelta) -> bytes:
        chat, finish, events = self._chat, delta.finish_reason, delta.events
        if self._plain and finish is None and delta.logprobs is None and len(events) == 1:
            event = events[0]
            if type(event) is ContentDelta:
                head, tail = self._plain[delta.index]
                return head + _encode(event.text) + tail
        parts = self._parts(events)
        if not parts:
            if finish is None and not (delta.token_ids and chat.return_token_ids) and not delta.logprobs:
                return b""
            parts = [ChatDelta(content="")]
        elif finish is not None and parts[-1].tool_calls is not UNSET:
            parts.append(ChatDelta())
        choices = [ChatChunkChoice(delta.index, part) for part in parts]
        # Tokens ride on the chunk that releases them: the first of the hand-over.
        if delta.logprobs is not None:
            choices[0].logprobs = _logprobs(self._generation, chat, delta.logprobs, delta.token_ids)
        if chat.return_token_ids:
            choices[0].token_ids = delta.token_ids
        if finish is not None:
            choices[-1].finish_reason, choices[-1].stop_reason = finish, delta.stop_reason
        if len(choices) == 1:
            return self._chunk(choices[0])
        return b"".join([self._chunk(choice) for choice in choices])

    def _parts(self, events: list[Event]) -> list[ChatDelta]:
        """Give what each chunk of a hand-over says: text and thoughts together, each piece of a call alone."""
        parts: list[ChatDelta] = []
        for event in events:
            if isinstance(event, (CallStart, CallDelta)):
                parts.append(ChatDelta(tool_calls=[_call_chunk(event)]))
                continue
            if not parts or parts[-1].tool_calls is not UNSET:
                parts.append(ChatDelta())
            _add_text(parts[-1], event, has_alias=self._has_alias)
        return parts

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        if self._is_continuous:
            num_generated = self._turn.num_generated[choice.index]
            return self._chunks.chunk(choice, usage(len(self._turn.prompt.token_ids), num_generated))
        if choice.finish_reason is not None and not self._with_usage:
            return self._chunks.chunk_with(choice, {"system_fingerprint": FINGERPRINT})
        return self._chunks.chunk(choice)

    def closing(self) -> bytes:
        """Give the usage chunk, when asked for."""
        if not self._with_usage:
            return b""
        return self._chunks.usage_chunk(chat_usage(self._generation, self._turn), {"system_fingerprint": FINGERPRINT})


def _call_chunk(event: CallStart | CallDelta) -> CallChunk:
    if isinstance(event, CallStart):
        return CallChunk(event.index, FunctionDelta(arguments="", name=event.name), event.call_id, "function")
    return CallChunk(event.index, FunctionDelta(arguments=event.arguments))


def _add_text(delta: ChatDelta, event: ContentDelta | ReasoningDelta, *, has_alias: bool) -> None:
    if isinstance(event, ContentDelta):
        delta.content = event.text if delta.content is UNSET else delta.content + event.text
        return
    delta.reasoning = event.text if delta.reasoning is UNSET else delta.reasoning + event.text
    if has_alias:
        delta.reasoning_content = delta.reasoning
