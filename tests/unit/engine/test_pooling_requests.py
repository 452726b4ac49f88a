"""Requests to a pooling model on the client's side of the engine: what is refused, what is sent, what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from serve.checkpoint import EncoderArch, PoolerConfig
from serve.config import EngineConfig, ModelConfig, ServeConfig, ServerConfig, resolve
from serve.engine.async_llm import AsyncLLM
from serve.engine.core_client import CoreClient
from serve.engine.input_processor import InputProcessor, RequestOptions
from serve.errors import InvalidRequest, RequestFailed
from serve.pooling_params import PoolingParams
from serve.wire.frontend import EngineCoreOutput, EngineCoreRequest, FinishReason, PrefillStats
from serve.wire.sockets import make_endpoint_dir
from tests.fakes import ByteTokenizer, FakeCore, byte_checkpoint, ready_message
from tests.waiting import async_wait_until

MAX_LEN = 128
SIZE = 8


def process(
    pooler: PoolerConfig | None, params: PoolingParams, *, length: int = 3, token_types: int = 0
) -> EngineCoreRequest:
    checkpoint = replace(byte_checkpoint(), pooling=pooler)
    if token_types:
        checkpoint = replace(checkpoint, arch=replace(checkpoint.arch, encoder=EncoderArch(1e-5, token_types)))
    subject = InputProcessor(ByteTokenizer(), checkpoint=checkpoint, config=ModelConfig(), max_model_len=MAX_LEN)
    return subject.process_pooling([7] * length, params, request_id="req", options=RequestOptions(priority=3))


def refusal(pooler: PoolerConfig | None, params: PoolingParams, *, length: int = 3) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        process(pooler, params, length=length)
    return caught.value


def test_prompt_may_fill_the_whole_context() -> None:
    request = process(PoolerConfig(), PoolingParams(), length=MAX_LEN)
    assert len(request.prompt_token_ids) == MAX_LEN
    assert (request.priority, request.external_req_id, request.pooling_params) == (3, "req", PoolingParams())
    error = refusal(PoolerConfig(), PoolingParams(), length=MAX_LEN + 1)
    assert error.code == "context_length_exceeded"
    assert "129 tokens and the model takes 128 at most" in str(error)
    assert refusal(PoolerConfig(), PoolingParams(), length=0).param == "prompt"


@pytest.mark.parametrize(
    ("kind", "task", "reads_cache"),
    [("last", "embed", True), ("mean", "embed", False), ("cls", "embed", False), ("last", "token_embed", False)],
)
def test_only_the_last_row_can_come_after_a_cached_prefix(kind: str, task: str, reads_cache: bool) -> None:
    request = process(PoolerConfig(pooling_type=kind), PoolingParams(task))  # type: ignore[arg-type]
    assert request.sampling_params.skip_reading_prefix_cache is not reads_cache


def test_task_of_another_model_is_refused_with_those_there_are() -> None:
    assert "'classify' is not one of this model's: embed, token_embed" in str(
        refusal(PoolerConfig(), PoolingParams("classify"))
    )
    assert "gives no pooled results" in str(refusal(None, PoolingParams()))


@pytest.mark.parametrize(
    ("pooler", "dimensions", "rule"),
    [
        (PoolerConfig(), 4, "cannot be cut, they have 8 elements"),
        (PoolerConfig(is_matryoshka=True), 0, "1 to 8, got 0"),
        (PoolerConfig(is_matryoshka=True), 9, "1 to 8, got 9"),
        (PoolerConfig(is_matryoshka=True, dimensions=(2, 4)), 3, "one of 2, 4, got 3"),
    ],
)
def test_dimensions_that_the_model_was_not_made_for_are_refused(
    pooler: PoolerConfig, dimensions: int, rule: str
) -> None:
    error = refusal(pooler, PoolingParams(dimensions=dimensions))
    assert error.param == "dimensions"
    assert rule in str(error)


def test_dimensions_that_the_model_was_made_for_pass() -> None:
    for pooler in (PoolerConfig(is_matryoshka=True), PoolerConfig(is_matryoshka=True, dimensions=(2, 4))):
        request = process(pooler, PoolingParams(dimensions=4))
        assert request.pooling_params == PoolingParams(dimensions=4)


@pytest.mark.parametrize(("token_types", "second"), [(0, None), (1, None), (2, 2)])
def test_second_text_counts_only_for_models_with_two_token_types(token_types: int, second: int | None) -> None:
    request = process(PoolerConfig(), PoolingParams(second_text_start=2), token_types=token_types)
    assert request.pooling_params is not None
    assert request.pooling_params.second_text_start == second


@asynccontextmanager
async def bench(base: Path) -> AsyncIterator[tuple[AsyncLLM, FakeCore]]:
    config = ServeConfig(engine=resolve(EngineConfig(), MAX_LEN), server=ServerConfig(disable_log_stats=True))
    client = CoreClient(make_endpoint_dir(base))
    core = FakeCore(client.input_address, client.output_address)
    checkpoint = replace(byte_checkpoint(), pooling=PoolerConfig())
    llm = AsyncLLM(client, ByteTokenizer(), checkpoint=checkpoint, config=config, ready=ready_message())
    try:
        await client.wait_ready()
        yield llm, core
    finally:
        core.close()
        llm.shutdown()


async def test_result_comes_back_as_it_was_sent(tmp_path: Path) -> None:
    async with bench(tmp_path) as (llm, core):
        task = asyncio.ensure_future(llm.encode([1, 2, 3], PoolingParams("token_embed"), "a"))
        (request,) = await core.wait_requests(1)
        assert request.pooling_params == PoolingParams("token_embed")
        rows = np.arange(6, dtype=np.float32).reshape(3, 2)
        core.send(
            EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=FinishReason.STOP,
                prefill_stats=PrefillStats(3, 2),
                pooling_output=rows,
            )
        )
        output = await task
        np.testing.assert_array_equal(output.pooled, rows)
        assert (output.request_id, output.prompt_token_ids, output.num_cached_tokens) == ("a", [1, 2, 3], 2)
        assert llm.num_unfinished == 0
        assert llm.stats.counters.prompt_tokens == 3


async def test_error_of_the_engine_fails_the_call(tmp_path: Path) -> None:
    async with bench(tmp_path) as (llm, core):
        task = asyncio.ensure_future(llm.encode([1], PoolingParams(), "a"))
        (request,) = await core.wait_requests(1)
        core.send(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error="nan_output: bad"))
        with pytest.raises(RequestFailed, match="nan_output"):
            await task


async def test_aborted_request_has_no_result(tmp_path: Path) -> None:
    async with bench(tmp_path) as (llm, core):
        task = asyncio.ensure_future(llm.encode([1], PoolingParams(), "a"))
        await core.wait_requests(1)
        await llm.abort("a")
        with pytest.raises(RequestFailed, match="ended without a result"):
            await task


async def test_caller_that_leaves_aborts_the_request(tmp_path: Path) -> None:
    async with bench(tmp_path) as (llm, core):
        task = asyncio.ensure_future(llm.encode([1], PoolingParams(), "a"))
        (request,) = await core.wait_requests(1)
        task.cancel()
        await async_wait_until(lambda: core.aborts == [[request.request_id]], 5, "the abort at the core")
        assert llm.num_unfinished == 0
