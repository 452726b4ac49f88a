"""The packed inputs of one step, in buffers that live as long as the worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve.kernels.attention import AttentionMetadata
from serve.models.layers.embedding import PromptEmbeds
from serve.worker.block_tables import BlockTables
from serve.worker.request_states import RequestStates


@dataclass(slots=True)
class InputBatch:
    """One step's inputs; the tensors are views of persistent buffers, good until the next step is built.

    req_ids               [num_reqs], in schedule order
    req_indices           [num_reqs] rows of the persistent arrays
    num_scheduled_tokens  [num_reqs]
    input_ids             [num_tokens] int32
    positions             [num_tokens] int64, index of each token in its request
    meta                  query_start_loc, seq_lens, block_table, slot_mapping for attention
    query_start_loc_np    [num_reqs + 1] int32, host view of meta.query_start_loc
    sampled               [num_sampled] which requests of the batch reach the end of their known tokens
    logits_indices        [num_sampled] int64, rows of hidden_states whose logits are sampled
    """

    req_ids: list[str]
    req_indices: NDArray[np.intp]
    num_scheduled_tokens: NDArray[np.int64]
    input_ids: Tensor
    positions: Tensor
    meta: AttentionMetadata
    query_start_loc_np: NDArray[np.int32]
    sampled: NDArray[np.intp]
    logits_indices: NDArray[np.int64]


def gather_prompt_embeds(batch: InputBatch, states: RequestStates) -> PromptEmbeds | None:
    """Give the rows of a step that enter the model as embeddings, and their values; None when there are none."""
    rows: list[NDArray[np.int64]] = []
    values: list[NDArray[np.float32]] = []
    for place, req_id in enumerate(batch.req_ids):
        embeds = states.prompt_embeds.get(req_id)
        if embeds is None:
            continue
        start = int(states.num_computed_tokens[batch.req_indices[place]])
        part = embeds[start : start + int(batch.num_scheduled_tokens[place])]
        if len(part):
            first = int(batch.query_start_loc_np[place])
            rows.append(np.arange(first, first + len(part), dtype=np.int64))
            values.append(part)
    if not rows:
        return None
    return PromptEmbeds(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(values)))


@dataclass(slots=True)
class _Layout:
    """What stays as it is while the same requests get the same numbers of tokens, as in a run of decode steps.

    starts and what follows it are views of the builder's buffers; tensors are input_ids, positions, starts, seq_lens
    and slots as torch sees them.

    req_ids, counts, version  what it was made for
    req_indices               [num_reqs]
    scheduled                 [num_reqs] int64
    offsets                   [num_tokens] int64, place of each token among its request's in this step
    id_starts, block_starts   [num_tokens] where the rows begin in the flat tables of ids and blocks
    """

    req_ids: list[str]
    counts: list[int]
    version: int
    req_indices: NDArray[np.intp]
    scheduled: NDArray[np.int64]
    offsets: NDArray[np.int64]
    id_starts: NDArray[np.int64]
    block_starts: NDArray[np.int64]
    starts: NDArray[np.int32]
    input_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    seq_lens: NDArray[np.int32]
    tensors: tuple[Tensor, ...]
    max_query_len: int


class InputBatchBuilder:
    """Builds InputBatch objects without a Python loop over tokens."""

    def __init__(
        self, states: RequestStates, block_tables: BlockTables, *, max_num_tokens: int, max_num_blocks: int
    ) -> None:
        max_num_reqs = len(states.num_tokens)
        self._states = states
        self._block_tables = block_tables
        self._input_ids: NDArray[np.int32] = np.zeros(max_num_tokens, dtype=np.int32)
        self._positions: NDArray[np.int64] = np.zeros(max_num_tokens, dtype=np.int64)
        self._slot_mapping: NDArray[np.int64] = np.full(max_num_tokens, -1, dtype=np.int64)
        self._query_start_loc: NDArray[np.int32] = np.zeros(max_num_reqs + 1, dtype=np.int32)
        self._seq_lens: NDArray[np.int32] = np.zeros(max_num_reqs, dtype=np.int32)
        self._block_table: NDArray[np.int32] = np.zeros(max_num_reqs * max_num_blocks, dtype=np.int32)
        self._arange = np.arange(max_num_tokens, dtype=np.int64)
        self._layout: _Layout | None = None
        # The block table in use, and what it was gathered for.
        self._gathered: Tensor | None = None
        self._gathered_for: tuple[_Layout, int, int] | None = None

    def build(self, num_scheduled_tokens: dict[str, int]) -> InputBatch:
        """Pack the scheduled tokens of every request, in the order of num_scheduled_tokens.

        num_computed_tokens of the states must be those of this step.
        """
        states, layout = self._states, self._lay_out(num_scheduled_tokens)
        positions = layout.positions
        if layout.max_query_len == 1:
            states.num_computed_tokens.take(layout.req_indices, out=positions, mode="clip")
            np.add(positions, 1, out=layout.seq_lens, casting="unsafe")
        else:
            computed = states.num_computed_tokens.take(layout.req_indices)
            np.add(np.repeat(computed, layout.scheduled), layout.offsets, out=positions)
            np.add(computed, layout.scheduled, out=layout.seq_lens, casting="unsafe")
        states.flat_token_ids.take(layout.id_starts + positions, out=layout.input_ids, mode="clip")
        self._block_tables.fill_slots(layout.block_starts, positions, layout.slots)
        max_seq_len = int(layout.seq_lens.max())
        # A row past its known tokens belongs to a request that failed: its result is already dropped.
        sampled = np.flatnonzero(layout.seq_lens == states.num_tokens.take(layout.req_indices))
        input_ids, positions_tensor, query_start_loc, seq_lens, slot_mapping = layout.tensors
        return InputBatch(
            req_ids=layout.req_ids,
            req_indices=layout.req_indices,
            num_scheduled_tokens=layout.scheduled,
            input_ids=input_ids,
            positions=positions_tensor,
            meta=AttentionMetadata(
                query_start_loc=query_start_loc,
                seq_lens=seq_lens,
                block_table=self._gather(layout, max_seq_len),
                slot_mapping=slot_mapping,
                num_reqs=len(layout.req_ids),
                num_tokens=len(positions),
                max_query_len=layout.max_query_len,
                max_seq_len=max_seq_len,
            ),
            query_start_loc_np=layout.starts,
            sampled=sampled,
            logits_indices=layout.starts[1:][sampled].astype(np.int64) - 1,
        )

    def _gather(self, layout: _Layout, max_seq_len: int) -> Tensor:
        """Give the block tables of the batch; they are copied together anew only when something in them changed."""
        wanted = (layout, self._block_tables.num_blocks_for(max_seq_len), self._block_tables.version)
        last = self._gathered_for
        if self._gathered is None or last is None or last[0] is not layout or last[1:] != wanted[1:]:
            table = self._block_tables.gather(layout.req_indices, wanted[1], self._block_table)
            self._gathered, self._gathered_for = torch.from_numpy(table), wanted
        return self._gathered

    def _lay_out(self, num_scheduled_tokens: dict[str, int]) -> _Layout:
        """Give the layout of a step: the last one's if the requests and their numbers of tokens are the same."""
        req_ids, counts = list(num_scheduled_tokens), list(num_scheduled_tokens.values())
        states, last = self._states, self._layout
        if last is not None and last.version == states.version and last.counts == counts and last.req_ids == req_ids:
            return last
        num_reqs = len(req_ids)
        req_indices = np.array([states.req_id_to_index[req_id] for req_id in req_ids], dtype=np.intp)
        scheduled = np.array(counts, dtype=np.int64)
        starts = self._query_start_loc[: num_reqs + 1]
        np.cumsum(scheduled, out=starts[1:])
        num_tokens = int(starts[num_reqs])
        token_rows = np.repeat(req_indices, scheduled)
        input_ids, positions = self._input_ids[:num_tokens], self._positions[:num_tokens]
        slots, seq_lens = self._slot_mapping[:num_tokens], self._seq_lens[:num_reqs]
        self._layout = _Layout(
            req_ids=req_ids,
            counts=counts,
            version=states.version,
            req_indices=req_indices,
            scheduled=scheduled,
            offsets=self._arange[:num_tokens] - np.repeat(starts[:-1], scheduled),
            id_starts=token_rows * np.int64(states.token_ids.shape[1]),
            block_starts=token_rows * np.int64(self._block_tables.max_num_blocks),
            starts=starts,
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            seq_lens=seq_lens,
            tensors=tuple(map(torch.from_numpy, (input_ids, positions, starts, seq_lens, slots))),
            max_query_len=max(counts),
        )
        return self._layout
