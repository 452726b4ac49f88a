"""Structures that the CPU library takes by pointer; cache_description.h declares the same, field by field.

They hold bare addresses: whoever makes one keeps its tensors alive.
"""

import ctypes

import torch
from torch import Tensor

from serve.kernels.kv_cache import AttentionMetadata, KVCache

_I32 = ctypes.c_int32
_I64 = ctypes.c_int64
_PTR = ctypes.c_void_p
_FLOAT = ctypes.c_float

CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class CacheDescription(ctypes.Structure):
    """One layer's paged cache."""

    _fields_ = (
        ("key", _PTR),
        ("value", _PTR),
        ("key_scale", _PTR),
        ("value_scale", _PTR),
        ("num_blocks", _I64),
        ("type", _I32),
        ("block_size", _I32),
        ("num_kv_heads", _I32),
        ("head_size", _I32),
    )


class AttentionBatch(ctypes.Structure):
    """One step's requests."""

    _fields_ = (
        ("query_start_loc", _PTR),
        ("seq_lens", _PTR),
        ("block_table", _PTR),
        ("block_table_stride", _I64),
        ("max_blocks", _I64),
        ("slot_mapping", _PTR),
        ("num_reqs", _I64),
        ("num_tokens", _I64),
    )


class AttentionOptions(ctypes.Structure):
    """One layer's way to score keys."""

    _fields_ = (("scale", _FLOAT), ("window", _I32), ("soft_cap", _FLOAT), ("alibi_slopes", _PTR))


def describe_cache(cache: KVCache) -> CacheDescription:
    """Describe one layer's cache."""
    return CacheDescription(
        cache.key.data_ptr(),
        cache.value.data_ptr(),
        None,
        None,
        cache.num_blocks,
        CACHE_TYPES[cache.dtype],
        cache.block_size,
        cache.num_kv_heads,
        cache.head_size,
    )


def describe_batch(meta: AttentionMetadata) -> AttentionBatch:
    """Describe a step; ValueError for tensors whose rows are not contiguous."""
    table = meta.block_table
    is_plain = meta.query_start_loc.is_contiguous() and meta.seq_lens.is_contiguous() and table.stride(1) == 1
    if not is_plain or not meta.slot_mapping.is_contiguous():
        raise ValueError("query_start_loc, seq_lens, slot_mapping and the rows of block_table must be contiguous")
    return AttentionBatch(
        meta.query_start_loc.data_ptr(),
        meta.seq_lens.data_ptr(),
        table.data_ptr(),
        table.stride(0),
        table.shape[1],
        meta.slot_mapping.data_ptr(),
        meta.num_reqs,
        meta.num_tokens,
    )


def describe_slots(slot_mapping: Tensor) -> AttentionBatch:
    """Describe what kv_write needs of a step; slot_mapping must be contiguous."""
    return AttentionBatch(slot_mapping=slot_mapping.data_ptr(), num_tokens=slot_mapping.shape[0])
