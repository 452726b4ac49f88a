"""Finds a checkpoint's files and reads its description: config.json or GGUF header to ModelArch; no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling. kind: none, linear, dynamic, llama3 or yarn; the other fields as in the checkpoint's config."""

    kind: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelArch:
    """A decoder's shape, the same whatever file it came from. Lengths in elements, positions in tokens.

    sliding_window applies to the layers listed in sliding_layers (all layers when the tuple is empty and
    sliding_window is set). checkpoint_dtype is float32, bfloat16, float16, or quantized for GGUF blocks.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    checkpoint_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. format is "safetensors" or "gguf"; root is the folder, weight_files absolute paths.

    eos_token_ids: primary first, then secondary ones. generation_defaults: sampling values of the model's
    generation_config.json (temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens) that it sets.
    """

    name: str
    root: str
    format: str
    weight_files: tuple[str, ...]
    arch: ModelArch
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: dict[str, float] = field(default_factory=dict)
