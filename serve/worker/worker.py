"""The worker role: one device, the model on it and its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from serve.checkpoint import Checkpoint, ModelArch
from serve.config import AUTO_MAX_MODEL_LEN, EngineConfig
from serve.errors import ConfigError, ExitCode
from serve.kernels import ops
from serve.kernels.attention import select_backend
from serve.models.pooling import PoolingModel, load_pooling_model
from serve.models.registry import DTYPES, CausalLM, compute_dtype, dtype_description, load_model
from serve.pooling_params import PoolingParams
from serve.sampling_params import SamplingParams
from serve.wire.step import (
    GrammarOutput,
    KVCacheConfig,
    KVCacheSpec,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    StepCost,
)
from serve.worker.host import free_memory_bytes, processor_name
from serve.worker.logits_processors import ProcessorChain, load_processors
from serve.worker.model_runner import ModelRunner, RunnerLimits
from serve.worker.pooling_runner import PoolingRunner
from serve.worker.probe import first_step, last_step, next_step
from serve.worker.step_timer import StepTimer
from serve.worker.threads import start_threads

log = logging.getLogger(__name__)

# What the KV cache grows to on a CPU unless told otherwise: room for the requests that may run, within limits.
CPU_KV_CACHE_BYTES: Final = 4 << 30
CPU_KV_CACHE_SHARE: Final = 4
CPU_TOKENS_PER_SEQ: Final = 512
_CACHE_DTYPES: Final = {**DTYPES, "int8": torch.int8}
_WARM_UP_ID: Final = "warm-up"
_WARM_UP_TOKENS: Final = 32
_MIB: Final = 1 << 20

ModelLoader = Callable[[Checkpoint, EngineConfig, torch.dtype, torch.device], CausalLM | PoolingModel]


def load_registered_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    cache_folder: Path | None = None,
) -> CausalLM | PoolingModel:
    """Build the checkpoint's architecture from the table of models and fill it."""
    load = load_model if checkpoint.pooling is None else load_pooling_model
    return load(checkpoint, config.model, dtype=dtype, device=device, cache_folder=cache_folder)


class Worker:
    """Runs steps on the CPU. All calls come from one thread, the start-up calls in the order of the methods."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, load: ModelLoader = load_registered_model) -> None:
        """Take resolved settings; nothing is loaded. Raises ConfigError for a logits processor that is not there."""
        self._config = config
        self._checkpoint = checkpoint
        self._load = load
        self._device = torch.device("cpu")
        self._backend = select_backend(self._device)
        self._dtype = compute_dtype(config.model.dtype, checkpoint, self._device)
        cache_dtype = config.cache.kv_cache_dtype
        self._kv_dtype = self._dtype if cache_dtype == "auto" else _CACHE_DTYPES[cache_dtype]
        self._processors = ProcessorChain(load_processors(config.model.logits_processors))
        self._num_threads = 1
        self._num_blocks = 0
        self._model: CausalLM | PoolingModel | None = None
        self._runner: ModelRunner | PoolingRunner | None = None
        self.dtype_name = dtype_description(config.model.dtype, checkpoint, self._device)

    def init_device(self) -> None:
        """Start the threads that compute, and say how many and why."""
        self._num_threads = start_threads(self._config.device, pool_computes=ops.packs(self._device.type, self._dtype))
        log.info("device ready: %s", self.device_description())

    def load_model(self) -> None:
        """Build the model and read its weights. Raises ConfigError (MODEL) when they do not fit each other."""
        with torch.inference_mode():
            self._model = self._load(self._checkpoint, self._config, self._dtype, self._device)

    def get_kv_cache_spec(self) -> KVCacheSpec:
        """Say what one layer stores for one block; an encoder has no layer that stores anything."""
        arch = self._checkpoint.arch
        block_size = self._config.cache.block_size
        page_size = self._backend.page_size_bytes(
            block_size, num_kv_heads=arch.num_kv_heads, head_size=arch.head_size, dtype=self._kv_dtype
        )
        all_slide = not arch.sliding_layers or len(arch.sliding_layers) == arch.num_layers
        return KVCacheSpec(
            num_layers=0 if arch.encoder is not None else arch.num_layers,
            block_size=block_size,
            num_kv_heads=arch.num_kv_heads,
            head_size=arch.head_size,
            dtype=str(self._kv_dtype).removeprefix("torch."),
            page_size_bytes=page_size,
            sliding_window=arch.sliding_window if all_slide else None,
        )

    def determine_available_memory(self) -> int:
        """Give the bytes the KV cache may take; 0 or less when activations leave nothing.

        A given size is taken as it is. Otherwise it is what wanted_cache_bytes says, and never above the share of
        free memory that is left beside the activations of the largest step.
        """
        given = self._config.cache.kv_cache_memory_bytes
        if given is not None:
            return given
        spec = self.get_kv_cache_spec()
        if spec.num_layers == 0:
            return 0
        max_num_seqs = self._config.scheduler.max_num_seqs
        assert max_num_seqs is not None, "settings must be resolved"
        free = free_memory_bytes()
        wanted = wanted_cache_bytes(
            spec, max_model_len=self._max_model_len(), max_num_seqs=max_num_seqs, free_bytes=free
        )
        activations = activation_bytes(self._checkpoint.arch, self._config, self._dtype)
        allowed = int(free * self._config.cache.gpu_memory_utilization) - activations
        log.info(
            "memory: free=%d MiB activations=%d MiB allowed for the kv cache=%d MiB wanted=%d MiB",
            *(number // _MIB for number in (free, activations, allowed, wanted)),
        )
        return min(wanted, allowed)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the cache and make ready to run steps."""
        assert self._model is not None, "load_model comes before initialize_kv_cache"
        arch, scheduler = self._checkpoint.arch, self._config.scheduler
        self._num_blocks = config.num_blocks
        assert scheduler.max_num_seqs is not None, "settings must be resolved"
        assert scheduler.max_num_batched_tokens is not None, "settings must be resolved"
        try:
            kv_caches = [
                self._backend.allocate_kv_cache(
                    config.num_blocks,
                    config.block_size,
                    num_kv_heads=arch.num_kv_heads,
                    head_size=arch.head_size,
                    dtype=self._kv_dtype,
                )
                for _ in range(self.get_kv_cache_spec().num_layers)
            ]
        except MemoryError as e:
            raise no_memory_error(config, self.get_kv_cache_spec()) from e
        limits = RunnerLimits(
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=self._max_model_len(),
            block_size=config.block_size,
            vocab_size=arch.vocab_size,
        )
        if isinstance(self._model, PoolingModel):
            self._runner = PoolingRunner(self._model, kv_caches, limits)
            return
        self._runner = ModelRunner(
            self._model,
            kv_caches,
            limits,
            logprobs_mode=self._config.model.logprobs_mode,
            processors=self._processors,
        )

    def warm_up(self) -> None:
        """Run a prefill and a decode step, so that the first request finds threads, memory and kernels ready."""
        assert self._config.scheduler.max_num_batched_tokens is not None, "settings must be resolved"
        block_size = self._config.cache.block_size
        num_tokens = min(
            _WARM_UP_TOKENS, self._max_model_len() - 1, self._config.scheduler.max_num_batched_tokens, block_size - 1
        )
        if num_tokens < 1:
            return
        request = NewRequestData(
            req_id=_WARM_UP_ID,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=num_tokens,
            sampling_params=SamplingParams(temperature=1.0, top_p=0.9, seed=0),
            block_ids=[1],
            num_computed_tokens=0,
            pooling_params=None if self._checkpoint.pooling is None else PoolingParams(self._checkpoint.pooling.task),
        )
        errors = dict(self.run_step(first_step(request, num_tokens)).errors)
        if request.pooling_params is None:
            errors |= self.run_step(next_step(_WARM_UP_ID, num_tokens)).errors
        for error in errors.values():
            log.warning("the model failed on a test prompt: %s; check the checkpoint", error)
        self.execute_model(last_step(_WARM_UP_ID))

    def measure_step_cost(self) -> StepCost | None:
        """Time a few steps; None for a pooling model, whose requests never decode."""
        if self._checkpoint.pooling is not None:
            return None
        block_size = self._config.cache.block_size
        max_tokens = min(self._max_model_len() - 1, (self._num_blocks - 1) * block_size)
        return StepTimer(self.run_step, block_size=block_size, max_tokens=max_tokens).measure()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the forward pass; None means that sample_tokens must follow."""
        return self._ready_runner().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample from the logits of the last forward pass."""
        runner = self._ready_runner()
        assert isinstance(runner, ModelRunner), "a pooling model samples nothing"
        return runner.sample_tokens(grammar_output)

    def run_step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run a step that needs no mask: its forward pass, then its sampling."""
        return self.execute_model(scheduler_output) or self.sample_tokens(None)

    def device_description(self) -> str:
        """Name the processor, its threads and the kernels in use."""
        return f"{processor_name()}, {self._num_threads} threads, {ops.library_description()}"

    def shutdown(self) -> None:
        """Let go of model and cache."""
        self._runner = None
        self._model = None

    def _ready_runner(self) -> ModelRunner | PoolingRunner:
        assert self._runner is not None, "initialize_kv_cache comes before the first step"
        return self._runner

    def _max_model_len(self) -> int:
        """Give the resolved limit, or the model's own when the limit is found after this worker has started."""
        length = self._config.model.max_model_len
        assert length is not None, "settings must be resolved"
        return self._checkpoint.arch.max_position_embeddings if length == AUTO_MAX_MODEL_LEN else length


def wanted_cache_bytes(spec: KVCacheSpec, *, max_model_len: int, max_num_seqs: int, free_bytes: int) -> int:
    """Give the bytes that a cache should have when memory is no limit.

    512 tokens for each request that may run, within 4 GiB and a quarter of the free memory: the cache fills up with
    prefixes in any case, and a program on a workstation is not the only one. One request of full length at least.
    """
    usual = -(-max_num_seqs * CPU_TOKENS_PER_SEQ // spec.block_size) + 1
    longest = -(-max_model_len // spec.block_size) + 2
    bytes_per_block = spec.page_size_bytes * spec.num_layers
    limit = min(CPU_KV_CACHE_BYTES, free_bytes // CPU_KV_CACHE_SHARE)
    return max(longest * bytes_per_block, min(usual * bytes_per_block, limit))


def activation_bytes(arch: ModelArch, config: EngineConfig, dtype: torch.dtype) -> int:
    """Give an upper bound of the working memory of the largest step, in bytes.

    Counted for each token of the budget: hidden state, residual and their norms; q, k, v and the attention output;
    gate, up, their product. Counted for each request: logits in float32, twice for a transform that copies them.
    """
    tokens, requests = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    assert tokens is not None, "settings must be resolved"
    assert requests is not None, "settings must be resolved"
    attention = (2 * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_size
    per_token = 5 * arch.hidden_size + attention + 4 * arch.intermediate_size
    return tokens * per_token * dtype.itemsize + 2 * requests * arch.vocab_size * 4


def no_memory_error(config: KVCacheConfig, spec: KVCacheSpec) -> ConfigError:
    """Say that the system refused the memory of the cache, and what to change."""
    needed = config.num_blocks * spec.page_size_bytes * spec.num_layers / (1 << 30)
    return ConfigError(
        f"the system refused {needed:.2f} GiB for a KV cache of {config.num_blocks} blocks; "
        "lower --kv-cache-memory-bytes or --num-gpu-blocks-override",
        ExitCode.RESOURCES,
    )
