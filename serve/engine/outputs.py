"""What the engine client hands to the HTTP layer for one request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from serve.wire.frontend import FinishReason


@dataclass(slots=True)
class Logprob:
    """One candidate at one position. logprob is a natural log; rank 1 is the best; decoded is its text.

    token_bytes are the token's own bytes, also for part of a character.
    """

    logprob: float
    rank: int
    decoded: str
    token_bytes: bytes


# Position -> candidates by token id, the sampled (or actual prompt) token first, then best first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """Text and ids of one choice: all so far, or what is new, as SamplingParams.output_kind says.

    logprobs has one entry per id in token_ids when logprobs were asked for.
    stop_reason is the stop string or the secondary stop id that ended the choice.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """One hand-over. prompt_logprobs: None at position 0, then one dict per prompt token; given once.

    num_generated_tokens maps choice index -> output tokens so far. finished: no further hand-over follows. prompt is
    the text, where the prompt was rendered beside the engine (LLM); None for prompts given as ids. pooled is the
    result of a request with pooling parameters.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_generated_tokens: dict[int, int] = field(default_factory=dict)
    prompt: str | None = None
    pooled: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """The result of a request to a pooling model: float32 [size], or [num_tokens, size] for the token tasks."""

    request_id: str
    prompt_token_ids: list[int]
    pooled: np.ndarray
    num_cached_tokens: int = 0


class OutputStream(Protocol):
    """The hand-overs of one request, in order. aclose aborts what is not over and may be called again."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Give the stream itself."""

    async def __anext__(self) -> RequestOutput:
        """Wait for the next hand-over. Raises StopAsyncIteration after the last one."""

    async def aclose(self) -> None:
        """Give up the request unless it is over."""
