"""Token embedding and the output head, which may be one matrix in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.kernels import ops
from serve.kernels.packed_weight import PackedWeight
from serve.kernels.quantized_weight import QuantizedWeight
from serve.models.layers.linear import LinearLayer, PackedLinear, load_linear
from serve.models.weights.loader import ParameterLoader


class Embedding(Protocol):
    """Rows of a [vocab_size, hidden_size] matrix by token id."""

    @property
    def weight(self) -> Tensor | PackedWeight | QuantizedWeight:
        """The matrix, in the form in which it is kept."""

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up [num_tokens] ids as a new tensor [num_tokens, hidden_size]."""


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """Rows of a step whose inputs are given as embeddings, not looked up.

    rows [n] int64, places in the step; values [n, hidden_size] float32.
    """

    rows: Tensor
    values: Tensor

    def write_to(self, hidden_states: Tensor) -> None:
        """Replace the rows of hidden_states [num_tokens, hidden_size]."""
        hidden_states[self.rows] = self.values.to(hidden_states.device, hidden_states.dtype)


@dataclass(frozen=True, slots=True)
class PlainEmbedding:
    """Rows of weight [vocab_size, hidden_size] as dtype, the compute type."""

    weight: Tensor
    dtype: torch.dtype

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up [num_tokens] ids as a new tensor [num_tokens, hidden_size]."""
        return F.embedding(input_ids, self.weight).to(self.dtype)


@dataclass(frozen=True, slots=True)
class PackedEmbedding:
    """Rows of the output head's packed weight, so that a tied model has the matrix once."""

    weight: PackedWeight

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up [num_tokens] ids as a new tensor [num_tokens, hidden_size]."""
        return ops.packed_rows(self.weight, input_ids)


@dataclass(frozen=True, slots=True)
class QuantizedEmbedding:
    """Rows of a matrix that stays quantised, so that a tied model has it once."""

    weight: QuantizedWeight

    def __call__(self, input_ids: Tensor) -> Tensor:
        """Look up [num_tokens] ids as a new tensor [num_tokens, hidden_size]."""
        return ops.quantized_rows(self.weight, input_ids)


@dataclass(frozen=True, slots=True)
class OutputHead:
    """Scores of every token of the vocabulary."""

    linear: LinearLayer

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Map [n, hidden_size] to float32 logits [n, vocab_size]."""
        return self.linear(hidden_states).float()


def load_tied_embedding(loader: ParameterLoader, prefix: str) -> tuple[Embedding, OutputHead]:
    """Make both ends of the model from one matrix [vocab_size, hidden_size]."""
    packed = loader.packed(f"{prefix}.weight")
    if packed is not None:
        return PackedEmbedding(packed), OutputHead(PackedLinear(packed))
    return load_embedding(loader, prefix), OutputHead(load_linear(loader, prefix))


def load_embedding(loader: ParameterLoader, prefix: str) -> PlainEmbedding:
    """Load a matrix [vocab_size, hidden_size] that is only looked up."""
    return PlainEmbedding(loader.matrix(f"{prefix}.weight"), loader.dtype)
