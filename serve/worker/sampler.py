"""Phase 8 of 11: turn logits into tokens, in one fixed order of operations.

raw values for logprobs -> allowed ids -> grammar -> bad words -> min tokens -> logit bias -> custom processors ->
penalties -> greedy argmax, or temperature -> custom argmax-invariant processors -> min-p -> top-k -> top-p -> draw.

Every step works on one row at a time and is skipped when no row of the batch needs it, so a row's result depends on
that row alone: not on its neighbours, the batch size or its place in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from serve.wire.frontend import LogprobsLists
from serve.wire.step import GrammarOutput
from serve.worker.logits_processors import ProcessorChain
from serve.worker.sample.batch_draw import DrawPlan, make_drawer, plan_draws
from serve.worker.sample.logprobs import gather_chosen, gather_logprobs, to_values
from serve.worker.sample.masks import (
    add_logit_bias,
    mask_allowed_ids,
    mask_bad_words,
    mask_stops_until_min_tokens,
    unpack_bitmask,
)
from serve.worker.sample.row import RowSampling

FAILED: Final = -1
_BROKEN: Final = "nan_logits: the model's logits for this request hold NaN or infinity"
_NONE_BY_PROCESSORS: Final = "no_token_allowed: masks and logits processors leave no token to sample"
_NONE_BY_REQUEST: Final = (
    "invalid_request: the constraint, allowed_token_ids, bad_words, min_tokens and logit_bias of this request leave no "
    "token to sample; drop some of them"
)
FloatTable = NDArray[np.float32]


@dataclass(slots=True)
class SamplingBatch:
    """The rows that sample in a step and which of them need what; reused while the same requests sample.

    Row numbers index the logits. has_transforms: some row changes its logits before the argmax. draws is the plan of
    the random rows, None when there are none.
    """

    req_ids: list[str]
    rows: list[RowSampling]
    allowed: list[int]
    bad_words: list[int]
    min_tokens: list[int]
    biased: list[int]
    penalized: list[int]
    draws: DrawPlan | None
    with_logprobs: list[int]
    has_transforms: bool


@dataclass(slots=True)
class SamplerOutput:
    """token_ids [num_rows], FAILED where errors has the row's cause; logprobs by row, one table row each."""

    token_ids: list[int]
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, LogprobsLists] = field(default_factory=dict)


def build_sampling_batch(req_ids: list[str], rows: list[RowSampling]) -> SamplingBatch:
    """Sort the rows by what they need."""
    allowed = [i for i, row in enumerate(rows) if row.allowed_ids is not None]
    bad_words = [i for i, row in enumerate(rows) if row.bad_tokens is not None or row.bad_sequences]
    min_tokens = [i for i, row in enumerate(rows) if row.min_tokens > 0 and len(row.stop_ids)]
    biased = [i for i, row in enumerate(rows) if row.bias_ids is not None]
    penalized = [i for i, row in enumerate(rows) if row.penalties is not None]
    random = [i for i, row in enumerate(rows) if not row.is_greedy]
    return SamplingBatch(
        req_ids=req_ids,
        rows=rows,
        allowed=allowed,
        bad_words=bad_words,
        min_tokens=min_tokens,
        biased=biased,
        penalized=penalized,
        draws=plan_draws(rows, random) if random else None,
        with_logprobs=[i for i, row in enumerate(rows) if row.num_logprobs is not None],
        has_transforms=bool(allowed or bad_words or min_tokens or biased or penalized),
    )


class Sampler:
    """Samples one token for each row of logits."""

    def __init__(self, vocab_size: int, logprobs_mode: str, processors: ProcessorChain) -> None:
        """logprobs_mode is raw_logprobs, raw_logits, processed_logprobs or processed_logits."""
        self._drawer = make_drawer(vocab_size)
        self._processors = processors
        self._is_raw = logprobs_mode.startswith("raw")
        self._as_logprobs = logprobs_mode.endswith("logprobs")

    def sample(
        self, logits: Tensor, batch: SamplingBatch, num_tokens: NDArray[np.int64], grammar: GrammarOutput | None
    ) -> SamplerOutput:
        """Sample every row; logits are changed in place.

        logits      [num_rows, vocab_size] float32
        num_tokens  [num_rows] known tokens of each request, which is the index of the token to sample
        A row that holds NaN or has no token left fails alone.
        """
        table: FloatTable = logits.numpy()
        # argmax stops at a NaN, so the value it found tells whether the row holds one.
        tokens, tops = self._drawer.argmax(table)
        output = SamplerOutput(token_ids=[])
        _fail_rows(tops, output.errors, none_allowed=_BROKEN)
        raw_values = self._raw_values(logits, batch.with_logprobs)
        if batch.has_transforms or grammar is not None or self._processors.changes_argmax:
            self._transform(logits, batch, num_tokens, grammar)
            tokens, tops = self._drawer.argmax(table)
            own = _NONE_BY_PROCESSORS if self._processors.changes_argmax else _NONE_BY_REQUEST
            _fail_rows(tops, output.errors, none_allowed=own)
        output.token_ids = tokens.tolist()
        if batch.draws is not None:
            self._draw(logits, tops, batch, num_tokens, output)
        for i in output.errors:
            output.token_ids[i] = FAILED
        if batch.with_logprobs:
            self._gather(logits, raw_values, batch, output)
        return output

    def _raw_values(self, logits: Tensor, rows: list[int]) -> FloatTable | None:
        """Keep the values that raw logprobs report, [len(rows), vocab_size], before anything changes them."""
        if not rows or not self._is_raw:
            return None
        return to_values(logits[rows], as_logprobs=self._as_logprobs)

    def _transform(
        self, logits: Tensor, batch: SamplingBatch, num_tokens: NDArray[np.int64], grammar: GrammarOutput | None
    ) -> None:
        """Apply what may change the argmax."""
        table: FloatTable = logits.numpy()
        rows = batch.rows
        for i in batch.allowed:
            allowed_ids = rows[i].allowed_ids
            assert allowed_ids is not None, "batch.allowed lists a row without allowed ids"
            mask_allowed_ids(table[i], allowed_ids)
        if grammar is not None:
            _mask_grammar(table, batch.req_ids, grammar)
        for i in batch.bad_words:
            mask_bad_words(table[i], rows[i], int(num_tokens[i]))
        for i in batch.min_tokens:
            mask_stops_until_min_tokens(table[i], rows[i], int(num_tokens[i]))
        for i in batch.biased:
            bias_ids = rows[i].bias_ids
            assert bias_ids is not None, "batch.biased lists a row without biases"
            add_logit_bias(table[i], bias_ids, rows[i].bias_values)
        self._processors.apply_before_argmax(logits)
        for i in batch.penalized:
            penalties = rows[i].penalties
            assert penalties is not None, "batch.penalized lists a row without penalties"
            penalties.apply(table[i])

    def _draw(
        self,
        logits: Tensor,
        tops: NDArray[np.float32],
        batch: SamplingBatch,
        num_tokens: NDArray[np.int64],
        output: SamplerOutput,
    ) -> None:
        """Replace the argmax of every random row by a draw from its filtered distribution."""
        table: FloatTable = logits.numpy()
        plan = batch.draws
        assert plan is not None, "there is a random row to draw for"
        reports_kept = bool(batch.with_logprobs) and not self._is_raw
        is_scaled = reports_kept or self._processors.keeps_argmax
        if is_scaled:
            for place, row in zip(plan.places.tolist(), plan.rows, strict=True):
                table[place] *= row.inverse_temperature
            self._processors.apply_after_temperature(logits)
            tops = table.max(axis=1)
        else:
            with np.errstate(over="ignore"):
                tops[plan.places] *= plan.records["inverse_temperature"]
        _fail_rows(tops, output.errors, none_allowed=_NONE_BY_PROCESSORS)
        if output.errors:
            plan = plan.without(set(output.errors))
        tokens, kept_ids = self._drawer.draw(
            table, plan, tops, num_tokens, is_scaled=is_scaled, wants_kept=reports_kept
        )
        if reports_kept:
            for place, row, kept in zip(plan.places.tolist(), plan.rows, kept_ids, strict=True):
                if kept is not None and row.num_logprobs is not None:
                    mask_allowed_ids(table[place], kept)
        for place, token in zip(plan.places.tolist(), tokens, strict=True):
            output.token_ids[place] = token

    def _gather(
        self, logits: Tensor, raw_values: FloatTable | None, batch: SamplingBatch, output: SamplerOutput
    ) -> None:
        """Build the logprob table of every row that asked and did not fail."""
        for position, i in enumerate(batch.with_logprobs):
            num_logprobs = batch.rows[i].num_logprobs
            if i in output.errors or num_logprobs is None:
                continue
            if raw_values is not None:
                values = raw_values[position : position + 1]
            else:
                values = to_values(logits[i : i + 1], as_logprobs=self._as_logprobs)
            token_ids = np.array([output.token_ids[i]], dtype=np.int32)
            chosen_ids = batch.rows[i].logprob_ids
            if chosen_ids is not None:
                output.logprobs[i] = gather_chosen(values, token_ids, chosen_ids)
            else:
                output.logprobs[i] = gather_logprobs(values, token_ids, num_logprobs)


def _mask_grammar(table: FloatTable, req_ids: list[str], grammar: GrammarOutput) -> None:
    """Forbid what each structured request's grammar forbids; rows of requests that do not sample are ignored."""
    req_id_to_row = {req_id: i for i, req_id in enumerate(req_ids)}
    forbidden = unpack_bitmask(grammar.bitmask, table.shape[1])
    for req_id, mask in zip(grammar.req_ids, forbidden, strict=True):
        row = req_id_to_row.get(req_id)
        if row is not None:
            table[row][mask] = -np.inf


def _fail_rows(tops: NDArray[np.float32], errors: dict[int, str], *, none_allowed: str) -> None:
    """Note the cause of each row whose largest value cannot be sampled; the first cause of a row stays.

    none_allowed is the cause of a row that holds nothing but minus infinity.
    """
    if np.isfinite(tops).all():
        return
    for i, top in enumerate(tops.tolist()):
        if top == -np.inf:
            errors.setdefault(i, none_allowed)
        elif not np.isfinite(top):
            errors.setdefault(i, _BROKEN)
