"""Paged attention of every implementation against dense float64 attention."""

from __future__ import annotations

import pytest
import torch

from serve.kernels.ops import Ops
from tests.kernels.paged import (
    ALL_CACHE_DTYPES,
    Batch,
    Heads,
    dense_attention,
    make_batch,
    relative_error,
    twin_attention,
)

# Queries and sums are float32 for every cache type, and the truth is computed from the stored keys and values.
TOLERANCE = 2e-6
HEADS = [Heads(9, 3, 64), Heads(14, 2, 96), Heads(4, 4, 12), Heads(4, 2, 24), Heads(8, 1, 128), Heads(3, 1, 7)]
MIXED = ([7, 1, 40, 16], [7, 90, 100, 16])


def run(ops: Ops, batch: Batch, window: int = 0) -> torch.Tensor:
    out = torch.full_like(batch.query, torch.nan)
    ops.paged_attention(batch.query, batch.cache, batch.meta, out, scale=batch.heads.scale, window=window)
    return out


@pytest.mark.parametrize("dtype", ALL_CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [0, 13])
def test_mixed_batch_equals_dense_attention(every_ops: Ops, dtype: torch.dtype, heads: Heads, window: int) -> None:
    batch = make_batch(*MIXED, heads, dtype=dtype)
    assert relative_error(run(every_ops, batch, window), dense_attention(batch, window)) < TOLERANCE


@pytest.mark.parametrize("seq_len", [1, 2, 15, 16, 17, 123, 255, 256, 257, 600])
@pytest.mark.parametrize("dtype", ALL_CACHE_DTYPES, ids=str)
def test_decode_at_every_edge(every_ops: Ops, dtype: torch.dtype, seq_len: int) -> None:
    batch = make_batch([1, 1], [seq_len, 1], Heads(6, 2, 32), dtype=dtype)
    assert relative_error(run(every_ops, batch), dense_attention(batch)) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("soft_cap", [None, 0.3, 30.0])
@pytest.mark.parametrize("has_slopes", [False, True])
@pytest.mark.parametrize("window", [0, 13])
def test_scores_are_capped_and_fall_with_distance(
    every_ops: Ops, dtype: torch.dtype, soft_cap: float | None, has_slopes: bool, window: int
) -> None:
    batch = make_batch([5, 1, 7], [300, 40, 7], Heads(6, 2, 24), dtype=dtype)
    batch.query *= 3
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.01, 0.0, 1.0]) if has_slopes else None
    out = torch.full_like(batch.query, torch.nan)
    every_ops.paged_attention(
        batch.query,
        batch.cache,
        batch.meta,
        out,
        scale=batch.heads.scale,
        window=window,
        soft_cap=soft_cap,
        alibi_slopes=slopes,
    )
    assert relative_error(out, dense_attention(batch, window, soft_cap=soft_cap, slopes=slopes)) < TOLERANCE


@pytest.mark.parametrize("soft_cap", [-1.0, float("inf"), float("nan")])
def test_impossible_score_options_are_refused(every_ops: Ops, soft_cap: float) -> None:
    batch = make_batch([2], [5], Heads(4, 2, 16), dtype=torch.float32)
    out = torch.empty_like(batch.query)
    arguments = (batch.query, batch.cache, batch.meta, out)
    with pytest.raises(ValueError, match=r"soft_cap=.* is not a positive number"):
        every_ops.paged_attention(*arguments, scale=1.0, soft_cap=soft_cap)
    with pytest.raises(ValueError, match=r"alibi_slopes torch.float32 \[2\] must be float32 \[4\]"):
        every_ops.paged_attention(*arguments, scale=1.0, alibi_slopes=torch.ones(2))


@pytest.mark.parametrize("query_len", [1, 8, 9, 123])
def test_prefill_from_the_first_token(every_ops: Ops, query_len: int) -> None:
    batch = make_batch([query_len], [query_len], Heads(9, 3, 16), dtype=torch.float32)
    assert relative_error(run(every_ops, batch), dense_attention(batch)) < TOLERANCE


@pytest.mark.parametrize("window", [1, 16, 255, 256, 300, 5000])
def test_window_over_several_chunks(every_ops: Ops, window: int) -> None:
    batch = make_batch([70, 1], [620, 513], Heads(4, 2, 16), dtype=torch.bfloat16)
    assert relative_error(run(every_ops, batch, window), dense_attention(batch, window)) < TOLERANCE


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_larger_blocks(every_ops: Ops, block_size: int) -> None:
    batch = make_batch([5, 1], [130, 65], Heads(4, 2, 24), dtype=torch.float16, block_size=block_size)
    assert relative_error(run(every_ops, batch), dense_attention(batch)) < TOLERANCE


@pytest.mark.parametrize("group_size", range(1, 8))
def test_every_number_of_heads_that_share_a_load(library_ops: Ops, group_size: int) -> None:
    batch = make_batch([1, 5], [40, 19], Heads(group_size, 1, 48), dtype=torch.bfloat16)
    assert relative_error(run(library_ops, batch), dense_attention(batch)) < TOLERANCE


def test_library_equals_twin_with_strided_and_padded_inputs(library_ops: Ops) -> None:
    heads = Heads(6, 2, 32)
    batch = make_batch(*MIXED, heads, dtype=torch.bfloat16)
    fused = torch.full((batch.meta.num_tokens + 3, (6 + 2 + 2) * 32), torch.nan)
    query = fused[:, : 6 * 32].view(-1, 6, 32)
    query[: batch.meta.num_tokens] = batch.query
    out = torch.full_like(query, 5.0)
    library_ops.paged_attention(query, batch.cache, batch.meta, out, scale=heads.scale)
    assert relative_error(out[:-3], twin_attention(batch)) < TOLERANCE
    assert torch.equal(out[-3:], torch.full_like(out[-3:], 5.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_queries_give_rounded_results(every_ops: Ops, dtype: torch.dtype) -> None:
    batch = make_batch(*MIXED, Heads(4, 2, 32), dtype=dtype)
    batch.query = batch.query.to(dtype)
    truth = dense_attention(batch)
    actual = run(every_ops, batch)
    assert actual.dtype == dtype
    assert relative_error(actual, truth) < torch.finfo(dtype).eps


def test_requests_without_tokens_are_passed_over(every_ops: Ops) -> None:
    batch = make_batch([3, 2], [20, 9], Heads(4, 2, 16), dtype=torch.float32)
    truth = dense_attention(batch)
    padded = batch.meta
    padded.query_start_loc = torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32)
    padded.seq_lens = torch.tensor([20, 9, 0, 0], dtype=torch.int32)
    padded.block_table = torch.cat((padded.block_table, torch.zeros_like(padded.block_table)))
    padded.num_reqs = 4
    assert relative_error(run(every_ops, batch), truth) < TOLERANCE


def test_large_scores_do_not_overflow(every_ops: Ops) -> None:
    batch = make_batch([4], [300], Heads(2, 1, 16), dtype=torch.float32)
    batch.query *= 300
    assert relative_error(run(every_ops, batch), dense_attention(batch)) < 1e-4


def test_nan_in_a_query_stays_in_its_own_row(every_ops: Ops) -> None:
    batch = make_batch([3], [20], Heads(2, 1, 16), dtype=torch.float32)
    truth = dense_attention(batch)
    batch.query[1, 0, 3] = torch.nan
    out = run(every_ops, batch)
    assert bool(out[1, 0].isnan().all())
    out[1, 0] = truth[1, 0].float()
    assert relative_error(out, truth) < TOLERANCE


@pytest.mark.parametrize("block_id", [-1, 10_000])
def test_block_outside_the_cache_is_refused(every_ops: Ops, block_id: int) -> None:
    batch = make_batch(*MIXED, Heads(4, 2, 16), dtype=torch.float32)
    batch.meta.block_table[2, 3] = block_id
    with pytest.raises(ValueError, match=rf"block_table\[2, 3\]={block_id} is outside the cache of \d+ blocks"):
        run(every_ops, batch)


def test_blocks_before_the_window_are_not_read(every_ops: Ops) -> None:
    batch = make_batch([1], [100], Heads(4, 2, 16), dtype=torch.float32)
    truth = dense_attention(batch, window=20)
    batch.meta.block_table[0, :5] = -1
    assert relative_error(run(every_ops, batch, window=20), truth) < TOLERANCE


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("seq_lens", 1, 0, r"seq_lens\[1\]=0 is below its query length"),
        ("seq_lens", 2, 39, r"seq_lens\[2\]=39 is below its query length"),
        ("seq_lens", 0, 1000, r"seq_lens\[0\]=1000 .* above the block table's 128"),
        ("query_start_loc", 4, 1000, r"query_start_loc\[4\]=1000 .* above num_tokens=64"),
        ("query_start_loc", 2, 3, r"query_start_loc\[2\]=3 is below its predecessor"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(every_ops: Ops, field: str, index: int, value: int, message: str) -> None:
    batch = make_batch(*MIXED, Heads(4, 2, 16), dtype=torch.float32)
    {"seq_lens": batch.meta.seq_lens, "query_start_loc": batch.meta.query_start_loc}[field][index] = value
    with pytest.raises(ValueError, match=message):
        run(every_ops, batch)


def test_shapes_that_do_not_fit_are_refused(every_ops: Ops) -> None:
    batch = make_batch([2], [5], Heads(4, 2, 16), dtype=torch.float32)
    out = torch.empty_like(batch.query)
    arguments = (batch.cache, batch.meta)
    with pytest.raises(ValueError, match="num_heads=3 is not a multiple of num_kv_heads=2"):
        every_ops.paged_attention(batch.query[:, :3], *arguments, out[:, :3], scale=1.0)
    with pytest.raises(ValueError, match=r"must be \[num_tokens, num_heads, 16\]"):
        every_ops.paged_attention(batch.query[..., :8], *arguments, out[..., :8], scale=1.0)
    with pytest.raises(ValueError, match="query has 1 rows for num_tokens=2"):
        every_ops.paged_attention(batch.query[:1], *arguments, out[:1], scale=1.0)
    with pytest.raises(ValueError, match="window=-1 is negative"):
        every_ops.paged_attention(batch.query, *arguments, out, scale=1.0, window=-1)
    batch.meta.seq_lens = batch.meta.seq_lens.long()
    with pytest.raises(ValueError, match=r"seq_lens torch.int64 \[1\] must be int32"):
        every_ops.paged_attention(batch.query, *arguments, out, scale=1.0)


def test_empty_batch_writes_nothing(every_ops: Ops) -> None:
    batch = make_batch([2], [5], Heads(4, 2, 16), dtype=torch.float32)
    batch.meta.num_reqs = 0
    assert bool(run(every_ops, batch).isnan().all())
