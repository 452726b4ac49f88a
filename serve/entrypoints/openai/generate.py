"""Phases 1 and 11 of 11 without text: token ids in, token ids out. POST /inference/v1/generate, plain and streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping

import msgspec
from fastapi import Request
from fastapi.responses import Response

from serve.engine.outputs import CompletionOutput
from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import JsonObject, run_while_connected, wait_for_disconnect
from serve.entrypoints.openai.completions import CompletionJob, close_all, plan_completion
from serve.entrypoints.openai.generation import detailed_usage, final_output, read_body, start_generation
from serve.entrypoints.openai.logprobs import chat_logprobs, prompt_logprobs
from serve.entrypoints.openai.protocol import CompletionRequest, GenerateRequest, parse_request
from serve.entrypoints.sse import start_stream
from serve.errors import InvalidRequest

# Part of the body beside sampling_params; whatever else a completion request knows is a sampling parameter here.
_BESIDE = ("model", "stream", "stream_options", "cache_salt", "priority", "request_id")


async def create_generation(state: AppState, request: Request) -> Response:
    """Answer POST /inference/v1/generate; refusals come before a stream begins."""
    arrival_time = time.time()
    state.admitting()
    sent = parse_request(GenerateRequest, await read_body(state, request))
    completion = _as_completion(sent)
    generation = start_generation(state, request, completion, prefix="", arrival_time=arrival_time)
    job = await plan_completion(generation, completion)
    if completion.stream:
        return await start_stream(_stream(job), request.receive)
    body = await run_while_connected(_complete(job), wait_for_disconnect(request.receive))
    return Response(body, media_type="application/json")


def _as_completion(sent: GenerateRequest) -> CompletionRequest:
    """Give the completion request that runs these ids; its complaints are about sampling_params."""
    given = sent.model_dump(include=set(_BESIDE), exclude_unset=True)
    _check_names(sent.sampling_params)
    try:
        return parse_request(CompletionRequest, {**sent.sampling_params, **given, "prompt": sent.token_ids})
    except InvalidRequest as error:
        name = error.param or ""
        is_parameter = name.split(".")[0] in sent.sampling_params
        raise InvalidRequest(str(error), param=f"sampling_params.{name}" if is_parameter else error.param) from None


def _check_names(sampling_params: Mapping[str, object]) -> None:
    for name in ("prompt", "prompt_embeds", "echo", "suffix", *_BESIDE):
        if name in sampling_params:
            raise InvalidRequest(
                f"sampling_params may not hold {name}: it is no sampling parameter", param=f"sampling_params.{name}"
            )


async def _complete(job: CompletionJob) -> bytes:
    streams = await job.submit()
    try:
        result = await final_output(streams[0])
    finally:
        await close_all(streams)
    generation = job.generation
    outputs = sorted(result.outputs, key=lambda output: output.index)
    num_generated = sum(len(output.token_ids) for output in outputs)
    shown = result.prompt_logprobs if job.completion.prompt_logprobs is not None else None
    return msgspec.json.encode(
        {
            "request_id": generation.response_id,
            "choices": [_choice(job, output) for output in outputs],
            "prompt_logprobs": None if shown is None else prompt_logprobs(shown),
            "kv_transfer_params": None,
            "usage": detailed_usage(
                generation.state, job.num_prompt_tokens, num_generated, cached=result.num_cached_tokens
            ),
        }
    )


async def _stream(job: CompletionJob) -> AsyncGenerator[bytes, None]:
    """Give one event per hand-over; closing the generator aborts the request."""
    streams = await job.submit()
    try:
        async for hand_over in streams[0]:
            choices = [_choice(job, output) for output in hand_over.outputs]
            body = {"request_id": job.generation.response_id, "choices": choices}
            yield b"data: " + msgspec.json.encode(body) + b"\n\n"
    finally:
        await close_all(streams)


def _choice(job: CompletionJob, output: CompletionOutput) -> JsonObject:
    completion, logprobs = job.completion, None
    if completion.logprobs is not None and output.logprobs is not None:
        logprobs = chat_logprobs(
            output.logprobs,
            output.token_ids,
            top=completion.logprobs,
            as_ids=bool(completion.return_tokens_as_token_ids),
            chosen_ids=completion.logprob_token_ids or None,
        )
    return {
        "index": output.index,
        "logprobs": logprobs,
        "finish_reason": job.generation.finish_word(output),
        "stop_reason": output.stop_reason,
        "token_ids": output.token_ids,
    }
