"""Checks of shapes and types that every implementation of an op makes before it computes."""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from serve.kernels.block_formats import AFFINE_FORMATS, TILE_FORMATS
from serve.kernels.kv_cache import AttentionMetadata, KVCache
from serve.kernels.packed_weight import PACKED_TYPES, PackedWeight
from serve.kernels.quantized_weight import AffineBlocks, QuantizedBlocks, QuantizedWeight


def check_norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Check that weight fits the last dimension of x and out fits x."""
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"norm weight {describe(weight)} does not fit x {describe(x)}")
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"norm output {describe(out)} does not fit x {describe(x)}")


def check_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    """Check that residual and weight fit x."""
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"residual {describe(residual)} does not fit x {describe(x)}")
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"norm weight {describe(weight)} does not fit x {describe(x)}")


def check_rope(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    """Check that query and key are heads that the cache's angles can rotate."""
    if query.dim() != 3 or key.dim() != 3 or query.shape[2] != key.shape[2] or query.shape[0] != key.shape[0]:
        raise ValueError(
            f"rope needs query and key as [num_tokens, heads, head_size], not {describe(query)}, {describe(key)}"
        )
    if positions.dtype != torch.int64 or positions.shape != query.shape[:1]:
        raise ValueError(f"positions {describe(positions)} must be one int64 for each of {query.shape[0]} tokens")
    rotary_size = cos_sin_cache.shape[-1]
    if cos_sin_cache.dim() != 2 or rotary_size % 2 or rotary_size > query.shape[2]:
        raise ValueError(f"cos_sin_cache {describe(cos_sin_cache)} does not fit head_size={query.shape[2]}")


def check_linear(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> None:
    """Check that rows of x have the weight's inputs and the bias its outputs, all in float32."""
    if x.dim() != 2 or x.shape[1] != weight.num_in or x.dtype != torch.float32:
        raise ValueError(f"x {describe(x)} does not fit a packed weight of {weight.num_in} inputs; use float32")
    if bias is not None and (bias.shape != (weight.num_out,) or bias.dtype != x.dtype):
        raise ValueError(f"bias {describe(bias)} does not fit {weight.num_out} outputs of {x.dtype}")


def check_weights(parts: Sequence[Tensor]) -> None:
    """Check that weights can be packed as one."""
    for part in parts:
        if part.dim() != 2 or part.dtype not in PACKED_TYPES:
            types = ", ".join(str(dtype).removeprefix("torch.") for dtype in PACKED_TYPES)
            raise ValueError(f"weight {describe(part)} cannot be packed; it must be [num_out, num_in] of {types}")
    if len({(part.dtype, part.shape[1]) for part in parts}) != 1:
        raise ValueError(f"weights {[describe(part) for part in parts]} do not make one; all need one type and width")


def check_blocks(blocks: QuantizedBlocks) -> None:
    """Check that blocks are whole rows of a known type."""
    layout = TILE_FORMATS.get(blocks.type_name)
    if layout is None:
        raise ValueError(f"block type {blocks.type_name} cannot be packed; known: {', '.join(TILE_FORMATS)}")
    if blocks.num_in <= 0 or blocks.num_in % layout.unit_inputs:
        raise ValueError(
            f"{blocks.num_in} inputs are not whole blocks of {layout.unit_inputs}, as {blocks.type_name} needs"
        )
    row_bytes = blocks.num_in // layout.unit_inputs * layout.raw_bytes
    rows = blocks.rows
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != row_bytes:
        raise ValueError(f"rows {describe(rows)} must be uint8 [num_out, {row_bytes}] for {blocks.num_in} inputs")


def check_affine_blocks(blocks: AffineBlocks) -> None:
    """Check that codes are whole units of a known type, with a scale and a zero point for each."""
    codes = blocks.codes
    if blocks.type_name not in AFFINE_FORMATS:
        raise ValueError(f"type {blocks.type_name} cannot be packed; known: {', '.join(AFFINE_FORMATS)}")
    if codes.dtype != torch.uint8 or codes.dim() != 2 or not codes.shape[1] or codes.shape[1] % blocks.group:
        raise ValueError(f"codes {describe(codes)} must be uint8 [num_out, a multiple of {blocks.group}]")
    shape = (codes.shape[0], codes.shape[1] // blocks.group)
    for name, part, dtype in (("scales", blocks.scales, torch.float32), ("zeros", blocks.zeros, torch.uint8)):
        if part.dtype != dtype or part.shape != shape:
            raise ValueError(f"{name} {describe(part)} must be {dtype} {list(shape)}")
    if blocks.input_order is not None:
        check_order(blocks.input_order, codes.shape[1])


def check_order(order: Tensor, num_in: int) -> None:
    """Check that an order of inputs names each of them once."""
    if order.dtype != torch.int64 or not torch.equal(order.sort().values, torch.arange(num_in)):
        raise ValueError(f"input_order {describe(order)} must be int64 and name each of {num_in} inputs once")


def check_linear_quantized(x: Tensor, parts: Sequence[QuantizedWeight], bias: Tensor | None) -> None:
    """Check that rows of x have the inputs of every part and the bias the outputs of all."""
    if not parts or any(part.num_in != parts[0].num_in for part in parts):
        raise ValueError(f"parts with {[part.num_in for part in parts]} inputs are no layer; all need the same inputs")
    if x.dim() != 2 or x.shape[1] != parts[0].num_in or x.dtype != torch.float32:
        raise ValueError(f"x {describe(x)} does not fit quantised weights of {parts[0].num_in} inputs; use float32")
    num_out = sum(part.num_out for part in parts)
    if bias is not None and (bias.shape != (num_out,) or bias.dtype != x.dtype):
        raise ValueError(f"bias {describe(bias)} does not fit {num_out} outputs of {x.dtype}")


def check_row_indices(indices: Tensor) -> None:
    """Check that indices are a list of whole numbers."""
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"row indices {describe(indices)} must be int32 or int64 [n]")


def check_gate_up(gate_up: Tensor) -> None:
    """Check that the last dimension has two halves."""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up {describe(gate_up)} needs an even last dimension: gate, then up")


def check_kv_write(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Check that key and value are heads of this cache, with at least one row for each slot."""
    heads = (cache.num_kv_heads, cache.head_size)
    if key.dim() != 3 or key.shape[1:] != heads or value.shape != key.shape:
        raise ValueError(
            f"key {describe(key)} and value {describe(value)} must be [num_tokens, {heads[0]}, {heads[1]}]"
        )
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1 or slot_mapping.shape[0] > key.shape[0]:
        raise ValueError(f"slot_mapping {describe(slot_mapping)} must be int64 with at most {key.shape[0]} entries")


def check_attention(query: Tensor, cache: KVCache, meta: AttentionMetadata, out: Tensor) -> None:
    """Check the shapes and types of one attention call; values are checked by the implementation."""
    if query.dim() != 3 or query.shape[2] != cache.head_size or out.shape != query.shape:
        raise ValueError(
            f"query {describe(query)} and out {describe(out)} must be [num_tokens, num_heads, {cache.head_size}]"
        )
    if out.dtype != query.dtype:
        raise ValueError(f"out is {out.dtype}, query is {query.dtype}; both must be the same")
    if query.shape[1] % cache.num_kv_heads:
        raise ValueError(f"num_heads={query.shape[1]} is not a multiple of num_kv_heads={cache.num_kv_heads}")
    if query.shape[0] < meta.num_tokens:
        raise ValueError(f"query has {query.shape[0]} rows for num_tokens={meta.num_tokens}")
    check_metadata(meta)


def check_metadata(meta: AttentionMetadata) -> None:
    """Check the shapes and types of a step's requests."""
    for name, tensor, min_rows in (
        ("query_start_loc", meta.query_start_loc, meta.num_reqs + 1),
        ("seq_lens", meta.seq_lens, meta.num_reqs),
        ("block_table", meta.block_table, meta.num_reqs),
    ):
        if tensor.dtype != torch.int32 or tensor.shape[0] < min_rows:
            raise ValueError(f"{name} {describe(tensor)} must be int32 with at least {min_rows} rows")
    if meta.block_table.dim() != 2:
        raise ValueError(f"block_table {describe(meta.block_table)} must be [num_reqs, max_blocks]")


def check_encoder_attention(query: Tensor, key: Tensor, value: Tensor, meta: AttentionMetadata, out: Tensor) -> None:
    """Check that all four are the same heads of at least the batch's tokens."""
    if query.dim() != 3 or any(t.shape != query.shape or t.dtype != query.dtype for t in (key, value, out)):
        raise ValueError(
            f"query {describe(query)}, key {describe(key)}, value {describe(value)} and out {describe(out)} must all "
            "be [num_tokens, num_heads, head_size] of one type"
        )
    if query.shape[0] < meta.num_tokens:
        raise ValueError(f"query has {query.shape[0]} rows for num_tokens={meta.num_tokens}")


def window_size(window: int | None) -> int:
    """Give the sliding window in tokens, 0 for none."""
    size = window or 0
    if size < 0:
        raise ValueError(f"window={size} is negative; use 0 for full attention")
    return size


def soft_cap_size(soft_cap: float | None) -> float:
    """Give the bound of scores, 0 for none."""
    size = soft_cap or 0.0
    if not 0 <= size < math.inf:
        raise ValueError(f"soft_cap={size} is not a positive number; use None for scores without a bound")
    return size


def plain_slopes(slopes: Tensor | None, num_heads: int) -> Tensor | None:
    """Give ALiBi slopes side by side; they must be one float32 for each head."""
    if slopes is None:
        return None
    if slopes.dtype != torch.float32 or slopes.shape != (num_heads,):
        raise ValueError(f"alibi_slopes {describe(slopes)} must be float32 [{num_heads}], one for each head")
    return slopes.contiguous()


def request_spans(meta: AttentionMetadata) -> list[tuple[int, int]]:
    """Give where each request's tokens begin and end in the batch; ValueError when they are out of order."""
    starts: list[int] = meta.query_start_loc[: meta.num_reqs + 1].tolist()
    for request, (begin, end) in enumerate(pairwise(starts)):
        if begin < 0 or end < begin or end > meta.num_tokens:
            raise query_start_error(request, end, meta.num_tokens)
    return list(pairwise(starts))


def describe(tensor: Tensor) -> str:
    """Give dtype and shape for a message."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def slot_error(token: int, slot: int, num_slots: int) -> ValueError:
    """Say which token would be written outside the cache."""
    return ValueError(f"slot_mapping[{token}]={slot} is outside the cache of {num_slots} slots; use -1 to skip a token")


def row_error(place: int, row: int, num_rows: int) -> IndexError:
    """Say which index is outside the weight."""
    return IndexError(f"index {place} is row {row} of a weight of {num_rows} rows")


def token_error(token: int, token_id: int, vocab_size: int) -> IndexError:
    """Say which token is none of the vocabulary."""
    return IndexError(f"input_ids[{token}]={token_id} is outside the vocabulary of {vocab_size} tokens")


def position_error(token: int, position: int, max_position: int) -> ValueError:
    """Say which position has no rotary angle."""
    return ValueError(f"positions[{token}]={position} is outside the rotary table of {max_position} positions")


def query_start_error(request: int, end: int, num_tokens: int) -> ValueError:
    """Say which request's token range is impossible."""
    return ValueError(f"query_start_loc[{request + 1}]={end} is below its predecessor or above num_tokens={num_tokens}")


def seq_len_error(request: int, seq_len: int, max_len: int) -> ValueError:
    """Say which request's length is impossible."""
    return ValueError(f"seq_lens[{request}]={seq_len} is below its query length or above the block table's {max_len}")


def block_error(request: int, index: int, block_id: int, num_blocks: int) -> ValueError:
    """Say which entry of the block table points outside the cache."""
    return ValueError(f"block_table[{request}, {index}]={block_id} is outside the cache of {num_blocks} blocks")


def cache_error(type_number: int, block_size: int, head_size: int) -> ValueError:
    """Say that a cache is not what the layers need."""
    return ValueError(
        f"a KV cache of type {type_number}, block_size={block_size}, head_size={head_size} does not fit the layers, or "
        "not the caches beside it"
    )
