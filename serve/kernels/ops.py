"""The ops of the model; which implementation runs depends on the device alone.

Shapes, units and errors of each op are described at its twin in reference.py.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from serve.kernels import reference
from serve.kernels.cpu import binding
from serve.kernels.cpu import ops as cpu_ops
from serve.kernels.cpu.binding import library_description, pin_helpers, set_num_threads
from serve.kernels.kv_cache import AttentionMetadata, KVCache
from serve.kernels.packed_weight import PackedWeight
from serve.kernels.quantized_weight import AffineBlocks, QuantizedBlocks, QuantizedWeight
from serve.kernels.stack import Stack, StackRunner

__all__ = [
    "add_rms_norm",
    "encoder_attention",
    "int8_pays",
    "kv_write",
    "library_description",
    "linear",
    "linear_quantized",
    "pack_linear",
    "pack_quantized",
    "packed_rows",
    "packs",
    "paged_attention",
    "pin_helpers",
    "quantized_rows",
    "quantizes",
    "rms_norm",
    "rope_",
    "set_num_threads",
    "silu_and_mul",
    "stack",
]


class Ops(Protocol):
    """One implementation of every op; modules fit it."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        """Normalise the last dimension to unit mean square and scale it by weight."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to residual in place and give the norm of the sum."""

    def rope_(self, positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
        """Rotate query and key in place by the angles of their positions."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Give silu(gate) * up for the two halves of the last dimension."""

    def packs(self, dtype: torch.dtype) -> bool:
        """Tell whether linear on packed weights of a type pays."""

    def pack_linear(self, *parts: Tensor) -> PackedWeight:
        """Repack weights [num_out, num_in] of one type, their outputs side by side."""

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """Give float32 x times a packed weight, plus bias."""

    def packed_rows(self, weight: PackedWeight, indices: Tensor) -> Tensor:
        """Look up rows of a packed weight as float32."""

    def quantizes(self, type_name: str, dtype: torch.dtype) -> bool:
        """Tell whether products with quantised blocks of a type pay for activations of a dtype."""

    def int8_pays(self, type_name: str) -> bool:
        """Tell whether 8-bit activations are faster with quantised blocks of a type."""

    def pack_quantized(self, blocks: QuantizedBlocks | AffineBlocks) -> QuantizedWeight:
        """Repack a file's blocks."""

    def linear_quantized(
        self,
        x: Tensor,
        parts: Sequence[QuantizedWeight],
        bias: Tensor | None = None,
        *,
        int8_activations: bool = False,
    ) -> Tensor:
        """Give x times quantised weights side by side, plus bias."""

    def quantized_rows(self, weight: QuantizedWeight, indices: Tensor) -> Tensor:
        """Look up rows of a quantised weight as float32."""

    def kv_write(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Store each token's key and value in its slot."""

    def paged_attention(
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

    def encoder_attention(
        self, query: Tensor, key: Tensor, value: Tensor, meta: AttentionMetadata, out: Tensor, *, scale: float
    ) -> None:
        """Write attention in both directions to out, within each request."""

    def stack(self, stack: Stack) -> StackRunner | None:
        """Make what runs a whole decoder by one call a step, or None where it runs op by op."""


def _choose_cpu_ops() -> Ops:
    return reference if binding.load_library().library is None else cpu_ops


# Device type -> the implementation for it.
IMPLEMENTATIONS: dict[str, Callable[[], Ops]] = {"cpu": _choose_cpu_ops}


@functools.cache
def implementation(device_type: str) -> Ops:
    """Give the ops for a device type; ValueError for one that has none."""
    if device_type not in IMPLEMENTATIONS:
        supported = ", ".join(sorted(IMPLEMENTATIONS))
        raise ValueError(f"there are no kernels for device '{device_type}'; supported: {supported}")
    return IMPLEMENTATIONS[device_type]()


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Normalise the last dimension to unit mean square and scale it by weight.

    Writes to out if given (x itself is allowed), else to a new contiguous tensor.
    """
    return implementation(x.device.type).rms_norm(x, weight, eps, out=out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to residual in place and give the norm of the sum as a new tensor."""
    return implementation(x.device.type).add_rms_norm(x, residual, weight, eps)


def rope_(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate query and key in place by the angles of their positions.

    query, key     [num_tokens, num_heads or num_kv_heads, head_size], rows may be strided
    cos_sin_cache  [max_position, rotary_size], cosines then sines; the first rotary_size elements
                   of a head are rotated, element i with element i + rotary_size / 2
    """
    implementation(query.device.type).rope_(positions, query, key, cos_sin_cache)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Give silu(gate) * up for the two halves of the last dimension."""
    return implementation(gate_up.device.type).silu_and_mul(gate_up)


def packs(device_type: str, dtype: torch.dtype) -> bool:
    """Tell whether linear on packed weights of a type pays on a device; else use a plain product."""
    return implementation(device_type).packs(dtype)


def pack_linear(*parts: Tensor) -> PackedWeight:
    """Repack weights [num_out, num_in] of one type for linear, their outputs side by side, without loss."""
    return implementation(parts[0].device.type).pack_linear(*parts)


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Give float32 x [num_tokens, num_in] times a packed weight, plus bias [num_out], as [num_tokens, num_out]."""
    return implementation(x.device.type).linear(x, weight, bias)


def packed_rows(weight: PackedWeight, indices: Tensor) -> Tensor:
    """Look up rows by index [n], as a new float32 tensor [n, num_in]; IndexError outside the weight."""
    return implementation(indices.device.type).packed_rows(weight, indices)


def quantizes(device_type: str, type_name: str, dtype: torch.dtype) -> bool:
    """Tell whether products with quantised blocks of a type pay on a device; else dequantise them at load."""
    return implementation(device_type).quantizes(type_name, dtype)


def int8_pays(device_type: str, type_name: str) -> bool:
    """Tell whether 8-bit activations are faster with quantised blocks of a type on a device."""
    return implementation(device_type).int8_pays(type_name)


def pack_quantized(blocks: QuantizedBlocks | AffineBlocks) -> QuantizedWeight:
    """Repack a file's blocks for linear_quantized, without loss."""
    stored = blocks.codes if isinstance(blocks, AffineBlocks) else blocks.rows
    return implementation(stored.device.type).pack_quantized(blocks)


def linear_quantized(
    x: Tensor, parts: Sequence[QuantizedWeight], bias: Tensor | None = None, *, int8_activations: bool = False
) -> Tensor:
    """Give x [num_tokens, num_in] times each part, side by side, plus bias, as [num_tokens, num_out of all]."""
    return implementation(x.device.type).linear_quantized(x, parts, bias, int8_activations=int8_activations)


def quantized_rows(weight: QuantizedWeight, indices: Tensor) -> Tensor:
    """Look up rows by index [n], as a new float32 tensor [n, num_in]; IndexError outside the weight."""
    return implementation(indices.device.type).quantized_rows(weight, indices)


def kv_write(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot, rounded to the cache's dtype; -1 skips a token.

    key, value  [num_tokens, num_kv_heads, head_size], rows may be strided
    A slot outside the cache raises ValueError before anything is written.
    """
    implementation(key.device.type).kv_write(key, value, cache, slot_mapping)


def paged_attention(
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
    """Write causal attention of packed queries over the paged cache to out.

    query, out  [num_tokens, num_heads, head_size], rows may be strided
    window      keys that a query sees, itself included; None or 0 = all
    soft_cap    scores become soft_cap * tanh(score / soft_cap)
    alibi_slopes  float32 [num_heads], added to a score times the key's position less the query's
    Raises ValueError for a block outside the cache or lengths that do not fit each other.
    """
    implementation(query.device.type).paged_attention(
        query, cache, meta, out, scale=scale, window=window, soft_cap=soft_cap, alibi_slopes=alibi_slopes
    )


def encoder_attention(
    query: Tensor, key: Tensor, value: Tensor, meta: AttentionMetadata, out: Tensor, *, scale: float
) -> None:
    """Write attention in both directions to out: each token sees all tokens of its own request.

    query, key, value, out  [num_tokens, num_heads, head_size], rows may be strided
    Only query_start_loc, num_reqs and num_tokens of meta count: a request's tokens are all in the batch.
    """
    implementation(query.device.type).encoder_attention(query, key, value, meta, out, scale=scale)


def stack(stack: Stack) -> StackRunner | None:
    """Make what runs a whole decoder by one call a step, or None where it runs op by op.

    Results are those of the single ops, to the bit.
    """
    return implementation(stack.norm.device.type).stack(stack)
