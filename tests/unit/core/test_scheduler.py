"""The scheduler's rules, one test each, with a worker that checks what every step reads and writes."""

from __future__ import annotations

import numpy as np
import pytest

from serve.core.request import RequestStatus
from serve.core.scheduler import PauseState, Scheduler
from serve.sampling_params import SamplingParams
from serve.wire.frontend import EventType, FinishReason, LogprobsLists
from serve.wire.step import ModelRunnerOutput, SchedulerOutput
from tests.unit.core.scripted import Loop, continue_text, make_kv, make_request, make_scheduler

BOTH = pytest.mark.parametrize("num_batches", [1, 2], ids=["sync", "async"])


def new_ids(scheduler: Scheduler) -> list[str]:
    return [request.req_id for request in scheduler.running]


def turn_until_preempted(loop: Loop) -> SchedulerOutput:
    """Give the step that a preemption happened in."""
    while True:
        step = loop.turn()
        assert step is not None
        if step.preempted_req_ids:
            return step


@BOTH
def test_a_request_runs_to_its_token_limit(num_batches: int) -> None:
    loop = Loop(make_scheduler(), num_batches)
    request = make_request("a", 20)
    prompt = request.all_token_ids.copy()
    loop.scheduler.add_request(request)
    loop.run_to_end()
    assert loop.tokens_of("a") == continue_text(prompt, 8)
    assert loop.last_of("a").finish_reason is FinishReason.LENGTH
    assert loop.scheduler.kv.pool.usage == 0.0
    assert loop.runner.tokens == {}


@BOTH
def test_the_first_output_tells_events_and_prefill_once(num_batches: int) -> None:
    loop = Loop(make_scheduler(), num_batches)
    loop.scheduler.add_request(make_request("a", 20))
    loop.run_to_end()
    first, *others = loop.outputs["a"]
    assert [event.type for event in first.events or []] == [EventType.QUEUED, EventType.SCHEDULED]
    assert first.prefill_stats is not None
    assert (first.prefill_stats.num_prompt_tokens, first.prefill_stats.num_cached_tokens) == (20, 0)
    assert all(output.events is None and output.prefill_stats is None for output in others)


@BOTH
def test_a_long_prompt_is_spread_over_steps_and_gives_nothing_until_its_end(num_batches: int) -> None:
    loop = Loop(make_scheduler(max_num_batched_tokens=64), num_batches)
    request = make_request("a", 300, params=SamplingParams(max_tokens=2))
    expected = continue_text(request.all_token_ids, 2)
    loop.scheduler.add_request(request)
    steps = loop.run_to_end()
    assert [step.total_num_scheduled_tokens for step in steps[:5]] == [64, 64, 64, 64, 44]
    assert loop.tokens_of("a") == expected
    assert len(loop.outputs["a"]) == 2


def test_a_short_request_shares_the_steps_of_a_long_prefill() -> None:
    loop = Loop(make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=32))
    loop.scheduler.add_request(make_request("long", 320, params=SamplingParams(max_tokens=1)))
    loop.scheduler.add_request(make_request("short", 10, params=SamplingParams(max_tokens=1)))
    step = loop.turn()
    assert step is not None
    assert step.num_scheduled_tokens == {"long": 32, "short": 10}
    assert loop.last_of("short").finish_reason is FinishReason.LENGTH
    assert "long" not in loop.outputs


def test_running_requests_come_before_waiting_ones() -> None:
    loop = Loop(make_scheduler(max_num_batched_tokens=20))
    loop.scheduler.add_request(make_request("a", 10))
    loop.turn()
    loop.scheduler.add_request(make_request("b", 100))
    step = loop.turn()
    assert step is not None
    assert step.num_scheduled_tokens == {"a": 1, "b": 19}


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step() -> None:
    loop = Loop(make_scheduler(max_num_batched_tokens=64, enable_chunked_prefill=False))
    loop.scheduler.add_request(make_request("a", 40))
    loop.scheduler.add_request(make_request("b", 30))
    steps = [loop.turn(), loop.turn()]
    assert [step.num_scheduled_tokens for step in steps if step] == [{"a": 40}, {"a": 1, "b": 30}]


def test_at_most_max_num_seqs_requests_run() -> None:
    loop = Loop(make_scheduler(max_num_seqs=2))
    for index in range(6):
        loop.scheduler.add_request(make_request(f"r{index}", 10))
    most = 0
    while loop.scheduler.has_work:
        loop.turn()
        most = max(most, len(loop.scheduler.running))
    assert most == 2
    assert all(loop.last_of(f"r{index}").finish_reason is FinishReason.LENGTH for index in range(6))


def test_nothing_behind_a_head_that_does_not_fit_is_tried() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=9)))
    loop.scheduler.add_request(make_request("a", 80))
    loop.scheduler.add_request(make_request("big", 100))
    loop.scheduler.add_request(make_request("small", 5))
    loop.turn()
    assert new_ids(loop.scheduler) == ["a"]


def test_full_sequence_admission_waits_instead_of_thrashing() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=9), max_num_batched_tokens=32))
    loop.scheduler.add_request(make_request("a", 60, params=SamplingParams(max_tokens=10)))
    loop.scheduler.add_request(make_request("b", 100, params=SamplingParams(max_tokens=10)))
    steps = loop.run_to_end()
    assert sum(len(step.preempted_req_ids) for step in steps) == 0
    assert loop.last_of("b").finish_reason is FinishReason.LENGTH


def test_without_full_sequence_admission_the_same_load_preempts() -> None:
    settings = {"max_num_batched_tokens": 32, "scheduler_reserve_full_isl": False}
    loop = Loop(make_scheduler(make_kv(num_blocks=9), **settings))
    loop.scheduler.add_request(make_request("a", 60, params=SamplingParams(max_tokens=10)))
    loop.scheduler.add_request(make_request("b", 100, params=SamplingParams(max_tokens=10)))
    steps = loop.run_to_end()
    assert sum(len(step.preempted_req_ids) for step in steps) > 0


def test_the_watermark_keeps_blocks_free_while_something_runs() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=11, watermark=0.3)))
    loop.scheduler.add_request(make_request("a", 64))
    loop.scheduler.add_request(make_request("b", 64))
    loop.turn()
    # 10 usable blocks; 4 + 4 would leave 2, the watermark asks for int(0.3 * 11) = 3.
    assert new_ids(loop.scheduler) == ["a"]


def test_the_watermark_does_not_hold_up_a_lone_request() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=11, watermark=0.3)))
    loop.scheduler.add_request(make_request("a", 150))
    loop.turn()
    assert new_ids(loop.scheduler) == ["a"]


@BOTH
def test_preempted_requests_give_the_same_tokens(num_batches: int) -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=13)), num_batches)
    requests = [make_request(f"r{i}", 20 + 3 * i, params=SamplingParams(max_tokens=60)) for i in range(5)]
    expected = {request.req_id: continue_text(request.all_token_ids, 60) for request in requests}
    for request in requests:
        loop.scheduler.add_request(request)
    steps = loop.run_to_end()
    assert sum(len(step.preempted_req_ids) for step in steps) > 0
    assert {req_id: loop.tokens_of(req_id) for req_id in expected} == expected
    assert loop.scheduler.check_integrity() is None


def test_the_last_admitted_request_is_preempted_and_comes_back_first() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=7)))
    for name in ("a", "b"):
        loop.scheduler.add_request(make_request(name, 30, params=SamplingParams(max_tokens=40)))
    turn_until_preempted(loop)
    loop.scheduler.add_request(make_request("c", 10))
    assert new_ids(loop.scheduler) == ["a"]
    assert [request.req_id for request in loop.scheduler.waiting] == ["b", "c"]
    preempted = loop.scheduler.requests["b"]
    assert preempted.status is RequestStatus.PREEMPTED
    assert (preempted.num_computed_tokens, preempted.num_preemptions) == (0, 1)
    assert loop.scheduler.kv.blocks_of("b") == []


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=7), max_num_seqs=2))
    for name in ("a", "b", "tiny"):
        num_prompt = 1 if name == "tiny" else 30
        loop.scheduler.add_request(make_request(name, num_prompt, params=SamplingParams(max_tokens=40)))
    step = turn_until_preempted(loop)
    assert step.preempted_req_ids == ["b"]
    assert step.num_scheduled_tokens == {"a": 1}


def test_the_worker_hears_of_a_preemption_and_gets_all_tokens_on_resume() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=7)))
    for name in ("a", "b"):
        loop.scheduler.add_request(make_request(name, 30, params=SamplingParams(max_tokens=40)))
    steps = loop.run_to_end()
    told = [step.step_index for step in steps if "b" in step.preempted_req_ids]
    resumed = [new for step in steps for new in step.scheduled_new_reqs if new.req_id == "b"][1:]
    assert len(told) == len(resumed) == 1
    assert resumed[0].num_prompt_tokens == 30
    assert len(resumed[0].token_ids) > 30


def test_prefill_statistics_ignore_a_resume() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=7)))
    for name in ("a", "b"):
        loop.scheduler.add_request(make_request(name, 30, params=SamplingParams(max_tokens=40)))
    loop.run_to_end()
    stats = [output.prefill_stats for output in loop.outputs["b"] if output.prefill_stats is not None]
    assert [(s.num_prompt_tokens, s.num_cached_tokens) for s in stats] == [(30, 0)]


@pytest.mark.parametrize(("low_prompt", "high_prompt"), [(20, 63), (31, 60)], ids=["high needs it", "low needs it"])
def test_under_priority_the_least_urgent_gives_its_place_in_the_step_back(low_prompt: int, high_prompt: int) -> None:
    # 6 usable blocks, 2 and 4 held; the next block is needed first by one or the other.
    loop = Loop(make_scheduler(make_kv(num_blocks=7), scheduling_policy="priority"))
    params = SamplingParams(max_tokens=30)
    low, high = make_request("low", low_prompt, priority=9, params=params), make_request("high", high_prompt)
    expected = {"low": continue_text(low.all_token_ids, 30), "high": continue_text(high.all_token_ids, 8)}
    loop.scheduler.add_request(low)
    loop.turn()
    loop.scheduler.add_request(high)
    step = turn_until_preempted(loop)
    assert new_ids(loop.scheduler) == ["high"]
    assert step.num_scheduled_tokens == {"high": 1}
    assert loop.scheduler.check_integrity() is None
    loop.run_to_end()
    assert {name: loop.tokens_of(name) for name in expected} == expected


def test_a_victim_before_the_cursor_costs_no_other_request_its_place_in_the_step() -> None:
    loop = Loop(make_scheduler(make_kv(num_blocks=9), scheduling_policy="priority"))
    params = SamplingParams(max_tokens=30)
    loop.scheduler.add_request(make_request("low", 20, priority=9, params=params))
    loop.turn()
    loop.scheduler.add_request(make_request("a", 63, priority=1, params=params))
    loop.scheduler.add_request(make_request("b", 20, priority=2, params=params))
    assert turn_until_preempted(loop).num_scheduled_tokens == {"a": 1, "b": 1}


def test_a_block_that_only_a_withdrawn_plan_would_have_filled_is_not_cached() -> None:
    # 5 usable blocks: low holds 1 and fills it in the step in which mid, with 3, needs 3 more. Giving up low is not
    # enough, so mid goes too, and nobody takes the block that low did not get to fill.
    settings = {"long_prefill_token_threshold": 48, "scheduler_reserve_full_isl": False}
    loop = Loop(make_scheduler(make_kv(num_blocks=6), scheduling_policy="priority", **settings))
    low = make_request("low", 10, priority=9, params=SamplingParams(max_tokens=20))
    loop.scheduler.add_request(low)
    for _ in range(5):
        loop.turn()
    loop.scheduler.add_request(make_request("mid", 100, priority=5))
    loop.turn()
    step = loop.scheduler.schedule()
    assert step.preempted_req_ids == ["low", "mid"]
    assert low.num_tokens == 16
    assert loop.scheduler.kv.get_computed_blocks(make_request("again", [*low.all_token_ids, 1])) == []


def test_a_request_preempted_with_a_token_in_flight_waits_for_that_token() -> None:
    loop = Loop(make_scheduler(), num_batches=2)
    loop.scheduler.add_request(make_request("a", 20))
    loop.dispatch()
    loop.scheduler.reset_prefix_cache(reset_running_requests=True)
    step = loop.dispatch()
    assert step is not None
    assert (step.preempted_req_ids, step.num_scheduled_tokens) == (["a"], {})
    loop.fold()
    step = loop.dispatch()
    assert step is not None
    assert step.num_scheduled_tokens == {"a": 21}


def test_under_priority_a_lower_value_leaves_the_queue_first_and_preempts_nobody_by_waiting() -> None:
    loop = Loop(make_scheduler(max_num_seqs=1, scheduling_policy="priority"))
    loop.scheduler.add_request(make_request("running", 5, priority=5))
    loop.turn()
    for name, priority, arrival in (("late", 3, 2.0), ("early", 3, 1.0), ("urgent", 0, 3.0)):
        loop.scheduler.add_request(make_request(name, 5, priority=priority, arrival_time=arrival))
    loop.turn()
    assert new_ids(loop.scheduler) == ["running"]
    loop.run_to_end()
    admitted = [new.req_id for step in loop.runner.steps for new in step.scheduled_new_reqs]
    assert admitted == ["running", "urgent", "early", "late"]


def test_under_fcfs_priorities_are_ignored() -> None:
    loop = Loop(make_scheduler(max_num_seqs=1))
    for name, priority in (("a", 9), ("b", 0)):
        loop.scheduler.add_request(make_request(name, 5, priority=priority))
    loop.run_to_end()
    assert [new.req_id for step in loop.runner.steps for new in step.scheduled_new_reqs] == ["a", "b"]


@BOTH
def test_equal_prompts_of_one_step_share_their_blocks(num_batches: int) -> None:
    loop = Loop(make_scheduler(), num_batches)
    prompt = make_request("a", 40).all_token_ids
    for name in ("a", "b"):
        loop.scheduler.add_request(make_request(name, prompt.copy()))
    step = loop.turn()
    assert step is not None
    assert step.num_scheduled_tokens == {"a": 40, "b": 8}
    loop.run_to_end()
    assert loop.tokens_of("a") == loop.tokens_of("b") == continue_text(prompt, 8)


@BOTH
def test_a_second_turn_hits_the_first_answer_too(num_batches: int) -> None:
    loop = Loop(make_scheduler(), num_batches)
    prompt = make_request("a", 20).all_token_ids
    loop.scheduler.add_request(make_request("a", prompt.copy(), params=SamplingParams(max_tokens=45)))
    loop.run_to_end()
    second = [*prompt, *loop.tokens_of("a"), 1, 2, 3]
    loop.scheduler.add_request(make_request("b", second))
    loop.run_to_end()
    stats = loop.outputs["b"][0].prefill_stats
    assert stats is not None
    # 65 tokens of the first turn; its last token was not computed, so four blocks of 16 can be reused.
    assert stats.num_cached_tokens == 64


@BOTH
def test_an_end_id_stops_and_is_part_of_the_tokens(num_batches: int) -> None:
    prompt = make_request("a", 20).all_token_ids
    text = continue_text(prompt, 5)
    loop = Loop(make_scheduler(), num_batches)
    params = SamplingParams(max_tokens=50, eos_token_id=text[3])
    loop.scheduler.add_request(make_request("a", prompt.copy(), params=params))
    loop.run_to_end()
    assert loop.tokens_of("a") == text[:4]
    assert (loop.last_of("a").finish_reason, loop.last_of("a").stop_reason) == (FinishReason.STOP, None)


@BOTH
def test_a_stop_id_is_named(num_batches: int) -> None:
    prompt = make_request("a", 20).all_token_ids
    text = continue_text(prompt, 5)
    loop = Loop(make_scheduler(), num_batches)
    params = SamplingParams(max_tokens=50, stop_token_ids=(text[2],))
    loop.scheduler.add_request(make_request("a", prompt.copy(), params=params))
    loop.run_to_end()
    assert loop.tokens_of("a") == text[:3]
    assert (loop.last_of("a").finish_reason, loop.last_of("a").stop_reason) == (FinishReason.STOP, text[2])


@BOTH
def test_a_request_ends_at_max_model_len(num_batches: int) -> None:
    loop = Loop(make_scheduler(max_model_len=32), num_batches)
    loop.scheduler.add_request(make_request("a", 25, params=SamplingParams(max_tokens=100)))
    loop.run_to_end()
    assert len(loop.tokens_of("a")) == 7
    assert loop.last_of("a").finish_reason is FinishReason.LENGTH


def test_async_runs_no_step_for_a_request_sure_to_finish() -> None:
    loop = Loop(make_scheduler(), num_batches=2)
    loop.scheduler.add_request(make_request("a", 20, params=SamplingParams(max_tokens=3)))
    steps = loop.run_to_end()
    assert [step.total_num_scheduled_tokens for step in steps] == [20, 1, 1, 0]


def test_async_wastes_at_most_one_step_after_a_stop() -> None:
    prompt = make_request("a", 20).all_token_ids
    text = continue_text(prompt, 5)
    loop = Loop(make_scheduler(), num_batches=2)
    loop.scheduler.add_request(make_request("a", prompt, params=SamplingParams(max_tokens=50, eos_token_id=text[3])))
    steps = loop.run_to_end()
    assert [step.total_num_scheduled_tokens for step in steps] == [20, 1, 1, 1, 1, 0]


def test_an_abort_in_flight_drops_the_result() -> None:
    loop = Loop(make_scheduler())
    loop.scheduler.add_request(make_request("a", 20))
    loop.dispatch()
    loop.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    loop.fold()
    assert loop.outputs == {}
    assert loop.scheduler.kv.pool.usage == 0.0
    step = loop.dispatch()
    assert step is not None
    assert (step.finished_req_ids, step.total_num_scheduled_tokens) == (["a"], 0)


@pytest.mark.parametrize("when", ["waiting", "running", "finished", "unknown"])
def test_abort_is_idempotent_in_every_state(when: str) -> None:
    loop = Loop(make_scheduler())
    if when != "unknown":
        loop.scheduler.add_request(make_request("a", 20))
    if when == "running":
        loop.turn()
    if when == "finished":
        loop.run_to_end()
    for _ in range(2):
        loop.scheduler.finish_requests(["a", "a"], RequestStatus.FINISHED_ABORTED)
    loop.run_to_end()
    assert loop.scheduler.requests == {}
    assert loop.scheduler.kv.pool.usage == 0.0
    assert loop.runner.tokens == {}


def test_an_aborted_waiting_request_never_runs() -> None:
    loop = Loop(make_scheduler(max_num_seqs=1))
    for name in ("a", "b", "c"):
        loop.scheduler.add_request(make_request(name, 5))
    loop.turn()
    loop.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    loop.run_to_end()
    assert [new.req_id for step in loop.runner.steps for new in step.scheduled_new_reqs] == ["a", "c"]


def test_an_id_in_use_is_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5))
    with pytest.raises(ValueError, match="already in use"):
        scheduler.add_request(make_request("a", 5))


@BOTH
def test_a_worker_error_ends_that_request_only_and_leaves_nothing_in_the_cache(num_batches: int) -> None:
    loop = Loop(make_scheduler(), num_batches)
    bad, good = make_request("bad", 40), make_request("good", 33)
    prompts = {"bad": bad.all_token_ids.copy(), "good": good.all_token_ids.copy()}
    loop.scheduler.add_request(bad)
    loop.scheduler.add_request(good)
    loop.runner.errors["bad"] = "nan_logits: row 0"
    loop.run_to_end()
    last = loop.last_of("bad")
    assert (last.finish_reason, last.error, last.new_token_ids) == (FinishReason.ERROR, "nan_logits: row 0", [])
    assert loop.tokens_of("good") == continue_text(prompts["good"], 8)
    assert loop.scheduler.kv.get_computed_blocks(make_request("again", prompts["bad"])) == []
    assert loop.scheduler.check_integrity() is None


def test_outputs_go_to_their_client_and_statistics_on_exactly_one_message() -> None:
    loop = Loop(make_scheduler())
    for name, client in (("a", 1), ("b", 0), ("c", 1)):
        loop.scheduler.add_request(make_request(name, 5, client_index=client))
    loop.dispatch()
    outputs = loop.fold()
    assert {index: [o.request_id for o in message.outputs] for index, message in outputs.items()} == {
        0: ["b"],
        1: ["a", "c"],
    }
    stats = [message.scheduler_stats for message in outputs.values() if message.scheduler_stats is not None]
    assert [(s.num_running_reqs, s.num_waiting_reqs, s.num_scheduled_tokens, s.num_steps) for s in stats] == [
        (3, 0, 15, 1)
    ]


def test_a_step_without_outputs_still_reports_to_client_0() -> None:
    loop = Loop(make_scheduler(max_num_batched_tokens=16))
    loop.scheduler.add_request(make_request("a", 40, client_index=3))
    loop.dispatch()
    outputs = loop.fold()
    assert list(outputs) == [0]
    assert outputs[0].outputs == []
    assert outputs[0].scheduler_stats is not None
    assert outputs[0].scheduler_stats.kv_cache_usage == pytest.approx(1 / 64)


def test_statistics_count_prefix_hits_and_preemptions_as_increments() -> None:
    loop = Loop(make_scheduler())
    prompt = make_request("a", 40).all_token_ids
    loop.scheduler.add_request(make_request("a", prompt.copy()))
    loop.scheduler.add_request(make_request("b", prompt.copy()))
    loop.dispatch()
    first = loop.fold()[0].scheduler_stats
    loop.dispatch()
    second = loop.fold()[0].scheduler_stats
    assert first is not None
    assert second is not None
    assert (first.prefix_cache_queries, first.prefix_cache_hits) == (80, 32)
    assert (second.prefix_cache_queries, second.prefix_cache_hits) == (0, 0)


def test_requests_that_do_not_read_the_prefix_cache_do_not_count_as_its_queries() -> None:
    loop = Loop(make_scheduler())
    prompt = make_request("a", 40).all_token_ids
    loop.scheduler.add_request(make_request("a", prompt.copy()))
    unread = SamplingParams(max_tokens=8, prompt_logprobs=0, skip_reading_prefix_cache=True)
    loop.scheduler.add_request(make_request("b", prompt.copy(), params=unread))
    loop.dispatch()
    stats = loop.fold()[0].scheduler_stats
    assert stats is not None
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 0)


def test_tokens_after_the_first_stop_are_dropped_with_their_logprobs() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5, params=SamplingParams(max_tokens=9, eos_token_id=7, logprobs=0)))
    step = scheduler.schedule()
    table = LogprobsLists(
        np.array([[3], [7], [4]], dtype=np.int32),
        np.array([[-1.0], [-2.0], [-3.0]], dtype=np.float32),
        np.array([1, 1, 1], dtype=np.int32),
    )
    outputs = scheduler.update_from_output(step, ModelRunnerOutput(["a"], [[3, 7, 4]], logprobs={"a": table}))
    (output,) = outputs[0].outputs
    assert output.new_token_ids == [3, 7]
    assert output.new_logprobs is not None
    assert output.new_logprobs.logprobs.tolist() == [[-1.0], [-2.0]]


def test_prompt_logprobs_are_sent_once() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 3, params=SamplingParams(max_tokens=9, prompt_logprobs=0)))
    table = LogprobsLists(
        np.zeros((2, 1), dtype=np.int32), np.zeros((2, 1), dtype=np.float32), np.ones(2, dtype=np.int32)
    )
    given = []
    for _ in range(2):
        result = ModelRunnerOutput(["a"], [[3]], prompt_logprobs={"a": table})
        outputs = scheduler.update_from_output(scheduler.schedule(), result)
        given.append(outputs[0].outputs[0].new_prompt_logprobs is table)
        scheduler.reset_prefix_cache(reset_running_requests=True)
    assert given == [True, False]


@BOTH
def test_paused_for_new_work_lets_running_requests_finish(num_batches: int) -> None:
    loop = Loop(make_scheduler(), num_batches)
    loop.scheduler.add_request(make_request("a", 5))
    loop.turn()
    loop.scheduler.pause_state = PauseState.PAUSED_NEW
    loop.scheduler.add_request(make_request("b", 5))
    loop.run_to_end()
    assert loop.last_of("a").finish_reason is FinishReason.LENGTH
    assert "b" not in loop.outputs
    loop.scheduler.pause_state = PauseState.UNPAUSED
    loop.run_to_end()
    assert loop.last_of("b").finish_reason is FinishReason.LENGTH


@BOTH
def test_frozen_requests_continue_with_the_same_tokens(num_batches: int) -> None:
    loop = Loop(make_scheduler(), num_batches)
    request = make_request("a", 20)
    expected = continue_text(request.all_token_ids, 8)
    loop.scheduler.add_request(request)
    for _ in range(3):
        loop.turn()
    loop.scheduler.pause_state = PauseState.PAUSED_ALL
    loop.run_to_end()
    assert 0 < len(loop.tokens_of("a")) < 8
    loop.scheduler.pause_state = PauseState.UNPAUSED
    loop.run_to_end()
    assert loop.tokens_of("a") == expected


def test_a_cache_reset_waits_for_held_blocks_unless_it_may_preempt() -> None:
    loop = Loop(make_scheduler())
    prompt = make_request("a", 40).all_token_ids
    loop.scheduler.add_request(make_request("a", prompt.copy()))
    loop.turn()
    assert not loop.scheduler.reset_prefix_cache()
    loop.run_to_end()
    assert loop.scheduler.reset_prefix_cache()
    assert loop.scheduler.kv.get_computed_blocks(make_request("b", prompt)) == []


@BOTH
def test_a_forced_cache_reset_keeps_order_and_tokens(num_batches: int) -> None:
    loop = Loop(make_scheduler(), num_batches)
    requests = [make_request(name, 20) for name in ("a", "b", "c")]
    expected = {request.req_id: continue_text(request.all_token_ids, 8) for request in requests}
    for request in requests:
        loop.scheduler.add_request(request)
    for _ in range(3):
        loop.turn()
    assert loop.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert [request.req_id for request in loop.scheduler.waiting] == ["a", "b", "c"]
    assert loop.scheduler.kv.pool.num_cached_blocks == 0
    loop.run_to_end()
    assert {req_id: loop.tokens_of(req_id) for req_id in expected} == expected


@BOTH
def test_a_sliding_window_runs_long_requests_in_few_blocks(num_batches: int) -> None:
    from_window = make_kv(num_blocks=8, window=24, max_step_tokens=32)
    loop = Loop(make_scheduler(from_window, max_num_batched_tokens=32), num_batches)
    loop.runner.window = 24
    request = make_request("a", 100, params=SamplingParams(max_tokens=60))
    expected = continue_text(request.all_token_ids, 60)
    loop.scheduler.add_request(request)
    loop.run_to_end()
    assert loop.tokens_of("a") == expected
    assert loop.scheduler.check_integrity() is None


def test_an_idle_engine_has_no_work_and_no_usage() -> None:
    loop = Loop(make_scheduler())
    loop.scheduler.add_request(make_request("a", 40))
    loop.run_to_end()
    assert not loop.scheduler.has_work
    assert loop.scheduler.gauges() == (0, 0, 0, 0.0)
    assert loop.scheduler.kv.pool.num_cached_blocks == 2


@BOTH
def test_a_prefix_that_many_wait_for_is_computed_once(num_batches: int) -> None:
    loop = Loop(make_scheduler(make_kv(200), max_num_batched_tokens=64), num_batches)
    prefix = [(7 * i) % 89 for i in range(160)]
    prompts = {name: [*prefix, *[ord(name)] * 8] for name in "abcd"}
    for name, prompt in prompts.items():
        loop.scheduler.add_request(make_request(name, prompt, params=SamplingParams(max_tokens=4)))
    steps = loop.run_to_end()
    computed = {name: sum(step.num_scheduled_tokens.get(name, 0) for step in steps) for name in prompts}
    # Ten blocks of sixteen are shared; a request's last sampled token is not computed.
    assert computed == {"a": 168 + 3, "b": 8 + 3, "c": 8 + 3, "d": 8 + 3}
    for name, prompt in prompts.items():
        assert loop.tokens_of(name) == continue_text(prompt, 4)


def test_whoever_shares_nothing_goes_before_those_who_wait_for_a_prefix() -> None:
    loop = Loop(make_scheduler(make_kv(200), max_num_batched_tokens=64, long_prefill_token_threshold=48))
    prefix = [(7 * i) % 89 for i in range(160)]
    for name in "ab":
        loop.scheduler.add_request(make_request(name, [*prefix, ord(name)], params=SamplingParams(max_tokens=4)))
    loop.scheduler.add_request(make_request("other", 10, params=SamplingParams(max_tokens=4)))
    step = loop.turn()
    assert step is not None
    assert step.num_scheduled_tokens == {"a": 48, "other": 10}
    assert [request.req_id for request in loop.scheduler.waiting] == ["b"]


def test_a_request_that_waited_for_a_prefix_computes_it_when_the_other_is_gone() -> None:
    loop = Loop(make_scheduler(make_kv(200), max_num_batched_tokens=64))
    prefix = [(7 * i) % 89 for i in range(160)]
    for name in "ab":
        loop.scheduler.add_request(make_request(name, [*prefix, ord(name)], params=SamplingParams(max_tokens=4)))
    loop.turn()
    loop.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED)
    loop.run_to_end()
    assert loop.tokens_of("b") == continue_text([*prefix, ord("b")], 4)


@pytest.mark.parametrize(("policy", "waits"), [("priority", False), ("fcfs", True)])
def test_an_urgent_request_does_not_wait_for_the_prefix_of_a_less_urgent_one(policy: str, waits: bool) -> None:
    settings = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32, "scheduling_policy": policy}
    loop = Loop(make_scheduler(make_kv(200), **settings))
    prefix = [(7 * i) % 89 for i in range(160)]
    loop.scheduler.add_request(make_request("slow", [*prefix, 1], priority=5))
    loop.turn()
    loop.scheduler.add_request(make_request("urgent", [*prefix, 2], priority=0))
    step = loop.turn()
    assert step is not None
    assert ("urgent" not in step.num_scheduled_tokens) == waits


def test_a_request_that_may_not_read_the_cache_does_not_wait_for_it() -> None:
    loop = Loop(make_scheduler(make_kv(200), max_num_batched_tokens=64, long_prefill_token_threshold=32))
    prefix = [(7 * i) % 89 for i in range(160)]
    params = SamplingParams(max_tokens=4, skip_reading_prefix_cache=True)
    loop.scheduler.add_request(make_request("a", [*prefix, 1], params=SamplingParams(max_tokens=4)))
    loop.scheduler.add_request(make_request("b", [*prefix, 2], params=params))
    step = loop.turn()
    assert step is not None
    assert step.num_scheduled_tokens == {"a": 32, "b": 32}
