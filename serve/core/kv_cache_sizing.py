"""How many cache blocks fit at start-up, and how long a request may be."""

from __future__ import annotations

from dataclasses import dataclass

from serve.config import AUTO_MAX_MODEL_LEN, EngineConfig
from serve.core.kv_cache_manager import max_blocks_per_request
from serve.errors import ConfigError, ExitCode
from serve.wire.step import KVCacheSpec

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CacheSize:
    """The sized cache. num_blocks includes the null block; max_concurrency counts requests of max_model_len.

    num_tokens is 0 for a model that caches nothing.
    """

    num_blocks: int
    max_model_len: int
    num_tokens: int
    max_concurrency: float


def size_kv_cache(config: EngineConfig, spec: KVCacheSpec, *, available_bytes: int, model_max_len: int) -> CacheSize:
    """Decide the number of blocks and check that one request of full length fits.

    max_model_len -1 becomes the longest that fits, at most model_max_len. A model whose layers cache nothing gets
    blocks in name only. Raises ConfigError (RESOURCES) when the
    cache has no room at all, or not for one request.
    """
    if spec.num_layers == 0:
        return _size_without_cache(config, spec, model_max_len)
    bytes_per_block = spec.page_size_bytes * spec.num_layers
    override = config.cache.num_gpu_blocks_override
    num_blocks = override if override is not None else max(0, available_bytes) // bytes_per_block
    num_usable = num_blocks - 1
    if num_usable < 1:
        raise ConfigError(
            f"no room for a KV cache: {available_bytes / _GIB:.2f} GiB are left after weights and activations and "
            f"two blocks need {2 * bytes_per_block / _GIB:.4f} GiB; raise --gpu-memory-utilization or "
            "--kv-cache-memory-bytes, or lower --max-num-batched-tokens",
            ExitCode.RESOURCES,
        )
    wanted = config.model.max_model_len
    assert wanted is not None, "settings must be resolved before the cache is sized"
    is_auto = wanted == AUTO_MAX_MODEL_LEN
    length = model_max_len if is_auto else wanted
    fitting = _longest_fit(config, spec, num_usable, length)
    if is_auto:
        length = fitting
    if length < 1 or fitting < length:
        raise ConfigError(_no_fit_message(config, spec, num_usable, (length, fitting)), ExitCode.RESOURCES)
    return CacheSize(
        num_blocks=num_blocks,
        max_model_len=length,
        num_tokens=num_usable * spec.block_size,
        max_concurrency=num_usable / _blocks_for(config, spec, length),
    )


def _size_without_cache(config: EngineConfig, spec: KVCacheSpec, model_max_len: int) -> CacheSize:
    """Give blocks that take no memory, as many as one step can use: a request of such a model ends with its step."""
    wanted, scheduler = config.model.max_model_len, config.scheduler
    assert wanted is not None, "settings must be resolved before the cache is sized"
    assert scheduler.max_num_batched_tokens is not None, "settings must be resolved before the cache is sized"
    assert scheduler.max_num_seqs is not None, "settings must be resolved before the cache is sized"
    length = model_max_len if wanted == AUTO_MAX_MODEL_LEN else wanted
    num_usable = -(-scheduler.max_num_batched_tokens // spec.block_size) + scheduler.max_num_seqs
    return CacheSize(
        num_blocks=num_usable + 1,
        max_model_len=length,
        num_tokens=0,
        max_concurrency=scheduler.max_num_batched_tokens / length,
    )


def _blocks_for(config: EngineConfig, spec: KVCacheSpec, num_tokens: int) -> int:
    budget = config.scheduler.max_num_batched_tokens
    assert budget is not None, "settings must be resolved before the cache is sized"
    return max_blocks_per_request(num_tokens, spec.block_size, window=spec.sliding_window, max_step_tokens=budget)


def _longest_fit(config: EngineConfig, spec: KVCacheSpec, num_usable: int, limit: int) -> int:
    """Give the largest length up to limit whose blocks fit, 0 when none does (binary search)."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if _blocks_for(config, spec, middle) <= num_usable:
            low = middle
        else:
            high = middle - 1
    return low


def _no_fit_message(config: EngineConfig, spec: KVCacheSpec, num_usable: int, lengths: tuple[int, int]) -> str:
    length, fitting = lengths
    bytes_per_block = spec.page_size_bytes * spec.num_layers
    needed = _blocks_for(config, spec, length) * bytes_per_block / _GIB
    available = num_usable * bytes_per_block / _GIB
    estimate = f" (estimated maximum length: {fitting})" if fitting else ""
    lower = f"lower --max-model-len to at most {fitting}" if fitting else "lower --max-model-len"
    return (
        f"max_model_len={length} needs {needed:.4f} GiB of KV cache and {available:.4f} GiB are available{estimate}; "
        f"raise --gpu-memory-utilization or --kv-cache-memory-bytes, or {lower}"
    )
