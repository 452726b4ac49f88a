"""A matrix of whole numbers with scales and zero points: its values, and its form for the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from serve.kernels.quantized_weight import AffineBlocks

# Inputs that share a scale in a tile, the widest first: scales are stored once for them.
_TILE_GROUPS: Final = (128, 64, 32)
_LARGEST_ZERO: Final = 255


@dataclass(frozen=True, slots=True)
class IntegerMatrix:
    """A matrix [num_out, num_in] as a checkpoint defines it: value = scale * (code - zero).

    codes    uint8 [num_out, num_in], below 2 ** bits
    scales   [num_out, num_groups], of the file's floating type
    zeros    int16 [num_out, num_groups]
    groups   int64 [num_in], the group of each input
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor
    bits: int

    def dequantize(self, out: Tensor) -> None:
        """Write the values to out [num_out, num_in] of any floating type, each rounded once."""
        values = self.codes.float().sub_(self.zeros[:, self.groups])
        out.copy_(values.mul_(self.scales.float()[:, self.groups]))

    def blocks(self) -> AffineBlocks | None:
        """Give the matrix for the kernels, without loss; None when its groups or zero points fit no tile.

        Inputs whose groups are mixed are put in the order of their groups.
        """
        is_sorted = bool((self.groups[1:] >= self.groups[:-1]).all())
        order = None if is_sorted else torch.argsort(self.groups, stable=True)
        sorted_groups = self.groups if order is None else self.groups[order]
        group = _tile_group(sorted_groups)
        if group is None or int(self.zeros.min()) < 0 or int(self.zeros.max()) > _LARGEST_ZERO:
            return None
        first = sorted_groups[::group]
        return AffineBlocks(
            codes=self.codes if order is None else self.codes[:, order],
            scales=self.scales[:, first].float().contiguous(),
            zeros=self.zeros[:, first].to(torch.uint8).contiguous(),
            bits=self.bits,
            group=group,
            input_order=order,
        )


def _tile_group(sorted_groups: Tensor) -> int | None:
    """Find how many neighbouring inputs always share their group; None when not even 32 do."""
    num_in = sorted_groups.shape[0]
    for group in _TILE_GROUPS:
        if num_in % group == 0:
            rows = sorted_groups.view(-1, group)
            if bool((rows[:, 0] == rows[:, -1]).all()):
                return group
    return None
