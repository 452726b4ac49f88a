"""Reads the tensors of a GGUF file, dequantised exactly as the format defines them.

Each block type is a few bit operations on whole arrays of blocks; the arithmetic is float32 in the order of ggml's
own reference, so the values are equal bit by bit.
Source: block layouts of ggml (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from serve.checkpoint import ModelArch
from serve.gguf import GGUFTensorInfo, read_gguf_header
from serve.models.weights.names import GGUF_ROPE_DIVISORS, parameter_name, rotated_heads

# Blocks converted at a time, so that the intermediate arrays stay in the cache.
_ELEMENTS_AT_ONCE: Final = 1 << 18
_PLAIN: Final[dict[str, torch.dtype]] = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GGUFSource:
    """All tensors of a GGUF file, by parameter name."""

    def __init__(self, path: str, arch: ModelArch) -> None:
        header = read_gguf_header(path)
        self._arch = arch
        self._is_interleaved = header.get_str("general.architecture") == "llama"
        self._infos = {parameter_name(name): info for name, info in header.tensors.items()}
        self._shapes = {name: info.shape for name, info in self._infos.items()}
        # Copy on write: torch asks for writable memory, the file is never changed.
        self._memory = np.memmap(path, dtype=np.uint8, mode="c")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors of the file."""
        return self._shapes

    def read(self, name: str, out: Tensor) -> None:
        """Dequantise a tensor to out, with query and key rows in the order the rotary layer expects."""
        info = self._infos[name]
        rows = self._rows(info)
        if info.type.name in _PLAIN:
            out.copy_(rows.view(_PLAIN[info.type.name]).view(info.shape))
        else:
            dequantize(rows, info.type.name, out)

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Give the file's memory when it already holds that type in the right order."""
        info = self._infos[name]
        if _PLAIN.get(info.type.name) != dtype or self._num_rotated_heads(info) is not None:
            return None
        return self._rows(info).view(dtype).view(info.shape)

    def rope_divisors(self) -> Tensor | None:
        """Give the file's divisors of rotary frequencies [head_size / 2], if it has any."""
        info = self._infos.get(GGUF_ROPE_DIVISORS)
        if info is None:
            return None
        divisors = torch.empty(info.shape)
        self.read(GGUF_ROPE_DIVISORS, divisors)
        return divisors

    def _num_rotated_heads(self, info: GGUFTensorInfo) -> int | None:
        if not self._is_interleaved:
            return None
        return rotated_heads(info.name, num_heads=self._arch.num_heads, num_kv_heads=self._arch.num_kv_heads)

    def _rows(self, info: GGUFTensorInfo) -> Tensor:
        """Give a tensor's bytes as [rows, bytes of a row], rows of heads un-interleaved."""
        raw = torch.from_numpy(self._memory[info.offset : info.offset + info.nbytes])
        num_heads = self._num_rotated_heads(info)
        if num_heads is None:
            return raw.view(info.shape[0], -1) if len(info.shape) > 1 else raw.view(1, -1)
        # A row of these is whole blocks (or, for a bias, one number), so bytes can be moved instead of numbers.
        raw = raw.view(num_heads, self._arch.head_size // 2, 2, -1)
        return raw.transpose(1, 2).reshape(info.shape[0], -1)


def dequantize(raw: Tensor, type_name: str, out: Tensor) -> None:
    """Write the values of quantised blocks to out.

    raw  uint8, whole blocks of the type in order, any shape
    out  contiguous, as many elements as the blocks hold, float32, bfloat16 or float16
    """
    block_elements, block_bytes, convert = _BLOCK_TYPES[type_name]
    blocks = raw.reshape(-1, block_bytes)
    flat = out.view(-1, block_elements)
    step = _ELEMENTS_AT_ONCE // block_elements
    for first in range(0, blocks.shape[0], step):
        target = flat[first : first + step]
        part = blocks[first : first + step]
        if out.dtype == torch.float32:
            convert(part, target)
        else:
            wide = torch.empty(target.shape)
            convert(part, wide)
            target.copy_(wide)


def _half(blocks: Tensor, begin: int) -> Tensor:
    """Give the float16 at a byte of each block as float32 [n, 1]."""
    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """Write low nibbles to the first and high nibbles to the second half of each row of out [n, 32]."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _fifth_bits(packed: Tensor) -> Tensor:
    """Give bit j of each little-endian 32-bit word [n, 4] bytes, times 16, as [n, 32]."""
    bits = torch.arange(8, dtype=torch.uint8)
    return ((packed[:, :, None] >> bits) & 1).view(-1, 32) << 4


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Unpack bit fields of [n, groups, bytes]: for each group all bytes at the first shift, then the next."""
    fields = (packed[:, :, None, :] >> torch.tensor(shifts, dtype=torch.uint8)[:, None]) & mask
    return fields.reshape(packed.shape[0], -1)


def _q2_k(blocks: Tensor, out: Tensor) -> None:
    scales = blocks[:, :16]
    values = _shifted(blocks[:, 16:80].view(-1, 2, 32), (0, 2, 4, 6), 3).view(-1, 16, 16)
    scale = _half(blocks, 80) * (scales & 15)
    minimum = _half(blocks, 82) * (scales >> 4)
    out.view(-1, 16, 16).copy_(values).mul_(scale[:, :, None]).sub_(minimum[:, :, None])


def _q3_k(blocks: Tensor, out: Tensor) -> None:
    high = _shifted(blocks[:, None, :32], (0, 1, 2, 3, 4, 5, 6, 7), 1)
    low = _shifted(blocks[:, 32:96].view(-1, 2, 32), (0, 2, 4, 6), 3)
    low_scales = _shifted(blocks[:, None, 96:104], (0, 4), 15)
    high_scales = _shifted(blocks[:, None, 104:108], (0, 2, 4, 6), 3)
    scale = _half(blocks, 108) * ((low_scales | (high_scales << 4)).float() - 32)
    # The high bit is stored inverted: unset subtracts 4.
    values = (low | (high << 2)).view(-1, 16, 16)
    out.view(-1, 16, 16).copy_(values).sub_(4).mul_(scale[:, :, None])


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack 12 bytes [n, 12] into eight 6-bit scales and eight 6-bit minimums, each [n, 8]."""
    scales, minimums, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high_scales = (rest & 15) | ((scales >> 2) & 0x30)
    high_minimums = (rest >> 4) | ((minimums >> 2) & 0x30)
    return torch.cat((scales & 63, high_scales), 1), torch.cat((minimums & 63, high_minimums), 1)


def _scale_with_minimum(blocks: Tensor, values: Tensor, out: Tensor) -> None:
    """Finish Q4_K and Q5_K: values [n, 256] times scale minus minimum, by groups of 32."""
    scales, minimums = _six_bit_scales(blocks[:, 4:16])
    scale, minimum = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    out.view(-1, 8, 32).copy_(values.view(-1, 8, 32)).mul_(scale[:, :, None]).sub_(minimum[:, :, None])


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _scale_with_minimum(blocks, _shifted(blocks[:, 16:].view(-1, 4, 32), (0, 4), 15), out)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    high = _shifted(blocks[:, None, 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 1)
    low = _shifted(blocks[:, 48:].view(-1, 4, 32), (0, 4), 15)
    _scale_with_minimum(blocks, low | (high << 4), out)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    low = _shifted(blocks[:, :128].view(-1, 2, 64), (0, 4), 15)
    high = _shifted(blocks[:, 128:192].view(-1, 2, 32), (0, 2, 4, 6), 3)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.view(-1, 16, 16).copy_((low | (high << 4)).view(-1, 16, 16)).sub_(32).mul_(scale[:, :, None])


# Type -> elements and bytes of a block, and its conversion from uint8 [n, bytes] to float32 [n, elements].
_BLOCK_TYPES: Final[dict[str, tuple[int, int, Callable[[Tensor, Tensor], None]]]] = {
    "Q4_0": (32, 18, _q4_0),
    "Q4_1": (32, 20, _q4_1),
    "Q5_0": (32, 22, _q5_0),
    "Q5_1": (32, 24, _q5_1),
    "Q8_0": (32, 34, _q8_0),
    "Q2_K": (256, 84, _q2_k),
    "Q3_K": (256, 110, _q3_k),
    "Q4_K": (256, 144, _q4_k),
    "Q5_K": (256, 176, _q5_k),
    "Q6_K": (256, 210, _q6_k),
}
