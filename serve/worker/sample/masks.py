"""Masks and biases on one row of logits, in place: what may not be drawn becomes minus infinity."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from serve.worker.sample.row import Ids, RowSampling

FloatRow = NDArray[np.float32]
_MASKED = np.float32(-np.inf)


def mask_allowed_ids(row: FloatRow, allowed_ids: Ids) -> None:
    """Leave only the allowed ids."""
    kept = row[allowed_ids]
    row.fill(_MASKED)
    row[allowed_ids] = kept


def unpack_bitmask(bitmask: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Give which tokens a grammar forbids, [len(bitmask), vocab_size].

    bitmask is [n, ceil(tokens / 32)] int32, bit set = allowed, lowest bit first. Tokens beyond it are forbidden: the
    head of a model may be wider than its tokenizer.
    """
    packed = np.ascontiguousarray(bitmask).view(np.uint8)
    allowed = np.unpackbits(packed, axis=1, count=min(vocab_size, packed.shape[1] * 8), bitorder="little")
    forbidden = np.ones((len(bitmask), vocab_size), dtype=np.bool_)
    np.logical_not(allowed, out=forbidden[:, : allowed.shape[1]])
    return forbidden


def mask_bad_words(row: FloatRow, params: RowSampling, num_tokens: int) -> None:
    """Forbid the last token of each bad word whose earlier tokens end the output, num_tokens being all tokens."""
    if params.bad_tokens is not None:
        row[params.bad_tokens] = _MASKED
    num_output_tokens = num_tokens - params.num_prompt_tokens
    for word in params.bad_sequences:
        length = len(word) - 1
        if length <= num_output_tokens:
            tail = params.token_ids[num_tokens - length : num_tokens]
            if tuple(tail.tolist()) == word[:-1]:
                row[word[-1]] = _MASKED


def mask_stops_until_min_tokens(row: FloatRow, params: RowSampling, num_tokens: int) -> None:
    """Forbid every stop id while fewer than min_tokens tokens were generated."""
    if num_tokens - params.num_prompt_tokens < params.min_tokens:
        row[params.stop_ids] = _MASKED


def add_logit_bias(row: FloatRow, bias_ids: Ids, bias_values: FloatRow) -> None:
    """Add the request's biases; a masked token stays masked."""
    row[bias_ids] += bias_values
