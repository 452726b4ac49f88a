"""Reads the tensors of a GGUF file, dequantised exactly as the format defines them.

The arithmetic is float32 in the order of ggml's own reference, so the values are equal bit by bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor

from serve.checkpoint import ModelArch
from serve.gguf import GGUFTensorInfo, read_gguf_header
from serve.kernels.block_formats import TILE_FORMATS, take_apart
from serve.kernels.quantized_weight import QuantizedBlocks
from serve.models.weights.names import GGUF_ROPE_DIVISORS, parameter_name, rotated_heads

# Blocks converted at a time, so that the intermediate arrays stay in the cache.
_ELEMENTS_AT_ONCE: Final = 1 << 18
# Smaller tensors are copied: a view of one would keep the whole file in memory.
_MIN_MAPPED_BYTES: Final = 1 << 20
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

    def dtype(self, name: str) -> torch.dtype:
        """Give the type that the file has; float32 when it is quantised."""
        return _PLAIN.get(self._infos[name].type.name, torch.float32)

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Give the file's memory when it already holds that type in the right order."""
        info = self._infos[name]
        if _PLAIN.get(info.type.name) != dtype or self._num_rotated_heads(info) is not None:
            return None
        if info.nbytes < _MIN_MAPPED_BYTES:
            return None
        return self._rows(info).view(dtype).view(info.shape)

    def blocks(self, name: str) -> QuantizedBlocks | None:
        """Give a matrix's blocks as the file has them, rows as for read; None when it is not quantised."""
        info = self._infos[name]
        if info.type.name in _PLAIN or len(info.shape) != 2:
            return None
        return QuantizedBlocks(self._rows(info), info.type.name, info.shape[1])

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
    layout = TILE_FORMATS[type_name]
    blocks = raw.reshape(-1, layout.raw_bytes)
    flat = out.view(-1, layout.unit_inputs)
    step = _ELEMENTS_AT_ONCE // layout.unit_inputs
    for first in range(0, blocks.shape[0], step):
        target = flat[first : first + step]
        part = blocks[first : first + step]
        if out.dtype == torch.float32:
            _convert(part, type_name, target)
        else:
            wide = torch.empty(target.shape)
            _convert(part, type_name, wide)
            target.copy_(wide)


def _convert(blocks: Tensor, type_name: str, out: Tensor) -> None:
    """Write the values of blocks [n, raw_bytes] to float32 out [n, elements of a block]."""
    layout = TILE_FORMATS[type_name]
    parts = take_apart(blocks, type_name)
    out.copy_(parts.codes).sub_(layout.offset)
    values = out.view(-1, layout.unit_inputs // layout.group, layout.group)
    scale = parts.scale.float()
    values.mul_((scale if parts.group_scales is None else scale * parts.group_scales).unsqueeze(-1))
    if parts.minimum is None:
        return
    minimum = parts.minimum.float()
    if parts.group_minimums is None:
        values.add_(minimum.unsqueeze(-1))
    else:
        values.sub_((minimum * parts.group_minimums).unsqueeze(-1))
