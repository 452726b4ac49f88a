"""GET /tokenizer_info, which is there only when the operator asks for it."""

from __future__ import annotations

import asyncio

from tests.fakes import BYTE_VOCAB_SIZE, EOS_ID
from tests.unit.entrypoints.app_client import Reply, make_app


def get(**server: object) -> Reply:
    return asyncio.run(make_app(**server).get("/tokenizer_info"))


def test_path_is_closed_unless_the_operator_opens_it() -> None:
    assert get().status == 404


def test_sizes_special_tokens_and_template_are_given() -> None:
    info = get(enable_tokenizer_info_endpoint=True).json
    assert (info["vocab_size"], info["eos_token_id"], info["eos_token"]) == (BYTE_VOCAB_SIZE, EOS_ID, "<eos>")
    assert info["model_max_length"] == 128
    assert info["chat_template"] is None
