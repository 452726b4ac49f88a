"""Logprobs of the engine client -> the shapes of the chat and the completions API. JSON has no infinity: -9999.0."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from serve.engine.outputs import Logprob, PositionLogprobs
from serve.renderers.decode_stream import Utf8Stream

Json = object
FLOOR = -9999.0


def chat_logprobs(
    positions: list[PositionLogprobs],
    token_ids: list[int],
    *,
    top: int,
    as_ids: bool,
    chosen_ids: Collection[int] | None = None,
) -> dict[str, list[dict[str, Json]]]:
    """Give the chat API's block: an entry per token with `top` candidates, best first (-1 = all), or the chosen ids."""
    content: list[dict[str, Json]] = []
    for position, token_id in zip(positions, token_ids, strict=True):
        entry = _chat_entry(token_id, position[token_id], as_ids)
        best = _chosen(position, chosen_ids) if chosen_ids is not None else _best(position, top)
        entry["top_logprobs"] = [_chat_entry(i, candidate, as_ids) for i, candidate in best]
        content.append(entry)
    return {"content": content}


def _best(position: PositionLogprobs, top: int) -> list[tuple[int, Logprob]]:
    best = sorted(((i, c) for i, c in position.items() if top < 0 or c.rank <= top), key=lambda item: item[1].rank)
    return best[: top if top >= 0 else None]


def _chosen(position: PositionLogprobs, chosen_ids: Collection[int]) -> list[tuple[int, Logprob]]:
    return sorted(((i, position[i]) for i in chosen_ids), key=lambda item: -item[1].logprob)


def _chat_entry(token_id: int, candidate: Logprob, as_ids: bool) -> dict[str, Json]:
    return {
        "token": f"token_id:{token_id}" if as_ids else candidate.decoded,
        "logprob": max(candidate.logprob, FLOOR),
        "bytes": list(candidate.token_bytes),
    }


@dataclasses.dataclass(slots=True)
class CompletionLogprobs:
    """The completions API's four parallel lists; they line up with the returned text.

    A character split over tokens counts for the token that completes it, so the joined tokens spell the text.
    Between two hand-overs of a stream the offset and an incomplete character are carried on.
    """

    as_ids: bool
    offset: int = 0
    _decoder: Utf8Stream = dataclasses.field(default_factory=Utf8Stream)

    def block(
        self, positions: list[PositionLogprobs | None], token_ids: list[int], first: bytes = b""
    ) -> dict[str, Json]:
        """Give the block for these tokens and move on; first holds the bytes of a token without candidates."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for position, token_id in zip(positions, token_ids, strict=True):
            candidate = position[token_id] if position is not None else None
            text = self._decoder.decode(candidate.token_bytes if candidate is not None else first)
            tokens.append(f"token_id:{token_id}" if self.as_ids else text)
            offsets.append(self.offset)
            self.offset += len(text)
            values.append(None if candidate is None else max(candidate.logprob, FLOOR))
            tops.append(None if position is None else self._tops(position))
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _tops(self, position: PositionLogprobs) -> dict[str, float]:
        tops: dict[str, float] = {}
        for token_id, candidate in position.items():
            name = f"token_id:{token_id}" if self.as_ids else candidate.decoded
            tops.setdefault(name, max(candidate.logprob, FLOOR))
        return tops


def prompt_logprobs(positions: list[PositionLogprobs | None]) -> list[dict[str, Json] | None]:
    """Give the list over the prompt: null first, then a map from token id to its candidates' values."""
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": max(candidate.logprob, FLOOR),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded,
            }
            for token_id, candidate in position.items()
        }
        for position in positions
    ]
