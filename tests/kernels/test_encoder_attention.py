"""Attention in both directions, within each request: against dense float64, alone and beside others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve.kernels.attention import AttentionMetadata
from serve.kernels.ops import Ops

LENGTHS = (1, 15, 16, 17, 123)
HEADS, HEAD_SIZE = 6, 12
NOTHING = torch.zeros(0, dtype=torch.int32)


def batch(lengths: tuple[int, ...]) -> AttentionMetadata:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    sizes = torch.tensor(lengths, dtype=torch.int32)
    return AttentionMetadata(
        starts, sizes, NOTHING.view(0, 0), NOTHING.long(), len(lengths), sum(lengths), max(lengths), max(lengths)
    )


def random_heads(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    fused = torch.randn(num_tokens, 3, HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(num_tokens))
    fused = fused.to(dtype)
    return fused[:, 0], fused[:, 1], fused[:, 2]


def dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend all tokens to all tokens in float64."""
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value.double())


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_each_request_equals_dense_attention(every_ops: Ops, dtype: torch.dtype, atol: float) -> None:
    query, key, value = random_heads(sum(LENGTHS), dtype)
    out = torch.full_like(query, float("nan"))
    every_ops.encoder_attention(query, key, value, batch(LENGTHS), out, scale=0.3)
    begin = 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        expected = dense(query[rows], key[rows], value[rows], 0.3)
        torch.testing.assert_close(out[rows].double(), expected, atol=atol, rtol=atol)
        begin += length


def test_result_does_not_depend_on_the_neighbours(every_ops: Ops) -> None:
    query, key, value = random_heads(sum(LENGTHS), torch.float32)
    together, alone = torch.empty_like(query), torch.empty_like(query)
    every_ops.encoder_attention(query, key, value, batch(LENGTHS), together, scale=0.3)
    begin = 0
    for length in LENGTHS:
        rows = slice(begin, begin + length)
        every_ops.encoder_attention(query[rows], key[rows], value[rows], batch((length,)), alone[rows], scale=0.3)
        begin += length
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


def test_shapes_that_do_not_fit_are_refused(every_ops: Ops) -> None:
    query, key, value = random_heads(4, torch.float32)
    with pytest.raises(ValueError, match="must all be"):
        every_ops.encoder_attention(query, key[:3], value, batch((4,)), torch.empty_like(query), scale=1.0)
    with pytest.raises(ValueError, match="4 rows for num_tokens=5"):
        every_ops.encoder_attention(query, key, value, batch((5,)), torch.empty_like(query), scale=1.0)
    meta = batch((3, 1))
    meta.query_start_loc = torch.tensor([0, 5, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"query_start_loc\[1\]=5"):
        every_ops.encoder_attention(query, key, value, meta, torch.empty_like(query), scale=1.0)
