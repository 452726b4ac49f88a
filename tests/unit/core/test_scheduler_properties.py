"""Scheduler and cache manager under random use, against a plain model of what each request must give.

The invariants are checked after every rule; the scripted worker checks each read and write of the cache itself.
A failure prints the steps and a blob that repeats it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from serve.core.block_hash import BlockHasher
from serve.core.request import Request, RequestStatus
from serve.core.scheduler import PauseState
from serve.core.structured_output.constraint import Constraint
from serve.core.structured_output.grammar import MaskRow
from serve.core.structured_output.reasoning_gate import ReasoningGate
from serve.sampling_params import SamplingParams
from serve.wire.frontend import EngineCoreOutput, FinishReason
from serve.wire.step import SchedulerOutput
from tests.unit.core.scripted import Loop, ScriptedRunner, continue_text, make_kv, make_request, make_scheduler

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
# Few different beginnings, so that prefixes collide.
STEMS = ([1] * 40, [1] * 8 + [2] * 32, [3] * 40)


@dataclass
class Expected:
    """What a request must give when it is left alone."""

    token_ids: list[int]
    reason: FinishReason


def expect(request: Request, complete_after: int | None) -> Expected:
    """Compute the whole answer of a request from the model's definition."""
    params = request.sampling_params
    text = continue_text(request.all_token_ids, params.max_tokens)
    limit = min(params.max_tokens, MAX_MODEL_LEN - request.num_prompt_tokens)
    for index, token in enumerate(text[:limit]):
        if index + 1 == complete_after:
            return Expected(text[: index + 1], FinishReason.STOP)
        if index + 1 >= params.min_tokens and (token == params.eos_token_id or token in params.stop_token_ids):
            return Expected(text[: index + 1], FinishReason.STOP)
    return Expected(text[:limit], FinishReason.LENGTH)


class CountingGrammar:
    """Allows every token; the text is complete after so many of them."""

    def __init__(self, num_tokens: int) -> None:
        self.num_left = num_tokens

    @property
    def is_finished(self) -> bool:
        return self.num_left == 0

    def copy(self) -> CountingGrammar:
        return CountingGrammar(self.num_left)

    def fill(self, row: MaskRow) -> None:
        row[:] = 0xFFFFFFFF

    def accept(self, token_id: int) -> bool:
        assert self.num_left, "a token came after the end"
        self.num_left -= 1
        return True

    def accept_text(self, text: bytes) -> bool:
        raise NotImplementedError

    def count_valid(self, token_ids: Sequence[int]) -> int:
        raise NotImplementedError

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, steps, aborts, failures, pauses and resets."""

    @initialize(
        policy=st.sampled_from(["fcfs", "priority"]),
        num_batches=st.integers(1, 2),
        spare_blocks=st.integers(0, 12),
        budget=st.sampled_from([5, 16, 48, 64]),
        max_num_seqs=st.integers(1, 5),
        window=st.sampled_from([None, None, 6, 11]),
        options=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 3]), st.floats(0, 0.3)),
    )
    def start(
        self,
        policy: str,
        num_batches: int,
        spare_blocks: int,
        budget: int,
        max_num_seqs: int,
        window: int | None,
        options: tuple[bool, bool, bool, int, float],
    ) -> None:
        caching, chunked, full_isl, threshold, watermark = options
        self.budget = budget
        self.max_num_seqs = min(max_num_seqs, budget)
        kv = make_kv(
            MAX_MODEL_LEN // BLOCK_SIZE + 1 + spare_blocks,
            max_model_len=MAX_MODEL_LEN,
            caching=caching,
            window=window,
            watermark=watermark,
            max_step_tokens=budget,
            block_size=BLOCK_SIZE,
        )
        scheduler = make_scheduler(
            kv,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=self.max_num_seqs,
            scheduling_policy=policy,
            enable_chunked_prefill=chunked or budget < MAX_MODEL_LEN,
            scheduler_reserve_full_isl=full_isl,
            long_prefill_token_threshold=threshold,
        )
        self.policy = policy
        self.loop = Loop(scheduler, num_batches, ScriptedRunner(BLOCK_SIZE, window))
        self.scheduler = scheduler
        self.hasher = BlockHasher(BLOCK_SIZE, algorithm="sha256", domain="test", seed="test")
        self.expected: dict[str, Expected] = {}
        self.live: dict[str, Request] = {}
        self.dropped: set[str] = set()
        self.failed: set[str] = set()
        self.deferred: set[str] = set()
        self.passed: set[str] = set()
        self.started: list[int] = []

    @rule(
        stem=st.sampled_from(STEMS),
        length=st.integers(1, 40),
        tail=st.lists(st.integers(4, 6), max_size=3),
        max_tokens=st.integers(1, 20),
        stop_after=st.none() | st.integers(0, 15),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "x"]),
        grammar=st.sampled_from([None, None, (1, True), (4, True), (9, True), (3, False), (7, False)]),
    )
    def add(
        self,
        stem: list[int],
        length: int,
        tail: list[int],
        max_tokens: int,
        stop_after: int | None,
        priority: int,
        salt: str | None,
        grammar: tuple[int, bool] | None,
    ) -> None:
        number = len(self.expected)
        prompt = [*stem[:length], *tail]
        ends = continue_text(prompt, 16)[stop_after : stop_after + 1] if stop_after is not None else []
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, number % 3),
            eos_token_id=ends[0] if ends and number % 2 else None,
            stop_token_ids=tuple(ends) if not number % 2 else (),
        )
        req_id = f"{number:04d}"
        request = make_request(
            req_id,
            prompt,
            params=params,
            priority=priority,
            arrival_time=float(number),
            cache_salt=salt,
            client_index=number % 2,
        )
        self.loop.runner.salts[req_id] = salt
        if grammar is not None:
            gate = ReasoningGate(None, CountingGrammar(grammar[0]), ())
            request.constraint = Constraint(params, gate, ())
            if not grammar[1]:
                request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
                self.deferred.add(req_id)
        self.expected[req_id] = expect(request, grammar[0] if grammar else None)
        self.live[req_id] = request
        self.scheduler.add_request(request)

    @precondition(lambda self: len(self.loop.in_flight) < self.loop.num_batches)
    @rule()
    def dispatch(self) -> None:
        kv = self.scheduler.kv
        named = [
            (request.req_id, place, block)
            for request in self.scheduler.running
            for place, block in enumerate(kv.blocks_of(request.req_id))
            if block.block_hash is not None
        ]
        waiting_before = list(self.scheduler.waiting)
        is_free = not self.loop.in_flight and self.scheduler.pause_state is PauseState.UNPAUSED
        step = self.loop.dispatch()
        if is_free and len(self.scheduler.requests) > len(self.scheduler.skipped_waiting):
            # I9: with nothing in flight some token can always be scheduled, whoever waits for a grammar.
            assert step is not None
            assert step.total_num_scheduled_tokens > 0
        if step is not None:
            # What preemption or a window gave back in this step may be taken for new content.
            kept = {b.block_id for req_id, place, b in named if kv.blocks_of(req_id)[place : place + 1] == [b]}
            self.check_step(step, kept, waiting_before)

    def check_step(self, step: SchedulerOutput, named_ids: set[int], waiting_before: list[Request]) -> None:
        # A mask is asked for exactly where a constrained request samples; it must wait for a token in flight.
        sampling = [
            request
            for request in (self.live[req_id] for req_id in step.num_scheduled_tokens)
            if request.num_output_placeholders
            and request.num_computed_tokens == request.num_tokens + request.num_output_placeholders - 1
        ]
        constrained = [request for request in sampling if request.constraint is not None]
        assert step.structured_req_ids == [request.req_id for request in constrained]
        has_pending = any(request.num_output_placeholders > 1 for request in constrained)
        assert step.has_pending_structured_tokens is has_pending
        # I6
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values()) <= self.budget
        assert all(num > 0 for num in step.num_scheduled_tokens.values())
        for req_id, num in step.num_scheduled_tokens.items():
            request = self.scheduler.requests[req_id]
            first = (request.num_computed_tokens - num) // BLOCK_SIZE
            last = (request.num_computed_tokens - 1) // BLOCK_SIZE
            new_ids = {new.req_id for new in step.scheduled_new_reqs}
            for block in self.scheduler.kv.blocks_of(req_id)[first : last + 1]:
                # I3: written by this request alone; who shares it was admitted in this step, and reads it.
                sharers = {
                    other.req_id
                    for other in self.scheduler.running
                    if other is not request and block in self.scheduler.kv.blocks_of(other.req_id)
                }
                assert sharers <= new_ids
                assert block.block_id not in named_ids, "a block with a name is written again"
        for new in step.scheduled_new_reqs:
            request = self.live[new.req_id]
            # I11
            assert new.num_computed_tokens < len(new.token_ids)
        if self.policy == "fcfs":
            self.check_order(step, waiting_before)

    def check_order(self, step: SchedulerOutput, waiting_before: list[Request]) -> None:
        # I8: first starts are in order of arrival; what was preempted stands before what never ran. Whoever waited
        # for a grammar comes before those who did not. Passed over is only who shares its beginning with another.
        admitted = [new.req_id for new in step.scheduled_new_reqs]
        places = [place for place, request in enumerate(waiting_before) if request.req_id in admitted]
        for request in waiting_before[: max(places, default=0)]:
            if request.req_id not in admitted:
                self.passed.add(request.req_id)
                running = [other for other in self.scheduler.running if other.block_hashes]
                assert any(other.block_hashes[0] == request.block_hashes[0] for other in running)
        assert admitted == [waiting_before[place].req_id for place in places]
        self.started += [
            int(req_id)
            for req_id in admitted
            if self.live[req_id].num_preemptions == 0 and req_id not in self.deferred | self.passed
        ]
        assert self.started == sorted(self.started)

    @precondition(lambda self: self.loop.in_flight)
    @rule()
    def fold(self) -> None:
        before = {req_id: len(outputs) for req_id, outputs in self.loop.outputs.items()}
        outputs = self.loop.fold()
        for client_index, message in outputs.items():
            for output in message.outputs:
                assert int(output.request_id) % 2 == client_index
        assert sum(message.scheduler_stats is not None for message in outputs.values()) == 1
        for req_id, found in self.loop.outputs.items():
            for output in found[before.get(req_id, 0) :]:
                self.check_output(output)

    def check_output(self, output: EngineCoreOutput) -> None:
        req_id = output.request_id
        expected = self.expected[req_id]
        assert req_id not in self.dropped, "an aborted request gave an output"
        tokens = self.loop.tokens_of(req_id)
        # I10
        assert tokens == expected.token_ids[: len(tokens)]
        if output.finish_reason is FinishReason.ERROR:
            assert req_id in self.failed
        elif output.finish_reason is not None:
            assert (tokens, output.finish_reason) == (expected.token_ids, expected.reason)
        if output.finish_reason is not None:
            del self.live[req_id]

    @rule(which=st.integers(0, 4), is_sound=st.booleans())
    def settle_grammar(self, which: int, is_sound: bool) -> None:
        waiting = list(self.scheduler.skipped_waiting.values())
        assume(len(waiting) > which)
        request = waiting[which]
        if is_sound:
            self.scheduler.promote(request)
            return
        [(client_index, message)] = self.scheduler.fail_waiting(request, "invalid_request: injected").items()
        [output] = message.outputs
        assert client_index == request.client_index
        assert (output.request_id, output.error) == (request.req_id, "invalid_request: injected")
        assert output.finish_reason is FinishReason.ERROR
        del self.live[request.req_id]
        # Both are settled: nothing more happens.
        self.scheduler.promote(request)
        assert self.scheduler.fail_waiting(request, "again") == {}

    @rule(which=st.integers(0, 30), twice=st.booleans())
    def abort(self, which: int, twice: bool) -> None:
        req_id = f"{which:04d}"
        for _ in range(1 + twice):
            self.scheduler.finish_requests([req_id, req_id], RequestStatus.FINISHED_ABORTED)
        self.drop([req_id])

    @rule(client_index=st.integers(0, 1))
    def drop_client(self, client_index: int) -> None:
        gone = [req_id for req_id, request in self.live.items() if request.client_index == client_index]
        self.scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)
        self.drop(gone)

    def drop(self, req_ids: list[str]) -> None:
        for req_id in req_ids:
            if self.live.pop(req_id, None) is not None:
                self.dropped.add(req_id)

    @rule(which=st.integers(0, 4))
    def fail(self, which: int) -> None:
        assume(len(self.scheduler.running) > which)
        req_id = self.scheduler.running[which].req_id
        self.loop.runner.errors[req_id] = "nan_logits: injected"
        self.failed.add(req_id)

    @rule(force=st.booleans())
    def reset_prefix_cache(self, force: bool) -> None:
        had_running = bool(self.scheduler.running)
        done = self.scheduler.reset_prefix_cache(reset_running_requests=force)
        assert done is (force or not had_running)
        if done:
            assert self.scheduler.kv.pool.num_cached_blocks == 0

    @rule(state=st.sampled_from([PauseState.UNPAUSED, PauseState.UNPAUSED, *PauseState]))
    def pause(self, state: PauseState) -> None:
        self.scheduler.pause_state = state

    @rule()
    def drain(self) -> None:
        self.scheduler.pause_state = PauseState.UNPAUSED
        work = sum(len(expected.token_ids) for expected in self.expected.values())
        turns = 200 + 200 * (work + MAX_MODEL_LEN * len(self.expected))
        for request in list(self.scheduler.skipped_waiting.values()):
            self.scheduler.promote(request)
        while self.scheduler.has_work or self.loop.in_flight:
            if len(self.loop.in_flight) < self.loop.num_batches and self.scheduler.has_work:
                self.dispatch()
            if self.loop.in_flight:
                self.fold()
            turns -= 1
            assert turns, "no progress"
        # I12, I13
        assert self.live == {}
        assert self.scheduler.gauges() == (0, 0, 0, 0.0)
        assert self.loop.runner.tokens == self.loop.runner.tables == {}
        assert self.scheduler.num_in_flight_steps == 0

    @invariant()
    def blocks_are_where_they_belong(self) -> None:
        if "scheduler" not in self.__dict__:
            return
        kv = self.scheduler.kv
        refs = Counter(b.block_id for r in self.scheduler.running for b in kv.blocks_of(r.req_id) if b.block_id)
        free = [block.block_id for block in kv.pool.free_queue]
        # I1, I2
        assert sorted([*free, *refs]) == list(range(1, kv.pool.num_blocks))
        assert all(block.ref_cnt == refs.get(block.block_id, 0) for block in kv.pool.blocks)
        assert self.scheduler.check_integrity() is None

    @invariant()
    def cached_blocks_hold_what_their_name_says(self) -> None:
        if "scheduler" not in self.__dict__:
            return
        for block in self.scheduler.kv.pool.blocks:
            if block.block_hash is None:
                continue
            # I4
            salt, text = self.loop.runner.slots[block.block_id * BLOCK_SIZE + BLOCK_SIZE - 1]
            assert len(text) % BLOCK_SIZE == 0
            names: list[bytes] = []
            self.hasher.extend(names, list(text), salt)
            assert names[-1] == block.block_hash
            assert self.scheduler.kv.pool.get_cached_block(block.block_hash) is not None

    @invariant()
    def requests_are_in_one_place(self) -> None:
        if "scheduler" not in self.__dict__:
            return
        scheduler = self.scheduler
        waiting = list(scheduler.waiting)
        blocked = list(scheduler.skipped_waiting.values())
        # I7
        assert sorted(r.req_id for r in [*scheduler.running, *waiting, *blocked]) == sorted(scheduler.requests)
        assert all(r.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR for r in blocked)
        assert scheduler.gauges()[:3] == (len(scheduler.running), len(waiting), len(blocked))
        assert set(scheduler.requests) == set(self.live)
        assert all(r.status is RequestStatus.RUNNING for r in scheduler.running)
        assert all(r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) for r in waiting)
        # I6
        assert len(scheduler.running) <= self.max_num_seqs
        for request in scheduler.running:
            num_known = request.num_tokens + request.num_output_placeholders
            assert request.num_computed_tokens <= min(num_known, MAX_MODEL_LEN)
            # I5
            num_blocks = len(scheduler.kv.blocks_of(request.req_id))
            assert num_blocks == math.ceil(request.num_computed_tokens / BLOCK_SIZE)
        if self.policy == "fcfs":
            statuses = [request.status for request in waiting]
            assert statuses == sorted(statuses, reverse=True)

    def teardown(self) -> None:
        if "scheduler" in self.__dict__:
            self.drain()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
