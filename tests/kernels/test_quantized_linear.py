"""Linear layers on the blocks of GGUF files: nothing lost in packing, close to float64, a row independent of others."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from serve.kernels import ops, reference
from serve.kernels.block_formats import TILE_FORMATS
from serve.kernels.cpu import binding
from serve.kernels.ops import Ops
from serve.kernels.quantized_weight import QuantizedBlocks, QuantizedWeight
from tests.kernels.paged import relative_error

TYPES = list(TILE_FORMATS)
Kind = gguf.GGMLQuantizationType
# Where the float16 factors of a block lie; random bits there would be infinities.
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
HALVES |= {"Q6_K": (208,)}
# The integers of a row have 16 bits: half a step of 1 / 32767 of the largest input of 32.
HALF_STEP = 0.5 / 32767
# The rounding of 8 bits: half a step of 1 / 127 of the largest input of 32.
HALF_INT8_STEP = 0.5 / 127


def random_blocks(type_name: str, num_out: int, num_in: int) -> QuantizedBlocks:
    generator = np.random.default_rng(num_out + num_in)
    block_size, block_bytes = gguf.GGML_QUANT_SIZES[Kind[type_name]]
    blocks = generator.integers(0, 256, (num_out * num_in // block_size, block_bytes), dtype=np.uint8)
    for begin in HALVES.get(type_name, (0,)):
        factors = generator.normal(0, 0.1, len(blocks)).astype(np.float16)
        blocks[:, begin : begin + 2] = factors[:, None].view(np.uint8)
    return QuantizedBlocks(torch.from_numpy(blocks.reshape(num_out, -1)), type_name, num_in)


def extreme_blocks(type_name: str, num_out: int, num_in: int) -> QuantizedBlocks:
    """Make blocks whose codes and small scales are all the largest (upper half) or the smallest (lower half)."""
    blocks = random_blocks(type_name, num_out, num_in)
    _, block_bytes = gguf.GGML_QUANT_SIZES[Kind[type_name]]
    rows = blocks.rows.view(num_out, -1, block_bytes)
    rows[: num_out // 2], rows[num_out // 2 :] = 0xFF, 0x00
    if type_name == "Q8_0":
        rows[: num_out // 2], rows[num_out // 2 :] = 0x7F, 0x80
    for begin in HALVES.get(type_name, (0,)):
        rows[:, :, begin : begin + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    return blocks


def values_of(blocks: QuantizedBlocks) -> torch.Tensor:
    """Give the matrix as the gguf package reads it."""
    return torch.from_numpy(gguf.quants.dequantize(blocks.rows.numpy(), Kind[blocks.type_name]))


def make(ops_under_test: Ops, type_name: str, num_out: int, num_in: int) -> tuple[QuantizedWeight, torch.Tensor]:
    blocks = random_blocks(type_name, num_out, num_in)
    return ops_under_test.pack_quantized(blocks), values_of(blocks)


@pytest.mark.parametrize(("num_out", "num_in"), [(1, 256), (16, 512), (37, 768), (331, 256)])
@pytest.mark.parametrize("type_name", TYPES)
def test_packing_keeps_every_value_bit_by_bit(every_ops: Ops, type_name: str, num_out: int, num_in: int) -> None:
    weight, values = make(every_ops, type_name, num_out, num_in)
    assert torch.equal(weight.plain(), values)
    indices = torch.tensor([num_out - 1, 0, num_out // 2, 0], dtype=torch.int32)
    assert torch.equal(every_ops.quantized_rows(weight, indices), values[indices.long()])
    assert torch.equal(weight.data, reference.pack_quantized(random_blocks(type_name, num_out, num_in)).data)


@pytest.mark.parametrize("type_name", TYPES)
def test_packed_blocks_are_hardly_larger_than_the_files_own(every_ops: Ops, type_name: str) -> None:
    blocks = random_blocks(type_name, 160, 512)
    # Q2_K and Q3_K have codes of four bits here, the others are as large as they were to a few percent.
    limit = {"Q2_K": 2.0, "Q3_K": 1.4}.get(type_name, 1.03)
    assert every_ops.pack_quantized(blocks).data.numel() <= limit * blocks.rows.numel()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 8, 9, 40, 133])
@pytest.mark.parametrize("type_name", TYPES)
def test_product_differs_from_float64_by_the_rounding_of_x_alone(
    every_ops: Ops, type_name: str, num_tokens: int
) -> None:
    num_out, num_in = 53, 1280
    weight, values = make(every_ops, type_name, num_out, num_in)
    torch.manual_seed(num_tokens)
    x, bias = torch.randn(num_tokens, num_in) * torch.rand(num_in).exp2(), torch.randn(num_out)
    exact = x.double() @ values.double().T
    step = HALF_STEP * x.abs().view(num_tokens, -1, 32).amax(dim=-1).repeat_interleave(32, dim=1)
    # Beside that, what float32 sums of so many terms may lose.
    allowed = (step.double() + 2e-6 * x.abs()) @ values.abs().double().T
    assert ((every_ops.linear_quantized(x, [weight]) - exact).abs() <= allowed).all()
    with_bias = every_ops.linear_quantized(x, [weight], bias)
    assert ((with_bias - exact - bias).abs() <= allowed + 1e-6 * bias.abs()).all()
    assert relative_error(with_bias, exact + bias) < 3e-5


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 7, 20, 61])
@pytest.mark.parametrize("type_name", TYPES)
def test_int8_product_differs_from_float64_by_the_rounding_of_x_to_8_bits(
    library_ops: Ops, type_name: str, num_tokens: int
) -> None:
    weight, values = make(library_ops, type_name, 53, 768)
    torch.manual_seed(num_tokens)
    x, bias = torch.randn(num_tokens, 768) * torch.rand(768).exp2(), torch.randn(53)
    step = x.abs().view(num_tokens, -1, 32).amax(dim=-1).repeat_interleave(32, dim=1) / 127
    rounded = (x / step).round().double() * step.double()
    out = library_ops.linear_quantized(x, [weight], bias, int8_activations=True)
    # What is rounded is known up to ties, so the product with it must be close to exact.
    assert relative_error(out, rounded @ values.double().T + bias) < 1e-3
    allowed = (HALF_INT8_STEP * 127 * step.double() + 2e-6 * x.abs()) @ values.abs().double().T + 1e-6 * bias.abs()
    assert ((out - x.double() @ values.double().T - bias).abs() <= allowed).all()


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 6, 17])
@pytest.mark.parametrize("type_name", TYPES)
def test_sums_of_the_largest_codes_are_exact(library_ops: Ops, type_name: str, num_tokens: int, int8: bool) -> None:
    """Every code and every input as large as can be, of one sign or two: where short sums would overflow."""
    blocks = extreme_blocks(type_name, 32, 256)
    values = values_of(blocks)
    x = torch.where(torch.arange(256) % 64 < 32, 1.0, -1.0).repeat(num_tokens, 1)
    x[::2] = 1.0
    out = library_ops.linear_quantized(x, [library_ops.pack_quantized(blocks)], int8_activations=int8)
    exact = x.double() @ values.double().T
    assert ((out - exact).abs() <= 2e-6 * x.abs().double() @ values.abs().double().T).all()


@pytest.mark.parametrize("int8", [False, True])
def test_whole_numbers_are_multiplied_exactly(library_ops: Ops, int8: bool) -> None:
    blocks = random_blocks("Q8_0", 19, 64)
    blocks.rows.view(19, 2, 34)[:, :, :2] = torch.tensor([1.0], dtype=torch.float16).view(torch.uint8)
    x = torch.randint(-120, 120, (7, 64), dtype=torch.int32).float()
    x[:, ::32] = 127.0 if int8 else 32767.0
    expected = x.double() @ values_of(blocks).double().T
    weight = library_ops.pack_quantized(blocks)
    assert torch.equal(library_ops.linear_quantized(x, [weight], int8_activations=int8).double(), expected)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("type_name", TYPES)
def test_row_is_the_same_to_the_bit_alone_in_a_batch_and_on_more_threads(
    library_ops: Ops, threads_restored: None, type_name: str, int8: bool
) -> None:
    weight, _ = make(library_ops, type_name, 331, 1536)
    x, bias = torch.randn(150, 1536), torch.randn(331)

    def product(begin: int, end: int) -> torch.Tensor:
        return library_ops.linear_quantized(x[begin:end], [weight], bias, int8_activations=int8)

    together = product(0, 150)
    for begin, end in ((0, 1), (1, 3), (3, 6), (6, 10), (10, 15), (15, 22), (22, 30), (30, 149), (149, 150)):
        assert torch.equal(product(begin, end), together[begin:end])
    binding.set_num_threads(2)
    assert torch.equal(product(0, 150), together)
    assert torch.equal(product(5, 6), together[5:6])


@pytest.mark.parametrize("int8", [False, True])
def test_row_is_the_same_in_a_batch_that_is_cut_for_the_cache(library_ops: Ops, int8: bool) -> None:
    weight, _ = make(library_ops, "Q5_K", 16, 4096)
    x = torch.randn(300, 4096)
    together = library_ops.linear_quantized(x, [weight], int8_activations=int8)
    for row in (0, 1, 42, 43, 150, 299):
        alone = library_ops.linear_quantized(x[row : row + 1], [weight], int8_activations=int8)
        assert torch.equal(alone, together[row : row + 1])


def test_parts_of_several_types_lie_side_by_side(every_ops: Ops) -> None:
    parts = [make(every_ops, name, rows, 512)[0] for name, rows in (("Q4_K", 24), ("Q6_K", 5), ("Q8_0", 16))]
    x, bias = torch.randn(6, 512), torch.randn(45)
    alone = [every_ops.linear_quantized(x, [part]) for part in parts]
    assert torch.equal(every_ops.linear_quantized(x, parts), torch.cat(alone, dim=1))
    assert torch.equal(every_ops.linear_quantized(x, parts, bias), torch.cat(alone, dim=1) + bias)


def test_rows_may_be_strided(every_ops: Ops) -> None:
    weight, values = make(every_ops, "Q4_1", 33, 64)
    torch.manual_seed(0)
    wide, transposed = torch.randn(9, 100), torch.randn(64, 9).T
    expected = every_ops.linear_quantized(wide[:, 20:84].contiguous(), [weight])
    assert torch.equal(every_ops.linear_quantized(wide[:, 20:84], [weight]), expected)
    exact = transposed.double() @ values.double().T
    assert relative_error(every_ops.linear_quantized(transposed, [weight]), exact) < 3e-5
    assert every_ops.linear_quantized(torch.empty(0, 64), [weight]).shape == (0, 33)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_input_that_is_not_finite_stays_in_its_row(library_ops: Ops, broken: float, int8: bool) -> None:
    weight, _ = make(library_ops, "Q4_1", 18, 64)
    x = torch.randn(7, 64)
    x[3, 37] = broken
    out = library_ops.linear_quantized(x, [weight], int8_activations=int8)
    assert out.isnan().all(dim=1).tolist() == [False, False, False, True, False, False, False]
    assert not out[[0, 1, 2, 4, 5, 6]].isnan().any()


@pytest.mark.parametrize("largest", [0.0, 1e-45, 1e-38, 1e-33, 1e-30, 1e30, 3e38])
def test_inputs_of_any_size_are_scaled(library_ops: Ops, largest: float) -> None:
    blocks = random_blocks("Q4_0", 16, 64)
    blocks.rows.view(16, 2, 18)[:, :, :2] = torch.tensor([2.0**-14], dtype=torch.float16).view(torch.uint8)
    values = values_of(blocks)
    x = torch.linspace(-1, 1, 64).double().mul(largest).float().view(1, 64)
    exact = x.double() @ values.double().T
    error = (library_ops.linear_quantized(x, [library_ops.pack_quantized(blocks)]) - exact).abs()
    assert (error <= (HALF_STEP * 1.1 * largest + 1e-33) * values.abs().sum(dim=1)).all()


def test_what_does_not_fit_is_refused(every_ops: Ops) -> None:
    weight, _ = make(every_ops, "Q4_1", 18, 64)
    other, _ = make(every_ops, "Q4_1", 18, 96)
    with pytest.raises(ValueError, match=r"does not fit quantised weights of 64 inputs; use float32"):
        every_ops.linear_quantized(torch.randn(2, 63), [weight])
    with pytest.raises(ValueError, match=r"does not fit quantised weights of 64 inputs; use float32"):
        every_ops.linear_quantized(torch.randn(2, 64, dtype=torch.bfloat16), [weight])
    with pytest.raises(ValueError, match="all need the same inputs"):
        every_ops.linear_quantized(torch.randn(2, 64), [weight, other])
    with pytest.raises(ValueError, match="does not fit 18 outputs"):
        every_ops.linear_quantized(torch.randn(2, 64), [weight], torch.randn(17))
    with pytest.raises(IndexError, match="index 1 is row 18 of a weight of 18 rows"):
        every_ops.quantized_rows(weight, torch.tensor([0, 18]))
    with pytest.raises(IndexError, match="index 0 is row -1"):
        every_ops.quantized_rows(weight, torch.tensor([-1]))
    with pytest.raises(ValueError, match="must be int32 or int64"):
        every_ops.quantized_rows(weight, torch.tensor([[0]]))


def test_blocks_that_are_not_whole_are_refused(every_ops: Ops) -> None:
    rows = random_blocks("Q4_1", 4, 64).rows
    with pytest.raises(ValueError, match="block type IQ4_XS cannot be packed"):
        every_ops.pack_quantized(QuantizedBlocks(rows, "IQ4_XS", 64))
    with pytest.raises(ValueError, match="48 inputs are not whole blocks of 32"):
        every_ops.pack_quantized(QuantizedBlocks(rows, "Q4_1", 48))
    with pytest.raises(ValueError, match="64 inputs are not whole blocks of 256"):
        every_ops.pack_quantized(QuantizedBlocks(rows, "Q4_K", 64))
    with pytest.raises(ValueError, match=r"must be uint8 \[num_out, 60\] for 96 inputs"):
        every_ops.pack_quantized(QuantizedBlocks(rows, "Q4_1", 96))


def test_int8_activations_pay_for_codes_of_8_bits_only_with_sums_of_32_bits(library_ops: Ops) -> None:
    assert all(library_ops.int8_pays(name) for name in TYPES if name != "Q8_0")
    assert library_ops.int8_pays("Q8_0") == (binding.load_library().variant in {"avx512vnni", "dotprod"})
    assert not reference.int8_pays("Q4_0")


def test_blocks_are_kept_for_float32_where_the_library_is(library_ops: Ops) -> None:
    assert all(library_ops.quantizes(name, torch.float32) for name in TYPES)
    assert not library_ops.quantizes("Q4_1", torch.bfloat16)
    assert not library_ops.quantizes("F16", torch.float32)
    assert not reference.quantizes("Q4_1", torch.float32)
    assert ops.quantizes("cpu", "Q4_1", torch.float32) == ops.implementation("cpu").quantizes("Q4_1", torch.float32)


def test_the_library_refuses_sizes_and_types_that_there_are_not(library_ops: Ops) -> None:
    library = binding.library()
    huge, q4_1 = 1 << 29, 1
    for num_rows, num_in in ((-1, 32), (1, -32), (1, 33), (huge, 32), (1, huge)):
        assert library.serve_quantize_rows(None, 0, None, num_rows, num_in, 0) == binding.BAD_SHAPE
    assert library.serve_quantize_rows(None, 0, None, 0, 32, 2) == binding.BAD_TYPE
    product = library.serve_quantized_linear
    assert product(q4_1, None, None, None, None, 0, -1, 32, 16, 0) == binding.BAD_SHAPE
    assert product(q4_1, None, None, None, None, 0, 1, 33, 16, 0) == binding.BAD_SHAPE
    assert product(99, None, None, None, None, 0, 1, 32, 16, 0) == binding.BAD_SHAPE
    assert product(q4_1, None, None, None, None, 0, 1, 32, 16, 7) == binding.BAD_TYPE
    assert library.serve_pack_quantized(99, None, 0, None, 32, 16) == binding.BAD_SHAPE
    assert library.serve_pack_quantized(q4_1, None, 0, None, 32, huge) == binding.BAD_SHAPE
    assert library.serve_pack_affine(q4_1, None, None, None, None, 32, 0) == binding.BAD_TYPE
    assert library.serve_quantized_bytes(q4_1, 32, huge) == -1
