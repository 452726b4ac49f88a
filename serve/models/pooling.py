"""Pooling models: a backbone, decoder or encoder, with a pooler behind it.

Phase 7 of 11 begins here at start-up for them: the worker loads its model through load_pooling_model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from serve.checkpoint import Checkpoint, ModelArch
from serve.config import ModelConfig
from serve.kernels.attention import AttentionMetadata, KVCache
from serve.models.bert import build_encoder, encoder_shapes
from serve.models.llama import build_llama, parameter_shapes
from serve.models.pooler import Pooler, build_pooler, head_shapes
from serve.models.registry import weight_dtype
from serve.models.weights.loader import ParameterLoader, open_weights
from serve.models.weights.packed_cache import open_cache_entry

_ENCODER_PREFIX: Final = re.compile(r"(bert|roberta)\.")
# A decoder that was saved without a head has its parameters at the top.
_DECODER_TOP: Final = re.compile(r"(embed_tokens|layers|norm)\.")
_OLD_NORM: Final = {"gamma": "weight", "beta": "bias"}
# Heads for tasks that are not asked for.
_UNUSED: Final = re.compile(r"(cls|lm_head|score|classifier|pooler\.dense)\..*")


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a backbone computes from: the tokens of a step, their places, and the segment that each belongs to.

    input_ids    [num_tokens] int32
    positions    [num_tokens] int64
    token_types  [num_tokens] int64, 1 for the second text of a pair
    """

    input_ids: Tensor
    positions: Tensor
    token_types: Tensor
    meta: AttentionMetadata


Backbone = Callable[[StepInputs, list[KVCache]], Tensor]


class PoolingModel:
    """A backbone and its pooler. Calling forward gives hidden_states [num_tokens, hidden_size]."""

    def __init__(self, forward: Backbone, pooler: Pooler) -> None:
        self.forward = forward
        self.pooler = pooler


def load_pooling_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cache_folder: Path | None = None,
) -> PoolingModel:
    """Build a checkpoint's model with its weights, or seeded random ones for load_format dummy.

    cache_folder is where packed weights are kept between starts, None to keep none.
    Raises ConfigError (exit code MODEL) for weights that do not fit the architecture.
    """
    pooler_config = checkpoint.pooling
    assert pooler_config is not None, f"{checkpoint.name} is not a pooling model"
    # The output head of a decoder is never used; tied, it needs no tensor of its own.
    arch = replace(checkpoint.arch, tie_word_embeddings=True)
    shapes = encoder_shapes(arch) if arch.encoder is not None else parameter_shapes(arch)
    shapes |= head_shapes(arch, pooler_config)

    def rename(name: str) -> str | None:
        own = encoder_parameter(name) if arch.encoder is not None else decoder_parameter(name)
        return own if own in shapes or not _UNUSED.fullmatch(own) else None

    seed = config.seed if config.load_format == "dummy" else None
    source = open_weights(checkpoint, shapes, dummy_seed=seed, rename=rename)
    limit = config.max_model_len
    max_model_len = limit if limit is not None and limit > 0 else arch.max_position_embeddings
    cache = open_cache_entry(checkpoint, config, cache_folder, device=device)
    with ParameterLoader(
        source,
        dtype=dtype,
        device=device,
        weight_dtype=weight_dtype(config.dtype),
        cache=cache,
        int8_activations=config.cpu_activations == "int8",
    ) as loader:
        backbone = _build_backbone(arch, loader, max_model_len)
        return PoolingModel(backbone, build_pooler(pooler_config, loader, dtype))


def _build_backbone(arch: ModelArch, loader: ParameterLoader, max_model_len: int) -> Backbone:
    if arch.encoder is not None:
        encoder = build_encoder(arch, loader)
        return lambda inputs, _: encoder.forward(inputs.input_ids, inputs.positions, inputs.token_types, inputs.meta)
    decoder = build_llama(arch, loader, max_model_len)
    return lambda inputs, caches: decoder.forward(inputs.input_ids, inputs.positions, caches, inputs.meta)


def encoder_parameter(name: str) -> str:
    """Give our name of a tensor of an encoder's checkpoint."""
    stem, _, last = _ENCODER_PREFIX.sub("", name, count=1).rpartition(".")
    return f"{stem}.{_OLD_NORM.get(last, last)}" if "LayerNorm" in stem else f"{stem}.{last}".removeprefix(".")


def decoder_parameter(name: str) -> str:
    """Give our name of a tensor of a decoder's checkpoint."""
    return f"model.{name}" if _DECODER_TOP.match(name) else name
