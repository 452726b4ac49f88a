"""The block types of GGUF files, taken apart with plain torch: codes, scales and minimums.

Source: block layouts of ggml (ggml-common.h, ggml-quants.c).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TileFormat:
    """What one block type holds, and how it lies in a tile (quantized_tile.h describes the layout).

    number       TileType of the library
    raw_bytes    bytes of a block in a file
    low_bits     bits of a code that are stored together, 4 or 8 (8: signed)
    high_bits    bits of a code that are stored apart
    group        inputs that share a scale
    unit_blocks  blocks of 32 inputs that a file's block holds: 1, or 8 for the K types
    has_minimum  value = scale * code + minimum, minus it for K types; else scale * (code - offset)
    is_affine    value = scale * (code - zero), with one float32 scale and one zero point for all of a unit
    """

    number: int
    raw_bytes: int
    low_bits: int
    high_bits: int
    group: int
    unit_blocks: int
    has_minimum: bool
    offset: int
    is_affine: bool = False

    @property
    def unit_inputs(self) -> int:
        """Inputs of a file's block."""
        return 32 * self.unit_blocks

    @property
    def is_super(self) -> bool:
        """Tell whether scales of groups are bytes that a factor of the whole block multiplies."""
        return self.unit_blocks > 1 and not self.is_affine


TILE_FORMATS: Final[dict[str, TileFormat]] = {
    "Q4_0": TileFormat(0, 18, 4, 0, 32, 1, False, 8),
    "Q4_1": TileFormat(1, 20, 4, 0, 32, 1, True, 0),
    "Q5_0": TileFormat(2, 22, 4, 1, 32, 1, False, 16),
    "Q5_1": TileFormat(3, 24, 4, 1, 32, 1, True, 0),
    "Q8_0": TileFormat(4, 34, 8, 0, 32, 1, False, 0),
    "Q2_K": TileFormat(5, 84, 4, 0, 16, 8, True, 0),
    "Q3_K": TileFormat(6, 110, 4, 0, 16, 8, False, 4),
    "Q4_K": TileFormat(7, 144, 4, 0, 32, 8, True, 0),
    "Q5_K": TileFormat(8, 176, 4, 1, 32, 8, True, 0),
    "Q6_K": TileFormat(9, 210, 4, 2, 16, 8, False, 32),
}
# Tiles of matrices that come as codes, scales and zero points (AffineBlocks), not as blocks of bytes.
AFFINE_FORMATS: Final[dict[str, TileFormat]] = {
    "AFFINE4_32": TileFormat(10, 0, 4, 0, 32, 1, False, 0, is_affine=True),
    "AFFINE4_64": TileFormat(11, 0, 4, 0, 32, 2, False, 0, is_affine=True),
    "AFFINE4_128": TileFormat(12, 0, 4, 0, 32, 4, False, 0, is_affine=True),
    "AFFINE8_32": TileFormat(13, 0, 8, 0, 32, 1, False, 0, is_affine=True),
    "AFFINE8_64": TileFormat(14, 0, 8, 0, 32, 2, False, 0, is_affine=True),
    "AFFINE8_128": TileFormat(15, 0, 8, 0, 32, 4, False, 0, is_affine=True),
}


def tile_format(type_name: str) -> TileFormat:
    """Give the layout of a type's tiles; KeyError for a type that has none."""
    return TILE_FORMATS.get(type_name) or AFFINE_FORMATS[type_name]


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The parts of n blocks of one type.

    codes           uint8 [n, unit_inputs]; int8 for Q8_0
    scale           float16 [n, 1], of the block or of its groups' scales
    minimum         the same for minimums, None for types without
    group_scales    uint8 or int8 [n, groups] of K types, else None
    group_minimums  uint8 [n, groups] of K types with minimums, else None
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None = None
    group_scales: Tensor | None = None
    group_minimums: Tensor | None = None


def take_apart(blocks: Tensor, type_name: str) -> BlockParts:
    """Split blocks, uint8 [n, raw_bytes], into their parts."""
    return _TAKE_APART[type_name](blocks)


def _half(blocks: Tensor, begin: int) -> Tensor:
    """Give the float16 at a byte of each block [n, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Give low nibbles, then high nibbles, of each row of 16 bytes."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Give bit j of each little-endian 32-bit word [n, 4] bytes, times 16, as [n, 32]."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, :, None] >> bits) & 1).view(-1, 32) << 4


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Unpack bit fields of [n, groups, bytes]: for each group all bytes at the first shift, then the next."""
    fields = (packed[:, :, None, :] >> torch.tensor(shifts, dtype=torch.uint8)[:, None]) & mask
    return fields.reshape(packed.shape[0], -1)


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes [n, 12] into eight 6-bit scales and eight 6-bit minimums, each [n, 8]."""
    scales, minimums, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high_scales = (rest & 15) | ((scales >> 2) & 0x30)
    high_minimums = (rest >> 4) | ((minimums >> 2) & 0x30)
    return torch.cat((scales & 63, high_scales), 1), torch.cat((minimums & 63, high_minimums), 1)


def _q4_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 2:]), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockParts:
    return BlockParts(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockParts:
    return BlockParts(blocks[:, 2:].view(torch.int8), _half(blocks, 0))


def _q2_k(blocks: Tensor) -> BlockParts:
    scales = blocks[:, :16]
    codes = _shifted(blocks[:, 16:80].view(-1, 2, 32), (0, 2, 4, 6), 3)
    return BlockParts(codes, _half(blocks, 80), _half(blocks, 82), scales & 15, scales >> 4)


def _q3_k(blocks: Tensor) -> BlockParts:
    high = _shifted(blocks[:, None, :32], (0, 1, 2, 3, 4, 5, 6, 7), 1)
    low = _shifted(blocks[:, 32:96].view(-1, 2, 32), (0, 2, 4, 6), 3)
    low_scales = _shifted(blocks[:, None, 96:104], (0, 4), 15)
    high_scales = _shifted(blocks[:, None, 104:108], (0, 2, 4, 6), 3)
    scales = (low_scales | (high_scales << 4)).view(torch.int8) - 32
    # The high bit is stored inverted: unset subtracts 4, which is the type's offset.
    return BlockParts(low | (high << 2), _half(blocks, 108), group_scales=scales)


def _q4_k(blocks: Tensor) -> BlockParts:
    codes = _shifted(blocks[:, 16:].view(-1, 4, 32), (0, 4), 15)
    return BlockParts(codes, _half(blocks, 0), _half(blocks, 2), *_six_bit_scales(blocks[:, 4:16]))


def _q5_k(blocks: Tensor) -> BlockParts:
    high = _shifted(blocks[:, None, 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 1)
    low = _shifted(blocks[:, 48:].view(-1, 4, 32), (0, 4), 15)
    return BlockParts(low | (high << 4), _half(blocks, 0), _half(blocks, 2), *_six_bit_scales(blocks[:, 4:16]))


def _q6_k(blocks: Tensor) -> BlockParts:
    low = _shifted(blocks[:, :128].view(-1, 2, 64), (0, 4), 15)
    high = _shifted(blocks[:, 128:192].view(-1, 2, 32), (0, 2, 4, 6), 3)
    scales = blocks[:, 192:208].view(torch.int8)
    return BlockParts(low | (high << 4), _half(blocks, 208), group_scales=scales)


_TAKE_APART: Final[dict[str, Callable[[Tensor], BlockParts]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
