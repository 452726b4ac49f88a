"""The status machine and the stop test."""

from __future__ import annotations

import itertools
import time

import pytest

from serve.core.request import LEGAL_MOVES, Request, RequestStatus, find_stop
from serve.sampling_params import RepetitionDetection, SamplingParams
from serve.wire.frontend import EngineCoreRequest, EventType, FinishReason
from tests.unit.core.scripted import make_request

EOS, STOP = 2, 5


def grown(output: list[int], **params: object) -> Request:
    """Give a request of 4 prompt tokens with some output."""
    values = {"max_tokens": 10, "eos_token_id": EOS, "stop_token_ids": (STOP,), **params}
    request = make_request("r", [9, 9, 9, 9], params=SamplingParams(**values))  # type: ignore[arg-type]
    request.all_token_ids.extend(output)
    return request


def test_only_the_moves_of_the_table_are_possible() -> None:
    for start, end in itertools.product(RequestStatus, RequestStatus):
        request = make_request("r", 3)
        request.status = start
        if end in LEGAL_MOVES[start]:
            request.move_to(end)
            assert request.status is end
        else:
            with pytest.raises(AssertionError, match="not legal"):
                request.move_to(end)


def test_a_final_status_has_no_way_out_and_a_reason() -> None:
    final = [status for status in RequestStatus if not LEGAL_MOVES[status]]
    reasons = []
    for status in final:
        request = make_request("r", 3)
        request.status = status
        reasons.append(request.finish_reason)
    assert reasons == list(FinishReason)


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.PREEMPTED])
def test_an_unfinished_request_has_no_reason(status: RequestStatus) -> None:
    request = make_request("r", 3)
    request.status = status
    assert request.finish_reason is None


def test_a_request_does_not_share_the_list_of_its_message() -> None:
    message = EngineCoreRequest("r", [1, 2], SamplingParams(), 0.0, cache_salt="s", priority=3, client_index=1)
    request = Request.from_wire(message)
    request.all_token_ids.append(3)
    assert message.prompt_token_ids == [1, 2]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (2, 1)
    assert (request.cache_salt, request.priority, request.client_index) == ("s", 3, 1)


def test_events_and_statistics_are_taken_once() -> None:
    request = make_request("r", 3)
    request.record_event(EventType.QUEUED)
    assert [event.type for event in request.take_events() or []] == [EventType.QUEUED]
    assert request.take_events() is None
    assert request.take_prefill_stats() is None


@pytest.mark.parametrize(
    ("output", "params", "status", "stop_reason"),
    [
        ([7], {}, None, None),
        ([7, EOS], {}, RequestStatus.FINISHED_STOPPED, None),
        ([7, STOP], {}, RequestStatus.FINISHED_STOPPED, STOP),
        ([EOS, 7], {}, None, None),
        ([EOS], {"eos_token_id": None}, None, None),
        ([EOS], {"min_tokens": 2}, None, None),
        ([7, EOS], {"min_tokens": 2}, RequestStatus.FINISHED_STOPPED, None),
        ([7, 7], {"max_tokens": 2}, RequestStatus.FINISHED_LENGTH_CAPPED, None),
        ([7, EOS], {"max_tokens": 2}, RequestStatus.FINISHED_STOPPED, None),
        ([7, STOP], {"max_tokens": 2}, RequestStatus.FINISHED_STOPPED, STOP),
        ([EOS], {"eos_token_id": EOS, "stop_token_ids": (EOS,)}, RequestStatus.FINISHED_STOPPED, None),
        ([7] * 8, {}, RequestStatus.FINISHED_LENGTH_CAPPED, None),
        ([7] * 8, {"min_tokens": 10}, RequestStatus.FINISHED_LENGTH_CAPPED, None),
    ],
)
def test_the_stop_test_looks_at_end_ids_then_lengths(
    output: list[int], params: dict[str, object], status: RequestStatus | None, stop_reason: int | None
) -> None:
    request = grown(output, **params)
    assert find_stop(request, max_model_len=12) is status
    assert request.stop_reason == stop_reason


@pytest.mark.parametrize(
    ("output", "loop", "ends"),
    [
        ([7, 7, 7], (1, 1, 3), True),
        ([8, 7, 7], (1, 1, 3), False),
        ([7, 7], (1, 1, 3), False),
        ([1, 2, 1, 2], (1, 4, 2), True),
        ([1, 2, 1, 2], (3, 4, 2), False),
        ([5, 1, 2, 3, 1, 2, 3], (2, 3, 2), True),
        ([1, 2, 3, 1, 2, 3, 4], (2, 3, 2), False),
        ([1, 2, 9, 2, 1, 2], (2, 2, 2), False),
        # The prompt of four nines is no part of the loop.
        ([9, 9], (1, 1, 3), False),
    ],
)
def test_a_loop_of_the_output_ends_the_request(output: list[int], loop: tuple[int, int, int], ends: bool) -> None:
    request = grown(output, repetition_detection=RepetitionDetection(*loop), eos_token_id=None, stop_token_ids=())
    assert find_stop(request, max_model_len=100) is (RequestStatus.FINISHED_REPETITION if ends else None)


def test_min_tokens_hold_back_the_end_of_a_loop() -> None:
    loop = RepetitionDetection(1, 1, 2)
    assert find_stop(grown([7, 7], repetition_detection=loop, min_tokens=3), max_model_len=100) is None
    assert find_stop(grown([7, 7, 7], repetition_detection=loop, min_tokens=3), max_model_len=100) is not None


def test_a_loop_is_found_within_microseconds_a_token() -> None:
    """The costliest settings on an output that nearly loops: no pattern is compared further than it agrees."""
    request = grown(([7] * 500 + [8]) * 20, repetition_detection=RepetitionDetection(1, 1024, 64), max_tokens=20_000)
    started = time.process_time()
    assert find_stop(request, max_model_len=100_000) is None
    assert time.process_time() - started < 0.3
