"""Linear layers, fused ones included, on plain, packed or quantised weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from serve.kernels import ops
from serve.kernels.packed_weight import PackedWeight
from serve.kernels.quantized_weight import QuantizedWeight
from serve.kernels.stack import LinearParts
from serve.models.weights.loader import ParameterLoader


class LinearLayer(Protocol):
    """y = x W^T + b in one of several storage forms."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features]."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """A layer with torch's own product, weights in the compute type.

    weight  [out_features, in_features]
    bias    [out_features] or None
    """

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features]."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A layer with our kernel, weights in their own type: a row's result does not depend on the rows beside it."""

    weight: PackedWeight
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features]."""
        return ops.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """A layer on the blocks of the file; its parts, of one type each, give their outputs side by side.

    int8_activations  as for ops.linear_quantized
    """

    parts: tuple[QuantizedWeight, ...]
    bias: Tensor | None = None
    int8_activations: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features]."""
        return ops.linear_quantized(x, self.parts, self.bias, int8_activations=self.int8_activations)


def load_linear(loader: ParameterLoader, *prefixes: str, bias: bool = False) -> LinearLayer:
    """Load the layers under the prefixes as one, their outputs side by side in the order given."""
    names = [f"{prefix}.weight" for prefix in prefixes]
    added = loader.parameter(*(f"{prefix}.bias" for prefix in prefixes)) if bias else None
    parts = loader.quantized(*names)
    if parts is not None:
        return QuantizedLinear(parts, added, loader.takes_int8(parts))
    packed = loader.packed(*names)
    return PlainLinear(loader.parameter(*names), added) if packed is None else PackedLinear(packed, added)


def kernel_parts(layer: LinearLayer) -> LinearParts | None:
    """Give what a stack needs of a layer; None for a form that only its own call computes."""
    if isinstance(layer, PackedLinear):
        return LinearParts((layer.weight,), layer.bias)
    if isinstance(layer, QuantizedLinear) and all(part.input_order is None for part in layer.parts):
        return LinearParts(layer.parts, layer.bias, layer.int8_activations)
    return None
