"""Reads the header of a GGUF file as a model's description."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from serve.checkpoint.arch import Checkpoint, ModelArch, RopeScaling
from serve.checkpoint.fields import MAX_LAYERS, Fields, check_rope, fail, producible
from serve.checkpoint.folder import FAMILIES
from serve.gguf import GGUFHeader, read_gguf_header

_GGUF_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def from_gguf(path: Path, name: str) -> Checkpoint:
    """Describe a .gguf file. Raises ConfigError."""
    header = read_gguf_header(path)
    arch = _arch_from_gguf(path, header)
    eos = [header.get_int(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return Checkpoint(
        name=name,
        root=str(path.resolve().parent),
        format="gguf",
        weight_files=(str(path.resolve()),),
        arch=arch,
        eos_token_ids=producible([i for i in eos if i is not None], arch),
        bos_token_id=header.get_int("tokenizer.ggml.bos_token_id"),
    )


def _arch_from_gguf(path: Path, header: GGUFHeader) -> ModelArch:
    prefix = header.get_str("general.architecture")
    if prefix not in _GGUF_ARCHITECTURES:
        supported = ", ".join(_GGUF_ARCHITECTURES)
        fail(path, f"GGUF architecture {prefix!r} is not supported; supported: {supported}")
    if (header.get_int("split.count") or 1) > 1:
        fail(path, "is one part of a split file; merge the parts with llama-gguf-split --merge")
    if (header.get_int(f"{prefix}.expert_count") or 0) > 0:
        fail(path, "is a mixture of experts, which is not supported")
    fields = Fields(path, _own_metadata(header, prefix))
    num_heads = fields.integer("attention.head_count")
    num_kv_heads = fields.integer("attention.head_count_kv", num_heads)
    hidden_size = fields.integer("embedding_length")
    head_size = fields.integer("attention.key_length", max(hidden_size // num_heads, 1))
    if num_heads % num_kv_heads or head_size % 2 or head_size < 4:
        fail(path, f"{num_heads} heads, {num_kv_heads} kv heads and head size {head_size} do not go together")
    if fields.integer("attention.value_length", head_size) != head_size:
        fail(path, "keys and values of different sizes are not supported")
    if fields.integer("rope.dimension_count", head_size) != head_size:
        fail(path, "rotary embeddings on a part of the head are not supported")
    scaling, context = _rope_from_gguf(fields, header)
    architecture = _GGUF_ARCHITECTURES[prefix]
    embedding = header.tensors.get("token_embd.weight")
    return ModelArch(
        architecture=architecture,
        vocab_size=embedding.shape[0] if embedding is not None else fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=fields.integer("block_count", maximum=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=context,
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=scaling,
        tie_word_embeddings="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        o_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        qk_norm=FAMILIES[architecture].qk_norm,
        sliding_window=fields.integer("attention.sliding_window", 0, minimum=0) or None,
        checkpoint_dtype=_gguf_dtype(header),
    )


def _own_metadata(header: GGUFHeader, prefix: str) -> dict[str, object]:
    """Pick the entries under the architecture's name; lists of one value per layer that are all equal become it."""
    own: dict[str, object] = {}
    for key, value in header.metadata.items():
        if key.startswith(prefix + "."):
            is_uniform = isinstance(value, list) and value and all(item == value[0] for item in value)
            own[key.removeprefix(prefix + ".")] = value[0] if is_uniform and isinstance(value, list) else value
    return own


def _rope_from_gguf(fields: Fields, header: GGUFHeader) -> tuple[RopeScaling, int]:
    """Read the scaling; context_length already includes it in this format."""
    context = fields.integer("context_length")
    kind = fields.text("rope.scaling.type") or "none"
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "none" and fields.has("rope.scale_linear"):
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        fail(fields.path, f"rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    original = fields.integer("rope.scaling.original_context_length", context)
    scaling = RopeScaling(kind=kind, factor=factor, original_max_position=original)
    check_rope(fields.path, fields.number("rope.freq_base", 10000.0), scaling)
    if "rope_freqs.weight" in header.tensors:
        return RopeScaling(kind="table"), context
    if kind == "none" or factor == 1.0:
        return RopeScaling(), context
    return scaling, context


def _gguf_dtype(header: GGUFHeader) -> str:
    plain = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    matrices = {info.type.name for info in header.tensors.values() if len(info.shape) > 1}
    if len(matrices) == 1:
        return plain.get(matrices.pop(), "quantized")
    return "quantized"
