"""One worker inside the engine-core process, on a thread of its own."""

from __future__ import annotations

from collections.abc import Callable

from serve.checkpoint import Checkpoint
from serve.config import EngineConfig
from serve.core.executor.base import Worker, WorkerFactory
from serve.core.executor.worker_thread import Pending, WorkerThread
from serve.wire.step import GrammarOutput, KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput, StepCost


class UniprocExecutor:
    """Runs every worker call on one thread, in order, so that the next step can be scheduled meanwhile.

    One thread for all calls also because compute libraries keep their thread pools and modes per calling thread.
    """

    def __init__(self, worker_factory: WorkerFactory, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self.max_concurrent_batches = 2 if config.scheduler.async_scheduling else 1
        self._thread = WorkerThread("worker")
        self._make_worker = lambda: worker_factory(config, checkpoint)
        self._worker: Worker | None = None

    def start(self, report: Callable[[str], None]) -> KVCacheSpec:
        """Take the device and load the model; report is told each stage."""
        report("starting the device")
        worker = self._thread.submit(self._make_worker).result()
        self._worker = worker
        self._thread.submit(worker.init_device).result()
        report("loading weights")
        self._thread.submit(worker.load_model).result()
        return self._thread.submit(worker.get_kv_cache_spec).result()

    def determine_available_memory(self) -> int:
        """Give the bytes the KV cache may take."""
        return self._thread.submit(self._started().determine_available_memory).result()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache and warm up."""
        worker = self._started()
        self._thread.submit(worker.initialize_kv_cache, config).result()
        self._thread.submit(worker.warm_up).result()

    def measure_step_cost(self) -> StepCost | None:
        """Time a few steps; None where nothing can be said."""
        return self._thread.submit(self._started().measure_step_cost).result()

    def describe(self) -> tuple[str, str]:
        """Give the names of the compute type and of the device."""
        worker = self._started()
        return worker.dtype_name, worker.device_description()

    def run_step(self, scheduler_output: SchedulerOutput) -> Pending[ModelRunnerOutput]:
        """Start a step: its forward pass, then its sampling without a mask."""
        return self._thread.submit(self._started().run_step, scheduler_output)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Pending[ModelRunnerOutput | None]:
        """Start the forward pass of a step."""
        return self._thread.submit(self._started().execute_model, scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        """Start the sampling of the step executed last."""
        return self._thread.submit(self._started().sample_tokens, grammar_output)

    def shutdown(self) -> None:
        """Stop the worker; a step that runs is waited for."""
        if self._worker is not None:
            self._thread.submit(self._worker.shutdown).result()
            self._worker = None
        self._thread.close()

    def _started(self) -> Worker:
        assert self._worker is not None, "the executor was not started"
        return self._worker
