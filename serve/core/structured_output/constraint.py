"""What one request may still say, and how it ends when nothing is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from serve.core.structured_output.grammar import MaskRow, forbid_token
from serve.core.structured_output.reasoning_gate import ReasoningGate
from serve.errors import InvalidRequest
from serve.sampling_params import SamplingParams

# Processor time of the loop that one answer may take: ambiguous grammars cost more with each token, and all wait.
FOLLOW_SECONDS: Final = 0.5
FOLLOW_SECONDS_PER_TOKEN: Final = 0.02


class Constraint:
    """The restriction of one request: masks before each of its tokens, and the tokens themselves.

    failure is set when the request must end with that error. ends_now is set when only an end token could follow but
    the request forbids it (min_tokens, ignore_eos): what is sampled next is dropped, and the answer is complete.
    A grammar that takes more time than an answer of its length may is a failure too.
    """

    __slots__ = (
        *("_clock", "_end_token_ids", "_forbids_end", "_gate", "_min_tokens", "_seconds_left"),
        *("ends_now", "failure"),
    )

    def __init__(
        self,
        params: SamplingParams,
        gate: ReasoningGate,
        end_token_ids: tuple[int, ...],
        *,
        can_end: bool = True,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """end_token_ids are those that masks may hold; can_end is False when no model samples them."""
        self._clock = clock
        self._seconds_left = FOLLOW_SECONDS
        self._gate = gate
        self._end_token_ids = end_token_ids
        self._forbids_end = params.ignore_eos or not can_end
        self._min_tokens = params.min_tokens
        self.failure: str | None = None
        self.ends_now = False

    @property
    def is_finished(self) -> bool:
        """True when the text is complete and nothing can follow it."""
        return self._gate.is_finished

    def may_restrict(self, num_pending: int) -> bool:
        """Tell whether the token after num_pending more unknown ones may be restricted."""
        return self._gate.may_restrict(num_pending)

    def fill(self, row: MaskRow, num_output_tokens: int) -> bool:
        """Write the tokens that may come next, after num_output_tokens of output; False when all may.

        A grammar that fails here is noted in failure; the row then forbids nothing.
        """
        started = self._clock()
        try:
            is_restricted = self._gate.fill(row)
        except InvalidRequest as error:
            self.failure = f"invalid_request: {error}"
            return False
        if not self._has_time_left(started) or not is_restricted:
            return False
        if self._forbids_end or num_output_tokens < self._min_tokens:
            for token_id in self._end_token_ids:
                forbid_token(row, token_id)
            if not row.any():
                self.ends_now = True
                return False
        return True

    def accept(self, token_id: int) -> bool:
        """Move over a sampled token; False, with failure set, when it is not allowed."""
        started = self._clock()
        try:
            is_accepted = self._gate.accept(token_id)
        except InvalidRequest as error:
            self.failure = f"invalid_request: {error}"
            return False
        if not is_accepted:
            self.failure = "grammar_error: the sampled token does not fit the grammar of this request"
            return False
        self._seconds_left += FOLLOW_SECONDS_PER_TOKEN
        return self.is_finished or self._has_time_left(started)

    def _has_time_left(self, started: float) -> bool:
        """Count the time since started; False, with failure set, when the answer has used up what it may take."""
        self._seconds_left -= self._clock() - started
        if self._seconds_left > 0:
            return True
        self.failure = (
            "invalid_request: the constraint takes too long to follow: more than "
            f"{FOLLOW_SECONDS:g} s and {FOLLOW_SECONDS_PER_TOKEN:g} s a token; use a less ambiguous one"
        )
        return False
