"""Pairs of ways to the same text: alone and in a batch, streamed and not, several choices and several requests."""

from __future__ import annotations

from functools import partial

from tests.e2e.client import (
    chat,
    choice_of,
    complete,
    stream_chat,
    stream_complete,
    text_of,
    together,
    usage_of,
)
from tests.e2e.server import Server

STARTS = ["Once", "The sun", "def f(x):", "1, 2,", "Dear", "In 1920", "A cat", "\u65e5\u672c"]
PROMPTS = [f"{start} number {i}" for i in range(8) for start in STARTS]


def test_alone_equals_in_a_batch_of_32(server: Server) -> None:
    prompts = PROMPTS[:32]
    batch = complete(server, prompts, max_tokens=16, ignore_eos=True)
    assert usage_of(batch)["completion_tokens"] == 32 * 16
    for index in range(0, 32, 4):
        assert text_of(batch, index) == text_of(complete(server, prompts[index], max_tokens=16, ignore_eos=True))


def test_w3_a_batch_of_64_gives_each_request_its_own_text(server: Server) -> None:
    batch = [text_of(a) for a in together(*[partial(complete, server, p, max_tokens=8) for p in PROMPTS])]
    for index in range(0, 64, 8):
        assert batch[index] == text_of(complete(server, PROMPTS[index], max_tokens=8))


def test_four_choices_equal_four_seeded_requests(server: Server) -> None:
    fields = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 12}
    several = chat(server, "Invent a name.", n=4, seed=40, **fields)
    singles = together(*[partial(chat, server, "Invent a name.", seed=40 + i, **fields) for i in range(4)])
    assert [text_of(several, i) for i in range(4)] == [text_of(a) for a in singles]


def test_streamed_equals_plain_for_every_kind_of_end(server: Server) -> None:
    asks = [
        {"prompt": "The capital of France is", "max_tokens": 20},
        {"prompt": "1, 2, 3, 4,", "max_tokens": 30, "stop": ["8", "9"]},
        {"prompt": "1, 2, 3, 4,", "max_tokens": 30, "stop": "9", "include_stop_str_in_output": True},
        {"prompt": "caf\u00e9 \U0001f600 \U0001f600 \U0001f600", "max_tokens": 20},
        {"prompt": "Sample:", "max_tokens": 20, "temperature": 1.1, "seed": 9},
        {"prompt": "Penalties:", "max_tokens": 20, "presence_penalty": 1.0, "repetition_penalty": 1.2},
    ]
    for fields in asks:
        plain = choice_of(complete(server, **fields))  # type: ignore[arg-type]
        stream = stream_complete(server, **fields)  # type: ignore[arg-type]
        assert stream.text() == plain["text"]
        assert stream.finish_reason() == plain["finish_reason"]
        assert stream.choices()[-1].get("stop_reason") == plain["stop_reason"]


def test_streamed_chat_equals_plain_chat_with_an_end_token(server: Server) -> None:
    plain = chat(server, "What is 2+2? Answer with the number only.", max_tokens=200)
    stream = stream_chat(server, "What is 2+2? Answer with the number only.", max_tokens=200)
    assert choice_of(plain)["finish_reason"] == stream.finish_reason() == "stop"
    assert stream.text() == text_of(plain)


def test_preempted_and_chunked_together_equal_the_free_run(server: Server, tight: Server) -> None:
    """Long prompts and outputs at once through 40 blocks: chunked, preempted, resumed from cached blocks."""
    prompts = [f"{'One two three four five six seven. ' * 8}Part {i}:" for i in range(5)]
    before = tight.metric("num_preemptions_total")
    pressed = together(*[partial(complete, tight, p, max_tokens=150, ignore_eos=True) for p in prompts])
    assert tight.metric("num_preemptions_total") > before
    free = together(*[partial(complete, server, p, max_tokens=150, ignore_eos=True) for p in prompts])
    assert [text_of(a) for a in pressed] == [text_of(a) for a in free]
