"""The CPU library's promise: a row is the same to the bit whatever surrounds it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from serve.kernels import ops as public_ops
from serve.kernels.cpu import binding
from serve.kernels.cpu import ops as cpu_ops
from serve.kernels.ops import Ops
from tests.kernels.paged import ALL_CACHE_DTYPES, Batch, Heads, make_batch, make_metadata
from tests.kernels.variants import VARIANTS

HEADS = Heads(9, 3, 64)
# Long requests, so that one alone has its chunks spread over the threads.
QUERY_LENS = [1, 33, 1, 300, 5]
SEQ_LENS = [1100, 700, 3, 300, 517]


def attend(ops: Ops, batch: Batch, window: int) -> torch.Tensor:
    out = torch.full_like(batch.query, torch.nan)
    ops.paged_attention(batch.query, batch.cache, batch.meta, out, scale=batch.heads.scale, window=window)
    return out


def only(batch: Batch, request: int, tokens: slice) -> Batch:
    """Take some of one request's new tokens as a batch of their own."""
    start, end = batch.meta.query_start_loc[request : request + 2].tolist()
    query = batch.query[start:end][tokens]
    last = range(end - start)[tokens][-1]
    seq_len = int(batch.meta.seq_lens[request]) - (end - start) + last + 1
    table = batch.meta.block_table[request : request + 1]
    meta = make_metadata([len(query)], [seq_len], table, batch.meta.slot_mapping[:0])
    return Batch(batch.heads, batch.cache, meta, query)


@pytest.mark.parametrize("dtype", ALL_CACHE_DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 290])
def test_request_alone_equals_request_in_batch(library_ops: Ops, dtype: torch.dtype, window: int) -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS, HEADS, dtype=dtype)
    together = attend(library_ops, batch, window)
    for request, part in enumerate(torch.split(together, QUERY_LENS)):
        assert torch.equal(attend(library_ops, only(batch, request, slice(None)), window), part)


@pytest.mark.parametrize("window", [0, 290])
@pytest.mark.parametrize("step", [1, 7, 64, 299])
def test_prompt_in_pieces_equals_prompt_at_once(library_ops: Ops, window: int, step: int) -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS, HEADS, dtype=torch.bfloat16)
    whole = torch.split(attend(library_ops, batch, window), QUERY_LENS)[3]
    pieces = [attend(library_ops, only(batch, 3, slice(at, at + step)), window) for at in range(0, 300, step)]
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("window", [0, 290])
def test_number_of_threads_changes_nothing(
    library_ops: Ops, window: int, num_threads: int, threads_restored: None
) -> None:
    batch = make_batch(QUERY_LENS, SEQ_LENS, HEADS, dtype=torch.bfloat16)
    single = [only(batch, request, slice(None)) for request in range(len(QUERY_LENS))]
    before = [attend(library_ops, part, window) for part in (batch, *single)]
    assert public_ops.set_num_threads(num_threads) == num_threads
    for _ in range(5):
        after = [attend(library_ops, part, window) for part in (batch, *single)]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes_of_pieces_and_threads_change_nothing(library_ops: Ops, seed: int, threads_restored: None) -> None:
    random = np.random.default_rng(seed)
    query_lens = random.integers(1, 60, 4).tolist()
    seq_lens = [query_len + int(random.integers(0, 900)) for query_len in query_lens]
    dtype = ALL_CACHE_DTYPES[seed % len(ALL_CACHE_DTYPES)]
    heads = Heads(int(random.choice([4, 12, 28])), 4, 24)
    window = int(random.choice([0, 0, 100, 290]))
    batch = make_batch(query_lens, seq_lens, heads, dtype=dtype, block_size=int(random.choice([16, 48])), seed=seed)
    expected = torch.split(attend(library_ops, batch, window), query_lens)
    for num_threads in (1, 2, 4):
        public_ops.set_num_threads(num_threads)
        for request, query_len in enumerate(query_lens):
            cuts = [0, *sorted(random.integers(0, query_len + 1, 3).tolist()), query_len]
            pieces = [slice(begin, end) for begin, end in pairwise(cuts) if begin < end]
            parts = [attend(library_ops, only(batch, request, piece), window) for piece in pieces]
            assert torch.equal(torch.cat(parts), expected[request])


def test_rows_of_elementwise_ops_do_not_depend_on_their_batch(library_ops: Ops, threads_restored: None) -> None:
    torch.manual_seed(1)
    x, weight, gate_up = torch.randn(300, 576), torch.randn(576), torch.randn(300, 2 * 576)
    positions, table = torch.arange(300), torch.randn(300, 64)
    query, key = torch.randn(300, 9, 64), torch.randn(300, 3, 64)

    def all_ops(rows: slice) -> list[torch.Tensor]:
        residual, q, k = x[rows].clone(), query[rows].clone(), key[rows].clone()
        library_ops.rope_(positions[rows], q, k, table)
        normed = library_ops.add_rms_norm(x[rows], residual, weight, 1e-5)
        return [library_ops.rms_norm(x[rows], weight, 1e-5), normed, library_ops.silu_and_mul(gate_up[rows]), q, k]

    alone = [torch.cat(parts) for parts in zip(*(all_ops(slice(i, i + 1)) for i in range(300)), strict=True)]
    public_ops.set_num_threads(2)
    together = all_ops(slice(None))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_builds_with_fused_multiply_add_agree_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = [variant for variant in VARIANTS if variant[0] != binding.PORTABLE]
    if len(fused) < 2:
        pytest.skip("this processor runs fewer than two of the builds that fuse multiply and add")
    batch = make_batch(QUERY_LENS, SEQ_LENS, HEADS, dtype=torch.float16)
    results = []
    for variant in fused:
        monkeypatch.setattr(binding, "VARIANTS", (variant,))
        binding.load_library.cache_clear()
        results.append(attend(cpu_ops, batch, 0))
    binding.load_library.cache_clear()
    assert all(torch.equal(results[0], other) for other in results[1:])
