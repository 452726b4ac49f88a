"""The seam between the engine core and whoever runs the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from serve.checkpoint import Checkpoint
from serve.config import EngineConfig
from serve.core.executor.worker_thread import Pending
from serve.wire.step import GrammarOutput, KVCacheConfig, KVCacheSpec, ModelRunnerOutput, SchedulerOutput, StepCost


class Worker(Protocol):
    """Owns one device and the model on it. Called from one thread, the start-up calls in this order."""

    dtype_name: str

    def init_device(self) -> None:
        """Take the device; nothing is loaded."""

    def load_model(self) -> None:
        """Read the weights."""

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """Say what one layer stores for one block."""

    def determine_available_memory(self) -> int:
        """Give the bytes the KV cache may take beside the weights and the working memory of the largest step."""

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache."""

    def warm_up(self) -> None:
        """Run each kind of step once, so that the first request is as fast as the others."""

    def measure_step_cost(self) -> StepCost | None:
        """Time a few steps; None where nothing can be said."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the forward pass; None means that sample_tokens must follow."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample from the logits of the last forward pass."""

    def run_step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step that needs no mask: its forward pass, then its sampling."""

    def device_description(self) -> str:
        """Name the device for people."""

    def shutdown(self) -> None:
        """Release the device."""


WorkerFactory = Callable[[EngineConfig, Checkpoint], Worker]


class Executor(Protocol):
    """Runs workers for the engine core. Steps are executed in the order of the calls.

    max_concurrent_batches is how many steps may be in flight; above 1 the core schedules ahead.
    """

    max_concurrent_batches: int

    def start(self, report: Callable[[str], None]) -> KVCacheSpec:
        """Take the device and load the model; report is told each stage."""

    def determine_available_memory(self) -> int:
        """Give the bytes the KV cache may take."""

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache and warm up."""

    def measure_step_cost(self) -> StepCost | None:
        """Time a few steps; None where nothing can be said."""

    def describe(self) -> tuple[str, str]:
        """Give the names of the compute type and of the device."""

    def run_step(self, scheduler_output: SchedulerOutput) -> Pending[ModelRunnerOutput]:
        """Start a step whose sampling needs no mask: one call to the worker instead of the two below."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Pending[ModelRunnerOutput | None]:
        """Start the forward pass of a step."""

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Pending[ModelRunnerOutput]:
        """Start the sampling of the step executed last."""

    def shutdown(self) -> None:
        """Stop the workers; a step that runs is waited for."""
