"""Plain-torch twin of every op: slow, obviously right, on any device.

Sums run in float32, or in float64 where the activations are float64. The served implementations
are compared with these, and these with dense float64 formulas.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from serve.kernels import checks
from serve.kernels.kv_cache import AttentionMetadata, KVCache, quantize_heads
from serve.kernels.packed_weight import WEIGHT_LANES, PackedWeight, empty_packed_weight
from serve.kernels.quantized_weight import AffineBlocks, QuantizedBlocks, QuantizedWeight, pack_affine, pack_blocks
from serve.kernels.stack import Stack, StackRunner


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Normalise the last dimension to unit mean square and scale it by weight; out may be x."""
    target = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    checks.check_norm(x, weight, target)
    wide = _widen(x)
    mean_square = wide.square().mean(dim=-1, keepdim=True)
    target.copy_(wide * torch.rsqrt(mean_square + eps) * _widen(weight))
    return target


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to residual in place and give the norm of the sum."""
    checks.check_add_norm(x, residual, weight)
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def rope_(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate query and key in place by the angles of their positions.

    query, key     [num_tokens, num_heads or num_kv_heads, head_size]
    cos_sin_cache  [max_position, rotary_size], cosines then sines; the first rotary_size elements
                   of a head are rotated, element i with element i + rotary_size / 2
    """
    checks.check_rope(positions, query, key, cos_sin_cache)
    max_position, rotary_size = cos_sin_cache.shape
    is_bad = (positions < 0) | (positions >= max_position)
    if bool(is_bad.any()):
        token = int(is_bad.nonzero()[0])
        raise checks.position_error(token, int(positions[token]), max_position)
    half = rotary_size // 2
    angles = _widen(cos_sin_cache)[positions].unsqueeze(1)
    cosine, sine = angles[..., :half], angles[..., half:]
    for heads in (query, key):
        x = _widen(heads[..., :half])
        y = _widen(heads[..., half:rotary_size])
        rotated = torch.cat((x * cosine - y * sine, y * cosine + x * sine), dim=-1)
        heads[..., :rotary_size].copy_(rotated)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Give silu(gate) * up for the two halves of the last dimension."""
    checks.check_gate_up(gate_up)
    gate, up = _widen(gate_up).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def packs(dtype: torch.dtype) -> bool:
    """Tell whether linear on packed weights of a type pays: never here, a plain product is faster."""
    return False


def pack_linear(*parts: Tensor) -> PackedWeight:
    """Repack weights [num_out, num_in] of one type, their outputs side by side."""
    checks.check_weights(parts)
    weight = torch.cat(parts)
    num_out, num_in = weight.shape
    packed = empty_packed_weight(num_out, num_in, weight.dtype)
    is_paired = packed.data.dim() == 4
    num_places = packed.data.shape[1] * (2 if is_paired else 1)
    rows = torch.zeros(packed.data.shape[0] * WEIGHT_LANES, num_places, dtype=weight.dtype)
    rows[:num_out, :num_in] = weight
    tiles = rows.view(packed.data.shape[0], WEIGHT_LANES, num_places).transpose(1, 2)
    packed.data.copy_(tiles.reshape(*packed.data.shape[:2], 2, WEIGHT_LANES).transpose(2, 3) if is_paired else tiles)
    return packed


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Give float32 x [num_tokens, num_in] times the weight, plus bias [num_out], as [num_tokens, num_out]."""
    checks.check_linear(x, weight, bias)
    product = x @ weight.plain().float().T
    return product if bias is None else product + bias


def packed_rows(weight: PackedWeight, indices: Tensor) -> Tensor:
    """Look up rows by index [n], as a new float32 tensor [n, num_in]; IndexError outside the weight."""
    return weight.plain()[_checked_rows(indices, weight.num_out)].float()


def quantizes(type_name: str, dtype: torch.dtype) -> bool:
    """Tell whether products with quantised blocks pay: never here, they are dequantised for each product."""
    return False


def int8_pays(type_name: str) -> bool:
    """Tell whether 8-bit activations are faster with blocks of a type: never here."""
    return False


def pack_quantized(blocks: QuantizedBlocks | AffineBlocks) -> QuantizedWeight:
    """Repack a file's blocks, without loss."""
    if isinstance(blocks, AffineBlocks):
        checks.check_affine_blocks(blocks)
        return pack_affine(blocks)
    checks.check_blocks(blocks)
    return pack_blocks(blocks)


def linear_quantized(
    x: Tensor, parts: Sequence[QuantizedWeight], bias: Tensor | None = None, *, int8_activations: bool = False
) -> Tensor:
    """Give x [num_tokens, num_in] times each part, side by side, plus bias, as [num_tokens, num_out of all].

    int8_activations allows an implementation to round x to 8 bits where that is faster; here it never is.
    """
    checks.check_linear_quantized(x, parts, bias)
    product = torch.cat([x @ part.plain().T for part in parts], dim=1)
    return product if bias is None else product + bias


def quantized_rows(weight: QuantizedWeight, indices: Tensor) -> Tensor:
    """Look up rows by index [n], as a new float32 tensor [n, num_in]; IndexError outside the weight."""
    return weight.rows(_checked_rows(indices, weight.num_out))


def kv_write(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot, rounded to the cache's dtype; -1 skips a token.

    key, value  [num_tokens, num_kv_heads, head_size]
    A slot outside the cache raises ValueError before anything is written.
    """
    checks.check_kv_write(key, value, cache, slot_mapping)
    num_slots = cache.num_blocks * cache.block_size
    is_bad = (slot_mapping < -1) | (slot_mapping >= num_slots)
    if bool(is_bad.any()):
        token = int(is_bad.nonzero()[0])
        raise checks.slot_error(token, int(slot_mapping[token]), num_slots)
    tokens = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[tokens]
    block, offset = slots // cache.block_size, slots % cache.block_size
    lanes = cache.key.shape[-1]
    key, value = key[tokens], value[tokens]
    if cache.key_scale is not None and cache.value_scale is not None:
        key, cache.key_scale[block, :, offset] = quantize_heads(key)
        value, cache.value_scale[block, :, offset] = quantize_heads(value)
    cache.key[block, :, offset // lanes, :, offset % lanes] = key.to(cache.dtype)
    cache.value[block, :, offset, : cache.head_size] = value.to(cache.dtype)


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

    query, out  [num_tokens, num_heads, head_size]
    window      keys that a query sees, itself included; None or 0 = all
    soft_cap    scores become soft_cap * tanh(score / soft_cap)
    alibi_slopes  float32 [num_heads], added to a score times the key's position less the query's
    Rows that belong to no request stay untouched. A block outside the cache raises ValueError.
    """
    checks.check_attention(query, cache, meta, out)
    size = checks.window_size(window)
    cap, slopes = checks.soft_cap_size(soft_cap), checks.plain_slopes(alibi_slopes, query.shape[1])
    starts: list[int] = meta.query_start_loc[: meta.num_reqs + 1].tolist()
    seq_lens: list[int] = meta.seq_lens[: meta.num_reqs].tolist()
    for request, seq_len in enumerate(seq_lens):
        begin, end = starts[request], starts[request + 1]
        if begin < 0 or end < begin or end > meta.num_tokens:
            raise checks.query_start_error(request, end, meta.num_tokens)
        if begin == end:
            continue
        max_len = meta.block_table.shape[1] * cache.block_size
        if seq_len < end - begin or seq_len > max_len:
            raise checks.seq_len_error(request, seq_len, max_len)
        first_key = max(0, seq_len - (end - begin) + 1 - size) if size else 0
        keys, values = _gather(cache, meta.block_table[request], request, (first_key, seq_len))
        attended = _attend(query[begin:end], keys, values, scale=scale, window=size, soft_cap=cap, slopes=slopes)
        out[begin:end] = attended.to(out.dtype)


def encoder_attention(
    query: Tensor, key: Tensor, value: Tensor, meta: AttentionMetadata, out: Tensor, *, scale: float
) -> None:
    """Write attention in both directions to out: each token sees all tokens of its own request.

    query, key, value, out  [num_tokens, num_heads, head_size]
    Only query_start_loc, num_reqs and num_tokens of meta count: a request's tokens are all in the batch.
    """
    checks.check_encoder_attention(query, key, value, meta, out)
    for begin, end in checks.request_spans(meta):
        scores = torch.einsum("thd,khd->htk", _widen(query[begin:end]) * scale, _widen(key[begin:end]))
        weights = torch.softmax(scores, dim=-1)
        out[begin:end] = torch.einsum("htk,khd->thd", weights, _widen(value[begin:end])).to(out.dtype)


def _checked_rows(indices: Tensor, num_rows: int) -> Tensor:
    """Give row indices as int64; IndexError for one outside the weight."""
    checks.check_row_indices(indices)
    is_bad = (indices < 0) | (indices >= num_rows)
    if bool(is_bad.any()):
        place = int(is_bad.nonzero()[0])
        raise checks.row_error(place, int(indices[place]), num_rows)
    return indices.long()


def _gather(cache: KVCache, block_ids: Tensor, request: int, span: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Give keys and values [num_keys, num_kv_heads, head_size] of positions [span[0], span[1])."""
    first_block = span[0] // cache.block_size
    end_block = (span[1] + cache.block_size - 1) // cache.block_size
    blocks = block_ids[first_block:end_block].long()
    is_bad = (blocks < 0) | (blocks >= cache.num_blocks)
    if bool(is_bad.any()):
        index = int(is_bad.nonzero()[0])
        raise checks.block_error(request, first_block + index, int(blocks[index]), cache.num_blocks)
    rows = slice(span[0] - first_block * cache.block_size, span[1] - first_block * cache.block_size)
    keys = cache.key[blocks].permute(0, 2, 4, 1, 3).flatten(0, 2)
    values = cache.value[blocks].permute(0, 2, 1, 3).flatten(0, 1)[..., : cache.head_size]
    if cache.key_scale is not None and cache.value_scale is not None:
        keys = keys.float() * cache.key_scale[blocks].permute(0, 2, 1).flatten(0, 1).unsqueeze(-1)
        values = values.float() * cache.value_scale[blocks].permute(0, 2, 1).flatten(0, 1).unsqueeze(-1)
    return keys[rows], values[rows]


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    slopes: Tensor | None,
) -> Tensor:
    """Attend one request's queries to its keys, whose last ones are the queries' own."""
    num_tokens, num_heads, _ = query.shape
    wide = _widen(query)
    group_size = num_heads // keys.shape[1]
    keys = keys.to(wide.dtype).repeat_interleave(group_size, dim=1)
    values = values.to(wide.dtype).repeat_interleave(group_size, dim=1)
    scores = torch.einsum("thd,khd->htk", wide * scale, keys)
    key_position = torch.arange(keys.shape[0], device=query.device)
    query_position = key_position[keys.shape[0] - num_tokens :].unsqueeze(1)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * (key_position - query_position)
    is_seen = key_position <= query_position
    if window:
        is_seen &= key_position > query_position - window
    weights = torch.softmax(scores.masked_fill(~is_seen, -torch.inf), dim=-1)
    return torch.einsum("htk,khd->thd", weights, values)


def _widen(tensor: Tensor) -> Tensor:
    """Give float64 as it is and everything else as float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def stack(stack: Stack) -> StackRunner | None:
    """Give None: the layers run op by op."""
    return None
