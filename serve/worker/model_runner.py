"""Phase 7 of 11: one forward pass over the scheduled tokens; phase 8 picks up its logits.

execute_model follows the scheduler's deltas, runs the model and parks the logits; sample_tokens samples them. Both run
on the worker's one thread, each step's sample_tokens before the next step's execute_model, so the tokens sampled in a
step are always in the persistent arrays when the next step reads them: the scheduler never sends them back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve.kernels.attention import KVCache
from serve.models.registry import CausalLM
from serve.wire.frontend import LogprobsLists
from serve.wire.step import CachedRequestData, GrammarOutput, ModelRunnerOutput, NewRequestData, SchedulerOutput
from serve.worker.block_tables import BlockTables
from serve.worker.input_batch import InputBatch, InputBatchBuilder, gather_prompt_embeds
from serve.worker.logits_processors import ProcessorChain, ProcessorRequest
from serve.worker.request_states import RequestStates
from serve.worker.sample.logprobs import PromptLogprobs, gather_logprobs, rows_at_once, to_values
from serve.worker.sampler import FAILED, Sampler, SamplerOutput, SamplingBatch, build_sampling_batch


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes of the persistent arrays, in requests, tokens and tokens per block."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    vocab_size: int


@dataclass(slots=True)
class ParkedStep:
    """A step between its forward pass and its sampling. logits is None when no request samples.

    order lists the requests of the batch that sample, by their place in it, in the order of the rows of logits.
    """

    batch: InputBatch
    order: list[int]
    logits: Tensor | None
    prompt_logprobs: dict[str, LogprobsLists]
    errors: dict[str, str]


class ModelRunner:
    """Holds the state of all running requests and computes their steps."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[KVCache],
        limits: RunnerLimits,
        *,
        logprobs_mode: str,
        processors: ProcessorChain,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._states, self._block_tables, self._builder = new_request_arrays(limits)
        self._sampler = Sampler(limits.vocab_size, logprobs_mode, processors)
        self._processors = processors
        self._as_logprobs = logprobs_mode.endswith("logprobs")
        self._rows_at_once = rows_at_once(limits.vocab_size)
        self._parked: ParkedStep | None = None
        self._refused: dict[str, str] = {}
        self._sampling_batch: SamplingBatch | None = None
        self._sampling_version = -1

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the forward pass of a step and park its logits.

        Returns None, or an empty output when no tokens are scheduled: then there is nothing to sample.
        """
        assert self._parked is None, "execute_model was called again before sample_tokens"
        self._update_states(scheduler_output)
        if not scheduler_output.num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        batch = self._builder.build(scheduler_output.num_scheduled_tokens)
        prompt_embeds = gather_prompt_embeds(batch, self._states) if self._states.prompt_embeds else None
        order, rows = self._choose_rows(batch)
        wants_all = bool(self._states.prompt_logprobs)
        hidden_states = self._model.forward(
            batch.input_ids, batch.positions, self._kv_caches, batch.meta, prompt_embeds, None if wants_all else rows
        )
        errors = {req_id: self._refused[req_id] for req_id in batch.req_ids if req_id in self._refused}
        prompt_logprobs: dict[str, LogprobsLists] = {}
        if wants_all:
            prompt_logprobs = self._compute_prompt_logprobs(batch, hidden_states, errors)
            hidden_states = hidden_states if rows is None else hidden_states[rows]
        logits = self._model.compute_logits(hidden_states) if order else None
        self._parked = ParkedStep(batch, order, logits, prompt_logprobs, errors)
        return None

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample the parked step; with nothing parked the output is empty."""
        parked, self._parked = self._parked, None
        if parked is None:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        output = ModelRunnerOutput(
            req_ids=parked.batch.req_ids,
            sampled_token_ids=[[] for _ in parked.batch.req_ids],
            prompt_logprobs=parked.prompt_logprobs,
            errors=parked.errors,
        )
        if parked.logits is None:
            return output
        req_indices = parked.batch.req_indices[parked.order]
        sampling_batch = self._get_sampling_batch(parked)
        sampled = self._sampler.sample(
            parked.logits, sampling_batch, self._states.num_tokens[req_indices], grammar_output
        )
        self._keep_tokens(sampled.token_ids, sampling_batch, req_indices)
        _fill_output(output, parked.order, sampled)
        return output

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Follow the scheduler: free rows first, so that new requests find room."""
        for req_id in (*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids):
            self._states.remove(req_id)
            self._processors.forget(req_id)
            self._refused.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._add_request(new)
        follow_cached_requests(scheduler_output.scheduled_cached_reqs, self._states, self._block_tables)

    def _add_request(self, new: NewRequestData) -> None:
        """Take in a new or resumed request."""
        req_index = self._states.add(new)
        self._block_tables.set_blocks(req_index, new.block_ids)
        if self._processors.is_empty:
            return
        request = ProcessorRequest(
            params=new.sampling_params,
            prompt_token_ids=new.token_ids[: new.num_prompt_tokens],
            output_token_ids=new.token_ids[new.num_prompt_tokens :],
        )
        refusal = self._processors.admit(new.req_id, request)
        if refusal is not None:
            self._refused[new.req_id] = refusal

    def _choose_rows(self, batch: InputBatch) -> tuple[list[int], Tensor | None]:
        """Give the order of the requests that sample and their rows of the hidden states, None for all rows."""
        order: list[int] = batch.sampled.tolist()
        indices = batch.logits_indices
        if order and not self._processors.is_empty:
            # Processors keep state by row: the rows follow their order, not the schedule's.
            place = {batch.req_ids[i]: row for row, i in enumerate(order)}
            rows = [place[req_id] for req_id in self._processors.arrange(list(place))]
            order = [order[row] for row in rows]
            indices = indices[rows]
        elif len(order) == batch.meta.num_tokens:
            return order, None
        return order, torch.from_numpy(indices)

    def _compute_prompt_logprobs(
        self, batch: InputBatch, hidden_states: Tensor, errors: dict[str, str]
    ) -> dict[str, LogprobsLists]:
        """Add this step's rows to the tables of requests that want prompt logprobs; give the tables now complete."""
        complete: dict[str, LogprobsLists] = {}
        for place, req_id in enumerate(batch.req_ids):
            table = self._states.prompt_logprobs.get(req_id)
            if table is None:
                continue
            req_index = batch.req_indices[place]
            start = int(self._states.num_computed_tokens[req_index])
            end = start + int(batch.num_scheduled_tokens[place])
            first = int(batch.query_start_loc_np[place])
            targets = self._states.token_ids[req_index, start + 1 : min(end, table.num_rows) + 1]
            is_finite = self._fill_prompt_logprobs(table, start, hidden_states[first:], targets)
            if not is_finite:
                errors[req_id] = "nan_logits: the model's logits for this prompt hold NaN or infinity"
            if end > table.num_rows:
                complete[req_id] = table.take()
                del self._states.prompt_logprobs[req_id]
        return complete

    def _fill_prompt_logprobs(
        self, table: PromptLogprobs, start: int, hidden_states: Tensor, targets: NDArray[np.int32]
    ) -> bool:
        """Fill the rows from start on, one for each target token; False when the logits are unusable.

        hidden_states begins with the row that predicts the first target.
        """
        for first in range(0, len(targets), self._rows_at_once):
            part = targets[first : first + self._rows_at_once]
            logits = self._model.compute_logits(hidden_states[first : first + len(part)])
            if not np.isfinite(logits.numpy().max(axis=1)).all():
                return False
            values = to_values(logits, as_logprobs=self._as_logprobs)
            table.fill(start + first, gather_logprobs(values, part, table.num_logprobs))
        return True

    def _get_sampling_batch(self, parked: ParkedStep) -> SamplingBatch:
        """Give the sampling settings of the parked rows, those of the last step when the rows are the same."""
        req_ids = [parked.batch.req_ids[place] for place in parked.order]
        last = self._sampling_batch
        if last is not None and self._sampling_version == self._states.version and last.req_ids == req_ids:
            return last
        rows = self._states.sampling_rows(parked.batch.req_indices[parked.order].tolist())
        self._sampling_batch = build_sampling_batch(req_ids, rows)
        self._sampling_version = self._states.version
        return self._sampling_batch

    def _keep_tokens(self, token_ids: list[int], batch: SamplingBatch, req_indices: NDArray[np.intp]) -> None:
        """Append the sampled tokens to all that depends on them; failed rows get none."""
        sampled = np.array(token_ids, dtype=np.int32)
        if FAILED in token_ids:
            kept = sampled != FAILED
            sampled, req_indices = sampled[kept], req_indices[kept]
        self._states.append_tokens(req_indices, sampled)
        for row in batch.penalized:
            penalties = batch.rows[row].penalties
            if penalties is not None and token_ids[row] != FAILED:
                penalties.append(token_ids[row])
        if not self._processors.is_empty:
            for req_id, token_id in zip(batch.req_ids, token_ids, strict=True):
                if token_id != FAILED:
                    self._processors.append(req_id, token_id)


def new_request_arrays(limits: RunnerLimits) -> tuple[RequestStates, BlockTables, InputBatchBuilder]:
    """Give the persistent arrays of requests, and what packs the inputs of a step from them."""
    max_num_blocks = -(-(limits.max_model_len + 1) // limits.block_size)
    states = RequestStates(limits.max_num_seqs, limits.max_model_len, limits.vocab_size)
    block_tables = BlockTables(limits.max_num_seqs, max_num_blocks, limits.block_size)
    builder = InputBatchBuilder(
        states, block_tables, max_num_tokens=limits.max_num_batched_tokens, max_num_blocks=max_num_blocks
    )
    return states, block_tables, builder


def follow_cached_requests(cached: CachedRequestData, states: RequestStates, block_tables: BlockTables) -> None:
    """Take over what the scheduler says of requests that the worker knows already."""
    if not cached.req_ids:
        return
    req_indices = [states.req_id_to_index[req_id] for req_id in cached.req_ids]
    states.num_computed_tokens[req_indices] = cached.num_computed_tokens
    for req_index, block_ids in zip(req_indices, cached.new_block_ids, strict=True):
        if block_ids:
            block_tables.append_blocks(req_index, block_ids)


def _fill_output(output: ModelRunnerOutput, order: list[int], sampled: SamplerOutput) -> None:
    """Put the sampled rows at the places of their requests; a request that failed gets its cause and no token."""
    for row, error in sampled.errors.items():
        output.errors.setdefault(output.req_ids[order[row]], error)
    for row, place in enumerate(order):
        req_id = output.req_ids[place]
        if req_id not in output.errors:
            output.sampled_token_ids[place] = [sampled.token_ids[row]]
    for row, logprobs in sampled.logprobs.items():
        req_id = output.req_ids[order[row]]
        if req_id not in output.errors:
            output.logprobs[req_id] = logprobs
