"""Attention of one decoder layer over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from serve.kernels import ops
from serve.kernels.attention import AttentionBackend, AttentionMetadata, KVCache
from serve.models.layers.linear import LinearLayer
from serve.models.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """Sizes of one attention layer. scale multiplies q.k; window is in tokens, None = full attention."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    window: int | None


@dataclass(frozen=True, slots=True)
class Attention:
    """Project, rotate, store keys and values, attend, project back.

    qkv maps to queries, keys and values side by side; q_norm and k_norm, if any, act on each head.
    """

    geometry: AttentionGeometry
    qkv: LinearLayer
    out: LinearLayer
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    cos_sin: Tensor
    backend: AttentionBackend

    def __call__(self, x: Tensor, positions: Tensor, cache: KVCache, meta: AttentionMetadata) -> Tensor:
        """Map [num_tokens, hidden_size] to the same shape, writing the tokens' keys and values to the cache."""
        geometry = self.geometry
        num_tokens = x.shape[0]
        heads = self.qkv(x).view(num_tokens, -1, geometry.head_size)
        first_key = geometry.num_heads
        first_value = first_key + geometry.num_kv_heads
        query = heads[:, :first_key]
        key = heads[:, first_key:first_value]
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.inplace(query)
            self.k_norm.inplace(key)
        ops.rope_(positions, query, key, self.cos_sin)
        self.backend.write_kv(key, heads[:, first_value:], cache, meta.slot_mapping)
        attended = x.new_empty((num_tokens, geometry.num_heads, geometry.head_size))
        self.backend.attend(query, cache, meta, attended, scale=geometry.scale, window=geometry.window)
        return self.out(attended.view(num_tokens, -1))
