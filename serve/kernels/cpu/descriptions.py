"""Structures that the CPU library takes by pointer; cache_description.h, linear_description.h and stack.h declare them.

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

DENSE, QUANTIZED = 0, 1
PLAIN_ROWS, PACKED_ROWS, QUANTIZED_ROWS = 0, 1, 2
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}


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


class LinearPart(ctypes.Structure):
    """Some outputs of a linear layer; kind is one of the constants above."""

    _fields_ = (("kind", _I32), ("type", _I32), ("weight", _PTR), ("bias", _PTR), ("num_out", _I64))


class LinearLayer(ctypes.Structure):
    """A linear layer of parts of the same inputs."""

    _fields_ = (("parts", ctypes.POINTER(LinearPart)), ("num_parts", _I64), ("num_in", _I64), ("activations", _I32))


class EmbeddingPlan(ctypes.Structure):
    """Where the rows of tokens come from."""

    _fields_ = (("kind", _I32), ("type", _I32), ("weight", _PTR), ("num_rows", _I64))


class LayerPlan(ctypes.Structure):
    """One decoder layer."""

    _fields_ = (
        ("input_norm", _PTR),
        ("post_attention_norm", _PTR),
        ("query_norm", _PTR),
        ("key_norm", _PTR),
        ("qkv", LinearLayer),
        ("out", LinearLayer),
        ("gate_up", LinearLayer),
        ("down", LinearLayer),
        ("attention", AttentionOptions),
    )


class StackPlan(ctypes.Structure):
    """All layers of a decoder."""

    _fields_ = (
        ("embedding", EmbeddingPlan),
        ("layers", ctypes.POINTER(LayerPlan)),
        ("norm", _PTR),
        ("cos_sin", _PTR),
        ("num_layers", _I64),
        ("hidden_size", _I64),
        ("inner_size", _I64),
        ("max_position", _I64),
        ("num_heads", _I32),
        ("num_kv_heads", _I32),
        ("head_size", _I32),
        ("rotary_size", _I32),
        ("eps", _FLOAT),
    )


class StepInputs(ctypes.Structure):
    """One step of a stack."""

    _fields_ = (
        ("input_ids", _PTR),
        ("positions", _PTR),
        ("batch", AttentionBatch),
        ("caches", ctypes.POINTER(CacheDescription)),
        ("embed_rows", _PTR),
        ("embeds", _PTR),
        ("num_embeds", _I64),
        ("rows", _PTR),
        ("num_rows", _I64),
        ("hidden_states", _PTR),
        ("scratch", _PTR),
    )


def describe_cache(cache: KVCache) -> CacheDescription:
    """Describe one layer's cache."""
    return CacheDescription(
        cache.key.data_ptr(),
        cache.value.data_ptr(),
        None if cache.key_scale is None else cache.key_scale.data_ptr(),
        None if cache.value_scale is None else cache.value_scale.data_ptr(),
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
