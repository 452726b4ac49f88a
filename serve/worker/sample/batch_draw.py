"""Phase 8 of 11: argmax and draws for all rows of a step at once, on the CPU library or else with numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from serve.kernels.cpu import sampling
from serve.kernels.cpu.binding import load_library
from serve.worker.sample.draw import Ids, RowDrawer
from serve.worker.sample.philox import uniform
from serve.worker.sample.row import RowSampling

FloatTable = NDArray[np.float32]
_SEED_MASK = (1 << 64) - 1


@dataclass(slots=True)
class DrawPlan:
    """Rows of a step that draw: their places in the logits, their settings, and these as records of the library."""

    places: NDArray[np.intp]
    rows: list[RowSampling]
    records: NDArray[np.void]

    def without(self, places: set[int]) -> DrawPlan:
        """Give the plan of the other rows."""
        kept = [i for i, place in enumerate(self.places.tolist()) if place not in places]
        return DrawPlan(self.places[kept], [self.rows[i] for i in kept], self.records[kept])


def plan_draws(rows: list[RowSampling], places: list[int]) -> DrawPlan:
    """Prepare the draws of the rows at some places of a batch."""
    chosen = [rows[place] for place in places]
    records = np.zeros(len(places), dtype=sampling.DRAW_ROW)
    records["seed"] = [row.seed & _SEED_MASK for row in chosen]
    records["row"] = places
    records["top_p"] = [row.top_p for row in chosen]
    records["min_p"] = [row.min_p for row in chosen]
    records["top_k"] = [row.top_k for row in chosen]
    records["inverse_temperature"] = [row.inverse_temperature for row in chosen]
    return DrawPlan(np.array(places, dtype=np.intp), chosen, records)


class BatchDrawer(Protocol):
    """Finds and draws tokens for rows of logits, each row by itself."""

    def argmax(self, logits: FloatTable) -> tuple[NDArray[np.int64], FloatTable]:
        """Give the first index of each row's largest value, or of its first NaN, and the value there."""

    def draw(
        self,
        logits: FloatTable,
        plan: DrawPlan,
        tops: FloatTable,
        positions: NDArray[np.int64],
        *,
        is_scaled: bool,
        wants_kept: bool,
    ) -> tuple[list[int], list[Ids | None]]:
        """Draw a token for each row of the plan; the logits stay unchanged.

        tops [len(logits)] are the largest values after the temperature, finite; positions [len(logits)] the indices of
        the tokens to draw. is_scaled tells that the temperature is already in the logits. Where kept ids are wanted,
        gives with the tokens those that each row's filters kept, None without any; else an empty list.
        """


class LibraryDrawer:
    """All rows in one call of the library, which shares them among threads."""

    def argmax(self, logits: FloatTable) -> tuple[NDArray[np.int64], FloatTable]:
        """Give the first index of each row's largest value, or of its first NaN, and the value there."""
        return sampling.argmax_rows(logits)

    def draw(
        self,
        logits: FloatTable,
        plan: DrawPlan,
        tops: FloatTable,
        positions: NDArray[np.int64],
        *,
        is_scaled: bool,
        wants_kept: bool,
    ) -> tuple[list[int], list[Ids | None]]:
        """Draw a token for each row of the plan; the logits stay unchanged."""
        records = plan.records.copy() if is_scaled or wants_kept else plan.records
        if is_scaled:
            records["inverse_temperature"] = 1.0
        records["position"] = positions[plan.places]
        records["top"] = tops[plan.places]
        kept = np.empty((len(records) if wants_kept else 0, logits.shape[1]), dtype=np.int32)
        if wants_kept:
            records["kept"] = kept.ctypes.data + np.arange(len(records)) * kept.strides[0]
        sampling.draw_rows(logits, records)
        tokens: list[int] = records["token"].tolist()
        if not wants_kept:
            return tokens, []
        counts = records["num_kept"].tolist()
        return tokens, [
            kept[i, : counts[i]].astype(np.intp) if row.has_filter else None for i, row in enumerate(plan.rows)
        ]


class NumpyDrawer:
    """The same, row by row in numpy."""

    def __init__(self, vocab_size: int) -> None:
        self._drawer = RowDrawer(vocab_size)

    def argmax(self, logits: FloatTable) -> tuple[NDArray[np.int64], FloatTable]:
        """Give the first index of each row's largest value, or of its first NaN, and the value there."""
        indices = logits.argmax(axis=1)
        return indices, logits[np.arange(len(indices)), indices]

    def draw(
        self,
        logits: FloatTable,
        plan: DrawPlan,
        tops: FloatTable,
        positions: NDArray[np.int64],
        *,
        is_scaled: bool,
        wants_kept: bool,
    ) -> tuple[list[int], list[Ids | None]]:
        """Draw a token for each row of the plan; the logits stay unchanged."""
        draws = [
            self._drawer.draw(
                logits[place] if is_scaled else logits[place] * row.inverse_temperature,
                row,
                uniform(row.seed, int(positions[place])),
            )
            for place, row in zip(plan.places.tolist(), plan.rows, strict=True)
        ]
        return [token for token, _ in draws], [kept for _, kept in draws] if wants_kept else []


def make_drawer(vocab_size: int) -> BatchDrawer:
    """Give the fastest drawer there is."""
    return NumpyDrawer(vocab_size) if load_library().library is None else LibraryDrawer()
