"""Times a few steps at start, so that the scheduler knows what a prompt's tokens cost the requests that decode."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from serve.sampling_params import SamplingParams
from serve.wire.step import ModelRunnerOutput, NewRequestData, SchedulerOutput, StepCost
from serve.worker.probe import first_step, last_step

_REQ_ID: Final = "step-timer"
_NUM_REPEATS: Final = 5
_MOST_TOKENS: Final = 64
_FEWEST_TOKENS: Final = 8
# Eight tokens that cost as little as one tell nothing: they do, or something else had the processor.
_LEAST_RISE: Final = 1.02
_CONTEXT: Final = 1024
# About what the steps that are timed may take together.
_SECONDS: Final = 0.4


class StepTimer:
    """Runs steps of one made-up request and times them. The worker holds no request before or after a measurement."""

    def __init__(
        self,
        run_step: Callable[[SchedulerOutput], ModelRunnerOutput],
        *,
        block_size: int,
        max_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """max_tokens is the longest request that context and cache have room for, from block 1 on; clock in seconds."""
        self._run_step = run_step
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._clock = clock

    def measure(self) -> StepCost | None:
        """Give what steps cost, from the steps' shortest times; None where there is no room, or a fit without sense.

        A step of one token gives the base; more tokens, first at the beginning of a request and then behind a long
        context, give the price of a token and of a key it looks at. A slow model is asked for fewer tokens and no
        context.
        """
        if self._max_tokens < 2 * _FEWEST_TOKENS:
            return None
        one = self._time(1)
        few = self._time(_FEWEST_TOKENS)
        per_token = max(few - one, 0.0) / (_FEWEST_TOKENS - 1)
        num_tokens, context = _FEWEST_TOKENS, 0
        most = min(_MOST_TOKENS, self._max_tokens)
        if _NUM_REPEATS * (one + per_token * most) < _SECONDS / 3:
            num_tokens = most
            few = self._time(num_tokens)
            per_token = max(few - one, 0.0) / (num_tokens - 1)
            context = min(_CONTEXT, self._max_tokens - num_tokens) // self._block_size * self._block_size
        if few < one * _LEAST_RISE:
            return None
        per_key = 0.0
        if context > 0:
            behind = self._time(num_tokens, context)
            per_key = max(behind - few, 0.0) / (num_tokens * context)
        return StepCost(base=max(one - per_token, 0.0), per_token=per_token, per_key=per_key)

    def _time(self, num_tokens: int, context: int = 0) -> float:
        """Give the seconds of a step with num_tokens tokens of a request, of which context tokens are computed."""
        best = float("inf")
        for _ in range(_NUM_REPEATS):
            length = context + num_tokens
            request = NewRequestData(
                req_id=_REQ_ID,
                token_ids=[0] * length,
                num_prompt_tokens=length,
                sampling_params=SamplingParams(temperature=0.0),
                block_ids=list(range(1, -(-length // self._block_size) + 1)),
                num_computed_tokens=context,
            )
            started = self._clock()
            self._run_step(first_step(request, num_tokens))
            best = min(best, self._clock() - started)
            self._run_step(last_step(_REQ_ID))
        return best
