"""Logprob tables of a request -> one dict of candidates per position."""

from __future__ import annotations

from serve.engine.outputs import Logprob, PositionLogprobs
from serve.renderers.tokenizer import Tokenizer
from serve.wire.frontend import LogprobsLists


class TokenTexts:
    """Text and bytes of single tokens, remembered; shared by all requests of a server.

    A token's text is its own bytes as UTF-8, U+FFFD for what is only part of a character: unlike a decode of one id
    it keeps the leading space of SentencePiece vocabularies, and the joined bytes of tokens spell the output.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cache: dict[int, tuple[str, bytes]] = {}

    def get(self, token_id: int) -> tuple[str, bytes]:
        """Give (text, bytes) of a token."""
        entry = self._cache.get(token_id)
        if entry is None:
            data = self._tokenizer.token_to_bytes(token_id)
            entry = self._cache[token_id] = (data.decode("utf-8", errors="replace"), data)
        return entry


class LogprobsProcessor:
    """Collects the logprobs of one choice between two hand-overs."""

    __slots__ = ("_positions", "_prompt", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._positions: list[PositionLogprobs] = []
        self._prompt: list[PositionLogprobs | None] | None = None

    def update(self, table: LogprobsLists) -> None:
        """Add the rows of newly sampled tokens."""
        self._positions.extend(to_positions(table, self._texts))

    def set_prompt(self, table: LogprobsLists) -> None:
        """Keep the prompt's rows; the first prompt token has none."""
        self._prompt = [None, *to_positions(table, self._texts)]

    def take(self, *, is_delta: bool) -> list[PositionLogprobs]:
        """Give the positions since the last call (DELTA), else all so far."""
        positions = self._positions
        if is_delta:
            self._positions = []
            return positions
        return positions.copy()

    def take_prompt(self) -> list[PositionLogprobs | None] | None:
        """Give the prompt's positions, once."""
        prompt, self._prompt = self._prompt, None
        return prompt


def to_positions(table: LogprobsLists, texts: TokenTexts) -> list[PositionLogprobs]:
    """Turn each row into candidates by id: the sampled token first, then best first.

    A sampled token that is also among the best has its place there as rank, so exactly k candidates have a rank of
    at most k, ties or not.
    """
    positions: list[PositionLogprobs] = []
    rows = zip(table.token_ids.tolist(), table.logprobs.tolist(), table.sampled_ranks.tolist(), strict=True)
    for token_ids, logprobs, sampled_rank in rows:
        text, data = texts.get(token_ids[0])
        position = {token_ids[0]: Logprob(logprobs[0], sampled_rank, text, data)}
        for rank in range(1, len(token_ids)):
            token_id = token_ids[rank]
            known = position.get(token_id)
            if known is not None:
                known.rank = rank
                continue
            text, data = texts.get(token_id)
            position[token_id] = Logprob(logprobs[rank], rank, text, data)
        positions.append(position)
    return positions
