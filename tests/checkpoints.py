"""Writes tiny seeded checkpoints that real servers and transformers can load: weights, config and a tokenizer.

Sizes are odd on purpose: heads differ from kv heads, head_dim is not hidden / heads, the vocabulary is not a multiple
of 64. Folders come from transformers' own save_pretrained, GGUF files from the gguf package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE: Final = 331
MAX_MODEL_LEN: Final = 512
FAMILIES: Final[dict[str, type[PreTrainedConfig]]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
BOS, EOS, END_OF_TURN = "<|endoftext|>", "<|im_end|>", "<|eot|>"
SPECIAL_TOKENS: Final = (BOS, "<|im_start|>", EOS, END_OF_TURN)
CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the vocabulary is learned from; any text does, this one has accents, digits and an emoji.
TRAINING_TEXT: Final = (
    "The quick brown fox jumps over the lazy dog. The other day the author thought there was nothing there.",
    "In the beginning there were 12 tokens, then 345, then 6789; each of them was the answer to another question.",
    "Caf\u00e9 na\u00efve \u00fcber stra\u00dfe \u4f60\u597d \u4e16\u754c \U0001f600 and the rest of the world.",
)


def write_checkpoint(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **changes: object,
) -> Path:
    """Write a seeded model of a family with its tokenizer; changes go to its transformers config. Returns folder."""
    model = build_reference(family, seed=seed, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    generation = {"bos_token_id": 0, "eos_token_id": [2, 3], "temperature": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def build_reference(family: str, *, seed: int = 0, **changes: object) -> PreTrainedModel:
    """Make the transformers model of a tiny config with weights that depend on the seed alone."""
    config = tiny_config(family, **changes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            # Wider than the usual 0.02, so that layers matter and greedy choices are clear.
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 0.25)
    return model.eval()


def tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    """Give the transformers config of a tiny model."""
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 48,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": MAX_MODEL_LEN,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        settings["sliding_window"] = None
    return FAMILIES[family](**(settings | changes))


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a written folder with transformers."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Compute float32 logits [len(token_ids), vocab_size] with transformers."""
    return model(torch.tensor([token_ids])).logits[0].float()


def reference_greedy(model: PreTrainedModel, token_ids: list[int], num_tokens: int) -> list[int]:
    """Continue a prompt greedily with transformers, past any end token, computing the whole text each time."""
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(int(reference_logits(model, token_ids + output)[-1].argmax()))
    return output


def build_tokenizer() -> Tokenizer:
    """Train a byte-level BPE tokenizer of exactly VOCAB_SIZE ids; ids 0 to 3 are special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": BOS,
        "pad_token": EOS,
        "add_bos_token": False,
        "model_max_length": MAX_MODEL_LEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


# Names of a transformers Llama or Qwen parameter -> names in a GGUF file.
_GGUF_NAMES: Final[Mapping[str, str]] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load_gguf_reference(path: Path) -> PreTrainedModel:
    """Load a GGUF file of the llama architecture into transformers with the gguf package, independent of our reader."""
    reader = gguf.GGUFReader(path)
    value = {key.removeprefix("llama."): field.contents() for key, field in reader.fields.items() if "llama." in key}
    packed = {tensor.name: tensor for tensor in reader.tensors}
    heads = {"q_proj": value["attention.head_count"], "k_proj": value["attention.head_count_kv"]}
    config = LlamaConfig(
        vocab_size=int(packed["token_embd.weight"].shape[1]),
        hidden_size=value["embedding_length"],
        intermediate_size=value["feed_forward_length"],
        num_hidden_layers=value["block_count"],
        num_attention_heads=heads["q_proj"],
        num_key_value_heads=heads["k_proj"],
        max_position_embeddings=value["context_length"],
        rms_norm_eps=value["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": value["rope.freq_base"]},
        tie_word_embeddings="output.weight" not in packed,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = packed[_gguf_name(name)]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(parameter.shape)
            num_heads = heads.get(name.split(".")[-2])
            if num_heads is not None:
                values = values.reshape(num_heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(parameter.shape)
            parameter.copy_(torch.from_numpy(np.array(values, dtype=np.float32)))
    return model.eval()


def _gguf_name(name: str) -> str:
    """Translate a transformers parameter name to the one in a GGUF file."""
    stem, _, suffix = name.rpartition(".")
    layer = ""
    if stem.startswith("model.layers."):
        index, _, stem = stem.removeprefix("model.layers.").partition(".")
        layer = f"blk.{index}."
    return f"{layer}{_GGUF_NAMES[stem]}.{suffix}"


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_divisors: Sequence[float] | None = None,
    **changes: object,
) -> PreTrainedModel:
    """Write a seeded model as a GGUF file and give the transformers model with the very same (rounded) weights.

    Matrices are stored as kind; their rows must be whole blocks of it, so pick sizes that are multiples of 32.
    rope_divisors [head_dim / 2] are written as the file's own table of rotary scaling.
    """
    model = build_reference(family, seed=seed, **changes)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama" if family == "mistral" else family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_vocabulary(writer)
    if rope_divisors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_divisors, dtype=np.float32))
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            stored = _store(writer, name, parameter.numpy(), kind, heads if family in ("llama", "mistral") else {})
            parameter.copy_(torch.from_numpy(stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _store(
    writer: gguf.GGUFWriter,
    name: str,
    values: np.ndarray,
    kind: gguf.GGMLQuantizationType,
    interleaved_heads: Mapping[str, int],
) -> np.ndarray:
    """Add one tensor to the file; gives the values that a reader must find there, in their original order."""
    num_heads = interleaved_heads.get(name.split(".")[-2])
    if num_heads is not None:
        values = np.ascontiguousarray(values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2))
        values = values.reshape(-1, *values.shape[3:])
    chosen = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
    packed = gguf.quants.quantize(values, chosen)
    writer.add_tensor(_gguf_name(name), packed, raw_dtype=chosen)
    restored = gguf.quants.dequantize(packed, chosen).reshape(values.shape)
    if num_heads is not None:
        restored = restored.reshape(num_heads, -1, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(restored, dtype=np.float32)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    tokenizer = build_tokenizer()
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
