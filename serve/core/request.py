"""A request inside the engine core, and its status machine."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from serve.core.structured_output.constraint import Constraint
from serve.pooling_params import PoolingParams
from serve.sampling_params import RepetitionDetection, SamplingParams
from serve.wire.frontend import EngineCoreEvent, EngineCoreRequest, EventType, FinishReason, PrefillStats


class RequestStatus(enum.IntEnum):
    """Where a request is. Everything after PREEMPTED is final."""

    WAITING = 0
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_REPETITION = 8


_FINAL: Final = frozenset(status for status in RequestStatus if status > RequestStatus.PREEMPTED)

LEGAL_MOVES: Final[dict[RequestStatus, frozenset[RequestStatus]]] = {
    RequestStatus.WAITING: _FINAL | {RequestStatus.RUNNING},
    RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: _FINAL | {RequestStatus.WAITING},
    RequestStatus.RUNNING: _FINAL | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _FINAL | {RequestStatus.RUNNING},
    RequestStatus.FINISHED_STOPPED: frozenset(),
    RequestStatus.FINISHED_LENGTH_CAPPED: frozenset(),
    RequestStatus.FINISHED_ABORTED: frozenset(),
    RequestStatus.FINISHED_ERROR: frozenset(),
    RequestStatus.FINISHED_REPETITION: frozenset(),
}

FINISH_REASONS: Final[dict[RequestStatus, FinishReason]] = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


@dataclass(slots=True, eq=False)
class Request:
    """State of one request; owned by the scheduler.

    all_token_ids = prompt, then output. num_computed_tokens also counts tokens of steps still in flight.
    num_output_placeholders: tokens that steps in flight will sample, whose ids are not known yet.
    num_slots: tokens that its cache blocks have room for. num_committed_blocks: leading blocks already offered to the
    prefix cache. block_hashes covers the leading full
    blocks of all_token_ids, possibly fewer than there are. prompt_embeds [num_prompt_tokens, hidden_size] are the
    inputs of a prompt that was given as embeddings; its token ids are all 0. With pooling_params the request ends with
    its prompt and nothing is sampled. constraint restricts the output token by token; it is there when the request has
    left WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, and outlives preemption.
    """

    req_id: str
    sampling_params: SamplingParams
    all_token_ids: list[int]
    num_prompt_tokens: int
    arrival_time: float = 0.0
    priority: int = 0
    client_index: int = 0
    cache_salt: str | None = None
    prompt_embeds: np.ndarray | None = None
    pooling_params: PoolingParams | None = None
    constraint: Constraint | None = None
    status: RequestStatus = RequestStatus.WAITING
    stop_reason: int | None = None
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_slots: int = 0
    num_committed_blocks: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    events: list[EngineCoreEvent] = field(default_factory=list)
    prefill_stats: PrefillStats | None = None

    @classmethod
    def from_wire(cls, message: EngineCoreRequest) -> Request:
        """Build the state of a request that just arrived."""
        return cls(
            req_id=message.request_id,
            sampling_params=message.sampling_params,
            all_token_ids=list(message.prompt_token_ids),
            num_prompt_tokens=len(message.prompt_token_ids),
            arrival_time=message.arrival_time,
            priority=message.priority,
            client_index=message.client_index,
            cache_salt=message.cache_salt,
            prompt_embeds=message.prompt_embeds,
            pooling_params=message.pooling_params,
        )

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt plus output."""
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def is_final(self) -> bool:
        """True when the request has ended."""
        return self.status > RequestStatus.PREEMPTED

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason as sent to the front end, or None while unfinished."""
        return FINISH_REASONS.get(self.status)

    def move_to(self, status: RequestStatus) -> None:
        """Change the status along a legal move."""
        assert status in LEGAL_MOVES[self.status], f"{self.req_id}: {self.status.name} -> {status.name} is not legal"
        self.status = status

    def record_event(self, event_type: EventType) -> None:
        """Note a scheduler event; it rides on the next output."""
        self.events.append(EngineCoreEvent(event_type, time.monotonic()))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """Give the events since the last output, or None."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    def take_prefill_stats(self) -> PrefillStats | None:
        """Give the prefill statistics, once."""
        stats, self.prefill_stats = self.prefill_stats, None
        return stats


def find_stop(request: Request, max_model_len: int) -> RequestStatus | None:
    """Test whether the last token ends the request; sets stop_reason when a stop id did.

    An end id that arrives exactly at the length limit counts as a stop. min_tokens holds back end ids and the end of
    a loop, never the length limits.
    """
    params = request.sampling_params
    token_ids = request.all_token_ids
    num_output_tokens = len(token_ids) - request.num_prompt_tokens
    if num_output_tokens >= params.min_tokens:
        last = token_ids[-1]
        if last == params.eos_token_id:
            return RequestStatus.FINISHED_STOPPED
        if last in params.stop_token_ids:
            request.stop_reason = last
            return RequestStatus.FINISHED_STOPPED
    if num_output_tokens >= params.max_tokens or len(token_ids) >= max_model_len:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    loop = params.repetition_detection
    if loop is not None and num_output_tokens >= params.min_tokens and _ends_in_loop(request, loop):
        return RequestStatus.FINISHED_REPETITION
    return None


def _ends_in_loop(request: Request, loop: RepetitionDetection) -> bool:
    """Tell whether the output ends in min_count copies of one pattern."""
    token_ids = request.all_token_ids
    last = token_ids[-1]
    longest = min(loop.max_size, request.num_output_tokens // loop.min_count)
    for size in range(loop.min_size, longest + 1):
        if token_ids[-1 - size] != last:
            continue
        pattern = token_ids[-size:]
        starts = range(len(token_ids) - 2 * size, len(token_ids) - loop.min_count * size - 1, -size)
        if all(token_ids[start : start + size] == pattern for start in starts):
            return True
    return False
