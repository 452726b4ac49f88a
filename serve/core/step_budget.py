"""Phase 5 of 11: what one step may still take on, in tokens and requests."""

from __future__ import annotations


class StepBudget:
    """Tokens left in a step. max_chunk caps the tokens of one request in a step."""

    __slots__ = ("max_chunk", "num_tokens")

    def __init__(self, num_tokens: int, *, long_prefill_token_threshold: int = 0) -> None:
        self.num_tokens = num_tokens
        self.max_chunk = long_prefill_token_threshold or num_tokens

    def cap(self, num_wanted: int) -> int:
        """Give how many of the wanted tokens of a request fit."""
        return min(num_wanted, self.max_chunk, self.num_tokens)

    def take(self, num_tokens: int) -> None:
        """Spend tokens on a request."""
        assert 0 < num_tokens <= self.num_tokens, f"{num_tokens} tokens do not fit in a budget of {self.num_tokens}"
        self.num_tokens -= num_tokens

    def give_back(self, num_tokens: int) -> None:
        """Return the tokens of a request that was taken out of the step again."""
        self.num_tokens += num_tokens
