"""Temperature-scaled logits to a token: min-p, top-k, top-p and the draw, for one row at a time.

A row is processed alone, so its token cannot depend on its neighbours. The vocabulary is never sorted: exact bounds
first cut it down to the few entries that can be kept. The draw walks the kept ids in a fixed order until their
accumulated weight exceeds a uniform share of the total: one number is all the noise a token needs.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from serve.worker.sample.row import RowSampling

_GROUP: Final = 128
# Slack of the bound in nucleus(): far above the rounding of a float32 sum, far below any probability that matters.
_SLACK: Final = 1e-5

FloatRow = NDArray[np.float32]
Ids = NDArray[np.intp]


def reaching_kth(row: FloatRow, k: int) -> Ids:
    """Give the ids, ascending, of all values at or above the k-th largest, 1 <= k <= len(row)."""
    candidates: Ids | None = None
    num_groups = len(row) // _GROUP
    if k <= num_groups:
        # The k best group maxima are k values, so the k-th best of them is at most the answer: a lower bound.
        maxima = row[: num_groups * _GROUP].reshape(_GROUP, num_groups).max(axis=0)
        candidates = np.flatnonzero(row >= np.partition(maxima, num_groups - k)[num_groups - k])
        row = row[candidates]
    kth = np.partition(row, len(row) - k)[len(row) - k]
    reaching = np.flatnonzero(row >= kth)
    return reaching if candidates is None else candidates[reaching]


def top_ids(row: FloatRow, k: int) -> Ids:
    """Give the ids of the k largest values, best first, equal values by ascending id."""
    ids = reaching_kth(row, k)
    return ids[np.argsort(-row[ids], kind="stable")[:k]]


def nucleus(weights: FloatRow, top_p: float) -> Ids:
    """Give the indices, ascending, of the heaviest entries that top-p keeps; weights are not normalised.

    An entry is dropped when it and all lighter ones together hold at most 1 - top_p of the total. Of equal weights
    the lower index counts as heavier. The heaviest entry is always kept.
    """
    total = float(weights.sum())
    # Entries below this bound hold less than 1 - top_p even if all of them were just below it: none can be kept.
    bound = (1.0 - top_p) * total / len(weights) * (1.0 - _SLACK)
    candidates = np.flatnonzero(weights >= bound)
    values = weights[candidates]
    descending = np.sort(values)[::-1].astype(np.float64)
    mass_before = np.cumsum(descending) - descending
    num_kept = max(1, int(np.count_nonzero(mass_before < top_p * total)))
    lightest = descending[num_kept - 1]
    heavier = candidates[values > lightest]
    ties = candidates[values == lightest][: num_kept - len(heavier)]
    return np.sort(np.concatenate((heavier, ties)))


class RowDrawer:
    """Draws tokens; holds scratch memory for one row of the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # [_GROUP, number of groups]: a group is a column, so that group sums add whole rows at once.
        self._scratch = np.zeros((_GROUP, -(-vocab_size // _GROUP)), dtype=np.float32)

    def draw(self, row: FloatRow, params: RowSampling, uniform: float) -> tuple[int, Ids | None]:
        """Draw a token from a row of temperature-scaled logits whose largest value is finite.

        uniform is in [0, 1); the row stays unchanged. Returns the token and the ids that the filters kept,
        ascending, or None when the request has no filter.
        """
        top = np.float32(row.max())
        if not params.has_filter:
            return self._draw_unfiltered(row, top, uniform), None
        if params.top_k > 0 or params.min_p > 0.0:
            ids = _reaching_thresholds(row, float(top), params)
            weights = np.exp(row[ids] - top)
            if params.top_p < 1.0:
                kept = nucleus(weights, params.top_p)
                ids, weights = ids[kept], weights[kept]
        else:
            weights = self._fill_weights(row, top)
            ids = nucleus(weights, params.top_p)
            weights = weights[ids]
        cumulative = np.cumsum(weights, dtype=np.float64)
        return int(ids[_find(cumulative, uniform * cumulative[-1])]), ids

    def _fill_weights(self, row: FloatRow, top: np.float32) -> FloatRow:
        """Give exp(row - top), in scratch memory that the next call overwrites."""
        weights = self._scratch.reshape(-1)[: self._vocab_size]
        np.subtract(row, top, out=weights)
        np.exp(weights, out=weights)
        return weights

    def _draw_unfiltered(self, row: FloatRow, top: np.float32, uniform: float) -> int:
        """Draw from all tokens: first the group, then the token in it, so that only group sums are accumulated."""
        self._fill_weights(row, top)
        cumulative = np.cumsum(self._scratch.sum(axis=0), dtype=np.float64)
        target = uniform * float(cumulative[-1])
        group = _find(cumulative, target)
        before = float(cumulative[group - 1]) if group else 0.0
        member = _find(np.cumsum(self._scratch[:, group], dtype=np.float64), target - before)
        return member * self._scratch.shape[1] + group


def _reaching_thresholds(row: FloatRow, top: float, params: RowSampling) -> Ids:
    """Give the ids that pass min-p and top-k, ascending; ties at the k-th value all pass.

    Both keep what reaches a value, so the order of the two does not matter.
    """
    ids = reaching_kth(row, params.top_k) if params.top_k > 0 else None
    if params.min_p == 0.0 and ids is not None:
        return ids
    threshold = top + math.log(params.min_p)
    return np.flatnonzero(row >= threshold) if ids is None else ids[row[ids] >= threshold]


def _find(cumulative: NDArray[np.float64], target: float) -> int:
    """Give the first index whose accumulated weight exceeds target, at most the last one with a weight."""
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return min(int(np.searchsorted(cumulative, target, side="right")), last)
