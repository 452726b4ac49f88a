"""Phases 4 to 9 of 11, in order: the engine core without its sockets and threads.

Start-up loads the model and sizes the cache; after that the busy loop calls step_once until no work is left.
"""

from __future__ import annotations

import gc
import logging
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from serve.checkpoint import Checkpoint
from serve.config import EngineConfig
from serve.core.block_hash import BlockHasher
from serve.core.executor.base import Executor
from serve.core.executor.worker_thread import Pending
from serve.core.kv_cache_manager import KVCacheManager
from serve.core.kv_cache_sizing import CacheSize, size_kv_cache
from serve.core.request import Request, RequestStatus
from serve.core.scheduler import ClientOutputs, Scheduler
from serve.core.step_budget import describe_pace
from serve.core.structured_output.backend import LLGuidanceBackend
from serve.core.structured_output.compiler import default_threads
from serve.core.structured_output.manager import StructuredOutputManager, needs_constraint
from serve.errors import InvalidRequest
from serve.heap import return_free_memory
from serve.wire.frontend import EngineCoreRequest, Ready
from serve.wire.step import KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput

log = logging.getLogger(__name__)

_NOTHING: Final[ClientOutputs] = {}


@dataclass(slots=True)
class _Batch:
    """A step in flight; sample is None when execute does it all, or while the sampling is deferred."""

    step: SchedulerOutput
    execute: Pending[ModelRunnerOutput] | Pending[ModelRunnerOutput | None]
    sample: Pending[ModelRunnerOutput] | None = None
    is_deferred: bool = False

    def result(self) -> ModelRunnerOutput:
        """Wait for the step. The forward pass is asked first: its error is the cause of any that follows."""
        output = self.execute.result()
        if output is not None:
            return output
        assert self.sample is not None, "the worker wants to sample a step without tokens"
        return self.sample.result()


class EngineCore:
    """Scheduler, cache and executor of one model replica. Used by one thread, except prepare_request and aborts.

    aborts holds lists of request ids; they are applied before the results of a running step are folded in.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        executor: Executor,
        *,
        report: Callable[[str], None],
        structured: StructuredOutputManager | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Load and size. structured may be given for tests; wake is called when step_once should be tried again."""
        started = time.monotonic()
        self.aborts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._executor = executor
        self._vocab_size = checkpoint.arch.vocab_size
        self._hidden_size = checkpoint.arch.hidden_size
        self._is_pooling = checkpoint.pooling is not None
        self._batches: deque[_Batch] = deque()
        self._reported_gauges = (0, 0, 0, 0.0)
        self.structured = structured or StructuredOutputManager(
            LLGuidanceBackend,
            num_buffers=executor.max_concurrent_batches,
            num_threads=default_threads(),
            wake=wake,
        )
        spec = executor.start(report)
        report("sizing the KV cache")
        size = _size_cache(config, checkpoint, executor, spec)
        report("warming up")
        executor.initialize_kv_cache(KVCacheConfig(size.num_blocks, spec.block_size))
        dtype, device = executor.describe()
        kv = _make_kv_cache_manager(config, checkpoint, spec, size, dtype=dtype)
        # A given step size is the user's own compromise.
        is_open = config.scheduler.long_prefill_token_threshold is None
        cost = executor.measure_step_cost() if is_open else None
        self.scheduler = Scheduler(config.scheduler, kv, max_model_len=size.max_model_len, cost=cost)
        self.ready = Ready(
            max_model_len=size.max_model_len,
            num_gpu_blocks=size.num_blocks,
            block_size=spec.block_size,
            dtype=dtype,
            device=device,
            kv_cache_size_tokens=size.num_tokens,
            kv_cache_max_concurrency=size.max_concurrency,
            load_seconds=time.monotonic() - started,
            description=checkpoint.name,
            kv_cache_size_bytes=size.num_blocks * spec.page_size_bytes * spec.num_layers,
        )
        if spec.num_layers == 0:
            log.info("no kv cache: the model computes each prompt in one step, max_model_len=%d", size.max_model_len)
        else:
            _log_cache(size, spec)
            log.info("%s", describe_pace(config.scheduler, cost))
        # What lives now lives to the end; later collections need not look at it.
        gc.collect()
        gc.freeze()
        return_free_memory()

    def prepare_request(self, message: EngineCoreRequest) -> Request:
        """Build a request's state with its block hashes; safe on the input thread.

        Raises InvalidRequest for what the front end should have refused, so that it never reaches a step.
        """
        token_ids = message.prompt_token_ids
        if (message.pooling_params is not None) != self._is_pooling:
            raise InvalidRequest(f"the model gives {'pooled results, not' if self._is_pooling else 'only'} tokens")
        # A prompt that is to be continued leaves room for a token.
        limit = self.scheduler.max_model_len - (not self._is_pooling)
        if not 0 < len(token_ids) <= limit:
            raise InvalidRequest(
                f"the prompt has {len(token_ids)} tokens; it must have 1 to {limit}, with "
                f"max_model_len={self.scheduler.max_model_len}"
            )
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise InvalidRequest(f"a prompt token id is outside the vocabulary of {self._vocab_size} tokens")
        embeds = message.prompt_embeds
        if embeds is not None and embeds.shape != (len(token_ids), self._hidden_size):
            raise InvalidRequest(
                f"prompt_embeds has shape {list(embeds.shape)}; {[len(token_ids), self._hidden_size]} is needed"
            )
        if needs_constraint(message.sampling_params) and not self.structured.has_vocabulary:
            raise InvalidRequest("the engine core was not told the vocabulary, which a constraint needs")
        request = Request.from_wire(message)
        self.scheduler.kv.hash_prompt(request)
        return request

    def add_request(self, request: Request) -> None:
        """Queue a prepared request. Raises ValueError when its id is in use."""
        if needs_constraint(request.sampling_params) and not self.structured.start(request):
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.scheduler.add_request(request)

    def abort_requests(self, req_ids: list[str]) -> None:
        """End requests that their clients gave up; unknown ids have no effect."""
        self.scheduler.finish_requests(req_ids, RequestStatus.FINISHED_ABORTED)

    @property
    def has_work(self) -> bool:
        """True when step_once would do something."""
        return bool(self._batches) or self.scheduler.has_work

    @property
    def schedules_ahead(self) -> bool:
        """True when the next step is scheduled while one runs."""
        return self._executor.max_concurrent_batches > 1

    def step_once(self) -> tuple[ClientOutputs, bool]:
        """Advance by one turn of the loop; gives the outputs by client, and False when nothing could be done."""
        failed = _NOTHING if self.structured.is_idle else self.settle_grammars()
        outputs, is_moving = self.step_with_batch_queue() if self.schedules_ahead else self.step()
        return (_merge(failed, outputs), True) if failed else (outputs, is_moving)

    def step(self) -> tuple[ClientOutputs, bool]:
        """Schedule, execute, sample, update: one step from end to end."""
        plan = self.scheduler.schedule()
        if not _is_worth_running(plan):
            self.scheduler.cancel_step(plan)
            return _NOTHING, False
        self._dispatch(plan)
        return self._fold_oldest(), True

    def settle_grammars(self) -> ClientOutputs:
        """Let requests run whose grammar is compiled; gives the outputs of those that have none."""
        outputs: ClientOutputs = {}
        for request, error in self.structured.poll():
            if error is None:
                self.scheduler.promote(request)
            else:
                outputs = _merge(outputs, self.scheduler.fail_waiting(request, error))
        return outputs

    def step_with_batch_queue(self) -> tuple[ClientOutputs, bool]:
        """Keep the worker busy: dispatch the next step while there is room, else wait for the oldest one."""
        has_room = len(self._batches) < self._executor.max_concurrent_batches
        # Behind a step whose sampling is deferred the worker could not begin another one.
        if has_room and self.scheduler.has_work and not (self._batches and self._batches[-1].is_deferred):
            plan = self.scheduler.schedule()
            if _is_worth_running(plan):
                self._dispatch(plan)
                if len(self._batches) < self._executor.max_concurrent_batches:
                    return _NOTHING, True
            else:
                self.scheduler.cancel_step(plan)
        if not self._batches:
            return _NOTHING, False
        return self._fold_oldest(), True

    def _dispatch(self, plan: SchedulerOutput) -> None:
        if not plan.structured_req_ids:
            self._batches.append(_Batch(plan, self._executor.run_step(plan)))
            return
        batch = _Batch(plan, self._executor.execute_model(plan), is_deferred=plan.has_pending_structured_tokens)
        self._batches.append(batch)
        if not batch.is_deferred:
            self._sample(batch)

    def _sample(self, batch: _Batch) -> None:
        """Start the sampling of a step; masks are filled while its forward pass runs."""
        requests = self.scheduler.requests
        alive = [requests[req_id] for req_id in batch.step.structured_req_ids if req_id in requests]
        batch.sample = self._executor.sample_tokens(self.structured.fill(alive))
        batch.is_deferred = False

    def _fold_oldest(self) -> ClientOutputs:
        batch = self._batches[0]
        result = batch.result()
        self.apply_aborts()
        self._batches.popleft()
        outputs = self.scheduler.update_from_output(batch.step, result)
        if self._batches and self._batches[0].is_deferred:
            self._sample(self._batches[0])
        self._reported_gauges = self.scheduler.gauges()
        return outputs

    def apply_aborts(self) -> None:
        """End the requests on the aborts queue."""
        while not self.aborts.empty():
            self.abort_requests(self.aborts.get_nowait())

    def abort_all(self) -> ClientOutputs:
        """End every request as aborted and give the outputs that tell their clients."""
        return self.scheduler.abort_all()

    def take_changed_stats(self) -> ClientOutputs:
        """Give a statistics message when the gauges moved without a step (an abort in the queue, say)."""
        gauges = self.scheduler.gauges()
        if gauges == self._reported_gauges:
            return _NOTHING
        self._reported_gauges = gauges
        outputs: ClientOutputs = {}
        self.scheduler.attach_stats(outputs)
        return outputs

    def describe_failure(self) -> str:
        """Name the steps in flight and their requests, without any text of theirs."""
        steps = self.scheduler.in_flight_req_ids()
        return "; ".join(f"step {step}: {', '.join(ids)}" for step, ids in steps.items()) or "no step in flight"

    def check_idle(self) -> None:
        """Log broken numbers when blocks are missing although no request is left; O(1)."""
        pool = self.scheduler.kv.pool
        if self.scheduler.num_unfinished == 0 and pool.num_free_blocks != pool.num_blocks - 1:
            log.error(
                "block pool broken: %d free != %d usable with no request left",
                pool.num_free_blocks,
                pool.num_blocks - 1,
            )


def _size_cache(config: EngineConfig, checkpoint: Checkpoint, executor: Executor, spec: KVCacheSpec) -> CacheSize:
    return size_kv_cache(
        config,
        spec,
        available_bytes=executor.determine_available_memory(),
        model_max_len=checkpoint.arch.max_position_embeddings,
    )


def _log_cache(size: CacheSize, spec: KVCacheSpec) -> None:
    log.info(
        "kv cache ready: blocks=%d block_size=%d tokens=%s max_concurrency=%.2fx at max_model_len=%d",
        size.num_blocks,
        spec.block_size,
        f"{size.num_tokens:,}",
        size.max_concurrency,
        size.max_model_len,
    )


def _make_kv_cache_manager(
    config: EngineConfig, checkpoint: Checkpoint, spec: KVCacheSpec, size: CacheSize, *, dtype: str
) -> KVCacheManager:
    cache, budget = config.cache, config.scheduler.max_num_batched_tokens
    assert budget is not None, "max_num_batched_tokens must be resolved"
    hasher = None
    if cache.enable_prefix_caching:
        hasher = BlockHasher(
            spec.block_size,
            algorithm=cache.prefix_caching_hash_algo,
            domain="\0".join((checkpoint.name, dtype, spec.dtype)),
            seed=cache.prefix_cache_seed,
        )
    return KVCacheManager(
        size.num_blocks,
        spec.block_size,
        max_model_len=size.max_model_len,
        max_step_tokens=budget,
        hasher=hasher,
        sliding_window=spec.sliding_window,
        watermark=config.scheduler.watermark,
    )


def _merge(first: ClientOutputs, second: ClientOutputs) -> ClientOutputs:
    """Join the outputs of two sources by client; at most one of them carries statistics."""
    merged = dict(second)
    for client_index, message in first.items():
        other = merged.get(client_index)
        if other is None:
            merged[client_index] = message
        else:
            other.outputs[:0] = message.outputs
    return merged


def _is_worth_running(plan: SchedulerOutput) -> bool:
    return plan.total_num_scheduled_tokens > 0 or bool(plan.finished_req_ids) or bool(plan.preempted_req_ids)
