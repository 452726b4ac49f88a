"""Exceptions for what the library refuses."""

from serve.kernels import checks
from serve.kernels.cpu import binding
from serve.kernels.kv_cache import AttentionMetadata, KVCache


def batch_error(status: int, fault: binding.Fault, cache: KVCache, meta: AttentionMetadata) -> Exception:
    """Say what is wrong with a step's requests, or with the cache that they use."""
    if status == binding.BAD_SLOT:
        return checks.slot_error(fault.a, fault.b, cache.num_blocks * cache.block_size)
    if status == binding.BAD_QUERY_START:
        return checks.query_start_error(fault.a, fault.b, meta.num_tokens)
    if status == binding.BAD_SEQ_LEN:
        return checks.seq_len_error(fault.a, fault.b, meta.block_table.shape[1] * cache.block_size)
    if status == binding.BAD_BLOCK:
        return checks.block_error(fault.a, fault.b, fault.c, cache.num_blocks)
    if status == binding.BAD_CACHE:
        return checks.cache_error(fault.a, fault.b, fault.c)
    assert status == binding.OUT_OF_MEMORY, f"status {status}, which the checks before the call exclude"
    return MemoryError("no memory left for the partial sums of attention")
