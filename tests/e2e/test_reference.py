"""The built-in model against transformers in float32: the same GGUF file, dequantised by an independent reader."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from serve.config import read_environment
from serve.model_store import resolve_model
from tests.e2e.client import choice_of, complete, post, together, tokenize
from tests.e2e.server import BUILT_IN, Server

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5,",
    "SELECT name FROM users WHERE",
    "Dear Sir or Madam,\n\n",
    "\u4eca\u65e5\u306f\u5929\u6c17\u304c",
    "Der schnelle braune Fuchs",
    "La vie est",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043a\u0430\u043a",
    "\U0001f600\U0001f389 party time",
    "a",
    " ",
    "\n\n\n",
    "{'key': [1, 2, {'x':",
    "<html><body><h1>",
    "AAAAAAAAAAAAAAAAAAAAAAAA",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Q: What is the boiling point of water?\nA:",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n-",
    "import numpy as np\nimport torch\n\nclass Model(",
    "In 1969, humans first",
    "3.14159265358979323846",
    "To be, or not to be, that is the",
    "Roses are red,\nViolets are",
    "x^2 + y^2 =",
    "The mitochondria is the",
    "#!/bin/bash\nset -e\nfor f in",
    "WARNING: this is a",
    "mixed CASE and    spaces\tand tabs",
    "https://example.com/path?query=",
    "\u00bfD\u00f3nde est\u00e1 la",
    "\uc548\ub155\ud558\uc138\uc694",
    "\u0645\u0631\u062d\u0628\u0627",
    "e = mc",
    "Lorem ipsum dolor sit amet,",
    'She said, "I',
    "Monday, Tuesday, Wednesday,",
    "red green blue red green blue red green",
    "0x1F + 0b1010 =",
    "| a | b |\n|---|---|\n|",
    "Once upon a midnight dreary, while I pondered,",
    "The following is a list of animals: cat, dog,",
    "C:\\Users\\name\\",
    "f(x) = \\frac{1}{",
    "What is love? Baby don't",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "zzzz qqqq xxxx",
    "\u03b1 \u03b2 \u03b3 \u03b4",
    "The end",
]

# Activations of 16 bits move a log-probability by up to 6e-3 here (mean divergence 6e-8); a wrong weight or position
# moves it by more than 0.1.
LOGPROB_TOLERANCE = 2e-2
CLEAR_GAP = 2e-2
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def gguf(built_in_model: str) -> Path:
    return resolve_model(built_in_model, None, read_environment())


# Names in the file -> names in transformers.
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def reference_state(reader: GGUFReader, heads: dict[str, int]) -> dict[str, torch.Tensor]:
    """Dequantise all tensors with the gguf package; rows of q and k go back from pairs to halves."""
    state = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        stem = tensor.name.removesuffix(".weight")
        if not stem.startswith("blk."):
            state[f"{TOP_NAMES[stem]}.weight"] = values
            continue
        _, layer, kind = stem.split(".")
        if kind in heads:
            pairs = values.reshape(heads[kind], -1, 2, values.shape[-1])
            values = pairs.transpose(1, 2).reshape(values.shape).contiguous()
        state[f"model.layers.{layer}.{LAYER_NAMES[kind]}.weight"] = values
    return state


@pytest.fixture(scope="module")
def reference(gguf: Path) -> LlamaForCausalLM:
    # Two threads of the reference's own pool wait for each other by spinning, which collapses beside a busy server.
    torch.set_num_threads(1)
    reader = GGUFReader(gguf)

    def value(name: str) -> float:
        return float(reader.fields[f"llama.{name}"].contents())

    config = LlamaConfig(
        vocab_size=int(value("vocab_size")),
        hidden_size=int(value("embedding_length")),
        intermediate_size=int(value("feed_forward_length")),
        num_hidden_layers=int(value("block_count")),
        num_attention_heads=int(value("attention.head_count")),
        num_key_value_heads=int(value("attention.head_count_kv")),
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
        max_position_embeddings=int(value("context_length")),
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    missing, unexpected = model.load_state_dict(reference_state(reader, heads), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def reference_tokenizer(gguf: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def reference_logprobs(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """Give log-softmax after each token, [len(ids), vocabulary]."""
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)


def test_there_are_fifty_varied_prompts() -> None:
    assert len(set(PROMPTS)) == 50


def test_token_ids_equal_the_reference_tokenizer(server: Server, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    for prompt in PROMPTS:
        expected = reference_tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert tokenize(server, prompt, add_special_tokens=False) == expected, prompt


def test_rendered_chat_equals_the_reference_template(
    server: Server, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    conversation += [{"role": "user", "content": "\U0001f600 bye"}]
    text = reference_tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    expected = reference_tokenizer(text, add_special_tokens=False)["input_ids"]
    assert post(server, "/tokenize", {"messages": conversation}).json()["tokens"] == expected


def test_logprobs_of_fifty_prompts_equal_the_reference(server: Server, reference: LlamaForCausalLM) -> None:
    """At every prompt position the actual token and the best five; after the prompt the best twenty."""
    fields = {"max_tokens": 1, "prompt_logprobs": 5, "logprobs": 20, "return_tokens_as_token_ids": True}
    answers = together(*[partial(complete, server, p, return_token_ids=True, **fields) for p in PROMPTS], limit=8)
    worst = 0.0
    for answer in answers:
        choice = choice_of(answer)
        ids: list[int] = choice["prompt_token_ids"]  # type: ignore[assignment]
        expected = reference_logprobs(reference, ids)
        table: list[dict[str, dict[str, float]]] = choice["prompt_logprobs"]  # type: ignore[assignment]
        for position, entries in enumerate(table[1:]):
            for token, entry in entries.items():
                worst = max(worst, abs(entry["logprob"] - float(expected[position, int(token)])))
        top: dict[str, float] = choice["logprobs"]["top_logprobs"][0]  # type: ignore[index]
        for name, value in top.items():
            worst = max(worst, abs(value - float(expected[-1, int(name.removeprefix("token_id:"))])))
    assert worst < LOGPROB_TOLERANCE


def test_greedy_text_equals_the_reference_wherever_its_choice_is_clear(
    server: Server, reference: LlamaForCausalLM
) -> None:
    """Teacher-forced: where the reference's best two differ clearly, its best is the token that was generated."""
    fields = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "return_token_ids": True}
    answers = together(*[partial(complete, server, p, **fields) for p in PROMPTS], limit=50)
    clear = 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        choice = choice_of(answer)
        prompt_ids: list[int] = choice["prompt_token_ids"]  # type: ignore[assignment]
        output: list[int] = choice["token_ids"]  # type: ignore[assignment]
        expected = reference_logprobs(reference, [*prompt_ids, *output])[len(prompt_ids) - 1 : -1]
        best = expected.topk(2, dim=-1)
        for i, token in enumerate(output):
            if float(best.values[i, 0] - best.values[i, 1]) > CLEAR_GAP:
                clear += 1
                assert token == int(best.indices[i, 0]), f"token {i} after {prompt!r}"
    assert clear > 0.9 * NEW_TOKENS * len(PROMPTS)


def test_built_in_name_is_what_the_reference_loads(gguf: Path) -> None:
    assert gguf.suffix == ".gguf"
    assert BUILT_IN.split("-")[0] in gguf.name.lower()
