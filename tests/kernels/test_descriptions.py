"""Structures that the library takes by pointer: what it refuses when called without the ops' own checks."""

from __future__ import annotations

import ctypes

import pytest
import torch

from serve.kernels.cpu import binding, descriptions
from serve.kernels.ops import Ops
from tests.kernels.paged import Batch, Heads, make_batch

HEADS = Heads(4, 2, 16)


def attend(batch: Batch, cache: descriptions.CacheDescription, num_heads: int = 4) -> tuple[int, tuple[int, int, int]]:
    """Call the entry point itself; give its status and the fault."""
    meta = descriptions.describe_batch(batch.meta)
    options = descriptions.AttentionOptions(scale=1.0)
    fault, out = binding.Fault(), torch.full_like(batch.query, 5.0)
    status = binding.library().serve_paged_attention(
        batch.query.data_ptr(),
        out.data_ptr(),
        batch.query.stride(0),
        out.stride(0),
        num_heads,
        *(ctypes.addressof(part) for part in (meta, options, cache, fault)),
    )
    assert torch.equal(out, torch.full_like(out, 5.0)) == (status != binding.OK)
    return status, (fault.a, fault.b, fault.c)


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("type", 99, (99, 16, 16)),
        ("type", -1, (-1, 16, 16)),
        ("block_size", 24, (0, 24, 16)),
        ("block_size", 0, (0, 0, 16)),
        ("head_size", 513, (0, 16, 513)),
        ("num_kv_heads", 0, (0, 16, 16)),
    ],
)
def test_impossible_cache_is_refused(library_ops: Ops, field: str, value: int, fault: tuple[int, int, int]) -> None:
    batch = make_batch([2], [5], HEADS, dtype=torch.float32)
    cache = descriptions.describe_cache(batch.cache)
    assert attend(batch, cache)[0] == binding.OK
    setattr(cache, field, value)
    assert attend(batch, cache) == (binding.BAD_CACHE, fault)


def test_heads_that_cannot_be_shared_are_refused(library_ops: Ops) -> None:
    batch = make_batch([2], [5], HEADS, dtype=torch.float32)
    cache = descriptions.describe_cache(batch.cache)
    assert attend(batch, cache, num_heads=3) == (binding.BAD_HEADS, (3, 2, 0))


def test_slots_outside_the_cache_are_refused_before_the_first_write(library_ops: Ops) -> None:
    batch = make_batch([2], [5], HEADS, dtype=torch.float32)
    before = batch.cache.key.clone()
    slots = torch.tensor([0, 10**6])
    fault, key = binding.Fault(), torch.ones(2, 2, 16)
    meta, cache = descriptions.describe_slots(slots), descriptions.describe_cache(batch.cache)
    status = binding.library().serve_write_kv(
        key.data_ptr(), key.data_ptr(), 32, 32, *(ctypes.addressof(part) for part in (meta, cache, fault))
    )
    assert (status, fault.a, fault.b) == (binding.BAD_SLOT, 1, 10**6)
    assert torch.equal(before.nan_to_num(), batch.cache.key.nan_to_num())
