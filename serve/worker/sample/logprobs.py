"""Logprob tables: the sampled token's value and rank beside the k best."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve.wire.frontend import LogprobsLists
from serve.worker.sample.draw import top_ids

# Prompt rows that are turned into logits at once: bounds the memory of a long prompt at a large vocabulary.
_ROWS_BYTES: Final = 64 << 20

Table = NDArray[np.float32]


def to_values(logits: Tensor, *, as_logprobs: bool) -> Table:
    """Give logits [n, vocab_size] as the values to report: natural logs of softmax, or the logits themselves."""
    values = torch.log_softmax(logits, dim=-1) if as_logprobs else logits
    table: Table = values.numpy()
    return table


def gather_logprobs(values: Table, token_ids: NDArray[np.int32], num_logprobs: int) -> LogprobsLists:
    """Gather each row's own token, then its num_logprobs best, best first.

    values     [n, vocab_size] float32
    token_ids  [n] int32
    A token's rank is the number of entries with a value at or above its own.
    """
    ids = np.empty((len(values), num_logprobs + 1), dtype=np.int32)
    ids[:, 0] = token_ids
    if num_logprobs > 0:
        for row in range(len(values)):
            ids[row, 1:] = top_ids(values[row], num_logprobs)
    return _table_of(values, ids)


def gather_chosen(values: Table, token_ids: NDArray[np.int32], chosen_ids: NDArray[np.intp]) -> LogprobsLists:
    """Gather each row's own token, then the chosen ones, best first; shapes as for gather_logprobs."""
    ids = np.empty((len(values), len(chosen_ids) + 1), dtype=np.int32)
    ids[:, 0] = token_ids
    for row in range(len(values)):
        ids[row, 1:] = chosen_ids[np.argsort(-values[row, chosen_ids], kind="stable")]
    return _table_of(values, ids)


def _table_of(values: Table, ids: NDArray[np.int32]) -> LogprobsLists:
    own = np.take_along_axis(values, ids[:, :1].astype(np.intp), axis=1)
    return LogprobsLists(
        token_ids=ids,
        logprobs=np.take_along_axis(values, ids.astype(np.intp), axis=1),
        sampled_ranks=np.count_nonzero(values >= own, axis=1).astype(np.int32),
    )


def rows_at_once(vocab_size: int) -> int:
    """Give how many rows of logits fit the memory set aside for prompt logprobs."""
    return max(1, _ROWS_BYTES // (4 * vocab_size))


class PromptLogprobs:
    """Fills one request's table chunk by chunk; row i describes prompt token i + 1."""

    def __init__(self, num_prompt_tokens: int, num_logprobs: int) -> None:
        """Reserve num_prompt_tokens - 1 rows of num_logprobs + 1 columns."""
        num_rows = num_prompt_tokens - 1
        self.num_logprobs = num_logprobs
        self.num_rows = num_rows
        self._table = LogprobsLists(
            token_ids=np.zeros((num_rows, num_logprobs + 1), dtype=np.int32),
            logprobs=np.zeros((num_rows, num_logprobs + 1), dtype=np.float32),
            sampled_ranks=np.zeros(num_rows, dtype=np.int32),
        )

    def fill(self, start: int, part: LogprobsLists) -> None:
        """Store the rows from start on."""
        end = start + len(part.token_ids)
        self._table.token_ids[start:end] = part.token_ids
        self._table.logprobs[start:end] = part.logprobs
        self._table.sampled_ranks[start:end] = part.sampled_ranks

    def take(self) -> LogprobsLists:
        """Give the complete table."""
        return self._table
