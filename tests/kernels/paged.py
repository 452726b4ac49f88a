"""Paged batches with their dense float64 truth, for the kernel tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from serve.kernels import kv_cache, reference
from serve.kernels.kv_cache import AttentionMetadata, KVCache

CACHE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_CACHE_DTYPES = [*CACHE_DTYPES, torch.int8]


@dataclass(frozen=True)
class Heads:
    """Geometry of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


@dataclass
class Batch:
    """Requests with their queries, their whole history in a paged cache, and that history densely."""

    heads: Heads
    cache: KVCache
    meta: AttentionMetadata
    query: Tensor  # [num_tokens, num_heads, head_size]
    keys: list[Tensor] = field(default_factory=list)  # per request [seq_len, num_kv_heads, head_size], cache's dtype
    values: list[Tensor] = field(default_factory=list)


def make_metadata(query_lens: list[int], seq_lens: list[int], block_table: Tensor, slots: Tensor) -> AttentionMetadata:
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    return AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=block_table,
        slot_mapping=slots,
        num_reqs=len(query_lens),
        num_tokens=sum(query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def slots_of(block_ids: Tensor, positions: Tensor, block_size: int) -> Tensor:
    return block_ids[positions // block_size].long() * block_size + positions % block_size


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    heads: Heads,
    *,
    dtype: torch.dtype,
    block_size: int = 16,
    seed: int = 0,
) -> Batch:
    """Build a batch whose blocks lie in random order between blocks full of NaN.

    The cache is filled by plain indexing here, not by the op under test.
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = 2 * sum(counts) + 1
    cache = kv_cache.allocate_kv_cache(
        num_blocks, block_size, num_kv_heads=heads.num_kv_heads, head_size=heads.head_size, dtype=dtype
    )
    poison(cache)
    free = torch.randperm(num_blocks, generator=generator).int()
    block_table = torch.full((len(seq_lens), max(counts) + 1), -7, dtype=torch.int32)
    batch = Batch(heads, cache, make_metadata(query_lens, seq_lens, block_table, torch.empty(0)), torch.empty(0))
    slots = []
    for request, (query_len, seq_len, count) in enumerate(zip(query_lens, seq_lens, counts, strict=True)):
        block_table[request, :count], free = free[:count], free[count:]
        shape = (seq_len, heads.num_kv_heads, heads.head_size)
        key, value = (torch.randn(shape, generator=generator) for _ in range(2))
        if dtype != torch.int8:
            key, value = key.to(dtype), value.to(dtype)
        positions = torch.arange(seq_len)
        fill(cache, key, value, slots_of(block_table[request], positions, block_size))
        slots.append(slots_of(block_table[request], positions[seq_len - query_len :], block_size))
        batch.keys.append(stored(key, dtype))
        batch.values.append(stored(value, dtype))
    batch.meta.slot_mapping = torch.cat(slots)
    batch.query = torch.randn(sum(query_lens), heads.num_heads, heads.head_size, generator=generator)
    return batch


def poison(cache: KVCache) -> None:
    """Put what must never be read into every slot."""
    if cache.key_scale is not None and cache.value_scale is not None:
        for scale in (cache.key_scale, cache.value_scale):
            scale.fill_(torch.nan)
        return
    cache.key.fill_(torch.nan)
    cache.value.fill_(torch.nan)


def quantized(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Round heads [..., head_size] to multiples of a 127th of their largest magnitude, as codes and scales."""
    scale = heads.abs().amax(dim=-1, keepdim=True) / 127
    return torch.where(scale > 0, heads / scale, 0).round(), scale.squeeze(-1)


def stored(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Give the values that a cache of a type holds for heads."""
    if dtype != torch.int8:
        return heads.to(dtype)
    codes, scale = quantized(heads)
    return codes.double() * scale.double().unsqueeze(-1)


def fill(cache: KVCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Put tokens into the cache one element group at a time, as its layout is documented."""
    if cache.key_scale is not None and cache.value_scale is not None:
        (key, key_scale), (value, value_scale) = quantized(key), quantized(value)
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, cache.block_size)
            cache.key_scale[block, :, offset] = key_scale[token]
            cache.value_scale[block, :, offset] = value_scale[token]
    for token, slot in enumerate(slots.tolist()):
        block, offset = divmod(slot, cache.block_size)
        cache.key[block, :, offset // 16, :, offset % 16] = key[token]
        cache.value[block, :, offset, : cache.head_size] = value[token]
        cache.value[block, :, offset, cache.head_size :] = 0


def dense_attention(
    batch: Batch, window: int = 0, *, soft_cap: float | None = None, slopes: Tensor | None = None
) -> Tensor:
    """Give the batch's attention in float64, one query head of one token at a time."""
    rows = []
    group_size = batch.heads.num_heads // batch.heads.num_kv_heads
    starts = batch.meta.query_start_loc.tolist()
    for request, (key, value) in enumerate(zip(batch.keys, batch.values, strict=True)):
        query = batch.query[starts[request] : starts[request + 1]].double()
        for token, heads in enumerate(query):
            end = key.shape[0] - query.shape[0] + token + 1
            begin = max(0, end - window) if window else 0
            seen_keys = key[begin:end].double().repeat_interleave(group_size, dim=1)
            seen_values = value[begin:end].double().repeat_interleave(group_size, dim=1)
            scores = (seen_keys * heads).sum(dim=-1) * batch.heads.scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if slopes is not None:
                scores = scores - torch.arange(end - begin - 1, -1, -1).double().unsqueeze(1) * slopes.double()
            rows.append((torch.softmax(scores, dim=0).unsqueeze(-1) * seen_values).sum(dim=0))
    return torch.stack(rows)


def relative_error(actual: Tensor, truth: Tensor) -> float:
    return float((actual.double() - truth.double()).norm() / truth.double().norm())


def twin_attention(batch: Batch, window: int = 0) -> Tensor:
    out = torch.full_like(batch.query, torch.nan)
    reference.paged_attention(batch.query, batch.cache, batch.meta, out, scale=batch.heads.scale, window=window)
    return out
