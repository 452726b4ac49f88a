"""Gated activation against its float64 formula."""

from __future__ import annotations

import pytest
import torch

from serve.kernels.ops import Ops
from tests.kernels.paged import relative_error

TOLERANCE = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def formula(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1, 12, 16, 17, 123, 1536])
@pytest.mark.parametrize("num_tokens", [1, 7, 123])
def test_gate_equals_formula(every_ops: Ops, dtype: torch.dtype, size: int, num_tokens: int) -> None:
    torch.manual_seed(size)
    gate_up = (4 * torch.randn(num_tokens, 2 * size)).to(dtype)
    actual = every_ops.silu_and_mul(gate_up)
    assert actual.shape == (num_tokens, size)
    assert actual.dtype == dtype
    assert relative_error(actual, formula(gate_up)) < TOLERANCE[dtype]


def test_every_element_is_close_over_the_whole_range(every_ops: Ops) -> None:
    gate = torch.linspace(-80, 80, 4001)
    actual = every_ops.silu_and_mul(torch.cat((gate, torch.ones(4001))).unsqueeze(0))[0]
    torch.testing.assert_close(actual.double(), gate.double() / (1 + torch.exp(-gate.double())), rtol=1e-6, atol=1e-37)
    assert bool(actual.isfinite().all())


def test_extreme_gates_saturate(every_ops: Ops) -> None:
    gate = torch.tensor([[-1e30, 1e30, -200.0, 200.0, torch.nan, 1.0, 1.0, 1.0, 1.0, 1.0]])
    actual = every_ops.silu_and_mul(gate)[0]
    assert abs(float(actual[0])) < 1e-7
    assert float(actual[1]) == float(gate[0, 1])
    assert abs(float(actual[2])) < 1e-35
    assert float(actual[3]) == 200.0
    assert bool(actual[4].isnan())


def test_strided_rows(every_ops: Ops) -> None:
    wide = torch.randn(5, 100)
    view = wide[:, 10:74]
    assert relative_error(every_ops.silu_and_mul(view), formula(view)) < TOLERANCE[torch.float32]


def test_odd_last_dimension_is_refused(every_ops: Ops) -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        every_ops.silu_and_mul(torch.ones(2, 7))
