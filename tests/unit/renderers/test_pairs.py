"""Texts and pairs for pooling models: ids, segments and truncation as the tokenizers library has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from serve.checkpoint import Checkpoint, ModelArch
from serve.errors import InvalidRequest
from serve.renderers.pairs import encode_pair
from serve.renderers.tokenizer import Tokenizer, load_tokenizer
from tests.pooling_checkpoints import WORD_TOKENS, write_word_tokenizer

ARCH = ModelArch("BertModel", len(WORD_TOKENS), 8, 8, 1, 1, 1, 8, 1e-5, 64, 1e4)
LONG, SHORT = "the old city of berlin is big and the river is blue", "how many people live"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    write_word_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(Checkpoint("words", str(folder), "safetensors", (), ARCH), None)


def reference(folder: Path, texts: tuple[str, ...], keep: int | None, side: str) -> tuple[list[int], int | None]:
    """Give ids and the start of the second segment by the library's own truncation."""
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.no_padding()
    backend.no_truncation()
    if keep is not None:
        backend.enable_truncation(keep, strategy="longest_first", direction=side)
    encoded = backend.encode(*texts)
    return encoded.ids, encoded.type_ids.index(1) if 1 in encoded.type_ids else None


@pytest.mark.parametrize("texts", [(LONG,), (SHORT, LONG), (LONG, SHORT), (LONG, LONG), (SHORT, SHORT)])
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_length_is_cut_as_the_library_does(
    folder: Path, tokenizer: Tokenizer, texts: tuple[str, ...], side: str
) -> None:
    num_special = 3 if len(texts) == 2 else 2
    for keep in (None, *range(num_special + 1, 32)):
        encoded = encode_pair(tokenizer, texts, add_special_tokens=True, keep=keep, side=side)
        assert (encoded.token_ids, encoded.second_start) == reference(folder, texts, keep, side)
        assert keep is None or len(encoded.token_ids) <= keep


def test_saved_truncation_and_padding_of_the_tokenizer_are_ignored(folder: Path, tokenizer: Tokenizer) -> None:
    assert json.loads((folder / "tokenizer.json").read_text())["truncation"]["max_length"] == 16
    text = "the cat " * 20
    assert len(encode_pair(tokenizer, (text,), add_special_tokens=True, keep=None, side="right").token_ids) == 42
    assert len(encode_pair(tokenizer, ("cat",), add_special_tokens=True, keep=None, side="right").token_ids) == 3


def test_without_special_tokens_all_room_is_for_text(tokenizer: Tokenizer) -> None:
    encoded = encode_pair(tokenizer, ("the cat eats",), add_special_tokens=False, keep=2, side="right")
    assert encoded.token_ids == [WORD_TOKENS.index("the"), WORD_TOKENS.index("cat")]


@pytest.mark.parametrize(("texts", "keep"), [(("cat",), 2), (("cat", "dog"), 3)])
def test_no_room_beside_the_special_tokens_is_refused(tokenizer: Tokenizer, texts: tuple[str, ...], keep: int) -> None:
    with pytest.raises(InvalidRequest, match=f"truncate_prompt_tokens={keep} leaves no room") as caught:
        encode_pair(tokenizer, texts, add_special_tokens=True, keep=keep, side="right")
    assert caught.value.param == "truncate_prompt_tokens"
    assert encode_pair(tokenizer, texts, add_special_tokens=True, keep=keep + 1, side="right").token_ids


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    encoded = encode_pair(tokenizer, ("cat \ud800 dog",), add_special_tokens=False, keep=None, side="right")
    assert WORD_TOKENS.index("dog") in encoded.token_ids
