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

    def build(self, num_scheduled_tokens: dict[str, int]) -> InputBatch:
        """Pack the scheduled tokens of every request, in the order of num_scheduled_tokens.

        num_computed_tokens of the states must be those of this step.
        """
        states = self._states
        req_ids = list(num_scheduled_tokens)
        num_reqs = len(req_ids)
        req_indices = np.array([states.req_id_to_index[req_id] for req_id in req_ids], dtype=np.intp)
        scheduled = np.fromiter(num_scheduled_tokens.values(), dtype=np.int64, count=num_reqs)
        computed = states.num_computed_tokens[req_indices]
        ends = computed + scheduled
        starts = self._query_start_loc[: num_reqs + 1]
        np.cumsum(scheduled, out=starts[1:])
        num_tokens = int(starts[num_reqs])
        positions = self._positions[:num_tokens]
        if num_tokens == num_reqs:
            token_rows = req_indices
            positions[:] = computed
        else:
            token_rows = np.repeat(req_indices, scheduled)
            np.add(self._arange[:num_tokens], np.repeat(computed - starts[:-1], scheduled), out=positions)
        self._input_ids[:num_tokens] = states.token_ids[token_rows, positions]
        self._slot_mapping[:num_tokens] = self._block_tables.slots(token_rows, positions)
        self._seq_lens[:num_reqs] = ends
        max_seq_len = int(ends.max())
        block_table = self._block_tables.gather(req_indices, max_seq_len, self._block_table)
        # A row past its known tokens belongs to a request that failed: its result is already dropped.
        sampled = np.flatnonzero(ends == states.num_tokens[req_indices])
        return InputBatch(
            req_ids=req_ids,
            req_indices=req_indices,
            num_scheduled_tokens=scheduled,
            input_ids=torch.from_numpy(self._input_ids[:num_tokens]),
            positions=torch.from_numpy(positions),
            meta=AttentionMetadata(
                query_start_loc=torch.from_numpy(starts),
                seq_lens=torch.from_numpy(self._seq_lens[:num_reqs]),
                block_table=torch.from_numpy(block_table),
                slot_mapping=torch.from_numpy(self._slot_mapping[:num_tokens]),
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                max_query_len=int(scheduled.max()),
                max_seq_len=max_seq_len,
            ),
            query_start_loc_np=starts,
            sampled=sampled,
            logits_indices=starts[1:][sampled].astype(np.int64) - 1,
        )
