"""Repetition, frequency and presence penalties over the tokens a request has seen."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

_FIRST_CAPACITY: Final = 64
# A repetition penalty near 0 multiplies without bound; logits stay small enough to be scaled by a temperature.
_LOGIT_LIMIT: Final = np.float32(1e30)


class PenaltyState:
    """The distinct tokens of one request and how often each was generated, kept up to date token by token.

    ids are distinct; counts are occurrences in the output, 0 for a token that only the prompt holds.
    """

    __slots__ = ("_counts", "_factor", "_id_to_slot", "_ids", "_length", "frequency", "presence", "repetition")

    def __init__(
        self,
        token_ids: NDArray[np.int32],
        num_prompt_tokens: int,
        *,
        repetition: float,
        frequency: float,
        presence: float,
    ) -> None:
        """Count the known tokens; those from num_prompt_tokens on are output."""
        self.repetition = repetition
        self._factor = max(np.float32(repetition), np.finfo(np.float32).tiny)
        self.frequency = frequency
        self.presence = presence
        ids = np.unique(token_ids)
        counts = np.zeros(len(ids), dtype=np.float32)
        np.add.at(counts, np.searchsorted(ids, token_ids[num_prompt_tokens:]), np.float32(1))
        self._length = len(ids)
        capacity = max(_FIRST_CAPACITY, 2 * len(ids))
        self._ids = np.resize(ids.astype(np.intp), capacity)
        self._counts = np.resize(counts, capacity)
        self._id_to_slot = {token_id: slot for slot, token_id in enumerate(ids.tolist())}

    def append(self, token_id: int) -> None:
        """Count one generated token."""
        slot = self._id_to_slot.get(token_id)
        if slot is not None:
            self._counts[slot] += 1
            return
        slot = self._length
        if slot == len(self._ids):
            self._ids = np.resize(self._ids, 2 * slot)
            self._counts = np.resize(self._counts, 2 * slot)
        self._ids[slot] = token_id
        self._counts[slot] = 1
        self._id_to_slot[token_id] = slot
        self._length = slot + 1

    def apply(self, row: NDArray[np.float32]) -> None:
        """Penalise one row of logits in place.

        Tokens seen in prompt or output: positive logits are divided by the repetition penalty, others multiplied.
        Tokens seen in the output: minus frequency times count, minus presence.
        """
        ids = self._ids[: self._length]
        counts = self._counts[: self._length]
        values = row[ids]
        if self.repetition != 1.0:
            with np.errstate(over="ignore"):
                values = np.where(values > 0, values / self._factor, values * self._factor)
        if self.frequency != 0.0 or self.presence != 0.0:
            values -= np.float32(self.frequency) * counts + np.float32(self.presence) * (counts > 0)
        # Masked tokens are -inf and stay so; only the upper end can leave the range of float32.
        row[ids] = np.minimum(values, _LOGIT_LIMIT)
