"""AsyncLLM against a scripted engine core over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from serve.config import EngineConfig, SchedulerConfig, ServeConfig, ServerConfig, resolve
from serve.engine.async_llm import AsyncLLM, RequestStream
from serve.engine.core_client import CoreClient
from serve.engine.input_processor import RequestOptions
from serve.engine.outputs import RequestOutput
from serve.errors import EngineDead, InvalidRequest, Overloaded, RequestFailed
from serve.sampling_params import OutputKind, SamplingParams
from serve.wire.frontend import (
    ControlResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    IsPaused,
    PrefillStats,
    SchedulerStats,
)
from serve.wire.sockets import make_endpoint_dir
from tests.fakes import ByteTokenizer, FakeCore, byte_checkpoint, ready_message
from tests.waiting import async_wait_until

PROMPT = [104, 105]
DELTA = SamplingParams(max_tokens=64, output_kind=OutputKind.DELTA)
FINAL = SamplingParams(max_tokens=64, output_kind=OutputKind.FINAL_ONLY)


@dataclass
class Bench:
    llm: AsyncLLM
    core: FakeCore
    client: CoreClient

    async def start(self, params: SamplingParams = DELTA, request_id: str = "a") -> RequestStream:
        return await self.llm.add_request(PROMPT, params, request_id)

    async def step(self, *outputs: EngineCoreOutput) -> None:
        """Send outputs and wait until they are processed, by a message that comes after them."""
        self.core.send(*outputs)
        await self.settle()

    async def settle(self) -> None:
        marker = self.llm.stats.counters.num_preemptions + 1
        self.core.send(stats=SchedulerStats(num_preemptions=1))
        await async_wait_until(lambda: self.llm.stats.counters.num_preemptions >= marker, 5, "marker processed")


@asynccontextmanager
async def bench(
    base: Path, *, scheduler: SchedulerConfig | None = None, tokenizer: ByteTokenizer | None = None
) -> AsyncIterator[Bench]:
    scheduler = scheduler or SchedulerConfig()
    engine = resolve(EngineConfig(scheduler=scheduler), 128)
    config = ServeConfig(engine=engine, server=ServerConfig(disable_log_stats=True))
    client = CoreClient(make_endpoint_dir(base))
    core = FakeCore(client.input_address, client.output_address)
    tokenizer = tokenizer or ByteTokenizer()
    llm = AsyncLLM(client, tokenizer, checkpoint=byte_checkpoint(), config=config, ready=ready_message())
    try:
        yield Bench(llm, core, client)
    finally:
        llm.shutdown()
        core.close()


def run(tmp_path: Path, test: Callable[[Bench], Awaitable[None]], **kwargs: object) -> None:
    async def body() -> None:
        async with asyncio.timeout(30), bench(tmp_path, **kwargs) as b:  # type: ignore[arg-type]
            await test(b)

    asyncio.run(body())


async def read_all(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def text_of(outputs: list[RequestOutput], index: int = 0) -> str:
    return "".join(c.text for o in outputs for c in o.outputs if c.index == index)


def test_tokens_arrive_as_text_and_end_with_the_reason(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        request = (await b.core.wait_requests(1))[0]
        b.core.send_text(request.request_id, "hello", FinishReason.LENGTH)
        outputs = await read_all(stream)
        assert text_of(outputs) == "hello"
        assert [i for o in outputs for i in o.outputs[0].token_ids] == list(b"hello")
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason is FinishReason.LENGTH
        assert outputs[-1].num_generated_tokens == {0: 5}
        assert outputs[-1].request_id == "a"
        assert b.llm.num_unfinished == 0

    run(tmp_path, test)


def test_the_engine_gets_a_complete_request_with_an_id_of_its_own(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        await b.llm.add_request(PROMPT, DELTA, "a", options=RequestOptions(priority=3, cache_salt="s"))
        request = (await b.core.wait_requests(1))[0]
        assert request.prompt_token_ids == PROMPT
        assert request.request_id.startswith("a-")
        assert request.external_req_id == "a"
        assert (request.priority, request.cache_salt) == (3, "s")
        assert request.sampling_params.eos_token_id == 256

    run(tmp_path, test)


def test_same_client_id_twice_gives_two_independent_answers(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        first, second = await b.start(), await b.start()
        one, two = await b.core.wait_requests(2)
        b.core.send_text(two.request_id, "two", FinishReason.STOP)
        b.core.send_text(one.request_id, "one", FinishReason.LENGTH)
        assert text_of(await read_all(first)) == "one"
        # The stop token's own text is not shown.
        assert text_of(await read_all(second)) == "tw"

    run(tmp_path, test)


def test_a_slow_reader_gets_one_large_delta_and_nothing_is_lost(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        request = (await b.core.wait_requests(1))[0]
        b.core.send_text(request.request_id, "x" * 50, FinishReason.LENGTH)
        await b.settle()
        outputs = await read_all(stream)
        assert len(outputs) == 1
        assert outputs[0].outputs[0].text == "x" * 50
        assert outputs[0].outputs[0].token_ids == [120] * 50
        assert outputs[0].num_generated_tokens == {0: 50}

    run(tmp_path, test)


def test_outputs_after_an_abort_are_dropped(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        gone = await b.start()
        stays = await b.start(request_id="b")
        first, second = await b.core.wait_requests(2)
        await gone.aclose()
        b.core.send_text(first.request_id, "late")
        b.core.send_text(second.request_id, "kept", FinishReason.LENGTH)
        assert text_of(await read_all(stays)) == "kept"
        assert await read_all(gone) == []

    run(tmp_path, test)


def test_closing_a_stream_aborts_once_in_both_places(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        request = (await b.core.wait_requests(1))[0]
        await stream.aclose()
        await stream.aclose()
        await async_wait_until(lambda: bool(b.core.aborts), 5, "abort at the core")
        assert b.core.aborts == [[request.request_id]]
        assert b.llm.num_unfinished == 0
        assert b.llm.stats.counters.request_success["abort"] == 1

    run(tmp_path, test)


def test_cancelling_a_reader_aborts_all_choices(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        params = replace_params(DELTA, n=4, temperature=1.0)
        stream = await b.start(params)
        requests = await b.core.wait_requests(4)
        reader = asyncio.create_task(read_all(stream))
        await b.settle()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await async_wait_until(lambda: bool(b.core.aborts), 5, "abort at the core")
        assert sorted(b.core.aborts[0]) == sorted(r.request_id for r in requests)
        assert b.llm.num_unfinished == 0

    run(tmp_path, test)


def test_leaving_generate_early_aborts(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        outputs = b.llm.generate(PROMPT, DELTA, "a")
        pull = asyncio.ensure_future(anext(outputs))
        request = (await b.core.wait_requests(1))[0]
        b.core.send_text(request.request_id, "x")
        assert (await pull).outputs[0].text == "x"
        await outputs.aclose()  # type: ignore[attr-defined]
        await async_wait_until(lambda: b.core.aborts == [[request.request_id]], 5, "abort at the core")
        assert b.llm.num_unfinished == 0

    run(tmp_path, test)


def test_abort_by_client_id_ends_all_its_requests_with_reason_abort(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        streams = [await b.start(), await b.start()]
        other = await b.start(request_id="b")
        requests = await b.core.wait_requests(3)
        await b.llm.abort("a")
        for stream in streams:
            outputs = await read_all(stream)
            assert outputs[-1].outputs[0].finish_reason is FinishReason.ABORT
        assert b.llm.num_unfinished == 1
        await async_wait_until(lambda: bool(b.core.aborts), 5, "abort at the core")
        assert sorted(b.core.aborts[0]) == sorted(r.request_id for r in requests[:2])
        await other.aclose()

    run(tmp_path, test)


def test_a_stop_string_ends_the_request_and_aborts_it_in_the_engine(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start(replace_params(DELTA, stop=("END",)))
        request = (await b.core.wait_requests(1))[0]
        b.core.send_text(request.request_id, "some ENtrance END and more")
        outputs = await read_all(stream)
        assert text_of(outputs) == "some ENtrance "
        assert outputs[-1].outputs[0].stop_reason == "END"
        assert outputs[-1].outputs[0].finish_reason is FinishReason.STOP
        await async_wait_until(lambda: b.core.aborts == [[request.request_id]], 5, "abort at the core")
        assert b.llm.stats.counters.request_success["stop"] == 1

    run(tmp_path, test)


@pytest.mark.parametrize("by_frame", [True, False], ids=["dead-frame", "process-gone"])
def test_engine_death_reaches_every_request_and_refuses_new_ones(tmp_path: Path, by_frame: bool) -> None:
    async def test(b: Bench) -> None:
        streams = [await b.start(request_id=str(i)) for i in range(3)]
        readers = [asyncio.create_task(read_all(s)) for s in streams]
        await b.core.wait_requests(3)
        if by_frame:
            b.core.die()
        else:
            await asyncio.to_thread(b.client.notify_dead, "killed by signal 9")
        for reader in readers:
            with pytest.raises(EngineDead):
                await asyncio.wait_for(reader, 1)
        assert b.llm.is_errored
        assert b.llm.num_unfinished == 0
        with pytest.raises(EngineDead, match="engine_dead" if by_frame else "signal 9"):
            await b.start()

    run(tmp_path, test)


def test_outputs_sent_before_death_still_arrive(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        request = (await b.core.wait_requests(1))[0]
        b.core.send_text(request.request_id, "last words", FinishReason.ABORT)
        await async_wait_until(lambda: b.llm.num_unfinished == 0, 5, "output processed")
        b.client.notify_dead("gone")
        assert text_of(await read_all(stream)) == "last words"

    run(tmp_path, test)


def test_n_choices_are_n_seeded_requests_with_one_stream(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start(replace_params(FINAL, n=3, seed=7))
        requests = await b.core.wait_requests(3)
        assert [r.sampling_params.seed for r in requests] == [7, 8, 9]
        assert all(r.sampling_params.n == 1 for r in requests)
        for request, text in zip(reversed(requests), ("cc", "bb", "aa"), strict=True):
            b.core.send_text(request.request_id, text, FinishReason.LENGTH)
        outputs = await read_all(stream)
        assert len(outputs) == 1
        assert [(c.index, c.text) for c in outputs[0].outputs] == [(0, "aa"), (1, "bb"), (2, "cc")]
        assert outputs[0].num_generated_tokens == {0: 2, 1: 2, 2: 2}

    run(tmp_path, test)


def test_n_greedy_choices_are_computed_once_and_answered_n_times(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start(replace_params(DELTA, n=3, temperature=0.0))
        (request,) = await b.core.wait_requests(1)
        b.core.send_text(request.request_id, "same", FinishReason.LENGTH)
        outputs = await read_all(stream)
        await b.settle()
        assert len(b.core.requests) == 1
        assert [text_of(outputs, i) for i in range(3)] == ["same"] * 3
        assert outputs[-1].num_generated_tokens == {0: 4, 1: 4, 2: 4}

    run(tmp_path, test)


def test_a_failed_choice_fails_the_request_and_aborts_its_siblings(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start(replace_params(DELTA, n=2))
        first, second = await b.core.wait_requests(2)
        b.core.send(EngineCoreOutput(first.request_id, [], finish_reason=FinishReason.ERROR, error="nan_logits: row 0"))
        with pytest.raises(RequestFailed, match="row 0") as caught:
            await read_all(stream)
        assert caught.value.cause == "nan_logits"
        await async_wait_until(lambda: b.core.aborts == [[second.request_id]], 5, "sibling aborted")
        assert b.llm.num_unfinished == 0

    run(tmp_path, test)


def test_a_request_that_the_engine_calls_invalid_is_the_clients_mistake(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        (request,) = await b.core.wait_requests(1)
        error = "invalid_request: force must be a token id"
        b.core.send(EngineCoreOutput(request.request_id, [], finish_reason=FinishReason.ERROR, error=error))
        with pytest.raises(InvalidRequest, match=r"^force must be a token id$"):
            await read_all(stream)

    run(tmp_path, test)


class FailingStream:
    def step(self, token_id: int) -> str | None:
        if token_id == 33:
            raise ValueError("broken text")
        return chr(token_id)


class FailingTokenizer(ByteTokenizer):
    def new_decode_stream(self, prompt_token_ids: object, **_: object) -> FailingStream:  # type: ignore[override]
        return FailingStream()


def test_an_exception_in_the_detokenizer_fails_that_request_only(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        bad, good = await b.start(request_id="bad"), await b.start(request_id="good")
        first, second = await b.core.wait_requests(2)
        b.core.send(EngineCoreOutput(first.request_id, [33]), EngineCoreOutput(second.request_id, [97]))
        with pytest.raises(RequestFailed) as caught:
            await read_all(bad)
        assert caught.value.cause == "output_error"
        await async_wait_until(lambda: b.core.aborts == [[first.request_id]], 5, "abort at the core")
        b.core.send_text(second.request_id, "b", FinishReason.LENGTH)
        assert text_of(await read_all(good)) == "ab"

    run(tmp_path, test, tokenizer=FailingTokenizer())


def test_junk_messages_are_counted_and_dropped(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        request = (await b.core.wait_requests(1))[0]
        b.core.send_frames(b"\xc1 not msgpack")
        b.core.send_frames(b"", b"", b"")
        b.core.send_text(request.request_id, "fine", FinishReason.LENGTH)
        assert text_of(await read_all(stream)) == "fine"
        assert b.client.wire_errors.count == 2

    run(tmp_path, test)


def test_requests_beyond_the_queue_bound_are_refused_until_there_is_room(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        streams = [await b.start(request_id=str(i)) for i in range(3)]
        with pytest.raises(Overloaded, match="limits are 2") as caught:
            await b.start()
        assert caught.value.code == "overloaded"
        assert caught.value.retry_after == 1
        b.llm.stats.histograms["e2e_request_latency_seconds"].observe(2.5)
        with pytest.raises(Overloaded) as caught:
            await b.start()
        assert caught.value.retry_after == 5
        assert b.llm.is_full
        await streams[0].aclose()
        assert not b.llm.is_full
        streams.append(await b.start())
        for stream in streams:
            await stream.aclose()

    run(tmp_path, test, scheduler=SchedulerConfig(max_num_seqs=1, max_waiting=2))


def test_prompt_tokens_without_an_answer_are_bounded(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        first, second = await b.start(), await b.start()
        with pytest.raises(Overloaded, match="prompt tokens"):
            await b.start()
        request = (await b.core.wait_requests(2))[0]
        await b.step(EngineCoreOutput(request.request_id, [97]))
        third = await b.start()
        for stream in (first, second, third):
            await stream.aclose()

    run(tmp_path, test, scheduler=SchedulerConfig(max_waiting_tokens=4))


def test_draining_refuses_new_requests_and_waits_for_the_old(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        request = (await b.core.wait_requests(1))[0]
        b.llm.begin_drain()
        with pytest.raises(Overloaded) as caught:
            await b.start()
        assert caught.value.code == "draining"
        assert not await b.llm.wait_drained(0.01)
        b.core.send_text(request.request_id, "done", FinishReason.LENGTH)
        assert await b.llm.wait_drained(5)
        assert text_of(await read_all(stream)) == "done"

    run(tmp_path, test)


def test_a_refused_request_leaves_nothing_behind(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        with pytest.raises(InvalidRequest):
            await b.llm.add_request([], DELTA, "a")
        with pytest.raises(InvalidRequest, match="encoded"):
            await b.start(replace_params(DELTA, stop=("\ud800",)))
        await b.settle()
        assert b.llm.num_unfinished == 0
        assert b.core.requests == []

    run(tmp_path, test)


def test_control_calls_are_answered_on_the_same_sockets(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        asking = asyncio.create_task(b.llm.is_paused())
        await async_wait_until(lambda: bool(b.core.controls), 5, "control call")
        call = b.core.controls[0]
        assert call.control == IsPaused()
        b.core.send_message(EngineCoreOutputs(control_result=ControlResult(call.call_id, True)))
        assert await asking is True
        failing = asyncio.create_task(b.llm.reset_prefix_cache())
        await async_wait_until(lambda: len(b.core.controls) == 2, 5, "control call")
        result = ControlResult(b.core.controls[1].call_id, failure_message="reset_prefix_cache: broken")
        b.core.send_message(EngineCoreOutputs(control_result=result))
        with pytest.raises(RequestFailed, match="broken"):
            await failing

    run(tmp_path, test)


def test_a_control_call_ends_when_the_engine_dies(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        asking = asyncio.create_task(b.llm.is_paused())
        await async_wait_until(lambda: bool(b.core.controls), 5, "control call")
        b.core.die()
        with pytest.raises(EngineDead):
            await asyncio.wait_for(asking, 1)

    run(tmp_path, test)


def test_gauges_follow_stats_only_messages(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        b.llm.start()
        b.core.send(
            stats=SchedulerStats(num_running_reqs=2, num_waiting_reqs=3, num_deferred_reqs=1, kv_cache_usage=0.5)
        )
        await async_wait_until(lambda: b.llm.stats.gauges.num_requests_running == 2, 5, "gauges set")
        assert b.llm.stats.gauges.num_requests_waiting == 4
        b.core.send(stats=SchedulerStats())
        await async_wait_until(lambda: b.llm.stats.gauges.num_requests_running == 0, 5, "gauges cleared")
        assert b.llm.stats.gauges.kv_cache_usage_perc == 0.0

    run(tmp_path, test)


def test_stream_interval_gathers_tokens_but_sends_the_first_at_once(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        request = (await b.core.wait_requests(1))[0]
        sizes = []
        reader = aiter(stream)
        for position in range(9):
            reason = FinishReason.LENGTH if position == 8 else None
            await b.step(EngineCoreOutput(request.request_id, [97 + position], finish_reason=reason))
            if position in (0, 4, 8):
                sizes.append(len((await asyncio.wait_for(anext(reader), 1)).outputs[0].token_ids))
        assert sizes == [1, 4, 4]

    run(tmp_path, test, scheduler=SchedulerConfig(stream_interval=4))


def test_cached_tokens_and_prompt_counts_come_from_the_first_output(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        stream = await b.start()
        request = (await b.core.wait_requests(1))[0]
        prefill = PrefillStats(num_prompt_tokens=48, num_cached_tokens=32)
        b.core.send(EngineCoreOutput(request.request_id, [97], prefill_stats=prefill))
        b.core.send(EngineCoreOutput(request.request_id, [98], finish_reason=FinishReason.LENGTH))
        outputs = await read_all(stream)
        assert {o.num_cached_tokens for o in outputs} == {32}
        assert b.llm.stats.prompt_tokens_by_source["local_compute"] == 16
        assert b.llm.stats.counters.prompt_tokens_cached == 32
        assert b.llm.stats.histograms["time_to_first_token_seconds"].count == 1
        assert b.llm.stats.histograms["inter_token_latency_seconds"].count == 1

    run(tmp_path, test)


def test_heartbeat_age_restarts_with_each_message(tmp_path: Path) -> None:
    async def test(b: Bench) -> None:
        assert b.llm.heartbeat_age() == 0.0
        b.llm.start()
        b.client.last_message_at -= 100
        assert b.llm.heartbeat_age() >= 100
        b.core.send()
        await async_wait_until(lambda: b.llm.heartbeat_age() < 100, 5, "heartbeat")

    run(tmp_path, test)


def replace_params(params: SamplingParams, **changes: object) -> SamplingParams:
    return msgspec.structs.replace(params, **changes)
