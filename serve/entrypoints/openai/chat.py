"""Phase 1 of 11 (from messages to a submitted prompt) and Phase 11 of 11 (from hand-overs to chat chunks).

POST /v1/chat/completions, plain and streamed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import msgspec
from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from serve import __version__
from serve.engine.async_llm import RequestStream
from serve.engine.outputs import CompletionOutput, RequestOutput
from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import run_while_connected, wait_for_disconnect
from serve.entrypoints.openai.generation import (
    Generation,
    check_max_tokens,
    detailed_usage,
    final_output,
    read_body,
    resolve_max_tokens,
    start_generation,
    tokenize_params,
    usage,
)
from serve.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from serve.entrypoints.openai.protocol import ChatCompletionRequest, parse_request
from serve.entrypoints.sse import ChunkWriter, start_stream
from serve.errors import InvalidRequest
from serve.renderers.renderer import ChatRenderRequest, RenderedPrompt

FINGERPRINT = f"serve-{__version__}"


class ChatDelta(msgspec.Struct, omit_defaults=True, gc=False):
    """What is new in a choice."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


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


async def submit_chat(generation: Generation, chat: ChatCompletionRequest) -> tuple[RenderedPrompt, RequestStream]:
    """Render the messages, then register and submit the prompt."""
    services = generation.services
    requested = chat.max_output_tokens
    check_max_tokens(requested, "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens")
    check_top_logprobs(chat, generation.state.config.engine.model.max_logprobs)
    total = services.llm.max_model_len
    prompt = await services.renderer.render_chat(
        ChatRenderRequest(
            messages=chat.messages,
            tools=chat.tools,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=chat.continue_final_message,
            chat_template=chat.chat_template,
            chat_template_kwargs=chat.chat_template_kwargs,
            documents=chat.documents,
            reasoning_effort=chat.reasoning_effort,
            tokenize=tokenize_params(chat, requested, special=chat.add_special_tokens, total=total),
        )
    )
    defaults = services.llm.default_sampling
    params = chat.sampling_params(
        defaults,
        max_tokens=resolve_max_tokens(requested, defaults, total - len(prompt.token_ids)),
        logprobs=chat.num_logprobs(),
        prompt_logprobs=chat.prompt_logprobs,
    )
    stream = await generation.submit(prompt.token_ids, params, chat, request_id=generation.response_id)
    return prompt, stream


def check_top_logprobs(chat: ChatCompletionRequest, limit: int) -> None:
    """Refuse more candidates than the operator allows, under the chat API's own name; limit -1 allows all."""
    if limit != -1 and not 0 <= chat.top_logprobs <= limit:
        raise InvalidRequest(
            f"top_logprobs must be between 0 and {limit}, got {chat.top_logprobs}; lower it or start the server with a "
            "larger --max-logprobs",
            param="top_logprobs",
        )


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


def _shows_ids(generation: Generation, chat: ChatCompletionRequest) -> bool:
    sent = chat.return_tokens_as_token_ids
    return sent if sent is not None else generation.state.config.server.return_tokens_as_token_ids


def _logprobs(generation: Generation, chat: ChatCompletionRequest, output: CompletionOutput) -> object:
    if not chat.logprobs or output.logprobs is None:
        return None
    as_ids = _shows_ids(generation, chat)
    return chat_logprobs(output.logprobs, output.token_ids, top=chat.top_logprobs, as_ids=as_ids)


async def complete_chat(generation: Generation, chat: ChatCompletionRequest) -> bytes:
    """Give the body of a plain answer."""
    prompt, stream = await submit_chat(generation, chat)
    try:
        result = await final_output(stream)
    finally:
        await stream.aclose()
    role, echo = reply_role(generation, chat), echoed_text(generation, chat)
    choices: list[dict[str, object]] = []
    for output in sorted(result.outputs, key=lambda choice: choice.index):
        choice: dict[str, object] = {
            "index": output.index,
            "message": {"role": role, "content": echo + output.text, "refusal": None},
            "logprobs": _logprobs(generation, chat, output),
            "finish_reason": generation.finish_word(output),
            "stop_reason": output.stop_reason,
        }
        if chat.return_token_ids:
            choice["token_ids"] = output.token_ids
        choices.append(choice)
    num_generated = sum(len(output.token_ids) for output in result.outputs)
    counts = detailed_usage(generation.state, len(prompt.token_ids), num_generated, cached=result.num_cached_tokens)
    counts["completion_tokens_details"] = {"reasoning_tokens": 0}
    body: dict[str, object] = {
        "id": generation.response_id,
        "object": "chat.completion",
        "created": generation.created,
        "model": generation.model,
        "choices": choices,
        "usage": counts,
        "system_fingerprint": FINGERPRINT,
    }
    if chat.prompt_logprobs is not None and result.prompt_logprobs is not None:
        body["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
    if chat.return_token_ids:
        body["prompt_token_ids"] = prompt.token_ids
    return msgspec.json.encode(body)


async def stream_chat(generation: Generation, chat: ChatCompletionRequest) -> AsyncGenerator[bytes, None]:
    """Give one block of events per hand-over; closing the generator aborts the request."""
    prompt, stream = await submit_chat(generation, chat)
    try:
        writer = ChatStreamWriter(generation, chat, prompt)
        is_first = True
        async for hand_over in stream:
            block = writer.events(hand_over)
            if is_first:
                block = writer.opening() + block
                is_first = False
            if block:
                yield block
        yield writer.closing()
    finally:
        await stream.aclose()


class ChatStreamWriter:
    """Turns the hand-overs of one chat stream into events."""

    def __init__(self, generation: Generation, chat: ChatCompletionRequest, prompt: RenderedPrompt) -> None:
        self._generation = generation
        self._chat = chat
        self._prompt_token_ids = prompt.token_ids
        self._chunks = ChunkWriter(
            generation.response_id, "chat.completion.chunk", generation.created, model=generation.model
        )
        self._counts = [0] * chat.n
        self._num_cached = 0
        is_forced = generation.state.config.server.enable_force_include_usage
        self._with_usage, self._is_continuous = chat.wants_usage(is_forced=is_forced)

    def opening(self) -> bytes:
        """Give the role chunk of each choice, and the echoed text."""
        role = reply_role(self._generation, self._chat)
        usage_so_far = usage(len(self._prompt_token_ids), 0) if self._is_continuous else None
        events: list[bytes] = []
        for index in range(self._chat.n):
            choice = ChatChunkChoice(index, ChatDelta(role=role, content=""))
            if self._chat.return_token_ids:
                extra: dict[str, object] = {"prompt_token_ids": self._prompt_token_ids}
                events.append(self._chunks.chunk_with(choice, extra, usage_so_far))
            else:
                events.append(self._chunks.chunk(choice, usage_so_far))
        echo = echoed_text(self._generation, self._chat)
        if echo:
            for index in range(self._chat.n):
                events.append(self._chunks.chunk(ChatChunkChoice(index, ChatDelta(content=echo)), usage_so_far))
        return b"".join(events)

    def events(self, hand_over: RequestOutput) -> bytes:
        """Give the chunks of one hand-over; empty when nothing in it can be shown yet."""
        self._num_cached = hand_over.num_cached_tokens
        if len(hand_over.outputs) == 1:
            return self._event(hand_over.outputs[0])
        return b"".join([self._event(output) for output in hand_over.outputs])

    def _event(self, output: CompletionOutput) -> bytes:
        chat, index = self._chat, output.index
        self._counts[index] += len(output.token_ids)
        finish = self._generation.finish_word(output)
        if not output.text and finish is None and not chat.return_token_ids and not output.logprobs:
            return b""
        choice = ChatChunkChoice(index, ChatDelta(content=output.text), finish_reason=finish)
        if output.logprobs is not None:
            choice.logprobs = _logprobs(self._generation, chat, output)
        if finish is not None:
            choice.stop_reason = output.stop_reason
        if chat.return_token_ids:
            choice.token_ids = output.token_ids
        if self._is_continuous:
            return self._chunks.chunk(choice, usage(len(self._prompt_token_ids), self._counts[index]))
        if finish is not None and not self._with_usage:
            return self._chunks.chunk_with(choice, {"system_fingerprint": FINGERPRINT})
        return self._chunks.chunk(choice)

    def closing(self) -> bytes:
        """Give the usage chunk, when asked for."""
        if not self._with_usage:
            return b""
        counts = detailed_usage(
            self._generation.state, len(self._prompt_token_ids), sum(self._counts), cached=self._num_cached
        )
        return self._chunks.usage_chunk(counts, {"system_fingerprint": FINGERPRINT})
