"""What a checkpoint's own files decide: sampling defaults, end tokens, the begin token (I4, I5, R2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.client import choice_of, complete, messages, post, text_of, tokenize, usage_of
from tests.e2e.server import Server, running

BOS, PRIMARY_END, SECONDARY_END = 0, 2, 3


@pytest.fixture(scope="module")
def neutral(tiny_model: Path) -> Iterator[Server]:
    """The same checkpoint with its sampling defaults ignored."""
    flags = ("--generation-config", "vllm", "--kv-cache-memory", "64MiB")
    with running(*flags, model=str(tiny_model)) as server:
        yield server


def sample(server: Server, **fields: object) -> str:
    body = {"prompt": "the other", "max_tokens": 40, "seed": 17, "ignore_eos": True, **fields}
    return str(choice_of(post(server, "/v1/completions", body).json())["text"])


def test_i4_the_checkpoints_temperature_is_the_default(tiny: Server) -> None:
    assert sample(tiny) == sample(tiny, temperature=None) == sample(tiny, temperature=0.6)
    assert sample(tiny) != sample(tiny, temperature=1.0)


def test_i4_generation_config_vllm_ignores_it(tiny: Server, neutral: Server) -> None:
    assert sample(neutral) == sample(neutral, temperature=1.0) == sample(tiny, temperature=1.0)


def test_i5_the_secondary_end_token_is_a_stop_reason_and_the_primary_is_none(tiny: Server, neutral: Server) -> None:
    for server in (tiny, neutral):
        secondary = choice_of(complete(server, "x", max_tokens=5, logit_bias={str(SECONDARY_END): 100}))
        primary = choice_of(complete(server, "x", max_tokens=5, logit_bias={str(PRIMARY_END): 100}))
        assert (secondary["finish_reason"], secondary["stop_reason"]) == ("stop", SECONDARY_END)
        assert (primary["finish_reason"], primary["stop_reason"]) == ("stop", None)


def test_i5_ignore_eos_passes_both_end_tokens(tiny: Server) -> None:
    bias = {str(SECONDARY_END): 100}
    answer = complete(tiny, "x", max_tokens=5, logit_bias=bias, ignore_eos=True)
    assert usage_of(answer)["completion_tokens"] == 5


def test_r2_raw_text_gets_one_begin_token_and_a_rendered_chat_none(tiny: Server) -> None:
    with_bos = tokenize(tiny, "the other")
    without = tokenize(tiny, "the other", add_special_tokens=False)
    assert with_bos == [BOS, *without]
    asked = {"max_tokens": 1, "return_token_ids": True}
    assert choice_of(complete(tiny, "the other", **asked))["prompt_token_ids"] == with_bos
    bare = complete(tiny, "the other", add_special_tokens=False, **asked)
    assert choice_of(bare)["prompt_token_ids"] == without
    already = complete(tiny, "<|endoftext|>the other", **asked)
    assert choice_of(already)["prompt_token_ids"] == with_bos
    talk = post(tiny, "/v1/chat/completions", {"messages": messages("the other"), **asked}).json()
    assert BOS not in talk["prompt_token_ids"]


def test_several_prompts_of_ids_need_no_tokenizer(tiny: Server) -> None:
    answer = complete(tiny, [[5, 6, 7], [8, 9]], max_tokens=3, ignore_eos=True)
    assert usage_of(answer)["prompt_tokens"] == 5
    assert text_of(answer, 0) == text_of(complete(tiny, [5, 6, 7], max_tokens=3, ignore_eos=True))
