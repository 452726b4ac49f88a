"""Rotary embedding against complex multiplication in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve.kernels.ops import Ops
from tests.kernels.paged import relative_error

MAX_POSITION = 200
TOLERANCE = {torch.float32: 2e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def make_table(rotary_size: int) -> Tensor:
    frequency = 10000.0 ** (-torch.arange(0, rotary_size, 2, dtype=torch.float64) / rotary_size)
    angle = torch.arange(MAX_POSITION, dtype=torch.float64).unsqueeze(1) * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=1).float()


def turn(heads: Tensor, positions: Tensor, table: Tensor) -> Tensor:
    half = table.shape[1] // 2
    wide = heads.double()
    numbers = torch.complex(wide[..., :half], wide[..., half : 2 * half])
    angles = table.double()[positions].unsqueeze(1)
    turned = numbers * torch.complex(angles[..., :half], angles[..., half:])
    return torch.cat((turned.real, turned.imag, wide[..., 2 * half :]), dim=-1)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("head_size", "rotary_size"), [(64, 64), (12, 12), (24, 24), (96, 96), (128, 32), (80, 20)])
@pytest.mark.parametrize("num_tokens", [1, 123])
def test_rope_equals_complex_multiplication(
    every_ops: Ops, dtype: torch.dtype, head_size: int, rotary_size: int, num_tokens: int
) -> None:
    torch.manual_seed(head_size)
    fused = torch.randn(num_tokens, 8, head_size).to(dtype)
    before = fused.clone()
    query, key, table = fused[:, :4], fused[:, 4:6], make_table(rotary_size)
    positions = torch.randint(0, MAX_POSITION, (num_tokens,))
    truth = torch.cat((turn(query, positions, table), turn(key, positions, table)), dim=1)
    every_ops.rope_(positions, query, key, table)
    assert relative_error(fused[:, :6], truth) < TOLERANCE[dtype]
    assert torch.equal(fused[:, 6:], before[:, 6:])
    assert torch.equal(fused[..., rotary_size:], before[..., rotary_size:])


def test_position_zero_changes_nothing(every_ops: Ops) -> None:
    query, key = torch.randn(3, 4, 24), torch.randn(3, 2, 24)
    expected = query.clone(), key.clone()
    every_ops.rope_(torch.zeros(3, dtype=torch.int64), query, key, make_table(24))
    assert torch.equal(query, expected[0])
    assert torch.equal(key, expected[1])


@pytest.mark.parametrize("position", [-1, MAX_POSITION])
def test_position_outside_the_table_is_refused_before_any_write(every_ops: Ops, position: int) -> None:
    query, key = torch.ones(3, 4, 24), torch.ones(3, 2, 24)
    with pytest.raises(ValueError, match=rf"positions\[1\]={position} is outside the rotary table of 200 positions"):
        every_ops.rope_(torch.tensor([5, position, 6]), query, key, make_table(24))
    assert torch.equal(query, torch.ones(3, 4, 24))


def test_shapes_that_do_not_fit_are_refused(every_ops: Ops) -> None:
    query, key, positions = torch.ones(3, 4, 24), torch.ones(3, 2, 24), torch.arange(3)
    with pytest.raises(ValueError, match="does not fit head_size=24"):
        every_ops.rope_(positions, query, key, make_table(32))
    with pytest.raises(ValueError, match=r"\[num_tokens, heads, head_size\]"):
        every_ops.rope_(positions, query.flatten(1), key.flatten(1), make_table(24))
    with pytest.raises(ValueError, match="one int64 for each of 3 tokens"):
        every_ops.rope_(positions.int(), query, key, make_table(24))
