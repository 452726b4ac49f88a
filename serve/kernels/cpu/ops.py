"""Every op on the CPU library: float32 activations, anything else through the plain-torch twin.

Activations of another type are widened for the two cache ops, which the twin would do request by
request. The library checks slots, positions and blocks itself and names the first bad one.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from serve.kernels import checks, reference
from serve.kernels.block_formats import AFFINE_FORMATS, TILE_FORMATS, tile_format
from serve.kernels.cpu import binding, descriptions, faults
from serve.kernels.cpu.stack import build_stack
from serve.kernels.kv_cache import AttentionMetadata, KVCache
from serve.kernels.packed_weight import PACKED_TYPES, PackedWeight, empty_packed_weight
from serve.kernels.quantized_weight import AffineBlocks, QuantizedBlocks, QuantizedWeight, empty_quantized_weight
from serve.kernels.stack import Stack, StackRunner


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Normalise the last dimension; see the twin. x may be the heads of a fused projection."""
    target = torch.empty(x.shape, dtype=x.dtype) if out is None else out
    checks.check_norm(x, weight, target)
    x_rows, out_rows = _row_groups(x), _row_groups(target)
    if x.dtype != torch.float32 or x_rows is None or out_rows is None or not weight.is_contiguous():
        return reference.rms_norm(x, weight, eps, out=target)
    num_groups, rows_per_group, x_stride = x_rows
    binding.library().serve_rms_norm(
        x.data_ptr(),
        weight.data_ptr(),
        target.data_ptr(),
        num_groups,
        rows_per_group,
        x.shape[-1],
        x_stride,
        out_rows[2],
        eps,
    )
    return target


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add x to residual in place and give the norm of the sum."""
    checks.check_add_norm(x, residual, weight)
    is_plain = x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()
    if x.dtype != torch.float32 or not is_plain:
        return reference.add_rms_norm(x, residual, weight, eps)
    out = torch.empty_like(x)
    size = x.shape[-1]
    binding.library().serve_add_rms_norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // size, size, eps
    )
    return out


def rope_(positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate query and key in place; see the twin. Both may be views of one fused projection."""
    checks.check_rope(positions, query, key, cos_sin_cache)
    is_float = query.dtype == key.dtype == cos_sin_cache.dtype == torch.float32
    is_plain = _has_plain_heads(query) and _has_plain_heads(key) and positions.stride(0) == 1
    if not (is_float and is_plain and cos_sin_cache.is_contiguous()):
        reference.rope_(positions, query, key, cos_sin_cache)
        return
    num_tokens, num_heads, head_size = query.shape
    max_position, rotary_size = cos_sin_cache.shape
    fault = binding.Fault()
    status = binding.library().serve_rope(
        positions.data_ptr(),
        query.data_ptr(),
        key.data_ptr(),
        num_tokens,
        query.stride(0),
        key.stride(0),
        num_heads,
        key.shape[1],
        head_size,
        cos_sin_cache.data_ptr(),
        max_position,
        rotary_size,
        ctypes.addressof(fault),
    )
    if status != binding.OK:
        raise checks.position_error(fault.a, fault.b, max_position)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Give silu(gate) * up for the two halves of the last dimension."""
    checks.check_gate_up(gate_up)
    rows = _row_groups(gate_up) if gate_up.dtype == torch.float32 else None
    if rows is None or rows[1] != 1:
        return reference.silu_and_mul(gate_up)
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size))
    binding.library().serve_silu_and_mul(gate_up.data_ptr(), out.data_ptr(), rows[0], size, rows[2], size)
    return out


def packs(dtype: torch.dtype) -> bool:
    """Tell whether linear on packed weights of a type pays."""
    return dtype in PACKED_TYPES


def pack_linear(*parts: Tensor) -> PackedWeight:
    """Repack weights, their outputs side by side; see the twin."""
    checks.check_weights(parts)
    packed = empty_packed_weight(sum(part.shape[0] for part in parts), parts[0].shape[1], parts[0].dtype)
    first = 0
    for part in parts:
        plain = part.contiguous()
        status = binding.library().serve_pack_linear(
            packed.type_number, plain.data_ptr(), packed.data.data_ptr(), first, plain.shape[0], packed.num_in
        )
        assert status == binding.OK, f"serve_pack_linear refuses with status {status}"
        first += plain.shape[0]
    return packed


def linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """Give x times the weight, plus bias; see the twin.

    Weights are widened without loss. Every output sums its products in one fixed order, so a row is the same to the
    bit in every batch, with any number of threads, and for every type of weights that holds the same numbers.
    """
    checks.check_linear(x, weight, bias)
    rows = x if x.stride(1) == 1 else x.contiguous()
    plain_bias = None if bias is None else bias.contiguous()
    out = torch.empty((x.shape[0], weight.num_out))
    status = binding.library().serve_linear(
        weight.type_number,
        rows.data_ptr(),
        rows.stride(0),
        weight.data.data_ptr(),
        None if plain_bias is None else plain_bias.data_ptr(),
        out.data_ptr(),
        weight.num_out,
        x.shape[0],
        weight.num_in,
        weight.num_out,
    )
    assert status == binding.OK, f"serve_linear refuses with status {status}"
    return out


def packed_rows(weight: PackedWeight, indices: Tensor) -> Tensor:
    """Look up rows by index; see the twin."""
    checks.check_row_indices(indices)
    wide = indices.long().contiguous()
    out = torch.empty((wide.shape[0], weight.num_in))
    fault = binding.Fault()
    status = binding.library().serve_packed_rows(
        weight.type_number,
        weight.data.data_ptr(),
        wide.data_ptr(),
        wide.shape[0],
        out.data_ptr(),
        weight.num_in,
        weight.num_out,
        ctypes.addressof(fault),
    )
    if status != binding.OK:
        raise checks.row_error(fault.a, fault.b, weight.num_out)
    return out


def quantizes(type_name: str, dtype: torch.dtype) -> bool:
    """Tell whether products with quantised blocks of a type pay for activations of a dtype."""
    return (type_name in TILE_FORMATS or type_name in AFFINE_FORMATS) and dtype == torch.float32


def int8_pays(type_name: str) -> bool:
    """Tell whether 8-bit activations are faster with blocks of a type: codes of 8 bits are two products elsewhere."""
    return tile_format(type_name).low_bits < 8 or binding.load_library().variant in binding.WIDE_BYTE_SUMS


def pack_quantized(blocks: QuantizedBlocks | AffineBlocks) -> QuantizedWeight:
    """Repack a file's blocks; see the twin."""
    if isinstance(blocks, AffineBlocks):
        return _pack_affine(blocks)
    checks.check_blocks(blocks)
    rows = blocks.rows.contiguous()
    weight = empty_quantized_weight(blocks.type_name, rows.shape[0], blocks.num_in)
    status = binding.library().serve_pack_quantized(
        weight.format.number, rows.data_ptr(), rows.shape[1], weight.data.data_ptr(), weight.num_in, weight.num_out
    )
    assert status == binding.OK, f"status {status} for blocks that were checked"
    return weight


def _pack_affine(blocks: AffineBlocks) -> QuantizedWeight:
    checks.check_affine_blocks(blocks)
    codes, scales, zeros = blocks.codes.contiguous(), blocks.scales.contiguous(), blocks.zeros.contiguous()
    weight = empty_quantized_weight(blocks.type_name, codes.shape[0], codes.shape[1], blocks.input_order)
    status = binding.library().serve_pack_affine(
        weight.format.number,
        codes.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
        weight.data.data_ptr(),
        weight.num_in,
        weight.num_out,
    )
    assert status == binding.OK, f"status {status} for blocks that were checked"
    return weight


def linear_quantized(
    x: Tensor, parts: Sequence[QuantizedWeight], bias: Tensor | None = None, *, int8_activations: bool = False
) -> Tensor:
    """Give x times each part, side by side, plus bias; see the twin.

    Rows of x are rounded to 16-bit integers, or to 8 bits, with one scale for 32 inputs. Every output adds its
    blocks in one fixed order, so a row is the same to the bit in every batch and with any number of
    threads. A row with an input that is not finite is not a number in every output.
    """
    checks.check_linear_quantized(x, parts, bias)
    num_rows, num_in = x.shape
    num_out = sum(part.num_out for part in parts)
    out = torch.empty((num_rows, num_out))
    plain_bias = None if bias is None else bias.contiguous()
    order = parts[0].input_order
    codes = _quantize_rows(x, order, int8_activations)
    first = 0
    for part in parts:
        if part.input_order is not order:
            order = part.input_order
            codes = _quantize_rows(x, order, int8_activations)
        status = binding.library().serve_quantized_linear(
            part.format.number,
            codes.data_ptr(),
            part.data.data_ptr(),
            None if plain_bias is None else plain_bias.data_ptr() + first * 4,
            out.data_ptr() + first * 4,
            num_out,
            num_rows,
            num_in,
            part.num_out,
            int8_activations,
        )
        assert status == binding.OK, f"status {status} for a product that was checked"
        first += part.num_out
    return out


def _quantize_rows(x: Tensor, order: Tensor | None, int8_activations: bool) -> Tensor:
    """Round rows of x, their inputs in the order given, to integers for serve_quantized_linear."""
    rows = x if order is None else x.index_select(1, order)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    library = binding.library()
    num_rows, num_in = rows.shape
    # int64: the integers and floats inside need alignment.
    codes = torch.empty(num_rows * library.serve_quantized_row_bytes(num_in, int8_activations) // 8, dtype=torch.int64)
    status = library.serve_quantize_rows(
        rows.data_ptr(), rows.stride(0), codes.data_ptr(), num_rows, num_in, int8_activations
    )
    assert status == binding.OK, f"status {status} for rows that were checked"
    return codes


def quantized_rows(weight: QuantizedWeight, indices: Tensor) -> Tensor:
    """Look up rows by index; see the twin."""
    checks.check_row_indices(indices)
    wide = indices.long().contiguous()
    out = torch.empty((wide.shape[0], weight.num_in))
    fault = binding.Fault()
    status = binding.library().serve_quantized_rows(
        weight.format.number,
        weight.data.data_ptr(),
        wide.data_ptr(),
        wide.shape[0],
        out.data_ptr(),
        weight.num_in,
        weight.num_out,
        ctypes.addressof(fault),
    )
    if status != binding.OK:
        raise checks.row_error(fault.a, fault.b, weight.num_out)
    return weight.in_input_order(out)


def kv_write(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """Store each token's key and value in its slot; see the twin."""
    checks.check_kv_write(key, value, cache, slot_mapping)
    key, value = _plain_float_heads(key), _plain_float_heads(value)
    slot_mapping = slot_mapping.contiguous()
    batch, layer, fault = descriptions.describe_slots(slot_mapping), descriptions.describe_cache(cache), binding.Fault()
    status = binding.library().serve_write_kv(
        key.data_ptr(),
        value.data_ptr(),
        key.stride(0),
        value.stride(0),
        ctypes.addressof(batch),
        ctypes.addressof(layer),
        ctypes.addressof(fault),
    )
    if status != binding.OK:
        raise checks.slot_error(fault.a, fault.b, cache.num_blocks * cache.block_size)


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
    """Write causal attention of packed queries over the paged cache to out; see the twin.

    Sums run in float32 in an order that depends on the request alone, so a row is the same to the
    bit in every batch, however its prompt was split, and with any number of threads.
    Source: arXiv 2309.06180 (paging), 2205.14135 (merging softmax chunks).
    """
    checks.check_attention(query, cache, meta, out)
    plain_query = _plain_float_heads(query)
    is_direct = out.dtype == torch.float32 and _has_plain_heads(out)
    plain_out = out if is_direct else out.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    batch, layer, fault = descriptions.describe_batch(meta), descriptions.describe_cache(cache), binding.Fault()
    cap, slopes = checks.soft_cap_size(soft_cap), checks.plain_slopes(alibi_slopes, query.shape[1])
    options = descriptions.AttentionOptions(
        scale, checks.window_size(window), cap, None if slopes is None else slopes.data_ptr()
    )
    status = binding.library().serve_paged_attention(
        plain_query.data_ptr(),
        plain_out.data_ptr(),
        plain_query.stride(0),
        plain_out.stride(0),
        query.shape[1],
        ctypes.addressof(batch),
        ctypes.addressof(options),
        ctypes.addressof(layer),
        ctypes.addressof(fault),
    )
    if status != binding.OK:
        raise faults.batch_error(int(status), fault, cache, meta)
    if not is_direct:
        out.copy_(plain_out)


def encoder_attention(
    query: Tensor, key: Tensor, value: Tensor, meta: AttentionMetadata, out: Tensor, *, scale: float
) -> None:
    """Write attention in both directions to out; see the twin.

    Requests are computed one by one: a padded batch would let a row's sums depend on the longest neighbour.
    """
    checks.check_encoder_attention(query, key, value, meta, out)
    for begin, end in checks.request_spans(meta):
        # A batch of one: without that dimension torch takes a path of half the speed.
        q, k, v = (heads[begin:end].transpose(0, 1).unsqueeze(0) for heads in (query, key, value))
        out[begin:end] = scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1)


def stack(stack: Stack) -> StackRunner | None:
    """Make what runs a whole decoder by one call a step, or None for tensors that only the single ops take."""
    return build_stack(stack)


def _has_plain_heads(heads: Tensor) -> bool:
    """Tell whether the heads of a token lie side by side; tokens may be any distance apart."""
    return heads.stride(2) == 1 and (heads.stride(1) == heads.shape[2] or heads.shape[1] == 1)


def _plain_float_heads(heads: Tensor) -> Tensor:
    """Give the same values as float32 heads that lie side by side, without a copy if they do."""
    if heads.dtype == torch.float32 and _has_plain_heads(heads):
        return heads
    return heads.to(torch.float32).contiguous()


def _row_groups(x: Tensor) -> tuple[int, int, int] | None:
    """Describe x as (groups, adjacent rows in a group, distance of groups), None if it is not so.

    Fits contiguous tensors and [num_tokens, heads, head_size] views of a wider row.
    """
    if x.dim() == 0:
        return None
    size = x.shape[-1]
    if x.is_contiguous():
        return (x.numel() // size if size else 0), 1, size
    if x.dim() == 2 and x.stride(1) == 1:
        return x.shape[0], 1, x.stride(0)
    if x.dim() == 3 and _has_plain_heads(x):
        return x.shape[0], x.shape[1], x.stride(0)
    return None
