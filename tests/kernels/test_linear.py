"""Linear layers on packed weights against float64, and the promise that a row does not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch

from serve.kernels import ops, reference
from serve.kernels.cpu import binding
from serve.kernels.ops import Ops
from tests.kernels.paged import relative_error

TOLERANCE = 1e-6
# Outputs below, at and above whole vectors; inputs below, at and above whole chunks of 512.
SIZES = [(1, 1), (5, 48), (16, 12), (17, 511), (64, 512), (331, 513), (100, 1537), (576, 576)]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6, 7, 13, 40, 123])
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_product_equals_float64(every_ops: Ops, num_out: int, num_in: int, num_tokens: int) -> None:
    torch.manual_seed(num_out + num_in)
    weight, x, bias = torch.randn(num_out, num_in), torch.randn(num_tokens, num_in), torch.randn(num_out)
    packed = every_ops.pack_linear(weight)
    expected = x.double() @ weight.double().T
    assert relative_error(every_ops.linear(x, packed), expected) < TOLERANCE
    assert relative_error(every_ops.linear(x, packed, bias), expected + bias) < TOLERANCE


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
def test_packing_keeps_every_weight(every_ops: Ops, num_out: int, num_in: int) -> None:
    weight = torch.randn(num_out, num_in)
    packed = every_ops.pack_linear(weight)
    assert torch.equal(packed.plain(), weight)
    indices = torch.tensor([num_out - 1, 0, num_out // 2, 0], dtype=torch.int32)
    assert torch.equal(packed.rows(indices), weight[indices.long()])
    assert torch.equal(packed.data, reference.pack_linear(weight).data)


def test_weight_may_be_a_view(every_ops: Ops) -> None:
    weight = torch.randn(48, 40)
    assert torch.equal(every_ops.pack_linear(weight.T).plain(), weight.T)


def test_rows_may_be_strided(every_ops: Ops) -> None:
    wide, weight = torch.randn(9, 100), torch.randn(33, 64)
    packed = every_ops.pack_linear(weight)
    expected = every_ops.linear(wide[:, 20:84].contiguous(), packed)
    assert torch.equal(every_ops.linear(wide[:, 20:84], packed), expected)
    transposed = torch.randn(64, 9).T
    assert relative_error(every_ops.linear(transposed, packed), transposed.double() @ weight.double().T) < TOLERANCE


def test_no_rows_give_no_rows(every_ops: Ops) -> None:
    assert every_ops.linear(torch.empty(0, 12), every_ops.pack_linear(torch.randn(5, 12))).shape == (0, 5)


@pytest.mark.parametrize(("num_out", "num_in"), [(331, 1537), (3072, 576)])
def test_row_is_the_same_to_the_bit_alone_in_a_batch_and_on_more_threads(
    library_ops: Ops, threads_restored: None, num_out: int, num_in: int
) -> None:
    packed = library_ops.pack_linear(torch.randn(num_out, num_in))
    x, bias = torch.randn(40, num_in), torch.randn(num_out)
    together = library_ops.linear(x, packed, bias)
    for begin, end in ((0, 1), (1, 3), (3, 7), (7, 12), (12, 40), (39, 40)):
        assert torch.equal(library_ops.linear(x[begin:end], packed, bias), together[begin:end])
    binding.set_num_threads(2)
    assert torch.equal(library_ops.linear(x, packed, bias), together)
    assert torch.equal(library_ops.linear(x[5:6], packed, bias), together[5:6])


def test_not_a_number_stays_in_its_row(every_ops: Ops) -> None:
    x = torch.randn(7, 20)
    x[3, 5] = torch.nan
    out = every_ops.linear(x, every_ops.pack_linear(torch.randn(18, 20)))
    assert out.isnan().all(dim=1).tolist() == [False, False, False, True, False, False, False]
    assert not out[[0, 1, 2, 4, 5, 6]].isnan().any()


def test_shapes_that_do_not_fit_are_refused(every_ops: Ops) -> None:
    packed = every_ops.pack_linear(torch.randn(18, 20))
    with pytest.raises(ValueError, match=r"does not fit a torch\.float32 weight of 20 inputs"):
        every_ops.linear(torch.randn(2, 19), packed)
    with pytest.raises(ValueError, match=r"does not fit a torch\.float32 weight"):
        every_ops.linear(torch.randn(2, 20, dtype=torch.float64), packed)
    with pytest.raises(ValueError, match="does not fit 18 outputs"):
        every_ops.linear(torch.randn(2, 20), packed, torch.randn(17))
    with pytest.raises(ValueError, match="cannot be packed"):
        every_ops.pack_linear(torch.randn(4, 4, dtype=torch.bfloat16))


def test_packing_is_chosen_for_float32_where_the_library_is(library_ops: Ops) -> None:
    assert library_ops.packs(torch.float32)
    assert not library_ops.packs(torch.bfloat16)
    assert not reference.packs(torch.float32)
    assert ops.packs("cpu", torch.float32) == ops.implementation("cpu").packs(torch.float32)
