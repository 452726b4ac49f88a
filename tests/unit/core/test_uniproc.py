"""The in-process executor: one thread, in order, errors in the futures."""

from __future__ import annotations

import threading

import pytest

from serve.checkpoint import Checkpoint
from serve.config import EngineConfig
from serve.core.executor.uniproc import UniprocExecutor
from serve.wire.step import KVCacheConfig, ModelRunnerOutput, SchedulerOutput
from tests.unit.core.scripted import ScriptedWorker, make_checkpoint, make_config, make_request, make_scheduler


class ThreadNotingWorker(ScriptedWorker):
    """Notes the thread of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.threads = {threading.get_ident()}

    def load_model(self) -> None:
        self.threads.add(threading.get_ident())
        super().load_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        self.threads.add(threading.get_ident())
        return super().execute_model(scheduler_output)


def make_executor(worker: ScriptedWorker | None = None, **scheduler: object) -> UniprocExecutor:
    def factory(config: EngineConfig, checkpoint: Checkpoint) -> ScriptedWorker:
        return worker or ThreadNotingWorker()

    return UniprocExecutor(factory, make_config(**scheduler), make_checkpoint())  # type: ignore[arg-type]


def test_the_start_up_calls_come_in_order_and_stages_are_told() -> None:
    worker = ScriptedWorker()
    executor = make_executor(worker)
    stages: list[str] = []
    spec = executor.start(stages.append)
    executor.determine_available_memory()
    executor.initialize_kv_cache(KVCacheConfig(5, 16))
    assert worker.calls == [
        "init_device",
        "load_model",
        "determine_available_memory",
        "initialize_kv_cache 5",
        "warm_up",
    ]
    assert stages == ["starting the device", "loading weights"]
    assert spec.num_layers == 2
    assert executor.describe() == ("float32", "scripted")
    executor.shutdown()
    assert worker.calls[-1] == "shutdown"


def test_every_call_runs_on_one_thread_that_is_not_the_callers() -> None:
    seen = []

    def factory(config: EngineConfig, checkpoint: Checkpoint) -> ThreadNotingWorker:
        seen.append(ThreadNotingWorker())
        return seen[0]

    executor = UniprocExecutor(factory, make_config(), make_checkpoint())
    executor.start(lambda stage: None)
    executor.execute_model(make_scheduler().schedule()).result(10)
    executor.shutdown()
    assert len(seen[0].threads) == 1
    assert threading.get_ident() not in seen[0].threads


def test_a_step_is_executed_then_sampled() -> None:
    executor = make_executor()
    executor.start(lambda stage: None)
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5))
    executed = executor.execute_model(scheduler.schedule())
    sampled = executor.sample_tokens(None)
    assert executed.result(10) is None
    assert sampled.result(10).req_ids == ["a"]
    executor.shutdown()


def test_a_failure_of_the_worker_is_raised_by_the_future() -> None:
    worker = ScriptedWorker()
    worker.fail_at_step = 0
    executor = make_executor(worker)
    executor.start(lambda stage: None)
    future = executor.execute_model(make_scheduler().schedule())
    with pytest.raises(RuntimeError, match="injected failure"):
        future.result(10)
    executor.shutdown()


@pytest.mark.parametrize(("is_async", "expected"), [(True, 2), (False, 1)])
def test_async_scheduling_allows_two_steps_in_flight(is_async: bool, expected: int) -> None:
    executor = make_executor(async_scheduling=is_async)
    assert executor.max_concurrent_batches == expected
    executor.shutdown()
