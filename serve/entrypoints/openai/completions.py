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

from serve.engine.outputs import CompletionOutput, OutputStream, PositionLogprobs, RequestOutput
from serve.engine.prompt_embeds import EmbeddedPrompt, decode_all
from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import run_while_connected, wait_for_disconnect
from serve.entrypoints.openai.constraints import build_constraint, with_field
from serve.entrypoints.openai.generation import (
    FINGERPRINT,
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
from serve.entrypoints.openai.prompts import TextOrIds, holds_many, split_prompts
from serve.entrypoints.openai.protocol import COMPLETION_MAX_TOKENS, CompletionRequest, parse_request
from serve.entrypoints.openai.tools import NO_TOOLS
from serve.entrypoints.sse import ChunkWriter, start_stream
from serve.errors import InvalidRequest
from serve.renderers.renderer import RenderedPrompt
from serve.sampling_params import SamplingParams, StructuredOutputs

Prompt = TextOrIds | EmbeddedPrompt


class CompletionChunkChoice(msgspec.Struct, gc=False):
    """One choice of a chunk."""

    index: int
    text: str
    logprobs: object = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET


async def create_completion(state: AppState, request: Request) -> Response:
    """Answer POST /v1/completions; refusals come before a stream begins."""
    arrival_time = time.time()
    state.admitting()
    completion = parse_request(CompletionRequest, await read_body(state, request))
    generation = start_generation(state, request, completion, prefix="cmpl-", arrival_time=arrival_time)
    job = await plan_completion(generation, completion)
    if completion.stream:
        return await start_stream(stream_completion(job), request.receive)
    body = await run_while_connected(complete(job), wait_for_disconnect(request.receive))
    return Response(body, media_type="application/json")


async def plan_completion(generation: Generation, completion: CompletionRequest) -> CompletionJob:
    """Take the prompts apart and check what needs no rendering; embedded prompts come before the others."""
    config = generation.state.config
    _check_num_choices(completion, config.server.max_num_prompts)
    prompts: list[Prompt] = []
    if completion.prompt_embeds is not None:
        size = generation.services.llm.prompt_embeds_size
        prompts += await asyncio.to_thread(decode_all, completion.prompt_embeds, size)
    if completion.prompt is not None:
        prompts += split_prompts(completion.prompt, "prompt")
    constraint = build_constraint(completion, NO_TOOLS, config.limits)
    return CompletionJob(generation, completion, prompts, constraint)


def _check_num_choices(completion: CompletionRequest, limit: int) -> None:
    """Refuse too many choices before each prompt is looked at: there may be millions."""
    num_prompts = 0
    for prompts in (completion.prompt, completion.prompt_embeds):
        if prompts is not None:
            num_prompts += len(prompts) if holds_many(prompts) else 1
    if num_prompts * max(1, completion.n) > limit:
        raise InvalidRequest(
            f"{num_prompts} prompts with n={completion.n} make more than the {limit} choices of one request; "
            "send fewer at a time or raise --max-num-prompts",
            param="prompt",
        )


@dataclass(slots=True)
class CompletionJob:
    """A checked request and what its prompts became."""

    generation: Generation
    completion: CompletionRequest
    prompts: list[Prompt]
    constraint: StructuredOutputs | None = None
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

    async def submit(self) -> list[OutputStream]:
        """Render all prompts, then register and submit them in order; none stays behind when one is refused."""
        await self.render()
        streams: list[OutputStream] = []
        is_complete = False
        try:
            for index, prompt in enumerate(self.rendered):
                given = self.prompts[index]
                streams.append(
                    await self.generation.submit(
                        prompt.token_ids,
                        self.sampling_params(len(prompt.token_ids)),
                        self.completion,
                        request_id=f"{self.generation.response_id}-{index}",
                        prompt_embeds=given if isinstance(given, EmbeddedPrompt) else None,
                    )
                )
            is_complete = True
        finally:
            if not is_complete:
                await close_all(streams)
        return streams

    async def render(self) -> None:
        """Give each prompt its token ids; those of an embedded one are all 0."""
        completion, services = self.completion, self.generation.services
        if not self.scores_only:
            check_max_tokens(completion.max_tokens, "max_tokens")
        total = services.llm.max_model_len
        params = tokenize_params(completion, completion.max_tokens, special=completion.add_special_tokens, total=total)
        for prompt in self.prompts:
            if isinstance(prompt, str):
                self.rendered.append(await services.renderer.render_text(prompt, params))
            elif isinstance(prompt, EmbeddedPrompt):
                self.rendered.append(services.renderer.check_token_ids([0] * len(prompt), params))
            else:
                self.rendered.append(services.renderer.check_token_ids(prompt, params))
        if completion.echo:
            self.echo_texts = [await self._echo_text(prompt) for prompt in self.rendered]

    async def _echo_text(self, prompt: RenderedPrompt) -> str:
        if prompt.text is not None:
            return prompt.text
        skips = self.completion.skip_special_tokens
        return await self.generation.services.renderer.decode(prompt.token_ids, skip_special_tokens=skips)

    def sampling_params(self, prompt_len: int) -> SamplingParams:
        """Give the parameters of a prompt of that many tokens."""
        completion, llm = self.completion, self.generation.services.llm
        requested = completion.max_tokens if completion.max_tokens is not None else COMPLETION_MAX_TOKENS
        prompt_count = completion.prompt_logprobs
        if completion.echo and completion.logprobs is not None:
            prompt_count = max(prompt_count or 0, completion.logprobs)
        params = completion.sampling_params(
            llm.default_sampling,
            max_tokens=1 if self.scores_only else resolve_max_tokens(requested, {}, llm.max_model_len - prompt_len),
            logprobs=completion.logprobs,
            prompt_logprobs=prompt_count,
        )
        if self.constraint is None:
            return params
        return msgspec.structs.replace(params, structured_outputs=self.constraint)

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
        if completion.return_prompt_text and is_first:
            choice.prompt_text = job.rendered[self._prompt_index].text
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


async def close_all(streams: list[OutputStream]) -> None:
    """Abort what is still running."""
    for stream in streams:
        await stream.aclose()


async def complete(job: CompletionJob) -> bytes:
    """Give the body of a plain answer."""
    streams = await job.submit()
    try:
        results = [await final_output(stream) for stream in streams]
    except InvalidRequest as error:
        raise with_field(error, job.completion) from None
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
    except InvalidRequest as error:
        raise with_field(error, job.completion) from None
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


async def merge(streams: list[OutputStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """Give (prompt index, hand-over) of all streams as they come.

    One hand-over waits at a time, so a slow reader leaves the rest in the collectors, which merge.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, RequestOutput] | None] = asyncio.Queue(maxsize=1)

    async def pump(index: int, stream: OutputStream) -> None:
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
