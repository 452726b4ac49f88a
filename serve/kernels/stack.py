"""A decoder's layers as one call computes them: what they consist of, and what runs them."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from serve.kernels.kv_cache import AttentionMetadata, KVCache
from serve.kernels.packed_weight import PackedWeight
from serve.kernels.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class LinearParts:
    """A linear layer: weights of the same inputs, their outputs side by side, and a bias of all outputs.

    int8_activations  as for linear_quantized, of quantised weights
    """

    weights: tuple[PackedWeight | QuantizedWeight, ...]
    bias: Tensor | None = None
    int8_activations: bool = False

    @property
    def num_in(self) -> int:
        """Inputs of every part."""
        return self.weights[0].num_in

    @property
    def num_out(self) -> int:
        """Outputs of all parts."""
        return sum(weight.num_out for weight in self.weights)


@dataclass(frozen=True, slots=True)
class StackLayer:
    """One decoder layer. window is in tokens, None = full attention."""

    input_norm: Tensor
    post_attention_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: LinearParts
    out: LinearParts
    gate_up: LinearParts
    down: LinearParts
    window: int | None


@dataclass(frozen=True, slots=True)
class Stack:
    """A whole decoder: rows of the embedding, layers, last norm, output head.

    embedding  plain [vocab_size, hidden_size], or the output head's own weight
    cos_sin    [max_position, rotary_size] as for rope_
    """

    embedding: Tensor | PackedWeight | QuantizedWeight
    layers: tuple[StackLayer, ...]
    norm: Tensor
    head: LinearParts
    cos_sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    eps: float


class StackRunner(Protocol):
    """Runs the steps of one stack, one at a time."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        *,
        embeds: tuple[Tensor, Tensor] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Write the tokens' keys and values to the caches and give hidden states after the last norm.

        input_ids  [num_tokens] int32
        positions  [num_tokens] int64
        kv_caches  one for each layer; a list that stays the same from step to step is described once
        embeds     tokens [n] int64 whose rows are given, not looked up, and the rows [n, hidden_size] float32
        rows       tokens [m] int64 whose hidden states are wanted, in this order; None = all
        Returns new float32 memory [m, hidden_size]. What is refused leaves the caches untouched.
        """

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Score the vocabulary for rows of hidden states: float32 [n, vocab_size] in new memory."""
