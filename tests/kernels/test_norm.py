"""RMS norm against its float64 formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from serve.kernels.ops import Ops
from tests.kernels.paged import relative_error

TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}
SIZES = [1, 12, 16, 17, 64, 123, 576, 2048]


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_tokens", [1, 7, 123])
def test_norm_equals_formula(every_ops: Ops, dtype: torch.dtype, size: int, num_tokens: int) -> None:
    torch.manual_seed(size)
    x, weight = (3 * torch.randn(num_tokens, size)).to(dtype), torch.randn(size).to(dtype)
    actual = every_ops.rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    assert relative_error(actual, formula(x, weight, 1e-5)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_add_norm_updates_the_residual_and_norms_the_sum(every_ops: Ops, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(size)
    x, residual, weight = torch.randn(5, size).to(dtype), torch.randn(5, size).to(dtype), torch.randn(size).to(dtype)
    total = residual + x
    actual = every_ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert relative_error(actual, formula(total, weight, 1e-6)) < TOLERANCE[dtype]


@pytest.mark.parametrize("head_size", [24, 64])
def test_heads_of_a_fused_projection_are_normed_in_place(every_ops: Ops, head_size: int) -> None:
    torch.manual_seed(head_size)
    fused = torch.randn(9, 5 * head_size)
    before = fused.clone()
    heads, weight = fused[:, head_size : 3 * head_size].view(9, 2, head_size), torch.randn(head_size)
    truth = formula(heads, weight, 1e-6)
    every_ops.rms_norm(heads, weight, 1e-6, out=heads)
    assert relative_error(heads, truth) < TOLERANCE[torch.float32]
    assert torch.equal(fused[:, :head_size], before[:, :head_size])
    assert torch.equal(fused[:, 3 * head_size :], before[:, 3 * head_size :])


def test_zero_row_stays_zero(every_ops: Ops) -> None:
    assert not bool(every_ops.rms_norm(torch.zeros(2, 20), torch.ones(20), 1e-5).any())


def test_no_rows_give_no_rows(every_ops: Ops) -> None:
    assert every_ops.rms_norm(torch.zeros(0, 20), torch.ones(20), 1e-5).shape == (0, 20)


def test_shapes_that_do_not_fit_are_refused(every_ops: Ops) -> None:
    x = torch.ones(2, 20)
    with pytest.raises(ValueError, match=r"norm weight torch.float32 \[19\] does not fit x torch.float32 \[2, 20\]"):
        every_ops.rms_norm(x, torch.ones(19), 1e-5)
    with pytest.raises(ValueError, match="norm output"):
        every_ops.rms_norm(x, torch.ones(20), 1e-5, out=torch.ones(2, 21))
    with pytest.raises(ValueError, match="residual"):
        every_ops.add_rms_norm(x, torch.ones(3, 20), torch.ones(20), 1e-5)
    with pytest.raises(ValueError, match="norm weight"):
        every_ops.add_rms_norm(x, torch.ones(2, 20), torch.ones(20, dtype=torch.float64), 1e-5)
