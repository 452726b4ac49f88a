"""Linear layers on whole numbers with scales and zero points: nothing lost, close to float64, a row independent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from serve.kernels import ops, reference
from serve.kernels.block_formats import AFFINE_FORMATS
from serve.kernels.cpu import binding
from serve.kernels.ops import Ops
from serve.kernels.quantized_weight import AffineBlocks, QuantizedBlocks, joinable, side_by_side
from tests.kernels.paged import relative_error

TYPES = [(bits, group) for bits in (4, 8) for group in (32, 64, 128)]
HALF_STEP = 0.5 / 32767


def random_matrix(
    bits: int, group: int, num_out: int, num_in: int, *, scale_type: torch.dtype = torch.float16, mixed: bool = False
) -> AffineBlocks:
    generator = torch.Generator().manual_seed(bits + group + num_out + num_in)
    limit = 1 << bits
    shape = (num_out, num_in // group)
    return AffineBlocks(
        codes=torch.randint(0, limit, (num_out, num_in), dtype=torch.uint8, generator=generator),
        scales=(torch.randn(shape, generator=generator) * 0.1).to(scale_type).float(),
        # A zero point may be one above the largest code of four bits.
        zeros=torch.randint(0, limit + 1 if bits == 4 else limit, shape, generator=generator).to(torch.uint8),
        bits=bits,
        group=group,
        input_order=torch.randperm(num_in, generator=generator) if mixed else None,
    )


def values_of(blocks: AffineBlocks) -> torch.Tensor:
    """Give the matrix [num_out, num_in] in float64, its columns where their inputs are."""
    groups = torch.arange(blocks.codes.shape[1]) // blocks.group
    values = (blocks.codes.double() - blocks.zeros.double()[:, groups]) * blocks.scales.double()[:, groups]
    if blocks.input_order is None:
        return values
    return values[:, blocks.input_order.argsort()]


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("num_out", "num_in"), [(1, 128), (16, 256), (37, 384), (331, 128)])
@pytest.mark.parametrize(("bits", "group"), TYPES)
def test_packing_keeps_every_value_bit_by_bit(
    every_ops: Ops, bits: int, group: int, num_out: int, num_in: int, mixed: bool
) -> None:
    blocks = random_matrix(bits, group, num_out, num_in, mixed=mixed)
    weight, values = every_ops.pack_quantized(blocks), values_of(blocks).float()
    assert torch.equal(weight.plain(), values)
    indices = torch.tensor([num_out - 1, 0, num_out // 2, 0], dtype=torch.int32)
    assert torch.equal(every_ops.quantized_rows(weight, indices), values[indices.long()])
    assert torch.equal(weight.data, reference.pack_quantized(blocks).data)


@pytest.mark.parametrize("scale_type", [torch.bfloat16, torch.float32])
def test_scales_of_other_types_lose_nothing(every_ops: Ops, scale_type: torch.dtype) -> None:
    blocks = random_matrix(4, 64, 37, 192, scale_type=scale_type)
    assert torch.equal(every_ops.pack_quantized(blocks).plain(), values_of(blocks).float())


@pytest.mark.parametrize(("bits", "group"), TYPES)
def test_scales_are_stored_once_for_a_group(every_ops: Ops, bits: int, group: int) -> None:
    weight = every_ops.pack_quantized(random_matrix(bits, group, 160, 512))
    # A scale of four bytes and a zero point of one.
    assert weight.data.numel() == 160 * 512 * bits // 8 + 160 * 512 // group * 5


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 9, 40])
@pytest.mark.parametrize(("bits", "group"), TYPES)
def test_product_differs_from_float64_by_the_rounding_of_x_alone(
    every_ops: Ops, bits: int, group: int, num_tokens: int, mixed: bool
) -> None:
    blocks = random_matrix(bits, group, 53, 1280, mixed=mixed)
    values, weight = values_of(blocks), every_ops.pack_quantized(blocks)
    torch.manual_seed(num_tokens)
    x, bias = torch.randn(num_tokens, 1280) * torch.rand(1280).exp2(), torch.randn(53)
    exact = x.double() @ values.T
    # The inputs that share a scale are neighbours in the order of the columns.
    ordered = x if blocks.input_order is None else x[:, blocks.input_order]
    step = HALF_STEP * ordered.abs().view(num_tokens, -1, 32).amax(dim=-1).repeat_interleave(32, dim=1).double()
    step = step if blocks.input_order is None else step[:, blocks.input_order.argsort()]
    # Beside that, what float32 sums of so many terms may lose: codes and zero points are summed apart.
    largest = blocks.scales.abs().double().repeat_interleave(group, dim=1) * (1 << bits)
    largest = largest if blocks.input_order is None else largest[:, blocks.input_order.argsort()]
    allowed = step @ values.abs().T + 2e-6 * (x.abs().double() @ largest.T)
    assert ((every_ops.linear_quantized(x, [weight]) - exact).abs() <= allowed).all()
    with_bias = every_ops.linear_quantized(x, [weight], bias)
    assert ((with_bias - exact - bias).abs() <= allowed + 1e-6 * bias.abs()).all()
    assert relative_error(with_bias, exact + bias) < 3e-5


def test_whole_numbers_are_multiplied_exactly(library_ops: Ops) -> None:
    blocks = replace(random_matrix(8, 32, 19, 64), scales=torch.ones(19, 2))
    x = torch.randint(-300, 300, (7, 64), dtype=torch.int32).float()
    x[:, ::32] = 32767.0
    weight = library_ops.pack_quantized(replace(blocks, zeros=torch.full((19, 2), 128, dtype=torch.uint8)))
    expected = x.double() @ (blocks.codes.double() - 128).T
    assert torch.equal(library_ops.linear_quantized(x, [weight]).double(), expected)


@pytest.mark.parametrize(("bits", "group"), TYPES)
def test_row_is_the_same_to_the_bit_alone_in_a_batch_and_on_more_threads(
    library_ops: Ops, threads_restored: None, bits: int, group: int
) -> None:
    weight = library_ops.pack_quantized(random_matrix(bits, group, 331, 768, mixed=True))
    x, bias = torch.randn(150, 768), torch.randn(331)
    together = library_ops.linear_quantized(x, [weight], bias)
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 17), (17, 149), (149, 150)):
        assert torch.equal(library_ops.linear_quantized(x[begin:end], [weight], bias), together[begin:end])
    binding.set_num_threads(2)
    assert torch.equal(library_ops.linear_quantized(x, [weight], bias), together)
    assert torch.equal(library_ops.linear_quantized(x[5:6], [weight], bias), together[5:6])


def test_parts_of_other_types_and_orders_lie_side_by_side(every_ops: Ops) -> None:
    blocks = [
        random_matrix(4, 128, 24, 512),
        random_matrix(4, 64, 5, 512, mixed=True),
        random_matrix(8, 64, 16, 512, mixed=True),
        QuantizedBlocks(torch.zeros(3, 272 * 2, dtype=torch.uint8), "Q8_0", 512),
    ]
    parts = [every_ops.pack_quantized(part) for part in blocks]
    x, bias = torch.randn(6, 512), torch.randn(48)
    alone = [every_ops.linear_quantized(x, [part]) for part in parts]
    assert torch.equal(every_ops.linear_quantized(x, parts), torch.cat(alone, dim=1))
    assert torch.equal(every_ops.linear_quantized(x, parts, bias), torch.cat(alone, dim=1) + bias)


def test_outputs_of_one_type_and_order_become_one_weight() -> None:
    plain, other = random_matrix(4, 64, 24, 128), random_matrix(4, 64, 5, 128)
    mixed = random_matrix(4, 64, 24, 128, mixed=True)
    same = replace(other, input_order=mixed.input_order)
    assert joinable(plain, other)
    assert joinable(mixed, same)
    assert not joinable(plain, mixed)
    assert not joinable(mixed, replace(other, input_order=torch.arange(128)))
    assert not joinable(plain, random_matrix(8, 64, 5, 128))
    joined = side_by_side([mixed, same])
    assert isinstance(joined, AffineBlocks)
    assert torch.equal(values_of(joined), torch.cat((values_of(mixed), values_of(same))))


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_input_that_is_not_finite_stays_in_its_row(library_ops: Ops, broken: float) -> None:
    weight = library_ops.pack_quantized(random_matrix(4, 32, 18, 64))
    x = torch.randn(7, 64)
    x[3, 37] = broken
    out = library_ops.linear_quantized(x, [weight])
    assert out.isnan().all(dim=1).tolist() == [False, False, False, True, False, False, False]


def test_what_does_not_fit_is_refused(every_ops: Ops) -> None:
    blocks = random_matrix(4, 32, 18, 64)
    with pytest.raises(ValueError, match="type AFFINE3_32 cannot be packed"):
        every_ops.pack_quantized(replace(blocks, bits=3))
    with pytest.raises(ValueError, match=r"must be uint8 \[num_out, a multiple of 32\]"):
        every_ops.pack_quantized(replace(blocks, codes=blocks.codes[:, :48]))
    with pytest.raises(ValueError, match=r"must be uint8 \[num_out, a multiple of 32\]"):
        every_ops.pack_quantized(replace(blocks, codes=blocks.codes.to(torch.int8)))
    with pytest.raises(ValueError, match=r"scales torch.float32 \[18, 1\] must be torch.float32 \[18, 2\]"):
        every_ops.pack_quantized(replace(blocks, scales=blocks.scales[:, :1]))
    with pytest.raises(ValueError, match=r"zeros torch.int32 \[18, 2\] must be torch.uint8 \[18, 2\]"):
        every_ops.pack_quantized(replace(blocks, zeros=blocks.zeros.int()))
    with pytest.raises(ValueError, match="must be int64 and name each of 64 inputs once"):
        every_ops.pack_quantized(replace(blocks, input_order=torch.zeros(64, dtype=torch.int64)))
    weight = every_ops.pack_quantized(blocks)
    with pytest.raises(ValueError, match="does not fit quantised weights of 64 inputs"):
        every_ops.linear_quantized(torch.randn(2, 63), [weight])
    with pytest.raises(IndexError, match="index 1 is row 18 of a weight of 18 rows"):
        every_ops.quantized_rows(weight, torch.tensor([0, 18]))


def test_whole_numbers_are_kept_for_float32_where_the_library_is(library_ops: Ops) -> None:
    assert all(library_ops.quantizes(name, torch.float32) for name in AFFINE_FORMATS)
    assert not reference.quantizes("AFFINE4_128", torch.float32)
    assert ops.quantizes("cpu", "AFFINE8_32", torch.float32)
