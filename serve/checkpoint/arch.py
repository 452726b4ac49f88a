"""What a checkpoint is, the same whatever file it came from: the shape of its model and where its weights are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from serve.pooling_params import PoolingTask

PoolingType = Literal["cls", "last", "mean"]
ClassHead = Literal["linear", "bert", "roberta"]
ClassActivation = Literal["softmax", "sigmoid", "identity"]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Rotary scaling. kind: none, linear, dynamic, llama3, yarn or table; other fields as in the checkpoint's config.

    table means that the file itself holds a divisor for each frequency (GGUF tensor rope_freqs.weight).
    """

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
class EncoderArch:
    """What an encoder has besides. position_offset is the row of the position table that the first token uses."""

    layer_norm_eps: float
    num_token_types: int
    position_offset: int = 0


@dataclass(frozen=True, slots=True)
class ModelArch:
    """A model's shape, the same whatever file it came from. Lengths in elements, positions in tokens.

    max_position_embeddings is the longest context the model can serve, rotary scaling included.
    sliding_window applies to the layers listed in sliding_layers (all layers when the tuple is empty and
    sliding_window is set). checkpoint_dtype is float32, bfloat16, float16, or quantized for GGUF blocks.
    encoder is set for models whose tokens see each other in both directions and which generate nothing; the fields
    about rotary embeddings mean nothing there.
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
    encoder: EncoderArch | None = None


@dataclass(frozen=True, slots=True)
class PoolerConfig:
    """How a pooling model makes one result of a prompt's hidden states.

    task: embed gives a vector, classify one score a label. pooling_type says which rows count: the first, the last,
    or the mean of all. uses_activation: bring vectors to length 1, or class scores through activation. head names the
    layers between the pooled row and the class scores. max_seq_length is the length in tokens that the model was made
    for, None when nothing says so. dimensions are the lengths that embeddings may be cut to when is_matryoshka; empty
    means any.
    """

    task: Literal["embed", "classify"] = "embed"
    pooling_type: PoolingType = "last"
    uses_activation: bool = True
    head: ClassHead = "linear"
    activation: ClassActivation = "softmax"
    labels: tuple[str, ...] = ()
    max_seq_length: int | None = None
    is_matryoshka: bool = False
    dimensions: tuple[int, ...] = ()

    @property
    def tasks(self) -> tuple[PoolingTask, ...]:
        """What a request may ask for. The heads of encoders are made for the first row only."""
        if self.task == "embed":
            return ("embed", "token_embed")
        return ("classify", "token_classify") if self.head == "linear" else ("classify",)

    @property
    def scores_pairs(self) -> bool:
        """True for a classifier with one label: it tells how well two texts fit each other."""
        return self.task == "classify" and len(self.labels) == 1


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """One way to store matrices: codes of bits, group_size inputs with a scale in common (0: all of an output)."""

    bits: int
    group_size: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the matrices of safetensors files are stored as integers.

    method is awq, gptq or compressed-tensors. zero_shift is what has to be added to a stored zero point. activations
    names the type that the checkpoint's makers round activations to (int8), None when they leave them as they are.
    """

    method: str
    schemes: tuple[WeightScheme, ...]
    zero_shift: int = 0
    activations: str | None = None

    @property
    def description(self) -> str:
        """The kind in a few words, for people."""
        kinds = [
            f"{scheme.bits} bits, " + (f"groups of {scheme.group_size}" if scheme.group_size else "a scale an output")
            for scheme in self.schemes
        ]
        return f"{self.method} ({'; '.join(kinds)})"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk. format is "safetensors" or "gguf"; root is the folder, weight_files absolute paths.

    eos_token_ids: primary first, then secondary ones. generation_defaults: the DEFAULT_SAMPLING_KEYS that the
    model's generation_config.json sets. pooling is set when the model gives pooled results instead of tokens,
    quantization when safetensors files hold integers; a GGUF file says for each tensor how it is stored.
    """

    name: str
    root: str
    format: str
    weight_files: tuple[str, ...]
    arch: ModelArch
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: dict[str, float] = field(default_factory=dict)
    pooling: PoolerConfig | None = None
    quantization: Quantization | None = None
