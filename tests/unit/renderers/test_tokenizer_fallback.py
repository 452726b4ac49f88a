"""Checkpoints that only have a SentencePiece tokenizer.model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sentencepiece
from transformers import LlamaTokenizer

from serve.errors import ConfigError, ExitCode
from serve.renderers.tokenizer import FastTokenizer
from serve.renderers.tokenizer_fallback import load_with_transformers
from serve.renderers.tokenizer_files import load_folder
from tests.unit.renderers.samples import varied_texts


def test_ids_and_text_equal_transformers_and_sentencepiece(sentencepiece_model: Path) -> None:
    tokenizer = FastTokenizer(load_folder(sentencepiece_model))
    reference = LlamaTokenizer.from_pretrained(sentencepiece_model)
    original = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model / "tokenizer.model"))
    for text in (t for t in varied_texts() if "\x00" not in t):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference(text, add_special_tokens=False)["input_ids"], text
        if text and not text.startswith(" "):
            assert ids == original.encode(text), text
        assert tokenizer.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)


def test_special_tokens_come_from_the_configuration(sentencepiece_model: Path) -> None:
    tokenizer = FastTokenizer(load_folder(sentencepiece_model))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.all_special_ids >= {0, 1, 2}


def test_missing_transformers_says_how_to_get_it(sentencepiece_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install serve\[transformers\]") as caught:
        load_with_transformers(sentencepiece_model)
    assert caught.value.exit_code == ExitCode.MODEL


def test_unusable_model_file_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"not a protobuf")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ConfigError) as caught:
        load_with_transformers(tmp_path)
    assert caught.value.exit_code == ExitCode.MODEL
