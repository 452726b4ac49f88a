"""Weights of a linear layer, repacked so that vector units read them in order."""

from dataclasses import dataclass

import torch
from torch import Tensor

WEIGHT_LANES = 16


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A float32 weight [num_out, num_in] in another order.

    data  [ceil(num_out / 16), num_in, 16]: sixteen neighbouring outputs lie side by side, so that
          one vector load serves sixteen sums; outputs beyond num_out are zero
    """

    data: Tensor
    num_out: int
    num_in: int

    def rows(self, indices: Tensor) -> Tensor:
        """Look up rows of the plain weight by index [n], as a new tensor [n, num_in]."""
        wide = indices.long()
        return self.data[wide // WEIGHT_LANES, :, wide % WEIGHT_LANES]

    def plain(self) -> Tensor:
        """Give the weight in its plain order [num_out, num_in]."""
        return self.data.transpose(1, 2).reshape(-1, self.num_in)[: self.num_out]


def packed_shape(num_out: int, num_in: int) -> tuple[int, int, int]:
    """Give the shape of a packed weight's data."""
    return -(-num_out // WEIGHT_LANES), num_in, WEIGHT_LANES


def empty_packed_weight(num_out: int, num_in: int) -> PackedWeight:
    """Reserve memory for a packed weight; the caller fills all of it."""
    return PackedWeight(torch.empty(packed_shape(num_out, num_in)), num_out, num_in)
