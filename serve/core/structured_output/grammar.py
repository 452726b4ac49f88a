"""The seam between constraints and the library that compiles them; plain Python, so that tests can stand in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serve.sampling_params import StructuredOutputs

# Allowed tokens of one request, [mask_words] uint32, bit set = allowed, lowest bit first.
MaskRow = NDArray[np.uint32]


class Grammar(Protocol):
    """Where one answer stands in its grammar. Belongs to one thread at a time."""

    @property
    def is_finished(self) -> bool:
        """True when the text is complete and nothing can follow it."""

    def copy(self) -> Grammar:
        """Give an independent grammar in the same place."""

    def fill(self, row: MaskRow) -> None:
        """Write the tokens that may come next; end tokens among them when the text may end here.

        Raises InvalidRequest when there is none, or when the grammar turned out to be too complex.
        """

    def accept(self, token_id: int) -> bool:
        """Move over a token; False when the grammar does not allow it: then it must not be used any more.

        Raises InvalidRequest when the grammar turned out to be too complex.
        """

    def accept_text(self, text: bytes) -> bool:
        """Move over the rest of a token; False, and no move, when the grammar does not allow it."""

    def count_valid(self, token_ids: Sequence[int]) -> int:
        """Give how many of the tokens may follow one after the other; no move."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the tokens accepted last."""


class GrammarBackend(Protocol):
    """Compiles constraints for one vocabulary. compile may be called from several threads at once.

    mask_words is the length of a mask row. end_token_ids are the ids below 32 * mask_words that end an answer.
    """

    mask_words: int
    end_token_ids: tuple[int, ...]

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """Give the grammar of a constraint, before its first token. Raises InvalidRequest saying what is wrong."""


def allow_token(row: MaskRow, token_id: int) -> None:
    """Set the bit of a token; an id beyond the row has none."""
    if token_id >> 5 < len(row):
        row[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def forbid_token(row: MaskRow, token_id: int) -> None:
    """Clear the bit of a token; an id beyond the row has none."""
    if token_id >> 5 < len(row):
        row[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
