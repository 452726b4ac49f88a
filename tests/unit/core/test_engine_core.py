"""The engine core without its process: start-up, both step functions, control calls."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from serve.config import CacheConfig, EngineConfig
from serve.core.control import ControlPanel
from serve.core.engine_core import EngineCore
from serve.core.executor.uniproc import UniprocExecutor
from serve.errors import ConfigError, ExitCode, InvalidRequest
from serve.sampling_params import SamplingParams
from serve.wire.frontend import (
    CheckIntegrity,
    Control,
    ControlCall,
    ControlResult,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    IsPaused,
    PauseScheduler,
    ResetPrefixCache,
    ResumeScheduler,
)
from tests.unit.core.scripted import ScriptedWorker, continue_text, make_checkpoint, make_config, make_request

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


class Engine:
    """An engine core over a scripted worker, and all that it gave."""

    def __init__(self, config: EngineConfig, worker: ScriptedWorker | None = None) -> None:
        self.worker = worker or ScriptedWorker()
        self.executor = UniprocExecutor(lambda config, checkpoint: self.worker, config, make_checkpoint())
        self.stages: list[str] = []
        self.core = EngineCore(config, make_checkpoint(), self.executor, report=self.stages.append)
        self.control = ControlPanel(self.core.scheduler, self.core.structured)
        self.outputs: list[EngineCoreOutput] = []

    def add(self, req_id: str, prompt: list[int], **params: object) -> None:
        sampling = SamplingParams(**{"max_tokens": 8, **params})  # type: ignore[arg-type]
        self.core.add_request(self.core.prepare_request(EngineCoreRequest(req_id, prompt, sampling, 0.0)))

    def turn(self) -> bool:
        outputs, is_moving = self.core.step_once()
        for message in outputs.values():
            self.outputs += message.outputs
        return is_moving

    def run(self) -> None:
        while self.core.has_work:
            assert self.turn()

    def call(self, control: Control) -> ControlResult | None:
        """Make a control call; None when it is not answered yet."""
        return self.answer(self.control.call(ControlCall(0, 7, control)))

    def answer(self, messages: list) -> ControlResult | None:  # type: ignore[type-arg]
        result = None
        for _, message in messages:
            self.outputs += message.outputs
            result = message.control_result or result
        return result

    def tokens_of(self, req_id: str) -> list[int]:
        return [token for output in self.outputs if output.request_id == req_id for token in output.new_token_ids]

    def reasons(self) -> dict[str, FinishReason]:
        return {o.request_id: o.finish_reason for o in self.outputs if o.finish_reason is not None}


@pytest.fixture
def make_engine() -> Iterator[type[Engine]]:
    made: list[Engine] = []

    class Tracked(Engine):
        def __init__(self, config: EngineConfig, worker: ScriptedWorker | None = None) -> None:
            super().__init__(config, worker)
            made.append(self)

    yield Tracked
    for engine in made:
        engine.executor.shutdown()
    gc.unfreeze()


def test_start_up_loads_sizes_and_reports(make_engine: type[Engine], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine = make_engine(make_config(max_model_len=128), ScriptedWorker(available=100 << 10))
    ready = engine.core.ready
    # 2 layers of 1 KiB per block: 50 blocks, 49 usable.
    assert (ready.num_gpu_blocks, ready.block_size, ready.max_model_len) == (50, 16, 128)
    assert (ready.kv_cache_size_tokens, ready.kv_cache_size_bytes) == (784, 100 << 10)
    assert ready.kv_cache_max_concurrency == pytest.approx(49 / 8)
    assert (ready.dtype, ready.device, ready.description) == ("float32", "scripted", "scripted")
    assert engine.worker.calls[-2:] == ["initialize_kv_cache 50", "warm_up"]
    assert engine.stages == ["starting the device", "loading weights", "sizing the KV cache", "warming up"]
    assert "kv cache ready: blocks=50 block_size=16 tokens=784 max_concurrency=6.12x" in caplog.text


def test_too_little_memory_fails_the_start(make_engine: type[Engine]) -> None:
    worker = ScriptedWorker(available=10 << 10)
    with pytest.raises(ConfigError, match="estimated maximum length: 64") as caught:
        make_engine(make_config(max_model_len=128), worker)
    assert caught.value.exit_code is ExitCode.RESOURCES


def test_auto_length_is_told_in_ready(make_engine: type[Engine]) -> None:
    engine = make_engine(make_config(max_model_len=-1, cache=CacheConfig(num_gpu_blocks_override=5)))
    assert engine.core.ready.max_model_len == 64
    assert engine.core.scheduler.max_model_len == 64


@BOTH
def test_requests_run_to_their_end(make_engine: type[Engine], is_async: bool) -> None:
    engine = make_engine(make_config(async_scheduling=is_async))
    prompts = {f"r{i}": make_request(f"r{i}", 10 + i).all_token_ids for i in range(5)}
    for req_id, prompt in prompts.items():
        engine.add(req_id, prompt)
    engine.run()
    assert {req_id: engine.tokens_of(req_id) for req_id in prompts} == {
        req_id: continue_text(prompt, 8) for req_id, prompt in prompts.items()
    }


def test_async_and_sync_give_the_same_outputs_under_pressure(make_engine: type[Engine]) -> None:
    results = []
    for is_async in (False, True):
        cache = CacheConfig(num_gpu_blocks_override=17)
        engine = make_engine(make_config(async_scheduling=is_async, cache=cache, max_num_batched_tokens=64))
        for index in range(8):
            engine.add(f"r{index}", make_request("x", 30 + index).all_token_ids, max_tokens=50, eos_token_id=11)
        engine.run()
        tokens = {f"r{index}": engine.tokens_of(f"r{index}") for index in range(8)}
        results.append((tokens, engine.reasons()))
        assert any(step.preempted_req_ids for step in engine.worker.runner.steps)
    assert results[0] == results[1]


def test_async_keeps_one_step_ahead(make_engine: type[Engine]) -> None:
    engine = make_engine(make_config())
    engine.add("a", [1, 2, 3])
    assert engine.turn()
    assert engine.core.scheduler.num_in_flight_steps == 1
    assert engine.outputs == []
    assert engine.turn()
    assert engine.core.scheduler.num_in_flight_steps == 1
    assert len(engine.outputs) == 1
    engine.run()


@BOTH
def test_an_abort_during_a_step_is_applied_before_its_result(make_engine: type[Engine], is_async: bool) -> None:
    engine = make_engine(make_config(async_scheduling=is_async))
    engine.add("a", [1, 2, 3])
    engine.core.aborts.put(["a"])
    engine.run()
    assert engine.outputs == []
    assert engine.core.scheduler.kv.pool.usage == 0.0


def test_an_abort_behind_its_request_in_the_queue_is_not_lost(make_engine: type[Engine]) -> None:
    engine = make_engine(make_config())
    engine.core.aborts.put(["a"])
    engine.core.apply_aborts()
    engine.add("a", [1, 2, 3])
    engine.core.abort_requests(["a"])
    assert not engine.core.has_work


@BOTH
def test_a_failure_of_the_forward_pass_is_raised_and_described(make_engine: type[Engine], is_async: bool) -> None:
    worker = ScriptedWorker()
    worker.fail_at_step = 2
    engine = make_engine(make_config(async_scheduling=is_async), worker)
    engine.add("a", [1, 2, 3])
    engine.add("b", [4, 5, 6])
    with pytest.raises(RuntimeError, match="injected failure"):
        engine.run()
    assert "step 2: a, b" in engine.core.describe_failure()


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [([], "has 0 tokens"), ([1] * 256, "has 256 tokens"), ([97], "outside the vocabulary"), ([-1], "outside")],
)
def test_what_the_front_end_should_have_refused_is_refused_again(
    make_engine: type[Engine], prompt: list[int], problem: str
) -> None:
    engine = make_engine(make_config())
    with pytest.raises(InvalidRequest, match=problem):
        engine.core.prepare_request(EngineCoreRequest("a", prompt, SamplingParams(), 0.0))


def test_gauges_that_moved_without_a_step_are_reported_once(make_engine: type[Engine]) -> None:
    engine = make_engine(make_config())
    engine.call(PauseScheduler("wait"))
    engine.add("a", [1, 2, 3])
    first = engine.core.take_changed_stats()
    assert first[0].scheduler_stats is not None
    assert first[0].scheduler_stats.num_waiting_reqs == 1
    assert engine.core.take_changed_stats() == {}
    engine.core.abort_requests(["a"])
    second = engine.core.take_changed_stats()
    assert second[0].scheduler_stats is not None
    assert second[0].scheduler_stats.num_waiting_reqs == 0


def test_a_leak_is_logged_when_idle(make_engine: type[Engine], caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(make_config())
    engine.core.check_idle()
    assert caplog.text == ""
    engine.core.scheduler.kv.pool.take(2)
    engine.core.check_idle()
    assert "block pool broken: 509 free != 511 usable with no request left" in caplog.text


@BOTH
def test_pause_abort_ends_requests_and_holds_new_ones(make_engine: type[Engine], is_async: bool) -> None:
    engine = make_engine(make_config(async_scheduling=is_async))
    engine.add("a", [1, 2, 3])
    engine.turn()
    assert engine.call(PauseScheduler("abort")) is None or not is_async
    engine.run()
    assert engine.answer(engine.control.poll()) == ControlResult(7, result=True)
    assert engine.reasons() == {"a": FinishReason.ABORT}
    engine.add("b", [1, 2, 3])
    assert not engine.core.has_work
    assert engine.call(IsPaused()) == ControlResult(7, result=True)
    assert engine.call(ResumeScheduler()) == ControlResult(7, result=True)
    engine.run()
    assert engine.reasons()["b"] is FinishReason.LENGTH


@BOTH
def test_pause_wait_is_answered_when_running_requests_are_done(make_engine: type[Engine], is_async: bool) -> None:
    engine = make_engine(make_config(async_scheduling=is_async))
    engine.add("a", [1, 2, 3])
    engine.turn()
    assert engine.call(PauseScheduler("wait")) is None
    assert engine.control.poll() == []
    engine.run()
    assert engine.answer(engine.control.poll()) == ControlResult(7, result=True)
    assert engine.reasons() == {"a": FinishReason.LENGTH}
    assert engine.core.scheduler.kv.pool.num_cached_blocks == 0


@BOTH
@pytest.mark.parametrize("clear_cache", [False, True])
def test_pause_keep_freezes_and_resume_continues(make_engine: type[Engine], is_async: bool, clear_cache: bool) -> None:
    engine = make_engine(make_config(async_scheduling=is_async))
    prompt = make_request("a", 20).all_token_ids
    engine.add("a", prompt)
    for _ in range(3):
        engine.turn()
    engine.call(PauseScheduler("keep", clear_cache))
    engine.run()
    assert engine.answer(engine.control.poll()) == ControlResult(7, result=True)
    assert (engine.core.scheduler.kv.pool.num_cached_blocks == 0) is clear_cache
    engine.run()
    num_frozen = len(engine.tokens_of("a"))
    assert 0 < num_frozen < 8
    assert engine.call(ResumeScheduler()) == ControlResult(7, result=True)
    engine.run()
    assert engine.tokens_of("a") == continue_text(prompt, 8)


def test_resume_answers_a_pause_that_was_still_waiting(make_engine: type[Engine]) -> None:
    engine = make_engine(make_config())
    engine.add("a", [1, 2, 3])
    engine.turn()
    assert engine.call(PauseScheduler("wait")) is None
    messages = engine.control.call(ControlCall(0, 8, ResumeScheduler()))
    assert [message.control_result for _, message in messages] == [
        ControlResult(7, result=False),
        ControlResult(8, result=True),
    ]
    engine.run()


def test_cache_reset_and_integrity_check_answer(make_engine: type[Engine]) -> None:
    engine = make_engine(make_config(async_scheduling=False))
    engine.add("a", [1] * 20)
    engine.turn()
    assert engine.call(ResetPrefixCache()) == ControlResult(7, result=False)
    assert engine.call(ResetPrefixCache(reset_running_requests=True)) == ControlResult(7, result=True)
    assert engine.call(CheckIntegrity()) == ControlResult(7, result=True)
    engine.run()
    assert engine.tokens_of("a") == continue_text([1] * 20, 8)
    engine.core.scheduler.kv.pool.take(1)
    problem = engine.call(CheckIntegrity())
    assert problem is not None
    assert problem.failure_message == "block pool broken: block 1 has ref_cnt 1, 0 holders" or problem.result is None
