"""What the worker asks of the model to learn the cost of a step, and what it makes of the times."""

from __future__ import annotations

import pytest

from serve.wire.step import ModelRunnerOutput, SchedulerOutput
from serve.worker.step_timer import StepTimer

BLOCK_SIZE = 16


class NotingRunner:
    """Notes the tokens, context and blocks of each step; a step takes 1 ms, and by default 0.1 ms a token."""

    def __init__(self, seconds_per_token: float = 1e-4) -> None:
        self.now = 0.0
        self._seconds_per_token = seconds_per_token
        self.steps: list[tuple[int, int]] = []
        self.held: set[str] = set()
        self.highest_block = 0

    def run(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self.now += 1e-3 + self._seconds_per_token * step.total_num_scheduled_tokens
        self.held -= set(step.finished_req_ids)
        for new in step.scheduled_new_reqs:
            assert new.req_id not in self.held
            self.held.add(new.req_id)
            self.steps.append((step.total_num_scheduled_tokens, new.num_computed_tokens))
            assert len(new.token_ids) <= len(new.block_ids) * BLOCK_SIZE
            self.highest_block = max(self.highest_block, *new.block_ids)
        return ModelRunnerOutput([], [])


@pytest.mark.parametrize("max_tokens", [16, 100, 5000])
def test_the_steps_stay_within_the_room_and_leave_no_request_behind(max_tokens: int) -> None:
    runner = NotingRunner()
    cost = StepTimer(runner.run, block_size=BLOCK_SIZE, max_tokens=max_tokens, clock=lambda: runner.now).measure()
    assert cost is not None
    assert (cost.base, cost.per_token, cost.per_key) == pytest.approx((1e-3, 1e-4, 0.0))
    assert runner.held == set()
    assert max(tokens + context for tokens, context in runner.steps) <= max_tokens
    assert runner.highest_block <= -(-max_tokens // BLOCK_SIZE)


def test_a_fast_model_is_timed_behind_a_context_too() -> None:
    runner = NotingRunner()
    StepTimer(runner.run, block_size=BLOCK_SIZE, max_tokens=5000, clock=lambda: runner.now).measure()
    assert sorted(set(runner.steps)) == [(1, 0), (8, 0), (64, 0), (64, 1024)]


def test_without_room_nothing_is_measured() -> None:
    runner = NotingRunner()
    assert StepTimer(runner.run, block_size=BLOCK_SIZE, max_tokens=15).measure() is None
    assert runner.steps == []


def test_times_without_sense_are_no_measurement() -> None:
    runner = NotingRunner(seconds_per_token=0.0)
    assert StepTimer(runner.run, block_size=BLOCK_SIZE, max_tokens=100, clock=lambda: runner.now).measure() is None
