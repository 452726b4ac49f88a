"""What chat and completions share between a checked request and the engine client: limits, usage, finish words."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from fastapi import Request

from serve import __version__
from serve.engine.beam_search import CANDIDATES_PER_BEAM, BeamStream
from serve.engine.input_processor import RequestOptions
from serve.engine.outputs import CompletionOutput, OutputStream, RequestOutput
from serve.engine.prompt_embeds import EmbeddedPrompt
from serve.entrypoints.app_state import AppState, Phase, Services, check_request_id
from serve.entrypoints.asgi import read_json
from serve.entrypoints.gate import exchange_of
from serve.entrypoints.openai.protocol import GenerationRequest
from serve.entrypoints.tasks import require_generation
from serve.errors import InvalidRequest, Overloaded, RequestFailed
from serve.log import log_once
from serve.renderers.renderer import TokenizeParams
from serve.sampling_params import SamplingParams
from serve.wire.frontend import FinishReason

log = logging.getLogger(__name__)

FINGERPRINT: Final = f"serve-{__version__}"
# Words of the tool_call_parser_invocations metric, by the prefix of response ids.
REQUEST_TYPES: Final = {"chatcmpl-": "chat_completions", "resp_": "responses"}


@dataclass(slots=True)
class Generation:
    """One HTTP request on its way: who asks, for which model, under which id. arrival_time is wall-clock seconds."""

    state: AppState
    services: Services
    model: str
    response_id: str
    created: int
    arrival_time: float
    request_type: str = "other"

    def options(self, request: GenerationRequest) -> RequestOptions:
        """Give what goes beside the sampling parameters."""
        policy = self.state.config.engine.scheduler.scheduling_policy
        if request.priority != 0 and policy != "priority":
            log_once(log, logging.DEBUG, "request priority ignored: the scheduling policy is fcfs")
        return RequestOptions(priority=request.priority, cache_salt=request.cache_salt, arrival_time=self.arrival_time)

    async def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request: GenerationRequest,
        *,
        request_id: str,
        prompt_embeds: EmbeddedPrompt | None = None,
    ) -> OutputStream:
        """Register and send one prompt; whatever is wrong with it is raised here, or by a beam search's first step.

        With prompt_embeds the ids are all 0.
        """
        if self.state.config.server.enable_log_requests:
            log.info("request: id=%s prompt_tokens=%d params=%s", request_id, len(token_ids), params)
        options = self.options(request)
        if request.use_beam_search:
            self._check_beams(request.n)
            return BeamStream(
                self.services.llm,
                self.services.tokenizer,
                token_ids,
                params,
                request_id=request_id,
                options=options,
                length_penalty=request.length_penalty,
            )
        if prompt_embeds is not None:
            options.prompt_embeds = prompt_embeds.rows
        return await self.services.llm.add_request(token_ids, params, request_id, options=options)

    def _check_beams(self, n: int) -> None:
        """Refuse more beams than the logprobs of one step can widen."""
        needed, limit = CANDIDATES_PER_BEAM * n, self.state.config.engine.model.max_logprobs
        if limit != -1 and needed > limit:
            raise InvalidRequest(
                f"use_beam_search with n={n} needs {needed} logprobs a token, the limit is {limit}; lower n or start "
                "the server with a larger --max-logprobs",
                param="n",
            )

    def count_tool_parser(self, *, is_streamed: bool, has_calls: bool) -> None:
        """Count an answer that was searched for tool calls."""
        mode = "streaming" if is_streamed else "non_streaming"
        key = (mode, "tool_call" if has_calls else "no_tool_call", self.request_type)
        counts = self.state.http.tool_parsers
        counts[key] = counts.get(key, 0) + 1

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
    """Check that the model generates, and its name, and give the request its id."""
    require_generation(state.admitting().llm)
    generation = admit(state, request, body, prefix=prefix, arrival_time=arrival_time)
    generation.request_type = REQUEST_TYPES.get(prefix, "other")
    return generation


class NamedBody(Protocol):
    """What every request body says: for which model it is, and under which id the client wants to find it."""

    model: str
    request_id: str | None


def admit(state: AppState, request: Request, body: NamedBody, *, prefix: str, arrival_time: float) -> Generation:
    """Check the model's name and give the request its id."""
    services = state.admitting()
    model = state.check_model(body.model)
    base = exchange_of(request.scope).request_id if body.request_id is None else check_request_id(body.request_id)
    return Generation(state, services, model, prefix + base, int(time.time()), arrival_time)


async def read_body(state: AppState, request: Request) -> dict[str, object]:
    """Read the JSON object that a client sent."""
    config = state.config
    return await read_json(
        request.scope,
        request.receive,
        max_bytes=config.server.max_body_bytes,
        max_depth=config.limits.max_json_depth,
    )


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


async def final_output(stream: OutputStream) -> RequestOutput:
    """Give the only hand-over of a request that is not streamed."""
    async for output in stream:
        if output.finished:
            return output
    raise RequestFailed("the request ended without an answer", cause="model_error")
