"""Phase 2 of 11: the engine as the HTTP layer sees it; a request is checked, registered, submitted and streamed back.

One task takes the engine's messages for all requests. It ends only with the engine, and then every request that is
still open gets the same EngineDead.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Final, Literal

import msgspec

from serve.checkpoint import Checkpoint
from serve.config import ServeConfig
from serve.engine.core_client import CoreClient
from serve.engine.input_processor import InputProcessor, RequestOptions, default_sampling
from serve.engine.output_processor import ClientRequest, OutputProcessor, RequestOutputCollector
from serve.engine.outputs import PoolingOutput, RequestOutput
from serve.engine.parallel_sampling import ParentRequest, child_params, num_children
from serve.engine.stats import LOG_PERIOD, EngineStats, RateLine
from serve.engine.vocabulary import VocabularySender
from serve.errors import EngineDead, Overloaded, RequestFailed
from serve.pooling_params import PoolingParams
from serve.renderers.tokenizer import Tokenizer
from serve.sampling_params import SamplingParams
from serve.wire.frontend import (
    EngineCoreRequest,
    IsPaused,
    PauseScheduler,
    Ready,
    ResetPrefixCache,
    ResumeScheduler,
)

log = logging.getLogger(__name__)

OUTPUT_SLICE: Final = 128  # outputs handled before other tasks get a turn
MAX_RETRY_AFTER: Final = 60


class RequestStream:
    """The hand-overs of one request, in order. Leaving it early (aclose, cancellation) aborts the request once."""

    def __init__(self, llm: AsyncLLM, client: ClientRequest, request_ids: list[str]) -> None:
        self._llm = llm
        self._client = client
        self._request_ids = request_ids
        self._is_over = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        collector = self._client.collector
        is_complete = False
        try:
            output = collector.get_nowait() or await collector.get()
            is_complete = output.finished
        except asyncio.CancelledError:
            await self.aclose()
            raise
        finally:
            # After an error (and the end) nothing follows; a cancelled read has aborted above.
            self._is_over = self._is_over or is_complete or collector.has_failed
        return output

    async def aclose(self) -> None:
        """Abort the request here and in the engine unless it is over. May be called again."""
        if not self._is_over:
            self._is_over = True
            await self._llm.abort_internal(self._request_ids)


class AsyncLLM:
    """The engine client. Belongs to one event loop; start() or the first request starts its tasks."""

    def __init__(
        self,
        core_client: CoreClient,
        tokenizer: Tokenizer,
        *,
        checkpoint: Checkpoint,
        config: ServeConfig,
        ready: Ready,
    ) -> None:
        engine = config.engine
        self.max_model_len = ready.max_model_len
        self.pooling = checkpoint.pooling
        self.default_sampling = default_sampling(checkpoint, engine.model)
        self.stats = EngineStats(ready.max_model_len)
        self._core = core_client
        self._input = InputProcessor(
            tokenizer,
            checkpoint=checkpoint,
            config=engine.model,
            max_model_len=ready.max_model_len,
            limits=config.limits,
        )
        self.end_token_ids = self._input.end_token_ids
        self._vocabulary = VocabularySender(core_client, tokenizer, self.end_token_ids)
        # Elements of one embedding in prompt_embeds; None when such prompts are not taken.
        self.prompt_embeds_size = checkpoint.arch.hidden_size if engine.model.enable_prompt_embeds else None
        self._output = OutputProcessor(tokenizer, stats=self.stats, stream_interval=engine.scheduler.stream_interval)
        self._admission = Admission(config, self._output, self.stats)
        self._logs_rates = not config.server.disable_log_stats
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_started = False

    @property
    def is_errored(self) -> bool:
        """True once the engine is gone; every call that needs it raises EngineDead."""
        return self._core.is_dead

    def dead_error(self) -> EngineDead:
        """Give the error of a dead engine."""
        return self._core.dead_error()

    @property
    def num_unfinished(self) -> int:
        """Number of engine requests not finished yet; each choice of n > 1 counts."""
        return self._output.num_unfinished

    @property
    def is_draining(self) -> bool:
        """True after begin_drain."""
        return self._admission.is_draining

    @property
    def is_full(self) -> bool:
        """True while a new request would be refused for want of room in the queue."""
        return self._admission.is_full

    def heartbeat_age(self) -> float:
        """Give the seconds since the engine was last heard of; it speaks every two seconds even when idle."""
        return time.monotonic() - self._core.last_message_at if self._is_started else 0.0

    def start(self) -> None:
        """Start taking outputs; needs a running event loop. May be called again."""
        if self._is_started:
            return
        self._is_started = True
        self._core.last_message_at = time.monotonic()
        self._spawn(run_output_task(self._core, self._output, self.stats))
        if self._logs_rates:
            self._spawn(run_log_task(self.stats))

    async def generate(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield a request's hand-overs. Errors as add_request, and those of its run; closing it early aborts."""
        stream = await self.add_request(prompt_token_ids, sampling_params, request_id, options=options)
        try:
            async for output in stream:
                yield output
        finally:
            await stream.aclose()

    async def add_request(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        request_id: str,
        *,
        options: RequestOptions | None = None,
    ) -> RequestStream:
        """Check, register and submit a request; request_id is the client's and need not be unique.

        Raises InvalidRequest, Overloaded or EngineDead; then nothing stays behind. The stream must be read to its end
        or closed.
        """
        if self.is_errored:
            raise self.dead_error()
        self._admission.check()
        options = options or RequestOptions()
        request = self._input.process(prompt_token_ids, sampling_params, request_id=request_id, options=options)
        return await self._submit(request, request_id, options)

    async def add_pooling_request(
        self,
        prompt_token_ids: list[int],
        pooling_params: PoolingParams,
        request_id: str,
        *,
        options: RequestOptions | None = None,
    ) -> RequestStream:
        """Check, register and submit a request to a pooling model; errors and duties as with add_request."""
        if self.is_errored:
            raise self.dead_error()
        self._admission.check()
        options = options or RequestOptions()
        request = self._input.process_pooling(prompt_token_ids, pooling_params, request_id=request_id, options=options)
        return await self._submit(request, request_id, options)

    async def encode(
        self,
        prompt_token_ids: list[int],
        pooling_params: PoolingParams,
        request_id: str,
        *,
        options: RequestOptions | None = None,
    ) -> PoolingOutput:
        """Give a pooling model's result. Errors as add_request, and those of its run; cancelling it aborts."""
        stream = await self.add_pooling_request(prompt_token_ids, pooling_params, request_id, options=options)
        try:
            return await pooled_result(stream)
        finally:
            await stream.aclose()

    async def _submit(self, request: EngineCoreRequest, request_id: str, options: RequestOptions) -> RequestStream:
        """Register a checked request and send it to the engine; when that fails nothing stays behind."""
        self.start()
        params = request.sampling_params
        await self._vocabulary.ensure(params)
        client = ClientRequest(
            request_id,
            RequestOutputCollector(params.output_kind),
            ParentRequest(params) if params.n > 1 else None,
        )
        children = expand(request)
        stream = RequestStream(self, client, [child.request_id for child in children])
        arrival = time.monotonic() - max(0.0, time.time() - options.arrival_time)
        is_submitted = False
        try:
            # Registration of all comes before submission of any: an output never arrives without a home.
            for index, child in enumerate(children):
                self._output.add_request(child, client, index=index, arrival=arrival)
            for child in children:
                await self._core.add_request(child)
            is_submitted = True
        finally:
            if not is_submitted:
                await stream.aclose()
        return stream

    async def abort(self, request_id: str) -> None:
        """Abort every request under a client's id; readers get what exists, finished with reason abort."""
        await self.abort_internal(self._output.internal_ids(request_id))

    async def abort_internal(self, request_ids: list[str]) -> None:
        """Abort engine requests here and in the engine; those already over are left alone."""
        aborted = self._output.abort(request_ids)
        if aborted:
            # The reader may be cancelled again while this waits; the engine must be told all the same.
            await asyncio.shield(self._spawn(self._core.abort(aborted)))

    async def pause(self, mode: Literal["abort", "wait", "keep"], *, clear_cache: bool = True) -> None:
        """Stop admitting work in the engine; requests that arrive meanwhile wait."""
        self.start()
        await self._core.control(PauseScheduler(mode, clear_cache))

    async def resume(self) -> None:
        """Undo a pause."""
        self.start()
        await self._core.control(ResumeScheduler())

    async def is_paused(self) -> bool:
        """Ask the engine whether it is paused."""
        self.start()
        return await self._core.control(IsPaused())

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Drop all cached prefixes; False when blocks are in use."""
        self.start()
        return await self._core.control(ResetPrefixCache(reset_running_requests))

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self._admission.is_draining = True

    async def wait_drained(self, timeout: float) -> bool:
        """Wait until every request has ended; False when the seconds are over first."""
        try:
            await asyncio.wait_for(self._output.idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def shutdown(self) -> None:
        """Stop the tasks, end open requests with EngineDead and close the sockets."""
        for task in self._tasks:
            task.cancel()
        self._core.close()
        self._output.fail_all(self._core.dead_error())

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        # A mistake of ours in a task that serves everyone: fail loudly rather than leave requests waiting.
        log.error("engine client task failed", exc_info=error)
        self._core.notify_dead("the engine client failed, see the server's log")
        self._output.fail_all(self._core.dead_error())


class Admission:
    """Decides whether one more request may enter: the bounds of the waiting queue, and draining."""

    def __init__(self, config: ServeConfig, output: OutputProcessor, stats: EngineStats) -> None:
        scheduler = config.engine.scheduler
        self.is_draining = False
        self._max_num_seqs = scheduler.max_num_seqs or 1
        self._max_waiting = scheduler.max_waiting
        self._max_waiting_tokens = scheduler.max_waiting_tokens
        self._output = output
        self._stats = stats

    @property
    def num_waiting(self) -> int:
        """Requests that cannot run now: those beyond max_num_seqs, or what the engine reports for want of cache.

        The engine's number may be a step old; requests with no output yet bound it from above.
        """
        beyond = self._output.num_unfinished - self._max_num_seqs
        reported = min(self._stats.gauges.num_requests_waiting, self._output.num_without_output)
        return max(beyond, reported, 0)

    @property
    def is_full(self) -> bool:
        """True when the queue has reached one of its bounds."""
        return (
            self.num_waiting >= self._max_waiting
            or self._output.prompt_tokens_without_output >= self._max_waiting_tokens
        )

    def check(self) -> None:
        """Raise Overloaded unless a request may enter."""
        if self.is_draining:
            raise Overloaded("draining: the server is shutting down and takes no new requests", code="draining")
        if not self.is_full:
            return
        tokens = self._output.prompt_tokens_without_output
        raise Overloaded(
            f"overloaded: {self.num_waiting} requests with {tokens} prompt tokens are waiting, the limits are "
            f"{self._max_waiting} and {self._max_waiting_tokens}; try again later",
            retry_after=self._retry_after(),
        )

    def _retry_after(self) -> int:
        """Seconds until the present queue should have run, between 1 and MAX_RETRY_AFTER.

        Each max_num_seqs waiting requests take one mean request time so far.
        """
        times = self._stats.histograms["e2e_request_latency_seconds"]
        mean = times.sum / max(times.count, 1)
        return max(1, min(MAX_RETRY_AFTER, math.ceil(mean * self.num_waiting / self._max_num_seqs)))


async def pooled_result(stream: RequestStream) -> PoolingOutput:
    """Give the only hand-over of a request to a pooling model. Raises RequestFailed when it was cut off."""
    async for output in stream:
        if output.finished and output.pooled is not None:
            return PoolingOutput(output.request_id, output.prompt_token_ids, output.pooled, output.num_cached_tokens)
    raise RequestFailed("the request ended without a result", cause="model_error")


def expand(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """Give the engine requests of a client request: itself for n = 1, else one child a choice."""
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request, request_id=f"{index}_{request.request_id}", sampling_params=child_params(params, index)
        )
        for index in range(num_children(params))
    ]


async def run_output_task(core: CoreClient, output: OutputProcessor, stats: EngineStats) -> None:
    """Phase 10 of 11, receiving end: take messages until the engine is gone, then fail what is open.

    Takes the parts it needs, not the AsyncLLM, so that a forgotten client can be collected.
    """
    try:
        while True:
            message = await core.get_output()
            for start in range(0, len(message.outputs), OUTPUT_SLICE):
                await core.abort(
                    output.process_outputs(message.outputs[start : start + OUTPUT_SLICE], message.timestamp)
                )
                # Readers get their turn between slices.
                await asyncio.sleep(0)
            stats.on_iteration_end()
            if message.scheduler_stats is not None:
                stats.on_scheduler_stats(message.scheduler_stats)
    except EngineDead as error:
        # Whoever watches the process has logged its end; this line matters when requests were cut off.
        level = logging.ERROR if output.num_unfinished else logging.INFO
        log.log(level, "%s: %d requests were open", error, output.num_unfinished)
        stats.on_engine_gone()
        output.fail_all(error)


async def run_log_task(stats: EngineStats) -> None:
    """Write the rate line every LOG_PERIOD seconds."""
    line = RateLine(stats)
    while True:
        await asyncio.sleep(LOG_PERIOD)
        line.write(time.monotonic())
