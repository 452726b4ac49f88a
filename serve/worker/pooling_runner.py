"""Phase 7 of 11 for pooling models: one forward pass over the scheduled tokens gives the results; phase 8 is skipped.

A prompt that is spread over steps leaves what its rows amount to so far in a PartialPool; the step that completes it
gives the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from serve.kernels.attention import KVCache
from serve.models.pooler import PartialPool
from serve.models.pooling import PoolingModel, StepInputs
from serve.pooling_params import PoolingParams
from serve.wire.step import ModelRunnerOutput, NewRequestData, SchedulerOutput
from serve.worker.block_tables import BlockTables
from serve.worker.input_batch import InputBatch, InputBatchBuilder
from serve.worker.model_runner import RunnerLimits
from serve.worker.request_states import RequestStates


@dataclass(slots=True)
class _Pooled:
    """A request that is being pooled."""

    params: PoolingParams
    pool: PartialPool


class PoolingRunner:
    """Holds the state of all running requests of a pooling model and computes their steps."""

    def __init__(self, model: PoolingModel, kv_caches: list[KVCache], limits: RunnerLimits) -> None:
        max_num_blocks = -(-(limits.max_model_len + 1) // limits.block_size)
        self._model = model
        self._kv_caches = kv_caches
        self._states = RequestStates(limits.max_num_seqs, limits.max_model_len, limits.vocab_size)
        self._block_tables = BlockTables(limits.max_num_seqs, max_num_blocks, limits.block_size)
        self._builder = InputBatchBuilder(
            self._states,
            self._block_tables,
            max_num_tokens=limits.max_num_batched_tokens,
            max_num_blocks=max_num_blocks,
        )
        self._requests: dict[str, _Pooled] = {}

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run the forward pass of a step; gives the results of the requests whose prompts it completes."""
        self._update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        batch = self._builder.build(scheduler_output.num_scheduled_tokens)
        inputs = StepInputs(batch.input_ids, batch.positions, self._token_types(batch), batch.meta)
        hidden_states = self._model.forward(inputs, self._kv_caches)
        output = ModelRunnerOutput(req_ids=batch.req_ids, sampled_token_ids=[[] for _ in batch.req_ids])
        self._pool(batch, hidden_states, output)
        return output

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler: free rows first, so that new requests find room."""
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._states.remove(req_id)
            self._requests.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._add_request(new)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, block_ids, num_computed_tokens in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            req_index = self._states.req_id_to_index[req_id]
            self._states.num_computed_tokens[req_index] = num_computed_tokens
            self._block_tables.append_blocks(req_index, block_ids)

    def _add_request(self, new: NewRequestData) -> None:
        params = new.pooling_params
        assert params is not None, f"{new.req_id} came without pooling parameters"
        req_index = self._states.add(new)
        self._block_tables.set_blocks(req_index, new.block_ids)
        self._requests[new.req_id] = _Pooled(params, self._model.pooler.start(params))

    def _token_types(self, batch: InputBatch) -> Tensor:
        """Give 1 for the tokens of the second text of a pair, else 0: [num_tokens] int64."""
        token_types = torch.zeros_like(batch.positions)
        for place, req_id in enumerate(batch.req_ids):
            second = self._requests[req_id].params.second_text_start
            if second is not None:
                rows = slice(*batch.query_start_loc_np[place : place + 2].tolist())
                token_types[rows] = (batch.positions[rows] >= second).long()
        return token_types

    def _pool(self, batch: InputBatch, hidden_states: Tensor, output: ModelRunnerOutput) -> None:
        """Add each request's rows to its pool; finish the pools that are complete."""
        complete = set(batch.sampled.tolist())
        starts: list[int] = batch.query_start_loc_np.tolist()
        for place, req_id in enumerate(batch.req_ids):
            request = self._requests[req_id]
            request.pool.update(hidden_states[starts[place] : starts[place + 1]])
            if place not in complete:
                continue
            result = self._model.pooler.finish(request.pool, request.params).numpy()
            if np.isfinite(result).all():
                output.pooler_outputs[req_id] = result
            else:
                output.errors[req_id] = "nan_output: the model's result for this prompt holds NaN or infinity"
