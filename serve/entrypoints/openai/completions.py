"""Phases 1 and 11 of 11 for the legacy text API: POST /v1/completions, plain and streamed, one or many prompts.

Choice index = prompt index * n + sample index.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import msgspec
from fastapi import Request
from fastapi.responses import Response
from msgspec import UNSET, UnsetType

from serve import __version__
from serve.engine.async_llm import RequestStream
from serve.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
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
from serve.entrypoints.openai.logprobs import CompletionLogprobs, prompt_logprobs
from serve.entrypoints.openai.protocol import COMPLETION_MAX_TOKENS, CompletionRequest, parse_request
from serve.entrypoints.sse import ChunkWriter, start_stream
from serve.errors import InvalidRequest
from serve.renderers.renderer import RenderedPrompt
from serve.sampling_params import SamplingParams

FINGERPRINT = f"serve-{__version__}"
Prompt = str | list[int]


class CompletionChunkChoice(msgspec.Struct, gc=False):
    """One choice of a chunk."""

    index: int
    text: str
    logprobs: object = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


async def create_completion(state: AppState, request: Request) -> Response:
    """Answer POST /v1/completions; refusals come before a stream begins."""
    arrival_time = time.time()
    state.admitting()
    completion = parse_request(CompletionRequest, await read_body(state, request))
    generation = start_generation(state, request, completion, prefix="cmpl-", arrival_time=arrival_time)
    _check_num_choices(completion, state.config.server.max_num_prompts)
    prompts = split_prompts(completion.prompt)
    job = CompletionJob(generation, completion, prompts)
    if completion.stream:
        return await start_stream(stream_completion(job), request.receive)
    body = await run_while_connected(complete(job), wait_for_disconnect(request.receive))
    return Response(body, media_type="application/json")


def _check_num_choices(completion: CompletionRequest, limit: int) -> None:
    """Refuse too many choices before each prompt is looked at: there may be millions."""
    prompt = completion.prompt
    is_many = isinstance(prompt, list) and len(prompt) > 0 and not _is_id(prompt[0])
    num_prompts = len(prompt) if is_many else 1
    if num_prompts * max(1, completion.n) > limit:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={completion.n} make more than the {limit} choices of one request; "
            "send fewer at a time",
            param="prompt",
        )


def split_prompts(prompt: object) -> list[Prompt]:
    """Take apart the four forms of `prompt`: text, ids, a list of texts, a list of id lists."""
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise InvalidRequest(
            "prompt must be a string, a list of strings, token ids or lists of token ids", param="prompt"
        )
    if not prompt:
        raise InvalidRequest("prompt must not be an empty list", param="prompt")
    if _is_id(prompt[0]):
        return [_token_ids(prompt, "prompt")]
    if isinstance(prompt[0], str):
        return [_text(item, f"prompt.{i}") for i, item in enumerate(prompt)]
    return [_token_ids(item, f"prompt.{i}") for i, item in enumerate(prompt)]


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{param} must be a string like the other prompts", param=param)
    if not value:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    return value


def _token_ids(value: object, param: str) -> list[int]:
    if not isinstance(value, list) or any(kind is not int for kind in set(map(type, value))):
        raise InvalidRequest(f"{param} must hold token ids only", param=param)
    if not value:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    lowest, highest = min(value), max(value)
    if lowest < 0 or highest >= 2**31:
        raise InvalidRequest(
            f"{param} holds token id {lowest if lowest < 0 else highest}, which no vocabulary has", param=param
        )
    return value


@dataclass(slots=True)
class CompletionJob:
    """A checked request and what its prompts became."""

    generation: Generation
    completion: CompletionRequest
    prompts: list[Prompt]
    rendered: list[RenderedPrompt] = field(default_factory=list)
    echo_texts: list[str] = field(default_factory=list)

    @property
    def scores_only(self) -> bool:
        """True for echo with max_tokens 0: one token is run and not shown."""
        return self.completion.max_tokens == 0

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens over all prompts; n does not multiply them."""
        return sum(len(prompt.token_ids) for prompt in self.rendered)

    async def submit(self) -> list[RequestStream]:
        """Render all prompts, then register and submit them in order; none stays behind when one is refused."""
        await self._render()
        streams: list[RequestStream] = []
        is_complete = False
        try:
            for index, prompt in enumerate(self.rendered):
                request_id = f"{self.generation.response_id}-{index}"
                params = self._sampling_params(len(prompt.token_ids))
                streams.append(
                    await self.generation.submit(prompt.token_ids, params, self.completion, request_id=request_id)
                )
            is_complete = True
        finally:
            if not is_complete:
                await close_all(streams)
        return streams

    async def _render(self) -> None:
        completion, services = self.completion, self.generation.services
        if not self.scores_only:
            check_max_tokens(completion.max_tokens, "max_tokens")
        total = services.llm.max_model_len
        params = tokenize_params(completion, completion.max_tokens, special=completion.add_special_tokens, total=total)
        for prompt in self.prompts:
            if isinstance(prompt, str):
                self.rendered.append(await services.renderer.render_text(prompt, params))
            else:
                self.rendered.append(services.renderer.check_token_ids(prompt, params))
        if completion.echo:
            self.echo_texts = [await self._echo_text(prompt) for prompt in self.rendered]

    async def _echo_text(self, prompt: RenderedPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        skips = self.completion.skip_special_tokens
        return await self.generation.services.renderer.decode(prompt.token_ids, skip_special_tokens=skips)

    def _sampling_params(self, prompt_len: int) -> SamplingParams:
        completion, llm = self.completion, self.generation.services.llm
        requested = completion.max_tokens if completion.max_tokens is not None else COMPLETION_MAX_TOKENS
        prompt_count = completion.prompt_logprobs
        if completion.echo and completion.logprobs is not None:
            prompt_count = max(prompt_count or 0, completion.logprobs)
        return completion.sampling_params(
            llm.default_sampling,
            max_tokens=1 if self.scores_only else resolve_max_tokens(requested, {}, llm.max_model_len - prompt_len),
            logprobs=completion.logprobs,
            prompt_logprobs=prompt_count,
        )

    def choice_writer(self, prompt_index: int, sample_index: int) -> ChoiceWriter:
        """Give the writer of one choice."""
        return ChoiceWriter(self, prompt_index, prompt_index * self.completion.n + sample_index)


class ChoiceWriter:
    """Writes one choice, at once or piece by piece."""

    def __init__(self, job: CompletionJob, prompt_index: int, index: int) -> None:
        completion, state = job.completion, job.generation.state
        sent = completion.return_tokens_as_token_ids
        self.index = index
        self.num_generated = 0
        self._job = job
        self._prompt_index = prompt_index
        self._is_first = True
        self._logprobs = CompletionLogprobs(
            sent if sent is not None else state.config.server.return_tokens_as_token_ids
        )

    def write(
        self, output: CompletionOutput, prompt_positions: list[PositionLogprobs | None] | None
    ) -> CompletionChunkChoice | None:
        """Give the choice with what is new in it; None when there is nothing to show yet."""
        job, completion = self._job, self._job.completion
        finish = job.generation.finish_word(output)
        text, token_ids, positions = output.text, output.token_ids, output.logprobs
        if job.scores_only:
            text, token_ids, positions = "", [], None if positions is None else []
            finish = "length" if finish is not None else None
        self.num_generated += len(token_ids)
        is_first, self._is_first = self._is_first, False
        if not (text or finish or (is_first and completion.echo) or positions or completion.return_token_ids):
            self._is_first = is_first
            return None
        choice = CompletionChunkChoice(self.index, text, None, finish, output.stop_reason)
        if completion.logprobs is not None:
            choice.logprobs = self._logprob_block(positions or [], token_ids, prompt_positions if is_first else None)
        if is_first and completion.echo:
            choice.text = job.echo_texts[self._prompt_index] + text
        if completion.return_token_ids:
            choice.token_ids = token_ids
            if is_first:
                choice.prompt_token_ids = job.rendered[self._prompt_index].token_ids
        return choice

    def _logprob_block(
        self,
        positions: list[PositionLogprobs],
        token_ids: list[int],
        prompt_positions: list[PositionLogprobs | None] | None,
    ) -> dict[str, object]:
        if not self._job.completion.echo or prompt_positions is None:
            return self._logprobs.block([*positions], token_ids)
        prompt_ids = self._job.rendered[self._prompt_index].token_ids
        first = self._job.generation.services.tokenizer.token_to_bytes(prompt_ids[0])
        return self._logprobs.block([*prompt_positions, *positions], [*prompt_ids, *token_ids], first)


async def close_all(streams: list[RequestStream]) -> None:
    """Abort what is still running."""
    for stream in streams:
        await stream.aclose()


async def complete(job: CompletionJob) -> bytes:
    """Give the body of a plain answer."""
    streams = await job.submit()
    try:
        results = [await final_output(stream) for stream in streams]
    finally:
        await close_all(streams)
    choices: list[dict[str, object]] = []
    num_generated = 0
    for prompt_index, result in enumerate(results):
        for output in sorted(result.outputs, key=lambda item: item.index):
            writer = job.choice_writer(prompt_index, output.index)
            written = writer.write(output, result.prompt_logprobs)
            assert written is not None, "a finished choice is always shown"
            num_generated += writer.num_generated
            choice: dict[str, object] = msgspec.to_builtins(written)
            if job.completion.prompt_logprobs is not None and result.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(result.prompt_logprobs)
            choices.append(choice)
    cached = sum(result.num_cached_tokens for result in results)
    generation = job.generation
    return msgspec.json.encode(
        {
            "id": generation.response_id,
            "object": "text_completion",
            "created": generation.created,
            "model": generation.model,
            "choices": choices,
            "usage": detailed_usage(generation.state, job.num_prompt_tokens, num_generated, cached=cached),
            "system_fingerprint": FINGERPRINT,
        }
    )


async def stream_completion(job: CompletionJob) -> AsyncGenerator[bytes, None]:
    """Give one block of events per hand-over; closing the generator aborts all prompts."""
    streams = await job.submit()
    try:
        writer = CompletionStreamWriter(job)
        async for prompt_index, hand_over in merge(streams):
            block = writer.events(prompt_index, hand_over)
            if block:
                yield block
        yield writer.closing()
    finally:
        await close_all(streams)


class CompletionStreamWriter:
    """Turns the hand-overs of all prompts of a stream into events."""

    def __init__(self, job: CompletionJob) -> None:
        generation, completion = job.generation, job.completion
        self._job = job
        self._chunks = ChunkWriter(
            generation.response_id, "text_completion", generation.created, model=generation.model
        )
        self._writers = [
            [job.choice_writer(prompt, sample) for sample in range(completion.n)] for prompt in range(len(job.prompts))
        ]
        self._prompt_positions: list[list[PositionLogprobs | None] | None] = [None] * len(job.prompts)
        self._cached = [0] * len(job.prompts)
        is_forced = generation.state.config.server.enable_force_include_usage
        self._with_usage, self._is_continuous = completion.wants_usage(is_forced=is_forced)

    def events(self, prompt_index: int, hand_over: RequestOutput) -> bytes:
        """Give the chunks of one hand-over; empty when nothing in it can be shown yet."""
        self._cached[prompt_index] = hand_over.num_cached_tokens
        if hand_over.prompt_logprobs is not None:
            self._prompt_positions[prompt_index] = hand_over.prompt_logprobs
        events: list[bytes] = []
        for output in hand_over.outputs:
            writer = self._writers[prompt_index][output.index]
            choice = writer.write(output, self._prompt_positions[prompt_index])
            if choice is not None:
                events.append(self._chunks.chunk(choice, self._usage_so_far(prompt_index, writer)))
        return b"".join(events)

    def _usage_so_far(self, prompt_index: int, writer: ChoiceWriter) -> dict[str, object] | None:
        if not self._is_continuous:
            return None
        return usage(len(self._job.rendered[prompt_index].token_ids), writer.num_generated)

    def closing(self) -> bytes:
        """Give the usage chunk, when asked for."""
        if not self._with_usage:
            return b""
        num_generated = sum(writer.num_generated for writers in self._writers for writer in writers)
        counts = detailed_usage(
            self._job.generation.state, self._job.num_prompt_tokens, num_generated, cached=sum(self._cached)
        )
        return self._chunks.usage_chunk(counts, {"system_fingerprint": FINGERPRINT})


async def merge(streams: list[RequestStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Give (prompt index, hand-over) of all streams as they come.

    One hand-over waits at a time, so a slow reader leaves the rest in the collectors, which merge.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: RequestStream) -> None:
        async for output in stream:
            await queue.put((index, output))

    async def pump_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, stream in enumerate(streams):
                    group.create_task(pump(index, stream))
        finally:
            await queue.put(None)

    pumps = asyncio.create_task(pump_all())
    try:
        while (item := await queue.get()) is not None:
            yield item
        await pumps
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        pumps.cancel()
