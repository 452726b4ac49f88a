"""What chat and completions share between a checked request and the engine client: limits, usage, finish words."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi import Request

from serve.engine.async_llm import RequestStream
from serve.engine.input_processor import RequestOptions
from serve.engine.outputs import CompletionOutput, RequestOutput
from serve.entrypoints.app_state import AppState, Phase, Services, check_request_id
from serve.entrypoints.asgi import read_json
from serve.entrypoints.gate import exchange_of
from serve.entrypoints.openai.protocol import GenerationRequest
from serve.errors import InvalidRequest, Overloaded, RequestFailed
from serve.log import log_once
from serve.renderers.renderer import TokenizeParams
from serve.sampling_params import SamplingParams
from serve.wire.frontend import FinishReason

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Generation:
    """One HTTP request on its way: who asks, for which model, under which id. arrival_time is wall-clock seconds."""

    state: AppState
    services: Services
    model: str
    response_id: str
    created: int
    arrival_time: float

    def options(self, request: GenerationRequest) -> RequestOptions:
        """Give what goes beside the sampling parameters."""
        policy = self.state.config.engine.scheduler.scheduling_policy
        if request.priority != 0 and policy != "priority":
            log_once(log, logging.DEBUG, "request priority ignored: the scheduling policy is fcfs")
        return RequestOptions(priority=request.priority, cache_salt=request.cache_salt, arrival_time=self.arrival_time)

    async def submit(
        self, token_ids: list[int], params: SamplingParams, request: GenerationRequest, *, request_id: str
    ) -> RequestStream:
        """Register and send one prompt; whatever is wrong with it is raised here."""
        if self.state.config.server.enable_log_requests:
            log.info("request: id=%s prompt_tokens=%d params=%s", request_id, len(token_ids), params)
        return await self.services.llm.add_request(token_ids, params, request_id, options=self.options(request))

    def finish_word(self, output: CompletionOutput) -> str | None:
        """Give the API's finish_reason. Raises for answers that did not really finish."""
        reason = output.finish_reason
        if reason is None:
            return None
        if reason is FinishReason.ERROR:
            raise RequestFailed("the request failed inside the engine", cause="model_error")
        if reason is FinishReason.ABORT and self.state.phase is not Phase.READY:
            raise shutting_down()
        return str(reason)


def shutting_down() -> Overloaded:
    """Give the error of a request that the end of the server cut off."""
    return Overloaded("shutting_down: the server stopped before the answer was complete", code="shutting_down")


def start_generation(
    state: AppState, request: Request, body: GenerationRequest, *, prefix: str, arrival_time: float
) -> Generation:
    """Check the model's name and give the request its id."""
    services = state.admitting()
    model = state.check_model(body.model)
    base = exchange_of(request.scope).request_id if body.request_id is None else check_request_id(body.request_id)
    return Generation(state, services, model, prefix + base, int(time.time()), arrival_time)


async def read_body(state: AppState, request: Request) -> dict[str, object]:
    """Read the JSON object that a client sent."""
    return await read_json(request.scope, request.receive, max_bytes=state.config.server.max_body_bytes)


def tokenize_params(request: GenerationRequest, requested: int | None, *, special: bool, total: int) -> TokenizeParams:
    """Give the rules for the prompt's length; requested is the output limit as sent, total the context length."""
    if requested is not None and requested > total:
        raise InvalidRequest(
            f"max_tokens={requested} exceeds max_model_len={total}; lower it to at most {total}", param="max_tokens"
        )
    return TokenizeParams(
        add_special_tokens=special,
        max_total_tokens=total,
        max_output_tokens=requested or 0,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        truncation_side=request.truncation_side,
    )


def resolve_max_tokens(requested: int | None, defaults: Mapping[str, float], room: int) -> int:
    """Give the output limit: what was asked for, else the model's default, and never more than the context holds.

    room may be below 1: the engine client refuses such prompts with the full story.
    """
    wanted = requested if requested is not None else int(defaults.get("max_new_tokens", room))
    return wanted if wanted < 1 else max(1, min(wanted, room))


def check_max_tokens(requested: int | None, name: str) -> None:
    """Refuse an output limit below 1."""
    if requested is not None and requested < 1:
        raise InvalidRequest(f"{name} must be at least 1, got {requested}", param=name)


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    """Give the plain counts."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def detailed_usage(state: AppState, prompt_tokens: int, completion_tokens: int, *, cached: int) -> dict[str, object]:
    """Give the counts with the tokens that came from the prefix cache, when the operator shows them."""
    counts = usage(prompt_tokens, completion_tokens)
    if state.config.server.enable_prompt_tokens_details:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return counts


async def final_output(stream: RequestStream) -> RequestOutput:
    """Give the only hand-over of a request that is not streamed."""
    async for output in stream:
        if output.finished:
            return output
    raise RequestFailed("the request ended without an answer", cause="model_error")
