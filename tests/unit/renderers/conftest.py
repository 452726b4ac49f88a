"""Small real tokenizers, trained once: byte-level BPE in the tokenizers library, BPE in SentencePiece."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from serve.renderers.tokenizer import FastTokenizer
from serve.renderers.tokenizer_files import load_folder
from tests.unit.renderers.samples import varied_texts

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CORPUS_SEED = 1


def train_byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, vocab_size: int = 700) -> Tokenizer:
    """Train byte-level BPE over the sample texts with a given split rule."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(varied_texts(800, seed=CORPUS_SEED), trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return tokenizer


def byte_level_split() -> pre_tokenizers.PreTokenizer:
    """SmolLM's published split: digits alone, then GPT-2's."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


@pytest.fixture(scope="session")
def bpe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with a byte-level tokenizer.json that adds a BOS, its configuration and a template."""
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer = train_byte_level(byte_level_split())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False},
        "pad_token": "<|endoftext|>",
        "chat_template": "{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def bpe(bpe_folder: Path) -> FastTokenizer:
    """The tokenizer of bpe_folder."""
    return FastTokenizer(load_folder(bpe_folder))


@pytest.fixture(scope="session")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SentencePiece BPE tokenizer.model as Llama 2 has it (byte fallback), and no tokenizer.json."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    corpus = folder / "corpus.txt"
    lines = [" ".join(text.split()) for text in varied_texts(800, seed=CORPUS_SEED) if "\x00" not in text]
    corpus.write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        pad_id=-1,
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def spm(sentencepiece_model: Path) -> FastTokenizer:
    """The tokenizer of sentencepiece_model."""
    return FastTokenizer(load_folder(sentencepiece_model))
