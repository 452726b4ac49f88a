"""Reads the description of encoders: BERT and its RoBERTa relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from serve.checkpoint.arch import EncoderArch, ModelArch
from serve.checkpoint.fields import MAX_LAYERS, Fields, checkpoint_dtype, fail

_ACTIVATIONS: Final = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """What an encoder's architecture name implies.

    counts_from_pad: positions are numbered from the pad token's id plus one.
    """

    counts_from_pad: bool


_BERT: Final = EncoderFamily(counts_from_pad=False)
_ROBERTA: Final = EncoderFamily(counts_from_pad=True)
ENCODERS: Final[dict[str, EncoderFamily]] = {
    "BertModel": _BERT,
    "BertForMaskedLM": _BERT,
    "BertForSequenceClassification": _BERT,
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForMaskedLM": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA,
}


def encoder_arch(config: Fields, architecture: str) -> ModelArch:
    """Read the shape of an encoder. Raises ConfigError."""
    family = ENCODERS[architecture]
    num_heads, hidden_size = config.integer("num_attention_heads"), config.integer("hidden_size")
    if hidden_size % num_heads:
        fail(config.path, f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    kind = config.text("position_embedding_type", "absolute")
    if kind != "absolute":
        fail(config.path, f"position_embedding_type {kind!r} is not supported; supported: absolute")
    if config.boolean("is_decoder", False):
        fail(config.path, "is_decoder is set; encoders that generate text are not supported")
    activation = config.text("hidden_act", "gelu") or ""
    if activation not in _ACTIVATIONS:
        fail(config.path, f"hidden_act {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    offset = config.integer("pad_token_id", 1, minimum=0) + 1 if family.counts_from_pad else 0
    num_positions = config.integer("max_position_embeddings", 512) - offset
    if num_positions < 1:
        fail(config.path, f"max_position_embeddings leaves no position after the {offset} reserved ones")
    eps = config.number("layer_norm_eps", 1e-12)
    return ModelArch(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=hidden_size // num_heads,
        rms_norm_eps=eps,
        max_position_embeddings=num_positions,
        rope_theta=0.0,
        hidden_act=_ACTIVATIONS[activation],
        checkpoint_dtype=checkpoint_dtype(config),
        encoder=EncoderArch(eps, config.integer("type_vocab_size", 2), offset),
    )
