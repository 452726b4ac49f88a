"""Phases 5 and 9 of 11: choose the tokens of a step, and fold what the step produced back into the requests.

There is no prefill or decode phase: each request has known tokens (plus placeholders for tokens that steps in flight
will sample) and num_computed_tokens that chases them. Counts advance when a step is scheduled, so the next step can
be scheduled before the results of this one arrive; with no step in flight there are no placeholders, and overlapped
and plain running are the same code.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import numpy as np

from serve.config import SchedulerConfig
from serve.core.block_pool import KVCacheBlock
from serve.core.kv_cache_manager import KVCacheManager
from serve.core.request import Request, RequestStatus, find_stop
from serve.core.request_queue import make_queue
from serve.core.shared_prefix import ComingBlocks
from serve.core.step_budget import Pace, StepBudget, step_tokens
from serve.core.structured_output.constraint import Constraint
from serve.wire.frontend import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EventType,
    LogprobsLists,
    PrefillStats,
    SchedulerStats,
)
from serve.wire.step import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput, StepCost

# Outputs of one step by client_index.
ClientOutputs = dict[int, EngineCoreOutputs]

_MAX_RESERVE_SHIFT: Final = 16
# Requests passed over in a step because their prefix is on its way; each costs a look into the prefix cache.
_MAX_DEFERRED: Final = 32
_NO_BLOCKS: Final[list[KVCacheBlock]] = []


class PauseState(enum.Enum):
    """What a pause stops: nothing, new admissions, or everything."""

    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()
    PAUSED_ALL = enum.auto()


@dataclass(slots=True)
class _StepPlan:
    """A step while it is put together. new_block_ids runs parallel to cached."""

    budget: StepBudget
    new: list[Request] = field(default_factory=list)
    cached: list[Request] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    num_scheduled: dict[str, int] = field(default_factory=dict)
    has_preempted: bool = False
    structured_req_ids: list[str] = field(default_factory=list)
    has_pending_structured_tokens: bool = False


@dataclass(slots=True)
class _Counters:
    """Increments since the last statistics message."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0


class Scheduler:
    """Requests of one engine and the plan of each step. Used by the busy-loop thread only."""

    def __init__(
        self, config: SchedulerConfig, kv: KVCacheManager, *, max_model_len: int, cost: StepCost | None = None
    ) -> None:
        """cost, if given, paces prompts beside requests that decode (see Pace)."""
        budget, chunk = step_tokens(config, cost)
        seqs = config.max_num_seqs
        assert seqs is not None, "max_num_seqs must be resolved"
        self.kv = kv
        self.max_model_len = max_model_len
        self.pause_state = PauseState.UNPAUSED
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = make_queue(config.scheduling_policy)
        # Requests whose grammar is not compiled yet: they hold up nobody.
        self.skipped_waiting: dict[str, Request] = {}
        self._config = config
        self._max_num_batched_tokens = budget
        self._long_prefill_token_threshold = chunk
        self._max_num_seqs = seqs
        self._cost = cost
        self._has_priorities = config.scheduling_policy == "priority"
        self._finished_req_ids: list[str] = []
        self._preempted_req_ids: list[str] = []
        self._step_index = 0
        # Steps whose results have not come back: step index -> its requests, and whether it samples a token for each.
        self._in_flight: dict[int, list[tuple[Request, bool]]] = {}
        self._counters = _Counters()

    def add_request(self, request: Request) -> None:
        """Queue a request that arrived. Raises ValueError when the id is in use."""
        if request.req_id in self.requests:
            raise ValueError(f"request id {request.req_id} is already in use")
        self.requests[request.req_id] = request
        request.record_event(EventType.QUEUED)
        if request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self.skipped_waiting[request.req_id] = request
        else:
            self.waiting.add(request)

    def promote(self, request: Request) -> None:
        """Let a request run whose grammar is compiled; one that has ended is left alone."""
        if self.skipped_waiting.pop(request.req_id, None) is not None:
            request.move_to(RequestStatus.WAITING)
            self.waiting.promote(request)

    def fail_waiting(self, request: Request, error: str) -> ClientOutputs:
        """End a request that cannot run and give the output that says why; nothing for one that has ended."""
        outputs: ClientOutputs = {}
        if request.req_id in self.skipped_waiting:
            self._finish(request, RequestStatus.FINISHED_ERROR)
            output = _end_output(request)
            output.error = error
            _append(outputs, request.client_index, output)
        return outputs

    def finish_requests(self, req_ids: Iterable[str], status: RequestStatus) -> list[Request]:
        """End requests from outside (abort, shutdown); unknown and finished ids have no effect. Gives the ended."""
        ended = [self.requests[req_id] for req_id in dict.fromkeys(req_ids) if req_id in self.requests]
        for request in ended:
            self._finish(request, status)
        self._drop_finished_from_running(bool(ended))
        return ended

    def abort_all(self) -> ClientOutputs:
        """End every request as aborted and give the outputs that tell their clients."""
        outputs: ClientOutputs = {}
        for request in self.finish_requests(list(self.requests), RequestStatus.FINISHED_ABORTED):
            _append(outputs, request.client_index, _end_output(request))
        return outputs

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop all cached prefixes; False while requests hold blocks and may not be preempted."""
        if reset_running_requests:
            for request in reversed(self.running):
                self._preempt(request)
            self.running.clear()
        return self.kv.reset_prefix_cache()

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.requests)

    @property
    def num_in_flight_steps(self) -> int:
        """Steps whose results have not come back."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """True when a step could do something: run tokens, or tell the worker who is gone."""
        if self._finished_req_ids or self._preempted_req_ids:
            return True
        if self.pause_state is PauseState.UNPAUSED:
            return bool(self.requests)
        return self.pause_state is PauseState.PAUSED_NEW and bool(self.running)

    def in_flight_req_ids(self) -> dict[int, list[str]]:
        """Give the requests of each step in flight, for reports of a failure."""
        return {step: [request.req_id for request, _ in entries] for step, entries in self._in_flight.items()}

    def schedule(self) -> SchedulerOutput:
        """Plan the next step: first running requests in order, then, if none was preempted, waiting ones."""
        num_tokens = 0 if self.pause_state is PauseState.PAUSED_ALL else self._max_num_batched_tokens
        budget = StepBudget(num_tokens, long_prefill_token_threshold=self._long_prefill_token_threshold)
        plan = _StepPlan(budget)
        self._schedule_running(plan)
        if not plan.has_preempted and self.pause_state is PauseState.UNPAUSED:
            self._schedule_waiting(plan)
        return self._build_output(plan)

    def cancel_step(self, step: SchedulerOutput) -> None:
        """Forget a step that turned out empty and is not run."""
        assert step.total_num_scheduled_tokens == 0, f"step {step.step_index} has tokens"
        del self._in_flight[step.step_index]

    def _schedule_running(self, plan: _StepPlan) -> None:
        budget, running, kv = plan.budget, self.running, self.kv
        index = 0
        while index < len(running) and budget.num_tokens > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_wanted = len(request.all_token_ids) + request.num_output_placeholders - num_computed
            # The last token that fits the context is never computed, but by a prompt that is all there is to compute.
            longest = self.max_model_len - (request.pooling_params is None)
            num_new = min(num_wanted, longest - num_computed)
            if num_new > 1:
                self._set_pace(plan)
                num_new = budget.cap(num_new, num_computed)
            if num_new <= 0 or (request.num_output_placeholders and _is_sure_to_finish(request)):
                index += 1
                continue
            # Most requests of most steps want one token, and have a slot for it.
            has_slot = num_new == 1 and num_computed < request.num_slots
            new_blocks = _NO_BLOCKS if has_slot else kv.allocate_slots(request, num_new)
            while new_blocks is None and request.status is RequestStatus.RUNNING:
                victim_index = self._choose_victim()
                index -= victim_index < index
                self._take_out(running.pop(victim_index), plan)
                if request.status is RequestStatus.RUNNING:
                    new_blocks = kv.allocate_slots(request, num_new)
            if new_blocks is None:
                continue
            plan.cached.append(request)
            plan.new_block_ids.append([block.block_id for block in new_blocks] if new_blocks else [])
            plan.num_scheduled[request.req_id] = num_new
            budget.take(num_new)
            if num_new > 1 and budget.pace is not None:
                budget.pace.take(num_new, num_computed)
            index += 1

    def _schedule_waiting(self, plan: _StepPlan) -> None:
        """Admit waiting requests in order, but for those whose next block another request is about to compute.

        A prefix that many wait for is computed once. Nobody waits longer than it would take to compute the prefix
        again, and those behind go first meanwhile.
        """
        if not self.waiting or plan.budget.num_tokens <= 0 or len(self.running) >= self._max_num_seqs:
            return
        self._set_pace(plan)
        coming = ComingBlocks(self.running, has_priorities=self._has_priorities)
        deferred: list[Request] = []
        self._admit_waiting(plan, coming, deferred)
        for request in reversed(deferred):
            self.waiting.prepend(request)

    def _admit_waiting(self, plan: _StepPlan, coming: ComingBlocks, deferred: list[Request]) -> None:
        """Admit while there is room."""
        budget, waiting = plan.budget, self.waiting
        block_size = self.kv.block_size
        while waiting and budget.num_tokens > 0 and len(self.running) < self._max_num_seqs:
            request = waiting.peek()
            if request.num_output_placeholders > 0:
                # Preempted with a token in flight: its recompute starts when that token is known.
                return
            hit_blocks = self.kv.get_computed_blocks(request)
            if self.kv.looks_up(request) and coming.are_worth_waiting_for(request, hit_blocks):
                deferred.append(waiting.pop())
                if len(deferred) == _MAX_DEFERRED:
                    return
                continue
            num_hit_tokens = len(hit_blocks) * block_size
            num_left = request.num_tokens - num_hit_tokens
            if not self._config.enable_chunked_prefill and min(num_left, budget.max_chunk) > budget.num_tokens:
                return
            num_new = budget.cap(num_left, num_hit_tokens)
            if num_new <= 0:
                return
            new_blocks = self.kv.allocate_slots(
                request,
                num_new,
                hit_blocks=hit_blocks,
                full_sequence=self._config.scheduler_reserve_full_isl,
                num_reserved_blocks=self._reserve_for(request),
            )
            if new_blocks is None:
                return
            waiting.pop()
            self._admit(request, num_hit_tokens)
            plan.new.append(request)
            plan.num_scheduled[request.req_id] = num_new
            budget.take(num_new)
            if budget.pace is not None:
                budget.pace.take(num_new, num_hit_tokens)
            coming.add(request)

    def _set_pace(self, plan: _StepPlan) -> None:
        """Limit what prompts may add to this step by what its decodes cost; called only when there are prompts."""
        if self._cost is None or plan.budget.pace is not None:
            return
        decoding = [
            request.num_computed_tokens
            for request in self.running
            if len(request.all_token_ids) + request.num_output_placeholders - request.num_computed_tokens <= 1
        ]
        plan.budget.pace = Pace(self._cost, decoding)

    def _reserve_for(self, request: Request) -> int:
        """Give the blocks that admitting a request must leave free for the growth of the running ones.

        Zero when nothing runs, so the pool can always be used whole. Each preemption of the request doubles its
        reserve: a request that was thrown out comes back when there is room to grow, not to be thrown out again.
        """
        if not self.running:
            return 0
        reserve = self.kv.num_watermark_blocks
        if request.num_preemptions > 0:
            reserve += len(self.running) << min(request.num_preemptions - 1, _MAX_RESERVE_SHIFT)
        return reserve

    def _admit(self, request: Request, num_hit_tokens: int) -> None:
        if request.num_preemptions == 0:
            request.prefill_stats = PrefillStats(request.num_prompt_tokens, num_hit_tokens)
            if self.kv.looks_up(request):
                self._counters.prefix_cache_queries += request.num_tokens
                self._counters.prefix_cache_hits += num_hit_tokens
        request.num_computed_tokens = num_hit_tokens
        request.move_to(RequestStatus.RUNNING)
        request.record_event(EventType.SCHEDULED)
        self.running.append(request)

    def _choose_victim(self) -> int:
        """Give the index in running of the request to preempt: the last, or the least urgent by priority."""
        if not self._has_priorities:
            return len(self.running) - 1
        return max(range(len(self.running)), key=lambda i: (self.running[i].priority, self.running[i].arrival_time, i))

    def _take_out(self, victim: Request, plan: _StepPlan) -> None:
        """Preempt a victim; what this step had planned for it is given back."""
        num_tokens = plan.num_scheduled.pop(victim.req_id, 0)
        if num_tokens:
            plan.budget.give_back(num_tokens)
            index = plan.cached.index(victim)
            del plan.cached[index], plan.new_block_ids[index]
        plan.has_preempted = True
        self._preempt(victim)

    def _preempt(self, request: Request) -> None:
        """Take the blocks of a request; it starts again from its known tokens. The caller takes it out of running."""
        # Blocks that only this unfinished plan would have filled must not be hit.
        self.kv.free(request, num_valid_tokens=request.num_computed_tokens)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.move_to(RequestStatus.PREEMPTED)
        request.record_event(EventType.PREEMPTED)
        self._preempted_req_ids.append(request.req_id)
        self._counters.num_preemptions += 1
        self.waiting.prepend(request)

    def _build_output(self, plan: _StepPlan) -> SchedulerOutput:
        cached = CachedRequestData(
            req_ids=[request.req_id for request in plan.cached],
            new_block_ids=plan.new_block_ids,
            num_computed_tokens=[request.num_computed_tokens for request in plan.cached],
        )
        total = sum(plan.num_scheduled.values())
        output = SchedulerOutput(
            step_index=self._step_index,
            scheduled_new_reqs=[self._new_request_data(request) for request in plan.new],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=plan.num_scheduled,
            total_num_scheduled_tokens=total,
            finished_req_ids=self._finished_req_ids,
            preempted_req_ids=self._preempted_req_ids,
        )
        # Replaced, not cleared: the message refers to the old lists.
        self._finished_req_ids, self._preempted_req_ids = [], []
        self._in_flight[self._step_index] = self._advance(plan)
        output.structured_req_ids = plan.structured_req_ids
        output.has_pending_structured_tokens = plan.has_pending_structured_tokens
        self._step_index += 1
        self._counters.num_steps += total > 0
        self._counters.num_scheduled_tokens += total
        return output

    def _new_request_data(self, request: Request) -> NewRequestData:
        return NewRequestData(
            req_id=request.req_id,
            token_ids=request.all_token_ids.copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            block_ids=[block.block_id for block in self.kv.blocks_of(request.req_id)],
            num_computed_tokens=request.num_computed_tokens,
            prompt_embeds=request.prompt_embeds,
            pooling_params=request.pooling_params,
        )

    def _advance(self, plan: _StepPlan) -> list[tuple[Request, bool]]:
        """Count the scheduled tokens as computed; a request with none left gets a placeholder for its next token."""
        entries = []
        # num_scheduled has the same order.
        for request, num_new in zip(chain(plan.cached, plan.new), plan.num_scheduled.values(), strict=True):
            request.num_computed_tokens = num_computed = request.num_computed_tokens + num_new
            samples = num_computed >= len(request.all_token_ids) + request.num_output_placeholders
            if samples:
                if request.constraint is not None:
                    _note_constraint(request, plan)
                request.num_output_placeholders += 1
            entries.append((request, samples))
        return entries

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> ClientOutputs:
        """Fold the results of a step into its requests; give the outputs by client, statistics on one of them.

        Results of requests that ended meanwhile are dropped. A request whose prefill is not finished gives nothing.
        """
        outputs: ClientOutputs = {}
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        has_finished = False
        for request, samples in self._in_flight.pop(step.step_index):
            if request.status > RequestStatus.PREEMPTED:
                continue
            error = result.errors.get(request.req_id) if result.errors else None
            constraint = request.constraint
            if constraint is not None:
                error = None if constraint.ends_now else constraint.failure or error
            if error is None and not samples:
                continue
            if constraint is not None and constraint.ends_now:
                output = self._complete(request)
            elif error is not None:
                output = self._fail(request, error)
            elif request.pooling_params is not None:
                output = self._finish_pooled(request, result.pooler_outputs[request.req_id])
            else:
                output = self._append_tokens(request, sampled[request.req_id])
                if request.sampling_params.logprobs is not None:
                    output.new_logprobs = _first_rows(result.logprobs.get(request.req_id), len(output.new_token_ids))
                if result.prompt_logprobs and request.num_output_tokens == len(output.new_token_ids):
                    # Sent once, although a preempted request computes its prompt again.
                    output.new_prompt_logprobs = result.prompt_logprobs.get(request.req_id)
            has_finished |= output.finish_reason is not None
            client = outputs.get(request.client_index)
            if client is None:
                outputs[request.client_index] = EngineCoreOutputs(outputs=[output])
            else:
                client.outputs.append(output)
        self._drop_finished_from_running(has_finished)
        self.attach_stats(outputs)
        return outputs

    def _append_tokens(self, request: Request, token_ids: list[int]) -> EngineCoreOutput:
        """Take over sampled tokens up to the first one that ends the request."""
        assert token_ids, f"{request.req_id}: the worker sampled no token at the end of a prefill"
        num_kept = 0
        status = None
        for token_id in token_ids:
            request.all_token_ids.append(token_id)
            num_kept += 1
            status = find_stop(request, self.max_model_len)
            if request.constraint is not None:
                status = _advance_constraint(request.constraint, token_id, status)
            if status is not None:
                break
        request.num_output_placeholders -= 1
        num_known = min(request.num_computed_tokens, len(request.all_token_ids))
        if num_known // self.kv.block_size > request.num_committed_blocks and request.status is RequestStatus.RUNNING:
            self.kv.commit(request, num_known)
        if status is not None:
            self._finish(request, status)
        return EngineCoreOutput(
            request.req_id,
            token_ids if num_kept == len(token_ids) else token_ids[:num_kept],
            finish_reason=request.finish_reason if status is not None else None,
            stop_reason=request.stop_reason,
            events=request.take_events() if request.events else None,
            prefill_stats=request.take_prefill_stats() if request.prefill_stats is not None else None,
            error=request.constraint.failure if request.constraint is not None else None,
        )

    def _complete(self, request: Request) -> EngineCoreOutput:
        """End a constrained request whose text is complete; the token that was sampled after it is dropped."""
        self._finish(request, RequestStatus.FINISHED_STOPPED)
        return _end_output(request)

    def _finish_pooled(self, request: Request, pooled: np.ndarray) -> EngineCoreOutput:
        """End a request whose prompt is computed; its result is all it wants."""
        self._finish(request, RequestStatus.FINISHED_STOPPED)
        output = _end_output(request)
        output.pooling_output = pooled
        return output

    def _fail(self, request: Request, error: str) -> EngineCoreOutput:
        """End a request that failed in the worker; nothing it computed stays in the prefix cache."""
        self.kv.forget(request)
        self._finish(request, RequestStatus.FINISHED_ERROR)
        output = _end_output(request)
        output.error = error
        return output

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """End a request: blocks back, forgotten here, and by the worker with the next step."""
        if request.status is RequestStatus.RUNNING:
            # The worker holds no state of a request that waits or was preempted.
            self._finished_req_ids.append(request.req_id)
        elif self.skipped_waiting.pop(request.req_id, None) is None:
            self.waiting.remove(request)
        request.move_to(status)
        self.kv.free(request)
        del self.requests[request.req_id]

    def _drop_finished_from_running(self, has_finished: bool) -> None:
        if has_finished:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def gauges(self) -> tuple[int, int, int, float]:
        """Give running requests, those that wait for room, those that wait for a grammar, and cache usage of now."""
        return len(self.running), len(self.waiting), len(self.skipped_waiting), self.kv.pool.usage

    def attach_stats(self, outputs: ClientOutputs) -> None:
        """Put the statistics since the last message on one of the outputs, or on an empty one to client 0."""
        num_running, num_waiting, num_deferred, usage = self.gauges()
        counters, self._counters = self._counters, _Counters()
        client_index = next(iter(outputs), 0)
        outputs.setdefault(client_index, EngineCoreOutputs(outputs=[])).scheduler_stats = SchedulerStats(
            num_running_reqs=num_running,
            num_waiting_reqs=num_waiting,
            num_deferred_reqs=num_deferred,
            kv_cache_usage=usage,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_preemptions=counters.num_preemptions,
            num_steps=counters.num_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
        )

    def check_integrity(self) -> str | None:
        """Check blocks and queues against each other; None when sound, else what is broken."""
        num_queued = len(self.running) + len(self.waiting) + len(self.skipped_waiting)
        if num_queued != len(self.requests):
            return f"scheduler broken: {len(self.requests)} requests, {num_queued} in its queues"
        if self.kv.num_requests != len(self.running):
            return f"scheduler broken: {self.kv.num_requests} block tables, {len(self.running)} running requests"
        return self.kv.check_integrity()


def _append(outputs: ClientOutputs, client_index: int, output: EngineCoreOutput) -> None:
    outputs.setdefault(client_index, EngineCoreOutputs(outputs=[])).outputs.append(output)


def _end_output(request: Request) -> EngineCoreOutput:
    return EngineCoreOutput(
        request.req_id,
        [],
        finish_reason=request.finish_reason,
        events=request.take_events(),
        prefill_stats=request.take_prefill_stats(),
    )


def _note_constraint(request: Request, plan: _StepPlan) -> None:
    """Note in the plan that a mask may be needed for the token a request samples in it, and whether it can be made."""
    assert request.constraint is not None, f"{request.req_id} has no constraint"
    if request.constraint.may_restrict(request.num_output_placeholders):
        plan.structured_req_ids.append(request.req_id)
        plan.has_pending_structured_tokens |= request.num_output_placeholders > 0


def _advance_constraint(constraint: Constraint, token_id: int, status: RequestStatus | None) -> RequestStatus | None:
    """Move the constraint over a sampled token; give how the request ends, status being how it would without it."""
    if status is RequestStatus.FINISHED_STOPPED:
        return status
    if not constraint.accept(token_id):
        return RequestStatus.FINISHED_ERROR
    return RequestStatus.FINISHED_STOPPED if constraint.is_finished else status


def _is_sure_to_finish(request: Request) -> bool:
    """True when a step in flight will sample the last token that max_tokens allows."""
    num_output_tokens = len(request.all_token_ids) - request.num_prompt_tokens
    return num_output_tokens + request.num_output_placeholders >= request.sampling_params.max_tokens


def _first_rows(table: LogprobsLists | None, num_rows: int) -> LogprobsLists | None:
    """Cut logprobs to the tokens that were kept."""
    if table is None or len(table.sampled_ranks) == num_rows:
        return table
    return LogprobsLists(table.token_ids[:num_rows], table.logprobs[:num_rows], table.sampled_ranks[:num_rows])
