"""Paged KV cache of one layer and the batch description that attention reads."""

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

KEY_LANES = 16
MAX_HEAD_SIZE = 512
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
SCALE_BYTES = 4  # of a float32, for each head of a position in an int8 cache
HUGE_PAGE = 2 << 20


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch, as attention needs it; views of persistent buffers are fine.

    query_start_loc  [>= num_reqs + 1] int32, prefix sums of the query lengths
    seq_lens         [>= num_reqs] int32, computed + scheduled tokens
    block_table      [>= num_reqs, max_blocks] int32, block ids of each request in order
    slot_mapping     [>= num_tokens] int64, -1 = do not write
    max_query_len and max_seq_len are the host's maxima over the requests.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's cache.

    key    [num_blocks, num_kv_heads, block_size / 16, head_size, 16]: sixteen neighbouring
           positions lie side by side, so that one vector load serves sixteen scores
    value  [num_blocks, num_kv_heads, block_size, head_size rounded up to 16], zero padded
    int8 has scales besides, float32 [num_blocks, num_kv_heads, block_size] each.
    """

    key: Tensor
    value: Tensor
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


def padded_head_size(head_size: int) -> int:
    """Round up to whole vectors, as value rows are stored."""
    return (head_size + KEY_LANES - 1) // KEY_LANES * KEY_LANES


def page_size_bytes(block_size: int, *, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> int:
    """Give the bytes of one block in one layer, key and value together."""
    check_geometry(block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)
    scales = 2 * SCALE_BYTES if dtype == torch.int8 else 0
    return block_size * num_kv_heads * ((head_size + padded_head_size(head_size)) * dtype.itemsize + scales)


def check_geometry(block_size: int, *, num_kv_heads: int, head_size: int, dtype: torch.dtype) -> None:
    """Raise ValueError for a cache that the kernels cannot address."""
    if block_size <= 0 or block_size % KEY_LANES:
        raise ValueError(f"block_size={block_size} is not a multiple of {KEY_LANES}; use 16, 32, 64 or 128")
    if num_kv_heads <= 0:
        raise ValueError(f"num_kv_heads={num_kv_heads} is not positive")
    if not 0 < head_size <= MAX_HEAD_SIZE:
        raise ValueError(f"head_size={head_size} is outside 1..{MAX_HEAD_SIZE}")
    if dtype not in CACHE_DTYPES:
        raise ValueError(f"a KV cache of {dtype} is not supported; use float32, bfloat16, float16 or int8")


def allocate_kv_cache(
    num_blocks: int, block_size: int, *, num_kv_heads: int, head_size: int, dtype: torch.dtype
) -> KVCache:
    """Reserve a zeroed cache in host memory; the system hands out its pages on first write."""
    check_geometry(block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)
    if num_blocks <= 0:
        raise ValueError(f"num_blocks={num_blocks} is not positive")
    key_shape = (num_blocks, num_kv_heads, block_size // KEY_LANES, head_size, KEY_LANES)
    value_shape = (num_blocks, num_kv_heads, block_size, padded_head_size(head_size))
    scale_shape = (num_blocks, num_kv_heads, block_size)
    is_scaled = dtype == torch.int8
    return KVCache(
        key=_zeros(key_shape, dtype),
        value=_zeros(value_shape, dtype),
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        dtype=dtype,
        key_scale=_zeros(scale_shape, torch.float32) if is_scaled else None,
        value_scale=_zeros(scale_shape, torch.float32) if is_scaled else None,
    )


def quantize_heads(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Give int8 codes of heads [..., head_size] and their scales [...]; the largest magnitude becomes 127.

    A head with an element that is not finite has a scale that is not a number.
    """
    wide = heads.float()
    scale = wide.abs().amax(dim=-1) / 127
    scale = scale.masked_fill(~wide.isfinite().all(dim=-1), torch.nan)
    codes = (wide / scale.unsqueeze(-1)).round().nan_to_num(0).clamp(-127, 127)
    return codes.to(torch.int8), scale


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make zeros that start on a huge page and cost nothing until they are touched.

    torch.zeros writes every page, seconds for a large cache; these come from the system on first touch, 2 MiB at a
    time where it has huge pages: blocks in random order then cost few address translations. MemoryError when the
    system refuses.
    """
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as e:
        raise MemoryError(f"the system refused {num_bytes} bytes") from e
    if num_bytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    raw = np.frombuffer(memory, dtype=np.uint8)
    start = -raw.ctypes.data % HUGE_PAGE
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
