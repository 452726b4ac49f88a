"""Phase 5 of 11: what one step may still take on, in tokens and in time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from serve.config import SchedulerConfig
from serve.wire.step import StepCost

# A step with prompt tokens may take this many times what it takes without them. Below the 3 that is promised, because
# a step is also at the mercy of the machine.
MAX_SLOWDOWN: Final = 2.5
# A step of nothing but prompts: whoever arrives waits for its end.
MAX_STEP_SECONDS: Final = 1.0
_FEWEST_TOKENS: Final = 4
_EPSILON: Final = 1e-9  # so that what fits exactly fits
_UNLIMITED: Final = float("inf")


class StepBudget:
    """Tokens left in a step. max_chunk caps the tokens of one request in a step.

    pace limits the time of prompt tokens, once it is set.
    """

    __slots__ = ("max_chunk", "num_tokens", "pace")

    def __init__(self, num_tokens: int, *, long_prefill_token_threshold: int = 0) -> None:
        self.num_tokens = num_tokens
        self.max_chunk = long_prefill_token_threshold or num_tokens
        self.pace: Pace | None = None

    def cap(self, num_wanted: int, position: int = 0) -> int:
        """Give how many of the wanted tokens of a request fit; position is the first one's index in the request."""
        num_tokens = min(num_wanted, self.max_chunk, self.num_tokens)
        return num_tokens if self.pace is None else self.pace.cap(num_tokens, position)

    def take(self, num_tokens: int) -> None:
        """Spend tokens on a request."""
        assert 0 < num_tokens <= self.num_tokens, f"{num_tokens} tokens do not fit in a budget of {self.num_tokens}"
        self.num_tokens -= num_tokens

    def give_back(self, num_tokens: int) -> None:
        """Return the tokens of a request that was taken out of the step again; the time it took is not returned."""
        self.num_tokens += num_tokens


class Pace:
    """Seconds that prompt tokens may still add to a step; unlimited when no request decodes in it."""

    def __init__(self, cost: StepCost, decode_positions: Iterable[int]) -> None:
        """decode_positions are the positions of the single tokens that the decoding requests compute."""
        self._cost = cost
        seconds = [cost.token_seconds(position) for position in decode_positions]
        self._left = (MAX_SLOWDOWN - 1) * (cost.base + sum(seconds)) if seconds else _UNLIMITED
        self._is_unused = True

    def cap(self, num_tokens: int, position: int) -> int:
        """Give how many tokens from a position on there is time for. The first request of a step gets a few anyhow."""
        if self._left == _UNLIMITED:
            return num_tokens
        # The most n with n * token_seconds(position + n) <= left, all tokens at the price of the last.
        price, per_key, left = self._cost.token_seconds(position), self._cost.per_key, self._left * (1 + _EPSILON)
        root = math.sqrt(price * price + 4 * per_key * left) + price
        fits = int(2 * left / root) if root > 0.0 else num_tokens
        return min(num_tokens, max(fits, _FEWEST_TOKENS) if self._is_unused else fits)

    def take(self, num_tokens: int, position: int) -> None:
        """Spend the time of the tokens of one request."""
        self._left = max(0.0, self._left - num_tokens * self._cost.token_seconds(position + num_tokens))
        self._is_unused = False


def step_tokens(config: SchedulerConfig, cost: StepCost | None) -> tuple[int, int]:
    """Give the tokens of a step and the most of one request in it.

    Given settings are taken as they are. A budget that nobody gave is lowered for a slow model, and a cap that nobody
    gave leaves a quarter of the step to others.
    """
    budget, seqs, chunk = config.max_num_batched_tokens, config.max_num_seqs, config.long_prefill_token_threshold
    assert budget is not None, "max_num_batched_tokens must be resolved"
    assert seqs is not None, "max_num_seqs must be resolved"
    if chunk is None and cost is not None and cost.per_token > 0.0:
        budget = min(budget, max(seqs, int(MAX_STEP_SECONDS / cost.per_token)))
    return budget, budget * 3 // 4 if chunk is None else chunk


def describe_pace(config: SchedulerConfig, cost: StepCost | None) -> str:
    """Say for people how large steps are and why."""
    budget, chunk = step_tokens(config, cost)
    text = f"steps: up to {budget} tokens, {chunk or budget} of one prompt"
    if cost is None:
        return text
    beside = (f"{Pace(cost, [0] * count).cap(chunk, 0)} beside {count}" for count in (1, 8, 32))
    return (
        f"{text}; while streams run, prompts advance by so many tokens a step: {', '.join(beside)}, so that no stream "
        f"slows down more than {MAX_SLOWDOWN} times (measured: a step takes {cost.base * 1e3:.2f} ms + "
        f"{cost.per_token * 1e3:.3f} ms a token)"
    )
