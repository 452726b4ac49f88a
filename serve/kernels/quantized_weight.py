"""Weights of a linear layer as the blocks of a file, repacked so that vector units read them in order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from serve.kernels.block_formats import BlockParts, TileFormat, take_apart, tile_format
from serve.kernels.packed_weight import WEIGHT_LANES

BLOCK_INPUTS: Final = 32


def codes_bytes(layout: TileFormat) -> int:
    """Give the bytes of the codes of a tile's block, sixteen outputs by 32 inputs."""
    return WEIGHT_LANES * BLOCK_INPUTS * (layout.low_bits + layout.high_bits) // 8


def scale_bytes(layout: TileFormat) -> int:
    """Give the bytes of the scales, or of the minimums, of a tile's block; affine tiles have theirs in the head."""
    if layout.is_affine:
        return 0
    return BLOCK_INPUTS // layout.group * WEIGHT_LANES * (1 if layout.is_super else 2)


def block_bytes(layout: TileFormat) -> int:
    """Give the bytes of a tile's block: codes, scales, minimums."""
    return codes_bytes(layout) + scale_bytes(layout) * (2 if layout.has_minimum else 1)


def head_bytes(layout: TileFormat) -> int:
    """Give the bytes before the blocks: factors of a K type, scales and zero points of an affine one."""
    if layout.is_affine:
        return WEIGHT_LANES * 5
    return WEIGHT_LANES * (4 if layout.has_minimum else 2) if layout.is_super else 0


def unit_bytes(layout: TileFormat) -> int:
    """Give the bytes of sixteen blocks of a file once they are packed."""
    return head_bytes(layout) + layout.unit_blocks * block_bytes(layout)


@dataclass(frozen=True, slots=True)
class QuantizedBlocks:
    """A matrix as a file stores it: uint8 rows [num_out, bytes of a row] of blocks of one type, num_in numbers each."""

    rows: Tensor
    type_name: str
    num_in: int


@dataclass(frozen=True, slots=True)
class AffineBlocks:
    """A matrix [num_out, num_in] of whole numbers: value = scale * (code - zero).

    codes        uint8 [num_out, num_in], below 2 ** bits
    scales       float32 [num_out, num_in / group]
    zeros        uint8 [num_out, num_in / group]
    input_order  int64 [num_in], the input that each column multiplies; None when each multiplies its own
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    bits: int
    group: int
    input_order: Tensor | None = None

    @property
    def type_name(self) -> str:
        """The type of its tiles."""
        return f"AFFINE{self.bits}_{self.group}"


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [num_out, num_in] of one block type, without loss.

    data         uint8 [ceil(num_out / 16), units, unit_bytes]; outputs beyond num_out have scale zero
    input_order  int64 [num_in], the input that each column of data multiplies; None when each multiplies its own
    """

    data: Tensor
    type_name: str
    num_out: int
    num_in: int
    input_order: Tensor | None = None

    @property
    def format(self) -> TileFormat:
        """The layout of data."""
        return tile_format(self.type_name)

    def plain(self) -> Tensor:
        """Give the weight as float32 [num_out, num_in], bit by bit what the file's format defines."""
        return self.in_input_order(_dequantize_tiles(self.data, self.format)[: self.num_out])

    def rows(self, indices: Tensor) -> Tensor:
        """Look up rows by index [n], as a new float32 tensor [n, num_in]."""
        wide = indices.long()
        tiles = _dequantize_tiles(self.data[wide // WEIGHT_LANES], self.format)
        place = torch.arange(wide.shape[0]) * WEIGHT_LANES + wide % WEIGHT_LANES
        return self.in_input_order(tiles[place])

    def in_input_order(self, rows: Tensor) -> Tensor:
        """Bring columns of data [n, num_in] to the order of the inputs."""
        if self.input_order is None:
            return rows
        plain = torch.empty_like(rows)
        plain[:, self.input_order] = rows
        return plain


def joinable(first: QuantizedBlocks | AffineBlocks, second: QuantizedBlocks | AffineBlocks) -> bool:
    """Tell whether the outputs of two matrices can be one weight: one type, and the same order of inputs."""
    if first.type_name != second.type_name:
        return False
    if not isinstance(first, AffineBlocks) or not isinstance(second, AffineBlocks):
        return True
    if first.input_order is None or second.input_order is None:
        return first.input_order is second.input_order
    return torch.equal(first.input_order, second.input_order)


def side_by_side(parts: Sequence[QuantizedBlocks | AffineBlocks]) -> QuantizedBlocks | AffineBlocks:
    """Join the outputs of matrices that are joinable."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, QuantizedBlocks):
        rows = [part.rows for part in parts if isinstance(part, QuantizedBlocks)]
        return QuantizedBlocks(torch.cat(rows), first.type_name, first.num_in)
    affine = [part for part in parts if isinstance(part, AffineBlocks)]
    return AffineBlocks(
        codes=torch.cat([part.codes for part in affine]),
        scales=torch.cat([part.scales for part in affine]),
        zeros=torch.cat([part.zeros for part in affine]),
        bits=first.bits,
        group=first.group,
        input_order=first.input_order,
    )


def quantized_shape(type_name: str, num_out: int, num_in: int) -> tuple[int, int, int]:
    """Give the shape of a packed weight's data; KeyError for an unknown type, ValueError for parts of blocks."""
    layout = tile_format(type_name)
    if num_in % layout.unit_inputs:
        raise ValueError(f"{num_in} inputs are not whole blocks of {layout.unit_inputs}, as {type_name} needs")
    return -(-num_out // WEIGHT_LANES), num_in // layout.unit_inputs, unit_bytes(layout)


def empty_quantized_weight(
    type_name: str, num_out: int, num_in: int, input_order: Tensor | None = None
) -> QuantizedWeight:
    """Reserve memory for a packed weight; the caller fills all of it."""
    data = torch.empty(quantized_shape(type_name, num_out, num_in), dtype=torch.uint8)
    return QuantizedWeight(data, type_name, num_out, num_in, input_order)


def pack_affine(blocks: AffineBlocks) -> QuantizedWeight:
    """Repack a matrix of whole numbers with plain torch."""
    layout = tile_format(blocks.type_name)
    num_out, num_in = blocks.codes.shape
    weight = empty_quantized_weight(blocks.type_name, num_out, num_in, blocks.input_order)
    num_tiles, num_units, _ = weight.data.shape

    def in_tiles(part: Tensor) -> Tensor:
        """Order [num_out, units * n] of any type as [tile, unit, n, lane], zero beyond num_out."""
        rows = torch.zeros(num_tiles * WEIGHT_LANES, part.shape[1], dtype=part.dtype)
        rows[:num_out] = part
        return rows.view(num_tiles, WEIGHT_LANES, num_units, -1).permute(0, 2, 3, 1).contiguous()

    # Codes of eight bits are signed in a tile, and so are their zero points.
    shift = 128 if layout.low_bits == 8 else 0
    codes = in_tiles(blocks.codes ^ shift).view(num_tiles, num_units, layout.unit_blocks, BLOCK_INPUTS, WEIGHT_LANES)
    pieces = (
        in_tiles(blocks.scales).view(torch.uint8),
        in_tiles(blocks.zeros ^ shift),
        _gather(codes, layout.low_bits),
    )
    weight.data.copy_(torch.cat([piece.reshape(num_tiles, num_units, -1) for piece in pieces], dim=-1))
    return weight


def pack_blocks(blocks: QuantizedBlocks) -> QuantizedWeight:
    """Repack a file's blocks with plain torch."""
    layout = tile_format(blocks.type_name)
    num_out = blocks.rows.shape[0]
    weight = empty_quantized_weight(blocks.type_name, num_out, blocks.num_in)
    num_tiles, num_units, _ = weight.data.shape
    parts = take_apart(blocks.rows.reshape(-1, layout.raw_bytes), blocks.type_name)

    def in_tiles(part: Tensor) -> Tensor:
        """Order [num_out * units, n] of any type as [tile, unit, n, lane], zero beyond num_out."""
        rows = torch.zeros(num_tiles * WEIGHT_LANES, num_units, part.shape[1], dtype=part.dtype)
        rows[:num_out] = part.view(num_out, num_units, -1)
        return rows.view(num_tiles, WEIGHT_LANES, num_units, -1).permute(0, 2, 3, 1).contiguous()

    pieces = _block_pieces(parts, layout, in_tiles)
    body = torch.cat([piece.reshape(num_tiles, num_units, layout.unit_blocks, -1) for piece in pieces], dim=-1)
    head = [in_tiles(half) for half in (parts.scale, parts.minimum) if layout.is_super and half is not None]
    heads = [half.view(torch.uint8).reshape(num_tiles, num_units, -1) for half in head]
    weight.data.copy_(torch.cat([*heads, body.flatten(2)], dim=-1))
    return weight


def _block_pieces(parts: BlockParts, layout: TileFormat, in_tiles: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Give what lies in the blocks of a tile, in order, each as bytes [tile, unit, bytes of all its blocks]."""
    codes = in_tiles(parts.codes.view(torch.uint8))
    blocks = codes.view(*codes.shape[:2], layout.unit_blocks, BLOCK_INPUTS, WEIGHT_LANES)
    pieces = [_gather(blocks & ((1 << layout.low_bits) - 1), layout.low_bits)]
    if layout.high_bits:
        pieces.append(_gather(blocks >> 4, layout.high_bits))
    if layout.is_super:
        scales = [part for part in (parts.group_scales, parts.group_minimums) if part is not None]
    else:
        scales = [part for part in (parts.scale, parts.minimum) if part is not None]
    return pieces + [in_tiles(part).view(torch.uint8) for part in scales]


def _gather(fields: Tensor, bits: int) -> Tensor:
    """Pack bit fields [..., 32 inputs, 16 lanes] as _spread unpacks them: uint8 [..., bytes of a block]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    # An input is [eight inputs, byte of a word, quad of two, word], its place [quad, lane, word, byte].
    quads = fields.view(*fields.shape[:3], 4, 2, 2, 2, WEIGHT_LANES).permute(0, 1, 2, 3, 5, 7, 6, 4)
    # Quads are the fields of vectors: [..., vector, field, bytes of a vector]
    vectors = quads.reshape(*fields.shape[:3], -1, 8 // bits, 4 * WEIGHT_LANES)
    return (vectors << shifts[:, None]).sum(dim=-2, dtype=torch.uint8).flatten(3)


def _dequantize_tiles(data: Tensor, layout: TileFormat) -> Tensor:
    """Give the values of tiles [num_tiles, units, unit_bytes] as float32 [num_tiles * 16, num_in]."""
    num_tiles, num_units, _ = data.shape
    blocks = data[..., head_bytes(layout) :].reshape(num_tiles, num_units, layout.unit_blocks, block_bytes(layout))
    codes = _codes(blocks[..., : codes_bytes(layout)], layout)
    if layout.is_affine:
        values = _affine_values(codes, data, layout)
        return values.reshape(num_tiles, -1, WEIGHT_LANES).transpose(1, 2).reshape(num_tiles * WEIGHT_LANES, -1)
    # [tile, unit, block, input, lane], each group of inputs with its scale
    grouped = codes.view(*codes.shape[:3], -1, layout.group, WEIGHT_LANES)
    begin, size = codes_bytes(layout), scale_bytes(layout)
    values = grouped * _scales(data, blocks[..., begin : begin + size], layout, factor=0).unsqueeze(-2)
    if layout.has_minimum:
        minimum = _scales(data, blocks[..., begin + size :], layout, factor=1).unsqueeze(-2)
        values = values - minimum if layout.is_super else values + minimum
    return values.reshape(num_tiles, -1, WEIGHT_LANES).transpose(1, 2).reshape(num_tiles * WEIGHT_LANES, -1)


def _affine_values(codes: Tensor, data: Tensor, layout: TileFormat) -> Tensor:
    """Give the values of codes [tile, unit, block, input, lane], whose scales and zero points begin each unit."""
    end = 4 * WEIGHT_LANES
    scales = data[..., :end].contiguous().view(torch.float32)
    zeros = data[..., end : end + WEIGHT_LANES].contiguous()
    if layout.low_bits == 8:
        zeros = zeros.view(torch.int8)
    return (codes - zeros.float()[:, :, None, None, :]) * scales[:, :, None, None, :]


def _scales(data: Tensor, raw: Tensor, layout: TileFormat, *, factor: int) -> Tensor:
    """Give scales (factor 0) or minimums (factor 1) of blocks as float32 [tile, unit, block, group, lane]."""
    shape = (*raw.shape[:3], -1, WEIGHT_LANES)
    if not layout.is_super:
        return raw.contiguous().view(torch.float16).float().view(shape)
    small = raw if layout.has_minimum else raw.contiguous().view(torch.int8)
    begin = 2 * WEIGHT_LANES * factor
    head = data[..., begin : begin + 2 * WEIGHT_LANES].contiguous().view(torch.float16).float()
    return head[:, :, None, None, :] * small.float().view(shape)


def _codes(raw: Tensor, layout: TileFormat) -> Tensor:
    """Give the codes of blocks, less their offset, as float32 [tile, unit, block, 32 inputs, 16 lanes]."""
    low_bytes = WEIGHT_LANES * BLOCK_INPUTS * layout.low_bits // 8
    low = _spread(raw[..., :low_bytes], layout.low_bits)
    if layout.low_bits == 8:
        return low.view(torch.int8).float()
    if layout.high_bits:
        low = low | (_spread(raw[..., low_bytes:], layout.high_bits) << 4)
    return low.float() - layout.offset


def _spread(raw: Tensor, bits: int) -> Tensor:
    """Unpack bit fields of vectors to [..., 32 inputs, 16 lanes]; quantized_tile.h says which field is which input."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    vectors = raw.reshape(*raw.shape[:3], -1, 1, 4 * WEIGHT_LANES)
    quads = (vectors >> shifts[:, None]) & ((1 << bits) - 1)
    # [..., eight inputs, quad of two, lane, word, byte of the word]
    places = quads.view(*raw.shape[:3], 4, 2, WEIGHT_LANES, 2, 2)
    inputs = places.permute(0, 1, 2, 3, 7, 4, 6, 5)
    return inputs.reshape(*raw.shape[:3], BLOCK_INPUTS, WEIGHT_LANES)
