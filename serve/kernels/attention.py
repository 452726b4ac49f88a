"""The attention seam of the model: one backend a device, one metadata object a step."""

from typing import Protocol

import torch
from torch import Tensor

from serve.kernels import kv_cache, ops
from serve.kernels.kv_cache import AttentionMetadata, KVCache

__all__ = ["AttentionBackend", "AttentionMetadata", "KVCache", "PagedAttention", "select_backend"]


class AttentionBackend(Protocol):
    """What the worker and the attention layers need of a device's attention."""

    def page_size_bytes(self, block_size: int, *, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
        """Give the bytes of one block in one layer, key and value together."""

    def allocate_kv_cache(
        self, num_blocks: int, block_size: int, *, num_kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> KVCache:
        """Reserve one layer's cache, zeroed."""

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store each token's key and value in its slot; -1 skips a token."""

    def attend(
        self,
        query: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        out: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Write causal attention of packed queries over the paged cache to out."""


class PagedAttention:
    """Attention through the ops; the same cache layout for the CPU library and the plain twins."""

    def page_size_bytes(self, block_size: int, *, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
        """Give the bytes of one block in one layer; value heads are padded to whole vectors."""
        return kv_cache.page_size_bytes(block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)

    def allocate_kv_cache(
        self, num_blocks: int, block_size: int, *, num_kv_heads: int, head_size: int, dtype: torch.dtype
    ) -> KVCache:
        """Reserve one layer's cache; ValueError unless block_size is a multiple of 16."""
        return kv_cache.allocate_kv_cache(
            num_blocks, block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype
        )

    def write_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store key and value [num_tokens, num_kv_heads, head_size] in their slots."""
        ops.kv_write(key, value, cache, slot_mapping)

    def attend(
        self,
        query: Tensor,
        cache: KVCache,
        meta: AttentionMetadata,
        out: Tensor,
        *,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> None:
        """Write attention to out [num_tokens, num_heads, head_size]; see ops.paged_attention."""
        ops.paged_attention(
            query, cache, meta, out, scale=scale, window=window, soft_cap=soft_cap, alibi_slopes=alibi_slopes
        )


BACKENDS: dict[str, type[PagedAttention]] = {"cpu": PagedAttention}


def select_backend(device: torch.device) -> AttentionBackend:
    """Give the attention backend of a device; ValueError for a device that has none."""
    if device.type not in BACKENDS:
        supported = ", ".join(sorted(BACKENDS))
        raise ValueError(f"device '{device.type}' has no attention backend; supported: {supported}")
    return BACKENDS[device.type]()
