"""Thinking before a constraint: the grammar binds from the end mark on, and a budget can force that mark.

The mark is looked for in the bytes of the tokens, so it may be one special token or any tokens that spell it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from serve.core.structured_output.grammar import Grammar, MaskRow, allow_token
from serve.sampling_params import ReasoningBounds


class _State(enum.Enum):
    """UNDECIDED: the next token tells whether the answer thinks first. OPEN: the grammar binds."""

    UNDECIDED = enum.auto()
    THINKING = enum.auto()
    OPEN = enum.auto()


class ReasoningGate:
    """Restricts one answer: thinking first, if there are bounds, then the grammar, if there is one.

    tokens are the bytes of the vocabulary.
    """

    __slots__ = ("_bounds", "_grammar", "_num_forced", "_num_thinking", "_state", "_tail", "_tokens")

    def __init__(self, bounds: ReasoningBounds | None, grammar: Grammar | None, tokens: Sequence[bytes]) -> None:
        self._bounds = bounds
        self._grammar = grammar
        self._tokens = tokens
        self._num_thinking = 0
        self._num_forced = 0
        # The end of the thinking so far, where a mark may have begun.
        self._tail = b""
        if bounds is None:
            self._state = _State.OPEN
        else:
            self._state = _State.THINKING if bounds.start_token_id is None else _State.UNDECIDED

    @property
    def is_finished(self) -> bool:
        """True when the text is complete and nothing can follow it."""
        return self._state is _State.OPEN and self._grammar is not None and self._grammar.is_finished

    def may_restrict(self, num_pending: int) -> bool:
        """Tell whether the token after num_pending more unknown ones may be restricted."""
        bounds = self._bounds
        if self._state is _State.OPEN or bounds is None:
            return self._grammar is not None
        if self._state is _State.UNDECIDED:
            # The first pending token may open the thinking; the others count.
            return self._grammar is not None or (bounds.max_tokens is not None and num_pending > bounds.max_tokens)
        return (self._grammar is not None and num_pending > 0) or self._is_spent(num_pending)

    def fill(self, row: MaskRow) -> bool:
        """Write the tokens that may come next; False, with any content, when all may. Errors as Grammar.fill."""
        bounds = self._bounds
        if bounds is not None and self._state is _State.THINKING:
            if not self._is_spent(0):
                return False
            row[:] = 0
            allow_token(row, bounds.end_token_ids[self._num_forced])
            return True
        if self._grammar is None:
            return False
        self._grammar.fill(row)
        if bounds is not None and self._state is _State.UNDECIDED:
            assert bounds.start_token_id is not None, "an answer that always thinks is never undecided"
            allow_token(row, bounds.start_token_id)
        return True

    def accept(self, token_id: int) -> bool:
        """Move over a sampled token; False when the grammar does not allow it."""
        if self._state is _State.THINKING:
            return self._think(token_id)
        if self._state is _State.UNDECIDED:
            assert self._bounds is not None, "only bounds leave an answer undecided"
            if token_id == self._bounds.start_token_id:
                self._state = _State.THINKING
                return True
            self._state = _State.OPEN
        return self._grammar is None or self._grammar.accept(token_id)

    def _is_spent(self, num_pending: int) -> bool:
        """True when the budget leaves no further token of thinking after num_pending more."""
        bounds = self._bounds
        if bounds is None or bounds.max_tokens is None or not bounds.end_token_ids:
            return False
        return self._num_thinking + num_pending >= bounds.max_tokens

    def _think(self, token_id: int) -> bool:
        bounds = self._bounds
        assert bounds is not None, "only bounds make an answer think"
        is_forced = self._is_spent(0)
        self._num_thinking += 1
        mark = bounds.end_text.encode()
        text = self._tail + (self._tokens[token_id] if token_id < len(self._tokens) else b"")
        start = text.find(mark)
        if start < 0:
            self._tail = text[len(text) - len(mark) + 1 :] if len(text) >= len(mark) else text
            self._num_forced += is_forced
            if is_forced and self._num_forced == len(bounds.end_token_ids):
                self._state = _State.OPEN
            return True
        self._state = _State.OPEN
        rest = text[start + len(mark) :]
        return not rest or self._grammar is None or self._grammar.accept_text(rest) or not rest.strip()
