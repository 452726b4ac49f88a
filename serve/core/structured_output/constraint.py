"""What one request may still say, and how it ends when nothing is left."""

from __future__ import annotations

from serve.core.structured_output.grammar import MaskRow, forbid_token
from serve.core.structured_output.reasoning_gate import ReasoningGate
from serve.errors import InvalidRequest
from serve.sampling_params import SamplingParams


class Constraint:
    """The restriction of one request: masks before each of its tokens, and the tokens themselves.

    failure is set when the request must end with that error. ends_now is set when only an end token could follow but
    the request forbids it (min_tokens, ignore_eos): what is sampled next is dropped, and the answer is complete.
    """

    __slots__ = ("_end_token_ids", "_forbids_end", "_gate", "_min_tokens", "ends_now", "failure")

    def __init__(
        self, params: SamplingParams, gate: ReasoningGate, end_token_ids: tuple[int, ...], *, can_end: bool = True
    ) -> None:
        """end_token_ids are those that masks may hold; can_end is False when no model samples them."""
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
        try:
            is_restricted = self._gate.fill(row)
        except InvalidRequest as error:
            self.failure = f"invalid_request: {error}"
            return False
        if not is_restricted:
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
        try:
            if self._gate.accept(token_id):
                return True
        except InvalidRequest as error:
            self.failure = f"invalid_request: {error}"
            return False
        self.failure = "grammar_error: the sampled token does not fit the grammar of this request"
        return False
