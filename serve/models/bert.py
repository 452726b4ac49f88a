"""The encoder of BERT, RoBERTa and XLM-RoBERTa: tokens see each other in both directions, and nothing is generated.

Phase 7 of 11 for pooling models of this kind. Source: arXiv 1810.04805 (BERT), 1907.11692 (RoBERTa).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from serve.checkpoint import EncoderArch, ModelArch
from serve.kernels import ops
from serve.kernels.attention import AttentionMetadata
from serve.models.layers.linear import LinearLayer, load_linear
from serve.models.layers.norm import LayerNorm
from serve.models.weights.loader import ParameterLoader

ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class EncoderEmbedding:
    """The sum of a token's, its position's and its segment's vectors, normalised.

    words may have another type than the others, which have the compute type.
    """

    words: Tensor
    positions: Tensor
    token_types: Tensor
    norm: LayerNorm
    position_offset: int

    def __call__(self, input_ids: Tensor, positions: Tensor, token_types: Tensor) -> Tensor:
        """Map three times [num_tokens] to [num_tokens, hidden_size]."""
        hidden = F.embedding(input_ids, self.words).to(self.positions.dtype)
        hidden += F.embedding(positions + self.position_offset, self.positions)
        hidden += F.embedding(token_types, self.token_types)
        return self.norm(hidden)


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """Attention and a two-layer MLP; each is added to its input and the sum normalised."""

    num_heads: int
    qkv: LinearLayer
    attention_out: LinearLayer
    attention_norm: LayerNorm
    up: LinearLayer
    activation: Callable[[Tensor], Tensor]
    down: LinearLayer
    output_norm: LayerNorm

    def __call__(self, x: Tensor, meta: AttentionMetadata) -> Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        num_tokens, hidden_size = x.shape
        heads = self.qkv(x).view(num_tokens, 3, self.num_heads, hidden_size // self.num_heads)
        attended = torch.empty_like(x).view(num_tokens, self.num_heads, -1)
        scale = heads.shape[-1] ** -0.5
        ops.encoder_attention(heads[:, 0], heads[:, 1], heads[:, 2], meta, attended, scale=scale)
        x = self.attention_norm(self.attention_out(attended.view(num_tokens, hidden_size)) + x)
        return self.output_norm(self.down(self.activation(self.up(x))) + x)


class EncoderModel:
    """An encoder with its weights."""

    def __init__(self, embedding: EncoderEmbedding, layers: list[EncoderLayer]) -> None:
        self._embedding = embedding
        self._layers = layers

    def forward(self, input_ids: Tensor, positions: Tensor, token_types: Tensor, meta: AttentionMetadata) -> Tensor:
        """Compute the last layer's output.

        input_ids, positions, token_types  [num_tokens] integers
        meta                               requests of which every token is in the batch
        Returns hidden_states [num_tokens, hidden_size] in the compute type.
        """
        hidden = self._embedding(input_ids, positions, token_types)
        for layer in self._layers:
            hidden = layer(hidden, meta)
        return hidden


def encoder_arch_of(arch: ModelArch) -> EncoderArch:
    """Give the part of the description that only encoders have."""
    assert arch.encoder is not None, f"{arch.architecture} is not an encoder"
    return arch.encoder


def encoder_shapes(arch: ModelArch) -> dict[str, tuple[int, ...]]:
    """List every parameter of the encoder, heads excluded, by its checkpoint name."""
    encoder = encoder_arch_of(arch)
    hidden, inner = arch.hidden_size, arch.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (arch.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (arch.max_position_embeddings + encoder.position_offset, hidden),
        "embeddings.token_type_embeddings.weight": (encoder.num_token_types, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    linears = (
        ("attention.self.query", hidden, hidden),
        ("attention.self.key", hidden, hidden),
        ("attention.self.value", hidden, hidden),
        ("attention.output.dense", hidden, hidden),
        ("intermediate.dense", inner, hidden),
        ("output.dense", hidden, inner),
    )
    for index in range(arch.num_layers):
        layer = f"encoder.layer.{index}."
        for name, num_out, num_in in linears:
            shapes[f"{layer}{name}.weight"] = (num_out, num_in)
            shapes[f"{layer}{name}.bias"] = (num_out,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
            shapes[f"{layer}{name}.bias"] = (hidden,)
    return shapes


def build_encoder(arch: ModelArch, loader: ParameterLoader) -> EncoderModel:
    """Assemble the encoder from loaded parameters."""
    encoder = encoder_arch_of(arch)
    embedding = EncoderEmbedding(
        words=loader.matrix("embeddings.word_embeddings.weight"),
        positions=loader.parameter("embeddings.position_embeddings.weight"),
        token_types=loader.parameter("embeddings.token_type_embeddings.weight"),
        norm=_load_norm(loader, "embeddings.LayerNorm", encoder.layer_norm_eps),
        position_offset=encoder.position_offset,
    )
    return EncoderModel(embedding, loader.map(lambda index: _build_layer(arch, index, loader), range(arch.num_layers)))


def _load_norm(loader: ParameterLoader, prefix: str, eps: float) -> LayerNorm:
    return LayerNorm(loader.parameter(f"{prefix}.weight"), loader.parameter(f"{prefix}.bias"), eps)


def _build_layer(arch: ModelArch, index: int, loader: ParameterLoader) -> EncoderLayer:
    eps = encoder_arch_of(arch).layer_norm_eps
    prefix = f"encoder.layer.{index}."
    own = prefix + "attention.self."
    return EncoderLayer(
        num_heads=arch.num_heads,
        qkv=load_linear(loader, own + "query", own + "key", own + "value", bias=True),
        attention_out=load_linear(loader, prefix + "attention.output.dense", bias=True),
        attention_norm=_load_norm(loader, prefix + "attention.output.LayerNorm", eps),
        up=load_linear(loader, prefix + "intermediate.dense", bias=True),
        activation=ACTIVATIONS[arch.hidden_act],
        down=load_linear(loader, prefix + "output.dense", bias=True),
        output_norm=_load_norm(loader, prefix + "output.LayerNorm", eps),
    )
