"""Vocabularies inside GGUF files give the ids of the tokenizer they were made from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from serve.checkpoint import Checkpoint, ModelArch
from serve.errors import ConfigError, ExitCode
from serve.renderers.gguf_vocab import SPLIT_RULES, build_gguf_tokenizer
from serve.renderers.tokenizer import FastTokenizer, load_tokenizer
from serve.renderers.tokenizer import Tokenizer as TokenizerProtocol
from tests.unit.renderers.conftest import SPECIAL, byte_level_split, train_byte_level
from tests.unit.renderers.samples import varied_texts

ARCH = ModelArch("LlamaForCausalLM", 700, 8, 8, 1, 1, 1, 8, 1e-5, 64, 1e4)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def regex_split(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# tokenizer.ggml.pre to the split as the model families publish it in tokenizer.json, from transformers where it has it.
PUBLISHED = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": byte_level_split,
    "qwen2": lambda: regex_split(PRETOKENIZE_REGEX),
    "llama-bpe": lambda: regex_split(TikTokenConverter().pattern),
}


def load(file: Path) -> TokenizerProtocol:
    return load_tokenizer(Checkpoint("m", str(file.parent), "gguf", (str(file),), ARCH), None)


def byte_level_metadata(tokenizer: Tokenizer) -> dict[str, object]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [tokenizer.id_to_token(i) or "" for i in range(tokenizer.get_vocab_size())]
    types = [CONTROL if t in SPECIAL else USER_DEFINED if t == "<tool_call>" else NORMAL for t in tokens]
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    return {"tokens": tokens, "token_type": types, "merges": merges}


def write_gguf(file: Path, kind: str, lists: dict[str, object], **scalars: object) -> Path:
    """Write a GGUF file that has a vocabulary only."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_tokenizer_model(kind)
    for name, values in lists.items():
        writer.add_array(f"tokenizer.ggml.{name}", values)
    for name, value in scalars.items():
        key = name if name.startswith("tokenizer.") else f"tokenizer.ggml.{name}"
        writer.add_key_value(key, value, TYPES[type(value)])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


TYPES = {str: gguf.GGUFValueType.STRING, bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32}


@pytest.mark.parametrize("pre", list(PUBLISHED))
def test_byte_level_vocabulary_gives_the_ids_of_its_source(pre: str, tmp_path: Path) -> None:
    source = train_byte_level(PUBLISHED[pre]())
    if pre == "qwen2":
        source.normalizer = normalizers.NFC()
    file = write_gguf(
        tmp_path / "v.gguf",
        "gpt2",
        byte_level_metadata(source),
        pre=pre,
        bos_token_id=1,
        eos_token_id=2,
        add_bos_token=False,
    )
    tokenizer = load(file)
    for text in [*varied_texts(), "<|im_start|>user\nhi<|im_end|><tool_call>"]:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == source.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=True) == source.decode(ids), text


def test_special_tokens_and_template_come_from_the_file(tmp_path: Path) -> None:
    lists = byte_level_metadata(train_byte_level(byte_level_split()))
    scalars = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_bos_token": True,
        "add_eos_token": True,
    }
    templates = {"tokenizer.chat_template": "main", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = load(write_gguf(tmp_path / "v.gguf", "gpt2", lists, pre="smollm", **scalars, **templates))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_tokens["unk_token"] == "<|endoftext|>"
    assert tokenizer.chat_template == {"default": "main", "tool_use": "tools"}
    assert tokenizer.all_special_ids == {0, 1, 2}
    assert tokenizer.encode("", add_special_tokens=True) == [1, 2]
    assert tokenizer.decode([700], skip_special_tokens=True) == "<tool_call>"


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", [1]), ("smollm", []), (None, [])])
def test_bos_is_added_by_default_where_the_family_does(pre: str | None, expected: list[int], tmp_path: Path) -> None:
    lists = byte_level_metadata(train_byte_level(byte_level_split()))
    scalars = {"bos_token_id": 1} | ({} if pre is None else {"pre": pre})
    assert (
        load(write_gguf(tmp_path / "v.gguf", "gpt2", lists, **scalars)).encode("", add_special_tokens=True) == expected
    )


def sentencepiece_lists(original: sentencepiece.SentencePieceProcessor) -> dict[str, object]:
    ids = range(original.get_piece_size())
    kinds = (
        (original.is_unknown, UNKNOWN),
        (original.is_control, CONTROL),
        (original.is_byte, BYTE),
    )
    return {
        "tokens": [original.id_to_piece(i) for i in ids],
        "scores": [original.get_score(i) for i in ids],
        "token_type": [next((kind for test, kind in kinds if test(i)), NORMAL) for i in ids],
    }


def test_sentencepiece_vocabulary_gives_the_ids_of_its_source(sentencepiece_model: Path, tmp_path: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model / "tokenizer.model"))
    lists = sentencepiece_lists(original)
    tokenizer = load(
        write_gguf(tmp_path / "v.gguf", "llama", lists, bos_token_id=1, eos_token_id=2, unknown_token_id=0)
    )
    for text in (t for t in varied_texts() if t and "\x00" not in t):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == original.encode(text), text
        assert tokenizer.encode(text, add_special_tokens=True) == [1, *ids]
        assert tokenizer.decode(ids, skip_special_tokens=True) == original.decode(ids), text


def test_sentencepiece_vocabulary_without_prefix_space(sentencepiece_model: Path, tmp_path: Path) -> None:
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model / "tokenizer.model"))
    file = write_gguf(tmp_path / "v.gguf", "llama", sentencepiece_lists(original), add_space_prefix=False)
    tokenizer = load(file)
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.id_to_token(ids[0]).startswith("h")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello"
    assert tokenizer.decode(tokenizer.encode(" hello", add_special_tokens=False), skip_special_tokens=True) == " hello"


BPE = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.merges": ["a b"]}


def test_minimal_metadata_is_enough() -> None:
    tokenizer = FastTokenizer(build_gguf_tokenizer(BPE))
    assert tokenizer.encode("abb", add_special_tokens=True) == [2, 1]
    assert tokenizer.eos_token_id is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"tokenizer.ggml.model": None}, "no vocabulary"),
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'; supported: gpt2, llama"),
        ({"tokenizer.ggml.tokens": []}, "empty vocabulary"),
        ({"tokenizer.ggml.tokens": "abc"}, "not a list of str"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "not a list of str"),
        ({"tokenizer.ggml.token_type": [1]}, "3 tokens but 1 token types"),
        ({"tokenizer.ggml.pre": "moon-bpe"}, "split rule 'moon-bpe'"),
        ({"tokenizer.ggml.merges": ["a z"]}, "cannot be used"),
        ({"tokenizer.ggml.merges": ["ab"]}, "cannot be used"),
        ({"tokenizer.ggml.eos_token_id": 3}, "eos_token_id 3 outside its 3 tokens"),
        ({"tokenizer.ggml.eos_token_id": -1}, "eos_token_id -1 outside"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token that is not a boolean"),
        ({"tokenizer.ggml.model": "llama"}, "3 tokens but 0 scores"),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": ["a" * 1025],
                "tokenizer.ggml.scores": [0.0],
            },
            "a token of 1025 characters",
        ),
    ],
)
def test_impossible_metadata_is_a_model_error_with_a_way_out(changes: dict[str, object], match: str) -> None:
    metadata = {k: v for k, v in (BPE | changes).items() if v is not None}
    with pytest.raises(ConfigError, match=match) as caught:
        build_gguf_tokenizer(metadata)
    assert caught.value.exit_code == ExitCode.MODEL


@pytest.mark.parametrize("pre", list(SPLIT_RULES))
def test_every_split_rule_compiles_and_loses_no_text(pre: str) -> None:
    source = train_byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), 300)
    metadata = {f"tokenizer.ggml.{k}": v for k, v in byte_level_metadata(source).items()}
    tokenizer = FastTokenizer(
        build_gguf_tokenizer(metadata | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre})
    )
    for text in varied_texts(60):
        expected = normalizers.NFC().normalize_str(text) if SPLIT_RULES[pre].nfc else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == expected


def test_user_defined_tokens_are_matched_whole_and_not_hidden() -> None:
    metadata = BPE | {"tokenizer.ggml.tokens": ["a", "b", "ab", "<x>"], "tokenizer.ggml.token_type": [1, 1, 1, 4]}
    tokenizer = FastTokenizer(build_gguf_tokenizer(metadata))
    assert tokenizer.encode("a<x>b", add_special_tokens=False) == [0, 3, 1]
    assert tokenizer.decode([3], skip_special_tokens=True) == "<x>"
    assert AddedToken("<x>").content == tokenizer.id_to_token(3)
