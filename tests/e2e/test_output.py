"""Text out of tokens: stop strings, characters, streams (O1 to O8)."""

from __future__ import annotations

import socket

import httpx
import psutil
import pytest

from tests.e2e.client import (
    Json,
    chat,
    choice_of,
    complete,
    read_stream,
    stream_chat,
    stream_complete,
    text_of,
    tokenize,
    usage_of,
)
from tests.e2e.server import Server
from tests.waiting import wait_until

COMPLETIONS = "/v1/completions"
PROMPT = "The three primary colours are"


def greedy_pieces(server: Server, count: int) -> list[str]:
    """Give the greedy continuation of PROMPT token by token."""
    table = choice_of(complete(server, PROMPT, max_tokens=count, logprobs=0))["logprobs"]
    return list(table["tokens"])  # type: ignore[index]


@pytest.fixture
def split_stop(server: Server) -> tuple[str, str]:
    """A stop string that begins inside one token and ends inside the next, and the text before it."""
    pieces = greedy_pieces(server, 12)
    for i in range(2, 11):
        left, right = pieces[i], pieces[i + 1]
        stop = left[-1] + right[:2]
        text = "".join(pieces)
        if len(left) > 1 and len(right) > 2 and text.count(stop) == 1:
            return stop, text[: text.index(stop)]
    raise AssertionError(pieces)


def test_o1_a_stop_string_over_two_tokens_is_never_partly_streamed(server: Server, split_stop: tuple[str, str]) -> None:
    stop, before = split_stop
    plain = complete(server, PROMPT, max_tokens=12, stop=stop)
    stream = stream_complete(server, PROMPT, max_tokens=12, stop=stop)
    assert text_of(plain) == stream.text() == before
    assert choice_of(plain)["finish_reason"] == stream.finish_reason() == "stop"
    assert choice_of(plain)["stop_reason"] == stream.choices()[-1]["stop_reason"] == stop
    assert usage_of(plain)["completion_tokens"] < 12


def test_o2_the_stop_string_is_kept_on_request(server: Server, split_stop: tuple[str, str]) -> None:
    stop, before = split_stop
    fields = {"max_tokens": 12, "stop": [stop], "include_stop_str_in_output": True}
    assert text_of(complete(server, PROMPT, **fields)) == before + stop
    assert stream_complete(server, PROMPT, **fields).text() == before + stop


def test_o1_text_that_only_might_have_become_a_stop_string_is_released(server: Server) -> None:
    text = "".join(greedy_pieces(server, 12))
    stop = text[-2:] + "\u2603"
    stream = stream_complete(server, PROMPT, max_tokens=12, stop=stop)
    assert stream.text() == text
    assert stream.finish_reason() == "length"


def test_o3_streamed_chat_equals_the_plain_answer(server: Server) -> None:
    plain = chat(server, "Describe the sea.", max_tokens=40)
    options = {"include_usage": True}
    stream = stream_chat(server, "Describe the sea.", max_tokens=40, stream_options=options)
    assert stream.text() == text_of(plain)
    assert stream.finish_reason() == choice_of(plain)["finish_reason"]
    usage = stream.chunks[-1]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == usage_of(plain)[name]  # type: ignore[index]


def test_o3_streamed_logprobs_equal_the_plain_ones(server: Server) -> None:
    fields = {"max_tokens": 12, "logprobs": 2, "return_token_ids": True}
    plain = choice_of(complete(server, PROMPT, **fields))
    stream = stream_complete(server, PROMPT, **fields)
    assert stream.token_ids() == plain["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [v for c in stream.choices() if c["logprobs"] for v in c["logprobs"][name]]  # type: ignore[index]
        assert joined == plain["logprobs"][name]  # type: ignore[index]


# Each of these characters is several tokens of the built-in vocabulary.
@pytest.mark.parametrize("character", ["\U0001f389", "\u9f98", "\U0001f1e9\U0001f1ea"])
def test_o4_characters_of_several_tokens_come_whole(server: Server, character: str) -> None:
    assert len(tokenize(server, character)) > 1
    prompt = f"{character}\n" * 12
    fields = {"max_tokens": 24, "ignore_eos": True}
    stream = stream_complete(server, prompt, **fields)
    assert character[0] in stream.text()
    assert "\ufffd" not in stream.text()
    assert stream.text() == text_of(complete(server, prompt, **fields))


def test_o5_a_stream_interval_gathers_tokens(server: Server, plain: Server) -> None:
    """The comparison server gathers ten: 1, then 10 each, then the rest of 36 tokens."""
    fields = {"max_tokens": 36, "ignore_eos": True, "return_token_ids": True}
    each = stream_complete(server, PROMPT, **fields)
    gathered = stream_complete(plain, PROMPT, **fields)
    assert gathered.text() == each.text()
    sizes = [len(c["token_ids"] or []) for c in gathered.choices()]  # type: ignore[arg-type]
    assert [n for n in sizes if n] == [1, 10, 10, 10, 5]
    assert len(each.choices()) > 20


def test_o7_a_stop_tokens_text_is_absent_and_its_id_present(server: Server) -> None:
    pieces = greedy_pieces(server, 6)
    ids = choice_of(complete(server, PROMPT, max_tokens=6, return_token_ids=True))["token_ids"]
    assert isinstance(ids, list)
    at = next(i for i in range(1, 6) if ids[i] not in ids[:i])
    fields = {"max_tokens": 20, "stop_token_ids": [ids[at]], "skip_special_tokens": False, "return_token_ids": True}
    cut = choice_of(complete(server, PROMPT, **fields))
    assert cut["text"] == "".join(pieces[:at])
    assert cut["token_ids"] == ids[: at + 1]
    assert cut["stop_reason"] == ids[at]
    kept = choice_of(complete(server, PROMPT, include_stop_str_in_output=True, **fields))
    assert kept["text"] == "".join(pieces[: at + 1])


def test_o8_a_stop_string_frees_the_slot_at_once(server: Server) -> None:
    answer = complete(server, "1, 2, 3, 4, 5,", max_tokens=4000, stop=" 9", ignore_eos=True)
    assert choice_of(answer)["stop_reason"] == " 9"
    server.wait_idle()
    assert usage_of(answer)["completion_tokens"] < 40


def test_the_first_listed_stop_string_does_not_hide_an_earlier_cut(server: Server) -> None:
    """The stop strings of one token: the text ends before whichever is found."""
    pieces = greedy_pieces(server, 8)
    word = pieces[4].strip()
    answer = complete(server, PROMPT, max_tokens=8, stop=["\u2603", word])
    assert choice_of(answer)["stop_reason"] == word
    assert word not in text_of(answer)


def test_several_choices_stream_independently(server: Server) -> None:
    fields = {"n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 10}
    plain = chat(server, "Name an animal.", **fields)
    stream = stream_chat(server, "Name an animal.", **fields)
    assert [stream.text(i) for i in range(3)] == [text_of(plain, i) for i in range(3)]
    assert all(stream.finish_reason(i) in ("stop", "length") for i in range(3))


def test_o6_a_slow_reader_loses_nothing_and_others_are_served(tiny: Server) -> None:
    """The reader takes nothing until 4 times 2,500 tokens with 20 logprobs each, 6 MB, have been made."""
    fields: Json = {"max_tokens": 2500, "ignore_eos": True, "logprobs": 20, "return_token_ids": True, "n": 4}
    whole = complete(tiny, "abc", **fields)
    api_server = psutil.Process(tiny.process.pid)
    before = api_server.memory_info().rss
    # A small receive window, so that what nobody reads stays in the server.
    transport = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)])
    with httpx.Client(base_url=tiny.base_url, transport=transport, timeout=60) as slow:
        body = {"prompt": "abc", "temperature": 0, "stream": True, **fields}
        with slow.stream("POST", COMPLETIONS, json=body) as response:
            wait_until(lambda: tiny.metric("num_requests_running") == 1, 10, "it runs")
            while tiny.metric("num_requests_running") > 0:
                complete(tiny, "other", max_tokens=2)
            assert api_server.memory_info().rss - before < 48 << 20
            stream = read_stream(response)
    for index in range(4):
        assert stream.token_ids(index) == choice_of(whole, index)["token_ids"]
        assert stream.text(index) == text_of(whole, index)
    assert len(stream.chunks) < 4 * 2500
