"""Linear layers on packed weights against float64, and the promise that a row does not depend on its neighbours."""

from __future__ import annotations

import pytest
import torch

from serve.kernels import ops, reference
from serve.kernels.cpu import binding
from serve.kernels.ops import Ops
from serve.kernels.packed_weight import PACKED_TYPES
from tests.kernels.paged import relative_error

TOLERANCE = 1e-6
TYPES = list(PACKED_TYPES)
# Outputs below, at and above whole vectors; inputs odd, below, at and above whole chunks of 1024.
SIZES = [(1, 1), (5, 48), (16, 12), (17, 511), (64, 512), (331, 513), (100, 1537), (576, 576), (35, 2049)]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6, 7, 13, 40, 123])
@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("dtype", TYPES)
def test_product_equals_float64(every_ops: Ops, dtype: torch.dtype, num_out: int, num_in: int, num_tokens: int) -> None:
    torch.manual_seed(num_out + num_in)
    weight, x, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_tokens, num_in), torch.randn(num_out)
    packed = every_ops.pack_linear(weight)
    expected = x.double() @ weight.double().T
    assert relative_error(every_ops.linear(x, packed), expected) < TOLERANCE
    assert relative_error(every_ops.linear(x, packed, bias), expected + bias) < TOLERANCE


@pytest.mark.parametrize(("num_out", "num_in"), SIZES)
@pytest.mark.parametrize("dtype", TYPES)
def test_packing_keeps_every_weight(every_ops: Ops, dtype: torch.dtype, num_out: int, num_in: int) -> None:
    weight = torch.randn(num_out, num_in).to(dtype)
    packed = every_ops.pack_linear(weight)
    assert torch.equal(packed.plain(), weight)
    indices = torch.tensor([num_out - 1, 0, num_out // 2, 0], dtype=torch.int32)
    rows = every_ops.packed_rows(packed, indices)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, weight[indices.long()].float())
    assert torch.equal(packed.data, reference.pack_linear(weight).data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_take_two_bytes_each(every_ops: Ops, dtype: torch.dtype) -> None:
    assert every_ops.pack_linear(torch.zeros(96, 64, dtype=dtype)).data.nbytes == 96 * 64 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 6, 11, 40])
def test_half_precision_weights_give_the_bits_of_their_float32_copy(
    library_ops: Ops, dtype: torch.dtype, num_tokens: int
) -> None:
    weight, x = torch.randn(83, 1537).to(dtype), torch.randn(num_tokens, 1537)
    expected = library_ops.linear(x, library_ops.pack_linear(weight.float()))
    assert torch.equal(library_ops.linear(x, library_ops.pack_linear(weight)), expected)


def test_extreme_half_precision_weights_are_widened_exactly(every_ops: Ops) -> None:
    for dtype, values in (
        (torch.float16, [65504.0, 2.0**-24, -(2.0**-14), -0.0, 1.0 + 2.0**-10]),
        (torch.bfloat16, [3.3e38, 2.0**-133, -(2.0**-126), -0.0, 1.0 + 2.0**-7]),
    ):
        weight = torch.tensor(values).to(dtype).view(5, 1)
        packed = every_ops.pack_linear(weight)
        assert torch.equal(every_ops.linear(torch.ones(1, 1), packed)[0], weight[:, 0].float())
        assert torch.equal(every_ops.packed_rows(packed, torch.arange(5)), weight.float())


@pytest.mark.parametrize("dtype", TYPES)
def test_parts_are_packed_side_by_side(every_ops: Ops, dtype: torch.dtype) -> None:
    parts = [torch.randn(rows, 37).to(dtype) for rows in (16, 5, 1, 40, 3)]
    packed = every_ops.pack_linear(*parts)
    assert torch.equal(packed.plain(), torch.cat(parts))
    assert torch.equal(packed.data, every_ops.pack_linear(torch.cat(parts)).data)


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


def test_bias_may_be_strided(every_ops: Ops) -> None:
    wide = torch.randn(18, 4)
    packed, x = every_ops.pack_linear(torch.randn(18, 20)), torch.randn(3, 20)
    assert torch.equal(every_ops.linear(x, packed, wide[:, 1]), every_ops.linear(x, packed, wide[:, 1].clone()))


def test_no_rows_and_no_inputs_are_products_too(every_ops: Ops) -> None:
    assert every_ops.linear(torch.empty(0, 12), every_ops.pack_linear(torch.randn(5, 12))).shape == (0, 5)
    bias = torch.randn(21)
    for dtype in TYPES:
        packed = every_ops.pack_linear(torch.empty(21, 0, dtype=dtype))
        assert torch.equal(every_ops.linear(torch.empty(9, 0), packed, bias), bias.expand(9, 21))


@pytest.mark.parametrize(("num_out", "num_in"), [(331, 1537), (3072, 576)])
@pytest.mark.parametrize("dtype", TYPES)
def test_row_is_the_same_to_the_bit_alone_in_a_batch_and_on_more_threads(
    library_ops: Ops, threads_restored: None, dtype: torch.dtype, num_out: int, num_in: int
) -> None:
    packed = library_ops.pack_linear(torch.randn(num_out, num_in).to(dtype))
    x, bias = torch.randn(363, num_in), torch.randn(num_out)
    together = library_ops.linear(x, packed, bias)
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (15, 21), (21, 28), (28, 60), (60, 363), (362, 363)):
        assert torch.equal(library_ops.linear(x[begin:end], packed, bias), together[begin:end])
    binding.set_num_threads(2)
    assert torch.equal(library_ops.linear(x, packed, bias), together)
    assert torch.equal(library_ops.linear(x[5:6], packed, bias), together[5:6])


@pytest.mark.parametrize("dtype", TYPES)
def test_not_a_number_stays_in_its_row(every_ops: Ops, dtype: torch.dtype) -> None:
    x = torch.randn(7, 20)
    x[3, 5] = torch.nan
    out = every_ops.linear(x, every_ops.pack_linear(torch.randn(18, 20).to(dtype)))
    assert out.isnan().all(dim=1).tolist() == [False, False, False, True, False, False, False]
    assert not out[[0, 1, 2, 4, 5, 6]].isnan().any()


def test_shapes_that_do_not_fit_are_refused(every_ops: Ops) -> None:
    packed = every_ops.pack_linear(torch.randn(18, 20).bfloat16())
    with pytest.raises(ValueError, match=r"does not fit a packed weight of 20 inputs; use float32"):
        every_ops.linear(torch.randn(2, 19), packed)
    with pytest.raises(ValueError, match=r"does not fit a packed weight of 20 inputs; use float32"):
        every_ops.linear(torch.randn(2, 20, dtype=torch.bfloat16), packed)
    with pytest.raises(ValueError, match="does not fit 18 outputs"):
        every_ops.linear(torch.randn(2, 20), packed, torch.randn(17))
    with pytest.raises(ValueError, match="cannot be packed; it must be"):
        every_ops.pack_linear(torch.randn(4, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="all need one type and width"):
        every_ops.pack_linear(torch.randn(4, 4), torch.randn(4, 4).half())


@pytest.mark.parametrize("index", [-1, 18])
def test_row_outside_the_weight_is_named(every_ops: Ops, index: int) -> None:
    packed = every_ops.pack_linear(torch.randn(18, 20))
    with pytest.raises(IndexError, match=f"index 1 is row {index} of a weight of 18 rows"):
        every_ops.packed_rows(packed, torch.tensor([17, index]))


def test_library_refuses_types_and_sizes_that_there_are_not(library_ops: Ops) -> None:
    library = binding.library()
    assert library.serve_linear(7, None, 0, None, None, None, 0, 1, 1, 1) == binding.BAD_TYPE
    assert library.serve_linear(0, None, 0, None, None, None, 0, -1, 1, 1) == binding.BAD_SHAPE
    assert library.serve_pack_linear(7, None, None, 0, 1, 1) == binding.BAD_TYPE
    assert library.serve_pack_linear(0, None, None, 0, 1, -1) == binding.BAD_SHAPE
    assert library.serve_packed_rows(7, None, None, 0, None, 1, 1, None) == binding.BAD_TYPE
    assert [library.serve_packed_bytes(kind, 3, 17) for kind in (0, 1, 2, 3)] == [384, 256, 192, -1]


def test_packing_is_chosen_where_the_library_is(library_ops: Ops) -> None:
    assert [library_ops.packs(dtype) for dtype in (*TYPES, torch.float64)] == [True, True, True, False]
    assert not reference.packs(torch.float32)
    assert ops.packs("cpu", torch.float32) == ops.implementation("cpu").packs(torch.float32)
