"""Checkpoint names as data: how GGUF calls each parameter, and which tensors of a file mean nothing here.

Parameters are known by the names that safetensors checkpoints use.
"""

from __future__ import annotations

import re
from typing import Final

GGUF_TOP: Final[dict[str, str]] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
# Part of a layer, without "blk.N." and ".weight" or ".bias".
GGUF_LAYER: Final[dict[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GGUF_ROPE_DIVISORS: Final = "rope_freqs.weight"
# Buffers that older exports saved; the rotary table is computed.
_IGNORED: Final = re.compile(r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)|rope_freqs\.weight")
_LAYER: Final = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_ROTATED: Final = re.compile(r"blk\.\d+\.attn_(q|k)\.(weight|bias)")


def parameter_name(gguf_name: str) -> str:
    """Translate a GGUF tensor name; unknown names come back unchanged."""
    if gguf_name in GGUF_TOP:
        return GGUF_TOP[gguf_name]
    match = _LAYER.fullmatch(gguf_name)
    if match is None or match[2] not in GGUF_LAYER:
        return gguf_name
    return f"model.layers.{match[1]}.{GGUF_LAYER[match[2]]}.{match[3]}"


def is_ignored(name: str) -> bool:
    """Tell whether a tensor of a checkpoint carries no parameter."""
    return _IGNORED.fullmatch(name) is not None


def rotated_heads(gguf_name: str, *, num_heads: int, num_kv_heads: int) -> int | None:
    """Give the number of heads when the tensor's rows are queries or keys, else None.

    Files of the llama architecture store those rows with the two halves of each head interleaved.
    """
    match = _ROTATED.fullmatch(gguf_name)
    if match is None:
        return None
    return num_heads if match[1] == "q" else num_kv_heads
