"""Seeded random weights in the right shapes, to try sizes and speed without a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from serve.kernels.quantized_weight import QuantizedBlocks

# Small enough that activations stay in range through many layers in float16.
_HALF_WIDTH: Final = 0.02


class DummySource:
    """Uniform random matrices and biases and norms of one; each tensor depends on seed and name only."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: torch.dtype) -> None:
        self._shapes = shapes
        self._seed = seed
        self._dtype = dtype

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors."""
        return self._shapes

    def read(self, name: str, out: Tensor) -> None:
        """Fill out with the tensor's values."""
        if name.endswith("norm.weight"):
            out.fill_(1.0)
            return
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        out.uniform_(-_HALF_WIDTH, _HALF_WIDTH, generator=generator)

    def dtype(self, name: str) -> torch.dtype:
        """Give the type in which the numbers are made."""
        return self._dtype

    def mapped(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Give None: there is no file."""
        return None

    def blocks(self, name: str) -> QuantizedBlocks | None:
        """Give None: nothing is quantised here."""
        return None

    def rope_divisors(self) -> Tensor | None:
        """Give None: there is no file."""
        return None
