"""Writing keys and values into the paged cache."""

from __future__ import annotations

import pytest
import torch

from serve.kernels import kv_cache
from serve.kernels.kv_cache import KVCache
from serve.kernels.ops import Ops
from tests.kernels.paged import ALL_CACHE_DTYPES, CACHE_DTYPES, fill

LARGE = [65504.0, 65519.0, 65520.0, 3e38, torch.inf, -torch.inf]
SMALL = [0.0, -0.0, 1e-8, 2.98e-8, -5.96e-8, 6.1e-5]


def new_cache(dtype: torch.dtype, head_size: int = 24, block_size: int = 32) -> KVCache:
    return kv_cache.allocate_kv_cache(5, block_size, num_kv_heads=3, head_size=head_size, dtype=dtype)


@pytest.mark.parametrize("dtype", ALL_CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("head_size", [7, 12, 24, 64])
@pytest.mark.parametrize("num_tokens", [1, 16, 17, 123])
def test_tokens_land_in_their_slots(every_ops: Ops, dtype: torch.dtype, head_size: int, num_tokens: int) -> None:
    torch.manual_seed(num_tokens)
    actual, expected = new_cache(dtype, head_size), new_cache(dtype, head_size)
    fused = torch.randn(num_tokens, 9, head_size)
    key, value = fused[:, 3:6], fused[:, 6:9]
    slots = torch.randperm(5 * 32)[:num_tokens]
    every_ops.kv_write(key, value, actual, slots)
    if dtype != torch.int8:
        key, value = key.to(dtype), value.to(dtype)
    fill(expected, key, value, slots)
    assert torch.equal(actual.key, expected.key)
    assert torch.equal(actual.value, expected.value)
    for scales in ("key_scale", "value_scale"):
        pair = [getattr(cache, scales) for cache in (actual, expected)]
        assert pair == [None, None] or torch.equal(*pair)


def test_int8_is_off_by_half_a_127th_of_the_largest_at_most(every_ops: Ops) -> None:
    torch.manual_seed(3)
    cache = new_cache(torch.int8, head_size=64)
    assert cache.value_scale is not None
    value = torch.ldexp(torch.randn(40, 3, 64), torch.randint(-30, 30, (40, 3, 1)))
    every_ops.kv_write(value, value, cache, torch.arange(40))
    codes = cache.value.permute(0, 2, 1, 3).flatten(0, 1)[:40].double()
    scale = cache.value_scale.permute(0, 2, 1).flatten(0, 1)[:40].double().unsqueeze(-1)
    step = value.double().abs().amax(dim=-1, keepdim=True) / 127
    assert bool(((codes * scale - value.double()).abs() <= 0.5001 * step).all())
    assert bool((codes.abs().amax(dim=-1) == 127).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int8_head_that_is_not_finite_reads_as_not_a_number(every_ops: Ops, bad: float) -> None:
    cache = new_cache(torch.int8)
    assert cache.key_scale is not None
    assert cache.value_scale is not None
    key, value = torch.ones(1, 3, 24), torch.zeros(1, 3, 24)
    key[0, 1, 5] = bad
    every_ops.kv_write(key, value, cache, torch.tensor([33]))
    assert cache.key_scale[1, :, 1].isnan().tolist() == [False, True, False]
    assert cache.value_scale[1, :, 1].tolist() == [0.0, 0.0, 0.0]
    assert not bool(cache.key[1, 1].any())
    assert not bool(cache.value.any())


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_values_round_to_nearest_even_as_in_torch(every_ops: Ops, dtype: torch.dtype) -> None:
    cache = new_cache(dtype, head_size=64)
    torch.manual_seed(0)
    exponents = torch.randint(-40, 40, (123, 3, 64))
    ties = torch.randint(-(2**13), 2**13, (123, 3, 64)).float()  # many lie halfway between two halves
    key, value = torch.ldexp(torch.randn(123, 3, 64), exponents), torch.ldexp(ties, exponents // 4)
    key[0, 0, : len(LARGE + SMALL)] = torch.tensor(LARGE + SMALL)
    slots = torch.arange(123)
    every_ops.kv_write(key, value, cache, slots)
    expected = new_cache(dtype, head_size=64)
    fill(expected, key.to(dtype), value.to(dtype), slots)
    assert torch.equal(cache.key, expected.key)
    assert torch.equal(cache.value, expected.value)


@pytest.mark.parametrize("dtype", CACHE_DTYPES, ids=str)
def test_nan_stays_nan(every_ops: Ops, dtype: torch.dtype) -> None:
    cache = new_cache(dtype)
    every_ops.kv_write(torch.full((1, 3, 24), torch.nan), torch.full((1, 3, 24), -torch.nan), cache, torch.tensor([40]))
    assert bool(cache.key[1, :, 0, :, 8].isnan().all())
    assert bool(cache.value[1, :, 8, :24].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_tokens_are_stored_unchanged(every_ops: Ops, dtype: torch.dtype) -> None:
    cache = new_cache(dtype)
    key = torch.randn(4, 3, 24).to(dtype)
    every_ops.kv_write(key, -key, cache, torch.arange(4))
    assert torch.equal(cache.key[0, :, 0, :, :4].permute(2, 0, 1), key)
    assert torch.equal(cache.value[0, :, :4, :24].permute(1, 0, 2), -key)


def test_minus_one_skips_a_token_and_rows_beyond_the_mapping(every_ops: Ops) -> None:
    cache = new_cache(torch.float32)
    ones = torch.ones(4, 3, 24)
    every_ops.kv_write(ones, ones, cache, torch.tensor([-1, 33, -1]))
    assert float(cache.key.sum()) == 3 * 24
    assert float(cache.value[1, :, 1].sum()) == 3 * 24
    assert float(cache.value.sum()) == 3 * 24


@pytest.mark.parametrize("slot", [-2, 160, 2**40])
def test_slot_outside_the_cache_is_refused_before_any_write(every_ops: Ops, slot: int) -> None:
    cache = new_cache(torch.bfloat16)
    ones = torch.ones(3, 3, 24)
    with pytest.raises(ValueError, match=rf"slot_mapping\[2\]={slot} is outside the cache of 160 slots"):
        every_ops.kv_write(ones, ones, cache, torch.tensor([3, 4, slot]))
    assert not bool(cache.key.any())
    assert not bool(cache.value.any())


def test_shapes_that_do_not_fit_are_refused(every_ops: Ops) -> None:
    cache = new_cache(torch.float32)
    ones = torch.ones(2, 3, 24)
    with pytest.raises(ValueError, match=r"must be \[num_tokens, 3, 24\]"):
        every_ops.kv_write(ones[:, :2], ones, cache, torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="int64 with at most 2 entries"):
        every_ops.kv_write(ones, ones, cache, torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="int64 with at most 2 entries"):
        every_ops.kv_write(ones, ones, cache, torch.tensor([0, 1], dtype=torch.int32))
