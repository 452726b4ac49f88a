"""Steps of one made-up request, for the worker's own use at start: to warm up and to measure."""

from __future__ import annotations

from serve.wire.step import CachedRequestData, NewRequestData, SchedulerOutput


def first_step(request: NewRequestData, num_tokens: int) -> SchedulerOutput:
    """Give the step that adds a request and computes some of its tokens."""
    return _step(request.req_id, [request], CachedRequestData(), num_tokens)


def next_step(req_id: str, num_computed_tokens: int) -> SchedulerOutput:
    """Give the step that computes one more token of a request, in a block that it has."""
    return _step(req_id, [], CachedRequestData([req_id], [[]], [num_computed_tokens]), 1)


def last_step(req_id: str) -> SchedulerOutput:
    """Give the step that does nothing but forget a request."""
    return SchedulerOutput(0, [], CachedRequestData(), {}, 0, finished_req_ids=[req_id])


def _step(req_id: str, new: list[NewRequestData], cached: CachedRequestData, num_tokens: int) -> SchedulerOutput:
    return SchedulerOutput(
        step_index=0,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={req_id: num_tokens},
        total_num_scheduled_tokens=num_tokens,
    )
