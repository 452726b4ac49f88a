"""Size and geometry of the cache."""

from __future__ import annotations

import pytest
import torch

from serve.kernels.attention import select_backend
from tests.kernels.paged import ALL_CACHE_DTYPES

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ALL_CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [12, 24, 64])
def test_page_size_is_what_the_allocated_tensors_hold(dtype: torch.dtype, head_size: int) -> None:
    backend = select_backend(CPU)
    page_size = backend.page_size_bytes(16, num_kv_heads=3, head_size=head_size, dtype=dtype)
    cache = backend.allocate_kv_cache(7, 16, num_kv_heads=3, head_size=head_size, dtype=dtype)
    parts = (cache.key, cache.value, cache.key_scale, cache.value_scale)
    assert page_size * 7 == sum(part.nbytes for part in parts if part is not None)


def test_page_of_a_whole_vector_head_has_no_padding() -> None:
    # 2 (key and value) * 16 tokens * 3 heads * 64 elements * 2 bytes
    assert select_backend(CPU).page_size_bytes(16, num_kv_heads=3, head_size=64, dtype=torch.bfloat16) == 12288


def test_fresh_cache_is_zero_and_starts_on_a_cache_line() -> None:
    cache = select_backend(CPU).allocate_kv_cache(9, 16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    assert not bool(cache.key.any())
    assert not bool(cache.value.any())
    assert cache.key.data_ptr() % 64 == 0
    assert cache.value.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_size", "dtype", "message"),
    [
        (24, 1, 16, torch.float32, "block_size=24 is not a multiple of 16"),
        (0, 1, 16, torch.float32, "block_size=0 is not a multiple of 16"),
        (16, 0, 16, torch.float32, "num_kv_heads=0 is not positive"),
        (16, 1, 513, torch.float32, r"head_size=513 is outside 1\.\.512"),
        (16, 1, 16, torch.float64, "float64 is not supported"),
    ],
)
def test_impossible_geometry_is_refused(
    block_size: int, num_kv_heads: int, head_size: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        select_backend(CPU).allocate_kv_cache(
            4, block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype
        )


def test_device_without_a_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="device 'meta' has no attention backend; supported: cpu"):
        select_backend(torch.device("meta"))
