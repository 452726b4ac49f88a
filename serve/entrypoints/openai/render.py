"""Phase 1 of 11 alone: what a chat or completion request would run, without running it.

POST /v1/chat/completions/render and /v1/completions/render. The answer is a body for POST /inference/v1/generate.
"""

from __future__ import annotations

import time

import msgspec
from fastapi import Request

from serve.entrypoints.app_state import AppState
from serve.entrypoints.asgi import JsonObject
from serve.entrypoints.openai.completions import plan_completion
from serve.entrypoints.openai.generation import Generation, read_body, start_generation
from serve.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    parse_request,
)
from serve.entrypoints.openai.turn import plan_turn
from serve.errors import InvalidRequest
from serve.renderers.renderer import RenderedPrompt
from serve.sampling_params import SamplingParams, StructuredOutputs, normalize


async def render_chat(state: AppState, request: Request) -> JsonObject:
    """Give the prompt and the sampling parameters of a chat request."""
    arrival_time = time.time()
    chat = parse_request(ChatCompletionRequest, await read_body(state, request))
    generation = start_generation(state, request, chat, prefix="chatcmpl-", arrival_time=arrival_time)
    plan = await plan_turn(generation, chat)
    return _describe(generation, chat, plan.prompt, plan.params)


async def render_completion(state: AppState, request: Request) -> list[JsonObject]:
    """Give the same for each prompt of a completion request."""
    arrival_time = time.time()
    completion = parse_request(CompletionRequest, await read_body(state, request))
    if completion.prompt_embeds is not None:
        raise InvalidRequest("prompt_embeds cannot be rendered: they have no token ids", param="prompt_embeds")
    generation = start_generation(state, request, completion, prefix="cmpl-", arrival_time=arrival_time)
    job = await plan_completion(generation, completion)
    await job.render()
    return [
        _describe(generation, completion, prompt, job.sampling_params(len(prompt.token_ids))) for prompt in job.rendered
    ]


def _describe(
    generation: Generation, request: GenerationRequest, prompt: RenderedPrompt, params: SamplingParams
) -> JsonObject:
    return {
        "request_id": generation.response_id,
        "model": generation.model,
        "token_ids": prompt.token_ids,
        "prompt": prompt.text,
        "sampling_params": sampling_fields(normalize(params, generation.state.config.limits)),
        "stream": request.stream,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
    }


def sampling_fields(params: SamplingParams) -> JsonObject:
    """Give sampling parameters under the names that requests use; what is off is null."""
    loop, bias = params.repetition_detection, params.logit_bias
    return {
        "n": params.n,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "include_stop_str_in_output": params.include_stop_str_in_output,
        "ignore_eos": params.ignore_eos,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        "logit_bias": None if bias is None else {str(token_id): value for token_id, value in bias.items()},
        "allowed_token_ids": None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        "bad_words": list(params.bad_words),
        "skip_special_tokens": params.skip_special_tokens,
        "spaces_between_special_tokens": params.spaces_between_special_tokens,
        "logprob_token_ids": None if params.logprob_token_ids is None else list(params.logprob_token_ids),
        "repetition_detection": None
        if loop is None
        else {"min_pattern_size": loop.min_size, "max_pattern_size": loop.max_size, "min_count": loop.min_count},
        "structured_outputs": _structured_outputs(params.structured_outputs),
        "vllm_xargs": params.extra_args,
    }


def _structured_outputs(constraint: StructuredOutputs | None) -> JsonObject | None:
    if constraint is None:
        return None
    fields: JsonObject = {
        "whitespace_pattern": constraint.whitespace_pattern,
        "disable_any_whitespace": constraint.disable_any_whitespace,
        "disable_additional_properties": constraint.disable_additional_properties,
    }
    match constraint.kind:
        case "json_object":
            fields["json_object"] = True
        case "json_schema":
            fields["json"] = msgspec.json.decode(constraint.spec)
        case "choice" | "structural_tag":
            fields[constraint.kind] = msgspec.json.decode(constraint.spec)
        case "regex" | "grammar":
            fields[constraint.kind] = constraint.spec
    return fields
