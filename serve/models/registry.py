"""The table of architectures, and the one call that turns a checkpoint into a model.

Phase 7 of 11 begins here at start-up: the worker loads its model through load_model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from serve.checkpoint import Checkpoint, ModelArch
from serve.config import ModelConfig
from serve.errors import ConfigError, ExitCode
from serve.kernels.attention import AttentionMetadata, KVCache
from serve.models.layers.embedding import PromptEmbeds
from serve.models.llama import build_llama, parameter_shapes
from serve.models.weights.loader import ParameterLoader, open_weights
from serve.models.weights.packed_cache import open_cache_entry

DTYPES: Final[dict[str, torch.dtype]] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class CausalLM(Protocol):
    """A model that a builder gives: what the runner calls, and the shape of the caches to call it with."""

    num_layers: int
    num_kv_heads: int
    head_size: int

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        prompt_embeds: PromptEmbeds | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute hidden_states [num_tokens, hidden_size] and write the tokens' keys and values to the caches.

        With rows [n] int64 only these tokens' hidden states are given, in this order: [n, hidden_size].
        """

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Score the vocabulary for rows of hidden states: float32 [n, vocab_size] in new memory."""


Builder = Callable[[ModelArch, ParameterLoader, int], CausalLM]
# Architecture name of the checkpoint -> builder. checkpoint.FAMILIES has the same names.
BUILDERS: Final[dict[str, Builder]] = {
    "LlamaForCausalLM": build_llama,
    "MistralForCausalLM": build_llama,
    "Qwen2ForCausalLM": build_llama,
    "Qwen3ForCausalLM": build_llama,
}


def load_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cache_folder: Path | None = None,
) -> CausalLM:
    """Build the checkpoint's model with its weights, or seeded random ones for load_format dummy.

    cache_folder is where packed weights are kept between starts, None to keep none.
    Raises ConfigError (exit code MODEL) for an unknown architecture and for weights that do not fit it.
    """
    arch = checkpoint.arch
    builder = BUILDERS.get(arch.architecture)
    if builder is None:
        supported = ", ".join(BUILDERS)
        raise ConfigError(
            f"architecture {arch.architecture!r} is not supported; supported: {supported}", ExitCode.MODEL
        )
    is_dummy = config.load_format == "dummy"
    source = open_weights(checkpoint, parameter_shapes(arch), dummy_seed=config.seed if is_dummy else None)
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
        return builder(arch, loader, max_model_len)


def compute_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> torch.dtype:
    """Give the type of activations: float32 on the CPU; elsewhere --dtype, for auto the checkpoint's own."""
    if device.type == "cpu":
        return torch.float32
    if name != "auto":
        return DTYPES[name]
    return DTYPES.get(checkpoint.arch.checkpoint_dtype, torch.bfloat16)


def weight_dtype(name: str) -> torch.dtype | None:
    """Give the type that --dtype rounds weights to; None for auto, which keeps them as the checkpoint has them."""
    return None if name == "auto" else DTYPES[name]


def dtype_description(name: str, checkpoint: Checkpoint, device: torch.device) -> str:
    """Say which type activations have and, where it is another, which type weights have."""
    compute = str(compute_dtype(name, checkpoint, device)).removeprefix("torch.")
    weights = checkpoint.arch.checkpoint_dtype if name == "auto" else name
    if checkpoint.quantization is not None and name == "auto":
        weights = checkpoint.quantization.description
    return compute if weights == compute else f"{compute} (weights {weights})"
