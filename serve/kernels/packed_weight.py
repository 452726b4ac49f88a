"""Weights of a linear layer, repacked so that vector units read them in order."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

WEIGHT_LANES: Final = 16
# Types that a packed weight may have, each with its number in the library.
PACKED_TYPES: Final[dict[torch.dtype, int]] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [num_out, num_in] in another order, in its own type.

    data  [ceil(num_out / 16), num_in, 16]: sixteen neighbouring outputs lie side by side, so that one vector load
          serves sixteen sums. bfloat16: [ceil(num_out / 16), ceil(num_in / 2), 16, 2], an output's weights for two
          inputs side by side, so that one load gives two float32 vectors. What is beyond the weight is zero.
    """

    data: Tensor
    num_out: int
    num_in: int

    @property
    def type_number(self) -> int:
        """The library's number of the type."""
        return PACKED_TYPES[self.data.dtype]

    def plain(self) -> Tensor:
        """Give the weight in its plain order [num_out, num_in]."""
        tiles = self.data.transpose(2, 3).flatten(1, 2) if self.data.dim() == 4 else self.data
        return tiles.transpose(1, 2).flatten(0, 1)[: self.num_out, : self.num_in]


def packed_shape(num_out: int, num_in: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Give the shape of a packed weight's data."""
    num_tiles = -(-num_out // WEIGHT_LANES)
    if dtype == torch.bfloat16:
        return num_tiles, -(-num_in // 2), WEIGHT_LANES, 2
    return num_tiles, num_in, WEIGHT_LANES


def empty_packed_weight(num_out: int, num_in: int, dtype: torch.dtype) -> PackedWeight:
    """Reserve memory for a packed weight; the caller fills all of it."""
    return PackedWeight(torch.empty(packed_shape(num_out, num_in, dtype), dtype=dtype), num_out, num_in)
