"""Reads a model folder: config.json, generation_config.json and the list of safetensors files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from serve.checkpoint.arch import Checkpoint, ModelArch, RopeScaling
from serve.checkpoint.encoder import ENCODERS, encoder_arch
from serve.checkpoint.fields import MAX_LAYERS, Fields, check_rope, checkpoint_dtype, fail, producible, read_json
from serve.checkpoint.pooling import DECODER_ALIASES, pooler_config
from serve.checkpoint.quantization import read_quantization
from serve.sampling_params import DEFAULT_SAMPLING_KEYS


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture name implies beyond its config.json.

    The booleans are biases and norms that the layers have whatever the config says; the *_default fields are what
    an absent config entry means.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    window_needs_switch: bool = False
    head_dim_default: int | None = None
    max_position_default: int = 2048


FAMILIES: Final[dict[str, Family]] = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(max_position_default=131072),
    "Qwen2ForCausalLM": Family(qkv_bias=True, window_needs_switch=True, max_position_default=32768),
    "Qwen3ForCausalLM": Family(
        qk_norm=True,
        reads_attention_bias=True,
        window_needs_switch=True,
        head_dim_default=128,
        max_position_default=32768,
    ),
}
# model_type of config.json, for folders whose config names no architecture.
_MODEL_TYPES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "bert": "BertModel",
    "roberta": "RobertaModel",
    "xlm-roberta": "XLMRobertaModel",
}


def read_generation_config(folder: str | Path, *, required: bool = False) -> dict[str, object]:
    """Read generation_config.json of a folder; an absent file gives an empty object, or ConfigError when required."""
    return read_json(Path(folder) / "generation_config.json", required=required)


def sampling_defaults(generation_config: Mapping[str, object]) -> dict[str, float]:
    """Pick the sampling values that a generation config sets; values that are not finite numbers are left out."""
    defaults: dict[str, float] = {}
    for key in DEFAULT_SAMPLING_KEYS:
        value = generation_config.get(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < float("inf"):
            defaults[key] = value
    return defaults


def from_folder(folder: Path, name: str, need_weights: bool) -> Checkpoint:
    """Describe a folder with config.json. Raises ConfigError."""
    config = Fields(folder / "config.json", read_json(folder / "config.json", required=True))
    architecture = _architecture(config)
    quantization = read_quantization(folder, config)
    if architecture in ENCODERS:
        arch = encoder_arch(config, architecture)
    else:
        arch = _arch_from_config(config, DECODER_ALIASES.get(architecture, architecture))
    generation = read_generation_config(folder)
    eos = _eos_ids(folder, config, Fields(folder / "generation_config.json", generation))
    return Checkpoint(
        name=name,
        root=str(folder.resolve()),
        format="safetensors",
        weight_files=_weight_files(folder) if need_weights else (),
        arch=arch,
        eos_token_ids=producible(eos, arch),
        bos_token_id=next(iter(config.ids("bos_token_id")), None),
        generation_defaults=sampling_defaults(generation),
        pooling=pooler_config(folder, config, architecture),
        quantization=quantization,
    )


def _arch_from_config(config: Fields, architecture: str) -> ModelArch:
    family = FAMILIES[architecture]
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        fail(config.path, f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
    hidden_size = config.integer("hidden_size")
    head_size = config.integer("head_dim", family.head_dim_default or max(hidden_size // num_heads, 1))
    if head_size % 2 or head_size < 4:
        fail(config.path, f"head size {head_size} is not an even number of at least 4, as rotary embeddings need")
    rope_theta, scaling, context = _rope_from_config(
        config, config.integer("max_position_embeddings", family.max_position_default)
    )
    window, sliding_layers = _sliding_window(config, family, num_layers)
    attention_bias = family.reads_attention_bias and config.boolean("attention_bias", False)
    return ModelArch(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=context,
        rope_theta=rope_theta,
        rope_scaling=scaling,
        hidden_act=_activation(config),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and config.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        sliding_window=window,
        sliding_layers=sliding_layers,
        checkpoint_dtype=checkpoint_dtype(config),
    )


def _architecture(config: Fields) -> str:
    names = config.texts("architectures") or []
    model_type = config.text("model_type") or ""
    architecture = names[0] if names else _MODEL_TYPES.get(model_type, model_type)
    if not architecture:
        fail(config.path, "names no architecture (architectures, model_type)")
    supported = (*FAMILIES, *DECODER_ALIASES, *ENCODERS)
    if architecture not in supported:
        fail(config.path, f"architecture {architecture!r} is not supported; supported: {', '.join(supported)}")
    return architecture


def _activation(config: Fields) -> str:
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fail(config.path, f"hidden_act {activation!r} is not supported; supported: silu")
    return "silu"


def _sliding_window(config: Fields, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """Find the window and the layers that use it (empty = all of them)."""
    if not config.has("sliding_window"):
        return None, ()
    if not family.window_needs_switch:
        # Llama configs may carry the key without meaning it; Mistral's is for all layers.
        is_mistral = family is FAMILIES["MistralForCausalLM"]
        return (config.integer("sliding_window"), ()) if is_mistral else (None, ())
    if not config.boolean("use_sliding_window", False):
        return None, ()
    kinds = config.texts("layer_types")
    if kinds is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        layers = tuple(range(min(first, num_layers), num_layers))
    else:
        layers = tuple(i for i, kind in enumerate(kinds[:num_layers]) if kind == "sliding_attention")
    if not layers:
        return None, ()
    return config.integer("sliding_window"), () if len(layers) == num_layers else layers


def _rope_from_config(config: Fields, max_positions: int) -> tuple[float, RopeScaling, int]:
    """Read base, scaling and the context length that scaling makes possible.

    Older files have rope_theta and rope_scaling at the top, newer ones both in rope_parameters.
    """
    params = config.child("rope_parameters") or config.child("rope_scaling") or Fields(config.path, {})
    theta = params.number("rope_theta", config.number("rope_theta", 10000.0))
    check_rope(config.path, theta, RopeScaling())
    if params.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        fail(config.path, "partial_rotary_factor other than 1 is not supported")
    kind = params.text("rope_type") or params.text("type") or "default"
    if kind == "default":
        return theta, RopeScaling(), max_positions
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        fail(config.path, f"rope type {kind!r} is not supported; supported: default, linear, dynamic, llama3, yarn")
    original = params.integer(
        "original_max_position_embeddings", config.integer("original_max_position_embeddings", max_positions)
    )
    if kind == "dynamic":
        original = max_positions
    scaling = RopeScaling(
        kind=kind,
        factor=params.number("factor", max_positions / original if kind == "yarn" else None),
        original_max_position=original,
        low_freq_factor=params.number("low_freq_factor", 1.0),
        high_freq_factor=params.number("high_freq_factor", 4.0),
        attention_factor=params.optional_number("attention_factor"),
        beta_fast=params.number("beta_fast", 32.0),
        beta_slow=params.number("beta_slow", 1.0),
        mscale=params.number("mscale", 0.0),
        mscale_all_dim=params.number("mscale_all_dim", 0.0),
        truncate=params.boolean("truncate", True),
    )
    check_rope(config.path, theta, scaling)
    if kind == "llama3":
        return theta, scaling, max_positions
    base_length = original if kind == "yarn" else max_positions
    return theta, scaling, max(max_positions, int(base_length * scaling.factor))


def _weight_files(folder: Path) -> tuple[str, ...]:
    """Find the safetensors files of a folder, from the index when there is one."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = read_json(index_path, required=True).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            fail(index_path, "has no weight_map")
        names = sorted({str(value) for value in weight_map.values()})
        # A name is a file beside the index, never a path.
        bad = [name for name in names if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", name)]
        if bad:
            fail(index_path, f"names {bad[0]!r}, which is not the name of a safetensors file")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            fail(index_path, f"{len(missing)} of {len(names)} files are missing: {', '.join(missing[:4])}")
        return tuple(str((folder / name).resolve()) for name in names)
    single = folder / "model.safetensors"
    # consolidated.safetensors repeats the same weights under other names.
    others = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    files = [single] if single.is_file() else others
    if not files:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
            fail(folder, "has only .bin or .pth weights, which can carry code; convert them to safetensors")
        fail(folder, "has no .safetensors files")
    return tuple(str(p.resolve()) for p in files)


def _eos_ids(folder: Path, config: Fields, generation: Fields) -> tuple[int, ...]:
    """Collect the ids that end a text: the tokenizer's own first, then those of the two config files."""
    primary = _tokenizer_eos_id(folder)
    listed = generation.ids("eos_token_id") or config.ids("eos_token_id")
    return listed if primary is None else (primary, *listed)


def _tokenizer_eos_id(folder: Path) -> int | None:
    path = folder / "tokenizer_config.json"
    content = read_json(path, required=False)
    token = content.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    added = content.get("added_tokens_decoder")
    if isinstance(added, dict):
        for key, entry in added.items():
            if isinstance(entry, dict) and entry.get("content") == token and key.isdecimal():
                return int(key)
    return _id_in_tokenizer_json(folder / "tokenizer.json", token)


def _id_in_tokenizer_json(path: Path, token: str) -> int | None:
    content = read_json(path, required=False)
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == token and isinstance(entry.get("id"), int):
            return int(entry["id"])
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = vocab.get(token) if isinstance(vocab, dict) else None
    return found if isinstance(found, int) else None
