"""Phase 11 of 11: the text of one choice as it grows, the stop strings in it, and what must wait to be shown.

The text withheld is exactly the longest suffix that begins some stop string, so no part of a stop string is ever
shown and nothing else is delayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from serve.renderers.tokenizer import Tokenizer
from serve.sampling_params import OutputKind, SamplingParams


class Detokenizer(Protocol):
    """Turns token ids into text for one choice."""

    def update(self, token_ids: Sequence[int], *, ends_on_stop_token: bool) -> str | None:
        """Take new ids; give the stop string they complete, if any."""

    def take(self, *, is_final: bool) -> str:
        """Give the text to hand over: what is new for DELTA, all so far otherwise."""


class NoText:
    """For requests that want ids only."""

    def update(self, token_ids: Sequence[int], *, ends_on_stop_token: bool) -> str | None:
        return None

    def take(self, *, is_final: bool) -> str:
        return ""


class IncrementalDetokenizer:
    """Decodes token by token and looks for stop strings in the new characters."""

    __slots__ = (
        "_held",
        "_include_stop",
        "_is_delta",
        "_matcher",
        "_min_tokens",
        "_num_tokens",
        "_pieces",
        "_step",
        "_stop_ids",
    )

    def __init__(self, step: Callable[[int], str | None], params: SamplingParams) -> None:
        """step takes one id and gives the text that it completes, if any."""
        self._step = step
        self._pieces: list[str] = []
        self._held = ""
        self._matcher = StopMatcher(params.stop) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._stop_ids = None if params.structured_outputs is None else frozenset(params.all_stop_token_ids)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._is_delta = params.output_kind == OutputKind.DELTA

    def update(self, token_ids: Sequence[int], *, ends_on_stop_token: bool) -> str | None:
        if ends_on_stop_token and not self._include_stop and not self._ends_by_grammar(token_ids):
            token_ids = token_ids[:-1]
        step, matcher = self._step, self._matcher
        for token_id in token_ids:
            text = step(token_id)
            self._num_tokens += 1
            if not text:
                continue
            if matcher is None:
                self._pieces.append(text)
                continue
            stop = self._search(matcher, text)
            if stop is not None:
                return stop
        return None

    def _ends_by_grammar(self, token_ids: Sequence[int]) -> bool:
        """Tell whether the last token is the answer's own: a complete grammar stops without a stop token."""
        return self._stop_ids is not None and len(token_ids) > 0 and token_ids[-1] not in self._stop_ids

    def take(self, *, is_final: bool) -> str:
        pieces = self._pieces
        if is_final and self._held:
            pieces.append(self._held)
            self._held = ""
        text = pieces[0] if len(pieces) == 1 else "".join(pieces)
        if self._is_delta:
            pieces.clear()
        elif len(pieces) > 1:
            pieces[:] = [text]
        return text

    def _search(self, matcher: StopMatcher, text: str) -> str | None:
        """Release what can no longer be part of a stop string; cut at a match that min_tokens allows."""
        match = matcher.feed(text, counts=self._num_tokens > self._min_tokens)
        window = self._held + text
        if match is not None:
            end, stop = match
            cut = len(self._held) + end - (0 if self._include_stop else len(stop))
            self._pieces.append(window[:cut])
            self._held = ""
            return stop
        num_held = 0 if self._include_stop else matcher.longest_prefix
        cut = len(window) - num_held
        self._pieces.append(window[:cut])
        self._held = window[cut:]
        return None


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, one automaton a string (Knuth, Morris, Pratt 1977).

    The first string to be completed wins; of several completed by the same character, the one listed first. So the
    result does not depend on how the text was cut into pieces, and the work is linear in the text.
    """

    __slots__ = ("_borders", "_first", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._states = [0] * len(stops)  # length of the longest prefix of each string that the text ends with
        self._first = frozenset(stop[0] for stop in stops)

    @property
    def longest_prefix(self) -> int:
        """Number of characters at the end of the text that begin a stop string."""
        return max(self._states)

    def feed(self, text: str, *, counts: bool) -> tuple[int, str] | None:
        """Take the next piece of text; give the match's end in it and the string. counts False: matches pass by."""
        states = self._states
        if not any(states) and self._first.isdisjoint(text):
            return None
        for position, character in enumerate(text):
            stop = self._step(character)
            if stop is not None and counts:
                return position + 1, stop
        return None

    def _step(self, character: str) -> str | None:
        """Advance every automaton by one character; give the first listed string that it completes."""
        states = self._states
        completed = None
        for index, stop in enumerate(self._stops):
            borders, state = self._borders[index], states[index]
            while state and stop[state] != character:
                state = borders[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                completed = completed or stop
                state = borders[state - 1]
            states[index] = state
        return completed


def _borders(pattern: str) -> list[int]:
    """Give for each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for position in range(1, len(pattern)):
        while length and pattern[length] != pattern[position]:
            length = borders[length - 1]
        if pattern[length] == pattern[position]:
            length += 1
        borders[position] = length
    return borders


def new_detokenizer(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams) -> Detokenizer:
    """Give the detokenizer of one choice, primed with its prompt."""
    if not params.detokenize:
        return NoText()
    stream = tokenizer.new_decode_stream(
        prompt_token_ids,
        skip_special_tokens=params.skip_special_tokens,
        visible_token_ids=params.visible_token_ids,
    )
    return IncrementalDetokenizer(stream.step, params)
