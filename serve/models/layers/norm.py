"""Normalisation of activations: by root mean square, or by mean and variance."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from serve.kernels import ops


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """Scale to unit mean square, then by weight [size of the last dimension]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension into a new tensor."""
        return ops.rms_norm(x, self.weight, self.eps)

    def inplace(self, x: Tensor) -> None:
        """Normalise the last dimension of x itself; rows may be strided."""
        ops.rms_norm(x, self.weight, self.eps, out=x)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to residual in place and normalise the sum."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Shift and scale to mean 0 and variance 1, then by weight and bias [size of the last dimension]."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise the last dimension into a new tensor."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
