"""Prompts beside requests that decode: what a step may cost, by the measured cost of its tokens."""

from __future__ import annotations

import pytest

from serve.config import SchedulerConfig
from serve.core.step_budget import MAX_SLOWDOWN, Pace, describe_pace, step_tokens
from serve.sampling_params import SamplingParams
from serve.wire.step import SchedulerOutput, StepCost
from tests.unit.core.scripted import Loop, continue_text, make_kv, make_request, make_scheduler

# 2 ms and 0.5 ms a token; behind 1000 keys twice that.
COST = StepCost(base=2e-3, per_token=5e-4, per_key=5e-7)
FLAT = StepCost(base=2e-3, per_token=5e-4, per_key=0.0)


def paced_loop(cost: StepCost | None, num_decoding: int) -> Loop:
    """Give a loop in which requests decode and nothing is in flight."""
    kv = make_kv(300, max_model_len=2048, max_step_tokens=512)
    scheduler = make_scheduler(
        kv, max_model_len=2048, cost=cost, max_num_batched_tokens=512, long_prefill_token_threshold=None
    )
    loop = Loop(scheduler)
    for index in range(num_decoding):
        scheduler.add_request(make_request(f"decode{index}", 5, params=SamplingParams(max_tokens=500)))
    loop.turn()
    return loop


def prompt_steps(loop: Loop, req_id: str, length: int) -> list[SchedulerOutput]:
    """Add a prompt and give the steps up to its end."""
    loop.scheduler.add_request(make_request(req_id, length, params=SamplingParams(max_tokens=1)))
    steps = []
    while req_id not in loop.outputs:
        step = loop.turn()
        assert step is not None
        steps.append(step)
    return steps


@pytest.mark.parametrize("num_decoding", [1, 4, 12])
def test_a_step_with_decodes_costs_at_most_the_slowdown_of_one_without_prompts(num_decoding: int) -> None:
    loop = paced_loop(FLAT, num_decoding)
    decode_seconds = FLAT.base + num_decoding * FLAT.per_token
    steps = prompt_steps(loop, "prompt", 600)
    seconds = [FLAT.base + step.total_num_scheduled_tokens * FLAT.per_token for step in steps]
    assert max(seconds) <= MAX_SLOWDOWN * decode_seconds * (1 + 1e-9)
    # And no token fewer than that: one more would be too many.
    assert all(s + FLAT.per_token > MAX_SLOWDOWN * decode_seconds for s in seconds[:-1])
    assert all(step.num_scheduled_tokens[f"decode{i}"] == 1 for step in steps for i in range(num_decoding))


def test_tokens_behind_a_long_context_count_for_more() -> None:
    steps = prompt_steps(paced_loop(COST, 12), "prompt", 1200)
    counts = [step.num_scheduled_tokens["prompt"] for step in steps[:-1]]
    assert counts == sorted(counts, reverse=True)
    # Twice the price behind 1000 keys.
    assert 2 * counts[-1] - 2 <= counts[0] <= 2 * counts[-1] + 6


def test_prompts_share_the_time_of_a_step_in_their_order() -> None:
    loop = paced_loop(FLAT, 4)
    for req_id in ("first", "second"):
        loop.scheduler.add_request(make_request(req_id, 9, params=SamplingParams(max_tokens=4)))
    step = loop.turn()
    assert step is not None
    # 4 ms without prompts, so 6 ms for prompts: 12 tokens.
    assert [step.num_scheduled_tokens[name] for name in ("first", "second")] == [9, 3]


def test_without_decodes_a_prompt_takes_the_whole_chunk() -> None:
    steps = prompt_steps(paced_loop(FLAT, 0), "prompt", 600)
    assert [step.num_scheduled_tokens["prompt"] for step in steps] == [384, 216]


def test_a_prompt_moves_on_even_where_no_time_is_left_for_it() -> None:
    dear = StepCost(base=0.0, per_token=1e-3, per_key=1.0)
    steps = prompt_steps(paced_loop(dear, 1), "prompt", 40)
    assert all(step.num_scheduled_tokens["prompt"] > 0 for step in steps)


def test_a_paced_prompt_gives_the_same_tokens() -> None:
    loop = paced_loop(COST, 3)
    prompt = make_request("prompt", 300).all_token_ids
    prompt_steps(loop, "prompt", 300)
    loop.run_to_end()
    assert loop.tokens_of("prompt") == continue_text(prompt, 1)
    expected = continue_text(make_request("decode1", 5).all_token_ids, 500)
    assert loop.tokens_of("decode1") == expected


def test_a_slow_model_gets_smaller_steps_and_given_settings_stay() -> None:
    slow = StepCost(base=0.1, per_token=5e-3, per_key=0.0)
    open_config = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=128)
    assert step_tokens(open_config, None) == (512, 384)
    assert step_tokens(open_config, FLAT) == (512, 384)
    assert step_tokens(open_config, slow) == (200, 150)
    # Each running request needs its token.
    assert step_tokens(open_config, StepCost(1.0, 0.1, 0.0)) == (128, 96)
    given = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=128, long_prefill_token_threshold=0)
    assert step_tokens(given, slow) == (512, 0)


def test_the_choice_is_said_in_words() -> None:
    text = describe_pace(SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=128), FLAT)
    assert text.startswith("steps: up to 512 tokens, 384 of one prompt;")
    # 1.5 x (2 ms + n x 0.5 ms) at 0.5 ms a token.
    assert "7 beside 1, 18 beside 8, 54 beside 32" in text
    assert "2.00 ms + 0.500 ms a token" in text


def test_a_cost_that_measured_as_nothing_limits_nothing() -> None:
    assert Pace(StepCost(0.0, 0.0, 0.0), [3]).cap(400, 0) == 400
