"""Phase 7 of 11: the decoder of Llama, Mistral, Qwen2 and Qwen3, one definition, varied by ModelArch fields.

forward computes a step's hidden states, compute_logits their scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from serve.checkpoint import ModelArch
from serve.errors import ConfigError, ExitCode
from serve.kernels import ops
from serve.kernels.attention import AttentionBackend, AttentionMetadata, KVCache, select_backend
from serve.kernels.stack import Stack, StackLayer, StackRunner
from serve.models.layers.attention import Attention, AttentionGeometry
from serve.models.layers.embedding import (
    Embedding,
    OutputHead,
    PromptEmbeds,
    QuantizedEmbedding,
    load_embedding,
    load_tied_embedding,
)
from serve.models.layers.linear import LinearLayer, QuantizedLinear, kernel_parts, load_linear
from serve.models.layers.norm import RMSNorm
from serve.models.layers.rope import cos_sin_table
from serve.models.weights.loader import ParameterLoader

# Rows of the rotary table beyond the longest request: a step planned ahead may run past its end by one token.
_SPARE_POSITIONS: Final = 8
_MAX_ROTARY_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate_up maps to both halves side by side."""

    gate_up: LinearLayer
    down: LinearLayer

    def __call__(self, x: Tensor) -> Tensor:
        """Map [num_tokens, hidden_size] to the same shape."""
        return self.down(ops.silu_and_mul(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block: attention and MLP, each after a norm and added to the residual stream."""

    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's parts in the order that a token passes them."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: OutputHead


class LlamaModel:
    """A decoder with its weights. num_layers, num_kv_heads and head_size describe its cache.

    Where the device's kernels can, one call runs all layers of a step; otherwise they run op by op, as written here.
    Both give the same bits.
    """

    def __init__(self, arch: ModelArch, decoder: Decoder, *, one_call: bool = True) -> None:
        self.num_layers = arch.num_layers
        self.num_kv_heads = arch.num_kv_heads
        self.head_size = arch.head_size
        self._arch = arch
        self._decoder = decoder
        self._stack = make_stack(decoder) if one_call else None

    def op_by_op(self) -> LlamaModel:
        """Give the same model, with the same weights in memory, that computes layer by layer."""
        return LlamaModel(self._arch, self._decoder, one_call=False)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        prompt_embeds: PromptEmbeds | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Compute the last layer's output and write the tokens' keys and values to the caches.

        input_ids  [num_tokens] int32
        positions  [num_tokens] int64
        kv_caches  one for each layer, the same list in every step
        prompt_embeds  rows that are not looked up but given
        rows       [n] int64, the tokens whose hidden states are wanted, in this order; None = all
        Returns hidden_states [n or num_tokens, hidden_size] in the compute type, final norm included.
        """
        if self._stack is None:
            hidden_states = self._forward_op_by_op(input_ids, positions, kv_caches, meta, prompt_embeds)
            return hidden_states if rows is None else hidden_states[rows]
        embeds = None if prompt_embeds is None else (prompt_embeds.rows, prompt_embeds.values)
        return self._stack.forward(input_ids, positions, kv_caches, meta, embeds=embeds, rows=rows)

    @torch.inference_mode()
    def _forward_op_by_op(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        meta: AttentionMetadata,
        prompt_embeds: PromptEmbeds | None,
    ) -> Tensor:
        residual = self._decoder.embedding(input_ids)
        if prompt_embeds is not None:
            prompt_embeds.write_to(residual)
        update: Tensor | None = None
        for layer, cache in zip(self._decoder.layers, kv_caches, strict=True):
            norm = layer.input_norm
            x = norm(residual) if update is None else norm.add(update, residual)
            update = layer.attention(x, positions, cache, meta)
            update = layer.mlp(layer.post_attention_norm.add(update, residual))
        norm = self._decoder.norm
        return norm(residual) if update is None else norm.add(update, residual)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Score the vocabulary for rows of hidden states: [n, hidden_size] to float32 [n, vocab_size]."""
        if self._stack is not None:
            return self._stack.logits(hidden_states)
        with torch.inference_mode():
            return self._decoder.head(hidden_states)


def make_stack(decoder: Decoder) -> StackRunner | None:
    """Make what runs all layers by one call; None when some part has a form that only its own op computes."""
    layers = [_stack_layer(layer) for layer in decoder.layers]
    known = tuple(layer for layer in layers if layer is not None)
    head = kernel_parts(decoder.head.linear)
    if not known or len(known) < len(layers) or head is None:
        return None
    attention = decoder.layers[0].attention
    geometry = attention.geometry
    stack = Stack(
        embedding=decoder.embedding.weight,
        layers=known,
        norm=decoder.norm.weight,
        head=head,
        cos_sin=attention.cos_sin,
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        scale=geometry.scale,
        eps=decoder.norm.eps,
    )
    return ops.stack(stack)


def _stack_layer(layer: DecoderLayer) -> StackLayer | None:
    attention, mlp = layer.attention, layer.mlp
    qkv, out = kernel_parts(attention.qkv), kernel_parts(attention.out)
    gate_up, down = kernel_parts(mlp.gate_up), kernel_parts(mlp.down)
    if qkv is None or out is None or gate_up is None or down is None:
        return None
    return StackLayer(
        input_norm=layer.input_norm.weight,
        post_attention_norm=layer.post_attention_norm.weight,
        q_norm=None if attention.q_norm is None else attention.q_norm.weight,
        k_norm=None if attention.k_norm is None else attention.k_norm.weight,
        qkv=qkv,
        out=out,
        gate_up=gate_up,
        down=down,
        window=attention.geometry.window,
    )


def parameter_shapes(arch: ModelArch) -> dict[str, tuple[int, ...]]:
    """List every parameter of the architecture by its checkpoint name."""
    hidden, inner = arch.hidden_size, arch.intermediate_size
    q_size, kv_size = arch.num_heads * arch.head_size, arch.num_kv_heads * arch.head_size
    layer: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    layer["post_attention_layernorm.weight"] = (hidden,)
    linears = (
        ("self_attn.q_proj", q_size, hidden, arch.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, arch.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, arch.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, arch.o_bias),
        ("mlp.gate_proj", inner, hidden, arch.mlp_bias),
        ("mlp.up_proj", inner, hidden, arch.mlp_bias),
        ("mlp.down_proj", hidden, inner, arch.mlp_bias),
    )
    for name, num_out, num_in, has_bias in linears:
        layer[f"{name}.weight"] = (num_out, num_in)
        if has_bias:
            layer[f"{name}.bias"] = (num_out,)
    if arch.qk_norm:
        layer["self_attn.q_norm.weight"] = (arch.head_size,)
        layer["self_attn.k_norm.weight"] = (arch.head_size,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, hidden)}
    for index in range(arch.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not arch.tie_word_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    return shapes


def build_llama(arch: ModelArch, loader: ParameterLoader, max_model_len: int) -> LlamaModel:
    """Assemble the decoder from loaded parameters. max_model_len sizes the rotary table."""
    cos_sin = _rotary_table(arch, loader, max_model_len + _SPARE_POSITIONS)
    backend = select_backend(loader.device)
    ends = loader.submit(lambda: _build_ends(arch, loader))
    layers = loader.map(lambda index: _build_layer(arch, index, loader, cos_sin, backend), range(arch.num_layers))
    embedding, head = ends.result()
    norm = RMSNorm(loader.parameter("model.norm.weight"), arch.rms_norm_eps)
    return LlamaModel(arch, Decoder(embedding, tuple(layers), norm, head))


def _build_ends(arch: ModelArch, loader: ParameterLoader) -> tuple[Embedding, OutputHead]:
    prefix = "model.embed_tokens"
    parts = loader.quantized(f"{prefix}.weight")
    if parts is not None:
        is_tied = arch.tie_word_embeddings
        head = QuantizedLinear(parts, None, loader.takes_int8(parts)) if is_tied else load_linear(loader, "lm_head")
        return QuantizedEmbedding(parts[0]), OutputHead(head)
    if arch.tie_word_embeddings:
        return load_tied_embedding(loader, prefix)
    return load_embedding(loader, prefix), OutputHead(load_linear(loader, "lm_head"))


def _rotary_table(arch: ModelArch, loader: ParameterLoader, num_positions: int) -> Tensor:
    num_bytes = num_positions * arch.head_size * torch.float32.itemsize
    if num_bytes > _MAX_ROTARY_BYTES:
        raise ConfigError(
            f"a context of {num_positions} tokens needs {num_bytes / 2**30:.1f} GiB for rotary embeddings, more than "
            f"{_MAX_ROTARY_BYTES / 2**30:.0f} GiB; set a smaller --max-model-len",
            ExitCode.RESOURCES,
        )
    divisors = loader.rope_divisors()
    if divisors is not None and (divisors.shape != (arch.head_size // 2,) or not bool((divisors > 0).all())):
        raise ConfigError(
            f"the checkpoint's divisors of rotary frequencies have shape {list(divisors.shape)} or values that are "
            f"not positive; {arch.head_size // 2} positive numbers are needed",
            ExitCode.MODEL,
        )
    table = cos_sin_table(
        arch.rope_scaling,
        arch.rope_theta,
        rotary_size=arch.head_size,
        num_positions=num_positions,
        divisors=divisors,
    )
    return table.to(loader.device)


def _build_layer(
    arch: ModelArch, index: int, loader: ParameterLoader, cos_sin: Tensor, backend: AttentionBackend
) -> DecoderLayer:
    prefix = f"model.layers.{index}."
    attn = prefix + "self_attn."
    mlp = prefix + "mlp."

    def norm(name: str) -> RMSNorm:
        return RMSNorm(loader.parameter(f"{name}.weight"), arch.rms_norm_eps)

    is_windowed = not arch.sliding_layers or index in arch.sliding_layers
    attention = Attention(
        geometry=AttentionGeometry(
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_size=arch.head_size,
            scale=arch.head_size**-0.5,
            window=arch.sliding_window if is_windowed else None,
        ),
        qkv=load_linear(loader, attn + "q_proj", attn + "k_proj", attn + "v_proj", bias=arch.qkv_bias),
        out=load_linear(loader, attn + "o_proj", bias=arch.o_bias),
        q_norm=norm(attn + "q_norm") if arch.qk_norm else None,
        k_norm=norm(attn + "k_norm") if arch.qk_norm else None,
        cos_sin=cos_sin,
        backend=backend,
    )
    return DecoderLayer(
        input_norm=norm(prefix + "input_layernorm"),
        attention=attention,
        post_attention_norm=norm(prefix + "post_attention_layernorm"),
        mlp=GatedMLP(
            gate_up=load_linear(loader, mlp + "gate_proj", mlp + "up_proj", bias=arch.mlp_bias),
            down=load_linear(loader, mlp + "down_proj", bias=arch.mlp_bias),
        ),
    )
